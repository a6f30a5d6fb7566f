"""The list scheduler against timelines drawn by hand."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paleo.errors import PlanError
from paleo.schedules.pipeline_simulation import Task, simulate_tasks


def starts(*tasks: Task) -> list[float]:
    return [event.start for event in simulate_tasks(tasks).events]


def test_one_resource_takes_tasks_in_order() -> None:
    assert starts(Task("a", "gpu", 2.0), Task("b", "gpu", 3.0), Task("c", "gpu", 1.0)) == [0.0, 2.0, 5.0]


def test_two_resources_overlap() -> None:
    """f on the device, then b; the reduction of f beside b; the update after both."""
    line = simulate_tasks([
        Task("f", "gpu", 2.0), Task("r", "net", 5.0, (0,)), Task("b", "gpu", 4.0, (0,)), Task("u", "gpu", 1.0, (1, 2))
    ])  # fmt: skip
    assert [(event.start, event.end) for event in line.events] == [(0, 2), (2, 7), (2, 6), (7, 8)]
    assert line.end_time == 8.0
    assert (line.busy_time("gpu"), line.busy_time("net")) == (7.0, 5.0)


def test_who_is_ready_first_goes_first_and_ties_go_by_position() -> None:
    """c becomes ready at 1, b at 3: the network takes c first although b is listed first."""
    first = (Task("x", "gpu", 1.0), Task("y", "cpu", 3.0))
    assert starts(*first, Task("b", "net", 2.0, (1,)), Task("c", "net", 9.0, (0,))) == [0, 0, 10, 1]
    assert starts(Task("a", "net", 1.0), Task("b", "net", 1.0)) == [0, 1]


def test_tasks_may_be_listed_before_what_they_wait_for() -> None:
    assert starts(Task("late", "gpu", 1.0, (1,)), Task("early", "gpu", 2.0)) == [2.0, 0.0]


def test_kinds_are_told_apart() -> None:
    line = simulate_tasks([Task("f", "gpu", 1.0, kind="F"), Task("b", "gpu", 2.0, kind="B")])
    assert (line.busy_time("gpu", "F"), line.busy_time("gpu", "B"), line.busy_time("gpu", "W")) == (1.0, 2.0, 0.0)


def test_nothing_takes_no_time() -> None:
    assert simulate_tasks([]).end_time == 0.0
    assert starts(Task("a", "gpu", 0.0), Task("b", "gpu", 0.0, (0,))) == [0.0, 0.0]


def test_a_dependency_named_twice_counts_once() -> None:
    assert starts(Task("a", "gpu", 1.0), Task("b", "net", 1.0, (0, 0))) == [0.0, 1.0]


def test_a_circle_is_named() -> None:
    with pytest.raises(PlanError, match="2 tasks wait for one another: a, b"):
        simulate_tasks([Task("a", "gpu", 1.0, (1,)), Task("b", "gpu", 1.0, (0,)), Task("c", "gpu", 1.0)])
    with pytest.raises(PlanError, match="1 tasks"):
        simulate_tasks([Task("self", "gpu", 1.0, (0,))])


@st.composite
def programs(draw: st.DrawFn) -> list[Task]:
    count = draw(st.integers(1, 12))
    return [
        Task(
            f"t{i}",
            draw(st.sampled_from(["gpu", "net", "disk"])),
            draw(st.floats(0, 10)),
            tuple(draw(st.lists(st.integers(0, i - 1), max_size=3))) if i else (),
        )
        for i in range(count)
    ]


@given(programs())
def test_no_task_starts_early_and_no_resource_works_twice(tasks: list[Task]) -> None:
    line = simulate_tasks(tasks)
    for event in line.events:
        assert all(line.events[before].end <= event.start for before in event.task.predecessors)
        assert event.end == event.start + event.task.duration
    for resource in {task.resource for task in tasks}:
        events = sorted((e.start, e.end) for e in line.events if e.task.resource == resource)
        assert all(a[1] <= b[0] for a, b in pairwise(events))
        assert line.busy_time(resource) == pytest.approx(sum(t.duration for t in tasks if t.resource == resource))
        assert line.end_time >= line.busy_time(resource) - 1e-9
    assert line.end_time <= sum(task.duration for task in tasks) + 1e-9
    assert simulate_tasks(tasks) == line
