"""Systems side by side, as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.grid import Pasted, grid
from paleo.report.tables import (
    CYCLE,
    ELECTRICITY_ALONE,
    NONE,
    TEXT_WIDTH,
    cycle_figures,
    energy,
    money,
    percent,
    prose,
    rate,
)
from paleo.studies.launch import estimate_command
from paleo.units import duration, gibibytes, shortest

if TYPE_CHECKING:
    from rich.table import Table

    from paleo.studies.comparison import Candidate, Comparison, Objective

    Winners: TypeAlias = Mapping[Objective, Candidate | None]

#: What the best is called by each objective, and of which systems that is said where others have no such figure.
WINNERS: dict[Objective, tuple[str, str]] = {
    "time": ("fastest", "of those with a time"),
    "cost": ("cheapest", "of those with a price"),
    "energy": ("least energy", "of those whose design power is known"),
}


def compare(comparison: Comparison) -> RenderableType:
    """Systems side by side, the best of each kind marked with a star."""
    best: Winners = {objective: comparison.best(objective) for objective in WINNERS}
    winners = [
        f"{_title(comparison, objective)}: {_machines(candidate)}"
        for objective, candidate in best.items()
        if candidate is not None
    ]
    head = (
        f"{comparison.amount.words}. {_sentence('; '.join(winners)) or 'It fits none of them'}.{_doubts(comparison)}\n"
    )
    parts: list[RenderableType] = [prose(Text(head, style="bold")), _table(comparison, best), Text()]
    parts += [prose(sentence) for sentence in map(_remedy, comparison.candidates) if sentence]
    parts.append(prose(Text("\n".join(_notes(comparison)), style="dim")))
    return Group(*parts, *(_commands(comparison) if comparison.searched else ()))


def _table(comparison: Comparison, best: Winners) -> Table:
    """A row for each system; columns of a consistency model and of strategies where candidates have any."""
    columns = "system", "GPUs", "step time", "samples/s", "speedup", "memory", "USD/h", "time", "cost", "energy"
    studied = any(candidate.consistency is not None for candidate in comparison.candidates)
    strategies = {_strategy(each) for each in comparison.candidates if each.prediction is not None}
    table = grid("", (*columns, *(CYCLE[:3] if studied else ()), *(("strategy",) if len(strategies) > 1 else ())))
    trained = [(each.step_time or 0.0, each.training.time) for each in comparison.candidates if each.training]
    like = shortest(step for step, _ in trained), shortest(whole for _, whole in trained)
    for candidate in comparison.candidates:
        cycle = cycle_figures(candidate.consistency)[:3] if studied else ()
        strategy = (_strategy(candidate),) if len(strategies) > 1 else ()
        table.add_row(*_candidate(comparison, candidate, best, *like), *cycle, *strategy)
    return table


def _notes(comparison: Comparison) -> Iterator[str]:
    """What stands below the table: batches, prices, what is not known, formats, warnings, failures."""
    yield from (*_batches(comparison), *_intervals(comparison), *prices(comparison), *_unknown(comparison))
    candidates = comparison.candidates
    yield from (f"{each.system.name}: {each.problem}" for each in candidates if each.problem)
    formats = {each.system.name: each.prediction.plan.dtype for each in candidates if each.prediction}
    if len(set(formats.values())) > 1:
        yield f"In different formats: {', '.join(f'{name} {dtype}' for name, dtype in formats.items())}."
    yield "* best of those that fit. Energy: modelled from the work of the GPUs; hosts and building as far as stated."
    yield from _warnings(comparison)
    failing = {each.name: each.training.goodput for each in candidates if each.training is not None}
    shares = [f"{name} {percent(run.share)}" for name, run in failing.items() if run is not None]
    if shares:
        yield f"Failures, checkpoints and restarts are in time, cost and energy; goodput: {', '.join(shares)}."


def _batches(comparison: Comparison) -> Iterator[str]:
    """The global batch of all systems, or of each."""
    steps = {each.name: each.prediction for each in comparison.candidates if each.prediction is not None}
    batches = {name: step.plan.global_batch for name, step in steps.items()}
    if len(set(batches.values())) == 1:
        yield f"Global batch of {next(iter(batches.values())):,} on every system."
    else:
        yield f"Global batches differ: {', '.join(f'{name} {batch:,}' for name, batch in batches.items())}."


def _commands(comparison: Comparison) -> Iterator[RenderableType]:
    """What shows each step again where every system has a plan of its own: a strategy is not the whole of it."""
    for candidate in comparison.candidates:
        if candidate.prediction is not None:
            step = candidate.prediction
            command = estimate_command(step.model, step.system, step.run)
            yield Pasted(f"Show {candidate.name} again", command, TEXT_WIDTH)


def _title(comparison: Comparison, objective: Objective) -> str:
    """What the best is called: of those with a figure, where some that run have none."""
    title, known = WINNERS[objective]
    return title if not _without(comparison, objective) else f"{title} {known}"


def _doubts(comparison: Comparison) -> str:
    """Which of the best may not be the best, and before which other systems."""
    overlaps = {WINNERS[objective][0]: comparison.rivals(objective) for objective in WINNERS}
    doubts = [
        f"{title} (with {', '.join(rival.name for rival in rivals)})" for title, rivals in overlaps.items() if rivals
    ]
    return f" Not certain, as 90 % intervals overlap: {', '.join(doubts)}." if doubts else ""


def _intervals(comparison: Comparison) -> Iterator[str]:
    """The 90 % interval of the time on each system that runs."""
    trained = [(each, each.training) for each in comparison.candidates if each.runs and each.training is not None]
    like = shortest(end for _, bill in trained for end in bill.interval)
    ends = [f"{each.name} {' to '.join(duration(end, like=like) for end in bill.interval)}" for each, bill in trained]
    if ends:
        yield f"90 % interval of the time: {'; '.join(ends)}."


def _without(comparison: Comparison, objective: Objective) -> list[str]:
    """Systems that run without a figure of an objective."""
    runs = [candidate for candidate in comparison.candidates if candidate.runs]
    return [each.system.name for each in runs if getattr(each.training, objective) is None]


def _warnings(comparison: Comparison) -> Iterator[str]:
    """Each warning once, with the systems that it is of."""
    systems: dict[str, list[str]] = {}
    for candidate in comparison.candidates:
        for warning in () if candidate.prediction is None else candidate.prediction.warnings:
            systems.setdefault(warning, []).append(candidate.name)
    yield from (f"Warning ({', '.join(dict.fromkeys(names))}): {text}" for text, names in systems.items())


def _unknown(comparison: Comparison) -> Iterator[str]:
    """A sentence for each figure that some systems do not have."""
    if names := _without(comparison, "cost"):
        yield f"No price is known of {', '.join(names)}; state one: --price {names[0]}=2.5 (USD an hour for each GPU)."
    bills = [each.training for each in comparison.candidates if each.runs and each.training is not None]
    if any(bill.rent is None and bill.electricity is not None for bill in bills):
        yield f"Cost is electricity; rent is {ELECTRICITY_ALONE}."
    if names := _without(comparison, "energy"):
        yield f"No design power is known of {', '.join(names)}: no energy is modelled."


def prices(comparison: Comparison) -> list[str]:
    """Where each price is from, once for all systems that have it."""
    systems: dict[str, list[str]] = {}
    for candidate in comparison.candidates:
        if candidate.training is not None and candidate.training.price is not None:
            price = candidate.training.price
            systems.setdefault(f"{price.date}, {price.source}", []).append(candidate.system.name)
    return [f"Price of {', '.join(dict.fromkeys(names))}: {source}" for source, names in systems.items()]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _machines(candidate: Candidate) -> str:
    """The system of a candidate, and how many of its GPUs."""
    prediction = candidate.prediction
    return candidate.system.name if prediction is None else candidate.system.share(prediction.plan.gpus)


def _strategy(candidate: Candidate) -> str:
    """What divides the work beside the batch, which all have."""
    if candidate.prediction is None:
        return NONE
    parts = candidate.prediction.plan.strategy.split(",")
    return ",".join(part for part in parts if not part.startswith("dp")) or "dp"


def _remedy(candidate: Candidate) -> str:
    """The fastest change that would make a system's run fit; nothing where none is known."""
    if not candidate.advice or candidate.prediction is None:
        return ""
    machines, best = candidate.system.share(candidate.prediction.plan.gpus), candidate.advice[0]
    step, size = duration(best.prediction.step_time), gibibytes(best.prediction.memory.total)
    if best.fits:
        return f"{machines}: with {best.change} it fits ({step} a step, {size})."
    return (
        f"{machines}: nothing that was tried fits; nearest {best.change}, {size}. More GPUs: paleo plan --gpus 8,16,32."
    )


def _candidate(comparison: Comparison, candidate: Candidate, best: Winners, *like: float | None) -> tuple[str, ...]:
    """Figures of a candidate, with its step and its training in the units of the figures ``like``."""
    prediction, training = candidate.prediction, candidate.training
    if prediction is None or training is None:
        return (candidate.system.name, *[NONE] * 9)
    marks = {objective: " *" if winner is candidate else "" for objective, winner in best.items()}
    memory = f"{percent(prediction.memory.total / prediction.memory.capacity)}"
    return (
        candidate.system.name,
        str(prediction.plan.gpus),
        duration(candidate.step_time or 0.0, like=like[0]),
        rate(candidate.samples_per_s or 0.0),
        f"{comparison.speedup(candidate):.2f}",
        memory if prediction.memory.fits else f"{memory}: does not fit",
        NONE if training.price_per_hour is None else f"{training.price_per_hour:,.2f}",
        duration(training.time, like=like[1]) + marks["time"],
        money(training.cost) + marks["cost"],
        energy(training.energy_kwh) + marks["energy"],
    )
