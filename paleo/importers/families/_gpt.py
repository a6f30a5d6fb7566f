"""Readers of decoders with layer norms and plain feed-forward blocks."""

from __future__ import annotations

from typing import Any

from paleo.errors import SpecError
from paleo.importers._decoder import (
    Decoder,
    attention_options,
    base_parameters,
    grouped_query_parameters,
    language_model_file,
    plain_feed_forward,
    window_options,
)
from paleo.importers.transformers_configuration import (
    FAMILY_READERS,
    MAX_DEFAULT_SEQ,
    Config,
    ModelFileEntry,
    ModelMapping,
)


@FAMILY_READERS.register("phi")
def phi(config: Config) -> ModelMapping:
    """Return the network that a Phi-1 or Phi-2 configuration describes (2023).

    Attention and feed-forward block run in parallel on the same normalised input.
    """
    params = grouped_query_parameters(config)
    params["ffn"] = config.integer("intermediate_size", default=4 * params["hidden"])
    if config.flag("qk_layernorm"):
        raise SpecError(f"{config.path}: qk_layernorm: true is not supported; expected false")
    feed = plain_feed_forward(config, "gelu_new")
    decoder = Decoder(params, "layer_norm", attention_options(params, rotary=True), "parallel", head_bias=True)
    return language_model_file(config, decoder, [feed] * params["layers"])


@FAMILY_READERS.register("gpt2")
def gpt2(config: Config) -> ModelMapping:
    """Return the network that a GPT-2 configuration describes (Radford et al., 2019)."""
    params = base_parameters(
        config, positions=config.integer("n_positions", "max_position_embeddings", default=MAX_DEFAULT_SEQ // 4)
    )
    params["ffn"] = config.integer("n_inner", default=4 * params["hidden"])
    params["dropout"] = config.fraction("resid_pdrop", default=0.1)
    feed = plain_feed_forward(config, "gelu_new", "activation_function")
    positions = {"position_embedding": {"positions": "=max(positions, seq)"}}
    attention = attention_options(params, dropout=config.fraction("attn_pdrop", default=0.1))
    entries = (positions, {"dropout": {"rate": config.fraction("embd_pdrop", default=0.1)}})
    decoder = Decoder(params, "layer_norm", attention, entries_after_embedding=entries, tied=True)
    return language_model_file(config, decoder, [feed] * params["layers"])


@FAMILY_READERS.register("gpt_neox")
def gpt_neox(config: Config) -> ModelMapping:
    """Return the network that a GPT-NeoX configuration describes (Black et al., GPT-NeoX-20B, 2022).

    Attention and feed-forward block run in parallel on the same input, each behind its own layer norm.
    """
    params = base_parameters(config) | config.integers(ffn="intermediate_size") | _dropout(config, "hidden_dropout")
    feed = plain_feed_forward(config, "gelu")
    attention = attention_options(
        params, rotary=True, bias=config.flag("attention_bias", True), dropout=config.fraction("attention_dropout")
    )
    residual = "twin" if config.flag("use_parallel_residual", True) else "pre"
    return language_model_file(config, Decoder(params, "layer_norm", attention, residual), [feed] * params["layers"])


def _dropout(config: Config, key: str) -> dict[str, Any]:
    """Return the parameter ``dropout`` of a model file; nothing if the configuration has no dropout under ``key``."""
    rate = config.fraction(key)
    return {"dropout": rate} if rate else {}


@FAMILY_READERS.register("opt")
def opt(config: Config) -> ModelMapping:
    """Return the network that an OPT configuration describes (Zhang et al., 2022).

    The position table has two more rows than there are positions. The 350M model has a narrower embedding, and norms
    after each half of a layer.
    """
    params = base_parameters(config, positions=config.integer("max_position_embeddings", default=2048))
    params["ffn"] = config.integer("ffn_dim", default=4 * params["hidden"])
    params["dropout"] = config.fraction("dropout", default=0.1)
    embedded = config.integer("word_embed_proj_dim", default=params["hidden"])
    first = config.flag("do_layer_norm_before", True)
    affine = config.flag("layer_norm_elementwise_affine", True)
    norm: ModelFileEntry = "layer_norm" if affine else {"layer_norm": {"affine": False}}
    bias = config.flag("enable_bias", True)
    feed = plain_feed_forward(config, "relu", "activation_function", bias=bias)
    positions: ModelFileEntry = {"position_embedding": {"positions": "=max(positions, seq) + 2"}}
    narrow = embedded != params["hidden"]
    widths = ("=hidden", "=embedded")
    widen, shrink = ({"linear": {"features": width, "dim": "hidden", "bias": False}} for width in widths)
    params |= {"embedded": embedded} if narrow else {}
    last_norm = first and not config.flag("_remove_final_layer_norm")
    decoder = Decoder(
        params, norm, attention_options(params, bias=bias, dropout=config.fraction("attention_dropout")),
        "pre" if first else "post", entries_after_embedding=[widen, positions] if narrow else [positions],
        final_entries=([norm] if last_norm else []) + ([shrink] if narrow else []), tied=True,
        embedding_width="=embedded" if narrow else "=hidden",
    )  # fmt: skip
    return language_model_file(config, decoder, [feed] * params["layers"])


@FAMILY_READERS.register("bloom")
def bloom(config: Config) -> ModelMapping:
    """Return the network of a BLOOM configuration (BigScience, 2022): ALiBi, and a norm after the embedding."""
    params = base_parameters(config) | {"ffn": 4 * config.integer("hidden_size", "n_embed")}
    params |= _dropout(config, "hidden_dropout")
    attention = attention_options(params, dropout=config.fraction("attention_dropout"))
    decoder = Decoder(
        params, "layer_norm", attention, entries_after_embedding=("layer_norm",), tied=True,
        notes="The linear biases of ALiBi ride on the scores.",
    )  # fmt: skip
    return language_model_file(config, decoder, [{"mlp": {"ffn": "=ffn", "activation": "gelu"}}] * params["layers"])


@FAMILY_READERS.register("falcon")
def falcon(config: Config) -> ModelMapping:
    """Return the network that a Falcon configuration describes (Almazrouei et al., 2023).

    Falcon has multi-query or grouped-query attention, in parallel with the feed-forward block.
    """
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn", True)
    heads = config.integer("num_attention_heads", "n_head")
    old_kv_heads = 1 if config.flag("multi_query", True) else heads
    kv_heads = config.integer("num_kv_heads", default=heads) if new else old_kv_heads
    params = base_parameters(config, kv_heads=kv_heads)
    params["ffn"] = config.integer("ffn_hidden_size", default=4 * params["hidden"])
    bias = config.flag("bias")
    feed = plain_feed_forward(config, "gelu", "activation", bias=bias)
    rotary = not config.flag("alibi")
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    residual = "pre" if not parallel and not new else "twin" if new and norms == 2 else "parallel"
    attention = attention_options(params, rotary=rotary, bias=bias, dropout=config.fraction("attention_dropout"))
    decoder = Decoder(params, "layer_norm", attention, residual, tied=True)
    return language_model_file(config, decoder, [feed] * params["layers"])


@FAMILY_READERS.register("starcoder2")
def starcoder2(config: Config) -> ModelMapping:
    """Return the network that a StarCoder 2 configuration describes (Lozhkov et al., 2024).

    StarCoder 2 has grouped-query attention, layer norms, feed-forward blocks without a gate, and sliding windows.
    """
    params: dict[str, Any] = grouped_query_parameters(config)
    params |= config.integers(ffn="intermediate_size") | _dropout(config, "residual_dropout")
    bias = config.flag("use_bias", True)
    feed = plain_feed_forward(config, "gelu_pytorch_tanh", bias=bias)
    slides = window_options(config, params, default=True)
    attention = attention_options(params, rotary=True, bias=bias, dropout=config.fraction("attention_dropout"))
    decoder = Decoder(params, "layer_norm", attention, tied=True)
    return language_model_file(config, decoder, [feed] * params["layers"], slides)
