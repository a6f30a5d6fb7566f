"""Seconds for collectives on a system: groups of mesh axes resolved to the levels that they share."""

from __future__ import annotations

from dataclasses import dataclass, field

from paleo.errors import PlanError
from paleo.parallel.mesh import Axes, Mesh
from paleo.pricing.alpha_beta import LevelCost, best, candidates, span_costs
from paleo.pricing.calibration import Rates
from paleo.specs.hardware import System


@dataclass(frozen=True, slots=True)
class Network:
    """The system as a mesh's groups see it; ``algorithm`` forces one for all-reduces.

    Each price assumes that all groups of the axes exchange at the same moment and share the ports of their nodes.
    """

    system: System
    mesh: Mesh
    algorithm: str | None = None
    rates: Rates | None = None
    _known: dict[tuple[str, Axes, float], float] = field(default_factory=dict, repr=False, compare=False)

    def time(self, operation: str, axes: Axes, payload_bytes: float) -> float:
        """Seconds of one collective over one group of ``axes`` together."""
        if self.mesh.ways(axes) == 1 or payload_bytes == 0:
            return 0.0
        key = (operation, axes, payload_bytes)
        if key not in self._known:
            fan_outs, costs = self.group(axes)
            forced = self._forced(operation, costs)
            self._known[key] = float(best(operation, payload_bytes, fan_outs, costs, forced).time)
        return self._known[key]

    def all_reduce(self, axes: Axes, payload_bytes: float) -> float:
        """Seconds to sum a buffer over a group of several axes."""
        return self.time("all_reduce", axes, payload_bytes)

    def group(self, axes: Axes) -> tuple[tuple[float, ...], tuple[LevelCost, ...]]:
        """Fan-outs and level costs of a group of ``axes``."""
        ranks = self.mesh.ways(axes)
        if not self.system.levels:
            raise PlanError(f"system {self.system.name} is one device alone; {'+'.join(axes)}={ranks} needs links")
        spans = self.system.group(self.mesh.stride(axes), ranks)
        constant = None if self.rates is None else self.rates.link
        fan_outs, costs = span_costs(spans, achieved=constant is None)
        if self.rates is None:
            return fan_outs, costs
        alpha, share = float(self.rates.latency), constant or 1.0
        scaled = tuple(LevelCost(c.alpha * alpha, c.beta / share, c.gamma, c.in_switch_reduction) for c in costs)
        return fan_outs, scaled

    def _forced(self, operation: str, costs: tuple[LevelCost, ...]) -> list[str] | None:
        if self.algorithm is None or operation != "all_reduce":
            return None
        candidates(operation, costs, [self.algorithm])
        return [self.algorithm]
