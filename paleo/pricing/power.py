"""Effect of the power limit on kernels: the factor by which arithmetic slows down, and a board's power.

Every FLOP and every byte of DRAM costs energy, and a busy device additionally draws a share of its limit. If the sum
over the time at full clock exceeds the limit, the clock falls until the limit is kept. Energy per FLOP is assumed
constant: under load the voltage is near its minimum, so that a lower clock saves power only in proportion. Compared
with a law of power ~ clock², this law transfers better from L40S to a card of the next generation. It gives H100 and
B200 equal energy per FLOP (0.6 pJ), in accordance with their common process (TSMC 4N).

Energies by process, and the structure of the L2, are start values of fits if rows do not determine them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.operations.tensor import BYTES_PER_NUMBER, default_precision
from paleo.pricing.kernels import DeviceDatasheet, as_float_arrays
from paleo.specs.calibration import constants_fitted_to_steps, parameter
from paleo.units import MILLISECOND, TERA

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration

Array = npt.NDArray[np.float64]
Numbers = npt.ArrayLike
PICO = 1.0 / TERA
#: Energy of a byte of DRAM access including the way across the chip: 3.9 pJ/bit in HBM2 (O'Connor et al., MICRO 2017)
#: and about 1 pJ/bit on chip.
_DRAM_ENERGY = 40 * PICO
#: Share of the power limit that a busy device draws without arithmetic: leakage, interconnect, memory refresh, fans.
NON_ARITHMETIC_SHARE = 0.15
#: Share of the design power that any running kernel adds, fitted to watts of training on V100 and A40.
_BUSY_SHARE = 0.45
#: Share of the energy of a FLOP at full rate that is proportional to time: what any running kernel adds.
_BY_TIME = _BUSY_SHARE / (1.0 - NON_ARITHMETIC_SHARE)
#: Least share of the limit that remains for arithmetic, whatever the memory draws.
MIN_ARITHMETIC_POWER_SHARE = 0.05
#: Kernel time at which half of the slow-down applies in a short test run; regulators average over about this long.
HALF_THROTTLE_TIME = 0.3 * MILLISECOND
#: Name of the way of measuring watts: by the board itself.
BOARD_POWER_METHOD = "board"


def throttle_factor(power_at_full_clock: Numbers, power_limit: Numbers) -> Array:
    """Compute the factor by which arithmetic slows down if its power would exceed the limit.

    Parameters
    ----------
    power_at_full_clock, power_limit : array-like
        Powers in the same unit; arguments broadcast.

    Returns
    -------
    ndarray
        Factor: 1 below the limit, with a smooth transition.

    Examples
    --------
    >>> throttle_factor([1.0, 2.0], [100.0, 1.0]).round(2)
    array([1.  , 2.03])
    """
    ratio = np.square(np.square(np.asarray(power_at_full_clock) / np.asarray(power_limit)))
    return np.asarray(np.sqrt(np.sqrt(1.0 + ratio)))


def power_slowdown(
    *, busy: Numbers, flops: Numbers, dram: Numbers, energy: float, activity: Numbers = 1.0, device: DeviceDatasheet
) -> Array:
    """Compute the factor (at least 1) by which the power limit slows kernels down.

    The power of arithmetic is compared with the limit less the power of idling and memory. The part of the energy that
    any running kernel draws is proportional to time. So units that run at a cut rate spend correspondingly more of that
    energy per FLOP, and vector units draw it at any share of their rate. On tensor cores, whose instructions do a
    thousand FLOP, energy is proportional to FLOP, as measured products of H100, H200, B200 and GB200 show.

    Parameters
    ----------
    busy : array-like
        Time of the kernels at full clock [s].
    flops : array-like
        FLOP of the kernels.
    dram : array-like
        Bytes from and to DRAM.
    energy : float
        Energy of arithmetic [pJ/FLOP].
    activity : array-like, default 1.0
        Switching activity of the data relative to that for which `energy_per_flop` is valid.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).

    Returns
    -------
    ndarray
        Factor on the time, at least 1; arguments broadcast.

    Examples
    --------
    >>> from paleo.pricing.kernels import DeviceDatasheet
    >>> card = DeviceDatasheet("x", "Hopper", "HBM3", 132, 1.8e9, 1e15, 3e12, 5e7, 700.0, True)
    >>> float(power_slowdown(busy=1.0, flops=1e15, dram=0.0, energy=0.595, device=card).round(3))  # 595 of 595 W
    1.189
    """
    seconds, work, moved = as_float_arrays(busy, flops, dram)
    if device.tensor_cores:
        rate = work / seconds * (1.0 + _BY_TIME * (device.uncapped_rate_ratio - 1.0))
    else:
        rate = (1.0 - _BY_TIME) * work / seconds + _BY_TIME * device.peak_flops_per_s
    power = np.asarray(activity) * energy * PICO * rate
    left = device.power_watts * (1.0 - NON_ARITHMETIC_SHARE) - _DRAM_ENERGY * moved / seconds
    return throttle_factor(power, np.maximum(left, MIN_ARITHMETIC_POWER_SHARE * device.power_watts))


def slowdown_share(busy: Numbers, sustained: Numbers, ramp: float = HALF_THROTTLE_TIME) -> Array:
    """Return how much of the power limit's slow-down a kernel sees: all under sustained load, less in a short test.

    Parameters
    ----------
    busy : array-like
        Seconds of the kernel.
    sustained : array-like
        1 after long load, 0 in a short test run.
    ramp : float, default HALF_THROTTLE_TIME
        Kernel time at which half of the slow-down applies [s].

    Returns
    -------
    ndarray
        Share: 1 after long load, else busy / (busy + ramp).

    Examples
    --------
    >>> [round(float(share), 2) for share in slowdown_share([HALF_THROTTLE_TIME] * 2, [0.0, 1.0])]
    [0.5, 1.0]
    """
    seconds, long = as_float_arrays(busy, sustained)
    return np.asarray(np.maximum(seconds / (seconds + ramp), long))


def relative_flop_energy(dtype: str) -> float:
    """Return the energy per FLOP of tensor cores in a number format, relative to the calibrated 16-bit products.

    The energy is proportional to the bytes of operands. In fp8 `GemmParameters.training_energy_per_flop` relative to
    that in 16 bits is 0.53 on H100, 0.5 on L40S, 0.44 on B200. TF32 moves four bytes. Formats below 16 bits have
    separate families, so their factor is 1.

    Parameters
    ----------
    dtype : str
        Number format, such as ``bf16``.

    Returns
    -------
    float
        Factor relative to 16 bits.

    Examples
    --------
    >>> relative_flop_energy("tf32"), relative_flop_energy("bf16"), relative_flop_energy("fp8")
    (2.0, 1.0, 1.0)
    """
    formats = default_precision(dtype)
    return 1.0 if formats.quantises_operands else formats.operand_bytes / BYTES_PER_NUMBER["fp16"]


#: Family of the calibration of steps that contains `SustainedEnergyParameters`.
SUSTAINED_ENERGY_FAMILY = "arithmetic"


@dataclass(frozen=True, slots=True)
class SustainedEnergyParameters:
    """Energy of a sixteen-bit FLOP in measured steps relative to ``GemmParameters.training_energy_per_flop``, by
    architecture.

    A device draws this energy until its power limit slows it down, so that long steps show it and short tests do not.
    Valid for parts with HBM. Products in eight bits and convolutions need no factor; other architectures have 1.
    """

    ampere: float = parameter("1", "0.6..2", "of Ampere's tensor cores")
    hopper: float = parameter("1", "0.6..2", "of Hopper's tensor cores")
    blackwell: float = parameter("1", "0.6..2", "of Blackwell's tensor cores")
    blackwell_ultra: float = parameter("1", "0.6..2", "of Blackwell Ultra's tensor cores")

    def for_architecture(self, architecture: str) -> float:
        """Return the energy factor of a GPU architecture; dimensionless.

        Parameters
        ----------
        architecture : str
            Architecture of the device, such as ``Hopper``.

        Returns
        -------
        float
            Factor; 1 for other architectures.
        """
        return float(getattr(self, architecture.lower().replace(" ", "_"), 1.0))


def relative_training_energy(
    training_activity: float, dtype: str, device: DeviceDatasheet, calibration: Calibration | None = None
) -> float:
    """Return the energy per FLOP of a GEMM in sustained training, relative to that in the calibrating benchmark.

    Parameters
    ----------
    training_activity : float
        Switching activity in training, from the calibration of GEMMs (``GemmParameters.training_energy_ratio``) [-].
    dtype : str
        Number format, such as ``bf16``.
    device : DeviceDatasheet
        Device; its architecture and kind of memory count.
    calibration : Calibration, optional
        The user's calibration, which may hold `SustainedEnergyParameters`.

    Returns
    -------
    float
        Factor on the energy [-].
    """
    energy = training_activity * relative_flop_energy(dtype)
    if default_precision(dtype).operand_bytes < BYTES_PER_NUMBER["bf16"] or not device.memory_kind.startswith("HBM"):
        return energy
    constants = constants_fitted_to_steps(SustainedEnergyParameters, SUSTAINED_ENERGY_FAMILY, calibration)
    return energy * constants.for_architecture(device.architecture)


@dataclass(frozen=True, slots=True)
class PowerParameters:
    """Parameters of a board's power, as shares of its design power and energies of work.

    Fitted to mean watts of training steps under power limits (Zeus: You, Chung, Chowdhury, NSDI 2023). A kernel adds
    ``busy_power_share`` whatever it does: clock trees, schedulers and register files at full clock, leakage of a warm
    chip. `GemmParameters.training_energy_per_flop` of a device is the limit less the idle power, divided by its
    sustained rate, so that ``busy_power_share`` is included. ``arithmetic_energy_share`` is the share of that energy
    which is proportional to FLOP; the watts at that rate then equal the limit.

    Notes
    -----
    ``idle_power_share`` is drawn at full clocks with nothing running: V100 38 of 250 W. ``interface_energy_per_byte``
    is drawn by a running GDDR interface: A40 87 W idle, 42 W above the share. Kernels shorter than ``device_fill_time``
    use half of the multiprocessors or fewer. Below ``least_voltage_clock`` the voltage does not fall further.
    """

    idle_power_share: float = parameter("0.15", "0.02..0.5", "share of design power, clocks up, idle", fitted=False)
    interface_energy_per_byte: float = parameter("60 pJ/B", "0..200", "GDDR interface, per peak byte/s", fitted=False)
    dram_energy_per_byte: float = parameter("40 pJ/B", "10..200", "energy of a byte from DRAM", fitted=False)
    busy_power_share: float = parameter("0.45", "0.02..0.8", "share of the design power that any running kernel adds")
    device_fill_time: float = parameter("15 us", "1..200 us", "time in which a kernel spreads over the device")
    least_voltage_clock: float = parameter("0.8", "0.5..1", "share of boost clock of the least voltage", fitted=False)

    @property
    def arithmetic_energy_share(self) -> float:
        """Share (0 to 1) of the energy of a FLOP in training that is proportional to FLOP, not to time."""
        return 1.0 - self.busy_power_share / (1.0 - NON_ARITHMETIC_SHARE)

    def idle_watts(self, design_power: float, memory_kind: str, memory_bandwidth: float) -> float:
        """Return the power that a board draws while nothing runs.

        Parameters
        ----------
        design_power : float
            Design power of the board [W].
        memory_kind : str
            Memory technology, such as ``HBM3`` or ``GDDR6``.
        memory_bandwidth : float
            Bandwidth by datasheet [byte/s].

        Returns
        -------
        float
            Power [W].

        Examples
        --------
        >>> round(PowerParameters().idle_watts(300.0, "GDDR6", 696e9), 1)
        86.8
        """
        interface = self.interface_energy_per_byte * PICO * memory_bandwidth if memory_kind.startswith("GDDR") else 0.0
        return self.idle_power_share * design_power + interface


def power_limited_clock_share(excess: Numbers, least_voltage_clock: float) -> Array:
    """Compute the share of the boost clock at which a board's dynamic power equals its power limit.

    Dynamic power is proportional to clock x voltage². Down to ``least_voltage_clock`` the voltage falls with the clock
    (power ~ clock³); at lower clocks the voltage is constant (power ~ clock).

    Parameters
    ----------
    excess : array-like
        Dynamic power at the boost clock over the power that the limit leaves for dynamic power [-].
    least_voltage_clock : float
        Share of the boost clock below which the voltage is constant.

    Returns
    -------
    ndarray
        Shares of the boost clock, up to 1.

    References
    ----------
    Weiser, Welch, Demers and Shenker, Scheduling for Reduced CPU Energy, OSDI 1994.

    Examples
    --------
    >>> power_limited_clock_share([0.5, 1.5, 4.0], 0.8).round(3)
    array([1.   , 0.874, 0.391])
    """
    over = np.maximum(np.asarray(excess, dtype=np.float64), 1.0)
    cubic = 1.0 / np.cbrt(over)
    return np.asarray(np.where(cubic >= least_voltage_clock, cubic, 1.0 / (over * least_voltage_clock**2)))


class EnergyPerFlop(NamedTuple):
    """Energy per FLOP at full clock [pJ/FLOP], by arithmetic unit.

    ``tensor`` and ``fp8`` are those of matrix units with two-byte and one-byte operands, ``vector`` of vector units in
    fp32. ``training`` and ``training_fp8`` are those of matrix units in sustained training.
    """

    tensor: float
    fp8: float
    vector: float
    training: float
    training_fp8: float


#: Products of eight-bit integers that a vector unit adds in the time of one fp32 product (dp4a).
INT8_PRODUCTS_PER_FP32 = 4.0
#: Energies by process: the power limit divided by the rate that long products, and steps of training, sustain under it.
#: For vector units those at which cards keep their boost clock (Titan X of Pascal, V100, A100; RTX 4090, 450 W).
_ENERGY_PER_FLOP: Mapping[str, EnergyPerFlop] = {
    "28 nm": EnergyPerFlop(9.0, 9.0, 30.0, 11.0, 11.0),
    "16 nm": EnergyPerFlop(4.0, 4.0, 14.0, 5.0, 5.0),
    "12 nm": EnergyPerFlop(2.3, 2.3, 16.0, 2.9, 2.9),
    "8 nm": EnergyPerFlop(1.5, 0.8, 11.0, 1.9, 1.0),
    "7 nm": EnergyPerFlop(0.8, 0.4, 11.0, 1.0, 0.5),
    "4 nm, consumer": EnergyPerFlop(1.35, 0.5, 4.6, 1.5, 0.75),
    "4 nm, Hopper": EnergyPerFlop(0.68, 0.31, 4.6, 0.86, 0.46),
    "4 nm": EnergyPerFlop(0.56, 0.11, 4.6, 0.70, 0.31),
}
#: Architecture -> process, of parts with HBM and of parts with GDDR (NVIDIA's whitepapers).
_PROCESS: Mapping[str, tuple[str, str]] = {
    "Kepler": ("28 nm", "28 nm"),
    "Maxwell": ("28 nm", "28 nm"),
    "Pascal": ("16 nm", "16 nm"),
    "Volta": ("12 nm", "12 nm"),
    "Turing": ("12 nm", "12 nm"),
    "Ampere": ("7 nm", "8 nm"),
    "Ada Lovelace": ("4 nm, consumer", "4 nm, consumer"),
    "Hopper": ("4 nm, Hopper", "4 nm, consumer"),
    "Blackwell": ("4 nm", "4 nm, consumer"),
    "Blackwell Ultra": ("4 nm", "4 nm, consumer"),
}
#: Architectures whose parts with HBM have an L2 of two partitions, each of which caches for its half of the device
#: (NVIDIA A100 whitepaper, 2020), and shares of the nominal size in which data then survive; others keep nearly all.
_SPLIT_L2 = frozenset({"Ampere", "Hopper", "Blackwell", "Blackwell Ultra"})
_SPLIT_L2_SURVIVAL_SHARE, WHOLE_L2_SURVIVAL_SHARE = 0.45, 0.9


def energy_per_flop(figures: DeviceDatasheet) -> EnergyPerFlop:
    """Return the energies per FLOP of a device, by its manufacturing process (such as 4 nm).

    An unknown process counts as 7 nm.

    Parameters
    ----------
    figures : DeviceDatasheet
        Datasheet values; architecture and kind of memory count.

    Returns
    -------
    EnergyPerFlop
        Energies at full clock [pJ/FLOP].

    Examples
    --------
    >>> from paleo.pricing.kernels import device_datasheet
    >>> from paleo.specs.device import load_device
    >>> energy_per_flop(device_datasheet(load_device("v100-sxm2-16gb"), "fp16")).tensor
    2.3
    """
    process = _PROCESS.get(figures.architecture, _PROCESS["Ampere"])
    return _ENERGY_PER_FLOP[process[figures.memory_kind.startswith("GDDR")]]


def l2_surviving_share(figures: DeviceDatasheet) -> float:
    """Return the share of the L2 cache in which data survive from kernel to kernel, by the cache's structure.

    Parameters
    ----------
    figures : DeviceDatasheet
        Datasheet values; architecture and kind of memory count.

    Returns
    -------
    float
        Share, 0 to 1.
    """
    split = figures.architecture in _SPLIT_L2 and figures.memory_kind.startswith("HBM")
    return _SPLIT_L2_SURVIVAL_SHARE if split else WHOLE_L2_SURVIVAL_SHARE
