"""How far predictions are from measured times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ResidualErrors:
    """Errors of predictions, as fractions; bias is the mean of log(predicted / measured)."""

    rows: int
    median_ape: float
    mape: float
    p90_ape: float
    bias: float
    total_error: float


def residual(predicted: Array, measured: Array) -> ResidualErrors:
    """Summarise the errors of predictions.

    Parameters
    ----------
    predicted : ndarray, shape (rows,)
        Predicted values.
    measured : ndarray, shape (rows,)
        Measured values, above zero.

    Returns
    -------
    ResidualErrors
        Errors as fractions; nan without rows.

    Examples
    --------
    >>> r = residual(np.array([1.1, 1.8]), np.array([1.0, 2.0]))
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
IMPOSSIBLE = 1.2
#: The goal: points within which an efficiency should be predicted.
GOAL = 8.0


@dataclass(frozen=True, slots=True)
class EfficiencyPoint:
    """Efficiency on ``gpus`` devices against ``base`` of them; ``what`` names the configuration."""

    configuration: str
    base: int
    gpus: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Points by which the prediction is too high."""
        return 100.0 * (self.predicted - self.measured)

    @property
    def sound(self) -> bool:
        """True if the measured efficiency is possible."""
        return self.measured <= IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class Scaling:
    """Errors of scaling efficiencies in percentage points.

    ``within_goal`` is the share of points within `GOAL`; ``impossible`` counts points whose measurements contradict
    each other.
    """

    points: int
    mean_error: float | None
    bias: float | None
    worst: float | None
    within_goal: float | None
    impossible: int


def efficiency_points(curves: pd.DataFrame, *, measured: Array, predicted: Array) -> list[EfficiencyPoint]:
    """Collect the scaling efficiencies of all curves of a table.

    Repeated measurements are averaged. Rows without a device count or a prediction (nan) are left out.

    Parameters
    ----------
    curves : DataFrame
        Column ``gpus``, and columns that are equal within a curve.
    measured : ndarray, shape (rows,)
        Measured step times [s].
    predicted : ndarray, shape (rows,)
        Predicted step times [s].

    Returns
    -------
    list of EfficiencyPoint
        One entry for each GPU count above the smallest of its curve.

    Examples
    --------
    >>> curves = pd.DataFrame({"gpus": [1, 2, 2], "model": ["a"] * 3})
    >>> one, = efficiency_points(curves, measured=np.array([1.0, 1.2, 1.3]), predicted=np.array([1.0] * 3))
    >>> one.base, one.gpus, round(one.measured, 3), round(one.error, 1)
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
            points_of_curves.append(EfficiencyPoint(curve, int(counts[0]), count, true, ours))
    return points_of_curves


def summarise_efficiencies(points: Sequence[EfficiencyPoint]) -> Scaling:
    """Summarise the errors of scaling efficiencies.

    Parameters
    ----------
    points : sequence of EfficiencyPoint
        Efficiencies of all curves.

    Returns
    -------
    Scaling
        Errors in percentage points; None without points.

    Examples
    --------
    >>> figures = {2: (0.9, 0.95), 4: (0.9, 0.8), 8: (2.0, 1.0)}  # measured, predicted
    >>> summarise_efficiencies([EfficiencyPoint("a", 1, gpus, *pair) for gpus, pair in figures.items()])
    Scaling(points=2, mean_error=7.5, bias=-2.5, worst=10.0, within_goal=0.5, impossible=1)
    """
    error = np.array([point.error for point in points if point.sound])
    left = len(points) - len(error)
    if not len(error):
        return Scaling(0, None, None, None, None, left)
    size = np.abs(error)
    figures = (size.mean(), error.mean(), size.max(), np.mean(size <= GOAL))
    mean, bias, worst, within_goal = (round(float(point), 9) for point in figures)
    return Scaling(len(error), mean, bias, worst, within_goal, left)
