"""The registry of collective algorithms, and the arithmetic of groups that they share.

An algorithm turns (operation, payload, group) into `Traffic`. It knows no device, no latency and no bandwidth. The
payload follows nccl-tests' S: the buffer of one rank for all_reduce, broadcast and send_recv; the full buffer (all
shards together) for all_gather, reduce_scatter and all_to_all.

Where a formula asks for log2 P, groups that are no power of two take ceil(log2 P) rounds; the bytes keep their textbook
form (the fold that MPI libraries do before and after is not counted).

What a collective puts on the wires: counts without a device, added and priced elsewhere.

A group of ranks is written as its fan-outs from the inner level of the network to the outer one: ``(8, 4)`` is four
nodes of eight ranks. A *unit* of a level is what hangs on one side of it: at the inner level a rank, at the next level
a node. All bytes here are what the busiest unit *sends* into the level (per direction), so that the price of a level is
the bandwidth of one unit into it, however many ranks that unit holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError, near
from paleo.registry import Registry

Array = npt.NDArray[np.float64]
#: A number or an array of numbers; all formulas broadcast.
Numeric = float | Array
#: Fan-outs per level, inner to outer; their product is the number of ranks.
Group = Sequence[Numeric]


@dataclass(frozen=True, slots=True)
class LevelTraffic:
    """Messages over one level of the network during one phase.

    steps           messages that follow one another, each of them waiting for the one before [1]
    wire_bytes      sent by the busiest unit of the level below into this level, in one direction [byte]
    reduced_bytes   combined arithmetically by one rank with what it received over this level [byte]
    senders         ranks of that unit which send, each through the ports that it drives; None: all of them [1]
    """

    steps: Numeric = 0.0
    wire_bytes: Numeric = 0.0
    reduced_bytes: Numeric = 0.0
    senders: Numeric | None = None

    def __mul__(self, times: Numeric) -> LevelTraffic:
        return LevelTraffic(self.steps * times, self.wire_bytes * times, self.reduced_bytes * times, self.senders)


#: One phase: the traffic per level, inner to outer; the levels work as a pipeline.
Phase = tuple[LevelTraffic, ...]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Phases that run one after another; inside a phase the levels work at the same time as a pipeline.

    Traffic adds (``a + b`` is first a, then b) and repeats (``a * 3``).

    >>> step = Traffic.of(LevelTraffic(steps=1, wire_bytes=100.0))
    >>> total = step + step * 2
    >>> float(total.steps), float(total.wire_bytes)
    (3.0, 300.0)
    """

    phases: tuple[Phase, ...] = ()

    @classmethod
    def of(cls, *levels: LevelTraffic) -> Traffic:
        """Traffic of one phase, its levels from inner to outer."""
        return cls((levels,))

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.phases + other.phases)

    def __mul__(self, times: Numeric) -> Traffic:
        return Traffic(tuple(tuple(level * times for level in phase) for phase in self.phases))

    def level(self, index: int) -> LevelTraffic:
        """All that crosses one level (0 is the inner one), over all phases."""
        crossing = [phase[index] for phase in self.phases if index < len(phase)]
        return LevelTraffic(
            steps=_total([level.steps for level in crossing]),
            wire_bytes=_total([level.wire_bytes for level in crossing]),
            reduced_bytes=_total([level.reduced_bytes for level in crossing]),
        )

    @property
    def levels(self) -> tuple[LevelTraffic, ...]:
        """What crosses each level, over all phases, inner to outer."""
        return tuple(self.level(index) for index in range(max((len(phase) for phase in self.phases), default=0)))

    @property
    def steps(self) -> Numeric:
        """Messages in sequence over all phases and levels."""
        return _total([level.steps for level in self.levels])

    @property
    def wire_bytes(self) -> Numeric:
        """Bytes over all levels: of a flat group, what its busiest rank sends [byte]."""
        return _total([level.wire_bytes for level in self.levels])

    @property
    def reduced_bytes(self) -> Numeric:
        """Bytes that one rank combines with its own [byte]."""
        return _total([level.reduced_bytes for level in self.levels])


def _total(values: Sequence[Numeric]) -> Numeric:
    total: Numeric = 0.0
    for value in values:
        total = total + value
    return total


#: Every operation that some algorithm serves.
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all", "send_recv")

TrafficFormula = Callable[[Array, tuple[Array, ...]], Traffic]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to carry out collective operations.

    formulas      operation -> (payload_bytes, fan-outs) -> Traffic
    one_port      a rank sends one message at a time, so that no operation ends before log2 P steps
    in_network    switches combine or copy data: the bandwidth bound of host algorithms does not hold
    automatic     may be chosen as the best one (parameter servers ask for servers, and are only chosen by name)
    lockstep      every rank sends in every step, so that a step lasts as long as its slowest link
    between_nodes libraries choose it for groups of several nodes only
    distant       operations in which ranks that are no neighbours send to each other, which a torus carries over every
                  link between them: not priced there
    topology      the kind of level that it is written for, such as torus; None: any network
    libraries     by communication library, the operations that it carries out this way; libraries that are not named
                  have it not. None: it is open to any library that runs on the network
    """

    name: str
    summary: str
    reference: str
    formulas: Mapping[str, TrafficFormula]
    one_port: bool = True
    in_network: bool = False
    automatic: bool = True
    lockstep: bool = False
    between_nodes: bool = False
    distant: tuple[str, ...] = ()
    topology: str | None = None
    libraries: Mapping[str, tuple[str, ...]] | None = None

    @property
    def operations(self) -> tuple[str, ...]:
        return tuple(self.formulas)

    def belongs_to(self, library: str, operation: str) -> bool:
        """Whether a library may choose this way for an operation by itself."""
        known = self.libraries is None or operation in self.libraries.get(library, ())
        return known and self.automatic and operation in self.formulas

    def traffic(self, operation: str, payload_bytes: Numeric, group: Group) -> Traffic:
        """Traffic of one operation; payload and fan-outs broadcast against each other.

        >>> ring = ALGORITHMS["ring"].traffic("all_reduce", 800.0, (8,))
        >>> float(ring.steps), float(ring.wire_bytes), float(ring.reduced_bytes)
        (14.0, 1400.0, 700.0)
        """
        if operation not in self.formulas:
            raise SpecError(f"algorithm {self.name!r} has no {operation!r}; {near(operation, self.formulas)}")
        return self.formulas[operation](checked_payload(payload_bytes), checked_group(group))


ALGORITHMS: Registry[Algorithm] = Registry("collective algorithm", "paleo.collectives")


def add_algorithm(algorithm: Algorithm) -> Algorithm:
    """Register an algorithm under its own name."""
    return ALGORITHMS.register(algorithm.name)(algorithm)


def algorithms_for(operation: str) -> tuple[Algorithm, ...]:
    """Every algorithm that serves an operation, by name; an unknown operation is an error."""
    if operation not in OPERATIONS:
        raise SpecError(f"unknown collective operation {operation!r}; {near(operation, OPERATIONS)}")
    return tuple(entry for _, entry in ALGORITHMS.items() if operation in entry.formulas)


def checked_payload(payload_bytes: Numeric) -> Array:
    """The payload as an array; SpecError unless all of it is finite and zero or more [byte]."""
    payload = np.asarray(payload_bytes, dtype=np.float64)
    if not np.all(np.isfinite(payload)) or np.any(payload < 0):
        raise SpecError(f"payload_bytes {payload_bytes!r} must be finite and zero or more")
    return payload


def checked_group(group: Group) -> tuple[Array, ...]:
    """The fan-outs as arrays; SpecError unless there is at least one and all are whole numbers of one or more."""
    fan_outs = tuple(np.asarray(fan_out, dtype=np.float64) for fan_out in group)
    if not fan_outs:
        raise SpecError("a group needs at least one level: its fan-outs from inner to outer, such as (8, 4)")
    for fan_out in fan_outs:
        if not np.all(np.isfinite(fan_out)) or np.any(fan_out < 1) or np.any(fan_out != np.floor(fan_out)):
            raise SpecError(f"fan-outs {tuple(group)!r} must be whole numbers of one or more")
    return fan_outs


def ranks_of(group: tuple[Array, ...]) -> Array:
    """Ranks in the group: the product of its fan-outs."""
    ranks = np.ones(())
    for fan_out in group:
        ranks = ranks * fan_out
    return ranks


def members_below(group: tuple[Array, ...]) -> tuple[Array, ...]:
    """Ranks that one unit of each level's lower side holds: (8, 4) -> (1, 8)."""
    return tuple(ranks_of(group[:index]) for index in range(len(group)))


def units_above(group: tuple[Array, ...]) -> tuple[Array, ...]:
    """Units of each level that the whole group fills: (8, 4) -> (4, 1)."""
    return tuple(ranks_of(group[index + 1 :]) for index in range(len(group)))


def rounds(fan_out: Array) -> Array:
    """ceil(log2): rounds in which one becomes ``fan_out`` by doubling; 8 -> 3, 5 -> 3, 1 -> 0."""
    return np.asarray(np.ceil(np.log2(fan_out)))


def active(fan_out: Array) -> Array:
    """1 where a level has more than one unit in the group, else 0: an idle level carries nothing."""
    return np.where(fan_out > 1, 1.0, 0.0)


def remote_share(fan_out: Array) -> Array:
    """(n - 1) / n: the share of a buffer that belongs to the other units."""
    return (fan_out - 1.0) / fan_out


def tree_imbalance(units: Numeric) -> Array:
    """Bytes of the busiest of N units of a double binary tree over those of the mean, 2 S (N-1)/N.

    A unit that has two children in one tree and is a leaf of the other sends S/2 up, S down and S/2 up. Of three units
    none has two children, and 1.5 S is the most (NVIDIA/nccl src/graph/trees.cc).

    >>> tree_imbalance(np.array([1.0, 2.0, 3.0, 4.0, 8.0])).round(3).tolist()
    [1.0, 1.0, 1.125, 1.333, 1.143]
    """
    several = np.maximum(units, 2.0)
    return np.asarray(np.minimum(2.0, several / 2.0) / (2.0 * remote_share(several)))


def one_level_at_a_time(levels: list[LevelTraffic]) -> Traffic:
    """A phase per level, inner first: the levels do not overlap."""
    idle = LevelTraffic()
    phases = [
        tuple(level if index == position else idle for position in range(len(levels)))
        for index, level in enumerate(levels)
    ]
    return Traffic(tuple(phases))


def outer_first(traffic: Traffic) -> Traffic:
    """The same phases in reverse order: how a reduction's tree is walked back."""
    return Traffic(traffic.phases[::-1])
