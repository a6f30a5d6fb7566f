"""Readers of decoders like Llama, in a table with one row for each family.

They have norms before (or around) each half, rotary positions, and gated feed-forward blocks or mixtures. A row states
how the family differs from Llama.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from paleo.importers._decoder import experts, gated_feed, llama_like
from paleo.importers.configuration import FAMILIES, Config, Entry, Model, UnreadHeadError

Feed = Callable[[Config, dict[str, Any]], list[Entry]]


@dataclass(frozen=True, slots=True)
class _Family:
    """One family: its publication, and options of the decoder.

    Texts in ``bias`` and ``out_bias`` are keys of the configuration; a ``+`` before a key means that it is true by
    default. ``full_every`` is used if the configuration does not list the windows: every layer with a multiple of this
    number, counted from 1, has none, and the other layers have one. With 0 all layers have a window, with None no layer
    has. ``refused`` are keys that change the network in a way that is not supported.
    """

    source: str
    bias: bool | str = "attention_bias"
    out_bias: bool | str | None = None
    full_every: int | None = None
    head_dim: int | None = None
    tied: bool = False
    attention: Mapping[str, Any] = field(default_factory=dict)
    feed: Feed | None = None
    norm: Entry = "rms_norm"
    residual: str = "pre"
    notes: str = ""
    refused: tuple[str, ...] = ()

    def model(self, config: Config) -> Model:
        """Return the network that a configuration of the family describes."""
        for key in self.refused:
            if config.flag(key):
                raise UnreadHeadError(key)
        options: dict[str, Any] = {"head_dim": self.head_dim, "tied": self.tied, "attention": dict(self.attention)}
        options |= {"norm": self.norm, "residual": self.residual, "notes": self.notes}
        options |= {"feed": self.feed} if self.feed else {}
        bias, out_bias = (
            config.flag(key.lstrip("+"), key.startswith("+")) if isinstance(key, str) else key
            for key in (self.bias, self.out_bias)
        )
        return llama_like(config, bias=bias, out_bias=out_bias, slides=self._slides(config), **options)

    def _slides(self, config: Config) -> Sequence[bool] | bool:
        """Return whether each layer has a window, for configurations without a list of windows."""
        if not self.full_every:
            return self.full_every == 0
        period = config.integer("sliding_window_pattern", "_sliding_window_pattern", default=self.full_every)
        return [(index + 1) % period != 0 for index in range(config.integer("num_hidden_layers"))]


def _gelu_gates(config: Config, params: dict[str, Any]) -> list[Entry]:
    """Return gated blocks for every layer, with GELU by default."""
    return [gated_feed(config, params, default="gelu_pytorch_tanh")] * params["layers"]


def _mixture(**options: Any) -> Feed:
    """Return a function that makes mixtures of experts; an option that is a key means its value."""

    def feed(config: Config, params: dict[str, Any]) -> list[Entry]:
        stated: dict[str, Any] = {
            name: config.integer(*value[1:].split()) if isinstance(value, str) and value.startswith("=") else value
            for name, value in options.items()
        }
        return experts(config, params, **stated)

    return feed


_QK_NORM = {"qk_norm": True}
_IN_ALL = {"in_all_layers": True, "ffn": ("intermediate_size",)}
_WITHOUT_MTP = "Modules for multi-token prediction are left out."
_LAYER_NORM = {"layer_norm": {"bias": False}}
_MULTIPLIERS = "Multipliers of embeddings, residuals, scores and logits are left out."

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
    "granite": _Family("Granite 3, 2024", notes=_MULTIPLIERS),
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
    "mixtral": _Family("Jiang et al., Mixtral of experts, 2024", bias=False, full_every=0, feed=_mixture(**_IN_ALL)),
    "qwen2_moe": _Family(
        "Qwen2-MoE, 2024: shared experts behind a gate", bias="+qkv_bias", out_bias=False,
        feed=_mixture(shared=1, shared_ffn="=shared_expert_intermediate_size", shared_gate=True),
    ),
    "qwen3_moe": _Family("Qwen3-MoE, 2025", attention=_QK_NORM, feed=experts),
    "olmoe": _Family("OLMoE, 2024", attention={"qk_norm": "all heads"}, feed=_mixture(**_IN_ALL)),
    "granitemoe": _Family("Granite 3 MoE, 2024", feed=_mixture(**_IN_ALL), notes=_MULTIPLIERS, tied=True),
    "minimax_m2": _Family(
        "MiniMax M2, 2025", bias=False, attention={"qk_norm": "all heads"}, notes=_WITHOUT_MTP,
        feed=_mixture(**_IN_ALL, scores="sigmoid"),
    ),
    "gpt_oss": _Family(
        "OpenAI, gpt-oss, 2025: attention sinks, windows on every other layer", bias="+attention_bias",
        head_dim=64, full_every=2, attention={"sinks": True}, feed=_mixture(**_IN_ALL, bias=True, router_bias=True),
    ),
    "step3p7": _Family(
        "Step 3.5 and 3.7 Flash, 2026: a gate for each head, windows on three of four layers", bias=False,
        attention={**_QK_NORM, "gate": "head"}, notes=_WITHOUT_MTP,
        feed=_mixture(shared=1, shared_ffn="=share_expert_dim moe_intermediate_size", scores="sigmoid"),
    ),
}  # fmt: skip
for _name, _row in _ROWS.items():
    FAMILIES.register(_name)(_row.model)
FAMILIES.register("step3p5")(_ROWS["step3p7"].model)


@FAMILIES.register("glm4_moe")
def glm4_moe(config: Config) -> Model:
    """Read GLM-4.5 (2025): norms of queries and keys in the larger network only, dense layers first."""
    attention = dict(_QK_NORM) if config.flag("use_qk_norm") else {}
    feed = _mixture(shared="=n_shared_experts", scores="sigmoid")
    family = _Family("GLM-4.5, 2025", out_bias=False, attention=attention, feed=feed, notes=_WITHOUT_MTP)
    return family.model(config)
