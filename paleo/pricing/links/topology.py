"""The share of the network between nodes that topology, placement, hashing and neighbours leave to a job.

All are closed forms over arrays. Nodes are connected to leaf switches, ``leaf_nodes`` nodes to each. The nodes of a job
are packed onto as few leaves as possible, spread evenly over ``k`` leaves, or drawn at random from the whole machine. A
ring whose ranks are sorted by leaf, as NCCL sorts them, sends one flow per channel out of each leaf and is not slowed
down on an idle tree. An all-to-all needs the rates of all members of a leaf, and neighbours on the uplinks take a share
from both. The groups of one job compete, too. If the nodes of a group are a stride apart (pipeline stages outside
replicas, replicas outside groups of experts), other groups on the nodes in between send at the same time.

In a rail fabric NIC i of each node is connected to rail switch i. Traffic between different rails passes the spine, or
first NVLink to the GPU of the right rail (NCCL's PXN, 2.12 and later). In a dragonfly a leaf is a group of routers, and
each pair of groups is connected by ``global_links`` links. Traffic takes those (minimal routing), or two hops over a
random third group (Valiant), or the better of both (adaptive).

References: Kim, Dally, Scott and Abts, Technology-driven, highly-scalable dragonfly topology, ISCA 2008; Valiant, A
scheme for fast parallel communication, SIAM J. Comput. 11(2), 1982.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import SpecError, suggest_names
from paleo.pricing.links.group import intra_node_link_kind

if TYPE_CHECKING:
    from paleo.collectives.base import Array, Numeric
    from paleo.specs.system import InterconnectLevel, System

#: Nodes below a leaf switch, and nodes of the machine, if the system states neither (a 64-port switch with half of its
#: ports down).
DEFAULT_NODES_PER_LEAF, DEFAULT_MACHINE_NODES = 32, 32 * 32
#: Share of a link that adaptive routing or packet spraying reaches.
_ADAPTIVE_SHARE = 0.96
#: Flows between each pair of nodes: channels of NCCL times their queue pairs.
_FLOWS_PER_PORT = 16
#: Standard deviations above the mean up to which the number of flows on one link is summed.
_MAX_FLOW_DEVIATIONS = 12.0
#: Smallest divisor of a share, which avoids a division by zero.
_MIN_SHARE_DIVISOR = 1e-30


@dataclass(frozen=True, slots=True)
class NeighbourJob:
    """Second job on the same leaf switches.

    ``pattern`` is its traffic (ring or all_to_all), ``nodes`` its size, and ``sending_time_share`` the share of time in
    which the job sends.
    """

    pattern: str
    nodes: int
    sending_time_share: float


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Placement of a job's nodes on leaf switches: ``kind`` is packed, random or spread (over ``leaves`` switches).

    ``background_load_share`` is the share of the uplinks that other jobs use, 0 to 1; ``neighbour`` is a second job on
    the same switches.
    """

    kind: str = "packed"
    leaves: int = 0
    background_load_share: float = 0.0
    neighbour: NeighbourJob | None = None

    @property
    def is_uncontended(self) -> bool:
        """True if the job has as few leaf switches as possible and no neighbours on the network."""
        return self.kind == "packed" and self.background_load_share == 0.0 and self.neighbour is None


_PATTERNS = ("ring", "all_to_all")


def parse_node_placement(text: str, background: float = 0.0, neighbour: str | None = None) -> NodePlacement:
    """Parse the placement of a job's nodes, and the jobs that share its network.

    Parameters
    ----------
    text : str
        ``packed``, ``random`` or ``spread:8``.
    background : float, default 0.0
        Share of the uplinks that other jobs use.
    neighbour : str, optional
        A second job, such as ``all_to_all:32:0.4``: its pattern, its nodes and the share of time that it sends.

    Returns
    -------
    NodePlacement
        Placement, share of uplinks used by others, and the neighbouring job.

    Raises
    ------
    SpecError
        If a text names no placement or no pattern of traffic.

    Examples
    --------
    >>> parse_node_placement("spread:8").leaves, parse_node_placement("packed", neighbour="ring:16:0.25").neighbour
    (8, NeighbourJob(pattern='ring', nodes=16, sending_time_share=0.25))
    """
    if not 0.0 <= background < 1.0:
        raise SpecError(f"background: {background} must be 0 or more and below 1, the uplinks' share that others use")
    second_job = None if neighbour is None else _neighbour(neighbour)
    spread = re.fullmatch(r"spread:([1-9]\d*)", text)
    if spread:
        return NodePlacement("spread", int(spread[1]), background, second_job)
    if text not in ("packed", "random"):
        raise SpecError(f"nodes: {text!r}: expected packed, random or spread:K, such as spread:8")
    return NodePlacement(text, 0, background, second_job)


def _neighbour(text: str) -> NeighbourJob:
    parts = re.fullmatch(r"(\w+):([1-9]\d{0,6}):(0?\.\d+|0|1(?:\.0*)?)", text)
    if parts is None:
        raise SpecError(
            f"neighbour: {text!r}: expected PATTERN:NODES:SHARE, such as all_to_all:32:0.4 (the share of the time that "
            f"it sends, 0 to 1)"
        )
    if parts[1] not in _PATTERNS:
        raise SpecError(f"neighbour: {parts[1]!r} is no pattern of traffic; {suggest_names(parts[1], _PATTERNS)}")
    return NeighbourJob(parts[1], int(parts[2]), float(parts[3]))


def mean_leaf_count(nodes: Numeric, machine: Numeric, leaf: int) -> Array:
    """Compute the mean number of leaf switches that a job of randomly drawn nodes occupies.

    Parameters
    ----------
    nodes : array-like
        Nodes of the job.
    machine : array-like
        Nodes of the machine.
    leaf : int
        Nodes below a leaf switch.

    Returns
    -------
    ndarray
        Mean: (T/q)(1 - C(T-q, n)/C(T, n)), with q nodes per leaf.

    Examples
    --------
    >>> round(float(mean_leaf_count(8, 1024, 16)), 1)
    7.6
    """
    count, total = np.asarray(nodes, dtype=np.float64), np.asarray(machine, dtype=np.float64)
    empty = np.ones(np.broadcast_shapes(count.shape, total.shape))
    for position in range(leaf):
        empty = empty * np.clip(total - count - position, 0.0, None) / (total - position)
    return np.asarray(total / leaf * (1.0 - empty))


def mean_leaf_crossings(nodes: Numeric, machine: Numeric, leaf: int) -> Array:
    """Compute the mean number of ring hops that leave a leaf switch, for a ring in rank order over random nodes.

    Parameters
    ----------
    nodes : array-like
        Nodes of the job.
    machine : array-like
        Nodes of the machine.
    leaf : int
        Nodes below a leaf switch.

    Returns
    -------
    ndarray
        Mean: n (1 - (q-1)/(T-1)), with q nodes per leaf.
    """
    return np.asarray(np.asarray(nodes) * (1.0 - (leaf - 1.0) / (np.asarray(machine) - 1.0)))


def _fullest_link(flows: Numeric, links: Numeric) -> Array:
    """Compute the mean number of flows on the fullest of several links, onto which flows are hashed at random.

    Parameters
    ----------
    flows : array-like
        Number of flows.
    links : array-like
        Number of links.

    Returns
    -------
    ndarray
        Mean number of flows.

    Examples
    --------
    >>> float(_fullest_link(12.0, 1.0)), float(_fullest_link(32.0, 32.0).round(1))
    (12.0, 3.5)
    """
    several = (1.0 - _fullest_below(flows, 1.0, links)).sum(axis=-1)
    return np.asarray(np.where(np.asarray(links) <= 1.0, flows, several))


def _fullest_of_sources(flows: Numeric, sources: Numeric, links: Numeric) -> Array:
    """Compute the number of flows on the fullest link of several sources (leaf switches) with separate links.

    Each source hashes its flows at random onto its links.

    Parameters
    ----------
    flows : array-like
        Flows of each source.
    sources : array-like
        Number of sources.
    links : array-like
        Links of each source.

    Returns
    -------
    ndarray
        Harmonic mean of the number of flows, since the flows of a link share its rate.

    Examples
    --------
    >>> float(_fullest_of_sources(16.0, 8.0, 8.0).round(1))
    5.4
    """
    below = _fullest_below(flows, sources, links)
    exactly = np.diff(below, axis=-1)
    counts = np.arange(1.0, exactly.shape[-1] + 1.0)
    return np.asarray(1.0 / np.maximum((exactly / counts).sum(axis=-1) + below[..., 0], _MIN_SHARE_DIVISOR))


def _fullest_below(flows: Numeric, sources: Numeric, links: Numeric) -> Array:
    """Compute the probability that no link has more than 0, 1, 2, … flows, along a new last axis.

    Each of ``sources`` hashes ``flows`` at random onto ``links``, so that the flows of a link are binomial.
    """
    count, ways = np.asarray(flows, dtype=np.float64)[..., None], np.asarray(links, dtype=np.float64)[..., None]
    chance, mean = 1.0 / np.maximum(ways, 1.0 + np.finfo(np.float64).eps), float(np.max(count / ways))
    steps = np.arange(math.ceil(mean + _MAX_FLOW_DEVIATIONS * math.sqrt(mean) + _MAX_FLOW_DEVIATIONS))
    odds = np.clip(count - steps, _MIN_SHARE_DIVISOR, None) / (steps + 1.0) * chance / (1.0 - chance)
    log_empty = count * np.log1p(-chance)
    law = np.exp(np.concatenate([log_empty, log_empty + np.cumsum(np.log(odds), axis=-1)], axis=-1))
    below = np.clip(np.cumsum(law, axis=-1), 0.0, 1.0)
    return np.asarray(below ** (np.asarray(sources)[..., None] * ways))


def slowest_ecmp_flow_share(flows: Numeric, links: Numeric) -> Array:
    """Compute the share of the fair rate that the slowest flow gets if ECMP hashes equal flows onto equal links.

    Parameters
    ----------
    flows : array-like
        Number of flows.
    links : array-like
        Number of links onto which the flows are hashed.

    Returns
    -------
    ndarray
        Ratio of the mean number of flows on a link to that on the fullest link. Valid from one flow per link.

    Examples
    --------
    >>> [round(float(slowest_ecmp_flow_share(32 * r, 32)), 2) for r in (1, 4, 16, 64, 256)]
    [0.29, 0.47, 0.65, 0.79, 0.89]
    """
    count = np.asarray(flows, dtype=np.float64)
    return np.asarray(count / np.asarray(links) / _fullest_link(count, links))


def all_to_all_nic_share(nodes: Numeric, members: Numeric, leaf: int, oversubscription: float) -> Array:
    """Compute the share of its NIC bandwidth that a node keeps in an all-to-all over oversubscribed leaf switches.

    The fullest leaf needs m (n-m)/(n-1) node rates, as n-m of the n-1 peers of a node are elsewhere. It has q/o, with q
    nodes per leaf and oversubscription o.

    Parameters
    ----------
    nodes : array-like
        Nodes of the job.
    members : array-like
        Nodes of the job on its fullest leaf or group.
    leaf : int
        Nodes below a leaf switch.
    oversubscription : float
        Ratio of the bandwidth of a leaf's nodes to that of its uplinks.

    Returns
    -------
    ndarray
        Share, 0 to 1.
    """
    n, m = np.asarray(nodes, dtype=np.float64), np.asarray(members, dtype=np.float64)
    demand = m * (n - m) / np.maximum(n - 1.0, 1.0)
    return np.asarray(np.minimum(1.0, leaf / oversubscription / np.maximum(demand, _MIN_SHARE_DIVISOR)))


def rail_all_to_all_nic_share(
    nodes: Numeric, members: Numeric, rails: Numeric, leaf: int, oversubscription: float
) -> Array:
    """Compute the share of its NIC bandwidth that a node keeps in an all-to-all over rails without PXN.

    Each GPU sends directly to all others, without forwarding over NVLink. A rail switch keeps only the traffic to its
    own rail of the m-1 other nodes below it, 1/r of their traffic. All other traffic uses the uplinks: m (1 -
    (m-1)/((n-1) r)) node rates, of q/o, with q nodes per leaf, r rails and oversubscription o.

    Parameters
    ----------
    nodes : array-like
        Nodes of the job.
    members : array-like
        Nodes of the job on its fullest leaf or group.
    rails : array-like
        Number of rail switches.
    leaf : int
        Nodes below the rails.
    oversubscription : float
        Ratio of the bandwidth of a leaf's nodes to that of its uplinks.

    Returns
    -------
    ndarray
        Share, 0 to 1.

    Examples
    --------
    >>> float(rail_all_to_all_nic_share(8, 8, 8, 8, 2.0).round(3))  # all nodes below the rails, seven of eight GPUs not
    0.571
    """
    n, m = np.asarray(nodes, dtype=np.float64), np.asarray(members, dtype=np.float64)
    kept = (m - 1.0) / (np.maximum(n - 1.0, 1.0) * np.asarray(rails))
    return np.asarray(np.minimum(1.0, leaf / oversubscription / np.maximum(m * (1.0 - kept), _MIN_SHARE_DIVISOR)))


def _unsorted_ring_share(
    nodes: Numeric, machine: Numeric, leaf: int, members: Numeric, oversubscription: float
) -> Array:
    """Compute the share of its NIC bandwidth that a node keeps in a ring in rank order over randomly drawn nodes.

    The fullest leaf sends a flow for each hop that leaves it, m (1 - (q-1)/(T-1)) of them, and has q/o node rates. The
    machine has T nodes, a leaf q nodes, m of them of the job; o is the oversubscription.

    Parameters
    ----------
    nodes : array-like
        Nodes of the job.
    machine : array-like
        Nodes of the machine.
    leaf : int
        Nodes below a leaf switch.
    members : array-like
        Nodes of the job on its fullest leaf or group.
    oversubscription : float
        Ratio of the bandwidth of a leaf's nodes to that of its uplinks.

    Returns
    -------
    ndarray
        Share, 0 to 1.

    Examples
    --------
    >>> float(_unsorted_ring_share(32, 1024, 32, 16.0, 4.0).round(2))
    0.52
    """
    leaving = np.asarray(members) * mean_leaf_crossings(nodes, machine, leaf) / np.asarray(nodes)
    return np.asarray(np.minimum(1.0, leaf / oversubscription / np.maximum(leaving, _MIN_SHARE_DIVISOR)))


@dataclass(frozen=True, slots=True)
class Dragonfly:
    """Dragonfly network: groups of routers, each pair of groups joined by global links.

    ``group_pair_bandwidth`` is the bandwidth between a pair of groups, in NIC bandwidths of a node. ``routing`` is
    minimal, valiant, or adaptive, which takes the better of both. Links inside a group are not a limit.
    """

    groups: Numeric
    group_pair_bandwidth: Numeric
    routing: str = "adaptive"

    def exchange_share(self, nodes: Numeric, members: Numeric, used: Numeric) -> Array:
        """Compute the share of its NIC bandwidth that a node keeps in an all-to-all over several dragonfly groups.

        The links of a pair of groups need m²/(n-1) node rates. Over third groups, each of the g-2 needs 2 (k-2)/(k-1)
        (k > 2) of the traffic that leaves a group.

        Parameters
        ----------
        nodes : array-like
            Nodes of the job.
        members : array-like
            Nodes of the job on its fullest leaf or group.
        used : array-like
            Groups that hold nodes of the job.

        Returns
        -------
        ndarray
            Share, 0 to 1.

        Examples
        --------
        >>> float(Dragonfly(8, 2.0, "minimal").exchange_share(32, 16, 2).round(3))
        0.242
        """
        n, m = np.asarray(nodes, dtype=np.float64), np.asarray(members, dtype=np.float64)
        between = np.maximum(n - 1.0, 1.0)
        k = np.asarray(used, dtype=np.float64)
        return self._better(m * m / between, m * (n - m) / between, used, 2.0 * (k - 2.0) / np.maximum(k - 1.0, 1.0))

    def divided_among(self, jobs: float) -> Dragonfly:
        """Divide the inter-group links evenly among jobs that send at the same time.

        Parameters
        ----------
        jobs : float
            Number of jobs.

        Returns
        -------
        Dragonfly
            Dragonfly with one job's share of the links.
        """
        return dataclasses.replace(self, group_pair_bandwidth=np.asarray(self.group_pair_bandwidth) / jobs)

    def ring_share(self, used: Numeric) -> Array:
        """Compute the share of its NIC bandwidth that a node keeps in a ring whose ranks are sorted by group.

        Parameters
        ----------
        used : array-like
            Groups that hold nodes of the job.

        Returns
        -------
        ndarray
            Share, 0 to 1. One flow at a node's rate runs from each group to the next.
        """
        return self._better(np.ones(()), np.ones(()), used, np.where(np.asarray(used) > 2, 2.0, 1.0))

    def unsorted_ring_share(self, crossings: Numeric) -> Array:
        """Compute the share of its NIC bandwidth that a node keeps in a ring over randomly placed nodes.

        Parameters
        ----------
        crossings : array-like
            Hops between groups.

        Returns
        -------
        ndarray
            Share, 0 to 1, limited by the fullest pair of groups or the fullest group.
        """
        g = np.asarray(self.groups, dtype=np.float64)
        leaving = np.asarray(crossings) / g
        return self._better(_fullest_of_sources(leaving, g, g - 1.0), leaving, g, np.asarray(2.0))

    def _better(self, of_pair: Array, leaving: Array, used: Numeric, hops: Array) -> Array:
        """Compute the share of its NIC bandwidth that a node keeps under the routing, 0 to 1.

        ``of_pair`` are the node rates needed on the links of one pair of groups, ``leaving`` those that leave a group.
        ``hops`` is how often this traffic passes the busiest links of a group if routed over a third group.
        """
        minimal = np.asarray(self.group_pair_bandwidth) / np.maximum(of_pair, _MIN_SHARE_DIVISOR)
        thirds = np.asarray(self.groups, dtype=np.float64) - 2.0
        spread = np.where(thirds > 0, leaving * np.maximum(hops, 1.0) / np.maximum(thirds, 1.0), np.inf)
        valiant = np.asarray(self.group_pair_bandwidth) / np.maximum(spread, _MIN_SHARE_DIVISOR)
        best = {"minimal": minimal, "valiant": valiant}.get(self.routing, np.maximum(minimal, valiant))
        return np.asarray(np.where(np.asarray(used) > 1, np.minimum(1.0, best), 1.0))


def nic_share_with_neighbour(
    *, ports: Numeric, demand: Numeric, other_ports: Numeric, other_demand: Numeric, sending: Numeric, capacity: Numeric
) -> Array:
    """Compute the share of its bandwidth that a job keeps next to a second job on shared links, on average over time.

    Each job has a number of ports below the shared links, which need ``demand`` of a port's rate each. The links carry
    the rate of ``capacity`` ports, shared per port by max-min fairness: min(u, max(c/(m+m'), (c - m' u')/m)).

    Parameters
    ----------
    ports : array-like
        Ports of the job below the shared links.
    demand : array-like
        Share of a port's rate that the job needs.
    other_ports : array-like
        Ports of the second job below the shared links.
    other_demand : array-like
        Share of a port's rate that the second job needs.
    sending : array-like
        Share of the time in which the second job sends.
    capacity : array-like
        Rate of the shared links, in ports.

    Returns
    -------
    ndarray
        Share, 0 to 1.

    Examples
    --------
    >>> keywords = {"ports": 4, "demand": 1.0, "other_ports": 4, "other_demand": 1.0, "capacity": 4.0}
    >>> (float(nic_share_with_neighbour(**keywords, sending=1.0)),
    ... float(nic_share_with_neighbour(**keywords, sending=0.5)))
    (0.5, 0.75)
    """
    job_ports, neighbour_ports, links = np.asarray(ports), np.asarray(other_ports), np.asarray(capacity)
    alone = np.minimum(demand, links / np.maximum(job_ports, _MIN_SHARE_DIVISOR))
    left_over = (links - neighbour_ports * other_demand) / np.maximum(job_ports, _MIN_SHARE_DIVISOR)
    rate = np.minimum(
        demand, np.maximum(links / np.maximum(job_ports + neighbour_ports, _MIN_SHARE_DIVISOR), left_over)
    )
    kept = rate / np.maximum(alone, _MIN_SHARE_DIVISOR)
    return np.asarray(np.where(np.asarray(demand) > 0, 1.0 - sending + sending * np.minimum(kept, 1.0), 1.0))


@dataclass(frozen=True, slots=True)
class NetworkShare:
    """Share (0 to 1) of the nodes' NIC bandwidth that a job keeps under its placement, by traffic pattern.

    Attributes
    ----------
    leaves : float
        Leaf switches of the job, or groups of a dragonfly.
    crossings : float
        Hops of an unsorted ring that leave a switch.
    ring_share, exchange_share, unsorted_ring_share : float
        Shares of sorted rings, of exchanges, and of rings in rank order.
    direct_rail_exchange_share : float, optional
        Share of exchanges on rails without forwarding over NVLink.
    """

    leaves: float
    crossings: float
    ring_share: float
    exchange_share: float
    unsorted_ring_share: float = 1.0
    direct_rail_exchange_share: float | None = None

    def share(self, operation: str) -> float:
        """Return the share of its NIC bandwidth that a node keeps in a collective operation.

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.

        Returns
        -------
        float
            Share, 0 to 1.
        """
        return self.exchange_share if operation == "all_to_all" else self.ring_share


@dataclass(frozen=True, slots=True)
class _Job:
    """Nodes of one communication group on the leaf switches of a fat tree or the groups of a dragonfly.

    ``nodes_on_fullest_leaf`` are its nodes on the fullest leaf. ``crossings`` counts the hops of an unsorted ring that
    leave a leaf. ``rings_leaving_leaf`` is the number of the job's rings that leave the fullest leaf, and
    ``concurrent_exchanges`` the number of such groups that exchange at the same time.
    """

    nodes: float
    machine_nodes: int
    leaf_nodes: int
    leaves: float
    nodes_on_fullest_leaf: float
    crossings: float
    rings_leaving_leaf: float = 1.0
    concurrent_exchanges: float = 1.0

    def ports(self, pattern: str, *, dragonfly: bool) -> tuple[float, float]:
        """Return the ports of a leaf that send to other leaves, and the share of the shared links that each port needs.

        The shared links are all uplinks, or in a dragonfly the links to one other group.

        Parameters
        ----------
        pattern : str
            Pattern of traffic: ``ring`` or ``all_to_all``.
        dragonfly : bool
            True for a dragonfly, False for a fat tree.

        Returns
        -------
        ports : float
            Ports of the fullest leaf that send to other leaves.
        demand : float
            Share of a port's rate that crosses the shared links, 0 to 1 [-].
        """
        if self.leaves <= 1:
            return 1.0, 0.0
        if pattern == "ring":
            return self.rings_leaving_leaf, 1.0
        elsewhere = self.nodes_on_fullest_leaf if dragonfly else self.nodes - self.nodes_on_fullest_leaf
        return self.concurrent_exchanges * self.nodes_on_fullest_leaf, elsewhere / max(self.nodes - 1.0, 1.0)


def has_explicit_topology(system: System) -> bool:
    """Return True if the network between nodes may limit even jobs on as few leaf switches as possible.

    This is so if the system file gives an oversubscription, a routing, or the links between groups of a dragonfly.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    bool
        True if a level between nodes is oversubscribed, or names its routing or its global links.
    """
    return any(
        level.oversubscription > 1.0 or level.routing not in (None, "rail") or level.global_links is not None
        for level in system.levels
        if system.is_inter_node_level(level)
    )


def placement_nic_share(system: System, nodes: int, placement: NodePlacement, stride: float = 1.0) -> NetworkShare:
    """Compute the share of NIC bandwidth that the nodes of a group keep under a placement on leaf switches.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    nodes : int
        Nodes of the group.
    placement : NodePlacement
        Placement of the nodes on leaf switches.
    stride : float, default 1.0
        Distance of neighbours, in nodes of the job. The groups of the nodes in between send at the same time.

    Returns
    -------
    NetworkShare
        Shares of the NIC bandwidth by traffic pattern, 0 to 1.
    """
    outer = [level for level in system.levels if system.is_inter_node_level(level)]
    if not outer or nodes < 2:
        return NetworkShare(1.0, 0.0, 1.0, 1.0)
    level, random = outer[0], placement.kind == "random"
    machine = max(system.max_nodes or DEFAULT_MACHINE_NODES, math.ceil(nodes * stride))
    leaf = min(level.leaf or DEFAULT_NODES_PER_LEAF, machine)
    job = _at_random(nodes, machine, leaf, stride) if random else _in_order(nodes, machine, leaf, placement, stride)
    is_dragonfly = level.topology == "dragonfly"
    share = _of_dragonfly(level, job, random) if is_dragonfly else _of_tree(system, level, job, random)
    # shares are reduced by hashing, by other jobs on the uplinks, and by a second job
    above = _uplink_share(level, job.leaf_nodes, placement.background_load_share) if job.leaves > 1 else 1.0
    kept = {pattern: above * _beside_second_job(level, job, pattern, placement.neighbour) for pattern in _PATTERNS}
    ring, exchange = kept["ring"], kept["all_to_all"]
    direct = None if share.direct_rail_exchange_share is None else share.direct_rail_exchange_share * exchange
    return NetworkShare(
        share.leaves, share.crossings, share.ring_share * ring, share.exchange_share * exchange,
        share.unsorted_ring_share * ring, direct,
    )  # fmt: skip


def _in_order(nodes: int, machine: int, leaf: int, placement: NodePlacement, stride: float) -> _Job:
    """Place the nodes of a group on leaf switches in the order of their ranks.

    A leaf holds as many nodes of the group as strides fit on the leaf, together with nodes of the groups in between.
    """
    switches = -(-math.ceil(nodes * stride) // leaf)
    if placement.kind == "spread":
        switches = min(placement.leaves, math.ceil(nodes * stride), -(-machine // leaf))
    together = min(leaf, math.ceil(nodes * stride / switches)) if placement.kind == "spread" else leaf
    members, groups = min(float(nodes), max(1.0, together / stride)), min(stride, together)
    leaves = float(min(nodes, switches))
    crossings = leaves * (leaves > 1)
    return _Job(nodes, machine, leaf, leaves, members, crossings, groups, concurrent_exchanges=groups)


def _at_random(nodes: int, machine: int, leaf: int, stride: float) -> _Job:
    """Place the nodes of a group on leaf switches at random.

    The result has the mean number of leaves, and the expected number of nodes on the fullest leaf. The exchanges of all
    groups together need as much of the fullest leaf as one exchange of all the job's nodes would, on average. Only
    rings with a node on a leaf leave that leaf.
    """
    whole, count = nodes * stride, max(machine / leaf, 1.0)
    leaves, mean = float(mean_leaf_count(nodes, machine, leaf)), whole * leaf / machine
    variance = mean * (1 - leaf / machine) * (machine - whole) / max(machine - 1, 1)
    maximum = max(0.0, NormalDist().inv_cdf((count - 0.375) / (count + 0.25)))  # of standard normals (Blom, 1958)
    fullest = mean + maximum * math.sqrt(max(variance, 0.0))
    members = min(float(leaf), whole, max(whole / float(mean_leaf_count(whole, machine, leaf)), fullest))
    crossings = float(mean_leaf_crossings(nodes, machine, leaf))
    touched = leaves * leaf / machine  # of all leaves by a group
    rings = float(_fullest_of_sources(stride, leaves, 1.0 / touched)) if stride > 1.0 else 1.0
    return _Job(whole, machine, leaf, leaves, members, crossings, rings_leaving_leaf=rings)


def _of_tree(system: System, level: InterconnectLevel, job: _Job, random: bool) -> NetworkShare:
    """Compute the bandwidth shares of a group on leaf switches below a spine, or on the rail switches of nodes.

    Groups that send at the same time share the uplinks, which are divided by their number.
    """
    size = job.nodes, job.nodes_on_fullest_leaf
    crosses, leaf, o = job.leaves > 1, job.leaf_nodes, level.oversubscription
    exchange = float(all_to_all_nic_share(*size, leaf, o * job.concurrent_exchanges)) if crosses else 1.0
    unsorted = ring = min(1.0, leaf / (o * job.rings_leaving_leaf)) if crosses else 1.0
    if random:
        unsorted = float(_unsorted_ring_share(job.nodes, job.machine_nodes, leaf, job.nodes_on_fullest_leaf, o))
    if level.routing != "rail":
        return NetworkShare(job.leaves, job.crossings, ring, exchange, unsorted)
    direct = float(rail_all_to_all_nic_share(*size, level.ports, leaf, o * job.concurrent_exchanges))
    forwarded = intra_node_link_kind(system) == "nvlink"
    return NetworkShare(job.leaves, job.crossings, ring, exchange if forwarded else direct, unsorted, direct)


def _of_dragonfly(level: InterconnectLevel, job: _Job, random: bool) -> NetworkShare:
    network = dragonfly_network(level, job.machine_nodes, job.leaf_nodes)
    ring = float(network.divided_among(job.rings_leaving_leaf).ring_share(job.leaves))
    exchanging = network.divided_among(job.concurrent_exchanges)
    exchange = float(exchanging.exchange_share(job.nodes, job.nodes_on_fullest_leaf, job.leaves))
    crossings = mean_leaf_crossings(job.nodes, job.machine_nodes, job.leaf_nodes)
    unsorted = float(network.unsorted_ring_share(crossings)) if random else ring
    return NetworkShare(job.leaves, job.crossings, ring, exchange, unsorted)


def dragonfly_network(level: InterconnectLevel, machine: int, group: int) -> Dragonfly:
    """Return the dragonfly network of a system: the number of groups, and the links between each two groups.

    If a system does not give the links, a group has as many links to other groups as its nodes have ports (a balanced
    dragonfly: Kim et al., section 3.1), divided by the oversubscription of the group.

    Parameters
    ----------
    level : InterconnectLevel
        The level of the network.
    machine : int
        Nodes of the machine.
    group : int
        Nodes of a group.

    Returns
    -------
    Dragonfly
        Number of groups, links of each pair, and routing.
    """
    groups = -(-machine // group)
    balanced = group / max(groups - 1.0, 1.0) / level.oversubscription
    pair = balanced if level.global_links is None else level.global_links / level.ports
    return Dragonfly(groups, pair, level.routing or "adaptive")


def _beside_second_job(level: InterconnectLevel, job: _Job, pattern: str, neighbour: NeighbourJob | None) -> float:
    """Compute the share of its bandwidth that a job keeps next to a second job on the same leaf switches, 0 to 1.

    The nodes of the second job fill the places on those switches that the first job leaves free.
    """
    if neighbour is None or job.leaves <= 1:
        return 1.0
    left = job.leaf_nodes - job.concurrent_exchanges * job.nodes_on_fullest_leaf
    free = min(left, max(1.0, neighbour.nodes / job.leaves))
    other = _Job(neighbour.nodes, job.machine_nodes, job.leaf_nodes, job.leaves, min(free, neighbour.nodes), 0.0)
    is_dragonfly = level.topology == "dragonfly"
    capacity: Numeric = job.leaf_nodes / level.oversubscription
    if is_dragonfly:
        capacity = dragonfly_network(level, job.machine_nodes, job.leaf_nodes).group_pair_bandwidth
    ports, demand = job.ports(pattern, dragonfly=is_dragonfly)
    other_ports, other_demand = other.ports(neighbour.pattern, dragonfly=is_dragonfly) if free >= 1.0 else (0.0, 0.0)
    share = nic_share_with_neighbour(
        ports=ports, demand=demand, other_ports=other_ports, other_demand=other_demand,
        sending=neighbour.sending_time_share, capacity=capacity,
    )  # fmt: skip
    return float(share)


def _uplink_share(level: InterconnectLevel, leaf: int, background: float) -> float:
    """Compute the share of an uplink of a leaf switch that a job gets, after hashing and background load, 0 to 1."""
    hashed = 1.0
    if level.routing == "ecmp":
        hashed = float(slowest_ecmp_flow_share(_FLOWS_PER_PORT * leaf, leaf))
    elif level.routing == "adaptive" and level.topology != "dragonfly":
        hashed = _ADAPTIVE_SHARE
    return hashed * (1.0 - background)
