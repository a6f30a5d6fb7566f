"""Measured steps under consistency models. The server's two constants are fitted to four rates of P100 workers; local
steps, rings and servers on stated links have nothing fitted but the rate and the share of copies inside a node."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.tables.validation import FileReport, validate_file


@pytest.fixture(scope="module")
def report(shared: Path) -> FileReport:
    return validate_file(shared / "measurements" / "consistency.csv")


def errors(report: FileReport, chosen: pd.Series) -> np.ndarray:
    mask = chosen.to_numpy(dtype=bool) & report.predicted_row_mask
    assert mask.any()
    return np.abs(report.predictions.values[mask] / report.measured[mask] - 1.0)


@pytest.mark.shared
def test_every_row_is_predicted(report: FileReport) -> None:
    assert report.unsupported_reasons == {}


@pytest.mark.shared
@pytest.mark.parametrize("source", ["CM-DARE", "ICAC 2019"])
def test_asynchronous_servers(report: FileReport, source: str) -> None:
    """One to eight workers, four cards, one and two servers, distant and mixed workers."""
    rows = report.frame["source"].str.contains(source) & (report.frame["workers"] > 1)
    assert errors(report, rows).mean() <= 0.07


@pytest.mark.shared
@pytest.mark.parametrize(("network", "bar"), [("10GbE", 0.08), ("100GbIB", 0.085), ("100GbE with TCP", 0.15)])
def test_all_reduce_against_servers(report: FileReport, network: str, bar: float) -> None:
    assert errors(report, report.frame["system_text"].str.startswith(network)).mean() <= bar


@pytest.mark.shared
def test_local_steps_over_slow_links(report: FileReport) -> None:
    """Outer steps every 1 to 128 inner ones over 50 Mb/s to 10 Gb/s."""
    assert errors(report, report.frame["consistency"].str.startswith("diloco")).mean() <= 0.08


@pytest.mark.shared
@pytest.mark.parametrize("exchange", ["neighbours", "hierarchical_neighbours"])
def test_what_gossip_saves(report: FileReport, exchange: str) -> None:
    """The step of an all-reduce over that of averaging with neighbours, on 4 to 128 GPUs."""
    frame = report.frame.assign(predicted=report.predictions.values, value=report.measured)
    summed, averaged = (
        frame[frame["source"].str.contains("BlueFog") & (frame["exchange"] == name)].set_index("workers")
        for name in ("all_reduce", exchange)
    )
    ratios = [summed[column] / averaged[column] for column in ("predicted", "value")]
    assert len(ratios[0]) == 6 and (ratios[0] / ratios[1] - 1.0).abs().mean() <= 0.08
