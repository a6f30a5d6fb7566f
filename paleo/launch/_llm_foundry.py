"""llm-foundry's YAML (0.22)."""

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
    prefixes,
    whole,
)
from paleo.launch._formats import YamlFile
from paleo.launch._transformers import ranks, true

_FSDP = "fsdp_config."
_STRATEGIES = {3: "FULL_SHARD", 2: "SHARD_GRAD_OP"}
#: Sizes of an MPT -> keys of a configuration of transformers.
MPT = {
    "model.d_model": "d_model",
    "model.n_heads": "n_heads",
    "model.n_layers": "n_layers",
    "model.expansion_ratio": "expansion_ratio",
    "model.vocab_size": "vocab_size",
    "model.max_seq_len": "max_seq_len",
}
_PRECISION = {"bf16": "amp_bf16", "fp16": "amp_fp16", "fp32": "fp32", "fp8": "amp_fp8"}
_OPTIMIZERS = {"adamw": "decoupled_adamw", "adam": "adam", "lion": "decoupled_lionw"}


def _sharing(plan: JobPlan) -> dict[str, Any]:
    if plan.zero == 0:
        if plan.recompute != "none":
            raise LaunchError("llm-foundry recomputes activations through fsdp_config, which DDP lacks")
        return {}
    strategy = _STRATEGIES[plan.zero]
    if plan.shard > 1:
        if plan.shard != plan.node:
            raise LaunchError(f"shard={plan.shard}: HYBRID_SHARD shards over the {plan.node} devices of a node")
        strategy = {3: "HYBRID_SHARD", 2: "_HYBRID_SHARD_ZERO2"}[plan.zero]
    keys: dict[str, Any] = {f"{_FSDP}sharding_strategy": strategy, f"{_FSDP}mixed_precision": "PURE"}
    keys |= {
        f"{_FSDP}activation_checkpointing": plan.recompute == "full",
        f"{_FSDP}activation_checkpointing_reentrant": False,
    }
    return keys | {f"{_FSDP}activation_cpu_offload": "activations" in plan.offload, f"{_FSDP}limit_all_gathers": True}


def _read_sharing(settings: Settings, known: Settings) -> dict[str, Any]:
    if not any(key.startswith(_FSDP) for key in settings):
        return {"zero": 0, "recompute": "none"}
    strategy = str(settings.get(f"{_FSDP}sharding_strategy", "FULL_SHARD")).upper()
    zero = {"SHARD_GRAD_OP": 2, "_HYBRID_SHARD_ZERO2": 2, "NO_SHARD": 0}.get(strategy, 3)
    recomputed = true(settings.get(f"{_FSDP}activation_checkpointing", False))
    return {
        "zero": zero,
        "shard": known.get("node", 8) if "HYBRID" in strategy else 1,
        "recompute": "full" if recomputed else "none",
        "offload": ("activations",) if true(settings.get(f"{_FSDP}activation_cpu_offload", False)) else (),
    }


def _model(plan: JobPlan) -> dict[str, Any]:
    return {"model.name": "hf_causal_lm", **hub_key("model.pretrained_model_name_or_path").write(plan)}


def _read_model(settings: Settings, known: Settings) -> dict[str, Any]:
    name = settings.get("model.pretrained_model_name_or_path")
    layers = settings.get("model.n_layers")
    read = {} if layers is None else {"layers": whole(layers, "model.n_layers")}
    return read if name is None else {**read, **hub_key("model.pretrained_model_name_or_path").read(settings, known)}


def _read_batch(settings: Settings, known: Settings) -> dict[str, Any]:
    total = whole(settings.get("global_train_batch_size", 0), "global_train_batch_size")
    size = settings.get("device_train_microbatch_size", "auto")
    if size == "auto":
        return {"global_batch": total}
    return {
        "global_batch": total,
        "microbatch": min(whole(size, "device_train_microbatch_size"), total // max(1, ranks(known)) or total),
    }


add_launcher(
    Launcher(
        "llm-foundry",
        "llm-foundry",
        "fsdp-composer",
        "0.22.0",
        (".yaml", ".yml"),
        YamlFile(),
        (
            Together(
                ("model.name", "model.pretrained_model_name_or_path", "model.pretrained", *MPT),
                ("model",),
                _model,
                _read_model,
            ),
            KeyRow("max_seq_len", "seq"),
            Together(
                tuple(
                    f"{_FSDP}{name}"
                    for name in (
                        "sharding_strategy",
                        "mixed_precision",
                        "activation_checkpointing",
                        "activation_checkpointing_reentrant",
                        "activation_cpu_offload",
                        "limit_all_gathers",
                    )
                ),
                ("zero", "shard", "recompute", "offload"),
                _sharing,
                _read_sharing,
            ),
            Together(
                ("global_train_batch_size", "device_train_microbatch_size"),
                ("microbatch", "global_batch"),
                lambda plan: {
                    "global_train_batch_size": plan.global_batch,
                    "device_train_microbatch_size": plan.microbatch,
                },
                _read_batch,
            ),
            KeyRow("precision", "dtype", _PRECISION, absent="bf16"),
            KeyRow("optimizer.name", "optimizer", _OPTIMIZERS, absent="adamw"),
        ),
        marks=("global_train_batch_size", "device_train_microbatch_size", "max_seq_len", "max_duration"),
        harmless=(
            *prefixes("""
            run_name tokenizer train_loader eval scheduler algorithms callbacks loggers max_duration save
            load seed progress log_ console data variables optimizer. device_eval global_seed dist_timeout
            autoresume icl model.init model.attn_config model. python_log text_column remote local max_split
            node
        """),
            f"{_FSDP}verbose",
            f"{_FSDP}state_dict",
            f"{_FSDP}sync",
            f"{_FSDP}load",
            f"{_FSDP}backward",
        ),
    )
)
