"""Commands to paste: the estimate that shows a plan again, and the flags by which a framework runs it."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from paleo.specs.run import Run
from paleo.specs.software import load_software

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.search.space import Space


def runnable(space: Space, software: str) -> Space:
    """The part of a space whose pipeline schedules the framework is known to run; all of it where that is not known, or
    where stages are stated for a framework without pipelines."""
    known = load_software(software).parallelism.schedules
    if known is None or (not known and space.degrees.get("pp", 1) > 1):
        return space
    return replace(space, schedules=known)


def estimate_command(model: str, system: str, run: Run) -> str:
    """The ``paleo estimate`` of a run; what is left at its default is left out."""
    words = ["paleo", "estimate", model, "--system", system]
    defaults = Run()
    options: dict[str, object] = {
        "gpus": run.gpus, "global-batch": run.global_batch, "batch": run.batch, "microbatch": run.microbatch,
        "dtype": run.dtype, "optimizer": run.optimizer, "strategy": run.strategy, "schedule": run.schedule,
        "recompute": run.recompute, "recompute-layers": run.recompute_layers, "compress": run.compress,
        "lora": run.lora, "freeze": ",".join(run.freeze) or None,
        "nodes": None if run.nodes == "packed" else run.nodes, "background": run.background or None,
        "neighbour": run.neighbour, "consistency": run.consistency, "servers": run.servers,
        "jitter": f"{run.jitter:g},{run.slow_ranks:g}" if run.jitter or run.slow_ranks else None,
        "software": run.software, "calibration": run.calibration,
    }  # fmt: skip
    for name, value in options.items():
        if value is not None and value != getattr(defaults, name.replace("-", "_")):
            words += [f"--{name}", str(value)]
    words += ["--qlora"] if run.qlora else []
    settings: dict[str, object] = {
        "exchange": run.exchange, "offload": run.offload, "expert_dispatch": run.expert_dispatch,
        "length_variation": run.length_variation,
    }  # fmt: skip
    settings |= {f"model.{name}": value for name, value in run.model.items()}
    for name, value in settings.items():
        if value is not None and value != getattr(defaults, name, None):
            words += ["--set", f"{name}={value}"]
    return shlex.join(words)


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
    if degree("ep") > 1:
        words.append(f"--expert-model-parallel-size {degree('ep')}")
    if plan.parallel.chunks > 1:
        words.append(f"--num-virtual-stages-per-pipeline-rank {plan.parallel.chunks}")
    if plan.parallel.sequence_parallel:
        words.append("--sequence-parallel")
    if plan.parallel.zero:
        words.append("--use-distributed-optimizer")
    if prediction.steps.batch.overlapped:
        words.append("--overlap-grad-reduce")
    if run.recompute == "full":
        words.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    if run.recompute == "selective":
        words.append("--recompute-granularity selective")
    return " ".join([*words, "--bf16" if plan.dtype == "bf16" else f"--{plan.dtype}"])


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
    if degree("pp") > 1:
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
