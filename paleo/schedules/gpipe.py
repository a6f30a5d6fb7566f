"""All forward passes, then all backward passes."""

from __future__ import annotations

from paleo.schedules.base import Action, Schedule, add_schedule


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """F of every microbatch, then B of every microbatch from the last to the first."""
    forward = [Action("F", i) for i in range(microbatches)]
    return forward + [Action("B", i) for i in reversed(range(microbatches))]


GPIPE = add_schedule(Schedule("gpipe", "Huang et al., GPipe, NeurIPS 2019", order))
