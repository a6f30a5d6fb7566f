"""Pooling over windows or over all of space."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers._conv import Extent, Padding, padded, window_count
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe, option
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Size, Tensor, Window


class Pool(Layer):
    """A window slides over every spatial dim; the stride defaults to the kernel."""

    kernel: Extent
    stride: Extent | None = None
    padding: Padding = 0
    ceil: bool = False

    def pooled(self, name: str, x: Tensor) -> tuple[Tensor, tuple[Window, ...]]:
        """The output tensor and the windows that slide over space."""
        self.check_rank(name, x, (3, 4, 5))
        rank = len(x.dims) - 2
        kernel = option(self.kernel, rank, field="kernel", name=name)
        stride = kernel if self.stride is None else option(self.stride, rank, field="stride", name=name)
        padding = padded(self.padding, kernel, (1,) * rank, name=name)
        pieces = zip(x.sizes[2:], kernel, stride, padding, strict=True)
        space = tuple(window_count(n, k, s, 1, p, ceil=self.ceil) for n, k, s, p in pieces)
        if self.padding == "same":
            space = tuple(int(-(-n // s)) for n, s in zip(x.sizes[2:], stride, strict=True))
        if min(space) < 1:
            raise GraphError(f"{name}: pooling window {list(kernel)} does not fit the input {describe(x)}")
        sizes: dict[str, Size] = dict(zip(x.dims, (*x.sizes[:2], *space), strict=True))
        slides = zip(x.dims[2:], kernel, stride, padding, strict=True)
        return x.reshaped(sizes).like(name), tuple(Window(d, d, "", s, 1, int(p), k) for d, k, s, p in slides)


def _elements(windows: tuple[Window, ...]) -> int:
    return math.prod(window.taps for window in windows)


@LAYERS.register("max_pool")
class MaxPool(Pool):
    """The largest of each window; keeps where it was found (int64 in the frameworks of today), and perhaps its input,
    as PyTorch does."""

    keeps_input: bool = False

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        out, windows = self.pooled(name, x)
        keeps = (out.like(f"{name}.indices", role="index"), *([x] if self.keeps_input else []))
        flops = float(_elements(windows) - 1)
        return Expansion(
            (MemoryPass(name, "pool", (x,), out, keeps=keeps, flops_per_element=flops, windows=windows),), out
        )


@LAYERS.register("avg_pool")
class AvgPool(Pool):
    """The mean of each window."""

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        out, windows = self.pooled(name, x)
        flops = float(_elements(windows))
        return Expansion((MemoryPass(name, "pool", (x,), out, flops_per_element=flops, windows=windows),), out)


@LAYERS.register("global_pool")
class GlobalPool(Layer):
    """One number for each channel; ``keep_space`` leaves spatial dims of size 1."""

    operation: Literal["avg", "max"] = "avg"
    keep_space: bool = False

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        sizes: dict[str, Size] = dict(zip(x.dims[:2], x.sizes[:2], strict=True))
        out = x.reshaped(sizes).like(name)
        keeps = (out.like(f"{name}.indices", role="index"),) if self.operation == "max" else ()
        shape = sizes | (dict.fromkeys(x.dims[2:], 1) if self.keep_space else {})
        return Expansion((MemoryPass(name, "reduce", (x,), out, keeps=keeps),), out.reshaped(shape))


@LAYERS.register("adaptive_avg_pool")
class AdaptiveAvgPool(Layer):
    """Averages down to a fixed ``size`` of every spatial dim."""

    size: PositiveInt

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        sizes = {d: n if i < 2 else self.size for i, (d, n) in enumerate(zip(x.dims, x.sizes, strict=True))}
        out = x.reshaped(sizes).like(name)
        return Expansion((MemoryPass(name, "pool", (x,), out),), out)
