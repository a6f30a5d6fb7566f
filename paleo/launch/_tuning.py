"""Settings of axolotl (0.19) and LLaMA-Factory (0.9), one YAML file each."""

from __future__ import annotations

import re
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
from paleo.launch._formats import YamlFile
from paleo.launch._transformers import HARMLESS, OPTIMIZERS, optimizer_of, ranks, true

_ALL = ("gradients", "optimizer", "parameters")


def _adapter(plan: JobPlan) -> tuple[str, str]:
    """The rank of adapters and which products have one."""
    if plan.freeze:
        raise LaunchError("frozen layers have no setting in this file")
    rank, _, where = (plan.lora or ("64:all" if plan.qlora else "")).partition(":")
    return rank, where or "attention"


#: Products that have adapters, by the names that modules have in transformers.
_TARGETS = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}


def _where(targets: object) -> str:
    """Which products have adapters, by a list or text of modules.

    >>> _where(["q_proj", "v_proj"]), _where("all"), _where("gate_proj,q_proj")
    ('attention', 'all', 'all')
    """
    words = targets if isinstance(targets, list | tuple) else re.split(r"[,\s]+", str(targets or ""))
    kinds = {kind for kind, names in _TARGETS.items() if any(word in names for word in words)}
    return kinds.pop() if len(kinds) == 1 else "all"


# axolotl


def _axolotl_adapter(plan: JobPlan) -> dict[str, Any]:
    if plan.lora is None and not plan.qlora:
        if plan.freeze:
            raise LaunchError("frozen layers have no setting in this file")
        return {}
    rank, where = _adapter(plan)
    if where not in ("all", *_TARGETS):
        raise LaunchError(f"lora={plan.lora}: axolotl names modules; expected attention, mlp or all")
    modules = {"lora_target_linear": True} if where == "all" else {"lora_target_modules": _TARGETS[where]}
    return {"adapter": "qlora" if plan.qlora else "lora", "load_in_4bit": plan.qlora, "lora_r": int(rank), **modules}


def _read_axolotl_adapter(settings: Settings, known: Settings) -> dict[str, Any]:
    adapter = settings.get("adapter")
    if not adapter:
        return {}
    where = (
        "all" if true(settings.get("lora_target_linear", False)) else _where(settings.get("lora_target_modules", "all"))
    )
    return {"lora": f"{whole(settings.get('lora_r', 8), 'lora_r')}:{where}", "qlora": str(adapter) == "qlora"}


def _axolotl_mesh(plan: JobPlan) -> dict[str, Any]:
    axes = {"tensor_parallel_size": plan.tp, "context_parallel_size": plan.cp}
    keys: dict[str, Any] = {name: degree for name, degree in axes.items() if degree > 1}
    if plan.zero == 0:
        return keys
    if plan.offload and set(plan.offload) != set(_ALL):
        raise LaunchError("FSDP offloads parameters, gradients and optimizer together")
    shard = plan.shard if plan.shard > 1 else plan.dp
    return keys | {
        "dp_shard_size": shard,
        "dp_replicate_size": plan.dp // shard,
        "fsdp_version": 2,
        "fsdp_config.reshard_after_forward": plan.zero == 3,
        "fsdp_config.offload_params": bool(plan.offload),
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }


def _read_axolotl_mesh(settings: Settings, known: Settings) -> dict[str, Any]:
    tp, cp = (
        whole(one_of(settings, names) or 1, names[0])
        for names in (("tensor_parallel_size",), ("context_parallel_size", "sequence_parallel_degree"))
    )
    sizes = [settings.get(name) for name in ("dp_shard_size", "dp_replicate_size")]
    shard, replicas = (None if size is None else whole(size, "dp_shard_size") for size in sizes)
    read: dict[str, Any] = {"tp": tp, "cp": cp, "zero": _stage(settings), "offload": _offload(settings)}
    if shard:
        read |= {"gpus": shard * (replicas or 1) * tp * cp, "shard": shard if (replicas or 1) > 1 else 1}
    return read


def _stage(settings: Settings) -> int:
    """The stage of ZeRO that DeepSpeed's file or FSDP's section means."""
    deepspeed = settings.get("deepspeed")
    if deepspeed:
        match = re.search(r"z(?:ero)?[_-]?(\d)", str(deepspeed).lower())
        return int(match[1]) if match else 0
    stage = settings.get("deepspeed.zero_optimization.stage")
    if stage is not None:
        return whole(stage, "deepspeed.zero_optimization.stage")
    has = settings.get("fsdp") or any(key.startswith("fsdp_config.") for key in settings)
    if not has:
        return 0
    kept = one_of(settings, ("fsdp_config.reshard_after_forward", "fsdp_config.fsdp_reshard_after_forward"))
    strategy = str(
        one_of(settings, ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy")) or ""
    ).upper()
    return 2 if (kept is not None and not true(kept)) or strategy == "SHARD_GRAD_OP" else 3


def _offload(settings: Settings) -> tuple[str, ...]:
    word = str(settings.get("deepspeed") or "")
    if "offload" in word or "cpuoffload" in word:
        return _ALL if _stage(settings) == 3 else ("gradients", "optimizer")
    stated = one_of(settings, ("fsdp_config.offload_params", "fsdp_config.fsdp_offload_params"))
    return _ALL if true(stated) else ()


def _read_batch(settings: Settings, known: Settings, size: str) -> dict[str, Any]:
    microbatch = whole(settings.get(size, 1), size)
    steps = whole(settings.get("gradient_accumulation_steps", 1), "gradient_accumulation_steps")
    return {"microbatch": microbatch, "global_batch": microbatch * steps * ranks(known)}


def _bits(plan: JobPlan) -> dict[str, Any]:
    if plan.dtype not in ("bf16", "fp16", "fp32", "tf32", "fp8"):
        raise LaunchError(f"dtype={plan.dtype} has no switch here")
    return {"bf16": plan.dtype in ("bf16", "fp8"), **({plan.dtype: True} if plan.dtype not in ("bf16", "fp32") else {})}


def _read_bits(settings: Settings, known: Settings) -> dict[str, Any]:
    """axolotl takes bf16 unless it is turned off."""
    if true(settings.get("fp8", False)):
        return {"dtype": "fp8"}
    usual = not any(true(settings.get(name, False)) for name in ("fp16", "tf32"))
    stated = settings.get("bf16", usual)
    if true(stated) or str(stated) == "full":
        return {"dtype": "bf16"}
    return {"dtype": next((name for name in ("fp16", "tf32") if true(settings.get(name, False))), "fp32")}


def _checkpointed(plan: JobPlan) -> dict[str, Any]:
    return {"gradient_checkpointing": plan.recompute == "full"}


_RULE = Together(
    ("optimizer",),
    ("optimizer",),
    lambda plan: {"optimizer": OPTIMIZERS.get(plan.optimizer, "")},
    lambda settings, known: {"optimizer": optimizer_of(settings.get("optimizer", "adamw"))},
)

add_launcher(
    Launcher(
        "axolotl",
        "fsdp2",
        "fsdp2",
        "0.19.0",
        (".yml", ".yaml"),
        YamlFile(),
        (
            hub_key("base_model"),
            KeyRow("sequence_len", "seq", absent=512),
            Together(
                (
                    "tensor_parallel_size",
                    "context_parallel_size",
                    "sequence_parallel_degree",
                    "dp_shard_size",
                    "dp_replicate_size",
                    "deepspeed",
                    "fsdp",
                    "fsdp_version",
                    *(
                        f"fsdp_config.{before}{name}"
                        for before in ("", "fsdp_")
                        for name in (
                            "reshard_after_forward",
                            "offload_params",
                            "auto_wrap_policy",
                            "sharding_strategy",
                            "version",
                        )
                    ),
                ),
                ("tp", "cp", "zero", "shard", "offload", "gpus"),
                _axolotl_mesh,
                _read_axolotl_mesh,
            ),
            Together(
                ("micro_batch_size", "gradient_accumulation_steps"),
                ("microbatch", "global_batch"),
                lambda plan: {"micro_batch_size": plan.microbatch, "gradient_accumulation_steps": plan.microbatches},
                lambda settings, known: _read_batch(settings, known, "micro_batch_size"),
            ),
            Together(("bf16", "fp16", "tf32", "fp8"), ("dtype",), _bits, _read_bits),
            Together(
                ("gradient_checkpointing", "fsdp_config.activation_checkpointing"),
                ("recompute",),
                _checkpointed,
                lambda settings, known: {
                    "recompute": "full"
                    if any(
                        settings.get(key) and str(settings[key]).lower() != "false"
                        for key in ("gradient_checkpointing", "fsdp_config.activation_checkpointing")
                    )
                    else "none"
                },
            ),
            _RULE,
            Together(
                ("adapter", "load_in_4bit", "lora_r", "lora_target_linear", "lora_target_modules"),
                ("lora", "qlora", "freeze"),
                _axolotl_adapter,
                _read_axolotl_adapter,
            ),
        ),
        marks=("base_model", "sequence_len", "micro_batch_size"),
        harmless=(
            *prefixes("""
            sample_packing pad_to flash_attention attn_implementation is_ dataset_ fsdp_config.
            gradient_checkpointing_kwargs plugins load_in_8bit peft_ auto_resume hub lora_modules weight ddp
            liger sdp_attention wandb eot roles qlora_sharded
        """),
            *HARMLESS,
        ),
    )
)


# LLaMA-Factory


def _factory_sharing(plan: JobPlan) -> dict[str, Any]:
    """DeepSpeed's example configurations by stage; DDP without."""
    if plan.zero == 0:
        return {}
    if plan.offload and set(plan.offload) != (set(_ALL) if plan.zero == 3 else set(_ALL[:2])):
        raise LaunchError("DeepSpeed's example configurations offload the optimizer, and parameters with ZeRO-3")
    if plan.zero == 1:
        raise LaunchError("LLaMA-Factory has configurations of ZeRO 0, 2 and 3")
    return {"deepspeed": f"examples/deepspeed/ds_z{plan.zero}{'_offload' if plan.offload else ''}_config.json"}


def _factory_adapter(plan: JobPlan) -> dict[str, Any]:
    if plan.lora is None and not plan.qlora:
        if plan.freeze:
            raise LaunchError("frozen layers have no setting in this file")
        return {"finetuning_type": "full"}
    rank, where = _adapter(plan)
    if where not in ("all", *_TARGETS):
        raise LaunchError(f"lora={plan.lora}: LLaMA-Factory names modules; expected attention, mlp or all")
    keys: dict[str, Any] = {"finetuning_type": "lora", "lora_rank": int(rank)}
    keys["lora_target"] = "all" if where == "all" else ",".join(_TARGETS[where])
    return keys | ({"quantization_bit": 4} if plan.qlora else {})


def _read_factory_adapter(settings: Settings, known: Settings) -> dict[str, Any]:
    if str(settings.get("finetuning_type", "lora")) != "lora":
        return {}
    rank = whole(settings.get("lora_rank", 8), "lora_rank")
    bits = settings.get("quantization_bit")
    return {
        "lora": f"{rank}:{_where(settings.get('lora_target', 'all'))}",
        "qlora": bits is not None and whole(bits, "quantization_bit") == 4,
    }


add_launcher(
    Launcher(
        "llama-factory",
        "deepspeed",
        "deepspeed",
        "0.9.5",
        (".yaml", ".yml"),
        YamlFile(),
        (
            hub_key("model_name_or_path"),
            KeyRow("cutoff_len", "seq", absent=2048),
            Together(
                ("deepspeed",),
                ("zero", "offload"),
                _factory_sharing,
                lambda settings, known: {"zero": _stage(settings), "offload": _offload(settings)},
            ),
            Together(
                ("per_device_train_batch_size", "gradient_accumulation_steps"),
                ("microbatch", "global_batch"),
                lambda plan: {
                    "per_device_train_batch_size": plan.microbatch,
                    "gradient_accumulation_steps": plan.microbatches,
                },
                lambda settings, known: _read_batch(settings, known, "per_device_train_batch_size"),
            ),
            Together(
                ("bf16", "fp16"),
                ("dtype",),
                lambda plan: {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}.get(plan.dtype, {"": 0}),
                lambda settings, known: {
                    "dtype": next((name for name in ("bf16", "fp16") if true(settings.get(name, False))), "fp32")
                },
            ),
            Together(
                ("disable_gradient_checkpointing",),
                ("recompute",),
                lambda plan: {"disable_gradient_checkpointing": plan.recompute != "full"},
                lambda settings, known: {
                    "recompute": "none" if true(settings.get("disable_gradient_checkpointing", False)) else "full"
                },
            ),
            Together(
                ("optim",),
                ("optimizer",),
                lambda plan: {"optim": OPTIMIZERS.get(plan.optimizer, "")},
                lambda settings, known: {"optimizer": optimizer_of(settings.get("optim", "adamw"))},
            ),
            Together(
                ("finetuning_type", "lora_rank", "lora_target", "quantization_bit"),
                ("lora", "qlora", "freeze"),
                _factory_adapter,
                _read_factory_adapter,
            ),
        ),
        marks=("cutoff_len", "finetuning_type", "stage"),
        harmless=(
            *prefixes("""
            flash_attn packing enable_liger quantization_method double_quantization ray_ reward pref_ ddp
        """),
            *HARMLESS,
        ),
    )
)
