"""``paleo target`` and the goodput of ``paleo estimate``, as commands."""

from __future__ import annotations

import json
import math

import pytest

from paleo.cli.process import run_command_line as command
from paleo.learning.base import SamplesToLoss
from paleo.specs.prices import DEFAULT_RELIABILITY, system_reliability
from paleo.specs.system import load_system

TARGET = ["target", "mlperf:resnet", "--system", "dgx-a100-80gb", "--batch", "3264"]
ESTIMATE = [
    "estimate",
    "llama3-8b",
    "--system",
    "dgx-h100",
    "--gpus",
    "64",
    "--global-batch",
    "64",
    "--strategy",
    "zero=3",
]


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = command(arguments)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_target_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*TARGET, "--gpus", "8,32", "--json"], capsys)
    assert code == 0
    document = json.loads(out)
    assert document["schema"] == "paleo.target/1"
    few, many = document["points"]
    assert (few["gpus"], many["gpus"]) == (8, 32)
    assert few["minutes"] > many["minutes"]
    assert few["minutes_interval"][0] < few["minutes"] < few["minutes_interval"][1]
    keys = {"gpus", "global_batch_size", "strategy", "samples", "steps", "step_time_s", "evaluation_s", "usd", "kwh"}
    assert keys <= set(few)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["target", "mlperf:bertt", "--system", "dgx-h100", "--gpus", "8"], "mlperf-bert"),
        ([*TARGET[:-1], "many", "--gpus", "8"], "--batch 'many'"),
        ([*ESTIMATE, "--tokens", "1T", "--failures", "4"], "has no unit"),
        ([*ESTIMATE, "--loss", "1.8"], "endless data"),
        ([*ESTIMATE, "--loss", "2.1", "--tokens", "1T"], "exclude each other"),
        ([*ESTIMATE, "--target", "mlperf:bert"], "is a task of model bert_large"),
        ([*ESTIMATE, "--goodput"], "has to be stated"),
        ([*ESTIMATE, "--tokens", "1T", "--elastic"], "no replica that others can do without"),
        ([*ESTIMATE, "--tokens", "1T", "--failures=-4/knodeday"], "zero or more"),
        ([*ESTIMATE, "--tokens", "1T", "--checkpointing", "never"], "none of sync, async, memory"),
    ],
)
def test_bad_input_is_one_message(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(arguments, capsys)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_model_too_large_for_a_gpu_is_spread(capsys: pytest.CaptureFixture[str]) -> None:
    lora = ["target", "mlperf:llama2_70b_lora", "--system", "dgx-h100", "--gpus", "8", "--batch", "8", "--json"]
    code, out, _ = run(lora, capsys)
    (point,) = json.loads(out)["points"]
    assert code == 0
    assert point["fits"]
    assert point["strategy"] != "dp=8"


def test_goodput_of_a_long_run(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*ESTIMATE, "--tokens", "15T", "--goodput", "--json"], capsys)
    found = json.loads(out)["goodput"]
    assert code == 0
    assert 0.9 < found["goodput"] < 1
    assert found["finish_s_interval"][0] <= found["finish_s"] <= found["finish_s_interval"][1]
    # 8.03 G parameters of 14 bytes: bf16 weights, fp32 masters and two states
    assert found["checkpoint_bytes"] == pytest.approx(14 * 8030261248)


def test_length_from_a_loss_a_task_and_a_noise_scale(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run([*ESTIMATE, "--loss", "2.1", "--json"], capsys)
    # worked: 1.8172 + 482.01 / 8.03e9^0.3478 + 2085.43 / D^0.3658 = 2.1
    left = 2.1 - 1.8172 - 482.01 / 8030261248**0.3478
    law, batch = SamplesToLoss.for_network(2.1, 8030261248.0, 8192.0), json.loads(out)["global_batch_size"]
    assert law.tokens_at_best_batch == pytest.approx((2085.43 / left) ** (1 / 0.3658), rel=1e-3)
    assert json.loads(out)["training"]["samples"] == pytest.approx(float(law.samples(batch)), rel=1e-3)
    low, high = json.loads(out)["training"]["time_interval_s"]
    time_s, steps = json.loads(out)["training"]["time_s"], json.loads(out)["step_time_interval_s"]
    # an error of 0.9 % of the loss over its slope 0.3658 * left in the logarithm of the tokens
    doubt = 1.6449 * 0.009 * 2.1 / (0.3658 * left)
    assert math.log(high / time_s) == pytest.approx(
        math.hypot(doubt, math.log(steps[1] / json.loads(out)["step_time_s"])), rel=1e-3
    )
    assert low < time_s / math.exp(doubt)
    _, out, _ = run([*ESTIMATE, "--samples", "1M", "--noise-scale", "64", "--json"], capsys)
    assert json.loads(out)["training"]["samples"] == pytest.approx(2e6)
    resnet = ["estimate", "resnet50-v1.5", "--system", "dgx-a100-80gb", "--gpus", "8", "--batch", "408"]
    _, out, _ = run([*resnet, "--target", "mlperf:resnet", "--json"], capsys)
    assert json.loads(out)["training"]["samples"] == pytest.approx(45097078, rel=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--failures", "9e6/nodeday", "--restart", "10min"], "never finishes"),
        (["--checkpoint", "1s", "--storage", "1GB/s"], "never finishes: a checkpoint takes"),
        (["--storage-size", "100 GB"], "storage: a checkpoint of 112 GB does not fit into 100 GB"),
    ],
)
def test_a_run_that_never_finishes(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([*ESTIMATE, "--tokens", "1T", *options], capsys)
    assert (code, out) == (1, "")
    assert message in err


def test_failures_are_in_the_money(capsys: pytest.CaptureFixture[str]) -> None:
    systems = ["compare", "llama3-8b", "--systems", "dgx-a100-80gb,dgx-h100", "--gpus", "64", "--global-batch", "64"]
    systems += ["--strategy", "zero=3", "--tokens", "1T", "--price", "2 USD/h", "--json"]
    _, plain, _ = run(systems, capsys)
    _, failing, _ = run([*systems, "--failures", "400/knodeday", "--spares", "1", "--repair", "1h"], capsys)
    for before, after in zip(json.loads(plain)["systems"], json.loads(failing)["systems"], strict=True):
        share = after["goodput"]["goodput"]
        assert 0.5 < share < 0.999
        assert after["training"]["time_s"] == pytest.approx(before["training"]["time_s"] / share)
        # eight nodes and a spare one
        assert after["training"]["rent_usd"] == pytest.approx(before["training"]["rent_usd"] / share * 9 / 8)


def test_scaling_turns_over(capsys: pytest.CaptureFixture[str]) -> None:
    scale = ["scale", "resnet50-v1.5", "--system", "dgx-a100-80gb", "--gpus", "8,64,512", "--batch", "64", "--json"]
    _, out, _ = run([*scale, "--failures", "4/nodeday", "--restart", "30min"], capsys)
    document = json.loads(out)
    points = document["points"]
    assert document["curves"][0]["turnover_gpus"] == 64
    worth = [point["speedup"] * point["goodput"] for point in points]
    assert worth[1] == max(worth)
    _, out, _ = run(scale, capsys)
    assert "turnover_gpus" not in json.loads(out)["curves"][0]


def test_failures_of_a_system_are_its_own_or_those_of_one_like_it() -> None:
    own, inherited = (
        system_reliability(load_system("meta-grand-teton-h100")),
        system_reliability(load_system("dgx-h100")),
    )
    assert own.failures * 86400e3 == pytest.approx(3.79)
    assert inherited.failures == pytest.approx(own.failures)
    assert inherited.low < own.low < own.high < inherited.high
    assert "meta-grand-teton-h100" in inherited.source
    assert system_reliability(load_system("tpu-v4-pod")) is DEFAULT_RELIABILITY


BERT = ["bert_large", "--target", "mlperf:bert"]


def test_target_and_compare_and_estimate_agree(capsys: pytest.CaptureFixture[str]) -> None:
    run_options = ["--gpus", "64", "--json"]
    _, out, _ = run(["target", "mlperf:bert", "--system", "dgx-h100", "--batch", "3072", *run_options], capsys)
    (point,) = json.loads(out)["points"]
    _, out, _ = run(["compare", *BERT, "--systems", "dgx-h100", "--global-batch", "1536", *run_options], capsys)
    (candidate,) = json.loads(out)["systems"]
    # two sequences share a row of the network
    assert candidate["training"]["time_s"] == pytest.approx(60.0 * point["minutes"])
    assert candidate["training"]["samples"] == pytest.approx(point["samples"] / 2)
    _, out, _ = run(["estimate", *BERT, "--system", "dgx-h100", "--global-batch", "1536", *run_options], capsys)
    estimated = json.loads(out)["training"]
    assert estimated["time_s"] == pytest.approx(60.0 * point["minutes"])
    assert estimated["time_interval_s"] == pytest.approx([60.0 * end for end in point["minutes_interval"]])


@pytest.mark.slow
def test_a_plan_for_a_target_finds_batch_and_layout(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["plan", *BERT, "--system", "dgx-h100", "--gpus", "64", "--strategy", "dp", "--recompute", "none", "--json"]
    _, out, _ = run(plan, capsys)
    document = json.loads(out)
    best = document["plans"][0]
    assert document["global_batch_size"] in (1024, 2048, 4096)
    assert best["days"] == min(other["days"] for other in document["plans"])
    _, out, _ = run([*plan, "--global-batch", "8192"], capsys)
    assert json.loads(out)["plans"][0]["days"] > best["days"]


def test_a_noise_scale_stands_in_for_the_critical_batch(capsys: pytest.CaptureFixture[str]) -> None:
    resnet = [*TARGET, "--gpus", "8", "--json"]
    _, out, _ = run(resnet, capsys)
    law = json.loads(out)["points"][0]["samples"]
    _, out, _ = run([*resnet, "--noise-scale", "1632"], capsys)
    # the fewest samples are those of the law, so that twice the noise scale needs three times as many
    assert json.loads(out)["points"][0]["samples"] > 1.4 * law
    code, _, err = run([*resnet, "--noise-scale", "0"], capsys)
    assert (code, "--noise-scale 0 must be above zero" in err) == (2, True)


def test_a_target_of_another_network_or_beside_an_amount(capsys: pytest.CaptureFixture[str]) -> None:
    compare = ["compare", "resnet50-v1.5", "--systems", "dgx-h100", "--gpus", "8"]
    code, _, err = run([*compare, "--target", "mlperf:bert"], capsys)
    assert (code, "is a task of model bert_large, not of resnet50-v1.5" in err) == (2, True)
    code, _, err = run([*compare, "--target", "mlperf:resnet", "--epochs", "3"], capsys)
    assert (code, "exclude each other" in err) == (2, True)
