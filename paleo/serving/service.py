"""Prediction of an inference service: plans, simulation of the best plan, cost, power, and a verdict.

The power of a device is idle power, an addition for running kernels, and the energy of FLOP and bytes.

Replicas may be separate for prefill and for decode (disaggregation), in numbers for which their rates match. A prefill
replica is a queue with one server, whose service time is that of one prompt. A decode replica is the steady state of a
load whose prompts are already computed. The KV cache of each prompt moves from prefill to decode over the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from paleo.pricing.calibration_lookup import TIMING_METHODS, find_calibrated_parameters
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.power import BOARD_POWER_METHOD, PICO, PowerParameters
from paleo.serving.commands import engine_command_line, weights_id_or_folder
from paleo.serving.plans import (
    LATENCY_LIMIT_NAMES,
    LOAD_SHARES_OF_CAPACITY,
    MAX_RATE_DISAGREEMENT,
    TRIMMED_REQUEST_SHARE,
    LatencyLimits,
    ReplicaLayout,
    ServicePlans,
    ServingLoad,
    ServingPlan,
    fitting_layouts,
    is_launch_bound,
    layout_nearest_to_limits,
    max_request_rate,
    plan_service,
    simulated_replica,
    trimmed_latencies,
)
from paleo.specs.catalog import DEFAULT_WEIGHT_FORMAT
from paleo.units import MEGA, format_duration

if TYPE_CHECKING:
    from paleo.serving.engines import BatchLimit, ServingEngine
    from paleo.serving.formats import Formats
    from paleo.serving.forward_lowering import Sharding
    from paleo.serving.simulation import SimulationResult
    from paleo.specs.device import Device
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

#: Share of a link's rate at which caches move, and loads of a replica of prefill that are tried.
_TRANSFER_SHARE = 0.7
_LOADS = np.linspace(0.05, 0.95, 19)


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Disaggregated service: split of the devices into prefill and decode replicas, with rate and latencies.

    Attributes
    ----------
    prefill_layout, decode_layout : ReplicaLayout
        Layouts of a prefill and of a decode replica.
    prefill_replicas, decode_replicas : int
        Numbers of prefill and decode replicas.
    requests_per_s : float
        Throughput of all replicas, the smaller of both sides' rates [requests/s].
    ttft, tpot : float
        Mean time to first token, transfer of the cache included, and mean time per further token [s].
    cache_transfer_time : float
        Time in which the KV cache of a prompt moves to a decode replica [s].
    """

    prefill_layout: ReplicaLayout
    decode_layout: ReplicaLayout
    prefill_replicas: int
    decode_replicas: int
    requests_per_s: float
    ttft: float
    tpot: float
    cache_transfer_time: float

    @property
    def gpus(self) -> int:
        """Number of devices of all prefill and decode replicas."""
        first, second = self.prefill_layout.sharding.gpus, self.decode_layout.sharding.gpus
        return self.prefill_replicas * first + self.decode_replicas * second

    @property
    def text(self) -> str:
        """Text that names the layouts and replica counts of the prefill and decode pools."""
        first, second = self.prefill_layout.sharding.text, self.decode_layout.sharding.text
        return f"{self.prefill_replicas} x {first} prefill, {self.decode_replicas} x {second} decode"


def _prefill_rate(layout: ReplicaLayout, load: ServingLoad, limits: LatencyLimits, sent: float) -> tuple[float, float]:
    """Return the highest request rate of a prefill replica within latency limits [1/s], and the mean TTFT there [s].

    The replica is a queue with one server. ``sent`` is the transfer time of a prompt's KV cache [s].
    """
    lengths, engine = load.lengths, layout.engine
    piece = np.minimum(lengths.computed_prompt_tokens, float(layout.limit.tokens))
    pieces = lengths.computed_prompt_tokens / piece
    before = np.maximum(lengths.input - piece, 0.0) / 2.0
    each = layout.iteration_tables.iteration_time(decoded=0.0, cached=1.0, chunks=1.0, length=piece, before=before)
    service = float(pieces * (each + engine.host_time_per_iteration))
    waits = 0.5 * _LOADS * service * (load.squared_arrival_variation + lengths.input_variation**2) / (1.0 - _LOADS)
    mean = engine.request + waits + service + sent
    slow = mean + waits * (np.log(100.0) - 1.0) if limits.percentile == 99 else mean
    kept = slow <= limits.ttft if limits.ttft is not None else np.ones(len(_LOADS), dtype=bool)
    if not kept.any():
        return 0.0, float(mean[0])
    chosen = int(np.flatnonzero(kept)[-1])
    return float(_LOADS[chosen] / service), float(mean[chosen])


def _decode_rate(layout: ReplicaLayout, load: ServingLoad, limits: LatencyLimits) -> tuple[float, float]:
    """Return the highest request rate of a decode replica within latency limits [1/s], and the mean TPOT there [s]."""
    lengths = replace(load.lengths, prefix_hit_share=1.0 - 1.0 / max(load.lengths.input, 2.0))
    batching = replace(layout.batching(), time_per_request=0.0)
    full = float(layout.saturated_state(lengths, batching).requests_per_s)
    state = layout.state_at_rate(replace(load, lengths=lengths), batching, full * LOAD_SHARES_OF_CAPACITY)
    bounds = replace(limits, ttft=None)
    kept = np.flatnonzero(bounds.largest_latency_to_limit_ratio(state) * np.ones(len(LOAD_SHARES_OF_CAPACITY)) <= 1.0)
    if not len(kept):
        return 0.0, float(state.tpot[0])
    return float(state.requests_per_s[kept[-1]]), float(state.tpot[kept[-1]])


def _best_disaggregation(
    fitting: Sequence[ReplicaLayout], load: ServingLoad, limits: LatencyLimits, gpus: int, system: System
) -> Disaggregation | None:
    """Find the split of devices into prefill and decode replicas with the highest request rate within latency limits.

    Parameters
    ----------
    fitting : sequence of ReplicaLayout
        Layouts of a replica that fit in memory.
    load, limits : ServingLoad, LatencyLimits
        Requests, and limits of their latencies.
    gpus : int
        Total number of devices.
    system : System
        Machine, whose outermost link carries the KV caches.

    Returns
    -------
    Disaggregation or None
        Best split; None if no split meets the limits.
    """
    link = system.levels[-1].link.bandwidth if system.levels else system.device.memory.bandwidth
    decoders = [(layout, *_decode_rate(layout, load, limits)) for layout in fitting]
    best: Disaggregation | None = None
    for first in fitting:
        moved = float(first.memory.sequence_bytes(load.lengths.input)) / (_TRANSFER_SHARE * link)
        each, ttft = _prefill_rate(first, load, limits, moved)
        each = min(each, 1.0 / moved)
        for second, rate, tpot in decoders:
            if first.formats != second.formats or not each * rate:
                continue
            for count in range(1, (gpus - second.sharding.gpus) // first.sharding.gpus + 1):
                others = (gpus - count * first.sharding.gpus) // second.sharding.gpus
                served = min(count * each, others * rate)
                if best is None or served > best.requests_per_s:
                    best = Disaggregation(first, second, count, others, served, ttft, tpot, moved)
    return best


def _mean_device_power(plan: ServingPlan, device: Device) -> float | None:
    """Predict the mean power of one device that serves requests, from its FLOP and memory traffic per second.

    Parameters
    ----------
    plan : ServingPlan
        Plan of the service, with its request rate and batch.
    device : Device
        Device, as its datasheet describes it.

    Returns
    -------
    float, optional
        Power [W], at most the design power; None if the device file has no design power.
    """
    if device.tdp is None:
        return None
    name, architecture, kind = device.name, device.architecture, device.memory.kind
    board = find_calibrated_parameters(
        PowerParameters, subject=name, architecture=architecture, family="power", memory_kind=kind,
        stacks=(*TIMING_METHODS, BOARD_POWER_METHOD),
    ).parameters  # fmt: skip
    product = find_calibrated_parameters(
        GemmParameters, subject=name, architecture=architecture, family="gemm.tensor", memory_kind=kind
    ).parameters
    flops, moved = _work(plan)
    idle = board.idle_watts(device.tdp, device.memory.kind, device.memory.bandwidth)
    arithmetic = board.arithmetic_energy_share * product.training_energy_per_flop * flops
    demand = idle + board.busy_power_share * device.tdp + PICO * (arithmetic + board.dram_energy_per_byte * moved)
    return min(demand, device.tdp)


def _work(plan: ServingPlan) -> tuple[float, float]:
    """Return FLOP per second and memory traffic [byte/s] of one device of a serving plan."""
    candidate, state = plan.layout, plan.state
    work, stages = candidate.iteration_tables.lowered, candidate.sharding.pp
    experts = [each for each in work.layers if each.is_expert_gemm]
    per_token = 2.0 * sum(each.weight_elements * each.count for each in work.layers if not each.is_expert_gemm)
    per_token += sum((each.kernel_at(2.0).flops - each.kernel_at(1.0).flops) * each.count for each in experts)
    output, pieces, memory = float(state.answer_tokens), float(state.iterations_per_prompt), candidate.memory
    prompt = pieces * float(plan.batching.max_tokens) if pieces > 1 else 0.0
    tokens = float(state.requests_per_s) * (output + prompt)
    iterations = stages / max(float(state.iteration_time), PICO)
    cached = float(state.decoding_sequences) / stages * float(memory.sequence_bytes(output)) / memory.attention_dp_ranks
    return tokens * per_token / stages, iterations * (memory.weights + cached)


#: Percentiles that an answer has.
_PERCENTILES = (50, 90, 99)
#: Factors within which 84 % of the measured throughputs of published runs lie (docs/howto/serve.md).
THROUGHPUT_INTERVAL_FACTORS = (0.7, 1.35)
#: What no answer about a service has in it.
UNMODELLED_EFFECTS = (
    "adapters and guided decoding",
    "the network between clients and the service",
    "experts that are more or less busy than a power law of exponent 0.5 makes them",
)
_LATENCY_PHRASES = {"ttft": "to the first token", "tpot": "a token", "latency": "for the answer"}


@dataclass(frozen=True)
class Service:
    """Predicted inference service: its plans, best first, with network, machine, load and latency limits.

    Attributes
    ----------
    model, system, gpus, engine
        Network, machine, total number of devices, and inference engine.
    load, limits : ServingLoad, LatencyLimits
        Requests, and latency limits.
    result : ServicePlans
        Plans, empty if no plan meets the limits.
    fitting_layouts : tuple of ReplicaLayout
        Layouts of a replica that fit in memory.
    usd_per_s : float or None
        Rent of all devices [USD/s].
    disaggregation : Disaggregation or None
        Best division into prefill and decode, if requested.
    engine_comparison : str
        Sentence that compares the engines, if several were tried.
    """

    model: ModelSpec
    system: System
    gpus: int
    engine: ServingEngine
    load: ServingLoad
    limits: LatencyLimits
    result: ServicePlans
    fitting_layouts: tuple[ReplicaLayout, ...]
    usd_per_s: float | None
    disaggregation: Disaggregation | None = None
    engine_comparison: str = ""

    @property
    def sort_key(self) -> tuple[bool, float, float]:
        """Sort key for comparing systems: (no plan, USD per million tokens, minus requests per second)."""
        price = (self.usd_per_million or {}).get("output", math.inf)
        return self.best is None, price, -(self.best.requests_per_s if self.best else 0.0)

    @property
    def best(self) -> ServingPlan | None:
        """Best serving plan, the first one; None if no plan meets load and latency limits."""
        return self.result.plans[0] if self.result.plans else None

    @cached_property
    def simulation(self) -> SimulationResult | None:
        """Discrete-event simulation of one replica of the best serving plan; None if no plan meets the limits."""
        return None if self.best is None else simulated_replica(self.best, self.load)

    def latencies(self, part: str) -> dict[str, float]:
        """Return the mean and percentiles of a simulated latency (TTFT, TPOT or end to end) of the best plan.

        Parameters
        ----------
        part : str
            ``ttft``, ``tpot`` or ``latency``.

        Returns
        -------
        dict of str to float
            Times [s] by ``mean``, ``p50``, ``p99``, …; {} without a plan.
        """
        if self.simulation is None:
            return {}
        trimmed = 0.0 if self.load.arrival_kind in ("trace", "at once") else TRIMMED_REQUEST_SHARE
        known = trimmed_latencies(self.simulation, part, trimmed)
        return {"mean": float(known.mean())} | {f"p{p}": float(np.percentile(known, p)) for p in _PERCENTILES}

    @property
    def limited_by(self) -> str | None:
        """Name of the bottleneck of the best plan; with several latency limits, the one closest to being exceeded."""
        if self.best is None or self.best.limited_by not in LATENCY_LIMIT_NAMES.values():
            return None if self.best is None else self.best.limited_by
        name = f"p{self.limits.percentile}" if self.limits.percentile else "mean"
        times = {part: self.latencies(part) for part in self.limits.limits_by_name}
        shares = {part: times[part].get(name, times[part]["p99"]) / self.limits.limits_by_name[part] for part in times}
        return LATENCY_LIMIT_NAMES[max(shares, key=shares.__getitem__)]

    @property
    def simulated_rate(self) -> float | None:
        """Simulated requests per second of all replicas, from the middle half of the finished requests."""
        if self.best is None or self.simulation is None:
            return None
        factor = self.best.layout.replicas * self.best.layout.sharding.pp
        finish = np.sort(self.simulation.finish)
        low, high = len(finish) // 4, (3 * len(finish)) // 4
        if self.load.arrival_kind in ("trace", "at once") or high - low < 20 or finish[high] <= finish[low]:
            return factor * self.simulation.requests_per_s
        return factor * (high - low) / float(finish[high] - finish[low])

    @property
    def joules_per_token(self) -> float | None:
        """Energy of all devices per generated token [J]; None without a plan or design power in the device file."""
        plan = self.best
        if plan is None or (watts := _mean_device_power(plan, self.system.device)) is None:
            return None
        return watts * plan.gpus / plan.tokens_per_s

    @property
    def usd_per_million(self) -> dict[str, float] | None:
        """Rent per million tokens [USD], by kind of token; None without a rent or a plan.

        Key ``output`` is the whole rent over generated tokens. ``input_alone`` and ``output_alone`` divide the rent
        between prompt tokens and generated tokens by the time that prefill and decode take.
        """
        plan, usd = self.best, self.usd_per_s
        if plan is None or usd is None:
            return None
        state = plan.state
        whole = float(state.iteration_time)
        prompts = max(whole - float(state.decode_iteration_time), 0.0) / whole
        first = plan.requests_per_s * self.load.lengths.input
        return {
            "output": usd / plan.tokens_per_s * MEGA,
            "input_alone": usd * prompts / first * MEGA,
            "output_alone": usd * (1.0 - prompts) / plan.tokens_per_s * MEGA,
        }

    @property
    def launch_command(self) -> str:
        """Command line that starts the inference engine with the best plan; empty without a plan."""
        return "" if self.best is None else engine_command_line(self.engine.name, self.model, self.best)

    @property
    def verdict(self) -> str:
        """Sentences that say whether and how the load can be served within the latency limits."""
        return _explain_refusal(self) if self.best is None else _verdict(self, self.best)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about uncertain parts of the service's prediction, one sentence each."""
        if self.best is None or self.simulation is None:
            return ()
        notes = []
        off = (self.simulated_rate or 0.0) / self.best.requests_per_s - 1.0
        if abs(off) > MAX_RATE_DISAGREEMENT and self.load.arrival_kind in ("most", "poisson", "constant", "closed"):
            notes.append(
                f"the simulation serves {self.simulated_rate:.3g} requests/s, {abs(off):.0%} "
                f"{'fewer' if off < 0 else 'more'} than the fixed point: count on the lower number"
            )
        late = [part for part in self.limits.limits_by_name if _late(self, part)]
        notes += [f"simulated time {_LATENCY_PHRASES[part]} is above its limit: {_late(self, part)}" for part in late]
        if self.best.layout.formats.has_untimed_kernels(self.system.device):
            notes.append(
                "kernels of MXFP4 experts were never timed on devices without FP4 arithmetic: runs of SGLang and "
                "TensorRT-LLM took 3 to 19 times as long as predicted"
            )
        notes += _converted(self.engine.name, self.model, self.best.layout.formats.text)
        if is_launch_bound(self.best.layout, self.best.state):
            notes.append(
                f"{self.engine.title} captures graphs of at most {self.best.layout.iteration_tables.largest_graph} "
                "sequences unless told otherwise: the device waits for the host, and larger graphs would be faster"
            )
        if self.gpus > self.best.gpus:
            notes.append(f"{self.gpus - self.best.gpus} GPUs are idle: replicas of {self.best.layout.sharding.gpus}")
        if self.simulation.preemptions:
            share = self.simulation.preemptions / len(self.simulation.finish)
            notes.append(
                f"the KV cache overflows: for 100 requests {100 * share:.0f} are stopped and computed again; "
                "--sequences bounds how many run at once"
            )
        return tuple(notes)


def _converted(engine: str, model: ModelSpec, weights: str) -> list[str]:
    """Return a warning if weights must be converted to a format before the engine starts, as a list of sentences."""
    loaded = weights_id_or_folder(engine, model, weights)
    if loaded == (model.weights_hub_id or model.name):
        return []
    return [f"the published weights are in {model.released}: {loaded} stands for a folder with weights in {weights}"]


def _late(service: Service, part: str) -> str:
    """Return a text such as ``2 s for 1 s`` on a simulated latency above its limit; empty if the limit is met."""
    percentile, limit = service.limits.percentile, service.limits.limits_by_name[part]
    value = service.latencies(part).get(f"p{percentile}" if percentile else "mean", 0.0)
    late = value > limit * (1.0 + MAX_RATE_DISAGREEMENT)
    return f"{format_duration(value)} for {format_duration(limit)}" if late else ""


def _verdict(service: Service, plan: ServingPlan) -> str:
    price = service.usd_per_million
    cost = "" if price is None else f": {price['output']:.3g} USD a million output tokens"
    limits = " and ".join(
        f"{format_duration(limit)} {_LATENCY_PHRASES[part]}" for part, limit in service.limits.limits_by_name.items()
    )
    at = f"p{service.limits.percentile}" if service.limits.percentile else "the mean"
    within = f" within {limits} at {at}" if limits else ""
    formats, published = plan.layout.formats, service.model.released
    weights = f"{formats.text} (as released)" if formats.text == published != DEFAULT_WEIGHT_FORMAT else formats.text
    cause = str(service.limited_by)
    article = "" if cause.startswith(("the ", "demand", "collectives", "products", "prompts")) else "the "
    subject = f"{service.gpus} x {service.system.device.name}"
    verb = "serves" if service.gpus == 1 else "serve"
    return (
        f"{subject} {verb} {plan.requests_per_s:.3g} requests/s ({plan.tokens_per_s:,.0f} output tokens/s) of "
        f"{service.model.title} in {weights}{within}{cost}; limited by {article}{cause}. "
        f"Plan: {plan.strategy} under {service.engine.title} {service.engine.release}.{_conditions(service)}"
    )


def _conditions(service: Service) -> str:
    """Return sentences for a verdict about prefix cache, speculative decoding, disaggregation and other engines."""
    hit, engine = service.load.lengths.prefix_hit_share, service.engine
    cached = f"{hit:.0%} of the prompts' tokens come" if hit else "Nothing comes"
    texts = [f"{cached} from the prefix cache."]
    if engine.drafted:
        emitted = engine.kernels.mean_emitted_tokens
        texts.append(f"{engine.drafted} drafted tokens, each accepted at {engine.acceptance:.0%}, give {emitted:.2g}.")
    if service.disaggregation is not None:
        split = service.disaggregation
        texts.append(f"Divided into {split.text}: {split.requests_per_s:.3g} requests/s.")
    return " " + " ".join([*texts, service.engine_comparison]).strip()


def best_engine(services: Sequence[Service]) -> Service:
    """Choose the best of several inference engines: highest throughput, or lowest latency if the request rate is given.

    Parameters
    ----------
    services : sequence of Service
        Predicted service of each engine, for the same load.

    Returns
    -------
    Service
        Best service; its ``engine_comparison`` compares the engines.
    """
    busy = services[0].load.arrival_kind in ("most", "at once", "closed")

    def order(service: Service) -> tuple[bool, float]:
        plan = service.best
        value = math.inf if plan is None else -plan.requests_per_s if busy else float(plan.state.latency)
        return plan is None, value

    first = min(services, key=order)
    if len(services) == 1 or first.best is None:
        return first
    texts = [f"{each.engine.title} {_figure(each.best, busy)}" for each in sorted(services, key=order)]
    return replace(first, engine_comparison=f"Engines: {', '.join(texts)}.")


def _figure(plan: ServingPlan | None, busy: bool) -> str:
    if plan is None:
        return "none"
    seconds = float(plan.state.latency)
    return f"{plan.requests_per_s:.3g} requests/s" if busy else f"{format_duration(seconds)} an answer"


def _explain_refusal(service: Service) -> str:
    """Explain why no serving plan meets memory, load and latency limits, and what would help.

    Parameters
    ----------
    service : Service
        Predicted service without a plan.

    Returns
    -------
    str
        One or more sentences that begin with "No:".
    """
    title, gpus = service.model.title, f"{service.gpus} x {service.system.device.name}"
    if not service.fitting_layouts:
        nearest_layout = next(iter(service.result.refusals), "no layout divides it")
        return f"No: {title} does not fit on {gpus}. The nearest layout is {nearest_layout}."
    load, limits = service.load, service.limits
    top = max(service.fitting_layouts, key=lambda each: max_request_rate(each, load))
    capacity = max_request_rate(top, load)
    if load.rate and load.rate >= capacity:
        growth = load.rate - capacity
        return (
            f"No: {load.rate:.3g} requests/s are above the {capacity:.3g} that {gpus} can serve ({top.sharding.text}); "
            f"the queue grows by {growth:.3g} requests a second. Ask for at most {capacity:.3g}/s, or for "
            f"{math.ceil(service.gpus * load.rate / capacity):,} GPUs or more."
        )
    near = layout_nearest_to_limits(service.result.layouts_over_limits, load, limits)
    if near is None or not limits.limits_by_name:
        return f"No: {gpus} keep up with no plan."
    candidate, state = near
    values = {part: float(limits.latency_at_percentile(state, part)) for part in limits.limits_by_name}
    missed = [part for part, value in values.items() if value > limits.limits_by_name[part]]
    at = f"p{limits.percentile}" if limits.percentile else "the mean"
    if not missed:
        return (
            f"No: {gpus} keep these limits at {at} for single requests ({candidate.sharding.text}), but not for the "
            f"load that is stated; fewer requests or more GPUs would."
        )
    limit_texts = {part: format_duration(limit) for part, limit in limits.limits_by_name.items()}
    texts = [
        f"{format_duration(values[part])} {_LATENCY_PHRASES[part]} (asked: {limit_texts[part]})" for part in missed
    ]
    return (
        f"No: no plan of {gpus} answers within these limits. The nearest, {candidate.sharding.text} in "
        f"{candidate.formats.text} with one request at a time, takes {' and '.join(texts)} at {at}."
    )


def evaluate_service(
    model: ModelSpec,
    system: System,
    gpus: int,
    engine: ServingEngine,
    load: ServingLoad,
    limits: LatencyLimits,
    formats: Sequence[Formats],
    layouts: Sequence[Sharding] | None = None,
    limit: BatchLimit | None = None,
    usd_per_s: float | None = None,
    *,
    disaggregate: bool = False,
) -> Service:
    """Predict an inference service: find the layouts that fit in memory, and rank the plans within latency limits.

    Parameters
    ----------
    model, system, gpus, engine
        Network, machine, total number of devices, inference engine.
    load, limits
        Requests, and limits of their latencies.
    formats : sequence of Formats
        Number formats of weights and KV cache to compare.
    layouts : sequence of Sharding, optional
        Parallel layouts to try; by default those of `candidate_shardings`.
    limit : BatchLimit, optional
        Limits of an iteration (sequences, tokens) in place of the engine's defaults.
    usd_per_s : float, optional
        Rent of all devices [USD/s].
    disaggregate : bool
        Also find the best split into prefill and decode replicas.

    Returns
    -------
    Service
        Plans, best first, with their costs and the reasons of layouts that do not fit.
    """
    fitting, refusals = fitting_layouts(model, system, gpus, engine, formats, load, layouts, limit)
    plans = plan_service(fitting, load, limits)
    result = ServicePlans(plans.plans, tuple(refusals), plans.layouts_over_limits)
    division = _best_disaggregation(fitting, load, limits, gpus, system) if disaggregate else None
    return Service(model, system, gpus, engine, load, limits, result, tuple(fitting), usd_per_s, division)
