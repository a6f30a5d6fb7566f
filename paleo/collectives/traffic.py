"""What a collective puts on the wires: counts without a device, added and priced elsewhere.

A group of ranks is written as its fan-outs from the inner level of the network to the outer one: ``(8, 4)`` is four
nodes of eight ranks. A *unit* of a level is what hangs on one side of it: at the inner level a rank, at the next level
a node. All bytes here are what the busiest unit *sends* into the level (per direction), so that the price of a level is
the bandwidth of one unit into it, however many ranks that unit holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
