"""Configurations of transformers: counts worked out by hand, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import paleo
from paleo.errors import SpecError
from paleo.importers._decoder import fold_repeats
from paleo.importers.import_sources import FAMILIES, import_network, model_file_of_config
from paleo.importers.model_file import to_yaml, validated_yaml
from paleo.importers.transformers_configuration import read_config
from paleo.network.graph import build_graph
from paleo.operations.tensor import default_precision
from paleo.predict import predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

TINY = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "vocab_size": 11,
    "max_position_embeddings": 64,
}


def written(path: Path, **more: Any) -> str:
    file = path / "config.json"
    file.write_text(json.dumps(TINY | more))
    return str(file)


def test_a_llama_counted_by_hand(tmp_path: Path) -> None:
    """A layer: q and out 8x8, k and v 8x4; gate, up and down 8x20; two norms of 8. Two tables of 11x8, a norm."""
    made = import_network("hf", written(tmp_path))
    assert made.graph.parameters == 3 * (64 + 32 + 32 + 64 + 3 * 160 + 16) + 2 * 88 + 8
    products = 2 * 64 * (64 + 32 + 32 + 64 + 480)  # per layer, 64 tokens
    scores = 2 * 2 * 64 * 64 * 8
    assert made.flops == 3 * (products + scores) + 2 * 64 * 88


def test_a_bare_model_ends_at_its_last_norm(tmp_path: Path) -> None:
    """``LlamaModel`` has neither an output layer nor a loss."""
    layers = model_file_of_config(written(tmp_path, architectures=["LlamaModel"]))["layers"]
    assert layers[-1] == "rms_norm"
    assert model_file_of_config(written(tmp_path))["layers"][: len(layers)] == layers


def test_a_folder_stands_for_its_configuration(tmp_path: Path) -> None:
    written(tmp_path)
    assert model_file_of_config(tmp_path) == model_file_of_config(tmp_path / "config.json") | {
        "title": f"llama imported from {tmp_path}/config.json"
    }


def test_seq_can_be_stated_and_overridden(tmp_path: Path) -> None:
    made = import_network("hf", written(tmp_path), sizes={"seq": 16})
    assert made.model.params["seq"] == 16
    assert build_graph(made.model, batch=2, overrides={"seq": 32}).inputs["tokens"].sizes == (2, 32)


def test_windows_alternate_in_one_loop(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"] * 3
    model = model_file_of_config(written(tmp_path, num_hidden_layers=6, layer_types=kinds, sliding_window=4))
    loop = model["layers"][1]
    assert loop["repeat"] == 3 and len(loop["layers"]) == 4


@pytest.mark.parametrize(
    ("text", "pattern", "times"), [("aaaa", ["a"], 4), ("abab", ["a", "b"], 2), ("aabaab", ["a", "a", "b"], 2)]
)
def test_the_shortest_pattern_is_folded(text: str, pattern: list[str], times: int) -> None:
    assert fold_repeats(text) == [(pattern, times)]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "lama"}, "nearest: 'llama'"),
        ({"model_type": None}, "model_type"),
        ({"hidden_size": "8"}, "hidden_size: '8' must be a whole number"),
        ({"hidden_size": -1}, "hidden_size"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_act": "snake"}, "hidden_act"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"layer_types": ["full_attention"], "sliding_window": 4}, "layer_types"),
        ({"model_type": "deepseek_v3", "index_topk": 64}, "index_topk: sparse attention over keys that an indexer"),
        ({"model_type": "anew", "text_config": {"index_topk_blocks": 4}}, "text_config: index_topk_blocks: sparse"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=r"config\.json") as caught:
        model_file_of_config(written(tmp_path, **change))
    assert said in str(caught.value)


def test_kimi_k2_is_deepseek_v3_in_other_numbers(tmp_path: Path) -> None:
    """As transformers counts DeepseekV3ForCausalLM of these numbers."""
    sizes = {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840, "n_group": 1,
    }  # fmt: skip
    kind = {"model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(kind | sizes))
    assert import_network("hf", str(file)).graph.parameters == 1_026_408_209_408
    assert "'groups': 1, 'scores': 'sigmoid'" in str(model_file_of_config(file))


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000, "\x00"])
def test_what_is_no_configuration_is_an_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(SpecError):
        model_file_of_config(file)


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in ("t5", "mt5", "vit", "bert")])
def test_every_family_says_which_key_is_missing(tmp_path: Path, family: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": family}))
    with pytest.raises(SpecError, match="this key is missing"):
        model_file_of_config(file)


@pytest.mark.parametrize(
    "odd", ["a: b", "#x", "true", "1", "- x", "é\n", "'", '"', "null", "=1 + 2", "", " x", "x\u0007"]
)
def test_odd_texts_survive_the_file(odd: str) -> None:
    assert validated_yaml({"params": {"a": odd}, "layers": [{"linear": {"dim": odd}}, [odd]]})


def test_short_entries_stay_on_a_line() -> None:
    text = to_yaml({"layers": [{"repeat": 2, "layers": [{"branches": [["relu"], []], "join": "add"}]}]})
    assert "- {branches: [[relu], []], join: add}" in text


GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "vocab_size": 50257,
    "activation_function": "gelu_new",
}  # fmt: skip
BERT = {
    "model_type": "bert", "architectures": ["BertForPreTraining"], "hidden_size": 768, "intermediate_size": 3072,
    "num_attention_heads": 12, "num_hidden_layers": 12, "max_position_embeddings": 512, "type_vocab_size": 2,
    "vocab_size": 30522, "hidden_act": "gelu",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config", "more"), [("gpt2", GPT2, {}), ("bert_base", BERT, {"predictions": 512})], ids=["gpt2", "bert"]
)
@pytest.mark.parametrize("software", ["pytorch-eager", "huggingface-eager"])
@pytest.mark.parametrize("strategy", ["dp", "tp=4,dp=2"])
def test_steps_of_a_configuration_are_those_of_the_catalog(
    tmp_path: Path, name: str, config: dict[str, Any], more: dict[str, Any], software: str, strategy: str
) -> None:
    """Also where code writes GELU out term by term, as GPT-2's does and BERT's does not."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    theirs, ours = import_network("hf", str(file)).model, load_model(name)
    options = {"gpus": 8, "batch": 8, "strategy": strategy, "software": software}
    made = predict(theirs, load_system("dgx-a100-80gb"), Run(**options))
    wanted = predict(ours, load_system("dgx-a100-80gb"), Run(model=more, **options))
    assert made.step_time == pytest.approx(wanted.step_time, rel=0.005)
    assert made.memory.total == pytest.approx(wanted.memory.total, rel=0.005)


@pytest.mark.parametrize(
    ("architecture", "head"),
    [("LlamaForCausalLM", 88), ("LlamaModel", 0), ("LlamaForSequenceClassification", 8 * 5), (None, 88)],
)
def test_the_head_is_that_of_the_architecture(tmp_path: Path, architecture: str | None, head: int) -> None:
    """A table of 11 x 8, three layers, a norm; and a head over 11 words, none, or one over 5 classes."""
    more = {} if architecture is None else {"architectures": [architecture]}
    network = import_network("hf", written(tmp_path, num_labels=5, **more))
    assert network.graph.parameters == 3 * (64 + 32 + 32 + 64 + 3 * 160 + 16) + 88 + 8 + head


@pytest.mark.slow
def test_code_of_the_models_own_is_named_and_never_runs(tmp_path: Path) -> None:
    (tmp_path / "modeling_x.py").write_text("raise SystemExit('this ran')")
    remote = {"auto_map": {"AutoModelForCausalLM": "modeling_x.Model"}}
    assert "modeling_x.Model) was not run" in str(import_network("hf", written(tmp_path, **remote)).model.notes)
    with pytest.raises(SpecError, match=r"modeling_x.Model\) is not run"):
        import_network("hf", written(tmp_path, model_type="of-ones-own", **remote))


def test_other_families_are_built_by_the_library_and_traced(tmp_path: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32}
    config = transformers.ElectraConfig(**sizes, embedding_size=8, vocab_size=50, max_position_embeddings=64)
    with torch.device("meta"):
        module = transformers.ElectraForPreTraining(config)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config.to_dict() | {"architectures": ["ElectraForPreTraining"]}))
    network = import_network("hf", str(file), sizes={"seq": 32})
    assert network.graph.parameters == sum(p.numel() for p in module.parameters())
    assert network.model.params["seq"] == 32
    file.write_text(json.dumps(config.to_dict() | {"architectures": ["ElectraForEverything"]}))
    with pytest.raises(SpecError, match="transformers has no 'ElectraForEverything'"):
        import_network("hf", str(file))


_DECODER = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 50,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "sliding_window": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MIXTURE = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
_LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 16}
_INDEX = {"index_topk": 32, "index_n_heads": 2, "index_head_dim": 16}
_EMBEDDED = {"vocab_size_per_layer_input": 50, "hidden_size_per_layer_input": 8, "global_head_dim": 16}
#: Families as transformers 5 saves them: kinds of layers by their names, indexers, embeddings for each layer.
SAVED: dict[str, dict[str, Any]] = {
    "gemma4_text": _EMBEDDED | {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2},
    "mimo_v2_flash": _MIXTURE | {"v_head_dim": 4},
    "minimax_m3_vl_text": {
        "dense_intermediate_size": 64, "shared_intermediate_size": 16, "num_local_experts": 4, "index_block_size": 8,
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "mlp_layer_types": ["dense", *["sparse"] * 3],
        "index_n_heads": 2, "index_head_dim": 8,
    },
    "deepseek_v32": _MIXTURE | _LATENT | _INDEX | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]},
    "axk2": _MIXTURE | _LATENT | _INDEX | {"num_key_value_heads": 4},
    "mistral_large4_text": _MIXTURE | _LATENT | _INDEX | {"num_key_value_heads": 4, "no_rope_layers": [1, 0, 1, 0]},
}  # fmt: skip


@pytest.mark.parametrize("kind", SAVED)
def test_what_transformers_saves_has_the_parameters_of_its_modules(tmp_path: Path, kind: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.CONFIG_MAPPING[kind](**_DECODER | SAVED[kind])
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        auto = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        module = (auto if type(config) in auto else transformers.MODEL_MAPPING)[type(config)](config)
    assert import_network("hf", str(tmp_path)).graph.parameters == sum(p.numel() for p in module.parameters())


def test_an_indexer_that_is_traced_chooses_all_keys(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.CONFIG_MAPPING["axk2"](**_DECODER | SAVED["axk2"]).save_pretrained(tmp_path)
    network = import_network("hf", str(tmp_path)).model
    assert "seq" not in network.params and network.notes.endswith(
        "fixed at 32 tokens, of which an indexer chooses all keys."
    )
    with pytest.raises(SpecError, match="index_topk: in sequences longer than 32 tokens an indexer chooses keys"):
        import_network("hf", str(tmp_path), sizes={"seq": 64})


def test_the_librarys_own_remarks_are_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers"), pytest.importorskip("torch")
    from paleo.cli import run_command_line as run

    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "mamba", "hidden_size": 8, "layer_types": ["full_attention"]}))
    run(["import", "hf", str(file), "--size", "seq=16"])
    assert "transformers]" not in capfd.readouterr().err


def test_a_configuration_is_a_model_in_python(tmp_path: Path) -> None:
    model = paleo.from_hf(written(tmp_path), seq=64)
    assert model.params["seq"] == 64 and paleo.estimate(model, "dgx-h100", batch=1).tokens_per_s


def sizes(hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, **more: Any) -> dict[str, Any]:
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return shape | {"num_key_value_heads": kv_heads, "intermediate_size": ffn, "vocab_size": vocab} | more


#: Published configurations and the parameters that transformers counts for them.
PUBLISHED = [
    ("olmo2", sizes(2048, 16, 16, 16, 8192, 100352), 1_484_916_736),
    ("olmo3", sizes(4096, 32, 32, 32, 11008, 100278, sliding_window=4096), 7_298_011_136),
    ("olmoe", sizes(2048, 16, 16, 16, 1024, 50304, num_experts=64, num_experts_per_tok=8), 6_919_161_856),
    ("glm4", sizes(4096, 40, 32, 2, 13696, 151552, head_dim=128, attention_bias=True), 9_400_279_040),
    ("cohere2", sizes(4096, 32, 32, 8, 14336, 256000, tie_word_embeddings=True, sliding_window=4096), 8_028_033_024),
    ("ernie4_5", sizes(1024, 18, 16, 2, 3072, 103424, head_dim=128, use_bias=False), 360_748_032),
    ("hunyuan_v1_dense", sizes(2048, 32, 16, 4, 6144, 120818, head_dim=128, tie_word_embeddings=True), 1_791_080_448),
    ("seed_oss", sizes(5120, 64, 80, 8, 27648, 155136, head_dim=128, attention_bias=True), 36_151_104_512),
    (
        "glm4_moe",
        sizes(
            4096, 46, 96, 8, 10944, 151552, head_dim=128, attention_bias=True, moe_intermediate_size=1408,
            n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1, first_k_dense_replace=1,
        ),
        106_852_245_504,
    ),
    ("granitemoe", sizes(1536, 32, 24, 8, 512, 49155, num_local_experts=40, num_experts_per_tok=8), 3_298_793_472),
]  # fmt: skip


@pytest.mark.parametrize(("family", "stated", "parameters"), PUBLISHED, ids=[family for family, _, _ in PUBLISHED])
def test_a_published_configuration_has_its_parameters(
    tmp_path: Path, family: str, stated: dict[str, Any], parameters: int
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": family} | stated))
    assert import_network("hf", str(file)).graph.parameters == parameters


def test_numbers_that_json_lacks_are_read_as_transformers_5_writes_them(tmp_path: Path) -> None:
    """``{"__float__": "Infinity"}``, in lists and mappings."""
    config = read_config(written(tmp_path, time_step_limit=[0.0, {"__float__": "Infinity"}], other={"__float__": "x"}))
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert config["other"] == {"__float__": "x"}


def test_short_sequences_of_sparse_attention_see_all_keys(tmp_path: Path) -> None:
    """Up to ``top_k`` positions attention runs in its heads, beyond that in latent space; weights stay the same."""
    stated = {
        "model_type": "deepseek_v32", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "vocab_size": 100, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 128,
    }  # fmt: skip
    file = tmp_path / "config.json"
    file.write_text(json.dumps(stated))
    short, long = (import_network("hf", str(file), sizes={"seq": seq}) for seq in (128, 4096))
    assert short.graph.parameters == long.graph.parameters
    core = [
        sum(k.flops for n in each.graph.nodes for op in n.operations if op.name.endswith(".core")
            for k in op.forward_kernels(default_precision("bf16")))
        for each in (short, long)
    ]  # fmt: skip
    assert core[0] == 2 * 2 * 128 * 128 * 4 * (24 + 16)  # two layers; heads of 24 and 16
    assert core[1] == 2 * 2 * 4096 * 128 * 4 * (40 + 32)  # latents of 32 + 8 and 32


def test_layers_of_nemotron_h_by_their_letters_and_by_the_names_of_transformers_5(tmp_path: Path) -> None:
    """Infinity is written as transformers 5 writes it."""
    sizes = {"mamba_num_heads": 4, "mamba_head_dim": 4, "n_groups": 2, "ssm_state_size": 4, "head_dim": 4}
    sizes |= {"time_step_limit": [0.0, {"__float__": "Infinity"}], "num_hidden_layers": 3}
    named = ["linear_attention", "full_attention", "mlp"]
    texts = []
    for pattern in ({"hybrid_override_pattern": "M*-"}, {"layers_block_type": named}):
        mapping = model_file_of_config(written(tmp_path, model_type="nemotron_h", **sizes, **pattern))
        texts.append(validated_yaml(mapping))
    assert texts[0] == texts[1]
