"""The answer to a purchase, as a table and as a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.grid import Pasted, grid
from paleo.report.search import TIGHT
from paleo.report.tables import ELECTRICITY_ALONE, NONE, TEXT_WIDTH, energy, money, percent, pieces, prose
from paleo.studies.buying import finding, long, verdict
from paleo.studies.training import JOULES_PER_KWH
from paleo.units import DAY, duration

if TYPE_CHECKING:
    from paleo.report.documents import Document
    from paleo.studies.buying import Answer, PricedPlan


def document(reply: Answer) -> Document:
    """Keys that are added to the document of a search: the verdict, and what each plan takes."""
    return {
        "verdict": verdict(reply),
        "flags": reply.flags,
        "global_batch_size": reply.global_batch,
        "configurations": sum(result.configurations for _, result in reply.searches),
        "fitting": sum(result.fitting for _, result in reply.searches),
        "seconds": sum(result.seconds for _, result in reply.searches),
        "plans": [plan_document(plan) for plan in reply.plans],
        "reasons": list(reply.reasons),
    }


def plan_document(plan: PricedPlan) -> Document:
    """One plan; null where no amount or price is known."""
    row = plan.row
    return {
        "system": plan.system.name,
        "gpus": row.gpus,
        "strategy": row.strategy,
        "microbatch": row.microbatch,
        "recompute": row.recompute,
        "schedule": "1f1b" if row.schedule == "none" else row.schedule,
        "cut": list(row.run.cut) if isinstance(row.run.cut, tuple) else row.run.cut,
        "overlapped": row.overlapped,
        "step_time_s": row.step_time,
        "step_time_interval_s": list(plan.interval),
        "memory_bytes": row.memory,
        "fits": row.fits,
        "mfu": plan.mfu,
        "samples_per_s": plan.samples_per_s,
        "tokens_per_s": plan.tokens_per_s,
        "days": None if plan.seconds is None else plan.seconds / DAY,
        "usd": plan.usd,
        "kwh": None if plan.joules is None else plan.joules / JOULES_PER_KWH,
        **({} if plan.goodput is None else {"goodput": plan.goodput}),
        "command": plan.command,
    }


def table(reply: Answer) -> RenderableType:
    """The verdict first, then the plans, then what to paste."""
    parts: list[RenderableType] = [prose(Text(finding(reply) + (";" if reply.remedies else "."), style="bold"))]
    for number, remedy in enumerate(reply.remedies):
        parts.append(Pasted(f"or {remedy.words}" if number else remedy.words, remedy.command, TEXT_WIDTH))
    parts += [Text(), _plans(reply)]
    parts += [prose(note) for note in _notes(reply)]
    for reason in reply.reasons[:5]:
        parts += [Text(), prose(f"Not possible: {reason}")]
    if reply.plans:
        words = "Show it again" if reply.best else "Show the nearest"
        parts += [Text(), Pasted(words, reply.plans[0].command, TEXT_WIDTH)]
    if flags := reply.flags:
        parts += [Text(), Pasted("Start it", flags, TEXT_WIDTH)]
    return Group(*parts)


def _notes(reply: Answer) -> Iterator[str]:
    """Why a faster plan stands behind the first, of which systems no price is known, what to be wary of."""
    first, goal = reply.plans[0], reply.wish.objective
    if first.roomy and any(plan.meets(reply.wish) and plan.score(goal) < first.score(goal) for plan in reply.plans):
        yield TIGHT
    if reply.wish.amount is not None:
        names = dict.fromkeys(plan.system.name for plan in reply.plans if plan.usd is None)
        if names:
            yield f"No price is known of {', '.join(names)}; state one: --price '2.5 USD/h' (for each GPU)."
        bills = [plan.lead_training for plan in reply.plans if plan.lead_training is not None]
        if any(bill.rent is None and bill.electricity is not None for bill in bills):
            yield f"Cost is electricity; rent is {ELECTRICITY_ALONE}."
    for warning in dict.fromkeys(warning for plan in reply.plans for warning in plan.lead.warnings):
        yield f"Warning: {warning}"


def _plans(reply: Answer) -> RenderableType:
    tokens = any(plan.tokens_per_s is not None for plan in reply.plans)
    trained = reply.wish.amount is not None
    names = list(dict.fromkeys(plan.system.name for plan in reply.plans))
    several = ["system"] if len(names) > 1 else []
    columns = [*several, "strategy", "GPUs", "step time", "MFU", "tokens/s" if tokens else "samples/s"]
    failing = any(plan.goodput is not None for plan in reply.plans)
    columns += ["time", "cost", "energy"] if trained else []
    columns += ["goodput"] if failing else []
    listing = grid("Plans" if several else f"Plans on {', '.join(names)}", [*columns, "memory"], left=len(several) + 1)
    for plan in reply.plans:
        rate = plan.tokens_per_s if tokens else plan.samples_per_s
        cells = [
            *([plan.system.name] if several else []),
            _strategy(plan),
            f"{plan.row.gpus:,}",
            duration(plan.row.step_time),
            percent(plan.mfu),
        ]
        cells.append(NONE if rate is None else f"{rate:,.0f}")
        if trained:
            spent = NONE if plan.seconds is None else long(plan.seconds)
            kilowatts = None if plan.joules is None else plan.joules / JOULES_PER_KWH
            cells += [spent, money(plan.usd), energy(kilowatts)]
        if failing:
            cells.append(NONE if plan.goodput is None else percent(plan.goodput))
        share = plan.row.memory / plan.system.device.memory.usable
        listing.add_row(*cells, percent(share) if plan.row.fits else f"{percent(share)}, too much")
    return listing


def _strategy(plan: PricedPlan) -> str:
    """The strategy and the other choices of a plan, in words."""
    row = plan.row
    parts = [row.strategy or "dp", f"microbatch {row.microbatch}"]
    if row.recompute != "none":
        how, _, layers = row.recompute.partition(", ")
        parts.append(f"{how} recomputation of {layers}" if layers else f"{how} recomputation")
    if row.schedule not in ("none", "1f1b"):
        parts.append(row.schedule)
    if isinstance(row.run.cut, tuple):
        parts.append(pieces(row.run.cut))
    return ", ".join(parts)
