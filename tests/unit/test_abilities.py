"""Facts of frameworks: conditions, refusals with their sources, and the plans that a search lists."""

from __future__ import annotations

import numpy as np
import pytest

from paleo.cli import run_command_line as paleo
from paleo.errors import PlanError, SpecError
from paleo.network.graph import build_graph
from paleo.parallel.framework_checks import framework_abilities, framework_schedule_name, network_quantities
from paleo.predict import predict
from paleo.questions import plan
from paleo.specs.framework_capabilities import Condition, FrameworkRestriction, load_framework
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system


def test_conditions_broadcast_and_ignore_what_is_unknown() -> None:
    condition = Condition.parse("tp > 1 and (heads % tp != 0 or schedule in ('gpipe', 'zb-v'))")
    known = {"tp": np.array([1, 3, 4, 4]), "heads": 32, "schedule": np.array(["gpipe", "none", "none", "zb-v"])}
    assert condition.holds(known).tolist() == [False, True, False, True]
    assert condition.holds({"tp": 3, "heads": 32}) is False
    assert bool(Condition.parse("not tp == 2 and -pp < 0 and min(pp, 3) + max(vp, 2) * 2 // 3 == 2").holds(
        {"tp": 4, "pp": 1, "vp": 1}
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("degree > 1", "unknown quantity 'degree'"),
        ("tp >", "is not a condition"),
        ("__import__('os')", "not allowed"),
        ("tp ** 9 > 1", "not allowed"),
        ("tp.real > 1", "not allowed"),
        ("1 < " + "tp + " * 100 + "1", "at most 300 characters"),
    ],
)
def test_a_condition_is_no_program(text: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        FrameworkRestriction(when=text, fact="a fact", source="a file")


def test_quantities_of_networks() -> None:
    """Llama 3 8B: 32 query and 8 key/value heads in 32 layers; GPT-2's head is tied; Mixtral has 8 experts."""
    assert network_quantities(build_graph(load_model("llama3-8b"), batch=1)) == {
        "heads": 32, "kv_heads": 8, "layers": 32, "experts": 0, "scans": 0, "seq": 8192, "tied": 0,
    }  # fmt: skip
    gpt2, mixtral = (network_quantities(build_graph(load_model(name), batch=1)) for name in ("gpt2", "mixtral-8x7b"))
    assert (gpt2["tied"], gpt2["layers"], mixtral["experts"], mixtral["tied"]) == (1, 12, 8, 0)
    assert network_quantities(build_graph(load_model("resnet50"), batch=1))["heads"] == 0


def test_names_of_orders() -> None:
    assert [framework_schedule_name("1f1b", pp, vp) for pp, vp in ((1, 1), (4, 1), (4, 2))] == [
        "none",
        "1f1b",
        "interleaved",
    ]


@pytest.mark.parametrize(
    ("framework", "known", "expected"),
    [
        ("torchtitan", {"zero": 1}, True),
        ("torchtitan", {"zero": 3}, False),
        ("torchtitan", {"pp": 2, "tied": 1}, True),
        ("torchtitan", {"pp": 4, "schedule": "1f1b", "microbatches": 3}, True),
        ("torchtitan", {"tp": 16, "heads": 32, "kv_heads": 8}, True),
        ("megatron-core", {"tp": 16, "heads": 32, "kv_heads": 8}, False),  # key/value heads are replicated
        ("megatron-core", {"experts": 8, "tp": 2, "sp": 0}, True),
        ("megatron-core", {"schedule": "interleaved", "microbatches": 6, "pp": 4}, True),
        ("megatron-core", {"pp": 4, "schedule": "dualpipe"}, True),
        ("megatron-core", {"scaling": "mxfp8", "architecture": "Hopper"}, True),
        ("megatron-core", {"scaling": "mxfp8", "architecture": "Blackwell"}, False),
        ("deepspeed", {"pp": 2, "zero": 2}, True),
        ("deepspeed", {"pp": 2, "zero": 1}, False),
        ("nanotron", {"cp": 2}, True),
        ("primus", {"pp": 4, "schedule": "zb-v"}, False),
        ("ddp", {"tp": 2}, True),
        ("fsdp2", {"pp": 2}, True),
    ],
)
def test_what_frameworks_refuse(framework: str, known: dict[str, object], expected: bool) -> None:
    assert any(bool(refusal.condition.holds(known)) for refusal in load_framework(framework).restrictions) is expected


def test_an_estimate_names_the_fact() -> None:
    """Torchtitan has no ZeRO-1; a plain estimate of it is answered, with a warning that says where that is written."""
    run = Run(gpus=8, strategy="zero=1", batch=1, software="torchtitan")
    warnings = predict(load_model("llama3-8b"), load_system("dgx-h100"), run).warnings
    assert any("does not run zero=1" in line and "config/configs.py" in line for line in warnings)
    sharded = predict(load_model("llama3-8b"), load_system("dgx-h100"), run.model_copy(update={"strategy": "zero=3"}))
    assert sharded.framework_violations == ()
    assert framework_abilities("pytorch-eager") is None


@pytest.mark.slow
def test_a_search_lists_what_the_framework_runs() -> None:
    answer = plan("llama3-8b", "dgx-h100", 8, tokens=1e9, software="torchtitan", top=20)
    plans = [each.row.run for each in answer.purchase.plans]
    assert plans
    for run in plans:
        assert predict(load_model("llama3-8b"), load_system("dgx-h100"), run).framework_violations == ()


@pytest.mark.slow
def test_a_stated_strategy_that_the_framework_lacks_is_an_error_that_says_why(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(PlanError, match="data_parallel_shard_degree"):
        plan("llama3-8b", "dgx-h100", 8, software="torchtitan", strategy="zero=1")
    assert (
        paleo(["plan", "gpt2", "--system", "dgx-h100", "--gpus", "8", "--software", "torchtitan", "--strategy", "pp=2"])
        == 2
    )
    assert "tied embeddings" in capsys.readouterr().err


def test_any_software_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["estimate", "gpt2", "--system", "dgx-h100", "--gpus", "8", "--strategy", "zero=1", "--software"]
    assert paleo([*words, "any"]) == 0
    assert "plans are not limited to what a framework runs" in capsys.readouterr().err
    assert paleo([*words, "torchtitan"]) == 0
    assert "does not run zero=1" in " ".join(capsys.readouterr().out.split())
