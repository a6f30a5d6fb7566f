"""Seconds of the one-shot and two-shot all-reduce kernels of serving engines, with NCCL above their largest payload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.collectives.base import ALGORITHMS
from paleo.pricing.links.alpha_beta import NANOSECOND, bus_factor, fill_time, hidden, with_skew
from paleo.pricing.links.group import SWITCH_RANKS
from paleo.specs.calibration import parameter
from paleo.units import GIB, KILO, MICROSECOND

if TYPE_CHECKING:
    from paleo.collectives.base import Array, Numeric
    from paleo.pricing.links.group import GroupLinks


@dataclass(frozen=True, slots=True)
class CustomParameters:
    """One-shot and two-shot all-reduce kernels over NVLink, and the ring above their largest payload."""

    launch: float = parameter(
        4 * MICROSECOND,
        low=0.5 * MICROSECOND,
        high=50 * MICROSECOND,
        unit="s",
        meaning="kernel start and first barrier",
    )
    host: float = parameter(
        NANOSECOND,
        low=NANOSECOND,
        high=500 * MICROSECOND,
        unit="s",
        meaning="time the host needs to issue the call",
    )
    peer: float = parameter(
        0.1 * MICROSECOND,
        low=NANOSECOND,
        high=5 * MICROSECOND,
        unit="s",
        meaning="one more peer in the barrier",
    )
    one_shot_fraction: float = parameter(0.6, low=0.05, high=1.0, unit="1", meaning="share of the link, one-shot")
    two_shot: float = parameter(
        4 * MICROSECOND, low=0.1 * MICROSECOND, high=50 * MICROSECOND, unit="s", meaning="the second barrier and pass"
    )
    two_shot_fraction: float = parameter(0.6, low=0.05, high=1.0, unit="1", meaning="share of the link, two-shot")
    largest: float = parameter(2.0**23, low=KILO, high=GIB, unit="byte", meaning="largest payload", fitted=False)
    two_shot_threshold: float = parameter(
        2.0**21, low=KILO, high=GIB, unit="byte", meaning="payload times ranks from which two-shot runs", fitted=False
    )
    ring_start: float = parameter(
        15 * MICROSECOND, low=0.1 * MICROSECOND, high=300 * MICROSECOND, unit="s", meaning="launch and start of NCCL"
    )
    ring_step: float = parameter(
        5 * MICROSECOND, low=0.1 * MICROSECOND, high=100 * MICROSECOND, unit="s", meaning="one hop of NCCL's ring"
    )
    ring_fraction: float = parameter(0.77, low=0.05, high=1.0, unit="1", meaning="share of the link of NCCL's ring")
    copy: float = parameter(0.38, low=0.02, high=3.0, unit="1", meaning="copy of a rank's own share, in link times")
    fill: float = parameter(
        1.5 * MICROSECOND,
        low=NANOSECOND,
        high=1000 * MICROSECOND,
        unit="s",
        meaning="cost of one more chunk in the pipeline",
    )
    switch_fraction: float = parameter(0.63, low=0.2, high=1.0, unit="1", meaning="share of the link with NVLink SHARP")


def custom_time(*, payload_bytes: Numeric, links: GroupLinks, parameters: CustomParameters) -> Array:
    """Seconds of a custom all-reduce: one-shot, two-shot or, above the largest payload, NCCL.

    One-shot: every rank reads all other buffers, (P-1) S over its link. Two-shot: reduce-scatter and all-gather,
    2 (P-1)/P S, after one more barrier; from 2 MiB over P on, when P > 2 (vLLM, SGLang).
    A call outside a graph lasts at least as long as the host needs.
    """
    p, payload, ranks = parameters, np.asarray(payload_bytes, dtype=np.float64), links.ranks
    wire = bus_factor("all_reduce", ranks) * payload / links.rank_bandwidth
    start = p.launch + p.peer * ranks
    one_shot = start + wire * ranks / 2.0 / p.one_shot_fraction
    two_shot = start + p.two_shot + wire / p.two_shot_fraction
    kernel = np.where(np.logical_and(payload * ranks >= p.two_shot_threshold, ranks > 2), two_shot, one_shot)
    time = np.where(payload <= p.largest, kernel, _ring_beyond(payload, wire, links, p))
    return with_skew(np.where(ranks > 1, time, 0.0), p.host)


def _ring_beyond(payload: Array, wire: Array, links: GroupLinks, p: CustomParameters) -> Array:
    copied = 0.5 * p.copy * payload / links.ranks / links.rank_bandwidth
    moved = wire / p.ring_fraction + copied
    time = p.ring_start + hidden(2.0 * (links.ranks - 1.0) * p.ring_step, moved) + fill_time(moved, p.fill)
    if not links.switch_reduces:
        return np.asarray(time)
    traffic = ALGORITHMS["in_switch"].traffic("all_reduce", payload, links.fan_outs)
    switch = links.wire_time(traffic) / p.switch_fraction
    by_switch = p.ring_start + links.ranks * p.ring_step + switch + fill_time(switch, p.fill)
    return np.where(links.ranks >= SWITCH_RANKS, np.minimum(time, by_switch), time)
