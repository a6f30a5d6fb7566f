"""Settings of the transformers Trainer (TrainingArguments as JSON), alone or with those of DeepSpeed or accelerate."""

from __future__ import annotations

from typing import Any

from paleo.launch._base import (
    FSDP_OFFLOADED_STATES,
    FieldTranslation,
    GroupTranslation,
    JobPlan,
    LaunchError,
    Settings,
    SettingsTranslator,
    accumulation_translation,
    boolean_translation,
    data_parallel_ranks,
    devices_per_replica,
    dtype_translation,
    group_translation,
    hub_id_translation,
    integer_setting,
    is_true,
    missing_hub_id_hint,
    offloads_all_states,
    prefix_words,
    register_launcher,
    to_integer,
)
from paleo.launch._formats import JsonFile, YamlFile

#: Prefix of the keys of training arguments where they are joined with those of another file.
TRAINING_ARGS_PREFIX = "args."
#: Names of optimizers in TrainingArguments, and the beginnings of names that mean the same.
_OPTIMIZERS = {"adamw": "adamw_torch_fused", "sgd": "sgd", "rmsprop": "rmsprop"}
_OPTIMIZER_PREFIXES = {
    "adamw": ("adamw", "paged_adamw", "ademamix"),
    "sgd": ("sgd",),
    "rmsprop": ("rmsprop",),
    "muon": ("muon",),
}
IGNORED_TRAINING_ARG_PREFIXES = """
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
"""
_ARGS_HARMLESS = f" {prefix_words(TRAINING_ARGS_PREFIX, IGNORED_TRAINING_ARG_PREFIXES)} "


def _optimizer_of(word: object) -> str:
    """Return Paleo's name of an optimizer that TrainingArguments names.

    >>> _optimizer_of("adamw_torch_fused"), _optimizer_of("paged_adamw_32bit"), _optimizer_of("sgd")
    ('adamw', 'adamw', 'sgd')
    """
    text = str(word).lower()
    for name, beginnings in _OPTIMIZER_PREFIXES.items():
        if text.startswith(beginnings):
            return name
    expected = ", ".join(_OPTIMIZERS.values())
    raise LaunchError(f"optim: {word!r:.60} is not a known optimizer; expected one of {expected}")


def optimizer_translation(key: str) -> GroupTranslation:
    """Return the translation of a key whose value names an optimizer as TrainingArguments does (``adamw_torch``)."""
    return group_translation(
        key,
        "optimizer",
        lambda plan: {key: _OPTIMIZERS.get(plan.optimizer, "")},
        lambda settings, known: {"optimizer": _optimizer_of(settings.get(key, "adamw"))},
    )


_SIZE, _STEPS = prefix_words(TRAINING_ARGS_PREFIX, "per_device_train_batch_size gradient_accumulation_steps").split()
_BATCH = accumulation_translation(_SIZE, _STEPS, usual=8)
_LENGTHS = prefix_words(TRAINING_ARGS_PREFIX, "max_seq_length block_size cutoff_len model_max_length")
_CHECKPOINTING = prefix_words(TRAINING_ARGS_PREFIX, "gradient_checkpointing activation_checkpointing")
#: Entries of training arguments except batch, number formats and sharding.
_ARGUMENTS: tuple[FieldTranslation | GroupTranslation, ...] = (
    hub_id_translation(f"{TRAINING_ARGS_PREFIX}model_name_or_path"),
    FieldTranslation(f"{TRAINING_ARGS_PREFIX}max_length", "seq", key_aliases=tuple(_LENGTHS.split())),
    boolean_translation(_CHECKPOINTING, "recompute", "full", "none"),
)


# DeepSpeed


_ZERO = "zero_optimization."
_DEEPSPEED_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_TYPES = {"adamw": "AdamW", "adam": "Adam", "lamb": "Lamb", "sgd": "SGD", "muon": "Muon"}
_DEGREES = {
    "tp": "tensor_parallel.autotp_size",
    "pp": "pipeline.stages",
    "cp": "sequence_parallel_size",
    "ep": "expert_parallel.autoep_size",
}


def _axes(plan: JobPlan) -> dict[str, Any]:
    keys: dict[str, Any] = {key: getattr(plan, name) for name, key in _DEGREES.items() if getattr(plan, name) > 1}
    if plan.schedule == "dualpipev":
        raise LaunchError("deepspeed 0.19.8 has no key for DualPipeV: the code of a job chooses it (DualPipeVModule)")
    return keys | ({"data_parallel_size": plan.dp} if plan.cp > 1 else {})


def _read_axes(settings: Settings, known: Settings) -> dict[str, Any]:
    read = {name: 1 if settings.get(k) in ("auto", 0) else integer_setting(settings, k) for name, k in _DEGREES.items()}
    return {**read, "ulysses": read["cp"] > 1, "schedule": "none" if read["pp"] == 1 else "1f1b", "vp": 1}


def _deepspeed_batch(plan: JobPlan) -> dict[str, Any]:
    figures = (plan.global_batch, plan.microbatch, plan.microbatches)
    return {**dict(zip(_DEEPSPEED_BATCH, figures, strict=True)), **_BATCH.to_settings(plan)}


def _read_deepspeed_batch(settings: Settings, known: Settings) -> dict[str, Any]:
    """Return the plan's batch fields from DeepSpeed's keys.

    Two of the three values (train batch, microbatch, accumulation steps) give the third; ``auto`` takes that of the
    Trainer.
    """
    total, micro, steps = (
        None if settings.get(key) in (None, "auto") else to_integer(settings[key], key) for key in _DEEPSPEED_BATCH
    )
    micro = micro or to_integer(settings.get(_SIZE) or 1, _SIZE)
    steps = steps or (to_integer(settings[_STEPS], _STEPS) if settings.get(_STEPS) else None)
    dp = data_parallel_ranks(known) or (total // (micro * steps) if total and steps else 0)
    steps = steps or (total // (micro * dp) if total and dp else 1)
    return {"microbatch": micro, "global_batch": total or micro * steps * dp, "gpus": dp * devices_per_replica(known)}


def _sharding(plan: JobPlan) -> dict[str, Any]:
    keys: dict[str, Any] = {f"{_ZERO}stage": plan.zero, f"{_ZERO}overlap_comm": plan.overlapped}
    places = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
    return keys | {f"{_ZERO}{place}.device": "cpu" for part, place in places.items() if part in plan.offload}


def _read_sharding(settings: Settings, known: Settings) -> dict[str, Any]:
    zero, overlapped = integer_setting(settings, f"{_ZERO}stage", 0), settings.get(f"{_ZERO}overlap_comm")
    places = (settings.get(f"{_ZERO}offload_{part}.device") for part in ("optimizer", "param"))
    rule, weights = (str(place) in ("cpu", "nvme") for place in places)
    return {
        "zero": zero,
        "overlapped": is_true(overlapped) if overlapped is not None else zero == 3,
        "offload": (*("gradients", "optimizer") * rule, *("parameters",) * weights),
    }


def _read_optimizer(settings: Settings, known: Settings) -> dict[str, Any]:
    stated, usual = settings.get("optimizer.type"), settings.get(f"{TRAINING_ARGS_PREFIX}optim", "adamw")
    return {"optimizer": str(stated).lower() if stated else _optimizer_of(usual)}


_DEEPSPEED = (
    *_ARGUMENTS,
    group_translation(
        " ".join((*_DEGREES.values(), "data_parallel_size")), "tp pp vp cp ulysses ep schedule", _axes, _read_axes
    ),
    group_translation(
        " ".join((*_DEEPSPEED_BATCH, _SIZE, _STEPS)),
        "microbatch global_batch gpus",
        _deepspeed_batch,
        _read_deepspeed_batch,
    ),
    group_translation(
        prefix_words(_ZERO, "stage overlap_comm offload_optimizer.device offload_param.device"),
        "zero overlapped offload",
        _sharding,
        _read_sharding,
    ),
    dtype_translation(bf16=f"bf16.enabled {TRAINING_ARGS_PREFIX}bf16", fp16=f"fp16.enabled {TRAINING_ARGS_PREFIX}fp16"),
    group_translation(
        f"optimizer.type {TRAINING_ARGS_PREFIX}optim",
        "optimizer",
        lambda plan: {"optimizer.type": _TYPES.get(plan.optimizer, "")},
        _read_optimizer,
    ),
)
_DEEPSPEED_HARMLESS = (
    f"optimizer.params {IGNORED_TRAINING_ARG_PREFIXES} {_ARGS_HARMLESS} {TRAINING_ARGS_PREFIX}deepspeed "
    + prefix_words(
        _ZERO, "reduce allgather contiguous stage3 sub_group round_robin offload_optimizer.pin offload_param.pin"
    )
)
register_launcher(SettingsTranslator(
    "deepspeed", "deepspeed", "deepspeed", "0.19.8", (".json",), JsonFile(), _DEEPSPEED,
    recognising_keys=("zero_optimization.stage", "train_batch_size", "train_micro_batch_size_per_gpu"),
    ignored_key_prefixes=_DEEPSPEED_HARMLESS, preparation_text=missing_hub_id_hint,
))  # fmt: skip


# accelerate


_FSDP, _MESH = "fsdp_config.fsdp_", "parallelism_config.parallelism_config_"
_MIXED = {"bf16": "bf16", "fp16": "fp16", "fp32": "no", "fp8": "fp8"}


def _fsdp(plan: JobPlan) -> dict[str, Any]:
    """Return accelerate's keys of the mesh, and of FSDP if parameters are sharded over all ranks or groups of ranks."""
    keys: dict[str, Any] = {"num_processes": plan.gpus, "num_machines": max(1, -(-plan.gpus // plan.node))}
    if plan.zero == 0 and plan.tp * plan.cp == 1:
        return {"distributed_type": "MULTI_GPU", **keys}
    shard = plan.shard if plan.shard > 1 else plan.dp
    return keys | {
        "distributed_type": "FSDP",
        f"{_FSDP}version": 2,
        f"{_FSDP}reshard_after_forward": plan.zero == 3,
        f"{_FSDP}auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        f"{_FSDP}offload_params": offloads_all_states(plan),
        f"{_MESH}dp_replicate_size": plan.dp // shard,
        f"{_MESH}dp_shard_size": shard,
        f"{_MESH}tp_size": plan.tp,
        f"{_MESH}cp_size": plan.cp,
    }


def _read_fsdp(settings: Settings, known: Settings) -> dict[str, Any]:
    gpus = integer_setting(settings, "num_processes")
    if str(settings.get("distributed_type", "")).upper() != "FSDP":
        return {"gpus": gpus, "zero": 0}
    axes = prefix_words(_MESH, "dp_replicate_size dp_shard_size tp_size cp_size").split()
    replicas, shard, tp, cp = (to_integer(settings.get(key) or 1, key) for key in axes)
    strategy = str(settings.get(f"{_FSDP}sharding_strategy", "FULL_SHARD")).upper()
    zero = {"SHARD_GRAD_OP": 2, "2": 2, "NO_SHARD": 0, "3": 0}.get(strategy, 3)
    reshard = settings.get(f"{_FSDP}reshard_after_forward")
    if reshard is not None and str(reshard).upper() not in ("FULL_SHARD", "SHARD_GRAD_OP"):
        zero = 3 if is_true(reshard) else 2
    offload = FSDP_OFFLOADED_STATES if is_true(settings.get(f"{_FSDP}offload_params")) else ()
    shard = shard if replicas > 1 else 1
    return {"gpus": gpus, "zero": zero, "tp": tp, "cp": cp, "offload": offload, "shard": shard}


_ACCELERATE = (
    *_ARGUMENTS,
    group_translation(
        "num_processes num_machines distributed_type "
        + prefix_words(_FSDP, "version reshard_after_forward auto_wrap_policy offload_params sharding_strategy ")
        + prefix_words(f" {_MESH}", "dp_replicate_size dp_shard_size tp_size cp_size"),
        "gpus zero tp cp shard offload",
        _fsdp,
        _read_fsdp,
    ),
    group_translation(
        f"{_SIZE} {_STEPS} gradient_accumulation_steps",
        "microbatch global_batch",
        _BATCH.to_settings,
        lambda s, known: _BATCH.to_fields(s, known) if any(key.startswith(TRAINING_ARGS_PREFIX) for key in s) else {},
    ),
    FieldTranslation("mixed_precision", "dtype", _MIXED, value_if_absent="fp32"),
    optimizer_translation(f"{TRAINING_ARGS_PREFIX}optim"),
)
_ACCELERATE_HARMLESS = (
    f"{IGNORED_TRAINING_ARG_PREFIXES} {_ARGS_HARMLESS} {TRAINING_ARGS_PREFIX}bf16 {TRAINING_ARGS_PREFIX}fp16 "
    f"{TRAINING_ARGS_PREFIX}tf32 "
    + prefix_words(_FSDP, "cpu_ram state_dict transformer backward use_orig sync forward min")
)
register_launcher(SettingsTranslator(
    "accelerate", "fsdp2", "fsdp2", "1.15.0", (".yaml", ".yml"), YamlFile(), _ACCELERATE,
    recognising_keys=("distributed_type", "num_processes", "mixed_precision"),
    ignored_key_prefixes=_ACCELERATE_HARMLESS,
    preparation_text=missing_hub_id_hint,
))  # fmt: skip


def _fsdp_option(plan: JobPlan) -> dict[str, Any]:
    """Return the words of TrainingArguments' ``fsdp`` option, such as full_shard; DDP has none."""
    stage = "full_shard" if plan.zero == 3 else "shard_grad_op"
    return {f"{TRAINING_ARGS_PREFIX}fsdp": [stage, *["offload"] * bool(plan.offload)]} if plan.zero else {}


def _read_fsdp_option(settings: Settings, known: Settings) -> dict[str, Any]:
    words = settings.get(f"{TRAINING_ARGS_PREFIX}fsdp") or ""
    spelling = " ".join(words) if isinstance(words, list | tuple) else str(words)
    zero = 2 if "shard_grad_op" in spelling else 3 if "shard" in spelling or spelling.lower() == "true" else 0
    return {"zero": zero, "offload": FSDP_OFFLOADED_STATES if "offload" in spelling else ()}


_TRAINER = (
    *_ARGUMENTS,
    group_translation(f"{TRAINING_ARGS_PREFIX}fsdp", "zero offload", _fsdp_option, _read_fsdp_option),
    _BATCH,
    dtype_translation(**{dtype: f"{TRAINING_ARGS_PREFIX}{dtype}" for dtype in ("bf16", "fp16", "tf32")}),
    optimizer_translation(f"{TRAINING_ARGS_PREFIX}optim"),
)
register_launcher(SettingsTranslator(
    "trainer", "fsdp2", "fsdp2", "5.23.0", (".json",), JsonFile(), _TRAINER, recognising_keys=(_SIZE, _STEPS),
    ignored_key_prefixes=f"{_ARGS_HARMLESS} {TRAINING_ARGS_PREFIX}fsdp_config", preparation_text=missing_hub_id_hint,
))  # fmt: skip
