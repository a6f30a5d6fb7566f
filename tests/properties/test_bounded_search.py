"""A search by bounds has the plans, the front and the runner-up of one that evaluates every configuration.

So do the classes of plans that a prediction cannot tell apart: they depend on no configuration that bounds rule out.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paleo.errors import PaleoError
from paleo.questions import search as answer
from paleo.questions import search_space_of_unset_fields
from paleo.search import plans
from paleo.search.gpu_counts import group_tied_plans
from paleo.search.plans import FoundPlans, prefer_memory_headroom, search
from paleo.search.ranking import PlanRow
from paleo.specs.loading import validate_mapping
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

#: Repeated blocks, experts, latent attention, encoders and decoders, recurrences, convolutions.
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2-xl": {},
    "llama3-8b": {},
    "llama2-13b": {"seq": 2048},
    "bert_large": {},
    "mixtral-8x7b": {},
    "deepseek_v2-lite": {},
    "gpt-oss-20b": {},
    "qwen3-30b-a3b": {},
    "transformer_big": {},
    "gnmt": {},
    "resnet50": {},
    "llama3-70b": {},
}
SYSTEMS = ("dgx-h100", "dgx-a100-80gb", "dgx-1-v100", "dgx-b200", "aws-p4d.24xlarge")
SOFTWARE = (None, "megatron-core", "torchtitan", "pytorch-eager")
CASES = 60
#: Of them, those that CI runs: every case where PALEO_ALL_CASES is set, else every sixth.
STEP = 1 if os.environ.get("PALEO_ALL_CASES") else 6


def drawn(number: int) -> tuple[str, str, dict[str, Any]]:
    """One network, system and run, drawn from a seed."""
    chosen = random.Random(f"bounded {number}")
    network = sorted(NETWORKS)[number % len(NETWORKS)]
    gpus = chosen.choice((4, 8, 12, 16, 16, 24, 32, 32, 64, 64))
    stated: dict[str, Any] = {"gpus": gpus, "model": NETWORKS[network]}
    stated |= {"global_batch": gpus * chosen.choice((1, 2, 4))}
    software = chosen.choice(SOFTWARE)
    stated |= {} if software is None else {"software": software}
    stated |= chosen.choice(({}, {}, {"schedule": "zb-v"}, {"recompute": "full"}, {"strategy": "zero=1"}))
    return network, chosen.choice(SYSTEMS), stated


def rounded(rows: Sequence[PlanRow | None]) -> list[PlanRow | None]:
    """Rows whose seconds have ten digits: the last of sixteen depends on what is computed together."""
    return [None if row is None else replace(row, step_time=float(f"{row.step_time:.9e}")) for row in rows]


def classes_of(rows: Sequence[PlanRow]) -> list[tuple[PlanRow | None, str]]:
    """Rounded rows beside the shortest step of their class [s], with ten digits as well."""
    alike = rounded([replace(row, tie_group_step_time=0.0) for row in rows])
    return list(zip(alike, [f"{row.tie_group_step_time:.9e}" for row in rows], strict=True))


@pytest.mark.parametrize("number", range(0, CASES, STEP))
def test_a_search_by_bounds_finds_what_an_exhaustive_one_finds(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    network, system, stated = drawn(number)
    monkeypatch.setattr(plans, "_FEW_CASES", 0)
    run, machine, model = validate_mapping(Run, stated, "test"), load_system(system), load_model(network)

    def found(exhaustive: bool) -> FoundPlans | str:
        try:
            return search(model, machine, run, space=search_space_of_unset_fields(run), exhaustive=exhaustive)
        except PaleoError as error:
            return str(error)

    bounded, whole = found(False), found(True)
    if isinstance(bounded, str) or isinstance(whole, str):
        assert bounded == whole
        return
    assert rounded(bounded.plans) == rounded(whole.plans)
    assert rounded(bounded.pareto_plans) == rounded(whole.pareto_plans)
    assert rounded((bounded.runner_up,)) == rounded((whole.runner_up,))
    assert rounded(prefer_memory_headroom(bounded, machine).plans) == rounded(
        prefer_memory_headroom(whole, machine).plans
    )
    classes = [
        group_tied_plans(model, machine, prefer_memory_headroom(found, machine), 10).plans for found in (bounded, whole)
    ]
    assert classes_of(classes[0]) == classes_of(classes[1])
    assert bounded.evaluated_configurations <= whole.evaluated_configurations == whole.covered_configurations
    assert bounded.evaluated_configurations < whole.evaluated_configurations or whole.fitting_configurations < 500, (
        "nothing was left out"
    )


#: Fields of an answer that say how it was found.
HOW = {"seconds", "evaluated", "fitting", "configurations", "covered"}


def digits(value: Any) -> Any:
    """The parts of a document, its numbers with ten digits."""
    if isinstance(value, dict):
        return {key: digits(each) for key, each in value.items() if key not in HOW}
    if isinstance(value, list | tuple):
        return [digits(each) for each in value]
    return float(f"{value:.9e}") if isinstance(value, float) else value


@pytest.mark.parametrize(
    ("network", "system", "gpus"),
    [("deepseek_v3", "dgx-h100", 2048), ("deepseek_v3", "dgx-h100", 512), ("deepseek_v3", "dgx-b200", 1024),
     ("gpt3-175b", "dgx-a100-80gb", 1024), ("mixtral-8x22b", "dgx-h100", 256)],
)  # fmt: skip
def test_a_large_search_prints_what_an_exhaustive_one_prints(
    network: str, system: str, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_FEW_CASES", 0)
    bounded, whole = (answer(network, system, gpus, exhaustive=exhaustive) for exhaustive in (False, True))
    assert digits(bounded.json_document()) == digits(whole.json_document())
    assert bounded.found_plans.evaluated_configurations < whole.found_plans.evaluated_configurations
