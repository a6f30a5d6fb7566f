"""The verdict on a log, as a table and as a document."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paleo.report.documents import Document
from paleo.report.tables import grid, percent, prose
from paleo.studies.audit import Audit, Fault
from paleo.units import duration, gibibytes

#: What a log states, as people call it.
NAMES = {
    "step": "step",
    "memory": "peak memory, allocated",
    "samples": "samples of a step",
    "compute": "forward and backward passes",
    "exchange": "exchange of gradients, waited for",
    "optimizer": "optimizer",
    "spread": "slowest rank over fastest",
    "unsteadiness": "deviation of steps",
}


def document(audit: Audit) -> Document:
    """Measured beside predicted quantities, the faults that explain them, and the step on more ranks."""
    shown: Document = {
        "model": audit.expected.model.name,
        "system": audit.expected.system.name,
        "gpus": audit.expected.plan.gpus,
        "log": audit.log.kind,
        "steps": len(audit.log.steps),
        "verdict": verdict(audit),
        "measured": dict(audit.measured),
        "predicted": {name: audit.predicted[name] for name in audit.measured},
        "step_time_s": audit.measured["step"],
        "step_time_interval_s": list(audit.interval),
        "faults": [_fault(fault) for fault in audit.faults],
        "unexplained": audit.ratio,
    }
    if audit.beyond is not None:
        gpus, seconds, interval = audit.beyond
        shown["beyond"] = {"gpus": gpus, "step_time_s": seconds, "step_time_interval_s": list(interval)}
    return shown


def _fault(fault: Fault) -> Document:
    return {
        "name": fault.name,
        "factor": fault.factor,
        "step_time_s": fault.evidence["step"],
        "advice": fault.advice,
    }


def verdict(audit: Audit) -> str:
    """One sentence."""
    measured, predicted = audit.measured["step"], audit.predicted["step"]
    seen = f"A step takes {duration(measured)}, predicted {duration(predicted)} ({measured / predicted - 1:+.0%})"
    if not audit.faults:
        low, high = audit.expected.interval
        if low <= measured <= high:
            return f"{seen}: as predicted, nothing in this log says otherwise."
        return f"{seen}: outside the interval, and no single fault that is known explains it."
    names = ", or ".join(fault.text for fault in audit.faults)
    left = f"{audit.ratio - 1:+.0%} of the step stay unexplained" if abs(audit.ratio - 1) >= 0.01 else "nothing is left"
    return f"{seen}. What explains it: {names}; {left}."


def table(audit: Audit) -> RenderableType:
    """The verdict, what was measured beside what was predicted, and what to do."""
    parts: list[RenderableType] = [prose(Text(verdict(audit), style="bold")), Text(), _quantities(audit)]
    for fault in audit.faults:
        parts += [Text(), prose(f"{fault.text}: {fault.advice}.")]
    if audit.beyond is not None:
        gpus, seconds, (low, high) = audit.beyond
        told = f"On {gpus:,} GPUs, each with as many samples: {duration(seconds)}"
        parts += [
            Text(),
            prose(f"{told} (90 % interval {duration(low)} to {duration(high)}, by this log's own steps)."),
        ]
    return Group(*parts)


def _quantities(audit: Audit) -> Table:
    explained = audit.faults[0].evidence if audit.faults else audit.predicted
    columns = ["measured", "predicted", "difference", *(["explained"] if audit.faults else [])]
    shown = grid(f"{len(audit.log.steps)} steps of {audit.log.kind}", ["", *columns])
    for name, value in audit.measured.items():
        cells = [_cell(name, value), _cell(name, audit.predicted[name]), percent(value / audit.predicted[name] - 1.0)]
        shown.add_row(NAMES[name], *cells, *([_cell(name, explained[name])] if audit.faults else []))
    return shown


def _cell(name: str, value: float) -> str:
    if name == "memory":
        return gibibytes(value)
    if name == "samples":
        return f"{value:,.0f}"
    if name == "spread":
        return f"{value:.2f}"
    return percent(value - 1.0) if name == "unsteadiness" else duration(value)
