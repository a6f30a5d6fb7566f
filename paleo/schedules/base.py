"""What a pipeline schedule is: for each stage an order of forward and backward passes of microbatches. One engine runs
them all."""

from __future__ import annotations

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

    ``order(stage, stages, microbatches, chunks)`` lists a stage's passes. ``chunks`` says whether a stage may hold
    several chunks, ``splits_backward`` whether weight gradients are passes of their own, ``multiple`` whether
    microbatches must be a multiple of the stages. ``span`` is the closed form of its time and ``alive`` that of
    ``in_flight``; both broadcast over arrays.
    """

    name: str
    reference: str
    order: Order
    span: Span
    alive: Alive
    chunked: bool = False
    splits_backward: bool = False
    multiple: bool = False

    def in_flight(self, stage: int, stages: int, microbatches: int, chunks: int) -> int:
        """The most forward passes of this stage whose activations live at once (until B, or W where that is apart), by
        the order."""
        ends: Pass = "W" if self.splits_backward else "B"
        alive = most = 0
        for action in self.order(stage, stages, microbatches, chunks):
            alive += (action.kind == "F") - (action.kind == ends)
            most = max(most, alive)
        return most

    def ends(self, span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
        """When each stage ends its last pass [s], at the latest: the last backward pass hurries up to the first
        stage."""
        back = passes.backward if self.splits_backward else passes.backward + passes.weights
        above = (np.cumsum(back, axis=0) - back) / chunks
        if not self.splits_backward:
            return np.asarray(span - above)
        left = np.minimum(stage_numbers(passes), np.asarray(microbatches) - 1.0) + 1.0
        return np.minimum(span, span - passes.weights[:1] - above + left * passes.weights)


SCHEDULES: Registry[Schedule] = Registry("pipeline schedule", "paleo.schedules")


def add_schedule(schedule: Schedule) -> Schedule:
    """Register a schedule under its own name."""
    return SCHEDULES.register(schedule.name)(schedule)
