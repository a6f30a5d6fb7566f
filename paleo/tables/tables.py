"""Measured tables and what predicts their rows: kernels by their pricing families, whole steps by the prediction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.registry import Registry
from paleo.tables.columns import best_match
from paleo.tables.kernels import KINDS

if TYPE_CHECKING:
    from paleo.specs.calibration import Calibration
    from paleo.tables.base import MeasuredTable

#: Columns of tables that describe the rows of another: the networks of placements.
DESCRIPTIONS = {frozenset({"network", "group_a", "group_b", "pair_bytes_per_s"}): "placement"}


#: Tables of whole steps; a module of ``paleo/tables/kinds`` registers an instance under its kind's name.
STEPS: Registry[MeasuredTable] = Registry("step table", "paleo.tables.kinds")


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
    known: dict[str, MeasuredTable] = {**dict(KINDS.items()), **dict(STEPS.items())}
    return known if calibration is None else {name: kind.with_calibration(calibration) for name, kind in known.items()}


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
