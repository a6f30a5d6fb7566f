"""Registry of collective algorithms, and helper formulas for groups of ranks over several network levels.

An algorithm turns (operation, payload, group) into `Traffic`, whatever device, latency and bandwidth. The payload
follows nccl-tests' S: the buffer of one rank for all_reduce, broadcast and send_recv; the full buffer (all shards
together) for all_gather, reduce_scatter and all_to_all.

A group is written as its fan-outs from the inner level of the network to the outer one: ``(8, 4)`` is four nodes of
eight ranks. A *unit* of a level is one member that the level joins: a rank at the inner level, a node at the next one.
Bytes are those that the busiest unit *sends* into the level, in one direction. So the price of a level is the bandwidth
of one unit into the level, however many ranks that unit has.

Groups that are no power of two take ceil(log2 P) rounds where a formula asks for log2 P. Their bytes keep the textbook
form; the fold that MPI libraries do before and after is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError, suggest_names
from paleo.registry import Registry

Array = npt.NDArray[np.float64]
#: A number or an array of numbers; all formulas broadcast.
Numeric = float | Array
#: Fan-outs per level, inner to outer; their product is the number of ranks.
FanOuts = Sequence[Numeric]


@dataclass(frozen=True, slots=True)
class LevelTraffic:
    """Messages over one interconnect level (NVLink, InfiniBand, …) during one phase of a collective.

    Attributes
    ----------
    steps : float or ndarray
        Number of consecutive messages, each of which waits for the one before [1].
    wire_bytes : float or ndarray
        Bytes that the busiest member (GPU, node or rack) sends into this level, in one direction [byte].
    reduced_bytes : float or ndarray
        Bytes that one rank combines arithmetically with what it received over this level [byte].
    senders_per_member : float or ndarray, optional
        Number of ranks of that member that send, each through its ports [1]. None: all of them.
    """

    steps: Numeric = 0.0
    wire_bytes: Numeric = 0.0
    reduced_bytes: Numeric = 0.0
    senders_per_member: Numeric | None = None

    def __add__(self, other: LevelTraffic) -> LevelTraffic:  # the senders of a sum are not told apart
        steps, sent = self.steps + other.steps, self.wire_bytes + other.wire_bytes
        return LevelTraffic(steps, sent, self.reduced_bytes + other.reduced_bytes)

    def __mul__(self, times: Numeric) -> LevelTraffic:
        counts = (self.steps * times, self.wire_bytes * times, self.reduced_bytes * times)
        return LevelTraffic(*counts, self.senders_per_member)


#: One phase: the traffic per level, inner to outer; the levels work as a pipeline.
TrafficPhase = tuple[LevelTraffic, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages and bytes of a collective: consecutive phases, each pipelined over the interconnect levels.

    Traffic adds (``a + b`` is first a, then b) and repeats (``a * 3``).

    >>> step = Traffic.from_levels(LevelTraffic(steps=1, wire_bytes=100.0))
    >>> total = step + step * 2
    >>> float(total.steps), float(total.wire_bytes)
    (3.0, 300.0)
    """

    phases: tuple[TrafficPhase, ...] = ()

    @classmethod
    def from_levels(cls, *levels: LevelTraffic) -> Traffic:
        """Build the traffic of a single phase.

        Parameters
        ----------
        *levels : LevelTraffic
            Traffic of each level, inner to outer.

        Returns
        -------
        Traffic
            Steps and bytes of each level, all in one phase.
        """
        return cls((levels,))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.phases + other.phases)

    def __mul__(self, times: Numeric) -> Traffic:
        return Traffic(tuple(tuple(level * times for level in phase) for phase in self.phases))

    @property
    def levels(self) -> tuple[LevelTraffic, ...]:
        """Traffic over each interconnect level, summed over all phases, inner level (NVLink) first."""
        columns = zip_longest(*self.phases, fillvalue=LevelTraffic())
        return tuple(sum(column, start=LevelTraffic()) for column in columns)

    @property
    def steps(self) -> Numeric:
        """Number of consecutive messages, over all phases and levels [1]."""
        return sum((level.steps for level in self.levels), start=0.0)

    @property
    def wire_bytes(self) -> Numeric:
        """Bytes that the busiest member (GPU, node or rack) of each level sends, summed over all levels [byte]."""
        return sum((level.wire_bytes for level in self.levels), start=0.0)

    @property
    def reduced_bytes(self) -> Numeric:
        """Received bytes that one rank adds to its own data, over all phases and levels [byte]."""
        return sum((level.reduced_bytes for level in self.levels), start=0.0)


#: Every operation that some algorithm serves.
COLLECTIVE_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")
#: Libraries whose choice of algorithm is modelled. ``textbook`` takes the fastest algorithm of the literature at
#: constant alpha and beta; ``xla`` is for collectives of TPUs on tori.
COLLECTIVE_LIBRARIES = ("textbook", "nccl", "xla")

TrafficFormula = Callable[[Array, tuple[Array, ...]], Traffic]


@dataclass(frozen=True, slots=True)
class CollectiveAlgorithm:
    """Algorithm that carries out collective operations (ring, tree, …), with formulas for its messages and bytes.

    Attributes
    ----------
    name : str
        Name under which it is registered.
    summary : str
        One line for tables of algorithms.
    reference : str
        Paper or source code that describes it.
    traffic_formulas : mapping of str to callable
        Traffic of each operation, from the payload [byte] and the fan-outs.
    operations_by_library : mapping of str to sequence of str
        Operations for which each of `COLLECTIVE_LIBRARIES` may choose the algorithm. Empty: the algorithm is used only
        if the user names it.
    is_one_port : bool
        True if a rank sends one message at a time, so that no operation ends before log2 P steps.
    reduces_in_network : bool
        True if switches combine or copy data, so that the bandwidth bound of host algorithms does not hold.
    is_lockstep : bool
        True if every rank sends in every step, so that a step lasts as long as its slowest link.
    only_between_nodes : bool
        True if libraries choose the algorithm for groups of several nodes only.
    non_neighbour_operations : tuple of str
        Operations in which ranks send to ranks that are no neighbours. These have no price on a torus.
    required_topology : str, optional
        Topology for which the algorithm is written, such as ``torus``. None: any network.
    """

    name: str
    summary: str
    reference: str
    traffic_formulas: Mapping[str, TrafficFormula]
    operations_by_library: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_one_port: bool = True
    reduces_in_network: bool = False
    is_lockstep: bool = False
    only_between_nodes: bool = False
    non_neighbour_operations: tuple[str, ...] = ()
    required_topology: str | None = None

    @property
    def operations(self) -> tuple[str, ...]:
        """Operations for which the algorithm has a formula."""
        return tuple(self.traffic_formulas)

    def is_candidate_for(self, library: str, operation: str) -> bool:
        """Return True if a communication library may choose this algorithm for an operation.

        Parameters
        ----------
        library : str
            One of `COLLECTIVE_LIBRARIES`.
        operation : str
            One of `COLLECTIVE_OPERATIONS`.

        Returns
        -------
        bool
            True if the algorithm can run the operation and lists it for that library.
        """
        return operation in self.traffic_formulas and operation in self.operations_by_library.get(library, ())

    def traffic(self, operation: str, payload_bytes: Numeric, group: FanOuts) -> Traffic:
        """Return the messages and bytes of one collective operation; payload and fan-outs broadcast against each other.

        Parameters
        ----------
        operation : str
            One of `COLLECTIVE_OPERATIONS`.
        payload_bytes : float or ndarray
            Payload S as nccl-tests define it [byte].
        group : sequence of float or ndarray
            Fan-outs from the inner level to the outer one.

        Returns
        -------
        Traffic
            Steps, bytes sent and bytes reduced on each level.

        Raises
        ------
        SpecError
            If the algorithm lacks the operation, or the payload or a fan-out is impossible.

        Examples
        --------
        >>> ring = COLLECTIVE_ALGORITHMS["ring"].traffic("all_reduce", 800.0, (8,))
        >>> float(ring.steps), float(ring.wire_bytes), float(ring.reduced_bytes)
        (14.0, 1400.0, 700.0)
        """
        if operation not in self.traffic_formulas:
            nearest = suggest_names(operation, self.traffic_formulas)
            raise SpecError(f"algorithm {self.name!r} has no {operation!r}; {nearest}")
        return self.traffic_formulas[operation](checked_payload(payload_bytes), checked_fan_outs(group))


COLLECTIVE_ALGORITHMS: Registry[CollectiveAlgorithm] = Registry("collective algorithm", "paleo.collectives")


def register_algorithm(algorithm: CollectiveAlgorithm) -> CollectiveAlgorithm:
    """Register a collective algorithm under its name.

    Parameters
    ----------
    algorithm : CollectiveAlgorithm
        Algorithm, with the libraries that may choose it.

    Returns
    -------
    CollectiveAlgorithm
        Same algorithm.

    Raises
    ------
    SpecError
        If the name is taken, or a library or operation is unknown.
    """
    for library, operations in algorithm.operations_by_library.items():
        if library not in COLLECTIVE_LIBRARIES:
            nearest = suggest_names(library, COLLECTIVE_LIBRARIES)
            raise SpecError(f"algorithm {algorithm.name!r}: unknown library {library!r}; {nearest}")
        for operation in operations:
            if operation not in COLLECTIVE_OPERATIONS:
                problem = f"unknown operation {operation!r} of {library}"
                nearest = suggest_names(operation, COLLECTIVE_OPERATIONS)
                raise SpecError(f"algorithm {algorithm.name!r}: {problem}; {nearest}")
    return COLLECTIVE_ALGORITHMS.register(algorithm.name)(algorithm)


def algorithms_for(operation: str) -> tuple[CollectiveAlgorithm, ...]:
    """List all algorithms that can carry out a collective operation, sorted by name.

    Parameters
    ----------
    operation : str
        One of `COLLECTIVE_OPERATIONS`.

    Returns
    -------
    tuple of CollectiveAlgorithm
        Algorithms in the order of their names.

    Raises
    ------
    SpecError
        If the operation is unknown.
    """
    if operation not in COLLECTIVE_OPERATIONS:
        nearest = suggest_names(operation, COLLECTIVE_OPERATIONS)
        raise SpecError(f"unknown collective operation {operation!r}; {nearest}")
    return tuple(entry for _, entry in COLLECTIVE_ALGORITHMS.items() if operation in entry.traffic_formulas)


def checked_payload(payload_bytes: Numeric) -> Array:
    """Return the payload of a collective as an array, after checking that it is finite and not negative.

    Parameters
    ----------
    payload_bytes : float or ndarray
        Payload of a collective [byte].

    Returns
    -------
    ndarray
        Payload [byte].

    Raises
    ------
    SpecError
        If a value is negative, infinite or NaN.
    """
    payload = np.asarray(payload_bytes, dtype=np.float64)
    if not np.all(np.isfinite(payload)) or np.any(payload < 0):
        raise SpecError(f"payload_bytes {payload_bytes!r} must be finite and zero or more")
    return payload


def checked_fan_outs(group: FanOuts) -> tuple[Array, ...]:
    """Return the fan-outs of a group (ranks per node, nodes per rack, …) as arrays, after checking them.

    Parameters
    ----------
    group : sequence of float or ndarray
        Fan-outs from the inner level to the outer one.

    Returns
    -------
    tuple of ndarray

    Raises
    ------
    SpecError
        If there is no fan-out, or one is not a whole number of 1 or more.
    """
    fan_outs = tuple(np.asarray(fan_out, dtype=np.float64) for fan_out in group)
    if not fan_outs:
        raise SpecError("a group needs at least one level: its fan-outs from inner to outer, such as (8, 4)")
    for fan_out in fan_outs:
        if not np.all(np.isfinite(fan_out)) or np.any(fan_out < 1) or np.any(fan_out != np.floor(fan_out)):
            raise SpecError(f"fan-outs {tuple(group)!r} must be whole numbers of one or more")
    return fan_outs


def group_rank_count(group: tuple[Array, ...]) -> Array:
    """Return the number of ranks of a group: the product of its fan-outs.

    Parameters
    ----------
    group : tuple of ndarray
        Fan-outs from the inner level to the outer one.

    Returns
    -------
    ndarray
        Number of ranks.
    """
    return math.prod(group, start=np.ones(()))


def ranks_per_member(group: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return the number of ranks inside one member (GPU, node or rack) of each level.

    Parameters
    ----------
    group : tuple of ndarray
        Fan-outs from the inner level to the outer one.

    Returns
    -------
    tuple of ndarray
        Ranks of a member for each level: (8, 4) -> (1, 8).
    """
    return tuple(group_rank_count(group[:index]) for index in range(len(group)))


def level_instances(group: tuple[Array, ...]) -> tuple[Array, ...]:
    """Return how many instances of each level (such as NVSwitch domains) a group spans.

    Parameters
    ----------
    group : tuple of ndarray
        Fan-outs from the inner level to the outer one.

    Returns
    -------
    tuple of ndarray
        Instances of each level: (8, 4) -> (4, 1).
    """
    return tuple(group_rank_count(group[index + 1 :]) for index in range(len(group)))


def recursive_doubling_rounds(fan_out: Array) -> Array:
    """Return the number of rounds of recursive doubling over ``fan_out`` members: ceil(log2(fan_out)).

    Parameters
    ----------
    fan_out : ndarray
        Members that a level joins.

    Returns
    -------
    ndarray
        Number of rounds: 8 -> 3, 5 -> 3, 1 -> 0.
    """
    return np.asarray(np.ceil(np.log2(fan_out)))


def level_is_used(fan_out: Array) -> Array:
    """Return 1 where a level joins several members (GPUs, nodes or racks) of the group, else 0.

    Parameters
    ----------
    fan_out : ndarray
        Members that a level joins.

    Returns
    -------
    ndarray
        1.0 or 0.0, shape of the fan-out.
    """
    return np.where(fan_out > 1, 1.0, 0.0)


def remote_buffer_fraction(fan_out: Array) -> Array:
    """Return (n - 1) / n, the fraction of a buffer that lies on other ranks (or nodes).

    Parameters
    ----------
    fan_out : ndarray
        Members n that a level joins.

    Returns
    -------
    ndarray
        Fraction of the buffer, 0 to 1.
    """
    return (fan_out - 1.0) / fan_out


def double_tree_imbalance(units: Numeric) -> Array:
    """Return the bytes that the busiest member of a double binary tree sends, relative to the mean member.

    Parameters
    ----------
    units : float or ndarray
        Units N of the tree; the mean unit sends 2 S (N-1)/N.

    Returns
    -------
    ndarray
        Factor of 1 or more.

    Notes
    -----
    A unit that has two children in one tree and is a leaf of the other sends S/2 up, S down and S/2 up. Of three units
    none has two children, and 1.5 S is the most (NVIDIA/nccl src/graph/trees.cc).

    Examples
    --------
    >>> double_tree_imbalance(np.array([1.0, 2.0, 3.0, 4.0, 8.0])).round(3).tolist()
    [1.0, 1.0, 1.125, 1.333, 1.143]
    """
    several = np.maximum(units, 2.0)
    return np.asarray(np.minimum(2.0, several / 2.0) / (2.0 * remote_buffer_fraction(several)))


def sequential_phases(levels: list[LevelTraffic]) -> Traffic:
    """Build traffic in which each level is a separate phase, the inner level first, so that levels do not overlap.

    Parameters
    ----------
    levels : list of LevelTraffic
        Traffic of each level, inner to outer.

    Returns
    -------
    Traffic
        Steps and bytes of each level, one phase per level.
    """
    idle, count = (LevelTraffic(),), len(levels)
    return Traffic(tuple(idle * index + (level,) + idle * (count - index - 1) for index, level in enumerate(levels)))


def with_reversed_phases(traffic: Traffic) -> Traffic:
    """Return traffic with its phases in reverse order, as an all-gather retraces the levels of a reduce-scatter.

    Parameters
    ----------
    traffic : Traffic
        Traffic whose phases go from the inner level to the outer one.

    Returns
    -------
    Traffic
        Same messages, with the last phase first.
    """
    return Traffic(traffic.phases[::-1])
