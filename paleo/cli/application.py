"""The application that commands register with, its groups of commands and its exit codes."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

app = typer.Typer(
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


def _version(wanted: bool) -> None:
    if wanted:
        from paleo import __version__

        sys.stdout.write(f"paleo {__version__}\n")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def _main(
    version: Version = False,
) -> None:
    pass
