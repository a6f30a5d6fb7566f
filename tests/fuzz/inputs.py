"""Hostile inputs of every kind that the command line takes, each a folder's files and the words of a call.

A kind is a function of a generator of random numbers and an empty folder; it writes its files there and returns the
arguments. The same generator gives the same input.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from paleo.specs.catalog import entry_files
from paleo.specs.loading import read_yaml
from tests.fuzz.mutations import HOSTILE, bytes_mutated, mutated, text_mutated

#: libyaml's writer where it was built: the pure one takes longer than most answers.
FAST = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
SAMPLES = Path(__file__).parent / "samples"
Call = list[str]
Kind = Callable[[random.Random, Path], Call]
KINDS: dict[str, Kind] = {}
#: Processor time of an input of each kind [ms], about: how often it is drawn.
COSTS: dict[str, float] = {}

MODEL: dict[str, Any] = {
    "title": "A network with every kind of entry", "task": "tests", "source": "none", "tokens": "=seq",
    "params": {"seq": 16, "hidden": 32, "heads": 4, "layers": 3, "vocab": 64, "wide": "=4 * hidden"},
    "inputs": {"words": {"dims": {"batch": "=batch", "seq": "=seq"}, "role": "index"}},
    "blocks": {
        "feed_forward": {
            "args": {"width": "required"},
            "layers": [{"branches": [["layer_norm", {"mlp": {"ffn": "=width"}}], []], "join": "add"}],
        }
    },
    "layers": [
        {"name": "embed", "embedding": {"entries": "=vocab", "features": "=hidden"}},
        {
            "repeat": "=layers", "name": "block",
            "layers": [
                {"branches": [["layer_norm", {"attention": {"heads": "=heads"}}], []], "join": "add"},
                {"feed_forward": {"width": "=4 * hidden"}},
            ],
        },
        {"name": "head", "linear": {"features": "=vocab", "dim": "vocab", "bias": False, "tie": "embed"}},
        "cross_entropy",
    ],
    "dataset": {"name": "words", "samples": 1000, "source": "none"},
    "expect": {"parameters": 41280, "source": "counted by hand"},
}  # fmt: skip
VISION: dict[str, Any] = {
    "title": "A small convolutional network", "task": "tests", "source": "none",
    "inputs": {"image": {"dims": {"batch": "=batch", "channels": 3, "height": 16, "width": 16}}},
    "layers": [
        {"name": "stem", "conv": {"channels": 8, "kernel": 3, "stride": 1, "padding": 1}}, "batch_norm", "relu",
        {"branches": [[{"conv": {"channels": 8, "kernel": 1}}], []], "join": "add"},
        {"max_pool": {"kernel": 2}}, {"dropout": {"rate": 0.5}}, "flatten", {"linear": {"features": 10}},
        "cross_entropy",
    ],
}  # fmt: skip
RUN: dict[str, Any] = {
    "gpus": 8, "batch": 4, "microbatch": 2, "dtype": "bf16", "optimizer": "adamw", "strategy": "tp=2,pp=2,dp=2,zero=1",
    "schedule": "1f1b", "recompute": "selective", "software": "pytorch-eager", "calibration": "auto",
    "exchange.bucket": "25 MiB",
    "offload": "none", "placement": {"block.*": {"ffn": "tp"}}, "recompute.by_layer": {"block.[0-3]": "full"},
    "experts.imbalance": 1.2, "input": {"sample": "100 kB", "storage": "1 GB/s", "decode": "1 ms", "cores": 4},
    "pipeline.cut": "uniform", "lora": "8:all", "qlora": False, "freeze": [], "model": {"seq": 32},
}  # fmt: skip
STUDY: dict[str, Any] = {
    "models": ["lenet"], "systems": ["dgx-a100-80gb"], "run": {"optimizer": "momentum"},
    "axes": {
        "gpus": [1, 8], "batch": [64], "system.device.memory.bandwidth": ["x0.5", "3 TB/s"], "epochs": [1, 90],
        "system.levels[*].link.latency": ["x0"], "gpu_price": ["1 USD/h"], "electricity": ["0.1 USD/kWh"], "pue": [1.1],
    },
}  # fmt: skip
HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 20,
    "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3, "vocab_size": 11,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 64, "rope_scaling": {"factor": 2.0}, "tie_word_embeddings": False, "num_experts": 4,
    "num_experts_per_tok": 2, "layer_types": ["full_attention"] * 3,
}  # fmt: skip
LOG = """iteration       10/     100 | consumed samples:         2560 | elapsed time per iteration (ms): 612.3 |
 throughput per GPU (TFLOP/s/GPU): 180.2 | learning rate: 1.0E-04 | global batch size:   256 | lm loss: 9.1E+00 |
step: 11  loss: 8.01  memory: 40.1GiB(50.5%)  tps: 5,123  tflops: 210.1  mfu: 38.2%
{'loss': 2.31, 'grad_norm': 1.2, 'learning_rate': 5e-05, 'epoch': 0.1}
       #       size    count   type   redop   root   time   algbw   busbw
    1048576     262144   float     sum     -1   52.3   20.1    35.1
"""


JOBS: dict[str, Any] = {
    "jobs": [
        {"name": "a", "team": "x", "duration": "4 h", "gpus": "8..16", "deadline": "60 h", "preemptible": True},
        {"name": "b", "duration": "1 h", "gpus": 4, "arrival": "30min", "after": ["a"], "priority": 2.0},
        {"name": "c", "model": "lenet", "samples": "60k", "gpus": 2, "run": {"global_batch": 64}},
        {"name": "d", "model": "lenet", "gpus": 2, "tune": {"trials": 8, "method": "asha", "max_samples": "10k"}},
    ]
}
TRACE = "job_id,user,submit_time,gpu_num,duration\n7,u1,0,8,90\n8,u2,5,1,60\n9,u1,7,16,600\n10,u3,8,3,30\n"


NCCL = (
    "# Collective test starting: all_reduce_perf\n#  Rank  7 Group  0 Pid 1 on node device  0 [0x07] A100\n"
    + "\n".join(
        f"{2**power:12d} {2**power // 4:12d}   float   sum   -1  {5 + 2**power / 1e5:8.2f}  100.00  100.00      0"
        f"  {5 + 2**power / 1e5:8.2f}  100.00  100.00      0"
        for power in range(10, 31, 2)
    )
)


def kind(name: str, *, cost_ms: float) -> Callable[[Kind], Kind]:
    """Register a kind of input, and the processor time of one."""

    def add(function: Kind) -> Kind:
        KINDS[name], COSTS[name] = function, cost_ms
        return function

    return add


@cache
def _good(kind_of_entry: str, name: str) -> Any:
    return read_yaml(entry_files(kind_of_entry)[name])


def _written(path: Path, data: Any, rng: random.Random) -> str:
    """A spoilt file: its data changed, or its text, or its bytes."""
    way = rng.random()
    spoilt = mutated(data, rng) if way < 0.8 else data
    text = yaml.dump(spoilt, Dumper=FAST, sort_keys=False, allow_unicode=True, width=10_000)
    if 0.8 <= way < 0.93:
        for _ in range(rng.choice((1, 1, 2, 3))):
            text = text_mutated(text, rng)
    content = text.encode("utf-8", "surrogatepass")
    path.write_bytes(bytes_mutated(content, rng) if way >= 0.93 else content)
    return str(path)


_ESTIMATES: tuple[Call, ...] = (
    ["--json"],
    ["--json", "--gpus", "16"],
    ["--gpus", "8", "-v"],
    ["--gpus", "8", "--strategy", "tp=2,pp=2"],
)


@kind("model", cost_ms=15)
def model(rng: random.Random, folder: Path) -> Call:
    file = _written(folder / "model.yaml", rng.choice((MODEL, MODEL, VISION)), rng)
    system = ["--system", "dgx-a100-80gb"]
    return rng.choice(
        (
            ["summary", file, "--json"], ["summary", file], ["show", file],
            ["estimate", file, *system, *rng.choice(_ESTIMATES)],
            ["estimate", file, *system, "--gpus", "12", "--strategy", "pp=3", "--batch", "8", "--microbatch", "1"],
            ["scale", file, *system, "--gpus", "1,8", "--json"], ["trace", file, *system, "-o", str(folder / "t.json")],
            ["plan", file, *system, "--gpus", "4", "--global-batch", "32", "--json"],
        )
    )  # fmt: skip


@kind("system", cost_ms=20)
def system(rng: random.Random, folder: Path) -> Call:
    data = dict(_good("systems", rng.choice(("dgx-a100-80gb", "selene"))))
    data["device"] = rng.choice((data["device"], _good("devices", "a100-sxm4-80gb")))
    return _hardware_call(_written(folder / "system.yaml", data, rng), rng)


@kind("device", cost_ms=17)
def device(rng: random.Random, folder: Path) -> Call:
    file = _written(folder / "device.yaml", _good("devices", rng.choice(("a100-sxm4-80gb", "h100-sxm5-80gb"))), rng)
    if rng.random() < 0.3:
        return rng.choice((["show", file], ["show", file, "--json"], _hardware_call(file, rng)))
    (folder / "system.yaml").write_text("extend: dgx-a100-80gb\ndevice: ./device.yaml\n")
    return _hardware_call(str(folder / "system.yaml"), rng)


@kind("link", cost_ms=16)
def link(rng: random.Random, folder: Path) -> Call:
    file = _written(folder / "link.yaml", _good("links", rng.choice(("nvswitch2-a100", "nvlink4-h100"))), rng)
    if rng.random() < 0.3:
        return rng.choice((["show", file], ["show", file, "--json"]))
    level = "[{name: NVSwitch, ranks: 8, link: ./link.yaml, topology: switch}]"
    (folder / "system.yaml").write_text(f"extend: dgx-a100-80gb\nlevels: {level}\n")
    return _hardware_call(str(folder / "system.yaml"), rng)


def _hardware_call(file: str, rng: random.Random) -> Call:
    return rng.choice(
        (
            ["estimate", "lenet", "--system", file, *rng.choice(_ESTIMATES)], ["show", file, "--json"],
            ["estimate", "lenet", "--system", file, *rng.choice(_ESTIMATES)],
            ["collective", "all_reduce", "--system", file, "--bytes", "1MB", "--ranks", "8", "--json"],
            ["scale", "lenet", "--system", file, "--gpus", "1,2,8", "--json"],
            ["compare", "lenet", "--systems", f"{file},dgx-h100", "--gpus", "8", "--epochs", "1", "--json"],
        )
    )  # fmt: skip


@kind("run", cost_ms=9)
def run(rng: random.Random, folder: Path) -> Call:
    data = {key: value for key, value in RUN.items() if rng.random() < 0.5}
    (folder / "model.yaml").write_text(yaml.dump(MODEL, Dumper=FAST, sort_keys=False))
    network = rng.choice(("lenet", "gpt2", str(folder / "model.yaml")))
    return [
        "estimate",
        network,
        "--system",
        "dgx-a100-80gb",
        "--json",
        "--run",
        _written(folder / "run.yaml", data, rng),
    ]


@kind("software", cost_ms=22)
def software(rng: random.Random, folder: Path) -> Call:
    file = _written(folder / "software.yaml", _good("software", rng.choice(("pytorch-eager", "megatron-core"))), rng)
    return rng.choice(
        (
            ["show", file],
            ["estimate", "lenet", "--system", "dgx-a100-80gb", "--software", file, *rng.choice(_ESTIMATES)],
        )
    )


@kind("calibration", cost_ms=15)
def calibration(rng: random.Random, folder: Path) -> Call:
    data = dict(_good("calibrations", "a100-sxm4-80gb"))
    data["entries"] = rng.sample(data["entries"], 3)
    file = _written(folder / "calibration.yaml", data, rng)
    return ["estimate", "lenet", "--system", "dgx-a100-80gb", "--calibration", file, *rng.choice(_ESTIMATES)]


@kind("study", cost_ms=22)
def study(rng: random.Random, folder: Path) -> Call:
    return [
        "sweep",
        _written(folder / "study.yaml", STUDY, rng),
        "-o",
        str(folder / rng.choice(("t.csv", "t.csv.gz", "t.parquet"))),
        "--jobs",
        "1",
    ]


@kind("table", cost_ms=110)
def table(rng: random.Random, folder: Path) -> Call:
    rows = list(csv.reader(rng.choice(sorted(SAMPLES.glob("*.csv"))).read_text().splitlines()))
    if rng.random() < 0.15:
        return ["validate", _raw(folder / "t.csv", "\n".join(",".join(row) for row in rows), rng), "--json"]
    for _ in range(rng.choice((1, 1, 2, 3, 5))):
        _spoil_cell(rows, rng)
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    name = rng.choice(("t.csv", "t.csv", "t.csv.gz"))
    content = out.getvalue().encode("utf-8", "surrogatepass")
    (folder / name).write_bytes(gzip.compress(content, mtime=0) if name.endswith(".gz") else content)
    file = str(folder / name)
    more = rng.choice(([], ["--json"], ["--json"], ["--json"], ["--json", "--predictions", str(folder / "p.csv")]))
    if rng.random() < 0.03:
        return ["calibrate", "--fit", file, "-o", str(folder / "out.yaml")]
    return ["validate", file, *more]


@kind("jobs", cost_ms=12)
def jobs(rng: random.Random, folder: Path) -> Call:
    if rng.random() < 0.6:
        file = _written(folder / "jobs.yaml", JOBS, rng)
    else:
        rows = list(csv.reader(TRACE.splitlines()))
        for _ in range(rng.choice((1, 1, 2, 3, 5))):
            _spoil_cell(rows, rng)
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(rows)
        file = _raw(folder / "jobs.csv", out.getvalue(), rng) if rng.random() < 0.15 else str(folder / "jobs.csv")
        if not (folder / "jobs.csv").exists():
            (folder / "jobs.csv").write_bytes(out.getvalue().encode("utf-8", "surrogatepass"))
    policy = rng.choice(("backfill", "elastic", "fair", "fifo", "las", "priority", "srtf"))
    nodes = rng.choice((["--nodes", "2"], ["--nodes", "2"], ["--nodes", "auto", "--wait", "1h"]))
    more = rng.choice((["--json"], ["--json"], ["--samples", "2"]))
    return ["fleet", file, "--system", "dgx-a100-80gb", *nodes, "--policy", policy, *more]


def _spoil_cell(rows: list[list[str]], rng: random.Random) -> None:
    row = rng.randrange(len(rows)) if rng.random() < 0.8 else 0
    column = rng.randrange(len(rows[row])) if rows[row] else 0
    action = rng.randrange(8)
    if action == 0 and rows[row]:
        del rows[row][column]
    elif action == 1:
        rows[row].insert(column, rng.choice(("x", "", "1")))
    elif action == 2 and len(rows) > 2:
        del rows[row]
    elif action == 3:
        rows.insert(row, list(rng.choice(rows)))
    elif action == 4 and rows[0] and rows[row]:
        rows[row][column] = rng.choice(rng.choice(rows) or [""])
    elif rows[row]:
        numbers = (
            "0",
            "-1",
            "1e999",
            "inf",
            "nan",
            "1e-300",
            "1e300",
            "9" * 400,
            "3.5",
            "",
            "0x10",
            "1;2",
            "None",
            "True",
        )
        words = numbers if rng.random() < 0.6 else [str(value) for value in HOSTILE]
        rows[row][column] = rng.choice(words)


def _raw(path: Path, text: str, rng: random.Random) -> str:
    text = text_mutated(text, rng)
    path.write_bytes(bytes_mutated(text.encode("utf-8", "surrogatepass"), rng))
    return str(path)


@kind("hf", cost_ms=70)
def hf(rng: random.Random, folder: Path) -> Call:
    types = (
        "llama",
        "gpt2",
        "bert",
        "mixtral",
        "t5",
        "vit",
        "gemma",
        "qwen2_moe",
        "opt",
        "deepseek_v3",
        "mamba",
        "clip",
        "whisper",
    )
    data = mutated(HF | {"model_type": rng.choice(types)}, rng)
    file = folder / "config.json"
    text = json.dumps(data)
    content = (text_mutated(text, rng) if rng.random() < 0.1 else text).encode("utf-8", "surrogatepass")
    file.write_bytes(bytes_mutated(content, rng) if rng.random() < 0.05 else content)
    return ["import", "hf", str(file), *rng.choice(([], ["--json"], ["--size", "seq=64"]))]


@kind("log", cost_ms=300)
def log(rng: random.Random, folder: Path) -> Call:
    file, timed = folder / "train.log", rng.random() < 0.4
    text = NCCL if timed else "\n".join(rng.choices(LOG.splitlines(), k=20))
    for _ in range(rng.choice((0, 1, 3, 10))):
        text = text_mutated(text, rng)
    file.write_bytes(
        bytes_mutated(text.encode("utf-8", "surrogatepass"), rng)
        if rng.random() < 0.2
        else text.encode("utf-8", "surrogatepass")
    )
    trained = ["--model", "lenet", *rng.choice(([], ["--gpus", "8"], ["--gpus", "8", "--strategy", "zero=1"]))]
    timing = rng.choice(([], ["--gpus", "16"], ["--operation", rng.choice(("all_gather", str(rng.choice(HOSTILE))))]))
    words = timing if timed else trained
    call = ["audit", str(file), "--system", "dgx-a100-80gb", *rng.choice(([], ["--json"])), *words]
    return [word.replace("\0", "") for word in call]
