"""alpha-beta-gamma: seconds for the traffic of a collective over the levels of a network.

alpha [s] per message, beta [s/byte] per byte that one unit sends into a level, gamma [s/byte] per byte that a rank
combines (Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005). In a group of one level the textbook formulas come out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paleo.collectives.base import (
    Algorithm,
    algorithms_for,
    checked_group,
    checked_payload,
    others,
    ranks_of,
    rounds,
)
from paleo.collectives.traffic import Array, Group, Numeric, Traffic
from paleo.errors import SpecError, near
from paleo.units import TERA


@dataclass(frozen=True, slots=True)
class LevelCost:
    """The price of one level, as the group at hand sees it.

    alpha                 one message from end to end [s]
    beta                  one byte sent by a unit of the level below through the ports that the group may use [s/byte]
    gamma                 one byte combined by a rank [s/byte]
    in_switch_reduction   the switches of this level add and multicast
    """

    alpha: Numeric
    beta: Numeric
    gamma: Numeric = 0.0
    in_switch_reduction: bool = False


def traffic_time(traffic: Traffic, costs: Sequence[LevelCost]) -> Array:
    """Seconds of the phases of a traffic, one after another.

    A phase lasts as long as its latencies together and its slowest level: sum of alpha steps + max of beta bytes +
    sum of gamma bytes.

    >>> from paleo.collectives.base import ALGORITHMS
    >>> ring = ALGORITHMS["ring"].traffic("all_reduce", 800.0, (8,))
    >>> float(traffic_time(ring, [LevelCost(alpha=1.0, beta=0.01)]))  # 14 steps and 1400 bytes
    28.0
    """
    total = np.zeros(())
    for phase in traffic.phases:
        if len(phase) > len(costs):
            raise SpecError(f"traffic over {len(phase)} levels needs as many level costs, found {len(costs)}")
        slowest = np.zeros(())
        for level, cost in zip(phase, costs, strict=False):
            slowest = np.maximum(slowest, cost.beta * level.wire_bytes)
            total = total + cost.alpha * level.steps + cost.gamma * level.reduced_bytes
        total = total + slowest
    return np.asarray(total)


def lower_bound(
    operation: str, payload_bytes: Numeric, group: Group, costs: Sequence[LevelCost], *, in_network: bool = False
) -> Array:
    """No algorithm between hosts ends before this [s].

    Flat: alpha log2 P + beta S c, with c = 2 (P-1)/P for all_reduce, (P-1)/P for reduce_scatter, all_gather and
    all_to_all, 1 for broadcast and send_recv. Over levels: the latencies add, the slowest level counts. With
    ``in_network`` a message may be combined and copied on its way: one step a level, and S for an all_reduce.

    >>> cost = LevelCost(alpha=1.0, beta=0.01)
    >>> float(lower_bound("all_reduce", 800.0, (8,), [cost]))
    17.0

    Reference: Chan, Heimlich, Purkayastha and van de Geijn, Collective communication, CCPE 19(13), 2007.
    """
    algorithms_for(operation)
    payload, fan_outs = checked_payload(payload_bytes), checked_group(group)
    latency, slowest = np.zeros(()), np.zeros(())
    for index, cost in enumerate(_matching(costs, fan_outs)):
        fan_out, above = fan_outs[index], ranks_of(fan_outs[index + 1 :])
        spanned = np.where(fan_out > 1, 1.0, 0.0)
        if operation == "send_recv":
            spanned = spanned * (above == 1)
        steps = spanned if in_network or operation == "send_recv" else rounds(fan_out)
        share = _least_share(operation, fan_outs, index, in_network)
        latency = latency + cost.alpha * steps
        slowest = np.maximum(slowest, cost.beta * payload * share * spanned)
    return np.asarray(latency + slowest)


def _least_share(operation: str, fan_outs: tuple[Array, ...], index: int, in_network: bool) -> Array:
    """Share of the payload that each unit must send into a level."""
    fan_out = fan_outs[index]
    if operation == "all_reduce":
        return np.ones(()) if in_network else 2.0 * others(fan_out)
    if operation == "all_to_all":
        inside, above = ranks_of(fan_outs[:index]), ranks_of(fan_outs[index + 1 :])
        return inside * others(fan_out) / above
    return others(fan_out) if operation in ("reduce_scatter", "all_gather") else np.ones(())


def _matching(costs: Sequence[LevelCost], fan_outs: Sequence[Array]) -> Sequence[LevelCost]:
    if len(costs) != len(fan_outs):
        raise SpecError(f"a group of {len(fan_outs)} levels needs as many level costs, found {len(costs)}")
    return costs


def candidates(operation: str, costs: Sequence[LevelCost], names: Iterable[str] | None = None) -> list[Algorithm]:
    """Algorithms to choose from: the named ones, or all that serve the operation and that the network can carry out."""
    serving = {algorithm.name: algorithm for algorithm in algorithms_for(operation)}
    if names is None:
        switches = costs[0].in_switch_reduction
        return [one for one in serving.values() if one.automatic and (switches or not one.in_network)]
    chosen = list(names)
    for name in chosen:
        if name not in serving:
            raise SpecError(f"no algorithm {name!r} for {operation!r}; {near(name, serving)}")
    return [serving[name] for name in chosen]


def times(
    operation: str,
    payload_bytes: Numeric,
    group: Group,
    costs: Sequence[LevelCost],
    algorithms: Iterable[str] | None = None,
) -> dict[str, Array]:
    """Seconds of every candidate algorithm, by name; a forced one is ``algorithms=["ring"]``."""
    _matching(costs, checked_group(group))
    return {
        one.name: traffic_time(one.traffic(operation, payload_bytes, group), costs)
        for one in candidates(operation, costs, algorithms)
    }


@dataclass(frozen=True, slots=True)
class Choice:
    """The fastest algorithm per element of the arrays that were asked for."""

    algorithm: npt.NDArray[np.str_]
    time: Array


def best(
    operation: str,
    payload_bytes: Numeric,
    group: Group,
    costs: Sequence[LevelCost],
    algorithms: Iterable[str] | None = None,
) -> Choice:
    """The fastest candidate and its time; a tie goes to the first name.

    >>> choice = best("all_reduce", np.array([8.0, 8e9]), (64,), [LevelCost(alpha=5e-6, beta=4e-11)])
    >>> choice.algorithm.tolist()
    ['butterfly', 'double_tree']
    """
    table = times(operation, payload_bytes, group, costs, algorithms)
    stacked = np.stack(np.broadcast_arrays(*table.values()))
    return Choice(np.asarray(list(table))[stacked.argmin(axis=0)], np.asarray(stacked.min(axis=0)))


@dataclass(frozen=True, slots=True)
class Crossover:
    """Below ``payload_bytes`` one algorithm is the fastest, from there on the other."""

    payload_bytes: float
    below: str
    above: str


def crossovers(
    operation: str,
    group: Group,
    costs: Sequence[LevelCost],
    *,
    algorithms: Iterable[str] | None = None,
    smallest: float = 1.0,
    largest: float = TERA,
) -> list[Crossover]:
    """Where the best algorithm changes as the payload grows from ``smallest`` to ``largest`` bytes.

    A logarithmic grid finds the changes, bisection places each to a relative 1e-9.

    >>> flat = [LevelCost(alpha=5e-6, beta=4e-11)]
    >>> [(one.below, one.above) for one in crossovers("all_reduce", (8,), flat, algorithms=["butterfly", "ring"])]
    [('butterfly', 'ring')]
    """
    names = None if algorithms is None else list(algorithms)
    grid = np.geomspace(smallest, largest, 40 * round(np.log2(largest / smallest)))
    winners = best(operation, grid, group, costs, names).algorithm
    found = []
    for index in np.flatnonzero(winners[1:] != winners[:-1]):
        below, above = str(winners[index]), str(winners[index + 1])
        found.append(
            Crossover(_crossing(operation, group, costs, grid[index], grid[index + 1], below, above), below, above)
        )
    return found


def _crossing(
    operation: str, group: Group, costs: Sequence[LevelCost], low: float, high: float, below: str, above: str
) -> float:
    while high / low - 1.0 > _BISECTION:
        middle = float(np.sqrt(low * high))
        table = times(operation, middle, group, costs, [below, above])
        low, high = (middle, high) if table[below] <= table[above] else (low, middle)
    return high


_BISECTION = 2.0**-30


class _Link(Protocol):
    @property
    def bandwidth(self) -> float: ...
    @property
    def achieved_fraction(self) -> float | None: ...
    @property
    def latency(self) -> float | None: ...


class _Level(Protocol):
    @property
    def link(self) -> _Link: ...
    @property
    def ports(self) -> float: ...
    @property
    def in_switch_reduction(self) -> bool: ...


class Span(Protocol):
    """What one level of a system gives to a group of ranks (`paleo.specs.hardware.System.group` makes these)."""

    @property
    def level(self) -> _Level: ...
    @property
    def fan_out(self) -> int: ...
    @property
    def groups_sharing(self) -> float: ...


def span_costs(
    spans: Iterable[Span], *, gamma: float = 0.0, achieved: bool = True
) -> tuple[tuple[float, ...], tuple[LevelCost, ...]]:
    """Fan-outs and level costs of a group that a system has resolved into spans.

    A unit's bandwidth into a level is all its ports times the link (times the link's achieved fraction, where one is
    known and ``achieved`` asks for it) over the groups of the same kind that use those ports at the same time: one
    group alone gets every NIC of a node; eight data-parallel groups, one per GPU, share them.
    """
    fan_outs, costs = [], []
    for span in spans:
        link = span.level.link
        fraction = (link.achieved_fraction or 1.0) if achieved else 1.0
        bandwidth = span.level.ports * link.bandwidth * fraction / span.groups_sharing
        fan_outs.append(float(span.fan_out))
        costs.append(LevelCost(link.latency or 0.0, 1.0 / bandwidth, gamma, span.level.in_switch_reduction))
    return tuple(fan_outs), tuple(costs)


def bus_factor(operation: str, ranks: Numeric) -> Array:
    """Bytes that each rank must send per payload byte: bus bandwidth = factor * payload / time (nccl-tests).

    >>> float(bus_factor("all_reduce", 8)), float(bus_factor("all_gather", 8)), float(bus_factor("broadcast", 8))
    (1.75, 0.875, 1.0)
    """
    algorithms_for(operation)
    count = np.asarray(ranks, dtype=np.float64)
    if operation in ("broadcast", "send_recv"):
        return np.ones_like(count)
    return (2.0 if operation == "all_reduce" else 1.0) * others(count)


@dataclass(frozen=True, slots=True)
class AlgorithmRow:
    """One line of a table of algorithms: seconds, bytes per second, and how far above the lower bound."""

    algorithm: str
    time: float
    algorithm_bandwidth: float
    bus_bandwidth: float
    times_lower_bound: float
    automatic: bool


def table(operation: str, payload_bytes: float, group: Group, costs: Sequence[LevelCost]) -> list[AlgorithmRow]:
    """Every algorithm that the network can carry out, fastest first; servers too, though never chosen unasked."""
    switches = costs[0].in_switch_reduction
    able = [one for one in algorithms_for(operation) if switches or not one.in_network]
    rows = []
    factor = float(bus_factor(operation, ranks_of(checked_group(group))))
    for one in able:
        seconds = float(times(operation, payload_bytes, group, costs, [one.name])[one.name])
        bound = float(lower_bound(operation, payload_bytes, group, costs, in_network=not one.one_port))
        rate = payload_bytes / seconds if seconds > 0 else float("inf")
        ratio = seconds / bound if bound > 0 else 1.0
        rows.append(AlgorithmRow(one.name, seconds, rate, factor * rate, ratio, one.automatic))
    return sorted(rows, key=lambda row: (row.time, row.algorithm))
