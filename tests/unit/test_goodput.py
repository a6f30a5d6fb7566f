"""Goodput: the closed form against a discrete simulation, limits, published runs."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paleo.errors import CapacityError
from paleo.studies.goodput import (
    CheckpointTimes,
    RestartTimes,
    _check_room,
    _long_run,
    _write_time,
    best_checkpoint_interval,
    elastic_goodput,
    goodput,
    mean_node_replacement_time,
    mean_time_between_failures,
    spare_node_count,
    two_level_goodput,
)


def simulated(interval: float, save: float, restart: float, mtbf: float, segments: int = 40000) -> float:
    """Work over wall time of a run, event by event: a segment of work and its checkpoint is repeated until no failure
    strikes, restarts until they end without one."""
    random = np.random.default_rng(7)
    wall = 0.0
    for _ in range(segments):
        while (strike := random.exponential(mtbf)) < interval + save:
            wall += strike
            while (again := random.exponential(mtbf)) < restart:
                wall += again
            wall += restart
        wall += interval + save
    return segments * interval / wall


CASES = [(798.0, 30.0, 300.0, 11135.0), (798.0, 30.0, 600.0, 11135.0), (3600.0, 40.0, 600.0, 604800.0),
         (5400.0, 102.0, 3600.0, 30000.0), (600.0, 5.0, 60.0, 3600.0)]  # fmt: skip


@pytest.mark.parametrize(("interval", "save", "restart", "mtbf"), CASES)
def test_closed_form_equals_a_simulation_within_half_a_point(
    interval: float, save: float, restart: float, mtbf: float
) -> None:
    closed = float(goodput(interval=interval, save=save, restart=restart, mtbf=mtbf))
    assert simulated(interval, save, restart, mtbf) == pytest.approx(closed, abs=0.005)


def daly_interval(save: float, mtbf: np.ndarray) -> np.ndarray:
    """√(2 δ M) [1 + √(δ / 2M) / 3 + δ / 18M] − δ, where δ < 2M (Daly 2006, eq. 37)."""
    root = np.sqrt(save / (2.0 * mtbf))
    return np.sqrt(2.0 * save * mtbf) * (1.0 + root / 3.0 + root**2 / 9.0) - save


def test_best_interval_is_a_maximum_and_near_young_and_daly() -> None:
    mtbf = np.array([3600.0, 11135.0, 604800.0])
    best = best_checkpoint_interval(save=30.0, mtbf=mtbf)
    here = goodput(interval=best, save=30.0, restart=300.0, mtbf=mtbf)
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert np.all(goodput(interval=best * factor, save=30.0, restart=300.0, mtbf=mtbf) < here)
    young = goodput(interval=np.sqrt(2 * 30.0 * mtbf), save=30.0, restart=300.0, mtbf=mtbf)
    assert np.all(here - young < 3e-4)
    assert daly_interval(save=30.0, mtbf=mtbf) == pytest.approx(best, rel=2e-3)


def test_limits() -> None:
    assert float(mean_time_between_failures(nodes=0.0, node_rate=1.0)) == math.inf
    assert float(goodput(interval=100.0, save=25.0, restart=9.0, mtbf=math.inf)) == 0.8
    assert float(elastic_goodput(base=0.9, replicas=10.0, failures_in_repair=1.0)) == pytest.approx(0.81)
    assert spare_node_count(nodes=1, node_rate=0.0, repair=1.0) == 0


def test_memory_copies_beat_storage_alone() -> None:
    alone = float(goodput(interval=1200.0, save=60.0, restart=600.0, mtbf=11135.0))
    both = float(
        two_level_goodput(
            memory_interval=120.0, memory_save=0.5, storage_interval=2400.0, storage_save=2.0, restart_memory=200.0,
            restart_storage=600.0, mtbf=11135.0,
        )
    )  # fmt: skip
    assert alone < both < 1


def test_published_runs() -> None:
    """Llama 3 405B: 419 failures in 54 days on 2,048 nodes, "more than 90 %" (Dubey et al. 2024); BLOOM: checkpoints of
    40 s every 3 h cost 0.37 %, one failure a week (BigScience chronicles)."""
    llama = _long_run(
        work=54 * 86400 * 0.9,
        mtbf=54 * 86400 / 419,
        checkpoint_bytes=14 * 405e9,
        checkpoints=CheckpointTimes(30.0, 300.0),
    )
    assert llama.goodput == pytest.approx(0.90, abs=0.01)
    assert llama.expected_failures == pytest.approx(419, rel=0.03)
    assert llama.wall_time_interval[0] < llama.wall_time < llama.wall_time_interval[1]
    bloom = _long_run(
        work=1e7, mtbf=604800.0, checkpoint_bytes=2.46e12, checkpoints=CheckpointTimes(40.0, 600.0), interval=10800.0
    )
    assert bloom.lost_time_shares["checkpoints"] == pytest.approx(0.0037, abs=1e-4)


def test_checkpoints_of_one_process_do_not_get_faster_with_more() -> None:
    one = _write_time(2e10, 0.625e9, 1.0, math.inf)
    assert float(one) == 32.0  # torch.save writes from one process: 32 s with 1, 8, 16 and 32 of them
    assert _write_time(2e10, 0.625e9, 32, 7.5e9) < 3.0


def test_bad_input() -> None:
    slow = CheckpointTimes(600.0, 60.0)
    with pytest.raises(CapacityError, match="never finishes: a checkpoint takes 10 min, longer than the interval"):
        _long_run(work=1e6, mtbf=1e5, checkpoint_bytes=1e12, checkpoints=slow, interval=300.0)
    with pytest.raises(CapacityError, match="never finishes: a failure every"):
        _long_run(work=1e6, mtbf=60.0, checkpoint_bytes=1e12, checkpoints=CheckpointTimes(50.0, 3600.0), interval=100.0)
    with pytest.raises(CapacityError, match="storage: a checkpoint of 2 TB does not fit into 1 TB"):
        _check_room("storage", 2e12, 1e12)
    assert RestartTimes().total_time(30.0) == 210.0


def simulated_levels(interval: float, way: CheckpointTimes, mtbf: float, failures: int = 4000) -> float:
    """Work over wall time of a run that copies its states to host memory every ``interval`` seconds of work, and from
    there to storage without a pause, failure by failure."""
    random = np.random.default_rng(11)
    wall = work = 0.0
    memory, storage = 0.0, [(0.0, 0.0)]  # work of the copy in memory; (wall time when durable, work) in storage
    for _ in range(failures):
        strike = wall + random.exponential(mtbf)
        while wall + interval + way.save <= strike:
            wall, work = wall + interval + way.save, work + interval
            memory = work
            if wall >= storage[-1][0]:
                storage = [*storage[-1:], (wall + way.durable_lag, work)]
        survives, wall = random.random() < way.memory_survival_share, strike
        restart = way.restart_memory if survives else way.restart
        while (again := random.exponential(mtbf)) < restart:
            wall += again
        wall += restart
        storage = storage if survives else [copy for copy in storage if copy[0] <= strike]
        work = memory = memory if survives else storage[-1][1]
    return work / wall


@pytest.mark.parametrize("mtbf", [11135.0, 4000.0])
def test_copies_in_memory_and_storage_equal_a_simulation_within_half_a_point(mtbf: float) -> None:
    way = CheckpointTimes(2.0, 600.0, durable_lag=300.0, memory_survival_share=0.75, restart_memory=150.0)
    closed = float(way.goodput(300.0, mtbf))
    assert simulated_levels(300.0, way, mtbf) == pytest.approx(closed, abs=0.005)


def test_an_elastic_run_loses_shares_of_a_replica() -> None:
    way = CheckpointTimes(10.0, 100.0, replicas=20, repair=3600.0)
    # worked: (1 - 100 / 36000) / (1 + 10 / 1000) (1 - 3600 / 36000 / 20)
    assert float(way.goodput(1000.0, 36000.0)) == pytest.approx(0.997222 / 1.01 * 0.995, rel=1e-6)
    assert float(way.goodput(1000.0, 36000.0)) > float(CheckpointTimes(10.0, 3700.0).goodput(1000.0, 36000.0))


def test_waiting_for_a_node() -> None:
    waits = [
        mean_node_replacement_time(mean_in_repair=2.0, spares=spares, repair=7200.0, swap=30.0) for spares in (0, 2, 8)
    ]
    assert waits[0] == pytest.approx(7200.0 * (1 - math.exp(-2.0)) / 2.0, rel=1e-6)  # E[1 / (k + 1)] of Poisson
    assert waits[0] > waits[1] > waits[2] > 30.0


def test_the_range_of_failure_rates_widens_the_finish() -> None:
    sure, unsure = (
        _long_run(work=1e7, mtbf=1e4, checkpoint_bytes=1e12, checkpoints=CheckpointTimes(20.0, 200.0), rate_range=ends)
        for ends in ((1.0, 1.0), (0.5, 4.0))
    )
    assert unsure.goodput_range[0] < sure.goodput < unsure.goodput_range[1]
    assert sure.goodput_range == (sure.goodput, sure.goodput)
    assert (
        unsure.wall_time_interval[0]
        < sure.wall_time_interval[0]
        < sure.wall_time_interval[1]
        < unsure.wall_time_interval[1]
    )
