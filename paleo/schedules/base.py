"""What a pipeline schedule is: for each stage an order of forward and backward passes of microbatches. One engine runs
them all."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.registry import Registry

Array = npt.NDArray[np.float64]
#: A number or an array of numbers; closed forms broadcast.
Numeric = float | Array

#: F forward, B backward (of inputs alone where W is listed apart), W backward of weights.
Pass = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One pass of one microbatch through one chunk of layers that a stage holds."""

    kind: Pass
    microbatch: int
    chunk: int = 0


Order = Callable[[int, int, int, int], list[Action]]
#: Where a piece of the network lies: (stage, chunk of that stage).
Place = tuple[int, int]
#: (stages, chunks) -> for each copy of the network the places of its pieces, from input to output.
Paths = Callable[[int, int], tuple[tuple[Place, ...], ...]]


def around(stages: int, chunks: int) -> tuple[tuple[Place, ...], ...]:
    """One copy of the network, its pieces dealt out round the stages.

    >>> around(2, 2)
    (((0, 0), (1, 0), (0, 1), (1, 1)),)
    """
    return (tuple((stage, chunk) for chunk in range(chunks) for stage in range(stages)),)


class Passes(NamedTuple):
    """Seconds of one microbatch through all chunks of each stage; the first axis is the stage, further ones
    broadcast."""

    forward: Array
    backward: Array
    weights: Array


#: Seconds from the first pass to the end of the last one: (passes, microbatches, chunks).
Span = Callable[[Passes, Numeric, int], Array]
#: Most chunk activations alive at once on a stage: (stage, stages, microbatches, chunks).
Alive = Callable[[Numeric, int, Numeric, int], Numeric]


#: Chunks' passes that a stage still makes after the last gradient of one of its chunks: (stage, stages, chunk, chunks)
#: -> (backward passes of inputs, of weights).
Behind = Callable[[Numeric, int, int, int], tuple[Numeric, Numeric]]
#: When each stage ends its last pass [s]: (span, passes, microbatches, chunks).
Ends = Callable[[Array, Passes, Numeric, int], Array]


def nothing_behind(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """The last gradient pass of a stage's only chunk is its last pass."""
    return 0.0, 0.0


def drained(span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """The last backward pass hurries up to the first stage: each stage is done by as much earlier as it is above."""
    back = passes.backward + passes.weights
    return np.asarray(span - (np.cumsum(back, axis=0) - back) / chunks)


def together(span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """No stage is done later than the slowest."""
    return np.asarray(span + 0.0 * passes.forward)


def fill_time(forward: Array, backward: Array, waiting: Array) -> Array:
    """When each stage starts the backward pass of the first microbatch [s].

    Stage s first makes ``waiting[s]`` forward passes ahead of that one. The longest way there goes through the forward
    passes down to some stage d, spends its ahead passes on the slowest of the stages above, and comes back up: max over
    d >= s of (sum of forward to d) + waiting[d] · (largest forward to d) + (sum of backward from d to s + 1).
    """
    down = np.cumsum(forward, axis=0) + waiting * np.maximum.accumulate(forward, axis=0)
    up = np.cumsum(backward, axis=0)
    return np.asarray(np.maximum.accumulate((down + up)[::-1], axis=0)[::-1] - up)


def stage_numbers(passes: Passes) -> Array:
    """0, 1, … along the stage axis, shaped to broadcast."""
    shape = (-1,) + (1,) * (passes.forward.ndim - 1)
    return np.arange(float(len(passes.forward))).reshape(shape)


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline order.

    ``order(stage, stages, microbatches, chunks)`` lists a stage's passes. ``span`` is the closed form of its time,
    ``alive`` that of ``in_flight``, ``ends`` that of each stage's last pass, ``behind`` what comes after a chunk's
    gradients; all broadcast over arrays. ``paths`` says which stage holds which piece of the network, once for each
    copy of it. ``chunks`` is how many of a copy's pieces a stage holds (None: as many as the strategy says);
    ``splits_backward``: weight gradients are passes of their own. It runs with a ``multiple`` of the stages as
    microbatches, ``least`` times the stages or more of them, on an ``even`` number of stages.
    """

    name: str
    reference: str
    order: Order
    span: Span
    alive: Alive
    chunks: int | None = 1
    splits_backward: bool = False
    multiple: bool = False
    least: int = 0
    even: bool = False
    paths: Paths = around
    ends: Ends = drained
    behind: Behind = nothing_behind

    @property
    def copies(self) -> int:
        """Copies of the network that the stages hold together."""
        return len(self.paths(2, 1))

    def pieces(self, stages: int, chunks: int) -> tuple[tuple[int, ...], ...]:
        """For each stage the pieces of the network that its chunks are.

        >>> SCHEDULES["interleaved"].pieces(2, 2)
        ((0, 2), (1, 3))
        """
        held: list[dict[int, int]] = [{} for _ in range(stages)]
        for path in self.paths(stages, chunks):
            for piece, (stage, chunk) in enumerate(path):
                held[stage][chunk] = piece
        return tuple(tuple(one[chunk] for chunk in range(len(one))) for one in held)

    def hands_on(self, stages: int, chunks: int) -> tuple[tuple[bool, ...], ...]:
        """For each chunk of each stage whether its output goes to another stage (or, behind the last piece, out)."""
        sent = [[True] * (chunks * self.copies) for _ in range(stages)]
        for path in self.paths(stages, chunks):
            for (stage, chunk), (other, _) in itertools.pairwise(path):
                sent[stage][chunk] = stage != other
        return tuple(map(tuple, sent))

    def takes(self, chunks: int) -> bool:
        """Whether a stage may hold so many chunks of a copy."""
        return chunks > 1 if self.chunks is None else chunks == self.chunks

    def runs(self, stages: int, microbatches: Numeric) -> npt.NDArray[np.bool_]:
        """Whether it can run so many microbatches on so many stages."""
        count = np.asarray(microbatches)
        fits = (count >= self.least * stages) & ((count % stages == 0) | (not self.multiple))
        return np.asarray(fits & (stages % 2 == 0 or not self.even))

    def in_flight(self, stage: int, stages: int, microbatches: int, chunks: int) -> int:
        """The most forward passes of this stage whose activations live at once (until B, or W where that is apart), by
        the order."""
        ends: Pass = "W" if self.splits_backward else "B"
        alive = most = 0
        for action in self.order(stage, stages, microbatches, chunks):
            alive += (action.kind == "F") - (action.kind == ends)
            most = max(most, alive)
        return most


SCHEDULES: Registry[Schedule] = Registry("pipeline schedule", "paleo.schedules")


def add_schedule(schedule: Schedule) -> Schedule:
    """Register a schedule under its own name."""
    return SCHEDULES.register(schedule.name)(schedule)
