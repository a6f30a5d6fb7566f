"""Which network a row of measured steps ran: names where columns cannot tell, sizes of the row."""

from typing import Any

import pytest

from paleo.errors import SpecError
from paleo.graph import build
from paleo.specs.model import load_model
from paleo.validate.steps.networks import COLUMNS, NAMED, network_of

DENSE = {"model": "?", "layers": 2, "hidden": 256, "heads": 4, "vocab": 1024, "seq_len": 128, "gated_mlp": 1}
DENSE |= {"ffn_hidden": 512, "kv_heads": 2, "notes": ""}
DEEP = DENSE | {
    "model": "DeepSeek-V3",
    "hidden": 7168,
    "heads": 128,
    "kv_heads": 128,
    "vocab": 129280,
    "ffn_hidden": 2048,
}
DEEP |= {"n_experts": 256, "top_k": 8, "layers": 61, "seq_len": 4096}


def parameters(row: dict[str, Any]) -> float:
    model, sizes = network_of(row)
    return build(model, batch=1, overrides=sizes).parameters


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("DeepSeek V3 671B", "deepseek_v3"),
        ("deepseek_v2 l4", "deepseek_v2"),
        ("DeepSeek-V2-Lite", "deepseek_v2-lite"),
        ("Kimi K2", "kimi_k2"),
        ("GPT-OSS 20B", "gpt-oss-20b"),
        ("Qwen3 MoE 30B", "qwen3-30b-a3b"),
        ("Qwen3-235B-A22B", "qwen3-30b-a3b"),
        ("Qwen3 32B", "qwen3-8b"),
        ("Qwen2.5 7B [LoRA]", "qwen2.5-7b"),
        ("Nemotron-340B", "nemotron-340b"),
        ("Llama 3 8B", "llama2-7b"),
    ],
)
def test_names_tell_what_columns_do_not(name: str, family: str) -> None:
    row = DENSE | {"model": name, "n_experts": 8, "top_k": 2} if "moe" in load_model(family).title.lower() else DENSE
    assert (
        network_of(row | {"model": name, "n_experts": "" if family == "llama2-7b" else 8, "top_k": 2})[0].name == family
    )


def test_the_published_network_comes_out_of_its_row() -> None:
    assert parameters(DEEP) == load_model("deepseek_v3").expect.parameters[0]  # type: ignore[union-attr]
    assert parameters(DEEP | {"ffn_hidden": 18432}) == parameters(DEEP), (
        "the width of dense layers is not that of experts"
    )
    half = DEEP | {"model": "Kimi K2", "heads": 64, "n_experts": 384, "vocab": 163840}
    assert parameters(half) == load_model("kimi_k2").expect.parameters[0]  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("layers", "notes", "dense"),
    [(61, "", 3), (4, "", 3), (3, "", 2), (1, "", 0), (4, "first 1 layers dense", 1), (4, "dense_layers=0", 0)],
)
def test_stacks_that_are_cut_short(layers: int, notes: str, dense: int) -> None:
    _, sizes = network_of(DEEP | {"layers": layers, "notes": notes})
    assert (sizes["layers"], sizes["dense_layers"]) == (layers, dense)
    nodes = build(load_model("deepseek_v3"), batch=1, overrides=sizes).nodes
    assert sum(node.repeat for node in nodes if ".moe" in node.name) == layers - dense


def test_sizes_are_those_of_the_row() -> None:
    for pattern, family in NAMED:
        model = load_model(family)
        row = DENSE | {"model": model.title, "n_experts": 8, "top_k": 2, "kv_heads": 4}
        found, sizes = network_of(row)
        assert found.name == family, pattern
        for column, names in COLUMNS.items():
            parameter = next((one for one in names if one in model.params), None)
            assert parameter is None or sizes[parameter] == row[column], (family, column)


def test_notes_state_heads_of_another_width() -> None:
    wide = DENSE | {"notes": "arch columns from public config (head_dim 128; ffn_hidden is per expert)"}
    assert parameters(wide) - parameters(DENSE) == 2 * 256 * (4 + 2 + 2 + 4) * (128 - 64)


def test_grouped_heads_without_a_gate() -> None:
    model, sizes = network_of(DENSE | {"gated_mlp": 0})
    assert model.name == "nemotron-340b" and sizes["kv_heads"] == 2
    with pytest.raises(SpecError, match="grouped-query attention in opt-125m"):
        network_of(DENSE | {"model": "OPT-1.3B", "gated_mlp": 0})


def test_what_a_row_does_not_state() -> None:
    bare = DENSE | dict.fromkeys(("layers", "hidden", "heads", "vocab", "ffn_hidden", "kv_heads"), float("nan"))
    assert parameters(bare | {"model": "Qwen2.5 7B [LoRA]"}) == load_model("qwen2.5-7b").expect.parameters[0]  # type: ignore[union-attr]
    with pytest.raises(SpecError, match="layers is not stated"):
        network_of(bare | {"gated_mlp": float("nan")})
    with pytest.raises(SpecError, match="ffn_hidden is not stated"):
        network_of(DENSE | {"ffn_hidden": float("nan")})
    _, sizes = network_of(DENSE | {"ffn_hidden": float("nan"), "gated_mlp": 0, "kv_heads": float("nan")})
    assert "ffn" not in sizes, "GPT's is four times the hidden size"
