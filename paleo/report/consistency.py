"""A run under its consistency model, as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.learning.staleness import RESNET32
from paleo.report.grid import grid
from paleo.report.tables import percent, prose
from paleo.units import duration, gibibytes

if TYPE_CHECKING:
    from paleo.studies.consistency import ConsistencyStudy

NO_VERDICT = (
    "What staleness does to the loss is not predicted: no law of it holds across networks. Measured once, at the "
    f"learning rate of one worker: {RESNET32.words}."
)


def table(study: ConsistencyStudy) -> RenderableType:
    """The study as a table of figures for the terminal."""
    facts, cycle = grid("Consistency", ["what", "figure"], left=2), study.cycle
    synchronous = float(study.synchronous.step)
    facts.add_row("model", f"{study.prediction.run.consistency}: {study.model.summary}")
    facts.add_row("step of a worker", f"{duration(float(cycle.step))}, synchronous {duration(synchronous)}")
    facts.add_row("updates of the model", f"{float(cycle.updates_per_s):,.3g} a second")
    facts.add_row("samples", f"{study.samples_per_s:,.0f} a second")
    facts.add_row("exchange and waiting", duration(float(cycle.exposed)))
    mean, deviation = float(cycle.staleness_mean), float(cycle.staleness_sd)
    facts.add_row("staleness", f"{mean:.3g} updates on average, deviation {deviation:.3g}")
    if study.served:
        facts.add_row(
            "server", f"{percent(float(cycle.utilization))} busy; the limit from {float(cycle.knee):.3g} workers on"
        )
    if float(cycle.extra_memory) > 0:
        facts.add_row("memory beside a synchronous run", gibibytes(float(cycle.extra_memory)))
    if study.model.exact:
        return facts
    return Group(facts, Text(), prose(NO_VERDICT))
