"""Interleaved 1F1B: each stage holds several chunks of layers, so that the pipeline fills in smaller pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.schedules.base import Action, ClosedForms, Schedule, add_schedule

if TYPE_CHECKING:
    from paleo.schedules.base import Array, Numeric, Passes


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


def span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """m · max (F + B) + (Σ − max) / chunks.

    Exact on equal chunks. A heavier last chunk makes the engine up to 1 % slower at a tenth more work (most with one
    round alone).
    """
    work = passes.forward + passes.backward + passes.weights
    slowest = work.max(axis=0)
    return np.asarray(microbatches * slowest + (work.sum(axis=0) - slowest) / chunks)


def alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """The passes that fill the stage, and one."""
    fill = 2.0 * (stages - np.asarray(stage) - 1.0) + (chunks - 1.0) * stages
    return np.minimum(fill + 1.0, np.asarray(microbatches) * float(chunks))


def alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """``stages`` microbatches of a chunk, then as many of the next. So the last stage has one of its last chunk, with
    the output layer and the loss: its backward pass is the next that it makes.

    >>> [float(alive_of(3, 4, 8, chunk, 3)) for chunk in range(3)]
    [4.0, 4.0, 1.0]
    """
    rounds, remainder = np.divmod(alive(stage, stages, microbatches, chunks), float(stages * chunks))
    return np.asarray(rounds * stages + np.clip(remainder - chunk * stages, 0.0, float(stages)))


def remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """The last round goes backward through the chunks, ``stages`` microbatches each."""
    return float(chunk * stages), float(chunk * stages)


INTERLEAVED = add_schedule(
    Schedule(
        "interleaved",
        "Narayanan et al., SC 2021",
        order,
        ClosedForms(span, alive, remaining=remaining, alive_of=alive_of),
        chunks=None,
        multiple=True,
    ),
)
