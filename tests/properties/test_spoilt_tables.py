"""Every column of every kind of table, spoilt in turn: each row is predicted or has its reason, and nothing else moves.

Rows are taken from the measured tables. A few of each kind run here; ``make test-all`` takes more of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paleo.tables.cells import read_table
from paleo.tables.run_tables import find_table_kind, table_kinds
from tests.properties.spoilt_tables import FILES, SPOILT, broken_fit, cells, one_evaluation, spoil


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_a_spoilt_cell_leaves_out_its_row_alone(shared: Path, file: str) -> None:
    assert spoil(shared / "measurements" / file, 2, ["abc"]) == []


@pytest.mark.parametrize("file", FILES)
def test_every_spoilt_cell_of_more_rows(shared: Path, file: str) -> None:
    assert spoil(shared / "measurements" / file, 2, SPOILT) + spoil(shared / "measurements" / file, 7, ["", "0"]) == []


@pytest.mark.slow
def test_the_tables_are_of_every_kind(shared: Path) -> None:
    found = {find_table_kind(read_table(shared / "measurements" / file).columns).name for file in FILES}
    assert found == set(table_kinds())


@pytest.mark.parametrize("file", FILES)
def test_fits_of_tables_with_a_spoilt_cell(shared: Path, tmp_path: Path, file: str) -> None:
    with one_evaluation():
        spoilt = list(cells(shared / "measurements" / file, 2, SPOILT))[::29]
        found = [(column, value, broken_fit(table, tmp_path)) for column, value, table in spoilt]
    assert [each for each in found if each[2]] == []


@pytest.mark.parametrize(
    ("file", "column", "value"),
    [
        ("sparse_attention.csv.gz", "library", "nan"),
        ("mlperf/training_runs.csv", "pp", "-inf"),
        ("mlperf/training_runs.csv", "n_gpus", "\x00"),
        ("training_kernels.csv", "m", "0"),
        ("elementwise.csv.gz", "shape", "0"),
    ],
)
def test_fits_that_raised_once(shared: Path, tmp_path: Path, file: str, column: str, value: str) -> None:
    with one_evaluation():
        spoilt = [table for name, _, table in cells(shared / "measurements" / file, 2, [value]) if name == column]
        assert [broken_fit(table, tmp_path) for table in spoilt] == [""]
