"""Results of serving networks that run forward passes alone (no generated tokens), as a document and as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import RenderableType

from paleo.report.columns import AnswerColumn, Document, answer_group, row_json, rows_table
from paleo.serving.single_pass import BatchedService, format_three_digits, forward_passes
from paleo.units import with_noun

if TYPE_CHECKING:
    from collections.abc import Sequence


#: Factors within which nine of ten measured rates of MLPerf Inference lie (docs/howto/serve.md).
_THROUGHPUT_INTERVAL_FACTORS = (0.7, 1.4)
#: Times from a request to its answer over that of a batch: requests come evenly while the batch before runs.
_LATENCY_OVER_BATCH_TIME = {"mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99}
#: What no answer has in it.
_UNMODELLED_EFFECTS = (
    "reading, decoding and scaling of images, and what follows the network (boxes, text encoders)",
    "layers that a plugin of the user runs as one kernel",
)


def _rate(row: Any) -> str:
    return "-" if row.requests_per_s is None else format_three_digits(row.requests_per_s)


_BATCH_COLUMNS = (
    AnswerColumn("batch", lambda each: each.requests, "batch", "count"),
    AnswerColumn("batch_s", lambda each: each.batch_time, "time", "duration"),
    AnswerColumn("requests_per_s_per_gpu", lambda each: each.requests_per_s, "requests/s/GPU", "words", _rate),
)
SYSTEM_COLUMNS = (
    AnswerColumn("system", lambda service: service.system.name, "system"),
    AnswerColumn("gpus", lambda service: service.gpus, "GPUs", "count"),
    AnswerColumn("weights", lambda service: service.formats.text, "weights"),
    AnswerColumn("batch", lambda service: service.best and service.best.requests, "batch", "count"),
    AnswerColumn("requests_per_s", lambda service: service.requests_per_s, "requests/s", "words", _rate),
    AnswerColumn("usd_per_million_requests", lambda service: service.usd_per_million, "USD/1M requests", "price"),
)


#: Keys of a system that only generated tokens have.
_TOKENS: Document = {
    "engine": "tensorrt", "tokens_per_s_per_gpu": None, "usd_per_million_output": None, "joules_per_token": None,
    "strategy": None,
}  # fmt: skip


def json_document(service: BatchedService, systems: Sequence[BatchedService] = ()) -> Document:
    """Return the answer of ``paleo serve`` for a network without generated tokens (a classifier) as a JSON document.

    The keys are the same as for services that generate tokens; the values about generated tokens are null.

    Parameters
    ----------
    service : BatchedService
        Predicted service: batch sizes with their times, and the best within the latency limit.
    systems : sequence of BatchedService
        Predicted services of all systems and weight formats that are compared.

    Returns
    -------
    Document
        Dict of plain values, times in seconds.
    """
    best, rate, latency = service.best, service.requests_per_s, None
    if best is not None:
        latency = {name: share * best.batch_time for name, share in _LATENCY_OVER_BATCH_TIME.items()}
    tokens = (
        "tokens_per_s", "ttft_s", "tpot_s", "kv_cache", "usd_per_million_tokens", "joules_per_token", "steady",
        "disaggregation", "strategy",
    )  # fmt: skip
    fields: Document = dict.fromkeys(tokens)
    return fields | {
        "verdict": service.verdict,
        "model": service.model.name,
        "released": service.model.released,
        "system": service.system.name,
        "gpus": service.gpus,
        "engine": {"name": "tensorrt", "release": ""},
        "engine_choice": "networks that generate no tokens run under an inference compiler",
        "load": {
            "kind": "most" if service.limit else "at once",
            "input_tokens": service.length,
            "output_tokens": 0.0,
            "length_variation": [0.0, 0.0],
            "prefix_hit": 0.0,
            "rate": None,
            "users": None,
            "think_s": 0.0,
        },
        "limits": {"percentile": 99} | ({} if service.limit is None else {"latency": service.limit}),
        "possible": best is not None,
        "requests_per_s": rate,
        "requests_per_s_interval": None if rate is None else [rate * end for end in _THROUGHPUT_INTERVAL_FACTORS],
        "latency_s": latency,
        "batch": None if best is None else best.requests,
        "usd_per_million_requests": service.usd_per_million,
        "limited_by": None if best is None else "the limit of latency" if service.limit else "arithmetic and memory",
        "capacity_requests_per_s": rate,
        "calibration": None,
        "unmodelled": list(_UNMODELLED_EFFECTS),
        "refusals": [],
        "warnings": [],
        "batches": [row_json(_BATCH_COLUMNS, each) for each in service.request_batches],
        "systems": [_TOKENS | row_json(SYSTEM_COLUMNS, each) for each in systems],
        "plans": [],
        "curve": [],
    }


def table(service: BatchedService, systems: Sequence[BatchedService] = ()) -> RenderableType:
    """Return the answer of ``paleo serve`` for a network without generated tokens as tables.

    Parameters
    ----------
    service : BatchedService
        Predicted service: batch sizes with their times, and the best within the latency limit.
    systems : sequence of BatchedService
        Predicted services of all systems and weight formats that are compared.

    Returns
    -------
    RenderableType
        Tables for the console.
    """
    tables = [rows_table("Systems", SYSTEM_COLUMNS, systems)] if len(systems) > 1 else []
    tables.append(rows_table("Batches of a device", _BATCH_COLUMNS, service.request_batches))
    low, high = _THROUGHPUT_INTERVAL_FACTORS
    notes = [
        _request(service),
        f"90 % interval of rates: {low:g} to {high:g} times what is said.",
        "A request waits while the batch before it is computed, so that the slowest takes the time of two batches.",
        f"Not modelled: {'; '.join(_UNMODELLED_EFFECTS)}.",
    ]
    return answer_group(service.verdict, tables, notes)


def _request(service: BatchedService) -> str:
    """Return a sentence on what one request computes: its tokens, or its forward passes with their samples."""
    if service.length:
        return f"A request is {with_noun(round(service.length), 'token')} long, and is answered in one forward pass."
    parts = forward_passes(service.model)
    if len(parts) == parts[0].count == parts[0].samples == 1:
        return f"A request is one forward pass of {service.model.name}; a diffusion takes one for each of its steps."
    passes = ((part.model, with_noun(part.count, "time"), with_noun(part.samples, "sample")) for part in parts)
    return f"A request runs {' and '.join(f'{model} {times} with {samples}' for model, times, samples in passes)}."
