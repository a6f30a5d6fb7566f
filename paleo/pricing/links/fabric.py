"""Time of NCCL's collectives between nodes, and the algorithm that NCCL's tuner chooses there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paleo.collectives.base import Array, Numeric, Traffic
from paleo.pricing.links.alpha_beta import partly_overlapped_time, pipeline_fill_time, with_launch_skew
from paleo.pricing.links.group import (
    SIMPLE,
    TUNER_BASE_LATENCY,
    TUNER_BUS_BANDWIDTH_SHARE,
    TUNER_NVLINK_STEP_LATENCY,
    TUNER_PCIE_STEP_LATENCY,
    BoolArray,
    GroupLinks,
)
from paleo.specs.calibration import parameter
from paleo.units import MICROSECOND

if TYPE_CHECKING:
    from paleo.specs.system import System


@dataclass(frozen=True, slots=True)
class FabricParameters:
    """Calibrated parameters of NCCL across nodes; the defaults are those of a healthy InfiniBand fabric."""

    launch_time: float = parameter("10 us", "1..200 us", "start and end of the kernel, without steps")
    intra_node_hop_time: float = parameter("1 us", "0.1..5 us", "one hop inside a node")
    ll_fabric_hop_time: float = parameter("4 us", "0.5..500 us", "one hop between nodes in LL, with little to send")
    simple_hop_time: float = parameter("8 us", "0.5..1000 us", "one hop in Simple, with much to send")
    ll_threshold: float = parameter("12 kB", "500 B..1 MiB", "step size at which a hop lies between LL and Simple")
    time_per_peer: float = parameter("4 us", "0.1..200 us", "one more peer of an exchange between nodes")
    inner_fraction: float = parameter("0.75", "0.05..1", "share of the link inside a node")
    fabric_fraction: float = parameter("0.97", "0.05..1", "share of a NIC of rings and trees")
    exchange_fraction: float = parameter("0.9", "0.05..1", "share of a NIC of an all_to_all")
    send_fraction: float = parameter("0.82", "0.05..1", "share of a NIC of one rank that sends")
    exchange_share_exponent: float = parameter("0.02", "0.002..0.3", "an exchange's share of NICs falls as nodes^this")
    nic_bandwidth_exponent: float = parameter("1", "0.2..1", "node bandwidth grows with the NICs in use to this power")
    hops_per_chunk: float = parameter("0.5", "0.002..5", "cost of one more chunk in the pipeline of a tree, in hops")
    launch_skew_time: float = parameter("1 ns", "1 ns..500 us", "wait for the last rank to launch, if timed too")
    crowded_piece_bytes: float = parameter(
        "1 B", "1 B..1 kB", "largest piece whose peer costs as in a crowd", fitted=False
    )


#: Parameters of TCP sockets: 14 to 30 us one way (links.csv), 0.72 of the port (Paleo's 10 Gb/s case study).
_SOCKETS = FabricParameters(
    launch_time=30 * MICROSECOND, ll_fabric_hop_time=30 * MICROSECOND, simple_hop_time=60 * MICROSECOND,
    time_per_peer=30 * MICROSECOND,
    fabric_fraction=0.72, exchange_fraction=0.72, send_fraction=0.72,
)  # fmt: skip
#: One-way latency of the links that is included in the default hops: of InfiniBand NDR and of TCP
#: (hardware_specs/links).
_INFINIBAND_LATENCY, _TCP_LATENCY = 1.2 * MICROSECOND, 14 * MICROSECOND
#: Number of ranks from which rings no longer use LL and exchanges share channels, and the factors on the time of a hop
#: in lockstep and of one more peer (Polaris, 512 to 2,160 ranks compared with 8 and 32).
_MIN_CROWDED_RANKS, _CROWDED_HOP_FACTOR, _CROWDED_PEER_FACTOR = 129, 2.0, 3.0
#: Size of pieces of an exchange over Slingshot below which a peer takes as long as in a crowd [byte]. Polaris' rows of
#: 128 bytes a piece take three times as long as those of 256, which are no longer sent inside the NIC's commands
#: (fi_cxi(7), inject size: by name only, not read). ThetaGPU's rows over InfiniBand take equal times from 4 to 512
#: bytes.
NIC_INJECT_SIZE = 200.0
#: Share of a NIC's one-way rate if a rank sends to one neighbour and receives from another.
_BOTH_WAYS = 0.6


#: Kind of link -> system whose measured fabric is used for other systems with that kind of link.
_MEASURED_FABRICS = {"slingshot": "polaris"}


#: The same for exchanges only. Libraries use EFA as they use Slingshot, by libfabric's messages (aws-ofi-nccl): between
#: different rails of two nodes UCCL measures 0.31 to 0.40 of the NICs, which Slingshot's parameters predict as 0.34 to
#: 0.43.
_MEASURED_EXCHANGE = {"efa": "polaris"}
#: Parameters of a fabric on which an exchange of many ranks depends.
_EXCHANGE_PARAMETERS = ("time_per_peer", "exchange_fraction", "exchange_share_exponent")


def measured_fabric_system(system: System) -> str | None:
    """Return the measured system whose NCCL parameters between nodes hold for a system with the same kind of link.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    str, optional
        Name of the system; None if there is none.
    """
    return _measured(system, _MEASURED_FABRICS)


def measured_exchange_system(system: System) -> str | None:
    """Return the measured system whose all-to-all parameters hold for a system's links between nodes.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    str, optional
        Name of the system; None if there is none.
    """
    return _measured(system, _MEASURED_EXCHANGE)


def _measured(system: System, by_kind: Mapping[str, str]) -> str | None:
    outer = [level.link.kind for level in system.levels if system.is_inter_node_level(level)]
    return by_kind.get(outer[0]) if outer else None


def with_exchange_parameters(parameters: FabricParameters, other: FabricParameters) -> FabricParameters:
    """Replace the all-to-all parameters of a fabric (`_EXCHANGE_PARAMETERS`) by those of another fabric.

    Parameters
    ----------
    parameters : FabricParameters
        Parameters of rings and trees.
    other : FabricParameters
        Parameters of exchanges.

    Returns
    -------
    FabricParameters
        Copy of ``parameters`` with those of exchanges from ``other``.
    """
    return replace(parameters, **{name: getattr(other, name) for name in _EXCHANGE_PARAMETERS})


def default_fabric_parameters(system: System) -> FabricParameters:
    """Return the NCCL parameters of an unmeasured fabric by its kind of link: sockets (TCP) or RDMA.

    InfiniBand and similar links: 0.97 of a NIC for rings and trees (CX7 in SimAI's calbusbw.h; 0.96 to 0.98 measured
    with 1 to 4 ranks a node), step latencies between those of NCCL's tuner and 8 us per hop of an all_gather.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    FabricParameters
        Parameters of sockets (TCP) or of remote memory access (InfiniBand, RoCE).
    """
    return _SOCKETS if _by_sockets(system) else FabricParameters()


def _by_sockets(system: System) -> bool:
    outer = [level.link for level in system.levels if system.is_inter_node_level(level)]
    return bool(outer) and outer[0].kind == "ethernet" and "roce" not in outer[0].name.lower()


def links_with_default_latency(links: GroupLinks, system: System) -> GroupLinks:
    """Limit the link latency that the hop times of `default_fabric_parameters` are taken to include.

    The default hops include no more latency than InfiniBand's or TCP's. Predictions add the latency of a link beyond
    that.

    Parameters
    ----------
    links : GroupLinks
        Levels of the network that the group spans.
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    GroupLinks
        Links with a limited ``latency_in_calibrated_hops`` between nodes.
    """
    least, levels = _TCP_LATENCY if _by_sockets(system) else _INFINIBAND_LATENCY, list(links.levels)
    for index in range(links.intra_node_level_count, len(levels)):
        stated = levels[index].latency_in_calibrated_hops
        included = least if stated is None else min(stated, least)
        levels[index] = replace(levels[index], latency_in_calibrated_hops=included)
    return replace(links, levels=tuple(levels))


def inter_node_collective_time(
    traffic: Traffic, links: GroupLinks, parameters: FabricParameters, *, lockstep: bool, imbalance: Numeric
) -> Array:
    """Compute the time of rings or trees that cross nodes: launch + sqrt(hops² + wire²).

    A hop takes ``ll_fabric_hop_time`` for small and ``simple_hop_time`` for large messages, as LL gives way to Simple
    at ``ll_threshold`` bytes a step. In LL the hops of a path add up, with cheap ones inside nodes. In Simple a
    ``lockstep`` algorithm waits for the slowest hop in each step, and a tree fills its pipeline. Latency of links
    beyond that of the measured hops is added once per hop of a message's path. The slower of the node's links and its
    NICs determines the bandwidth, for the busiest node, which sends ``imbalance`` times the mean.

    Valid for 2 to 2,160 ranks.

    Parameters
    ----------
    traffic : Traffic
        Steps and bytes of an algorithm, level by level.
    links : GroupLinks
        Levels of the network that the group spans.
    parameters : FabricParameters
        Calibrated parameters of the collective library on these links.
    lockstep : bool
        True for an algorithm that waits for the slowest hop in each step.
    imbalance : array-like
        Ratio of the bytes of the busiest node to the mean.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, hops_in, hops_out = parameters, *_hops(traffic, links)
    later_in = links.hop_time(p.intra_node_hop_time) - p.intra_node_hop_time
    later_out = links.hop_time(p.ll_fabric_hop_time, outside=True) - p.ll_fabric_hop_time
    later = later_in * hops_in + later_out * hops_out
    hops = np.maximum(hops_in + hops_out, 1.0)
    wire = _wire_time(traffic, links, p, p.fabric_fraction / np.asarray(imbalance))
    short = p.intra_node_hop_time * hops_in + p.ll_fabric_hop_time * hops_out
    sent = np.asarray(traffic.levels[-1].wire_bytes)
    if lockstep:
        short = np.where(links.ranks >= _MIN_CROWDED_RANKS, _CROWDED_HOP_FACTOR * p.ll_fabric_hop_time * hops, short)
        long, share = p.simple_hop_time * hops, _share_of_simple(sent / hops, p.ll_threshold, 2.0)
    else:
        long = p.intra_node_hop_time * hops_in + p.simple_hop_time * hops_out
        share = _share_of_simple(sent / 2.0, p.ll_threshold, 1.0)
    short, long = short + later, later + long
    seconds = p.launch_time + partly_overlapped_time(short + (long - short) * share, wire)
    if not lockstep:
        seconds = seconds + pipeline_fill_time(wire, p.hops_per_chunk * long) * share
    return with_launch_skew(seconds, p.launch_skew_time)


def inter_node_exchange_time(
    operation: str, traffic: Traffic, links: GroupLinks, parameters: FabricParameters, *, shift: bool
) -> Array:
    """Compute the time of an all_to_all or send that crosses nodes: launch + sqrt(peers² + wire²).

    Peers are served one after another. An exchange of two ranks is a send in each direction.

    Parameters
    ----------
    operation : str
        Collective operation, such as ``all_reduce``.
    traffic : Traffic
        Steps and bytes of an algorithm, level by level.
    links : GroupLinks
        Levels of the network that the group spans.
    parameters : FabricParameters
        Calibrated parameters of the collective library on these links.
    shift : bool
        True if each rank sends to one neighbour and receives from another (nccl-tests' send_recv), False if both are
        the same neighbour.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, peers = parameters, sum(_hops(traffic, links))
    if operation == "send_recv":
        share = p.send_fraction * np.where(shift & (links.nodes > 2), _BOTH_WAYS, 1.0)
        hop, wire = links.hop_time(p.time_per_peer, outside=True), _wire_time(traffic, links, p, share)
        return np.asarray(p.launch_time + partly_overlapped_time(hop, wire))
    share = np.where(links.ranks > 2, p.exchange_fraction * links.nodes**-p.exchange_share_exponent, p.send_fraction)
    piece = np.maximum(traffic.levels[0].wire_bytes / np.maximum(links.ranks - 1.0, 1.0), 1.0)
    crowded = (links.ranks >= _MIN_CROWDED_RANKS) | (piece < p.crowded_piece_bytes)
    peer = p.time_per_peer * np.where(crowded, _CROWDED_PEER_FACTOR, 1.0)
    joined = partly_overlapped_time(peer * peers, _wire_time(traffic, links, p, share))
    return with_launch_skew(links.hop_time(p.launch_time, outside=True) + joined, p.launch_skew_time)


def _hops(traffic: Traffic, links: GroupLinks) -> tuple[Array, Array]:
    """Count the message steps of an algorithm inside nodes and between nodes."""
    steps, inner = [np.asarray(level.steps) for level in traffic.levels], links.intra_node_level_count
    return sum(steps[:inner], np.zeros(())), sum(steps[inner:], np.zeros(()))


def _share_of_simple(step_bytes: Array, threshold: float, sharpness: float) -> Array:
    """Compute the weight of protocol Simple in the time of a hop: 0 (LL) for small steps, 1 for large ones.

    The change is sharp if all ranks change together, and gradual in a tree, in which hops change one by one.
    """
    ratio = (step_bytes / threshold) ** sharpness
    return np.asarray(ratio / (1.0 + ratio))


def _wire_time(traffic: Traffic, links: GroupLinks, p: FabricParameters, share: Numeric) -> Array:
    """Compute the transfer time on the slower of intra-node links and NICs, summed over phases [s].

    Groups that share one NIC do not gain by ``nic_bandwidth_exponent``, which applies to NICs used together.
    """
    seconds, inner = np.zeros(()), links.intra_node_level_count
    for phase in traffic.phases:
        single = Traffic((phase,))
        inside = links.datasheet_wire_time(single, slice(0, inner)) / p.inner_fraction
        rails = np.maximum(np.asarray(links.levels[-1].ports), 1.0)
        outside = links.datasheet_wire_time(single, slice(inner, None)) * rails ** (1.0 - p.nic_bandwidth_exponent)
        seconds = seconds + np.maximum(inside, outside / share)
    return np.asarray(seconds)


# the algorithm of an all_reduce, by NCCL's tuner

#: Latency of Simple in the tuner's cost model: of the start, and the factor on a ring's latency once all channels are
#: full; below, of a hop between nodes, and of a hop over NVLink or PCIe in a tree.
_TUNER_START, _TUNER_PLATEAU = TUNER_BASE_LATENCY[SIMPLE], 1.4
_TUNER_NET_HOP, _TUNER_TREE_HOP = 14.0 * MICROSECOND, 4.0 * MICROSECOND
#: Share of a ring's bus bandwidth that the tuner assumes for trees.
_TUNER_TREE = 0.92
#: In-switch reduction between nodes in the tuner's cost model: latency inside a node and of a hop between nodes, and
#: the rate of the payload relative to that of the links; below, the efficiency of NVLink by generation
#: (nvlsEfficiency).
_TUNER_SWITCH_START, _TUNER_SWITCH_HOP, _TUNER_SWITCH = 25.0 * MICROSECOND, 20.9 * MICROSECOND, 5.0 / 6.0
_TUNER_SWITCH_EFFICIENCY = {"Hopper": 0.85, "Blackwell": 0.74, "Blackwell Ultra": 0.74}


def tuner_prefers_tree(payload_bytes: Numeric, links: GroupLinks) -> BoolArray:
    """Return True if NCCL's tuner expects a tree over nodes to be faster than a ring, both in Simple.

    The tuner assumes half of the bus bandwidth for a tree, whatever the bytes between nodes (S (1 of N nodes), compared
    with 2 S (P-1)/P of a ring). So rings are used for large payloads; the limit grows with the number of nodes.

    Parameters
    ----------
    payload_bytes : array-like
        Size of the whole tensor [byte].
    links : GroupLinks
        Levels of the network that the group spans.

    Returns
    -------
    ndarray of bool
        The shape of `payload_bytes`.

    References
    ----------
    NVIDIA/nccl src/graph/tuning.cc (baseLat, hwLat, ncclTopoGetAlgoTime), NCCL 2.12 to 2.29.

    Examples
    --------
    >>> from paleo.pricing.links.group import GroupLinks, LinkLevel
    >>> two_nodes = GroupLinks((LinkLevel(4.0, 300e9), LinkLevel(2.0, 25e9, ports=2.0)), inter_node_level_count=1)
    >>> tuner_prefers_tree(np.array([1e6, 1e8]), two_nodes).tolist()
    [True, False]
    """
    nodes, bus = links.nodes, np.minimum(*_expected_rates(links))
    hops = (links.ranks / nodes - 1.0) * _TUNER_TREE_HOP + np.log2(np.maximum(nodes, 1.0)) * _TUNER_NET_HOP
    tree = _TUNER_START + 2.0 * hops + 2.0 * np.asarray(payload_bytes) / (_TUNER_TREE * bus)
    return np.asarray(tree < _expected_ring(payload_bytes, links))


def tuner_prefers_in_switch(payload_bytes: Numeric, links: GroupLinks) -> BoolArray:
    """Return True if NCCL's tuner expects in-switch reduction (NVLSTree) to be faster than a ring.

    The tuner assumes 5/6 of the rate of a node's NVLink or of its NICs, and half of the NICs' over more than two nodes.

    Parameters
    ----------
    payload_bytes : array-like
        Size of the whole tensor [byte].
    links : GroupLinks
        Levels of the network that the group spans.

    Returns
    -------
    ndarray of bool
        The shape of `payload_bytes`.

    References
    ----------
    NVIDIA/nccl src/graph/tuning.cc (ncclTopoTuneModel); the figures as in the library of release 2.29.7.

    Examples
    --------
    >>> from paleo.pricing.links.group import GroupLinks, LinkLevel
    >>> four_nodes = GroupLinks((LinkLevel(8.0, 450e9), LinkLevel(4.0, 50e9, ports=8.0)), inter_node_level_count=1)
    >>> tuner_prefers_in_switch(np.array([1e8, 1e9]), four_nodes).tolist()
    [True, False]
    """
    inside, between = _expected_rates(links)
    efficiency = _TUNER_SWITCH_EFFICIENCY.get(links.gpu_architecture, 0.85)
    rate = np.minimum(efficiency * inside, np.where(links.nodes > 2, 0.5, 1.0) * between)
    latency = _TUNER_SWITCH_START + 2.0 * np.log2(np.maximum(links.nodes, 1.0)) * _TUNER_SWITCH_HOP
    seconds = latency + np.asarray(payload_bytes) / (_TUNER_SWITCH * rate)
    return np.asarray(seconds < _expected_ring(payload_bytes, links))


def _expected_rates(links: GroupLinks) -> tuple[Array, Array]:
    """Return the bandwidths inside a node and of a node's NICs that NCCL's tuner assumes [byte/s]."""
    inside = np.where(links.ranks > links.nodes, TUNER_BUS_BANDWIDTH_SHARE * links.levels[0].bandwidth, np.inf)
    return inside, links.levels[-1].bandwidth


def _expected_ring(payload_bytes: Numeric, links: GroupLinks) -> Array:
    """Return the time that NCCL's tuner expects for a ring all_reduce over nodes in protocol Simple [s]."""
    nodes, ranks = links.nodes, links.ranks
    inside = np.where(np.asarray(links.is_nvlink), TUNER_NVLINK_STEP_LATENCY[SIMPLE], TUNER_PCIE_STEP_LATENCY[SIMPLE])
    hops = np.maximum(2.0 * (ranks - 1.0) - 2.0 * nodes, 0.0) * inside + 2.0 * nodes * _TUNER_NET_HOP
    sent = 2.0 * (ranks - 1.0) / ranks * np.asarray(payload_bytes, dtype=np.float64)
    return np.asarray(_TUNER_PLATEAU * (_TUNER_START + hops) + sent / np.minimum(*_expected_rates(links)))
