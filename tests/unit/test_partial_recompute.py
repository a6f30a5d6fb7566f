"""Plans that recompute some layers of each stage."""

from __future__ import annotations

import numpy as np
import pytest

from paleo.errors import PaleoError
from paleo.predict import predict
from paleo.search.partial_recompute import fit_by_partial_recompute, full_recompute_counterparts
from paleo.search.plans import search
from paleo.search.space import SearchSpace
from paleo.specs.model import load_model
from paleo.specs.run import Run, replace_fields
from paleo.specs.system import load_system

NETWORK, MACHINE, RUN = "llama3-8b", "dgx-h100", Run(gpus=2, global_batch=16)


@pytest.mark.slow
def test_no_number_of_recomputed_layers_beats_the_first_plan() -> None:
    network, machine = load_model(NETWORK), load_system(MACHINE)
    reply = search(network, machine, RUN, top=1)
    first = reply.plans[0]
    assert first.run.recompute.layers is not None  # else the case shows nothing
    layers = first.run.recompute.layers
    assert first.recompute == f"full, {layers} layer{'s' * (layers != 1)} a stage"
    assert reply.pareto_plans[0] == first
    alone = predict(network, machine, first.run)
    assert (alone.step_time, alone.memory.total) == (first.step_time, first.memory)
    tried = 0
    for strategy in ("pp=2", "tp=2", "tp=2,sp", "zero=1", "zero=2", "zero=3", "cp=2,zero=2"):
        for count in (0, 2, 4, 8, 12, 20, 28, 30):
            stated = {"strategy": strategy, "microbatch": 1, "recompute": "full", "recompute_layers": count}
            try:
                other = predict(network, machine, replace_fields(RUN, stated))
            except PaleoError:
                continue
            if other.memory.fits:
                tried += 1
                assert other.step_time >= 0.99 * first.step_time, other.run
    assert tried > 5


@pytest.mark.slow
def test_what_recomputes_all_layers_by_order_stays_so() -> None:
    plans = search(load_model(NETWORK), load_system(MACHINE), RUN, space=SearchSpace(recompute=("full",)), top=3).plans
    assert {row.recompute for row in plans} == {"full"}


@pytest.mark.slow
@pytest.mark.parametrize("share", [None, 0.01, 1.0])
def test_an_expected_share_of_layers_changes_the_way_not_the_answer(share: float | None) -> None:
    options = {"strategy": "tp=2,sp", "microbatch": 1, "recompute": "full"}
    whole = predict(load_model(NETWORK), load_system(MACHINE), replace_fields(RUN, options))
    some = fit_by_partial_recompute(whole, share=share)
    assert some is not None and some.memory.fits and some.run.recompute.layers is not None
    one_less = replace_fields(some.run, {"recompute_layers": some.run.recompute.layers - 1})
    assert not predict(load_model(NETWORK), load_system(MACHINE), one_less).memory.fits


def test_cases_that_recompute_every_layer() -> None:
    layout, microbatch, policy = (0, 0, 1, 0, 0, 1), (1, 2, 1, 1, 2, 1), (0, 0, 0, 2, 2, 1)
    cases = tuple(np.array(column) for column in (layout, microbatch, policy))
    assert full_recompute_counterparts(cases).tolist() == [3, 4, -1, 3, 4, -1]  # type: ignore[arg-type]
