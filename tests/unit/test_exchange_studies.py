"""A prediction under a consistency model, and whether compressing its gradients pays."""

from __future__ import annotations

import importlib
import json

import numpy as np
import pytest

from paleo import Prediction, Run, estimate, load_model, load_system, predict
from paleo.cli import run_command_line as paleo
from paleo.errors import PlanError
from paleo.report.plots import plot_exchange_scaling as scaling_picture
from paleo.specs.system import System
from paleo.step.waiting import expected_normal_maximum, straggler_wait_share
from paleo.studies.collective import compare_algorithms
from paleo.studies.cost import TrainingAmount, estimate_training
from paleo.studies.gradient_exchange import bandwidth_curve, compare_compressions, compression_study, consistency_study
from paleo.studies.purchase import compare_systems
from paleo.studies.scale import (
    node_placement_advice,
    node_placement_study,
    predict_scale_curve,
    scaling_verdict,
    split_into_curve_runs,
)
from paleo.studies.sweep import SweepStudy, _evaluate, _job_of


def step(**run: object) -> Prediction:
    stated = {"gpus": 64, "batch": 32, "dtype": "fp16", **run}
    return predict(load_model("resnet50"), load_system("aws-p3.16xlarge"), Run.model_validate(stated))


def test_synchronous_steps_without_noise_have_no_study() -> None:
    assert consistency_study(step()) is None and compression_study(step()) is None


def test_a_workload_is_the_step_again() -> None:
    """Compute and what is exposed of the exchange make the step, whether it overlaps or not."""
    for exchange in ("after", "overlapped"):
        prediction = step(exchange=exchange, consistency="local:1")
        study = consistency_study(prediction)
        assert study is not None
        assert float(study.synchronous.step_time) == pytest.approx(prediction.step_time, rel=1e-6)
        assert study.workload.payload == pytest.approx(prediction.memory.gradients, rel=0.01)


def test_jitter_makes_synchronous_steps_wait_and_local_ones_less() -> None:
    noisy, local = step(jitter=0.1), consistency_study(step(consistency="local:64", jitter=0.1))
    assert local is not None
    assert noisy.step_time > step().step_time * 1.05
    assert float(local.consistency_result.step_time) < noisy.step_time


def test_waiting_for_the_slowest_is_a_part_of_the_step() -> None:
    quiet, noisy, lengths = (
        step(),
        step(jitter=0.03, variation={"slow_ranks": 0.04}),
        step(variation={"lengths": 0.4}),
    )
    worked = quiet.breakdown.compute + quiet.breakdown.memory_bound + quiet.breakdown.launch
    share = float(expected_normal_maximum(quiet.plan.dp)) * 0.05  # 3 and 4 per cent make 5
    assert noisy.breakdown.stragglers == pytest.approx(share * worked)
    assert noisy.step_time == pytest.approx(quiet.step_time + share * worked)
    averaged_lengths = 0.4 / quiet.plan.local_batch**0.5
    assert lengths.breakdown.stragglers == pytest.approx(
        float(straggler_wait_share(float(quiet.plan.dp), averaged_lengths)) * worked
    )
    assert quiet.breakdown.stragglers == 0


def test_a_noise_is_named_or_stated(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["estimate", "resnet50", "--system", "dgx-a100-80gb", "--gpus", "64", "--batch", "64", "--json"]
    shares = []
    for noise in ("0.015,0.003", "traces"):
        assert paleo([*options, "--jitter", noise]) == 0
        shares.append(json.loads(capsys.readouterr().out)["breakdown_s"]["stragglers"])
    assert shares[0] == shares[1] > 0
    assert paleo([*options, "--jitter", "much"]) == 2
    assert "0.02,0.01, or traces" in capsys.readouterr().err


def test_more_servers_carry_more_workers() -> None:
    one, four = (consistency_study(step(consistency="async", servers=count)) for count in (1, 4))
    assert one is not None and four is not None
    assert float(four.consistency_result.updates_per_s) > 2.0 * float(one.consistency_result.updates_per_s)
    assert float(four.consistency_result.knee) > float(one.consistency_result.knee)


def test_sharded_workers_are_tied_together() -> None:
    with pytest.raises(PlanError, match="no worker has all parameters"):
        consistency_study(step(strategy="zero=3", consistency="async"))


@pytest.mark.slow
def test_compression_pays_below_its_rate_alone() -> None:
    """Where nothing overlaps the verdict is that of the rates, over methods and systems, but for latencies."""
    verdicts = []
    for system in ("aws-p3.16xlarge", "dgx-h100"):
        for method in ("onebit", "topk:0.001", "powersgd:4", "fp8"):
            run = Run(gpus=16, batch=8, dtype="fp16", exchange="after", compress=method)
            study = compression_study(predict(load_model("vgg16"), load_system(system), run))
            assert study is not None and study.sent_bytes < study.uncompressed_sent_bytes
            verdicts.append(study.saves_time == (study.uncompressed_bandwidth < study.break_even_bandwidth))
    assert np.mean(verdicts) >= 0.75


def test_an_estimate_says_both(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--system", "aws-p3.16xlarge", "--gpus", "16", "--batch", "32"]
    arguments = ["estimate", "resnet50", *options, "--consistency", "ssp:4", "--jitter", "0.1", "--compress", "onebit"]
    assert paleo([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"updates_per_s", "staleness", "server_utilization", "knee", "exposed_s"} <= document["consistency"].keys()
    assert document["compression"]["pays"] in (True, False)
    assert paleo(arguments) == 0
    assert "Gradient compression" in capsys.readouterr().out


def test_a_search_refuses_to_rank_by_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "resnet50", "--system", "dgx-a100-80gb", "--gpus", "8", "--consistency", "async"]
    assert paleo(arguments) == 2
    assert "always prefers the stalest" in capsys.readouterr().err


def test_a_curve_under_a_consistency_model() -> None:
    """Two workers already ask for more than a server of this node gives: the curve is flat and says so."""
    run = Run(batch=32, consistency="async")
    curve = predict_scale_curve(load_model("resnet50"), load_system("dgx-a100-80gb"), run, [1, 8, 16], "weak")
    studies = [point.consistency for point in curve.points]
    assert [float(study.consistency_result.staleness_mean) for study in studies if study is not None] == [
        0.0,
        7.0,
        15.0,
    ]
    assert curve.speedup(curve.points[-1]) < 1.1 * float(studies[0].consistency_result.knee if studies[0] else 0.0)
    stops = scaling_verdict(curve)
    assert (stops.pays_up_to, stops.cause) == (1, "server") and "parameter servers are busy" in stops.text


def test_curves_of_several_models_and_places() -> None:
    runs = split_into_curve_runs(Run(consistency="bsp,ssp:4", nodes="random"))
    expected = [("bsp", "packed"), ("bsp", "random"), ("ssp:4", "packed"), ("ssp:4", "random")]
    assert [(run.exchange.consistency, run.fabric.nodes) for run in runs] == expected
    assert split_into_curve_runs(Run()) == (Run(),)


@pytest.mark.slow
def test_the_command_prints_curves_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--system", "dgx-h100", "--gpus", "8,64", "--consistency", "bsp,async", "--nodes", "random"]
    assert paleo(["scale", "lenet", *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["curves"]) == 4 and len(document["points"]) == 8
    updates = [point["consistency"].get("updates_per_s") for point in document["points"]]
    assert [rate is None for rate in updates] == [True] * 4 + [False] * 4
    assert paleo(["scale", "lenet", *options]) == 0
    shown = capsys.readouterr().out
    assert "staleness" in shown and "random nodes at 64 GPUs: Placement" in shown


def test_a_training_lasts_as_long_as_its_workers_take() -> None:
    stale = step(consistency="async", gpus=8)
    study, amount = consistency_study(stale), TrainingAmount(stale.plan.global_batch * 10.0, "ten steps")
    assert study is not None and estimate_training(stale, amount).time == pytest.approx(10 * study.step_time)
    candidates = compare_systems(stale.model, [stale.system], stale.run, amount).candidates
    assert candidates[0].samples_per_s == pytest.approx(study.samples_per_s)


def test_a_study_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training, a comparison and the blocks of an estimate ask for the same one."""
    calls: list[Run] = []
    module = importlib.import_module("paleo.predict")
    counting = module.predict

    def counted_predict(*arguments: object) -> Prediction:
        calls.append(arguments[2])
        return counting(*arguments)

    monkeypatch.setattr(module, "predict", counted_predict)
    stale = step(consistency="async", gpus=8)
    estimate_training(stale, TrainingAmount(1000.0, "some"))
    assert consistency_study(stale) is consistency_study(stale)
    assert [run.exchange.when for run in calls] == ["after"]


def test_a_picture_shows_every_model_that_a_scale_compares() -> None:
    systems, counts = load_system("dgx-a100-80gb"), [1, 8, 16]
    runs = split_into_curve_runs(Run(batch=32, consistency="bsp,async"))
    figure = scaling_picture([predict_scale_curve(load_model("lenet"), systems, run, counts, "weak") for run in runs])
    assert figure is not None
    stale = figure.axes[1]
    assert {text.get_text() for text in stale.get_legend().get_texts()} == {"weak scaling, bsp", "weak scaling, async"}
    assert [list(line.get_ydata()) for line in stale.lines[:2]] == [[0.0] * 3, [0.0, 7.0, 15.0]]
    assert not any(line.get_clip_on() for line in stale.lines[:2])


def test_points_that_do_not_run_name_their_model_as_others_do(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--system", "dgx-a100-80gb", "--gpus", "8,7", "--strategy", "tp=4", "--consistency", "bsp,async"]
    assert paleo(["scale", "lenet", *options, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [point["consistency"] for point in document["unusable"]] == [{"model": "bsp"}, {"model": "async"}]
    assert [point["consistency"]["model"] for point in document["points"]] == ["bsp", "async"]


def test_a_sweep_has_columns_of_consistency() -> None:
    axes = {"consistency": ["bsp", "async"]}
    study = SweepStudy(models=["lenet"], systems=["dgx-a100-80gb"], run={"gpus": 8, "batch": 32}, axes=axes)
    plain, stale = _evaluate(_job_of(study), 0)
    assert plain["updates_per_s"] is None and stale["staleness_mean"] == 7.0
    assert stale["samples_per_s"] == pytest.approx(stale["global_batch_size"] / stale["step_time_s"])


def leaves_of_four(oversubscription: float) -> System:
    system = load_system("dgx-h100")
    fabric = system.levels[-1].model_copy(update={"leaf": 4, "oversubscription": oversubscription})
    return system.model_copy(update={"levels": (*system.levels[:-1], fabric), "max_nodes": 64})


def test_advice_says_when_placement_matters() -> None:
    """An exchange of experts between nodes over uplinks eight times oversubscribed is slower on random nodes; sums of
    gradients by sorted rings on uplinks that are not oversubscribed are not."""
    experts = Run(gpus=32, batch=1, strategy="zero=1,ep=32", nodes="random")
    for model, run, ratio, matters in (
        ("qwen3-30b-a3b", experts, 8.0, True), ("gpt2", Run(gpus=128, batch=1, nodes="random"), 1.0, False),
    ):  # fmt: skip
        study = node_placement_study(predict(load_model(model), leaves_of_four(ratio), run))
        assert study is not None and study.lengthens_step is matters and 1.0 < study.port_share.leaves <= 16
        assert study.advice.startswith("Placement matters" if matters else "Placement does not matter")
    assert node_placement_study(step()) is None


def test_an_exchange_of_several_leaves_has_more_uplinks_when_spread() -> None:
    """On an idle machine: sixteen nodes packed fill four leaves and their few uplinks, at random they use twelve."""
    experts = Run(gpus=128, batch=1, strategy="zero=1,ep=128", nodes="random")
    study = node_placement_study(predict(load_model("qwen3-30b-a3b"), leaves_of_four(8.0), experts))
    assert study is not None and study.slowdown < 0.95 and not study.lengthens_step
    assert "shorter than on packed nodes" in study.advice and "as long as others leave them idle" in study.advice


def test_curves_say_what_placement_costs() -> None:
    run = Run(batch=1, nodes="random")
    curve = predict_scale_curve(load_model("gpt2"), leaves_of_four(1.0), run, [8, 64], "weak")
    (sentence,) = node_placement_advice([curve])
    assert sentence.startswith("random nodes at 64 GPUs: Placement does not matter")


def test_compressed_sums_beside_the_dense_one() -> None:
    """The rate of the dense sum below B* and messages that cost nothing more: it pays, and every figure adds up."""
    dense = compare_algorithms("all_reduce", 1.3e9, 64, load_system("aws-p3.16xlarge"), dtype="fp32")
    study = compare_compressions(dense, ["fp16", "topk:0.001", "powersgd:4"], dtype="fp32", tensors=100)
    assert {row.collective_scheme for row in study.rows if row.method == "topk:0.001"} == {
        "gather all", "split and gather", "recursive doubling",
    }  # fmt: skip
    (half,) = (row for row in study.rows if row.method == "fp16")
    assert half.sent_bytes == pytest.approx(
        study.uncompressed_sent_bytes / 2
    ) and study.uncompressed_sent_bytes == pytest.approx(2 * 63 / 64 * 1.3e9)
    assert half.break_even_bandwidth == pytest.approx(
        (study.uncompressed_sent_bytes - half.sent_bytes) / half.compression_time
    )
    assert study.saves_time(half) and study.uncompressed_bandwidth < half.break_even_bandwidth
    assert [row.time for row in study.rows] == sorted(row.time for row in study.rows)


def test_nothing_pays_inside_a_node_of_fast_links() -> None:
    dense = compare_algorithms("all_reduce", 1e8, 8, load_system("dgx-h100"), dtype="bf16")
    study = compare_compressions(dense, ["dgc:0.001"], tensors=54)
    assert not any(study.saves_time(row) for row in study.rows)
    assert study.rows[0].compression_time > 54 * 1.1e-3  # calls of the framework, a tensor each


@pytest.mark.slow
def test_collective_takes_methods(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["collective", "all_reduce", "--bytes", "1GB", "--ranks", "16", "--system", "aws-p3.16xlarge"]
    assert paleo([*arguments, "--compress", "onebit,topk:0.01", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["compression"]
    assert len(document["methods"]) == 4 and document["rate_bytes_per_s"] > 0
    assert paleo([*arguments, "--compress", "onebit"]) == 0
    assert "pays below" in capsys.readouterr().out
    for wrong in ("zeropp", "topk", "onebyte"):
        assert paleo([*arguments, "--compress", wrong]) == 2
        assert "compress" in capsys.readouterr().err


def test_whole_tensors_go_to_their_owners_compressed() -> None:
    """Where ranks own whole tensors the sum of gradients is scattered and not returned, in half the bytes with fp8; the
    gathers of parameters stay as they are."""
    options = {"strategy": "zero=1", "software": "internevo", "model": {"layers": 4}, "batch": 1}
    dense, half = (
        predict(load_model("llama2-7b"), load_system("dgx-a100-80gb"), Run(gpus=16, compress=method, **options))
        for method in (None, "fp8")
    )
    sums, gathers = (
        [float(part.sum()) for part in (batch.layouts.gradient_exchange_times_and_bytes(batch.assignment, 1,
            chunks=False)[0],
                                        batch.layouts.state_gather_times(batch.assignment))]
        for batch in (dense.step_arrays.batch, half.step_arrays.batch)
    )  # fmt: skip
    assert gathers[1] == sums[1] and 0.45 < gathers[0] / sums[0] < 0.75


def test_a_warm_up_is_dense() -> None:
    whole, part = (compression_study(step(compress=name)) for name in ("onebit", "onebit:0.25"))
    assert whole is not None and part is not None and whole.mean_step_time == whole.prediction.step_time
    assert part.mean_step_time == pytest.approx(
        0.25 * part.uncompressed_prediction.step_time + 0.75 * part.prediction.step_time
    )


def test_the_rate_at_which_compression_stops_paying() -> None:
    """Steps cross between the slow links where it pays and the fast ones where it does not."""
    run = Run(gpus=16, batch=8, dtype="fp16", exchange="after", compress="dgc:0.001")
    prediction = predict(load_model("vgg16"), load_system("aws-p3.16xlarge"), run)
    curve = bandwidth_curve(prediction, (1 / 32, 1.0, 32.0))
    pays = [
        coded < dense for coded, dense in zip(curve.compressed_step_times, curve.uncompressed_step_times, strict=True)
    ]
    assert pays[0] and not pays[-1] and curve.crossover_bandwidth is not None
    assert (
        curve.bandwidths[0] < curve.crossover_bandwidth < curve.bandwidths[-1]
        and curve.system_bandwidth == curve.bandwidths[1]
    )
    with pytest.raises(PlanError, match="no links"):
        bandwidth_curve(predict(load_model("lenet"), load_system("l4"), Run(compress=None)))


def test_rates_of_an_estimate_are_those_of_its_consistency_model() -> None:
    """64 workers at 16 servers that are busy all the time: the rate that the servers allow, not the synchronous one."""
    answer = estimate("resnet50", "dgx-a100-80gb", gpus=64, consistency="async", servers=16)
    document = answer.to_dict()
    assert document["samples_per_s"] == answer.samples_per_s == document["consistency"]["samples_per_s"]
    assert answer.samples_per_s < 0.5 * answer.prediction.samples_per_s


@pytest.mark.parametrize("model", ["async", "ssp:3", "local:8", "gossip:one-peer", "diloco:64"])
def test_a_document_under_a_consistency_model_is_one_run(model: str) -> None:
    """Its rates were those of the workers, its step and utilisation those of the synchronous run."""
    answer = estimate("resnet50", "dgx-1-v100", gpus=16, batch=64, consistency=model, servers=4)
    document = answer.to_dict()
    assert document["samples_per_s"] * document["step_time_s"] == pytest.approx(document["global_batch_size"])
    plain = document["synchronous"]
    assert plain["samples_per_s"] * plain["step_time_s"] == pytest.approx(document["global_batch_size"])
    ratio = document["step_time_s"] / plain["step_time_s"]
    assert document["mfu"] * ratio == pytest.approx(plain["mfu"])
    assert (answer.step_time, answer.mfu) == (document["step_time_s"], document["mfu"])
    assert document["step_time_interval_s"][0] < document["step_time_s"] < document["step_time_interval_s"][1]
