"""Sweeps of fleets: the table, processes, and going on where an earlier run was stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

import paleo
from paleo.cli import run_command_line as run
from paleo.cluster import study as fleets
from paleo.errors import SpecError
from paleo.studies.sweep import local_evaluator, sweep_table, write_sweep_table

JOBS = """jobs:
  - {name: a, duration: 4 h, gpus: 16, deadline: 6 h}
  - {name: b, duration: 9 h, gpus: 4, arrival: 1 h}
  - {name: c, model: lenet, samples: 60k, gpus: 8, arrival: 1 h, run: {global_batch: 64}}
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "jobs.yaml").write_text(JOBS)
    path = tmp_path / "fleets.yaml"
    axes = "{policy: [fifo, backfill, srtf], nodes: [2, 3, 1], seed: [0, 1, 2]}"
    path.write_text(f"jobs: {tmp_path}/jobs.yaml\nsystems: [dgx-h100]\naxes: {axes}\n")
    return path


def test_a_row_is_the_answer_of_fleet(study: Path) -> None:
    table = sweep_table(fleets.load_run_or_fleet_sweep(study))
    assert len(table) == 27
    assert list(table.columns[:4]) == ["system", "policy", "nodes", "seed"]
    failing = table[table.nodes == 1]
    assert failing.problem.str.contains("can never run").all() and failing.span_s.isna().all()
    text = study.read_text().replace(", seed: [0, 1, 2]", "")
    study.write_text(text)
    row = paleo.sweep(study).query("policy == 'backfill' and nodes == 2").iloc[0]
    answer = paleo.fleet(study.parent / "jobs.yaml", "dgx-h100", 2, samples=0).study
    assert row.span_s == answer.result.makespan and row.utilisation == answer.result.utilisation
    assert row.cost_usd == pytest.approx(answer.rent_usd) and row.deadlines_missed == len(answer.late_jobs)


def test_a_stopped_sweep_goes_on(study: Path, tmp_path: Path) -> None:
    whole = fleets.load_run_or_fleet_sweep(study)
    write_sweep_table(whole, tmp_path / "whole.csv")
    done: list[int] = []

    def stopping(job, parts):
        for part, records in local_evaluator(whole, 1)(job, parts):
            if done:
                raise KeyboardInterrupt
            done.append(part)
            yield part, records

    with pytest.raises(KeyboardInterrupt):
        write_sweep_table(whole, tmp_path / "parts.csv", stopping)

    def counting(job, parts):
        done.extend(parts)
        return local_evaluator(whole, 1)(job, parts)

    write_sweep_table(whole, tmp_path / "parts.csv", counting)
    assert done == [0, 1]
    assert (tmp_path / "parts.csv").read_text() == (tmp_path / "whole.csv").read_text()


@pytest.mark.slow
def test_processes_and_dask_give_the_same_table(study: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed")
    assert run(["sweep", str(study), "-o", str(tmp_path / "a.csv")]) == 0
    assert run(["sweep", str(study), "-o", str(tmp_path / "b.csv"), "--jobs", "2"]) == 0
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=":0"
    ) as cluster:
        address = cluster.scheduler_address
        assert run(["sweep", str(study), "-o", str(tmp_path / "c.csv"), "--scheduler", address]) == 0
    texts = [(tmp_path / f"{name}.csv").read_text() for name in "abc"]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ("{nodes: [2], polcy: [fifo]}", "policy"),
        ("{nodes: [2], policy: [fofo]}", "fifo"),
        ("{nodes: [0]}", "--nodes '0'"),
        ("{nodes: [2], seed: [-1]}", "axes.seed"),
        ("{policy: [fifo]}", "axes.nodes: missing"),
        ("{nodes: [2], placement: [wide]}", "packed"),
    ],
)
def test_a_bad_axis_is_named(axes: str, words: str, study: Path) -> None:
    study.write_text(f"jobs: {study.parent}/jobs.yaml\nsystems: [dgx-h100]\naxes: {axes}\n")
    with pytest.raises(SpecError, match=words):
        fleets.load_run_or_fleet_sweep(study)
