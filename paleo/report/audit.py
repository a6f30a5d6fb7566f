"""The verdict on a log, as a table and as a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paleo.report.grid import grid
from paleo.report.tables import percent, prose
from paleo.studies.audit import ADVICE
from paleo.units import duration, engineering, gibibytes

if TYPE_CHECKING:
    from paleo.report.documents import Document
    from paleo.studies.audit import Audit, CollectiveAudit, Fault

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
    fields: Document = {
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
        "notes": list(audit.notes),
    }
    if audit.beyond is not None:
        gpus, seconds, interval = audit.beyond
        fields["beyond"] = {"gpus": gpus, "step_time_s": seconds, "step_time_interval_s": list(interval)}
    return fields


def _fault(fault: Fault) -> Document:
    return {
        "name": fault.name,
        "factor": fault.factor,
        "step_time_s": fault.evidence["step"],
        "advice": fault.advice,
    }


def verdict(audit: Audit) -> str:
    """The verdict in one sentence."""
    measured, predicted = audit.measured["step"], audit.predicted["step"]
    seen = f"A step takes {duration(measured)}, predicted {duration(predicted)} ({measured / predicted - 1:+.0%})"
    if not audit.faults:
        low, high = audit.expected.interval
        if low <= measured <= high:
            return f"{seen}: as predicted, nothing in this log says otherwise."
        return f"{seen}: outside the interval, and no single fault that is known explains it."
    low, high = audit.expected.interval
    doubt = " The step lies within the prediction's own 90 % interval, so this may be the model's error."
    names = ", or ".join(fault.text for fault in audit.faults)
    left = f"{audit.ratio - 1:+.0%} of the step stay unexplained" if abs(audit.ratio - 1) >= 0.01 else "nothing is left"
    return f"{seen}. What explains it: {names}; {left}.{doubt if low <= measured <= high else ''}"


def table(audit: Audit) -> RenderableType:
    """The verdict, measured figures beside predicted ones, and advice."""
    parts: list[RenderableType] = [prose(Text(verdict(audit), style="bold")), Text(), _quantities(audit)]
    parts += [part for note in audit.notes for part in (Text(), prose(f"{note[:1].upper()}{note[1:]}."))]
    for fault in audit.faults:
        parts += [Text(), prose(f"{fault.text}: {fault.advice}.")]
    if audit.beyond is not None:
        gpus, seconds, (low, high) = audit.beyond
        heading = f"On {gpus:,} GPUs, each with as many samples: {duration(seconds)}"
        parts += [
            Text(),
            prose(f"{heading} (90 % interval {duration(low)} to {duration(high)}, by this log's own steps)."),
        ]
    return Group(*parts)


def _quantities(audit: Audit) -> Table:
    explained = audit.faults[0].evidence if audit.faults else audit.predicted
    columns = ["measured", "predicted", "difference", *(["explained"] if audit.faults else [])]
    quantities = grid(f"{len(audit.log.steps)} steps of {audit.log.kind}", ["", *columns])
    for name, value in audit.measured.items():
        cells = [_cell(name, value), _cell(name, audit.predicted[name]), percent(value / audit.predicted[name] - 1.0)]
        quantities.add_row(NAMES[name], *cells, *([_cell(name, explained[name])] if audit.faults else []))
    return quantities


def _cell(name: str, value: float) -> str:
    if name == "memory":
        return gibibytes(value)
    if name == "samples":
        return f"{value:,.0f}"
    if name == "spread":
        return f"{value:.2f}"
    return percent(value - 1.0) if name == "unsteadiness" else duration(value)


# links


def collective_document(audit: CollectiveAudit) -> Document:
    """Payloads with measured and predicted seconds, what is off, and the largest payload on more ranks."""
    log, study = audit.log, audit.study
    rows = zip(log.payloads, log.seconds, audit.predicted, strict=True)
    return {
        "system": study.system.name,
        "gpus": study.ranks,
        "log": "nccl-tests",
        "operation": study.operation,
        "verdict": audit.verdict,
        "small_ratio": audit.small,
        "large_ratio": audit.large,
        "faults": [{"name": name, "factor": factor, "advice": ADVICE[name]} for name, factor in audit.faults.items()],
        "payloads": [
            {"payload_bytes": payload, "measured_s": measured, "predicted_s": predicted}
            for payload, measured, predicted in rows
        ],
        "beyond": None if audit.beyond is None else {"gpus": audit.beyond[0], "time_s": audit.beyond[1]},
        "calibration": study.calibration,
    }


def collective_table(audit: CollectiveAudit) -> RenderableType:
    """The verdict, payload by payload, and what to do."""
    table = grid("nccl-tests", ("payload", "measured", "predicted", "measured over predicted"))
    for payload, measured, predicted in zip(audit.log.payloads, audit.log.seconds, audit.predicted, strict=True):
        cells = (duration(measured), duration(predicted), f"{measured / predicted:.2f}")
        table.add_row(engineering(payload, "B"), *cells)
    parts: list[RenderableType] = [prose(Text(audit.verdict, style="bold")), Text(), table]
    parts += [prose(f"\n{name}: {ADVICE[name]}.") for name in audit.faults]
    if audit.beyond is not None:
        gpus, seconds = audit.beyond
        largest = engineering(audit.log.payloads[-1], "B")
        parts.append(prose(f"\n{largest} over {gpus:,} GPUs, with links as they were measured: {duration(seconds)}."))
    return Group(*parts, prose(f"\nCalibration: {audit.study.calibration}"))
