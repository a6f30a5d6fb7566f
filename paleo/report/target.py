"""How times to a target are shown: a document, a table, a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paleo.units import duration, engineering

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from paleo.studies.cost import Tariff
    from paleo.studies.target import TargetScaling, TargetTime

MINUTE = 60.0


def document(task: str, system: str, curve: TargetScaling, tariff: Tariff | None = None) -> dict[str, Any]:
    """Points over GPU counts; minutes, samples, steps."""
    first = curve.points[0].task
    return {
        "schema": "paleo.target/1",
        "task": task,
        "system": system,
        "target": first.target,
        "law": first.law.source,
        "verdict": curve.verdict,
        "knee": curve.knee,
        "largest_useful": curve.largest_useful,
        "points": [_point(point, tariff) for point in curve.points],
        "warnings": list(dict.fromkeys(warning for point in curve.points for warning in point.warnings)),
    }


def _point(point: TargetTime, tariff: Tariff | None) -> dict[str, Any]:
    low, high = point.interval
    plan = point.prediction.plan
    return {
        "gpus": plan.gpus,
        "global_batch_size": point.global_batch,
        "strategy": plan.strategy,
        "samples": point.samples,
        "steps": point.steps,
        "step_time_s": point.step_time,
        "evaluation_s": point.evaluation_seconds,
        "minutes": point.seconds / MINUTE,
        "minutes_interval": [low / MINUTE, high / MINUTE],
        "usd": point.usd(tariff),
        "kwh": point.kwh(tariff),
        "fits": point.prediction.memory.fits,
    }


def table(task: str, system: str, curve: TargetScaling, tariff: Tariff | None = None) -> RenderableType:
    """A row for each count of GPUs, then the verdict."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    first = curve.points[0].task
    shown = Table(title=f"{first.title} on {system}: {first.target}", title_justify="left", title_style="bold")
    for heading in (
        "GPUs",
        "batch",
        "strategy",
        "samples",
        "steps",
        "step",
        "evaluation",
        "time",
        "90 %",
        "USD",
        "kWh",
    ):
        shown.add_column(heading, justify="left" if heading == "strategy" else "right")
    for point in curve.points:
        low, high = point.interval
        usd, kwh = point.usd(tariff), point.kwh(tariff)
        shown.add_row(
            f"{point.prediction.plan.gpus:,}",
            f"{point.global_batch:,.0f}",
            point.prediction.plan.strategy,
            engineering(point.samples, ""),
            f"{point.steps:,}",
            duration(point.step_time),
            duration(point.evaluation_seconds),
            duration(point.seconds),
            f"{duration(low)} - {duration(high)}",
            "-" if usd is None else f"{usd:,.0f}",
            "-" if kwh is None else f"{kwh:,.1f}",
        )
    return Group(shown, Text(f"{curve.verdict}; samples by {first.law.source}"))


def figure(task: str, system: str, curve: TargetScaling) -> Figure:
    """Minutes over GPU counts with the 90 % interval."""
    import matplotlib
    from matplotlib.ticker import FuncFormatter, NullLocator

    from paleo.report.plots import BLUE, GREY, STYLE, VERMILION, figure_of

    with matplotlib.rc_context(STYLE):
        drawn, (axes,) = figure_of(7.0, 4.4)
        gpus = [point.prediction.plan.gpus for point in curve.points]
        ends = [[end / MINUTE for end in point.interval] for point in curve.points]
        low, high = zip(*ends, strict=True)
        axes.fill_between(gpus, low, high, alpha=0.2, color=BLUE, linewidth=0, label="90 % interval")
        axes.plot(gpus, [point.seconds / MINUTE for point in curve.points], "o-", color=BLUE, label="to the target")
        trained = [(point.seconds - point.evaluation_seconds) / MINUTE for point in curve.points]
        axes.plot(gpus, trained, ":", color=VERMILION, label="without evaluation")
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="minutes", title=f"{task} on {system}")
        axes.set_xticks(gpus, [f"{count:,}" for count in gpus])
        axes.xaxis.set_minor_locator(NullLocator())
        for formats in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
            formats(FuncFormatter(_round_minutes))
        for count, words in ((curve.knee, "knee"), (curve.largest_useful, "largest useful")):
            if count is not None:
                axes.axvline(count, linestyle="--", linewidth=0.8, color=GREY)
                axes.text(count, 0.02, f" {words}", transform=axes.get_xaxis_transform(), color="#5b6068")
        axes.legend(loc="best")
    return drawn


def _round_minutes(value: float, _: object = None) -> str:
    """A tick of a logarithmic axis: 1, 2 and 5 times a power of ten, nothing between."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""
