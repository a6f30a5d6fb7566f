"""Columns of measured tables: name, type, unit, range and meaning of every column that some kind of table reads.

A kind of table names its identifying and its optional columns; what their cells may hold is declared here, once.
`unusable_cell_reasons` refuses text where a number is expected, infinite or negative numbers, and numbers beyond the
column's range. It also refuses words that a column of words does not allow.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError, suggest_names

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration
    from paleo.tables.cells import Array


class NumberRange(NamedTuple):
    """Range of numbers that a column of a measured table may hold.

    ``minimum`` to ``maximum`` are in ``unit``; only integers are allowed if ``integers_only``.
    """

    minimum: float
    maximum: float
    unit: str
    integers_only: bool

    @classmethod
    def parse(cls, text: str) -> NumberRange:
        """Parse the range of a table column, such as ``0..1e12 s`` or ``whole 1..64``.

        Parameters
        ----------
        text : str
            The range: ``LEAST..MOST UNIT``, with ``whole`` in front if only integers are allowed.

        Returns
        -------
        NumberRange
            The parsed range.

        Examples
        --------
        >>> NumberRange.parse("whole 1..9e15")
        NumberRange(minimum=1.0, maximum=9000000000000000.0, unit='', integers_only=True)
        """
        bounds, _, unit = text.removeprefix("whole ").partition(" ")
        least, most = map(float, bounds.split(".."))
        return cls(least, most, unit, text.startswith("whole "))

    def contains(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Return a mask of the numbers that lie in the range.

        Parameters
        ----------
        values : ndarray, shape (rows,)
            Numbers; nan lies in no range.

        Returns
        -------
        ndarray, shape (rows,)
            True for numbers in the range.
        """
        with np.errstate(invalid="ignore"):
            inside: npt.NDArray[np.bool_] = (values >= self.minimum) & (values <= self.maximum)
            return inside & (values == np.floor(values)) if self.integers_only else inside


#: Ranges of numbers by type. Quantities are bounded far beyond what anybody measures, so that slips of units and
#: overflows are refused and nothing else is.
NUMBER_RANGE_OF_TYPE = {
    name: NumberRange.parse(text)
    for name, text in {
        "count": "whole 1..9e15", "count0": "whole 0..9e15", "positive": "1e-30..1e30", "number0": "0..1e30",
        "number": "-1e30..1e30", "share": "0..1", "s": "1e-12..1e12 s", "s0": "0..1e12 s", "ms": "1e-9..1e15 ms",
        "ms0": "0..1e15 ms", "us": "1e-6..1e18 us", "min": "1e-12..1e10 min", "B": "1..1e18 byte",
        "GiB": "1e-9..1e9 GiB", "B/s": "1..1e18 byte/s", "1/s": "1e-12..1e15 1/s", "TFLOP/s": "1e-12..1e9 TFLOP/s",
        "W": "1e-3..1e9 W", "nat": "1e-6..1e3 nat",
    }.items()
}  # fmt: skip
#: Words for yes and no.
_BOOLEAN_WORDS = ("0", "1", "true", "false", "on", "off", "yes", "no", "0.0", "1.0")


@dataclass(frozen=True)
class Column:
    """Declaration of one column of measured tables: name, type, allowed words and meaning.

    Parameters
    ----------
    name : str
        Header of the column.
    type : str
        ``text``, ``flag`` (yes or no), ``word``, ``words`` (several, joined by ``+``) or a key of
        `NUMBER_RANGE_OF_TYPE`.
    allowed_words : tuple of str
        Words that a cell may hold; empty if any text or number of the type is allowed.
    meaning : str
        Description of the column for documentation.
    """

    name: str
    type: str
    allowed_words: tuple[str, ...]
    meaning: str

    @property
    def unit(self) -> str:
        """Unit of the column's numbers; empty for words and counts."""
        return NUMBER_RANGE_OF_TYPE[self.type].unit if self.type in NUMBER_RANGE_OF_TYPE else ""

    @cached_property
    def expected_text(self) -> str:
        """Description of the values that a cell of this column may hold, for error messages.

        >>> COLUMNS["iteration_ms"].expected_text, COLUMNS["trans_a"].expected_text
        ('a number from 1e-09 to 1e+15 ms', 'one of n, t')
        """
        if self.type == "flag":
            return "0 or 1"
        if self.allowed_words:
            return f"one of {', '.join(self.allowed_words)}"
        if self.type not in NUMBER_RANGE_OF_TYPE:
            return "text without control characters"
        numbers = NUMBER_RANGE_OF_TYPE[self.type]
        bounds = f"from {numbers.minimum:g} to {numbers.maximum:g} {numbers.unit}".strip()
        return f"a {'whole ' if numbers.integers_only else ''}number {bounds}"

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of one cell of this column."""
        if self.type in NUMBER_RANGE_OF_TYPE:
            least, most, unit, whole = NUMBER_RANGE_OF_TYPE[self.type]
            numbers = {"type": ["integer" if whole else "number", "null"], "minimum": least, "maximum": most}
            return numbers | {"description": f"{self.meaning} [{unit}]" if unit else self.meaning}
        words = {"enum": [*self.allowed_words, None]} if self.type == "word" else {"type": ["string", "number", "null"]}
        return words | {"description": self.meaning}

    def invalid_cell_reasons(self, cells: pd.Series[Any]) -> npt.NDArray[np.object_]:
        """Explain for each cell of this table column why it cannot be used (wrong type, out of range, unknown word).

        Parameters
        ----------
        cells : Series
            The column of a table, of any type.

        Returns
        -------
        array of str, shape (rows,)
            One entry per cell; '' if the cell is blank or can be used.
        """
        out = np.full(len(cells), "", dtype=object)
        wrong = self._wrong(cells)
        for place in np.flatnonzero(wrong):
            out[place] = f"{self.name} {str(cells.iloc[place])[:40]!r} is not {self.expected_text}"
        return out

    def _wrong(self, cells: pd.Series[Any]) -> npt.NDArray[np.bool_]:
        """Return a mask of the cells of this column that cannot be used, shape (rows,)."""
        if self.type == "text":
            # True for cells that hold a control character, such as a NUL, which numpy drops from names.
            if cells.dtype.kind in "ifb":
                return np.zeros(len(cells), dtype=bool)
            codes, words = pd.factorize(cells.astype(str), use_na_sentinel=False)
            return np.array([any(ord(mark) < 32 for mark in str(word)) for word in words], dtype=bool)[codes]
        if self.type in NUMBER_RANGE_OF_TYPE:
            inside = NUMBER_RANGE_OF_TYPE[self.type].contains(_numbers(cells))
            return np.asarray(~inside & ~_blank_cells(cells))
        known = {*_BOOLEAN_WORDS} if self.type == "flag" else {*self.allowed_words}
        codes, words = pd.factorize(cells.astype(str).str.strip().str.lower(), use_na_sentinel=False)
        parts = (str(word).split("+") if self.type == "words" else [str(word)] for word in words)
        unknown = np.array([not known.issuperset(part) for part in parts], dtype=bool)
        return unknown[codes] & ~_blank_cells(cells)


def _blank_cells(cells: pd.Series[Any]) -> npt.NDArray[np.bool_]:
    """Return a mask of the empty cells of a table column.

    Parameters
    ----------
    cells : Series[Any]
        The column.

    Returns
    -------
    ndarray, shape (rows,)
        True for empty cells.
    """
    empty = cells.isna().to_numpy()
    return empty if cells.dtype.kind in "if" else empty | (cells.astype(str).str.strip() == "").to_numpy()


def _numbers(cells: pd.Series[Any]) -> npt.NDArray[np.float64]:
    """Convert a table column to floats; nan where a cell is no number."""
    if isinstance(cells.dtype, pd.CategoricalDtype):
        cells = cells.astype(object)
    return pd.to_numeric(cells, errors="coerce").to_numpy(dtype=np.float64)


def unusable_cell_reasons(frame: pd.DataFrame, names: Iterable[str]) -> npt.NDArray[np.object_]:
    """Explain for each row of a measured table which cell cannot be used, and why.

    Parameters
    ----------
    frame : DataFrame
        The table; it may have other columns and lack some of ``names``.
    names : iterable of str
        Columns to check, keys of `COLUMNS`.

    Returns
    -------
    array of str, shape (rows,)
        Reason of the first wrong cell of each row; '' if all cells can be used.
    """
    reasons = np.full(len(frame), "", dtype=object)
    for name in names:
        if name in frame.columns:
            reasons = np.where(reasons == "", COLUMNS[name].invalid_cell_reasons(frame[name]), reasons)
    return reasons


def with_numeric_columns(frame: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """Convert columns of a measured table that pandas read as text back to numbers.

    A single cell that is no number makes pandas read the whole column as text.

    Parameters
    ----------
    frame : DataFrame
        Rows whose cells were checked by `unusable_cell_reasons`.
    names : iterable of str
        Names of all columns of the table's kind.

    Returns
    -------
    DataFrame
        A copy with float columns; ``frame`` itself if nothing had to be converted.
    """
    numeric = [name for name in names if name in frame and COLUMNS[name].type in NUMBER_RANGE_OF_TYPE]
    texts = [name for name in numeric if frame[name].dtype == object and not _blank_cells(frame[name]).all()]
    numbers = {name: pd.to_numeric(frame[name], errors="coerce") for name in texts}
    return frame.assign(**numbers) if numbers else frame


def row_schema(kind: str, header: Iterable[str], names: Iterable[str]) -> dict[str, Any]:
    """Build the JSON Schema that describes one row of a kind of measured table.

    Parameters
    ----------
    kind : str
        Name of the kind.
    header : iterable of str
        Columns that a table of the kind must have.
    names : iterable of str
        All columns of the kind, keys of `COLUMNS`.

    Returns
    -------
    dict of str to Any
        The JSON Schema document.
    """
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"paleo/table/{kind}",
        "title": f"One row of a measured table of kind {kind}; a cell may be blank",
        "type": "object",
        "required": sorted(header),
        "properties": {name: COLUMNS[name].schema for name in names},
    }


def best_matching_kind(
    columns: Iterable[str], headers: Mapping[str, frozenset[str]], read: Mapping[str, frozenset[str]]
) -> str:
    """Find the kind of measured table to which a CSV header belongs: all identifying columns of that kind are present.

    Parameters
    ----------
    columns : iterable of str
        Header of the table.
    headers : mapping of str to set of str
        Columns that identify each kind, by its name.
    read : mapping of str to set of str
        All columns that each kind reads, by its name; the identifying ones are among them.

    Returns
    -------
    str
        Name of the kind. If several fit, the one with most identifying columns; then the one that reads most of the
        table's columns.

    Raises
    ------
    SpecError
        If no kind has all its identifying columns in the header; the message names the nearest kind and what is
        missing.
    """
    present = {str(column).strip() for column in columns}
    fitting = [name for name, header in headers.items() if header <= present]
    if fitting:
        return max(fitting, key=lambda name: (len(headers[name]), len(read[name] & present), name))
    if not headers:
        raise SpecError("no table kind is registered")
    nearest = min(headers, key=lambda name: (len(headers[name] - present) / len(headers[name]), name))
    lacking = ", ".join(_lacking(column, present) for column in sorted(headers[nearest] - present))
    needed = f"the nearest, {nearest!r}, also needs {lacking}"
    raise SpecError(f"no kind of table has this header; {needed} (`paleo list tables`)")


def _lacking(column: str, present: Iterable[str]) -> str:
    """Describe a missing column for an error message, with a similarly spelt column of the table as a suggestion."""
    close = get_close_matches(column, {name.lower(): name for name in present}, n=1, cutoff=0.75)
    meant = next((name for name in present if close and name.lower() == close[0]), None)
    if meant is None:
        return repr(column)
    units = [name.strip().lower().rpartition("_") for name in (column, meant)]
    other_unit = units[0][0] and units[0][0] == units[1][0]
    return f"{column!r} ({meant!r} is not that: convert it)" if other_unit else f"{column!r} (is it {meant!r}?)"


#: Columns that say where a row is from; any table may have them.
DESCRIPTIVE_COLUMNS = frozenset(
    {"source", "url_or_path", "provenance", "notes", "device_reported", "dtype_reported", "library", "version"}
    | {"kernel_source", "framework", "system_text", "repeat", "memory_unit", "memory_unit_reported", "kind", "path"}
    | {"hyperparameters"}
)

#: Every column by its name: those of ``columns.txt``, and those that modules of kinds declare.
COLUMNS: dict[str, Column] = {}


def declare_columns(lines: str) -> None:
    """Add columns to `COLUMNS`, the register of all columns that measured tables may have.

    Called by the module of a kind of table for columns that no other kind has.

    Parameters
    ----------
    lines : str
        One line for columns of one type: names, type (followed by its allowed words) and meaning, separated by bars:
        ``decode_ms | ms | time of one core for an image``.
    """
    for line in lines.strip().splitlines():
        names, kind, meaning = (part.strip() for part in line.split("|"))
        type_, _, words = kind.partition(" ")
        COLUMNS.update((name, Column(name, type_, tuple(words.split()), meaning)) for name in names.split())


declare_columns((Path(__file__).parent / "columns.txt").read_text(encoding="utf-8"))


def parse_column_names(names: str) -> tuple[str, ...]:
    """Split a string of column names at spaces; raise SpecError for a name that is not declared in `COLUMNS`.

    Parameters
    ----------
    names : str
        Column names with spaces between them.

    Returns
    -------
    tuple of str
        The column names.

    Raises
    ------
    SpecError
        If `COLUMNS` has no such column.
    """
    read = tuple(names.split())
    for name in read:
        if name not in COLUMNS:
            nearest = suggest_names(name, COLUMNS)
            raise SpecError(f"column {name!r} has no line in paleo/tables/columns.txt; {nearest}")
    return read


def column_set(names: str) -> frozenset[str]:
    """Split a string of column names at spaces as `parse_column_names` does, for the columns that identify a table.

    Parameters
    ----------
    names : str
        Column names with spaces between them.

    Returns
    -------
    frozenset of str
        The column names.
    """
    return frozenset(parse_column_names(names))


@dataclass(frozen=True, slots=True)
class ResidualErrors:
    """Summary of the errors of predicted against measured values, all but ``rows`` as fractions (0.1 is 10 %).

    ``rows`` is the number of rows compared. Of the absolute relative errors of the rows, ``median_ape`` is the median,
    ``mape`` the mean and ``p90_ape`` the 90th percentile. ``bias`` is the mean of log(predicted / measured).
    ``total_error`` is the sum of all predictions over the sum of all measurements, minus 1.
    """

    rows: int
    median_ape: float
    mape: float
    p90_ape: float
    bias: float
    total_error: float


def residual_errors(predicted: Array, measured: Array) -> ResidualErrors:
    """Summarise the errors of predicted against measured values.

    Parameters
    ----------
    predicted : ndarray, shape (rows,)
        Predicted values, in the unit of ``measured``.
    measured : ndarray, shape (rows,)
        Measured values, above zero.

    Returns
    -------
    ResidualErrors
        Errors as fractions; nan without rows.

    Examples
    --------
    >>> r = residual_errors(np.array([1.1, 1.8]), np.array([1.0, 2.0]))
    >>> round(r.mape, 3), round(r.median_ape, 3), round(r.total_error, 3)
    (0.1, 0.1, -0.033)
    """
    if not len(measured):
        return ResidualErrors(0, math.nan, math.nan, math.nan, math.nan, math.nan)
    ape = np.abs(predicted / measured - 1.0)
    return ResidualErrors(
        rows=len(measured),
        median_ape=float(np.median(ape)),
        mape=float(np.mean(ape)),
        p90_ape=float(np.quantile(ape, 0.9)),
        bias=float(np.mean(np.log(predicted / measured))),
        total_error=float(np.sum(predicted) / np.sum(measured) - 1.0),
    )


#: Measured efficiency above which one of the two measurements must be wrong: no cache or clock gives so much.
MAX_PLAUSIBLE_SCALING_EFFICIENCY = 1.2
#: The goal: points within which an efficiency should be predicted.
SCALING_EFFICIENCY_ERROR_GOAL = 8.0


@dataclass(frozen=True, slots=True)
class ScalingEfficiencyPoint:
    """Measured and predicted scaling efficiency of one configuration on ``gpus`` devices.

    The efficiency is a fraction: step time on ``base_gpus`` devices over step time on ``gpus`` devices. ``base_gpus``
    is the smallest device count of the configuration's scaling curve. ``configuration`` names the curve by the values
    that its runs share.
    """

    configuration: str
    base_gpus: int
    gpus: int
    measured_efficiency: float
    predicted_efficiency: float

    @property
    def error(self) -> float:
        """Predicted minus measured efficiency [percentage points]."""
        return 100.0 * (self.predicted_efficiency - self.measured_efficiency)


@dataclass(frozen=True, slots=True)
class ScalingEfficiencyErrors:
    """Errors of predicted scaling efficiencies over several points, in percentage points.

    ``mean_error`` is the mean absolute error, ``bias`` the mean error, ``worst`` the largest absolute error.
    ``within_goal`` is the share of points within `SCALING_EFFICIENCY_ERROR_GOAL` [-]. ``impossible`` counts points left
    out because their measurements contradict each other (efficiency above `MAX_PLAUSIBLE_SCALING_EFFICIENCY`).
    """

    points: int
    mean_error: float | None
    bias: float | None
    worst: float | None
    within_goal: float | None
    impossible: int


def scaling_efficiency_points(curves: pd.DataFrame, measured: Array, predicted: Array) -> list[ScalingEfficiencyPoint]:
    """Compute measured and predicted scaling efficiencies of all scaling curves of a table.

    A curve is one configuration measured on several GPU counts. The efficiency is the step time on its smallest count
    over the step time on ``gpus`` devices.

    Repeated measurements are averaged. Rows without a device count or a prediction (nan) are left out.

    Parameters
    ----------
    curves : DataFrame
        Column ``gpus`` (device count of each row), and columns whose values are equal within a curve; shape (rows,
        columns).
    measured : ndarray, shape (rows,)
        Measured step times [s].
    predicted : ndarray, shape (rows,)
        Predicted step times [s].

    Returns
    -------
    list of ScalingEfficiencyPoint
        One entry for each GPU count above the smallest of its curve.

    Examples
    --------
    >>> curves = pd.DataFrame({"gpus": [1, 2, 2], "model": ["a"] * 3})
    >>> one, = scaling_efficiency_points(curves, measured=np.array([1.0, 1.2, 1.3]), predicted=np.array([1.0] * 3))
    >>> one.base_gpus, one.gpus, round(one.measured_efficiency, 3), round(one.error, 1)
    (1, 2, 0.8, 20.0)
    """
    same = [str(name) for name in curves.columns if name != "gpus"]
    rows = curves.assign(measured_s=measured, predicted_s=predicted).dropna()
    points_of_curves = []
    for key, group in rows.groupby(same, sort=True):
        times = group.groupby("gpus")[["measured_s", "predicted_s"]].mean()
        counts, seconds = times.index.to_numpy(dtype=np.int64), times.to_numpy(dtype=np.float64)
        curve = " ".join(str(word) for word in key if word)
        for count, (true, ours) in zip(counts[1:].tolist(), (seconds[0] / seconds[1:]).tolist(), strict=True):
            points_of_curves.append(ScalingEfficiencyPoint(curve, int(counts[0]), count, true, ours))
    return points_of_curves


def summarise_scaling_efficiencies(points: Sequence[ScalingEfficiencyPoint]) -> ScalingEfficiencyErrors:
    """Summarise the errors of predicted scaling efficiencies over all points of all curves.

    Parameters
    ----------
    points : sequence of ScalingEfficiencyPoint
        Efficiencies of all curves.

    Returns
    -------
    ScalingEfficiencyErrors
        Errors in percentage points; None without points.

    Examples
    --------
    >>> figures = {2: (0.9, 0.95), 4: (0.9, 0.8), 8: (2.0, 1.0)}  # measured, predicted
    >>> summarise_scaling_efficiencies([ScalingEfficiencyPoint("a", 1, gpus, *pair) for gpus, pair in figures.items()])
    ScalingEfficiencyErrors(points=2, mean_error=7.5, bias=-2.5, worst=10.0, within_goal=0.5, impossible=1)
    """
    error = np.array([point.error for point in points if point.measured_efficiency <= MAX_PLAUSIBLE_SCALING_EFFICIENCY])
    left = len(points) - len(error)
    if not len(error):
        return ScalingEfficiencyErrors(0, None, None, None, None, left)
    size = np.abs(error)
    figures = (size.mean(), error.mean(), size.max(), np.mean(size <= SCALING_EFFICIENCY_ERROR_GOAL))
    mean, bias, worst, within_goal = (round(float(point), 9) for point in figures)
    return ScalingEfficiencyErrors(len(error), mean, bias, worst, within_goal, left)


TextArray = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions for the rows of a measured table, as arrays of shape (rows,).

    A row without a prediction has nan and a reason.

    ``values`` is the predicted time; ``low`` and ``high`` are the ends of its 90 % interval. ``baseline`` is the
    roofline time at the datasheet's peaks; the report divides it by one constant efficiency per device.
    ``failure_reasons`` says why a row has no prediction, '' if it has one. ``device_names`` names the device or system
    in the catalog. ``parameter_origins`` says where the calibrated parameters come from. Tables of other quantities
    than times have SI values of that quantity (memory: bytes).
    """

    values: Array
    low: Array
    high: Array
    baseline: Array
    failure_reasons: TextArray
    device_names: TextArray
    parameter_origins: TextArray

    @classmethod
    def all_missing(cls, rows: int) -> Predictions:
        """Create empty predictions for a table: nan values and '' texts, to be filled row by row.

        Parameters
        ----------
        rows : int
            Number of rows.

        Returns
        -------
        Predictions
            Arrays of shape (rows,), nan or ''.
        """
        return cls(*np.full((4, rows), np.nan), *np.full((3, rows), "", dtype=object))


class MeasuredTable(ABC):
    """Abstract base of all kinds of measured tables that ``paleo validate`` reads.

    A kind of table is a CSV layout, such as GEMM times or training steps. A subclass declares its columns and predicts
    the measured quantity of each row. ``calibration`` is a user's calibration, used for rows of the device or system
    that it was fitted on. None: the catalog's calibrations.
    """

    #: Registry name, also the ``kind`` that ``paleo validate --json`` prints.
    name: ClassVar[str]
    #: Columns that identify the kind; a table may have more.
    identifying_columns: ClassVar[frozenset[str]]
    #: Further columns that the kind reads, keys of `paleo.tables.base.COLUMNS`; a table may lack them.
    optional_columns: ClassVar[str] = ""
    #: Columns that define a configuration: rows that agree in them fall on the same side of a held-out split.
    configuration_columns: ClassVar[tuple[str, ...]]
    #: The column that holds what was measured, and the seconds (bytes, …) of one unit of it.
    measured_column: ClassVar[str]
    measured_unit_in_si: ClassVar[float]
    #: Columns that may hold what was measured, where it is not `measured_column` alone.
    measured_columns: ClassVar[tuple[str, ...]] = ()
    #: Whether calibrations, profiles and links are fitted to such tables.
    used_for_fitting: ClassVar[bool] = True

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.calibration = calibration

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of all columns that this kind of table reads, identifying columns first."""
        measured = self.measured_columns or (self.measured_column,)
        known = (*sorted(self.identifying_columns), *parse_column_names(self.optional_columns), *measured)
        return tuple(name for name in dict.fromkeys(known) if name in COLUMNS)

    @property
    def descriptive_columns(self) -> tuple[str, ...]:
        """Names of the columns that describe the configuration of a row in reports."""
        return self.configuration_columns

    def with_calibration(self, calibration: Calibration | None) -> Self:
        """Create the same kind of table with a user's calibration, which its predictions then use.

        Parameters
        ----------
        calibration : Calibration, optional
            The user's calibration; None: use the catalog's calibrations.

        Returns
        -------
        MeasuredTable
            A new object of the same class.
        """
        return type(self)(calibration)

    @abstractmethod
    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return the measured value (time, memory, …) of each row of this kind of table in SI units.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        ndarray, shape (rows,)
            Values in SI units; nan where a cell holds no number above zero.
        """

    @abstractmethod
    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict what each row of this kind of table measured, with a 90 % interval.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        Predictions
            Predicted values with intervals, one entry per row; a reason where a row cannot be modelled.
        """

    def secondary_quantities(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """Predict further measured quantities of each row besides the main one, such as latencies beside throughput.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        dict[str, tuple[Array, Array]]
            By name of the quantity: (predicted, measured), arrays of shape (rows,) in SI units, nan where unknown.
        """
        return {}

    def scaling_curves(self, frame: pd.DataFrame) -> pd.DataFrame | None:
        """Return the device count of each row and the columns that distinguish scaling curves.

        The result is used to compare scaling efficiencies. A curve is one configuration on several device counts.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        DataFrame, optional
            Column ``gpus`` (nan: not part of a curve), and columns that are equal within a curve; None without curves.
        """
        return None
