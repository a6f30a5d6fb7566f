"""Random valid calls of all commands, and what must hold of every document that they print.

``python -m tests.properties.random_runs --runs 2000 --seed 1`` prints what is broken, and the call that shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import random
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paleo.cli import run_command_line as run
from paleo.report.json_schemas import json_schema
from paleo.specs.system import load_system
from tests.json_documents import LOG, NCCL, SAMPLES, violations

Call = list[str]
Document = dict[str, Any]
#: Rounding of sums, as a fraction.
ROUNDING = 1e-9
IMAGES = ("lenet", "alexnet", "vgg16", "resnet50", "resnet18", "unet", "inception_v3", "efficientnet_b0", "densenet121")
LANGUAGE = ("bert_base", "gpt2", "t5_small", "llama3.2-1b", "qwen3-0.6b", "lstm_lm", "olmoe-1b-7b", "transformer_big")
LARGE = ("llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "llama3-70b", "deepseek_v2-lite")
OTHERS = ("dlrm", "ncf", "deepspeech2", "vit_b16", "whisper_tiny", "clip_vit-b32", "stable-diffusion-v1.5", "rnnt")
MODELS = IMAGES + LANGUAGE + LARGE + OTHERS
SYSTEMS = (
    "dgx-a100-80gb", "dgx-h100", "dgx-b200", "dgx-1-v100", "dgx-1-p100", "mi300x-8", "tpu-v4-pod", "pcie4-8gpu",
    "rtx-4090-4gpu-25gbe", "gb200-nvl72", "paleo-k20x-infiniband", "l4-8gpu-100gbe", "selene", "titan-ornl", "p100-sxm2",
    "titan-x-pascal", "gtx-1080-ti", "k40", "rtx-2080-ti", "v100-sxm2-16gb", "h200-sxm", "l40s", "m40", "t4",
)  # fmt: skip
NODES = ("dgx-a100-80gb", "dgx-h100", "selene", "dgx-b200", "pcie4-8gpu")
STRATEGIES = (
    "dp", "zero=1", "zero=2", "zero=3", "tp=2", "tp=4,sp", "pp=2", "pp=4,vp=2", "tp=2,pp=2", "cp=2", "ep=2", "owt",
    "zero=1,shard=2", "fsdp", "spatial=2", "auto",
)  # fmt: skip
SYNCHRONY = ("bsp", "async", "ssp:4", "local:8", "diloco:20", "easgd:4", "gossip:exp2", "gossip:ring")
COMPRESSION = ("fp16", "onebit", "topk:0.01", "powersgd:2", "qsgd:4", "terngrad")


def _some(rng: random.Random, chance: float, *options: tuple[str, tuple[str, ...]]) -> Call:
    """Each of the options by a chance, with one of its values."""
    return [word for name, values in options if rng.random() < chance for word in (name, rng.choice(values)) if word]


def _machine(rng: random.Random) -> Call:
    return ["--system", rng.choice(SYSTEMS)]


def _run(rng: random.Random, chance: float = 0.15) -> Call:
    """Options of a run."""
    batch = (
        [] if rng.random() < 0.3 else [rng.choice(("--batch", "--global-batch")), rng.choice(("8", "32", "64", "512"))]
    )
    return batch + _some(
        rng, chance,
        ("--dtype", ("fp32", "tf32", "bf16", "fp16", "fp8")), ("--optimizer", ("sgd", "momentum", "adamw", "muon", "lamb")),
        ("--strategy", STRATEGIES), ("--recompute", ("none", "selective", "full")), ("--microbatch", ("1", "2", "4")),
        ("--schedule", ("gpipe", "1f1b", "zb-v")), ("--lora", ("8:all", "16:attention")), ("--qlora", ("",)),
        ("--compress", COMPRESSION), ("--consistency", SYNCHRONY), ("--servers", ("1", "4")),
        ("--jitter", ("0.1", "0.05,0.02", "traces")), ("--nodes", ("packed", "random", "spread:4")),
        ("--background", ("0.3",)), ("--neighbour", ("all_to_all:8:0.4",)), ("--calibration", ("ideal", "ppp=0.5")),
        ("--software", ("megatron-core", "fsdp2", "torchtitan", "xla-tpu", "tensorflow2", "deepspeed", "caffe")),
        ("--set", ("input={decode: 5 ms}", "exchange.bucket=5 MiB", "clip=norm", "forward_only=true", "exchange=after", "offload=optimizer")),
    )  # fmt: skip


def _tariff(rng: random.Random) -> Call:
    return _some(
        rng, 0.2, ("--price", ("2 USD/h", "0.4 USD/h")), ("--electricity", ("0.1 USD/kWh",)), ("--pue", ("1.2",)),
        ("--host-power", ("150 W",)), ("--term", ("spot", "1-year")), ("--buy", ("3",)),
    )  # fmt: skip


def _amount(rng: random.Random, model: str, chance: float = 0.5) -> Call:
    if rng.random() > chance:
        return []
    language = model in LANGUAGE + LARGE
    return rng.choice([["--samples", "1M"], ["--tokens", "10M"] if language else ["--samples", "20000"]])


def _failures(rng: random.Random) -> Call:
    return _some(
        rng,
        0.15,
        ("--goodput", ("",)),
        ("--failures", ("4/knodeday", "40/knodeday")),
        ("--checkpointing", ("async", "memory")),
    )


def estimate(rng: random.Random) -> Call:
    model = rng.choice(MODELS)
    amount = _amount(rng, model)
    return ["estimate", model, *_machine(rng), "--gpus", rng.choice(("1", "1", "4", "8", "16", "64")), *_run(rng), *amount,
            *(_tariff(rng) + _failures(rng) if amount else [])]  # fmt: skip


def scale(rng: random.Random) -> Call:
    model = rng.choice(IMAGES + LANGUAGE + OTHERS)
    return ["scale", model, "--system", rng.choice(NODES), *rng.choice(([], ["weak"], ["both"])), "--gpus",
            rng.choice(("1,8", "1,2,4,64", "8,7,12", "16")), *_run(rng, 0.1), *_amount(rng, model, 0.3)]  # fmt: skip


def compare(rng: random.Random) -> Call:
    model = rng.choice(IMAGES + LANGUAGE + OTHERS)
    return ["compare", model, "--systems", ",".join(rng.sample(SYSTEMS, 3)), "--gpus", rng.choice(("1", "4", "8")), *_run(rng, 0.1),
            *_amount(rng, model, 0.6), *_tariff(rng), *_some(rng, 0.3, ("--objective", ("cost", "energy", "time")))]  # fmt: skip


def plan(rng: random.Random) -> Call:
    model = rng.choice(("lenet", "resnet50", "gpt2", "bert_base", "llama3.2-1b", "olmoe-1b-7b"))
    call = [
        "plan",
        model,
        "--system",
        rng.choice(NODES),
        "--gpus",
        rng.choice(("1", "4", "8", "1,8")),
        "--global-batch",
        "32",
    ]
    return call + _some(rng, 0.2, ("--explain", ("",)), ("--recompute", ("none", "full")), ("--objective", ("time", "cost", "energy")),
                        ("--tokens" if model not in IMAGES else "--samples", ("10M",)), ("--software", ("megatron-core", "fsdp2", "any")))  # fmt: skip


def collective(rng: random.Random) -> Call:
    operation = rng.choice(("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"))
    return ["collective", operation, "--bytes", rng.choice(("1kB", "1MB", "3GB")), "--ranks", rng.choice(("2", "7", "8", "64")),
            *_machine(rng)]  # fmt: skip


def target(rng: random.Random) -> Call:
    task = rng.choice(("mlperf:bert", "mlperf:resnet", "mlperf:ssd", "mlperf:dlrm"))
    return ["target", task, "--system", rng.choice(NODES), "--gpus", rng.choice(("8", "8,64", "1,16")), *_tariff(rng),
            *_some(rng, 0.3, ("--batch", ("256", "4096")), ("--dtype", ("bf16", "fp32")))]  # fmt: skip


def serve(rng: random.Random) -> Call:
    model = rng.choice(("llama3-8b", "qwen3-0.6b", "qwen3-30b-a3b", "gpt2", "llama3-70b"))
    load = rng.choice(([], ["--rate", "2/s"], ["--users", "16"], ["--users", "16", "--think", "5s"]))
    return ["serve", model, "--system", rng.choice((*NODES, "l4", "h200-sxm", "mi300x-8")), "--gpus", rng.choice(("1", "2", "8")), *load,
            *_tariff(rng), *_some(rng, 0.2, ("--ttft", ("2s", "50ms")), ("--tpot", ("50ms", "10ms")), ("--weights", ("fp8", "bf16")),
            ("--cache", ("fp8",)), ("--prefix-hit", ("0.5",)), ("--length-variation", ("0.5",)), ("--engine", ("sglang", "tensorrt-llm")),
            ("--input", ("200",)), ("--output", ("50",)))]  # fmt: skip


def rl(rng: random.Random) -> Call:
    return ["rl", rng.choice(("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b")), "--system", rng.choice(NODES), "--gpus", rng.choice(("8", "16")),
            "--rollouts", rng.choice(("32", "128")), "--output", "100", *_tariff(rng), *_some(rng, 0.3,
            ("--algorithm", ("grpo", "ppo", "dpo", "rloo", "dapo")), ("--staleness", ("1",)), ("--batch", ("16",)))]  # fmt: skip


def summary(rng: random.Random) -> Call:
    return ["summary", rng.choice(MODELS), *_some(rng, 0.3, ("--batch", ("1", "7")), ("--dtype", ("bf16", "fp32")))]


def audit(rng: random.Random) -> Call:
    if rng.random() < 0.5:
        return ["audit", "nccl.log", "--system", rng.choice(NODES)]
    return [
        "audit",
        "train.log",
        "--model",
        rng.choice(("lenet", "resnet50", "gpt2")),
        *_machine(rng),
        "--global-batch",
        "64",
    ]


def validate(rng: random.Random) -> Call:
    return ["validate", str(rng.choice(sorted(SAMPLES.glob("*.csv"))))]


#: Commands, and how many of a hundred calls are of each.
COMMANDS: dict[Callable[[random.Random], Call], int] = {
    estimate: 42, scale: 10, compare: 8, plan: 4, collective: 8, target: 3, serve: 6, rl: 3, summary: 6, audit: 5, validate: 5,
}  # fmt: skip


def call_of(seed: int, number: int) -> Call:
    """The call of a number."""
    rng = random.Random(f"{seed}/{number}")
    return rng.choices(list(COMMANDS), list(COMMANDS.values()))[0](rng)


def answer(call: Call) -> tuple[int, Document | None, str]:
    """The exit code, the document and what stands on stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*call, "--json"])
    return code, json.loads(out.getvalue()) if code in (0, 1) and out.getvalue() else None, err.getvalue()


# what must hold


def broken(call: Call, document: Document) -> Iterator[str]:
    """Everything that is wrong with a document."""
    yield from violations(document, json_schema(call[0]))
    yield from _numbers(document)
    yield from CHECKS.get(call[0], lambda call, document: iter(()))(call, document)


#: Keys of numbers that may lie below zero.
SIGNED = {"bias", "total_error", "offset", "saved_s", "difference", "exponent"}


def _numbers(value: Any, where: str = "") -> Iterator[str]:
    """Signs, and intervals that hold what they are of."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _numbers(item, f"{where}[{index}]")
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if isinstance(item, int | float) and not isinstance(item, bool) and item < 0 and key not in SIGNED:
            yield f"{where}.{key} is {item}: below zero"
        if (
            isinstance(item, int | float)
            and key in ("mfu", "hfu", "goodput", "efficiency")
            and item > (1 + ROUNDING if key != "efficiency" else 1e3)
        ):
            yield f"{where}.{key} is {item}: above one"
        if isinstance(item, list) and len(item) == 2 and "interval" in key and None not in item:
            middle = value.get(key.replace("_interval", ""))
            if not item[0] <= item[1] or (
                middle is not None and not item[0] * (1 - ROUNDING) <= middle <= item[1] * (1 + ROUNDING)
            ):
                yield f"{where}.{key} is {item}, of {middle}"
        yield from _numbers(item, f"{where}.{key}")


def _equal(name: str, one: float, other: float) -> Iterator[str]:
    if not math.isclose(one, other, rel_tol=ROUNDING, abs_tol=1e-15):
        yield f"{name}: {one} is not {other}"


def _step(step: Document, where: str = "step") -> Iterator[str]:
    """The parts of a step add up to the step, and its rates follow from it."""
    parts = dict(step["breakdown_s"])
    total = parts.pop("communication_total")
    yield from _equal(f"{where}: sum of the parts", sum(parts.values()), step["step_time_s"])
    yield from _equal(f"{where}: samples/s", step["samples_per_s"] * step["step_time_s"], step["global_batch_size"])
    if total < parts["communication_exposed"] * (1 - ROUNDING):
        yield f"{where}: communication {total} is less than what is exposed of it, {parts['communication_exposed']}"


def _estimate(call: Call, document: Document) -> Iterator[str]:
    yield from _step(document)
    memory, device = dict(document["memory_bytes"]), load_system(document["system"]).device
    total, capacity = memory.pop("total"), memory.pop("capacity")
    yield from _equal("memory", sum(memory.values()), total)
    if document["fits"] != (total <= capacity):
        yield f"fits is {document['fits']} of {total} in {capacity}"
    if document["hfu"] < document["mfu"] * (1 - ROUNDING) and "--qlora" not in call and "--lora" not in call:
        yield f"hfu {document['hfu']} is below mfu {document['mfu']}"
    possible = (
        document["step_time_s"] * document["gpus"] * device.peak_flops_per_s(device.arithmetic_dtype(document["dtype"]))
    )
    yield from _equal(
        "direct rate", document["direct_flops_per_s"] * document["step_time_s"], document["flops_per_step"]
    )
    if document["mfu"] * possible > document["flops_per_step"] * (1 + ROUNDING):
        yield f"mfu {document['mfu']} counts more than {document['flops_per_step']}"
    training = document["training"]
    if training is None:
        return
    compressed = {} if "consistency" in document else document.get("compression", {})
    step = compressed.get("mean_step_time_s", document["step_time_s"])
    ideal = document.get("goodput", {}).get("work_s", training["time_s"])
    yield from _equal("time of a training", training["steps"] * step, ideal)
    if training["rent_usd"] is not None and training["price_usd_per_hour"] is not None:
        yield from _equal(
            "rent = price x hours", training["rent_usd"], training["price_usd_per_hour"] * training["time_s"] / 3600
        )
        yield from _equal("cost", training["cost_usd"], training["rent_usd"] + (training["electricity_usd"] or 0.0))
    if training["energy_j"] is not None and training["energy_j"] > training["energy_j_at_tdp"] * (1 + ROUNDING):
        yield f"energy {training['energy_j']} above that at design power {training['energy_j_at_tdp']}"


def _scale(call: Call, document: Document) -> Iterator[str]:
    for number, point in enumerate(document["points"]):
        if point.get("step_time_s") is not None and "--consistency" not in call:
            yield from _step(point, f"points[{number}]")


def _collective(call: Call, document: Document) -> Iterator[str]:
    best, bound = min(row["time_s"] for row in document["algorithms"]), document.get("lower_bound_s")
    if bound is not None and best < bound * (1 - ROUNDING):
        yield f"time {best} is below the bound {bound}"


def _plan(call: Call, document: Document) -> Iterator[str]:
    """Each plan is what `paleo estimate` says of its command."""
    import shlex

    for number, row in enumerate(document["plans"][:2]):
        if not row.get("command"):
            continue
        code, other, text = answer(shlex.split(row["command"])[1:])
        if other is None:
            yield f"plans[{number}]: {row['command']} ends with {code}: {text[:200]}"
            continue
        yield from _equal(f"plans[{number}]: {row['command']}", row["step_time_s"], other["step_time_s"])


CHECKS: dict[str, Callable[[Call, Document], Iterator[str]]] = {
    "estimate": _estimate, "scale": _scale, "collective": _collective, "plan": _plan,
}  # fmt: skip


def faults_of(call: Call) -> tuple[str, list[str]]:
    """How a call ended, and what is wrong with it."""
    try:
        code, document, text = answer(call)
    except Exception:
        return "raised", [traceback.format_exc()[-400:]]
    if code not in (0, 1, 2):
        return str(code), [text]
    try:
        return str(code), [] if document is None else list(broken(call, document))
    except Exception:
        return "raised", [traceback.format_exc()[-400:]]


def main() -> None:
    """Run many calls."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--messages", action="store_true")
    given = parser.parse_args()
    codes: Counter[str] = Counter()
    import os

    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("nccl.log").write_text(NCCL)
        Path("train.log").write_text("\n".join(LOG.format(n=number) for number in range(1, 13)) + "\n")
        for number in range(given.first, given.first + given.runs):
            call = call_of(given.seed, number)
            code, faults = faults_of(call)
            codes[f"{call[0]} {code}"] += 1
            if given.messages and code == "2":
                sys.stdout.write(f"  {answer(call)[2].strip()[:300]}\n")
            if faults:
                sys.stdout.write(f"{number}: {' '.join(call)}\n    " + "\n    ".join(faults[:6]) + "\n")
                sys.stdout.flush()
    sys.stdout.write(f"{dict(sorted(codes.items()))}\n")


if __name__ == "__main__":
    main()
