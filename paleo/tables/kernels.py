"""What a kind of measured table is: how to recognise it, and how its rows become the arguments of a pricing family.

A module of this folder makes one object of a subclass of ``TableKind`` and registers it::

    KINDS.register("gemm")(GemmTable())

Times in a table are microseconds (``time_us``); everything that a method returns is SI.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial, wraps
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import PaleoError, SpecError, near
from paleo.pricing.kernels import DeviceFigures, figures
from paleo.pricing.store import SourcedParameters, lookup
from paleo.registry import Registry
from paleo.specs.device import find_device
from paleo.tables.base import MeasuredTable, Predictions
from paleo.tables.cells import Array, RowsError, combine_codes, map_words, number, text, word_codes
from paleo.units import MICROSECOND

Figures = TypeVar("Figures")
#: Bounds of what is measured, in whatever unit a column has: attoseconds are none, nor is the age of the universe.
LEAST_MEASURED, MOST_MEASURED = 2.0**-60, 2.0**90
#: Sizes above this one are slips.
LARGEST = 2.0**53


@dataclass(frozen=True, slots=True)
class FitPlan:
    """Plan of a family's fit: starting points, and parameters that the rows of a table cannot determine.

    ``fixed`` parameters stay at ``start``; those ``per_stack`` are one per stack, all others shared by the stacks that
    are fitted together. ``starts`` counts searches from random points besides those from ``alternatives``; ``prior`` is
    the inverse width of the pull to the start, in log units, ``excess`` the weight of errors above the measured time
    (see ``paleo.calibrate.fit.Fit``).
    """

    start: Any
    alternatives: tuple[Any, ...] = ()
    per_stack: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    training_rows: int = 1000
    starts: int = 2
    prior: float = 0.5
    excess: float = 1.0


#: Parameters fitted so far in one run: (subject, family, stack) -> parameters.
Fitted = Mapping[tuple[str, str, str], Any]


class TableKind(MeasuredTable, Generic[Figures]):
    """One kind of table of kernels or collectives, priced family by family. ``Figures`` is what prices a row:
    DeviceFigures for kernels."""

    #: Columns that must hold a whole number above zero.
    sizes: ClassVar[tuple[str, ...]] = ()
    #: Family key -> dataclass of its parameters.
    families: ClassVar[Mapping[str, type[Any]]]
    #: Names of parameters that belong to the host or the stack (launch cost), not to the silicon.
    host_parameters: ClassVar[tuple[str, ...]] = ()
    #: Column that names what a row was measured on.
    subject: ClassVar[str] = "device"
    measured_column = "time_us"
    measured_unit = MICROSECOND

    def prepared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows as they are priced.

        A kind overrides this if it can tell which device or system a row really ran on.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        DataFrame
            The table, perhaps with other devices.
        """
        return frame

    @abstractmethod
    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Explain which rows cannot be modelled.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        Series[str]
            One reason a row; empty if the row can be modelled.
        """

    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Tell how each row was timed: graph, kernel, eager, back-to-back, or a key of the kind.

        ``key/variant`` marks rows that share all but the host parameters with other variants of ``key``. Where a kind
        does not say, engines and frameworks replay captured graphs.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        Series[str]
            One key a row.
        """
        return pd.Series("graph", index=frame.index, dtype=object)

    def starts(self, family: str, figures: Figures) -> Sequence[Any]:
        """Return the parameters from which a fit may start; the first is also the centre of its prior.

        Parameters
        ----------
        family : str
            Pricing family.
        figures : Figures
            What prices the rows.

        Returns
        -------
        sequence of Any
            Parameters of the family.
        """
        return (self.families[family](),)

    def fit_plan(self, subject: str, family: str, stack: str, figures: Figures, fitted: Fitted) -> FitPlan:
        """Tell how rows of a family are fitted.

        Parameters
        ----------
        subject : str
            Device or system.
        family : str
            Pricing family.
        stack : str
            How the rows were timed.
        figures : Figures
            What prices the rows.
        fitted : Fitted
            Results of earlier fits in the same run.

        Returns
        -------
        FitPlan
            Start values, fixed and per-stack parameters.
        """
        start, *alternatives = self.starts(family, figures)
        return FitPlan(start, tuple(alternatives))

    def figures(self, subject: str, dtype: str, compute: str) -> Figures:
        """Return what prices the rows of a device or system.

        Parameters
        ----------
        subject : str
            Device or system.
        dtype : str
            Format of the operands.
        compute : str
            Arithmetic unit; empty for the usual one.

        Returns
        -------
        Figures
            For example `DeviceFigures`.

        Raises
        ------
        SpecError
            If the subject is unknown or has no peak for the format.
        """
        return figures(find_device(subject), dtype.partition("->")[0], compute or None)  # type: ignore[return-value]

    def traits(self, figures: Figures) -> tuple[str, str, str]:
        """Return what calibrations are found by: name, architecture and kind of memory.

        Parameters
        ----------
        figures : Figures
            What prices the rows.

        Returns
        -------
        tuple[str, str, str]
            Three texts.
        """
        return figures.name, figures.architecture, figures.memory_kind  # type: ignore[attr-defined]

    def measured(self, frame: pd.DataFrame) -> Array:
        """Return the measured times.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        ndarray, shape (rows,)
            Seconds; nan where a cell is empty, no number, or out of range.
        """
        if self.measured_column not in frame.columns:
            raise SpecError(f"column {self.measured_column!r} is missing; {near(self.measured_column, frame.columns)}")
        times = pd.to_numeric(frame[self.measured_column], errors="coerce").to_numpy(dtype=np.float64)
        return np.where((times > LEAST_MEASURED) & (times < MOST_MEASURED), times, np.nan) * self.measured_unit

    @abstractmethod
    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return the pricing family of each row.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        Series[str]
            One key of ``families`` a row.
        """

    def compute(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Return the arithmetic unit that each row asks for; empty for the usual one.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        Series[str]
            One word a row, as `paleo.pricing.kernels` takes it.
        """
        return text(frame, "compute")

    @abstractmethod
    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """Return FLOP and compulsory bytes of each row, for the baseline of a roofline with one efficiency.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        tuple[Array, Array]
            FLOP and bytes, (rows,) each.
        """

    def ideal_time(self, frame: pd.DataFrame, figures: Figures) -> Array:
        """Return the roofline time at the peaks of the datasheet.

        Parameters
        ----------
        frame : DataFrame
            The table.
        figures : Figures
            What prices the rows.

        Returns
        -------
        ndarray, shape (rows,)
            Seconds.
        """
        return roofline_time(*self.work(frame), figures)  # type: ignore[arg-type]

    @abstractmethod
    def time(self, frame: pd.DataFrame, figures: Figures, parameters: Any) -> Array:
        """Price rows that share subject, dtype, family and stack.

        Parameters
        ----------
        frame : DataFrame
            The rows.
        figures : Figures
            What prices the rows.
        parameters : Any
            Calibrated parameters of the family.

        Returns
        -------
        ndarray, shape (rows,)
            Seconds.
        """

    @property
    def described_by(self) -> tuple[str, ...]:
        """Columns of a configuration, with dtype and operation."""
        first = ("op", "phase", "layer_type", "cell", "dtype")
        return tuple(dict.fromkeys((*first, *self.configuration, "direction")))

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict all rows, group by group of equal subject, family, stack, dtype and unit.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        Predictions
            Predictions.
        """
        frame = _categorised(self.prepared(frame.reset_index(drop=True)), self.sizes)
        out = Predictions.none(len(frame))
        out.subjects[:] = text(frame, self.subject).to_numpy()
        reasons = np.full(len(frame), "", dtype=object)
        for column in self.sizes:
            values = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
            reasons[~(np.isfinite(values) & (values > 0))] = f"{column} is missing or not a number above zero"
            reasons[np.isfinite(values) & (values != np.floor(values))] = f"{column} is not a whole number"
            reasons[values > LARGEST] = f"{column} is larger than any tensor"
        out.reasons[:] = reasons
        fine = out.reasons == ""
        sound = self._supported(frame if fine.all() else frame[fine], out)
        for group in row_groups(self, sound, checked=out.reasons[sound.index] == ""):
            self._price_sound(group, out)
        return out

    def _supported(self, frame: pd.DataFrame, out: Predictions) -> pd.DataFrame:
        """Return the rows whose cells can be read; their reasons say whether they can be modelled."""
        while len(frame):
            try:
                out.reasons[frame.index] = self.unsupported(frame).to_numpy()
                break
            except RowsError as error:
                out.reasons[error.rows] = str(error)
                frame = frame.drop(error.rows)
        return frame

    def _price_sound(self, group: RowGroup, out: Predictions) -> None:
        """Price a group; cells that cannot be read leave out their rows, any other error the group."""
        while len(group.frame):
            try:
                self._price(group, out)
                break
            except RowsError as error:
                out.reasons[error.rows] = str(error)
                group = replace(group, frame=group.frame.drop(error.rows))
            except PaleoError as error:
                out.reasons[group.frame.index] = str(error)
                break

    def _price(self, group: RowGroup, out: Predictions) -> None:
        rows = group.frame.index
        figures = self.figures(group.subject, group.dtype, group.compute)
        calibrated = self.calibrated(group, figures)
        with np.errstate(all="ignore"):
            seconds = self.time(group.frame, figures, calibrated.parameters)
            ideal = self.ideal_time(group.frame, figures)
        wrong = ~(np.isfinite(seconds) & (seconds > 0))
        out.reasons[rows[wrong]] = "the formula gives no finite time"
        seconds = np.where(wrong, np.nan, seconds)
        out.seconds[rows] = seconds
        out.low[rows], out.high[rows] = calibrated.bounds(seconds)
        out.baseline[rows] = ideal
        out.subjects[rows] = self.traits(figures)[0]
        out.origins[rows] = f"{calibrated.origin} ({calibrated.subject}: {group.family}, {group.stack})"

    def calibrated(self, group: RowGroup, figures: Any) -> SourcedParameters[Any]:
        """Return the calibrated parameters that price a group of rows.

        Parameters
        ----------
        group : RowGroup
            The rows.
        figures : Any
            What prices the rows.

        Returns
        -------
        SourcedParameters[Any]
            Parameters with their source.
        """
        subject, architecture, memory_kind = self.traits(figures)
        calibration = self.calibration if self.calibration is not None and self.calibration.subject == subject else None
        return lookup(
            self.families[group.family], subject=subject, architecture=architecture, memory_kind=memory_kind,
            family=group.family, stacks=(group.stack,), user_calibration=calibration,
        )  # fmt: skip


KINDS: Registry[TableKind[Any]] = Registry("table kind", "paleo.tables.kinds")


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a table that one set of figures and one set of parameters price."""

    subject: str
    family: str
    stack: str
    dtype: str
    compute: str
    frame: pd.DataFrame

    @property
    def measured(self) -> Array:
        """Measured times in seconds."""
        return measured_time(self.frame)


def row_groups(
    kind: TableKind[Any], frame: pd.DataFrame, checked: npt.NDArray[np.bool_] | None = None
) -> Iterator[RowGroup]:
    """Divide the supported rows of a table into groups of one subject, family, stack, dtype and unit.

    Parameters
    ----------
    kind : TableKind[Any]
        Kind of the table.
    frame : DataFrame
        The table; its index is preserved.
    checked : ndarray of bool, shape (rows,), optional
        True for supported rows, if the caller knows them.

    Yields
    ------
    RowGroup
        Groups.
    """
    known = (kind.unsupported(frame) == "").to_numpy() if checked is None else checked
    if not known.all():
        frame = frame[known]
    if frame.empty:
        return
    keys = {"family": kind.family(frame), "stack": kind.stack(frame), "compute": kind.compute(frame)}
    table = frame[list({kind.subject, "dtype"} & {*frame.columns})].assign(**keys)
    names = (kind.subject, "family", "stack", "dtype", "compute")
    combination_of, combinations = combine_codes([word_codes(table, name) for name in names])
    for place, key in sorted(enumerate(combinations), key=lambda pair: pair[1]):
        subject, family, stack, dtype, compute = key
        yield RowGroup(subject, family, stack, dtype, compute, frame.iloc[np.flatnonzero(combination_of == place)])


def by_words(method: Callable[..., str]) -> Callable[[Any, pd.DataFrame], pd.Series[str]]:
    """Decorate a method of the words of one row, so that it takes a table.

    Parameters
    ----------
    method : callable
        Its arguments are named as the columns are whose words it takes; it is called once for each combination.

    Returns
    -------
    callable
        A method of a table, with one text a row.
    """
    columns = tuple(inspect.signature(method).parameters)[1:]

    @wraps(method)
    def of_table(kind: Any, frame: pd.DataFrame) -> pd.Series[str]:
        return pd.Series(map_words(frame, columns, partial(method, kind)), index=frame.index, dtype=object)

    return of_table


def by_arithmetic(
    frame: pd.DataFrame, compute: pd.Series[str], function: Callable[[str, str, str], str]
) -> pd.Series[str]:
    """Apply a function to device, dtype and arithmetic unit of each row.

    Parameters
    ----------
    frame : DataFrame
        The table.
    compute : Series[str]
        Arithmetic unit of each row.
    function : Callable[[str, str, str], str]
        Function of the three texts.

    Returns
    -------
    Series[str]
        One result a row.
    """
    words = map_words(frame.assign(compute=compute), ("device", "dtype", "compute"), function)
    return pd.Series(words, index=frame.index, dtype=object)


def compute_unit_of(frame: pd.DataFrame) -> pd.Series[str]:
    """Return the arithmetic unit that each row names; DeepBench's fp16 rows without one run on ordinary cores.

    Parameters
    ----------
    frame : DataFrame
        The table.

    Returns
    -------
    Series[str]
        One word a row.
    """
    compute = text(frame, "compute")
    half = (compute == "") & (text(frame, "source") == "deepbench") & (text(frame, "dtype") == "fp16")
    return compute.where(~half, "vector")


@cache
def unpriced_reason(device: str, dtype: str, compute: str, dtypes: frozenset[str]) -> str:
    """Explain why a device cannot be priced for an arithmetic.

    Parameters
    ----------
    device : str
        Name of the device.
    dtype : str
        Format of the operands.
    compute : str
        Arithmetic unit; empty for the usual one.
    dtypes : frozenset of str
        Formats that the kind of table knows.

    Returns
    -------
    str
        The reason; empty if it can be priced.
    """
    if dtype not in dtypes:
        return f"dtype {dtype!r} is not modelled; {near(dtype, dtypes)}"
    try:
        figures(find_device(device), dtype, compute)
    except SpecError as error:
        return str(error)
    return ""


def timing_keys(frame: pd.DataFrame, usual: pd.Series[str]) -> pd.Series[str]:
    """Return how each row was timed: by the column ``timing`` if filled, else as usual for the source.

    Parameters
    ----------
    frame : DataFrame
        The table.
    usual : Series[str]
        Usual key of each row.

    Returns
    -------
    Series[str]
        One key a row.
    """
    if "timing" not in frame.columns:
        return usual
    stated = text(frame, "timing")
    return usual.where(stated == "", stated)


def measured_time(frame: pd.DataFrame) -> Array:
    """Return the measured times of a table in which every row must have one.

    Parameters
    ----------
    frame : DataFrame
        The table with a column ``time_us``.

    Returns
    -------
    ndarray, shape (rows,)
        Seconds.

    Raises
    ------
    SpecError
        If a time is not above zero.
    """
    times = number(frame, "time_us")
    if (times <= 0).any():
        row = int(np.argmax(times <= 0))
        raise SpecError(f"column 'time_us', row {frame.index[row]}: {times[row]} must be above zero")
    return times * MICROSECOND


def roofline_time(flops: Array, bytes_moved: Array, figures: DeviceFigures) -> Array:
    """Return the roofline time at the peaks of the datasheet: max(FLOP / peak, bytes / bandwidth).

    Parameters
    ----------
    flops : ndarray, shape (rows,)
        FLOP.
    bytes_moved : ndarray, shape (rows,)
        Compulsory bytes.
    figures : DeviceFigures
        Peak and bandwidth of the device.

    Returns
    -------
    ndarray, shape (rows,)
        Seconds.

    References
    ----------
    Williams, Waterman, Patterson, CACM 52(4), 2009.
    """
    return np.maximum(flops / figures.peak_flops_per_s, bytes_moved / figures.memory_bandwidth)


def best_constant_efficiency(roofline: Array, measured: Array) -> float:
    """Return the one efficiency e that minimises the mean of |roofline / e / measured − 1| (Paleo's percent of peak).

    The mean absolute error is least at a weighted median of the ratios.

    Parameters
    ----------
    roofline : ndarray, shape (rows,)
        Roofline times [s].
    measured : ndarray, shape (rows,)
        Measured times [s].

    Returns
    -------
    float
        Efficiency.

    Examples
    --------
    >>> best_constant_efficiency(np.array([1.0, 1.0, 4.0]), np.array([2.0, 2.0, 5.0]))
    0.5
    """
    ratio = roofline / measured
    order = np.argsort(ratio)
    weight = np.cumsum(ratio[order])
    return float(ratio[order][np.searchsorted(weight, weight[-1] / 2)])


def _categorised(frame: pd.DataFrame, numbers: Iterable[str]) -> pd.DataFrame:
    """Convert the text columns of a table to categories, so that what depends on words is worked out once a word."""
    numeric = {*numbers, *(name for name, kind in frame.dtypes.items() if pd.api.types.is_numeric_dtype(kind))}
    words = {name: frame[name].astype("category") for name in frame.columns if name not in numeric}
    return frame.assign(**words)
