"""The registry of collective algorithms, and the arithmetic of groups that they share.

An algorithm turns (operation, payload, group) into `Traffic`. It knows no device, no latency and no bandwidth. The
payload follows nccl-tests' S: the buffer of one rank for all_reduce, broadcast and send_recv; the full buffer (all
shards together) for all_gather, reduce_scatter and all_to_all.

Where a formula asks for log2 P, groups that are no power of two take ceil(log2 P) rounds; the bytes keep their textbook
form (the fold that MPI libraries do before and after is not counted).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from paleo.collectives.traffic import Array, Group, LevelTraffic, Numeric, Traffic
from paleo.errors import SpecError, near
from paleo.registry import Registry

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
    """The fan-outs as arrays; SpecError unless there is one and all are whole numbers of one or more."""
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


def others(fan_out: Array) -> Array:
    """(n - 1) / n: the share of a buffer that belongs to the other units."""
    return (fan_out - 1.0) / fan_out


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
