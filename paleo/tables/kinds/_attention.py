"""Tables of fused attention: context (causal prefill), encoder (not causal) and generation (one token to a cache)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import pandas as pd

from paleo.pricing.attention import (
    KERNELS,
    DecodeParameters,
    PrefillParameters,
    attention_decode_time,
    attention_prefill_time,
    default_kernel,
)
from paleo.pricing.kernels import DeviceFigures
from paleo.pricing.power import WHOLE_SHARE, energy, surviving_share
from paleo.tables.cells import Array, number, text
from paleo.tables.kernels import KINDS, FitPlan, Fitted, TableKind, timing_keys

PHASES = ("context", "encoder", "generation")
DTYPE_BYTES = {"fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0}
#: Beginnings of device names by the architecture that decides which kernel a library picks.
HOPPER, BLACKWELL = ("h100", "h200", "h800", "h20", "gh200"), ("b100", "b200", "b300", "gb200", "gb300")
#: How libraries name their kernels; without a name a library picks by architecture.
NAMED = (
    ("fa4", "fa4"),
    ("fa3", "fa3"),
    ("fa2", "fa2"),
    ("trtllm", "trtllm"),
    ("tensorrt", "trtllm"),
    ("flashinfer", "fa2"),
)


#: Parameters of decode that a kernel does not have, or that its rows do not tell apart.
SILENT: Mapping[str, tuple[str, ...]] = {
    "fa2": ("scan_cycles", "sequence_time"),
    "fa3": ("kernel_time", "scan_cycles"),
    "fa4": ("kernel_time", "sequence_time"),
    "trtllm": ("kernel_time", "scan_cycles", "sequence_time", "mma_efficiency"),
}
#: Cycles of an exponential per score where it is not the special-function unit's 1/16: FlashAttention-4 computes half
#: of them as polynomials (its authors' talk at Hot Chips 2025).
EXPONENTIALS = {"fa4": 1 / 32}
#: Rate of backward against forward, long causal sequences at head dimension 128: FlashAttention-2 on A100 (Dao, 2023,
#: figures 5 and 6), FlashAttention-3 (Shah et al., 2024, figures 5 and 6, less its exponentials), the same for others.
BACKWARD = {"fa2": 0.85, "fa3": 0.72, "fa4": 0.67, "trtllm": 0.67}
#: Energy of a FLOP of attention against that of a product: scores and sums stay in registers between the two products.
OPERAND_SHARE = 0.75
#: L2 bytes per clock and multiprocessor of parts with a split L2 and with a whole one, where no decode rows tell.
L2_RATE = (40.0, 8.0)


class AttentionTable(TableKind[DeviceFigures]):
    """Attention rows; families are ``attention.<kernel>.<phase>``."""

    name = "attention"
    header = frozenset({"phase", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal"})
    reads = "compute device dtype library source timing window"
    configuration = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "causal")
    sizes: ClassVar = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
    families: ClassVar = {
        f"attention.{kernel}.{phase}": DecodeParameters if phase == "decode" else PrefillParameters
        for kernel in KERNELS
        for phase in ("prefill", "encoder", "decode")
    }
    host_parameters = ("launch_time",)

    def fit_plan(self, subject: str, family: str, stack: str, figures: DeviceFigures, fitted: Fitted) -> FitPlan:
        """Start values of a fit, and the parameters that stay fixed because rows of this kind do not determine them.

        Energies and the share of L2 follow from the silicon; what decode of the same kernel told of L2 holds for
        prefill, which is fitted after it.
        """
        _, kernel, phase = family.split(".")
        share, decode = surviving_share(figures), fitted.get((subject, f"attention.{kernel}.decode", stack))
        if phase == "decode":
            return FitPlan(DecodeParameters(cache_fraction=share), fixed=SILENT[kernel], training_rows=900, prior=0.3)
        start = PrefillParameters(
            cache_fraction=decode.cache_fraction if decode else share,
            l2_bytes_per_cycle=decode.l2_bytes_per_cycle if decode else L2_RATE[share == WHOLE_SHARE],
            exp_cycles=EXPONENTIALS.get(kernel, 1 / 16),
            energy=OPERAND_SHARE * energy(figures).tensor,
            backward_efficiency=BACKWARD[kernel],
        )
        silent = ("write_latency",) if phase == "encoder" else ("padding_time", "padded_tile_cycles")
        whole = ("combine_time",) if KERNELS[kernel].most_splits == 1 else ()
        return FitPlan(start, fixed=("exp_cycles", *silent, *whole), training_rows=900, prior=0.3)

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        reason = pd.Series("", index=frame.index, dtype=object)
        reason[~text(frame, "phase").isin(PHASES)] = "unknown phase"
        reason[~text(frame, "dtype").isin(DTYPE_BYTES)] = "unknown dtype"
        sizes = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
        reason[np.any([~(_loose(frame, name) > 0) for name in sizes], axis=0)] = "size is missing or not above zero"
        return reason

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        eager = text(frame, "library").str.contains("eager", case=False)
        return timing_keys(frame, pd.Series(np.where(eager, "eager", "graph"), index=frame.index, dtype=object))

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
            paged=bool((text(frame, "phase") != "encoder").all()),
        )  # fmt: skip


def _kernel(frame: pd.DataFrame) -> pd.Series[str]:
    device, library = text(frame, "device"), text(frame, "library").str.lower()
    kernel = pd.Series(default_kernel("Ampere"), index=frame.index, dtype=object)
    kernel[device.str.startswith(HOPPER)] = default_kernel("Hopper")
    kernel[device.str.startswith(BLACKWELL)] = default_kernel("Blackwell")
    named = pd.Series(False, index=frame.index)
    for word, name in NAMED:
        matches = library.str.contains(word, regex=False) & ~named
        kernel[matches], named = name, named | matches
    return kernel


def _phase(frame: pd.DataFrame) -> pd.Series[str]:
    """A causal context of one token runs the decode kernel."""
    phase, single = text(frame, "phase"), number(frame, "q_len") == 1
    decode = (phase == "generation") | ((phase == "context") & single)
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
