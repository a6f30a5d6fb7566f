"""Predicted times of kernels on a device, from counts of computation and the properties of hardware.

A pricing formula is a pure function that broadcasts over numpy arrays, in SI units. A formula may depend on the
datasheet values of a device for one arithmetic format, and on calibrated parameters
(`paleo.specs.calibration.parameter`). The simplest formula is the roofline, with a launch floor and a percentage of
peak. A calibration predicts all kernels of a family together by the formula of the family (``paleo.pricing.families``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.operations.tensor import BYTES_PER_NUMBER, default_precision
from paleo.pricing.calibration_lookup import (
    ConstantEfficiencies,
    SourcedParameters,
    constant_efficiencies,
    find_calibrated_parameters,
    parse_efficiencies,
)
from paleo.registry import Registry
from paleo.specs.calibration import Calibration, load_calibration
from paleo.units import GIGA

if TYPE_CHECKING:
    from paleo.operations.base import Kernel
    from paleo.specs.device import ArithmeticUnit, Device
    from paleo.specs.software import SoftwareProfile

Array = npt.NDArray[np.float64]
Numeric = float | Array


@dataclass(frozen=True, slots=True)
class DeviceDatasheet:
    """Datasheet values of one device for one number format, in SI units; all that a pricing formula may use.

    ``uncapped_rate_ratio`` is the ratio of the rate for which the unit is built to the rate that the maker allows
    (`_built_to_allowed_tensor_rate`).
    """

    name: str
    architecture: str
    memory_kind: str
    multiprocessors: float
    clock_hz: float
    peak_flops_per_s: float
    memory_bandwidth: float
    l2_bytes: float
    power_watts: float
    tensor_cores: bool
    uncapped_rate_ratio: float = 1.0

    @property
    def flops_per_clock(self) -> float:
        """Peak FLOP per clock cycle of one multiprocessor in this format."""
        return self.peak_flops_per_s / (self.multiprocessors * self.clock_hz)


def as_float_arrays(*sizes: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], ...]:
    """Convert each argument to an array of floats.

    Parameters
    ----------
    *sizes : array_like
        Numbers or arrays.

    Returns
    -------
    tuple of ndarray
        One array per argument.
    """
    return tuple(np.asarray(size, dtype=np.float64) for size in sizes)


def roofline_time(
    *, flops: Numeric, moved_bytes: Numeric, peak_flops_per_s: Numeric, memory_bandwidth: Numeric
) -> Array:
    """Compute the roofline time of a kernel, the longer of arithmetic and memory traffic.

    max(flops / peak_flops_per_s, moved_bytes / memory_bandwidth)

    Valid if the kernel is long enough to hide its launch and fills the device.

    Parameters
    ----------
    flops : array-like
        FLOP of the kernel; 1 multiply-add is 2.
    moved_bytes : array-like
        Bytes that are read and written.
    peak_flops_per_s, memory_bandwidth : array-like
        Peaks of the device, perhaps scaled [FLOP/s, byte/s].

    Returns
    -------
    ndarray
        Time [s]; arguments broadcast.

    References
    ----------
    Williams, Waterman and Patterson, Roofline, CACM 52(4), 2009.

    Examples
    --------
    >>> float(roofline_time(flops=4e12, moved_bytes=1e9, peak_flops_per_s=1e15, memory_bandwidth=1e12))
    0.004
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
    """Compute the time of a kernel from a launch floor, arithmetic and memory traffic.

    The combination ``max`` is the roofline. ``sum`` is the original Paleo's time of a layer (Qi et al., ICLR 2017),
    with peaks already scaled to its percent of peak.

    Parameters
    ----------
    flops : array-like
        FLOP of the kernel; 1 multiply-add is 2.
    moved_bytes : array-like
        Bytes that are read and written.
    peak_flops_per_s, memory_bandwidth : array-like
        Peaks of the device, perhaps scaled [FLOP/s, byte/s].
    launch : array-like, default 0.0
        Seconds before the first instruction.
    combine : {'max', 'sum'}, default 'max'
        ``max`` if arithmetic and traffic overlap, ``sum`` if they do not.

    Returns
    -------
    ndarray
        Time [s]; arguments broadcast.

    Examples
    --------
    >>> rates = {"peak_flops_per_s": 1.0, "memory_bandwidth": 1.0}
    >>> float(kernel_time(flops=2.0, moved_bytes=3.0, **rates, launch=0.5, combine="sum"))
    5.5
    """
    arithmetic, traffic = np.asarray(flops) / peak_flops_per_s, np.asarray(moved_bytes) / memory_bandwidth
    return np.asarray(launch + (arithmetic + traffic if combine == "sum" else np.maximum(arithmetic, traffic)))


#: FLOP per clock of one multiprocessor's fp32 lanes (128 fused multiply-adds), for datasheets without a clock.
_FP32_FLOPS_PER_CLOCK = 256.0
#: Assumed last-level cache per multiprocessor for datasheets without one: 128 KiB.
_CACHE_PER_MULTIPROCESSOR = 2.0**17
#: FLOP per clock at 16 bits for which the tensor cores of a multiprocessor are built, by compute capability
#: (whitepapers of V100, Turing, A100, GA102, AD102, H100, Blackwell and RTX Blackwell; the rates for sums in 16 bits).
_TENSOR_RATES = {
    "7.0": 2.0**10, "7.5": 2.0**10, "8.0": 2.0**11, "8.6": 2.0**10, "8.9": 2.0**10, "9.0": 2.0**12, "10.0": 2.0**13,
    "10.3": 2.0**13, "12.0": 2.0**10,
}  # fmt: skip
#: Lowest clock, as a share of boost, for which a datasheet states the peak of matrix units.
_LOWER_CLOCK = 0.85
#: Values of ``compute``, the unit that a dtype runs on.
_COMPUTE_UNITS = ("", "tensor", "vector", "fp32")


def arithmetic_unit(device: Device, dtype: str, compute: str | None = None) -> ArithmeticUnit:
    """Return the arithmetic unit on which products of a number format run: tensor cores or vector units.

    fp32 means fp32 arithmetic; TF32 is a separate format.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.
    dtype : str
        Number format, such as ``bf16``.
    compute : str, optional
        Unit instead of the usual one: ``tensor``, ``vector`` (the format's rate on vector units) or ``fp32`` (stored
        narrow, computed in fp32).

    Returns
    -------
    ArithmeticUnit
        Tensor (matrix) cores if the device has them for that format, else vector units.

    Raises
    ------
    SpecError
        If `compute` is no known unit.

    Examples
    --------
    >>> from paleo.specs.device import load_device
    >>> arithmetic_unit(load_device("a100-sxm4-80gb"), "bf16"), arithmetic_unit(load_device("p100-pcie-16gb"), "fp16")
    ('tensor', 'vector')
    """
    if compute and compute not in _COMPUTE_UNITS:
        raise SpecError(f"compute {compute!r} is unknown; expected one of {', '.join(map(repr, _COMPUTE_UNITS))}")
    if compute:
        return "tensor" if compute == "tensor" else "vector"
    arithmetic = device.arithmetic_dtype(dtype)
    return "tensor" if arithmetic in device.tensor_dtypes and arithmetic != "fp32" else "vector"


def datasheet_clock(device: Device) -> float:
    """Return the clock frequency to which the peak rates of the datasheet belong [Hz].

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.

    Returns
    -------
    float
        Boost clock [Hz]; without one the clock that the fp32 peak implies, or 1 GHz. As rates are per clock, only
        ratios matter.
    """
    if device.boost_clock is not None:
        return device.boost_clock
    fp32 = device.vector_peak.get("fp32")
    return fp32 / (_FP32_FLOPS_PER_CLOCK * device.multiprocessors) if fp32 else GIGA


def _peak_at_boost(device: Device, peak_flops_per_s: float) -> float:
    """Return the peak of tensor cores at the boost clock, if the datasheet gives the peak at a lower clock.

    A multiprocessor of NVIDIA does a power of two of FLOP per clock (4096 on Hopper at 16 bits, 8192 on Blackwell:
    whitepapers). H100's 989 TFLOP/s are such units at 1.83 GHz; its boost clock is 1.98 GHz.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.
    peak_flops_per_s : float
        Peak of the datasheet [FLOP/s].

    Returns
    -------
    float
        FLOP/s.

    Examples
    --------
    >>> from paleo.specs.device import load_device
    >>> h100 = load_device("h100-sxm5-80gb")
    >>> _peak_at_boost(h100, h100.peak["bf16"]) / (h100.multiprocessors * h100.boost_clock)
    4096.0
    """
    if device.vendor != "NVIDIA" or device.kind != "gpu":
        return peak_flops_per_s
    per_clock = device.multiprocessors * datasheet_clock(device)
    power = 2.0 ** round(math.log2(peak_flops_per_s / per_clock))
    return power * per_clock if _LOWER_CLOCK < peak_flops_per_s / (power * per_clock) < 1.0 else peak_flops_per_s


def _built_to_allowed_tensor_rate(device: Device, dtype: str, peak_flops_per_s: float) -> float:
    """Return the ratio of the rate for which tensor cores are built to the rate that the maker allows.

    Makers halve the rate of sums in fp32 on gaming cards, and allow a quarter of all rates on H20. The paths that feed
    the cores keep their full width.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.
    dtype : str
        Number format, such as ``bf16``.
    peak_flops_per_s : float
        Peak of the datasheet [FLOP/s].

    Returns
    -------
    float
        Built over allowed rate, at least 1 [-].

    Examples
    --------
    >>> from paleo.specs.device import load_device
    >>> cards = [load_device("l40s"), load_device("rtx-4090")]
    >>> [_built_to_allowed_tensor_rate(card, "bf16", card.peak["bf16"]) for card in cards]
    [1.0, 2.0]
    """
    capability = device.multiprocessor.compute_capability if device.multiprocessor else None
    built = _TENSOR_RATES.get(capability or "", 0.0) * BYTES_PER_NUMBER["fp16"] / BYTES_PER_NUMBER[dtype]
    full = built * device.multiprocessors * datasheet_clock(device)
    return 2.0 ** max(0.0, round(math.log2(full / peak_flops_per_s))) if full else 1.0


def elementwise_dtype(device: Device) -> str:
    """Return the number format whose rate limits element-wise arithmetic on a device.

    This is fp32, or 16 bits if the maker publishes no fp32 rate (TPU, Gaudi). Memory limits those passes long before
    either.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.

    Returns
    -------
    str
        Number format, such as ``fp32``.

    Examples
    --------
    >>> from paleo.specs.device import load_device
    >>> elementwise_dtype(load_device("h100-sxm5-80gb")), elementwise_dtype(load_device("tpu-v4"))
    ('fp32', 'bf16')
    """
    return next(dtype for dtype in ("fp32", "bf16", "fp16", *device.peak) if dtype in device.peak)


def device_datasheet(device: Device, dtype: str, compute: str | None = None) -> DeviceDatasheet:
    """Return the datasheet values of a device for GEMMs in a number format.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.
    dtype : str
        Number format, such as ``bf16``.
    compute : str, optional
        Unit instead of the usual one: ``tensor``, ``vector`` (the format's rate on vector units) or ``fp32`` (stored
        narrow, computed in fp32).

    Returns
    -------
    DeviceDatasheet
        Peak FLOP/s, bandwidth, clock, caches, … in SI units.

    Raises
    ------
    SpecError
        If the device has no peak for the number format.

    Examples
    --------
    >>> from paleo.specs.device import load_device
    >>> device_datasheet(load_device("b200"), "fp16").flops_per_clock
    8192.0
    >>> device_datasheet(load_device("a100-sxm4-80gb"), "fp32").tensor_cores
    False
    """
    unit = arithmetic_unit(device, dtype, compute)
    arithmetic = "fp32" if compute == "fp32" else dtype if compute else device.arithmetic_dtype(dtype)
    ordinary = unit == "vector" and arithmetic in device.vector_peak
    peak = device.peak_flops_per_s(arithmetic, "vector" if ordinary else None)
    peak = _peak_at_boost(device, peak) if unit == "tensor" else peak
    return DeviceDatasheet(
        name=device.name,
        architecture=device.architecture,
        memory_kind=device.memory.kind,
        multiprocessors=float(device.multiprocessors),
        clock_hz=datasheet_clock(device),
        peak_flops_per_s=peak,
        memory_bandwidth=device.memory.bandwidth,
        l2_bytes=device.l2 or device.multiprocessors * _CACHE_PER_MULTIPROCESSOR,
        power_watts=device.tdp or math.inf,
        tensor_cores=unit == "tensor",
        uncapped_rate_ratio=_built_to_allowed_tensor_rate(device, arithmetic, peak) if unit == "tensor" else 1.0,
    )


#: Families that run at the power limit in training, and the factor within which the sustained rates of measured steps
#: lie for one device and format: 500 to 590 TFLOP/s in bf16 on H100, 1,100 to 1,220 in fp8, 2,300 to 2,700 on GB200.
_POWER_LIMITED_FAMILIES, _SUSTAINED_RATE_SPREAD = ("gemm", "attention"), 1.1


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """Predicted times of kernels, arrays of shape (kernels,) in the order given.

    Attributes
    ----------
    device_time, launch_time : ndarray
        Time on the device, and the part of it that is constant launch time [s].
    host_time : ndarray
        Host time of the launches, which the host issues ahead of the device [s].
    compute_bound : ndarray of bool
        True for kernels limited by arithmetic, False for those limited by memory.
    low_factor, high_factor : ndarray
        Factors on the time between which 90 % of measurements lie [-].
    """

    device_time: Array
    launch_time: Array
    host_time: Array
    compute_bound: npt.NDArray[np.bool_]
    low_factor: Array
    high_factor: Array

    @property
    def host_synchronous_times(self) -> Array:
        """Kernel times if the host cannot run ahead: the longer of device and host time, shape (kernels,) [s]."""
        return np.maximum(self.device_time, self.host_time)


class KernelPredictor(Protocol):
    """Protocol of an object that predicts the times of kernels on one device in one number format."""

    @property
    def name(self) -> str: ...

    @property
    def constant_efficiencies(self) -> ConstantEfficiencies | None:
        """Constant efficiencies on which the times are based; None for calibrated times."""

    @property
    def user_calibration(self) -> Calibration | None:
        """The user's calibration, if there is one."""

    @property
    def unmeasured_families(self) -> frozenset[str]:
        """Kernel families used so far whose parameters were not measured on this device's architecture."""

    def relative_algorithm_flops(self, kernels: Sequence[Kernel]) -> Array:
        """Return the FLOP that each kernel executes, relative to the direct algorithm, shape (kernels,) [-].

        Parameters
        ----------
        kernels : sequence of Kernel
            Kernels, in any order.

        Returns
        -------
        ndarray
            Shape (kernels,); below 1 for convolutions by Winograd's algorithms or Fourier transforms.
        """

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Predict device and host times of kernels, with the factors of their 90 % intervals.

        Parameters
        ----------
        kernels : sequence of Kernel
            Kernels, in any order.

        Returns
        -------
        KernelTimes
            Device and host times [s], arrays of shape (kernels,).
        """


@dataclass(frozen=True, slots=True)
class _ConstantRates:
    """Kernel times by the roofline, at constant shares of the datasheet's peaks.

    If ``constant_efficiencies.combine`` is "sum", the times follow the original Paleo (Qi et al., ICLR 2017).
    Arithmetic and traffic then add up, kinds with ``is_free_in_original_paleo`` cost nothing, and the optimizer update
    runs at the datasheet's rates. The original's GB of 2^30 bytes is not used (its memory times are 7 % shorter).
    """

    device: Device
    dtype: str
    constant_efficiencies: ConstantEfficiencies
    #: Constant rates have no calibration, family by family, so that none can be unmeasured.
    user_calibration: ClassVar[None] = None
    unmeasured_families: ClassVar[frozenset[str]] = frozenset()

    @property
    def name(self) -> str:
        """Name of the constant efficiencies: ``ideal`` or the percentages of peak."""
        return self.constant_efficiencies.name

    def relative_algorithm_flops(self, kernels: Sequence[Kernel]) -> Array:
        """Return 1 for each kernel: no algorithm that saves FLOP (Winograd, FFT) is considered.

        Parameters
        ----------
        kernels : sequence of Kernel
            Kernels, in any order.

        Returns
        -------
        ndarray, shape (kernels,)
            Ones [-].
        """
        return np.ones(len(kernels))

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Compute the times of kernels by the roofline at constant shares of peak.

        Parameters
        ----------
        kernels : sequence of Kernel
            Kernels, in any order.

        Returns
        -------
        KernelTimes
            Device and host times [s], arrays of shape (kernels,).
        """
        constants, count = self.constant_efficiencies, len(kernels)
        original = constants.combine == "sum"
        free = [original and kernel.family == "memory" and kernel.kind.is_free_in_original_paleo for kernel in kernels]
        update = np.array([kernel.phase == "update" for kernel in kernels], dtype=bool)
        flops, bytes_moved = self._flops_and_bytes(kernels)
        moved = np.where(np.array(free, dtype=bool), 0.0, bytes_moved)
        vector = np.where(update | (not original), [kernel.vector_flops for kernel in kernels], 0.0)
        plain: ArithmeticUnit | None = "vector" if "fp32" in self.device.vector_peak else None
        work = flops / self.device.peak_flops_per_s(self.device.arithmetic_dtype(self.dtype))
        work = work + vector / self.device.peak_flops_per_s(elementwise_dtype(self.device), plain)
        compute, memory = (np.where(update, 1.0, share) for share in (constants.compute, constants.memory))
        rates = {"peak_flops_per_s": compute, "memory_bandwidth": self.device.memory.bandwidth * memory}
        factors = constants.launch_time, constants.low_factor, constants.high_factor
        launch, low, high = (np.full(count, factor) for factor in factors)
        total = kernel_time(flops=work, moved_bytes=moved, **rates, launch=launch, combine=constants.combine)
        bound = work / compute >= moved / rates["memory_bandwidth"]
        return KernelTimes(total, launch, np.zeros(count), bound, low, high)

    def _flops_and_bytes(self, kernels: Sequence[Kernel]) -> tuple[Array, Array]:
        """Return (FLOP, bytes) of each kernel, padded to the systolic arrays of a TPU if so configured."""
        if not self.constant_efficiencies.pads_to_arrays:
            return np.array([kernel.flops for kernel in kernels]), np.array([kernel.bytes for kernel in kernels])
        from paleo.pricing.systolic import lane_padded_bytes, systolic_array_flops

        padded = np.array([lane_padded_bytes(kernel, self.device) for kernel in kernels])
        return systolic_array_flops(kernels, self.device), padded


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Predicted device times of kernels [s], and the bounds of their 90 % intervals as factors on the time."""

    seconds: Array
    low_factor: Array
    high_factor: Array


@dataclass(frozen=True)
class KernelFamilyPredictor:
    """Predictor of kernel times in one number format, by kernel families with calibrated formulas.

    A family is a set of kernels that share one formula, such as GEMMs. ``parameter_origins`` collects where the
    parameters of each used family come from.
    """

    device: Device
    dtype: str
    software: SoftwareProfile
    user_calibration: Calibration | None = None
    parameter_origins: dict[str, str] = field(default_factory=dict)
    #: The times are not based on constant efficiencies.
    constant_efficiencies: ClassVar[None] = None

    @property
    def name(self) -> str:
        """Description of where the parameters of the used families come from, for reports.

        For example ``auto: measured (a100-sxm4-80gb) gemm.tensor; …``.
        """
        by_origin: dict[str, list[str]] = {}
        for family, origin in sorted(self.parameter_origins.items()):
            by_origin.setdefault(origin, []).append(family)
        parts = [f"{origin} {', '.join(families)}" for origin, families in sorted(by_origin.items(), reverse=True)]
        label = self.user_calibration.name if self.user_calibration is not None else "auto"
        return f"{label}: {'; '.join(parts)}" if parts else label

    @property
    def unmeasured_families(self) -> frozenset[str]:
        """Families in use whose parameters come from another architecture or from the formula's defaults."""
        measured = ("measured", f"inherited ({self.device.architecture})")
        return frozenset(
            f.partition(".")[0] for f, origin in self.parameter_origins.items() if not origin.startswith(measured)
        )

    def device_times(self, kernels: Sequence[Kernel]) -> DeviceTimes:
        """Predict the device times of kernels, in the order given, without host time.

        Parameters
        ----------
        kernels : sequence of Kernel
            Kernels, in any order.

        Returns
        -------
        DeviceTimes
            Times [s] and factors of their intervals, shape (kernels,).
        """
        seconds, low, high = (np.zeros(len(kernels)) for _ in range(3))
        groups: dict[str, list[int]] = {}
        for index, kernel in enumerate(kernels):
            groups.setdefault(_calibration_group(kernel), []).append(index)
        for group, indices in groups.items():
            chosen = [kernels[index] for index in indices]
            lookup_result, times = KERNEL_FAMILIES[group.partition(".")[0]](self, group, chosen)
            least, most = lookup_result.interval_factor_arrays(times)
            spread = _SUSTAINED_RATE_SPREAD if group.partition(".")[0] in _POWER_LIMITED_FAMILIES else 1.0
            seconds[indices], low[indices], high[indices] = times, least / spread, most * spread
        return DeviceTimes(seconds, low, high)

    def relative_algorithm_flops(self, kernels: Sequence[Kernel]) -> Array:
        """Return the FLOP that each kernel executes, relative to the direct algorithm.

        Parameters
        ----------
        kernels : sequence of Kernel
            Kernels.

        Returns
        -------
        ndarray, shape (kernels,)
            Ratio [-]; below 1 for convolutions by Winograd's algorithms or Fourier transforms.
        """
        shares = np.ones(len(kernels))
        for name in RELATIVE_ALGORITHM_FLOPS:
            places = [index for index, kernel in enumerate(kernels) if kernel.family == name]
            if places:
                shares[places] = RELATIVE_ALGORITHM_FLOPS[name](self, [kernels[index] for index in places])
        return shares

    def times(self, kernels: Sequence[Kernel]) -> KernelTimes:
        """Predict device and host times of kernels with the calibrated families.

        Parameters
        ----------
        kernels : sequence of Kernel
            Kernels, in any order.

        Returns
        -------
        KernelTimes
            Device and host times [s], arrays of shape (kernels,).
        """
        if not kernels:
            return KernelTimes(*(np.zeros(0),) * 3, np.zeros(0, dtype=bool), np.zeros(0), np.zeros(0))
        prices, costs = self.device_times(kernels), self.software.host
        forward = np.array([kernel.phase == "forward" for kernel in kernels])
        host = np.where(forward, costs.forward, costs.backward) * [kernel.host_calls for kernel in kernels]
        products = np.array([kernel.expert_count if kernel.family == "gemm" else 0.0 for kernel in kernels])
        routes = np.array([kernel.expert_count > 0 and kernel.family == "memory" for kernel in kernels])
        experts = products * costs.expert + routes * costs.routing
        host = (host + experts) * (not costs.whole_iteration)
        work = np.array([kernel.flops for kernel in kernels]) / self.device.peak_flops_per_s(self.dtype)
        moved = np.array([kernel.bytes for kernel in kernels]) / self.device.memory.bandwidth
        nothing = np.zeros(len(kernels))
        ahead, waited = (nothing, host) if costs.blocking else (host, nothing)
        selects, copied = np.zeros((2, len(kernels)))
        for index, kernel in enumerate(kernels):
            if kernel.family == "memory":
                selects[index] = kernel.kind.has_data_dependent_rows
                copied[index] = kernel.bytes * kernel.kind.copies_through_host  # states, from one step to the next
        waited = waited + costs.selection * selects + copied / (costs.feeds or np.inf)
        return KernelTimes(prices.seconds + waited, waited, ahead, work >= moved, prices.low_factor, prices.high_factor)

    def parameters_of(self, kind: type[Any], family: str) -> SourcedParameters[Any]:
        """Return the calibrated parameters of a kernel family, and record where they come from.

        Parameters
        ----------
        kind : type
            Dataclass of the calibrated parameters.
        family : str
            Calibration family, such as ``gemm.tensor``.

        Returns
        -------
        SourcedParameters[Any]
            Parameters, the calibration from which they come (the device's, one of its architecture, or the defaults of
            the formula), and the factors on a predicted time that bound 90 % of measured ones.
        """
        device = self.device
        result = find_calibrated_parameters(
            kind, subject=device.name, architecture=device.architecture, memory_kind=device.memory.kind, family=family,
            user_calibration=self.user_calibration,
        )  # fmt: skip
        self.parameter_origins[family] = f"{result.origin} ({result.source_name})"
        return result

    @property
    def sixteen_bit_dtype(self) -> str:
        """Number format of kernels that stay in 16 bits in fp8 or fp4 runs (attention), else that of the run."""
        return "bf16" if default_precision(self.dtype).quantises_operands else self.dtype

    @property
    def keeps_channels_first(self) -> bool:
        """True if the run keeps tensors channels-first although tensor cores need channels-last."""
        return self.dtype in self.software.formats.transposes and self.datasheet().tensor_cores

    @property
    def transposes_norms(self) -> bool:
        """True if batch normalisation in training converts channels-last tensors to channels-first and back."""
        narrow = default_precision(self.dtype).activation_bytes <= BYTES_PER_NUMBER["fp16"]
        channels_last = narrow and self.datasheet().tensor_cores and not self.keeps_channels_first
        return channels_last and self.software.formats.norms == "channels-first"

    @property
    def loads_norms_without_vectors(self) -> bool:
        """True if batch normalisation in training loads one number a thread, without vector loads."""
        return self.keeps_channels_first or self.transposes_norms or self.dtype in self.software.formats.scalar_norms

    @property
    def arithmetic_unit_suffix(self) -> str:
        """Arithmetic unit as a suffix of family names: ``tensor`` or ``vector``."""
        return "tensor" if self.datasheet().tensor_cores else "vector"

    def datasheet(self, dtype: str | None = None) -> DeviceDatasheet:
        """Return the peaks and bandwidths of the device's datasheet for a number format.

        Parameters
        ----------
        dtype : str, optional
            Format; by default that of the run.

        Returns
        -------
        DeviceDatasheet
            Datasheet values in SI units.
        """
        return device_datasheet(self.device, dtype or self.dtype)


def _calibration_group(kernel: Kernel) -> str:
    if kernel.family == "memory":
        family = kernel.kind.calibration_family
        return f"{family}.twice" if kernel.kind.reads_input_twice else family
    if kernel.family == "attention":
        return f"attention.{'forward' if kernel.phase == 'forward' else 'backward'}"
    return f"{kernel.family}.{kernel.operation}" if kernel.family in ("gemm", "scan") else kernel.family


def kernel_shape_values(kernels: Sequence[Kernel], name: str, default: float = 1.0) -> Array:
    """Collect one entry of ``Kernel.shape`` (such as ``m``) from every kernel, as an array of shape (kernels,).

    Parameters
    ----------
    kernels : sequence of Kernel
        Kernels, in any order.
    name : str
        Name of the entry.
    default : float, default 1.0
        Value for kernels without the entry.

    Returns
    -------
    ndarray
        Shape (kernels,).
    """
    return np.array([kernel.shape.get(name, default) for kernel in kernels], dtype=np.float64)


#: Parameters of a family and times of its kernels [s]; and the function from kernels to them, which families register.
KernelFamilyTimes = tuple[SourcedParameters[Any], Array]
_KernelFamilyFormula = Callable[[KernelFamilyPredictor, str, Sequence["Kernel"]], KernelFamilyTimes]
KERNEL_FAMILIES: Registry[_KernelFamilyFormula] = Registry("kernel family", "paleo.pricing")
#: Family -> share of the direct FLOP that its algorithms execute, for families with fewer products, shape (kernels,).
RELATIVE_ALGORITHM_FLOPS: Registry[Callable[[KernelFamilyPredictor, Sequence[Kernel]], Array]] = Registry(
    "kernel family with reduced products", "paleo.pricing"
)


def kernel_predictor(
    device: Device, dtype: str, calibration: str, software: SoftwareProfile, user_calibration: Calibration | None = None
) -> KernelPredictor:
    """Return the predictor of kernel times for a run: calibrated, or with constant efficiencies.

    Parameters
    ----------
    device : Device
        Device, as its datasheet describes it.
    dtype : str
        Number format, such as ``bf16``.
    calibration : str
        ``ideal``, ``ppp=…``, the path of a calibration file, or ``auto`` for the best calibration of the device.
    software : SoftwareProfile
        The software profile of the run.
    user_calibration : Calibration, optional
        A loaded calibration, instead of a file.

    Returns
    -------
    KernelPredictor
        Predictor for this device and number format.
    """
    text, kind = calibration, device.kind
    constant = constant_efficiencies(kind, text) if user_calibration is None else parse_efficiencies(text)
    if constant is not None:
        return _ConstantRates(device, dtype, constant)
    named = user_calibration if user_calibration is not None or text == "auto" else load_calibration(text)
    return KernelFamilyPredictor(device, dtype, software, named)
