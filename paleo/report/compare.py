"""Systems compared on one run, as a document and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.launch.jobs import estimate_command
from paleo.parallel.placement import without_data_parallel_degree
from paleo.report.columns import (
    EMPTY_CELL,
    AnswerColumn,
    Document,
    ShellCommandText,
    format_energy,
    format_usd,
    percent,
    rows_table,
    wrapped_text,
)
from paleo.report.estimate import OWNED_MACHINES_TEXT, consistency_model_json, prediction_document, training_document
from paleo.report.scale import CONSISTENCY_COLUMNS
from paleo.studies.defaults import RunWithDefaults
from paleo.units import common_unit_time, format_duration, format_gibibytes

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.studies.purchase import ComparedSystem, Objective, SystemComparison

    Winners: TypeAlias = Mapping[Objective, ComparedSystem | None]

#: Objective -> what the best is called, and of which systems that is said where others have no value.
_WINNERS: dict[Objective, tuple[str, str]] = {
    "time": ("fastest", "of those with a time"),
    "cost": ("cheapest", "of those with a price"),
    "energy": ("least energy", "of those with a known design power"),
}


def json_document(comparison: SystemComparison, choices: Mapping[str, RunWithDefaults] | None = None) -> Document:
    """Return the answer of ``paleo compare`` as a JSON document.

    ``best`` names the best system that fits by each objective, ``not_certain`` the systems whose 90 % intervals overlap
    with its interval.

    Parameters
    ----------
    comparison : SystemComparison
        The same run on several systems.
    choices : mapping of str to RunWithDefaults, optional
        Software and plan that were chosen for each system (``name:gpus``), with reasons.

    Returns
    -------
    Document
        Dict of plain values, times in seconds, one entry per system.
    """
    choices = choices or {}
    best = {objective: comparison.best(objective) for objective in _WINNERS}
    models = [each.prediction.model.name for each in comparison.candidates if each.prediction is not None]
    rivals = {objective: comparison.overlapping_candidates(objective) for objective in _WINNERS}
    return {
        "model": models[0],
        "amount": comparison.amount.description,
        "samples": comparison.amount.samples,
        "best": {objective: None if each is None else each.system.name for objective, each in best.items()},
        "not_certain": {objective: [rival.system.name for rival in near] for objective, near in rivals.items()},
        "systems": [_candidate(comparison, each, choices.get(each.name)) for each in comparison.candidates],
    }


def _candidate(comparison: SystemComparison, candidate: ComparedSystem, choice: RunWithDefaults | None) -> Document:
    if candidate.prediction is None or candidate.training is None:
        return {"system": candidate.system.name, "error": candidate.problem}
    cycle = {} if candidate.consistency is None else {"consistency": consistency_model_json(candidate.consistency)}
    return {
        **prediction_document(candidate.prediction, candidate.training),
        **cycle,
        "training": training_document(candidate.training),
        "device": candidate.system.device.name,
        "software": candidate.prediction.run.software,
        "reasons": (choice or RunWithDefaults(candidate.prediction.run)).reasons,
        "speedup": comparison.speedup(candidate),
        "error": None,
    }


def table(comparison: SystemComparison, choices: Mapping[str, RunWithDefaults] | None = None) -> RenderableType:
    """Return the answer of ``paleo compare`` as tables, the best of each kind with a star.

    Parameters
    ----------
    comparison : SystemComparison
        The same run on several systems.
    choices : mapping of str to RunWithDefaults, optional
        Software and plan that were chosen, with reasons.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    best: Winners = {objective: comparison.best(objective) for objective in _WINNERS}
    winners = []
    for objective, candidate in best.items():
        if candidate is not None:
            title, known = _WINNERS[objective]
            title = f"{title} {known}" if _systems_without_value(comparison, objective) else title
            system, step = candidate.system, candidate.prediction
            winners.append(f"{title}: {system.gpus_and_nodes_text(step.plan.gpus) if step else system.name}")
    doubts = []
    for objective, (title, _) in _WINNERS.items():
        if rivals := comparison.overlapping_candidates(objective):
            doubts.append(f"{title} (with {', '.join(rival.name for rival in rivals)})")
    head = "; ".join(winners) or "it fits none of them"
    head = f"{comparison.amount.description}. {head[:1].upper()}{head[1:]}."
    head += f" Not certain, as 90 % intervals overlap: {', '.join(doubts)}." if doubts else ""
    rows = rows_table("", _columns(comparison, best), comparison.candidates)
    lines = dict.fromkeys(filter(None, (each.automatic_choices_text for each in (choices or {}).values())))
    parts: list[RenderableType] = [*map(wrapped_text, lines), *([Text()] if lines else [])]
    parts += [wrapped_text(Text(f"{head}\n", style="bold")), rows, Text()]
    parts += [wrapped_text(sentence) for sentence in map(_remedy, comparison.candidates) if sentence]
    parts.append(wrapped_text(Text("\n".join(_notes(comparison)), style="dim")))
    for name, step in _predictions(comparison).items() if comparison.searched else ():
        command = estimate_command(step.model, step.system, step.run)
        parts.append(ShellCommandText(f"Reproduce {name}", command))
    return Group(*parts)


def _predictions(comparison: SystemComparison) -> dict[str, Prediction]:
    return {each.name: each.prediction for each in comparison.candidates if each.prediction is not None}


def _columns(comparison: SystemComparison, best: Winners) -> Iterator[AnswerColumn]:
    """Yield the columns of the table of systems; strategies have a column only if they differ between systems."""
    trained = [candidate for candidate in comparison.candidates if candidate.training is not None]
    like = common_unit_time(candidate.training.time for candidate in trained if candidate.training)

    def column(title: str, unit: str, get: Any) -> AnswerColumn:
        return AnswerColumn("", lambda each: get(each, each.prediction) if each.training else None, title, unit)

    def starred(title: str, objective: Objective, text: Any) -> AnswerColumn:
        def cell(each: Any) -> str | None:
            return text(each.training) + (" *" if best[objective] is each else "") if each.training else None

        return AnswerColumn("", cell, title, "words")

    def memory(each: Any) -> str | None:
        if each.prediction is None:
            return None
        share = percent(each.prediction.memory.total / each.prediction.memory.capacity)
        return share if each.prediction.memory.fits else f"{share}: does not fit"

    yield AnswerColumn("", lambda each: each.system.name, "system")
    yield column("GPUs", "count", lambda each, step: step.plan.gpus)
    yield column("step time", "s", lambda each, step: each.step_time)
    yield column("samples/s", "1/s", lambda each, step: each.samples_per_s)
    yield column("speedup", "ratio", lambda each, step: comparison.speedup(each))
    yield AnswerColumn("", memory, "memory", "words")
    yield column("USD/h", "price", lambda each, step: each.training.price_per_hour)
    yield starred("time", "time", lambda training: format_duration(training.time, like=like))
    yield starred("cost", "cost", lambda training: format_usd(training.cost))
    yield starred("energy", "energy", lambda training: format_energy(training.energy_kwh))
    if any(candidate.consistency is not None for candidate in comparison.candidates):
        yield from CONSISTENCY_COLUMNS[:3]
    if len({_strategy(each) for each in trained}) > 1:
        yield AnswerColumn("", _strategy, "strategy", "words")


def _strategy(candidate: ComparedSystem) -> str:
    """Return the strategy of a system's plan without the data-parallel degree; an empty cell without a plan."""
    if candidate.prediction is None:
        return EMPTY_CELL
    return without_data_parallel_degree(candidate.prediction.plan.strategy_text)


def _notes(comparison: SystemComparison) -> Iterator[str]:
    """Yield the sentences printed below the table: batches, intervals, prices, formats, warnings, failures."""
    candidates = comparison.candidates
    batches = {name: step.plan.global_batch for name, step in _predictions(comparison).items()}
    if len(set(batches.values())) == 1:
        yield f"Global batch of {next(iter(batches.values())):,} on every system."
    else:
        yield f"Global batches differ: {', '.join(f'{name} {batch:,}' for name, batch in batches.items())}."
    trained = [(each, each.training) for each in candidates if each.fits and each.training is not None]
    like = common_unit_time(end for _, bill in trained for end in bill.interval)
    spoken = ((each.name, [format_duration(end, like=like) for end in bill.interval]) for each, bill in trained)
    if ends := [f"{name} {' to '.join(texts)}" for name, texts in spoken]:
        yield f"90 % interval of the time: {'; '.join(ends)}."
    yield from _price_source_sentences(comparison)
    # A sentence for each quantity that some systems lack.
    if names := _systems_without_value(comparison, "cost"):
        yield f"No price is known for {', '.join(names)}; give one with --price {names[0]}=2.5 (USD an hour per GPU)."
    if any(bill.rent is None and bill.electricity is not None for _, bill in trained):
        yield f"Cost is electricity; rent is {OWNED_MACHINES_TEXT}."
    if names := _systems_without_value(comparison, "energy"):
        yield f"No design power is known for {', '.join(names)}: no energy is modelled."
    yield from (f"{each.system.name}: {each.problem}" for each in candidates if each.problem)
    formats = {each.system.name: each.prediction.plan.dtype for each in candidates if each.prediction}
    if len(set(formats.values())) > 1:
        yield f"Number formats differ: {', '.join(f'{name} {dtype}' for name, dtype in formats.items())}."
    yield "* best of those that fit. Energy is modelled from the work of the GPUs; hosts and PUE as given."
    # Collect the systems of each warning.
    systems: dict[str, list[str]] = {}
    for name, step in _predictions(comparison).items():
        for warning in dict.fromkeys(step.warnings):
            systems.setdefault(warning, []).append(name)
    yield from (f"Warning ({', '.join(names)}): {text}" for text, names in systems.items())
    failing = {each.name: each.training.long_run for each in candidates if each.training is not None}
    if shares := [f"{name} {percent(run.goodput)}" for name, run in failing.items() if run is not None]:
        yield f"Time, cost and energy include failures, checkpoints and restarts; goodput: {', '.join(shares)}."


def _systems_without_value(comparison: SystemComparison, objective: Objective) -> list[str]:
    """Return the systems that run, but whose value for an objective is unknown."""
    runs = [candidate for candidate in comparison.candidates if candidate.fits]
    return [each.system.name for each in runs if getattr(each.training, objective) is None]


def _price_source_sentences(comparison: SystemComparison) -> list[str]:
    """Return sentences that say where the rents of systems come from; systems with the same source share a sentence.

    Parameters
    ----------
    comparison : SystemComparison
        The same run on several systems.

    Returns
    -------
    list of str
        Sentences.
    """
    systems: dict[str, list[str]] = {}
    for candidate in comparison.candidates:
        if candidate.training is not None and candidate.training.price is not None:
            price = candidate.training.price
            systems.setdefault(f"{price.date}, {price.source}", []).append(candidate.system.name)
    return [f"Price of {', '.join(dict.fromkeys(names))}: {source}" for source, names in systems.items()]


def _remedy(candidate: ComparedSystem) -> str:
    """Return the fastest change that would make a system's run fit in memory; empty where none is known."""
    if not candidate.advice or candidate.prediction is None:
        return ""
    machines, best = candidate.system.gpus_and_nodes_text(candidate.prediction.plan.gpus), candidate.advice[0]
    step, size = format_duration(best.prediction.step_time), format_gibibytes(best.prediction.memory.total)
    if best.fits:
        return f"{machines}: with {best.change} it fits ({step} a step, {size})."
    nearest = f"nearest {best.change}, {size}. More GPUs: paleo plan --gpus 8..32."
    return f"{machines}: no change that was tried fits; {nearest}"
