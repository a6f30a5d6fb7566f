"""Settings of nanotron: YAML of release 0.4."""

from __future__ import annotations

from typing import Any

from paleo.launch._base import (
    FieldTranslation,
    JobPlan,
    Settings,
    SettingsTranslator,
    accumulation_translation,
    group_translation,
    integer_setting,
    prefix_words,
    register_launcher,
    to_integer,
)
from paleo.launch._formats import YamlFile

_AXES = ("parallelism.dp", "parallelism.tp", "parallelism.pp")
_MODEL = "model.model_config."
#: Parameter of a model file for each key of nanotron's Llama configuration.
MODEL_PARAMETER_BY_KEY = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
}


def _model(plan: JobPlan) -> dict[str, Any]:
    sizes = {f"{_MODEL}{key}": plan.sizes[name] for key, name in MODEL_PARAMETER_BY_KEY.items() if name in plan.sizes}
    return {"general.run": plan.model, **sizes, f"{_MODEL}max_position_embeddings": plan.seq}


def _read_layers(settings: Settings, known: Settings) -> dict[str, Any]:
    layers = settings.get(f"{_MODEL}num_hidden_layers")
    return {} if layers is None else {"layers": to_integer(layers, f"{_MODEL}num_hidden_layers")}


def _read_axes(settings: Settings, known: Settings) -> dict[str, Any]:
    dp, tp, pp = (integer_setting(settings, key) for key in _AXES)
    return {"tp": tp, "pp": pp, "gpus": dp * tp * pp}


_NANOTRON = (
    group_translation(
        f"general.run {prefix_words(_MODEL, ' '.join(MODEL_PARAMETER_BY_KEY))} {_MODEL}max_position_embeddings",
        "layers",
        _model,
        _read_layers,
    ),
    group_translation(
        " ".join(_AXES), "tp pp gpus", lambda p: dict(zip(_AXES, (p.dp, p.tp, p.pp), strict=True)), _read_axes
    ),
    FieldTranslation(
        "parallelism.pp_engine", "schedule", {"gpipe": "afab", "none": "afab", "1f1b": "1f1b"}, value_if_absent="gpipe"
    ),
    FieldTranslation("parallelism.tp_mode", "sp", {True: "REDUCE_SCATTER", False: "ALL_REDUCE"}, value_if_absent=False),
    FieldTranslation("parallelism.recompute_layer", "recompute", {"full": True, "none": False}, value_if_absent="none"),
    FieldTranslation("tokens.sequence_length", "seq"),
    accumulation_translation("tokens.micro_batch_size", "tokens.batch_accumulation_per_replica"),
    FieldTranslation("optimizer.zero_stage", "zero", value_if_absent=0),
    FieldTranslation(
        "optimizer.optimizer_factory.name", "optimizer", {"adamw": "adamW", "sgd": "sgd"}, value_if_absent="adamw"
    ),
    FieldTranslation(
        "model.dtype", "dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}, value_if_absent="fp32"
    ),
)
_NANOTRON_HARMLESS = f"""
    general. checkpoints. data logging. lighteval profiler tokenizer. tokens.train_steps tokens.val
    tokens.limit optimizer.clip_grad optimizer.learning_rate optimizer.weight_decay
    optimizer.optimizer_factory. optimizer.adam optimizer.torch model.init_method model.ddp
    model.make_vocab s3_upload metrics_logging
    {prefix_words(_MODEL, "bos eos pad init is_ use_cache rms rope hidden_act tie")}
"""
register_launcher(SettingsTranslator(
    "nanotron", "nanotron", "nanotron", "0.4", (".yaml", ".yml"), YamlFile(), _NANOTRON,
    recognising_keys=("parallelism.tp", "parallelism.pp", "tokens.micro_batch_size"),
    ignored_key_prefixes=_NANOTRON_HARMLESS,
    constant_settings={"optimizer.accumulate_grad_in_fp32": True}, states_model_name=False,
))  # fmt: skip
