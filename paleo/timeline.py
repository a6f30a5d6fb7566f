"""A step of one rank as tasks on streams: computation, blocking collectives, gradient buckets, the optimizer.

Gradient buckets travel on their own stream as soon as the backward pass has filled them, unless the run exchanges gradients after
it. Microbatches before the last one only accumulate, so they are one task: nothing is unrolled that repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from paleo.engine import Task, Timeline, schedule
from paleo.lower import Program, Section

#: Streams of a device.
COMPUTE, NETWORK = "compute", "communication"


@dataclass(frozen=True, slots=True)
class SectionTime:
    """Seconds of one turn of a section on the computing stream, and of the collectives that it waits for."""

    forward: float
    backward: float
    forward_transfers: float
    backward_transfers: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """How gradients are summed: ``time(axes, bytes)`` prices one bucket; ``overlapped`` starts it inside backward."""

    time: Callable[[tuple[str, ...], float], float]
    bucket_bytes: float
    gradient_bytes: float
    overlapped: bool


def step_timeline(
    program: Program, times: Sequence[SectionTime], *, microbatches: int, exchange: Exchange, update: float
) -> Timeline:
    """The timeline of one optimizer step; ``update`` is the optimizer's time [s]."""
    tasks: list[Task] = []
    once = sum(_pass_time(section, time) for section, time in zip(program.sections, times, strict=True))
    if microbatches > 1:
        tasks.append(Task(f"{microbatches - 1} earlier microbatches", COMPUTE, once * (microbatches - 1), (), "accumulate"))
    for section, time in zip(program.sections, times, strict=True):
        _turns(tasks, section.name, "forward", section.repeat, time.forward, time.forward_transfers)
    buckets = _backward(tasks, program, times, exchange)
    if update > 0:
        tasks.append(Task("update", COMPUTE, update, (*_last(tasks), *buckets), "update"))
    return schedule(tasks)


def _pass_time(section: Section, time: SectionTime) -> float:
    return section.repeat * (time.forward + time.backward + time.forward_transfers + time.backward_transfers)


def _last(tasks: list[Task]) -> tuple[int, ...]:
    """The latest task of the computing chain: everything on that chain follows one another."""
    return next(((i,) for i in range(len(tasks) - 1, -1, -1) if tasks[i].kind != "bucket"), ())


def _turns(tasks: list[Task], name: str, kind: str, turns: int, compute: float, transfers: float) -> None:
    """All turns of a section in one direction, as one stretch of computing and one of blocking collectives."""
    tasks.append(Task(name, COMPUTE, compute * turns, _last(tasks), kind))
    if transfers > 0:
        tasks.append(Task(f"{name} collectives", NETWORK, transfers * turns, _last(tasks), "transfer"))


def _backward(tasks: list[Task], program: Program, times: Sequence[SectionTime], exchange: Exchange) -> list[int]:
    """Backward sections in reverse order; returns the positions of the gradient buckets, in the order they fill."""
    pending: dict[tuple[str, ...], float] = {}
    buckets: list[int] = []
    for section, time in zip(reversed(program.sections), reversed(times), strict=True):
        turns = section.repeat if exchange.overlapped and section.gradients else 1
        for _ in range(turns):
            _turns(tasks, section.name, "backward", section.repeat // turns, time.backward, time.backward_transfers)
            for gradient in section.gradients:
                bytes_ = gradient.elements * exchange.gradient_bytes * (section.repeat // turns)
                pending[gradient.axes] = pending.get(gradient.axes, 0.0) + bytes_
            if exchange.overlapped:
                buckets += _flush(tasks, pending, exchange, least=exchange.bucket_bytes)
    return buckets + _flush(tasks, pending, exchange, least=0.0)


def _flush(tasks: list[Task], pending: dict[tuple[str, ...], float], exchange: Exchange, *, least: float) -> Iterable[int]:
    """Send what has gathered for each set of axes, once it is ``least`` bytes."""
    sent = []
    for axes, size in pending.items():
        if not axes or size <= 0 or size < least:
            continue
        tasks.append(Task(f"gradients over {'+'.join(axes)}", NETWORK, exchange.time(axes, size), _last(tasks), "bucket"))
        sent.append(len(tasks) - 1)
        pending[axes] = 0.0
    return sent
