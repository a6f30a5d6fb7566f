"""Time of a convolution: the fastest algorithm that the library has and the workspace allows.

Each algorithm is a matrix product (or a batch of them), and the cost to bring the operands into that form:

    implicit   the im2col matrix is formed on the fly, tile by tile; a strided data gradient wastes taps
    explicit   the im2col matrix is written to and read from memory (col2im for the data gradient)
    winograd   F(2x2, 3x3) in one kernel: a block owns 8 x 16 outputs of one image and 32 filters; 2.25x fewer products
    nonfused   F(4x4, 3x3) or F(4x4, 5x5): transforms around 36 or 64 batched products; 4x and 6.25x fewer products
    fft        tiles of 16 x 16 to 128 x 128 points: transforms around complex products, one for each frequency
    direct     one thread for one output, no reuse across filters: what depthwise convolution amounts to

References: Chetlur et al., cuDNN, arXiv:1410.0759 (implicit, explicit); Lavin and Gray, CVPR 2016 (Winograd); Vasilache
et al., ICLR 2015 (FFT); Williams, Waterman and Patterson, CACM 52(4), 2009 (roofline).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.engine_gemm import wave_count
from paleo.specs.calibration import parameter
from paleo.units import TERA

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceDatasheet

Array = npt.NDArray[np.float64]
Numeric = float | Array
Mask = npt.NDArray[np.bool_]


class ConvolutionDirection(IntEnum):
    """Result of a convolution call: the output, the gradient of its input, or the gradient of its filters."""

    FORWARD = 0
    DATA = 1
    FILTER = 2


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """Sizes of several convolutions, as arrays of one shape.

    ``channels`` and ``filters`` are those of one group; ``direction`` holds values of `ConvolutionDirection`.
    """

    batch: Array
    channels: Array
    height: Array
    width: Array
    filters: Array
    kernel_h: Array
    kernel_w: Array
    stride_h: Array
    stride_w: Array
    dilation_h: Array
    dilation_w: Array
    groups: Array
    out_h: Array
    out_w: Array
    direction: npt.NDArray[np.int64]

    @property
    def filter_taps(self) -> Array:
        """Number of filter taps, kernel height r times kernel width s; shape of the convolutions."""
        return self.kernel_h * self.kernel_w

    @property
    def output_positions(self) -> Array:
        """Number of output positions: batch n times output height p times output width q."""
        return self.batch * self.out_h * self.out_w

    @property
    def input_elements(self) -> Array:
        return self.batch * self.height * self.width * self.channels * self.groups

    @property
    def output_elements(self) -> Array:
        return self.output_positions * self.filters * self.groups

    @property
    def filter_elements(self) -> Array:
        return self.channels * self.filters * self.filter_taps * self.groups

    @property
    def is_plain(self) -> Mask:
        """True for stride 1 without dilation."""
        steps = (self.stride_h, self.stride_w, self.dilation_h, self.dilation_w)
        return np.asarray(np.equal(steps, 1.0).all(axis=0))

    @property
    def flops(self) -> Array:
        """FLOP of the direct method: 2 n p q k c r s for each group, in all three directions."""
        return 2.0 * self.output_positions * self.channels * self.filters * self.filter_taps * self.groups

    @property
    def moved_elements(self) -> Array:
        """Least number of elements read and written; each direction reads two tensors and writes the third."""
        return self.input_elements + self.output_elements + self.filter_elements


def convolution_shape(
    *,
    batch: Numeric,
    channels: Numeric,
    height: Numeric,
    width: Numeric,
    filters: Numeric,
    kernel_h: Numeric,
    kernel_w: Numeric,
    pad_h: Numeric = 0.0,
    pad_w: Numeric = 0.0,
    stride_h: Numeric = 1.0,
    stride_w: Numeric = 1.0,
    dilation_h: Numeric = 1.0,
    dilation_w: Numeric = 1.0,
    groups: Numeric = 1.0,
    direction: int | npt.NDArray[np.int64] = ConvolutionDirection.FORWARD,
) -> ConvolutionShape:
    """Compute the output size and the channels per group of a convolution from the extents of its layer.

    An output extent is floor((n + 2 p - d (r - 1) - 1) / s) + 1. The input has extent n, the kernel r; p is the
    padding, d the dilation and s the stride.

    Parameters
    ----------
    batch : array-like
        Number of samples.
    channels : array-like
        Input channels over all groups.
    height, width : array-like
        Extents of the input.
    filters : array-like
        Output channels over all groups.
    kernel_h, kernel_w : array-like
        Extents of the kernel.
    pad_h, pad_w : array-like, default 0.0
        Padding on each side.
    stride_h, stride_w : array-like, default 1.0
        Strides.
    dilation_h, dilation_w : array-like, default 1.0
        Dilation: distance of neighbouring taps.
    groups : array-like, default 1.0
        Groups of channels.
    direction : int or ndarray of int, default ConvolutionDirection.FORWARD
        0 forward, 1 data gradient, 2 filter gradient.

    Returns
    -------
    ConvolutionShape
        Sizes as arrays of one shape (arguments broadcast).

    Examples
    --------
    >>> s = convolution_shape(
    ...     batch=1.0, channels=3.0, height=224.0, width=224.0, filters=64.0, kernel_h=7.0, kernel_w=7.0,
    ...     pad_h=3.0, pad_w=3.0, stride_h=2.0, stride_w=2.0)
    >>> float(s.out_h), float(s.flops)
    (112.0, 236027904.0)
    """
    out_h = np.floor((np.asarray(height) + 2 * pad_h - dilation_h * (np.asarray(kernel_h) - 1) - 1) / stride_h) + 1
    out_w = np.floor((np.asarray(width) + 2 * pad_w - dilation_w * (np.asarray(kernel_w) - 1) - 1) / stride_w) + 1
    extents = [batch, channels / np.asarray(groups), height, width, filters / np.asarray(groups), kernel_h, kernel_w]
    extents += [stride_h, stride_w, dilation_h, dilation_w, groups, np.maximum(out_h, 1.0), np.maximum(out_w, 1.0)]
    *arrays, directions = np.broadcast_arrays(*extents, direction)
    floats = [np.asarray(array, dtype=np.float64) for array in arrays]
    names = (field.name for field in fields(ConvolutionShape))
    return ConvolutionShape(**dict(zip(names, [*floats, directions.astype(np.int64)], strict=True)))  # type: ignore[arg-type]


Tiles = tuple[tuple[int, int], ...]
#: Releases of a library by algorithm, in each direction (forward, data, filter).
Releases = Mapping[str, tuple[float, float, float]]
_TilesAndSplits = tuple[tuple[Tiles, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ConvolutionParameters:
    """Calibrated parameters of a convolution library on a device."""

    launch_time: float = parameter("8 us", "1..400 us", "time of an empty call")
    gemm_efficiency: float = parameter("0.95", "0.3..1.3", "share of peak of a large tile's inner loop")
    balanced_tile_width: float = parameter("16 element", "2..60", "tile width where loads cost as much as arithmetic")
    block_overhead_cycles: float = parameter("300 cycle", "10..20000", "prologue and epilogue of a block, not hidden")
    bandwidth_fraction: float = parameter("0.55", "0.15..1", "share of memory bandwidth of reads and writes")
    cycles_per_summed_element: float = parameter("100 cycle", "2..600", "least cycles per element of a block's sum")
    winograd_efficiency: float = parameter("0.86", "0.3..1.2", "share of peak of fused Winograd's reduced products")
    winograd_cycles: float = parameter("2500 cycle", "300..20000", "first and last transforms of a fused block")
    transform_bandwidth: float = parameter("0.5", "0.1..1.2", "share of bandwidth of transforms and of im2col")
    weight_transform_bandwidth: float = parameter("0.2", "0.03..1.2", "share of bandwidth of filter transforms")
    data_gradient_factor: float = parameter("1.1", "0.7..2.5", "time of the data gradient over that product forward")
    filter_gradient_factor: float = parameter("1.3", "0.7..3", "time of the filter gradient over that product forward")
    split_cycles: float = parameter("3000 cycle", "200..50000", "start and end of a product's reduction over splits")
    energy_per_flop: float = parameter("17 pJ/FLOP", "1..60", "board power over rate at boost clock", fitted=False)


#: Weight of whole waves of blocks against a fractional count: a multiprocessor holds a few blocks, so the last wave is
#: partly filled.
WAVE_ROUNDING = 0.7
#: Block tiles (rows, columns) of plain products on vector units.
_VECTOR_TILES: Tiles = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128))
_NO_SPLIT_K, _SPLIT_K_COUNTS = (1,), (1, 4, 16, 64)
#: Kernels of the implicit method as (tiles, splits of the sum). Forward and data gradient have pixels by channels, the
#: filter gradient filters by channels times taps. Vector kernels own 128 pixels. Only the filter gradient splits, and
#: tensor cores also forward.
_VECTOR_KERNELS: _TilesAndSplits = (
    (((128, 128), (128, 64), (128, 32)), _NO_SPLIT_K),
    (((128, 128), (128, 64), (128, 32)), _NO_SPLIT_K),
    (((128, 128), (64, 128), (32, 128)), _SPLIT_K_COUNTS),
)
_TENSOR_KERNELS: _TilesAndSplits = (
    (((256, 128), (128, 128), (256, 64), (128, 64)), (1, 4)),
    (((256, 128), (128, 128), (256, 64)), _NO_SPLIT_K),
    (((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)), _SPLIT_K_COUNTS),
)
#: Share of L2 that intermediate results of a method may fill, and bandwidth of L2 relative to that of memory. Assumed,
#: not fitted: microbenchmarks of V100 (Jia et al., arXiv:1804.06826) and similar devices give about 2 to 4.
_USABLE_L2_SHARE, L2_BANDWIDTH_RATIO = 0.6, 3.0
#: Share of the vector peak that the direct kernel reaches, whose threads load two operands for each product.
_DIRECT_SHARE = 0.25
#: Elements that a tensor-core kernel sums at a time. Kernels for Ampere before `_AMPERE_KERNEL_RELEASE` take 64
#: sixteen-bit numbers if there are more than 32 channels (the depth of a stage in their names: ``64x3``).
_TENSOR_CORE_K_STEP, _EARLY_AMPERE_K_STEP = 32.0, 64.0
#: Operand bytes per clock that a multiprocessor's tensor cores demand, as FLOP times bytes of an element: that of a
#: V100 in fp16, for which ``balanced_tile_width`` was measured; and the largest ratios to it, before
#: `_AMPERE_KERNEL_RELEASE` and since. Shared memory delivers 128 bytes a clock on all of them. Instructions of Ampere
#: share operands over 32 threads instead of 8, and copies to shared memory bypass the registers (NVIDIA A100
#: whitepaper, 2020), so that twice the rate does not demand twice the bytes; steps on images suggest 1.4 on A100, 1.0
#: on H100.
_REFERENCE_OPERAND_DEMAND, _MAX_OPERAND_DEMAND_RATIO, _AMPERE_OPERAND_DEMAND_RATIO = 2048.0, 2.0, 1.25
#: cuDNN release (early 2021) with convolutions for Ampere's instructions. From it on few channels in channels-last
#: layout are padded to 4, 8 or 16 instead of a whole step.
_AMPERE_KERNEL_RELEASE = 8.1
#: Positions that the filter gradient sums at a time; each image starts a new step.
_IMAGE_STEP = 32.0
#: Outputs (rows, columns) of one image, and filters, of one block of the fused Winograd kernel (cuDNN's tile148).
_WINOGRAD_BLOCK = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class ConvolutionCost:
    """Cost of one convolution algorithm: time without the launch (``seconds``) [s] and workspace [byte].

    The time is infinite if the algorithm does not apply. ``relative_flops`` is the FLOP of the algorithm relative to
    the direct convolution, without partly filled tiles at the edges.
    """

    seconds: Array
    workspace_bytes: Array
    relative_flops: Array | float = 1.0


def l2_resident_share(moved: Array, device: DeviceDatasheet) -> Array:
    """Return the share of traffic between two kernels that the L2 cache holds.

    Parameters
    ----------
    moved : ndarray
        Bytes that one kernel writes and the next reads.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).

    Returns
    -------
    ndarray
        Near 1 for traffic well below `_USABLE_L2_SHARE` of the cache, near 0 well above it.
    """
    return cached_share(moved, _USABLE_L2_SHARE * device.l2_bytes)


def cached_share(footprint: Numeric, capacity: float) -> Array:
    """Compute the share (0 to 1) of repeatedly read data that a cache holds, 1 / (1 + (footprint / capacity)^4).

    Parameters
    ----------
    footprint : array-like
        Bytes that are read repeatedly.
    capacity : float
        Bytes of the cache.

    Returns
    -------
    ndarray
        Shares: near 1 well below the capacity, 0.5 at it, near 0 well above.

    Examples
    --------
    >>> float(cached_share(4e6, 4e6))
    0.5
    """
    return np.asarray(1.0 / (1.0 + (np.asarray(footprint) / capacity) ** 4))


def power_limited_boost_share(device: DeviceDatasheet, energy_per_flop: float) -> float:
    """Compute the share of the boost clock that vector units keep under full arithmetic load, at the power limit.

    Power is proportional to f V^2. Between boost and the lowest voltage V falls with f, below it V is constant. So
    power falls with f^3 and then with f, on average with f^2. Tensor cores are not derated here, as their energy is
    accounted for elsewhere.

    Parameters
    ----------
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    energy_per_flop : float
        Board power per rate at boost clock [pJ/FLOP]; 17.9 for a V100 of 250 W and 14 TFLOP/s.

    Returns
    -------
    float
        min(1, sqrt(power limit / power at boost)).
    """
    if device.tensor_cores:
        return 1.0
    return float(min(1.0, np.sqrt(device.power_watts * TERA / (energy_per_flop * device.peak_flops_per_s))))


@dataclass(frozen=True, slots=True)
class ConvolutionSetup:
    """Device and convolution library (cuDNN) for which convolution times are computed.

    ``cudnn_release`` is the cuDNN release (major.minor), ``element_bytes`` the bytes of a stored element;
    ``channels_last`` is True for tensors in that layout.
    """

    device: DeviceDatasheet
    parameters: ConvolutionParameters
    element_bytes: Array
    cudnn_release: Array
    channels_last: bool

    @property
    def sustained_clock(self) -> float:
        return self.device.clock_hz * power_limited_boost_share(self.device, self.parameters.energy_per_flop)

    @property
    def multiprocessor_flops_per_s(self) -> float:
        """Peak FLOP/s of one multiprocessor at the clock that full arithmetic load sustains."""
        return self.device.flops_per_clock * self.sustained_clock

    @property
    def has_ampere_kernels(self) -> Mask:
        """True for releases of the library with kernels for Ampere's instructions."""
        return np.asarray(self.cudnn_release >= _AMPERE_KERNEL_RELEASE)

    @property
    def balanced_tile_width(self) -> Array:
        """Tile width at which operand loads cost as much as arithmetic; faster tensor cores need wider tiles."""
        demand = self.device.flops_per_clock * self.element_bytes / _REFERENCE_OPERAND_DEMAND
        demand = demand if self.device.tensor_cores else np.array(1.0)
        most = np.where(self.has_ampere_kernels, _AMPERE_OPERAND_DEMAND_RATIO, _MAX_OPERAND_DEMAND_RATIO)
        return np.asarray(self.parameters.balanced_tile_width * np.minimum(demand, most))

    def memory_time(self, elements: Array, fraction: Array | float) -> Array:
        """Compute the time to move elements to or from memory, at a share of the bandwidth [s].

        Parameters
        ----------
        elements : ndarray
            Elements that are moved.
        fraction : array-like
            Share of the datasheet's bandwidth that is reached.

        Returns
        -------
        ndarray
            Time [s].
        """
        return elements * self.element_bytes / (fraction * self.device.memory_bandwidth)

    def tensor_traffic_time(self, elements: Array) -> Array:
        """Compute the time to read and write the input, output and filter tensors of a convolution.

        Parameters
        ----------
        elements : ndarray
            Elements that are moved.

        Returns
        -------
        ndarray
            Time [s].
        """
        return self.memory_time(elements, self.parameters.bandwidth_fraction)

    def transform_traffic_time(self, elements: Array) -> Array:
        """Compute the time to read and write tensors in a transform (im2col, Winograd, FFT).

        Parameters
        ----------
        elements : ndarray
            Elements that are moved.

        Returns
        -------
        ndarray
            Time [s].
        """
        return self.memory_time(elements, self.parameters.transform_bandwidth)

    def _l2_time_ratio(self, elements: Array) -> Array:
        """Compute the time of traffic that partly stays in L2 between two kernels, relative to memory alone [-].

        Parameters
        ----------
        elements : ndarray
            Elements that are moved.

        Returns
        -------
        ndarray
            Below 1 if L2 holds the elements.
        """
        kept = l2_resident_share(elements * self.element_bytes, self.device)
        return np.asarray(1.0 - kept * (1.0 - 1.0 / L2_BANDWIDTH_RATIO))


def lossy_overlap_time(*times: Array) -> Array:
    """Combine times of parts that overlap with some loss, such as arithmetic and memory traffic.

    The result is the cubic norm (a³ + b³ + …)^(1/3), between the largest part and the sum.

    Parameters
    ----------
    *times : ndarray, shape (...)
        Times of the parts [s].

    Returns
    -------
    ndarray, shape (...)
        Time [s].

    Examples
    --------
    >>> round(float(lossy_overlap_time(np.array(3.0), np.array(4.0), np.array(5.0))), 9)
    6.0
    """
    return np.cbrt(sum((t**3 for t in times), start=np.zeros(())))


def tiled_gemm_time(
    m: Array,
    n: Array,
    k: Array,
    count: Array | float,
    machine: ConvolutionSetup,
    *,
    tiles: Tiles = _VECTOR_TILES,
    splits: tuple[int, ...] = (1,),
) -> Array:
    """Compute the time of equal GEMMs with the fastest thread-block tile and split-K.

    A block of tile (a, b) costs 1 + (balanced_tile_width (1/a + 1/b))^2 times the 2 a b k FLOP of an infinite tile.
    Only a wider tile loads fewer operands per FLOP. Blocks run in waves. Splits of k fill idle multiprocessors, and
    cost the traffic of the partial sums (32-bit) and a second, short phase. An element of the sum takes at least
    ``cycles_per_summed_element``: blocks that share a multiprocessor hide each other's latency, a single wave cannot.

    Parameters
    ----------
    m, n, k : ndarray
        Extents of the product C[m, n] = A[m, k] B[k, n].
    count : array-like
        Products.
    machine : ConvolutionSetup
        The device with its calibration.
    tiles : Tiles, default VECTOR_TILES
        Rows and columns of the tiles that the library has.
    splits : tuple of int, default (1,)
        Parts into which k may be cut.

    Returns
    -------
    ndarray
        Seconds of arithmetic.
    """
    device, p, clock = machine.device, machine.parameters, machine.sustained_clock
    rate = p.gemm_efficiency * machine.multiprocessor_flops_per_s
    latency = np.asarray(p.cycles_per_summed_element / clock)
    step = _TENSOR_CORE_K_STEP if device.tensor_cores else 8.0
    best = np.full(np.broadcast_shapes(m.shape, n.shape, k.shape), np.inf)
    for a, b in tiles:
        flops = 2.0 * a * b * (1.0 + (machine.balanced_tile_width * (1.0 / a + 1.0 / b)) ** 2)
        blocks = np.ceil(m / a) * np.ceil(n / b) * count
        for parts in splits:
            depth = np.ceil(k / (parts * step)) * step
            rounds = wave_count(blocks * parts, device.multiprocessors, WAVE_ROUNDING)
            element = lossy_overlap_time(rounds * flops / rate, latency)
            seconds = depth * element + rounds * p.block_overhead_cycles / clock
            if parts > 1:
                sums = 4.0 * m * n * count * (parts + 1.0) / device.memory_bandwidth
                seconds = np.where(depth >= 4 * step, seconds + p.split_cycles / clock + sums, np.inf)
            best = np.minimum(best, seconds)
    return best


def _by_direction(shape: ConvolutionShape, forward: Array, data: Array, filters: Array) -> Array:
    backward = np.where(shape.direction == ConvolutionDirection.DATA, data, filters)
    return np.where(shape.direction == ConvolutionDirection.FORWARD, forward, backward)


def _padded_channels(channels: Array, machine: ConvolutionSetup) -> Array:
    """Return the channels that a kernel sums over at each filter tap, with padding.

    Tensor cores take channels in steps of 32 or 64. Few channels in channels-last layout are padded to 4, 8 or 16.
    """
    if not machine.device.tensor_cores:
        return channels
    early = (machine.device.architecture == "Ampere") & ~machine.has_ampere_kernels & (machine.element_bytes <= 2)
    step = np.where(early & (channels > _TENSOR_CORE_K_STEP), _EARLY_AMPERE_K_STEP, _TENSOR_CORE_K_STEP)
    whole = np.ceil(channels / step) * step
    narrow = 2.0 ** np.ceil(np.log2(np.maximum(channels, 4.0)))
    return np.where((channels <= 16) & machine.channels_last & machine.has_ampere_kernels, narrow, whole)


def _groups_per_product(shape: ConvolutionShape, machine: ConvolutionSetup) -> Array:
    """Count the groups that tensor cores compute in one product, as blocks on the diagonal of a wider filter matrix.

    A step of a tensor-core kernel sums over 32 channels. If a group has fewer, neighbouring groups fill the step, and
    the products with the zeros outside the diagonal are wasted.
    """
    if not machine.device.tensor_cores:
        return np.ones_like(shape.groups)
    return np.minimum(shape.groups, np.maximum(1.0, np.floor(_TENSOR_CORE_K_STEP / shape.channels)))


def _implicit_cost(shape: ConvolutionShape, machine: ConvolutionSetup) -> ConvolutionCost:
    """Compute the cost of a convolution as one product over the im2col matrix, which is never stored.

    The only workspace is for block sums of the filter gradient. On tensor cores a depthwise filter gradient has no such
    product. Extents: forward (n p q) x (c r s) x k; data gradient (n h w) x (k r s) x c, including the zeros of the
    stride; filter gradient k x (n p q) x (c r s).

    Parameters
    ----------
    shape : ConvolutionShape
        Extents of the convolution; fields broadcast.
    machine : ConvolutionSetup
        The device with its calibration.

    Returns
    -------
    ConvolutionCost
        Time [s] and workspace [byte].
    """
    p, tensor = machine.parameters, machine.device.tensor_cores
    joined = _groups_per_product(shape, machine)
    channels, outputs = shape.channels * joined, shape.filters * joined
    columns = _padded_channels(channels, machine) * shape.filter_taps
    classes = np.minimum(shape.stride_h, shape.kernel_h) * np.minimum(shape.stride_w, shape.kernel_w)
    classes = classes if tensor else np.ones_like(columns)
    stride = shape.stride_h * shape.stride_w if tensor else np.ones_like(columns)
    pixels = np.ceil(shape.batch * shape.height * shape.width / stride)
    image = shape.out_h * shape.out_w
    image = image if tensor else np.ceil(image / _IMAGE_STEP) * _IMAGE_STEP
    m = _by_direction(shape, shape.output_positions, pixels, outputs)
    n = _by_direction(shape, outputs, channels, columns)
    outgoing = _padded_channels(outputs, machine) * shape.filter_taps / classes
    k = _by_direction(shape, columns, outgoing, shape.batch * image)
    count = shape.groups / joined * np.where(shape.direction == ConvolutionDirection.DATA, classes, 1.0)
    ones = np.ones_like(m)
    factor = _by_direction(shape, ones, p.data_gradient_factor * ones, p.filter_gradient_factor * ones)
    kernels = _TENSOR_KERNELS if tensor else _VECTOR_KERNELS
    forward, data, filters = (tiled_gemm_time(m, n, k, count, machine, tiles=t, splits=s) for t, s in kernels)
    arithmetic = _by_direction(shape, forward, data, filters) * factor
    depthwise = (shape.channels == 1) & (shape.groups > 1) & (shape.direction == ConvolutionDirection.FILTER)
    seconds = lossy_overlap_time(arithmetic, machine.tensor_traffic_time(shape.moved_elements))
    return ConvolutionCost(np.where(depthwise & tensor, np.inf, seconds), np.zeros_like(m))


def explicit_im2col_cost(shape: ConvolutionShape, machine: ConvolutionSetup) -> ConvolutionCost:
    """Compute the cost of a convolution by explicit im2col: columns written to memory, then a plain GEMM.

    The data gradient writes the columns and adds them up (col2im). A library adds them up in the gradient tensor
    (cuDNN's data algorithm 0), so that no workspace is needed. The gradient is first filled with zeros, and the rows
    that outputs reach are read and written again. Thread blocks of the data gradient do not cross images.

    Parameters
    ----------
    shape : ConvolutionShape
        Extents of the convolution; fields broadcast.
    machine : ConvolutionSetup
        The device with its calibration.

    Returns
    -------
    ConvolutionCost
        Time [s] and workspace [byte].
    """
    columns, back = shape.channels * shape.filter_taps, shape.direction == ConvolutionDirection.DATA
    image = shape.out_h * shape.out_w
    m = _by_direction(shape, shape.output_positions, image, shape.filters)
    n = _by_direction(shape, shape.filters, columns, columns)
    k = _by_direction(shape, columns, shape.filters, shape.output_positions)
    stored = shape.output_positions * columns * shape.groups
    arithmetic = tiled_gemm_time(m, n, k, shape.groups * np.where(back, shape.batch, 1.0), machine)
    kept = machine._l2_time_ratio(stored)
    moved = kept * stored + shape.output_elements + shape.filter_elements
    product = lossy_overlap_time(arithmetic, machine.tensor_traffic_time(moved))
    reached = np.where(back, np.minimum(1.0, shape.kernel_h / shape.stride_h), 0.0)
    columned = machine.transform_traffic_time(kept * stored + (1.0 + reached) * shape.input_elements)
    needed = np.where(back, 0.0, stored * machine.element_bytes)
    return ConvolutionCost(product + columned, needed)


def _square_unit(shape: ConvolutionShape, side: float) -> Mask:
    """Return True where the filter is side x side, with stride 1 and no dilation."""
    return np.asarray((shape.kernel_h == side) & (shape.kernel_w == side) & shape.is_plain)


def _extents_of_result(shape: ConvolutionShape) -> tuple[Array, Array, Array, Array]:
    """Return (rows, columns, channels summed over, channels of the result) of a convolution, by its direction.

    The data gradient swaps input and output.
    """
    back = shape.direction == ConvolutionDirection.DATA
    return (
        np.where(back, shape.height, shape.out_h),
        np.where(back, shape.width, shape.out_w),
        np.where(back, shape.filters, shape.channels),
        np.where(back, shape.channels, shape.filters),
    )


def _winograd_cost(shape: ConvolutionShape, machine: ConvolutionSetup) -> ConvolutionCost:
    """Compute the cost of the fused Winograd algorithm F(2x2, 3x3).

    A block holds 16 products of 32 tiles x 32 filters, so edges of an image cost whole blocks.

    Parameters
    ----------
    shape : ConvolutionShape
        Extents of the convolution; fields broadcast.
    machine : ConvolutionSetup
        The device with its calibration.

    Returns
    -------
    ConvolutionCost
        Time [s] and workspace [byte].
    """
    p, device = machine.parameters, machine.device
    rows, columns, summed, outputs = _extents_of_result(shape)
    high, wide, deep = _WINOGRAD_BLOCK
    blocks = shape.batch * np.ceil(rows / high) * np.ceil(columns / wide) * np.ceil(outputs / deep) * shape.groups
    flops = 2.0 * 16.0 * (high * wide / 4.0) * deep * np.ceil(summed / 8.0) * 8.0
    rate = p.winograd_efficiency * machine.multiprocessor_flops_per_s
    waves = wave_count(blocks, device.multiprocessors, WAVE_ROUNDING)
    seconds = waves * (flops / rate + p.winograd_cycles / machine.sustained_clock)
    weights = machine.transform_traffic_time(shape.filter_elements * (1 + 16 / 9))
    applies = _square_unit(shape, 3.0) & (shape.direction != ConvolutionDirection.FILTER)
    total = lossy_overlap_time(seconds, machine.tensor_traffic_time(shape.moved_elements)) + weights
    workspace = shape.filter_elements * 16 / 9 * machine.element_bytes
    return ConvolutionCost(np.where(applies, total, np.inf), workspace, 4 / 9)


def _transformed_cost(
    shape: ConvolutionShape, machine: ConvolutionSetup, tiles: Array, points: float, flop_factor: float, words: float
) -> ConvolutionCost:
    """Compute the cost of a Winograd or FFT convolution with stored transforms around batched GEMMs.

    There are ``points`` products of tiles x c x k. A point has ``words`` stored elements, and ``flop_factor`` times the
    FLOP of a real product.
    """
    p, g = machine.parameters, shape.groups
    filters = shape.direction == ConvolutionDirection.FILTER
    _, _, summed, outputs = _extents_of_result(shape)
    m, n, k = np.where(filters, outputs, tiles), np.where(filters, summed, outputs), np.where(filters, tiles, summed)
    arithmetic = tiled_gemm_time(m, n, k, points * g, machine) * flop_factor
    ends, middle = points * words * tiles * (summed + outputs) * g, points * words * summed * outputs * g
    kept = machine._l2_time_ratio(ends + middle)
    product = lossy_overlap_time(arithmetic, machine.tensor_traffic_time(kept * (ends + middle)))
    fraction = np.where(filters, p.transform_bandwidth, p.weight_transform_bandwidth)
    weights = machine.memory_time(kept * middle + shape.filter_elements, fraction)
    images = machine.transform_traffic_time(kept * ends + shape.input_elements + shape.output_elements)
    return ConvolutionCost(product + weights + images, (ends + middle) * machine.element_bytes)


def _nonfused_cost(shape: ConvolutionShape, machine: ConvolutionSetup) -> ConvolutionCost:
    """Compute the cost of unfused Winograd, F(4x4, 3x3) or F(4x4, 5x5), with stored transforms.

    There are 36 or 64 batched products over tiles of 4 x 4 outputs.

    Parameters
    ----------
    shape : ConvolutionShape
        Extents of the convolution; fields broadcast.
    machine : ConvolutionSetup
        The device with its calibration.

    Returns
    -------
    ConvolutionCost
        Time [s] and workspace [byte].
    """
    rows, columns, _, _ = _extents_of_result(shape)
    tiles = shape.batch * np.ceil(rows / 4.0) * np.ceil(columns / 4.0)
    three, five = _square_unit(shape, 3.0), _square_unit(shape, 5.0)
    small, large = (_transformed_cost(shape, machine, tiles, points, 1.0, 1.0) for points in (36.0, 64.0))
    return ConvolutionCost(
        np.where(three, small.seconds, np.where(five, large.seconds, np.inf)),
        np.where(three, small.workspace_bytes, large.workspace_bytes),
        np.where(three, 36.0 / (16.0 * 9.0), 64.0 / (16.0 * 25.0)),
    )


def _fft_cost(shape: ConvolutionShape, machine: ConvolutionSetup) -> ConvolutionCost:
    """Compute the cost of an FFT convolution: transforms, and one complex product for each frequency.

    A tile of F x F has F (F/2 + 1) complex points; the fastest F of 16 to 128 is taken.

    Parameters
    ----------
    shape : ConvolutionShape
        Extents of the convolution; fields broadcast.
    machine : ConvolutionSetup
        The device with its calibration.

    Returns
    -------
    ConvolutionCost
        Time [s] and workspace [byte].
    """
    rows, columns, _, _ = _extents_of_result(shape)
    seconds, workspace, work = (np.full(rows.shape, fill) for fill in (np.inf, np.inf, 1.0))
    for side in (16.0, 32.0, 64.0, 128.0):
        valid_h, valid_w = side - shape.kernel_h + 1.0, side - shape.kernel_w + 1.0
        tiles = shape.batch * np.ceil(rows / np.maximum(valid_h, 1.0)) * np.ceil(columns / np.maximum(valid_w, 1.0))
        points = side * (side / 2.0 + 1.0)
        cost = _transformed_cost(shape, machine, tiles, points, 4.0, 2.0)
        better = shape.is_plain & (valid_h >= 1) & (valid_w >= 1) & (cost.seconds < seconds)
        seconds = np.where(better, cost.seconds, seconds)
        workspace = np.where(better, cost.workspace_bytes, workspace)
        work = np.where(better, np.minimum(1.0, 4.0 * points / (valid_h * valid_w * shape.filter_taps)), work)
    return ConvolutionCost(seconds, workspace, work)


def _direct_cost(shape: ConvolutionShape, machine: ConvolutionSetup) -> ConvolutionCost:
    """Compute the cost of a direct depthwise convolution, which has no matrix product.

    Each result sums its taps separately, at a small share of peak or at the speed of memory. In the filter gradient
    each tap is a result: a thread block reads the whole channel of both tensors, in all images, and L2 keeps nothing.

    Parameters
    ----------
    shape : ConvolutionShape
        Extents of the convolution; fields broadcast.
    machine : ConvolutionSetup
        The device with its calibration.

    Returns
    -------
    ConvolutionCost
        Time [s] and workspace [byte].
    """
    arithmetic = shape.flops / (_DIRECT_SHARE * machine.multiprocessor_flops_per_s * machine.device.multiprocessors)
    rereads = np.where(shape.direction == ConvolutionDirection.FILTER, shape.filter_taps - 1.0, 0.0)
    reread = rereads * (shape.input_elements + shape.output_elements)
    seconds = lossy_overlap_time(arithmetic, machine.tensor_traffic_time(shape.moved_elements + reread))
    depthwise = (shape.channels == 1) & (shape.groups > 1)
    return ConvolutionCost(np.where(depthwise, seconds, np.inf), np.zeros_like(arithmetic))


#: Algorithms for vector units only; with tensor cores the fewer products do not pay for their transforms.
_VECTOR_ONLY = frozenset({"explicit", "winograd", "nonfused", "fft"})
#: Algorithms with fewer products, and transforms in exchange.
FAST_CONVOLUTION_ALGORITHMS = frozenset({"winograd", "nonfused", "fft"})
#: Release of cuDNN in current programs, and the value for frameworks with kernels of their own, which have every named
#: algorithm.
CURRENT_CUDNN_RELEASE, NON_CUDNN_RELEASE = 9.0, np.inf
#: cuDNN release from which an algorithm is chosen, in each direction (forward, data, filter); inf: never. Releases 5.1
#: and 6 have the unfused Winograd kernels, but measured rows show that their heuristics do not choose them forward or
#: for the data gradient. So 7.0 is an observation, not a release note; see SEARCHED_FROM.
FIRST_CHOSEN_RELEASE: Releases = {
    "implicit": (1.0, 1.0, 1.0),
    "explicit": (2.0, 2.0, np.inf),
    "winograd": (5.0, 5.0, np.inf),
    "nonfused": (7.0, 7.0, 5.1),
    "fft": (3.0, 3.0, 3.0),
    "direct": (1.0, 1.0, 1.0),
}
#: The same if a framework times all algorithms of the library and keeps the fastest: by the release notes.
FIRST_AUTOTUNED_RELEASE: Releases = {**FIRST_CHOSEN_RELEASE, "nonfused": (5.1, 5.1, 5.1)}
#: cuDNN release 3 brought kernels for Maxwell; before it implicit products took 1.28 times as long. This is the
#: geometric mean over the five layers of convnet-benchmarks on a Titan X (Maxwell), which are within 12 % of it.
#: Earlier kernels were written for Kepler, on which they are assumed to be as good.
_EARLY_CUDNN_RELEASE, _EARLY_CUDNN_SLOWDOWN, _EARLY_CUDNN_ARCHITECTURE = 3.0, 1.28, "Kepler"

CONVOLUTION_ALGORITHMS: Mapping[str, Callable[[ConvolutionShape, ConvolutionSetup], ConvolutionCost]] = {
    "implicit": _implicit_cost,
    "explicit": explicit_im2col_cost,
    "winograd": _winograd_cost,
    "nonfused": _nonfused_cost,
    "fft": _fft_cost,
    "direct": _direct_cost,
}


def convolution_costs(
    shape: ConvolutionShape,
    *,
    device: DeviceDatasheet,
    parameters: ConvolutionParameters,
    element_bytes: Numeric = 4.0,
    library: Numeric = CURRENT_CUDNN_RELEASE,
    channels_last: bool = False,
    algorithms: Collection[str] = tuple(FIRST_CHOSEN_RELEASE),
    available: Releases = FIRST_CHOSEN_RELEASE,
) -> dict[str, ConvolutionCost]:
    """Compute the time and workspace of each algorithm that a library has for a convolution.

    Valid for 2-D convolutions of 1 to 10^5 positions and more. Library heuristics that choose a slower kernel than the
    best (as in cuDNN 4 to 6) are modelled only by `available`.

    Parameters
    ----------
    shape : ConvolutionShape
        Extents of the convolution; fields broadcast.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : ConvolutionParameters
        Calibrated parameters of the kernel on the device.
    element_bytes : array-like, default 4.0
        Bytes of a stored element.
    library : array-like, default CURRENT_CUDNN_RELEASE
        cuDNN version, such as 7.6.
    channels_last : bool, default False
        True if tensors have that layout on tensor cores.
    algorithms : collection of str, default tuple(FIRST_CHOSEN_RELEASE)
        Names of algorithms.
    available : mapping of str to tuple of (float, float, float), default FIRST_CHOSEN_RELEASE
        First release with each algorithm: `FIRST_CHOSEN_RELEASE` or `FIRST_AUTOTUNED_RELEASE`.

    Returns
    -------
    dict of str to ConvolutionCost
        Time (launch included) and workspace by algorithm; infinite time if the library lacks the algorithm.
    """
    width, release = (np.asarray(number, dtype=np.float64) for number in (element_bytes, library))
    machine = ConvolutionSetup(device, parameters, width, release, channels_last)
    costs = {}
    for name in algorithms:
        cost = CONVOLUTION_ALGORITHMS[name](shape, machine)
        since = np.asarray(available[name])[shape.direction]
        absent = (np.asarray(library) < since) | (device.tensor_cores and name in _VECTOR_ONLY)
        early = name == "implicit" and device.architecture != _EARLY_CUDNN_ARCHITECTURE
        slower = np.where(early & (np.asarray(library) < _EARLY_CUDNN_RELEASE), _EARLY_CUDNN_SLOWDOWN, 1.0)
        costs[name] = replace(cost, seconds=np.where(absent, np.inf, cost.seconds * slower + parameters.launch_time))
    return costs


def fastest_convolution_time_and_flops(
    costs: Mapping[str, ConvolutionCost], workspace_limit: Numeric = np.inf
) -> tuple[Array, Array]:
    """Return the time of the fastest convolution algorithm within a workspace limit, and its relative FLOP.

    Parameters
    ----------
    costs : mapping of str to ConvolutionCost
        Time and workspace of each algorithm.
    workspace_limit : array-like, default np.inf
        Largest workspace [byte].

    Returns
    -------
    tuple of (ndarray, ndarray)
        (time [s], infinite if no algorithm fits; FLOP of its products over those of direct convolution [-]).
    """
    times = [np.where(cost.workspace_bytes <= workspace_limit, cost.seconds, np.inf) for cost in costs.values()]
    seconds = np.stack(np.broadcast_arrays(*times))
    work = np.stack([np.broadcast_to(cost.relative_flops, seconds.shape[1:]) for cost in costs.values()])
    chosen = seconds.argmin(axis=0)[None]
    return tuple(np.take_along_axis(each, chosen, axis=0)[0] for each in (seconds, work))


def fastest_convolution_time(costs: Mapping[str, ConvolutionCost], workspace_limit: Numeric = np.inf) -> Array:
    """Return the time of the fastest convolution algorithm within a workspace limit.

    Parameters
    ----------
    costs : mapping of str to ConvolutionCost
        Time and workspace of each algorithm.
    workspace_limit : array-like, default np.inf
        Largest workspace [byte].

    Returns
    -------
    ndarray
        Times [s]; infinite if none fits.
    """
    return fastest_convolution_time_and_flops(costs, workspace_limit)[0]
