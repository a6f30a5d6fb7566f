"""Seconds for collectives on a system: groups of mesh axes resolved to the levels that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.pricing.links.fabric import (
    FabricParameters,
    fabric_defaults,
    measured_exchange,
    measured_fabric,
    with_exchange,
)
from paleo.pricing.links.group import (
    EXCHANGES,
    ExchangeParameters,
    NcclParameters,
    group_links,
    link_kind,
    stack_links,
)
from paleo.pricing.links.policy import Nccl, Textbook, best, prices
from paleo.pricing.links.topology import placed
from paleo.pricing.store import lookup

if TYPE_CHECKING:
    from paleo.parallel.mesh import Axes, Mesh
    from paleo.pricing.links.group import (
        GroupLinks,
    )
    from paleo.pricing.links.policy import CollectivePolicy
    from paleo.pricing.links.topology import NodePlacement
    from paleo.pricing.store import Found, Rates
    from paleo.specs.calibration import Calibration
    from paleo.specs.hardware import System

Array = npt.NDArray[np.float64]
Count = npt.NDArray[np.int64]
#: Parameters of links by their calibration family: rings inside a node, exchanges there, all that crosses nodes.
LINK_FAMILIES: Mapping[str, type[Any]] = {
    "collective.nccl": NcclParameters,
    "collective.exchange": ExchangeParameters,
    "collective.fabric": FabricParameters,
}
#: How the rows behind a step's collectives were timed: whole steps say most, then nccl-tests, launched back to back.
NCCL_STACKS = ("step", "back-to-back")
#: Formats that the switches of a node cannot add.
NOT_IN_SWITCH = frozenset({"int8"})


def link_parameters(system: System, family: str, calibration: Calibration | None = None) -> Found[Any]:
    """Parameters of a family of links; a fabric that nobody measured has those usual for its kind of link."""
    calibrated = lookup(
        LINK_FAMILIES[family],
        subject=system.name,
        architecture=system.device.architecture,
        memory_kind=link_kind(system),
        family=family,
        stacks=NCCL_STACKS,
        user_calibration=calibration,
    )
    if calibrated.origin != "default" or family != "collective.fabric":
        return calibrated
    relative, exchange = measured_fabric(system), measured_exchange(system)
    if relative is not None:
        return replace(_of_relative(relative), origin="inherited")
    usual = fabric_defaults(system)
    if exchange is None:
        return replace(calibrated, parameters=usual)
    return replace(calibrated, parameters=with_exchange(usual, _of_relative(exchange).parameters))


def _of_relative(system: str) -> Found[FabricParameters]:
    """The fabric's parameters of a measured system."""
    family = "collective.fabric"
    return lookup(FabricParameters, subject=system, architecture="", family=family, stacks=NCCL_STACKS)


@dataclass(frozen=True, slots=True)
class Network:
    """The system as a mesh's groups see it.

    Calibrated NCCL prices a collective, or alpha-beta where ``rates`` asks for constants; ``algorithm`` forces one for
    all-reduces. ``host`` is the least that a collective takes, as its call costs the host that long [s]. Each price
    assumes that all groups of the axes exchange at the same moment and share the ports of their nodes.
    """

    system: System
    mesh: Mesh
    algorithm: str | None = None
    rates: Rates | None = None
    own: Calibration | None = None
    host: float = 0.0
    _known: dict[tuple[str, Axes, float], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def time(self, operation: str, axes: Axes, payload_bytes: float) -> float:
        """Seconds of one collective over one group of ``axes`` together."""
        if self.mesh.ways(axes) == 1 or payload_bytes == 0:
            return 0.0
        key = (operation, axes, payload_bytes)
        if key not in self._known:
            self._known[key] = float(self.times(operation, axes, np.asarray(payload_bytes)))
        return self._known[key]

    def times(self, operation: str, axes: Axes, payload_bytes: Array) -> Array:
        """Seconds for an array of payloads over a group of more than one rank."""
        self._check(axes)
        stride, ranks = (np.full(payload_bytes.size, n) for n in (self.mesh.stride(axes), self.mesh.ways(axes)))
        return self.fabric.times(operation, stride, ranks, payload_bytes.ravel()).reshape(payload_bytes.shape)

    @property
    def fabric(self) -> Fabric:
        """The links of the system, without a mesh laid over them."""
        return Fabric(self.system, self.algorithm, self.rates, self.own, self.host)

    def all_reduce(self, axes: Axes, payload_bytes: float) -> float:
        """Seconds to sum a buffer over a group of several axes."""
        return self.time("all_reduce", axes, payload_bytes)

    def links(self, axes: Axes) -> GroupLinks:
        """The links of a group of ``axes``."""
        self._check(axes)
        return self.fabric.links(self.mesh.stride(axes), self.mesh.ways(axes))

    def _check(self, axes: Axes) -> None:
        if not self.system.levels:
            ranks = self.mesh.ways(axes)
            raise PlanError(f"system {self.system.name} is one device alone; {'+'.join(axes)}={ranks} needs links")


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links of a system, for groups given by the stride between neighbours and their number of ranks: arrays of
    both at once.

    Fields as in `Network`; links of groups and parameters are looked up once. ``handshake``: seconds that an exchange
    in which tokens travel once takes over nodes beside its bytes.
    """

    system: System
    algorithm: str | None = None
    rates: Rates | None = None
    own: Calibration | None = None
    host: float = 0.0
    dtype: str | None = None
    placement: NodePlacement | None = None
    handshake: float = 0.0
    _links: dict[tuple[int, int], GroupLinks] = field(default_factory=dict, init=False, repr=False, compare=False)
    _policies: list[CollectivePolicy] = field(default_factory=list, init=False, repr=False, compare=False)

    def times(self, operation: str, strides: Count, ranks: Count, payload_bytes: Array) -> Array:
        """Seconds of one collective each; groups of one rank and empty payloads take none. All arguments have one shape
        (n,). Those that are alike are priced once: of the layouts of a search most are."""
        seconds = np.zeros(len(payload_bytes))
        used = np.flatnonzero((ranks > 1) & (payload_bytes > 0))
        if len(used):
            different, place = _distinct(strides[used], ranks[used], payload_bytes[used])
            first = used[different]
            pairs = np.stack([strides[first], ranks[first]], axis=1)
            starts = np.flatnonzero(np.any(np.diff(pairs, axis=0, prepend=-1), axis=1))
            groups = [(int(stride), int(size)) for stride, size in pairs[starts]]
            index = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(first)))
            seconds[used] = self._times(operation, groups, index, payload_bytes[first])[place]
        return seconds

    def _times(self, operation: str, groups: list[tuple[int, int]], index: Count, payload_bytes: Array) -> Array:
        """Payload i over group ``index[i]``."""
        if not self.system.levels:
            raise PlanError(f"system {self.system.name} is one device alone; {operation} needs links")
        links = stack_links([self._placed(operation, *group) for group in groups], index)
        names = [self.algorithm] if self.algorithm is not None and operation == "all_reduce" else None
        return np.maximum(best(self.policy, operation, payload_bytes, links, names).time, self._floor)

    def prices(self, operation: str, links: GroupLinks, payload_bytes: Array, names: Sequence[str]) -> dict[str, Array]:
        """Seconds of some algorithms over one group."""
        table = prices(self.policy, operation, payload_bytes, links, names)
        return {name: np.maximum(seconds, self._floor) for name, seconds in table.items()}

    @property
    def _floor(self) -> float:
        """Constants know no host."""
        return self.host if self.rates is None else 0.0

    def _placed(self, operation: str, stride: int, ranks: int) -> GroupLinks:
        """The links of a group as far as the placement of the nodes, hashing, neighbours and the other groups of the
        job leave them."""
        links, node_stride = self.links(stride, ranks), max(1.0, stride / self.system.devices_per_node)
        if self.placement is None or links.fabric_levels == 0:
            return links
        share = placed(self.system, int(links.nodes), self.placement, node_stride).share(operation)
        inside, outside = links.bandwidths[: links.inner_levels], links.bandwidths[links.inner_levels :]
        return replace(links, bandwidths=(*inside, *(bandwidth * share for bandwidth in outside)))

    def targets(self, stride: int, ranks: int) -> int:
        """The nodes that a group spans; its ranks where that is one."""
        if ranks == 1 or not self.system.levels:
            return ranks
        nodes = int(self.links(stride, ranks).nodes)
        return nodes if nodes > 1 else ranks

    def handshakes(self, stride: int, ranks: int) -> float:
        """Seconds beside its bytes of an exchange over one group in which tokens travel once."""
        return self.handshake if ranks > 1 and int(self.links(stride, ranks).nodes) > 1 else 0.0

    def links(self, stride: int, ranks: int) -> GroupLinks:
        """The links of one group."""
        if (stride, ranks) not in self._links:
            self._links[stride, ranks] = group_links(self.system, stride=stride, size=ranks)
        return self._links[stride, ranks]

    @property
    def policy(self) -> CollectivePolicy:
        """The policy that prices the collectives."""
        if not self._policies:
            self._policies.append(Textbook(self.rates) if self.rates is not None else self._nccl())
        return self._policies[0]

    def _nccl(self) -> Nccl:
        inside, exchange, between = (family.parameters for family in self.parameters().values())
        return Nccl(inside, exchange, between, switch_can_add=self.dtype not in NOT_IN_SWITCH)

    def parameters(self) -> dict[str, Found[Any]]:
        """The calibrated parameters by family, with where they come from."""
        return {family: link_parameters(self.system, family, self.own) for family in LINK_FAMILIES}


def _distinct(strides: Count, ranks: Count, payload_bytes: Array) -> tuple[Count, Count]:
    """The first of each different collective, those over one group beside one another, and for each collective which
    of them it is."""
    groups = strides * (ranks.max() + 1) + ranks
    _, different, place = np.unique(groups + 1j * payload_bytes, return_index=True, return_inverse=True)
    return different, place


def collective_sources(fabric: Fabric, operation: str, links: GroupLinks) -> str:
    """Where the prices of an operation over a group come from: ``measured (dgx-h100) collective.nccl``."""
    return fabric.rates.name if fabric.rates is not None else origins(calibrated_families(fabric, operation, links))


def calibrated_families(fabric: Fabric, operation: str, links: GroupLinks) -> dict[str, Found[Any]]:
    """The families of parameters that price an operation over a group, with where they come from."""
    families = ["collective.exchange" if operation in EXCHANGES else "collective.nccl"]
    if np.any(links.nodes > 1):
        within = np.any(links.inside.ranks > 1) and operation not in EXCHANGES
        families = ["collective.fabric", *(families if within else ())]
    return {family: fabric.parameters()[family] for family in families}


def origins(calibrated: Mapping[str, Found[Any]]) -> str:
    """Families by where their parameters come from."""
    by_origin: dict[str, list[str]] = {}
    for family, entry in calibrated.items():
        by_origin.setdefault(f"{entry.origin} ({entry.subject})", []).append(family)
    return "; ".join(f"{origin} {', '.join(families)}" for origin, families in by_origin.items())
