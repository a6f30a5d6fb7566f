"""The section of a report on how workers exchange, for what a question names: a compression over the rate of links, a
consistency model over workers, nodes that are not packed over GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

from paleo.errors import PlanError
from paleo.report.charts import COLOURS, Curve, Mark, curves
from paleo.studies import placement
from paleo.studies.compression import against_bandwidth
from paleo.units import GIGA, duration, engineering, time_unit

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.studies.comparison import Offer, Purchase
    from paleo.studies.scaling import ScaleCurve, ScalePoint

#: A chart with the sentence on it.
Panel = tuple[str, str, str]
SYNCHRONOUS, PACKED = "bsp", "packed"
#: Colour of what a chart compares with, of what the question names, and of a mark on the system itself.
PLAIN, NAMED, SYSTEM = COLOURS[0], COLOURS[1], COLOURS[7]


def section(study: Purchase) -> str:
    """The section; empty where every step is synchronous, dense and on packed nodes."""
    panels = [panel for offer in study.offers for panel in _panels(study, offer)]
    if not panels:
        return ""
    drawn = "".join(
        f"<figure><figcaption>{escape(title)}</figcaption>{drawing}<p class=note>{escape(words)}</p></figure>"
        for title, drawing, words in panels
    )
    return f'<section><h2>How workers exchange</h2><div class="panels">{drawn}</div></section>'


def _panels(study: Purchase, offer: Offer) -> Iterator[Panel]:
    prediction = offer.prediction
    if prediction is None:
        return
    if prediction.run.compress is not None:
        yield from _compression(prediction)
    if prediction.run.consistency != SYNCHRONOUS:
        yield from _consistency(study, offer, prediction)
    if prediction.run.nodes != PACKED:
        yield from _placement(study, offer, prediction)


def _compression(prediction: Prediction) -> Iterator[Panel]:
    """A step over the rate of the links, compressed and dense, with the rates of the system and of the crossing."""
    try:
        curve = against_bandwidth(prediction)
    except PlanError:
        return
    name, method = prediction.system.name, str(prediction.run.compress)
    unit_seconds, unit = time_unit(max(*curve.dense, *curve.compressed))
    lines = [
        _line(
            label, [(rate / GIGA, step / unit_seconds) for rate, step in zip(curve.rates, steps, strict=True)], colour
        )
        for label, steps, colour in (("dense", curve.dense, PLAIN), (method, curve.compressed, NAMED))
    ]
    marks = [Mark(curve.stated / GIGA, "the system", SYSTEM)]
    words = f"{method} is {'faster' if curve.compressed[0] < curve.dense[0] else 'slower'} at all these rates."
    if curve.crossing is not None:
        marks.append(Mark(curve.crossing / GIGA, f"pays below {engineering(curve.crossing, 'B/s')}", COLOURS[6]))
        pays = "pays here" if curve.stated < curve.crossing else "does not pay here"
        words = f"{method} {pays}: the links reach {engineering(curve.stated, 'B/s')}."
    title = f"Step [{unit}] on {name} over the rate of a node's links"
    yield title, curves(lines, title=title, x_label="GB/s", y_label=f"step [{unit}]", marks=marks), words


def _consistency(study: Purchase, offer: Offer, prediction: Prediction) -> Iterator[Panel]:
    """Updates a second and staleness over workers, beside synchronous steps, with the knee of the servers."""
    named, plain = offer.curve, study.request.curve(prediction, consistency=SYNCHRONOUS)
    if named is None or plain is None:
        return
    modes = ((SYNCHRONOUS, plain, PLAIN), (named.consistency, named, NAMED))
    lines = [
        _curve_over_workers(label, curve, colour, lambda point: point.updates_per_s) for label, curve, colour in modes
    ]
    last = [point.consistency for point in named.points if point.runs][-1]
    marks, words = [], f"{named.consistency}: updates of the model a second; a synchronous step is one."
    if last is not None and last.served:
        knee = float(last.cycle.knee)
        marks = [Mark(knee, f"knee at {knee:.3g}", COLOURS[6])]
        words = f"Parameter servers are the limit from {knee:.3g} workers on."
    name = prediction.system.name
    title = f"Updates of the model a second on {name} over workers"
    yield title, curves(lines, title=title, x_label="workers", y_label="updates/s", marks=marks), words
    stale = _curve_over_workers(named.consistency, named, NAMED, lambda point: point.staleness[0])
    late = Curve(stale.name, [point for point in stale.points if point[1] > 0], NAMED, linear=False)
    title = f"Staleness [updates] on {name} over workers"
    words = "Updates by others between a worker's read and its write, on average; a synchronous step has none."
    if late.points:
        yield title, curves([late], title=title, x_label="workers", y_label="updates late", marks=marks), words


def _placement(study: Purchase, offer: Offer, prediction: Prediction) -> Iterator[Panel]:
    """Steps on packed nodes and on those of the question over GPUs, and when that matters."""
    named, plain = offer.curve, study.request.curve(prediction, nodes=PACKED)
    if named is None or plain is None:
        return
    placements = ((PACKED, plain, PLAIN), (named.nodes, named, NAMED))
    unit_seconds, unit = time_unit(
        max(point.step_time for curve in (plain, named) for point in curve.points if point.runs)
    )
    lines = [
        _curve_over_workers(label, curve, colour, lambda point: point.step_time / unit_seconds)
        for label, curve, colour in placements
    ]
    advice = placement.studied([point.predicted for point in named.points if point.runs][-1])
    words = _difference(plain, named) if advice is None else f"{_difference(plain, named)} {advice.advice}"
    title = f"Step [{unit}] on {prediction.system.name}: packed nodes against {named.nodes}"
    yield title, curves(lines, title=title, x_label="GPUs", y_label=f"step [{unit}]"), words


def _difference(plain: ScaleCurve, named: ScaleCurve) -> str:
    last, packed = ([point for point in curve.points if point.runs][-1] for curve in (named, plain))
    steps = f"{duration(last.step_time)} against {duration(packed.step_time)} packed"
    return f"At {last.gpus:,} GPUs a step takes {steps}."


def _curve_over_workers(name: str, curve: ScaleCurve, colour: str, figure: Callable[[ScalePoint], float]) -> Curve:
    """A figure of each point that runs over its GPUs, or workers."""
    points = [point for point in curve.points if point.runs]
    return _line(name, [(float(point.predicted.plan.dp), figure(point)) for point in points], colour)


def _line(name: str, points: Sequence[tuple[float, float]], colour: str) -> Curve:
    """A line without a band."""
    return Curve(name, [(x, y, y, y) for x, y in points], colour, linear=False)
