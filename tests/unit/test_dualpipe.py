"""DualPipe and DualPipeV: the published order, bubble and activations, steps worked by hand, and tokens that travel
beside a pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paleo.errors import PlanError
from paleo.predict import Prediction, predict
from paleo.schedules.base import SCHEDULES, PassTimes, check_schedule
from paleo.schedules.bidirectional import dualpipe_bubble_time
from paleo.schedules.pipeline_simulation import ChunkPassTimes, simulate_pipeline
from paleo.schedules.stage_ends import pipeline_stage_end_times
from paleo.search.plans import search
from paleo.search.space import search_space_from_options
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

H100 = load_system("dgx-h100")
QWEN = load_model("qwen3-30b-a3b")
NAMES = ("dualpipe", "dualpipev")
TIME = st.floats(0.1, 3.0)


def uniform(
    stages: int, forward: float = 1.0, backward: float = 1.0, weights: float = 1.0
) -> list[list[ChunkPassTimes]]:
    """Stages with two equal chunks, seconds of each."""
    return [[ChunkPassTimes(forward, backward, weights, 0.0)] * 2] * stages


def half_of(name: str, stages: int) -> int:
    """PP / 2 of the paper: under DualPipeV the network has two pieces for each stage."""
    return stages // 2 if name == "dualpipe" else stages


def words(name: str, stage: int, stages: int, microbatches: int) -> str:
    """A stage's order, microbatches from 0; small letters for the second chunk, brackets around what runs as one."""
    texts = []
    for group in SCHEDULES[name].pass_groups(stage, stages, microbatches, SCHEDULES[name].chunks_per_stage or 1):
        text = " ".join(f"{a.kind.lower() if a.chunk else a.kind}{a.microbatch}" for a in group)
        texts.append(f"[{text}]" if len(group) > 1 else text)
    return " ".join(texts)


def test_orders_of_small_pipelines() -> None:
    """By the eight steps of DeepSeek's code (dualpipev.py, step)."""
    assert words("dualpipev", 0, 2, 4) == (
        "F0 F1 F2 f0 b0 w0 f1 [F3 b1 w1] [f2 B0 W0] [b2 w2] [f3 B1 W1] [b3 w3] B2 W2 B3 W3"
    )
    assert words("dualpipev", 1, 2, 4) == (
        "F0 f0 F1 f1 F2 [b0 w0] [f2 B0 W0] [F3 b1 w1] [f3 B1 W1] [b2 w2] [B2 W2] b3 B3 w3 W3"
    )
    assert words("dualpipe", 0, 2, 4) == "F0 f1 F2 [b1 w1] [f3 B0 W0] [b3 w3] B2 W2"
    assert words("dualpipe", 1, 2, 4) == "f1 F0 f3 [B0 W0] [F2 b1 w1] [B2 W2] b3 w3", "the mirror image"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("pairs", [1, 2, 4, 8])
def test_bubble_is_the_published_one(name: str, pairs: int) -> None:
    """(PP / 2 − 1)(F&B + B − 3W), table 2 of the report; with F = W = 1 and B = 2 a pair takes 3."""
    stages, microbatches = 2 * pairs, 4 * pairs
    work = 3.0 * microbatches * (SCHEDULES[name].chunks_per_stage or 1)
    published = (half_of(name, stages) - 1) * (3.0 + 2.0 - 3.0)
    assert simulate_pipeline(name, uniform(stages), microbatches).makespan == pytest.approx(work + published)


@pytest.mark.parametrize("half", [2, 3, 8])
def test_bubble_is_a_forward_pass_less_where_backward_is_the_longest(half: int) -> None:
    """Of a forward pass of 1 and a backward pass of 2 + 1 the published form makes 4 for each of n = PP / 2 − 1."""
    idle = dualpipe_bubble_time(np.array(1.0), np.array(2.0), np.array(1.0), half)
    assert idle == pytest.approx((half - 1) * (4.0 + 3.0 - 3.0) - 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@given(pairs=st.integers(1, 4), more=st.integers(0, 8), f=TIME, b=TIME, w=TIME)
@settings(max_examples=60, deadline=None)
def test_closed_form_is_exact_on_equal_stages(name: str, pairs: int, more: int, f: float, b: float, w: float) -> None:
    stages, chunks = 2 * pairs, SCHEDULES[name].chunks_per_stage or 1
    passes = PassTimes(*(np.full(stages, chunks * each) for each in (f, b, w)))
    count = 2 * stages + 2 * more
    played = simulate_pipeline(name, uniform(stages, f, b, w), count).makespan
    assert float(pipeline_stage_end_times(SCHEDULES[name], passes, count, chunks).max(axis=0)) == pytest.approx(
        played, rel=1e-12
    )


def test_a_folded_pipeline_by_hand() -> None:
    """Two stages, four microbatches, passes of 1 s. Stage 0 pairs F3 and b1 from 7 to 10 s, b1's gradient and F3's
    output leave at 10; stage 1 pairs f2 and B0 from 8 to 11, F3 and b1 from 11 to 14: 24 s of work and 2 s idle."""
    played = simulate_pipeline("dualpipev", uniform(2), 4)
    starts = {(e.task.resource, e.task.name): e.start for e in played.timeline.events}
    assert [starts["stage0", name] for name in ("F3.0", "B1.1", "W1.1", "F2.1", "B2.1")] == [7.0, 8.0, 9.0, 11.0, 14.0]
    assert [starts["stage1", name] for name in ("F2.1", "F3.0", "F3.1", "B2.1", "B3.1")] == [
        8.0,
        11.0,
        14.0,
        17.0,
        22.0,
    ]
    assert played.stage_ends == (26.0, 26.0)


def test_a_heavy_last_piece_by_hand() -> None:
    """The same with passes of 2 s in the fourth piece, the second chunk of stage 0, which then works without a pause:
    4 · (3 + 6) s. Stage 1 waits for the pair of stage 0 that ends at 16, and from 22 to 24."""
    heavy = [[ChunkPassTimes(1.0, 1.0, 1.0, 0.0), ChunkPassTimes(2.0, 2.0, 2.0, 0.0)], uniform(1)[0]]
    played = simulate_pipeline("dualpipev", heavy, 4)
    starts = {(e.task.resource, e.task.name): e.start for e in played.timeline.events}
    assert [starts["stage1", name] for name in ("B0.1", "F2.1", "F3.0", "F3.1", "B2.1", "B3.1")] == [
        7,
        9,
        16,
        19,
        24,
        32,
    ]
    assert played.stage_ends == (36.0, 36.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stages", [2, 4, 6])
def test_activations_are_the_published_ones(name: str, stages: int) -> None:
    """PP + 1 on every stage; of a copy that goes down as many as 1F1B keeps."""
    schedule, chunks = SCHEDULES[name], SCHEDULES[name].chunks_per_stage or 1
    for stage in range(stages):
        counts = schedule.replayed_peak_activations(stage, stages, 4 * stages, chunks)
        assert sum(counts) == 2 * half_of(name, stages) + 1
        assert name == "dualpipev" or counts == (stages - stage, stage + 1)


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "message"),
    [
        ("dualpipe", 3, 8, "needs an even number of stages, not 3"),
        ("dualpipe", 4, 9, "9 microbatches are not shared evenly by its 2 copies"),
        ("dualpipe", 4, 6, "6 microbatches are too few; it needs 2 for each of the 4 stages"),
        ("dualpipev", 4, 7, "7 microbatches are too few"),
    ],
)
def test_what_they_cannot_run_is_said(name: str, stages: int, microbatches: int, message: str) -> None:
    assert not SCHEDULES[name].allows_microbatches(stages, microbatches)
    with pytest.raises(PlanError, match=message):
        check_schedule(name, stages, SCHEDULES[name].chunks_per_stage or 1, microbatches)


def predicted(schedule: str, **more: Any) -> Prediction:
    run = {"gpus": 32, "batch": 1, "microbatch": 1, "strategy": "pp=4,ep=8", "software": "megatron-core", **more}
    run |= {"schedule": schedule, "dtype": "bf16", "batch": 8, "kernels.cuda_graph": "full_iteration"}
    return predict(QWEN, H100, Run.model_validate({"model": {"layers": 8}, **run}))


@pytest.mark.parametrize(("name", "alone"), [("dualpipe", 5 / 8), ("dualpipev", 9.75 / 16)])
def test_tokens_travel_beside_the_other_pass_of_a_pair(name: str, alone: float) -> None:
    """Forward passes that run alone on stages 0 to 3: 5 of 8 under DualPipe, 11, 10, 9 and 9 of 16 under DualPipeV."""
    prediction = predicted(name)
    batch = prediction.step_arrays.batch
    assert batch.cases.layer_times.hidden_transfers.max() > 0
    assert batch.layer_times.hidden_transfers == pytest.approx((1.0 - alone) * batch.cases.layer_times.hidden_transfers)
    assert prediction.step_time == predicted(name, experts={"overlap": True}).step_time
    apart = predicted(name, experts={"overlap": False}).breakdown
    assert apart.communication_total == pytest.approx(prediction.breakdown.communication_total)
    assert apart.communication_exposed > prediction.breakdown.communication_exposed


def test_software_that_pairs_passes_of_chimera_leaves_those_that_fill_it() -> None:
    """Stage 0 of 4 holds 3 microbatches, of the 8 that pass through it in one of the two copies."""
    batch = predicted("chimera", experts={"overlap": True}).step_arrays.batch
    assert batch.layer_times.hidden_transfers == pytest.approx(5 / 8 * batch.cases.layer_times.hidden_transfers)


def test_software_may_run_the_passes_of_a_pair_one_after_the_other() -> None:
    """torchtitan has DualPipeV, and nothing that overlaps its pairs."""
    steps = [
        predicted("dualpipev", software="torchtitan", experts={"overlap": each}).step_time for each in (None, False)
    ]
    assert steps[0] == steps[1] > predicted("dualpipev", software="torchtitan", experts={"overlap": True}).step_time


def test_a_schedule_of_pairs_hides_nothing_without_a_pipeline() -> None:
    plain, named = (predicted(name, strategy="ep=8").step_time for name in ("1f1b", "dualpipe"))
    assert plain == named


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_search_prices_pairs_as_an_estimate_does(name: str) -> None:
    """With experts on one rank and spread over eight, where tokens travel beside the pairs."""
    run = {"gpus": 32, "global_batch": 64, "dtype": "bf16", "software": "megatron-core", "model": {"layers": 8}}
    for experts in (1, 8):
        space = search_space_from_options(f"tp=1,cp=1,ep={experts},pp=4", schedules=name, recompute="none")
        rows = search(QWEN, H100, Run.model_validate(run), space=space, top=5).plans
        assert {row.schedule for row in rows} == {name}
        for row in rows:
            assert row.step_time == pytest.approx(predict(QWEN, H100, row.run).step_time, rel=1e-9)
