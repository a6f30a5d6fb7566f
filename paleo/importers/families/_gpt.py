"""Readers of decoders with layer norms and plain feed-forward blocks."""

from __future__ import annotations

from dataclasses import replace
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
    with_vocab_last,
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
    params = grouped_query_parameters(config) | {
        "ffn": config.integer("intermediate_size", default=4 * config.integer("hidden_size"))
    }
    if config.flag("qk_layernorm"):
        raise SpecError(f"{config.path}: qk_layernorm: true is not supported; expected false")
    feed = plain_feed_forward(config, "gelu_new")
    attention = attention_options(params, rotary=True)
    decoder = Decoder(
        with_vocab_last(params),
        "layer_norm",
        attention,
        feed,
        "parallel",
        final_entries=("layer_norm",),
        head_bias=True,
        ties_embeddings=config.flag("tie_word_embeddings"),
    )
    return language_model_file(config, decoder, [({}, feed)] * params["layers"])


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
    decoder = Decoder(
        with_vocab_last(params),
        "layer_norm",
        attention,
        feed,
        dropout=True,
        final_entries=("layer_norm",),
        entries_after_embedding=(positions, {"dropout": {"rate": config.fraction("embd_pdrop", default=0.1)}}),
        ties_embeddings=config.flag("tie_word_embeddings", True),
    )
    return language_model_file(config, decoder, [({}, feed)] * params["layers"])


@FAMILY_READERS.register("gpt_neox")
def gpt_neox(config: Config) -> ModelMapping:
    """Return the network that a GPT-NeoX configuration describes (Black et al., GPT-NeoX-20B, 2022).

    Attention and feed-forward block run in parallel on the same input, each behind its own layer norm.
    """
    params = base_parameters(config) | {"ffn": config.integer("intermediate_size")}
    dropout = config.fraction("hidden_dropout")
    params |= {"dropout": dropout} if dropout else {}
    feed = plain_feed_forward(config, "gelu")
    attention = attention_options(
        params, rotary=True, bias=config.flag("attention_bias", True), dropout=config.fraction("attention_dropout")
    )
    residual = "twin" if config.flag("use_parallel_residual", True) else "pre"
    decoder = Decoder(
        with_vocab_last(params),
        "layer_norm",
        attention,
        feed,
        residual,
        final_entries=("layer_norm",),
        dropout=bool(dropout),
        ties_embeddings=config.flag("tie_word_embeddings"),
    )
    return language_model_file(config, decoder, [({}, feed)] * params["layers"])


@FAMILY_READERS.register("opt")
def opt(config: Config) -> ModelMapping:
    """Return the network that an OPT configuration describes (Zhang et al., 2022).

    The position table has two more rows than there are positions. The 350M model has a narrower embedding, and norms
    after each half of a layer.
    """
    params = base_parameters(config, positions=config.integer("max_position_embeddings", default=2048))
    params |= {
        "ffn": config.integer("ffn_dim", default=4 * params["hidden"]),
        "dropout": config.fraction("dropout", default=0.1),
    }
    embedded = config.integer("word_embed_proj_dim", default=params["hidden"])
    first = config.flag("do_layer_norm_before", True)
    norm: ModelFileEntry = "layer_norm"
    if not config.flag("layer_norm_elementwise_affine", True):
        norm = {"layer_norm": {"affine": False}}
    bias = config.flag("enable_bias", True)
    feed = plain_feed_forward(config, "relu", "activation_function", bias=bias)
    positions: ModelFileEntry = {"position_embedding": {"positions": "=max(positions, seq) + 2"}}
    narrow = embedded != params["hidden"]
    widths = ("=hidden", "=embedded")
    widen, shrink = ({"linear": {"features": width, "dim": "hidden", "bias": False}} for width in widths)
    params |= {"embedded": embedded} if narrow else {}
    decoder = Decoder(
        with_vocab_last(params),
        norm,
        attention_options(params, bias=bias, dropout=config.fraction("attention_dropout")),
        feed,
        "pre" if first else "post",
        dropout=True,
        entries_after_embedding=(*([widen] if narrow else []), positions),
        final_entries=(
            *([norm] if first and not config.flag("_remove_final_layer_norm") else []),
            *([shrink] if narrow else []),
        ),
        ties_embeddings=config.flag("tie_word_embeddings", True),
        embedding_width="=embedded" if narrow else "=hidden",
    )
    return language_model_file(config, decoder, [({}, feed)] * params["layers"])


@FAMILY_READERS.register("bloom")
def bloom(config: Config) -> ModelMapping:
    """Return the network of a BLOOM configuration (BigScience, 2022): ALiBi, and a norm after the embedding."""
    params = base_parameters(config) | {"ffn": 4 * config.integer("hidden_size", "n_embed")}
    dropout = config.fraction("hidden_dropout")
    params |= {"dropout": dropout} if dropout else {}
    feed: ModelFileEntry = {"mlp": {"ffn": "=ffn", "activation": "gelu"}}
    decoder = Decoder(
        with_vocab_last(params),
        "layer_norm",
        attention_options(params, dropout=config.fraction("attention_dropout")),
        feed,
        entries_after_embedding=("layer_norm",),
        final_entries=("layer_norm",),
        dropout=bool(dropout),
        ties_embeddings=config.flag("tie_word_embeddings", True),
        notes="The linear biases of ALiBi ride on the scores.",
    )
    return language_model_file(config, decoder, [({}, feed)] * params["layers"])


@FAMILY_READERS.register("falcon")
def falcon(config: Config) -> ModelMapping:
    """Return the network that a Falcon configuration describes (Almazrouei et al., 2023).

    Falcon has multi-query or grouped-query attention, in parallel with the feed-forward block.
    """
    new, parallel = config.flag("new_decoder_architecture"), config.flag("parallel_attn", True)
    heads = config.integer("num_attention_heads", "n_head")
    kv_heads = (
        config.integer("num_kv_heads", default=heads) if new else 1 if config.flag("multi_query", True) else heads
    )
    params = base_parameters(config, kv_heads=kv_heads)
    params["ffn"] = config.integer("ffn_hidden_size", default=4 * params["hidden"])
    bias = config.flag("bias")
    feed = plain_feed_forward(config, "gelu", "activation", bias=bias)
    rotary = not config.flag("alibi")
    norms = config.get("num_ln_in_parallel_attn") or (2 if new else 1)
    residual = "pre" if not parallel and not new else "twin" if new and norms == 2 else "parallel"
    attention = attention_options(params, rotary=rotary, bias=bias, dropout=config.fraction("attention_dropout"))
    decoder = Decoder(
        with_vocab_last(params),
        "layer_norm",
        attention,
        feed,
        residual,
        final_entries=("layer_norm",),
        ties_embeddings=config.flag("tie_word_embeddings", True),
    )
    return language_model_file(config, decoder, [({}, feed)] * params["layers"])


@FAMILY_READERS.register("starcoder2")
def starcoder2(config: Config) -> ModelMapping:
    """Return the network that a StarCoder 2 configuration describes (Lozhkov et al., 2024).

    StarCoder 2 has grouped-query attention, layer norms, feed-forward blocks without a gate, and sliding windows.
    """
    params: dict[str, Any] = grouped_query_parameters(config)
    params |= {"ffn": config.integer("intermediate_size")}
    dropout = config.fraction("residual_dropout")
    params |= {"dropout": dropout} if dropout else {}
    bias = config.flag("use_bias", True)
    feed: ModelFileEntry = plain_feed_forward(config, "gelu_pytorch_tanh", bias=bias)
    slides = window_options(config, params, default=True)
    attention = attention_options(params, rotary=True, bias=bias, dropout=config.fraction("attention_dropout"))
    tied = config.flag("tie_word_embeddings", True)
    decoder = Decoder(
        params,
        "layer_norm",
        attention,
        feed,
        dropout=bool(dropout),
        final_entries=("layer_norm",),
        ties_embeddings=tied,
    )
    decoder = replace(decoder, params=with_vocab_last(params))
    return language_model_file(config, decoder, [(options, feed) for options in slides])
