"""Experts folded over the ranks of tp, cp and dp, with a tensor degree of their own (Megatron-Core 0.9 and later)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable
from dataclasses import replace

import pytest

from paleo.errors import PlanError
from paleo.lowering.program import lower
from paleo.network.graph import build
from paleo.operations.tensor import precision
from paleo.parallel.placement import STRATEGIES, Mesh, parse_strategy
from paleo.parallel.plan import plan
from paleo.parallel.propagation import propagate
from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.validate.steps.transformers import strategy_of

H100 = load_system("dgx-h100")
MIXTRAL = load_model("mixtral-8x7b")
#: 32 layers of 8 experts with three matrices of 4,096 x 14,336, and all other weights.
EXPERTS = 32 * 8 * 3 * 4096 * 14336
OTHERS = build(MIXTRAL, batch=1).parameters - EXPERTS


def predicted(strategy: str, **run: object) -> Prediction:
    asked = {"gpus": 32, "global_batch": 32, "microbatch": 1, "dtype": "bf16", "software": "megatron-core", **run}
    return predict(MIXTRAL, H100, Run.model_validate({"model": {"seq": 1024}, **asked, "strategy": strategy}))


def test_a_rank_has_its_share_of_experts_whole() -> None:
    """Eight ranks share the experts out; tp divides all else. Router and norms (1.3 M weights) stay whole."""
    prediction = predicted("tp=2,ep=8,dp=16,sp,etp=1")
    assert prediction.memory.parameters / 2 == pytest.approx(EXPERTS / 8 + OTHERS / 2, rel=1e-3)
    halved = predicted("tp=2,ep=8,dp=16,sp,etp=2")
    assert halved.memory.parameters / 2 == pytest.approx(EXPERTS / 16 + OTHERS / 2, rel=1e-3)


def test_experts_need_not_divide_the_data_parallel_ranks() -> None:
    prediction = predicted("tp=4,cp=2,ep=8,dp=4,sp,etp=1")
    assert prediction.memory.parameters / 2 == pytest.approx(EXPERTS / 8 + OTHERS / 4, rel=2e-3)
    assert prediction.plan.strategy == "tp=4,cp=2,dp=4,ep=8,etp=1,sp"
    assert parse_strategy(prediction.plan.strategy).expert_axes == ("tp", "cp", "ep")


@pytest.mark.parametrize(
    "strategy", ["tp=2,ep=8,dp=16,sp,etp=1", "tp=4,cp=2,ep=8,dp=4,sp,etp=1", "tp=2,dp=16,sp,etp=1"]
)
def test_work_is_conserved(strategy: str) -> None:
    """All ranks together do what one does; only routers of a sequence divided over tp, and scores, differ."""
    whole = predicted("dp=32")
    assert predicted(strategy).executed_flops == pytest.approx(whole.executed_flops, rel=1e-3)


def test_tokens_travel_in_one_exchange_inside_the_node_first() -> None:
    """Dispatch and combine, each way: the tokens of a rank, twice each, over tp and ep together."""
    strategy = parse_strategy("tp=2,ep=8,dp=16,sp,etp=1")
    graph = build(MIXTRAL, batch=16, overrides={"seq": 1024})
    mesh = Mesh.of({"tp": 2, "ep": 4, "dp": 4})
    placed = propagate(graph, STRATEGIES["dp"](graph, strategy), mesh)
    exchanges = [owed for node in placed if node.node.type == "moe" for owed in node.communications
                 if owed.operation == "all_to_all"]  # fmt: skip
    assert {owed.axis for owed in exchanges} == {"tp+ep"} and len(exchanges) == 4
    assert all(owed.tensor.elements == 2 * 512 * 4096 for owed in exchanges)
    assert (mesh.stride(("tp+ep",)), mesh.degree("tp+ep")) == (1, 8)


def test_gradients_of_experts_are_summed_over_what_is_left() -> None:
    strategy = parse_strategy("tp=2,ep=8,dp=16,sp,etp=1")
    graph = build(MIXTRAL, batch=16)
    placed = propagate(graph, STRATEGIES["dp"](graph, strategy), Mesh.of({"tp": 2, "ep": 4, "dp": 4}))
    (axes,) = {axes for node in placed for tensor, axes in node.parameters if "expert.up" in tensor.name}
    assert axes == ("dp",)


@pytest.mark.parametrize("folded", [True, False])
def test_experts_that_all_tokens_visit_are_split_over_tp_whatever_the_others_are(folded: bool) -> None:
    """DeepSeek-V3, tp=8: 2,048 / 8 columns of the shared expert for all 4,096 tokens. Folded, the layer's input lies as
    512 tokens a rank: they are gathered for it and its sums scattered, 7,168 numbers a token, and back the same way,
    with the input once more for the gradient of weights. Else the whole layer takes gathered tokens."""
    strategy = parse_strategy("tp=8,ep=32,dp=4,sp,etp=1" if folded else "tp=8,ep=4,dp=4,sp")
    graph = build(load_model("deepseek_v3"), batch=4, overrides={"seq": 4096})
    layers = propagate(graph, STRATEGIES["dp"](graph, strategy), Mesh.of({"tp": 8, "ep": 4}))
    layer = next(each for each in layers if each.node.type == "moe")
    (up,) = (each for each in layer.operations if each.name.endswith("shared.up"))
    assert up.out.sizes == (1, 4096, 2, 2048 // 8)
    owed = [(each.operation, each.phase) for each in layer.communications if each.axis == "tp"]
    gathers = [("all_gather", "backward"), ("all_gather", "forward")]
    scatters = [("reduce_scatter", "backward"), ("reduce_scatter", "forward")]
    # not folded, the layer's sum is scattered by whoever reads it
    assert sorted(owed) == sorted([*gathers, gathers[0], *scatters] if folded else [*gathers, scatters[0]])
    assert {each.tensor.elements for each in layer.communications if each.axis == "tp"} == {4096 * 7168}
    summed = {tensor.name.split("moe1.")[-1]: (axes, tensor.elements) for tensor, axes in layer.parameters}
    assert summed["shared.up.weight"] == (("ep",), 7168 * 2 * 2048 / 8)
    assert summed["router.weight"][0] == (("ep", "tp") if folded else ("ep",))
    (kept,) = layer.gathered.values()
    assert kept == 8, "each rank keeps its own tokens"


def test_tokens_travel_less_between_nodes_where_experts_are_folded() -> None:
    """Eight ranks of a node have all experts; spread over data-parallel ranks alone, they lie on two nodes."""
    folded, spread = (predicted(f"tp=2,ep=8,dp=16,sp{more}", forward_only=True) for more in (",etp=1", ""))
    assert folded.breakdown.communication_total < 0.5 * spread.breakdown.communication_total


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("tp=4,cp=2,ep=8,dp=4", "ep=8 does not divide the 4 data-parallel ranks; etp=1 folds"),
        ("tp=2,ep=8,dp=16,etp=3", "etp=3 must be 1 or tp=2"),
        ("cp=8,ep=4,dp=4,etp=1", "ep=4 is no multiple of the 8 ranks of tp and cp"),
    ],
)
def test_what_cannot_be_folded_is_said(strategy: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan(MIXTRAL, H100, Run(gpus=32, strategy=strategy))


def test_rows_of_tables_are_folded_where_they_say_so_or_must_be() -> None:
    row = {"tp": 2, "pp": 1, "dp": 4, "cp": 1, "ep": 8, "n_experts": 8, "n_gpus": 8, "sequence_parallel": 1}
    software = load_software("megatron-core")
    assert strategy_of(row, software) == "tp=2,dp=4,ep=8,etp=1,zero=1,sp"
    wider = row | {"dp": 8, "n_gpus": 16}
    assert strategy_of(wider, software) == "tp=2,dp=8,ep=8,etp=1,zero=1,sp", "as its recipes fold them"
    split = software.changed({"parallelism.expert_tensor": "tp"})
    assert strategy_of(wider, split) == "tp=2,dp=8,ep=8,zero=1,sp"
    assert strategy_of(row | {"dp": 8, "n_gpus": 16, "expert_tp": 1}, software) == "tp=2,dp=8,ep=8,etp=1,zero=1,sp"


@pytest.mark.parametrize("model", ["mixtral-8x7b", "deepseek_v2-lite", "alexnet"])
def test_lowerings_that_share_layers_are_those_of_graphs_alone(model: str) -> None:
    """Graphs of a family place a layer once for all batches and meshes on which a rank has the same share of it."""
    family: dict[Hashable, object] = {}
    strategies = ["dp=2", "tp=2,dp=2", "owt,dp=4", "dp=4"]
    if model != "alexnet":
        strategies = [
            "dp=2",
            "ep=2,dp=2",
            "ep=4,dp=2",
            "tp=2,ep=2,dp=2",
            "tp=2,cp=2,ep=8,dp=4,sp,etp=1",
            "cp=2,ep=4,dp=8",
        ]
    for text, samples in itertools.product(strategies, (1, 3)):
        strategy = parse_strategy(text)
        inner = math.prod(strategy.degrees.get(axis, 1) for axis in strategy.expert_axes if axis != "ep")
        mesh = Mesh.of({**strategy.degrees, "ep": max(1, strategy.degrees.get("ep", 1) // inner)})
        alone = build(load_model(model), batch=samples * mesh.replicas)
        related = replace(alone, family=family)
        programs = [
            lower(graph, STRATEGIES[strategy.preset](graph, strategy), mesh, precision("bf16"))
            for graph in (alone, related)
        ]
        assert programs[0] == programs[1], text
    assert len(family["layers"]) < len(strategies) * 2 * len(alone.nodes)  # type: ignore[arg-type]
