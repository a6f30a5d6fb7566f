"""Calibration files: measured parameters of a device or system, with date, place, number of rows and residual.

A file of ``hardware_specs/calibrations`` has the name of its device or system. Each entry has the parameters of one
kernel family (kernels priced by one formula). ``stack`` says how the rows were timed (graph replay, kernel duration,
eager calls, back-to-back launches), because that decides the launch parameters.

``architectures.yaml`` in the same folder holds rules instead of measurements. A rule says from which measured device an
unmeasured one inherits its parameters, what is changed and why, and how much wider its interval is.

The parameters of a kernel family are the fields of a frozen dataclass. At most 14 of them are fitted. Each is declared
by `parameter` with its meaning, its unit and the range that a fit may search.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, model_validator

from paleo.errors import SpecError, suggest_names
from paleo.specs.catalog import entry_files, load_entry, read_entry
from paleo.specs.loading import NonEmptyText, Spec, cache_by_files, read_yaml, validate_mapping
from paleo.units import UNIT_FACTORS

NonNegativeCount = Annotated[int, Field(ge=0)]
FiniteNumber = Annotated[float, Field(allow_inf_nan=False)]
PositiveNumber = Annotated[float, Field(gt=0, allow_inf_nan=False)]
#: A fraction or relative error, which cannot be negative.
NonNegativeFraction = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Parameters = TypeVar("Parameters")
#: Factor by which a fraction or an exponent that was inherited, scaled or written by hand may lie outside the fit's
#: range.
_FIT_RANGE_SLACK = 2.0
#: Name of the file with the inheritance rules.
INHERITANCE_FILE = "architectures"


class HeldOutErrors(Spec):
    """Relative errors of a calibration on measured rows that were left out of the fit, as fractions.

    ``bias`` is the mean of log(predicted / measured); ``total_error`` compares the sums of all seconds and is missing
    where rows are known by their ratios only.
    """

    rows: NonNegativeCount
    median_ape: NonNegativeFraction
    mape: NonNegativeFraction
    p90_ape: NonNegativeFraction
    bias: FiniteNumber
    total_error: FiniteNumber | None = None


class IntervalBin(Spec):
    """Factors on a predicted time that enclose 90 % of measured times, for one range of predicted times.

    The interval holds for predictions up to ``up_to_s`` seconds. The last bin has null there and holds for all longer
    times.
    """

    up_to_s: PositiveNumber | None = None
    low: PositiveNumber
    high: PositiveNumber

    @model_validator(mode="after")
    def _is_ordered(self) -> IntervalBin:
        if self.low > self.high:
            raise SpecError(f"low: {self.low} is above high: {self.high}")
        return self


def _covering_all_times(bins: tuple[IntervalBin, ...]) -> tuple[IntervalBin, ...]:
    """Return the bins if ``up_to_s`` rises from bin to bin and the last has no upper end; else raise SpecError."""
    times = [interval.up_to_s for interval in bins]
    ends = [time for time in times[:-1] if time is not None]
    if times[-1] is not None or len(ends) != len(bins) - 1 or ends != sorted(set(ends)):
        raise SpecError("up_to_s must rise from bin to bin, and the last bin must have none")
    return bins


IntervalBins = Annotated[tuple[IntervalBin, ...], Field(min_length=1), AfterValidator(_covering_all_times)]


class CalibrationEntry(Spec):
    """Calibration of one kernel family (kernels with one formula) for one ``stack`` (way of timing).

    ``stack`` says how the rows were timed, such as kernel duration or graph replay. ``parameters`` are fitted values by
    name, ``uncertainty`` the standard deviations of their logarithms. ``residual`` is the error on rows left out of the
    fit, ``interval`` the 90 % factors on predictions.
    """

    family: NonEmptyText
    stack: NonEmptyText
    source: NonEmptyText
    date: NonEmptyText
    library: NonEmptyText | None = None
    inherits: tuple[NonEmptyText, ...] = ()
    rows_fitted: NonNegativeCount = 0
    rows_held_out: NonNegativeCount = 0
    parameters: dict[str, PositiveNumber]
    uncertainty: dict[str, NonNegativeFraction] = Field(default_factory=dict)
    residual: HeldOutErrors | None = None
    interval: IntervalBins
    notes: NonEmptyText | None = None


class Calibration(Spec):
    """Calibration of one device or system: fitted parameters of all its kernel families.

    ``device_or_system`` (``subject`` in files) is the catalog name of what was measured.
    """

    name: NonEmptyText
    device_or_system: NonEmptyText = Field(alias="subject")
    entries: tuple[CalibrationEntry, ...]


class InheritedChanges(Spec):
    """Changes to calibration parameters that are inherited from another device.

    Parameters in ``set`` get a value, those in ``scale`` are multiplied by a factor. ``like`` names the stack of the
    source, if it differs.
    """

    like: NonEmptyText | None = None
    set: dict[str, PositiveNumber] = Field(default_factory=dict)
    scale: dict[str, PositiveNumber] = Field(default_factory=dict)


class InheritanceRule(Spec):
    """Rule by which unmeasured architectures inherit the calibration of some kernel families.

    ``inherits`` maps measured devices or systems to weights; of several the weighted geometric mean is taken.
    ``family_there`` and, for a stack, `InheritedChanges.like` name the inherited family and stack if these have other
    names in the source. ``memory_kinds`` limits the rule to kinds of device memory, or to kinds of links inside a node
    of a system; null means any. ``host`` is the device that gives the launch parameters. ``stream`` names the parameter
    that is set to the usual fraction of bandwidth for the kind of memory. ``foreign`` is True if the measured devices
    are of another maker.
    """

    families: tuple[NonEmptyText, ...] = Field(min_length=1)
    architectures: tuple[NonEmptyText, ...] = Field(min_length=1)
    memory_kinds: tuple[NonEmptyText, ...] | None = None
    inherits: dict[NonEmptyText, PositiveNumber] = Field(min_length=1)
    family_there: NonEmptyText | None = None
    host: NonEmptyText | None = None
    stacks: dict[NonEmptyText, InheritedChanges] = Field(min_length=1)
    set: dict[str, PositiveNumber] = Field(default_factory=dict)
    scale: dict[str, PositiveNumber] = Field(default_factory=dict)
    stream: NonEmptyText | None = None
    interval: IntervalBins | None = None
    widen: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    foreign: bool = False
    notes: NonEmptyText | None = None


class Inheritance(Spec):
    """All rules by which unmeasured devices inherit calibrations.

    ``relatives`` lists, for each architecture, the most similar ones first, for kernel families without a rule.
    """

    name: NonEmptyText
    relatives: dict[NonEmptyText, tuple[NonEmptyText, ...]]
    rules: tuple[InheritanceRule, ...]


@cache_by_files
def load_calibration(name_or_path: str | Path) -> Calibration:
    """Load a calibration by catalog name or path.

    Parameters
    ----------
    name_or_path : str | Path
        Entry of `hardware_specs/calibrations` (named like its device or system), or a YAML file.

    Returns
    -------
    Calibration
        Fitted parameters of all kernel families of the device or system.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    path, data = read_entry("calibrations", name_or_path)
    if path != entry_files("calibrations").get(path.stem):
        data = _with_current_names(data, path)
    return validate_mapping(Calibration, {"name": path.stem, **data}, path)


def present_names_of_parameters(family: str) -> dict[str, str]:
    """Return the present names of the parameters of a kernel family by those that they had in the last release.

    Parameters
    ----------
    family : str
        Kernel family of a calibration entry.

    Returns
    -------
    dict of str to str
        Names of the first patterns that match the family; {} if none does.
    """
    known = _former_names().items()
    return next((names for patterns, names in known if any(fnmatch(family, each) for each in patterns.split())), {})


@cache
def _former_names() -> dict[str, dict[str, str]]:
    return read_yaml(Path(__file__).parent / "former_parameters.yaml")


def _with_current_names(data: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a user's calibration with the present names of parameters that had others in the last release."""
    entries = data.get("entries")
    if not isinstance(entries, list):
        return data
    renamed: dict[str, str] = {}
    entries = [dict(entry) if isinstance(entry, dict) else entry for entry in entries]
    for entry in filter(lambda entry: isinstance(entry, dict), entries):
        names = present_names_of_parameters(str(entry.get("family")))
        for part in ("parameters", "uncertainty"):
            if isinstance(entry.get(part), dict):
                renamed |= {name: names[name] for name in entry[part] if name in names}
                entry[part] = {names.get(name, name): value for name, value in entry[part].items()}
    if renamed:
        examples = ", ".join(f"{old} is now {new}" for old, new in list(renamed.items())[:3])
        message = f"{path.name}: names of parameters have changed ({examples}); the old ones go with the next release"
        warnings.warn(message, FutureWarning, 2)
    return {**data, "entries": entries}


@cache
def load_inheritance() -> Inheritance | None:
    """Load the rules by which unmeasured devices inherit calibrations; None if the catalog has no such rules."""
    known = INHERITANCE_FILE in entry_files("calibrations")
    return load_entry(Inheritance, "calibrations", INHERITANCE_FILE) if known else None


def catalog_calibration(subject: str) -> Calibration | None:
    """Return the calibration of a device or system that ships with Paleo.

    Parameters
    ----------
    subject : str
        Catalog name of a device or system.

    Returns
    -------
    Calibration, optional
        Calibration; None if the catalog has none.
    """
    known = subject != INHERITANCE_FILE and subject in entry_files("calibrations")
    return load_calibration(subject) if known else None


def parameter(default: str, search_range: str, meaning: str, *, fitted: bool = True) -> Any:
    """Declare a calibrated parameter as a dataclass field with unit, meaning and search range.

    Parameters
    ----------
    default : str
        Value with its unit. Times and bytes are converted to SI; other units (cycle, pJ/FLOP) are kept; a
        number alone is a share or an exponent.
    search_range : str
        Range that a fit may search, ``low..high``. An end without a unit has that of the other end, or of `default`.
    meaning : str
        Meaning of the parameter, for messages and documentation.
    fitted : bool
        False for a parameter that is fitted only if ``--free`` names it.

    Returns
    -------
    dataclasses.Field
        Field whose metadata hold ``low``, ``high``, ``unit``, ``meaning`` and ``fitted``.

    Raises
    ------
    ValueError
        If the default lies outside the range, or if either is no number.

    Examples
    --------
    >>> field = parameter("8 us", "2..130 us", "time of a call over no step")
    >>> field.default, field.metadata["low"], field.metadata["unit"]
    (8e-06, 2e-06, 's')
    """
    low_text, high_text = search_range.split("..")
    unit = _unit_of(high_text) or _unit_of(default)
    value, low, high = (_quantity(text, unit) for text in (default, low_text, high_text))
    if not low <= value <= high:
        raise ValueError(f"default {default} of {meaning!r} lies outside {search_range}")
    symbol = {"time": "s", "bytes": "byte"}.get(_dimension(unit), unit or "1")
    metadata = {"low": low, "high": high, "unit": symbol, "meaning": meaning, "fitted": fitted}
    return dataclasses.field(default=value, metadata=metadata)


def _unit_of(text: str) -> str:
    return text.strip().partition(" ")[2]


def _dimension(unit: str) -> str:
    """Return the dimension ("time" or "bytes") of a unit that is converted to SI, or "" for other units."""
    return next((dimension for dimension in ("time", "bytes") if unit in UNIT_FACTORS[dimension]), "")


def _quantity(text: str, unit: str) -> float:
    """Parse a number, converted to SI if `paleo.units` knows its unit.

    Factors are applied as floats, not as decimals, because the stored calibrations were fitted with such numbers.
    """
    number, dimension = float(text.strip().partition(" ")[0]), _dimension(unit)
    return number * float(UNIT_FACTORS[dimension][_unit_of(text) or unit]) if dimension else number


def parameters_from_mapping(kind: type[Parameters], values: Mapping[str, float], *, where: str) -> Parameters:
    """Build the parameter dataclass of a kernel family from a calibration entry's mapping.

    Fractions and exponents must lie in the range of the parameter. Times, cycles and energies may have any value,
    because a host may be slow.

    Parameters
    ----------
    kind : type[Parameters]
        Parameter dataclass of the family, such as `GemmParameters`.
    values : dict of str to float
        Parameters in SI units by name; missing ones take their defaults.
    where : str
        File and entry, for error messages.

    Returns
    -------
    object
        An instance of `kind`.

    Raises
    ------
    SpecError
        If a name is unknown to the family or a value is out of range.
    """
    ranges = {field.name: field.metadata for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name, value in values.items():
        if name not in ranges:
            nearest = suggest_names(name, list(ranges))
            raise SpecError(f"{where}: unknown parameter {name!r} of {kind.__name__}; {nearest}")
        _check_range(name, value, ranges[name], where)
    return kind(**{name: float(value) for name, value in values.items()})


def _check_range(name: str, value: float, metadata: Mapping[str, Any], where: str) -> None:
    if metadata["unit"] != "1":
        return
    low, high = metadata["low"] / _FIT_RANGE_SLACK, metadata["high"] * _FIT_RANGE_SLACK
    if not low <= value <= high:
        raise SpecError(f"{where}: {name}: {value:g} is no {metadata['meaning']}; expected {low:g} to {high:g}")


#: Name of the calibration that holds the constants of whole steps.
STEP_CALIBRATION_NAME = "steps"


def constants_fitted_to_steps(
    kind: type[Parameters], family: str, user_calibration: Calibration | None = None
) -> Parameters:
    """Return the constants of a model of whole training steps, from the first calibration that has them.

    Parameters
    ----------
    kind : type
        Parameter dataclass of the constants.
    family : str
        Name of the entry in the calibration.
    user_calibration : Calibration, optional
        Calibration of the user, which takes precedence over the shipped one.

    Returns
    -------
    object
        Constants of the user's calibration, else of the shipped one, else defaults.
    """
    for calibration in filter(None, (user_calibration, catalog_calibration(STEP_CALIBRATION_NAME))):
        for entry in calibration.entries:
            if entry.family == family:
                return parameters_from_mapping(kind, entry.parameters, where=f"{calibration.name}: {family}")
    return kind()
