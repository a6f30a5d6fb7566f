"""Compressed gradients in a step, in a search and in memory."""

from __future__ import annotations

import numpy as np
import pytest

from paleo import Prediction, Run, load_model, load_system, predict
from paleo.errors import PaleoError
from paleo.search.plans import search


def step(compress: str | None = None, **run: object) -> Prediction:
    stated = {"gpus": 32, "batch": 32, "dtype": "fp32", "exchange": "after", "compress": compress, **run}
    return predict(load_model("resnet50"), load_system("aws-p3.16xlarge"), Run.model_validate(stated))


def test_half_the_bytes_take_half_the_time_less_latency() -> None:
    dense, half = step().breakdown, step("fp16").breakdown
    saved = dense.communication_exposed - half.communication_exposed
    assert 0.3 * dense.communication_exposed < saved < 0.5 * dense.communication_exposed


def test_error_feedback_is_kept_beside_the_optimizer() -> None:
    plain, coded = step().memory, step("topk:0.01").memory
    parameters = plain.parameters / 4.0
    assert coded.optimizer - plain.optimizer == pytest.approx(4.0 * parameters, rel=1e-6)
    assert step("fp16").memory.optimizer == plain.optimizer


@pytest.mark.parametrize("method", ["onebit", "qsgd:4", "terngrad", "dgc:0.001", "gtopk:0.001", "powersgd:4", "int8"])
def test_slow_links_gain_and_one_node_does_not_lose_its_sums(method: str) -> None:
    assert step(method).step_time < step().step_time
    alone = {"gpus": 1, "batch": 32}
    assert step(method, **alone).step_time == step(**alone).step_time


def test_sufficient_factors_replace_sums_of_wide_layers_under_small_batches() -> None:
    system = load_system("aws-p3.16xlarge")
    times = [
        predict(load_model("vgg16"), system, Run(gpus=16, batch=1, dtype="fp32", exchange="after", compress=method))
        for method in (None, "factors")
    ]
    assert times[1].breakdown.communication_exposed <= times[0].breakdown.communication_exposed


def test_sharded_states_scatter_what_they_need() -> None:
    """With ZeRO-1 nothing is gathered back but parameters, so less is sent than without."""
    assert step("onebit", strategy="zero=1").step_time < step(strategy="zero=1").step_time
    assert step("fp8", strategy="zero=3").step_time <= step(strategy="zero=3").step_time


@pytest.mark.parametrize(
    ("compress", "strategy", "words"),
    [
        ("zip", "dp", "unknown compression"),
        ("onebit", "zero=3", "only sums in another format"),
        ("zeropp", "zero=1", "gathers of sharded parameters"),
        ("topk:2", "dp", "the share of elements"),
    ],
)
def test_what_does_not_suit_is_one_message(compress: str, strategy: str, words: str) -> None:
    with pytest.raises(PaleoError, match=words):
        step(compress, strategy=strategy)


@pytest.mark.slow
def test_a_search_prices_compression_as_a_prediction_does() -> None:
    model, system = load_model("gpt2-medium"), load_system("dgx-a100-80gb")
    run = Run(gpus=8, global_batch=32, compress="onebit")
    plans = search(model, system, run).plans
    assert not any("zero=3" in plan.strategy for plan in plans)  # which an estimate refuses
    for plan in plans[:5]:
        single = predict(model, system, plan.run)
        assert single.step_time == pytest.approx(plan.step_time, rel=1e-9)
        assert np.isclose(single.memory.total, plan.memory, rtol=1e-9)
