from __future__ import annotations

import io
import re
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console, RenderableType

from paleo.cli import run_command_line as run
from paleo.errors import PlanError, SpecError
from paleo.predict import Breakdown, Prediction, predict
from paleo.report.compare import table as compared
from paleo.specs.device import Price
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.studies.collective import compare_algorithms
from paleo.studies.cost import Tariff, convert_training_amount, device_power, estimate_training, rent_rate
from paleo.studies.network_summary import layer_forward_times, summarise_network
from paleo.studies.purchase import compare_systems
from paleo.studies.scale import ScaleCurve, ScalePoint, Scaling, parse_scalings, predict_scale_curve, scaling_verdict
from paleo.units import HOUR

LENET, NODE = load_model("lenet"), load_system("dgx-a100-80gb")


def point(gpus: int, samples_per_s: float, *, fits: bool = True, batch: int = 64, **spent: float) -> ScalePoint:
    """A point with a stand-in for its prediction: just what a verdict looks at."""
    parts = dict.fromkeys(Breakdown.__dataclass_fields__, 0.0) | spent
    made: Any = SimpleNamespace(
        samples_per_s=samples_per_s,
        breakdown=Breakdown(**parts),
        step_time=Breakdown(**parts).step_time,
        memory=SimpleNamespace(fits=fits, total=90e9, capacity=80e9),
        plan=SimpleNamespace(local_batch=batch),
    )
    return ScalePoint(gpus, cast(Prediction, made))


def curve(scaling: Scaling, *points: ScalePoint) -> ScaleCurve:
    return ScaleCurve(scaling, 256, points)


# scaling


def test_strong_scaling_keeps_the_global_batch_and_stops_at_one_sample_a_gpu() -> None:
    found = predict_scale_curve(LENET, NODE, Run(batch=4), [1, 2, 4, 8], "strong")
    assert found.fixed_batch == 4
    assert [one.required_prediction.plan.local_batch for one in found.points] == [4, 2, 1, 1]
    assert [one.is_usable for one in found.points] == [True, True, True, False]
    assert found.points[-1].problem == "out of samples: 4 of them, 4 GPUs idle"


def test_a_count_that_leaves_gpus_idle_within_the_batch_stays_usable() -> None:
    found = predict_scale_curve(LENET, NODE, Run(global_batch=8), [5], "strong")
    assert found.points[0].is_usable
    assert found.points[0].required_prediction.plan.idle_gpus == 1  # 2 samples on each of 4 GPUs


def test_weak_scaling_keeps_the_batch_of_each_rank() -> None:
    found = predict_scale_curve(LENET, NODE, Run(global_batch=64), [2, 4], "weak")
    assert [one.required_prediction.plan.global_batch for one in found.points] == [64, 128]


def test_speedup_and_efficiency_refer_to_the_first_count_that_runs() -> None:
    found = curve("weak", point(1, 10.0, fits=False), point(2, 30.0), point(8, 90.0))
    assert found.base_point.gpus == 2
    assert found.speedup(found.points[2]) == pytest.approx(3.0)
    assert found.efficiency(found.points[2]) == pytest.approx(0.75)


def test_microbatches_shrink_with_the_share_of_a_rank() -> None:
    found = predict_scale_curve(LENET, NODE, Run(global_batch=8, microbatch=4), [1, 4], "strong")
    assert [one.required_prediction.plan.microbatch for one in found.points] == [4, 2]


def test_counts_that_the_strategy_does_not_divide_are_kept_with_their_reason() -> None:
    found = predict_scale_curve(LENET, NODE, Run(strategy="dp=2", batch=4), [1, 2], "weak")
    assert not found.points[0].is_usable
    assert "dp=2" in found.points[0].problem
    with pytest.raises(PlanError, match="dp=2"):
        predict_scale_curve(LENET, NODE, Run(strategy="dp=2", batch=4), [1, 3], "weak")


def test_bad_counts_and_bad_words_are_errors() -> None:
    with pytest.raises(SpecError, match="counts of 1 or more"):
        predict_scale_curve(LENET, NODE, Run(), [0, 1], "weak")
    with pytest.raises(SpecError, match="nearest: 'strong'"):
        parse_scalings("strongly")


def test_verdict_names_communication_where_it_grew_most() -> None:
    found = curve(
        "weak", point(1, 10.0, compute=1.0), point(2, 13.0, compute=1.0, communication_exposed=0.54)
    )  # the second GPU brings 3 of the first one's 10 samples/s; 0.54 / 1.54 = 35 %
    answer = scaling_verdict(found)
    assert (answer.pays_up_to, answer.cause) == (1, "communication_exposed")
    assert "brings 30 % of what the first ones bring; waiting for communication takes 35 % of the step" in answer.text


def test_verdict_names_kernels_that_do_not_shrink_with_the_batch() -> None:
    # four GPUs should take a quarter of 0.8 s of arithmetic; they take 0.5 s: 0.3 s too much, launches only 0.15 s
    found = curve("strong", point(1, 10.0, compute=0.8, launch=0.2), point(4, 15.0, batch=16, compute=0.5, launch=0.2))
    assert scaling_verdict(found).cause == "kernels"
    assert "16 samples per GPU no longer fill it" in scaling_verdict(found).text


def test_verdict_on_memory_and_on_samples() -> None:
    nowhere = scaling_verdict(curve("weak", point(1, 1.0, fits=False), point(2, 2.0, fits=False)))
    assert (nowhere.pays_up_to, nowhere.cause) == (None, "memory")
    assert "at best (1 GPU) 83.8 GiB wanted, 74.5 GiB there" in nowhere.text
    beyond = scaling_verdict(
        curve("strong", point(1, 1.0), ScalePoint(2, point(2, 1.0).prediction, "out of samples: 1"))
    )
    assert (beyond.pays_up_to, beyond.cause) == (1, "samples")
    later = scaling_verdict(curve("strong", point(1, 1.0, fits=False), point(2, 2.0, compute=1.0)))
    assert later.pays_up_to == 2
    assert later.text.startswith("Runs from 2 GPUs on (1: 83.8 GiB wanted")


def test_verdict_of_perfect_scaling_has_no_complaint() -> None:
    answer = scaling_verdict(curve("weak", point(1, 1.0, compute=1.0), point(2, 2.0, compute=1.0)))
    assert answer.text == "Pays up to 2 GPUs, the most asked for: efficiency 100 %."


# training


def test_amounts_are_samples() -> None:
    network = load_model("resnet50")
    epochs = convert_training_amount(network, epochs=90)
    assert epochs is not None
    assert epochs.samples == 90 * 1281167
    tokens = convert_training_amount(network, tokens=1000.0, tokens_per_sample=10.0)
    assert tokens is not None
    assert tokens.samples == 100
    assert convert_training_amount(network) is None


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"epochs": 1.0, "samples": 2.0}, "epochs and samples: state one"),
        ({"samples": 0.0}, "must be above zero"),
        ({"samples": float("nan")}, "must be above zero"),
        ({"epochs": 1.0}, "lenet names no data set"),
        ({"tokens": 1.0}, "not counted in tokens"),
    ],
)
def test_amounts_that_make_no_sense(stated: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        convert_training_amount(LENET.model_copy(update={"dataset": None}), **stated)


def test_rent_is_for_whole_nodes_and_energy_at_design_power() -> None:
    price = Price(rate="36 USD/h", date="2026-01", source="a price list")
    system = NODE.model_copy(update={"price_per_node": price})
    assert rent_rate(system, 12)[0] == pytest.approx(2 * 36 / HOUR)  # 12 GPUs: two nodes of 8
    made = predict(LENET, system, Run(gpus=12, batch=10))
    wanted = convert_training_amount(LENET, samples=1201)
    assert wanted is not None
    cost = estimate_training(made, wanted)
    assert cost.steps == 11  # of 120 samples each
    assert cost.time == pytest.approx(11 * made.step_time)
    assert cost.cost == pytest.approx(72.0 * cost.time / HOUR)
    watts = device_power(made)
    assert watts is not None  # 400 W each, and four that idle in the second node
    assert cost.energy_at_design_power == pytest.approx((12 * 400.0 + 4 * watts.idle) * cost.time)
    assert cost.energy is not None and cost.energy < cost.energy_at_design_power
    own = NODE.model_copy(update={"price_per_node": None})
    tariff = Tariff.model_validate({"electricity": "0.1 USD/kWh"})
    assert rent_rate(own, 8, tariff) == (None, None)  # nobody offers it, so it is one's own
    market = rent_rate(own, 8)[1]
    assert market is not None and "median of" in market.source


# comparison


def shown(table: RenderableType) -> str:
    """A table in one line, as on a wide terminal."""
    page = Console(width=400, record=True, file=io.StringIO())
    page.print(table)
    return " ".join(page.export_text().split())


def test_the_cheapest_is_that_of_systems_with_a_price() -> None:
    """Nobody rents out H800s and nobody states the power of TPUs: both are said, once, and prices are not repeated."""
    systems = [load_system(name) for name in ("h800-8", "dgx-h100", "tpu-v5p-pod", "meta-grand-teton-h100")]
    lines = shown(compared(compare_systems(LENET, systems, Run(gpus=8, batch=8))))
    assert "cheapest of those with a price: " in lines and "least energy of those with a known design power: " in lines
    assert "Fastest: " in lines
    assert "No price is known for h800-8; give one with --price h800-8=2.5" in lines
    assert "No design power is known for tpu-v5p-pod: " in lines
    assert lines.count("Price of dgx-h100, meta-grand-teton-h100: ") == lines.count("providers of h100-sxm5-80gb") == 1
    assert "Global batch of 64 on every system." in lines and "again: paleo estimate" not in lines
    alike = shown(compared(compare_systems(LENET, systems[1:2], Run(gpus=8, batch=8))))
    assert "cheapest: 8 GPUs" in alike and "known of" not in alike


def test_comparison_keeps_systems_that_cannot_take_part() -> None:
    found = compare_systems(LENET, [NODE, load_system("a100-sxm4-80gb"), load_system("dgx-h100")], Run(gpus=8, batch=8))
    assert [one.fits for one in found.candidates] == [True, False, True]
    assert "one device" in found.candidates[1].problem or "1 devices" in found.candidates[1].problem
    assert found.speedup(found.candidates[0]) == 1.0
    assert found.best("time") in (found.candidates[0], found.candidates[2])
    with pytest.raises(PlanError):
        compare_systems(LENET, [load_system("a100-sxm4-80gb")], Run(gpus=8))


# summary


def test_lenet_layer_by_layer() -> None:
    study = summarise_network(LENET, Run(batch=2))
    layers = {layer.name: layer for layer in study.layers}
    assert layers["conv1"].parameters == 6 * 5 * 5 + 6
    assert layers["conv1"].flops_forward == 2 * (2 * 6 * 28 * 28 * 5 * 5)  # two samples, 25 multiply-adds an output
    assert layers["conv1"].flops_backward == layers["conv1"].flops_forward  # no gradient for the image
    assert layers["linear1"].flops_backward == 2 * layers["linear1"].flops_forward
    assert layers["relu1"].output_shape == (2, 6, 28, 28)
    assert study.total("parameters") == study.graph.parameters == 61706


@pytest.mark.parametrize("name", ["bert_base", "gpt2"])
def test_a_repeated_block_counts_each_turn_and_a_tied_weight_once(name: str) -> None:
    study = summarise_network(load_model(name), Run())
    assert study.total("parameters") == study.graph.parameters
    assert max(layer.repeat for layer in study.layers) == 12


@pytest.mark.parametrize(("name", "fewer"), [("gpt2", True), ("resnet50", False)])
def test_a_summary_says_which_of_its_flop_mfu_counts(
    name: str, fewer: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer where a causal mask hides scores, or a kernel computes them again."""
    study, step = (
        summarise_network(load_model(name), Run(batch=1)),
        predict(load_model(name), load_system("dgx-h100"), Run(batch=1)),
    )
    counted = study.model_flops or (study.total("flops_forward"), study.total("flops_backward"))
    assert sum(counted) == pytest.approx(step.model_flops_per_step, rel=1e-9)
    assert (study.model_flops is not None) == fewer
    for command in ("summary", "show"):
        assert run([command, name]) == 0
        assert ("FLOP of MFU" in capsys.readouterr().out) == fewer


def test_saved_activations_grow_with_the_batch() -> None:
    one, four = (summarise_network(load_model("resnet50"), Run(batch=batch)).total("saved_bytes") for batch in (1, 4))
    assert four == pytest.approx(4 * one, rel=0.01)  # the statistics of batch_norm do not


def test_forward_times_sum_to_more_than_the_roofline_allows() -> None:
    study = summarise_network(load_model("resnet50"), Run(batch=8, dtype="bf16"))
    seconds = layer_forward_times(study, NODE, Run(calibration="ideal"))
    assert len(seconds) == len(study.layers)
    total = sum(time * layer.repeat for time, layer in zip(seconds, study.layers, strict=True))
    assert total >= study.total("flops_forward") / 312e12


# collectives


def test_algorithms_stand_in_order_above_the_lower_bound() -> None:
    study = compare_algorithms("all_reduce", 1e8, 64, NODE)
    times = [row.time for row in study.rows]
    assert times == sorted(times)
    assert study.best.time >= study.lower_bound
    assert study.links.fan_outs == (8.0, 8.0)


def test_crossovers_chain_and_leave_ties_out() -> None:
    for system in ("dgx-1-v100", "dgx-a100-80gb"):
        changes = compare_algorithms("all_reduce", 1e8, 8, load_system(system)).crossovers
        assert [one.above for one in changes[:-1]] == [one.below for one in changes[1:]]
        assert len(changes) <= 3


def test_one_rank_or_no_links_is_an_error() -> None:
    with pytest.raises(SpecError, match="2 or more"):
        compare_algorithms("all_reduce", 1.0, 1, NODE)
    with pytest.raises(PlanError, match="one device alone"):
        compare_algorithms("all_reduce", 1.0, 2, load_system("a100-sxm4-80gb"))


def test_a_collective_takes_texts_and_names() -> None:
    study = compare_algorithms("all-reduce", "100MB", np.int64(8), "dgx-h100")
    assert (study.payload_bytes, study.ranks, study.operation) == (1e8, 8, "all_reduce")
    assert study.rows == compare_algorithms("all_reduce", 1e8, 8, load_system("dgx-h100")).rows
    assert study.system.name == "dgx-h100"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"payload_bytes": "100"}, "payload_bytes: '100' has no unit"),
        ({"payload_bytes": None}, "payload_bytes: None is not a quantity"),
        ({"payload_bytes": True}, "payload_bytes: True is not a quantity"),
        ({"ranks": "8"}, "ranks '8': expected a whole number"),
        ({"ranks": 8.5}, "ranks 8.5: expected a whole number"),
        ({"system": "dgx-h10"}, "unknown system 'dgx-h10'; nearest: 'dgx-h100'"),
        ({"system": 5}, "system 5: expected a name"),
        ({"operation": 3}, "unknown collective operation '3'"),
    ],
)
def test_a_collective_of_anything_else_is_one_message(change: dict[str, Any], words: str) -> None:
    question = {"operation": "all_reduce", "payload_bytes": 1e6, "ranks": 8, "system": NODE}
    with pytest.raises(SpecError, match=re.escape(words)):
        compare_algorithms(**{**question, **change})


def printed(*words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert run(list(words)) == 0
    return " ".join(capsys.readouterr().out.split())


def test_a_collective_says_what_nccl_chooses_and_what_would_be_faster(capsys: pytest.CaptureFixture[str]) -> None:
    """Two nodes with one slow port each: the tuner takes a ring, whose bytes cross it twice as often as a tree's."""
    question = ["collective", "all_reduce", "--bytes", "100MB", "--ranks", "16", "--system", "pcie4-8gpu-10gbe"]
    text = printed(*question, capsys=capsys)
    assert "NCCL chooses ring, 208 ms" in text and "NCCL chooses by payload: chain_tree, ring from" in text
    assert re.search(r"faster, but not chosen: chain_tree, \S+ ms \(NCCL uses it for other payloads or groups\)", text)
    assert re.search(r"faster, but not chosen: double_tree, \S+ ms \(NCCL does not have it\)", text)
    assert "2.60 chosen tree" in text and "1.46 not for this payload" in text and "1.45 only by name" in text
    ideal = printed(*question, "--calibration", "ideal", capsys=capsys)
    assert "best: double_tree" in ideal and "NCCL" not in ideal and "not chosen" not in ideal


def test_a_choice_that_nothing_beats_stands_alone(capsys: pytest.CaptureFixture[str]) -> None:
    question = ["collective", "all_to_all", "--bytes", "1MB", "--ranks", "8", "--system", "dgx-h100"]
    text = printed(*question, capsys=capsys)
    assert "NCCL chooses pairwise" in text and "faster" not in text and "for every payload." in text


def test_no_figure_is_the_dust_of_rounding(capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU waits for nobody; parts too short to matter are not spelled out in nanoseconds."""
    made = predict(load_model("gpt2"), load_system("dgx-a100-80gb"), Run(batch=64))
    assert made.breakdown.communication_exposed == 0.0 == made.breakdown.communication_total
    assert 0 < made.breakdown.launch < 1e-6
    said = printed("estimate", "gpt2", "--system", "dgx-a100-80gb", "--batch", "64", capsys=capsys)
    assert "communication" not in said and "kernel launch < 1 us 0.0 %" in said


def test_a_comparison_in_different_formats_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare", "bert_base", "--systems", "dgx-1-v100,dgx-h100", "--batch", "8", "--samples", "1000"]
    assert "Number formats differ: dgx-1-v100 fp16, dgx-h100 bf16." in printed(*asked, capsys=capsys)
    assert "Number formats" not in printed(*asked, "--dtype", "fp16", capsys=capsys)


def test_one_of_a_thing_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed("scale", "gpt2", "--system", "dgx-a100-80gb", "--gpus", "1", "--batch", "1", capsys=capsys)
    assert (
        "weak scaling: batch per data-parallel rank of 1 sample " in said
        and "Pays up to 1 GPU, the most asked for" in said
    )
