"""``paleo calibrate --fit … --only waiting``: how device and host add up where the host waits for counts of tokens.

`HostTime.waiting_power` is fitted to measured steps of mixtures, one for all profiles; sources named with
``--hold-out`` are kept back. Each source is tested with what the others give.

Few configurations of mixtures are measured, and rows of a source err together: rows are held out by source, as half of
the configurations leaves the number open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.calibrate.files import ERROR_DIGITS, rounded, rounded_residual, steps_table
from paleo.calibrate.fit import Rows, count, fit, predictions
from paleo.errors import SpecError, near
from paleo.specs.calibration import Residual
from paleo.specs.software import SoftwareFit, load_software
from paleo.step.section_times import AHEAD
from paleo.units import counted
from paleo.validate.kinds.base import text
from paleo.validate.residual import residual
from paleo.validate.steps.base import profile_then, records

if TYPE_CHECKING:
    from paleo.calibrate.fit import FitResult
    from paleo.specs.software import Software
    from paleo.validate.residual import ResidualErrors
    from paleo.validate.steps.base import StepTable

Array = npt.NDArray[np.float64]
Report = Callable[[str], object]
#: What `--only` asks for.
ASKED = "waiting"
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


def waiting_rows(files: Sequence[str], report: Report = str) -> list[Rows]:
    """Rows of tables of steps whose hosts wait for counts of tokens, by the profile of their day; SpecError where
    there are none."""
    groups = [group for file in files for group in _rows(file, report)]
    if not count(groups):
        raise SpecError(f"{', '.join(files)}: in no step of these tables does the host wait for counts of tokens")
    return groups


def _rows(file: str, report: Report) -> list[Rows]:
    table, frame = steps_table(file, f"--only {ASKED} fits hosts to", report)
    if not table.calibrates:
        raise SpecError(f"{file}: a table of kind {table.name} has no steps that --only {ASKED} fits hosts to")
    names = pd.Series([profile_then(row, table.profile(row)) for row in records(frame)], index=frame.index)
    waiting = [name for name in sorted(set(names)) if load_software(name).host.routing > 0]
    return [_waiting(table, frame[names == name], name) for name in waiting]


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
    return residual(*_predictions(rows, power))


def of_sources(rows: Sequence[Rows], sources: Sequence[str], *, without: bool = False) -> list[Rows]:
    """The rows of some sources, or all others."""
    return [group.take(np.isin(text(group.frame, "source"), sources) != without) for group in rows]


@dataclass(frozen=True, slots=True)
class SourceTest:
    """Rows of a source, (rows,) seconds, predicted with the power that other sources give."""

    source: str
    power: float
    predicted: Array
    measured: Array

    @property
    def errors(self) -> ResidualErrors:
        """Of these rows."""
        return residual(self.predicted, self.measured)


def sources_of(rows: Sequence[Rows]) -> list[str]:
    """Those that measured the rows."""
    return sorted({source for group in rows for source in text(group.frame, "source")})


def left_out(rows: Sequence[Rows], kept_back: Sequence[str] = ()) -> list[SourceTest]:
    """Each source with the power that the others give, but those ``kept_back``; SpecError where there are no others."""
    names = sources_of(rows)
    tests = []
    for name in names:
        others = of_sources(rows, [name, *kept_back], without=True)
        if not count(others):
            raise SpecError(f"no source is left when {', '.join(dict.fromkeys([name, *kept_back]))} are left out")
        power, chosen = _power(fitted(others)), of_sources(rows, [name])
        tests.append(SourceTest(name, power, *_predictions(chosen, power)))
    return tests


def _predictions(rows: Sequence[Rows], power: float) -> tuple[Array, Array]:
    """Predicted and measured seconds."""
    return predictions(_Mixtures(), rows, {group.stack: Waiting(power) for group in rows})


def _power(result: FitResult[Waiting]) -> float:
    return next(iter(result.parameters.values())).power


@dataclass(frozen=True, slots=True)
class WaitingFitted:
    """The fitted power with one sigma of its logarithm, how each source is predicted with that of the others
    (`left_out`), and the profiles of the catalog that ran the steps."""

    power: float
    sigma: float
    rows_fitted: int
    kept_back: tuple[str, ...]
    tests: tuple[SourceTest, ...]
    before: tuple[Software, ...]

    @property
    def residual(self) -> ResidualErrors:
        """Of all rows, each predicted with the power of other sources."""
        parts = [(test.predicted, test.measured) for test in self.tests]
        predicted, measured = (np.concatenate(each) for each in zip(*parts, strict=True))
        return residual(predicted, measured)

    def profiles(self, files: Sequence[str], date: str) -> list[Software]:
        """The profiles with this power, and a record of this fit where they have none; it names no architecture, as
        host times stay."""
        sources = [test.source for test in self.tests if test.source not in self.kept_back]
        record = SoftwareFit(
            source=f"{', '.join(Path(file).name for file in files)} ({', '.join(sources)})",
            date=date,
            rows_fitted=self.rows_fitted,
            rows_held_out=self.residual.rows,
            uncertainty={"waiting_power": rounded(self.sigma, 2)},
            residual=Residual(**rounded_residual(self.residual)),
        )
        changed = {"host.waiting_power": rounded(self.power, ERROR_DIGITS)}
        return [profile.changed({**changed, "fit": profile.fit or record}) for profile in self.before]


def fit_waiting(files: Sequence[str], kept_back: Sequence[str] = (), report: Report = str) -> WaitingFitted:
    """The power by the rows of the tables, but those of sources ``kept_back``, and each source left out in turn;
    ``report`` is called with a label as each part of the work starts."""
    rows = waiting_rows(files, report)
    for name in kept_back:
        if name not in (known := sources_of(rows)):
            raise SpecError(f"--hold-out {name}: no step of that source; {near(name, known)}")
    chosen = of_sources(rows, kept_back, without=True)
    report(f"power of {counted(count(chosen), 'step')}")
    tests, result = left_out(rows, kept_back), fitted(chosen)
    names = sorted({group.stack.partition("@")[0] for group in rows if len(group.measured)})
    sigma = next(iter(result.uncertainty.values()))
    before = tuple(load_software(name) for name in names)
    return WaitingFitted(_power(result), sigma, result.rows_fitted, tuple(kept_back), tuple(tests), before)
