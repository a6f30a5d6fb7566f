"""Every column of every kind of table, spoilt in turn: each row is predicted or has its reason, and nothing else moves.

Rows are taken from the measured tables. A few of each kind run here; ``make test-all`` takes more of them.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.tables.cells import read_table
from paleo.tables.columns import COLUMNS, RANGES
from paleo.tables.runner import validate_frame
from paleo.tables.tables import table_of, tables

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


def sample(path: Path, rows: int) -> pd.DataFrame:
    """Rows spread over a table."""
    frame = read_table(path)
    part = frame.iloc[np.unique(np.linspace(0, len(frame) - 1, rows).astype(int))].reset_index(drop=True)
    part.attrs = frame.attrs
    return part


def spoil(path: Path, rows: int, values: list[str]) -> list[str]:
    """Say which spoilt cells raise an error or a warning, lose a row, or move a row that was not spoilt."""
    frame = sample(path, rows)
    table = table_of(frame.columns)
    whole = validate_frame("whole", frame, table)
    faults = []
    for column in table.columns:
        for value in values if column in frame.columns else ():
            spoilt = frame.assign(**{column: frame[column].astype(object)})
            spoilt.loc[0, column] = value
            spoilt.attrs = frame.attrs
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    report = validate_frame("spoilt", spoilt, table)
                    counted = int(report.predicted.sum()) + sum(report.unsupported_reasons.values())
                    others = np.array_equal(
                        report.predictions.seconds[1:], whole.predictions.seconds[1:], equal_nan=True
                    )
                    refused = COLUMNS[column].type not in RANGES or value in ("", "nan") or _sound(column, value)
                    if counted != len(frame) or not others:
                        faults.append(f"{column}={value!r}: {counted} of {len(frame)} rows, others as before: {others}")
                    elif not refused and report.predicted[0]:
                        faults.append(f"{column}={value!r} is predicted")
            except Exception as error:
                faults.append(f"{column}={value!r}: {type(error).__name__}: {str(error)[:150]}")
    return faults


def _sound(column: str, value: str) -> bool:
    """Whether a column's range holds a number."""
    number = pd.to_numeric(pd.Series([value]), errors="coerce").to_numpy(dtype=np.float64)
    return bool(RANGES[COLUMNS[column].type].holds(number)[0])


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_spoilt_cell_leaves_out_its_row_alone(shared: Path, file: str) -> None:
    assert spoil(shared / "measurements" / file, 2, ["abc"]) == []


@pytest.mark.parametrize("file", FILES)
def test_every_spoilt_cell_of_more_rows(shared: Path, file: str) -> None:
    assert spoil(shared / "measurements" / file, 2, SPOILT) + spoil(shared / "measurements" / file, 7, ["", "0"]) == []


@pytest.mark.slow
def test_the_tables_are_of_every_kind(shared: Path) -> None:
    found = {table_of(read_table(shared / "measurements" / file).columns).name for file in FILES}
    assert found == set(tables())
