"""Public functions that predict inference services (`serve`) and reinforcement learning (`rl`).

Their answers are tables, documents and data frames like those of `paleo.questions`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paleo.answers import StudyResult
from paleo.errors import SpecError, suggest_names
from paleo.files import read_bytes
from paleo.serving.engines import BatchLimit, ServingEngine, load_engine
from paleo.serving.formats import parse_formats
from paleo.serving.forward_lowering import Sharding
from paleo.serving.plans import LatencyLimits, ServingLoad
from paleo.serving.requests import Requests, read_trace
from paleo.serving.service import Service, best_engine, evaluate_service
from paleo.serving.single_pass import BatchedService, batched_service, is_single_pass
from paleo.serving.steady_state import RequestLengths
from paleo.specs.loading import MAX_EXACT_INTEGER, MAX_FILE_BYTES, convert_numpy_arguments
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.system import System, resolve_system
from paleo.studies.cost import parse_tariff, rent_rate
from paleo.units import checked_count, checked_number, parse_quantity, parse_whole_number

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paleo.serving.benchmark import EngineBenchmark, ServiceAudit
    from paleo.studies.reinforcement import ReinforcementStudy

#: Default number of tokens of a prompt and of an answer.
_DEFAULT_PROMPT_TOKENS, _DEFAULT_ANSWER_TOKENS = 1000.0, 300.0
#: Engines that ``engine="auto"`` compares.
_COMPARED_ENGINES = ("vllm", "sglang", "tensorrt-llm")
#: Margin by which a fraction must stay below one, and the largest coefficient of variation of lengths.
_MIN_MARGIN_BELOW_ONE, _MAX_LENGTH_VARIATION = 2.0**-20, 10.0


@dataclass(frozen=True, repr=False, eq=False)
class ServeResult(StudyResult):
    """Answer of `paleo.serve`: plans of an inference service, the best first and simulated.

    ``compared_services`` has the answers of all systems.
    """

    command, rows_key = "serve", "plans"
    report_module_name = "paleo.report.serving"
    service: Service
    compared_services: tuple[Service, ...] = ()

    @property
    def limits_met(self) -> bool:
        """True if a plan serves the load within the limits."""
        return self.service.best is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about uncertain parts of the prediction, one sentence each."""
        return self.service.warnings


@dataclass(frozen=True, repr=False, eq=False)
class SinglePassResult(StudyResult):
    """Answer of `paleo.serve` for networks that run forward passes alone, such as classifiers.

    ``compared_services`` has the answers of all systems.
    """

    command, rows_key = "serve", "batches"
    report_module_name = "paleo.report.single_pass_service"
    service: BatchedService
    compared_services: tuple[BatchedService, ...] = ()

    @property
    def limits_met(self) -> bool:
        """True if at least one batch size meets the latency limit."""
        return self.service.best is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about the answer, always empty."""
        return ()


@convert_numpy_arguments
def serve(
    model: str | Path | ModelSpec | None,
    system: str | Path | System,
    *,
    gpus: int = 1,
    input: float | str | None = None,
    output: float | str | None = None,
    trace: str | Path | Requests | None = None,
    rate: float | str | None = None,
    concurrency: int | None = None,
    users: int | None = None,
    think: str | float | None = None,
    arrivals: str = "poisson",
    ttft: str | float | None = None,
    tpot: str | float | None = None,
    latency: str | float | None = None,
    percentile: int | str = 99,
    engine: str | Path = "vllm",
    strategy: str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    prefix_hit: float = 0.0,
    length_variation: float = 0.0,
    batch_tokens: int | None = None,
    sequences: int | None = None,
    speculate: int = 0,
    acceptance: float | None = None,
    disaggregate: bool = False,
    command: str | None = None,
    **tariff: Any,
) -> ServeResult | SinglePassResult:
    """Predict how many requests a service answers a second, how fast, and at what price.

    Networks that answer in forward passes alone (images, encoders, diffusion) take batches of requests. Such networks
    accept only the options ``weights``, ``latency`` and, for encoders, ``input``.

    Parameters
    ----------
    model, system
        Names of the catalog, paths, or what was loaded. Several systems are compared, perhaps each with its devices:
        ``dgx-h100:8,dgx-b200:4``.
    gpus : int
        Devices in all; what one replica does not take are further replicas.
    input, output : float or str
        Mean tokens of a prompt and an answer: ``500``, ``0.5k``, or ``500~0.8`` with a coefficient of variation.
    trace : path or Requests, optional
        Trace of requests with arrivals and lengths, in place of the means.
    rate : float or str, optional
        Requests a second, ``20`` or ``20/s``; without a load the most that is served.
    concurrency, users : int, optional
        Users who each wait for an answer.
    think : str or float, optional
        Time from an answer until its user asks again.
    arrivals : str
        ``poisson``, ``constant`` or ``at once`` (a queue of all requests, as in batch inference).
    ttft, tpot, latency : str or float, optional
        Limits of the time to the first token, of a further token and of the whole answer: ``2s``, ``50ms``.
    percentile : int or "mean"
        Share of the requests that must keep the limits: 50, 90, 95, 99.
    engine : str or path
        Profile of the engine: vllm, sglang, tensorrt-llm; ``auto`` takes the one that serves most.
    strategy : str, optional
        Degrees of a replica (``tp=4``, ``tp=8,pp=2``, ``tp=8,ep=8``, ``attention_dp=8``); searched by default.
    weights, cache : str
        Formats of weights and cache; several weights with commas are compared. By default weights have the format in
        which they are published (``released:`` of the model file), and the cache is in bf16. ``fp8+mxfp4`` is fp8 with
        experts in another format.
    prefix_hit : float
        Share of the prompts' tokens that is found in the prefix cache.
    length_variation : float
        Coefficient of variation of both lengths (log-normal); 0: all alike.
    batch_tokens, sequences : int, optional
        Most tokens and sequences of an iteration, in place of the engine's defaults.
    speculate : int
        Tokens that a head of one layer drafts in each iteration (EAGLE, MTP).
    acceptance : float, optional
        Probability that a drafted token is accepted.
    disaggregate : bool
        Also find the best division into replicas of prefill and of decode.
    command : str, optional
        Command line of vLLM, SGLang or TensorRT-LLM, or a file with one; other options take precedence.
    **tariff
        ``price``, ``term``, ``buy``, ``electricity``, ``pue``, ``host_power``.

    Returns
    -------
    ServeResult or SinglePassResult
        The answer; `ServeResult.limits_met` is False if no plan, or no batch size, meets the limits.
    """
    drafts: dict[str, Any] = {}
    if command is not None:
        stated = _stated(command)
        model = model or stated["model"]
        engine, strategy = (stated["engine"] or engine) if engine == "vllm" else engine, strategy or stated["strategy"]
        weights, cache = weights or stated["weights"], cache or stated["cache"]
        batch_tokens, sequences = batch_tokens or stated["tokens"], sequences or stated["sequences"]
        drafts = {} if speculate else stated["speculation"]
        speculate = speculate or drafts["drafted"]
    if not model:
        raise SpecError("no network is named; state MODEL, such as llama3-8b")
    network = model if isinstance(model, ModelSpec) else load_model(model)
    weights = str(weights or network.released)
    machines = _machines(system, gpus)
    if is_single_pass(network, machines[0][0]):
        others: dict[str, Any] = {
            "output": output, "trace": trace, "rate": rate, "concurrency": concurrency or users, "think": think,
            "ttft": ttft, "tpot": tpot, "strategy": strategy, "cache": cache, "prefix-hit": prefix_hit or None,
            "speculate": speculate or None, "disaggregate": disaggregate or None,
        }  # fmt: skip
        unfit = [name for name, value in others.items() if value is not None]
        if unfit:
            raise SpecError(f"--{unfit[0]}: {network.name} generates no tokens; state --weights, --latency or --input")
        return _batched(network, machines, weights, _seconds("latency", latency), input, tariff)
    changes = drafts | _speculation(speculate, acceptance)
    names = _COMPARED_ENGINES if engine == "auto" else (engine,)
    profiles = [load_engine(each).model_copy(update=changes) for each in names]
    users = concurrency or users
    load = _serving_load(input, output, trace, rate, users, think, arrivals, prefix_hit, length_variation)
    first, further, whole = _seconds("ttft", ttft), _seconds("tpot", tpot), _seconds("latency", latency)
    limits = LatencyLimits(first, further, whole, _percentile(percentile))
    formats = [parse_formats(each, cache) for each in weights.split(",")]
    layouts = None if str(strategy) in ("None", "auto") else [parse_sharding(str(strategy))]
    answers = []
    for machine, count in machines:
        usd, _ = rent_rate(machine, count, parse_tariff(**tariff))
        tried = [
            evaluate_service(
                network, machine, count, each, load, limits, formats, layouts,
                _bound(each, machine, batch_tokens, sequences), usd, disaggregate=disaggregate,
            )
            for each in profiles
        ]  # fmt: skip
        answers.append(best_engine(tried))
    answers.sort(key=lambda each: each.sort_key)
    return ServeResult(answers[0], tuple(answers))


def token_service_of_result(answer: ServeResult | SinglePassResult) -> Service:
    """Return the token-generating service in a result of `serve`; refuse networks that run forward passes alone.

    Parameters
    ----------
    answer : ServeResult or SinglePassResult
        What `serve` returned.

    Returns
    -------
    Service
        The service.

    Raises
    ------
    SpecError
        If the network generates no tokens.
    """
    if isinstance(answer, SinglePassResult):
        raise SpecError(f"{answer.service.model.name} generates no tokens; expected a language model")
    return answer.service


def _batched(
    network: ModelSpec,
    machines: Sequence[tuple[System, int]],
    weights: str,
    limit: float | None,
    tokens: float | str | None,
    tariff: dict[str, Any],
) -> SinglePassResult:
    """Evaluate batched serving of a network that runs forward passes alone, on each system and weight format."""
    if tokens is not None and "seq" not in network.params:
        raise SpecError(f"--input: a request to {network.name} has no tokens")
    length = 0.0 if tokens is None else _length("input", tokens, 0.0)[0]
    answers = []
    for machine, count in machines:
        usd, _ = rent_rate(machine, count, parse_tariff(**tariff))
        for each in weights.split(","):
            formats = parse_formats(each, None)
            answers.append(batched_service(network, machine, count, formats, limit, length, usd))
    answers.sort(key=lambda each: (each.best is None, each.usd_per_million or 0.0, -(each.requests_per_s or 0.0)))
    return SinglePassResult(answers[0], tuple(answers))


def _machines(system: str | Path | System, gpus: int) -> list[tuple[System, int]]:
    """Return the systems to compare, with the number of devices of each."""
    names = [each.strip() for each in system.split(",")] if isinstance(system, str) else [system]
    pairs: list[tuple[System, int]] = []
    for name in names:
        text, _, number = name.rpartition(":") if isinstance(name, str) else (name, "", "")
        counted = bool(text) and str(number).isdecimal()
        machine = resolve_system(text if counted else name)
        count = parse_whole_number(number, MAX_EXACT_INTEGER) if counted else gpus
        pairs.append((machine, _checked_gpus(count, machine)))
    return pairs


def _speculation(drafted: int, acceptance: float | None) -> dict[str, Any]:
    drafted = checked_count("--speculate", drafted, 0, 64)
    if acceptance is None:
        return {"drafted": drafted}
    if not drafted:
        raise SpecError(f"--acceptance {acceptance!r:.40}: needs --speculate as well")
    acceptance = checked_number("--acceptance", acceptance, 0.0, 1.0 - _MIN_MARGIN_BELOW_ONE)
    return {"drafted": drafted, "acceptance": acceptance}


def _stated(text: str) -> dict[str, Any]:
    """Read options of `serve` from an engine's launch command, or from a file with such a command."""
    from paleo.serving.commands import parse_engine_command

    if not isinstance(text, str):
        raise SpecError(f"command {text!r:.80}: expected a command line, or a file with one")
    if " " not in text.strip():
        raw = read_bytes(text, most=MAX_FILE_BYTES, expected="a command line, or a file with one")
        text = raw.decode("utf-8", "replace")
    stated = parse_engine_command(text.replace("\\\n", " "))
    degrees = stated.sharding
    return {
        "model": stated.model, "engine": stated.engine, "strategy": degrees.text if degrees.gpus > 1 else None,
        "weights": stated.weight_format, "cache": stated.cache_format, "tokens": stated.max_batched_tokens,
        "sequences": stated.max_sequences, "speculation": stated.speculation_settings,
    }  # fmt: skip


def _bound(engine: ServingEngine, system: System, tokens: int | None, sequences: int | None) -> BatchLimit | None:
    """Return the user's limits on tokens and sequences of an engine iteration; None if the user sets neither."""
    if tokens is None and sequences is None:
        return None
    usual = engine.batch_limit(system.device)
    tokens = checked_count("--batch-tokens", usual.tokens if tokens is None else tokens)
    sequences = checked_count("--sequences", usual.sequences if sequences is None else sequences)
    return BatchLimit(tokens=tokens, sequences=sequences)


def _checked_gpus(gpus: object, system: System) -> int:
    number = checked_count("--gpus", gpus)
    if system.max_devices is not None and number > system.max_devices:
        raise SpecError(f"--gpus {number}: system {system.name} has {system.max_devices}")
    return number


def parse_positive_number(name: str, value: float | str) -> float:
    """Parse the positive number of a command-line option, such as a request rate: ``20/s`` or ``2k``.

    Parameters
    ----------
    name : str
        Option that a message names.
    value : float or str
        Number, or a text with or without a prefix.

    Returns
    -------
    float
        The number.

    Raises
    ------
    SpecError
        If the text is no number above zero.
    """
    try:
        number = parse_quantity(value.removesuffix("/s"), "count") if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError) as error:  # SpecError is a ValueError
        raise SpecError(f"--{name} {value!r:.60}: {error}") from None
    if not 1e-12 <= number < 2.0**40:
        raise SpecError(f"--{name} {value!r:.60}: expected a number above zero, 1e-12 to 1e12")
    return number


def _seconds(name: str, value: str | float | None) -> float | None:
    """Parse a time given as seconds or as text with a unit, such as ``50ms``; None stays None."""
    if value is None:
        return None
    try:
        seconds = parse_quantity(value, "time") if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError) as error:  # SpecError is a ValueError
        raise SpecError(f"--{name} {error}") from None
    if not 0 < seconds < 2.0**30:
        raise SpecError(f"--{name} {value!r:.60}: expected a time above zero, such as 2s or 50ms")
    return seconds


def _percentile(value: int | str) -> int:
    text = str(value).lower().removeprefix("p")
    known = {"mean": 0, "50": 50, "90": 90, "95": 95, "99": 99}
    if text not in known:
        raise SpecError(f"--percentile {value!r:.40}: expected one of {', '.join(known)}")
    return known[text]


def _serving_load(
    prompt: float | str | None,
    answer: float | str | None,
    trace: str | Path | Requests | None,
    rate: float | str | None,
    users: int | None,
    think: str | float | None,
    arrivals: str,
    hit: float,
    variation: float,
) -> ServingLoad:
    hit = checked_number("--prefix-hit", hit, 0.0, 1.0 - _MIN_MARGIN_BELOW_ONE)
    variation = checked_number("--length-variation", variation, 0.0, _MAX_LENGTH_VARIATION)
    users = None if users is None else checked_count("--concurrency", users)
    if arrivals not in (kinds := ("poisson", "constant", "at once")):
        raise SpecError(f"--arrivals {arrivals!r:.40}; {suggest_names(str(arrivals), kinds)}")
    if trace is not None:
        if prompt is not None or answer is not None or rate is not None or users:
            raise SpecError("--trace states lengths and arrivals; leave out --input, --output, --rate, --concurrency")
        return _trace_load(trace, hit)
    if rate is not None and users:
        raise SpecError("--rate and --concurrency: state one of them")
    first, spread = _length("input", _DEFAULT_PROMPT_TOKENS if prompt is None else prompt, variation)
    second, spread2 = _length("output", _DEFAULT_ANSWER_TOKENS if answer is None else answer, variation)
    lengths = RequestLengths(first, second, spread, spread2, hit)
    if users:
        return ServingLoad("closed", lengths, users=users, think_time=_seconds("think", think) or 0.0)
    if rate is not None:
        kind = "constant" if arrivals == "constant" else "poisson"
        return ServingLoad(kind, lengths, rate=parse_positive_number("rate", rate))  # type: ignore[arg-type]
    return ServingLoad("at once" if arrivals == "at once" else "most", lengths)


def _length(name: str, value: float | str, variation: float) -> tuple[float, float]:
    """Parse a token count such as ``500`` or ``500~0.8`` into the mean and the coefficient of variation."""
    mean, _, spread = str(value).partition("~")
    if not spread:
        return parse_positive_number(name, value), variation
    try:
        share = float(spread)
    except ValueError:
        share = -1.0
    if not 0 <= share <= _MAX_LENGTH_VARIATION:
        raise SpecError(f"--{name} {value!r:.60}: expected MEAN~VARIATION, such as 500~0.8")
    return parse_positive_number(name, mean), share


def _trace_load(trace: str | Path | Requests, hit: float) -> ServingLoad:
    requests = trace if isinstance(trace, Requests) else read_trace(trace)
    span = float(requests.arrival[-1] - requests.arrival[0]) if len(requests) > 1 else 1.0
    tokens = requests.prompt_tokens, requests.answer_tokens
    means = [float(each.mean()) for each in tokens]
    spreads = [float(each.std()) / mean for each, mean in zip(tokens, means, strict=True)]
    lengths = RequestLengths(means[0], means[1], spreads[0], spreads[1], hit)
    rate = len(requests) / span if span > 0 else float(len(requests))
    return ServingLoad("trace", lengths, rate=rate, requests=requests, request_count=len(requests))


def parse_sharding(text: str) -> Sharding:
    """Parse how one replica of a served network is divided over GPUs.

    Parameters
    ----------
    text : str
        Degrees, such as ``tp=8,ep=8``.

    Returns
    -------
    Sharding
        The degrees.

    Raises
    ------
    SpecError
        If a degree is unknown or no whole number.

    Examples
    --------
    >>> parse_sharding("tp=8,ep=8")
    Sharding(tp=8, pp=1, attention_dp=1, expert_parallel=True)
    """
    degrees: dict[str, int] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name not in ("tp", "pp", "ep", "attention_dp", "dp"):
            known = suggest_names(name, ["tp", "pp", "ep", "attention_dp"])
            raise SpecError(f"--strategy {text!r:.60}: unknown {name!r}; {known}")
        if not value.isdigit() or int(value) < 1:
            raise SpecError(f"--strategy {text!r:.60}: {name} must be a whole number above zero")
        degrees[name] = int(value)
    tp, ranks = degrees.get("tp", 1), degrees.get("attention_dp", 1)
    if tp > 1 and ranks > 1:
        raise SpecError(f"--strategy {text!r:.60}: attention is divided by tp or by attention_dp, not by both")
    group, experts = tp * ranks, degrees.get("ep", 1)
    if experts not in (1, group):
        raise SpecError(f"--strategy {text!r:.60}: ep is 1 or all {group} ranks that share a layer")
    return Sharding(tp, degrees.get("pp", 1), ranks, experts > 1 or ranks > 1)


@dataclass(frozen=True, repr=False, eq=False)
class ReinforcementResult(StudyResult):
    """Answer of `paleo.rl`: predicted steps of reinforcement learning by layout of GPUs, the shortest first."""

    command, rows_key = "rl", "plans"
    report_module_name = "paleo.report.reinforcement"
    study: ReinforcementStudy

    @property
    def layout_found(self) -> bool:
        """True if engine and trainer fit in some layout."""
        return bool(self.study.steps)


@convert_numpy_arguments
def rl(
    model: str | Path | ModelSpec,
    system: str | Path | System,
    *,
    gpus: int | None = None,
    algorithm: str = "grpo",
    rollouts: int = 512,
    batch: int | None = None,
    input: float | str = 200.0,
    output: float | str = 1000.0,
    max_output: float | str | None = None,
    steps: int = 1000,
    staleness: int = 0,
    generators: int | None = None,
    engine_strategy: str | None = None,
    strategy: str | None = None,
    software: str = "megatron-core",
    **tariff: Any,
) -> ReinforcementResult:
    """Predict how long a step of reinforcement learning takes, by part, and what a run costs.

    Parameters
    ----------
    model, system
        Names of the catalog, paths, or what was loaded.
    gpus : int, optional
        Devices in all, of engine and trainer; those of a node by default.
    algorithm : str
        grpo, rloo, dapo, ppo or dpo.
    rollouts, batch : int
        Answers of a step, and sequences of an optimizer step (all of them by default).
    input, output, max_output : float or str
        Mean tokens of prompts and answers, and the most of an answer (four times the mean by default).
    steps : int
        Steps of the run that is priced.
    staleness : int
        Steps that the engine may be ahead on separate GPUs; with 0 engine and trainer use all GPUs in turn.
    generators : int, optional
        GPUs of the engine; the best split by default.
    engine_strategy, strategy : str, optional
        Degrees of a replica of the engine and of the trainer; a few usual ones are tried by default.
    software : str
        Profile of the trainer.
    **tariff
        See `serve`.

    Returns
    -------
    ReinforcementResult
        The steps of all layouts that were tried, the shortest first.
    """
    from paleo.serving.reinforcement import EXTRA_PASSES_AND_CRITIC, Rollouts
    from paleo.studies.reinforcement import ReinforcementQuestion, reinforcement_study

    network = model if isinstance(model, ModelSpec) else load_model(model)
    machine = resolve_system(system)
    gpus = _checked_gpus(max(machine.devices_per_node, 1) if gpus is None else gpus, machine)
    if str(algorithm) not in EXTRA_PASSES_AND_CRITIC:
        raise SpecError(f"--algorithm {algorithm!r:.40}: {suggest_names(str(algorithm), EXTRA_PASSES_AND_CRITIC)}")
    staleness, steps = checked_count("--staleness", staleness, 0), checked_count("--steps", steps)
    rollouts = checked_count("--rollouts", rollouts)
    batch = rollouts if batch is None else checked_count("--batch", batch)
    generators = None if generators is None else checked_count("--generators", generators, 1, gpus)
    answer = parse_positive_number("output", output)
    longest = 4.0 * answer if max_output is None else parse_positive_number("max-output", max_output)
    if longest < answer:
        raise SpecError(f"--max-output {longest:g} is below the mean of {answer:g}")
    task = Rollouts(rollouts, batch, parse_positive_number("input", input), answer, longest)
    usd, _ = rent_rate(machine, gpus, parse_tariff(**tariff))
    engines = None if str(engine_strategy) in ("None", "auto") else [parse_sharding(str(engine_strategy))]
    trainers = None if str(strategy) in ("None", "auto") else [str(strategy)]
    question = ReinforcementQuestion(
        network, machine, gpus, task, algorithm, staleness, generators, engines, trainers, software
    )
    return ReinforcementResult(reinforcement_study(question, steps=steps, usd_per_s=usd))


@dataclass(frozen=True, repr=False, eq=False)
class ServiceAuditResult(StudyResult):
    """Measured result of a serving engine's benchmark, together with the prediction of the same load."""

    command = "audit"
    report_module_name = "paleo.report.serving"
    report_function_prefix = "audit_"
    audit: ServiceAudit


def audit_service(
    benchmark: EngineBenchmark, model: str | Path | ModelSpec | None, system: str | Path | System, **options: Any
) -> ServiceAuditResult:
    """Compare the result of an engine's benchmark with the prediction of the same load.

    Parameters
    ----------
    benchmark : EngineBenchmark
        Result of `paleo.serving.benchmark.read_benchmark`.
    model, system, **options
        See `serve`; the load is that of the benchmark.

    Returns
    -------
    ServiceAuditResult
        Measured and predicted values of the load.
    """
    service = token_service_of_result(serve(model, system, **{**options, **benchmark.serve_arguments}))
    if service.load.arrival_kind == "at once":
        service = replace(service, load=replace(service.load, request_count=int(benchmark.values["requests"])))
    from paleo.serving.benchmark import ServiceAudit

    return ServiceAuditResult(ServiceAudit(benchmark, service))
