"""Every column of every kind of table, spoilt in turn, at two doors: ``paleo validate`` and ``paleo calibrate --fit``.

``python -m tests.properties.spoilt_tables FOLDER --door fit`` spoils every column of every table of a folder in all
ways, and prints what is broken; ``--share 0.1 --seed 2`` takes a tenth of the cells. Where a fit is asked for, its
search ends after one evaluation, unless ``--searches`` is given: what is tested is what a cell does, not what is found.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from paleo.calibrate import fit as fits
from paleo.cli import run_command_line as run
from paleo.tables.base import COLUMNS, NUMBER_RANGE_OF_TYPE
from paleo.tables.cells import read_table
from paleo.tables.run_tables import find_table_kind
from paleo.tables.validation import FileReport, validate_frame

SPOILT = ["", "abc", "nan", "inf", "-inf", "-1", "0", "1e308", "-1e308", "1e-308", "0.5", "9007199254740993", "\x00"]
FILES = [
    "attention.csv.gz", "checkpoint.csv", "cnn_iterations.csv", "cnn_layers.csv", "collective.csv.gz",
    "compression.csv", "consistency.csv", "conv.csv", "elementwise.csv.gz", "expert_exchange.csv.gz", "gemm.csv.gz",
    "gemm_lowbit.csv.gz", "goodput.csv", "learning.csv", "llm_iterations.csv", "memory.csv", "mla.csv.gz", "moe.csv.gz",
    "mlperf/convergence.csv", "mlperf/inference.csv", "mlperf/storage.csv", "mlperf/training_runs.csv",
    "other_iterations.csv", "placement.csv", "power.csv", "rails.csv", "rl_steps.csv", "rnn.csv", "scan.csv.gz",
    "serving.csv", "sparse_attention.csv.gz", "staleness_accuracy.csv", "startup.csv", "stragglers.csv",
    "training_kernels.csv",
]  # fmt: skip


#: The most processor time of one fit without its search.
MOST_SECONDS = 30.0


def sample(path: Path, rows: int) -> pd.DataFrame:
    """Rows spread over a table."""
    frame = read_table(path)
    part = frame.iloc[np.unique(np.linspace(0, len(frame) - 1, rows).astype(int))].reset_index(drop=True)
    part.attrs = frame.attrs
    return part


def cells(path: Path, rows: int, values: list[str]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """Column, value and table of each way to spoil the first of some rows."""
    frame = sample(path, rows)
    for column in find_table_kind(frame.columns).columns:
        for value in values if column in frame.columns else ():
            spoilt = frame.assign(**{column: frame[column].astype(object)})
            spoilt.loc[0, column] = value
            spoilt.attrs = frame.attrs
            yield column, value, spoilt


def spoil(path: Path, rows: int, values: list[str]) -> list[str]:
    """Say which spoilt cells raise an error or a warning, lose a row, or move a row that was not spoilt."""
    frame = sample(path, rows)
    whole = validate_frame("whole", frame, find_table_kind(frame.columns))
    found = (
        (column, value, broken_by(column, value, table, whole)) for column, value, table in cells(path, rows, values)
    )
    return [f"{column}={value!r}{fault}" for column, value, fault in found if fault]


def broken_by(column: str, value: str, spoilt: pd.DataFrame, whole: FileReport) -> str:
    """What is wrong with the predictions of a table with one spoilt cell; empty if nothing is."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            report = validate_frame("spoilt", spoilt, find_table_kind(spoilt.columns))
            counted = int(report.predicted_row_mask.sum()) + sum(report.unsupported_reasons.values())
            others = np.array_equal(report.predictions.values[1:], whole.predictions.values[1:], equal_nan=True)
            refused = COLUMNS[column].type not in NUMBER_RANGE_OF_TYPE or value in ("", "nan") or _sound(column, value)
    except Exception as error:
        return f": {type(error).__name__}: {str(error)[:150]}"
    if counted != len(spoilt) or not others:
        return f": {counted} of {len(spoilt)} rows, others as before: {others}"
    return " is predicted" if not refused and report.predicted_row_mask[0] else ""


def broken_fit(spoilt: pd.DataFrame, folder: Path) -> str:
    """What is wrong with the fit of a table with one spoilt cell: it ends with files, or with one line of error."""
    out, err = io.StringIO(), io.StringIO()
    (folder / "out").mkdir(exist_ok=True)
    start = time.process_time()
    try:
        spoilt.to_csv(folder / "table.csv", index=False)
        with warnings.catch_warnings(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            warnings.simplefilter("error", RuntimeWarning)
            code = run(["calibrate", "--fit", str(folder / "table.csv"), "--output-dir", str(folder / "out")])
    except Exception as error:
        return f": {type(error).__name__}: {str(error)[:150]}"
    errors = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    if code not in (0, 1, 2) or len(errors) != (code == 2) or "Traceback" in err.getvalue():
        return f": exit code {code}, {errors}"
    if (took := time.process_time() - start) > MOST_SECONDS:
        return f": {took:.0f} s"
    for file in (folder / "out").glob("*.yaml"):
        wrong = [word for word in ("nan", "inf", "-inf") if f": .{word}" in file.read_text()]
        file.unlink()
        if wrong:
            return f": {file.name} holds {wrong}"
    return ""


@contextlib.contextmanager
def one_evaluation() -> Iterator[None]:
    """Searches of fits end at once."""
    whole = fits.scipy_optimizer

    def least(function: Any, *arguments: Any, **options: Any) -> Any:
        return whole("least_squares")(function, *arguments, **options | {"max_nfev": 1})

    fits.scipy_optimizer = lambda name: least if name == "least_squares" else whole(name)
    try:
        yield
    finally:
        fits.scipy_optimizer = whole


def _sound(column: str, value: str) -> bool:
    """Whether a column's range holds a number."""
    number = pd.to_numeric(pd.Series([value]), errors="coerce").to_numpy(dtype=np.float64)
    return bool(NUMBER_RANGE_OF_TYPE[COLUMNS[column].type].contains(number)[0])


def main() -> int:
    """Spoil tables; 1 where something is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of measured tables")
    parser.add_argument("--door", choices=("validate", "fit"), default="validate")
    parser.add_argument("--only", default="", help="tables whose names hold this")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0, help="a part of all cells, drawn by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--searches", action="store_true", help="fits search to their end")
    given = parser.parse_args()
    rng, tried, faults, start = random.Random(given.seed), 0, 0, time.process_time()
    with tempfile.TemporaryDirectory() as folder, contextlib.nullcontext() if given.searches else one_evaluation():
        for file in (file for file in FILES if given.only in file):
            frame = sample(given.folder / file, given.rows)
            whole = validate_frame("whole", frame, find_table_kind(frame.columns))
            at, before, from_s = tried, faults, time.process_time()
            for column, value, spoilt in cells(given.folder / file, given.rows, SPOILT):
                if rng.random() < given.share:
                    tried += 1
                    by_fit = given.door == "fit"
                    fault = broken_fit(spoilt, Path(folder)) if by_fit else broken_by(column, value, spoilt, whole)
                    faults += bool(fault)
                    sys.stdout.write(f"{file}: {column}={value!r}{fault}\n" if fault else "")
            took = time.process_time() - from_s
            sys.stdout.write(f"{file}: {tried - at} cells in {took:.0f} s, {faults - before} broken\n")
            sys.stdout.flush()
    total = f"{tried} cells in {time.process_time() - start:.0f} s of processor time"
    sys.stdout.write(f"{total}: {faults} broken\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
