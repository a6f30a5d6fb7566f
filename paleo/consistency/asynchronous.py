"""Asynchronous workers around parameter servers: each pushes its gradient and pulls parameters without waiting for any
other (Downpour, Hogwild)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.consistency.base import CONSISTENCY, Cycle, no_argument
from paleo.consistency.queueing import closed_queue
from paleo.errors import PlanError

if TYPE_CHECKING:
    from paleo.consistency.base import Array, Server, Workload
    from paleo.step.stragglers import Numeric


def service_time(payload: Numeric, tensors: Numeric, server: Server) -> Array:
    """Seconds that the fullest server is busy with one push and pull: its share of (call · tensors + bytes / rate).

    >>> float(service_time(100.0, 2.0, Server(call=0.5, bandwidth=50.0)))
    3.0
    """
    return np.asarray(server.share * (server.call * tensors + payload / server.bandwidth))


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """A closed queue of N workers; staleness N − 1 on average.

    Every commit is followed by one of each other worker before the same one comes again. Deviation:
    √((c Z X (N − 1) / N)² + (N − 1)(1 − U) min(1, 1.13 c)), which a discrete simulation meets within 5 % on average.
    """

    summary = "workers push and pull at parameter servers, waiting for nobody"
    reference = "Dean et al., Large scale distributed deep networks, NIPS 2012; Niu et al., Hogwild, NIPS 2011"
    exact = False

    def cycle(self, workload: Workload) -> Cycle:
        if workload.server is None:
            raise PlanError("consistency async: no parameter server; state servers=1 or more")
        service = service_time(workload.payload, workload.tensors, workload.server)
        think = workload.compute + workload.round_trip
        station = closed_queue(workload.workers, think, service)
        return Cycle.of(
            workload,
            workload.workers / station.throughput,
            updates_per_step=workload.workers,
            sent=workload.payload,
            staleness=staleness(workload.workers, think, station.throughput, station.utilization, workload.jitter),
            server=(station.utilization, station.knee),
        )


def staleness(
    workers: Numeric, think: Numeric, throughput: Numeric, utilization: Numeric, jitter: Numeric
) -> tuple[Array, Array]:
    """Mean and deviation of the updates that others make between a worker's pull and its push."""
    others = np.asarray(workers) - 1.0
    drift = jitter * think * throughput * others / np.maximum(workers, 1.0)
    order = others * (1.0 - utilization) * np.minimum(1.0, 1.13 * np.asarray(jitter))
    return np.asarray(others), np.sqrt(drift**2 + np.maximum(order, 0.0))


@CONSISTENCY.register("async")
def asynchronous(argument: str) -> Asynchronous:
    """``async``."""
    no_argument("async", argument)
    return Asynchronous()
