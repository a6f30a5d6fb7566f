"""Readers of text encoders.

Reader of vision transformers, whose tokens are patches of images.

Reader of encoder-decoder networks for text.
"""

from __future__ import annotations

from typing import Any

from paleo.importers._decoder import base_parameters, residual_block_entry, with_vocab_last
from paleo.importers.transformers_configuration import (
    FAMILY_READERS,
    MAX_DEFAULT_SEQ,
    Config,
    ModelFileEntry,
    ModelMapping,
    UnsupportedHeadError,
    architecture_head_suffix,
    class_count,
)

#: Entries that several readers share.
_DROP: ModelFileEntry = {"dropout": {"rate": "=dropout"}}
_POOLER: list[ModelFileEntry] = [
    "select",
    {"name": "pooler", "linear": {"features": "=hidden", "dim": "hidden"}},
    "tanh",
]


def _bert_head(config: Config, kind: str) -> list[ModelFileEntry]:
    """Return the model-file entries after BERT's last layer (pooler, classifier, loss, …) for a head ``kind``."""
    roberta = config["model_type"] != "bert"
    function = "gelu" if roberta else config.activation("hidden_act", default="gelu")
    tie = {"tie": "embed"} if config.flag("tie_word_embeddings", True) else {}
    masked: list[ModelFileEntry] = [
        {"name": "transform", "linear": {"features": "=hidden", "dim": "hidden"}},
        function,
        "layer_norm",
        {"name": "head", "linear": {"features": "=vocab", "dim": "vocab"} | tie},
        "cross_entropy",
    ]
    classifier: list[ModelFileEntry] = [
        _DROP,
        {"linear": {"features": class_count(config), "dim": "classes"}},
        "cross_entropy",
    ]
    heads: dict[str, list[ModelFileEntry]] = {
        "ForMaskedLM": masked,
        "ForPreTraining": [
            {"name": "encoded", "identity": {}},
            *_POOLER,
            {"name": "next_sentence", "linear": {"features": 2}},
            "cross_entropy",
            {"name": "masked", "inputs": ["encoded"], "identity": {}},
            *masked,
        ],
        "ForSequenceClassification": [*_POOLER, *classifier],
        "ForTokenClassification": classifier,
        "Model": _POOLER,
    }
    if kind not in heads or (roberta and kind == "ForPreTraining"):
        raise UnsupportedHeadError(kind)
    return heads[kind]


@FAMILY_READERS.register("bert")
def bert(config: Config) -> ModelMapping:
    """Return the network that a BERT or RoBERTa configuration describes. Every position is projected to the vocabulary.

    References: Devlin et al., BERT, 2019; Liu et al., RoBERTa, 2019.
    """
    params = base_parameters(
        config,
        ffn=config.integer("intermediate_size"),
        positions=config.integer("max_position_embeddings", default=512),
    )
    spare = 0 if config["model_type"] == "bert" else 2
    params["seq"] = max(1, params["positions"] - spare) if params["positions"] <= MAX_DEFAULT_SEQ else MAX_DEFAULT_SEQ
    params["dropout"] = config.fraction("hidden_dropout_prob", default=0.1)
    params["attention_dropout"] = config.fraction("attention_probs_dropout_prob", default=0.1)
    params["activation"] = config.activation("hidden_act", default="gelu")
    index = {"dims": {"batch": "=batch", "seq": "=seq"}, "role": "index"}
    kinds = {"entries": config.integer("type_vocab_size", default=2), "features": "=hidden", "rows": "kinds"}
    embed: list[ModelFileEntry] = [
        {"name": "embed", "embedding": {"entries": "=vocab", "features": "=hidden"}},
        {"name": "segment", "inputs": ["segments"], "embedding": kinds},
        {"inputs": ["embed", "segment"], "add": {}},
        {"position_embedding": {"positions": f"=max(positions, seq + {spare})" if spare else "=max(positions, seq)"}},
        "layer_norm",
        _DROP,
    ]
    kind = architecture_head_suffix(config, ("Bert", "Roberta", "XLMRoberta", "Camembert"), "ForMaskedLM")
    halves = (
        {"attention": {"heads": "=heads", "dropout": "=attention_dropout"}},
        {"mlp": {"ffn": "=ffn", "activation": "=activation"}},
    )
    post_norm = [entry for half in halves for entry in (residual_block_entry(half, _DROP), "layer_norm")]
    return {
        "task": "masked language modelling" if kind in ("ForMaskedLM", "ForPreTraining") else "text classification",
        "notes": "Every position is projected to the vocabulary, as the library does." if "M" in kind else "",
        "params": with_vocab_last(params),
        "tokens": "=seq",
        "inputs": {"tokens": index, "segments": index},
        "layers": [*embed, {"repeat": "=layers", "name": "block", "layers": post_norm}, *_bert_head(config, kind)],
    }


@FAMILY_READERS.register("roberta")
def roberta(config: Config) -> ModelMapping:
    """Return the network of a RoBERTa configuration: `bert`, with RoBERTa's two-layer classifier."""
    model = bert(config)
    kind = architecture_head_suffix(config, ("Roberta", "XLMRoberta", "Camembert"), "ForMaskedLM")
    if kind == "ForSequenceClassification":
        dense = {"name": "dense", "linear": {"features": "=hidden", "dim": "hidden"}}
        start = model["layers"].index("select")
        classifier = model["layers"][start + len(_POOLER) :]
        model["layers"][start:] = ["select", _DROP, dense, "tanh", *classifier]
    return model


FAMILY_READERS.register("xlm-roberta")(roberta)
FAMILY_READERS.register("camembert")(roberta)


@FAMILY_READERS.register("vit")
def vit(config: Config) -> ModelMapping:
    """Return the network that a ViT configuration describes (Dosovitskiy et al., 2021)."""
    kind = architecture_head_suffix(config, ("ViT",), "ForImageClassification")
    if kind not in ("ForImageClassification", "Model"):
        raise UnsupportedHeadError(kind)
    params = {
        "image": config.integer("image_size", default=224),
        "patch": config.integer("patch_size", default=16),
        "colours": config.integer("num_channels", default=3),
    }
    params |= config.integers(hidden="hidden_size", heads="num_attention_heads", layers="num_hidden_layers")
    params |= {"ffn": config.integer("intermediate_size"), "classes": class_count(config)}
    bias = config.flag("qkv_bias", True)
    attention: dict[str, Any] = {"heads": "=heads"} | ({} if bias else {"bias": False, "out_bias": True})
    feed = {"mlp": {"ffn": "=ffn", "activation": config.activation("hidden_act", default="gelu")}}
    classes = {"name": "head", "linear": {"features": "=classes", "dim": "classes"}}
    head = ["select", classes, "cross_entropy"] if kind == "ForImageClassification" else _POOLER
    layers = [residual_block_entry("layer_norm", {"attention": attention}), residual_block_entry("layer_norm", feed)]
    patches = {"name": "patches", "conv": {"channels": "=hidden", "kernel": "=patch", "stride": "=patch"}}
    image = {"batch": "=batch", "channels": "=colours", "height": "=image", "width": "=image"}
    return {
        "task": "image classification",
        "notes": "",
        "params": params,
        "inputs": {"image": {"dims": image}},
        "layers": [
            patches,
            "to_sequence",
            "class_token",
            "position_embedding",
            {"repeat": "=layers", "name": "block", "layers": layers},
            "layer_norm",
            *head,
        ],
    }


@FAMILY_READERS.register("t5")
def t5(config: Config) -> ModelMapping:
    """Return the network that a T5 configuration describes (Raffel et al., 2020).

    T5 has an encoder and a decoder, each with a learned table of score biases by distance.
    """
    kind = architecture_head_suffix(config, ("T5", "MT5"), "ForConditionalGeneration")
    if kind not in ("ForConditionalGeneration", "WithLMHeadModel"):
        raise UnsupportedHeadError(kind)
    source = {"dims": {"batch": "=batch", "source_seq": "=seq"}, "role": "index"}
    target = {"dims": {"batch": "=batch", "seq": "=target_seq"}, "role": "index"}
    return {
        "task": "translation",
        "notes": "A sample is a source and a target of equal length; tokens are those of the target.",
        "params": _parameters(config),
        "tokens": "=target_seq",
        "inputs": {"source": source, "target": target},
        "layers": _layers(config),
    }


def _parameters(config: Config) -> dict[str, Any]:
    layers = config.integer("num_layers", default=6)
    return {
        "seq": 512,
        "target_seq": "=seq",
        "hidden": config.integer("d_model"),
        "heads": config.integer("num_heads"),
        "head_dim": config.integer("d_kv"),
        "layers": layers,
        "decoder_layers": config.integer("num_decoder_layers", default=layers),
        "ffn": config.integer("d_ff"),
        "buckets": config.integer("relative_attention_num_buckets", default=32),
        "vocab": config.integer("vocab_size"),
        "dropout": config.fraction("dropout_rate", default=0.1),
    }


def _layers(config: Config) -> list[ModelFileEntry]:
    attention = {"heads": "=heads", "head_dim": "=head_dim", "bias": False, "dropout": "=dropout"}
    bias = {"relative_bias": {"buckets": "=buckets", "heads": "=heads"}}
    seen = residual_block_entry("rms_norm", {"attention": attention}, _DROP)
    self_attention = residual_block_entry("rms_norm", {"attention": attention | {"causal": True}}, _DROP)
    cross = {"inputs": ["query", "memory"], "attention": attention}
    other = residual_block_entry({"name": "query", "rms_norm": {}}, cross, _DROP)
    feed = residual_block_entry("rms_norm", _feed(config), _DROP)
    table: dict[str, Any] = {"entries": "=vocab", "features": "=hidden"}
    head: dict[str, Any] = {"features": "=vocab", "dim": "vocab", "bias": False}
    head |= {"tie": "embed"} if config.flag("tie_word_embeddings", True) else {}
    encoder = {"repeat": "=layers", "name": "encoder", "layers": [seen, feed]}
    decoder = {"repeat": "=decoder_layers", "name": "decoder", "layers": [self_attention, other, feed]}
    first = {"name": "embed", "inputs": ["source"], "embedding": table}
    second = {"name": "target_embed", "inputs": ["target"], "embedding": table | {"tie": "embed"}}
    last = [{"name": "head", "linear": head}, "cross_entropy"]
    memory = {"name": "memory", **_DROP}
    return [first, _DROP, bias, encoder, "rms_norm", memory, second, _DROP, bias, decoder, "rms_norm", _DROP, *last]


def _feed(config: Config) -> ModelFileEntry:
    """Return the model-file entry of T5's feed-forward block (gated in T5 1.1)."""
    stated = str(config.get("feed_forward_proj") or "relu")
    words = Config({"feed_forward_proj": stated.removeprefix("gated-")}, config.path)
    function = words.activation("feed_forward_proj", default="relu", gated=stated.startswith("gated-"))
    return {"mlp": {"ffn": "=ffn", "activation": function, "bias": False, "dropout": "=dropout"}}


FAMILY_READERS.register("mt5")(t5)
