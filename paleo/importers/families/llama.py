"""Decoders with RMS norms, rotary positions and gated feed-forward blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paleo.importers.configuration import FAMILIES
from paleo.importers.decoder import gated_feed, llama_like

if TYPE_CHECKING:
    from paleo.importers.configuration import Config, Entry, Model


@FAMILIES.register("llama")
def llama(config: Config) -> Model:
    """Touvron et al., 2023."""
    bias = config.flag("attention_bias")
    return llama_like(config, bias=bias, out_bias=bias)


@FAMILIES.register("mistral")
def mistral(config: Config) -> Model:
    """Jiang et al., Mistral 7B, 2023: a window on every layer, where the configuration has one."""
    return llama_like(config, bias=False, slides=True)


@FAMILIES.register("qwen2")
def qwen2(config: Config) -> Model:
    """Qwen2, 2024: biases of query, key and value only."""
    return llama_like(config, bias=True, out_bias=False)


@FAMILIES.register("qwen3")
def qwen3(config: Config) -> Model:
    """Qwen3, 2025: norms of queries and keys."""
    return llama_like(config, head_dim=128, attention={"qk_norm": True})


@FAMILIES.register("gemma")
def gemma(config: Config) -> Model:
    """Gemma, 2024: GELU gates, heads of 256, tied embeddings."""
    return llama_like(config, tied=True, head_dim=256, feed=gelu_gates)


def gelu_gates(config: Config, params: dict[str, Any]) -> list[Entry]:
    """Gated blocks in every layer, with GELU where nothing else is said."""
    return [gated_feed(config, params, default="gelu_pytorch_tanh")] * params["layers"]


@FAMILIES.register("gemma2")
def gemma2(config: Config) -> Model:
    """Gemma 2, 2024: norms before and after each half, windows on every other layer; the soft caps of scores are
    not counted."""
    alternate = [index % 2 == 0 for index in range(config.integer("num_hidden_layers"))]
    notes = "The soft cap of scores and logits is left out."
    return llama_like(
        config, tied=True, head_dim=256, feed=gelu_gates, residual="sandwich", slides=alternate, notes=notes
    )


@FAMILIES.register("gemma3_text")
def gemma3(config: Config) -> Model:
    """Gemma 3, 2025: five layers with a window, then one without."""
    period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
    slides = [(index + 1) % period != 0 for index in range(config.integer("num_hidden_layers"))]
    extra = {"qk_norm": True}
    return llama_like(
        config, tied=True, head_dim=256, feed=gelu_gates, residual="sandwich", slides=slides, attention=extra
    )


@FAMILIES.register("phi3")
def phi3(config: Config) -> Model:
    """Phi-3, 2024: as Llama."""
    return llama_like(config, bias=False, slides=True)
