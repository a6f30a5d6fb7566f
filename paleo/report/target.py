"""Time to a quality target over counts of GPUs, as a document and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.columns import (
    AnswerColumn,
    Document,
    chosen_defaults_line,
    format_usd,
    row_json,
    rows_table,
    wrapped_text,
)
from paleo.units import MINUTE, format_duration, with_noun

if TYPE_CHECKING:
    from paleo.specs.system import System
    from paleo.specs.task import TrainingTask
    from paleo.studies.cost import Tariff
    from paleo.studies.target import TargetScaling, TargetTime


def _columns(tariff: Tariff) -> Iterator[AnswerColumn]:
    """Yield the columns of the table with one row per GPU count; costs follow from the tariff."""
    yield AnswerColumn("gpus", lambda point: point.prediction.plan.gpus, "GPUs", "count")
    yield AnswerColumn("global_batch_size", lambda point: point.global_batch, "samples a step", "count")
    yield AnswerColumn("input_rows", lambda point: point.prediction.plan.global_batch)
    yield AnswerColumn("strategy", lambda point: point.prediction.plan.strategy_text, "strategy", "", _strategy)
    yield AnswerColumn("samples", lambda point: point.samples, "samples", "prefix")
    yield AnswerColumn("steps", lambda point: point.steps, "steps", "count")
    yield AnswerColumn("step_time_s", lambda point: point.step_time, "step time", "duration")
    yield AnswerColumn("evaluation_s", lambda point: point.total_evaluation_time, "evaluation", "words", _evaluation)
    yield AnswerColumn("", lambda point: point.time_to_target, "time", "duration")
    yield AnswerColumn("minutes", lambda point: point.time_to_target / MINUTE)
    yield AnswerColumn("minutes_interval", lambda point: [end / MINUTE for end in point.interval])
    yield AnswerColumn("", lambda point: " to ".join(map(format_duration, point.interval)), "90 % interval", "words")
    yield AnswerColumn("usd", lambda point: point.usd(tariff), "cost", "USD")
    yield AnswerColumn("kwh", lambda point: point.kwh(tariff), "energy", "kWh")
    yield AnswerColumn("fits", lambda point: point.prediction.memory.fits)


def _strategy(point: TargetTime) -> str:
    return point.prediction.plan.strategy_text or "dp"


def _evaluation(point: TargetTime) -> str:
    """Return the evaluation time as text.

    Tasks without a separate evaluation time evaluate inside their steps, or outside the time that counts.
    """
    if point.total_evaluation_time:
        return format_duration(point.total_evaluation_time)
    return "not timed" if point.task.evaluation.beside else "in the steps"


def json_document(
    task: TrainingTask, system: System, curve: TargetScaling, tariff: Tariff, choices: Mapping[str, str]
) -> Document:
    """Return the answer of ``paleo target`` as a JSON document.

    Parameters
    ----------
    task : TrainingTask
        Training task: network, data, law of samples, and target quality.
    system : System
        Machine: its devices, nodes and links.
    curve : TargetScaling
        A point for each count of GPUs.
    tariff : Tariff
        What GPUs and electricity cost.
    choices : mapping of str to str
        Options that the user left open, with the chosen values and reasons.

    Returns
    -------
    Document
        Dict of plain values, times in seconds.
    """
    first = curve.points[0].task
    return {
        "task": task.name,
        "system": system.name,
        "software": curve.points[0].prediction.run.software,
        "choices": dict(choices),
        "target": first.target,
        "law": first.law.source,
        "verdict": curve.verdict,
        "knee": curve.knee,
        "largest_useful": curve.largest_useful_gpus,
        "points": [row_json(_columns(tariff), point) for point in curve.points],
        "skipped": [{"gpus": gpus, "reason": reason} for gpus, reason in curve.skipped.items()],
        "warnings": list(dict.fromkeys(warning for point in curve.points for warning in point.warnings)),
    }


def table(
    task: TrainingTask, system: System, curve: TargetScaling, tariff: Tariff, choices: Mapping[str, str]
) -> RenderableType:
    """Return the answer of ``paleo target`` as tables: verdict and GPU counts.

    Parameters
    ----------
    task : TrainingTask
        Training task: network, data, law of samples, and target quality.
    system : System
        Machine: its devices, nodes and links.
    curve : TargetScaling
        Times over GPU counts.
    tariff : Tariff
        Cost of GPUs and electricity.
    choices : mapping of str to str
        Options that the user left open, with the chosen values and reasons.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    best = min(curve.points, key=lambda point: point.time_to_target)
    low, high = map(format_duration, best.interval)
    fastest = "fastest on " if len(curve.points) > 1 else ""
    count, cost = with_noun(best.prediction.plan.gpus, "GPU"), best.usd(tariff)
    time = f"{format_duration(best.time_to_target)} (90 %: {low} to {high})"
    time += "" if cost is None else f", {format_usd(cost)}"
    head = f"{best.task.title} on {system.name}: {fastest}{count}, {'; '.join([time, *curve.limit_texts])}."
    law = f"Samples by {curve.points[0].task.law.source}."
    points = rows_table("", _columns(tariff), curve.points)
    skipped = [wrapped_text(f"Skipped {with_noun(gpus, 'GPU')}: {reason}") for gpus, reason in curve.skipped.items()]
    lead = [*chosen_defaults_line(choices), wrapped_text(Text(head, style="bold"))]
    return Group(*lead, Text(), points, *skipped, Text(), wrapped_text(law))
