"""Calibration files: what was measured of a device or system, where and when, with how many rows and what residual.

A file of ``hardware_specs/calibrations`` carries the name of its device or system. Parameters are those of a pricing
family; ``stack`` says how the rows were timed (graph replay, kernel duration, eager calls, back-to-back launches),
which decides the launch parameters. ``architectures.yaml`` beside them holds no numbers of its own but rules: what a
device without measurements inherits from which measured one, what is changed and why, and how wide its interval gets.

A pricing family states its calibration parameters as fields of a frozen dataclass, at most 14 of them fitted, each a
`parameter` with its meaning, unit and the range in which a fit may look for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from paleo.errors import SpecError, near
from paleo.specs.catalog import entries, read_entry
from paleo.specs.loading import FileCache, Spec, Text, validate

Count = Annotated[int, Field(ge=0)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: A share or relative error, which cannot be negative.
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Parameters = TypeVar("Parameters")
#: How far beyond the range of a fit a share or an order may lie that was inherited and scaled, or written by hand.
RANGE_SLACK = 2.0
#: The file of inheritance rules.
ARCHITECTURES = "architectures"


class Residual(Spec):
    """Errors on rows that were not fitted, as fractions; ``bias`` is the mean of log(predicted / measured),
    ``total_error`` that of the sum of all seconds, left out where rows are known by their ratios alone."""

    rows: Count
    median_ape: Share
    mape: Share
    p90_ape: Share
    bias: Finite
    total_error: Finite | None = None


class IntervalBin(Spec):
    """Factors on the prediction that hold nine of ten measured times, for predictions up to ``up_to_s`` seconds.

    ``up_to_s`` null means any time, and stands in the last bin.
    """

    up_to_s: Positive | None = None
    low: Positive
    high: Positive

    @model_validator(mode="after")
    def _is_ordered(self) -> IntervalBin:
        if self.low > self.high:
            raise SpecError(f"low: {self.low} is above high: {self.high}")
        return self


Interval = Annotated[tuple[IntervalBin, ...], Field(min_length=1)]


class Entry(Spec):
    """The calibration of one family on one stack: parameters, measured rows, residuals and date."""

    family: Text
    stack: Text
    source: Text
    date: Text
    library: Text | None = None
    inherits: tuple[Text, ...] = ()
    rows_fitted: Count = 0
    rows_held_out: Count = 0
    parameters: dict[str, Positive]
    uncertainty: dict[str, Share] = Field(default_factory=dict)
    residual: Residual | None = None
    interval: Interval
    notes: Text | None = None

    @model_validator(mode="after")
    def _interval_covers_all_times(self) -> Entry:
        check_bins(self.interval)
        return self


class Calibration(Spec):
    """All entries of one device or system."""

    name: Text
    subject: Text
    entries: tuple[Entry, ...]


class Changes(Spec):
    """What differs from the entry that is inherited: parameters set to a value, or multiplied by a factor."""

    like: Text | None = None
    set: dict[str, Positive] = Field(default_factory=dict)
    scale: dict[str, Positive] = Field(default_factory=dict)


class InheritanceRule(Spec):
    """What devices of some architectures inherit of some families.

    ``inherits`` names measured subjects with their weights (a weighted geometric mean where there are several).
    ``family_there`` and a stack's ``like`` name family and stack of the entry, where they are not the same as here.
    ``memory_kinds`` is the kind of memory of a device, or the kind of link inside a node of a system; null means any.
    ``host`` is the subject whose host gives the launch parameters; ``stream`` names the parameter that takes the share
    of bandwidth usual for the kind of memory. ``foreign`` says that they are of another maker, so that nothing of these
    architectures was measured.
    """

    families: tuple[Text, ...] = Field(min_length=1)
    architectures: tuple[Text, ...] = Field(min_length=1)
    memory_kinds: tuple[Text, ...] | None = None
    inherits: dict[Text, Positive] = Field(min_length=1)
    family_there: Text | None = None
    host: Text | None = None
    stacks: dict[Text, Changes] = Field(min_length=1)
    set: dict[str, Positive] = Field(default_factory=dict)
    scale: dict[str, Positive] = Field(default_factory=dict)
    stream: Text | None = None
    interval: Interval | None = None
    widen: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    foreign: bool = False
    notes: Text | None = None

    @model_validator(mode="after")
    def _interval_covers_all_times(self) -> InheritanceRule:
        if self.interval is not None:
            check_bins(self.interval)
        return self


class Inheritance(Spec):
    """The rules, and for each architecture its relatives, nearest first, for what no rule names."""

    name: Text
    relatives: dict[Text, tuple[Text, ...]]
    rules: tuple[InheritanceRule, ...]


def check_bins(bins: tuple[IntervalBin, ...]) -> None:
    """SpecError unless the bins' times rise and the last one has no end."""
    times = [interval.up_to_s for interval in bins]
    ends = [time for time in times[:-1] if time is not None]
    if times[-1] is not None or len(ends) != len(bins) - 1 or ends != sorted(set(ends)):
        raise SpecError("interval: up_to_s must rise from bin to bin and be left out in the last one")


def load_calibration(name_or_path: str | Path) -> Calibration:
    """The calibration of that name or path."""
    return _calibrations(name_or_path)


def _calibration(name_or_path: str | Path) -> Calibration:
    path, data = read_entry("calibrations", name_or_path)
    return validate(Calibration, {"name": path.stem, **data}, path)


_calibrations = FileCache(_calibration)


@cache
def load_inheritance() -> Inheritance | None:
    """The shipped rules; None in a catalog that has none."""
    if ARCHITECTURES not in entries("calibrations"):
        return None
    path, data = read_entry("calibrations", ARCHITECTURES)
    return validate(Inheritance, {"name": path.stem, **data}, path)


def calibration_of(subject: str) -> Calibration | None:
    """The shipped calibration of a device or system; None where there is none."""
    if subject == ARCHITECTURES:
        return None
    return load_calibration(subject) if subject in entries("calibrations") else None


def calibration_file(path: str | Path) -> Calibration:
    """A user's own calibration."""
    return load_calibration(str(path))


def parameter(default: float, *, low: float, high: float, unit: str, meaning: str, fitted: bool = True) -> Any:
    """A dataclass field that is a calibration parameter: a physical meaning, a unit and the range of a fit."""
    if not low <= default <= high:
        raise ValueError(f"default {default} of {meaning!r} lies outside {low}..{high}")
    metadata = {"low": low, "high": high, "unit": unit, "meaning": meaning, "fitted": fitted}
    return dataclasses.field(default=default, metadata=metadata)


def from_mapping(kind: type[Parameters], values: Mapping[str, float], *, where: str) -> Parameters:
    """Parameters of ``kind`` from a calibration's mapping; a name that the family lacks is an error with the nearest
    one, and so is a share or an order that no fit could have found. Times, cycles and energies may be any: a host may
    be slow."""
    ranges = {field.name: field.metadata for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in ranges:
            raise SpecError(f"{where}: unknown parameter {name!r} of {kind.__name__}; {near(name, list(ranges))}")
        _check_range(name, value, ranges[name], where)
    return kind(**{name: float(value) for name, value in values.items()})


def _check_range(name: str, value: float, metadata: Mapping[str, Any], where: str) -> None:
    if metadata["unit"] != "1":
        return
    low, high = metadata["low"] / RANGE_SLACK, metadata["high"] * RANGE_SLACK
    if not low <= value <= high:
        raise SpecError(f"{where}: {name}: {value:g} is no {metadata['meaning']}; expected {low:g} to {high:g}")
