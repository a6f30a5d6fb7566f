"""How times to a target are shown: a document, a table, a plot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paleo.units import counted, duration, engineering

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


#: Columns of the table over counts of GPUs.
COLUMNS = ["strategy", "GPUs", "batch", "samples", "steps", "step time", "evaluation", "time", "90 %", "cost", "energy"]


def table(system: str, curve: TargetScaling, tariff: Tariff | None = None) -> RenderableType:
    """The verdict first, then a row for each count of GPUs."""
    from rich.console import Group
    from rich.text import Text

    from paleo.report.grid import grid
    from paleo.report.tables import NONE, energy, money, prose

    facts = grid("", COLUMNS)
    for point in curve.points:
        facts.add_row(
            point.prediction.plan.strategy or "dp",
            f"{point.prediction.plan.gpus:,}",
            f"{point.global_batch:,.0f}",
            engineering(point.samples, ""),
            f"{point.steps:,}",
            duration(point.step_time),
            _evaluation(point),
            duration(point.seconds),
            " to ".join(map(duration, point.interval)),
            money(point.usd(tariff)),
            NONE if (kwh := point.kwh(tariff)) is None else energy(kwh),
        )
    head = Text(_headline(system, curve, tariff), style="bold")
    law = f"Samples by {curve.points[0].task.law.source}."
    return Group(prose(head), Text(), facts, Text(), prose(law))


def _headline(system: str, curve: TargetScaling, tariff: Tariff | None) -> str:
    """The fastest count of GPUs, its time and cost, and where more of them stop to pay."""
    from paleo.report.tables import money

    best = min(curve.points, key=lambda point: point.seconds)
    low, high = map(duration, best.interval)
    fastest = "fastest on " if len(curve.points) > 1 else ""
    count, cost = counted(best.prediction.plan.gpus, "GPU"), best.usd(tariff)
    time = f"{duration(best.seconds)} (90 %: {low} to {high})" + ("" if cost is None else f", {money(cost)}")
    return f"{best.task.title} on {system}: {fastest}{count}, {'; '.join([time, *curve.limits])}."


def _evaluation(point: TargetTime) -> str:
    """Seconds of all evaluations; submissions may have them inside of their steps, or after the time that counts."""
    if point.evaluation_seconds:
        return duration(point.evaluation_seconds)
    return "not timed" if point.task.evaluation.beside else "in the steps"


def figure(system: str, curve: TargetScaling) -> Figure:
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
        if any(point.evaluation_seconds for point in curve.points):
            trained = [(point.seconds - point.evaluation_seconds) / MINUTE for point in curve.points]
            axes.plot(gpus, trained, ":", color=VERMILION, label="without evaluation")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="GPUs",
            ylabel="minutes",
            title=f"{curve.points[0].task.title} on {system}",
        )
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
