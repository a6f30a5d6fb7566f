"""Pipeline schedules with one replica and one direction: GPipe, 1F1B, interleaved 1F1B and zero bubble.

GPipe runs all forward passes, then all backward passes. 1F1B (one forward, one backward) has at most as many
activations alive as the pipeline has stages. Interleaved 1F1B gives each stage several chunks of layers, so that the
pipeline fills in less time.

Zero-bubble schedules run weight gradients as separate passes that fill the bubbles of a pipeline. ``zb-h1`` is the
paper's handcrafted schedule 1, with the activation memory of 1F1B. ``zb-v`` places two chunks on each stage in a V,
down the stages and back up, with the same memory. The loss is then on the first stage, where the input is, too. So each
stage can start backward passes early, and weight gradients and the second chunk fill what 1F1B leaves idle. If all
passes are equal (F = B = W), no stage waits, except for the p − 1 half passes before the last stage has its first
input.
"""

from __future__ import annotations

import itertools
from collections import Counter
from functools import lru_cache

import numpy as np

from paleo.schedules.base import (
    Array,
    ChunkLocation,
    ClosedForms,
    Numeric,
    PassKind,
    PassTimes,
    Schedule,
    SchedulePass,
    cumulative_max,
    cumulative_sum,
    no_passes_after_gradient,
    register_schedule,
    simultaneous_stage_ends,
)


def _gpipe_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """Return the passes of a stage in GPipe: F of every microbatch, then B from the last microbatch to the first."""
    forward = [SchedulePass("F", i) for i in range(microbatches)]
    return forward + [SchedulePass("B", i) for i in reversed(range(microbatches))]


def _gpipe_span(passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return GPipe's makespan: ΣF + (m − 1) max F + Σ(B + W) + (m − 1) max (B + W) [s], exact for unequal stages."""
    back, more = passes.backward + passes.weight_gradients, np.asarray(microbatches) - 1.0
    slowest = passes.forward.max(axis=0) + back.max(axis=0)
    return np.asarray(passes.forward.sum(axis=0) + back.sum(axis=0) + more * slowest)


def _gpipe_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Return the live activations of a stage in GPipe: all microbatches of the step."""
    return microbatches


def _one_f_one_b_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """Return the passes of a stage in 1F1B: stages − stage − 1 warm-up forward passes, F and B in turn, cool-down."""
    fill = min(stages - stage - 1, microbatches)
    actions = [SchedulePass("F", i) for i in range(fill)]
    for i in range(microbatches - fill):
        actions += [SchedulePass("F", fill + i), SchedulePass("B", i)]
    return actions + [SchedulePass("B", i) for i in range(microbatches - fill, microbatches)]


def _one_f_one_b_span(passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return the makespan of 1F1B, the longest path through its passes [s], exact for unequal stages.

    Any stage may determine the time: it fills, runs m − 1 − w pairs of passes, and drains, which is filling in reverse.
    The stage runs w forward passes before its first backward pass. If all m forward passes come first, there are no
    pairs. If the last stage is the slowest, the result is m · max (F + B) plus F + B of the others.
    """
    front, back = passes.forward, passes.backward + passes.weight_gradients
    most = np.asarray(microbatches) - 1.0
    ahead = np.minimum(len(front) - 1.0 - _stage_indices(passes), most)
    fill, drain = _first_backward_start(front, back, ahead), _first_backward_start(back, front, ahead)
    all_back = fill + cumulative_sum(back) + most * cumulative_max(back)
    all_front = drain + cumulative_sum(front) + most * cumulative_max(front)
    pairs = fill + (most - ahead) * (front + back) + drain
    return np.asarray(np.where(ahead < most, pairs, np.maximum(all_back, all_front)).max(axis=0))


def _first_backward_start(forward: Array, backward: Array, waiting: Array) -> Array:
    """Return the time at which each stage of a 1F1B pipeline starts its first backward pass [s].

    Parameters
    ----------
    forward, backward : ndarray
        Times of one microbatch on each stage, shape (stages, ...) [s].
    waiting : ndarray
        Number of forward passes that each stage runs between its first forward and its first backward pass.

    Returns
    -------
    ndarray
        Start of the backward pass of the first microbatch, shape (stages, ...) [s].

    Notes
    -----
    The longest path goes through the forward passes down to some stage d, through waiting[d] further forward passes of
    the slowest stage above d, and back up: max over d >= s of (sum of forward to d) + waiting[d] · (largest forward to
    d) + (sum of backward from d to s + 1).
    """
    down, up = cumulative_sum(forward) + waiting * cumulative_max(forward), cumulative_sum(backward)
    return np.asarray(cumulative_max((down + up)[::-1])[::-1] - up)


def _stage_indices(passes: PassTimes) -> Array:
    """Return the stage indices 0, 1, … as an array that broadcasts with pass times.

    Parameters
    ----------
    passes : PassTimes
        Times of one microbatch, shape (stages, ...) [s].

    Returns
    -------
    ndarray
        Shape (stages, 1, ...).
    """
    shape = (-1,) + (1,) * (passes.forward.ndim - 1)
    return np.arange(float(len(passes.forward))).reshape(shape)


def _one_f_one_b_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Return the live activations of a stage in 1F1B: 1 on the last stage, one more on each earlier stage.

    There are at most as many as microbatches.
    """
    return np.asarray(np.minimum(stages - np.asarray(stage), microbatches), dtype=np.float64)


def _interleaved_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """Return the passes of a stage in interleaved 1F1B, where groups of microbatches visit one chunk after another.

    A group has ``stages`` microbatches. The warm-up consists of 2·(stages − stage − 1) + (chunks − 1)·stages forward
    passes.
    """
    forward, backward = _interleaved_passes(stages, microbatches, chunks)
    fill = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(forward))
    pairs = zip(forward[fill:], backward, strict=False)
    return [*forward[:fill], *itertools.chain.from_iterable(pairs), *backward[len(forward) - fill :]]


@lru_cache(maxsize=64)
def _interleaved_passes(stages: int, microbatches: int, chunks: int) -> tuple[list[SchedulePass], list[SchedulePass]]:
    """Return the forward passes and the backward passes of interleaved 1F1B, each in order (equal on all stages)."""
    places = itertools.product(range(0, microbatches, stages), range(chunks), range(stages))
    units = [(first + place, chunk) for first, chunk, place in itertools.islice(places, microbatches * chunks)]
    forward = [SchedulePass("F", microbatch, chunk) for microbatch, chunk in units]
    return forward, [SchedulePass("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in units]


def _interleaved_span(passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return the makespan of interleaved 1F1B: m · max (F + B) + (Σ − max) / chunks, with the sum over stages [s].

    The form is exact on equal chunks. If the last chunk has a tenth more work, the simulated time is up to 1 % longer
    (most with a single round).
    """
    work = passes.forward + passes.backward + passes.weight_gradients
    slowest = work.max(axis=0)
    return np.asarray(microbatches * slowest + (work.sum(axis=0) - slowest) / chunks)


def _interleaved_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Return the live chunk activations of a stage in interleaved 1F1B: the warm-up forward passes, plus one."""
    fill = 2.0 * (stages - np.asarray(stage) - 1.0) + (chunks - 1.0) * stages
    return np.minimum(fill + 1.0, np.asarray(microbatches) * float(chunks))


def _interleaved_alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """Return the live activations of one chunk in interleaved 1F1B: ``stages`` of each chunk in turn.

    The last stage has one live activation of its last chunk (output layer and loss), because the backward pass of that
    chunk follows immediately.

    >>> [float(_interleaved_alive_of(3, 4, 8, chunk, 3)) for chunk in range(3)]
    [4.0, 4.0, 1.0]
    """
    rounds, remainder = np.divmod(_interleaved_alive(stage, stages, microbatches, chunks), float(stages * chunks))
    return np.asarray(rounds * stages + np.clip(remainder - chunk * stages, 0.0, float(stages)))


def _interleaved_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """Return how many backward passes follow the last gradient of a chunk: ``stages`` for each earlier chunk."""
    return float(chunk * stages), float(chunk * stages)


for schedule in (
    Schedule(
        "gpipe",
        "Huang et al., GPipe, NeurIPS 2019",
        _gpipe_order,
        ClosedForms(
            _gpipe_span, _gpipe_alive, passes_after_last_gradient=no_passes_after_gradient, exact_for_stages="any"
        ),
    ),
    Schedule(
        "1f1b",
        "Narayanan et al., PipeDream-Flush, ICML 2021",
        _one_f_one_b_order,
        ClosedForms(
            _one_f_one_b_span,
            _one_f_one_b_alive,
            passes_after_last_gradient=no_passes_after_gradient,
            exact_for_stages="any",
        ),
    ),
    Schedule(
        "interleaved",
        "Narayanan et al., SC 2021",
        _interleaved_order,
        ClosedForms(
            _interleaved_span,
            _interleaved_alive,
            passes_after_last_gradient=_interleaved_remaining,
            chunk_activations=_interleaved_alive_of,
        ),
        chunks_per_stage=None,
        needs_microbatch_multiple=True,
    ),
):
    register_schedule(schedule)


def _h1_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """Return the passes of a stage in zb-h1, which is 1F1B with separate weight gradients (W).

    The W of a microbatch follows ``stage`` microbatches later. The deferred W lets the last B passes move down the
    stages without delay.
    """
    fill = min(stages - stage - 1, microbatches)
    actions = [SchedulePass("F", i) for i in range(fill)]
    weights = 0
    for i in range(microbatches):
        if fill + i < microbatches:
            actions.append(SchedulePass("F", fill + i))
        actions.append(SchedulePass("B", i))
        if i >= stage:
            actions.append(SchedulePass("W", weights))
            weights += 1
    return actions + [SchedulePass("W", i) for i in range(weights, microbatches)]


def _h1_span(passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return the makespan of zb-h1: m (F + B + W) + (p − 1)(F + B − W) on equal stages [s].

    The result is the longest of three kinds of paths. Each path starts at a stage's first B. The first kind goes
    through all passes of the stage. The second goes through its passes to the last B and then up. The third goes
    through its pairs to the last F, and then through the drain. The form is exact on equal stages, and within 1 % if
    the first and last stage differ by half. Paths that change stages in between are not considered.
    """
    front, back, weights = passes
    stage, most = _stage_indices(passes), np.asarray(microbatches) - 1.0
    ahead = np.minimum(len(front) - 1.0 - stage, most)
    fill, drain = _first_backward_start(front, back, ahead), _first_backward_start(back, front, ahead)
    begun = fill + (most - ahead) * front
    alone = begun + (most + 1.0) * (back + weights)
    above, last = cumulative_sum(back) - back, weights[:1]
    upwards = begun + (most + 1.0) * back + np.maximum(0.0, most - stage) * weights + above + last
    paired = begun + (most - ahead) * back + np.maximum(0.0, most - ahead - stage) * weights + drain + last
    return np.asarray(np.maximum(np.maximum(alone, upwards), np.where(ahead < most, paired, 0.0)).max(axis=0))


def _h1_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Return the live activations in zb-h1: ``stages`` on every stage, as W is deferred by ``stage`` microbatches."""
    return np.minimum(stages + 0.0 * np.asarray(stage), microbatches)


def _h1_ends(span: Array, passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return the time at which each stage ends in zb-h1 [s]: after its last B a stage runs its deferred W passes."""
    above = cumulative_sum(passes.backward) - passes.backward
    deferred = np.minimum(_stage_indices(passes), np.asarray(microbatches) - 1.0) + 1.0
    return np.minimum(span, span - passes.weight_gradients[:1] - above + deferred * passes.weight_gradients)


#: Kind of pass, and chunk; and the passes of a round of zb-v in its steady state.
_Kind = tuple[PassKind, int]
_V_ROUND: tuple[_Kind, ...] = (("F", 0), ("B", 0), ("W", 0), ("F", 1), ("B", 1), ("W", 1))
_F0, _B0, _W0, _F1, _B1, _W1 = _V_ROUND


def v_shaped_chunk_paths(stages: int, chunks: int) -> tuple[tuple[ChunkLocation, ...], ...]:
    """Assign two model chunks to each stage in a V (zb-v, DualPipeV): chunk 0 runs down the stages, chunk 1 back up.

    Parameters
    ----------
    stages : int
        Stages p of the pipeline.
    chunks : int
        Not used; a V has two chunks on each stage.

    Returns
    -------
    tuple of tuple of (int, int)
        One path through the pipeline: (stage, chunk) of each of the 2p pieces of the network, in forward order.
    """
    return (tuple((s, 0) for s in range(stages)) + tuple((s, 1) for s in reversed(range(stages))),)


def _v_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """Return the passes of a stage in zb-v: fill the first chunk, then both chunks, run rounds of six passes, drain."""
    below = stages - stage
    fill = [_F0] * (2 * below - 1) + [_F1, _F0] * stage + [_F1, _B1, _W1] * below
    drain = [_B0, _B1] * stage + [_B0, _W0] * below + [_W1] * stage + [_W0] * stage
    count: Counter[_Kind] = Counter()
    actions = []
    for kind, chunk in [*fill, *_V_ROUND * (microbatches - stages), *drain]:
        microbatch = count[kind, chunk]
        count[kind, chunk] += 1
        if microbatch < microbatches:  # in the last rounds all F of the first chunk are done
            actions.append(SchedulePass(kind, microbatch, chunk))
    return actions


def _v_span(passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return the makespan of zb-v: m · (F + B + W) plus the longest bubble [s].

    With f, b, w the passes of one chunk and n = p − 1, the bubble is the largest of n·b, b + (n − 1)·w, f + (n − 1)·w,
    (2n − 1)·f − (n − 1)·b, 2n·f − n·b − w, 2n·(b − w), (2n − 1)·f + b − 2n·w and 2n·f − (2n + 1)·w. These are the
    longest paths through the simulated passes. The form is exact on equal stages: n·f if f = b = w. A stage slower than
    the others has only the second and third bubble, as it waits for no other stage. Then the form is up to 5 % too long
    at 2p microbatches (a last piece with half as much again), less at more.
    """
    work = passes.forward + passes.backward + passes.weight_gradients
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
    """Return the live chunk activations of a stage in zb-v: 2 p on each of p stages, as on 1F1B's first stage."""
    return 2.0 * stages + 0.0 * np.asarray(stage)


def _v_alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """Return the live activations of one chunk in zb-v; the second chunk has one more on each later stage.

    The first stage has one, because the network ends there.
    """
    second = np.asarray(stage) + 1.0
    return second if chunk else 2.0 * stages - second


def _v_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """Return how many backward passes a stage of zb-v still runs after the second chunk's last weight gradient.

    These are the deferred W of the first chunk; the first stage has deferred none, but still drains.
    """
    if chunk == 0:
        return 0.0, 0.0
    first = np.asarray(stage) == 0
    return np.where(first, float(stages), 0.0), np.where(first, float(stages), stage)


_PAPER = "Qi et al., Zero bubble pipeline parallelism, ICLR 2024"
for schedule in (
    Schedule(
        "zb-h1",
        _PAPER,
        _h1_order,
        ClosedForms(_h1_span, _h1_alive, _h1_ends, no_passes_after_gradient, min_microbatches_per_stage=1.0),
        splits_backward=True,
    ),
    Schedule(
        "zb-v",
        "Qi et al., Zero bubble pipeline parallelism, ICLR 2024 (section 6)",
        _v_order,
        ClosedForms(_v_span, _v_alive, simultaneous_stage_ends, _v_remaining, chunk_activations=_v_alive_of),
        chunks_per_stage=2,
        splits_backward=True,
        min_microbatches_per_stage=2,
        chunk_paths=v_shaped_chunk_paths,
    ),
):
    register_schedule(schedule)
