"""Extents of convolutions: what a call computes, and the elements and FLOP of each direction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Number = float | Array


class Direction(IntEnum):
    """What a convolution call computes: output, gradient of the input, gradient of the filters."""

    FORWARD = 0
    DATA = 1
    FILTER = 2


@dataclass(frozen=True, slots=True)
class ConvolutionShape:
    """Extents of convolutions as arrays of one shape; channels and filters are those of one group."""

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
    def taps(self) -> Array:
        """Filter positions r s."""
        return self.kernel_h * self.kernel_w

    @property
    def positions(self) -> Array:
        """Output positions n p q."""
        return self.batch * self.out_h * self.out_w

    @property
    def input_elements(self) -> Array:
        return self.batch * self.height * self.width * self.channels * self.groups

    @property
    def output_elements(self) -> Array:
        return self.positions * self.filters * self.groups

    @property
    def filter_elements(self) -> Array:
        return self.channels * self.filters * self.taps * self.groups

    @property
    def flops(self) -> Array:
        """FLOP of the direct method, 2 n p q k c r s for each group; the same in all three directions."""
        return 2.0 * self.positions * self.channels * self.filters * self.taps * self.groups

    @property
    def elements(self) -> Array:
        """Compulsory elements read and written; each direction reads two of the tensors and writes the third."""
        return self.input_elements + self.output_elements + self.filter_elements


def convolution_shape(
    *,
    batch: Number,
    channels: Number,
    height: Number,
    width: Number,
    filters: Number,
    kernel_h: Number,
    kernel_w: Number,
    pad_h: Number = 0.0,
    pad_w: Number = 0.0,
    stride_h: Number = 1.0,
    stride_w: Number = 1.0,
    dilation_h: Number = 1.0,
    dilation_w: Number = 1.0,
    groups: Number = 1.0,
    direction: int | npt.NDArray[np.int64] = Direction.FORWARD,
) -> ConvolutionShape:
    """Shapes from extents of the whole layer, ``channels`` and ``filters`` over all groups; all broadcast.

    out = floor((n + 2 p - d (r - 1) - 1) / s) + 1

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
