"""The sign of each factor: what more of it does to the step, memory, cost, energy and goodput of random runs.

Each run is predicted as it is and with one factor changed; the software, the strategy and the format stay as stated.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

import paleo
from paleo.errors import PaleoError
from paleo.specs.run import field_path, field_paths
from paleo.specs.system import load_system
from paleo.studies.what_if import change_system

#: Rounding, as a fraction.
ROUNDING = 1e-9
TIME, MEMORY, COST, ENERGY = "step_time_s", "memory_bytes.total", "training.cost_usd", "training.energy_j"
#: Runs of each factor in the quick suite and with the slow tests; 2,030 over 35 factors where PALEO_ALL_CASES is set.
QUICK, SLOW = 2, 58 if os.environ.get("PALEO_ALL_CASES") else 12
MODELS: dict[str, dict[str, Any]] = {
    "resnet50": {}, "vgg16": {}, "lstm_lm": {}, "gpt2": {"layers": 6}, "bert_base": {"layers": 6},
    "llama3.2-1b": {"layers": 4}, "mixtral-8x7b": {"layers": 2},
}  # fmt: skip
LANGUAGE = ("gpt2", "bert_base", "llama3.2-1b", "mixtral-8x7b")


@dataclass(frozen=True)
class Factor:
    """Options and paths of the system that change, and what they may do to a figure: +1 never less, -1 never more."""

    signs: Mapping[str, int]
    options: Mapping[str, Any] = field(default_factory=dict)
    system: Mapping[str, str] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    models: tuple[str, ...] = tuple(MODELS)


def _model(**sizes: int) -> dict[str, Any]:
    return {"model": sizes}


TRAINED = {"samples": 100_000}
FAILING = {"failures": "4/knodeday", "samples": 100_000_000}
FACTORS: dict[str, Factor] = {
    "bandwidth of links": Factor({TIME: -1}, system={"levels[*].link.bandwidth": "x2"}),
    "latency of links": Factor({TIME: 1}, system={"levels[*].link.latency": "x2"}),
    "bandwidth of memory": Factor({TIME: -1}, system={"device.memory.bandwidth": "x1.5"}),
    "capacity of memory": Factor({"memory_bytes.capacity": 1, "fits": 1}, system={"device.memory.capacity": "x2"}),
    "peak of matrix units": Factor({TIME: -1, "mfu": -1}, system={"device.peak": "x2"}),
    "batch": Factor({TIME: 1, MEMORY: 1}, {"batch": 16}),
    "microbatch": Factor({MEMORY: 1}, {"microbatch": 4}, before={"microbatch": 1}),
    "full recomputation": Factor({TIME: 1, MEMORY: -1}, {"recompute": "full"}, models=LANGUAGE),
    "selective recomputation": Factor({TIME: 1, MEMORY: -1}, {"recompute": "selective"}, models=LANGUAGE),
    "forward alone": Factor({TIME: -1, MEMORY: -1}, {"forward_only": True}),
    "jitter": Factor({TIME: 1}, {"jitter": 0.2}, before={"jitter": 0.05}),
    "slow ranks": Factor({TIME: 1}, {"variation.slow_ranks": 0.2}, before={"variation.slow_ranks": 0.05}),
    "background traffic": Factor({TIME: 1}, {"background": 0.5}),
    "nodes that lie apart": Factor({TIME: 1}, {"nodes": "spread:4"}),
    "decoding of inputs": Factor({TIME: 1}, {"input": {"decode": "50 ms"}}, before={"input": {"decode": "1 ms"}}),
    "attention with its scores in memory": Factor({MEMORY: 1}, {"kernels.attention": "unfused"},
                                                  before={"kernels.attention": "fused"}, models=LANGUAGE),
    "sharded optimizer": Factor({MEMORY: -1}, {"strategy": "zero=1"}, before={"strategy": "dp"}),
    "sharded gradients": Factor({MEMORY: -1}, {"strategy": "zero=2"}, before={"strategy": "zero=1"}),
    "sharded parameters": Factor({"memory_bytes.parameters": -1}, {"strategy": "zero=3"},
                                 before={"strategy": "zero=2"}),
    "adapters": Factor({MEMORY: -1}, {"lora": "8:all"}, models=("gpt2", "llama3.2-1b")),
    "offloaded states": Factor({MEMORY: -1, TIME: 1}, {"offload": "optimizer"}),
    "wider formats": Factor({MEMORY: 1, TIME: 1}, {"dtype": "fp32"}),
    "states of the optimizer": Factor({MEMORY: 1, TIME: 1}, {"optimizer": "adamw"}, before={"optimizer": "sgd"}),
    "layers": Factor({TIME: 1, MEMORY: 1, "flops_per_step": 1}, _model(layers=12), models=LANGUAGE[:3]),
    "length of sequences": Factor({TIME: 1, MEMORY: 1}, _model(seq=1024), before=_model(seq=512), models=("gpt2",)),
    "vocabulary": Factor({TIME: 1, MEMORY: 1}, _model(vocab=65536), before=_model(vocab=32768), models=("gpt2",)),
    "imbalance of experts": Factor({TIME: 1}, {"experts.imbalance": 1.5, "strategy": "ep=2"},
                                   before={"experts.imbalance": 1.0, "strategy": "ep=2"}, models=("mixtral-8x7b",)),
    "samples": Factor({COST: 1, ENERGY: 1}, {"samples": 200_000}, before=TRAINED),
    "price": Factor({COST: 1}, TRAINED | {"price": "3 USD/h"}, before=TRAINED | {"price": "2 USD/h"}),
    "price of electricity": Factor({COST: 1}, TRAINED | {"electricity": "0.3 USD/kWh"},
                                   before=TRAINED | {"electricity": "0.1 USD/kWh"}),
    "power of a building": Factor({ENERGY: 1}, TRAINED | {"pue": 1.5}, before=TRAINED | {"pue": 1.1}),
    "power of hosts": Factor({ENERGY: 1}, TRAINED | {"host_power": "200 W"}, before=TRAINED | {"host_power": "100 W"}),
    "failures": Factor({"goodput.goodput": -1}, FAILING | {"failures": "40/knodeday"}, before=FAILING),
    "loads of a disk": Factor({TIME: -1}, {"input": {"sample": "1 MB", "storage": "4 GB/s"}},
                              before={"input": {"sample": "1 MB", "storage": "1 GB/s"}}),
    "design power": Factor({ENERGY: 1}, TRAINED, {"device.tdp": "x1.2"}, before=TRAINED),
}  # fmt: skip


def figure(document: Mapping[str, Any], path: str) -> float | None:
    """A number of a document by its path; None where the document has none."""
    value: Any = document
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def documents(name: str, number: int) -> tuple[str, list[dict[str, Any]]] | None:
    """A random run and its documents before and after the change; None where one of them cannot be run."""
    factor, rng = FACTORS[name], random.Random(f"{name}/{number}")
    model, strategy = rng.choice(factor.models), rng.choice(("dp", "zero=1", "zero=3"))
    system, gpus = rng.choice(("dgx-a100-80gb", "dgx-h100", "selene", "dgx-1-v100")), rng.choice((1, 8, 16, 64))
    run = {"gpus": gpus, "batch": rng.choice((4, 8)), "software": rng.choice(("pytorch-eager", "fsdp2"))}
    run |= {"dtype": "fp16" if system == "dgx-1-v100" else "bf16", "strategy": strategy, "model": MODELS[model]}
    machine = changed = load_system(system)
    answers = []
    try:
        for path, value in factor.system.items():
            changed = change_system(changed, path, value)
        for place, options in ((machine, factor.before), (changed, {**factor.before, **factor.options})):
            stated = {**run, **options, "model": {**MODELS[model], **options.get("model", {})}}
            others = {key: stated.pop(key) for key in [*stated] if field_path(key) not in {*field_paths(), "model"}}
            answers.append(paleo.estimate(model, place, run=paleo.Run(**stated), **others).to_dict())
    except PaleoError:
        return None
    return f"{model} on {system} {run}", answers


def broken(name: str, number: int) -> list[str] | None:
    """What has the wrong sign in a run; None where it cannot be run."""
    found = documents(name, number)
    if found is None:
        return None
    text, (before, after) = found
    faults = []
    for path, sign in FACTORS[name].signs.items():
        one, other = figure(before, path), figure(after, path)
        if one is not None and other is not None and sign * (other - one) < -ROUNDING * abs(one):
            faults.append(f"{name}: {path} from {one} to {other}: {text}")
    return faults


@pytest.mark.parametrize("name", FACTORS)
def test_signs(name: str) -> None:
    answers = [broken(name, number) for number in range(QUICK)]
    assert [fault for faults in answers for fault in faults or []] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORS)
def test_signs_of_more_runs(name: str) -> None:
    answers = [broken(name, number) for number in range(QUICK, SLOW)]
    assert [fault for faults in answers for fault in faults or []] == []
    assert sum(faults is not None for faults in answers) >= SLOW / 3


@pytest.mark.slow
def test_there_are_enough_factors_and_each_has_figures() -> None:
    assert len(FACTORS) >= 35
    for name, factor in FACTORS.items():
        found = next(filter(None, (documents(name, number) for number in range(20))))
        for path in factor.signs:
            assert all(figure(document, path) is not None for document in found[1]), (name, path)
