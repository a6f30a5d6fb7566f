"""A step of one rank as tasks on streams: computation, blocking collectives, gradient buckets, prefetched weights, the optimizer.

Gradient buckets travel on their own stream as soon as the backward pass has filled them, unless the run exchanges gradients after
it. Sharded parameters are gathered ahead of the section that needs them. Microbatches before the last one are one task: nothing is
unrolled that repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paleo.engine import Event, Task, Timeline, schedule
from paleo.lower import Program, Section
from paleo.parallel.mesh import Axes

#: Streams of a device.
COMPUTE, NETWORK = "compute", "communication"


@dataclass(frozen=True, slots=True)
class SectionTime:
    """Seconds of one turn of a section: forward, backward of inputs (with what is recomputed first), backward of weights, and the
    collectives that computation waits for in either direction."""

    forward: float
    backward: float
    weights: float
    forward_transfers: float
    backward_transfers: float

    @property
    def turn(self) -> float:
        """Seconds of one turn, forward and backward."""
        return self.forward + self.backward + self.weights + self.forward_transfers + self.backward_transfers


@dataclass(frozen=True, slots=True)
class Exchange:
    """How gradients and sharded parameters travel.

    ``gradients(axes, bytes)`` and ``gather(bytes)`` price one bucket. ``overlapped`` starts buckets inside backward. ``sharded``
    parameters (ZeRO-3) are gathered before each turn of a section, forward and backward.
    """

    gradients: Callable[[Axes, float], float]
    gather: Callable[[float], float]
    bucket_bytes: float
    gradient_bytes: float
    parameter_bytes: float
    overlapped: bool
    sharded: bool


def step_timeline(
    program: Program, times: Sequence[SectionTime], *, microbatches: int, exchange: Exchange, update: float
) -> Timeline:
    """The timeline of one optimizer step without a pipeline; ``update`` is what follows the last bucket [s]."""
    tasks: list[Task] = []
    if microbatches > 1:
        earlier: list[Task] = []
        _one_pass(earlier, program, times, exchange, last=False)
        once = schedule(earlier).end
        tasks.append(Task(f"{microbatches - 1} earlier microbatches", COMPUTE, once * (microbatches - 1), (), "accumulate"))
    buckets = _one_pass(tasks, program, times, exchange, last=True)
    if update > 0:
        tasks.append(Task("update", COMPUTE, update, (*_last(tasks), *buckets), "update"))
    return schedule(tasks)


def _one_pass(
    tasks: list[Task], program: Program, times: Sequence[SectionTime], exchange: Exchange, *, last: bool
) -> list[int]:
    """Forward and backward of one microbatch; returns the positions of its gradient buckets (sent with the last one, or always where
    parameters are sharded)."""
    pairs = list(zip(program.sections, times, strict=True))
    gathers = _Prefetch(tasks, exchange)
    for section, time in pairs:
        turns = section.repeat if exchange.sharded and section.parameters else 1
        for _ in range(turns):
            gathers.before(section)
            _turns(tasks, section.name, "forward", section.repeat // turns, time.forward, time.forward_transfers, gathers.awaited)
    pending: dict[Axes, float] = {}
    buckets: list[int] = []
    sends = last or exchange.sharded
    for section, time in reversed(pairs):
        turns = section.repeat if (exchange.overlapped or exchange.sharded) and section.gradients and sends else 1
        for _ in range(turns):
            gathers.before(section)
            compute = time.backward + time.weights
            _turns(tasks, section.name, "backward", section.repeat // turns, compute, time.backward_transfers, gathers.awaited)
            _collect(pending, section, section.repeat // turns, exchange.gradient_bytes)
            if exchange.overlapped and sends:
                buckets += _flush(tasks, pending, exchange, least=exchange.bucket_bytes)
    return buckets + (_flush(tasks, pending, exchange, least=0.0) if sends else [])


def _collect(pending: dict[Axes, float], section: Section, turns: int, gradient_bytes: float) -> None:
    for gradient in section.gradients:
        pending[gradient.axes] = pending.get(gradient.axes, 0.0) + gradient.elements * gradient_bytes * turns


class _Prefetch:
    """Gathers of sharded parameters, each issued while the section before it computes: two sets of weights live at once."""

    def __init__(self, tasks: list[Task], exchange: Exchange) -> None:
        self.tasks, self.exchange = tasks, exchange
        self.awaited: tuple[int, ...] = ()
        self._earlier: tuple[int, ...] = ()

    def before(self, section: Section) -> None:
        """Gather what the next turn of ``section`` needs, once the turn before the last has ended."""
        if not self.exchange.sharded or not section.parameters:
            self.awaited = ()
            return
        latest = _last(self.tasks)
        time = self.exchange.gather(section.parameters * self.exchange.parameter_bytes)
        self.tasks.append(Task(f"weights of {section.name}", NETWORK, time, self._earlier, "gather"))
        self.awaited, self._earlier = (len(self.tasks) - 1,), latest


_BESIDE = frozenset({"bucket", "gather"})


def _last(tasks: list[Task]) -> tuple[int, ...]:
    """The latest task of the computing chain: everything on that chain follows one another."""
    return next(((i,) for i in range(len(tasks) - 1, -1, -1) if tasks[i].kind not in _BESIDE), ())


def _turns(
    tasks: list[Task], name: str, kind: str, turns: int, compute: float, transfers: float, awaited: tuple[int, ...]
) -> None:
    """Turns of a section in one direction, as one stretch of computing and one of blocking collectives."""
    tasks.append(Task(name, COMPUTE, compute * turns, (*_last(tasks), *awaited), kind))
    if transfers > 0:
        tasks.append(Task(f"{name} collectives", COMPUTE, transfers * turns, _last(tasks), "transfer"))


def _flush(tasks: list[Task], pending: dict[Axes, float], exchange: Exchange, *, least: float) -> list[int]:
    """Send what has gathered for each set of axes, once it is ``least`` bytes."""
    sent = []
    for axes, size in pending.items():
        if axes and size > 0 and size >= least:
            name = f"gradients over {'+'.join(axes)}"
            tasks.append(Task(name, NETWORK, exchange.gradients(axes, size), _last(tasks), "bucket"))
            sent.append(len(tasks) - 1)
            pending[axes] = 0.0
    return sent


def busy(events: Sequence[Event], *kinds: str) -> float:
    """Seconds of the events of those kinds."""
    return sum(event.end - event.start for event in events if event.task.kind in kinds)
