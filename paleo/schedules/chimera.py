"""Chimera: two copies of the network, one down the stages and one up, each with half of the microbatches.

The stages that wait for one copy's first input work for the other. Both copies keep their parameters in step by summing
their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.schedules.base import Action, ClosedForms, Schedule, add_schedule, all_at_once

if TYPE_CHECKING:
    from paleo.schedules.base import Array, Numeric, Passes, Place


def paths(stages: int, chunks: int) -> tuple[tuple[Place, ...], ...]:
    """Stage s holds piece s of the copy that goes down and piece p − 1 − s of the one that goes up."""
    return tuple((s, 0) for s in range(stages)), tuple((s, 1) for s in reversed(range(stages)))


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """By the times that equal passes have: ``stages`` microbatches make a unit, half of them down and half up, a
    microbatch every second pass; units follow one another (direct concatenation)."""
    timed = []
    for i in range(microbatches):
        unit, place = divmod(i, stages)
        start_of_pair, up = divmod(place, 2)
        depth = stages - 1 - stage if up else stage
        start = 2 * (stages * unit + start_of_pair)
        timed.append((start + depth, Action("F", i, up)))
        timed.append((start + 2 * stages - 1 - depth, Action("B", i, up)))
    return [action for _, action in sorted(timed)]


def span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """m · (F + B) + (p − 2) · (max (F, B) + (m / p − 1) · |B − F|), B with the weights: p − 2 pauses in the first unit,
    and where F and B differ as many in each further one.

    Exact on equal stages; with B = 2F and m = p its share is the (p − 2) / (3p / 2 + p − 2) of the paper's table 2. A
    slower stage adds half of p − 2 pauses to its own work; within 4 % of the engine where the last piece has half as
    much again.
    """
    front, back = passes.forward, passes.backward + passes.weights
    further, units = max(len(front) - 2.0, 0.0), np.asarray(microbatches) / len(front)
    front_mean, back_mean = front.mean(axis=0), back.mean(axis=0)
    pauses = further * (np.maximum(front_mean, back_mean) + (units - 1.0) * np.abs(back_mean - front_mean))
    slowest = microbatches * (front + back).max(axis=0) + further * (front_mean + back_mean) / 2.0
    return np.asarray(np.maximum(microbatches * (front_mean + back_mean) + pauses, slowest))


def alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """p / 2 + 1 on the outer stages, p on the middle ones."""
    outer = np.minimum(np.asarray(stage), stages - 1.0 - np.asarray(stage))
    return np.asarray(stages / 2.0 + 1.0 + outer)


def alive_of(stage: Numeric, stages: int, microbatches: Numeric, piece: int, chunks: int) -> Numeric:
    """Of each copy as many as 1F1B holds, but no more than the half of the microbatches of a unit."""
    deep = np.asarray(stage) + 1.0 if piece else stages - np.asarray(stage)
    return np.minimum(deep, stages / 2.0)


def remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """The copy whose end is near on a stage is done first there; the other one's last passes are still to come."""
    place = np.asarray(stage) if chunk else stages - 1.0 - np.asarray(stage)
    count = np.maximum(0.0, stages / 2.0 - place)
    return count, count


CHIMERA = add_schedule(
    Schedule(
        "chimera",
        "Li and Hoefler, Chimera, SC 2021",
        order,
        ClosedForms(span, alive, all_at_once, remaining, alive_of=alive_of),
        multiple=True,
        even=True,
        paths=paths,
    ),
)
