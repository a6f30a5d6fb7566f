"""Base of tables of timed kernels and collectives: each row becomes the arguments of a timing formula.

A module in ``paleo/tables/kinds`` registers one object of a subclass of `KernelTable`::

    KERNEL_TABLES.register("gemm")(GemmTable())

Times in a table are microseconds (``time_us``); everything that a method returns is in SI units.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from types import MappingProxyType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import PaleoError, SpecError, suggest_names
from paleo.pricing.calibration_lookup import SourcedParameters, find_calibrated_parameters
from paleo.pricing.kernels import DeviceDatasheet, arithmetic_unit, device_datasheet
from paleo.registry import Registry
from paleo.specs.device import find_device
from paleo.tables.base import MeasuredTable, Predictions
from paleo.tables.cells import (
    Array,
    UnreadableRowsError,
    factorize_combinations,
    factorize_text_column,
    map_text_columns,
    number_column,
    text_column,
    word_mask,
)
from paleo.units import MICROSECOND

Datasheet = TypeVar("Datasheet")
Parameters = TypeVar("Parameters")
#: Bounds of what is measured, in whatever unit a column has: attoseconds are none, nor is the age of the universe.
_MIN_MEASURED_VALUE, _MAX_MEASURED_VALUE = 2.0**-60, 2.0**90
#: Sizes above this one are slips.
_MAX_TENSOR_SIZE = 2.0**53


@dataclass(frozen=True, slots=True)
class FitSettings:
    """Settings of the fit of one family's parameters (of one timing formula) to rows of a kernel table.

    ``start_values`` holds the start values (a dataclass of parameters). Searches also begin at each of
    ``alternative_starts`` and at ``random_starts`` random points near the start values. Parameters named in
    ``fixed_parameters`` keep their start value, because the rows do not determine them. Those named in
    ``parameters_per_stack`` get one value per stack (way of timing); all others are shared by the stacks that are
    fitted together. At most ``max_training_rows`` rows are used. ``prior_precision`` is the inverse width, in log
    units, of the penalty for leaving the start values; ``overestimate_weight`` is the weight of errors above the
    measured time (see ``paleo.calibrate.fit.Fit``).
    """

    start_values: Any
    alternative_starts: tuple[Any, ...] = ()
    parameters_per_stack: tuple[str, ...] = ()
    fixed_parameters: tuple[str, ...] = ()
    max_training_rows: int = 1000
    random_starts: int = 1
    prior_precision: float = 0.5
    overestimate_weight: float = 1.0


#: Parameters fitted so far in one run: (subject, family, stack) -> parameters.
FittedParameters = Mapping[tuple[str, str, str], Any]


class FitTarget(NamedTuple):
    """Kernel family whose parameters are fitted, with the device that was measured and how its rows were timed.

    ``subject`` names the device or system that was measured, ``figures`` holds its datasheet values. ``stack`` is how
    the rows were timed, a key of `KernelTable.timing_method`. ``fitted`` holds the parameters fitted earlier in the
    same run.
    """

    subject: str
    family: str
    stack: str
    figures: Any
    fitted: FittedParameters = MappingProxyType({})


class KernelTable(MeasuredTable, Generic[Datasheet]):
    """Abstract base of tables with one timed kernel or collective per row.

    Each row belongs to a family: a timing formula with a dataclass of calibrated parameters. ``Datasheet`` is the type
    of the datasheet values that the formula needs: `DeviceDatasheet` for kernels, `System` for collectives.
    """

    #: Columns that must hold a whole number above zero.
    size_columns: ClassVar[tuple[str, ...]] = ()
    #: Family key -> dataclass of its parameters.
    parameters_by_family: ClassVar[Mapping[str, type[Any]]]
    #: Names of parameters that belong to the host or the stack (launch cost), not to the silicon.
    host_parameters: ClassVar[tuple[str, ...]] = ()
    #: Column that names what a row was measured on.
    hardware_column: ClassVar[str] = "device"
    measured_column = "time_us"
    measured_unit_in_si = MICROSECOND

    def prepare_rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Correct or add columns of this table's rows before their prediction; by default nothing changes.

        A kind of table overrides this method, for example to replace a device that a source names wrongly.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        DataFrame
            The same rows; columns may be changed or added.
        """
        return frame

    @abstractmethod
    def unsupported_reasons(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Explain for each timed kernel why no formula can model it; '' for kernels that can be modelled.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        Series[str]
            One reason per row; '' if the row can be modelled.
        """

    def timing_method(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Name how each kernel of this table was timed (CUDA graph, eager, …).

        Launch costs are fitted per timing method. Keys are ``graph``, ``kernel``, ``eager``, ``back-to-back``, or one
        that a kind of table defines. A key ``key/variant`` marks rows that share all parameters with other variants of
        ``key``, except host parameters. The default is ``graph``, as engines and frameworks replay captured graphs.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        Series[str]
            One key per row.
        """
        return pd.Series("graph", index=frame.index, dtype=object)

    def start_values(self, family: str, figures: Datasheet) -> Sequence[Any]:
        """Return start values for the fit of a family's parameters to measured times.

        The first is also the centre of the fit's prior. A family is a timing formula with its calibrated parameters.

        Parameters
        ----------
        family : str
            Key of ``families``.
        figures : Datasheet
            Datasheet values of the device or system.

        Returns
        -------
        sequence of Any
            Objects of the family's dataclass of parameters.
        """
        return (self.parameters_by_family[family](),)

    def fit_settings(self, target: FitTarget) -> FitSettings:
        """Choose the settings of the fit of a family's parameters (of one timing formula) to rows of this table.

        Parameters
        ----------
        target : FitTarget
            What is fitted: device or system, family, stack and datasheet values.

        Returns
        -------
        FitSettings
            Start values, fixed parameters and those that differ by stack.
        """
        start, *alternatives = self.start_values(target.family, target.figures)
        return FitSettings(start, tuple(alternatives))

    def load_datasheet(self, subject: str, dtype: str, compute: str) -> Datasheet:
        """Load the datasheet values (peak FLOP/s, bandwidth [byte/s], …) of the measured device or system.

        Parameters
        ----------
        subject : str
            Name of the device or system.
        dtype : str
            Number format of the operands, such as ``bf16``.
        compute : str
            Arithmetic unit (``tensor``, ``vector``); '' for the usual one of the format.

        Returns
        -------
        Datasheet
            `DeviceDatasheet` for kernels; kinds of tables of collectives return a `System`.

        Raises
        ------
        SpecError
            If the subject is unknown or has no peak for the format.
        """
        return device_datasheet(find_device(subject), dtype.partition("->")[0], compute or None)  # type: ignore[return-value]

    def calibration_keys(self, figures: Datasheet) -> tuple[str, str, str]:
        """Return the keys by which calibrated parameters are looked up in the catalog for a device or system.

        Parameters
        ----------
        figures : Datasheet
            Datasheet values of the device or system.

        Returns
        -------
        tuple[str, str, str]
            (name, architecture, kind of memory), for example ('h100-sxm5-80gb', 'Hopper', 'HBM3').
        """
        return figures.name, figures.architecture, figures.memory_kind  # type: ignore[attr-defined]

    def measured_values(self, frame: pd.DataFrame) -> Array:
        """Return the measured time of each kernel or collective of this table.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        ndarray, shape (rows,)
            Times [s]; nan where a cell is empty, no number, or out of range.
        """
        if self.measured_column not in frame.columns:
            raise SpecError(
                f"column {self.measured_column!r} is missing; {suggest_names(self.measured_column, frame.columns)}"
            )
        times = pd.to_numeric(frame[self.measured_column], errors="coerce").to_numpy(dtype=np.float64)
        plausible = (times > _MIN_MEASURED_VALUE) & (times < _MAX_MEASURED_VALUE)
        return np.where(plausible, times, np.nan) * self.measured_unit_in_si

    @abstractmethod
    def kernel_family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return the family of each row of this table: the key of its timing formula and calibrated parameters.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        Series[str]
            One key of ``families`` per row.
        """

    def arithmetic_unit(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return the arithmetic unit (tensor or vector cores) on which each timed kernel ran.

        Rows name the unit in column ``compute``; DeepBench's fp16 rows that name none ran on vector cores.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        Series[str]
            One word per row (``tensor``, ``vector``, …); '' for the usual unit of the row's number format.
        """
        compute = text_column(frame, "compute")
        half = (compute == "") & word_mask(frame, "source", "deepbench") & word_mask(frame, "dtype", "fp16")
        return compute.where(~half, "vector")

    @abstractmethod
    def flops_and_bytes(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Count the FLOP and the least memory traffic of each timed kernel, for the roofline baseline.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        tuple[Array, Array]
            (FLOP, bytes moved if each tensor is read or written once), shape (rows,) each.
        """

    def roofline_times(self, frame: pd.DataFrame, figures: Datasheet) -> Array:
        """Compute the roofline time of each timed kernel at the peaks of the datasheet, as a baseline.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.
        figures : Datasheet
            Datasheet values of the rows' device or system.

        Returns
        -------
        ndarray, shape (rows,)
            Times [s].
        """
        return roofline_time(*self.flops_and_bytes(frame), figures)  # type: ignore[arg-type]

    @abstractmethod
    def predict_times(self, frame: pd.DataFrame, figures: Datasheet, parameters: Any) -> Array:
        """Predict the time of timed kernels or collectives with one timing formula.

        The rows share device or system, number format, family (timing formula) and timing method.

        Parameters
        ----------
        frame : DataFrame
            The rows.
        figures : Datasheet
            Datasheet values of the rows' device or system.
        parameters : Any
            Calibrated parameters, an object of the family's dataclass.

        Returns
        -------
        ndarray, shape (rows,)
            Times [s].
        """

    @property
    def descriptive_columns(self) -> tuple[str, ...]:
        """Names of the columns that describe a row in reports: operation, dtype and the sizes of the configuration."""
        first = ("op", "phase", "layer_type", "cell", "dtype")
        return tuple(dict.fromkeys((*first, *self.configuration_columns, "direction")))

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict the time of each kernel or collective of this table, with a 90 % interval.

        Rows are predicted in groups that share device or system, family (timing formula), timing method, dtype and
        arithmetic unit.

        Parameters
        ----------
        frame : DataFrame
            Rows of this table.

        Returns
        -------
        Predictions
            Predicted times [s] with 90 % intervals, one entry per row; a reason where a row cannot be modelled.
        """
        frame = _categorised(self.prepare_rows(frame.reset_index(drop=True)), self.size_columns)
        out = Predictions.all_missing(len(frame))
        out.device_names[:], reasons = text_column(frame, self.hardware_column).to_numpy(), out.failure_reasons
        for column in self.size_columns:
            values = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
            reasons[~(np.isfinite(values) & (values > 0))] = f"{column} is missing or not a number above zero"
            reasons[np.isfinite(values) & (values != np.floor(values))] = f"{column} is not a whole number"
            reasons[values > _MAX_TENSOR_SIZE] = f"{column} is larger than any tensor"
        fine = reasons == ""
        sound = self._supported(frame if fine.all() else frame[fine], out)
        for group in group_rows_for_prediction(self, sound, checked=reasons[sound.index] == ""):
            self._predict_readable(group, out)
        return out

    def _supported(self, frame: pd.DataFrame, out: Predictions) -> pd.DataFrame:
        """Drop rows whose cells cannot be read, and write the reasons of rows that cannot be modelled into ``out``.

        Returns the readable rows.
        """
        while len(frame):
            try:
                out.failure_reasons[frame.index] = self.unsupported_reasons(frame).to_numpy()
                break
            except UnreadableRowsError as error:
                out.failure_reasons[error.rows] = str(error)
                frame = frame.drop(error.rows)
        return frame

    def _predict_readable(self, group: RowGroup, out: Predictions) -> None:
        """Predict the times of a group of timed kernels and write them into ``out``.

        Rows whose cells cannot be read get a reason and the prediction is repeated without them. Any other error
        becomes the reason of the whole group.
        """
        while len(group.frame):
            try:
                self._predict_group(group, out)
                break
            except UnreadableRowsError as error:
                out.failure_reasons[error.rows] = str(error)
                group = replace(group, frame=group.frame.drop(error.rows))
            except PaleoError as error:
                out.failure_reasons[group.frame.index] = str(error)
                break

    def _predict_group(self, group: RowGroup, out: Predictions) -> None:
        rows = group.frame.index
        figures = self.load_datasheet(group.hardware, group.dtype, group.compute_unit)
        calibrated = self.calibrated_parameters(group, figures)
        with np.errstate(all="ignore"):
            seconds = self.predict_times(group.frame, figures, calibrated.parameters)
            ideal = self.roofline_times(group.frame, figures)
        wrong = ~(np.isfinite(seconds) & (seconds > 0))
        out.failure_reasons[rows[wrong]] = "the formula gives no finite time"
        seconds = np.where(wrong, np.nan, seconds)
        out.values[rows], out.baseline[rows] = seconds, ideal
        out.low[rows], out.high[rows] = calibrated.interval_bounds(seconds)
        out.device_names[rows] = self.calibration_keys(figures)[0]
        out.parameter_origins[rows] = (
            f"{calibrated.origin} ({calibrated.source_name}: {group.family}, {group.timing_method})"
        )

    def calibrated_parameters(self, group: RowGroup, figures: Any) -> SourcedParameters[Any]:
        """Look up the calibrated parameters of the timing formula of a group of rows.

        The user's calibration is used before the catalog's.

        Parameters
        ----------
        group : RowGroup
            Rows that share subject, family and stack.
        figures : Any
            Datasheet values of the group's device or system.

        Returns
        -------
        SourcedParameters[Any]
            Parameters of the family, with the calibration entry that they come from.
        """
        subject, architecture, memory_kind = self.calibration_keys(figures)
        calibration = (
            self.calibration if self.calibration is not None and self.calibration.device_or_system == subject else None
        )
        return find_calibrated_parameters(
            self.parameters_by_family[group.family], subject=subject, architecture=architecture, family=group.family,
            memory_kind=memory_kind, stacks=(group.timing_method,), user_calibration=calibration,
        )  # fmt: skip


def shipped_parameters(kind: type[Parameters], family: str, figures: DeviceDatasheet) -> Parameters:
    """Look up the calibrated parameters of another family that a formula needs, measured or inherited.

    Parameters
    ----------
    kind : type
        Dataclass of the parameters.
    family : str
        Key of the family, such as ``gemm.tensor``.
    figures : DeviceDatasheet
        Datasheet values of the device.

    Returns
    -------
    object of ``kind``
        Its parameters.
    """
    return find_calibrated_parameters(
        kind, subject=figures.name, architecture=figures.architecture, memory_kind=figures.memory_kind, family=family
    ).parameters


KERNEL_TABLES: Registry[KernelTable[Any]] = Registry("table kind", "paleo.tables.kinds")


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a kernel table that one call of a timing formula predicts.

    They share device or system (``hardware``), family (timing formula), timing method, number format and arithmetic
    unit.
    """

    hardware: str
    family: str
    timing_method: str
    dtype: str
    compute_unit: str
    frame: pd.DataFrame


def group_rows_for_prediction(
    kind: KernelTable[Any], frame: pd.DataFrame, checked: npt.NDArray[np.bool_] | None = None
) -> Iterator[RowGroup]:
    """Group the rows of a kernel table that can be modelled, so that one call of a timing formula predicts a group.

    Rows of a group share device or system, family (timing formula), timing method, number format and arithmetic unit.

    Parameters
    ----------
    kind : KernelTable[Any]
        Kind of the table.
    frame : DataFrame
        Rows of the table; groups keep its index.
    checked : ndarray of bool, shape (rows,), optional
        True for rows that can be modelled, if the caller knows; by default ``kind.unsupported_reasons`` decides.

    Yields
    ------
    RowGroup
        One group per combination that occurs.
    """
    known = (kind.unsupported_reasons(frame) == "").to_numpy() if checked is None else checked
    if not known.all():
        frame = frame[known]
    if frame.empty:
        return
    table = frame[list({kind.hardware_column, "dtype"} & {*frame.columns})].assign(
        family=kind.kernel_family(frame), stack=kind.timing_method(frame), compute=kind.arithmetic_unit(frame)
    )
    names = (kind.hardware_column, "family", "stack", "dtype", "compute")
    combination_of, combinations = factorize_combinations([factorize_text_column(table, name) for name in names])
    for place, (subject, family, stack, dtype, unit) in sorted(enumerate(combinations), key=lambda pair: pair[1]):
        yield RowGroup(subject, family, stack, dtype, unit, frame.iloc[np.flatnonzero(combination_of == place)])


def apply_per_row(method: Callable[..., str]) -> Callable[[Any, pd.DataFrame], pd.Series[str]]:
    """Decorate a method of one row's texts, so that it takes a whole table and returns one text per row.

    Parameters
    ----------
    method : callable
        Method whose arguments are named as text columns. It is called once for each distinct combination of texts.

    Returns
    -------
    callable
        Method that takes a DataFrame and returns a Series of texts, shape (rows,).
    """
    columns = tuple(inspect.signature(method).parameters)[1:]

    @wraps(method)
    def of_table(kind: Any, frame: pd.DataFrame) -> pd.Series[str]:
        return pd.Series(map_text_columns(frame, columns, partial(method, kind)), index=frame.index, dtype=object)

    return of_table


def first_reasons(index: pd.Index[Any], *reasons: tuple[Any, Any]) -> pd.Series[str]:
    """Return for each table row the reason of the first condition that holds; '' if none does.

    Parameters
    ----------
    index : Index
        Index of the rows.
    *reasons : tuple of (array of bool, str or Series[str])
        Conditions with their reasons, the one that counts most first.

    Returns
    -------
    Series[str]
        One reason per row.
    """
    masks, texts = ([np.asarray(each) for each in column] for column in zip(*reasons, strict=True))
    return pd.Series(np.select(masks, [text.astype(object) for text in texts], ""), index=index, dtype=object)


def map_device_dtype_and_arithmetic_unit(
    frame: pd.DataFrame, compute: pd.Series[str], function: Callable[[str, str, str], str]
) -> pd.Series[str]:
    """Apply a function of device, dtype and arithmetic unit to each table row (to choose a kernel family).

    Parameters
    ----------
    frame : DataFrame
        The table, with columns ``device`` and ``dtype``.
    compute : Series[str]
        Arithmetic unit of each row.
    function : Callable[[str, str, str], str]
        Function of device, dtype and arithmetic unit.

    Returns
    -------
    Series[str]
        One result per row.
    """
    words = map_text_columns(frame.assign(compute=compute), ("device", "dtype", "compute"), function)
    return pd.Series(words, index=frame.index, dtype=object)


def unit_family(prefix: str, device: str, dtype: str, compute: str) -> str:
    """Return the family of a kernel by its arithmetic unit: the prefix with ".tensor", ".half" or ".vector".

    Parameters
    ----------
    prefix : str
        First part of the family, such as ``conv``.
    device : str
        Name of the device.
    dtype : str
        Format of the operands.
    compute : str
        Arithmetic unit that the row names; empty for the usual one.

    Returns
    -------
    str
        The family; that of vector units if the device is not known.
    """
    try:
        tensor = arithmetic_unit(find_device(device), dtype, compute) == "tensor"
    except SpecError:
        return f"{prefix}.vector"
    return f"{prefix}.{'tensor' if tensor else 'half' if dtype in ('fp16', 'bf16') else 'vector'}"


@cache
def unsupported_reason(device: str, dtype: str, compute: str, dtypes: frozenset[str]) -> str:
    """Explain why kernels of a number format cannot be predicted on a device; '' if they can.

    Parameters
    ----------
    device : str
        Name of the device.
    dtype : str
        Format of the operands.
    compute : str
        Arithmetic unit; empty for the usual one.
    dtypes : frozenset of str
        Formats that the kind of table models.

    Returns
    -------
    str
        The reason; '' if they can be predicted.
    """
    if dtype not in dtypes:
        return f"dtype {dtype!r} is not modelled; {suggest_names(dtype, dtypes)}"
    try:
        device_datasheet(find_device(device), dtype, compute)
    except SpecError as error:
        return str(error)
    return ""


def timing_methods(frame: pd.DataFrame, usual: pd.Series[str]) -> pd.Series[str]:
    """Return how each row of a kernel table was timed: the text of column ``timing``, or the default for empty cells.

    Parameters
    ----------
    frame : DataFrame
        The table.
    usual : Series[str]
        Default key of each row, such as ``back-to-back``.

    Returns
    -------
    Series[str]
        One key per row, as `KernelTable.timing_method` returns them.
    """
    if "timing" not in frame.columns:
        return usual
    stated = text_column(frame, "timing")
    return usual.where(stated == "", stated)


def measured_time(frame: pd.DataFrame) -> Array:
    """Return column ``time_us`` in seconds, for tables in which every row must have a time.

    Parameters
    ----------
    frame : DataFrame
        The table with a column ``time_us``.

    Returns
    -------
    ndarray, shape (rows,)
        Time [s].

    Raises
    ------
    SpecError
        If a time is not above zero.
    """
    times = number_column(frame, "time_us")
    if (times <= 0).any():
        row = int(np.argmax(times <= 0))
        raise SpecError(f"column 'time_us', row {frame.index[row]}: {times[row]} must be above zero")
    return times * MICROSECOND


def roofline_time(flops: Array, bytes_moved: Array, figures: DeviceDatasheet) -> Array:
    """Compute the roofline time of kernels at the peaks of the datasheet: max(FLOP / peak, bytes / bandwidth).

    Parameters
    ----------
    flops : ndarray, shape (rows,)
        FLOP of each kernel.
    bytes_moved : ndarray, shape (rows,)
        Least memory traffic of each kernel [byte].
    figures : DeviceDatasheet
        Peak [FLOP/s] and memory bandwidth [byte/s] of the device.

    Returns
    -------
    ndarray, shape (rows,)
        Time [s].

    References
    ----------
    Williams, Waterman, Patterson, CACM 52(4), 2009.
    """
    return np.maximum(flops / figures.peak_flops_per_s, bytes_moved / figures.memory_bandwidth)


def best_constant_roofline_efficiency(roofline: Array, measured: Array) -> float:
    """Find the constant efficiency e with the least mean error |roofline / e / measured - 1| over all rows.

    Dividing rooflines by e gives the best "percent of peak" model, a favourable baseline to compare predictions with.
    The minimum lies at a weighted median of the ratios roofline / measured.

    Parameters
    ----------
    roofline : ndarray, shape (rows,)
        Roofline times [s].
    measured : ndarray, shape (rows,)
        Measured times [s].

    Returns
    -------
    float
        Efficiency as a fraction of the roofline [-].

    Examples
    --------
    >>> best_constant_roofline_efficiency(np.array([1.0, 1.0, 4.0]), np.array([2.0, 2.0, 5.0]))
    0.5
    """
    ratio = roofline / measured
    order = np.argsort(ratio)
    weight = np.cumsum(ratio[order])
    return float(ratio[order][np.searchsorted(weight, weight[-1] / 2)])


def _categorised(frame: pd.DataFrame, numbers: Iterable[str]) -> pd.DataFrame:
    """Convert the text columns of a table to pandas categories, so that functions of words run once a distinct word."""
    numeric = {*numbers, *(name for name, kind in frame.dtypes.items() if pd.api.types.is_numeric_dtype(kind))}
    words = {name: frame[name].astype("category") for name in frame.columns if name not in numeric}
    return frame.assign(**words)
