"""Pipeline orders of one network in one direction: GPipe, 1F1B and interleaved 1F1B.

GPipe makes all forward passes, then all backward passes. 1F1B (one forward, one backward) has at most as many
activations alive as the pipeline has stages. Interleaved 1F1B gives each stage several chunks of layers, so that the
pipeline fills in smaller pieces.
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
    """F of every microbatch, then B of every microbatch from the last to the first."""
    forward = [Action("F", i) for i in range(microbatches)]
    return forward + [Action("B", i) for i in reversed(range(microbatches))]


def _gpipe_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """ΣF + (m − 1) max F + Σ(B + W) + (m − 1) max (B + W): exact on any stages."""
    back, more = passes.backward + passes.weights, np.asarray(microbatches) - 1.0
    return np.asarray(
        passes.forward.sum(axis=0) + back.sum(axis=0) + more * (passes.forward.max(axis=0) + back.max(axis=0))
    )


def _gpipe_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """All microbatches of the step."""
    return microbatches


def _one_f_one_b_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Fill with stages − stage − 1 forward passes, then alternate, then drain."""
    fill = min(stages - stage - 1, microbatches)
    actions = [Action("F", i) for i in range(fill)]
    for i in range(microbatches - fill):
        actions += [Action("F", fill + i), Action("B", i)]
    return actions + [Action("B", i) for i in range(microbatches - fill, microbatches)]


def _one_f_one_b_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """The longest way through the passes, exact on any stages; m · max (F + B) + what the others add where the last is
    slowest.

    Each stage may be the one that sets the pace: it fills, makes m − 1 − w pairs of passes (w ahead of its first
    backward pass), and drains, which is filling seen from the end. A stage with all m ahead has no pairs: it makes all
    forward, then all backward.
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
        Forward passes that each stage makes ahead of that one.

    Returns
    -------
    ndarray
        Shape (stages, ...) [s].

    Notes
    -----
    The longest way there goes through the forward passes down to some stage d, spends its ahead passes on the slowest
    of the stages above, and comes back up: max over d >= s of (sum of forward to d) + waiting[d] · (largest forward to
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
    """As many as there are stages from here on."""
    return np.asarray(np.minimum(stages - np.asarray(stage), microbatches), dtype=np.float64)


def _interleaved_order(stage: int, stages: int, microbatches: int, chunks: int) -> list[Action]:
    """Microbatches go round in groups of ``stages``; fill with 2·(stages − stage − 1) + (chunks − 1)·stages passes."""
    forward, backward = _interleaved_passes(stages, microbatches, chunks)
    fill = min(2 * (stages - stage - 1) + (chunks - 1) * stages, len(forward))
    pairs = zip(forward[fill:], backward, strict=False)
    return [*forward[:fill], *itertools.chain.from_iterable(pairs), *backward[len(forward) - fill :]]


@lru_cache(maxsize=64)
def _interleaved_passes(stages: int, microbatches: int, chunks: int) -> tuple[list[Action], list[Action]]:
    """The forward and the backward passes of any stage, each kind in its order."""
    places = itertools.product(range(0, microbatches, stages), range(chunks), range(stages))
    units = [(first + place, chunk) for first, chunk, place in itertools.islice(places, microbatches * chunks)]
    forward = [Action("F", microbatch, chunk) for microbatch, chunk in units]
    return forward, [Action("B", microbatch, chunks - 1 - chunk) for microbatch, chunk in units]


def _interleaved_span(passes: Passes, microbatches: Numeric, chunks: int) -> Array:
    """m · max (F + B) + (Σ − max) / chunks.

    Exact on equal chunks. A heavier last chunk makes the engine up to 1 % slower at a tenth more work (most with one
    round alone).
    """
    work = passes.forward + passes.backward + passes.weights
    slowest = work.max(axis=0)
    return np.asarray(microbatches * slowest + (work.sum(axis=0) - slowest) / chunks)


def _interleaved_alive(stage: Numeric, stages: int, microbatches: Numeric, chunks: int) -> Numeric:
    """The passes that fill the stage, and one."""
    fill = 2.0 * (stages - np.asarray(stage) - 1.0) + (chunks - 1.0) * stages
    return np.minimum(fill + 1.0, np.asarray(microbatches) * float(chunks))


def _interleaved_alive_of(stage: Numeric, stages: int, microbatches: Numeric, chunk: int, chunks: int) -> Numeric:
    """``stages`` microbatches of a chunk, then as many of the next. So the last stage has one of its last chunk, with
    the output layer and the loss: its backward pass is the next that it makes.

    >>> [float(_interleaved_alive_of(3, 4, 8, chunk, 3)) for chunk in range(3)]
    [4.0, 4.0, 1.0]
    """
    rounds, remainder = np.divmod(_interleaved_alive(stage, stages, microbatches, chunks), float(stages * chunks))
    return np.asarray(rounds * stages + np.clip(remainder - chunk * stages, 0.0, float(stages)))


def _interleaved_remaining(stage: Numeric, stages: int, chunk: int, chunks: int) -> tuple[Numeric, Numeric]:
    """The last round goes backward through the chunks, ``stages`` microbatches each."""
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
