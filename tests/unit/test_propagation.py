"""The rules that insert collectives, on networks small enough to do by hand: which, over which axis, how many bytes."""

from __future__ import annotations

from typing import Any

import pytest

from paleo.errors import PlanError
from paleo.network.graph import Graph, build_graph
from paleo.parallel.placement import (
    STRATEGY_PRESETS,
    Mesh,
    Placement,
    PlacementRule,
    parse_strategy,
    redundant_mesh_axes,
)
from paleo.parallel.propagation import LocalLayer, propagate_placement
from paleo.specs.model import build_model_spec, load_model

BATCH, WIDE = 8, 16
Owed = list[tuple[str, str, str, int]]


def graph(*layers: Any) -> Graph:
    dims = {"batch": "=batch", "hidden": WIDE}
    head = {"title": "t", "task": "t", "source": "t", "inputs": {"x": {"dims": dims}}}
    return build_graph(build_model_spec(head | {"layers": list(layers)}, "t.yaml"), batch=BATCH)


def linear(name: str, dim: str, features: int = WIDE, **more: Any) -> dict[str, Any]:
    return {"name": name, "linear": {"features": features, "dim": dim, "bias": False, **more}}


def placed(of: Graph, rules: dict[str, Any], **degrees: int) -> dict[str, LocalLayer]:
    placement = Placement(tuple(PlacementRule(split, name_pattern=name) for name, split in rules.items()))
    return {one.node.name: one for one in propagate_placement(of, placement, Mesh.from_degrees(degrees))}


def owed(node: LocalLayer) -> Owed:
    return sorted((c.operation, c.axis, c.phase, int(c.tensor.elements)) for c in node.communications)


FIRST = linear("stem", "hidden")  # so that what follows reads something that needs a gradient


def test_nothing_is_owed_by_one_rank() -> None:
    made = placed(graph(FIRST, linear("up", "ffn")), {"*": {"batch": ("dp",)}, "up": {"ffn": ("tp",)}}, dp=1)
    assert all(not owed(node) for node in made.values())


def test_data_parallel_owes_the_gradients_of_weights_alone() -> None:
    """Rule A on the weight gradient, which sums over the batch."""
    made = placed(graph(FIRST, linear("up", "ffn")), {"*": {"batch": ("dp",)}}, dp=4)
    assert all(not owed(node) for node in made.values())
    for node in made.values():
        ((tensor, axes),) = node.parameters
        assert (tensor.elements, axes) == (WIDE * WIDE, ("dp",))
        assert node.operations[0].out.sizes == (BATCH // 4, WIDE)


def test_sampled_neighbourhoods_of_data_parallel_ranks_stay_where_they_are() -> None:
    """Nodes sorted by relation are those of the rank's own samples, so a graph network owes gradients alone."""
    of = build_graph(load_model("rgat"), batch=BATCH)
    nodes = placed(of, {node.name: {"batch": ("dp",)} for node in of.nodes}, dp=4)
    assert {name: each.communications for name, each in nodes.items() if each.communications} == {}


def test_columns_then_rows_owe_one_all_reduce_each_way() -> None:
    """Megatron's pair: split outputs, then split inputs; f is an all-reduce backward, g one forward."""
    model = graph(FIRST, linear("up", "ffn", 32), "relu", linear("down", "hidden"))
    made = placed(
        model, {"up": {"ffn": ("tp",)}, "relu1": {"ffn": ("tp",)}, "down": {"ffn": ("tp",)}, "stem": {}}, tp=2
    )
    assert owed(made["up"]) == [("all_reduce", "tp", "backward", BATCH * WIDE)]
    assert owed(made["relu1"]) == []
    assert owed(made["down"]) == []  # its sum is settled by whoever reads it
    assert [t.elements for t, _ in made["up"].parameters + made["down"].parameters] == [WIDE * 32 // 2] * 2
    pair = (linear("up", "ffn", 32), linear("down", "hidden"))
    read = placed(graph(FIRST, *pair, "relu"), {"up": {"ffn": ("tp",)}, "down": {"ffn": ("tp",)}}, tp=2)
    assert owed(read["relu1"]) == [("all_reduce", "tp", "forward", BATCH * WIDE)]


def test_a_split_reader_takes_a_reduce_scatter_and_gives_an_all_gather() -> None:
    """Rule A where the consumer is split over the same axis; the gradient comes back gathered."""
    model = graph(FIRST, linear("down", "ffn"), "relu")
    made = placed(model, {"stem": {}, "down": {"hidden": ("tp",)}, "relu1": {"batch": ("tp",)}}, tp=4)
    assert owed(made["relu1"]) == [
        ("all_gather", "tp", "backward", BATCH * WIDE),
        ("reduce_scatter", "tp", "forward", BATCH * WIDE),
    ]


def test_a_whole_reader_of_something_split_gathers_it() -> None:
    """Rule B: an all-gather forward; the gradient, whole on every rank, is sliced for nothing."""
    made = placed(graph(FIRST, "relu", "tanh"), {"stem": {}, "relu1": {"batch": ("dp",)}, "tanh1": {}}, dp=2)
    assert owed(made["relu1"]) == [("all_gather", "dp", "backward", BATCH * WIDE)]  # a slice forward
    assert owed(made["tanh1"]) == [("all_gather", "dp", "forward", BATCH * WIDE)]
    assert made["tanh1"].gather_group_sizes == {"relu1": 2}


def test_a_split_that_moves_from_dim_to_dim_is_an_all_to_all() -> None:
    """Each rank holds 1/2 of the tensor before and after: that buffer is the payload."""
    made = placed(
        graph(FIRST, "relu", "tanh"), {"relu1": {"batch": ("dp",)}, "tanh1": {"hidden": ("dp",)}, "stem": {}}, dp=2
    )
    half = BATCH * WIDE // 2
    assert owed(made["tanh1"]) == [("all_to_all", "dp", "backward", half), ("all_to_all", "dp", "forward", half)]


def test_two_axes_settle_one_after_the_other() -> None:
    """Over dp the batch is split, over tp the sum: the all-reduce carries the local half of the batch."""
    model = graph(FIRST, linear("down", "ffn"), "relu")
    rules = {"*": {"batch": ("dp",)}, "down": {"batch": ("dp",), "hidden": ("tp",)}}
    made = placed(model, rules, dp=2, tp=4)
    assert owed(made["relu1"]) == [("all_reduce", "tp", "forward", BATCH * WIDE // 2)]
    ((tensor, axes),) = made["down"].parameters
    assert (tensor.elements, axes) == (WIDE * WIDE // 4, ("dp",))


def test_norms_over_a_split_dim_exchange_two_numbers_a_row() -> None:
    made = placed(graph(FIRST, "layer_norm"), {"stem": {}, "layer_norm1": {"hidden": ("tp",)}}, tp=2)
    assert ("all_reduce", "tp", "forward", 2 * BATCH) in owed(made["layer_norm1"])


def test_what_does_not_divide_is_an_error_but_a_batch_may_be_short() -> None:
    model = graph(linear("up", "ffn", 6))
    with pytest.raises(PlanError, match="layer 'up': ffn 6 cannot be divided over 4 ranks"):
        placed(model, {"up": {"ffn": ("tp",)}}, tp=4)
    made = placed(model, {"up": {"batch": ("dp",)}}, dp=3)
    assert made["up"].operations[0].out.sizes == (3, 6), "the fullest of 3, 3 and 2"


def test_axes_that_split_nothing_are_named() -> None:
    model = graph(FIRST)
    placement = Placement((PlacementRule({"batch": ("dp",), "seq": ("cp",), "hidden": ("tp",)}, name_pattern="stem"),))
    assert redundant_mesh_axes(model, placement, Mesh.from_degrees({"dp": 2, "cp": 2, "tp": 2, "pp": 2})) == ("cp",)
    assert redundant_mesh_axes(model, placement, Mesh.from_degrees({})) == ()


@pytest.mark.parametrize("context", ["cp=4", "cp=4,ulysses"])
def test_keys_are_normed_and_rotated_where_they_are_made(context: str) -> None:
    """Qwen3-30B-A3B, 4,096 tokens over cp=4: norm and rotation of keys pass over a rank's own 1,024, of which each of 4
    heads has 128 numbers; the gradient of the norm's weight is summed over all of them."""
    model = build_graph(load_model("qwen3-30b-a3b"), batch=1, overrides={"seq": 4096})
    layers = propagate_placement(
        model, STRATEGY_PRESETS["dp"](model, parse_strategy(context)), Mesh.from_degrees({"cp": 4})
    )
    layer = next(each for each in layers if each.node.type == "attention")
    keys = {each.name.rpartition(".key.")[2]: each.out.elements for each in layer.operations if ".key." in each.name}
    assert keys == {"normed": 1024 * 4 * 128, "normed.rotated": 1024 * 4 * 128}
    assert {axes for tensor, axes in layer.parameters if "key.normed" in tensor.name} == {("cp",)}


def test_meshes() -> None:
    """Ranks are numbered with tp fastest: a dp group of a 2 x 3 x 4 mesh is 2 apart, a pp group 6."""
    mesh = Mesh.from_degrees({"tp": 2, "dp": 3, "pp": 4})
    assert (mesh.size, mesh.replicas, mesh.group_size(("dp", "pp"))) == (24, 3, 12)
    assert [mesh.stride((axis,)) for axis in ("tp", "dp", "pp")] == [1, 2, 6]
    assert mesh.stride(("ep", "dp")) == 2, "an axis of one rank does not count"


@pytest.mark.parametrize(
    ("text", "preset", "degrees", "zero", "sequence", "chunks"),
    [
        ("dp", "dp", {}, 0, False, 1),
        ("", "dp", {}, 0, False, 1),
        ("owt", "owt", {}, 0, False, 1),
        ("tp=8, pp=4 ,sp", "dp", {"tp": 8, "pp": 4}, 0, True, 1),
        ("zero=3", "dp", {}, 3, False, 1),
        ("pp=2,vp=3,ep=1", "dp", {"pp": 2, "ep": 1}, 0, False, 3),
    ],
)
def test_strategies_as_they_are_written(
    text: str, preset: str, degrees: dict[str, int], zero: int, sequence: bool, chunks: int
) -> None:
    made = parse_strategy(text)
    assert (made.preset, made.degrees, made.zero) == (preset, degrees, zero)
    assert (made.sequence_parallel, made.chunks) == (sequence, chunks)


@pytest.mark.parametrize(("text", "gathers"), [("tp=8", 0), ("tp=8,sp", 1)])
def test_parallel_branches_gather_once_and_reduce_their_sum(text: str, gathers: int) -> None:
    """Falcon 7B's block (64 heads here): attention and MLP read one norm, so a block owes one reduction each way."""
    model = build_graph(load_model("falcon-7b"), batch=1, overrides={"heads": 64, "kv_heads": 8})
    layers = propagate_placement(
        model, STRATEGY_PRESETS["dp"](model, parse_strategy(text)), Mesh.from_degrees({"tp": 8})
    )
    inside = [layer for layer in layers if layer.node.name.startswith("block.")]
    made = [(c.operation, c.phase) for layer in inside for c in layer.communications if "embed" not in c.name]
    reduction = "reduce_scatter" if gathers else "all_reduce"
    assert made.count((reduction, "forward")) == made.count((reduction, "backward")) == 1
    assert made.count(("all_gather", "forward")) == gathers
    assert made.count(("all_gather", "backward")) == 2 * gathers  # of the sum's gradient, and of the input again
