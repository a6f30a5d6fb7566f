"""Bulk-synchronous steps: all workers sum their gradients and wait for the slowest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.consistency.base import CONSISTENCY, Cycle, no_argument

if TYPE_CHECKING:
    from paleo.consistency.base import Workload


@dataclass(frozen=True, slots=True)
class BulkSynchronous:
    """T = μ (1 + W) + exposed all-reduce, W the waiting for the slowest of N workers."""

    summary = "every step waits for all workers and sums their gradients"
    reference = "Valiant, A bridging model for parallel computation, CACM 33(8), 1990"
    exact = True
    uses_servers = False

    def cycle(self, workload: Workload) -> Cycle:
        exposed = np.asarray(workload.all_reduce - np.minimum(workload.hidden, workload.all_reduce))
        step = workload.compute * (1.0 + workload.waiting) + exposed
        return Cycle.of(workload, step, sent=workload.payload * (np.asarray(workload.workers) > 1))


@CONSISTENCY.register("bsp")
def bsp(argument: str) -> BulkSynchronous:
    """``bsp``."""
    no_argument("bsp", argument)
    return BulkSynchronous()
