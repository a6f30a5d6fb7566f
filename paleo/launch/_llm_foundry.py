"""Settings of llm-foundry: YAML of release 0.22."""

from __future__ import annotations

from typing import Any

from paleo.launch._base import (
    FieldTranslation,
    JobPlan,
    LaunchError,
    Settings,
    SettingsTranslator,
    data_parallel_ranks,
    group_translation,
    hub_id_translation,
    integer_setting,
    is_true,
    missing_hub_id_hint,
    prefix_words,
    register_launcher,
    to_integer,
)
from paleo.launch._formats import YamlFile

_FSDP = "fsdp_config."
#: FSDP sharding strategies by ZeRO stage: over all ranks, and over the ranks of a node.
_STRATEGIES = {3: ("FULL_SHARD", "HYBRID_SHARD"), 2: ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")}
#: Keys that state the sizes of an MPT network.
MPT_SIZE_KEYS = ("d_model", "n_heads", "n_layers", "expansion_ratio", "vocab_size", "max_seq_len")
_PRECISION = {"bf16": "amp_bf16", "fp16": "amp_fp16", "fp32": "fp32", "fp8": "amp_fp8"}
_OPTIMIZERS = {"adamw": "decoupled_adamw", "lion": "decoupled_lionw"}
_HUB = hub_id_translation("model.pretrained_model_name_or_path")


def _sharding(plan: JobPlan) -> dict[str, Any]:
    if plan.zero == 0:
        if plan.recompute != "none":
            raise LaunchError("llm-foundry recomputes activations through fsdp_config, which DDP lacks")
        return {}
    if plan.shard not in (1, plan.node):
        raise LaunchError(f"shard={plan.shard}: HYBRID_SHARD shards over the {plan.node} devices of a node")
    return {
        f"{_FSDP}sharding_strategy": _STRATEGIES[plan.zero][plan.shard > 1],
        f"{_FSDP}mixed_precision": "PURE",
        f"{_FSDP}activation_checkpointing": plan.recompute == "full",
        f"{_FSDP}activation_checkpointing_reentrant": False,
        f"{_FSDP}activation_cpu_offload": "activations" in plan.offload,
        f"{_FSDP}limit_all_gathers": True,
    }


def _read_sharding(settings: Settings, known: Settings) -> dict[str, Any]:
    if not any(key.startswith(_FSDP) for key in settings):
        return {"zero": 0, "recompute": "none"}
    strategy = str(settings.get(f"{_FSDP}sharding_strategy", "FULL_SHARD")).upper()
    return {
        "zero": 2 if strategy in _STRATEGIES[2] else 0 if strategy == "NO_SHARD" else 3,
        "shard": known.get("node", 8) if "HYBRID" in strategy else 1,
        "recompute": "full" if is_true(settings.get(f"{_FSDP}activation_checkpointing")) else "none",
        "offload": ("activations",) if is_true(settings.get(f"{_FSDP}activation_cpu_offload")) else (),
    }


def _read_model(settings: Settings, known: Settings) -> dict[str, Any]:
    layers = settings.get("model.n_layers")
    read = {} if layers is None else {"layers": to_integer(layers, "model.n_layers")}
    return {**read, **_HUB.to_fields(settings, known)}


def _read_batch(settings: Settings, known: Settings) -> dict[str, Any]:
    total, key = integer_setting(settings, "global_train_batch_size", 0), "device_train_microbatch_size"
    if settings.get(key, "auto") == "auto":
        return {"global_batch": total}
    most = total // max(1, data_parallel_ranks(known)) or total
    return {"global_batch": total, "microbatch": min(integer_setting(settings, key), most)}


_LLM_FOUNDRY = (
    group_translation(
        "model.name model.pretrained_model_name_or_path model.pretrained "
        + prefix_words("model.", " ".join(MPT_SIZE_KEYS)),
        "model",
        lambda plan: {"model.name": "hf_causal_lm", **_HUB.to_settings(plan)},
        _read_model,
    ),
    FieldTranslation("max_seq_len", "seq"),
    group_translation(
        prefix_words(_FSDP, "sharding_strategy mixed_precision activation_checkpointing limit_all_gathers ")
        + prefix_words(f" {_FSDP}", "activation_checkpointing_reentrant activation_cpu_offload"),
        "zero shard recompute offload",
        _sharding,
        _read_sharding,
    ),
    group_translation(
        "global_train_batch_size device_train_microbatch_size",
        "microbatch global_batch",
        lambda plan: {"global_train_batch_size": plan.global_batch, "device_train_microbatch_size": plan.microbatch},
        _read_batch,
    ),
    FieldTranslation("precision", "dtype", _PRECISION, value_if_absent="bf16"),
    FieldTranslation("optimizer.name", "optimizer", _OPTIMIZERS, value_if_absent="adamw"),
)
_LLM_FOUNDRY_HARMLESS = f"""
    run_name tokenizer train_loader eval scheduler algorithms callbacks loggers max_duration save
    load seed progress log_ console data variables optimizer. device_eval global_seed dist_timeout
    autoresume icl model.init model.attn_config model. python_log text_column remote local max_split
    node {prefix_words(_FSDP, "verbose state_dict sync load backward")}
"""
register_launcher(SettingsTranslator(
    "llm-foundry", "llm-foundry", "fsdp-composer", "0.22.0", (".yaml", ".yml"), YamlFile(), _LLM_FOUNDRY,
    recognising_keys=("global_train_batch_size", "device_train_microbatch_size", "max_seq_len", "max_duration"),
    ignored_key_prefixes=_LLM_FOUNDRY_HARMLESS, preparation_text=missing_hub_id_hint,
))  # fmt: skip
