"""How device and host add up where the host waits for counts of tokens: `HostTime.waiting_power` from measured steps.

``python -m paleo.calibrate.waiting TABLE [SOURCE…]`` fits it to the steps of mixtures, but those of the sources named,
and says, source by source, what the others give and how well that predicts it.

Few configurations of mixtures are measured, and rows of a source err together: rows are held out by source, as half of
the configurations leaves the number open.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.calibrate.fit import Rows, fit, predictions
from paleo.errors import PaleoError, SpecError
from paleo.specs.software import load_software
from paleo.step.section_times import AHEAD
from paleo.validate.kinds.base import read_table, text
from paleo.validate.residual import residual
from paleo.validate.steps.base import StepTable, profile_then, records
from paleo.validate.tables import table_of

if TYPE_CHECKING:
    from paleo.calibrate.fit import FitResult
    from paleo.validate.residual import ResidualErrors

Array = npt.NDArray[np.float64]
#: Inverses of the powers at which each step is predicted; between them its logarithm is interpolated. Where device and
#: host take alike that is exact.
INVERSES = np.linspace(1.0 / (2.0 * AHEAD), 1.0, 8)
#: Columns of the seconds at these.
COLUMNS = [f"seconds at {1.0 / inverse:.3g}" for inverse in INVERSES]


@dataclass(frozen=True, slots=True)
class Waiting:
    """What is fitted: ``power`` as `HostTime.waiting_power`; 1 if device and host took turns."""

    power: float = field(default=AHEAD, metadata={"low": 1.0, "high": 2.0 * AHEAD})


class _Mixtures:
    """Steps of mixtures as what `fit` asks of a kind."""

    configuration = ("source",)

    def time(self, frame: pd.DataFrame, figures: Any, parameters: Waiting) -> Array:
        """Predicted seconds of each row."""
        logs, inverse = np.log(frame[COLUMNS].to_numpy(dtype=np.float64)), 1.0 / parameters.power
        return np.exp([np.interp(inverse, INVERSES, row) for row in logs])


def waiting_rows(file: str) -> list[Rows]:
    """Rows of a table of steps whose hosts wait for counts of tokens, by the profile of their day; SpecError where
    there are none."""
    frame = read_table(file).reset_index(drop=True)
    table = table_of(frame.columns)
    if not isinstance(table, StepTable):
        raise SpecError(f"{file}: no table of steps")
    names = pd.Series([profile_then(row, table.profile(row)) for row in records(frame)], index=frame.index)
    waiting = [name for name in sorted(set(names)) if load_software(name).host.routing > 0]
    groups = [_waiting(table, frame[names == name], name) for name in waiting]
    if not any(len(group.measured) for group in groups):
        raise SpecError(f"{file}: in no step of this table does the host wait for counts of tokens")
    return groups


def _waiting(table: StepTable, frame: pd.DataFrame, name: str) -> Rows:
    """Those of one profile whose step depends on the power."""
    known = frame[np.isfinite(table.predict(frame).seconds)]
    profile = load_software(name)
    for column, inverse in zip(COLUMNS, INVERSES, strict=True):
        changed = profile.changed({"host.waiting_power": 1.0 / inverse})
        known = known.assign(**{column: [table.step(row, changed).value for row in records(known)]})
    depends = known[COLUMNS[-1]] > known[COLUMNS[0]]
    return Rows(known, profile, name, table.measured(known)).take(depends.to_numpy(dtype=bool))


def fitted(rows: Sequence[Rows]) -> FitResult[Waiting]:
    """The power by all of these rows; one for all profiles."""
    start = Waiting(rows[0].figures.host.waiting_power)
    return fit(_Mixtures(), rows, start, starts=1, emphasis=0.0, evaluations=15, hold_out=False)


def errors(rows: Sequence[Rows], power: float) -> ResidualErrors:
    """Of these rows with a power."""
    return residual(*predictions(_Mixtures(), rows, {group.stack: Waiting(power) for group in rows}))


def of_sources(rows: Sequence[Rows], sources: Sequence[str], *, without: bool = False) -> list[Rows]:
    """The rows of some sources, or all others."""
    return [group.take(np.isin(text(group.frame, "source"), sources) != without) for group in rows]


def left_out(rows: Sequence[Rows], kept_back: Sequence[str] = ()) -> pd.DataFrame:
    """Each source: rows, the power that the others give, but those ``kept_back``, and the error of its rows with it."""
    lines = []
    for name in sorted({source for group in rows for source in text(group.frame, "source")}):
        power = _power(fitted(of_sources(rows, [name, *kept_back], without=True)))
        tested = errors(of_sources(rows, [name]), power)
        lines.append({"source": name, "rows": tested.rows, "power": power, "mape": tested.mape, "bias": tested.bias})
    return pd.DataFrame(lines)


def _power(result: FitResult[Waiting]) -> float:
    return next(iter(result.parameters.values())).power


def main(file: str, kept_back: Sequence[str]) -> None:
    """The power, and each source without it."""
    rows = waiting_rows(file)
    result = fitted(of_sources(rows, kept_back, without=True))
    sigma = next(iter(result.uncertainty.values()))
    print(f"host.waiting_power: {_power(result):.3g} by {result.rows_fitted} rows, one sigma {sigma:.0%}")
    print(left_out(rows, kept_back).round(3).to_string(index=False))


if __name__ == "__main__":
    try:
        if len(sys.argv) < 2:
            raise SpecError("no table of steps; python -m paleo.calibrate.waiting TABLE [SOURCE…]")
        main(sys.argv[1], sys.argv[2:])
    except PaleoError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
