"""Time of matrix products in inference engines: tiles on multiprocessors, overlapped with memory traffic.

The output of a product of ``rows`` by ``columns`` with a sum over ``length`` is cut into tiles, one per thread block.

    waves    = half of the blocks in whole waves, half fractional: kernels are partly persistent
    compute  = waves · (tile FLOP · (1 + operands · (1/rows + 1/columns)) / (efficiency · peak) + epilogue)
    lone     = length · depth cycles: the wait of one block for its reads
    time     = least over tiles of max(compute, lone)

References: NVIDIA, "Matrix Multiplication Background User's Guide" (tile and wave quantisation); Williams, Waterman and
Patterson, Roofline, CACM 52(4), 2009.

Products in fp8 and NVFP4 have scales by tensor, by blocks of 128 or of 16, and quantise their inputs:

    time = launch + ((product's arithmetic)³ + (operands and result over the bandwidth)³)^(1/3) + quantisation
    quantisation = the activations read in 16 bits and written narrow, at a share of the bandwidth

Formats: Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433; scales of 128 elements as in
DeepSeek-V3 (arXiv:2412.19437, section 3.3); NVFP4 has a scale of one byte for 16 elements (NVIDIA, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paleo.pricing.kernels import DeviceDatasheet

Array = npt.NDArray[np.float64]
Tile = tuple[Array | float, Array | float]
#: Area of the tile for which ``epilogue_cycles`` is stated.
_EPILOGUE_TILE_AREA = 128.0 * 128.0
#: Rows of the narrowest matrix instruction.
_MIN_MMA_ROWS = 16.0
#: Exponent of the norm that combines arithmetic and traffic, and of the one that combines device and host.
_ROOFLINE_NORM_ORDER, _HOST_NORM_ORDER = 3.0, 8.0


@dataclass(frozen=True, slots=True)
class EngineGemmParameters:
    """Calibrated parameters of one GEMM kernel of an inference engine on one device."""

    launch_time: float = parameter("20 us", "0.5..400 us", "launches of all kernels of a call")
    host_time: float = parameter("1 us", "0.1..1000 us", "host time of a call, which the device's time hides")
    efficiency: float = parameter("0.6", "0.05..1", "share of peak that the main loop of a full tile reaches")
    bandwidth_efficiency: float = parameter("0.75", "0.2..1.1", "share of the memory bandwidth that streams reach")
    cycles_per_summed_element: float = parameter("2 cycle", "0.0002..200", "least cycles per element of a block's sum")
    epilogue_cycles: float = parameter("2000 cycle", "1..100000", "prologue and epilogue of a 128 x 128 tile")
    balanced_tile_width: float = parameter("16 element", "1..200", "tile width where loads cost as much as arithmetic")
    pass_bandwidth_share: float = parameter(
        "0.8", "0.01..50", "share of the bandwidth of passes before and after the products"
    )
    unaligned_time_ratio: float = parameter(
        "1", "1..40", "times that arithmetic takes over sums of no multiple of 16, whose operands are read one by one"
    )
    index_bytes_per_element: float = parameter("4", "0.01..300", "bytes per routed element that ranks sort and read")
    time_per_element: float = parameter("0.002 ns", "0.00002..0.2 ns", "the same as a time, in Triton's expert kernels")


def wave_count(blocks: Array, multiprocessors: float, rounding: float) -> Array:
    """Count the waves in which thread blocks run on the multiprocessors; at least one.

    Parameters
    ----------
    blocks : ndarray
        Thread blocks.
    multiprocessors : float
        Multiprocessors of the device.
    rounding : float
        1 counts a partial wave as a whole one, 0 as a fraction.

    Returns
    -------
    ndarray
        Number of waves.

    Examples
    --------
    >>> wave_count(np.array([50.0, 150.0]), 100.0, 1.0), wave_count(np.array([150.0]), 100.0, 0.0)
    (array([1., 2.]), array([1.5]))
    """
    rounds = blocks / multiprocessors
    return np.asarray(rounding * np.ceil(rounds) + (1.0 - rounding) * np.maximum(rounds, 1.0))


def engine_gemm_time(
    *,
    rows: Array,
    columns: Array,
    length: Array,
    tiles: Sequence[Tile],
    device: DeviceDatasheet,
    parameters: EngineGemmParameters,
    count: Array | float = 1.0,
    splits: Sequence[int] = (1,),
) -> Array:
    """Compute the arithmetic time of equal GEMMs that run concurrently.

    Parameters
    ----------
    rows, columns, length : array
        Extents m, n, k of a product; arguments broadcast.
    tiles : sequence of (rows, columns)
        Tile shapes that the library has; arrays where each product has a separate tile.
    device : DeviceDatasheet
        Datasheet values, with the peak of the number format of the products.
    parameters : EngineGemmParameters
        Calibrated parameters of the kernel on the device.
    count : array or float
        Number of products; groups of products have leading axes in ``rows`` and ``count``, which are summed.
    splits : sequence of int
        Numbers of parts into which the sum may be split.

    Returns
    -------
    array
        Time of the fastest tile and split [s].
    """
    cycles: Array = np.array(np.inf)
    groups = np.ndim(rows) > np.ndim(length)
    for height, width in tiles:
        for parts in splits:
            blocks = count * np.ceil(rows / height) * np.ceil(columns / width) * parts
            blocks = blocks.sum(axis=0) if groups else blocks
            waves = wave_count(blocks, device.multiprocessors, 0.5)
            reads = 1.0 + parameters.balanced_tile_width * (1.0 / height + 1.0 / width)
            flop = 2.0 * np.maximum(height, _MIN_MMA_ROWS) * width * length / parts
            loop = flop * reads / (parameters.efficiency * device.flops_per_clock)
            busy = waves * (loop + parameters.epilogue_cycles * height * width / _EPILOGUE_TILE_AREA)
            cycles = np.minimum(cycles, np.maximum(busy, parameters.cycles_per_summed_element * length / parts))
    return np.asarray(cycles / device.clock_hz)


def roofline_with_overlap_loss(compute: Array, traffic: Array) -> Array:
    """Combine arithmetic and memory time as a roofline with a loss where both are nearly equal.

    Parameters
    ----------
    compute : ndarray, shape (...)
        Time of the arithmetic [s].
    traffic : ndarray, shape (...)
        Time of the memory traffic [s].

    Returns
    -------
    ndarray, shape (...)
        Time [s].

    Examples
    --------
    >>> float(roofline_with_overlap_loss(np.array(1.0), np.array(1.0)).round(2))
    1.26
    """
    return np.asarray((compute**_ROOFLINE_NORM_ORDER + traffic**_ROOFLINE_NORM_ORDER) ** (1.0 / _ROOFLINE_NORM_ORDER))


def time_with_host_launch(device: Array, host: float) -> Array:
    """Combine the time of a kernel with the host time to launch it, as a smooth maximum.

    Parameters
    ----------
    device : ndarray, shape (...)
        Time of the kernel [s].
    host : float
        Host time of the call [s].

    Returns
    -------
    ndarray, shape (...)
        Time [s].
    """
    return np.asarray((device**_HOST_NORM_ORDER + host**_HOST_NORM_ORDER) ** (1.0 / _HOST_NORM_ORDER))


#: Tiles of the libraries, and the numbers of parts into which they split a sum.
_GEMM_TILES, _SPLIT_K_COUNTS = ((128, 256), (128, 128), (128, 64), (128, 32), (64, 64), (64, 32)), (1, 4)
#: Bytes of an element with its share of the scales.
SCALED_ELEMENT_BYTES = {"fp8": 1.0, "fp4": 0.5 + 1.0 / 16.0}


def low_precision_gemm_time(
    *, m: Array, n: Array, k: Array, element_bytes: float, device: DeviceDatasheet, parameters: EngineGemmParameters
) -> Array:
    """Compute the time of an fp8 or fp4 GEMM call, with the quantisation of its 16-bit activations.

    The product is C[m,n] = A[m,k] B[k,n]; A are the activations.

    Parameters
    ----------
    m, n, k : array
        Extents, at least 1.
    element_bytes : float
        Bytes of a narrow element, its scales included.
    device : DeviceDatasheet
        Datasheet values, with the peak of the narrow format.
    parameters : EngineGemmParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    array
        Seconds of a call.
    """
    compute = engine_gemm_time(
        rows=m, columns=n, length=k, tiles=_GEMM_TILES, splits=_SPLIT_K_COUNTS, device=device, parameters=parameters
    )
    traffic = ((m + n) * k * element_bytes + 2.0 * m * n) / device.memory_bandwidth
    quantised = m * k * (2.0 + element_bytes) / (parameters.pass_bandwidth_share * device.memory_bandwidth)
    body = roofline_with_overlap_loss(compute, traffic / parameters.bandwidth_efficiency)
    return time_with_host_launch(parameters.launch_time + body + quantised, parameters.host_time)


#: Elements of a head's queries and keys; of its values; of the cached latent with its rotary part; and without it.
QUERY_HEAD_DIM, VALUE_HEAD_DIM, CACHED_LATENT_DIM, LATENT_DIM = 192.0, 128.0, 576.0, 512.0
#: Rows of query heads in a block in decode; and in Triton's kernel (``BLOCK_H`` of vLLM's triton_decode_attention.py).
DECODE_BLOCK_ROWS, TRITON_DECODE_BLOCK_ROWS = 64.0, 16.0
#: Rows of a block in prefill, and the fewest keys of a part of a split cache.
_PREFILL_BLOCK_ROWS, _MIN_KEYS_PER_SPLIT = 128.0, 64.0


@dataclass(frozen=True, slots=True)
class LatentAttentionParameters:
    """Calibrated parameters of one multi-head latent attention (MLA) kernel on one device."""

    launch_time: float = parameter("10 us", "0.5..400 us", "launches of all kernels of a call")
    host_time: float = parameter("1 us", "0.1..1000 us", "host time of a call, which the device's time hides")
    efficiency: float = parameter("0.6", "0.02..1.2", "share of peak that the main loop reaches")
    bandwidth_efficiency: float = parameter("0.75", "0.1..1.1", "share of the memory bandwidth that streams reach")
    cycles_per_key: float = parameter("2 cycle", "0.0002..200", "least cycles of a block for each of its keys")
    block_overhead_cycles: float = parameter("5000 cycle", "10..200000", "start and end of a block")
    pass_bandwidth_share: float = parameter(
        "0.5", "0.005..20", "share of the bandwidth of passes over queries, results, latents"
    )
    max_splits: float = parameter("16", "1..200", "the most parts that a cache is split into")


def latent_attention_time(
    *,
    heads: Array,
    batch: Array,
    queries: Array,
    keys: Array,
    single: npt.NDArray[np.bool_],
    cache_bytes: Array,
    token_rows: Array,
    device: DeviceDatasheet,
    parameters: LatentAttentionParameters,
) -> Array:
    """Compute the time of multi-head latent attention (MLA) of one layer on one rank, without projections.

    Parameters
    ----------
    heads, batch, queries, keys : array
        Query heads of the rank, sequences, new tokens per sequence, and all tokens per sequence.
    single : array of bool
        True for decode, False for prefill.
    cache_bytes : array
        Bytes per element of the cached latent.
    token_rows : array
        Rows of query heads in a thread block in decode.
    device : DeviceDatasheet
        Datasheet values, with the peak of the number format of the products.
    parameters : LatentAttentionParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    array
        Time [s].
    """
    p, rows = parameters, batch * heads * queries
    block_rows = np.where(single, token_rows, _PREFILL_BLOCK_ROWS)
    of_prompts = batch * heads * np.ceil(queries / _PREFILL_BLOCK_ROWS)
    tiles = np.where(single, batch * np.ceil(heads * queries / token_rows), of_prompts)
    most = np.minimum(np.maximum(keys / _MIN_KEYS_PER_SPLIT, 1.0), p.max_splits)
    splits = np.where(single, np.clip(device.multiprocessors / tiles, 1.0, most), 1.0)
    seen = np.where(single, keys, keys - queries / 2.0) / splits
    waves = wave_count(tiles * splits, device.multiprocessors, 0.5)
    flop = 2.0 * block_rows * np.where(single, CACHED_LATENT_DIM + LATENT_DIM, QUERY_HEAD_DIM + VALUE_HEAD_DIM) * seen
    compute = waves * (flop / (p.efficiency * device.flops_per_clock) + p.block_overhead_cycles) / device.clock_hz
    of_key = np.where(single, CACHED_LATENT_DIM * cache_bytes, 2.0 * heads * (QUERY_HEAD_DIM + VALUE_HEAD_DIM))
    read = of_key * batch * keys
    body = roofline_with_overlap_loss(compute, read / (p.bandwidth_efficiency * device.memory_bandwidth))
    each = np.where(single, CACHED_LATENT_DIM + LATENT_DIM, QUERY_HEAD_DIM + 2.0 * VALUE_HEAD_DIM)
    passed = 2.0 * rows * each + batch * queries * CACHED_LATENT_DIM * (2.0 + cache_bytes)
    busy = p.launch_time + body + passed / (p.pass_bandwidth_share * device.memory_bandwidth)
    return time_with_host_launch(busy + seen * p.cycles_per_key / device.clock_hz, p.host_time)
