"""Seconds of any traffic that crosses nodes, as NCCL carries it out over NICs and the network between nodes.

What placement, hashing and neighbours leave of the network between nodes: closed forms over arrays.

Nodes hang on leaf switches, ``leaf`` of them each; a job's nodes are packed onto as few leaves as hold them, spread
evenly over ``k`` leaves, or drawn at random from the whole machine. A ring whose ranks are sorted by leaf, as NCCL
sorts
them, sends one flow a channel out of each leaf and is slowed down by none of this on an idle tree; an all-to-all asks a
leaf for the rates of all its members, and neighbours on the uplinks take their part from both.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from paleo.collectives.base import Array, Numeric, Traffic
from paleo.errors import SpecError
from paleo.pricing.links.group import GroupLinks, between_nodes
from paleo.pricing.links.transfer import NANOSECOND, fill_time, hidden, with_skew
from paleo.pricing.parameters import parameter
from paleo.specs.hardware import Level, System
from paleo.units import MEBIBYTE, MICROSECOND


@dataclass(frozen=True, slots=True)
class FabricParameters:
    """NCCL over the network between nodes; defaults are those of a healthy InfiniBand fabric."""

    launch: float = parameter(
        10 * MICROSECOND,
        low=1 * MICROSECOND,
        high=200 * MICROSECOND,
        unit="s",
        meaning="start and end of the kernel, without steps",
    )
    step: float = parameter(
        1 * MICROSECOND, low=0.1 * MICROSECOND, high=5 * MICROSECOND, unit="s", meaning="one hop inside a node"
    )
    fabric_step: float = parameter(
        4 * MICROSECOND,
        low=0.5 * MICROSECOND,
        high=500 * MICROSECOND,
        unit="s",
        meaning="one hop between nodes in LL, with little to send",
    )
    long_step: float = parameter(
        8 * MICROSECOND,
        low=0.5 * MICROSECOND,
        high=1000 * MICROSECOND,
        unit="s",
        meaning="one hop in Simple, with much to send",
    )
    ll_threshold: float = parameter(
        12000.0,
        low=500.0,
        high=MEBIBYTE,
        unit="byte",
        meaning="bytes of a step at which a hop lies between LL and Simple",
    )
    peer: float = parameter(
        4 * MICROSECOND,
        low=0.1 * MICROSECOND,
        high=200 * MICROSECOND,
        unit="s",
        meaning="one more peer of an exchange between nodes",
    )
    inner_fraction: float = parameter(0.75, low=0.05, high=1.0, unit="1", meaning="share of the link inside a node")
    fabric_fraction: float = parameter(0.97, low=0.05, high=1.0, unit="1", meaning="share of a NIC of rings and trees")
    exchange_fraction: float = parameter(0.9, low=0.05, high=1.0, unit="1", meaning="share of a NIC of an all_to_all")
    send_fraction: float = parameter(
        0.82, low=0.05, high=1.0, unit="1", meaning="share of a NIC of one rank that sends"
    )
    congestion: float = parameter(
        0.02,
        low=0.002,
        high=0.3,
        unit="1",
        meaning="an exchange's share of the NICs falls as nodes to this power",
    )
    rail_power: float = parameter(
        1.0, low=0.2, high=1.0, unit="1", meaning="node bandwidth grows with the NICs in use to this power"
    )
    fill: float = parameter(
        0.5, low=0.002, high=5.0, unit="1", meaning="cost of one more chunk in the pipeline of a tree, in hops"
    )
    skew: float = parameter(
        NANOSECOND,
        low=NANOSECOND,
        high=500 * MICROSECOND,
        unit="s",
        meaning="wait for the last rank to launch, where that is timed too",
    )


#: Over TCP sockets: 14 to 30 us one way (links.csv), 0.72 of the port (Paleo's 10 Gb/s case study).
SOCKETS = FabricParameters(
    launch=30 * MICROSECOND, fabric_step=30 * MICROSECOND, long_step=60 * MICROSECOND, peer=30 * MICROSECOND,
    fabric_fraction=0.72, exchange_fraction=0.72, send_fraction=0.72,
)  # fmt: skip
#: From so many ranks on rings leave LL, and exchanges get channels in turns: a hop in lockstep, and one more peer, take
#: that many times as long (Polaris, 512 to 2,160 ranks against 8 and 32).
CROWDED_RANKS, CROWDED_STEP, CROWDED_PEER = 129, 2.0, 3.0
#: Pieces of an exchange below so many bytes take as long a peer as in a crowd [byte].
SMALL_PIECE = 200.0
#: Share of what a NIC does for one direction when a rank sends to one neighbour and receives from another.
BOTH_WAYS = 0.6


#: Systems whose fabric was measured and stands for others of the same kind of link.
MEASURED = {"slingshot": "polaris"}


def measured_fabric(system: System) -> str | None:
    """The measured system whose fabric has the same kind of link."""
    outer = [level.link.kind for level in system.levels if between_nodes(system, level)]
    return MEASURED.get(outer[0]) if outer else None


def fabric_defaults(system: System) -> FabricParameters:
    """Parameters of a fabric that nobody measured: by its link, sockets or remote memory access.

    InfiniBand and the like: 0.97 of a NIC for rings and trees (CX7 in SimAI's calbusbw.h; 0.96 to 0.98 measured with 1
    to 4 ranks a node), step latencies between those of NCCL's tuner and 8 us a hop of an all_gather.
    """
    outer = [level.link for level in system.levels if between_nodes(system, level)]
    sockets = bool(outer) and outer[0].kind == "ethernet" and "roce" not in outer[0].name.lower()
    return SOCKETS if sockets else FabricParameters()


def fabric_time(
    *, operation: str, traffic: Traffic, links: GroupLinks, parameters: FabricParameters, lockstep: bool
) -> Array:
    """Seconds of rings or trees that cross nodes: launch + hidden(hops, wire).

    A hop lasts ``fabric_step`` with little and ``long_step`` with much to send, as LL gives way to Simple at
    ``ll_threshold`` bytes a step. In LL the hops of a path add up, cheap inside nodes; in Simple a ``lockstep``
    algorithm waits for the slowest hop in each step, and a tree fills its pipeline. The slower of the node's inside and
    its NICs sets the bandwidth.

    Holds for 2 to 2,160 ranks.
    """
    p, hops_in, hops_out = parameters, *_hops(traffic, links)
    hops = np.maximum(hops_in + hops_out, 1.0)
    wire = _wire_time(traffic, links, p, p.fabric_fraction)
    short = p.step * hops_in + p.fabric_step * hops_out
    if lockstep:
        short = np.where(links.ranks >= CROWDED_RANKS, CROWDED_STEP * p.fabric_step * hops, short)
    long = p.long_step * hops if lockstep else p.step * hops_in + p.long_step * hops_out
    sent = np.asarray(traffic.levels[-1].wire_bytes)
    share = _of_much(sent / hops, p.ll_threshold, 2.0) if lockstep else _of_much(sent / 2.0, p.ll_threshold, 1.0)
    seconds = p.launch + hidden(short + (long - short) * share, wire)
    if not lockstep:
        seconds = seconds + fill_time(wire, p.fill * long) * share
    return with_skew(seconds, p.skew)


def fabric_exchange_time(
    *, operation: str, traffic: Traffic, links: GroupLinks, parameters: FabricParameters, shift: bool = False
) -> Array:
    """Seconds of an all_to_all or a send that crosses nodes: launch + hidden(peers, wire), one peer after the other.

    ``shift``: each rank sends to one neighbour and receives from another (nccl-tests' send_recv), not from the same.
    """
    p, peers = parameters, sum(_hops(traffic, links))
    if operation == "send_recv":
        share = p.send_fraction * np.where(shift & (links.nodes > 2), BOTH_WAYS, 1.0)
        return np.asarray(p.launch + hidden(p.peer, _wire_time(traffic, links, p, share)))
    share = p.exchange_fraction * links.nodes**-p.congestion
    piece = traffic.levels[0].wire_bytes / np.maximum(links.ranks - 1.0, 1.0)
    crowded = (links.ranks >= CROWDED_RANKS) | (piece < SMALL_PIECE)
    peer = p.peer * np.where(crowded, CROWDED_PEER, 1.0)
    return with_skew(p.launch + hidden(peer * peers, _wire_time(traffic, links, p, share)), p.skew)


def _hops(traffic: Traffic, links: GroupLinks) -> tuple[Array, Array]:
    """Steps inside and between nodes."""
    steps = [np.asarray(level.steps) for level in traffic.levels]
    return sum(steps[: links.inner_levels], np.zeros(())), sum(steps[links.inner_levels :], np.zeros(()))


def _of_much(step_bytes: Array, threshold: float, sharpness: float) -> Array:
    """0 for steps of few bytes, towards 1 for steps of many: at once where all ranks change together, hop by hop in a
    tree, through which all of the payload goes up and comes down."""
    ratio = (step_bytes / threshold) ** sharpness
    return np.asarray(ratio / (1.0 + ratio))


def _wire_time(traffic: Traffic, links: GroupLinks, p: FabricParameters, share: Numeric) -> Array:
    """Seconds on the slower of the links inside a node and of the NICs, phase after phase."""
    seconds, inner = np.zeros(()), links.inner_levels
    for phase in traffic.phases:
        single = Traffic((phase,))
        inside = links.wire_time(single, slice(0, inner)) / p.inner_fraction
        outside = links.wire_time(single, slice(inner, None)) * np.asarray(links.ports[-1]) ** (1.0 - p.rail_power)
        seconds = seconds + np.maximum(inside, outside / share)
    return np.asarray(seconds)


#: Nodes below a leaf switch, and nodes of the machine, where the system states neither (a 64-port switch, half of
#: it down).
USUAL_LEAF, USUAL_NODES = 32, 32 * 32
#: Share of a link that adaptive routing or packet spraying leaves of it.
ADAPTIVE_SHARE = 0.96
#: Flows between each pair of nodes: channels of NCCL times their queue pairs.
FLOWS_PER_PORT = 16


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Where the nodes of a job lie: ``kind`` packed, random or spread (over ``leaves`` leaf switches), and the share
    of the
    uplinks that others keep busy."""

    kind: str = "packed"
    leaves: int = 0
    background: float = 0.0

    @property
    def usual(self) -> bool:
        """Whether the job has the fewest leaves and the network to itself."""
        return self.kind == "packed" and self.background == 0.0


def node_placement(text: str, background: float = 0.0) -> NodePlacement:
    """``packed``, ``random`` or ``spread:8``, beside others who keep a share of the uplinks busy.

    >>> node_placement("spread:8").leaves
    8
    """
    if not 0.0 <= background < 1.0:
        raise SpecError(f"background: {background} must be 0 or more and below 1, the uplinks' share that others use")
    spread = re.fullmatch(r"spread:([1-9]\d*)", text)
    if spread:
        return NodePlacement("spread", int(spread[1]), background)
    if text not in ("packed", "random"):
        raise SpecError(f"nodes: {text!r}: expected packed, random or spread:K, such as spread:8")
    return NodePlacement(text, 0, background)


def leaves_touched(nodes: Numeric, machine: Numeric, leaf: int) -> Array:
    """Leaves that hold at least one of ``nodes`` drawn at random from ``machine``: (T/q)(1 - C(T-q, n)/C(T, n)).

    >>> round(float(leaves_touched(8, 1024, 16)), 1)
    7.6
    """
    drawn, total = np.asarray(nodes, dtype=np.float64), np.asarray(machine, dtype=np.float64)
    empty = np.ones(np.broadcast_shapes(drawn.shape, total.shape))
    for position in range(leaf):
        empty = empty * np.clip(total - drawn - position, 0.0, None) / (total - position)
    return np.asarray(total / leaf * (1.0 - empty))


def ring_crossings(nodes: Numeric, machine: Numeric, leaf: int) -> Array:
    """Hops of a ring in rank order that leave a leaf, of nodes drawn at random: n (1 - (q-1)/(T-1))."""
    return np.asarray(np.asarray(nodes) * (1.0 - (leaf - 1.0) / (np.asarray(machine) - 1.0)))


def expected_maximum(count: Numeric) -> Array:
    """Largest of ``count`` standard normal numbers in the mean (Blom 1958): Phi^-1((n - 0.375)/(n + 0.25))."""
    inverse = NormalDist().inv_cdf
    counts = np.maximum(np.asarray(count, dtype=np.float64), 1.0)
    largest = np.vectorize(lambda n: max(0.0, inverse((n - 0.375) / (n + 0.25))), otypes=[np.float64])
    return np.asarray(largest(counts))


def ecmp_share(flows: Numeric, links: Numeric) -> Array:
    """Share of its fair rate that the slowest of ``flows`` equal flows gets, hashed onto ``links`` equal links.

    With r flows a link in the mean the fullest link holds r + e_m sqrt(r (1-1/m)) + e_m^2/6 of them. Holds from r = 4
    on (at
    r = 1 it is 10 % too low).

    >>> [round(float(ecmp_share(32 * r, 32)), 2) for r in (4, 16, 64, 256)]
    [0.46, 0.64, 0.79, 0.89]
    """
    m = np.asarray(links, dtype=np.float64)
    ratio = np.asarray(flows) / m
    largest = expected_maximum(m)
    return np.asarray(1.0 / (1.0 + largest * np.sqrt((1.0 - 1.0 / m) / ratio) + largest**2 / (6.0 * ratio)))


def exchange_share(nodes: Numeric, members: Numeric, leaf: int, oversubscription: float) -> Array:
    """Share of its port that a node keeps in an all-to-all of ``nodes``, ``members`` of them on the fullest leaf: the
    leaf is
    asked for m (n-m)/n node rates (n-1 of n peers of a node lie elsewhere), and has q/o."""
    n, m = np.asarray(nodes, dtype=np.float64), np.asarray(members, dtype=np.float64)
    asked = m * (n - m) / np.maximum(n - 1.0, 1.0)
    return np.asarray(np.minimum(1.0, leaf / oversubscription / np.maximum(asked, 1e-30)))


def unsorted_ring_share(
    nodes: Numeric, machine: Numeric, leaf: int, members: Numeric, oversubscription: float
) -> Array:
    """Share of its port that a node keeps in a ring in rank order of nodes drawn at random, ``members`` of them on the
    fullest leaf: that leaf sends a flow for each hop that leaves it, m (1 - (q-1)/(T-1)) of them, and has q/o.

    >>> float(unsorted_ring_share(32, 1024, 32, 16.0, 4.0).round(2))
    0.52
    """
    leaving = np.asarray(members) * ring_crossings(nodes, machine, leaf) / np.asarray(nodes)
    return np.asarray(np.minimum(1.0, leaf / oversubscription / np.maximum(leaving, 1e-30)))


def shared_slowdown(share: Numeric, other: Numeric) -> Array:
    """How much longer the steps of a job get that is on the wire for ``share`` of a step, beside one that is for
    ``other``,
    their phases unrelated: 1 + their product; no less than what both ask for together. Holds to shares of 0.5."""
    return np.asarray(np.maximum(1.0 + np.asarray(share) * other, np.asarray(share) + other))


@dataclass(frozen=True, slots=True)
class NetworkShare:
    """A placement on a system: leaves of the job, hops of an unsorted ring that leave one, and the share of the
    nodes' ports that sorted rings, exchanges and rings in rank order keep."""

    leaves: float
    crossings: float
    ring_share: float
    exchange_share: float
    unsorted_share: float = 1.0

    def share(self, operation: str) -> float:
        """Of an operation."""
        return self.exchange_share if operation == "all_to_all" else self.ring_share


def placed(system: System, nodes: int, placement: NodePlacement) -> NetworkShare:
    """What ``nodes`` of a system keep of their ports between nodes."""
    outer = [level for level in system.levels if between_nodes(system, level)]
    if not outer or nodes < 2:
        return NetworkShare(1.0, 0.0, 1.0, 1.0)
    level, machine = outer[0], max(system.max_nodes or USUAL_NODES, nodes)
    leaf = min(level.leaf or USUAL_LEAF, machine)
    leaves, members = _spread(nodes, machine, leaf, placement)
    crossings = float(ring_crossings(nodes, machine, leaf)) if placement.kind == "random" else leaves * (leaves > 1)
    above = _above_a_leaf(level, leaf, placement.background) if leaves > 1 else 1.0
    exchange = above * float(exchange_share(nodes, members, leaf, level.oversubscription)) if leaves > 1 else 1.0
    ring = above if level.oversubscription <= leaf else above * leaf / level.oversubscription
    unsorted = ring
    if placement.kind == "random":
        unsorted = above * float(unsorted_ring_share(nodes, machine, leaf, members, level.oversubscription))
    return NetworkShare(leaves, crossings, ring, exchange, unsorted)


def _spread(nodes: int, machine: int, leaf: int, placement: NodePlacement) -> tuple[float, float]:
    """Leaves of the job, and its nodes on the fullest of them."""
    if placement.kind == "packed":
        return float(-(-nodes // leaf)), float(min(nodes, leaf))
    if placement.kind == "spread":
        switches = min(placement.leaves, nodes, -(-machine // leaf))
        return float(switches), float(min(leaf, -(-nodes // switches)))
    leaves, mean = float(leaves_touched(nodes, machine, leaf)), nodes * leaf / machine
    variance = mean * (1 - leaf / machine) * (machine - nodes) / max(machine - 1, 1)
    fullest = mean + float(expected_maximum(machine / leaf)) * math.sqrt(variance)
    return leaves, min(float(leaf), float(nodes), max(nodes / leaves, fullest))


def _above_a_leaf(level: Level, leaf: int, background: float) -> float:
    """Share of a link above a leaf: of hashed flows, by routing, beside others."""
    hashed = 1.0
    if level.routing == "ecmp":
        hashed = float(ecmp_share(FLOWS_PER_PORT * leaf, leaf))
    elif level.routing == "adaptive":
        hashed = ADAPTIVE_SHARE
    return hashed * (1.0 - background)
