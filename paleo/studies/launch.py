"""Commands to paste: the estimate that shows a plan again, and the flags by which a framework runs it."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from paleo.specs.run import Run
from paleo.specs.software import load_software

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.search.space import Space
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System


def runnable(space: Space, software: str) -> Space:
    """The part of a space whose pipeline schedules and ZeRO stages the framework is known to run; all of it where that
    is not known, or where stages are stated for a framework without pipelines."""
    has = load_software(software).parallelism
    if has.zero_stages is not None and len(space.zero) > 1:
        space = replace(space, zero=tuple(stage for stage in space.zero if stage in has.zero_stages))
    if has.schedules is None or (not has.schedules and space.degrees.get("pp", 1) > 1):
        return space
    return replace(space, schedules=has.schedules)


def estimate_command(model: ModelSpec, system: System, run: Run) -> str:
    """The ``paleo estimate`` of a run, word for word as a shell takes it: entries of the catalog by name, others by the
    path of their file; every field that is not at its default, as its option where it has one and by --set else."""
    words = ["paleo", "estimate", model.reference, "--system", system.reference]
    stated = {name: value for name, value in run.model_dump().items() if value != getattr(_DEFAULTS, name)}
    if "jitter" in stated or "slow_ranks" in stated:
        words += ["--jitter", f"{stated.pop('jitter', 0.0)!r},{stated.pop('slow_ranks', 0.0)!r}"]
    for name in [name for name in _OPTIONS if name in stated]:
        words += _option(name, stated.pop(name))
    sizes = stated.pop("model", {})
    for name, value in [*stated.items(), *((f"model.{size}", value) for size, value in sizes.items())]:
        words += ["--set", f"{name}={_yaml(_with_units(name, value))}"]
    return shlex.join(words)


_DEFAULTS = Run()

#: Fields of a run that are options of the command, in the order in which they are shown.
_OPTIONS = (
    "gpus", "global_batch", "batch", "microbatch", "dtype", "optimizer", "strategy", "schedule", "recompute",
    "recompute_layers", "compress", "lora", "qlora", "freeze", "nodes", "background", "neighbour", "consistency",
    "servers", "software", "calibration",
)  # fmt: skip


def _option(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    return [flag, ",".join(value) if isinstance(value, tuple) else str(value)]


#: Units of the fields, and of those of a run's input, that are quantities.
_UNITS = {"bucket": "B", "sample": "B", "storage": "B/s", "decode": "s", "copied": "B"}


def _with_units(name: str, value: object) -> object:
    """A value of a run as a file states it.

    >>> _with_units("bucket", 25e6), _with_units("input", {"decode": 0.01, "cores": None})
    ('25000000.0 B', {'decode': '0.01 s'})
    """
    if name == "input" and isinstance(value, dict):
        return {key: _with_units(key, part) for key, part in value.items() if part is not None}
    return f"{value!r} {_UNITS[name]}" if name in _UNITS else value


def _yaml(value: object) -> str:
    """A value as it stands behind ``--set key=``: JSON, which is YAML too, without the quotes of plain words.

    >>> _yaml((17, 15)), _yaml("after"), _yaml({"block.*": "full"}), _yaml(True)
    ('[17, 15]', 'after', '{"block.*": "full"}', 'true')
    """
    return value if isinstance(value, str) else json.dumps(value)


def launch_flags(prediction: Prediction) -> str:
    """Flags of the framework that the run's profile stands for; DeepSpeed's are keys of its configuration file."""
    software = prediction.run.software
    family = next((name for name in _FLAGS if software.startswith(name)), "torchtitan" if "fsdp" in software else "")
    return "" if not family else _FLAGS[family](prediction)


def _megatron(prediction: Prediction) -> str:
    plan, run = prediction.plan, prediction.run
    degree = plan.mesh.degree
    words = [
        f"--tensor-model-parallel-size {degree('tp')}",
        f"--pipeline-model-parallel-size {degree('pp')}",
        f"--micro-batch-size {plan.microbatch}",
        f"--global-batch-size {plan.global_batch}",
    ]
    if degree("cp") > 1:
        words.append(f"--context-parallel-size {degree('cp')}")
    if (experts := _expert_ranks(prediction)) > 1:
        words.append(f"--expert-model-parallel-size {experts}")
    if plan.parallel.etp is not None:
        words.append(f"--expert-tensor-parallel-size {plan.parallel.etp}")
    if run.expert_dispatch is not None:
        deepep = "flex --moe-enable-deepep"
        words.append(f"--moe-token-dispatcher-type {deepep if run.expert_dispatch == 'deepep' else 'alltoall'}")
    if run.shared_expert_overlap:
        words.append("--moe-shared-expert-overlap")
    if isinstance(run.cut, tuple):
        layers = [iterations * _layers_of_iteration(prediction) for iterations in run.cut]
        words.append(f"--pipeline-model-parallel-layout '{_layout(layers)}'")
    elif plan.parallel.chunks > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank {plan.parallel.chunks}")
    if plan.parallel.sequence_parallel:
        words.append("--sequence-parallel")
    if plan.parallel.zero:
        words.append("--use-distributed-optimizer")
    if prediction.steps.batch.overlapped:
        words.append("--overlap-grad-reduce")
    words += _recomputed(run)
    return " ".join([*words, *_MEGATRON_FORMATS.get(plan.dtype, ())])


#: Megatron's flags of a dtype: products in 8 and 4 bits stand beside weights in bf16; fp32 and tf32 have none.
_MEGATRON_FORMATS = {
    "bf16": ("--bf16",),
    "fp16": ("--fp16",),
    "fp8": ("--bf16", "--fp8-format hybrid"),
    "fp4": ("--bf16", "--fp4-format e2m1"),
}


def _expert_ranks(prediction: Prediction) -> int:
    """Ranks over which experts are divided, those of tp and cp among them where experts are folded over these."""
    plan = prediction.plan
    folded = plan.parallel.etp is not None
    return plan.mesh.group_size(plan.parallel.expert_axes) if folded else plan.mesh.degree("ep")


def _layers_of_iteration(prediction: Prediction) -> int:
    """Transformer layers of one iteration of the repeated block: two where a layer that looks at a window only and one
    that sees everything alternate."""
    blocks = {section.name for section in prediction.program.sections if section.repeat > 1}
    layers = Counter(
        node.name.partition(".")[0] for node in prediction.graph.nodes if node.type in ("attention", "latent_attention")
    )
    return max((layers[name] for name in blocks), default=1) or 1


def _layout(pieces: Sequence[int]) -> str:
    """Layers of each piece of a pipeline as Megatron-Core writes them: E is the embedding, L the loss.

    >>> _layout((2, 3, 2))
    'Ett|ttt|ttL'
    """
    return f"E{'|'.join('t' * layers for layers in pieces)}L"


def _recomputed(run: Run) -> list[str]:
    """Megatron's flags of recomputation."""
    if run.recompute == "full":
        method = "uniform" if run.recompute_layers is None else "block"
        layers = run.recompute_every or 1 if run.recompute_layers is None else run.recompute_layers
        return [f"--recompute-granularity full --recompute-method {method} --recompute-num-layers {layers}"]
    if run.recompute == "selective":
        modules = " ".join(["--recompute-modules", *run.recompute_modules]) if run.recompute_modules else ""
        return ["--recompute-granularity selective", *([modules] if modules else [])]
    return []


#: Pipeline schedules as torch.distributed.pipelining calls them.
_TORCH_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "Interleaved1F1B",
    "zb-h1": "InterleavedZeroBubble",
    "zb-v": "ZBVZeroBubble",
    "dualpipev": "DualPipeV",
}


def _torchtitan(prediction: Prediction) -> str:
    plan, run = prediction.plan, prediction.run
    degree = plan.mesh.degree
    shard, replicate = (plan.dp, 1) if plan.parallel.zero == 3 else (1, plan.dp)
    if degree("shard") > 1:
        shard, replicate = degree("shard"), plan.dp // degree("shard")
    words = [
        f"--parallelism.data_parallel_shard_degree {shard}",
        f"--parallelism.data_parallel_replicate_degree {replicate}",
        f"--parallelism.tensor_parallel_degree {degree('tp')}",
        f"--parallelism.pipeline_parallel_degree {degree('pp')}",
        f"--training.local_batch_size {plan.local_batch}",
        f"--training.global_batch_size {plan.global_batch}",
    ]
    if degree("cp") > 1:
        words.append(f"--parallelism.context_parallel_degree {degree('cp')}")
    if (experts := _expert_ranks(prediction)) > 1:
        words.append(f"--parallelism.expert_parallel_degree {experts}")
    if degree("pp") > 1:
        schedule = "interleaved" if run.schedule == "1f1b" and plan.parallel.chunks > 1 else run.schedule
        words.append(f"--parallelism.pipeline_parallel_schedule {_TORCH_SCHEDULES.get(schedule, schedule)}")
        words.append(f"--parallelism.pipeline_parallel_microbatch_size {plan.microbatch}")
    mode = {"full": "full", "selective": "selective", "none": "none"}[run.recompute]
    return " ".join([*words, f"--activation_checkpoint.mode {mode}"])


def _deepspeed(prediction: Prediction) -> str:
    plan = prediction.plan
    settings = {
        "train_batch_size": str(plan.global_batch),
        "train_micro_batch_size_per_gpu": str(plan.microbatch),
        "gradient_accumulation_steps": str(plan.microbatches),
        "zero_optimization.stage": str(plan.parallel.zero),
        f"{'bf16' if plan.dtype == 'bf16' else 'fp16'}.enabled": "true",
    }
    return ", ".join(f"{name}: {value}" for name, value in settings.items())


_FLAGS: dict[str, Callable[[Prediction], str]] = {
    "megatron": _megatron,
    "torchtitan": _torchtitan,
    "huggingface": _deepspeed,
    "deepspeed": _deepspeed,
}
