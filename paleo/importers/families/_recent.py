"""Readers of decoders of 2025 and 2026 whose layers differ in heads, windows or feed-forward blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paleo.importers._decoder import (
    Decoder,
    attention_options,
    experts,
    folded,
    gated_feed,
    grouped_parameters,
    language_model,
    residual,
    vocab_last,
)
from paleo.importers.configuration import FAMILIES, Config, Entry, Model, UnreadHeadError
from paleo.importers.families._hybrids import with_tower


@FAMILIES.register("llama4_text")
def llama4(config: Config) -> Model:
    """Read the text model of Llama 4 (2025).

    Three layers with attention in chunks are followed by one without positions. Mixtures with one routed and one shared
    expert are in every layer or in every other one.
    """
    params = grouped_parameters(config)
    layers, step = params["layers"], config.integer("interleave_moe_layer_step", default=1)
    mixed = config.listed("moe_layers") or [index for index in range(layers) if (index + 1) % step == 0]
    mixture = experts(
        config, params, in_all_layers=True, ffn=("intermediate_size",), shared=1, scores="sigmoid"
    )[0]  # fmt: skip
    dense: Entry = None
    if len(mixed) < layers:
        words = {**config, "intermediate_size": config.integer("intermediate_size_mlp")}
        dense = gated_feed(Config(words, config.path), params)
    every = config.integer("no_rope_layer_interval", default=4)
    chunk = {"window": config.integer("attention_chunk_size", default=8192)}
    attention = attention_options(params, rotary=True, bias=config.flag("attention_bias"))
    decoder = Decoder(
        vocab_last(params), "rms_norm", attention, None, final=("rms_norm",), tied=config.flag("tie_word_embeddings"),
        notes="Chunks of attention count as windows; norms of queries without weights are left out.",
    )  # fmt: skip
    mixers: list[Mapping[str, Any]] = [{} if (index + 1) % every == 0 else chunk for index in range(layers)]
    feeds = [mixture if index in mixed else dense for index in range(layers)]
    return language_model(config, decoder, list(zip(mixers, feeds, strict=True)))


@FAMILIES.register("llama4")
def llama4_seeing(config: Config) -> Model:
    """Read the text model of Llama 4; its vision tower is left out, as configurations may not state it."""
    model = llama4(config.part("text_config"))
    return model | {"notes": f"{model['notes']} The vision tower is left out."}


@FAMILIES.register("gemma4_text")
def gemma4(config: Config) -> Model:
    """Read the text model of Gemma 4 (2026).

    Five layers with a window are followed by one with wider heads, whose values are its keys. A dense block and a
    mixture are side by side. Networks with embeddings for each layer, or with layers that share keys, are traced.
    """
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if config.get(key):
            raise UnreadHeadError(key)
    params = grouped_parameters(config, 256)
    layers = params["layers"]
    params["window"] = config.integer("sliding_window")
    kinds = config.kinds("layer_types", layers)
    if kinds is None:
        kinds = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(layers)]
    attention = attention_options(params, rotary=True, qk_norm=True, bias=False)
    wide = attention | {"head_dim": config.integer("global_head_dim", default=512)}
    wide |= {"kv_heads": config.integer("num_global_key_value_heads", "num_key_value_heads")}
    wide |= {"shared_value": True} if config.flag("attention_k_eq_v") else {}
    dense = gated_feed(config, params, default="gelu_pytorch_tanh")
    halves: list[Entry] = ["rms_norm", dense, "rms_norm"]
    if config.flag("enable_moe_block"):
        words = {**config, "num_experts_per_tok": config.integer("top_k_experts"), "hidden_act": "gelu_pytorch_tanh"}
        mixture = experts(Config(words, config.path), params, in_all_layers=True)[0]
        scales = {"learned": {"parameters": f"={params['hidden']} + {params['experts']}", "of": "scales of the router"}}
        first: list[Entry] = ["rms_norm", dense, "rms_norm"]
        halves = [{"branches": [first, ["rms_norm", mixture, "rms_norm"]], "join": "add"}, "rms_norm", scales]
    blocks = [
        [residual("rms_norm", {"attention": wide if kind == "full_attention" else attention | {"window": "=window"}},
                  "rms_norm"), residual(*halves)]
        for kind in kinds
    ]  # fmt: skip
    loops = [
        {"repeat": times, "name": f"block{number}", "layers": [entry for entries in pattern for entry in entries]}
        for number, (pattern, times) in enumerate(folded(blocks), start=1)
    ]
    decoder = Decoder(
        vocab_last(params), "rms_norm", {}, None, final=(*loops, "rms_norm"),
        tied=config.flag("tie_word_embeddings", True),
        notes="The soft cap of logits is left out.",
    )  # fmt: skip
    return language_model(config, decoder, [])


@FAMILIES.register("gemma4")
def gemma4_seeing(config: Config) -> Model:
    """Read Gemma 4: its text model, and the parameters of its vision tower."""
    text = config.part("text_config")
    model = gemma4(Config({"tie_word_embeddings": config.flag("tie_word_embeddings", True), **text}, text.path))
    if config.get("vision_config") is None:
        return model
    vision = config.part("vision_config")
    hidden, ffn = vision.integer("hidden_size"), vision.integer("intermediate_size")
    block = 4 * hidden**2 + 3 * hidden * ffn + 4 * hidden + 2 * vision.integer("head_dim", default=72)
    patches = 3 * vision.integer("patch_size") ** 2 * hidden + 2 * vision.integer("position_embedding_size") * hidden
    tower = patches + vision.integer("num_hidden_layers") * block + hidden * text.integer("hidden_size")
    return with_tower(model, tower)


@FAMILIES.register("mimo_v2_flash")
def mimo_v2(config: Config) -> Model:
    """Read MiMo V2 Flash (2025): windowed layers with sinks and heads of their own, narrow values, mixtures."""
    params = grouped_parameters(config)
    layers = params["layers"]
    params["window"] = config.integer("sliding_window")
    pattern = config.marked("hybrid_layer_pattern", "layer_types", "sliding_attention", layers)
    mixed = config.marked("moe_layer_freq", "mlp_layer_types", "sparse", layers)
    full = {"value_dim": config.integer("v_head_dim", "head_dim")}
    full |= {"sinks": True} if config.flag("add_full_attention_sink_bias") else {}
    slide = {
        "heads": config.integer("swa_num_attention_heads", "num_attention_heads"),
        "kv_heads": config.integer("swa_num_key_value_heads", default=2 * params["kv_heads"]),
        "head_dim": config.integer("swa_head_dim", "head_dim"),
        "value_dim": config.integer("swa_v_head_dim", "v_head_dim"),
        "window": "=window",
    }
    slide |= {"sinks": True} if config.flag("add_swa_attention_sink_bias", True) else {}
    mixture = experts(config, params, in_all_layers=True, scores="sigmoid")[0]
    dense = gated_feed(config, params) if not all(mixed) else None
    attention = attention_options(params, rotary=True, bias=config.flag("attention_bias"))
    if attention["bias"]:
        attention["out_bias"] = False
    decoder = Decoder(
        vocab_last(params), "rms_norm", attention, None, final=("rms_norm",), tied=config.flag("tie_word_embeddings"),
        notes="Modules for multi-token prediction are left out.",
    )  # fmt: skip
    mixers = [slide if slides else full for slides in pattern]
    feeds = [mixture if is_mixture else dense for is_mixture in mixed]
    return language_model(config, decoder, list(zip(mixers, feeds, strict=True)))
