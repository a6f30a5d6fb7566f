"""Tables of memory-bound kernels: elementwise operations, norms, softmax, and recurrent scans."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from paleo.pricing import memory, scans
from paleo.pricing.calibration_lookup import streaming_bandwidth_share
from paleo.pricing.kernels import DeviceDatasheet, device_datasheet
from paleo.specs.device import find_device
from paleo.tables.base import parse_column_names
from paleo.tables.cells import Array, map_text_columns, mapped_column, number_column, parse_release, text_column
from paleo.tables.kernels import (
    KERNEL_TABLES,
    FitSettings,
    FitTarget,
    KernelTable,
    apply_per_row,
    first_reasons,
    timing_methods,
    unsupported_reason,
)
from paleo.units import MICROSECOND

# Tables of memory-bound kernels: maps, norms, softmax, rotary embedding, gated units, quantisation

#: Kernel family of each operation; a family's calibration holds for all of its operations.
OPERATIONS_OF_FAMILY = {
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
FAMILY_OF_OPERATION = {operation: f for f, operations in OPERATIONS_OF_FAMILY.items() for operation in operations}
#: Host work of a framework call against that of a two-operand one, where it is another: scalars are wrapped first, and
#: activations go through a module.
_HOST_CALL_FACTORS = {
    "add_scalar": 1.18, "mul_scalar": 1.18, "div_scalar": 1.18, "pow_scalar": 1.13, "relu": 1.22, "gelu": 1.15,
}  # fmt: skip
#: Bytes of a (first input) element; "a->b" is a conversion.
_DTYPE_BYTES = {"fp64": 8.0, "fp32": 4.0, "tf32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0}
#: Operations whose input the step before has left in L2, and the stack where that was seen to hold.
_WARM_INPUT_OPERATIONS = ("add", "rmsnorm")


class ElementwiseTable(KernelTable[DeviceDatasheet]):
    """Table of memory-bound kernels (elementwise, norm, softmax, …), one timed call per row.

    Families (keys of calibrated parameters) are ``memory.<kernel>``.
    """

    name = "elementwise"
    identifying_columns = frozenset({"op", "shape", "bytes_moved"})
    optional_columns = "compute dtype device library source timing cache"
    configuration_columns = ("op", "shape")
    size_columns = ("bytes_moved",)
    parameters_by_family: ClassVar = {f"memory.{family}": memory.MemoryParameters for family in OPERATIONS_OF_FAMILY}
    host_parameters = ("launch_time", "kernel_time", "host_overlap")

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how parameters of memory-bound kernels are fitted to at most 900 measured times."""
        family, stack, figures = target.family, target.stack, target.figures
        plain, eager = family == "memory.elementwise", stack == "eager"
        streaming = streaming_bandwidth_share(
            memory_kind=figures.memory_kind, architecture=figures.architecture, inline_ecc=False
        )
        start = memory.MemoryParameters(
            launch_time=(30 if eager else 2) * MICROSECOND,
            kernel_time=(18 if eager else 1) * MICROSECOND,
            host_overlap=20.0 if eager or plain or stack == "graph" else 4.0,
            bandwidth_fraction=streaming,
            l2_survival_share=0.8 if eager else 0.6,
            elements_per_cycle=4.0 if stack == "kernel" and not plain else 32.0,
            cycles_per_row_step=5000.0 if family == "memory.layernorm" else 500.0,
        )
        if plain:
            silent = ("l2_bytes_per_cycle", "elements_per_cycle", "l2_survival_share") if eager else ()
            fixed = ("host_overlap", "cycles_per_row_step", *silent)
        elif stack == "graph":
            fixed = ("cycles_per_row_step",)
        else:
            cold = () if eager or family == "memory.rmsnorm" else ("l2_survival_share",)
            fixed = ("host_overlap", "bandwidth_fraction", *cold)
        return FitSettings(start, fixed_parameters=fixed, max_training_rows=900, prior_precision=0.15)

    def load_datasheet(self, subject: str, dtype: str, compute: str) -> DeviceDatasheet:
        """Load the datasheet values of a device for fp32 on vector units, for kernels in any storage format."""
        return device_datasheet(find_device(subject), "fp32")

    def unsupported_reasons(self, frame: pd.DataFrame) -> pd.Series[str]:
        operation, moved = text_column(frame, "op"), pd.to_numeric(frame["bytes_moved"], errors="coerce")
        shaped = text_column(frame, "shape").str.fullmatch(r"0*[1-9]\d*(x0*[1-9]\d*)*")
        return first_reasons(
            frame.index,
            (~shaped, "shape is not like 128x1024"),
            (~(moved > 0), "bytes_moved is missing or not above zero"),
            (~_input_dtype(frame).isin(_DTYPE_BYTES), "unknown dtype"),
            (~operation.isin(FAMILY_OF_OPERATION), "unknown operation " + operation),
        )

    def timing_method(self, frame: pd.DataFrame) -> pd.Series[str]:
        source, library = text_column(frame, "source"), text_column(frame, "library")
        kernel = (source == "vidur") | library.str.contains("CUDA kernels")
        eager = (source == "neusight") | library.str.contains("eager")
        usual = np.select([kernel, eager], ["kernel", "eager"], "graph")
        return timing_methods(frame, pd.Series(usual, index=frame.index, dtype=object))

    def kernel_family(self, frame: pd.DataFrame) -> pd.Series[str]:
        return "memory." + text_column(frame, "op").map(FAMILY_OF_OPERATION).fillna("elementwise")

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        rows, length = _shape(frame)
        return rows * length, number_column(frame, "bytes_moved")

    def predict_times(
        self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: memory.MemoryParameters
    ) -> Array:
        rows, length = _shape(frame)
        passes = _passes(frame, rows, length, figures)
        stack, operation = self.timing_method(frame), text_column(frame, "op")
        warm = (stack == "graph") | ((stack == "kernel") & operation.isin(_WARM_INPUT_OPERATIONS))
        stated = text_column(frame, "cache")
        warm = warm.where(stated == "", stated == "warm")
        by_row = ~operation.map(FAMILY_OF_OPERATION).isin(["elementwise", "quantize"]).to_numpy(dtype=bool)
        return memory.memory_kernel_time(
            moved_bytes=number_column(frame, "bytes_moved"), elements=passes.elements, device=figures,
            parameters=parameters, reread_bytes=passes.reread_bytes, reread_footprint=passes.reread_footprint,
            rows=np.where(by_row, rows, 0.0), threads_per_row=passes.threads_per_row,
            steps_per_row=passes.steps_per_row, warm=warm.to_numpy(),
            host_calls=mapped_column(frame, "op", _HOST_CALL_FACTORS, 1.0),
        )  # fmt: skip


def _passes(frame: pd.DataFrame, rows: Array, length: Array, figures: DeviceDatasheet) -> memory.RowTraffic:
    family = text_column(frame, "op").map(FAMILY_OF_OPERATION)
    width = np.array(_input_dtype(frame).map(_DTYPE_BYTES), dtype=np.float64)
    shape: dict[str, Any] = {"rows": rows, "length": length, "element_bytes": width}
    if (family == "softmax").all():
        return memory.softmax_row_traffic(**shape, device=figures)
    if (family == "layernorm").all():
        return memory.layer_norm_row_traffic(**shape, device=figures)
    moved, reduces = number_column(frame, "bytes_moved"), (family == "rmsnorm").to_numpy()
    return memory.block_row_traffic(**shape, moved_bytes=moved, reduces=reduces)


def _input_dtype(frame: pd.DataFrame) -> pd.Series[str]:
    return text_column(frame, "dtype").str.split("->").str[0]


def _shape(frame: pd.DataFrame) -> tuple[Array, Array]:
    """Split the tensor shape of each timed kernel into (number of vectors, length of a vector), shape (rows,) each.

    The length is the last extent; the number is the product of all other extents.
    """
    extents = text_column(frame, "shape").str.split("x")
    length = np.array(extents.str[-1], dtype=np.float64)
    total = np.array([np.prod([float(part) for part in parts]) for parts in extents], dtype=np.float64)
    return total / length, length


KERNEL_TABLES.register("elementwise")(ElementwiseTable())


# Kernels of recurrences with a matrix as state, and of the short convolutions before them, as engines run them

#: Kernels of single tokens, and of convolutions: by blocks of channels (CUDA), by tiles (Triton), of single tokens, of
#: tokens that are verified.
_SINGLE_TOKEN_SCAN_KERNELS = (
    "fused_recurrent_gated_delta_rule", "fused_recurrent_gated_delta_rule_packed_decode", "fused_recurrent_kda",
    "fused_recurrent_kda_packed_decode", "fused_kda_decode", "kda_fused_decode", "fused_kda_decode_mtp_dspark",
    "fused_sigmoid_gating_delta_rule_update",
)  # fmt: skip
_SCAN_KERNELS = (*scans.CHUNK_LENGTHS, *_SINGLE_TOKEN_SCAN_KERNELS)
_SHORT_CONVOLUTION_KERNELS = ("cuda", "triton", "update", "verify")
#: Releases from which a library has convolutions in Triton, and its rows hold the channels of queries, keys and values;
#: rates of the rows before say that they hold those of the keys.
_FIRST_TRITON_CONVOLUTION_RELEASE = {"sglang": (0, 5, 14), "vllm": (0, 23)}
#: Parameters that each formula lacks.
_UNDETERMINED_SCAN_PARAMETERS = {
    "chunks": ("host_time", "block_start_cycles", "state_passes_per_sequence"),
    "tokens": ("host_time", "flops_per_cycle", "block_start_cycles"),
    "conv": ("flops_per_cycle", "chunk_step_cycles", "state_passes_per_sequence"),
}  # fmt: skip


class ScanTable(KernelTable[DeviceDatasheet]):
    """Table of recurrent scan kernels (Mamba-2, gated delta nets, Kimi delta attention), one timed call per row."""

    name = "scan"
    identifying_columns = frozenset({"scan", "phase", "batch_size", "seq_len", "d_model", "kernel_source", "time_us"})
    optional_columns = (
        "device library version d_state d_conv nheads head_dim n_groups num_k_heads head_k_dim num_v_heads head_v_dim"
    )
    configuration_columns = parse_column_names("scan batch_size seq_len nheads num_k_heads num_v_heads d_state")
    size_columns = ("batch_size", "seq_len")
    parameters_by_family: ClassVar[Mapping[str, type[Any]]] = {
        f"scan.{name}": scans.ScanParameters
        for name in (*_SCAN_KERNELS, *(f"conv.{each}" for each in _SHORT_CONVOLUTION_KERNELS))
    }
    host_parameters = ("launch_time", "host_time")

    def prepare_rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Add column ``dtype`` = bf16 to timed scan kernels, all of which run in that format."""
        return frame.assign(dtype="bf16")

    @apply_per_row
    def unsupported_reasons(self, device: str, kernel_source: str) -> str:
        """Explain why a timed scan kernel cannot be modelled (unknown kernel or device); '' if it can."""
        if kernel_source in _SCAN_KERNELS or kernel_source.startswith("causal_conv1d"):
            return unsupported_reason(device, "bf16", "", frozenset({"bf16"}))
        return f"kernel {kernel_source!r} is not modelled"

    @apply_per_row
    def timing_method(self, kernel_source: str, library: str, version: str) -> str:
        """Return how a scan kernel was timed, mostly in a CUDA graph (``graph``).

        vLLM builds before 0.24 launch convolutions of prompts one by one (``graph/eager``). Libraries from before the
        Triton convolutions have longer launches (``graph/early``).
        """
        if not kernel_source.startswith("causal_conv1d"):
            return "graph"
        tiled = _tiled(library, version)
        if kernel_source.endswith("update"):
            return "graph" if tiled else "graph/early"
        if library == "vllm":
            return "graph" if tiled else "graph/eager"
        if tiled:
            return "graph/three" if "qkv3" in kernel_source else "graph"
        return "graph/early" if library == "sglang" or version.endswith("rc10") else "graph"

    @apply_per_row
    def kernel_family(self, kernel_source: str, library: str, version: str, phase: str) -> str:
        """Return the key ``scan.<kernel>`` of the calibrated parameters that predict a timed scan kernel."""
        if not kernel_source.startswith("causal_conv1d"):
            return f"scan.{kernel_source}"
        if kernel_source.endswith("update"):
            return "scan.conv.verify" if phase == "verify" else "scan.conv.update"
        return "scan.conv.triton" if library == "vllm" or _tiled(library, version) else "scan.conv.cuda"

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose how parameters of scan kernels are fitted to measured times: start values and fixed parameters.

        Parameters that the formula of the kernel does not have stay fixed.
        """
        kernel = target.family.split(".")[1]
        formula = "conv" if kernel == "conv" else "chunks" if kernel in scans.CHUNK_LENGTHS else "tokens"
        return FitSettings(
            scans.ScanParameters(), parameters_per_stack=("launch_time", "block_start_cycles"), prior_precision=0.2,
            fixed_parameters=_UNDETERMINED_SCAN_PARAMETERS[formula], random_starts=2,
        )  # fmt: skip

    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count (FLOP, bytes) of timed scan kernels, one entry per row.

        FLOP are those of the products within chunks. Bytes read or write each token and each state once.
        """
        batch, length, heads, keys, values = _sizes(frame)
        convolved = text_column(frame, "kernel_source").str.startswith("causal_conv1d").to_numpy(dtype=bool)
        moved = batch * length * _token_bytes(frame) + 2.0 * scans.STATE_ELEMENT_BYTES * batch * heads * keys * values
        flops = batch * np.ceil(length / 64.0) * heads * scans.scan_chunk_flops(np.minimum(length, 64.0), keys, values)
        taps = 2.0 * scans.TOKEN_ELEMENT_BYTES * batch * length * _channels(frame)
        return np.where(convolved, 0.0, flops), np.where(convolved, taps, moved)

    def predict_times(self, frame: pd.DataFrame, figures: DeviceDatasheet, parameters: scans.ScanParameters) -> Array:
        """Predict the time [s] of scan kernels that share device, kernel and timing method."""
        if frame.empty:
            return np.zeros(0)
        batch, length, heads, keys, values = _sizes(frame)
        kernel = str(frame["kernel_source"].iloc[0])
        if kernel.startswith("causal_conv1d"):
            return scans.short_convolution_time(
                batch=batch, length=length, channels=_channels(frame), taps=number_column(frame, "d_conv", 4.0),
                device=figures, parameters=parameters,
            )  # fmt: skip
        shape: dict[str, Any] = {
            "batch": batch, "heads": heads, "keys": keys, "values": values, "token_bytes": _token_bytes(frame),
            "device": figures, "parameters": parameters,
        }  # fmt: skip
        if kernel in scans.CHUNK_LENGTHS:
            return scans.chunked_scan_time(length=length, chunk=scans.CHUNK_LENGTHS[kernel], **shape)
        return scans.token_scan_time(tokens=length, **shape)


def _sizes(frame: pd.DataFrame) -> tuple[Array, Array, Array, Array, Array]:
    """Read the sizes of timed scan kernels, arrays of shape (rows,).

    Returns (sequences, tokens per sequence, heads, rows of a head's state, columns of a head's state). Column names are
    those of Mamba-2 or of the delta rules.
    """
    heads = _either(frame, "num_v_heads", "nheads")
    keys, values = _either(frame, "head_k_dim", "d_state"), _either(frame, "head_v_dim", "head_dim")
    return number_column(frame, "batch_size"), number_column(frame, "seq_len"), heads, keys, values


def _either(frame: pd.DataFrame, delta: str, mamba: str) -> Array:
    stated = number_column(frame, delta, 0.0)
    return np.where(stated > 0, stated, number_column(frame, mamba, 0.0))


def _token_bytes(frame: pd.DataFrame) -> Array:
    """Count the bytes per token of timed scan kernels.

    They are queries and keys of their groups, values and outputs of all heads.
    """
    _, _, heads, keys, values = _sizes(frame)
    return 2.0 * scans.TOKEN_ELEMENT_BYTES * (_either(frame, "num_k_heads", "n_groups") * keys + heads * values)


def _channels(frame: pd.DataFrame) -> Array:
    """Count the channels of the short causal convolution of timed scan kernels: those of queries, keys and values.

    Gated delta nets in libraries from before the Triton kernels convolve keys alone.
    """
    _, _, heads, keys, values = _sizes(frame)
    groups = _either(frame, "num_k_heads", "n_groups")
    columns = ("scan", "library", "version")
    narrow = map_text_columns(frame, columns, lambda scan, *release: scan == "gdn" and not _tiled(*release), bool)
    return np.where(narrow, groups * keys, 2.0 * groups * keys + heads * values)


@cache
def _tiled(library: str, version: str) -> bool:
    first = _FIRST_TRITON_CONVOLUTION_RELEASE.get(library)
    return first is not None and parse_release(version) >= first


KERNEL_TABLES.register(ScanTable.name)(ScanTable())
