"""Validation of predictions against measured tables: errors by device and by source, beside a roofline baseline."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import PaleoError, SpecError
from paleo.tables.base import (
    DESCRIPTIVE_COLUMNS,
    MeasuredTable,
    Predictions,
    ResidualErrors,
    ScalingEfficiencyPoint,
    TextArray,
    residual_errors,
    scaling_efficiency_points,
    unusable_cell_reasons,
    with_numeric_columns,
)
from paleo.tables.cells import Array, read_table, text_column
from paleo.tables.kernels import best_constant_roofline_efficiency
from paleo.tables.run_tables import find_table_kind

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration

Flags = npt.NDArray[np.bool_]
#: Measured this many times faster than the datasheet's peaks allow, a row is suspect.
_MAX_SPEEDUP_OVER_ROOFLINE = 1.02
#: Share by which repeated measurements of one configuration must differ to explain a miss.
_MIN_REPEAT_SPREAD = 0.2
#: Kinds of tables whose rooflines are no times.
_TABLES_WITHOUT_TIMES = frozenset(
    {"power", "goodput", "staleness_accuracy", "learning", "convergence", "storage", "compression", "memory"}
    | {"rails"}
)
#: Rows that take this many rooflines are launches, waits and steps rather than arithmetic or traffic.
_FIXED_COST_ROOFLINE_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class ErrorSummary:
    """Errors of predicted against measured values, as fractions; None without rows.

    ``rows`` is the number of compared rows.
    ``median_ape``, ``mape`` and ``p90_ape`` are median, mean and 90th percentile of the absolute relative error.
    ``bias`` is the mean of log(predicted / measured). ``total_error`` is the sum of all predictions over the sum of all
    measurements, minus 1. ``coverage`` is the share of rows whose measurement lies in the 90 % interval.
    ``baseline_mape`` is the mean error of the roofline with the best constant efficiency of each device.
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
class _Worst:
    """Row of a validated table with a large error: measured and predicted value (SI units), and the likely reason.

    ``what`` describes the configuration of the row.
    """

    row: int
    subject: str
    measured: float
    predicted: float
    what: str
    reason: str


@dataclass(frozen=True)
class FileReport:
    """Result of validating predictions against one measured table: predictions and measurements of its rows.

    ``measured`` and ``baseline`` have shape (rows,), in SI units, nan where there is none. ``baseline`` is the roofline
    time divided by the best constant efficiency of the row's device (``roofline_efficiency_by_device``).
    ``readable_rows`` holds the positions of rows whose cells can all be used; the other rows have a reason in
    ``predictions``.
    """

    file: str
    table: MeasuredTable
    frame: pd.DataFrame
    predictions: Predictions
    measured: Array
    baseline: Array
    roofline_efficiency_by_device: Mapping[str, float]
    readable_rows: npt.NDArray[np.intp]

    @property
    def ignored_columns(self) -> list[str]:
        """Columns of the file that the kind of table does not read, except descriptive columns (source, notes, …)."""
        known = {*self.table.columns, *DESCRIPTIVE_COLUMNS}
        return [str(column) for column in self.frame.columns if str(column) not in known]

    @property
    def predicted_row_mask(self) -> Flags:
        """Mask of the table rows that have a prediction, shape (rows,)."""
        return np.asarray(self.predictions.failure_reasons == "")

    @property
    def unsupported_reasons(self) -> dict[str, int]:
        """Number of rows for each reason why rows were not predicted, most frequent first."""
        reasons = self.predictions.failure_reasons[~self.predicted_row_mask]
        return {str(reason): int(count) for reason, count in pd.Series(reasons).value_counts().items()}

    @property
    def row_sources(self) -> TextArray:
        """Source (paper, benchmark page, …) of each table row; '' where the table does not say."""
        return text_column(self.frame, "source").to_numpy()

    def errors(self, chosen: Flags | None = None) -> ErrorSummary:
        """Summarise the errors of the predicted rows of a validated table.

        Parameters
        ----------
        chosen : Flags, shape (rows,), optional
            True for the rows to count; all by default.

        Returns
        -------
        ErrorSummary
            Errors as fractions.
        """
        mask = self.predicted_row_mask if chosen is None else self.predicted_row_mask & chosen
        values = (self.predictions.values, self.measured, self.predictions.low, self.predictions.high, self.baseline)
        return summarise_errors(*(each[mask] for each in values))

    def errors_by_group(self, words: TextArray) -> dict[str, ErrorSummary]:
        """Summarise the errors of the predicted rows for each value of a text column, such as the device or the source.

        Parameters
        ----------
        words : TextArray, shape (rows,)
            Text of each row by which rows are grouped.

        Returns
        -------
        dict of str to ErrorSummary
            Errors of the rows with each text.
        """
        names = sorted({str(word) for word in words[self.predicted_row_mask]})
        return {name: self.errors(words == name) for name in names}

    @property
    def secondary_quantity_errors(self) -> dict[str, ResidualErrors]:
        """Errors of quantities that a table measures besides its main one, such as evaluation time, by name.

        Errors are taken over the rows that have the quantity (`MeasuredTable.secondary_quantities`).
        """
        errors_of_parts = {}
        for name, (predicted, measured) in self.table.secondary_quantities(self._sound).items():
            comparable = np.isfinite(predicted) & np.isfinite(measured) & (predicted > 0)
            comparable &= self.predicted_row_mask[self.readable_rows]
            if comparable.any():
                errors_of_parts[name] = residual_errors(predicted[comparable], measured[comparable])
        return errors_of_parts

    def worst_rows(self, most: int = 10) -> list[_Worst]:
        """List the table rows with the largest errors, one per configuration, with the likely reason of each.

        Parameters
        ----------
        most : int, optional
            Largest number of rows to return.

        Returns
        -------
        list of _Worst
            Rows by falling |log(predicted / measured)|.
        """
        log_error = np.abs(np.log(self.predictions.values / self.measured))
        order = np.argsort(np.where(self.predicted_row_mask, -log_error, np.inf), kind="stable")
        spread = self._scatter()
        misses: dict[str, _Worst] = {}
        for row in order[: min(int(self.predicted_row_mask.sum()), most * 20)]:
            configuration = _describe_row(self.frame, int(row), self.table)
            misses.setdefault(configuration, self._explained(int(row), configuration, float(spread[row])))
            if len(misses) == most:
                break
        return list(misses.values())

    @property
    def scaling_efficiencies(self) -> list[ScalingEfficiencyPoint]:
        """Measured and predicted scaling efficiencies of this table; [] if it has no scaling curves."""
        curves, rows = self.table.scaling_curves(self._sound), self.readable_rows
        predicted = np.where(self.predicted_row_mask, self.predictions.values, np.nan)[rows]
        return [] if curves is None else scaling_efficiency_points(curves, self.measured[rows], predicted)

    @property
    def _sound(self) -> pd.DataFrame:
        """Rows of the validated table whose cells can all be used."""
        return _select_rows(self.frame, self.readable_rows, self.table)

    def _explained(self, row: int, configuration: str, spread: float) -> _Worst:
        predictions, measured = self.predictions, float(self.measured[row])
        ideal, predicted = float(predictions.baseline[row]), float(predictions.values[row])
        if self.table.name in _TABLES_WITHOUT_TIMES:
            reason = f"{predicted / measured:.2f} times what was measured"
        else:
            origin = str(predictions.parameter_origins[row])
            reason = explain_prediction_error(measured, predicted, ideal, spread, origin)
        return _Worst(row, str(predictions.device_names[row]), measured, predicted, configuration, reason)

    def _scatter(self) -> Array:
        """Compute the relative spread of repeated measurements in a table, shape (rows,).

        It is the largest over the smallest value, minus 1. Repeats are rows that agree in all columns except the
        measured ones.
        """
        columns = [name for name in self.frame.columns if name not in _MEASURED_COLUMNS]
        grouped = pd.Series(self.measured).groupby([self.frame[name].to_numpy() for name in columns], dropna=False)
        ratio: Array = (grouped.transform("max") / grouped.transform("min")).to_numpy(dtype=np.float64)
        return ratio - 1.0


def explain_prediction_error(measured: float, predicted: float, ideal: float, spread: float, origin: str) -> str:
    """Guess why a predicted time differs from the measured time, as a phrase for the list of worst rows.

    Parameters
    ----------
    measured : float
        Measured time [s].
    predicted : float
        Predicted time [s].
    ideal : float
        Roofline time at the datasheet's peaks [s].
    spread : float
        Relative spread of repeated measurements: largest over smallest time, minus 1 [-].
    origin : str
        Where the calibrated parameters come from, such as ``measured`` or ``inherited``.

    Returns
    -------
    str
        The likely reason.

    Examples
    --------
    >>> explain_prediction_error(1.0, 3.0, 2.0, 0.0, "measured")
    "measured faster than the datasheet's peaks allow: data in cache, or another algorithm"
    """
    if not ideal > 0:
        return "no roofline to compare with"
    times = f"{measured / ideal:.1f} times the roofline measured, {predicted / ideal:.1f} predicted"
    if measured * _MAX_SPEEDUP_OVER_ROOFLINE < ideal:
        return "measured faster than the datasheet's peaks allow: data in cache, or another algorithm"
    if spread > _MIN_REPEAT_SPREAD:
        return f"repeated measurements of this configuration differ by {spread:.0%}"
    if origin.startswith(("inherited", "default")):
        return f"parameters are {origin}; {times}"
    if not origin.startswith("measured"):
        return f"a choice that the model of the software ({origin}) does not make; {times}"
    if min(measured, predicted) > _FIXED_COST_ROOFLINE_RATIO * ideal:
        return f"fixed costs, not work, decide; {times}"
    return f"a choice of kernel that the formula does not make; {times}"


#: Columns that say what came out, not what was asked.
_MEASURED_COLUMNS = frozenset(
    {"time_us", "std_us", "bw_gbps", "notes", "forward_ms", "backward_ms", "bwd_data_ms", "bwd_weight_ms"}
    | {"iteration_ms", "memory_gb_per_gpu"}
)


def summarise_errors(predicted: Array, measured: Array, low: Array, high: Array, baseline: Array) -> ErrorSummary:
    """Summarise the errors of predictions, the coverage of their 90 % intervals and the error of a roofline baseline.

    Parameters
    ----------
    predicted : ndarray, shape (rows,)
        Predicted values, in the unit of ``measured``.
    measured : ndarray, shape (rows,)
        Measured values, above zero.
    low : ndarray, shape (rows,)
        Lower ends of the 90 % intervals.
    high : ndarray, shape (rows,)
        Upper ends of the 90 % intervals.
    baseline : ndarray, shape (rows,)
        Roofline values divided by one constant efficiency per device; nan where there is none.

    Returns
    -------
    ErrorSummary
        Errors as fractions; None without rows.

    Examples
    --------
    >>> one = np.ones(2)
    >>> e = summarise_errors(np.array([1.1, 1.8]), np.array([1.0, 2.0]), one, 2 * one, np.array([2.0, 2.0]))
    >>> round(e.mape, 3), round(e.total_error, 3), e.coverage, e.baseline_mape
    (0.1, -0.033, 1.0, 0.5)
    """
    if not len(measured):
        return ErrorSummary(0, *(None,) * 7)
    values = np.abs(baseline / measured - 1.0)
    known = values[np.isfinite(values)]
    return ErrorSummary(
        **dataclasses.asdict(residual_errors(predicted, measured)),
        coverage=float(np.mean((low <= measured) & (measured <= high))),
        baseline_mape=float(np.mean(known)) if len(known) else None,
    )


def validate_file(path: str | Path, calibration: Calibration | None = None) -> FileReport:
    """Predict every row of a measured table and compare the predictions with the measurements.

    Parameters
    ----------
    path : str | Path
        CSV or CSV.gz file.
    calibration : Calibration, optional
        A user's calibration; used for rows of its device or system.

    Returns
    -------
    FileReport
        Predictions, measurements and errors of the table's rows.

    Raises
    ------
    SpecError
        If the file cannot be read.
    """
    frame = read_table(path)
    return validate_frame(str(path), frame, table_kind_of_file(path, frame, calibration))


def table_kind_of_file(path: str | Path, frame: pd.DataFrame, calibration: Calibration | None = None) -> MeasuredTable:
    """Find the kind of table that a file holds, from its column names.

    Parameters
    ----------
    path : str | Path
        Path of the file, for error messages.
    frame : DataFrame
        Rows of the file, as `read_table` returns them.
    calibration : Calibration, optional
        A user's calibration; used for rows of its device or system.

    Returns
    -------
    MeasuredTable
        The kind of table.

    Raises
    ------
    SpecError
        If no kind of table has these columns.
    """
    try:
        return find_table_kind(frame.columns, calibration)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def validate_frame(name: str, frame: pd.DataFrame, table: MeasuredTable) -> FileReport:
    """Predict every row of a table that is in memory, and compare the predictions with the measurements.

    Parameters
    ----------
    name : str
        Name of the table in the report.
    frame : DataFrame
        Rows, as `read_table` returns them.
    table : MeasuredTable
        Kind of the table.

    Returns
    -------
    FileReport
        Predictions, measurements and errors. A row without a prediction has a reason: a cell that cannot be used, a
        configuration that the kind of table cannot model, or a computation that overflows.
    """
    frame = frame.reset_index(drop=True)
    reasons = unusable_cell_reasons(frame, table.columns)
    rows = np.flatnonzero(reasons == "")
    measured, predictions = np.full(len(frame), np.nan), Predictions.all_missing(len(frame))
    predictions.failure_reasons[:], predictions.device_names[:] = reasons, text_column(frame, "device").to_numpy()
    if len(rows):
        measured[rows], of_part = measured_and_predicted_values(table, _select_rows(frame, rows, table))
        for field in dataclasses.fields(Predictions):
            getattr(predictions, field.name)[rows] = getattr(of_part, field.name)
    _complete(predictions, measured, table)
    # Divide the rooflines by one efficiency a device, the one that suits these rows best: a favourable baseline.
    baseline, efficiencies = np.full(len(measured), np.nan), dict[str, float]()
    usable = (predictions.failure_reasons == "") & np.isfinite(predictions.baseline) & (predictions.baseline > 0)
    for subject in sorted({str(name) for name in predictions.device_names[usable]}):
        subject_rows = usable & (predictions.device_names == subject)
        efficiency = best_constant_roofline_efficiency(predictions.baseline[subject_rows], measured[subject_rows])
        baseline[subject_rows], efficiencies[subject] = predictions.baseline[subject_rows] / efficiency, efficiency
    return FileReport(name, table, frame, predictions, measured, baseline, efficiencies, rows)


def usable_rows_of_table(path: str | Path) -> pd.DataFrame:
    """Read a measured table for a fit, without rows that have an unusable cell.

    Parameters
    ----------
    path : str or Path
        A CSV or CSV.gz file.

    Returns
    -------
    DataFrame
        Rows that `unusable_cell_reasons` finds usable. All rows if the file is of no known kind.

    Raises
    ------
    SpecError
        If the file cannot be read, or none of its rows can be used.
    """
    frame = read_table(path).reset_index(drop=True)
    try:
        table = find_table_kind(frame.columns)
    except SpecError:
        return frame
    reasons = unusable_cell_reasons(frame, table.columns)
    if (reasons != "").all():
        raise SpecError(f"{path}: no row can be used; the first: {reasons[0]}")
    return _select_rows(frame, np.flatnonzero(reasons == ""), table)


def _select_rows(frame: pd.DataFrame, rows: npt.NDArray[np.intp], table: MeasuredTable) -> pd.DataFrame:
    """Select some rows of a measured table, with a new index from 0 and numeric columns converted to numbers.

    Parameters
    ----------
    frame : DataFrame
        The table.
    rows : ndarray of int
        Positions of the rows to keep.
    table : MeasuredTable
        Kind of the table.

    Returns
    -------
    DataFrame
        The selected rows; ``frame`` itself if all are selected.
    """
    if len(rows) == len(frame):
        return frame
    part = with_numeric_columns(frame.iloc[rows].reset_index(drop=True), table.columns)
    part.attrs = frame.attrs
    return part


def _complete(predictions: Predictions, measured: Array, table: MeasuredTable) -> None:
    """Write a reason into ``predictions`` for each table row that has no measured value or no predicted value."""
    missing = (predictions.failure_reasons == "") & ~np.isfinite(measured)
    predictions.failure_reasons[missing] = f"{table.measured_column} is missing, not a number, or not above zero"
    failed = (predictions.failure_reasons == "") & ~np.isfinite(predictions.values)
    predictions.failure_reasons[failed] = "no prediction was made"


def measured_and_predicted_values(table: MeasuredTable, frame: pd.DataFrame) -> tuple[Array, Predictions]:
    """Compute measured and predicted values of table rows; a row that fails gets a reason and does not stop the others.

    numpy warnings count as errors. If a set of rows fails, it is halved until each failing row is alone. An error that
    is the same for every row (a wrong column, say) is raised.

    Parameters
    ----------
    table : MeasuredTable
        Kind of the table.
    frame : DataFrame
        Rows of the table.

    Returns
    -------
    tuple[Array, Predictions]
        (measured values in SI units, shape (rows,), nan where there is none; predictions of the rows).
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            return table.measured_values(frame), table.predict(frame)
    except Exception as error:
        if len(frame) == 1:
            # The result of one row whose prediction raises an error.
            predictions, words = Predictions.all_missing(1), " ".join(str(error).split())[:200]
            known = isinstance(error, PaleoError)
            predictions.failure_reasons[0] = words if known else f"the row cannot be computed ({words})"
            return np.full(1, np.nan), predictions
        halves = [_select_rows(frame, rows, table) for rows in np.array_split(np.arange(len(frame)), 2)]
        (measured, first), (others, second) = (measured_and_predicted_values(table, half) for half in halves)
        pairs = ((getattr(first, field.name), getattr(second, field.name)) for field in dataclasses.fields(first))
        predictions = Predictions(*(np.concatenate(arrays) for arrays in pairs))
        if isinstance(error, SpecError) and (predictions.failure_reasons == str(error)).all():
            raise
        return np.concatenate([measured, others]), predictions


def _describe_row(frame: pd.DataFrame, row: int, table: MeasuredTable) -> str:
    """Describe the configuration of one table row as text for reports.

    Parameters
    ----------
    frame : DataFrame
        The table.
    row : int
        Position of the row.
    table : MeasuredTable
        Kind of the table.

    Returns
    -------
    str
        For example ``m=4096 n=4096``.
    """
    cells = ((name, frame[name].iloc[row]) for name in table.descriptive_columns if name in frame.columns)
    return " ".join(f"{name}={_cell(value)}" for name, value in cells if value == value and value not in ("", None))


def _cell(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)[:40]


def with_predictions(reports: Sequence[FileReport]) -> pd.DataFrame:
    """Combine the rows of validated files, with columns ``predicted``, ``low``, ``high`` and ``unsupported`` added.

    Parameters
    ----------
    reports : sequence of FileReport
        Validated files.

    Returns
    -------
    DataFrame
        All rows. ``predicted`` and the 90 % interval ``low`` to ``high`` are in the unit of the table's measured
        column; ``unsupported`` is the reason of rows without a prediction. With several files, column ``file`` names
        each.
    """
    parts = []
    for report in reports:
        unit, predictions = report.table.measured_unit_in_si, report.predictions
        values = {"predicted": predictions.values, "low": predictions.low, "high": predictions.high}
        part = report.frame.assign(**{name: each / unit for name, each in values.items()})
        part = part.assign(unsupported=predictions.failure_reasons)
        parts.append(part if len(reports) == 1 else part.assign(file=report.file))
    return pd.concat(parts, ignore_index=True)
