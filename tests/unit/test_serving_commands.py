"""Command lines of engines, speculation, division into prefill and decode, systems and engines compared."""

from __future__ import annotations

import json

import numpy as np
import pytest

import paleo
from paleo.cli import run_command_line as run
from paleo.errors import SpecError
from paleo.serve_train_split import parse_training_and_serving, split_serving_and_training
from paleo.serving.benchmark import read_benchmark
from paleo.serving.commands import parse_engine_command
from paleo.serving.engines import load_engine
from paleo.serving.formats import Formats
from paleo.serving.forward_lowering import Sharding
from paleo.serving.iteration_times import EngineKernels, iteration_tables
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

NODE = ("llama3-8b", "dgx-h100")


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm"])
@pytest.mark.parametrize("strategy", ["tp=4", "tp=2,pp=2"])
def test_a_written_command_is_read_as_the_plan(engine, strategy):
    options = {"weights": "fp8", "cache": "fp8", "sequences": 96, "batch_tokens": 4096, "speculate": 3}
    options = options if engine != "tensorrt-llm" else {"sequences": 96, "batch_tokens": 4096}
    answer = paleo.serve(*NODE, gpus=4, strategy=strategy, engine=engine, **options)
    stated = parse_engine_command(answer.service.launch_command)
    assert (stated.engine, stated.model, stated.sharding.text) == (engine, "meta-llama/Meta-Llama-3-8B", strategy)
    assert (stated.max_batched_tokens, stated.max_sequences) == (4096, 96)
    if engine != "tensorrt-llm":
        assert (stated.weight_format, stated.cache_format, stated.drafted) == ("fp8", "fp8", 3)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_written_command_starts_all_replicas(engine):
    stated = parse_engine_command(paleo.serve(*NODE, gpus=4, strategy="tp=2", engine=engine).service.launch_command)
    assert (stated.sharding, stated.replicas) == (Sharding(2), 2)
    shared = parse_engine_command("vllm serve deepseek-ai/DeepSeek-V3 -dp 8 --enable-expert-parallel")
    assert (shared.sharding, shared.replicas) == (Sharding(1, 1, 8, expert_parallel=True), 1)


def test_an_answer_names_the_network_as_its_hub_does():
    answer = paleo.serve(*NODE)
    assert answer.service.launch_command.startswith("vllm serve meta-llama/Meta-Llama-3-8B --tensor-parallel-size 1 ")
    again = paleo.serve(None, "dgx-h100", command=answer.service.launch_command)
    assert again.service.best.requests_per_s == answer.service.best.requests_per_s


def test_commands_of_the_field():
    line = "python3 -m sglang.launch_server --model-path /m/DeepSeek-R1 --tp 8"
    assert (parse_engine_command(line).engine, parse_engine_command(line).sharding) == ("sglang", Sharding(8))
    for flags, sharding in (
        ("--enable-dp-attention", Sharding(8)),
        ("--dp-size 8 --enable-dp-attention --ep-size 8", Sharding(1, 1, 8, expert_parallel=True)),
        ("--attn-dp-size 4", Sharding(2, 1, 4)),
    ):
        assert parse_engine_command(f"{line} {flags}").sharding == sharding
    assert parse_engine_command("vllm serve Qwen/Qwen3-14B-AWQ -tp 2 -dp 4").weight_format == "int4"
    assert parse_engine_command("vllm serve Qwen/Qwen3-14B-AWQ -tp 2 -dp 4").replicas == 4
    for text, message in (("vllm serve x -tp zwei", "expected a number"), ("vllm serve 'x", "No closing quotation")):
        with pytest.raises(SpecError, match=message):
            parse_engine_command(text)


def test_a_command_states_how_iterations_are_scheduled():
    old, new = load_engine("vllm-0.11"), load_engine("vllm")
    stated = [parse_engine_command(f"vllm serve m {flag}").overlapped_scheduler for flag in ("--async-scheduling", "")]
    assert stated == [True, None]
    ahead, behind = (
        old.with_scheduler(stated[0]),
        new.with_scheduler(parse_engine_command("vllm serve m --no-async-scheduling").overlapped_scheduler),
    )
    assert (ahead.host, ahead.host_per_sequence) == (new.host, 0.0)
    assert (behind.host, behind.host_per_sequence) == (old.host, old.host_per_sequence)
    assert (ahead.memory_share, old.with_scheduler(None)) == (old.memory_share, old)
    sglang = load_engine("sglang")  # no release of it in the catalog schedules between iterations
    assert (
        sglang.with_scheduler(parse_engine_command("sglang --disable-overlap-schedule").overlapped_scheduler) == sglang
    )


def test_a_command_answers_as_its_options_do(tmp_path):
    line = "vllm serve llama3-8b --tensor-parallel-size 2 --max-num-seqs 64 --kv-cache-dtype fp8"
    path = tmp_path / "serve.sh"
    path.write_text(line.replace(" --max", " \\\n  --max"))
    options = {"strategy": "tp=2", "sequences": 64, "cache": "fp8"}
    rates = [
        paleo.serve(None, "dgx-h100", gpus=2, command=line).service.best.requests_per_s,
        paleo.serve(None, "dgx-h100", gpus=2, command=str(path)).service.best.requests_per_s,
        paleo.serve(*NODE, gpus=2, **options).service.best.requests_per_s,
    ]
    assert rates == [rates[0]] * 3
    with pytest.raises(SpecError, match="no such file; expected a command line"):
        paleo.serve(None, "dgx-h100", command="/nowhere")


def test_speculation_gives_the_tokens_of_the_geometric_series():
    kernels = EngineKernels(drafted_tokens=3, acceptance=0.5)
    assert kernels.mean_emitted_tokens == 1 + 0.5 + 0.25 + 0.125
    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    usual, drafted, vain = (
        iteration_tables(model, system, Sharding(), Formats(), EngineKernels(drafted_tokens=count, acceptance=share))
        for count, share in ((0, 0.0), (3, 0.7), (3, 0.0))
    )
    one = [float(each.iteration_time(decoded=1, cached=500)) for each in (drafted, usual, vain)]
    assert one == sorted(one)
    many = [float(each.iteration_time(decoded=1024, cached=500)) for each in (usual, drafted)]
    assert one[0] / one[1] < many[1] / many[0]  # drafts pay where memory bounds, not where arithmetic does
    prompts = {"decoded": 0, "cached": 1, "chunks": 1, "length": 2048}
    assert float(drafted.iteration_time(**prompts)) == pytest.approx(float(usual.iteration_time(**prompts)))


def test_trees_of_drafts_verify_more_rows():
    tree = "--speculative-algorithm EAGLE3 --speculative-num-steps 4 --speculative-eagle-topk 4"
    stated = parse_engine_command(f"python3 -m sglang.launch_server --model x {tree} --speculative-num-draft-tokens 16")
    assert stated.speculation_settings == {"drafted": 4, "branches": 4, "verified": 16, "draft_vocabulary": 32000.0}
    assert parse_engine_command("vllm serve x").speculation_settings == {"drafted": 0}
    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    chain, wide, short = (
        iteration_tables(model, system, Sharding(), Formats(), EngineKernels(drafted_tokens=4, acceptance=0.6, **tree))
        for tree in ({}, {"branches": 4, "verified_tokens": 16}, {"draft_vocabulary": 32000.0})
    )
    assert (chain.rows_per_sequence, wide.rows_per_sequence) == (5, 16)
    times = [float(each.iteration_time(decoded=64, cached=500)) for each in (short, chain, wide)]
    assert times == sorted(times)


@pytest.mark.slow
def test_division_matches_rates_and_moves_the_cache():
    service = paleo.serve(*NODE, gpus=8, input=2000, output=200, ttft="1s", tpot="30ms", disaggregate=True).service
    split = service.disaggregation
    assert split is not None
    assert split.gpus <= 8
    memory = split.prefill_layout.memory
    link = service.system.levels[-1].link.bandwidth
    assert split.cache_transfer_time == pytest.approx(float(memory.sequence_bytes(np.array(2000.0))) / (0.7 * link))
    assert split.tpot <= 0.03
    assert split.ttft <= 1.0
    assert "prefill" in service.verdict


@pytest.mark.slow
def test_several_systems_and_engines_say_why():
    answer = paleo.serve("llama3-8b", "dgx-a100-80gb:2,dgx-h100:1", engine="auto", price="2 USD/h")
    rows = answer.to_dict()["systems"]
    assert [row["gpus"] for row in rows] in ([1, 2], [2, 1])
    assert rows[0]["usd_per_million_output"] <= rows[1]["usd_per_million_output"]
    assert "Engines: " in answer.headline
    for text, message in (("500~x", "MEAN~VARIATION"), ("~1", "--input")):
        with pytest.raises(SpecError, match=message):
            paleo.serve(*NODE, input=text)
    assert paleo.serve(*NODE, input="500~0.8").service.load.lengths.input_variation == 0.8


TABLE = """============ Serving Benchmark Result ============
Successful requests:                     200
Maximum request concurrency:             16
Benchmark duration (s):                  20.0
Total input tokens:                      100000
Total generated tokens:                  40000
Mean TTFT (ms):                          {ttft}
P99 TTFT (ms):                           900.0
Mean TPOT (ms):                          {tpot}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ttft", "tpot", "faults"),
    [(160, 8, []), (900, 8, ["server, queue and prompts"]), (160, 40, ["iterations of the engine"])],
)
def test_a_benchmark_says_which_part_is_off(tmp_path, capsys, ttft, tpot, faults):
    path = tmp_path / "bench.txt"
    path.write_text(TABLE.format(ttft=ttft, tpot=tpot))
    command = ["audit", str(path), "--system", "dgx-h100", "--from", "vllm serve llama3-8b -tp 1", "--json"]
    assert run(command) == 0
    document = json.loads(capsys.readouterr().out)
    assert [fault["name"] for fault in document["faults"]] == faults
    assert document["measured"]["tokens_per_s"] == 2000


def test_saved_and_spoilt_benchmarks(tmp_path):
    path = tmp_path / "bench.json"
    saved = {
        "completed": 10,
        "duration": 2.0,
        "total_input_tokens": 100,
        "total_output_tokens": 50,
        "request_rate": 5.0,
    }
    path.write_text(json.dumps({**saved, "mean_ttft_ms": 20.0, "mean_tpot_ms": 7.0, "request_rate": 5.0}))
    assert read_benchmark(path).serve_arguments == {"input": 10.0, "output": 5.0, "rate": 5.0}
    path.write_text(TABLE.format(ttft="nan", tpot=8))
    with pytest.raises(SpecError, match="mean_ttft_ms"):
        read_benchmark(path)
    path.write_text("step 1 loss 2.0")
    assert read_benchmark(path) is None


@pytest.mark.slow
def test_one_purchase_for_two_uses():
    training = Run(gpus=16, strategy="zero=3", batch=1)
    both = split_serving_and_training(
        "llama3-8b", "dgx-h100:16,dgx-h100:1", "train:2d,serve:20/s", run=training, price="2 USD/h"
    )
    first, second = both.splits
    assert first.serving_gpus + first.training_gpus <= 16
    assert first.training_gpus == 8
    assert first.rent_usd == pytest.approx(16 * 2 * 48)
    assert "is left to train" in second.problem
    longer = split_serving_and_training("llama3-8b", "dgx-h100:16", "train:4d,serve:20/s", run=training).splits[0]
    assert longer.trained_samples == pytest.approx(2 * first.trained_samples)
    for text in (
        "train:7d",
        "train:0d,serve:1/s",
        "train:xd,serve:1/s",
        "train:1d,serve:0/s",
        "train:1d,serve:1/s,eat:1",
    ):
        with pytest.raises(SpecError, match="--for"):
            parse_training_and_serving(text)
