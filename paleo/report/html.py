"""One self-contained page that answers a purchase question: no network, no libraries, fit for paper and telephone.

It follows Bailey's and Hoefler's warnings (Twelve ways to fool the masses, 1991; Scientific benchmarking, 2015): rates
stand beside times to solution, every number says whether it is predicted, calibrated and for which precision, and what
is left out is a section.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from paleo import __version__
from paleo.lowering.policies import words
from paleo.report import exchange, failures
from paleo.report.assets import SCRIPT, STYLE
from paleo.report.charts import COLOURS, Bar, Curve, bars, curves, deviations, legend, stacks
from paleo.report.tables import energy, money, percent, rate, step_parts, utilisation_warnings
from paleo.studies.comparison import CHANGE
from paleo.studies.launch import estimate_command
from paleo.studies.scaling import verdict
from paleo.units import GIB, HOUR, counted, duration, engineering, gibibytes

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.studies.comparison import Objective, Offer, Purchase
    from paleo.studies.cost import Tariff
    from paleo.studies.scaling import ScalePoint
    from paleo.studies.training import Training

NONE = "–"
_GOALS: dict[Objective, tuple[str, str]] = {
    "time": ("Fastest", "time to solution"),
    "cost": ("Cheapest", "cost"),
    "energy": ("Least energy", "energy"),
}


def report(study: Purchase, *, date: str) -> str:
    """The page as text; ``date`` is printed on it."""
    request = study.request
    title = f"Which system to train {request.model.name} on?"
    sections = [
        _head(study, title, date),
        _answer(study),
        _table(study),
        _pictures(study),
        _scaling(study),
        _plans(study),
        exchange.section(study),
        failures.section(study),
        _what_if(study),
        _statistics(study),
        _assumptions(study),
        _sources(study),
    ]
    body = "\n".join(part for part in sections if part)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body><main>\n{body}\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def _head(study: Purchase, title: str, date: str) -> str:
    request = study.request
    dtypes = " or ".join(
        dict.fromkeys(offer.prediction.plan.dtype for offer in study.offers if offer.prediction is not None)
    )
    words = f"{request.amount.words}, global batch {study.global_batch:,} on every system, "
    words += f"{dtypes} with {request.run.optimizer}. "
    badge = '<span class="badge">Predicted, not measured</span>'
    return (
        f"<header><p>{badge} Paleo {__version__}, {escape(date)}</p><h1>{escape(title)}</h1>"
        f"<p>{escape(words)}Whole training steps: forward, backward, gradient exchange and update; "
        f"{_left_out(study)}.</p></header>"
    )


def _failing(study: Purchase) -> bool:
    return any(offer.candidate.training and offer.candidate.training.goodput for offer in study.offers)


def _not_counted(study: Purchase) -> str:
    return "other users of machine and network" + ("" if _failing(study) else ", failures, restarts, checkpoints")


def _left_out(study: Purchase) -> str:
    return "no input pipeline" if _failing(study) else "no input pipeline, no checkpoints or restarts"


# the answer


def _answer(study: Purchase) -> str:
    """The best system by each goal, the asked one first, and whether the order is certain."""
    goals = sorted(_GOALS, key=lambda objective: objective != study.request.objective)
    cards = [_card(study, objective) for objective in goals]
    if not any(cards):
        least = [offer for offer in study.offers if offer.prediction is not None]
        reasons = "; ".join(
            f"{offer.candidate.system.name}: {_shortage(offer.prediction)}" for offer in least if offer.prediction
        )
        return (
            f'<section><h2>Answer</h2><p class="verdict no">It fits on none of them. {escape(reasons)}.</p></section>'
        )
    return f'<section id="answer"><h2>Answer</h2><div class="cards">{"".join(cards)}</div>{_caution(study)}</section>'


def _shortage(prediction: Prediction) -> str:
    return f"{gibibytes(prediction.memory.total)} wanted of {gibibytes(prediction.memory.capacity)}"


def _card(study: Purchase, objective: Objective) -> str:
    winner = study.best(objective)
    if winner is None or winner.candidate.training is None:
        return ""
    head, _ = _GOALS[objective]
    rivals = study.rivals(objective)
    rival_offers = [offer for offer in study.offers if offer is not winner and offer.candidate.runs]
    alone = "no other system fits" if len(study.offers) > 1 else "no other system was asked for"
    certain = "its interval is clear of all others" if rival_offers else alone
    if rivals:
        certain = f"not certain: intervals overlap with {', '.join(rival.name for rival in rivals)}"
    main = ' class="card main"' if objective == study.request.objective else ' class="card"'
    return (
        f"<div{main}><h3>{head}</h3><p class=winner>{escape(_name(winner))}</p>"
        f"<p class=figure>{escape(_figure(winner.candidate.training, objective))}</p>"
        f"<p class=note>{escape(_range(winner.candidate.training, objective))}; {escape(certain)}</p></div>"
    )


def _name(offer: Offer) -> str:
    return offer.candidate.system.share(offer.gpus)


def _figure(trained: Training, objective: Objective) -> str:
    figures = {"time": duration(trained.time), "cost": money(trained.cost), "energy": energy(trained.energy_kwh)}
    return figures[objective]


def _range(trained: Training, objective: Objective) -> str:
    low, high = (end / trained.time for end in trained.interval)
    if objective == "time":
        return f"90 % interval {duration(trained.interval[0])} to {duration(trained.interval[1])}"
    if objective == "energy":
        return f"modelled from the work; {energy(trained.energy_limit_kwh)} at design power"
    return f"90 % interval {money((trained.cost or 0) * low)} to {money((trained.cost or 0) * high)}"


def _caution(study: Purchase) -> str:
    """What a reader must know before acting on the cards."""
    notes = []
    running = [offer for offer in study.offers if offer.candidate.runs]
    unpriced = [offer.candidate.system.name for offer in running if _cost(offer) is None]
    if unpriced:
        consequence = "the cheapest is that of the others" if len(unpriced) < len(running) else "none is the cheapest"
        notes.append(f"No price is known for {', '.join(unpriced)}: {consequence}.")
    notes += utilisation_warnings(offer.prediction.mfu for offer in study.offers if offer.prediction is not None)
    counts = sorted({offer.gpus for offer in study.offers})
    if len(counts) > 1:
        notes.append(f"GPU counts differ ({', '.join(map(str, counts))}), as asked; the global batch does not.")
    notes += [
        f"{offer.candidate.system.name}: {offer.candidate.problem}" for offer in study.offers if offer.candidate.problem
    ]
    return f"<ul class=caution>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>" if notes else ""


def _cost(offer: Offer) -> float | None:
    return None if offer.candidate.training is None else offer.candidate.training.cost


# side by side

Cell = tuple[str, float | str | None]


def _table(study: Purchase) -> str:
    heads = (
        "system", "GPUs", "step time", "samples/s", "MFU", "memory", "USD/h", "time to solution", "cost", "energy",
    )  # fmt: skip
    rows = [_row(offer) for offer in study.offers]
    note = (
        "Click a heading to sort. Small: the 90 % interval. MFU: model FLOP over the dense peak of the precision. "
        "USD/h: whole nodes. Memory: the fullest GPU. Energy: modelled, and at design power."
    )
    return f"<section><h2>Side by side</h2>{table(heads, rows)}<p class=note>{note}</p></section>"


def _row(offer: Offer) -> list[Cell]:
    prediction, trained = offer.prediction, offer.candidate.training
    name = offer.candidate.system.name
    if prediction is None or trained is None:
        return [(name, name), (str(offer.gpus), offer.gpus), *[(NONE, None)] * 8]
    step, samples = offer.candidate.step_time or 0.0, offer.candidate.samples_per_s or 0.0
    low, high = (end * step / prediction.step_time for end in prediction.interval)
    memory = prediction.memory.total / prediction.memory.capacity
    hourly = trained.price_per_hour
    return [
        (name, name),
        (str(offer.gpus), offer.gpus),
        (f"{duration(step)}\n{duration(low)} to {duration(high)}", step),
        (rate(samples), samples),
        (percent(prediction.mfu), prediction.mfu),
        (f"{percent(memory)}\n{'fits' if prediction.memory.fits else 'does not fit'}", memory),
        (NONE if hourly is None else f"{hourly:,.2f}", hourly),
        (f"{duration(trained.time)}\n{duration(trained.interval[0])} to {duration(trained.interval[1])}", trained.time),
        (NONE if trained.cost is None else money(trained.cost), trained.cost),
        (_both_energies(trained), trained.energy),
    ]


def _both_energies(trained: Training) -> str:
    return NONE if trained.energy is None else f"{energy(trained.energy_kwh)}\nup to {energy(trained.energy_limit_kwh)}"


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table whose columns sort; a cell is its text (a second line small) and what it sorts by (None: last)."""
    listed = [list(row) for row in rows]
    figures = [any(not isinstance(row[i][1], str) for row in listed) for i in range(len(heads))]
    kinds = [" class=number" if figure else "" for figure in figures]
    top = "".join(f"<th{kind}><button>{escape(head)}</button></th>" for head, kind in zip(heads, kinds, strict=True))
    lines = "".join(f"<tr>{''.join(map(_cell, row, kinds))}</tr>" for row in listed)
    return f"<div class=scroll><table class=sortable><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"


def _cell(cell: Cell, kind: str) -> str:
    text, key = cell
    sort_key = "" if key is None else f"{key:.9g}" if isinstance(key, float | int) else key
    first, _, second = text.partition("\n")
    small = f"<br><small>{escape(second)}</small>" if second else ""
    return f'<td{kind} data-key="{escape(sort_key)}">{escape(first)}{small}</td>'


# pictures


def _pictures(study: Purchase) -> str:
    known = [offer for offer in study.offers if offer.prediction is not None and offer.candidate.training is not None]
    colours = dict(zip((offer.candidate.system.name for offer in known), COLOURS * 3, strict=False))
    parts = [
        _panel(
            "Time to solution, 90 % interval",
            bars([_time_bar(offer, colours) for offer in known], "time to solution"),
        )
    ]
    priced = [offer for offer in known if _cost(offer) is not None]
    if priced:
        parts.append(_panel("Cost, 90 % interval", bars([_cost_bar(offer, colours) for offer in priced], "cost")))
    metered = [offer for offer in known if offer.power is not None]
    if metered:
        drawn = bars([_energy_bar(offer, colours) for offer in metered], "energy")
        parts.append(_panel("Energy, modelled; whisker: to design power", drawn))
    parts.append(_panel("Where the time of a step goes", _step_stacks(known)))
    parts.append(_panel("Memory of the fullest GPU; dashed: capacity", _memory_stacks(known)))
    return f'<section><h2>Pictures</h2><div class="panels">{"".join(parts)}</div></section>'


def _panel(title: str, drawing: str) -> str:
    return f"<figure><figcaption>{escape(title)}</figcaption>{drawing}</figure>"


def _time_bar(offer: Offer, colours: dict[str, str]) -> Bar:
    trained = offer.candidate.training
    assert trained is not None
    low, high = trained.interval
    colour = colours[offer.candidate.system.name]
    return Bar(_name(offer), trained.time / HOUR, low / HOUR, high / HOUR, duration(trained.time), colour)


def _cost_bar(offer: Offer, colours: dict[str, str]) -> Bar:
    trained = offer.candidate.training
    assert trained is not None
    cost, (low, high) = trained.cost or 0.0, (end / trained.time for end in trained.interval)
    return Bar(_name(offer), cost, cost * low, cost * high, money(cost), colours[offer.candidate.system.name])


def _energy_bar(offer: Offer, colours: dict[str, str]) -> Bar:
    trained = offer.candidate.training
    assert trained is not None
    value, limit = trained.energy_kwh or 0.0, trained.energy_limit_kwh
    return Bar(_name(offer), value, value, limit, energy(value), colours[offer.candidate.system.name])


def _step_stacks(offers: Sequence[Offer]) -> str:
    rows = []
    for offer in offers:
        assert offer.prediction is not None
        rows.append((_name(offer), step_parts(offer.prediction), duration(offer.prediction.step_time)))
    return stacks(rows, "parts of a step")


def _memory_stacks(offers: Sequence[Offer]) -> str:
    rows, limits = [], []
    for offer in offers:
        assert offer.prediction is not None
        parts = {name: size / GIB for name, size in offer.prediction.memory.parts.items()}
        rows.append((_name(offer), parts, gibibytes(offer.prediction.memory.total)))
        limits.append(offer.prediction.memory.capacity / GIB)
    return stacks(rows, "memory", limits)


# scaling


def _scaling(study: Purchase) -> str:
    offers = [offer for offer in study.offers if offer.curve is not None]
    if not offers:
        return ""
    lines, sentences = [], []
    for offer, colour in zip(offers, COLOURS * 3, strict=False):
        curve = offer.curve
        assert curve is not None
        rates = [(float(p.gpus), p.samples_per_s, *_rate_ends(p)) for p in curve.points if p.runs]
        lines.append(Curve(offer.candidate.system.name, rates, colour))
        sentences.append(f"<li><b>{escape(offer.candidate.system.name)}</b>: {escape(verdict(curve).text)}</li>")
    strong = study.request.scaling == "strong"
    kept = f"the global batch stays {study.global_batch:,}" if strong else "the batch of each GPU stays"
    drawing = curves(
        lines, title="samples per second over GPUs", x_label="GPUs", y_label="samples/s (dotted: perfect scaling)"
    )
    return (
        f"<section><h2>How it scales</h2><p>{study.request.scaling.capitalize()} scaling: {kept}. Rates, not "
        f"speed-ups: a slow "
        f"baseline scales best. Each curve keeps the tensor and pipeline degrees of its recommended plan.</p>"
        f'<div class="panels">{_panel("Samples per second, 90 % band", drawing)}<ul '
        f"class=verdicts>{''.join(sentences)}</ul>"
        f"</div>{_scale_table(offers)}</section>"
    )


def _rate_ends(point: ScalePoint) -> tuple[float, float]:
    low, high = (end / point.predicted.step_time for end in point.predicted.interval)
    return point.samples_per_s / high, point.samples_per_s / low


def _scale_table(offers: Sequence[Offer]) -> str:
    rows: list[list[Cell]] = []
    for offer in offers:
        curve = offer.curve
        assert curve is not None
        for point in curve.points:
            name = offer.candidate.system.name
            if point.prediction is None or not point.runs:
                why = point.problem or "does not fit"
                rows.append([(name, name), (str(point.gpus), point.gpus), *[(NONE, None)] * 4, (why, why)])
                continue
            shares = point.exchange / point.step_time
            efficiency = curve.efficiency(point)
            rows.append([
                (name, name), (str(point.gpus), point.gpus), (duration(point.step_time), point.step_time),
                (rate(point.samples_per_s), point.samples_per_s), (percent(efficiency), efficiency),
                (percent(shares), shares), ("", ""),
            ])  # fmt: skip
    heads = ("system", "GPUs", "step time", "samples/s", "efficiency", "communication", "note")
    return f"<details><summary>All points</summary>{table(heads, rows)}</details>"


# plans


def _plans(study: Purchase) -> str:
    rows = [_plan_row(offer) for offer in study.offers if offer.prediction is not None]
    heads = ("system", "strategy", "microbatch", "recomputation", "per rank", "runner-up", "plans compared")
    note = (
        "The runner-up is the next best plan that was tried and fits; within the interval it may well win. "
        "Where a strategy is stated with the question, nothing else is tried."
    )
    commands = "\n".join(
        estimate_command(offer.prediction.model, offer.prediction.system, offer.prediction.run)
        for offer in study.offers
        if offer.prediction is not None
    )
    shell = f"<details><summary>Commands that show these steps again</summary><pre>{escape(commands)}</pre></details>"
    return f"<section><h2>Recommended plans</h2>{table(heads, rows)}<p class=note>{note}</p>{shell}</section>"


def _plan_row(offer: Offer) -> list[Cell]:
    prediction, other = offer.prediction, offer.runner_up
    assert prediction is not None
    plan, name = prediction.plan, offer.candidate.system.name
    second = (
        NONE if other is None else f"{_plan_words(other)}: {percent(other.step_time / prediction.step_time - 1)} slower"
    )
    tried = f"{offer.tried:,}, {offer.fitting:,} fit"
    return [
        (name, name),
        (plan.strategy or "dp", plan.strategy or "dp"),
        (str(plan.microbatch), plan.microbatch),
        (words(prediction.run), words(prediction.run)),
        (counted(plan.local_batch, "sample"), plan.local_batch),
        (second, second),
        (tried, float(offer.tried)),
    ]


def _plan_words(prediction: Prediction) -> str:
    again = "" if words(prediction.run) == "none" else f", {words(prediction.run)} recomputation"
    return f"{prediction.plan.strategy or 'dp'}, microbatch {prediction.plan.microbatch}{again}"


# sensitivity


def _what_if(study: Purchase) -> str:
    offers = [offer for offer in study.offers if offer.sensitivity]
    panels = []
    for offer in offers:
        rows = [(sensitivity.figure, sensitivity.lower, sensitivity.higher) for sensitivity in offer.sensitivity]
        tight = [
            sensitivity.figure
            for sensitivity in offer.sensitivity
            if not sensitivity.fits_lower and offer.prediction and offer.prediction.memory.fits
        ]
        hint = f"<p class=note>With less {escape(', '.join(tight))} this plan would not fit.</p>" if tight else ""
        panels.append(_panel(_name(offer), deviations(rows, f"sensitivity of {offer.candidate.system.name}") + hint))
    change = percent(CHANGE)
    key = legend([(f"{change} less", COLOURS[1]), (f"{change} more", COLOURS[0])])
    return (
        f"<section><h2>What if the hardware were another?</h2><p>Change of the step time with one figure {change} "
        f"lower or "
        f"higher, the plan kept. What moves little is not worth paying for.</p>{key}"
        f'<div class="panels">{"".join(panels)}</div></section>'
    )


# what it does not say


def _statistics(study: Purchase) -> str:
    request = study.request
    if request.critical_batch is None:
        text = (
            f"Samples to the target are taken to be the same at every batch size. At a global batch of "
            f"{study.global_batch:,} "
            "that may be wrong: beyond the critical batch size (gradient noise scale) of a task more samples are "
            "needed for the "
            "same loss. State it with --critical-batch to have it counted. All systems are compared at the same "
            "global batch, so "
            "their order does not depend on it."
        )
        return f"<section><h2>Statistical efficiency: not counted</h2><p>{escape(text)}</p></section>"
    factor = 1.0 + study.global_batch / request.critical_batch
    text = (
        f"Critical batch size {request.critical_batch:,.0f} samples, as given: at a global batch of "
        f"{study.global_batch:,} a run "
        f"needs {factor:.2f} times the samples that small batches need ({request.amount.words}). Times, costs and "
        f"energies on this "
        "page count that."
    )
    sizes = [study.global_batch * 2**power for power in range(-4, 5) if study.global_batch * 2**power >= 1]
    rows: list[list[Cell]] = [
        [
            (f"{int(size):,}", float(size)),
            (f"{1 + size / request.critical_batch:.2f}", 1 + size / request.critical_batch),
            (f"{1 + request.critical_batch / size:.2f}", 1 + request.critical_batch / size),
        ]
        for size in sizes
    ]
    heads = ("global batch", "samples, over the fewest", "steps, over the fewest")
    source = "McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018."
    return (
        f"<section><h2>Statistical efficiency</h2><p>{escape(text)}</p><div class=narrow>{table(heads, rows)}</div>"
        f"<p class=note>{escape(source)}</p></section>"
    )


def _assumptions(study: Purchase) -> str:
    """The ways to fool the masses, and what this page does about each."""
    request = study.request
    prediction = next(offer.prediction for offer in study.offers if offer.prediction is not None)
    baseline = study.offers[0].candidate.system.name
    kept = "the global batch" if request.scaling == "strong" else "the batch of each GPU"
    rows = [
        ("Measured or predicted?", "Predicted. No figure of this page was measured on these systems by Paleo."),
        ("Calibrated?", _calibrations(study)),
        ("Kernel or whole application?", f"Whole training steps, not kernels; {_left_out(study)}, no "
                                         f"validation."),
        ("Baseline", f"None hidden: absolute times and rates everywhere; {baseline} stands first because it was "
                     f"asked for first."),
        ("Scaling", f"{request.scaling}; {kept} is kept"),
        ("Precision", f"{_dtypes(study)}; peaks are dense, without sparsity, for that precision. Master weights and "
                      f"updates as the optimizer keeps them."),
        ("FLOP", "1 multiply-add is 2 FLOP; MFU counts the model's FLOP, not what is recomputed."),
        ("Rates or time to solution?", f"Both; the ranking is by {_GOALS[request.objective][1]} of "
                                       f"{request.amount.words}."),
        ("What is paid", f"{_paid(request.tariff)}; no storage, traffic or staff. Whole nodes are paid for."),
        ("Energy", _energy_words(study)),
        ("Tuning", f"Every system gets its own best plan out of those tried, with the software profile "
                   f"{prediction.run.software}."),
        ("Interval", "Where nine of ten measured steps should lie, errors of all parts taken as if they went the "
                     "same way."),
    ]  # fmt: skip
    lines = "".join(f"<tr><th>{escape(subject)}</th><td>{escape(text)}</td></tr>" for subject, text in rows)
    predictions = [offer.prediction for offer in study.offers if offer.prediction is not None]
    missing = dict.fromkeys(text for each in predictions for text in each.unmodelled)
    warned = dict.fromkeys(f"{each.system.name}: {text}" for each in predictions for text in each.warnings)
    warnings = f"<h3>Warnings</h3><ul>{_items(warned)}</ul>" if warned else ""
    return (
        f"<section><h2>Assumptions</h2><table class=plain>{lines}</table><h3>Not modelled</h3><ul>{_items(missing)}"
        f"<li>{_not_counted(study)}</li></ul>{warnings}</section>"
    )


def _paid(tariff: Tariff) -> str:
    """What a price covers, in words."""
    if tariff.gpu_price is not None:
        return "the stated rent of GPUs" + (", electricity" if tariff.electricity is not None else "")
    rent = "rent of whole nodes at list price, which includes electricity"
    return rent + (", electricity where no rent counts" if tariff.electricity is not None else "")


def _items(texts: Iterable[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _calibrations(study: Purchase) -> str:
    """The sources of the calibrated parameters of each device."""
    offers = [offer.prediction for offer in study.offers if offer.prediction is not None]
    names = {
        prediction.system.device.name: f"{prediction.system.device.name}: {prediction.calibration}"
        for prediction in offers
    }
    note = "Inherited parameters come from other devices, those of the same architecture first, with wider intervals."
    return f"{'; '.join(names.values())}. {note}"


def _dtypes(study: Purchase) -> str:
    formats = {}
    for offer in study.offers:
        if offer.prediction is not None:
            dtype, device = offer.prediction.plan.dtype, offer.prediction.system.device
            formats[device.name] = f"{device.name} {dtype} at {engineering(device.peak_flops_per_s(dtype), 'FLOP/s')}"
    return "; ".join(formats.values())


def _energy_words(study: Purchase) -> str:
    tariff = study.request.tariff
    hosts = "hosts not counted" if tariff.host_power is None else f"{tariff.host_power:g} W of host for each GPU"
    return (
        f"GPUs: shares of the design power, idle and busy, and the energy of each FLOP and byte, capped; fitted to "
        f"measured watts of two cards, so the design power stands beside it. {hosts}; PUE {tariff.pue:g}."
    )


def _sources(study: Purchase) -> str:
    lines = []
    for offer in study.offers:
        system, trained = offer.candidate.system, offer.candidate.training
        lines.append(f"{system.name}: {system.source}")
        lines.append(f"{system.device.name}: {system.device.source}")
        if trained is not None and trained.price is not None:
            lines.append(f"Price of {system.name}: {trained.price.date}, {trained.price.source}")
    lines.append(f"{study.request.model.name}: {study.request.model.source}")
    return f"<section><h2>Sources</h2><ul class=sources>{_items(dict.fromkeys(lines))}</ul></section>"
