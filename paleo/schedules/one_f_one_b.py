"""One forward, one backward: at most as many activations alive as the pipeline has stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.schedules.base import Action, ClosedForms, Schedule, add_schedule, none_remaining, running_max, running_sum

if TYPE_CHECKING:
    from paleo.schedules.base import Array, Numeric, Passes


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Fill with stages − stage − 1 forward passes, then alternate, then drain."""
    fill = min(stages - stage - 1, microbatches)
    actions = [Action("F", i) for i in range(fill)]
    for i in range(microbatches - fill):
        actions += [Action("F", fill + i), Action("B", i)]
    return actions + [Action("B", i) for i in range(microbatches - fill, microbatches)]


def span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """The longest way through the passes, exact on any stages; m · max (F + B) + what the others add where the last is
    slowest.

    Each stage may be the one that sets the pace: it fills, makes m − 1 − w pairs of passes (w ahead of its first
    backward pass), and drains, which is filling seen from the end. A stage with all m ahead has no pairs: it makes all
    forward, then all backward.
    """
    front, back = passes.forward, passes.backward + passes.weights
    most = np.asarray(microbatches) - 1.0
    ahead = np.minimum(len(front) - 1.0 - stage_numbers(passes), most)
    fill, drain = fill_time(front, back, ahead), fill_time(back, front, ahead)
    all_back = fill + running_sum(back) + most * running_max(back)
    all_front = drain + running_sum(front) + most * running_max(front)
    pairs = fill + (most - ahead) * (front + back) + drain
    return np.asarray(np.where(ahead < most, pairs, np.maximum(all_back, all_front)).max(axis=0))


def fill_time(forward: Array, backward: Array, waiting: Array) -> Array:
    """When each stage starts the backward pass of the first microbatch [s].

    Stage s first makes ``waiting[s]`` forward passes ahead of that one. The longest way there goes through the forward
    passes down to some stage d, spends its ahead passes on the slowest of the stages above, and comes back up: max over
    d >= s of (sum of forward to d) + waiting[d] · (largest forward to d) + (sum of backward from d to s + 1).
    """
    down, up = running_sum(forward) + waiting * running_max(forward), running_sum(backward)
    return np.asarray(running_max((down + up)[::-1])[::-1] - up)


def stage_numbers(passes: Passes) -> Array:
    """0, 1, … along the stage axis, shaped to broadcast."""
    shape = (-1,) + (1,) * (passes.forward.ndim - 1)
    return np.arange(float(len(passes.forward))).reshape(shape)


def alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """As many as there are stages from here on."""
    return np.asarray(np.minimum(stages - np.asarray(stage), microbatches), dtype=np.float64)


ONE_F_ONE_B = add_schedule(
    Schedule(
        "1f1b",
        "Narayanan et al., PipeDream-Flush, ICML 2021",
        order,
        ClosedForms(span, alive, remaining=none_remaining, exact="any"),
    )
)
