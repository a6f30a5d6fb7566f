"""Seconds for kernels on a device: the one place where counts of computation meet a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paleo.pricing.calibration import Rates, rates
from paleo.pricing.roofline import kernel_time
from paleo.specs.hardware import Device
from paleo.units import MICROSECOND
from paleo.work import Kernel

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Seconds of each kernel, in the order given. ``launch`` is the part of ``total`` that a launch floor makes up;
    ``arithmetic`` says which kernels are limited by arithmetic rather than memory."""

    total: Array
    launch: Array
    arithmetic: npt.NDArray[np.bool_]


class Pricer(Protocol):
    """Prices kernels on one device in one dtype."""

    @property
    def name(self) -> str: ...

    @property
    def rates(self) -> Rates | None:
        """The constants behind the prices, where they are constants."""

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes: ...

    def interval(self, step_time: float) -> tuple[float, float]:
        """Where nine of ten real times lie, as far as the calibration knows [s]."""


@dataclass(frozen=True, slots=True)
class ConstantRates:
    """A roofline whose ceilings are constant shares of the datasheet's."""

    device: Device
    dtype: str
    rates: Rates

    @property
    def name(self) -> str:
        return self.rates.name

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        flops = np.array([kernel.flops for kernel in kernels])
        vector = np.array([kernel.vector_flops for kernel in kernels])
        moved = np.array([kernel.bytes for kernel in kernels])
        plain = "vector" if "fp32" in self.device.vector_peak else None
        overlapped = self.rates.combine == "max"
        work = flops / self.device.peak_flops_per_s(self.dtype)
        work = work + (vector / self.device.peak_flops_per_s("fp32", plain) if overlapped else 0.0)
        bandwidth = self.device.memory.bandwidth * self.rates.memory
        launch = np.full(len(kernels), self.rates.launch)
        total = kernel_time(
            flops=work,
            moved_bytes=moved,
            peak_flops_per_s=self.rates.compute,
            memory_bandwidth=bandwidth,
            launch=launch,
            combine=self.rates.combine,
        )
        return KernelTimes(total, launch, work / self.rates.compute >= moved / bandwidth)

    def interval(self, step_time: float) -> tuple[float, float]:
        return step_time * self.rates.low, step_time * self.rates.high


def pricer(device: Device, dtype: str, calibration: str) -> Pricer:
    """What prices a run: ``ideal``, ``ppp=…``, or (``auto``) the best calibration that there is for the device."""
    constant = rates(calibration)
    return ConstantRates(device, dtype, constant or Rates("datasheet", 0.6, 0.8, None, 4 * MICROSECOND, low=0.6, high=1.6))
