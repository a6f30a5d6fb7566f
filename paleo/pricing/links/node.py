"""Seconds of any traffic inside one node, as NCCL carries it out over NVLink, NVSwitch or a PCIe tree.

The counts (steps, bytes per level) come from `paleo.collectives`; here they meet launch cost, the latency of a step
and the share of a link that each protocol reaches. Rings, trees and the like are priced by `NcclParameters`, exchanges
in pairs by `ExchangeParameters`, each fitted per system.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paleo.collectives.traffic import Array, Numeric, Traffic
from paleo.pricing.links.group import Flags, GroupLinks
from paleo.pricing.links.protocol import LL, LL128, SIMPLE, protocol
from paleo.pricing.links.transfer import NANOSECOND, fill_time, hidden, softly_least, with_skew
from paleo.pricing.parameters import parameter
from paleo.units import MICROSECOND


@dataclass(frozen=True, slots=True)
class NcclParameters:
    """NCCL among the devices of one node; defaults are those of eight A100 behind NVSwitch."""

    launch: float = parameter(
        8 * MICROSECOND,
        low=1 * MICROSECOND,
        high=100 * MICROSECOND,
        unit="s",
        meaning="start and end of the kernel on every rank, without steps",
    )
    step: float = parameter(
        0.9 * MICROSECOND, low=0.1 * MICROSECOND, high=50 * MICROSECOND, unit="s", meaning="one hop of a ring in LL"
    )
    spread: float = parameter(
        0.3, low=0.02, high=2.0, unit="1", meaning="latency added, relatively, once all channels have work"
    )
    ll_fraction: float = parameter(0.27, low=0.02, high=0.6, unit="1", meaning="share of the link that LL reaches")
    ll128_fraction: float = parameter(
        0.42, low=0.05, high=1.0, unit="1", meaning="share of the link that LL128 reaches"
    )
    simple_start: float = parameter(
        9 * MICROSECOND,
        low=0.1 * MICROSECOND,
        high=200 * MICROSECOND,
        unit="s",
        meaning="what Simple adds to the launch",
    )
    simple_step: float = parameter(
        4 * MICROSECOND,
        low=0.1 * MICROSECOND,
        high=100 * MICROSECOND,
        unit="s",
        meaning="what Simple's fences add to a hop",
    )
    simple_fraction: float = parameter(0.78, low=0.05, high=1.0, unit="1", meaning="share of the link of Simple")
    fill: float = parameter(
        1.5 * MICROSECOND,
        low=NANOSECOND,
        high=1000 * MICROSECOND,
        unit="s",
        meaning="cost of one more chunk in the pipeline",
    )
    copy: float = parameter(
        0.38, low=0.02, high=3.0, unit="1", meaning="copy of a rank's own share, in link times (half for all_reduce)"
    )
    switch_fraction: float = parameter(0.63, low=0.2, high=1.0, unit="1", meaning="share of the link with NVLink SHARP")
    staging_power: float = parameter(
        0.5,
        low=0.05,
        high=2.5,
        unit="1",
        meaning="without peer-to-peer, link share falls as (ranks / 2) to this power",
        fitted=False,
    )
    skew: float = parameter(
        NANOSECOND,
        low=NANOSECOND,
        high=200 * MICROSECOND,
        unit="s",
        meaning="wait for the last rank to launch, where that is timed too",
    )


#: Operations in which ranks meet in pairs.
EXCHANGES = ("all_to_all", "send_recv")
#: Payload per rank at which NCCL has given work to every channel [byte].
_SPREAD_BYTES = 4096.0
#: Fewest ranks for which NCCL uses the switch's arithmetic inside one node.
SWITCH_RANKS = 5
#: LL sends a flag with every word of data, and so never fills more than half of a link.
LL_LARGEST = 0.5


def node_time(
    *,
    operation: str,
    payload_bytes: Numeric,
    traffic: Traffic,
    links: GroupLinks,
    parameters: NcclParameters,
    low_latency: bool | Flags = True,
) -> Array:
    """Seconds of a traffic of rings or trees inside one node.

    launch + hidden(steps, wire) with the protocol's step and share of the link; Simple adds its start, the copy of a
    rank's own share and the filling of the pipeline. ``low_latency`` says whether the library has LL (NCCL 2.1 and
    later).

    Holds for 2..72 ranks in one NVLink domain or PCIe tree, 512 B and up.
    """
    p = parameters
    steps, wire = np.asarray(traffic.steps), links.wire_time(traffic) * _staging(links, p.staging_power)
    chosen = np.where(low_latency, protocol(steps=steps, wire_time=wire, links=links), SIMPLE)
    full = 1.0 + p.spread
    busy = 1.0 + p.spread * _all_channels(payload_bytes, links)
    low = p.launch * busy + hidden(steps * p.step * busy, wire / p.ll_fraction)
    middle = p.launch * full + hidden(steps * p.step * full, wire / p.ll128_fraction)
    moved = wire / p.simple_fraction + _copy_time(operation, payload_bytes, links, p.copy)
    simple = p.launch * full + p.simple_start + hidden(steps * (p.step * full + p.simple_step), moved)
    simple = simple + fill_time(moved, p.fill)
    return _of_several(np.where(chosen == LL, low, np.where(chosen == LL128, middle, simple)), links, p.skew)


def switch_time(*, traffic: Traffic, links: GroupLinks, parameters: NcclParameters) -> Array:
    """Seconds of a traffic that the switches of one node add and multicast (NVLink SHARP)."""
    p = parameters
    moved = links.wire_time(traffic) / p.switch_fraction
    start = p.launch * (1.0 + p.spread) + p.simple_start + traffic.steps * p.simple_step + links.ranks * p.step
    return _of_several(start + moved + fill_time(moved, p.fill), links, p.skew)


def _of_several(seconds: Array, links: GroupLinks, skew: float) -> Array:
    several = links.ranks > 1
    return with_skew(np.where(several, seconds, 0.0), np.where(several, skew, 0.0))


def _all_channels(payload: Numeric, links: GroupLinks) -> Array:
    """0 for payloads that one channel carries, towards 1 when all of them have work."""
    square = (np.asarray(payload) / (_SPREAD_BYTES * links.ranks)) ** 2
    return np.asarray(square / (1.0 + square))


def _copy_time(operation: str, payload: Numeric, links: GroupLinks, copy: float) -> Array:
    """A rank's own share goes from its input to its output buffer; an all_reduce does half of that in passing."""
    half = 0.5 if operation == "all_reduce" else 1.0
    return np.asarray(half * copy * np.asarray(payload) / links.ranks / links.rank_bandwidth)


def _staging(links: GroupLinks, power: float) -> Array:
    """Without peer-to-peer every hop passes host memory twice, where the paths of all ranks meet."""
    return np.where(links.staged, (links.ranks / 2.0) ** power, 1.0)


@dataclass(frozen=True, slots=True)
class ExchangeParameters:
    """all_to_all and send_recv of NCCL among the devices of one node; defaults are those of eight A100."""

    launch: float = parameter(
        10 * MICROSECOND, low=1 * MICROSECOND, high=100 * MICROSECOND, unit="s", meaning="start and end of the kernel"
    )
    peer: float = parameter(
        0.4 * MICROSECOND, low=0.01 * MICROSECOND, high=50 * MICROSECOND, unit="s", meaning="one more peer"
    )
    low_fraction: float = parameter(
        0.014, low=0.002, high=0.3, unit="1", meaning="share of the link that LL reaches, per peer"
    )
    start: float = parameter(
        6 * MICROSECOND, low=0.1 * MICROSECOND, high=200 * MICROSECOND, unit="s", meaning="latency of Simple's fences"
    )
    fraction: float = parameter(0.8, low=0.05, high=1.0, unit="1", meaning="share of the link of Simple")
    fill: float = parameter(
        1.5 * MICROSECOND, low=NANOSECOND, high=1000 * MICROSECOND, unit="s", meaning="cost of one more chunk"
    )
    copy: float = parameter(
        0.38, low=0.02, high=3.0, unit="1", meaning="copy of a rank's own share of an all_to_all, in link times"
    )
    staging_power: float = parameter(
        0.5,
        low=0.05,
        high=2.5,
        unit="1",
        meaning="without peer-to-peer, link share falls as (ranks / 2) to this power",
        fitted=False,
    )


def exchange_time(
    *, operation: str, payload_bytes: Numeric, traffic: Traffic, links: GroupLinks, parameters: ExchangeParameters
) -> Array:
    """Seconds of a traffic of an all_to_all or send_recv inside one node.

    A rank sends to all its peers at once, each by a channel of its own: in LL while that is faster, else in Simple,
    whose fences hide behind the transfer. Nobody waits for the last rank of a group, as only pairs meet.
    """
    p = parameters
    peers = np.maximum(np.asarray(traffic.steps), 1.0)
    wire = links.wire_time(traffic) * _staging(links, p.staging_power)
    moved = wire / p.fraction
    if operation == "all_to_all":
        moved = moved + _copy_time(operation, payload_bytes, links, p.copy)
    low = wire / np.minimum(p.low_fraction * peers, LL_LARGEST)
    simple = hidden(p.start, moved) + fill_time(moved, p.fill)
    seconds = p.launch + p.peer * peers + np.maximum(softly_least(low, simple), wire)
    return np.where(links.ranks > 1, seconds, 0.0)
