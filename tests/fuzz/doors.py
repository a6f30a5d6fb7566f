"""Doors beside files of specs and options: job files of frameworks, traces of requests, Python's functions."""

from __future__ import annotations

import copy
import inspect
import json
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

import paleo
from paleo.answers import StudyResult
from paleo.errors import PaleoError
from tests.fuzz.inputs import FAST, Call, kind
from tests.fuzz.mutations import HOSTILE, bytes_mutated, mutated, text_mutated

#: Good job files by name; each is read by --from.
JOBS: dict[str, str] = {
    "pretrain.sh": "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --hidden-size 768 "
    "--num-attention-heads 12 --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 "
    "--global-batch-size 64 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --bf16 "
    "--sequence-parallel --use-distributed-optimizer --recompute-activations\n",
    "train.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 8192\n'
    '[parallelism]\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n'
    '[activation_checkpoint]\nmode = "full"\n',
    "ds.json": json.dumps({
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 5e8},
        "bf16": {"enabled": True},
    }),
    "axolotl.yml": "base_model: meta-llama/Llama-3.1-8B\nadapter: lora\nlora_r: 16\nmicro_batch_size: 2\n"
    "gradient_accumulation_steps: 4\nsequence_len: 4096\nbf16: true\ngradient_checkpointing: true\n"
    "deepspeed: ds.json\noptimizer: adamw_torch\n",
    "mpt.yaml": "max_seq_len: 2048\nglobal_train_batch_size: 64\ndevice_train_microbatch_size: 2\nprecision: amp_bf16\n"
    "model: {name: mpt_causal_lm, d_model: 768, n_heads: 12, n_layers: 12, expansion_ratio: 4, vocab_size: 50368}\n"
    "fsdp_config: {sharding_strategy: FULL_SHARD, activation_checkpointing: true}\n",
    "nano.yaml": "parallelism: {dp: 2, tp: 2, pp: 2, pp_engine: 1f1b}\n"
    "tokens: {sequence_length: 2048, micro_batch_size: 2, batch_accumulation_per_replica: 8}\n"
    "model: {dtype: bfloat16, model_config: {hidden_size: 768, intermediate_size: 3072, num_attention_heads: 12, "
    "num_hidden_layers: 12, num_key_value_heads: 12, vocab_size: 50272}}\n",
    "args.json": json.dumps({
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "bf16": True, "optim": "adamw_torch_fused",
        "gradient_checkpointing": True, "fsdp": "full_shard auto_wrap",
    }),
    "max.yml": "model_name: llama3-8b\nper_device_batch_size: 4\nmax_target_length: 8192\nici_fsdp_parallelism: -1\n"
    "remat_policy: full\ndtype: bfloat16\n",
    "accelerate.yaml": "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 8\nnum_machines: 1\n"
    "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_offload_params: false}\n",
}  # fmt: skip
LAUNCHED = (
    "o.toml",
    "o.sh",
    "o.json",
    "o.yaml",
    "axolotl:o.yml",
    "llm-foundry:o.yaml",
    "nanotron:o.yaml",
    "x:o.y",
    "o.",
)


def _spoilt(name: str, rng: random.Random) -> bytes:
    """A job file whose keys, text or bytes are changed."""
    text, way = JOBS[name], rng.random()
    if way < 0.65 and name.endswith((".json", ".yml", ".yaml")):
        data = mutated(yaml.safe_load(text), rng)
        text = (
            json.dumps(data)
            if name.endswith(".json")
            else yaml.dump(data, Dumper=FAST, allow_unicode=True, width=10_000)
        )
    elif way < 0.65:
        parts = text.split(" ")
        parts[rng.randrange(len(parts))] = str(rng.choice(HOSTILE))
        text = " ".join(parts)
    elif way < 0.9:
        text = text_mutated(text, rng)
    content = text.encode("utf-8", "surrogatepass")
    return bytes_mutated(content, rng) if way > 0.95 else content


@kind("job", cost_ms=100)
def job(rng: random.Random, folder: Path) -> Call:
    (folder / "ds.json").write_text(JOBS["ds.json"])
    names = [rng.choice(sorted(JOBS))] if rng.random() < 0.8 else rng.sample(sorted(JOBS), 2)
    for name in names:
        (folder / name).write_bytes(_spoilt(name, rng))
    files = [word for name in names for word in ("--from", str(folder / name))]
    model = rng.choice(([], ["gpt2"], ["llama3-8b"]))
    more = rng.choice(([], ["--gpus", "8"], ["--gpus", "8", "--launch", str(folder / rng.choice(LAUNCHED))]))
    return ["estimate", *model, "--system", "dgx-h100", *files, *more, "--json"]


@kind("launch", cost_ms=40)
def launch(rng: random.Random, folder: Path) -> Call:
    strategy = rng.choice(("dp", "tp=2", "zero=1", "zero=3", "tp=2,pp=2", "cp=2", str(rng.choice(HOSTILE))))
    file = rng.choice(LAUNCHED) if rng.random() < 0.8 else str(rng.choice(HOSTILE)).replace("/", "_")
    prefix, colon, name = file.rpartition(":")
    network = rng.choice(("gpt2", "llama3-8b", "lenet", "mixtral-8x7b"))
    call = ["estimate", network, "--system", "dgx-h100", "--gpus", "8", "--strategy", strategy]
    call += ["--software", rng.choice(("torchtitan", "megatron-core", "deepspeed", "nanotron", "maxtext", "nemo"))]
    call += ["--launch", f"{prefix}{colon}{folder / name}"]
    return [word.replace("\0", "") for word in call]


REQUESTS = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:15:{second:02d}.0000000,{100 + 37 * second},{10 + second}\n" for second in range(40)
)


@kind("requests", cost_ms=50)
def requests(rng: random.Random, folder: Path) -> Call:
    text = REQUESTS
    for _ in range(rng.choice((0, 1, 1, 3))):
        rows = [line.split(",") for line in text.splitlines()]
        row = rng.choice(rows)
        row[rng.randrange(len(row))] = str(rng.choice(HOSTILE))
        text = "\n".join(",".join(row) for row in rows) if rng.random() < 0.7 else text_mutated(text, rng)
    content = text.encode("utf-8", "surrogatepass")
    (folder / "trace.csv").write_bytes(bytes_mutated(content, rng) if rng.random() < 0.1 else content)
    more = rng.choice(([], ["--rate", "2/s"], ["--ttft", "2s"]))
    return ["serve", "qwen3-0.6b", "--system", "dgx-h100", "--trace", str(folder / "trace.csv"), *more, "--json"]


#: What functions of Python are called with when all is well.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "estimate": {"model": "lenet", "system": "dgx-h100", "gpus": 8, "batch": 32, "jitter": "traces"},
    "scale": {"model": "lenet", "system": "dgx-h100", "gpus": [1, 8], "batch": 32},
    "compare": {"model": "lenet", "systems": ["dgx-h100", "dgx-a100-80gb:4"], "gpus": 8, "epochs": 1},
    "search": {"model": "lenet", "system": "dgx-h100", "gpus": 4, "batch": 8},
    "plan": {"model": "lenet", "systems": ["dgx-h100"], "gpus": [1, 2], "batch": 8, "samples": 10000},
    "target": {"task": "mlperf:resnet", "system": "dgx-h100", "gpus": [8]},
    "serve": {"model": "qwen3-0.6b", "system": "dgx-h100", "input": 200, "output": 20, "rate": "1/s"},
    "rl": {"model": "qwen3-0.6b", "system": "dgx-h100", "gpus": 8, "rollouts": 8, "output": 20},
    "Run": {"gpus": 8, "strategy": "tp=2", "model": {"seq": 128}},
    "load_model": {"name_or_path": "lenet"}, "load_system": {"name_or_path": "dgx-h100"},
    "load_software": {"name_or_path": "megatron-core"}, "load_task": {"name_or_path": "mlperf:bert"},
    "validate": {"files": "nothing.csv"},
    "sweep": {"study": {"models": ["lenet"], "systems": ["l4"], "axes": {"batch": [1]}}},
    "audit": {"log": "nothing.log", "model": "lenet", "system": "dgx-h100"},
    "from_hf": {"config": "nothing.json"}, "from_onnx": {"file": "nothing.onnx"},
}  # fmt: skip
#: Values of Python that no text gives.
OBJECTS: tuple[Callable[[], Any], ...] = (
    object, lambda: float("nan"), lambda: float("inf"), lambda: np.int64(8), lambda: np.array([1, 8]), lambda: b"x",
    lambda: np.float64("nan"), lambda: {1, 2}, lambda: (8,), lambda: 8.0, lambda: 10**400, lambda: Path("lenet"),
    lambda: complex(1, 1), lambda: [None], lambda: {"a": object()}, lambda: (x for x in "ab"), lambda: np.zeros((0,)),
    lambda: range(3), lambda: type, lambda: "\ud800", lambda: -0.0, lambda: {1: 2}, lambda: np.array("x"),
)  # fmt: skip


@cache
def _parameters(name: str) -> list[str]:
    stated = [
        key for key in inspect.signature(getattr(paleo, name)).parameters if key not in ("options", "data", "tariff")
    ]
    return [
        *stated,
        *(paleo.Run.model_fields if name in ("estimate", "scale", "compare", "search", "plan", "Run") else ()),
    ]


@kind("python", cost_ms=30)
def python(rng: random.Random, folder: Path) -> Call:
    """The words are the function and a number from which `called` makes the same arguments."""
    return ["python", rng.choice(sorted(ARGUMENTS)), str(rng.randrange(10**9))]


def called(call: Call) -> int:
    """The exit code that a command would have: 0, or 2 with one line where the function refuses its arguments."""
    _, name, seed = call
    rng = random.Random(seed)
    arguments = copy.deepcopy(ARGUMENTS[name])
    for _ in range(rng.choice((1, 1, 2))):
        key = rng.choice(list(arguments)) if rng.random() < 0.6 else rng.choice(_parameters(name))
        arguments[key] = rng.choice(OBJECTS)() if rng.random() < 0.5 else copy.deepcopy(rng.choice(HOSTILE))
    try:
        answer = getattr(paleo, name)(**arguments)
        if isinstance(answer, StudyResult):
            json.dumps(answer.to_dict(), allow_nan=False)
            repr(answer), answer.to_frame()
    except PaleoError as error:
        message = " ".join(str(error).split())
        sys.stderr.write(f"error: {message.encode('utf-8', 'replace').decode()}\n")
        return 2 if message else 3
    except TypeError as error:  # as Python says of arguments that a function lacks
        if "argument" in str(error) and f"{name}()" in str(error):
            sys.stderr.write("error: arguments\n")
            return 2
        raise
    return 0
