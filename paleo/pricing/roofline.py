"""The roofline, and how its two ceilings, a launch floor and a percentage of peak make the first price of a kernel.

From the datasheet of a device to the figures that pricing formulas take, for one arithmetic.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.pricing.parameters import DeviceFigures
from paleo.units import GIGA

if TYPE_CHECKING:
    from paleo.specs.hardware import Device, Unit

Array = npt.NDArray[np.float64]
Numeric = float | Array


def roofline_time(
    *, flops: Numeric, moved_bytes: Numeric, peak_flops_per_s: Numeric, memory_bandwidth: Numeric
) -> Array:
    """Time of one kernel whose arithmetic hides its memory traffic, or the reverse [s].

    max(flops / peak_flops_per_s, moved_bytes / memory_bandwidth)

    Holds when the kernel is long enough to hide its launch and fills the device.
    >>> float(roofline_time(flops=4e12, moved_bytes=1e9, peak_flops_per_s=1e15, memory_bandwidth=1e12))
    0.004

    Reference: Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009.
    """
    return np.asarray(np.maximum(np.asarray(flops) / peak_flops_per_s, np.asarray(moved_bytes) / memory_bandwidth))


def kernel_time(
    *,
    flops: Numeric,
    moved_bytes: Numeric,
    peak_flops_per_s: Numeric,
    memory_bandwidth: Numeric,
    launch: Numeric = 0.0,
    combine: Literal["max", "sum"] = "max",
) -> Array:
    """A launch floor, then arithmetic and memory traffic: overlapped (``max``) or one after the other (``sum``) [s].

    ``sum`` is the original Paleo's time of a layer (Qi et al., ICLR 2017), with peaks already scaled to its percent of
    peak.

    >>> rates = {"peak_flops_per_s": 1.0, "memory_bandwidth": 1.0}
    >>> float(kernel_time(flops=2.0, moved_bytes=3.0, **rates, launch=0.5, combine="sum"))
    5.5
    """
    arithmetic, traffic = np.asarray(flops) / peak_flops_per_s, np.asarray(moved_bytes) / memory_bandwidth
    return np.asarray(launch + (arithmetic + traffic if combine == "sum" else np.maximum(arithmetic, traffic)))


#: FLOP per clock of one multiprocessor's fp32 lanes (128 fused multiply-adds), where a datasheet leaves the clock out.
FP32_LANES = 256.0
#: Assumed last-level cache per multiprocessor where a datasheet names none: 128 KiB.
CACHE_PER_MULTIPROCESSOR = 2.0**17
#: Lowest clock, as a share of boost, at which a datasheet states the peak of matrix units.
LOWER_CLOCK = 0.85
#: What ``compute`` may say of the unit that a dtype runs on.
COMPUTE = ("", "tensor", "vector", "fp32")


def unit_of(device: Device, dtype: str, compute: str | None = None) -> Unit:
    """The unit that products of ``dtype`` run on: tensor (matrix) cores where the device has them for that dtype.

    ``compute`` overrides: ``tensor``; ``vector`` (the dtype's rate on ordinary cores); ``fp32`` (stored narrow,
    computed in fp32). fp32 itself means fp32 arithmetic; TF32 has its own name.

    >>> from paleo.specs.hardware import load_device
    >>> unit_of(load_device("a100-sxm4-80gb"), "bf16"), unit_of(load_device("p100-pcie-16gb"), "fp16")
    ('tensor', 'vector')
    """
    if compute and compute not in COMPUTE:
        raise SpecError(
            f"compute {compute!r} is unknown; expected one of {', '.join(repr(known) for known in COMPUTE)}"
        )
    if compute:
        return "tensor" if compute == "tensor" else "vector"
    arithmetic = device.arithmetic(dtype)
    return "tensor" if arithmetic in device.tensor_dtypes and arithmetic != "fp32" else "vector"


def clock_of(device: Device) -> float:
    """Boost clock [Hz], or what the fp32 peak implies, or 1 GHz: rates are per clock, so that only ratios count."""
    if device.boost_clock is not None:
        return device.boost_clock
    fp32 = device.vector_peak.get("fp32")
    return fp32 / (FP32_LANES * device.multiprocessors) if fp32 else GIGA


def peak_at_boost(device: Device, peak_flops_per_s: float) -> float:
    """Peak of matrix units at the boost clock, where a datasheet states it at a lower one.

    A multiprocessor of NVIDIA does a power of two of FLOP per clock (4096 on Hopper at 16 bits, 8192 on Blackwell:
    whitepapers). H100's 989 TFLOP/s are such units at 1.83 GHz, of 1.98 that it boosts to.

    >>> from paleo.specs.hardware import load_device
    >>> h100 = load_device("h100-sxm5-80gb")
    >>> peak_at_boost(h100, h100.peak["bf16"]) / (h100.multiprocessors * h100.boost_clock)
    4096.0
    """
    if device.vendor != "NVIDIA" or device.kind != "gpu":
        return peak_flops_per_s
    per_clock = device.multiprocessors * clock_of(device)
    power = 2.0 ** round(math.log2(peak_flops_per_s / per_clock))
    return power * per_clock if LOWER_CLOCK < peak_flops_per_s / (power * per_clock) < 1.0 else peak_flops_per_s


def pointwise_format(device: Device) -> str:
    """The format whose rate bounds element-wise arithmetic: fp32, or, where the maker states no such rate (TPU, Gaudi),
    16 bits; memory bounds those passes long before either.

    >>> from paleo.specs.hardware import load_device
    >>> pointwise_format(load_device("h100-sxm5-80gb")), pointwise_format(load_device("tpu-v4"))
    ('fp32', 'bf16')
    """
    return (
        "fp32"
        if "fp32" in device.peak
        else next(dtype for dtype in ("bf16", "fp16", *device.peak) if dtype in device.peak)
    )


def figures(device: Device, dtype: str, compute: str | None = None) -> DeviceFigures:
    """Figures of ``device`` for products of ``dtype``; SpecError when it has no peak for that.

    >>> from paleo.specs.hardware import load_device
    >>> figures(load_device("b200"), "fp16").flops_per_clock
    8192.0
    >>> figures(load_device("a100-sxm4-80gb"), "fp32").tensor_cores
    False
    """
    unit = unit_of(device, dtype, compute)
    arithmetic = "fp32" if compute == "fp32" else dtype if compute else device.arithmetic(dtype)
    ordinary = unit == "vector" and arithmetic in device.vector_peak
    peak = device.peak_flops_per_s(arithmetic, "vector" if ordinary else None)
    return DeviceFigures(
        name=device.name,
        architecture=device.architecture,
        memory_kind=device.memory.kind,
        multiprocessors=float(device.multiprocessors),
        clock_hz=clock_of(device),
        peak_flops_per_s=peak_at_boost(device, peak) if unit == "tensor" else peak,
        memory_bandwidth=device.memory.bandwidth,
        l2_bytes=device.l2 or device.multiprocessors * CACHE_PER_MULTIPROCESSOR,
        power_watts=device.tdp or math.inf,
        tensor_cores=unit == "tensor",
    )
