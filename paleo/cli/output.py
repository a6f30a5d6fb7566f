"""What commands print and draw: one JSON document or tables, warnings, pictures, an exit code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from paleo.files import PICTURES, checked_output

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


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

    console().print(table())


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
