"""What a kind of measured table is: how to recognise it, and how its rows become the arguments of a pricing family.

A module of this folder makes one object of a subclass of ``TableKind`` and registers it::

    KINDS.register("gemm")(GemmTable())

Times in a table are microseconds (``time_us``); everything that a method returns is SI.

Where fits set out on silicon that rows do not tell apart: energies by process, the L2 by its build.
"""

from __future__ import annotations

import io
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import SpecError, near
from paleo.files import read_bytes
from paleo.pricing.kernels import figures
from paleo.registry import Registry
from paleo.specs.device import find_device
from paleo.units import MICROSECOND

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceFigures

Array = npt.NDArray[np.float64]
Figures = TypeVar("Figures")
#: Six times the largest of the tables that this was made with; unpacked.
MOST_TABLE_BYTES = 64_000_000
#: Bounds of what is measured, in whatever unit a column has: attoseconds are none, nor is the age of the universe.
LEAST_MEASURED, MOST_MEASURED = 2.0**-60, 2.0**90


@dataclass(frozen=True, slots=True)
class FitPlan:
    """How a family is fitted: where the search sets out, and which parameters the rows of a table do not tell apart.

    ``fixed`` parameters stay at ``start``; those ``per_stack`` are one per stack, all others shared by the stacks that
    are fitted together. ``starts`` counts searches from random points besides those from ``alternatives``; ``prior`` is
    the inverse width of the pull to the start, in log units (see ``paleo.calibrate.fit.fit``).
    """

    start: Any
    alternatives: tuple[Any, ...] = ()
    per_stack: tuple[str, ...] = ()
    fixed: tuple[str, ...] = ()
    training_rows: int = 1000
    starts: int = 2
    prior: float = 0.5


#: Parameters fitted so far in one run: (subject, family, stack) -> parameters.
Fitted = Mapping[tuple[str, str, str], Any]


class TableKind(ABC, Generic[Figures]):
    """One kind of measured table. ``Figures`` is what prices a row: DeviceFigures for kernels."""

    #: Registry name, also the ``kind`` that ``paleo validate --json`` prints.
    name: ClassVar[str]
    #: Column names that identify the kind; a table may have more.
    header: ClassVar[frozenset[str]]
    #: Columns that define a configuration: rows that agree in them fall on the same side of a held-out split.
    configuration: ClassVar[tuple[str, ...]]
    #: Columns that must hold a whole number above zero.
    sizes: ClassVar[tuple[str, ...]] = ()
    #: Family key -> dataclass of its parameters.
    families: ClassVar[Mapping[str, type[Any]]]
    #: Names of parameters that belong to the host or the stack (launch cost), not to the silicon.
    host_parameters: ClassVar[tuple[str, ...]] = ()
    #: Column that names what a row was measured on.
    subject: ClassVar[str] = "device"
    #: Whether calibrations are fitted to such tables; if not, the families are those of another kind.
    calibrates: ClassVar[bool] = True
    #: What the measured column is called, and its unit in seconds.
    measured_column: ClassVar[str] = "time_us"
    measured_unit: ClassVar[float] = MICROSECOND

    def prepared(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows as they are priced: as in the table, unless the kind can tell the device or the system that a row
        really ran on."""
        return frame

    @abstractmethod
    def unsupported(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Why a row cannot be modelled, or an empty string; one entry per row."""

    @abstractmethod
    def stack(self, frame: pd.DataFrame) -> pd.Series[str]:
        """How each row was timed: graph, kernel, eager, back-to-back, or a custom key.

        ``key/variant`` marks rows that share all but the host parameters with the other variants of ``key``.
        """

    def starts(self, family: str, figures: Figures) -> Sequence[Any]:
        """Parameters from which a fit may set out; the first is also the centre of its prior."""
        return (self.families[family](),)

    def fit_plan(self, subject: str, family: str, stack: str, figures: Figures, fitted: Fitted) -> FitPlan:
        """How rows of a family are fitted; ``fitted`` holds what was fitted before in the same run."""
        start, *alternatives = self.starts(family, figures)
        return FitPlan(start, tuple(alternatives))

    def figures(self, subject: str, dtype: str, compute: str) -> Figures:
        """What prices rows of a subject; SpecError where it has no peak for that."""
        return figures(find_device(subject), dtype.partition("->")[0], compute or None)  # type: ignore[return-value]

    def traits(self, figures: Figures) -> tuple[str, str, str]:
        """Name, architecture and kind of memory: what calibrations go by."""
        return figures.name, figures.architecture, figures.memory_kind  # type: ignore[attr-defined]

    def measured(self, frame: pd.DataFrame) -> Array:
        """Measured seconds; nan where a cell is empty, no number, not above zero or beyond all that can be measured."""
        if self.measured_column not in frame.columns:
            raise SpecError(f"column {self.measured_column!r} is missing; {near(self.measured_column, frame.columns)}")
        times = pd.to_numeric(frame[self.measured_column], errors="coerce").to_numpy(dtype=np.float64)
        return np.where((times > LEAST_MEASURED) & (times < MOST_MEASURED), times, np.nan) * self.measured_unit

    @abstractmethod
    def family(self, frame: pd.DataFrame) -> pd.Series[str]:
        """Calibration key of each row, one of ``families``."""

    def compute(self, frame: pd.DataFrame) -> pd.Series[str]:
        """The arithmetic unit that each row asks for, as ``paleo.pricing.kernels`` takes it; '' for the usual one."""
        return text(frame, "compute")

    @abstractmethod
    def work(self, frame: pd.DataFrame) -> tuple[Array, Array]:
        """FLOP and compulsory bytes of each row, for the roofline baseline of one constant efficiency."""

    def ideal_time(self, frame: pd.DataFrame, figures: Figures) -> Array:
        """Seconds at the datasheet's peaks, for the baseline of one constant efficiency."""
        return roofline_time(*self.work(frame), figures)  # type: ignore[arg-type]

    @abstractmethod
    def time(self, frame: pd.DataFrame, figures: Figures, parameters: Any) -> Array:
        """Seconds of rows that share one subject, dtype, family and stack."""


KINDS: Registry[TableKind[Any]] = Registry("table kind", "paleo.validate.kinds")


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


def groups(
    kind: TableKind[Any], frame: pd.DataFrame, checked: npt.NDArray[np.bool_] | None = None
) -> Iterator[RowGroup]:
    """The supported rows of ``frame`` in groups of one subject, family, stack, dtype and compute unit, index kept.

    ``checked`` says which rows are supported, where the caller knows.
    """
    known = (kind.unsupported(frame) == "").to_numpy() if checked is None else checked
    if not known.all():
        frame = frame[known]
    if frame.empty:
        return
    keys = {"family": kind.family(frame), "stack": kind.stack(frame), "compute": kind.compute(frame)}
    table = frame[list({kind.subject, "dtype"} & {*frame.columns})].assign(**keys)
    names = (kind.subject, "family", "stack", "dtype", "compute")
    combination_of, combinations = combined([coded(table, name) for name in names])
    for place, key in sorted(enumerate(combinations), key=lambda pair: pair[1]):
        subject, family, stack, dtype, compute = key
        yield RowGroup(subject, family, stack, dtype, compute, frame.iloc[np.flatnonzero(combination_of == place)])


def kind_of(columns: Iterable[str]) -> TableKind[Any]:
    """The kind of table that has these columns: of those whose header is there in full, the one with the most columns.

    Raises SpecError that names the nearest kind and the columns that it lacks.
    """
    return KINDS[best_match(columns, {name: kind.header for name, kind in KINDS.items()})]


def best_match(columns: Iterable[str], headers: Mapping[str, frozenset[str]]) -> str:
    """Of named headers, the largest that the columns hold in full; SpecError names the nearest and what it lacks."""
    present = {str(column).strip() for column in columns}
    fitting = [name for name, header in headers.items() if header <= present]
    if fitting:
        return max(fitting, key=lambda name: (len(headers[name]), name))
    if not headers:
        raise SpecError("no table kind is registered")
    nearest = min(headers, key=lambda name: (len(headers[name] - present) / len(headers[name]), name))
    lacking = ", ".join(_lacking(column, present) for column in sorted(headers[nearest] - present))
    raise SpecError(
        f"no kind of table has this header; the nearest, {nearest!r}, also needs {lacking} (`paleo list tables`)"
    )


def _lacking(column: str, present: Iterable[str]) -> str:
    """A missing column, with the one that may be meant by it."""
    close = get_close_matches(column, {name.lower(): name for name in present}, n=1, cutoff=0.75)
    meant = next((name for name in present if close and name.lower() == close[0]), None)
    if meant is None:
        return repr(column)
    units = [name.strip().lower().rpartition("_") for name in (column, meant)]
    other_unit = units[0][0] and units[0][0] == units[1][0]
    return f"{column!r} ({meant!r} is not that: convert it)" if other_unit else f"{column!r} (is it {meant!r}?)"


def read_table(path: str | Path) -> pd.DataFrame:
    """A measured table from a CSV or CSV.gz file; text columns hold '' where a cell is empty. ``attrs["path"]`` says
    where it was read, for kinds with a second table beside theirs.

    Raises SpecError when the file is missing, is no CSV, has no rows, two columns of one name, or rows that are longer
    than its header.
    """
    raw = read_bytes(path, most=MOST_TABLE_BYTES, expected="a CSV or CSV.gz table")
    try:
        names = pd.read_csv(io.BytesIO(raw), header=None, nrows=1, dtype=str, keep_default_na=False).iloc[0]
        _check_separator(path, names)
        with warnings.catch_warnings():
            warnings.simplefilter("error", pd.errors.ParserWarning)
            frame = pd.read_csv(io.BytesIO(raw), low_memory=False, index_col=False)
    except pd.errors.ParserWarning:
        raise SpecError(f"{path}: rows have more cells than the header has names") from None
    except SpecError:
        raise
    except (OSError, EOFError, ValueError, OverflowError, RecursionError) as error:  # pandas' own are ValueErrors
        raise SpecError(f"{path}: cannot be read as a CSV table: {str(error)[:200]}") from None
    stripped = names.str.strip()
    if (twice := stripped[(stripped != "") & stripped.duplicated()]).size:
        raise SpecError(f"{path}: two columns are named {twice.iloc[0][:80]!r}; expected each name once")
    frame.columns = pd.Index([str(column).strip() for column in frame.columns])
    if frame.empty:
        raise SpecError(f"{path}: the table has no rows")
    for column in frame.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]]:
        frame[column] = frame[column].fillna("").astype(str)
    frame.attrs["path"] = str(path)
    return frame


def _check_separator(path: str | Path, names: pd.Series[str]) -> None:
    """SpecError for a header of one name that holds another separator."""
    separators = [mark for mark in ";\t|" if len(names) == 1 and mark in names.iloc[0]]
    if separators:
        decimals = ", and points for decimals" if separators[0] == ";" else ""
        raise SpecError(f"{path}: its cells are separated by {separators[0]!r}; expected commas{decimals}")


def coded(frame: pd.DataFrame, column: str, default: str = "") -> tuple[npt.NDArray[np.integer[Any]], list[str]]:
    """A column as codes into a list of its stripped words, ``default`` where a cell is empty or the column absent."""
    if column not in frame.columns:
        return np.zeros(len(frame), dtype=np.int8), [default]
    raw = frame[column]
    categorical = isinstance(raw.dtype, pd.CategoricalDtype)
    codes, words = (raw.cat.codes.to_numpy(), raw.cat.categories) if categorical else pd.factorize(raw)
    cleaned = [str(word).strip() or default for word in words]
    if (codes < 0).any():
        codes, cleaned = np.where(codes < 0, len(cleaned), codes), [*cleaned, default]
    return codes, cleaned


def text(frame: pd.DataFrame, column: str, default: str = "") -> pd.Series[str]:
    """A column as stripped text, ``default`` where it is empty or absent."""
    codes, words = coded(frame, column, default)
    return pd.Series(np.array(words, dtype=object)[codes], index=frame.index, dtype=object)


def mapped(frame: pd.DataFrame, columns: Sequence[str], function: Callable[..., Any], dtype: Any = object) -> Any:
    """An array of ``function`` of the text of some columns, called once for each combination that occurs.

    >>> table = pd.DataFrame({"a": ["x", "y", "x"], "b": ["1", "2", "1"]})
    >>> mapped(table, ("a", "b"), lambda a, b: a + b).tolist()
    ['x1', 'y2', 'x1']
    """
    if frame.empty:
        return np.zeros(0, dtype=dtype)
    coded_columns = [coded(frame, column) for column in columns]
    combination_of, combinations = combined(coded_columns)
    table = np.empty(len(combinations), dtype=dtype)
    for place, words in enumerate(combinations):
        table[place] = function(*words)
    return table[combination_of]


def combined(
    coded_columns: Sequence[tuple[npt.NDArray[np.integer[Any]], list[str]]],
) -> tuple[npt.NDArray[np.intp], list[tuple[str, ...]]]:
    """Which combination of words each row has, and the combinations, of columns as ``coded`` gives them."""
    shape = [len(words) for _, words in coded_columns]
    codes_of_rows = np.zeros(len(coded_columns[0][0]), dtype=np.int64)
    for codes, words in coded_columns:
        if len(words) > 1:
            codes_of_rows = codes_of_rows * len(words) + codes
    count = math.prod(shape)
    if count > len(codes_of_rows):
        index, present = pd.factorize(codes_of_rows)
    else:
        present = np.flatnonzero(np.bincount(codes_of_rows, minlength=count))
        places = np.zeros(count, dtype=np.intp)
        places[present] = np.arange(len(present))
        index = places[codes_of_rows]
    picked = np.stack(np.unravel_index(present, shape), axis=1)
    return index, [tuple(words[code] for code, (_, words) in zip(row, coded_columns, strict=True)) for row in picked]


def by_arithmetic(
    frame: pd.DataFrame, compute: pd.Series[str], function: Callable[[str, str, str], str]
) -> pd.Series[str]:
    """``function`` of the device, dtype and arithmetic of each row; ``compute`` is the arithmetic."""
    words = mapped(frame.assign(compute=compute), ("device", "dtype", "compute"), function)
    return pd.Series(words, index=frame.index, dtype=object)


def stated_compute(frame: pd.DataFrame) -> pd.Series[str]:
    """As the row says; DeepBench fp16 that says nothing is half-precision arithmetic on ordinary cores."""
    compute = text(frame, "compute")
    half = (compute == "") & (text(frame, "source") == "deepbench") & (text(frame, "dtype") == "fp16")
    return compute.where(~half, "vector")


@cache
def unpriced(device: str, dtype: str, compute: str, dtypes: frozenset[str]) -> str:
    """Why a device has no figures for an arithmetic, empty where it has; ``dtypes`` are those that a kind knows."""
    if dtype not in dtypes:
        return f"dtype {dtype!r} is not modelled; {near(dtype, dtypes)}"
    try:
        figures(find_device(device), dtype, compute)
    except SpecError as error:
        return str(error)
    return ""


def as_timed(frame: pd.DataFrame, usual: pd.Series[str]) -> pd.Series[str]:
    """The stacks that the column ``timing`` states, if present; else the usual ones of the source."""
    if "timing" not in frame.columns:
        return usual
    stated = text(frame, "timing")
    return usual.where(stated == "", stated)


class RowsError(SpecError):
    """Cells of some ``rows`` of a table, named by its index, are wrong; the other rows can be read without them."""

    def __init__(self, reason: str, rows: pd.Index[Any]) -> None:
        super().__init__(reason)
        self.rows = rows


def number(frame: pd.DataFrame, column: str, default: float | None = None) -> Array:
    """A column as floats; ``default`` where it is empty or absent.

    SpecError where the column is absent and there is no default, RowsError where a cell is no finite number.
    """
    if column not in frame.columns:
        if default is None:
            raise SpecError(f"column {column!r} is missing; {near(column, map(str, frame.columns))}")
        return np.full(len(frame), default)
    raw = frame[column]
    if isinstance(raw.dtype, pd.CategoricalDtype):
        raw = raw.astype(object)
    if raw.dtype.kind in "if" and np.isfinite(raw.to_numpy()).all():
        return raw.to_numpy(dtype=np.float64)
    values = pd.to_numeric(raw, errors="coerce").to_numpy(dtype=np.float64)
    empty = raw.isna().to_numpy() | (raw.astype(str).str.strip() == "").to_numpy()
    wrong = ~np.isfinite(values) & ~(empty & (default is not None))
    if wrong.any():
        row = int(np.argmax(wrong))
        reason = f"column {column!r}, row {frame.index[row]}: {str(raw.iloc[row])[:40]!r} is not a finite number"
        raise RowsError(reason, frame.index[wrong])
    return np.where(empty, np.nan if default is None else default, values)


def number_or_nan(frame: pd.DataFrame, column: str) -> Array:
    """A column as floats; nan where it is absent, or a cell is empty or no finite number."""
    if column not in frame.columns:
        return np.full(len(frame), np.nan)
    values = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
    return np.where(np.isfinite(values), values, np.nan)


def measured_time(frame: pd.DataFrame) -> Array:
    """Measured times in seconds; SpecError unless each is above zero."""
    times = number(frame, "time_us")
    if (times <= 0).any():
        row = int(np.argmax(times <= 0))
        raise SpecError(f"column 'time_us', row {frame.index[row]}: {times[row]} must be above zero")
    return times * MICROSECOND


def roofline_time(flops: Array, bytes_moved: Array, figures: DeviceFigures) -> Array:
    """Seconds at the datasheet's peaks: max(FLOP / peak, bytes / bandwidth) (Williams, Waterman, Patterson, 2009)."""
    return np.maximum(flops / figures.peak_flops_per_s, bytes_moved / figures.memory_bandwidth)


def best_constant_efficiency(roofline: Array, measured: Array) -> float:
    """The one efficiency e that makes the mean of |roofline / e / measured - 1| least: Paleo's percent of peak.

    The mean absolute error of x / e against 1 is least at a weighted median of the ratios.

    >>> best_constant_efficiency(np.array([1.0, 1.0, 4.0]), np.array([2.0, 2.0, 5.0]))
    0.5
    """
    ratio = roofline / measured
    order = np.argsort(ratio)
    weight = np.cumsum(ratio[order])
    return float(ratio[order][np.searchsorted(weight, weight[-1] / 2)])


class Energy(NamedTuple):
    """Energy at full clock [pJ/FLOP] of matrix units at two bytes and at one, and of ordinary cores in fp32.

    ``training`` and ``training_fp8`` are those of sustained training on matrix units.
    """

    tensor: float
    fp8: float
    vector: float
    training: float
    training_fp8: float


#: Products of eight-bit integers that an ordinary core adds up in the time of one in fp32 (dp4a).
INTEGER_LANES = 4.0
#: Energies by process, from the power limit over the rate that long products, and steps of training, sustain under it;
#: of ordinary cores those at which cards keep their boost clock (Titan X of Pascal, V100, A100; RTX 4090, 450 W).
ENERGY: Mapping[str, Energy] = {
    "28 nm": Energy(9.0, 9.0, 30.0, 11.0, 11.0),
    "16 nm": Energy(4.0, 4.0, 14.0, 5.0, 5.0),
    "12 nm": Energy(2.3, 2.3, 16.0, 2.9, 2.9),
    "8 nm": Energy(1.5, 0.8, 11.0, 1.9, 1.0),
    "7 nm": Energy(0.8, 0.4, 11.0, 1.0, 0.5),
    "4 nm, consumer": Energy(1.35, 0.5, 4.6, 1.5, 0.75),
    "4 nm, Hopper": Energy(0.68, 0.31, 4.6, 0.86, 0.46),
    "4 nm": Energy(0.56, 0.11, 4.6, 0.70, 0.31),
}
#: Architecture -> process, of the parts with HBM and of those with graphics memory (NVIDIA's whitepapers).
PROCESS: Mapping[str, tuple[str, str]] = {
    "Kepler": ("28 nm", "28 nm"),
    "Maxwell": ("28 nm", "28 nm"),
    "Pascal": ("16 nm", "16 nm"),
    "Volta": ("12 nm", "12 nm"),
    "Turing": ("12 nm", "12 nm"),
    "Ampere": ("7 nm", "8 nm"),
    "Ada Lovelace": ("4 nm, consumer", "4 nm, consumer"),
    "Hopper": ("4 nm, Hopper", "4 nm, consumer"),
    "Blackwell": ("4 nm", "4 nm, consumer"),
    "Blackwell Ultra": ("4 nm", "4 nm, consumer"),
}
#: Architectures whose parts with HBM have an L2 of two partitions, each of which caches for its half of the device
#: (NVIDIA A100 whitepaper, 2020), and shares of the nominal size in which data then survive; others keep nearly all.
SPLIT_L2 = frozenset({"Ampere", "Hopper", "Blackwell", "Blackwell Ultra"})
SPLIT_SHARE, WHOLE_SHARE = 0.45, 0.9


def energy(figures: DeviceFigures) -> Energy:
    """Energies of a device by its process; those of 7 nm where the architecture is not known.

    >>> from paleo.pricing.kernels import figures
    >>> from paleo.specs.device import load_device
    >>> energy(figures(load_device("v100-sxm2-16gb"), "fp16")).tensor
    2.3
    """
    process = PROCESS.get(figures.architecture, PROCESS["Ampere"])
    return ENERGY[process[figures.memory_kind.startswith("GDDR")]]


def surviving_share(figures: DeviceFigures) -> float:
    """Share of the L2 in which data survive from launch to launch, by its build."""
    split = figures.architecture in SPLIT_L2 and figures.memory_kind.startswith("HBM")
    return SPLIT_SHARE if split else WHOLE_SHARE
