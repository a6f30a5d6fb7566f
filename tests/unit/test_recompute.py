"""Recomputation of some layers: worked by hand, against none and all of them, and what is wrong with it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from paleo.errors import PaleoError, PlanError
from paleo.lowering.stages_and_recompute import max_recomputable_layers, recompute_description
from paleo.predict import Prediction, predict
from paleo.schedules.base import SCHEDULES
from paleo.search.partial_recompute import fit_by_partial_recompute
from paleo.search.plans import search
from paleo.specs.model import load_model
from paleo.specs.run import Run, replace_fields
from paleo.specs.system import load_system
from paleo.studies.advice import suggest_memory_savings
from paleo.studies.cost import device_power

SYSTEM = load_system("dgx-h100")
#: Layers of a small network of each family, by the parameter that counts them.
FAMILIES: dict[str, dict[str, int]] = {
    "gpt2": {"layers": 16},
    "llama2-7b": {"layers": 16, "hidden": 1024, "heads": 16, "kv_heads": 16, "ffn": 2816},
    "mixtral-8x7b": {"layers": 16, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 1792},
    "bert_base": {"layers": 16},
    "vit_b16": {"layers": 16},
}
PIPELINES = [
    (schedule, chunks)
    for schedule, entry in SCHEDULES.items()
    for chunks in ([1, 2] if entry.chunks_per_stage is None else [entry.chunks_per_stage])
    if (schedule, chunks) != ("interleaved", 1)
]


def made(name: str = "gpt2", **more: Any) -> Prediction:
    options = {"gpus": 4, "batch": 8, "microbatch": 1, "strategy": "pp=4"} | more
    model = FAMILIES.get(name, {})
    return predict(load_model(name), SYSTEM, Run(**options, model=model))


def strategy(chunks: int) -> str:
    return "pp=4" + (f",vp={chunks}" if chunks > 1 else "")


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "chunks"), PIPELINES)
@pytest.mark.parametrize("name", list(FAMILIES))
def test_some_layers_lie_between_none_and_all(name: str, schedule: str, chunks: int) -> None:
    """Each layer more takes time and gives memory back; no layer is none of them, and all are full recomputation."""
    options = {"schedule": schedule, "strategy": strategy(chunks), "batch": 16}
    none, full = made(name, **options), made(name, recompute="full", **options)
    most = max_recomputable_layers(full.program, full.model_chunks)
    some = [made(name, recompute="full", recompute_layers=layers, **options) for layers in range(most + 1)]
    for alike, other in ((none, some[0]), (full, some[-1])):
        assert other.step_time == pytest.approx(alike.step_time, rel=1e-12)
        assert other.memory.total == pytest.approx(alike.memory.total, rel=1e-12)
        assert other.timeline.end_time == pytest.approx(alike.timeline.end_time, rel=1e-12)
    for less, more in pairwise(some):
        assert more.step_time > less.step_time and more.memory.activations < less.memory.activations
        assert more.model_flops_per_step == less.model_flops_per_step


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_replay_of_uniform_stages_is_so_many_layers_of_all(layers: int) -> None:
    """Four layers a stage: N of them take N / 4 of the time and of the bytes between none and all. The slowest stage
    and the fullest one are the same ones with and without recomputation here."""
    none, full = made(gpus=4), made(gpus=4, recompute="full")
    some = made(gpus=4, recompute="full", recompute_layers=layers)
    part = layers / 4
    assert some.step_time == pytest.approx(none.step_time + part * (full.step_time - none.step_time), rel=1e-12)
    held = none.memory.activations + part * (full.memory.activations - none.memory.activations)
    assert some.memory.activations == pytest.approx(held, rel=1e-12)


def test_one_device_replays_the_first_layers() -> None:
    """The same without a pipeline; energy counts the kernels that run again."""
    options = {"gpus": 1, "strategy": "dp", "batch": 2}
    none, full, some = (
        made(**options, **more) for more in ({}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": 4})
    )
    assert some.step_time == pytest.approx(none.step_time + (full.step_time - none.step_time) / 4, rel=1e-12)
    assert some.step_time == pytest.approx(some.timeline.end_time, rel=1e-12)
    blocks = [section for section in some.program.sections if section.name == "block"]
    assert [(one.repeat, one.recompute_policy) for one in blocks] == [(4, "full"), (12, "none")]
    drawn = [device_power(one) for one in (none, some, full)]
    assert all(one is not None for one in drawn)


def test_a_group_keeps_one_input_and_brings_all_its_layers_back() -> None:
    """Sixteen layers, groups of five: 5, 5, 5 and 1, so four inputs; five layers live at once in backward."""
    options = {"gpus": 1, "strategy": "dp", "batch": 16, "microbatch": 16, "recompute": "full"}
    alone, groups = made(**options), made(**options, **{"recompute.every": 5})
    block = next(section for section in alone.program.sections if section.name == "block")
    assert alone.memory.activations - groups.memory.activations == pytest.approx(12 * block.input_bytes, rel=1e-12)
    assert groups.memory.workspace - alone.memory.workspace == pytest.approx(4 * block.saved_bytes, rel=1e-12)
    assert groups.step_time == pytest.approx(alone.step_time, rel=1e-12)
    assert made(**options, **{"recompute.every": 1}).memory == alone.memory


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_named_layers_are_the_ones_that_are_meant(schedule: str) -> None:
    first = made(schedule=schedule, recompute="full", recompute_layers=2)
    named = made(schedule=schedule, recompute={"by_layer": {f"block.{n}": "full" for n in (0, 1, 4, 5, 8, 9, 12, 13)}})
    assert named.breakdown == first.breakdown and named.memory == first.memory
    every = made(
        schedule=schedule, recompute={"policy": "full", "by_layer": {"block.*": "none", "block.1[0-5]": "full"}}
    )
    least = made(schedule=schedule, recompute={"by_layer": {"block.?": "none", "block.1?": "full"}})
    assert every.step_time == least.step_time


def test_later_names_win_and_layers_outside_of_blocks_have_names_too() -> None:
    ways = made(recompute={"by_layer": {"*": "full", "block.*": "selective", "head": "none"}})
    by_name = {section.name: section.recompute_policy for section in ways.program.sections}
    assert (by_name["embed"], by_name["block"], by_name["head"]) == ("full", "selective", "none")


def test_convolutions_are_layers_of_their_own() -> None:
    """Nothing repeats: full recomputation is that of every layer, and N are the first N."""
    options = {"gpus": 1, "strategy": "dp", "batch": 8}
    full = made("alexnet", recompute="full", **options)
    most = max_recomputable_layers(full.program, full.model_chunks)
    assert most == len(full.program.sections)
    assert made("alexnet", recompute="full", recompute_layers=most, **options).breakdown == full.breakdown
    some = made("alexnet", recompute="full", recompute_layers=9, **options)
    assert [one.recompute_policy for one in some.program.sections] == ["full"] * 9 + ["none"] * (most - 9)


def test_the_cut_by_time_weighs_what_is_recomputed() -> None:
    """As in full recomputation where all layers are recomputed, as without it where none is."""
    options = {"pipeline.cut": "time", "gpus": 4}
    for name in ("gpt2", "resnet50"):
        for how, layers in (("full", None), ("none", 0)):
            alike = made(name, recompute=how, **options)
            stated = max_recomputable_layers(alike.program, alike.model_chunks) if layers is None else layers
            other = made(name, recompute="full", recompute_layers=stated, **options)
            assert other.step_time == pytest.approx(alike.step_time, rel=1e-12)


@pytest.mark.slow
def test_the_fewest_layers_that_fit_are_advised() -> None:
    """One layer fewer does not fit; it is faster than full recomputation, and written as it is run."""
    run = Run(gpus=8, global_batch=64, microbatch=8, strategy="tp=4,pp=2,sp")
    whole = predict(load_model("llama2-13b"), SYSTEM, run)
    assert not whole.memory.fits
    found = {one.change: one.prediction for one in suggest_memory_savings(whole)}
    some = fit_by_partial_recompute(whole)
    assert some is not None and some.memory.fits
    layers = some.run.recompute.layers
    assert layers is not None and 0 < layers < 20
    assert found[f"--recompute full --recompute-layers {layers}"].step_time == some.step_time
    less = predict(load_model("llama2-13b"), SYSTEM, replace_fields(some.run, {"recompute_layers": layers - 1}))
    assert not less.memory.fits and some.step_time < found["--recompute full"].step_time


def test_layers_are_advised_for_a_pipeline_that_is_cut_elsewhere_under_recomputation() -> None:
    """The first of 16 stages of DeepSeek-V3 has 5 layers to recompute; once recomputed, no stage has above 4."""
    run = Run(gpus=2048, strategy="pp=16,ep=64,zero=1", global_batch=15360, microbatch=1, dtype="fp8")
    prediction = predict(load_model("deepseek_v3"), load_system("h800-8"), run)
    some = fit_by_partial_recompute(prediction)
    assert max_recomputable_layers(prediction.program, prediction.model_chunks) == 5
    assert some is not None and some.run.recompute.layers is not None and 0 < some.run.recompute.layers <= 4


BAD = [
    ({"recompute_layers": 4}, "recompute_layers: chooses layers of full recomputation, but recompute is 'none'"),
    ({"recompute.every": 4}, "recompute.every: chooses layers"),
    ({"recompute": "full", "recompute_layers": 5}, "recompute_layers: 5 layers; the fullest piece .* has 4"),
    ({"recompute": "full", "recompute.every": 5}, "recompute.every: 5 layers; the fullest piece .* has 4"),
    ({"recompute": "full", "recompute.every": 2, "recompute_layers": 2}, "state one of them"),
    (
        {"recompute.by_layer": {"blok.3": "full"}},
        r"recompute.by_layer: no layer is called 'blok.3'; nearest: 'block.\*'",
    ),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        made(**options)


def test_a_search_recomputes_all_layers_alike() -> None:
    with pytest.raises(PaleoError, match="a search recomputes all layers alike"):
        search(load_model("gpt2"), SYSTEM, Run(gpus=8, recompute="full", recompute_layers=2))


def test_forward_passes_recompute_nothing() -> None:
    options = {"forward_only": True, "gpus": 1, "strategy": "dp"}
    assert made(recompute="full", recompute_layers=3, **options).step_time == made(**options).step_time


def test_words() -> None:
    assert recompute_description(Run(recompute="full", recompute_layers=3)) == "full, 3 layers a stage"
    assert recompute_description(Run(recompute={"policy": "full", "every": 3})) == "full, every 3 layers"
    assert recompute_description(Run(recompute={"by_layer": {"block.0": "full"}})) == "none, full of block.0"
