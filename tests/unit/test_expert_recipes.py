"""Mixtures of experts as software carries them out: the host's calls, who deals out tokens and beside what, graphs of
whole iterations, biases and clamped gates without a kernel, and what tables say of these."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from paleo.errors import SpecError
from paleo.layers._moe import clamped_expert_operations
from paleo.operations.base import Kernel
from paleo.operations.tensor import Tensor, default_precision
from paleo.parallel.placement import STRATEGY_PRESETS, Mesh, parse_strategy
from paleo.predict import Prediction, predict
from paleo.pricing.communication import Fabric
from paleo.search.plans import explain_best_plan, search
from paleo.search.space import search_space_from_options
from paleo.specs.model import load_model
from paleo.specs.run import Run, flatten_to_paths, replace_fields
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.step.backend import Backend, build_backend
from paleo.tables.kinds._transformers import (
    MoeRecipe,
    moe_recipe_of,
    predict_transformer_run,
    recompute_policy_of_run,
    run_of_transformer_row,
)

H100 = load_system("dgx-h100")
QWEN = load_model("qwen3-30b-a3b")
PASSES = ("forward", "backward")


def predicted(**more: Any) -> Prediction:
    run = {"gpus": 16, "batch": 2, "microbatch": 1, "strategy": "ep=16", "software": "megatron-core", **more}
    return predict(QWEN, H100, Run.model_validate({"dtype": "bf16", "model": {"layers": 4}, **run}))


def test_the_host_calls_every_expert_and_waits_for_counts() -> None:
    """Qwen3-30B-A3B over 8 GPUs: 16 experts on each, two products forward and four backward, four times routed."""
    software = load_software("megatron-core")
    run = Run(gpus=8, batch=1, dtype="bf16", strategy="ep=8", software="megatron-core", model={"layers": 1})
    made = build_backend(H100, run, "bf16", software)
    kernels = [kernel for kernel in _block_kernels(made) if kernel.expert_count]
    assert [kernel.expert_count for kernel in kernels if kernel.family == "gemm"] == [16.0] * 6
    assert sum(kernel.family == "memory" for kernel in kernels) == 4
    host = made.predictor.times(kernels).host_time.sum()
    calls = sum(
        kernel.host_calls * (software.host.forward if kernel.phase == "forward" else software.host.backward)
        for kernel in kernels
    )
    assert host == pytest.approx(calls + 6 * 16 * software.host.expert + 4 * software.host.routing)


@pytest.mark.parametrize(
    ("network", "software", "rotation", "router"),
    [
        ("deepseek_v3", "megatron-core", (29.0, 23.0), (34.0, 17.0)),
        ("deepseek_v2", "megatron-core", (29.0, 23.0), (28.0, 9.0)),
        ("deepseek_v3", "nemo", (2.0, 2.0), (1.0, 1.0)),
        ("deepseek_v3", "nemo@25.09", (2.0, 2.0), (34.0, 17.0)),
        ("deepseek_v3", "nemo@25.04", (29.0, 23.0), (34.0, 17.0)),
        ("kimi_k2", "nemo-automodel", (2.0, 2.0), (1.0, 1.0)),
        ("qwen3-30b-a3b", "megatron-core", (2.0, 2.0), (19.0, 9.0)),
        ("qwen3-30b-a3b", "nemo", (2.0, 2.0), (1.0, 1.0)),
        ("qwen3-30b-a3b", "megatron-bridge", (14.0, 12.0), (19.0, 9.0)),
    ],
)
def test_rotations_and_routers_without_kernels_cost_the_host(
    network: str, software: str, rotation: tuple[float, float], router: tuple[float, float]
) -> None:
    """Operations that PyTorch dispatches in Megatron-Core 0.15: 13 + 13 + 3 rotate query and key of latent attention
    (23 backward); 9 choose groups, 6 more (8 backward) make sigmoids with a bias, 18 more (8 backward) the softmax and
    the balancing loss; full recomputation runs them again. Recipes for performance fuse all of them.
    """
    run = Run(gpus=8, batch=8, dtype="bf16", strategy="ep=8", software=software)
    backend, strategy = build_backend(H100, run, "bf16"), parse_strategy("ep=8")
    graph = backend.graph(load_model(network), 8)
    program = backend.lower(graph, STRATEGY_PRESETS["dp"](graph, strategy), Mesh.from_degrees({"ep": 8}))
    layer = max(program.sections, key=lambda section: section.repeat)
    for parts, expected in (((".rotated", ".rotary.", ".value.copy"), rotation), ((".top_k",), router)):
        counted = [each for each in layer.kernels if any(part in each.kernel.name for part in parts)]
        calls = [sum(each.kernel.host_calls for each in counted if each.kernel.phase == phase) for phase in PASSES]
        assert tuple(calls) == pytest.approx(expected)
        assert all(each.full_recompute_runs == 1.0 for each in counted)


@pytest.mark.parametrize(
    ("profile", "layer", "expert"), [("pytorch-eager", (14, 8), (12, 9)), ("torchtitan-eager", (28 + 22, 19), (0, 0))]
)
def test_eager_mixtures_take_the_calls_of_their_code(
    profile: str, layer: tuple[int, int], expert: tuple[int, int]
) -> None:
    """Operations of a layer and of each of its 16 experts, forward and with a backward pass, as counted in the code of
    Hugging Face transformers and torchtitan, at the profile's times of an operation."""
    software = load_software(profile)
    run = Run(gpus=8, batch=1, dtype="bf16", strategy="ep=8", software=profile, model={"layers": 1})
    backend = build_backend(H100, run, "bf16", software)
    kernels = [kernel for kernel in _block_kernels(backend) if _of_mixture(kernel)]
    assert sum(kernel.host_calls for kernel in kernels if kernel.phase == "forward") == 8
    forward, backward = (each + 16 * more for each, more in zip(layer, expert, strict=True))
    counted = forward * software.host.forward + backward * software.host.backward
    assert backend.predictor.times(kernels).host_time.sum() == pytest.approx(counted, rel=0.01)


def _of_mixture(kernel: Kernel) -> bool:
    """Whether a kernel is one of the router, the experts or their tokens, but for tokens sorted after an exchange."""
    parts = (".router", ".top_k", ".dispatch", ".expert.", ".combine")
    return any(part in kernel.name for part in parts) and not kernel.name.endswith(".sort")


def _block_kernels(made: Backend) -> list[Kernel]:
    graph, strategy = made.graph(QWEN, 8), parse_strategy("ep=8")
    lowered = made.lower(graph, STRATEGY_PRESETS["dp"](graph, strategy), Mesh.from_degrees({"ep": 8}))
    return [counted.kernel for section in lowered.sections for counted in section.kernels]


def test_graphs_and_dropped_tokens_spare_the_host() -> None:
    eager, dropped, graph = (
        predicted(),
        predicted(experts={"drop_tokens": True}),
        predicted(kernels={"cuda_graph": "full_iteration"}),
    )
    assert eager.step_time > dropped.step_time > graph.step_time
    assert graph.breakdown.launch == pytest.approx(0.0, abs=1e-9)


def test_tokens_travel_beside_another_microbatch() -> None:
    """At most what the exchange's own multiprocessors leave is hidden; what travels stays the same."""
    alone, beside = (
        predicted(kernels={"cuda_graph": "full_iteration"}),
        predicted(kernels={"cuda_graph": "full_iteration"}, experts={"overlap": True}),
    )
    assert beside.breakdown.communication_total == pytest.approx(alone.breakdown.communication_total, rel=0.01)
    won = alone.breakdown.communication_exposed - beside.breakdown.communication_exposed
    assert 0 < won < (1.0 - 24 / 132 + 0.01) * alone.breakdown.communication_total


# experts that all tokens visit, beside the exchange of the others' tokens


def shared_beside(**more: Any) -> Prediction:
    """DeepSeek-V2-Lite, three layers with two shared experts each, without the host."""
    run = {"gpus": 16, "batch": 2, "microbatch": 1, "strategy": "ep=16", "software": "megatron-core", **more}
    run = {
        "kernels.cuda_graph": "full_iteration",
        "experts.shared_overlap": True,
        "model": {"layers": 4},
    } | flatten_to_paths(run)
    return predict(load_model("deepseek_v2-lite"), H100, Run.model_validate({"dtype": "bf16", **run}))


def test_shared_experts_run_beside_the_exchange_of_nccl() -> None:
    """In each of two microbatches and three layers the shorter of both is hidden, forward and backward, as far as the
    exchange leaves multiprocessors: 108 of 132."""
    alone, beside = shared_beside(experts={"shared_overlap": None}), shared_beside()
    (section,) = (each for each in beside.program.sections if each.repeat == 3)
    backend = build_backend(H100, beside.run, "bf16")
    hidden = 0.0
    for forward in (True, False):
        kernels = [each.kernel for each in section.kernels if (each.kernel.phase == "forward") == forward]
        experts = [kernel for kernel in kernels if ".shared." in kernel.name]
        assert len(experts) == (3 if forward else 5), "up, gate, down; backward two more for weights"
        sent = [each for each in section.collectives if (each.phase == "forward") == forward]
        exchange = backend.fabric.collective_times(
            "all_to_all", *(np.full(len(sent), n) for n in (1, 16)), np.array([each.payload_bytes for each in sent])
        )
        hidden += 2 * 3 * 108 / 132 * min(exchange.sum(), backend.predictor.times(experts).device_time.sum())
    assert alone.step_time - beside.step_time == pytest.approx(hidden, rel=1e-6)
    assert alone.breakdown.communication_total == pytest.approx(beside.breakdown.communication_total)
    assert alone.memory == beside.memory and not beside.warnings


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"experts.dispatch": "deepep"}, "deepep has no such overlap, nccl has"),
        ({"strategy": "dp=16"}, "there is no expert parallelism"),
        ({"experts.overlap": True}, "tokens travel beside another microbatch (experts.overlap)"),
    ],
)
def test_shared_experts_beside_no_exchange_change_nothing(more: dict[str, Any], reason: str) -> None:
    alone, beside = shared_beside(experts={"shared_overlap": False}, **more), shared_beside(**more)
    assert f"experts.shared_overlap changes nothing: {reason}" in beside.warnings
    assert alone.step_time == beside.step_time
    assert "changes nothing: no layer has shared experts" in str(predicted(experts={"shared_overlap": True}).warnings)


def test_a_search_runs_shared_experts_beside_the_exchange_as_a_prediction_does() -> None:
    model, stated = load_model("deepseek_v2-lite"), {"experts.shared_overlap": True, "software": "megatron-core"}
    run = Run.model_validate({"gpus": 16, "global_batch": 32, "model": {"layers": 4}, **stated})
    space = replace(search_space_from_options("tp=1,cp=1,ep=16,pp=1", recompute="none"), zero=(1,))
    for row in search(model, H100, run, space=space).plans:
        assert row.step_time == pytest.approx(predict(model, H100, row.run).step_time, rel=1e-9)


@pytest.mark.parametrize(
    ("strategy", "microbatches", "alone"),
    [("ep=16", 1, 1.0), ("ep=16", 4, 1 / 4), ("pp=2,vp=2,ep=8", 4, 5 / 8), ("pp=2,ep=8", 4, 2 / 4)],
)
def test_passes_that_fill_a_pipeline_hide_no_exchange(strategy: str, microbatches: int, alone: float) -> None:
    """Interleaved over two stages 2 (2 - 1) + 2 passes fill, one more goes forward before the first pair: 5 of 8."""
    batch = predicted(
        strategy=strategy, batch=microbatches, experts={"overlap": True}, kernels={"cuda_graph": "full_iteration"}
    ).step_arrays.batch
    paired, whole = batch.layer_times, batch.cases.layer_times
    assert whole.hidden_transfers.max() > 0
    assert paired.hidden_transfers == pytest.approx((1.0 - alone) * whole.hidden_transfers)
    waited, before = (each.forward_transfers + each.backward_transfers for each in (paired, whole))
    assert waited - before == pytest.approx(alone * whole.hidden_transfers)


def test_each_dispatcher_sends_what_it_must() -> None:
    nccl, deepep = (predicted(experts={"dispatch": name}) for name in ("nccl", "deepep"))
    handshakes = 2 * 4 * 4 * load_software("megatron-core").host.handshake  # microbatches, layers, exchanges
    sent = deepep.breakdown.communication_total - handshakes
    assert sent < 0.5 * nccl.breakdown.communication_total, "two nodes, eight experts"
    assert nccl.breakdown.memory_bound > deepep.breakdown.memory_bound, "tokens are sorted by local experts, and back"


@pytest.mark.parametrize(
    ("system", "dispatcher", "place", "ports"),
    [
        ("aws-p5.48xlarge", "nccl", 0, 4),
        ("aws-p5.48xlarge", "deepep", 1, 4),
        ("aws-p6-b300.48xlarge", "deepep", 1, 2),
        ("aws-p4d.24xlarge", "deepep", 1, 1),
        ("dgx-h100", "nccl", 0, 0),
    ],
)
def test_exchanges_over_efa_cost_the_host_more(system: str, dispatcher: str, place: int, ports: int) -> None:
    """For each port of a device; two devices that share one have an endpoint each."""
    host = load_software("megatron-core").host
    fabric = Fabric(
        load_system(system),
        token_handshake_time=host.handshake,
        efa_handshake_times=host.libfabric,
        token_exchange_library=dispatcher,
    )
    assert fabric.group_handshake_time(1, 8) == 0, "inside a node"
    assert fabric.group_handshake_time(1, 16) == pytest.approx(host.handshake + ports * host.libfabric[place])


def test_tokens_that_travel_once_pay_the_more_there_are() -> None:
    """Over four nodes: the host pays for an exchange whoever makes it, so that the bytes decide."""
    run = {"gpus": 32, "strategy": "ep=32", "global_batch": 512, "kernels.cuda_graph": "full_iteration", "batch": None}
    steps = {
        (name, seq): predicted(**run, experts={"dispatch": name}, model={"layers": 2, "seq": seq}).step_time
        for name in ("nccl", "deepep")
        for seq in (256, 8192)
    }
    gains = [steps["nccl", seq] / steps["deepep", seq] for seq in (256, 8192)]
    assert 1.0 < gains[0] < gains[1]


@pytest.mark.slow
def test_a_search_chooses_the_dispatcher_and_folds_experts() -> None:
    run = Run.model_validate({"gpus": 32, "global_batch": 64, "software": "megatron-core", "model": {"layers": 2}})
    space = replace(search_space_from_options("tp=4,cp=1,ep=16,pp=1,sp", recompute="none"), zero=(1,))
    found = search(QWEN, H100, run, space=space)
    assert {row.run.experts.dispatch for row in found.plans} == {None, "deepep"}
    assert {row.strategy for row in found.plans} == {"tp=4,ep=16,dp=8,etp=1,zero=1,sp"}, "8 ranks of dp hold no 16"
    for row in found.plans:
        assert row.step_time == pytest.approx(predict(QWEN, H100, row.run).step_time, rel=1e-9)
    text = explain_best_plan(QWEN, H100, found).text
    used, other = ("NCCL's all-to-all", "DeepEP")[:: 1 if found.plans[0].run.experts.dispatch is None else -1]
    assert (
        f"Tokens are dispatched to experts by {used}; with {other} the step would be " in text
        and "aster" in text.partition(other)[2]
    )
    stated = search(QWEN, H100, replace_fields(run, {"experts.dispatch": "nccl"}), space=space)
    assert {row.run.experts.dispatch for row in stated.plans} == {"nccl"}


def test_what_clamped_experts_move() -> None:
    """Ten tokens for each of two experts, hidden 6, width 5, in bytes for an element.

    A bias in fp32: written 4, added 2 + 4 + 4, joined 4 + 4, narrowed 4 + 2, which is 28. The gate: two clamps 4 each,
    scale 4, sigmoid 4, product 6, shift 4, product 6, probabilities 2 + 4, narrowed 4 + 2, which is 44.
    """
    sent = Tensor("sent", ("experts", "capacity", "hidden"), (2, 10, 6))
    operations, out = clamped_expert_operations("e", sent, 5, {"hidden": 6})
    assert out.sizes == (2, 10, 6)
    passes = [
        kernel
        for each in operations
        for kernel in each.forward_kernels(default_precision("bf16"))
        if kernel.family == "memory"
    ]
    elements = 2 * 10
    biases = 2 * (2 * 5 + 6) * 2
    probabilities = 3 * 4 * elements
    expected = elements * (28 * (2 * 5 + 6) + 44 * 5) + biases + probabilities
    assert sum(kernel.bytes for kernel in passes) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("row", "recipe"),
    [
        ({}, MoeRecipe()),
        ({"expert_dispatch": "deepep-uccl", "expert_overlap": "on"}, MoeRecipe("deepep", True)),
        ({"cuda_graph": "moe_router+moe_preprocess"}, MoeRecipe(cuda_graph="none")),
        (
            {"notes": "cuda_graph_impl=full_iteration, moe_flex_dispatcher_backend=hybridep, moe_a2a_overlap=True"},
            MoeRecipe("hybridep", True, "full_iteration"),
        ),
        ({"notes": "tokendrop; token distribution force-balanced"}, MoeRecipe(drops_tokens=True)),
        ({"release": "26.06", "system": "dgx-h100", "ep": 8}, MoeRecipe()),
        ({"release": "26.06", "system": "gb200-nvl72", "ep": 64}, MoeRecipe("hybridep", True, "full_iteration")),
        ({"release": "26.04", "system": "gb200-nvl72", "ep": 64}, MoeRecipe()),
        ({"release": "26.06", "system": "gb200-nvl72", "ep": 64, "dtype": "bf16"}, MoeRecipe("hybridep")),
        ({"release": "26.06.01", "system": "gb200-nvl72", "ep": 8, "model": "Nemotron_3_Nano"}, MoeRecipe("hybridep")),
    ],
)
def test_rows_state_their_recipe(row: dict[str, Any], recipe: MoeRecipe) -> None:
    assert moe_recipe_of(row) == recipe


def test_an_unknown_dispatcher_is_said() -> None:
    with pytest.raises(SpecError, match="expert_dispatch 'pigeon' is none of nccl"):
        moe_recipe_of({"expert_dispatch": "pigeon"})


def test_a_recipe_of_the_framework_says_what_a_silent_row_recomputes() -> None:
    software = load_software("megatron-core")
    row = {"framework": "Megatron-Bridge 0.4.2 (NeMo 26.04.01)", "model": "DeepSeek-V3", "pp": 8, "ep": 32}
    assert recompute_policy_of_run(row, software) == "full", "its recipe of 32 nodes"
    assert recompute_policy_of_run({**row, "recompute": "none"}, software) == "none", "what a row states goes first"
    assert recompute_policy_of_run({**row, "ep": 64}, software) == software.recomputation.policy == "none"
    assert recompute_policy_of_run({**row, "framework": "NeMo AutoModel"}, software) == "none"


def test_a_recipe_says_which_modules_a_silent_row_recomputes() -> None:
    oss = SILENT | {"model": "GPT OSS 120B", "pp": 4}
    assert (run_of_transformer_row(oss).recompute.policy, run_of_transformer_row(oss).recompute.modules) == (
        "selective",
        ("layernorm", "moe_act"),
    )
    assert run_of_transformer_row(oss | {"recompute": "none"}).recompute.modules == ()
    assert run_of_transformer_row(oss | {"pp": 2, "dp": 32}).recompute.policy == "none"


def test_layers_that_notes_say_were_recomputed() -> None:
    quoted = SILENT | {"recompute": "full", "notes": "recipe X: recompute_num_layers=5; full recompute of 5 layers"}
    assert (run_of_transformer_row(quoted).recompute.policy, run_of_transformer_row(quoted).recompute.layers) == (
        "full",
        5,
    )
    assert run_of_transformer_row(quoted | {"recompute": "none"}).recompute.layers is None
    assert run_of_transformer_row(quoted | {"notes": "full recompute"}).recompute.layers is None


def test_activations_that_go_to_the_host_are_not_recomputed() -> None:
    """A recipe that is known to recompute nothing is believed, whatever the footprint."""
    row = SILENT | {
        "model": "LLAMA3_70B", "layers": 80, "hidden": 8192, "heads": 64, "ffn_hidden": 28672, "n_experts": 0, "ep": 1,
        "seq_len": 8192, "micro_batch": 4, "global_batch": 256, "sharding": "zero3",
    }  # fmt: skip
    made = predict_transformer_run(row)
    assert made.run.recompute.policy == "none" and made.memory.total > 4 / 3 * made.memory.capacity
    assert predict_transformer_run(row | {"framework": "NeMo"}).run.recompute.policy == "full"


SILENT = {
    "source": "a page", "framework": "Megatron-Bridge (NeMo container 25.11)", "model": "Any", "layers": 36,
    "hidden": 2880, "heads": 64, "kv_heads": 8, "gated_mlp": 1, "ffn_hidden": 2880, "vocab": 201088, "n_experts": 128,
    "top_k": 4, "seq_len": 4096, "device": "h100-sxm5-80gb", "n_gpus": 64, "tp": 1, "pp": 1, "dp": 64, "cp": 1, "ep": 8,
    "micro_batch": 4, "global_batch": 512, "dtype": "bf16", "software": "megatron-core", "recompute": "", "notes": "",
}  # fmt: skip


def test_modules_that_notes_say_were_recomputed() -> None:
    row = {
        "source": "a page", "model": "Qwen3-235B-A22B", "layers": 94, "hidden": 4096, "heads": 64, "kv_heads": 4,
        "ffn_hidden": 1536, "vocab": 151936, "n_experts": 128, "top_k": 8, "seq_len": 4096, "device": "h800-sxm5",
        "n_gpus": 256, "tp": 1, "pp": 32, "dp": 8, "cp": 1, "ep": 8, "vp": 3, "micro_batch": 1, "global_batch": 2048,
        "dtype": "bf16", "software": "megatron-core", "recompute": "selective",
    }  # fmt: skip
    assert run_of_transformer_row({**row, "notes": "forced balance; moe recomputed"}).recompute.modules == ("moe",)
    assert run_of_transformer_row({**row, "notes": "sums recomputed against the page"}).recompute.modules == ()
    stated = {**row, "notes": "moe recomputed", "recompute_modules": "layernorm+moe_act"}
    assert run_of_transformer_row(stated).recompute.modules == ("layernorm", "moe_act")
    assert run_of_transformer_row({**row, "recompute": "full", "notes": "moe recomputed"}).recompute.modules == ()
