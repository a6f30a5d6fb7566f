"""What a rank holds: layers by hand, stages as software cuts them, and published footprints."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paleo.layers.base import LAYERS, LayerImplementations
from paleo.lowering.program import CountedKernel, Program, Section
from paleo.lowering.stages_and_recompute import (
    _balanced_ends,
    _cut_balanced,
    _loads,
    balanced_chunk_layers,
    cut_by_flops,
    cut_into_stages,
    slowest_stage_time,
)
from paleo.network.graph import build_graph
from paleo.operations.base import Kernel
from paleo.operations.tensor import Tensor, default_precision
from paleo.predict import Prediction, predict
from paleo.schedules.base import SCHEDULES
from paleo.specs.model import load_model
from paleo.specs.run import Run, replace_fields
from paleo.specs.software import SoftwareProfile, load_software
from paleo.specs.system import load_system
from paleo.step.memory import MemoryFootprint
from paleo.tables.kinds._transformers import MemoryTable
from paleo.tables.run_tables import profile_at_release


def kept(choices: LayerImplementations, layer: str, x: Tensor, **options: Any) -> dict[str, float]:
    """Bytes that a layer keeps for backward in bf16, by tensor."""
    made = LAYERS[layer].model_validate(options).to_operations("layer", (x,), choices)
    saved = [one for operation in made.operations for one in operation.saved_tensors if one.role != "parameter"]
    return {one.name: one.bytes(default_precision("bf16")) for one in saved}


def test_an_eager_gate_keeps_its_function_too() -> None:
    """10 rows, 16 gates: 2 halves of 320 bytes and their product of 320; apart, silu(gate), another 320."""
    x = Tensor("x", ("batch", "seq", "hidden"), (2, 5, 8))
    options = {"ffn": 16, "activation": "swiglu", "bias": False}
    fused, eager = (kept(LayerImplementations(gates=one), "mlp", x, **options) for one in ("fused", "separate"))  # type: ignore[arg-type]
    assert sum(fused.values()) == 160 + 640 + 320
    assert sum(eager.values()) == 160 + 640 + 320 + 320


def test_a_gate_in_two_passes_has_the_flops_of_one() -> None:
    counts = []
    for gates in ("fused", "separate"):
        graph = build_graph(
            load_model("llama2-7b"), batch=1, choices=LayerImplementations(gates=gates), overrides={"layers": 1}
        )  # type: ignore[arg-type]
        kernels = [k for n in graph.nodes for op in n.operations for k in op.forward_kernels(default_precision("bf16"))]
        counts.append((sum(k.flops for k in kernels), len(kernels)))
    assert counts[1] == (counts[0][0], counts[0][1] + 1)


def test_what_losses_keep() -> None:
    """6 rows of 100 logits: log-probabilities in fp32, or the bf16 logits and a number a row."""
    x = Tensor("logits", ("batch", "seq", "vocab"), (2, 3, 100))
    assert sum(kept(LayerImplementations(loss="fused"), "cross_entropy", x).values()) == 6 * 100 * 4
    assert sum(kept(LayerImplementations(loss="recomputed"), "cross_entropy", x).values()) == 6 * 100 * 2 + 6 * 4


@pytest.mark.parametrize(("dtype", "fused", "separate"), [("fp32", "fused", "separate"), ("bf16", None, "upcast")])
def test_a_loss_of_two_functions_fills_a_gradient_and_reads_it(dtype: str, fused: str | None, separate: str) -> None:
    """600 fp32 log-probabilities are read and 600 gradients written, and a tensor in between is filled and read: 4
    bytes an element each, besides the gradient of 6 losses."""
    x, formats = Tensor("logits", ("batch", "seq", "vocab"), (2, 3, 100)), default_precision(dtype)
    layer = LAYERS["cross_entropy"].model_validate({})

    def moved(loss: str) -> float:
        (*_, last) = layer.to_operations("loss", (x,), LayerImplementations(loss=loss)).operations  # type: ignore[arg-type]
        (kernel,) = last.backward_kernels(formats)
        return kernel.bytes

    assert moved(separate) == 2 * (6 * 4 + 600 * 4 + 600 * 4)
    assert fused is None or moved(fused) == moved(separate) / 2


def test_a_tiled_loss_leaves_no_logits() -> None:
    """Llama 3 8B, 8,192 tokens: bf16 logits of 128,256 classes are neither kept (with a number a row) nor an output. A
    tile of the head's product has as many numbers as the hidden states, so a block's largest output is the largest:
    2 * 14,336 a token."""
    run = Run(gpus=8, dtype="bf16", global_batch=8, strategy="zero=3", recompute="full", software="torchtitan-eager")
    whole, tiled = (
        predict(load_model("llama3-8b"), load_system("dgx-h100"), replace_fields(run, {"kernels.cross_entropy": loss}))
        for loss in ("recomputed", "tiled")
    )
    logits = 8192 * 128_256 * 2
    assert whole.memory.activations - tiled.memory.activations == pytest.approx(logits)
    assert whole.memory.workspace - tiled.memory.workspace == pytest.approx(2 * (logits - 8192 * 28_672 * 2))
    assert tiled.step_time == whole.step_time


def test_a_loss_over_a_divided_vocabulary_holds_three_tensors_beside_the_kept_one() -> None:
    """PyTorch's loss_parallel: 2 x 8,192 tokens, a quarter of 128,256 logits in fp32 each; undivided, two such
    tensors, a gradient and its successor. nanotron's own holds two as well."""

    def needed(tp: int, software: str) -> float:
        strategy = f"tp={tp},sp" if tp > 1 else "dp"
        run = Run(gpus=tp, dtype="bf16", batch=2, strategy=strategy, recompute="full", software=software)
        made = predict(load_model("llama3-8b"), load_system("dgx-h100"), run)
        return max(section.workspace_bytes for section in made.program.sections)

    logits = 2 * 8192 * 128_256 * 4
    assert needed(1, "torchtitan") == needed(1, "nanotron") == 2 * logits
    assert (needed(4, "torchtitan"), needed(4, "nanotron")) == (3 * logits / 4, 2 * logits / 4)


@pytest.mark.parametrize(
    ("strategy", "schedule", "outputs"),
    [
        ("pp=4", "1f1b", [4, 3, 2, 0]),
        ("pp=4,vp=2", "interleaved", [11, 9, 7, 2.5]),
        ("pp=4", "chimera", [1.5, 4, 4, 1.5]),
    ],
)
def test_outputs_that_were_sent_are_kept_until_their_backward_pass(
    strategy: str, schedule: str, outputs: list[float]
) -> None:
    """Of GPT-2's stages, for each microbatch whose activations live; of the last piece only its losses, so half where
    that is one of a stage's two. Megatron-Core frees them."""
    profile = load_software("pytorch-eager")
    kept, freed = (
        predict(
            load_model("gpt2"),
            load_system("dgx-h100"),
            Run(gpus=4, batch=8, microbatch=1, strategy=strategy, schedule=schedule, model={"layers": 16}),
            profile.with_fields({"parallelism.pipeline_outputs": habit}),
        )
        for habit in ("kept", "freed")
    )
    assert profile.parallelism.pipeline_outputs == "kept"
    assert load_software("megatron-core").parallelism.pipeline_outputs == "freed"
    more = kept.step_arrays.stage_memory.activations - freed.step_arrays.stage_memory.activations
    size = 1024 * 768 * 2
    assert (more[:, 0] / size).tolist() == pytest.approx(outputs, abs=0.01)


def test_an_update_of_lists_of_tensors_needs_the_roots_of_second_moments() -> None:
    """GPT-2 XL, one short sequence: 16 bytes a parameter in mixed precision, and 4 more while PyTorch 2 updates, when
    nothing is gathered and no activation lives. Where activations take more, the update adds nothing."""
    model, system = load_model("gpt2-xl"), load_system("dgx-h100")
    lists = load_software("pytorch-eager")
    single = lists.with_fields({"gradients.listwise_updates": ()})

    def memory(software: SoftwareProfile, sequences: int, optimizer: str = "adam", **options: Any) -> MemoryFootprint:
        run = Run(gpus=1, dtype="bf16", global_batch=sequences, recompute="full", optimizer=optimizer, **options)
        return predict(model, system, run, software).memory

    short = {"model": {"seq": 16}}
    listed = memory(lists, 1, **short)
    states = listed.parameters + listed.gradients + listed.optimizer
    assert listed.allocated == pytest.approx(states * 20 / 16)
    assert memory(single, 1, **short).allocated < 1.1 * states
    assert memory(lists, 1, "momentum", **short) == memory(single, 1, "momentum", **short)
    assert memory(lists, 64) == memory(single, 64)
    assert load_software("pytorch-eager@1.13").gradients.listwise_updates == ()


def test_memory_of_a_step_is_that_of_its_stages() -> None:
    """The total of the arrays and the sum of the parts are reckoned apart."""
    for software in ("pytorch-eager", "torchtitan-eager"):
        run = Run(gpus=8, dtype="bf16", global_batch=8, software=software, strategy="pp=2,zero=1", model={"seq": 16})
        made = predict(load_model("gpt2-xl"), load_system("dgx-h100"), run)
        assert made.step_arrays.fullest_stage_memory[0] == pytest.approx(made.memory.total, rel=1e-12)


def test_rows_of_memory_state_attention_and_loss() -> None:
    """Each of 8 ranks of DeepSpeed with 262,144 tokens of Llama 3.1 8B ran on an H200: with whole logits, 63 GiB in
    sixteen bits, it would not have."""
    row = {
        "source": "s", "model": "Llama-3.1-8B", "device": "h200-sxm", "n_gpus": 8, "layers": 32, "hidden": 4096,
        "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "gated_mlp": 1, "vocab": 128256, "seq_len": 262144, "tp": 1,
        "pp": 1, "dp": 8, "dtype": "bf16", "micro_batch": 1, "global_batch": 8, "recompute": "full",
        "sharding": "zero3-offload", "software": "deepspeed", "framework": "DeepSpeed 0.19.2", "attention": "flash",
        "cross_entropy": "fused",
    }  # fmt: skip
    assert MemoryTable().predict_memory(row).fits
    assert not MemoryTable().predict_memory(row | {"cross_entropy": ""}).fits


def test_losses_for_metrics_move_logits_forward_alone_and_keep_nothing() -> None:
    """600 bf16 logits are read and written in fp32; those are read, and their log-softmax written: 14 bytes each."""
    x, formats = Tensor("logits", ("batch", "seq", "vocab"), (2, 3, 100)), default_precision("bf16")
    plain, measured = (
        LAYERS["cross_entropy"]
        .model_validate({})
        .to_operations("loss", (x,), LayerImplementations(loss="recomputed", metric_loss_evaluations=metrics))
        for metrics in (0, 2)
    )
    moved = [
        sum(
            kernel.bytes_read + kernel.bytes_written
            for operation in loss.operations
            for kernel in operation.forward_kernels(formats)
        )
        for loss in (plain, measured)
    ]
    assert moved[1] - moved[0] == 2 * 600 * 14
    assert sum(len(operation.backward_kernels(formats)) for operation in measured.operations) == 1
    assert kept(LayerImplementations(loss="recomputed", metric_loss_evaluations=2), "cross_entropy", x) == kept(
        LayerImplementations(loss="recomputed"), "cross_entropy", x
    )


def test_metrics_of_training_take_time_and_no_memory() -> None:
    """They come when the backward pass is over, and in training alone."""
    model, system = load_model("gpt2"), load_system("dgx-a100-80gb")
    composer = load_software("fsdp-composer")
    without = composer.with_fields({"fusion.metrics": 0})
    run = Run(gpus=8, batch=32, dtype="bf16", strategy="dp,zero=3", software="fsdp-composer")
    measured, plain = (predict(model, system, run, software) for software in (composer, without))
    assert measured.memory == plain.memory and measured.model_flops_per_step == plain.model_flops_per_step
    assert measured.step_time > 1.05 * plain.step_time
    forward = run.model_copy(update={"forward_only": True, "strategy": "dp"})
    assert predict(model, system, forward, composer).step_time == predict(model, system, forward, without).step_time


def program(*layers: tuple[int, float]) -> Program:
    """Sections by repeat and forward FLOP of their products."""

    def section(index: int, repeat: int, flops: float) -> Section:
        kernel = Kernel("product", "gemm", "gemm", "forward", flops, 0.0, 0.0, 0.0, {})
        counted = (CountedKernel(kernel, "layer", 1.0),) if flops else ()
        return Section(f"s{index}", repeat, counted, (), (), 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, ())

    return Program(tuple(section(i, *one) for i, one in enumerate(layers)))


def test_pieces_by_work_by_hand() -> None:
    """An embedding, 16 blocks of 1, a head of 4: the first piece passes half of 20 with its eleventh block."""
    assert cut_by_flops(program((1, 0.0), (16, 1.0), (1, 4.0)), 2) == [((0, 1), (1, 11)), ((1, 5), (2, 1))]
    blocks = [sum(n for i, n in piece if i == 1) for piece in cut_by_flops(program((1, 0.0), (80, 1.0), (1, 1.1)), 16)]
    assert blocks[:2] == [6, 5] and sum(blocks) == 80


def test_pieces_by_work_leave_none_empty() -> None:
    pieces = cut_by_flops(program((3, 1.0), (1, 100.0)), 4)
    assert len(pieces) == 4 and all(pieces)


@pytest.mark.parametrize("weights", [(3.0, 1.0, 2.0), (0.5, 2.0, 7.0), (10.0, 0.1, 0.1)])
@pytest.mark.parametrize("pieces", [2, 3, 5])
def test_the_heaviest_piece_is_as_light_as_of_all_cuts(weights: tuple[float, ...], pieces: int) -> None:
    """Every cut of an embedding, eight blocks and a head, tried one by one."""
    each = [weights[0], *[weights[1]] * 8, weights[2]]
    every = combinations(range(1, len(each)), pieces - 1)
    lightest = min(max(sum(each[a:b]) for a, b in pairwise((0, *ends, len(each)))) for ends in every)
    network = program((1, 1.0), (8, 1.0), (1, 1.0))
    chunks = _cut_balanced(network, weights, range(pieces))
    assert slowest_stage_time(network, weights, chunks, range(pieces)) == pytest.approx(lightest, rel=1e-9)
    layers = balanced_chunk_layers(network, weights, range(pieces))
    assert sum(layers) == 8 and len(layers) == pieces
    assert time_of_layers(network, weights, layers, range(pieces)) == pytest.approx(lightest, rel=1e-9)


def time_of_layers(
    network: Program, weights: tuple[float, ...], layers: tuple[int, ...], stages: Sequence[int]
) -> float:
    return slowest_stage_time(network, weights, cut_into_stages(network, weights, stages, layers), stages)


def test_chunks_of_a_stage_make_up_for_a_heavy_output_layer() -> None:
    """94 layers in 12 chunks on 4 stages, and an output layer of 3.1: 25 + 24 + 24 + (21 + 3.1) is the lightest.

    Chunks filled one after another up to the heaviest (4, 5, nine times 9, 5 with the output layer) come to 27.
    """
    network, weights = program((1, 0.0), (94, 1.0), (1, 3.1)), (0.0, 1.0, 3.1)
    stages = SCHEDULES["interleaved"].chunk_stages(4, 3)
    layers = balanced_chunk_layers(network, weights, stages)
    assert sum(layers) == 94 and sum(layers[3::4]) == 21 and max(layers) == 9
    assert time_of_layers(network, weights, layers, stages) == pytest.approx(25.0)
    assert slowest_stage_time(network, weights, _cut_balanced(network, weights, stages), stages) == pytest.approx(25.0)


def test_layers_that_do_not_divide_are_on_earlier_pieces_by_default_and_on_later_ones_in_plans() -> None:
    """78 layers beside an embedding of 0.1 and an output layer of 0.9 on 12 pieces, none heavier than 7."""
    network, weights = program((1, 0.0), (78, 1.0), (1, 0.9)), (0.1, 1.0, 0.9)
    layers = [sum(n for i, n in piece if i == 1) for piece in _cut_balanced(network, weights, range(12))]
    assert layers == [6, 7, 7, 7, 7, 7, 7, 7, 6, 6, 6, 5]
    assert balanced_chunk_layers(network, weights, range(12)) == (5, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 6)


PLACEMENTS = {"interleaved": 3, "zb-v": 2, "dualpipev": 2, "dualpipe": 1, "1f1b": 1}


@pytest.mark.parametrize("schedule", PLACEMENTS)
def test_no_stage_is_heavier_than_of_other_cuts(schedule: str) -> None:
    """Layers of one kind beside an embedding and an output layer: the lightest of all cuts. Layers of any weights: at
    most what chunks balanced one by one, or equally many layers for each chunk, come to."""
    drawn = random.Random(schedule)
    for _ in range(20):
        stages = SCHEDULES[schedule].chunk_stages(4 if PLACEMENTS[schedule] == 1 else 2, PLACEMENTS[schedule])
        middle, (first, last) = drawn.randint(len(stages), 11), (drawn.random(), 4 * drawn.random())
        uniform = [1.0 + first, *[1.0] * middle, 1.0 + last]
        every = [[*ends, len(uniform)] for ends in combinations(range(1, len(uniform)), len(stages) - 1)]
        lightest = min(_loads(uniform, ends, stages)[0] for ends in every)
        assert _loads(uniform, _balanced_ends(uniform, stages), stages)[0] == pytest.approx(lightest)
        mixed = [drawn.random() for _ in uniform]
        even = [len(mixed) * (piece + 1) // len(stages) for piece in range(len(stages))]
        reached, alone = _balanced_ends(mixed, stages), _balanced_ends(mixed, range(len(stages)))
        assert _loads(mixed, reached, stages) <= min(_loads(mixed, each, stages) for each in (alone, even))


def test_pieces_of_thousands_of_layers_are_filled_evenly() -> None:
    network = program((1, 1.0), (4999, 1.0))
    layers = balanced_chunk_layers(network, (1.0, 1.0), range(512))
    assert sum(layers) == 4999 and max(layers) == 10 and min(layers) > 0


def llama(strategy: str, **options: Any) -> Prediction:
    run = Run(gpus=8, dtype="bf16", strategy=strategy, software="nanotron", **options)
    return predict(load_model("llama2-7b"), load_system("dgx-h100"), run)


def test_software_cuts_the_pipeline() -> None:
    """nanotron counts the head of 4096 · 32000 as 0.65 blocks: 17 of 32 blocks are first; others deal them out."""
    held = llama("pp=2,dp=4", global_batch=8).memory.parameters
    even = predict(load_model("llama2-7b"), load_system("dgx-h100"), Run(gpus=8, dtype="bf16", strategy="pp=2,dp=4"))
    block, table = 4 * 4096**2 + 3 * 4096 * 11008, 4096 * 32000
    assert held == pytest.approx(2 * (17 * (block + 2 * 4096) + table), rel=1e-9)
    assert even.memory.parameters == pytest.approx(2 * (16 * (block + 2 * 4096) + table), rel=1e-3)


def test_offloaded_rows_are_mapped() -> None:
    from paleo.tables.kinds._transformers import run_of_transformer_row

    row = {
        "layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128, "gated_mlp": 1, "vocab": 100, "seq_len": 16,
        "n_gpus": 8, "dp": 8, "tp": 1, "pp": 1, "global_batch": 8, "dtype": "bf16", "sharding": "zero3-offload",
        "software": "pytorch-eager",
    }  # fmt: skip
    made = run_of_transformer_row(row)
    assert (made.strategy, made.offload.states) == ("dp=8,zero=3", "optimizer,gradients,parameters")
    assert run_of_transformer_row(row | {"sharding": "zero3"}).offload.states == "none"
    quoted = run_of_transformer_row(
        row | {"sharding": "zero3", "notes": "recipe: cpu_offloading_num_layers=16; seq-parallel=TP>1"}
    )
    assert (quoted.offload.states, quoted.offload.layers) == ("activations", 16)


def test_sharding_that_a_row_leaves_out_is_the_habit_of_the_software() -> None:
    from paleo.specs.software import load_software
    from paleo.tables.kinds._transformers import strategy_of_run

    row = {"dp": 8, "sharding": float("nan")}
    assert strategy_of_run(row, load_software("megatron-core")) == "dp=8,zero=1"
    assert strategy_of_run(row, load_software("pytorch-eager")) == "dp=8"
    assert strategy_of_run(row | {"sharding": "none"}, load_software("megatron-core")) == "dp=8"


def test_experts_are_shared_out_over_their_own_replicas_alone() -> None:
    """Eight experts on eight ranks: each expert is held once, so ZeRO has nothing of them to share out, and all ranks
    together keep each state once, as they do without expert parallelism. With two replicas of them each keeps half."""
    system, sizes = load_system("dgx-h100"), {"layers": 4}

    def states(strategy: str, gpus: int = 8) -> float:
        run = Run(gpus=gpus, batch=1, strategy=strategy, model=sizes)
        return predict(load_model("mixtral-8x7b"), system, run).memory.optimizer

    assert states("ep=8,zero=1") == pytest.approx(states("zero=1"), rel=1e-9)
    assert states("ep=8,zero=1", gpus=16) == pytest.approx(states("ep=8,zero=1") / 2, rel=1e-9)
    assert states("ep=8,zero=3") == states("ep=8,zero=1")


def test_rows_say_who_counted_their_memory() -> None:
    """What torch hands out; what its allocator reserves, a share more; with context and communicators what nvidia-smi
    shows."""
    table, row = MemoryTable(), MEGATRON | {"what": "torch.cuda.max_memory_allocated"}
    memory = table.predict_memory(row)
    asked = {"allocated": "torch.cuda.max_memory_allocated", "cached": "max_memory_reserved", "used": "nvidia-smi"}
    sizes = {name: table.predict_row(row | {"what": what}).value for name, what in asked.items()}
    assert sizes == {name: getattr(memory, name) for name in asked}
    assert sizes["cached"] / sizes["allocated"] - 1 == pytest.approx(
        load_software("megatron-core").memory.fragmentation
    )
    assert sizes["used"] - sizes["cached"] == pytest.approx(memory.reserved) and memory.reserved > 0


def test_an_allocator_does_not_reserve_more_than_there_is() -> None:
    full = MemoryFootprint(40.0, 20.0, 10.0, 6.0, 3.0, 1.0, 0.058, capacity=80.0)
    assert (full.total, full.allocated, full.cached, full.used) == (79.0, 78.0, 79.0, 80.0)
    beyond = MemoryFootprint(60.0, 20.0, 10.0, 6.0, 3.0, 1.0, 0.058, capacity=80.0)
    assert not beyond.fits and beyond.used == beyond.total == 99.0


def test_flat_copies_of_gradients_are_reserved_beside_what_they_follow() -> None:
    """GPT-2 XL's bf16 sums, 2 bytes a parameter, and 6 for each that a rank owns: no more is allocated where
    activations were larger, and a short step holds the copies in their place."""

    def memory(copies: tuple[float, float], seq: int, **options: Any) -> MemoryFootprint:
        run = Run(gpus=4, batch=4, model={"seq": seq}, **{"dtype": "bf16", "strategy": "zero=1", **options})
        profile = load_software("megatron-core").with_fields({"gradients.flat_copies": copies})
        return predict(load_model("gpt2-xl"), load_system("dgx-h100"), run, profile).memory

    plain, copied = memory((0, 0), 1024), memory((2, 6), 1024)
    size = (2 + 6 / 4) * plain.parameters / 2
    assert copied.total == plain.total and copied.flat_buffer_cache == pytest.approx(size)
    assert copied.cached - plain.cached == pytest.approx(size) == pytest.approx(copied.used - plain.used)
    assert memory((2, 6), 1024, strategy="dp").flat_buffer_cache == pytest.approx(plain.parameters)
    assert memory((2, 6), 1024, dtype="fp32").flat_buffer_cache == 0.0
    short, instead = memory((0, 0), 16), memory((2, 6), 16)
    left = short.activations + short.workspace - short.reserved
    assert left < size and instead.flat_buffer_cache == pytest.approx(left)
    assert instead.total - short.total == pytest.approx(size - left)


def test_fsdp2_has_its_root_two_blocks_and_flat_buffers_gathered() -> None:
    """Llama 3 8B: embedding and head, 128,256 x 4,096 each, and the last norm stay; of 218 M in a block two; and flat
    buffers of the root, which is larger than two blocks. Llama 3 70B's blocks, 856 M each, take twice as much."""
    block = {"llama3-8b": 218_112_000, "llama3-70b": 855_654_400}
    for name, hidden in (("llama3-8b", 4096), ("llama3-70b", 8192)):
        run = Run(gpus=64, dtype="bf16", batch=1, strategy="zero=3", recompute="full", software="torchtitan")
        sections, root = (
            predict(
                load_model(name), load_system("dgx-h100"), run, profile
            ).step_arrays.stage_memory.states.gathered_parameters[0, 0]
            for profile in (
                load_software("torchtitan").with_fields({"parallelism.gather_buffers": "sections"}),
                load_software("torchtitan"),
            )
        )
        outside = 2 * 128_256 * hidden + hidden
        assert sections == 2 * 2 * max(128_256 * hidden, block[name])
        assert root == 2 * (outside + 2 * block[name] + max(outside, 2 * block[name]))


@pytest.mark.parametrize(("strategy", "bytes_kept"), [("pp=2,dp=4,zero=1", 4), ("zero=3", 2 / 8)])
def test_fsdp2_keeps_whole_gradients_beside_a_pipeline_in_fp32(strategy: str, bytes_kept: float) -> None:
    run = Run(gpus=8, dtype="bf16", batch=2, strategy=strategy, software="torchtitan")
    memory = predict(load_model("llama3-8b"), load_system("dgx-h100"), run).memory
    narrow = 2 / 8 if strategy == "zero=3" else 2
    assert memory.gradients / memory.parameters == pytest.approx(bytes_kept / narrow)


def test_a_bucket_is_no_larger_than_all_gradients() -> None:
    """LeNet's gradients beside buckets of 5e8 elements; GPT-2 XL's are larger than a bucket."""
    small, large = (
        predict(
            load_model(name), load_system("dgx-h100"), Run(gpus=4, dtype="bf16", batch=1), profile
        ).step_arrays.batch
        for name, profile in (
            ("lenet", load_software("pytorch-eager").with_fields({"gradients.bucket_elements": 5e8})),
            ("gpt2-xl", load_software("pytorch-eager").with_fields({"gradients.bucket_elements": 5e8})),
        )
    )
    sizes = [
        float(each.layouts.bucket_memory(each.assignment.distinct_stages_and_chunks.stages)[0, 0])
        for each in (small, large)
    ]
    trained = float(
        small.layouts.stage_parameter_counts(small.assignment.distinct_stages_and_chunks.stages, trained=True)[0, 0]
    )
    assert sizes == [2 * 2 * trained, 2 * 2 * 5e8] and trained < 1e6


def test_a_diary_dates_the_state_of_its_software() -> None:
    """Until 2022-02-27 gradients are summed in bf16, later in fp32, too."""
    rows = {"software": "megatron-2021", "source": "BigScience", "framework": "Megatron-DeepSpeed 2022"}
    cited = "train/tr11-176B-ml/chronicles-prequel.md#L"
    early, late = (profile_at_release(rows | {"url_or_path": f"{cited}{n}"}, "megatron-deepspeed") for n in (892, 906))
    assert (early, late) == ("megatron-deepspeed@2022-02-27", "megatron-deepspeed")
    assert profile_at_release(rows | {"url_or_path": "another.md#L1"}, "megatron-deepspeed") == late
    sums = [load_software(name).gradients for name in (early, late)]
    assert [
        (each.main_gradient_bytes, each.casts_gradients_before_accumulation, each.flat_copies) for each in sums
    ] == [(0, True, (0, 6)), (4, True, (2, 0))]


def test_what_an_allocator_reserved_is_compared_where_notes_state_it() -> None:
    rows = pd.DataFrame([MEGATRON | {"notes": "66.55 GiB allocated, 70.88 GiB reserved"}, MEGATRON | {"notes": ""}])
    predicted, measured = MemoryTable().secondary_quantities(rows)["reserved by the allocator"]
    assert predicted[0] == MemoryTable().predict_memory(MEGATRON).cached
    assert measured[0] == pytest.approx(70.88 * 2**30)
    assert np.isnan(predicted[1]) and np.isnan(measured[1])


MEGATRON = {
    "source": "SimuMax", "model": "llama3-70b", "device": "b200", "system": "dgx-b200", "n_gpus": 8, "layers": 12,
    "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn_hidden": 28672, "gated_mlp": 1, "vocab": 128256, "seq_len": 4096,
    "tp": 2, "pp": 1, "dp": 4, "dtype": "bf16", "micro_batch": 1, "global_batch": 16, "recompute": "none",
    "sharding": "zero1", "sequence_parallel": 1, "software": "megatron-core",
}  # fmt: skip


def test_the_last_stage_of_an_interleaved_pipeline_keeps_the_logits_of_one_microbatch() -> None:
    """Its last chunk goes backward as soon as it has gone forward; 4 stages of 2 chunks hold 5 passes there."""
    run = Run(gpus=4, global_batch=16, microbatch=2, dtype="bf16", strategy="pp=4,vp=2", software="megatron-core")
    wide, wider = (
        predict(
            load_model("gpt2"), load_system("dgx-h100"), run.model_copy(update={"model": {"layers": 16, "vocab": n}})
        )
        for n in (500_000, 600_000)
    )
    logits = [sum(s.saved_bytes for s in each.program.sections if s.repeat == 1) for each in (wide, wider)]
    assert wider.memory.activations - wide.memory.activations == pytest.approx(logits[1] - logits[0])
