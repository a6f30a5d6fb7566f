"""`paleo tune`: rungs and closed forms of published methods, ASHA against its definition, answers, and bad input."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

import paleo
from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.tuning.base import (
    TUNING_METHODS,
    TrialTimes,
    TuningProblem,
    sampled_trial_scores,
    simulate_search,
    synchronous_search_time,
)

PLAIN = TrialTimes(seconds_per_sample=[1.0])
NODE = ("gpt2", "dgx-h100")


def problem_of(method: str, trials: int, least: float, most: float, eta: int, seed: int = 0) -> TuningProblem:
    rungs = TUNING_METHODS[method].rungs(least, most, eta)
    return TuningProblem(trials, eta, rungs, sampled_trial_scores(trials, len(rungs), 1.0, seed), seed=seed)


def searched(method: str, workers: int, costs: TrialTimes = PLAIN, **options):
    return simulate_search(TUNING_METHODS[method](problem_of(method, **options)), costs, workers)


# published rungs


def test_successive_halving_has_the_rungs_of_its_paper():
    """Li et al., MLSys 2020, figure 1: bracket 0 of n = 9, r = 1, R = 9, eta = 3 has 9, 3 and 1 configurations."""
    timeline = searched("halving", workers=9, trials=9, least=1, most=9, eta=3)
    assert timeline.rungs == (1.0, 3.0, 9.0)
    assert timeline.trials_by_rung == [9, 3, 1]


def test_hyperband_has_the_brackets_of_its_paper():
    """Li et al., JMLR 2018, table 1: R = 81, eta = 3."""
    hyperband = TUNING_METHODS["hyperband"](problem_of("hyperband", 143, 1, 81, 3))
    sizes = [hyperband.trials_per_rung(bracket) for bracket in hyperband.brackets()]
    assert sizes == [[81, 27, 9, 3, 1], [34, 11, 3, 1], [15, 5, 1], [8, 2], [5]]


def test_the_first_whole_trial_of_asha_is_that_of_its_paper():
    """Section 3.3: with 9 machines 13/9 time(R) from scratch in figure 1's example; time(R) from checkpoints."""
    options = {"trials": 9, "least": 1, "most": 9, "eta": 3}
    scratch = TrialTimes(seconds_per_sample=[1.0], resumes_from_checkpoint=False)
    assert searched("asha", 9, scratch, **options).first_full_trial_time == pytest.approx(13.0)
    assert searched("asha", 9, **options).first_full_trial_time == pytest.approx(9.0)


@pytest.mark.parametrize("workers", range(25, 501, 25))
@pytest.mark.parametrize("eta", [2, 3, 4])
def test_the_first_whole_trial_of_asha_on_many_machines(workers: int, eta: int) -> None:
    """Section 3.3: eta^s machines take sum eta^(i - s) time(R) from scratch, for brackets of s halvings."""
    halvings = int(np.log(workers + 0.5) / np.log(eta))
    most = float(eta**halvings)
    scratch = TrialTimes(seconds_per_sample=[1.0], resumes_from_checkpoint=False)
    expected = most * sum(float(eta) ** -step for step in range(halvings + 1))
    options = {"trials": 4 * workers, "least": 1, "most": most, "eta": eta}
    assert searched("asha", workers, scratch, **options).first_full_trial_time == pytest.approx(expected, rel=0.05)
    assert searched("asha", workers, **options).first_full_trial_time == pytest.approx(most, rel=0.05)


@pytest.mark.parametrize("workers", [25, 100, 250, 500])
def test_promotions_of_asha_are_an_etath_of_each_rung(workers: int) -> None:
    """Algorithm 2 promotes the best 1/eta; section 3.2 puts wrong promotions at the order of sqrt(n)."""
    timeline = searched("asha", workers, trials=20_000, least=1, most=64, eta=4)
    reached = np.array(timeline.trials_by_rung, dtype=float)
    assert reached[0] == 20_000
    assert np.all(reached[1:] >= np.floor(reached[:-1] / 4))
    assert reached[1] == pytest.approx(reached[0] / 4, rel=0.05)
    assert np.all(reached[1:] - reached[:-1] / 4 <= 3.0 * np.sqrt(reached[:-1]))


# closed forms


@pytest.mark.parametrize("method", ["random", "grid", "halving", "hyperband"])
def test_the_simulation_is_the_closed_form(method: str) -> None:
    """250 cases of each, 1,000 in all, with whole seconds, so that sums are exact."""
    draw = random.Random(method)
    for case in range(250):
        eta = draw.choice([2, 3, 4])
        most = eta ** draw.randint(0, 4)
        costs = TrialTimes(
            seconds_per_sample=[float(draw.randint(1, 9))], launch_time=float(draw.randint(0, 90)),
            restore=[float(draw.randint(0, 9))],
            save=[float(draw.randint(0, 9))], evaluation=[float(draw.randint(0, 9))],
            resumes_from_checkpoint=draw.random() < 0.7,
        )  # fmt: skip
        problem = problem_of(method, draw.randint(1, 150), 1, most, eta, seed=case)
        workers = draw.randint(1, 40)
        expected = float(
            synchronous_search_time(TUNING_METHODS[method](problem).stages_between_barriers(), costs, workers)
        )
        assert simulate_search(TUNING_METHODS[method](problem), costs, workers).wall_time == expected


def sequential_asha(problem: TuningProblem) -> list[tuple[int, int]]:
    """Algorithm 2 on one worker, word by word: the configurations and rungs that it runs."""
    rungs: list[dict[int, float]] = [{} for _ in problem.rungs]
    promoted: list[set[int]] = [set() for _ in problem.rungs]
    done, sampled = [], 0
    while True:
        for k in range(len(rungs) - 2, -1, -1):
            candidates = sorted(rungs[k], key=rungs[k].__getitem__)[: len(rungs[k]) // problem.eta]
            promotable = [trial for trial in candidates if trial not in promoted[k]]
            if promotable:
                promoted[k].add(promotable[0])
                job = promotable[0], k + 1
                break
        else:
            if sampled == problem.trials:
                return done
            job, sampled = (sampled, 0), sampled + 1
        rungs[job[1]][job[0]] = float(problem.scores[job])
        done.append(job)


@pytest.mark.parametrize("seed", range(25))
def test_asha_on_one_worker_is_its_sequential_definition(seed: int) -> None:
    eta = 2 + seed % 3
    problem = problem_of("asha", 10 + 13 * seed, 1, eta**3, eta, seed)
    timeline = simulate_search(TUNING_METHODS["asha"](problem), PLAIN, 1)
    assert [(job.trial, job.rung) for job in timeline.jobs] == sequential_asha(problem)


# every method


@pytest.mark.parametrize("method", list(TUNING_METHODS))
@pytest.mark.parametrize("workers", [1, 7, 64])
def test_every_method_uses_each_worker_for_one_trial_at_a_time(method: str, workers: int) -> None:
    timeline = searched(method, workers, trials=50, least=1, most=16, eta=2)
    begins, ends = np.array(timeline.begins), np.array(timeline.ends)
    at_once = [int(np.sum((begins <= begin) & (begin < ends))) for begin in begins]
    assert max(at_once) <= workers
    assert timeline.trials_by_rung[0] == 50 or method == "hyperband"
    assert 0 < timeline.utilisation <= 1.0
    trained = [[] for _ in range(50)]
    for job in timeline.jobs:
        trained[job.trial].append(job.rung)
    assert all(rungs == list(range(rungs[0], rungs[0] + len(rungs))) for rungs in trained if rungs)


def test_more_workers_never_make_random_search_longer():
    seconds = [searched("random", workers, trials=33, least=1, most=5, eta=2).wall_time for workers in range(1, 40)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_fifth_of_a_population_copies():
    """All 20 members have a first score when the last of them ends it; from then on the worst four copy."""
    method = TUNING_METHODS["pbt"](problem_of("pbt", 20, 1, 10, 2))
    timeline = simulate_search(method, PLAIN, 20)
    assert timeline.trials_by_rung == [20] * 10
    assert 0.5 * 4 * 9 <= method.copies <= 1.1 * 4 * 9


def test_children_have_sizes_near_their_parents():
    problem = TuningProblem(200, 2, (1.0,), sampled_trial_scores(200, 1, 1.0, 0), population=10, network_sizes=8)
    method = TUNING_METHODS["evolution"](problem)
    simulate_search(
        method, TrialTimes(seconds_per_sample=[1.0] * 8, restore=[0.0] * 8, save=[0.0] * 8, evaluation=[0.0] * 8), 10
    )
    assert set(method.sizes) <= set(range(8))
    assert len(method.population) == 10


# answers


@pytest.fixture(scope="module")
def answer():
    return paleo.tune(
        *NODE, 32, trials=64, method="halving", max_tokens="200M", price="2 USD/h", deadline="6h", rank_correlation=0.8
    )


@pytest.mark.slow
def test_the_answer_has_the_keys_of_the_contract(answer):
    document = answer.to_dict()
    assert document["schema"] == "paleo.tune/1" and document["verdict"] == answer.headline
    assert document["gpu_hours"] == pytest.approx(32 * document["hours"])
    assert document["usd"] == pytest.approx(2 * document["gpu_hours"])
    assert [rung["trials"] for rung in document["trials_by_rung"]] == [64, 16, 4, 1]
    assert len(answer.to_frame()) == len(document["curve"])
    low, high = document["hours_interval"]
    assert low < document["hours"] < high
    assert 0 <= document["regret"]["share"] < 0.5


@pytest.mark.slow
def test_the_margin_of_a_deadline_is_true(answer):
    margin = answer.study.deadline_margin
    gpus = answer.study.fastest_search.trial_estimate.gpus
    options = {"method": "halving", "max_tokens": "200M", "gpus_per_trial": gpus}
    assert margin.meets_deadline
    assert paleo.tune(
        *NODE, 32, trials=margin.max_trials, deadline="6h", **options
    ).study.deadline_margin.meets_deadline
    if margin.min_nodes > 1:
        options["global_batch"] = answer.study.batch
        assert not paleo.tune(
            *NODE, (margin.min_nodes - 1) * 8, trials=64, deadline="6h", **options
        ).study.deadline_margin.meets_deadline


@pytest.mark.slow
def test_the_step_is_that_of_estimate(answer):
    price = answer.study.fastest_search.trial_estimate
    stated = {"software": answer.study.software, "strategy": "auto", "global_batch": answer.study.batch}
    step = paleo.estimate(*NODE, gpus=price.gpus, **stated)
    assert price.predictions[0].step_time == pytest.approx(step.step_time)


@pytest.mark.slow
def test_divisions_run_the_software_of_all_gpus(answer):
    """Some trials have fewer GPUs than those for which people take another framework."""
    gpus = {
        point.trial_estimate.gpus: point.trial_estimate.predictions[0].run.software for point in answer.study.searches
    }
    assert min(gpus) < 16 <= answer.study.gpus
    assert set(gpus.values()) == {"megatron-core"} == {answer.to_dict()["software"]}
    assert answer.study.software_reason == "language models from 16 NVIDIA GPUs"
    stated = paleo.tune(*NODE, 16, trials=4, method="random", max_tokens="10M", gpus_per_trial=8, software="torchtitan")
    assert (stated.study.software, stated.study.software_reason) == ("torchtitan", "")


@pytest.mark.slow
def test_sizes_are_priced_one_by_one():
    answer = paleo.tune(
        *NODE, 8, trials=20, method="random", max_tokens="10M", vary=["layers=6..12:6"], gpus_per_trial=1
    )
    unit, batch = answer.study.fastest_search.trial_estimate.trial_times.seconds_per_sample, answer.study.batch
    for seconds, layers in zip(unit, (6, 12), strict=True):
        alone = paleo.Run(gpus=1, strategy="auto", global_batch=batch, model={"layers": layers})
        assert seconds == pytest.approx(paleo.estimate(*NODE, run=alone).step_time / batch, rel=1e-3)
    assert unit[1] > 1.4 * unit[0]  # twice the blocks, the same vocabulary
    assert answer.to_dict()["sizes"] == [{"layers": 6}, {"layers": 12}]


BAD = [
    (["--trials", "0"], "--trials 0"),
    (["--method", "ahsa"], "'asha'"),
    (["--eta", "1"], "--eta 1"),
    (["--max-tokens", "-1"], "above zero"),
    (["--max-samples", "5"], "state one of them"),
    (["--min-tokens", "2B"], "--min-tokens"),
    (["--gpus-per-trial", "64"], "--gpus-per-trial 64"),
    (["--gpus-per-trial", "x"], "gpus 'x'"),
    (["--vary", "layers"], "--vary 'layers'"),
    (["--vary", "layers=1..999"], "--vary"),
    (["--vary", "layer=6,12"], "layer"),
    (["--deadline", "24"], "--deadline"),
    (["--rank-correlation", "2"], "--rank-correlation"),
    (["--evaluation-samples", "few"], "--evaluation-samples"),
    (["--seed", "-1"], "--seed"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_bad_input_is_one_message(options, words, capsys):
    usual = {"--gpus": "16", "--trials": "8", "--max-tokens": "1B"}
    usual |= dict(zip(options[::2], options[1::2], strict=True))
    arguments = [word for pair in usual.items() for word in pair]
    assert run(["tune", *NODE[:1], "--system", NODE[1], *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.strip().splitlines()) == 1


@pytest.mark.slow
def test_a_missed_deadline_is_a_no(capsys):
    options = ["--gpus", "8", "--trials", "64", "--max-tokens", "1B", "--deadline", "10min", "--json"]
    assert run(["tune", "gpt2", "--system", "dgx-h100", *options]) == 1
    assert json.loads(capsys.readouterr().out)["deadline"]["holds"] is False


@pytest.mark.slow
def test_a_network_that_fits_nowhere_is_refused():
    with pytest.raises(paleo.PaleoError, match="no number of GPUs runs a trial"):
        paleo.tune("llama3-405b", "dgx-h100", 8, trials=4, max_tokens="1B")
    with pytest.raises(SpecError, match="--gpus-per-trial 16"):
        paleo.tune(*NODE, 8, trials=4, max_tokens="1B", gpus_per_trial=16)
