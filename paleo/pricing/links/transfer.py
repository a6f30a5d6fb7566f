"""How latency and transfer make up one time: pipelines that fill, kernels that wait, the softer of two choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.units import KILO, MICROSECOND

if TYPE_CHECKING:
    from paleo.collectives.base import Array, Numeric

#: As good as no time: parameters are searched by their logarithms [s].
NANOSECOND = MICROSECOND / KILO
#: How strongly the larger of a launch skew and the kernel itself prevails.
_SKEW_NORM = 4.0


def hidden(latency: Numeric, transfer: Numeric) -> Array:
    """Latency of steps and transfer that overlap in part, as in a pipeline: the root of the sum of their squares [s].

    >>> float(hidden(3.0, 4.0))
    5.0
    """
    return np.asarray(np.hypot(latency, transfer))


def fill_time(transfer: Numeric, chunk_cost: Numeric) -> Array:
    """What filling a pipeline adds when its chunks are cut as well as can be: 2 sqrt(transfer x chunk_cost) [s].

    n chunks cost n chunk_cost + transfer / n on top of the transfer; the best n makes both alike.

    >>> float(fill_time(16.0, 1.0))
    8.0

    Reference: Sanders, Speck and Traff, Parallel Computing 35(12), 2009, section 2 (optimal pipelining).
    """
    return np.asarray(2.0 * np.sqrt(np.asarray(transfer) * chunk_cost))


def softly_least(first: Numeric, second: Numeric, norm: float = 6.0) -> Array:
    """A minimum that rounds the corner where both are alike: (x^-n + y^-n)^(-1/n).

    >>> round(float(softly_least(1.0, 10.0)), 6)
    1.0
    """
    least = np.minimum(first, second)
    ratio = least / np.maximum(np.maximum(first, second), np.finfo(np.float64).tiny)
    return np.asarray(least * (1.0 + ratio**norm) ** (-1.0 / norm))


def with_skew(time: Array, skew: Numeric) -> Array:
    """A kernel cannot end before the last rank has begun: the larger of both, softly."""
    larger = np.maximum(np.maximum(time, skew), np.finfo(np.float64).tiny)
    return np.asarray(larger * ((time / larger) ** _SKEW_NORM + (skew / larger) ** _SKEW_NORM) ** (1.0 / _SKEW_NORM))
