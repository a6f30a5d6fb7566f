"""The README's commands work, and print what it shows."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from paleo.cli import run_command_line as run
from tests.end_to_end.readme import README, commands, refreshed


@pytest.mark.slow
def test_the_commands_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    shown = commands(README.read_text(encoding="utf-8"))
    assert len(shown) >= 7
    for command in shown:
        assert run(shlex.split(command, comments=True)) == 0, capsys.readouterr().err


def test_the_commands_print_what_is_shown() -> None:
    text = README.read_text(encoding="utf-8")
    assert refreshed(text) == text, "run `python -m tests.end_to_end.readme` and look at the difference"
