"""What follows the passes of a pipeline: sums of gradients behind the last passes, tied tables, gathers, two copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paleo.errors import PlanError
from paleo.lowering.program import TiedParameter
from paleo.parallel.placement import Mesh
from paleo.predict import Prediction, predict
from paleo.pricing.communication import Fabric
from paleo.schedules.base import SCHEDULES, PassTimes, Schedule
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import SoftwareProfile, load_software
from paleo.specs.system import load_system
from paleo.step.backend import build_backend
from paleo.step.gradient_exchange import (
    bucket_count,
    exposed_gradient_exchange_time,
    exposed_parameter_gather_time,
    gradient_exchange_collectives,
    order_gradient_exchanges,
    replica_groups,
)
from paleo.step.memory import tied_copy_mask

SYSTEM = load_system("dgx-h100")
#: gpt2: elements of the table, 50257 words of 768.
TABLE = 50257 * 768


def made(software: SoftwareProfile | None = None, /, model: str = "gpt2", **options: Any) -> Prediction:
    return predict(load_model(model), SYSTEM, Run(**options), software)


def equal(stages: int, forward: float, backward: float, weights: float) -> PassTimes:
    return PassTimes(*(np.full(stages, one) for one in (forward, backward, weights)))


def exposed_exchange(
    seconds: np.ndarray, buckets: np.ndarray, schedule: Schedule, passes: PassTimes, chunks: int, contention: float
) -> np.ndarray:
    return exposed_gradient_exchange_time(
        order_gradient_exchanges(seconds, buckets, schedule, chunks), schedule, passes, chunks, contention
    )


def test_one_chunk_by_hand() -> None:
    """Two buckets of 5 s; the first is ready after half of the last backward pass of 4 s: 10 − 2 s are left."""
    sums, buckets = np.full((2, 1), 10.0), np.full((2, 1), 2.0)
    passes = equal(2, 2.0, 3.0, 1.0)
    assert exposed_exchange(sums, buckets, SCHEDULES["1f1b"], passes, 1, 0.0).tolist() == [8.0, 8.0]
    assert exposed_exchange(sums, buckets, SCHEDULES["1f1b"], passes, 1, 0.5).tolist() == [9.0, 9.0]
    assert exposed_exchange(sums, buckets, SCHEDULES["1f1b"], passes, 1, 1.0).tolist() == [10.0, 10.0]
    # gradients of weights are a pass of 1 s by itself: half of that is won
    assert exposed_exchange(sums, buckets, SCHEDULES["zb-h1"], passes, 1, 0.0).tolist() == [9.5, 9.5]


def test_chunks_that_are_done_early_are_hidden_by_hand() -> None:
    """Interleaved, two stages, chunks of 2 s backward: the second chunk's gradients are ready two passes (4 s) before
    the end and take 3 s; those of the first go out in one bucket of 3 s at the end."""
    sums, buckets = np.full((2, 2), 3.0), np.ones((2, 2))
    passes = equal(2, 2.0, 3.0, 1.0)
    assert exposed_exchange(sums, buckets, SCHEDULES["interleaved"], passes, 2, 0.0).tolist() == [3.0, 3.0]
    slow = np.array([[3.0, 6.0], [3.0, 6.0]])  # done 2 s after the end, then the first chunk's 3 s
    assert exposed_exchange(slow, buckets, SCHEDULES["interleaved"], passes, 2, 0.0).tolist() == [5.0, 5.0]


@pytest.mark.slow
@given(
    name=st.sampled_from(list(SCHEDULES)),
    times=st.lists(st.floats(0.0, 20.0), min_size=4, max_size=4),
    buckets=st.integers(1, 5),
    contention=st.floats(0.0, 1.5),
)
@settings(max_examples=100, deadline=None)
def test_no_more_than_all_of_it_and_no_less_than_the_last_bucket(
    name: str, times: list[float], buckets: int, contention: float
) -> None:
    schedule = SCHEDULES[name]
    chunks = 2 if schedule.chunks_per_stage is None else schedule.chunks_per_stage
    sums = np.array(times).reshape(4, 1) * np.ones((4, chunks * schedule.replicas))
    count = np.full(sums.shape, float(buckets))
    found = exposed_exchange(sums, count, schedule, equal(4, 1.0, 1.2, 0.8), chunks, contention)
    assert np.all(found <= sums.sum(axis=1) * (1 + 1e-12)) and np.all(found >= sums[:, 0] / buckets * (1 - 1e-12))
    longer = exposed_exchange(2.0 * sums, count, schedule, equal(4, 1.0, 1.2, 0.8), chunks, contention)
    assert np.all(longer >= found)


@given(
    first=st.floats(0.01, 9.0),
    inner=st.floats(0.01, 9.0),
    last=st.floats(0.01, 9.0),
    chunks=st.integers(2, 9),
    buckets=st.integers(1, 5),
)
@settings(max_examples=100, deadline=None)
def test_chunks_between_equal_ones_change_nothing(
    first: float, inner: float, last: float, chunks: int, buckets: int
) -> None:
    """A chunk after the other, every one of them, against the few that are looked at."""
    schedule, passes = SCHEDULES["interleaved"], equal(4, 1.0, 1.2, 0.8)
    sums = np.full((4, chunks), inner)
    sums[0, 0], sums[3, -1] = first, last
    count = np.full(sums.shape, float(buckets))
    end = np.full(4, -np.inf)
    for chunk in reversed(range(chunks)):
        one, ready = sums[:, chunk], -chunk * 4 * 2.0 / chunks
        start = np.maximum(end, ready - 2.0 / chunks * (1.0 - 1.0 / buckets))
        end = np.maximum(start + one, ready + one / buckets)
    assert order_gradient_exchanges(sums, count, schedule, chunks).share_after_first_bucket.shape[1] <= 4
    found = exposed_exchange(sums, count, schedule, passes, chunks, 0.0)
    assert found == pytest.approx(np.minimum(np.maximum(end, 0.0), sums.sum(axis=1)), rel=1e-12, abs=1e-12)


def test_gathers_behind_the_first_pass_by_hand() -> None:
    """Four buckets of 2 s; three of them fit behind three quarters of a pass of 4 s but for 5 s; a long pass leaves the
    first."""
    assert exposed_parameter_gather_time(np.array([8.0, 8.0]), np.array(4.0), np.array([4.0, 40.0]), 0.0).tolist() == [
        5.0,
        2.0,
    ]
    assert bucket_count(np.array([0.0, 50.0, 101.0]), 50.0).tolist() == [1.0, 1.0, 3.0]
    assert bucket_count(np.array([0.0, 50.0]), 0.0).tolist() == [1.0, 50.0]


def test_a_table_that_two_sections_read_is_copied_once_to_each_stage() -> None:
    """Sections 0 and 2 on the first stage, 1 on the second, 3 on the third, all reading one table, and 1 another of its
    own that 3 reads."""
    held = np.array([[1.0, 0.0, 1.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]])
    ties = [
        TiedParameter("a", 0, 1, (), 1.0),
        TiedParameter("a", 0, 2, (), 1.0),
        TiedParameter("a", 0, 3, (), 1.0),
        TiedParameter("b", 1, 3, (), 1.0),
    ]
    assert tied_copy_mask(held, ties).T.tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1]]


def test_tied_embeddings_are_summed_over_the_first_and_last_stage() -> None:
    """2 (n − 1) / n of the table's gradient with n = 2: the all-reduce of two ranks, four stages of two ranks apart."""
    step = made(gpus=8, strategy="tp=2,pp=4", batch=8, microbatch=1)
    tie = step.program.tied_parameters[0]
    assert (tie.name, tie.elements) == ("embed.weight", (50257 + 1) // 2 * 768)
    names = [event.task for event in step.timeline.events if event.task.kind == "exchange"]
    assert {task.resource for task in names} == {"stage0", "stage3"}
    from paleo.step.backend import build_backend

    fabric = build_backend(SYSTEM, Run(gpus=8), "bf16").fabric
    alone = fabric.collective_times("all_reduce", np.array([6]), np.array([2]), np.array([tie.elements * 2.0]))
    assert [task.duration for task in names] == pytest.approx([float(alone[0])] * 2)


def test_a_stage_that_reads_the_table_holds_it() -> None:
    """Two stages, whose last one is fuller by a copy of the table: parameter, gradient and Adam's 12 bytes of each
    element."""
    last = made(gpus=2, strategy="pp=2", batch=8, microbatch=1)
    both = made(gpus=1, batch=8, microbatch=1).memory.parameters
    assert last.memory.parameters > both / 2
    block = (both / 2 - TABLE - 1024 * 768 - 2 * 768) / 12  # parameters of a block: all but table, positions, last norm
    assert last.memory.parameters / 2 == pytest.approx(6 * block + TABLE + 2 * 768)
    assert last.memory.optimizer == pytest.approx(last.memory.parameters / 2 * 12)


@pytest.mark.parametrize("schedule", ["zb-v", "chimera"])
def test_where_both_readers_are_on_one_stage_there_is_no_copy(schedule: str) -> None:
    """The V holds input and output on one stage; of two copies each outer stage holds both ends."""
    step = made(gpus=2, strategy="pp=2", batch=8, microbatch=1, schedule=schedule)
    alone = made(gpus=1, batch=8, microbatch=1)
    exchanges = [event.task for event in step.timeline.events if event.task.kind == "exchange"]
    assert bool(exchanges) == (schedule == "chimera")  # the copies' gradients, not the table's
    most = alone.memory.parameters
    assert step.memory.parameters == pytest.approx(most) if schedule == "chimera" else step.memory.parameters < most


def test_untied_and_forward_runs_sum_nothing() -> None:
    for options in ({"model": "llama2-7b"}, {"forward_only": True}):
        step = made(gpus=2, strategy="pp=2", batch=4, microbatch=1, **options)
        assert not [event for event in step.timeline.events if event.task.kind == "exchange"]


PLANS: list[dict[str, Any]] = [
    {"strategy": "pp=4"},
    {"strategy": "pp=4,vp=3"},
    {"strategy": "pp=2", "schedule": "zb-v"},
    {"strategy": "pp=4", "schedule": "chimera"},
    {"strategy": "pp=4,zero=1"},
]


@pytest.mark.parametrize("options", PLANS)
def test_overlap_hides_some_of_the_exchange_and_no_more(options: dict[str, Any]) -> None:
    """Not below the pipeline without replicas, whose tails are the update and the sum of the tied table alone."""
    options = options | {"gpus": 32, "batch": 8, "microbatch": 1, "software": "megatron-core"}
    free = load_software("megatron-core").with_fields({"overlap.contention": 0.0})
    after, beside = made(free, **options, exchange="after"), made(free, **options)
    hidden = beside.breakdown.communication_total - beside.breakdown.communication_exposed
    assert beside.step_time < after.step_time and hidden > 0
    assert after.breakdown.communication_total == pytest.approx(after.breakdown.communication_exposed)
    if "zero" not in options["strategy"]:  # which shares the update among the replicas, too
        alone = made(free, **(options | {"gpus": beside.plan.stages}), exchange="after")
        exchanged = 0.0 if beside.run.pipeline.schedule != "chimera" else alone.breakdown.communication_exposed
        assert beside.step_time >= alone.step_time - exchanged


def test_software_that_wins_nothing_by_overlap_is_as_before() -> None:
    """PyTorch's profile: computation loses a second for each second of exchange beside it."""
    options = {"gpus": 32, "batch": 8, "microbatch": 1, "strategy": "pp=4"}
    assert made(**options).step_time == pytest.approx(made(**options, exchange="after").step_time, rel=1e-12)


def test_two_copies_make_a_group_twice_as_large_that_crosses_the_stages() -> None:
    """Four stages of four ranks, two by dp and two by tp: piece 0 lies on stages 0 and 3, 12 ranks apart."""
    mesh = Mesh.from_degrees({"tp": 2, "dp": 2, "pp": 4})
    (stride, ranks), (apart, pair) = replica_groups(mesh, ("dp",), 2)
    assert (stride.tolist(), ranks.tolist()) == ([2] * 4, [4] * 4)
    assert (apart.tolist(), pair.tolist()) == ([12, 4, 4, 12], [2] * 4)
    assert len(replica_groups(mesh, ("dp",), 1)) == 1 and replica_groups(mesh, (), 1) == []


@pytest.mark.parametrize(("schedule", "strategy"), [("zb-v", "pp=4"), ("chimera", "pp=4,dp=2")])
def test_traces_of_v_and_bidirectional_pipelines_end_near_the_step(schedule: str, strategy: str) -> None:
    gpus = 8 if "dp" in strategy else 4
    step = made(gpus=gpus, strategy=strategy, batch=32, microbatch=1, schedule=schedule)
    assert step.timeline.end_time == pytest.approx(step.step_time, rel=0.06)


def test_a_cut_by_hand_is_what_it_says() -> None:
    """gpt2's twelve blocks, two on the first stage and four on the last one; uniform is three each."""
    options = {"gpus": 4, "strategy": "pp=4", "batch": 16, "microbatch": 1}
    by_hand, even = made(**options, pipeline={"cut": (3, 3, 3, 3)}), made(**options)
    assert by_hand.step_time == even.step_time == made(**options, pipeline={"cut": "uniform"}).step_time
    assert made(**options, pipeline={"cut": (3, 4, 4, 1)}).step_time < even.step_time  # the head weighs some blocks
    assert made(**options, pipeline={"cut": "time"}).step_time < even.step_time
    slow = made(**options, pipeline={"cut": (2, 3, 3, 4)})
    busiest = [sum(e.task.duration for e in slow.timeline.events if e.task.resource == f"stage{s}") for s in (0, 1, 3)]
    assert busiest[0] < busiest[1] < busiest[2]


@pytest.mark.parametrize(
    ("cut", "message"),
    [((3, 3, 6), "states 3 pieces; pp=4 has 4"), ((3, 3, 3, 4), "adds up to 13 layers; the network has 12")],
)
def test_a_cut_that_does_not_fit_is_said(cut: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        made(gpus=4, strategy="pp=4", pipeline={"cut": cut})


def test_a_cut_of_chunks_states_all_of_them() -> None:
    options = {"gpus": 2, "strategy": "pp=2,vp=2", "batch": 4, "microbatch": 1}
    assert made(**options, pipeline={"cut": (3, 3, 3, 3)}).step_time == made(**options).step_time
    with pytest.raises(PlanError, match="states 2 pieces; pp=2 times 2 chunks a stage has 4"):
        made(**options, pipeline={"cut": (6, 6)})
    with pytest.raises(PlanError, match="adds up to 5 layers"):
        made(pipeline={"cut": (5,)})


def test_layers_without_blocks_are_cut_one_by_one() -> None:
    step = made(model="alexnet", gpus=2, strategy="pp=2", batch=8, microbatch=1, pipeline={"cut": (10, 12)})
    assert len(step.program.sections) == 22
    parameters = [
        sum(section.parameter_count for section in half)
        for half in (step.program.sections[:10], step.program.sections[10:])
    ]
    assert step.memory.parameters == max(parameters) * 2


def test_a_network_without_the_hosts_floor_answers_for_itself() -> None:
    """What one has priced is not handed to a copy that differs in the least that a call takes."""
    fabric = Fabric(load_system("dgx-a100-80gb"), host_launch_time=0.001)
    group = np.array([1]), np.array([8]), np.array([8.0])
    assert fabric.collective_times("all_reduce", *group) == 0.001
    assert replace(fabric, host_launch_time=0.0).collective_times("all_reduce", *group) < 0.0001


@pytest.mark.parametrize("strategy", ["dp=8", "dp=8,zero=1", "dp=8,zero=3"])
def test_only_microbatches_that_send_are_slowed(strategy: str) -> None:
    """Gradients travel with the last microbatch, so the others take as long as without contention; sharded parameters
    are gathered, and their gradients sent, with each of them."""
    profile = load_software("pytorch-eager")

    def seconds(microbatches: int, contention: float) -> float:
        run = Run(gpus=8, global_batch=8 * microbatches, microbatch=1, dtype="bf16", strategy=strategy)
        software = profile.with_fields({"overlap.contention": contention})
        made = predict(load_model("gpt2-xl"), load_system("dgx-a100-80gb"), run, software)
        assert made.timeline.end_time == pytest.approx(made.step_time, rel=1e-9)
        return made.step_time

    assert seconds(1, 1.0) > seconds(1, 0.0)
    more = [seconds(4, contention) - seconds(1, contention) for contention in (0.0, 1.0)]
    if strategy == "dp=8,zero=3":
        assert more[1] > more[0]
    else:
        assert more[1] == pytest.approx(more[0], rel=1e-9)


def test_experts_without_copies_are_not_gathered() -> None:
    """Eight ranks hold one expert each, so what ZeRO gathers is the rest: 2 bytes of every other parameter of a layer,
    and with half as many experts ranks, half the experts, too."""
    options = {"model": "mixtral-8x7b", "gpus": 8, "batch": 1, "dtype": "bf16"}
    experts = 8 * 3 * 4096 * 14336
    for ep in (8, 4):
        one = made(**options, strategy=f"ep={ep},zero=3")
        layer = max(one.program.sections, key=lambda section: section.repeat)
        rest = layer.parameter_count - experts / ep
        moved = {e.task.bytes for e in one.timeline.events if e.task.name == "weights of block"}
        assert moved == {2.0 * (rest + (0 if ep == 8 else experts / ep))}
    full, part = (made(**options, strategy=f"ep={ep},zero=1", exchange="after").breakdown for ep in (4, 8))
    assert part.communication_total < full.communication_total


# gradients and states shared out

#: Llama 3 8B on eight H100s, 16 microbatches of one sequence.
LLAMA: dict[str, Any] = {"model": "llama3-8b", "gpus": 8, "batch": 16, "microbatch": 1, "dtype": "bf16"}


@pytest.mark.parametrize("split", ["dp=8", "dp=4,pp=2"])
@pytest.mark.parametrize("exchange", ["overlapped", "after"])
def test_sharded_gradients_are_scattered_with_every_microbatch(split: str, exchange: str) -> None:
    """ZeRO-2 keeps an eighth of the gradients, unless they wait for the end of the pass, and pays for it: 16
    reduce-scatters instead of one, and no gather more
    than ZeRO-1."""
    whole, sharded, parameters = (
        made(**LLAMA, strategy=f"{split},zero={zero}", exchange=exchange) for zero in (1, 2, 3)
    )
    at_once = whole.plan.dp if exchange == "overlapped" else 1
    assert sharded.memory.gradients == pytest.approx(whole.memory.gradients / at_once)
    assert whole.step_time * 1.01 < sharded.step_time < parameters.step_time
    assert sharded.timeline.end_time == pytest.approx(sharded.step_time, rel=1e-9)


def test_a_single_microbatch_is_summed_once_either_way() -> None:
    """Fifteen more of them cost fifteen more reduce-scatters, each as long as the gather of as many parameters."""
    states, gradients = (
        [
            made(**{**LLAMA, "batch": batch}, strategy=f"dp=8,zero={zero}", exchange="after").step_time
            for batch in (1, 16)
        ]
        for zero in (1, 2)
    )
    assert gradients[0] == pytest.approx(states[0], rel=1e-9)
    once = made(**{**LLAMA, "batch": 1}, strategy="dp=8,zero=1", exchange="after").breakdown
    assert (gradients[1] - states[1]) / 15 == pytest.approx(once.communication_exposed / 2, rel=0.1)


@pytest.mark.parametrize("software", ["torchtitan", "megatron-core"])
def test_software_that_scatters_once_a_step_keeps_gradients_whole(software: str) -> None:
    first, second = (made(**LLAMA, software=software, strategy=f"dp=4,pp=2,zero={zero}") for zero in (1, 2))
    assert second.step_time == first.step_time and second.memory == first.memory


@pytest.mark.parametrize("software", ["megatron-core", "torchtitan"])
def test_states_are_shared_out_over_context_parallel_ranks(software: str) -> None:
    """Ranks of cp hold the same parameters: 12 bytes of each are shared out over dp x cp."""
    plain, shared = (made(**LLAMA, software=software, strategy=f"cp=8,{zero}") for zero in ("zero=0", "zero=1"))
    assert shared.memory.optimizer == pytest.approx(plain.memory.optimizer / 8)
    assert shared.breakdown.optimizer < 0.25 * plain.breakdown.optimizer
    both = made(**LLAMA, software=software, strategy="tp=2,cp=2,dp=2,zero=1")
    assert both.memory.optimizer == pytest.approx(plain.memory.optimizer / 8, rel=1e-4)  # norms are not split over tp
    whole = made(**LLAMA, software=software, strategy="cp=8,zero=3")
    assert whole.memory.parameters == pytest.approx(plain.memory.parameters / 8)


def test_a_shard_group_takes_in_the_ranks_of_context() -> None:
    """torchtitan's FSDP shards over dp_shard x cp, and sums shards over the replicas of that."""
    mesh = Mesh.from_degrees({"cp": 2, "shard": 4, "dp": 3})
    assert gradient_exchange_collectives(3, ("cp", "shard", "dp"), 24.0, mesh) == (
        ("reduce_scatter", ("cp", "shard"), 24.0),
        ("all_reduce", ("dp",), 3.0),
    )


@pytest.mark.parametrize(("gpus", "messages"), [(8, 8), (1024, 195)])
def test_owners_of_whole_tensors_broadcast_in_turn(gpus: int, messages: int) -> None:
    """Eight owners send their share, one after another; of 1,024 ranks 195 own one of Llama 3 8B's 195 tensors (six a
    layer of 32, with query, key and value in one and gate and up in one; embedding, last norm, output layer)."""
    options = {**LLAMA, "gpus": gpus, "batch": 1, "software": "internevo", "exchange": "after"}
    batch = made(**options, strategy=f"dp={gpus},zero=1").step_arrays.batch
    share = 2 * 8.03e9 / messages
    assert batch.layouts.owner_broadcast_bytes[0] == pytest.approx(share, rel=1e-3)
    [sent] = batch.backend.fabric.collective_times("broadcast", np.array([1]), np.array([gpus]), np.array([share]))
    assert batch.layouts.state_gather_times(batch.assignment)[0, 0] == pytest.approx(messages * sent, rel=0.01)


@pytest.mark.parametrize(
    ("software", "ranks", "stated", "elements"),
    [
        ("megatron-core", 8.0, None, 40e6),
        ("megatron-core", 16384.0, None, 16384e6),  # a million for each rank
        ("deepspeed-zero3", 8.0, None, 5e8),
        ("megatron-core", 16384.0, "50 MiB", 50 * 2**20 / 4),  # what a run states counts, in fp32
    ],
)
def test_buckets_follow_the_rule_of_the_software(
    software: str, ranks: float, stated: str | None, elements: float
) -> None:
    run = Run(software=software, **({"exchange.bucket": stated} if stated else {}))
    backend = build_backend(load_system("dgx-h100"), run, "bf16")
    assert float(backend.bucket_bytes(ranks)) == pytest.approx(elements * backend.formats.accumulated_gradient_bytes)


def test_gradients_of_megatron_over_many_ranks_travel_in_few_buckets() -> None:
    """Latency grows with the ranks of a ring: with a bucket a layer 16,384 of them took 5.9 s where 64 take 1.7."""
    run = Run(
        gpus=16384,
        batch=4,
        microbatch=1,
        strategy="zero=1",
        recompute="full",
        software="megatron-core",
        model={"seq": 4096},
    )
    whole = predict(load_model("llama2-7b"), load_system("dgx-h100"), run)
    cut = whole.predict_variant(exchange={"bucket": "25 MiB"})
    assert whole.step_time < 2.2 < 5.0 < cut.step_time
    assert whole.memory.workspace < cut.memory.workspace  # parts of one buffer, not buffers beside it


@pytest.mark.parametrize("zero", range(4))
def test_gradients_that_wait_for_the_backward_pass_are_whole_until_its_end(zero: int) -> None:
    """Two bytes for each of 13 billion parameters, where their shard alone was counted: a plan of 65.9 GiB took 90."""
    options: dict[str, Any] = {"gpus": 64, "batch": 1, "strategy": f"zero={zero}", "model": "llama2-13b"}
    after, during = made(exchange="after", **options), made(exchange="overlapped", **options)
    assert after.memory.gradients == pytest.approx(2.0 * after.graph.parameters)
    share = 64 if zero >= 2 else 1
    assert during.memory.gradients == pytest.approx(2.0 * after.graph.parameters / share)
    found = float(after.step_arrays.fullest_stage_memory[0])  # as a search has it
    assert found == pytest.approx(after.memory.total)


def test_accesses_of_flat_gradients_cost_no_launch_for_each_tensor() -> None:
    """FSDP 1 joins and divides the gradients of a block in one buffer; as a pass for each tensor the hosts of small
    networks would have taken a third of the step."""
    flat = load_software("fsdp-composer")
    options: dict[str, Any] = {"model": "gpt2-xl", "gpus": 8, "batch": 2, "microbatch": 1, "strategy": "zero=3"}
    step, apart = made(flat, **options), made(flat.with_fields({"gradients.flat": False}), **options)
    assert step.step_time < 0.9 * apart.step_time
    none = made(flat.with_fields({"gradients.extra_gradient_accesses": 0.0}), **options)
    assert none.step_time < step.step_time < 1.1 * none.step_time
