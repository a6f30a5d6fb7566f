"""Simulated schedulers: laws of queues, conservation over random fleets, and what each policy does by hand."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from paleo.cluster.nodes import SCHEDULING_POLICIES, NodePool
from paleo.cluster.simulation import ClusterJob, simulate_cluster


def job(name: str, arrival: float, seconds: float, gpus: int = 1, **more) -> ClusterJob:
    return ClusterJob(name, arrival, ({gpus: seconds},), (gpus,), **more)


def elastic(name: str, arrival: float, seconds: float, most: int, **more) -> ClusterJob:
    """A job that scales perfectly up to so many GPUs."""
    sizes = [2**power for power in range(most.bit_length()) if 2**power <= most]
    return ClusterJob(name, arrival, ({gpus: seconds / gpus for gpus in sizes},), (most,), **more)


def simulated(policy: str, jobs, nodes: int = 1, per_node: int = 8, **options):
    return simulate_cluster(jobs, [NodePool(nodes, per_node)], SCHEDULING_POLICIES[policy], **options)


# by hand


def test_fifo_blocks_and_backfill_fills_without_delay():
    """8 GPUs: a takes 6 until 10, b needs 8; c takes 2 and ends before b's reservation, d would end after it."""
    jobs = [job("a", 0, 10, 6), job("b", 1, 5, 8), job("c", 2, 8, 2), job("d", 2, 9, 2)]
    fifo, easy = simulated("fifo", jobs), simulated("backfill", jobs)
    assert fifo.start.tolist() == [0, 10, 15, 15]
    assert easy.start.tolist() == [0, 10, 2, 15]
    assert easy.finish[1] == fifo.finish[1]


def test_backfill_uses_what_the_reservation_leaves():
    """Two nodes: the head needs one whole node at 10, so that a long job may have the other."""
    jobs = [job("a", 0, 10, 8), job("b", 0, 100, 4), job("head", 1, 5, 8), job("long", 2, 500, 4)]
    run = simulated("backfill", jobs, nodes=2)
    assert run.start.tolist() == [0, 0, 10, 2]


def test_the_shortest_remaining_job_preempts_and_pays():
    jobs = [job("long", 0, 100, 8, restart_time=7.0), job("short", 10, 5, 8)]
    run = simulated("srtf", jobs)
    assert run.finish.tolist() == [112, 15]
    assert run.preemptions.tolist() == [1, 0]
    assert run.pause_gpu_seconds.tolist() == [56, 0]


def test_priority_preempts_only_what_may_be_stopped():
    jobs = [job("low", 0, 100, 8), job("high", 10, 5, 8, priority=1)]
    assert simulated("priority", jobs).finish.tolist() == [105, 15]
    jobs = [job("low", 0, 100, 8, preemptible=False), job("high", 10, 5, 8, priority=1)]
    assert simulated("priority", jobs).finish.tolist() == [100, 105]


def test_least_attained_service_shares_in_quanta():
    jobs = [job("a", 0, 10), job("b", 0, 10)]
    run = simulated("las", jobs, per_node=1, quantum=1.0, growth=1.0)
    assert sorted(run.finish.tolist()) == [19, 20]


def test_fair_share_serves_the_team_that_had_less():
    jobs = [job("a1", 0, 10, 8, team="a"), job("a2", 1, 10, 8, team="a"), job("b1", 2, 10, 8, team="b")]
    assert simulated("fair", jobs).start.tolist() == [0, 20, 10]


def test_elastic_jobs_share_and_grow():
    """Alone a job has all 8 GPUs; a second one halves it, and the rest grows back when that ends."""
    jobs = [elastic("a", 0, 80, 8), elastic("b", 5, 8, 8)]
    run = simulated("elastic", jobs)
    assert run.start.tolist() == [0, 5]
    assert run.finish.tolist() == [11, 7]
    assert run.work_gpu_seconds.sum() == pytest.approx(88)


def test_predecessors_end_first():
    jobs = [job("b", 0, 5, predecessors=(1,)), job("a", 0, 10)]
    run = simulated("fifo", jobs)
    assert run.start.tolist() == [10, 0] and run.waiting_time.tolist() == [0, 0]


def test_a_job_may_arrive_when_its_predecessor_ends():
    run = simulated("fifo", [job("a", 0, 10), job("b", 10, 5, predecessors=(0,)), job("c", 11, 5)], per_node=1)
    assert run.start.tolist() == [0, 10, 15]


def test_a_gang_smaller_than_a_node_lies_on_one():
    """Two nodes with 4 free GPUs each hold no gang of 8: the GPUs are fragmented, not missing."""
    jobs = [job("a", 0, 10, 4), job("b", 0, 10, 5), job("c", 1, 5, 5)]
    run = simulated("fifo", jobs, nodes=2)
    assert run.start[2] == 10
    assert run.unused_gpu_seconds["fragmentation"] == pytest.approx(9 * 7) and run.unused_gpu_seconds["waiting"] == 0


def test_whole_nodes_come_from_one_rack_or_from_all():
    pool = NodePool(8, 8, nodes_per_rack=4)
    pool.allocate_gang([(0, 8)])
    assert [node for node, _ in pool.gang_placement(32)] == [4, 5, 6, 7]
    assert not pool.has_excess_racks(pool.gang_placement(32))
    spread = NodePool(8, 8, nodes_per_rack=4, spreads_over_racks=True)
    assert {node // 4 for node, _ in spread.gang_placement(16)} == {0, 1}
    assert spread.has_excess_racks(spread.gang_placement(16))


def test_jobs_take_the_nodes_on_which_they_are_fastest():
    described = ClusterJob("a", 0.0, ({8: 10.0}, {8: 4.0}), (8, 8))
    run = simulate_cluster([described, described], [NodePool(1, 8), NodePool(1, 8)], SCHEDULING_POLICIES["fifo"])
    assert sorted(run.finish.tolist()) == [4, 10]


@pytest.mark.parametrize("policy", list(SCHEDULING_POLICIES))
def test_a_kind_without_nodes_changes_nothing(policy: str) -> None:
    draw = random.Random(3)
    jobs = [job(f"{n:02d}", draw.randint(0, 50), draw.randint(1, 40), draw.choice([1, 4, 8, 16])) for n in range(30)]
    both = [
        ClusterJob(each.name, each.arrival, ({16: 1.0}, each.run_times[0]), (16, each.preferred_gpus[0]))
        for each in jobs
    ]
    alone = simulated(policy, jobs, nodes=2)
    mixed = simulate_cluster(both, [NodePool(0, 8), NodePool(2, 8)], SCHEDULING_POLICIES[policy])
    assert mixed.finish.tolist() == alone.finish.tolist()


# random fleets


def random_fleet(seed: int) -> tuple[list[ClusterJob], list[tuple[int, int, int]]]:
    draw = random.Random(seed)
    shapes = [
        (draw.randint(1, 6), draw.choice([4, 8]), draw.choice([2, 100])) for _ in range(draw.choice([1, 1, 1, 2]))
    ]
    jobs = []
    for number in range(draw.randint(1, 25)):
        tables, preferred = [], []
        for nodes, per_node, _ in shapes:
            most = nodes * per_node
            sizes = sorted({min(most, draw.choice([1, 2, 3, 4, 8, 12, 16, 32])) for _ in range(draw.choice([1, 1, 3]))})
            tables.append({gpus: float(draw.randint(1, 200)) / gpus for gpus in sizes})
            preferred.append(draw.choice(sizes))
        jobs.append(
            ClusterJob(
                f"job {number:03d}", float(draw.randint(0, 100)), tuple(tables), tuple(preferred),
                team=draw.choice("abc"), deadline=draw.choice([math.inf, float(draw.randint(50, 300))]),
                priority=draw.randint(0, 2), preemptible=draw.random() < 0.7, restart_time=draw.choice([0.0, 3.0]),
                failure_share=0.1, slowdown_on_excess_racks=draw.choice([1.0, 1.3]),
                predecessors=tuple({draw.randrange(number)}) if number and draw.random() < 0.2 else (),
            )
        )  # fmt: skip
    return jobs, shapes


def check_fleet(seed: int, policy: str) -> None:
    """Conservation, gangs, no GPU used twice, and the order of the input does not matter."""
    jobs, shapes = random_fleet(seed)

    def pools():
        return [NodePool(nodes, per_node, rack, seed % 2 == 1) for nodes, per_node, rack in shapes]

    factors = None if seed % 3 else [1.0 + 0.5 * random.Random(n).random() for n in range(len(jobs))]
    run = simulate_cluster(jobs, pools(), SCHEDULING_POLICIES[policy], factors=factors)
    assert np.isfinite(run.finish).all()
    used = np.zeros(len(jobs))
    busy: dict[tuple[int, int], list[tuple[float, int]]] = {}
    own: dict[int, list[tuple[float, float]]] = {}
    for segment in run.segments:
        described, gpus = jobs[segment.job], sum(count for _, count in segment.gang)
        assert gpus in described.run_times[segment.pool]
        assert policy == "elastic" or gpus == described.preferred_gpus[segment.pool]
        assert len({node for node, _ in segment.gang}) == len(segment.gang) == -(-gpus // shapes[segment.pool][1])
        assert segment.begin >= described.arrival
        assert all(segment.begin >= run.finish[before] for before in described.predecessors)
        used[segment.job] += (segment.end - segment.begin) * gpus
        own.setdefault(segment.job, []).append((segment.begin, segment.end))
        for node, count in segment.gang:
            busy.setdefault((segment.pool, node), []).extend([(segment.begin, count), (segment.end, -count)])
    for (kind, _), changes in busy.items():
        levels = np.cumsum([count for _, count in sorted(changes)])
        assert levels.max() <= shapes[kind][1] and levels[-1] == 0
    for stretches in own.values():
        ordered = sorted(stretches)
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(ordered))
    assert used == pytest.approx(run.work_gpu_seconds + run.pause_gpu_seconds)
    whole = run.gpus * run.makespan
    assert whole == pytest.approx(
        run.work_gpu_seconds.sum() + run.pause_gpu_seconds.sum() + sum(run.unused_gpu_seconds.values()), abs=1e-6
    )
    assert run.pause_gpu_seconds == pytest.approx(run.pause_gpu_seconds * (run.preemptions > 0))
    if policy not in ("elastic",) and len(shapes) == 1 and factors is None:
        for number, described in enumerate(jobs):
            gpus = described.preferred_gpus[0]
            least = described.run_times[0][gpus] * gpus
            assert (
                least * (1 - 1e-9)
                <= run.work_gpu_seconds[number]
                <= least * described.slowdown_on_excess_racks * (1 + 1e-9)
            )
    order = list(range(len(jobs)))
    random.Random(seed).shuffle(order)
    place = {number: rank for rank, number in enumerate(order)}
    from dataclasses import replace

    shuffled = [replace(jobs[n], predecessors=tuple(place[before] for before in jobs[n].predecessors)) for n in order]
    again = simulate_cluster(
        shuffled, pools(), SCHEDULING_POLICIES[policy], factors=None if factors is None else [factors[n] for n in order]
    )
    assert again.finish[[place[n] for n in range(len(jobs))]].tolist() == run.finish.tolist()


@pytest.mark.parametrize("policy", list(SCHEDULING_POLICIES))
def test_random_fleets_conserve_gpu_seconds(policy: str) -> None:
    for seed in range(25):
        check_fleet(seed, policy)


@pytest.mark.slow
@pytest.mark.parametrize("policy", list(SCHEDULING_POLICIES))
def test_a_thousand_random_fleets_conserve_gpu_seconds(policy: str) -> None:
    """143 seeds of each of seven policies."""
    for seed in range(25, 168):
        check_fleet(seed, policy)


# laws of queues


def poisson_jobs(count: int, rate: float, draw, seed: int) -> list[ClusterJob]:
    random_ = np.random.default_rng(seed)
    arrivals, times = np.cumsum(random_.exponential(1.0 / rate, count)), draw(random_, count)
    return [job(f"{n:07d}", float(arrivals[n]), float(times[n])) for n in range(count)]


def mean_wait(policy: str, servers: int, rate: float, draw, *, count: int, seeds: int, **options) -> float:
    """Mean waiting time without the first tenth of the jobs."""
    waits = [
        simulated(policy, poisson_jobs(count, rate, draw, seed), 1, servers, **options)
        .waiting_time[count // 10 :]
        .mean()
        for seed in range(seeds)
    ]
    return float(np.mean(waits))


def erlang_c(servers: int, load: float) -> float:
    """Probability of waiting in M/M/c."""
    terms = [load**k / math.factorial(k) for k in range(servers)]
    last = load**servers / math.factorial(servers) * servers / (servers - load)
    return last / (sum(terms) + last)


def exponential(random_, count):
    return random_.exponential(1.0, count)


def uniform(random_, count):
    return random_.uniform(0.0, 2.0, count)


def hyperexponential(random_, count):
    """Mean 1, squared coefficient of variation 2: balanced means."""
    share = 0.5 * (1.0 + math.sqrt(1.0 / 3.0))
    fast = random_.random(count) < share
    return random_.exponential(1.0, count) / np.where(fast, 2.0 * share, 2.0 * (1.0 - share))


#: Squared coefficients of variation.
VARIATION = {exponential: 1.0, uniform: 1.0 / 3.0, hyperexponential: 2.0}


@pytest.mark.slow
@pytest.mark.parametrize(("servers", "load"), [(1, 0.7), (4, 0.8), (16, 0.9)])
def test_fifo_waits_as_in_an_m_m_c_queue(servers: int, load: float) -> None:
    expected = erlang_c(servers, load * servers) / (servers * (1.0 - load))
    wait = mean_wait("fifo", servers, load * servers, exponential, count=60_000, seeds=6)
    assert wait == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [uniform, hyperexponential])
def test_fifo_waits_as_in_an_m_g_1_queue(draw) -> None:
    """Pollaczek and Khinchine: rho (1 + C^2) / (2 (1 - rho)) service times."""
    expected = 0.7 * (1.0 + VARIATION[draw]) / (2.0 * 0.3)
    assert mean_wait("fifo", 1, 0.7, draw, count=60_000, seeds=8) == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [uniform, hyperexponential])
def test_fifo_waits_as_in_an_m_g_c_queue(draw) -> None:
    """Lee and Longton's approximation: (1 + C^2) / 2 times the wait of M/M/c."""
    expected = erlang_c(4, 3.2) / (4 * 0.2) * (1.0 + VARIATION[draw]) / 2.0
    assert mean_wait("fifo", 4, 3.2, draw, count=60_000, seeds=8) == pytest.approx(expected, rel=0.05)


def feedback_response(rate: float, sizes: np.ndarray) -> float:
    """Mean response time under foreground-background (least attained service) of M/G/1, by Kleinrock, volume 2, 4.6:
    T(x) = (W(x) + x) / (1 - rho_x), W(x) = rate E[min(S, x)^2] / (2 (1 - rho_x)), over samples of the sizes."""
    points = np.quantile(sizes, np.linspace(0.0005, 0.9995, 1000))
    first = np.array([np.minimum(sizes, x).mean() for x in points])
    second = np.array([(np.minimum(sizes, x) ** 2).mean() for x in points])
    free = 1.0 - rate * first
    return float(np.mean((rate * second / (2.0 * free) + points) / free))


@pytest.mark.slow
@pytest.mark.parametrize("draw", [exponential, uniform, hyperexponential])
def test_least_attained_service_responds_as_in_an_m_g_1_queue(draw) -> None:
    """The wait under FIFO of the same jobs, whose mean is known, takes most of the noise of arrivals away."""
    sizes = draw(np.random.default_rng(99), 200_000)
    expected = feedback_response(0.7, sizes) - 1.0
    fifo = 0.7 * (1.0 + VARIATION[draw]) / (2.0 * 0.3) / mean_wait("fifo", 1, 0.7, draw, count=6_000, seeds=5)
    wait = mean_wait("las", 1, 0.7, draw, count=6_000, seeds=5, quantum=0.02, growth=1.0)
    assert wait * fifo == pytest.approx(expected, rel=0.05)
