"""One self-contained HTML page that answers a purchase question: no network, no libraries, fit for paper and phones.

It follows the warnings of Bailey (Twelve ways to fool the masses, 1991) and Hoefler and Belli (Scientific benchmarking,
2015): rates and times to solution, every number with its calibration and number format, and a section on what is left
out. Text and layout are in ``templates/report.html``.

Pages are jinja2 templates with their style sheets and scripts; a page holds all it needs and loads nothing.

The page of every evaluated plan of a search has sliders, the Pareto front of time, cost and memory, the breakdown and
command of the chosen plan. It works without a server or network, by keyboard, on phones, dark and light.

Columns are typed arrays in base64, so that 200,000 plans take about 4 MB. Layout and script are in ``templates``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from paleo import __version__
from paleo.errors import PlanError, SpecError
from paleo.launch.jobs import estimate_command
from paleo.lowering.stages_and_recompute import recompute_description
from paleo.predict import Prediction, predict
from paleo.report import plots
from paleo.report.charts import (
    CHART_WIDTH_POINTS,
    Bar,
    Chart,
    Curve,
    bar_chart,
    curve_chart,
    deviation_bar_chart,
    figure_to_svg,
    heat_map,
    stacked_bar_chart,
)
from paleo.report.columns import (
    EMPTY_CELL,
    AnswerColumn,
    Document,
    format_energy,
    format_percent_tenths,
    format_usd,
    percent,
)
from paleo.report.estimate import step_parts, utilisation_warnings
from paleo.search.plan_columns import PlanColumns, plan_columns
from paleo.specs.prices import devices_per_machine
from paleo.specs.run import Run, field_path, replace_fields
from paleo.studies.cost import TrainingEstimate, estimate_training, rent_rate
from paleo.studies.gradient_exchange import bandwidth_curve
from paleo.studies.purchase import SENSITIVITY_CHANGE, Objective, Purchase, PurchaseRequirements, SystemOffer
from paleo.studies.scale import ScaleCurve, ScalePoint, node_placement_study, scaling_verdict
from paleo.units import GIBIBYTE, HOUR, format_duration, format_gibibytes, format_quantity, with_noun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from paleo.search.plans import FoundPlans
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.studies.goodput import LongRun

_FOLDER = Path(__file__).parent / "templates"


def rendered_page(template: str, **context: Any) -> str:
    """Render a template of an HTML page with values; all values are escaped.

    Parameters
    ----------
    template : str
        Name of a file in the folder `templates`.
    **context
        Values of the template's variables. The template can call ``source`` to insert a style sheet or script.

    Returns
    -------
    str
        HTML.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    environment.loader = jinja2.FileSystemLoader(_FOLDER)
    for function in (with_noun, format_duration, format_gibibytes, percent, format_percent_tenths):
        environment.filters[function.__name__] = function
    environment.globals["source"] = lambda name: Markup((_FOLDER / name).read_text(encoding="utf-8"))
    return environment.get_template(template).render(**context)


#: Objective -> heading of its card, and how a sentence calls it.
_GOALS: dict[Objective, tuple[str, str]] = {
    "time": ("Fastest", "time to solution"),
    "cost": ("Cheapest", "cost"),
    "energy": ("Least energy", "energy"),
}
#: Checkpoint intervals and times between failures of the goodput map, over those of the run.
_GOODPUT_MAP_FACTORS = tuple(2.0**power for power in range(-4, 5))


def purchase_page(study: Purchase, *, date: str) -> str:
    """Return the HTML page that compares systems for a purchase: time, cost, energy, plans and scaling.

    Parameters
    ----------
    study : Purchase
        Systems with their best plans, trainings and scaling.
    date : str
        Printed on the page.

    Returns
    -------
    str
        HTML of a whole page.
    """
    request = study.request
    predicted = [offer for offer in study.offers if offer.prediction is not None]
    predictions = [offer.prediction for offer in predicted if offer.prediction is not None]
    goals = sorted(_GOALS, key=lambda objective: objective != request.objective)
    devices = {each.system.device.name: each for each in predictions}
    trained = [offer for offer in study.offers if offer.candidate.training is not None]
    failures = [_goodput_panel(offer) for offer in trained if _training_of(offer).long_run is not None]
    return rendered_page(
        "report.html",
        title=f"Which system to train {request.model.name} on?",
        version=__version__,
        date=date,
        study=study,
        request=request,
        predicted=predicted,
        dtypes=" or ".join(dict.fromkeys(each.plan.dtype for each in predictions)),
        excluded="no input pipeline" if failures else "no input pipeline, no checkpoints or restarts",
        cards=[card for objective in goals if (card := _card(study, objective))],
        cautions=list(_cautions(study)),
        systems=sortable_table(_SYSTEM_COLUMNS, study.offers),
        charts=list(_charts(study)),
        scaling=_scaling(study),
        plans=sortable_table(_PLAN_COLUMNS, predicted),
        commands="\n".join(estimate_command(each.model, each.system, each.run) for each in predictions),
        exchanges=[panel for offer in predicted for panel in gradient_exchange_panels(study, offer)],
        failures=failures,
        change=SENSITIVITY_CHANGE,
        colours={"less": plots.VERMILION, "more": plots.BLUE},
        sensitivities=[_sensitivity(offer) for offer in study.offers if offer.sensitivity],
        batches=_batch_table(study),
        calibrations="; ".join(f"{name}: {each.calibration}" for name, each in devices.items()),
        formats="; ".join(f"{name} {_dtype_and_peak(each)}" for name, each in devices.items()),
        goal=_GOALS[request.objective][1],
        paid=_paid(study),
        unmodelled=list(dict.fromkeys(text for each in predictions for text in each.unmodelled)),
        warnings=list(dict.fromkeys(f"{each.system.name}: {text}" for each in predictions for text in each.warnings)),
        sources=list(dict.fromkeys(_sources(study))),
    )


def _dtype_and_peak(prediction: Prediction) -> str:
    peak = prediction.system.device.peak_flops_per_s(prediction.plan.dtype)
    return f"{prediction.plan.dtype} at {format_quantity(peak, 'FLOP/s')}"


# tables


def sortable_table(attributes: Iterable[AnswerColumn], rows: Sequence[Any]) -> Document:
    """Return headings and cells of a table whose columns sort in the browser.

    Parameters
    ----------
    attributes : iterable of AnswerColumn
        Columns of the answer; those without a title are left out. The second line of a cell's text is printed small.
    rows : sequence
        Rows of the answer, which the getters of the columns read.

    Returns
    -------
    Document
        Values for the page template: headings, and the text and sort key of each cell.
    """
    columns = [column for column in attributes if column.title]
    lines = []
    for row in rows:
        line = []
        for column in columns:
            value = column.row_value(row)
            text, _, small = (EMPTY_CELL if value is None else column.cells([row])[0]).partition("\n")
            key = "" if value is None else f"{value:.9g}" if isinstance(value, float | int) else value
            line.append((text, small, key, bool(column.unit)))
        lines.append(line)
    return {"heads": [(column.title, bool(column.unit)) for column in columns], "rows": lines}


def _of_plan(get: Any) -> Any:
    """Return a function that reads a quantity of a system's predicted step and training; None where it has none."""
    return lambda offer: None if offer.prediction is None else get(offer.prediction, offer.candidate.training)


def _step_text(offer: SystemOffer) -> str:
    step, prediction = offer.candidate.step_time or 0.0, offer.prediction
    assert prediction is not None
    low, high = (end * step / prediction.step_time for end in prediction.interval)
    return f"{format_duration(step)}\n{format_duration(low)} to {format_duration(high)}"


def _memory_share(prediction: Prediction) -> float:
    return prediction.memory.total / prediction.memory.capacity


def _memory_text(offer: SystemOffer) -> str:
    assert offer.prediction is not None
    return f"{percent(_memory_share(offer.prediction))}\n{'fits' if offer.candidate.fits else 'does not fit'}"


def _training_of(offer: SystemOffer) -> TrainingEstimate:
    assert offer.candidate.training is not None
    return offer.candidate.training


def _time_text(offer: SystemOffer) -> str:
    training = _training_of(offer)
    return f"{format_duration(training.time)}\n{' to '.join(map(format_duration, training.interval))}"


def _energy_text(offer: SystemOffer) -> str:
    training = _training_of(offer)
    return f"{format_energy(training.energy_kwh)}\nup to {format_energy(training.kwh_at_design_power)}"


def _name(offer: SystemOffer) -> str:
    return offer.candidate.system.gpus_and_nodes_text(offer.gpus)


_SYSTEM_COLUMNS = (
    AnswerColumn("", lambda offer: offer.candidate.system.name, "system"),
    AnswerColumn("", lambda offer: offer.gpus, "GPUs", "count"),
    AnswerColumn("", lambda offer: offer.prediction and offer.candidate.step_time, "step time", "words", _step_text),
    AnswerColumn("", lambda offer: offer.prediction and offer.candidate.samples_per_s, "samples/s", "1/s"),
    AnswerColumn("", _of_plan(lambda step, _: step.mfu), "MFU", "fraction"),
    AnswerColumn("", _of_plan(lambda step, _: _memory_share(step)), "memory", "words", _memory_text),
    AnswerColumn("", _of_plan(lambda _, training: training.price_per_hour), "USD/h", "price"),
    AnswerColumn("", _of_plan(lambda _, training: training.time), "time to solution", "words", _time_text),
    AnswerColumn("", _of_plan(lambda _, training: training.cost), "cost", "USD"),
    AnswerColumn("", _of_plan(lambda _, training: training.energy), "energy", "words", _energy_text),
)


def _plan_words(prediction: Prediction) -> str:
    recomputed = recompute_description(prediction.run)
    again = "" if recomputed == "none" else f", {recomputed} recomputation"
    return f"{prediction.plan.strategy_text or 'dp'}, microbatch {prediction.plan.microbatch}{again}"


def _runner_up(offer: SystemOffer) -> str | None:
    if offer.runner_up is None or offer.prediction is None:
        return None
    slower = percent(offer.runner_up.step_time / offer.prediction.step_time - 1)
    return f"{_plan_words(offer.runner_up)}: {slower} slower"


_PLAN_COLUMNS = (
    AnswerColumn("", lambda offer: offer.candidate.system.name, "system"),
    AnswerColumn("", lambda offer: offer.prediction.plan.strategy_text or "dp", "strategy"),
    AnswerColumn("", lambda offer: offer.prediction.plan.microbatch, "microbatch", "count"),
    AnswerColumn("", lambda offer: recompute_description(offer.prediction.run), "recomputation"),
    AnswerColumn("", lambda offer: offer.prediction.plan.local_batch, "batch per rank", "count"),
    AnswerColumn("", _runner_up, "runner-up"),
    AnswerColumn("", lambda offer: offer.plans_compared, "plans searched", "words",
              lambda offer: f"{offer.plans_compared:,}, {offer.plans_fitting:,} fit"),
)  # fmt: skip


def _batch_table(study: Purchase) -> Document:
    """Return the numbers of samples and steps over batch sizes, which follow from the critical batch size."""
    critical = study.request.critical_batch or 1.0
    sizes = [study.global_batch * 2.0**power for power in range(-4, 5) if study.global_batch * 2.0**power >= 1]
    columns = (
        AnswerColumn("", lambda size: size, "global batch", "count"),
        AnswerColumn("", lambda size: 1 + size / critical, "samples, over the fewest", "ratio"),
        AnswerColumn("", lambda size: 1 + critical / size, "steps, over the fewest", "ratio"),
    )
    return sortable_table(columns, sizes)


# the answer


def _card(study: Purchase, objective: Objective) -> Document | None:
    """Return the best system by one objective, and whether its lead is certain; None if no system fits."""
    winner = study.best(objective)
    if winner is None or winner.candidate.training is None:
        return None
    trained, rivals = winner.candidate.training, study.comparison.overlapping_candidates(objective)
    if rivals:
        certain = f"not certain: intervals overlap with {', '.join(rival.name for rival in rivals)}"
    elif any(offer is not winner and offer.candidate.fits for offer in study.offers):
        certain = "its interval is clear of all others"
    else:
        certain = "no other system fits" if len(study.offers) > 1 else "no other system was asked for"
    low, high = trained.interval
    value, interval = format_duration(trained.time), f"90 % interval {format_duration(low)} to {format_duration(high)}"
    if objective == "energy":
        value = format_energy(trained.energy_kwh)
        interval = f"modelled; {format_energy(trained.kwh_at_design_power)} at design power"
    elif objective == "cost":
        ends = ((trained.cost or 0.0) * end / trained.time for end in (low, high))
        value, interval = format_usd(trained.cost), f"90 % interval {' to '.join(map(format_usd, ends))}"
    head = _GOALS[objective][0]
    return {"head": head, "name": _name(winner), "value": value, "interval": interval, "certain": certain}


def _cautions(study: Purchase) -> Iterator[str]:
    """Yield cautions for the reader of a purchase page: unknown prices, implausible MFU, unequal GPU counts."""
    running = [offer for offer in study.offers if offer.candidate.fits]
    unpriced = [offer.candidate.system.name for offer in running if _training_of(offer).cost is None]
    if unpriced:
        consequence = "the cheapest is that of the others" if len(unpriced) < len(running) else "none is the cheapest"
        yield f"No price is known for {', '.join(unpriced)}: {consequence}."
    yield from utilisation_warnings(offer.prediction.mfu for offer in study.offers if offer.prediction is not None)
    counts = sorted({offer.gpus for offer in study.offers})
    if len(counts) > 1:
        yield f"GPU counts differ ({', '.join(map(str, counts))}), as asked; the global batch does not."
    candidates = [offer.candidate for offer in study.offers]
    yield from (f"{candidate.system.name}: {candidate.problem}" for candidate in candidates if candidate.problem)


def _paid(study: Purchase) -> str:
    tariff = study.request.tariff
    if tariff.gpu_price is not None:
        return "the given rent of GPUs" + (", electricity" if tariff.electricity is not None else "")
    rent = "rent of whole nodes at list price, which includes electricity"
    return rent + (", electricity where no rent counts" if tariff.electricity is not None else "")


def _sources(study: Purchase) -> Iterator[str]:
    for offer in study.offers:
        system, trained = offer.candidate.system, offer.candidate.training
        yield f"{system.name}: {system.source}"
        yield f"{system.device.name}: {system.device.source}"
        if trained is not None and trained.price is not None:
            yield f"Price of {system.name}: {trained.price.date}, {trained.price.source}"
    yield f"{study.request.model.name}: {study.request.model.source}"


# charts


def _charts(study: Purchase) -> Iterator[tuple[str, Chart]]:
    known = [(offer, offer.candidate.training) for offer in study.offers if offer.prediction is not None]
    offers = [(offer, trained) for offer, trained in known if trained is not None]
    colours = dict(zip((offer.candidate.system.name for offer, _ in offers), plots.COLOUR_CYCLE * 3, strict=False))

    def bar(offer: SystemOffer, value: float, ends: Sequence[float | None], text: str) -> Bar:
        return Bar(_name(offer), value, ends[0], ends[1], text, colours[offer.candidate.system.name])

    times = [bar(o, t.time / HOUR, [end / HOUR for end in t.interval], format_duration(t.time)) for o, t in offers]
    yield "Time to solution, 90 % interval", bar_chart(times, "time to solution")
    costs = [(o, t.cost, [t.cost * end / t.time for end in t.interval]) for o, t in offers if t.cost is not None]
    if costs:
        bars = [bar(offer, cost, ends, format_usd(cost)) for offer, cost, ends in costs]
        yield "Cost, 90 % interval", bar_chart(bars, "cost")
    metered = [(o, t.energy_kwh or 0.0, t.kwh_at_design_power) for o, t in offers if o.power is not None]
    if metered:
        rows = [bar(offer, used, [used, limit], format_energy(used)) for offer, used, limit in metered]
        yield "Energy, modelled; whisker: to design power", bar_chart(rows, "energy")
    steps = [(_name(offer), offer.prediction) for offer, _ in offers if offer.prediction is not None]
    parts = [(name, step_parts(step), format_duration(step.step_time)) for name, step in steps]
    yield "Step time by part", stacked_bar_chart(parts, "step time by part")
    sizes = []
    for name, step in steps:
        gibibytes = {part: size / GIBIBYTE for part, size in step.memory.parts.items()}
        sizes.append((name, gibibytes, format_gibibytes(step.memory.total)))
    limits = [step.memory.capacity / GIBIBYTE for _, step in steps]
    yield "Memory of the fullest GPU; dashed: capacity", stacked_bar_chart(sizes, "memory", limits)


def _sensitivity(offer: SystemOffer) -> tuple[str, Chart, str]:
    moved, fits = offer.sensitivity, offer.candidate.fits
    rows = [(each.hardware_property, each.step_ratio_decreased, each.step_ratio_increased) for each in moved]
    tight = [each.hardware_property for each in moved if fits and not each.fits_with_decrease]
    hint = f"With less {', '.join(tight)} this plan would not fit." if tight else ""
    return _name(offer), deviation_bar_chart(rows, f"sensitivity of {offer.candidate.system.name}"), hint


# scaling


def _scaling(study: Purchase) -> Document | None:
    curves = ((offer.candidate.system.name, offer.scaling_curve) for offer in study.offers)
    scaled = [(name, curve) for name, curve in curves if curve is not None]
    if not scaled:
        return None
    lines = [
        Curve(name, [_curve_point(point) for point in curve.points if point.fits], colour)
        for (name, curve), colour in zip(scaled, plots.COLOUR_CYCLE * 3, strict=False)
    ]
    rates = "samples/s (dotted: perfect scaling)"
    chart = curve_chart(lines, title="samples per second over GPUs", x_label="GPUs", y_label=rates)
    rows = [(name, curve, point) for name, curve in scaled for point in curve.points]
    verdicts = [(name, scaling_verdict(curve).text) for name, curve in scaled]
    return {"chart": chart, "verdicts": verdicts, "points": sortable_table(_POINT_COLUMNS, rows)}


def _curve_point(point: ScalePoint) -> tuple[float, float, float, float]:
    low, high = (end / point.required_prediction.step_time for end in point.required_prediction.interval)
    return float(point.gpus), point.samples_per_s, point.samples_per_s / high, point.samples_per_s / low


def _of_point(get: Any) -> Any:
    return lambda row: get(row[1], row[2]) if row[2].prediction is not None and row[2].fits else None


_POINT_COLUMNS = (
    AnswerColumn("", lambda row: row[0], "system"),
    AnswerColumn("", lambda row: row[2].gpus, "GPUs", "count"),
    AnswerColumn("", _of_point(lambda _, point: point.step_time), "step time", "s"),
    AnswerColumn("", _of_point(lambda _, point: point.samples_per_s), "samples/s", "1/s"),
    AnswerColumn("", _of_point(lambda curve, point: curve.efficiency(point)), "efficiency", "fraction"),
    AnswerColumn("", _of_point(lambda _, point: point.exposed_exchange_share), "exposed communication", "fraction"),
    AnswerColumn("", lambda row: "" if row[2].fits else row[2].problem or "does not fit", "note"),
)


# how workers exchange


def gradient_exchange_panels(study: Purchase, offer: SystemOffer) -> Iterator[tuple[str, Chart, str]]:
    """Yield (heading, chart, sentence) on gradient compression, consistency model and node placement of a run.

    Each panel is left out unless the run sets that option.

    Parameters
    ----------
    study : Purchase
        Systems with their best plans, trainings and scaling.
    offer : SystemOffer
        One system with its best plan.
    """
    prediction = offer.prediction
    if prediction is None:
        return
    run, name = prediction.run, prediction.system.name
    if run.exchange.compress is not None:
        try:
            heading = f"Compression on {name} over the bandwidth of a node"
            yield heading, _narrow(plots.plot_compressed_step_time(prediction), heading), _compression_words(prediction)
        except PlanError:
            pass  # one GPU: no links
    if run.exchange.consistency != "bsp" and offer.scaling_curve is not None:
        plain = study.request.scaling_curve(prediction, {"exchange.consistency": "bsp"})
        if plain is not None:
            heading = f"Updates and staleness on {name} over workers"
            picture = plots.plot_consistency_models([plain, offer.scaling_curve], rows=2)
            yield heading, _narrow(picture, heading, height=520.0), _consistency_words(offer.scaling_curve)
    if run.fabric.nodes != "packed" and offer.scaling_curve is not None:
        packed = study.request.scaling_curve(prediction, {"fabric.nodes": "packed"})
        if packed is not None:
            heading = f"Step time on {name}: packed nodes and {offer.scaling_curve.node_placement}"
            last, base = ([point for point in each.points if point.fits][-1] for each in (offer.scaling_curve, packed))
            advice = node_placement_study(last.required_prediction)
            step = f"{format_duration(last.step_time)}, {format_duration(base.step_time)} on packed nodes"
            words = f"At {last.gpus:,} GPUs a step takes {step}." + ("" if advice is None else f" {advice.advice}")
            yield heading, _narrow(plots.plot_node_placement([packed, offer.scaling_curve]), heading), words


def _narrow(figure: Figure, title: str, height: float = 280.0) -> Chart:
    """Return a plot as a chart that fits into a column of the page."""
    figure.set_size_inches(CHART_WIDTH_POINTS / 72.0, height / 72.0)
    return Chart(figure_to_svg(figure, title))


def _compression_words(prediction: Prediction) -> str:
    curve, method = bandwidth_curve(prediction), prediction.run.exchange.compress
    if curve.crossover_bandwidth is None:
        faster = curve.compressed_step_times[0] < curve.uncompressed_step_times[0]
        return f"{method} is {'faster' if faster else 'slower'} at all these bandwidths."
    pays = "pays here" if curve.system_bandwidth < curve.crossover_bandwidth else "does not pay here"
    reach, below = (format_quantity(rate, "B/s") for rate in (curve.system_bandwidth, curve.crossover_bandwidth))
    return f"{method} {pays}: the links reach {reach}, and it pays below {below}."


def _consistency_words(curve: ScaleCurve) -> str:
    last = [point.consistency for point in curve.points if point.fits][-1]
    limit = ""
    if last is not None and last.has_servers:
        limit = f" Parameter servers are the limit from {float(last.consistency_result.knee):.3g} workers on (knee)."
    late = "updates by others between a worker's read and its write, on average"
    return f"Staleness: {late}; a synchronous step has none.{limit}"


# failures


def _goodput_panel(offer: SystemOffer) -> Document:
    run, name = _training_of(offer).long_run, f"{offer.gpus} × {offer.candidate.system.name}"
    assert run is not None
    heading, middle = f"Goodput [%] of {name}; framed: this run", len(_GOODPUT_MAP_FACTORS) // 2
    chart = heat_map(
        goodput_map(run, _GOODPUT_MAP_FACTORS).tolist(),
        columns=[format_duration(run.checkpoint_interval * factor, digits=2) for factor in _GOODPUT_MAP_FACTORS],
        rows=[format_duration(run.job_mtbf * factor, digits=2) for factor in _GOODPUT_MAP_FACTORS],
        framed=(middle, middle),
        title=heading,
        x_label="interval between checkpoints",
        y_label="time between failures",
    )
    return {"name": name, "run": run, "heading": heading, "chart": chart}


def goodput_map(run: LongRun, factors: Sequence[float]) -> npt.NDArray[np.float64]:
    """Return the goodput of a run over times between failures (rows) and checkpoint intervals (columns).

    Parameters
    ----------
    run : LongRun
        Run with failures and checkpoints.
    factors : sequence of float, shape (n,)
        Multiples of the run's time between failures and interval.

    Returns
    -------
    ndarray, shape (n, n)
        Goodput, 0 to 1.
    """
    scale = np.asarray(factors)
    return run.checkpoints.goodput(run.checkpoint_interval * scale[None, :], run.job_mtbf * scale[:, None])


#: Plans that a page holds; of more, only the best.
_MAX_PLANS_ON_PAGE = 200_000
#: Column of `PlanColumns` -> its name and its type in the browser.
_BROWSER_COLUMNS = {
    "step_time": ("step", "<f4"), "memory": ("memory", "<f4"), "gpus": ("gpus", "<u4"),
    "microbatch": ("microbatch", "<u4"), "strategy": ("strategy", "<u2"), "recompute_policy": ("policy", "u1"),
    "schedule": ("schedule", "u1"), "overlaps_gradient_exchange": ("overlapped", "u1"), "run": ("run", "<u2"),
}  # fmt: skip


def plan_search_page(model: ModelSpec, system: System, search: FoundPlans, wish: PurchaseRequirements) -> str:
    """Return the interactive HTML page that shows all plans of a search on one system.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    search : FoundPlans
        Its first plan is chosen when the page opens.
    wish : PurchaseRequirements
        Amount of training, tariff and objective.

    Returns
    -------
    str
        HTML of a whole page.

    Raises
    ------
    SpecError
        If the search found no plans.
    """
    if search.ranking is None or not search.plans:
        raise SpecError("--explore: the search found no plans")
    best = predict(model, system, search.plans[0].run)
    whole = None if wish.amount is None else estimate_training(best, wish.amount, wish.tariff, long_run=wish.long_run)
    table = plan_columns(search.ranking, _MAX_PLANS_ON_PAGE)
    machine = devices_per_machine(system)
    rate, _ = rent_rate(system, machine, wish.tariff)
    searched = ("gpus", "microbatch", "strategy", "recompute", "schedule")
    unset = {name: attrgetter(field_path(name))(Run()) for name in searched}
    facts = {
        "model": model.name,
        "system": system.name,
        "objective": wish.objective,
        "globalBatch": search.global_batch,
        "count": len(table),
        "evaluated": table.evaluated_count,
        "strategies": table.strategies,
        "policies": table.recompute_policies,
        "schedules": table.schedules,
        "capacity": system.device.memory.usable_bytes,
        "perNode": machine,
        "gpuHour": None if rate is None else rate / machine * HOUR,
        "steps": None if whole is None else whole.steps,
        "amount": None if whole is None else whole.amount.description,
        "samplesPerStep": search.global_batch,
        "tokensPerSample": best.graph.tokens_per_sample,
        "command": estimate_command(model, system, best.run),
        "commands": [estimate_command(model, system, replace_fields(run, unset)) for run in table.runs],
        "breakdown": step_parts(best),
        "bestIndex": _place(table, best),
        "bestStep": best.step_time,
        "interval": list(best.interval),
        "columns": {name: _packed(getattr(table, key).astype(kind)) for key, (name, kind) in _BROWSER_COLUMNS.items()},
    }
    data = json.dumps(facts, allow_nan=False).replace("</", "<\\/")
    return rendered_page("explorer.html", title=f"Plans of {model.name} on {system.name}", data=Markup(data))


def _place(table: PlanColumns, best: Prediction) -> int:
    """Return the row number of the best plan in the table of all plans; -1 if the table lacks that plan."""
    run = best.run
    equal = (table.gpus == run.gpus) & (table.microbatch == best.plan.microbatch)
    equal &= np.array(table.strategies)[table.strategy] == run.strategy
    # no plan of the table recomputes single layers
    equal &= np.array(table.recompute_policies)[table.recompute_policy] == recompute_description(run)
    if run.exchange.when is not None:
        equal &= table.overlaps_gradient_exchange == (run.exchange.when == "overlapped")
    names = np.array(table.schedules)[table.schedule]
    pipelined = best.plan.stages > 1 and best.plan.strategy.chunks > 1 and run.pipeline.schedule == "1f1b"
    equal &= names == ("interleaved" if pipelined else run.pipeline.schedule)
    places = np.flatnonzero(equal)
    return int(places[0]) if len(places) else -1


def _packed(values: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
