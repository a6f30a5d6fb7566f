"""Settings of axolotl (0.19) and LLaMA-Factory (0.9), each in one YAML file."""

from __future__ import annotations

import re
from typing import Any

from paleo.launch._base import (
    FSDP_OFFLOADED_STATES,
    FieldTranslation,
    JobPlan,
    LaunchError,
    Settings,
    SettingsTranslator,
    accumulation_translation,
    boolean_translation,
    dtype_translation,
    first_given_value,
    group_translation,
    hub_id_translation,
    is_true,
    missing_hub_id_hint,
    offloads_all_states,
    prefix_words,
    register_launcher,
    to_integer,
)
from paleo.launch._formats import YamlFile
from paleo.launch._transformers import IGNORED_TRAINING_ARG_PREFIXES, optimizer_translation

#: Modules of transformers that get adapters, for each target.
_TARGETS = {"attention": ["q_proj", "k_proj", "v_proj", "o_proj"], "mlp": ["gate_proj", "up_proj", "down_proj"]}


def _adapters(plan: JobPlan) -> tuple[int, list[str] | None] | None:
    """Return (rank, modules) of a plan's LoRA adapters; modules are None for all. Without adapters, return None."""
    if plan.freeze:
        raise LaunchError("frozen layers have no setting in this file")
    if plan.lora is None:
        return None
    rank, _, where = plan.lora.partition(":")
    if where not in ("all", *_TARGETS):
        raise LaunchError(f"lora={plan.lora}: this file names modules; expected attention, mlp or all")
    return int(rank), _TARGETS.get(where)


def _where(targets: object) -> str:
    """Return the target of adapters (``attention``, ``mlp`` or ``all``) for a list or text of module names.

    >>> _where(["q_proj", "v_proj"]), _where("all"), _where("gate_proj,q_proj")
    ('attention', 'all', 'all')
    """
    words = targets if isinstance(targets, list | tuple) else re.split(r"[,\s]+", str(targets or ""))
    kinds = {kind for kind, names in _TARGETS.items() if any(word in names for word in words)}
    return kinds.pop() if len(kinds) == 1 else "all"


def _stage(settings: Settings) -> int:
    """Return the ZeRO stage (0 to 3) of a job, from the DeepSpeed keys or otherwise from the FSDP section."""
    deepspeed = settings.get("deepspeed")
    if deepspeed:
        match = re.search(r"z(?:ero)?[_-]?(\d)", str(deepspeed).lower())
        return int(match[1]) if match else 0
    stage = settings.get("deepspeed.zero_optimization.stage")
    if stage is not None:
        return to_integer(stage, "deepspeed.zero_optimization.stage")
    if not (settings.get("fsdp") or any(key.startswith("fsdp_config.") for key in settings)):
        return 0
    reshard = _of_fsdp(settings, "reshard_after_forward")
    strategy = first_given_value(settings, ("fsdp_config.fsdp_sharding_strategy", "fsdp_config.sharding_strategy"))
    return 2 if (reshard is not None and not is_true(reshard)) or str(strategy).upper() == "SHARD_GRAD_OP" else 3


def _offload(settings: Settings) -> tuple[str, ...]:
    word = str(settings.get("deepspeed") or "")
    if "offload" in word:
        return FSDP_OFFLOADED_STATES if _stage(settings) == 3 else FSDP_OFFLOADED_STATES[:2]
    return FSDP_OFFLOADED_STATES if is_true(_of_fsdp(settings, "offload_params")) else ()


def _of_fsdp(settings: Settings, name: str) -> object:
    return first_given_value(settings, (f"fsdp_config.{name}", f"fsdp_config.fsdp_{name}"))


# axolotl


def _axolotl_adapters(plan: JobPlan) -> dict[str, Any]:
    if (adapters := _adapters(plan)) is None:
        return {}
    rank, modules = adapters
    where = {"lora_target_linear": True} if modules is None else {"lora_target_modules": modules}
    return {"adapter": "qlora" if plan.qlora else "lora", "load_in_4bit": plan.qlora, "lora_r": rank, **where}


def _read_axolotl_adapters(settings: Settings, known: Settings) -> dict[str, Any]:
    adapter = settings.get("adapter")
    if not adapter:
        return {}
    linear = is_true(settings.get("lora_target_linear"))
    where = "all" if linear else _where(settings.get("lora_target_modules", "all"))
    return {"lora": f"{to_integer(settings.get('lora_r', 8), 'lora_r')}:{where}", "qlora": str(adapter) == "qlora"}


def _axolotl_mesh(plan: JobPlan) -> dict[str, Any]:
    axes = {"tensor_parallel_size": plan.tp, "context_parallel_size": plan.cp}
    keys: dict[str, Any] = {name: degree for name, degree in axes.items() if degree > 1}
    if plan.zero == 0:
        return keys
    shard = plan.shard if plan.shard > 1 else plan.dp
    return keys | {
        "dp_shard_size": shard,
        "dp_replicate_size": plan.dp // shard,
        "fsdp_version": 2,
        "fsdp_config.reshard_after_forward": plan.zero == 3,
        "fsdp_config.offload_params": offloads_all_states(plan),
        "fsdp_config.auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    }


def _read_axolotl_mesh(settings: Settings, known: Settings) -> dict[str, Any]:
    def size(*names: str) -> int:
        return to_integer(first_given_value(settings, names) or 0, names[0])

    tp = size("tensor_parallel_size") or 1
    cp = size("context_parallel_size", "sequence_parallel_degree") or 1
    shard, replicas = size("dp_shard_size"), size("dp_replicate_size") or 1
    read: dict[str, Any] = {"tp": tp, "cp": cp, "zero": _stage(settings), "offload": _offload(settings)}
    return read | ({"gpus": shard * replicas * tp * cp, "shard": shard if replicas > 1 else 1} if shard else {})


def _bits(plan: JobPlan) -> dict[str, Any]:
    if plan.dtype not in ("bf16", "fp16", "fp32", "tf32", "fp8"):
        raise LaunchError(f"dtype={plan.dtype} has no switch here")
    return {"bf16": plan.dtype in ("bf16", "fp8"), **({plan.dtype: True} if plan.dtype not in ("bf16", "fp32") else {})}


def _read_bits(settings: Settings, known: Settings) -> dict[str, Any]:
    """Read the number format (field ``dtype``) of a plan from axolotl's keys; bf16 is the framework's default."""
    on = [name for name in ("fp8", "fp16", "tf32") if is_true(settings.get(name))]
    bf16 = settings.get("bf16", not set(on) - {"fp8"})
    if "fp8" not in on and (is_true(bf16) or str(bf16) == "full"):
        return {"dtype": "bf16"}
    return {"dtype": next(iter(on), "fp32")}


_CHECKPOINTED = ("gradient_checkpointing", "fsdp_config.activation_checkpointing")


def _read_checkpointed(settings: Settings, known: Settings) -> dict[str, Any]:
    """Read the recompute policy of a plan from axolotl's checkpointing keys; any word except false means full."""
    on = any(settings.get(key) and str(settings[key]).lower() != "false" for key in _CHECKPOINTED)
    return {"recompute": "full" if on else "none"}


_MESH_KEYS = """
    tensor_parallel_size context_parallel_size sequence_parallel_degree dp_shard_size dp_replicate_size deepspeed
    fsdp fsdp_version
"""
_SECTION = "reshard_after_forward offload_params auto_wrap_policy sharding_strategy version"

_AXOLOTL = (
    hub_id_translation("base_model"),
    FieldTranslation("sequence_len", "seq", value_if_absent=512),
    group_translation(
        f"{_MESH_KEYS} {prefix_words('fsdp_config.', _SECTION)} {prefix_words('fsdp_config.fsdp_', _SECTION)}",
        "tp cp zero shard offload gpus",
        _axolotl_mesh,
        _read_axolotl_mesh,
    ),
    accumulation_translation("micro_batch_size", "gradient_accumulation_steps"),
    group_translation("bf16 fp16 tf32 fp8", "dtype", _bits, _read_bits),
    group_translation(
        " ".join(_CHECKPOINTED),
        "recompute",
        lambda plan: {"gradient_checkpointing": plan.recompute == "full"},
        _read_checkpointed,
    ),
    optimizer_translation("optimizer"),
    group_translation(
        "adapter load_in_4bit lora_r lora_target_linear lora_target_modules",
        "lora qlora freeze",
        _axolotl_adapters,
        _read_axolotl_adapters,
    ),
)
_AXOLOTL_HARMLESS = f"""
    sample_packing pad_to flash_attention attn_implementation is_ dataset_ fsdp_config.
    gradient_checkpointing_kwargs plugins load_in_8bit peft_ auto_resume hub lora_modules weight ddp
    liger sdp_attention wandb eot roles qlora_sharded {IGNORED_TRAINING_ARG_PREFIXES}
"""
register_launcher(SettingsTranslator(
    "axolotl", "fsdp2", "fsdp2", "0.19.0", (".yml", ".yaml"), YamlFile(), _AXOLOTL,
    recognising_keys=("base_model", "sequence_len", "micro_batch_size"), ignored_key_prefixes=_AXOLOTL_HARMLESS,
    preparation_text=missing_hub_id_hint,
))  # fmt: skip


# LLaMA-Factory


def _factory_sharding(plan: JobPlan) -> dict[str, Any]:
    """Return LLaMA-Factory's key for ZeRO: the path of an example DeepSpeed configuration; no key for DDP."""
    if plan.zero == 0:
        return {}
    if plan.zero == 1:
        raise LaunchError("LLaMA-Factory has configurations of ZeRO 0, 2 and 3")
    if plan.offload not in ((), FSDP_OFFLOADED_STATES if plan.zero == 3 else FSDP_OFFLOADED_STATES[:2]):
        raise LaunchError("DeepSpeed's example configurations offload the optimizer, and parameters with ZeRO-3")
    return {"deepspeed": f"examples/deepspeed/ds_z{plan.zero}{'_offload' if plan.offload else ''}_config.json"}


def _factory_adapters(plan: JobPlan) -> dict[str, Any]:
    if (adapters := _adapters(plan)) is None:
        return {"finetuning_type": "full"}
    rank, modules = adapters
    keys = {"finetuning_type": "lora", "lora_rank": rank, "lora_target": ",".join(modules or ["all"])}
    return keys | ({"quantization_bit": 4} if plan.qlora else {})


def _read_factory_adapters(settings: Settings, known: Settings) -> dict[str, Any]:
    if str(settings.get("finetuning_type", "lora")) != "lora":
        return {}
    rank, bits = to_integer(settings.get("lora_rank", 8), "lora_rank"), settings.get("quantization_bit")
    qlora = bits is not None and to_integer(bits, "quantization_bit") == 4
    return {"lora": f"{rank}:{_where(settings.get('lora_target', 'all'))}", "qlora": qlora}


_LLAMA_FACTORY = (
    hub_id_translation("model_name_or_path"),
    FieldTranslation("cutoff_len", "seq", value_if_absent=2048),
    group_translation(
        "deepspeed", "zero offload", _factory_sharding, lambda s, known: {"zero": _stage(s), "offload": _offload(s)}
    ),
    accumulation_translation("per_device_train_batch_size", "gradient_accumulation_steps"),
    dtype_translation(bf16="bf16", fp16="fp16"),
    boolean_translation("disable_gradient_checkpointing", "recompute", "none", "full"),
    optimizer_translation("optim"),
    group_translation(
        "finetuning_type lora_rank lora_target quantization_bit",
        "lora qlora freeze",
        _factory_adapters,
        _read_factory_adapters,
    ),
)
_LLAMA_FACTORY_HARMLESS = f"""
    flash_attn packing enable_liger quantization_method double_quantization ray_ reward pref_ ddp
    {IGNORED_TRAINING_ARG_PREFIXES}
"""
register_launcher(SettingsTranslator(
    "llama-factory", "deepspeed", "deepspeed", "0.9.5", (".yaml", ".yml"), YamlFile(), _LLAMA_FACTORY,
    recognising_keys=("cutoff_len", "finetuning_type", "stage"), ignored_key_prefixes=_LLAMA_FACTORY_HARMLESS,
    preparation_text=missing_hub_id_hint,
))  # fmt: skip
