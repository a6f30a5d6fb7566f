"""What a limit of power costs: the factor by which arithmetic slows once the board may draw no more; watts of kernels.

Every FLOP and every byte of DRAM costs an energy, and a busy device idles at a share of its limit besides. Where their
sum over the time at full clock would exceed the limit, the clock falls until it does not. Energy per FLOP is taken as
constant: under load the voltage is near its floor, so that lowering the clock saves power in proportion, not more.
Of two power laws, this one and power ~ clock², this one carries better from L40S to a card of the next generation, and
gives H100 and B200 the same energy per FLOP (0.6 pJ, both TSMC 4N), as their common process says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.operations.tensor import BYTES, precision
from paleo.pricing.kernels import floats
from paleo.specs.calibration import parameter
from paleo.units import MICROSECOND, MILLISECOND, TERA

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceFigures

Array = npt.NDArray[np.float64]
Numbers = npt.ArrayLike
PICO = 1.0 / TERA
#: DRAM access with its way over the chip: 3.9 pJ/bit in HBM2 (O'Connor et al., MICRO 2017) and about 1 pJ/bit on chip.
DRAM_ENERGY = 40 * PICO
#: Share of the power limit that a busy device draws without arithmetic: leakage, fabric, memory refresh, fans.
IDLE_SHARE = 0.15
#: Share of the design power that any running kernel adds: fitted to watts of training on V100 and A40.
BUSY_SHARE = 0.45
#: Share of the energy of a FLOP at full rate that is drawn by time instead: what any running kernel adds.
BY_TIME = BUSY_SHARE / (1.0 - IDLE_SHARE)
#: Least share of the limit that is left for arithmetic, whatever the memory draws.
LEAST_SHARE = 0.05
#: Kernel time at which half of the slow-down is felt in a short test run: regulators average over about this long.
RAMP = 0.3 * MILLISECOND
#: How watts are read: by the board itself.
BOARD = "board"


def throttle(power_at_full_clock: Numbers, power_limit: Numbers) -> Array:
    """Factor by which arithmetic slows when its power would pass the limit [same unit]; 1 below, smooth at the knee.

    >>> throttle([1.0, 2.0], [100.0, 1.0]).round(2)
    array([1.  , 2.03])
    """
    ratio = np.square(np.square(np.asarray(power_at_full_clock) / np.asarray(power_limit)))
    return np.asarray(np.sqrt(np.sqrt(1.0 + ratio)))


def slow_down(
    *, busy: Numbers, flops: Numbers, dram: Numbers, energy: float, activity: Numbers = 1.0, device: DeviceFigures
) -> Array:
    """Factor by which kernels slow that take ``busy`` seconds at full clock, ``flops`` FLOP of ``energy`` pJ each and
    ``dram`` bytes: the power of their arithmetic against what idling and memory leave of the limit. ``activity`` is the
    switching activity of the data against that for which the energy holds. Of the energy, what any running kernel draws
    goes with time: units that run at a cut rate spend it as many times over for a FLOP, and ordinary cores draw it
    whatever share of their rate they reach. On tensor cores, an instruction of which does a thousand FLOP, energy goes
    with FLOP: measured products of H100, H200, B200 and GB200 say so.

    >>> from paleo.pricing.kernels import DeviceFigures
    >>> card = DeviceFigures("x", "Hopper", "HBM3", 132, 1.8e9, 1e15, 3e12, 5e7, 700.0, True)
    >>> float(slow_down(busy=1.0, flops=1e15, dram=0.0, energy=0.595, device=card).round(3))  # 595 of 595 W
    1.189
    """
    seconds, work, moved = floats(busy, flops, dram)
    if device.tensor_cores:
        rate = work / seconds * (1.0 + BY_TIME * (device.rate_cut - 1.0))
    else:
        rate = (1.0 - BY_TIME) * work / seconds + BY_TIME * device.peak_flops_per_s
    power = np.asarray(activity) * energy * PICO * rate
    left = device.power_watts * (1.0 - IDLE_SHARE) - DRAM_ENERGY * moved / seconds
    return throttle(power, np.maximum(left, LEAST_SHARE * device.power_watts))


def felt(busy: Numbers, sustained: Numbers, ramp: float = RAMP) -> Array:
    """Share of a slow-down that a kernel of ``busy`` seconds feels: all of it after long load (``sustained`` 1), else
    the more the longer it runs.

    >>> [round(float(share), 2) for share in felt([RAMP, RAMP], [0.0, 1.0])]
    [0.5, 1.0]
    """
    seconds, long = floats(busy, sustained)
    return np.asarray(np.maximum(seconds / (seconds + ramp), long))


def operand_energy(dtype: str) -> float:
    """Energy per FLOP of tensor cores over that of the format in which a family was measured: as the bytes of operands,
    with which it goes from 16 to 8 bits (training_energy in fp8 over that in 16 bits: 0.53 on H100, 0.5 on L40S, 0.44
    on B200). TF32 moves four bytes; formats below 16 bits have families of their own.

    >>> operand_energy("tf32"), operand_energy("bf16"), operand_energy("fp8")
    (2.0, 1.0, 1.0)
    """
    formats = precision(dtype)
    return 1.0 if formats.narrow else formats.operand / BYTES["fp16"]


@dataclass(frozen=True, slots=True)
class PowerParameters:
    """What a board draws, as shares of its design power and energies of work.

    Fitted to mean watts of training steps under power limits (Zeus: You, Chung, Chowdhury, NSDI 2023). A kernel adds
    ``busy`` whatever it does: clock trees, schedulers and register files at full clock, leakage of a warm chip.
    ``training_energy`` of a device's products is the limit less idling over their sustained rate, and so holds that
    part too: ``arithmetic``, the share of it that goes with FLOP, is what makes watts at that rate meet the limit.
    """

    idle: float = parameter(
        IDLE_SHARE, low=0.02, high=0.5, unit="1", fitted=False,
        meaning="share of the design power drawn with clocks up and nothing running: V100 38 of 250 W",
    )  # fmt: skip
    interface: float = parameter(
        60.0, low=0.0, high=200.0, unit="pJ/B", fitted=False,
        meaning="power of a running GDDR interface per byte/s that it could move: A40 87 W idle, 42 W above the share",
    )  # fmt: skip
    dram: float = parameter(
        DRAM_ENERGY / PICO, low=10.0, high=200.0, unit="pJ/B", fitted=False, meaning="energy of a byte from DRAM"
    )
    busy: float = parameter(
        BUSY_SHARE, low=0.02, high=0.8, unit="1", meaning="share of the design power that any running kernel adds"
    )
    filling: float = parameter(
        15 * MICROSECOND, low=MICROSECOND, high=200 * MICROSECOND, unit="s",
        meaning="time in which a kernel spreads over the multiprocessors: shorter ones wake half of them or fewer",
    )  # fmt: skip
    least_voltage_clock: float = parameter(
        0.8, low=0.5, high=1.0, unit="1", fitted=False,
        meaning="share of the boost clock below which the voltage falls no more",
    )  # fmt: skip

    @property
    def arithmetic(self) -> float:
        """Share of a FLOP's training energy that grows with the rate of FLOP."""
        return 1.0 - self.busy / (1.0 - IDLE_SHARE)

    def idle_watts(self, design_power: float, memory_kind: str, memory_bandwidth: float) -> float:
        """Watts while nothing runs.

        >>> round(PowerParameters().idle_watts(300.0, "GDDR6", 696e9), 1)
        86.8
        """
        interface = self.interface * PICO * memory_bandwidth if memory_kind.startswith("GDDR") else 0.0
        return self.idle * design_power + interface


def clock_under_limit(excess: Numbers, least_voltage_clock: float) -> Array:
    """Share of the boost clock at which dynamic power, ``excess`` times what is left of the limit, just keeps it.

    Dynamic power goes with clock x voltage². Down to ``least_voltage_clock`` the voltage falls with the clock (power
    ~ clock³), below it stays (power ~ clock).

    >>> clock_under_limit([0.5, 1.5, 4.0], 0.8).round(3)
    array([1.   , 0.874, 0.391])

    Reference: Weiser, Welch, Demers and Shenker, Scheduling for Reduced CPU Energy, OSDI 1994.
    """
    over = np.maximum(np.asarray(excess, dtype=np.float64), 1.0)
    cubic = 1.0 / np.cbrt(over)
    return np.asarray(np.where(cubic >= least_voltage_clock, cubic, 1.0 / (over * least_voltage_clock**2)))
