"""What a limit of power costs: the factor by which arithmetic slows once the board may draw no more; watts of kernels.

Every FLOP and every byte of DRAM costs an energy, and a busy device idles at a share of its limit besides. Where their
sum over the time at full clock would exceed the limit, the clock falls until it does not. Energy per FLOP is taken as
constant: under load the voltage is near its floor, so that lowering the clock saves power in proportion, not more.
Of two power laws, this one and power ~ clock², this one carries better from L40S to a card of the next generation, and
gives H100 and B200 the same energy per FLOP (0.6 pJ, both TSMC 4N), as their common process says.

Energies by process, and the build of the L2, are start values of fits where rows do not tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.operations.tensor import BYTES, precision
from paleo.pricing.kernels import DeviceFigures, floats
from paleo.specs.calibration import of_steps, parameter
from paleo.units import MILLISECOND, TERA

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration

Array = npt.NDArray[np.float64]
Numbers = npt.ArrayLike
PICO = 1.0 / TERA
#: DRAM access with its way over the chip: 3.9 pJ/bit in HBM2 (O'Connor et al., MICRO 2017) and about 1 pJ/bit on chip.
_DRAM_ENERGY = 40 * PICO
#: Share of the power limit that a busy device draws without arithmetic: leakage, fabric, memory refresh, fans.
IDLE_SHARE = 0.15
#: Share of the design power that any running kernel adds: fitted to watts of training on V100 and A40.
_BUSY_SHARE = 0.45
#: Share of the energy of a FLOP at full rate that is drawn by time instead: what any running kernel adds.
_BY_TIME = _BUSY_SHARE / (1.0 - IDLE_SHARE)
#: Least share of the limit that is left for arithmetic, whatever the memory draws.
LEAST_SHARE = 0.05
#: Kernel time at which half of the slow-down is felt in a short test run: regulators average over about this long.
RAMP = 0.3 * MILLISECOND
#: How watts are read: by the board itself.
BOARD = "board"


def throttle(power_at_full_clock: Numbers, power_limit: Numbers) -> Array:
    """Return the factor by which arithmetic slows when its power would pass the limit.

    Parameters
    ----------
    power_at_full_clock, power_limit : array-like
        Both in one unit; arguments broadcast.

    Returns
    -------
    ndarray
        1 below the limit, smooth at the knee.

    Examples
    --------
    >>> throttle([1.0, 2.0], [100.0, 1.0]).round(2)
    array([1.  , 2.03])
    """
    ratio = np.square(np.square(np.asarray(power_at_full_clock) / np.asarray(power_limit)))
    return np.asarray(np.sqrt(np.sqrt(1.0 + ratio)))


def slow_down(
    *, busy: Numbers, flops: Numbers, dram: Numbers, energy: float, activity: Numbers = 1.0, device: DeviceFigures
) -> Array:
    """Return the factor by which the limit of power slows kernels.

    The power of arithmetic is held against what idling and memory leave of the limit. Of the energy, what any running
    kernel draws goes with time: units that run at a cut rate spend it as many times over for a FLOP, and ordinary cores
    draw it whatever share of their rate they reach. On tensor cores, an instruction of which does a thousand FLOP,
    energy goes with FLOP: measured products of H100, H200, B200 and GB200 say so.

    Parameters
    ----------
    busy : array-like
        Seconds at full clock.
    flops : array-like
        FLOP of the kernels.
    dram : array-like
        Bytes from and to DRAM.
    energy : float
        pJ/FLOP.
    activity : array-like, default 1.0
        Switching activity of the data against that for which `energy` holds.
    device : DeviceFigures
        What the datasheet and the clock say of the device (`paleo.pricing.kernels.figures`).

    Returns
    -------
    ndarray
        At least 1; arguments broadcast.

    Examples
    --------
    >>> from paleo.pricing.kernels import DeviceFigures
    >>> card = DeviceFigures("x", "Hopper", "HBM3", 132, 1.8e9, 1e15, 3e12, 5e7, 700.0, True)
    >>> float(slow_down(busy=1.0, flops=1e15, dram=0.0, energy=0.595, device=card).round(3))  # 595 of 595 W
    1.189
    """
    seconds, work, moved = floats(busy, flops, dram)
    if device.tensor_cores:
        rate = work / seconds * (1.0 + _BY_TIME * (device.rate_cut - 1.0))
    else:
        rate = (1.0 - _BY_TIME) * work / seconds + _BY_TIME * device.peak_flops_per_s
    power = np.asarray(activity) * energy * PICO * rate
    left = device.power_watts * (1.0 - IDLE_SHARE) - _DRAM_ENERGY * moved / seconds
    return throttle(power, np.maximum(left, LEAST_SHARE * device.power_watts))


def felt(busy: Numbers, sustained: Numbers, ramp: float = RAMP) -> Array:
    """Return the share of a slow-down that a kernel feels.

    Parameters
    ----------
    busy : array-like
        Seconds of the kernel.
    sustained : array-like
        1 after long load, 0 in a short test run.
    ramp : float, default RAMP
        Seconds at which half is felt.

    Returns
    -------
    ndarray
        All of it after long load, else the more the longer it runs.

    Examples
    --------
    >>> [round(float(share), 2) for share in felt([RAMP, RAMP], [0.0, 1.0])]
    [0.5, 1.0]
    """
    seconds, long = floats(busy, sustained)
    return np.asarray(np.maximum(seconds / (seconds + ramp), long))


def operand_energy(dtype: str) -> float:
    """Return the energy per FLOP of tensor cores over that of the format that was measured.

    It goes with the bytes of operands from 16 to 8 bits (training_energy in fp8 over that in 16 bits: 0.53 on H100, 0.5
    on L40S, 0.44 on B200). TF32 moves four bytes; formats below 16 bits have families of their own.

    Parameters
    ----------
    dtype : str
        Number format.

    Returns
    -------
    float
        A factor.

    Examples
    --------
    >>> operand_energy("tf32"), operand_energy("bf16"), operand_energy("fp8")
    (2.0, 1.0, 1.0)
    """
    formats = precision(dtype)
    return 1.0 if formats.narrow else formats.operand / BYTES["fp16"]


#: Family of the calibration of steps that holds `SustainedParameters`.
ARITHMETIC_FAMILY = "arithmetic"


@dataclass(frozen=True, slots=True)
class SustainedParameters:
    """Energy of a FLOP in sixteen bits in measured steps over ``GemmParameters.training_energy``, by architecture.

    A device draws it until its limit of power slows it down, so that steps show it and short tests do not. It holds for
    parts with HBM. Products in eight bits and convolutions need none; architectures that are not named have 1.
    """

    ampere: float = parameter("1", "0.6..2", "of Ampere's tensor cores")
    hopper: float = parameter("1", "0.6..2", "of Hopper's tensor cores")
    blackwell: float = parameter("1", "0.6..2", "of Blackwell's tensor cores")
    blackwell_ultra: float = parameter("1", "0.6..2", "of Blackwell Ultra's tensor cores")

    def of(self, architecture: str) -> float:
        """Return the factor of an architecture.

        Parameters
        ----------
        architecture : str
            As device specs name it.

        Returns
        -------
        float
            1 for those that are not named.
        """
        return float(getattr(self, architecture.lower().replace(" ", "_"), 1.0))


def switching_activity(
    training_activity: float, dtype: str, device: DeviceFigures, calibration: Calibration | None = None
) -> float:
    """Return the energy of products on tensor cores under long load, over that of the calibration's rows.

    Parameters
    ----------
    training_activity : float
        That of the products' calibration (``GemmParameters.training_activity``).
    dtype : str
        Number format.
    device : DeviceFigures
        Its architecture and kind of memory count.
    calibration : Calibration, optional
        The user's, which may hold `SustainedParameters`.

    Returns
    -------
    float
        A factor.
    """
    energy = training_activity * operand_energy(dtype)
    if precision(dtype).operand < BYTES["bf16"] or not device.memory_kind.startswith("HBM"):
        return energy
    return energy * of_steps(SustainedParameters, ARITHMETIC_FAMILY, calibration).of(device.architecture)


@dataclass(frozen=True, slots=True)
class PowerParameters:
    """What a board draws, as shares of its design power and energies of work.

    Fitted to mean watts of training steps under power limits (Zeus: You, Chung, Chowdhury, NSDI 2023). A kernel adds
    ``busy`` whatever it does: clock trees, schedulers and register files at full clock, leakage of a warm chip.
    ``training_energy`` of a device's products is the limit less idling over their sustained rate, and so holds that
    part too: ``arithmetic``, the share of it that goes with FLOP, is what makes watts at that rate meet the limit.

    Notes
    -----
    ``idle`` is drawn with clocks up and nothing running: V100 38 of 250 W. ``interface`` is drawn by a running GDDR
    interface: A40 87 W idle, 42 W above the share. Kernels shorter than ``filling`` wake half of the multiprocessors or
    fewer. Below ``least_voltage_clock`` the voltage falls no more.
    """

    idle: float = parameter("0.15", "0.02..0.5", "share of design power, clocks up, nothing running", fitted=False)
    interface: float = parameter("60 pJ/B", "0..200", "GDDR interface's power per peak byte/s", fitted=False)
    dram: float = parameter("40 pJ/B", "10..200", "energy of a byte from DRAM", fitted=False)
    busy: float = parameter("0.45", "0.02..0.8", "share of the design power that any running kernel adds")
    filling: float = parameter("15 us", "1..200 us", "time in which a kernel spreads over the device")
    least_voltage_clock: float = parameter("0.8", "0.5..1", "share of boost clock of the least voltage", fitted=False)

    @property
    def arithmetic(self) -> float:
        """Share of a FLOP's training energy that grows with the rate of FLOP."""
        return 1.0 - self.busy / (1.0 - IDLE_SHARE)

    def idle_watts(self, design_power: float, memory_kind: str, memory_bandwidth: float) -> float:
        """Return the watts that a board draws while nothing runs.

        Parameters
        ----------
        design_power : float
            Watts.
        memory_kind : str
            Such as ``HBM3`` or ``GDDR6``.
        memory_bandwidth : float
            The datasheet's, byte/s.

        Returns
        -------
        float
            Watts.

        Examples
        --------
        >>> round(PowerParameters().idle_watts(300.0, "GDDR6", 696e9), 1)
        86.8
        """
        interface = self.interface * PICO * memory_bandwidth if memory_kind.startswith("GDDR") else 0.0
        return self.idle * design_power + interface


def clock_under_limit(excess: Numbers, least_voltage_clock: float) -> Array:
    """Return the share of the boost clock at which dynamic power just keeps its limit.

    Dynamic power goes with clock x voltage². Down to ``least_voltage_clock`` the voltage falls with the clock (power ~
    clock³), below it stays (power ~ clock).

    Parameters
    ----------
    excess : array-like
        Dynamic power at boost over what is left of the limit.
    least_voltage_clock : float
        Share of the boost clock below which the voltage falls no more.

    Returns
    -------
    ndarray
        Shares, up to 1.

    References
    ----------
    Weiser, Welch, Demers and Shenker, Scheduling for Reduced CPU Energy, OSDI 1994.

    Examples
    --------
    >>> clock_under_limit([0.5, 1.5, 4.0], 0.8).round(3)
    array([1.   , 0.874, 0.391])
    """
    over = np.maximum(np.asarray(excess, dtype=np.float64), 1.0)
    cubic = 1.0 / np.cbrt(over)
    return np.asarray(np.where(cubic >= least_voltage_clock, cubic, 1.0 / (over * least_voltage_clock**2)))


class Energy(NamedTuple):
    """Energy at full clock [pJ/FLOP] of matrix units at two bytes and at one, and of ordinary cores in fp32.

    ``training`` and ``training_fp8`` are those of sustained training on matrix units.
    """

    tensor: float
    fp8: float
    vector: float
    training: float
    training_fp8: float


#: Products of eight-bit integers that an ordinary core adds up in the time of one in fp32 (dp4a).
INTEGER_LANES = 4.0
#: Energies by process, from the power limit over the rate that long products, and steps of training, sustain under it;
#: of ordinary cores those at which cards keep their boost clock (Titan X of Pascal, V100, A100; RTX 4090, 450 W).
ENERGY: Mapping[str, Energy] = {
    "28 nm": Energy(9.0, 9.0, 30.0, 11.0, 11.0),
    "16 nm": Energy(4.0, 4.0, 14.0, 5.0, 5.0),
    "12 nm": Energy(2.3, 2.3, 16.0, 2.9, 2.9),
    "8 nm": Energy(1.5, 0.8, 11.0, 1.9, 1.0),
    "7 nm": Energy(0.8, 0.4, 11.0, 1.0, 0.5),
    "4 nm, consumer": Energy(1.35, 0.5, 4.6, 1.5, 0.75),
    "4 nm, Hopper": Energy(0.68, 0.31, 4.6, 0.86, 0.46),
    "4 nm": Energy(0.56, 0.11, 4.6, 0.70, 0.31),
}
#: Architecture -> process, of the parts with HBM and of those with graphics memory (NVIDIA's whitepapers).
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
SPLIT_SHARE, WHOLE_SHARE = 0.45, 0.9


def energy(figures: DeviceFigures) -> Energy:
    """Return the energies of a device by its process; those of 7 nm where that is not known.

    Parameters
    ----------
    figures : DeviceFigures
        The device.

    Returns
    -------
    Energy

    Examples
    --------
    >>> from paleo.pricing.kernels import figures
    >>> from paleo.specs.device import load_device
    >>> energy(figures(load_device("v100-sxm2-16gb"), "fp16")).tensor
    2.3
    """
    process = _PROCESS.get(figures.architecture, _PROCESS["Ampere"])
    return ENERGY[process[figures.memory_kind.startswith("GDDR")]]


def surviving_share(figures: DeviceFigures) -> float:
    """Return the share of the L2 in which data survive from launch to launch, by its build.

    Parameters
    ----------
    figures : DeviceFigures
        The device.

    Returns
    -------
    float
        0 to 1.
    """
    split = figures.architecture in _SPLIT_L2 and figures.memory_kind.startswith("HBM")
    return SPLIT_SHARE if split else WHOLE_SHARE
