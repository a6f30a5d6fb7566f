"""Reader of encoder-decoder networks for text."""

from __future__ import annotations

from typing import Any

from paleo.importers._decoder import residual
from paleo.importers.configuration import FAMILIES, Config, Entry, Model, UnreadHeadError, architecture


@FAMILIES.register("t5")
def t5(config: Config) -> Model:
    """Read T5 (Raffel et al., 2020): encoder and decoder, with a table of learned score biases by distance for each."""
    kind = architecture(config, ("T5", "MT5"), "ForConditionalGeneration")
    if kind not in ("ForConditionalGeneration", "WithLMHeadModel"):
        raise UnreadHeadError(kind)
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
        "dropout": config.share("dropout_rate", default=0.1),
    }


def _layers(config: Config) -> list[Entry]:
    drop = {"dropout": {"rate": "=dropout"}}
    attention = {"heads": "=heads", "head_dim": "=head_dim", "bias": False, "dropout": "=dropout"}
    bias = {"relative_bias": {"buckets": "=buckets", "heads": "=heads"}}
    seen = residual("rms_norm", {"attention": attention}, drop)
    self_attention = residual("rms_norm", {"attention": attention | {"causal": True}}, drop)
    cross = {"inputs": ["query", "memory"], "attention": attention}
    other = residual({"name": "query", "rms_norm": {}}, cross, drop)
    feed = residual("rms_norm", _feed(config), drop)
    table: dict[str, Any] = {"entries": "=vocab", "features": "=hidden"}
    head: dict[str, Any] = {"features": "=vocab", "dim": "vocab", "bias": False}
    head |= {"tie": "embed"} if config.flag("tie_word_embeddings", True) else {}
    encoder = {"repeat": "=layers", "name": "encoder", "layers": [seen, feed]}
    decoder = {"repeat": "=decoder_layers", "name": "decoder", "layers": [self_attention, other, feed]}
    first = {"name": "embed", "inputs": ["source"], "embedding": table}
    second = {"name": "target_embed", "inputs": ["target"], "embedding": table | {"tie": "embed"}}
    last = [{"name": "head", "linear": head}, "cross_entropy"]
    memory = {"name": "memory", **drop}
    return [first, drop, bias, encoder, "rms_norm", memory, second, drop, bias, decoder, "rms_norm", drop, *last]


def _feed(config: Config) -> Entry:
    """Return the feed-forward block, with a gate in T5 1.1."""
    stated = str(config.get("feed_forward_proj") or "relu")
    words = Config({"feed_forward_proj": stated.removeprefix("gated-")}, config.path)
    function = words.activation("feed_forward_proj", default="relu", gated=stated.startswith("gated-"))
    return {"mlp": {"ffn": "=ffn", "activation": function, "bias": False, "dropout": "=dropout"}}


FAMILIES.register("mt5")(t5)
