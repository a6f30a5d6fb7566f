"""Inputs that hostile ones once broke the program with; each is answered by one line, forever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paleo
from paleo.cli import run_command_line as run
from paleo.errors import PaleoError

SERVED: dict[str, Any] = {"model": "qwen3-0.6b", "system": "dgx-h100", "input": 200, "output": 20, "rate": "1/s"}
#: Arguments of Python that ended in a traceback, and what is said of them.
ARGUMENTS: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (paleo.scale, {"model": "lenet", "system": "dgx-h100", "gpus": np.array("x")}, "expected GPU counts"),
    (paleo.compare, {"model": "lenet", "systems": ["dgx-h100"], "gpus": 8, "epochs": 1 + 1j}, "epochs: .*number"),
    (paleo.serve, SERVED | {"command": [None]}, "expected a command line"),
    (paleo.serve, SERVED | {"cache": 0.5}, "unknown format"),
    (paleo.serve, SERVED | {"rate": 1e-320}, "--rate 1e-320: expected a number above zero, 1e-12 to 1e12"),
    (paleo.search, {"model": "lenet", "system": "dgx-h100", "gpus": 4, "objective": 1 + 1j}, "objective"),
    (paleo.search, {"model": "lenet", "system": "dgx-h100", "gpus": 4, "objective": "tme"}, "nearest: 'time'"),
]
#: Launch files that no framework writes, or that cannot be written: said before anything is computed.
NAMES = ["o.", "x:o.y", "o.csv", "no/such/folder/o.sh"]


@pytest.mark.parametrize(("function", "arguments", "said"), ARGUMENTS)
def test_arguments_of_python(function: Callable[..., object], arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(PaleoError, match=said):
        function(**arguments)


def test_a_setting_that_a_framework_lacks_beside_one_without_a_word(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mpt.yaml").write_text(
        "max_seq_len: 2048\nmodel: {name: mpt_causal_lm, d_model: 768, n_heads: 12, n_layers: 12, vocab_size: 50368}\n"
    )
    words = ["--from", str(tmp_path / "mpt.yaml"), "--gpus", "8", "--software", "megatron-core"]
    call = ["estimate", *words, "--system", "dgx-h100", "--set", "kernels.cross_entropy=stepwise"]
    assert run([*call, "--launch", str(tmp_path / "o.sh")]) == 2
    assert "has no setting under --cross-entropy-loss-fusion; known: none\n" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_a_launch_file_is_refused_before_anything_is_computed(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paleo.questions.predict", lambda *arguments: pytest.fail("a step was predicted"))
    assert run(["estimate", "gpt2", "--system", "dgx-h100", "--software", "megatron-core", "--launch", name]) == 2
    assert capsys.readouterr().err.startswith("error: --launch ")


@pytest.mark.parametrize("amount", [".nan", ".inf", "1.0e+300", "-1", "many"])
def test_a_share_of_a_batch_that_is_no_number(amount: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "max.yml").write_text(f"model_name: llama3-8b\nper_device_batch_size: {amount}\n")
    words = ["--from", str(tmp_path / "max.yml"), "--gpus", "8", "--system", "dgx-h100", "--software", "maxtext"]
    assert run(["estimate", *words]) == 2
    assert "per_device_batch_size: " in capsys.readouterr().err


@pytest.mark.parametrize("file", sorted((Path(__file__).parent / "found").glob("*.onnx")), ids=lambda file: file.stem)
def test_networks_that_are_no_networks(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["import", "onnx", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file}: no output depends on an input\n"
