"""A command line becomes an exit code: commands are found, run, and what goes wrong on purpose is one line. Standard
streams are taken as they are: closed, full, without a reader, or of a terminal that knows ASCII alone."""

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
from paleo.cli.application import CATALOG, COMMAND, DECIDE, FAULT, INTERRUPTED, MEASURE, NO, PREDICT, UNREAD, WRONG, app
from paleo.errors import CapacityError, PaleoError

#: What characters of ours become where a terminal does not know them; all others become a question mark.
_PLAIN = {
    "×": "x", "−": "-", "–": "-", "—": "-", "…": "...", "·": "*", "µ": "u", "→": "->", "≥": ">=", "≤": "<=",
    "’": "'", "“": '"', "”": '"', "²": "2", "±": "+-", "≈": "~", "✓": "yes", "•": "*",
}  # fmt: skip
#: Longer messages are cut.
LONGEST = 1200
TERMINATED = 128 + signal.SIGTERM
#: Interrupts from the keyboard so far.
_INTERRUPTS: list[int] = []


def _plainer(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(_PLAIN.get(character, "?") for character in text), error.end


class _Closed:
    """A stream that was closed before the program began: what is written to it fails as it does on a full disk."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(9, "it is closed")

    def flush(self) -> None:
        """Nothing waits here."""

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        raise OSError(9, "it is closed")


def prepare() -> None:
    """Make the streams fit for any text, and let SIGTERM be an exception, so that unfinished files are removed."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:  # a file opened later must not take a closed stream's number
        pass
    os.close(number)
    codecs.register_error("paleo", _plainer)
    sys.stdout = cast(TextIO, sys.stdout or _Closed())
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    for stream in (sys.stdout, sys.stderr):
        reconfigure: Any = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="paleo")
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGTERM, _terminate)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a job in the background ignores it
            signal.signal(signal.SIGINT, _interrupt)
            sys.unraisablehook = _unraised


def _terminate(number: int, frame: object) -> None:
    raise SystemExit(TERMINATED)


def _interrupt(number: int, frame: object) -> None:
    """Stop at once; whatever a library makes of the exception, the exit code is that of an interrupt."""
    _INTERRUPTS.append(number)
    raise KeyboardInterrupt


def _unraised(fault: sys.UnraisableHookArgs) -> None:
    """Raise an interrupt again where Python swallows exceptions (finalizers, callbacks)."""
    if _INTERRUPTS:
        signal.raise_signal(signal.SIGINT)
    else:
        sys.__unraisablehook__(fault)


def say(text: str) -> None:
    """Print a line on stderr; a closed stream is ignored.

    Parameters
    ----------
    text : str
        The line.
    """
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def discard_output() -> None:
    """Discards the buffered output of stdout, so that the interpreter does not fail to flush it at exit."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def printable(message: str) -> str:
    r"""Return a message as one line of limited length, without characters that steer a terminal.

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
    >>> printable("name\n\x1b[31mred")
    'name ?[31mred'
    """
    line = " ".join(message.split())
    return "".join(character if character.isprintable() else "?" for character in line[:LONGEST])


#: What typer raises on wrong usage; its base class has moved between versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
#: Which variable of the environment says how many threads NumPy's matrix products take, and how many of them commands
#: use unless it is set: a search's are small, and threads that wait for work would take a third of its CPU time.
BLAS_THREADS, THREADS = "OPENBLAS_NUM_THREADS", "1"
#: Objects made between two searches for garbage: a command makes many that it keeps, and little garbage.
ALLOCATED = 100_000
#: Set to anything, this variable of the environment shows where a fault arose.
TRACEBACK = "PALEO_TRACEBACK"
REPORT = f"please report it with the command line and the output of {TRACEBACK}=1 (CONTRIBUTING.md says where)"


def every_command() -> typer.Typer:
    """The application with every file of ``commands``; groups of commands keep their order, and files within a
    group."""
    for name in _files():
        importlib.import_module(f"{commands.__name__}.{name}")
    groups = (PREDICT, DECIDE, CATALOG, MEASURE)
    place = {group: index for index, group in enumerate(groups)}
    app.registered_commands.sort(
        key=lambda command: (
            place.get(str(command.rich_help_panel), len(groups)),
            getattr(command.callback, "__module__", ""),
        )
    )
    return app


def _files() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(commands.__path__)]


@cache
def _parser(word: str) -> Callable[..., Any]:
    """What parses a command line that begins with a word: the command of that name alone, where a file has it too, as
    building all of them takes a tenth of an estimate's time."""
    if word in _files():
        importlib.import_module(f"{commands.__name__}.{word}")
    alone = copy(app)
    alone.registered_commands = [each for each in app.registered_commands if word in (each.name, _function(each))]
    return typer.main.get_command(alone if alone.registered_commands else every_command())


def _function(command: CommandInfo) -> str:
    return getattr(command.callback, "__name__", "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code.

    Parameters
    ----------
    arguments : sequence of str, optional
        Command line without the program's name; by default that of the process.
    """
    gc.set_threshold(ALLOCATED)
    os.environ.setdefault(BLAS_THREADS, THREADS)
    prepare()
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries; ours are lines of the output
        warnings.filterwarnings("once", category=FutureWarning, module=r"paleo\.specs")
        warnings.showwarning = lambda message, *_, **__: say(f"warning: {message}")
    code = run(sys.argv[1:] if arguments is None else arguments)
    if signal.getsignal(signal.SIGINT) is _interrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the answer is given
    if _INTERRUPTS:  # Python would end by the signal itself where it came while text was compiled
        os._exit(INTERRUPTED)
    if code in (UNREAD, WRONG, FAULT):
        discard_output()
    gc.freeze()  # nothing is left to tidy up: the process ends
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line; whatever goes wrong is one line on stderr.

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
        code = _command(arguments)
        sys.stdout.flush()
    except CapacityError as error:
        return _fail(str(error), NO)
    except PaleoError as error:
        return _fail(str(error), WRONG)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except _UsageError as error:
        return _fail(error.format_message(), WRONG)  # type: ignore[attr-defined]
    except BrokenPipeError:  # the reader (head, less) has gone; nothing is left to say
        return UNREAD
    except OSError as error:
        return _fail_of_system(error)
    except Exception as error:
        return INTERRUPTED if _INTERRUPTS else _fault(error)
    return code


def _command(arguments: Sequence[str]) -> int:
    word = next((word for word in arguments if not word.startswith("-")), "help")
    COMMAND.set(word)
    try:
        return int(_parser(word)(list(arguments) or ["--help"], standalone_mode=False, prog_name="paleo") or 0)
    except SystemExit as stop:  # how typer reports a pipe without a reader
        if isinstance(stop.__context__, BrokenPipeError):
            raise BrokenPipeError from None
        raise


def _fail_of_system(error: OSError) -> int:
    """What the system refused: room on stdout or on a disk, most of all."""
    place = f"{error.filename}: " if error.filename else "output: "
    if error.errno in (errno.ENOSPC, errno.EBADF, errno.EIO, errno.EDQUOT, errno.EFBIG):
        return _fail(f"{place}cannot be written ({error.strerror})", WRONG)
    return _fault(error)


def _fault(error: Exception) -> int:
    """One line for an unexpected exception: what was raised, where, and how to report it."""
    if os.environ.get(TRACEBACK):
        traceback.print_exc()
    if isinstance(error, MemoryError):
        return _fail("the memory of this machine does not suffice for that", FAULT)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "paleo" in Path(frame.filename).parts[:-1]] or frames[-1:]
    place = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    reason = str(error).strip().splitlines() or [""]
    return _fail(
        f"a fault of paleo, not of yours: {type(error).__name__} at {place}: {reason[0][:200]}; {REPORT}", FAULT
    )


def _fail(message: str, code: int) -> int:
    say(f"error: {printable(message)}")
    return code
