"""Benchmark results of serving engines (``vllm bench serve``, ``sglang.bench_serving``), compared with a prediction.

Both programs print a table of means and percentiles in milliseconds, or save them as JSON. Two times show which part
differs from the prediction: each further token takes one iteration of the engine, and the first token takes the server,
the queue and the prompt.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.units import MILLISECOND, format_duration

if TYPE_CHECKING:
    from paleo.serving.service import Service

#: Quantities by their line in the printed table and by their key in the saved JSON; times are milliseconds.
_LINES = {
    "requests": (r"Successful requests", "completed"),
    "seconds": (r"Benchmark duration \(s\)", "duration"),
    "input": (r"Total input tokens", "total_input_tokens"),
    "output": (r"Total generated tokens", "total_output_tokens"),
    "rate": (r"(?:Traffic request rate|Request rate configured \(RPS\))", "request_rate"),
    "users": (r"(?:Maximum request concurrency|Max request concurrency)", "max_concurrency"),
    "ttft": (r"Mean TTFT \(ms\)", "mean_ttft_ms"),
    "ttft_p99": (r"P99 TTFT \(ms\)", "p99_ttft_ms"),
    "tpot": (r"Mean TPOT \(ms\)", "mean_tpot_ms"),
    "tpot_p99": (r"P99 TPOT \(ms\)", "p99_tpot_ms"),
}
_NEEDED = ("requests", "seconds", "input", "output", "ttft", "tpot")
#: Factors within which a part counts as predicted.
_NEAR = (0.75, 1.35)


@dataclass(frozen=True, slots=True)
class EngineBenchmark:
    """Results of a serving engine's benchmark (``vllm bench serve``, ``sglang.bench_serving``).

    ``values`` maps a quantity to its value: ``requests``, ``input`` and ``output`` [tokens], ``rate`` [requests/s],
    ``users``, ``seconds`` (duration [s]), and the latencies ``ttft``, ``tpot`` [ms].
    """

    values: Mapping[str, float]

    @property
    def serve_arguments(self) -> dict[str, float | int | str]:
        """Load of the benchmark (mean lengths, concurrency or request rate), as keyword arguments of `paleo.serve`."""
        count = self.values["requests"]
        lengths = {name: max(self.values[name] / count, 1.0) for name in ("input", "output")}
        users, rate = self.values.get("users", math.inf), self.values.get("rate", math.inf)
        if math.isfinite(users) and users < count:
            return {**lengths, "concurrency": int(users)}
        if math.isfinite(rate):
            return {**lengths, "rate": rate}
        return {**lengths, "arrivals": "at once"}

    @property
    def measured_performance(self) -> dict[str, float]:
        """Measured output tokens per second and latencies [s], by name, for comparison with a prediction."""
        names = ("ttft", "ttft_p99", "tpot", "tpot_p99")
        times = {name: self.values[name] * MILLISECOND for name in names if name in self.values}
        return {"tokens_per_s": self.values["output"] / self.values["seconds"], **times}


def read_benchmark(path: str | Path) -> EngineBenchmark | None:
    """Read the results of a serving engine's benchmark from a file.

    Parameters
    ----------
    path : str | Path
        Printed output, or results saved as JSON.

    Returns
    -------
    EngineBenchmark, optional
        Measured values; None for another kind of file.

    Raises
    ------
    SpecError
        If a quantity is missing or is no number above zero.
    """
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise SpecError(f"log {path}: {error.strerror}") from None
    values = _saved(text) if text.lstrip().startswith("{") else _printed(text)
    if values is None:
        return None
    missing = [name for name in _NEEDED if not 0 < values.get(name, 0.0) < math.inf]
    if missing:
        raise SpecError(f"log {path}: no {_LINES[missing[0]][1]} above zero in this benchmark")
    return EngineBenchmark(values)


def _printed(text: str) -> dict[str, float] | None:
    if "Serving Benchmark Result" not in text:
        return None
    lines = {name: re.search(rf"{line}:\s+(\S+)", text) for name, (line, _) in _LINES.items()}
    return {name: _float(match.group(1)) for name, match in lines.items() if match}


def _saved(text: str) -> dict[str, float] | None:
    try:
        data = json.loads(text.strip().splitlines()[-1] if "\n{" in text.strip() else text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or "mean_ttft_ms" not in data:
        return None
    return {name: _float(data[key]) for name, (_, key) in _LINES.items() if data.get(key) is not None}


def _float(value: object) -> float:
    try:
        return float(str(value))
    except ValueError:
        return math.inf


@dataclass(frozen=True)
class ServiceAudit:
    """Comparison of a serving engine's benchmark with the prediction of the same load.

    Attributes
    ----------
    benchmark : EngineBenchmark
        Measured values.
    service : Service
        Predicted service under the load of the benchmark.
    """

    benchmark: EngineBenchmark
    service: Service

    @property
    def predicted_performance(self) -> dict[str, float]:
        """Prediction of each measured quantity by name: output tokens per second, and latencies [s]."""
        plan, result = self.service.best, self.service.simulation
        if plan is None or result is None:
            return {}
        first, further = self.service.latencies("ttft"), self.service.latencies("tpot")
        rate = plan.layout.replicas * result.tokens_per_s
        values = {"tokens_per_s": rate, "ttft": first["mean"], "ttft_p99": first["p99"]}
        values |= {"tpot": further["mean"], "tpot_p99": further["p99"]}
        return {name: values[name] for name in self.benchmark.measured_performance}

    @property
    def latency_ratios_by_fault(self) -> dict[str, float]:
        """Ratios of measured to predicted latency that are out of range, by the part of the service at fault."""
        predicted, measured = self.predicted_performance, self.benchmark.measured_performance
        if not predicted:
            return {}
        ratios = {name: measured[name] / predicted[name] for name in ("ttft", "tpot")}
        names = {"tpot": "iterations of the engine", "ttft": "server, queue and prompts"}
        low, high = _NEAR
        return {names[part]: ratio for part, ratio in ratios.items() if not low < ratio < high}

    @property
    def verdict(self) -> str:
        """Sentences that compare the measured with the predicted throughput and latencies."""
        predicted, measured = self.predicted_performance, self.benchmark.measured_performance
        if not predicted:
            return self.service.verdict
        rate, ratio = predicted["tokens_per_s"], measured["tokens_per_s"] / predicted["tokens_per_s"]
        texts = [f"Measured {ratio:.2f} times the predicted {rate:,.0f} output tokens/s."]
        if not self.latency_ratios_by_fault:
            texts.append("Times to the first and to a further token are as predicted.")
        for name, factor in self.latency_ratios_by_fault.items():
            part = "tpot" if name.startswith("iterations") else "ttft"
            pair = (format_duration(each[part]) for each in (measured, predicted))
            texts.append(f"Off: {name}, {factor:.2g} times the prediction ({' for '.join(pair)}).")
        return " ".join(texts)
