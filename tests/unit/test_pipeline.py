"""Pipeline schedules against their closed forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paleo.errors import PlanError
from paleo.predict import predict
from paleo.schedules.base import SCHEDULES, PassTimes, check_schedule
from paleo.schedules.pipeline_simulation import ChunkPassTimes, pipeline_events, simulate_pipeline
from paleo.schedules.stage_ends import pipeline_stage_end_times
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system


def uniform(
    depth: int, chunks: int, *, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0
) -> list[list[ChunkPassTimes]]:
    return [[ChunkPassTimes(forward / chunks, backward / chunks, weights / chunks, 0.0)] * chunks] * depth


@pytest.mark.slow
@given(depth=st.integers(2, 12), turns=st.integers(1, 12), extra=st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_bubble_is_the_closed_form(depth: int, turns: int, extra: int) -> None:
    """(p − 1)(F + B + W) for GPipe and 1F1B, whatever the number of microbatches."""
    microbatches = depth * turns + extra % depth
    for name in ("gpipe", "1f1b"):
        total = simulate_pipeline(name, uniform(depth, 1), microbatches).makespan
        assert total == pytest.approx(3.0 * (microbatches + depth - 1), rel=1e-12)


@pytest.mark.slow
@given(depth=st.integers(2, 8), turns=st.integers(1, 40), chunks=st.integers(2, 4))
@settings(max_examples=40, deadline=None)
def test_interleaving_divides_the_bubble(depth: int, turns: int, chunks: int) -> None:
    total = simulate_pipeline("interleaved", uniform(depth, chunks), depth * turns).makespan
    assert total == pytest.approx(3.0 * (depth * turns + (depth - 1) / chunks), rel=1e-9)


@pytest.mark.slow
@given(depth=st.integers(2, 8), turns=st.integers(1, 30))
@settings(max_examples=40, deadline=None)
def test_zero_bubble_h1_keeps_a_third(depth: int, turns: int) -> None:
    """(p − 1)(F + B − W), Qi et al. 2024, table 1."""
    total = simulate_pipeline("zb-h1", uniform(depth, 1), depth * turns).makespan
    assert total == pytest.approx(3.0 * depth * turns + (depth - 1), rel=1e-9)


def chunks_of(name: str, asked: int = 2) -> int:
    """Chunks of a copy on each stage: its own number, or what is asked for where it takes any."""
    known = SCHEDULES[name].chunks_per_stage
    return asked if known is None else known


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("depth", [2, 5, 6])
@pytest.mark.parametrize("turns", [2, 3])
def test_every_pass_once_and_forward_before_backward(name: str, depth: int, turns: int) -> None:
    schedule, chunks = SCHEDULES[name], chunks_of(name)
    if not schedule.allows_microbatches(depth, depth * turns):
        return
    for stage in range(depth):
        actions = schedule.pass_order(stage, depth, depth * turns, chunks)
        kinds = ("F", "B", "W") if schedule.splits_backward else ("F", "B")
        expected = {(kind, i, c) for kind in kinds for i in range(depth * turns) for c in range(chunks)}
        if schedule.replicas > 1:  # a microbatch goes through one copy
            expected = {
                (kind, i, c) for kind, i, c in expected | {(k, i, 1) for k, i, _ in expected} if c == i % depth % 2
            }
        assert len(actions) == len(expected)
        assert set(actions) == expected
        position = {action: index for index, action in enumerate(actions)}
        for kind, i, c in expected:
            if kind != "F":
                assert position["F", i, c] < position[kind, i, c]  # type: ignore[index]


TIME = st.floats(0.1, 3.0)


@pytest.mark.slow
@given(depth=st.integers(2, 7), more=st.integers(0, 20), f=TIME, b=TIME, w=TIME)
@settings(max_examples=100, deadline=None)
def test_zero_bubble_v_closed_form_is_exact_on_equal_stages(
    depth: int, more: int, f: float, b: float, w: float
) -> None:
    times = [[ChunkPassTimes(f / 2, b / 2, w / 2, 0.0)] * 2] * depth
    passes = PassTimes(*(np.full(depth, one) for one in (f, b, w)))
    count = 2 * depth + more
    played = simulate_pipeline("zb-v", times, count).makespan
    assert float(pipeline_stage_end_times(SCHEDULES["zb-v"], passes, count, 2).max(axis=0)) == pytest.approx(
        played, rel=1e-12
    )


@pytest.mark.slow
@given(depth=st.integers(2, 8), more=st.integers(0, 30))
@settings(max_examples=40, deadline=None)
def test_zero_bubble_v_has_no_bubble_where_passes_are_equal(depth: int, more: int) -> None:
    """Every stage works without a pause from its first pass to its last (Qi et al. 2024, section 6)."""
    played = simulate_pipeline("zb-v", uniform(depth, 2), 2 * depth + more)
    for stage in range(depth):
        events = [event for event in played.timeline.events if event.task.resource == f"stage{stage}"]
        idle = max(event.end for event in events) - min(event.start for event in events)
        assert idle - sum(event.task.duration for event in events) == pytest.approx(0.0, abs=1e-9)
        assert min(event.start for event in events) == pytest.approx(stage / 2)


@pytest.mark.slow
@given(half=st.integers(1, 5), units=st.integers(1, 6), f=TIME, b=TIME)
@settings(max_examples=100, deadline=None)
def test_chimera_closed_form_is_exact_on_equal_stages(half: int, units: int, f: float, b: float) -> None:
    times, depth = [[ChunkPassTimes(f, b, 0.0, 0.0)] * 2] * (2 * half), 2 * half
    passes = PassTimes(np.full(depth, f), np.full(depth, b), np.zeros(depth))
    played = simulate_pipeline("chimera", times, depth * units).makespan
    ends = pipeline_stage_end_times(SCHEDULES["chimera"], passes, depth * units, 1)
    assert float(ends.max(axis=0)) == pytest.approx(played, rel=1e-12)


@pytest.mark.parametrize("depth", [2, 4, 8, 16])
def test_chimera_bubble_is_the_published_one(depth: int) -> None:
    """(p − 2) / (3p / 2 + p − 2) of a unit where B = 2F, p − 2 pauses where B = F (Li and Hoefler 2021, table 2 and
    section 3.1)."""
    unit = simulate_pipeline("chimera", [[ChunkPassTimes(1.0, 2.0, 0.0, 0.0)] * 2] * depth, depth).makespan
    assert 1.0 - 3.0 * depth / unit == pytest.approx((depth - 2) / (1.5 * depth + depth - 2))
    assert (
        simulate_pipeline("chimera", [[ChunkPassTimes(1.0, 1.0, 0.0, 0.0)] * 2] * depth, depth * 3).makespan
        == 7 * depth - 2
    )


@pytest.mark.slow
@given(depth=st.integers(1, 4), units=st.integers(2, 6), last=st.floats(0.0, 0.5))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("zb-v", -0.005, 0.05), ("chimera", -0.045, 0.045), ("dualpipe", -1e-12, 0.035), ("dualpipev", -1e-12, 0.035)],
)
def test_v_and_bidirectional_closed_forms_are_near_with_a_heavier_last_piece(
    name: str, low: float, high: float, depth: int, units: int, last: float
) -> None:
    """A head of up to half a piece; ``depth`` pairs of stages."""
    schedule, stages, chunks = SCHEDULES[name], 2 * depth, chunks_of(name)
    pieces = [np.array([1.0, 1.1, 0.9])] * (stages * chunks - 1) + [np.array([1.0, 1.1, 0.9]) * (1.0 + last)]
    held = schedule.stage_chunks(stages, chunks)
    times = [[ChunkPassTimes(*pieces[piece], 0.0) for piece in stage] for stage in held]
    passes = PassTimes(*np.array([sum(pieces[i] for i in stage) / schedule.replicas for stage in held]).T)
    played = simulate_pipeline(name, times, stages * units).makespan
    assert (
        low
        <= float(pipeline_stage_end_times(schedule, passes, stages * units, chunks).max(axis=0)) / played - 1.0
        <= high
    )


@pytest.mark.parametrize("name", list(SCHEDULES))
@pytest.mark.parametrize("depth", [2, 3, 6])
@pytest.mark.parametrize("turns", [2, 3])
def test_what_follows_the_gradients_of_a_chunk_is_what_the_order_has(name: str, depth: int, turns: int) -> None:
    schedule, chunks = SCHEDULES[name], chunks_of(name, 3)
    if not schedule.allows_microbatches(depth, depth * turns):
        return
    makes = "W" if schedule.splits_backward else "B"
    for stage in range(depth):
        order = schedule.pass_order(stage, depth, depth * turns, chunks)
        for chunk in range(chunks * schedule.replicas):
            last = max(i for i, action in enumerate(order) if (action.kind, action.chunk) == (makes, chunk))
            left = [action.kind for action in order[last + 1 :]]
            counts = left.count("B"), left.count("W") if schedule.splits_backward else left.count("B")
            assert schedule.passes_after_last_gradient(stage, depth, chunk, chunks) == counts


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_few_microbatches_are_all_drawn(name: str) -> None:
    schedule, chunks = SCHEDULES[name], chunks_of(name)
    stages = uniform(4, chunks * schedule.replicas)
    events = pipeline_events(name, stages, 8, simulate_pipeline(name, stages, 8).stage_ends)
    assert len(events) == 4 * 8 * chunks * (3 if schedule.splits_backward else 2)
    assert {event.task.kind for event in events} <= {"F", "B", "W"}


def test_a_tensor_does_not_travel_where_the_v_turns() -> None:
    """Two stages: it goes from the first to the second and back, not from the second to itself."""
    times = [[ChunkPassTimes(1.0, 1.0, 1.0, 5.0)] * 2] * 2
    sends = [e for e in simulate_pipeline("zb-v", times, 4).timeline.events if e.task.kind == "send"]
    assert len(sends) == 4 * 2 * 2
    assert SCHEDULES["zb-v"].sends_output(3, 2) == ((True, True), (True, True), (False, True))


@pytest.mark.parametrize(
    ("name", "stages", "chunks", "microbatches", "message"),
    [
        ("chimera", 3, 1, 6, "'chimera' needs an even number of stages, not 3"),
        ("chimera", 4, 1, 6, "6 microbatches are not a multiple of the 4 stages"),
        ("zb-v", 4, 2, 7, "7 microbatches are too few; it needs 2 for each of the 4 stages"),
        ("zb-v", 4, 3, 8, "'zb-v' holds 2 chunks a stage, not 3"),
        ("gpipe", 4, 2, 8, "'gpipe' holds one chunk a stage, not 2; use interleaved"),
    ],
)
def test_what_a_schedule_cannot_run_is_said(
    name: str, stages: int, chunks: int, microbatches: int, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        check_schedule(name, stages, chunks, microbatches)


def test_one_f_one_b_keeps_as_many_activations_as_stages_follow() -> None:
    assert [SCHEDULES["1f1b"].replayed_peak_activations(stage, 4, 16, 1) for stage in range(4)] == [
        (4,),
        (3,),
        (2,),
        (1,),
    ]
    assert [SCHEDULES["gpipe"].replayed_peak_activations(stage, 4, 16, 1) for stage in range(4)] == [(16,)] * 4


def test_long_runs_are_not_unrolled_and_agree_with_those_that_are() -> None:
    """The window's extrapolation equals the full simulation, on uneven stages too."""
    stages = [
        [ChunkPassTimes(1.0, 1.5, 0.5, 0.1)],
        [ChunkPassTimes(1.2, 2.0, 0.4, 0.1)],
        [ChunkPassTimes(0.7, 1.0, 0.5, 0.0)],
    ]
    from paleo.schedules.pipeline_simulation import _run

    for name in ("1f1b", "gpipe", "zb-h1"):
        for microbatches in (40, 61, 200):
            full = _run(SCHEDULES[name], stages, microbatches).makespan
            assert simulate_pipeline(name, stages, microbatches).makespan == pytest.approx(full, rel=1e-12)


def test_the_slowest_stage_sets_the_pace() -> None:
    stages = [[ChunkPassTimes(1.0, 1.0, 1.0, 0.0)]] * 3 + [[ChunkPassTimes(2.0, 2.0, 2.0, 0.0)]]
    total = simulate_pipeline("1f1b", stages, 32).makespan
    assert total == pytest.approx(32 * 6.0 + 3 * 3.0)


def test_interleaving_needs_whole_rounds() -> None:
    with pytest.raises(PlanError, match="not a multiple of the 4 stages"):
        simulate_pipeline("interleaved", uniform(4, 2), 6)


DURATION = st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0]) | st.floats(0.01, 3.0)
STAGES = st.lists(st.tuples(DURATION, DURATION, DURATION), min_size=1, max_size=7)


def engine(name: str, stages: list[tuple[float, float, float]], microbatches: int, chunks: int = 1) -> float:
    """Every pass played by the engine."""
    from paleo.schedules.pipeline_simulation import _run

    times = [[ChunkPassTimes(f / chunks, b / chunks, w / chunks, 0.0)] * chunks for f, b, w in stages]
    return _run(SCHEDULES[name], times, microbatches).makespan


def closed(name: str, stages: list[tuple[float, float, float]], microbatches: int, chunks: int = 1) -> float:
    forward, backward, weights = (np.array(column) for column in zip(*stages, strict=True))
    return float(
        pipeline_stage_end_times(SCHEDULES[name], PassTimes(forward, backward, weights), microbatches, chunks).max(
            axis=0
        )
    )


@pytest.mark.slow
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


@pytest.mark.slow
@given(depth=st.integers(2, 8), microbatches=st.integers(1, 30), first=st.floats(0, 0.5), last=st.floats(0, 0.5))
@settings(max_examples=100, deadline=None)
def test_zero_bubble_closed_form_is_within_a_hundredth(
    depth: int, microbatches: int, first: float, last: float
) -> None:
    stages = ends_heavier(depth, first, last)
    assert closed("zb-h1", stages, microbatches) == pytest.approx(engine("zb-h1", stages, microbatches), rel=0.01)


@pytest.mark.slow
@given(depth=st.integers(2, 6), rounds=st.integers(1, 8), chunks=st.integers(2, 4), last=st.floats(0, 0.1))
@settings(max_examples=60, deadline=None)
def test_interleaved_closed_form_is_near_with_a_heavier_last_chunk(
    depth: int, rounds: int, chunks: int, last: float
) -> None:
    """A head of up to a tenth of a chunk, in the last chunk alone."""
    from paleo.schedules.pipeline_simulation import _run

    times = [[ChunkPassTimes(1.0, 2.0, 0.0, 0.0)] * chunks for _ in range(depth)]
    times[-1] = [*times[-1][:-1], ChunkPassTimes(1.0 + last, 2.0 + 2 * last, 0.0, 0.0)]
    played = _run(SCHEDULES["interleaved"], times, depth * rounds).makespan
    stages = [(float(chunks), 2.0 * chunks, 0.0)] * (depth - 1) + [(chunks + last, 2.0 * (chunks + last), 0.0)]
    assert closed("interleaved", stages, depth * rounds, chunks) == pytest.approx(played, rel=0.02)


@pytest.mark.slow
@given(stages=STAGES, microbatches=st.integers(1, 25))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_no_stage_ends_later_than_stated(
    name: str, stages: list[tuple[float, float, float]], microbatches: int
) -> None:
    from paleo.schedules.pipeline_simulation import _run

    passes = PassTimes(*(np.array(column) for column in zip(*stages, strict=True)))
    played = _run(SCHEDULES[name], [[ChunkPassTimes(*one, 0.0)] for one in stages], microbatches)
    stated = SCHEDULES[name].closed_forms.stage_ends(np.asarray(played.makespan), passes, microbatches, 1)
    assert stated.max() == pytest.approx(played.makespan)
    if name != "zb-h1":
        assert np.all(np.array(played.stage_ends) <= stated * (1 + 1e-12))


@pytest.mark.parametrize("name", list(SCHEDULES))
@given(depth=st.integers(1, 8), rounds=st.integers(1, 4), chunks=st.integers(2, 4))
@settings(max_examples=30, deadline=None)
def test_activations_alive_by_formula_and_by_order(name: str, depth: int, rounds: int, chunks: int) -> None:
    schedule, pieces = SCHEDULES[name], chunks_of(name, chunks)
    if not schedule.allows_microbatches(depth, depth * rounds):
        return
    for stage in range(depth):
        counted = schedule.replayed_peak_activations(stage, depth, depth * rounds, pieces)
        assert schedule.peak_activations(stage, depth, depth * rounds, pieces) == sum(counted)
        assert tuple(schedule.peak_activations_by_chunk(stage, depth, depth * rounds, pieces)) == counted


def test_closed_forms_broadcast() -> None:
    """A column of an array is what it is alone."""
    columns = np.random.default_rng(3).uniform(0.5, 2.0, (3, 4, 5))
    counts = np.array([1.0, 4.0, 8.0, 12.0, 40.0])
    for name, schedule in SCHEDULES.items():
        chunks = chunks_of(name)
        together = pipeline_stage_end_times(schedule, PassTimes(*columns), counts, chunks).max(axis=0)
        for i, count in enumerate(counts):
            alone = pipeline_stage_end_times(schedule, PassTimes(*columns[:, :, i]), float(count), chunks).max(axis=0)
            assert together[i] == pytest.approx(float(alone), rel=1e-12), name


def test_an_output_layer_keeps_its_loss() -> None:
    """94 layers in 96 chunks: the embedding and the output layer with its loss are the other two, as Megatron counts
    them; a loss on a stage of its own would be sent the logits of every token, 1.2 GB."""
    system, model = load_system("dgx-h100"), load_model("qwen3-235b-a22b")
    run = {"gpus": 256, "global_batch": 1024, "microbatch": 1, "dtype": "bf16", "software": "megatron-core"}
    plain, interleaved = (
        predict(model, system, Run.model_validate({**run, "strategy": f"pp=32,ep=8,zero=1,vp={chunks}"}))
        for chunks in (1, 3)
    )
    pieces = interleaved.step_arrays.batch.assignment.model_chunks
    names = [section.name for section in interleaved.program.sections]
    assert [names[section] for section, _ in pieces[-1]][-2:] == names[-2:]
    block = max(range(len(names)), key=lambda index: interleaved.program.sections[index].repeat)
    assert [dict(piece).get(block, 0) for piece in pieces] == [0, *[1] * 94, 0]
    last = interleaved.breakdown
    assert interleaved.step_time < 1.15 * plain.step_time
    assert last.communication_exposed < 2 * plain.breakdown.communication_exposed
