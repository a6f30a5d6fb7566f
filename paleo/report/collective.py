"""Algorithms of a collective, as documents and as tables."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.columns import Attribute, Document, listing, record, wrapped_text
from paleo.units import GIGA, counted, duration, engineering

if TYPE_CHECKING:
    from paleo.studies.collective import CollectiveStudy
    from paleo.studies.exchange import CompressedCollective


def _time(row: Any) -> str:
    return duration(row.time)


_ALGORITHM = (
    Attribute("algorithm", lambda row: row.algorithm, "algorithm"),
    Attribute("steps", lambda row: row.steps, "steps", "count"),
    Attribute("time_s", lambda row: row.time, "time", "words", _time),
    Attribute("algorithm_bandwidth", lambda row: row.algorithm_bandwidth, "algorithm GB/s", "words",
              lambda row: f"{row.algorithm_bandwidth / GIGA:.4g}"),
    Attribute("bus_bandwidth", lambda row: row.bus_bandwidth, "bus GB/s", "words",
              lambda row: f"{row.bus_bandwidth / GIGA:.4g}"),
    Attribute("times_lower_bound", lambda row: row.times_lower_bound, "time/bound", "ratio"),
    Attribute("automatic", lambda row: row.automatic),
)  # fmt: skip
_LEVEL = (
    Attribute("name", lambda span: span.level.name, "level", "",
              lambda span: f"{span.level.name} ({span.level.link.name})"),
    Attribute("fan_out", lambda span: span.fan_out, "group size", "count"),
    Attribute("alpha_s", lambda span: span.level.link.latency, "latency", "words",
              lambda span: "unknown" if span.level.link.latency is None else duration(span.level.link.latency)),
    Attribute("beta_s_per_byte", lambda span: 1.0 / span.bandwidth, "bandwidth", "words",
              lambda span: engineering(span.bandwidth, "B/s")),
)  # fmt: skip


def document(study: CollectiveStudy) -> Document:
    """Return the answer of ``paleo collective`` as a JSON document: every algorithm, fastest first.

    Parameters
    ----------
    study : CollectiveStudy
        One operation over one group of ranks.
    """
    return {
        "operation": study.operation,
        "system": study.system.name,
        "ranks": study.ranks,
        "payload_bytes": study.payload_bytes,
        "levels": [record(_LEVEL, span) for span in study.spans],
        "best": study.best.algorithm,
        "time_s": study.best.time,
        "lower_bound_s": study.lower_bound,
        "calibration": study.calibration,
        "algorithms": [record(_ALGORITHM, row) for row in study.rows],
        "crossovers": [asdict(crossover) for crossover in study.crossovers],
    }


def table(study: CollectiveStudy) -> RenderableType:
    """Return the answer of ``paleo collective`` as tables.

    Parameters
    ----------
    study : CollectiveStudy
        Every algorithm of one operation over one group of ranks.

    Returns
    -------
    RenderableType
        Tables for the console.
    """

    def choice(row: Any) -> str:
        other = "" if row.automatic else "not for this payload" if row.candidate else "only by name"
        return "chosen" if row is study.best else other

    rows = listing("", (*_ALGORITHM, Attribute("", choice, "choice")), study.rows)
    steps = [f"{crossover.above} from {engineering(crossover.payload_bytes, 'B')}" for crossover in study.crossovers]
    if steps:
        words = f"{study.chooser} chooses by payload" if study.chooser else "Fastest by payload"
        changes = f"{words}: {study.crossovers[0].below}, {', '.join(steps)}.\n"
    else:
        chosen = study.best.algorithm
        words = f"{study.chooser} chooses {chosen}" if study.chooser else f"{chosen} is the fastest"
        changes = f"{words} for every payload.\n"
    levels = listing("Levels of the group, inner to outer", _LEVEL, study.spans)
    return Group(wrapped_text(_headline(study)), rows, Text(), wrapped_text(changes), levels)


def _headline(study: CollectiveStudy) -> Text:
    """Name the operation, the chosen algorithm, and faster ones that are not chosen."""
    best, size = study.best, engineering(study.payload_bytes, "B")
    head = Text(f"{study.operation} of {size} over {study.ranks} ranks of {study.system.name}\n", style="bold")
    reduction = "with in-network reduction" if best.in_network else "without in-network reduction"
    chosen = f"{study.chooser} chooses {best.algorithm}" if study.chooser else f"best: {best.algorithm}"
    head.append(f"{chosen}, {duration(best.time)}; lower bound {reduction}: {duration(study.lower_bound)}\n")
    for row in study.passed_over:
        reason = f"{study.chooser} {'uses it for other payloads or groups' if row.candidate else 'does not have it'}"
        head.append(f"faster, but not chosen: {row.algorithm}, {duration(row.time)} ({reason})\n")
    return head.append(f"Calibration: {study.calibration}\n", style="dim")


def _break_even(row: Any) -> float | None:
    return row.break_even if math.isfinite(row.break_even) else None


_METHOD = (
    Attribute("method", lambda row: row.method, "method"),
    Attribute("scheme", lambda row: row.scheme or None, "scheme"),
    Attribute("time_s", lambda row: row.time, "time", "words", _time),
    Attribute("wire_s", lambda row: row.wire, "on the wire", "words", lambda row: duration(row.wire)),
    Attribute("coding_s", lambda row: row.coding, "coding", "words", lambda row: duration(row.coding)),
    Attribute("sent_bytes", lambda row: row.sent, "sent per rank", "words", lambda row: engineering(row.sent, "B")),
    Attribute("break_even_bytes_per_s", _break_even, "pays below", "words",
              lambda row: "any rate" if _break_even(row) is None else engineering(row.break_even, "B/s")),
)  # fmt: skip


def compressed_document(study: CompressedCollective) -> Document:
    """Return gradient compressions of a sum as a JSON document, fastest first.

    Parameters
    ----------
    study : CompressedCollective
        Methods and the uncompressed sum.
    """
    return {
        "dense_time_s": study.time,
        "dense_sent_bytes": study.sent,
        "rate_bytes_per_s": study.rate,
        "tensors": study.tensors,
        "methods": [{**record(_METHOD, row), "pays": study.pays(row)} for row in study.rows],
    }


def compressed_table(study: CompressedCollective) -> RenderableType:
    """Return the compressed forms of an all-reduce as tables.

    Parameters
    ----------
    study : CompressedCollective
        Compression methods compared with the dense sum.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    rows = listing("Gradient compression", (*_METHOD, Attribute("", study.pays, "pays", "yes or no")), study.rows)
    uncompressed = (
        f"Uncompressed: {study.dense.best.algorithm}, {duration(study.time)}, {engineering(study.sent, 'B')} "
    )
    uncompressed += f"per rank at {engineering(study.rate, 'B/s')}. "
    assumed = f"The gradient is assumed to consist of {counted(study.tensors, 'square tensor')} (--tensors)."
    return Group(rows, Text(), wrapped_text(uncompressed + assumed))
