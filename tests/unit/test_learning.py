"""Laws of learning against values worked by hand and published ones."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.learning.base import (
    CHINCHILLA,
    LOSS_LAWS,
    SAMPLES_LAWS,
    STEP_LAW,
    CriticalBatchLaw,
    ParametricLossLaw,
    ReferencePointsLaw,
    SamplesToLoss,
    _left_out_error,
    best_batch_tokens,
    fit_critical_batch,
    fit_reference_points,
    parse_law,
)
from paleo.specs.catalog import entry_names
from paleo.specs.task import load_task, mlperf_task
from paleo.studies.target import _task_of_loss

TASKS = entry_names("tasks")


def test_critical_batch_halves_the_steps_at_most() -> None:
    law = CriticalBatchLaw(samples_min="1M", critical_batch=1000, source="worked")
    batches = np.array([1.0, 1000.0, 1e5])
    steps = law.samples(batches) / batches
    assert law.samples(1000.0) == 2e6
    assert steps[2] == pytest.approx(1010.0)  # towards samples_min / critical_batch = 1000 steps


def test_fit_recovers_a_law_and_sees_where_there_is_none() -> None:
    batches = np.array([64.0, 256.0, 1024.0, 4096.0])
    assert fit_critical_batch(batches, 5e5 * (1 + batches / 700)) == pytest.approx((5e5, 700.0))
    assert fit_critical_batch(batches, np.array([9.0, 8.0, 7.0, 6.0]))[1] == float("inf")
    with pytest.raises(SpecError, match="two batch sizes"):
        fit_critical_batch(np.array([8.0, 8.0]), np.array([1.0, 2.0]))


def test_reference_points_pass_through_their_points_and_follow_the_law_beyond() -> None:
    law = fit_reference_points([(100, 1100.0), (200, 1250.0), (400, 1400.0), (800, 1800.0)], source="worked")
    assert float(law.samples(200)) == pytest.approx(1250.0)
    assert law.critical_batch is not None
    far = float(law.samples(80000) / law.samples(8000))
    assert far == pytest.approx((1 + 80000 / law.critical_batch) / (1 + 8000 / law.critical_batch))
    left_out = _left_out_error(np.array([100.0, 200, 400, 800]), np.array([1100.0, 1200, 1400, 1800]), 1)
    assert left_out == pytest.approx(0.0, abs=1e-6)  # the points lie on one line: any three give the fourth


def test_interval_widens_outside_of_the_range() -> None:
    law = load_task("mlperf:bert").law
    inside, outside = law.log_standard_deviation(448), law.log_standard_deviation(16384 * 4)
    assert outside > inside
    assert law.warnings(448) == ()
    assert "outside of the range" in law.warnings(16384 * 4)[0]
    assert "weak" in load_task("mlperf:unet3d").law.warnings(56)[0]


@pytest.mark.parametrize("name", TASKS)
def test_samples_grow_and_steps_shrink_with_the_batch(name: str) -> None:
    """From the smallest batch to the largest; points scatter by their residual, which may hide a small growth."""
    law = load_task(name).law
    low, high = law.batches or (32.0, 4096.0)
    batches = np.geomspace(low, high, 9)
    samples = law.samples(batches)
    assert np.all(samples > 0)
    assert samples[-1] >= samples[0] * (1 - 3 * law.residual)
    assert samples[-1] / high < samples[0] / low


def test_tasks_by_benchmark_and_round() -> None:
    newest, first = mlperf_task("ssd", "v3.1"), mlperf_task("ssd", "v1.0")
    assert newest is not None and newest.name == "mlperf-retinanet"
    assert first is not None and first.name == "mlperf-ssd"
    assert mlperf_task("minigo", "v1.0") is None


def test_law_of_a_file_is_checked() -> None:
    with pytest.raises(SpecError, match="unknown law of samples 'critical'"):
        parse_law({"critical": {}})
    assert set(SAMPLES_LAWS) >= {"constant", "critical_batch", "reference_points"}
    assert isinstance(load_task("mlperf-resnet").law, ReferencePointsLaw)


@pytest.mark.parametrize("name", list(LOSS_LAWS))
def test_tokens_invert_the_loss(name: str) -> None:
    law = LOSS_LAWS[name]
    loss = float(law.loss(1e9, 2e10))
    assert law.tokens_to_loss(loss, 1e9) == pytest.approx(2e10, rel=1e-9)


def test_published_constants() -> None:
    """Besiroglu et al. 2024: 70 G parameters and 1.4 T tokens, worked from table 1: 1.8172 + 0.0807 + 0.0740."""
    assert float(CHINCHILLA.loss(70e9, 1.4e12)) == pytest.approx(1.972, abs=2e-3)
    budget, sizes = 5.88e23, np.geomspace(1e9, 1e12, 3001)  # FLOP of Chinchilla, C = 6 N D
    size = sizes[np.argmin(CHINCHILLA.loss(sizes, budget / (6 * sizes)))]
    assert budget / (6 * size) / size == pytest.approx(20, rel=0.35)  # "20 tokens a parameter"
    with pytest.raises(SpecError, match="endless data"):
        CHINCHILLA.tokens_to_loss(1.8, 1e9)
    assert CHINCHILLA.warnings(1e12, 1e13) != ()
    # Hoffmann et al. 2022, eq. 10: 1.69 + 406.4 / 70e9^0.34 + 410.7 / 1.4e12^0.28 = 1.69 + 0.0837 + 0.1629
    assert float(LOSS_LAWS["chinchilla-2022"].loss(70e9, 1.4e12)) == pytest.approx(1.9366, abs=2e-4)


def test_best_batch_costs_nothing() -> None:
    tokens = 20e9
    best = float(best_batch_tokens(tokens))
    assert float(STEP_LAW.loss_penalty(1e9, tokens, best)) == 0.0
    assert float(STEP_LAW.loss_penalty(1e9, tokens, 4 * best)) == pytest.approx(0.0098 * 4)
    assert isinstance(STEP_LAW, ParametricLossLaw)


def test_samples_to_a_loss_count_what_the_batch_costs() -> None:
    """At the best batch the tokens are those of Chinchilla's law; at others loss and penalty together make the target,
    with more tokens; a batch that is far too small never gets there. Numbers and arrays agree."""
    law = SamplesToLoss.for_network(2.4, 1e9, 2048.0)
    best = float(best_batch_tokens(law.tokens_at_best_batch)) / 2048.0
    assert float(law.samples(best)) * 2048.0 == pytest.approx(CHINCHILLA.tokens_to_loss(2.4, 1e9), rel=1e-3)
    for factor in (0.25, 8.0):
        tokens = float(law.samples(best * factor)) * 2048.0
        nats = 0.0098 * math.log2(factor) ** 2
        assert float(CHINCHILLA.loss(1e9, tokens)) + nats == pytest.approx(2.4, abs=1e-6)
        assert tokens > 1.05 * law.tokens_at_best_batch
    batches = np.array([1e-3, best, 8 * best])
    assert law.samples(batches).tolist() == [float(law.samples(batch)) for batch in batches]
    assert law.samples(1e-3) == math.inf


@pytest.mark.parametrize(("model", "words"), [("resnet50", "not counted in tokens"), ("mixtral-8x7b", "mixtures")])
def test_networks_without_a_law_of_loss(model: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        _task_of_loss(model, 2.1)


@pytest.mark.slow
def test_time_to_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """Minutes are samples over the rate of the step; an estimate at that batch takes as many."""
    options = ["gpt2", "--loss", "3.3", "--system", "dgx-a100-80gb", "--gpus", "8"]
    assert run(["target", *options, "--batch", "64", "--strategy", "dp", "--json"]) == 0
    (point,) = json.loads(capsys.readouterr().out)["points"]
    assert point["minutes"] == pytest.approx(point["samples"] / 64 * point["step_time_s"] / 60, rel=1e-3)
    assert run(["estimate", *options, "--global-batch", "64", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["training"]["samples"] == pytest.approx(point["samples"])
    assert run(["estimate", *options, "--global-batch", "64"]) == 0
    assert "tokens at the best global batch" in " ".join(capsys.readouterr().out.split())
    for wrong in (["--loss", "1.0"], ["--loss", "3.3", "--noise-scale", "9"]):
        assert run(["target", "gpt2", *wrong, "--system", "dgx-a100-80gb", "--gpus", "8"]) == 2
        assert "loss" in capsys.readouterr().err
    low = ["--loss", "2.75", "--system", "dgx-a100-80gb", "--gpus", "8", "--batch", "8"]
    assert run(["target", "gpt2", *low]) == 2
    assert "never reaches" in capsys.readouterr().err
