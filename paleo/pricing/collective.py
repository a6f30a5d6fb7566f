"""Seconds of a collective as NCCL and the custom kernels of serving engines carry it out on a real network.

The counts (steps, bytes per level) come from `paleo.collectives`; here they meet launch cost, the latency of a step
and the share of a link that each protocol reaches. Four families of parameters, each fitted per system:

* `NcclParameters`: rings inside one node (NVLink, NVSwitch, PCIe trees);
* `ExchangeParameters`: all_to_all and send_recv inside one node;
* `FabricParameters`: groups that cross nodes, by ring or double binary tree;
* `CustomParameters`: one-shot and two-shot all-reduce kernels, with NCCL above their largest payload.

NCCL has three protocols: LL (flags in the data, lowest latency, about a quarter of the link), LL128 (flags per 128
bytes) and Simple (fences, most of the link, slow to start). Which one runs is not the fastest but the one that NCCL's
tuner expects to be fastest, from constants published in its source; `protocol` follows that rule, so that the jumps of
measured curves stand where they are, and the calibrated parameters give the price of what was chosen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paleo.collectives.base import ALGORITHMS, algorithms_for, ranks_of
from paleo.collectives.traffic import Array, Numeric, Traffic
from paleo.errors import PlanError
from paleo.pricing.alpha_beta import bus_factor
from paleo.pricing.parameters import parameter
from paleo.specs.hardware import Level, Span, System
from paleo.units import GIB, KILO, MICROSECOND

#: As good as no time: parameters are searched by their logarithms [s].
NANOSECOND = MICROSECOND / KILO
#: Link kinds inside a node that are no PCIe tree.
_LIKE_NVLINK = frozenset({"nvlink", "nvswitch", "infinity_fabric", "ici", "ethernet"})


@dataclass(frozen=True, slots=True)
class Network:
    """What a group of ranks finds between its members, by datasheet; every field but the last three broadcasts.

    fan_outs         per level, inner to outer; the last ``fabric_levels`` of them lie between nodes
    bandwidths       of one port of one unit into that level [byte/s]
    ports            ports of that unit which the group may use
    nvlink           the levels inside the node that the group spans are all NVLink, and so have LL128
    staged           neighbours cannot reach each other's memory and go through the host's
    fabric_levels    how many of the levels lie between nodes
    generation       of the device, for the constants of NCCL's tuner
    switch_reduces   the inner level's switches add and multicast (NVLink SHARP)
    """

    fan_outs: tuple[Numeric, ...]
    bandwidths: tuple[Numeric, ...]
    ports: tuple[Numeric, ...]
    nvlink: bool | npt.NDArray[np.bool_] = True
    staged: bool | npt.NDArray[np.bool_] = False
    fabric_levels: int = 0
    generation: str = "Ampere"
    switch_reduces: bool = False

    @property
    def ranks(self) -> Array:
        """Ranks of the group."""
        return ranks_of(tuple(np.asarray(one, dtype=np.float64) for one in self.fan_outs))

    @property
    def nodes(self) -> Array:
        """Nodes that the group spans."""
        outer = self.fan_outs[len(self.fan_outs) - self.fabric_levels :]
        return ranks_of(tuple(np.asarray(one, dtype=np.float64) for one in outer))

    @property
    def rank_bandwidth(self) -> Array:
        """Of one rank into the innermost level [byte/s]."""
        return np.asarray(self.bandwidths[0]) * self.ports[0]

    def wire_time(self, traffic: Traffic, levels: slice = slice(None)) -> Array:
        """Seconds of the slowest of some levels at the datasheet's bandwidth."""
        slowest = np.zeros(())
        for index in range(len(self.fan_outs))[levels]:
            bandwidth = np.asarray(self.bandwidths[index]) * self.ports[index]
            slowest = np.maximum(slowest, traffic.level(index).wire_bytes / bandwidth)
        return np.asarray(slowest)


def network(system: System, *, stride: int, size: int) -> Network:
    """The network of ``size`` ranks, ``stride`` apart, of a system whose other ranks form groups of the same kind.

    >>> from paleo.specs.hardware import load_system
    >>> two_nodes = network(load_system("dgx-a100-80gb"), stride=1, size=16)
    >>> two_nodes.fan_outs, two_nodes.ports, two_nodes.fabric_levels
    ((8.0, 2.0), (1.0, 8.0), 1)
    """
    return _network(system, system.group(stride, size))


def network_across(system: System, *, ranks: int, ranks_per_node: int) -> Network:
    """The network of a group with ``ranks_per_node`` neighbours in each of its nodes, alone on the system."""
    inside = min(ranks, ranks_per_node)
    spans, nodes = list(system.group(1, inside)), -(-ranks // inside)
    outer = [index for index, span in enumerate(spans) if _between_nodes(system, span.level)]
    if nodes > 1 and not outer:
        raise PlanError(f"system {system.name} has no network between nodes, and {ranks} ranks need {nodes} nodes")
    if nodes > 1:
        spans[outer[0]] = Span(spans[outer[0]].level, nodes, inside, 1)
    return _network(system, spans)


def stack_networks(networks: Sequence[Network], index: npt.NDArray[np.intp]) -> Network:
    """Networks of one system side by side: row i of the result is ``networks[index[i]]``."""

    def rows(values: Sequence[tuple[Numeric, ...]]) -> tuple[Array, ...]:
        return tuple(np.asarray(level, dtype=np.float64)[index] for level in zip(*values, strict=True))

    return dataclasses.replace(
        networks[0],
        fan_outs=rows([one.fan_outs for one in networks]),
        bandwidths=rows([one.bandwidths for one in networks]),
        ports=rows([one.ports for one in networks]),
        nvlink=np.asarray([one.nvlink for one in networks], dtype=np.bool_)[index],
        staged=np.asarray([one.staged for one in networks], dtype=np.bool_)[index],
    )


def _between_nodes(system: System, level: Level) -> bool:
    return level.ranks is None or level.ranks > system.devices_per_node


def _network(system: System, spans: Sequence[Span]) -> Network:
    if not spans:
        raise PlanError(f"system {system.name} has no links, so its devices cannot talk to one another")
    fabric = [_between_nodes(system, span.level) for span in spans]
    inner = [span.level for span, outside in zip(spans, fabric, strict=True) if not outside and span.fan_out > 1]
    return Network(
        fan_outs=tuple(float(span.fan_out) for span in spans),
        bandwidths=tuple(span.level.link.bandwidth for span in spans),
        ports=tuple(_usable_ports(system, span, outside) for span, outside in zip(spans, fabric, strict=True)),
        nvlink=all(level.link.kind in _LIKE_NVLINK for level in inner),
        staged=bool(inner) and not spans[0].level.peer_to_peer,
        fabric_levels=sum(fabric),
        generation=system.device.architecture,
        switch_reduces=not fabric[0] and spans[0].level.in_switch_reduction,
    )


def link_kind(system: System) -> str:
    """What joins the devices of a node, as calibrations tell systems apart: nvlink, pcie, or none.

    >>> from paleo.specs.hardware import load_system
    >>> link_kind(load_system("dgx-h100")), link_kind(load_system("deepbench-8gpu-dual-root"))
    ('nvlink', 'pcie')
    """
    if not system.levels or _between_nodes(system, system.levels[0]):
        return "none"
    return "nvlink" if system.levels[0].link.kind in _LIKE_NVLINK else "pcie"


def _usable_ports(system: System, span: Span, outside: bool) -> float:
    """Ports of one unit for this group: its share of them, and no more than its rings reach.

    A rank drives its own NIC (or its share of the node's, at least one), so a lone rank of a node of eight does not
    fill eight NICs. Rings of a PCIe tree all turn the same way, and leave a unit through one slot.
    """
    share = span.level.ports / span.groups_sharing
    if not outside:
        return min(share, 1.0) if span.level.link.kind in ("pcie", "qpi") else share
    return min(share, span.members_below * max(1.0, span.level.ports / system.devices_per_node))


# --- NCCL's choice of a protocol -------------------------------------------------------------------------------------

LL, LL128, SIMPLE = 0, 1, 2
#: Base latency, and latency per ring step over NVLink and over PCIe, that NCCL's tuner expects of LL, LL128 and Simple.
_TUNER_BASE = (6.6 * MICROSECOND, 14.0 * MICROSECOND, 8.4 * MICROSECOND)
_TUNER_NVLINK_STEP = (0.6 * MICROSECOND, 1.9 * MICROSECOND, 3.4 * MICROSECOND)
_TUNER_PCIE_STEP = (1.0 * MICROSECOND, 2.5 * MICROSECOND, 5.7 * MICROSECOND)
#: Share of the NVLink bandwidth at which the tuner caps LL: 39, 87.7, 141 and 282 GB/s by generation.
_TUNER_LL = {"Volta": 0.26, "Ampere": 0.2923, "Hopper": 0.3133, "Blackwell": 0.3133}
#: The tuner's bus bandwidth over the datasheet's (20 of 25 GB/s a link), and what LL128 leaves of it.
_TUNER_BUS, _TUNER_LL128 = 0.8, 0.92


def protocol(*, steps: Numeric, wire_time: Numeric, network: Network) -> npt.NDArray[np.intp]:
    """The protocol of a ring (0 LL, 1 LL128, 2 Simple) that NCCL's tuner takes for the fastest.

    ``wire_time`` is the time on the wire at the datasheet's bandwidth [s]. LL128 needs NVLink.

    Source: NVIDIA/nccl src/graph/tuning.cc (baseLat, hwLat, llMaxBws), NCCL 2.8 to 2.29.

    >>> switch = Network(fan_outs=(2.0,), bandwidths=(300e9,), ports=(1.0,))
    >>> protocol(steps=1, wire_time=np.array([1e4, 1e6]) / 300e9, network=switch).tolist()
    [0, 2]
    """
    nvlink = np.asarray(network.nvlink)
    shares: tuple[Numeric, ...] = (
        np.where(nvlink, _TUNER_LL.get(network.generation, 0.3), 0.5 * _TUNER_BUS),
        _TUNER_LL128 * _TUNER_BUS,
        _TUNER_BUS,
    )
    expected = [
        base + np.where(nvlink, over_nvlink, over_pcie) * np.asarray(steps) + wire_time / share
        for base, over_nvlink, over_pcie, share in zip(
            _TUNER_BASE, _TUNER_NVLINK_STEP, _TUNER_PCIE_STEP, shares, strict=True
        )
    ]
    expected[LL128] = np.where(nvlink, expected[LL128], np.inf)
    return np.asarray(np.argmin(np.stack(np.broadcast_arrays(*expected)), axis=0))


def hidden(latency: Numeric, transfer: Numeric) -> Array:
    """Latency of steps and transfer that overlap in part, as in a pipeline: the root of the sum of their squares [s].

    >>> float(hidden(3.0, 4.0))
    5.0
    """
    return np.asarray(np.hypot(latency, transfer))


def fill_time(transfer: Numeric, chunk_cost: Numeric) -> Array:
    """What filling a pipeline adds when its chunks are cut as well as can be: 2 sqrt(transfer x chunk_cost) [s].

    n chunks cost n chunk_cost + transfer / n on top of the transfer; the best n makes both alike.

    >>> float(fill_time(16.0, 1.0))
    8.0

    Reference: Sanders, Speck and Traff, Parallel Computing 35(12), 2009, section 2 (optimal pipelining).
    """
    return np.asarray(2.0 * np.sqrt(np.asarray(transfer) * chunk_cost))


# --- inside a node ---------------------------------------------------------------------------------------------------


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
_SWITCH_RANKS = 5
#: How strongly the larger of a launch skew and the kernel itself prevails.
_SKEW_NORM = 4.0


def nccl_time(
    *,
    operation: str,
    payload_bytes: Numeric,
    network: Network,
    parameters: NcclParameters,
    switch_can_add: bool | npt.NDArray[np.bool_] = True,
    low_latency: bool | npt.NDArray[np.bool_] = True,
) -> Array:
    """Seconds of an all_reduce, reduce_scatter, all_gather or broadcast inside one node.

    Ring: launch + hidden(steps, wire) with the protocol's step and share of the link; Simple adds its start, the copy
    of a rank's own share and the filling of the pipeline. ``switch_can_add`` says whether the switches can add this
    dtype (they have no int8), ``low_latency`` whether the library has LL (NCCL 2.1 and later).

    Holds for 2..72 ranks in one NVLink domain or PCIe tree, 512 B and up.
    """
    name = "ring" if operation != "broadcast" else "double_tree"
    traffic = ALGORITHMS[name].traffic(operation, payload_bytes, network.fan_outs)
    time = _ring_time(operation, payload_bytes, traffic, network, parameters, low_latency)
    if operation == "all_reduce" and network.switch_reduces:
        by_switch = _switch_time(payload_bytes, network, parameters)
        usable = np.logical_and(switch_can_add, network.ranks >= _SWITCH_RANKS)
        time = np.where(usable, np.minimum(time, by_switch), time)
    several = network.ranks > 1
    return _with_skew(np.where(several, time, 0.0), np.where(several, parameters.skew, 0.0))


def _ring_time(
    operation: str,
    payload: Numeric,
    traffic: Traffic,
    net: Network,
    p: NcclParameters,
    low_latency: bool | npt.NDArray[np.bool_],
) -> Array:
    steps, wire = np.asarray(traffic.steps), net.wire_time(traffic) * _staging(net, p.staging_power)
    chosen = np.where(low_latency, protocol(steps=steps, wire_time=wire, network=net), SIMPLE)
    full = 1.0 + p.spread
    busy = 1.0 + p.spread * _all_channels(payload, net)
    low = p.launch * busy + hidden(steps * p.step * busy, wire / p.ll_fraction)
    middle = p.launch * full + hidden(steps * p.step * full, wire / p.ll128_fraction)
    moved = wire / p.simple_fraction + _copy_time(operation, payload, net, p.copy)
    simple = p.launch * full + p.simple_start + hidden(steps * (p.step * full + p.simple_step), moved)
    simple = simple + fill_time(moved, p.fill)
    return np.where(chosen == LL, low, np.where(chosen == LL128, middle, simple))


def _all_channels(payload: Numeric, net: Network) -> Array:
    """0 for payloads that one channel carries, towards 1 when all of them have work."""
    square = (np.asarray(payload) / (_SPREAD_BYTES * net.ranks)) ** 2
    return np.asarray(square / (1.0 + square))


def _copy_time(operation: str, payload: Numeric, net: Network, copy: float) -> Array:
    """A rank's own share goes from its input to its output buffer; an all_reduce does half of that in passing."""
    half = 0.5 if operation == "all_reduce" else 1.0
    return np.asarray(half * copy * np.asarray(payload) / net.ranks / net.rank_bandwidth)


def _switch_time(payload: Numeric, net: Network, p: NcclParameters) -> Array:
    traffic = ALGORITHMS["in_switch"].traffic("all_reduce", payload, net.fan_outs)
    moved = net.wire_time(traffic) / p.switch_fraction
    start = p.launch * (1.0 + p.spread) + p.simple_start + traffic.steps * p.simple_step + net.ranks * p.step
    return np.asarray(start + moved + fill_time(moved, p.fill))


def _staging(net: Network, power: float) -> Array:
    """Without peer-to-peer every hop passes host memory twice, where the paths of all ranks meet."""
    return np.where(net.staged, (net.ranks / 2.0) ** power, 1.0)


def softly_least(first: Numeric, second: Numeric, norm: float = 6.0) -> Array:
    """A minimum that rounds the corner where both are alike: (x^-n + y^-n)^(-1/n).

    >>> round(float(softly_least(1.0, 10.0)), 6)
    1.0
    """
    least = np.minimum(first, second)
    ratio = least / np.maximum(np.maximum(first, second), np.finfo(np.float64).tiny)
    return np.asarray(least * (1.0 + ratio**norm) ** (-1.0 / norm))


def _with_skew(time: Array, skew: Numeric) -> Array:
    """A kernel cannot end before the last rank has begun: the larger of both, softly."""
    larger = np.maximum(np.maximum(time, skew), np.finfo(np.float64).tiny)
    return np.asarray(larger * ((time / larger) ** _SKEW_NORM + (skew / larger) ** _SKEW_NORM) ** (1.0 / _SKEW_NORM))


# --- exchanges inside a node -----------------------------------------------------------------------------------------


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


def exchange_time(*, operation: str, payload_bytes: Numeric, network: Network, parameters: ExchangeParameters) -> Array:
    """Seconds of an all_to_all or send_recv inside one node.

    A rank sends to all its peers at once, each by a channel of its own: in LL while that is faster, else in Simple,
    whose fences hide behind the transfer. Nobody waits for the last rank of a group, as only pairs meet.
    """
    p, net = parameters, network
    name = "pairwise" if operation == "all_to_all" else "point_to_point"
    traffic = ALGORITHMS[name].traffic(operation, payload_bytes, net.fan_outs)
    peers = np.maximum(net.ranks - 1.0 if operation == "all_to_all" else 1.0, 1.0)
    wire = net.wire_time(traffic) * _staging(net, p.staging_power)
    moved = wire / p.fraction
    if operation == "all_to_all":
        moved = moved + _copy_time(operation, payload_bytes, net, p.copy)
    low = wire / (p.low_fraction * peers)
    simple = hidden(p.start, moved) + fill_time(moved, p.fill)
    return np.where(net.ranks > 1, p.launch + p.peer * peers + softly_least(low, simple), 0.0)


# --- between nodes ---------------------------------------------------------------------------------------------------


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
        4 * MICROSECOND, low=0.5 * MICROSECOND, high=500 * MICROSECOND, unit="s", meaning="one hop between nodes in LL"
    )
    simple_start: float = parameter(
        10 * MICROSECOND,
        low=0.1 * MICROSECOND,
        high=1000 * MICROSECOND,
        unit="s",
        meaning="what Simple adds to the launch",
    )
    simple_step: float = parameter(
        10 * MICROSECOND,
        low=0.5 * MICROSECOND,
        high=1000 * MICROSECOND,
        unit="s",
        meaning="what Simple adds to a fabric hop",
    )
    inner_fraction: float = parameter(0.75, low=0.05, high=1.0, unit="1", meaning="share of the link inside a node")
    fabric_fraction: float = parameter(0.9, low=0.05, high=1.0, unit="1", meaning="share of a NIC with Simple")
    low_fraction: float = parameter(0.4, low=0.02, high=0.6, unit="1", meaning="share of a NIC with LL")
    rail_power: float = parameter(
        1.0, low=0.2, high=1.0, unit="1", meaning="node bandwidth grows with the NICs in use to this power"
    )
    fill: float = parameter(
        1 * MICROSECOND,
        low=NANOSECOND,
        high=1000 * MICROSECOND,
        unit="s",
        meaning="cost of one more chunk, per fabric hop",
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
    launch=30 * MICROSECOND, fabric_step=30 * MICROSECOND, simple_step=30 * MICROSECOND, fabric_fraction=0.72
)


def fabric_defaults(system: System) -> FabricParameters:
    """Parameters of a fabric that nobody measured: by its link, sockets or remote memory access.

    InfiniBand and the like: 0.9 of a NIC (365 of 400 GB/s on p5en, links.csv) and the step latencies of NCCL's tuner.
    """
    outer = [level.link for level in system.levels if _between_nodes(system, level)]
    sockets = bool(outer) and outer[0].kind == "ethernet" and "roce" not in outer[0].name.lower()
    return SOCKETS if sockets else FabricParameters()


#: Algorithms that NCCL has between nodes, per operation.
_BETWEEN_NODES = {
    "all_reduce": ("ring", "double_tree"),
    "reduce_scatter": ("ring",),
    "all_gather": ("ring",),
    "broadcast": ("ring",),
    "all_to_all": ("pairwise",),
    "send_recv": ("point_to_point",),
}


def fabric_time(*, operation: str, payload_bytes: Numeric, network: Network, parameters: FabricParameters) -> Array:
    """Seconds of a collective that crosses nodes: the fastest of NCCL's algorithms in LL or Simple.

    Steps inside and between nodes add; so do step latency and transfer where they cannot overlap (`hidden`); the slower
    of the node's inside and its NICs sets the bandwidth. NICs that the group uses: see `network`.
    """
    algorithms_for(operation)
    times: list[Array] = []
    for name in _BETWEEN_NODES[operation]:
        traffic = ALGORITHMS[name].traffic(operation, payload_bytes, network.fan_outs)
        times.extend(_over_fabric(traffic, network, parameters))
    fastest = np.min(np.stack(np.broadcast_arrays(*times)), axis=0)
    return _with_skew(np.asarray(fastest), 0.0 if operation == "send_recv" else parameters.skew)


def _over_fabric(traffic: Traffic, net: Network, p: FabricParameters) -> tuple[Array, Array]:
    inner = len(net.fan_outs) - net.fabric_levels
    hops_in = sum((np.asarray(traffic.level(i).steps) for i in range(inner)), np.zeros(()))
    hops_out = sum((np.asarray(traffic.level(i).steps) for i in range(inner, len(net.fan_outs))), np.zeros(()))
    wire_in = net.wire_time(traffic, slice(0, inner)) / p.inner_fraction
    rails = np.asarray(net.ports[-1])
    wire_out = net.wire_time(traffic, slice(inner, None)) * rails ** (1.0 - p.rail_power)
    slow_wire = np.maximum(2.0 * wire_in, wire_out / p.low_fraction)
    fast_wire = np.maximum(wire_in, wire_out / p.fabric_fraction)
    low = p.launch + hidden(p.step * hops_in + p.fabric_step * hops_out, slow_wire)
    simple_hops = p.step * hops_in + (p.fabric_step + p.simple_step) * hops_out
    simple = p.launch + p.simple_start + hidden(simple_hops, fast_wire)
    chunk = p.fill * hops_out
    return low + fill_time(slow_wire, chunk), simple + fill_time(fast_wire, chunk)


# --- custom all-reduce kernels ---------------------------------------------------------------------------------------


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
    turn: float = parameter(
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


def custom_time(*, payload_bytes: Numeric, network: Network, parameters: CustomParameters) -> Array:
    """Seconds of a custom all-reduce: one-shot, two-shot or, above the largest payload, NCCL.

    One-shot: every rank reads all other buffers, (P-1) S over its link. Two-shot: reduce-scatter and all-gather,
    2 (P-1)/P S, after one more barrier; from 2 MiB over P on, when P > 2 (vLLM, SGLang).
    A call outside a graph lasts at least as long as the host needs.
    """
    p, payload, ranks = parameters, np.asarray(payload_bytes, dtype=np.float64), network.ranks
    wire = bus_factor("all_reduce", ranks) * payload / network.rank_bandwidth
    start = p.launch + p.peer * ranks
    one_shot = start + wire * ranks / 2.0 / p.one_shot_fraction
    two_shot = start + p.two_shot + wire / p.two_shot_fraction
    kernel = np.where(np.logical_and(payload * ranks >= p.turn, ranks > 2), two_shot, one_shot)
    time = np.where(payload <= p.largest, kernel, _ring_beyond(payload, wire, network, p))
    return _with_skew(np.where(ranks > 1, time, 0.0), p.host)


def _ring_beyond(payload: Array, wire: Array, net: Network, p: CustomParameters) -> Array:
    own = 0.5 * p.copy * payload / net.ranks / net.rank_bandwidth
    moved = wire / p.ring_fraction + own
    time = p.ring_start + hidden(2.0 * (net.ranks - 1.0) * p.ring_step, moved) + fill_time(moved, p.fill)
    if not net.switch_reduces:
        return np.asarray(time)
    traffic = ALGORITHMS["in_switch"].traffic("all_reduce", payload, net.fan_outs)
    switch = net.wire_time(traffic) / p.switch_fraction
    by_switch = p.ring_start + net.ranks * p.ring_step + switch + fill_time(switch, p.fill)
    return np.where(net.ranks >= _SWITCH_RANKS, np.minimum(time, by_switch), time)


# --- any group -------------------------------------------------------------------------------------------------------


def collective_time(
    *,
    operation: str,
    payload_bytes: Numeric,
    network: Network,
    inside: NcclParameters,
    exchange: ExchangeParameters,
    between: FabricParameters,
    switch_can_add: bool = True,
) -> Array:
    """Seconds of an NCCL collective over any group: inside a node or across nodes, as the network says.

    >>> link = Network(fan_outs=(8.0,), bandwidths=(300e9,), ports=(1.0,))
    >>> t = collective_time(operation="all_reduce", payload_bytes=2.0**29, network=link,
    ...                     inside=NcclParameters(), exchange=ExchangeParameters(), between=FabricParameters())
    >>> 0.0035 < float(t) < 0.0045
    True
    """
    crosses = network.nodes > 1
    if np.any(crosses):
        across = fabric_time(operation=operation, payload_bytes=payload_bytes, network=network, parameters=between)
        if np.all(crosses):
            return across
    if operation in EXCHANGES:
        within = exchange_time(operation=operation, payload_bytes=payload_bytes, network=network, parameters=exchange)
    else:
        within = nccl_time(
            operation=operation,
            payload_bytes=payload_bytes,
            network=network,
            parameters=inside,
            switch_can_add=switch_can_add,
        )
    return np.where(crosses, across, within) if np.any(crosses) else within
