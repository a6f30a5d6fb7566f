"""Asynchronous workers around parameter servers: each pushes its gradient and pulls parameters without waiting for any
other (Downpour, Hogwild).

They form closed queueing networks: workers that think (compute), then wait for one busy server. Mean-value analysis of
one delay station and one queue, for like customers, and Schweitzer's approximation for classes of them. References:
Reiser and Lavenberg, Mean-value analysis of closed multichain queuing networks, JACM 27(2), 1980; Schweitzer,
Approximate analysis of multiclass closed networks of queues, 1979.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.consistency.base import CONSISTENCY, Cycle, no_argument
from paleo.errors import PlanError

if TYPE_CHECKING:
    from paleo.consistency.base import Server, Workload

Array = npt.NDArray[np.float64]
Numeric = float | npt.NDArray[np.floating[Any]]
#: Squared coefficient of variation of a server's service: 0 regular, 1 exponential.
REGULAR, EXPONENTIAL = 0.0, 1.0
#: Fixed-point steps after which the class throughputs no longer move in double precision.
ITERATIONS = 200


@dataclass(frozen=True, slots=True)
class Station:
    """State of the server: ``throughput`` [1/s] of all customers, ``response`` seconds of one visit, queued ones
    included, ``utilization``, and ``knee``, the customers from which on the server is the limit."""

    throughput: Array
    response: Array
    utilization: Array
    knee: Array


def closed_queue(customers: Numeric, think: Numeric, service: Numeric, variation: float = REGULAR) -> Station:
    """One server visited by like ``customers`` that think ``think`` seconds between visits of ``service`` seconds.

    R = σ (1 + Q − U (1 − k) / 2), X = min(n / (Z + R), 1 / σ), Q = X R, U = X σ for n = 1 … N; a customer who finds the
    server busy with regular service (k = 0) waits for half of it, with exponential service (k = 1) for all of it.
    Broadcasts; the recursion runs to the largest number of customers.

    >>> round(float(closed_queue(8.0, 1.0, 0.1, EXPONENTIAL).throughput), 2)
    6.62
    """
    count, think, service = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (customers, think, service)))
    order = np.argsort(-count, axis=None, kind="stable")  # the most customers first: those of few are soon done
    counts, thinks, services = (values.ravel()[order] for values in (count, think, service))
    queue, throughput, response = np.zeros((3, count.size))
    for n in range(1, int(np.max(count, initial=1.0)) + 1):
        present = slice(0, int(np.searchsorted(-counts, -n, side="right")))
        busy = throughput[present] * services[present]
        visit = services[present] * np.maximum(1.0 + queue[present] - busy * (1.0 - variation) / 2.0, 1.0)
        most = 1.0 / np.maximum(services[present], np.finfo(float).tiny)
        throughput[present], response[present] = np.minimum(n / (thinks[present] + visit), most), visit
        queue[present] = throughput[present] * visit
    place = np.argsort(order)
    throughput, response = (values[place].reshape(count.shape) for values in (throughput, response))
    knee = np.asarray((think + service) / service)
    return Station(throughput, response, throughput * service, knee)


def mixed_queue(counts: Array, think: Array, service: Array, variation: float = REGULAR) -> Array:
    """Throughput [1/s] of each class of customers, (classes,), of ``counts`` each, who share one server.

    A customer of class c finds Q − Q_c / n_c others in the queue (Schweitzer). Where all classes are alike it is close
    to `closed_queue` (within 3 % for 4 customers or more).

    >>> mixed_queue(np.array([1.0]), np.array([0.9]), np.array([0.1])).round(3)
    array([1.])
    """
    queue = counts * service / (think + service)
    throughput = counts / (think + service)
    for _ in range(ITERATIONS):
        waiting = queue.sum() - queue / counts
        busy = np.minimum((throughput * service).sum() - throughput * service / counts, 1.0)
        visit = service * np.maximum(1.0, 1.0 + waiting - busy * (1.0 - variation) / 2.0)
        throughput = counts / (think + visit)
        throughput = throughput / max(1.0, float((throughput * service).sum()))
        queue = 0.5 * (queue + throughput * np.maximum(visit, counts / throughput - think))
    return np.asarray(throughput)


def largest_share(sizes: Array, servers: int) -> float:
    """Part of all bytes that the fullest of some servers holds when whole tensors are assigned, the largest first, to
    the emptiest server.

    >>> largest_share(np.array([6.0, 3.0, 1.0]), 2)
    0.6
    """
    loads = np.zeros(servers)
    for size in np.sort(sizes)[::-1]:
        loads[np.argmin(loads)] += size
    return float(loads.max() / loads.sum())


def service_time(payload: Numeric, tensors: Numeric, server: Server) -> Array:
    """Seconds that the fullest server is busy with one push and pull: its share of (call · tensors + bytes / rate).

    >>> from paleo.consistency.base import Server
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
    uses_servers = True

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
    other_workers = np.asarray(workers) - 1.0
    drift = jitter * think * throughput * other_workers / np.maximum(workers, 1.0)
    order = other_workers * (1.0 - utilization) * np.minimum(1.0, 1.13 * np.asarray(jitter))
    return np.asarray(other_workers), np.sqrt(drift**2 + np.maximum(order, 0.0))


@CONSISTENCY.register("async")
def asynchronous(argument: str) -> Asynchronous:
    """``async``."""
    no_argument("async", argument)
    return Asynchronous()
