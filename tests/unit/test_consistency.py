"""Consistency models: worked values, limits, and a discrete-event simulation beside every closed form."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

from paleo.consistency.asynchronous import DETERMINISTIC_SERVICE_VARIATION, closed_queue, throughput_by_worker_class
from paleo.consistency.base import (
    CONSISTENCY_MODELS,
    DataParallelWorkload,
    ParameterServers,
    parse_consistency,
    unused_server_warnings,
)
from paleo.errors import PaleoError, PlanError
from paleo.specs.run import Run

EXAMPLES = (
    "bsp",
    "async",
    "ssp:4",
    "easgd:16",
    "local:32",
    "diloco:100",
    "diloco:100/4",
    "federated:10",
    "gossip:exp2",
)
WORKLOAD = DataParallelWorkload(
    workers=8.0,
    compute_time=0.2,
    all_reduce_time=0.05,
    overlapped_exchange_time=0.0,
    neighbour_exchange_time=0.03,
    payload=1e8,
    parameter_count=25e6,
    tensors=100.0,
    jitter=0.1,
    server=ParameterServers(seconds_per_tensor=1e-4, bandwidth=2e9),
)


def simulated_server(
    think: np.ndarray, service: float, jitter: float, *, regular: bool, updates: int = 30_000
) -> tuple[float, float, float]:
    """Updates a second, mean and deviation of staleness of workers around one first-come first-served server."""
    random = np.random.default_rng(7)
    shape = 1.0 / jitter**2 if jitter else np.inf

    def thinking(worker: int) -> float:
        return float(think[worker] if shape == np.inf else random.gamma(shape, think[worker] / shape))

    arrivals = [(thinking(worker), worker) for worker in range(len(think))]
    heapq.heapify(arrivals)
    read = [0] * len(think)
    free, stale = 0.0, []
    for version in range(1, updates + 1):
        moment, worker = heapq.heappop(arrivals)
        free = max(moment, free) + (service if regular else random.exponential(service))
        stale.append(version - 1 - read[worker])
        read[worker] = version
        heapq.heappush(arrivals, (free + thinking(worker), worker))
    settled = stale[updates // 5 :]
    return updates / free, float(np.mean(settled)), float(np.std(settled))


@pytest.mark.parametrize("workers", [2, 4, 8, 16, 32])
@pytest.mark.parametrize("load", [0.02, 0.1, 0.3])
@pytest.mark.parametrize(("regular", "jitter"), [(True, 0.3), (False, 1.0)])
def test_the_queue_is_that_of_a_simulation(workers: int, load: float, regular: bool, jitter: float) -> None:
    """Mean-value analysis is exact for exponential service and within a few per cent for regular service."""
    rate, mean, _ = simulated_server(np.ones(workers), load, jitter, regular=regular, updates=12_000)
    station = closed_queue(float(workers), 1.0, load, DETERMINISTIC_SERVICE_VARIATION if regular else 1.0)
    assert float(station.throughput) == pytest.approx(rate, rel=0.05 if regular else 0.025)
    assert mean == pytest.approx(workers - 1, rel=0.02)


def test_queue_errors_against_simulation_are_two_per_cent_on_average() -> None:
    errors = []
    for workers in (2, 4, 8, 16):
        for load in (0.02, 0.05, 0.1, 0.2):
            rate, _, _ = simulated_server(np.ones(workers), load, 0.2, regular=True, updates=8_000)
            errors.append(abs(float(closed_queue(float(workers), 1.0, load).throughput) / rate - 1.0))
    assert np.mean(errors) <= 0.02


@pytest.mark.slow
def test_staleness_deviation_is_that_of_a_simulation() -> None:
    """Four per cent on average over loads, noises and counts of workers; 15 % at worst."""
    errors = []
    for workers in (4, 8, 16, 32):
        for load in (0.01, 0.05, 0.1):
            for jitter in (0.1, 0.3, 0.6):
                _, _, deviation = simulated_server(np.ones(workers), load, jitter, regular=True, updates=8_000)
                server = ParameterServers(seconds_per_tensor=0.0, bandwidth=1.0 / load)
                work = DataParallelWorkload(float(workers), 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, jitter, server=server)
                errors.append(abs(float(parse_consistency("async").evaluate(work).staleness_sd) / deviation - 1.0))
    assert np.mean(errors) <= 0.04 and np.max(errors) <= 0.16


def simulated_window(workers: int, window: int, jitter: float, steps: int = 4000) -> float:
    """Mean seconds of a step where no worker may be more than ``window`` steps ahead of the slowest."""
    random = np.random.default_rng(5)
    seconds = random.gamma(1.0 / jitter**2, jitter**2, (steps, workers))
    finished = np.zeros((steps + 1, workers))
    for step in range(steps):
        slowest = finished[step - window].max() if step >= window else 0.0
        finished[step + 1] = np.maximum(finished[step], slowest) + seconds[step]
    return float(finished[-1].max() / steps)


def test_a_window_of_steps_is_that_of_a_simulation() -> None:
    """Two per cent on average; narrow windows under strong noise are 9 % too fast at worst."""
    errors = []
    for workers in (4, 8, 16, 64):
        for window in (1, 3, 15):
            for jitter in (0.1, 0.3, 0.6, 1.0):
                work = DataParallelWorkload(float(workers), 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, jitter)
                predicted = float(parse_consistency(f"ssp:{window}").evaluate(work).step_time)
                errors.append(abs(predicted / simulated_window(workers, window, jitter, 1000) - 1.0))
    assert np.mean(errors) <= 0.02 and np.max(errors) <= 0.10


def simulated_windowed_server(workers: int, window: int, jitter: float, service: float, steps: int = 300) -> float:
    """Mean seconds of a step of workers around one first-come first-served server, none more than ``window`` ahead."""
    random = np.random.default_rng(3)
    arrivals = [(random.gamma(jitter**-2, jitter**2), worker) for worker in range(workers)]
    heapq.heapify(arrivals)
    steps_made, free = np.zeros(workers, dtype=int), 0.0
    idle: set[int] = set()
    while steps_made.min() < steps:
        moment, worker = heapq.heappop(arrivals)
        free = max(moment, free) + service
        steps_made[worker] += 1
        idle.add(worker)
        for ready in [each for each in sorted(idle) if steps_made[each] - steps_made.min() <= window]:
            idle.remove(ready)
            heapq.heappush(arrivals, (free + random.gamma(jitter**-2, jitter**2), ready))
    return free / steps


@pytest.mark.slow
@pytest.mark.parametrize(("window", "mean", "largest"), [(0, 0.06, 0.21), (1, 0.03, 0.08), (15, 0.03, 0.08)])
def test_a_window_around_a_server_is_that_of_a_simulation(window: int, mean: float, largest: float) -> None:
    errors = []
    for workers in (4, 16):
        for jitter in (0.1, 0.6):
            for service in (0.005, 0.1, 0.3):
                server = ParameterServers(seconds_per_tensor=0.0, bandwidth=1.0 / service)
                work = DataParallelWorkload(float(workers), 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, jitter, server=server)
                predicted = float(parse_consistency(f"ssp:{window}").evaluate(work).step_time)
                errors.append(abs(predicted / simulated_windowed_server(workers, window, jitter, service) - 1.0))
    assert np.mean(errors) <= mean and np.max(errors) <= largest


def test_a_wide_window_around_servers_is_asynchronous() -> None:
    """Utilization, knee, updates and staleness; a server more shortens the step."""
    wide, free = (parse_consistency(text).evaluate(WORKLOAD) for text in ("ssp:100000", "async"))
    for name in wide.__dataclass_fields__:
        assert getattr(wide, name) == pytest.approx(float(getattr(free, name)), rel=1e-3), name
    more = replace(WORKLOAD, server=ParameterServers(seconds_per_tensor=1e-4, bandwidth=2e9, count=16))
    assert float(parse_consistency("ssp:4").evaluate(more).step_time) < 0.6 * float(
        parse_consistency("ssp:4").evaluate(WORKLOAD).step_time
    )


@pytest.mark.parametrize("text", EXAMPLES)
def test_servers_that_change_nothing_are_named(text: str) -> None:
    used = text.partition(":")[0] in ("async", "ssp")
    stated = unused_server_warnings(Run(consistency=text, servers=16))
    assert bool(stated) == (not used and text != "bsp") and all("servers=16 changes nothing" in each for each in stated)
    assert unused_server_warnings(Run(consistency=text)) == []


@pytest.mark.parametrize("text", EXAMPLES)
def test_models_broadcast_and_have_references(text: str) -> None:
    model = parse_consistency(text)
    workers = np.array([1.0, 2.0, 8.0, 64.0])
    fields = {name: getattr(WORKLOAD, name) for name in WORKLOAD.__dataclass_fields__}
    many = model.evaluate(DataParallelWorkload(**fields | {"workers": workers}))
    for place, count in enumerate(workers):
        alone = model.evaluate(DataParallelWorkload(**fields | {"workers": float(count)}))
        for name in many.__dataclass_fields__:
            assert getattr(many, name)[place] == pytest.approx(float(getattr(alone, name)), nan_ok=True), name
    assert (np.diff(many.step_time) >= -1e-12).all()
    assert (many.staleness_mean >= 0).all() and model.reference and model.summary


def test_every_model_has_an_example_here() -> None:
    assert {text.partition(":")[0] for text in EXAMPLES} == set(CONSISTENCY_MODELS)


def test_limits() -> None:
    """Averaging every step is a synchronous step; a long window waits for nobody; one worker has no staleness."""
    bsp = parse_consistency("bsp").evaluate(WORKLOAD)
    assert float(parse_consistency("local:1").evaluate(WORKLOAD).step_time) == pytest.approx(float(bsp.step_time))
    serverless = replace(WORKLOAD, server=None)
    assert float(parse_consistency("ssp:0").evaluate(serverless).step_time) == pytest.approx(float(bsp.step_time))
    patient = parse_consistency("ssp:100000").evaluate(serverless)
    assert float(patient.step_time) == pytest.approx(WORKLOAD.compute_time + WORKLOAD.all_reduce_time, rel=1e-3)
    assert float(parse_consistency("local:1000000").evaluate(WORKLOAD).step_time) == pytest.approx(
        WORKLOAD.compute_time, rel=1e-3
    )
    streamed, whole = (parse_consistency(text).evaluate(WORKLOAD) for text in ("diloco:100/4", "diloco:100"))
    assert float(streamed.step_time) < float(whole.step_time) and float(whole.extra_memory) == 2 * 4 * 25e6


def test_a_server_bounds_throughput_and_its_knee_is_named() -> None:
    """50 ms + 10 ms of service against 200 ms of work: from 4.3 workers on the server is the limit."""
    cycle = parse_consistency("async").evaluate(WORKLOAD)
    service = 1e-4 * 100 + 1e8 / 2e9
    assert float(cycle.knee) == pytest.approx((0.2 + service) / service)
    assert float(cycle.updates_per_s) == pytest.approx(1 / service, rel=0.01)
    assert float(cycle.utilization) <= 1.0
    assert float(cycle.staleness_mean) == 7.0


@pytest.mark.parametrize("load", [0.05, 0.2])
def test_workers_of_two_kinds_share_a_server(load: float) -> None:
    """Each class against the simulation, of which the faster workers come more often."""
    counts, think = np.array([3.0, 3.0]), np.array([0.5, 1.5])
    rate, _, _ = simulated_server(np.repeat(think, 3), load, 0.3, regular=True)
    assert float(throughput_by_worker_class(counts, think, np.array([load, load])).sum()) == pytest.approx(
        rate, rel=0.06
    )
    alike = throughput_by_worker_class(np.array([8.0]), np.array([1.0]), np.array([load]))
    assert float(alike.sum()) == pytest.approx(float(closed_queue(8.0, 1.0, load).throughput), rel=0.06)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("sync", "unknown consistency model"),
        ("ssp", "the steps that workers may be apart"),
        ("ssp:-1", "expected ssp:N"),
        ("local:0", "between 1 and"),
        ("diloco:10/20", "fragments need as many inner steps"),
        ("gossip:rng", "nearest: 'ring'"),
        ("bsp:3", "takes no argument"),
        ("local:99999999999999999", "expected local:N"),
    ],
)
def test_bad_models_are_one_message(text: str, words: str) -> None:
    with pytest.raises(PaleoError, match=words):
        parse_consistency(text)


def test_asynchronous_workers_need_a_server() -> None:
    fields = {name: getattr(WORKLOAD, name) for name in WORKLOAD.__dataclass_fields__}
    with pytest.raises(PlanError, match="no parameter server"):
        parse_consistency("async").evaluate(DataParallelWorkload(**fields | {"server": None}))


def test_closed_queues_of_many_customers_take_a_closed_form() -> None:
    """A thousand million customers saturate the server; beside the recursion the throughput is 0.6 % off at most."""
    counts = np.array([1e9, 3.0, 5000.0, 1e6])
    together = closed_queue(counts, 4096.0, 1.0)
    assert together.throughput[[0, 3]].tolist() == [1.0, 1.0]
    alone = [float(closed_queue(count, 4096.0, 1.0).throughput) for count in counts]
    assert together.throughput.tolist() == alone
    for load in (0.5, 0.9, 0.99, 1.0, 1.01, 1.2):
        for variation in (DETERMINISTIC_SERVICE_VARIATION, 1.0):
            throughput, queue = 0.0, 0.0
            for number in range(1, 5001):
                visit = max(1.0 + queue - throughput * (1.0 - variation) / 2.0, 1.0)
                throughput = min(number / (5000.0 / load + visit), 1.0)
                queue = throughput * visit
            assert float(closed_queue(5000.0, 5000.0 / load, 1.0, variation).throughput) == pytest.approx(
                throughput, rel=6e-3
            )
