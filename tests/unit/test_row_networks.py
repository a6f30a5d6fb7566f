"""Which network a row of measured steps ran: names where columns cannot tell, sizes of the row; rows of memory; runs
that ran out of it."""

from typing import Any

import pandas as pd
import pytest

from paleo.errors import SpecError
from paleo.network.graph import build_graph
from paleo.predict import predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.tables.kinds._transformers import (
    NETWORK_NAME_PATTERNS,
    PARAMETERS_OF_SIZE_COLUMN,
    MemoryTable,
    TransformerStepTable,
    catalog_network,
    network_and_sizes,
)

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
    model, sizes = network_and_sizes(row)
    return build_graph(model, batch=1, overrides=sizes).parameters


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
        ("Nemotron V3 Nano 30B (26.02)", "nemotron-3-nano-30b-a3b"),
        ("Llama 3 8B", "llama2-7b"),
    ],
)
def test_names_tell_what_columns_do_not(name: str, family: str) -> None:
    row = DENSE | {"model": name, "n_experts": 8, "top_k": 2} if "moe" in load_model(family).title.lower() else DENSE
    assert (
        network_and_sizes(row | {"model": name, "n_experts": "" if family == "llama2-7b" else 8, "top_k": 2})[0].name
        == family
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
    _, sizes = network_and_sizes(DEEP | {"layers": layers, "notes": notes})
    assert (sizes["layers"], sizes["dense_layers"]) == (layers, dense)
    nodes = build_graph(load_model("deepseek_v3"), batch=1, overrides=sizes).nodes
    assert sum(node.repeat for node in nodes if ".moe" in node.name) == layers - dense


def test_sizes_are_those_of_the_row() -> None:
    for pattern, family in NETWORK_NAME_PATTERNS.items():
        model = load_model(family)
        row = DENSE | {"model": model.title, "n_experts": 8, "top_k": 2, "kv_heads": 4}
        found, sizes = network_and_sizes(row)
        assert found.name == family, pattern
        for column, names in PARAMETERS_OF_SIZE_COLUMN.items():
            parameter = next((one for one in names if one in model.params), None)
            assert parameter is None or sizes[parameter] == row[column], (family, column)


def test_notes_state_heads_of_another_width() -> None:
    wide = DENSE | {"notes": "arch columns from public config (head_dim 128; ffn_hidden is per expert)"}
    assert parameters(wide) - parameters(DENSE) == 2 * 256 * (4 + 2 + 2 + 4) * (128 - 64)


def test_grouped_heads_without_a_gate() -> None:
    model, sizes = network_and_sizes(DENSE | {"gated_mlp": 0})
    assert model.name == "nemotron-340b" and sizes["kv_heads"] == 2
    with pytest.raises(SpecError, match="grouped-query attention in opt-125m"):
        network_and_sizes(DENSE | {"model": "OPT-1.3B", "gated_mlp": 0})


def test_what_a_row_does_not_state() -> None:
    bare = DENSE | dict.fromkeys(("layers", "hidden", "heads", "vocab", "ffn_hidden", "kv_heads"), float("nan"))
    assert parameters(bare | {"model": "Qwen2.5 7B [LoRA]"}) == load_model("qwen2.5-7b").expect.parameters[0]  # type: ignore[union-attr]
    with pytest.raises(SpecError, match="layers is not stated"):
        network_and_sizes(bare | {"gated_mlp": float("nan")})
    with pytest.raises(SpecError, match="ffn_hidden is not stated"):
        network_and_sizes(DENSE | {"ffn_hidden": float("nan")})
    _, sizes = network_and_sizes(DENSE | {"ffn_hidden": float("nan"), "gated_mlp": 0, "kv_heads": float("nan")})
    assert "ffn" not in sizes, "GPT's is four times the hidden size"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Llama 3.1 8B", "llama3-8b"),
        ("LLAMA2-70B [SFT]", "llama2-70b"),
        ("GPT-3 175B", "gpt3-175b"),
        ("OPT 1.3B", "opt-1.3b"),
        ("OPT-13B", "opt-13b"),
        ("Mixtral 8x7B", "mixtral-8x7b"),
        ("DeepSeek V2", "deepseek_v2"),
        ("Qwen3-4B", "qwen3-4b"),
    ],
)
def test_networks_known_by_their_names_alone(name: str, found: str) -> None:
    assert catalog_network(name).name == found


def test_a_name_that_the_catalog_does_not_have() -> None:
    with pytest.raises(SpecError, match="'Foo 8B' are not stated, and no network of the catalog"):
        catalog_network("Foo 8B")


MEMORY = {
    "model": "Llama 3.1 8B", "device": "h100-sxm5-80gb", "n_gpus": 8, "tp": 1, "pp": 1, "dp": 8, "seq_len": 8192,
    "micro_batch": 1, "global_batch": 8, "dtype": "bf16", "sharding": "zero3", "recompute": "full", "notes": "",
    "source": "torchtitan performance", "memory_gb_per_gpu": 40.0,
}  # fmt: skip


def test_memory_of_networks_of_the_catalog() -> None:
    table = MemoryTable()
    assert (
        table.software_profile(MEMORY) == "torchtitan" and table.software_profile(MEMORY | {"source": ""}) == "nanotron"
    )
    run = Run(
        gpus=8, global_batch=8, microbatch=1, dtype="bf16", strategy="dp=8,zero=3", recompute="full",
        software="torchtitan", model={"seq": 8192},
    )  # fmt: skip
    made = predict(load_model("llama3-8b"), load_system("dgx-h100"), run)
    assert table.predict_row(MEMORY).value == made.memory.allocated
    many = MEMORY | {"device": "h100-sxm5-96gb-500w"}
    assert table.predict_row(many).device_name == "h100-sxm5-96gb-500w", "a system of the catalog that has such devices"


def test_runs_that_ran_out_of_memory() -> None:
    dead = MEMORY | {"memory_gb_per_gpu": float("nan"), "kind": "OOM", "sharding": "none", "recompute": "none"}
    frame = pd.DataFrame([dead, dead | {"sharding": "zero3"}, dead | {"kind": ""}, dead | {"model": "Foo"}])
    reasons = MemoryTable().predict(frame).failure_reasons.tolist()
    assert reasons[:2] == ["ran out of memory; predicted: does not fit", "ran out of memory; predicted: fits, WRONGLY"]
    assert reasons[2] == "memory_gb_per_gpu is empty: nothing to compare with"
    assert reasons[3].startswith("ran out of memory; predicted: is not modelled (the sizes of 'Foo'")


def test_steps_of_runs_that_ran_out_of_memory() -> None:
    row = DENSE | {
        "model": "Llama 2 7B", "layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn_hidden": 11008,
        "vocab": 32000, "seq_len": 4096, "device": "h100-sxm5-80gb", "n_gpus": 8, "tp": 1, "pp": 1, "dp": 8,
        "dtype": "bf16", "micro_batch": 1, "global_batch": 8, "recompute": "",
        "software": "megatron-core", "sharding": "none", "iteration_ms": float("nan"), "notes": "CUDA out of memory",
    }  # fmt: skip
    frame = pd.DataFrame([row, row | {"tp": 8, "dp": 1}])
    reasons = TransformerStepTable().predict(frame).failure_reasons.tolist()
    assert reasons == ["ran out of memory; predicted: does not fit", "ran out of memory; predicted: fits, WRONGLY"]


@pytest.mark.parametrize(
    ("name", "network"),
    [
        ("DeepSeek-V3.2", "deepseek_v3.2"),
        ("DeepSeekV4 Flash", "deepseek_v4-flash"),
        ("Nemotron_3_Super", "nemotron-3-super-120b-a12b"),
        ("Nemotron V3 Super 120B (26.02)", "nemotron-3-super-120b-a12b"),
    ],
)
def test_networks_of_the_catalog_need_no_sizes(name: str, network: str) -> None:
    model, sizes = network_and_sizes({"model": name, "seq_len": 4096})
    assert (model.name, sizes) == (network, {"seq": 4096})


NANOTRON = {
    "device": "h100-sxm5-80gb", "system": "aws-p5.48xlarge", "seq_len": 4096, "micro_batch": 2, "global_batch": 256,
    "dtype": "bf16", "sharding": "zero1", "sequence_parallel": 1, "recompute": "", "notes": "", "software": "nanotron",
    "what": "peak memory of best configuration",
}  # fmt: skip


def test_memory_that_the_first_process_reports() -> None:
    """nanotron's table is written by rank 0, on the first of two stages; 4 GiB of logits are on the second (8.40 GiB
    measured)."""
    row = NANOTRON | {"model": "Llama-like 1.34B", "n_gpus": 512, "tp": 2, "pp": 2, "dp": 128}
    table = MemoryTable()
    first, fullest = table.predict_row(row).value, table.predict_memory(row).allocated
    assert first == pytest.approx(8.40 * 2**30, rel=0.05) and fullest > 1.2 * first
    assert table.predict_row(row | {"what": "max over ranks"}).value == fullest


def test_inputs_are_gathered_again_where_whole_ones_would_fill_the_device() -> None:
    """80 layers of inputs of 4 times 128 MiB each: 72 GiB with all of them whole, 53.46 GiB measured."""
    row = NANOTRON | {"model": "Llama-like 80.0B", "n_gpus": 512, "tp": 16, "pp": 1, "dp": 32}
    died = row | {"notes": "ran out of memory"}
    table = MemoryTable()
    assert table.predict_row(row).value == pytest.approx(53.46 * 2**30, rel=0.05)
    assert table.predict_memory(died).allocated > 1.3 * table.predict_memory(row).allocated
