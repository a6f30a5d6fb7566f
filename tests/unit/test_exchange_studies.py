"""A prediction under a consistency model, and whether compressing its gradients pays."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paleo import Prediction, Run, load_model, load_system, predict
from paleo.cli import run as paleo
from paleo.errors import PlanError
from paleo.studies import compression, consistency


def step(**run: object) -> Prediction:
    stated = {"gpus": 64, "batch": 32, "dtype": "fp16", **run}
    return predict(load_model("resnet50"), load_system("aws-p3.16xlarge"), Run.model_validate(stated))


def test_synchronous_steps_without_noise_have_no_study() -> None:
    assert consistency.studied(step()) is None and compression.studied(step()) is None


def test_a_workload_is_the_step_again() -> None:
    """Compute and what is exposed of the exchange make the step, whether it overlaps or not."""
    for exchange in ("after", "overlapped"):
        prediction = step(exchange=exchange, consistency="local:1")
        study = consistency.studied(prediction)
        assert study is not None
        assert float(study.synchronous.step) == pytest.approx(prediction.step_time, rel=1e-6)
        assert study.workload.payload == pytest.approx(prediction.memory.gradients, rel=0.01)


def test_jitter_makes_synchronous_steps_wait_and_local_ones_less() -> None:
    noisy, local = (consistency.studied(step(consistency=name, jitter=0.1)) for name in ("bsp", "local:64"))
    assert noisy is not None and local is not None
    assert float(noisy.cycle.step) > step().step_time * 1.05
    assert float(local.cycle.step) < float(noisy.cycle.step)


def test_more_servers_carry_more_workers() -> None:
    one, four = (consistency.studied(step(consistency="async", servers=count)) for count in (1, 4))
    assert one is not None and four is not None
    assert float(four.cycle.updates_per_s) > 2.0 * float(one.cycle.updates_per_s)
    assert float(four.cycle.knee) > float(one.cycle.knee)


def test_sharded_workers_are_tied_together() -> None:
    with pytest.raises(PlanError, match="no worker has all parameters"):
        consistency.studied(step(strategy="zero=3", consistency="async"))


def test_compression_pays_below_its_rate_alone() -> None:
    """Where nothing overlaps the verdict is that of the rates, over methods and systems, but for latencies."""
    verdicts = []
    for system in ("aws-p3.16xlarge", "dgx-h100"):
        for method in ("onebit", "topk:0.001", "powersgd:4", "fp8"):
            run = Run(gpus=16, batch=8, dtype="fp16", exchange="after", compress=method)
            study = compression.studied(predict(load_model("vgg16"), load_system(system), run))
            assert study is not None and study.wire < study.dense_wire
            verdicts.append(study.pays == (study.rate < study.break_even))
    assert np.mean(verdicts) >= 0.75


def test_an_estimate_says_both(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--system", "aws-p3.16xlarge", "--gpus", "16", "--batch", "32"]
    arguments = ["estimate", "resnet50", *options, "--consistency", "ssp:4", "--jitter", "0.1", "--compress", "onebit"]
    assert paleo([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {"updates_per_s", "staleness", "server_utilization", "knee", "exposed_s"} <= document["consistency"].keys()
    assert document["compression"]["pays"] in (True, False)
    assert paleo(arguments) == 0
    assert "Compression of gradients" in capsys.readouterr().out


def test_a_search_refuses_to_rank_by_staleness(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", "resnet50", "--system", "dgx-a100-80gb", "--gpus", "8", "--consistency", "async"]
    assert paleo(arguments) == 2
    assert "always prefers the stalest" in capsys.readouterr().err
