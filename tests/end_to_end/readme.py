"""Runs the commands and the Python of README.md and puts their output below them.

    python -m tests.end_to_end.readme

A ``console`` block is a command and its output; the first ``text`` block after a ``python`` block is what it prints.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from paleo.cli import run_command_line as run

README = Path(__file__).resolve().parents[2] / "README.md"
_CONSOLE = re.compile(r"```console\n\$ paleo (?P<command>.*)\n(?P<output>(?:.*\n)*?)```")
_PYTHON = re.compile(r"```python\n(?P<code>(?:.*\n)*?)```\n\n```text\n(?P<output>(?:.*\n)*?)```")


def commands(text: str) -> list[str]:
    """The command lines that a text shows, with or without their output."""
    plain = [line for line in text.splitlines() if line.startswith("paleo ")]
    return [found["command"] for found in _CONSOLE.finditer(text)] + [line.removeprefix("paleo ") for line in plain]


def refreshed(text: str) -> str:
    """The text with the output of its commands and of its Python as it is now."""
    text = _CONSOLE.sub(lambda found: f"```console\n$ paleo {found['command']}\n{_output(found['command'])}```", text)
    return _PYTHON.sub(lambda found: f"```python\n{found['code']}```\n\n```text\n{_printed(found['code'])}```", text)


def _output(command: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run(shlex.split(command))
    return _trimmed(out.getvalue())


def _printed(code: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, str(README), "exec"), {})
    return _trimmed(out.getvalue())


def _trimmed(text: str) -> str:
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").splitlines())


if __name__ == "__main__":
    README.write_text(refreshed(README.read_text(encoding="utf-8")), encoding="utf-8")
