"""Seconds for collectives on a system: groups of mesh axes resolved to the levels that they share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.parallel.mesh import Axes, Mesh
from paleo.pricing.alpha_beta import LevelCost, best, candidates, span_costs
from paleo.pricing.calibration import Rates
from paleo.pricing.collective import (
    ExchangeParameters,
    NcclParameters,
    collective_time,
    fabric_defaults,
    link_kind,
    network,
)
from paleo.pricing.store import lookup
from paleo.specs.calibration import Calibration
from paleo.specs.hardware import System

Array = npt.NDArray[np.float64]
P = TypeVar("P")
#: How the rows behind a step's collectives were timed: nccl-tests launches them back to back.
NCCL_STACKS = ("back-to-back",)


@dataclass(frozen=True, slots=True)
class Network:
    """The system as a mesh's groups see it.

    Calibrated NCCL prices a collective unless ``algorithm`` forces one, or ``rates`` asks for constants: then alpha-beta does.
    ``host`` is the least that a collective takes, as its call costs the host that long [s]. Each price assumes that all groups of
    the axes exchange at the same moment and share the ports of their nodes.
    """

    system: System
    mesh: Mesh
    algorithm: str | None = None
    rates: Rates | None = None
    own: Calibration | None = None
    host: float = 0.0
    _known: dict[tuple[str, Axes, float], float] = field(default_factory=dict, repr=False, compare=False)

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
        if self.rates is not None or self.algorithm is not None:
            fan_outs, costs = self.group(axes)
            return best(operation, payload_bytes, fan_outs, costs, self._forced(operation, costs)).time
        self._check(axes)
        seconds = collective_time(
            operation=operation,
            payload_bytes=payload_bytes,
            network=network(self.system, stride=self.mesh.stride(axes), size=self.mesh.ways(axes)),
            inside=self._parameters(NcclParameters, "collective.nccl"),
            exchange=self._parameters(ExchangeParameters, "collective.exchange"),
            between=fabric_defaults(self.system),
        )
        return np.asarray(np.maximum(seconds, self.host))

    def all_reduce(self, axes: Axes, payload_bytes: float) -> float:
        """Seconds to sum a buffer over a group of several axes."""
        return self.time("all_reduce", axes, payload_bytes)

    def _parameters(self, kind: type[P], family: str) -> P:
        found = lookup(
            kind,
            subject=self.system.name,
            architecture=self.system.device.architecture,
            memory_kind=link_kind(self.system),
            family=family,
            stacks=NCCL_STACKS,
            own=self.own,
        )
        return found.parameters

    def group(self, axes: Axes) -> tuple[tuple[float, ...], tuple[LevelCost, ...]]:
        """Fan-outs and level costs of a group of ``axes``, for alpha-beta formulas."""
        self._check(axes)
        spans = self.system.group(self.mesh.stride(axes), self.mesh.ways(axes))
        constant = None if self.rates is None else self.rates.link
        fan_outs, costs = span_costs(spans, achieved=constant is None)
        if self.rates is None:
            return fan_outs, costs
        alpha, share = float(self.rates.latency), constant or 1.0
        scaled = tuple(LevelCost(c.alpha * alpha, c.beta / share, c.gamma, c.in_switch_reduction) for c in costs)
        return fan_outs, scaled

    def _check(self, axes: Axes) -> None:
        if not self.system.levels:
            ranks = self.mesh.ways(axes)
            raise PlanError(f"system {self.system.name} is one device alone; {'+'.join(axes)}={ranks} needs links")

    def _forced(self, operation: str, costs: tuple[LevelCost, ...]) -> list[str] | None:
        if self.algorithm is None or operation != "all_reduce":
            return None
        candidates(operation, costs, [self.algorithm])
        return [self.algorithm]
