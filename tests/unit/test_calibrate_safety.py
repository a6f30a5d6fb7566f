"""Nothing that was fitted or measured is lost, and nothing is overwritten that nobody named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paleo.calibrate import command
from paleo.calibrate.device_benchmarks import BenchmarkPoint, MeasurementFolder
from paleo.calibrate.kernel_fits import count_unusable_rows, kernel_fit_jobs
from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.kernels import device_datasheet
from paleo.specs.calibration import load_calibration
from paleo.specs.catalog import catalog_root
from paleo.specs.device import load_device
from paleo.tables.kernels import KERNEL_TABLES

TRUE = GemmParameters(launch_time=5e-6, efficiency=0.8, bandwidth_efficiency=0.7)


def products(device: str, rows: int = 40) -> pd.DataFrame:
    random = np.random.default_rng(0)
    m, n, k = np.rint(2 ** random.uniform(5, 13, (3, rows)))
    frame = pd.DataFrame({"m": m, "n": n, "k": k, "batch": 1.0}).assign(
        source="somebody", device=device, dtype="bf16", library="cuBLAS 12"
    )
    seconds = KERNEL_TABLES["gemm"].predict_times(frame, device_datasheet(load_device(device), "bf16"), TRUE)
    return frame.assign(time_us=1e6 * seconds)


def write(path: Path, *tables: pd.DataFrame) -> str:
    pd.concat(tables).to_csv(path, index=False)
    return str(path)


def test_a_fit_that_names_no_output_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = catalog_root() / "hardware_specs" / "calibrations"
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert run(["calibrate", "--fit", write(tmp_path / "t.csv", products("l40s", rows=1))]) == 2
    assert "name a file with -o, or a folder with --output-dir" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_finished_fits_are_kept_when_a_later_one_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = write(tmp_path / "t.csv", products("a100-sxm4-80gb"), products("l40s"))
    whole = command.run_kernel_fits

    def stopped(work: Any, date: str, report: Any) -> Any:
        yield from whole(work[:1], date, report)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run_kernel_fits", stopped)
    with pytest.raises(KeyboardInterrupt):
        command.fit_tables([tables], output_dir=str(tmp_path))
    (kept,) = tmp_path.glob("*.yaml")
    assert load_calibration(kept).entries


def test_rows_that_validate_leaves_out_are_left_out_of_a_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = products("l40s", rows=5)
    bad["m"] = [-1.0, np.nan, np.inf, 0.0, 1e300]
    no_peak, unknown = products("l40s", rows=1), products("l40s", rows=1).assign(device="no such device")
    tables = write(tmp_path / "t.csv", products("l40s"), bad, no_peak.assign(dtype="fp64"), unknown)
    assert count_unusable_rows([tables]) == 7
    assert [sum(len(rows.frame) for rows in job.rows) for job in kernel_fit_jobs([tables])] == [40]
    assert command.fit_tables([tables], output=str(tmp_path / "out.yaml")) == 0
    assert "7 rows left out" in capsys.readouterr().err


def test_a_torn_last_row_is_measured_again_and_not_glued_to_the_next(tmp_path: Path) -> None:
    points = [BenchmarkPoint("gemm", {"m": size, "dtype": "bf16"}) for size in (64, 128, 256)]
    rows = [{"library": "cuBLAS 12", **point.row, "time_us": 1.5} for point in points]
    tables = MeasurementFolder(tmp_path, "l40s", "cuBLAS 12")
    for point, row in zip(points[:2], rows, strict=False):
        tables.append(point, row)
    path = tmp_path / "l40s.gemm.csv"
    path.write_text(path.read_text()[:-3])  # the second row lost its end
    again = MeasurementFolder(tmp_path, "l40s", "cuBLAS 12")
    assert [again.is_measured(point) for point in points] == [True, False, False]
    again.append(points[2], rows[2])
    assert pd.read_csv(path)["m"].tolist() == [64, 256]


@pytest.mark.parametrize("size", ["abc", "", "-1", "1.5", "9" * 5000])
def test_a_world_size_that_is_no_number(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SpecError, match="WORLD_SIZE="):
        command.world_size()
