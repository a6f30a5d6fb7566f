"""The ledger of sources left out: none gets worse by more than two points unless CHANGELOG.md says why."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from paleo.calibrate.command import LEDGER_TABLES, SOURCE_ERROR_COLUMNS, step_errors_by_source, worsened_sources

ROOT = Path(__file__).resolve().parents[2]
LEDGER = ROOT / "docs" / "ledger.csv"
#: Kinds of tables that lie in a folder of ``measurements``.
FOLDERS = {"inference": "mlperf/inference"}


def unreleased() -> str:
    """The first section of the changelog, which a change adds its lines to."""
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1]


def test_the_ledger_names_each_source_once() -> None:
    kept = pd.read_csv(LEDGER)
    assert tuple(kept.columns) == SOURCE_ERROR_COLUMNS and not kept.duplicated(["table", "source"]).any()
    assert len(kept) >= 25 and kept["left_out_error"].between(0.0, 1.0).all()


@pytest.mark.shared
@pytest.mark.slow
def test_no_source_left_out_gets_worse_without_a_line_in_the_changelog(shared: Path) -> None:
    """``paleo calibrate --fit … --only ledger -o docs/ledger.csv`` writes it anew, once the changelog says why."""
    files = [shared / "measurements" / f"{FOLDERS.get(kind, kind)}.csv" for kind in LEDGER_TABLES]
    now = step_errors_by_source([str(file) for file in files])
    unexplained = [line for source, line in worsened_sources(pd.read_csv(LEDGER), now) if source not in unreleased()]
    assert unexplained == []
