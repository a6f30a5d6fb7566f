"""Runs a command line and turns its outcome into an exit code; expected errors become one line on stderr.

Standard streams may be closed, full, without a reader, or of a terminal that only shows ASCII.
"""

from __future__ import annotations

import codecs
import errno
import gc
import importlib
import os
import pkgutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, TextIO, cast

import typer
from typer.models import CommandInfo

from paleo.cli import commands
from paleo.cli.application import (
    EXIT_INTERNAL_ERROR,
    EXIT_INTERRUPTED,
    EXIT_NO,
    EXIT_PIPE_CLOSED,
    EXIT_WRONG_INPUT,
    HELP_GROUPS,
    RUNNING_COMMAND_NAME,
    app,
)
from paleo.errors import CapacityError, PaleoError

#: Replacements for characters that a terminal cannot show; all other such characters become a question mark.
_ASCII_REPLACEMENTS = {
    "×": "x", "−": "-", "–": "-", "—": "-", "…": "...", "·": "*", "µ": "u", "→": "->", "≥": ">=", "≤": "<=",
    "’": "'", "“": '"', "”": '"', "²": "2", "±": "+-", "≈": "~", "✓": "yes", "•": "*",
}  # fmt: skip
#: Longest message in characters; longer ones are cut.
_MAX_MESSAGE_LENGTH = 1200
EXIT_TERMINATED = 128 + signal.SIGTERM
#: Keyboard interrupts that were received.
_INTERRUPTS: list[int] = []


def _ascii_replacement(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_ASCII_REPLACEMENTS.get(character, "?") for character in text), error.end


class _ClosedStream:
    """Replacement for a stream that was closed before the program began; writing to it fails as on a full disk."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Raise OSError, because the stream is closed.

        Parameters
        ----------
        text : str
            Text to write.

        Raises
        ------
        OSError
            In every call.
        """
        raise OSError(9, "it is closed")

    def flush(self) -> None:
        """Do nothing, as nothing is buffered."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError(9, "it is closed")


def prepare_streams() -> None:
    """Prepare the standard streams for any text, and make SIGTERM an exception, so unfinished files are removed."""
    # a file that is opened later must not get the number of a closed stream
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass
    os.close(number)
    codecs.register_error("paleo", _ascii_replacement)
    sys.stdout = cast(TextIO, sys.stdout or _ClosedStream())
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="paleo")
    with suppress(ValueError):  # signals are only available in the main thread
        signal.signal(signal.SIGTERM, _terminate)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs ignore the signal
            signal.signal(signal.SIGINT, _interrupt)
            sys.unraisablehook = _raise_swallowed_interrupt


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(EXIT_TERMINATED)


def _interrupt(number: int, frame: object) -> None:
    """Handle Ctrl-C: record the interrupt and raise KeyboardInterrupt.

    The record sets the exit code to 130 even if a library swallows the exception.
    """
    _INTERRUPTS.append(number)
    raise KeyboardInterrupt


def _raise_swallowed_interrupt(fault: sys.UnraisableHookArgs) -> None:
    """Send Ctrl-C again if Python swallowed the KeyboardInterrupt in a finalizer or callback."""
    if _INTERRUPTS:
        signal.raise_signal(signal.SIGINT)
    else:
        sys.__unraisablehook__(fault)


def _print_error_line(text: str) -> None:
    """Print a line on stderr; a closed stream is ignored.

    Parameters
    ----------
    text : str
        The line.
    """
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _discard_output() -> None:
    """Discard the buffered output of stdout, so that the interpreter does not fail to flush it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable_line(message: str) -> str:
    r"""Return a message as one line of limited length, without control characters of terminals.

    Parameters
    ----------
    message : str
        The message.

    Returns
    -------
    str
        The line.

    Examples
    --------
    >>> printable_line("name\n\x1b[31mred")
    'name ?[31mred'
    """
    line = " ".join(message.split())
    return "".join(character if character.isprintable() else "?" for character in line[:_MAX_MESSAGE_LENGTH])


#: Exception that typer raises on wrong usage; its base class differs between versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
#: Environment variable for the threads of NumPy's matrix products, and its default here. The products of a search are
#: small, and idle threads would take a third of its CPU time.
_BLAS_THREADS_VARIABLE, _DEFAULT_BLAS_THREADS = "OPENBLAS_NUM_THREADS", "1"
#: Environment variable that keeps pydantic from looking for plugins in every installed package.
_PYDANTIC_PLUGINS_VARIABLE = "PYDANTIC_DISABLE_PLUGINS"
#: Allocations between two garbage collections. Commands keep most of their objects, so frequent collections are
#: useless.
GC_THRESHOLD = 2**18
#: Environment variable with which a shell asks for completions.
_COMPLETION_VARIABLE = "_PALEO_COMPLETE"
#: Environment variable that makes errors of this program print a traceback, if it is set to anything.
_TRACEBACK_VARIABLE = "PALEO_TRACEBACK"
_BUG_REPORT_HINT = (
    f"please report it with the command line and the output of {_TRACEBACK_VARIABLE}=1 (CONTRIBUTING.md says where)"
)


def app_with_all_commands() -> typer.Typer:
    """Import all command modules and return the typer application, with commands sorted by help group and file."""
    for name in _command_modules():
        importlib.import_module(f"{commands.__name__}.{name}")

    def place(command: CommandInfo) -> tuple[int, str]:
        return HELP_GROUPS.index(str(command.rich_help_panel)), getattr(command.callback, "__module__", "")

    app.registered_commands.sort(key=place)
    return app


def _command_modules() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(commands.__path__)]


@cache
def _parser(word: str) -> Callable[..., Any]:
    """Return a function that parses command lines which begin with ``word``.

    If a file of commands has that name, only its command is built, because building all of them takes a tenth of the
    time of an estimate.
    """
    if f"_{word}" in _command_modules():
        importlib.import_module(f"{commands.__name__}._{word}")
    alone = copy(app)
    alone.registered_commands = [each for each in app.registered_commands if word in (each.name, _function_name(each))]
    if not alone.registered_commands:
        alone.registered_commands = app_with_all_commands().registered_commands
    if word == "help" and _COMPLETION_VARIABLE not in os.environ:
        alone.registered_commands = [_without_parameters(command) for command in alone.registered_commands]
    return typer.main.get_command(alone)


def _without_parameters(command: CommandInfo) -> CommandInfo:
    """Return a command as the help of the program shows it: its name, group and text are enough."""
    entry = copy(command)
    entry.name, entry.callback = command.name or _function_name(command).replace("_", "-"), lambda: None
    entry.help = command.help or command.callback.__doc__
    return entry


def _function_name(command: CommandInfo) -> str:
    return getattr(command.callback, "__name__", "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command line without the program's name; by default that of the process.
    """
    gc.set_threshold(GC_THRESHOLD)
    os.environ.setdefault(_BLAS_THREADS_VARIABLE, _DEFAULT_BLAS_THREADS)
    os.environ.setdefault(_PYDANTIC_PLUGINS_VARIABLE, "__all__")
    prepare_streams()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # warnings of libraries; this program prints its own as lines
        warnings.filterwarnings("once", category=FutureWarning, module=r"paleo\.specs")
        warnings.showwarning = lambda message, *_, **__: _print_error_line(f"warning: {message}")
    code = run_command_line(sys.argv[1:] if arguments is None else arguments)
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is already printed
    if _INTERRUPTS:  # Python would die from the signal itself if it arrived while code was compiled
        os._exit(EXIT_INTERRUPTED)
    if code in (EXIT_PIPE_CLOSED, EXIT_WRONG_INPUT, EXIT_INTERNAL_ERROR):
        _discard_output()
    gc.freeze()  # nothing is left to clean up, so the process ends at once
    sys.exit(code)


def run_command_line(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code; any error is printed as one line on stderr.

    Parameters
    ----------
    arguments : sequence of str
        Command line without the program's name.

    Returns
    -------
    int
        The exit code.
    """
    try:
        code = _run_command(arguments)
        sys.stdout.flush()
    except CapacityError as error:
        return _print_error(str(error), EXIT_NO)
    except PaleoError as error:
        return _print_error(str(error), EXIT_WRONG_INPUT)
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except _UsageError as error:
        return _print_error(_usage_message(error), EXIT_WRONG_INPUT)
    except BrokenPipeError:  # the reader (head, less) has closed the pipe
        return EXIT_PIPE_CLOSED
    except OSError as error:
        # Print an error of the operating system, such as a full disk, and return the exit code.
        place = f"{error.filename}: " if error.filename else "output: "
        if error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT, errno.EFBIG):
            return _print_error(f"{place}cannot be written ({error.strerror})", EXIT_WRONG_INPUT)
        return _report_internal_error(error)
    except Exception as error:
        return EXIT_INTERRUPTED if _INTERRUPTS else _report_internal_error(error)
    return code


def _usage_message(error: Any) -> str:
    """Return the message for wrong usage; for a missing value, what it means and an example of the command."""
    message = str(error.format_message())
    meaning = getattr(getattr(error, "param", None), "help", None)
    if not message.startswith("Missing ") or not meaning:
        return message
    examples = [line for line in str(error.ctx.command.help).splitlines() if line.startswith(error.ctx.command_path)]
    return "; for example: ".join([f"{message.rstrip('.')}: {meaning.rstrip('.')}", *examples[:1]])


def _run_command(arguments: Sequence[str]) -> int:
    word = next((word for word in arguments if not word.startswith("-")), "help")
    RUNNING_COMMAND_NAME.set(word)
    try:
        return int(_parser(word)(list(arguments) or ["--help"], standalone_mode=False, prog_name="paleo") or 0)
    except SystemExit as stop:  # typer reports a closed pipe in this way
        if isinstance(stop.__context__, BrokenPipeError):
            raise BrokenPipeError from None
        raise


#: The folder of this package, in whatever folder it was cloned or installed to.
_PACKAGE = Path(__file__).parents[1]


def _report_internal_error(error: Exception) -> int:
    """Print one line on an unexpected exception (what was raised, where, how to report it); return the exit code."""
    if os.environ.get(_TRACEBACK_VARIABLE):
        traceback.print_exc()
    if isinstance(error, MemoryError):
        return _print_error("the memory of this machine is not enough for this command", EXIT_INTERNAL_ERROR)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if _PACKAGE in Path(frame.filename).parents] or frames[-1:]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    reason = str(error).strip().splitlines() or [""]
    problem = f"{type(error).__name__} at {place}: {reason[0][:200]}"
    return _print_error(
        f"an error in paleo itself, not in your input: {problem}; {_BUG_REPORT_HINT}", EXIT_INTERNAL_ERROR
    )


def _print_error(message: str, code: int) -> int:
    _print_error_line(f"error: {printable_line(message)}")
    return code
