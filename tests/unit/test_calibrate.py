"""``paleo calibrate``: fits of tables that hide known parameters, the files they make, and measuring on a CPU."""

from __future__ import annotations

import builtins
import csv
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paleo.calibrate import command, device_benchmarks
from paleo.calibrate.device_benchmarks import (
    DEFAULT_SUITES,
    PAYLOAD_BYTES,
    SUITES,
    BenchmarkPoint,
    KernelTiming,
    MeasurementFolder,
    WallClock,
    benchmark_points,
    collective_benchmarks,
    device_catalog_name,
)
from paleo.calibrate.fit import Fit, MeasuredRows
from paleo.calibrate.kernel_fits import (
    MIN_ROWS_TO_HOLD_OUT,
    FittedEntry,
    calibration_yaml,
    calibrations_by_hardware,
    has_kernel_families,
    kernel_fit_jobs,
    run_kernel_fits,
)
from paleo.errors import SpecError
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.kernels import device_datasheet
from paleo.specs.calibration import load_calibration
from paleo.specs.device import load_device
from paleo.tables.kernels import KERNEL_TABLES
from paleo.tables.run_tables import find_table_kind

TRUE = GemmParameters(launch_time=5e-6, efficiency=0.8, bandwidth_efficiency=0.7)


def table(rows: int = 300, device: str = "l40s", noise: float = 0.02) -> pd.DataFrame:
    """Products priced with known parameters and a little noise, in place of measured ones."""
    random = np.random.default_rng(0)
    m, n, k = np.rint(2 ** random.uniform(5, 13, (3, rows)))
    frame = pd.DataFrame({"m": m, "n": n, "k": k, "batch": 1.0}).assign(
        source="somebody", device=device, dtype="bf16", library="cuBLAS 12"
    )
    seconds = KERNEL_TABLES["gemm"].predict_times(frame, device_datasheet(load_device(device), "bf16"), TRUE)
    return frame.assign(time_us=1e6 * seconds * np.exp(random.normal(0, noise, rows)))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    table().to_csv(path, index=False)
    return path


# --- fits to files -------------------------------------------------------------------------------------------------


def test_a_fit_writes_a_calibration_that_predicts_its_table(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.yaml"
    assert command.fit_tables([str(file)], output=str(out), today="2026-01-02") == 0
    made = load_calibration(str(out))
    (entry,) = made.entries
    assert (made.device_or_system, entry.family, entry.stack, entry.date) == (
        "l40s",
        "gemm.tensor",
        "back-to-back",
        "2026-01-02",
    )
    assert entry.source == "mine.csv (somebody)" and entry.library == "cuBLAS 12"
    assert entry.residual is not None and entry.residual.mape < 0.04 and entry.residual.rows == entry.rows_held_out > 40
    assert entry.parameters["launch_time"] == pytest.approx(TRUE.launch_time, rel=0.15)
    assert entry.parameters["efficiency"] == pytest.approx(TRUE.efficiency, rel=0.15)
    assert set(entry.uncertainty) <= set(entry.parameters)
    frame = table()
    own, inherited = (
        find_table_kind(frame.columns, one).predict(frame).values / (frame["time_us"].to_numpy() * 1e-6)
        for one in (made, None)
    )
    assert np.mean(np.abs(own - 1)) < 0.04 < np.mean(np.abs(inherited - 1))


def fits_of(tables: Sequence[Path], only: Sequence[str] = ()) -> list[FittedEntry]:
    return [
        each for fits_of_job in run_kernel_fits(kernel_fit_jobs(tables, only), "2026-01-02") for each in fits_of_job
    ]


def test_fits_are_deterministic(file: Path) -> None:
    one, two = (calibrations_by_hardware(fits_of([file])) for _ in range(2))
    assert calibration_yaml(one["l40s"]) == calibration_yaml(two["l40s"])


def test_other_families_of_a_file_are_kept(file: Path, tmp_path: Path) -> None:
    entry = load_calibration("h100-sxm5-80gb").entries[0].model_copy(update={"family": "memory.rope"})
    old = load_calibration("h100-sxm5-80gb").model_copy(update={"device_or_system": "l40s", "entries": (entry,)})
    (tmp_path / "l40s.yaml").write_text(calibration_yaml(old))
    assert command.fit_tables([str(file)], output_dir=str(tmp_path)) == 0
    made = load_calibration(str(tmp_path / "l40s.yaml"))
    assert [one.family for one in made.entries] == ["gemm.tensor", "memory.rope"]


def test_a_handful_of_rows_is_fitted_whole_and_says_so(tmp_path: Path) -> None:
    few = tmp_path / "few.csv"
    table(MIN_ROWS_TO_HOLD_OUT - 1).to_csv(few, index=False)
    (fitted,) = fits_of([few])
    assert fitted.entry.rows_held_out == 0 and fitted.entry.residual is None
    assert fitted.entry.notes is not None and "none held out" in fitted.entry.notes


def test_tables_that_no_family_is_fitted_to_are_passed_over(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    pd.DataFrame({"a": [1]}).to_csv(other, index=False)
    assert has_kernel_families(file) and not has_kernel_families(other)
    assert [job.hardware for job in kernel_fit_jobs([other, file])] == ["l40s"]


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"output": "out.txt"}, "ends in .yaml"),
        ({"output_dir": "nowhere"}, "no such folder"),
        ({"output": "a.yaml", "output_dir": "."}, "exclude"),
        ({"only": ["l40"]}, "nearest: 'l40s'"),
    ],
)
def test_bad_options_of_a_fit(file: Path, more: dict[str, Any], word: str) -> None:
    with pytest.raises(SpecError, match=word):
        command.fit_tables([str(file)], **more)


def test_one_file_is_for_one_device(tmp_path: Path) -> None:
    both = tmp_path / "both.csv"
    pd.concat([table(60), table(60, "b200")]).to_csv(both, index=False)
    with pytest.raises(SpecError, match="2 subjects"):
        command.fit_tables([str(both)], output=str(tmp_path / "out.yaml"))


def test_without_scipy_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *arguments: Any, **named: Any) -> Any:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, *arguments, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    frame = table(60)
    rows = MeasuredRows(
        frame, device_datasheet(load_device("l40s"), "bf16"), "graph", frame["time_us"].to_numpy() * 1e-6
    )
    with pytest.raises(SpecError, match=r"paleo-perf\[fit\]"):
        Fit(KERNEL_TABLES["gemm"], [rows], GemmParameters()).run()


@pytest.mark.shared
def test_shipped_calibrations_are_those_that_the_tables_give(shared: Path) -> None:
    """``paleo calibrate --fit ../shared/measurements/*.csv*`` makes all of them; one device is made again here."""
    tables = [shared / "measurements" / name for name in ("rnn.csv", "conv.csv")]
    again = fits_of(tables, ["titan-x-maxwell"])
    shipped = {(entry.family, entry.stack): entry for entry in load_calibration("titan-x-maxwell").entries}
    assert {one.entry.family for one in again} == {"rnn.vector", "conv.vector"}
    for one in again:
        known = shipped[one.entry.family, one.entry.stack]
        assert one.entry.parameters == pytest.approx(known.parameters, rel=0.02)
        assert one.entry.residual is not None and known.residual is not None
        assert one.entry.residual.mape == pytest.approx(known.residual.mape, abs=0.003)


@pytest.mark.slow
def test_fits_side_by_side_are_those_in_turn(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill starts from decode's fit, on four processors as on one."""
    sizes = list(itertools.product(("context", "generation", "encoder"), (1, 4, 16), (256, 1024, 4096)))
    rows = pd.DataFrame(sizes, columns=["phase", "batch", "kv_len"]).assign(
        source="s", device="h100-sxm5-80gb", library="fa3", dtype="bf16", q_heads=16, kv_heads=16, head_dim=64
    )
    rows["q_len"] = rows["kv_len"].where(rows["phase"] != "generation", 1)
    rows = rows.assign(causal=rows["phase"] == "context", time_us=5.0 + rows["batch"] * rows["kv_len"] / 500.0)
    attention = tmp_path / "attention.csv"
    rows.to_csv(attention, index=False)
    work = kernel_fit_jobs([attention, file])

    def fitted(processors: int) -> tuple[list[str], str]:
        monkeypatch.setattr("os.cpu_count", lambda: processors)
        started = list[str]()
        return started, repr(list(run_kernel_fits(work, "2026-01-02", lambda job: started.append(job.label))))

    (in_turn, first), (side_by_side, second) = fitted(1), fitted(4)
    assert sorted(in_turn) == sorted(side_by_side) and len(in_turn) == 4
    assert first == second


# --- what is measured ----------------------------------------------------------------------------------------------


def test_points_are_rows_of_known_tables() -> None:
    made = benchmark_points(DEFAULT_SUITES, ("fp32", "bf16"), 4096)
    tables = {"gemm", "elementwise", "attention", "training_kernels", "conv", "rnn", "copies"}
    assert {point.table for point in made} == tables
    assert len({(point.table, point.row_key) for point in made}) == len(made)
    for point in made:
        row = {"source": "s", "device": "l40s", "library": "l", "time_us": 1.0, **point.row}
        if point.table != "copies":
            assert find_table_kind(row).name == point.table


def test_a_short_run_has_some_of_each() -> None:
    assert len({point.table for point in benchmark_points(DEFAULT_SUITES, ("fp32", "fp16"), 4096)[:6]}) == 6


def test_most_points_can_be_predicted() -> None:
    made = [
        one for one in benchmark_points(DEFAULT_SUITES, ("fp16",), 8192) if one.table not in ("copies", "attention")
    ]
    for name in {point.table for point in made}:
        rows = [{**point.row, "source": device_benchmarks.SOURCE_NAME, "device": "h100-sxm5-80gb",
            "library": "PyTorch 2.9",
                 "timing": "graph", "time_us": 1.0} for point in made if point.table == name]  # fmt: skip
        frame = pd.DataFrame(rows)
        assert (find_table_kind(frame.columns).predict(frame).failure_reasons == "").mean() > 0.9


def test_largest_bounds_the_sizes() -> None:
    assert max(point.row["m"] for point in benchmark_points(("gemm",), ("fp32",), 500)) <= 500
    with pytest.raises(SpecError, match="nearest: 'gemm'"):
        benchmark_points(("gem",), ("fp32",), 500)


def test_collectives_cover_nodes_and_payloads() -> None:
    made = collective_benchmarks(16, 8)
    assert {(point.row["ranks"], point.row["ranks_per_node"]) for point in made} == {(2, 2), (4, 4), (8, 8), (16, 8)}
    assert {point.row["bytes"] for point in made} == set(PAYLOAD_BYTES)
    row = {"source": "s", "system": "dgx-h100", "library": "l", "time_us": 1.0, **made[0].row}
    assert find_table_kind(row).name == "collective"


@dataclass
class CountingClock:
    """A clock that calls everything once and says one microsecond."""

    calls: int = 0

    def time_calls(
        self, calls: Sequence[device_benchmarks.KernelCall], flush: device_benchmarks.KernelCall | None
    ) -> KernelTiming:
        for call in calls:
            call()
        if flush is not None:
            flush()
        self.calls += 1
        return KernelTiming(1e-6, "graph")

    def time_eager(self, call: device_benchmarks.KernelCall) -> KernelTiming:
        return KernelTiming(self.time_calls([call], None).seconds, "eager")


def cpu_bench() -> device_benchmarks.DeviceBenchmarkRunner:
    pytest.importorskip("torch")
    return replace(device_benchmarks.device_benchmark_runner("cpu", "epyc-9654", "2026-01-02"), clock=CountingClock())


@pytest.mark.torch
@pytest.mark.parametrize("suite", sorted(SUITES))
def test_every_suite_runs_on_a_cpu(suite: str) -> None:
    bench = cpu_bench()
    largest = {"attention": 129, "rnn": 256, "conv": 60, "deepbench": 40}.get(suite, 128)
    dtypes = ("bf16",) if suite == "attention" else ("fp32",)
    made = list(SUITES[suite](dtypes, largest))
    assert made
    for point in made[:: max(1, len(made) // {"rnn": 3, "attention": 6}.get(suite, 12))]:
        row = bench.measure(point)
        assert row["time_us"] == 1.0 and row["device"] == "epyc-9654" and row["date"] == "2026-01-02"
        assert row["timing"] == ("eager" if point.row.get("launch") == "eager" else "graph")


@pytest.mark.torch
def test_measured_points_are_not_measured_again(tmp_path: Path) -> None:
    bench = cpu_bench()
    wanted = benchmark_points(("gemm", "copies"), ("fp32",), 64)
    tables = MeasurementFolder(tmp_path, bench.name, bench.library)
    written, failed = device_benchmarks.run_benchmarks(bench, wanted[:3], tables, 60.0)
    assert (written, failed) == (3, [])
    again = MeasurementFolder(tmp_path, bench.name, bench.library)
    assert device_benchmarks.run_benchmarks(bench, wanted, again, 60.0)[0] == len(wanted) - 3
    assert device_benchmarks.run_benchmarks(bench, wanted, again, 60.0)[0] == 0
    with again.path("gemm").open() as stream:
        assert len(list(csv.DictReader(stream))) == sum(point.table == "gemm" for point in wanted)


@pytest.mark.torch
def test_a_budget_ends_a_run_and_a_failure_does_not(tmp_path: Path) -> None:
    bench = cpu_bench()
    tables = MeasurementFolder(tmp_path, bench.name, bench.library)
    assert device_benchmarks.run_benchmarks(bench, benchmark_points(("gemm",), ("fp32",), 64), tables, -1.0) == (0, [])
    broken = BenchmarkPoint(
        "gemm", {"dtype": "fp32", "m": 64, "n": 64, "k": 64, "batch": -2, "trans_a": "N", "trans_b": "N"}
    )
    huge = BenchmarkPoint(
        "elementwise", {"op": "copy", "shape": "9" * 15, "dtype": "fp32", "bytes_moved": 8, "cache": "warm"}
    )
    written, failed = device_benchmarks.run_benchmarks(bench, [huge, broken], tables, 60.0)
    assert len(failed) == 1 and failed[0].startswith("elementwise") and written == 1


@pytest.mark.torch
def test_the_whole_path_on_a_cpu(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    code = command.calibrate_device(
        device="cpu", name="epyc-9654", output_dir=str(tmp_path), budget=20.0,
        suites=("gemm", "copies"), dtypes=("fp32",), largest=64,
    )  # fmt: skip
    assert code == 0
    made = load_calibration(str(tmp_path / "epyc-9654.yaml"))
    assert made.device_or_system == "epyc-9654" and {entry.family for entry in made.entries} == {"gemm.simt"}
    assert (tmp_path / "epyc-9654.copies.csv").is_file()


@pytest.mark.torch
def test_what_measuring_needs_is_said() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        with pytest.raises(SpecError, match=r"sees no CUDA device\. Measuring needs an NVIDIA GPU"):
            command.calibrate_device()
    with pytest.raises(SpecError, match="expected cuda"):
        command.calibrate_device(device="tpu:0")
    with pytest.raises(SpecError, match="such as --name epyc-9654"):
        command.calibrate_device(device="cpu")
    with pytest.raises(SpecError, match="no such folder"):
        command.calibrate_device(device="cpu", name="epyc-9654", output_dir="nowhere")


def test_devices_are_known_by_what_cuda_calls_them() -> None:
    assert device_catalog_name("NVIDIA H100 80GB HBM3", None) == "h100-sxm5-80gb"
    with pytest.raises(SpecError, match="say --name NAME"):
        device_catalog_name("NVIDIA Z900", None)


def test_wall_clock_takes_calls_in_turn() -> None:
    said: list[str] = []
    timing = WallClock().time_calls([lambda: said.append("a"), lambda: said.append("b")], lambda: said.append("-"))
    assert timing.timing_method == "back-to-back" and timing.seconds >= 0
    assert said[:4] == ["-", "a", "-", "b"]
