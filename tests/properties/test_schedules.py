"""Every schedule: an order is enough. Arrays of configurations end when the engine's timelines do, closed forms are
those of the order where they claim to be, and a schedule without any behaves as with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paleo.errors import PlanError, SpecError
from paleo.schedules.base import (
    MAX_SIMULATED_PASSES,
    SCHEDULES,
    ClosedForms,
    PassTimes,
    Schedule,
    SchedulePass,
    register_schedule,
    simulates_every_microbatch,
)
from paleo.schedules.pipeline_simulation import ChunkPassTimes, simulate_pipeline
from paleo.schedules.stage_ends import pipeline_stage_end_times

Array = npt.NDArray[np.float64]
ANY = pytest.mark.parametrize("name", list(SCHEDULES))
CASES = 3


def pieces_of(schedule: Schedule, stages: int, chunks: int, spread: float, seed: int) -> Array:
    """Seconds of passes of chunks, (3, stages, chunks of all copies, cases); pieces differ by up to ``spread``."""
    generator = np.random.default_rng(seed)
    passes = generator.uniform(0.5, 2.0, (3, 1, CASES))
    if not schedule.splits_backward:
        passes[2] = 0.0
    factors = 1.0 + spread * generator.uniform(-1.0, 1.0, (1, stages * chunks, CASES))
    by_piece = passes * factors
    return np.array([[[each[k] for k in held] for held in schedule.stage_chunks(stages, chunks)] for each in by_piece])


def totals(schedule: Schedule, pieces: Array) -> PassTimes:
    return PassTimes(*(pieces.sum(axis=2) / schedule.replicas))


def engine_ends(name: str, pieces: Array, case: int, microbatches: int) -> Array:
    times = [
        [ChunkPassTimes(*pieces[:, s, c, case], 0.0) for c in range(pieces.shape[2])] for s in range(pieces.shape[1])
    ]
    return np.array(simulate_pipeline(name, times, microbatches).stage_ends)


def configurations(name: str) -> st.SearchStrategy[tuple[int, int, int]]:
    """Stages, microbatches and chunks that a schedule may have."""
    chunks = (
        st.integers(2, 4)
        if SCHEDULES[name].chunks_per_stage is None
        else st.just(SCHEDULES[name].chunks_per_stage or 1)
    )
    counts = [(p, m) for p in range(2, 7) for m in range(1, 61) if SCHEDULES[name].allows_microbatches(p, m)]
    return st.tuples(st.sampled_from(counts), chunks).map(lambda drawn: (*drawn[0], drawn[1]))


@pytest.mark.slow
@ANY
@given(data=st.data(), seed=st.integers(0, 99), spread=st.sampled_from([0.0, 0.1, 0.6]))
@settings(max_examples=12, deadline=None)
def test_arrays_end_when_the_engines_timelines_do(name: str, data: st.DataObject, seed: int, spread: float) -> None:
    schedule = SCHEDULES[name]
    stages, microbatches, chunks = data.draw(configurations(name))
    pieces = pieces_of(schedule, stages, chunks, spread, seed)
    ends = pipeline_stage_end_times(schedule, totals(schedule, pieces), microbatches, chunks, PassTimes(*pieces))
    for case in range(CASES):
        played = engine_ends(name, pieces, case, microbatches)
        assert ends[:, case].max() == pytest.approx(played.max(), rel=1e-9)
        if spread and schedule.closed_forms.exact_for_stages == "equal":
            assert ends[:, case] == pytest.approx(played, rel=1e-9)


@ANY
@given(data=st.data(), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_a_schedule_without_closed_forms_behaves_as_with_them(name: str, data: st.DataObject, seed: int) -> None:
    schedule, bare = SCHEDULES[name], replace(SCHEDULES[name], closed_forms=ClosedForms())
    stages, microbatches, chunks = data.draw(configurations(name))
    passes = totals(schedule, pieces_of(schedule, stages, chunks, 0.0, seed))
    assert pipeline_stage_end_times(bare, passes, microbatches, chunks).max(axis=0) == pytest.approx(
        pipeline_stage_end_times(schedule, passes, microbatches, chunks).max(axis=0), rel=1e-9
    )
    stage = np.arange(float(stages))
    stated = np.broadcast_to(schedule.peak_activations(stage, stages, microbatches, chunks), (stages,))
    assert np.array_equal(np.asarray(bare.peak_activations(stage, stages, microbatches, chunks)), stated)
    by_piece = [each.peak_activations_by_chunk(stage, stages, microbatches, chunks) for each in (bare, schedule)]
    assert np.array_equal(*np.broadcast_arrays(*by_piece))
    for chunk in range(chunks * schedule.replicas):
        counted = np.array(bare.passes_after_last_gradient(stage, stages, chunk, chunks))
        assert np.array_equal(
            counted, [n + 0.0 * stage for n in schedule.passes_after_last_gradient(stage, stages, chunk, chunks)]
        )


def test_zero_bubble_with_fewer_microbatches_than_stages_is_that_of_its_order() -> None:
    """8 stages, 3 microbatches, stages that differ by half: the closed form alone was up to 8 % short."""
    schedule = SCHEDULES["zb-h1"]
    short = 0.0
    for seed in range(20):
        pieces = pieces_of(schedule, 8, 1, 0.5, seed)
        passes = totals(schedule, pieces)
        assert schedule.closed_forms.makespan is not None
        formula, span = (
            schedule.closed_forms.makespan(passes, 3, 1),
            pipeline_stage_end_times(schedule, passes, 3, 1).max(axis=0),
        )
        for case in range(CASES):
            played = engine_ends("zb-h1", pieces, case, 3).max()
            assert span[case] == pytest.approx(played, rel=1e-12)
            short = min(short, formula[case] / played - 1.0)
    assert short < -0.03


def test_chimera_with_a_heavy_last_piece_is_that_of_its_order() -> None:
    schedule = SCHEDULES["chimera"]
    by_piece = np.ones((3, 4, 1)) * np.array([1.0, 2.0, 0.0])[:, None, None]
    by_piece[:, -1] *= 2.5
    pieces = np.array([[[each[k] for k in held] for held in schedule.stage_chunks(4, 1)] for each in by_piece])
    ends = pipeline_stage_end_times(schedule, totals(schedule, pieces), 8, 1, PassTimes(*pieces))
    assert ends[:, 0] == pytest.approx(engine_ends("chimera", pieces, 0, 8), rel=1e-12)


def test_cases_with_and_without_a_closed_form_stand_in_one_array() -> None:
    """Microbatches differ from case to case; ZB-H1's formula holds for the last two."""
    schedule, counts = SCHEDULES["zb-h1"], np.array([2.0, 6.0, 40.0])
    pieces = pieces_of(schedule, 6, 1, 0.0, 4)
    together = pipeline_stage_end_times(schedule, totals(schedule, pieces), counts, 1, PassTimes(*pieces))
    for case, count in enumerate(counts):
        alone = PassTimes(*pieces[..., case : case + 1])
        assert together[:, case] == pytest.approx(
            pipeline_stage_end_times(schedule, totals(schedule, pieces[..., case : case + 1]), count, 1, alone)[:, 0],
            rel=1e-12,
        )


@ANY
def test_very_many_microbatches_are_a_window_and_as_many_rounds_more(name: str) -> None:
    """Times are those of the formula on equal pieces."""
    schedule, bare = SCHEDULES[name], replace(SCHEDULES[name], closed_forms=ClosedForms())
    chunks = schedule.chunks_per_stage or 2
    passes = totals(schedule, pieces_of(schedule, 4, chunks, 0.0, 1))
    count = MAX_SIMULATED_PASSES // (4 * chunks) * 2
    assert not simulates_every_microbatch(4, chunks, count)
    assert pipeline_stage_end_times(bare, passes, count, chunks).max(axis=0) == pytest.approx(
        pipeline_stage_end_times(schedule, passes, count, chunks).max(axis=0), rel=1e-9
    )


def test_an_order_that_waits_for_itself_is_an_error() -> None:
    def backward_first(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
        return [SchedulePass("B", 0), SchedulePass("F", 0)]

    schedule = Schedule("stuck", "this test", backward_first)
    with pytest.raises(PlanError, match="4 passes wait for one another"):
        pipeline_stage_end_times(schedule, PassTimes(*np.ones((3, 2, 1))), 1, 1).max(axis=0)


def _with_changed_order(change: str) -> Schedule:
    def order(stage: int, stages: int, microbatches: int, chunks: int) -> list[SchedulePass]:
        actions = SCHEDULES["zb-h1"].pass_order(stage, stages, microbatches, chunks)
        if stage == 1 and change == "lacks":
            return [action for action in actions if action != SchedulePass("B", 1)]
        if stage == 1 and change == "repeats":
            return [*actions, SchedulePass("W", 0)]
        return [*actions, SchedulePass("F", microbatches)] if stage == 1 else actions

    return replace(SCHEDULES["zb-h1"], name=f"zb-h1 that {change}", pass_order=order)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("lacks", "with 2 stages and 2 microbatches, stage 1 has no backward pass of microbatch 1 through chunk 0"),
        ("repeats", "stage 1 has 2 times a weight pass of microbatch 0 through chunk 0"),
        ("invents", "stage 1 may not have a forward pass of microbatch 2 through chunk 0"),
    ],
)
def test_an_incomplete_schedule_is_not_registered(change: str, says: str) -> None:
    """One backward pass less was priced 5.5 % too fast without a warning."""
    with pytest.raises(SpecError, match=says):
        register_schedule(_with_changed_order(change))
    assert f"zb-h1 that {change}" not in SCHEDULES
