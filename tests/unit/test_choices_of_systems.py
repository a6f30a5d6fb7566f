"""Data parallelism by PyTorch's names, counts of each system, one search for every command, and money in scaling."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from paleo.cli.process import run_command_line
from paleo.errors import PaleoError
from paleo.network.graph import build_graph
from paleo.parallel.placement import parse_strategy
from paleo.parallel.plan import plan
from paleo.predict import MEMORY_HEADROOM_SHARE, predict
from paleo.questions import parse_systems_with_gpu_counts
from paleo.search.gpu_counts import recommended_plans
from paleo.search.space import list_layouts, search_space_from_options
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.studies.cost import Tariff, TrainingAmount
from paleo.studies.purchase import AUTO, PurchaseRequirements, compare_systems, plan_purchase
from paleo.studies.scale import cost_verdict, predict_scale_curve

H100 = load_system("dgx-h100")
GPT2, LLAMA = load_model("gpt2"), load_model("llama2-7b")
SIXTEEN = Run(gpus=16, global_batch=64)


@pytest.mark.parametrize(
    ("words", "meaning"),
    [("ddp", "dp"), ("fsdp", "zero=3"), ("fsdp,shard=4", "zero=3,shard=4"), ("hsdp", "zero=3,shard=8"),
     ("tp=2,hsdp", "tp=2,zero=3,shard=4"), ("hsdp,shard=2", "zero=3,shard=2")],
)  # fmt: skip
def test_names_of_data_parallelism_are_stages_of_zero(words: str, meaning: str) -> None:
    named, stated = (plan(GPT2, H100, SIXTEEN.model_copy(update={"strategy": each})) for each in (words, meaning))
    assert named.strategy_text == stated.strategy_text and named.mesh == stated.mesh


def test_a_search_within_named_sharding_tries_that_alone() -> None:
    assert search_space_from_options("fsdp").zero == (3,) and search_space_from_options("ddp").zero == (0,)


@pytest.mark.parametrize("words", ["hsdp", "tp=2,hsdp", "tp=8,hsdp"])
def test_a_search_shards_within_nodes_as_a_run_does(words: str) -> None:
    chosen = list_layouts(build_graph(GPT2, batch=1), 16, 64, search_space_from_options(words), H100.devices_per_node)
    stated = plan(GPT2, H100, SIXTEEN.model_copy(update={"strategy": words}))
    assert stated.mesh in [layout.mesh for layout in chosen]


@pytest.mark.parametrize("words", ["fsdp,zero=1", "ddp,fsdp", "fsdpp"])
def test_contradictions_are_errors(words: str) -> None:
    with pytest.raises(PaleoError, match=r"state one of them|nearest"):
        parse_strategy(words)


def test_counts_behind_a_colon_are_gpus_and_words_say_how_many_nodes_those_are() -> None:
    machines = parse_systems_with_gpu_counts("dgx-h100:4, dgx-a100-80gb", 16)
    assert [(system.name, gpus) for system, gpus in machines] == [("dgx-h100", 4), ("dgx-a100-80gb", 16)]
    words = [system.gpus_and_nodes_text(gpus) for system, gpus in machines]
    assert words == ["4 GPUs of dgx-h100 (of 8 in a node)", "16 GPUs of dgx-a100-80gb (2 nodes)"]
    assert H100.gpus_and_nodes_text(12) == "12 GPUs of dgx-h100 (2 nodes)"


@pytest.mark.slow
def test_a_comparison_finds_the_plan_that_plan_and_report_find() -> None:
    """The same search, the same order: that of `recommended`, with room in memory."""
    auto = Run(strategy=AUTO, global_batch=32)
    study = compare_systems(LLAMA, [H100], auto, gpus=[8], planner=recommended_plans)
    assert study.candidates[0].prediction is not None
    best = study.candidates[0].prediction
    reply = plan_purchase(LLAMA, [(H100, [8])], Run(global_batch=32), PurchaseRequirements())
    assert reply.plans[0].row.run == best.run
    assert reply.plans[0].row.step_time == pytest.approx(best.step_time, rel=1e-14)  # sums of one and of many plans
    assert best.memory.total <= (1 - MEMORY_HEADROOM_SHARE) * best.memory.capacity


@pytest.mark.slow
def test_where_nothing_fits_a_comparison_says_what_would() -> None:
    study = compare_systems(LLAMA, [H100], Run(gpus=8, batch=4))
    (candidate,) = study.candidates
    assert not candidate.fits and candidate.advice[0].fits
    assert predict(LLAMA, H100, candidate.advice[0].prediction.run).memory.fits


def test_json_of_a_comparison_of_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["compare", "alexnet", "--systems", "dgx-h100:4,dgx-1-v100:8", "--json"]) == 0
    assert [each["gpus"] for each in json.loads(capsys.readouterr().out)["systems"]] == [4, 8]


# money


def test_spending_names_the_cheapest_count_and_the_price_of_time_saved() -> None:
    """1 USD for each GPU and hour: cost is GPUs of whole nodes times hours."""
    tariff = Tariff(gpu_price="1 USD/h")  # type: ignore[arg-type]
    curve = predict_scale_curve(
        load_model("resnet50"),
        H100,
        Run(global_batch=512),
        (1, 8, 64),
        "strong",
        amount=TrainingAmount(1e11, "x"),
        tariff=tariff,
    )
    costs = [point.training.cost or 0 for point in curve.points if point.training]
    hours = [point.training.time / 3600 for point in curve.points if point.training]
    assert costs == pytest.approx([8 * hours[0], 8 * hours[1], 64 * hours[2]])
    sentence = cost_verdict(curve) or ""
    assert sentence.startswith("x: cheapest on 8 GPUs (")
    more, days = costs[2] - costs[1], (hours[1] - hours[2]) / 24
    assert f"64 GPUs cost {more:,.0f} USD more, {more / days:.3g} USD for each day saved" in sentence


def test_no_price_no_sentence() -> None:
    curve = predict_scale_curve(load_model("resnet50"), H100, Run(global_batch=512), (1, 8), "strong")
    assert cost_verdict(curve) is None
    unpriced = replace(curve, points=tuple(replace(point, training=None) for point in curve.points))
    assert cost_verdict(unpriced) is None


@pytest.mark.parametrize(
    "words",
    [["compare", "gpt2", "--systems", "dgx-h100:1"], ["scale", "gpt2", "--system", "dgx-h100", "--gpus", "1"],
     ["plan", "gpt2", "--systems", "dgx-h100", "--gpus", "1", "--tokens", "1B"]],
)  # fmt: skip
def test_a_utilisation_that_nobody_reaches_is_remarked_on(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """On the bare roofline a network without element-wise passes to speak of is near its peak."""
    sizes = ["--set", "model.hidden=12288", "--set", "model.layers=1", "--set", "model.vocab=512", "--batch", "16"]
    run_command_line([*words, *sizes, "--calibration", "ideal", "--software", "cuda-graph"])
    assert "hardly anybody reaches 75 %" in capsys.readouterr().out
