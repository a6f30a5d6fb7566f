"""Shared base of all measured tables: columns, predictions of rows, error summaries, use of a user's calibration.

A measured table is a CSV file with one measurement per row, such as a kernel time or a step time. Error summaries say
how far predictions are from the measurements.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.tables.columns import COLUMNS, parse_column_names

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ResidualErrors:
    """Summary of the errors of predicted against measured values, all but ``rows`` as fractions (0.1 is 10 %).

    ``rows`` is the number of rows compared. ``ape`` is the absolute relative error of a row: ``median_ape``, ``mape``
    (mean) and ``p90_ape`` (90th percentile). ``bias`` is the mean of log(predicted / measured). ``total_error`` is the
    sum of all predictions over the sum of all measurements, minus 1.
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


def scaling_efficiency_points(
    curves: pd.DataFrame, *, measured: Array, predicted: Array
) -> list[ScalingEfficiencyPoint]:
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
    def without_values(cls, rows: int) -> Predictions:
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
        times = [np.full(rows, np.nan) for _ in range(4)]
        words = [np.full(rows, "", dtype=object) for _ in range(3)]
        return cls(*times, *words)


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
    #: Further columns that the kind reads, keys of `paleo.tables.columns.COLUMNS`; a table may lack them.
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
        known = (
            *sorted(self.identifying_columns),
            *parse_column_names(self.optional_columns),
            *(self.measured_columns or (self.measured_column,)),
        )
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
