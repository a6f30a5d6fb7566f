"""Hostile command lines: every command with every option that it declares, sensible values among senseless ones."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import typer

from paleo.cli import app_with_all_commands
from tests.fuzz.inputs import Call, kind
from tests.fuzz.mutations import HOSTILE, text_mutated

#: What an option usually takes; others are drawn from all of these.
USUAL: dict[str, tuple[str, ...]] = {
    "model": ("lenet", "bert_base", "alexnet"), "system": ("dgx-a100-80gb", "v100-pcie-16gb", "selene"),
    "systems": ("dgx-a100-80gb,dgx-h100", "dgx-a100-80gb:8,dgx-h100:4"), "gpus": ("1", "8", "1,2,4"),
    "batch": ("8", "32"), "rate": ("2/s",), "input": ("200",),
    "strategy": ("dp", "tp=2,pp=2", "zero=3", "owt", "fsdp"), "dtype": ("bf16", "fp32", "fp8"),
    "bytes_": ("1MB", "64KiB"),
    "operation": ("all_reduce", "all_gather"), "ranks": ("8", "2"),
    "set_": ("exchange.bucket=50 MiB", "model.seq=64", "pipeline.cut=time", "model.x=1"),
    "plot": ("p.png", "p.svg", "p.pdf", "/dev/null", "no/p.png"),
    "output": ("o.json", "o.html", "o.yaml", "/dev/null", "/dev/full", "."),
    "epochs": ("1", "90"), "price": ("2 USD/h",), "electricity": ("0.1 USD/kWh",), "kind": ("models", "links"),
    "objective": ("time", "cost"), "schedule": ("gpipe", "1f1b", "zbv"), "recompute": ("none", "full"), "seq": ("64",),
    "counts": ("1,2",), "mode": ("strong", "weak", "both"), "name": ("lenet", "ring", "adamw"),
    "words": ("lenet", "adamw"),
    "run_file": ("/dev/zero", "/dev/null", "."), "software": ("megatron-core", "jax"),
    "calibration": ("ideal", "ppp=0.5"),
    "task": ("mlperf:bert",), "trials": ("8", "30"), "max_samples": ("9k",), "max_tokens": ("1M",),
    "nodes": ("2", "auto"),
}  # fmt: skip
#: Commands that other kinds of input cover, or that would measure or run what they are given.
LEFT_OUT = {"import", "calibrate", "sweep", "validate", "audit"}
#: Options that would take long by intent, or write where they are told.
NEVER = {"version", "help", "install_completion", "show_completion"}


@cache
def _commands() -> dict[str, list[Any]]:
    group: Any = typer.main.get_command(app_with_all_commands())
    return {name: command.params for name, command in group.commands.items() if name not in LEFT_OUT}


@kind("options", cost_ms=60)
def options(rng: random.Random, folder: Path) -> Call:
    commands = _commands()
    name = rng.choice(sorted(commands))
    call = [name]
    chosen = [param for param in commands[name] if param.name not in NEVER]
    for param in chosen:
        if (param.required and rng.random() < 0.97) or (not param.required and rng.random() < 0.12):
            call += _words(param, rng, folder)
    if rng.random() < 0.05:
        call.insert(rng.randrange(len(call) + 1), str(rng.choice(HOSTILE)))
    return [word.replace("\0", "") for word in call]


def _words(param: Any, rng: random.Random, folder: Path) -> list[str]:
    if getattr(param, "is_flag", False):
        return [param.opts[0]]
    value = rng.choice(USUAL.get(param.name, ("1", "8", "x"))) if rng.random() < 0.75 else str(rng.choice(HOSTILE))
    if rng.random() < 0.05:
        value = text_mutated(value, rng)
    if param.name in ("plot", "output") and not value.startswith("/dev/"):
        value = str(folder / value.replace("/", "_")) if value not in (".", "") else value
    return [value] if param.param_type_name == "argument" else [param.opts[0], value]
