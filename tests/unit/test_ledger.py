"""Sources left out: the ledger, its comparison, and all tables of a folder in one call of ``paleo calibrate --fit``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.calibrate import command
from paleo.calibrate.command import SOURCE_ERROR_COLUMNS, kernel_source_errors, worsened_sources
from paleo.calibrate.kernel_fits import kernel_fit_jobs
from paleo.errors import SpecError
from paleo.tables.kinds._serving import ServingTable
from paleo.tables.run_tables import RUN_TABLES, RunTable
from tests.unit.test_calibrate import table


def ledger(left_out: float, source: str = "lab") -> pd.DataFrame:
    return pd.DataFrame(
        [("steps.csv", source, 20, 0.05, 0.0, left_out, 0.0, 0.9, 0.85, 0.3)], columns=SOURCE_ERROR_COLUMNS
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Products of two sources, one of which is a quarter slower, and a table that nothing is fitted to."""
    path = tmp_path / "measured"
    path.mkdir()
    slow = table(200).assign(source="elsewhere")
    slow["time_us"] *= 1.25
    pd.concat([table(300), slow]).to_csv(path / "gemm.csv", index=False)
    pd.DataFrame({"colour": ["red"]}).to_csv(path / "colours.csv", index=False)
    return path


def test_two_points_are_let_pass_and_three_are_named() -> None:
    assert worsened_sources(ledger(0.10), ledger(0.119)) == []
    assert [source for source, _ in worsened_sources(ledger(0.10), ledger(0.13))] == ["lab"]
    assert worsened_sources(ledger(0.10), ledger(0.05)) == []


def test_a_source_that_has_gone_is_named() -> None:
    assert [source for source, _ in worsened_sources(ledger(0.10), ledger(0.10, "another"))] == ["lab"]


@pytest.mark.slow
def test_a_source_left_out_is_priced_by_the_others(folder: Path) -> None:
    (job,) = kernel_fit_jobs([folder / "gemm.csv"])
    errors = dict(kernel_source_errors(job))
    assert set(errors) == {"somebody", "elsewhere"}
    assert errors["elsewhere"].bias == pytest.approx(-np.log(1.25), abs=0.05)
    assert errors["somebody"].bias == pytest.approx(np.log(1.25), abs=0.05)


@pytest.mark.slow
def test_a_folder_is_fitted_in_one_call_and_to_the_last_digit_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        assert command.fit_tables([str(folder)], output_dir=str(tmp_path / name), today="2026-01-01") == 0
        written.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert written[0] == written[1] and set(written[0]) == {"l40s.yaml"}
    said = capsys.readouterr()
    assert "elsewhere" in said.out and "not fitted: colours.csv" in said.err


@pytest.mark.parametrize(("more", "word"), [({}, "--output-dir"), ({"output_dir": ".", "only": ["l40s"]}, "l40s")])
def test_a_folder_is_fitted_whole(folder: Path, more: dict[str, object], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        command.fit_tables([str(folder)], **more)  # type: ignore[arg-type]


def test_a_folder_fits_intervals_to_training_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Predictions of engines state no parts of an interval: their tables stand in the ledger, cited by no fit."""
    for kind in ("llm_iterations", "cnn_iterations", "other_iterations", "serving", "inference"):
        row = dict.fromkeys(RUN_TABLES[kind].identifying_columns, 1)
        pd.DataFrame([row]).to_csv(tmp_path / f"{kind}.csv", index=False)
    fit_tables, fitted = command.fit_tables, dict[tuple[str, ...], list[str]]()
    monkeypatch.setattr(
        command, "fit_tables", lambda files, only, **_: fitted.update({only: [Path(file).stem for file in files]})
    )
    monkeypatch.setattr(command, "_write_source_errors", lambda files, _: len(files))
    assert fit_tables([str(tmp_path)], output_dir=str(tmp_path)) == len(command.LEDGER_TABLES) == 5
    steps = ["cnn_iterations", "llm_iterations", "other_iterations"]
    assert fitted == {("arithmetic",): ["llm_iterations"], ("intervals",): steps}
    assert "not fitted: inference.csv, serving.csv" in capsys.readouterr().err


def test_runs_of_engines_can_be_predicted_without_a_source() -> None:
    table: RunTable = ServingTable()
    other = table.without_fits_to_source("GPUStack performance lab")
    assert isinstance(other, ServingTable) and (table.excluded_source, other.excluded_source) == (
        "",
        "GPUStack performance lab",
    )
