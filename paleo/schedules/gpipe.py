"""All forward passes, then all backward passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.schedules.base import Action, ClosedForms, Schedule, add_schedule, none_remaining

if TYPE_CHECKING:
    from paleo.schedules.base import Array, Numeric, Passes


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """F of every microbatch, then B of every microbatch from the last to the first."""
    forward = [Action("F", i) for i in range(microbatches)]
    return forward + [Action("B", i) for i in reversed(range(microbatches))]


def span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """ΣF + (m − 1) max F + Σ(B + W) + (m − 1) max (B + W): exact on any stages."""
    back, more = passes.backward + passes.weights, np.asarray(microbatches) - 1.0
    return np.asarray(
        passes.forward.sum(axis=0) + back.sum(axis=0) + more * (passes.forward.max(axis=0) + back.max(axis=0))
    )


def alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """All microbatches of the step."""
    return microbatches


GPIPE = add_schedule(
    Schedule(
        "gpipe",
        "Huang et al., GPipe, NeurIPS 2019",
        order,
        ClosedForms(span, alive, remaining=none_remaining, exact="any"),
    )
)
