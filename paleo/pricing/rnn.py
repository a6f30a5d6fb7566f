"""Time of recurrent layers (RNN, GRU, LSTM): T steps of h' = f(W h); input GEMMs are predicted separately.

In each step the standard kernel launches a product (g h x h)(h x b), backward (h x g h)(g h x b), and a pointwise
kernel. It reads the weights in each step from L2 or memory. The persistent kernel keeps the weights in registers and
needs a grid-wide barrier instead. The filter gradient is one product (g h x bT)(bT x h) for all steps.

The library chooses the kernel of the product. From cuDNN 7 on that is the fastest kernel for plain products, so the
device's calibration of plain GEMMs applies (`_plain_product_time`). Releases of 2016 and 2017 have separate kernels,
and on Pascal they choose one by the batch only (`early_cudnn_recurrent_gemm_time`).

References: Appleyard, Kocisky and Blunsom, arXiv:1604.01946 (cuDNN's RNN); Diamos et al., Persistent RNNs, ICML 2016.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.pricing.convolution import (
    CURRENT_CUDNN_RELEASE,
    L2_BANDWIDTH_RATIO,
    WAVE_ROUNDING,
    cached_share,
    lossy_overlap_time,
)
from paleo.pricing.engine_gemm import wave_count
from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceDatasheet

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Number = float | Array
Tiles = tuple[tuple[int, int], ...]
#: Rows and columns of a product, and the length of its sum.
Size = tuple[Array, Array, Array]

#: Gates of a cell, which is the number of h x h products in each step.
GATES_BY_CELL: Mapping[str, int] = {"vanilla": 1, "gru": 3, "lstm": 4}
#: Registers of one multiprocessor (256 KiB on Kepler GK110 and from Maxwell to Hopper: CUDA programming guide, table of
#: compute capabilities), and the share that weights may fill: 1152 units of fp32 on the 24 multiprocessors of a Titan X
#: (Diamos et al.).
_REGISTER_FILE_BYTES = 2.0**18
_WEIGHT_REGISTER_SHARE = 0.85
#: Block tiles (gate rows, batch columns), and splits of the sum over h, of the libraries' kernels.
_STEP_TILES: Tiles = ((128, 128), (128, 64), (128, 32), (64, 32), (32, 32))
_FILTER_TILES: Tiles = ((128, 128), (128, 64), (64, 64))
_STEP_SPLITS = (1, 2, 4)
_FILTER_SPLITS = (1, 4)
#: cuDNN release from which products use the fastest kernel for plain products: the first with kernels for Volta.
_PLAIN_RELEASE = 7.0
#: Architecture on which earlier releases choose the kernel by the columns of the product: measured with cuDNN 5 and 6
#: and the cuBLAS of CUDA 8 on a Tesla P100 and a Titan X, whose steps of 32 sequences take up to three times as long as
#: those of 64.
_COLUMN_ARCHITECTURE = "Pascal"
#: Of the kernel for few columns: its most columns, the columns of one pass over the weights, and the parts into which
#: the sum is split.
_NARROW_GEMM_COLUMNS, _NARROW_GEMM_PASS_COLUMNS, _NARROW_GEMM_SPLIT_K = 16.0, 4.0, 4.0
#: Most columns of the tile that never splits its sum, and the tiles of wider products.
_MEDIUM_COLUMNS: float = 32.0
_MEDIUM_TILES: Tiles = ((128, 32),)
_WIDE_TILES: Tiles = ((128, 128), (128, 64))
#: Cycles of the unsplit tile in the forward pass in half precision relative to those in single precision; 27 rows of a
#: P100 are within 9 % of it.
_HALF_PRECISION_CYCLE_RATIO = 2.8
#: Elements that the pointwise kernel of a step moves per gate and unit: pre-activation, gate, state in and out.
_POINTWISE_ELEMENTS = 4.0


class RnnDirection(IntEnum):
    """Result of a call of a recurrent layer: outputs, gradients of states and inputs, of weights, or both gradients."""

    FORWARD = 0
    DATA = 1
    FILTER = 2
    BACKWARD = 3


@dataclass(frozen=True, slots=True)
class RnnParameters:
    """Calibrated parameters of a recurrent library on a device."""

    launch_time: float = parameter("80 us", "20..130 us", "time of a call over no step")
    step_launch_time: float = parameter("20 us", "2..100 us", "launches of one step")
    early_step_time: float = parameter("20 us", "1..100 us", "extra time of an early step")
    queue_fill_steps: float = parameter("100 step", "10..400", "steps until the queue is full", fitted=False)
    gemm_efficiency: float = parameter("0.8", "0.2..1.3", "share of peak arithmetic of a large tile's inner loop")
    balanced_tile_width: float = parameter("16 element", "2..80", "tile width where loads cost as much as arithmetic")
    cycles_per_summed_element: float = parameter("40 cycle", "2..300", "least cycles per element of a block's sum")
    split_cycles: float = parameter("5000 cycle", "200..50000", "second phase that adds up the parts of a split sum")
    bandwidth_fraction: float = parameter("0.7", "0.2..1", "share of memory bandwidth when weights stream in each step")
    l2_survival_share: float = parameter("0.6", "0.1..1.5", "share of L2 that keeps weights from step to step")
    data_gradient_factor: float = parameter("1", "0.5..2.5", "time of a backward step over the same product forward")
    weight_gradient_factor: float = parameter("1", "0.5..2.5", "time of the filter gradient's product over a plain one")
    concurrent_pass_rows: float = parameter("1200 row", "300..5000", "rows for which narrow weight passes overlap")
    barrier_time: float = parameter("2.5 us", "0.5..20 us", "grid-wide barrier of a persistent step", fitted=False)


def weights_fit_registers(*, weight_bytes: Number, device: DeviceDatasheet) -> Mask:
    """Return True if one layer's recurrent weights fit into the registers of all multiprocessors.

    Parameters
    ----------
    weight_bytes : array-like
        Bytes of the recurrent weights.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).

    Returns
    -------
    array-like of bool
        True where they fit; the shape of `weight_bytes`.

    Examples
    --------
    >>> from paleo.pricing.kernels import DeviceDatasheet
    >>> titan_x = DeviceDatasheet("titan x", "Maxwell", "GDDR5", 24, 1.075e9, 6.6e12, 336e9, 3e6, 250, False)
    >>> [bool(weights_fit_registers(weight_bytes=4.0 * units**2, device=titan_x)) for units in (1152, 1216)]
    [True, False]
    """
    return np.asarray(weight_bytes) <= _WEIGHT_REGISTER_SHARE * _REGISTER_FILE_BYTES * device.multiprocessors


def _product_time(
    size: Size,
    tiles: Tiles,
    splits: tuple[int, ...],
    device: DeviceDatasheet,
    p: RnnParameters,
    most_blocks: float = np.inf,
) -> Array:
    """Compute the arithmetic time of a recurrent GEMM (m x k)(k x n) with the best tile and split, in whole waves [s].

    A multiprocessor takes at least ``cycles_per_summed_element`` per element of the sum, since a single block cannot
    hide its latency; this limits small batches. A sum is split only into at most ``most_blocks`` blocks.
    """
    m, n, k = size
    best = np.full(np.broadcast_shapes(m.shape, n.shape, k.shape), np.inf)
    rate = p.gemm_efficiency * device.flops_per_clock
    for a, b in tiles:
        flops = 2.0 * a * b * (1.0 + (p.balanced_tile_width * (1.0 / a + 1.0 / b)) ** 2)
        blocks = np.ceil(m / a) * np.ceil(n / b)
        for parts in splits:
            depth = np.ceil(k / (8.0 * parts)) * 8.0
            arithmetic = wave_count(blocks * parts, device.multiprocessors, WAVE_ROUNDING) * flops / rate
            cycles = lossy_overlap_time(arithmetic, np.asarray(p.cycles_per_summed_element))
            total = depth * cycles + (p.split_cycles if parts > 1 else 0.0)
            best = np.where((parts == 1) | (blocks * parts <= most_blocks), np.minimum(best, total), best)
    return best / device.clock_hz


def early_cudnn_recurrent_gemm_time(
    m: Array,
    n: Array,
    k: Array,
    stream: Array,
    *,
    half: Array,
    backward: bool,
    device: DeviceDatasheet,
    parameters: RnnParameters,
) -> Array:
    """Compute the time of the recurrent GEMM in cuDNN releases that choose the kernel by the number of columns.

    Up to 16 columns are computed four at a time. Each pass reads the weights again, unless there are few rows, for
    which all passes run at once. Up to 32 columns use a tile that never splits the sum, so that a single wave takes its
    latency k times. More columns use wide tiles, split only as far as all blocks run at once, and in half precision not
    at all.

    Parameters
    ----------
    m, n, k : ndarray
        Extents of the product (m x k)(k x n).
    stream : ndarray
        Time to read the weights once [s].
    half : ndarray
        True in half precision.
    backward : bool
        True for the backward pass.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : RnnParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    ndarray
        Time [s].
    """
    p = parameters
    passes = np.clip(m / p.concurrent_pass_rows, 1.0, np.ceil(n / _NARROW_GEMM_PASS_COLUMNS))
    narrow = np.hypot(k * p.cycles_per_summed_element / (_NARROW_GEMM_SPLIT_K * device.clock_hz), stream * passes)
    slower = 1.0 if backward else np.where(half, _HALF_PRECISION_CYCLE_RATIO, 1.0)
    medium = np.hypot(slower * _product_time((m, n, k), _MEDIUM_TILES, (1,), device, p), stream)
    split = _product_time((m, n, k), _WIDE_TILES, _STEP_SPLITS, device, p, device.multiprocessors)
    unsplit = _product_time((m, n, k), _WIDE_TILES, (1,), device, p)
    wide = np.hypot(np.where(half, unsplit, split), stream)
    return np.where(n <= _NARROW_GEMM_COLUMNS, narrow, np.where(n <= _MEDIUM_COLUMNS, medium, wide))


def _plain_product_time(
    size: Size, element_bytes: Array, along_sum: float, device: DeviceDatasheet, products: GemmParameters
) -> Array:
    """Compute the time of GEMMs without launch, with the device's calibration of plain (not recurrent) GEMMs.

    Parameters
    ----------
    size : tuple of ndarray
        Extents m, n, k of the product (m x k)(k x n).
    element_bytes : ndarray
        Bytes of a stored element.
    along_sum : float
        Share of the operands that is contiguous along k; n runs along the contiguous side of the result.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    products : GemmParameters
        Calibration of plain GEMMs; it also holds for recurrent GEMMs of cuDNN `_PLAIN_RELEASE` and later.

    Returns
    -------
    ndarray
        Time [s].
    """
    m, n, k = size
    seconds = gemm_time(
        m=m, n=n, k=k, element_bytes=element_bytes, result_bytes=element_bytes, k_contiguous=along_sum,
        device=device, parameters=products,
    )  # fmt: skip
    return seconds - products.launch_time


def rnn_timestep_time(
    *,
    gate_count: Array,
    hidden: Array,
    batch: Array,
    element_bytes: Array,
    backward: bool = False,
    library: Number = CURRENT_CUDNN_RELEASE,
    device: DeviceDatasheet,
    parameters: RnnParameters,
    products: GemmParameters | None = None,
) -> Array:
    """Compute the time of one step of a recurrent layer without launches: recurrent GEMM and pointwise kernel.

    Parameters
    ----------
    gate_count : ndarray
        Gates of the cell: products of h x h in each step (`GATES_BY_CELL`).
    hidden : ndarray
        Hidden units of the layer, h.
    batch : ndarray
        Number of sequences.
    element_bytes : ndarray
        Bytes of a stored element.
    backward : bool, default False
        True for the backward pass.
    library : array-like, default CURRENT_CUDNN_RELEASE
        cuDNN version, such as 7.6.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : RnnParameters
        Calibrated parameters of the kernel on the device.
    products : GemmParameters, optional
        Calibration of plain GEMMs; it also holds for recurrent GEMMs of cuDNN `_PLAIN_RELEASE` and later.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, gated = parameters, gate_count * hidden
    m, k = (hidden, gated) if backward else (gated, hidden)
    weights = gated * hidden * element_bytes
    bandwidth = p.bandwidth_fraction * device.memory_bandwidth
    states = _POINTWISE_ELEMENTS * gated * batch * element_bytes
    miss = 1.0 - cached_share(weights + states, p.l2_survival_share * device.l2_bytes)
    stream = weights * miss / bandwidth
    product = np.hypot(_product_time((m, batch, k), _STEP_TILES, _STEP_SPLITS, device, p), stream)
    if device.architecture == _COLUMN_ARCHITECTURE:
        half = (element_bytes <= 2.0) & ~np.asarray(device.tensor_cores)
        early = early_cudnn_recurrent_gemm_time(
            m, batch, k, stream, half=half, backward=backward, device=device, parameters=p
        )
        product = np.where(np.asarray(library) < _PLAIN_RELEASE, early, product)
    if products is not None:
        plain = _plain_product_time((batch, m, k), element_bytes, 0.5 if backward else 1.0, device, products)
        product = np.where(np.asarray(library) < _PLAIN_RELEASE, product, plain)
    return np.asarray(product + states * miss / bandwidth)


def persistent_rnn_timestep_time(
    *,
    gate_count: Array,
    hidden: Array,
    batch: Array,
    element_bytes: Array,
    device: DeviceDatasheet,
    parameters: RnnParameters,
) -> Array:
    """Compute the time of one time step of a persistent RNN kernel, which keeps the weights in registers.

    The time is that of a barrier over the whole grid, the products on all multiprocessors, and the state, which each
    multiprocessor reads through L2.

    Parameters
    ----------
    gate_count : ndarray
        Gates of the cell: products of h x h in each step (`GATES_BY_CELL`).
    hidden : ndarray
        Hidden units of the layer, h.
    batch : ndarray
        Number of sequences.
    element_bytes : ndarray
        Bytes of a stored element.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : RnnParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    ndarray
        Seconds; infinite if the weights do not fit.
    """
    p, products = parameters, gate_count * hidden**2
    arithmetic = 2.0 * products * batch / (p.gemm_efficiency * device.peak_flops_per_s)
    states = hidden * batch * element_bytes * device.multiprocessors / (L2_BANDWIDTH_RATIO * device.memory_bandwidth)
    fits = weights_fit_registers(weight_bytes=products * element_bytes, device=device)
    return np.where(fits, p.barrier_time + arithmetic + states, np.inf)


def rnn_weight_gradient_time(
    *, gate_count: Array, hidden: Array, batch: Array, timesteps: Array, element_bytes: Array,
    library: Number = CURRENT_CUDNN_RELEASE, device: DeviceDatasheet, parameters: RnnParameters,
    products: GemmParameters | None = None,
) -> Array:  # fmt: skip
    """Compute the time of the recurrent weight gradient: one GEMM (g h x bT)(bT x h) over all time steps.

    Releases since cuDNN 7 add the product to the existing gradient (cuDNN API reference, cudnnRNNBackwardWeights),
    which they read first.

    Parameters
    ----------
    gate_count : ndarray
        Gates of the cell: products of h x h in each step (`GATES_BY_CELL`).
    hidden : ndarray
        Hidden units of the layer, h.
    batch : ndarray
        Number of sequences.
    timesteps : ndarray
        Time steps of a sequence.
    element_bytes : ndarray
        Bytes of a stored element.
    library : array-like, default CURRENT_CUDNN_RELEASE
        cuDNN version, such as 7.6.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : RnnParameters
        Calibrated parameters of the kernel on the device.
    products : GemmParameters, optional
        Calibration of plain GEMMs; it also holds for recurrent GEMMs of cuDNN `_PLAIN_RELEASE` and later.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, depth = parameters, batch * timesteps
    arithmetic = _product_time((gate_count * hidden, hidden, depth), _FILTER_TILES, _FILTER_SPLITS, device, p)
    elements = gate_count * hidden**2 + (gate_count + 1.0) * hidden * depth
    memory = elements * element_bytes / (p.bandwidth_fraction * device.memory_bandwidth)
    early = lossy_overlap_time(arithmetic * p.weight_gradient_factor, memory)
    if products is None:
        return early
    plain = _plain_product_time((hidden, gate_count * hidden, depth), element_bytes, 0.0, device, products)
    plain = plain + gate_count * hidden**2 * element_bytes / (p.bandwidth_fraction * device.memory_bandwidth)
    return np.asarray(np.where(np.asarray(library) < _PLAIN_RELEASE, early, plain * p.weight_gradient_factor))


def rnn_time(
    *,
    gate_count: Number,
    hidden: Number,
    batch: Number,
    timesteps: Number,
    direction: int | npt.NDArray[np.int64] = RnnDirection.FORWARD,
    element_bytes: Number = 4.0,
    layers: Number = 1.0,
    bidirectional: Number = 0.0,
    persistent: bool = False,
    library: Number = CURRENT_CUDNN_RELEASE,
    device: DeviceDatasheet,
    parameters: RnnParameters,
    products: GemmParameters | None = None,
) -> Array:
    """Compute the time of the recurrent part of RNN layers over all time steps; all arguments broadcast.

    Input products (W x for all steps at once) are separate GEMMs.

    Parameters
    ----------
    gate_count : array-like
        Gates of the cell: products of h x h in each step (`GATES_BY_CELL`).
    hidden : array-like
        Hidden units of the layer, h.
    batch : array-like
        Number of sequences.
    timesteps : array-like
        Time steps of a sequence.
    direction : int or ndarray of int, default RnnDirection.FORWARD
        Value of `RnnDirection`.
    element_bytes : array-like, default 4.0
        Bytes of a stored element.
    layers : array-like, default 1.0
        Layers of the same shape.
    bidirectional : array-like, default 0.0
        1 adds a second recurrence over the reversed sequence, which runs after the first.
    persistent : bool, default False
        True to use the kernel with weights in registers if they fit and it is faster.
    library : array-like, default CURRENT_CUDNN_RELEASE
        cuDNN version, such as 7.6.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : RnnParameters
        Calibrated parameters of the kernel on the device.
    products : GemmParameters, optional
        Calibration of plain GEMMs; it also holds for recurrent GEMMs of cuDNN `_PLAIN_RELEASE` and later.

    Returns
    -------
    ndarray
        Time [s].
    """
    g, h, b, t, e = (np.asarray(x, dtype=np.float64) for x in (gate_count, hidden, batch, timesteps, element_bytes))
    extents = {"gate_count": g, "hidden": h, "batch": b, "element_bytes": e}
    shared: dict[str, Any] = {**extents, "device": device, "parameters": parameters}
    priced = {**shared, "library": library, "products": products}
    early = parameters.early_step_time * np.minimum(t, parameters.queue_fill_steps)
    forward, backward = (
        t * (parameters.step_launch_time + rnn_timestep_time(**priced, backward=back)) + early for back in (False, True)
    )
    if persistent:
        persistent_time = t * persistent_rnn_timestep_time(**shared)
        forward, backward = np.minimum(forward, persistent_time), np.minimum(backward, persistent_time)
    weights = rnn_weight_gradient_time(**priced, timesteps=t)
    direction = np.asarray(direction)
    data = np.where(direction == RnnDirection.FILTER, 0.0, parameters.data_gradient_factor * backward)
    filters = np.where(direction >= RnnDirection.FILTER, weights, 0.0)
    total = np.where(direction == RnnDirection.FORWARD, forward, data) + filters
    return np.asarray((parameters.launch_time + total) * layers * (1.0 + np.asarray(bidirectional)), dtype=np.float64)
