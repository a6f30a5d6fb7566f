"""A step of one rank as tasks on streams: computation, blocking collectives, gradient buckets, prefetched weights, the
optimizer.

Gradient buckets travel on their own stream as soon as the backward pass has filled them, unless the run exchanges
gradients after it. Sharded parameters are gathered ahead of the section that needs them. Microbatches before the last
one are one task: nothing is unrolled that repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from paleo.lowering.program import Program, Section
from paleo.parallel.mesh import Axes
from paleo.schedules.engine import Event, Task, Timeline, schedule

#: Streams of a device.
COMPUTE, NETWORK = "compute", "communication"
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class SectionTime:
    """Seconds of one turn of a section: forward, backward of inputs (with what is recomputed first), backward of
    weights, and the collectives that computation waits for in either direction."""

    forward: float
    backward: float
    weights: float
    forward_transfers: float
    backward_transfers: float


@dataclass(frozen=True, slots=True)
class Buckets:
    """How gradients and sharded parameters travel.

    ``overlapped`` starts buckets of ``least`` bytes inside backward, else all go out after it. ``sharded`` parameters
    (ZeRO-3) are gathered before each turn of a section, forward and backward, and their gradients are sent with every
    microbatch.
    """

    least: float
    gradient_bytes: float
    overlapped: bool
    sharded: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """``count`` turns of a section in one direction, as one stretch. ``gathers``: they wait for the section's
    parameters; ``buckets``: axes and bytes of the gradients that go out after them."""

    section: int
    direction: Direction
    count: int
    gathers: bool = False
    buckets: tuple[tuple[Axes, float], ...] = ()


def turns(program: Program, buckets: Buckets, *, last: bool) -> list[Turn]:
    """Forward and backward of one microbatch; gradients go out with the ``last`` one, or always where parameters are
    sharded."""
    found: list[Turn] = []
    sends = last or buckets.sharded
    for index, section in enumerate(program.sections):
        gathers = bool(buckets.sharded and section.parameters)
        times = section.repeat if gathers else 1
        found += [Turn(index, "forward", section.repeat // times, gathers)] * times
    pending: dict[Axes, float] = {}
    for index, section in reversed(list(enumerate(program.sections))):
        gathers = bool(buckets.sharded and section.parameters and section.goes_back)
        sent_apart = (buckets.overlapped or buckets.sharded) and section.gradients and sends
        times = section.repeat if sent_apart or gathers else 1
        for _ in range(times):
            _collect(pending, section, section.repeat // times, buckets.gradient_bytes)
            sent = _flush(pending, buckets.least) if buckets.overlapped and sends else ()
            found.append(Turn(index, "backward", section.repeat // times, gathers, sent))
    if sends and found:
        end = found[-1]
        found[-1] = Turn(end.section, end.direction, end.count, end.gathers, end.buckets + _flush(pending, 0.0))
    return found


def _collect(pending: dict[Axes, float], section: Section, times: int, gradient_bytes: float) -> None:
    for gradient in section.gradients:
        pending[gradient.axes] = pending.get(gradient.axes, 0.0) + gradient.elements * gradient_bytes * times


def _flush(pending: dict[Axes, float], least: float) -> tuple[tuple[Axes, float], ...]:
    """What has gathered for each set of axes, once it is ``least`` bytes."""
    sent = tuple((axes, size) for axes, size in pending.items() if axes and size > 0 and size >= least)
    for axes, _ in sent:
        pending[axes] = 0.0
    return sent


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of a section's turn in the last microbatch and in ``earlier`` ones, and of a gradient bucket; seconds and
    bytes in which a section's parameters are gathered, by its name; ``counts(section, direction)``: FLOP and bytes of a
    turn's kernels, and bytes of the collectives that it waits for."""

    times: Sequence[SectionTime]
    earlier: Sequence[SectionTime]
    counts: Callable[[Section, Direction], tuple[float, float, float]]
    bucket: Callable[[Axes, float], float]
    gather: Mapping[str, Sequence[float]]


def step_timeline(program: Program, prices: Prices, *, microbatches: int, buckets: Buckets, update: float) -> Timeline:
    """The timeline of one optimizer step without a pipeline; ``update`` is what follows the last bucket [s]."""
    tasks: list[Task] = []
    if microbatches > 1:
        earlier: list[Task] = []
        _tasks(earlier, program, replace(prices, times=prices.earlier), turns(program, buckets, last=False))
        once = schedule(earlier).end
        tasks.append(
            Task(f"{microbatches - 1} earlier microbatches", COMPUTE, once * (microbatches - 1), (), "accumulate")
        )
    sent = _tasks(tasks, program, prices, turns(program, buckets, last=True))
    if update > 0:
        tasks.append(Task("update", COMPUTE, update, (*_last(tasks), *sent), "update"))
    return schedule(tasks)


def _tasks(tasks: list[Task], program: Program, prices: Prices, order: Sequence[Turn]) -> list[int]:
    """Adds one pass; returns the positions of its gradient buckets. A gather starts once the turn before the last has
    ended, so that two sets of weights live at once."""
    sent: list[int] = []
    issued: tuple[int, ...] = ()
    for turn in order:
        section = program.sections[turn.section]
        awaited: tuple[int, ...] = ()
        if turn.gathers:
            latest = _last(tasks)
            seconds, moved = prices.gather[section.name]
            tasks.append(Task(f"weights of {section.name}", NETWORK, seconds, issued, "gather", bytes=moved))
            awaited, issued = (len(tasks) - 1,), latest
        counts = prices.counts(section, turn.direction)
        _compute(tasks, section.name, turn, prices.times[turn.section], counts, awaited)
        for axes, size in turn.buckets:
            name = f"gradients over {'+'.join(axes)}"
            tasks.append(Task(name, NETWORK, prices.bucket(axes, size), _last(tasks), "bucket", bytes=size))
            sent.append(len(tasks) - 1)
    return sent


_BESIDE = frozenset({"bucket", "gather"})


def _last(tasks: list[Task]) -> tuple[int, ...]:
    """The latest task of the computing chain: everything on that chain follows one another."""
    return next(((i,) for i in range(len(tasks) - 1, -1, -1) if tasks[i].kind not in _BESIDE), ())


def _compute(
    tasks: list[Task],
    name: str,
    turn: Turn,
    time: SectionTime,
    counts: tuple[float, float, float],
    awaited: tuple[int, ...],
) -> None:
    """Turns of a section in one direction, as one stretch of computing and one of blocking collectives."""
    forward = turn.direction == "forward"
    seconds = time.forward if forward else time.backward + time.weights
    transfers = time.forward_transfers if forward else time.backward_transfers
    flops, moved, sent = (turn.count * one for one in counts)
    before = (*_last(tasks), *awaited)
    tasks.append(Task(name, COMPUTE, seconds * turn.count, before, turn.direction, flops, moved))
    if transfers > 0:
        waiting = Task(f"{name} collectives", COMPUTE, transfers * turn.count, _last(tasks), "transfer", bytes=sent)
        tasks.append(waiting)


def busy(events: Sequence[Event], *kinds: str) -> float:
    """Seconds of the events of those kinds."""
    return sum(event.end - event.start for event in events if event.task.kind in kinds)
