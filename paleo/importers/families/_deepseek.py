"""Readers of decoders with latent attention (DeepSeek), with keys that an indexer selects, or with compressed keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from paleo.errors import SpecError
from paleo.importers._decoder import (
    Decoder,
    attention_options,
    base_parameters,
    feed_forward_layers,
    gated_feed_forward,
    grouped_query_parameters,
    language_model_file,
    loops_of_layers,
    mixture_entry,
)
from paleo.importers.transformers_configuration import FAMILY_READERS, Config, ModelFileEntry, ModelMapping

#: Default score functions of routers.
_ROUTER_SCORE_FUNCTIONS = {"deepseek_v3": "sigmoid", "kimi_k2": "sigmoid"}


def latent_attention_options(config: Config) -> dict[str, Any]:
    """Return the options of a ``latent_attention`` entry (heads, ranks, head sizes) from a DeepSeek configuration."""
    ranks = {"query_rank": config.integer("q_lora_rank")} if config.get("q_lora_rank") is not None else {}
    return {"heads": "=heads", **ranks} | config.integers(
        kv_rank="kv_lora_rank", nope_dim="qk_nope_head_dim", rope_dim="qk_rope_head_dim", value_dim="v_head_dim"
    )


@FAMILY_READERS.register("deepseek_v2")
def deepseek_v2(config: Config) -> ModelMapping:
    """Return the network that a DeepSeek-V2 or V3 configuration describes (DeepSeek-AI, 2024).

    Latent attention; dense layers first, then mixtures of shared and routed experts.
    """
    return _latent_attention_model(config)


def _latent_attention_model(
    config: Config, kind: str = "latent_attention", more: Sequence[Mapping[str, Any]] | None = None
) -> ModelMapping:
    """Return a DeepSeek-like network with latent attention, shared and routed experts.

    ``kind`` is the layer type of its attention, and ``more`` holds further options of the attention for each layer.
    """
    params, mla = base_parameters(config), latent_attention_options(config)
    mixture: dict[str, Any] = config.integers(shared="n_shared_experts") if config.get("n_shared_experts") else {}
    if config.get("n_group") is not None:
        mixture["groups"] = config.integer("n_group")
    if config.get("scoring_func", _ROUTER_SCORE_FUNCTIONS.get(str(config.get("model_type")))) == "sigmoid":
        mixture["scores"] = "sigmoid"
    feeds = feed_forward_layers(config, params, **mixture)
    notes = "Modules for multi-token prediction and the load-balancing bias of the router (not trained) are left out."
    return language_model_file(config, Decoder(params, attention=mla, attention_kind=kind, notes=notes), feeds, more)


FAMILY_READERS.register("deepseek_v3")(deepseek_v2)
#: Kimi K2 has the layers of DeepSeek-V3 with other sizes (Moonshot AI, 2025).
FAMILY_READERS.register("kimi_k2")(deepseek_v2)


@FAMILY_READERS.register("deepseek_v32")
def deepseek_v32(config: Config) -> ModelMapping:
    """Return the network of a DeepSeek-V3.2 or GLM-5 configuration, whose attention keys an indexer selects.

    Layers that ``indexer_types`` calls shared use the selection of the layer before. References: DeepSeek-AI,
    DeepSeek-V3.2, 2025; GLM-5 Team, GLM-5, 2026.
    """
    index = config.integers(index_heads="index_n_heads", index_dim="index_head_dim", top_k="index_topk")
    layers = config.integer("num_hidden_layers")
    kinds = config.layer_kinds("indexer_types", layers) or ["full"] * layers
    more: list[dict[str, Any]] = [index | ({} if kind == "full" else {"shares_index": True}) for kind in kinds]
    return _latent_attention_model(config, kind="sparse_latent_attention", more=more)


FAMILY_READERS.register("glm_moe_dsa")(deepseek_v32)


@FAMILY_READERS.register("deepseek_v4")
def deepseek_v4(config: Config) -> ModelMapping:
    """Return the network that a DeepSeek-V4 configuration describes.

    The network has sliding windows, compressed keys (some selected by an indexer), and four residual streams.

    Reference: DeepSeek-AI, DeepSeek-V4, 2026.
    """
    params = base_parameters(config) | {"streams": config.integer("hc_mult", default=4)}
    attention = {"heads": "=heads"} | config.integers(
        head_dim="head_dim", query_rank="q_lora_rank", window="sliding_window", out_groups="o_groups",
        out_rank="o_lora_rank",
    )  # fmt: skip
    chosen = {"overlap": True} | config.integers(
        top_k="index_topk", index_heads="index_n_heads", index_dim="index_head_dim"
    )
    rates = config.get("compress_rates") or {}
    kinds = config.layer_kinds("layer_types", params["layers"]) or []
    ratios = (config.list_value("compress_ratios") or [rates.get(kind, 0) for kind in kinds])[: params["layers"]]
    if len(ratios) < params["layers"] or not set(ratios) <= {0, 4, 128}:
        raise SpecError(f"{config.path}: compress_ratios: expected 0, 4 or 128 for each of {params['layers']} layers")
    mixers = [attention | ({"ratio": ratio} if ratio else {}) | (chosen if ratio == 4 else {}) for ratio in ratios]
    shared = config.integer("n_shared_experts", default=1)
    mixture = mixture_entry(config, params, activation="clamped_swiglu", shared=shared, scores="sigmoid")
    loops = loops_of_layers(
        mixers,
        lambda pattern: [entry for place, mixer in enumerate(pattern) for entry in _streamed(mixer, mixture, place)],
    )
    entries = ({"hyper_split": {"streams": "=streams"}}, *loops, {"hyper_read": {"mixes": False}})
    notes = "Modules for multi-token prediction are left out. Compressed keys count as seen by all queries."
    return language_model_file(config, Decoder(params, entries_after_embedding=entries, notes=notes))


def _streamed(mixer: Mapping[str, Any], mixture: ModelFileEntry, place: int) -> list[ModelFileEntry]:
    """Return the model-file entries of one layer with hyper-connections (several residual streams).

    ``mixer`` is the attention entry, ``mixture`` the feed-forward entry; ``place`` is the number that makes names
    unique.
    """
    streams, attended, middle, mixed = (f"{word}{place}" for word in ("streams", "attended", "middle", "mixed"))
    return [
        {"name": streams, "identity": {}},
        "hyper_read",
        "rms_norm",
        {"name": attended, "compressed_attention": dict(mixer)},
        {"name": middle, "inputs": [attended, streams], "hyper_write": {}},
        "hyper_read",
        "rms_norm",
        {"name": mixed, **mixture},
        {"inputs": [mixed, middle], "hyper_write": {}},
    ]


FAMILY_READERS.register("deepseek_ref")(deepseek_v4)


@FAMILY_READERS.register("minimax_m3")
def minimax_m3(config: Config) -> ModelMapping:
    """Return the network that a MiniMax M3 configuration describes (2026).

    Dense layers come first, then attention to selected blocks of keys, and mixtures of experts.
    """
    params = grouped_query_parameters(config, 128)
    layers = params["layers"]
    sparse = config.replaced(**(config.get("sparse_attention_config") or {}))
    frequency = sparse.is_layer_of_kind("sparse_attention_freq", "layer_types", "minimax_m3_sparse", layers)
    mixed = config.is_layer_of_kind("moe_layer_freq", "mlp_layer_types", "sparse", layers)
    attention = attention_options(params, rotary=True, qk_norm=True, bias=False)
    index = sparse.integers(
        index_heads="sparse_num_index_heads index_n_heads", index_dim="sparse_index_dim index_head_dim",
        block="sparse_block_size index_block_size", top_k="sparse_topk_blocks index_topk_blocks",
    )  # fmt: skip
    mixture = mixture_entry(
        config, params, ffn="moe_intermediate_size intermediate_size", activation="clamped_swiglu",
        shared=config.integer("n_shared_experts", default=1), scores="sigmoid",
        **config.integers(shared_ffn="shared_intermediate_size moe_intermediate_size"),
    )  # fmt: skip
    dense_ffn = config.integer("dense_intermediate_size", "intermediate_size")
    dense = None if all(mixed) else gated_feed_forward(config.replaced(intermediate_size=dense_ffn), params)
    decoder = Decoder(params, attention=attention, notes="Modules for multi-token prediction are left out.")
    mixers = [{"mixer": {"sparse_attention": attention | index}} if chosen else {} for chosen in frequency]
    return language_model_file(config, decoder, [mixture if is_mixture else dense for is_mixture in mixed], mixers)


FAMILY_READERS.register("minimax_m3_vl_text")(minimax_m3)
