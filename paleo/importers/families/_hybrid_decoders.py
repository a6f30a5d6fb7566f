"""Readers of decoders whose layers differ in kind: linear attention, state spaces, latent attention, mixtures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
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
    residual_block_entry,
)
from paleo.importers.families._deepseek import latent_attention_options
from paleo.importers.transformers_configuration import FAMILY_READERS, Config, ModelFileEntry, ModelMapping


@FAMILY_READERS.register("qwen3_next")
def qwen3_next(config: Config) -> ModelMapping:
    """Return the network that a Qwen3-Next configuration describes (2025).

    Three layers of gated delta nets are followed by one of gated attention; feed-forward blocks are mixtures or dense.
    """
    params = grouped_query_parameters(config, 256)
    if config.get("num_experts"):
        shared_ffn = config.integer("shared_expert_intermediate_size")
        feeds = feed_forward_layers(config, params, shared=1, shared_ffn=shared_ffn, shared_gate=True)
    else:
        feeds = [gated_feed_forward(config, params)] * params["layers"]
    every = config.integer("full_attention_interval", default=4)
    usual = ["full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(params["layers"])]
    delta = config.integers(heads="linear_num_key_heads", value_heads="linear_num_value_heads")
    delta["conv"] = config.integer("linear_conv_kernel_dim", default=4)
    delta |= config.integers(key_dim="linear_key_head_dim", value_dim="linear_value_head_dim")
    attention = {"rotary": True, "qk_norm": True, "gate": "element", "bias": config.flag("attention_bias")}
    notes = "Modules for multi-token prediction are left out; the delta rule counts its products in chunks of 64."
    decoder = Decoder(params, attention=attention_options(params, **attention), notes=notes)
    kinds = config.layer_kinds("layer_types", params["layers"]) or usual
    mixers = [{} if kind == "full_attention" else {"mixer": {"delta_net": delta}} for kind in kinds]
    return language_model_file(config, decoder, feeds, mixers)


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
    more: dict[str, Any] = config.integers(shared="num_shared_experts") if config.get("num_shared_experts") else {}
    if config.get("moe_router_activation_func") == "sigmoid":
        more["scores"] = "sigmoid"
    if config.get("routed_expert_hidden_size") is not None:
        more["latent"] = config.integer("routed_expert_hidden_size")
        more["latent_norm"] = config.flag("latent_moe_use_norm")
    feeds = feed_forward_layers(config, params, **more)
    notes = "The delta rule counts its products in chunks of 64. Residuals over blocks of layers are left out."
    decoder = Decoder(params, attention=mla, attention_kind="latent_attention", notes=notes)
    mixer: Mapping[str, Any] = {"mixer": {"delta_net": delta}}
    return language_model_file(config, decoder, feeds, [{} if i in full else mixer for i in range(params["layers"])])


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
        config = config.replaced(num_hidden_layers=len(kinds))
    params = base_parameters(config)
    params["kv_heads"] = config.integer("num_key_value_heads", default=params["heads"])
    params["head_dim"] = config.integer("head_dim", "attention_head_dim", default=params["hidden"] // params["heads"])
    params |= config.integers(ssm_heads="mamba_num_heads", ssm_head_dim="mamba_head_dim")
    params |= {"ssm_groups": config.integer("n_groups", default=8), "state": config.integer("ssm_state_size")}
    if len(kinds) != params["layers"] or not set(kinds) <= set(_LETTERS.values()):
        raise SpecError(
            f"{config.path}: hybrid_override_pattern: expected {params['layers']} of M, E, * and -, one for each layer"
        )
    mixers = _nemotron_mixers(config, params, set(kinds))
    loops = loops_of_layers(kinds, lambda pattern: [residual_block_entry("rms_norm", mixers[kind]) for kind in pattern])
    notes = "Squared rectifiers are priced as rectifiers; modules for multi-token prediction are left out."
    return language_model_file(config, Decoder(params, entries_after_embedding=loops, notes=notes))


def _nemotron_mixers(config: Config, params: dict[str, Any], kinds: set[str]) -> dict[str, ModelFileEntry]:
    """Return the model-file entry of each kind of block (Mamba-2, attention, …) in a Nemotron network, by kind."""
    mamba = {"heads": "=ssm_heads", "head_dim": "=ssm_head_dim", "groups": "=ssm_groups", "state": "=state"}
    sizes = {"conv": config.integer("conv_kernel", default=4), "chunk": config.integer("chunk_size", default=128)}
    attention = attention_options(params, bias=config.flag("attention_bias"))
    mixers: dict[str, ModelFileEntry] = {"mamba": {"mamba2": mamba | sizes}, "attention": {"attention": attention}}
    function = config.activation("mlp_hidden_act", default="relu2")
    if "mlp" in kinds:
        params["ffn"] = config.integer("intermediate_size")
        mixers["mlp"] = {"mlp": {"ffn": "=ffn", "activation": function, "bias": config.flag("mlp_bias")}}
    if "moe" in kinds:
        more: dict[str, Any] = {"activation": function, "scores": "sigmoid"}
        if config.get("n_shared_experts"):
            ffn = "moe_shared_expert_intermediate_size moe_intermediate_size"
            more |= config.integers(shared="n_shared_experts", shared_ffn=ffn)
        if config.get("moe_latent_size") is not None:
            more["latent"] = config.integer("moe_latent_size")
        mixers["moe"] = mixture_entry(config, params, **more)
    return mixers


def _qwen_tower_parameters(config: Config, text: Config) -> int:
    """Count the parameters of a Qwen3-VL vision tower and of the projection to the text model's width."""
    merges = len(config.list_value("deepstack_visual_indexes"))
    hidden, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    patch = config.integer("in_channels", default=3) * config.integer("temporal_patch_size", default=2)
    patches = patch * config.integer("patch_size") ** 2 * hidden + hidden
    block = 4 * hidden + 4 * hidden * (hidden + 1) + 2 * hidden * ffn + ffn + hidden
    wide = hidden * config.integer("spatial_merge_size", default=2) ** 2
    out = config.integer("out_hidden_size", default=text.integer("hidden_size"))
    merger = wide * (wide + 1) + out * (wide + 1)
    positions = config.integer("num_position_embeddings", default=2304) * hidden
    return patches + positions + config.integer("depth") * block + merger + 2 * hidden + merges * (merger + 2 * wide)


def with_vision_tower(
    config: Config, text: Config, model: ModelMapping, parameters: Callable[[Config, Config], int]
) -> ModelMapping:
    """Add the parameters of a vision tower to a text model; the tower never runs, as sequences are text only.

    ``parameters`` counts them from the configurations of the tower and of the text model. Nothing is added if
    ``config`` has no tower.
    """
    if config.get("vision_config") is None:
        return model
    embed, *others = model["layers"]
    learned = {"parameters": parameters(config.subconfig("vision_config"), text), "of": "vision tower"}
    notes = f"{model['notes']} Sequences are text alone: the vision tower holds parameters and does not run."
    return model | {"layers": [embed, {"name": "tower", "learned": learned}, *others], "notes": notes}


def _qwen_with_vision(config: Config, family: str) -> ModelMapping:
    """Return the network of a vision-language configuration: its text model, and the parameters of its vision tower.

    ``family`` names the reader of the text part.
    """
    text = config.subconfig("text_config")
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings"))
    model = FAMILY_READERS[family](text.replaced(tie_word_embeddings=tied))
    return with_vision_tower(config, text, model, _qwen_tower_parameters)


#: Qwen's families with a vision tower, and the families of their text models (Qwen3-VL, 2025; Qwen3.5, 2026).
_QWEN_WITH_VISION = {
    "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe", "qwen3_5": "qwen3_next", "qwen3_5_moe": "qwen3_next",
}  # fmt: skip
for _name, _text in _QWEN_WITH_VISION.items():
    FAMILY_READERS.register(_name)(partial(_qwen_with_vision, family=_text))


@FAMILY_READERS.register("kimi_k25")
def kimi_k25(config: Config) -> ModelMapping:
    """Return the network of a Kimi K2.5 or K3 configuration (2026): the text model with a vision tower."""
    text = config.subconfig("text_config")
    kind = str(text.get("model_type"))
    if kind not in ("kimi_k2", "kimi_linear", "deepseek_v3"):
        raise SpecError(f"{text.path}: model_type: {kind!r:.60}; expected kimi_k2 or kimi_linear")
    return with_vision_tower(config, text, FAMILY_READERS[kind](text), _kimi_tower_parameters)


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
    blocks = config.integer("vt_num_hidden_layers", "num_hidden_layers") * block
    return patches + grid[0] * grid[1] * hidden + blocks + norm + projector
