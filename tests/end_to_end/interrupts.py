"""Ctrl-C at random moments of every command: exit code 130, no traceback, no word of a child.

``python -m tests.end_to_end.interrupts --times 200 --seed 1`` prints each interrupt that was answered wrongly.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.json_documents import LOG, SAMPLES

NODE = ["--system", "dgx-a100-80gb"]
STUDY = """
models: [resnet50, gpt2]
systems: [dgx-a100-80gb]
axes: {gpus: [8, 16, 32, 64], batch: [1, 2, 4, 8, 16, 32], software: [pytorch-eager, megatron-core]}
"""
FLEET = "arrival,gpus,duration\n" + "".join(f"{10 * n},{1 + n % 8},7200\n" for n in range(400))
#: A call of each command that computes.
CALLS: dict[str, list[str]] = {
    "sweep": ["sweep", "study.yaml", "--jobs", "2", "-o", "table.csv"],
    "serial": ["sweep", "study.yaml", "--jobs", "1", "-o", "serial.csv"],
    "estimate": ["estimate", "llama3-8b", *NODE, "--gpus", "16", "--strategy", "auto", "--global-batch", "32"],
    "scale": ["scale", "gpt2", *NODE, "--gpus", "8,64,512", "--tokens", "1B"],
    "compare": ["compare", "gpt2", "--systems", "dgx-a100-80gb,dgx-h100", "--gpus", "8"],
    "plan": ["plan", "gpt2", *NODE, "--gpus", "8", "--global-batch", "32"],
    "collective": ["collective", "all_reduce", "--bytes", "1MB", "--ranks", "64", *NODE],
    "target": ["target", "mlperf:bert", *NODE, "--gpus", "8,64"],
    "serve": ["serve", "llama3-8b", *NODE, "--gpus", "2", "--rate", "2/s"],
    "rl": ["rl", "qwen3-0.6b", *NODE, "--gpus", "8", "--rollouts", "32", "--output", "100"],
    "tune": ["tune", "gpt2", *NODE, "--gpus", "8", "--trials", "8", "--max-tokens", "10M"],
    "fleet": ["fleet", "jobs.csv", *NODE, "--nodes", "2"],
    "audit": ["audit", "train.log", "--model", "lenet", *NODE, "--global-batch", "64"],
    "validate": ["validate", str(SAMPLES / "llm_iterations.csv")],
    "report": ["report", "gpt2", "--systems", "dgx-a100-80gb", "--gpus", "8", "-o", "page.html"],
    "trace": ["trace", "gpt2", *NODE, "--gpus", "8", "-o", "trace.json"],
    "summary": ["summary", "resnet50"],
    "list": ["list", "models"],
    "import": ["import", "hf", "config.json", "-o", "net.yaml"],
}
CONFIG = (
    '{"model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, '
    '"num_attention_heads": 8, "vocab_size": 32000}'
)
#: A frame of every traceback of a program's own lines: before them Python itself begins, and answers an interrupt.
PROGRAM = "in _run_code"


def make_inputs(folder: Path) -> None:
    """Write the files that the calls name."""
    (folder / "study.yaml").write_text(STUDY)
    (folder / "jobs.csv").write_text(FLEET)
    (folder / "config.json").write_text(CONFIG)
    (folder / "train.log").write_text("\n".join(LOG.format(n=number) for number in range(1, 13)) + "\n")


def start(call: list[str], folder: Path) -> subprocess.Popen[str]:
    """Start a command in a process group of its own, as a terminal does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore interrupts
    return subprocess.Popen(
        [sys.executable, "-m", "paleo", *call],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def seconds_of(call: list[str], folder: Path) -> float:
    """Return how long a command takes when nothing stops it."""
    began = time.perf_counter()
    process = start(call, folder)
    _, said = process.communicate(timeout=300)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{call}: {process.returncode}: {said[-300:]}")
    return time.perf_counter() - began


def interrupted(call: list[str], folder: Path, delay: float) -> tuple[int | None, str]:
    """Interrupt the process group of a command after a delay [s].

    Returns
    -------
    tuple of int and str
        The exit code, None if the command had ended or not begun by then, and what is wrong, or nothing.
    """
    process = start(call, folder)
    try:
        process.wait(delay)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.communicate()
        return None, ""
    out, said = process.communicate(timeout=60)
    if "KeyboardInterrupt" in said and PROGRAM not in said:
        return None, ""
    if "Traceback" in said or "KeyboardInterrupt" in said or "Exception ignored" in said:
        return process.returncode, f"says {said[-400:]!r}"
    if process.returncode in (0, 1) and (out or "wrote" in said):  # it had answered before the interrupt came
        return process.returncode, ""
    return process.returncode, "" if process.returncode == 130 else f"exit code {process.returncode}: {said[-400:]!r}"


def main() -> int:
    """Interrupt many commands; 1 where one answered wrongly."""
    parser = argparse.ArgumentParser(prog="python -m tests.end_to_end.interrupts", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=200)
    given = parser.parse_args()
    rng, codes, wrong = random.Random(given.seed), Counter[str](), 0
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_inputs(folder)
        seconds: dict[str, float] = {}
        for number in range(given.times):
            name = sorted(CALLS)[number % len(CALLS)]
            seconds[name] = seconds.get(name) or seconds_of(CALLS[name], folder)
            delay = rng.uniform(0.1, seconds[name])
            code, fault = interrupted(CALLS[name], folder, delay)
            codes[f"{name} {code}"] += 1
            if fault:
                wrong += 1
                sys.stdout.write(f"{name} after {delay:.2f} of {seconds[name]:.2f} s: {fault}\n")
                sys.stdout.flush()
    sys.stdout.write(f"{dict(sorted(codes.items()))}\n{given.times} interrupts, {wrong} answered wrongly\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
