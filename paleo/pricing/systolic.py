"""Work of matrix products on systolic arrays: the FLOP of the clocks for which they occupy the array.

An array of ``width`` by ``width`` multipliers (128 on TPU v2 to v5p, 256 from v6e on) holds a tile of one operand while
rows of the other stream through it. So

    sum       is padded to the width: rows of the array
    outputs   along the held operand are padded to the width: columns of the array
    rows      that stream take one clock each; meanwhile the next tile is loaded, one row per clock, so that fewer rows
              than the array has take as long as that many

and a library holds the operand for which the array is occupied for fewer clocks. Each core of a chip has its share of
the rows.

A convolution streams positions. If a core has several samples, it sums over channels and taps together, and samples
fill the vector lanes of memory. A core may have at most one sample (an image or a volume that is split over cores). It
then sums over channels tap by tap, each padded, and stores channels along the lanes, padded as well. Steps of ResNet-50
and SSD need the former: tap by tap they are predicted 1.4 to 3 times as long as measured. Steps of 3D U-Net need the
latter: with joint taps they are predicted at 0.4 and 0.5 of the measured times.

Jouppi et al., "In-Datacenter Performance Analysis of a Tensor Processing Unit", ISCA 2017 (tiles loaded behind rows
that stream); Jouppi et al., "TPU v4", ISCA 2023; Google, Cloud TPU performance guide (tiles of 8 by 128). Padding is
exact; the share of clocks that products then reach is that of `paleo.pricing.calibration_lookup.TPU_EFFICIENCIES`. Not
valid for sparsity; Winograd's and Fourier's transforms are not considered.
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
#: Elements along the vector lanes, which are the long side of a tile in memory.
_VECTOR_LANES = 128.0


def round_up_to_multiple(extent: Number, step: float) -> Array:
    """Round an extent up to a multiple of a step, such as the width of a systolic array.

    Parameters
    ----------
    extent : array-like
        Extent of a dimension.
    step : float
        Extent of a step.

    Returns
    -------
    ndarray
        Padded extents.

    Examples
    --------
    >>> round_up_to_multiple(np.array([32.0, 128.0, 129.0]), 128.0).tolist()
    [128.0, 128.0, 256.0]
    """
    return np.asarray(np.ceil(np.asarray(extent) / step) * step)


def systolic_gemm_flops(m: Number, n: Number, k: Number, width: float) -> Array:
    """Compute the peak FLOP of the clock cycles for which a GEMM occupies one core's systolic array.

    Parameters
    ----------
    m, n, k : array-like
        Extents of C[m, n] = A[m, k] B[k, n].
    width : float
        Rows (and columns) of the array.

    Returns
    -------
    ndarray
        FLOP, at least 2 m n k.

    Examples
    --------
    >>> [float(systolic_gemm_flops(m, 4096.0, 1024.0, 128.0)) / (2 * m * 4096 * 1024) for m in (8.0, 64.0, 4096.0)]
    [16.0, 2.0, 1.0]
    """
    keeps_right = round_up_to_multiple(n, width) * np.maximum(m, width)
    keeps_left = round_up_to_multiple(m, width) * np.maximum(n, width)
    return np.asarray(2.0 * round_up_to_multiple(k, width) * np.minimum(keeps_right, keeps_left))


def _gemm(kernel: Kernel, width: float, cores: float) -> float:
    """Count the FLOP of the clock cycles for which a GEMM occupies the systolic arrays of a chip.

    The rows of the GEMM are divided among the cores (for weight gradients, its sum over k).
    """
    shape = kernel.shape
    summed, rows = (cores, 1.0) if kernel.phase == "backward_weight" else (1.0, cores)
    each = systolic_gemm_flops(shape["m"] / rows, shape["n"], shape["k"] / summed, width)
    return float(cores * shape.get("batch", 1.0) * each)


def _positions(shape: Mapping[str, float]) -> float:
    """Count the output positions of a convolution over all images; one-dimensional convolutions have one extent."""
    return shape["n"] * math.prod(shape.get(f"out_{axis}", 1.0) for axis in "dhw")


def _convolution(kernel: Kernel, width: float, cores: float) -> float:
    """Count the FLOP of the clock cycles for which a convolution occupies the systolic arrays.

    A grouped convolution runs group by group, or over all channels with zeros between groups, whichever is less.
    """
    groups = kernel.shape.get("groups", 1.0)
    whole = _convolved(kernel, width, cores, 1.0)
    return whole if groups == 1.0 else min(whole, groups * _convolved(kernel, width, cores, groups))


def _convolved(kernel: Kernel, width: float, cores: float, groups: float) -> float:
    """Count the FLOP of the clock cycles for which one group of a convolution occupies the systolic arrays."""
    shape, positions = kernel.shape, _positions(kernel.shape) / cores
    taps = math.prod(shape.get(f"kernel_{axis}", 1.0) for axis in "dhw")
    channels, filters = shape["c"] / groups, shape["k"] / groups
    side_by_side = shape["n"] > cores

    def with_taps(extent: float) -> float:
        return taps * extent if side_by_side else taps * float(round_up_to_multiple(extent, width))

    if kernel.operation == "bwd_filter":
        flops = systolic_gemm_flops(with_taps(channels), filters, positions, width)
    elif kernel.operation == "bwd_data":
        flops = systolic_gemm_flops(positions, channels, with_taps(filters), width)
    else:
        flops = systolic_gemm_flops(positions, filters, with_taps(channels), width)
    return float(cores * flops)


def _recurrence(kernel: Kernel, width: float, cores: float) -> float:
    """Count the FLOP of the clock cycles for which a recurrent layer occupies the systolic arrays.

    There is one product per time step; for the weight gradient, one product for all steps.
    """
    shape = kernel.shape
    rows, hidden, outputs = shape["batch"] / cores, shape["hidden"], shape["gates"] * shape["hidden"]
    if kernel.operation.endswith("bwd_filter"):
        each = systolic_gemm_flops(hidden, outputs, rows * shape["timesteps"], width)
    else:
        each = shape["timesteps"] * systolic_gemm_flops(rows, outputs, hidden, width)
    return float(cores * shape["directions"] * each)


def _attention(kernel: Kernel, width: float, cores: float) -> float:
    """Count the FLOP of attention on systolic arrays, with the head dimension padded to the width of the array."""
    head = kernel.shape["head_dim"]
    return float(kernel.flops * round_up_to_multiple(head, width) / head)


_KernelWork = Callable[["Kernel", float, float], float]
_WORK: Mapping[str, _KernelWork] = {"gemm": _gemm, "conv": _convolution, "rnn": _recurrence, "attention": _attention}


def systolic_array_flops(kernels: Sequence[Kernel], device: Device) -> Array:
    """Compute the FLOP that a chip's systolic arrays could execute in the clock cycles that each kernel takes of them.

    It is at least the FLOP of the kernel; the excess is padding to the width of the arrays.

    Parameters
    ----------
    kernels : sequence of Kernel
        Kernels, in any order.
    device : Device
        Device, as its datasheet describes it.

    Returns
    -------
    ndarray
        Shape (kernels,); 0 for memory passes. Devices without systolic arrays: the FLOP that kernels count.
    """
    if device.matrix_unit is None:
        return np.array([kernel.flops for kernel in kernels], dtype=np.float64)
    width, cores = float(device.matrix_unit.width), float(device.multiprocessors)
    works = (_WORK[kernel.family](kernel, width, cores) if kernel.family in _WORK else 0.0 for kernel in kernels)
    return np.array([max(work, kernel.flops) for work, kernel in zip(works, kernels, strict=True)], dtype=np.float64)


def lane_padded_bytes(kernel: Kernel, device: Device) -> float:
    """Compute the bytes that a kernel moves on a device with systolic arrays, with channels padded to the vector lanes.

    If a core has at most one sample, its channels lie along the vector lanes and are padded to a multiple of them.
    Otherwise nothing is padded: several samples fill the lanes together, and the sides of matrices are long.

    Parameters
    ----------
    kernel : Kernel
        Kernel whose tensors are moved.
    device : Device
        Device, as its datasheet describes it.

    Returns
    -------
    float
        Size [byte].

    Examples
    --------
    >>> from paleo.operations.base import Kernel
    >>> from paleo.specs.device import load_device
    >>> shape = {"rows": 1e6, "columns": 1.0, "channels": 32.0, "samples": 1.0}
    >>> relu = Kernel("relu", "memory", "elementwise", "forward", 0.0, 1e6, 2e6, 2e6, shape)
    >>> lane_padded_bytes(relu, load_device("tpu-v4")), lane_padded_bytes(relu, load_device("a100-sxm4-80gb"))
    (16000000.0, 4000000.0)
    """
    shape, samples = kernel.shape, kernel.shape.get("n" if kernel.family == "conv" else "samples")
    if device.matrix_unit is None or samples is None or samples > device.multiprocessors:
        return kernel.bytes
    if kernel.family != "conv":
        return kernel.bytes * _lane_padding_factor(shape["channels"])
    images = shape["n"] * math.prod(shape.get(axis, 1.0) for axis in "dhw") * shape["c"]
    results = _positions(shape) * shape["k"]
    laid_out = images * _lane_padding_factor(shape["c"]) + results * _lane_padding_factor(shape["k"])
    return kernel.bytes * laid_out / (images + results)


def _lane_padding_factor(channels: float) -> float:
    """Return the factor by which padding of channels to the vector lanes enlarges a tensor."""
    return float(round_up_to_multiple(channels, _VECTOR_LANES)) / channels
