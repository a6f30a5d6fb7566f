"""Time of NCCL and textbook collectives for groups of ranks on a system.

A group of ranks spans levels of the network (`GroupLinks`). A collective model says which algorithms a library chooses
from, and the time of each. All algorithms in the registry are covered, so that a new one is included automatically.
`Nccl` has calibrated launch costs, steps and link efficiencies. `AlphaBetaModel` has the constants of the calibrations
``ideal`` and ``ppp=…``. The fastest algorithm, and the payloads at which it changes, follow from these times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from paleo.collectives.base import Array, CollectiveAlgorithm, Numeric, Traffic, algorithms_for, double_tree_imbalance
from paleo.errors import PlanError, SpecError, suggest_names
from paleo.pricing.calibration_lookup import (
    INTERVAL_FACTOR_PER_RELATED_ARCHITECTURE,
    ConstantEfficiencies,
    SourcedParameters,
    find_calibrated_parameters,
)
from paleo.pricing.links.alpha_beta import (
    LevelCost,
    collective_time_lower_bound,
    collective_traffic_time,
    torus_time_lower_bound,
)
from paleo.pricing.links.fabric import (
    FabricParameters,
    default_fabric_parameters,
    inter_node_collective_time,
    inter_node_exchange_time,
    links_with_default_latency,
    measured_exchange_system,
    measured_fabric_system,
    tuner_prefers_in_switch,
    tuner_prefers_tree,
    with_exchange_parameters,
)
from paleo.pricing.links.group import (
    MIN_SWITCH_RANKS,
    PAIRWISE_OPERATIONS,
    BoolArray,
    ExchangeParameters,
    GroupLinks,
    NcclParameters,
    group_links,
    in_switch_collective_time,
    intra_node_collective_time,
    intra_node_exchange_time,
    intra_node_link_kind,
    stack_group_links,
)
from paleo.pricing.links.topology import NodePlacement, placement_nic_share
from paleo.units import TERA

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration
    from paleo.specs.system import System

#: Algorithms of an all_reduce over nodes between which the library's cost model chooses.
_TREE_OR_RING = ("ring", "chain_tree")
#: Largest payload of the search for crossovers [byte], and the relative width at which it ends.
_LARGEST_PAYLOAD, _BISECTION = TERA, 2.0**-30


class AlgorithmTimeFunction(Protocol):
    """Function that returns the time of a collective by each algorithm [s], for an array of payloads [byte].

    The result maps names of algorithms to arrays of the shape of the payloads.
    """

    def __call__(self, payload_bytes: Array, names: Sequence[str] | None = None, /) -> Mapping[str, Array]: ...


@dataclass(frozen=True, slots=True)
class FastestAlgorithm:
    """Name of the fastest algorithm and its time [s]; both arrays have the shape of the payloads."""

    algorithm: npt.NDArray[np.str_]
    time: Array


def _fastest_algorithm_per_payload(table: Mapping[str, Array]) -> FastestAlgorithm:
    """Choose the fastest collective algorithm for each payload; a tie goes to the first name.

    Parameters
    ----------
    table : mapping of str to ndarray
        Times of each algorithm by name [s], all of one shape.

    Returns
    -------
    FastestAlgorithm
        Name and time of the fastest for each element.

    Examples
    --------
    >>> choice = _fastest_algorithm_per_payload({"ring": np.array([3.0, 1.0]), "tree": np.array([2.0, 4.0])})
    >>> choice.algorithm.tolist(), choice.time.tolist()
    (['tree', 'ring'], [2.0, 1.0])
    """
    stacked = np.stack(np.broadcast_arrays(*table.values()))
    return FastestAlgorithm(np.asarray(list(table))[stacked.argmin(axis=0)], np.asarray(stacked.min(axis=0)))


@dataclass(frozen=True, slots=True)
class Crossover:
    """Payload [byte] at which the fastest algorithm changes from ``below`` to ``above`` (names of algorithms)."""

    payload_bytes: float
    below: str
    above: str


def algorithm_crossovers(prices: AlgorithmTimeFunction) -> list[Crossover]:
    """Find the payloads, from a byte to `_LARGEST_PAYLOAD`, at which the fastest algorithm of a collective changes.

    A logarithmic grid finds the changes, bisection refines each to a relative 1e-9.

    Parameters
    ----------
    prices : AlgorithmTimeFunction
        Function from payloads [byte] to times by algorithm [s].

    Returns
    -------
    list of Crossover
        Payloads in rising order, with the algorithms below and above.
    """
    grid = np.geomspace(1.0, _LARGEST_PAYLOAD, 40 * round(np.log2(_LARGEST_PAYLOAD)))
    winners = _fastest_algorithm_per_payload(prices(grid)).algorithm
    changes = []
    for index in np.flatnonzero(winners[1:] != winners[:-1]):
        below, above = str(winners[index]), str(winners[index + 1])
        payload = _crossing(prices, grid[index], grid[index + 1], below, above)
        changes.append(Crossover(payload, below, above))
    return changes


def _crossing(prices: AlgorithmTimeFunction, low: float, high: float, below: str, above: str) -> float:
    while high / low - 1.0 > _BISECTION:
        middle = float(np.sqrt(low * high))
        table = prices(np.asarray(middle))
        low, high = (middle, high) if table[below] <= table[above] else (low, middle)
    return high


class CollectiveModel(Protocol):
    """Protocol of a collective library (such as NCCL): which algorithms it may run, and the time of each."""

    def candidate_algorithms(self, operation: str, links: GroupLinks) -> list[CollectiveAlgorithm]:
        """List the algorithms that the library may run for a collective over a group's links.

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        list of CollectiveAlgorithm
            Algorithms that these links can run.
        """
        ...

    def would_run(
        self, algorithm: CollectiveAlgorithm, operation: str, payload_bytes: Numeric, links: GroupLinks
    ) -> BoolArray:
        """Return True for the payloads for which the library would choose an algorithm.

        Parameters
        ----------
        algorithm : CollectiveAlgorithm
            Collective algorithm, such as a ring.
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        ndarray of bool
            The shape of `payload_bytes`.
        """
        ...

    def algorithm_time(
        self, algorithm: CollectiveAlgorithm, operation: str, payload_bytes: Numeric, links: GroupLinks
    ) -> Array:
        """Compute the time of a collective by one algorithm.

        Parameters
        ----------
        algorithm : CollectiveAlgorithm
            Collective algorithm, such as a ring.
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        ndarray
            Seconds; infinite if the network does not support the algorithm.
        """
        ...

    def time_lower_bound(self, operation: str, payload_bytes: Numeric, links: GroupLinks, *, in_network: bool) -> Array:
        """Compute a lower bound of the time of a collective by any algorithm [s].

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.
        in_network : bool
            True if switches may combine and copy messages.

        Returns
        -------
        ndarray
            Time [s].
        """
        ...


def _algorithms_by_name(operation: str, links: GroupLinks, names: Sequence[str]) -> list[CollectiveAlgorithm]:
    """Return the algorithms with given names, after checking that they serve the operation.

    Parameters
    ----------
    operation : str
        Collective operation, such as ``all_reduce``.
    links : GroupLinks
        Levels of the network that the group spans.
    names : sequence of str
        Names of algorithms.

    Returns
    -------
    list of CollectiveAlgorithm
        Algorithms in the order of ``names``.

    Raises
    ------
    PlanError
        If the network does not support an algorithm.
    SpecError
        If there is no such algorithm, or it lacks the operation.
    """
    serving = {algorithm.name: algorithm for algorithm in algorithms_for(operation)}
    for name in names:
        if name not in serving:
            raise SpecError(f"no algorithm {name!r} for {operation!r}; {suggest_names(name, serving)}")
        if not links.can_run(serving[name], operation):
            needed = serving[name].required_topology or "switches that add"
            raise PlanError(f"algorithm {name!r} needs a network with {needed}; links are {sorted(links.topologies)}")
    return [serving[name] for name in names]


def algorithm_times(
    policy: CollectiveModel,
    operation: str,
    payload_bytes: Numeric,
    links: GroupLinks,
    names: Sequence[str] | None = None,
) -> dict[str, Array]:
    """Compute the time of a collective by each algorithm that a library may run, or by named algorithms.

    Parameters
    ----------
    policy : CollectiveModel
        Model of a collective library.
    operation : str
        Collective operation, such as ``all_reduce``.
    payload_bytes : array-like
        Size of the whole tensor [byte].
    links : GroupLinks
        Levels of the network that the group spans.
    names : sequence of str, optional
        Names of algorithms; by default all candidates of the policy.

    Returns
    -------
    dict of str to ndarray
        Times by algorithm [s]; infinite where the library would not run it.
    """
    if names is not None:
        chosen = _algorithms_by_name(operation, links, names)
        return {each.name: policy.algorithm_time(each, operation, payload_bytes, links) for each in chosen}
    times = {}
    for each in policy.candidate_algorithms(operation, links):
        would_run = policy.would_run(each, operation, payload_bytes, links)
        times[each.name] = np.where(would_run, policy.algorithm_time(each, operation, payload_bytes, links), np.inf)
    return times


def fastest_algorithm(
    policy: CollectiveModel,
    operation: str,
    payload_bytes: Numeric,
    links: GroupLinks,
    names: Sequence[str] | None = None,
) -> FastestAlgorithm:
    """Find the fastest algorithm that a library may run for a collective of each payload, or of named ones.

    Parameters
    ----------
    policy : CollectiveModel
        Model of a collective library.
    operation : str
        Collective operation, such as ``all_reduce``.
    payload_bytes : array-like
        Size of the whole tensor [byte].
    links : GroupLinks
        Levels of the network that the group spans.
    names : sequence of str, optional
        Names of algorithms; by default all candidates of the policy.

    Returns
    -------
    FastestAlgorithm
        Name and time [s] for each payload.

    Examples
    --------
    >>> from paleo.pricing.links.group import GroupLinks, LinkLevel
    >>> links = GroupLinks((LinkLevel(8.0, 300e9),))
    >>> choice = fastest_algorithm(Nccl(), "all_reduce", 2.0**29, links)
    >>> choice.algorithm.item(), 0.0035 < float(choice.time) < 0.0045
    ('ring', True)
    """
    return _fastest_algorithm_per_payload(algorithm_times(policy, operation, payload_bytes, links, names))


@dataclass(frozen=True, slots=True)
class AlphaBetaModel:
    """Collective model of textbooks: all algorithms of the literature, with alpha-beta costs.

    Bandwidths are constant shares of the datasheet bandwidth.
    """

    efficiencies: ConstantEfficiencies

    def level_costs(self, links: GroupLinks) -> tuple[LevelCost, ...]:
        """Return latency (alpha) and inverse bandwidth (beta) of each interconnect level that a group spans.

        Parameters
        ----------
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        tuple of LevelCost
            Levels from inner to outer.
        """
        share = self.efficiencies.link or 1.0
        return tuple(
            LevelCost(
                alpha=level.latency * float(self.efficiencies.includes_latency),
                beta=1.0 / (np.asarray(level.port_bandwidth) * level.shared_unit_ports * share),
                rank_beta=1.0 / (np.asarray(level.port_bandwidth) * level.rank_ports * share),
            )
            for level in links.levels
        )

    def candidate_algorithms(self, operation: str, links: GroupLinks) -> list[CollectiveAlgorithm]:
        """List all algorithms of the literature for a collective operation, except parameter servers.

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        list of CollectiveAlgorithm
            Algorithms that these links can run.
        """
        return _runnable_algorithms(("textbook",), operation, links)

    def would_run(
        self, algorithm: CollectiveAlgorithm, operation: str, payload_bytes: Numeric, links: GroupLinks
    ) -> BoolArray:
        """Return True for every algorithm: this model has no rule that excludes one.

        Parameters
        ----------
        algorithm : CollectiveAlgorithm
            Collective algorithm, such as a ring.
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        ndarray of bool
            A single True, which broadcasts.
        """
        return np.asarray(True)

    def algorithm_time(
        self, algorithm: CollectiveAlgorithm, operation: str, payload_bytes: Numeric, links: GroupLinks
    ) -> Array:
        """Compute the time of a collective by one algorithm, from latency (alpha) and bandwidth (beta).

        Parameters
        ----------
        algorithm : CollectiveAlgorithm
            Collective algorithm, such as a ring.
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        ndarray
            Time [s].
        """
        traffic = algorithm.traffic(operation, payload_bytes, links.fan_outs)
        return collective_traffic_time(traffic, self.level_costs(links))

    def time_lower_bound(self, operation: str, payload_bytes: Numeric, links: GroupLinks, *, in_network: bool) -> Array:
        """Compute the alpha-beta lower bound of the time of a collective by any algorithm [s].

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.
        in_network : bool
            True if switches may combine and copy messages.

        Returns
        -------
        ndarray
            Time [s].
        """
        return _time_lower_bound(operation, payload_bytes, links, self.level_costs(links), in_network)


@dataclass(frozen=True, slots=True)
class Nccl:
    """Collective model of NCCL: its algorithms and its choice among them, with calibrated parameters.

    Attributes
    ----------
    intra_node, intra_node_exchange, inter_node : parameters
        Calibration of collectives inside a node, of all_to_all and send_recv inside a node, and of collectives between
        nodes.
    switch_can_add : bool or ndarray of bool
        True if the switches can add the dtype. They cannot add int8, which threads also add at a lower rate.
    has_ll_protocol, has_trees : bool or ndarray of bool
        True if the library has the LL protocol (NCCL 2.1 and later), and trees between nodes (2.4 and later).
    sends_in_ring_shift : bool
        True if all ranks send round the group at once in a send_recv, as in nccl-tests. False: neighbours exchange in
        pairs, as pipeline stages do.
    """

    intra_node: NcclParameters = field(default_factory=NcclParameters)
    intra_node_exchange: ExchangeParameters = field(default_factory=ExchangeParameters)
    inter_node: FabricParameters = field(default_factory=FabricParameters)
    switch_can_add: bool | BoolArray = True
    has_ll_protocol: bool | BoolArray = True
    has_trees: bool | BoolArray = True
    sends_in_ring_shift: bool = False

    def candidate_algorithms(self, operation: str, links: GroupLinks) -> list[CollectiveAlgorithm]:
        """List the algorithms of NCCL for a collective operation and, on a torus, those of XLA.

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        list of CollectiveAlgorithm
            Algorithms that these links can run.
        """
        return _runnable_algorithms(("nccl", "xla") if "torus" in links.topologies else ("nccl",), operation, links)

    def would_run(
        self, algorithm: CollectiveAlgorithm, operation: str, payload_bytes: Numeric, links: GroupLinks
    ) -> BoolArray:
        """Return True for the payloads for which NCCL's tuner would run an algorithm.

        Between nodes the tuner chooses trees for payloads that it expects to be faster with them, and rings otherwise.
        In-switch reduction needs at least `MIN_SWITCH_RANKS` ranks of a node. Over several nodes the tuner uses it for
        payloads that it expects to be faster; it does not extend over domains of several machines.

        Parameters
        ----------
        algorithm : CollectiveAlgorithm
            Collective algorithm, such as a ring.
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        ndarray of bool
            The shape of `payload_bytes`.
        """
        crosses = links.nodes > 1
        several = (crosses & self.has_trees) | (not algorithm.only_between_nodes)
        if operation == "all_reduce" and algorithm.name in _TREE_OR_RING:
            in_tree = crosses & self.has_trees & tuner_prefers_tree(payload_bytes, links)
            several = several & (in_tree if algorithm.only_between_nodes else ~in_tree | ~crosses)
        if not algorithm.reduces_in_network:
            return np.asarray(several)
        expected = ~crosses | (tuner_prefers_in_switch(payload_bytes, links) & ~links.node_spans_hosts)
        return np.asarray(several & expected & (links.intra_node_links.ranks >= MIN_SWITCH_RANKS))

    def algorithm_time(
        self, algorithm: CollectiveAlgorithm, operation: str, payload_bytes: Numeric, links: GroupLinks
    ) -> Array:
        """Compute the time of a collective by one NCCL algorithm, inside a node or between nodes.

        Parameters
        ----------
        algorithm : CollectiveAlgorithm
            Collective algorithm, such as a ring.
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.

        Returns
        -------
        ndarray
            Seconds; between nodes at least the time of the part inside a node.
        """
        crosses, inside = links.nodes > 1, self._inside(algorithm, operation, payload_bytes, links.intra_node_links)
        if np.any(crosses):
            traffic = algorithm.traffic(operation, payload_bytes, links.fan_outs)
            across = self._across(algorithm, operation, traffic, links)
            part_of_it = (links.intra_node_links.ranks > 1) & (operation not in PAIRWISE_OPERATIONS)
            inside = np.where(crosses, np.maximum(across, np.where(part_of_it, inside, 0.0)), inside)
        possible = np.asarray(self.switch_can_add) | (not algorithm.reduces_in_network)
        return np.where(possible, inside, np.inf)

    def _across(self, algorithm: CollectiveAlgorithm, operation: str, traffic: Traffic, links: GroupLinks) -> Array:
        if operation in PAIRWISE_OPERATIONS:
            return inter_node_exchange_time(operation, traffic, links, self.inter_node, shift=self.sends_in_ring_shift)
        in_trees = operation == "all_reduce" and (algorithm.only_between_nodes or algorithm.reduces_in_network)
        imbalance = double_tree_imbalance(links.nodes) if in_trees else 1.0
        return inter_node_collective_time(
            traffic, links, self.inter_node, lockstep=algorithm.is_lockstep, imbalance=imbalance
        )

    def _inside(self, algorithm: CollectiveAlgorithm, operation: str, payload: Numeric, links: GroupLinks) -> Array:
        traffic = algorithm.traffic(operation, payload, links.fan_outs)
        if operation in PAIRWISE_OPERATIONS:
            return intra_node_exchange_time(payload, traffic, links, self.intra_node_exchange)
        if algorithm.reduces_in_network:
            return in_switch_collective_time(operation, traffic, links, self.intra_node)
        return intra_node_collective_time(
            operation, payload, traffic, links, self.intra_node,
            low_latency=self.has_ll_protocol, adds_bytes=~np.asarray(self.switch_can_add),
        )  # fmt: skip

    def time_lower_bound(self, operation: str, payload_bytes: Numeric, links: GroupLinks, *, in_network: bool) -> Array:
        """Compute a lower bound of the time of a collective by any algorithm [s].

        The bound is the start of a kernel, and the bytes at the datasheet bandwidth.

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.
        payload_bytes : array-like
            Size of the whole tensor [byte].
        links : GroupLinks
            Levels of the network that the group spans.
        in_network : bool
            True if switches may combine and copy messages.

        Returns
        -------
        ndarray
            Time [s].
        """
        rates = (np.asarray(level.port_bandwidth) * level.shared_unit_ports for level in links.levels)
        costs = [LevelCost(0.0, 1.0 / rate) for rate in rates]
        inside = self.intra_node_exchange if operation in PAIRWISE_OPERATIONS else self.intra_node
        launch = np.where(links.nodes > 1, self.inter_node.launch_time, inside.launch_time) * (links.ranks > 1)
        return np.asarray(launch + _time_lower_bound(operation, payload_bytes, links, costs, in_network))


def _runnable_algorithms(libraries: Sequence[str], operation: str, links: GroupLinks) -> list[CollectiveAlgorithm]:
    """List the algorithms of an operation that libraries have and that the links of a group can run."""
    return [
        each
        for each in algorithms_for(operation)
        if any(each.is_candidate_for(name, operation) for name in libraries) and links.can_run(each, operation)
    ]


def _time_lower_bound(
    operation: str, payload: Numeric, links: GroupLinks, costs: Sequence[LevelCost], in_network: bool
) -> Array:
    if links.topologies == {"torus"}:
        return torus_time_lower_bound(operation, payload, links.fan_outs, costs)
    return collective_time_lower_bound(operation, payload, links.fan_outs, costs, in_network=in_network)


IntArray = npt.NDArray[np.int64]
#: Calibration families of links and their parameters: rings inside a node, exchanges inside a node, all traffic between
#: nodes.
COLLECTIVE_CALIBRATION_FAMILIES: Mapping[str, type[Any]] = {
    "collective.nccl": NcclParameters,
    "collective.exchange": ExchangeParameters,
    "collective.fabric": FabricParameters,
}
#: Kinds of timing of the calibration rows, the preferred one first: collectives of whole steps; nccl-tests, launched
#: back to back.
_NCCL_TIMING_METHODS = ("step", "back-to-back")
#: Formats that the switches of a node cannot add.
SWITCH_UNSUPPORTED_DTYPES = frozenset({"int8"})


def collective_parameters(
    system: System, family: str, calibration: Calibration | None = None
) -> SourcedParameters[Any]:
    """Return the calibrated parameters of one family of collectives on a system, such as NCCL within a node.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    family : str
        Calibration family, such as ``collective.nccl``.
    calibration : Calibration, optional
        Calibration of the user, which takes precedence over the shipped ones.

    Returns
    -------
    SourcedParameters[Any]
        Parameters. An unmeasured fabric inherits them from a measured one of its kind, with a wider interval, or has
        the defaults of its kind of link.
    """
    calibrated = find_calibrated_parameters(
        COLLECTIVE_CALIBRATION_FAMILIES[family],
        subject=system.name,
        architecture=system.device.architecture,
        memory_kind=intra_node_link_kind(system),
        family=family,
        stacks=_NCCL_TIMING_METHODS,
        user_calibration=calibration,
    )
    if calibrated.origin != "default" or family != "collective.fabric":
        return calibrated
    relative, exchange = measured_fabric_system(system), measured_exchange_system(system)
    if relative is not None:
        entry, wider = _parameters_of_system(relative), INTERVAL_FACTOR_PER_RELATED_ARCHITECTURE
        bins = tuple((end, low / wider, high * wider) for end, low, high in entry.interval_bins)
        return replace(entry, origin="inherited", interval_bins=bins)
    usual = default_fabric_parameters(system)
    if exchange is None:
        return replace(calibrated, parameters=usual)
    return replace(calibrated, parameters=with_exchange_parameters(usual, _parameters_of_system(exchange).parameters))


def _parameters_of_system(system: str) -> SourcedParameters[FabricParameters]:
    """Return the calibrated NCCL parameters between the nodes of a measured system, by the system's name."""
    family, stacks = "collective.fabric", _NCCL_TIMING_METHODS
    return find_calibrated_parameters(FabricParameters, subject=system, architecture="", family=family, stacks=stacks)


@dataclass(frozen=True, slots=True)
class Fabric:
    """Predictor of collective times on the network of one system, for many groups of ranks at once.

    A group is a stride between neighbouring ranks and a number of ranks. Times are those of calibrated NCCL, or of an
    alpha-beta model if ``constant_efficiencies`` is set. All groups of the same mesh axes are assumed to exchange at
    the same time and to share the ports of their nodes. ``forced_algorithm`` forces an algorithm for all-reduces.
    ``host_launch_time`` is the host time of launching a collective, a floor of its time [s]. ``token_exchange_library``
    is the library of the MoE token exchange. ``token_handshake_time`` is the time of a token exchange between nodes in
    addition to its bytes [s]. ``efa_handshake_times`` is added to that for each EFA port of a device, with NCCL and
    with other libraries [s].
    """

    system: System
    forced_algorithm: str | None = None
    constant_efficiencies: ConstantEfficiencies | None = None
    user_calibration: Calibration | None = None
    host_launch_time: float = 0.0
    dtype: str | None = None
    placement: NodePlacement | None = None
    token_handshake_time: float = 0.0
    efa_handshake_times: tuple[float, float] = (0.0, 0.0)
    token_exchange_library: str = "nccl"
    _links: dict[tuple[int, int], GroupLinks] = field(default_factory=dict, init=False, repr=False, compare=False)
    _policies: list[CollectiveModel] = field(default_factory=list, init=False, repr=False, compare=False)
    _known: dict[str, dict[bytes, float]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def collective_times(self, operation: str, strides: IntArray, ranks: IntArray, payload_bytes: Array) -> Array:
        """Compute the time of one collective operation for each of several groups.

        Equal collectives are computed once, as most layouts of a search share them.

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.
        strides : IntArray, shape (n,)
            Distance between neighbouring ranks of each group.
        ranks : IntArray, shape (n,)
            Number of ranks of each group.
        payload_bytes : ndarray, shape (n,)
            Size of the whole tensor [byte].

        Returns
        -------
        ndarray, shape (n,)
            Times [s]; 0 for groups of one rank and empty payloads.
        """
        seconds = np.zeros(len(payload_bytes))
        used = np.flatnonzero((ranks > 1) & (payload_bytes > 0))
        if len(used):
            different, places = _distinct(strides[used], ranks[used], payload_bytes[used])
            first, known = used[different], self._known.setdefault(operation, {})
            numbers = np.stack([strides[first], ranks[first], payload_bytes[first]], axis=1)
            keys = numbers.view(f"V{numbers.itemsize * 3}").ravel().tolist()
            new = [number for number, key in enumerate(keys) if key not in known]
            if new:
                pairs = numbers[new, :2]
                starts = np.flatnonzero(np.any(np.diff(pairs, axis=0, prepend=-1), axis=1))
                groups = [(int(stride), int(size)) for stride, size in pairs[starts]]
                index = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(new)))
                times = self._times(operation, groups, index, numbers[new, 2])
                known.update(zip((keys[each] for each in new), times.tolist(), strict=True))
            seconds[used] = np.array([known[key] for key in keys])[places]
        return seconds

    def _times(self, operation: str, groups: list[tuple[int, int]], index: IntArray, payload_bytes: Array) -> Array:
        """Compute the time of the fastest algorithm for each payload [s]; payload i goes over group ``index[i]``."""
        if not self.system.levels:
            raise PlanError(f"system {self.system.name} is one device alone; {operation} needs links")
        links = stack_group_links([self._placed(operation, *group) for group in groups], index)
        names = [self.forced_algorithm] if self.forced_algorithm is not None and operation == "all_reduce" else None
        fastest = fastest_algorithm(self.collective_model, operation, payload_bytes, links, names)
        return np.maximum(fastest.time, self._floor)

    def algorithm_times(
        self, operation: str, links: GroupLinks, payload_bytes: Array, names: Sequence[str]
    ) -> dict[str, Array]:
        """Compute the time of each named algorithm over one group, for an array of payloads.

        Parameters
        ----------
        operation : str
            Collective operation, such as ``all_reduce``.
        links : GroupLinks
            Levels of the network that the group spans.
        payload_bytes : ndarray
            Size of the whole tensor [byte].
        names : sequence of str
            Names of algorithms.

        Returns
        -------
        dict of str to ndarray
            Time of each algorithm by name [s].
        """
        table = algorithm_times(self.collective_model, operation, payload_bytes, links, names)
        return {name: np.maximum(seconds, self._floor) for name, seconds in table.items()}

    @property
    def _floor(self) -> float:
        """Least time of a collective: the host time of its launch, or 0 with constant efficiencies [s]."""
        return self.host_launch_time if self.constant_efficiencies is None else 0.0

    def _placed(self, operation: str, stride: int, ranks: int) -> GroupLinks:
        """Return the links of a group with the bandwidth that the group keeps in the fabric between nodes.

        That bandwidth depends on the placement of nodes, hashing of routes, neighbouring jobs, and other groups of the
        job.
        """
        links, node_stride = self.links(stride, ranks), max(1.0, stride / self.system.devices_per_node)
        if self.placement is None or links.inter_node_level_count == 0:
            return links
        share = placement_nic_share(self.system, int(links.nodes), self.placement, node_stride).share(operation)
        inside, outside = links.levels[: links.intra_node_level_count], links.levels[links.intra_node_level_count :]
        left = (replace(level, port_bandwidth=level.port_bandwidth * share) for level in outside)
        return replace(links, levels=(*inside, *left))

    def token_dispatch_target_count(self, stride: int, ranks: int) -> int:
        """Count the destinations of a token dispatch over a group: its nodes, or its ranks if it is within one node.

        Parameters
        ----------
        stride : int
            Distance of neighbours of the group, in ranks.
        ranks : int
            Number of ranks of the group.

        Returns
        -------
        int
            Number of nodes or ranks.
        """
        if ranks == 1 or not self.system.levels:
            return ranks
        nodes = int(self.links(stride, ranks).nodes)
        return nodes if nodes > 1 else ranks

    def group_handshake_time(self, stride: int, ranks: int) -> float:
        """Return the fixed time of an MoE token exchange between nodes, in addition to the transfer [s].

        The time is 0 for a group inside one node.

        Parameters
        ----------
        stride : int
            Distance of neighbours of the group, in ranks.
        ranks : int
            Number of ranks of the group.

        Returns
        -------
        float
            Time [s].
        """
        if ranks == 1 or int(self.links(stride, ranks).nodes) == 1:
            return 0.0
        ports = [level.ports or 1 for level in self.system.levels if level.link.kind == "efa"]
        endpoints = max(1.0, max(ports) / self.system.devices_per_node) if ports else 0.0
        return self.token_handshake_time + endpoints * self.efa_handshake_times[self.token_exchange_library != "nccl"]

    def token_exchange_time(self, step: str, stride: int, ranks: int, payload_bytes: Array) -> Array | None:
        """Compute the time of an MoE token exchange within a node by DeepEP's measured kernels.

        Token exchanges between nodes use NCCL's collectives instead. The measured rows between nodes are of one
        cluster, whose rates halve from four to eight nodes. Steps on 8 to 32 nodes of other clusters are predicted
        worse with them (10 to 21 %).

        Parameters
        ----------
        step : str
            ``dispatch`` or ``combine``.
        stride : int
            Distance of neighbours of the group, in ranks.
        ranks : int
            Number of ranks of the group.
        payload_bytes : ndarray
            Bytes that a rank sends, including those to itself.

        Returns
        -------
        ndarray, optional
            Times [s]; None if the exchange is to be predicted as NCCL's collectives.
        """
        measured = self.token_exchange_library == "deepep" and self.constant_efficiencies is None and ranks > 1
        if not measured or int(self.links(stride, ranks).nodes) > 1:
            return None
        from paleo.pricing.moe_token_exchange import TRAINING_DEEPEP_MODE, intra_node_token_exchange_time

        return intra_node_token_exchange_time(payload_bytes, ranks, self.system, f"{TRAINING_DEEPEP_MODE}.{step}")

    def links(self, stride: int, ranks: int) -> GroupLinks:
        """Return the link levels that one communication group uses, inner to outer.

        Parameters
        ----------
        stride : int
            Distance of neighbours of the group, in ranks.
        ranks : int
            Number of ranks of the group.

        Returns
        -------
        GroupLinks
            Bandwidth and latency of each level for this group.
        """
        if (stride, ranks) not in self._links:
            links = group_links(self.system, stride=stride, size=ranks)
            origin = collective_parameters(self.system, "collective.fabric", self.user_calibration).origin
            if self.constant_efficiencies is None and origin == "default":
                links = links_with_default_latency(links, self.system)
            self._links[stride, ranks] = links
        return self._links[stride, ranks]

    @property
    def collective_model(self) -> CollectiveModel:
        """Model of the collective library: `AlphaBetaModel` if ``constant_efficiencies`` is set, else `Nccl`."""
        if not self._policies and self.constant_efficiencies is not None:
            self._policies.append(AlphaBetaModel(self.constant_efficiencies))
        elif not self._policies:
            inside, exchange, between = (family.parameters for family in self.calibrated_parameters().values())
            can_add = self.dtype not in SWITCH_UNSUPPORTED_DTYPES
            self._policies.append(Nccl(inside, exchange, between, switch_can_add=can_add))
        return self._policies[0]

    def calibrated_parameters(self) -> dict[str, SourcedParameters[Any]]:
        """Return the calibrated parameters of each family of collectives, with their sources.

        The families are NCCL inside a node, pairwise exchanges inside a node, and all traffic between nodes.
        """
        return {
            family: collective_parameters(self.system, family, self.user_calibration)
            for family in COLLECTIVE_CALIBRATION_FAMILIES
        }


def _distinct(strides: IntArray, ranks: IntArray, payload_bytes: Array) -> tuple[IntArray, IntArray]:
    """Find equal collectives among many, so that each is computed once.

    Returns the positions of the distinct collectives, and for every collective the index of its equal among these.
    """
    groups = strides * (ranks.max() + 1) + ranks
    _, different, place = np.unique(groups + 1j * payload_bytes, return_index=True, return_inverse=True)
    return different, place


def describe_collective_calibration(fabric: Fabric, operation: str, links: GroupLinks) -> str:
    """Describe the calibration behind a collective operation over a group, as text for reports.

    Parameters
    ----------
    fabric : Fabric
        Network of the system.
    operation : str
        Collective operation, such as ``all_reduce``.
    links : GroupLinks
        Levels of the network that the group spans.

    Returns
    -------
    str
        Text such as ``measured (dgx-h100) collective.nccl``.
    """
    if fabric.constant_efficiencies is not None:
        return fabric.constant_efficiencies.name
    by_origin: dict[str, list[str]] = {}
    for family, entry in collective_calibrations(fabric, operation, links).items():
        by_origin.setdefault(f"{entry.origin} ({entry.source_name})", []).append(family)
    return "; ".join(f"{origin} {', '.join(families)}" for origin, families in by_origin.items())


def collective_calibrations(fabric: Fabric, operation: str, links: GroupLinks) -> dict[str, SourcedParameters[Any]]:
    """Return the calibrated parameters that predict a collective operation over a group, by calibration family.

    Parameters
    ----------
    fabric : Fabric
        Network of the system.
    operation : str
        Collective operation, such as ``all_reduce``.
    links : GroupLinks
        Levels of the network that the group spans.

    Returns
    -------
    dict of str to SourcedParameters[Any]
        Parameters by family, with their sources.
    """
    families = ["collective.exchange" if operation in PAIRWISE_OPERATIONS else "collective.nccl"]
    if np.any(links.nodes > 1):
        within = np.any(links.intra_node_links.ranks > 1) and operation not in PAIRWISE_OPERATIONS
        families = ["collective.fabric", *(families if within else ())]
    return {family: fabric.calibrated_parameters()[family] for family in families}
