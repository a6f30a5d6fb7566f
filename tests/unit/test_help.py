"""What --help says of every command: the default of each option, and two examples that the command takes."""

from __future__ import annotations

import re
import shlex
from operator import attrgetter
from typing import Any

import pytest
import typer

from paleo.cli import app_with_all_commands
from paleo.cli import run_command_line as run
from paleo.cli.options import catalog_name_completion, word_completion
from paleo.specs.run import field_path

COMMANDS: dict[str, Any] = dict(typer.main.get_command(app_with_all_commands()).commands)  # type: ignore[attr-defined]


def examples(name: str) -> list[str]:
    text = COMMANDS[name].help.partition("\b")[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_shows_its_default(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    assert run([name, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument" or "--help" in parameter.opts:
            continue
        option = re.escape(max(parameter.opts, key=len))
        line = next(line for line in lines if re.match(rf"[│ *]+{option}\b", line))
        if parameter.required:
            assert "[required]" in line, line
            continue
        shown = re.search(r"\[default: \(?([^\])]+)\)?\]", line)
        assert shown, line
        if isinstance(parameter.default, bool | int | float | str) and not isinstance(parameter.show_default, str):
            assert shown.group(1) == str(parameter.default)


def test_the_defaults_of_a_run_are_those_of_its_specification(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from paleo.specs.run import Run

    monkeypatch.setenv("COLUMNS", "500")
    assert run(["estimate", "--help"]) == 0
    printed = capsys.readouterr().out
    for field in (
        "gpus",
        "optimizer",
        "strategy",
        "schedule",
        "recompute",
        "consistency",
        "nodes",
        "software",
        "calibration",
    ):
        line = next(line for line in printed.splitlines() if re.match(rf"[│ *]+--{field} ", line))
        assert f"[default: ({attrgetter(field_path(field))(Run())})]" in line, line


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_two_examples_that_it_takes(name: str) -> None:
    shown = examples(name)
    assert len(shown) >= 2
    for example in shown:
        program, command, *arguments = shlex.split(example)
        assert (program, command) == ("paleo", name)
        COMMANDS[name].make_context(name, arguments)


def test_no_help_text_holds_brackets_that_the_screen_would_eat() -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            assert not re.search(r"\[[a-z]", getattr(parameter, "help", None) or ""), f"{name} {parameter.name}"


@pytest.mark.parametrize(
    ("complete", "begun", "expected"),
    [
        (catalog_name_completion("software"), "megatron-c", ["megatron-core"]),
        (catalog_name_completion("systems", "devices"), "dgx-2,dgx-h2", ["dgx-2,dgx-h200"]),
        (catalog_name_completion("schedules"), "zb", ["zb-h1", "zb-v"]),
        (catalog_name_completion("optimizers"), "adam", ["adam", "adamw"]),
        (word_completion("time", "cost", "energy"), "c", ["cost"]),
    ],
)
def test_names_are_completed(complete: Any, begun: str, expected: list[str]) -> None:
    assert complete(begun) == expected


@pytest.mark.parametrize("option", ["system", "systems", "model", "software"])
def test_every_option_that_takes_a_name_completes_it(option: str) -> None:
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if parameter.name == option:
                assert getattr(parameter, "_custom_shell_complete", None) is not None, f"{name} --{option}"
