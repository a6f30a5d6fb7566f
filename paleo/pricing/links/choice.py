"""Which of several algorithms is the fastest, and where the choice changes with the payload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from paleo.collectives.traffic import Array
from paleo.units import TERA

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
        table = prices(np.asarray(middle), [below, above])
        low, high = (middle, high) if table[below] <= table[above] else (low, middle)
    return high
