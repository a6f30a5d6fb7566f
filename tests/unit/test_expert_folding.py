"""Experts folded over the ranks of tp, cp and dp, with a tensor degree of their own (Megatron-Core 0.9 and later)."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import replace

import pytest

from paleo.errors import PlanError
from paleo.lowering.program import Section, lower_graph
from paleo.network.graph import build_graph
from paleo.operations.tensor import default_precision
from paleo.parallel.placement import STRATEGY_PRESETS, Mesh, parse_strategy
from paleo.parallel.plan import plan
from paleo.parallel.propagation import deduplicated_dispatch_fraction, propagate_placement
from paleo.predict import Prediction, predict
from paleo.search.plans import search
from paleo.search.space import search_space_from_options
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import SoftwareProfile, load_software
from paleo.specs.system import load_system
from paleo.step.backend import build_backend
from paleo.tables.kinds._transformers import strategy_of_run

H100 = load_system("dgx-h100")
MIXTRAL = load_model("mixtral-8x7b")
#: 32 layers of 8 experts with three matrices of 4,096 x 14,336, and all other weights.
EXPERTS = 32 * 8 * 3 * 4096 * 14336
OTHERS = build_graph(MIXTRAL, batch=1).parameters - EXPERTS


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
    assert prediction.plan.strategy_text == "tp=4,cp=2,dp=4,ep=8,etp=1,sp"
    assert parse_strategy(prediction.plan.strategy_text).expert_axes == ("tp", "cp", "ep")


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
    graph = build_graph(MIXTRAL, batch=16, overrides={"seq": 1024})
    mesh = Mesh.from_degrees({"tp": 2, "ep": 4, "dp": 4})
    placed = propagate_placement(graph, STRATEGY_PRESETS["dp"](graph, strategy), mesh)
    exchanges = [owed for node in placed if node.node.type == "moe" for owed in node.communications
                 if owed.operation == "all_to_all"]  # fmt: skip
    assert {owed.axis for owed in exchanges} == {"tp+ep"} and len(exchanges) == 4
    assert all(owed.tensor.elements == 2 * 512 * 4096 for owed in exchanges)
    assert (mesh.stride(("tp+ep",)), mesh.degree("tp+ep")) == (1, 8)


def test_gradients_of_experts_are_summed_over_what_is_left() -> None:
    strategy = parse_strategy("tp=2,ep=8,dp=16,sp,etp=1")
    graph = build_graph(MIXTRAL, batch=16)
    placed = propagate_placement(
        graph, STRATEGY_PRESETS["dp"](graph, strategy), Mesh.from_degrees({"tp": 2, "ep": 4, "dp": 4})
    )
    (axes,) = {axes for node in placed for tensor, axes in node.parameters if "expert.up" in tensor.name}
    assert axes == ("dp",)


@pytest.mark.parametrize("folded", [True, False])
def test_experts_that_all_tokens_visit_are_split_over_tp_whatever_the_others_are(folded: bool) -> None:
    """DeepSeek-V3, tp=8: 2,048 / 8 columns of the shared expert for all 4,096 tokens. Folded, the layer's input lies as
    512 tokens a rank: they are gathered for it and its sums scattered, 7,168 numbers a token, and back the same way,
    with the input once more for the gradient of weights. Else the whole layer takes gathered tokens."""
    strategy = parse_strategy("tp=8,ep=32,dp=4,sp,etp=1" if folded else "tp=8,ep=4,dp=4,sp")
    graph = build_graph(load_model("deepseek_v3"), batch=4, overrides={"seq": 4096})
    layers = propagate_placement(graph, STRATEGY_PRESETS["dp"](graph, strategy), Mesh.from_degrees({"tp": 8, "ep": 4}))
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
    (kept,) = layer.gather_group_sizes.values()
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
    assert strategy_of_run(row, software) == "tp=2,dp=4,ep=8,etp=1,zero=1,sp"
    wider = row | {"dp": 8, "n_gpus": 16}
    assert strategy_of_run(wider, software) == "tp=2,dp=8,ep=8,etp=1,zero=1,sp", "as its recipes fold them"
    split = software.with_fields({"parallelism.expert_tensor": "tp"})
    assert strategy_of_run(wider, split) == "tp=2,dp=8,ep=8,zero=1,sp"
    assert strategy_of_run(row | {"dp": 8, "n_gpus": 16, "expert_tp": 1}, software) == "tp=2,dp=8,ep=8,etp=1,zero=1,sp"


# experts whose tensors are split over tp, whose tokens each rank sends for itself

#: DeepSeek-V3 over tp=8: a rank's 512 of 4,096 tokens go to 8 experts each, 7,168 numbers of two bytes.
EACH_TOKEN = 7168 * 2
SENT = 512 * 8 * EACH_TOKEN
Bytes = Mapping[tuple[str, str, str], float]


def mixture(software: str | SoftwareProfile, strategy: str = "tp=8,ep=4,dp=4,sp", **run: object) -> Section:
    """A repeated block of DeepSeek-V3 with a mixture, one microbatch of one sequence."""
    software = load_software(software) if isinstance(software, str) else software
    stated = Run.model_validate({"gpus": 32, "global_batch": 32, "strategy": strategy, "dtype": "bf16", **run})
    backend, model = build_backend(H100, stated, "bf16", software), load_model("deepseek_v3")
    layout = plan(model, H100, stated)
    graph = build_graph(model, batch=layout.dp, choices=backend.layer_implementations, overrides={"seq": 4096})
    program = backend.lower(graph, backend.placement(graph, layout.strategy), layout.mesh)
    return next(each for each in program.sections if each.repeat == 58)


def moved(section: Section) -> Bytes:
    """Bytes of a microbatch by operation, axis and pass: of tokens that go to routed experts."""
    found: Counter[tuple[str, str, str]] = Counter()
    for owed in section.collectives:
        if ".moe" in owed.name and not any(word in owed.name for word in (".shared", "norm")):
            found[owed.operation, owed.axis, owed.phase] += owed.payload_bytes * owed.calls_per_iteration
    return found


@pytest.mark.parametrize("imbalance", [1.0, 1.5])
def test_ranks_of_tp_send_their_own_tokens_and_gather_what_arrives(imbalance: float) -> None:
    """Megatron-Core's dispatcher: dispatch and combine exchange 56 MiB over ep; 448 MiB are gathered over tp before the
    products and scattered after them; backward their gradients take the same ways back."""
    bytes_moved = moved(mixture("megatron-core", experts={"imbalance": imbalance}))
    for phase in ("forward", "backward"):
        assert bytes_moved["all_to_all", "ep", phase] == pytest.approx(imbalance * 2 * 58_720_256)
        for operation in ("all_gather", "reduce_scatter"):
            assert bytes_moved[operation, "tp", phase] == pytest.approx(imbalance * 469_762_048)
    assert 2 * SENT == 2 * 58_720_256 and 8 * SENT == 469_762_048 and len(bytes_moved) == 6


def test_ranks_of_tp_send_all_tokens_where_the_software_gathers_inputs_first() -> None:
    """torchtitan: each rank exchanges 8 times as much; the input is gathered once, and nothing beside the experts."""
    section = mixture("torchtitan")
    assert [moved(section)["all_to_all", "ep", phase] for phase in ("forward", "backward")] == [2 * 8 * SENT] * 2
    over_tp = [owed for owed in section.collectives if owed.axis == "tp" and ".moe" in owed.name]
    assert {owed.payload_bytes for owed in over_tp} == {4096 * EACH_TOKEN}, "no token more than once"


def test_ranks_without_ep_gather_what_they_sort_for_their_experts() -> None:
    """All 256 experts are on each rank of tp: tokens cross no group but that one."""
    bytes_moved = moved(mixture("megatron-core", "tp=8,dp=4,sp"))
    passes = [(operation, phase) for operation in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")]
    assert bytes_moved == {(operation, "tp", phase): 8 * SENT for operation, phase in passes}


def test_tokens_without_sequence_parallelism_are_sent_by_all_ranks() -> None:
    """Inputs are whole on each rank of tp then."""
    bytes_moved = moved(mixture("megatron-core", "tp=8,ep=4,dp=4"))
    assert bytes_moved["all_to_all", "ep", "forward"] == 2 * 8 * SENT
    assert not any(axis == "tp" and operation == "all_gather" for operation, axis, _ in bytes_moved)


def test_software_that_refuses_whole_sequences_over_tp_is_named() -> None:
    refused = "software megatron-core trains no mixture over tp unless sequences are split over it, too: add sp"
    assert refused in predicted("tp=2,ep=8,dp=16").warnings
    for strategy, more in (
        ("tp=2,ep=8,dp=16,sp", {}),
        ("ep=8,dp=32", {}),
        ("tp=2,ep=8,dp=16", {"software": "torchtitan"}),
    ):
        assert not any("sequences" in line for line in predicted(strategy, **more).warnings)
    assert refused not in predicted("tp=2,ep=8,dp=16", forward_only=True).warnings


def test_tokens_sent_once_are_gathered_once() -> None:
    """DeepEP over four nodes, each with the eight ranks of a group of tp: a token goes once to each node and is
    gathered once, not for each of its experts there: 8 experts of 256 lie on 3.6 of four nodes."""
    bytes_moved = moved(mixture("megatron-core", experts={"dispatch": "deepep"}))
    share = deduplicated_dispatch_fraction(8, 256, 4)
    assert 8 * share == pytest.approx(3.61, abs=0.005)
    assert bytes_moved["all_to_all", "ep", "forward"] == pytest.approx(2 * SENT * share)
    assert bytes_moved["all_gather", "tp", "forward"] == pytest.approx(8 * SENT * share)


def test_gathered_tokens_are_sorted_and_kept_whole() -> None:
    """Sorted by the 64 local experts once gathered; the first product keeps all 448 MiB, of which the rank sent 56. No
    gather is made again or runs beside products, as those of inputs are."""
    own, everyone = (mixture(software) for software in ("megatron-core", "torchtitan"))
    for section in (own, everyone):
        sorts = [each.kernel for each in section.kernels if each.kernel.name.endswith(".sort")]
        assert [kernel.bytes_written for kernel in sorts] == [8 * SENT] * 4
    tokens = [owed for owed in own.collectives if ".expert" in owed.name or ".dispatched" in owed.name]
    assert len(tokens) == 4 and all(owed.overlap_chunks == 1 and not owed.overlapped for owed in tokens)


def test_products_keep_gathered_tokens_as_sent_ones() -> None:
    """All but the scores, of a rank's own tokens alone then: 256 in fp32."""
    software = load_software("megatron-core")
    own, everyone = (
        mixture(software.with_fields({"parallelism.expert_tokens": tokens})).saved_bytes for tokens in ("own", "all")
    )
    assert everyone - own == (4096 - 512) * 256 * 4


@pytest.mark.slow
@pytest.mark.parametrize("stated", ["", ",etp=4"])
def test_a_search_prices_split_experts_as_a_prediction_does(stated: str) -> None:
    run = Run.model_validate({"gpus": 32, "global_batch": 64, "software": "megatron-core", "model": {"layers": 2}})
    space = replace(search_space_from_options(f"tp=4,cp=1,ep=8,pp=1,sp{stated}", recompute="none"), zero=(1,))
    space = space if stated else replace(space, etp=(None,))
    found = search(MIXTRAL, H100, run, space=space)
    assert {row.strategy for row in found.plans} == {f"tp=4,ep=8,dp=8{stated},zero=1,sp"}
    for row in found.plans:
        assert row.step_time == pytest.approx(predict(MIXTRAL, H100, row.run).step_time, rel=1e-9)


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
        mesh = Mesh.from_degrees({**strategy.degrees, "ep": max(1, strategy.degrees.get("ep", 1) // inner)})
        alone = build_graph(load_model(model), batch=samples * mesh.replicas)
        related = replace(alone, shared_cache=family)
        programs = [
            lower_graph(graph, STRATEGY_PRESETS[strategy.preset](graph, strategy), mesh, default_precision("bf16"))
            for graph in (alone, related)
        ]
        assert programs[0] == programs[1], text
    assert len(family["layers"]) < len(strategies) * 2 * len(alone.nodes)  # type: ignore[arg-type]
