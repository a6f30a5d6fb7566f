"""The edge of the command line: whatever happens is one line and an exit code, on whatever streams there are."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paleo.cli import process
from paleo.cli import run_command_line as run
from paleo.cli.application import EXIT_INTERNAL_ERROR, EXIT_INTERRUPTED, EXIT_PIPE_CLOSED, EXIT_WRONG_INPUT
from paleo.cli.process import EXIT_TERMINATED, printable_line


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (
            TypeError("no such\noperand"),
            EXIT_INTERNAL_ERROR,
            "an error in paleo itself, not in your input: TypeError at .*: no such;.*report it",
        ),
        (RecursionError(), EXIT_INTERNAL_ERROR, "RecursionError"),
        (MemoryError(), EXIT_INTERNAL_ERROR, "memory of this machine"),
        (KeyError("x"), EXIT_INTERNAL_ERROR, "KeyError"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            EXIT_WRONG_INPUT,
            r"cannot be written \(No space left on device\)",
        ),
        (OSError(errno.ENXIO, "odd"), EXIT_INTERNAL_ERROR, "OSError"),
        (BrokenPipeError(), EXIT_PIPE_CLOSED, ""),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, ""),
    ],
)
def test_any_exception_is_a_line_and_a_code(
    error: BaseException, code: int, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(arguments: object) -> int:
        raise error

    monkeypatch.setattr(process, "_run_command", fail)
    assert run(["list"]) == code
    err = capsys.readouterr().err
    assert err.count("\n") == bool(words) and (not words or err.startswith("error: "))
    if words:
        import re

        assert re.search(words, err)


def test_a_message_is_one_line_that_steers_no_terminal() -> None:
    assert printable_line("a\nb\x1b[31m\tc" + "d" * 9999).startswith("a b?[31m cddd")
    assert len(printable_line("d" * 9999)) <= 1200


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    text = command.replace("paleo ", f"{sys.executable} -m paleo ")
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {text}"],
        capture_output=True, text=True, env=os.environ | environment, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "code", "error"),
    [
        (
            "paleo list links > /dev/full",
            EXIT_WRONG_INPUT,
            "error: output: cannot be written (No space left on device)\n",
        ),
        ("paleo list devices >&-", EXIT_WRONG_INPUT, "error: output: cannot be written (it is closed)\n"),
        ("paleo show nothing-such 2>&-", EXIT_WRONG_INPUT, ""),
        ("paleo list devices | (exec <&-; sleep 3)", EXIT_PIPE_CLOSED, ""),
    ],
)
def test_streams_that_are_full_closed_or_unread(command: str, code: int, error: str) -> None:
    answer = shell(command)
    assert (answer.returncode, answer.stderr) == (code, error)


@pytest.mark.slow
def test_a_terminal_that_knows_ascii_alone() -> None:
    answer = shell("paleo summary lenet", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert answer.returncode == 0 and answer.stderr == ""
    assert answer.stdout.isascii() and "lenet" in answer.stdout


def test_sigterm_leaves_no_draft(tmp_path: Path) -> None:
    script = (
        "import os, signal\nfrom paleo.cli.process import prepare_streams\n"
        "from paleo.files import write_atomically\nprepare_streams()\n"
        f"write_atomically({str(tmp_path / 't.txt')!r}, lambda file: os.kill(os.getpid(), signal.SIGTERM))"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=30, check=False).returncode == EXIT_TERMINATED
    assert list(tmp_path.iterdir()) == []
    assert EXIT_TERMINATED == 128 + signal.SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize(("stated", "threads"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3")])
def test_commands_multiply_on_one_thread_unless_told_otherwise(stated: dict[str, str], threads: str) -> None:
    """NumPy reads the number where it is first imported, which is after the command line has begun."""
    script = (
        "import atexit, os, sys; sys.argv = ['paleo', 'list', 'links']; from paleo.cli import main\n"
        "assert 'numpy' not in sys.modules\n"
        "atexit.register(lambda: print('threads', os.environ['OPENBLAS_NUM_THREADS']))\n"
        "main()"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"} | stated
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment, timeout=60
    )
    assert finished.stdout.splitlines()[-1] == f"threads {threads}"
