"""Tasks and resources to a timeline: a list scheduler, tiny and deterministic.

A task occupies one resource (a stream) for its duration, after the tasks that it waits for. A resource takes its tasks
in the order in which they become ready; ties go to the task that was listed first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from paleo.errors import PlanError


@dataclass(frozen=True, slots=True)
class Task:
    """``after`` holds the positions, in the list of tasks, of those that must end first; ``flops`` and ``bytes`` say
    what is done."""

    name: str
    resource: str
    duration: float
    after: tuple[int, ...] = ()
    kind: str = ""
    flops: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """When a task ran [s]."""

    task: Task
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Events in the order of the tasks."""

    events: tuple[Event, ...]

    @property
    def end(self) -> float:
        """When the last task ends [s]."""
        return max((event.end for event in self.events), default=0.0)

    def busy(self, resource: str, kind: str | None = None) -> float:
        """Time that a resource worked, on tasks of one kind where a kind is given [s]."""
        chosen = (e for e in self.events if e.task.resource == resource and kind in (None, e.task.kind))
        return sum(event.end - event.start for event in chosen)


def schedule(tasks: Sequence[Task]) -> Timeline:
    """The timeline of ``tasks``; PlanError names those that wait for one another in a circle.

    >>> line = schedule([Task("f", "compute", 2.0), Task("r", "network", 3.0, (0,)), Task("b", "compute", 4.0, (0,))])
    >>> line.end, line.events[1].start
    (6.0, 2.0)
    """
    waiting = [len(set(task.after)) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in set(task.after):
            followers[before].append(index)
    ready = [(0.0, index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    free: dict[str, float] = {}
    earliest, events = [0.0] * len(tasks), dict[int, Event]()
    while ready:
        moment, index = heapq.heappop(ready)
        task = tasks[index]
        start = max(moment, free.get(task.resource, 0.0))
        end = free[task.resource] = start + task.duration
        events[index] = Event(task, start, end)
        for follower in followers[index]:
            earliest[follower] = max(earliest[follower], end)
            waiting[follower] -= 1
            if waiting[follower] == 0:
                heapq.heappush(ready, (earliest[follower], follower))
    if len(events) < len(tasks):
        stuck = [task.name for index, task in enumerate(tasks) if index not in events]
        raise PlanError(f"{len(stuck)} tasks wait for one another: {', '.join(stuck[:5])}")
    return Timeline(tuple(events[index] for index in range(len(tasks))))
