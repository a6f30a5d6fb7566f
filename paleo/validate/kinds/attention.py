"""Tables of fused attention: context (causal prefill), encoder (not causal) and generation (one token to a cache)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pandas as pd

from paleo.pricing.attention import (
    DecodeParameters,
    PrefillParameters,
    attention_decode_time,
    attention_prefill_time,
    default_kernel,
)
from paleo.pricing.parameters import DeviceFigures
from paleo.validate.kinds.base import KINDS, Array, FitPlan, Fitted, TableKind, as_timed, number, text

PHASES = ("context", "encoder", "generation")
DTYPE_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
#: Beginnings of device names by the architecture that decides which kernel a library picks.
HOPPER, BLACKWELL = ("h100", "h200", "h800", "h20", "gh200"), ("b100", "b200", "b300", "gb200", "gb300")
#: How libraries name their kernels; without a name a library picks by architecture.
NAMED = (("fa4", "fa4"), ("fa3", "fa3"), ("fa2", "fa2"), ("trtllm", "fa4"), ("tensorrt", "fa4"), ("flashinfer", "fa2"))


class AttentionTable(TableKind[DeviceFigures]):
    """Attention rows; families are ``attention.<kernel>.<phase>``."""

    name = "attention"
    header = frozenset({"phase", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal"})
    configuration = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal")
    sizes: ClassVar = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
    families: ClassVar = {
        f"attention.{kernel}.{phase}": DecodeParameters if phase == "decode" else PrefillParameters
        for kernel in ("fa2", "fa3", "fa4")
        for phase in ("prefill", "encoder", "decode")
    }
    host_parameters = ("launch_time",)

    def start(
        self, family: str, stack: str, figures: DeviceFigures
    ) -> tuple[PrefillParameters | DecodeParameters, tuple[str, ...]]:
        """Where a fit begins, and the parameters that it leaves there: rows of this kind do not tell them apart."""
        _, kernel, phase = family.split(".")
        if phase == "decode":
            fixed = {
                "fa2": ("scan_cycles", "sequence_time"),
                "fa3": ("kernel_time", "scan_cycles"),
                "fa4": ("kernel_time", "sequence_time"),
            }
            return DecodeParameters(), fixed[kernel]
        silent = ("write_latency",) if phase == "encoder" else ("padding_time", "padded_tile_cycles")
        return PrefillParameters(), ("exp_cycles", *silent, *(("combine_time",) if kernel == "fa2" else ()))

    def fit_plan(self, subject: str, family: str, stack: str, figures: DeviceFigures, fitted: Fitted) -> FitPlan:
        """As ``start`` says."""
        start, fixed = self.start(family, stack, figures)
        return FitPlan(start, fixed=fixed, training_rows=900, prior=0.3)

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        reason = pd.Series("", index=frame.index, dtype=object)
        reason[~text(frame, "phase").isin(PHASES)] = "unknown phase"
        reason[~text(frame, "dtype").isin(DTYPE_BYTES)] = "unknown dtype"
        sizes = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
        reason[np.any([~(_loose(frame, name) > 0) for name in sizes], axis=0)] = "size is missing or not above zero"
        return reason

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        eager = text(frame, "library").str.contains("eager", case=False)
        return as_timed(frame, pd.Series(np.where(eager, "eager", "graph"), index=frame.index, dtype=object))

    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        return "attention." + _kernel(frame) + "." + _phase(frame)

    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        b, hq, hk, nq, nk, d = _sizes(frame)
        seen = np.where(_causal(frame), nk - (nq - 1) / 2, nk)
        return 4 * b * hq * nq * seen * d, _element_bytes(frame) * b * d * (2 * hq * nq + 2 * hk * nk)

    def time(
        self, frame: pd.DataFrame, figures: DeviceFigures, parameters: PrefillParameters | DecodeParameters
    ) -> Array:
        b, hq, hk, nq, nk, d = _sizes(frame)
        kernel, window = _kernel(frame).iloc[0] if len(frame) else "fa2", number(frame, "window", 0.0)
        width = _element_bytes(frame)
        if isinstance(parameters, DecodeParameters):
            return attention_decode_time(
                batch=b, query_heads=hq, kv_heads=hk, kv_length=nk, head_dim=d, kernel_name=kernel,
                device=figures, parameters=parameters, window=window, element_bytes=width,
            )  # fmt: skip
        return attention_prefill_time(
            batch=b, query_heads=hq, kv_heads=hk, query_length=nq, kv_length=nk, head_dim=d, causal=_causal(frame),
            kernel_name=kernel, device=figures, parameters=parameters, window=window, element_bytes=width,
            paged=(text(frame, "phase") != "encoder").to_numpy(),
        )  # fmt: skip


def _kernel(frame: pd.DataFrame) -> pd.Series[str]:
    device, library = text(frame, "device"), text(frame, "library").str.lower()
    kernel = pd.Series(default_kernel("Ampere"), index=frame.index, dtype=object)
    kernel[device.str.startswith(HOPPER)] = default_kernel("Hopper")
    kernel[device.str.startswith(BLACKWELL)] = default_kernel("Blackwell")
    named = pd.Series(False, index=frame.index)
    for word, name in NAMED:
        here = library.str.contains(word, regex=False) & ~named
        kernel[here], named = name, named | here
    return kernel


def _phase(frame: pd.DataFrame) -> pd.Series[str]:
    """A causal context of one token runs the decode kernel."""
    phase, one = text(frame, "phase"), number(frame, "q_len") == 1
    decode = (phase == "generation") | ((phase == "context") & one)
    return pd.Series(np.select([decode, phase == "encoder"], ["decode", "encoder"], "prefill"), index=frame.index)


def _sizes(frame: pd.DataFrame) -> tuple[Array, ...]:
    return tuple(number(frame, name) for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim"))


def _loose(frame: pd.DataFrame, column: str) -> Array:
    return pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)


def _element_bytes(frame: pd.DataFrame) -> Array:
    return np.array(text(frame, "dtype").map(DTYPE_BYTES), dtype=np.float64)


def _causal(frame: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return text(frame, "causal").str.lower().isin(["true", "1", "1.0"]).to_numpy(dtype=np.bool_)


KINDS.register("attention")(AttentionTable())
