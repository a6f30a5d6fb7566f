"""Measured training with compressed gradients: FLOP/s, steps and speed-ups, and whether compression pays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.tables.kinds._compression import megatron_deepspeed_flops
from paleo.tables.validation import FileReport, validate_file
from paleo.units import TERA


@pytest.fixture(scope="module")
def report(shared: Path) -> FileReport:
    return validate_file(shared / "measurements" / "compression.csv")


def ratio(report: FileReport, chosen: pd.Series) -> np.ndarray:
    mask = chosen.to_numpy(dtype=bool) & report.predicted_row_mask
    assert mask.any()
    return report.predictions.values[mask] / report.measured[mask]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("source", "compressor", "bar"),
    [
        ("ZeRO++", "none", 0.08),  # three numbers of the fabric are fitted to 8 of the 32 rows
        ("ZeRO++", "zeropp", 0.08),
        ("1-bit Adam", "none", 0.12),
        ("1-bit Adam", "onebit", 0.12),
        ("Deep Gradient Compression", "dgc", 0.09),
        ("Deep Gradient Compression", "none", 0.11),  # a latency is fitted to 3 of these 17
    ],
)
def test_runs_with_and_without_compression(report: FileReport, source: str, compressor: str, bar: float) -> None:
    frame = report.frame
    rows = frame["source"].str.contains(source, regex=False) & frame["compressor"].str.startswith(compressor)
    assert np.abs(ratio(report, rows) - 1.0).mean() <= bar


@pytest.mark.shared
def test_speed_up_of_one_bit_adam(report: FileReport) -> None:
    """Dense over compressed steps, on one to eight nodes over two networks: 17.7 %."""
    frame = report.frame.assign(predicted=report.predictions.values)
    frame = frame[frame["source"].str.contains("1-bit Adam", regex=False)]
    keys = ["batch_per_gpu", "gpus", "link_bytes_per_s"]
    dense, coded = (frame[(frame["compressor"] == "none") == plain].set_index(keys) for plain in (True, False))
    predicted, measured = (dense[column] / coded[column] for column in ("predicted", "step_s"))
    assert len(predicted) == 12 and (predicted / measured - 1.0).abs().mean() <= 0.18


@pytest.mark.shared
def test_flop_of_zeropp_rows_count_the_pass_that_is_computed_again(report: FileReport) -> None:
    """Counted without it, 18B's dense step of 2048 tokens over one port would end before its gathers and its scatter,
    six bytes a parameter, had crossed that port."""
    rows = report.frame[(report.frame["sharding"] == "zero3") & (report.frame["compressor"] == "none")]
    row = rows[(rows["parameters"] == 18e9) & (rows["tokens_per_gpu"] == 2048)].nsmallest(1, "link_bytes_per_s").iloc[0]
    rate, crossing = row["tflops_per_gpu"] * TERA, 6.0 * 18e9 / row["link_bytes_per_s"]
    assert 6.0 * 18e9 * 2048 / rate < crossing < megatron_deepspeed_flops(18e9, 2048) / rate


@pytest.mark.shared
def test_the_verdict_is_right(report: FileReport) -> None:
    """Of all pairs that differ in the compressor alone, those where it pays and those where it does not."""
    frame = report.frame.assign(predicted=report.predictions.values, value=report.measured)
    frame = frame[report.predicted_row_mask & ~frame["time_over_dense"].notna() & (frame["gpus"] > 4)]
    keys = ["source", "model", "batch_per_gpu", "tokens_per_gpu", "gpus", "link_bytes_per_s"]
    better = np.where(frame["step_s"].notna(), -1.0, 1.0)  # a shorter step, or more speed
    frame = frame.assign(value=frame["value"] * better, predicted=frame["predicted"] * better)
    dense, coded = (frame[(frame["compressor"] == "none") == plain] for plain in (True, False))
    best = dense.groupby(keys, dropna=False, as_index=False)[["value", "predicted"]].max()
    pairs = coded[[*keys, "value", "predicted"]].merge(best, on=keys, suffixes=("", "_dense"))
    right = (pairs["value"] > pairs["value_dense"]) == (pairs["predicted"] > pairs["predicted_dense"])
    assert len(right) >= 25 and right.mean() >= 0.9


@pytest.mark.shared
def test_rows_that_are_not_predicted_say_why(report: FileReport) -> None:
    assert report.unsupported_reasons == {
        "compressor 'randomk': the share of elements that is sent is not stated": 2,
        "compressor 'topk': the share of elements that is sent is not stated": 2,
        "a dense run beside itself: time_over_dense is one": 3,
    }
