"""Commands to paste: `paleo estimate` reads the very run that they were written for."""

from __future__ import annotations

import json
import shlex
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from paleo import questions
from paleo.cli import run_command_line as paleo
from paleo.errors import PaleoError
from paleo.launch.jobs import estimate_command
from paleo.specs.model import load_model
from paleo.specs.run import Run, field_path, field_paths
from paleo.specs.system import load_system

#: A value of each field of a run that is not its default.
STATED: dict[str, Any] = {
    "gpus": 16, "batch": 4, "global_batch": 64, "microbatch": 2, "dtype": "fp16", "optimizer": "momentum",
    "strategy": "tp=2,pp=2", "placement": {"block.*.mlp1": {"ffn": "tp", "seq": ["tp", "cp"], "batch": None}},
    "experts.imbalance": 1.3, "experts.dispatch": "deepep", "experts.overlap": False, "experts.shared_overlap": True,
    "experts.drop_tokens": True, "kernels.cuda_graph": "full_iteration", "schedule": "zb-v", "pipeline.cut": (5, 7),
    "recompute": "selective", "recompute_layers": 3, "recompute.every": 2, "recompute.modules": ("core_attn", "mlp"),
    "recompute.by_layer": {"block.[0-3]": "full"},
    "software": "megatron-core", "kernels.cudnn": 8.9, "kernels.attention": "unfused", "kernels.scaling": "mxfp8",
    "kernels.cross_entropy": "upcast", "kernels.main_gradients": "fp32", "exchange": "after",
    "exchange.bucket": "1 MB", "exchange.algorithm": "ring", "compress": "topk:0.001",
    "consistency": "ssp:4", "servers": 2, "jitter": 0.037, "nodes": "spread:8", "background": 0.25,
    "neighbour": "ring:8:0.5", "variation.slow_ranks": 0.01, "variation.lengths": 0.4, "calibration": "ideal",
    "offload": "optimizer", "offload.layers": 3, "clip": "norm", "lora": "16:mlp", "qlora": True,
    "freeze": ("embed", "block.[0-9]"), "forward_only": True, "model": {"seq": 512, "layers": 3},
    "input": {"sample": "110 kB", "storage": "8 GB/s", "decode": "10 ms", "cores": 3},
}  # fmt: skip
#: Fields that are refused without another.
BESIDE = {"recompute.modules": {"recompute": "selective"}}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the command line makes of a command: model, system and run."""
    asked: list[tuple[Any, ...]] = []

    def estimate(model: Any, system: Any, run: Run, **_: Any) -> None:
        asked.append((model, system, run))
        raise PaleoError("asked")

    monkeypatch.setattr(questions, "estimate", estimate)

    def reading(command: str) -> tuple[Any, ...]:
        assert paleo(shlex.split(command)[1:]) == 2
        return asked[-1]

    return reading


def test_every_field_of_a_run_has_a_value_here() -> None:
    assert {field_path(name) for name in STATED} == set(field_paths())
    for name, value in STATED.items():
        field = attrgetter(field_path(name))
        assert field(Run(**{name: value, **BESIDE.get(name, {})})) != field(Run())


@pytest.mark.parametrize("name", STATED)
def test_a_command_states_each_field(name: str, read: Any) -> None:
    run = Run(**{name: STATED[name], **BESIDE.get(name, {})})
    command = estimate_command(load_model("gpt2"), load_system("dgx-h100"), run)
    assert read(command) == ("gpt2", "dgx-h100", run)


def test_files_of_ones_own_are_named_by_their_paths(tmp_path: Path, read: Any) -> None:
    model, system = tmp_path / "my net.yaml", tmp_path / "box.yaml"
    model.write_text(Path(load_model("gpt2").path).read_text(encoding="utf-8"), encoding="utf-8")
    system.write_text("extend: dgx-h100\nname: box\n", encoding="utf-8")
    command = estimate_command(load_model(model), load_system(system), Run())
    assert read(command) == (str(model), str(system), Run())


@pytest.mark.slow
def test_the_commands_of_a_plan_show_its_steps_again(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--system", "dgx-h100", "--gpus", "8", "--global-batch", "128", "--tokens", "1B", "--json"]
    assert paleo(["plan", "llama3-8b", *options]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    for plan in plans[:6]:
        assert paleo([*shlex.split(plan["command"])[1:], "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["step_time_s"] == pytest.approx(plan["step_time_s"], rel=1e-9)
