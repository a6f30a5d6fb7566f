"""A command line becomes an exit code: commands are found, run, and what goes wrong on purpose is one line."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import sys
from collections.abc import Sequence

import typer

from paleo.cli import commands
from paleo.cli.application import CATALOG, DECIDE, INTERRUPTED, MEASURE, NO, PREDICT, UNREAD, WRONG, app
from paleo.errors import CapacityError, PaleoError

#: What typer raises on wrong usage; its base class has moved between versions.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]
#: Objects made between two searches for garbage: a command makes many that it keeps, and little garbage.
ALLOCATED = 100_000


def _register_commands() -> None:
    """Import every file of ``commands``; groups of commands keep their order, and names within a group."""
    for module in pkgutil.iter_modules(commands.__path__):
        importlib.import_module(f"{commands.__name__}.{module.name}")
    groups = (PREDICT, DECIDE, CATALOG, MEASURE)
    place = {group: index for index, group in enumerate(groups)}
    app.registered_commands.sort(key=lambda command: place.get(str(command.rich_help_panel), len(groups)))


_register_commands()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit with its code."""
    gc.set_threshold(ALLOCATED)
    try:
        code = run(sys.argv[1:] if arguments is None else arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader (head, less) has gone; nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = UNREAD
    gc.freeze()  # nothing is left to tidy up: the process ends
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """The exit code of a command line; what goes wrong on purpose is one line on stderr."""
    try:
        return int(app(list(arguments) or ["--help"], standalone_mode=False, prog_name="paleo") or 0)
    except CapacityError as error:
        return _fail(str(error), NO)
    except PaleoError as error:
        return _fail(str(error), WRONG)
    except typer.Abort:
        return INTERRUPTED
    except _UsageError as error:
        return _fail(error.format_message(), WRONG)  # type: ignore[attr-defined]


def _fail(message: str, code: int) -> int:
    sys.stderr.write(f"error: {' '.join(message.split())}\n")
    return code
