"""Time of the one-shot and two-shot all-reduce kernels of inference engines, with NCCL for large payloads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paleo.collectives.base import ALGORITHMS, Array, Numeric
from paleo.pricing.links.alpha_beta import bus_factor, fill_time, hidden, with_skew
from paleo.pricing.links.group import SWITCH_RANKS, GroupLinks
from paleo.specs.calibration import parameter


@dataclass(frozen=True, slots=True)
class CustomParameters:
    """Calibration of one-shot and two-shot all-reduce kernels over NVLink, and of the ring for large payloads."""

    launch: float = parameter("4 us", "0.5..50 us", "kernel start and first barrier")
    host: float = parameter("1 ns", "1 ns..500 us", "time the host needs to issue the call")
    peer: float = parameter("0.1 us", "1 ns..5 us", "one more peer in the barrier")
    one_shot_fraction: float = parameter("0.6", "0.05..1", "share of the link, one-shot")
    two_shot: float = parameter("4 us", "0.1..50 us", "the second barrier and pass")
    two_shot_fraction: float = parameter("0.6", "0.05..1", "share of the link, two-shot")
    largest: float = parameter("8 MiB", "1 kB..1 GiB", "largest payload", fitted=False)
    two_shot_threshold: float = parameter("2 MiB", "1 kB..1 GiB", "payload times ranks of two-shot", fitted=False)
    ring_start: float = parameter("15 us", "0.1..300 us", "launch and start of NCCL")
    ring_step: float = parameter("5 us", "0.1..100 us", "one hop of NCCL's ring")
    ring_fraction: float = parameter("0.77", "0.05..1", "share of the link of NCCL's ring")
    copy: float = parameter("0.38", "0.02..3", "copy of a rank's own share, in link times")
    fill: float = parameter("1.5 us", "1 ns..1000 us", "cost of one more chunk in the pipeline")
    switch_fraction: float = parameter("0.63", "0.2..1", "share of the link with NVLink SHARP")


def custom_time(*, payload_bytes: Numeric, links: GroupLinks, parameters: CustomParameters) -> Array:
    """Compute the time of a custom all-reduce: one-shot, two-shot or, above the largest payload, NCCL.

    One-shot: every rank reads all other buffers, (P-1) S over its link. Two-shot: reduce-scatter and all-gather, 2
    (P-1)/P S, after one more barrier; from 2 MiB / P on if P > 2 (vLLM, SGLang). A call outside a graph takes at least
    the host time.

    Parameters
    ----------
    payload_bytes : array-like
        Size of the whole tensor [byte].
    links : GroupLinks
        Levels of the network that the group spans.
    parameters : CustomParameters
        Calibration of the links.

    Returns
    -------
    ndarray
        Seconds.
    """
    p, payload, ranks = parameters, np.asarray(payload_bytes, dtype=np.float64), links.ranks
    wire = bus_factor("all_reduce", ranks) * payload / links.levels[0].bandwidth
    start = p.launch + p.peer * ranks
    one_shot = start + wire * ranks / 2.0 / p.one_shot_fraction
    two_shot = start + p.two_shot + wire / p.two_shot_fraction
    kernel = np.where(np.logical_and(payload * ranks >= p.two_shot_threshold, ranks > 2), two_shot, one_shot)
    time = np.where(payload <= p.largest, kernel, _ring_beyond(payload, wire, links, p))
    return with_skew(np.where(ranks > 1, time, 0.0), p.host)


def _ring_beyond(payload: Array, wire: Array, links: GroupLinks, p: CustomParameters) -> Array:
    """Compute the time of NCCL's ring, or of in-switch reduction if that is faster."""
    copied = 0.5 * p.copy * payload / links.ranks / links.levels[0].bandwidth
    moved = wire / p.ring_fraction + copied
    time = p.ring_start + hidden(2.0 * (links.ranks - 1.0) * p.ring_step, moved) + fill_time(moved, p.fill)
    if not links.switch_reduces:
        return np.asarray(time)
    traffic = ALGORITHMS["in_switch"].traffic("all_reduce", payload, links.fan_outs)
    switch = links.wire_time(traffic) / p.switch_fraction
    by_switch = p.ring_start + links.ranks * p.ring_step + switch + fill_time(switch, p.fill)
    return np.where(links.ranks >= SWITCH_RANKS, np.minimum(time, by_switch), time)
