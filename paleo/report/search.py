"""What a search found, as a table and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paleo.predict import HEADROOM
from paleo.report.grid import Pasted, grid
from paleo.report.tables import TEXT_WIDTH, percent, pieces, prose, rate, tenths
from paleo.studies.launch import estimate_command
from paleo.units import counted, duration, gibibytes, shortest

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.report.documents import Document
    from paleo.search.hybrid import Hybrid
    from paleo.search.plans import Explanation, Search
    from paleo.search.ranking import PlanRow
    from paleo.studies.modes import ModeSearch


def document(model: str, system: str, ranking: Search, explanation: Explanation | None) -> Document:
    """Plans, best first; ``pareto`` holds those that no other beats in both time and memory."""
    fields: Document = {
        "model": model,
        "system": system,
        "objective": ranking.objective,
        "global_batch_size": ranking.global_batch,
        "configurations": ranking.configurations,
        "fitting": ranking.fitting,
        "seconds": ranking.seconds,
        "plans": [_plan(row) for row in ranking.plans],
        "pareto": [_plan(row) for row in ranking.front],
    }
    if explanation is not None:
        fields["explanation"] = explanation.text
        fields["step_time_interval_s"] = list(explanation.winner.interval)
    return fields


def _plan(row: PlanRow) -> Document:
    return {
        "gpus": row.gpus,
        "strategy": row.strategy,
        "microbatch": row.microbatch,
        "recompute": row.recompute,
        "schedule": row.schedule,
        "cut": list(row.run.cut) if isinstance(row.run.cut, tuple) else row.run.cut,
        "expert_dispatch": row.run.expert_dispatch or "default",
        "overlapped": row.overlapped,
        "step_time_s": row.step_time,
        "memory_bytes": row.memory,
        "fits": row.fits,
    }


#: Why a faster plan may stand behind the first.
TIGHT = f"Plans that leave less than {100 * HEADROOM:.0f} % of the memory free stand behind all others."


def table(ranking: Search, lead: Prediction, explanation: Explanation | None) -> RenderableType:
    """The best plan in a sentence, the others, the front, and why the first one wins; ``lead`` is its step."""
    searched = counted(ranking.configurations, "configuration")
    head = (
        f"{lead.model.name} on {lead.system.name}, global batch {ranking.global_batch}: {searched} in "
        f"{duration(ranking.seconds)}, {ranking.fitting:,} fit. Best by {ranking.objective}:\n"
    )
    parts: list[RenderableType] = [
        prose(Text(head + _first_plan(lead), style="bold")),
        _plans("Best plans", ranking.plans),
    ]
    room = (1.0 - HEADROOM) * lead.memory.capacity
    if lead.memory.total <= room < max((row.memory for row in ranking.plans if row.fits), default=0.0):
        parts.append(prose(TIGHT))
    if len(ranking.front) > 1:
        front = _spread(ranking.front)
        portion = "" if len(front) == len(ranking.front) else f" ({len(front)} of {len(ranking.front)})"
        parts += [Text(), _plans(f"No other is better in both time and memory{portion}", front)]
    if explanation is not None:
        parts += [Text(), prose(Text(explanation.text))]
    parts += [prose(f"Warning: {warning}") for warning in lead.warnings]
    command = estimate_command(lead.model, lead.system, lead.run)
    return Group(*parts, Text(), Pasted("Show it again", command, TEXT_WIDTH))


def _first_plan(lead: Prediction) -> str:
    """The first plan in a sentence."""
    low, high = map(duration, lead.interval)
    rates = f"{rate(lead.samples_per_s)} samples/s"
    rates += "" if lead.tokens_per_s is None else f", {rate(lead.tokens_per_s)} tokens/s"
    step = f"{duration(lead.step_time)} a step (90 %: {low} to {high}), {rates}, MFU {percent(lead.mfu)}"
    fits = "" if lead.memory.fits else "; nothing fits into memory, this comes nearest"
    return f"{lead.plan.strategy or 'dp'} on {counted(lead.plan.gpus, 'GPU')}: {step}{fits}.\n"


def _spread(rows: Sequence[PlanRow]) -> Sequence[PlanRow]:
    """At most `_SHOWN` of them, both ends and evenly between."""
    if len(rows) <= _SHOWN:
        return rows
    return [rows[round(i * (len(rows) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]


_SHOWN = 10


def _plans(title: str, rows: Sequence[PlanRow]) -> Table:
    """Plans line by line; counts of GPUs where they differ, and which fit where some do not."""
    counts, fits = len({row.gpus for row in rows}) > 1, not all(row.fits for row in rows)
    columns = ["strategy", "recompute", "schedule", *(["GPUs"] if counts else []), "microbatch", "step time", "memory"]
    listing = grid(title, [*columns, *(["fits"] if fits else [])], left=3)
    chosen = any(row.run.expert_dispatch is not None for row in rows)
    like = shortest(row.step_time for row in rows)
    for row in rows:
        schedule = f"{_schedule(row)}, {row.run.expert_dispatch or 'default'} dispatch" if chosen else _schedule(row)
        figures = [str(row.microbatch), duration(row.step_time, like=like), gibibytes(row.memory)]
        figures = [*([str(row.gpus)] if counts else []), *figures, *(["yes" if row.fits else "no"] if fits else [])]
        listing.add_row(row.strategy, row.recompute, schedule, *figures)
    return listing


def _schedule(row: PlanRow) -> str:
    """The order of a pipeline, and when gradients travel."""
    if row.schedule == "none":
        return "overlapped" if row.overlapped else "after backward"
    cut = [pieces(row.run.cut)] if isinstance(row.run.cut, tuple) else []
    return ", ".join([row.schedule, *(["overlapped"] if row.overlapped else []), *cut])


def hybrid_document(model: str, system: str, splits: Hybrid) -> Document:
    """The split of each layer, and the step beside data parallelism."""
    return {
        "model": model,
        "system": system,
        "step_time_s": splits.seconds,
        "data_parallel_s": splits.data_parallel_seconds,
        "layers": [{"name": name, "split": split} for name, split in splits.layers],
    }


def hybrid_table(model: str, system: str, splits: Hybrid) -> RenderableType:
    """The split of each layer."""
    gain = splits.data_parallel_seconds / splits.seconds - 1.0
    text = f"{model} on {system}: {duration(splits.seconds)} a step, data parallelism alone is {tenths(gain)} slower.\n"
    listing = grid("Split of each layer", ("layer", "split by"), left=2)
    for name, split in splits.layers:
        listing.add_row(name, split)
    return Group(prose(Text(text, style="bold")), listing)


def modes_document(model: str, system: str, searched: ModeSearch) -> Document:
    """Plans over consistency models and compressions, best first."""
    return {
        "model": model,
        "system": system,
        "objective": "time",
        "global_batch_size": searched.global_batch,
        "configurations": searched.configurations,
        "seconds": searched.seconds,
        "staleness_cost": searched.price.per_update,
        "noise_scale": searched.price.noise_scale,
        "plans": [
            {
                **_plan(each.plan),
                "step_time_s": each.step_time,
                "consistency": each.consistency,
                "compress": each.compress,
                "staleness": each.staleness,
                "samples_factor": each.samples_factor,
                "effective_step_time_s": each.effective,
            }
            for each in searched.plans
        ],
        "refused": list(searched.refused),
    }


def modes_table(model: str, system: str, searched: ModeSearch) -> RenderableType:
    """Plans of a search over consistency models and compressions as a table for the terminal."""
    price = searched.price
    cost = (
        f"{price.per_update:g} samples for each update"
        if price.per_update is not None
        else f"noise scale {price.noise_scale:g}"
    )
    head = (
        f"{model} on {system}, global batch {searched.global_batch}: "
        f"{counted(searched.configurations, 'configuration')} in {duration(searched.seconds)}. "
        f"Best by time, stale updates priced: {cost}.\n"
    )
    columns = ("consistency", "gradients", "strategy", "GPUs", "microbatch", "step", "staleness", "samples", "per step")
    listing = grid("", columns, left=3)
    like = shortest(seconds for plan in searched.plans for seconds in (plan.step_time, plan.effective))
    for mode_plan in searched.plans:
        step, effective = (duration(each, like=like) for each in (mode_plan.step_time, mode_plan.effective))
        figures = f"{mode_plan.staleness:.3g}", f"x {mode_plan.samples_factor:.3g}", effective
        names = mode_plan.consistency, mode_plan.compress or "dense", mode_plan.plan.strategy
        listing.add_row(*names, str(mode_plan.plan.gpus), str(mode_plan.plan.microbatch), step, *figures)
    notes = ["'per step': for what a synchronous step learns, more samples counted.", *searched.refused]
    return Group(prose(Text(head, style="bold")), listing, Text(), prose(Text("\n".join(notes), style="dim")))
