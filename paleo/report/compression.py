"""Whether compression pays, as a table and as a document."""

from __future__ import annotations

import math

from rich.console import RenderableType

from paleo.report.documents import Document
from paleo.report.tables import grid
from paleo.studies.compression import CompressionStudy
from paleo.units import duration, gibibytes


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
        "rate_bytes_per_s": _finite(study.rate),
        "break_even_bytes_per_s": _finite(study.break_even),
        "pays": study.pays,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def table(study: CompressionStudy) -> RenderableType:
    """The same for people."""
    shown = grid("Compression of gradients", ["what", "figure"], left=2)
    shown.add_row("method", f"{study.prediction.run.compress}: {study.method.summary}")
    shown.add_row("sent by a rank", f"{gibibytes(study.wire)}, dense {gibibytes(study.dense_wire)}")
    shown.add_row("coding and decoding", duration(study.coding))
    dense = study.dense.step_time
    verdict = "pays" if study.pays else "does not pay"
    shown.add_row("step", f"{duration(study.prediction.step_time)}, dense {duration(dense)}: it {verdict}")
    below = "any rate" if math.isinf(study.break_even) else f"below {_rate(study.break_even)}"
    shown.add_row("pays without overlap", f"{below}; here ranks send {_rate(study.rate)}")
    return shown


def _rate(value: float) -> str:
    return "nothing" if math.isinf(value) else f"{gibibytes(value)}/s"
