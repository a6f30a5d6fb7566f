"""Schema of systems: nodes of devices, interconnect levels between them, and the part of a level that a group uses.

Bandwidth is per direction, as in datasheets, with sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paleo.errors import PlanError, SpecError
from paleo.specs.catalog import entry_files, is_path, kind_of_spec_file, merge_inline_entry, read_entry
from paleo.specs.device import Device, Link, Price, add_default_names, load_device, load_link
from paleo.specs.loading import (
    UNKNOWN_SOURCE,
    FileCache,
    NonEmptyText,
    PositiveCount,
    Spec,
    StrictBool,
    Year,
    add_path_key,
    path_in_folder,
    validate_mapping,
)
from paleo.units import Bytes, BytesPerSecond, FailuresPerSecond, with_noun


class InterconnectLevel(Spec):
    """One interconnect level of a system: members (GPUs, nodes or racks) joined by one kind of link.

    Parameters
    ----------
    ranks
        devices in one unit of this level; null on the outermost level: no limit
    ports
        links that one unit of the level below has into this level: 1 for a GPU below an NVSwitch, the number of
        NICs for a node, the links of a chip in a mesh (all pairs joined directly) or a torus
    rings
        of a mesh with unequal connections, the number of disjoint rings that a group with 1, 2, … neighbours can
        form
    shape
        units of a torus along each dimension
    wrap
        a dimension of that many units, or a multiple of it, closes into a ring; null: none does
    leaf
        units below one leaf switch; of a dragonfly, units of a group
    oversubscription
        ports of a leaf switch to the units below, over its ports to the switches above
    routing
        how flows are spread over the ports above a leaf; rail: each port of a node is connected to a switch of its
        own
    global_links
        of a dragonfly, links between each pair of groups
    in_switch_reduction
        whether switches add and multicast data (SHARP)
    peer_to_peer
        whether devices access each other's memory without the host
    assumed
        values of this level that no source states
    """

    name: NonEmptyText
    ranks: PositiveCount | None
    link: Link
    topology: Literal["switch", "mesh", "ring", "pcie-tree", "torus", "dragonfly", "fabric"]
    ports: PositiveCount = 1
    rings: tuple[Annotated[float, Field(ge=0)], ...] | None = None
    shape: Annotated[tuple[PositiveCount, ...], Field(min_length=2, max_length=3)] | None = None
    wrap: PositiveCount | None = None
    leaf: PositiveCount | None = None
    oversubscription: Annotated[float, Field(ge=1)] = 1.0
    routing: Literal["ecmp", "adaptive", "rail", "minimal", "valiant"] | None = None
    global_links: PositiveCount | None = None
    in_switch_reduction: StrictBool = False
    peer_to_peer: StrictBool = True
    assumed: NonEmptyText | None = None
    notes: NonEmptyText | None = None
    source: NonEmptyText | None = None

    @model_validator(mode="after")
    def _rings_are_those_of_a_mesh(self) -> InterconnectLevel:
        if self.rings is not None and (self.topology != "mesh" or len(self.rings) != self.ranks):
            raise SpecError(f"rings: expected a mesh, and a number for each of 1 to {self.ranks} neighbours")
        return self

    @model_validator(mode="after")
    def _routing_is_that_of_the_topology(self) -> InterconnectLevel:
        is_dragonfly = self.topology == "dragonfly"
        if self.global_links is not None and not is_dragonfly:
            raise SpecError(f"global_links: only a dragonfly has them, and topology is {self.topology!r}")
        allowed = ("adaptive", "minimal", "valiant") if is_dragonfly else ("ecmp", "adaptive", "rail")
        if self.routing is not None and self.routing not in allowed:
            raise SpecError(
                f"routing: {self.routing!r} is none of {', '.join(allowed)}, with topology {self.topology!r}"
            )
        return self

    @model_validator(mode="after")
    def _shape_is_that_of_a_torus(self) -> InterconnectLevel:
        if self.shape is not None and self.topology != "torus":
            raise SpecError(f"shape: only a torus has one, and topology is {self.topology!r}")
        if self.shape is not None and self.ports != 2 * len(self.shape):
            raise SpecError(f"ports: a chip of a torus of {len(self.shape)} dimensions has {2 * len(self.shape)} links")
        return self

    @property
    def member_bandwidth(self) -> float:
        """Datasheet bandwidth from one member (GPU, node or rack) into this level, over all its ports [byte/s]."""
        return self.ports * self.link.bandwidth


class Host(Spec):
    """Host computer of one node, with all CPU sockets; bandwidths are datasheet values."""

    cpu: NonEmptyText | None = None
    sockets: PositiveCount | None = None
    cores: PositiveCount | None = None
    memory: Bytes | None = None
    memory_bandwidth: BytesPerSecond | None = None
    storage_bandwidth: BytesPerSecond | None = None
    source: NonEmptyText = UNKNOWN_SOURCE


class Reliability(Spec):
    """Failure rate of one node: hardware or software failures that end a job [1/s].

    ``low`` and ``high`` bound 90 % of clusters of this kind. Files give failures per node-day or per thousand
    node-days: ``4/knodeday``.
    """

    failures: FailuresPerSecond
    low: FailuresPerSecond
    high: FailuresPerSecond
    source: NonEmptyText

    @model_validator(mode="after")
    def _range_holds_the_rate(self) -> Reliability:
        if not self.low <= self.failures <= self.high:
            raise SpecError("low: expected low <= failures <= high")
        return self


@dataclass(frozen=True, slots=True)
class GroupLevel:
    """Part of one interconnect level that a communication group (the ranks of one collective) uses.

    ``fan_out`` is the number of units of the level below that hold ranks of the group, within one unit of this level.
    ``ranks_per_unit`` is the number of ranks of the group in one such unit. ``groups_per_unit`` is the number of groups
    of the same kind, including this one, whose ranks share that unit and its ports. ``max_fan_out`` is the number of
    units of the level below in one unit of this level (0: not limited).
    """

    level: InterconnectLevel
    fan_out: int
    ranks_per_unit: int
    groups_per_unit: int
    max_fan_out: int = 0

    @property
    def bandwidth(self) -> float:
        """Bandwidth into this level of the group's ranks in one unit, while other groups send too [byte/s]."""
        return self.level.member_bandwidth / self.groups_per_unit


class System(Spec):
    """Cluster of nodes with one kind of device, and the interconnect levels between devices from inner to outer.

    Ranks are numbered consecutively, innermost level first. ``price_per_node`` is for all devices of a node.
    ``devices_per_host`` is the number of devices in one host if an NVLink domain joins several hosts. ``reliability``
    is the failure rate of nodes, if known; `paleo.specs.prices` estimates the rate of other systems.
    """

    name: NonEmptyText
    full_name: NonEmptyText
    year: Year | None = None
    device: Device
    devices_per_node: PositiveCount
    devices_per_host: PositiveCount | None = None
    max_nodes: PositiveCount | None = None
    levels: tuple[InterconnectLevel, ...] = ()
    host: Host | None = None
    price_per_node: Price | None = None
    reliability: Reliability | None = None
    notes: NonEmptyText | None = None
    source: NonEmptyText = UNKNOWN_SOURCE
    #: Path of the file of the system or of its single device; '' for an entry of the catalog.
    path: Annotated[str, Field(exclude=True)] = ""

    @property
    def catalog_name_or_path(self) -> str:
        """Text by which a command finds the system: its catalog name, or the path of its file."""
        return self.path or self.name

    @model_validator(mode="after")
    def _levels_nest(self) -> System:
        inner = 1
        for index, level in enumerate(self.levels):
            outermost = index == len(self.levels) - 1
            if level.ranks is None:
                if not outermost:
                    raise SpecError(f"levels[{index}].ranks: only the outermost level may be unlimited")
            elif level.ranks <= inner or level.ranks % inner:
                raise SpecError(
                    f"levels[{index}].ranks: {level.ranks} is not a multiple of the {inner} of the level below; it "
                    f"counts all devices that the level joins, {2 * inner} for two groups of {inner}"
                )
            inner = level.ranks or inner
        if self.devices_per_node not in {1, *(level.ranks for level in self.levels)} and not self._torus_of_nodes:
            raise SpecError(
                f"devices_per_node: no level has {self.devices_per_node} ranks; a node must be one of the levels"
            )
        return self

    @property
    def _torus_of_nodes(self) -> bool:
        """True if a torus joins the chips directly, so that nodes are only the hosts of the chips."""
        extents = [level.ranks for level in self.levels if level.shape is not None]
        return bool(extents) and extents[0] is not None and extents[0] % self.devices_per_node == 0

    @property
    def max_devices(self) -> int | None:
        """Number of devices that the system can have, or None if not limited."""
        if self.max_nodes is not None:
            return self.max_nodes * self.devices_per_node
        return self.levels[-1].ranks if self.levels else 1

    def is_inter_node_level(self, level: InterconnectLevel) -> bool:
        """Return True if an interconnect level is the network between nodes.

        A torus is not, because it joins chips directly, whatever hosts they belong to.

        Parameters
        ----------
        level : InterconnectLevel
            Level of the system.

        Returns
        -------
        bool
            True for the network between nodes.
        """
        return (level.ranks is None or level.ranks > self.devices_per_node) and level.topology != "torus"

    def gpus_and_nodes_text(self, gpus: int) -> str:
        """Return a text that says how many GPUs and nodes of this system a run uses.

        Parameters
        ----------
        gpus : int
            Number of GPUs.

        Returns
        -------
        str
            For example ``16 GPUs of dgx-h100 (2 nodes)``.
        """
        node_size, whole = self.devices_per_node, gpus % self.devices_per_node == 0
        nodes = (
            with_noun(math.ceil(gpus / node_size), "node") if whole or gpus > node_size else f"of {node_size} in a node"
        )
        return f"{with_noun(gpus, 'GPU')} of {self.name}" + (f" ({nodes})" if node_size > 1 else "")

    def group_levels(self, stride: int, size: int) -> tuple[GroupLevel, ...]:
        """Return the part of each interconnect level that a communication group uses, from inner to outer.

        The product of the fan-outs is `size`. Where a level does not divide evenly, its fan-out is rounded up, because
        the fullest unit is the slowest (12 ranks on nodes of 8 have fan-outs 8 and 2).

        Parameters
        ----------
        stride : int
            Distance between neighbouring ranks of the group.
        size : int
            Number of ranks of the group.

        Returns
        -------
        tuple of GroupLevel
            One entry for each level.

        Raises
        ------
        PlanError
            If the system has fewer ranks.

        Examples
        --------
        >>> node = load_system("dgx-a100-80gb")
        >>> [(span.level.name, span.fan_out, span.groups_per_unit) for span in node.group_levels(stride=1, size=16)]
        [('NVSwitch', 8, 1), ('fabric', 2, 1)]
        >>> [(span.level.name, span.fan_out, span.groups_per_unit) for span in node.group_levels(stride=8, size=4)]
        [('NVSwitch', 1, 1), ('fabric', 4, 8)]
        """
        if stride < 1 or size < 1:
            raise PlanError(f"system {self.name}: a group of {size} ranks with stride {stride}; both must be 1 or more")
        reach, capacity = (size - 1) * stride + 1, self.max_devices
        if capacity is not None and reach > capacity:
            raise PlanError(
                f"system {self.name} has {capacity} devices; {size} ranks with stride {stride} need at least {reach}"
            )
        spans, ranks_below, members_below = [], 1, 1
        for level in self._flat_levels(stride * size):
            members = size if level.ranks is None else min(size, -(-level.ranks // stride))
            fan_out, sharing = -(-members // members_below), -(-ranks_below // members_below)
            units = 0 if level.ranks is None else level.ranks // ranks_below
            spans.append(GroupLevel(level, fan_out, members_below, sharing, units))
            ranks_below, members_below = level.ranks or ranks_below, members
        return tuple(spans)

    def _flat_levels(self, reach: int) -> tuple[InterconnectLevel, ...]:
        """Return the interconnect levels for a job of ``reach`` devices, one for each dimension of a torus."""
        if all(level.shape is None for level in self.levels):
            return self.levels
        flat: list[InterconnectLevel] = []
        for level in self.levels:
            below = flat[-1].ranks if flat else 1
            flat.extend([level] if level.shape is None else torus_levels(level, below or 1, reach))
        return tuple(flat)


def torus_levels(level: InterconnectLevel, below: int, reach: int) -> list[InterconnectLevel]:
    """Convert a torus level to one interconnect level for each dimension of the box of chips that a job occupies.

    A unit of the second dimension is a row of the first, with the links of all its chips. If a dimension does not close
    into a ring, ring traffic goes forward over half of the link bandwidth and back over the other half. Such a
    dimension counts as one port for each chip instead of two.

    Parameters
    ----------
    level : InterconnectLevel
        Level of the torus.
    below : int
        Devices of one unit of the level below.
    reach : int
        Devices of the job.

    Returns
    -------
    list of InterconnectLevel
        Levels from the first to the last dimension.
    """
    assert level.shape is not None
    levels, ranks = [], below
    for name, extent in zip("xyz", smallest_torus_box(level.shape, -(-reach // below)), strict=False):
        closes = level.wrap is not None and extent % level.wrap == 0
        update = {
            "name": f"{level.name} {name}",
            "ranks": ranks * extent,
            "ports": (2 if closes else 1) * (ranks // below),
            "shape": None,
        }
        levels.append(level.model_copy(update=update))
        ranks *= extent
    return levels


def smallest_torus_box(shape: tuple[int, ...], units: int) -> tuple[int, ...]:
    """Return the extents of the box of chips, as even as possible, that a job occupies in a torus.

    If no box has exactly as many chips, the next larger box is used.

    Parameters
    ----------
    shape : tuple of int
        Extents of the whole torus [chips].
    units : int
        Chips of the job.

    Returns
    -------
    tuple of int
        Extents of the box [chips].

    Examples
    --------
    >>> smallest_torus_box((16, 20, 28), 512), smallest_torus_box((16, 16), 8), smallest_torus_box((16, 16), 7)
    ((8, 8, 8), (4, 2), (7, 1))
    """
    for count in range(units, math.prod(shape) + 1):
        extents = [1] * len(shape)
        for factor in _prime_factors(count):
            fitting = [axis for axis, extent in enumerate(extents) if extent * factor <= shape[axis]]
            if not fitting:
                break
            extents[min(fitting, key=lambda axis: extents[axis])] *= factor
        else:
            return tuple(sorted(extents, reverse=True)) if shape[0] >= max(extents) else tuple(extents)
    return shape


def _prime_factors(number: int) -> list[int]:
    """Return the prime factors of a number, the largest first: 12 gives [3, 2, 2]."""
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return sorted([*factors, number] if number > 1 else factors, reverse=True)


def load_system(name_or_path: str | Path) -> System:
    """Load a system by catalog name or path.

    The name or file of a device gives a system of one such device.

    Parameters
    ----------
    name_or_path : str | Path
        Entry of the catalog, or a YAML file.

    Returns
    -------
    System
        Cluster with its device, nodes and interconnect levels.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    return _systems(name_or_path)


def resolve_system(system: str | Path | System) -> System:
    """Return a system given by name, by path or as an object; names and paths are loaded.

    Parameters
    ----------
    system : str | Path | System
        Name, path or loaded system.

    Returns
    -------
    System
        Loaded system.

    Raises
    ------
    SpecError
        If the argument has another type.
    """
    if not isinstance(system, str | Path | System):
        raise SpecError(f"system {system!r:.80}: expected a name, a path, or a result of load_system")
    return system if isinstance(system, System) else load_system(system)


def _system(name_or_path: str | Path) -> System:
    file = str(name_or_path) if is_path(name_or_path) else ""
    if _means_device(name_or_path):
        device = load_device(name_or_path)
        return System(
            name=device.name, full_name=f"one {device.full_name}", year=device.year, device=device, devices_per_node=1,
            source=device.source, path=file,
        )  # fmt: skip
    path, data = read_entry("systems", name_or_path)
    data = add_default_names(add_path_key(data, path, file), path.stem)
    if "device" in data:
        data["device"] = _part("devices", data["device"], path, "device")
    if isinstance(data.get("levels"), list):
        data["levels"] = [_with_link(level, path, index) for index, level in enumerate(data["levels"])]
    return validate_mapping(System, data, path)


def _means_device(name_or_path: str | Path) -> bool:
    if not is_path(name_or_path):
        return name_or_path not in entry_files("systems") and name_or_path in entry_files("devices")
    try:
        return kind_of_spec_file(name_or_path) == "device"
    except SpecError:  # reading it as a system gives the more helpful error
        return False


_systems = FileCache(_system)


def _with_link(level: object, where: Path, index: int) -> object:
    if not isinstance(level, Mapping) or "link" not in level:
        return level
    return {**level, "link": _part("links", level["link"], where, f"levels[{index}].link")}


def _part(kind: Literal["devices", "links"], value: object, where: Path, key: str) -> Any:
    """Load the device or a link of a system file from a name, a path (relative to the file's folder) or a mapping."""
    try:
        if isinstance(value, Mapping):
            inline = merge_inline_entry(kind, value, where)
            stem = f"{where.stem} {key}"
            return add_default_names(inline, stem) if kind == "devices" else {"name": stem, **inline}
        if isinstance(value, str):
            text: str | Path = path_in_folder(where.parent, value) if is_path(value) else value
            return load_device(text) if kind == "devices" else load_link(text)
    except SpecError as error:
        raise SpecError(f"{where}: {key}: {error}") from None
    return value
