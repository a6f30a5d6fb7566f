"""What a pricing formula may know: the figures of a device (datasheet) and calibrated parameters (measured).

A pricing family is one module with a frozen dataclass of at most 14 parameters and one pure function that broadcasts
over numpy arrays, SI in and out. Each parameter carries its meaning, unit and the range in which a fit may look for it;
a calibration file holds values for them with source and residual.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError, near

Parameters = TypeVar("Parameters")
#: How far beyond the range of a fit a share or an order may lie that was inherited and scaled, or written by hand.
RANGE_SLACK = 2.0


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


@dataclass(frozen=True, slots=True)
class DeviceFigures:
    """The datasheet of one device for one arithmetic, in SI: all that a formula may know of the silicon."""

    name: str
    architecture: str
    memory_kind: str
    multiprocessors: float
    clock_hz: float
    peak_flops_per_s: float
    memory_bandwidth: float
    l2_bytes: float
    power_watts: float
    tensor_cores: bool

    @property
    def flops_per_clock(self) -> float:
        """Peak FLOP per clock and multiprocessor of the unit that the rows run on."""
        return self.peak_flops_per_s / (self.multiprocessors * self.clock_hz)


def floats(*sizes: npt.ArrayLike) -> tuple[npt.NDArray[np.float64], ...]:
    """Each argument as an array of floats."""
    return tuple(np.asarray(size, dtype=np.float64) for size in sizes)
