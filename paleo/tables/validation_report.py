"""Reports of ``paleo validate``: a JSON document, terminal tables, and plots of predicted against measured values."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from paleo.files import escape_csv_cell, write_atomically
from paleo.tables.base import (
    MAX_PLAUSIBLE_SCALING_EFFICIENCY,
    SCALING_EFFICIENCY_ERROR_GOAL,
    ResidualErrors,
    ScalingEfficiencyErrors,
    summarise_scaling_efficiencies,
)
from paleo.tables.cells import text_column
from paleo.tables.validation import ErrorSummary, FileReport, with_predictions
from paleo.units import format_duration, format_gibibytes, format_quantity, with_noun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console, RenderableType


#: Colours that people with any colour vision tell apart (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#F0E442", "#000000")
#: How what is predicted is written, with its unit, by the kind of table; others hold seconds.
_VALUE_FORMATS: dict[str, Callable[[float], str]] = {
    "memory": format_gibibytes,
    "power": lambda value: format_quantity(value, "W"),
    "goodput": lambda value: f"{value:.1%}",
    "staleness_accuracy": lambda value: f"{value:.1%}",
    "learning": lambda value: f"{value:.3f} nats",
    "convergence": lambda value: format_quantity(value, "samples"),
    "rails": lambda value: format_quantity(value, "B/s"),
    "storage": lambda value: format_quantity(value, "samples/s"),
    "compression": lambda value: f"{value:.4g}",  # seconds, FLOP/s or a ratio
}
#: Most points of a plot for each device: more only cost time and ink.
_MAX_PLOT_POINTS = 4000


def json_document(reports: Sequence[FileReport]) -> dict[str, Any]:
    """Build the JSON document that ``paleo validate --json`` prints: errors of predictions against measured tables.

    Parameters
    ----------
    reports : sequence of FileReport
        Validated files.

    Returns
    -------
    dict of str to Any
        Key ``files``: for each file the errors overall, by device and by source, and the rows with the largest errors.
    """
    return {"files": [_file(report) for report in reports]}


def _file(report: FileReport) -> dict[str, Any]:
    predicted = int(report.predicted_row_mask.sum())
    points = report.scaling_efficiencies
    return {
        "file": report.file,
        "kind": report.table.name,
        "rows": len(report.frame),
        "predicted": predicted,
        "unsupported": len(report.frame) - predicted,
        "unsupported_reasons": report.unsupported_reasons,
        "not_read": report.ignored_columns,
        "overall": dataclasses.asdict(report.errors()) if predicted else None,
        "by_device": _as_dicts(report.errors_by_group(report.predictions.device_names)),
        "by_source": _as_dicts(report.errors_by_group(report.row_sources)),
        "worst": [dataclasses.asdict(errors) for errors in report.worst_rows()],
        **({"scaling": dataclasses.asdict(summarise_scaling_efficiencies(points))} if points else {}),
        **_parts(report),
    }


def _parts(report: FileReport) -> dict[str, Any]:
    """Summarise errors by benchmark, and errors of further quantities that rows measure; {} if the table has none.

    Further quantities are those of `MeasuredTable.secondary_quantities`, such as evaluation time beside time to target.
    """
    parts = report.secondary_quantity_errors
    if not parts:
        return {}
    benchmarks = report.errors_by_group(text_column(report.frame, "benchmark").to_numpy())
    return {"by_benchmark": _as_dicts(benchmarks), "parts": _as_dicts(parts)}


def _as_dicts(errors: Mapping[str, ErrorSummary] | Mapping[str, ResidualErrors]) -> dict[str, dict[str, Any]]:
    return {name: dataclasses.asdict(each) for name, each in errors.items()}


def report_console(*, markup: bool = True) -> Console:
    """Create the rich console that prints report tables, as wide as the terminal, or 120 columns without a terminal.

    Parameters
    ----------
    markup : bool, optional
        Whether texts in square brackets are read as styles.

    Returns
    -------
    Console
        The console.
    """
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=markup)


def validation_renderables(report: FileReport, *, worst: int = 5) -> list[RenderableType]:
    """Build the terminal report of one validated table: errors by device and source, rows left out, and the worst rows.

    Parameters
    ----------
    report : FileReport
        The validated file.
    worst : int, optional
        Number of rows with the largest errors to print.

    Returns
    -------
    list of RenderableType
        Tables and texts for the console.
    """
    from rich.text import Text

    blocks: list[RenderableType] = [_errors_table(report)]
    left_out = report.unsupported_reasons
    if left_out:
        lines = [f"  {with_noun(count, 'row')}: {reason}" for reason, count in list(left_out.items())[:8]]
        if len(left_out) > 8:
            lines.append(f"  … and {len(left_out) - 8} more reasons (--json has all)")
        blocks.append(Text("\n".join([f"not predicted: {with_noun(sum(left_out.values()), 'row')}", *lines])))
    if ignored := report.ignored_columns:
        blocks.append(Text(f"not read: {', '.join(ignored)}"))
    points = report.scaling_efficiencies
    if points:
        blocks.append(Text(_scaling_line(summarise_scaling_efficiencies(points))))
    for name, errors in report.secondary_quantity_errors.items():
        shares = f"MAPE {errors.mape:.1%}, bias {errors.bias:+.1%}"
        blocks.append(Text(f"  {name}: {with_noun(errors.rows, 'row')}, {shares}"))
    if suspect := _suspect_unit(report):
        blocks.append(Text(suspect))
    if worst and report.predicted_row_mask.any():
        from rich.table import Table

        table = Table(title="worst rows (row 0 is the first below the header)", title_justify="left", show_lines=False)
        for heading in ("row", "on", "measured", "predicted"):
            table.add_column(heading, justify="right" if heading != "on" else "left")
        table.add_column("what, and why", overflow="fold")
        for miss in report.worst_rows(worst):
            measured, predicted = (_amount(report, value) for value in (miss.measured, miss.predicted))
            table.add_row(str(miss.row), miss.subject, measured, predicted, f"{miss.what}\n  {miss.reason}")
        blocks.append(table)
    return blocks


#: Predictions this many times too large or too small in the median speak for another unit.
_SUSPECT_UNIT_RATIO = 100.0


def _suspect_unit(report: FileReport) -> str:
    """Return a warning if the median prediction is 100 times above or below the measurements, as after a wrong unit.

    Returns '' otherwise.
    """
    ratios = report.predictions.values[report.predicted_row_mask] / report.measured[report.predicted_row_mask]
    ratio = float(np.median(ratios)) if len(ratios) else 1.0
    if 1.0 / _SUSPECT_UNIT_RATIO < ratio < _SUSPECT_UNIT_RATIO:
        return ""
    return f"predicted are {ratio:,.3g} times what was measured: is {report.table.measured_column} in its unit?"


def _scaling_line(errors: ScalingEfficiencyErrors) -> str:
    """Format the errors of scaling efficiencies as one line of the report."""
    wrong = f"{errors.impossible} more contradict each other (efficiency above {MAX_PLAUSIBLE_SCALING_EFFICIENCY})"
    left = f"; {wrong}" if errors.impossible else ""
    if errors.mean_error is None or errors.bias is None or errors.worst is None or errors.within_goal is None:
        return f"scaling: no points{left}"
    sizes = f"{errors.mean_error:.1f} points of 100 off on average (bias {errors.bias:+.1f}, worst {errors.worst:.1f})"
    within = f"{errors.within_goal:.0%} within {SCALING_EFFICIENCY_ERROR_GOAL:g}"
    return f"scaling: efficiency on several devices, {errors.points} times: {sizes}, {within}{left}"


def _errors_table(report: FileReport) -> RenderableType:
    from rich.table import Table

    rows = f"{int(report.predicted_row_mask.sum())} of {len(report.frame)} rows"
    title = f"{Path(report.file).name}: {report.table.name}, {rows}"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("of", overflow="fold")
    for heading in ("rows", "median", "MAPE", "p90", "bias", "total", "in 90 %", "roofline MAPE"):
        table.add_column(heading, justify="right")
    table.add_row("all", *_cells(report.errors()), style="bold", end_section=True)
    for words in (report.predictions.device_names, report.row_sources):
        part = report.errors_by_group(words)
        for index, (name, errors) in enumerate(part.items()):
            table.add_row(name or "(not stated)", *_cells(errors), end_section=index == len(part) - 1)
    table.caption = (
        "errors of each row, but 'total': sum of all predicted over sum of all measured; "
        "roofline: best constant efficiency of each device"
    )
    table.caption_justify = "left"
    return table


def _cells(errors: ErrorSummary) -> list[str]:
    signed = [errors.bias, errors.total_error]
    return [
        str(errors.rows),
        *(_percent(value) for value in (errors.median_ape, errors.mape, errors.p90_ape)),
        *("-" if value is None else f"{value:+.1%}" for value in signed),
        *(_percent(value) for value in (errors.coverage, errors.baseline_mape)),
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _amount(report: FileReport, value: float) -> str:
    return _VALUE_FORMATS.get(report.table.name, format_duration)(value)


def prediction_plot(reports: Sequence[FileReport]) -> Figure:
    """Plot predicted against measured values: one panel per file, one colour per device, lines at ratios 1/2, 1 and 2.

    Parameters
    ----------
    reports : sequence of FileReport
        Validated files.

    Returns
    -------
    Figure
        The plot.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(reports))
    rows = -(-len(reports) // columns)
    drawn = Figure(figsize=(5.2 * columns, 4.9 * rows), layout="constrained")
    FigureCanvasAgg(drawn)
    with rc_context({"text.parse_math": False}):  # names of devices and files may hold a dollar
        for index, report in enumerate(reports):
            _panel(drawn.add_subplot(rows, columns, index + 1), report)
    return drawn


def _panel(axes: Axes, report: FileReport) -> None:
    generator = np.random.default_rng(0)
    names = sorted({str(errors) for errors in report.predictions.device_names[report.predicted_row_mask]})
    for index, name in enumerate(names):
        rows = np.flatnonzero(report.predicted_row_mask & (report.predictions.device_names == name))
        rows = rows[np.sort(generator.permutation(len(rows))[:_MAX_PLOT_POINTS])]
        colour, size = COLOURS[index % len(COLOURS)], 3 if len(rows) > 1000 else 5
        axes.plot(
            report.measured[rows], report.predictions.values[rows], ".", color=colour, markersize=size, alpha=0.4,
            markeredgewidth=0, rasterized=True, label=name,
        )  # fmt: skip
    _draw_axes(axes, report)
    errors = report.errors()
    axes.set_title(f"{Path(report.file).name}: MAPE {_percent(errors.mape)}, roofline {_percent(errors.baseline_mape)}")
    axes.set_xlabel("measured")
    axes.set_ylabel("predicted")
    if names:
        legend = axes.legend(markerscale=4, fontsize=7, loc="upper left", frameon=False, ncols=1 + len(names) // 12)
        for handle in legend.legend_handles:
            if handle is not None:
                handle.set_alpha(1.0)


def _draw_axes(axes: Axes, report: FileReport) -> None:
    """Draw equal logarithmic axes, and lines where predicted is the measured value, twice that value, and half."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    mask = report.predicted_row_mask
    if not mask.any():
        return
    seconds = np.concatenate([report.measured[mask], report.predictions.values[mask]])
    low, high = float(seconds.min()) / 1.5, float(seconds.max()) * 1.5
    for factor, style, label in ((1.0, "-", None), (2.0, ":", "twice, half"), (0.5, ":", None)):
        axes.plot([low, high], [low * factor, high * factor], style, color="0.4", linewidth=0.8, zorder=0, label=label)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    several_decades = high / low > 100
    for axis in (axes.xaxis, axes.yaxis):  # both axes have the same ticks, in words
        axis.set_major_locator(LogLocator(subs=(1.0,) if several_decades else (1.0, 2.0, 5.0), numticks=9))
        if report.table.name == "memory":
            axis.set_major_locator(LogLocator(base=2.0, numticks=9))
        axis.set_major_formatter(FuncFormatter(lambda value, _: _amount(report, value)))
        axis.set_minor_formatter(NullFormatter())
    axes.grid(visible=True, which="major", linewidth=0.3)


def write_predictions(path: Path, reports: Sequence[FileReport]) -> None:
    """Write the rows of validated files with their predictions to one CSV file; equal rows always give equal bytes.

    Parameters
    ----------
    path : Path
        The file; a name that ends in .gz is compressed.
    reports : sequence of FileReport
        Validated files.
    """
    zipped = {"method": "gzip", "mtime": 0} if path.suffix == ".gz" else None
    table = _escape_formulas(with_predictions(reports))
    write_atomically(path, lambda file: table.to_csv(file, index=False, compression=zipped))


def _escape_formulas(rows: pd.DataFrame) -> pd.DataFrame:
    """Escape text cells and headers that a spreadsheet would run as formulas (CSV injection).

    Parameters
    ----------
    rows : DataFrame
        A table.

    Returns
    -------
    DataFrame
        A copy with escaped text.
    """
    words = [name for name in rows.columns if not pd.api.types.is_numeric_dtype(rows[name])]
    texts = {name: rows[name].map(escape_csv_cell) for name in words}
    return rows.assign(**texts).rename(columns=escape_csv_cell)
