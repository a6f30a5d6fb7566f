"""Seconds for kernels on a device: the one place where counts of computation meet a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paleo.pricing.calibrated import FamilyPrices
from paleo.pricing.roofline import kernel_time, pointwise_format
from paleo.pricing.store import constants, rates
from paleo.specs.calibration import load_calibration

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.pricing.store import Rates
    from paleo.specs.calibration import Calibration
    from paleo.specs.hardware import Device, Unit
    from paleo.specs.software import Software

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Seconds of each kernel on the device, in the order given.

    ``launch`` is the part of ``total`` that a constant launch makes up; ``host`` is what its call costs the host, which
    works ahead of the device. ``arithmetic`` says which kernels are limited by arithmetic rather than memory. ``low``
    and ``high`` are factors on each time: where nine of ten measurements of such kernels lay.
    """

    total: Array
    launch: Array
    host: Array
    arithmetic: npt.NDArray[np.bool_]
    low: Array
    high: Array

    @property
    def alone(self) -> Array:
        """Seconds of each kernel when the host does not work ahead of it."""
        return np.maximum(self.total, self.host)


class Pricer(Protocol):
    """Prices kernels on one device in one dtype."""

    @property
    def name(self) -> str: ...

    @property
    def rates(self) -> Rates | None:
        """The constants behind the prices, where they are constants."""

    @property
    def own(self) -> Calibration | None:
        """The user's calibration, where there is one."""

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Seconds of each kernel."""


@dataclass(frozen=True, slots=True)
class ConstantRates:
    """A roofline whose ceilings are constant shares of the datasheet's.

    Where ``rates.combine`` is "sum" it is the original Paleo (Qi et al., ICLR 2017): arithmetic and traffic add up,
    kinds that are ``free_in_paleo`` cost nothing, and the update of the parameters runs at the datasheet's rates. The
    original's GB of 2^30 bytes is not followed (its memory times are 7 % shorter).
    """

    device: Device
    dtype: str
    rates: Rates

    @property
    def name(self) -> str:
        """``ideal`` or the percentages of peak."""
        return self.rates.name

    @property
    def own(self) -> None:
        """None."""
        return None

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Roofline times."""
        original = self.rates.combine == "sum"
        free = np.array(
            [original and kernel.family == "memory" and kernel.kind.free_in_paleo for kernel in kernels], dtype=bool
        )
        update = np.array([kernel.phase == "update" for kernel in kernels], dtype=bool)
        moved = np.where(free, 0.0, [kernel.bytes for kernel in kernels])
        vector = np.where(update | (not original), [kernel.vector_flops for kernel in kernels], 0.0)
        plain: Unit | None = "vector" if "fp32" in self.device.vector_peak else None
        work = np.array([kernel.flops for kernel in kernels]) / self.device.peak_flops_per_s(
            self.device.arithmetic(self.dtype)
        )
        work = work + vector / self.device.peak_flops_per_s(pointwise_format(self.device), plain)
        compute, memory = (np.where(update, 1.0, share) for share in (self.rates.compute, self.rates.memory))
        bandwidth = self.device.memory.bandwidth * memory
        launch = np.full(len(kernels), self.rates.launch)
        total = kernel_time(
            flops=work,
            moved_bytes=moved,
            peak_flops_per_s=compute,
            memory_bandwidth=bandwidth,
            launch=launch,
            combine=self.rates.combine,
        )
        low, high = (np.full(len(kernels), factor) for factor in (self.rates.low, self.rates.high))
        return KernelTimes(total, launch, np.zeros(len(kernels)), work / compute >= moved / bandwidth, low, high)


@dataclass(frozen=True, slots=True)
class Calibrated:
    """The calibrated families behind a host that issues one operation at a time."""

    families: FamilyPrices

    @property
    def name(self) -> str:
        """Where the parameters come from."""
        return self.families.name

    @property
    def rates(self) -> Rates | None:
        """No constants."""
        return None

    @property
    def own(self) -> Calibration | None:
        """The user's calibration."""
        return self.families.own

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Device time and host time of each kernel."""
        if not kernels:
            return KernelTimes(*(np.zeros(0),) * 3, np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0))
        prices = self.families.prices(kernels)
        forward = np.array([kernel.phase == "forward" for kernel in kernels])
        software = self.families.software
        host = np.where(forward, software.host.forward, software.host.backward) * [kernel.calls for kernel in kernels]
        host = (host + _mixture(kernels, software)) * (not software.host.whole_iteration)
        device = self.families.device
        work = np.array([kernel.flops for kernel in kernels]) / device.peak_flops_per_s(self.families.dtype)
        moved = np.array([kernel.bytes for kernel in kernels]) / device.memory.bandwidth
        none = np.zeros(len(kernels))
        ahead, waited = (none, host) if software.host.blocking else (host, none)
        waited = waited + software.host.selection * _selects(kernels)
        return KernelTimes(prices.seconds + waited, waited, ahead, work >= moved, prices.low, prices.high)


def _selects(kernels: Sequence[Kernel]) -> Array:
    """1 for kernels that choose rows by values of the device, 0 for others."""
    return np.array([float(kernel.family == "memory" and kernel.kind.selects) for kernel in kernels])


def _mixture(kernels: Sequence[Kernel], software: Software) -> Array:
    """Seconds of the host for experts beside the calls of their kernels."""
    products = np.array([kernel.experts if kernel.family == "gemm" else 0.0 for kernel in kernels])
    routes = np.array([kernel.experts > 0 and kernel.family == "memory" for kernel in kernels])
    return products * software.host.expert + routes * software.host.routing


def pricer(
    device: Device, dtype: str, calibration: str, software: Software, user_calibration: Calibration | None = None
) -> Pricer:
    """What prices a run: ``ideal``, ``ppp=…``, a calibration file, or (``auto``) the best calibration there is for the
    device; ``user_calibration`` in place of such a file."""
    constant = constants(device.kind, calibration) if user_calibration is None else rates(calibration)
    if constant is not None:
        return ConstantRates(device, dtype, constant)
    named = user_calibration if user_calibration is not None or calibration == "auto" else load_calibration(calibration)
    return Calibrated(FamilyPrices(device, dtype, software, named))
