"""Imported configurations against modules of transformers on the meta device: parameters exact, FLOP where traced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paleo.importers.import_sources import from_torch, import_network
from paleo.layers.base import LayerImplementations
from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import default_precision

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

Case = tuple[str, str, dict[str, Any]]


def case(kind: str, module: str, **changes: Any) -> Any:
    words = "-".join(f"{key}={value}" for key, value in changes.items() if not isinstance(value, list | dict))
    return pytest.param((kind, module, changes), id=f"{module}-{words}"[:100].rstrip("-"))


MIXTURES = [
    case("mixtral", "MixtralForCausalLM"),
    case("qwen2_moe", "Qwen2MoeForCausalLM"),
    case("qwen2_moe", "Qwen2MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[3]),
    case("qwen3_moe", "Qwen3MoeForCausalLM"),
    case("deepseek_v2", "DeepseekV2ForCausalLM", num_experts_per_tok=6, first_k_dense_replace=1),
    case("deepseek_v2", "DeepseekV2ForCausalLM", q_lora_rank=None, num_experts_per_tok=6, num_hidden_layers=5),
    case("deepseek_v3", "DeepseekV3ForCausalLM"),
    case("gpt_oss", "GptOssForCausalLM"),
]
DENSE = [
    case("llama", "LlamaForCausalLM"),
    case(
        "llama",
        "LlamaForCausalLM",
        attention_bias=True,
        mlp_bias=True,
        num_key_value_heads=4,
        num_attention_heads=16,
        hidden_size=512,
        head_dim=32,
        intermediate_size=999,
        tie_word_embeddings=True,
        num_hidden_layers=3,
    ),
    case("mistral", "MistralForCausalLM"),
    case("qwen2", "Qwen2ForCausalLM"),
    case("qwen3", "Qwen3ForCausalLM"),
    case("gemma", "GemmaForCausalLM"),
    case("gemma2", "Gemma2ForCausalLM", num_hidden_layers=5),
    case("gemma3_text", "Gemma3ForCausalLM", num_hidden_layers=9),
    case("phi", "PhiForCausalLM"),
    case("phi3", "Phi3ForCausalLM"),
    case("smollm3", "SmolLM3ForCausalLM", num_hidden_layers=4),
    case("granite", "GraniteForCausalLM", num_hidden_layers=4),
    case("glm", "GlmForCausalLM", num_hidden_layers=4),
    case("olmo", "OlmoForCausalLM", num_hidden_layers=4),
    case("cohere", "CohereForCausalLM", num_hidden_layers=4),
    case("starcoder2", "Starcoder2ForCausalLM", num_hidden_layers=4),
    case("xlm-roberta", "XLMRobertaForMaskedLM", num_hidden_layers=4),
    case("llama", "LlamaModel", num_hidden_layers=4),
    case("llama", "LlamaForSequenceClassification", num_hidden_layers=4),
    case("gpt2", "GPT2LMHeadModel"),
    case("gpt_neox", "GPTNeoXForCausalLM"),
    case("gpt_neox", "GPTNeoXForCausalLM", use_parallel_residual=False, num_hidden_layers=4),
    case("opt", "OPTForCausalLM"),
    case(
        "opt",
        "OPTForCausalLM",
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
        hidden_size=1024,
        num_attention_heads=16,
    ),
    case("bloom", "BloomForCausalLM", hidden_size=512, n_layer=4),
    case("falcon", "FalconForCausalLM"),
    case(
        "falcon",
        "FalconForCausalLM",
        new_decoder_architecture=True,
        num_kv_heads=8,
        hidden_size=4096,
        num_attention_heads=64,
        num_hidden_layers=4,
    ),
    case(
        "falcon",
        "FalconForCausalLM",
        parallel_attn=False,
        multi_query=False,
        alibi=True,
        bias=True,
        hidden_size=2048,
        num_attention_heads=32,
        num_hidden_layers=4,
    ),
    case("bert", "BertForMaskedLM"),
    case("bert", "BertForPreTraining"),
    case("bert", "BertForSequenceClassification"),
    case("bert", "BertForTokenClassification"),
    case("bert", "BertModel"),
    case("roberta", "RobertaForMaskedLM"),
    case("roberta", "RobertaForSequenceClassification", type_vocab_size=1, max_position_embeddings=514),
    case("vit", "ViTForImageClassification"),
    case("vit", "ViTModel", qkv_bias=False),
    case("t5", "T5ForConditionalGeneration"),
    case(
        "t5",
        "T5ForConditionalGeneration",
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
        d_model=768,
        num_heads=12,
        d_ff=2048,
        num_layers=12,
    ),
]


def module_of(one: Case) -> Any:
    kind, name, changes = one
    config = transformers.CONFIG_MAPPING[kind](**changes)
    with torch.device("meta"):
        return getattr(transformers, name)(config)


def graph_of(one: Case, module: Any, folder: Path, seq: int) -> Graph:
    data = module.config.to_dict() | {"architectures": [one[1]], "model_type": one[0]}
    (folder / "config.json").write_text(json.dumps(data, default=str))
    model = import_network("hf", str(folder)).model
    overrides = {"seq": seq} if "seq" in model.params else {}
    return build_graph(model, batch=1, choices=LayerImplementations(attention="unfused"), overrides=overrides)


def flops(graph: Graph) -> float:
    formats = default_precision("fp32")
    return sum(n.repeat * k.flops for n in graph.nodes for op in n.operations for k in op.forward_kernels(formats))


@pytest.mark.parametrize("one", MIXTURES)
def test_parameters_of_mixtures_are_exact(one: Case, tmp_path: Path) -> None:
    module = module_of(one)
    assert graph_of(one, module, tmp_path, 32).parameters == sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("one", DENSE)
def test_parameters_and_flop_are_those_of_the_library(one: Case, tmp_path: Path) -> None:
    """The FLOP are those of the torch importer, which another test holds to torch's counter."""
    module = module_of(one)
    graph = graph_of(one, module, tmp_path, 32)
    assert graph.parameters == sum(p.numel() for p in module.parameters())
    inputs = {"vit": ["1x3x224x224"], "t5": ["input_ids=1x32:int64", "decoder_input_ids=1x32:int64"]}
    traced = build_graph(
        from_torch(module, inputs.get(one[0], ["1x32:int64"])),
        batch=1,
        choices=LayerImplementations(attention="unfused"),
    )
    assert flops(graph) == pytest.approx(flops(traced), rel=1e-3)
