"""Zero bubble, handcrafted schedule 1: weight gradients fill the bubble at the memory of 1F1B."""

from __future__ import annotations

from paleo.schedules.base import Action, Schedule, add_schedule


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """1F1B with B for inputs alone; the W of a microbatch comes ``stage`` microbatches later, so that the last B's hurry down."""
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


ZB_H1 = add_schedule(
    Schedule("zb-h1", "Qi et al., Zero bubble pipeline parallelism, ICLR 2024", order, splits_backward=True),
)
