"""Communication that follows from placements, term by term against the published volumes."""

from __future__ import annotations

import pytest

from paleo.errors import PlanError
from paleo.lowering.program import LayerCollective, Program, lower_graph
from paleo.network.graph import build_graph
from paleo.operations.tensor import default_precision
from paleo.parallel.placement import STRATEGY_PRESETS, Mesh, parse_strategy
from paleo.specs.model import load_model

BATCH, SEQ, HIDDEN = 8, 2048, 12288
SBH = BATCH * SEQ * HIDDEN * 2.0  # bytes of one bf16 activation of GPT-3


def program(model: str, strategy: str, batch: int = BATCH) -> Program:
    graph = build_graph(load_model(model), batch=batch)
    chosen = parse_strategy(strategy)
    mesh = Mesh.from_degrees(chosen.degrees)
    return lower_graph(graph, STRATEGY_PRESETS[chosen.preset](graph, chosen), mesh, default_precision("bf16"))


def block(of: Program) -> tuple[LayerCollective, ...]:
    return max(of.sections, key=lambda section: section.repeat).collectives


def volumes(transfers: tuple[LayerCollective, ...], *, overlapped: bool = False) -> list[tuple[str, str, str, float]]:
    chosen = [(t.operation, t.axis, t.phase, t.payload_bytes) for t in transfers if t.overlapped == overlapped]
    return sorted(chosen)


def test_megatron_block_owes_two_all_reduces_each_way() -> None:
    """Shoeybi et al. 2019, figure 4: g forward and f backward, for attention and for the MLP, b·s·h each."""
    expected = [("all_reduce", "tp", "backward", SBH)] * 2 + [("all_reduce", "tp", "forward", SBH)] * 2
    assert volumes(block(program("gpt3-175b", "tp=8"))) == expected


def test_sequence_parallel_turns_them_into_gathers_and_scatters() -> None:
    """Korthikanti et al. 2022, section 4.2.2: all-gather and reduce-scatter in place of each all-reduce, the same
    volume."""
    found = volumes(block(program("gpt3-175b", "tp=8,sp")))
    pairs = [("all_gather", "tp"), ("reduce_scatter", "tp")]
    expected = sorted(
        (op, axis, phase, SBH) for op, axis in pairs for phase in ("forward", "backward") for _ in range(2)
    )
    assert found == expected
    again = volumes(block(program("gpt3-175b", "tp=8,sp")), overlapped=True)
    assert again == [("all_gather", "tp", "backward", SBH)] * 2


def test_vocabulary_parallel_loss_exchanges_three_numbers_a_token() -> None:
    loss = next(s for s in program("gpt3-175b", "tp=8").sections if s.name.startswith("cross_entropy"))
    assert volumes(loss.collectives) == [("all_reduce", "tp", "forward", 3 * BATCH * SEQ * 4.0)]


def test_parameters_are_shared_out_over_tensor_ranks() -> None:
    whole, eighth = program("gpt3-175b", "tp=1"), program("gpt3-175b", "tp=8")
    norms_and_positions = 8 * eighth.parameter_count - whole.parameter_count
    assert 0 < norms_and_positions < 0.003 * whole.parameter_count
    assert whole.parameter_count == build_graph(load_model("gpt3-175b"), batch=1).parameters


@pytest.mark.parametrize("strategy", ["tp=4", "tp=8,sp", "dp=8", "tp=2,dp=4", "cp=4", "tp=2,cp=2,dp=2"])
def test_flops_are_conserved_over_ranks(strategy: str) -> None:
    degrees = parse_strategy(strategy).degrees
    model = build_graph(load_model("llama3-8b"), batch=8)
    alone = lower_graph(
        model, STRATEGY_PRESETS["dp"](model, parse_strategy("dp")), Mesh.from_degrees({}), default_precision("bf16")
    )
    assert program("llama3-8b", strategy).flops() * Mesh.from_degrees(degrees).size == pytest.approx(
        alone.flops(), rel=1e-12
    )


def test_data_parallel_sums_every_gradient_once() -> None:
    """Rule A on weight gradients: each parameter once over dp, nothing else."""
    found = program("resnet50", "dp=8", batch=64)
    assert {g.axes for s in found.sections for g in s.gradients} == {("dp",)}
    total = sum(g.elements * s.repeat for s in found.sections for g in s.gradients)
    assert total == build_graph(load_model("resnet50"), batch=1).parameters
    assert all(not s.collectives for s in found.sections)


def test_one_weird_trick_gathers_activations_and_sums_no_large_gradient() -> None:
    """Krizhevsky 2014, scheme (a): every rank gets all activations, each holds its share of the fully connected
    weights."""
    batch, ranks = 128 * 4, 4
    found = program("alexnet", f"owt,dp={ranks}", batch=batch)
    gathers = [t for s in found.sections for t in s.collectives if t.operation == "all_gather" and not t.overlapped]
    widths = [256 * 6 * 6, 4096, 4096]
    assert [t.payload_bytes for t in gathers] == [batch * width * 2.0 for width in widths]
    scatters = [t.payload_bytes for s in found.sections for t in s.collectives if t.operation == "reduce_scatter"]
    assert sorted(scatters) == sorted(t.payload_bytes for t in gathers)
    convolutions = sum(g.elements for s in found.sections for g in s.gradients if g.axes)
    assert convolutions == sum(s.parameter_count for s in found.sections if s.name.startswith("conv"))


def test_experts_travel_by_all_to_all() -> None:
    """Each token goes to top_k experts and back, forward and backward: four all-to-alls of tokens · top_k · hidden
    (GShard, 2020)."""
    found = volumes(block(program("mixtral-8x7b", "ep=4")))
    tokens = BATCH * build_graph(load_model("mixtral-8x7b"), batch=1).hyperparameters["seq"] / 4
    size = tokens * 2 * 4096 * 2.0
    expected = [("all_to_all", "ep", phase, size) for phase in ("backward", "backward", "forward", "forward")]
    assert found == expected


def test_context_parallel_passes_keys_and_values_round() -> None:
    """Ring attention: K and V travel forward, and again with their gradients backward."""
    found = volumes(block(program("llama3-8b", "cp=4")), overlapped=True)
    seq = build_graph(load_model("llama3-8b"), batch=1).hyperparameters["seq"]
    size = BATCH * seq * 8 * 128 * 2.0
    assert found == sorted(
        [
            ("all_gather", "cp", "forward", size),
            ("all_gather", "cp", "backward", size),
            ("reduce_scatter", "cp", "backward", size),
        ]
        * 2
    )


def test_sequence_parallel_memory_is_the_published_one() -> None:
    """Korthikanti et al. 2022, table 2: 34·s·b·h/t a layer with sequence parallelism and no attention scores, at 1-byte
    masks.

    Our GPT-3 file has no dropout (masks: 1 + 1 of the 34) and its fused attention keeps the output and a log-sum-exp.
    """
    found = max(program("megatron-sp-175b", "tp=8,sp").sections, key=lambda section: section.repeat)
    per_sbh = (found.saved_bytes - found.selectively_freed_bytes) / (SBH / 2 / 8)
    assert 31.0 < per_sbh < 34.5


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tp=0", "1 or more"),
        ("tq=2", "nearest"),
        ("dq", "unknown"),
        ("tp=2,tp=4", "tp=4"),
        ("zero=4", "0, 1, 2"),
        ("tp=-1", "whole"),
    ],
)
def test_a_wrong_strategy_is_an_error(text: str, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        parse_strategy(text)


def test_heads_that_cannot_be_divided_are_an_error() -> None:
    with pytest.raises(PlanError, match="kv_heads 12 cannot be divided over 8"):
        program("gpt2", "tp=8")


def test_tables_of_a_few_kinds_are_on_every_rank() -> None:
    """BERT's words are split over tp and summed once (Megatron-LM's vocabulary-parallel embedding); its two segments
    are not."""
    made = program("bert_base", "tp=4")
    segment = next(section for section in made.sections if section.name == "segment")
    assert segment.parameter_count == 2 * 768
    sums = [t.name for section in made.sections[:4] for t in section.collectives]
    assert sums == ["add1<embed"]
