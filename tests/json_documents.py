"""What every command prints with --json, and the schemas that these documents are held to.

``python -m tests.json_documents [COMMAND…]`` writes the schemas from the documents of `CALLS`: types, the keys that
all of them have, and the types of what lists and free mappings hold. Keys may be added; one that goes away, or a type
that changes, fails tests/unit/test_schemas.py until the schemas (and the version) are written anew.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from paleo.cli import run_command_line as run
from paleo.report import json_schemas

FOLDER = Path(json_schemas.__file__).parent / "schemas"
SAMPLES = Path(__file__).parent / "fuzz" / "samples"
NODE = ["--system", "dgx-a100-80gb"]
#: Machines of one's own, and failures that turn a curve over.
OURS = ["--electricity", "0.1 USD/kWh", "--host-power", "100 W", "--price", "1 USD/h"]
FAILING = ["--failures", "40/knodeday"]
VALIDATED = ("gemm", "llm_iterations", "memory", "consistency", "compression", "goodput", "layers_without_format")
TITAN = "step: {n}  loss:  7.1  memory: 47.30GiB(59.8%)  tps: 5,762  tflops: 333.1  mfu: 33.7%"
NCCL = """# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid 1 on node device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  7 Group  0 Pid 8 on node device  7 [0xbd] NVIDIA A100-SXM4-80GB
     1048576    262144     float     sum      -1    43.45   24.13   42.23      0    42.90   24.44   42.77      0
    16777216   4194304     float     sum      -1    160.2  104.73  183.27      0    159.0  105.52  184.65      0
   268435456  67108864     float     sum      -1    4060.0   66.12  115.71      0    4055.0   66.20  115.85      0
"""
LOG = " iteration   {n}/ 100 | elapsed time per iteration (ms): 1.5 | global batch size: 64 |"
#: Two uses of one purchase.
USES = ["--for", "train:7d,serve:20/s"]
#: command -> calls whose documents have all the keys there are; {tmp} is an empty folder.
CALLS: dict[str, list[list[str]]] = {
    "list": [["list"], ["list", "links"], ["list", "optimizers"]],
    "show": [["show", "lenet"], ["show", "dgx-a100-80gb"], ["show", "ring"], ["show", "pytorch-eager"]],
    "summary": [["summary", "lenet"], ["summary", "gpt2", "--seq", "64", "--batch", "2"]],
    "estimate": [
        ["estimate", "lenet", *NODE],
        ["estimate", "lenet", *NODE, "--gpus", "16", "--epochs", "1", "--price", "2 USD/h"],
        ["estimate", "lenet", "--system", "{tmp}/no_latency.yaml", "--gpus", "8", "--epochs", "1"],
        ["estimate", "gpt2", "--system", "l4", "--batch", "512", "--calibration", "ideal"],
        ["estimate", "gpt2", *NODE, "--gpus", "8", "--strategy", "tp=2,pp=2", "--global-batch", "32"],
        ["estimate", "lenet", *NODE, "--gpus", "16", "--epochs", "1", "--goodput"],
        ["estimate", "gpt2", *NODE, "--gpus", "16", "--tokens", "1M", "--failures", "4/knodeday", "--compress", "fp16"],
        ["estimate", "lenet", *NODE, "--gpus", "16", "--consistency", "async", "--set", "input={decode: 1 ms}"],
        ["estimate", "gpt2", *NODE, "--gpus", "8", "--consistency", "ssp:4", "--jitter", "traces"],
        ["estimate", "gpt2", *NODE, "--lora", "16:attention", "--tokens", "1M", *OURS],
    ],
    "rl": [
        ["rl", "qwen3-0.6b", *NODE, "--gpus", "8", "--rollouts", "64", "--output", "200", "--price", "2 USD/h"],
        ["rl", "qwen3-0.6b", *NODE, "--gpus", "8", "--rollouts", "64", "--staleness", "1", "--generators", "4"],
        ["rl", "llama3-405b", *NODE, "--gpus", "1"],
    ],
    "tune": [
        [
            "tune",
            "gpt2",
            *NODE,
            "--gpus",
            "8",
            "--trials",
            "8",
            "--max-tokens",
            "10M",
            "--deadline",
            "2h",
            "--rank-correlation",
            "0.8",
            "--vary",
            "layers=6,12",
            "--method",
            "halving",
        ],
        ["tune", "lenet", "--system", "{tmp}/no_latency.yaml", "--gpus", "2", "--trials", "3", "--max-samples", "9k"],
        ["tune", "gpt2", *NODE, "--gpus", "8", "--trials", "99", "--max-tokens", "1B", "--deadline", "9s"],
    ],
    "fleet": [
        ["fleet", "{tmp}/jobs.yaml", *NODE, "--nodes", "2", "--price", "2 USD/h", "--wait", "1h"],
        ["fleet", "{tmp}/jobs.csv", "--system", "{tmp}/no_latency.yaml", "--nodes", "1", "--samples", "0"],
        ["fleet", "{tmp}/many.csv", *NODE, "--nodes", "auto", "--wait", "1h"],
    ],
    "serve": [
        ["serve", "llama3-8b", *NODE, "--ttft", "2s", "--tpot", "50ms"],
        ["serve", "llama3-8b", *NODE, "--gpus", "2", "--users", "20", "--think", "5s", "--price", "2 USD/h"],
        ["serve", "llama3-8b", "--system", "{tmp}/no_latency.yaml", "--rate", "1/s"],
        ["serve", "llama3-70b", *NODE],
        ["serve", "llama3-8b", *NODE, "--rate", "1000/s"],
        ["serve", "resnet50", *NODE, "--weights", "int8", "--latency", "15ms"],
        ["serve", "resnet50", *NODE, "--latency", "1us"],
        [
            "serve",
            "llama3-8b",
            "--systems",
            "dgx-h100:2,dgx-a100-80gb:2",
            "--engine",
            "auto",
            "--disaggregate",
            "--tpot",
            "50ms",
        ],
    ],
    "scale": [
        ["scale", "lenet", *NODE, "--gpus", "1,8"],
        ["scale", "gpt2", *NODE, "strong", "--gpus", "1,16", "--global-batch", "32"],
        ["scale", "lenet", *NODE, "--gpus", "8,16", "--goodput"],
        ["scale", "lenet", *NODE, "--gpus", "8,7,12", "--strategy", "tp=4", "--consistency", "bsp,async"],
        ["scale", "lenet", "--system", "{tmp}/no_latency.yaml", "--gpus", "1,8"],
        ["scale", "gpt2", "--system", "l4", "--gpus", "1,2", "--batch", "512"],
        [
            "scale",
            "lenet",
            *NODE,
            "--gpus",
            "8,512,8192",
            "--global-batch",
            "8192",
            "--epochs",
            "1000000",
            *OURS,
            *FAILING,
        ],
    ],
    "compare": [
        ["compare", "lenet", "--systems", "dgx-a100-80gb,dgx-h100", "--gpus", "8"],
        ["compare", "gpt2", "--systems", "l4,dgx-h100", "--gpus", "1", "--tokens", "1000000"],
        ["compare", "gpt2", "--systems", "titan-v,dgx-h100", "--dtype", "bf16", "--objective", "energy"],
        ["compare", "lenet", "--systems", "{tmp}/no_latency.yaml,dgx-h100", "--gpus", "8"],
        ["compare", "resnet18", "--systems", "dgx-a100-80gb", "--gpus", "8", "--samples", "1M", *OURS],
        ["compare", "gpt2", "--systems", "l4", "--lora", "16:attention"],
        ["compare", "llama3-8b", "--systems", "dgx-h100:16,l4:1", "--strategy", "zero=3", "--batch", "1", *USES],
    ],
    "plan": [
        ["plan", "gpt2", *NODE, "--gpus", "8", "--global-batch", "32"],
        ["plan", "lenet", *NODE, "--gpus", "1,8", "--batch", "8", "--explain"],
        ["plan", "lenet", "--systems", "dgx-a100-80gb,l4", "--gpus", "1,2", "--batch", "8", "--samples", "1M"],
        ["plan", "lenet", *NODE, "--gpus", "1", "--batch", "8", "--samples", "1M", "--deadline", "1s", "--budget", "1"],
        ["plan", "alexnet", *NODE, "--gpus", "4", "--per-layer"],
        ["plan", "gpt2", "--systems", "l4", "--gpus", "1", "--batch", "8", "--tokens", "1M"],
    ],
    "collective": [
        ["collective", "all_reduce", "--bytes", "1MB", "--ranks", "16", *NODE],
        ["collective", "all_reduce", "--bytes", "1MB", "--ranks", "8", "--system", "{tmp}/no_latency.yaml"],
    ],
    "validate": [
        ["validate", "{tmp}/unpredictable.csv"],
        *(["validate", str(SAMPLES / f"{name}.csv")] for name in VALIDATED),
    ],
    "import": [["import", "hf", "{tmp}/config.json"], ["import", "hf", "{tmp}/config.json", "-o", "{tmp}/m.yaml"]],
    "target": [
        ["target", "mlperf:bert", "--system", "dgx-h100", "--gpus", "8,64"],
        ["target", "mlperf:bert", *NODE, "--gpus", "8,128,256", "--batch", "256"],
    ],
    "audit": [
        ["audit", "{tmp}/train.log", "--model", "lenet", *NODE, "--global-batch", "64"],
        ["audit", "{tmp}/titan.log", "--model", "gpt2", "--system", "dgx-h100", "--gpus", "8"],
        ["audit", "{tmp}/nccl.log", "--system", "dgx-a100-80gb"],
        ["audit", "{tmp}/nccl_small.log", "--system", "dgx-a100-80gb"],
        ["audit", "{tmp}/bench.json", "--model", "llama3-8b", "--system", "dgx-h100"],
    ],
}
#: What a benchmark of a serving engine saves.
BENCHMARK = {
    "completed": 100, "duration": 50.0, "request_rate": 2.0, "total_input_tokens": 50000, "total_output_tokens": 20000,
    "mean_ttft_ms": 300.0, "mean_tpot_ms": 9.0,
}  # fmt: skip
#: Mappings whose keys are names, not fields.
FREE = {"measured", "predicted", "by_device", "by_source", "by_benchmark", "unsupported_reasons", "document"}
HF = {
    "model_type": "llama", "hidden_size": 8, "intermediate_size": 20, "num_attention_heads": 2, "vocab_size": 11,
    "num_key_value_heads": 1, "num_hidden_layers": 3, "max_position_embeddings": 64,
}  # fmt: skip


def printed(call: list[str], folder: Path) -> Any:
    """The document of one call."""
    (folder / "config.json").write_text(json.dumps(HF))
    (folder / "unpredictable.csv").write_text(
        "source,device,library,dtype,m,n,k,batch,time_us\ns,l40s,x,bf16,8,8,8,1,\n"
    )
    (folder / "link.yaml").write_text("{kind: nvlink, scope: a GPU, bandwidth: 300 GB/s, source: none}\n")
    # A card of its own name has no price; its power is not known.
    (folder / "card.yaml").write_text("extend: a100-sxm4-80gb\ntdp: null\n")
    level = "{name: inside, ranks: 8, link: ./link.yaml, topology: switch}"
    (folder / "no_latency.yaml").write_text(f"extend: dgx-a100-80gb\ndevice: ./card.yaml\nlevels: [{level}]\n")
    (folder / "train.log").write_text("\n".join(LOG.format(n=number) for number in range(1, 13)) + "\n")
    (folder / "titan.log").write_text("\n".join(TITAN.format(n=number) for number in range(1, 13)) + "\n")
    (folder / "jobs.yaml").write_text(
        "jobs: [{team: a, duration: 2 h, gpus: 8, deadline: 5 h}, {name: b, model: gpt2, tokens: 10M, gpus: 8}]\n"
    )
    (folder / "jobs.csv").write_text("arrival,gpus,duration\n0,8,60\n")
    (folder / "many.csv").write_text("arrival,gpus,duration\n" + "".join(f"{n},1,9\n" for n in range(1001)))
    (folder / "nccl.log").write_text(NCCL)
    (folder / "bench.json").write_text(json.dumps(BENCHMARK))
    (folder / "nccl_small.log").write_text(NCCL.replace("16777216", "  131072").replace("268435456", "    65536"))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = run([word.replace("{tmp}", str(folder)) for word in (*call, "--json")])
    assert code in (0, 1), f"{call}: exit code {code}"
    return json.loads(out.getvalue())


def described(value: Any, *, free: bool = False) -> dict[str, Any]:
    """The schema of one value."""
    if isinstance(value, Mapping):
        if free:
            return {"type": ["object"], "additionalProperties": merged(described(item) for item in value.values())}
        fields = {key: described(item, free=key in FREE) for key, item in value.items()}
        return {"type": ["object"], "properties": fields, "required": sorted(fields)}
    if isinstance(value, list):
        return {"type": ["array"], "items": merged(described(item) for item in value)}
    names = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null"}
    return {"type": [names[type(value)]]}


def merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """A schema that all of the parts fulfil; {} for none."""
    schemas_of = [part for part in parts if part]
    if not schemas_of:
        return {}
    result: dict[str, Any] = {"type": sorted({name for part in schemas_of for name in part["type"]})}
    objects = [part for part in schemas_of if "properties" in part]
    if objects:
        keys = dict.fromkeys(key for part in objects for key in part["properties"])
        fields = {key: merged(part["properties"].get(key, {}) for part in objects) for key in keys}
        common = set.intersection(*(set(part["required"]) for part in objects))
        result |= {"properties": fields, "required": sorted(common)}
    for key in ("items", "additionalProperties"):
        if any(key in part for part in schemas_of):
            result[key] = merged(part.get(key, {}) for part in schemas_of)
    return result


def violations(value: Any, schema: Mapping[str, Any], where: str = "document") -> Iterator[str]:
    """What of a value does not fulfil a schema of the kind that `described` makes."""
    kinds = {dict: "object", list: "array", bool: "boolean", int: "number", float: "number", str: "string"}
    kind = kinds.get(type(value), "null")
    if "const" in schema and value != schema["const"]:
        yield f"{where}: {value!r} is not {schema['const']!r}"
    if "type" in schema and kind not in schema["type"]:
        yield f"{where}: is {kind}, expected {schema['type']}"
    elif kind == "object":
        yield from (f"{where}.{key}: is missing" for key in schema.get("required", []) if key not in value)
        fields, rest = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            yield from violations(item, fields.get(key, rest), f"{where}.{key}")
    elif kind == "array":
        for index, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), f"{where}[{index}]")


def schema_from(command: str, values: list[Any]) -> dict[str, Any]:
    """The schema of a command's documents."""
    name = f"paleo.{command}/1"
    body = merged(described(value) for value in values)
    if command in ("list", "show"):  # keys are kinds of entries
        body = {"type": ["object"], "properties": {"schema": {}}, "required": ["schema"]}
    body["properties"]["schema"] = {"type": ["string"], "const": name}
    return {
        "$schema": json_schemas.JSON_SCHEMA_DRAFT_URL,
        "$id": name,
        "title": f"What paleo {command} --json prints",
        **body,
    }


def main() -> None:
    """Write all schemas."""
    chosen = sys.argv[1:] or list(CALLS)
    for command, calls in ((name, CALLS[name]) for name in chosen):
        with tempfile.TemporaryDirectory() as folder:
            values = [printed(call, Path(folder)) for call in calls]
        text = json.dumps(schema_from(command, values), indent=1) + "\n"
        (FOLDER / f"{command}.json").write_text(text)


if __name__ == "__main__":
    main()
