"""``paleo validate FILE…``: read, predict, compare, print."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from paleo.errors import SpecError
from paleo.specs.calibration import load_calibration
from paleo.validate.report import document, figure, plot_path, predictions_table, renderables
from paleo.validate.runner import FileReport, validate_file


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
    drawn = None if plot is None else plot_path(plot)
    table = None if predictions is None else _table_path(predictions)
    own = None if calibration in (None, "auto") else load_calibration(str(calibration))
    if not files:
        raise SpecError("no file is named; expected measured tables, such as measurements/gemm.csv.gz")
    reports = [validate_file(file, own) for file in files]
    if table is not None:
        rows = predictions_table(reports)
        zipped: Literal["gzip"] | None = "gzip" if table.suffix == ".gz" else None
        written_whole(table, lambda path: rows.to_csv(path, index=False, compression=zipped))
    if drawn is not None:
        written_whole(drawn, lambda path: figure(reports).savefig(path, dpi=130, format=drawn.suffix[1:].lower()))
    _print(reports, as_json, worst)
    return 0


def _print(reports: Sequence[FileReport], as_json: bool, worst: int) -> None:
    if as_json:
        sys.stdout.write(json.dumps(document(reports), indent=2, allow_nan=False) + "\n")
        return
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    for report in reports:
        for shown in renderables(report, worst=worst):
            console.print(shown)
        console.print()


def _table_path(text: str) -> Path:
    path = Path(text)
    if not path.name.endswith((".csv", ".csv.gz")):
        raise SpecError(f"--predictions {text}: expected a name that ends in .csv or .csv.gz")
    if not path.parent.is_dir():
        raise SpecError(f"--predictions {text}: {path.parent} is not a folder")
    return path


def written_whole(path: Path, write: Callable[[str], object]) -> None:
    """Write a file beside its place and move it there, so that a reader never sees half of it."""
    try:
        handle, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
        try:
            write(draft)
            Path(draft).chmod(0o644)
            Path(draft).replace(path)
        finally:
            Path(draft).unlink(missing_ok=True)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written: {error.strerror or error}") from None
