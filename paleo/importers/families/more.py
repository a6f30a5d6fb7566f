"""Decoders that differ from Llama in a norm, a bias or a multiplier."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from paleo.importers.configuration import FAMILIES, UnreadHeadError
from paleo.importers.decoder import (
    Decoder,
    attention_options,
    grouped_parameters,
    language_model,
    llama_like,
    plain_feed,
    vocab_last,
    windows,
)  # fmt: skip

if TYPE_CHECKING:
    from paleo.importers.configuration import Config, Entry, Model


@FAMILIES.register("smollm3")
def smollm3(config: Config) -> Model:
    """SmolLM3, 2025: as Llama; some layers have no rotary positions, which costs next to nothing."""
    bias = config.flag("attention_bias")
    return llama_like(config, bias=bias, out_bias=bias, tied=True)


@FAMILIES.register("granite")
def granite(config: Config) -> Model:
    """Granite 3, 2024: as Llama, with multipliers of embeddings, residuals, scores and logits that are left out."""
    bias = config.flag("attention_bias")
    return llama_like(config, bias=bias, out_bias=bias, notes="Multipliers of residuals and logits are left out.")


@FAMILIES.register("glm")
def glm(config: Config) -> Model:
    """GLM-4, 2024: biases of query, key and value."""
    return llama_like(config, bias=config.flag("attention_bias"), out_bias=False, head_dim=128)


@FAMILIES.register("olmo")
def olmo(config: Config) -> Model:
    """Groeneveld et al., OLMo, 2024: layer norms that learn nothing."""
    bias = config.flag("attention_bias")
    return llama_like(config, bias=bias, out_bias=bias, norm={"layer_norm": {"affine": False}})


@FAMILIES.register("cohere")
def cohere(config: Config) -> Model:
    """Command R, 2024: both halves side by side behind a layer norm without a bias, tied embeddings."""
    if config.flag("use_qk_norm"):
        raise UnreadHeadError("use_qk_norm")
    bias = config.flag("attention_bias")
    norm = {"layer_norm": {"bias": False}}
    return llama_like(config, bias=bias, out_bias=bias, tied=True, norm=norm, residual="parallel")


@FAMILIES.register("starcoder2")
def starcoder2(config: Config) -> Model:
    """Lozhkov et al., StarCoder 2, 2024: grouped queries, layer norms, plain feed-forward blocks, windows."""
    params: dict[str, Any] = grouped_parameters(config)
    params |= {"ffn": config.integer("intermediate_size")}
    dropout = config.share("residual_dropout")
    params |= {"dropout": dropout} if dropout else {}
    bias = config.flag("use_bias", True)
    feed: Entry = plain_feed(config, "gelu_pytorch_tanh", bias=bias)
    slides = windows(config, params, default=True)
    attention = attention_options(params, rotary=True, bias=bias, dropout=config.share("attention_dropout"))
    tied = config.flag("tie_word_embeddings", True)
    decoder = Decoder(params, "layer_norm", attention, feed, dropout=bool(dropout), final=("layer_norm",), tied=tied)
    decoder = replace(decoder, params=vocab_last(params))
    return language_model(config, decoder, [(options, feed) for options in slides])
