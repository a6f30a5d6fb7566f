"""Settings of the Trainer of transformers (TrainingArguments as JSON), alone or beside DeepSpeed's or accelerate's."""

from __future__ import annotations

from typing import Any

from paleo.launch._base import (
    JobPlan,
    KeyRow,
    Launcher,
    LaunchError,
    Settings,
    Together,
    add_launcher,
    hub_key,
    one_of,
    prefixes,
    whole,
)
from paleo.launch._formats import JsonFile, YamlFile

#: Keys of training arguments stand behind this where they are joined with another file's.
ARGS = "args."
#: Optimizers of TrainingArguments.
OPTIMIZERS = {"adamw": "adamw_torch_fused", "sgd": "sgd", "rmsprop": "rmsprop"}
_PLAIN = {"adamw": ("adamw", "paged_adamw", "ademamix"), "sgd": ("sgd",), "rmsprop": ("rmsprop",), "muon": ("muon",)}
HARMLESS = prefixes("""
            learning_rate lr_ warmup num_train_epochs max_steps logging save eval seed report_to output_dir
            run_name push_to_hub hub_ weight_decay adam_ max_grad_norm dataloader ddp_timeout do_ overwrite
            remove_unused load_best metric greater disable_tqdm resume dataset template plot_loss
            include_num preprocessing stage trust_remote max_samples trackio wandb special_tokens datasets
            val_set scheduler num_epochs tokenizer chat_template strict saves_per evals_per output early
            local_rank debug xformers loss_watchdog mlflow model_type lora_alpha lora_dropout lora_fan
            hf_use_auth train_on_inputs group_by_length shuffle unfrozen resize neftune cosine machine_rank
            main_ rdzv same_network compute_environment downcast use_cpu tpu enable_cpu_affinity
            main_training wall_clock steps_per_print gradient_clipping prescale zero_allow dump_state fp16.
            bf16. comms_logger flops_profiler tensorboard csv
        """)


def optimizer_of(word: object) -> str:
    """Our name of an optimizer of TrainingArguments.

    >>> optimizer_of("adamw_torch_fused"), optimizer_of("paged_adamw_32bit"), optimizer_of("sgd")
    ('adamw', 'adamw', 'sgd')
    """
    text = str(word).lower()
    for name, beginnings in _PLAIN.items():
        if text.startswith(beginnings):
            return name
    raise LaunchError(f"optim: {word!r:.60} is not known here; expected one of {', '.join(OPTIMIZERS.values())}")


def true(value: object) -> bool:
    """Whether a file's value means yes."""
    return str(value).lower() in ("true", "1", "yes", "auto")


def sixteen_bits(plan: JobPlan, before: str = "") -> dict[str, Any]:
    """The switches of a 16-bit format; fp32 has none."""
    if plan.dtype not in ("bf16", "fp16", "fp32", "tf32"):
        raise LaunchError(f"dtype={plan.dtype} has no switch in TrainingArguments")
    return {f"{before}{plan.dtype}": True} if plan.dtype != "fp32" else {}


def read_sixteen_bits(settings: Settings, before: str = "") -> str:
    """The format that switches state."""
    return next((dtype for dtype in ("bf16", "fp16", "tf32") if true(settings.get(f"{before}{dtype}"))), "fp32")


def batch(plan: JobPlan, before: str = "") -> dict[str, Any]:
    """Samples of a device and accumulation steps."""
    return {
        f"{before}per_device_train_batch_size": plan.microbatch,
        f"{before}gradient_accumulation_steps": plan.microbatches,
    }


def read_batch(settings: Settings, known: Settings, before: str = "") -> dict[str, Any]:
    """Microbatch, and the global batch where the devices are known."""
    size = settings.get(f"{before}per_device_train_batch_size", 8)
    passes = settings.get(f"{before}gradient_accumulation_steps", 1)
    microbatch, steps = whole(size, "per_device_train_batch_size"), whole(passes, "gradient_accumulation_steps")
    return {"microbatch": microbatch, "global_batch": microbatch * steps * ranks(known)}


def ranks(known: Settings) -> int:
    """Data-parallel ranks, as far as the devices are known."""
    model_ranks = int(known.get("tp", 1)) * int(known.get("cp", 1)) * int(known.get("pp", 1))
    return int(known.get("gpus", 0)) // model_ranks


def _length(before: str = "") -> Together:
    """The length of sequences, by the names that trainers give it."""
    names = tuple(
        f"{before}{name}" for name in ("max_length", "max_seq_length", "block_size", "cutoff_len", "model_max_length")
    )
    return Together(
        names,
        ("seq",),
        lambda plan: {names[0]: plan.seq},
        lambda settings, known: (
            {} if one_of(settings, names) is None else {"seq": whole(one_of(settings, names), names[0])}
        ),
    )


def _arguments(before: str) -> tuple[KeyRow | Together, ...]:
    """Entries of training arguments but for batch and sharding."""
    checkpoints = (f"{before}gradient_checkpointing", f"{before}activation_checkpointing")
    return (
        hub_key(f"{before}model_name_or_path"),
        _length(before),
        Together(
            checkpoints,
            ("recompute",),
            lambda plan: {checkpoints[0]: plan.recompute == "full"},
            lambda settings, known: {"recompute": "full" if true(one_of(settings, checkpoints)) else "none"},
        ),
    )


# DeepSpeed


_ZERO = "zero_optimization."
_DEEPSPEED_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _axes(plan: JobPlan) -> dict[str, Any]:
    keys: dict[str, Any] = {"tensor_parallel.autotp_size": plan.tp} if plan.tp > 1 else {}
    keys |= {"pipeline.stages": plan.pp} if plan.pp > 1 else {}
    keys |= {"pipeline.schedule": "dualpipev"} if plan.schedule == "dualpipev" else {}
    keys |= {"sequence_parallel_size": plan.cp, "data_parallel_size": plan.dp} if plan.cp > 1 else {}
    return keys | ({"expert_parallel.autoep_size": plan.ep} if plan.ep > 1 else {})


def _read_axes(settings: Settings, known: Settings) -> dict[str, Any]:
    names = ("tensor_parallel.autotp_size", "pipeline.stages", "sequence_parallel_size", "expert_parallel.autoep_size")
    stated = {name: settings.get(name, 1) for name in names}
    tp, pp, cp, ep = (1 if value in ("auto", 0) else whole(value, name) for name, value in stated.items())
    two_way = settings.get("pipeline.schedule") == "dualpipev"
    order = "none" if pp == 1 else "dualpipev" if two_way else "1f1b"
    return {"tp": tp, "pp": pp, "cp": cp, "ulysses": cp > 1, "ep": ep, "schedule": order, "vp": 2 if two_way else 1}


def _deepspeed_batch(plan: JobPlan) -> dict[str, Any]:
    return dict(zip(_DEEPSPEED_BATCH, (plan.global_batch, plan.microbatch, plan.microbatches), strict=True))


def _read_deepspeed_batch(settings: Settings, known: Settings) -> dict[str, Any]:
    """Two of the three figures give the third; ``auto`` is what the Trainer's arguments say."""
    figures = [settings.get(key) for key in _DEEPSPEED_BATCH]
    total, micro, steps = (
        None if figure in (None, "auto") else whole(figure, key)
        for figure, key in zip(figures, _DEEPSPEED_BATCH, strict=True)
    )
    micro = micro or settings.get(f"{ARGS}per_device_train_batch_size") or 1
    steps = steps or settings.get(f"{ARGS}gradient_accumulation_steps")
    model_ranks = known.get("tp", 1) * known.get("cp", 1) * known.get("pp", 1)
    dp = known.get("gpus", 0) // model_ranks
    if total and steps and not dp:
        dp = total // (whole(micro, "micro") * whole(steps, "steps"))
    steps = whole(
        steps or (total // (whole(micro, "micro") * dp) if total and dp else 1), "gradient_accumulation_steps"
    )
    return {
        "microbatch": whole(micro, "micro"),
        "global_batch": total or whole(micro, "micro") * steps * dp,
        "gpus": dp * model_ranks,
    }


def _sharing(plan: JobPlan) -> dict[str, Any]:
    keys: dict[str, Any] = {f"{_ZERO}stage": plan.zero, f"{_ZERO}overlap_comm": plan.overlapped}
    if "optimizer" in plan.offload:
        keys[f"{_ZERO}offload_optimizer.device"] = "cpu"
    if "parameters" in plan.offload:
        keys[f"{_ZERO}offload_param.device"] = "cpu"
    return keys


def _read_sharing(settings: Settings, known: Settings) -> dict[str, Any]:
    zero = whole(settings.get(f"{_ZERO}stage", 0), f"{_ZERO}stage")
    overlapped = settings.get(f"{_ZERO}overlap_comm")
    host = [
        part
        for part in ("optimizer", "param")
        if str(settings.get(f"{_ZERO}offload_{part}.device", "none")) in ("cpu", "nvme")
    ]
    parts = [*(["optimizer", "gradients"] if "optimizer" in host else []), *(["parameters"] if "param" in host else [])]
    return {
        "zero": zero,
        "overlapped": true(overlapped) if overlapped is not None else zero == 3,
        "offload": tuple(sorted(parts)),
    }


def _deepspeed_formats(plan: JobPlan) -> dict[str, Any]:
    return {f"{name}.enabled": True for name in sixteen_bits(plan)}


_TYPES = {"adamw": "AdamW", "adam": "Adam", "lamb": "Lamb", "sgd": "SGD", "muon": "Muon"}

add_launcher(
    Launcher(
        "deepspeed",
        "deepspeed",
        "deepspeed",
        "0.19.8",
        (".json",),
        JsonFile(),
        (
            *_arguments(ARGS),
            Together(
                (
                    "tensor_parallel.autotp_size",
                    "pipeline.stages",
                    "pipeline.schedule",
                    "sequence_parallel_size",
                    "data_parallel_size",
                    "expert_parallel.autoep_size",
                ),
                ("tp", "pp", "vp", "cp", "ulysses", "ep", "schedule"),
                _axes,
                _read_axes,
            ),
            Together(
                (*_DEEPSPEED_BATCH, f"{ARGS}per_device_train_batch_size", f"{ARGS}gradient_accumulation_steps"),
                ("microbatch", "global_batch", "gpus"),
                lambda plan: {**_deepspeed_batch(plan), **batch(plan, ARGS)},
                _read_deepspeed_batch,
            ),
            Together(
                (
                    f"{_ZERO}stage",
                    f"{_ZERO}overlap_comm",
                    f"{_ZERO}offload_optimizer.device",
                    f"{_ZERO}offload_param.device",
                ),
                ("zero", "overlapped", "offload"),
                _sharing,
                _read_sharing,
            ),
            Together(
                ("bf16.enabled", "fp16.enabled", f"{ARGS}bf16", f"{ARGS}fp16"),
                ("dtype",),
                lambda plan: {**_deepspeed_formats(plan), **sixteen_bits(plan, ARGS)},
                lambda settings, known: {
                    "dtype": next(
                        (
                            d
                            for d in ("bf16", "fp16")
                            if true(settings.get(f"{d}.enabled")) or true(settings.get(f"{ARGS}{d}"))
                        ),
                        "fp32",
                    )
                },
            ),
            Together(
                ("optimizer.type", f"{ARGS}optim"),
                ("optimizer",),
                lambda plan: {"optimizer.type": _TYPES.get(plan.optimizer, "")},
                lambda settings, known: {
                    "optimizer": str(settings["optimizer.type"]).lower()
                    if "optimizer.type" in settings
                    else optimizer_of(settings.get(f"{ARGS}optim", "adamw"))
                },
            ),
        ),
        marks=("zero_optimization.stage", "train_batch_size", "train_micro_batch_size_per_gpu"),
        harmless=(
            *prefixes("""
            optimizer.params
        """),
            *HARMLESS,
            f"{_ZERO}reduce",
            f"{_ZERO}allgather",
            f"{_ZERO}contiguous",
            f"{_ZERO}stage3",
            f"{_ZERO}sub_group",
            f"{_ZERO}round_robin",
            f"{_ZERO}offload_optimizer.pin",
            f"{_ZERO}offload_param.pin",
            *(f"{ARGS}{word}" for word in HARMLESS),
            f"{ARGS}deepspeed",
        ),
    )
)


# accelerate


_FSDP, _MESH = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"


def _fsdp(plan: JobPlan) -> dict[str, Any]:
    """The mesh, and FSDP where parameters are sharded: all ranks, or groups of them with replicas."""
    keys: dict[str, Any] = {"num_processes": plan.gpus, "num_machines": max(1, -(-plan.gpus // plan.node))}
    if plan.zero == 0 and plan.tp * plan.cp == 1:
        return {"distributed_type": "MULTI_GPU", **keys}
    shard = plan.shard if plan.shard > 1 else plan.dp
    keys |= {
        "distributed_type": "FSDP",
        f"{_FSDP}version": 2,
        f"{_FSDP}reshard_after_forward": plan.zero == 3,
        f"{_FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{_FSDP}offload_params": bool(plan.offload),
        f"{_MESH}dp_replicate_size": plan.dp // shard,
        f"{_MESH}dp_shard_size": shard,
        f"{_MESH}tp_size": plan.tp,
        f"{_MESH}cp_size": plan.cp,
    }
    if plan.offload and set(plan.offload) != {"gradients", "optimizer", "parameters"}:
        raise LaunchError("FSDP offloads parameters, gradients and optimizer together")
    return keys


def _read_fsdp(settings: Settings, known: Settings) -> dict[str, Any]:
    gpus = whole(settings.get("num_processes", 1), "num_processes")
    if str(settings.get("distributed_type", "")).upper() != "FSDP":
        return {"gpus": gpus, "zero": 0}
    sizes = {
        name: whole(settings.get(f"{_MESH}{name}_size", 1) or 1, f"{_MESH}{name}_size")
        for name in ("dp_replicate", "dp_shard", "tp", "cp")
    }
    strategy = str(settings.get(f"{_FSDP}sharding_strategy", "FULL_SHARD")).upper()
    kept = {"SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0}.get(strategy, 3)
    reshard = settings.get(f"{_FSDP}reshard_after_forward")
    zero = (
        kept
        if reshard is None or str(reshard).upper() in ("FULL_SHARD", "SHARD_GRAD_OP")
        else 3
        if true(reshard)
        else 2
    )
    offload = ("gradients", "optimizer", "parameters") if true(settings.get(f"{_FSDP}offload_params", False)) else ()
    return {
        "gpus": gpus,
        "zero": zero,
        "tp": sizes["tp"],
        "cp": sizes["cp"],
        "offload": offload,
        "shard": sizes["dp_shard"] if sizes["dp_replicate"] > 1 else 1,
    }


_MIXED = {"bf16": "bf16", "fp16": "fp16", "fp32": "no", "fp8": "fp8"}
_FSDP_KEYS = (
    "num_processes",
    "num_machines",
    "distributed_type",
    f"{_FSDP}version",
    f"{_FSDP}reshard_after_forward",
    f"{_FSDP}auto_wrap_policy",
    f"{_FSDP}offload_params",
    f"{_FSDP}sharding_strategy",
    *(f"{_MESH}{name}_size" for name in ("dp_replicate", "dp_shard", "tp", "cp")),
)

add_launcher(
    Launcher(
        "accelerate",
        "fsdp2",
        "fsdp2",
        "1.15.0",
        (".yaml", ".yml"),
        YamlFile(),
        (
            *_arguments(ARGS),
            Together(_FSDP_KEYS, ("gpus", "zero", "tp", "cp", "shard", "offload"), _fsdp, _read_fsdp),
            Together(
                (
                    f"{ARGS}per_device_train_batch_size",
                    f"{ARGS}gradient_accumulation_steps",
                    "gradient_accumulation_steps",
                ),
                ("microbatch", "global_batch"),
                lambda plan: batch(plan, ARGS),
                lambda settings, known: (
                    read_batch(settings, known, ARGS) if any(k.startswith(ARGS) for k in settings) else {}
                ),
            ),
            KeyRow("mixed_precision", "dtype", _MIXED, absent="fp32"),
            Together(
                (f"{ARGS}optim",),
                ("optimizer",),
                lambda plan: {f"{ARGS}optim": OPTIMIZERS.get(plan.optimizer, "")},
                lambda settings, known: {"optimizer": optimizer_of(settings.get(f"{ARGS}optim", "adamw"))},
            ),
        ),
        marks=("distributed_type", "num_processes", "mixed_precision"),
        harmless=(
            *prefixes("""

        """),
            *HARMLESS,
            f"{_FSDP}cpu_ram",
            f"{_FSDP}state_dict",
            f"{_FSDP}transformer",
            f"{_FSDP}backward",
            f"{_FSDP}use_orig",
            f"{_FSDP}sync",
            f"{_FSDP}forward",
            *(f"{ARGS}{word}" for word in HARMLESS),
            f"{ARGS}bf16",
            f"{ARGS}fp16",
            f"{ARGS}tf32",
            f"{_FSDP}min",
        ),
    )
)


def _arguments_sharing(settings: Settings, known: Settings) -> dict[str, Any]:
    """DDP, or FSDP as the words of ``fsdp`` say."""
    words = settings.get(f"{ARGS}fsdp") or ""
    spelling = " ".join(words) if isinstance(words, list | tuple) else str(words)
    zero = 2 if "shard_grad_op" in spelling else 3 if "shard" in spelling or spelling.lower() == "true" else 0
    return {"zero": zero, "offload": ("gradients", "optimizer", "parameters") if "offload" in spelling else ()}


add_launcher(
    Launcher(
        "trainer",
        "fsdp2",
        "fsdp2",
        "5.23.0",
        (".json",),
        JsonFile(),
        (
            *_arguments(ARGS),
            Together(
                (f"{ARGS}fsdp",),
                ("zero", "offload"),
                lambda plan: (
                    {
                        f"{ARGS}fsdp": [
                            "full_shard" if plan.zero == 3 else "shard_grad_op",
                            *["offload"] * bool(plan.offload),
                        ]
                    }
                    if plan.zero
                    else {}
                ),
                _arguments_sharing,
            ),
            Together(
                (f"{ARGS}per_device_train_batch_size", f"{ARGS}gradient_accumulation_steps"),
                ("microbatch", "global_batch"),
                lambda plan: batch(plan, ARGS),
                lambda settings, known: read_batch(settings, known, ARGS),
            ),
            Together(
                (f"{ARGS}bf16", f"{ARGS}fp16", f"{ARGS}tf32"),
                ("dtype",),
                lambda plan: sixteen_bits(plan, ARGS),
                lambda settings, known: {"dtype": read_sixteen_bits(settings, ARGS)},
            ),
            Together(
                (f"{ARGS}optim",),
                ("optimizer",),
                lambda plan: {f"{ARGS}optim": OPTIMIZERS.get(plan.optimizer, "")},
                lambda settings, known: {"optimizer": optimizer_of(settings.get(f"{ARGS}optim", "adamw"))},
            ),
        ),
        marks=(f"{ARGS}per_device_train_batch_size", f"{ARGS}gradient_accumulation_steps"),
        harmless=(
            *prefixes("""

        """),
            *(f"{ARGS}{word}" for word in HARMLESS),
            f"{ARGS}fsdp_config",
        ),
    )
)
