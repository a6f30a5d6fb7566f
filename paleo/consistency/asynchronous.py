"""Asynchronous and stale-synchronous workers with parameter servers (Downpour, Hogwild, SSP).

Each asynchronous worker pushes its gradient and pulls parameters without waiting for the others. Workers and server
form a closed queueing network: a worker computes (its think time), then waits for the busy server. Equal workers are
solved by mean-value analysis of one delay station and one queue. Classes of unequal workers are solved by Schweitzer's
approximation.

References: Reiser and Lavenberg, Mean-value analysis of closed multichain queuing networks, JACM 27(2), 1980;
Schweitzer, Approximate analysis of multiclass closed networks of queues, 1979.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paleo.consistency.base import (
    CONSISTENCY_MODELS,
    ConsistencyResult,
    DataParallelWorkload,
    ParameterServers,
    check_no_argument,
    count_argument,
)
from paleo.errors import PlanError
from paleo.step.waiting import expected_normal_maximum, straggler_wait_share

Array = npt.NDArray[np.float64]
Numeric = float | npt.NDArray[np.floating[Any]]
#: Squared coefficient of variation of a server's service that is regular; it is 1 where service is exponential.
DETERMINISTIC_SERVICE_VARIATION = 0.0
#: Number of fixed-point iterations after which the throughputs of the classes no longer change in double precision.
_ITERATIONS = 200


@dataclass(frozen=True, slots=True)
class ParameterServerQueue:
    """State of a parameter server, modelled as a queue of workers; arrays of one shape.

    ``throughput`` [1/s] counts all workers. ``response`` [s] is the time of one visit including queueing.
    ``utilization`` [-] is the busy fraction of the server. ``saturation_workers`` is the number of workers above which
    the server limits the throughput.
    """

    throughput: Array
    response: Array
    utilization: Array
    saturation_workers: Array


def closed_queue(
    customers: Numeric, think: Numeric, service: Numeric, variation: float = DETERMINISTIC_SERVICE_VARIATION
) -> ParameterServerQueue:
    """Solve a closed queue of one server (a parameter server) and n equal customers (workers) who think between visits.

    Parameters
    ----------
    customers, think, service : float or ndarray
        Number of customers, seconds between two visits, and seconds of service; they broadcast.
    variation : float
        Squared coefficient of variation of the service, k: 0 regular, 1 exponential.

    Returns
    -------
    ParameterServerQueue
        Throughput, response, utilization and knee, each of the broadcast shape.

    Notes
    -----
    R = σ (1 + Q − U (1 − k) / 2), X = min(n / (Z + R), 1 / σ), Q = X R, U = X σ for n = 1 … N. A customer who finds the
    server busy with regular service waits for half of it, with exponential service for all of it. The recursion runs to
    `_MOST_CUSTOMERS`; larger numbers take Schweitzer's approximation, whose throughput is at most 0.6 % lower.

    >>> round(float(closed_queue(8.0, 1.0, 0.1, 1.0).throughput), 2)
    6.62
    >>> closed_queue(1e9, 1.0, 0.1).throughput
    array(10.)
    """
    count, think, service = np.broadcast_arrays(*(np.asarray(a, dtype=np.float64) for a in (customers, think, service)))
    order = np.argsort(-count, axis=None, kind="stable")  # sorted by falling customers: entries with few finish early
    counts, thinks, services = (np.asarray(values.ravel()[order], np.float64) for values in (count, think, service))
    queue, throughput, response = np.zeros((3, count.size))
    many = int(np.searchsorted(-counts, -_MOST_CUSTOMERS, side="left"))
    for n in range(1, int(np.max(counts[many:], initial=0.0)) + 1):
        present = slice(many, int(np.searchsorted(-counts, -n, side="right")))
        busy = throughput[present] * services[present]
        visit = services[present] * np.maximum(1.0 + queue[present] - busy * (1.0 - variation) / 2.0, 1.0)
        throughput[present], response[present] = _throughput(n, thinks[present], services[present], visit), visit
        queue[present] = throughput[present] * visit
    if many:
        response[:many] = _schweitzer_response(counts[:many], thinks[:many], services[:many], variation)
        throughput[:many] = _throughput(counts[:many], thinks[:many], services[:many], response[:many])
    place = np.argsort(order)
    throughput, response = (values[place].reshape(count.shape) for values in (throughput, response))
    knee = np.asarray((think + service) / service)
    return ParameterServerQueue(throughput, response, throughput * service, knee)


#: Most customers for which the mean-value recursion of a closed queue is computed.
_MOST_CUSTOMERS = 4096


def _throughput(customers: Numeric, think: Array, service: Array, response: Array) -> Array:
    return np.asarray(np.minimum(customers / (think + response), 1.0 / np.maximum(service, np.finfo(float).tiny)))


def _schweitzer_response(customers: Array, think: Array, service: Array, variation: float) -> Array:
    """Compute the response time of a closed queue [s] by Schweitzer's approximation.

    The queue that n − 1 customers see is taken to be proportional to that of n. The response is the positive root of
    the mean-value equation R² + p R + q = 0.
    """
    others = customers - 1.0
    p = think - service - service * others
    q = service**2 * others * (1.0 - variation) / 2.0 - service * think
    root = np.sqrt(p**2 - 4.0 * q)
    return np.where(p > 0, -2.0 * q / (p + root), (root - p) / 2.0)


def throughput_by_worker_class(
    counts: Array, think: Array, service: Array, variation: float = DETERMINISTIC_SERVICE_VARIATION
) -> Array:
    """Compute the throughput of each class of customers (workers of one speed) who share one parameter server.

    A customer of class c finds Q − Q_c / n_c others in the queue (Schweitzer). If all classes are equal, it agrees with
    `closed_queue` within 3 % for 4 customers or more.

    Parameters
    ----------
    counts : ndarray, shape (classes,)
        Number of customers in each class.
    think : ndarray, shape (classes,)
        Seconds between a customer's requests.
    service : ndarray, shape (classes,)
        Seconds of a request at the server.
    variation : float, default DETERMINISTIC_SERVICE_VARIATION
        Squared coefficient of variation of the service.

    Returns
    -------
    ndarray, shape (classes,)
        Requests served per second, by class.

    Examples
    --------
    >>> throughput_by_worker_class(np.array([1.0]), np.array([0.9]), np.array([0.1])).round(3)
    array([1.])
    """
    queue = counts * service / (think + service)
    throughput = counts / (think + service)
    for _ in range(_ITERATIONS):
        waiting = queue.sum() - queue / counts
        busy = np.minimum((throughput * service).sum() - throughput * service / counts, 1.0)
        visit = service * np.maximum(1.0, 1.0 + waiting - busy * (1.0 - variation) / 2.0)
        throughput = counts / (think + visit)
        throughput = throughput / max(1.0, float((throughput * service).sum()))
        queue = 0.5 * (queue + throughput * np.maximum(visit, counts / throughput - think))
    return np.asarray(throughput)


def server_service_time(payload: Numeric, tensors: Numeric, server: ParameterServers) -> Array:
    """Compute the time that the fullest parameter server is busy with one push and pull of a worker.

    Parameters
    ----------
    payload : array-like
        Bytes of the gradient.
    tensors : array-like
        Number of tensors.
    server : ParameterServers
        Rates of a server.

    Returns
    -------
    ndarray
        Time [s]: the server's share of (seconds per tensor · tensors + payload / bandwidth).

    Examples
    --------
    >>> from paleo.consistency.base import ParameterServers
    >>> float(server_service_time(100.0, 2.0, ParameterServers(seconds_per_tensor=0.5, bandwidth=50.0)))
    3.0
    """
    return np.asarray(server.fullest_server_share * (server.seconds_per_tensor * tensors + payload / server.bandwidth))


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Asynchronous consistency model: N workers form a closed queue around parameter servers.

    The mean staleness is N − 1: after each update of a worker, every other worker makes one before the same worker
    updates again. The standard deviation of the staleness is √((c Z X (N − 1) / N)² + (N − 1)(1 − U) min(1, 1.13 c)),
    within 5 % of a discrete simulation on average. Here c is the jitter, Z the think time, X the throughput and U the
    utilization of the server.
    """

    summary = "workers push and pull at parameter servers, waiting for nobody"
    reference = "Dean et al., Large scale distributed deep networks, NIPS 2012; Niu et al., Hogwild, NIPS 2011"
    matches_synchronous = False
    uses_servers = True

    def evaluate(self, workload: DataParallelWorkload) -> ConsistencyResult:
        """Compute step time, update rate and staleness of workers that never wait for each other.

        Parameters
        ----------
        workload : DataParallelWorkload
            Times and sizes of one worker's step.

        Returns
        -------
        ConsistencyResult
            Times [s], rates of updates [1/s] and staleness.

        Raises
        ------
        PlanError
            If there is no parameter server.
        """
        if workload.server is None:
            raise PlanError("consistency async: no parameter server; state servers=1 or more")
        service = server_service_time(workload.payload, workload.tensors, workload.server)
        think = workload.compute_time + workload.round_trip
        return _queued(workload, think, closed_queue(workload.workers, think, service))


def _queued(
    workload: DataParallelWorkload, think: Numeric, station: ParameterServerQueue, most_deviation: Numeric = np.inf
) -> ConsistencyResult:
    """Return the result of workers that think for ``think`` seconds between visits to a queue of parameter servers."""
    workers = workload.workers
    mean, deviation = _update_staleness(workers, think, station.throughput, station.utilization, workload.jitter)
    return ConsistencyResult.from_step_time(
        workload,
        workers / station.throughput,
        updates_per_step=workers,
        sent=workload.payload,
        staleness=(mean, np.minimum(deviation, most_deviation)),
        server=(station.utilization, station.saturation_workers),
    )


def _update_staleness(
    workers: Numeric, think: Numeric, throughput: Numeric, utilization: Numeric, jitter: Numeric
) -> tuple[Array, Array]:
    """Compute the staleness of asynchronous updates: updates by others between a worker's pull and push.

    Parameters
    ----------
    workers : array-like
        Number of workers.
    think : array-like
        Time that a worker computes between pull and push [s].
    throughput : array-like
        Updates per second of all workers.
    utilization : array-like
        Share of time in which the server is busy [-].
    jitter : array-like
        Coefficient of variation of a worker's computing time.

    Returns
    -------
    tuple of (ndarray, ndarray)
        (mean, standard deviation) of the number of updates.
    """
    other_workers = np.asarray(workers) - 1.0
    drift = jitter * think * throughput * other_workers / np.maximum(workers, 1.0)
    order = other_workers * (1.0 - utilization) * np.minimum(1.0, 1.13 * np.asarray(jitter))
    return np.asarray(other_workers), np.sqrt(drift**2 + np.maximum(order, 0.0))


@CONSISTENCY_MODELS.register("async")
def asynchronous(argument: str) -> Asynchronous:
    """Build the consistency model ``async``: workers push and pull without waiting for each other.

    Parameters
    ----------
    argument : str
        Text after the colon of the model's name; must be empty.

    Returns
    -------
    Asynchronous
        Model that predicts times, updates and staleness (`Asynchronous.evaluate`).
    """
    check_no_argument("async", argument)
    return Asynchronous()


#: Coefficient of how fast a window of steps absorbs independent noise. It is fitted to simulations of a reflected
#: random walk (noise 0.1 to 1, 4 to 64 workers, windows of 1 to 15 steps), with a mean error of the step of 1.1 % and a
#: largest one of 7 %.
_ABSORPTION = 0.6


def stale_synchronous_waiting_share(workers: Numeric, jitter: Numeric, window: Numeric) -> Array:
    """Compute the fraction of a mean step spent waiting for slower workers if workers may be several steps apart (SSP).

    It is W / (1 + s W / (0.6 c² ln N)), where W is the fraction that a synchronous step waits.

    Parameters
    ----------
    workers : array-like
        Number of workers.
    jitter : array-like
        Coefficient of variation of a worker's computing time.
    window : array-like
        Steps that ranks may be apart, s.

    Returns
    -------
    ndarray
        Fraction [-]; 0 without noise or with one worker.

    Examples
    --------
    >>> float(stale_synchronous_waiting_share(8.0, 0.2, 0.0)) == float(straggler_wait_share(8.0, 0.2))
    True
    """
    synchronous = straggler_wait_share(workers, jitter)
    scale = _ABSORPTION * np.asarray(jitter) ** 2 * np.log(np.maximum(workers, 1.0))
    absorbed = np.divide(window * synchronous, scale, out=np.zeros(np.shape(synchronous * scale)), where=scale > 0)
    return np.asarray(synchronous / (1.0 + absorbed))


@dataclass(frozen=True, slots=True)
class StaleSynchronous:
    """Stale-synchronous consistency model (SSP): workers may be at most ``window`` steps apart.

    Step time T = μ (1 + windowed waiting + e_N persistent) + exposed exchange, with mean compute time μ, persistent
    noise, and the expected maximum e_N of N normal deviates. The window absorbs independent noise, but it does not help
    against a worker that is always slow. Staleness is at most the window, and less where independent noise does not
    spread the workers so far.

    With parameter servers (`DataParallelWorkload.server`) the workers form the closed queue of `Asynchronous`, with
    this step as think time. N − 1 updates of others then fall between a worker's read and its write. With a window of 0
    all workers push at once. Simulations had 4 to 32 workers, noise to 0.6 and service to 0.3 of a step. Step times
    differ from them by 2 % on average and 11 % at worst; with a window of 0, by 5 and 21 %.
    """

    window: int
    summary = "workers may be some steps apart, then the fastest waits"
    reference = "Ho et al., SSP, NIPS 2013; Li et al., Parameter server, OSDI 2014 (bounded delay)"
    matches_synchronous = False
    uses_servers = True

    def evaluate(self, workload: DataParallelWorkload) -> ConsistencyResult:
        """Compute step time, update rate and staleness of workers that may be several steps apart.

        Parameters
        ----------
        workload : DataParallelWorkload
            Times and sizes of one worker's step.

        Returns
        -------
        ConsistencyResult
            Times [s], rates of updates [1/s] and staleness.
        """
        noise = stale_synchronous_waiting_share(workload.workers, workload.jitter, float(self.window))
        slow = expected_normal_maximum(workload.workers) * workload.persistent_jitter
        if workload.server is not None:
            return self._served(workload, workload.compute_time * (1.0 + noise + slow), workload.server)
        spread = np.minimum(float(self.window), workload.jitter * np.sqrt(self.window + 1.0))
        spread = spread * (np.asarray(workload.workers) > 1)
        return ConsistencyResult.from_step_time(
            workload,
            workload.compute_time * (1.0 + noise + slow) + workload.exposed_all_reduce_time,
            sent=workload.payload,
            staleness=(np.minimum(spread, self.window), spread / 2.0),
        )

    def _served(self, workload: DataParallelWorkload, pace: Array, server: ParameterServers) -> ConsistencyResult:
        """Predict stale-synchronous workers that compute for ``pace`` seconds, then queue at parameter servers."""
        service = server_service_time(workload.payload, workload.tensors, server)
        think, workers = pace + workload.round_trip, np.asarray(workload.workers)
        station = closed_queue(workers, think, service)
        if self.window > 0:
            return _queued(workload, think, station, self.window * (workers - 1.0))
        at_once = workload.compute_time + workload.round_trip + workers * service
        step = np.maximum(think + service, at_once)
        queue = workers * service / step, station.saturation_workers
        return ConsistencyResult.from_step_time(workload, step, sent=workload.payload, server=queue)


@CONSISTENCY_MODELS.register("ssp")
def stale_synchronous_model(argument: str) -> StaleSynchronous:
    """Build the consistency model ``ssp:S`` (stale-synchronous): workers may be S steps apart.

    Parameters
    ----------
    argument : str
        Text after the colon of the model's name: the number S.

    Returns
    -------
    StaleSynchronous
        Model that predicts times, updates and staleness (`StaleSynchronous.evaluate`).

    Raises
    ------
    PlanError
        If S is no whole number of zero or more.
    """
    return StaleSynchronous(count_argument("ssp", argument, "the steps that workers may be apart", least=0))
