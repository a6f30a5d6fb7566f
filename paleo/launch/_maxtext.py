"""Settings of MaxText: YAML keys (main branch of 2026-08-22) that override its base.yml."""

from __future__ import annotations

import math
from typing import Any

from paleo.launch._base import (
    FieldTranslation,
    JobPlan,
    LaunchError,
    Settings,
    SettingsTranslator,
    boolean_translation,
    data_parallel_ranks,
    devices_per_replica,
    group_translation,
    integer_setting,
    register_launcher,
)
from paleo.launch._formats import YamlFile
from paleo.specs.loading import MAX_EXACT_INTEGER

_DATA, _FSDP = "ici_data_parallelism", "ici_fsdp_parallelism"
_BATCH = ("per_device_batch_size", "gradient_accumulation_steps", "num_pipeline_microbatches")
#: Axes that have a key for their degree within a slice (ici) and one between slices (dcn).
_AXES = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline"}

_CONTEXT = {True: "ulysses", False: "all_gather"}
_REMAT = {"none": "minimal_with_context", "selective": "minimal", "full": "full"}


def _degree(settings: Settings, axis: str) -> int:
    """Return the degree of a MaxText mesh axis: the degree within slices (ici) times that between slices (dcn).

    The degree is -1 if the axis takes all remaining devices.
    """
    parts = [integer_setting(settings, f"{place}_{axis}_parallelism") for place in ("ici", "dcn")]
    return -1 if -1 in parts else parts[0] * parts[1]


def _read_axes(settings: Settings, known: Settings) -> dict[str, Any]:
    degrees = {name: _degree(settings, axis) for name, axis in _AXES.items()}
    if -1 in degrees.values():
        raise LaunchError(
            "MaxText: an axis other than data and fsdp takes the remaining devices (-1); state its degree"
        )
    return {**degrees, "etp": 1 if degrees["ep"] > 1 and degrees["tp"] * degrees["cp"] > 1 else 0}


def _sharding(plan: JobPlan) -> dict[str, Any]:
    """Return MaxText's keys of data parallelism: shards as the fsdp axis, replicas as the data axis.

    Expert-parallel ranks are on a separate axis.
    """
    ranks = plan.dp // (plan.ep if not plan.etp else max(1, plan.ep // (plan.tp * plan.cp)))
    shard = 1 if plan.zero < 3 else plan.shard if plan.shard > 1 else ranks
    keys: dict[str, Any] = {_DATA: ranks // shard, _FSDP: shard, "dcn_data_parallelism": 1}
    return keys | ({"shard_optimizer_over_data": True} if plan.zero == 1 else {})


def _read_sharding(settings: Settings, known: Settings) -> dict[str, Any]:
    ep = known.get("ep", 1)
    folded = known.get("tp", 1) * known.get("cp", 1) if known.get("etp") else 1
    beside = devices_per_replica(known) * max(1, ep // folded)
    data, fsdp = _degree({"dcn_data_parallelism": -1, **settings}, "data"), _degree({_FSDP: -1, **settings}, "fsdp")
    gpus = known.get("gpus", 0)
    if fsdp < 0:
        fsdp = gpus // (beside * max(data, 1)) if gpus else 0
    if data < 0:
        data = gpus // (beside * max(fsdp, 1)) if gpus else 1
    if not fsdp:
        return {"zero": 3}
    zero = 3 if fsdp > 1 else 1 if settings.get("shard_optimizer_over_data") else 0
    return {"gpus": data * fsdp * beside, "zero": zero, "shard": fsdp if zero == 3 and data > 1 else 1}


def _batch(plan: JobPlan) -> dict[str, Any]:
    """Return MaxText's keys of the batch: samples of one pass for each device, and the number of passes.

    A pipeline runs all microbatches of a step in one pass.
    """
    passes = plan.microbatches if plan.pp > 1 else 1
    samples = plan.microbatch * passes * plan.dp / plan.gpus
    return {_BATCH[0]: samples, **({_BATCH[2]: passes} if plan.pp > 1 else {_BATCH[1]: plan.microbatches})}


def _read_batch(settings: Settings, known: Settings) -> dict[str, Any]:
    gpus = known.get("gpus", 0)
    if not gpus:
        return {}
    stated = settings.get(_BATCH[0], 12.0)
    try:
        samples = float(stated) * gpus
    except (TypeError, ValueError):
        samples = math.nan
    if not 0 < samples <= MAX_EXACT_INTEGER:
        raise LaunchError(f"{_BATCH[0]}: {stated!r:.60} is not a number of samples")
    steps, pp = integer_setting(settings, _BATCH[1]), known.get("pp", 1)
    passes = integer_setting(settings, _BATCH[2], -1) if pp > 1 else 1
    microbatch = max(1, round(samples / (pp if passes < 1 else passes) / data_parallel_ranks(known)))
    return {"microbatch": microbatch, "global_batch": round(samples * steps)}


def _formats(plan: JobPlan) -> dict[str, Any]:
    words = {"bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
    if plan.dtype not in words:
        raise LaunchError(f"MaxText: dtype={plan.dtype} has no setting")
    return {"dtype": words[plan.dtype], **({"quantization": "fp8"} if plan.dtype == "fp8" else {})}


def _read_formats(settings: Settings, known: Settings) -> dict[str, Any]:
    if str(settings.get("quantization") or "").lower().startswith(("fp8", "nanoo_fp8", "te_fp8")):
        return {"dtype": "fp8"}
    return {"dtype": "fp32" if settings.get("dtype") == "float32" else "bf16"}


_MAXTEXT = (
    FieldTranslation("model_name", "model"),
    FieldTranslation("max_target_length", "seq", value_if_absent=2048),
    group_translation(
        " ".join(f"{place}_{axis}_parallelism" for axis in _AXES.values() for place in ("ici", "dcn")),
        " ".join((*_AXES, "etp")),
        lambda plan: {f"ici_{axis}_parallelism": getattr(plan, name) for name, axis in _AXES.items()},
        _read_axes,
    ),
    group_translation(
        f"{_DATA} {_FSDP} dcn_data_parallelism dcn_fsdp_parallelism shard_optimizer_over_data",
        "zero shard gpus",
        _sharding,
        _read_sharding,
    ),
    group_translation(" ".join(_BATCH), "microbatch global_batch", _batch, _read_batch),
    FieldTranslation("context_parallel_strategy", "ulysses", _CONTEXT, value_if_absent=False, omitted=True),
    FieldTranslation(
        "remat_policy", "recompute", _REMAT, value_if_absent="full", older_spellings=(("minimal_flash", "none"),)
    ),
    FieldTranslation(
        "opt_type", "optimizer", {"adamw": "adamw", "sgd": "sgd", "muon": "muon"}, value_if_absent="adamw"
    ),
    group_translation("dtype quantization", "dtype scaling", _formats, _read_formats),
    boolean_translation("optimizer_memory_host_offload", "offload", ("optimizer",), (), written=False),
    group_translation(  # all layers of a stage are one chunk, so the pipeline is not circular
        "num_layers_per_pipeline_stage",
        "schedule vp",
        lambda plan: {"num_layers_per_pipeline_stage": plan.layers // plan.pp} if plan.pp > 1 else {},
        lambda settings, known: {"schedule": "gpipe" if known.get("pp", 1) > 1 else "none", "vp": 1},
    ),
)
_MAXTEXT_HARMLESS = """
    run_name base_output_directory dataset hf_ tokenizer steps enable_checkpointing
    async_checkpointing learning_rate profiler hardware checkpoint log_period packing reuse_example
    attention vocab_size warmup adam gcs scan_layers sa_ enable_goodput monitor metrics base_config
    load_ save_ eval use_iota skip_ grain eval_ cosine init_weights weight_dtype grad_dtype upload
    iota
"""
register_launcher(SettingsTranslator(
    "maxtext", "maxtext", "maxtext", "main 2026-08", (".yml", ".yaml"), YamlFile(), _MAXTEXT,
    recognising_keys=("per_device_batch_size", "ici_fsdp_parallelism", "remat_policy", "model_name"),
    ignored_key_prefixes=_MAXTEXT_HARMLESS,
))  # fmt: skip
