"""``paleo validate FILE…``: read, predict, compare, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import pandas as pd

from paleo.errors import SpecError
from paleo.files import PICTURES, checked_output, csv_cell, write_whole
from paleo.specs.calibration import load_calibration
from paleo.validate.report import console, document, figure, predictions_table, renderables
from paleo.validate.runner import validate_file

if TYPE_CHECKING:
    from paleo.validate.runner import FileReport


def validate(
    files: Sequence[str],
    *,
    as_json: bool = False,
    predictions: str | None = None,
    plot: str | None = None,
    calibration: str | None = None,
    worst: int = 5,
) -> int:
    """Compare predictions with measured tables; the exit code. Errors in the input raise PaleoError."""
    drawn = None if plot is None else checked_output(plot, PICTURES, option="--plot")
    table = None if predictions is None else checked_output(predictions, (".csv", ".csv.gz"), option="--predictions")
    prices = None if calibration in (None, "auto") else load_calibration(str(calibration))
    if not files:
        raise SpecError("no file is named; expected measured tables, such as measurements/gemm.csv.gz")
    reports = [validate_file(file, prices) for file in files]
    if table is not None:
        write_whole(table, lambda file: _write_predictions(file, table, reports))
    if drawn is not None:
        kind = drawn.suffix[1:].lower() or "png"
        write_whole(drawn, lambda file: figure(reports).savefig(file, dpi=130, format=kind))
    _print(reports, as_json, worst)
    return 0


def _print(reports: Sequence[FileReport], as_json: bool, worst: int) -> None:
    if as_json:
        sys.stdout.write(
            json.dumps({"schema": "paleo.validate/1", **document(reports)}, indent=2, allow_nan=False) + "\n"
        )
        return
    terminal = console()
    for report in reports:
        for renderable in renderables(report, worst=worst):
            terminal.print(renderable)
        terminal.print()


def _write_predictions(file: BinaryIO, table: Path, reports: Sequence[FileReport]) -> None:
    """The rows as CSV, packed where the name ends in .gz; the same bytes for the same rows."""
    zipped = {"method": "gzip", "mtime": 0} if table.suffix == ".gz" else None
    escaped(predictions_table(reports)).to_csv(file, index=False, compression=zipped)


def escaped(rows: pd.DataFrame) -> pd.DataFrame:
    """The table with cells that a spreadsheet would take for formulas escaped."""
    words = [name for name in rows.columns if not pd.api.types.is_numeric_dtype(rows[name])]
    texts = {name: rows[name].map(csv_cell) for name in words}
    return rows.assign(**texts).rename(columns=csv_cell)
