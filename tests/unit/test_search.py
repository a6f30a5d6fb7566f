"""The array search against predictions one by one, its order, its space, and the per-layer search."""

from __future__ import annotations

import json
import random
import re
from functools import cache
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from paleo.cli import run_command_line as run
from paleo.errors import CapacityError, PlanError, SpecError
from paleo.lowering.program import count_sections_through_embeddings
from paleo.network.graph import build_graph
from paleo.predict import predict
from paleo.schedules.base import SCHEDULES
from paleo.search.configurations import ExecutionChoice
from paleo.search.evaluate import ConfigurationEvaluator
from paleo.search.layer_splits import search_layer_splits
from paleo.search.layout_costs import GraphsByBatch, LayoutKey, _Blocks, _values, layer_times_of_layouts
from paleo.search.pipeline_cuts import candidate_chunk_counts
from paleo.search.plans import FoundPlans, _sized, _sources, explain_best_plan, search
from paleo.search.ranking import EvaluatedGroup, Ranking
from paleo.search.space import (
    SearchSpace,
    divisors,
    list_layouts,
    microbatch_sizes,
    search_global_batch,
    search_space_from_options,
)
from paleo.specs.loading import validate_mapping
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import Run
from paleo.specs.system import System, load_system
from paleo.step.backend import build_backend
from paleo.units import GIBIBYTE

CASES = {
    "dense": ("gpt2", "dgx-h100", {"gpus": 16, "global_batch": 64}),
    "large": ("gpt3-175b", "dgx-a100-80gb", {"gpus": 512, "global_batch": 1536}),
    "experts": ("mixtral-8x7b", "dgx-h100", {"gpus": 16, "global_batch": 32}),
    "convolutions": ("resnet50", "dgx-1-v100", {"gpus": 16, "global_batch": 256}),
    "plain": ("bert_base", "dgx-1-v100", {"gpus": 8, "global_batch": 64, "dtype": "fp16", "software": "tensorflow1"}),
    "roofline": ("gpt2", "dgx-a100-80gb", {"gpus": 16, "global_batch": 64, "calibration": "ideal"}),
    "overlapped": ("gpt2", "dgx-h100", {"gpus": 16, "global_batch": 128, "software": "megatron-core"}),
    "overlapped experts": ("mixtral-8x7b", "dgx-h100", {"gpus": 32, "global_batch": 64, "software": "megatron-core"}),
    "clipped": ("gpt2", "dgx-h100", {"gpus": 16, "global_batch": 64, "software": "megatron-2021"}),
    "fed": ("resnet50", "dgx-h100", {"gpus": 16, "global_batch": 512, "input": {"decode": "10 ms", "copied": "2 MB"}}),
    "by work": ("llama2-7b", "dgx-h100", {"gpus": 16, "global_batch": 64, "software": "nanotron"}),
    "uneven experts": ("mixtral-8x7b", "dgx-h100", {"gpus": 16, "global_batch": 32, "experts.imbalance": 1.25}),
    "compiled": ("gpt2", "dgx-a100-80gb", {"gpus": 32, "global_batch": 64, "software": "cuda-graph"}),
    "forward": ("gpt2", "dgx-h100", {"gpus": 16, "global_batch": 64, "forward_only": True}),
    "adapters": ("llama2-7b", "dgx-h100", {"gpus": 16, "global_batch": 64, "lora": "8", "dtype": "fp8"}),
    "adapters everywhere": (
        "gpt2",
        "dgx-h100",
        {"gpus": 16, "global_batch": 64, "lora": "4:all", "qlora": True, "software": "megatron-core"},
    ),
    "adapters of experts": ("mixtral-8x7b", "dgx-h100", {"gpus": 16, "global_batch": 32, "lora": "8:all"}),
    "measured links": (
        "gpt2",
        "deepbench-8gpu-dual-root",
        {"gpus": 16, "global_batch": 64, "dtype": "fp32", "calibration": "dgx-a100-80gb"},
    ),
    "softmax": ("gpt2", "dgx-a100-80gb", {"gpus": 8, "global_batch": 48, "software": "megatron-2021"}),
}


#: Configurations of each case that are predicted by themselves; over 2,000 in all were with 75 of them.
DRAWS = 15


@cache
def everything(case: str) -> tuple[ModelSpec, System, EvaluatedGroup, Ranking]:
    model, system, options = CASES[case]
    network, machine, run = load_model(model), load_system(system), validate_mapping(Run, options, "test")
    sources = _sources(network, machine, _sized(run, run.gpus, run.global_batch or 0), SearchSpace())
    parts = [source.evaluate_within() for source in sources]
    return network, machine, parts[0], Ranking(parts, machine, "time")


@pytest.mark.parametrize("case", list(CASES))
def test_arrays_equal_single_predictions(case: str) -> None:
    model, system, _, found = everything(case)
    for index in random.Random(7).sample(range(len(found.step)), DRAWS):
        row = found.plan_row(index)
        made = predict(model, system, row.run)
        assert row.step_time == pytest.approx(made.step_time, rel=1e-9), row
        assert row.memory == pytest.approx(made.memory.total, rel=1e-9), row


@pytest.mark.parametrize(
    "case", ["dense", "uneven experts", "by work", "adapters", "forward", "overlapped", "fed", "clipped"]
)
def test_pipelines_with_sharded_parameters_are_searched_where_they_are_stated(case: str) -> None:
    model, system, options = CASES[case]
    network, machine, run = load_model(model), load_system(system), validate_mapping(Run, options, "test")
    sources = _sources(
        network, machine, _sized(run, run.gpus, run.global_batch or 0), search_space_from_options("zero=3")
    )
    part, *pairs = (source.evaluate_within() for source in sources)
    found = Ranking([part, *pairs], machine, "time")
    stages = np.array([layout.mesh.degree("pp") for layout in part.layouts])[part.results.layout_index]
    piped = np.flatnonzero(stages > 1).tolist()
    assert set(part.results.choice_field("zero")) == {3} and len(set(part.results.choice_field("schedule")[piped])) >= 3
    piped += range(len(part.results), len(found.step))
    for index in random.Random(11).sample(piped, min(len(piped), DRAWS)):
        row = found.plan_row(index)
        made = predict(network, machine, row.run)
        assert row.step_time == pytest.approx(made.step_time, rel=1e-9), row
        assert row.memory == pytest.approx(made.memory.total, rel=1e-9), row


@pytest.mark.slow
def test_pipelines_with_sharded_parameters_are_left_out_unless_they_are_stated() -> None:
    _, _, part, _ = everything("dense")
    stages = np.array([layout.mesh.degree("pp") for layout in part.layouts])[part.results.layout_index]
    assert set(part.results.choice_field("zero")[stages > 1]) == {0, 1, 2}


@pytest.mark.slow
def test_every_choice_occurs() -> None:
    _, _, part, found = everything("large")
    results = part.results
    assert set(results.choice_field("zero")) == {0, 1, 2, 3}
    assert set(results.recompute_index) == {0, 1, 2}
    assert set(results.choice_field("overlaps_gradient_exchange")) == {False, True}
    assert set(results.choice_field("chunks")) >= {1, 2, 3, 4, 6}
    assert len(set(results.choice_field("schedule"))) == len(SCHEDULES)
    assert len(results) > 100_000 and np.all(np.isfinite(found.step)) and np.all(found.memory > 0)


@pytest.mark.slow
def test_pipelines_exchange_gradients_after_their_last_pass_or_beside_it() -> None:
    """Both ways of the same plan, where the exchange is not free; early ones are never slower, and no larger.

    ZeRO-2 sums gradients after every pass: layer by layer beside it, or all together behind it, so either may win."""
    _, _, part, _ = everything("compiled")
    r, stages = part.results, np.array([layout.mesh.degree("pp") for layout in part.layouts])
    piped = stages[r.layout_index] > 1
    overlapped = r.choice_field("overlaps_gradient_exchange")
    rows = np.stack(
        [r.layout_index, r.microbatch, r.recompute_index, *map(r.choice_field, ("schedule", "chunks", "zero"))], axis=1
    )
    late = {tuple(row): i for i, row in enumerate(rows.tolist()) if piped[i] and not overlapped[i]}
    early = {tuple(row): i for i, row in enumerate(rows.tolist()) if piped[i] and overlapped[i] and row[-1] < 2}
    assert early and set(early) <= set(late)
    pairs = np.array([(early[row], late[row]) for row in early])
    assert np.all(r.step_time[pairs[:, 0]] <= r.step_time[pairs[:, 1]] * (1 + 1e-12))
    assert np.any(r.step_time[pairs[:, 0]] < r.step_time[pairs[:, 1]] * 0.99)
    assert np.array_equal(r.memory[pairs[:, 0]], r.memory[pairs[:, 1]])


def test_no_configuration_occurs_twice() -> None:
    _, _, part, _ = everything("dense")
    r = part.results
    cuts = {cut: number for number, cut in enumerate(dict.fromkeys(r.layers_per_piece_by_batch))}
    cut = np.array([cuts[each] for each in r.layers_per_piece_by_batch])[r.batch_index]
    rows = np.stack(
        [r.layout_index, r.microbatch, r.recompute_index, cut, *map(r.choice_field, ExecutionChoice._fields)]
    )
    assert np.unique(rows, axis=1).shape == rows.shape


def test_layouts_use_all_gpus_and_share_the_batch_evenly() -> None:
    _, _, part, _ = everything("dense")
    for layout in part.layouts:
        assert layout.mesh.size == 16
        assert layout.local_batch * layout.mesh.replicas == 64
        assert layout.mesh.degree("ep") == 1  # there are no experts to spread


@pytest.mark.slow
def test_a_network_without_tensor_parallel_layers_is_not_split_so() -> None:
    _, _, part, _ = everything("convolutions")
    assert {layout.mesh.degree("tp") for layout in part.layouts} == {1}


@cache
def small() -> FoundPlans:
    return search(load_model("gpt2"), load_system("dgx-h100"), Run(gpus=8, global_batch=64), top=50)


@pytest.mark.slow
def test_best_first_and_the_front_falls() -> None:
    found = small()
    assert found.plans[0].fits
    steps = [float(f"{row.step_time:.9e}") for row in found.plans]
    assert steps == sorted(steps)
    assert found.pareto_plans[0].step_time == pytest.approx(found.plans[0].step_time, rel=1e-9)
    for faster, smaller in pairwise(found.pareto_plans):
        assert faster.step_time <= smaller.step_time and faster.memory > smaller.memory


@pytest.mark.slow
def test_each_plan_is_listed_with_the_better_exchange() -> None:
    """Overlap that wins nothing is counted, not listed; where it wins, the overlapped row stands for both."""
    _, _, _, found = everything("large")
    every, best = [found.plan_row(int(index)) for index in found.best_indices(80)], found.best_plans(40)
    plans = [(row.strategy, row.microbatch, row.recompute, row.schedule) for row in best]
    assert len(set(plans)) == len(plans) == 40
    for row, plan in zip(best, plans, strict=True):
        alike = [r for r in every if (r.strategy, r.microbatch, r.recompute, r.schedule) == plan]
        assert row.step_time == min(one.step_time for one in alike)
    assert any(row.overlaps_gradient_exchange for row in everything("compiled")[3].best_plans(40))


@pytest.mark.slow
def test_no_plan_beats_the_best_by_a_brute_search() -> None:
    """Every strategy that four GPUs allow, predicted one by one."""
    model, system = load_model("gpt2"), load_system("dgx-h100")
    best = search(model, system, Run(gpus=4, global_batch=8), space=SearchSpace(recompute=("none",), zero=(0,)), top=1)
    times = []
    for strategy in (
        "dp=4",
        "tp=4",
        "tp=4,sp",
        "tp=2,dp=2",
        "tp=2,dp=2,sp",
        "cp=2,dp=2",
        "cp=4",
        "pp=2,dp=2",
        "tp=2,cp=2",
    ):
        for microbatch in (1, 2, 4, 8):
            try:
                run = Run(gpus=4, global_batch=8, strategy=strategy, microbatch=microbatch)
                times.append(predict(model, system, run).step_time)
            except PlanError:
                continue
    assert len(times) > 10
    assert best.plans[0].step_time <= min(times) * (1 + 1e-12)


def test_explanation_names_the_next_and_the_interval() -> None:
    model, system = load_model("gpt2"), load_system("dgx-h100")
    found = explain_best_plan(model, system, small())
    assert found.winner.step_time == pytest.approx(small().plans[0].step_time, rel=1e-9)
    assert found.runner_up is not None and found.runner_up.step_time >= found.winner.step_time
    assert "wins" in found.text and "90 % interval" in found.text


def test_the_first_plan_leaves_room_whether_or_not_a_training_is_priced(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["plan", "llama3-8b", "--system", "dgx-h100", "--gpus", "32", "--global-batch", "32", "--seq", "131072"]
    call += ["--dtype", "fp8", "--strategy", "cp=16", "--explain"]
    assert run(call) == 0
    plain = " ".join(capsys.readouterr().out.split())
    assert "Plans that leave less than 5 % of the memory free are listed last." in plain
    assert run([*call, "--tokens", "1T"]) == 0
    priced = " ".join(capsys.readouterr().out.split())
    (first,) = re.findall(r"Best by time: (\S+) on 32 GPUs", plain)
    assert f"with {first}, " in priced
    assert run([*call, "--json", "--top", "1"]) == 0
    (best,) = json.loads(capsys.readouterr().out)["plans"]
    assert (
        best["strategy"] == first and best["memory_bytes"] <= 0.95 * load_system("dgx-h100").device.memory.usable_bytes
    )


@pytest.mark.slow
def test_nothing_fits_is_said() -> None:
    model, system = load_model("gpt3-175b"), load_system("dgx-1-v100")
    found = search(model, system, Run(gpus=8, global_batch=8), top=3)
    assert found.fitting_configurations == 0 and not any(row.fits for row in found.plans) and not found.pareto_plans
    assert [row.memory for row in found.plans] == sorted(row.memory for row in found.plans)
    with pytest.raises(CapacityError, match="fits"):
        explain_best_plan(model, system, found)


def test_fewest_gpus_and_least_cost_over_several_counts() -> None:
    model, system = load_model("gpt2-xl"), load_system("aws-p4d.24xlarge")
    run = Run(global_batch=32)
    fewest = search(model, system, run, counts=(8, 4, 16), objective="gpus", top=1)
    fastest = search(model, system, run, counts=(8, 4, 16), objective="time", top=1)
    cheapest = search(model, system, run, counts=(8, 4, 16), objective="cost", top=1)
    assert fewest.plans[0].gpus == 4 and fewest.plans[0].fits
    assert fastest.plans[0].gpus == 16
    assert cheapest.plans[0].gpus <= 16 and cheapest.plans[0].step_time >= fastest.plans[0].step_time


def test_space_is_narrowed_by_what_is_stated() -> None:
    space = search_space_from_options("tp=4,zero=1,vp=2,sp", recompute="full", microbatches=2, schedules="1f1b")
    assert space.degrees == {"tp": 4} and space.zero == (1,) and space.chunks == (2,) and space.sequence_parallel
    assert space.recompute == ("full",) and space.microbatches == (2,) and space.schedules == ("1f1b", "interleaved")
    found = search(
        load_model("gpt2"),
        load_system("dgx-h100"),
        Run(gpus=8, global_batch=32),
        space=search_space_from_options("tp=4,zero=1"),
    )
    assert all("tp=4" in row.strategy and "zero=1" in row.strategy for row in found.plans)


def test_bad_requests_are_errors() -> None:
    model, system = load_model("gpt2"), load_system("dgx-h100")
    with pytest.raises(SpecError, match="objective 'speed'"):
        search(model, system, Run(gpus=8), objective="speed")
    with pytest.raises(PlanError, match="7 gpus"):
        search(model, system, Run(gpus=7, global_batch=3), space=SearchSpace(degrees={"tp": 1, "cp": 1, "pp": 1}))
    with pytest.raises(PlanError, match="leave it out"):
        search(model, system, Run(gpus=8, pipeline={"cut": "time"}))
    with pytest.raises(PlanError, match="under schedule chimera"):
        search(
            model, system, Run(gpus=6, global_batch=48), space=search_space_from_options("pp=3", schedules="chimera")
        )
    with pytest.raises(SpecError, match="state one"):
        search_global_batch(model, Run(batch=1, global_batch=8))


def test_divisors_and_microbatches() -> None:
    assert divisors(1) == (1,) and divisors(36) == (1, 2, 3, 4, 6, 9, 12, 18, 36)
    assert microbatch_sizes(12, SearchSpace(microbatches=(2, 5, 6))) == (2, 6)


@pytest.mark.slow
def test_points_price_every_layout_and_share_programs() -> None:
    model, system = load_model("gpt2"), load_system("dgx-h100")
    run, space = Run(gpus=64, global_batch=256), SearchSpace()
    made = build_backend(system, run, "bf16")
    from paleo.network.graph import build_graph

    chosen = list_layouts(build_graph(model, batch=1, choices=made.layer_implementations), 64, 256, space)
    points = layer_times_of_layouts(
        GraphsByBatch(model, made), made, chosen, lambda layout: microbatch_sizes(layout.local_batch, space)
    )
    assert points.times_by_section.forward.shape == (len(points.programs[0].sections), len(points.index_by_layout))
    assert len({id(program) for program in points.programs}) < len(points.programs)
    assert len(ConfigurationEvaluator(points, chosen, space, made).evaluate()) > 10_000


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_counts_between_lowerings_are_those_of_lowerings(sequence_parallel: bool) -> None:
    """GPT-2's vocabulary of 50257 is padded on every tp but 1, and rows of its table fill up with the microbatch."""
    backend = build_backend(load_system("dgx-h100"), Run(gpus=96, global_batch=96), "bf16")
    blocks = _Blocks(GraphsByBatch(load_model("gpt2"), backend), backend)
    sizes = (1, 2, 3, 8, 48, 96, 1024, 4096)
    family = {LayoutKey(tp, cp, 1, 2, sequence_parallel): sizes for tp in (2, 3, 4, 6, 12) for cp in (2, 4, 8)}
    found = blocks.lower_layouts(family)
    lowered = len(blocks.graphs.programs)
    assert {block.key for block in found} == {key for key in family if blocks._divides(key)} and lowered < 30
    large = [program for (_, size, _), program in blocks.graphs.programs.items() if size > max(sizes)]
    tables = count_sections_through_embeddings(blocks.graphs.graph_at_batch(1), backend.fused_chains)
    assert {len(program.sections) for program in large} == {tables} and tables < len(found[0].program.sections)
    for block in found:
        exact = np.stack([_values(blocks._lower(block.key, size), blocks.graphs.section_counts) for size in sizes])
        assert np.allclose(block.values_by_microbatch, exact, rtol=1e-12, atol=0.0), block.key
        assert block.program.parameter_count == blocks._lower(block.key, 1).parameter_count


@pytest.mark.parametrize(("network", "sections"), [("gpt2", 2), ("resnet50", 0), ("llama3-8b", 1)])
def test_tables_are_read_in_the_first_sections(network: str, sections: int) -> None:
    assert count_sections_through_embeddings(build_graph(load_model(network), batch=1), "none") == sections


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_counts_of_folded_experts_lie_on_surfaces(whole: bool) -> None:
    """Experts lie over ep, cp and tp, or tp divides each of them; every degree changes in between."""
    backend = build_backend(load_system("dgx-h100"), Run(gpus=64, global_batch=64, software="megatron-core"), "bf16")
    blocks = _Blocks(GraphsByBatch(load_model("deepseek_v2-lite"), backend), backend)
    sizes, degrees = (1, 2, 3, 8, 48, 96), (2, 4, 8)
    keys = (
        LayoutKey(tp, cp, ep, 2, True, etp=1 if whole else tp)
        for tp, cp, ep in product(degrees, repeat=3)
        if 32 % (cp * ep * (tp if whole else 1)) == 0
    )
    family = dict.fromkeys(keys, sizes)
    surfaces = blocks.lower_layouts(family)
    assert len(surfaces) == len(family) > 5 and len(blocks.graphs.programs) < 5 * len(family)
    for block in surfaces:
        exact = np.stack([_values(blocks._lower(block.key, size), blocks.graphs.section_counts) for size in sizes])
        assert np.allclose(block.values_by_microbatch, exact, rtol=1e-12, atol=0.0), block.key
        assert block.program.parameter_count == blocks._lower(block.key, 1).parameter_count


@pytest.mark.slow
def test_one_weird_trick_is_rediscovered() -> None:
    """Krizhevsky 2014: AlexNet's convolutions by the batch, its fully connected layers by features; with a batch so
    large that its activations outweigh the weights, everything by the batch."""
    model, system = load_model("alexnet"), load_system("dgx-1-v100")
    found = search_layer_splits(model, system, Run(gpus=8, global_batch=1024, dtype="fp32"))
    splits = dict(found.split_by_layer)
    assert all(split == "batch" for name, split in splits.items() if name.startswith(("conv", "max_pool")))
    assert all(split == "features" for name, split in splits.items() if name.startswith("linear"))
    assert found.step_time < found.data_parallel_step_time
    large = search_layer_splits(model, system, Run(gpus=8, global_batch=65536, dtype="fp32"))
    assert all(split == "batch" for name, split in large.split_by_layer if name.startswith(("conv", "linear")))
    assert large.step_time <= large.data_parallel_step_time


def test_per_layer_search_takes_chains_alone() -> None:
    with pytest.raises(PlanError, match="chains of layers"):
        search_layer_splits(load_model("resnet50"), load_system("dgx-1-v100"), Run(gpus=8))


def test_memory_of_the_search_is_small() -> None:
    _, _, part, _ = everything("large")
    held = sum(getattr(part.results, name).nbytes for name in ("case_index", "batch_index", "step_time", "memory"))
    assert held < 0.1 * GIBIBYTE


@pytest.mark.parametrize("layers", [5000, 4999])
def test_thousands_of_layers_are_cut_in_few_ways(layers: int) -> None:
    """4999 is prime: no number of chunks divides it."""
    sections = tuple(SimpleNamespace(repeat=repeat, name=str(repeat)) for repeat in (1, layers))
    run, space = SimpleNamespace(pipeline=SimpleNamespace(cut=None)), SimpleNamespace(chunks=None)
    program, backend = cast(Any, SimpleNamespace(sections=sections)), cast(Any, SimpleNamespace(run=run))
    for stages in (2, 8, 16):
        counts = candidate_chunk_counts(program, stages, cast(Any, space), backend)
        assert counts[0] == 1 and 3 <= len(counts) <= 32 and counts[-1] <= 64
    assert candidate_chunk_counts(program, 2, cast(Any, SimpleNamespace(chunks=(100,))), backend) == (100,)
