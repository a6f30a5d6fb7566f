"""One forward, one backward: as few activations alive as the pipeline is deep."""

from __future__ import annotations

from paleo.schedules.base import Action, Schedule, add_schedule


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Fill with stages − stage − 1 forward passes, then alternate, then drain."""
    fill = min(stages - stage - 1, microbatches)
    actions = [Action("F", i) for i in range(fill)]
    for i in range(microbatches - fill):
        actions += [Action("F", fill + i), Action("B", i)]
    return actions + [Action("B", i) for i in range(microbatches - fill, microbatches)]


ONE_F_ONE_B = add_schedule(Schedule("1f1b", "Narayanan et al., PipeDream-Flush, ICML 2021", order))
