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
    fold_repeats,
    gated_feed_forward,
    grouped_query_parameters,
    language_model_file,
    with_vocab_last,
)
from paleo.importers.transformers_configuration import FAMILY_READERS, Config, ModelFileEntry, ModelMapping

#: Default score functions of routers.
ROUTER_SCORE_FUNCTIONS = {"deepseek_v3": "sigmoid", "kimi_k2": "sigmoid"}


def latent_attention_options(config: Config) -> dict[str, Any]:
    """Return the options of a ``latent_attention`` entry (heads, ranks, head sizes) from a DeepSeek configuration."""
    mla: dict[str, Any] = {"heads": "=heads"}
    if config.get("q_lora_rank") is not None:
        mla["query_rank"] = config.integer("q_lora_rank")
    keys = {
        "kv_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
    }
    return mla | {option: config.integer(key) for option, key in keys.items()}


@FAMILY_READERS.register("deepseek_v2")
def deepseek_v2(config: Config) -> ModelMapping:
    """Return the network that a DeepSeek-V2 or V3 configuration describes (DeepSeek-AI, 2024).

    Latent attention; dense layers first, then mixtures of shared and routed experts.
    """
    return latent_attention_model(config)


def latent_attention_model(
    config: Config, kind: str = "latent_attention", more: Sequence[Mapping[str, Any]] | None = None
) -> ModelMapping:
    """Return a DeepSeek-like network with latent attention, shared and routed experts.

    ``kind`` is the layer type of its attention, and ``more`` holds further options of the attention for each layer.
    """
    shared = config.get("n_shared_experts")
    params, mla = base_parameters(config), latent_attention_options(config)
    mixture: dict[str, Any] = {"shared": config.integer("n_shared_experts")} if shared else {}
    if config.get("n_group") is not None:
        mixture["groups"] = config.integer("n_group")
    if config.get("scoring_func", ROUTER_SCORE_FUNCTIONS.get(str(config.get("model_type")))) == "sigmoid":
        mixture["scores"] = "sigmoid"
    feeds = feed_forward_layers(config, params, **mixture)
    notes = "Modules for multi-token prediction and the load-balancing bias of the router (not trained) are left out."
    decoder = Decoder(
        with_vocab_last(params),
        "rms_norm",
        mla,
        None,
        final_entries=("rms_norm",),
        ties_embeddings=config.flag("tie_word_embeddings"),
        attention_kind=kind,
        notes=notes,
    )
    return language_model_file(config, decoder, list(zip(more or [{}] * len(feeds), feeds, strict=True)))


FAMILY_READERS.register("deepseek_v3")(deepseek_v2)
#: Kimi K2 has the layers of DeepSeek-V3 with other sizes (Moonshot AI, 2025).
FAMILY_READERS.register("kimi_k2")(deepseek_v2)


@FAMILY_READERS.register("deepseek_v32")
def deepseek_v32(config: Config) -> ModelMapping:
    """Return the network of a DeepSeek-V3.2 or GLM-5 configuration, whose attention keys an indexer selects.

    Layers that ``indexer_types`` calls shared use the selection of the layer before. References: DeepSeek-AI,
    DeepSeek-V3.2, 2025; GLM-5 Team, GLM-5, 2026.
    """
    index = {
        "index_heads": config.integer("index_n_heads"),
        "index_dim": config.integer("index_head_dim"),
        "top_k": config.integer("index_topk"),
    }
    layers = config.integer("num_hidden_layers")
    kinds = config.layer_kinds("indexer_types", layers) or ["full"] * layers
    more = [index if kind == "full" else index | {"shares_index": True} for kind in kinds]
    return latent_attention_model(config, kind="sparse_latent_attention", more=more)


FAMILY_READERS.register("glm_moe_dsa")(deepseek_v32)


@FAMILY_READERS.register("deepseek_v4")
def deepseek_v4(config: Config) -> ModelMapping:
    """Return the network that a DeepSeek-V4 configuration describes.

    The network has sliding windows, compressed keys (some selected by an indexer), and four residual streams.

    Reference: DeepSeek-AI, DeepSeek-V4, 2026.
    """
    params = base_parameters(config) | {"streams": config.integer("hc_mult", default=4)}
    window = config.integer("sliding_window")
    attention = {
        "heads": "=heads",
        "head_dim": config.integer("head_dim"),
        "query_rank": config.integer("q_lora_rank"),
        "window": window,
        "out_groups": config.integer("o_groups"),
        "out_rank": config.integer("o_lora_rank"),
    }
    chosen = {"overlap": True, "top_k": config.integer("index_topk")}
    chosen |= {"index_heads": config.integer("index_n_heads"), "index_dim": config.integer("index_head_dim")}
    rates = config.get("compress_rates") or {}
    kinds = config.layer_kinds("layer_types", params["layers"]) or []
    ratios = (config.list_value("compress_ratios") or [rates.get(kind, 0) for kind in kinds])[: params["layers"]]
    if len(ratios) < params["layers"] or not set(ratios) <= {0, 4, 128}:
        raise SpecError(f"{config.path}: compress_ratios: expected 0, 4 or 128 for each of {params['layers']} layers")
    mixers = [attention | ({"ratio": ratio} if ratio else {}) | (chosen if ratio == 4 else {}) for ratio in ratios]
    mixture = feed_forward_layers(
        config, params, in_all_layers=True, shared=config.integer("n_shared_experts", default=1), scores="sigmoid",
        activation="clamped_swiglu",
    )[0]  # fmt: skip
    loops = [
        {
            "repeat": times,
            "name": f"block{number}",
            "layers": [entry for place, mixer in enumerate(pattern) for entry in _streamed(mixer, mixture, place)],
        }
        for number, (pattern, times) in enumerate(fold_repeats(mixers), start=1)
    ]
    ends = {"hyper_read": {"mixes": False}}
    decoder = Decoder(
        with_vocab_last(params), "rms_norm", {}, None,
        entries_after_embedding=({"hyper_split": {"streams": "=streams"}}, *loops, ends),
        final_entries=("rms_norm",), ties_embeddings=config.flag("tie_word_embeddings"),
        notes="Modules for multi-token prediction are left out. Compressed keys count as seen by all queries.",
    )  # fmt: skip
    return language_model_file(config, decoder, [])


def _streamed(mixer: Mapping[str, Any], mixture: ModelFileEntry, place: int) -> list[ModelFileEntry]:
    """Return the model-file entries of one layer with hyper-connections (several residual streams).

    ``mixer`` is the attention entry, ``mixture`` the feed-forward entry; ``place`` is the number that makes names
    unique.
    """
    streams, attended, middle, mixed = (f"{word}{place}" for word in ("streams", "attended", "middle", "mixed"))
    (kind, options), *_ = mixture.items()
    return [
        {"name": streams, "identity": {}},
        "hyper_read",
        "rms_norm",
        {"name": attended, "compressed_attention": dict(mixer)},
        {"name": middle, "inputs": [attended, streams], "hyper_write": {}},
        "hyper_read",
        "rms_norm",
        {"name": mixed, kind: options},
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
    sparse = Config({**config, **(config.get("sparse_attention_config") or {})}, config.path)
    frequency = sparse.is_layer_of_kind("sparse_attention_freq", "layer_types", "minimax_m3_sparse", layers)
    mixed = config.is_layer_of_kind("moe_layer_freq", "mlp_layer_types", "sparse", layers)
    attention = attention_options(params, rotary=True, qk_norm=True, bias=False)
    index = {
        "index_heads": sparse.integer("sparse_num_index_heads", "index_n_heads"),
        "index_dim": sparse.integer("sparse_index_dim", "index_head_dim"),
        "block": sparse.integer("sparse_block_size", "index_block_size"),
        "top_k": sparse.integer("sparse_topk_blocks", "index_topk_blocks"),
    }
    shared = config.integer("n_shared_experts", default=1)
    mixture = feed_forward_layers(
        config, params, in_all_layers=True, shared=shared, scores="sigmoid", activation="clamped_swiglu",
        ffn=("moe_intermediate_size", "intermediate_size"),
        shared_ffn=config.integer("shared_intermediate_size", "moe_intermediate_size"),
    )[0]  # fmt: skip
    words = {**config, "intermediate_size": config.integer("dense_intermediate_size", "intermediate_size")}
    dense = gated_feed_forward(Config(words, config.path), params) if not all(mixed) else None
    decoder = Decoder(
        with_vocab_last(params), "rms_norm", attention, None, final_entries=("rms_norm",),
        ties_embeddings=config.flag("tie_word_embeddings"),
        notes="Modules for multi-token prediction are left out.",
    )  # fmt: skip
    mixers = [{"mixer": {"sparse_attention": attention | index}} if chosen else {} for chosen in frequency]
    feeds = [mixture if is_mixture else dense for is_mixture in mixed]
    return language_model_file(config, decoder, list(zip(mixers, feeds, strict=True)))


FAMILY_READERS.register("minimax_m3_vl_text")(minimax_m3)
