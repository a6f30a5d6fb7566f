"""Convolutions over one to three spatial dims: grouped, depthwise, dilated, transposed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe, option
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import Size, Tensor, Window

Extent = PositiveInt | Annotated[list[PositiveInt], Field(min_length=1, max_length=3)]
Padding = NonNegativeInt | Annotated[list[NonNegativeInt], Field(min_length=1, max_length=3)] | Literal["same", "valid"]


def padded(padding: Padding, kernel: tuple[int, ...], dilation: tuple[int, ...], *, name: str) -> tuple[float, ...]:
    """Zeros on each side of every spatial dim, on average; ``same`` keeps the size at stride 1 and gives ceil(n /
    stride)."""
    if padding == "valid":
        return (0.0,) * len(kernel)
    if padding == "same":
        return tuple(d * (k - 1) / 2 for k, d in zip(kernel, dilation, strict=True))
    return tuple(float(p) for p in option(padding, len(kernel), field="padding", name=name))


def window_count(size: Size, kernel: int, stride: int, dilation: int, padding: float, *, ceil: bool = False) -> int:
    """Positions of a sliding window: floor((n + 2p − d(k−1) − 1) / s) + 1, or its ceiling that no window starts in
    padding."""
    span = size + 2 * padding - dilation * (kernel - 1) - 1
    if span < 0:
        return 0
    count = -int(-span // stride) + 1 if ceil else int(span // stride) + 1
    if ceil and (count - 1) * stride >= size + padding:
        count -= 1
    return count


@LAYERS.register("conv")
class Conv(Layer):
    """A convolution to ``channels``; the input is (batch, channels, one to three spatial dims).

    ``groups: depthwise`` means one group for each input channel. ``kernel``, ``stride``, ``padding`` and ``dilation``
    are one number or one for each spatial dim.
    """

    channels: PositiveInt
    kernel: Extent
    stride: Extent = 1
    padding: Padding = 0
    dilation: Extent = 1
    groups: PositiveInt | Literal["depthwise"] = 1
    bias: bool = True

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        rank = len(x.dims) - 2
        kernel, stride, dilation = (
            option(value, rank, field=field, name=name)
            for field, value in (("kernel", self.kernel), ("stride", self.stride), ("dilation", self.dilation))
        )
        padding = padded(self.padding, kernel, dilation, name=name)
        space = tuple(map(window_count, x.sizes[2:], kernel, stride, dilation, padding))
        if self.padding == "same":
            space = tuple(int(-(-n // s)) for n, s in zip(x.sizes[2:], stride, strict=True))
        return contract(
            name, x, self.channels, kernel, stride, dilation, padding, space, self._groups(name, x), self.bias
        )

    def _groups(self, name: str, x: Tensor) -> int:
        channels = int(x.sizes[1])
        groups = channels if self.groups == "depthwise" else self.groups
        if channels % groups or self.channels % groups:
            raise GraphError(
                f"{name}: {channels} input and {self.channels} output channels cannot be cut into {groups} groups"
            )
        return groups


@LAYERS.register("transposed_conv")
class TransposedConv(Layer):
    """The data gradient of a convolution as a layer: n → (n − 1)·stride − 2·padding + dilation·(kernel − 1) +
    output_padding + 1."""

    channels: PositiveInt
    kernel: Extent
    stride: Extent = 1
    padding: NonNegativeInt | list[NonNegativeInt] = 0
    output_padding: NonNegativeInt | list[NonNegativeInt] = 0
    dilation: Extent = 1
    groups: PositiveInt = 1
    bias: bool = True

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        rank = len(x.dims) - 2
        fields = ("kernel", "stride", "dilation", "padding", "output_padding")
        kernel, stride, dilation, padding, extra = (option(getattr(self, f), rank, field=f, name=name) for f in fields)
        pieces = zip(x.sizes[2:], kernel, stride, dilation, padding, extra, strict=True)
        space = tuple(int((n - 1) * s - 2 * p + d * (k - 1) + e + 1) for n, k, s, d, p, e in pieces)
        if int(x.sizes[1]) % self.groups or self.channels % self.groups:
            channels = f"{x.sizes[1]} input and {self.channels} output channels"
            raise GraphError(f"{name}: {channels} cannot be cut into {self.groups} groups")
        halves = tuple(float(p) for p in padding)
        return contract(
            name, x, self.channels, kernel, stride, dilation, halves, space, self.groups, self.bias, transposed=True
        )


def contract(
    name: str,
    x: Tensor,
    channels: int,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[float, ...],
    space: tuple[int, ...],
    groups: int,
    bias: bool,
    *,
    transposed: bool = False,
) -> Expansion:
    """A convolution as a contraction over (groups,) input channels and kernel dims, with one window for each spatial
    dim."""
    if min(space) < 1:
        raise GraphError(f"{name}: kernel {list(kernel)} does not fit the input {describe(x)}")
    dims = x.dims[2:]
    grouped: dict[str, Size] = {"groups": groups} if groups > 1 else {}
    batch: dict[str, Size] = {x.dims[0]: x.sizes[0]}
    c_in, c_out = int(x.sizes[1]) // groups, channels // groups
    taps: dict[str, Size] = {f"kernel_{d}": k for d, k in zip(dims, kernel, strict=True)}
    source: dict[str, Size] = {f"in_{d}": n for d, n in zip(dims, x.sizes[2:], strict=True)}
    target: dict[str, Size] = dict(zip(dims, space, strict=True))
    lhs = x.reshaped(batch | grouped | {"in_channels": c_in} | source)
    weight: dict[str, Size] = grouped | {"channels": c_out, "in_channels": c_in} | taps
    rhs = Tensor(f"{name}.weight", tuple(weight), tuple(weight.values()), "parameter")
    result = batch | grouped | {"channels": c_out} | target
    out = Tensor(name, tuple(result), tuple(result.values()))
    shift = Tensor(
        f"{name}.bias",
        tuple(grouped | {"channels": c_out}),
        tuple((grouped | {"channels": c_out}).values()),
        "parameter",
    )
    pieces = zip(dims, stride, dilation, padding, kernel, strict=True)
    windows = tuple(Window(d, f"in_{d}", f"kernel_{d}", s, e, int(p), k) for d, s, e, p, k in pieces)
    operation = Contraction(name, lhs, rhs, out, shift if bias else None, windows, transposed)
    return Expansion((operation,), out.reshaped(batch | {"channels": channels} | target))
