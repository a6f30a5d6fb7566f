"""What whole steps add to the interval of their kernels and links: `paleo.step.step.Spreads` from measured steps.

``python -m paleo.calibrate.spreads TABLE…`` fits them and says, source by source, how many rows lie inside of intervals
whose spreads were fitted without that source.

The fit is a quantile regression (Koenker and Bassett, Regression Quantiles, Econometrica 46(1), 1978) of a row's error
in logarithms, so that wide and narrow intervals count alike. Rows of a source err together, so each source weighs as
much as another.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import PaleoError, SpecError
from paleo.step.step import SPREADS, Spreads, Uncertainty
from paleo.validate.kinds.base import read_table, text
from paleo.validate.steps.base import Step, StepTable
from paleo.validate.tables import table_of

Array = npt.NDArray[np.float64]
#: Share of a source's rows that its intervals are to hold: the middle of 80 to 95 %, as few sources come out in between
#: and the rest lie inside or outside as a whole.
LEVEL = 0.875
#: A source of fewer rows weighs less.
WHOLE_SOURCE = 6
#: Logarithms of the spreads that a fit may try.
RANGE = (-9.0, 2.0)
#: Errors below this are as good as none: few rows are stated to more than three digits.
LEAST_ERROR = 0.002


@dataclass(frozen=True)
class Evidence:
    """Errors of steps, log(predicted / measured), with the sources that measured them, and what the half-widths of
    their intervals are made of."""

    sources: npt.NDArray[np.str_]
    errors: Array
    uncertainty: Uncertainty

    def half_widths(self, spreads: Spreads) -> Array:
        """Of each row's interval, on the side on which its error lies."""
        low, high = self.uncertainty.half_widths(spreads)
        return np.asarray(np.where(self.errors > 0, low, high))

    def of(self, rows: npt.NDArray[np.bool_]) -> Evidence:
        """Some of the rows."""
        figures = {name: getattr(self.uncertainty, name)[..., rows] for name in FIGURES}
        return Evidence(self.sources[rows], self.errors[rows], Uncertainty(**figures, constants=False))

    @property
    def weights(self) -> Array:
        """Of the rows: each source weighs as much as another, one of few rows less."""
        _, place, counts = np.unique(self.sources, return_inverse=True, return_counts=True)
        shares = np.minimum(counts / WHOLE_SOURCE, 1.0)
        return np.asarray((shares / counts / shares.sum())[place])


#: What of `Uncertainty` differs from step to step.
FIGURES = tuple(field.name for field in fields(Uncertainty) if field.name != "constants")


def evidence(files: Iterable[str]) -> Evidence:
    """The rows of tables of steps that are predicted with an interval of their own: those of MLPerf's tasks are fitted
    with their code."""
    rows = [row for file in files for row in _rows(file)]
    if not rows:
        raise SpecError("no row of these tables is a step that can be predicted")
    sources, errors, known = zip(*rows, strict=True)
    figures = {name: np.stack([getattr(each, name) for each in known], axis=-1) for name in FIGURES}
    return Evidence(np.array(sources), np.array(errors), Uncertainty(**figures, constants=False))


def _rows(file: str) -> Iterator[tuple[str, float, Uncertainty]]:
    frame = read_table(file).reset_index(drop=True)
    table = table_of(frame.columns)
    if not isinstance(table, StepTable):
        raise SpecError(f"{file}: no table of steps")
    measured, names = table.measured(frame), text(frame, "source")
    for index, step in enumerate(table.steps(frame)):
        if isinstance(step, Step) and step.uncertainty is not None:
            yield f"{table.name}: {names[index]}", math.log(step.value / measured[index]), step.uncertainty


def fitted(known: Evidence, level: float = LEVEL) -> Spreads:
    """The spreads whose intervals hold ``level`` of the rows of a source on average, each as narrow as may be."""
    from scipy.optimize import minimize

    wanted, weights = np.log(np.maximum(np.abs(known.errors), LEAST_ERROR)), known.weights

    def loss(logs: Array) -> float:
        beyond = wanted - np.log(known.half_widths(Spreads(*np.exp(np.clip(logs, *RANGE)).tolist())))
        return float((weights * np.where(beyond > 0, level * beyond, (level - 1.0) * beyond)).sum())

    start = np.log(astuple(SPREADS))
    for _ in range(2):
        start = minimize(loss, start, method="Nelder-Mead", options={"maxiter": 800, "xatol": 2e-3, "fatol": 2e-6}).x
    return Spreads(*np.exp(start).tolist())


def left_out(known: Evidence, *, least: int = WHOLE_SOURCE, level: float = LEVEL) -> pd.DataFrame:
    """Sources of at least so many rows: rows, share of them inside, and mean half-width, by spreads that were fitted
    without the source; SpecError where there is no other."""
    names, counts = np.unique(known.sources, return_counts=True)
    if len(names) < 2:
        raise SpecError(f"rows of one source alone ({', '.join(names)}): nothing is left when it is left out")
    lines = []
    for name in names[counts >= least]:
        chosen = known.sources == name
        rows = known.of(chosen)
        half_widths = rows.half_widths(fitted(known.of(~chosen), level))
        inside = float((np.abs(rows.errors) <= half_widths).mean())
        lines.append({"source": name, "rows": len(rows.errors), "inside": inside, "half_width": half_widths.mean()})
    return pd.DataFrame(lines)


def main(files: Sequence[str]) -> None:
    """The spreads, and the coverage of each source without it."""
    known = evidence(files)
    spreads = fitted(known)
    print(spreads)
    print(left_out(known).round(3).to_string(index=False))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except PaleoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
