"""Event simulation of a pipeline: start and end of every pass and send of a schedule.

A deterministic list scheduler places tasks on a timeline. A task occupies one resource (a stream) for its duration,
after its predecessors have ended. A resource runs its tasks in the order in which they become ready; of tasks ready at
the same time, the first in the list runs first.

Steps with thousands of microbatches are extrapolated. Once the pipeline is full, each further microbatch adds the same
time. So only a window of microbatches is simulated, and the time of the others is added.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from paleo.errors import PlanError
from paleo.schedules.base import (
    SCHEDULES,
    ChunkLocation,
    Schedule,
    SchedulePass,
    check_schedule,
    simulated_microbatch_count,
    simulates_every_microbatch,
)


@dataclass(frozen=True, slots=True)
class Task:
    """Task of a timeline: work that occupies one resource (such as a stage) for a duration [s].

    ``predecessors`` lists the indices of the tasks that must end first. ``kind``, ``flops`` and ``bytes`` describe the
    work.
    """

    name: str
    resource: str
    duration: float
    predecessors: tuple[int, ...] = ()
    kind: str = ""
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """Simulated task with its start and end [s]."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Simulated tasks with start and end, in the order of the list of tasks."""

    events: tuple[TaskEvent, ...]

    @property
    def end_time(self) -> float:
        """Time at which the last task ends [s]."""
        return max((event.end for event in self.events), default=0.0)

    def busy_time(self, resource: str, kind: str | None = None) -> float:
        """Return the time during which a resource works [s].

        Parameters
        ----------
        resource : str
            Name of the resource.
        kind : str, optional
            Kind of tasks to count, such as ``F``. None counts all.

        Returns
        -------
        float
            Sum of the durations [s].
        """
        chosen = (e for e in self.events if e.task.resource == resource and kind in (None, e.task.kind))
        return sum(event.end - event.start for event in chosen)


def simulate_tasks(tasks: Sequence[Task]) -> Timeline:
    """Simulate tasks that need resources and wait for predecessors; return the start and end of each task.

    Parameters
    ----------
    tasks : sequence of Task
        Tasks with their resources and predecessors.

    Returns
    -------
    Timeline
        Start and end of each task [s].

    Raises
    ------
    PlanError
        If tasks wait for one another in a cycle.

    Examples
    --------
    >>> first = Task("f", "compute", 2.0)
    >>> line = simulate_tasks([first, Task("r", "network", 3.0, (0,)), Task("b", "compute", 4.0, (0,))])
    >>> line.end_time, line.events[1].start
    (6.0, 2.0)
    """
    waiting = [len(set(task.predecessors)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for predecessor in set(task.predecessors):
            followers[predecessor].append(index)
    ready = [(0.0, index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    free: dict[str, float] = {}
    earliest, events = [0.0] * len(tasks), dict[int, TaskEvent]()
    while ready:
        moment, index = heapq.heappop(ready)
        task = tasks[index]
        start = max(moment, free.get(task.resource, 0.0))
        end = free[task.resource] = start + task.duration
        events[index] = TaskEvent(task, start, end)
        for follower in followers[index]:
            earliest[follower] = max(earliest[follower], end)
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, (earliest[follower], follower))
    if len(events) < len(tasks):
        stuck = [task.name for index, task in enumerate(tasks) if index not in events]
        raise PlanError(f"{len(stuck)} tasks wait for one another: {', '.join(stuck[:5])}")
    return Timeline(tuple(events[index] for index in range(len(tasks))))


@dataclass(frozen=True, slots=True)
class ChunkPassTimes:
    """Times of one microbatch through one model chunk: forward, backward, weight gradients, and send of the output [s].

    ``backward`` is the backward pass of inputs only. ``flops`` [FLOP] and ``bytes`` [byte] are those of the three
    passes.
    """

    forward: float
    backward: float
    weight_gradients: float
    send_time: float
    flops: tuple[float, float, float] = (0.0, 0.0, 0.0)
    bytes: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class SimulatedPipeline:
    """Result of a simulated pipeline: time from the first pass to the last (``makespan``) [s], and the timeline of
    events.

    ``stage_ends`` is the time at which each stage ends its last pass [s].
    """

    makespan: float
    timeline: Timeline
    stage_ends: tuple[float, ...]


def simulate_pipeline(name: str, stages: Sequence[Sequence[ChunkPassTimes]], microbatches: int) -> SimulatedPipeline:
    """Simulate one step of a pipeline under a schedule, pass by pass.

    Parameters
    ----------
    name : str
        Name of the pipeline schedule.
    stages : sequence of sequence of ChunkPassTimes
        Pass times of each stage's chunks, over all replicas.
    microbatches : int
        Microbatches of a step.

    Returns
    -------
    SimulatedPipeline
        Total time, timeline and end of each stage [s].

    Raises
    ------
    PlanError
        If the schedule cannot run such a pipeline, or passes wait for each other in a cycle.

    Examples
    --------
    >>> uniform = [[ChunkPassTimes(1.0, 2.0, 0.0, 0.0)]] * 4
    >>> simulate_pipeline("1f1b", uniform, 8).makespan  # (m + p − 1) · (F + B)
    33.0
    """
    chosen = SCHEDULES[name]
    depth, chunks = len(stages), len(stages[0]) // chosen.replicas
    check_schedule(name, depth, chunks, microbatches)
    if simulates_every_microbatch(depth, chunks, microbatches):
        return _run(chosen, stages, microbatches)
    shape = simulated_microbatch_count(depth, chunks) + microbatches % depth
    first, second = _run(chosen, stages, shape - depth), _run(chosen, stages, shape)
    rounds = (microbatches - shape) // depth
    total = second.makespan + (second.makespan - first.makespan) * rounds
    ends = tuple(end + (end - sooner) * rounds for sooner, end in zip(first.stage_ends, second.stage_ends, strict=True))
    return SimulatedPipeline(total, second.timeline, ends)


def pipeline_events(
    name: str, stages: Sequence[Sequence[ChunkPassTimes]], microbatches: int, ends: Sequence[float]
) -> list[TaskEvent]:
    """Return the passes and sends of one step as events, for drawing a timeline.

    Parameters
    ----------
    name : str
        Name of the pipeline schedule.
    stages : sequence of sequence of ChunkPassTimes
        Pass times of each stage's chunks, over all replicas.
    microbatches : int
        Microbatches of a step.
    ends : sequence of float
        End of each stage's last pass [s].

    Returns
    -------
    list of TaskEvent
        Passes with start and end [s].

    Notes
    -----
    With very many microbatches only a window of them is listed. One event of each stage represents the others, between
    the passes that fill the pipeline and those that drain it.
    """
    played = simulate_pipeline(name, stages, microbatches)
    by_stage: dict[str, list[TaskEvent]] = {}
    for event in played.timeline.events:
        by_stage.setdefault(event.task.resource, []).append(event)
    chunks = len(stages[0]) // SCHEDULES[name].replicas
    listed = len({event.task.name for event in by_stage["stage0"] if event.task.kind == "F"}) // chunks
    if listed == microbatches:
        return list(played.timeline.events)
    events: list[TaskEvent] = []
    for stage, end in enumerate(ends):
        ordered = sorted(by_stage[f"stage{stage}"], key=lambda event: event.start)
        middle, later = ordered[: len(ordered) // 2], ordered[len(ordered) // 2 :]
        shift = end - ordered[-1].end
        others = Task(f"{microbatches - listed} more microbatches", f"stage{stage}", shift, (), "accumulate")
        events += [*middle, TaskEvent(others, later[0].start, later[0].start + shift)]
        events += [TaskEvent(event.task, event.start + shift, event.end + shift) for event in later]
    return events


@lru_cache(maxsize=4096)
def _orders(name: str, depth: int, microbatches: int, chunks: int) -> tuple[tuple[tuple[SchedulePass, ...], ...], ...]:
    """Return the passes of each stage in order, in groups that run as one."""
    chosen = SCHEDULES[name]
    return tuple(tuple(chosen.pass_groups(stage, depth, microbatches, chunks)) for stage in range(depth))


#: A pass of the whole pipeline: kind, stage, microbatch, chunk.
_PassKey = tuple[str, int, int, int]


def _run(chosen: Schedule, stages: Sequence[Sequence[ChunkPassTimes]], microbatches: int) -> SimulatedPipeline:
    """Simulate all passes and sends of a pipeline, without extrapolation."""
    depth, width = len(stages), len(stages[0])
    orders = _orders(chosen.name, depth, microbatches, width // chosen.replicas)
    neighbours, position = _Neighbours.of(chosen, stages), _positions(orders)
    passes: list[Task] = []
    sends: list[Task] = []
    for stage, order in enumerate(orders):
        previous: tuple[int, ...] = ()
        for group in order:
            sources = [neighbours.source(action, stage, position) for action in group]
            for action, (source, delay) in zip(group, sources, strict=True):
                if source is not None and delay > 0:
                    link, name = f"link{stage}.{action.kind}", f"send {action.kind}{action.microbatch}"
                    sends.append(Task(name, link, delay, (source,), "send"))
                    source = len(position) + len(sends) - 1
                previous = previous if source is None else (*previous, source)
            for action in group:
                # Build the task of one pass on its stage.
                chunk = stages[stage][action.chunk]
                label = f"{action.kind}{action.microbatch}" + (f".{action.chunk}" if len(stages[stage]) > 1 else "")
                times = chunk.forward, chunk.backward, chunk.weight_gradients
                figures = (times, chunk.flops, chunk.bytes)
                seconds, flops, moved = (_of_pass(each, action, chosen.splits_backward) for each in figures)
                passes.append(Task(label, f"stage{stage}", seconds, previous, action.kind, flops, moved))
                previous = (len(passes) - 1,)
    line = simulate_tasks([*passes, *sends])
    ends = [0.0] * depth
    for event in line.events[: len(passes)]:
        stage = int(event.task.resource.removeprefix("stage"))
        ends[stage] = max(ends[stage], event.end)
    return SimulatedPipeline(line.end_time, line, tuple(ends))


def _positions(orders: Sequence[Sequence[Sequence[SchedulePass]]]) -> dict[_PassKey, int]:
    """Return for each pass the index of the task after which its result is sent: the last pass of its group."""
    positions: dict[_PassKey, int] = {}
    for stage, order in enumerate(orders):
        for group in order:
            last = len(positions) + len(group) - 1
            positions |= {(action.kind, stage, action.microbatch, action.chunk): last for action in group}
    return positions


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """Previous and next model chunk of each model chunk on the path of its replica through the stages.

    ``send_times`` is the time to send the output of a chunk to the next chunk [s].
    """

    previous: dict[ChunkLocation, ChunkLocation]
    following: dict[ChunkLocation, ChunkLocation]
    send_times: dict[ChunkLocation, float]

    @classmethod
    def of(cls, chosen: Schedule, stages: Sequence[Sequence[ChunkPassTimes]]) -> _Neighbours:
        """Determine the neighbours of all model chunks under a schedule.

        Parameters
        ----------
        chosen : Schedule
            Schedule that decides which chunks form a path.
        stages : sequence of sequence of ChunkPassTimes
            Times of each chunk, by stage [s].

        Returns
        -------
        _Neighbours
            Previous and next chunk of each chunk, and send times [s]. Sends within a stage take no time.
        """
        paths = chosen.chunk_paths(len(stages), len(stages[0]) // chosen.replicas)
        steps = list(itertools.chain.from_iterable(map(itertools.pairwise, paths)))
        sends = {place: 0.0 if place[0] == after[0] else stages[place[0]][place[1]].send_time for place, after in steps}
        return cls({after: place for place, after in steps}, dict(steps), sends)

    def source(self, action: SchedulePass, stage: int, position: dict[_PassKey, int]) -> tuple[int | None, float]:
        """Return the index of the task whose output a pass needs, and the time to send that output.

        Parameters
        ----------
        action : SchedulePass
            Pass that reads: forward or backward, with its microbatch and chunk.
        stage : int
            Pipeline stage of the pass.
        position : dict of tuple to int
            Index of each pass among the tasks, by kind, stage, microbatch and chunk.

        Returns
        -------
        position : int or None
            Index of the needed task; None if the pass waits for no other.
        send_time : float
            Time to send its output [s].
        """
        place = (stage, action.chunk)
        if action.kind == "F" and place in self.previous:
            sender = self.previous[place]
            return position["F", sender[0], action.microbatch, sender[1]], self.send_times[sender]
        if action.kind == "B" and place in self.following:
            sender = self.following[place]
            return position["B", sender[0], action.microbatch, sender[1]], self.send_times[place]
        return (position["F", stage, action.microbatch, action.chunk], 0.0) if action.kind == "B" else (None, 0.0)


def _of_pass(values: tuple[float, float, float], action: SchedulePass, splits: bool) -> float:
    """Select the entry of a pass from values for forward, backward of inputs, and weight gradients.

    Without separate weight passes (``splits``) the backward pass includes the weight gradients.
    """
    forward, backward, weights = values
    if action.kind == "F":
        return forward
    if action.kind == "W":
        return weights
    return backward if splits else backward + weights
