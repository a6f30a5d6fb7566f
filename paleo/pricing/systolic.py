"""Work of matrix products on systolic arrays: the FLOP of the clocks that they hold the array for.

An array of ``width`` by ``width`` multipliers (128 on TPU v2 to v5p, 256 from v6e on) keeps a tile of one operand and
lets rows of the other stream through. So

    sum       is padded to the width: rows of the array
    outputs   along the operand that is kept are padded to the width: columns of the array
    rows      that stream take a clock each; meanwhile the next tile is loaded, a row a clock, so that fewer rows than
              the array has take as long as that many

and a library keeps whichever operand holds the array for fewer clocks. Each core of a chip has its share of the rows.

A convolution streams positions. Where a core has several samples its taps are fed side by side, as if the sum were
over channels and taps, and samples fill the vector lanes of memory. A core with one sample or a part of one (an image
or a volume that is spread over cores) sums over channels tap by tap, each padded, and stores channels along the lanes,
padded as well. The former is what steps of ResNet-50 and SSD need (tap by tap they come out 1.4 to 3 times as long as
measured), the latter what those of 3D U-Net need (side by side they come out at 0.4 and 0.5 of what was measured).

Jouppi et al., "In-Datacenter Performance Analysis of a Tensor Processing Unit", ISCA 2017 (tiles loaded behind rows
that stream); Jouppi et al., "TPU v4", ISCA 2023; Google, Cloud TPU performance guide (tiles of 8 by 128). Padding is
exact; the share of clocks that is left is that of `paleo.pricing.store.COMPILED`. Not for sparsity; Winograd's and
Fourier's transforms are not made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.specs.device import Device

Array = npt.NDArray[np.float64]
Number = float | Array
#: Elements along the vector lanes, the long side of a tile in memory.
LANES = 128.0


def padded(extent: Number, step: float) -> Array:
    """Round an extent up to whole steps.

    Parameters
    ----------
    extent : array-like
        Extent of a dimension.
    step : float
        Extent of a step.

    Returns
    -------
    ndarray

    Examples
    --------
    >>> padded(np.array([32.0, 128.0, 129.0]), 128.0).tolist()
    [128.0, 128.0, 256.0]
    """
    return np.asarray(np.ceil(np.asarray(extent) / step) * step)


def product_flops(m: Number, n: Number, k: Number, width: float) -> Array:
    """Return the FLOP of the clocks for which a product holds one core's arrays.

    Parameters
    ----------
    m, n, k : array-like
        Extents of C[m, n] = A[m, k] B[k, n].
    width : float
        Rows and columns of an array.

    Returns
    -------
    ndarray
        At least 2 m n k.

    Examples
    --------
    >>> [float(product_flops(m, 4096.0, 1024.0, 128.0)) / (2 * m * 4096 * 1024) for m in (8.0, 64.0, 4096.0)]
    [16.0, 2.0, 1.0]
    """
    keeps_right = padded(n, width) * np.maximum(m, width)
    keeps_left = padded(m, width) * np.maximum(n, width)
    return np.asarray(2.0 * padded(k, width) * np.minimum(keeps_right, keeps_left))


def _gemm(kernel: Kernel, width: float, cores: float) -> float:
    """Rows are shared out over the cores; of the gradient of weights, what is summed over."""
    shape = kernel.shape
    summed, rows = (cores, 1.0) if kernel.phase == "backward_weight" else (1.0, cores)
    each = product_flops(shape["m"] / rows, shape["n"], shape["k"] / summed, width)
    return float(cores * shape.get("batch", 1.0) * each)


def _positions(shape: Mapping[str, float]) -> float:
    """Outputs of all images in one channel; one-dimensional convolutions have one extent."""
    return shape["n"] * math.prod(shape.get(f"out_{axis}", 1.0) for axis in "dhw")


def _convolution(kernel: Kernel, width: float, cores: float) -> float:
    """The cheaper of the groups one by one and of all channels with zeros between groups."""
    groups = kernel.shape.get("groups", 1.0)
    whole = _convolved(kernel, width, cores, 1.0)
    return whole if groups == 1.0 else min(whole, groups * _convolved(kernel, width, cores, groups))


def _convolved(kernel: Kernel, width: float, cores: float, groups: float) -> float:
    shape, positions = kernel.shape, _positions(kernel.shape) / cores
    taps = math.prod(shape.get(f"kernel_{axis}", 1.0) for axis in "dhw")
    channels, filters = shape["c"] / groups, shape["k"] / groups
    side_by_side = shape["n"] > cores

    def with_taps(extent: float) -> float:
        return taps * extent if side_by_side else taps * float(padded(extent, width))

    if kernel.operation == "bwd_filter":
        flops = product_flops(with_taps(channels), filters, positions, width)
    elif kernel.operation == "bwd_data":
        flops = product_flops(positions, channels, with_taps(filters), width)
    else:
        flops = product_flops(positions, filters, with_taps(channels), width)
    return float(cores * flops)


def _recurrence(kernel: Kernel, width: float, cores: float) -> float:
    """A product for each step; of the gradient of the weights one for all of them."""
    shape = kernel.shape
    rows, hidden, outputs = shape["batch"] / cores, shape["hidden"], shape["gates"] * shape["hidden"]
    if kernel.operation.endswith("bwd_filter"):
        each = product_flops(hidden, outputs, rows * shape["timesteps"], width)
    else:
        each = shape["timesteps"] * product_flops(rows, outputs, hidden, width)
    return float(cores * shape["directions"] * each)


def _attention(kernel: Kernel, width: float, cores: float) -> float:
    """Its products sum over the width of a head, or have that many columns: both are padded."""
    head = kernel.shape["head_dim"]
    return float(kernel.flops * padded(head, width) / head)


_WORK: Mapping[str, Callable[[Kernel, float, float], float]] = {
    "gemm": _gemm,
    "conv": _convolution,
    "rnn": _recurrence,
    "attention": _attention,
}


def occupied_flops(kernels: Sequence[Kernel], device: Device) -> Array:
    """Return the FLOP of the clocks for which each kernel holds the arrays of a chip.

    Parameters
    ----------
    kernels : sequence of Kernel
        The kernels.
    device : Device
        The device.

    Returns
    -------
    ndarray
        Of shape (kernels,); none of passes over memory, what kernels count where the device states no array.
    """
    if device.matrix_unit is None:
        return np.array([kernel.flops for kernel in kernels], dtype=np.float64)
    width, cores = float(device.matrix_unit.width), float(device.multiprocessors)
    works = (_WORK[kernel.family](kernel, width, cores) if kernel.family in _WORK else 0.0 for kernel in kernels)
    return np.array([max(work, kernel.flops) for work, kernel in zip(works, kernels, strict=True)], dtype=np.float64)


def laid_out_bytes(kernel: Kernel, device: Device) -> float:
    """Return the bytes that a kernel moves in the layout of vector lanes.

    Bytes that a kernel moves: channels lie along the vector lanes, padded to them where a core has one sample at most;
    matrices have long sides, and several samples fill the lanes together.

    Parameters
    ----------
    kernel : Kernel
        The kernel.
    device : Device
        The device.

    Returns
    -------
    float
        Bytes.

    Examples
    --------
    >>> from paleo.operations.base import Kernel
    >>> from paleo.specs.device import load_device
    >>> shape = {"rows": 1e6, "columns": 1.0, "channels": 32.0, "samples": 1.0}
    >>> relu = Kernel("relu", "memory", "elementwise", "forward", 0.0, 1e6, 2e6, 2e6, shape)
    >>> laid_out_bytes(relu, load_device("tpu-v4")), laid_out_bytes(relu, load_device("a100-sxm4-80gb"))
    (16000000.0, 4000000.0)
    """
    shape, samples = kernel.shape, kernel.shape.get("n" if kernel.family == "conv" else "samples")
    if device.matrix_unit is None or samples is None or samples > device.multiprocessors:
        return kernel.bytes
    if kernel.family != "conv":
        return kernel.bytes * _laid_out(shape["channels"])
    images = shape["n"] * math.prod(shape.get(axis, 1.0) for axis in "dhw") * shape["c"]
    results = _positions(shape) * shape["k"]
    laid_out = images * _laid_out(shape["c"]) + results * _laid_out(shape["k"])
    return kernel.bytes * laid_out / (images + results)


def _laid_out(channels: float) -> float:
    """Channels stored in memory for each channel of a tensor, padded to the lanes."""
    return float(padded(channels, LANES)) / channels
