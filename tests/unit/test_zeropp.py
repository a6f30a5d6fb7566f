"""ZeRO++ in a step: gathers of sharded parameters quantised forward and kept in the node backward, gradients scattered
in four bits by two all-to-alls."""

from __future__ import annotations

import numpy as np
import pytest

from paleo import Prediction, Run, load_model, load_system, predict
from paleo.errors import PlanError
from paleo.search.plans import search
from paleo.search.space import search_space_from_options
from paleo.step.gradient_exchange import collective_scope_groups

MODEL, NODES = load_model("gpt2"), load_system("aws-p3.16xlarge")


def step(compress: str | None, **run: object) -> Prediction:
    stated = {"gpus": 32, "global_batch": 64, "microbatch": 1, "dtype": "fp16", "strategy": "zero=3", **run}
    return predict(MODEL, NODES, Run.model_validate({**stated, "compress": compress}))


@pytest.mark.parametrize("strategy", ["zero=3", "zero=3,pp=2"])
def test_it_pays_over_slow_links(strategy: str) -> None:
    """Of 3 gathers or scatters of 2 bytes an element 1 + 1/4 cross nodes; pipelines wait for their boundaries, too."""
    plain, coded = (step(name, strategy=strategy) for name in (None, "zeropp"))
    ratio = plain.breakdown.communication_total / coded.breakdown.communication_total
    assert 2.0 < ratio < 5.0
    assert coded.step_time < plain.step_time
    assert coded.memory.total > plain.memory.total  # the second shard


def test_backward_gathers_stay_in_the_node() -> None:
    """The bytes of gathers in the timeline: one a parameter forward, two backward, of which none crosses nodes."""
    events = [event for event in step("zeropp", global_batch=32).timeline.events if event.task.kind == "gather"]
    first, last = events[0], events[-1]
    assert first.task.name == last.task.name
    assert first.end - first.start > last.end - last.start


def test_groups_of_a_scope() -> None:
    groups = np.array([[[1, 8, 2]], [[64, 8, 16]]])
    assert collective_scope_groups("all_gather@node", groups, 8)[1][:, 0].tolist() == [[1, 8, 2], [8, 1, 4]]
    assert collective_scope_groups("all_to_all@across", groups, 8)[1][:, 0].tolist() == [[8, 8, 8], [8, 8, 4]]
    assert collective_scope_groups("all_gather", groups, 8)[1] is groups


def test_unsharded_runs_are_refused() -> None:
    with pytest.raises(PlanError, match="state --strategy zero=3"):
        step("zeropp", strategy="zero=1")


def test_a_search_has_sharded_plans_alone_and_prices_them_alike() -> None:
    run = Run(gpus=16, global_batch=32, dtype="fp16", compress="zeropp")
    found = search(MODEL, NODES, run, space=search_space_from_options("tp=1,pp=1,cp=1"))
    assert all("zero=3" in plan.strategy for plan in found.plans)
    for plan in found.plans[:3]:
        assert predict(MODEL, NODES, plan.run).step_time == pytest.approx(plan.step_time, rel=1e-9)
