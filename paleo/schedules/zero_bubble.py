"""Zero-bubble schedules: weight gradients are separate passes that fill the pauses of a pipeline.

``zb-h1`` is the paper's handcrafted schedule 1, with the activation memory of 1F1B. ``zb-v`` places two chunks a stage
in a V, down the stages and back up, with the same memory. Its loss is on the first stage, where its input is, too. So
each stage can start backward passes early, and weight gradients and the second chunk fill what 1F1B leaves idle. On
equal passes (F = B = W) no stage pauses, except for the p − 1 half passes before the last stage has its first input.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from paleo.schedules.base import (
    Action,
    Array,
    ClosedForms,
    Numeric,
    Pass,
    Passes,
    Place,
    Schedule,
    add_schedule,
    all_at_once,
    none_remaining,
    running_sum,
)
from paleo.schedules.one_f_one_b import fill_time, stage_numbers


def _h1_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """List the passes of 1F1B with B of inputs only; the W of a microbatch follows ``stage`` microbatches later.

    The deferred W lets the last B passes move down the stages without delay.
    """
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


def _h1_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """Compute the longest of three kinds of paths: m (F + B + W) + (p − 1)(F + B − W) on equal stages.

    From a stage's first B, a path goes through all passes of the stage; or through its passes to the last B and then
    up; or through its pairs to the last F, and then through the drain. The form is exact on equal stages, and within 1
    % if the first and last stage differ by half. Paths that change stages in between are not considered.
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


def _h1_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Count as many activations as there are stages, on every stage, as W is deferred by ``stage`` microbatches."""
    return np.minimum(stages + 0.0 * np.asarray(stage), microbatches)


def _h1_ends(span: Array, passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """Compute the ends of the stages: after its last B a stage runs its deferred W passes."""
    above = running_sum(passes.backward) - passes.backward
    deferred = np.minimum(stage_numbers(passes), np.asarray(microbatches) - 1.0) + 1.0
    return np.minimum(span, span - passes.weights[:1] - above + deferred * passes.weights)


#: Kind of pass, and chunk.
_Kind = tuple[Pass, int]
_F0: _Kind = ("F", 0)
_B0: _Kind = ("B", 0)
_W0: _Kind = ("W", 0)
_F1: _Kind = ("F", 1)
_B1: _Kind = ("B", 1)
_W1: _Kind = ("W", 1)


def v_paths(stages: int, chunks: int) -> tuple[tuple[Place, ...], ...]:
    """Place the pieces on the first chunks down the stages, then on the second chunks up: stage s has s and 2p − 1 − s.

    Parameters
    ----------
    stages : int
        Stages p of the pipeline.
    chunks : int
        Unused: two.

    Returns
    -------
    tuple of tuple of (int, int)
        Stage and chunk of each piece, for the only copy.
    """
    return (tuple((s, 0) for s in range(stages)) + tuple((s, 1) for s in reversed(range(stages))),)


def _v_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """List passes that fill the first chunk until the second chunk's input arrives, then both chunks, then drain."""
    below = stages - stage
    fill = [_F0] * (2 * below - 1) + [_F1, _F0] * stage + [_F1, _B1, _W1] * below
    round_of_passes = [_F0, _B0, _W0, _F1, _B1, _W1]
    drain = [_B0, _B1] * stage + [_B0, _W0] * below + [_W1] * stage + [_W0] * stage
    count: Counter[_Kind] = Counter()
    actions = []
    for kind, chunk in fill + round_of_passes * (microbatches - stages) + drain:
        microbatch = count[kind, chunk]
        count[kind, chunk] += 1
        if microbatch < microbatches:  # in the last rounds all F of the first chunk are done
            actions.append(Action(kind, microbatch, chunk))
    return actions


def _v_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """Compute m · (F + B + W) plus the longest pause.

    With f, b, w the passes of one chunk and n = p − 1, the pause is the largest of n·b, b + (n − 1)·w, f + (n − 1)·w,
    (2n − 1)·f − (n − 1)·b, 2n·f − n·b − w, 2n·(b − w), (2n − 1)·f + b − 2n·w and 2n·f − (2n + 1)·w. These are the
    longest paths through the engine's passes. The form is exact on equal stages: n·f if f = b = w. A stage slower than
    the others has only the second and third pause, as it waits for no other stage. Then the form is up to 5 % too long
    at 2p microbatches (a last piece with half as much again), less at more.
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


def _v_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Count two chunk activations per stage, on every stage, which equals the memory of 1F1B's first stage."""
    return 2.0 * stages + 0.0 * np.asarray(stage)


def _v_alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """Count the activations of one chunk: of the second as many as the stage's depth, one on the first stage.

    The network ends on the first stage.
    """
    second = np.asarray(stage) + 1.0
    return second if chunk else 2.0 * stages - second


def _v_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """Count the passes after the second chunk's last W: the deferred W of the first chunk.

    The first stage has deferred none; it still drains.
    """
    if chunk == 0:
        return 0.0, 0.0
    first = np.asarray(stage) == 0
    return np.where(first, float(stages), 0.0), np.where(first, float(stages), stage)


_PAPER = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024"
add_schedule(
    Schedule(
        "zb-h1",
        _PAPER,
        _h1_order,
        ClosedForms(_h1_span, _h1_alive, _h1_ends, none_remaining, least=1.0),
        splits_backward=True,
    )
)
add_schedule(
    Schedule(
        "zb-v",
        "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (section 6)",
        _v_order,
        ClosedForms(_v_span, _v_alive, all_at_once, _v_remaining, alive_of=_v_alive_of),
        chunks=2,
        splits_backward=True,
        least=2,
        paths=v_paths,
    )
)
