"""nanotron's YAML (0.4)."""

from __future__ import annotations

from typing import Any

from paleo.launch._base import JobPlan, KeyRow, Launcher, Settings, Together, add_launcher, prefixes, whole
from paleo.launch._formats import YamlFile

_AXES = ("parallelism.dp", "parallelism.tp", "parallelism.pp")
_BATCH = ("tokens.micro_batch_size", "tokens.batch_accumulation_per_replica")
_MODEL = "model.model_config."
#: Keys of its Llama configuration -> parameters of a network's file.
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


def _axes(plan: JobPlan) -> dict[str, Any]:
    return dict(zip(_AXES, (plan.dp, plan.tp, plan.pp), strict=True))


def _read_axes(settings: Settings, known: Settings) -> dict[str, Any]:
    dp, tp, pp = (whole(settings.get(key, 1), key) for key in _AXES)
    return {"tp": tp, "pp": pp, "gpus": dp * tp * pp}


def _batch(plan: JobPlan) -> dict[str, Any]:
    return dict(zip(_BATCH, (plan.microbatch, plan.microbatches), strict=True))


def _read_batch(settings: Settings, known: Settings) -> dict[str, Any]:
    microbatch, passes = (whole(settings.get(key, 1), key) for key in _BATCH)
    ranks = known.get("gpus", 1) // (known.get("tp", 1) * known.get("pp", 1))
    return {"microbatch": microbatch, "global_batch": microbatch * passes * ranks}


def _read_layers(settings: Settings, known: Settings) -> dict[str, Any]:
    layers = settings.get(f"{_MODEL}num_hidden_layers")
    return {} if layers is None else {"layers": whole(layers, f"{_MODEL}num_hidden_layers")}


add_launcher(
    Launcher(
        "nanotron",
        "nanotron",
        "nanotron",
        "0.4",
        (".yaml", ".yml"),
        YamlFile(),
        (
            Together(
                ("general.run", *(f"{_MODEL}{key}" for key in SIZES), f"{_MODEL}max_position_embeddings"),
                ("layers",),
                _model,
                _read_layers,
            ),
            Together(_AXES, ("tp", "pp", "gpus"), _axes, _read_axes),
            KeyRow(
                "parallelism.pp_engine", "schedule", {"gpipe": "afab", "none": "afab", "1f1b": "1f1b"}, absent="gpipe"
            ),
            KeyRow("parallelism.tp_mode", "sp", {True: "REDUCE_SCATTER", False: "ALL_REDUCE"}, absent=False),
            KeyRow("parallelism.recompute_layer", "recompute", {"full": True, "none": False}, absent="none"),
            KeyRow("tokens.sequence_length", "seq"),
            Together(_BATCH, ("microbatch", "global_batch"), _batch, _read_batch),
            KeyRow("optimizer.zero_stage", "zero", absent=0),
            KeyRow("optimizer.optimizer_factory.name", "optimizer", {"adamw": "adamW", "sgd": "sgd"}, absent="adamw"),
            KeyRow("model.dtype", "dtype", {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}, absent="fp32"),
        ),
        marks=("parallelism.tp", "parallelism.pp", "tokens.micro_batch_size"),
        harmless=(
            *prefixes("""
            general. checkpoints. data logging. lighteval profiler tokenizer. tokens.train_steps tokens.val
            tokens.limit optimizer.clip_grad optimizer.learning_rate optimizer.weight_decay
            optimizer.optimizer_factory. optimizer.adam optimizer.torch model.init_method model.ddp
            model.make_vocab s3_upload metrics_logging
        """),
            f"{_MODEL}bos",
            f"{_MODEL}eos",
            f"{_MODEL}pad",
            f"{_MODEL}init",
            f"{_MODEL}is_",
            f"{_MODEL}use_cache",
            f"{_MODEL}rms",
            f"{_MODEL}rope",
            f"{_MODEL}hidden_act",
            f"{_MODEL}tie",
        ),
        constant={"optimizer.accumulate_grad_in_fp32": True},
        names_model=False,
    )
)
