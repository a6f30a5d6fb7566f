"""Charts of the HTML report as SVG: drawn by matplotlib for a narrow column, in the colours of the page.

Text stays text and takes the font of the page; black becomes the colour of its text, so that charts follow the dark
theme.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from paleo.report.plots import BLACK, BLUE, COLOUR_CYCLE, PLOT_STYLE, VERMILION
from paleo.units import KILO, format_quantity

#: Width of every chart in points, room for numbers at its right end, and height of a row.
CHART_WIDTH_POINTS, RIGHT_MARGIN_POINTS, _ROW_HEIGHT_POINTS = 380.0, 92.0, 40.0
#: Fraction from which a cell of a heat map is so dark that its number is white.
_DARK_CELL_THRESHOLD = 0.55
#: Least distance of two ticks of a logarithmic axis, as a ratio.
_MIN_TICK_RATIO = 1.25
_LINE = "#d9dce1"
#: Colours of matplotlib -> those of the page.
_PAGE = {"#000000": "currentColor", BLUE.lower(): "var(--bar)", _LINE: "var(--line)"}
_STYLE = {**PLOT_STYLE, "font.size": 11, "grid.color": _LINE, "svg.fonttype": "none", "legend.fontsize": 11}


@dataclass(frozen=True, slots=True)
class Chart:
    """Chart as an SVG element, with pairs of name and colour for a legend."""

    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its value, the ends of its interval (or None), and the value as text."""

    name: str
    value: float
    low: float | None
    high: float | None
    text: str
    colour: str


@dataclass(frozen=True, slots=True)
class Curve:
    """One line of a chart: points (x, y, low end, high end), x rising."""

    name: str
    points: Sequence[tuple[float, float, float, float]]
    colour: str


def figure_to_svg(figure: Figure, title: str) -> Markup:
    """Return a figure as an SVG element for a page.

    Parameters
    ----------
    figure : Figure
        Figure of matplotlib, whose colours and fonts are replaced by those of the page.
    title : str
        Text alternative of the chart, for screen readers.

    Returns
    -------
    Markup
        The SVG element, safe to insert into HTML.
    """
    file = io.StringIO()
    ticks = (word for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for word in axis.get_ticklabels())
    for word in (*ticks, *figure.findobj(lambda artist: isinstance(artist, Text))):
        word.set(parse_math=False)  # names may hold dollar signs
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    text = re.sub(r"font: [^;\"]*?([\d.]+px)[^;\"]*|font-family:[^;\"]*;?", _font, text)
    for colour, name in _PAGE.items():
        text = text.replace(colour, name)
    label = Markup('<svg viewBox="0 0 {:g} {:g}" role="img" aria-label="{}">').format(
        *(72.0 * inches for inches in figure.get_size_inches()), title
    )
    return label + Markup(re.sub(r"\n\s*", "\n", text[text.index(">") + 1 :].strip()))


def _font(match: re.Match[str]) -> str:
    return f"font-size: {match[1]}" if match[1] else ""


def _bar_axes(count: int, right: float = RIGHT_MARGIN_POINTS) -> tuple[Figure, Axes]:
    """Return a figure and axes with a row for each bar, the first on top, from zero, without ticks."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(CHART_WIDTH_POINTS / 72.0, max(count, 1) * _ROW_HEIGHT_POINTS / 72.0))
        axes = figure.add_axes((0.0, 0.0, (CHART_WIDTH_POINTS - right) / CHART_WIDTH_POINTS, 1.0))
    axes.set_axis_off()
    axes.set_ylim(count - 0.4, -0.6)
    return figure, axes


def _label(axes: Axes, text: str, spot: tuple[float, float], right: float, up: float = 0.0, **look: Any) -> None:
    axes.annotate(
        text, spot, (right, up), textcoords="offset points", annotation_clip=False, va="center", size=11, **look
    )


def bar_chart(rows: Sequence[Bar], title: str) -> Chart:
    """Draw horizontal bars from zero with their intervals.

    Parameters
    ----------
    rows : sequence of Bar
        From top to bottom.
    title : str
        Text alternative of the chart, for screen readers.

    Returns
    -------
    Chart
        The chart.
    """
    figure, axes = _bar_axes(len(rows))
    for y, row in enumerate(rows):
        axes.barh(y, row.value, 0.36, color=row.colour)
        if row.low is not None and row.high is not None:
            reach = [[max(row.value - row.low, 0.0)], [max(row.high - row.value, 0.0)]]
            axes.errorbar(row.value, y, xerr=reach, color=BLACK, capsize=3, linewidth=1)
        _label(axes, row.name, (0.0, y), 0, 14)
        _label(axes, row.text, (max(row.value, row.high or 0.0), y), 6, weight="bold")
    axes.set_xlim(0.0, max((row.high or row.value for row in rows), default=0.0) or 1.0)
    return Chart(figure_to_svg(figure, title))


def stacked_bar_chart(
    rows: Sequence[tuple[str, Mapping[str, float], str]], title: str, limits: Sequence[float] = ()
) -> Chart:
    """Draw horizontal stacks of named parts on one scale.

    Parameters
    ----------
    rows : sequence of (name, parts, text)
        From top to bottom; the text is printed at the end of the stack.
    title : str
        Text alternative of the chart, for screen readers.
    limits : sequence of float
        Position of a dashed line in each row, such as the capacity of a memory.

    Returns
    -------
    Chart
        The chart.
    """
    names = dict.fromkeys(name for _, parts, _ in rows for name, value in parts.items() if value > 0)
    colours = dict(zip(names, COLOUR_CYCLE * 3, strict=False))
    longest = max((*(sum(parts.values()) for _, parts, _ in rows), *limits), default=0.0) or 1.0
    figure, axes = _bar_axes(len(rows))
    axes.set_xlim(0.0, longest)
    for y, (label, parts, text) in enumerate(rows):
        end = 0.0
        for name, value in parts.items():
            if value > 0:
                axes.barh(y, value, 0.36, left=end, color=colours[name])
                end += value
        if limits:
            axes.plot([limits[y]] * 2, [y - 0.25, y + 0.25], "--", color=BLACK, linewidth=1, clip_on=False)
            room = (limits[y] - end) / longest * (CHART_WIDTH_POINTS - RIGHT_MARGIN_POINTS)
            if room <= RIGHT_MARGIN_POINTS:  # the text would stand in the way of the limit
                end = max(end, limits[y])
        _label(axes, label, (0.0, y), 0, 14)
        _label(axes, text, (end, y), 6, weight="bold")
    return Chart(figure_to_svg(figure, title), tuple(colours.items()))


def deviation_bar_chart(rows: Sequence[tuple[str, float, float]], title: str) -> Chart:
    """Draw how a change makes a quantity smaller or larger, as bars on both sides of the factor 1.

    Parameters
    ----------
    rows : sequence of (name, factor with less, factor with more)
        From top to bottom.
    title : str
        Text alternative of the chart, for screen readers.

    Returns
    -------
    Chart
        The chart.
    """
    reach = max((abs(value - 1) for _, *pair in rows for value in pair), default=0.0)
    reach = 1.3 * max(reach, 0.05)
    figure, axes = _bar_axes(len(rows), right=0.0)
    axes.set_xlim(-reach, reach)
    axes.axvline(0.0, color=BLACK, linewidth=1)
    for y, (name, *pair) in enumerate(rows):
        axes.annotate(name, (0.0, y), (0, 14), xycoords=("axes fraction", "data"), textcoords="offset points", size=11)
        changes = [(value - 1.0, colour) for value, colour in zip(pair, (VERMILION, BLUE), strict=True)]
        changes = [(change, colour) for change, colour in changes if abs(change) >= 0.0005]
        if not changes:
            _label(axes, "no change", (0.0, y), 5)
        for change, colour in changes:
            axes.barh(y, change, 0.36, color=colour)
            side = 1 if change > 0 else -1
            text = f"{100 * change:+.1f} %"
            _label(axes, text, (change, y), 4 * side, weight="bold", ha="left" if side > 0 else "right")
    return Chart(figure_to_svg(figure, title))


def curve_chart(lines: Sequence[Curve], *, title: str, x_label: str, y_label: str) -> Chart:
    """Draw lines with interval bands on logarithmic axes, and proportional scaling from their first points, dotted.

    Parameters
    ----------
    lines : sequence of Curve
        Lines of the chart.
    title : str
        Text alternative of the chart, for screen readers.
    x_label, y_label : str
        Titles of the axes.

    Returns
    -------
    Chart
        The chart.
    """
    points = [point for line in lines for point in line.points]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(CHART_WIDTH_POINTS / 72.0, 300.0 / 72.0), layout="constrained")
        axes = figure.subplots()
    for line in lines:
        if line.points:
            x, y, low, high = zip(*line.points, strict=True)
            axes.fill_between(x, low, high, color=line.colour, alpha=0.13, linewidth=0)
            axes.plot([x[0], x[-1]], [y[0], y[0] * x[-1] / x[0]], ":", color=line.colour, linewidth=1)
            axes.plot(x, y, "o-", color=line.colour, linewidth=2, markersize=5)
    axes.set(xscale="log", yscale="log", xlabel=x_label, ylim=(min(p[2] for p in points), max(p[3] for p in points)))
    axes.set_title(y_label, loc="left", size=11)
    axes.xaxis.set_major_locator(FixedLocator(_separate_ticks(sorted({point[0] for point in points}))))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: _short(value)))
        axis.set_minor_locator(NullLocator())
    axes.grid(axis="x", visible=False)
    return Chart(figure_to_svg(figure, title), tuple((line.name, line.colour) for line in lines))


def heat_map(
    shares: Sequence[Sequence[float]], *, columns: Sequence[str], rows: Sequence[str], framed: tuple[int, int],
    title: str, x_label: str, y_label: str,
) -> Chart:  # fmt: skip
    """Draw fractions as cells with their percentages, darker where they are higher.

    Parameters
    ----------
    shares : sequence of sequence of float, shape (rows, columns)
        Fractions, 0 to 1.
    columns, rows : sequence of str
        Names of ticks.
    framed : (int, int)
        Row and column of the framed cell.
    title : str
        Text alternative of the chart, for screen readers.
    x_label, y_label : str
        Titles of the axes.

    Returns
    -------
    Chart
        The chart.
    """
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(CHART_WIDTH_POINTS / 72.0, (24.0 * len(rows) + 90.0) / 72.0), layout="constrained")
        axes = figure.subplots()
    for row, line in enumerate(shares):
        for column, share in enumerate(line):
            frame: dict[str, Any] = {"edgecolor": BLACK, "linewidth": 2, "zorder": 2} if (row, column) == framed else {}
            cell = Rectangle((column - 0.48, row - 0.48), 0.96, 0.96, facecolor=(BLUE, max(share, 0.03)), **frame)
            axes.add_patch(cell)
            colour = "white" if share > _DARK_CELL_THRESHOLD else BLACK
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", color=colour, zorder=3)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel=x_label)
    axes.set_title(y_label, loc="left", size=11)
    axes.set_xticks(range(len(columns)), columns, rotation=45)
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return Chart(figure_to_svg(figure, title))


def _separate_ticks(values: Iterable[float]) -> list[float]:
    """Return those of rising values that can be ticks of a logarithmic axis without overlap."""
    chosen: list[float] = []
    for value in values:
        if not chosen or value >= _MIN_TICK_RATIO * chosen[-1]:
            chosen.append(value)
    return chosen


def _short(value: float) -> str:
    """Return a number as short text for an axis.

    >>> _short(2048.0), _short(50000.0), _short(0.5)
    ('2048', '50k', '0.5')
    """
    if value >= 10 * KILO:
        return format_quantity(value, "").replace(" ", "")
    return f"{value:g}" if value >= 100 else f"{value:.3g}"
