"""One step model: its timeline ends when the step does, its parts add up, and a search asks for the same step."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paleo.errors import PaleoError
from paleo.predict import Prediction, predict
from paleo.schedules.base import SCHEDULES
from paleo.search.plans import _sized, _sources, search
from paleo.search.ranking import Ranking
from paleo.search.space import SearchSpace, search_space_from_options
from paleo.specs.loading import validate_mapping
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.step.layouts import ResultCache
from paleo.step.step import predict_steps

#: Small enough to run many of them, with a vocabulary that makes the last stage the longest.
SIZES = {"layers": 8, "hidden": 512, "heads": 8, "seq": 256, "vocab": 8192}
STRATEGIES = ("", "zero=1", "zero=2", "zero=3", "tp=2", "tp=2,sp,zero=1", "cp=2,zero=3", "cp=2,ulysses")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"exchange": "after"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_layers": 1},
    {"recompute": "selective", "software": "megatron-core"},
    {"offload": "optimizer,activations"},
    {"input": {"decode": "40 ms"}},
    {"pipeline.cut": "time"},
    {"microbatch": 2},
    {"calibration": "ideal"},
)


def sampled(name: str, pipeline: str, count: int) -> list[Run]:
    """Some runs of a schedule, drawn from a seed."""
    every = list(itertools.product(STRATEGIES, OPTIONS, (16, 64, 256)))
    runs = []
    for strategy, options, batch in random.Random(f"{name} {pipeline}").sample(every, count):
        parts = ",".join(part for part in (pipeline, strategy) if part) or "dp"
        stated = {"gpus": 16, "global_batch": batch, "strategy": parts, "schedule": name, "model": SIZES}
        runs.append(validate_mapping(Run, {"microbatch": 1} | stated | options, "test"))
    return runs


def predictions(name: str, pipeline: str, count: int) -> list[Prediction]:
    """Those of the runs that their schedule can run."""
    made = []
    for run in sampled(name, pipeline, count):
        try:
            made.append(predict(load_model("gpt2"), load_system("dgx-h100"), run))
        except PaleoError:
            continue
    return made


PIPELINES = [
    (name, f"pp=4{f',vp={each.chunks_per_stage or 2}' * (each.chunks_per_stage != 1)}")
    for name, each in SCHEDULES.items()
]


@pytest.mark.parametrize(("name", "pipeline"), [*PIPELINES, ("1f1b", "pp=2"), ("1f1b", "")])
def test_the_timeline_ends_when_the_step_does(name: str, pipeline: str) -> None:
    runs = predictions(name, pipeline, 14)
    assert len(runs) > 3
    for prediction in runs:
        assert prediction.timeline.end_time == pytest.approx(prediction.step_time, rel=1e-9), prediction.run
        parts = {part: seconds[0] for part, seconds in prediction.step_arrays.breakdown.items()}
        assert sum(parts.values()) - parts["communication_total"] == pytest.approx(prediction.step_time, rel=1e-9)


def test_a_trace_of_a_pipeline_names_what_a_stage_does() -> None:
    options = {"gpus": 16, "global_batch": 16, "microbatch": 1, "strategy": "tp=2,pp=4,zero=1", "schedule": "zb-h1"}
    run = validate_mapping(Run, options | {"input": {"decode": "1 ms"}, "model": SIZES}, "test")
    prediction = predict(load_model("gpt2"), load_system("dgx-h100"), run)
    kinds = {event.task.kind for event in prediction.timeline.events}
    assert kinds == {"F", "B", "W", "send", "transfer", "exchange", "update", "gather", "input"}
    names = {event.task.name for event in prediction.timeline.events if event.task.kind == "transfer"}
    assert names and all("over tp" in name for name in names)


@pytest.mark.parametrize("name", list(SCHEDULES))
def test_many_microbatches_are_drawn_as_a_window(name: str) -> None:
    pipeline = dict(PIPELINES)[name]
    options = {"gpus": 4, "global_batch": 16384, "microbatch": 1, "strategy": pipeline, "schedule": name}
    run = validate_mapping(Run, options | {"model": SIZES}, "test")
    prediction = predict(load_model("gpt2"), load_system("dgx-h100"), run)
    assert len(prediction.timeline.events) < 20_000
    assert prediction.timeline.end_time == pytest.approx(prediction.step_time, rel=1e-9)
    for stage in range(4):
        spans = sorted((e.start, e.end) for e in prediction.timeline.events if e.task.resource == f"stage{stage}")
        assert all(before[1] <= after[0] * (1 + 1e-12) for before, after in itertools.pairwise(spans))


#: Configurations compared for each search; 2,000 were when the step became one.
DRAWS = 25
SEARCHED: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"gpus": 24, "global_batch": 96}),
    ("llama2-7b", {"gpus": 32, "global_batch": 64, "software": "megatron-core"}),
    ("mixtral-8x7b", {"gpus": 16, "global_batch": 32}),
]


#: What a search is told beside degrees: strategies and options that each of its configurations has.
STATED: list[tuple[str, dict[str, Any], str | None]] = [
    ("gpt2", {"offload": "optimizer,activations"}, None),
    ("gpt2", {"offload": "optimizer,gradients,parameters"}, "zero=3"),
    ("gpt2", {}, "zero=3,shard=8"),
    ("gpt2", {}, "cp=4,ulysses"),
    ("resnet50", {}, "spatial=2"),
    ("alexnet", {}, "owt"),
    ("gpt2", {"placement": {"block.*.mlp1": {"ffn": None}}}, None),
    ("gpt2", {"pipeline.cut": (3, 3, 4, 2)}, "pp=4"),
    ("gpt2", {"model": {"layers": 13}}, None),
]


@pytest.mark.parametrize(
    ("model", "options", "strategy", "draws"),
    [
        *((model, options, None, DRAWS) for model, options in SEARCHED),
        *((model, {"gpus": 16, "global_batch": 64} | options, strategy, 6) for model, options, strategy in STATED),
    ],
)
def test_a_search_asks_for_the_same_step(model: str, options: dict[str, Any], strategy: str | None, draws: int) -> None:
    network, machine, run = load_model(model), load_system("dgx-h100"), validate_mapping(Run, options, "test")
    source, *_ = _sources(
        network, machine, _sized(run, run.gpus, run.global_batch or 0), search_space_from_options(strategy)
    )
    part = source.evaluate_within()
    ranking = Ranking([part], machine, "time")
    for index in random.Random(2026).sample(range(len(ranking.step)), draws):
        row = ranking.plan_row(index)
        alone = predict(network, machine, row.run)
        assert row.step_time == pytest.approx(alone.step_time, rel=1e-9), row
        assert row.memory == pytest.approx(alone.memory.total, rel=1e-9), row


@pytest.mark.parametrize("layers", [12, 13])
def test_no_strategy_that_fits_beats_the_first_plan(layers: int) -> None:
    """Runs drawn from a seed: degrees, chunks, schedules, cuts, recomputation of some layers, shard groups."""
    network, machine = load_model("gpt2"), load_system("dgx-h100")
    stated: dict[str, Any] = {"gpus": 16, "global_batch": 16, "model": {"layers": layers, "seq": 512}}
    best = search(network, machine, validate_mapping(Run, stated, "test"), top=1).plans[0]
    draw, tried = random.Random(layers), 0
    for _ in range(160):
        pipeline, tensor = draw.choice((1, 2, 4, 8)), draw.choice((1, 2))
        chunks = draw.choice((1, 1, 2, 3)) if pipeline > 1 else 1
        more = draw.choice(("", ",zero=1", ",zero=2", ",zero=1,shard=2"))
        strategy = f"tp={tensor},pp={pipeline}{more}" + (f",vp={chunks}" if chunks > 1 else "")
        recompute = draw.choice(({}, {}, {"recompute": "full", "recompute_layers": 1}))
        cut = draw.choice(({}, {"pipeline.cut": "time"})) if pipeline > 1 else {}
        free = {"strategy": strategy, "microbatch": draw.choice((1, 2)), "schedule": draw.choice(("1f1b", "zb-h1"))}
        try:
            alone = predict(network, machine, validate_mapping(Run, stated | free | recompute | cut, "test"))
        except PaleoError:
            continue
        tried += 1
        assert alone.step_time >= 0.99 * best.step_time, alone.run
    assert tried > 50


@pytest.mark.slow
def test_one_configuration_is_what_it_is_among_others() -> None:
    """Steps of a batch of many cases against those of each alone; their parts add up."""
    network, machine, run = load_model("gpt2"), load_system("dgx-h100"), Run(gpus=16, global_batch=64)
    source, *_ = _sources(network, machine, _sized(run, 16, 64), SearchSpace(schedules=("1f1b", "zb-v")))
    part = source.evaluate_within()
    results = part.results
    for number, stored in list(enumerate(results.batches))[::7]:
        rows = results.indices_in_batch(np.flatnonzero(results.batch_index == number))
        batch = replace(
            stored,
            cases=stored.cases.select(rows),
            input_arrival_time=np.asarray(stored.input_arrival_time)[rows],
            cache=ResultCache(),
        )
        together = predict_steps(batch)
        added = sum(seconds for name, seconds in together.breakdown.items() if name != "communication_total")
        assert np.allclose(added, together.step_time, rtol=1e-9)
        for case in (0, len(batch) - 1):
            index = np.array([case])
            arrival = np.asarray(batch.input_arrival_time)[index]
            single = predict_steps(
                replace(batch, cases=batch.cases.select(index), input_arrival_time=arrival, cache=ResultCache())
            )
            assert single.step_time[0] == pytest.approx(together.step_time[case], rel=1e-12)
            assert single.fullest_stage_memory[0] == pytest.approx(together.fullest_stage_memory[case], rel=1e-12)
            for name, seconds in single.breakdown.items():
                assert seconds[0] == pytest.approx(together.breakdown[name][case], rel=1e-9, abs=1e-15)
