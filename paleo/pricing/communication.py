"""Seconds for collectives on a system: groups of mesh axes resolved to the levels that they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.parallel.mesh import Axes, Mesh
from paleo.pricing.alpha_beta import LevelCost, best, candidates, span_costs
from paleo.pricing.calibration import Rates
from paleo.pricing.collective import (
    EXCHANGES,
    ExchangeParameters,
    FabricParameters,
    NcclParameters,
    collective_time,
    fabric_defaults,
    link_kind,
    network,
    stack_networks,
)
from paleo.pricing.collective import Network as Links
from paleo.pricing.store import Found, lookup
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


def link_parameters(system: System, family: str, own: Calibration | None = None) -> Found[Any]:
    """Parameters of a family of links; a fabric that nobody measured has those usual for its kind of link."""
    found = lookup(
        LINK_FAMILIES[family],
        subject=system.name,
        architecture=system.device.architecture,
        memory_kind=link_kind(system),
        family=family,
        stacks=NCCL_STACKS,
        own=own,
    )
    assumed = found.origin == "default" and family == "collective.fabric"
    return replace(found, parameters=fabric_defaults(system)) if assumed else found


@dataclass(frozen=True, slots=True)
class Network:
    """The system as a mesh's groups see it.

    Calibrated NCCL prices a collective unless ``algorithm`` forces one, or ``rates`` asks for constants: then
    alpha-beta does. ``host`` is the least that a collective takes, as its call costs the host that long [s]. Each price
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
        """The links apart from the mesh."""
        return Fabric(self.system, self.algorithm, self.rates, self.own, self.host)

    def all_reduce(self, axes: Axes, payload_bytes: float) -> float:
        """Seconds to sum a buffer over a group of several axes."""
        return self.time("all_reduce", axes, payload_bytes)

    def group(self, axes: Axes) -> tuple[tuple[float, ...], tuple[LevelCost, ...]]:
        """Fan-outs and level costs of a group of ``axes``, for alpha-beta formulas."""
        self._check(axes)
        return self.fabric.group(self.mesh.stride(axes), self.mesh.ways(axes))

    def _check(self, axes: Axes) -> None:
        if not self.system.levels:
            ranks = self.mesh.ways(axes)
            raise PlanError(f"system {self.system.name} is one device alone; {'+'.join(axes)}={ranks} needs links")


@dataclass(frozen=True, slots=True)
class Fabric:
    """The links of a system, for groups given by the stride between neighbours and their number of ranks: arrays of
    both at once.

    Fields as in `Network`; links of groups and parameters are looked up once.
    """

    system: System
    algorithm: str | None = None
    rates: Rates | None = None
    own: Calibration | None = None
    host: float = 0.0
    _links: dict[tuple[int, int], Links] = field(default_factory=dict, init=False, repr=False, compare=False)
    _fitted: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def times(self, operation: str, strides: Count, ranks: Count, payload_bytes: Array) -> Array:
        """Seconds of one collective each; groups of one rank and empty payloads take none. All arguments have one shape
        (n,)."""
        found = np.zeros(len(payload_bytes))
        used = np.flatnonzero((ranks > 1) & (payload_bytes > 0))
        if len(used):
            pairs = np.stack([strides[used], ranks[used]], axis=1)
            groups, index = _distinct(pairs)
            found[used] = self._times(operation, groups, index, payload_bytes[used])
        return found

    def _times(self, operation: str, groups: list[tuple[int, int]], index: Count, payload_bytes: Array) -> Array:
        """Payload i over group ``index[i]``."""
        if not self.system.levels:
            raise PlanError(f"system {self.system.name} is one device alone; {operation} needs links")
        if self.rates is not None or self.algorithm is not None:
            fan_outs, costs = _rows([self.group(*group) for group in groups], index)
            return best(operation, payload_bytes, fan_outs, costs, self._forced(operation, costs)).time
        networks = [self._linked(*group) for group in groups]
        seconds = collective_time(
            operation=operation,
            payload_bytes=payload_bytes,
            network=stack_networks(networks, index),
            inside=self._parameters("collective.nccl"),
            exchange=self._parameters("collective.exchange"),
            between=self._parameters("collective.fabric"),
        )
        inside = np.array([_members_of_a_node(one) for one in networks])[index]
        if operation not in EXCHANGES and np.any(inside > 1):  # what a node's own ranks need is part of it
            strides = np.array([stride for stride, _ in groups])[index]
            seconds = np.maximum(seconds, self.times(operation, strides, inside, payload_bytes))
        return np.asarray(np.maximum(seconds, self.host))

    def targets(self, stride: int, ranks: int) -> int:
        """The nodes that a group spans; its ranks where that is one."""
        if ranks == 1 or not self.system.levels:
            return ranks
        group = self._linked(stride, ranks)
        nodes = math.prod(int(one) for one in group.fan_outs[len(group.fan_outs) - group.fabric_levels :])
        return nodes if nodes > 1 else ranks

    def _linked(self, stride: int, ranks: int) -> Links:
        """The links of one group."""
        if (stride, ranks) not in self._links:
            self._links[stride, ranks] = network(self.system, stride=stride, size=ranks)
        return self._links[stride, ranks]

    def _parameters(self, family: str) -> Any:
        if family not in self._fitted:
            self._fitted[family] = link_parameters(self.system, family, self.own).parameters
        return self._fitted[family]

    def group(self, stride: int, ranks: int) -> tuple[tuple[float, ...], tuple[LevelCost, ...]]:
        """Fan-outs and level costs of one group, inner level first."""
        constant = None if self.rates is None else self.rates.link
        fan_outs, costs = span_costs(self.system.group(stride, ranks), achieved=constant is None)
        if self.rates is None:
            return fan_outs, costs
        alpha, share = float(self.rates.latency), constant or 1.0
        scaled = tuple(LevelCost(c.alpha * alpha, c.beta / share, c.gamma, c.in_switch_reduction) for c in costs)
        return fan_outs, scaled

    def _forced(self, operation: str, costs: Sequence[LevelCost]) -> list[str] | None:
        if self.algorithm is None or operation != "all_reduce":
            return None
        candidates(operation, costs, [self.algorithm])
        return [self.algorithm]


def _members_of_a_node(group: Links) -> int:
    """Ranks of the group that share a node, where it spans several; else 1."""
    fan_outs = [int(one) for one in group.fan_outs]
    inner = fan_outs[: len(fan_outs) - group.fabric_levels]
    return math.prod(inner) if math.prod(fan_outs) > math.prod(inner) else 1


def _distinct(pairs: Count) -> tuple[list[tuple[int, int]], Count]:
    """The different rows, and for each row which of them it is."""
    codes = pairs[:, 0] * (pairs[:, 1].max() + 1) + pairs[:, 1]
    _, first, index = np.unique(codes, return_index=True, return_inverse=True)
    return [(int(stride), int(ranks)) for stride, ranks in pairs[first]], index


def _rows(
    groups: Sequence[tuple[tuple[float, ...], tuple[LevelCost, ...]]], index: Count
) -> tuple[tuple[Array, ...], tuple[LevelCost, ...]]:
    """Groups of one system side by side, row i being ``groups[index[i]]``: only fan-outs and bandwidths differ between
    them."""
    fan_outs = np.array([fan_out for fan_out, _ in groups])[index]
    betas = np.array([[float(cost.beta) for cost in costs] for _, costs in groups])[index]
    costs = tuple(
        LevelCost(cost.alpha, betas[:, level], cost.gamma, cost.in_switch_reduction)
        for level, cost in enumerate(groups[0][1])
    )
    return tuple(fan_outs.T), costs
