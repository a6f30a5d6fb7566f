"""Pipeline schedules against their closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paleo.errors import PlanError
from paleo.pipeline import StageTime, pipeline_time
from paleo.schedules.base import SCHEDULES, Passes


def uniform(
    depth: int, chunks: int, *, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0
) -> list[list[StageTime]]:
    return [[StageTime(forward / chunks, backward / chunks, weights / chunks, 0.0)] * chunks] * depth


@given(depth=st.integers(2, 12), turns=st.integers(1, 12), extra=st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_bubble_is_the_closed_form(depth: int, turns: int, extra: int) -> None:
    """(p − 1)(F + B + W) for GPipe and 1F1B, whatever the number of microbatches."""
    microbatches = depth * turns + extra % depth
    for name in ("gpipe", "1f1b"):
        total = pipeline_time(name, uniform(depth, 1), microbatches).total
        assert total == pytest.approx(3.0 * (microbatches + depth - 1), rel=1e-12)


@given(depth=st.integers(2, 8), turns=st.integers(1, 40), chunks=st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_interleaving_divides_the_bubble(depth: int, turns: int, chunks: int) -> None:
    total = pipeline_time("interleaved", uniform(depth, chunks), depth * turns).total
    assert total == pytest.approx(3.0 * (depth * turns + (depth - 1) / chunks), rel=1e-9)


@given(depth=st.integers(2, 8), turns=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_zero_bubble_h1_keeps_a_third(depth: int, turns: int) -> None:
    """(p − 1)(F + B − W), Qi et al. 2024, table 1."""
    total = pipeline_time("zb-h1", uniform(depth, 1), depth * turns).total
    assert total == pytest.approx(3.0 * depth * turns + (depth - 1), rel=1e-9)


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("turns", [1, 3])
def test_every_pass_once_and_forward_before_backward(name: str, depth: int, turns: int) -> None:
    schedule = SCHEDULES[name]
    chunks = 2 if schedule.chunked else 1
    for stage in range(depth):
        actions = schedule.order(stage, depth, depth * turns, chunks)
        kinds = ("F", "B", "W") if schedule.splits_backward else ("F", "B")
        expected = {(kind, i, c) for kind in kinds for i in range(depth * turns) for c in range(chunks)}
        assert len(actions) == len(expected)
        assert set(actions) == expected
        position = {action: index for index, action in enumerate(actions)}
        for kind, i, c in expected:
            if kind != "F":
                assert position["F", i, c] < position[kind, i, c]  # type: ignore[index]


def test_one_f_one_b_keeps_as_many_activations_as_stages_follow() -> None:
    assert [SCHEDULES["1f1b"].in_flight(stage, 4, 16, 1) for stage in range(4)] == [4, 3, 2, 1]
    assert [SCHEDULES["gpipe"].in_flight(stage, 4, 16, 1) for stage in range(4)] == [16] * 4


def test_long_runs_are_not_unrolled_and_agree_with_those_that_are() -> None:
    """The window's extrapolation equals the full simulation, on uneven stages too."""
    stages = [[StageTime(1.0, 1.5, 0.5, 0.1)], [StageTime(1.2, 2.0, 0.4, 0.1)], [StageTime(0.7, 1.0, 0.5, 0.0)]]
    from paleo.pipeline import _run

    for name in ("1f1b", "gpipe", "zb-h1"):
        for microbatches in (40, 61, 200):
            full = _run(SCHEDULES[name], stages, microbatches).total
            assert pipeline_time(name, stages, microbatches).total == pytest.approx(full, rel=1e-12)


def test_the_slowest_stage_sets_the_pace() -> None:
    stages = [[StageTime(1.0, 1.0, 1.0, 0.0)]] * 3 + [[StageTime(2.0, 2.0, 2.0, 0.0)]]
    total = pipeline_time("1f1b", stages, 32).total
    assert total == pytest.approx(32 * 6.0 + 3 * 3.0)


def test_interleaving_needs_whole_rounds() -> None:
    with pytest.raises(PlanError, match="not a multiple of the 4 stages"):
        pipeline_time("interleaved", uniform(4, 2), 6)


DURATION = st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0]) | st.floats(0.01, 3.0)
STAGES = st.lists(st.tuples(DURATION, DURATION, DURATION), min_size=1, max_size=7)


def engine(name: str, stages: list[tuple[float, float, float]], microbatches: int, chunks: int = 1) -> float:
    """Every pass played by the engine."""
    from paleo.pipeline import _run

    times = [[StageTime(f / chunks, b / chunks, w / chunks, 0.0)] * chunks for f, b, w in stages]
    return _run(SCHEDULES[name], times, microbatches).total


def closed(name: str, stages: list[tuple[float, float, float]], microbatches: int, chunks: int = 1) -> float:
    forward, backward, weights = (np.array(column) for column in zip(*stages, strict=True))
    return float(SCHEDULES[name].span(Passes(forward, backward, weights), microbatches, chunks))


@given(stages=STAGES, microbatches=st.integers(1, 25))
@settings(max_examples=200, deadline=None)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_closed_forms_are_exact_on_any_stages(
    name: str, stages: list[tuple[float, float, float]], microbatches: int
) -> None:
    assert closed(name, stages, microbatches) == pytest.approx(engine(name, stages, microbatches), rel=1e-12)


def ends_heavier(depth: int, first: float, last: float) -> list[tuple[float, float, float]]:
    """Equal stages, the first and the last with more work: an embedding, a head."""
    middle = [(1.0, 1.1, 0.9)] * depth
    middle[0] = (1.0 + first, 1.1 + first, 0.9 + first)
    middle[-1] = tuple(one + last for one in middle[-1])  # type: ignore[assignment]
    return middle


@given(depth=st.integers(2, 8), microbatches=st.integers(1, 30), first=st.floats(0, 0.5), last=st.floats(0, 0.5))
@settings(max_examples=100, deadline=None)
def test_zero_bubble_closed_form_is_within_a_hundredth(
    depth: int, microbatches: int, first: float, last: float
) -> None:
    stages = ends_heavier(depth, first, last)
    assert closed("zb-h1", stages, microbatches) == pytest.approx(engine("zb-h1", stages, microbatches), rel=0.01)


@given(depth=st.integers(2, 6), rounds=st.integers(1, 8), chunks=st.integers(2, 4), last=st.floats(0, 0.1))
@settings(max_examples=60, deadline=None)
def test_interleaved_closed_form_is_near_with_a_heavier_last_chunk(
    depth: int, rounds: int, chunks: int, last: float
) -> None:
    """A head of up to a tenth of a chunk, in the last chunk alone."""
    from paleo.pipeline import _run

    times = [[StageTime(1.0, 2.0, 0.0, 0.0)] * chunks for _ in range(depth)]
    times[-1] = [*times[-1][:-1], StageTime(1.0 + last, 2.0 + 2 * last, 0.0, 0.0)]
    played = _run(SCHEDULES["interleaved"], times, depth * rounds).total
    stages = [(float(chunks), 2.0 * chunks, 0.0)] * (depth - 1) + [(chunks + last, 2.0 * (chunks + last), 0.0)]
    assert closed("interleaved", stages, depth * rounds, chunks) == pytest.approx(played, rel=0.02)


@given(stages=STAGES, microbatches=st.integers(1, 25))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_no_stage_ends_later_than_stated(
    name: str, stages: list[tuple[float, float, float]], microbatches: int
) -> None:
    from paleo.pipeline import _run

    passes = Passes(*(np.array(column) for column in zip(*stages, strict=True)))
    played = _run(SCHEDULES[name], [[StageTime(*one, 0.0)] for one in stages], microbatches)
    stated = SCHEDULES[name].ends(np.asarray(played.total), passes, microbatches, 1)
    assert stated.max() == pytest.approx(played.total)
    if name != "zb-h1":
        assert np.all(np.array(played.ends) <= stated * (1 + 1e-12))


@pytest.mark.parametrize("name", list(SCHEDULES))
@given(depth=st.integers(1, 8), rounds=st.integers(1, 4), chunks=st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_activations_alive_by_formula_and_by_order(name: str, depth: int, rounds: int, chunks: int) -> None:
    schedule = SCHEDULES[name]
    pieces = chunks if schedule.chunked else 1
    for stage in range(depth):
        counted = schedule.in_flight(stage, depth, depth * rounds, pieces)
        assert schedule.alive(stage, depth, depth * rounds, pieces) == counted


def test_closed_forms_broadcast() -> None:
    """A column of an array is what it is alone."""
    columns = np.random.default_rng(3).uniform(0.5, 2.0, (3, 4, 5))
    counts = np.array([1.0, 4.0, 8.0, 12.0, 40.0])
    for name, schedule in SCHEDULES.items():
        chunks = 2 if schedule.chunked else 1
        together = schedule.span(Passes(*columns), counts, chunks)
        for i, count in enumerate(counts):
            alone = schedule.span(Passes(*columns[:, :, i]), float(count), chunks)
            assert together[i] == pytest.approx(float(alone), rel=1e-12), name
