"""The streams in closed form against the engine's timeline, and parts of a step worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from paleo.layers.base import LayerImplementations
from paleo.lowering.program import CountedKernel, LayerCollective, Program, Section
from paleo.operations.base import Kernel, configure_optimizer
from paleo.operations.tensor import default_precision
from paleo.predict import Prediction, predict
from paleo.pricing.kernels import KernelTimes
from paleo.schedules.base import SCHEDULES
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.step.backend import LayerGraphCache
from paleo.step.memory import (
    count_layers_per_chunk,
    live_microbatches,
    state_memory,
    total_stage_memory,
    workspace_memory,
)
from paleo.step.section_times import MEMORY_FIELDS, section_times
from paleo.step.streams import LayerIteration, simulate_streams

RUNS: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"gpus": 8}),
    ("gpt2", {"gpus": 8, "microbatch": 2, "strategy": "zero=1"}),
    ("gpt2", {"gpus": 16, "strategy": "zero=3", "microbatch": 2}),
    ("gpt2", {"gpus": 16, "strategy": "zero=3", "exchange": "after", "recompute": "full"}),
    ("gpt2", {"gpus": 16, "strategy": "tp=2,cp=2,zero=3"}),
    ("resnet50", {"gpus": 16, "strategy": "zero=3", "batch": 4}),
    ("vgg16", {"gpus": 64, "batch": 2}),
    ("alexnet", {"gpus": 8, "strategy": "owt"}),
    ("mixtral-8x7b", {"gpus": 16, "strategy": "ep=8", "experts.imbalance": 1.2}),
    ("gpt2", {"gpus": 32, "strategy": "zero=3,shard=8,cp=2,ulysses"}),
    ("resnet50", {"gpus": 16, "strategy": "spatial=4,zero=2", "batch": 16}),
]


@pytest.mark.parametrize(("model", "options"), RUNS)
def test_streams_end_when_the_engine_says(model: str, options: dict[str, Any]) -> None:
    made = predict(load_model(model), load_system("dgx-h100"), Run(**options))
    assert made.step_time == pytest.approx(made.timeline.end_time, rel=1e-12)


def test_hidden_communication_is_counted_as_the_timeline_has_it() -> None:
    made = predict(load_model("vgg16"), load_system("dgx-h100"), Run(gpus=64, batch=2))
    buckets = sum(event.end - event.start for event in made.timeline.events if event.task.kind == "bucket")
    assert made.breakdown.communication_total == pytest.approx(buckets)


def test_two_streams_by_hand() -> None:
    """Backward passes of 2 s; buckets of 3 s go out after the first and of 1 s after the second: 2 + 3 + 1 beside 4 s
    of work."""
    one = (("dp",), 1.0)
    order = [LayerIteration(0, "backward", 1, buckets=(one,)), LayerIteration(1, "backward", 1, buckets=(one,))]
    compute, network = simulate_streams(order, np.zeros(2), np.full(2, 2.0), None, [3.0, 1.0], 0.0)
    assert (float(compute), float(network)) == (4.0, 6.0)


def test_gathered_weights_are_awaited_by_hand() -> None:
    """Gathers of 5 s, iterations of 1 s: the first starts at 5 s; the second gather has been sent at once, the third
    after the first iteration."""
    order = [LayerIteration(0, "forward", 1, waits_for_gather=True)] * 3
    compute, network = simulate_streams(order, np.ones(1), np.zeros(1), np.full(1, 5.0), [0.0] * 3, 0.0)
    assert (float(compute), float(network)) == (16.0, 15.0)


def test_states_are_shared_as_zero_says() -> None:
    """Adam in bf16: 2 bytes of parameter, 2 of gradient, 12 of states; stages 1, 2 and 3 divide one after another by 4
    ranks."""
    parts = {}
    for zero in range(4):
        held = state_memory(
            np.array([100.0]), np.array([100.0]), 10.0, 4, zero, configure_optimizer("adam"), default_precision("bf16")
        )
        parts[zero] = [float(one[0]) for one in (held.parameters, held.gradients, held.optimizer)]
    assert parts == {0: [200, 200, 1200], 1: [200, 200, 300], 2: [200, 50, 300], 3: [50, 50, 300]}
    held = state_memory(
        np.array([100.0]), np.array([100.0]), 10.0, 4, 3, configure_optimizer("adam"), default_precision("bf16")
    )
    total = total_stage_memory(
        held, np.array([7.0]), workspace_memory(np.ones((1, 2)), np.array([6.0, 2.0]), np.array([0.0, 2.0]), 8.0)
    )
    assert float(total[0]) == 50 + 50 + 300 + 7 + (2 * 3 + 2 * 4 + 2) + 2 * 10 * 2


def test_a_stage_needs_no_workspace_for_layers_of_another() -> None:
    """Logits of 100 bytes on the last stage, activations of 3 on the first."""
    held = np.array([[2.0, 0.0], [1.0, 1.0]])
    assert workspace_memory(held, np.array([6.0, 200.0]), np.zeros(2), 8.0).tolist() == [14.0, 208.0]


def test_chunks_go_round_the_stages() -> None:
    pieces = [((0, 1), (1, 2)), ((1, 2),), ((1, 2),), ((1, 2), (2, 1))]
    placed = count_layers_per_chunk(3, pieces, SCHEDULES["interleaved"].stage_chunks(2, 2))
    assert placed.sum(axis=1).tolist() == [[1, 4, 0], [0, 4, 1]]


def test_chunks_of_a_v_come_back_to_the_first_stage() -> None:
    pieces = [((0, 1), (1, 2)), ((1, 2),), ((1, 2),), ((1, 2), (2, 1))]
    placed = count_layers_per_chunk(3, pieces, SCHEDULES["zb-v"].stage_chunks(2, 2))
    assert placed.tolist() == [[[1, 2, 0], [0, 2, 1]], [[0, 2, 0], [0, 2, 0]]]


def test_two_copies_hold_everything_twice() -> None:
    pieces = [((0, 1), (1, 2)), ((1, 2), (2, 1))]
    placed = count_layers_per_chunk(3, pieces, SCHEDULES["chimera"].stage_chunks(2, 1))
    assert placed.sum(axis=1).tolist() == [[1, 4, 1], [1, 4, 1]]


def test_one_stage_keeps_one_microbatch() -> None:
    assert live_microbatches(SCHEDULES["1f1b"], 1, 8, 1).tolist() == [[1.0]]
    assert live_microbatches(SCHEDULES["1f1b"], 4, 8, 1).tolist() == [[4], [3], [2], [1]]
    assert live_microbatches(SCHEDULES["interleaved"], 2, 8, 2).tolist() == [[3, 2], [2, 1]]


@pytest.mark.parametrize(("stages", "chunks"), [(4, 2), (8, 3), (12, 8)])
def test_first_stage_keeps_what_is_published(stages: int, chunks: int) -> None:
    """In activations of a whole network's layers (p stages of L / p): L for 1F1B whatever the microbatches, L (1 + (p −
    1) / (p m)) for m interleaved chunks (Korthikanti et al. 2022, section 4.2.3), all n for GPipe (Huang et al. 2019),
    and as 1F1B for ZB-H1 (Qi et al. 2024, table 2)."""
    count = 4 * stages
    first = {
        name: live_microbatches(SCHEDULES[name], stages, count, chunks if name == "interleaved" else 1)[0].mean()
        / stages
        for name in ("1f1b", "interleaved", "gpipe", "zb-h1")
    }
    assert first["1f1b"] == first["zb-h1"] == 1.0 and first["gpipe"] == 4.0
    assert first["interleaved"] == pytest.approx(1.0 + (stages - 1) / (stages * chunks))


def test_a_v_keeps_what_the_first_stage_of_1f1b_keeps_and_chimera_up_to_that() -> None:
    """Qi et al. 2024, section 6: p microbatches of a stage's activations; Li and Hoefler 2021, table 2: p / 2 + 1 to p,
    here of the half of its turns that each copy is."""
    assert live_microbatches(SCHEDULES["zb-v"], 4, 16, 2).tolist() == [[7, 1], [6, 2], [5, 3], [4, 4]]
    assert live_microbatches(SCHEDULES["chimera"], 6, 12, 1).sum(axis=1).tolist() == [4, 5, 6, 6, 5, 4]


def test_collectives_beside_computation_cost_what_it_does_not_cover() -> None:
    """A ring hides behind the core of attention alone, other collectives behind their section."""
    kernels = np.array([3.0, 5.0])
    for name, forward, hidden in (("attention.core", 7.0, 3.0), ("gather.again", 2.0, 8.0)):
        one = LayerCollective(name, "all_gather", "cp", 1.0, "forward", 1, overlapped=True)
        core, rest = (CountedKernel(_kernel(called), "layer", 1.0) for called in ("attention.core", "mlp"))
        section = Section("block", 1, (core, rest), (one,), (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())
        table = section_times(Program((section,)), times(kernels), np.array([10.0]), [np.zeros(1)] * len(MEMORY_FIELDS))
        assert (float(table.forward_transfers[0]), float(table.hidden_transfers[0])) == (forward, hidden)


@pytest.mark.parametrize(("experts", "waiting", "power"), [(0.0, 2.5, 4.0), (8.0, 4.0, 4.0), (8.0, 2.5, 2.5)])
def test_a_host_that_waits_for_counts_of_tokens_is_never_far_ahead(
    experts: float, waiting: float, power: float
) -> None:
    """3 s of the device behind 4 s of the host, in a section that deals out tokens or does not."""
    route = CountedKernel(replace(_kernel("route"), expert_count=experts), "layer", 1.0)
    section = Section("block", 1, (route,), (), (), *(0.0,) * 6, ())
    issued = replace(times(np.array([3.0])), host_time=np.array([4.0]))
    table = section_times(
        Program((section,)), issued, np.zeros(0), [np.zeros(1)] * len(MEMORY_FIELDS), waiting_exponent=waiting
    )
    assert float(table.forward[0]) == pytest.approx((3.0**power + 4.0**power) ** (1.0 / power))


def times(total: npt.NDArray[np.float64]) -> KernelTimes:
    """Kernels of some seconds that cost the host nothing."""
    none = np.zeros_like(total)
    return KernelTimes(total, none, none, none > 0, none, none)


def _kernel(name: str) -> Kernel:
    return Kernel(name, "memory", "elementwise", "forward", 0.0, 0.0, 1.0, 1.0, {"rows": 1.0, "columns": 1.0})


def test_collectives_dealt_out_beside_products_leave_their_first_piece() -> None:
    """4 s of collectives in 4 pieces beside 3 s of products: three quarters of 3 s are hidden; attention's own products
    and what has no weights cover nothing."""
    product = replace(_kernel("up"), family="gemm", operation="gemm")
    kernels = [
        CountedKernel(one, "layer", 1.0) for one in (product, replace(product, name="attention.core"), _kernel("act"))
    ]
    one = LayerCollective("up<x", "all_gather", "tp", 1.0, "forward", 1, overlap_chunks=4)
    section = Section("block", 1, tuple(kernels), (one,), (), *(0.0,) * 6, ())
    table = section_times(
        Program((section,)), times(np.array([3.0, 9.0, 9.0])), np.array([4.0]), [np.zeros(1)] * len(MEMORY_FIELDS)
    )
    assert (float(table.forward_transfers[0]), float(table.hidden_transfers[0])) == (4.0 - 2.25, 2.25)


def test_tensor_overlap_hides_gathers_and_scatters_but_no_sums() -> None:
    """Sequence parallelism turns sums into gathers and scatters, which alone can be made piece by piece."""

    def made(strategy: str, overlap: bool) -> Prediction:
        profile = load_software("megatron-core").with_fields({"overlap.tensor": overlap})
        run = Run(gpus=8, batch=1, strategy=strategy, software="megatron-core", model={"layers": 4})
        return predict(load_model("llama2-7b"), load_system("dgx-h100"), run, profile)

    plain, dealt = made("tp=8,sp", False).breakdown, made("tp=8,sp", True).breakdown
    assert dealt.communication_exposed < 0.6 * plain.communication_exposed
    assert dealt.communication_total == pytest.approx(plain.communication_total)
    assert made("tp=8", True).breakdown == made("tp=8", False).breakdown


@pytest.mark.parametrize(("system", "overlapping"), [("dgx-h100", False), ("gb200-nvl72", True)])
def test_tensor_overlap_of_transformer_engine_ends_at_nvlink(system: str, overlapping: bool) -> None:
    """Its buffers are mapped over NVLink: two nodes of a DGX have none in common, sixteen GPUs of an NVL72 do."""

    def exposed(overlap: bool) -> float:
        profile = load_software("megatron-core").with_fields({"overlap.tensor": overlap})
        run = Run(gpus=16, batch=1, strategy="tp=16,sp", software="megatron-core", model={"layers": 4})
        return predict(load_model("llama2-7b"), load_system(system), run, profile).breakdown.communication_exposed

    assert (exposed(True) < exposed(False)) == overlapping


def test_the_latest_networks_are_kept() -> None:
    """One for each model, batch and set of parameters; of three the one that was asked for longest ago is built anew,
    and so is that of a model which was read again."""
    recent, model, choices = LayerGraphCache(2), load_model("lenet"), LayerImplementations()
    first, second = recent.graph(model, 1, choices, {}), recent.graph(model, 2, choices, {})
    assert (first.batch, second.batch) == (1, 2) and recent.graph(model, 1, choices, {}) is first
    wider = recent.graph(model.model_copy(), 1, choices, {})
    assert wider is not first and wider == first
    assert recent.graph(model, 1, choices, {}) is first and recent.graph(model, 2, choices, {}) is not second
