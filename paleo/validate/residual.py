"""How far predictions are from measured times."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
    """Summary of the errors of predictions.

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
