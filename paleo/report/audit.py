"""The verdict on a log of a training or of nccl-tests, as documents and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.columns import AnswerColumn, Document, empty_table, percent, row_json, rows_table, wrapped_text
from paleo.studies.audit import COLLECTIVE_FAULT_ADVICE, CollectiveAudit, TrainingLogAudit
from paleo.units import format_duration, format_gibibytes, format_quantity

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Quantity of a log -> its name in tables.
_NAMES = {
    "step": "step time",
    "memory": "peak memory, allocated",
    "samples": "samples per step",
    "compute": "forward and backward",
    "exchange": "exposed gradient exchange",
    "optimizer": "optimizer",
    "spread": "slowest rank over fastest",
    "unsteadiness": "standard deviation of steps",
}


def json_document(audit: TrainingLogAudit | CollectiveAudit) -> Document:
    """Return the answer of ``paleo audit`` as a JSON document.

    Parameters
    ----------
    audit : TrainingLogAudit or CollectiveAudit
        Measured and predicted quantities, the faults that explain them, and a prediction for more ranks.

    Returns
    -------
    Document
        Dict of plain values, times in seconds.
    """
    if isinstance(audit, CollectiveAudit):
        return _collective_document(audit)
    fields: Document = {
        "model": audit.expected_prediction.model.name,
        "system": audit.expected_prediction.system.name,
        "gpus": audit.expected_prediction.plan.gpus,
        "log": audit.log.kind,
        "steps": len(audit.log.steps),
        "verdict": log_audit_verdict_text(audit),
        "measured": dict(audit.measured_quantities),
        "predicted": {name: audit.predicted_quantities[name] for name in audit.measured_quantities},
        "step_time_s": audit.measured_quantities["step"],
        "step_time_interval_s": list(audit.interval),
        "faults": [
            {"name": fault.name, "factor": fault.factor, "step_time_s": fault.evidence["step"], "advice": fault.advice}
            for fault in audit.faults
        ],
        "unexplained": audit.measured_to_best_fit_step_time_ratio,
        "notes": list(audit.assumptions),
        "measure_next": _next_measurement(audit),
    }
    if audit.step_time_on_more_ranks is None:
        return {**fields, "beyond": None}
    gpus, seconds, interval = audit.step_time_on_more_ranks
    beyond = {"gpus": gpus, "step_time_s": seconds, "step_time_interval_s": list(interval)}
    return {**fields, "beyond": beyond}


def log_audit_verdict_text(audit: TrainingLogAudit | CollectiveAudit) -> str:
    """Return the verdict of an audit in one sentence.

    Parameters
    ----------
    audit : TrainingLogAudit | CollectiveAudit
        Measured and predicted quantities and the faults that explain them.

    Returns
    -------
    str
        The sentence.
    """
    if isinstance(audit, CollectiveAudit):
        return audit.verdict
    measured, predicted = audit.measured_quantities["step"], audit.predicted_quantities["step"]
    times = f"{format_duration(measured)}, predicted {format_duration(predicted)}"
    seen = f"A step takes {times} ({measured / predicted - 1:+.0%})"
    low, high = audit.expected_prediction.interval
    if not audit.faults:
        return f"{seen}: {_without_faults(audit)}."
    doubt = " The step lies within the 90 % interval of the prediction, so this may be the model's error."
    names = ", or ".join(fault.text for fault in audit.faults)
    unexplained = audit.measured_to_best_fit_step_time_ratio - 1
    remainder = f"{unexplained:+.0%} of the step stay unexplained" if abs(unexplained) >= 0.01 else "that is all of it"
    return f"{seen}. What explains it: {names}; {remainder}.{doubt if low <= measured <= high else ''}"


def _without_faults(audit: TrainingLogAudit) -> str:
    """Return a sentence on a log that no single fault explains, with the quantities that are not as predicted."""
    others = [name for name in audit.outlying_quantities if name != "step"]
    cells = {name: _measured_and_predicted(audit, name) for name in others}
    named = ", ".join(f"{_NAMES[name]} ({seen}, predicted {expected})" for name, (seen, expected) in cells.items())
    if "step" in audit.outlying_quantities:
        also = f"; nor are as predicted: {named}" if others else ""
        return f"outside the interval, and no known single fault explains it{also}"
    if others:
        return f"the step is as predicted, but not {named}; no known single fault explains it"
    if audit.log_irregularities:
        reasons = "; ".join(audit.log_irregularities)
        return f"the step is as predicted, but the log is not that of one sound run: {reasons}"
    return "as predicted, nothing in this log says otherwise"


def table(audit: TrainingLogAudit | CollectiveAudit) -> RenderableType:
    """Return the answer of ``paleo audit`` as tables: verdict, quantities, advice.

    Parameters
    ----------
    audit : TrainingLogAudit | CollectiveAudit
        Measured and predicted quantities and the faults that explain them.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    if isinstance(audit, CollectiveAudit):
        return _collective_table(audit)
    explained = audit.faults[0].evidence if audit.faults else audit.predicted_quantities
    columns = ["measured", "predicted", "difference", *(["with the fault"] if audit.faults else [])]
    table = empty_table(f"{len(audit.log.steps)} steps of {audit.log.kind}", ["", *columns])
    for name, value in audit.measured_quantities.items():
        cells = [*_measured_and_predicted(audit, name), percent(value / audit.predicted_quantities[name] - 1.0)]
        table.add_row(_NAMES[name], *cells, *([_cell(name, explained[name])] if audit.faults else []))
    parts: list[RenderableType] = [wrapped_text(Text(log_audit_verdict_text(audit), style="bold")), Text(), table]
    parts += [part for note in audit.assumptions for part in (Text(), wrapped_text(f"{note[:1].upper()}{note[1:]}."))]
    for fault in audit.faults:
        parts += [Text(), wrapped_text(f"{fault.text}: {fault.advice}.")]
    if words := _next_measurement(audit):
        parts += [Text(), wrapped_text(words)]
    if audit.step_time_on_more_ranks is not None:
        gpus, seconds, (low, high) = audit.step_time_on_more_ranks
        heading = f"On {gpus:,} GPUs with the same batch per GPU: {format_duration(seconds)}"
        ends = f"90 % interval {format_duration(low)} to {format_duration(high)}, from the steps of this log"
        parts += [Text(), wrapped_text(f"{heading} ({ends}).")]
    return Group(*parts)


def _next_measurement(audit: TrainingLogAudit) -> str | None:
    """Return a sentence on what to measure next, if several faults explain the log; otherwise None."""
    if len(audit.faults) < 2:
        return None
    name, faults = audit.most_informative_unlogged_quantity, audit.faults[:2]
    if name is None:
        return f"The log does not tell {' and '.join(fault.name for fault in faults)} apart: check both."
    values = " and ".join(f"{_cell(name, fault.evidence[name])} with {fault.name}" for fault in faults)
    return f"Log {_NAMES[name]} next: it is {values}."


def _measured_and_predicted(audit: TrainingLogAudit, name: str) -> tuple[str, str]:
    return _cell(name, audit.measured_quantities[name]), _cell(name, audit.predicted_quantities[name])


def _cell(name: str, value: float) -> str:
    if name == "memory":
        return format_gibibytes(value)
    if name == "samples":
        return f"{value:,.0f}"
    if name == "spread":
        return f"{value:.2f}"
    return percent(value - 1.0) if name == "unsteadiness" else format_duration(value)


# collectives

_PAYLOAD_COLUMNS = (
    AnswerColumn("payload_bytes", lambda row: row[0], "payload", "decimal B"),
    AnswerColumn("measured_s", lambda row: row[1], "measured", "duration"),
    AnswerColumn("predicted_s", lambda row: row[2], "predicted", "duration"),
    AnswerColumn("", lambda row: row[1] / row[2], "measured over predicted", "ratio"),
)


def _payloads(audit: CollectiveAudit) -> Sequence[tuple[float, float, float]]:
    return list(zip(audit.log.payloads, audit.log.seconds, audit.predicted_times, strict=True))


def _collective_document(audit: CollectiveAudit) -> Document:
    study, beyond = audit.study, None
    if audit.time_on_more_ranks is not None:
        beyond = dict(zip(("gpus", "time_s"), audit.time_on_more_ranks, strict=True))
    faults = audit.fault_time_ratios.items()
    return {
        "system": study.system.name,
        "gpus": study.ranks,
        "log": "nccl-tests",
        "operation": study.operation,
        "verdict": audit.verdict,
        "small_ratio": audit.small_payload_ratio,
        "large_ratio": audit.large_payload_ratio,
        "faults": [{"name": name, "factor": ratio, "advice": COLLECTIVE_FAULT_ADVICE[name]} for name, ratio in faults],
        "payloads": [row_json(_PAYLOAD_COLUMNS, row) for row in _payloads(audit)],
        "beyond": beyond,
        "calibration": study.calibration_text,
    }


def _collective_table(audit: CollectiveAudit) -> RenderableType:
    rows = rows_table("nccl-tests", _PAYLOAD_COLUMNS, _payloads(audit))
    parts: list[RenderableType] = [wrapped_text(Text(audit.verdict, style="bold")), Text(), rows]
    parts += [wrapped_text(f"\n{name}: {COLLECTIVE_FAULT_ADVICE[name]}.") for name in audit.fault_time_ratios]
    if audit.time_on_more_ranks is not None:
        gpus, seconds = audit.time_on_more_ranks
        largest = f"{format_quantity(audit.log.payloads[-1], 'B')} over {gpus:,} GPUs"
        parts.append(wrapped_text(f"\n{largest}, with links as fast as measured: {format_duration(seconds)}."))
    return Group(*parts, wrapped_text(f"\nCalibration: {audit.study.calibration_text}"))
