"""Plans of an inference service: layouts that fit in memory, request rates within latency limits, and bottlenecks.

The search covers parallel layouts of a replica (tp, pp, ep, attention_dp), number formats, and limits of an iteration.
For each layout the closed form (`paleo.serving.steady_state`) computes a grid of these limits and of rates at once. The
chosen plan is simulated (`paleo.serving.simulation`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, SpecError
from paleo.serving.forward_lowering import Sharding
from paleo.serving.iteration_times import TOKEN_GRID, IterationTables, iteration_tables
from paleo.serving.memory import ServingMemory, serving_memory
from paleo.serving.requests import Requests, sample_requests
from paleo.serving.simulation import SimulationResult, simulate_requests
from paleo.serving.steady_state import (
    BatchingLimits,
    RequestLengths,
    SteadyState,
    closed_loop_steady_state,
    saturated_steady_state,
    steady_state_at_rate,
)

if TYPE_CHECKING:
    from paleo.serving.engines import BatchLimit, ServingEngine
    from paleo.serving.formats import Formats
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
#: Shares of a replica's capacity at which it is priced, most sequences and tokens of an iteration that are tried.
LOAD_SHARES_OF_CAPACITY = np.concatenate([np.linspace(0.02, 0.9, 23), np.array([0.93, 0.95, 0.97, 0.98])])
_SEQUENCE_LIMITS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
_TOKEN_LIMITS = (512, 2048, 4096)
#: Requests of the simulation of a plan, of one that tests its limits, at least so many for each sequence of its batch,
#: and the share at each end that is not counted.
_SIMULATED_REQUESTS, _TEST_SIMULATION_REQUESTS, _MIN_REQUESTS_PER_SEQUENCE, TRIMMED_REQUEST_SHARE = 4000, 1200, 12, 0.1
#: Simulations that test the limits of a plan, and how far a simulated time may exceed its limit.
_BISECTIONS, _LATENCY_LIMIT_TOLERANCE = 6, 1.02
#: The share above which the two ways to find a rate differ by too much.
MAX_RATE_DISAGREEMENT = 0.05
ArrivalKind = Literal["poisson", "constant", "at once", "closed", "most", "trace"]


@dataclass(frozen=True, slots=True)
class ServingLoad:
    """Load of an inference service: arrival process, request rate, and lengths of prompts and answers.

    Attributes
    ----------
    arrival_kind : str
        Arrival process: ``poisson``, ``constant``, ``closed`` (users who wait for answers), ``trace``, ``at once``, or
        ``most`` (the highest rate that can be served).
    lengths : RequestLengths
        Tokens of prompts and answers.
    requests : Requests or None
        Requests of a trace.
    request_count : int
        Number of requests, if all arrive at once.
    rate : float
        Requests per second, all replicas together.
    users, think_time : int, float
        Users of a closed loop, and time between an answer and the user's next request [s].
    """

    arrival_kind: ArrivalKind
    lengths: RequestLengths
    rate: float = 0.0
    users: int = 0
    think_time: float = 0.0
    requests: Requests | None = None
    request_count: int = _SIMULATED_REQUESTS

    @property
    def squared_arrival_variation(self) -> float:
        """Squared coefficient of variation of the times between arrivals: 1 for Poisson arrivals, 0 for constant."""
        return 0.0 if self.arrival_kind == "constant" else 1.0

    @property
    def long_request_tokens(self) -> float:
        """Tokens of a long request: mean plus two standard deviations, or the longest request of a trace."""
        if self.requests is not None:
            return float((self.requests.prompt_tokens + self.requests.answer_tokens).max())
        lengths = self.lengths
        return lengths.input * (1 + 2 * lengths.input_variation) + lengths.output * (1 + 2 * lengths.output_variation)


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Latency limits of an inference service [s] at a percentile of the requests; percentile 0 is the mean."""

    ttft: float | None = None
    tpot: float | None = None
    latency: float | None = None
    percentile: int = 99

    @property
    def limits_by_name(self) -> dict[str, float]:
        """Latency limits that are set, by name (``ttft``, ``tpot``, ``latency``) [s]."""
        limits = {"ttft": self.ttft, "tpot": self.tpot, "latency": self.latency}
        return {name: limit for name, limit in limits.items() if limit is not None}

    def latency_at_percentile(self, state: SteadyState, part: str) -> Array:
        """Return the predicted latency at the percentile of the limits, which a limit is compared with.

        Parameters
        ----------
        state : SteadyState
            Steady state of a replica.
        part : str
            ``ttft``, ``tpot`` or ``latency``.

        Returns
        -------
        ndarray
            Time [s].
        """
        return state.percentile(part, self.percentile) if self.percentile else np.asarray(getattr(state, part))

    def _latency_to_limit_ratios(self, state: SteadyState) -> dict[str, Array]:
        """Return the ratio of each predicted latency to its limit, by the name of the limit.

        Parameters
        ----------
        state : SteadyState
            Steady state of a replica.

        Returns
        -------
        dict of str to ndarray
            Ratios in the shape of the state; at most 1 where the limit is met.
        """
        return {name: self.latency_at_percentile(state, name) / limit for name, limit in self.limits_by_name.items()}

    def largest_latency_to_limit_ratio(self, state: SteadyState) -> Array:
        """Return the largest ratio of a predicted latency to its limit; at most 1 if all limits are met.

        Parameters
        ----------
        state : SteadyState
            Steady state of a replica.

        Returns
        -------
        ndarray
            Ratio, in the shape of the state; 0 without limits.
        """
        ratios = list(self._latency_to_limit_ratios(state).values())
        return np.asarray(np.max(np.stack(ratios), axis=0)) if ratios else np.asarray(0.0)

    def binding_limit(self, state: SteadyState) -> str:
        """Return the name of the latency limit that is closest to being exceeded.

        Parameters
        ----------
        state : SteadyState
            Steady state of a replica.

        Returns
        -------
        str
            ``ttft``, ``tpot`` or ``latency``.
        """
        ratios = self._latency_to_limit_ratios(state)
        return max(ratios, key=lambda name: float(ratios[name]))


@dataclass(frozen=True, slots=True)
class ReplicaLayout:
    """Parallel layout of a serving replica that fits in memory, with iteration times and the number of replicas."""

    sharding: Sharding
    formats: Formats
    engine: ServingEngine
    replicas: int
    iteration_tables: IterationTables
    memory: ServingMemory
    limit: BatchLimit

    def max_cached_sequences(self, lengths: RequestLengths) -> float:
        """Return the mean number of sequences that a replica's KV cache holds, under the engine's admission rule.

        Parameters
        ----------
        lengths : RequestLengths
            Tokens of prompts and answers.

        Returns
        -------
        float
            Number of sequences.
        """
        cached = lengths.mean_cached_tokens  # as many tokens of the answer are missing on average
        reserved = cached - lengths.input if self.engine.reservation == "whole" else 0.0
        return float(self.memory.max_cached_sequences(cached + reserved))

    @property
    def reserved_answer_share(self) -> float:
        """Fraction of an answer's tokens that must be free in the KV cache when its request is admitted."""
        return {"whole": 1.0, "input": 0.0, "share": self.engine.reserved_share}[self.engine.reservation]

    @property
    def scheduler_count(self) -> int:
        """Number of schedulers of a replica, each with its own batching limits (attention DP ranks)."""
        return 1 if self.engine.shared_limits else self.sharding.attention_dp

    def saturated_state(self, lengths: RequestLengths, batching: BatchingLimits) -> SteadyState:
        """Return the steady state of a saturated replica of this layout, whose KV cache holds what fits in its memory.

        Parameters
        ----------
        lengths : RequestLengths
            Tokens of prompts and answers.
        batching : BatchingLimits
            Batching limits of the replica's iterations.

        Returns
        -------
        SteadyState
            State at the highest rate of the replica, in the shape of the limits.
        """
        return saturated_steady_state(self.iteration_tables, batching, lengths, self.max_cached_sequences(lengths))

    def state_at_rate(self, load: ServingLoad, batching: BatchingLimits, rate: float | Array) -> SteadyState:
        """Return the steady state of a replica of this layout at a request rate.

        Parameters
        ----------
        load : ServingLoad
            Lengths of requests, and how regularly they arrive.
        batching : BatchingLimits
            Batching limits of the replica's iterations.
        rate : float or ndarray
            Request rate of the replica [requests/s].

        Returns
        -------
        SteadyState
            State in the shape of limits and rates.
        """
        places, arrivals = self.max_cached_sequences(load.lengths), load.squared_arrival_variation
        return steady_state_at_rate(self.iteration_tables, batching, load.lengths, places, rate, arrivals=arrivals)

    def batching(self, tokens: float | Array | None = None, sequences: float | Array | None = None) -> BatchingLimits:
        """Return the batching limits (tokens and sequences per iteration) of the replica.

        Parameters
        ----------
        tokens : float or ndarray, optional
            Largest number of tokens of an iteration, in place of the engine's limit.
        sequences : float or ndarray, optional
            Largest number of sequences of an iteration, in place of the engine's limit.

        Returns
        -------
        BatchingLimits
            Limits and host times of the replica's iterations.
        """
        return BatchingLimits(
            max_tokens=self.limit.tokens * self.scheduler_count if tokens is None else tokens,
            max_sequences=self.limit.sequences * self.scheduler_count if sequences is None else sequences,
            mixes_prefill=self.engine.batching == "mixed",
            host_time=self.engine.host_time_per_iteration,
            host_time_per_sequence=self.engine.host_per_sequence / self.sharding.attention_dp,
            time_per_request=self.engine.request,
            delay=self.engine.delay,
            time_per_token=self.engine.streamed,
            pipeline_batches=self.sharding.pp,
            cache_may_overflow=self.engine.reservation == "input",
        )


@dataclass(frozen=True, slots=True)
class ServingPlan:
    """Plan of an inference service: replica layout and batching limits, with the predicted state under a load.

    ``state`` is the steady state of one replica, and ``limited_by`` names the bottleneck.
    """

    layout: ReplicaLayout
    batching: BatchingLimits
    state: SteadyState
    limited_by: str

    @property
    def gpus(self) -> int:
        """Number of devices of all replicas."""
        return self.layout.replicas * self.layout.sharding.gpus

    @property
    def requests_per_s(self) -> float:
        """Throughput of all replicas [requests/s]."""
        return self.layout.replicas * float(self.state.requests_per_s)

    @property
    def tokens_per_s(self) -> float:
        """Throughput of all replicas [generated tokens/s]."""
        return self.layout.replicas * float(self.state.tokens_per_s)

    @property
    def strategy(self) -> str:
        """Parallel degrees of a replica and number of replicas, as text such as ``tp=4,replicas=2``."""
        replicas = self.layout.replicas
        return self.layout.sharding.text + (f",replicas={replicas}" if replicas > 1 else "")


def candidate_shardings(model: ModelSpec, system: System, gpus: int) -> Iterator[Sharding]:
    """Yield parallel layouts of a serving replica to try: powers of two, tp within a node, pp across nodes.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    gpus : int
        Largest number of devices of a replica.

    Yields
    ------
    Sharding
        Parallel degrees of one replica.
    """
    mixture, latent = "experts" in model.params, "kv_rank" in model.params
    node, linked = max(system.devices_per_node, 1), system.device.interconnect is not None
    powers = [2**power for power in range(gpus.bit_length()) if 2**power <= gpus]
    for tp in powers:
        for pp in powers:
            if tp * pp > gpus or tp > node or pp > 8 or (pp > 1 and linked and tp < node):
                continue
            yield Sharding(tp, pp)
            if mixture and tp > 1 and pp == 1:
                yield Sharding(tp, pp, expert_parallel=True)
    if mixture and latent:
        yield from (Sharding(1, 1, ranks, expert_parallel=True) for ranks in powers if 1 < ranks <= 8 * node)


def fitting_layouts(
    model: ModelSpec,
    system: System,
    gpus: int,
    engine: ServingEngine,
    formats: Sequence[Formats],
    load: ServingLoad,
    layouts: Sequence[Sharding] | None = None,
    limit: BatchLimit | None = None,
) -> tuple[list[ReplicaLayout], list[str]]:
    """Find the parallel layouts of a serving replica that fit in memory, and the reasons why others do not.

    Parameters
    ----------
    model, system, gpus
        Network, machine and total number of devices.
    engine : ServingEngine
        Engine with its memory and batching rules.
    formats : sequence of Formats
        Number formats of weights and KV cache to try.
    load : ServingLoad
        Requests; the longest one must fit.
    layouts : sequence of Sharding, optional
        Parallel layouts to try; by default those of `candidate_shardings`.
    limit : BatchLimit, optional
        Limits of an iteration in place of the engine's.

    Returns
    -------
    tuple[list[ReplicaLayout], list[str]]
        Layouts that hold the network and one long request; reasons of the others, the nearest to fitting first.
    """
    bound = limit or engine.batch_limit(system.device)
    fitting: list[ReplicaLayout] = []
    refusals: list[tuple[float, str]] = []
    for sharding in layouts or list(candidate_shardings(model, system, gpus)):
        if sharding.gpus > gpus:
            refusals.append((math.inf, f"{sharding.text}: needs {sharding.gpus} GPUs, there are {gpus}"))
            continue
        for each in formats:
            try:
                prices = iteration_tables(model, system, sharding, each, engine.kernels)
            except (PlanError, SpecError) as error:
                refusals.append((math.inf, f"{sharding.text}: {error}"))
                continue
            memory = serving_memory(prices.lowered, sharding, each, engine, system.device, bound)
            why = memory.refusal(load.long_request_tokens)
            if why:
                lacking = float(memory.sequence_bytes(load.long_request_tokens)) - float(memory.kv_cache)
                refusals.append((lacking, f"{sharding.text} in {each.text}: {why}"))
                continue
            fitting.append(ReplicaLayout(sharding, each, engine, gpus // sharding.gpus, prices, memory, bound))
    return fitting, [text for _, text in sorted(refusals, key=lambda each: each[0])]


def best_serving_plan(candidate: ReplicaLayout, load: ServingLoad, limits: LatencyLimits) -> ServingPlan | None:
    """Find the best plan of one replica layout under a load, over the batching limits of an iteration.

    Parameters
    ----------
    candidate : ReplicaLayout
        Layout that fits in memory.
    load : ServingLoad
        Arrival process and lengths of requests.
    limits : LatencyLimits
        Latency limits.

    Returns
    -------
    ServingPlan, optional
        Best plan; None if no batching limits meet the latency limits.
    """
    if load.arrival_kind in ("most", "at once"):
        return _highest_rate_plan(candidate, load, limits)
    if load.arrival_kind == "closed":
        users, places = load.users / candidate.replicas, candidate.max_cached_sequences(load.lengths)
        tables, batching = candidate.iteration_tables, candidate.batching()
        state = closed_loop_steady_state(tables, batching, load.lengths, places, users, load.think_time)
        late = float(limits.largest_latency_to_limit_ratio(state)) > 1.0
        return None if late else _plan(candidate, batching, state, limits)
    return _stated(candidate, load, limits)


def _grid(candidate: ReplicaLayout) -> tuple[Array, Array]:
    """Return the batching limits to try for a replica: (tokens, sequences) of an iteration, over all combinations.

    Both arrays have shape (token limits, sequence limits).
    """
    most, ranks = candidate.limit, float(candidate.scheduler_count)
    tokens = [*(each for each in _TOKEN_LIMITS if each < most.tokens), most.tokens]
    sequences = [*(each for each in _SEQUENCE_LIMITS if each < most.sequences), most.sequences]
    first, second = np.meshgrid(tokens, sequences, indexing="ij")
    return first * ranks, second * ranks


def _highest_rate_plan(candidate: ReplicaLayout, load: ServingLoad, limits: LatencyLimits) -> ServingPlan | None:
    """Find the plan of a replica layout with the highest request rate, within the latency limits if there are any."""
    if not limits.limits_by_name:
        batching = candidate.batching()
        return _plan(candidate, batching, candidate.saturated_state(load.lengths, batching), limits)
    tokens, sequences = _grid(candidate)
    capacity = candidate.saturated_state(load.lengths, candidate.batching(tokens, sequences)).requests_per_s
    wide = candidate.batching(tokens[..., None], sequences[..., None])
    state = candidate.state_at_rate(load, wide, capacity[..., None] * LOAD_SHARES_OF_CAPACITY)
    rates = np.where(limits.largest_latency_to_limit_ratio(state) <= 1.0, state.requests_per_s, 0.0)
    best = np.unravel_index(int(np.argmax(rates)), rates.shape)
    if rates[best] <= 0.0:
        return None
    chosen = candidate.batching(float(tokens[best[:2]]), float(sequences[best[:2]]))
    final = candidate.state_at_rate(load, chosen, float(rates[best]))
    return ServingPlan(candidate, chosen, final, LATENCY_LIMIT_NAMES[limits.binding_limit(final)])


def _stated(candidate: ReplicaLayout, load: ServingLoad, limits: LatencyLimits) -> ServingPlan | None:
    """Find the plan of a replica layout for a given request rate; None if latency limits cannot be met.

    The engine's default batching limits are tried first.
    """
    rate, batching = load.rate / candidate.replicas, candidate.batching()
    state = candidate.state_at_rate(load, batching, rate)
    if float(limits.largest_latency_to_limit_ratio(state)) <= 1.0 and float(state.utilisation) < 1.0:
        return _plan(candidate, batching, state, limits)
    if not limits.limits_by_name:
        return None
    tokens, sequences = _grid(candidate)
    wide = candidate.state_at_rate(load, candidate.batching(tokens, sequences), np.full(tokens.shape, rate))
    excess = np.where(wide.utilisation < 1.0, limits.largest_latency_to_limit_ratio(wide), np.inf)
    best = np.unravel_index(int(np.argmin(excess)), excess.shape)
    if excess[best] > 1.0:
        return None
    chosen = candidate.batching(float(tokens[best]), float(sequences[best]))
    return _plan(candidate, chosen, candidate.state_at_rate(load, chosen, rate), limits)


def _plan(candidate: ReplicaLayout, batching: BatchingLimits, state: SteadyState, limits: LatencyLimits) -> ServingPlan:
    return ServingPlan(candidate, batching, state, _bottleneck_name(candidate, batching, state, limits))


#: Limits of latency in words.
LATENCY_LIMIT_NAMES = {"ttft": "time to the first token", "tpot": "time per token", "latency": "latency"}
#: How near to a limit counts as held back by it.
_BINDING_LIMIT_RATIO = 0.93


def _bottleneck_name(
    candidate: ReplicaLayout, batching: BatchingLimits, state: SteadyState, limits: LatencyLimits
) -> str:
    """Name what limits a replica: a latency limit, KV-cache capacity, demand, or a part of an iteration.

    Parameters
    ----------
    candidate : ReplicaLayout
        Layout of the replica.
    batching : BatchingLimits
        Batching limits of the replica's iterations.
    state : SteadyState
        Steady state of the replica.
    limits : LatencyLimits
        Latency limits.

    Returns
    -------
    str
        Name of the bottleneck, such as ``KV cache``.
    """
    if limits.limits_by_name and float(limits.largest_latency_to_limit_ratio(state)) > _BINDING_LIMIT_RATIO - 0.05:
        return LATENCY_LIMIT_NAMES[limits.binding_limit(state)]
    if float(state.utilisation) < _BINDING_LIMIT_RATIO:
        return "demand"
    if batching.time_per_request and float(state.requests_per_s) * batching.time_per_request > _BINDING_LIMIT_RATIO:
        return "the server's requests a second"
    batch = float(state.decoding_sequences)
    if batch >= _BINDING_LIMIT_RATIO * float(batching.max_sequences) * batching.pipeline_batches:
        return "sequences of an iteration"
    if float(state.utilisation) >= 1.0 and candidate.memory.max_cached_sequences(1.0):
        return "KV cache"
    parts = iteration_time_breakdown(candidate, state)
    return max(parts, key=parts.__getitem__)


def is_launch_bound(candidate: ReplicaLayout, state: SteadyState) -> bool:
    """Return True if decode runs without CUDA graph and is limited by the host's kernel launches.

    Parameters
    ----------
    candidate : ReplicaLayout
        Layout of the replica.
    state : SteadyState
        Steady state of the replica.

    Returns
    -------
    bool
        True if the device time of a decode iteration equals the time of its kernel launches.
    """
    prices, batch = candidate.iteration_tables, float(state.decoding_sequences) / candidate.sharding.pp
    device = float(state.decode_iteration_time) - candidate.batching().host_time_at(batch)
    beyond = batch / candidate.sharding.attention_dp > prices.largest_graph
    return beyond and math.isclose(device, prices.launch_time)


def iteration_time_breakdown(candidate: ReplicaLayout, state: SteadyState) -> dict[str, float]:
    """Break down the mean iteration of a serving replica into GEMMs, decode attention, prompts, collectives and host.

    Parameters
    ----------
    candidate : ReplicaLayout
        Layout of the replica.
    state : SteadyState
        Steady state of the replica.

    Returns
    -------
    dict of str to float
        Time of each part [s].
    """
    prices = candidate.iteration_tables
    batch = float(state.decoding_sequences) / candidate.sharding.pp / candidate.sharding.attention_dp
    exchanged = float(np.interp(batch, TOKEN_GRID, prices.collective_times))
    products = float(prices.non_attention_time(batch)) - exchanged + float(prices.sampling_time(batch))
    host = candidate.batching().host_time_at(float(state.decoding_sequences) / candidate.sharding.pp)
    if is_launch_bound(candidate, state):
        host = float(state.decode_iteration_time) - products - exchanged
    attention = float(state.decode_iteration_time) - products - exchanged - host
    prompts = float(state.iteration_time) - float(state.decode_iteration_time)
    return {
        "products": products,
        "attention over the cache": max(attention, 0.0),
        "prompts": max(prompts, 0.0),
        "collectives": exchanged,
        "the host": host,
    }


@dataclass(frozen=True, slots=True)
class ServicePlans:
    """Plans of an inference service, best first, with the layouts that were ruled out.

    ``refusals`` says why layouts do not fit in memory; ``layouts_over_limits`` holds layouts that fit but miss the
    latency limits.
    """

    plans: tuple[ServingPlan, ...]
    refusals: tuple[str, ...]
    layouts_over_limits: tuple[ReplicaLayout, ...]


def plan_service(fitting: Sequence[ReplicaLayout], load: ServingLoad, limits: LatencyLimits) -> ServicePlans:
    """Plan an inference service: find the best plan of each layout, and rank the plans.

    If the request rate is given, the plan with the shortest mean latency comes first, otherwise the plan with the
    highest rate.

    Parameters
    ----------
    fitting : sequence of ReplicaLayout
        Layouts of a replica that fit in memory.
    load : ServingLoad
        Arrival process and lengths of requests.
    limits : LatencyLimits
        Latency limits.

    Returns
    -------
    ServicePlans
        Plans, best first, and layouts that miss the latency limits.
    """
    planned = [(candidate, best_serving_plan(candidate, load, limits)) for candidate in fitting]
    plans = [plan for _, plan in planned if plan is not None]
    late = tuple(candidate for candidate, plan in planned if plan is None)
    if load.arrival_kind == "most" and limits.limits_by_name:
        plans = _tested(sorted(plans, key=lambda plan: -plan.requests_per_s), load, limits)
    rate_is_sought = load.arrival_kind in ("most", "at once", "closed")
    plans.sort(key=lambda plan: -plan.requests_per_s if rate_is_sought else float(plan.state.latency))
    return ServicePlans(tuple(plans), (), late)


def _tested(plans: list[ServingPlan], load: ServingLoad, limits: LatencyLimits) -> list[ServingPlan]:
    """Correct the request rates of the best plans by simulation, until no other plan can be better.

    ``plans`` are in falling order of their rates by the closed form.
    """
    tested: list[ServingPlan] = []
    for number, plan in enumerate(plans):
        if tested and max(each.requests_per_s for each in tested) >= plan.requests_per_s:
            return [*tested, *plans[number:]]
        tested.append(_refined(plan, load, limits))
    return tested


def _refined(plan: ServingPlan, load: ServingLoad, limits: LatencyLimits) -> ServingPlan:
    """Find the highest request rate at which a plan meets its latency limits in a simulation, by bisection.

    Near capacity the closed form underestimates the queues of requests, so its percentiles are too low there.
    """
    low, high, best = 0.0, 1.0, plan
    for number in range(_BISECTIONS):
        share = 1.0 if number == 0 else 0.5 * (low + high)
        rate = share * float(plan.state.requests_per_s)
        trial = replace(plan, state=plan.layout.state_at_rate(load, plan.batching, rate))
        result = simulated_replica(trial, load, _TEST_SIMULATION_REQUESTS)
        times = {part: trimmed_latencies(result, part) for part in limits.limits_by_name}
        values = {p: np.percentile(t, limits.percentile) if limits.percentile else t.mean() for p, t in times.items()}
        if all(
            float(values[part]) <= limit * _LATENCY_LIMIT_TOLERANCE for part, limit in limits.limits_by_name.items()
        ):
            low, best = share, trial
            if number == 0:
                break
        else:
            high = share
    return best


def layout_nearest_to_limits(
    late: Sequence[ReplicaLayout], load: ServingLoad, limits: LatencyLimits
) -> tuple[ReplicaLayout, SteadyState] | None:
    """Find the replica layout that comes closest to latency limits that no layout meets.

    Parameters
    ----------
    late : sequence of ReplicaLayout
        Layouts that miss the limits.
    load : ServingLoad
        Arrival process and lengths of requests.
    limits : LatencyLimits
        Latency limits.

    Returns
    -------
    tuple[ReplicaLayout, SteadyState], optional
        Layout, and its steady state with one request at a time; None without layouts.
    """
    states = []
    for candidate in late:
        tables, batching, lengths = candidate.iteration_tables, candidate.batching(), load.lengths
        alone = 0.01 * saturated_steady_state(tables, batching, lengths, 1.0).requests_per_s
        places = candidate.max_cached_sequences(lengths)
        states.append((candidate, steady_state_at_rate(tables, batching, lengths, places, alone)))
    return min(states, key=lambda pair: float(limits.largest_latency_to_limit_ratio(pair[1])), default=None)


def max_request_rate(candidate: ReplicaLayout, load: ServingLoad) -> float:
    """Return the highest request rate that all replicas of a layout sustain, without latency limits.

    Parameters
    ----------
    candidate : ReplicaLayout
        Layout of a replica, and number of replicas.
    load : ServingLoad
        Lengths of prompts and answers.

    Returns
    -------
    float
        Request rate [requests/s].
    """
    full = candidate.saturated_state(load.lengths, candidate.batching())
    return candidate.replicas * float(full.requests_per_s)


def states_over_request_rates(plan: ServingPlan, load: ServingLoad, points: int = 16) -> tuple[Array, SteadyState]:
    """Return request rates up to the capacity of a serving plan, with the steady state of a replica at each rate.

    Parameters
    ----------
    plan : ServingPlan
        Layout, engine limits and number of replicas.
    load : ServingLoad
        Lengths of prompts and answers, and how requests arrive.
    points : int, optional
        Number of rates.

    Returns
    -------
    tuple of (ndarray, SteadyState), shape (points,) each
        Rates of all replicas together [requests/s], and steady states of one replica.
    """
    full = plan.layout.saturated_state(load.lengths, plan.batching)
    rates = float(full.requests_per_s) * np.linspace(0.05, 0.98, points)
    return plan.layout.replicas * rates, plan.layout.state_at_rate(load, plan.batching, rates)


def _replica_requests(plan: ServingPlan, load: ServingLoad, count: int | None = None) -> Requests:
    """Return the requests that one replica of a serving plan gets in a simulation: part of a trace, or random ones.

    Parameters
    ----------
    plan : ServingPlan
        Layout, batching limits and number of replicas.
    load : ServingLoad
        Arrival process and lengths of requests, or a trace.
    count : int, optional
        Number of requests to draw.

    Returns
    -------
    Requests
        Arrivals and lengths, in the order of arrival.
    """
    replicas, lengths = plan.layout.replicas, load.lengths
    if load.requests is not None:
        return replace(load.requests.requests_of_one_replica(replicas), prefix_hit_share=lengths.prefix_hit_share)
    rate = math.inf if load.arrival_kind in ("at once", "closed") else plan.requests_per_s / replicas
    number = max(count or _SIMULATED_REQUESTS, int(_MIN_REQUESTS_PER_SEQUENCE * float(plan.state.decoding_sequences)))
    if load.arrival_kind == "at once":
        number = max(load.request_count // replicas, 1)
    if load.arrival_kind == "most" and float(plan.state.utilisation) >= 1.0:
        rate = math.inf
    return sample_requests(
        number,
        input_tokens=lengths.input,
        output_tokens=lengths.output,
        rate=rate,
        arrivals="constant" if load.arrival_kind == "constant" else "poisson",
        input_variation=lengths.input_variation,
        output_variation=lengths.output_variation,
        hit=lengths.prefix_hit_share,
    )


def simulated_replica(plan: ServingPlan, load: ServingLoad, count: int | None = None) -> SimulationResult:
    """Simulate one replica of a serving plan under its load.

    Parameters
    ----------
    plan : ServingPlan
        Layout, batching limits and number of replicas.
    load : ServingLoad
        Arrival process and lengths of requests, or a trace.
    count : int, optional
        Number of requests to draw.

    Returns
    -------
    SimulationResult
        Latencies of all requests, and statistics of batches and KV cache.

    Raises
    ------
    PaleoError
        If a request is longer than the KV cache.
    """
    candidate = plan.layout
    stages = candidate.sharding.pp
    requests = _replica_requests(plan, load, count)
    length = float((requests.prompt_tokens + requests.answer_tokens).mean())
    users = None if load.arrival_kind != "closed" else max(round(load.users / candidate.replicas / stages), 1)
    return simulate_requests(
        candidate.iteration_tables,
        plan.batching,
        requests.requests_of_one_replica(stages) if users is None else requests,
        capacity=candidate.memory.max_cached_tokens(length) / stages,
        reservation=candidate.reserved_answer_share,
        users=users,
        think=load.think_time,
    )


def trimmed_latencies(result: SimulationResult, part: str, trimmed: float = TRIMMED_REQUEST_SHARE) -> Array:
    """Return a latency of each simulated request, without the first and last 10 % of them (warm-up and drain).

    Parameters
    ----------
    result : SimulationResult
        Result of the simulation of a replica.
    part : str
        ``ttft``, ``tpot`` or ``latency``.
    trimmed : float, optional
        Share of the requests at each end that is left out.

    Returns
    -------
    ndarray, shape (n,)
        Latencies [s] in the order of arrival; one zero if there are none.
    """
    values = np.asarray(getattr(result, part))
    cut = int(trimmed * len(values))
    inside = values[cut : len(values) - cut] if len(values) > 4 * max(cut, 1) else values
    known = inside[np.isfinite(inside)]
    return known if len(known) else np.zeros(1)
