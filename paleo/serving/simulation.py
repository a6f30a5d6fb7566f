"""Discrete-event simulation of the iterations of an inference engine, for traces and to test the closed form.

A heap holds the ends of the decoding sequences, counted in decode iterations. Iterations in which no sequence ends,
arrives or overflows are simulated in one event, so 10,000 requests take a second or two. Requests are served in the
order of their arrival. The KV cache is counted in tokens. If the cache is full, an engine that does not reserve whole
requests preempts the newest request and recomputes it later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.events import EventQueue
from paleo.serving.iteration_times import CACHED_TOKEN_GRID, CHUNK_LENGTH_GRID

if TYPE_CHECKING:
    from paleo.serving.iteration_times import IterationTables
    from paleo.serving.requests import Requests
    from paleo.serving.steady_state import BatchingLimits

Array = npt.NDArray[np.float64]
#: Most iterations of decode that pass in one event, so that the growth of the cache in them is small.
_MAX_ITERATIONS_PER_EVENT = 64


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Result of the simulation of one replica: latencies of all requests, and statistics of batches and KV cache.

    Attributes
    ----------
    ttft, tpot, latency : numpy.ndarray
        Time from arrival to first token; mean time of further tokens (nan for answers of one token); time from arrival
        to last token [s], shape (requests,).
    finish : numpy.ndarray
        Time at which the last token was sent [s], shape (requests,).
    makespan : float
        Time from the first arrival to the last token [s].
    tokens, iterations : float
        Numbers of generated tokens and of iterations.
    peak_cached_tokens, mean_decoding_sequences : float
        Largest number of tokens in the KV cache; mean number of decoding sequences over iterations.
    preemptions : int
        Number of requests that were stopped and computed again, as the cache was full.
    queue_history : numpy.ndarray
        Time [s] and number of waiting requests at each event, shape (n, 2).
    """

    ttft: Array
    tpot: Array
    latency: Array
    finish: Array
    makespan: float
    tokens: float
    iterations: float
    peak_cached_tokens: float
    mean_decoding_sequences: float
    preemptions: int
    queue_history: Array

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second over the whole run."""
        return self.tokens / self.makespan

    @property
    def requests_per_s(self) -> float:
        """Requests per second over the whole run."""
        return len(self.finish) / self.makespan

    def percentile(self, part: str, percent: float) -> float:
        """Return a percentile of a latency over all simulated requests.

        Parameters
        ----------
        part : str
            ``ttft``, ``tpot`` or ``latency``.
        percent : float
            Percentile, 0 to 100.

        Returns
        -------
        float
            Time [s].
        """
        values = getattr(self, part)
        known = values[np.isfinite(values)]
        return float(np.percentile(known, percent)) if len(known) else 0.0

    def mean(self, part: str) -> float:
        """Return the mean of a latency over all simulated requests.

        Parameters
        ----------
        part : str
            ``ttft``, ``tpot`` or ``latency``.

        Returns
        -------
        float
            Time [s].
        """
        values = getattr(self, part)
        known = values[np.isfinite(values)]
        return float(known.mean()) if len(known) else 0.0


class _IterationTimes:
    """Tables of iteration times [s] as plain lists, which are faster to look up one by one than arrays.

    They hold every number of tokens and sequences up to the most that an iteration may have.
    """

    def __init__(self, phases: IterationTables, most_tokens: int, most_sequences: int) -> None:
        tokens = np.arange(most_tokens + phases.rows_per_sequence * most_sequences + 2, dtype=np.float64)
        sequences = np.arange(most_sequences + 2, dtype=np.float64)
        self.products: list[float] = phases.non_attention_time(tokens).tolist()
        self.sampled: list[float] = phases.sampling_time(sequences).tolist()
        self.speculated: list[float] = phases.speculation_time(sequences).tolist()
        self.state = phases.state_time_per_sequence / phases.kernels.mean_emitted_tokens
        number, cached = sequences[:, None], CACHED_TOKEN_GRID[None, :]
        self.decode: list[list[float]]
        self.joint: list[list[float]]
        self.decode, self.joint = (
            (phases.decode_attention_time(number, cached, joint=each) - number * self.state).tolist()
            for each in (False, True)
        )
        self.chunk: list[list[float]] = phases.prefill_attention_times.tolist()
        self.launch, self.issue = phases.prefill_fixed_time, phases.launch_time
        self.ranks, self.rows = phases.sharding.attention_dp, phases.rows_per_sequence
        self.hop = (phases.sharding.pp - 1) * phases.stage_transfer_time
        self.largest_graph = phases.largest_graph

    def decoding(self, sequences: int, cached: float, *, joint: bool) -> float:
        """Return the attention time of one decode token per sequence, interpolated in the tables.

        Parameters
        ----------
        sequences : int
            Sequences that decode on one attention data-parallel rank.
        cached : float
            Mean cached tokens of these sequences.
        joint : bool
            True if prompts are in the same iteration.

        Returns
        -------
        float
            Time [s].
        """
        row = (self.joint if joint else self.decode)[sequences]
        place = min(max(bisect_right(_CACHED, cached) - 1, 0), len(_CACHED) - 2)
        share = (cached - _CACHED[place]) / (_CACHED[place + 1] - _CACHED[place])
        return float(row[place] + share * (row[place + 1] - row[place]) + sequences * self.state)

    def piece(self, length: float, before: float) -> float:
        """Return the attention time of a prefill chunk, interpolated in the tables.

        Parameters
        ----------
        length : float
            Tokens of the chunk.
        before : float
            Cached tokens of the same prompt before the chunk.

        Returns
        -------
        float
            Time [s].
        """
        i = min(max(bisect_right(_CHUNKS, length) - 1, 0), len(_CHUNKS) - 2)
        j = min(max(bisect_right(_BEFORE, before) - 1, 0), len(_BEFORE) - 2)
        u = (length - _CHUNKS[i]) / (_CHUNKS[i + 1] - _CHUNKS[i])
        v = (before - _BEFORE[j]) / (_BEFORE[j + 1] - _BEFORE[j])
        low, high = self.chunk[i], self.chunk[i + 1]
        first, second = low[j] + v * (low[j + 1] - low[j]), high[j] + v * (high[j + 1] - high[j])
        return float(first + u * (second - first))

    def iteration(self, decoded: int, cached: float, prefilled: float, attention: float, ends: int) -> float:
        """Return the time of one engine iteration, with decode tokens, prefill chunks, or both.

        Parameters
        ----------
        decoded : int
            Sequences that decode a token.
        cached : float
            Mean cached tokens of these sequences.
        prefilled : float
            Prompt tokens that the iteration computes.
        attention : float
            Attention time of the prefill chunks [s].
        ends : int
            Prefill chunks that end a prompt, and so sample a token.

        Returns
        -------
        float
            Time [s].
        """
        share = -(-decoded // self.ranks)
        tokens = self.rows * share + -(-int(prefilled) // self.ranks)
        seconds = self.products[tokens] + self.sampled[share + -(-ends // self.ranks)] + self.hop * tokens
        if decoded:
            seconds += self.decoding(share, cached, joint=prefilled > 0) + self.speculated[share]
        if prefilled:
            seconds += self.launch + attention / self.ranks
        return seconds if not prefilled and share <= self.largest_graph else max(seconds, self.issue)


_CACHED: list[float] = CACHED_TOKEN_GRID.tolist()
_CHUNKS: list[float] = CHUNK_LENGTH_GRID.tolist()
_BEFORE: list[float] = [0.0, *_CACHED[1:]]


@dataclass(slots=True)
class _State:
    """State of a simulated replica: clock, KV cache, queue of requests, and decoding sequences."""

    now: float = 0.0
    turn: int = 0
    cache: float = 0.0
    shared: float = 0.0
    waiting: deque[int] = field(default_factory=deque)
    running: EventQueue = field(default_factory=EventQueue)
    partial: int = -1
    starting: int = 0
    arrived: int = 0
    iterations: float = 0.0
    busy: float = 0.0
    peak: float = 0.0
    preemptions: int = 0
    queue: list[tuple[float, int]] = field(default_factory=list)


class _ReplicaSimulation:
    """Discrete-event simulation of one replica of an inference engine; `simulate_requests` runs a whole load."""

    def __init__(
        self, phases: IterationTables, batching: BatchingLimits, requests: Requests, *, capacity: float,
        reservation: float, users: int | None, think: float,
    ) -> None:  # fmt: skip
        self.batching, self.requests, self.capacity = batching, requests, capacity
        self.reservation, self.users, self.think = reservation, users, think
        self.budget, self.places = int(batching.max_tokens), int(batching.max_sequences)
        self.prices = _IterationTimes(phases, self.budget, 2 * min(self.places, max(len(requests), 1)))
        self.input: list[float] = requests.prompt_tokens.tolist()
        self.output = [int(each) for each in requests.answer_tokens]
        self.computed = [max(each * (1.0 - requests.prefix_hit_share), 1.0) for each in self.input]
        self.done = [each - computed for each, computed in zip(self.input, self.computed, strict=True)]
        self.generated = [0] * len(requests)
        self.arrival = requests.arrival.tolist()
        self.first, self.finish = [float("nan")] * len(requests), [float("nan")] * len(requests)
        self.state = _State()
        self.ends = self.promised = self.front = 0.0
        # Return when each request enters the queue, after the server, which takes them one by one.
        self.entered: list[float] = []
        first = len(self.arrival) if self.users is None else min(self.users, len(self.arrival))
        if self.users is not None:
            self.arrival[:first] = [self.think * number / self.users for number in range(first)]
        for arrival, together in groupby(self.arrival[:first]):
            number = len(list(together))
            self.front = max(self.front, arrival) + number * self.batching.time_per_request
            self.entered += [self.front + self.batching.delay] * number

    def run(self) -> None:
        """Simulate all requests, and record the times of their first and last tokens."""
        state, total = self.state, len(self.input)
        while state.arrived < total or state.waiting or state.running or state.partial >= 0:
            self._admit_arrivals()
            if not (state.waiting or state.running or state.partial >= 0):
                if state.arrived >= len(self.entered):
                    break
                state.now = max(state.now, self.entered[state.arrived])
                continue
            if state.partial >= 0 or (state.waiting and self._has_place(state.waiting[0])):
                self._with_prompts()
            else:
                self._leap()

    def _admit_arrivals(self) -> None:
        state = self.state
        while state.arrived < len(self.entered) and self.entered[state.arrived] <= state.now:
            state.waiting.append(state.arrived)
            state.arrived += 1
        state.queue.append((state.now, len(state.waiting)))

    def _shared(self, request: int) -> float:
        """Return the number of prompt tokens of a request in cache pages that all requests share."""
        return self.input[request] - self.computed[request] if self.requests.shares_prefix else 0.0

    def _reserved_answer_tokens(self, request: int, back: int = 0) -> float:
        """Return the answer tokens for which the KV cache must have space when a request is admitted."""
        return max(self.reservation * (self.output[request] - self.generated[request] + back), 1.0)

    def _has_place(self, request: int) -> bool:
        state = self.state
        if len(state.running) + state.starting >= self.places:
            return False
        coming = max(self.reservation * (self.ends - state.turn * len(state.running)), float(len(state.running)))
        needs = self.input[request] + self.generated[request] + self._reserved_answer_tokens(request)
        return state.cache - state.shared + self._rest() + self.promised + coming + needs <= self.capacity

    def _rest(self) -> float:
        """Return the tokens of a partly prefilled prompt that are not in the KV cache yet; 0 without such a prompt."""
        request = self.state.partial
        return 0.0 if request < 0 else self.input[request] + self.generated[request] - self.done[request] + 1.0

    def _with_prompts(self) -> None:
        """Simulate an iteration with prefill chunks, and with decoding sequences if the engine mixes both."""
        state, mixed = self.state, self.batching.mixes_prefill
        self._overflow()
        budget = max(self.budget - (len(state.running) if mixed else 0), 1)
        prefilled, attention, finished = 0.0, 0.0, []
        while budget >= 1:
            request = self._next_prompt()
            if request < 0:
                break
            left = self.input[request] + self.generated[request] - self.done[request]
            piece = min(left, float(budget))
            attention += self.prices.piece(piece, self.done[request])
            prefilled, budget = prefilled + piece, int(budget - piece)
            self.done[request] += piece
            state.cache += piece
            if piece < left:
                state.partial = request
                break
            finished.append(request)
        decoded = len(state.running) if mixed else 0
        self._pass(decoded, prefilled, attention, len(finished))
        if decoded:
            self._advance(1)
        for request in finished:
            self._start(request)
        self._overflow()

    def _next_prompt(self) -> int:
        state = self.state
        if state.partial >= 0:
            request, state.partial = state.partial, -1
            return request
        if not state.waiting or not self._has_place(state.waiting[0]):
            return -1
        request = state.waiting.popleft()
        hit = self.input[request] - self.computed[request] if self.generated[request] == 0 else 0.0
        self.done[request] = hit
        state.cache += hit
        state.shared += self._shared(request)
        self.promised += self._reserved_answer_tokens(request)
        state.starting += 1
        return request

    def _pass(self, decoded: int, prefilled: float, attention: float, ends: int) -> None:
        state = self.state
        cached = state.cache / max(len(state.running), 1)
        seconds = self.prices.iteration(decoded, cached, prefilled, attention, ends)
        state.now += self._with_host(seconds, decoded)
        state.iterations += 1.0
        state.busy += decoded

    def _with_host(self, seconds: float, decoded: int) -> float:
        """Add host time to an iteration, at least the time in which the server sends the generated tokens [s]."""
        return max(seconds + self.batching.host_time_at(float(decoded)), self.batching.time_per_token * decoded)

    def _start(self, request: int) -> None:
        """Finish the prefill of a request: record its first token, and add it to the decoding sequences."""
        state = self.state
        if self.first[request] != self.first[request]:
            self.first[request] = state.now
        self.generated[request] += 1
        state.cache += 1.0
        self.promised -= self._reserved_answer_tokens(request, back=1)
        state.starting -= 1
        if self.generated[request] >= self.output[request]:
            self._end(request)
            return
        last = state.turn + self.output[request] - self.generated[request]
        state.running.push(last, request)
        self.ends += last

    def _end(self, request: int) -> None:
        state = self.state
        self.finish[request] = state.now
        state.cache -= self.input[request] + self.output[request]
        state.shared -= self._shared(request)
        if self.users is not None and len(self.entered) < len(self.arrival):
            number = len(self.entered)
            self.arrival[number] = state.now + self.think
            self.front = max(self.front, self.arrival[number]) + self.batching.time_per_request
            self.entered.append(self.front + self.batching.delay)

    def _advance(self, turns: int) -> None:
        """Advance all decoding sequences by ``turns`` iterations, and finish the sequences that end."""
        state = self.state
        state.cache += turns * len(state.running)
        state.turn += turns
        state.peak = max(state.peak, state.cache - state.shared)
        while state.running.next_event_time <= state.turn:
            last, request = state.running.pop()
            self.ends -= last
            self._end(request)

    def _leap(self) -> None:
        """Simulate decode iterations in one event until a request ends or arrives, or the KV cache is full."""
        state = self.state
        number = len(state.running)
        if not number:
            raise SpecError("a request does not fit into an empty cache")
        turns = min(int(state.running.next_event_time) - state.turn, _MAX_ITERATIONS_PER_EVENT)
        turns = max(min(turns, int((self.capacity - state.cache + state.shared) // number)), 1)
        middle = state.cache / number + turns / 2.0
        seconds = self._with_host(self.prices.iteration(number, middle, 0.0, 0.0, 0), number)
        if state.arrived < len(self.entered) and len(state.running) < self.places:
            until = self.entered[state.arrived] - state.now
            turns = max(min(turns, int(until / seconds) + 1), 1)
        state.now += turns * seconds
        state.iterations += turns
        state.busy += turns * number
        self._advance(turns)
        self._overflow()

    def _overflow(self) -> None:
        """Preempt the newest requests until one more token of each decoding sequence fits in the KV cache."""
        state = self.state
        while len(state.running) > 1 and state.cache - state.shared + len(state.running) + self._rest() > self.capacity:
            request = state.running.newest_event
            last = int(state.running.cancel(request))
            self.ends -= last
            generated = self.output[request] - (last - state.turn)
            state.cache -= self.input[request] + generated
            state.shared -= self._shared(request)
            self.generated[request] = generated
            state.waiting.appendleft(request)
            state.preemptions += 1


def simulate_requests(
    phases: IterationTables,
    batching: BatchingLimits,
    requests: Requests,
    *,
    capacity: float,
    reservation: float = 1.0,
    users: int | None = None,
    think: float = 0.0,
) -> SimulationResult:
    """Simulate one replica of an inference engine that serves requests, iteration by iteration.

    Parameters
    ----------
    phases : IterationTables
        Tables of iteration times of the replica.
    batching : BatchingLimits
        Limits and host times of the engine's iterations.
    requests : Requests
        Requests of this replica.
    capacity : float
        Capacity of the KV cache [tokens].
    reservation : float, optional
        Share of an answer (0 to 1) for which the cache must have space when a request is admitted.
    users : int, optional
        Users of a closed loop, who each ask again after an answer; None: requests come at their arrival times.
    think : float, optional
        Time from an answer until its user asks again [s].

    Returns
    -------
    SimulationResult
        Latencies of all requests, and statistics of batches and KV cache.

    Raises
    ------
    SpecError
        If a request is longer than the cache.
    """
    largest = float((requests.prompt_tokens + requests.answer_tokens).max())
    if largest + 1.0 > capacity:
        raise SpecError(f"a request of {largest:,.0f} tokens is longer than the cache of {capacity:,.0f} tokens")
    replica = _ReplicaSimulation(
        phases, batching, requests, capacity=capacity, reservation=reservation, users=users, think=think
    )
    replica.run()
    state, arrival = replica.state, np.array(replica.arrival)
    first, finish, output = np.array(replica.first), np.array(replica.finish), requests.answer_tokens
    with np.errstate(invalid="ignore", divide="ignore"):
        further = np.where(output > 1, (finish - first) / (output - 1.0), np.nan)
    return SimulationResult(
        ttft=first - arrival,
        tpot=further,
        latency=finish - arrival,
        finish=finish,
        makespan=float(np.nanmax(finish) - arrival.min()),
        tokens=float(output.sum()),
        iterations=state.iterations,
        peak_cached_tokens=state.peak,
        mean_decoding_sequences=state.busy / max(state.iterations, 1.0),
        preemptions=state.preemptions,
        queue_history=np.array(state.queue, dtype=np.float64).reshape(-1, 2),
    )
