"""Audits of synthetic logs: faults that are injected are named, clean logs are not accused."""

from __future__ import annotations

import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import paleo
from paleo import Prediction, Run, load_model, load_system, predict
from paleo.cli import run_command_line as command
from paleo.errors import SpecError
from paleo.logs.base import (
    NCCL_TESTS_PROGRAMS,
    TRAINING_LOG_READERS,
    logged_collective,
    read_log,
    read_log_lines,
    read_nccl_tests_log,
)
from paleo.report.audit import log_audit_verdict_text
from paleo.specs.run import replace_fields
from paleo.specs.software import load_software
from paleo.specs.system import System
from paleo.studies.audit import _HYPOTHESES, _automatic_seconds, audit_collectives, audit_training_log
from paleo.studies.collective import compare_algorithms
from paleo.studies.what_if import HARDWARE_SCALERS
from paleo.units import GIBIBYTE, MEBIBYTE

RUNS = {
    "gpt": ("gpt2-xl", "dgx-a100-80gb", Run(gpus=8, global_batch=64, microbatch=4, software="megatron-core")),
    "llama": (
        "llama3-8b",
        "dgx-h100",
        Run(gpus=32, global_batch=64, microbatch=1, strategy="zero=3", software="torchtitan", recompute="full"),
    ),
    "small": ("resnet50", "dgx-h100", Run(gpus=8, batch=16)),
    "many": ("gpt2-xl", "dgx-a100-80gb", Run(gpus=64, global_batch=128, microbatch=2, software="megatron-core")),
}


def prediction(
    name: str, system: Callable[[System], System] = lambda machine: machine, **changes: object
) -> Prediction:
    model, machine, run = RUNS[name]
    software = changes.pop("profile", None)
    return predict(load_model(model), system(load_system(machine)), replace_fields(run, changes), software)


def megatron_log(step: Prediction, seed: int, *, slow: float = 1.0, noise: float = 0.01, timers: bool = True) -> str:
    random, lines = np.random.default_rng(seed), []
    parts = step.breakdown
    computing = parts.compute + parts.memory_bound + parts.launch
    for number in range(1, 16):
        draw = math.exp(noise * random.standard_normal()) * (2.0 if number <= 2 else 1.0)
        seconds = (step.step_time + computing * (slow - 1.0)) * draw
        lines.append(
            f" iteration {number:8d}/     100 | consumed samples: {number * step.plan.global_batch} | elapsed time per"
            f" iteration (ms): {seconds * 1e3:.1f} | learning rate: 1.0E-04 | global batch size: "
            f"{step.plan.global_batch:5d} | lm loss: 9.1E+00 |"
        )
        if number == 2:
            allocated = (step.memory.total - step.memory.reserved) / MEBIBYTE
            lines.append(
                f"[Rank 0] (after 2 iterations) memory (MB) | allocated: 1.0 | max allocated: {allocated:.1f} |"
            )
        if timers:
            shares = {"forward-compute": computing / 3, "backward-compute": computing * 2 / 3}
            shares |= {"all-grads-sync": parts.communication_exposed, "optimizer": parts.optimizer}
            for name, value in shares.items():
                late = slow if name.endswith("compute") else 1.0
                fast, last = value * draw * 1e3, value * draw * late * 1e3
                lines.append(f"    {name} {'.' * 30}: ({fast:.2f}, {last * 1.005:.2f})")
    return "\n".join(lines)


def titan_log(step: Prediction, seed: int, noise: float = 0.01, tokens: float | None = None) -> str:
    random, lines = np.random.default_rng(seed), []
    allocated = (step.memory.total - step.memory.reserved) / GIBIBYTE
    rate = (step.tokens_per_s if tokens is None else tokens) / step.plan.gpus
    for number in range(1, 13):
        tps = rate * math.exp(noise * random.standard_normal()) / (3.0 if number == 1 else 1.0)
        lines.append(
            f"[titan] \x1b[32mstep: {number:2d}  loss:  7.1  grad_norm: 1.2  memory: {allocated:.2f}GiB(59.8%)"
            f"  \x1b[34mtps: {tps:,.0f}  tflops: 333.1  mfu: 33.7%\x1b[0m"
        )
    return "\n".join(lines)


def slower_host(name: str, factor: float) -> Prediction:
    software = load_software(RUNS[name][2].software)
    host = software.host.model_copy(
        update={"forward": software.host.forward * factor, "backward": software.host.backward * factor}
    )
    return prediction(name, profile=software.model_copy(update={"host": host}))


def clock(factor: float) -> Callable[[System], System]:
    return lambda machine: HARDWARE_SCALERS["arithmetic (FLOP/s)"](machine, factor)


def link(factor: float) -> Callable[[System], System]:
    return lambda machine: HARDWARE_SCALERS["link bandwidth"](machine, factor)


FAULTS: list[tuple[str, str, Callable[[], str]]] = [
    ("capped clock", "gpt", lambda: megatron_log(prediction("gpt", clock(0.6)), 1)),
    ("capped clock", "many", lambda: megatron_log(prediction("many", clock(0.75)), 2)),
    ("slow link", "many", lambda: megatron_log(prediction("many", link(0.1)), 3)),
    ("slow link", "gpt", lambda: megatron_log(prediction("gpt", link(0.2)), 4)),
    ("slow link", "llama", lambda: titan_log(prediction("llama", link(0.1)), 5)),
    ("missing overlap", "many", lambda: megatron_log(prediction("many", exchange="after"), 6)),
    ("host-bound", "small", lambda: megatron_log(slower_host("small", 3.0), 7)),
    ("wrong batch", "gpt", lambda: megatron_log(prediction("gpt", global_batch=32), 8, timers=False)),
    (
        "eager attention",
        "gpt",
        lambda: megatron_log(prediction("gpt", kernels={"attention": "unfused"}), 9, timers=False),
    ),
    ("straggler", "many", lambda: megatron_log(prediction("many"), 10, slow=1.25)),
]


def write(folder: Path, text: str) -> Path:
    path = folder / "train.log"
    path.write_text(text)
    return path


def test_injected_faults_are_named(tmp_path: Path) -> None:
    """Nine of ten, the right one first. A torchtitan log states steps and memory alone, which a slow clock explains as
    well as a slow link; both are named."""
    verdicts = []
    for fault, run, text in FAULTS:
        result = audit_training_log(read_log(write(tmp_path, text())), prediction(run))
        verdicts.append((fault, [named.name for named in result.faults]))
    right = [fault for fault, names in verdicts if names and names[0] == fault]
    assert len(right) >= 9, verdicts


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_clean_logs_are_not_accused(tmp_path: Path, seed: int) -> None:
    run = list(RUNS)[seed % 3]
    step = prediction(run)
    text = (
        titan_log(step, seed, 0.015) if run == "llama" else megatron_log(step, seed, noise=0.015, timers=seed % 2 == 0)
    )
    result = audit_training_log(read_log(write(tmp_path, text)), step)
    assert result.faults == ()
    assert result.interval[0] < step.step_time < result.interval[1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dp", "dp=8", "pp=2,dp=4"])
def test_the_run_goes_on_to_more_ranks(strategy: str, tmp_path: Path) -> None:
    step = prediction("gpt", strategy=strategy)
    result = audit_training_log(read_log(write(tmp_path, megatron_log(step, 1))), step)
    assert result.step_time_on_more_ranks is not None
    gpus, seconds, (low, high) = result.step_time_on_more_ranks
    assert gpus == 64 and low < seconds < high and seconds > step.step_time * 0.95


TEXTS = {
    "megatron-lm": " iteration   {n}/ 100 | elapsed time per iteration (ms): 1,500.0 | global batch size: 64 |",
    "torchtitan": "step: {n}  loss: 7.1  memory: 47.30GiB(59.8%)  tps: 5,762  tflops: 333.1  mfu: 33.7%",
    "nemo": "Training epoch 0, iteration {n}/99 | global_batch_size: 512 | train_step_timing in s: 1.5",
    "llm-foundry": "[batch={n}/100]:\n\t Train throughput/batches_per_sec: 0.5",
    "transformers-trainer": "  {n}%|#| {n}/100 [00:12<01:50,  1.50s/it]",
}


def test_every_kind_of_log_is_read(tmp_path: Path) -> None:
    assert set(TEXTS) == set(TRAINING_LOG_READERS)
    for kind, line in TEXTS.items():
        log = read_log(write(tmp_path, "noise\n" + "\n".join(line.format(n=n) for n in range(1, 9)) + "\nmore noise"))
        assert (log.kind, len(log.steps)) == (kind, 8)
        first = log.steps[0]
        assert (
            first.tokens_per_s == 5762
            if kind == "torchtitan"
            else first.seconds == pytest.approx(2.0 if kind == "llm-foundry" else 1.5)
        )


@pytest.mark.parametrize("text", ["", "hello\n" * 50, "step: 1 tps: 5\n", "\x00" * 5000, "step: 1 tps: nan\n" * 9])
def test_what_is_no_log_is_one_message(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError, match="no steps of a training"):
        read_log(write(tmp_path, text))
    with pytest.raises(SpecError, match="no such file"):
        read_log(tmp_path / "none.log")


def test_a_log_of_one_endless_line_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paleo.logs.base.MAX_LOG_CHARACTERS", 100_000)
    lines = read_log_lines(write(tmp_path, "first\n" + "x" * 2_000_000 + "\nlast\n"))
    assert [len(line) for line in lines] == [5, 4096]
    assert read_log_lines(write(tmp_path, "a" * 9_000 + "\nlast\n")) == ["a" * 4_096, "last"]


def test_logs_that_are_no_files_of_text_say_why(tmp_path: Path) -> None:
    packed = tmp_path / "train.log.gz"
    packed.write_bytes(gzip.compress(b"iteration 1/ 9 |"))
    for place, reason in (("/dev/zero", "a device or a pipe"), (tmp_path, "a folder"), (packed, "gunzip")):
        with pytest.raises(SpecError, match=reason):
            read_log_lines(place)


@pytest.mark.parametrize("figure", ["1.2.3", "9" * 400, ".", "0"])
def test_figures_of_logs_that_are_no_numbers_are_left_out(tmp_path: Path, figure: str) -> None:
    payloads = "\n".join(f" {n} 256 float sum -1 {figure} 1.0 1.0 0 3.0 1.0 1.0 0 " for n in range(1024, 1028))
    assert read_nccl_tests_log(write(tmp_path, f"{payloads}\n#  Rank {'9' * 5000} x\n")) is None
    timer = f"    forward-compute ....: ({figure}, {figure})"
    text = "\n".join(f"{TEXTS['megatron-lm'].format(n=n)}\n{timer}" for n in range(1, 9))
    assert not read_log(write(tmp_path, text)).steps[0].slowest_rank_parts


def nccl_log(operation: str, ranks: int, *, link: float = 1.0, late: float = 0.0, seed: int = 0) -> str:
    """As nccl-tests prints them: predicted times with noise, slower links, a later start [s]."""
    random = np.random.default_rng(seed)
    payloads = 2.0 ** np.arange(10, 31, 2)
    study = compare_algorithms(operation, payloads[-1], ranks, load_system("dgx-h100"))
    seconds = (_automatic_seconds(study, payloads) / link + late) * np.exp(0.05 * random.standard_normal(len(payloads)))
    program = next(name for name, meant in NCCL_TESTS_PROGRAMS.items() if meant == operation)
    lines = [
        f"# Collective test starting: {program}",
        f"#  Rank {ranks - 1:2d} Group  0 Pid 1 on node device  0 [0x07] H100",
    ]
    for payload, time in zip(payloads, 1e6 * seconds, strict=True):
        figures = f"{time:9.2f}  100.00  100.00      0"
        lines.append(f"{payload:12.0f} {payload / 4:12.0f}     float     sum      -1 {figures} {figures}")
    return "\n".join(lines)


@pytest.mark.parametrize("operation", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize(
    ("wrong", "fault"),
    [({}, None), ({"link": 0.4}, "slow link"), ({"late": 2e-4}, "late start"), ({"link": 2}, "faster than stated")],
)
def test_logs_of_nccl_tests(operation: str, wrong: dict[str, float], fault: str | None, tmp_path: Path) -> None:
    log = read_nccl_tests_log(write(tmp_path, nccl_log(operation, 16, **wrong)))
    assert log is not None and (log.operation, log.ranks, len(log.payloads)) == (operation, 16, 11)
    result = audit_collectives(log, logged_collective(log, None), 16, load_system("dgx-h100"))
    assert list(result.fault_time_ratios) == ([] if fault is None else [fault])
    assert result.time_on_more_ranks is not None and result.time_on_more_ranks[0] == 128
    if fault == "slow link":
        assert result.fault_time_ratios[fault] == pytest.approx(2.5, rel=0.1)


def test_an_operation_that_no_log_names_has_to_be_stated(tmp_path: Path) -> None:
    text = nccl_log("all_reduce", 8).partition("\n")[2]
    log = read_nccl_tests_log(write(tmp_path, text))
    assert log is not None
    with pytest.raises(SpecError, match="--operation"):
        logged_collective(log, None)
    with pytest.raises(SpecError, match="nearest: 'all_reduce'"):
        logged_collective(log, "allreduce")
    assert read_nccl_tests_log(write(tmp_path, megatron_log(prediction("gpt"), 1))) is None


@pytest.mark.slow
def test_an_audit_in_python_is_that_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    links = str(write(tmp_path, nccl_log("all_reduce", 16)))
    answer = paleo.audit(links, "dgx-h100")
    assert command(["audit", links, "--system", "dgx-h100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(answer.to_dict()))
    assert answer.to_frame()["gpus"].tolist() == [16] and answer.headline in str(answer)
    training = write(tmp_path, megatron_log(prediction("gpt"), 1))
    with pytest.raises(SpecError, match=r"model: .* is a log of a training \(megatron-lm.*name the network"):
        paleo.audit(training, "dgx-a100-80gb")
    answer = paleo.audit(training, "dgx-a100-80gb", "gpt2-xl", run=RUNS["gpt"][2])
    assert answer.headline.endswith("as predicted, nothing in this log says otherwise.")


def test_every_fault_has_advice() -> None:
    assert all(hypothesis.advice and hypothesis.name for hypothesis in _HYPOTHESES)


@pytest.mark.slow
def test_what_was_taken_for_granted_is_noted(tmp_path: Path) -> None:
    step = prediction("llama")
    titan, megatron = tmp_path / "titan.log", tmp_path / "megatron.log"
    titan.write_text("".join(f"step: {n}  loss:  7.1  memory: 47.30GiB(59.8%)  tps: 5,762\n" for n in range(1, 9)))
    megatron.write_text(megatron_log(step, 1))
    assert audit_training_log(read_log(megatron), step).assumptions == ()
    (assumed,) = audit_training_log(read_log(titan), step).assumptions
    assert "a step is taken to hold 64 samples of 8,192 tokens" in assumed
    (fits,) = audit_training_log(read_log(megatron), prediction("llama", strategy="dp", recompute="none")).assumptions
    assert "does not fit into memory" in fits


def _lines(text: str, change: Callable[[int, str], str]) -> str:
    """A log with the lines of its steps changed, by their place."""
    steps, lines = 0, []
    for line in text.splitlines():
        if line.startswith(" iteration"):
            line, steps = change(steps, line), steps + 1
        lines.append(line)
    return "\n".join(lines)


def _slower(line: str, factor: float) -> str:
    return re.sub(r"\(ms\): ([\d.]+)", lambda match: f"(ms): {float(match[1]) * factor:.1f}", line)


SPOILT: dict[str, tuple[Callable[[int, str], str], str]] = {
    "batch": (lambda _, line: re.sub(r"batch size: +(\d+)", r"batch size: \g<1>00", line), "samples per step"),
    "half slower": (lambda step, line: _slower(line, 3.0) if step % 2 else line, "standard deviation of steps"),
    "some slower": (lambda step, line: _slower(line, 3.0) if step % 6 == 5 else line, "of the steps take more than"),
    "skipped": (lambda step, line: line + " number of skipped iterations:   2 |" if step == 5 else line, "skipped"),
    "no numbers": (lambda step, line: line.replace("9.1E+00", "nan"), "15 of 15 records"),
    "resumed": (lambda step, line: line.replace(f"{step + 1:8d}/", f"{step % 8 + 1:8d}/"), "go back 1 time"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SPOILT)
def test_spoilt_logs_are_not_as_predicted(case: str, tmp_path: Path) -> None:
    change, said = SPOILT[case]
    step = prediction("gpt")
    text = _lines(megatron_log(step, 3, timers=False), change)
    answer = log_audit_verdict_text(audit_training_log(read_log(write(tmp_path, text)), step))
    assert said in answer and "nothing in this log says otherwise" not in answer


@pytest.mark.slow
def test_a_rank_that_is_slower_is_never_as_predicted(tmp_path: Path) -> None:
    step = prediction("gpt")
    answer = log_audit_verdict_text(
        audit_training_log(read_log(write(tmp_path, megatron_log(step, 3, slow=3.0))), step)
    )
    assert "straggler" in answer and "says otherwise" not in answer


def test_a_log_of_more_ranks_than_stated_is_not_as_predicted(tmp_path: Path) -> None:
    log = read_nccl_tests_log(write(tmp_path, nccl_log("all_reduce", 16)))
    assert log is not None
    answer = audit_collectives(log, "all_reduce", 8, load_system("dgx-h100")).verdict
    assert answer.endswith("the log is of 16 ranks; state --gpus 16.")


@pytest.mark.slow
def test_steps_that_scatter_beyond_all_numbers_have_an_interval(tmp_path: Path) -> None:
    step = prediction("gpt")
    text = _lines(megatron_log(step, 3, timers=False), lambda at, line: _slower(line, 10.0 ** (5 * (at % 4))))
    low, high = audit_training_log(read_log(write(tmp_path, text)), step).interval
    assert 0.0 < low < high < math.inf
