"""Transformer formulas of the Megatron papers, and hand-worked counts of recurrent and attention layers."""

from __future__ import annotations

from typing import Any

import pytest

from paleo.errors import GraphError
from paleo.layers.base import LayerImplementations
from paleo.network.graph import Graph, Node, build_graph
from paleo.operations.tensor import default_precision
from paleo.specs.catalog import entry_names
from paleo.specs.model import build_model_spec, load_model

FP32, FP16 = default_precision("fp32"), default_precision("fp16")
MEGATRON = [name for name in entry_names("models") if name.startswith("megatron-")]


def forward_flops(nodes: list[Node]) -> float:
    return sum(k.flops * node.repeat for node in nodes for op in node.operations for k in op.forward_kernels(FP32))


def backward_flops(nodes: list[Node]) -> float:
    return sum(k.flops * node.repeat for node in nodes for op in node.operations for k in op.backward_kernels(FP32))


def saved_bytes(nodes: list[Node]) -> float:
    """What is kept for backward, each tensor once; statistics of norms and attention are left out, as in the papers."""
    kept = {t.name: t for node in nodes for op in node.operations for t in op.saved_tensors if t.role != "statistic"}
    return sum(t.bytes(FP16) for t in kept.values())


def small(layers: list[Any], **dims: int) -> Graph:
    inputs = {"x": {"dims": {"batch": "=batch", **dims}}}
    model = build_model_spec(
        {"title": "t", "task": "t", "source": "t", "inputs": inputs, "layers": layers}, "small.yaml"
    )
    return build_graph(model, batch=2)


@pytest.mark.parametrize("name", MEGATRON)
def test_megatron_parameters_and_flops_follow_the_papers_formulas(name: str) -> None:
    """Narayanan et al. 2021: equation 2 for parameters, equation 3 for FLOP of an iteration with full recomputation."""
    graph = build_graph(load_model(name), batch=2)
    layers, h, s, vocab = (graph.hyperparameters[key] for key in ("layers", "hidden", "seq", "vocab"))
    assert (
        graph.parameters == 12 * layers * h * h + 13 * layers * h + (vocab + s) * h + 2 * h
    )  # and the last layer norm
    blocks, rest = [n for n in graph.nodes if n.repeat > 1], [n for n in graph.nodes if n.repeat == 1]
    iteration = 4 * forward_flops(blocks) + 3 * forward_flops(rest)
    assert iteration == pytest.approx(96 * 2 * s * layers * h * h * (1 + s / (6 * h) + vocab / (16 * layers * h)))


@pytest.mark.parametrize("name", ["megatron-sp-22b", "megatron-sp-175b", "megatron-sp-530b", "megatron-sp-1t"])
def test_saved_activations_of_a_layer_follow_korthikanti(name: str) -> None:
    """Korthikanti et al. 2022, equation 1: s·b·h·(34 + 5·a·s/h) bytes; the second term goes with fusion."""
    for attention, factor in (("unfused", 5), ("fused", 0)):
        graph = build_graph(load_model(name), batch=2, choices=LayerImplementations(attention=attention))  # type: ignore[arg-type]
        s, h, heads = (graph.hyperparameters[key] for key in ("seq", "hidden", "heads"))
        assert saved_bytes([n for n in graph.nodes if n.repeat > 1]) == s * 2 * (34 * h + factor * heads * s)


def test_sequence_length_can_be_chosen() -> None:
    """gpt2: position table grows beyond 1024, attention is quadratic, all else linear in the sequence."""
    model = load_model("gpt2")
    short, long = (build_graph(model, batch=1, overrides={"seq": seq}) for seq in (512, 2048))
    assert long.parameters - short.parameters == 1024 * 768 and short.tokens_per_sample == 512
    quadratic = 12 * 4 * 768
    linear = 12 * 24 * 768**2 + 2 * 768 * 50257
    for graph, seq in ((short, 512), (long, 2048)):
        assert forward_flops(list(graph.nodes)) == linear * seq + quadratic * seq**2


def test_active_parameters_of_mixtures() -> None:
    """Forward FLOP of a token are twice the matrices that it visits, and the scores (3.3 billion active)."""
    graph = build_graph(load_model("qwen3-30b-a3b"), batch=1, overrides={"seq": 1})
    idle = 48 * (128 - 8) * 3 * 2048 * 768
    looked_up = 151936 * 2048
    vectors = 48 * 2 * (2048 + 128) + 2048
    scores = 48 * 4 * 32 * 128
    assert forward_flops(list(graph.nodes)) == 2 * (graph.parameters - idle - looked_up - vectors) + scores
    assert graph.parameters - idle == pytest.approx(3.3e9, rel=0.02)


def test_skip_input_rnn_by_hand() -> None:
    """Both directions read the same 6 gates: 2 · 2 · 5 steps · 2 samples · 6 · 6 multiply-adds, then their sum."""
    graph = small([{"rnn": {"hidden": 6, "bidirectional": True, "merge": "sum", "project": False}}], seq=5, features=6)
    assert graph.parameters == 2 * 6 * 6
    assert forward_flops(list(graph.nodes)) == 2 * 2 * 5 * 2 * 6 * 6
    assert graph.nodes[-1].out.sizes == (2, 5, 6)
    with pytest.raises(GraphError, match="must hold 24 features"):
        small([{"lstm": {"hidden": 6, "project": False}}], seq=5, features=6)


def test_additive_attention_by_hand() -> None:
    """5 queries on 5 keys of width 6 through 4 units: two projections, the score vector, the weighted sum."""
    attention = {"additive_attention": {"hidden": 4, "normalized": True}, "inputs": ["x", "x"]}
    graph = small([{"identity": {}}, attention], seq=5, features=6)
    nodes = list(graph.nodes)
    assert graph.parameters == 2 * 6 * 4 + 4 + 4 + 1
    project, score, context = 2 * (2 * 5) * 6 * 4, 2 * 2 * 5 * 5 * 4, 2 * 2 * 5 * 5 * 6
    assert forward_flops(nodes) == 2 * project + score + context
    assert backward_flops(nodes) == 2 * project + 2 * score + context  # the input x wants no gradient


def test_bert_asks_for_the_masked_tokens_only() -> None:
    graph = build_graph(load_model("bert_large"), batch=4, overrides={"seq": 128})
    head = next(node for node in graph.nodes if node.name == "head")
    assert head.out.sizes == (4, 20, 30522)


def test_translation_models_share_their_tables() -> None:
    """Source, target and (Transformer) output: one table in the Transformer, a table and a classifier in GNMT."""
    for name, tables in (("transformer_big", 33712 * 1024), ("gnmt", 32320 * (1024 + 1025))):
        more = build_graph(load_model(name), batch=1, overrides={"vocab": 1}).parameters
        small_vocab = tables // (33712 if name == "transformer_big" else 32320)
        assert build_graph(load_model(name), batch=1).parameters - more == tables - small_vocab


def test_what_a_loop_reads_from_outside_is_kept_once() -> None:
    """The memory of the encoder serves six decoder layers and is kept once; what goes round in them, six times."""
    graph = build_graph(load_model("transformer_big"), batch=1)
    cross = next(node for node in graph.nodes if node.name == "decoder.branch2.1.attention1")
    norm = next(node for node in graph.nodes if node.name == "decoder.branch1.1.self_attention1.layer_norm1")
    query, memory = cross.inputs
    assert (
        graph.copy_count(memory, cross) == 1
        and graph.copy_count(query, cross) == 6
        and graph.copy_count(cross.out, cross) == 6
    )
    assert graph.copy_count(norm.inputs[0], norm) == 6
