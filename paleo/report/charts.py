"""Charts as SVG text for pages that load nothing: bars with intervals, stacks, log-log curves, and what-ifs.

They are drawn for a narrow column, so that the letters stay readable on a telephone, in the colours of Okabe and Ito
(2008).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from paleo.units import KILO, engineering

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000", "#999999", "#F0E442")
#: Width of every drawing in its own units, and of the room for numbers at the right end.
WIDTH, RIGHT = 380, 92
_ROW, _BAR = 40, 14


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its value, the ends of its interval (or None), and the number as text."""

    name: str
    value: float
    low: float | None
    high: float | None
    text: str
    colour: str


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (x, y, low, high) of one line, x rising; ``linear`` ones have a dotted line in proportion to x from their
    first point."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    colour: str
    linear: bool = True


@dataclass(frozen=True, slots=True)
class Mark:
    """A dashed line up from a place on the horizontal axis, and what it says."""

    x: float
    words: str
    colour: str


def bars(rows: Sequence[Bar], title: str) -> str:
    """Horizontal bars from zero, each with its interval as a whisker."""
    longest = max((row.high or row.value for row in rows), default=0.0) or 1.0
    scale = (WIDTH - RIGHT) / longest
    parts = []
    for index, row in enumerate(rows):
        y = index * _ROW
        parts.append(_text(0, y + 12, row.name))
        parts.append(_rect(0, y + 17, row.value * scale, _BAR, row.colour))
        if row.low is not None and row.high is not None:
            parts.append(_whisker(row.low * scale, row.high * scale, y + 17 + _BAR / 2))
        end = max(row.value, row.high or 0.0) * scale
        parts.append(_text(min(end + 6, WIDTH - RIGHT + 4), y + 28, row.text, "b"))
    return _svg(parts, len(rows) * _ROW, title)


def stacks(rows: Sequence[tuple[str, Mapping[str, float], str]], title: str, limits: Sequence[float] = ()) -> str:
    """Horizontal stacks of named parts on one scale, with a number at the end of each, and a limit as a dashed line."""
    names = list(dict.fromkeys(name for _, parts, _ in rows for name, value in parts.items() if value > 0))
    colours = dict(zip(names, COLOURS * 3, strict=False))
    longest = max((*(sum(parts.values()) for _, parts, _ in rows), *limits), default=0.0) or 1.0
    scale, drawn = (WIDTH - RIGHT) / longest, []
    for index, (label, parts, text) in enumerate(rows):
        y, left = index * _ROW, 0.0
        drawn.append(_text(0, y + 12, label))
        for name, value in parts.items():
            if value > 0:
                drawn.append(_rect(left, y + 17, value * scale, _BAR, colours[name], f"{label}: {name}"))
                left += value * scale
        limit = limits[index] * scale if limits else 0.0
        if limits:
            drawn.append(f'<path d="M{limit:.1f} {y + 14}v{_BAR + 6}" class="limit"/>')
        end = (
            left if limit - left > RIGHT else max(left, limit)
        )  # beside its bar, wherever it has room before the limit
        drawn.append(_text(min(end + 6, WIDTH - RIGHT + 4), y + 28, text, "b"))
    return _svg(drawn, len(rows) * _ROW, title) + legend((name, colours[name]) for name in names)


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Names beside their colours."""
    items = (f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def deviations(rows: Sequence[tuple[str, float, float]], title: str) -> str:
    """What-ifs: (name, factor with less, factor with more) as bars to the left and right of 1."""
    reach = max((abs(value - 1) for _, *pair in rows for value in pair), default=0.0)
    reach = max(reach, 0.05)
    middle, scale = WIDTH / 2, (WIDTH / 2 - 46) / reach
    parts = [f'<path d="M{middle} 0V{len(rows) * _ROW}" class="axis"/>']
    for index, (name, lower, higher) in enumerate(rows):
        y = index * _ROW
        parts.append(_text(0, y + 12, name))
        if max(abs(lower - 1), abs(higher - 1)) < 0.0005:
            parts.append(_text(middle + 5, y + 28, "no change"))
            continue
        placed = [(lower, COLOURS[1]), (higher, COLOURS[0])]
        for value, colour in placed:
            width = (value - 1) * scale
            parts.append(_rect(middle + min(width, 0), y + 17, abs(width), _BAR, colour))
            if abs(value - 1) >= 0.0005:
                anchor, x = ("start", middle + width + 4) if width > 0 else ("end", middle + width - 4)
                parts.append(_text(x, y + 28, f"{100 * (value - 1):+.1f} %", "b", anchor))
    return _svg(parts, len(rows) * _ROW, title)


def curves(lines: Sequence[Curve], *, title: str, x_label: str, y_label: str, marks: Sequence[Mark] = ()) -> str:
    """Lines with interval bands on logarithmic axes, and marked places within them."""
    height, left, bottom, top = 300, 52, 36, 18
    points = [point for line in lines for point in line.points]
    if not points:
        return ""
    x_ends = min(p[0] for p in points), max(p[0] for p in points)
    y_ends = min(p[2] for p in points), max(p[3] for p in points)
    x = AxisScale(*x_ends, left, WIDTH - 14)
    y = AxisScale(*y_ends, height - bottom, top)
    parts = [f'<path d="M{left} {top}V{height - bottom}H{WIDTH - 14}" class="axis"/>']
    parts += [_tick(x(value), height - bottom, _short(value)) for value in _spread(sorted({p[0] for p in points}), x)]
    visible = [mark for mark in marks if x_ends[0] <= mark.x <= x_ends[1]]
    parts += [_marked(mark, x(mark.x), top, height - bottom, row) for row, mark in enumerate(visible)]
    for value in _decades(*y_ends):
        parts.append(f'<path d="M{left} {y(value):.1f}H{WIDTH - 14}" class="grid"/>')
        parts.append(_text(left - 5, y(value) + 4, _short(value), "", "end"))
    for line in lines:
        parts += _line(line, x, y, y_ends[1])
    parts.append(_text((left + WIDTH) / 2, height - 4, x_label, "", "middle"))
    parts.append(_text(0, 11, y_label))
    return _svg(parts, height, title) + legend((line.name, line.colour) for line in lines)


def _line(line: Curve, x: AxisScale, y: AxisScale, most: float) -> list[str]:
    if not line.points:
        return []
    low = [f"{x(p[0]):.1f},{y(p[2]):.1f}" for p in line.points]
    high = [f"{x(p[0]):.1f},{y(p[3]):.1f}" for p in reversed(line.points)]
    middle = " ".join(f"{x(p[0]):.1f},{y(p[1]):.1f}" for p in line.points)
    first, last = line.points[0], line.points[-1]
    end = min(last[0] / first[0], most / first[1])
    ideal = f"M{x(first[0]):.1f} {y(first[1]):.1f}L{x(first[0] * end):.1f} {y(first[1] * end):.1f}"
    return [
        f'<polygon points="{" ".join(low + high)}" fill="{line.colour}" opacity="0.13"/>',
        *([f'<path d="{ideal}" stroke="{line.colour}" class="ideal"/>'] if line.linear else []),
        f'<polyline points="{middle}" stroke="{line.colour}" class="line"/>',
        *(f'<circle cx="{x(p[0]):.1f}" cy="{y(p[1]):.1f}" r="3" fill="{line.colour}"/>' for p in line.points),
    ]


def _marked(mark: Mark, x: float, top: float, bottom: float, row: int) -> str:
    """A marked place; the words of several stand below one another, on the side with more room."""
    side, anchor = (4, "start") if x + LETTER * len(mark.words) < WIDTH else (-4, "end")
    line = f'<path d="M{x:.1f} {top}V{bottom}" stroke="{mark.colour}" class="mark"/>'
    return line + _text(x + side, top + 12 + 14 * row, mark.words, "b", anchor)


#: Width of a letter of a mark, and the least distance of two numbers on the horizontal axis.
LETTER, APART = 6.5, 26.0


def _spread(values: Sequence[float], scale: AxisScale) -> list[float]:
    """Those of rising values whose numbers do not overlap on an axis."""
    kept: list[float] = []
    for value in values:
        if not kept or scale(value) - scale(kept[-1]) >= APART:
            kept.append(value)
    return kept


def heat_map(
    shares: Sequence[Sequence[float]], *, columns: Sequence[str], rows: Sequence[str], marked: tuple[int, int],
    colour: str, title: str, x_label: str, y_label: str,
) -> str:  # fmt: skip
    """Shares from 0 to 1 as cells with their per cent, darker where they are higher; ``marked``: row and column of the
    cell that is framed."""
    left, top, height = 66, 18, 24
    width = (WIDTH - left) / len(columns)
    parts = [_text(0, 11, y_label)]
    for row, (name, line) in enumerate(zip(rows, shares, strict=True)):
        y = top + row * height
        parts.append(_text(left - 5, y + 16, name, "", "end"))
        for column, share in enumerate(line):
            parts.append(_cell(left + column * width, y, width - 1, height - 1, share, colour, (row, column) == marked))
    bottom = top + len(rows) * height
    for column, name in enumerate(columns):
        lowered = 13 if column % 2 == 0 else 26
        parts.append(_text(left + (column + 0.5) * width, bottom + lowered, name, "", "middle"))
    parts.append(_text((left + WIDTH) / 2, bottom + 42, x_label, "", "middle"))
    return _svg(parts, bottom + 48, title)


def _cell(x: float, y: float, width: float, height: float, share: float, colour: str, framed: bool) -> str:
    frame = ' stroke="#000" stroke-width="2"' if framed else ""
    ink = ' style="fill:#fff"' if share > DARK else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}" '
        f'fill-opacity="{max(share, 0.03):.2f}"{frame}/><text x="{x + width / 2:.1f}" y="{y + 16:.1f}" '
        f'text-anchor="middle"{ink}>{100 * share:.0f}</text>'
    )


#: Share from which a cell is so dark that its number is written in white.
DARK = 0.55


class AxisScale:
    """A logarithmic axis: value -> place."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.span = math.log(low), math.log(high / low) or 1.0
        self.start, self.length = start, end - start

    def __call__(self, value: float) -> float:
        return self.start + self.length * (math.log(value) - self.low) / self.span


def _decades(low: float, high: float) -> list[float]:
    """Round numbers between two ends: powers of ten, or 1-2-5 steps where there are few."""
    first = math.floor(math.log10(low))
    whole = [10.0**power for power in range(first, math.ceil(math.log10(high)) + 1)]
    fine = [base * step for base in whole for step in (1, 2, 5)]
    inside = [value for value in whole if low <= value <= high]
    return inside if len(inside) >= 3 else [value for value in fine if low <= value <= high]


def _short(value: float) -> str:
    """A number for an axis.

    >>> _short(2048.0), _short(50000.0), _short(0.5)
    ('2048', '50k', '0.5')
    """
    if value >= 10 * KILO:
        return engineering(value, "").replace(" ", "")
    return f"{value:g}" if value >= 100 else f"{value:.3g}"


def _svg(parts: Sequence[str], height: float, title: str) -> str:
    inside = "".join(parts)
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}">{inside}</svg>'


def _text(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    look = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{look}>{escape(text)}</text>'


def _rect(x: float, y: float, width: float, height: float, colour: str, words: str = "") -> str:
    hint = f"<title>{escape(words)}</title>" if words else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.8):.1f}" height="{height}" fill="{colour}">{hint}</rect>'
    )


def _whisker(low: float, high: float, y: float) -> str:
    return f'<path d="M{low:.1f} {y - 4}v8M{low:.1f} {y}H{high:.1f}M{high:.1f} {y - 4}v8" class="whisker"/>'


def _tick(x: float, y: float, text: str) -> str:
    return f'<path d="M{x:.1f} {y}v4" class="axis"/>' + _text(x, y + 15, text, "", "middle")
