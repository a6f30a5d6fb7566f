"""Interleaved 1F1B: each stage holds several chunks of layers, so that the pipeline fills in smaller pieces."""

from __future__ import annotations

from paleo.schedules.base import Action, Schedule, add_schedule


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Microbatches go round in groups of ``stages``; fill with 2·(stages − stage − 1) + (chunks − 1)·stages passes."""
    total = microbatches * chunks
    fill = min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
    forward = [_unit(k, stages, chunks) for k in range(total)]
    backward = [(i, chunks - 1 - chunk) for i, chunk in forward]
    actions = [Action("F", *forward[k]) for k in range(fill)]
    for k in range(total - fill):
        actions += [Action("F", *forward[fill + k]), Action("B", *backward[k])]
    return actions + [Action("B", *backward[k]) for k in range(total - fill, total)]


def _unit(k: int, stages: int, chunks: int) -> tuple[int, int]:
    """Microbatch and chunk of the k-th pass of a stage."""
    group, inside = divmod(k, stages * chunks)
    chunk, place = divmod(inside, stages)
    return group * stages + place, chunk


INTERLEAVED = add_schedule(
    Schedule("interleaved", "Narayanan et al., SC 2021", order, chunked=True, multiple=True),
)
