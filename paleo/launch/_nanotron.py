"""Settings of nanotron: YAML of release 0.4."""

from __future__ import annotations

from typing import Any

from paleo.launch._base import (
    FieldTranslation,
    JobPlan,
    Settings,
    SettingsTranslator,
    accumulation,
    add_launcher,
    number,
    to_integer,
    translate_together,
    with_prefix,
)
from paleo.launch._formats import YamlFile

_AXES = ("parallelism.dp", "parallelism.tp", "parallelism.pp")
_MODEL = "model.model_config."
#: Parameter of a model file for each key of nanotron's Llama configuration.
SIZES = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
}


def _model(plan: JobPlan) -> dict[str, Any]:
    sizes = {f"{_MODEL}{key}": plan.sizes[name] for key, name in SIZES.items() if name in plan.sizes}
    return {"general.run": plan.model, **sizes, f"{_MODEL}max_position_embeddings": plan.seq}


def _read_layers(settings: Settings, known: Settings) -> dict[str, Any]:
    layers = settings.get(f"{_MODEL}num_hidden_layers")
    return {} if layers is None else {"layers": to_integer(layers, f"{_MODEL}num_hidden_layers")}


def _read_axes(settings: Settings, known: Settings) -> dict[str, Any]:
    dp, tp, pp = (number(settings, key) for key in _AXES)
    return {"tp": tp, "pp": pp, "gpus": dp * tp * pp}


_NANOTRON = (
    translate_together(
        f"general.run {with_prefix(_MODEL, ' '.join(SIZES))} {_MODEL}max_position_embeddings",
        "layers",
        _model,
        _read_layers,
    ),
    translate_together(
        " ".join(_AXES),
        "tp pp gpus",
        lambda plan: dict(zip(_AXES, (plan.dp, plan.tp, plan.pp), strict=True)),
        _read_axes,
    ),
    FieldTranslation(
        "parallelism.pp_engine", "schedule", {"gpipe": "afab", "none": "afab", "1f1b": "1f1b"}, absent="gpipe"
    ),
    FieldTranslation("parallelism.tp_mode", "sp", {True: "REDUCE_SCATTER", False: "ALL_REDUCE"}, absent=False),
    FieldTranslation("parallelism.recompute_layer", "recompute", {"full": True, "none": False}, absent="none"),
    FieldTranslation("tokens.sequence_length", "seq"),
    accumulation("tokens.micro_batch_size", "tokens.batch_accumulation_per_replica"),
    FieldTranslation("optimizer.zero_stage", "zero", absent=0),
    FieldTranslation("optimizer.optimizer_factory.name", "optimizer", {"adamw": "adamW", "sgd": "sgd"}, absent="adamw"),
    FieldTranslation("model.dtype", "dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}, absent="fp32"),
)
_NANOTRON_HARMLESS = f"""
    general. checkpoints. data logging. lighteval profiler tokenizer. tokens.train_steps tokens.val
    tokens.limit optimizer.clip_grad optimizer.learning_rate optimizer.weight_decay
    optimizer.optimizer_factory. optimizer.adam optimizer.torch model.init_method model.ddp
    model.make_vocab s3_upload metrics_logging
    {with_prefix(_MODEL, "bos eos pad init is_ use_cache rms rope hidden_act tie")}
"""
add_launcher(SettingsTranslator(
    "nanotron", "nanotron", "nanotron", "0.4", (".yaml", ".yml"), YamlFile(), _NANOTRON,
    marks=("parallelism.tp", "parallelism.pp", "tokens.micro_batch_size"), harmless=_NANOTRON_HARMLESS,
    constant={"optimizer.accumulate_grad_in_fp32": True}, names_model=False,
))  # fmt: skip
