"""Latent attention where sequences are split over tp: who projects latents of which tokens, what travels, what is kept,
and whose gradients are summed over tp (Megatron-Core's multi_latent_attention.py)."""

from __future__ import annotations

from typing import Literal

import pytest

from paleo.layers.base import LayerImplementations
from paleo.network.graph import build_graph
from paleo.operations.base import MemoryPass
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import default_precision
from paleo.parallel.placement import STRATEGY_PRESETS, Mesh, parse_strategy, strategy_placement
from paleo.parallel.propagation import LocalLayer, propagate_placement, without_regather
from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system

#: DeepSeek-V3: hidden size, latents of queries and of keys and values, rotary key; tokens, and ranks of tp.
HIDDEN, QUERY, KEYS, ROTARY, TOKENS, TP = 7168, 1536, 512, 64, 4096, 8
Latents = Literal["own", "all"]


def placed(
    latents: Latents,
    strategy: str = "tp=8,sp",
    network: str = "deepseek_v3",
    rotation: Literal["fused", "stepwise"] = "fused",
    **degrees: int,
) -> LocalLayer:
    choices = LayerImplementations(latent_tokens=latents, rotation=rotation)
    graph = build_graph(load_model(network), batch=1, choices=choices, overrides={"seq": TOKENS})
    rules = STRATEGY_PRESETS["dp"](graph, parse_strategy(strategy))
    layers = propagate_placement(graph, rules, Mesh.from_degrees({"tp": TP, "dp": 2, **degrees}))
    return next(layer for layer in layers if layer.node.type == "latent_attention")


def numbers_a_token(layer: LocalLayer, operation: str, phase: str) -> list[float]:
    """Numbers that a token has in each collective over tp."""
    return sorted(
        owed.tensor.elements / TOKENS
        for owed in layer.communications
        if (owed.operation, owed.phase, owed.axis) == (operation, phase, "tp")
    )


def test_latents_of_own_tokens_are_gathered_and_their_gradients_scattered() -> None:
    """Forward 1,536 + 512 + 64 numbers a token; backward the same, and what products keep is gathered again."""
    own = placed("own")
    assert numbers_a_token(own, "all_gather", "forward") == [ROTARY, KEYS, QUERY]
    assert numbers_a_token(own, "reduce_scatter", "backward") == [ROTARY, KEYS, QUERY]
    assert numbers_a_token(own, "all_gather", "backward") == [KEYS, QUERY]
    assert numbers_a_token(own, "all_reduce", "backward") == []


def test_inputs_are_gathered_where_every_rank_projects_all_tokens() -> None:
    everyone = placed("all")
    assert numbers_a_token(everyone, "all_gather", "forward") == [HIDDEN]
    assert numbers_a_token(everyone, "all_gather", "backward") == [HIDDEN]
    assert numbers_a_token(everyone, "all_reduce", "backward") == [KEYS, QUERY]
    assert numbers_a_token(everyone, "reduce_scatter", "backward") == []


def test_down_projections_work_on_own_tokens_with_whole_weights() -> None:
    sizes = {}
    for latents in ("own", "all"):
        layer = placed(latents)  # type: ignore[arg-type]
        products = {each.name.rpartition(".")[2]: each for each in layer.operations if isinstance(each, Contraction)}
        sizes[latents] = [products[name].out.sizes for name in ("q_down", "kv_down", "query")]
    heads = (1, TOKENS, 128 // TP, 1, 192)
    assert sizes["own"] == [(1, TOKENS // TP, QUERY), (1, TOKENS // TP, KEYS + ROTARY), heads]
    assert sizes["all"] == [(1, TOKENS, QUERY), (1, TOKENS, KEYS + ROTARY), heads]


def test_gradients_of_duplicated_weights_are_summed_over_tp() -> None:
    summed = {tensor.name.split(".")[-2]: (axes, tensor.elements) for tensor, axes in placed("own").parameters}
    assert summed["q_down"] == (("dp", "tp"), HIDDEN * QUERY)
    assert summed["kv_down"] == (("dp", "tp"), HIDDEN * (KEYS + ROTARY))
    assert summed["q_norm"][0] == summed["kv_norm"][0] == ("dp", "tp")
    assert summed["query"][0] == summed["kv_up"][0] == summed["out"][0] == ("dp",)
    assert all(axes == ("dp",) for _, axes in placed("all").parameters)


def test_sums_of_gradients_are_all_that_is_owed_where_sequences_are_whole() -> None:
    own = placed("own", "tp=8")
    assert numbers_a_token(own, "all_reduce", "backward") == [ROTARY, KEYS, QUERY]
    assert {owed.operation for owed in own.communications} == {"all_reduce"}
    assert placed("own", "dp=2", tp=1).communications == ()


def test_a_query_without_latents_gathers_the_input_itself() -> None:
    """DeepSeek-V2-Lite projects queries of 2,048 numbers a token; keys and values have latents. The input is kept once,
    as each rank's own tokens."""
    lite = placed("own", network="deepseek_v2-lite")
    assert numbers_a_token(lite, "all_gather", "forward") == [ROTARY, KEYS, 2048]
    assert numbers_a_token(lite, "reduce_scatter", "backward") == [ROTARY, KEYS, 2048]
    assert {name.rpartition(".")[2] for name in lite.gather_group_sizes} == {"kv_norm"}


def test_a_ring_of_keys_owes_nothing_more_for_the_rotary_key() -> None:
    """Each rank of cp rotates its own keys, which then go round."""
    both = placed("own", "tp=8,cp=2,sp", cp=2)
    assert numbers_a_token(both, "all_gather", "forward") == [each / 2 for each in (ROTARY, KEYS, QUERY)]
    round_the_ring = [(owed.operation, owed.phase) for owed in both.communications if owed.axis == "cp"]
    assert sorted(set(round_the_ring)) == [
        ("all_gather", "backward"),
        ("all_gather", "forward"),
        ("reduce_scatter", "backward"),
    ]


def test_a_stated_placement_of_the_sequence_holds_before_latents_and_for_shared_experts_too() -> None:
    graph = build_graph(
        load_model("deepseek_v3"), batch=1, choices=LayerImplementations(latent_tokens="own"), overrides={"seq": TOKENS}
    )
    rules = strategy_placement(graph, parse_strategy("batch,cp=2"), {"*": {"seq": ["cp"]}})
    layers = {layer.node.type: layer for layer in propagate_placement(graph, rules, Mesh.from_degrees({"cp": 2}))}
    products = [layers["latent_attention"].operations[0], layers["moe"].operations[0]]
    assert [each.out.sizes[:2] for each in products] == [(1, TOKENS // 2)] * 2
    owed = {name: {each.name.rpartition(".")[2] for each in layers[name].communications} for name in layers}
    assert (owed["latent_attention"], owed["moe"]) == ({"core"}, set()), "a ring of keys and no more"


def test_gathered_latents_may_stay_whole() -> None:
    whole = without_regather(placed("own"))
    assert numbers_a_token(whole, "all_gather", "backward") == [] and whole.gather_group_sizes == {}


@pytest.mark.parametrize("latents", ["own", "all"])
def test_a_rotation_by_steps_sums_the_gradient_of_the_rotary_key_alone(latents: Latents) -> None:
    whole = placed(latents, "tp=8", rotation="stepwise")
    assert numbers_a_token(whole, "all_reduce", "backward") == [ROTARY, KEYS, QUERY]
    split = placed("own", rotation="stepwise")
    assert numbers_a_token(split, "reduce_scatter", "backward") == [ROTARY, KEYS, QUERY]


def test_a_rotation_by_steps_passes_over_memory_seventeen_times() -> None:
    """Of 64 rotary numbers: halves, cosines, turned halves, sines and a copy read and write them all, the negative half
    of them, the sum reads twice as many: 14 x 64. Of queries they are joined to the other 128 of each head; of keys,
    one head of them to all; values are copied."""
    layer, heads = placed("own", rotation="stepwise"), 128 / TP
    bf16 = default_precision("bf16")
    passes = {each.name: each.forward_kernels(bf16)[0].bytes / 2 / TOKENS for each in layer.operations
              if isinstance(each, MemoryPass) and each.operation == "eager"}  # fmt: skip
    rotation = 14 * ROTARY
    query, key = (sum(size for name, size in passes.items() if f".{of}.rotary." in name) for of in ("query", "key"))
    assert (query, key) == (rotation * heads, rotation)
    joined = {name.split("attention1.")[-1]: size for name, size in passes.items() if ".rotary." not in name}
    assert joined == {
        "query.rotated": (128 + 64 + 192) * heads,
        "key.rotated": (128 + 192) * heads + 64,
        "value.copy": 2 * 128 * heads,
    }
    assert len(passes) == 17


def test_software_says_whose_tokens() -> None:
    own = [name for name in ("megatron-core", "nemo", "torchtitan", "huggingface-eager", "nemo-automodel")
           if load_software(name).parallelism.latents == "own"]  # fmt: skip
    assert own == ["megatron-core", "nemo"]


def test_latents_of_own_tokens_are_those_of_later_releases() -> None:
    """Megatron-Core 0.14 came out in 2025-10."""
    for name in ("megatron-core@0.13", "nemo@25.07"):
        assert load_software(name).parallelism.latents == "all"
    for name in ("megatron-core@0.14", "nemo@26.04"):
        assert load_software(name).parallelism.latents == "own"


def test_megatron_has_no_buffers_to_gather_latents_beside_products() -> None:
    """Its first product of latent attention turns the overlap over tp off for all layers."""

    def pieces(network: str, software: str) -> set[int]:
        run = {"gpus": 8, "batch": 1, "dtype": "bf16", "strategy": "tp=8,sp", "model": {"layers": 4, "seq": 1024}}
        asked = Run.model_validate(run | {"software": software})
        program = predict(load_model(network), load_system("dgx-h100"), asked).program
        blocks = (section for section in program.sections if section.repeat > 1)
        return {each.overlap_chunks for section in blocks for each in section.collectives if not each.overlapped}

    assert pieces("deepseek_v3", "megatron-core") == {1}
    assert pieces("llama3-8b", "megatron-core") == {8}


def predicted(latents: Latents, **run: object) -> Prediction:
    software = load_software("megatron-core").with_fields({"parallelism.latents": latents})
    asked = {"gpus": 8, "batch": 1, "dtype": "bf16", "strategy": "tp=8,sp", "model": {"layers": 4, "seq": TOKENS}}
    asked |= {"software": "megatron-core", **run}
    return predict(load_model("deepseek_v3"), load_system("dgx-h100"), Run.model_validate(asked), software)


def test_latents_before_and_after_their_norms_are_kept_for_own_tokens() -> None:
    """Four layers, 2 bytes a number, seven eighths of the tokens less."""
    saved = predicted("all").memory.activations - predicted("own").memory.activations
    assert saved == pytest.approx(4 * 2 * (QUERY + KEYS) * 2 * TOKENS * 7 / 8)


def test_modules_that_run_again_gather_latents_again_but_not_the_rotary_key() -> None:
    program = predicted("own", recompute={"policy": "selective", "modules": ["mla_up_proj"]}).program
    gathers = {
        transfer.name.rpartition(".")[2]: transfer.selectively_recomputed
        for section in program.sections
        for transfer in section.collectives
        if "latent" in transfer.name and (transfer.operation, transfer.phase) == ("all_gather", "forward")
    }
    assert gathers == {"query": True, "kv_up": True, "kv_down": False}
