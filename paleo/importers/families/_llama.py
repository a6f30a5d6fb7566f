"""Readers of decoders like Llama, in a table with one row for each family.

They have norms before (or around) each half, rotary positions, and gated feed-forward blocks or mixtures. A row states
how the family differs from Llama.

Decoders of 2025 and 2026 whose layers differ in heads, windows or feed-forward blocks have readers of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paleo.importers._decoder import (
    Decoder,
    FeedForwardBuilder,
    attention_options,
    feed_forward_layers,
    gated_feed_forward,
    gated_feed_forwards,
    grouped_query_parameters,
    language_model_file,
    llama_like_model,
    loops_of_layers,
    mixture_entry,
    residual_block_entry,
)
from paleo.importers.families._hybrid_decoders import with_vision_tower
from paleo.importers.transformers_configuration import (
    FAMILY_READERS,
    Config,
    ModelFileEntry,
    ModelMapping,
    UnsupportedHeadError,
)


@dataclass(frozen=True, slots=True)
class _Family:
    """Family of Llama-like decoders: publication, and differences from Llama's network.

    Texts in ``bias`` and ``out_bias`` are keys of the configuration; a ``+`` before a key means that it is true by
    default. ``full_every`` is used if the configuration does not list sliding windows: layers whose number (from 1) is
    a multiple of it attend to all positions, the others have a window. With 0 all layers have a window, with None none
    has. ``feed`` makes the feed-forward entry of each layer. ``refused`` are keys of the configuration that change the
    network in a way that is not supported.
    """

    source: str
    bias: bool | str = "attention_bias"
    out_bias: bool | str | None = None
    full_every: int | None = None
    head_dim: int | None = None
    tied: bool = False
    attention: Mapping[str, Any] = field(default_factory=dict)
    feed: FeedForwardBuilder = gated_feed_forwards
    norm: ModelFileEntry = "rms_norm"
    residual: str = "pre"
    notes: str = ""
    refused: tuple[str, ...] = ()

    def model(self, config: Config) -> ModelMapping:
        """Return the network that a configuration of this family describes, as the content of a model file."""
        for key in self.refused:
            if config.flag(key):
                raise UnsupportedHeadError(key)
        bias, out_bias = (
            config.flag(key.lstrip("+"), key.startswith("+")) if isinstance(key, str) else key
            for key in (self.bias, self.out_bias)
        )
        return llama_like_model(
            config, bias=bias, out_bias=out_bias, slides=self._slides(config), head_dim=self.head_dim,
            attention=self.attention, feed=self.feed, tied=self.tied, norm=self.norm, norm_placement=self.residual,
            notes=self.notes,
        )  # fmt: skip

    def _slides(self, config: Config) -> Sequence[bool] | bool:
        """Return, for each layer (or for all), True if attention has a sliding window.

        The result counts only if the configuration does not list windows.
        """
        if not self.full_every:
            return self.full_every == 0
        period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=self.full_every)
        return [(index + 1) % period != 0 for index in range(config.integer("num_hidden_layers"))]


def _gelu_gates(config: Config, params: dict[str, Any]) -> list[ModelFileEntry]:
    """Return the feed-forward entry of each layer: gated blocks, with GELU if the configuration names no activation."""
    return [gated_feed_forward(config, params, default="gelu_pytorch_tanh")] * params["layers"]


def _mixture(**options: Any) -> FeedForwardBuilder:
    """Return a function (config, params) that lists the mixture-of-experts entry of each layer.

    ``options`` are those of `mixture_entry`; ``=key`` stands for the value of a key in the configuration.
    """

    def feed(config: Config, params: dict[str, Any]) -> list[ModelFileEntry]:
        stated: dict[str, Any] = {
            name: config.integer(*value[1:].split()) if isinstance(value, str) and value.startswith("=") else value
            for name, value in options.items()
        }
        return feed_forward_layers(config, params, **stated)

    return feed


def _in_all_layers(**options: Any) -> FeedForwardBuilder:
    """Return a function (config, params) that lists equal mixtures of experts as wide as ``intermediate_size``."""
    return lambda config, params: [mixture_entry(config, params, ffn="intermediate_size", **options)] * params["layers"]


_QK_NORM = {"qk_norm": True}
_WITHOUT_MTP = "Modules for multi-token prediction are left out."
_LAYER_NORM = {"layer_norm": {"bias": False}}
_NO_MULTIPLIERS_NOTE = "Multipliers of embeddings, residuals, scores and logits are left out."

_ROWS: dict[str, _Family] = {
    "llama": _Family("Touvron et al., 2023"),
    "mistral": _Family("Jiang et al., Mistral 7B, 2023", bias=False, full_every=0),
    "ministral3": _Family("Ministral 3, 2025", bias=False),
    "qwen2": _Family("Qwen2, 2024", bias=True, out_bias=False),
    "qwen3": _Family("Qwen3, 2025", head_dim=128, attention=_QK_NORM),
    "mimo": _Family("MiMo 7B, 2025", bias="+attention_bias", out_bias=False, notes=_WITHOUT_MTP),
    "gemma": _Family("Gemma, 2024", head_dim=256, tied=True, feed=_gelu_gates),
    "gemma2": _Family(
        "Gemma 2, 2024", head_dim=256, tied=True, feed=_gelu_gates, residual="sandwich", full_every=2,
        notes="The soft cap of scores and logits is left out.",
    ),
    "gemma3_text": _Family(
        "Gemma 3, 2025", head_dim=256, tied=True, feed=_gelu_gates, residual="sandwich", attention=_QK_NORM,
        full_every=6,
    ),
    "phi3": _Family("Phi-3, 2024", bias=False, full_every=0),
    "smollm3": _Family("SmolLM3, 2025: some layers have no rotary positions", tied=True),
    "granite": _Family("Granite 3, 2024", notes=_NO_MULTIPLIERS_NOTE),
    "glm": _Family("GLM-4, 2024", out_bias=False, head_dim=128),
    "glm4": _Family("GLM-4-0414, 2025", out_bias=False, residual="sandwich"),
    "olmo": _Family("Groeneveld et al., OLMo, 2024", norm={"layer_norm": {"affine": False}}),
    "olmo2": _Family("OLMo 2, 2024", residual="inner", attention={"qk_norm": "all heads"}),
    "olmo3": _Family("OLMo 3, 2025", residual="inner", attention={"qk_norm": "all heads"}, full_every=4),
    "cohere": _Family(
        "Command R, 2024", tied=True, norm=_LAYER_NORM, residual="parallel", refused=("use_qk_norm",)
    ),
    "cohere2": _Family("Command A, 2025", tied=True, norm=_LAYER_NORM, residual="parallel", full_every=4),
    "ernie4_5": _Family("ERNIE 4.5, 2025", bias="use_bias", tied=True),
    "hunyuan_v1_dense": _Family("Hunyuan, 2025", attention=_QK_NORM),
    "seed_oss": _Family("Seed-OSS, 2025", bias="attention_bias", out_bias="attention_out_bias"),
    "mixtral": _Family("Jiang et al., Mixtral of experts, 2024", bias=False, full_every=0, feed=_in_all_layers()),
    "qwen2_moe": _Family(
        "Qwen2-MoE, 2024: shared experts behind a gate", bias="+qkv_bias", out_bias=False,
        feed=_mixture(shared=1, shared_ffn="=shared_expert_intermediate_size", shared_gate=True),
    ),
    "qwen3_moe": _Family("Qwen3-MoE, 2025", attention=_QK_NORM, feed=feed_forward_layers),
    "olmoe": _Family("OLMoE, 2024", attention={"qk_norm": "all heads"}, feed=_in_all_layers()),
    "granitemoe": _Family("Granite 3 MoE, 2024", feed=_in_all_layers(), notes=_NO_MULTIPLIERS_NOTE, tied=True),
    "minimax_m2": _Family(
        "MiniMax M2, 2025", bias=False, attention={"qk_norm": "all heads"}, notes=_WITHOUT_MTP,
        feed=_in_all_layers(scores="sigmoid"),
    ),
    "gpt_oss": _Family(
        "OpenAI, gpt-oss, 2025: attention sinks, windows on every other layer", bias="+attention_bias",
        head_dim=64, full_every=2, attention={"sinks": True}, feed=_in_all_layers(bias=True, router_bias=True),
    ),
    "step3p7": _Family(
        "Step 3.5 and 3.7 Flash, 2026: a gate for each head, windows on three of four layers", bias=False,
        attention={**_QK_NORM, "gate": "head"}, notes=_WITHOUT_MTP,
        feed=_mixture(shared=1, shared_ffn="=share_expert_dim moe_intermediate_size", scores="sigmoid"),
    ),
}  # fmt: skip
for _name, _row in _ROWS.items():
    FAMILY_READERS.register(_name)(_row.model)
FAMILY_READERS.register("step3p5")(_ROWS["step3p7"].model)


@FAMILY_READERS.register("glm4_moe")
def glm4_moe(config: Config) -> ModelMapping:
    """Return the network that a GLM-4.5 configuration describes (2025).

    Dense layers come first, then mixtures of experts; only the larger network has query and key norms.
    """
    attention = dict(_QK_NORM) if config.flag("use_qk_norm") else {}
    feed = _mixture(shared="=n_shared_experts", scores="sigmoid")
    family = _Family("GLM-4.5, 2025", out_bias=False, attention=attention, feed=feed, notes=_WITHOUT_MTP)
    return family.model(config)


@FAMILY_READERS.register("llama4_text")
def llama4(config: Config) -> ModelMapping:
    """Return the network that the text part of a Llama 4 configuration describes (2025).

    Three layers with attention in chunks are followed by one without positions. Mixtures with one routed and one shared
    expert are in every layer or in every other one.
    """
    params = grouped_query_parameters(config)
    layers, step = params["layers"], config.integer("interleave_moe_layer_step", default=1)
    mixed = config.list_value("moe_layers") or [index for index in range(layers) if (index + 1) % step == 0]
    mixture = mixture_entry(config, params, ffn="intermediate_size", shared=1, scores="sigmoid")
    dense: ModelFileEntry = None
    if len(mixed) < layers:
        wide = config.integer("intermediate_size_mlp")
        dense = gated_feed_forward(config.replaced(intermediate_size=wide), params)
    every = config.integer("no_rope_layer_interval", default=4)
    chunk = {"window": config.integer("attention_chunk_size", default=8192)}
    attention = attention_options(params, rotary=True, bias=config.flag("attention_bias"))
    notes = "Chunks of attention count as windows; norms of queries without weights are left out."
    mixers: list[Mapping[str, Any]] = [{} if (index + 1) % every == 0 else chunk for index in range(layers)]
    feeds = [mixture if index in mixed else dense for index in range(layers)]
    return language_model_file(config, Decoder(params, attention=attention, notes=notes), feeds, mixers)


@FAMILY_READERS.register("llama4")
def llama4_vision(config: Config) -> ModelMapping:
    """Return the text network of a Llama 4 configuration.

    The vision tower is left out, as configurations may not state it.
    """
    model = llama4(config.subconfig("text_config"))
    return model | {"notes": f"{model['notes']} The vision tower is left out."}


@FAMILY_READERS.register("gemma4_text")
def gemma4(config: Config) -> ModelMapping:
    """Return the network that the text part of a Gemma 4 configuration describes (2026).

    Five layers with a window are followed by one with wider heads, whose values are its keys. A dense block and a
    mixture run side by side. Networks with embeddings for each layer, or with layers that share keys, raise
    `UnsupportedHeadError`, so that the library's own model is traced instead.
    """
    for key in ("hidden_size_per_layer_input", "num_kv_shared_layers"):
        if config.get(key):
            raise UnsupportedHeadError(key)
    params = grouped_query_parameters(config, 256)
    layers = params["layers"]
    params["window"] = config.integer("sliding_window")
    kinds = config.layer_kinds("layer_types", layers)
    if kinds is None:
        kinds = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(layers)]
    attention = attention_options(params, rotary=True, qk_norm=True, bias=False)
    wide = attention | {"head_dim": config.integer("global_head_dim", default=512)}
    wide |= {"kv_heads": config.integer("num_global_key_value_heads", "num_key_value_heads")}
    wide |= {"shared_value": True} if config.flag("attention_k_eq_v") else {}
    dense = gated_feed_forward(config, params, default="gelu_pytorch_tanh")
    halves: list[ModelFileEntry] = ["rms_norm", dense, "rms_norm"]
    if config.flag("enable_moe_block"):
        top_k = config.integer("top_k_experts")
        words = config.replaced(num_experts_per_tok=top_k, hidden_act="gelu_pytorch_tanh")
        mixture = mixture_entry(words, params)
        scales = {"learned": {"parameters": f"={params['hidden']} + {params['experts']}", "of": "scales of the router"}}
        halves = [{"branches": [halves, ["rms_norm", mixture, "rms_norm"]], "join": "add"}, "rms_norm", scales]
    mixers = [wide if kind == "full_attention" else attention | {"window": "=window"} for kind in kinds]

    def entries(pattern: Sequence[Mapping[str, Any]]) -> list[ModelFileEntry]:
        feed = residual_block_entry(*halves)
        return [
            entry
            for mixer in pattern
            for entry in (residual_block_entry("rms_norm", {"attention": mixer}, "rms_norm"), feed)
        ]

    notes = "The soft cap of logits is left out."
    loops = loops_of_layers(mixers, entries)
    return language_model_file(config, Decoder(params, entries_after_embedding=loops, tied=True, notes=notes))


@FAMILY_READERS.register("gemma4")
def gemma4_vision(config: Config) -> ModelMapping:
    """Return the network of a Gemma 4 configuration: the text model, and the parameters of its vision tower."""
    text = config.subconfig("text_config")
    model = gemma4(Config({"tie_word_embeddings": config.flag("tie_word_embeddings", True), **text}, text.path))
    return with_vision_tower(config, text, model, _gemma_tower_parameters)


def _gemma_tower_parameters(config: Config, text: Config) -> int:
    """Count the parameters of Gemma 4's vision tower and of the projection to the text model's width."""
    hidden, ffn = config.integer("hidden_size"), config.integer("intermediate_size")
    block = 4 * hidden**2 + 3 * hidden * ffn + 4 * hidden + 2 * config.integer("head_dim", default=72)
    patches = 3 * config.integer("patch_size") ** 2 * hidden + 2 * config.integer("position_embedding_size") * hidden
    return patches + config.integer("num_hidden_layers") * block + hidden * text.integer("hidden_size")


@FAMILY_READERS.register("mimo_v2_flash")
def mimo_v2(config: Config) -> ModelMapping:
    """Return the network that a MiMo V2 Flash configuration describes (2025).

    Windowed layers have attention sinks and separate head counts; values are narrower than keys; most layers
    have mixtures.
    """
    params = grouped_query_parameters(config)
    layers = params["layers"]
    params["window"] = config.integer("sliding_window")
    pattern = config.is_layer_of_kind("hybrid_layer_pattern", "layer_types", "sliding_attention", layers)
    mixed = config.is_layer_of_kind("moe_layer_freq", "mlp_layer_types", "sparse", layers)
    full = {"value_dim": config.integer("v_head_dim", "head_dim")}
    full |= {"sinks": True} if config.flag("add_full_attention_sink_bias") else {}
    slide: dict[str, Any] = config.integers(heads="swa_num_attention_heads num_attention_heads")
    slide["kv_heads"] = config.integer("swa_num_key_value_heads", default=2 * params["kv_heads"])
    slide |= config.integers(head_dim="swa_head_dim head_dim", value_dim="swa_v_head_dim v_head_dim")
    slide |= {"window": "=window"} | ({"sinks": True} if config.flag("add_swa_attention_sink_bias", True) else {})
    mixture = mixture_entry(config, params, scores="sigmoid")
    dense = gated_feed_forward(config, params) if not all(mixed) else None
    attention = attention_options(params, rotary=True, bias=config.flag("attention_bias"))
    attention |= {"out_bias": False} if attention["bias"] else {}
    decoder = Decoder(params, attention=attention, notes=_WITHOUT_MTP)
    mixers = [slide if slides else full for slides in pattern]
    return language_model_file(config, decoder, [mixture if is_mixture else dense for is_mixture in mixed], mixers)
