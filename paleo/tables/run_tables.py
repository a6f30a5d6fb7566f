"""Base of tables with one run per row (a training step, a served workload, …), and readers of their cells.

Each row becomes a `Run` on a system, which Paleo predicts. The system comes from the catalog: by the row's name of the
system, or by the usual server of the row's device. The row's nodes and network are then applied.
"""

from __future__ import annotations

import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd

from paleo.errors import PaleoError, SpecError, suggest_names
from paleo.registry import Registry
from paleo.specs.catalog import entry_names
from paleo.specs.device import find_device, load_link
from paleo.specs.loading import parse_yaml
from paleo.specs.software import TPU_PROFILE_NAME, SoftwareProfile, load_software
from paleo.specs.system import System, load_system
from paleo.step.interval import INTERVAL_CALIBRATION, StepUncertainty
from paleo.tables.base import MeasuredTable, Predictions, best_matching_kind
from paleo.tables.cells import Array, number_or_nan, text_column
from paleo.tables.kernels import KERNEL_TABLES
from paleo.units import MILLISECOND

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.calibration import Calibration
    from paleo.step.memory import MemoryFootprint

#: What reading a malformed cell, or computing with an absurd one, raises.
CELL_ERRORS = (KeyError, ValueError, OverflowError, ZeroDivisionError)
Row = Mapping[str, Any]
Result = TypeVar("Result")
#: What a report says of a run that ran out of memory.
_OUT_OF_MEMORY_REASON = "ran out of memory; predicted: {}"
#: Names in measured tables and the entries of the catalog that they mean.
TABLE_NAME_ALIASES = parse_yaml((Path(__file__).parent / "names.yaml").read_text(encoding="utf-8"), where="names.yaml")
#: Profiles for rows whose own is not in the catalog, by a word of the framework that they name; the first that fits.
_SUBSTITUTE_PROFILES: Mapping[str, str] = TABLE_NAME_ALIASES["profiles"]
#: Words of frameworks without a profile of their own, whose rows take the default one.
_FRAMEWORKS_WITHOUT_PROFILE = (
    "torch", "ddp", "horovod", "hugging", "transformers", "jax", "paddle", "colossal", "byteps", "dt-fm",
)  # fmt: skip

#: Finer profiles than the one that a row names, by a word of its framework.
_PROFILES_BY_FRAMEWORK_WORD = {
    (profile, word): f for profile, words in TABLE_NAME_ALIASES["finer_profiles"].items() for word, f in words.items()
}

#: The same by a word of a row's notes.
_PROFILES_BY_NOTE = {("torchtitan", "fsdp (eager)"): "torchtitan-eager"}


#: What the sources begin with that run NVIDIA's example scripts in its containers.
NVIDIA_EXAMPLE_SOURCES = ("DeepLearningExamples",)


def software_profile_name(row: Row, default: str = "pytorch-eager") -> str:
    """Choose the software profile (how a framework's release drives the device) with which a table row is predicted.

    The row's ``software`` cell is used if the catalog has that profile. Otherwise the words of the row's framework
    choose the nearest profile. TPU rows always use the XLA profile.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.
    default : str, optional
        Profile of a row that names no software.

    Returns
    -------
    str
        Name of a profile in the catalog.
    """
    if str(row.get("device", "")).startswith("tpu"):
        return TPU_PROFILE_NAME
    stated = str(row.get("software") or "").strip()
    if stated in entry_names("software"):
        for column, profiles in (("framework", _PROFILES_BY_FRAMEWORK_WORD), ("notes", _PROFILES_BY_NOTE)):
            for (coarse, word), finer in profiles.items():
                if coarse == stated and word in str(row.get(column, "")).lower():
                    return finer
        return stated
    words = f"{stated} {row.get('framework', '')}".lower()
    alike = next((profile for word, profile in _SUBSTITUTE_PROFILES.items() if word in words), None)
    if alike is None and has_value(row, "software") and not any(word in words for word in _FRAMEWORKS_WITHOUT_PROFILE):
        raise SpecError(
            f"software {stated[:40]!r} is no profile and no framework; {suggest_names(stated, entry_names('software'))}"
        )
    return alike or default


def uses_substitute_profile(row: Row) -> bool:
    """Return True if the catalog lacks the software of a measured run, so that a substitute profile is used.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.

    Returns
    -------
    bool
        False also if the row names no software.

    Examples
    --------
    >>> [uses_substitute_profile(row) for row in ({"software": "colossalai"}, {"software": "megatron-core"}, {})]
    [True, False, False]
    """
    stated = str(row.get("software") or "").strip() if has_value(row, "software") else ""
    return bool(stated) and stated not in entry_names("software")


def row_dicts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Convert the rows of a measured table to dicts, one per row.

    Parameters
    ----------
    frame : DataFrame
        The table.

    Returns
    -------
    list[dict[str, Any]]
        Cells by column name, one dict per row.
    """
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]


def has_value(row: Row, key: str) -> bool:
    """Return True if a table row has a column and its cell is not empty.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.
    key : str
        Name of the column.

    Returns
    -------
    bool
        True if the cell holds a value.
    """
    value = row.get(key)
    return value is not None and value == value and str(value).strip() != ""


def profile_at_release(row: Row, name: str) -> str:
    """Choose the version of a software profile that was current when a run was measured.

    The date is taken from the row's release, from a version of its framework, or from its source.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.
    name : str
        Name of the profile, such as ``pytorch-eager``.

    Returns
    -------
    str
        ``name``, or ``name@version`` if the profile differed at that release.
    """
    software = load_software(name)
    for version in _versions(row) if software.earlier else ():
        try:
            date = software.release_date(version)
        except SpecError:
            continue
        return f"{name}@{version}" if software.changes_at_date(date) else name
    return name


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
#: A month with its year (Sep-2020), a year, a conference of that year (SC21).
_DATED = re.compile(rf"\b(?:({'|'.join(_MONTHS)})[a-z]*[- ])?(20[12][0-9])\b|\b(?:sc|mlsys|asplos) ?'?([12][0-9])\b")


#: Days of a diary by its last line of each (as far as rows of steps, which state both, cite it).
_LOGBOOK_LINE_DATES = {
    "chronicles-prequel.md": (
        (478, "2022-02-20"), (660, "2022-02-21"), (810, "2022-02-25"), (869, "2022-02-26"), (892, "2022-02-27"),
        (950, "2022-02-28"),
    ),
}  # fmt: skip


def _versions(row: Row) -> Iterator[str]:
    """Yield release versions and dates in the texts of a table row, the most reliable first.

    The texts are the row's release, framework and source.
    """
    texts = [str(row[key]).lower() for key in ("release", "framework", "source") if has_value(row, key)]
    line = re.search(r"([^/]+)#L(\d+)$", str(row.get("url_or_path", "")))
    days = _LOGBOOK_LINE_DATES.get(line[1], ()) if line else ()
    yield from [day for last, day in days if line and int(line[2]) <= last][:1]
    if has_value(row, "release"):
        yield texts[0].strip()
    for words in texts:
        yield from re.findall(r"\b[0-9]+\.[0-9]+(?:\.[0-9]+)?\b", words)
        for month, year, short in _DATED.findall(words):
            yield f"{year or f'20{short}'}{f'-{_MONTHS.index(month) + 1:02}' if month else ''}"


def integer_cell(row: Row, key: str, default: int | None = None) -> int:
    """Read a cell of a table row as a whole number of zero or more.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.
    key : str
        Name of the column.
    default : int, optional
        Number for an empty cell.

    Returns
    -------
    int
        The number.

    Raises
    ------
    SpecError
        If the cell is no whole number, or is empty without a default.
    """
    if not has_value(row, key):
        if default is None:
            raise SpecError(f"{key} is not stated")
        return default
    try:
        value = float(row[key])
    except (TypeError, ValueError, OverflowError):
        value = float("nan")
    if not value.is_integer() or value < 0:
        raise SpecError(f"{key} {row[key]!r} is not a whole number")
    return int(value)


def positive_cell(row: Row, key: str) -> float:
    """Read a cell of a table row as a number above zero.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.
    key : str
        Name of the column.

    Returns
    -------
    float
        The number.

    Raises
    ------
    SpecError
        If the cell holds no finite number above zero.
    """
    try:
        value = float(row[key])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise SpecError(f"{key} {row[key]!r:.60} is not a number above zero")
    return value


def number_cell(row: Row, key: str, default: float) -> float:
    """Read a cell of a table row as a number.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.
    key : str
        Name of the column.
    default : float
        Number for an empty cell.

    Returns
    -------
    float
        The number.
    """
    return float(row[key]) if has_value(row, key) else default


def word_cell(row: Row, key: str) -> str:
    """Read a cell of a table row as a word in lower case; '' for an empty cell.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.
    key : str
        Name of the column.

    Returns
    -------
    str
        The word.
    """
    return str(row[key]).strip().lower() if has_value(row, key) else ""


def ran_out_of_memory(row: Row) -> bool:
    """Return True if a measured run reports an out-of-memory error in column ``kind``, ``what`` or ``notes``.

    Parameters
    ----------
    row : Row
        Row of a table: its cells by column name.

    Returns
    -------
    bool
        True if the text has "OOM" or "out of memory".

    Examples
    --------
    >>> ran_out_of_memory({"notes": "OOM at this batch"}), ran_out_of_memory({"notes": "zoom 2"})
    (True, False)
    """
    words = " ".join(str(row.get(key, "")) for key in ("kind", "what", "notes"))
    return re.search(r"\boom\b|out of memory|outofmemory", words.lower()) is not None


@dataclass(frozen=True, slots=True)
class RowPrediction:
    """Prediction for one measured run (a table row): the value with its 90 % interval, in SI units.

    ``value`` is the predicted quantity (mostly a step time [s]), ``low`` and ``high`` the ends of the interval.
    ``baseline`` is the baseline value at the datasheet's peaks. ``device_name`` names the device, ``origin`` the
    software profile or source of the prediction. ``uncertainty`` holds the parts of the interval, for step times only.
    """

    value: float
    low: float
    high: float
    baseline: float
    device_name: str
    origin: str
    uncertainty: StepUncertainty | None = field(default=None, compare=False)  # low and high follow from it

    @classmethod
    def with_factors(cls, value: float, factors: tuple[float, float], *more: Any) -> RowPrediction:
        """Create the prediction of a row whose 90 % interval ends at two factors of the value.

        Parameters
        ----------
        value : float
            Predicted value.
        factors : tuple of float
            Factors of the lower and of the upper end.
        *more : Any
            The other fields: baseline, device name, origin and uncertainty.

        Returns
        -------
        RowPrediction
            The prediction.
        """
        return cls(value, value * factors[0], value * factors[1], *more)

    @classmethod
    def within_factor(cls, value: float, factor: float, *more: Any) -> RowPrediction:
        """Create the prediction of a row whose 90 % interval ends at the same factor below and above the value.

        Parameters
        ----------
        value : float
            Predicted value.
        factor : float
            Factor, above 1.
        *more : Any
            The other fields: baseline, device name, origin and uncertainty.

        Returns
        -------
        RowPrediction
            The prediction.
        """
        return cls(value, value / factor, value * factor, *more)


def peak_flops_step_time(prediction: Prediction) -> float:
    """Compute the ideal step time of a run: model FLOP over the peak FLOP/s of all its devices.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.

    Returns
    -------
    float
        Step time at 100 % MFU [s].
    """
    peak = prediction.system.device.peak_flops_per_s(prediction.plan.dtype)
    return prediction.model_flops_per_step / (peak * prediction.plan.gpus)


class RunTable(MeasuredTable):
    """Abstract base of tables in which each row is a run of training or serving.

    The usual measured value is the step time. Subclasses convert a row to a `Run` and predict the measured value in
    `predict_row`.
    """

    measured_column = "iteration_ms"
    measured_unit_in_si = MILLISECOND

    def without_fits_to_source(self, source: str) -> RunTable:
        """Create this kind of table with predictions that use no fitted value taken from one source.

        Leave-one-source-out validation uses the result to test predictions on rows that the catalog has not seen.

        Parameters
        ----------
        source : str
            Name of the source, as in column ``source``.

        Returns
        -------
        RunTable
            The table; by default the same object, whose predictions use no such value.
        """
        return self

    def applicable_calibration(self, system: System) -> Calibration | None:
        """Return the user's calibration if its parameters or intervals apply to runs on a system, else None.

        Parameters
        ----------
        system : System
            System on which a row ran.

        Returns
        -------
        Calibration, optional
            The calibration if it was fitted on this system or its device, or if it holds intervals of all steps; else
            None.
        """
        subjects = (system.name, system.device.name, INTERVAL_CALIBRATION)
        applies = self.calibration is not None and self.calibration.device_or_system in subjects
        return self.calibration if applies else None

    def system_of_row(self, row: Row) -> System:
        """Build the system (devices and network) on which a measured run ran.

        Parameters
        ----------
        row : Row
            Row of a table: its cells by column name.

        Returns
        -------
        System
            The system.

        Raises
        ------
        PaleoError
            If the system is not known; the message says why.
        """
        raise SpecError(f"rows of {self.name} name no system")

    @abstractmethod
    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict what one run of this table measured, usually the step time.

        Parameters
        ----------
        row : Row
            Row of a table: its cells by column name.
        software : SoftwareProfile, optional
            Software profile to use instead of the one that the row names.

        Returns
        -------
        RowPrediction
            Predicted value in SI units, with its 90 % interval.

        Raises
        ------
        PaleoError
            If the row cannot be modelled; the message says why.
        """

    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return the measured value of each run of this table in SI units.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        ndarray, shape (rows,)
            Values in SI units; nan where a cell is empty or no number.
        """
        return number_or_nan(frame, self.measured_column) * self.measured_unit_in_si

    def missing_measurement_reason(self, row: Mapping[Any, Any]) -> str:
        """Explain why a run of this table has no measured value to compare with.

        Parameters
        ----------
        row : dict of Any to Any
            Cells by column.

        Returns
        -------
        str
            The reason. If the run ran out of memory, the reason says whether the predicted memory does not fit either.
        """
        columns = self.measured_columns or (self.measured_column,)
        wrong = [column for column in columns if has_value(row, column) and not _above_zero(row[column])]
        if ran_out_of_memory(row):
            try:
                return _OUT_OF_MEMORY_REASON.format(
                    "fits, WRONGLY" if self.predict_memory(row).fits else "does not fit"
                )
            except PaleoError as error:
                return _OUT_OF_MEMORY_REASON.format(f"is not modelled ({error})")
        if wrong:
            return f"{wrong[0]} {str(row[wrong[0]])[:40]!r} is not a number above zero"
        if len(columns) > 1:
            return f"none of {', '.join(columns)} says what was measured"
        return f"{self.measured_column} is empty: nothing to compare with"

    def predict_memory(self, row: Row) -> MemoryFootprint:
        """Predict the memory that a measured run needs on its fullest GPU.

        Parameters
        ----------
        row : Row
            Row of a table: its cells by column name.

        Returns
        -------
        MemoryFootprint
            Bytes by part (weights, activations, …).

        Raises
        ------
        PaleoError
            If this kind of table has no columns from which memory can be predicted.
        """
        raise SpecError(f"rows of {self.name} do not say enough of memory")

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict the measured value of each run of this table; equal rows are predicted once.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        Predictions
            Predicted values in SI units with 90 % intervals, one entry per row; a reason where a row has none.
        """
        frame = frame.reset_index(drop=True)
        out = Predictions.all_missing(len(frame))
        out.device_names[:] = text_column(frame, "device").to_numpy()
        for index, step in enumerate(self.predict_rows(frame)):
            if isinstance(step, str):
                out.failure_reasons[index] = step
                continue
            out.values[index], out.low[index], out.high[index] = step.value, step.low, step.high
            out.baseline[index] = step.baseline
            out.device_names[index], out.parameter_origins[index] = step.device_name, step.origin
        return out

    def predict_rows(self, frame: pd.DataFrame) -> Iterator[RowPrediction | str]:
        """Predict the runs of this table one by one, or explain why a run has no prediction.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Yields
        ------
        RowPrediction | str
            For each row its prediction, or the reason why there is none.
        """
        measured = self.measured_values(frame)
        known: dict[tuple[str, ...], RowPrediction | str] = {}
        for index, row in enumerate(frame.to_dict("records")):
            if not measured[index] > 0:
                yield _result_or_reason(self.missing_measurement_reason, row)
                continue
            key = tuple(str(row.get(name)) for name in (*self.identifying_columns, *self.configuration_columns))
            if key not in known:
                known[key] = self._step_or_reason(row)
            yield known[key]

    def software_profile(self, row: Row) -> str:
        """Return the name of the software profile with which a measured run is predicted.

        Parameters
        ----------
        row : Row
            Row of a table: its cells by column name.

        Returns
        -------
        str
            Name of a profile in the catalog.
        """
        return software_profile_name(row)

    def _step_or_reason(self, row: Mapping[Any, Any]) -> RowPrediction | str:
        step = _result_or_reason(self.predict_row, row)
        sound = isinstance(step, str) or (np.isfinite(step.value) and step.value > 0)
        return step if sound else "the prediction is no finite time"


def _result_or_reason(method: Callable[[Row], Result], row: Mapping[Any, Any]) -> Result | str:
    """Call a method with a table row, or explain why the row's cells do not allow it."""
    try:
        return method(row)
    except (PaleoError, *CELL_ERRORS) as error:
        return _reason(error, row)


class NonStepTimeTable(RunTable):
    """Abstract base of tables whose runs measure another quantity than step time (memory, power, loss, …).

    Measured values are in SI units already. Software profiles and links are not fitted to such tables.
    """

    measured_unit_in_si = 1.0
    used_for_fitting = False


def _above_zero(cell: object) -> bool:
    try:
        return 0 < float(str(cell)) < math.inf
    except ValueError:
        return False


def _reason(error: Exception, row: Row) -> str:
    """Convert an error into the reason why a measured run cannot be predicted.

    A KeyError for a column that the row has is raised again, as the row's cells did not cause that error.
    """
    if isinstance(error, PaleoError):
        return str(error)
    if isinstance(error, KeyError):
        if str(error.args[0]) in row:
            raise error
        return f"column {error.args[0]!r} is missing"
    return f"a cell is not what it should be ({' '.join(str(error).split())[:120]})"


def row_prediction(prediction: Prediction, seconds: float | None = None) -> RowPrediction:
    """Convert the prediction of a run to that of its table row, with the same relative 90 % interval.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the row's run.
    seconds : float, optional
        Predicted time [s] to use instead of the step time.

    Returns
    -------
    RowPrediction
        Predicted time [s] with its 90 % interval.
    """
    value = prediction.step_time if seconds is None else seconds
    low, high = (end / prediction.step_time for end in prediction.interval)
    names = (prediction.system.device.name, prediction.run.software)
    return RowPrediction.with_factors(
        value, (low, high), peak_flops_step_time(prediction), *names, prediction.uncertainty
    )


#: Systems for rows that name a device alone.
USUAL_SYSTEM_OF_DEVICE: Mapping[str, str] = TABLE_NAME_ALIASES["systems"]

#: Ethernet links, with their Gb/s, that stand for those of the same kind at other speeds.
_TCP_REFERENCE_LINK, _ROCE_REFERENCE_LINK = ("ethernet-10g-tcp", 10.0), ("ethernet-100g-roce", 100.0)


@cache
def usual_system_of_device(device: str) -> str:
    """Return the name of a device's usual server, on which runs with several such devices most likely ran.

    Parameters
    ----------
    device : str
        Name of the device.

    Returns
    -------
    str
        Entry of `USUAL_SYSTEM_OF_DEVICE`, else the first system of the catalog with this device, else the device's
        name.
    """
    if device in USUAL_SYSTEM_OF_DEVICE:
        return USUAL_SYSTEM_OF_DEVICE[device]
    systems = (name for name in entry_names("systems") if load_system(name).device.name == device)
    return next(systems, device)


def with_measured_device_variant(system: System, row: Row) -> System:
    """Replace a system's device by the exact variant of a measured run (16 GB or 32 GB cards in the same server).

    Parameters
    ----------
    system : System
        System whose device may be a variant of the row's.
    row : dict of str to value
        Row of a measured table; the parentheses that tables write around a similar device are ignored.

    Returns
    -------
    System
        The system, with the row's device.

    Raises
    ------
    SpecError
        If no device has the name in column ``device``.
    """
    device = find_device(str(row["device"]).strip("()"))
    return system if device.name == system.device.name else system.model_copy(update={"device": device})


def system_of_run(row: Row) -> System:
    """Build the system on which a measured run ran, with the row's devices per node and its network between nodes.

    The system comes from the row's column ``system``. Otherwise it is the usual server of the row's device, or the
    device alone for one GPU.

    Parameters
    ----------
    row : dict of str to value
        Row of a measured table.

    Returns
    -------
    System
        The system.

    Raises
    ------
    SpecError
        If the system or device is not known, or a number of devices or nodes is not valid.
    """
    device, gpus = str(row["device"]), integer_cell(row, "n_gpus", 1)
    usual = USUAL_SYSTEM_OF_DEVICE.get(device, "pcie3-8gpu") if gpus > 1 else device
    system = with_measured_device_variant(load_system(str(row["system"]) if has_value(row, "system") else usual), row)
    nodes = integer_cell(row, "nodes", 1)
    return _with_ethernet_of_run(with_devices_per_node(system, -(-gpus // nodes)), row) if nodes > 1 else system


def with_devices_per_node(system: System, devices: int) -> System:
    """Reduce the devices per node of a system, for measured runs that used part of a server.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    devices : int
        Devices per node; a system with at most that many stays as it is.

    Returns
    -------
    System
        The system, with link levels cut to the devices of a node.
    """
    if not system.levels or devices >= system.devices_per_node:
        return system
    inside = [level for level in system.levels if level.ranks is not None and level.ranks < devices]
    outside = system.levels[len(inside) :]
    bounded = [level for level in outside if level.ranks and level.ranks <= system.devices_per_node]
    cut = [bounded[0].model_copy(update={"ranks": devices})] if bounded and devices > 1 else []
    levels = (*inside, *cut, *outside[len(bounded) :])
    return system.model_copy(update={"levels": levels, "devices_per_node": devices})


def _with_ethernet_of_run(system: System, row: Row) -> System:
    """Replace the network between a system's nodes by the Ethernet of a measured run, with one port per node.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    row : dict of str to value
        Row of a measured table; column ``interconnect`` may name a speed, such as "25 Gb/s Ethernet".

    Returns
    -------
    System
        The system with that link; unchanged if the row names InfiniBand or no speed.
    """
    interconnect = str(row.get("interconnect", ""))
    speed = re.search(r"(\d+) ?Gb(?:/s|ps|it/s|E)", interconnect)
    if not speed or "infiniband" in interconnect.lower() or not system.levels:
        return system
    name, usual = _ROCE_REFERENCE_LINK if re.search(r"(?i)roce|rdma", interconnect) else _TCP_REFERENCE_LINK
    link = load_link(name)
    stated = link.model_copy(update={"bandwidth": link.bandwidth * float(speed.group(1)) / usual})
    outer = system.levels[-1].model_copy(update={"link": stated, "ports": 1})
    return system.model_copy(update={"levels": (*system.levels[:-1], outer)})


#: Columns of tables that describe the rows of another: the networks of placements.
_SIDE_TABLE_HEADERS = {frozenset({"network", "group_a", "group_b", "pair_bytes_per_s"}): "placement"}


#: Tables of whole steps; a module of ``paleo/tables/kinds`` registers an instance under its kind's name.
RUN_TABLES: Registry[MeasuredTable] = Registry("step table", "paleo.tables.kinds")


def table_kinds(calibration: Calibration | None = None) -> Mapping[str, MeasuredTable]:
    """Return all registered kinds of measured tables, of kernels and of runs, by name.

    Parameters
    ----------
    calibration : Calibration, optional
        A user's calibration; used for rows of its device or system.

    Returns
    -------
    dict of str to MeasuredTable
        Kinds of tables by name.
    """
    known: dict[str, MeasuredTable] = dict([*KERNEL_TABLES.items(), *RUN_TABLES.items()])
    return known if calibration is None else {name: kind.with_calibration(calibration) for name, kind in known.items()}


def find_table_kind(columns: Iterable[str], calibration: Calibration | None = None) -> MeasuredTable:
    """Find the kind of measured table to which a CSV header belongs.

    Parameters
    ----------
    columns : iterable of str
        Column names of a table.
    calibration : Calibration, optional
        A user's calibration; used for rows of its device or system.

    Returns
    -------
    MeasuredTable
        The kind of table.

    Raises
    ------
    SpecError
        If no kind has all its identifying columns in the header; the message names the nearest kind and what is
        missing.
    """
    present = {str(column).strip() for column in columns}
    for header, kind in _SIDE_TABLE_HEADERS.items():
        if header <= present:
            raise SpecError(f"describes the rows of a table of kind {kind!r} that lies beside it; nothing measured")
    known = table_kinds(calibration)
    headers = {name: table.identifying_columns for name, table in known.items()}
    return known[best_matching_kind(present, headers, {name: frozenset(t.columns) for name, t in known.items()})]
