"""`paleo serve`: verdicts, refusals, documents, and bad input."""

from __future__ import annotations

import json

import numpy as np
import pytest

import paleo
from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.report.serving import mean_and_longest_queue
from paleo.services import parse_sharding

NODE = ("llama3-8b", "dgx-h100")


@pytest.fixture(scope="module")
def answer():
    return paleo.serve(*NODE, gpus=2, input=500, output=200, ttft="1s", tpot="40ms", price="2 USD/h")


@pytest.mark.slow
def test_the_verdict_comes_first_and_names_what_limits(answer):
    document = answer.to_dict()
    assert document["schema"] == "paleo.serve/1"
    assert answer.headline == document["verdict"]
    assert "requests/s" in answer.headline
    assert document["limited_by"] in ("time per token", "time to the first token")
    assert f"limited by the {document['limited_by']}" in answer.headline


def test_limits_are_kept_by_the_simulation_too(answer):
    assert answer.service.latencies("tpot")["p99"] < 0.040 * 1.1
    assert answer.service.latencies("ttft")["p99"] < 1.0


def test_price_is_rent_over_tokens(answer):
    document = answer.to_dict()
    price = document["usd_per_million_tokens"]
    whole_node = 8 * 2  # two GPUs of a node of eight are billed as the node
    assert price["output"] == pytest.approx(whole_node / 3600 / document["tokens_per_s"] * 1e6)
    shares = price["input_alone"] * 500 + price["output_alone"] * 200
    assert shares == pytest.approx(price["output"] * 200, rel=1e-6)
    assert 0.01 < document["joules_per_token"] < 10


@pytest.mark.slow
def test_curve_is_monotone_and_the_frame_has_the_plans(answer):
    curve = answer.to_dict()["curve"]
    latencies = [point["latency_s"]["mean"] for point in curve]
    assert latencies == sorted(latencies)
    assert len(answer.to_frame()) == len(answer.to_dict()["plans"])


@pytest.mark.slow
def test_tighter_limits_serve_fewer_requests():
    rates = [paleo.serve(*NODE, tpot=tpot).service.best.requests_per_s for tpot in (0.02, 0.04, 0.1)]
    assert rates == sorted(rates)


def test_narrow_weights_serve_more():
    wide, narrow = (paleo.serve(*NODE, weights=weights).service.best.requests_per_s for weights in ("bf16", "fp8"))
    assert narrow > wide


def test_a_cached_prefix_is_stated_and_helps():
    cold, warm = (paleo.serve(*NODE, input=2000, prefix_hit=hit) for hit in (0.0, 0.8))
    assert warm.service.best.requests_per_s > 1.3 * cold.service.best.requests_per_s
    assert warm.to_dict()["load"]["prefix_hit"] == 0.8


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--rate", "1000/s"], "the queue grows by"), (["--ttft", "1ms"], "to the first token (asked: 1 ms)")],
)
def test_impossible_limits_are_an_answer(capsys, options, words):
    assert run(["serve", "llama3-8b", "--system", "dgx-h100", *options, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["possible"] is False
    assert words in document["verdict"]
    assert document["plans"] == []


def test_what_does_not_fit_says_what_would(capsys):
    assert run(["serve", "llama3-70b", "--system", "dgx-h100"]) == 1
    assert "more devices per replica or narrower weights" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input": "abc"}, "--input 'abc'"),
        ({"rate": 0}, "expected a number above zero"),
        ({"rate": 1, "concurrency": 2}, "state one of them"),
        ({"percentile": 42}, "expected one of mean"),
        ({"engine": "vlm"}, "nearest: 'vllm'"),
        ({"strategy": "tp=2,ep=3"}, "ep is 1 or all 2"),
        ({"strategy": "zz=2"}, "unknown 'zz'"),
        ({"prefix_hit": 1.5}, "expected a number from 0 to"),
        ({"gpus": 0}, "expected a whole number from 1"),
        ({"ttft": "2"}, "--ttft"),
        ({"trace": "/nowhere.csv"}, "no such file"),
        ({"weights": "fp9"}, "unknown format"),
    ],
)
def test_bad_input_is_one_message(options, message):
    with pytest.raises(SpecError, match=message):
        paleo.serve(*NODE, **options)


def test_degrees_of_a_replica():
    assert parse_sharding("attention_dp=8").expert_parallel
    assert parse_sharding("tp=4,pp=2").gpus == 8


def test_traces_are_simulated_whole(tmp_path):
    path = tmp_path / "trace.csv"
    lines = [f"{0.2 * number},{100 + number},{20 + number % 7}" for number in range(60)]
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "\n".join(lines))
    answer = paleo.serve(*NODE, trace=path)
    assert answer.to_dict()["load"]["kind"] == "trace"
    assert 0 < answer.service.latencies("ttft")["mean"] < 0.2


def test_a_queue_is_drawn_by_its_mean_and_its_longest():
    queue = np.array([[0.0, 4.0], [0.5, 2.0], [99.5, 0.0], [100.0, 6.0]])
    times, mean, longest = mean_and_longest_queue(queue)
    assert times.tolist() == [1.0, 100.0]
    assert mean.tolist() == [3.0, 3.0]
    assert longest.tolist() == [4.0, 6.0]
