"""Tables of measured matrix products (``m, n, k, batch``, operand layout, way of timing) and recurrent layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from paleo.errors import SpecError
from paleo.pricing.gemm import GemmParameters, gemm_time, quantisation_time, unaligned_gemm_time
from paleo.pricing.kernels import DeviceDatasheet, arithmetic_unit
from paleo.pricing.power import INT8_PRODUCTS_PER_FP32, energy_per_flop, l2_surviving_share
from paleo.pricing.rnn import GATES_BY_CELL, RnnDirection, RnnParameters, rnn_time
from paleo.specs.device import find_device
from paleo.tables.base import column_set
from paleo.tables.cells import (
    Array,
    map_text_columns,
    mapped_column,
    number_column,
    number_columns,
    text_column,
    word_mask,
)
from paleo.tables.kernels import (
    KERNEL_TABLES,
    FitSettings,
    FitTarget,
    KernelTable,
    apply_per_row,
    first_reasons,
    map_device_dtype_and_arithmetic_unit,
    shipped_parameters,
    timing_methods,
    unit_family,
    unsupported_reason,
)
from paleo.tables.kinds._conv import ELEMENT_BYTES, cudnn_versions, element_bytes
from paleo.units import MICROSECOND

#: Bytes per element of the operands and of the result.
_OPERAND_BYTES: Mapping[str, float] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 0.5, "int8": 1}
_RESULT_BYTES: Mapping[str, float] = {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 2, "fp4": 2, "int8": 4}
#: Formats to which activations are quantised before each product.
_QUANTISED_FORMATS = ("fp8", "fp4")
#: How a source times its rows; a source that is not listed is taken to launch back to back.
_TIMING_METHOD_OF_SOURCE: Mapping[str, str] = {
    "aiconfigurator": "graph",
    "vidur": "kernel",
    "neusight": "eager",
    "deepbench": "back-to-back",
}
#: B matrices that take turns in a stack's harness: every layer of a model; always the same one.
_WEIGHT_COPIES: Mapping[str, float] = {"kernel": math.inf, "eager": 1.0, "eager/linear": 1.0, "back-to-back": 1.0}
#: Most B matrices in turn under replayed graphs: as many as overflow the L2, so that on L40S 25, 32, 48 and 96 MiB, of
#: which 4, 3, 2 and 1 make its 96 MiB, run out of cache, and 30, 35 and 56 MiB do not.
_MAX_WEIGHT_COPIES = 5.0
#: Switching activity of a stack's data against random numbers: tiny values; nearly zeros (16-bit DeepBench).
_SWITCHING_ACTIVITY: Mapping[tuple[str, str], float] = {("kernel", "fp16"): 0.7, ("back-to-back", "fp16"): 0.4}
#: Sources whose layout letters are those of column-major BLAS.
_COLUMN_MAJOR_SOURCES = frozenset({"deepbench"})


#: Areas of the smallest sgemm tiles of the cuBLAS generations: Volta's 64 x 64, Maxwell's 128 x 64, Ampere's 128 x 128.
_SGEMM_TILE_AREAS = (64 * 64.0, 64 * 128.0, 128 * 128.0)
#: Rows that never come near the limit of power, or (P100 in fp32) whose throttling is thermal: energy stays as known.
_UNTHROTTLED_FAMILIES = {("Pascal", "gemm.simt"), ("Ampere", "gemm.tensor")}
#: What rows cannot tell apart: under replayed graphs, blocks under way from their first reads; beside the launches of
#: eager code, either from how blocks spread and parts of sums meet.
_UNDETERMINED_TENSOR_CORE_PARAMETERS = ("dram_latency_cycles",)
_UNDETERMINED_VECTOR_UNIT_PARAMETERS = ("block_start_cycles", "time_per_split", "cycles_per_summed_element")
#: Cycles for two bytes of a sum from which a fit sets out as well: L40S takes 12.7 us longer for 3,072 elements more of
#: a single tile's, 10.4 cycles each at 2.52 GHz. From below, where a block computes for longer, no slope leads there.
_SPLIT_K_START_CYCLES = 10.4
#: Architecture -> its smallest sgemm tile, where it is not the last.
_SMALLEST_SGEMM_TILE_AREA = dict.fromkeys(("Kepler", "Maxwell", "Pascal"), _SGEMM_TILE_AREAS[1]) | dict.fromkeys(
    ("Volta", "Turing"), _SGEMM_TILE_AREAS[0]
)


#: Share of the bandwidth of graphics memory that reads of one sector a page reach: large transposed products of
#: DeepBench on Titan X of Pascal and of Maxwell.
_SCATTERED_READ_BANDWIDTH_SHARE: Mapping[str, float] = {"GDDR5X": 0.105, "GDDR5": 0.13}


#: Rows from which a library of DeepBench's day has narrow tiles, by architecture and kind of memory. With 16 rows P100
#: reaches 1.2 to 1.5 of its 9.3 TFLOP/s where both operands lie along k, an eighth, twice that at most where one does,
#: and takes up to three times as long as with 32; its sisters with GDDR5X and V100 take no longer.
_NARROW_TILE_MIN_ROWS: Mapping[tuple[str, str], float] = {("Pascal", "HBM2"): 32.0}


class _ReferenceFit(NamedTuple):
    """Earlier fit whose parameters start the fit of a device with few rows, such as DeepBench's.

    ``device`` and ``timing_method`` (timing method) name the earlier fit; ``launch_time`` [s] replaces its launch cost.
    ``prior_precision`` is the weight of the penalty for leaving the start; ``fixed_parameters`` are not fitted.
    """

    device: str
    timing_method: str
    launch_time: float
    prior_precision: float
    fixed_parameters: Mapping[str, float]


#: What rows of short loops cannot tell: bandwidth of small operands and the cost of a result tile.
_SHORT = {"epilogue_cycles": 3000.0, "bandwidth_efficiency": 0.75}
#: Architecture and family -> where a fit of DeepBench rows sets out.
_REFERENCE_FITS: Mapping[tuple[str, str], _ReferenceFit] = {
    ("Volta", "gemm.tensor"): _ReferenceFit("a100-sxm4-80gb", "graph", 4 * MICROSECOND, 2.0, {}),
    ("Volta", "gemm.simt"): _ReferenceFit("v100-pcie-32gb", "eager", 6 * MICROSECOND, 2.0, {}),
    ("Pascal", "gemm.simt"): _ReferenceFit("p100-pcie-16gb", "eager", 5 * MICROSECOND, 1.0, _SHORT),
    ("Maxwell", "gemm.simt"): _ReferenceFit("p100-pcie-16gb", "eager", 30 * MICROSECOND, 1.0, _SHORT),
}


class GemmTable(KernelTable[DeviceDatasheet]):
    """Table of batched matrix products C[m,n] = A[m,k] B[k,n], one timed call per row."""

    name = "gemm"
    identifying_columns = frozenset({"source", "device", "dtype", "m", "n", "k", "batch", "time_us"})
    optional_columns = "compute library trans_a trans_b timing"
    configuration_columns = ("m", "n", "k", "batch")
    size_columns = ("m", "n", "k", "batch")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"gemm.{unit}": GemmParameters for unit in ("tensor", "simt", "fp8", "fp4", "int8")
    }
    host_parameters = ("launch_time",)

    @apply_per_row
    def unsupported_reasons(self, device: str, dtype: str, compute: str, source: str) -> str:
        """Explain why a timed GEMM cannot be modelled; '' if it can.

        Reasons are a dtype without a formula, or without a peak on the device.
        """
        return unsupported_reason(device, dtype, _unit(dtype, compute, source), frozenset(_OPERAND_BYTES))

    def timing_method(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return how each GEMM was timed: graph, kernel, eager, eager/linear (higher host cost) or back-to-back."""
        columns = ("source", "timing", "library")
        linear, batched = (map_text_columns(frame, columns, partial(_stack, batched=many)) for many in (False, True))
        return pd.Series(np.where(number_column(frame, "batch") > 1, batched, linear), index=frame.index, dtype=object)

    @apply_per_row
    def kernel_family(self, device: str, dtype: str, compute: str, source: str) -> str:
        """Return the key of the calibrated parameters that predict a timed GEMM.

        Number format and arithmetic unit decide: ``gemm.fp8``, ``gemm.fp4``, ``gemm.int8``, ``gemm.tensor`` or
        ``gemm.simt``.
        """
        return _family(device, dtype, _unit(dtype, compute, source))

    def start_values(self, family: str, figures: DeviceDatasheet) -> Sequence[GemmParameters]:
        """Return start values for a fit of GEMM parameters: energy by process node, tile size by library generation.

        Vector units try the smallest tile sizes of all cuBLAS generations.
        """
        energies, share = energy_per_flop(figures), l2_surviving_share(figures)
        if family == "gemm.tensor":
            first = GemmParameters(
                energy_per_flop=energies.tensor, training_energy_per_flop=energies.training, l2_survival_share=share
            )
            return (first, dataclasses.replace(first, cycles_per_summed_element=_SPLIT_K_START_CYCLES))
        if family != "gemm.simt":
            lanes = family == "gemm.int8" and not figures.tensor_cores
            energy = energies.vector / INT8_PRODUCTS_PER_FP32 if lanes else energies.fp8
            start = GemmParameters(
                energy_per_flop=energy, training_energy_per_flop=energy if lanes else energies.training_fp8,
                l2_survival_share=share,
            )  # fmt: skip
            return (dataclasses.replace(start, launch_time=5 * MICROSECOND) if lanes else start,)
        tile = _SMALLEST_SGEMM_TILE_AREA.get(figures.architecture, _SGEMM_TILE_AREAS[2])
        stall = 1.0 if figures.architecture in ("Kepler", "Maxwell", "Pascal") else 0.05
        first = GemmParameters(
            launch_time=20 * MICROSECOND, efficiency=0.9, l2_rate=0.02, split_time=3 * MICROSECOND,
            page_stall_ratio=stall, energy_per_flop=energies.vector, training_energy_per_flop=energies.vector,
            min_tile_area=tile,
            scattered_read_efficiency=_SCATTERED_READ_BANDWIDTH_SHARE.get(figures.memory_kind, 1.0),
        )  # fmt: skip
        others = (dataclasses.replace(first, min_tile_area=other) for other in _SGEMM_TILE_AREAS if other != tile)
        return (first, *others)

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how GEMM parameters are fitted to measured times: start values and fixed parameters.

        Devices with few rows (DeepBench) start from a well-measured device and stay near its values.
        """
        family, figures = target.family, target.figures
        first, *other_starts = self.start_values(family, figures)
        alike = _UNDETERMINED_TENSOR_CORE_PARAMETERS if figures.tensor_cores else _UNDETERMINED_VECTOR_UNIT_PARAMETERS
        teacher = _REFERENCE_FITS.get((figures.architecture, family))
        if teacher is None or target.stack != "back-to-back":
            known = None
        else:
            known = target.fitted.get((teacher.device, family, teacher.timing_method))
        if teacher is None or known is None:
            fixed = (*alike, "energy_per_flop") if (figures.architecture, family) in _UNTHROTTLED_FAMILIES else alike
            return FitSettings(
                first, tuple(other_starts), ("launch_time",), fixed, random_starts=0 if other_starts else 1
            )
        start = dataclasses.replace(
            known, launch_time=teacher.launch_time, energy_per_flop=first.energy_per_flop,
            training_energy_per_flop=first.training_energy_per_flop,
            scattered_read_efficiency=first.scattered_read_efficiency, **teacher.fixed_parameters,
            min_narrow_tile_rows=_NARROW_TILE_MIN_ROWS.get((figures.architecture, figures.memory_kind), 1.0),
        )  # fmt: skip
        tiles = _SGEMM_TILE_AREAS if family == "gemm.simt" else ()
        alternatives = tuple(dataclasses.replace(start, min_tile_area=1.01 * tile) for tile in tiles)
        fixed = ("energy_per_flop", *alike, *teacher.fixed_parameters)
        return FitSettings(
            start, alternatives, ("launch_time",), fixed, random_starts=0, prior_precision=teacher.prior_precision
        )

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of timed GEMMs: 2 m n k batch FLOP, and each operand moved once."""
        m, n, k, batch = number_columns(frame, self.configuration_columns)
        element, result = (mapped_column(frame, "dtype", each) for each in (_OPERAND_BYTES, _RESULT_BYTES))
        return 2.0 * m * n * k * batch, batch * ((m * k + k * n) * element + m * n * result)

    def predict_times(self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: GemmParameters) -> Array:
        """Predict the time [s] of GEMMs that share device, dtype, family and timing method.

        fp8 and fp4 rows include the quantisation of the activations.
        """
        if frame.empty:
            return np.zeros(0)
        stack, dtype = str(self.timing_method(frame.iloc[:1]).iloc[0]), str(frame["dtype"].iloc[0]).strip()
        m, n, k, batch = number_columns(frame, self.configuration_columns)
        column_major = word_mask(frame, "source", *_COLUMN_MAJOR_SOURCES)
        # Whether operands lie contiguous along k, by layout letters; a column-major BLAS computes C transposed.
        left = word_mask(frame, "trans_a", "T") == column_major
        right = word_mask(frame, "trans_b", "T") != column_major
        if column_major.any():
            m, n = np.where(column_major, n, m), np.where(column_major, m, n)
            left, right = np.where(column_major, right, left), np.where(column_major, left, right)
        seconds = gemm_time(
            m=m, n=n, k=k, batch=batch,
            element_bytes=_OPERAND_BYTES[dtype], result_bytes=_RESULT_BYTES[dtype],
            weight_copies=_weight_copies(stack, batch * n * k * _OPERAND_BYTES[dtype], figures.l2_bytes),
            activity=_SWITCHING_ACTIVITY.get((stack, dtype), 1.0),
            k_contiguous=np.mean((left, right), axis=0),
            device=figures, parameters=parameters,
        )  # fmt: skip
        if _OPERAND_BYTES[dtype] == 2.0 and figures.tensor_cores:
            odd = unaligned_gemm_time(m, n, k, (left, right), figures)
            seconds = np.maximum(seconds, np.where(batch == 1.0, odd, 0.0))
        if dtype not in _QUANTISED_FORMATS:
            return seconds
        extra = quantisation_time(
            elements=m * k * batch, source_bytes=2.0, target_bytes=_OPERAND_BYTES[dtype], device=figures,
            bandwidth_efficiency=parameters.bandwidth_efficiency,
            capacity=parameters.l2_survival_share * figures.l2_bytes,
        )  # fmt: skip
        return seconds + extra


def _unit(dtype: str, compute: str, source: str) -> str:
    return "vector" if not compute and source == "deepbench" and dtype == "fp16" else compute


def _stack(source: str, timing: str, library: str, *, batched: bool) -> str:
    stack = timing or _TIMING_METHOD_OF_SOURCE.get(source, "back-to-back")
    return "eager/linear" if stack == "eager" and not batched and "bmm" not in library else stack


@cache
def _family(device: str, dtype: str, compute: str) -> str:
    if dtype in _QUANTISED_FORMATS or dtype == "int8":
        return f"gemm.{dtype}"
    try:
        return "gemm.tensor" if arithmetic_unit(find_device(device), dtype, compute) == "tensor" else "gemm.simt"
    except SpecError:
        return "gemm.simt"


def _weight_copies(stack: str, weight_bytes: Array, l2_bytes: float) -> Array:
    """Count the B matrices that a GEMM benchmark cycles through, so that weights do not stay in L2.

    ``weight_bytes`` is the size of one matrix [byte].
    """
    if stack == "graph":
        return np.clip(np.ceil(l2_bytes / weight_bytes), 1.0, _MAX_WEIGHT_COPIES)
    return np.full(weight_bytes.shape, _WEIGHT_COPIES.get(stack, 1.0))


KERNEL_TABLES.register(GemmTable.name)(GemmTable())


# Measured recurrent layers: cell, hidden units, batch and steps, without the input products

_RNN_DIRECTION_OF_WORD: Mapping[str, RnnDirection] = {
    "fwd": RnnDirection.FORWARD,
    "bwd_data": RnnDirection.DATA,
    "bwd_filter": RnnDirection.FILTER,
    "bwd": RnnDirection.BACKWARD,
}


class RnnTable(KernelTable[DeviceDatasheet]):
    """Table of recurrent layers (vanilla, LSTM, GRU) over ``timesteps`` steps, one timed call per row."""

    name = "rnn"
    identifying_columns = column_set("source device dtype cell hidden batch timesteps direction time_us")
    optional_columns = "compute library timing"
    configuration_columns = ("cell", "hidden", "batch", "timesteps", "direction")
    size_columns = ("hidden", "batch", "timesteps")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"rnn.{unit}": RnnParameters for unit in ("vector", "half", "tensor")
    }
    host_parameters = ("launch_time", "step_launch_time", "early_step_time")

    def unsupported_reasons(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Explain for each timed recurrent layer why it cannot be modelled; '' if it can.

        Reasons are an unknown dtype, cell or direction, no peak on the device, or an extent below 1.
        """
        dtypes = frozenset(ELEMENT_BYTES)
        unsupported = map_device_dtype_and_arithmetic_unit(
            frame, self.arithmetic_unit(frame), lambda *columns: unsupported_reason(*columns, dtypes)
        )
        small = np.any([~(sizes >= 1) for sizes in number_columns(frame, self.size_columns)], axis=0)
        known: dict[str, Collection[str]] = {"cell": GATES_BY_CELL, "direction": _RNN_DIRECTION_OF_WORD}
        return first_reasons(
            frame.index,
            (unsupported != "", unsupported),
            *((~word_mask(frame, name, *few), f"{name} is none of {', '.join(few)}") for name, few in known.items()),
            (small, "an extent is below 1"),
        )

    def timing_method(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return how each recurrent layer was timed: ``back-to-back`` unless column ``timing`` says otherwise."""
        return timing_methods(frame, pd.Series("back-to-back", index=frame.index, dtype=object))

    def kernel_family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return the family of each timed recurrent layer: the key of its calibrated parameters.

        It is ``rnn.tensor`` on tensor cores, ``rnn.half`` for 16-bit formats without them, else ``rnn.vector``.
        """
        return map_device_dtype_and_arithmetic_unit(frame, self.arithmetic_unit(frame), partial(unit_family, "rnn"))

    def start_values(self, family: str, figures: DeviceDatasheet) -> Sequence[RnnParameters]:
        """Return start values for a fit of recurrent-layer parameters.

        They are the defaults, and a kernel that hides little latency.
        """
        return (RnnParameters(), RnnParameters(cycles_per_summed_element=150.0))

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of the recurrent products of timed recurrent layers.

        Weights are read every step (once for the filter gradient), states are moved once.
        """
        hidden, batch, steps = number_columns(frame, self.size_columns)
        gate_count, element, direction = mapped_column(frame, "cell", GATES_BY_CELL), element_bytes(frame), _ways(frame)
        products = gate_count * hidden**2
        gradients = np.where(direction == RnnDirection.BACKWARD, 2.0, 1.0)
        reads = np.where(direction == RnnDirection.FILTER, 1.0, steps)
        states = (gate_count + 1.0) * hidden * batch * steps
        return 2.0 * products * batch * steps * gradients, (products * reads + states) * element

    def predict_times(self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: RnnParameters) -> Array:
        """Predict the time [s] of recurrent layers that share device, dtype, family and timing method.

        Kernels are the standard ones, not persistent kernels.
        """
        hidden, batch, steps = number_columns(frame, self.size_columns)
        products = shipped_parameters(GemmParameters, "gemm.tensor" if figures.tensor_cores else "gemm.simt", figures)
        return rnn_time(
            gate_count=mapped_column(frame, "cell", GATES_BY_CELL),
            hidden=hidden, batch=batch, timesteps=steps, direction=_ways(frame),
            element_bytes=element_bytes(frame), library=cudnn_versions(text_column(frame, "library")),
            device=figures, parameters=parameters, products=products,
        )  # fmt: skip


def _ways(frame: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.asarray(text_column(frame, "direction").map(_RNN_DIRECTION_OF_WORD).fillna(0), np.int64)


KERNEL_TABLES.register("rnn")(RnnTable())
