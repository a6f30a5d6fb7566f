"""Convolutions, pooling, and the region layers of two-stage detectors."""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Layer, LayerImplementations, LayerOperations, format_shape, option_per_spatial_dim
from paleo.operations.base import MemoryPass
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import DimSize, SlidingWindow, Tensor

# Convolutions over one to three spatial dims: grouped, depthwise, dilated, transposed

SizePerDim = PositiveInt | Annotated[list[PositiveInt], Field(min_length=1, max_length=3)]
Padding = NonNegativeInt | Annotated[list[NonNegativeInt], Field(min_length=1, max_length=3)] | Literal["same", "valid"]


def _padding_sizes(
    padding: Padding, kernel: tuple[int, ...], dilation: tuple[int, ...], *, name: str
) -> tuple[float, ...]:
    """Return the padding of each spatial dim: zeros on one side, averaged over both sides.

    ``same`` gives an output of ceil(n / stride), which at stride 1 is the size of the input.
    """
    if padding == "valid":
        return (0.0,) * len(kernel)
    if padding == "same":
        return tuple(d * (k - 1) / 2 for k, d in zip(kernel, dilation, strict=True))
    return tuple(float(p) for p in option_per_spatial_dim(padding, len(kernel), field="padding", name=name))


def _sliding_window_count(
    size: DimSize, kernel: int, stride: int, dilation: int, padding: float, *, ceil: bool = False
) -> int:
    """Return the number of positions of a sliding window: floor((n + 2p − d(k−1) − 1) / s) + 1.

    With ``ceil`` the quotient is rounded up, unless the last window would start in the padding.
    """
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    if span < 0:
        return 0
    count = -int(-span // stride) + 1 if ceil else int(span // stride) + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1
    return count


@LAYERS.register("conv")
class Conv(Layer):
    """Convolution to ``channels`` output channels, over (batch, channels, one to three spatial dims).

    ``groups: depthwise`` means one group per input channel. ``kernel``, ``stride``, ``padding`` and ``dilation`` are
    one number, or one per spatial dim.
    """

    channels: PositiveInt
    kernel: SizePerDim
    stride: SizePerDim = 1
    padding: Padding = 0
    dilation: SizePerDim = 1
    groups: PositiveInt | Literal["depthwise"] = 1
    bias: bool = True

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        rank = len(x.dims) - 2
        kernel, stride, dilation = (
            option_per_spatial_dim(getattr(self, field), rank, field=field, name=name)
            for field in ("kernel", "stride", "dilation")
        )
        padding = _padding_sizes(self.padding, kernel, dilation, name=name)
        space = tuple(map(_sliding_window_count, x.sizes[2:], kernel, stride, dilation, padding))
        if self.padding == "same":
            space = tuple(int(-(-n // s)) for n, s in zip(x.sizes[2:], stride, strict=True))
        channels = int(x.sizes[1])
        groups = channels if self.groups == "depthwise" else self.groups
        if channels % groups or self.channels % groups:
            raise GraphError(
                f"{name}: {channels} input and {self.channels} output channels cannot be cut into {groups} groups"
            )
        windows = _convolution_windows(x, stride, dilation, padding, kernel)
        return _convolution_expansion(name, x, self.channels, windows, space, groups, self.bias)


@LAYERS.register("transposed_conv")
class TransposedConv(Layer):
    """Transposed convolution: the data gradient of a convolution as a layer.

    A spatial size n becomes (n − 1)·stride − 2·padding + dilation·(kernel − 1) + output_padding + 1.
    """

    channels: PositiveInt
    kernel: SizePerDim
    stride: SizePerDim = 1
    padding: NonNegativeInt | list[NonNegativeInt] = 0
    output_padding: NonNegativeInt | list[NonNegativeInt] = 0
    dilation: SizePerDim = 1
    groups: PositiveInt = 1
    bias: bool = True

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        rank = len(x.dims) - 2
        fields = ("kernel", "stride", "dilation", "padding", "output_padding")
        kernel, stride, dilation, padding, extra = (
            option_per_spatial_dim(getattr(self, f), rank, field=f, name=name) for f in fields
        )
        pieces = zip(x.sizes[2:], kernel, stride, dilation, padding, extra, strict=True)
        space = tuple(int((n - 1) * s - 2 * p + d * (k - 1) + e + 1) for n, k, s, d, p, e in pieces)
        if int(x.sizes[1]) % self.groups or self.channels % self.groups:
            channels = f"{x.sizes[1]} input and {self.channels} output channels"
            raise GraphError(f"{name}: {channels} cannot be cut into {self.groups} groups")
        windows = _convolution_windows(x, stride, dilation, padding, kernel)
        return _convolution_expansion(name, x, self.channels, windows, space, self.groups, self.bias, transposed=True)


def _convolution_windows(x: Tensor, *options: tuple[float, ...]) -> tuple[SlidingWindow, ...]:
    """Return the window of each spatial dim from stride, dilation, padding and kernel of all dims."""
    dims = (tuple(map(int, each)) for each in zip(*options, strict=True))
    return tuple(SlidingWindow(d, f"in_{d}", f"kernel_{d}", *each) for d, each in zip(x.dims[2:], dims, strict=True))


def _convolution_expansion(
    name: str,
    x: Tensor,
    channels: int,
    windows: tuple[SlidingWindow, ...],
    space: tuple[int, ...],
    groups: int,
    bias: bool,
    *,
    transposed: bool = False,
) -> LayerOperations:
    """Return the expansion of a convolution: a contraction over input channels and kernel dims.

    Each spatial dim has a window. ``space`` are the output sizes.
    """
    if min(space) < 1:
        kernel = [window.taps for window in windows]
        raise GraphError(f"{name}: kernel {kernel} does not fit the input {format_shape(x)}")
    grouped = {"groups": groups} if groups > 1 else {}
    batch = {x.dims[0]: x.sizes[0]}
    c_in, c_out = int(x.sizes[1]) // groups, channels // groups
    taps = {window.kernel_dim: window.taps for window in windows}
    source = {window.input_dim: n for window, n in zip(windows, x.sizes[2:], strict=True)}
    target = dict(zip(x.dims[2:], space, strict=True))
    filters = grouped | {"channels": c_out}
    lhs = x.reshaped(batch | grouped | {"in_channels": c_in} | source)
    rhs = Tensor.of(f"{name}.weight", filters | {"in_channels": c_in} | taps, "parameter")
    out = Tensor.of(name, batch | filters | target)
    shift = Tensor.of(f"{name}.bias", filters, "parameter") if bias else None
    operation = Contraction(name, lhs, rhs, out, shift, windows, transposed)
    return LayerOperations((operation,), out.reshaped(batch | {"channels": channels} | target))


# Pooling over windows, or over all spatial positions


class Pool(Layer):
    """Base of pooling layers: a window of size ``kernel`` slides over every spatial dim.

    The stride defaults to ``kernel``.
    """

    kernel: SizePerDim
    stride: SizePerDim | None = None
    padding: Padding = 0
    ceil: bool = False

    def output_and_windows(self, name: str, x: Tensor) -> tuple[Tensor, tuple[SlidingWindow, ...]]:
        """Return the output tensor of the pooling and the window along each spatial dim."""
        self.check_rank(name, x, (3, 4, 5))
        rank = len(x.dims) - 2
        kernel = option_per_spatial_dim(self.kernel, rank, field="kernel", name=name)
        stride = kernel if self.stride is None else option_per_spatial_dim(self.stride, rank, field="stride", name=name)
        padding = _padding_sizes(self.padding, kernel, (1,) * rank, name=name)
        pieces = zip(x.sizes[2:], kernel, stride, padding, strict=True)
        space = tuple(_sliding_window_count(n, k, s, 1, p, ceil=self.ceil) for n, k, s, p in pieces)
        if self.padding == "same":
            space = tuple(int(-(-n // s)) for n, s in zip(x.sizes[2:], stride, strict=True))
        if min(space) < 1:
            raise GraphError(f"{name}: pooling window {list(kernel)} does not fit the input {format_shape(x)}")
        out = x.reshaped(x.shape | dict(zip(x.dims[2:], space, strict=True))).like(name)
        slides = zip(x.dims[2:], kernel, stride, padding, strict=True)
        return out, tuple(SlidingWindow(d, d, "", s, 1, int(p), k) for d, k, s, p in slides)


def _elements(windows: tuple[SlidingWindow, ...]) -> float:
    return float(math.prod(window.taps for window in windows))


@LAYERS.register("max_pool")
class MaxPool(Pool):
    """Max pooling: the maximum of each window.

    Saved are the positions of the maxima (int64, as current frameworks do) and, with ``keeps_input``, its input, as
    PyTorch does.
    """

    keeps_input: bool = False

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        out, windows = self.output_and_windows(name, x)
        keeps = (out.like(f"{name}.indices", role="index"), *([x] if self.keeps_input else []))
        work = MemoryPass(name, "pool", (x,), out, (), keeps, _elements(windows) - 1.0, windows=windows)
        return LayerOperations.of(work)


@LAYERS.register("avg_pool")
class AvgPool(Pool):
    """Average pooling: the mean of each window."""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        out, windows = self.output_and_windows(name, x)
        return LayerOperations.of(MemoryPass(name, "pool", (x,), out, (), (), _elements(windows), windows=windows))


@LAYERS.register("global_pool")
class GlobalPool(Layer):
    """Mean or maximum of each channel over all spatial positions; ``keep_space`` keeps spatial dims of size 1."""

    operation: Literal["avg", "max"] = "avg"
    keep_space: bool = False

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        sizes = dict(zip(x.dims[:2], x.sizes[:2], strict=True))
        out = x.reshaped(sizes).like(name)
        keeps = (out.like(f"{name}.indices", role="index"),) if self.operation == "max" else ()
        shape = sizes | (dict.fromkeys(x.dims[2:], 1) if self.keep_space else {})
        return LayerOperations((MemoryPass(name, "reduce", (x,), out, saved=keeps),), out.reshaped(shape))


@LAYERS.register("adaptive_avg_pool")
class AdaptiveAvgPool(Layer):
    """Average pooling to a fixed ``size`` of every spatial dim."""

    size: PositiveInt

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        out = x.reshaped(x.shape | dict.fromkeys(x.dims[2:], self.size)).like(name)
        return LayerOperations.of(MemoryPass(name, "pool", (x,), out))


# Regions of images in two-stage detectors: proposals, their non-maximum suppression, and crops of feature maps


@LAYERS.register("proposals")
class RegionProposals(Layer):
    """Region proposals: the best ``kept`` boxes after non-maximum suppression, as (batch, regions, box).

    Scores of all anchors (batch, anchors, …) are sorted, and the best ``considered`` boxes are compared pair by pair.
    The comparisons form a bit matrix, considered x considered, that is written and read once. There is no backward
    pass.
    """

    kept: PositiveInt
    considered: PositiveInt = 2000

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        batch = x.dims[0]
        sorted_scores = x.like(f"{name}.sorted", role="statistic")
        pairs = Tensor(
            f"{name}.overlaps", (batch, "boxes", "others"), (x.sizes[0], self.considered, self.considered), "mask"
        )
        out = Tensor(name, (batch, "regions", "box"), (x.sizes[0], self.kept, 4), "statistic", needs_gradient=False)
        sort = MemoryPass(f"{name}.sort", "elementwise", (x,), sorted_scores, backward_rule="free")
        compare = MemoryPass(f"{name}.overlaps", "elementwise", (sorted_scores,), pairs, flops_per_element=12.0,
                             backward_rule="free")  # fmt: skip
        take = MemoryPass(name, "select", (pairs,), out, backward_rule="free")
        return LayerOperations((sort, compare, take), out)


@LAYERS.register("roi_align")
class RoiAlign(Layer):
    """Crops of a feature map (RoIAlign), resampled bilinearly to ``size`` x ``size``.

    Each cell is sampled at ``samples`` x ``samples`` points. Inputs: a feature map (batch, channels, height, width) and
    boxes (batch, regions, 4). Output: (regions, channels, height, width), with the regions of all images as its batch.

    Reference: He et al., Mask R-CNN, ICCV 2017, section 3.
    """

    input_count: ClassVar[int | None] = 2
    size: PositiveInt
    samples: PositiveInt = 2
    #: Regions cropped per image, if fewer than there are boxes (positives of the mask branch).
    regions: PositiveInt | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        x, boxes = inputs
        if len(x.dims) != 4 or len(boxes.dims) != 3:
            shapes = f"{format_shape(x)} and {format_shape(boxes)}"
            raise GraphError(f"{name}: expected a feature map and boxes, found {shapes}")
        regions = x.sizes[0] * (self.regions or boxes.sizes[1])
        dims = (x.dims[0], x.dims[1], "height", "width")
        out = Tensor(name, dims, (regions, x.sizes[1], self.size, self.size))
        points = self.samples**2
        read = Tensor(f"{name}.corners", (*dims, "points"), (*out.sizes, points))
        cut = MemoryPass(read.name, "gather", (x, boxes), read, flops_per_element=8.0)
        mean = MemoryPass(name, "reduce", (read,), out)
        return LayerOperations((cut, mean), out)
