"""A group of ranks on a machine: its links, NCCL's protocol, and the time of traffic inside one node.

*Links* (`GroupLinks`) are those of the datasheet: levels, ports, bandwidths.

*Protocol* (`tuner_protocol`): NCCL has three protocols: LL (flags in the data, lowest latency, about a quarter of the
link), LL128 (flags per 128 bytes) and Simple (fences, most of the link, slow to start). NCCL runs the one that its
tuner expects to be fastest, from constants in its source, which need not be the fastest one. `tuner_protocol` follows
that rule, so that predictions jump at the payloads at which measured curves do. The calibrated parameters then price
the chosen protocol.

*Time* inside one node, over NVLink, NVSwitch or a PCIe tree (`intra_node_collective_time`): the counts (steps, bytes
per level) are those of `paleo.collectives`. They are multiplied by the latency of a step and the share of a link that
each protocol reaches, and the launch cost is added. `NcclParameters` price rings, trees and similar algorithms,
`ExchangeParameters` exchanges in pairs; each is fitted per system.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.collectives.base import Array, CollectiveAlgorithm, Numeric, Traffic, group_rank_count
from paleo.errors import PlanError
from paleo.pricing.links.alpha_beta import (
    hop_latency_correction,
    partly_overlapped_time,
    pipeline_fill_time,
    smooth_maximum,
    smooth_minimum,
    with_launch_skew,
)
from paleo.specs.calibration import parameter
from paleo.units import MICROSECOND

if TYPE_CHECKING:
    from paleo.specs.system import GroupLevel, System

#: Kinds of links inside a node that do not form a PCIe tree.
_LIKE_NVLINK = frozenset({"nvlink", "nvswitch", "infinity_fabric", "ici", "ethernet"})
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class LinkLevel:
    """One interconnect level (such as NVLink or InfiniBand) of a group, or of several groups stacked as rows.

    Attributes
    ----------
    fan_out : float or ndarray
        Units of the level below that the group connects at this level.
    port_bandwidth : float or ndarray
        Bandwidth of one port of one unit [byte/s].
    ports, rank_ports : float or ndarray
        Ports of a unit (GPU or node) that the group may use, and ports that a single rank of the unit drives.
    shared_unit_ports : float or ndarray
        Ports of a unit by datasheet, divided among the groups of the same kind.
    latency : float
        Latency of one message by datasheet [s].
    latency_in_calibrated_hops : float, optional
        Part of that latency which calibrated hop times include [s]; None if the link's latency is unknown.
    """

    fan_out: Numeric
    port_bandwidth: Numeric
    ports: Numeric = 1.0
    rank_ports: Numeric = float("inf")
    shared_unit_ports: Numeric = 1.0
    latency: float = 0.0
    latency_in_calibrated_hops: float | None = 0.0

    @property
    def bandwidth(self) -> Array:
        """Bandwidth of one member (GPU, node or rack) over all its usable links, in one direction [byte/s]."""
        return np.asarray(self.port_bandwidth) * self.ports

    def bandwidth_of_senders(self, senders: Numeric | None) -> Array:
        """Return the bandwidth of one member (GPU, node or rack) if only some of its ranks send [byte/s].

        Parameters
        ----------
        senders : array-like, optional
            Ranks of the unit that send. None: all of them.

        Returns
        -------
        ndarray
            Bandwidth [byte/s].

        Examples
        --------
        >>> LinkLevel(2.0, 25e9, ports=8.0, rank_ports=1.0).bandwidth_of_senders(2.0).item()
        50000000000.0
        """
        if senders is None:
            return self.bandwidth
        return np.asarray(self.port_bandwidth) * np.minimum(self.ports, self.rank_ports * np.asarray(senders))


#: Fields of a level that differ between groups of a system.
_STACKED = ("fan_out", "port_bandwidth", "ports", "rank_ports", "shared_unit_ports")


@dataclass(frozen=True, slots=True)
class GroupLinks:
    """Links that a communication group uses; arrays hold an entry for each of several groups of one system.

    Attributes
    ----------
    levels : tuple of LinkLevel
        Levels from inner to outer; the last ``inter_node_level_count`` of them are between nodes.
    is_nvlink : bool or ndarray of bool
        True if all levels of the group inside the node are NVLink, which supports LL128.
    staged_through_host : bool or ndarray of bool
        True if neighbours cannot access each other's memory, so that data pass through host memory.
    inter_node_level_count : int
        Number of levels between nodes.
    gpu_architecture : str
        Architecture of the device, for the constants of NCCL's tuner.
    switch_reduces : bool
        True if the inner level's switches add and multicast (NVLink SHARP).
    switch_bandwidth : float
        Largest bus bandwidth of reductions in the switches [byte/s].
    node_spans_hosts : bool
        True if a node is an NVLink domain of several machines.
    topologies : frozenset of str
        Topologies of the system's levels, for algorithms that require one.
    multiprocessor_clock : float
        Clock of the multiprocessors [Hz]; infinite if unknown.
    """

    levels: tuple[LinkLevel, ...]
    is_nvlink: bool | BoolArray = True
    staged_through_host: bool | BoolArray = False
    inter_node_level_count: int = 0
    gpu_architecture: str = "Ampere"
    switch_reduces: bool = False
    switch_bandwidth: float = float("inf")
    node_spans_hosts: bool = False
    topologies: frozenset[str] = frozenset()
    multiprocessor_clock: float = float("inf")

    @property
    def fan_outs(self) -> tuple[Numeric, ...]:
        """Number of members that each level joins (GPUs of a node, nodes, racks), inner to outer."""
        return tuple(level.fan_out for level in self.levels)

    @property
    def ranks(self) -> Array:
        """Number of ranks of the group."""
        return group_rank_count(tuple(np.asarray(fan_out, dtype=np.float64) for fan_out in self.fan_outs))

    @property
    def nodes(self) -> Array:
        """Number of nodes that the group spans."""
        outer = self.fan_outs[self.intra_node_level_count :]
        return group_rank_count(tuple(np.asarray(fan_out, dtype=np.float64) for fan_out in outer))

    @property
    def intra_node_level_count(self) -> int:
        """Number of interconnect levels inside a node (such as NVLink)."""
        return len(self.levels) - self.inter_node_level_count

    @property
    def intra_node_links(self) -> GroupLinks:
        """Links of the group inside one node, with fan-outs of 1 between nodes."""
        inner, outer = self.levels[: self.intra_node_level_count], self.levels[self.intra_node_level_count :]
        alone = (replace(level, fan_out=np.ones_like(np.asarray(level.fan_out))) for level in outer)
        return replace(self, levels=(*inner, *alone))

    def hop_time(self, measured: float, *, outside: bool = False) -> Numeric:
        """Return a measured hop time, corrected for the link latency of this group [s].

        Parameters
        ----------
        measured : float
            Seconds of the hop as measured.
        outside : bool, default False
            True for a hop between nodes, False inside a node.

        Returns
        -------
        array-like
            Time of the hop [s]. Of several levels the largest change counts; levels without a latency are ignored.
        """
        levels = self.levels[self.intra_node_level_count :] if outside else self.levels[: self.intra_node_level_count]
        if all(level.latency_in_calibrated_hops == level.latency for level in levels):
            return measured
        most: Numeric = -np.inf
        for level in levels:
            stated, latency = level.latency_in_calibrated_hops, level.latency
            change = -np.inf if stated == latency == 0.0 else hop_latency_correction(measured, stated, latency)
            most = np.maximum(most, np.where(np.asarray(level.fan_out) > 1, change, -np.inf))
        return np.asarray(measured + np.where(np.isfinite(most), most, 0.0))

    def can_run(self, algorithm: CollectiveAlgorithm, operation: str) -> bool:
        """Return True if the system has the switches and the topology that an algorithm requires.

        Parameters
        ----------
        algorithm : CollectiveAlgorithm
            Collective algorithm, such as a ring.
        operation : str
            Collective operation, such as ``all_reduce``.

        Returns
        -------
        bool
            True if the algorithm can run.
        """
        switches = self.switch_reduces or not algorithm.reduces_in_network
        over_torus = operation in algorithm.non_neighbour_operations and "torus" in self.topologies
        return switches and not over_torus and algorithm.required_topology in (None, *self.topologies)

    def datasheet_wire_time(self, traffic: Traffic, levels: slice = slice(None)) -> Array:
        """Compute the transfer time of a collective at the datasheet bandwidth, by the slowest level of each phase.

        The times of the phases are summed.

        Parameters
        ----------
        traffic : Traffic
            Steps and bytes of an algorithm, level by level.
        levels : slice, default slice(None)
            The levels to consider.

        Returns
        -------
        ndarray
            Time [s].
        """
        total = np.zeros(())
        for phase in traffic.phases:
            slowest = np.zeros(())
            for sent, level in zip(phase[levels], self.levels[levels], strict=False):
                slowest = np.maximum(slowest, sent.wire_bytes / level.bandwidth_of_senders(sent.senders_per_member))
            total = total + np.asarray(slowest)
        return np.asarray(total)


def group_links(system: System, *, stride: int, size: int) -> GroupLinks:
    """Return the links of a communication group that shares node ports with the other groups of its kind.

    The system's other ranks form groups of the same stride and size, which use the network at the same time.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    stride : int
        Distance between neighbouring ranks of the group.
    size : int
        Ranks of the group.

    Returns
    -------
    GroupLinks
        Levels from the inner to the outer one.

    Examples
    --------
    >>> from paleo.specs.system import load_system
    >>> two_nodes = group_links(load_system("dgx-a100-80gb"), stride=1, size=16)
    >>> two_nodes.fan_outs, [level.ports for level in two_nodes.levels], two_nodes.inter_node_level_count
    ((8.0, 2.0), [1.0, 8.0], 1)
    """
    return _links_of_spans(system, system.group_levels(stride, size))


def sole_group_links(system: System, *, ranks: int, ranks_per_node: int) -> GroupLinks:
    """Return the links of a communication group that is the only one on the system.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    ranks : int
        Number of ranks of the group.
    ranks_per_node : int
        Ranks of the group in each node.

    Returns
    -------
    GroupLinks
        Levels, inner to outer; machines of one NVLink domain count as one node.

    Raises
    ------
    PlanError
        If the ranks need several nodes, and the system has no network between nodes.
    """
    inside = min(ranks, nvlink_domain_ranks(system, ranks_per_node))
    spans, nodes = list(system.group_levels(1, inside)), -(-ranks // inside)
    outer = [index for index, span in enumerate(spans) if system.is_inter_node_level(span.level)]
    if nodes > 1 and not outer:
        raise PlanError(f"system {system.name} has no network between nodes, and {ranks} ranks need {nodes} nodes")
    if nodes > 1:
        first = outer[0]
        spans[first] = replace(spans[first], fan_out=nodes, ranks_per_unit=inside, groups_per_unit=1, max_fan_out=0)
    return _links_of_spans(system, spans)


def nvlink_domain_ranks(system: System, ranks_per_node: int) -> int:
    """Count the ranks of a group that reach each other without the network between nodes.

    These are the ranks of one machine, or of an NVLink domain of several machines.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    ranks_per_node : int
        Ranks of the group in each machine.

    Returns
    -------
    int
        Number of ranks.
    """
    hosts = system.devices_per_host
    return system.devices_per_node if hosts is not None and ranks_per_node <= hosts else ranks_per_node


def stack_group_links(groups: Sequence[GroupLinks], index: npt.NDArray[np.intp]) -> GroupLinks:
    """Stack the links of several groups of one system, with a row of each array per group.

    Parameters
    ----------
    groups : sequence of GroupLinks
        Different groups.
    index : ndarray of int
        Group of each row.

    Returns
    -------
    GroupLinks
        Row i is ``groups[index[i]]``.
    """
    nvlink = np.asarray([group.is_nvlink for group in groups], dtype=np.bool_)
    staged = np.asarray([group.staged_through_host for group in groups], dtype=np.bool_)
    levels = tuple(_stacked(levels, index) for levels in zip(*(group.levels for group in groups), strict=True))
    return replace(groups[0], levels=levels, is_nvlink=nvlink[index], staged_through_host=staged[index])


def _stacked(levels: Sequence[LinkLevel], index: npt.NDArray[np.intp]) -> LinkLevel:
    """Stack one interconnect level of several groups into one level, with the group of each row."""
    columns: Any = {name: np.array([getattr(level, name) for level in levels], np.float64) for name in _STACKED}
    return replace(levels[0], **{name: column[index] for name, column in columns.items()})


def _links_of_spans(system: System, spans: Sequence[GroupLevel]) -> GroupLinks:
    """Build the links of a group from the ranks that the group has at each level of the system.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    spans : sequence of GroupLevel
        Ranks of the group at each level.

    Returns
    -------
    GroupLinks

    Raises
    ------
    PlanError
        If the system has no links.
    """
    if not spans:
        raise PlanError(f"system {system.name} has no links, so its devices cannot talk to one another")
    fabric = [system.is_inter_node_level(span.level) for span in spans]
    inner = [span.level for span, outside in zip(spans, fabric, strict=True) if not outside and span.fan_out > 1]
    levels = tuple(_level(system, span, outside) for span, outside in zip(spans, fabric, strict=True))
    if fabric[0]:  # a node of one device has an idle inner level
        levels = (LinkLevel(1.0, levels[0].port_bandwidth, rank_ports=1.0), *levels)
    return GroupLinks(
        levels,
        is_nvlink=all(level.link.kind in _LIKE_NVLINK for level in inner),
        staged_through_host=bool(inner) and not spans[0].level.peer_to_peer,
        inter_node_level_count=sum(fabric),
        gpu_architecture=system.device.architecture,
        switch_reduces=not fabric[0] and spans[0].level.in_switch_reduction,
        switch_bandwidth=spans[0].level.link.in_switch_bandwidth or float("inf"),
        node_spans_hosts=system.devices_per_host is not None,
        topologies=frozenset(level.topology for level in system.levels),
        multiprocessor_clock=system.device.boost_clock or float("inf"),
    )


def _level(system: System, span: GroupLevel, outside: bool) -> LinkLevel:
    """Build the link level of a group from the ranks that the group has there.

    If the latency of a link is unknown, calibrated hop times are assumed to include it.
    """
    link, ports = span.level.link, (*_usable_ports(system, span, outside), span.level.ports / span.groups_per_unit)
    latencies = (0.0, 0.0) if link.latency is None else (link.latency, link.stated_latency)
    return LinkLevel(float(span.fan_out), link.bandwidth, *ports, *latencies)


def intra_node_link_kind(system: System) -> str:
    """Return the kind of connection between the devices of a node, by which calibrations distinguish systems.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.

    Returns
    -------
    str
        ``nvlink``, ``none`` or PCIe: ``pcie-staged`` if copies pass through host memory, ``pcie-switch`` if all devices
        reach each other below one root, else ``pcie``.

    Examples
    --------
    >>> from paleo.specs.system import load_system
    >>> [intra_node_link_kind(load_system(name))
    ... for name in ("dgx-h100", "deepbench-8gpu-dual-root", "deepbench-10gpu-pascal")]
    ['nvlink', 'pcie', 'pcie-switch']
    """
    inner = [level for level in system.levels if not system.is_inter_node_level(level)]
    if not inner:
        return "none"
    if inner[0].link.kind in _LIKE_NVLINK:
        return "nvlink"
    if not inner[0].peer_to_peer:
        return "pcie-staged"
    return "pcie-switch" if all(level.peer_to_peer for level in inner) else "pcie"


def _direct_links(span: GroupLevel, fan_out: int) -> float:
    """Count the links of a unit (GPU) to the others of a group of ``fan_out`` units.

    In a mesh these are the links to the group's pairs or rings, else all links of the unit.
    """
    level = span.level
    if level.topology != "mesh" or level.ranks is None or fan_out == 1:
        return float(level.ports)
    if level.rings is not None:
        return level.rings[fan_out - 1]
    peers = span.max_fan_out - 1
    return level.ports * min(fan_out - 1, peers) / peers


def _usable_ports(system: System, span: GroupLevel, outside: bool) -> tuple[float, float]:
    """Return the ports of one unit (GPU or node) that a group can use, and the ports that one rank drives.

    A rank drives its NIC (or its share of the node's NICs, at least one), so a single rank of a node of eight does not
    fill eight NICs. All rings of a PCIe tree have the same direction and leave a unit through one slot.
    """
    share = span.level.ports / span.groups_per_unit
    if not outside:
        shared = span.level.link.kind in ("pcie", "qpi")
        usable = min(share, 1.0 if shared else _direct_links(span, span.fan_out))
        of_a_rank = max(1.0, usable / (span.ranks_per_unit * span.groups_per_unit))
        return usable, min(of_a_rank, _direct_links(span, 2))
    of_a_rank = max(1.0, span.level.ports / system.devices_per_node)
    return min(share, span.ranks_per_unit * of_a_rank), min(share, of_a_rank)


LL, LL128, SIMPLE = 0, 1, 2
#: Base latency, and latency per ring step over NVLink and over PCIe, of LL, LL128 and Simple in the cost model of
#: NCCL's tuner.
TUNER_BASE_LATENCY = (6.6 * MICROSECOND, 14.0 * MICROSECOND, 8.4 * MICROSECOND)
TUNER_NVLINK_STEP_LATENCY = (0.6 * MICROSECOND, 1.9 * MICROSECOND, 3.4 * MICROSECOND)
TUNER_PCIE_STEP_LATENCY = (1.0 * MICROSECOND, 2.5 * MICROSECOND, 5.7 * MICROSECOND)
#: Share of the NVLink bandwidth to which the tuner limits LL: 39, 87.7, 141 and 282 GB/s by generation.
_TUNER_LL = {"Volta": 0.26, "Ampere": 0.2923, "Hopper": 0.3133, "Blackwell": 0.3133, "Blackwell Ultra": 0.3133}
#: Generations whose rings of eight ranks change from LL directly to Simple, at the crossing of these two lines of the
#: tuner. From 9 to 46 MB, where the tuner expects LL128 to be faster, they take as long as Simple (NCCL 2.27.5 to
#: 2.29.2 on B200).
_WITHOUT_LL128 = frozenset({"Blackwell", "Blackwell Ultra"})
#: Ratio of the tuner's bus bandwidth to the datasheet's (20 of 25 GB/s a link), and the share of it that LL128 reaches.
TUNER_BUS_BANDWIDTH_SHARE, _TUNER_LL128 = 0.8, 0.92


def tuner_protocol(*, steps: Numeric, wire_time: Numeric, links: GroupLinks) -> npt.NDArray[np.intp]:
    """Return the protocol (LL, LL128 or Simple) that NCCL's tuner expects to be the fastest for a ring.

    LL128 needs NVLink, of generation 4 at most.

    Parameters
    ----------
    steps : array-like
        Steps of the ring.
    wire_time : array-like
        Seconds on the wire at the datasheet's bandwidth.
    links : GroupLinks
        Levels of the network that the group spans.

    Returns
    -------
    ndarray of int
        0 LL, 1 LL128, 2 Simple.

    References
    ----------
    NVIDIA/nccl src/graph/tuning.cc (baseLat, hwLat, llMaxBws), NCCL 2.8 to 2.29.

    Examples
    --------
    >>> switch = GroupLinks((LinkLevel(2.0, 300e9),))
    >>> tuner_protocol(steps=1, wire_time=np.array([1e4, 1e6]) / 300e9, links=switch).tolist()
    [0, 2]
    """
    nvlink = np.asarray(links.is_nvlink)
    shares: tuple[Numeric, ...] = (
        np.where(nvlink, _TUNER_LL.get(links.gpu_architecture, 0.3), 0.5 * TUNER_BUS_BANDWIDTH_SHARE),
        _TUNER_LL128 * TUNER_BUS_BANDWIDTH_SHARE,
        TUNER_BUS_BANDWIDTH_SHARE,
    )
    expected = [
        base + np.where(nvlink, over_nvlink, over_pcie) * np.asarray(steps) + wire_time / share
        for base, over_nvlink, over_pcie, share in zip(
            TUNER_BASE_LATENCY, TUNER_NVLINK_STEP_LATENCY, TUNER_PCIE_STEP_LATENCY, shares, strict=True
        )
    ]
    expected[LL128] = np.where(nvlink & (links.gpu_architecture not in _WITHOUT_LL128), expected[LL128], np.inf)
    return np.asarray(np.argmin(np.stack(np.broadcast_arrays(*expected)), axis=0))


@dataclass(frozen=True, slots=True)
class NcclParameters:
    """Calibrated parameters of NCCL inside one node; the defaults are those of eight A100 behind NVSwitch."""

    launch_time: float = parameter("8 us", "1..100 us", "start and end of the kernel on every rank, without steps")
    ll_hop_time: float = parameter("0.9 us", "0.1..50 us", "one hop of a ring in LL")
    busy_channel_latency_ratio: float = parameter("0.3", "0.02..2", "latency added, relatively, once all channels work")
    ll_fraction: float = parameter("0.27", "0.02..0.6", "share of the link that LL reaches")
    ll128_fraction: float = parameter("0.42", "0.05..1", "share of the link that LL128 reaches")
    simple_launch_time: float = parameter("9 us", "0.1..200 us", "what Simple adds to the launch")
    simple_fence_time: float = parameter("4 us", "0.1..100 us", "what Simple's fences add to a hop")
    simple_fraction: float = parameter("0.78", "0.05..1", "share of the link of Simple")
    time_per_chunk: float = parameter("1.5 us", "1 ns..1000 us", "cost of one more chunk in the pipeline")
    local_copy_time_ratio: float = parameter(
        "0.38", "0.02..3", "copy of a rank's own share to its output, in link times (half for all_reduce)"
    )
    byte_addition_ratio: float = parameter("0.1", "0.002..2", "adding a byte over moving it (int8), in link times")
    switch_fraction: float = parameter("0.63", "0.2..1", "share of the link with NVLink SHARP")
    staging_share_exponent: float = parameter("0.5", "0.05..2.5", "without peer-to-peer, share falls as (ranks/2)^this")
    launch_skew_time: float = parameter("1 ns", "1 ns..200 us", "wait for the last rank to launch, if timed too")


#: Operations in which ranks exchange in pairs.
PAIRWISE_OPERATIONS = ("all_to_all", "send_recv")
#: Payload per rank from which NCCL uses every channel [byte].
_SPREAD_BYTES = 4096.0
#: Fewest ranks for which NCCL uses in-switch reduction inside one node.
MIN_SWITCH_RANKS = 5
#: Hops until the switch's pipeline is full, in addition to one per rank: the part of H100's times that is not
#: proportional to bytes (75 us from 33 MB to 0.5 GB). With it B200's rows of 33 MB imply 860 GB/s for large payloads;
#: 838 were published.
_SWITCH_HOPS = 56.0
#: Largest share of a link that LL fills, as it sends a flag with every word of data.
_LL_LARGEST = 0.5


def intra_node_collective_time(
    operation: str,
    payload_bytes: Numeric,
    traffic: Traffic,
    links: GroupLinks,
    parameters: NcclParameters,
    *,
    low_latency: bool | BoolArray,
    adds_bytes: bool | BoolArray,
) -> Array:
    """Compute the time of the traffic of rings or trees inside one node.

    The time is launch + sqrt(steps² + wire²) with the protocol's step and share of the link. In LL128 steps and wire
    add up. Simple adds its start, the copy of a rank's own share, and the filling of the pipeline. The sum of bytes
    (``adds_bytes``) is slower, as a thread adds fewer than it moves in the same time. In Simple the wire hides that
    except for one rank's share.

    Valid for 2 to 72 ranks in one NVLink domain or PCIe tree, and payloads from 512 B.

    Parameters
    ----------
    operation : str
        Collective operation, such as ``all_reduce``.
    payload_bytes : array-like
        Size of the whole tensor [byte].
    traffic : Traffic
        Steps and bytes of an algorithm, level by level.
    links : GroupLinks
        Levels of the network that the group spans.
    parameters : NcclParameters
        Calibrated parameters of the collective library on these links.
    low_latency : array-like of bool
        True if the library has LL (NCCL 2.1 and later).
    adds_bytes : array-like of bool
        True if the summed elements are bytes.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, step, steps = parameters, links.hop_time(parameters.ll_hop_time), np.asarray(traffic.steps)
    wire = links.datasheet_wire_time(traffic) * _staging_factor(links, p.staging_share_exponent)
    chosen = np.where(low_latency, tuner_protocol(steps=steps, wire_time=wire, links=links), SIMPLE)
    full = 1.0 + p.busy_channel_latency_ratio
    busy = 1.0 + p.busy_channel_latency_ratio * _channel_share(payload_bytes, links)
    sums = p.byte_addition_ratio * np.asarray(traffic.reduced_bytes) * adds_bytes / links.levels[0].bandwidth
    low = p.launch_time * busy + partly_overlapped_time(steps * step * busy, wire / p.ll_fraction + sums)
    middle = p.launch_time * full + steps * step * full + wire / p.ll128_fraction + sums
    moved = wire / p.simple_fraction + _copy_time(operation, payload_bytes, links, p.local_copy_time_ratio)
    moved = moved + sums / np.maximum(links.ranks - 1.0, 1.0)
    hops = partly_overlapped_time(steps * (step * full + p.simple_fence_time), moved)
    simple = p.launch_time * full + p.simple_launch_time + hops + pipeline_fill_time(moved, p.time_per_chunk)
    seconds = np.where(chosen == LL, low, np.where(chosen == LL128, middle, simple))
    return _for_several_ranks(seconds, links, p.launch_skew_time)


def in_switch_collective_time(operation: str, traffic: Traffic, links: GroupLinks, parameters: NcclParameters) -> Array:
    """Compute the time of traffic that the switches of one node add and multicast (NVLink SHARP).

    The time consists of the launch, hops until the pipeline is full, and the wire. S (1 + 1/P) bytes of an all_reduce
    cross a rank's link. The result is limited to the published bus bandwidth, for 2 (P-1)/P S bytes.

    Parameters
    ----------
    operation : str
        Collective operation, such as ``all_reduce``.
    traffic : Traffic
        Steps and bytes of an algorithm, level by level.
    links : GroupLinks
        Levels of the network that the group spans.
    parameters : NcclParameters
        Calibrated parameters of the collective library on these links.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, full = parameters, 1.0 + parameters.busy_channel_latency_ratio
    start = (p.launch_time + (_SWITCH_HOPS + links.ranks) * links.hop_time(p.ll_hop_time)) * full
    wire = links.datasheet_wire_time(traffic) / p.switch_fraction
    if operation == "all_reduce":
        bus = 2.0 * (links.ranks - 1.0) / (links.ranks + 1.0) * traffic.levels[0].wire_bytes
        wire = np.maximum(wire, bus / links.switch_bandwidth)
    return _for_several_ranks(start + wire, links, p.launch_skew_time)


def _for_several_ranks(seconds: Array, links: GroupLinks, skew: float) -> Array:
    """Set the time of a collective to 0 for groups of one rank, and add the launch skew for others [s]."""
    several = links.ranks > 1
    return with_launch_skew(np.where(several, seconds, 0.0), np.where(several, skew, 0.0))


def _channel_share(payload: Numeric, links: GroupLinks) -> Array:
    """Compute the share of NCCL's channels in use: 0 for payloads of one channel, 1 if all channels have work."""
    square = (np.asarray(payload) / (_SPREAD_BYTES * links.ranks)) ** 2
    return np.asarray(square / (1.0 + square))


def _copy_time(operation: str, payload: Numeric, links: GroupLinks, copy: float) -> Array:
    """Compute the time to copy a rank's share from its input to its output buffer [s].

    An all_reduce does half of that along the way.
    """
    half = 0.5 if operation == "all_reduce" else 1.0
    return np.asarray(half * copy * np.asarray(payload) / links.ranks / links.levels[0].bandwidth)


def _staging_factor(links: GroupLinks, power: float) -> Array:
    """Return the slow-down of a hop that passes host memory, without peer-to-peer access.

    Every hop then passes host memory twice, where the paths of all ranks meet.
    """
    return np.where(links.staged_through_host, (links.ranks / 2.0) ** power, 1.0)


#: Channels of sends and receives inside one node, each on a separate multiprocessor ("32 p2p channels" in NCCL's log on
#: eight A100 or H100).
_CHANNELS = 32


@dataclass(frozen=True, slots=True)
class ExchangeParameters:
    """Calibrated parameters of NCCL's all_to_all and send_recv inside one node; defaults: eight A100."""

    launch_time: float = parameter("10 us", "1..100 us", "start and end of the kernel")
    time_per_peer: float = parameter("0.4 us", "0.01..50 us", "one more peer")
    ll_fraction: float = parameter("0.014", "0.002..0.3", "share of the link that LL reaches, per peer")
    simple_launch_time: float = parameter("6 us", "0.1..200 us", "latency of Simple's fences")
    simple_fraction: float = parameter("0.8", "0.05..1", "share of the link of Simple")
    time_per_chunk: float = parameter("1.5 us", "1 ns..1000 us", "cost of one more chunk")
    channel_rate: float = parameter("11 B/cycle", "2..50", "bytes of a channel in a clock of its multiprocessor")
    staging_share_exponent: float = parameter("0.5", "0.05..2.5", "without peer-to-peer, share falls as (ranks/2)^this")


def intra_node_exchange_time(
    payload_bytes: Numeric, traffic: Traffic, links: GroupLinks, parameters: ExchangeParameters
) -> Array:
    """Compute the time of the traffic of an all_to_all or send_recv inside one node.

    A rank sends to all its peers at once, each by a separate channel. LL is used while it is faster, else Simple, whose
    fences the transfer hides. No rank waits for the last rank of a group, as ranks exchange in pairs. The whole payload
    passes `_CHANNELS` multiprocessors, including a rank's own share, which limits the bandwidth of few ranks on a wide
    link: (link⁴ + channels⁴)^¼. A channel moves about as many bytes a clock on Blackwell (11.7) as on Hopper (11.5).

    Parameters
    ----------
    payload_bytes : array-like
        Size of the whole tensor [byte].
    traffic : Traffic
        Steps and bytes of an algorithm, level by level.
    links : GroupLinks
        Levels of the network that the group spans.
    parameters : ExchangeParameters
        Calibrated parameters of the collective library on these links.

    Returns
    -------
    ndarray
        Time [s].
    """
    p = parameters
    peers = np.maximum(np.asarray(traffic.steps), 1.0)
    wire = links.datasheet_wire_time(traffic) * _staging_factor(links, p.staging_share_exponent)
    channels = np.asarray(payload_bytes) / (_CHANNELS * p.channel_rate * links.multiprocessor_clock)
    moved = smooth_maximum(wire / p.simple_fraction, channels)
    low = wire / np.minimum(p.ll_fraction * peers, _LL_LARGEST)
    simple = partly_overlapped_time(p.simple_launch_time, moved) + pipeline_fill_time(moved, p.time_per_chunk)
    seconds = links.hop_time(p.launch_time) + p.time_per_peer * peers + np.maximum(smooth_minimum(low, simple), wire)
    return np.where(links.ranks > 1, seconds, 0.0)
