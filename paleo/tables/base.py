"""What all kinds of measured tables share: their columns, their predictions, a user's calibration."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np
import numpy.typing as npt
import pandas as pd

from paleo.tables.columns import COLUMNS, columns_of

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration
    from paleo.tables.cells import Array

Words = npt.NDArray[np.object_]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predicted seconds of the rows of a table, in their order. A row without a prediction has nan and a reason.

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


class MeasuredTable(ABC):
    """A kind of table that ``paleo validate`` reads; ``calibration`` is a user's, for its device or system."""

    #: Registry name, also the ``kind`` that ``paleo validate --json`` prints.
    name: ClassVar[str]
    #: Columns that identify the kind; a table may have more.
    header: ClassVar[frozenset[str]]
    #: Further columns that the kind reads, keys of `paleo.tables.columns.COLUMNS`; a table may lack them.
    reads: ClassVar[str] = ""
    #: Columns that define a configuration: rows that agree in them fall on the same side of a held-out split.
    configuration: ClassVar[tuple[str, ...]]
    #: The column that holds what was measured, and the seconds (bytes, …) of one unit of it.
    measured_column: ClassVar[str]
    measured_unit: ClassVar[float]
    #: Columns that may hold what was measured, where it is not `measured_column` alone.
    measured_columns: ClassVar[tuple[str, ...]] = ()
    #: Whether calibrations, profiles and links are fitted to such tables.
    calibrates: ClassVar[bool] = True

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.calibration = calibration

    @property
    def columns(self) -> tuple[str, ...]:
        """Every column that the kind reads, those that identify it first."""
        known = (*sorted(self.header), *columns_of(self.reads), *(self.measured_columns or (self.measured_column,)))
        return tuple(name for name in dict.fromkeys(known) if name in COLUMNS)

    @property
    def described_by(self) -> tuple[str, ...]:
        """Columns that say what was measured, for people to read."""
        return self.configuration

    def with_calibration(self, calibration: Calibration | None) -> Self:
        """Return the same kind of table, priced by a user's calibration.

        Parameters
        ----------
        calibration : Calibration, optional
            The calibration; None for the catalog's.

        Returns
        -------
        MeasuredTable
            The table.
        """
        return type(self)(calibration)

    @abstractmethod
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

    @abstractmethod
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
        return {}

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
        return None
