"""The application that commands register with, its groups of commands and its exit codes; and what commands print and
draw: one JSON document or tables, warnings, pictures."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperOption

from paleo.errors import SpecError
from paleo.files import PICTURES, checked_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

_BRACKETS = re.compile(r"\s*\[([^\]]+)\]\Z")


class Command(TyperCommand):
    """A command whose help shows the default of every option: what stands in brackets at the end of its help, where
    the value itself does not say it. An option of one value is stated once."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for parameter in self.params:
            if isinstance(parameter, TyperOption | TyperArgument) and not parameter.required:
                show_default(parameter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line; SpecError where an option of one value stands more than once."""
        if not ctx.resilient_parsing:
            _, _, parameters = self.make_parser(ctx).parse_args(args=list(args))
            check_stated_once(parameters)
        return super().parse_args(ctx, args)


def check_stated_once(parameters: Sequence[Any]) -> None:
    """SpecError for an option of one value that stands more than once; ``parameters`` has one entry for each time."""
    options = (each for each in parameters if isinstance(each, TyperOption))
    times = Counter(option for option in options if not (option.multiple or option.is_flag))
    for option, count in times.items():
        if count > 1:
            raise SpecError(f"{max(option.opts, key=len)} is stated {count} times; it takes one value")


def show_default(parameter: TyperOption | TyperArgument) -> None:
    """Moves the default that a help text states to where it is shown; a flag is off, an option without one is none."""
    text = parameter.help or ""
    stated = _BRACKETS.search(text)
    if stated is not None:
        parameter.help, parameter.show_default = text[: stated.start()], stated.group(1)
    elif parameter.default is False:
        parameter.show_default = "off"
    elif parameter.default is None:
        parameter.show_default = "none"


Function = TypeVar("Function", bound=Callable[..., Any])


class Application(typer.Typer):
    """Commands of `Command`'s kind."""

    def command(self, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
        return super().command(name, cls=Command, **options)


app = Application(
    name="paleo",
    help="Predicts how fast a neural network trains on a machine, and how that scales, before anyone buys it.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


#: Groups of commands, as --help shows them.
PREDICT, DECIDE, CATALOG, MEASURE = "Predict", "Decide", "Catalog and networks", "Measure"
#: Exit codes: the answer is no; the input is wrong; a fault of ours; stopped from the keyboard; nobody reads the output
#: any more.
NO, WRONG, FAULT, INTERRUPTED, UNREAD = 1, 2, 3, 130, 141


def _version(requested: bool) -> None:
    if requested:
        from paleo import __version__

        sys.stdout.write(f"paleo {__version__}\n")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def _main(
    version: Version = False,
) -> None:
    pass


#: The command that runs, whose name a document carries.
COMMAND: ContextVar[str] = ContextVar("command", default="unknown")


def show_document(
    document: Callable[[], Mapping[str, Any]], table: Callable[[], RenderableType], as_json: bool
) -> None:
    """One JSON document, or tables."""
    if as_json:
        from paleo.report.documents import dumped, with_schema

        sys.stdout.write(dumped(with_schema(COMMAND.get(), document())) + "\n")
        return
    from paleo.report.tables import console

    console().print(table(), crop=False)  # commands to paste are not cut


def warn(warnings: Sequence[str]) -> None:
    """Each warning on a line of stderr."""
    for warning in warnings:
        sys.stderr.write(f"warning: {warning}\n")


def picture_path(plot: str | None) -> Path | None:
    """Whether a picture of that name can be drawn, before anything is computed for it."""
    if plot is None:
        return None
    return checked_output(plot, PICTURES, option="--plot")


def draw(path: Path | None, figure: Callable[[], Figure]) -> None:
    """Draw a picture, where one is asked for."""
    if path is not None:
        from paleo.report.plots import save

        save(figure(), path)
        sys.stderr.write(f"wrote {path}\n")


def finish(code: int) -> None:
    """End a command with its exit code."""
    if code:
        raise typer.Exit(code)
