"""What a search found, as a table and as a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paleo.report.documents import Document
from paleo.report.tables import grid, prose
from paleo.units import counted, duration, gibibytes

if TYPE_CHECKING:
    from paleo.search.hybrid import Hybrid
    from paleo.search.plans import Explanation, Search
    from paleo.studies.modes import ModeSearch
from paleo.search.ranking import PlanRow


def document(model: str, system: str, ranking: Search, explanation: Explanation | None) -> Document:
    """Plans, best first; ``pareto`` holds those that no other beats in both time and memory."""
    shown: Document = {
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
        shown["explanation"] = explanation.text
        shown["step_time_interval_s"] = list(explanation.winner.interval)
    return shown


def _plan(row: PlanRow) -> Document:
    return {
        "gpus": row.gpus,
        "strategy": row.strategy,
        "microbatch": row.microbatch,
        "recompute": row.recompute,
        "schedule": row.schedule,
        "expert_dispatch": row.run.expert_dispatch or "default",
        "overlapped": row.overlapped,
        "step_time_s": row.step_time,
        "memory_bytes": row.memory,
        "fits": row.fits,
    }


def table(model: str, system: str, ranking: Search, explanation: Explanation | None) -> RenderableType:
    """The best plans, the front, and why the first one wins."""
    searched = counted(ranking.configurations, "configuration")
    head = (
        f"{model} on {system}, global batch {ranking.global_batch}: {searched} in "
        f"{duration(ranking.seconds)}, {ranking.fitting:,} fit. Best by {ranking.objective}.\n"
    )
    parts: list[RenderableType] = [prose(Text(head, style="bold")), _plans("Best plans", ranking.plans)]
    if len(ranking.front) > 1:
        shown = _spread(ranking.front)
        some = "" if len(shown) == len(ranking.front) else f" ({len(shown)} of {len(ranking.front)})"
        parts.append(_plans(f"No other is better in both time and memory{some}", shown))
    if explanation is not None:
        parts += [Text(), prose(Text(explanation.text))]
    return Group(*parts)


def _spread(rows: Sequence[PlanRow]) -> Sequence[PlanRow]:
    """At most `_SHOWN` of them, both ends and evenly between."""
    if len(rows) <= _SHOWN:
        return rows
    return [rows[round(i * (len(rows) - 1) / (_SHOWN - 1))] for i in range(_SHOWN)]


_SHOWN = 10


def _plans(title: str, rows: Sequence[PlanRow]) -> Table:
    columns = ("strategy", "recompute", "schedule", "GPUs", "microbatch", "step time", "memory", "fits")
    shown = grid(title, columns, left=3)
    chosen = any(row.run.expert_dispatch is not None for row in rows)
    for row in rows:
        schedule = f"{_schedule(row)}, {row.run.expert_dispatch or 'default'} dispatch" if chosen else _schedule(row)
        figures = (str(row.gpus), str(row.microbatch), duration(row.step_time), gibibytes(row.memory))
        shown.add_row(row.strategy, row.recompute, schedule, *figures, "yes" if row.fits else "no")
    return shown


def _schedule(row: PlanRow) -> str:
    """The order of a pipeline, and when gradients travel."""
    if row.schedule == "none":
        return "overlapped" if row.overlapped else "after backward"
    return f"{row.schedule}, overlapped" if row.overlapped else row.schedule


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
    text = f"{model} on {system}: {duration(splits.seconds)} a step, data parallelism alone is {gain:.1%} slower.\n"
    shown = grid("Split of each layer", ("layer", "split by"), left=2)
    for name, split in splits.layers:
        shown.add_row(name, split)
    return Group(prose(Text(text, style="bold")), shown)


def modes_document(model: str, system: str, searched: ModeSearch) -> Document:
    """Plans over consistency models and compressions, best first."""
    return {
        "model": model,
        "system": system,
        "objective": "time",
        "global_batch_size": searched.global_batch,
        "configurations": searched.configurations,
        "seconds": searched.seconds,
        "staleness_cost": searched.price.each,
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
    """The same for people."""
    price = searched.price
    cost = f"{price.each:g} samples for each update" if price.each is not None else f"noise scale {price.noise_scale:g}"
    head = (
        f"{model} on {system}, global batch {searched.global_batch}: "
        f"{counted(searched.configurations, 'configuration')} in {duration(searched.seconds)}. "
        f"Best by time, stale updates priced: {cost}.\n"
    )
    columns = ("consistency", "gradients", "strategy", "GPUs", "microbatch", "step", "staleness", "samples", "per step")
    shown = grid("", columns, left=3)
    for each in searched.plans:
        figures = f"{each.staleness:.3g}", f"x {each.samples_factor:.3g}", duration(each.effective)
        names = each.consistency, each.compress or "dense", each.plan.strategy
        shown.add_row(*names, str(each.plan.gpus), str(each.plan.microbatch), duration(each.step_time), *figures)
    notes = ["'per step': for what a synchronous step learns, more samples counted.", *searched.refused]
    return Group(prose(Text(head, style="bold")), shown, Text(), prose(Text("\n".join(notes), style="dim")))
