"""What an estimate chooses where a question leaves software and plan open."""

from __future__ import annotations

import json
import random

import pytest

import paleo
from paleo.cli import run_command_line as command
from paleo.launch.jobs import supported_search_space
from paleo.predict import predict
from paleo.search.plans import search
from paleo.search.space import SearchSpace
from paleo.specs.catalog import entry_names
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.studies.defaults import leaves_plan_open, usual_software, with_defaults


@pytest.mark.parametrize(
    ("model", "system", "gpus", "changed", "expected"),
    [
        ("llama3-8b", "dgx-h100", 8, {}, "torchtitan"),
        ("llama3-8b", "dgx-h100", 16, {}, "megatron-core"),
        ("bert_large", "dgx-1-v100", 8, {}, "megatron-core"),  # fp16, which torchtitan lacks
        ("llama3-8b", "tpu-v5p-pod", 64, {}, "maxtext"),
        ("resnet50", "tpu-v5p-pod", 64, {}, "xla-tpu"),
        ("llama3-8b", "azure-nd96isr-mi300x-v5", 16, {}, "primus"),
        ("resnet50", "dgx-h100", 8, {}, "pytorch-eager"),
        ("llama3-8b", "dgx-h100", 64, {"lora": "16:all"}, "fsdp2"),
    ],
)
def test_software_that_people_use(model: str, system: str, gpus: int, changed: dict[str, str], expected: str) -> None:
    assert usual_software(load_model(model), load_system(system), Run(gpus=gpus, **changed))[0] == expected  # type: ignore[arg-type]


def test_a_plan_is_open_until_something_of_it_is_stated() -> None:
    assert leaves_plan_open(Run(gpus=8)) and leaves_plan_open(Run(gpus=1, strategy="auto"))
    assert leaves_plan_open(Run(gpus=8, global_batch=64, dtype="bf16", software="nanotron"))
    for stated in ({"strategy": "dp"}, {"microbatch": 1}, {"batch": 4}, {"recompute": "full"}, {"schedule": "gpipe"}):
        assert not leaves_plan_open(Run(gpus=8, **stated))  # type: ignore[arg-type]
    assert not leaves_plan_open(Run(gpus=1))


@pytest.mark.slow
def test_the_first_question_fits_and_says_what_was_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["estimate", "llama3-8b", "--system", "dgx-h100", "--gpus", "8", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] and document["software"] == "torchtitan" and "zero=3" in document["strategy"]
    assert document["reasons"] == {
        "software": "language models below 16 NVIDIA GPUs",
        "strategy": "the fastest that fits of a bounded search",
    }
    plain = paleo.estimate("llama3-8b", "dgx-h100", gpus=8, strategy="dp").to_dict()
    assert (plain["strategy"], plain["software"], plain["fits"]) == ("dp=8", "pytorch-eager", False)
    assert plain["reasons"] == {"software": "default", "strategy": "stated"}


@pytest.mark.slow
def test_chosen_plans_are_run_by_their_framework() -> None:
    for model, system, gpus in (("gpt2-xl", "dgx-a100-80gb", 8), ("mixtral-8x7b", "dgx-h100", 64)):
        choice = with_defaults(load_model(model), load_system(system), Run(gpus=gpus))
        answer = paleo.estimate(model, system, run=choice.run)
        assert answer.prediction.framework_violations == () and answer.memory.fits


def test_networks_of_images_are_as_before() -> None:
    assert with_defaults(load_model("resnet50"), load_system("dgx-h100"), Run(gpus=8)).run == Run(gpus=8)


#: Machines on which people train language models: twenty kinds.
MACHINES = (
    "dgx-a100-40gb", "dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "gb300-nvl72",
    "aws-p4d.24xlarge", "aws-p5.48xlarge", "aws-g6e.48xlarge", "dgx-1-v100", "azure-nd96isr-mi300x-v5", "mi355x-8",
    "tpu-v5p-pod", "tpu-v5e-pod", "tpu-v6e-pod", "rtx-4090-8gpu", "rtx-5090-8gpu-100gbe", "l40s-pcie-8gpu", "h800-8",
)  # fmt: skip
#: Bytes of weights, gradients, masters and AdamW's states of a parameter, of which every plan holds a share.
STATES = 12


def first_questions(seed: int, count: int) -> list[tuple[str, str, int]]:
    """Networks of the catalog on machines and GPUs, drawn at random."""
    draw = random.Random(seed)
    questions = [
        (draw.choice(entry_names("models")), draw.choice(MACHINES), draw.choice((8, 16, 64, 256))) for _ in range(count)
    ]
    return [each for each in questions if load_model(each[0]).tokens is not None]


def answered_first(model: str, system: str, gpus: int) -> None:
    machine = load_system(system)
    gpus = min(gpus, machine.max_devices or gpus)
    choice = with_defaults(load_model(model), machine, Run(gpus=gpus))
    if not choice.software_reason:  # no language model
        return
    step = predict(load_model(model), machine, choice.run)
    assert step.framework_violations == () and choice.strategy_reason
    if not step.memory.fits and STATES * step.graph.parameters / gpus <= machine.device.memory.usable_bytes:
        whole = supported_search_space(SearchSpace(), choice.run.software)
        every = search(load_model(model), machine, Run(gpus=gpus, software=choice.run.software), space=whole)
        assert every.covered_configurations > 0 and every.fitting_configurations == 0, (
            model,
            system,
            gpus,
            choice.run.strategy,
        )


@pytest.mark.parametrize("question", first_questions(3, 6), ids=str)
def test_first_questions_fit_where_states_do(question: tuple[str, str, int]) -> None:
    answered_first(*question)


@pytest.mark.slow
@pytest.mark.parametrize("question", first_questions(8, 600), ids=str)
def test_all_first_questions_fit_where_states_do(question: tuple[str, str, int]) -> None:
    answered_first(*question)
