"""Which collective algorithm: all of them over one group of a system."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paleo.errors import PlanError, SpecError
from paleo.pricing.alpha_beta import (
    AlgorithmRow,
    Crossover,
    LevelCost,
    crossovers,
    lower_bound,
    span_costs,
    table,
    times,
)
from paleo.specs.hardware import Span, System

#: By how much an algorithm must win to be worth a change.
NOTABLE = 0.01
#: How far beyond the last change the last algorithm is looked at, as a factor of the payload.
BEYOND = 16.0


@dataclass(frozen=True, slots=True)
class CollectiveStudy:
    """Every algorithm of one operation over one group of a system."""

    operation: str
    payload_bytes: float
    ranks: int
    system: System
    spans: tuple[Span, ...]
    fan_outs: tuple[float, ...]
    costs: tuple[LevelCost, ...]
    rows: tuple[AlgorithmRow, ...]
    crossovers: tuple[Crossover, ...]
    lower_bound: float

    @property
    def best(self) -> AlgorithmRow:
        """The fastest algorithm that needs no servers of its own."""
        return next(row for row in self.rows if row.automatic)


def collective(operation: str, payload_bytes: float, ranks: int, system: System) -> CollectiveStudy:
    """Algorithms for ``ranks`` neighbouring ranks of ``system``, with nobody else on the wires."""
    if ranks < 2:
        raise SpecError(f"ranks: {ranks} must be 2 or more; one rank has nobody to talk to")
    if not system.levels:
        raise PlanError(f"system {system.name} is one device alone; {operation} over {ranks} ranks needs links")
    spans = system.group(1, ranks)
    fan_outs, costs = span_costs(spans)
    rows = tuple(table(operation, payload_bytes, fan_outs, costs))
    changes = _worthwhile(crossovers(operation, fan_outs, costs), operation, fan_outs, costs)
    bound = float(lower_bound(operation, payload_bytes, fan_outs, costs))
    return CollectiveStudy(operation, payload_bytes, ranks, system, spans, fan_outs, costs, rows, changes, bound)


def _worthwhile(
    found: list[Crossover], operation: str, fan_outs: tuple[float, ...], costs: tuple[LevelCost, ...]
) -> tuple[Crossover, ...]:
    """Cross-overs after which the new algorithm comes to win by ``NOTABLE``; ties that flicker are left out."""
    kept: list[Crossover] = []
    ends = [one.payload_bytes for one in found[1:]] + [BEYOND * one.payload_bytes for one in found[-1:]]
    for one, end in zip(found, ends, strict=True):
        before = kept[-1].above if kept else found[0].below
        if one.above == before:
            continue
        middle = math.sqrt(one.payload_bytes * end)
        seconds = times(operation, middle, fan_outs, costs, [before, one.above])
        if seconds[before] > (1.0 + NOTABLE) * seconds[one.above]:
            kept.append(Crossover(one.payload_bytes, before, one.above))
    return tuple(kept)
