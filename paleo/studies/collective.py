"""Which collective algorithm: all of them over one group of a system, at the prices that a training step uses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.collectives.base import algorithms_for
from paleo.errors import PlanError, SpecError
from paleo.pricing.communication import Crossover, Fabric, collective_sources, crossovers
from paleo.pricing.communication import prices as policy_prices
from paleo.pricing.links.alpha_beta import bus_factor
from paleo.pricing.store import constants
from paleo.specs.calibration import calibration_file

if TYPE_CHECKING:
    from paleo.collectives.base import Algorithm, Array
    from paleo.pricing.links.group import GroupLinks
    from paleo.specs.hardware import Span, System

#: By how much an algorithm must win to be worth a change.
NOTABLE = 0.01
#: How far beyond the last change the last algorithm is looked at, as a factor of the payload.
BEYOND = 16.0


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """One line of a table of algorithms: seconds, bytes per second, and how far above the lower bound.

    ``automatic``: the library chooses it by itself where it is the fastest.
    """

    algorithm: str
    time: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    times_lower_bound: float
    automatic: bool
    in_network: bool


@dataclass(frozen=True, slots=True)
class CollectiveStudy:
    """Every algorithm of one operation over one group of a system."""

    operation: str
    payload_bytes: float
    ranks: int
    fabric: Fabric
    spans: tuple[Span, ...]
    links: GroupLinks
    rows: tuple[AlgorithmRow, ...]
    crossovers: tuple[Crossover, ...]
    lower_bound: float
    calibration: str

    @property
    def system(self) -> System:
        """The system whose links carry it."""
        return self.fabric.system

    @property
    def best(self) -> AlgorithmRow:
        """The fastest algorithm of those that the library chooses from: what a training step is priced with."""
        return next(row for row in self.rows if row.automatic)

    def times(self, payload_bytes: Array) -> Mapping[str, Array]:
        """Seconds of every algorithm for other payloads, fastest of this one first."""
        names = [row.algorithm for row in self.rows]
        return self.fabric.prices(self.operation, self.links, payload_bytes, names)


def collective(
    operation: str, payload_bytes: float, ranks: int, system: System, *, calibration: str = "auto", dtype: str = "bf16"
) -> CollectiveStudy:
    """Algorithms for ``ranks`` neighbouring ranks of ``system``, with nobody else on the wires.

    ``calibration`` as in a run: auto, ideal, ppp=… or a file.
    """
    if ranks < 2:
        raise SpecError(f"ranks: {ranks} expected 2 or more")
    if not system.levels:
        raise PlanError(f"system {system.name} is one device alone; {operation} over {ranks} ranks needs links")
    constant = constants(system.device.kind, calibration)
    measured = calibration_file(calibration) if constant is None and calibration != "auto" else None
    fabric = Fabric(system, rates=constant, own=measured, dtype=dtype)
    links = fabric.links(1, ranks)
    bounds = {
        in_network: float(fabric.policy.least(operation, payload_bytes, links, in_network=in_network))
        for in_network in (False, True)
    }
    rows = _rows(operation, payload_bytes, links, fabric, bounds)
    best = next(row for row in rows if row.automatic)
    return CollectiveStudy(
        operation, payload_bytes, ranks, fabric, system.group(1, ranks), links, rows,
        _worthwhile(fabric, operation, links), bounds[best.in_network],
        collective_sources(fabric, operation, links),
    )  # fmt: skip


def _rows(
    operation: str, payload_bytes: float, links: GroupLinks, fabric: Fabric, bounds: Mapping[bool, float]
) -> tuple[AlgorithmRow, ...]:
    """Every algorithm that the network can carry out, fastest first; servers too, though never chosen unasked."""
    payload = np.asarray(payload_bytes)
    algorithms = [algorithm for algorithm in algorithms_for(operation) if links.can_run(algorithm, operation)]
    seconds = fabric.prices(operation, links, np.asarray(payload_bytes), [algorithm.name for algorithm in algorithms])
    factor = float(bus_factor(operation, links.ranks))
    candidates = fabric.policy.candidates(operation, links)
    chosen = {each.name for each in candidates if bool(fabric.policy.chooses(each, operation, payload, links))}
    rows = [
        _row(algorithm, payload_bytes, float(seconds[algorithm.name]), factor,
             bounds[not algorithm.one_port], algorithm.name in chosen)
        for algorithm in algorithms
    ]  # fmt: skip
    return tuple(sorted((row for row in rows if math.isfinite(row.time)), key=lambda row: (row.time, row.algorithm)))


def _row(
    algorithm: Algorithm, payload_bytes: float, seconds: float, factor: float, bound: float, automatic: bool
) -> AlgorithmRow:
    rate = payload_bytes / seconds if seconds > 0 else math.inf
    ratio = seconds / bound if bound > 0 else 1.0
    return AlgorithmRow(algorithm.name, seconds, rate, factor * rate, ratio, automatic, algorithm.in_network)


def _worthwhile(fabric: Fabric, operation: str, links: GroupLinks) -> tuple[Crossover, ...]:
    """Cross-overs after which the new algorithm comes to win by ``NOTABLE``; ties that flicker are left out."""

    def prices(payload_bytes: Array, names: Sequence[str] | None = None, /) -> Mapping[str, Array]:
        return policy_prices(fabric.policy, operation, payload_bytes, links, names)

    changes = crossovers(prices)
    kept: list[Crossover] = []
    ends = [change.payload_bytes for change in changes[1:]]
    ends += [BEYOND * change.payload_bytes for change in changes[-1:]]
    for change, end in zip(changes, ends, strict=True):
        before = kept[-1].above if kept else changes[0].below
        if change.above == before:
            continue
        seconds = prices(np.asarray(math.sqrt(change.payload_bytes * end)))
        if seconds[before] > (1.0 + NOTABLE) * seconds[change.above]:
            kept.append(Crossover(change.payload_bytes, before, change.above))
    return tuple(kept)
