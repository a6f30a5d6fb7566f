"""Separate replicas for prefill and for decode, in numbers for which their rates match.

A prefill replica is a queue with one server, whose service is an iteration with one prompt. A decode replica is the
fixed point of a load whose prompts are already computed. Between them each rank sends its part of a prompt's KV cache
over the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paleo.serving.plans import SHARES, ReplicaLayout, ServingLimits, ServingLoad
from paleo.serving.steady import at_rate, saturated

if TYPE_CHECKING:
    from paleo.specs.system import System

#: Share of a link's rate at which caches move, and loads of a replica of prefill that are tried.
_TRANSFER_SHARE = 0.7
_LOADS = np.linspace(0.05, 0.95, 19)


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Numbers of prefill and decode replicas, and the requests that they serve.

    Attributes
    ----------
    prefill, decode : ReplicaLayout
        Layout of a replica of each.
    prefillers, decoders : int
        Replicas of each.
    requests_per_s : float
        Requests a second of all, the smaller of both rates.
    ttft, tpot : float
        Mean seconds to the first token, the move of the cache included, and of a further token.
    transfer : float
        Seconds in which the cache of a prompt moves.
    """

    prefill: ReplicaLayout
    decode: ReplicaLayout
    prefillers: int
    decoders: int
    requests_per_s: float
    ttft: float
    tpot: float
    transfer: float

    @property
    def gpus(self) -> int:
        """Number of devices in use."""
        return self.prefillers * self.prefill.sharding.gpus + self.decoders * self.decode.sharding.gpus

    @property
    def text(self) -> str:
        """Layouts and numbers of replicas as text."""
        first, second = self.prefill.sharding.text, self.decode.sharding.text
        return f"{self.prefillers} x {first} prefill, {self.decoders} x {second} decode"


def _prefill_rate(layout: ReplicaLayout, load: ServingLoad, limits: ServingLimits, sent: float) -> tuple[float, float]:
    """Return the highest rate of a prefill replica [1/s], and its mean time to the first token [s]."""
    lengths, engine = load.lengths, layout.engine
    piece = np.minimum(lengths.computed, float(layout.limit.tokens))
    pieces = lengths.computed / piece
    before = np.maximum(np.asarray(lengths.input) - piece, 0.0) / 2.0
    each = layout.phases.iteration(decoded=0.0, cached=1.0, chunks=1.0, length=piece, before=before)
    service = float(pieces * (each + engine.pause))
    waits = 0.5 * _LOADS * service * (load.variation + lengths.input_variation**2) / (1.0 - _LOADS)
    mean = engine.request + waits + service + sent
    slow = mean + waits * (np.log(100.0) - 1.0) if limits.percentile == 99 else mean
    kept = slow <= limits.ttft if limits.ttft is not None else np.ones(len(_LOADS), dtype=bool)
    if not kept.any():
        return 0.0, float(mean[0])
    chosen = int(np.flatnonzero(kept)[-1])
    return float(_LOADS[chosen] / service), float(mean[chosen])


def _decode_rate(layout: ReplicaLayout, load: ServingLoad, limits: ServingLimits) -> tuple[float, float]:
    """Return the highest rate of a decode replica [1/s], and its mean time per token [s]."""
    first = float(np.asarray(load.lengths.input))
    lengths = replace(load.lengths, hit=1.0 - 1.0 / max(first, 2.0))
    places = layout.places(lengths)
    batching = replace(layout.batching(), request=0.0)
    full = float(saturated(layout.phases, batching, lengths, places).requests_per_s)
    state = at_rate(layout.phases, batching, lengths, places, full * SHARES, arrivals=load.variation)
    bounds = replace(limits, ttft=None)
    kept = np.flatnonzero(bounds.excess(state) * np.ones(len(SHARES)) <= 1.0)
    if not len(kept):
        return 0.0, float(state.tpot[0])
    return float(state.requests_per_s[kept[-1]]), float(state.tpot[kept[-1]])


def disaggregated(
    fitting: Sequence[ReplicaLayout], load: ServingLoad, limits: ServingLimits, gpus: int, system: System
) -> Disaggregation | None:
    """Return the division into prefill and decode that serves the most requests a second within limits.

    Parameters
    ----------
    fitting : sequence of ReplicaLayout
        Layouts that hold the network.
    load, limits : ServingLoad, ServingLimits
        Lengths of requests, and within what they are to be answered.
    gpus : int
        Total number of devices.
    system : System
        Its outermost link moves the caches.

    Returns
    -------
    Disaggregation or None
        None where no division of the devices keeps the limits.
    """
    link = system.levels[-1].link.bandwidth if system.levels else system.device.memory.bandwidth
    decoders = [(layout, *_decode_rate(layout, load, limits)) for layout in fitting]
    best: Disaggregation | None = None
    for first in fitting:
        moved = float(first.memory.sequence(np.asarray(load.lengths.input))) / (_TRANSFER_SHARE * link)
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
