"""Model files to graphs: names, loops, branches, shared weights, counts of what is kept."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paleo.errors import GraphError, SpecError
from paleo.lowering.kernel_launches import SavedTensorCounter
from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import default_precision
from paleo.specs.model import ModelSpec, build_model_spec

CONV = {"conv": {"channels": 8, "kernel": 3, "padding": 1}}
FP32 = default_precision("fp32")


def spec(*layers: Any, **more: Any) -> ModelSpec:
    image = {"dims": {"batch": "=batch", "channels": 8, "height": 4, "width": 4}}
    head = {"title": "t", "task": "t", "source": "t", "inputs": {"image": image}}
    return build_model_spec(head | {"layers": list(layers)} | more, "t.yaml")


def graph(*layers: Any, batch: int = 2, **more: Any) -> Graph:
    return build_graph(spec(*layers, **more), batch=batch)


def kept(of: Graph) -> float:
    """Bytes kept for backward, in fp32."""
    storage = SavedTensorCounter(of)
    saved = ((node, tensor) for node in of.nodes for op in node.operations for tensor in op.saved_tensors)
    return sum(t.bytes(FP32) * storage.count_new_copies(t, node) for node, t in saved if t.role != "parameter")


def test_layers_follow_one_another() -> None:
    made = graph(CONV, "relu", {"name": "head", "conv": {"channels": 4, "kernel": 1}})
    assert [node.name for node in made.nodes] == ["conv1", "relu1", "head"]
    assert [node.inputs[0].name for node in made.nodes] == ["image", "conv1", "relu1"]
    assert made.nodes[-1].out.sizes == (2, 4, 4, 4)
    assert made.parameters == (8 * 9 + 1) * 8 + (8 + 1) * 4


def test_inputs_and_branches() -> None:
    network = graph(
        {"name": "stem", "relu": {}},
        {"branches": [[CONV], []], "join": "add", "name": "block"},
        {"add": {}, "inputs": ["stem", "block"]},
    )
    assert {node.name: [tensor.name for tensor in node.inputs] for node in network.nodes} == {
        "stem": ["image"], "block.1.conv1": ["stem"], "block.add": ["block.1.conv1", "stem"],
        "add1": ["stem", "block.add"],
    }  # fmt: skip


def test_a_loop_of_constant_shape_is_one_node_and_another_is_written_out() -> None:
    folded = graph({"repeat": 5, "name": "body", "layers": [CONV, "relu"]})
    assert [(node.name, node.repeat) for node in folded.nodes] == [("body.conv1", 5), ("body.relu1", 5)]
    assert folded.parameters == 5 * (8 * 9 + 1) * 8
    grown = graph({"repeat": 3, "layers": [{"branches": [["relu"], ["relu"]], "join": "concat"}]})
    assert [node.repeat for node in grown.nodes] == [1] * 9
    assert grown.nodes[-1].out.sizes == (2, 64, 4, 4)
    nested = graph({"repeat": 2, "layers": [{"repeat": 3, "layers": ["relu"]}]})
    assert [(node.name, node.loops) for node in nested.nodes] == [
        ("repeat1.repeat1.relu1", (("repeat1", 2), ("repeat1.repeat1", 3)))
    ]
    assert graph({"repeat": 0, "layers": ["relu"]}, "relu").nodes[0].name == "relu1"


LOOPS: dict[str, list[Any]] = {
    "pool before": [{"avg_pool": {"kernel": 2}}, {"repeat": 3, "layers": [CONV, "relu"]}],
    "kept before": ["relu", {"repeat": 3, "layers": [CONV]}],
    "kept after": [{"repeat": 3, "layers": [CONV]}, CONV],
    "kept by two": [{"repeat": 3, "layers": [{"branches": [[CONV], [CONV]], "join": "add"}]}, CONV],
    "input needed": ["relu", {"repeat": 3, "layers": [CONV, "gelu"]}, "gelu"],
    "nested": [{"repeat": 3, "layers": [{"repeat": 2, "layers": [CONV, "relu"]}, "gelu"]}],
    "residual": ["relu", {"repeat": 3, "layers": [{"branches": [[CONV, "relu", CONV], []], "join": "add"}, "relu"]}],
    "from outside": [
        {"name": "far", "relu": {}},
        CONV,
        {"repeat": 3, "layers": [{"name": "m", "multiply": {}, "inputs": ["far", "far"]}, CONV]},
    ],
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_folded_loop_keeps_what_its_turns_keep(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = spec(*LOOPS[name])
    folded = build_graph(model, batch=2)
    monkeypatch.setattr("paleo.network.graph._Builder._fold_loop", lambda *_: None)
    written = build_graph(model, batch=2)
    assert len(folded.nodes) < len(written.nodes)
    assert kept(folded) == kept(written)
    assert folded.parameters == written.parameters


def test_what_is_kept_by_hand() -> None:
    """One image of 8 x 4 x 4 in fp32 is 512 bytes; conv keeps its input, relu its output."""
    assert kept(graph(CONV, "relu", batch=1)) == 2 * 512
    assert kept(graph(CONV, "relu", CONV, batch=1)) == 2 * 512
    assert kept(graph(CONV, CONV, batch=1)) == 2 * 512
    assert kept(graph({"repeat": 10, "layers": [CONV, "relu"]}, batch=1)) == 11 * 512


def test_names_cannot_meet() -> None:
    """What stands inside a loop is called after it, as are the inner tensors of a layer of that name."""
    clashes: list[tuple[Any, ...]] = [
        ("relu", {"name": "relu1", "relu": {}}),
        ({"name": "repeat1", "relu": {}}, {"repeat": 2, "layers": ["relu"]}),
        ({"name": "branch1", "relu": {}}, {"branches": [["relu"], []], "join": "add"}),
    ]
    for layers in clashes:
        with pytest.raises(GraphError, match="two layers are named"):
            graph(*layers)
    with pytest.raises(GraphError, match="'image' stands twice"):
        graph({"name": "image", "relu": {}})
    features = {"relu1": {"dims": {"batch": "=batch", "features": 3}}}
    with pytest.raises(GraphError, match="two layers are named 'relu1'"):
        graph("relu", inputs=features)
    with pytest.raises(GraphError, match="two layers are named 'b1'"):
        graph({"name": "b1", "relu": {}}, "b", blocks={"b": {"layers": ["relu"]}})


def test_a_view_keeps_its_storage() -> None:
    made = graph("relu", {"name": "flat", "flatten": {}}, {"linear": {"features": 3}})
    flat = next(node for node in made.nodes if node.name == "flat")
    assert flat.operations == ()
    assert (flat.out.name, flat.out.dims) == ("relu1", ("batch", "features"))
    assert kept(made) == 2 * 512, "the output of relu, which linear reads through the view, once"


def test_a_part_that_keeps_its_whole_counts_it_once() -> None:
    """Half (256 bytes) of an activation (512) that a convolution reads: all of it is kept, once where others keep it,
    too; of a loop what enters it and what its iterations hand on."""
    half = {"dims": {"batch": "=batch", "channels": 4, "height": 4, "width": 4}}
    for whole, part in ((False, 256), (True, 512)):
        view = {"view": half | {"keeps_whole": whole}}
        assert kept(graph(CONV, view, CONV, batch=1)) == 512 + part
        assert kept(graph(CONV, "relu", view, CONV, batch=1)) == 2 * 512 + (0 if whole else part)
        assert kept(graph(CONV, {"repeat": 5, "layers": [view, CONV]}, batch=1)) == 512 + 5 * part


def test_blocks_have_arguments_and_their_own_names() -> None:
    blocks = {
        "unit": {"args": {"width": "required", "stride": 1}, "layers": [
            {"name": "a", "conv": {"channels": "=width", "kernel": 1, "stride": "=stride"}},
            {"when": "=stride > 1", "relu": {}},
            {"add": {}, "inputs": ["a", "a"]},
        ]},
    }  # fmt: skip
    made = graph(
        {"unit": {"width": 8}}, {"name": "two", "unit": {"width": "=2 * in_channels", "stride": 2}}, blocks=blocks
    )
    assert [node.name for node in made.nodes] == ["unit1.a", "unit1.add1", "two.a", "two.relu1", "two.add1"]
    assert made.nodes[-1].out.sizes == (2, 16, 2, 2)


def test_shared_weights_count_once() -> None:
    made = graph({"name": "first", **CONV}, {"name": "second", **CONV, "share": "first"})
    assert made.parameters == (8 * 9 + 1) * 8
    tied = {"words": {"dims": {"batch": "=batch", "seq": 3}, "role": "index"}}
    embedding = {"name": "embed", "embedding": {"entries": 10, "features": 4}}
    head = {"linear": {"features": 10, "dim": "vocab", "bias": False, "tie": "embed"}}
    assert graph(embedding, head, inputs=tied).parameters == 40
    with pytest.raises(GraphError, match=r"shares 'embed\.weight', but the shapes differ"):
        graph(embedding, {"linear": head["linear"] | {"features": 11}}, inputs=tied)


def test_parameters_follow_one_another_and_can_be_replaced() -> None:
    model = spec({"conv": {"channels": "=wide", "kernel": 1}}, params={"base": 4, "wide": "=2 * base"})
    assert build_graph(model, batch=1).hyperparameters == {"batch": 1, "base": 4, "wide": 8}
    assert build_graph(model, batch=1, overrides={"base": 5}).nodes[0].out.size("channels") == 10
    assert build_graph(model, batch=1, overrides={"wide": 3}).nodes[0].out.size("channels") == 3
    with pytest.raises(SpecError, match="nearest: 'wide'"):
        build_graph(model, batch=1, overrides={"wid": 3})
    with pytest.raises(SpecError, match="must be 1 or more"):
        build_graph(model, batch=0)


def test_tokens() -> None:
    assert graph("relu", params={"seq": 7}, tokens="=seq").tokens_per_sample == 7
    assert graph("relu").tokens_per_sample is None


@pytest.mark.parametrize("depth", [1, 10, 20])
def test_nested_loops_multiply_and_cost_no_more(depth: int) -> None:
    layers: list[Any] = ["relu"]
    for _ in range(depth):
        layers = [{"repeat": 2 if depth < 17 else 1, "layers": layers}]
    made = graph(*layers)
    assert len(made.nodes) == 1
    assert made.nodes[0].repeat == (2**depth if depth < 17 else 1)
    assert math.prod(times for _, times in made.nodes[0].loops) == made.nodes[0].repeat


FEATURES = {"inputs": {"x": {"dims": {"batch": "=batch", "features": 4}}}}


def flops_backward(of: Graph) -> float:
    kernels = ((node, k) for node in of.nodes for op in node.operations for k in op.backward_kernels(FP32))
    return sum(node.repeat * kernel.flops for node, kernel in kernels)


def test_a_loop_at_the_input_counts_the_gradients_of_its_later_iterations() -> None:
    """Eight products of 4 x 4 over 2 rows: one copy stands for all, and hands a gradient on as seven of them do."""
    folded = graph({"repeat": 8, "layers": [{"linear": {"features": 4, "dim": "features", "bias": False}}]}, **FEATURES)
    assert flops_backward(folded) == 8 * 2 * (2 * 2 * 4 * 4)


def test_frozen_weights_take_no_gradient_and_none_goes_beyond_them() -> None:
    """Both products forward; backward the weight of the second alone."""
    linear = {"linear": {"features": 4, "dim": "features", "bias": False}}
    model = graph(linear | {"frozen": True}, linear, **FEATURES)
    assert flops_backward(model) == 2 * 2 * 4 * 4
    assert not model.nodes[0].out.needs_gradient and model.nodes[1].out.needs_gradient
    with pytest.raises(GraphError, match="frozen"):
        graph(linear | {"frozen": "yes"}, **FEATURES)
