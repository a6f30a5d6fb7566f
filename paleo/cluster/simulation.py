"""Discrete-event simulation of a scheduler.

Jobs arrive, take the GPUs of a gang and release them; a policy decides which. Arrivals, ends of jobs and ends of quanta
are events of the queue that all simulations share. All events of one time are handled before the policy decides. A
stopped job pays for its checkpoint and its restart when it continues.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.events import EventQueue

if TYPE_CHECKING:
    from paleo.cluster.nodes import GangPlacement, IntegerArray, NodePool, SchedulingPolicy

Array = npt.NDArray[np.float64]
#: GPU-seconds of the first level of attained service, and the ratio of each level to the one before, as in Tiresias.
_FIRST_SERVICE_LEVEL_GPU_SECONDS, _SERVICE_LEVEL_GROWTH = 3200.0, 2.0
#: Relative rounding error of levels and of reservation times.
_ROUNDING = 2e-9
#: A job is enlarged only if that saves this many times the pause for resizing.
_MIN_RESIZE_GAIN = 2.0
_UNUSED_GPU_REASONS = ("waiting", "fragmentation", "idle")


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """Job with the run times, priority and constraints that the cluster scheduler uses.

    Attributes
    ----------
    name, team : str
        Names of the job and of the team that it belongs to.
    arrival, deadline : float
        Times of submission and of the latest end [s].
    run_times : tuple of mapping
        For each kind of nodes: GPUs that the job may have, rising, and its run time on them [s].
    preferred_gpus : tuple of int
        For each kind of nodes: GPUs of the job where it is not resized; 0 where it does not run.
    priority : float
        Larger ones come first.
    preemptible : bool
        True if it may be stopped or resized.
    restart_time : float
        Time to write a checkpoint, to start again and to read it [s].
    failure_share : float
        Share (0 to 1) of the run time that is lost to failures and checkpoints.
    slowdown_on_excess_racks : float
        Run time on more racks than needed over that on as few as possible.
    predecessors : tuple of int
        Numbers of the jobs that must end before this job starts.
    """

    name: str
    arrival: float
    run_times: tuple[Mapping[int, float], ...]
    preferred_gpus: tuple[int, ...]
    team: str = ""
    deadline: float = math.inf
    priority: float = 0.0
    preemptible: bool = True
    restart_time: float = 0.0
    failure_share: float = 0.0
    slowdown_on_excess_racks: float = 1.0
    predecessors: tuple[int, ...] = ()


class JobSegment(NamedTuple):
    """Time interval [s] in which a job runs on the same GPUs; ``gang`` holds the number of GPUs on each node."""

    job: int
    pool: int
    begin: float
    end: float
    gang: GangPlacement


@dataclass(slots=True)
class _Running:
    """A running job: its GPUs, its start, the pause before it works, and its run time on these GPUs."""

    pool: int
    gang: GangPlacement
    gpus: int
    begin: float
    pause: float
    seconds: float
    end_time: float


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """Results of a simulation; arrays have one entry for each job.

    Attributes
    ----------
    start, finish, waiting_time : numpy.ndarray
        First start, end, and total time in the queue [s].
    preemptions : numpy.ndarray
        Number of times that the scheduler stopped the job, including stops to resize.
    work_gpu_seconds, pause_gpu_seconds : numpy.ndarray
        GPU-seconds of work (failures included) and of pauses.
    failure_gpu_seconds : numpy.ndarray
        GPU-seconds of the work that failures and checkpoints take.
    unused_gpu_seconds : dict
        GPU-seconds that no job has: ``waiting`` (the first job needs more GPUs than are free), ``fragmentation``
        (enough are free, on the wrong nodes) and ``idle`` (no job waits).
    gpus : int
        All GPUs.
    makespan : float
        Time from the first arrival to the last end [s].
    queue_history : numpy.ndarray
        Time and jobs that wait, shape (n, 2).
    segments : tuple of JobSegment
        Jobs with their GPUs and times.
    """

    start: Array
    finish: Array
    waiting_time: Array
    preemptions: Array
    work_gpu_seconds: Array
    pause_gpu_seconds: Array
    failure_gpu_seconds: Array
    unused_gpu_seconds: dict[str, float]
    gpus: int
    makespan: float
    queue_history: Array
    segments: tuple[JobSegment, ...]

    @property
    def utilisation(self) -> float:
        """Fraction (0 to 1) of all GPU time in which jobs make progress."""
        return float(self.work_gpu_seconds.sum()) / (self.gpus * self.makespan) if self.makespan else 0.0


@dataclass(slots=True)
class _Reservation:
    """Latest start of the first waiting job [s], the nodes kept for it, and GPUs that other jobs may use until then."""

    job: int
    pool: int
    time: float
    extra: IntegerArray


class _ClusterSimulation:
    """Event simulation of a cluster under a scheduling policy; see `simulate_cluster`."""

    def __init__(
        self, jobs: Sequence[ClusterJob], pools: Sequence[NodePool], policy: SchedulingPolicy, *,
        factors: Sequence[float] | None, quantum: float, growth: float,
    ) -> None:  # fmt: skip
        self.jobs, self.pools, self.policy = jobs, pools, policy
        self.run_time_factors, self.quantum, self.growth = factors, quantum, growth
        count = len(jobs)
        self.now = min((job.arrival for job in jobs), default=0.0)
        self.begin = self.now
        self.queue = EventQueue()
        self.progress, self.pending_restart_time = [0.0] * count, [0.0] * count
        self.start, self.finish = [math.nan] * count, [math.nan] * count
        self.queue_entry_time = [job.arrival for job in jobs]
        self.preemption_counts, self.occupied_time = [0] * count, [0.0] * count
        self.work_gpu_seconds, self.pause_gpu_seconds = [0.0] * count, [0.0] * count
        self.team_used: dict[str, float] = {}
        self.running: dict[int, _Running] = {}
        self.ends: list[tuple[float, int]] = []
        self.waiting = np.zeros(count, dtype=bool)
        self.waiting_count = 0
        self.first_waiting_index, self.last_waiting_index = 0, 0
        self.free_gpus = sum(pool.gpus for pool in pools)
        self.unused_reason = "idle"
        self.unused_gpu_seconds = dict.fromkeys(_UNUSED_GPU_REASONS, 0.0)
        self.queue_history: list[tuple[float, int]] = []
        self.segments: list[JobSegment] = []
        self.reserved: _Reservation | None = None
        self.unfinished_predecessors = [len(job.predecessors) for job in jobs]
        self.successors: dict[int, list[int]] = {}
        for number, job in enumerate(jobs):
            for before in job.predecessors:
                self.successors.setdefault(before, []).append(number)
        kinds = range(len(pools))
        self.pools_by_speed: list[list[int]] = []
        for job in jobs:
            fitting = [p for p in kinds if 0 < job.preferred_gpus[p] <= pools[p].gpus]
            if not fitting:
                raise SpecError(f"job {job.name!r:.60} can never run: no kind of nodes has enough GPUs")
            self.pools_by_speed.append(sorted(fitting, key=partial(_preferred_seconds, job)))
        self.preferred_gpus = [np.array([job.preferred_gpus[p] for job in jobs], dtype=np.int64) for p in kinds]
        self.preferred_run_times = [np.array([_preferred_seconds(job, p) for job in jobs], np.float64) for p in kinds]

    def run(self) -> None:
        """Simulate until all jobs have ended."""
        count, queue = len(self.jobs), self.queue
        for number, job in enumerate(self.jobs):
            queue.push(job.arrival, count + number)
        while queue:
            time = queue.next_event_time
            self.unused_gpu_seconds[self.unused_reason] += self.free_gpus * (time - self.now)
            self.now = time
            while queue.next_event_time <= time:
                event = queue.pop()[1]
                if event < count:
                    self._end(event)
                elif event < 2 * count:
                    self._arrive(event - count)
            self._schedule()
            if not self.queue_history or self.queue_history[-1][1] != self.waiting_count:
                self.queue_history.append((self.now, self.waiting_count))

    # quantities that policies use

    def remaining_time(self, job: int) -> float:
        """Return the time until a job ends if it continues, or starts, now.

        Parameters
        ----------
        job : int
            Number of the job.

        Returns
        -------
        float
            Time [s].
        """
        running = self.running.get(job)
        if running is not None:
            return running.end_time - self.now
        seconds = min(self.preferred_run_times[p][job] for p in self.pools_by_speed[job])
        return float((1.0 - self.progress[job]) * seconds + self.pending_restart_time[job])

    def _attained_service(self, job: int) -> float:
        """Return the GPU time that a job has used so far [GPU-seconds].

        Parameters
        ----------
        job : int
            Number of the job.

        Returns
        -------
        float
            GPU-seconds.
        """
        running = self.running.get(job)
        since = 0.0 if running is None else (self.now - running.begin) * running.gpus
        return self.work_gpu_seconds[job] + self.pause_gpu_seconds[job] + since

    def service_level(self, job: int) -> int:
        """Return the queue index of a job under least-attained-service scheduling.

        Parameters
        ----------
        job : int
            Number of the job.

        Returns
        -------
        int
            Level, from 0.
        """
        quanta = self._attained_service(job) / self.quantum
        if self.growth > 1.0:
            quanta = math.log1p(quanta * (self.growth - 1.0)) / math.log(self.growth)
        return math.floor(quanta + _ROUNDING * (1.0 + quanta))

    def team_gpu_time(self, team: str) -> float:
        """Return the GPU time that the jobs of a team have used so far [GPU-seconds].

        Parameters
        ----------
        team : str
            Name of the team.

        Returns
        -------
        float
            GPU-seconds.
        """
        running = (each for job, each in self.running.items() if self.jobs[job].team == team)
        return self.team_used.get(team, 0.0) + sum((self.now - each.begin) * each.gpus for each in running)

    # events

    def _arrive(self, job: int) -> None:
        if not self.unfinished_predecessors[job] and not self.waiting[job]:  # a predecessor may end at the arrival
            self.queue_entry_time[job] = self.now
            self._wait(job)

    def _wait(self, job: int) -> None:
        self.waiting[job] = True
        self.waiting_count += 1
        self.first_waiting_index = min(self.first_waiting_index, job)
        self.last_waiting_index = max(self.last_waiting_index, job + 1)

    def _end(self, job: int) -> None:
        self._stop(job, ended=True)
        self.finish[job] = self.now
        for number in self.successors.get(job, ()):
            self.unfinished_predecessors[number] -= 1
            if not self.unfinished_predecessors[number] and self.jobs[number].arrival <= self.now:
                self._arrive(number)

    def _start(self, job: int, pool: int, gpus: int, gang: GangPlacement) -> None:
        """Start or continue a job on a gang (its GPUs by node) of a pool."""
        described, nodes = self.jobs[job], self.pools[pool]
        nodes.allocate_gang(gang)
        self.free_gpus -= gpus
        seconds = described.run_times[pool][gpus]
        if described.slowdown_on_excess_racks > 1.0 and nodes.has_excess_racks(gang):
            seconds *= described.slowdown_on_excess_racks
        left = 1.0 - self.progress[job]
        expected = self.now + self.pending_restart_time[job] + left * seconds
        if self.run_time_factors is not None:
            seconds *= self.run_time_factors[job]
        due = self.now + self.pending_restart_time[job] + left * seconds
        self.running[job] = _Running(pool, gang, gpus, self.now, self.pending_restart_time[job], seconds, due)
        insort(self.ends, (expected, job))
        self.queue.push(due, job)
        if math.isnan(self.start[job]):
            self.start[job] = self.now
        if self.waiting[job]:
            self.waiting[job] = False
            self.waiting_count -= 1

    def _stop(self, job: int, *, ended: bool = False) -> None:
        """Take a job off its GPUs, because it has ``ended`` or is preempted."""
        running = self.running.pop(job)
        elapsed = self.now - running.begin
        pause = min(elapsed, running.pause)
        share = (elapsed - pause) / running.seconds if running.seconds else 0.0
        self.progress[job] = 1.0 if ended else min(self.progress[job] + share, 1.0)
        self.work_gpu_seconds[job] += (elapsed - pause) * running.gpus
        self.pause_gpu_seconds[job] += pause * running.gpus
        self.occupied_time[job] += elapsed
        team = self.jobs[job].team
        self.team_used[team] = self.team_used.get(team, 0.0) + elapsed * running.gpus
        self.pools[running.pool].release_gang(running.gang)
        self.free_gpus += running.gpus
        self._forget_end(job, running)
        if elapsed > 0.0:
            self.segments.append(JobSegment(job, running.pool, running.begin, self.now, running.gang))
        if not ended:
            self.queue.cancel(job)
            self.preemption_counts[job] += 1
            self.pending_restart_time[job] = self.jobs[job].restart_time
            self._wait(job)

    def _forget_end(self, job: int, running: _Running) -> None:
        """Remove the expected end of a running job from the sorted list of ends."""
        if self.run_time_factors is None:
            place = bisect_left(self.ends, (running.end_time, job))
            if place < len(self.ends) and self.ends[place][1] == job:
                del self.ends[place]
                return
        self.ends = [entry for entry in self.ends if entry[1] != job]

    # decisions

    def _schedule(self) -> None:
        """Start, stop and resize jobs as the policy decides."""
        self.unused_reason = "idle"
        if not self.waiting_count and not self.policy.resizes_jobs:
            return
        if self.policy.resizes_jobs:
            # Give every job its fewest GPUs in the order of arrival, then the rest where each saves most time.
            goal = self._target_allocation()
            changed = [job for job, (_, gpus) in goal.items() if job in self.running and self.running[job].gpus != gpus]
            for job in changed:
                self._stop(job)
            for job in sorted((job for job in goal if job not in self.running), key=lambda job: (-goal[job][1], job)):
                p, most = goal[job]
                for gpus in sorted((g for g in self.jobs[job].run_times[p] if g <= most), reverse=True):
                    if self.pools[p].can_place_gang(gpus):
                        self._start(job, p, gpus, self.pools[p].gang_placement(gpus))
                        break
        elif self.policy.preempts:
            self._preempt()
        else:
            self._start_in_order()
        head = self._first_waiting()
        if head is not None:
            kinds = self.pools_by_speed[head]
            enough = any(self.preferred_gpus[p][head] <= self.pools[p].free_gpus.sum() for p in kinds)
            self.unused_reason = "fragmentation" if enough else "waiting"

    def _first_waiting(self) -> int | None:
        """Return the waiting job that arrived first."""
        if not self.waiting_count:
            return None
        while not self.waiting[self.first_waiting_index]:
            self.first_waiting_index += 1
        return self.first_waiting_index

    def _placement_now(self, job: int) -> tuple[int, int, GangPlacement] | None:
        """Return (pool, number of GPUs, gang) on which a job can start now and is fastest; None if it fits nowhere."""
        for p in self.pools_by_speed[job]:
            gpus = int(self.preferred_gpus[p][job])
            if self.pools[p].can_place_gang(gpus):
                return p, gpus, self.pools[p].gang_placement(gpus)
        return None

    def _start_in_order(self) -> None:
        """Start waiting jobs in the policy's order until one does not fit; then backfill if the policy allows."""
        key = self.policy.priority_key
        order = None
        if key is not None:
            order = np.array(sorted(np.flatnonzero(self.waiting).tolist(), key=lambda job: key(self, job)))
        while self.waiting_count:
            head = self._first_waiting() if order is None else int(order[0])
            spot = None if head is None else self._placement_now(head)
            if head is None or spot is None:
                break
            self._start(head, *spot)
            order = None if order is None else order[1:]
        if head is not None and self.waiting_count > 1 and self.policy.backfills and self.free_gpus:
            if order is None:
                after = self.first_waiting_index + 1
                order = after + np.flatnonzero(self.waiting[after : self.last_waiting_index])
            self._backfill(head, order)

    def _reserve(self, head: int) -> _Reservation:
        """Return the latest start of the first waiting job, if running jobs end as expected."""
        lasts = self.run_time_factors is None and not self.policy.priority_key
        if lasts and self.reserved is not None and self.reserved.job == head:
            return self.reserved
        best: tuple[float, _Reservation] | None = None
        for p in self.pools_by_speed[head]:
            pool, gpus = self.pools[p], int(self.preferred_gpus[p][head])
            free, time = pool.free_gpus.copy(), self.now
            for end, job in self.ends:
                if pool.can_place_gang(gpus, free):
                    break
                if self.running[job].pool == p:
                    for node, count in self.running[job].gang:
                        free[node] += count
                    time = max(end, self.now)
            for node, count in pool.gang_placement(gpus, free):
                free[node] -= count
            finish = time + self.preferred_run_times[p][head]
            if best is None or finish < best[0]:
                best = finish, _Reservation(head, p, time, free)
        assert best is not None
        self.reserved = best[1]
        return best[1]

    def _backfill(self, head: int, order: IntegerArray) -> None:
        """Start later jobs that end before the first waiting job's reserved start, or that leave its GPUs free."""
        reserved = self._reserve(head)
        until = reserved.time * (1.0 + _ROUNDING)
        for p, pool in enumerate(self.pools):
            candidates = order[self.waiting[order] & (self.preferred_gpus[p][order] > 0)]
            while len(candidates) and pool.free_gpus.any():
                sizes, ends = self.preferred_gpus[p][candidates], self.now + self.preferred_run_times[p][candidates]
                allowed = pool.placeable_gang_mask(sizes, pool.free_gpus)
                if p == reserved.pool:
                    room = np.minimum(pool.free_gpus, reserved.extra)
                    allowed = np.where(ends <= until, allowed, pool.placeable_gang_mask(sizes, room))
                place = int(allowed.argmax())
                if not allowed[place]:
                    break
                job, gpus = int(candidates[place]), int(sizes[place])
                beyond = p == reserved.pool and ends[place] > until
                gang = pool.gang_placement(gpus, room if beyond else None)
                self._start(job, p, gpus, gang)
                if beyond:
                    for node, count in gang:
                        reserved.extra[node] -= count
                candidates = candidates[place + 1 :]

    def _preempt(self) -> None:
        """Run the jobs with the smallest priority keys; stop running jobs only if their GPUs are needed."""
        key, jobs = self.policy.priority_key, self.jobs
        assert key is not None
        room = [pool.gpus for pool in self.pools]
        fixed = {job for job in self.running if not jobs[job].preemptible}
        for job in fixed:
            room[self.running[job].pool] -= self.running[job].gpus
        active = [*(job for job in self.running if job not in fixed), *np.flatnonzero(self.waiting).tolist()]
        starting: list[tuple[int, int]] = []
        victims: list[int] = []
        for job in sorted(active, key=lambda each: key(self, each)):
            running = self.running.get(job)
            kinds: Iterable[int] = self.pools_by_speed[job] if running is None else (running.pool,)
            for p in kinds:
                gpus = int(self.preferred_gpus[p][job])
                if room[p] >= gpus:
                    room[p] -= gpus
                    if running is None:
                        starting.append((job, p))
                    break
            else:
                if running is not None:
                    victims.append(job)
        for job, p in starting:
            pool, gpus = self.pools[p], int(self.preferred_gpus[p][job])
            of_pool = [victim for victim in victims if self.running[victim].pool == p]
            while not pool.can_place_gang(gpus) and of_pool:
                victim = of_pool.pop()
                victims.remove(victim)
                self._stop(victim)
            if pool.can_place_gang(gpus):
                self._start(job, p, gpus, pool.gang_placement(gpus))
        if self.policy.has_time_quanta and self.waiting_count:
            self._set_quantum()

    def _set_quantum(self) -> None:
        """Schedule the next decision at the time when a running job has had more service than a waiting one."""
        least = min(self.service_level(int(job)) for job in np.flatnonzero(self.waiting)) + 1
        growth = self.growth
        level = self.quantum * (least if growth == 1.0 else (growth**least - 1.0) / (growth - 1.0))
        served = [(job, each.gpus) for job, each in self.running.items() if self.jobs[job].preemptible]
        gaps = [(level - self._attained_service(job)) / gpus for job, gpus in served]
        gaps = [gap for gap in gaps if gap > _ROUNDING * self.quantum]
        if gaps:
            self.queue.push(self.now + min(gaps), 2 * len(self.jobs))

    def _target_allocation(self) -> dict[int, tuple[int, int]]:
        """Return (pool, number of GPUs) of each job that should run now under the elastic policy.

        Every job gets its fewest GPUs in the order of arrival; further GPUs go where they save most time.
        """
        room, goal = [pool.gpus for pool in self.pools], {}
        for job, running in self.running.items():
            shrinks = self.waiting_count and self.jobs[job].preemptible
            goal[job] = running.pool, min(self.jobs[job].run_times[running.pool]) if shrinks else running.gpus
            room[running.pool] -= goal[job][1]
        for job in np.flatnonzero(self.waiting).tolist():
            fitting = [p for p in self.pools_by_speed[job] if min(self.jobs[job].run_times[p]) <= room[p]]
            if not fitting:
                break
            goal[job] = fitting[0], min(self.jobs[job].run_times[fitting[0]])
            room[fitting[0]] -= goal[job][1]
        gains = [entry for job in goal if (entry := self._resize_gain(job, goal[job])) is not None]
        heapq.heapify(gains)
        while gains:
            _, job, gpus = heapq.heappop(gains)
            p, before = goal[job]
            if gpus - before <= room[p]:
                room[p] -= gpus - before
                goal[job] = p, gpus
                if (entry := self._resize_gain(job, goal[job])) is not None:
                    heapq.heappush(gains, entry)
        for job, running in self.running.items():
            p, gpus = goal[job]
            seconds = self.jobs[job].run_times[p]
            left = self.remaining_time(job) / running.seconds if running.seconds else 0.0
            saved = left * (seconds[running.gpus] - seconds[gpus])
            if gpus > running.gpus and saved < _MIN_RESIZE_GAIN * self.jobs[job].restart_time:
                goal[job] = p, running.gpus
        return goal

    def _resize_gain(self, job: int, present: tuple[int, int]) -> tuple[float, int, int] | None:
        """Return what a job gains by its next larger number of GPUs; None if it cannot get more.

        Returns (change of its remaining time for each additional GPU [s], negative if shorter; the job; the larger
        number).
        """
        p, gpus = present
        seconds = self.jobs[job].run_times[p]
        larger = [g for g in seconds if g > gpus]
        if not larger or (job in self.running and not self.jobs[job].preemptible):
            return None
        left = 1.0 - self.progress[job]
        if job in self.running:
            running = self.running[job]
            left = min((running.end_time - self.now) / running.seconds, left) if running.seconds else 0.0
        following = min(larger)
        return left * (seconds[following] - seconds[gpus]) / (following - gpus), job, following


def _preferred_seconds(job: ClusterJob, pool: int) -> float:
    """Return the run time on the preferred GPUs of a kind of nodes; inf if the job does not run there."""
    return job.run_times[pool][job.preferred_gpus[pool]] if job.preferred_gpus[pool] else math.inf


def simulate_cluster(
    jobs: Sequence[ClusterJob], pools: Sequence[NodePool], policy: SchedulingPolicy, *,
    factors: Sequence[float] | None = None, quantum: float = _FIRST_SERVICE_LEVEL_GPU_SECONDS,
    growth: float = _SERVICE_LEVEL_GROWTH,
) -> ClusterRun:  # fmt: skip
    """Simulate when jobs start, stop and end on a cluster under a scheduling policy.

    Parameters
    ----------
    jobs : sequence of ClusterJob
        Jobs in any order; those that arrive at the same time are served in the order of their names.
    pools : sequence of NodePool
        Pools with all GPUs free, one for each kind of nodes; a gang never spans two pools.
    policy : SchedulingPolicy
        Order of jobs, and whether they are preempted, backfilled or resized.
    factors : sequence of float, optional
        Real run time of each job over the one that the scheduler expects.
    quantum, growth : float
        GPU-seconds of the first level of attained service, and how much longer each next level is.

    Returns
    -------
    ClusterRun
        Arrays in the order of ``jobs``.
    """
    order = sorted(range(len(jobs)), key=lambda number: (jobs[number].arrival, jobs[number].name))
    place = {number: rank for rank, number in enumerate(order)}
    ranked = [replace(j, predecessors=tuple(place[n] for n in j.predecessors)) for j in map(jobs.__getitem__, order)]
    chosen = None if factors is None else [factors[number] for number in order]
    cluster = _ClusterSimulation(ranked, pools, policy, factors=chosen, quantum=quantum, growth=growth)
    cluster.run()
    back = np.array([place[number] for number in range(len(jobs))], dtype=np.int64)

    def column(values: Sequence[float]) -> Array:
        return np.array(values, dtype=np.float64)[back] if len(jobs) else np.zeros(0)

    finish, entered = column(cluster.finish), column(cluster.queue_entry_time)
    worked = column(cluster.work_gpu_seconds)
    return ClusterRun(
        start=column(cluster.start),
        finish=finish,
        waiting_time=np.maximum(finish - entered - column(cluster.occupied_time), 0.0),
        preemptions=column(cluster.preemption_counts),
        work_gpu_seconds=worked,
        pause_gpu_seconds=column(cluster.pause_gpu_seconds),
        failure_gpu_seconds=worked * np.array([job.failure_share for job in jobs]),
        unused_gpu_seconds=cluster.unused_gpu_seconds,
        gpus=sum(pool.gpus for pool in pools),
        makespan=cluster.now - cluster.begin,
        queue_history=np.array(cluster.queue_history, dtype=np.float64).reshape(-1, 2),
        segments=tuple(segment._replace(job=order[segment.job]) for segment in cluster.segments),
    )
