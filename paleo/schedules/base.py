"""What a pipeline schedule is: for each stage an order of forward and backward passes of microbatches. One engine runs them all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from paleo.registry import Registry

#: F forward, B backward (of inputs alone where W is listed apart), W backward of weights.
Pass = Literal["F", "B", "W"]


class Action(NamedTuple):
    """One pass of one microbatch through one chunk of layers that a stage holds."""

    kind: Pass
    microbatch: int
    chunk: int = 0


Order = Callable[[int, int, int, int], list[Action]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline order.

    ``order(stage, stages, microbatches, chunks)`` lists a stage's passes. ``chunks`` says whether a stage may hold several chunks,
    ``splits_backward`` whether weight gradients are passes of their own, ``multiple`` whether microbatches must be a multiple of the
    stages. ``in_flight(stage, stages, microbatches, chunks)`` is how many chunk activations live at once at most.
    """

    name: str
    reference: str
    order: Order
    chunked: bool = False
    splits_backward: bool = False
    multiple: bool = False

    def in_flight(self, stage: int, stages: int, microbatches: int, chunks: int) -> int:
        """The most forward passes of this stage whose activations live at once (until B, or W where that is apart)."""
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
