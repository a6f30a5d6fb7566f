"""Tables of MLPerf Inference submissions (samples per second of a machine) and of reinforcement-learning steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, ClassVar

from paleo.errors import PaleoError, SpecError
from paleo.serving.engines import ServingEngine, engine_of_release, load_engine
from paleo.serving.formats import Formats
from paleo.serving.forward_lowering import Sharding
from paleo.serving.iteration_times import iteration_tables
from paleo.serving.memory import serving_memory
from paleo.serving.plans import LatencyLimits, ReplicaLayout, ServingLoad, ServingPlan, best_serving_plan
from paleo.serving.single_pass import best_batch, fitting_batches
from paleo.serving.steady_state import RequestLengths
from paleo.specs.model import load_model
from paleo.specs.system import load_system
from paleo.tables.base import column_set
from paleo.tables.kinds._serving import system_of_device
from paleo.tables.run_tables import RUN_TABLES, Row, RowPrediction, RunTable, has_value, number_cell

if TYPE_CHECKING:
    from paleo.serving.reinforcement import Rollouts
    from paleo.specs.model import ModelSpec
    from paleo.specs.software import SoftwareProfile
    from paleo.specs.system import System


@dataclass(frozen=True, slots=True)
class LanguageBenchmark:
    """Language benchmark of MLPerf Inference: its network and the lengths of its samples [tokens].

    ``prompt_tokens`` and ``answer_tokens`` are mean lengths of the benchmark's data set (OpenOrca, its mixtures, SQuAD,
    CNN/DailyMail); an answer of 0 tokens is an encoder. ``length_deviation`` is the relative standard deviation of
    lengths; ``weight_dtype`` the number format of the weights. ``beams`` is the width of beam search: beams are
    sequences that share the KV cache of their prompt, and the engine chooses among them after each token.

    Notes
    -----
    The mean prompt of mixtral-8x7b (a third each of OpenOrca, GSM8K and MBXP) is not published with the submissions. It
    is what they imply at the timed rates of the kernels: 629 tokens on H100, 599 on H200.
    """

    model: str
    prompt_tokens: float
    answer_tokens: float
    length_deviation: float
    weight_dtype: str
    beams: int = 1


@dataclass(frozen=True, slots=True)
class SinglePassBenchmark:
    """Benchmark of MLPerf Inference whose network answers with one forward pass (images, recommendation).

    ``model`` is the network, ``weight_dtype`` the number format of its weights, ``fused_layers`` the layers that
    submissions run as one kernel.
    """

    model: str
    weight_dtype: str
    fused_layers: str = ""


#: Benchmarks by the name of the submission without its accuracy; means of the data sets as their reference code
#: prints them (mixtral-8x7b's prompts are inferred), answers where a row states none.
BENCHMARKS = {
    "llama2-70b": LanguageBenchmark("llama2-70b", 294.0, 294.0, 0.8, "fp8"),
    "mixtral-8x7b": LanguageBenchmark("mixtral-8x7b", 546.0, 145.0, 0.8, "fp8"),
    "bert": LanguageBenchmark("bert_large", 178.0, 0.0, 0.5, "fp8"),
    # 781 words of an article (mean, See et al., arXiv:1704.04368) at 1.2 tokens a word, and 40 tokens of instruction.
    "gptj": LanguageBenchmark("gpt-j-6b", 980.0, 69.0, 0.5, "fp8", beams=4),
}
#: NVIDIA's submissions run the first stage of ResNet-50 in int8 as one kernel (plugin RnRes2FullFusion_TRT).
_SINGLE_PASS_BENCHMARKS = {
    "resnet50": SinglePassBenchmark("resnet50", "int8", "stage1"),
    "retinanet": SinglePassBenchmark("retinanet", "int8"),
    "stable-diffusion": SinglePassBenchmark("stable-diffusion-xl", "fp8"),
    "dlrm": SinglePassBenchmark("dlrm-dcnv2", "int8"),
}
#: Why the others are not priced.
_UNMODELLED_BENCHMARKS = {
    "3d-unet": "the sizes of KiTS19's 42 scans, which give their windows of 128 x 128 x 128, are not stated"
}
#: Tokens of the longest question that BERT reads (SQuAD with its paragraph, MLPerf Inference), and share of the peak in
#: sixteen bits at which Hopper's fused attention computes the padding to these: what the server scenario adds to the
#: offline time of a sample is 28 us on H100 and 30 on H200 in either accuracy, 44 on H100 PCIe (0.38, 0.36, 0.32).
_PADDED_TOKENS, _PADDED_ATTENTION_PEAK_FRACTION = 384.0, 0.36
#: Factors of the 90 % interval; degrees of a replica that submitters take.
_INTERVAL_FACTORS, _TENSOR_PARALLEL_DEGREES = (0.7, 1.4), (1, 2, 4, 8)


def _benchmark_of(row: Row) -> LanguageBenchmark | SinglePassBenchmark:
    """Return the benchmark of an MLPerf Inference submission; raise SpecError if it cannot be modelled."""
    name = str(row["model"])
    if "MaxQ" in str(row.get("system_reported") or ""):
        raise SpecError("MaxQ: its power limit, below the one that is sold, is unknown")
    benchmarks: dict[str, LanguageBenchmark | SinglePassBenchmark] = {**BENCHMARKS, **_SINGLE_PASS_BENCHMARKS}
    for known, benchmark in benchmarks.items():
        if name.startswith(known):
            return benchmark
    reasons = (reason for word, reason in _UNMODELLED_BENCHMARKS.items() if name.startswith(word))
    raise SpecError(f"{name}: {next(reasons, 'the network is not known')}")


def _engine_and_formats(row: Row, weights: str) -> tuple[ServingEngine, Formats]:
    """Return (serving engine, number formats of weights and KV cache) of an MLPerf Inference submission.

    vLLM serves the published checkpoint in bf16. Other submissions run TensorRT-LLM with weights in format ``weights``
    (such as ``fp8``) and an fp8 cache. A TensorRT engine launches kernels from C++, so that the host's launch time is
    0.
    """
    name, _, release = str(row.get("framework") or "").partition(" ")
    published = name.lower() == "vllm"
    built = load_engine("tensorrt-llm").model_copy(update={"issue": 0.0})
    engine = engine_of_release("vllm", release) if published else built
    formats = Formats("bf16") if published else Formats(weights, "fp8")
    return engine.offline_profile, formats


@cache
def _replica_layouts(
    model: str, device: str, engine: ServingEngine, formats: Formats, gpus: int, length: float
) -> tuple[ReplicaLayout, ...]:
    """Build the serving replicas of a machine whose memory holds the network, one per degree of tensor parallelism.

    ``length`` is the number of tokens of a request that the KV cache must hold.
    """
    system = system_of_device(device)
    fitting = []
    for degree in _TENSOR_PARALLEL_DEGREES:
        if degree > min(gpus, max(system.devices_per_node, 1)):
            continue
        sharding = Sharding(degree)
        try:
            prices = iteration_tables(load_model(model), load_system(system.name), sharding, formats, engine.kernels)
        except PaleoError:
            continue
        memory = serving_memory(prices.lowered, sharding, formats, engine, system.device)
        if not memory.refusal(length):
            limit = engine.batch_limit(system.device)
            fitting.append(ReplicaLayout(sharding, formats, engine, max(gpus // degree, 1), prices, memory, limit))
    return tuple(fitting)


def _predict_samples_per_s(row: Row) -> float:
    """Predict the samples per second of an MLPerf Inference submission, with the best tensor-parallel degree."""
    benchmark, gpus = _benchmark_of(row), int(float(row["n_gpus"]))
    scenario = str(row["scenario"])
    if scenario not in ("offline", "server", "interactive"):
        raise SpecError(f"scenario {scenario!r} is one request at a time: not modelled")
    if isinstance(benchmark, SinglePassBenchmark) or benchmark.answer_tokens == 0.0:
        return _single_pass_samples_per_s(row, benchmark, gpus, scenario)
    answer = round(number_cell(row, "output_tokens_per_sample", benchmark.answer_tokens))
    limits = LatencyLimits()
    if scenario != "offline":
        limits = LatencyLimits(_limit(row, "ttft_limit_s"), _limit(row, "tpot_limit_s"), _limit(row, "latency_limit_s"))
    engine, formats = _engine_and_formats(row, benchmark.weight_dtype)
    return _best(benchmark, str(row["device"]), engine, formats, gpus, answer, limits)


@cache
def _best(
    benchmark: LanguageBenchmark,
    device: str,
    engine: ServingEngine,
    formats: Formats,
    gpus: int,
    answer: int,
    limits: LatencyLimits,
) -> float:
    layouts = _replica_layouts(benchmark.model, device, engine, formats, gpus, 4.0 * benchmark.prompt_tokens)
    if not layouts:
        raise SpecError(f"{benchmark.model} in {formats.weight_format} does not fit on {gpus} of {device}")
    deviations = (benchmark.length_deviation, benchmark.length_deviation)
    lengths = RequestLengths(benchmark.prompt_tokens / benchmark.beams, float(answer), *deviations)
    plans = [best_serving_plan(layout, ServingLoad("most", lengths), limits) for layout in layouts]
    choice = answer * engine.beam
    rates = [_beam_search_samples_per_s(plan, benchmark.beams, choice) for plan in plans if plan is not None]
    if not rates:
        raise SpecError("no layout keeps the limits of latency")
    return max(rates)


def _beam_search_samples_per_s(plan: ServingPlan, beams: int, choice: float) -> float:
    """Compute the samples per second of a serving plan under beam search, where each sample is ``beams`` requests.

    ``choice`` is the time of choosing among beams per request [s], which each replica spends between its iterations.

    >>> from types import SimpleNamespace
    >>> served = SimpleNamespace(requests_per_s=80.0, layout=SimpleNamespace(replicas=2))
    >>> _beam_search_samples_per_s(served, 1, 0.1), _beam_search_samples_per_s(served, 4, 0.025)
    (80.0, 10.0)
    """
    if beams == 1:
        return plan.requests_per_s
    replicas = plan.layout.replicas
    return replicas / (beams * (replicas / plan.requests_per_s + choice))


def _limit(row: Row, column: str) -> float | None:
    value = number_cell(row, column, 0.0)
    return value if value > 0 else None


def _single_pass_samples_per_s(
    row: Row, benchmark: LanguageBenchmark | SinglePassBenchmark, gpus: int, scenario: str
) -> float:
    """Predict the samples per second of a network that answers with one forward pass (encoder, image, recommendation).

    Activations between the kernels of an encoder have 8 bits, and 16 if 99.9 % of the accuracy is required. Then a
    recommendation also multiplies in 16 bits.
    """
    system, formats = system_of_device(str(row["device"])), Formats(benchmark.weight_dtype)
    limit = None if scenario == "offline" else _limit(row, "latency_limit_s")
    between = 2.0 if str(row["model"]).endswith("99.9") else 1.0
    network = load_model(benchmark.model)
    if isinstance(benchmark, SinglePassBenchmark):
        tried = fitting_batches(network, system, formats, benchmark.fused_layers, between=between)
    else:
        tried = fitting_batches(network, system, formats, length=benchmark.prompt_tokens, between=between)
        if limit is not None:
            padding = padding_time(network, system, benchmark)
            tried = tuple(replace(each, batch_time=each.batch_time + each.requests * padding) for each in tried)
    best = best_batch(tried, limit)
    if best is None:
        raise SpecError("no batch keeps the limit of latency")
    return gpus * best.requests_per_s


def padding_time(model: ModelSpec, system: System, benchmark: LanguageBenchmark) -> float:
    """Compute the time that attention over padding adds to each sample of an encoder in the server scenario [s].

    Offline, MLPerf's rules allow sorting samples by length, so that a batch has nearly one length. In the server
    scenario samples come in any order, and a fused kernel that holds a whole sequence computes each sample as long as
    the longest. Only submissions on Hopper show this; 0 for other architectures.

    Parameters
    ----------
    model : ModelSpec
        The encoder.
    system : System
        Machine: its devices, nodes and links.
    benchmark : LanguageBenchmark
        Lengths of samples.

    Returns
    -------
    float
        Time per sample [s].
    """
    device = system.device
    if device.architecture != "Hopper":
        return 0.0
    squares = _PADDED_TOKENS**2 - benchmark.prompt_tokens**2 * (1.0 + benchmark.length_deviation**2)
    flops = 4.0 * float(model.params["layers"]) * float(model.params["hidden"]) * squares
    return flops / (_PADDED_ATTENTION_PEAK_FRACTION * device.peak_flops_per_s("fp16"))


class MlperfInferenceTable(RunTable):
    """Table of submissions to MLPerf Inference, one per row; the measured value is samples per second."""

    name = "inference"
    identifying_columns = frozenset({"scenario", "target_qps", "samples_per_s", "model", "n_gpus", "latency_p99_s"})
    optional_columns: ClassVar[str] = (
        "round submitter device nodes gpus_per_node tokens_per_s weight_dtype_reported input_dtype_reported"
        " ttft_limit_s tpot_limit_s latency_limit_s ttft_p99_s tpot_p99_s output_tokens_per_sample samples_per_query"
        " valid system_reported division framework"
    )
    configuration_columns = (
        "device", "submitter", "system_reported", "framework", "output_tokens_per_sample", "latency_limit_s",
    )  # fmt: skip
    measured_column = "samples_per_s"
    measured_unit_in_si = 1.0
    used_for_fitting = False

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the samples per second of an MLPerf Inference submission.

        The baseline is the peak FLOP/s of its devices.
        """
        if not has_value(row, "device") or not has_value(row, "n_gpus"):
            raise SpecError("device or n_gpus is blank")
        value, device = _predict_samples_per_s(row), system_of_device(str(row["device"])).device
        dtype = "bf16" if "bf16" in device.peak else device.training_dtype
        peak = float(row["n_gpus"]) * device.peak_flops_per_s(dtype)
        return RowPrediction.with_factors(value, _INTERVAL_FACTORS, peak, str(row["device"]), str(row["model"]))


RUN_TABLES.register("inference")(MlperfInferenceTable())


#: Networks and systems of rows of reinforcement learning by the names in the table.
_CATALOG_NETWORK_OF_NAME = {
    "DeepSeek V3": "deepseek_v3", "Qwen3-235B": "qwen3-235b-a22b", "Qwen3-30B3A": "qwen3-30b-a3b",
    "Nemotron-3-Nano-30B-A3B": "nemotron-3-nano-30b-a3b",
}  # fmt: skip
_CATALOG_SYSTEM_OF_NAME = {
    "H100": "dgx-h100", "H200": "dgx-h200", "B200": "dgx-b200", "GB200": "gb200-nvl72", "A100": "dgx-a100-80gb",
}  # fmt: skip
#: Tokens of a prompt where a row states prompts and answers together, and at most so large a share of both.
_DEFAULT_PROMPT_TOKENS, _MAX_PROMPT_SHARE = 150.0, 1.0 / 3.0
#: Factors of the 90 % interval of a step.
_STEP_INTERVAL = (0.7, 1.5)


def parse_degrees(cell: object, names: tuple[str, ...]) -> dict[str, int]:
    """Parse the parallel degrees of a layout such as ``[1,1,16,16,n/a]``, in the order of ``names``; ``n/a`` becomes 1.

    >>> parse_degrees("[2,2,16,8,n/a]", ("tp", "cp", "ep", "pp", "vpp"))
    {'tp': 2, 'cp': 2, 'ep': 16, 'pp': 8, 'vpp': 1}
    """
    texts = [part.strip() for part in str(cell).strip("[] ").split(",")]
    if len(texts) != len(names):
        raise SpecError(f"layout {str(cell)[:40]!r}: expected {len(names)} degrees ({', '.join(names)})")
    return {name: int(text) if text.isdigit() else 1 for name, text in zip(names, texts, strict=True)}


class ReinforcementStepTable(RunTable):
    """Table of reinforcement-learning steps, one per row; the measured value is the step time [s].

    A step generates rollouts with a serving engine and trains the policy on them.
    """

    name = "rl_steps"
    identifying_columns = column_set("algorithm policy generation_layout training_layout generation_batch step_s")
    optional_columns: ClassVar[str] = (
        "system model precision n_gpus max_sequence mean_sequence training_batch tokens_per_s_per_gpu"
    )
    configuration_columns = ("system", "model", "n_gpus", "max_sequence", "mean_sequence", "training_batch")
    measured_column = "step_s"
    measured_unit_in_si = 1.0
    used_for_fitting = False

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the time of a reinforcement-learning step [s]; the baseline is rollout tokens per GPU."""
        from paleo.studies.reinforcement import ReinforcementQuestion, rank_reinforcement_steps

        needed = ("system", "model", "n_gpus", "max_sequence", "mean_sequence", "training_batch", "generation_batch")
        missing = [column for column in needed if not has_value(row, column)]
        if missing:
            raise SpecError(f"{missing[0]} is blank")
        name = str(row["system"])
        if name not in _CATALOG_SYSTEM_OF_NAME:
            raise SpecError(f"system {name!r} is not known; {', '.join(_CATALOG_SYSTEM_OF_NAME)} are")
        network = str(row["model"])
        model = load_model(_CATALOG_NETWORK_OF_NAME.get(network, network))
        system = load_system(_CATALOG_SYSTEM_OF_NAME[name])
        trainer = parse_degrees(row["training_layout"], ("tp", "cp", "ep", "pp", "vpp"))
        engine = parse_degrees(row["generation_layout"], ("tp", "pp"))
        staleness = 0 if str(row["policy"]).lower() == "on policy" else int(str(row["policy"]).partition("-")[0])
        parts = [f"{name}={trainer[name]}" for name in ("tp", "cp", "pp", "ep") if trainer[name] > 1]
        folded = ["etp=1"] if trainer["ep"] > 1 and trainer["tp"] * trainer["cp"] > 1 else []
        question = ReinforcementQuestion(
            model, system, int(float(row["n_gpus"])), _rollouts(row), staleness=staleness,
            layouts=[Sharding(engine["tp"], engine["pp"])], strategies=[",".join([*parts, *folded, "zero=1"])],
        )  # fmt: skip
        steps, refusals = rank_reinforcement_steps(question)
        if not steps:
            raise SpecError(refusals[0] if refusals else "no layout of engine and trainer")
        work = float(row["generation_batch"]) * float(row["mean_sequence"]) / float(row["n_gpus"])
        names = (system.device.name, "step of reinforcement learning")
        return RowPrediction.with_factors(steps[0].step_time, _STEP_INTERVAL, work, *names)


def _rollouts(row: Row) -> Rollouts:
    from paleo.serving.reinforcement import Rollouts

    mean, longest = float(row["mean_sequence"]), float(row["max_sequence"])
    prompt = min(_DEFAULT_PROMPT_TOKENS, _MAX_PROMPT_SHARE * mean)
    count, batch = int(float(row["generation_batch"])), int(float(row["training_batch"]))
    return Rollouts(count, batch, prompt, mean - prompt, max(longest - prompt, 1.0))


RUN_TABLES.register("rl_steps")(ReinforcementStepTable())
