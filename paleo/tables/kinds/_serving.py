"""Table of served language models (throughput, latency, time per output token), by engine, load and layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from paleo.errors import SpecError
from paleo.serving.commands import parse_engine_command
from paleo.serving.engines import BatchLimit, ServingEngine, engine_of_release
from paleo.serving.formats import Formats
from paleo.serving.forward_lowering import Sharding
from paleo.serving.iteration_times import IterationTables, iteration_tables
from paleo.serving.memory import serving_memory
from paleo.serving.plans import ReplicaLayout
from paleo.serving.requests import Requests, read_trace, sample_requests
from paleo.serving.simulation import SimulationResult, simulate_requests
from paleo.serving.steady_state import RequestLengths
from paleo.specs.catalog import DEFAULT_WEIGHT_FORMAT, systems_with_device
from paleo.specs.model import load_model
from paleo.specs.system import System, load_system
from paleo.tables.base import column_set
from paleo.tables.cells import Array, number_or_nan
from paleo.tables.run_tables import (
    RUN_TABLES,
    Row,
    RowPrediction,
    RunTable,
    has_value,
    number_cell,
    row_dicts,
    word_cell,
)

if TYPE_CHECKING:
    import pandas as pd

    from paleo.specs.software import SoftwareProfile
    from paleo.tables.base import Predictions

#: Networks of the catalog by other names in tables.
_CATALOG_MODEL_OF_NAME = {"deepseek-r1": "deepseek_v3", "deepseek-v3": "deepseek_v3", "minimax-m2.5": "minimax_m2"}
#: Factors of the 90 % interval.
_INTERVAL_FACTORS = (0.7, 1.35)
#: Coefficients of variation of ShareGPT's prompts and answers, whose medians are 25 and 130 tokens at means of 215 and
#: 195; longest prompt and conversation that the engines' benchmarks take (vllm/benchmarks/datasets, is_valid_sequence).
_SHAREGPT_LENGTH_VARIATION, _LONGEST_PROMPT, _MAX_CONVERSATION_TOKENS = (2.0, 1.0), 2.0**10, 2.0**11
#: Least length of a drawn request over the stated one in closed loops of random tokens (InferenceX's benchmark:
#: ``--random-range-ratio 0.8``, https://github.com/SemiAnalysisAI/InferenceX).
MIN_RANDOM_LENGTH_RATIO = 0.8
#: Mean tokens of answers below which requests are generated, not of conversations.
_MIN_MEAN_CHAT_TOKENS = 16.0
#: Requests that are simulated at a stated rate, and for each user of a closed loop, where a row states none; at most.
_DEFAULT_REQUESTS_AT_RATE, _DEFAULT_REQUESTS_PER_USER = 3000, 12
_MAX_REQUESTS_AT_RATE, _MAX_CLOSED_LOOP_REQUESTS = 12000, 2000
#: Words of a command that name what is not modelled.
_UNMODELLED_OPTIONS = {"--enforce-eager": "eager mode is not modelled"}
#: Engines whose weight-only kernels of MXFP4 experts come near to those of sixteen bits that stand in for them.
_MXFP4_ENGINES = frozenset({"vllm"})
_LATENCY_COLUMNS = {
    "ttft_mean_s": ("ttft", 0),
    "ttft_p99_s": ("ttft", 99),
    "tpot_mean_s": ("tpot", 0),
    "tpot_p99_s": ("tpot", 99),
    "latency_p99_s": ("latency", 99),
}


@dataclass(frozen=True, slots=True)
class ServingPrediction:
    """Predicted throughput or latency of one measured serving run.

    ``value`` is the quantity that the run measured (tokens per second or a time [s]). ``baseline`` is the same quantity
    from the weights' read time alone. ``further_times`` has further latencies by column name [s].
    """

    value: float
    baseline: float
    further_times: Mapping[str, float]


@cache
def system_of_device(device: str) -> System:
    """Load a catalog system whose nodes have a given device, NVIDIA's own servers (DGX) first."""
    known = systems_with_device(device)
    usual = [name for name in known if name.startswith("dgx")] or [name for name in known if "8" in name] or known
    return load_system(usual[0] if usual else device)


@cache
def _replica_iteration_tables(
    model: str, system: str, sharding: Sharding, formats: Formats, engine: ServingEngine
) -> IterationTables:
    """Compute the tables of iteration times of a serving replica; cached, as many rows have the same layout."""
    return iteration_tables(load_model(model), load_system(system), sharding, formats, engine.kernels)


def serving_formats_of_run(row: Row) -> Formats:
    """Return the number formats of weights and KV cache of a measured serving run, by ``dtype`` or launch command.

    TensorRT-LLM with fp8 or fp4 weights has an fp8 KV cache, too; other engines with such a ``dtype`` have a bf16
    cache.
    """
    dtype = word_cell(row, "dtype")
    if dtype in ("fp8", "fp4"):
        return Formats(dtype, "fp8" if str(row["engine"]) == "tensorrt-llm" else "bf16")
    return parse_engine_command(_command(row)).formats(load_model(_catalog_name(row)))


def _catalog_name(row: Row) -> str:
    return _CATALOG_MODEL_OF_NAME.get(str(row["model"]), str(row["model"]))


def _command(row: Row) -> str:
    """Return the launch command of a measured serving run in one line; '' if the row has none."""
    return str(row.get("command") or "").replace("\\\n", " ") if has_value(row, "command") else ""


def replica_sharding_of_run(row: Row) -> Sharding:
    """Return the parallel degrees of one replica of a measured serving run, from its columns and its launch command."""
    stated = parse_engine_command(_command(row)).sharding
    tp = int(float(row["tp"] if has_value(row, "tp") else row["n_gpus"]))
    pp, ranks = int(number_cell(row, "pp", 1)), int(number_cell(row, "dp_attention", 1))
    if stated.attention_dp > 1:
        return stated
    if ranks > 1:
        return Sharding(1, pp, ranks, expert_parallel=True)
    return Sharding(tp, pp, 1, expert_parallel=stated.expert_parallel or number_cell(row, "ep", 1.0) > 1)


def _engine_and_batch_limit(row: Row, offline: bool) -> tuple[ServingEngine, BatchLimit | None]:
    """Return (engine profile, batch limits that the run sets or None) of a measured serving run.

    The profile is that of the engine's release, changed by the options of the launch command. ``offline`` is True if
    requests come without an HTTP server.
    """
    command = parse_engine_command(_command(row))
    engine = engine_of_release(str(row["engine"]), str(row.get("engine_version") or ""))
    engine = engine.with_scheduler(command.overlapped_scheduler).without_source(str(row.get("left_out") or ""))
    share = {"memory_share": command.memory_share} if command.memory_share else {}
    engine = engine.model_copy(update={**command.speculation_settings, **share})
    engine = engine.offline_profile if offline else engine
    tokens = word_cell(row, "max_num_batched_tokens") or command.max_batched_tokens
    sequences = word_cell(row, "max_num_seqs") or command.max_sequences
    if not tokens and not sequences:
        return engine, None
    usual = engine.batch_limit(system_of_device(str(row["device"])).device)
    return engine, BatchLimit(
        tokens=int(float(tokens or usual.tokens)), sequences=int(float(sequences or usual.sequences))
    )


def _replica_layout_of_run(row: Row, offline: bool) -> ReplicaLayout:
    """Build the replica layout of a measured serving run: sharding, formats, engine, iteration times and memory.

    Raise SpecError if the run cannot be modelled. ``offline`` is True if requests come without an HTTP server.
    """
    command = str(row.get("command") or "")
    reasons = [reason for word, reason in _UNMODELLED_OPTIONS.items() if word in command]
    if reasons:
        raise SpecError(reasons[0])
    if not has_value(row, "model") or not has_value(row, "device") or not has_value(row, "engine"):
        raise SpecError("model, device or engine is blank")
    name = _catalog_name(row)
    network, system = load_model(name), system_of_device(str(row["device"]))
    sharding, formats = replica_sharding_of_run(row), serving_formats_of_run(row)
    if formats.has_untimed_kernels(system.device) and str(row["engine"]) not in _MXFP4_ENGINES:
        raise SpecError(f"kernels of MXFP4 experts under {row['engine']} on devices without FP4 were never timed")
    engine, limit = _engine_and_batch_limit(row, offline)
    # TensorRT-LLM's fp8 is made by ModelOpt, the others' published by the network's makers
    plain = network.released == DEFAULT_WEIGHT_FORMAT and formats.weight_format == "fp8"
    variant = plain and not engine.name.startswith("tensorrt")
    prices = _replica_iteration_tables(f"{name}-FP8" if variant else name, system.name, sharding, formats, engine)
    bound = limit or engine.batch_limit(system.device)
    if offline and bound.offline_tokens:
        bound = bound.model_copy(update={"tokens": bound.offline_tokens})
    memory = serving_memory(prices.lowered, sharding, formats, engine, system.device, bound)
    length = float(row["input_tokens"]) + float(row["output_tokens"]) if has_value(row, "input_tokens") else 1.0
    if refusal := memory.refusal(length):
        raise SpecError(refusal)
    count = max(int(float(row["n_gpus"])) // sharding.gpus, 1) if has_value(row, "n_gpus") else 1
    return ReplicaLayout(sharding, formats, engine, count, prices, memory, bound)


def predict_serving(row: Row, trace: Requests | None = None) -> ServingPrediction:
    """Predict the throughput or latency of a measured serving run by simulating its requests on its replicas.

    Parameters
    ----------
    row : Row
        Table row of the serving run: its cells by column name.
    trace : Requests, optional
        Requests of a trace; by default, requests are sampled with the run's lengths and load.

    Returns
    -------
    ServingPrediction
        Predicted value of the measured quantity, and further latencies.
    """
    load = str(row["load"])
    offline = load == "all at once" and not has_value(row, "command")
    layout = _replica_layout_of_run(row, offline or load == "trace")
    if trace is not None:
        return _latency(layout, _simulated(layout, trace))
    # The lengths of a row's requests: those of ShareGPT where they may be, else exact.
    first, second = float(row["input_tokens"]), float(row["output_tokens"])
    generated = first.is_integer() or first > _LONGEST_PROMPT or second < _MIN_MEAN_CHAT_TOKENS
    exact = generated or has_value(row, "distinct_prompts")
    spread = (0.0, 0.0) if exact else _SHAREGPT_LENGTH_VARIATION
    # whole prompts lie in the cache but for their last page
    hit = max(0.0, 1.0 - 16.0 / first) if has_value(row, "distinct_prompts") else 0.0
    lengths = RequestLengths(first, second, *spread, hit)
    if load == "closed loop":
        users = int(float(row["concurrency"]))
        count = int(number_cell(row, "requests", _DEFAULT_REQUESTS_PER_USER * users))
        requests = _requests(lengths, min(count, _MAX_CLOSED_LOOP_REQUESTS), math.inf)
        result = _simulated(layout, _shortened(requests) if exact else requests, users)
    elif load == "constant rate":
        # Tools pause between requests for exponential times at a "constant" rate (inference-perf): the 90th percentile
        # of latency lies 7 to 13 % above the mean (Llama 2 7B, five rates), as with Poisson arrivals within 1 %.
        count = min(int(number_cell(row, "requests", _DEFAULT_REQUESTS_AT_RATE)), _MAX_REQUESTS_AT_RATE)
        return _latency(layout, _simulated(layout, _requests(lengths, count, float(row["request_rate"]))))
    elif load == "overload":
        raise SpecError(
            "the rate is above capacity: latency grows with the length of the run, which the row does not say"
        )
    elif load == "all at once":
        result = _simulated(layout, _requests(lengths, int(float(row["requests"])), math.inf))
    else:
        raise SpecError(f"load {load!r} is not modelled")
    value = layout.replicas * result.tokens_per_s
    if not has_value(row, "output_tokens_per_s"):
        return ServingPrediction(result.mean("tpot"), _token_time(layout), _parts(result))
    return ServingPrediction(value, 1.0 / _token_time(layout), _parts(result))


def _requests(lengths: RequestLengths, count: int, rate: float) -> Requests:
    requests = sample_requests(
        count,
        input_tokens=lengths.input,
        output_tokens=lengths.output,
        rate=rate,
        input_variation=lengths.input_variation,
        hit=lengths.prefix_hit_share,
        shared=lengths.prefix_hit_share > 0,
    )
    return _conversations(requests) if lengths.output_variation else requests


def _conversations(requests: Requests) -> Requests:
    """Give requests the lengths of ShareGPT conversations: exponential answers, cut as in benchmarks, same means."""
    mean, random = float(requests.answer_tokens.mean()), np.random.default_rng(2)
    prompts = _cut(requests.prompt_tokens, _LONGEST_PROMPT)
    answers = _cut(random.exponential(mean, len(prompts)), _MAX_CONVERSATION_TOKENS - prompts)
    return replace(requests, prompt_tokens=prompts, answer_tokens=answers)


def _shortened(requests: Requests) -> Requests:
    """Draw request lengths uniformly between `MIN_RANDOM_LENGTH_RATIO` and 1 times the given lengths."""
    random, least, count = np.random.default_rng(2), MIN_RANDOM_LENGTH_RATIO, len(requests)
    lengths = (requests.prompt_tokens, requests.answer_tokens)
    prompts, answers = (np.round(length * random.uniform(least, 1.0, count)) for length in lengths)
    return replace(requests, prompt_tokens=prompts, answer_tokens=answers)


def _cut(lengths: Array, longest: Array | float) -> Array:
    """Limit lengths [tokens] to ``longest`` and rescale the others so that the mean stays; whole numbers result."""
    cut = np.minimum(lengths, longest)
    return np.asarray(np.maximum(np.round(np.minimum(cut * lengths.mean() / cut.mean(), longest)), 1.0))


def _simulated(layout: ReplicaLayout, requests: Requests, users: int | None = None) -> SimulationResult:
    batching = layout.batching()
    length = float((requests.prompt_tokens + requests.answer_tokens).mean())
    capacity = layout.memory.max_cached_tokens(length)
    longest = float((requests.prompt_tokens + requests.answer_tokens).max())
    if longest + 2.0 > capacity:
        raise SpecError(layout.memory.refusal(longest) or "a request is longer than the cache")
    each = requests if users is not None else requests.requests_of_one_replica(layout.replicas)
    share = None if users is None else max(users // layout.replicas, 1)
    return simulate_requests(
        layout.iteration_tables, batching, each, capacity=capacity, reservation=layout.reserved_answer_share,
        users=share,
    )  # fmt: skip


def _token_time(layout: ReplicaLayout) -> float:
    """Compute the least time of an output token [s]: one read of the weights at the device's memory bandwidth."""
    # The memory bandwidth of the layout's device, as its state prices imply it [byte/s].
    tables = layout.iteration_tables
    if tables.state_time_per_sequence > 0:
        bandwidth = 8.0 * tables.lowered.state_elements / tables.state_time_per_sequence
    else:
        bandwidth = layout.memory.weights / max(float(tables.non_attention_time(1.0)), 2.0**-20)
    return layout.memory.weights / bandwidth


def _latency(layout: ReplicaLayout, result: SimulationResult) -> ServingPrediction:
    value = result.mean("latency")
    return ServingPrediction(value, _token_time(layout) * result.tokens / len(result.finish), _parts(result))


def _parts(result: SimulationResult) -> dict[str, float]:
    return {
        column: result.percentile(part, percent) if percent else result.mean(part)
        for column, (part, percent) in _LATENCY_COLUMNS.items()
    }


def _folder(frame: pd.DataFrame) -> str:
    return str(Path(str(frame.attrs.get("path", "."))).parent)


def _outcome(row: Row) -> ServingPrediction:
    traced = str(row["load"]) == "trace"
    return predict_serving(row, read_trace(Path(str(row.get("folder") or ".")) / str(row["trace"])) if traced else None)


class ServingTable(RunTable):
    """Table of benchmark runs of LLM serving engines, one per row: throughput, latency, or time per output token.

    The measured value is output tokens per second. For runs at a request rate or of a trace, the value is mean latency
    [s]; without a throughput, the time per output token [s].
    """

    name = "serving"
    identifying_columns = column_set("engine load input_tokens output_tokens requests output_tokens_per_s")
    optional_columns: ClassVar[str] = (
        "engine_version model device tp pp ep n_gpus dtype dp_attention concurrency request_rate ttft_mean_s"
        " tpot_mean_s ttft_p99_s tpot_p99_s latency_mean_s latency_p90_s latency_p99_s command requests_per_s"
        " prefix_tokens prefix_groups distinct_prompts max_num_batched_tokens max_num_seqs trace kv_cache_tokens"
        " duration_s expert_parallel hardware_reported"
    )
    configuration_columns = (
        "engine_version", "model", "device", "tp", "pp", "ep", "n_gpus", "dtype", "dp_attention", "concurrency",
        "request_rate", "distinct_prompts", "max_num_batched_tokens", "max_num_seqs", "trace", "command",
    )  # fmt: skip
    measured_column = "output_tokens_per_s"
    measured_unit_in_si = 1.0
    measured_columns = ("output_tokens_per_s", "latency_mean_s", "tpot_mean_s")
    used_for_fitting = False
    excluded_source = ""

    def without_fits_to_source(self, source: str) -> ServingTable:
        """Create this kind of table with engine profiles that use no value taken from one source.

        Leave-one-source-out validation uses the result to test predictions on that source.
        """
        table = ServingTable()
        table.excluded_source = source
        return table

    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return the measured value of each serving run; nan unless above zero.

        Runs at a request rate or of a trace measure the mean latency [s]. Other runs measure output tokens per second,
        or the time per output token [s] if no throughput is given.
        """
        tokens, latency, token = (number_or_nan(frame, column) for column in self.measured_columns)
        timed = frame["load"].astype(str).isin(["constant rate", "trace", "overload"]).to_numpy()
        value = np.where(timed, latency, np.where(np.isfinite(tokens), tokens, token))
        return np.asarray(np.where(value > 0, value, np.nan))

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the throughput or latency of a serving run; the baseline is one read of the weights per token."""
        if not (has_value(row, "input_tokens") and has_value(row, "output_tokens")) and str(row["load"]) != "trace":
            raise SpecError("lengths are blank")
        outcome, names = _outcome(row), (str(row["device"]), str(row["engine"]))
        return RowPrediction.with_factors(outcome.value, _INTERVAL_FACTORS, outcome.baseline, *names)

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict the serving runs of a table; files with request traces lie in the folder of the table."""
        return super().predict(frame.assign(folder=_folder(frame), left_out=self.excluded_source))

    def secondary_quantities(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """Compute (predicted, measured) latencies of serving runs beside the throughput, shape (rows,) each [s].

        Keys follow `_LATENCY_COLUMNS`: time to first token, time per output token and request latency, as means and
        percentiles.
        """
        columns = {column: np.full(len(frame), np.nan) for column in _LATENCY_COLUMNS}
        for index, row in enumerate(row_dicts(frame.assign(folder=_folder(frame)))):
            try:
                parts = _outcome(row).further_times
            except (SpecError, KeyError, ValueError):
                continue
            for column, value in parts.items():
                columns[column][index] = value
        known = {column: values for column, values in columns.items() if column in frame}
        return {name.removesuffix("_s"): (values, number_or_nan(frame, name)) for name, values in known.items()}


RUN_TABLES.register("serving")(ServingTable())
