"""Pipeline schedules against their closed forms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paleo.errors import PlanError
from paleo.pipeline import StageTime, pipeline_time
from paleo.schedules.base import SCHEDULES


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
