"""Fits of constants of whole steps, in which each source of rows weighs as much as another and is left out in turn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from paleo.calibrate.files import ERROR_DIGITS, rounded, rounded_residual
from paleo.calibrate.fit import optimiser
from paleo.specs.calibration import Entry, IntervalBin, Residual
from paleo.tables.errors import residual

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Words = npt.NDArray[np.str_]
#: Rows from which a source weighs as much as another and is left out by itself.
WHOLE_SOURCE = 6


@dataclass(frozen=True)
class SourceRows:
    """Measured steps with their sources; fields of subclasses are arrays whose first axis is that of the rows."""

    sources: Words

    def of(self, rows: Flags) -> Self:
        """Pick rows.

        Parameters
        ----------
        rows : ndarray of bool
            True for each row that is picked.

        Returns
        -------
        SourceRows
        """
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    @property
    def weights(self) -> Array:
        """Weights of the rows: sources weigh alike, except those of few rows, which weigh less."""
        _, place, counts = np.unique(self.sources, return_inverse=True, return_counts=True)
        shares = np.minimum(counts / WHOLE_SOURCE, 1.0)
        return np.asarray((shares / counts / shares.sum())[place])

    def left_out(self, least: int = 1) -> Iterator[tuple[str, Self, Self]]:
        """Yield each source of some rows at least, with its rows and with those of all others.

        Parameters
        ----------
        least : int, default 1
            Fewest rows of a source.

        Yields
        ------
        tuple of (str, SourceRows, SourceRows)
        """
        names, counts = np.unique(self.sources, return_counts=True)
        for name in names[counts >= least]:
            chosen = self.sources == name
            yield str(name), self.of(chosen), self.of(~chosen)


def least_loss(loss: Callable[[Array], float], start: Array, bounds: Sequence[tuple[float, float]]) -> list[float]:
    """Search positive constants in log space.

    Parameters
    ----------
    loss : callable
        Loss at logarithms of the constants.
    start : ndarray
        Logarithms at which the search starts.
    bounds : sequence of tuple of float
        Least and most of each constant.

    Returns
    -------
    list of float
        The constants.
    """
    logs = [(math.log(low), math.log(high)) for low, high in bounds]
    run = optimiser("minimize")(loss, start, method="L-BFGS-B", bounds=logs)
    values: list[float] = np.exp(run.x).tolist()
    return values


def entry_of_steps(
    family: str, parameters: Any, source: str, date: str, ratios: Array | None = None, **more: Any
) -> Entry:
    """Compose the entry of constants of whole steps.

    Parameters
    ----------
    family : str
        Key of the entry.
    parameters : dataclass
        The constants.
    source : str
        Tables and their sources.
    date : str
        Date that results carry.
    ratios : ndarray, optional
        Predicted over measured times of rows that are compared.
    **more
        Further fields of the entry.

    Returns
    -------
    Entry
        Its residual has no total error, as no sum of seconds is known.
    """
    if ratios is not None:
        errors = rounded_residual(residual(ratios, np.ones_like(ratios)))
        errors.pop("total_error")
        more["residual"] = Residual(**errors)
    return Entry(
        family=family, stack="whole steps", source=source, date=date,
        parameters={name: rounded(value, ERROR_DIGITS) for name, value in asdict(parameters).items()},
        **{"interval": (IntervalBin(low=1.0, high=1.0),), **more},
    )  # fmt: skip


def cited(files: Sequence[str], sources: int) -> str:
    """Name the tables of a fit and count their sources.

    Parameters
    ----------
    files : sequence of str
        Measured tables.
    sources : int
        How many sources they have.

    Returns
    -------
    str
    """
    return f"{', '.join(Path(file).name for file in files)} ({sources} sources)"
