"""Bidirectional pipelines: two copies or two halves of the network cross each other on the stages.

Chimera has two copies of the network, one down the stages and one up, each with half of the microbatches. The stages
that wait for one copy's first input work for the other. Both copies sum their gradients.

DualPipe has two such copies, too; a forward pass of one chunk runs together with a backward pass of the other one.
DualPipeV is half of that: one copy, folded in a V over half as many stages. While a pair computes, the tokens of a
mixture travel to experts and back (`paleo.step.batch`); passes that fill and drain the pipeline run unpaired. The order
is that of DeepSeek's code (github.com/deepseek-ai/DualPipe), in eight steps for each stage. A pair, or a backward pass
with its weights, hands on its results when all of it has ended.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

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
)
from paleo.schedules.zero_bubble import v_paths


def _two_way_paths(stages: int, chunks: int) -> tuple[tuple[Place, ...], ...]:
    """Stage s holds piece s of the copy that goes down and piece p − 1 − s of the one that goes up."""
    return tuple((s, 0) for s in range(stages)), tuple((s, 1) for s in reversed(range(stages)))


def _chimera_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
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


def _chimera_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
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


def _chimera_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """p / 2 + 1 on the outer stages, p on the middle ones."""
    outer = np.minimum(np.asarray(stage), stages - 1.0 - np.asarray(stage))
    return np.asarray(stages / 2.0 + 1.0 + outer)


def _chimera_alive_of(stage: Numeric, stages: int, microbatches: Numeric, piece: int, chunks: int) -> Numeric:
    """Of each copy as many as 1F1B holds, but no more than the half of the microbatches of a unit."""
    deep = np.asarray(stage) + 1.0 if piece else stages - np.asarray(stage)
    return np.minimum(deep, stages / 2.0)


def _chimera_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """The copy whose end is near on a stage is done first there; the other one's last passes are still to come."""
    place = np.asarray(stage) if chunk else stages - 1.0 - np.asarray(stage)
    count = np.maximum(0.0, stages / 2.0 - place)
    return count, count


#: Kinds and chunks of the passes that run as one; chunk 0 is the one that lies nearer to its copy's input.
_Group = tuple[tuple[Pass, int], ...]


#: Passes of each of the two chunks.
_FORWARD: tuple[_Group, _Group] = ((("F", 0),), (("F", 1),))
_INPUTS: tuple[_Group, _Group] = ((("B", 0),), (("B", 1),))
_WEIGHTS: tuple[_Group, _Group] = ((("W", 0),), (("W", 1),))
_BACKWARD: tuple[_Group, _Group] = ((("B", 0), ("W", 0)), (("B", 1), ("W", 1)))
#: A forward pass of the first or second chunk with a backward pass of the other one.
_PAIRS = _FORWARD[0] + _BACKWARD[1], _FORWARD[1] + _BACKWARD[0]


def _steps(depth: int, half: int, microbatches: int) -> list[_Group]:
    """List the passes of the stage at a ``depth`` below the nearer end of a pipeline of 2 ``half`` stages.

    ``microbatches`` go through each of its two chunks. The last weight gradients fill the end, as in zero bubble."""
    below, above = half - depth - 1, depth + 1
    first = [_PAIRS[0]] if below else [_FORWARD[0], _BACKWARD[1]]
    drain = [1 - k % 2 for k in range(2 * above)]
    late = [*drain[above:], *[0] * below]  # chunks whose weight gradients are put off
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
def _numbered(depth: int, half: int, microbatches: int) -> list[Action]:
    """The passes of `_steps`; each chunk takes its microbatches in turn."""
    count: Counter[tuple[Pass, int]] = Counter()
    actions = []
    for kind, chunk in (each for group in _steps(depth, half, microbatches) for each in group):
        actions.append(Action(kind, count[kind, chunk], chunk))
        count[kind, chunk] += 1
    return actions


def _dualpipe_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """DualPipe: `_dualpipev_order` of half the stages from either end, even microbatches down and odd ones up."""
    half, up = stages // 2, int(stage >= stages // 2)
    actions = _numbered(min(stage, stages - 1 - stage), half, microbatches // 2)
    return [Action(kind, 2 * i + (chunk ^ up), chunk ^ up) for kind, i, chunk in actions]


def _dualpipe_fused(stage: int, stages: int, microbatches: int, chunks: int) -> list[int]:
    """Passes of `_dualpipe_order` that run as one."""
    return _dualpipev_fused(min(stage, stages - 1 - stage), stages // 2, microbatches // 2, chunks)


def _dualpipev_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """DualPipeV: fill until the second chunk's first backward pass, then pairs of both chunks, then drain."""
    return list(_numbered(stage, stages, microbatches))


def _dualpipev_fused(stage: int, stages: int, microbatches: int, chunks: int) -> list[int]:
    """Passes of `_dualpipev_order` that run as one."""
    return [len(group) for group in _steps(stage, stages, microbatches)]


def dualpipe_pause(forward: Array, backward: Array, weights: Array, half: float) -> Array:
    """Compute how long a stage of DualPipe is idle.

    Parameters
    ----------
    forward, backward, weights : ndarray
        Times of the passes of one chunk; ``backward`` is that of inputs alone [s].
    half : float
        Stages of half the pipeline, n + 1.

    Returns
    -------
    ndarray
        n max(0, B − W) + max(2n F, (n − 1) F + n B) [s].

    Notes
    -----
    Exact on equal stages. On equal passes it is the (PP / 2 − 1)(F&B + B − 3W) of DeepSeek-V3's table 2, where B counts
    W and F&B is the pair. Where B is the longest pass it is one F less than that.
    """
    return np.asarray((half - 1.0) * np.maximum(backward - weights, 0.0) + _filling(forward, backward, half))


def _filling(forward: Array, backward: Array, half: float) -> Array:
    """Compute how long stages wait before the pairs of both chunks follow one another."""
    return np.maximum(2.0 * (half - 1.0) * forward, (half - 2.0) * forward + (half - 1.0) * backward)


def _dualpipe_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """DualPipe: m · (F + B + W) and the pause; up to 3 % long where the last piece has up to half as much again."""
    return _paced_span(passes, microbatches, 1, len(passes.forward) / 2.0)


def _dualpipev_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """DualPipeV: m · (F + B + W) of both chunks and the pause of one."""
    return _paced_span(passes, microbatches, chunks, float(len(passes.forward)))


def _paced_span(passes: Passes, microbatches: Numeric, chunks: int, half: float) -> Array:
    """The stages at one pace, or the slowest one, which works off what it waited by what it has more to do in each of
    the 2 half − 1 passes before the steady state."""
    work = passes.forward + passes.backward + passes.weights
    f, b, w = (each.mean(axis=0) / chunks for each in passes)
    mean, most = work.mean(axis=0), work.max(axis=0)
    later = _filling(f, b, half) - (2.0 * half - 1.0) * (most - mean) * 2.0 / chunks
    idle = (half - 1.0) * np.maximum(b - w, 0.0) + np.maximum(later, 0.0)
    return np.asarray(np.maximum(microbatches * mean + dualpipe_pause(f, b, w, half), microbatches * most + idle))


def _dualpipe_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """p + 1 chunks on every stage (the paper's table 2)."""
    return stages + 1.0 + 0.0 * np.asarray(stage)


def _dualpipe_alive_of(stage: Numeric, stages: int, microbatches: Numeric, piece: int, chunks: int) -> Numeric:
    """Of each copy as many as 1F1B holds."""
    return np.asarray(stage) + 1.0 if piece else stages - np.asarray(stage) + 0.0


def _dualpipe_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """`_dualpipev_remaining` of half the stages from either end."""
    depth = np.minimum(np.asarray(stage), stages - 1.0 - np.asarray(stage))
    far = (np.asarray(stage) < stages / 2.0) == (chunk == 1)
    inputs, weights = _dualpipev_remaining(depth, stages // 2, 1, chunks)
    return np.where(far, inputs, 0.0), np.where(far, weights, 0.0)


def _dualpipev_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """After the second chunk's last weights come what is left of the first: inputs and weights on the upper stages,
    weights that were put off on the lower ones."""
    left = stages - np.asarray(stage) + 0.0
    return (np.maximum(0.0, left - np.asarray(stage)), left) if chunk else (0.0, 0.0)


def _dualpipev_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """2p + 1 chunks on every stage: the network has 2p pieces."""
    return 2.0 * stages + 1.0 + 0.0 * np.asarray(stage)


def _dualpipev_alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """Of the second chunk as many as the stage's depth; one on the first stage, where the network ends."""
    second = np.asarray(stage) + 1.0
    return second if chunk else 2.0 * stages - np.asarray(stage)


add_schedule(
    Schedule(
        "chimera",
        "Li and Hoefler, Chimera, SC 2021",
        _chimera_order,
        ClosedForms(_chimera_span, _chimera_alive, all_at_once, _chimera_remaining, alive_of=_chimera_alive_of),
        multiple=True,
        even=True,
        paths=_two_way_paths,
    )
)
_PAPER = "DeepSeek-AI, DeepSeek-V3 technical report, 2024 (section 3.2.1)"
add_schedule(
    Schedule(
        "dualpipe",
        _PAPER,
        _dualpipe_order,
        ClosedForms(_dualpipe_span, _dualpipe_alive, all_at_once, _dualpipe_remaining, alive_of=_dualpipe_alive_of),
        splits_backward=True,
        least=2,
        even=True,
        paths=_two_way_paths,
        fused=_dualpipe_fused,
    )
)
add_schedule(
    Schedule(
        "dualpipev",
        "DeepSeek-AI, github.com/deepseek-ai/DualPipe, 2025 (half of dualpipe)",
        _dualpipev_order,
        ClosedForms(_dualpipev_span, _dualpipev_alive, all_at_once, _dualpipev_remaining, alive_of=_dualpipev_alive_of),
        chunks=2,
        splits_backward=True,
        least=2,
        paths=v_paths,
        fused=_dualpipev_fused,
    )
)
