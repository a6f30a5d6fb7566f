"""Plans over consistency models and compressions: stale updates have a price, and arrays say what predictions say."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest

from paleo import Run, load_model, load_system, predict
from paleo.cli import run_command_line as paleo
from paleo.errors import SpecError
from paleo.launch.jobs import estimate_command
from paleo.search.plans import search
from paleo.search.space import search_space_from_options
from paleo.specs.run import replace_fields
from paleo.studies.gradient_exchange import StalenessPenalty, _effective, _work, consistency_study, exchange_search

MODEL, NODES = load_model("lenet"), load_system("aws-p3.16xlarge")
QUIET = {"gpus": 32, "global_batch": 256}
RUN = Run(**QUIET, jitter=0.05)
FREE = StalenessPenalty(0.0)


@pytest.mark.parametrize(
    ("name", "servers"), [("async", None), ("ssp:4", None), ("ssp:4", 16), ("local:16", None), ("gossip:exp2", None)]
)
def test_arrays_say_what_predictions_say(name: str, servers: int | None) -> None:
    searched = search(MODEL, NODES, replace_fields(RUN, {"servers": servers}), space=search_space_from_options("dp=32"))
    assert searched.ranking is not None
    (part,) = searched.ranking.parts
    effective = _effective(_work(part, NODES), name, FREE, 256)
    chosen = np.flatnonzero(np.isfinite(effective) & (part.results.choice_field("overlaps_gradient_exchange") == 0))[:3]
    assert len(chosen) == 3
    for index in chosen.tolist():
        run = replace_fields(searched.ranking.plan_row(index).run, {"consistency": name})
        prediction = predict(MODEL, NODES, run)
        study = consistency_study(prediction)
        assert study is not None and effective[index] == pytest.approx(study.step_time, rel=1e-6)


@pytest.mark.slow
def test_a_search_waits_for_the_slowest_as_a_prediction_does() -> None:
    """Noise of ranks, of slow ones and of lengths is in every plan of a search, and the timeline ends with the step."""
    noisy = replace_fields(RUN, {"variation.slow_ranks": 0.02, "variation.lengths": 0.4})
    searched, quiet = (
        search(MODEL, NODES, run, space=search_space_from_options("pp=2,dp=16")) for run in (noisy, Run(**QUIET))
    )
    for row in searched.plans[:3]:
        prediction = predict(MODEL, NODES, row.run)
        assert row.step_time == pytest.approx(prediction.step_time, rel=1e-9)
        assert prediction.timeline.end_time == pytest.approx(prediction.step_time, rel=1e-9)
        assert prediction.breakdown.stragglers > 0
    assert searched.plans[0].step_time > 1.03 * quiet.plans[0].step_time


@pytest.mark.slow
def test_the_price_decides() -> None:
    """Without a price the stalest exchange wins over slow links; a high one brings synchronous steps back."""
    modes = {"consistencies": ("bsp", "local:64"), "space": search_space_from_options("dp=32")}
    cheap, dear = (exchange_search(MODEL, NODES, RUN, StalenessPenalty(each), **modes) for each in (0.0, 10.0))
    assert (cheap.plans[0].consistency, dear.plans[0].consistency) == ("local:64", "bsp")
    assert [plan.effective_step_time for plan in cheap.plans] == sorted(
        plan.effective_step_time for plan in cheap.plans
    )
    assert dear.plans[-1].samples_factor == pytest.approx(1 + 10.0 * dear.plans[-1].staleness)


def test_a_noise_scale_is_a_price() -> None:
    """Of a batch that is all noise each update late costs what a larger batch would."""
    assert float(StalenessPenalty(noise_scale=256.0).samples_factor(3.0, 256)) == 2.5
    for wrong in ({}, {"per_update": 0.1, "noise_scale": 3.0}, {"per_update": -1.0}, {"noise_scale": 0.0}):
        with pytest.raises(SpecError, match="price of staleness"):
            StalenessPenalty(**wrong)


@pytest.mark.slow
def test_modes_that_no_plan_suits_say_so() -> None:
    modes = {"consistencies": ("bsp", "local:8"), "compressions": (None, "zeropp")}
    found = exchange_search(MODEL, NODES, RUN, FREE, space=search_space_from_options("dp=32,zero=3"), **modes)
    assert {plan.consistency for plan in found.plans} == {"bsp"}
    assert {plan.compress for plan in found.plans} == {None, "zeropp"}
    assert len(found.refused) == 2 and "workers hold all parameters" in found.refused[0]


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--system", "aws-p3.16xlarge", "--gpus", "16", "--strategy", "dp=16", "--global-batch", "64"]
    arguments = ["plan", "lenet", *options, "--consistency", "bsp,async", "--compress", "none,fp16"]
    assert paleo([*arguments, "--staleness-cost", "0.01", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {plan["consistency"] for plan in document["plans"]} == {"bsp", "async"}
    assert {plan["compress"] for plan in document["plans"]} == {None, "fp16"}
    assert paleo([*arguments, "--noise-scale", "1000"]) == 0
    assert "with a price of staleness" in capsys.readouterr().out
    assert paleo(["plan", "lenet", *options, "--consistency", "async"]) == 2
    assert "--staleness-cost" in capsys.readouterr().err


def test_a_plan_under_noise_is_shown_again_by_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    run = replace_fields(RUN, {"variation.slow_ranks": 0.02, "variation.lengths": 0.4, "software": "pytorch-eager"})
    row = search(MODEL, NODES, run, space=search_space_from_options("pp=2,dp=16")).plans[0]
    words = shlex.split(estimate_command(MODEL, NODES, row.run))
    assert paleo([*words[1:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(row.step_time, rel=1e-9)
