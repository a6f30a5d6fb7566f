"""Pictures of how workers exchange: a step against the rate of the links, updates and staleness against workers, packed
nodes against others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from paleo.report.plots import BLACK, BLUE, CYCLE, GREEN, GREY, MARKS, STYLE, VERMILION, figure_of
from paleo.studies.compression import against_bandwidth
from paleo.units import GIGA, engineering, time_unit

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.studies.compression import BandwidthCurve
    from paleo.studies.scaling import ScaleCurve


def compression(prediction: Prediction) -> Figure:
    """The step of a compressed run and of the dense one over the rate of the links between nodes, with the rate at
    which they cross, and that of the system."""
    curve = against_bandwidth(prediction)
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = figure_of(7.0, 4.4, columns=1)
        rates = [rate / GIGA for rate in curve.rates]
        unit_seconds, unit = time_unit(max(*curve.dense, *curve.compressed))
        for label, steps, colour, mark in (
            ("dense", curve.dense, BLUE, "o"),
            (str(prediction.run.compress), curve.compressed, VERMILION, "s"),
        ):
            axes.plot(rates, [step / unit_seconds for step in steps], f"-{mark}", color=colour, label=label)
        _marks(axes, curve)
        axes.set(xscale="log", xlabel="rate of a node's link [GB/s]", ylabel=f"step [{unit}]")
        if max(*curve.dense, *curve.compressed) > 10 * min(*curve.dense, *curve.compressed):
            axes.set(yscale="log")
        else:
            axes.set_ylim(bottom=0.0)
        _plain(axes)
        axes.set_title(f"{prediction.model.name} on {prediction.plan.gpus} GPUs of {prediction.system.name}")
        axes.legend(loc="best")
    return figure


def _marks(axes: Axes, curve: BandwidthCurve) -> None:
    """Lines at the system's rate and where the steps cross."""
    places = [(curve.stated, GREY, "the system")]
    if curve.crossing is not None:
        places.append((curve.crossing, BLACK, f"pays below {engineering(curve.crossing, 'B/s')}"))
    for rate, colour, words in places:
        axes.axvline(rate / GIGA, color=colour, linestyle="--", linewidth=1.0, label=words)


def scaling(curves: Sequence[ScaleCurve]) -> Figure | None:
    """The picture of curves under consistency models or on nodes that are not packed; None of others."""
    if any(point.consistency is not None for curve in curves for point in curve.points):
        return consistency(curves)
    return placement(curves) if any(curve.nodes != "packed" for curve in curves) else None


def consistency(curves: Sequence[ScaleCurve]) -> Figure:
    """Updates a second and staleness over workers for each consistency model, with the knees of servers."""
    with matplotlib.rc_context(STYLE):
        figure, (updates, stale) = figure_of(10.0, 4.2, columns=2)
        for curve, colour, mark in zip(curves, CYCLE, MARKS, strict=False):
            points = [point for point in curve.points if point.usable]
            workers = [point.predicted.plan.dp for point in points]
            means, deviations = zip(*(point.staleness for point in points), strict=True)
            label = f"{curve.label}, bsp" if curve.consistency == "bsp" else curve.label
            look: dict[str, Any] = {"fmt": f"-{mark}", "color": colour, "label": label, "clip_on": False, "zorder": 3}
            updates.errorbar(workers, [point.updates_per_s for point in points], **look)
            stale.errorbar(workers, means, yerr=deviations, **look)
            study = points[-1].consistency
            if study is not None and study.served:
                knee = float(study.cycle.knee)
                updates.axvline(knee, color=colour, linestyle="--", linewidth=1.0, label=f"knee at {knee:.3g} workers")
        updates.set(xscale="log", xlabel="workers", ylabel="updates of the model a second")
        stale.set(xscale="log", yscale="symlog", xlabel="workers", ylabel="staleness [updates]")
        counts = sorted({point.predicted.plan.dp for curve in curves for point in curve.points if point.usable})
        for axes in (updates, stale):
            axes.set_ylim(bottom=0.0)
            _plain(axes, counts)
            axes.legend(loc="best")
    return figure


def placement(curves: Sequence[ScaleCurve]) -> Figure:
    """Steps on packed nodes and on others over GPUs."""
    with matplotlib.rc_context(STYLE):
        figure, (axes,) = figure_of(7.0, 4.4, columns=1)
        unit_seconds, unit = time_unit(
            max(point.step_time for curve in curves for point in curve.points if point.usable)
        )
        for curve, mark in zip(curves, MARKS, strict=False):
            points = [point for point in curve.points if point.usable]
            colour = GREEN if curve.nodes == "packed" else VERMILION
            gpus, steps = [point.gpus for point in points], [point.step_time / unit_seconds for point in points]
            axes.plot(gpus, steps, f"-{mark}", color=colour, label=f"{curve.label} ({curve.nodes})")
        axes.set(xscale="log", xlabel="GPUs", ylabel=f"step [{unit}]")
        axes.set_ylim(bottom=0.0)
        _plain(axes, [point.gpus for point in curves[0].points])
        axes.legend(loc="best")
    return figure


def _plain(axes: Axes, places: Sequence[float] = ()) -> None:
    """Logarithmic axes with plain numbers, those of the horizontal one at some ``places``."""
    if places:
        axes.set_xticks(places)
    for axis, scale in ((axes.xaxis, axes.get_xscale()), (axes.yaxis, axes.get_yscale())):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if scale == "log":
            axis.set_minor_locator(NullLocator())
            if axis is axes.yaxis or not places:
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
