"""Plots of results, in colours that colour-blind readers can tell apart (Okabe and Ito, 2008)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from paleo.files import write_atomically
from paleo.report.columns import STEP_PART_NAMES
from paleo.step.timeline import COMPUTE_STREAM
from paleo.studies.gradient_exchange import BandwidthCurve, bandwidth_curve
from paleo.studies.network_summary import NetworkSummary, faster_than_roofline, layer_speeds
from paleo.units import GIBIBYTE, GIGA, KILO, MINUTE, format_duration, format_quantity, time_unit, with_noun

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.schedules.pipeline_simulation import TaskEvent
    from paleo.search.plans import FoundPlans
    from paleo.specs.run import Run
    from paleo.specs.system import System
    from paleo.studies.collective import CollectiveStudy
    from paleo.studies.purchase import SystemComparison
    from paleo.studies.scale import ScaleCurve, ScalePoint
    from paleo.studies.target import TargetScaling

BLACK, _ORANGE, _SKY, _GREEN, _YELLOW, BLUE, VERMILION, _PURPLE = (
    "#000000", "#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7",
)  # fmt: skip
GREY = "#999999"
COLOUR_CYCLE = (BLUE, VERMILION, _GREEN, _ORANGE, _PURPLE, _SKY, BLACK, _YELLOW, GREY)
MARKERS = "os^Dvph*X"

#: Part of a step -> its colour.
_PARTS = {
    "compute": BLUE, "memory_bound": _SKY, "launch": _YELLOW, "communication_exposed": VERMILION, "bubble": GREY,
    "optimizer": _GREEN, "input": _PURPLE, "stragglers": _ORANGE,
}  # fmt: skip
_MEMORY_COLOURS = (BLUE, _SKY, _GREEN, _ORANGE, _PURPLE, _YELLOW, GREY, VERMILION)
#: Kind of a task -> its name in a picture and its colour.
_KINDS = {
    "forward": ("forward", BLUE),
    "F": ("forward", BLUE),
    "backward": ("backward", _SKY),
    "B": ("backward", _SKY),
    "W": ("weight gradients", _GREEN),
    "accumulate": ("earlier microbatches", _PURPLE),
    "transfer": ("exposed collectives", VERMILION),
    "send": ("stage transfer", VERMILION),
    "gather": ("weight all-gather", _YELLOW),
    "bucket": ("gradient exchange", _ORANGE),
    "exchange": ("gradient exchange", _ORANGE),
    "update": ("optimizer", BLACK),
    "wait": ("waiting for stragglers", GREY),
}
PLOT_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "svg.hashsalt": "paleo",
    "text.parse_math": False,  # names are people's, and a dollar in one is a dollar
}


def save_figure(figure: Figure, path: Path) -> None:
    """Write a plot to a file in the format of its suffix; equal plots give equal bytes.

    Parameters
    ----------
    figure : Figure
        The plot.
    path : Path
        File with suffix .png, .svg or .pdf.
    """
    kind = path.suffix.lower().removeprefix(".") or "png"
    dated: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    with matplotlib.rc_context(PLOT_STYLE):
        write_atomically(path, lambda file: figure.savefig(file, format=kind, dpi=150, metadata=dated))


def figure_with_axes(
    width: float, height: float, columns: int = 1, *, rows: int = 1, **layout: Any
) -> tuple[Figure, list[Axes]]:
    """Create a figure with a grid of axes; the axes are returned row by row.

    Parameters
    ----------
    width : float
        Width [inch].
    height : float
        Height [inch].
    columns : int, optional
        Columns of axes.
    rows : int, optional
        Rows of axes.
    **layout : Any
        Arguments of matplotlib's ``subplots``.

    Returns
    -------
    tuple[Figure, list[Axes]]
        Figure and axes.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **layout)
    return figure, list(axes.flat)


def _parts_legend(figure: Figure, *axes: Axes) -> None:
    """Draw one legend for the parts of a step below all plots of a figure."""
    named = [pair for panel in axes for pair in zip(*panel.get_legend_handles_labels(), strict=True)]
    handles = {label: handle for handle, label in named}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))


#: Inches of the highest timeline, and the streams that can be named on it.
_HIGHEST, _NAMED = 10.0, 60


def plot_step_and_memory(prediction: Prediction) -> Figure:
    """Plot a predicted step as a timeline of its streams, and the memory of the fullest GPU by part.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.

    Returns
    -------
    Figure
        The plot.
    """
    events = prediction.timeline.events
    lines = min(max(2.6, 0.17 * len({event.task.resource for event in events})), _HIGHEST)  # inches
    with matplotlib.rc_context(PLOT_STYLE):
        figure, (line, memory) = figure_with_axes(9.0, lines + 2.0, rows=2, height_ratios=(lines, 1.3))
        machines = prediction.system.gpus_and_nodes_text(prediction.plan.gpus)
        figure.suptitle(f"{prediction.model.name} on {machines}: {prediction.plan.strategy_text or 'dp'}")
        _timeline(line, events)
        # Draw stacked parts up to the total, or up to the capacity where that is not far away.
        parts = {name: size / GIBIBYTE for name, size in prediction.memory.parts.items() if size > 0}
        left = 0.0
        for (name, size), colour in zip(parts.items(), _MEMORY_COLOURS, strict=False):
            memory.barh(0, size, left=left, color=colour, label=name, height=0.6)
            left += size
        capacity = prediction.memory.capacity / GIBIBYTE
        if capacity < 3 * left:
            memory.axvline(capacity, color=BLACK, linestyle="--", label="capacity")
            left = max(left, capacity)
        memory.set_xlim(0, 1.05 * left)
        memory.set_yticks([])
        memory.set_xlabel(f"memory of the fullest GPU [GiB]; capacity {capacity:.4g}")
        memory.legend(loc="upper center", bbox_to_anchor=(0.5, -0.45), ncols=len(parts) + 1)
    return figure


def _timeline(axes: Axes, events: Sequence[TaskEvent]) -> None:
    streams = sorted({event.task.resource for event in events}, key=_stream_sort_key)
    kinds = dict.fromkeys(event.task.kind for event in events if event.end > event.start)
    looks = {kind: _KINDS.get(kind, (kind, GREY)) for kind in kinds}
    unit_seconds, unit = time_unit(max((event.end for event in events), default=0.0))
    for row, stream in enumerate(streams):
        for kind, (_, colour) in looks.items():
            chosen = [event for event in events if event.task.resource == stream and event.task.kind == kind]
            spans = [(event.start / unit_seconds, (event.end - event.start) / unit_seconds) for event in chosen]
            axes.broken_barh(spans, (row - 0.4, 0.8), facecolor=colour, edgecolor="white", linewidth=0.2)
    every = math.ceil(len(streams) / _NAMED)
    axes.set_yticks(range(0, len(streams), every), streams[::every])
    axes.invert_yaxis()
    axes.set_xlabel(f"time in the step [{unit}]")
    axes.set_xlim(left=0)
    patches = [Patch(color=colour, label=label) for label, colour in dict.fromkeys(looks.values())]
    axes.legend(handles=patches, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=min(len(patches), 5))


def _stream_sort_key(stream: str) -> tuple[object, ...]:
    """Return a key that sorts computation first, then stages by their numbers.

    Examples
    --------
    >>> sorted(["stage10", "stage2 communication", "stage2", "compute"], key=_stream_sort_key)
    ['compute', 'stage2', 'stage2 communication', 'stage10']
    """
    return stream != COMPUTE_STREAM, *(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", stream))


def plot_scaling(model: str, system: str, curves: Sequence[ScaleCurve]) -> Figure:
    """Plot the speed-up of scaling curves against the ideal, and the parts of a step over the GPU count.

    Parameters
    ----------
    model : str
        Name of the model.
    system : str
        Name of the system.
    curves : sequence of ScaleCurve
        Scaling curves.

    Returns
    -------
    Figure
        The plot.
    """
    with matplotlib.rc_context(PLOT_STYLE):
        figure, (speedup, *stacks) = figure_with_axes(4.5 * (1 + len(curves)), 4.4, columns=1 + len(curves))
        figure.suptitle(f"{model} on {system}")
        for curve, colour, mark in zip(curves, COLOUR_CYCLE, MARKERS, strict=False):
            _speedup(speedup, curve, colour, mark)
        bases = {with_noun(curve.base_point.gpus, "GPU") for curve in curves}
        speedup.set_ylabel(f"speed-up over {bases.pop() if len(bases) == 1 else 'the first count that fits'}")
        labels = dict(zip(*speedup.get_legend_handles_labels()[::-1], strict=True))  # each once
        speedup.set_ylim(top=speedup.get_ylim()[1] * 1.5 ** len(labels))
        speedup.legend(labels.values(), labels.keys(), loc="upper left", fontsize=8)
        for axes, curve in zip(stacks, curves, strict=True):
            _stacked(axes, curve)
        _parts_legend(figure, *stacks)
    return figure


def _speedup(axes: Axes, curve: ScaleCurve, colour: str, mark: str) -> None:
    points = curve.usable_points
    gpus = [point.gpus for point in points]
    if not axes.lines:
        axes.plot(gpus, [count / curve.base_point.gpus for count in gpus], "--", color=GREY, label="ideal")
    axes.plot(gpus, [curve.speedup(point) for point in points], color=colour, label=curve.label)
    # The low and the high end of each step's 90 % interval, with the base as predicted.
    slow, fast = ([_speedup_at_end(curve, point, end) for point in points] for end in (1, 0))
    interval = "90 % interval of each step"
    axes.fill_between(gpus, slow, fast, color=colour, alpha=0.15, linewidth=0, label=interval)
    for fits, face in ((True, colour), (False, "white")):
        chosen = [point for point in points if point.fits == fits]
        style: dict[str, Any] = {"color": colour, "markerfacecolor": face, "linestyle": "none", "marker": mark}
        label = None if fits else "does not fit"
        if chosen:
            gains = [curve.speedup(point) for point in chosen]
            axes.plot([point.gpus for point in chosen], gains, label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("GPUs")


def _speedup_at_end(curve: ScaleCurve, point: ScalePoint, end: int) -> float:
    step = point.required_prediction
    return curve.speedup(point) * step.step_time / step.interval[end]


#: GPU counts below a stack of bars that are written level.
_MAX_HORIZONTAL_LABELS = 6


def _stacked(axes: Axes, curve: ScaleCurve) -> None:
    """Draw each step as a bar of its parts' shares, with its time above.

    Bars of seconds would become too small to see.
    """
    points = curve.usable_points
    spent = [asdict(point.required_prediction.breakdown) for point in points]
    steps = [point.required_prediction.step_time for point in points]
    rows = {key: [100 * parts.get(key, 0.0) / step for parts, step in zip(spent, steps, strict=True)] for key in _PARTS}
    _stack(axes, [str(point.gpus) for point in points], rows)
    for index, step in enumerate(steps):
        axes.annotate(format_duration(step), (index, 101), ha="center", fontsize=7, rotation=90, va="bottom")
    axes.set(xlabel="GPUs", ylabel="share of a step [%]; above: its time", ylim=(0, 125), yticks=range(0, 101, 20))
    axes.tick_params(axis="x", labelrotation=45 if len(points) > _MAX_HORIZONTAL_LABELS else 0)
    batch = f"{with_noun(curve.fixed_batch, 'sample')} {'per step' if curve.scaling == 'strong' else 'per rank'}"
    axes.set_title(f"{curve.scaling} scaling, {batch}", fontsize=9)


#: Step time of the slowest plan of a Pareto front in a picture, over that of the fastest.
_SLOWEST = 5.0


def plot_plans(model: str, system: str, ranking: FoundPlans, capacity: float) -> Figure:
    """Plot plans by step time and memory: the best ones and the Pareto front.

    Parameters
    ----------
    model : str
        Name of the model.
    system : str
        Name of the system.
    ranking : FoundPlans
        Plans.
    capacity : float
        Memory of a device [byte].

    Returns
    -------
    Figure
        The plot.
    """
    with matplotlib.rc_context(PLOT_STYLE):
        figure, (axes,) = figure_with_axes(7.5, 4.6, columns=1)
        front = sorted(ranking.pareto_plans, key=lambda row: row.step_time)
        front = [row for row in front if row.step_time <= _SLOWEST * front[0].step_time]
        times, sizes = [row.step_time for row in front], [row.memory / GIBIBYTE for row in front]
        axes.plot(times, sizes, "-o", color=COLOUR_CYCLE[0], label="Pareto front", drawstyle="steps-post")
        best = [row for row in ranking.plans if row.fits]
        spots = [row.step_time for row in best], [row.memory / GIBIBYTE for row in best]
        label = f"the {len(best)} best by {ranking.objective}"
        axes.plot(*spots, linestyle="none", marker="^", color=COLOUR_CYCLE[1], label=label)
        axes.axhline(capacity / GIBIBYTE, color=BLACK, linestyle="--", label="capacity")
        ends, sides = front[:1] + front[1:][-1:], (("left", 14, 10), ("right", 0, 8))
        for row, (side, right, up) in zip(ends, sides, strict=False):
            spot = row.step_time, row.memory / GIBIBYTE
            axes.annotate(row.strategy, spot, xytext=(right, up), textcoords="offset points", fontsize=8, ha=side)
        axes.set(xlabel="step time [s]", ylabel="memory of the fullest GPU [GiB]", xscale="log")
        axes.set_ylim(0, 1.15 * max([capacity / GIBIBYTE, *sizes]))
        searched = with_noun(ranking.covered_configurations, "configuration")
        axes.set_title(f"{model} on {system}, global batch {ranking.global_batch}: {searched}")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(FuncFormatter(_some_ticks("23457")))
        axes.tick_params(axis="x", which="both", length=4, pad=4)
        axes.legend(loc="center right")
    return figure


def _some_ticks(first_digits: str) -> Callable[[float, object], str]:
    def text(value: float, _: object = None) -> str:
        return f"{value:g}" if f"{value:e}"[0] in first_digits else ""

    return text


def _stack(axes: Axes, names: Sequence[str], rows: Mapping[str, Sequence[float]], *, level: bool = False) -> None:
    """Draw bars that are stacked from the parts of steps, upright or ``level``; two bars may have the same name."""
    places, before = range(len(names)), np.zeros(len(names))
    bar, start = (axes.barh, "left") if level else (axes.bar, "bottom")
    for key, colour in _PARTS.items():
        sizes = np.asarray(rows[key])
        if sizes.any():
            look: dict[str, Any] = {"label": STEP_PART_NAMES[key], "color": colour, start: before}
            bar(places, sizes, edgecolor="white", linewidth=0.3, **look)
            before += sizes
    (axes.set_yticks if level else axes.set_xticks)(places, names)
    axes.grid(axis="y" if level else "x", visible=False)


def plot_systems(comparison: SystemComparison) -> Figure:
    """Plot throughput, parts of a step, and rent (if known) of systems.

    Parameters
    ----------
    comparison : SystemComparison
        The same run on several systems.

    Returns
    -------
    Figure
        The plot.
    """
    predicted = [(each, each.prediction) for each in comparison.candidates if each.prediction is not None]
    names = [each.name + ("" if each.fits else "\n(does not fit)") for each, _ in predicted]
    costs = [0.0 if each.training is None else each.training.cost or 0.0 for each, _ in predicted]
    columns = 3 if any(costs) else 2
    with matplotlib.rc_context(PLOT_STYLE):
        figure, axes = figure_with_axes(1.5 + 3.5 * columns, 1.6 + 0.4 * len(names), columns=columns, sharey=True)
        figure.suptitle(f"{predicted[0][1].model.name}, {comparison.amount.description}")
        unit_seconds, unit = time_unit(max(prediction.step_time for _, prediction in predicted))
        spent = [asdict(prediction.breakdown) for _, prediction in predicted]
        parts = {key: [each.get(key, 0.0) / unit_seconds for each in spent] for key in _PARTS}
        _stack(axes[0], names, parts, level=True)
        axes[0].set_xlabel(f"step time [{unit}]")
        axes[0].xaxis.set_major_locator(MaxNLocator(5))
        axes[0].invert_yaxis()
        _bars(axes[1], [prediction.samples_per_s for _, prediction in predicted], "samples/s", BLUE)
        if columns > 2:
            _bars(axes[2], costs, "cost [USD], where known", _ORANGE)
        _parts_legend(figure, axes[0])
    return figure


def _bars(axes: Axes, values: Sequence[float], label: str, colour: str) -> None:
    bars = axes.barh(range(len(values)), values, color=colour)
    axes.bar_label(bars, labels=[format_quantity(value, "") if value else "-" for value in values], padding=2)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value, "")))
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel(label)
    axes.margins(x=0.18)
    axes.grid(axis="y", visible=False)


def plot_roofline(study: NetworkSummary, system: System, run: Run) -> Figure:
    """Plot the forward kernels of every layer under the roofline of a device.

    Parameters
    ----------
    study : NetworkSummary
        Counts of the layers.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    Figure
        The plot.
    """
    device, points = system.device, layer_speeds(study, system, run)
    peak, bandwidth = device.peak_flops_per_s(study.dtype), device.memory.bandwidth
    with matplotlib.rc_context(PLOT_STYLE):
        figure, (axes,) = figure_with_axes(8.0, 5.0)
        intensities = [point.arithmetic_intensity for point in points] or [1.0]
        x = np.geomspace(min(intensities) / 3, max(*intensities, peak / bandwidth) * 3, 200)
        limits = f"{format_quantity(peak, 'FLOP/s')} in {study.dtype}, {format_quantity(bandwidth, 'B/s')}"
        axes.plot(x, np.minimum(peak, x * bandwidth), color=BLACK, label=f"roof of {device.name}:\n{limits}")
        for index, kind in enumerate(dict.fromkeys(point.type for point in points)):
            points_of_kind = [point for point in points if point.type == kind]
            colour, mark = COLOUR_CYCLE[index % len(COLOUR_CYCLE)], MARKERS[index % len(MARKERS)]
            axes.scatter(
                [point.arithmetic_intensity for point in points_of_kind],
                [point.flops_per_s for point in points_of_kind],
                [20 + 600 * point.flops_share for point in points_of_kind],
                color=colour, marker=mark, alpha=0.7, label=kind, linewidths=0,
            )  # fmt: skip
        slowest = min([point.flops_per_s for point in points] or [peak])
        fastest = max([point.flops_per_s for point in points] + [peak])
        axes.set(xscale="log", yscale="log", ylim=(min(slowest, fastest / 10) / 2, 2 * fastest))
        axes.set(xlabel="arithmetic intensity [FLOP/byte]", ylabel="forward speed [FLOP/s]")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value, "")))
            axis.set_minor_formatter(NullFormatter())
        axes.set_title(f"{study.graph.name}, batch {study.graph.batch}; area: share of the network's FLOP")
        legend = axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        for handle in legend.legend_handles[1:]:
            handle.set_sizes([40.0])  # type: ignore[union-attr]
        if notes := faster_than_roofline(points, system, study.dtype):
            figure.supxlabel("; ".join(notes), fontsize=8, color="#555555")
    return figure


def plot_collective_times(study: CollectiveStudy) -> Figure:
    """Plot the time of every algorithm over the payload, with the points where the best one changes.

    Parameters
    ----------
    study : CollectiveStudy
        Every algorithm of one operation over one group of ranks.

    Returns
    -------
    Figure
        The plot.
    """
    sizes = np.geomspace(KILO, max(10 * GIGA, 10 * study.payload_bytes), 200)
    names = [row.algorithm for row in study.rows]
    table = study.times(sizes)
    with matplotlib.rc_context(PLOT_STYLE):
        figure, (axes,) = figure_with_axes(8.0, 5.0)
        for (name, seconds), colour in zip(table.items(), COLOUR_CYCLE * 3, strict=False):
            style = "-" if name in names[: len(COLOUR_CYCLE)] else ":"
            axes.plot(sizes, seconds, style, color=colour, label=name)
        for crossover in study.crossovers:
            if sizes[0] <= crossover.payload_bytes <= sizes[-1]:
                axes.axvline(crossover.payload_bytes, color=GREY, linestyle="--", linewidth=0.8)
                words = f" {crossover.above} from {format_quantity(crossover.payload_bytes, 'B')}"
                axes.text(crossover.payload_bytes, 0.99, words, rotation=90, va="top", ha="right", fontsize=7,
                          transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set(xscale="log", yscale="log", ylabel="time", xlabel="payload")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(numticks=20))
            axis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_duration(value)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_quantity(value, "B")))
        axes.set_title(f"{study.operation} over {study.ranks} ranks of {study.system.name}")
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def plot_time_to_target(system: str, curve: TargetScaling) -> Figure:
    """Plot the time to a target over GPU counts, with its 90 % interval.

    Parameters
    ----------
    system : str
        Name of the system.
    curve : TargetScaling
        Times over GPU counts.

    Returns
    -------
    Figure
        The plot.
    """
    with matplotlib.rc_context(PLOT_STYLE):
        picture, (axes,) = figure_with_axes(7.0, 4.4)
        gpus = [point.prediction.plan.gpus for point in curve.points]
        ends = [[end / MINUTE for end in point.interval] for point in curve.points]
        low, high = zip(*ends, strict=True)
        axes.fill_between(gpus, low, high, alpha=0.2, color=BLUE, linewidth=0, label="90 % interval")
        reached = [point.time_to_target / MINUTE for point in curve.points]
        axes.plot(gpus, reached, "o-", color=BLUE, label="to the target")
        if any(point.total_evaluation_time for point in curve.points):
            trained = [(point.time_to_target - point.total_evaluation_time) / MINUTE for point in curve.points]
            axes.plot(gpus, trained, ":", color=VERMILION, label="without evaluation")
        title = f"{curve.points[0].task.title} on {system}"
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="minutes", title=title)
        axes.set_xticks(gpus, [f"{count:,}" for count in gpus])
        axes.xaxis.set_minor_locator(NullLocator())
        for formats in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formats(FuncFormatter(_some_ticks("125")))
        for count, words in ((curve.knee, "knee"), (curve.largest_useful_gpus, "largest useful")):
            if count is not None:
                axes.axvline(count, linestyle="--", linewidth=0.8, color=GREY)
                axes.text(count, 0.02, f" {words}", transform=axes.get_xaxis_transform(), color="#5b6068")
        axes.legend(loc="best")
    return picture


# how workers exchange


def plot_compressed_step_time(prediction: Prediction) -> Figure:
    """Plot the step of a compressed run and of the dense one over the bandwidth of the links between nodes.

    The plot marks the bandwidth at which both step times are equal, and the bandwidth of the system.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a compressed run.

    Returns
    -------
    Figure
        The plot.
    """
    curve = bandwidth_curve(prediction)
    with matplotlib.rc_context(PLOT_STYLE):
        figure, (axes,) = figure_with_axes(7.0, 4.4, columns=1)
        rates = [rate / GIGA for rate in curve.bandwidths]
        every = (*curve.uncompressed_step_times, *curve.compressed_step_times)
        unit_seconds, unit = time_unit(max(every))
        for label, steps, colour, mark in (
            ("dense", curve.uncompressed_step_times, BLUE, "o"),
            (str(prediction.run.exchange.compress), curve.compressed_step_times, VERMILION, "s"),
        ):
            axes.plot(rates, [step / unit_seconds for step in steps], f"-{mark}", color=colour, label=label)
        _mark_rates(axes, curve)
        axes.set(xscale="log", xlabel="rate of a node's link [GB/s]", ylabel=f"step time [{unit}]")
        if max(every) > 10 * min(every):
            axes.set(yscale="log")
        else:
            axes.set_ylim(bottom=0.0)
        _plain_numbers(axes)
        axes.set_title(f"{prediction.model.name} on {prediction.plan.gpus} GPUs of {prediction.system.name}")
        axes.legend(loc="best")
    return figure


def _mark_rates(axes: Axes, curve: BandwidthCurve) -> None:
    """Draw vertical lines at the system's bandwidth and where both curves cross."""
    places = [(curve.system_bandwidth, GREY, "the system")]
    if curve.crossover_bandwidth is not None:
        words = f"pays below {format_quantity(curve.crossover_bandwidth, 'B/s')}"
        places.append((curve.crossover_bandwidth, BLACK, words))
    for rate, colour, words in places:
        axes.axvline(rate / GIGA, color=colour, linestyle="--", linewidth=1.0, label=words)


def plot_exchange_scaling(curves: Sequence[ScaleCurve]) -> Figure | None:
    """Plot scaling curves under consistency models or on scattered nodes.

    Parameters
    ----------
    curves : sequence of ScaleCurve
        Scaling curves.

    Returns
    -------
    Figure, optional
        The plot; None for other curves.
    """
    if any(point.consistency is not None for curve in curves for point in curve.points):
        return plot_consistency_models(curves)
    return plot_node_placement(curves) if any(curve.node_placement != "packed" for curve in curves) else None


def plot_consistency_models(curves: Sequence[ScaleCurve], *, rows: int = 1) -> Figure:
    """Plot updates per second and staleness over workers for each consistency model, with the knees of servers.

    Parameters
    ----------
    curves : sequence of ScaleCurve
        Scaling curves.
    rows : int, optional
        Rows of axes, 1 or 2.

    Returns
    -------
    Figure
        The plot.
    """
    with matplotlib.rc_context(PLOT_STYLE):
        figure, (updates, stale) = figure_with_axes(10.0, 4.2, columns=2 if rows == 1 else 1, rows=rows)
        for curve, colour, mark in zip(curves, COLOUR_CYCLE, MARKERS, strict=False):
            points = curve.usable_points
            workers = [point.required_prediction.plan.dp for point in points]
            means, deviations = zip(*(point.staleness for point in points), strict=True)
            label = f"{curve.label}, bsp" if curve.consistency == "bsp" else curve.label
            look: dict[str, Any] = {"fmt": f"-{mark}", "color": colour, "label": label, "clip_on": False, "zorder": 3}
            updates.errorbar(workers, [point.updates_per_s for point in points], **look)
            stale.errorbar(workers, means, yerr=deviations, **look)
            study = points[-1].consistency
            if study is not None and study.has_servers:
                knee = float(study.consistency_result.knee)
                updates.axvline(knee, color=colour, linestyle="--", linewidth=1.0, label=f"knee at {knee:.3g} workers")
        updates.set(xscale="log", xlabel="workers", ylabel="updates of the model a second")
        stale.set(xscale="log", yscale="symlog", xlabel="workers", ylabel="staleness [updates]")
        counts = sorted({point.required_prediction.plan.dp for curve in curves for point in curve.usable_points})
        for axes in (updates, stale):
            axes.set_ylim(bottom=0.0)
            _plain_numbers(axes, counts)
            axes.legend(loc="best")
    return figure


def plot_node_placement(curves: Sequence[ScaleCurve]) -> Figure:
    """Plot the step time over GPU counts, on packed nodes and on scattered ones.

    Parameters
    ----------
    curves : sequence of ScaleCurve
        Scaling curves.

    Returns
    -------
    Figure
        The plot.
    """
    with matplotlib.rc_context(PLOT_STYLE):
        figure, (axes,) = figure_with_axes(7.0, 4.4, columns=1)
        unit_seconds, unit = time_unit(max(point.step_time for curve in curves for point in curve.usable_points))
        for curve, mark in zip(curves, MARKERS, strict=False):
            points = curve.usable_points
            colour, label = (_GREEN, ", packed nodes") if curve.node_placement == "packed" else (VERMILION, "")
            gpus, steps = [point.gpus for point in points], [point.step_time / unit_seconds for point in points]
            axes.plot(gpus, steps, f"-{mark}", color=colour, label=f"{curve.label}{label}")
        axes.set(xscale="log", xlabel="GPUs", ylabel=f"step time [{unit}]")
        axes.set_ylim(0.0, 1.1 * axes.get_ylim()[1])
        base = curves[0].base_point.required_prediction
        axes.set_title(f"{base.model.name} on {base.system.name}")
        _plain_numbers(axes, [point.gpus for point in curves[0].points])
        axes.legend(loc="best")
    return figure


def _plain_numbers(axes: Axes, places: Sequence[float] = ()) -> None:
    """Label logarithmic axes with plain numbers; those of the horizontal axis stand at ``places``."""
    if places:
        axes.set_xticks(places)
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if scale == "log":
            axis.set_minor_locator(NullLocator())
            if axis is axes.yaxis or not places:
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
