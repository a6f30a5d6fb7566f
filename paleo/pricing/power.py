"""What a limit of power costs: the factor by which arithmetic slows once the board may draw no more.

Every FLOP and every byte of DRAM costs an energy, and a busy device idles at a share of its limit besides. Where their
sum over the time at full clock would exceed the limit, the clock falls until it does not. Energy per FLOP is taken as
constant: under load the voltage is near its floor, so that lowering the clock saves power in proportion, not more.
Of two power laws, this one and power ~ clock², this one carries better from L40S to a card of the next generation, and
gives H100 and B200 the same energy per FLOP (0.6 pJ, both TSMC 4N), as their common process says.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paleo.pricing.parameters import DeviceFigures, floats
from paleo.units import MILLISECOND, TERA

Array = npt.NDArray[np.float64]
Numbers = npt.ArrayLike
PICO = 1.0 / TERA
#: DRAM access with its way over the chip: 3.9 pJ/bit in HBM2 (O'Connor et al., MICRO 2017) and about 1 pJ/bit on chip.
DRAM_ENERGY = 40 * PICO
#: Share of the power limit that a busy device draws without arithmetic: leakage, fabric, memory refresh, fans.
IDLE_SHARE = 0.15
#: Least share of the limit that is left for arithmetic, whatever the memory draws.
LEAST_SHARE = 0.05
#: Kernel time at which half of the slow-down is felt in a short test run: regulators average over about this long.
RAMP = 0.3 * MILLISECOND


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
    switching activity of the data against that for which the energy holds.

    >>> card = DeviceFigures("x", "Hopper", "HBM3", 132, 1.8e9, 1e15, 3e12, 5e7, 700.0, True)
    >>> float(slow_down(busy=1.0, flops=1e15, dram=0.0, energy=0.595, device=card).round(3))  # 595 of 595 W
    1.189
    """
    seconds, work, moved = floats(busy, flops, dram)
    power = np.asarray(activity) * energy * PICO * work / seconds
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
