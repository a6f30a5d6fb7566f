"""Zero bubble, handcrafted schedule 1: weight gradients fill the bubble at the memory of 1F1B."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.schedules.base import Action, ClosedForms, Schedule, add_schedule, none_remaining, running_sum
from paleo.schedules.one_f_one_b import fill_time, stage_numbers

if TYPE_CHECKING:
    from paleo.schedules.base import Array, Numeric, Passes


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B with B for inputs alone; the W of a microbatch comes ``stage`` microbatches later, so that the last B's
    hurry down."""
    fill = min(stages - stage - 1, microbatches)
    actions = [Action("F", i) for i in range(fill)]
    weights = 0
    for i in range(microbatches):
        if fill + i < microbatches:
            actions.append(Action("F", fill + i))
        actions.append(Action("B", i))
        if i >= stage:
            actions.append(Action("W", weights))
            weights += 1
    return actions + [Action("W", i) for i in range(weights, microbatches)]


def span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """The longest of three kinds of ways through the passes: m (F + B + W) + (p − 1)(F + B − W) on equal stages.

    From a stage's first B on: all its passes; its passes to the last B and on up; its pairs to the last F, then drain.
    Exact on equal stages and within 1 % where the first and last differ by half; ways that change stages midway are
    left out.
    """
    front, back, weights = passes
    stage, most = stage_numbers(passes), np.asarray(microbatches) - 1.0
    ahead = np.minimum(len(front) - 1.0 - stage, most)
    fill, drain = fill_time(front, back, ahead), fill_time(back, front, ahead)
    begun = fill + (most - ahead) * front
    alone = begun + (most + 1.0) * (back + weights)
    above, last = running_sum(back) - back, weights[:1]
    upwards = begun + (most + 1.0) * back + np.maximum(0.0, most - stage) * weights + above + last
    paired = begun + (most - ahead) * back + np.maximum(0.0, most - ahead - stage) * weights + drain + last
    return np.asarray(np.maximum(np.maximum(alone, upwards), np.where(ahead < most, paired, 0.0)).max(axis=0))


def alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """The W of a microbatch comes ``stage`` microbatches late: as many as there are stages everywhere."""
    return np.minimum(stages + 0.0 * np.asarray(stage), microbatches)


def ends(span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """Ends of the stages: after its last B a stage runs the W's that it deferred."""
    above = running_sum(passes.backward) - passes.backward
    left = np.minimum(stage_numbers(passes), np.asarray(microbatches) - 1.0) + 1.0
    return np.minimum(span, span - passes.weights[:1] - above + left * passes.weights)


_PAPER = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024"
ZB_H1 = add_schedule(
    Schedule("zb-h1", _PAPER, order, ClosedForms(span, alive, ends, none_remaining, least=1.0), splits_backward=True)
)
