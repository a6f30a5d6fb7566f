"""How well predictions scale: efficiency on several devices against that of the fewest, predicted beside measured.

Steps of one configuration that differ in the number of devices alone make a curve. At a fixed batch for each device
its efficiency is t(fewest) / t(n); the error is predicted less measured, in points of 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Array = npt.NDArray[np.float64]
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
        """Whether the measured efficiency is possible."""
        return self.measured <= IMPOSSIBLE


@dataclass(frozen=True, slots=True)
class Scaling:
    """Errors of the sound points, in points of 100; ``within_goal`` is the share within `GOAL`; ``impossible`` counts
    the points left out, as their measurements contradict each other."""

    points: int
    mean_error: float | None
    bias: float | None
    worst: float | None
    within_goal: float | None
    impossible: int


def points(curves: pd.DataFrame, *, measured: Array, predicted: Array) -> list[EfficiencyPoint]:
    """All points of a table: ``curves`` has ``gpus`` and columns in which the rows of a curve agree. Repeats are
    averaged; rows without devices or a prediction (nan) are left out.

    >>> curves = pd.DataFrame({"gpus": [1, 2, 2], "model": ["a"] * 3})
    >>> one, = points(curves, measured=np.array([1.0, 1.2, 1.3]), predicted=np.array([1.0] * 3))
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


def summary(points: Sequence[EfficiencyPoint]) -> Scaling:
    """Errors of the points.

    >>> figures = {2: (0.9, 0.95), 4: (0.9, 0.8), 8: (2.0, 1.0)}  # measured, predicted
    >>> summary([EfficiencyPoint("a", 1, gpus, *pair) for gpus, pair in figures.items()])
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
