"""Results as tables for a terminal: figures with units, the answer before the details."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.table import Table
from rich.text import Text

from paleo.network.fine_tuning import fine_tuning
from paleo.parallel.plan import RARE_UTILISATION
from paleo.report.grid import grid
from paleo.studies.consistency import studied
from paleo.units import GIGA, MICROSECOND, counted, duration, engineering, gibibytes, shortest

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.report.describe import Fact, Setting
    from paleo.studies.advice import Advice
    from paleo.studies.collective import AlgorithmRow, CollectiveStudy
    from paleo.studies.consistency import ConsistencyStudy
    from paleo.studies.goodput import Goodput
    from paleo.studies.scaling import ScaleCurve, ScalePoint
    from paleo.studies.summary import LayerCount, Summary
    from paleo.studies.training import Training

#: Columns where the output is no terminal: of the widest table, and of text.
PLAIN_WIDTH, TEXT_WIDTH = 150, 118
NONE = "-"

#: Part of a step -> what tables call it.
PARTS = {
    "compute": "arithmetic",
    "memory_bound": "memory traffic",
    "launch": "kernel launches",
    "communication_exposed": "communication, waited for",
    "slowed": "computation slowed by communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "input": "input, waited for",
    "stragglers": "waiting for the slowest",
}


def console() -> Console:
    """Standard output, as wide as the terminal, or ``PLAIN_WIDTH`` in a pipe; names are never read as markup."""
    probe = Console(highlight=False, markup=False, emoji=False)
    return probe if probe.is_terminal else Console(highlight=False, markup=False, emoji=False, width=PLAIN_WIDTH)


def rate(per_second: float) -> str:
    """A rate with four significant digits at least and no exponent.

    >>> rate(20520.4), rate(12.3456)
    ('20,520', '12.35')
    """
    return f"{per_second:,.0f}" if per_second >= 1000 else f"{per_second:.4g}"


def prose(text: str | Text) -> Constrain:
    """A text no wider than is good to read."""
    return Constrain(Text(text) if isinstance(text, str) else text, TEXT_WIDTH)


def pieces(blocks: Sequence[int]) -> str:
    """Iterations of the repeated block in a pipeline's pieces, in short: its layers, or pairs of them.

    >>> pieces((17, 15)), pieces((2, 3, 5, 5, 5, 5, 5, 2))
    ('17+15 blocks', '2 to 5 blocks a piece')
    """
    if len(blocks) <= 4:
        return f"{'+'.join(map(str, blocks))} blocks"
    return f"{min(blocks)} to {max(blocks)} blocks a piece"


def percent(share: float) -> str:
    """A share as a percentage with as many digits as make sense.

    >>> percent(0.4567), percent(0.0123)
    ('46 %', '1.2 %')
    """
    return f"{100 * share:.0f} %" if abs(share) >= 0.0995 else f"{100 * share:.1f} %"


def tenths(share: float) -> str:
    """A share as a percentage with one decimal.

    >>> tenths(0.9987)
    '99.9 %'
    """
    return f"{100 * share:.1f} %"


def utilisation_warnings(utilisations: Iterable[float]) -> list[str]:
    """A sentence where a step would use more of the arithmetic than is seen in practice.

    >>> utilisation_warnings([0.5]), utilisation_warnings([0.5, 0.9])[0][:8]
    ([], 'MFU 90 %')
    """
    most = max(utilisations, default=0.0)
    if most <= RARE_UTILISATION:
        return []
    return [f"MFU {percent(most)}: hardly anybody reaches {percent(RARE_UTILISATION)}; expect slower steps."]


def money(dollars: float | None) -> str:
    """US dollars, or a dash where no price is known.

    >>> money(1234.5), money(0.034), money(None)
    ('1,234 USD', '0.034 USD', '-')
    """
    if dollars is None:
        return NONE
    return f"{dollars:,.0f} USD" if dollars >= 100 else f"{dollars:,.3g} USD"


def energy(kilowatt_hours: float | None) -> str:
    """Kilowatt-hours, or a dash where the power is not known.

    >>> energy(2624.4), energy(1.234), energy(None)
    ('2,624 kWh', '1.23 kWh', '-')
    """
    if kilowatt_hours is None:
        return NONE
    return f"{kilowatt_hours:,.0f} kWh" if kilowatt_hours >= 100 else f"{kilowatt_hours:,.3g} kWh"


# estimate


def estimate(
    prediction: Prediction,
    training: Training | None = None,
    advice: Sequence[Advice] = (),
    *,
    verbose: bool = False,
) -> RenderableType:
    """The tables of an estimate: the answer, the parts of the step, memory, advice if the run does not fit,
    omissions."""
    parts: list[RenderableType] = [_headline(prediction), _breakdown(prediction), Text(), _memory(prediction), Text()]
    if advice:
        parts += [_advice(advice), Text()]
    if training is not None:
        parts += [_training(training), Text()]
        parts += [] if training.goodput is None else [goodput(training.goodput), Text()]
    if verbose:
        from paleo.report import step_details

        parts += [step_details.sections(prediction), Text(), step_details.collectives(prediction), Text()]
    parts.append(_provenance(prediction))
    return Group(*parts)


def _headline(prediction: Prediction) -> Text:
    plan, (low, high) = prediction.plan, prediction.interval
    batch = f"global batch {plan.global_batch} ({plan.local_batch} per data-parallel rank"
    batch += f", microbatches of {plan.microbatch})" if plan.microbatches > 1 else ")"
    text = Text()
    text.append(f"{prediction.model.name} on {prediction.system.share(plan.gpus)}\n", style="bold")
    tuning = fine_tuning(prediction.run)
    tuned = f", {tuning}" if tuning else ""
    text.append(f"{plan.strategy or 'dp'}, {plan.dtype}, {batch}{tuned}\n\n")
    style, study = "bold green" if prediction.memory.fits else "bold red", studied(prediction)
    if study is not None:
        text.append(f"step of a worker {duration(study.step_time)}", style=style)
        text.append(f"  under {prediction.run.consistency},  {_rates(study)}\n")
    kind, style = ("", style) if study is None else ("synchronous ", "")
    text.append(f"{kind}step time {duration(prediction.step_time)}", style=style)
    interval = f"90 % interval {duration(low)} to {duration(high)}"
    text.append(f"  ({interval}),  {_rates(prediction)},  {_utilisation(prediction)}\n")
    if not prediction.memory.fits:
        text.append(
            f"DOES NOT FIT: {gibibytes(prediction.memory.total)} of {gibibytes(prediction.memory.capacity)}\n",
            style="bold red",
        )
    return text


def _rates(step: Prediction | ConsistencyStudy) -> str:
    samples, tokens = f"{rate(step.samples_per_s)} samples/s", step.tokens_per_s
    return samples if tokens is None else f"{samples}, {rate(tokens)} tokens/s"


def step_parts(prediction: Prediction) -> dict[str, float]:
    """Seconds of a step by part, with the part's name in words."""
    spent = asdict(prediction.breakdown)
    spent |= {"slowed": prediction.slowed, "communication_exposed": spent["communication_exposed"] - prediction.slowed}
    return {words: spent[key] for key, words in PARTS.items()}


#: Share of a step below which a difference of two of its parts is rounding.
ROUNDING = 2.0**-30


def _breakdown(prediction: Prediction) -> Table:
    table = grid("Where a step's time goes", ("part", "time", "share"))
    for words, seconds in step_parts(prediction).items():
        if seconds > 0:
            spoken = duration(seconds) if seconds >= MICROSECOND else "< 1 us"
            table.add_row(words, spoken, percent(seconds / prediction.step_time))
    hidden = max(0.0, prediction.breakdown.communication_total - prediction.breakdown.communication_exposed)
    if hidden > ROUNDING * prediction.step_time:
        table.add_row("(communication hidden behind computation)", duration(hidden), "", style="dim")
    if prediction.input_pipeline is not None:
        arriving = prediction.input_pipeline
        table.add_row(f"(a batch arrives, by {arriving.slowest}, in)", duration(float(arriving.total)), "", style="dim")
    return table


def _memory(prediction: Prediction) -> Table:
    table = grid("Memory of the fullest GPU", ("part", "size", "share of capacity"))
    capacity = prediction.memory.capacity
    for name, size in prediction.memory.parts.items():
        table.add_row(name, gibibytes(size), percent(size / capacity))
    if prediction.host_memory > 0:
        table.add_row("(in host memory, for each GPU)", gibibytes(prediction.host_memory), "", style="dim")
    table.add_section()
    kept, fits = prediction.memory, "fits" if prediction.memory.fits else "does not fit"
    table.add_row(f"total, {fits} into {gibibytes(capacity)}", gibibytes(kept.total), percent(kept.total / capacity))
    if kept.fits and kept.fragmentation > 0:
        counts = {"tensors, allocated": kept.allocated, "reserved for them": kept.cached, "nvidia-smi": kept.used}
        for words, size in counts.items():
            table.add_row(f"({words})", gibibytes(size), percent(size / capacity), style="dim")
    return table


#: Changes that are shown where a run does not fit.
SHOWN_ADVICE = 8


def _advice(advice: Sequence[Advice]) -> Table:
    batch = advice[0].prediction.plan.global_batch
    title = f"What would make it fit (or nearly), with --global-batch {batch}"
    table = grid(title, ("change", "step time", "memory", "fits"))
    like = shortest(change.prediction.step_time for change in advice[:SHOWN_ADVICE])
    for change in advice[:SHOWN_ADVICE]:
        figures = (
            duration(change.prediction.step_time, like=like),
            gibibytes(change.prediction.memory.total),
            "yes" if change.fits else "no",
        )
        table.add_row(change.change, *figures)
    return table


def _training(training: Training) -> RenderableType:
    table = grid(f"Training: {training.amount.words}", ("what", "figure"), left=2)
    table.add_row("steps", f"{training.steps:,}")
    table.add_row("time", duration(training.time))
    table.add_row("rent", _rent(training))
    if training.electricity is not None:
        table.add_row("electricity", money(training.electricity))
    hosts = "hosts not counted" if training.tariff.host_power is None else "hosts counted"
    limit = energy(training.energy_limit_kwh)
    used = f"{energy(training.energy_kwh)} modelled, {limit} at design power; {hosts}"
    table.add_row("energy", used if training.energy is not None else "not modelled: the design power is not known")
    return Constrain(table, TEXT_WIDTH)


def goodput(run: Goodput) -> Table:
    """Time and goodput of a long run with failures."""
    low, high = run.share_range
    early, late = run.finish_interval
    bounds = "" if low == high else f" ({tenths(low)} to {tenths(high)} over the range of failure rates)"
    often = "none" if run.failures == 0 else f"one every {duration(run.mtbf)}, {run.failures:,.0f} until the end"
    intervals = f"{duration(run.interval)}, {duration(run.save)} each"
    if run.checkpoints.survived:
        intervals += f"; in storage every {duration(run.checkpoints.storage_interval(run.interval))}"
    table = grid("With failures", ("what", "figure"), left=2)
    table.add_row("goodput", f"{tenths(run.share)}{bounds}")
    names = {"again": "work done again"}
    table.add_row("lost", ", ".join(f"{names.get(name, name)} {tenths(share)}" for name, share in run.lost.items()))
    table.add_row("failures", f"{often} ({run.source})")
    table.add_row("checkpoints", f"{engineering(run.checkpoint_bytes, 'B')} every {intervals}")
    table.add_row("restart", f"{duration(run.restart)}; spare nodes for 99 % of repairs: {run.spares:,}")
    table.add_row("finished after", f"{duration(run.finish)} (p10 to p90: {duration(early)} to {duration(late)})")
    table.add_row("without failures", duration(run.work))
    return table


#: Of costs that hold no price of the machines.
ELECTRICITY_ALONE = "not counted: with --electricity alone machines are your own; --price or --buy adds what they cost"


def _rent(training: Training) -> str:
    if training.price is None and training.electricity is not None:
        return ELECTRICITY_ALONE
    if training.price is None:
        return "no price is known for this system; state one: --price '2.5 USD/h' (for each GPU)"
    rate = f"{money(training.price_per_hour)} an hour, {training.price.date}: {training.price.source}"
    return f"{money(training.rent)}  ({rate})"


def _provenance(prediction: Prediction) -> RenderableType:
    text = Text(f"Calibration: {prediction.calibration}\n", style="dim")
    if prediction.unmodelled:
        text.append(f"Not modelled: {'; '.join(prediction.unmodelled)}\n", style="dim")
    for warning in prediction.warnings:
        text.append(f"Warning: {warning}\n", style="yellow")
    return prose(text)


# scale


def scale(model: str, system: str, curves: Sequence[ScaleCurve]) -> RenderableType:
    """The verdict and the table of each curve."""
    from paleo.studies.scaling import curve_warnings, placement_advice, spending, turnover_words, verdict

    parts: list[RenderableType] = []
    for curve in curves:
        kept = f"{counted(curve.fixed_batch, 'sample')} " + (
            "in all" if curve.scaling == "strong" else "for each data-parallel rank"
        )
        parts.append(Text(f"{model} on {system}, {curve.label}: {kept}", style="bold"))
        sentences = verdict(curve).text, turnover_words(curve), spending(curve)
        parts += [prose(sentence) for sentence in sentences if sentence]
        parts += [Text(), _curve(curve), Text(), *map(prose, _remarks(curve))]
    parts += [prose(sentence) for sentence in placement_advice(curves)]
    parts += [prose(Text(f"Warning: {warning}", style="yellow")) for warning in curve_warnings(curves)]
    return Group(*parts)


def _curve(curve: ScaleCurve) -> Table:
    against = f"speedup over {curve.base.gpus}"
    columns = ("GPUs", "batch/rank", "step time", "samples/s", against, "efficiency", "comm.", "MFU")
    studied = any(point.consistency is not None for point in curve.points)
    failing = any(point.goodput is not None for point in curve.points)
    priced = not studied and any(point.training is not None for point in curve.points)  # or columns are cut
    more = (*(CYCLE if studied else ()), *(FAILING if failing else ()), *(SPENT if priced else ()))
    table = grid("", (*columns, *more), left=0)
    like = shortest(point.step_time for point in curve.points if point.runs)
    for point in curve.points:
        further = (*(cycle_figures(point.consistency) if studied else ()), *(_failing(curve, point) if failing else ()))
        spent = _spent(point.training if point.runs else None) if priced else ()
        table.add_row(*_point(curve, point, like), *further, *spent)
    return table


def _remarks(curve: ScaleCurve) -> Iterator[str]:
    """A sentence for each point without a step, and for those that do not fit."""
    planned = [(point.gpus, point.prediction) for point in curve.points if point.usable and point.prediction]
    yield from (f"{counted(point.gpus, 'GPU')}: {point.problem}" for point in curve.points if point.problem)
    if large := [
        f"{counted(gpus, 'GPU')} ({gibibytes(step.memory.total)})" for gpus, step in planned if not step.memory.fits
    ]:
        remedy = "`paleo estimate` with that count says what would make it fit."
        yield f"Does not fit into {gibibytes(planned[0][1].memory.capacity)}: {', '.join(large)}; {remedy}"


#: Columns of what a training takes.
SPENT = ("time", "cost", "energy")


def _spent(training: Training | None) -> tuple[str, ...]:
    if training is None:
        return (NONE,) * len(SPENT)
    return duration(training.time), money(training.cost), energy(training.energy_kwh)


#: Columns of what a consistency model makes of a step.
CYCLE = ("updates/s", "staleness", "knee", "server busy")
#: Columns of a run with failures: goodput, and the speed-up that is left of it.
FAILING = ("goodput", "with failures")


def _failing(curve: ScaleCurve, point: ScalePoint) -> tuple[str, ...]:
    if point.goodput is None or not point.usable:
        return (NONE,) * len(FAILING)
    return f"{tenths(point.goodput)}", f"{curve.speedup(point) * point.goodput:.2f}"


def cycle_figures(study: ConsistencyStudy | None) -> tuple[str, ...]:
    """Updates of the model a second, staleness with its deviation, the workers from which on a server is the limit, and
    the busy share of the fullest."""
    if study is None:
        return (NONE,) * len(CYCLE)
    cycle, served = study.cycle, study.served
    stale = f"{float(cycle.staleness_mean):.3g} ± {float(cycle.staleness_sd):.2g}"
    knee, busy = (f"{float(cycle.knee):.3g}", percent(float(cycle.utilization))) if served else (NONE, NONE)
    return rate(float(cycle.updates_per_s)), stale, knee, busy


def _point(curve: ScaleCurve, point: ScalePoint, like: float | None) -> tuple[str, ...]:
    """Figures of a point, with its step in the unit of the times ``like``; none where it does not run."""
    if point.prediction is None or not point.runs:
        return (str(point.gpus), *[NONE] * 7)
    prediction = point.prediction
    return (
        str(point.gpus),
        str(prediction.plan.local_batch),
        duration(point.step_time, like=like),
        rate(point.samples_per_s),
        f"{curve.speedup(point):.2f}",
        percent(curve.efficiency(point)),
        percent(point.exchange / point.step_time),
        percent(prediction.mfu * prediction.step_time / point.step_time),
    )


# summary


def summary(study: Summary) -> RenderableType:
    """Layer by layer, then the totals; figures of a layer are of one iteration."""
    columns = ("layer", "type", "output", "times", "parameters", "FLOP fwd", "FLOP bwd", "bytes fwd", "FLOP/B", "saved")
    title = f"{study.graph.name}, batch {study.graph.batch}, {study.dtype}; figures of one iteration"
    table = grid(title, columns, left=3)
    for column in table.columns[1:]:
        column.no_wrap = True
    for layer in study.layers:
        table.add_row(*_layer(layer))
    table.add_section()
    sums = {field: study.total(field) for field in ("flops_forward", "flops_backward", "bytes_forward", "saved_bytes")}
    table.add_row(
        "all iterations", "", "", "", engineering(study.graph.parameters, ""),
        engineering(sums["flops_forward"], ""), engineering(sums["flops_backward"], ""),
        engineering(sums["bytes_forward"], "B"),
        f"{sums['flops_forward'] / max(sums['bytes_forward'], 1):.0f}", engineering(sums["saved_bytes"], "B"),
    )  # fmt: skip
    return table if study.model_flops is None else Group(table, prose(_model_flops(*study.model_flops)))


def _model_flops(forward: float, backward: float) -> str:
    """How many of the counted FLOP are those of MFU."""
    counts = f"{engineering(forward, 'FLOP')} forward, {engineering(backward, 'FLOP')} back"
    return f"MFU counts {counts} of these: no scores behind a causal mask, nothing computed twice."


def _layer(layer: LayerCount) -> tuple[str, ...]:
    figures = [engineering(value, "") for value in (layer.parameters, layer.flops_forward, layer.flops_backward)]
    return (
        layer.name,
        layer.type,
        "×".join(f"{size:g}" for size in layer.output_shape),
        str(layer.repeat) if layer.repeat > 1 else "",
        *figures,
        engineering(layer.bytes_forward, "B"),
        f"{layer.intensity:.1f}",
        engineering(layer.saved_bytes, "B"),
    )


# collective


def collective(study: CollectiveStudy) -> RenderableType:
    """The algorithm that is chosen, all of them, and where the choice changes with the payload."""
    table = grid("", ("algorithm", "steps", "time", "algorithm GB/s", "bus GB/s", "over its lower bound", ""))
    for row in study.rows:
        rates = (f"{row.algorithm_bandwidth / GIGA:.4g}", f"{row.bus_bandwidth / GIGA:.4g}")
        mark = "chosen" if row is study.best else "" if row.automatic else _why_not(row)
        figures = f"{row.steps:,.0f}", duration(row.time), *rates, f"{row.times_lower_bound:.2f}×"
        table.add_row(row.algorithm, *figures, mark)
    return Group(_choice(study), table, Text(), prose(_changes(study)), _levels(study))


def _choice(study: CollectiveStudy) -> Text:
    """What is asked, the chosen algorithm, and faster ones that are not chosen."""
    best, size = study.best, engineering(study.payload_bytes, "B")
    head = Text(f"{study.operation} of {size} over {study.ranks} ranks of {study.system.name}\n", style="bold")
    helped = "with the help of switches" if best.in_network else "between hosts"
    chosen = f"{study.chooser} chooses {best.algorithm}" if study.chooser else f"best: {best.algorithm}"
    head.append(f"{chosen}, {duration(best.time)}; no algorithm {helped} can take less than ")
    head.append(f"{duration(study.lower_bound)}\n")
    for row in study.passed_over:
        reason = f"{study.chooser} {'takes for other payloads or groups' if row.candidate else 'does not have'}"
        head.append(f"faster, but not chosen: {row.algorithm}, {duration(row.time)}, which {reason}\n")
    head.append(f"Calibration: {study.calibration}\n", style="dim")
    return head


def _why_not(row: AlgorithmRow) -> str:
    return "not chosen here" if row.candidate else "only by name"


def _changes(study: CollectiveStudy) -> str:
    """The chosen algorithms by payload."""
    if not study.crossovers:
        chosen = study.best.algorithm
        words = f"{study.chooser} chooses {chosen}" if study.chooser else f"{chosen} is the fastest"
        return f"{words} for every payload.\n"
    steps = [f"{crossover.above} from {engineering(crossover.payload_bytes, 'B')}" for crossover in study.crossovers]
    words = f"{study.chooser} chooses by payload" if study.chooser else "Fastest by payload"
    return f"{words}: {study.crossovers[0].below}, {', '.join(steps)}.\n"


def _levels(study: CollectiveStudy) -> Table:
    table = grid("Levels of the group, inner to outer", ("level", "fan-out", "latency", "bandwidth of a unit"))
    for span in study.spans:
        latency = span.level.link.latency
        table.add_row(
            f"{span.level.name} ({span.level.link.name})", f"{span.fan_out}",
            "not stated" if latency is None else duration(latency), engineering(span.bandwidth, "B/s"),
        )  # fmt: skip
    return table


# list and show


def catalog(kind: str, entries: Mapping[str, str]) -> RenderableType:
    """The names of one kind, each with a one-line description."""
    table = grid(f"{len(entries)} {kind}", ("name", "what it is"), left=2)
    for name, line in entries.items():
        table.add_row(name, line)
    return Constrain(table, TEXT_WIDTH)


def _utilisation(prediction: Prediction) -> str:
    """MFU, with the dtype of its peak below 16 bits, and HFU where devices compute more than the network asks for."""
    model, hardware = percent(prediction.mfu), percent(prediction.hfu)
    peak = f" of {prediction.plan.dtype}" if prediction.plan.dtype in ("fp8", "fp4") else ""
    return f"MFU {model}{peak}" + (
        f" (HFU {hardware})" if prediction.hfu > prediction.mfu and hardware != model else ""
    )


def described(title: str, rows: Sequence[Fact], fields: Sequence[Setting]) -> Iterable[RenderableType]:
    """The facts of one entry of the catalog, and a table of its fields if it has any."""
    yield facts(title, rows)
    if fields:
        yield settings(fields)


def settings(rows: Sequence[Setting]) -> RenderableType:
    """The fields of a profile, those that differ from their defaults in bold."""
    table = grid("", ("field", "value", "default", "meaning"), left=4)
    for field, value, default, meaning in rows:
        table.add_row(field, Text(value, style="" if value == default else "bold"), default, meaning)
    return table


def facts(title: str, rows: Sequence[Fact]) -> RenderableType:
    """The fields of one entry of the catalog, line by line."""
    table = grid(title, ("", ""), left=2)
    table.show_header = False
    for name, value in rows:
        table.add_row(name, value)
    return Constrain(table, TEXT_WIDTH)
