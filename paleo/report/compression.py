"""Whether compression pays, as a table and as a document."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.grid import grid
from paleo.report.tables import percent, prose
from paleo.units import counted, duration, engineering, gibibytes

if TYPE_CHECKING:
    from paleo.report.documents import Document
    from paleo.studies.compression import CompressedCollective, CompressionStudy


def document(study: CompressionStudy) -> Document:
    """Bytes that a rank sends, seconds of coding, and the rate below which it pays."""
    return {
        "method": study.prediction.run.compress,
        "summary": study.method.summary,
        "reference": study.method.reference,
        "unbiased": study.method.unbiased,
        "wire_bytes": study.wire,
        "dense_wire_bytes": study.dense_wire,
        "coding_s": study.coding,
        "dense_step_time_s": study.dense.step_time,
        "warm_up": study.warm_up,
        "mean_step_time_s": study.mean_step,
        "rate_bytes_per_s": _finite(study.rate),
        "break_even_bytes_per_s": _finite(study.break_even),
        "pays": study.pays,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def table(study: CompressionStudy) -> RenderableType:
    """The study as a table of figures for the terminal."""
    facts = grid("Compression of gradients", ["what", "figure"], left=2)
    facts.add_row("method", f"{study.prediction.run.compress}: {study.method.summary}")
    facts.add_row("sent by a rank", f"{gibibytes(study.wire)}, dense {gibibytes(study.dense_wire)}")
    facts.add_row("coding and decoding", duration(study.coding))
    dense = study.dense.step_time
    verdict = "pays" if study.pays else "does not pay"
    facts.add_row("step", f"{duration(study.prediction.step_time)}, dense {duration(dense)}: it {verdict}")
    if study.warm_up:
        facts.add_row("mean step", f"{duration(study.mean_step)}, the first {percent(study.warm_up)} of all dense")
    below = "any rate" if math.isinf(study.break_even) else f"below {_rate(study.break_even)}"
    facts.add_row("pays without overlap", f"{below}; here ranks send {_rate(study.rate)}")
    return facts


def collective_document(study: CompressedCollective) -> Document:
    """Methods beside a dense sum, fastest first."""
    return {
        "dense_time_s": study.time,
        "dense_sent_bytes": study.sent,
        "rate_bytes_per_s": study.rate,
        "tensors": study.tensors,
        "methods": [
            {
                "method": row.method,
                "scheme": row.scheme or None,
                "time_s": row.time,
                "wire_s": row.wire,
                "coding_s": row.coding,
                "sent_bytes": row.sent,
                "break_even_bytes_per_s": _finite(row.break_even),
                "pays": study.pays(row),
            }
            for row in study.rows
        ],
    }


def collective_table(study: CompressedCollective) -> RenderableType:
    """The same for people."""
    columns = ("method", "scheme", "time", "on the wire", "coding", "sent by a rank", "pays below", "")
    facts = grid("Compressed", columns, left=2)
    facts.add_row("(dense)", study.dense.best.algorithm, duration(study.time), duration(study.time), "-",
                  engineering(study.sent, "B"), "", "")  # fmt: skip
    for row in study.rows:
        below = "any rate" if math.isinf(row.break_even) else engineering(row.break_even, "B/s")
        figures = duration(row.time), duration(row.wire), duration(row.coding), engineering(row.sent, "B"), below
        facts.add_row(row.method, row.scheme, *figures, "pays" if study.pays(row) else "does not pay")
    reached = f"Here a rank of the dense sum sends {engineering(study.rate, 'B/s')}. "
    assumed = f"The gradient is taken to lie in {counted(study.tensors, 'square tensor')} (--tensors)."
    return Group(facts, Text(), prose(reached + assumed))


def _rate(value: float) -> str:
    return "nothing" if math.isinf(value) else engineering(value, "B/s")
