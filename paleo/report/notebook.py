"""The tables of the terminal as HTML, for notebooks."""

from __future__ import annotations

import io
from html import escape

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from paleo.report.columns import PLAIN_WIDTH

#: Characters of a cell that stay on one line.
LONGEST_LINE = 60


def html(output: RenderableType) -> str:
    """Return what a command prints as HTML, in the colours of the notebook.

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
    >>> html("a < b")
    '<p style="white-space:pre-line;margin:.4em 0;max-width:70em">a &lt; b</p>'
    """
    if isinstance(output, Group):
        return "\n".join(filter(None, (html(part) for part in output.renderables)))
    if isinstance(output, Constrain):
        return html(output.renderable)
    if isinstance(output, Table):
        return _table(output)
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


def _table(table: Table) -> str:
    sides = [str(column.justify) for column in table.columns]
    heads = "".join(_cell("th", side, _plain(column.header)) for side, column in zip(sides, table.columns, strict=True))
    rows = zip(*([_plain(cell) for cell in column.cells] for column in table.columns), strict=True)
    body = "".join(f"<tr>{''.join(map(_cell, ['td'] * len(row), sides, row))}</tr>" for row in rows)
    title = (
        f'<caption style="text-align:left;font-weight:bold;padding-top:.6em">{escape(_plain(table.title))}</caption>'
        if table.title
        else ""
    )
    head = f"<thead><tr>{heads}</tr></thead>" if table.show_header else ""
    return f"<table>{title}{head}<tbody>{body}</tbody></table>"


def _cell(tag: str, side: str, text: str) -> str:
    wrap = "normal" if len(text) > LONGEST_LINE else "nowrap"
    return f'<{tag} style="text-align:{side};white-space:{wrap};padding:.15em .7em">{escape(text)}</{tag}>'


def _plain(output: RenderableType) -> str:
    """Return a text without its style."""
    if isinstance(output, str):
        return output
    if isinstance(output, Text):
        return output.plain
    # in a notebook, a console displays whatever it prints unless told otherwise
    console = Console(
        file=io.StringIO(), width=PLAIN_WIDTH, highlight=False, markup=False, emoji=False, force_jupyter=False
    )
    with console.capture() as captured:
        console.print(output)
    return captured.get().rstrip("\n")
