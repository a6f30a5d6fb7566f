"""Pipeline orders with one copy of the network and one direction: GPipe, 1F1B and interleaved 1F1B.

GPipe runs all forward passes, then all backward passes. 1F1B (one forward, one backward) has at most as many
activations alive as the pipeline has stages. Interleaved 1F1B gives each stage several chunks of layers, so that the
pipeline fills in less time.
"""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np

from paleo.schedules.base import (
    Action,
    Array,
    ClosedForms,
    Numeric,
    Passes,
    Schedule,
    add_schedule,
    none_remaining,
    running_max,
    running_sum,
)


def _gpipe_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """List F of every microbatch, then B of every microbatch from the last to the first."""
    forward = [Action("F", i) for i in range(microbatches)]
    return forward + [Action("B", i) for i in reversed(range(microbatches))]


def _gpipe_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """Compute ΣF + (m − 1) max F + Σ(B + W) + (m − 1) max (B + W), which is exact on any stages."""
    back, more = passes.backward + passes.weights, np.asarray(microbatches) - 1.0
    return np.asarray(
        passes.forward.sum(axis=0) + back.sum(axis=0) + more * (passes.forward.max(axis=0) + back.max(axis=0))
    )


def _gpipe_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Return all microbatches of the step."""
    return microbatches


def _one_f_one_b_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """List stages − stage − 1 forward passes that fill the pipeline, then alternate F and B, then drain."""
    fill = min(stages - stage - 1, microbatches)
    actions = [Action("F", i) for i in range(fill)]
    for i in range(microbatches - fill):
        actions += [Action("F", fill + i), Action("B", i)]
    return actions + [Action("B", i) for i in range(microbatches - fill, microbatches)]


def _one_f_one_b_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """Compute the longest path through the passes, which is exact on any stages.

    Any stage may determine the time: it fills, runs m − 1 − w pairs of passes (w forward passes precede its first
    backward pass), and drains, which is filling in reverse. If all m forward passes precede, there are no pairs: it
    runs all forward, then all backward passes. If the last stage is the slowest, the result is m · max (F + B) plus F +
    B of the others.
    """
    front, back = passes.forward, passes.backward + passes.weights
    most = np.asarray(microbatches) - 1.0
    ahead = np.minimum(len(front) - 1.0 - stage_numbers(passes), most)
    fill, drain = fill_time(front, back, ahead), fill_time(back, front, ahead)
    all_back = fill + running_sum(back) + most * running_max(back)
    all_front = drain + running_sum(front) + most * running_max(front)
    pairs = fill + (most - ahead) * (front + back) + drain
    return np.asarray(np.where(ahead < most, pairs, np.maximum(all_back, all_front)).max(axis=0))


def fill_time(forward: Array, backward: Array, waiting: Array) -> Array:
    """Compute when each stage starts the backward pass of the first microbatch.

    Parameters
    ----------
    forward, backward : ndarray
        Times of one microbatch on each stage, shape (stages, ...) [s].
    waiting : ndarray
        Further forward passes that each stage runs before it.

    Returns
    -------
    ndarray
        Shape (stages, ...) [s].

    Notes
    -----
    The longest path goes through the forward passes down to some stage d, through waiting[d] further forward passes of
    the slowest stage above d, and back up: max over d >= s of (sum of forward to d) + waiting[d] · (largest forward to
    d) + (sum of backward from d to s + 1).
    """
    down, up = running_sum(forward) + waiting * running_max(forward), running_sum(backward)
    return np.asarray(running_max((down + up)[::-1])[::-1] - up)


def stage_numbers(passes: Passes) -> Array:
    """Number the stages 0, 1, … in an array that broadcasts with the passes.

    Parameters
    ----------
    passes : Passes
        Times of one microbatch, shape (stages, ...) [s].

    Returns
    -------
    ndarray
        Shape (stages, 1, ...).
    """
    shape = (-1,) + (1,) * (passes.forward.ndim - 1)
    return np.arange(float(len(passes.forward))).reshape(shape)


def _one_f_one_b_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Count the stages from this one to the last, or all microbatches if they are fewer."""
    return np.asarray(np.minimum(stages - np.asarray(stage), microbatches), dtype=np.float64)


def _interleaved_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """List passes of groups of ``stages`` microbatches, which run through one chunk after the other.

    2·(stages − stage − 1) + (chunks − 1)·stages forward passes fill a stage.
    """
    forward, backward = _interleaved_passes(stages, microbatches, chunks)
    fill = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(forward))
    pairs = zip(forward[fill:], backward, strict=False)
    return [*forward[:fill], *itertools.chain.from_iterable(pairs), *backward[len(forward) - fill :]]


@lru_cache(maxsize=64)
def _interleaved_passes(stages: int, microbatches: int, chunks: int) -> tuple[list[Action], list[Action]]:
    """List the forward and the backward passes of a stage, which are the same on all stages."""
    places = itertools.product(range(0, microbatches, stages), range(chunks), range(stages))
    units = [(first + place, chunk) for first, chunk, place in itertools.islice(places, microbatches * chunks)]
    forward = [Action("F", microbatch, chunk) for microbatch, chunk in units]
    return forward, [Action("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in units]


def _interleaved_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """Compute m · max (F + B) + (Σ − max) / chunks.

    The form is exact on equal chunks. If the last chunk has a tenth more work, the engine is up to 1 % slower (most
    with a single round).
    """
    work = passes.forward + passes.backward + passes.weights
    slowest = work.max(axis=0)
    return np.asarray(microbatches * slowest + (work.sum(axis=0) - slowest) / chunks)


def _interleaved_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """Count the forward passes that fill the stage, plus one."""
    fill = 2.0 * (stages - np.asarray(stage) - 1.0) + (chunks - 1.0) * stages
    return np.minimum(fill + 1.0, np.asarray(microbatches) * float(chunks))


def _interleaved_alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """Count the activations of one chunk: ``stages`` microbatches of the first chunk, then as many of the next.

    So the last stage holds one activation of its last chunk, which has the output layer and the loss: the backward pass
    of that chunk follows immediately.

    >>> [float(_interleaved_alive_of(3, 4, 8, chunk, 3)) for chunk in range(3)]
    [4.0, 4.0, 1.0]
    """
    rounds, remainder = np.divmod(_interleaved_alive(stage, stages, microbatches, chunks), float(stages * chunks))
    return np.asarray(rounds * stages + np.clip(remainder - chunk * stages, 0.0, float(stages)))


def _interleaved_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """Count the passes of the last round, which runs backward through the chunks, ``stages`` microbatches each."""
    return float(chunk * stages), float(chunk * stages)


add_schedule(
    Schedule(
        "gpipe",
        "Huang et al., GPipe, NeurIPS 2019",
        _gpipe_order,
        ClosedForms(_gpipe_span, _gpipe_alive, remaining=none_remaining, exact="any"),
    )
)
add_schedule(
    Schedule(
        "1f1b",
        "Narayanan et al., PipeDream-Flush, ICML 2021",
        _one_f_one_b_order,
        ClosedForms(_one_f_one_b_span, _one_f_one_b_alive, remaining=none_remaining, exact="any"),
    )
)
add_schedule(
    Schedule(
        "interleaved",
        "Narayanan et al., SC 2021",
        _interleaved_order,
        ClosedForms(
            _interleaved_span, _interleaved_alive, remaining=_interleaved_remaining, alive_of=_interleaved_alive_of
        ),
        chunks=None,
        multiple=True,
    )
)
