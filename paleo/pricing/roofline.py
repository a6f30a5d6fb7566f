"""The roofline, and how its two ceilings, a launch floor and a percentage of peak make the first price of a kernel."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

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
