"""Calibration files: what was measured of a device or system, where and when, with how many rows and what residual.

A file of ``hardware_specs/calibrations`` carries the name of its device or system, or ``architecture-<family>`` for what devices of an
architecture inherit. Parameters are those of a pricing family; ``stack`` says how the rows were timed (graph replay, kernel
duration, eager calls, back-to-back launches), which decides the launch parameters.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated

from pydantic import Field

from paleo.specs.catalog import entries, read_entry
from paleo.specs.loading import Spec, Text, validate

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


class Residual(Spec):
    """Errors on rows that were not fitted, as fractions; ``bias`` is the mean of log(predicted / measured)."""

    rows: Count
    median_ape: float
    mape: float
    p90_ape: float
    bias: float
    total_error: float


class IntervalBin(Spec):
    """Factors on the prediction that hold nine of ten measured times, for predictions up to ``up_to_s`` seconds (null: any)."""

    up_to_s: Positive | None = None
    low: Positive
    high: Positive


class Entry(Spec):
    """One family on one stack: parameters with what they rest on."""

    family: Text
    stack: Text
    architecture: Text | None = None
    memory_kind: Text | None = None
    inherits: tuple[Text, ...] = ()
    source: Text
    date: Text
    library: Text | None = None
    rows_fitted: Count = 0
    rows_held_out: Count = 0
    parameters: dict[str, float]
    uncertainty: dict[str, float] = {}
    residual: Residual | None = None
    interval: tuple[IntervalBin, ...] = Field(min_length=1)
    notes: str | None = None


class Calibration(Spec):
    """All entries of one device, system or architecture."""

    name: Text
    subject: Text
    entries: tuple[Entry, ...]


@cache
def load_calibration(name: str) -> Calibration:
    """The calibration of that name or path."""
    path, data = read_entry("calibrations", name)
    return validate(Calibration, {"name": path.stem, **data}, path)


def calibration_of(subject: str) -> Calibration | None:
    """The shipped calibration of a device or system; None where there is none."""
    return load_calibration(subject) if subject in entries("calibrations") else None


def calibration_file(path: str | Path) -> Calibration:
    """A user's own calibration."""
    return load_calibration(str(path))
