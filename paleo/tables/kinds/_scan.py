"""Kernels of recurrences with a matrix as state, and of the short convolutions before them, as engines run them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.pricing.kernels import DeviceFigures
from paleo.pricing.scans import (
    CHUNKS,
    ELEMENT,
    STATE,
    ScanParameters,
    chunk_flops,
    chunked_scan_time,
    short_convolution_time,
    token_scan_time,
)
from paleo.tables.cells import Array, map_words, number, text
from paleo.tables.kernels import KINDS, FitPlan, Fitted, TableKind, unpriced_reason

#: Kernels of single tokens, and of convolutions: by blocks of channels (CUDA), by tiles (Triton), of single tokens, of
#: tokens that are verified.
TOKENS = (
    "fused_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule_packed_decode", "fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode", "fused_kda_decode", "kda_fused_decode", "fused_kda_decode_mtp_dspark",
    "fused_sigmoid_gating_delta_rule_update",
)  # fmt: skip
CONVOLUTIONS = ("cuda", "triton", "update", "verify")
#: Releases from which a library has convolutions in Triton, and its rows hold the channels of queries, keys and values;
#: rates of the rows before say that they hold those of the keys.
TRITON = {"sglang": (0, 5, 14), "vllm": (0, 23)}
#: Parameters that each formula lacks.
ABSENT = {
    "chunks": ("host", "block", "first"), "tokens": ("host", "rate", "block"), "conv": ("rate", "step", "first"),
}  # fmt: skip


class Scans(TableKind[DeviceFigures]):
    """Recurrences of Mamba-2, gated delta nets and Kimi delta attention."""

    name: ClassVar[str] = "scan"
    header: ClassVar[frozenset[str]] = frozenset(
        {"scan", "phase", "batch_size", "seq_len", "d_model", "kernel_source", "time_us"}
    )
    reads: ClassVar[str] = (
        "device library version d_state d_conv nheads head_dim n_groups num_k_heads head_k_dim num_v_heads head_v_dim"
    )
    configuration: ClassVar[tuple[str, ...]] = (
        "scan", "batch_size", "seq_len", "nheads", "num_k_heads", "num_v_heads", "d_state",
    )  # fmt: skip
    sizes: ClassVar[tuple[str, ...]] = ("batch_size", "seq_len")
    families: ClassVar[Mapping[str, type[Any]]] = {
        f"scan.{name}": ScanParameters for name in (*CHUNKS, *TOKENS, *(f"conv.{each}" for each in CONVOLUTIONS))
    }
    host_parameters: ClassVar[tuple[str, ...]] = ("launch", "host")

    def prepared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """All rows are in bf16."""
        return frame.assign(dtype="bf16")

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Name kernels that are unknown."""

        def reason(device: str, kernel: str) -> str:
            known = kernel in CHUNKS or kernel in TOKENS or kernel.startswith("causal_conv1d")
            return (
                unpriced_reason(device, "bf16", "", frozenset({"bf16"}))
                if known
                else f"kernel {kernel!r} is not modelled"
            )

        return pd.Series(map_words(frame, ("device", "kernel_source"), reason), index=frame.index, dtype=object)

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Graphs; builds of vLLM before 0.24 issue convolutions of prompts one by one, and what libraries of before
        Triton's convolutions launch takes longer."""
        columns = ("kernel_source", "library", "version", "phase")
        return pd.Series(map_words(frame, columns, _stack), index=frame.index, dtype=object)

    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Kernel of each row."""
        columns = ("kernel_source", "library", "version", "phase")
        return pd.Series(map_words(frame, columns, _family), index=frame.index, dtype=object)

    def fit_plan(self, subject: str, family: str, stack: str, figures: DeviceFigures, fitted: Fitted) -> FitPlan:
        """Fit what the formula of a family has."""
        kernel = family.split(".")[1]
        absent = ABSENT["conv" if kernel == "conv" else "chunks" if kernel in CHUNKS else "tokens"]
        return FitPlan(ScanParameters(), per_stack=("launch", "block"), fixed=absent, starts=3, prior=0.2)

    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """FLOP of chunks; tokens and states once."""
        batch, length, heads, keys, values = _sizes(frame)
        convolved = text(frame, "kernel_source").str.startswith("causal_conv1d").to_numpy(dtype=bool)
        moved = batch * length * _token_bytes(frame) + 2.0 * STATE * batch * heads * keys * values
        flops = batch * np.ceil(length / 64.0) * heads * chunk_flops(np.minimum(length, 64.0), keys, values)
        taps = 2.0 * ELEMENT * batch * length * _channels(frame)
        return np.where(convolved, 0.0, flops), np.where(convolved, taps, moved)

    def time(self, frame: pd.DataFrame, figures: DeviceFigures, parameters: ScanParameters) -> Array:
        """Seconds of rows of one device, kernel and stack."""
        if frame.empty:
            return np.zeros(0)
        batch, length, heads, keys, values = _sizes(frame)
        kernel = str(frame["kernel_source"].iloc[0])
        if kernel.startswith("causal_conv1d"):
            return short_convolution_time(
                batch=batch, length=length, channels=_channels(frame), taps=number(frame, "d_conv", 4.0),
                device=figures, parameters=parameters,
            )  # fmt: skip
        shape: dict[str, Any] = {
            "batch": batch, "heads": heads, "keys": keys, "values": values, "token_bytes": _token_bytes(frame),
            "device": figures, "parameters": parameters,
        }  # fmt: skip
        if kernel in CHUNKS:
            return chunked_scan_time(length=length, chunk=CHUNKS[kernel], **shape)
        return token_scan_time(tokens=length, **shape)


def _sizes(frame: pd.DataFrame) -> tuple[Array, Array, Array, Array, Array]:
    """Sequences, tokens, heads of the state, its rows and columns: those of Mamba-2, or of delta rules."""
    heads = _either(frame, "num_v_heads", "nheads")
    keys, values = _either(frame, "head_k_dim", "d_state"), _either(frame, "head_v_dim", "head_dim")
    return number(frame, "batch_size"), number(frame, "seq_len"), heads, keys, values


def _either(frame: pd.DataFrame, delta: str, mamba: str) -> Array:
    return np.where(number(frame, delta, 0.0) > 0, number(frame, delta, 0.0), number(frame, mamba, 0.0))


def _token_bytes(frame: pd.DataFrame) -> Array:
    """Queries and keys of their groups, values and outputs of all heads."""
    _, _, heads, keys, values = _sizes(frame)
    return 2.0 * ELEMENT * (_either(frame, "num_k_heads", "n_groups") * keys + heads * values)


def _channels(frame: pd.DataFrame) -> Array:
    """Channels of queries, keys and values; of keys alone in rows of gated delta nets from before Triton's kernels."""
    _, _, heads, keys, values = _sizes(frame)
    groups = _either(frame, "num_k_heads", "n_groups")
    columns = ("scan", "library", "version")
    narrow = map_words(frame, columns, lambda scan, *release: scan == "gdn" and not _tiled(*release), bool)
    return np.where(narrow, groups * keys, 2.0 * groups * keys + heads * values)


@cache
def _tiled(library: str, version: str) -> bool:
    release = tuple(int(part) for part in version.split(".") if part.isdigit())
    return library in TRITON and release >= TRITON[library]


@cache
def _family(kernel: str, library: str, version: str, phase: str) -> str:
    if not kernel.startswith("causal_conv1d"):
        return f"scan.{kernel}"
    if kernel.endswith("update"):
        return "scan.conv.verify" if phase == "verify" else "scan.conv.update"
    return "scan.conv.triton" if library == "vllm" or _tiled(library, version) else "scan.conv.cuda"


@cache
def _stack(kernel: str, library: str, version: str, phase: str) -> str:
    if not kernel.startswith("causal_conv1d"):
        return "graph"
    if kernel.endswith("update"):
        return "graph" if _tiled(library, version) else "graph/early"
    if library == "vllm":
        return "graph" if _tiled(library, version) else "graph/eager"
    if _tiled(library, version):
        return "graph/three" if "qkv3" in kernel else "graph"
    return "graph/early" if library == "sglang" or version.endswith("rc10") else "graph"


KINDS.register(Scans.name)(Scans())
