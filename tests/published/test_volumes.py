"""Communication volumes of sharded and distributed training, term by term against the papers that state them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import pytest

from paleo.errors import PlanError
from paleo.layers.base import LayerImplementations
from paleo.lowering.program import CountedKernel, LayerCollective, Program, lower_graph
from paleo.network.graph import build_graph
from paleo.operations.tensor import default_precision
from paleo.parallel.placement import Mesh, parse_strategy, strategy_placement
from paleo.parallel.propagation import deduplicated_dispatch_fraction
from paleo.predict import Prediction, predict
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import SoftwareProfile, load_software
from paleo.specs.system import load_system
from paleo.step.backend import build_backend
from paleo.step.gradient_exchange import gradient_exchange_collectives

SYSTEM = load_system("dgx-a100-80gb")
SMALL = {"hidden": 256, "heads": 8, "layers": 4, "seq": 128, "vocab": 1024}
Volumes = Counter[tuple[str, str, str]]


def made(strategy: str, network: str = "gpt2", **more: Any) -> Prediction:
    options: dict[str, Any] = {"gpus": 16, "batch": 4, "model": SMALL} | more
    return predict(load_model(network), SYSTEM, Run(strategy=strategy, **options))


def program(model: str, strategy: str, batch: int = 8, imbalance: float = 1.0, **choices: Any) -> Program:
    graph = build_graph(load_model(model), batch=batch, choices=LayerImplementations(**choices))
    chosen = parse_strategy(strategy)
    return lower_graph(
        graph,
        strategy_placement(graph, chosen, {}, imbalance),
        Mesh.from_degrees(chosen.degrees),
        default_precision("bf16"),
    )


def block(of: Program) -> tuple[LayerCollective, ...]:
    return max(of.sections, key=lambda section: section.repeat).collectives


def block_kernels(of: Program) -> tuple[CountedKernel, ...]:
    return max(of.sections, key=lambda section: section.repeat).kernels


def volumes(transfers: tuple[LayerCollective, ...], axis: str) -> Volumes:
    """Bytes by operation, pass and whether they hide beside computation."""
    found: Volumes = Counter()
    for one in transfers:
        if one.axis == axis:
            found[one.operation, one.phase, "beside" if one.overlapped else "blocking"] += int(one.payload_bytes)
    return found


# ZeRO, FSDP, HSDP


def sent(of: Prediction) -> Counter[str]:
    """Bytes of a step's buckets and gathers of weights."""
    found: Counter[str] = Counter()
    for event in of.timeline.events:
        found[event.task.kind] += round(event.task.bytes)
    return found


@pytest.mark.parametrize("strategy", ["dp=16", "zero=1", "zero=2"])
def test_data_parallelism_and_zero_2_exchange_each_gradient_once(strategy: str) -> None:
    """Rajbhandari et al., SC 2020, section 7: an all-reduce of Ψ, or a reduce-scatter and an all-gather of Ψ."""
    of = made(strategy)
    gradients = of.graph.parameters * 2.0
    assert sent(of)["bucket"] == gradients
    assert sent(of)["gather"] == 0
    operation = "all_reduce" if strategy == "dp=16" else "reduce_scatter"
    assert gradient_exchange_collectives(of.plan.strategy.zero, ("dp",), 1.0, of.plan.mesh) == (
        (operation, ("dp",), 1.0),
    )


def test_zero_3_gathers_the_parameters_twice_and_scatters_gradients() -> None:
    """The same section 7.2: 3 Ψ in all; FSDP with resharding after the forward pass (Zhao et al., VLDB 2023)."""
    of = made("zero=3")
    assert sent(of)["bucket"] == of.graph.parameters * 2
    assert sent(of)["gather"] == 2 * of.graph.parameters * 2


def test_zero_3_gathers_for_every_microbatch() -> None:
    """FSDP gathers and scatters with each pass that accumulates gradients."""
    once, twice = made("zero=3", batch=4), made("zero=3", batch=8, microbatch=4)
    assert len(twice.program.sections) == len(once.program.sections)
    assert twice.step_time - twice.breakdown.optimizer == pytest.approx(
        2 * (once.step_time - once.breakdown.optimizer), rel=0.1
    )


def test_states_of_zero_are_the_published_ones() -> None:
    """Figure 1 of the same paper: of 2Ψ + 2Ψ + KΨ bytes each stage divides one more part by the ranks."""
    parts = {zero: made(f"zero={zero}", optimizer="adam").memory for zero in (0, 1, 2, 3)}
    for name, first in (("optimizer", 1), ("gradients", 2), ("parameters", 3)):
        for zero, memory in parts.items():
            whole = getattr(parts[0], name)
            assert getattr(memory, name) == pytest.approx(whole / 16 if zero >= first else whole)


def test_a_shard_group_scatters_inside_and_sums_between_groups() -> None:
    """HSDP (Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2): a reduce-scatter of Ψ over F ranks, an
    all-reduce of Ψ/F over W/F replicas; parameters are gathered inside the group alone."""
    mesh = Mesh.from_degrees({"shard": 8, "dp": 2})
    scattered = gradient_exchange_collectives(3, ("dp", "shard"), 800.0, mesh)
    assert scattered == (("reduce_scatter", ("shard",), 800.0), ("all_reduce", ("dp",), 100.0))
    assert (mesh.stride(("shard",)), mesh.stride(("dp",)), mesh.zero_shard_axes) == (1, 8, ("shard",))
    grouped, whole = made("zero=3,shard=8"), made("zero=3")
    assert sent(grouped) == sent(whole), "the payloads are the same, their groups are not"
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(grouped.memory, name) == 2 * getattr(whole.memory, name)
    assert grouped.plan.strategy_text == "shard=8,dp=16,zero=3"


def test_a_shard_group_of_all_ranks_is_plain_fsdp() -> None:
    for zero in (1, 2, 3):
        grouped, whole = made(f"zero={zero},shard=16"), made(f"zero={zero}")
        assert grouped.breakdown == whole.breakdown
        assert grouped.memory == whole.memory


def test_gathers_inside_a_node_beat_those_over_a_slow_fabric() -> None:
    """What the method is for: weights over NVLink, gradients alone over the one network card of a node."""
    slow = load_system("aws-p3dn.24xlarge")
    inside, across = (
        predict(load_model("gpt2-medium"), slow, Run(gpus=64, batch=1, strategy=strategy))
        for strategy in ("zero=3,shard=8", "zero=3")
    )
    assert inside.breakdown.communication_total < 0.7 * across.breakdown.communication_total


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("shard=8", "shards nothing without zero"),
        ("zero=3,shard=3", "does not divide the 16"),
        ("zero=1,shard=2,ep=2", "beside ep=2 is not modelled"),
    ],
)
def test_shard_groups_that_make_no_sense_are_refused(strategy: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        made(strategy)


# context parallelism

SEQ, HEADS, KV, DIM = 8192, 32, 8, 128


def test_ring_attention_passes_keys_and_values() -> None:
    """Liu et al., 2023: each rank sees all of K and V once forward, and once more with their gradients backward."""
    size = 2 * 8 * SEQ * KV * DIM * 2  # K and V, bf16
    found = volumes(block(program("llama3-8b", "cp=4")), "cp")
    assert found == {
        ("all_gather", "forward", "beside"): size,
        ("all_gather", "backward", "beside"): size,
        ("reduce_scatter", "backward", "beside"): size,
    }


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ulysses_exchanges_query_key_value_and_output(ranks: int) -> None:
    """Jacobs et al., DeepSpeed-Ulysses, 2023, section 3.2: all-to-alls of 3·N·h before attention and N·h after it, of
    which each rank holds 1/P; with grouped keys 2·N·h become those of the key heads. Backward the same."""
    found = volumes(block(program("llama3-8b", f"cp={ranks},ulysses")), "cp")
    size = 8 * (SEQ // ranks) * (2 * HEADS + 2 * KV) * DIM * 2
    assert found == {("all_to_all", "forward", "blocking"): size, ("all_to_all", "backward", "blocking"): size}


def test_ulysses_needs_heads_for_its_ranks() -> None:
    with pytest.raises(PlanError, match="kv_heads 8 cannot be divided over 16 ranks"):
        program("llama3-8b", "cp=16,ulysses")


@pytest.mark.parametrize("strategy", ["cp=4", "cp=4,ulysses", "tp=2,cp=4,ulysses", "tp=2,cp=2,sp,ulysses"])
@pytest.mark.parametrize("attention", ["fused", "unfused"])
def test_both_forms_share_out_the_same_work(strategy: str, attention: str) -> None:
    """FLOP and kept activations of all ranks are those of one."""
    alone, split = (program("llama3-8b", one, attention=attention) for one in ("dp", strategy))
    ranks = Mesh.from_degrees(parse_strategy(strategy).degrees).size
    assert split.flops() * ranks == pytest.approx(alone.flops(), rel=1e-12)
    if attention == "fused":
        assert split.saved_bytes * ranks == pytest.approx(alone.saved_bytes, rel=0.25)


def test_a_ring_keeps_its_own_keys_alone() -> None:
    """What is saved for backward is each rank's share of the sequence, to the byte."""
    alone, split = program("llama3-8b", "dp"), program("llama3-8b", "cp=4")
    assert split.saved_bytes * 4 == alone.saved_bytes


def test_a_causal_mask_is_shared_out_evenly() -> None:
    """Striped attention (Brandon et al., 2023): each of P ranks computes 1/P of the scores below the diagonal."""

    def below(of: Program) -> float:
        shapes = [c.kernel.shape for c in block_kernels(of) if c.kernel.family == "attention"]
        return float(sum(s["q_heads"] * s["q_len"] * (s["kv_len"] - s["q_len"] / 2) for s in shapes))

    alone = below(program("llama3-8b", "dp"))
    for strategy in ("cp=2", "cp=8", "cp=8,ulysses"):
        assert below(program("llama3-8b", strategy)) * Mesh.from_degrees(parse_strategy(strategy).degrees).size == alone


def test_a_ring_adds_up_what_it_makes_share_by_share() -> None:
    """Of four shares of the keys three are added to the output of the first, and so are the gradients of queries, keys
    and values, each rank's own: two are read and one is written, of two bytes."""
    kernels = [one.kernel for one in block_kernels(program("llama3-8b", "cp=4")) if one.kernel.name.endswith(".merge")]
    queries, keys = 8 * SEQ // 4 * 4096 * 2, 8 * SEQ // 4 * KV * DIM * 2
    found = [(one.phase, one.bytes_read, one.bytes_written) for one in kernels]
    expected = [("forward", queries), ("backward", queries), ("backward", keys), ("backward", keys)]
    assert found == [(phase, 3 * 2 * size, 3 * size) for phase, size in expected]
    for other in ("cp=4,ulysses", "tp=4"):
        assert not [one for one in block_kernels(program("llama3-8b", other)) if one.kernel.name.endswith(".merge")]


def test_unfused_attention_gathers_its_keys_first() -> None:
    """Without a kernel that takes keys piece by piece nothing hides the exchange (Llama 3, 2024, section 3.3.2)."""
    size = 2 * 8 * SEQ * KV * DIM * 2
    found = volumes(block(program("llama3-8b", "cp=4", attention="unfused")), "cp")
    assert found == {("all_gather", "forward", "blocking"): size, ("reduce_scatter", "backward", "blocking"): size}


# experts


@pytest.mark.parametrize("imbalance", [1.0, 1.3])
def test_experts_exchange_tokens_of_the_busiest_rank(imbalance: float) -> None:
    """GShard (Lepikhin et al., 2020), section 3.2: dispatch and combine are all-to-alls of tokens · top_k · hidden,
    each way; the rank with the most tokens sets the pace."""
    seq = build_graph(load_model("mixtral-8x7b"), batch=1).hyperparameters["seq"]
    found = volumes(block(program("mixtral-8x7b", "ep=4", imbalance=imbalance)), "ep")
    size = 2 * int(imbalance * 8 * seq / 4 * 2 * 4096 * 2)
    assert found == {("all_to_all", phase, "blocking"): size for phase in ("forward", "backward")}


def distinct(chosen: int, experts: int, targets: int) -> float:
    """Targets that a token's experts lie on, on average over every choice of them."""
    each = experts // targets
    choices = list(itertools.combinations(range(experts), chosen))
    return sum(len({one // each for one in choice}) for choice in choices) / len(choices)


@pytest.mark.parametrize(("chosen", "experts", "targets"), [(2, 8, 8), (2, 8, 4), (2, 8, 2), (3, 12, 4), (6, 12, 2)])
def test_a_token_goes_once_to_each_node_that_has_some_of_its_experts(chosen: int, experts: int, targets: int) -> None:
    """DeepSeek-V3 technical report, 2024, section 3.2.2; counted over all choices of experts."""
    assert deduplicated_dispatch_fraction(chosen, experts, targets) * chosen == pytest.approx(
        distinct(chosen, experts, targets)
    )


def test_dispatch_once_sends_to_nodes_and_within_one_to_devices() -> None:
    once = load_software("nemo-automodel")
    each = once.with_fields({"parallelism.expert_dispatch": "nccl"})
    model, system = load_model("qwen3-30b-a3b"), load_system("dgx-h100")

    def sent(software: SoftwareProfile, gpus: int) -> float:
        run = Run(gpus=gpus, batch=1, dtype="bf16", strategy=f"dp={gpus},ep={gpus}", model={"layers": 2})
        made = build_backend(system, run, "bf16", software)
        mesh = Mesh.from_degrees({"ep": gpus})
        graph = made.graph(model, gpus)
        of = made.lower(graph, strategy_placement(graph, parse_strategy(f"ep={gpus}"), {}), mesh)
        return sum(one.payload_bytes for section in of.sections for one in section.collectives if one.axis == "ep")

    for gpus, targets in ((8, 8), (64, 8), (16, 2)):
        share = distinct_share(8, 128, targets)
        assert sent(once, gpus) == pytest.approx(share * sent(each, gpus))
    slow, quick = (
        predict(model, system, Run(gpus=64, batch=1, strategy="ep=64"), one).breakdown.communication_total
        for one in (each, once)
    )
    assert quick < slow


def distinct_share(chosen: int, experts: int, targets: int) -> float:
    """By the hypergeometric law: a target is missed by all of a token's experts."""
    each = experts // targets
    return targets * (1.0 - math.comb(experts - each, chosen) / math.comb(experts, chosen)) / chosen


def test_imbalance_slows_the_experts_and_nothing_else() -> None:
    """The arithmetic of experts alone grows, by the factor; without ep every rank has all of them."""
    even, uneven = (program("mixtral-8x7b", "ep=4", imbalance=one) for one in (1.0, 1.5))

    def flops(of: Program, experts: bool) -> float:
        kernels = [(c.kernel, c.repetitions * s.repeat) for s in of.sections for c in s.kernels]
        return sum(kernel.flops * times for kernel, times in kernels if (".expert" in kernel.name) == experts)

    assert flops(uneven, True) == pytest.approx(1.5 * flops(even, True))
    assert flops(uneven, False) == flops(even, False)
    assert program("mixtral-8x7b", "dp", imbalance=1.5) == program("mixtral-8x7b", "dp")
    slow, quick = (
        predict(load_model("mixtral-8x7b"), SYSTEM, Run(gpus=8, batch=1, strategy="ep=8", experts={"imbalance": one}))
        for one in (1.5, 1.0)
    )
    assert slow.step_time > quick.step_time and slow.model_flops_per_step == quick.model_flops_per_step
    assert slow.memory.activations > quick.memory.activations


def test_capacity_pads_every_expert() -> None:
    """Switch Transformer (Fedus et al., 2021), section 2.2: expert capacity = tokens / experts · capacity factor."""
    from paleo.specs.model import build_model_spec

    def sent_tokens(factor: float) -> float:
        moe = {"experts": 8, "top_k": 2, "ffn": 64, "capacity_factor": factor}
        dims = {"batch": "=batch", "seq": 16, "hidden": 32}
        head = {"title": "t", "task": "t", "source": "t", "inputs": {"x": {"dims": dims}}}
        graph = build_graph(build_model_spec(head | {"layers": [{"moe": moe}]}, "t.yaml"), batch=4)
        return next(op.out.size("capacity") for op in graph.nodes[0].operations if "capacity" in op.out.dims)

    assert (sent_tokens(1.0), sent_tokens(1.25)) == (4 * 16 * 2 / 8, 4 * 16 * 2 / 8 * 1.25)


# tensor and sequence parallelism


def test_vocabulary_parallel_embedding_sums_its_rows() -> None:
    """Shoeybi et al., 2019, section 3: every rank looks up its rows, an all-reduce of b·s·h adds them."""
    first = program("gpt3-175b", "tp=8").sections
    owed = [(t.operation, t.phase, t.payload_bytes) for s in first[:2] for t in s.collectives if t.axis == "tp"]
    assert owed == [("all_reduce", "forward", 8 * 2048 * 12288 * 2.0)]


def test_the_head_owes_one_all_reduce_backward() -> None:
    """The same paper: the gradient of its input sums over the vocabulary; logits are never gathered."""
    head = next(s for s in program("gpt3-175b", "tp=8").sections if s.name == "head")
    owed = [(t.operation, t.phase, t.payload_bytes) for t in head.collectives]
    assert owed == [("all_reduce", "backward", 8 * 2048 * 12288 * 2.0)]


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sequence_parallelism_moves_no_more_bytes(ranks: int) -> None:
    """Korthikanti et al., 2022, section 4.2.2: an all-reduce on a ring is a reduce-scatter and an all-gather."""
    plain, split = (volumes(block(program("gpt3-175b", f"tp={ranks}{word}")), "tp") for word in ("", ",sp"))
    reduced = sum(plain.values())
    halves = [sum(n for (op, _, how), n in split.items() if op == one and how == "blocking") for one in _HALVES]
    assert halves == [reduced, reduced]


_HALVES = ("all_gather", "reduce_scatter")
