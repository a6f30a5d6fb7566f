"""Bidirectional pipeline schedules: Chimera, DualPipe and DualPipeV.

Two replicas, or two halves, of the network run through the stages in opposite directions.

Chimera has two replicas of the network, one from the first stage to the last and one back, each with half of the
microbatches. Stages that wait for the first input of one copy work on the other. The gradients of both copies are
summed.

DualPipe also has two copies, and runs a forward pass of one chunk together with a backward pass of the other. DualPipeV
is half of DualPipe: one copy, folded in a V over half as many stages. While a pair computes, the all-to-alls of its
experts overlap (`paleo.step.configuration_batch`); the passes that fill and drain the pipeline are unpaired. The order
is that of DeepSeek's code (github.com/deepseek-ai/DualPipe), in eight steps for each stage. A pair, or a backward pass
with its weights, sends its results when all of it has ended.
"""

from __future__ import annotations

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
    register_schedule,
    simultaneous_stage_ends,
)
from paleo.schedules.one_f_one_b import v_shaped_chunk_paths


def _two_way_paths(stages: int, chunks: int) -> tuple[tuple[ChunkLocation, ...], ...]:
    """Return the paths of two replicas in opposite directions: stage s has pieces s and p − 1 − s."""
    return tuple((s, 0) for s in range(stages)), tuple((s, 1) for s in reversed(range(stages)))


def _chimera_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """Return the passes of a stage in Chimera, ordered by their start times if all passes take equal time.

    A unit consists of ``stages`` microbatches, half of them in each direction; each direction starts a microbatch every
    second pass. Units follow one another (the paper's direct concatenation).
    """
    timed = []
    for i in range(microbatches):
        unit, place = divmod(i, stages)
        start_of_pair, up = divmod(place, 2)
        depth = stages - 1 - stage if up else stage
        start = 2 * (stages * unit + start_of_pair)
        timed.append((start + depth, SchedulePass("F", i, up)))
        timed.append((start + 2 * stages - 1 - depth, SchedulePass("B", i, up)))
    return [action for _, action in sorted(timed)]


def _chimera_span(passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return Chimera's makespan: m · (F + B) + (p − 2) · (max (F, B) + (m / p − 1) · |B − F|) [s].

    B includes the weight gradients; m is the number of microbatches, p that of stages. There are p − 2 bubbles in the
    first unit and, if F and B differ, as many in each further unit. The form is exact on equal stages. With B = 2F and
    m = p the bubble fraction is the (p − 2) / (3p / 2 + p − 2) of the paper's table 2. A slower stage adds half of p −
    2 bubbles to its work. If the last piece takes half as much again, the form is within 4 % of the simulated time.
    """
    front, back = passes.forward, passes.backward + passes.weight_gradients
    further, units = max(len(front) - 2.0, 0.0), np.asarray(microbatches) / len(front)
    front_mean, back_mean = front.mean(axis=0), back.mean(axis=0)
    pauses = further * (np.maximum(front_mean, back_mean) + (units - 1.0) * np.abs(back_mean - front_mean))
    slowest = microbatches * (front + back).max(axis=0) + further * (front_mean + back_mean) / 2.0
    return np.asarray(np.maximum(microbatches * (front_mean + back_mean) + pauses, slowest))


def _chimera_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Return the live activations of each stage in Chimera: p / 2 + 1 on the outer stages, up to p in the middle."""
    outer = np.minimum(np.asarray(stage), stages - 1.0 - np.asarray(stage))
    return np.asarray(stages / 2.0 + 1.0 + outer)


def _chimera_alive_of(stage: Numeric, stages: int, microbatches: Numeric, piece: int, chunks: int) -> Numeric:
    """Return the live activations of one replica in Chimera: as many as in 1F1B, but at most p / 2."""
    deep = np.asarray(stage) + 1.0 if piece else stages - np.asarray(stage)
    return np.minimum(deep, stages / 2.0)


def _chimera_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """Return how many passes of the other replica a stage still runs after the replica that finishes first."""
    place = np.asarray(stage) if chunk else stages - 1.0 - np.asarray(stage)
    count = np.maximum(0.0, stages / 2.0 - place)
    return count, count


#: Kinds and chunks of the passes that run as one. Chunk 0 is the chunk nearer to its copy's input.
_Group = tuple[tuple[PassKind, int], ...]


#: Passes of each of the two chunks, as groups.
_FORWARD: tuple[_Group, _Group] = ((("F", 0),), (("F", 1),))
_INPUTS: tuple[_Group, _Group] = ((("B", 0),), (("B", 1),))
_WEIGHTS: tuple[_Group, _Group] = ((("W", 0),), (("W", 1),))
_BACKWARD: tuple[_Group, _Group] = ((("B", 0), ("W", 0)), (("B", 1), ("W", 1)))
#: A forward pass of the first or second chunk together with a backward pass of the other chunk.
_PAIRS = _FORWARD[0] + _BACKWARD[1], _FORWARD[1] + _BACKWARD[0]


def _steps(depth: int, half: int, microbatches: int) -> list[_Group]:
    """Return the passes of one stage of DualPipe, as groups that run as one, in the eight steps of DeepSeek's code.

    ``depth`` is the distance from the nearer end of a pipeline of 2 ``half`` stages. ``microbatches`` run through each
    of the stage's two chunks. The last weight gradients fill the bubbles at the end, as in zero bubble.
    """
    below, above = half - depth - 1, depth + 1
    first = [_PAIRS[0]] if below else [_FORWARD[0], _BACKWARD[1]]
    drain = [1 - k % 2 for k in range(2 * above)]
    late = [*drain[above:], *[0] * below]  # chunks whose weight gradients are deferred
    return [
        *[_FORWARD[0]] * (2 * below),  # 1
        *[_FORWARD[0], _FORWARD[1]] * above,  # 2
        *[_INPUTS[1], _WEIGHTS[1], _FORWARD[1]] * below,  # 3
        *[*first, _PAIRS[1]],  # 4, the steady state
        *[_PAIRS[0], _PAIRS[1]] * (microbatches - 2 * half + depth),
        *[_BACKWARD[1], _PAIRS[1]] * below,  # 5
        *[_BACKWARD[chunk] for chunk in drain[:above]],  # 6
        *[_INPUTS[chunk] for chunk in drain[above:]],
        *[group for chunk in late[:below] for group in (_WEIGHTS[chunk], _INPUTS[0])],  # 7
        *[_WEIGHTS[chunk] for chunk in late[below:]],  # 8
    ]


@lru_cache(maxsize=4096)
def _actions(depth: int, half: int, microbatches: int) -> list[SchedulePass]:
    """Return the passes of `_steps` with microbatch numbers, counted separately for each kind of pass and chunk."""
    count: Counter[tuple[PassKind, int]] = Counter()
    actions = []
    for kind, chunk in (each for group in _steps(depth, half, microbatches) for each in group):
        actions.append(SchedulePass(kind, count[kind, chunk], chunk))
        count[kind, chunk] += 1
    return actions


def _dualpipe_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """Return the passes of a stage in DualPipe: those of DualPipeV on half the stages, from each end.

    Even microbatches start at the first stage, odd ones at the last.
    """
    half, up = stages // 2, int(stage >= stages // 2)
    actions = _actions(min(stage, stages - 1 - stage), half, microbatches // 2)
    return [SchedulePass(kind, 2 * i + (chunk ^ up), chunk ^ up) for kind, i, chunk in actions]


def _dualpipe_fused(stage: int, stages: int, microbatches: int, chunks: int) -> list[int]:
    """Return the sizes of the groups of passes in `_dualpipe_order` that run as one."""
    return _dualpipev_fused(min(stage, stages - 1 - stage), stages // 2, microbatches // 2, chunks)


def _dualpipev_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
    """Return the passes of a stage in DualPipeV: fill the pipeline, pair passes of both chunks, drain."""
    return list(_actions(stage, stages, microbatches))


def _dualpipev_fused(stage: int, stages: int, microbatches: int, chunks: int) -> list[int]:
    """Return the sizes of the groups of passes in `_dualpipev_order` that run as one."""
    return [len(group) for group in _steps(stage, stages, microbatches)]


def dualpipe_bubble_time(forward: Array, backward: Array, weights: Array, half: float) -> Array:
    """Return the pipeline bubble (idle time) of a stage of DualPipe [s].

    Parameters
    ----------
    forward, backward, weights : ndarray
        Times of the passes of one chunk; ``backward`` is that of inputs only [s].
    half : float
        Stages of half the pipeline, n + 1.

    Returns
    -------
    ndarray
        n max(0, B − W) + max(2n F, (n − 1) F + n B) [s].

    Notes
    -----
    The formula is exact on equal stages. On equal passes it equals the (PP / 2 − 1)(F&B + B − 3W) of DeepSeek-V3's
    table 2, where B includes W and F&B is the pair. If B is the longest pass, it is one F less than that.
    """
    return np.asarray((half - 1.0) * np.maximum(backward - weights, 0.0) + _filling(forward, backward, half))


def _filling(forward: Array, backward: Array, half: float) -> Array:
    """Return the idle time of a stage of DualPipe while the pipeline fills [s]."""
    return np.maximum(2.0 * (half - 1.0) * forward, (half - 2.0) * forward + (half - 1.0) * backward)


def _dualpipe_span(passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return DualPipe's makespan: m · (F + B + W) and the bubble of `dualpipe_bubble_time` [s].

    The result is up to 3 % too long if the last piece takes up to half as much again.
    """
    return _paced_span(passes, microbatches, 1, len(passes.forward) / 2.0)


def _dualpipev_span(passes: PassTimes, microbatches: Numeric, chunks: int) -> Array:
    """Return DualPipeV's makespan: m · (F + B + W) of both chunks, and the bubble of one chunk [s]."""
    return _paced_span(passes, microbatches, chunks, float(len(passes.forward)))


def _paced_span(passes: PassTimes, microbatches: Numeric, chunks: int, half: float) -> Array:
    """Return the larger of two makespans: of stages with the mean time, or of the slowest stage with its bubble [s].

    The slowest stage waits less, by its extra work in each of the 2 half − 1 passes before the steady state.
    """
    work = passes.forward + passes.backward + passes.weight_gradients
    f, b, w = (each.mean(axis=0) / chunks for each in passes)
    mean, most = work.mean(axis=0), work.max(axis=0)
    later = _filling(f, b, half) - (2.0 * half - 1.0) * (most - mean) * 2.0 / chunks
    idle = (half - 1.0) * np.maximum(b - w, 0.0) + np.maximum(later, 0.0)
    return np.asarray(np.maximum(microbatches * mean + dualpipe_bubble_time(f, b, w, half), microbatches * most + idle))


def _dualpipe_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Return the live chunk activations of a stage in DualPipe: p + 1 on every stage (the paper's table 2)."""
    return stages + 1.0 + 0.0 * np.asarray(stage)


def _dualpipe_alive_of(stage: Numeric, stages: int, microbatches: Numeric, piece: int, chunks: int) -> Numeric:
    """Return the live activations of one replica in DualPipe, which are as many as in 1F1B."""
    return np.asarray(stage) + 1.0 if piece else stages - np.asarray(stage) + 0.0


def _dualpipe_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """Return how many backward passes a stage of DualPipe still runs after the last gradient of a chunk.

    The result is `_dualpipev_remaining` of half the stages from each end.
    """
    depth = np.minimum(np.asarray(stage), stages - 1.0 - np.asarray(stage))
    far = (np.asarray(stage) < stages / 2.0) == (chunk == 1)
    inputs, weights = _dualpipev_remaining(depth, stages // 2, 1, chunks)
    return np.where(far, inputs, 0.0), np.where(far, weights, 0.0)


def _dualpipev_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """Return how many backward passes a stage of DualPipeV still runs after the second chunk's last weight gradient.

    Upper stages still have passes of inputs and weights; lower ones have only deferred weight passes.
    """
    left = stages - np.asarray(stage) + 0.0
    return (np.maximum(0.0, left - np.asarray(stage)), left) if chunk else (0.0, 0.0)


def _dualpipev_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Return the live chunk activations of a stage in DualPipeV: 2p + 1 on every stage; the network has 2p pieces."""
    return 2.0 * stages + 1.0 + 0.0 * np.asarray(stage)


def _dualpipev_alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """Return the live activations of one chunk in DualPipeV; the second chunk has one more on each later stage.

    The network ends on the first stage.
    """
    second = np.asarray(stage) + 1.0
    return second if chunk else 2.0 * stages - np.asarray(stage)


_PAPER = "DeepSeek-AI, DeepSeek-V3 technical report, 2024 (section 3.2.1)"
for schedule in (
    Schedule(
        "chimera",
        "Li and Hoefler, Chimera, SC 2021",
        _chimera_order,
        ClosedForms(
            _chimera_span,
            _chimera_alive,
            simultaneous_stage_ends,
            _chimera_remaining,
            chunk_activations=_chimera_alive_of,
        ),
        needs_microbatch_multiple=True,
        needs_even_stages=True,
        chunk_paths=_two_way_paths,
    ),
    Schedule(
        "dualpipe",
        _PAPER,
        _dualpipe_order,
        ClosedForms(
            _dualpipe_span,
            _dualpipe_alive,
            simultaneous_stage_ends,
            _dualpipe_remaining,
            chunk_activations=_dualpipe_alive_of,
        ),
        splits_backward=True,
        min_microbatches_per_stage=2,
        needs_even_stages=True,
        chunk_paths=_two_way_paths,
        pass_group_sizes=_dualpipe_fused,
    ),
    Schedule(
        "dualpipev",
        "DeepSeek-AI, github.com/deepseek-ai/DualPipe, 2025 (half of dualpipe)",
        _dualpipev_order,
        ClosedForms(
            _dualpipev_span,
            _dualpipev_alive,
            simultaneous_stage_ends,
            _dualpipev_remaining,
            chunk_activations=_dualpipev_alive_of,
        ),
        chunks_per_stage=2,
        splits_backward=True,
        min_microbatches_per_stage=2,
        chunk_paths=v_shaped_chunk_paths,
        pass_group_sizes=_dualpipev_fused,
    ),
):
    register_schedule(schedule)
