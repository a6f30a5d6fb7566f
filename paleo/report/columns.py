"""Columns of answers, and how a terminal prints them.

A row of an answer (a point of a curve, a plan, a system) has one declaration for each of its quantities: the key of
``--json`` and of data frames, the heading and unit of tables, and a function that reads the value. JSON, text tables
and data frames follow from it; ``columns.csv`` holds the meaning of each key for schemas and documentation.

Notebooks show the tables of the terminal as HTML.
"""

from __future__ import annotations

import csv
import functools
import io
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.table import Column as TableColumn
from rich.table import Table
from rich.text import Text

from paleo.units import GIGA, common_unit_time, format_dollars, format_duration, format_gibibytes, format_quantity

Document = dict[str, Any]
#: Characters per line where the output is no terminal: of the widest table, and of text.
PIPE_LINE_WIDTH, TEXT_WIDTH = 150, 118
#: Fewest characters of a line that COLUMNS may ask for.
_MIN_LINE_WIDTH = 40
#: Part of a step -> its name in tables and plots.
STEP_PART_NAMES = {
    "compute": "compute",
    "memory_bound": "memory-bound",
    "launch": "kernel launch",
    "communication_exposed": "exposed communication",
    "slowed": "compute slowed by communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "input": "exposed input",
    "stragglers": "waiting for stragglers",
}
#: Cell without a value.
EMPTY_CELL = "-"
#: Characters to which columns of text may be folded, and characters between two columns.
_FOLDED_COLUMN_WIDTH, _COLUMN_GAP_WIDTH = 26, 3


# numbers as text


def format_rate(per_second: float) -> str:
    """Format a rate with at least four significant digits and no exponent.

    Parameters
    ----------
    per_second : float
        Rate [1/s].

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> format_rate(20520.4), format_rate(12.3456)
    ('20,520', '12.35')
    """
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"


def percent(share: float) -> str:
    """Format a fraction as a percentage of two significant digits.

    Parameters
    ----------
    share : float
        Fraction.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> percent(0.4567), percent(0.0123)
    ('46 %', '1.2 %')
    """
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def format_percent_tenths(share: float) -> str:
    """Format a fraction as a percentage with one decimal.

    Parameters
    ----------
    share : float
        Fraction.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> format_percent_tenths(0.9987)
    '99.9 %'
    """
    return f"{100 * share:.1f} %"


def format_usd(dollars: float | None) -> str:
    """Write an amount of US dollars.

    Parameters
    ----------
    dollars : float, optional
        Amount [USD]; None if no price is known.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> format_usd(1234.5), format_usd(0.034), format_usd(None)
    ('1,234 USD', '0.034 USD', '-')
    """
    return EMPTY_CELL if dollars is None else format_dollars(dollars)


def format_energy(kilowatt_hours: float | None) -> str:
    """Write an energy in kilowatt-hours with its unit.

    Parameters
    ----------
    kilowatt_hours : float, optional
        Energy [kWh]; None if the power is not known.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> format_energy(2624.4), format_energy(1.234), format_energy(None)
    ('2,624 kWh', '1.23 kWh', '-')
    """
    if kilowatt_hours is None:
        return EMPTY_CELL
    return f"{kilowatt_hours:,.0f} kWh" if kilowatt_hours >= 100 else f"{kilowatt_hours:,.3g} kWh"


def layers_per_stage(blocks: Sequence[int]) -> str:
    """Describe how many layers each pipeline stage (or chunk) holds.

    Parameters
    ----------
    blocks : sequence of int
        Layers of each stage.

    Returns
    -------
    str
        The text.

    Examples
    --------
    >>> layers_per_stage((17, 15)), layers_per_stage((2, 3, 5, 5, 5, 5, 5, 2))
    ('17+15 layers', '2 to 5 layers a stage')
    """
    if len(blocks) <= 4:
        return f"{'+'.join(map(str, blocks))} layers"
    return f"{min(blocks)} to {max(blocks)} layers a stage"


#: Unit of a column -> how tables print its values. Columns without a unit are text, flush left.
_FORMATTERS_BY_UNIT: Mapping[str, Callable[[Any], str]] = {
    "": str,
    "count": lambda value: f"{value:,.0f}",
    "number": lambda value: f"{value:,.3g}",
    "ratio": lambda value: f"{value:.2f}",
    "s": format_duration,
    "B": format_gibibytes,
    "GB/s": lambda value: f"{value / GIGA:.4g}",
    "decimal B": lambda value: format_quantity(value, "B"),
    "B/s": lambda value: format_quantity(value, "B/s"),
    "duration": format_duration,  # each cell in its own unit
    "1/s": format_rate,
    "fraction": percent,
    "tenths": format_percent_tenths,
    "words": str,
    "price": lambda value: f"{value:,.2f}",
    "USD": format_usd,
    "kWh": format_energy,
    "prefix": lambda value: format_quantity(value, ""),
    "yes or no": lambda value: "yes" if value else "no",
}


# columns


@dataclass(frozen=True)
class AnswerColumn:
    """One column of an answer's table: JSON key, value function, title, unit and format.

    Parameters
    ----------
    key : str
        Key in JSON documents and data frames; empty for columns of tables only.
    row_value : callable
        Returns the value of a row, in SI units; None if it is not known.
    title : str
        Heading in tables; empty for keys that tables do not print.
    unit : str
        A key of `_FORMATTERS_BY_UNIT`.
    cell_text : callable, optional
        Returns the printed cell of a row; by default the unit decides how the value is printed.
    optional : bool
        Omit the column from tables in which no row has a value.
    """

    key: str
    row_value: Callable[[Any], Any]
    title: str = ""
    unit: str = ""
    cell_text: Callable[[Any], str] | None = None
    optional: bool = False

    def cells(self, rows: Sequence[Any]) -> list[str]:
        """Format the value of each row as text; all times of the column share one unit.

        Parameters
        ----------
        rows : sequence of Any
            Rows of the answer.

        Returns
        -------
        list of str
            One text a row.
        """
        if self.cell_text is not None:
            return [self.cell_text(row) for row in rows]
        values = [self.row_value(row) for row in rows]
        spoken = _FORMATTERS_BY_UNIT[self.unit]
        if self.unit == "s":
            known = (value for value in values if value is not None)
            spoken = functools.partial(format_duration, like=common_unit_time(known))
        return [EMPTY_CELL if value is None else spoken(value) for value in values]


def row_json(columns: Iterable[AnswerColumn], row: Any) -> Document:
    """Return one row as a JSON document, by the keys of its columns.

    Parameters
    ----------
    columns : iterable of AnswerColumn
        Columns of the answer.
    row : Any
        The row.

    Returns
    -------
    Document
        The document.
    """
    return {column.key: column.row_value(row) for column in columns if column.key}


def rows_table(title: str, columns: Iterable[AnswerColumn], rows: Sequence[Any]) -> Table:
    """Return the rows of an answer as a table for the console.

    Parameters
    ----------
    title : str
        Printed above the table.
    columns : iterable of AnswerColumn
        Those with a title are printed, in this order.
    rows : sequence
        Rows of the answer, which the getters of the columns read.

    Returns
    -------
    Table
        Table with one row per row of the answer.
    """
    titled = [column for column in columns if column.title]
    printed = [each for each in titled if not each.optional or any(each.row_value(row) is not None for row in rows)]
    table = empty_table(title, [column.title for column in printed], left=[not column.unit for column in printed])
    for cells in zip(*(column.cells(rows) for column in printed), strict=True):
        table.add_row(*cells)
    return table


@functools.cache
def key_meanings() -> dict[str, tuple[str, str]]:
    """Return unit and meaning of each key of the JSON documents; nested keys are listed by their last part."""
    with (Path(__file__).parent / "columns.csv").open(encoding="utf-8", newline="") as file:
        return {row["key"]: (row["unit"], row["meaning"]) for row in csv.DictReader(file)}


# tables


class SplittingTable(Table):
    """Table that is split into several where a screen is too narrow; each part repeats the first column."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = list(self._parts(options.max_width))
        if len(parts) == 1:
            yield from super().__rich_console__(console, options)
            return
        for number, columns in enumerate(parts):
            yield from [""] if number else []
            table = _table(Table, str(self.title) if number == 0 and self.title else "")
            for column in columns:
                table.add_column(column.header, justify=column.justify, overflow="fold")
            cells = zip(*(column.cells for column in columns), strict=True)
            for row, values in zip(self.rows, cells, strict=True):
                table.add_row(*values, end_section=row.end_section)
            yield from table.__rich_console__(console, options)

    def _parts(self, width: int) -> Iterator[list[TableColumn]]:
        """Yield the groups of columns that fit side by side into ``width`` characters."""
        first, *following = self.columns
        part, taken = [first], _width(first)
        for column in following:
            if taken + _COLUMN_GAP_WIDTH + _width(column) > width and len(part) > 1:
                yield part
                part, taken = [first], _width(first)
            part.append(column)
            taken += _COLUMN_GAP_WIDTH + _width(column)
        yield part


def _width(column: TableColumn) -> int:
    """Return the least width of a column [characters].

    Text with spaces may be folded, strategies and numbers may not.
    """
    cells = [str(cell) for cell in (column.header, *column.cells)]
    widest = max(cell_len(line) for cell in cells for line in (cell.splitlines() or [""]))
    longest_word = max(cell_len(word) for cell in cells for word in (cell.split() or [""]))
    return min(widest, max(_FOLDED_COLUMN_WIDTH, longest_word)) if column.justify == "left" else widest


def _table(kind: type[Table], title: str) -> Table:
    style = {"title_style": "bold", "title_justify": "left", "box": SIMPLE_HEAD, "show_edge": False, "pad_edge": False}
    return kind(title=title or None, **style)  # type: ignore[arg-type]


def empty_table(title: str, columns: Iterable[str], *, left: int | Sequence[bool] = 1) -> Table:
    """Return a table for the console that has headings and no rows yet.

    Parameters
    ----------
    title : str
        Printed above the table.
    columns : iterable of str
        Headings.
    left : int or sequence of bool
        How many of the first columns are flush left, or which ones; numbers are flush right.

    Returns
    -------
    Table
        The table; callers add rows.
    """
    table = _table(SplittingTable, title)
    for index, name in enumerate(columns):
        flush_left = index < left if isinstance(left, int) else left[index]
        table.add_column(name, justify="left" if flush_left else "right", overflow="fold")
    return table


def name_value_table(title: str, rows: Iterable[tuple[str, str]]) -> Constrain:
    """Return names and values as a table without headings.

    Parameters
    ----------
    title : str
        Title of the table.
    rows : Iterable[tuple[str, str]]
        Names and values.

    Returns
    -------
    Constrain
        The table.
    """
    table = empty_table(title, ("", ""), left=2)
    table.show_header = False
    for name, value in rows:
        table.add_row(name, value)
    return Constrain(table, TEXT_WIDTH)


# text


def console() -> Console:
    """Return a console for standard output, as wide as the terminal; in a pipe as COLUMNS, or else `PIPE_LINE_WIDTH`.

    Square brackets in names are never read as markup.
    """
    probe = Console(highlight=False, markup=False, emoji=False)
    stated = os.environ.get("COLUMNS", "")
    wide = int(stated) if stated.isdigit() and int(stated) >= _MIN_LINE_WIDTH else PIPE_LINE_WIDTH
    return probe if probe.is_terminal else Console(highlight=False, markup=False, emoji=False, width=wide)


def wrapped_text(text: str | Text) -> Constrain:
    """Wrap a text for the console to lines of at most `TEXT_WIDTH` characters.

    Parameters
    ----------
    text : str | Text
        The text.

    Returns
    -------
    Constrain
        The text for the console.
    """
    return Constrain(Text(text) if isinstance(text, str) else text, TEXT_WIDTH)


def answer_group(verdict: str, tables: Iterable[RenderableType], notes: Iterable[str]) -> Group:
    """Return an answer for the console: its verdict in bold, tables with empty lines between them, and notes.

    Parameters
    ----------
    verdict : str
        Sentence.
    tables : iterable of RenderableType
        Tables.
    notes : iterable of str
        Sentences below the tables.

    Returns
    -------
    Group
        The answer.
    """
    parts: list[RenderableType] = [wrapped_text(Text(verdict, style="bold")), Text()]
    for table in tables:
        parts += [table, Text()]
    return Group(*parts, *map(wrapped_text, notes))


def chosen_defaults_line(choices: Mapping[str, str]) -> Iterator[Constrain]:
    """Yield one line on options that the user left open, with the values chosen for them, if there are any.

    Parameters
    ----------
    choices : mapping of str to str
        Reason by chosen value.

    Yields
    ------
    Constrain
        The line; nothing if no option was left open.
    """
    if choices:
        words = "; ".join(f"{choice} ({why})" for choice, why in choices.items())
        yield wrapped_text(f"Chosen: {words}.\n")


@dataclass(frozen=True)
class ShellCommandText:
    """Text followed by a shell command, broken with backslashes so that it can be pasted into a shell."""

    label: str
    command: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in _break_shell_command(f"{self.label}: ", self.command, min(TEXT_WIDTH, options.max_width)):
            yield Text(line, no_wrap=True, overflow="ignore")


def _break_shell_command(before: str, command: str, width: int) -> list[str]:
    r"""Break a command into lines, each but the last ending in a backslash.

    An option stays on the line of its value; what is longer than a line is not broken.

    Parameters
    ----------
    before : str
        Words before the command.
    command : str
        The command.
    width : int
        Most characters of a line.

    Returns
    -------
    list of str
        Lines.

    Examples
    --------
    >>> _break_shell_command("Run: ", "paleo estimate gpt2 --gpus 8 --set 'cut=[6, 6]'", 26)
    ['Run: paleo estimate gpt2 \\', '  --gpus 8 \\', "  --set 'cut=[6, 6]'"]
    """
    parts = [part.strip() for part in re.split(r"\s(?=--)", command)]
    lines = [before + parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + len(" \\") + 1 <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(f"  {part}")
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


# documents

#: Version of all documents: it rises when a key changes its meaning or goes away.
_SCHEMA_VERSION = 1


def with_schema(command: str, document: Mapping[str, Any]) -> Document:
    """Add the key ``schema`` to a JSON document, which names the document's schema (see ``paleo schema COMMAND``).

    Parameters
    ----------
    command : str
        Name of the command.
    document : dict of str to Any
        The document.

    Returns
    -------
    Document
        A new document.

    Examples
    --------
    >>> with_schema("scale", {"points": []})
    {'schema': 'paleo.scale/1', 'points': []}
    """
    return {"schema": f"paleo.{command}/{_SCHEMA_VERSION}", **document}


def json_text(document: Mapping[str, Any]) -> str:
    """Return a document as JSON text; a number that is not finite becomes null.

    Parameters
    ----------
    document : dict of str to Any
        The document.

    Returns
    -------
    str
        The text.
    """
    return json.dumps(_finite(document), indent=2, allow_nan=False, ensure_ascii=False)


def _finite(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


#: Characters of a cell that stay on one line.
_MAX_NOWRAP_CHARACTERS = 60


def notebook_html(output: RenderableType) -> str:
    """Convert console output of a command (tables and paragraphs) to HTML for a notebook.

    Parameters
    ----------
    output : RenderableType
        Tables and paragraphs.

    Returns
    -------
    str
        HTML.

    Examples
    --------
    >>> notebook_html("a < b")
    '<p style="white-space:pre-line;margin:.4em 0;max-width:70em">a &lt; b</p>'
    """
    if isinstance(output, Group):
        return "\n".join(filter(None, (notebook_html(part) for part in output.renderables)))
    if isinstance(output, Constrain):
        return notebook_html(output.renderable)
    if isinstance(output, Table):
        return _html_table(output)
    if isinstance(output, str | Text):
        text = Text(output) if isinstance(output, str) else output
        if not text.plain.strip():
            return ""
        marked, end = [], 0
        spans = [(0, len(text))] if "bold" in str(text.style) else []
        for first, last in spans or [(span.start, span.end) for span in text.spans if "bold" in str(span.style)]:
            marked += [escape(text.plain[end:first]), f"<b>{escape(text.plain[first:last])}</b>"]
            end = last
        inner = "".join([*marked, escape(text.plain[end:])]).strip()
        return f'<p style="white-space:pre-line;margin:.4em 0;max-width:70em">{inner}</p>'
    return f"<pre>{escape(_plain(output))}</pre>"


def _html_table(table: Table) -> str:
    sides = [str(column.justify) for column in table.columns]
    names = [_plain(column.header) for column in table.columns]
    heads = "".join(map(_html_cell, ["th"] * len(names), sides, names))
    rows = zip(*([_plain(cell) for cell in column.cells] for column in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(map(_html_cell, ['td'] * len(row), sides, row))}</tr>" for row in rows)
    style = "text-align:left;font-weight:bold;padding-top:.6em"
    title = f'<caption style="{style}">{escape(_plain(table.title))}</caption>' if table.title else ""
    head = f"<thead><tr>{heads}</tr></thead>" if table.show_header else ""
    return f"<table>{title}{head}<tbody>{body}</tbody></table>"


def _html_cell(tag: str, side: str, text: str) -> str:
    wrap = "normal" if len(text) > _MAX_NOWRAP_CHARACTERS else "nowrap"
    return f'<{tag} style="text-align:{side};white-space:{wrap};padding:.15em .7em">{escape(text)}</{tag}>'


def _plain(output: RenderableType) -> str:
    """Return the text of an output without its style (colours, bold)."""
    if isinstance(output, str):
        return output
    if isinstance(output, Text):
        return output.plain
    # in a notebook, a console displays whatever it prints unless told otherwise
    console = Console(
        file=io.StringIO(), width=PIPE_LINE_WIDTH, highlight=False, markup=False, emoji=False, force_jupyter=False
    )
    with console.capture() as captured:
        console.print(output)
    return captured.get().rstrip("\n")
