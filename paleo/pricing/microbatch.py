"""Cutting a minibatch into microbatches so that faster algorithms fit a workspace limit.

A convolution over n samples can run as several calls over fewer samples each, one after the other in the same
workspace. The best cut is a dynamic programme over the samples that are left. Filter gradients add up over the calls
at no charge (the product accumulates).

Reference: Oyama, Ben-Nun, Hoefler and Matsuoka, Accelerating deep learning frameworks with micro-batches, CLUSTER 2018
(workspace reuse).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paleo.errors import CapacityError, SpecError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class MicrobatchPlan:
    """Sizes of the calls, largest first, their total time, and the time of one undivided call [s]."""

    sizes: tuple[int, ...]
    seconds: float
    undivided_seconds: float

    @property
    def speedup(self) -> float:
        """Undivided time over the plan's; infinite where the undivided batch does not fit at all."""
        return self.undivided_seconds / self.seconds


def best_cut(times: Array) -> MicrobatchPlan:
    """The cheapest cut of len(times) samples, where times[b - 1] is the time of one call over b samples [s].

    best(n) = min over b of best(n - b) + time(b), best(0) = 0: O(n^2) additions. Calls that do not fit are infinite.

    >>> best_cut(np.array([1.0, 1.5, 9.0, 9.0]))
    MicrobatchPlan(sizes=(2, 2), seconds=3.0, undivided_seconds=9.0)
    """
    count = len(times)
    if not count:
        raise SpecError("a minibatch to cut has no sample; expected at least 1")
    best, last = np.zeros(count + 1), np.zeros(count + 1, dtype=np.int64)
    for left in range(1, count + 1):
        totals = best[left - 1 :: -1] + times[:left]
        last[left] = 1 + np.argmin(totals)
        best[left] = totals[last[left] - 1]
    if not np.isfinite(best[count]):
        raise CapacityError("no call fits the workspace limit, not even one of a single sample")
    sizes, left = [], count
    while left:
        sizes.append(int(last[left]))
        left -= sizes[-1]
    return MicrobatchPlan(tuple(sorted(sizes, reverse=True)), float(best[count]), float(times[-1]))


def cut_minibatch(time_of: Callable[[Array], Array], batch: int) -> MicrobatchPlan:
    """The cheapest cut of ``batch`` samples, given seconds of calls over an array of sample counts.

    ``time_of`` holds everything else: the layer, the device, and the workspace limit, e.g.
    ``lambda n: fastest_time(algorithm_costs(convolution_shape(batch=n, ...), ...), limit)``.
    """
    return best_cut(np.asarray(time_of(np.arange(1.0, batch + 1.0)), dtype=np.float64))
