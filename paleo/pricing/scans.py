"""Time of linear recurrences with a matrix as state (Mamba-2, gated delta rules), and of their short convolutions.

In prefill and training the sequence is cut into chunks. Products inside all chunks run concurrently. The state is
passed from chunk to chunk of a sequence, by one block for each head and ``_STATE_BLOCK_VALUES`` values. In decode a
token reads and writes the whole state of its sequence.

    chunks = launch + roofline(FLOP of chunks / (rate · multiprocessors), bytes / bandwidth) + steps of the state
    tokens = launch + roofline(state · (first + tokens · state) / bandwidth, steps of the state)
    taps   = launch + roofline(channels / bandwidth, blocks of a channel and sequence)

``rate`` is FLOP per cycle and multiprocessor: Triton's kernels of the gated delta rule reach 800 on Hopper and on
Blackwell, whatever the rate of their tensor cores.

References: Dao and Gu, Transformers are SSMs, ICML 2024; Yang, Kautz and Hatamizadeh, Gated delta networks, ICLR 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.engine_gemm import roofline_with_overlap_loss, time_with_host_launch, wave_count
from paleo.pricing.kernels import KERNEL_FAMILIES, kernel_shape_values
from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paleo.operations.base import Kernel
    from paleo.pricing.calibration_lookup import SourcedParameters
    from paleo.pricing.kernels import DeviceDatasheet, KernelFamilyPredictor, KernelFamilyTimes

Array = npt.NDArray[np.float64]
#: Values of a state in one block, and blocks that a multiprocessor runs at once: in prefill, and in decode.
_STATE_BLOCK_VALUES, _PREFILL_BLOCKS_PER_MULTIPROCESSOR, _DECODE_BLOCKS_PER_MULTIPROCESSOR = 32.0, 2.0, 8.0
#: Bytes of an element of tokens, of a sequence's state, and of the states between chunks, which are written and read.
TOKEN_ELEMENT_BYTES, STATE_ELEMENT_BYTES, _CHUNK_STATE_ELEMENT_BYTES = 2.0, 4.0, 4.0
#: Positions of a chunk in the kernel of each family; Triton's delta rules have sub-chunks of 16.
CHUNK_LENGTHS = {
    "chunk_gated_delta_rule": 16.0, "chunk_kda": 16.0, "flashkda_fwd": 64.0,
    "chunk_gated_delta_rule_flashinfer": 128.0, "mamba_chunk_scan_combined": 128.0,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ScanParameters:
    """Calibrated parameters of one linear-recurrence kernel (such as Mamba-2 or a delta rule) on one device."""

    launch_time: float = parameter("8 us", "0.1..800 us", "launches of all kernels of a call")
    host_time: float = parameter("1 us", "0.1..1000 us", "host time of a call, which the device's time hides")
    flops_per_cycle: float = parameter("1000 FLOP/cycle", "20..500000", "FLOP of chunks per cycle and multiprocessor")
    bandwidth_efficiency: float = parameter("0.7", "0.02..1.1", "share of the memory bandwidth that is reached")
    chunk_step_cycles: float = parameter("1000 cycle", "1..1000000", "of a block from one chunk, or token, to the next")
    block_start_cycles: float = parameter("5 cycle", "0.001..10000", "start of a block of a convolution")
    state_passes_per_sequence: float = parameter("1", "0.01..50", "passes over a sequence's state, whatever its tokens")
    state_passes_per_token: float = parameter("1", "0.001..50", "passes over the state for a chunk or token")


def scan_chunk_flops(length: npt.ArrayLike, keys: npt.ArrayLike, values: npt.ArrayLike) -> Array:
    """Count the FLOP of one chunk of a linear recurrence in one head.

    Counted are scores, outputs within and across chunks, and the update of the state.

    Parameters
    ----------
    length : array-like
        Positions of the chunk.
    keys, values : array-like
        Rows and columns of the state.

    Returns
    -------
    ndarray
        FLOP.
    """
    c, k, v = (np.asarray(each, dtype=np.float64) for each in (length, keys, values))
    return np.asarray(2.0 * c * (2.0 * c * (k + v) + 3.0 * k * v))


def chunked_scan_time(
    *,
    batch: Array,
    length: Array,
    heads: Array,
    keys: Array,
    values: Array,
    token_bytes: Array,
    chunk: float,
    device: DeviceDatasheet,
    parameters: ScanParameters,
) -> Array:
    """Compute the time of a chunked linear recurrence (Mamba-2, delta rule) over whole sequences.

    Parameters
    ----------
    batch, length : array
        Sequences, and tokens of each.
    heads, keys, values : array
        Heads of the state, its rows and its columns.
    token_bytes : array
        Bytes of a token's inputs and outputs.
    chunk : float
        Positions of a chunk in the kernel.
    device : DeviceDatasheet
        Datasheet values of the device (`paleo.pricing.kernels.device_datasheet`).
    parameters : ScanParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, clock = parameters, device.clock_hz
    chunks, states = np.ceil(length / chunk), batch * heads * keys * values
    waves = wave_count(batch * chunks * heads, device.multiprocessors, 0.5)
    compute = waves * scan_chunk_flops(chunk, keys, values) / (p.flops_per_cycle * clock)
    moved = batch * length * token_bytes + states * (
        2.0 * STATE_ELEMENT_BYTES + _CHUNK_STATE_ELEMENT_BYTES * chunks * p.state_passes_per_token
    )
    lanes = batch * heads * values / _STATE_BLOCK_VALUES / (_PREFILL_BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors)
    chain = chunks * p.chunk_step_cycles / clock * np.maximum(lanes, 1.0)
    body = roofline_with_overlap_loss(compute, moved / (p.bandwidth_efficiency * device.memory_bandwidth))
    return p.launch_time + body + chain


def token_scan_time(
    *,
    batch: Array,
    tokens: Array,
    heads: Array,
    keys: Array,
    values: Array,
    token_bytes: Array,
    device: DeviceDatasheet,
    parameters: ScanParameters,
) -> Array:
    """Compute the time of a linear recurrence (Mamba-2, delta rule) over a few new tokens per sequence, in decode.

    Parameters
    ----------
    batch, tokens : array
        Sequences, and new tokens of each.
    heads, keys, values : array
        Heads of the state, its rows and its columns.
    token_bytes : array
        Bytes of a token's inputs and outputs.
    device : DeviceDatasheet
        Datasheet values of the device (`paleo.pricing.kernels.device_datasheet`).
    parameters : ScanParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, states = parameters, STATE_ELEMENT_BYTES * batch * heads * keys * values
    moved = batch * tokens * token_bytes + states * (p.state_passes_per_sequence + tokens * p.state_passes_per_token)
    lanes = batch * heads * values / _STATE_BLOCK_VALUES / (_DECODE_BLOCKS_PER_MULTIPROCESSOR * device.multiprocessors)
    steps = np.maximum(lanes, 1.0) * p.chunk_step_cycles * tokens / device.clock_hz
    return p.launch_time + roofline_with_overlap_loss(moved / (p.bandwidth_efficiency * device.memory_bandwidth), steps)


def short_convolution_time(
    *, batch: Array, length: Array, channels: Array, taps: Array, device: DeviceDatasheet, parameters: ScanParameters
) -> Array:
    """Compute the time of the short causal convolution before a linear recurrence, one filter per channel.

    Parameters
    ----------
    batch, length, channels : array
        Sequences, tokens of each, and channels.
    taps : array
        Positions that are summed; all but one are in a state that is read and written.
    device : DeviceDatasheet
        Datasheet values of the device (`paleo.pricing.kernels.device_datasheet`).
    parameters : ScanParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, rows = parameters, batch * channels
    moved = 2.0 * TOKEN_ELEMENT_BYTES * rows * (length + (taps - 1.0) * p.state_passes_per_token)
    blocks = rows / device.multiprocessors * p.block_start_cycles / device.clock_hz
    body = roofline_with_overlap_loss(moved / (p.bandwidth_efficiency * device.memory_bandwidth), blocks)
    return time_with_host_launch(p.launch_time + body, p.host_time)


@KERNEL_FAMILIES.register("scan")
def scan_times(predictor: KernelFamilyPredictor, group: str, kernels: Sequence[Kernel]) -> KernelFamilyTimes:
    """Compute the times of linear-recurrence kernels (such as Mamba-2) in a training step.

    The backward pass repeats the chunks of the forward pass in proportion to its FLOP.

    Parameters
    ----------
    predictor : KernelFamilyPredictor
        The device, format and software of the run.
    group : str
        Calibration family, such as ``scan.chunk_gated_delta_rule``.
    kernels : sequence of Kernel
        Kernels of the family.

    Returns
    -------
    tuple of (SourcedParameters[Any], ndarray)
        Parameters with their source, and seconds of each kernel.
    """
    entry: SourcedParameters[ScanParameters] = predictor.parameters_of(ScanParameters, group)
    sizes = {name: kernel_shape_values(kernels, name) for name in ("batch", "length", "heads", "keys", "values")}
    moved, passes = np.array([kernel.bytes for kernel in kernels]), kernel_shape_values(kernels, "passes")
    times = chunked_scan_time(
        **sizes, token_bytes=moved / (sizes["batch"] * sizes["length"] * passes), parameters=entry.parameters,
        chunk=CHUNK_LENGTHS[group.removeprefix("scan.")], device=predictor.datasheet(predictor.sixteen_bit_dtype),
    )  # fmt: skip
    return entry, passes * times
