"""Measured tables and what predicts their rows: kernels by their pricing families, whole steps by the prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.errors import PaleoError, SpecError
from paleo.pricing.store import SourcedParameters, lookup
from paleo.registry import Registry
from paleo.tables.cells import Array, RowsError, text
from paleo.tables.columns import best_match
from paleo.tables.kernels import KINDS, RowGroup, TableKind, row_groups

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration

Words = npt.NDArray[np.object_]
#: Columns of tables that describe the rows of another: the networks of placements.
DESCRIPTIONS = {frozenset({"network", "group_a", "group_b", "pair_bytes_per_s"}): "placement"}
#: Sizes above this one are slips.
LARGEST = 2.0**53


@dataclass(frozen=True, slots=True)
class Predictions:
    """What is predicted of each row of a table, in the order of the rows; nan where ``reasons`` says why not.

    ``seconds`` with the ends of its 90 % interval; ``baseline`` is the bare roofline at the datasheet's peaks, whose
    one constant efficiency the report chooses. ``subjects`` are the devices or systems by their catalog names.
    ``origins`` says of each row where its parameters come from. Tables of other quantities hold those in place of
    seconds (memory: bytes).
    """

    seconds: Array
    low: Array
    high: Array
    baseline: Array
    reasons: Words
    subjects: Words
    origins: Words

    @classmethod
    def none(cls, rows: int) -> Predictions:
        """Return predictions of a table in which no row is predicted yet.

        Parameters
        ----------
        rows : int
            Number of rows.

        Returns
        -------
        Predictions
            Predictions that are all nan.
        """
        times = [np.full(rows, np.nan) for _ in range(4)]
        words = [np.full(rows, "", dtype=object) for _ in range(3)]
        return cls(*times, *words)


class MeasuredTable(Protocol):
    """A kind of table that ``paleo validate`` reads."""

    @property
    def name(self) -> str:
        """Name of the kind of table in the report."""

    @property
    def header(self) -> frozenset[str]:
        """Columns that identify the kind; a table may have more."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that the kind reads, those that identify it first."""

    @property
    def measured_column(self) -> str:
        """The column that holds what was measured."""

    @property
    def measured_unit(self) -> float:
        """Seconds (bytes, …) of one unit of that column."""

    @property
    def configuration(self) -> tuple[str, ...]:
        """Columns that say what was measured, for people to read."""

    def measured(self, frame: pd.DataFrame) -> Array:
        """Return the measured values of a table.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        ndarray, shape (rows,)
            Values in SI units; nan where a cell holds no number above zero.
        """

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict all rows of a table.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        Predictions
            Predictions.
        """

    def with_calibration(self, calibration: Calibration) -> MeasuredTable:
        """Return the same kind of table, priced by a user's calibration.

        Parameters
        ----------
        calibration : Calibration
            The calibration.

        Returns
        -------
        MeasuredTable
            The table.
        """

    def parts(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """Return predicted and measured parts of what a row measures; errors of parts may cancel.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        dict[str, tuple[Array, Array]]
            Predicted and measured values by name, (rows,) each.
        """

    def curves(self, frame: pd.DataFrame) -> pd.DataFrame | None:
        """Return which rows form scaling curves.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        DataFrame, optional
            Column ``gpus`` (nan: not part of a curve), and columns that are equal within a curve; None without curves.
        """


#: Tables of whole steps; a module of ``paleo/tables/kinds`` registers an instance under its kind's name.
STEPS: Registry[MeasuredTable] = Registry("step table", "paleo.tables.kinds")


@dataclass(frozen=True, slots=True)
class KernelTable:
    """A table of kernels or collectives, priced family by family; ``calibration`` is a user's calibration."""

    kind: TableKind[Any]
    calibration: Calibration | None = None

    @property
    def name(self) -> str:
        """The kind's name."""
        return self.kind.name

    @property
    def header(self) -> frozenset[str]:
        """The kind's columns."""
        return self.kind.header

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that the kind reads."""
        return self.kind.columns

    @property
    def measured_column(self) -> str:
        """The kind's."""
        return self.kind.measured_column

    @property
    def measured_unit(self) -> float:
        """The kind's."""
        return self.kind.measured_unit

    @property
    def configuration(self) -> tuple[str, ...]:
        """The kind's, with dtype and operation."""
        first = ("op", "phase", "layer_type", "cell", "dtype")
        return tuple(dict.fromkeys((*first, *self.kind.configuration, "direction")))

    def measured(self, frame: pd.DataFrame) -> Array:
        """Return the measured times.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        ndarray, shape (rows,)
            Seconds.
        """
        return self.kind.measured(frame)

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
        frame = _categorised(self.kind.prepared(frame.reset_index(drop=True)), self.kind.sizes)
        out = Predictions.none(len(frame))
        out.subjects[:] = text(frame, self.kind.subject).to_numpy()
        reasons = np.full(len(frame), "", dtype=object)
        for column in self.kind.sizes:
            values = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
            reasons[~(np.isfinite(values) & (values > 0))] = f"{column} is missing or not a number above zero"
            reasons[np.isfinite(values) & (values != np.floor(values))] = f"{column} is not a whole number"
            reasons[values > LARGEST] = f"{column} is larger than any tensor"
        out.reasons[:] = reasons
        fine = out.reasons == ""
        sound = self._supported(frame if fine.all() else frame[fine], out)
        for group in row_groups(self.kind, sound, checked=out.reasons[sound.index] == ""):
            self._price_sound(group, out)
        return out

    def _supported(self, frame: pd.DataFrame, out: Predictions) -> pd.DataFrame:
        """The rows whose cells can be read; their reasons say whether they can be modelled."""
        while len(frame):
            try:
                out.reasons[frame.index] = self.kind.unsupported(frame).to_numpy()
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
        figures = self.kind.figures(group.subject, group.dtype, group.compute)
        calibrated = self.calibrated(group, figures)
        with np.errstate(all="ignore"):
            seconds = self.kind.time(group.frame, figures, calibrated.parameters)
            ideal = self.kind.ideal_time(group.frame, figures)
        wrong = ~(np.isfinite(seconds) & (seconds > 0))
        out.reasons[rows[wrong]] = "the formula gives no finite time"
        seconds = np.where(wrong, np.nan, seconds)
        out.seconds[rows] = seconds
        out.low[rows], out.high[rows] = calibrated.bounds(seconds)
        out.baseline[rows] = ideal
        out.subjects[rows] = self.kind.traits(figures)[0]
        out.origins[rows] = f"{calibrated.origin} ({calibrated.subject}: {group.family}, {group.stack})"

    def with_calibration(self, calibration: Calibration) -> KernelTable:
        """Return the same kind of table, priced by a user's calibration.

        Parameters
        ----------
        calibration : Calibration
            The calibration.

        Returns
        -------
        KernelTable
            The table.
        """
        return KernelTable(self.kind, calibration)

    def parts(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """Return no parts, as kernels have none.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        dict[str, tuple[Array, Array]]
            An empty dict.
        """
        return {}

    def curves(self, frame: pd.DataFrame) -> pd.DataFrame | None:
        """Return None, as kernels form no scaling curves.

        Parameters
        ----------
        frame : DataFrame
            The table.

        Returns
        -------
        DataFrame, optional
            None.
        """
        return None

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
        subject, architecture, memory_kind = self.kind.traits(figures)
        calibration = self.calibration if self.calibration is not None and self.calibration.subject == subject else None
        return lookup(
            self.kind.families[group.family], subject=subject, architecture=architecture, memory_kind=memory_kind,
            family=group.family, stacks=(group.stack,), user_calibration=calibration,
        )  # fmt: skip


def tables(calibration: Calibration | None = None) -> Mapping[str, MeasuredTable]:
    """Return every kind of table by its name.

    Parameters
    ----------
    calibration : Calibration, optional
        Calibration to use for its device or system.

    Returns
    -------
    dict of str to MeasuredTable
        Tables.
    """
    kernels: dict[str, MeasuredTable] = {name: KernelTable(kind) for name, kind in KINDS.items()}
    table_by_name = kernels | dict(STEPS.items())
    return (
        table_by_name
        if calibration is None
        else {name: table.with_calibration(calibration) for name, table in table_by_name.items()}
    )


def table_of(columns: Iterable[str], calibration: Calibration | None = None) -> MeasuredTable:
    """Find the kind of table that has some columns.

    Parameters
    ----------
    columns : iterable of str
        Column names.
    calibration : Calibration, optional
        Calibration to use for its device or system.

    Returns
    -------
    MeasuredTable
        The table.

    Raises
    ------
    SpecError
        If no header is complete; the message names the nearest kind and what it lacks.
    """
    present = {str(column).strip() for column in columns}
    for header, kind in DESCRIPTIONS.items():
        if header <= present:
            raise SpecError(f"describes the rows of a table of kind {kind!r} that lies beside it; nothing measured")
    known = tables(calibration)
    headers = {name: table.header for name, table in known.items()}
    return known[best_match(present, headers, {name: frozenset(table.columns) for name, table in known.items()})]


def _categorised(frame: pd.DataFrame, numbers: Iterable[str]) -> pd.DataFrame:
    """The table with its text columns as categories, so that what depends on words is worked out once a word."""
    numeric = {*numbers, *(name for name, kind in frame.dtypes.items() if pd.api.types.is_numeric_dtype(kind))}
    words = {name: frame[name].astype("category") for name in frame.columns if name not in numeric}
    return frame.assign(**words)
