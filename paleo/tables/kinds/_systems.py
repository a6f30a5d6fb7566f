"""Which system of the catalog a row ran on: by its own name, by what its device usually comes in, by the nodes and the
network that it states."""

from __future__ import annotations

import re
from functools import cache

from paleo.specs.catalog import names
from paleo.specs.device import find_device
from paleo.specs.link import load_link
from paleo.specs.system import System, load_system
from paleo.tables.steps import Row, filled, whole_cell

#: Systems for rows that name a device alone.
DEFAULT_SYSTEMS = {
    "a100-sxm4-40gb": "dgx-a100-40gb",
    "a100-sxm4-80gb": "dgx-a100-80gb",
    "a100-pcie-40gb": "pcie4-8gpu",
    "h100-sxm5-80gb": "dgx-h100",
    "h200-sxm": "dgx-h200",
    "b200": "dgx-b200",
    "v100-sxm2-16gb": "dgx-1-v100",
    "v100-sxm2-32gb": "dgx-1-v100",
}

#: Ethernet links, with their Gb/s, that stand for those of the same kind at other speeds.
TCP, ROCE = ("ethernet-10g-tcp", 10.0), ("ethernet-100g-roce", 100.0)


@cache
def usual_system(device: str) -> str:
    """The system that rows of many such devices most likely mean: the usual one, else the first of the catalog that
    has them, else the device alone."""
    if device in DEFAULT_SYSTEMS:
        return DEFAULT_SYSTEMS[device]
    systems = (name for name in names("systems") if load_system(name).device.name == device)
    return next(systems, device)


def with_device(system: System, row: Row) -> System:
    """The system with the very device of the row: a node comes with 16 GB and with 32 GB cards.

    Tables put a name in parentheses where their authors' catalog lacked the device."""
    device = find_device(str(row["device"]).strip("()"))
    return system if device.name == system.device.name else system.model_copy(update={"device": device})


def system_of(row: Row) -> System:
    """Return the row's system by name, else a server of its device, else the device alone; with the nodes and the
    network that the row states."""
    device, gpus = str(row["device"]), whole_cell(row, "n_gpus", 1)
    usual = DEFAULT_SYSTEMS.get(device, "pcie3-8gpu") if gpus > 1 else device
    system = with_device(load_system(str(row["system"]) if filled(row, "system") else usual), row)
    nodes = whole_cell(row, "nodes", 1)
    return with_network(with_nodes_of(system, -(-gpus // nodes)), row) if nodes > 1 else system


def with_nodes_of(system: System, devices: int) -> System:
    """The system with so many devices in a node, where its own nodes have more (half a server rented)."""
    if not system.levels or devices >= system.devices_per_node:
        return system
    inside = [level for level in system.levels if level.ranks is not None and level.ranks < devices]
    bounded = [
        level for level in system.levels[len(inside) :] if level.ranks and level.ranks <= system.devices_per_node
    ]
    cut = [bounded[0].model_copy(update={"ranks": devices})] if bounded and devices > 1 else []
    beyond = system.levels[len(inside) + len(bounded) :]
    return system.model_copy(update={"levels": (*inside, *cut, *beyond), "devices_per_node": devices})


def with_network(system: System, row: Row) -> System:
    """The system with the Ethernet between its nodes whose speed the row states, one port a node; InfiniBand as it
    is."""
    interconnect = str(row.get("interconnect", ""))
    speed = re.search(r"(\d+) ?Gb(?:/s|ps|it/s|E)", interconnect)
    if not speed or "infiniband" in interconnect.lower() or not system.levels:
        return system
    name, usual = ROCE if re.search(r"(?i)roce|rdma", interconnect) else TCP
    link = load_link(name)
    stated = link.model_copy(update={"bandwidth": link.bandwidth * float(speed.group(1)) / usual})
    outer = system.levels[-1].model_copy(update={"link": stated, "ports": 1})
    return system.model_copy(update={"levels": (*system.levels[:-1], outer)})
