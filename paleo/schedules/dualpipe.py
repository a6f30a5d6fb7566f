"""DualPipe and DualPipeV: a forward pass of one chunk runs beside a backward pass of the other one.

Under DualPipe each stage holds two pieces of the network, one of a copy that goes down the stages and one of a copy
that goes up, each with half of the microbatches. DualPipeV is half of that: one copy, folded in a V over half as many
stages. While a pair computes, the tokens of a mixture travel to experts and back (`paleo.step.batch`); passes that fill
and drain the pipeline have no other beside them.

The order is that of DeepSeek's code (github.com/deepseek-ai/DualPipe), in eight steps for each stage. What runs as one,
a pair or a backward pass with its weights, hands on its results when all of it has ended.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from paleo.schedules import chimera, zero_bubble_v
from paleo.schedules.base import Action, ClosedForms, Pass, Schedule, add_schedule, all_at_once

if TYPE_CHECKING:
    from paleo.schedules.base import Array, Numeric, Passes

#: Kinds and chunks of the passes that run as one; chunk 0 is the one that lies nearer to its copy's input.
_Group = tuple[tuple[Pass, int], ...]


def _forward(chunk: int) -> _Group:
    return (("F", chunk),)


def _inputs(chunk: int) -> _Group:
    return (("B", chunk),)


def _weights(chunk: int) -> _Group:
    return (("W", chunk),)


def _backward(chunk: int) -> _Group:
    return ("B", chunk), ("W", chunk)


def _pair(forward: int, backward: int) -> _Group:
    return *_forward(forward), *_backward(backward)


def _steps(depth: int, half: int, microbatches: int) -> list[_Group]:
    """The passes of the stage at a ``depth`` below the nearer end of a pipeline, ``half`` of which has such a depth;
    ``microbatches`` go through each of its two chunks. The last weight gradients fill the end, as in zero bubble."""
    below, above = half - depth - 1, depth + 1
    first = [_pair(0, 1)] if below else [_forward(0), _backward(1)]
    drain = [1 - k % 2 for k in range(2 * above)]
    late = [*drain[above:], *[0] * below]  # chunks whose weight gradients are put off
    return [
        *[_forward(0)] * (2 * below),  # 1
        *[_forward(0), _forward(1)] * above,  # 2
        *[_inputs(1), _weights(1), _forward(1)] * below,  # 3
        *[*first, _pair(1, 0)],  # 4, the steady state
        *[_pair(0, 1), _pair(1, 0)] * (microbatches - 2 * half + depth),
        *[_backward(1), _pair(1, 0)] * below,  # 5
        *[_backward(chunk) for chunk in drain[:above]],  # 6
        *[_inputs(chunk) for chunk in drain[above:]],
        *[group for chunk in late[:below] for group in (_weights(chunk), _inputs(0))],  # 7
        *[_weights(chunk) for chunk in late[below:]],  # 8
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


def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """DualPipe: `v_order` of half the stages from either end, even microbatches down and odd ones up."""
    half, up = stages // 2, int(stage >= stages // 2)
    actions = _numbered(min(stage, stages - 1 - stage), half, microbatches // 2)
    return [Action(kind, 2 * i + (chunk ^ up), chunk ^ up) for kind, i, chunk in actions]


def fused(stage: int, stages: int, microbatches: int, chunks: int) -> list[int]:
    """Passes of `order` that run as one."""
    return v_fused(min(stage, stages - 1 - stage), stages // 2, microbatches // 2, chunks)


def v_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """DualPipeV: fill until the second chunk's first backward pass, then pairs of both chunks, then drain."""
    return list(_numbered(stage, stages, microbatches))


def v_fused(stage: int, stages: int, microbatches: int, chunks: int) -> list[int]:
    """Passes of `v_order` that run as one."""
    return [len(group) for group in _steps(stage, stages, microbatches)]


def pause(forward: Array, backward: Array, weights: Array, half: float) -> Array:
    """Seconds that a stage of ``half`` a pipeline is idle, from the seconds of its passes of one chunk: n = half − 1
    times max(0, B − W), and `filling` (B without W).

    Exact on equal stages. On equal passes it is the (PP / 2 − 1)(F&B + B − 3W) of the paper's table 2, where B counts W
    and F&B is the pair; where B is the longest pass it is one F less than that.
    """
    return np.asarray((half - 1.0) * np.maximum(backward - weights, 0.0) + filling(forward, backward, half))


def filling(forward: Array, backward: Array, half: float) -> Array:
    """The longer of 2n · F and (n − 1) · F + n · B, which stages wait before the pairs of both chunks follow one
    another."""
    return np.maximum(2.0 * (half - 1.0) * forward, (half - 2.0) * forward + (half - 1.0) * backward)


def span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """DualPipe: m · (F + B + W) and the `pause`, with the passes of a chunk; up to 3 % long where the last piece has up
    to half as much again."""
    return _span(passes, microbatches, 1, len(passes.forward) / 2.0)


def v_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """DualPipeV: m · (F + B + W) of both chunks and the `pause` of one."""
    return _span(passes, microbatches, chunks, float(len(passes.forward)))


def _span(passes: Passes, microbatches: Numeric, chunks: int, half: float) -> Array:
    """The stages at one pace, or the slowest one, which works off what it waited by what it has more to do in each of
    the 2 half − 1 passes before the steady state."""
    work = passes.forward + passes.backward + passes.weights
    f, b, w = (each.mean(axis=0) / chunks for each in passes)
    mean, most = work.mean(axis=0), work.max(axis=0)
    later = filling(f, b, half) - (2.0 * half - 1.0) * (most - mean) * 2.0 / chunks
    idle = (half - 1.0) * np.maximum(b - w, 0.0) + np.maximum(later, 0.0)
    return np.asarray(np.maximum(microbatches * mean + pause(f, b, w, half), microbatches * most + idle))


def alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """p + 1 chunks on every stage (the paper's table 2)."""
    return stages + 1.0 + 0.0 * np.asarray(stage)


def alive_of(stage: Numeric, stages: int, microbatches: Numeric, piece: int, chunks: int) -> Numeric:
    """Of each copy as many as 1F1B holds."""
    return np.asarray(stage) + 1.0 if piece else stages - np.asarray(stage) + 0.0


def remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """`v_remaining` of half the stages from either end."""
    depth = np.minimum(np.asarray(stage), stages - 1.0 - np.asarray(stage))
    far = (np.asarray(stage) < stages / 2.0) == (chunk == 1)
    inputs, weights = v_remaining(depth, stages // 2, 1, chunks)
    return np.where(far, inputs, 0.0), np.where(far, weights, 0.0)


def v_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """After the second chunk's last weights come what is left of the first: inputs and weights on the upper stages,
    weights that were put off on the lower ones."""
    left = stages - np.asarray(stage) + 0.0
    return (np.maximum(0.0, left - np.asarray(stage)), left) if chunk else (0.0, 0.0)


def v_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """2p + 1 chunks on every stage: the network has 2p pieces."""
    return 2.0 * stages + 1.0 + 0.0 * np.asarray(stage)


def v_alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """Of the second chunk as many as the stage's depth; one on the first stage, where the network ends."""
    second = np.asarray(stage) + 1.0
    return second if chunk else 2.0 * stages - np.asarray(stage)


_PAPER = "DeepSeek-AI, DeepSeek-V3 technical report, 2024 (section 3.2.1)"
DUALPIPE = add_schedule(
    Schedule(
        "dualpipe",
        _PAPER,
        order,
        ClosedForms(span, alive, all_at_once, remaining, alive_of=alive_of),
        splits_backward=True,
        least=2,
        even=True,
        paths=chimera.paths,
        fused=fused,
    ),
)
DUALPIPE_V = add_schedule(
    Schedule(
        "dualpipev",
        "DeepSeek-AI, github.com/deepseek-ai/DualPipe, 2025 (half of dualpipe)",
        v_order,
        ClosedForms(v_span, v_alive, all_at_once, v_remaining, alive_of=v_alive_of),
        chunks=2,
        splits_backward=True,
        least=2,
        paths=zero_bubble_v.paths,
        fused=v_fused,
    ),
)
