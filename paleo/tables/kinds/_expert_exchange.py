"""Exchange of tokens between the ranks of a mixture's experts, each direction by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.pricing.exchanges import (
    MULTIPROCESSORS,
    ExchangeLinks,
    TokenExchangeParameters,
    exchange_links,
    expert_exchange_time,
    visited_groups,
)
from paleo.pricing.kernels import DeviceFigures
from paleo.specs.system import load_system
from paleo.tables.cells import Array, map_words, number, text
from paleo.tables.kernels import KINDS, FitPlan, Fitted, TableKind

#: Servers whose devices the rows name, and devices of a node of theirs.
SYSTEMS, DEVICES = {"h100-sxm5-80gb": "dgx-h100", "b200": "dgx-b200", "gb200": "gb200-nvl72"}, 8.0
#: Bytes of an element on the wire; DeepEP's rows dispatch fp8 and combine bf16, as its own tests do.
ELEMENT = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
STEPS = {
    "deepep-normal": ("dispatch", "combine"), "deepep-low-latency": ("dispatch", "combine"),
    "nvlink-onesided": ("dispatch", "combine"),
    "nvlink-twosided": ("prepare", "dispatch", "combine", "combine_low_precision"),
}  # fmt: skip


class ExpertExchanges(TableKind[DeviceFigures]):
    """One direction of an exchange of tokens, by library and mode."""

    name: ClassVar[str] = "expert_exchange"
    header: ClassVar[frozenset[str]] = frozenset(
        {"mode", "step", "num_tokens", "hidden_size", "topk", "num_experts", "time_us"}
    )
    reads: ClassVar[str] = "device library version nodes dispatch_sms combine_sms moe_ep_size dtype"
    configuration: ClassVar[tuple[str, ...]] = (
        "mode", "num_tokens", "hidden_size", "topk", "num_experts", "nodes", "moe_ep_size",
    )  # fmt: skip
    sizes: ClassVar[tuple[str, ...]] = ("num_tokens", "hidden_size", "topk", "num_experts")
    families: ClassVar[Mapping[str, type[Any]]] = {
        f"exchange.{mode}.{step}": TokenExchangeParameters for mode, steps in STEPS.items() for step in steps
    }
    host_parameters: ClassVar[tuple[str, ...]] = ("launch",)

    def prepared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """No product is in a row: its format is that of tokens on the wire."""
        return frame.assign(wire=text(frame, "dtype"), dtype="bf16")

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Name exchanges that are unknown, and devices whose server is."""

        def reason(device: str, mode: str, step: str) -> str:
            if device not in SYSTEMS:
                return f"device {device!r}: its server is not known; expected {', '.join(SYSTEMS)}"
            return "" if step in STEPS.get(mode, ()) else f"mode {mode!r}, step {step!r}: not modelled"

        return pd.Series(map_words(frame, ("device", "mode", "step"), reason), index=frame.index, dtype=object)

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Libraries of two clusters: DeepEP over nodes was timed on one of its own."""
        words = map_words(frame, ("version",), lambda version: "graph/nodes" if version == "0.5.0" else "graph")
        return pd.Series(words, index=frame.index, dtype=object)

    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Mode and step of each row."""
        return pd.Series("exchange." + text(frame, "mode") + "." + text(frame, "step"), index=frame.index)

    def fit_plan(self, subject: str, family: str, stack: str, figures: DeviceFigures, fitted: Fitted) -> FitPlan:
        """Fit what a server shows: NICs where there are several nodes, single tokens where counts are all that is
        sent."""
        nodes = () if subject.startswith("h100") and "deepep" in family else ("network", "spread", "hop")
        unseen = ("link", "copies") if family.endswith("prepare") else ("token",)
        return FitPlan(TokenExchangeParameters(), per_stack=("launch",), fixed=(*nodes, *unseen), starts=2, prior=0.2)

    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """No FLOP; the bytes that a rank sends."""
        return np.zeros(len(frame)), _sent(frame)["inside"] + _sent(frame)["across"]

    def ideal_time(self, frame: pd.DataFrame, figures: DeviceFigures) -> Array:
        """Seconds at the datasheet's bandwidth of links and NIC."""
        sent, links = _sent(frame), _links(figures.name)
        wire = np.maximum(sent["linked"] / links.link_bandwidth, sent["across"] / links.nic_bandwidth)
        return np.maximum(wire, np.finfo(np.float64).tiny)

    def time(self, frame: pd.DataFrame, figures: DeviceFigures, parameters: TokenExchangeParameters) -> Array:
        """Seconds of rows of one device, mode and step."""
        copying = np.where(
            text(frame, "step") == "dispatch",
            number(frame, "dispatch_sms", MULTIPROCESSORS), number(frame, "combine_sms", MULTIPROCESSORS),
        )  # fmt: skip
        return expert_exchange_time(
            **_sent(frame), visits=number(frame, "num_tokens") * number(frame, "topk"), nodes=_nodes(frame),
            multiprocessors=copying, links=_links(figures.name), parameters=parameters,
        )  # fmt: skip


@cache
def _links(device: str) -> ExchangeLinks:
    return exchange_links(load_system(SYSTEMS[device]))


def _nodes(frame: pd.DataFrame) -> Array:
    return number(frame, "nodes", 1.0)


def _sent(frame: pd.DataFrame) -> dict[str, Array]:
    """Bytes of a rank by where they go: nothing where counts are exchanged before."""
    step = text(frame, "step").to_numpy(dtype=object)
    stated = (
        text(frame, "wire" if "wire" in frame.columns else "dtype")
        .map(ELEMENT)
        .fillna(ELEMENT["fp8"])
        .to_numpy(dtype=np.float64)
    )
    element = np.select([step == "prepare", step == "combine"], [0.0, ELEMENT["bfloat16"]], stated)
    tokens = number(frame, "num_tokens") * number(frame, "hidden_size") * element
    nodes, top_k, experts = _nodes(frame), number(frame, "topk"), number(frame, "num_experts")
    ranks = np.where(number(frame, "moe_ep_size", 0.0) > 0, number(frame, "moe_ep_size", 0.0), DEVICES * nodes)
    each_expert = (text(frame, "mode") == "deepep-low-latency").to_numpy(dtype=bool)
    inside = tokens * np.where(each_expert, top_k / nodes, visited_groups(ranks, experts, top_k))
    across = tokens * (1.0 - 1.0 / nodes) * np.where(each_expert, top_k, visited_groups(nodes, experts, top_k))
    return {"inside": inside, "linked": inside * (1.0 - 1.0 / ranks), "across": across}


KINDS.register(ExpertExchanges.name)(ExpertExchanges())
