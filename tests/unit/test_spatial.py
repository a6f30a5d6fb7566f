"""Rule C: windows over a split dim exchange their borders. Volumes are those of Dryden et al., Improving strong-scaling
of CNN training by exploiting finer-grained parallelism, IPDPS 2019: with O = floor(K / 2) rows, each neighbour sends
O · N · C · W of the input forward, O · N · F · W of the output's gradient backward, and in two dims corners of O²."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paleo.errors import PlanError
from paleo.lowering.program import Program, lower_graph
from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import SlidingWindow, default_precision
from paleo.parallel.placement import STRATEGY_PRESETS, Mesh, override_placement, parse_strategy, strategy_placement
from paleo.parallel.propagation import LocalLayer, propagate_placement
from paleo.predict import Prediction, predict
from paleo.specs.model import build_model_spec, load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

N, C, F, H, W = 4, 8, 16, 32, 24
SYSTEM = load_system("dgx-a100-80gb")


def image(*layers: Any, height: int = H) -> Graph:
    """A small network behind a convolution, so that what follows reads something that needs a gradient."""
    dims = {"batch": "=batch", "channels": 3, "height": height, "width": W}
    head = {"title": "t", "task": "t", "source": "t", "inputs": {"x": {"dims": dims}}}
    stem = {"name": "stem", "conv": {"channels": C, "kernel": 1, "bias": False}}
    return build_graph(build_model_spec(head | {"layers": [stem, *layers]}, "t.yaml"), batch=N)


def conv(name: str = "conv", channels: int = F, kernel: int = 3, stride: int = 1, **more: Any) -> dict[str, Any]:
    options = {"channels": channels, "kernel": kernel, "stride": stride, "padding": kernel // 2, "bias": False, **more}
    return {"name": name, "conv": options}


def placed(of: Graph, strategy: str, stated: dict[str, Any] | None = None) -> dict[str, LocalLayer]:
    chosen = parse_strategy(strategy)
    nodes = propagate_placement(of, strategy_placement(of, chosen, stated or {}), Mesh.from_degrees(chosen.degrees))
    return {one.node.name: one for one in nodes}


def owed(node: LocalLayer) -> list[tuple[str, str, str, int]]:
    return sorted((c.operation, c.axis, c.phase, int(c.tensor.elements)) for c in node.communications)


def sends(axis: str, when: str, *elements: int) -> list[tuple[str, str, str, int]]:
    return [("send_recv", axis, when, one) for one in elements]


@pytest.mark.parametrize("kernel", [1, 3, 5, 7])
def test_halo_of_a_convolution_is_the_published_one(kernel: int) -> None:
    """Two neighbours, O rows each: O·N·C·W forward, O·N·F·W backward; nothing for a kernel of 1."""
    rows = kernel // 2
    forward, backward = [rows * N * C * W] * 2 * (rows > 0), [rows * N * F * W] * 2 * (rows > 0)
    found = owed(placed(image(conv(kernel=kernel)), "spatial=4,dp=1")["conv"])
    assert found == sends("spatial", "backward", *backward) + sends("spatial", "forward", *forward)


def test_two_ranks_have_one_neighbour_each() -> None:
    found = owed(placed(image(conv()), "spatial=2")["conv"])
    assert found == sends("spatial", "backward", N * F * W) + sends("spatial", "forward", N * C * W)


def test_two_dims_exchange_sides_and_corners() -> None:
    """Height over 4 ranks, width over 4: of the shares h × w each rank sends 2·O·w, 2·O·h and 4·O² (times N·C, N·F)."""
    graph = image(conv(kernel=5))
    both = {"*": {"height": "spatial", "width": "tp"}}
    node = placed(graph, "batch,spatial=4,tp=4", both)["conv"]
    for when, channels in (("forward", C), ("backward", F)):
        total = sum(int(c.tensor.elements) for c in node.communications if c.phase == when)
        assert total == N * channels * (2 * 2 * (W // 4) + 2 * 2 * (H // 4) + 4 * 2**2)
    assert node.parameters[0][1] == ("spatial", "tp"), "the filter's gradient is summed over both"


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "halo", "gradient"),
    [
        (3, 1, 1, 1, (1, 1), (1, 1)),
        (3, 2, 1, 1, (1, 0), (0, 1)),
        (7, 2, 3, 1, (3, 2), (1, 2)),
        (1, 2, 0, 1, (0, 0), (0, 0)),
        (2, 2, 0, 1, (0, 0), (0, 0)),
        (3, 1, 2, 2, (2, 2), (2, 2)),
        (3, 2, 0, 1, (0, 1), (1, 0)),
    ],
)
def test_borders_by_brute_force(
    kernel: int, stride: int, padding: int, dilation: int, halo: tuple[int, int], gradient: tuple[int, int]
) -> None:
    """Which rows an inner rank reads of others, counted index by index: 4 shares of 16 outputs and 16·stride inputs."""
    window = SlidingWindow("o", "i", "k", stride, dilation, padding, kernel)
    assert (window.halo, window.gradient_halo) == (halo, gradient)
    outs, ins = range(16, 32), range(16 * stride, 32 * stride)
    reads = {o * stride + j * dilation - padding for o in outs for j in range(kernel)}
    below, above = sum(i < ins[0] for i in range(min(reads), ins[0])), max(0, max(reads) - ins[-1])
    assert (below, above) == halo
    readers = {o for o in range(64) for j in range(kernel) if o * stride + j * dilation - padding in ins}
    assert (max(0, outs[0] - min(readers)), max(0, max(readers) - outs[-1])) == gradient


def test_pools_exchange_borders_and_a_transposed_convolution_turns_them_round() -> None:
    pool = placed(image({"name": "pool", "max_pool": {"kernel": 3, "stride": 2, "padding": 1}}), "spatial=4")["pool"]
    assert owed(pool) == sends("spatial", "backward", N * C * W // 2) + sends("spatial", "forward", N * C * W)
    rise = {"name": "rise", "transposed_conv": {"channels": F, "kernel": 4, "stride": 2, "padding": 1, "bias": False}}
    up = placed(image(rise), "spatial=4")["rise"]
    forward, backward = (
        sends("spatial", "forward", N * C * W, N * C * W),
        sends("spatial", "backward", *[N * F * 2 * W] * 2),
    )
    assert owed(up) == sorted(backward + forward)


def test_batch_norm_sums_over_the_ranks_of_a_sample_alone() -> None:
    """Two numbers a channel over spatial, each way; over dp each replica keeps its own. Gradients go over both."""
    node = placed(image({"name": "norm", "batch_norm": {}}), "spatial=2,dp=2")["norm"]
    assert owed(node) == [("all_reduce", "spatial", when, 2 * C) for when in ("backward", "forward")]
    assert {axes for _, axes in node.parameters} == {("dp", "spatial")}


def test_behind_the_last_image_ranks_share_the_samples() -> None:
    """A pooled sum is scattered over the samples (rule A), its gradient gathered; the head is not computed twice."""
    graph = image(conv(), "global_pool", {"name": "head", "linear": {"features": 10, "bias": False}})
    head = placed(graph, "spatial=2")["head"]
    assert owed(head) == [("all_gather", "spatial", "backward", N * F), ("reduce_scatter", "spatial", "forward", N * F)]
    assert head.operations[0].out.sizes == (N // 2, 10)
    assert head.parameters[0][1] == ("spatial",)


def test_a_flattened_image_changes_from_rows_to_samples() -> None:
    """Rule B through a view: each rank holds half of it before and after."""
    head = placed(image("flatten", {"name": "head", "linear": {"features": 10, "bias": False}}), "spatial=2")["head"]
    half = N * C * H * W // 2
    assert owed(head) == [("all_to_all", "spatial", when, half) for when in ("backward", "forward")]


def test_a_broadcast_scale_is_gathered_and_its_gradient_summed() -> None:
    """Squeeze and excite: one number a channel, used on every row."""
    scale = [
        {"global_pool": {"keep_space": True}},
        {"name": "small", **{k: v for k, v in conv(channels=C, kernel=1).items() if k != "name"}},
    ]
    node = placed(image({"name": "gate", "branches": [[], scale], "join": "multiply"}), "spatial=2")["gate.multiply"]
    assert ("all_gather", "spatial", "forward", N * C) in owed(node)
    assert ("reduce_scatter", "spatial", "backward", N * C) in owed(node)


def program(model: str, strategy: str, batch: int = 8, **sizes: Any) -> Program:
    graph = build_graph(load_model(model), batch=batch, overrides=sizes)
    chosen = parse_strategy(strategy)
    return lower_graph(
        graph,
        STRATEGY_PRESETS[chosen.preset](graph, chosen),
        Mesh.from_degrees(chosen.degrees),
        default_precision("bf16"),
    )


@pytest.mark.parametrize("strategy", ["spatial=2", "spatial=4,dp=2", "spatial=7,dp=1"])
@pytest.mark.parametrize("model", ["resnet50", "vgg16"])
def test_flop_are_conserved_over_ranks(model: str, strategy: str) -> None:
    """At a resolution that divides at every stage, and a batch that the ranks can share behind the last image."""
    sizes, ranks = {"resolution": 224 * 4}, Mesh.from_degrees(parse_strategy(strategy).degrees).size
    if strategy.startswith("spatial=7"):
        sizes = {"resolution": 224}
    split, whole = program(model, strategy, batch=56, **sizes), program(model, "dp", batch=56, **sizes)
    assert split.flops() * ranks == pytest.approx(whole.flops(), rel=1e-12)
    assert split.parameter_count == whole.parameter_count
    assert split.saved_bytes * ranks == pytest.approx(whole.saved_bytes, rel=2e-3), "statistics of norms are on each"


def test_bytes_are_conserved_but_for_the_borders() -> None:
    """What all ranks read is what one reads, the rows of the neighbours, and the filters once for each."""
    graph = image(conv(kernel=5))
    formats = default_precision("bf16")
    alone, shared = (placed(graph, strategy)["conv"].operations[0] for strategy in ("dp", "spatial=4"))
    for one, part, channels in zip(alone.forward_kernels(formats), shared.forward_kernels(formats), (C,), strict=True):
        borders, filters = 4 * 4 * N * channels * W * 2.0, 3 * F * C * 25 * 2.0
        assert 4 * part.bytes_read == one.bytes_read + borders + filters
        assert 4 * part.bytes_written == one.bytes_written
    data, _ = shared.backward_kernels(formats)
    assert (
        4 * data.bytes_read
        == alone.backward_kernels(formats)[0].bytes_read + 4 * 4 * N * F * W * 2.0 + 3 * F * C * 25 * 2.0
    )


def test_uneven_rows_wait_for_the_fullest_rank() -> None:
    node = placed(image(conv(), height=7), "spatial=4")["conv"]
    assert node.operations[0].out.sizes == (N, F, 2, W), "the fullest of 2, 2, 2 and 1"


@pytest.mark.parametrize(
    ("height", "kernel", "words"),
    [(7, 3, "height 7 cannot be divided over 8 ranks: some would have none"), (9, 5, "reach 2 beyond a share of 1")],
)
def test_too_few_rows_are_refused(height: int, kernel: int, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        placed(image(conv(kernel=kernel), height=height), "spatial=8")


def test_the_filter_dims_cannot_be_placed() -> None:
    graph = image(conv())
    preset = STRATEGY_PRESETS["batch"](graph, parse_strategy("batch"))
    with pytest.raises(PlanError, match="kernel_height cannot be divided"):
        propagate_placement(
            graph, override_placement(preset, graph, {"conv": {"kernel_height": "tp"}}), Mesh.from_degrees({"tp": 3})
        )


def made(strategy: str, **more: Any) -> Prediction:
    return predict(load_model("resnet50"), SYSTEM, Run(**{"gpus": 8, "global_batch": 64, "strategy": strategy} | more))


def test_a_degree_of_one_changes_nothing() -> None:
    assert made("spatial=1,dp=8").breakdown == made("dp=8").breakdown
    assert made("spatial=1,dp=8").memory == made("dp=8").memory


def test_a_batch_that_is_too_small_for_the_ranks_gains_from_rows() -> None:
    """The purpose of the method: beyond one sample a rank data parallelism has nothing left to divide."""
    small = {"global_batch": 2, "model": {"resolution": 896}, "calibration": "ideal"}
    rows, samples = made("spatial=4,dp=2", **small), made("dp", **small)
    assert samples.plan.idle_gpus == 6 and rows.plan.idle_gpus == 0
    assert rows.step_time < samples.step_time
    assert rows.memory.activations < 0.3 * samples.memory.activations
    assert rows.plan.strategy_text == "spatial=4,dp=2"


def test_borders_are_priced_by_the_network() -> None:
    """Each sent border takes what the link between neighbours takes for it, and computing waits for it."""
    of = made("spatial=8", model={"resolution": 896})
    moved = [
        t for s in of.program.sections for t in s.collectives for _ in range(s.repeat) if t.operation == "send_recv"
    ]
    from paleo.step.backend import build_backend

    fabric = build_backend(SYSTEM, of.run, "bf16").fabric
    stride, ranks = np.full(len(moved), of.plan.mesh.stride(("spatial",))), np.full(len(moved), 8)
    seconds = fabric.collective_times("send_recv", stride, ranks, np.array([one.payload_bytes for one in moved]))
    borders = sum(each * one.calls_per_iteration for each, one in zip(seconds, moved, strict=True))
    assert 0 < borders < of.breakdown.communication_total
    assert of.breakdown.communication_exposed >= borders
