"""Cost of each algorithm of a convolution: seconds and workspace of one kernel call.

Each algorithm is a matrix product (or a batch of them) with what it costs to bring the operands into that form:

    implicit   the im2col matrix is formed on the fly, tile by tile; a strided data gradient wastes taps
    explicit   the im2col matrix is written to and read from memory (col2im for the data gradient)
    winograd   F(2x2, 3x3) in one kernel: a block owns 8 x 16 outputs of one image and 32 filters; 2.25x fewer products
    nonfused   F(4x4, 3x3) or F(4x4, 5x5): transforms round 36 or 64 batched matrix products; 4x and 6.25x fewer
    fft        tiles of 32 x 32 points and more: transforms round complex matrix products, one for each frequency
    direct     one thread for one output, no reuse across filters: what depthwise convolution comes to

References: Chetlur et al., cuDNN, arXiv:1410.0759 (implicit, explicit); Lavin and Gray, CVPR 2016 (Winograd);
Vasilache et al., ICLR 2015 (FFT); Williams, Waterman and Patterson, CACM 52(4), 2009 (roofline).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.convolution_shape import Direction
from paleo.specs.calibration import parameter
from paleo.units import MICROSECOND, TERA

if TYPE_CHECKING:
    from paleo.pricing.convolution_shape import ConvolutionShape
    from paleo.pricing.kernels import DeviceFigures

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Tiles = tuple[tuple[int, int], ...]
Kernels = tuple[tuple[Tiles, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ConvolutionParameters:
    """What a datasheet does not say about a convolution library on a device."""

    launch: float = parameter(
        8 * MICROSECOND,
        low=MICROSECOND,
        high=400 * MICROSECOND,
        unit="s",
        meaning="time of an empty call",
    )
    gemm_efficiency: float = parameter(
        0.95,
        low=0.3,
        high=1.3,
        unit="1",
        meaning="share of peak arithmetic of a large tile in its inner loop",
    )
    tile_penalty: float = parameter(
        16.0, low=2.0, high=60.0, unit="element", meaning="tile width at which operand loads cost as much as arithmetic"
    )
    wave_cycles: float = parameter(
        300.0,
        low=10.0,
        high=20000.0,
        unit="cycle",
        meaning="prologue and epilogue of a block, not hidden",
    )
    bandwidth_fraction: float = parameter(
        0.55, low=0.15, high=1.0, unit="1", meaning="share of memory bandwidth that a convolution reads and writes with"
    )
    depth_cycles: float = parameter(
        100.0, low=2.0, high=600.0, unit="cycle", meaning="least cycles of a block for each element of the sum: latency"
    )
    winograd_efficiency: float = parameter(
        0.86, low=0.3, high=1.2, unit="1", meaning="share of peak of the fused Winograd kernel, on its reduced products"
    )
    winograd_cycles: float = parameter(
        2500.0,
        low=300.0,
        high=20000.0,
        unit="cycle",
        meaning="first and last transforms of a fused block",
    )
    transform_bandwidth: float = parameter(
        0.5, low=0.1, high=1.2, unit="1", meaning="share of memory bandwidth of transforms and of im2col"
    )
    weight_transform_bandwidth: float = parameter(
        0.2, low=0.03, high=1.2, unit="1", meaning="share of memory bandwidth of filter transforms: short strided rows"
    )
    data_gradient_factor: float = parameter(
        1.1, low=0.7, high=2.5, unit="1", meaning="time of the implicit data gradient over the same product forward"
    )
    filter_gradient_factor: float = parameter(
        1.3, low=0.7, high=3.0, unit="1", meaning="time of the implicit filter gradient over the same product forward"
    )
    split_cycles: float = parameter(
        3000.0, low=200.0, high=50000.0, unit="cycle", meaning="start and end of the reduction over splits of a product"
    )
    energy_per_flop: float = parameter(
        17.0,
        low=1.0,
        high=60.0,
        unit="pJ/FLOP",
        meaning="board power over rate at boost clock",
        fitted=False,
    )


#: Weight of whole waves of blocks against a smooth count: an SM holds a few blocks, so the last wave is partly filled.
QUANTISATION = 0.7
#: Block tiles (rows, columns) of plain products on vector units, and parts that the sum may be split into.
VECTOR_TILES: Tiles = ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128))
WHOLE, SPLITS = (1,), (1, 4, 16, 64)
#: Kernels of the implicit method as (tiles, splits): forward and data gradient have pixels by channels, the filter
#: gradient filters by channels times taps. Vector kernels own 128 pixels; only the filter gradient, and tensor cores
#: forward, split.
VECTOR_KERNELS: Kernels = (
    (((128, 128), (128, 64), (128, 32)), WHOLE),
    (((128, 128), (128, 64), (128, 32)), WHOLE),
    (((128, 128), (64, 128), (32, 128)), SPLITS),
)
TENSOR_KERNELS: Kernels = (
    (((256, 128), (128, 128), (256, 64), (128, 64)), (1, 4)),
    (((256, 128), (128, 128), (256, 64)), WHOLE),
    (((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)), SPLITS),
)
#: Share of L2 that intermediates of a method may fill, and bandwidth of L2 over that of memory. Assumed, not fitted:
#: microbenchmarks of V100 (Jia et al., arXiv:1804.06826) and its neighbours lie round 2 to 4.
L2_SHARE, L2_OVER_MEMORY = 0.6, 3.0
#: Share of the vector peak of the direct kernel, whose threads load two operands for each product.
DIRECT_SHARE = 0.25
#: Elements that a tensor-core kernel sums over at a time; those for Ampere before `AMPERE_KERNELS` take 64 numbers of
#: sixteen bits where there are more than 32 channels (the depth of a stage in their names: ``64x3``).
TENSOR_STEP, FIRST_AMPERE_STEP = 32.0, 64.0
#: Operand bytes that a multiprocessor's tensor cores ask for in a clock, as FLOP times bytes of an element: a V100's in
#: fp16, for which ``tile_penalty`` was measured, and the most above it, before `AMPERE_KERNELS` and since. Shared
#: memory gives 128 bytes a clock on all of them. Instructions of Ampere share operands over 32 threads instead of 8,
#: and copies to shared memory pass by the registers (NVIDIA A100 whitepaper, 2020), so that twice the rate does not
#: ask for twice the bytes; images on A100 say 1.4, on H100 1.0.
TENSOR_DEMAND, LARGEST_DEMAND, AMPERE_DEMAND = 2048.0, 2.0, 1.25
#: The cuDNN release (early 2021) from which convolutions are written for Ampere's instructions, and from which few
#: channels, laid out last, are padded to 4, 8 or 16 instead of a whole step.
AMPERE_KERNELS = 8.1
#: Positions that the filter gradient sums at a time; it starts each image anew.
IMAGE_STEP = 32.0
#: Outputs (rows, columns) of one image and filters that one block of the fused Winograd kernel owns (cuDNN's tile148).
WINOGRAD_BLOCK = (8, 16, 32)


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds (launch apart) and workspace bytes of one algorithm; infinite seconds where it does not apply."""

    seconds: Array
    workspace: Array


def sustained_clock_share(device: DeviceFigures, energy_per_flop: float) -> float:
    """Share of the boost clock under full arithmetic load: min(1, sqrt(power limit / power at boost)).

    Power goes with f V^2; between boost and the lowest voltage V falls with f, below it V is fixed, so that power falls
    with f^3 and then with f: with f^2 on the whole. ``energy_per_flop`` is in pJ/FLOP at boost (a 250 W V100 of
    14 TFLOP/s: 17.9). Tensor cores spend their own energy and are not derated here.
    """
    if device.tensor_cores:
        return 1.0
    return float(min(1.0, np.sqrt(device.power_watts * TERA / (energy_per_flop * device.peak_flops_per_s))))


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, its calibration, the bytes of an element, and the library."""

    device: DeviceFigures
    parameters: ConvolutionParameters
    element_bytes: Array
    library: Array
    channels_last: bool

    @property
    def clock(self) -> float:
        return self.device.clock_hz * sustained_clock_share(self.device, self.parameters.energy_per_flop)

    @property
    def block_rate(self) -> float:
        """Peak FLOP/s of one multiprocessor at the sustained clock."""
        return self.device.flops_per_clock * self.clock

    @property
    def tile_penalty(self) -> Array:
        """Tile width at which operand loads cost as much as arithmetic: faster tensor cores need wider tiles."""
        demand = self.device.flops_per_clock * self.element_bytes / TENSOR_DEMAND if self.device.tensor_cores else 1.0
        most = np.where(self.library >= AMPERE_KERNELS, AMPERE_DEMAND, LARGEST_DEMAND)
        return np.asarray(self.parameters.tile_penalty * np.minimum(demand, most))

    def memory_time(self, elements: Array, fraction: Array | float) -> Array:
        return elements * self.element_bytes / (fraction * self.device.memory_bandwidth)

    def streamed(self, elements: Array) -> Array:
        return self.memory_time(elements, self.parameters.bandwidth_fraction)

    def transformed(self, elements: Array) -> Array:
        return self.memory_time(elements, self.parameters.transform_bandwidth)

    def l2_time_ratio(self, elements: Array) -> Array:
        """Time of traffic between kernels over that of the same traffic through memory: below 1 where L2 holds it."""
        kept = 1.0 / (1.0 + (elements * self.element_bytes / (L2_SHARE * self.device.l2_bytes)) ** 4)
        return np.asarray(1.0 - kept * (1.0 - 1.0 / L2_OVER_MEMORY))


def overlapped(*times: Array) -> Array:
    """Time of parts that overlap but for their edges, the cubic norm: max <= t <= sum.

    >>> round(float(overlapped(np.array(3.0), np.array(4.0), np.array(5.0))), 9)
    6.0
    """
    return np.cbrt(sum((t**3 for t in times), start=np.zeros(())))


def waves(blocks: Array, multiprocessors: float, quantisation: float = QUANTISATION) -> Array:
    """Turns that ``blocks`` equal blocks take on ``multiprocessors``, between a whole and a fractional count.

    >>> float(waves(np.array(90.0), 80.0, 1.0)), float(waves(np.array(20.0), 80.0, 1.0))
    (2.0, 1.0)
    """
    share = blocks / multiprocessors
    return quantisation * np.ceil(share) + (1.0 - quantisation) * np.maximum(share, 1.0)


def product_time(
    m: Array,
    n: Array,
    k: Array,
    count: Array | float,
    machine: Machine,
    *,
    tiles: Tiles = VECTOR_TILES,
    splits: tuple[int, ...] = (1,),
) -> Array:
    """Arithmetic time [s] of ``count`` products (m x k)(k x n) by the best block tile and split of k.

    A block of tile (a, b) does 2 a b k FLOP at 1 + (tile_penalty (1/a + 1/b))^2 times the cost of an endless tile,
    since the operands that it loads shrink only with its width; blocks run in waves. Splitting k fills idle
    multiprocessors and costs the traffic of the partial sums (32-bit) and a second, short phase. An element of the sum
    takes at least ``depth_cycles``: blocks that share a multiprocessor hide each other's latency, a lone wave cannot.
    """
    device, p = machine.device, machine.parameters
    rate = p.gemm_efficiency * machine.block_rate
    step = TENSOR_STEP if device.tensor_cores else 8.0
    best = np.full(np.broadcast_shapes(m.shape, n.shape, k.shape), np.inf)
    for a, b in tiles:
        flops = 2.0 * a * b * (1.0 + (machine.tile_penalty * (1.0 / a + 1.0 / b)) ** 2)
        blocks = np.ceil(m / a) * np.ceil(n / b) * count
        for parts in splits:
            depth = np.ceil(k / (parts * step)) * step
            rounds = waves(blocks * parts, device.multiprocessors)
            element = overlapped(rounds * flops / rate, np.asarray(p.depth_cycles / machine.clock))
            seconds = depth * element + rounds * p.wave_cycles / machine.clock
            if parts > 1:
                sums = 4.0 * m * n * count * (parts + 1.0) / device.memory_bandwidth
                seconds = np.where(depth >= 4 * step, seconds + p.split_cycles / machine.clock + sums, np.inf)
            best = np.minimum(best, seconds)
    return best


def _by_direction(shape: ConvolutionShape, forward: Array, data: Array, filters: Array) -> Array:
    return np.where(
        shape.direction == Direction.FORWARD, forward, np.where(shape.direction == Direction.DATA, data, filters)
    )


def _padded(channels: Array, machine: Machine) -> Array:
    """Channels that a kernel sums over at each tap: tensor cores take them in steps of 32 or 64, or few of them, laid
    out last, in 4, 8 or 16."""
    if not machine.device.tensor_cores:
        return channels
    early = (
        (machine.device.architecture == "Ampere") & (machine.library < AMPERE_KERNELS) & (machine.element_bytes <= 2)
    )
    step = np.where(early & (channels > TENSOR_STEP), FIRST_AMPERE_STEP, TENSOR_STEP)
    whole = np.ceil(channels / step) * step
    narrow = 2.0 ** np.ceil(np.log2(np.maximum(channels, 4.0)))
    return np.where((channels <= 16) & machine.channels_last & (machine.library >= AMPERE_KERNELS), narrow, whole)


def _joined(shape: ConvolutionShape, machine: Machine) -> Array:
    """Groups that one product takes together on tensor cores, as blocks on the diagonal of a wider filter matrix.

    A step of a tensor-core kernel sums over 32 channels; where a group has fewer, its neighbours fill the step, and
    their products with the zeros beside the diagonal are thrown away.
    """
    if not machine.device.tensor_cores:
        return np.ones_like(shape.groups)
    return np.minimum(shape.groups, np.maximum(1.0, np.floor(TENSOR_STEP / shape.channels)))


def implicit_cost(shape: ConvolutionShape, machine: Machine) -> Cost:
    """One product over the im2col matrix, which is never stored; no workspace but block sums of the filter gradient.

    On tensor cores a depthwise filter gradient has no such product.

    Forward (n p q) x (c r s) x k; data gradient (n h w) x (k r s) x c, zeros of the stride included; filter gradient
    k x (n p q) x (c r s).
    """
    p, tensor = machine.parameters, machine.device.tensor_cores
    joined = _joined(shape, machine)
    channels, outputs = shape.channels * joined, shape.filters * joined
    columns = _padded(channels, machine) * shape.taps
    classes = np.minimum(shape.stride_h, shape.kernel_h) * np.minimum(shape.stride_w, shape.kernel_w)
    classes = classes if tensor else np.ones_like(columns)
    stride = shape.stride_h * shape.stride_w if tensor else np.ones_like(columns)
    pixels = np.ceil(shape.batch * shape.height * shape.width / stride)
    image = shape.out_h * shape.out_w
    image = image if tensor else np.ceil(image / IMAGE_STEP) * IMAGE_STEP
    m = _by_direction(shape, shape.positions, pixels, outputs)
    n = _by_direction(shape, outputs, channels, columns)
    k = _by_direction(shape, columns, _padded(outputs, machine) * shape.taps / classes, shape.batch * image)
    count = shape.groups / joined * np.where(shape.direction == Direction.DATA, classes, 1.0)
    ones = np.ones_like(m)
    factor = _by_direction(shape, ones, p.data_gradient_factor * ones, p.filter_gradient_factor * ones)
    kernels = TENSOR_KERNELS if tensor else VECTOR_KERNELS
    forward, data, filters = (product_time(m, n, k, count, machine, tiles=t, splits=s) for t, s in kernels)
    arithmetic = _by_direction(shape, forward, data, filters) * factor
    depthwise = (shape.channels == 1) & (shape.groups > 1) & (shape.direction == Direction.FILTER)
    seconds = overlapped(arithmetic, machine.streamed(shape.elements))
    return Cost(np.where(depthwise & tensor, np.inf, seconds), np.zeros_like(m))


def explicit_cost(shape: ConvolutionShape, machine: Machine) -> Cost:
    """im2col to memory, then a plain product; the data gradient writes the columns and adds them up (col2im).

    A library adds them up in the gradient itself (cuDNN's data algorithm 0), so that it needs no workspace: it is
    filled with zeros first, and the rows that outputs reach are read and written again. Its blocks stay in an image.
    """
    columns, back = shape.channels * shape.taps, shape.direction == Direction.DATA
    image = shape.out_h * shape.out_w
    m = _by_direction(shape, shape.positions, image, shape.filters)
    n = _by_direction(shape, shape.filters, columns, columns)
    k = _by_direction(shape, columns, shape.filters, shape.positions)
    stored = shape.positions * columns * shape.groups
    arithmetic = product_time(m, n, k, shape.groups * np.where(back, shape.batch, 1.0), machine)
    kept = machine.l2_time_ratio(stored)
    product = overlapped(arithmetic, machine.streamed(kept * stored + shape.output_elements + shape.filter_elements))
    reached = np.where(back, np.minimum(1.0, shape.kernel_h / shape.stride_h), 0.0)
    columned = machine.transformed(kept * stored + (1.0 + reached) * shape.input_elements)
    needed = np.where(back, 0.0, stored * machine.element_bytes)
    return Cost(product + columned, needed)


def _square_unit(shape: ConvolutionShape, side: float) -> Mask:
    """Where the filter is side x side, steps by one and is not dilated."""
    plain = (shape.stride_h == 1) & (shape.stride_w == 1) & (shape.dilation_h == 1) & (shape.dilation_w == 1)
    return np.asarray((shape.kernel_h == side) & (shape.kernel_w == side) & plain)


def _ends(shape: ConvolutionShape) -> tuple[Array, Array, Array, Array]:
    """Rows and columns that are made, channels summed over, channels made; the data gradient swaps input and output."""
    back = shape.direction == Direction.DATA
    return (
        np.where(back, shape.height, shape.out_h),
        np.where(back, shape.width, shape.out_w),
        np.where(back, shape.filters, shape.channels),
        np.where(back, shape.channels, shape.filters),
    )


def winograd_cost(shape: ConvolutionShape, machine: Machine) -> Cost:
    """F(2x2, 3x3) fused: 16 products of 32 tiles x 32 filters in a block, so edges of an image cost whole blocks."""
    p, device = machine.parameters, machine.device
    rows, columns, summed, outputs = _ends(shape)
    high, wide, deep = WINOGRAD_BLOCK
    blocks = shape.batch * np.ceil(rows / high) * np.ceil(columns / wide) * np.ceil(outputs / deep) * shape.groups
    flops = 2.0 * 16.0 * (high * wide / 4.0) * deep * np.ceil(summed / 8.0) * 8.0
    rate = p.winograd_efficiency * machine.block_rate
    seconds = waves(blocks, device.multiprocessors) * (flops / rate + p.winograd_cycles / machine.clock)
    weights = machine.transformed(shape.filter_elements * (1 + 16 / 9))
    applies = _square_unit(shape, 3.0) & (shape.direction != Direction.FILTER)
    total = overlapped(seconds, machine.streamed(shape.elements)) + weights
    return Cost(np.where(applies, total, np.inf), shape.filter_elements * 16 / 9 * machine.element_bytes)


def _transformed_cost(
    shape: ConvolutionShape, machine: Machine, tiles: Array, points: float, flop_factor: float, words: float
) -> Cost:
    """Transforms round ``points`` batched products of tiles x c x k.

    A point has ``words`` stored elements and ``flop_factor`` times the FLOP of a real product.
    """
    p, g = machine.parameters, shape.groups
    filters = shape.direction == Direction.FILTER
    _, _, summed, outputs = _ends(shape)
    m, n, k = np.where(filters, outputs, tiles), np.where(filters, summed, outputs), np.where(filters, tiles, summed)
    arithmetic = product_time(m, n, k, points * g, machine) * flop_factor
    ends, middle = points * words * tiles * (summed + outputs) * g, points * words * summed * outputs * g
    kept = machine.l2_time_ratio(ends + middle)
    product = overlapped(arithmetic, machine.streamed(kept * (ends + middle)))
    fraction = np.where(filters, p.transform_bandwidth, p.weight_transform_bandwidth)
    weights = machine.memory_time(kept * middle + shape.filter_elements, fraction)
    images = machine.transformed(kept * ends + shape.input_elements + shape.output_elements)
    return Cost(product + weights + images, (ends + middle) * machine.element_bytes)


def nonfused_cost(shape: ConvolutionShape, machine: Machine) -> Cost:
    """F(4x4, 3x3) or F(4x4, 5x5) with stored transforms: 36 or 64 batched products over tiles of 4 x 4 outputs."""
    rows, columns, _, _ = _ends(shape)
    tiles = shape.batch * np.ceil(rows / 4.0) * np.ceil(columns / 4.0)
    three, five = _square_unit(shape, 3.0), _square_unit(shape, 5.0)
    small, large = (_transformed_cost(shape, machine, tiles, points, 1.0, 1.0) for points in (36.0, 64.0))
    return Cost(
        np.where(three, small.seconds, np.where(five, large.seconds, np.inf)),
        np.where(three, small.workspace, large.workspace),
    )


def fft_cost(shape: ConvolutionShape, machine: Machine) -> Cost:
    """Products in the frequency domain: F (F/2 + 1) complex points for each F x F tile, the best F of 32 to 256."""
    rows, columns, _, _ = _ends(shape)
    plain = (shape.stride_h == 1) & (shape.stride_w == 1) & (shape.dilation_h == 1) & (shape.dilation_w == 1)
    seconds, workspace = np.full(rows.shape, np.inf), np.full(rows.shape, np.inf)
    for side in (16.0, 32.0, 64.0, 128.0):
        valid_h, valid_w = side - shape.kernel_h + 1.0, side - shape.kernel_w + 1.0
        tiles = shape.batch * np.ceil(rows / np.maximum(valid_h, 1.0)) * np.ceil(columns / np.maximum(valid_w, 1.0))
        cost = _transformed_cost(shape, machine, tiles, side * (side / 2.0 + 1.0), 4.0, 2.0)
        better = plain & (valid_h >= 1) & (valid_w >= 1) & (cost.seconds < seconds)
        seconds = np.where(better, cost.seconds, seconds)
        workspace = np.where(better, cost.workspace, workspace)
    return Cost(seconds, workspace)


def direct_cost(shape: ConvolutionShape, machine: Machine) -> Cost:
    """No product form: each result sums its taps alone, at a small share of peak or at the speed of memory.

    Of the filter gradient each tap is a result of its own: its block reads the whole of its channel in both tensors, in
    all images, of which L2 keeps nothing.
    """
    arithmetic = shape.flops / (DIRECT_SHARE * machine.block_rate * machine.device.multiprocessors)
    rereads = np.where(shape.direction == Direction.FILTER, shape.taps - 1.0, 0.0)
    reread = rereads * (shape.input_elements + shape.output_elements)
    seconds = overlapped(arithmetic, machine.streamed(shape.elements + reread))
    return Cost(np.where((shape.channels == 1) & (shape.groups > 1), seconds, np.inf), np.zeros_like(arithmetic))
