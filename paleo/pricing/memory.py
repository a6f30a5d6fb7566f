"""Time of memory-bound kernels: element-wise maps, norms, softmax, quantisation, gathers and optimizer steps.

Such a kernel has compulsory reads and writes. Some kernels read their input again, and on narrow types many cannot
issue loads fast enough for a fast memory. The cache state decides which part of the traffic reaches the memory and
which only the L2, so it is an argument. The host of a framework needs time to issue the call. The host runs ahead of
the device, so the longer of the two times counts (a smooth maximum).

All sizes broadcast; bytes are compulsory reads plus writes, times are in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.pricing.kernels import DeviceDatasheet, as_float_arrays
from paleo.specs.calibration import parameter

Array = npt.NDArray[np.float64]
Sizes = Array | float
Mask = npt.NDArray[np.bool_] | bool

#: Order of the norm that combines the throughput limits of one kernel.
_STREAM_ORDER = 4.0
#: Steepness of the step from cached to streamed data.
_CACHE_MISS_STEEPNESS = 4.0
#: Latency of an L2 hit relative to that of memory (about 250 of 500 cycles: Jia et al., 2018, arXiv:1804.06826).
_CACHE_LATENCY = 0.5
#: Resident threads of one multiprocessor on every datacentre GPU since Pascal but Turing (CUDA C++ guide, table of
#: compute capabilities), and its largest number of resident blocks.
THREADS_PER_MULTIPROCESSOR, _BLOCKS_PER_MULTIPROCESSOR = 2048.0, 32.0
#: Largest number of threads of one block.
_BLOCK_THREADS = THREADS_PER_MULTIPROCESSOR / 2


@dataclass(frozen=True, slots=True)
class MemoryParameters:
    """Calibrated parameters of one kind of memory-bound kernel (such as softmax) on one device and software stack."""

    launch_time: float = parameter("4 us", "0.2..120 us", "host issue of one call")
    kernel_time: float = parameter("3 us", "0.1..100 us", "start and drain on the device")
    host_overlap: float = parameter("8", "1..40", "order of the smooth maximum of host and device time")
    bandwidth_fraction: float = parameter("0.88", "0.4..0.97", "achieved memory bandwidth")
    l2_bytes_per_cycle: float = parameter("30 B/cycle", "4..120", "L2 traffic of one multiprocessor")
    l2_survival_share: float = parameter("0.6", "0.1..1.5", "share of L2 in which data survive until read again")
    elements_per_cycle: float = parameter("32 1/cycle", "0.3..128", "elements that one multiprocessor can issue")
    cycles_per_row_step: float = parameter("500 cycle", "10..50000", "step of a row's block: a latency and its work")


def memory_kernel_time(
    *,
    moved_bytes: Sizes,
    elements: Sizes,
    device: DeviceDatasheet,
    parameters: MemoryParameters,
    reread_bytes: Sizes = 0.0,
    reread_footprint: Sizes = 0.0,
    rows: Sizes = 0.0,
    threads_per_row: Sizes = 256.0,
    steps_per_row: Sizes = 1.0,
    warm: Mask = False,
    host_calls: Sizes = 1.0,
) -> Array:
    """Compute the time of one launch of a memory-bound kernel.

    device = kernel_time + ||memory, L2, issue|_4, rows|_2 ; time = |host_calls · launch_time, device|_p

    memory: compulsory bytes over the achieved bandwidth, plus the part of ``reread_bytes`` that no longer fits into L2,
    where ``reread_footprint`` bytes are live at once. A ``warm`` input whose ``moved_bytes`` fit into L2 does not reach
    the memory. issue: elements over the rate of the multiprocessors. rows: whole waves of blocks of ``threads_per_row``
    on the resident slots; each block takes ``steps_per_row`` memory latencies, or half of that if the row is in L2.
    Valid from empty calls to gigabytes. The norms |.|_p are smooth maxima.

    Parameters
    ----------
    moved_bytes : array-like
        Bytes that are read and written once.
    elements : array-like
        Number of elements that are computed.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : MemoryParameters
        Calibrated parameters of the kernel on the device.
    reread_bytes : array-like, default 0.0
        Bytes that are read once more.
    reread_footprint : array-like, default 0.0
        Bytes that are live at once between both reads.
    rows : array-like, default 0.0
        Rows that are processed by a thread block each; 0 if rows do not matter.
    threads_per_row : array-like, default 256.0
        Threads of a row's block.
    steps_per_row : array-like, default 1.0
        Memory latencies in sequence in a row's block.
    warm : array-like of bool, default False
        True if the input may be in L2.
    host_calls : array-like, default 1.0
        Calls that the host issues.

    Returns
    -------
    ndarray
        Time [s]; arguments broadcast.
    """
    p, rate = parameters, device.multiprocessors * device.clock_hz
    moved, reread, footprint, count = as_float_arrays(moved_bytes, reread_bytes, reread_footprint, rows)
    live = p.l2_survival_share * device.l2_bytes
    missed = np.where(warm, cache_miss_rate(moved, live), 1.0)
    streamed = moved * missed + reread * cache_miss_rate(footprint, live)
    latency = 1.0 + (_CACHE_LATENCY - 1.0) * (1.0 - missed)
    residence = np.asarray(steps_per_row) * p.cycles_per_row_step * latency / device.clock_hz
    waves = np.ceil(count / (resident_blocks(threads_per_row) * device.multiprocessors))
    limits = (
        streamed / (p.bandwidth_fraction * device.memory_bandwidth),
        (moved + reread) / (p.l2_bytes_per_cycle * rate),
        np.asarray(elements) / (p.elements_per_cycle * rate),
    )
    flow = sum(limit**_STREAM_ORDER for limit in limits) ** (1.0 / _STREAM_ORDER)
    body = np.hypot(flow, waves * residence)
    return smooth_maximum(np.asarray(host_calls) * p.launch_time, p.kernel_time + body, p.host_overlap)


def resident_blocks(threads: Sizes) -> Array:
    """Compute the number of thread blocks that one multiprocessor holds at once.

    Parameters
    ----------
    threads : array-like
        Threads of a block.

    Returns
    -------
    ndarray
        Number of thread blocks.

    Examples
    --------
    >>> [float(one) for one in resident_blocks(np.array([32.0, 256.0, 1024.0]))]
    [32.0, 8.0, 2.0]
    """
    return np.asarray(
        np.minimum(_BLOCKS_PER_MULTIPROCESSOR, np.floor(THREADS_PER_MULTIPROCESSOR / np.asarray(threads)))
    )


def cache_miss_rate(footprint: Sizes, capacity: float, steepness: float = _CACHE_MISS_STEEPNESS) -> Array:
    """Compute the cache miss rate (0 to 1) of repeated reads of a footprint.

    Parameters
    ----------
    footprint : array-like
        Bytes that are read again.
    capacity : float
        Bytes of the cache.
    steepness : float, default CACHE_MISS_STEEPNESS
        Exponent p of the step at the capacity.

    Returns
    -------
    ndarray
        1 / (1 + (capacity / footprint)^p), 0 for an empty footprint.

    Examples
    --------
    >>> [round(float(one), 3) for one in cache_miss_rate(np.array([0.0, 1.0, 2.0]), 1.0)]
    [0.0, 0.5, 0.941]
    """
    (live,) = as_float_arrays(footprint)
    inverse = capacity / np.maximum(live, capacity * np.finfo(np.float32).eps)
    return np.asarray(1.0 / (1.0 + inverse**steepness))


def smooth_maximum(first: Sizes, second: Sizes, order: float) -> Array:
    """Compute the smooth maximum (a^p + b^p)^(1/p), without overflow for large p.

    Parameters
    ----------
    first, second : array-like
        Values above or at zero.
    order : float
        Order p; 1 gives the sum, large orders nearly the larger value.

    Returns
    -------
    ndarray
        Arguments broadcast.

    Examples
    --------
    >>> float(smooth_maximum(3.0, 4.0, 2.0)), round(float(smooth_maximum(3.0, 4.0, 40.0)), 6)
    (5.0, 4.000001)
    """
    high, low = np.maximum(first, second), np.minimum(first, second)
    ratio = np.divide(low, high, out=np.zeros(np.broadcast(low, high).shape), where=high > 0)
    return np.asarray(high * (1.0 + ratio**order) ** (1.0 / order))


class RowTraffic(NamedTuple):
    """Memory traffic of a row-wise kernel (softmax, norm) beyond its first read (`memory_kernel_time` takes it)."""

    elements: Array
    reread_bytes: Array
    reread_footprint: Array
    threads_per_row: Array
    steps_per_row: Array


#: Longest row of the one-warp softmax, and threads of a layer-norm block with vector loads and without (PyTorch's
#: kernels).
_MAX_WARP_SOFTMAX_LENGTH, _LAYER_NORM_THREADS, _MOMENT_KERNEL_THREADS = 32.0**2, 128.0, 512.0
#: Steps of a block softmax (four elements per thread and pass) to which its two reductions are equivalent.
_REDUCTION_STEPS = 4.0


def softmax_row_traffic(*, rows: Sizes, length: Sizes, element_bytes: Sizes, device: DeviceDatasheet) -> RowTraffic:
    """Count softmax's reads of its rows: one warp keeps a short row in registers, a block reads a long one three times.

    The registers of a warp are allocated for the next power of two. The rows of all resident blocks are live at once.

    Parameters
    ----------
    rows, length : array-like
        Rows, and elements of a row.
    element_bytes : array-like
        Bytes of an element.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).

    Returns
    -------
    RowTraffic
        Elements, bytes that are read again, threads and steps of each row.

    Examples
    --------
    >>> from paleo.pricing.kernels import DeviceDatasheet
    >>> v100 = DeviceDatasheet("v100", "Volta", "HBM2", 80, 1.38e9, 14e12, 9e11, 6e6, 250, False)
    >>> passes = softmax_row_traffic(rows=1000.0, length=2048.0, element_bytes=4.0, device=v100)
    >>> float(passes.reread_bytes), float(passes.threads_per_row)
    (16384000.0, 256.0)
    """
    n, d, width = as_float_arrays(rows, length, element_bytes)
    short = d <= _MAX_WARP_SOFTMAX_LENGTH
    power = 2.0 ** np.ceil(np.log2(np.maximum(d, 1.0)))
    threads = np.where(short, 32.0, np.clip(2.0 ** np.ceil(np.log2(np.maximum(d / 8, 1.0))), 32.0, _BLOCK_THREADS))
    live = device.multiprocessors * resident_blocks(threads) * d * width
    reread = np.where(short, 0.0, 2.0 * n * d * width)
    steps = np.where(short, 1.0, 3 * np.ceil(d / (4 * threads)) + _REDUCTION_STEPS)
    return RowTraffic(n * np.where(short, power, d), reread, np.minimum(live, n * d * width), threads, steps)


def layer_norm_row_traffic(*, rows: Sizes, length: Sizes, element_bytes: Sizes, device: DeviceDatasheet) -> RowTraffic:
    """Count layer norm's reads of its rows: one for the moments, and a second one to normalise.

    If the length of rows is a multiple of four elements, one kernel reads them as vectors. Its second read finds in L2
    what the resident blocks left there. Other rows take two kernels, so that the whole tensor is read once before the
    second read starts.

    Parameters
    ----------
    rows, length : array-like
        Rows, and elements of a row.
    element_bytes : array-like
        Bytes of an element.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).

    Returns
    -------
    RowTraffic
        Elements, bytes that are read again, threads and steps of each row.
    """
    n, d, width = as_float_arrays(rows, length, element_bytes)
    vector = d % 4 == 0
    threads = np.where(vector, _LAYER_NORM_THREADS, _MOMENT_KERNEL_THREADS)
    live = np.where(vector, device.multiprocessors * resident_blocks(threads) * d * width, n * d * width)
    issued = n * d * np.where(vector, 1.0, 2.0)
    return RowTraffic(issued, n * d * width, np.minimum(live, n * d * width), threads, np.ones_like(d))


def block_row_traffic(
    *, rows: Sizes, length: Sizes, element_bytes: Sizes, moved_bytes: Sizes, reduces: Mask = False
) -> RowTraffic:
    """Count the reads of row-wise kernels with one thread block per row and one element per thread and step.

    Inference engines have such kernels for RMS norm, rotary embedding and gated units. Their loads are not vectors, so
    that fast devices limit them by issue rather than memory.

    Parameters
    ----------
    rows, length : array-like
        Rows, and elements of a row.
    element_bytes : array-like
        Bytes of an element.
    moved_bytes : array-like
        Bytes that are read and written once.
    reduces : array-like of bool, default False
        True if the row is read twice.

    Returns
    -------
    RowTraffic
        Elements, bytes that are read again, threads and steps of each row.

    Examples
    --------
    >>> passes = block_row_traffic(rows=2.0, length=4096.0, element_bytes=2.0, moved_bytes=3e4, reduces=True)
    >>> float(passes.elements), float(passes.reread_bytes), float(passes.steps_per_row)
    (15000.0, 16384.0, 4.0)
    """
    n, d, width, moved = as_float_arrays(rows, length, element_bytes, moved_bytes)
    threads = np.clip(d, 32.0, _BLOCK_THREADS)
    reread = np.where(reduces, n * d * width, 0.0)
    steps = np.ceil(d / threads)
    return RowTraffic(moved / width, reread, np.zeros_like(moved), threads, steps)


#: Elements that one multiprocessor moves per clock if each thread loads one number at a time, as in channels-first
#: batch normalisations and in transposes of frameworks: 2048 threads with about two loads in flight each, over a
#: latency of 800 to 900 cycles (Little's law). Steps on images on V100 and A100 fit best with 4.5; 3.5 to 6 fit about
#: as well.
SCALAR_ELEMENTS_PER_CLOCK = 4.5
#: The same for transposes of a convolution library, with one load in flight. ResNet-50 in fp16 on one V100 and one RTX
#: 2080 Ti fits best with 2.25 (1.1 % error on five rows; 2.0 and 2.5: 1.6 %). Errors of rows outside the fit fall, too:
#: fp16 on A100 from 4.3 to 3.3 %, tf32 from 9.7 to 3.9 % under PyTorch and from 12.3 to 10.5 % under TensorFlow.
CUDNN_TRANSPOSE_ELEMENTS_PER_CLOCK = 2.25
#: Share of the bandwidth that a transpose reaches, from steps on images on V100, RTX 2080 Ti and RTX 3090.
_TRANSPOSED_BANDWIDTH = 0.75


def layout_conversion_time(
    moved_bytes: Sizes, elements: Sizes, device: DeviceDatasheet, *, loads: float = SCALAR_ELEMENTS_PER_CLOCK
) -> Array:
    """Compute the time to convert tensors between memory layouts, such as channels-first and channels-last.

    Parameters
    ----------
    moved_bytes : array-like
        Bytes that are read and written once.
    elements : array-like
        Number of elements.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    loads : float, default SCALAR_ELEMENTS_PER_CLOCK
        Numbers that a multiprocessor moves per clock.

    Returns
    -------
    ndarray
        Time of one read and one write [s].

    Examples
    --------
    >>> from paleo.pricing.kernels import DeviceDatasheet
    >>> v100 = DeviceDatasheet("v100", "Volta", "HBM2", 80, 1.5e9, 14e12, 9e11, 6e6, 250, True)
    >>> float(layout_conversion_time(1e9, 5e8, v100).round(6))  # (2 GB / 675 GB/s)^4 + (10^9 / 540 a ns)^4, fourth root
    0.00307
    """
    moved, count = as_float_arrays(moved_bytes, elements)
    streamed = 2.0 * moved / (_TRANSPOSED_BANDWIDTH * device.memory_bandwidth)
    loaded = 2.0 * count / (loads * device.multiprocessors * device.clock_hz)
    return np.asarray((streamed**_STREAM_ORDER + loaded**_STREAM_ORDER) ** (1.0 / _STREAM_ORDER))
