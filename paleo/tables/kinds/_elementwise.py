"""Tables of memory-bound kernels: maps, norms, softmax, rotary embedding, gated units, quantisation."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pandas as pd

from paleo.pricing.kernels import DeviceFigures, figures
from paleo.pricing.memory import (
    MemoryParameters,
    RowPasses,
    block_passes,
    layer_norm_passes,
    memory_time,
    softmax_passes,
)
from paleo.pricing.store import streaming_fraction
from paleo.specs.device import find_device
from paleo.tables.cells import Array, number, text
from paleo.tables.kernels import KINDS, FitPlan, Fitted, TableKind, timing_keys
from paleo.units import MICROSECOND

#: Kernel family of each operation; a family's calibration holds for all of its operations.
FAMILIES = {
    "elementwise": (
        "add", "sub", "mul", "div", "pow", "tanh", "relu", "gelu", "silu", "sigmoid", "exp", "sqrt", "dropout",
        "where_mask", "add_scalar", "mul_scalar", "div_scalar", "pow_scalar", "cast", "copy", "add_bwd", "mul_bwd",
        "div_bwd", "tanh_bwd", "relu_bwd", "gelu_bwd", "dropout_bwd", "add_scalar_bwd", "mul_scalar_bwd",
        "div_scalar_bwd", "where_mask_bwd",
    ),
    "softmax": ("softmax", "softmax_bwd", "log_softmax"),
    "layernorm": ("layernorm", "layernorm_bwd"),
    "rmsnorm": ("rmsnorm", "rmsnorm_bwd"),
    "rope": ("rope", "rope_inplace_qk"),
    "gated": ("silu_and_mul", "gelu_and_mul"),
    "quantize": ("fp8_scale_matrix", "fp8_quantize", "quantize"),
}  # fmt: skip
FAMILY_OF = {operation: family for family, operations in FAMILIES.items() for operation in operations}
#: Host work of a framework call against that of a two-operand one, where it is another: scalars are wrapped first, and
#: activations go through a module.
HOST_CALLS = {
    "add_scalar": 1.18, "mul_scalar": 1.18, "div_scalar": 1.18, "pow_scalar": 1.13, "relu": 1.22, "gelu": 1.15,
}  # fmt: skip
#: Bytes of a (first input) element; "a->b" is a conversion.
DTYPE_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0}
#: Operations whose input the step before has left in L2, and the stack where that was seen to hold.
WARM_KERNELS = ("add", "rmsnorm")


class ElementwiseTable(TableKind[DeviceFigures]):
    """Rows of memory-bound kernels; families are ``memory.<kernel>``."""

    name = "elementwise"
    header = frozenset({"op", "shape", "bytes_moved"})
    reads = "compute dtype device library source timing cache"
    configuration = ("op", "shape")
    sizes: ClassVar = ("bytes_moved",)
    families: ClassVar = {f"memory.{family}": MemoryParameters for family in FAMILIES}
    host_parameters = ("launch_time", "kernel_time", "host_overlap")

    def start(self, family: str, stack: str, figures: DeviceFigures) -> tuple[MemoryParameters, tuple[str, ...]]:
        """Start values of a fit, and the parameters that stay fixed because rows of this kind do not determine them."""
        plain, eager = family == "memory.elementwise", stack == "eager"
        streaming = streaming_fraction(
            memory_kind=figures.memory_kind, architecture=figures.architecture, inline_ecc=False
        )
        start = MemoryParameters(
            launch_time=(30 if eager else 2) * MICROSECOND,
            kernel_time=(18 if eager else 1) * MICROSECOND,
            host_overlap=20.0 if eager or plain or stack == "graph" else 4.0,
            bandwidth_fraction=streaming,
            cache_fraction=0.8 if eager else 0.6,
            elements_per_cycle=4.0 if stack == "kernel" and not plain else 32.0,
            row_cycles=5000.0 if family == "memory.layernorm" else 500.0,
        )
        if plain:
            silent = ("l2_bytes_per_cycle", "elements_per_cycle", "cache_fraction") if eager else ()
            return start, ("host_overlap", "row_cycles", *silent)
        if stack == "graph":
            return start, ("row_cycles",)
        warmed = eager or family == "memory.rmsnorm"
        return start, ("host_overlap", "bandwidth_fraction", *(() if warmed else ("cache_fraction",)))

    def fit_plan(self, subject: str, family: str, stack: str, figures: DeviceFigures, fitted: Fitted) -> FitPlan:
        """The fit of 900 sampled rows at most, from the parameters and with the fixed ones of ``start``."""
        start, fixed = self.start(family, stack, figures)
        return FitPlan(start, fixed=fixed, training_rows=900, prior=0.15)

    def figures(self, subject: str, dtype: str, compute: str) -> DeviceFigures:
        """Arithmetic is that of ordinary cores, whatever the rows store."""
        return figures(find_device(subject), "fp32")

    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        reason = pd.Series("", index=frame.index, dtype=object)
        unknown = ~text(frame, "op").isin(FAMILY_OF)
        reason[unknown] = "unknown operation " + text(frame, "op")[unknown]
        reason[~_input_dtype(frame).isin(DTYPE_BYTES)] = "unknown dtype"
        moved = pd.to_numeric(frame["bytes_moved"], errors="coerce").to_numpy(dtype=np.float64)
        reason[~(moved > 0)] = "bytes_moved is missing or not above zero"
        reason[~text(frame, "shape").str.fullmatch(r"\d+(x\d+)*")] = "shape is not like 128x1024"
        return reason

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        source, library = text(frame, "source"), text(frame, "library")
        kernel = (source == "vidur") | library.str.contains("CUDA kernels")
        eager = (source == "neusight") | library.str.contains("eager")
        usual = np.select([kernel, eager], ["kernel", "eager"], "graph")
        return timing_keys(frame, pd.Series(usual, index=frame.index, dtype=object))

    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        return "memory." + text(frame, "op").map(FAMILY_OF).fillna("elementwise")

    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        rows, length = _shape(frame)
        return rows * length, number(frame, "bytes_moved")

    def time(self, frame: pd.DataFrame, figures: DeviceFigures, parameters: MemoryParameters) -> Array:
        rows, length = _shape(frame)
        passes = _passes(frame, rows, length, figures)
        stack, operation = self.stack(frame), text(frame, "op")
        calls = np.array(operation.map(HOST_CALLS).fillna(1.0), dtype=np.float64)
        warm = (stack == "graph") | ((stack == "kernel") & operation.isin(WARM_KERNELS))
        stated = text(frame, "cache")
        warm = warm.where(stated == "", stated == "warm")
        return memory_time(
            moved_bytes=number(frame, "bytes_moved"), elements=passes.elements, device=figures, parameters=parameters,
            reread_bytes=passes.reread_bytes, reread_footprint=passes.reread_footprint,
            rows=np.where(_by_row(frame), rows, 0.0), threads_per_row=passes.threads_per_row,
            steps_per_row=passes.steps_per_row, warm=warm.to_numpy(),
            host_calls=calls,
        )  # fmt: skip


def _passes(frame: pd.DataFrame, rows: Array, length: Array, figures: DeviceFigures) -> RowPasses:
    family = text(frame, "op").map(FAMILY_OF)
    width = np.array(_input_dtype(frame).map(DTYPE_BYTES), dtype=np.float64)
    if (family == "softmax").all():
        return softmax_passes(rows=rows, length=length, element_bytes=width, device=figures)
    if (family == "layernorm").all():
        return layer_norm_passes(rows=rows, length=length, element_bytes=width, device=figures)
    return block_passes(
        rows=rows, length=length, element_bytes=width, moved_bytes=number(frame, "bytes_moved"),
        reduces=(family == "rmsnorm").to_numpy(),
    )  # fmt: skip


def _by_row(frame: pd.DataFrame) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return (~text(frame, "op").map(FAMILY_OF).isin(["elementwise", "quantize"])).to_numpy(dtype=np.bool_)


def _input_dtype(frame: pd.DataFrame) -> pd.Series[str]:
    return text(frame, "dtype").str.split("->").str[0]


def _shape(frame: pd.DataFrame) -> tuple[Array, Array]:
    """Rows and their length: the last extent, and the product of the others."""
    extents = text(frame, "shape").str.split("x")
    length = np.array(extents.str[-1], dtype=np.float64)
    total = np.array([np.prod([float(part) for part in parts]) for parts in extents], dtype=np.float64)
    return total / length, length


KINDS.register("elementwise")(ElementwiseTable())
