"""How a library carries out a collective: which algorithms it chooses from, and what any traffic costs in its hands.

A policy prices whatever algorithm the registry holds, so that a new one joins in by itself: `Nccl` with calibrated
launch costs, steps and shares of links, `Textbook` with the constants of `--calibration ideal` and `ppp=…`.

Which of several algorithms is the fastest, and where the choice changes with the payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paleo.collectives.base import algorithms_for
from paleo.errors import PlanError, SpecError, near
from paleo.pricing.links.alpha_beta import LevelCost, lower_bound, torus_bound, traffic_time
from paleo.pricing.links.fabric import FabricParameters, fabric_exchange_time, fabric_time
from paleo.pricing.links.group import (
    EXCHANGES,
    SWITCH_RANKS,
    ExchangeParameters,
    NcclParameters,
    exchange_time,
    node_time,
    prefers_tree,
    switch_time,
)
from paleo.units import TERA

if TYPE_CHECKING:
    from paleo.collectives.base import Algorithm, Array, Numeric, Traffic
    from paleo.pricing.links.group import (
        Flags,
        GroupLinks,
    )
    from paleo.pricing.store import Rates

#: Which of these carries out an all_reduce over nodes is decided by what the library expects of both.
TREE_OR_RING = ("ring", "chain_tree")
#: How near to each other the two ends of a search for a crossover come, relatively.
_BISECTION = 2.0**-30


class AlgorithmPrices(Protocol):
    """Seconds by algorithm for an array of payloads, of all candidates or of those that are named."""

    def __call__(self, payload_bytes: Array, names: Sequence[str] | None = None, /) -> Mapping[str, Array]: ...


@dataclass(frozen=True, slots=True)
class FastestAlgorithm:
    """The fastest algorithm per element of the arrays that were asked for."""

    algorithm: npt.NDArray[np.str_]
    time: Array


def fastest(table: Mapping[str, Array]) -> FastestAlgorithm:
    """The least of each element over the algorithms; a tie goes to the first name.

    >>> choice = fastest({"ring": np.array([3.0, 1.0]), "tree": np.array([2.0, 4.0])})
    >>> choice.algorithm.tolist(), choice.time.tolist()
    (['tree', 'ring'], [2.0, 1.0])
    """
    stacked = np.stack(np.broadcast_arrays(*table.values()))
    return FastestAlgorithm(np.asarray(list(table))[stacked.argmin(axis=0)], np.asarray(stacked.min(axis=0)))


@dataclass(frozen=True, slots=True)
class Crossover:
    """Below ``payload_bytes`` one algorithm is the fastest, from there on the other."""

    payload_bytes: float
    below: str
    above: str


def crossovers(prices: AlgorithmPrices, *, smallest: float = 1.0, largest: float = TERA) -> list[Crossover]:
    """Where the best algorithm changes as the payload grows from ``smallest`` to ``largest`` bytes.

    A logarithmic grid shows the changes, bisection places each to a relative 1e-9.
    """
    grid = np.geomspace(smallest, largest, 40 * round(np.log2(largest / smallest)))
    winners = fastest(prices(grid)).algorithm
    changes = []
    for index in np.flatnonzero(winners[1:] != winners[:-1]):
        below, above = str(winners[index]), str(winners[index + 1])
        payload = _crossing(prices, grid[index], grid[index + 1], below, above)
        changes.append(Crossover(payload, below, above))
    return changes


def _crossing(prices: AlgorithmPrices, low: float, high: float, below: str, above: str) -> float:
    while high / low - 1.0 > _BISECTION:
        middle = float(np.sqrt(low * high))
        table = prices(np.asarray(middle))
        low, high = (middle, high) if table[below] <= table[above] else (low, middle)
    return high


class CollectivePolicy(Protocol):
    """Prices the collectives of a group."""

    def candidates(self, operation: str, links: GroupLinks) -> list[Algorithm]:
        """The algorithms that the policy chooses from."""
        ...

    def chooses(self, algorithm: Algorithm, operation: str, payload_bytes: Numeric, links: GroupLinks) -> Flags:
        """Whether it would run a candidate on these links with these payloads."""
        ...

    def seconds(self, algorithm: Algorithm, operation: str, payload_bytes: Numeric, links: GroupLinks) -> Array:
        """Seconds of one algorithm; infinite where the network cannot carry it out."""
        ...

    def least(self, operation: str, payload_bytes: Numeric, links: GroupLinks, *, in_network: bool) -> Array:
        """Seconds that no algorithm can be faster than, with the help of switches or without."""
        ...


def named(operation: str, links: GroupLinks, names: Sequence[str]) -> list[Algorithm]:
    """Algorithms by name; an error where the operation or the network lacks one."""
    serving = {algorithm.name: algorithm for algorithm in algorithms_for(operation)}
    for name in names:
        if name not in serving:
            raise SpecError(f"no algorithm {name!r} for {operation!r}; {near(name, serving)}")
        if not links.can_run(serving[name], operation):
            needed = serving[name].topology or "switches that add"
            raise PlanError(f"algorithm {name!r} needs a network with {needed}; links are {sorted(links.topologies)}")
    return [serving[name] for name in names]


def prices(
    policy: CollectivePolicy,
    operation: str,
    payload_bytes: Numeric,
    links: GroupLinks,
    names: Sequence[str] | None = None,
) -> dict[str, Array]:
    """Seconds by algorithm: of all candidates of a policy (infinite where it would not run one), or of named ones."""
    if names is not None:
        chosen = named(operation, links, names)
        return {each.name: policy.seconds(each, operation, payload_bytes, links) for each in chosen}
    return {
        each.name: np.where(
            policy.chooses(each, operation, payload_bytes, links),
            policy.seconds(each, operation, payload_bytes, links),
            np.inf,
        )
        for each in policy.candidates(operation, links)
    }


def best(
    policy: CollectivePolicy,
    operation: str,
    payload_bytes: Numeric,
    links: GroupLinks,
    names: Sequence[str] | None = None,
) -> FastestAlgorithm:
    """The fastest candidate of a policy, or of the named algorithms.

    >>> from paleo.pricing.links.group import GroupLinks
    >>> links = GroupLinks(fan_outs=(8.0,), bandwidths=(300e9,), ports=(1.0,))
    >>> choice = best(Nccl(), "all_reduce", 2.0**29, links)
    >>> choice.algorithm.item(), 0.0035 < float(choice.time) < 0.0045
    ('ring', True)
    """
    return fastest(prices(policy, operation, payload_bytes, links, names))


@dataclass(frozen=True, slots=True)
class Textbook:
    """alpha-beta over the datasheet's links with constant shares of them; any algorithm without servers is a candidate,
    as no library's habits are known."""

    rates: Rates

    def costs(self, links: GroupLinks) -> tuple[LevelCost, ...]:
        """Latency and bandwidth of each level of the group."""
        share = self.rates.link or 1.0
        return tuple(
            LevelCost(
                alpha=alpha * float(self.rates.latency),
                beta=1.0 / (np.asarray(bandwidth) * unit * share),
                rank_beta=1.0 / (np.asarray(bandwidth) * rank * share),
            )
            for alpha, bandwidth, unit, rank in zip(
                links.latencies, links.bandwidths, links.unit_ports, links.rank_ports, strict=True
            )
        )

    def candidates(self, operation: str, links: GroupLinks) -> list[Algorithm]:
        """All algorithms that need no parameter servers."""
        return [each for each in algorithms_for(operation) if each.automatic and links.can_run(each, operation)]

    def chooses(self, algorithm: Algorithm, operation: str, payload_bytes: Numeric, links: GroupLinks) -> Flags:
        """True: any candidate may be chosen."""
        return np.asarray(True)

    def seconds(self, algorithm: Algorithm, operation: str, payload_bytes: Numeric, links: GroupLinks) -> Array:
        """Seconds of one algorithm by alpha and beta."""
        return traffic_time(algorithm.traffic(operation, payload_bytes, links.fan_outs), self.costs(links))

    def least(self, operation: str, payload_bytes: Numeric, links: GroupLinks, *, in_network: bool) -> Array:
        """The textbook's lower bound."""
        return _least(operation, payload_bytes, links, self.costs(links), in_network)


@dataclass(frozen=True, slots=True)
class Nccl:
    """NCCL with calibrated parameters.

    ``switch_can_add``: the switches can add this dtype (they have no int8, of which threads add fewer, too).
    ``low_latency`` and ``trees``: the library has LL (NCCL 2.1 and later) and trees between nodes (2.4 and later).
    ``shift``: in a send_recv all ranks send round the group at once, as nccl-tests do; else neighbours talk in pairs,
    as the stages of a pipeline do.
    """

    inside: NcclParameters = field(default_factory=NcclParameters)
    exchange: ExchangeParameters = field(default_factory=ExchangeParameters)
    between: FabricParameters = field(default_factory=FabricParameters)
    switch_can_add: bool | Flags = True
    low_latency: bool | Flags = True
    trees: bool | Flags = True
    shift: bool = False

    def candidates(self, operation: str, links: GroupLinks) -> list[Algorithm]:
        """What NCCL has for an operation, and what is open to any library."""
        serving = (each for each in algorithms_for(operation) if each.belongs_to("nccl", operation))
        return [each for each in serving if links.can_run(each, operation)]

    def chooses(self, algorithm: Algorithm, operation: str, payload_bytes: Numeric, links: GroupLinks) -> Flags:
        """Trees are for several nodes and for payloads that its tuner expects to be faster so, rings for all others;
        the switch's arithmetic is for `SWITCH_RANKS` of a node and more, and does not go on between domains of several
        machines."""
        crosses = links.nodes > 1
        several = (crosses & self.trees) | (not algorithm.between_nodes)
        if operation == "all_reduce" and algorithm.name in TREE_OR_RING:
            in_tree = crosses & self.trees & prefers_tree(payload_bytes, links)
            several = several & (in_tree if algorithm.between_nodes else ~in_tree | ~crosses)
        in_switch = (links.inside.ranks >= SWITCH_RANKS) & ~(crosses & links.many_hosts)
        return np.asarray(several & (in_switch | (not algorithm.in_network)))

    def seconds(self, algorithm: Algorithm, operation: str, payload_bytes: Numeric, links: GroupLinks) -> Array:
        """Seconds of one algorithm: inside a node, or between nodes and then no less than the node's own ranks need."""
        crosses, inside = links.nodes > 1, self._inside(algorithm, operation, payload_bytes, links.inside)
        if np.any(crosses):
            traffic = algorithm.traffic(operation, payload_bytes, links.fan_outs)
            across = self._across(algorithm, operation, traffic, links)
            part_of_it = (links.inside.ranks > 1) & (operation not in EXCHANGES)
            inside = np.where(crosses, np.maximum(across, np.where(part_of_it, inside, 0.0)), inside)
        possible = np.asarray(self.switch_can_add) | (not algorithm.in_network)
        return np.where(possible, inside, np.inf)

    def _across(self, algorithm: Algorithm, operation: str, traffic: Traffic, links: GroupLinks) -> Array:
        if operation in EXCHANGES:
            return fabric_exchange_time(
                operation=operation, traffic=traffic, links=links, parameters=self.between, shift=self.shift
            )
        return fabric_time(
            operation=operation, traffic=traffic, links=links, parameters=self.between, lockstep=algorithm.lockstep
        )

    def _inside(self, algorithm: Algorithm, operation: str, payload: Numeric, links: GroupLinks) -> Array:
        traffic = algorithm.traffic(operation, payload, links.fan_outs)
        if operation in EXCHANGES:
            return exchange_time(payload_bytes=payload, traffic=traffic, links=links, parameters=self.exchange)
        if algorithm.in_network:
            return switch_time(traffic=traffic, links=links, parameters=self.inside)
        return node_time(
            operation=operation, payload_bytes=payload, traffic=traffic, links=links, parameters=self.inside,
            low_latency=self.low_latency, adds_bytes=~np.asarray(self.switch_can_add),
        )  # fmt: skip

    def least(self, operation: str, payload_bytes: Numeric, links: GroupLinks, *, in_network: bool) -> Array:
        """The start of a kernel and the bytes at the datasheet's bandwidth."""
        costs = [
            LevelCost(0.0, 1.0 / (np.asarray(bandwidth) * unit))
            for bandwidth, unit in zip(links.bandwidths, links.unit_ports, strict=True)
        ]
        inside = self.exchange.launch if operation in EXCHANGES else self.inside.launch
        launch = np.where(links.nodes > 1, self.between.launch, inside) * (links.ranks > 1)
        return np.asarray(launch + _least(operation, payload_bytes, links, costs, in_network))


def _least(operation: str, payload: Numeric, links: GroupLinks, costs: Sequence[LevelCost], in_network: bool) -> Array:
    if links.topologies == {"torus"}:
        return torus_bound(operation, payload, links.fan_outs, costs)
    return lower_bound(operation, payload, links.fan_outs, costs, in_network=in_network)
