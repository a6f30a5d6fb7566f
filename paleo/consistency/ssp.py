"""Stale-synchronous and bounded-delay workers: the fastest may be a few steps ahead of the slowest, then it waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.consistency.asynchronous import closed_queue, service_time, staleness
from paleo.consistency.base import CONSISTENCY, Cycle, count_argument
from paleo.step.waiting import expected_largest, waiting_share

if TYPE_CHECKING:
    from paleo.consistency.base import Array, Server, Workload
    from paleo.step.waiting import Numeric

#: How fast a window of steps absorbs independent noise: fitted to simulations of a reflected random walk (noise 0.1 to
#: 1, 4 to 64 workers, windows of 1 to 15 steps; 1.1 % mean, 7 % largest error of the step).
WINDOW = 0.6


def windowed_waiting(workers: Numeric, jitter: Numeric, window: Numeric) -> Array:
    """Share of a mean step that is waited where ranks may be ``window`` steps apart: W / (1 + s W / (0.6 c² ln N)), W
    what a synchronous step waits. 0 without noise or without others.

    >>> float(windowed_waiting(8.0, 0.2, 0.0)) == float(waiting_share(8.0, 0.2))
    True
    """
    synchronous = waiting_share(workers, jitter)
    scale = WINDOW * np.asarray(jitter) ** 2 * np.log(np.maximum(workers, 1.0))
    absorbed = np.divide(window * synchronous, scale, out=np.zeros(np.shape(synchronous * scale)), where=scale > 0)
    return np.asarray(synchronous / (1.0 + absorbed))


@dataclass(frozen=True, slots=True)
class StaleSynchronous:
    """A window takes away noise, never a worker that is always slow.

    T = μ (1 + windowed waiting + e_N persistent) + exposed exchange; staleness is at most the window, and below it what
    independent noise spreads workers by. Around parameter servers (`Workload.server`) workers form the closed queue of
    `Asynchronous`, who think for that long, and N − 1 updates of others come between a worker's read and its write; in
    a window of 0 all push at once. Beside simulations (4 to 32 workers, noise to 0.6, service to 0.3 of a step) the
    step is 2 % off on average and 11 % at worst, 5 and 21 % in a window of 0.
    """

    window: int
    summary = "workers may be some steps apart, then the fastest waits"
    reference = "Ho et al., SSP, NIPS 2013; Li et al., Parameter server, OSDI 2014 (bounded delay)"
    exact = False
    uses_servers = True

    def cycle(self, workload: Workload) -> Cycle:
        noise = windowed_waiting(workload.workers, workload.jitter, float(self.window))
        slow = expected_largest(workload.workers) * workload.persistent
        if workload.server is not None:
            return self._served(workload, workload.compute * (1.0 + noise + slow), workload.server)
        exposed = np.asarray(workload.all_reduce - np.minimum(workload.hidden, workload.all_reduce))
        spread = np.minimum(float(self.window), workload.jitter * np.sqrt(self.window + 1.0)) * (
            np.asarray(workload.workers) > 1
        )
        return Cycle.of(
            workload,
            workload.compute * (1.0 + noise + slow) + exposed,
            sent=workload.payload,
            staleness=(np.minimum(spread, self.window), spread / 2.0),
        )

    def _served(self, workload: Workload, pace: Array, server: Server) -> Cycle:
        """Steps of workers who think for ``pace`` seconds, then wait for busy servers."""
        service = service_time(workload.payload, workload.tensors, server)
        think, other_workers = pace + workload.round_trip, np.asarray(workload.workers) - 1.0
        station = closed_queue(workload.workers, think, service)
        if self.window == 0:
            at_once = workload.compute + workload.round_trip + workload.workers * service
            step = np.maximum(think + service, at_once)
            busy = workload.workers * service / step
            return Cycle.of(workload, step, sent=workload.payload, server=(busy, station.knee))
        mean, deviation = staleness(workload.workers, think, station.throughput, station.utilization, workload.jitter)
        return Cycle.of(
            workload,
            workload.workers / station.throughput,
            updates_per_step=workload.workers,
            sent=workload.payload,
            staleness=(mean, np.minimum(deviation, self.window * other_workers)),
            server=(station.utilization, station.knee),
        )


@CONSISTENCY.register("ssp")
def ssp(argument: str) -> StaleSynchronous:
    """``ssp:S``."""
    return StaleSynchronous(count_argument("ssp", argument, "the steps that workers may be apart", least=0))
