"""`paleo fleet`: job files, prices of jobs, the smallest order, answers, traces, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import paleo
from paleo.cli import run_command_line as run
from paleo.cluster.jobs import JobSpec, jobs_from_mappings, read_jobs
from paleo.cluster.run_times import predict_job_run_times
from paleo.cluster.study import ClusterRequirements, _run_time_factor, late_jobs
from paleo.errors import SpecError
from paleo.specs.system import load_system

NODE = "dgx-h100"
GPT = {"model": "gpt2", "run": {"global_batch": 64}}
#: A day of a small team; the times are known, so that nothing is priced.
DAY = [
    {"name": "wide", "team": "a", "duration": "4 h", "gpus": 16, "deadline": "10 h"},
    {"name": "long", "team": "b", "duration": "20 h", "gpus": 4, "arrival": "1 h"},
    {"name": "urgent", "team": "c", "duration": "1 h", "gpus": 8, "arrival": "2 h", "deadline": "8 h", "priority": 5},
    {"name": "last", "team": "a", "duration": "30min", "gpus": 8, "after": "wide"},
]


def fleet(nodes="auto", **options):
    return paleo.fleet(DAY, NODE, nodes, **options)


# prices


@pytest.mark.slow
def test_a_training_takes_what_estimate_says():
    spec = jobs_from_mappings([{**GPT, "tokens": "1B", "gpus": 8}])[0]
    price = predict_job_run_times(spec, [load_system(NODE)], [64]).run_times[0][8]
    answer = paleo.estimate("gpt2", NODE, gpus=8, global_batch=64, tokens="1B", goodput=True)
    assert price.seconds == pytest.approx(answer.training.long_run.wall_time, rel=0.02)
    assert 0 < price.failure_share < 0.05 and price.restart_time > 60


@pytest.mark.slow
def test_a_search_takes_what_tune_says():
    spec = jobs_from_mappings([{**GPT, "gpus": 16, "tune": {"trials": 32, "method": "halving", "max_tokens": "100M"}}])[
        0
    ]
    price = predict_job_run_times(spec, [load_system(NODE)], [64]).run_times[0][16]
    answer = paleo.tune("gpt2", NODE, 16, trials=32, method="halving", max_tokens="100M", global_batch=64)
    assert price.seconds == pytest.approx(answer.study.fastest_search.seconds)


@pytest.mark.slow
def test_reinforcement_learning_takes_what_rl_says():
    options = {"steps": 100, "rollouts": 64, "output": 200}
    spec = jobs_from_mappings([{"model": "qwen3-0.6b", "gpus": 8, "rl": options}])[0]
    price = predict_job_run_times(spec, [load_system(NODE)], [8]).run_times[0][8]
    answer = paleo.rl("qwen3-0.6b", NODE, gpus=8, **options)
    assert price.seconds == pytest.approx(100 * answer.study.steps[0].step_time)


def test_a_service_has_the_fewest_gpus_that_carry_its_rate():
    spec = jobs_from_mappings(
        [{"model": "llama3-8b", "until": "2 h", "serve": {"rate": "30/s", "input": 500, "output": 200}}]
    )[0]
    priced = predict_job_run_times(spec, [load_system(NODE)], [64])
    gpus = priced.preferred_gpus[0]
    assert priced.run_times[0][gpus].seconds == 7200
    assert paleo.serve("llama3-8b", NODE, gpus=gpus, input=500, output=200, rate=30).limits_met
    assert gpus == 1 or not paleo.serve("llama3-8b", NODE, gpus=gpus // 2, input=500, output=200, rate=30).limits_met


@pytest.mark.slow
def test_a_service_that_waits_is_late():
    service = {"name": "chat", "model": "llama3-8b", "gpus": 8, "until": "2 h", "serve": {"rate": "1/s"}}
    assert paleo.fleet([service], NODE, 1).requirements_met
    before = {"name": "a", "duration": "1 h", "gpus": 8, "preemptible": False}
    assert paleo.fleet([before, service], NODE, 1).study.late_jobs == ["chat"]


@pytest.mark.slow
def test_auto_is_enough_for_the_deadline_and_a_range_has_its_ends():
    system, job = load_system(NODE), {"model": "resnet50", "samples": "40M", "run": {"global_batch": 1024}}
    auto = predict_job_run_times(jobs_from_mappings([job])[0], [system], [1024])
    assert auto.preferred_gpus == (4,)
    times = {gpus: price.seconds for gpus, price in auto.run_times[0].items()}
    assert times[8] > 0.75 * times[4] and times[4] < 0.75 * times[2]
    hasty = predict_job_run_times(jobs_from_mappings([{**job, "deadline": f"{1.2 * times[4]} s"}])[0], [system], [1024])
    calm = predict_job_run_times(jobs_from_mappings([{**job, "deadline": f"{5 * times[4]} s"}])[0], [system], [1024])
    assert hasty.preferred_gpus == (4,) and calm.preferred_gpus == (2,)
    assert times[2] <= 2.5 * times[4] < times[1]
    ranged = predict_job_run_times(jobs_from_mappings([{"duration": "8 h", "gpus": "4..12"}])[0], [system], [64])
    assert sorted(ranged.run_times[0]) == [4, 8, 12]


# orders


def test_the_smallest_order_holds_and_one_node_less_does_not():
    answer = fleet(wait="30min", measure="mean")
    (nodes,) = answer.study.nodes
    assert answer.requirements_met and answer.study.waiting_time_statistic <= 1800
    smaller = answer.study.fleet.simulate((nodes - 1,)) if nodes > 2 else None
    assert nodes == 2 or late_jobs(answer.study.fleet, smaller) or smaller.waiting_time.mean() > 1800


@pytest.mark.parametrize("seed", range(12))
def test_the_smallest_order_of_random_jobs_is_the_smallest(seed):
    random = np.random.default_rng(seed)
    jobs = [
        {"duration": f"{random.integers(1, 9)} h", "gpus": int(random.choice([1, 4, 8, 16])), "arrival": f"{n} h"}
        for n in range(12)
    ]
    answer = paleo.fleet(jobs, NODE, wait="1 h", samples=0, policy="fifo")
    keeps = [
        answer.study.fleet.fits_all_jobs((n,))
        and np.quantile(answer.study.fleet.simulate((n,)).waiting_time, 0.95) <= 3600
        for n in range(1, answer.study.nodes[0] + 1)
    ]
    assert keeps == [False] * (len(keeps) - 1) + [True]


@pytest.mark.slow
def test_mixed_orders_cost_no_more_than_those_of_one_kind():
    systems = ["dgx-h100", "dgx-a100-80gb"]
    jobs = [{**GPT, "tokens": "2B", "gpus": 8, "deadline": "2 h"}, {**GPT, "tokens": "100M", "gpus": 8}]
    mixed = paleo.fleet(jobs, systems, samples=0, price="dgx-h100=3,dgx-a100-80gb=1")
    rates = [mixed.study.fleet.rent_usd_per_s(mixed.study.nodes)]
    for place, system in enumerate(systems):
        try:
            (count,) = paleo.fleet(jobs, system, samples=0).study.nodes
        except SpecError:
            continue
        rates.append(mixed.study.fleet.rent_usd_per_s((count, 0) if place == 0 else (0, count)))
    assert mixed.requirements_met and rates[0] == min(rates)


def test_the_answer_has_the_keys_of_the_contract():
    answer = fleet(2, price="2 USD/h")
    document = answer.to_dict()
    assert document["schema"] == "paleo.fleet/1" and document["verdict"] == answer.headline
    first = document["jobs"][0]
    assert {"name", "start", "finish", "finish_interval", "waited", "preemptions"} <= first.keys()
    assert document["nodes"] == 2 and document["gpus"] == 16
    assert document["usd"] == pytest.approx(2 * 16 * document["span_s"] / 3600)
    assert {"waiting", "fragmentation", "preemption", "failures"} <= document["lost_gpu_hours"].keys()
    total = sum(document["lost_gpu_hours"].values()) + document["utilisation"] * 16 * document["span_s"] / 3600
    failures = document["lost_gpu_hours"]["failures"]
    assert total - failures == pytest.approx(16 * document["span_s"] / 3600)
    assert len(answer.to_frame()) == 4


def test_deadlines_are_reported_true():
    answer = fleet(2)
    for row, described in zip(answer.to_dict()["jobs"], DAY, strict=True):
        if "deadline" in described:
            assert row["met"] == (row["finish"] <= row["deadline"]) == (row["name"] not in answer.study.late_jobs)


def test_intervals_hold_the_expected_end_and_widen_with_the_step():
    jobs = [{**GPT, "tokens": "1B", "gpus": 8}]
    low, high = paleo.fleet(jobs, NODE, 1).to_dict()["jobs"][0]["finish_interval"]
    finish = paleo.fleet(jobs, NODE, 1).to_dict()["jobs"][0]["finish"]
    assert low < finish < high


def test_sampled_failures_keep_the_mean():
    from paleo.cluster.run_times import JobRunTime

    price = JobRunTime(8, 1000.0, mtbf=200.0, seconds_lost_per_failure=20.0)
    random = np.random.default_rng(1)
    assert np.mean([_run_time_factor(price, random) for _ in range(4000)]) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("policy", ["backfill", "elastic", "fair", "fifo", "las", "priority", "srtf"])
def test_every_policy_answers(policy):
    assert fleet(2, policy=policy, samples=2).study.result.utilisation > 0.2


# files


def test_a_trace_is_read_with_the_columns_of_public_traces(tmp_path: Path):
    helios = tmp_path / "helios.csv"
    helios.write_text(
        "job_id,user,gpu_num,submit_time,duration\n7,u1,8,2020-04-01 00:01:00,90\n8,u2,1,2020-04-01 00:00:00,60\n"
    )
    jobs = read_jobs(helios)
    assert [(job.name, job.team, job.gpus, job.arrival, job.duration) for job in jobs] == [
        ("7", "u1", 8, 60.0, 90.0), ("8", "u2", 1, 0.0, 60.0)
    ]  # fmt: skip


def test_the_command_reads_a_file_and_prints_json(tmp_path: Path, capsys):
    path = tmp_path / "jobs.csv"
    path.write_text("submit_time,num_gpus,duration\n0,8,100\n50,8,10\n")
    assert run(["fleet", str(path), "--system", NODE, "--nodes", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row["start"] for row in document["jobs"]] == [0, 100]
    assert run(["fleet", str(path), "--system", NODE, "--nodes", "1", "--wait", "20s"]) == 1


@pytest.mark.slow
def test_a_trace_of_five_thousand_jobs_is_consistent():
    random = np.random.default_rng(5)
    gpus = random.choice([1, 2, 4, 8, 16, 64], 5000, p=[0.5, 0.15, 0.1, 0.15, 0.07, 0.03])
    seconds = random.lognormal(6.5, 1.5, 5000).clip(10, 86400)
    arrivals = np.cumsum(random.exponential((gpus * seconds).mean() / (0.9 * 256), 5000))
    specs = [
        JobSpec.model_construct(name=f"{n}", arrival=float(arrivals[n]), gpus=int(gpus[n]), duration=float(seconds[n]))
        for n in range(5000)
    ]
    from paleo.cluster.study import predict_fleet, simulate_or_size_cluster

    study = simulate_or_size_cluster(
        predict_fleet(specs, [load_system(NODE)], "backfill", nodes=[32]), [32], ClusterRequirements()
    )
    result = study.result
    assert result.work_gpu_seconds == pytest.approx(gpus * seconds)
    whole = result.gpus * result.makespan
    assert result.work_gpu_seconds.sum() + sum(result.unused_gpu_seconds.values()) == pytest.approx(whole)
    fifo = simulate_or_size_cluster(
        predict_fleet(specs, [load_system(NODE)], "fifo", nodes=[32]), [32], ClusterRequirements()
    ).result
    assert result.waiting_time.mean() < fifo.waiting_time.mean()


BAD = [
    ("jobs: []", "jobs"),
    ("jobs: [{name: a}]", "model: missing"),
    ("jobs: [{duration: 1 h}]", "gpus: missing"),
    ("jobs: [{duration: 1, gpus: 8}]", "1"),
    ("jobs: [{duration: -1 h, gpus: 8}]", "zero or more"),
    ("jobs: [{duration: 1 h, gpus: 0}]", "gpus: 0"),
    ("jobs: [{duration: 1 h, gpus: 8..4}]", "8..4"),
    ("jobs: [{duration: 1 h, gpus: 64}]", "can never run"),
    ("jobs: [{duration: 1 h, gpus: 8, gpu: 3}]", "gpu"),
    ("jobs: [{duration: 1 h, gpus: 8, arrival: 5 h, deadline: 1 h}]", "deadline"),
    ("jobs: [{name: a, duration: 1 h, gpus: 8, after: b}]", "no job 'b'"),
    ("jobs: [{name: a, duration: 1 h, gpus: 8, after: a}]", "circle"),
    ("jobs: [{name: a, duration: 1 h, gpus: 8, after: b}, {name: b, duration: 1 h, gpus: 8, after: a}]", "circle"),
    ("jobs: [{name: a, duration: 1 h, gpus: 8}, {name: a, duration: 1 h, gpus: 8}]", "twice"),
    ("jobs: [{model: gpt2, gpus: 8}]", "tokens: missing"),
    ("jobs: [{model: gpt3, gpus: 8, tokens: 1B}]", "gpt3"),
    ("jobs: [{model: llama3-405b, gpus: 8, tokens: 1B}]", "can never run"),
    ("jobs: [{model: gpt2, gpus: 8, tokens: 1B, duration: 1 h, serve: {rate: 1}}]", "one kind"),
    ("jobs: [{model: gpt2, gpus: 8, tune: {trial: 8}}]", "trial"),
    ("jobs: [{model: gpt2, gpus: 8, tune: {trials: 8}}]", "--max-tokens"),
    ("jobs: [{model: gpt2, gpus: 8, serve: {rate: 1}}]", "until: missing"),
    ("jobs: [{model: gpt2, gpus: 8, serve: {rate: 0}, until: 1 h}]", "rate"),
    ("jobs: [{model: gpt2, gpus: 8, rl: {steps: 9, algorithm: gppo}}]", "grpo"),
    ("jobs: [{model: gpt2, gpus: 8, tokens: 1B, run: {batchh: 3}}]", "batch"),
    ("jobs: 3", "jobs"),
    ("- 1", "mapping"),
]


@pytest.mark.parametrize(("text", "words"), BAD)
def test_a_bad_file_is_one_message(text: str, words: str, tmp_path: Path, capsys):
    path = tmp_path / "jobs.yaml"
    path.write_text(text)
    assert run(["fleet", str(path), "--system", NODE, "--nodes", "2"]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no jobs"),
        ("gpus,duration\n8,3\n", "column arrival is missing"),
        ("arrival,gpus,duration\n0,8,-3\n", "zero or more"),
        ("arrival,gpus,duration\n-1,8,3\n", "zero or more"),
        ("arrival,gpus,duration\n0,1.5,3\n", "number of GPUs"),
        ("arrival,gpus,duration\n0,8,soon\n", "line 2"),
        ("arrival,gpus,duration\n0,8\n", "line 2"),
        ("arrival,gpus,duration\n0,8,nan\n", "line 2"),
    ],
)
def test_a_bad_trace_is_one_message(text: str, words: str, tmp_path: Path, capsys):
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    assert run(["fleet", str(path), "--system", NODE, "--nodes", "2"]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "0"], "--nodes '0'"),
        (["--nodes", "1,2"], "--nodes '1,2'"),
        (["--nodes", "some"], "auto"),
        (["--policy", "fofo"], "fifo"),
        (["--placement", "pack"], "packed"),
        (["--wait", "5"], "--wait"),
        (["--measure", "p9"], "p95"),
        (["--system", "dgx"], "dgx"),
        (["--nodes", "auto"], "deadline"),
        (["--nodes", "auto", "--wait", "-1h"], "--wait"),
    ],
)
def test_bad_options_are_one_message(options, words, tmp_path: Path, capsys):
    path = tmp_path / "jobs.csv"
    path.write_text("arrival,gpus,duration\n0,8,3\n")
    usual = {"--system": NODE, "--nodes": "2"} | dict(zip(options[::2], options[1::2], strict=True))
    assert run(["fleet", str(path), *(word for pair in usual.items() for word in pair)]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1


def test_an_impossible_deadline_is_named(tmp_path: Path):
    with pytest.raises(SpecError, match="hasty would miss the deadline"):
        paleo.fleet([{"name": "hasty", "duration": "4 h", "gpus": 8, "deadline": "1 h"}], NODE)
