"""From measured tables to errors: predictions of all rows, compared by device and by source, beside a baseline."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError
from paleo.validate.kinds.base import best_constant_efficiency, read_table, text
from paleo.validate.residual import residual
from paleo.validate.scaling import points
from paleo.validate.tables import table_of

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration
    from paleo.validate.kinds.base import Array
    from paleo.validate.residual import ResidualErrors
    from paleo.validate.scaling import EfficiencyPoint
    from paleo.validate.tables import MeasuredTable, Predictions, Words

Flags = npt.NDArray[np.bool_]
#: Measured this many times faster than the datasheet's peaks allow, a row is suspect.
IMPOSSIBLE = 1.02
#: Share by which repeated measurements of one configuration must differ to explain a miss.
SCATTER = 0.2
#: Kinds of tables whose rooflines are no times.
UNTIMED = frozenset(
    {"power", "goodput", "staleness_accuracy", "learning", "convergence", "storage", "compression", "memory"}
    | {"rails"}
)
#: Rows that take this many rooflines are launches, waits and steps rather than arithmetic or traffic.
FIXED_COSTS = 20.0


@dataclass(frozen=True, slots=True)
class Errors:
    """Errors of predictions, as fractions.

    ``bias`` is the mean of log(predicted / measured); ``total_error`` the sum of all predicted over the sum of all
    measured times, less 1; ``coverage`` the share of rows inside their 90 % interval; ``baseline_mape`` the mean error
    of a roofline of one constant efficiency a device, the best there is for these very rows.
    """

    rows: int
    median_ape: float | None
    mape: float | None
    p90_ape: float | None
    bias: float | None
    total_error: float | None
    coverage: float | None
    baseline_mape: float | None


@dataclass(frozen=True, slots=True)
class Worst:
    """A row with a large error, and the likely reason."""

    row: int
    subject: str
    measured: float
    predicted: float
    what: str
    reason: str


@dataclass(frozen=True)
class FileReport:
    """The validation of one file: errors of its rows, and rows that are not supported.

    ``measured`` and ``baseline`` are in SI, row by row, nan where there is none; ``baseline`` is already divided by the
    best constant efficiency of each device (``efficiencies``).
    """

    file: str
    table: MeasuredTable
    frame: pd.DataFrame
    predictions: Predictions
    measured: Array
    baseline: Array
    efficiencies: Mapping[str, float]

    @property
    def predicted(self) -> Flags:
        """Which rows were predicted."""
        return np.asarray(self.predictions.reasons == "")

    @property
    def unsupported_reasons(self) -> dict[str, int]:
        """Why rows were not predicted, and how many, most first."""
        reasons = self.predictions.reasons[~self.predicted]
        return {str(reason): int(count) for reason, count in pd.Series(reasons).value_counts().items()}

    @property
    def sources(self) -> Words:
        """Where each row was published; '' where the table does not say."""
        return text(self.frame, "source").to_numpy()

    def errors(self, chosen: Flags | None = None) -> Errors:
        """Errors of the predicted rows, or of the chosen ones among them."""
        mask = self.predicted if chosen is None else self.predicted & chosen
        predictions = self.predictions
        return errors(
            predictions.seconds[mask],
            self.measured[mask],
            predictions.low[mask],
            predictions.high[mask],
            self.baseline[mask],
        )

    def by(self, words: Words) -> dict[str, Errors]:
        """Errors of the predicted rows by device or source."""
        names = sorted({str(word) for word in words[self.predicted]})
        return {name: self.errors(words == name) for name in names}

    @property
    def parts(self) -> dict[str, ResidualErrors]:
        """Errors of the parts of the measured quantity, each over the predicted rows that state it."""
        errors_of_parts = {}
        for name, (predicted, measured) in self.table.parts(self.frame).items():
            comparable = self.predicted & np.isfinite(predicted) & np.isfinite(measured) & (predicted > 0)
            if comparable.any():
                errors_of_parts[name] = residual(predicted[comparable], measured[comparable])
        return errors_of_parts

    def worst(self, most: int = 10) -> list[Worst]:
        """The rows with the largest errors, at most one of each configuration, with the likely reasons."""
        log_error = np.abs(np.log(self.predictions.seconds / self.measured))
        order = np.argsort(np.where(self.predicted, -log_error, np.inf), kind="stable")
        spread = self._scatter()
        misses: dict[str, Worst] = {}
        for row in order[: min(int(self.predicted.sum()), most * 20)]:
            configuration = describe(self.frame, int(row), self.table)
            misses.setdefault(configuration, self._explained(int(row), configuration, float(spread[row])))
            if len(misses) == most:
                break
        return list(misses.values())

    @property
    def scaling(self) -> list[EfficiencyPoint]:
        """Efficiency on several devices, where the table has such curves."""
        curves = self.table.curves(self.frame)
        predicted = np.where(self.predicted, self.predictions.seconds, np.nan)
        return [] if curves is None else points(curves, measured=self.measured, predicted=predicted)

    def _explained(self, row: int, configuration: str, spread: float) -> Worst:
        predictions, measured = self.predictions, float(self.measured[row])
        ideal, predicted = float(predictions.baseline[row]), float(predictions.seconds[row])
        if self.table.name in UNTIMED:
            reason = f"{predicted / measured:.2f} times what was measured"
        else:
            reason = explanation(measured, predicted, ideal, spread, str(predictions.origins[row]))
        return Worst(row, str(predictions.subjects[row]), measured, predicted, configuration, reason)

    def _scatter(self) -> Array:
        """Largest over smallest measured time, less 1, among rows that agree in all but what was measured."""
        columns = [name for name in self.frame.columns if name not in MEASUREMENTS]
        grouped = pd.Series(self.measured).groupby([self.frame[name].to_numpy() for name in columns], dropna=False)
        ratio: Array = (grouped.transform("max") / grouped.transform("min")).to_numpy(dtype=np.float64)
        return ratio - 1.0


def explanation(measured: float, predicted: float, ideal: float, spread: float, origin: str) -> str:
    """What most likely explains a miss, from the times, the bare roofline, repeats and where parameters come from.

    >>> explanation(1.0, 3.0, 2.0, 0.0, "measured")
    "measured faster than the datasheet's peaks allow: data in cache, or another algorithm"
    """
    if not ideal > 0:
        return "no roofline to compare with"
    times = f"{measured / ideal:.1f} times the roofline measured, {predicted / ideal:.1f} predicted"
    if measured * IMPOSSIBLE < ideal:
        return "measured faster than the datasheet's peaks allow: data in cache, or another algorithm"
    if spread > SCATTER:
        return f"repeated measurements of this configuration differ by {spread:.0%}"
    if origin.startswith(("inherited", "default")):
        return f"parameters are {origin}; {times}"
    if not origin.startswith("measured"):
        return f"a choice that the model of the software ({origin}) does not make; {times}"
    if min(measured, predicted) > FIXED_COSTS * ideal:
        return f"fixed costs, not work, decide; {times}"
    return f"a choice of kernel that the formula does not make; {times}"


#: Columns that say what came out, not what was asked.
MEASUREMENTS = frozenset(
    {"time_us", "std_us", "bw_gbps", "notes", "forward_ms", "backward_ms", "bwd_data_ms", "bwd_weight_ms"}
    | {"iteration_ms", "memory_gb_per_gpu"}
)


def errors(predicted: Array, measured: Array, low: Array, high: Array, baseline: Array) -> Errors:
    """Summary of predictions against measured values.

    >>> one = np.ones(2)
    >>> e = errors(np.array([1.1, 1.8]), np.array([1.0, 2.0]), one, 2 * one, np.array([2.0, 2.0]))
    >>> round(e.mape, 3), round(e.total_error, 3), e.coverage, e.baseline_mape
    (0.1, -0.033, 1.0, 0.5)
    """
    if not len(measured):
        return Errors(0, *(None,) * 7)
    return Errors(
        **dataclasses.asdict(residual(predicted, measured)),
        coverage=float(np.mean((low <= measured) & (measured <= high))),
        baseline_mape=_mean_or_none(np.abs(baseline / measured - 1.0)),
    )


def _mean_or_none(values: Array) -> float | None:
    known = values[np.isfinite(values)]
    return float(np.mean(known)) if len(known) else None


def validate_file(path: str | Path, calibration: Calibration | None = None) -> FileReport:
    """Predict every row of a measured table and compare; SpecError names the file where it cannot be read."""
    frame = read_table(path)
    return validate_frame(str(path), frame, named_table(path, frame, calibration))


def named_table(path: str | Path, frame: pd.DataFrame, calibration: Calibration | None = None) -> MeasuredTable:
    """The kind of table that a file holds; SpecError names the file."""
    try:
        return table_of(frame.columns, calibration)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def validate_frame(name: str, frame: pd.DataFrame, table: MeasuredTable) -> FileReport:
    """Predict every row of a table that was read already."""
    frame = frame.reset_index(drop=True)
    measured, predictions = table.measured(frame), table.predict(frame)
    missing = (predictions.reasons == "") & ~np.isfinite(measured)
    predictions.reasons[missing] = f"{table.measured_column} is missing, not a number, or not above zero"
    sound = (predictions.reasons == "") & ~np.isfinite(predictions.seconds)
    predictions.reasons[sound] = "no prediction was made"
    baseline, efficiencies = _scaled_baseline(predictions, measured)
    return FileReport(name, table, frame, predictions, measured, baseline, efficiencies)


def _scaled_baseline(predictions: Predictions, measured: Array) -> tuple[Array, dict[str, float]]:
    """The rooflines divided by one efficiency a device, the one that suits these rows best: a favourable baseline."""
    baseline, efficiencies = np.full(len(measured), np.nan), dict[str, float]()
    usable = (predictions.reasons == "") & np.isfinite(predictions.baseline) & (predictions.baseline > 0)
    for subject in sorted({str(name) for name in predictions.subjects[usable]}):
        subject_rows = usable & (predictions.subjects == subject)
        efficiency = best_constant_efficiency(predictions.baseline[subject_rows], measured[subject_rows])
        baseline[subject_rows], efficiencies[subject] = predictions.baseline[subject_rows] / efficiency, efficiency
    return baseline, efficiencies


def describe(frame: pd.DataFrame, row: int, table: MeasuredTable) -> str:
    """The columns of a row that say what was measured, as text."""
    cells = ((name, frame[name].iloc[row]) for name in table.configuration if name in frame.columns)
    return " ".join(f"{name}={_cell(value)}" for name, value in cells if _filled(value))


def _filled(value: object) -> bool:
    return value == value and value not in ("", None)


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:40]


def with_predictions(reports: Sequence[FileReport]) -> pd.DataFrame:
    """The rows of all files with predicted, low and high in the unit of the measured column, and why a row has none."""
    parts = []
    for report in reports:
        unit, predictions = report.table.measured_unit, report.predictions
        more = {
            "predicted": predictions.seconds / unit,
            "low": predictions.low / unit,
            "high": predictions.high / unit,
            "unsupported": predictions.reasons,
        }
        part = report.frame.assign(**more)
        parts.append(part if len(reports) == 1 else part.assign(file=report.file))
    return pd.concat(parts, ignore_index=True)
