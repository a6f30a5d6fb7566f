"""Sweeps: the product of all axes, the same table whoever computes it, nothing lost when a worker dies."""

from __future__ import annotations

import csv
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo import questions
from paleo.cli import run_command_line as paleo
from paleo.errors import SpecError
from paleo.predict import predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.studies.cost import Tariff, convert_training_amount, estimate_training
from paleo.studies.purchase import compare_systems
from paleo.studies.sweep import (
    _PART,
    SweepJob,
    SweepStudy,
    _evaluate,
    _job_of,
    _processes,
    _Record,
    _serial,
    dask_evaluator,
    load_sweep_study,
    write_sweep_table,
)
from paleo.studies.what_if import change_system

STUDY = """
models: [lenet]
systems: [aws-p3dn.24xlarge, dgx-a100-80gb]
run: {optimizer: momentum}
axes:
  gpus: [1, 8]
  batch: [64, 128]
  system.device.memory.bandwidth: [x0.5, x1, 3 TB/s]
  epochs: [1, 90]
  gpu_price: [1 USD/h, 3 USD/h]
  electricity: [0.1 USD/kWh]
  pue: [1.1, 1.5]
"""


def test_amounts_of_a_study_are_written_as_on_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace("epochs: [1, 90]", "samples: [4M, 1000]"))
    assert load_sweep_study(path).axes["samples"] == [4e6, 1000]
    path.write_text(STUDY.replace("epochs: [1, 90]", "samples: [4 USD]"))
    with pytest.raises(SpecError, match="4 USD"):
        load_sweep_study(path)


@pytest.fixture
def study(tmp_path: Path) -> SweepStudy:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return load_sweep_study(path)


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_the_table_is_the_product_of_all_axes_in_order(study: SweepStudy, tmp_path: Path) -> None:
    assert write_sweep_table(study, tmp_path / "t.csv") == study.row_count == 2 * 2 * 2 * 3 * 2 * 2 * 1 * 2
    table = rows(tmp_path / "t.csv")
    names = ("system", "gpus", "batch", "system.device.memory.bandwidth", "epochs", "gpu_price", "pue")
    seen = [tuple(row[name] for name in names) for row in table]
    assert len(set(seen)) == len(table)
    assert seen[0] == ("aws-p3dn.24xlarge", "1", "64", "x0.5", "1", "1 USD/h", "1.1")
    assert seen[1][-1] == "1.5"  # the last axis turns fastest
    assert not list(tmp_path.glob("*.parts"))


@pytest.mark.slow
def test_every_row_is_what_the_library_says(study: SweepStudy, tmp_path: Path) -> None:
    write_sweep_table(study, tmp_path / "t.csv")
    row = next(
        row for row in rows(tmp_path / "t.csv")
        if row["system"] == "dgx-a100-80gb" and row["gpus"] == "8" and row["batch"] == "128" and row["epochs"] == "90"
        and row["system.device.memory.bandwidth"] == "3 TB/s" and row["gpu_price"] == "3 USD/h" and row["pue"] == "1.5"
    )  # fmt: skip
    model, system = (
        load_model("lenet"),
        change_system(load_system("dgx-a100-80gb"), "device.memory.bandwidth", "3 TB/s"),
    )
    made = predict(model, system, Run(gpus=8, batch=128, optimizer="momentum"))
    wanted = convert_training_amount(model, epochs=90)
    assert wanted is not None
    tariff = Tariff.model_validate({"gpu_price": "3 USD/h", "electricity": "0.1 USD/kWh", "pue": 1.5})
    paid = estimate_training(made, wanted, tariff)
    assert float(row["step_time_s"]) == made.step_time
    assert float(row["time_s"]) == pytest.approx(paid.time, rel=1e-12)
    assert float(row["cost_usd"]) == pytest.approx(paid.cost, rel=1e-12)
    assert float(row["energy_kwh"]) == pytest.approx(paid.energy_kwh, rel=1e-12)
    assert int(row["steps"]) == paid.steps


@pytest.mark.parametrize("systems", [["dgx-h100", "dgx-a100-80gb"], ["dgx-h100", "aws-p5.48xlarge"]])
def test_costs_with_electricity_are_those_of_a_comparison(systems: list[str]) -> None:
    """Machines that nobody offers are one's own, unless a system beside them has a rent."""
    axes = {"gpus": [8], "batch": [64], "samples": [1000], "electricity": ["0.12 USD/kWh"]}
    table = questions.sweep({"models": ["lenet"], "systems": systems, "axes": axes})
    tariff = Tariff.model_validate({"electricity": "0.12 USD/kWh"})
    model, machines = load_model("lenet"), [load_system(name) for name in systems]
    compared = compare_systems(
        model, machines, Run(gpus=8, batch=64), convert_training_amount(model, samples=1000), tariff
    )
    costs = [each.training.cost for each in compared.candidates if each.training is not None]
    assert table["cost_usd"].tolist() == pytest.approx(costs, rel=1e-12)


@pytest.mark.slow
def test_a_data_frame_holds_the_same(study: SweepStudy, tmp_path: Path) -> None:
    write_sweep_table(study, str(tmp_path / "t.csv"))
    written, answered = pd.read_csv(tmp_path / "t.csv"), questions.sweep(study)
    assert written.columns.tolist() == answered.columns.tolist() and len(written) == len(answered) == study.row_count
    for column in ("step_time_s", "cost_usd", "gpus", "pue"):
        assert written[column].tolist() == answered[column].tolist()


def test_a_study_may_be_a_mapping() -> None:
    stated = {"models": ["lenet"], "systems": ["dgx-h100"], "axes": {"gpus": np.array([1, 8, 3000])}}
    table = questions.sweep(stated)
    assert table["gpus"].tolist() == [1, 8, 3000] and table["problem"].tolist()[:2] == ["", ""]
    for change, words in {"gpu": "unknown axis; nearest: 'gpus'", "batch": "a value stands there twice"}.items():
        with pytest.raises(SpecError, match=words):
            questions.sweep({**stated, "axes": {change: [8, 8] if change == "batch" else [8]}})


def test_processes_make_the_same_bytes(study: SweepStudy, tmp_path: Path) -> None:
    write_sweep_table(study, tmp_path / "one.csv")
    write_sweep_table(study, tmp_path / "two.csv", _processes(2))
    assert (tmp_path / "one.csv").read_bytes() == (tmp_path / "two.csv").read_bytes()


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on(study: SweepStudy, tmp_path: Path) -> None:
    target = tmp_path / "t.csv"
    stopped(study, target)
    assert not target.exists()
    asked: list[int] = []

    def counting(given: SweepJob, parts: Sequence[int]) -> Iterator[tuple[int, list[_Record]]]:
        asked.extend(parts)
        return _serial(given, parts)

    write_sweep_table(study, target, counting)
    assert asked == list(range(1, math.ceil(study.point_count / _PART)))  # the first part was kept
    write_sweep_table(study, tmp_path / "whole.csv")
    assert target.read_bytes() == (tmp_path / "whole.csv").read_bytes()


def stopped(study: SweepStudy, target: Path, after: int = 1) -> list[Path]:
    """The parts that a sweep leaves that is stopped after some of them; the first by default."""

    class StopError(Exception):
        pass

    def stop(done: int, count: int) -> None:
        if done == min(after, count):
            raise StopError

    with pytest.raises(StopError):
        write_sweep_table(study, target, progress=stop)
    return sorted(Path(f"{target}.parts").glob("0*.json"))


@pytest.mark.slow
def test_parts_of_another_study_are_not_touched(study: SweepStudy, tmp_path: Path) -> None:
    (part,) = stopped(study, tmp_path / "t.csv")
    before = part.read_bytes()
    with pytest.raises(SpecError, match="another study"):
        write_sweep_table(study.model_copy(update={"models": ["alexnet"]}), tmp_path / "t.csv")
    assert part.read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["study.json", "lock", "0000001.json"])
@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b'"torn'])
def test_files_beside_the_parts_that_are_torn_or_binary_lose_no_part(
    name: str, content: bytes, study: SweepStudy, tmp_path: Path
) -> None:
    stopped(study, tmp_path / "t.csv")
    (tmp_path / "t.csv.parts" / name).write_bytes(content)
    asked: list[int] = []

    def counting(given: SweepJob, parts: Sequence[int]) -> Iterator[tuple[int, list[_Record]]]:
        asked.extend(parts)
        return _serial(given, parts)

    write_sweep_table(study, tmp_path / "t.csv", counting)
    write_sweep_table(study, tmp_path / "whole.csv")
    assert 0 not in asked and (tmp_path / "t.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.slow
def test_a_full_disk_leaves_nothing_that_blocks_the_next_run(tmp_path: Path) -> None:
    """Files may grow to so many bytes: none, a part's lock alone, a part but not the table."""
    text = "models: [lenet]\nsystems: [l4]\naxes: {batch: [" + ", ".join(map(str, range(1, 41))) + "]}\n"
    (tmp_path / "study.yaml").write_text(text)
    script = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0})); " + (
        "from paleo.cli import main; main(['sweep', 'study.yaml', '-o', 't.csv'])"
    )
    for most in (0, 5, 14_000):
        command = [sys.executable, "-c", script.format(most)]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2 and ended.stderr.count("error: ") == 1 and "cannot be written" in ended.stderr
        assert not (tmp_path / "t.csv").exists() and not list(tmp_path.glob("**/*.new"))
    write_sweep_table(load_sweep_study(tmp_path / "study.yaml"), tmp_path / "t.csv")
    write_sweep_table(load_sweep_study(tmp_path / "study.yaml"), tmp_path / "whole.csv")
    assert (tmp_path / "t.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


def test_what_cannot_be_planned_is_a_row_with_its_reason(tmp_path: Path) -> None:
    study = SweepStudy.model_validate(
        {"models": ["lenet"], "systems": ["v100-pcie-16gb"], "axes": {"gpus": [1, 2], "batch": [8]}}
    )
    write_sweep_table(study, tmp_path / "t.csv")
    one, two = rows(tmp_path / "t.csv")
    assert one["problem"] == "" and float(one["step_time_s"]) > 0
    assert "device" in two["problem"] and two["step_time_s"] == "" and two["fits"] == ""


@pytest.mark.slow
def test_parquet_holds_the_same(study: SweepStudy, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    write_sweep_table(study, tmp_path / "t.csv")
    write_sweep_table(study, tmp_path / "t.parquet")
    left, right = pandas.read_csv(tmp_path / "t.csv"), pandas.read_parquet(tmp_path / "t.parquet")
    assert list(left.columns) == list(right.columns) and len(left) == len(right)
    assert (left["time_s"] == right["time_s"]).all() and (left["system"] == right["system"]).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: {gpu: [1]}", "axes.gpu: unknown axis; nearest: 'gpus'"),
        ("axes: {gpus: [0]}", "gpus"),
        ("axes: {gpus: []}", "axes.gpus"),
        ("axes: {gpus: [1, 1]}", "twice"),
        ("axes: {system.device.memory.bandwith: [x2]}", "nearest: 'bandwidth'"),
        ("axes: {system.device.memory.bandwidth: [3]}", "no unit"),
        ("axes: {system.device.name: [x2]}", "no number"),
        ("axes: {'system.levels[7].link.bandwidth': [x2]}", "no \\[7\\]"),
        ("axes: {epochs: [1], samples: [5]}", "state one of them"),
        ("axes: {epochs: [-1]}", "above zero"),
        ("axes: {epochs: [1, 1.0e+308]}", r"1e\+308: expected 0, or 8e-25 to 1e\+18"),
        ("axes: {critical_batch: [1.0e+300]}", r"1e\+300: expected 0, or 8e-25 to 1e\+18"),
        ("axes: {pue: [0.5]}", "pue"),
        ("axes: {batch: [1]}\nrun: {batch: 2}", "keep one"),
        (
            "axes: {batch: ["
            + ",".join(map(str, range(1, 12000)))
            + "], gpus: ["
            + ",".join(map(str, range(1, 12000)))
            + "]}",
            "at most",
        ),
    ],
)
def test_studies_that_make_no_sense(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(f"models: [lenet]\nsystems: [dgx-a100-80gb]\n{text}\n")
    with pytest.raises(SpecError, match=message) as caught:
        load_sweep_study(path)
    assert "study.yaml" in str(caught.value)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    assert paleo(["sweep", str(path)]) == 0
    assert (tmp_path / "study.csv").exists()
    assert paleo(["sweep", str(path), "-o", str(tmp_path / "t.txt")]) == 2
    assert ".csv, .csv.gz or .parquet" in capsys.readouterr().err


# a cluster of separate processes

BIG = {
    "models": ["lenet"],
    "systems": ["dgx-a100-80gb"],
    "axes": {
        "gpus": [1, 2, 4, 8, 16, 32],
        "batch": [8, 16, 32, 64, 128, 256, 512, 1000, 1024, 2048],
        "optimizer": ["sgd", "adam"],
        "samples": [10, 20],
    },
}


@pytest.fixture(params=[(2, 1)], ids=["two workers"])
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Its address and its processes, the scheduler last; ``param`` is the number of workers and their threads."""
    number, threads = request.param
    pytest.importorskip("distributed")
    address = tmp_path / "scheduler.json"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "DASK_DISTRIBUTED__LOGGING__DISTRIBUTED": "error",
    }

    def start(*command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", "distributed.cli." + command[0], *command[1:]],
            env=environment, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    scheduler = start(
        "dask_scheduler", "--host", "127.0.0.1", "--port", "0", "--no-dashboard", "--scheduler-file", str(address)
    )
    workers = [
        start(
            "dask_worker",
            "--scheduler-file",
            str(address),
            "--no-nanny",
            "--nthreads",
            str(threads),
            "--no-dashboard",
            "--host",
            "127.0.0.1",
        )
        for _ in range(number)
    ]
    for _ in range(200):
        if address.exists() and address.stat().st_size:
            break
        time.sleep(0.1)
    import json

    yield json.loads(address.read_text())["address"], [*workers, scheduler]
    for process in (*workers, scheduler):
        process.kill()
        process.wait()


@pytest.mark.filterwarnings("default")
def test_a_cluster_makes_the_same_table_though_a_worker_dies(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two worker processes; one is killed while parts are still missing. The table is the serial one, byte for byte."""
    address, workers = cluster
    study = SweepStudy.model_validate(BIG)
    seen: list[int] = []

    def kill_one(done: int, count: int) -> None:
        seen.append(done)
        if len(seen) == 2:
            assert done < count
            workers[0].send_signal(signal.SIGKILL)

    progress: Callable[[int, int], None] = kill_one
    write_sweep_table(study, tmp_path / "cluster.csv", dask_evaluator(address), progress)
    assert workers[0].wait(timeout=10) == -signal.SIGKILL
    write_sweep_table(study, tmp_path / "serial.csv")
    assert seen == list(range(1, math.ceil(study.point_count / _PART) + 1))  # each part once
    assert (tmp_path / "cluster.csv").read_bytes() == (tmp_path / "serial.csv").read_bytes()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("cluster", [(1, 8)], indirect=True, ids=["eight threads"])
def test_a_cold_worker_of_eight_threads_loses_no_row(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    study = SweepStudy.model_validate(BIG)
    write_sweep_table(study, tmp_path / "cluster.csv", dask_evaluator(cluster[0]))
    write_sweep_table(study, tmp_path / "serial.csv")
    assert (tmp_path / "cluster.csv").read_bytes() == (tmp_path / "serial.csv").read_bytes()


@pytest.mark.filterwarnings("default")
def test_a_scheduler_that_dies_is_one_sentence_and_the_parts_are_kept(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    address, processes_of = cluster
    study = SweepStudy.model_validate(BIG)

    def kill(done: int, count: int) -> None:
        processes_of[-1].kill()

    with pytest.raises(SpecError, match=r"--scheduler tcp.*: went away .*goes on from there"):
        write_sweep_table(study, tmp_path / "t.csv", dask_evaluator(address), kill)
    assert len(list((tmp_path / "t.csv.parts").glob("0*.json"))) >= 1
    write_sweep_table(study, tmp_path / "t.csv")
    write_sweep_table(study, tmp_path / "serial.csv")
    assert (tmp_path / "t.csv").read_bytes() == (tmp_path / "serial.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("cluster", [(1, 1)], indirect=True, ids=["one worker"])
def test_a_cluster_without_a_worker_is_said_and_waited_for(
    cluster: tuple[str, list[subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    address, processes_of = cluster
    said: list[str] = []

    def warn(text: str) -> None:
        said.append(text)
        processes_of[-1].kill()  # a cluster that ends is another sentence

    with pytest.raises(SpecError, match="went away"):
        write_sweep_table(
            SweepStudy.model_validate(BIG), tmp_path / "t.csv", dask_evaluator(address, warn),
            lambda done, count: processes_of[0].kill(),
        )  # fmt: skip
    assert len(said) == 1 and "has no worker; waiting for one" in said[0]


def test_a_scheduler_that_is_not_there_is_one_sentence(
    study: SweepStudy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("paleo.studies.sweep._CONNECT_S", 1)
    with pytest.raises(SpecError, match=r"--scheduler .*: does not answer"):
        write_sweep_table(study, tmp_path / "t.csv", dask_evaluator("tcp://127.0.0.1:9"))


@pytest.mark.slow
def test_a_second_sweep_to_the_same_output_is_refused(study: SweepStudy, tmp_path: Path) -> None:
    refusals = []

    def second(done: int, count: int) -> None:
        with pytest.raises(SpecError) as caught:
            write_sweep_table(study, tmp_path / "link.csv")
        refusals.append(str(caught.value))

    (tmp_path / "link.csv").symlink_to("t.csv")
    write_sweep_table(study, tmp_path / "t.csv", progress=second)
    assert refusals and all(f"another sweep (process {os.getpid()} on " in text for text in refusals)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv", "study.yaml", "t.csv"]


@pytest.mark.slow
@pytest.mark.parametrize("edited", ["node.yaml", "net.yaml", "profile.yaml"])
def test_parts_made_before_a_named_file_changed_are_not_mixed_with_new_ones(tmp_path: Path, edited: str) -> None:
    (tmp_path / "node.yaml").write_text("extend: dgx-a100-80gb\n")
    (tmp_path / "net.yaml").write_text("extend: lenet\n")
    (tmp_path / "profile.yaml").write_text("extend: pytorch-eager\n")
    path = tmp_path / "study.yaml"
    batches = ", ".join(map(str, range(1, 21)))
    path.write_text(
        f"models: [{tmp_path}/net.yaml]\nsystems: [{tmp_path}/node.yaml]\nrun: {{software: {tmp_path}/profile.yaml}}\n"
        f"axes: {{batch: [{batches}]}}\n"
    )

    stopped(load_sweep_study(path), tmp_path / "t.csv")
    with (tmp_path / edited).open("a") as file:
        file.write("# edited\n")
    with pytest.raises(SpecError, match="a file that it names or paleo"):
        write_sweep_table(load_sweep_study(path), tmp_path / "t.csv")


def test_a_worker_with_another_release_or_another_file_says_so(study: SweepStudy, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="another release"):
        _evaluate(replace(_job_of(study), release="older"), 0)
    with pytest.raises(SpecError, match="not what it was"):
        _evaluate(replace(_job_of(study), file_digests={str(tmp_path / "gone.yaml"): "0"}), 0)


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", [lambda text: text[:100], lambda text: "[]", lambda text: text.replace("1", "2")])
def test_a_torn_part_is_computed_again(spoilt: Callable[[str], str], study: SweepStudy, tmp_path: Path) -> None:
    """Torn, of other text, or with digits changed, which its digest tells."""
    part, *_ = stopped(study, tmp_path / "t.csv", after=999)
    part.write_text(spoilt(part.read_text()))
    write_sweep_table(study, tmp_path / "t.csv")
    write_sweep_table(study, tmp_path / "whole.csv")
    assert (tmp_path / "t.csv").read_bytes() == (tmp_path / "whole.csv").read_bytes()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("levels[0].ranks", "x0.3", "2.4, not a whole number"),
        ("devices_per_node", "x0", "is 0, which it cannot be"),
        ("device.memory.bandwidth", "x0", "above zero"),
        ("device.memory.bandwidth", "x" + "9" * 300, "implausibly large"),
        ("levels[0].link.bandwidth", "x0.0000000000000000001", "implausibly small"),
        ("devices_per_node", "x3", "no level has 24 ranks"),
        ("device.vector_peak", "x1000", "below vector_peak"),
        ("levels[0]", "x2", "expected a figure of the item"),
        ("levels[0].nothing", "x2", "is not there"),
    ],
)
def test_a_factor_that_makes_no_system_is_refused(path: str, value: str, message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        change_system(load_system("dgx-a100-80gb"), path, value)
    assert f"axes.system.{path}: " in str(caught.value)


def test_a_factor_of_whole_numbers_and_of_tables() -> None:
    system = load_system("dgx-a100-80gb")
    assert change_system(system, "device.multiprocessors", "x0.5").device.multiprocessors == 54
    assert change_system(system, "device.peak", "x2").device.peak["bf16"] == 2 * system.device.peak["bf16"]
    assert change_system(system, "levels[*].link.latency", "x0").levels[0].link.latency in (0.0, None)


@pytest.mark.slow
def test_an_interrupt_ends_all_processes_without_a_word_of_theirs(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to every process of the group; the table's parts stay, and the first process answers."""
    axes = "{gpus: [8, 16, 32, 64], batch: [1, 2, 4, 8, 16, 32], software: [pytorch-eager, megatron-core]}"
    (tmp_path / "study.yaml").write_text(f"models: [resnet50, gpt2]\nsystems: [dgx-a100-80gb]\naxes: {axes}\n")
    command = [sys.executable, "-m", "paleo", "sweep", "study.yaml", "--jobs", "2", "-o", "table.csv"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while len(children.read_text().split()) < 3:  # two processes, and what tracks their resources
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in said
