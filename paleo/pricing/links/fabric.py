"""Seconds of any traffic that crosses nodes, as NCCL carries it out over NICs and the network between nodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paleo.collectives.traffic import Array, Traffic
from paleo.pricing.links.group import GroupLinks, between_nodes
from paleo.pricing.links.transfer import NANOSECOND, fill_time, hidden, with_skew
from paleo.pricing.parameters import parameter
from paleo.specs.hardware import System
from paleo.units import MICROSECOND


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
    outer = [level.link for level in system.levels if between_nodes(system, level)]
    sockets = bool(outer) and outer[0].kind == "ethernet" and "roce" not in outer[0].name.lower()
    return SOCKETS if sockets else FabricParameters()


def fabric_time(*, operation: str, traffic: Traffic, links: GroupLinks, parameters: FabricParameters) -> Array:
    """Seconds of a traffic that crosses nodes: the faster of LL and Simple.

    Steps inside and between nodes add; so do step latency and transfer where they cannot overlap (`hidden`); the slower
    of the node's inside and its NICs sets the bandwidth. NICs that the group uses: see `group_links`.
    """
    low, simple = _over_fabric(traffic, links, parameters)
    return with_skew(np.minimum(low, simple), 0.0 if operation == "send_recv" else parameters.skew)


def _over_fabric(traffic: Traffic, links: GroupLinks, p: FabricParameters) -> tuple[Array, Array]:
    inner = links.inner_levels
    hops_in = sum((np.asarray(traffic.level(i).steps) for i in range(inner)), np.zeros(()))
    hops_out = sum((np.asarray(traffic.level(i).steps) for i in range(inner, len(links.fan_outs))), np.zeros(()))
    slow_wire, fast_wire = np.zeros(()), np.zeros(())
    for phase in traffic.phases:
        wire_in, wire_out = _wires(Traffic((phase,)), links, p)
        slow_wire = slow_wire + np.maximum(2.0 * wire_in, wire_out / p.low_fraction)
        fast_wire = fast_wire + np.maximum(wire_in, wire_out / p.fabric_fraction)
    low = p.launch + hidden(p.step * hops_in + p.fabric_step * hops_out, slow_wire)
    simple_hops = p.step * hops_in + (p.fabric_step + p.simple_step) * hops_out
    simple = p.launch + p.simple_start + hidden(simple_hops, fast_wire)
    chunk = p.fill * hops_out
    return low + fill_time(slow_wire, chunk), simple + fill_time(fast_wire, chunk)


def _wires(traffic: Traffic, links: GroupLinks, p: FabricParameters) -> tuple[Array, Array]:
    """Seconds on the links inside a node, at the share that they reach, and on the NICs by datasheet."""
    inner = links.inner_levels
    rails = np.asarray(links.ports[-1])
    wire_out = links.wire_time(traffic, slice(inner, None)) * rails ** (1.0 - p.rail_power)
    return links.wire_time(traffic, slice(0, inner)) / p.inner_fraction, np.asarray(wire_out)
