"""How a run scales with the number of GPUs, as a document and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.columns import AnswerColumn, Document, rows_table, wrapped_text
from paleo.report.estimate import consistency_cycle_json, training_document
from paleo.studies.scale import (
    cost_verdict,
    curve_warnings,
    failure_limit_sentence,
    node_placement_advice,
    scaling_verdict,
)
from paleo.units import format_gibibytes, with_noun

if TYPE_CHECKING:
    from paleo.consistency.base import ConsistencyResult
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.studies.defaults import RunWithDefaults
    from paleo.studies.gradient_exchange import ConsistencyStudy
    from paleo.studies.scale import ScaleCurve, ScalePoint


def json_document(
    model: ModelSpec, system: System, curves: Sequence[ScaleCurve], choice: RunWithDefaults | None = None
) -> Document:
    """Return the answer of ``paleo scale`` as a JSON document; each point names its curve (``scaling``).

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    curves : sequence of ScaleCurve
        One for each kind of scaling, consistency model and placement of nodes.
    choice : RunWithDefaults, optional
        Software and plan that were chosen, with reasons.

    Returns
    -------
    Document
        Dict of plain values, one entry per point of each curve, times in seconds.
    """
    chosen = {} if choice is None else {"software": choice.run.software, "reasons": choice.reasons}
    return {
        "model": model.name,
        "system": system.name,
        **chosen,
        "curves": [
            {
                "scaling": curve.scaling,
                "consistency": curve.consistency,
                "nodes": curve.node_placement,
                "global_batch_size" if curve.scaling == "strong" else "local_batch_size": curve.fixed_batch,
                "base_gpus": curve.base_point.gpus,
                **asdict(scaling_verdict(curve)),
                **_turnover(curve),
                "spending": cost_verdict(curve),
            }
            for curve in curves
        ],
        "points": [_point(curve, point) for curve in curves for point in curve.usable_points],
        "unusable": [
            {**_of_curve(curve, None), "gpus": point.gpus, "reason": point.problem}
            for curve in curves
            for point in curve.points
            if not point.is_usable
        ],
        "placement_advice": list(node_placement_advice(curves)),
        "warnings": curve_warnings(curves),
    }


def _of_curve(curve: ScaleCurve, study: ConsistencyStudy | None) -> Document:
    """Return the JSON keys that identify a scaling curve; ``consistency`` also holds staleness and update rate."""
    cycle = {} if study is None else consistency_cycle_json(study)
    return {
        "scaling": curve.scaling,
        "consistency": {"model": curve.consistency, **cycle},
        "nodes": curve.node_placement,
    }


def _turnover(curve: ScaleCurve) -> Document:
    """Return the JSON keys of the GPU count beyond which failures make more GPUs slower.

    Its value is null if there is none among the counts; there are no keys where failures are not counted.
    """
    if all(point.goodput is None for point in curve.points):
        return {}
    fastest = curve.fastest_point_with_failures
    return {"turnover_gpus": None if fastest is None else fastest.gpus}


def _point(curve: ScaleCurve, point: ScalePoint) -> Document:
    prediction = point.required_prediction
    return {
        **_of_curve(curve, point.consistency),
        "gpus": point.gpus,
        "global_batch_size": prediction.plan.global_batch,
        "local_batch_size": prediction.plan.local_batch,
        "step_time_s": point.step_time,
        "step_time_interval_s": [end * point.step_time / prediction.step_time for end in prediction.interval],
        "samples_per_s": point.samples_per_s,
        "speedup": curve.speedup(point),
        "efficiency": curve.efficiency(point),
        **({} if point.goodput is None else {"goodput": point.goodput}),
        "breakdown_s": asdict(prediction.breakdown),
        "memory_total_bytes": prediction.memory.total,
        "fits": prediction.memory.fits,
        "idle_gpus": prediction.plan.idle_gpus,
        "training": None if point.training is None else training_document(point.training),
    }


def table(
    model: ModelSpec, system: System, curves: Sequence[ScaleCurve], choice: RunWithDefaults | None = None
) -> RenderableType:
    """Return the answer of ``paleo scale`` as tables: verdict and points of each curve.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    curves : sequence of ScaleCurve
        Scaling curves.
    choice : RunWithDefaults, optional
        Software and plan that were chosen, with reasons.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    parts: list[RenderableType] = []
    if choice is not None and choice.automatic_choices_text:
        parts.append(wrapped_text(f"{choice.automatic_choices_text} The plan is {choice.run.strategy}.\n"))
    for curve in curves:
        batch = "global batch" if curve.scaling == "strong" else "batch per data-parallel rank"
        heading = f"{model.name} on {system.name}, {curve.label}: {batch} of {with_noun(curve.fixed_batch, 'sample')}"
        parts.append(Text(heading, style="bold"))
        sentences = scaling_verdict(curve).text, failure_limit_sentence(curve), cost_verdict(curve)
        parts += [wrapped_text(sentence) for sentence in sentences if sentence]
        parts += [Text(), rows_table("", _columns(curve), curve.points), Text(), *map(wrapped_text, _remarks(curve))]
    parts += [wrapped_text(sentence) for sentence in node_placement_advice(curves)]
    parts += [wrapped_text(Text(f"Warning: {warning}", style="yellow")) for warning in curve_warnings(curves)]
    return Group(*parts)


def _columns(curve: ScaleCurve) -> Iterator[AnswerColumn]:
    """Yield the columns of the table with one row per point of a curve; points that do not run have no values."""

    def column(title: str, unit: str, get: Any, *, optional: bool = False) -> AnswerColumn:
        return AnswerColumn("", lambda point: get(point) if point.fits else None, title, unit, optional=optional)

    studied = any(point.consistency is not None for point in curve.points)
    failing = any(point.goodput is not None for point in curve.points)
    yield AnswerColumn("gpus", lambda point: point.gpus, "GPUs", "count")
    yield column("batch/rank", "count", lambda point: point.required_prediction.plan.local_batch)
    yield column("step time", "s", lambda point: point.step_time)
    yield column("samples/s", "1/s", lambda point: point.samples_per_s)
    yield column(f"speedup over {curve.base_point.gpus}", "ratio", curve.speedup)
    yield column("efficiency", "fraction", curve.efficiency)
    yield column("exposed comm.", "fraction", lambda point: point.exposed_exchange_share)
    yield column("MFU", "fraction", lambda point: point.mfu)
    if studied:
        yield from CONSISTENCY_COLUMNS
    if failing:
        yield column("goodput", "tenths", lambda point: point.goodput)
        yield column("speedup with failures", "ratio", lambda point: curve.speedup(point) * (point.goodput or 0.0))
    if not studied:
        yield column("time", "s", lambda point: point.training and point.training.time, optional=True)
        yield column("cost", "USD", lambda point: point.training and point.training.cost, optional=True)
        yield column("energy", "kWh", lambda point: point.training and point.training.energy_kwh, optional=True)


def _cycle_column(title: str, unit: str, get: Any, *, of_servers: bool = False) -> AnswerColumn:
    """Return a column of the consistency study of a point or system; empty without one, or without servers."""

    def value(row: Any) -> Any:
        study: ConsistencyStudy | None = row.consistency
        return None if study is None or (of_servers and not study.has_servers) else get(study.consistency_result)

    return AnswerColumn("", value, title, unit)


def _staleness(cycle: ConsistencyResult) -> str:
    return f"{float(cycle.staleness_mean):.3g} ± {float(cycle.staleness_sd):.2g}"


#: Columns of what a consistency model makes of a step.
CONSISTENCY_COLUMNS = (
    _cycle_column("updates/s", "1/s", lambda cycle: float(cycle.updates_per_s)),
    _cycle_column("staleness", "words", _staleness),
    _cycle_column("knee", "number", lambda cycle: float(cycle.knee), of_servers=True),
    _cycle_column("server busy", "fraction", lambda cycle: float(cycle.utilization), of_servers=True),
)


def _remarks(curve: ScaleCurve) -> Iterator[str]:
    """Yield a sentence for each GPU count without a step, and one for counts that do not fit in memory."""
    yield from (f"{with_noun(point.gpus, 'GPU')}: {point.problem}" for point in curve.points if point.problem)
    planned = [(point.gpus, point.required_prediction.memory) for point in curve.usable_points]
    sizes = [(with_noun(gpus, "GPU"), format_gibibytes(memory.total)) for gpus, memory in planned if not memory.fits]
    if large := [f"{count} ({size})" for count, size in sizes]:
        remedy = "`paleo estimate` with that count says what would make it fit."
        yield f"Does not fit into {format_gibibytes(planned[0][1].capacity)}: {', '.join(large)}; {remedy}"
