"""Seconds for kernels on a device: the one place where counts of computation meet a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paleo.pricing.calibrated import FamilyPrices
from paleo.pricing.calibration import Rates, rates
from paleo.pricing.roofline import kernel_time
from paleo.specs.calibration import load_calibration
from paleo.specs.hardware import Device, Unit
from paleo.specs.software import Software
from paleo.work import Kernel

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Seconds of each kernel, in the order given. ``launch`` is the part of ``total`` that a launch floor makes up;
    ``arithmetic`` says which kernels are limited by arithmetic rather than memory. ``low`` and ``high`` are factors on each time: where
    nine of ten measurements of such kernels lay."""

    total: Array
    launch: Array
    arithmetic: npt.NDArray[np.bool_]
    low: Array
    high: Array


class Pricer(Protocol):
    """Prices kernels on one device in one dtype."""

    @property
    def name(self) -> str: ...

    @property
    def rates(self) -> Rates | None:
        """The constants behind the prices, where they are constants."""

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Seconds of each kernel."""


@dataclass(frozen=True, slots=True)
class ConstantRates:
    """A roofline whose ceilings are constant shares of the datasheet's."""

    device: Device
    dtype: str
    rates: Rates

    @property
    def name(self) -> str:
        """``ideal`` or the percentages of peak."""
        return self.rates.name

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Roofline times."""
        flops = np.array([kernel.flops for kernel in kernels])
        vector = np.array([kernel.vector_flops for kernel in kernels])
        moved = np.array([kernel.bytes for kernel in kernels])
        plain: Unit | None = "vector" if "fp32" in self.device.vector_peak else None
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
        low, high = (np.full(len(kernels), factor) for factor in (self.rates.low, self.rates.high))
        return KernelTimes(total, launch, work / self.rates.compute >= moved / bandwidth, low, high)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The calibrated families behind a host that issues one operation at a time: the longer of the two is what passes."""

    families: FamilyPrices

    @property
    def name(self) -> str:
        """Where the parameters come from."""
        return self.families.name

    @property
    def rates(self) -> Rates | None:
        """No constants."""
        return None

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Device time or host time of each kernel, whichever is longer."""
        if not kernels:
            return KernelTimes(*(np.zeros(0),) * 2, np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0))
        prices = self.families.prices(kernels)
        forward = np.array([kernel.phase == "forward" for kernel in kernels])
        software = self.families.software
        host = np.where(forward, software.host_forward, software.host_backward)
        total = np.maximum(prices.seconds, host)
        device = self.families.device
        work = np.array([kernel.flops for kernel in kernels]) / device.peak_flops_per_s(self.families.dtype)
        moved = np.array([kernel.bytes for kernel in kernels]) / device.memory.bandwidth
        return KernelTimes(total, total - prices.seconds, work >= moved, prices.low, prices.high)


def pricer(device: Device, dtype: str, calibration: str, software: Software) -> Pricer:
    """What prices a run: ``ideal``, ``ppp=…``, a calibration file, or (``auto``) the best calibration there is for the device."""
    constant = rates(calibration)
    if constant is not None:
        return ConstantRates(device, dtype, constant)
    own = None if calibration == "auto" else load_calibration(calibration)
    return Calibrated(FamilyPrices(device, dtype, software, own))
