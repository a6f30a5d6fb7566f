"""Zero bubble in a V: two chunks a stage, down the stages and back up, at the memory of 1F1B.

The loss is on the first stage, beside the input. So each stage gets the first backward pass early, and weight gradients
and the second chunk fill what 1F1B leaves idle: on equal passes (F = B = W) every stage works without a pause, but for
the p − 1 half passes before the last one has its first input.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from paleo.schedules.base import (
    Action,
    ClosedForms,
    Pass,
    Schedule,
    add_schedule,
    all_at_once,
)

if TYPE_CHECKING:
    from paleo.schedules.base import (
        Array,
        Numeric,
        Passes,
        Place,
    )

#: Pass and chunk.
_Kind = tuple[Pass, int]
_F0: _Kind = ("F", 0)
_B0: _Kind = ("B", 0)
_W0: _Kind = ("W", 0)
_F1: _Kind = ("F", 1)
_B1: _Kind = ("B", 1)
_W1: _Kind = ("W", 1)


def paths(stages: int, chunks: int) -> tuple[tuple[Place, ...], ...]:
    """Down the first chunks, up the second ones: stage s holds pieces s and 2p − 1 − s."""
    return (tuple((s, 0) for s in range(stages)) + tuple((s, 1) for s in reversed(range(stages))),)


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Fill with forward passes of the first chunk until the second one's input is there; keep both going; drain."""
    left = stages - stage
    fill = [_F0] * (2 * left - 1) + [_F1, _F0] * stage + [_F1, _B1, _W1] * left
    round_of_passes = [_F0, _B0, _W0, _F1, _B1, _W1]
    drain = [_B0, _B1] * stage + [_B0, _W0] * left + [_W1] * stage + [_W0] * stage
    count: Counter[_Kind] = Counter()
    actions = []
    for kind, chunk in fill + round_of_passes * (microbatches - stages) + drain:
        microbatch = count[kind, chunk]
        count[kind, chunk] += 1
        if microbatch < microbatches:  # the last rounds have no more F of the first chunk to make
            actions.append(Action(kind, microbatch, chunk))
    return actions


def span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """m · (F + B + W) and the pauses; with passes of a chunk f, b, w and n = p − 1 these are the largest of n·b, b +
    (n − 1)·w, f + (n − 1)·w, (2n − 1)·f − (n − 1)·b, 2n·f − n·b − w, 2n·(b − w), (2n − 1)·f + b − 2n·w and 2n·f − (2n +
    1)·w.

    These are the longest ways through the engine's passes: exact on equal stages, and n·f where f = b = w. A slower
    stage keeps the second and third alone, as it waits for nobody; then it is up to 5 % too long at 2p microbatches (a
    last piece with half as much again), less at more.
    """
    work = passes.forward + passes.backward + passes.weights
    f, b, w = (each.mean(axis=0) / chunks for each in passes)
    n = len(work) - 1.0
    last = np.maximum(b, f) + (n - 1.0) * w
    pauses = (
        n * b,
        (2.0 * n - 1.0) * f - (n - 1.0) * b,
        2.0 * n * f - n * b - w,
        2.0 * n * (b - w),
        (2.0 * n - 1.0) * f + b - 2.0 * n * w,
        2.0 * n * f - (2.0 * n + 1.0) * w,
    )
    paced = microbatches * work.mean(axis=0) + np.maximum.reduce(pauses)
    return np.asarray(np.maximum(paced, microbatches * work.max(axis=0) + last))


def alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Two chunks for each stage, everywhere: what the first stage of 1F1B holds."""
    return 2.0 * stages + 0.0 * np.asarray(stage)


def alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """Activations alive of the second chunk of each stage: as many as the stage's depth; one on the first stage, where
    the network ends."""
    second = np.asarray(stage) + 1.0
    return second if chunk else 2.0 * stages - second


def remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """After the second chunk's last W a stage makes the W of the first chunk that it put off; the first stage has put
    off none, and drains."""
    if chunk == 0:
        return 0.0, 0.0
    first = np.asarray(stage) == 0
    return np.where(first, float(stages), 0.0), np.where(first, float(stages), stage)


ZB_V = add_schedule(
    Schedule(
        "zb-v",
        "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (section 6)",
        order,
        ClosedForms(span, alive, all_at_once, remaining, alive_of=alive_of),
        chunks=2,
        splits_backward=True,
        least=2,
        paths=paths,
    ),
)
