"""Readers of decoders whose layers differ in kind: linear attention, state spaces, latent attention, mixtures."""

from __future__ import annotations

from collections.abc import Mapping
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
    residual_block_entry,
    with_vocab_last,
)
from paleo.importers.families._deepseek import latent_attention_options
from paleo.importers.transformers_configuration import FAMILY_READERS, Config, ModelFileEntry, ModelMapping


@FAMILY_READERS.register("qwen3_next")
def qwen3_next(config: Config) -> ModelMapping:
    """Return the network that a Qwen3-Next configuration describes (2025).

    Three layers of gated delta nets are followed by one of gated attention; feed-forward blocks are mixtures or dense.
    """
    params = grouped_query_parameters(config, 256)
    feeds: list[ModelFileEntry] = (
        feed_forward_layers(
            config, params, shared=1, shared_ffn=config.integer("shared_expert_intermediate_size"), shared_gate=True
        )
        if config.get("num_experts")
        else [gated_feed_forward(config, params)] * params["layers"]
    )
    every = config.integer("full_attention_interval", default=4)
    usual = ["full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(params["layers"])]
    heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    delta = {"heads": heads, "value_heads": value_heads, "conv": config.integer("linear_conv_kernel_dim", default=4)}
    delta |= {"key_dim": config.integer("linear_key_head_dim"), "value_dim": config.integer("linear_value_head_dim")}
    attention = {"rotary": True, "qk_norm": True, "gate": "element", "bias": config.flag("attention_bias")}
    decoder = Decoder(
        with_vocab_last(params), "rms_norm", attention_options(params, **attention), None, final_entries=("rms_norm",),
        ties_embeddings=config.flag("tie_word_embeddings"),
        notes="Modules for multi-token prediction are left out; the delta rule counts its products in chunks of 64.",
    )  # fmt: skip
    kinds = config.layer_kinds("layer_types", params["layers"]) or usual
    mixers = [{} if kind == "full_attention" else {"mixer": {"delta_net": delta}} for kind in kinds]
    return language_model_file(config, decoder, list(zip(mixers, feeds, strict=True)))


FAMILY_READERS.register("qwen3_5_text")(qwen3_next)
FAMILY_READERS.register("qwen3_5_moe_text")(qwen3_next)


@FAMILY_READERS.register("kimi_linear")
def kimi_linear(config: Config) -> ModelMapping:
    """Return the network that a configuration of Kimi Linear (2025), or of the text part of Kimi K3 (2026), describes.

    The layers have delta-rule attention with a decay for each channel; every fourth has latent attention without
    positions.
    """
    params = base_parameters(config)
    linear = config.subconfig("linear_attn_config")
    dim = linear.integer("head_dim")
    delta = {"heads": linear.integer("num_heads"), "key_dim": dim, "value_dim": dim, "decay": "channel"}
    delta |= {"decay_rank": dim, "conv": linear.integer("short_conv_kernel_size", default=4)}
    delta |= {} if linear.flag("use_full_rank_gate") else {"gate_rank": dim}
    full = {number - 1 for number in linear.list_value("full_attn_layers") if isinstance(number, int)}
    mla = latent_attention_options(config) | {"rotary": not config.flag("mla_use_nope")}
    mla |= {"gate": True} if config.flag("mla_use_output_gate") else {}
    more: dict[str, Any] = {"shared": config.integer("num_shared_experts")} if config.get("num_shared_experts") else {}
    if config.get("moe_router_activation_func") == "sigmoid":
        more["scores"] = "sigmoid"
    if config.get("routed_expert_hidden_size") is not None:
        more |= {
            "latent": config.integer("routed_expert_hidden_size"),
            "latent_norm": config.flag("latent_moe_use_norm"),
        }
    feeds = feed_forward_layers(config, params, **more)
    decoder = Decoder(
        with_vocab_last(params), "rms_norm", mla, None, final_entries=("rms_norm",),
        ties_embeddings=config.flag("tie_word_embeddings"),
        attention_kind="latent_attention",
        notes="The delta rule counts its products in chunks of 64. Residuals over blocks of layers are left out.",
    )  # fmt: skip
    mixers: list[Mapping[str, Any]] = [
        {} if index in full else {"mixer": {"delta_net": delta}} for index in range(params["layers"])
    ]
    return language_model_file(config, decoder, list(zip(mixers, feeds, strict=True)))


#: Kinds of layers by the letters of a hybrid pattern, and by their names in transformers 5.
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
_LONG_NAMES = {"linear_attention": "mamba", "full_attention": "attention"}


@FAMILY_READERS.register("nemotron_h")
def nemotron_h(config: Config) -> ModelMapping:
    """Return the network that a Nemotron-H or Nemotron 3 configuration describes (NVIDIA, 2025).

    Each layer is a norm and one block: a Mamba-2 mixer, attention without positions, a feed-forward block or a mixture
    of experts.
    """
    kinds = [_LONG_NAMES.get(kind, kind) for kind in config.list_value("layers_block_type")]
    kinds = kinds or [_LETTERS.get(letter, letter) for letter in str(config.get("hybrid_override_pattern") or "")]
    if config.get("num_hidden_layers") is None and kinds:
        config = Config({**config, "num_hidden_layers": len(kinds)}, config.path)
    params = base_parameters(config)
    params["kv_heads"] = config.integer("num_key_value_heads", default=params["heads"])
    params["head_dim"] = config.integer("head_dim", "attention_head_dim", default=params["hidden"] // params["heads"])
    params |= {"ssm_heads": config.integer("mamba_num_heads"), "ssm_head_dim": config.integer("mamba_head_dim")}
    params |= {"ssm_groups": config.integer("n_groups", default=8), "state": config.integer("ssm_state_size")}
    if len(kinds) != params["layers"] or not set(kinds) <= set(_LETTERS.values()):
        raise SpecError(
            f"{config.path}: hybrid_override_pattern: expected {params['layers']} of M, E, * and -, one for each layer"
        )
    mixers = {
        kind: residual_block_entry("rms_norm", mixer)
        for kind, mixer in _nemotron_mixers(config, params, set(kinds)).items()
    }
    loops = [
        {"repeat": times, "name": f"block{index}", "layers": [mixers[kind] for kind in pattern]}
        for index, (pattern, times) in enumerate(fold_repeats(kinds), start=1)
    ]
    decoder = Decoder(
        with_vocab_last(params), "rms_norm", {}, None, final_entries=(*loops, "rms_norm"),
        ties_embeddings=config.flag("tie_word_embeddings"),
        notes="Squared rectifiers are priced as rectifiers; modules for multi-token prediction are left out.",
    )  # fmt: skip
    return language_model_file(config, decoder, [])


def _nemotron_mixers(config: Config, params: dict[str, Any], kinds: set[str]) -> dict[str, ModelFileEntry]:
    """Return the model-file entry of each kind of block (Mamba-2, attention, …) in a Nemotron network, by kind."""
    bias = config.flag("attention_bias")
    mamba: dict[str, Any] = {"heads": "=ssm_heads", "head_dim": "=ssm_head_dim", "groups": "=ssm_groups"}
    mamba |= {
        "state": "=state",
        "conv": config.integer("conv_kernel", default=4),
        "chunk": config.integer("chunk_size", default=128),
    }
    mixers: dict[str, ModelFileEntry] = {"mamba": {"mamba2": mamba}}
    mixers["attention"] = {"attention": attention_options(params, bias=bias)}
    function = config.activation("mlp_hidden_act", default="relu2")
    if "mlp" in kinds:
        params["ffn"] = config.integer("intermediate_size")
        mixers["mlp"] = {"mlp": {"ffn": "=ffn", "activation": function, "bias": config.flag("mlp_bias")}}
    if "moe" in kinds:
        more: dict[str, Any] = {"activation": function, "scores": "sigmoid"}
        if config.get("n_shared_experts"):
            more["shared"] = config.integer("n_shared_experts")
            more["shared_ffn"] = config.integer("moe_shared_expert_intermediate_size", "moe_intermediate_size")
        if config.get("moe_latent_size") is not None:
            more["latent"] = config.integer("moe_latent_size")
        mixers["moe"] = feed_forward_layers(config, params, in_all_layers=True, **more)[0]
    return mixers


def _tower_parameters(config: Config, text: Config, *, merges: int) -> int:
    """Count the parameters of a Qwen3-VL vision tower and of the projection to the text model's width.

    ``merges`` is the number of patch mergers.
    """
    hidden, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    patch = config.integer("in_channels", default=3) * config.integer("temporal_patch_size", default=2)
    patches = patch * config.integer("patch_size") ** 2 * hidden + hidden
    block = 4 * hidden + 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden
    wide = hidden * config.integer("spatial_merge_size", default=2) ** 2
    out = config.integer("out_hidden_size", default=text.integer("hidden_size"))
    merger = wide * (wide + 1) + out * (wide + 1)
    positions = config.integer("num_position_embeddings", default=2304) * hidden
    return patches + positions + config.integer("depth") * block + merger + 2 * hidden + merges * (merger + 2 * wide)


def with_vision_tower(model: ModelMapping, parameters: int, kind: str = "vision tower") -> ModelMapping:
    """Add the parameters of a vision tower to a text model; the tower never runs, as sequences are text only."""
    embed, *others = model["layers"]
    tower = {"name": "tower", "learned": {"parameters": parameters, "of": kind}}
    notes = (
        f"{model.get('notes') or ''} Sequences are text alone: the {kind} holds parameters and does not run.".strip()
    )
    return model | {"layers": [embed, tower, *others], "notes": notes}


def _seeing(config: Config, family: str) -> ModelMapping:
    """Return the network of a vision-language configuration: its text model, and the parameters of its vision tower.

    ``family`` names the reader of the text part.
    """
    text = config.subconfig("text_config")
    tied = {"tie_word_embeddings": config.flag("tie_word_embeddings", text.flag("tie_word_embeddings"))}
    model = FAMILY_READERS[family](Config({**text, **tied}, text.path))
    if config.get("vision_config") is None:
        return model
    vision = config.subconfig("vision_config")
    return with_vision_tower(
        model, _tower_parameters(vision, text, merges=len(vision.list_value("deepstack_visual_indexes")))
    )


@FAMILY_READERS.register("qwen3_vl")
def qwen3_vl(config: Config) -> ModelMapping:
    """Return the network of a Qwen3-VL configuration (2025): the text model of Qwen3 with a vision tower."""
    return _seeing(config, "qwen3")


@FAMILY_READERS.register("qwen3_vl_moe")
def qwen3_vl_moe(config: Config) -> ModelMapping:
    """Return the network of a Qwen3-VL MoE configuration: the text model of Qwen3-MoE with a vision tower."""
    return _seeing(config, "qwen3_moe")


@FAMILY_READERS.register("qwen3_5")
def qwen3_5(config: Config) -> ModelMapping:
    """Return the network of a Qwen3.5 configuration (2026): the layers of Qwen3-Next with a vision tower."""
    return _seeing(config, "qwen3_next")


FAMILY_READERS.register("qwen3_5_moe")(qwen3_5)


@FAMILY_READERS.register("kimi_k25")
def kimi_k25(config: Config) -> ModelMapping:
    """Return the network of a Kimi K2.5 or K3 configuration (2026): the text model with a vision tower."""
    text = config.subconfig("text_config")
    kind = str(text.get("model_type"))
    if kind not in ("kimi_k2", "kimi_linear", "deepseek_v3"):
        raise SpecError(f"{text.path}: model_type: {kind!r:.60}; expected kimi_k2 or kimi_linear")
    model = FAMILY_READERS[kind](text)
    vision = config.subconfig("vision_config") if config.get("vision_config") is not None else None
    return model if vision is None else with_vision_tower(model, _kimi_tower_parameters(vision, text))


FAMILY_READERS.register("kimi_k3")(kimi_k25)


def _kimi_tower_parameters(config: Config, text: Config) -> int:
    """Count the parameters of Kimi's vision tower (MoonViT) and of the projector that merges 2 x 2 patches."""
    hidden, ffn = (config.integer(f"vt_{key}", key) for key in ("hidden_size", "intermediate_size"))
    inner = config.integer("qkv_hidden_size", default=hidden)
    bias = int(config.flag("attn_bias", True)), int(config.flag("linear_bias", True))
    norm = hidden if config.get("norm_type") == "rmsnorm" else 2 * hidden
    block = 2 * norm + 4 * hidden * inner + bias[0] * (3 * inner + hidden) + 2 * hidden * ffn + bias[1] * (ffn + hidden)
    patches = 3 * config.integer("patch_size") ** 2 * hidden + hidden * int(config.flag("patch_embed_proj_bias", True))
    grid = [config.integer(f"init_pos_emb_{side}", f"pos_emb_{side}", default=64) for side in ("height", "width")]
    wide, out = 4 * hidden, text.integer("hidden_size")
    projector = 2 * hidden + wide * (wide + 1) + out * (wide + 1)
    return (
        patches
        + grid[0] * grid[1] * hidden
        + config.integer("vt_num_hidden_layers", "num_hidden_layers") * block
        + norm
        + projector
    )
