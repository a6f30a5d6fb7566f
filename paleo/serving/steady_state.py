"""Steady state of a serving replica in closed form: the fixed point of continuous batching, for arrays of loads.

In an iteration of t seconds, B sequences generate a token each, and f = λ t requests arrive. Their prompts of I tokens
are computed in prefill chunks of at most c tokens. By Little's law B = λ (O - 1) t for answers of O tokens. Then t
solves

    t = E[time of an iteration with B(t) sequences and g(t) = f I / c prefill chunks].

A share φ = 1 - exp(-g) of the iterations has chunks (Poisson arrivals), g / φ of them each. The right side grows with
t, and the least solution is found by bisection. Without a solution below the batch that fits, the queue grows. Under
Poisson arrivals a request finds B others and is one more itself. Where t is linear in B, t(B + 1) gives the mean of the
birth-death process exactly (negative binomial).

Some engines admit a request as soon as its prompt fits. Then a full KV cache preempts requests, whose tokens are
recomputed like those of a prompt (see `_overflowed`).

A request waits for one of c = B_max places, each occupied for a request's whole service. The mean wait is Sakasegawa's
approximation of M/G/c, W = S (C_a² + C_s²) / 2 · ρ^(√(2 (c + 1)) - 1) / (c (1 - ρ)) (Sakasegawa, Ann. Inst. Statist.
Math. 29, 1977). For percentiles, the uncertain part of the time to the first token is log-normal, and waiting is
exponential with a mass at zero. Iterations of an answer are independent of each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paleo.serving.iteration_times import IterationTables

Array = npt.NDArray[np.float64]
Numbers = float | npt.NDArray[np.float64]
SequenceCount = TypeVar("SequenceCount", float, Array)
#: Halvings of the interval of iteration times; standard normal quantiles.
_BISECTION_STEPS = 32
#: Share of the answers of one length that stay in the groups in which their prompts filled iterations, in a cache that
#: overflows; read from simulations of 20 full caches.
_GROUPED_ANSWER_SHARE = 1.0 / 3.0
#: The least number that anything is divided by.
_MIN_DIVISOR = 2.0**-30
_NORMAL_QUANTILES = {50: 0.0, 90: 1.2816, 95: 1.6449, 99: 2.3263}


@dataclass(frozen=True, slots=True)
class BatchingLimits:
    """Batching limits and host times of an engine's iterations; numbers or arrays of one shape.

    Attributes
    ----------
    max_tokens, max_sequences : array_like
        Largest numbers of tokens and of sequences in an iteration of a replica.
    mixes_prefill : bool
        True if prompts are computed in the iterations of decode.
    host_time, host_time_per_sequence : float
        Host time between iterations, and the host time that each sequence of an iteration adds [s].
    time_per_request, time_per_token : float
        Time of the server for each request and for each token sent, one after the other [s].
    delay : float
        Further latency of a request in the server, during which other requests are handled, too [s].
    pipeline_batches : int
        Number of batches in flight at once (stages of a pipeline).
    cache_may_overflow : bool
        True if requests are admitted as soon as their prompts fit, so that answers may overflow the KV cache.
    """

    max_tokens: Numbers
    max_sequences: Numbers
    mixes_prefill: bool = True
    host_time: float = 0.0
    host_time_per_sequence: float = 0.0
    time_per_request: float = 0.0
    time_per_token: float = 0.0
    pipeline_batches: int = 1
    delay: float = 0.0
    cache_may_overflow: bool = False

    def host_time_at(self, sequences: SequenceCount) -> SequenceCount:
        """Return the host time between two iterations that decode a number of sequences.

        Parameters
        ----------
        sequences : float or ndarray
            Number of sequences of all ranks of a replica.

        Returns
        -------
        float or ndarray
            Time [s].
        """
        return self.host_time + self.host_time_per_sequence * sequences


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """Length statistics of requests: ``input`` and ``output`` are the mean tokens of prompt and answer.

    ``input_variation`` and ``output_variation`` are coefficients of variation. ``prefix_hit_share`` is the share (0 to
    1) of prompt tokens found in the prefix cache. ``recomputed_tokens`` is the mean number of tokens of a request that
    are recomputed after preemptions (full KV cache).
    """

    input: float
    output: float
    input_variation: float = 0.0
    output_variation: float = 0.0
    prefix_hit_share: float = 0.0
    recomputed_tokens: Numbers = 0.0

    @property
    def computed_prompt_tokens(self) -> Array:
        """Prefill tokens per request that miss the prefix cache, at least one, plus recomputed tokens."""
        return np.asarray(max(self.input * (1.0 - self.prefix_hit_share), 1.0) + self.recomputed_tokens)

    @property
    def mean_cached_tokens(self) -> float:
        """Mean number of tokens in the KV cache of a decoding sequence, over its answer and over sequences.

        Long answers have a greater weight, because they are decoded for longer.
        """
        return self.input + self.output * (1.0 + self.output_variation**2) / 2.0


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Steady state of a serving replica under a load: rates, batch, iteration times and latencies.

    All arrays have one shape.

    Attributes
    ----------
    requests_per_s : numpy.ndarray
        Completed requests per second.
    decoding_sequences : numpy.ndarray
        Mean number of decoding sequences, all batches of a pipeline together.
    iteration_time, prefill_iteration_time : numpy.ndarray
        Mean time of an iteration, and of an iteration with prefill chunks [s].
    prefill_share : numpy.ndarray
        Share of iterations that have a prefill chunk [-].
    ttft, tpot, latency : numpy.ndarray
        Mean time to first token, per further token, and to the last token [s].
    queueing_time : numpy.ndarray
        Mean time in the queue, part of ``ttft`` [s].
    utilisation : numpy.ndarray
        Request rate over the highest rate that can be served [-].
    answer_tokens, iterations_per_prompt : numpy.ndarray
        Mean tokens of an answer; mean number of iterations over which a prompt is computed.
    decode_iteration_time, iteration_deviation : numpy.ndarray
        Time of an iteration without prompts [s]; standard deviation of the mean iteration time of an answer, as the
        number of other sequences varies [s].
    added_time_per_prompt, arrivals_per_iteration, wait_behind_prompts, wait_for_iteration : numpy.ndarray
        Time that a prompt adds to iterations [s]; mean number of requests that arrive in an iteration; mean wait behind
        the prompts of other requests, and until the end of the current iteration [s], both parts of ``ttft``.
    deterministic_ttft, ttft_deviation : numpy.ndarray
        Part of ``ttft`` that is equal for all requests; standard deviation of the other parts [s].
    lengths : RequestLengths
        Lengths of the requests.
    """

    requests_per_s: Array
    decoding_sequences: Array
    iteration_time: Array
    prefill_iteration_time: Array
    prefill_share: Array
    ttft: Array
    tpot: Array
    latency: Array
    queueing_time: Array
    utilisation: Array
    answer_tokens: Array
    iterations_per_prompt: Array
    decode_iteration_time: Array
    iteration_deviation: Array
    added_time_per_prompt: Array
    arrivals_per_iteration: Array
    wait_behind_prompts: Array
    wait_for_iteration: Array
    deterministic_ttft: Array
    ttft_deviation: Array
    lengths: RequestLengths

    @property
    def tokens_per_s(self) -> Array:
        """Throughput of the replica [generated tokens/s]."""
        return self.requests_per_s * self.answer_tokens

    def percentile(self, part: str, percent: int) -> Array:
        """Estimate a percentile of a latency over all requests in the steady state.

        Parameters
        ----------
        part : str
            ``ttft``, ``tpot`` or ``latency``.
        percent : int
            Percentile: 50, 90, 95 or 99.

        Returns
        -------
        ndarray, shape (...)
            Time [s].
        """
        z = _NORMAL_QUANTILES[percent]
        first, further = self.lengths.input_variation, self.lengths.output_variation
        added = self.arrivals_per_iteration * self.added_time_per_prompt
        busy = np.minimum(added / np.maximum(self.iteration_time, _MIN_DIVISOR), 0.95)
        # a long iteration lengthens the next: their sum varies as that of a process with autocorrelation busy
        others = self.added_time_per_prompt * np.sqrt(self.arrivals_per_iteration * (1.0 + first**2)) / (1.0 - busy)
        # prompts of others in a short answer
        met = np.maximum(self.arrivals_per_iteration * self.answer_tokens / (1.0 + further**2), _MIN_DIVISOR)
        skewed = z + (z**2 - 1.0) / 6.0 * np.minimum((1.0 + first**2) ** 1.5 / np.sqrt(met), 3.0)
        spread = others * np.sqrt((1.0 + further**2) / np.maximum(self.answer_tokens, 1.0))
        tpot = self.tpot + np.hypot(skewed * spread, z * self.iteration_deviation) * np.sign(z)
        ttft = self._first(z)
        if part == "ttft":
            return np.asarray(ttft)
        if part == "tpot":
            return np.asarray(tpot)
        turns = np.maximum(self.answer_tokens - 1.0, 0.0)
        longer = self.tpot * turns * _excess(further, z)
        if percent == 50:
            return np.asarray(self.latency + longer)
        with np.errstate(invalid="ignore"):
            later = np.where(np.isfinite(self.ttft), ttft - self.ttft, 0.0)
        excess = later**2 + longer**2 + ((tpot - self.tpot) * turns) ** 2
        return np.asarray(self.latency + np.sqrt(excess))

    def _first(self, z: float) -> Array:
        """Return a quantile of the time to first token [s]; ``z`` is the quantile of the standard normal distribution.

        The uncertain part is modelled as log-normal; waiting is exponential, with a mass at zero.
        """
        load = np.clip(self.utilisation, _MIN_DIVISOR, 1.0)
        queued = np.where(np.isfinite(self.queueing_time), self.queueing_time, 0.0)
        mean = self.wait_for_iteration + self.wait_behind_prompts + self.added_time_per_prompt + queued
        variance = self.ttft_deviation**2 + queued**2 * (2.0 / load - 1.0)
        sigma2 = np.log1p(variance / np.maximum(mean, _MIN_DIVISOR) ** 2)
        quantile = self.deterministic_ttft + mean * np.exp(z * np.sqrt(sigma2) - sigma2 / 2.0)
        return np.asarray(np.where(np.isfinite(self.ttft), quantile, self.ttft))


def _excess(variation: float, z: float) -> float:
    """Return the relative excess of a quantile of a log-normal variable over its mean.

    ``variation`` is the coefficient of variation, and ``z`` the quantile of the standard normal distribution.
    """
    sigma = math.sqrt(math.log1p(variation**2))
    return math.exp(z * sigma - sigma**2 / 2.0) - 1.0


def _mean_iteration_times(
    phases: IterationTables,
    batching: BatchingLimits,
    lengths: RequestLengths,
    sequences: Numbers,
    arrivals: Numbers,
    together: float = 0.0,
) -> tuple[Array, Array, Array, Array]:
    """Return the mean iteration time of a serving replica, and the share of iterations with a prefill chunk.

    Parameters
    ----------
    phases, batching, lengths
        Tables of iteration times, batching limits of the engine, and lengths of requests.
    sequences, arrivals : array_like
        Number of decoding sequences of a batch, and mean number of prompts that are computed per iteration.
    together : float, optional
        Share (0 to 1) of requests whose prompts come in groups that fill iterations; the others come at random.

    Returns
    -------
    tuple[Array, Array, Array, Array]
        Mean time of an iteration [s], of an iteration with prefill chunks [s], and without [s], all with host time; and
        share of iterations with a chunk (0 to 1).
    """
    decoded, cached = np.asarray(sequences, dtype=np.float64), lengths.mean_cached_tokens
    space = batching.max_tokens - (decoded if batching.mixes_prefill else 0.0)
    piece = np.clip(lengths.computed_prompt_tokens, 1.0, np.maximum(space, 1.0))
    rate = arrivals * lengths.computed_prompt_tokens / piece
    share = -(1.0 - together) * np.expm1(-rate) + together * np.minimum(rate * piece / np.maximum(space, piece), 1.0)
    number = np.where(share > _MIN_DIVISOR, rate / np.maximum(share, _MIN_DIVISOR), 1.0)
    before = np.maximum(lengths.input - piece, 0.0) / 2.0
    plain = _hosted(phases.iteration_time(decoded=decoded, cached=cached), decoded, batching)
    if batching.mixes_prefill:
        joint = phases.iteration_time(decoded=decoded, cached=cached, chunks=number, length=piece, before=before)
        busy = _hosted(joint, decoded, batching)
    else:
        alone = phases.iteration_time(decoded=0.0, cached=cached, chunks=number, length=piece, before=before)
        busy = plain + np.asarray(alone) + batching.host_time
    return (1.0 - share) * plain + share * busy, busy, plain, share


def _hosted(seconds: Array, decoded: Array, batching: BatchingLimits) -> Array:
    host = batching.host_time_at(decoded)
    return np.maximum(seconds + host, batching.time_per_token * decoded * batching.pipeline_batches)


def saturated_steady_state(
    phases: IterationTables, batching: BatchingLimits, lengths: RequestLengths, places: Numbers
) -> SteadyState:
    """Return the steady state of a saturated replica, where requests always wait: its highest throughput.

    Parameters
    ----------
    phases : IterationTables
        Tables of iteration times of the replica.
    batching : BatchingLimits
        Limits and host times of the engine's iterations.
    lengths : RequestLengths
        Lengths of requests.
    places : array_like, shape (...)
        Number of sequences that the KV cache can hold, all batches of a pipeline together.

    Returns
    -------
    SteadyState
        Rates, batch, iteration times and latencies, arrays of shape (...).
    """
    turns = max(lengths.output - 1.0, 1.0)
    ratio = 1.0 + lengths.computed_prompt_tokens / turns if batching.mixes_prefill else 1.0
    most = np.minimum(batching.max_tokens / ratio, batching.max_sequences)
    capacity = places / batching.pipeline_batches
    batch = np.maximum(np.minimum(capacity, most), _MIN_DIVISOR)
    if batching.cache_may_overflow:
        again = _overflowed(lengths, batch / turns, batching.max_tokens - batch)
        lengths = replace(lengths, recomputed_tokens=np.where(capacity < most, again, 0.0))
    # answers of one length end together, and prompts follow them; alone in an iteration, these are not waited for
    together = batching.mixes_prefill * (1.0 - min(lengths.output_variation, 1.0))
    seconds, busy, plain, share = _mean_iteration_times(phases, batching, lengths, batch, batch / turns, together)
    rate = batching.pipeline_batches * batch / turns / seconds
    front = batching.time_per_request
    rate = np.minimum(rate, 1.0 / front) if front else rate
    ones = np.ones_like(seconds)
    return _state(batching, lengths, rate, batch, (seconds, busy, plain, share), 0.0 * ones, ones)


def _overflowed(lengths: RequestLengths, completed: Array, space: Array) -> Array:
    """Return the mean number of tokens of a request that are recomputed after preemptions in a full KV cache.

    An iteration of B sequences needs B more tokens in the cache. If no request completes in the iteration, newer
    requests with B tokens altogether are preempted and recomputed. With f completions an iteration at random, a share
    exp(-f) of the O / B iterations of a request has none. Answers of one length complete in groups, as they came: in a
    share 1 - exp(-f) of the iterations, or in the smaller share that their prompts fill.

    Parameters
    ----------
    lengths : RequestLengths
        Tokens of prompts and answers.
    completed : ndarray, shape (...)
        Mean number of requests that complete in an iteration.
    space : ndarray, shape (...)
        Number of tokens of an iteration that are left for prompts.

    Returns
    -------
    ndarray, shape (...)
        Recomputed tokens per request.
    """
    apart = min(lengths.output_variation, 1.0)
    filled = np.minimum(completed * lengths.computed_prompt_tokens / np.maximum(space, 1.0), 1.0)
    together = _GROUPED_ANSWER_SHARE * filled - (1.0 - _GROUPED_ANSWER_SHARE) * np.expm1(-completed)
    events = apart * completed + (1.0 - apart) * together
    return np.asarray(lengths.output * np.exp(-events))


def steady_state_at_rate(
    phases: IterationTables,
    batching: BatchingLimits,
    lengths: RequestLengths,
    places: Numbers,
    rate: Numbers,
    *,
    arrivals: float = 1.0,
) -> SteadyState:
    """Return the steady state of a serving replica at a given request rate.

    Parameters
    ----------
    phases : IterationTables
        Tables of iteration times of the replica.
    batching : BatchingLimits
        Limits and host times of the engine's iterations.
    lengths : RequestLengths
        Tokens of prompts and answers.
    places : array_like, shape (...)
        Number of sequences that the KV cache can hold.
    rate : array_like, shape (...)
        Request rate of the replica [requests/s]. Above capacity the state is that of a saturated replica, with
        ``utilisation`` above 1 and infinite waiting.
    arrivals : float, optional
        Squared coefficient of variation of the times between arrivals: 1 Poisson, 0 evenly spaced.

    Returns
    -------
    SteadyState
        Rates, batch, iteration times and latencies, arrays of shape (...).
    """
    demand = np.asarray(rate, dtype=np.float64)
    full = saturated_steady_state(phases, batching, lengths, places)
    turns = max(lengths.output - 1.0, 1.0)
    stable = np.minimum(demand, full.requests_per_s)
    each = stable / batching.pipeline_batches
    low, high = np.zeros(np.broadcast(stable, full.iteration_time).shape), full.iteration_time * np.ones_like(stable)
    for _ in range(_BISECTION_STEPS):
        middle = 0.5 * (low + high)
        seen = each * turns * middle + arrivals  # a request finds the others, and is one more itself
        seconds, _, _, _ = _mean_iteration_times(phases, batching, lengths, seen, each * middle)
        higher = seconds > middle
        low, high = np.where(higher, middle, low), np.where(higher, high, middle)
    batch = each * turns * high
    _, busy, plain, share = _mean_iteration_times(phases, batching, lengths, batch, each * high)
    load = demand / full.requests_per_s
    state = _state(batching, lengths, stable, batch, (high, busy, plain, share), np.zeros_like(high), load)
    wait = _waiting(batching, lengths, state, full, load, arrivals)
    crowded = 1.0 + np.sqrt(arrivals / np.maximum(batch, 1.0))
    denser, _, _, _ = _mean_iteration_times(phases, batching, lengths, batch * crowded, each * high * crowded)
    crowd = np.maximum(denser - high, 0.0)
    behind, deviation = _behind(batching, lengths, state, arrivals)
    # prompts that came in the long iteration of one's own prompt pass in the first of one's answer
    prompt = state.added_time_per_prompt
    delayed = arrivals * stable * np.maximum(state.decode_iteration_time + prompt - high, 0.0) * prompt
    tpot = state.tpot + delayed / turns * (1.0 + lengths.output_variation**2)
    ttft, latency = state.ttft + wait + behind, state.latency + wait + behind + delayed
    return replace(
        state,
        queueing_time=wait,
        ttft=ttft,
        tpot=tpot,
        latency=latency,
        iteration_deviation=crowd,
        wait_behind_prompts=behind,
        ttft_deviation=deviation,
    )


def _behind(
    batching: BatchingLimits, lengths: RequestLengths, state: SteadyState, arrivals: float
) -> tuple[Array, Array]:
    """Return mean and standard deviation of the time that prompts of other requests add to TTFT [s].

    A request arrives in an iteration of L* seconds, more often in a long one (E[L*] = E[L²] / E[L]). The request waits
    for the end of the iteration, and is computed with all requests that arrived in the same iteration. Prompts that
    arrive in an iteration lengthen the next one: Var L = E[N] E[P²] / (1 - ρ²) for N requests of P seconds, whose share
    of the time is ρ, and likewise for the third cumulant. Where prompts fill the tokens of iterations, a request queues
    for tokens (M/G/1). For ``arrivals`` = 0 (evenly spaced) there is no such wait.
    """
    size, count, plain = state.added_time_per_prompt, state.arrivals_per_iteration, state.decode_iteration_time
    spread = 1.0 + lengths.input_variation**2
    rate = count / np.maximum(state.iteration_time, _MIN_DIVISOR)
    busy = np.minimum(rate * size, 0.95) if batching.mixes_prefill else 0.0 * size
    first, second = count * size, count * size**2 * spread / (1.0 - busy**2)
    third = (count * size**3 * spread**3 + 3.0 * rate * size**2 * spread * busy * second) / (1.0 - busy**3)
    beside = plain if batching.mixes_prefill else 0.0 * plain  # decode in the same iteration
    mean = beside + first
    moments = (second + mean**2, third + 3.0 * mean * second + mean**3)
    if not batching.mixes_prefill:
        mean, moments = plain + first, (plain**2 + moments[0], plain**3 + moments[1])
    met, met2 = (each / np.maximum(mean, _MIN_DIVISOR) for each in moments)
    passed = (0.5 + rate * size) * met - state.wait_for_iteration
    variance = met2 / 12.0 + rate * met * size**2 * spread + (0.5 + rate * size) ** 2 * np.maximum(met2 - met**2, 0.0)
    space = np.maximum(batching.max_tokens - (state.decoding_sequences if batching.mixes_prefill else 0.0), 1.0)
    filled = lengths.computed_prompt_tokens / space
    load = np.clip(count * filled, 0.0, 0.95)
    service = filled * (plain + size / np.maximum(filled, _MIN_DIVISOR))
    queued = 0.5 * load / (1.0 - load) * service * spread
    even = state.wait_for_iteration**2 / 3.0
    deviation = np.sqrt(arrivals * variance + (1.0 - arrivals) * even + (lengths.input_variation * size) ** 2)
    return np.asarray(arrivals * np.maximum(passed, queued)), np.asarray(deviation)


def _waiting(
    batching: BatchingLimits,
    lengths: RequestLengths,
    state: SteadyState,
    full: SteadyState,
    load: Array,
    arrivals: float,
) -> Array:
    """Return the mean queueing time of a request [s], for a place in the batch and for the server.

    ``state`` is the state at the request rate, ``full`` the saturated state, and ``load`` the ratio of their rates.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        places, open_share = np.maximum(full.decoding_sequences, 1.0), np.maximum(1.0 - load, 0.0)
        power = np.sqrt(2.0 * (places + 1.0)) - 1.0
        variation = (arrivals + lengths.output_variation**2) / 2.0
        place = full.latency * variation * np.minimum(load, 1.0) ** power / (places * open_share)
        server = np.minimum(state.requests_per_s * batching.time_per_request, 1.0 - _MIN_DIVISOR)
        front = 0.5 * arrivals * server * batching.time_per_request / (1.0 - server)
    wait = np.where(variation > 0, place, np.where(load < 1.0, 0.0, np.inf))
    return np.asarray(np.where(load < 1.0, wait, np.inf) + front)


def closed_loop_steady_state(
    phases: IterationTables,
    batching: BatchingLimits,
    lengths: RequestLengths,
    places: Numbers,
    users: Numbers,
    think: float = 0.0,
) -> SteadyState:
    """Return the steady state of a replica under a closed loop of users, who wait for an answer before they ask again.

    Parameters
    ----------
    phases : IterationTables
        Tables of iteration times of the replica.
    batching : BatchingLimits
        Limits and host times of the engine's iterations.
    lengths : RequestLengths
        Tokens of prompts and answers.
    places : array_like, shape (...)
        Number of sequences that the KV cache can hold.
    users : array_like, shape (...)
        Number of users of the replica, each with one request at a time.
    think : float, optional
        Time from an answer until its user asks again [s].

    Returns
    -------
    SteadyState
        Rates, batch, iteration times and latencies, arrays of shape (...).
    """
    number = np.asarray(users, dtype=np.float64)
    full = saturated_steady_state(phases, batching, lengths, np.minimum(places, number))
    low, high = np.zeros(np.broadcast(number, full.iteration_time).shape), full.requests_per_s * np.ones_like(number)
    for _ in range(_BISECTION_STEPS):
        middle = 0.5 * (low + high)
        state = steady_state_at_rate(phases, batching, lengths, np.inf, np.maximum(middle, _MIN_DIVISOR), arrivals=0.0)
        # no iteration of others runs where there is one user
        latency = state.latency - state.wait_for_iteration / number
        more = middle * (np.where(np.isfinite(latency), latency, 1e18) + think) < number
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    state = steady_state_at_rate(phases, batching, lengths, np.inf, np.maximum(low, _MIN_DIVISOR), arrivals=0.0)
    ttft, latency = (each - state.wait_for_iteration / number for each in (state.ttft, state.latency))
    queued = np.maximum(number / np.maximum(low, _MIN_DIVISOR) - think - latency, 0.0)
    return replace(state, queueing_time=queued, ttft=ttft + queued, latency=latency + queued)


def _state(
    batching: BatchingLimits,
    lengths: RequestLengths,
    rate: Array,
    batch: Array,
    times: tuple[Array, Array, Array, Array],
    waiting: Array,
    load: Array,
) -> SteadyState:
    """Combine iteration times into the steady state of a replica, with latencies that include no queueing.

    A request waits half an iteration until the next begins, then takes the iterations of its prompt, then one iteration
    per further token. ``times`` is the result of `_mean_iteration_times`.
    """
    seconds, busy, plain, share = times
    output = lengths.output * np.ones_like(seconds)
    space = np.maximum(batching.max_tokens - (batch if batching.mixes_prefill else 0.0), 1.0)
    pieces = np.maximum(lengths.computed_prompt_tokens / space, 1.0)
    arrived = rate * seconds / batching.pipeline_batches
    together = np.maximum(arrived * pieces / np.maximum(share, _MIN_DIVISOR), 1.0)
    prompt = np.maximum(busy - plain, 0.0) * pieces / together
    passes = plain * np.ceil(pieces - _MIN_DIVISOR) if batching.mixes_prefill else 0.0 * plain
    half = 0.5 * seconds if batching.mixes_prefill else 0.5 * plain**2 / np.maximum(seconds, _MIN_DIVISOR)
    certain = batching.time_per_request + batching.delay + passes
    ttft = certain + half + prompt
    turns = np.maximum(output - 1.0, 0.0)
    zeros = np.zeros_like(seconds)
    return SteadyState(
        rate * np.ones_like(seconds),
        batch * batching.pipeline_batches,
        seconds,
        busy,
        share,
        ttft,
        tpot=seconds,
        latency=ttft + turns * seconds,
        queueing_time=waiting,
        utilisation=load,
        answer_tokens=output,
        iterations_per_prompt=pieces,
        decode_iteration_time=plain,
        iteration_deviation=zeros,
        added_time_per_prompt=prompt,
        arrivals_per_iteration=arrived,
        wait_behind_prompts=zeros,
        wait_for_iteration=half,
        deterministic_ttft=certain,
        ttft_deviation=half / math.sqrt(3.0),
        lengths=lengths,
    )
