"""Decoders with mixtures of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paleo.importers.configuration import FAMILIES
from paleo.importers.decoder import Decoder, base_parameters, experts, language_model, llama_like, vocab_last

if TYPE_CHECKING:
    from paleo.importers.configuration import Config, Entry, Model


@FAMILIES.register("mixtral")
def mixtral(config: Config) -> Model:
    """Jiang et al., Mixtral of experts, 2024."""
    return llama_like(
        config, bias=False, slides=True, feed=lambda c, p: experts(c, p, in_all_layers=True, ffn=("intermediate_size",))
    )


@FAMILIES.register("qwen2_moe")
def qwen2_moe(config: Config) -> Model:
    """Qwen2-MoE, 2024: shared experts behind a gate."""

    def feed(config: Config, params: dict[str, Any]) -> list[Entry]:
        shared = config.integer("shared_expert_intermediate_size")
        return experts(config, params, shared=1, shared_ffn=shared, shared_gate=True)

    return llama_like(config, bias=config.flag("qkv_bias", True), out_bias=False, feed=feed)


@FAMILIES.register("qwen3_moe")
def qwen3_moe(config: Config) -> Model:
    """Qwen3-MoE, 2025."""
    return llama_like(config, attention={"qk_norm": True}, feed=experts)


@FAMILIES.register("gpt_oss")
def gpt_oss(config: Config) -> Model:
    """OpenAI, gpt-oss, 2025: attention sinks, windows on every other layer, biases everywhere."""

    def feed(config: Config, params: dict[str, Any]) -> list[Entry]:
        return experts(config, params, in_all_layers=True, ffn=("intermediate_size",), bias=True, router_bias=True)

    alternate = [index % 2 == 0 for index in range(config.integer("num_hidden_layers"))]
    return llama_like(
        config,
        bias=config.flag("attention_bias", True),
        head_dim=64,
        slides=alternate,
        feed=feed,
        attention={"sinks": True},
    )


#: Scores of routers whose configuration may leave them out.
SCORES = {"deepseek_v3": "sigmoid", "kimi_k2": "sigmoid"}


@FAMILIES.register("deepseek_v2")
def deepseek_v2(config: Config) -> Model:
    """DeepSeek-AI, DeepSeek-V2, 2024: latent attention, shared and routed experts, dense layers first."""
    shared = config.get("n_shared_experts")
    params = base_parameters(config)
    mla: dict[str, Any] = {"heads": "=heads"}
    if config.get("q_lora_rank") is not None:
        mla["query_rank"] = config.integer("q_lora_rank")
    keys = {
        "kv_rank": "kv_lora_rank",
        "nope_dim": "qk_nope_head_dim",
        "rope_dim": "qk_rope_head_dim",
        "value_dim": "v_head_dim",
    }
    mla |= {option: config.integer(key) for option, key in keys.items()}
    more: dict[str, Any] = {"shared": config.integer("n_shared_experts")} if shared else {}
    if config.get("n_group") is not None:
        more["groups"] = config.integer("n_group")
    if config.get("scoring_func", SCORES.get(str(config.get("model_type")))) == "sigmoid":
        more["scores"] = "sigmoid"
    feeds = experts(config, params, **more)
    notes = "Modules for multi-token prediction and the load-balancing bias of the router (not trained) are left out."
    decoder = Decoder(
        vocab_last(params),
        "rms_norm",
        mla,
        None,
        final=("rms_norm",),
        tied=config.flag("tie_word_embeddings"),
        attention_kind="latent_attention",
        notes=notes,
    )
    return language_model(config, decoder, [({}, feed) for feed in feeds])


FAMILIES.register("deepseek_v3")(deepseek_v2)
#: Moonshot AI, Kimi K2, 2025: the layers of DeepSeek-V3 in other numbers.
FAMILIES.register("kimi_k2")(deepseek_v2)
