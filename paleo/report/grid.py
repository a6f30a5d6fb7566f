"""Tables of a terminal: figures flush right, and as many parts as a narrow screen needs; commands to paste from one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Column, Table
from rich.text import Text

#: Columns of text that is folded rather than cut, at the least, and between two columns of a table.
FOLDED, GAP = 26, 3


class Grid(Table):
    """A table that comes in parts, each beginning with the first column, where a screen is too narrow for all columns
    side by side."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = list(self.parts(options.max_width))
        if len(parts) == 1:
            yield from super().__rich_console__(console, options)
            return
        for number, columns in enumerate(parts):
            yield from [""] if number else []
            yield from self._part(columns, number == 0).__rich_console__(console, options)

    def parts(self, width: int) -> Iterator[list[Column]]:
        """The columns that stand side by side in so many characters."""
        first, *following = self.columns
        part, taken = [first], _width(first)
        for column in following:
            if taken + GAP + _width(column) > width and len(part) > 1:
                yield part
                part, taken = [first], _width(first)
            part.append(column)
            taken += GAP + _width(column)
        yield part

    def _part(self, columns: list[Column], titled: bool) -> Table:
        """Some of the columns as a table."""
        table = _table(Table, str(self.title) if titled and self.title else "")
        for column in columns:
            table.add_column(column.header, justify=column.justify, overflow="fold")
        cells = zip(*(column.cells for column in columns), strict=True)
        for row, values in zip(self.rows, cells, strict=True):
            table.add_row(*values, end_section=row.end_section)
        return table


def _width(column: Column) -> int:
    """Characters of a column; of one with text, those below which it is not folded."""
    cells = [column.header, *column.cells]
    widest = max(cell_len(line) for cell in cells for line in (str(cell).splitlines() or [""]))
    return min(widest, FOLDED) if column.justify == "left" else widest


def _table(kind: type[Table], title: str) -> Table:
    style = {"title_style": "bold", "title_justify": "left", "box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    return kind(title=title or None, **style)  # type: ignore[arg-type]


def grid(title: str, columns: Iterable[str], *, left: int = 1) -> Table:
    """An empty table: the first ``left`` columns flush left, figures flush right."""
    table = _table(Grid, title)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", overflow="fold")
    return table


@dataclass(frozen=True)
class Pasted:
    """Words and a command behind them, on lines that a shell joins again; wrapped as a text it would run in pieces."""

    words: str
    command: str
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in continued(f"{self.words}: ", self.command, min(self.width, options.max_width)):
            yield Text(line, no_wrap=True, overflow="ignore")


def continued(before: str, command: str, width: int) -> list[str]:
    """A command on lines of at most ``width`` characters, each but the last ending in a backslash; an option stays
    beside its value, and what is longer than a line stays whole.

    >>> continued("Run: ", "paleo estimate gpt2 --gpus 8 --set 'cut=[6, 6]'", 26)
    ['Run: paleo estimate gpt2 \\\\', '  --gpus 8 \\\\', "  --set 'cut=[6, 6]'"]
    """
    pieces = [piece.strip() for piece in re.split(r"\s(?=--)", command)]
    lines = [before + pieces[0]]
    for piece in pieces[1:]:
        if len(lines[-1]) + len(piece) + len(" " + CONTINUED) < width:
            lines[-1] += f" {piece}"
        else:
            lines.append(f"  {piece}")
    return [*(line + CONTINUED for line in lines[:-1]), lines[-1]]


CONTINUED = " \\"
