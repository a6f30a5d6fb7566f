"""The answer to a purchase: what meets the wish comes first, the command shows it again, misses name a remedy."""

from __future__ import annotations

import io
import json
import shlex
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from paleo import Run, load_model, load_system
from paleo.cli import run_command_line as paleo
from paleo.errors import SpecError
from paleo.launch.jobs import settings_line, supported_search_space
from paleo.predict import predict
from paleo.report.plan import purchase_table
from paleo.search import plans
from paleo.search.gpu_counts import search_gpu_counts, simplicity_key, tie_group_numbers
from paleo.search.space import SearchSpace
from paleo.studies.cost import TrainingAmount
from paleo.studies.purchase import PurchaseRequirements, plan_purchase, purchase_verdict
from paleo.units import DAY

MODEL = "gpt2-medium"
AMOUNT = TrainingAmount(2e6, "2,000,000 samples")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert paleo([*arguments, "--json"]) == code
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_cheapest_that_is_in_time_comes_first() -> None:
    offers = [(load_system(name), (8, 16)) for name in ("dgx-h100", "dgx-a100-80gb")]
    wish = PurchaseRequirements(AMOUNT, objective="cost")
    reply = plan_purchase(load_model(MODEL), offers, Run(global_batch=64), wish)
    costs = [plan.objective_value("cost") for plan in reply.plans if plan.has_memory_headroom]
    assert costs == sorted(costs) and reply.best is reply.plans[0]
    slowest = max(plan.training_time or 0.0 for plan in reply.plans)
    tight = PurchaseRequirements(AMOUNT, deadline=slowest * 0.9, objective="cost")
    sooner = plan_purchase(load_model(MODEL), offers, Run(global_batch=64), tight)
    assert sooner.best is not None and (sooner.best.training_time or 0.0) <= slowest * 0.9
    assert "Cheapest within" in purchase_verdict(sooner)


def test_where_nothing_is_in_time_a_larger_count_is_named() -> None:
    fast = plan_purchase(
        load_model(MODEL), [(load_system("dgx-h100"), (32,))], Run(global_batch=64), PurchaseRequirements(AMOUNT)
    )
    assert fast.best is not None and fast.best.training_time is not None
    wish = PurchaseRequirements(AMOUNT, deadline=fast.best.training_time * 1.05)
    reply = plan_purchase(load_model(MODEL), [(load_system("dgx-h100"), (8,))], Run(global_batch=64), wish)
    assert reply.best is None and "nodes) would do" in reply.remedies[0].text
    assert purchase_verdict(reply).startswith("Nothing is done within")


@pytest.mark.slow
def test_where_nothing_fits_a_count_or_an_offload_is_named() -> None:
    reply = plan_purchase(
        load_model("llama3-70b"), [(load_system("dgx-a100-80gb"), (8,))], Run(global_batch=8), PurchaseRequirements()
    )
    assert reply.best is None and purchase_verdict(reply).startswith("Nothing fits into memory")
    for remedy in reply.remedies:
        assert "would do" in remedy.text or "host memory" in remedy.text
        assert remedy.command.startswith("paleo estimate llama3-70b") and remedy.command in purchase_verdict(reply)


@pytest.mark.slow
def test_the_command_shows_the_plan_again(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--system", "dgx-a100-80gb", "--gpus", "8", "--global-batch", "32", "--samples", "1e6", "--top", "3")
    document = printed(capsys, "plan", MODEL, *arguments)
    assert document["verdict"].startswith("Fastest: 8 GPUs of dgx-a100-80gb")
    for plan in document["plans"]:
        again = printed(capsys, *shlex.split(plan["command"])[1:])
        assert again["step_time_s"] == pytest.approx(plan["step_time_s"], rel=1e-9)
        assert again["memory_bytes"]["total"] == pytest.approx(plan["memory_bytes"], rel=1e-9)
    first = document["plans"][0]
    again = printed(capsys, *shlex.split(first["command"])[1:], "--samples", "1e6")
    assert again["mfu"] == pytest.approx(first["mfu"], rel=1e-9)
    assert again["step_time_interval_s"] == pytest.approx(first["step_time_interval_s"], rel=1e-9)
    assert again["training"]["time_s"] / DAY == pytest.approx(first["days"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("software", "words"),
    [
        ("megatron-core", "--tensor-model-parallel-size|64"),
        ("torchtitan", "--parallelism.tensor_parallel_degree|64"),
        ("deepspeed", "zero_optimization.stage|64"),
        ("fsdp2", "num_processes: 8|per_device_train_batch_size: 8"),
    ],
)
def test_flags_name_the_layout(software: str, words: str) -> None:
    run = Run(global_batch=64, software=software)
    space = supported_search_space(SearchSpace(), software)
    reply = plan_purchase(
        load_model(MODEL), [(load_system("dgx-a100-80gb"), (8,))], run, PurchaseRequirements(), space=space
    )
    assert [word for word in words.split("|") if word not in reply.launch_settings_and_preparation[0]] == []
    assert settings_line(reply.plans[0].best_prediction)


def test_flags_of_megatron_name_experts_layers_and_formats() -> None:
    """Experts that are folded over tensor parallelism are on all their ranks; gpt-oss repeats pairs of layers; products
    in 8 and 4 bits stand beside weights in bf16."""
    run = Run(gpus=32, global_batch=32, microbatch=1, strategy="tp=4,ep=8,dp=4,pp=2,etp=1,sp", pipeline={"cut": (5, 7)})
    run = run.model_copy(update={"software": "megatron-core"})
    flags = settings_line(predict(load_model("gpt-oss-20b"), load_system("dgx-h100"), run))
    assert "--expert-model-parallel-size 8 --expert-tensor-parallel-size 1" in flags
    assert f"'E{'t' * 10}|{'t' * 14}L'" in flags and "--bf16" in flags.split()
    for dtype, words in (("fp8", "--bf16 --fp8-format hybrid "), ("fp4", "--bf16 --fp4-format e2m1 ")):
        small = Run(gpus=8, global_batch=8, dtype=dtype, software="megatron-core")
        assert words in settings_line(predict(load_model(MODEL), load_system("dgx-b200"), small))


@pytest.mark.slow
def test_full_plans_stand_behind_roomy_ones_and_say_so() -> None:
    """As a table says it: how layers are recomputed, why a faster plan is not the first, whose price is not known."""
    run = Run(global_batch=64, model={"seq": 6144}, qlora=True)
    offers = [(load_system("rtx-5090-8gpu-100gbe"), (4,))]
    reply = plan_purchase(
        load_model("qwen3-32b"), offers, run, PurchaseRequirements(TrainingAmount(1e4, "10,000 samples"))
    )
    page = Console(width=400, record=True, file=io.StringIO())
    page.print(purchase_table(reply))
    text = page.export_text()
    assert not all(plan.has_memory_headroom for plan in reply.plans) and reply.plans[0].has_memory_headroom
    assert "Plans that leave less than 5 % of the memory free are listed last." in text
    assert "No price is known for rtx-5090-8gpu-100gbe; give one with --price" in text
    assert "layers a stage" in text and "stage recomputation" not in text


@pytest.mark.slow
def test_mixtures_under_software_without_a_time_of_routing_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    """In an estimate, a plan and a comparison; not where the profile states the time, and not of dense networks."""
    place = ["--gpus", "8", "--global-batch", "8"]
    for command in (["estimate", "--system", "dgx-h100"], ["compare", "--systems", "dgx-h100"]):
        for model, software, warned in (
            ("gpt-oss-20b", "nanotron", True), ("gpt-oss-20b", "megatron-core", False),
            ("gpt-oss-20b", "pytorch-eager", False), ("gpt2", "nanotron", False),
        ):  # fmt: skip
            paleo([command[0], model, *command[1:], *place, "--strategy", "zero=3", "--software", software])
            text = " ".join(capsys.readouterr().out.split())
            assert (f"software {software} states no time of the host for sending tokens to experts" in text) == warned
    place += ["--strategy", "zero=1", "--microbatch", "1", "--software", "nanotron"]
    paleo(["plan", "gpt-oss-20b", "--systems", "dgx-h100", *place])
    assert "Warning: software nanotron states no time" in " ".join(capsys.readouterr().out.split())


def test_only_schedules_that_a_framework_runs() -> None:
    assert (
        supported_search_space(SearchSpace(), "megatron-core").schedules
        == supported_search_space(SearchSpace(), "nemo").schedules
        == ("1f1b", "interleaved")
    )
    assert supported_search_space(SearchSpace(), "pytorch-eager") == SearchSpace()
    assert supported_search_space(SearchSpace(), "mxnet").schedules == ()
    assert supported_search_space(SearchSpace(), "mxnet").zero == (0,)
    assert supported_search_space(SearchSpace(zero=(3,)), "mxnet").zero == (3,)  # it is asked what ZeRO-3 would do
    stated = SearchSpace(degrees={"pp": 2}, zero=(0,))
    assert supported_search_space(stated, "mxnet") == stated  # it is asked what pipelines would do


@pytest.mark.slow
def test_any_software_leaves_nothing_out(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--system", "dgx-a100-80gb", "--gpus", "8", "--global-batch", "32")
    plain, every, some = (
        printed(capsys, "plan", MODEL, *arguments, *software)
        for software in ((), ("--software", "any"), ("--software", "megatron-core"))
    )
    assert every["configurations"] > plain["configurations"] and every["configurations"] > some["configurations"]
    assert [each["software"] for each in (plain, every)] == ["torchtitan", "pytorch-eager"]


def test_a_framework_without_pipelines_has_no_plan_with_stages() -> None:
    search = plans.search(
        load_model("alexnet"), load_system("pcie3-8gpu"), Run(global_batch=64, gpus=4, software="mxnet"), top=50,
        space=supported_search_space(SearchSpace(), "mxnet"),
    )  # fmt: skip
    assert search.plans
    assert not any("pp=" in row.strategy for row in search.plans)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpus", "8"), "expected either --system S or --systems"),
        (("--system", "dgx-h100", "--systems", "dgx-h100", "--gpus", "8"), "expected either"),
        (("--system", "dgx-h100", "--gpus", "8", "--deadline", "60d"), "need an amount of training"),
        (("--system", "dgx-h100", "--gpus", "8", "--tokens", "1e9", "--deadline", "60 dogs"), "dogs"),
        (("--system", "dgx-h100", "--gpus", "8", "--tokens", "1e9", "--objective", "fun"), "objective 'fun'"),
    ],
)
def test_bad_questions_are_one_message(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert paleo(["plan", MODEL, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_wishes_without_an_amount_are_refused() -> None:
    with pytest.raises(SpecError, match="need an amount"):
        plan_purchase(load_model(MODEL), [(load_system("dgx-h100"), (8,))], Run(), PurchaseRequirements(deadline=DAY))


@pytest.mark.slow
def test_an_interval_beyond_the_deadline_is_told() -> None:
    """A plan that meets the deadline by its prediction alone may be late."""
    plain = plan_purchase(
        load_model(MODEL), [(load_system("dgx-a100-80gb"), (8,))], Run(global_batch=64), PurchaseRequirements(AMOUNT)
    )
    assert plain.best is not None and plain.best.training_time is not None
    slow = plain.best.interval[1] / plain.best.row.step_time
    told = {}
    for share in (1.01, 1.01 * slow):
        wish = PurchaseRequirements(AMOUNT, deadline=share * plain.best.training_time)
        told[share] = "slow end of its interval is beyond" in purchase_verdict(replace(plain, requirements=wish))
    assert list(told.values()) == [True, False]


@pytest.mark.slow
def test_the_smallest_order_that_is_in_time_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """Whole nodes of eight; one node less is too slow or cannot be used, and each count that was tried says which."""
    call = ("plan", MODEL, "--system", "dgx-a100-80gb", "--tokens", "40e9", "--deadline", "2d", "--strategy", "dp")
    document = printed(capsys, *call)
    gpus = document["plans"][0]["gpus"]
    assert gpus % 8 == 0 and document["plans"][0]["days"] <= 2
    days = {plan["gpus"]: plan["days"] for plan in document["plans"]}
    skipped = {each["gpus"] for each in document["skipped"]}
    assert days.get(gpus - 8, 3) > 2 and gpus - 8 in {0, *days, *skipped}
    assert document["verdict"].startswith(f"Fewest GPUs within 2 days: {gpus} GPUs of dgx-a100-80gb")
    assert document["software"] == document["plans"][0]["command"].split("--software ")[1].split()[0]
    assert "global batch" in document["choices"]


@pytest.mark.slow
def test_every_count_has_a_row_or_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    call = ("plan", "gpt2-medium", "--system", "dgx-h100", "--gpus", "7,8,16", "--global-batch", "64", "--top", "1")
    for more in ((), ("--samples", "1e6"), ("--objective", "gpus")):
        document = printed(capsys, *call, "--strategy", "zero=3", *more)
        assert {plan["gpus"] for plan in document["plans"]} == {8, 16}
        assert [each["gpus"] for each in document["skipped"]] == [7]


@pytest.mark.slow
def test_plans_of_a_class_are_as_fast_as_can_be_told_and_the_simplest_comes_first() -> None:
    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    found = search_gpu_counts(
        model, system, Run(global_batch=64), (8,), space=supported_search_space(SearchSpace(), "torchtitan")
    )
    numbers = tie_group_numbers(found.plans)
    assert numbers == sorted(numbers) and numbers.count(1) > 1
    capacity = system.device.memory.usable_bytes
    members = [row for row, number in zip(found.plans, numbers, strict=True) if number == 1]
    assert members[0] == min(members, key=lambda row: simplicity_key(row, capacity))
    assert all(row.tie_group_step_time == min(each.step_time for each in members) for row in members)
    low, high = predict(model, system, members[0].run).interval
    assert max(row.step_time for row in members) < high and low < members[0].tie_group_step_time
