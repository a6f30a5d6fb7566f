"""Phases and memory of served networks, against sizes worked by hand and a second lowering."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paleo.errors import SpecError
from paleo.pricing.calibration_lookup import find_calibrated_parameters
from paleo.pricing.engine_gemm import EngineGemmParameters
from paleo.pricing.experts import TUNED_BLOCK_SCALED_TILES, expert_ffn_time
from paleo.pricing.gemm import GemmParameters
from paleo.pricing.kernels import device_datasheet
from paleo.pricing.power import power_slowdown, relative_training_energy
from paleo.serving.engines import engine_of_release, load_engine
from paleo.serving.formats import Formats, parse_formats
from paleo.serving.forward_lowering import Sharding, lower_forward
from paleo.serving.iteration_times import (
    EXPERT_POPULARITY_EXPONENT,
    TOKEN_GRID,
    EngineKernels,
    _TableBuilder,
    iteration_tables,
)
from paleo.serving.memory import serving_memory
from paleo.serving.plans import ServingLoad, fitting_layouts, is_launch_bound, iteration_time_breakdown
from paleo.serving.steady_state import RequestLengths, saturated_steady_state
from paleo.specs.device import load_device
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system

GIB = 2.0**30


@pytest.fixture(scope="module")
def llama():
    return iteration_tables(load_model("llama3-8b"), load_system("dgx-h100"), Sharding(), Formats())


def test_affine_sizes_equal_a_lowering_of_so_many_tokens():
    from paleo.parallel.plan import plan
    from paleo.step.backend import build_backend

    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    work, backend = lower_forward(model, system, Sharding(tp=2), "bf16")
    run = Run(gpus=2, strategy="tp=2", batch=1, forward_only=True, model={"seq": 96}, dtype="bf16")
    layout = plan(model, system, run)
    own = build_backend(system, run, layout.dtype, backend.software)
    graph = own.graph(model, 1)
    program = own.lower(graph, own.placement(graph, layout.strategy), layout.mesh)
    direct = {c.kernel.name: c.kernel for s in program.sections for c in s.kernels if c.kernel.family == "gemm"}
    scaled = {
        e.kernel_at_few_tokens.name: e.kernel_at(96.0)
        for e in (*work.layers, *work.head_kernels)
        if e.kernel_at_few_tokens.family == "gemm"
    }
    assert direct.keys() == scaled.keys()
    for name, kernel in direct.items():
        assert scaled[name].shape == pytest.approx(kernel.shape)
        assert scaled[name].bytes_read == pytest.approx(kernel.bytes_read)


def test_collectives_of_a_tensor_parallel_block_are_two_and_one_of_the_embedding():
    work, _ = lower_forward(load_model("llama3-8b"), load_system("dgx-h100"), Sharding(tp=2), "bf16")
    assert sum(each.count for each in work.layer_collectives) == 2 * 32 + 1
    assert {each.bytes_per_token for each in work.layer_collectives} == {2.0 * 4096}


def test_cache_of_a_token_and_weights_by_hand(llama):
    engine, device = load_engine("vllm"), load_device("h100-sxm5-80gb")
    memory = serving_memory(llama.lowered, Sharding(), Formats(), engine, device)
    assert float(memory.sequence_bytes(16)) == 16 * 32 * 2 * 8 * 128 * 2  # layers, key and value, heads, width, bytes
    assert float(memory.sequence_bytes(17)) == float(memory.sequence_bytes(32))  # pages of 16
    assert memory.weights == pytest.approx(2 * 8030261248)
    narrow = serving_memory(llama.lowered, Sharding(), Formats("fp8", "fp8"), engine, device)
    assert narrow.weights == pytest.approx(2 * 8030261248 - 32 * (4096 * (6144 + 4096) + 3 * 4096 * 14336))
    assert float(narrow.sequence_bytes(16)) == float(memory.sequence_bytes(16)) / 2


def test_sliding_windows_cap_the_cache_and_latents_are_narrow():
    system, engine = load_system("dgx-h100"), load_engine("vllm")
    oss, _ = lower_forward(load_model("gpt-oss-20b"), system, Sharding(), "bf16")
    memory = serving_memory(oss, Sharding(), Formats(), engine, system.device)
    each = 12 * 2 * 8 * 64 * 2.0
    assert float(memory.sequence_bytes(4096)) == each * (4096 + 128)
    latent, _ = lower_forward(load_model("deepseek_v3"), system, Sharding(tp=8), "fp8")
    assert [group.cache_elements_per_token for group in latent.attention] == [576.0]


def test_products_of_latent_attention_and_mixtures_are_those_of_the_engines():
    work, _ = lower_forward(load_model("deepseek_v3"), load_system("dgx-h200"), Sharding(tp=8), "fp8")
    products = {
        each.kernel_at_few_tokens.name: each for each in work.layers if each.kernel_at_few_tokens.family == "gemm"
    }
    down = [each for name, each in products.items() if name.endswith("_down")]
    assert {each.kernel_at_few_tokens.shape["n"] for each in down} == {1536.0 + 576.0}  # one product of both latents
    assert sum(each.count for each in down) == 61
    assert all(each.weight_elements == 7168.0 * 2112.0 for each in down)
    operations = {name.rsplit(".", 1)[1]: each.kernel_at_few_tokens.operation for name, each in products.items()}
    assert (operations["router"], operations["q_down"]) == ("gemm", "narrow")
    shared = {name.rsplit(".", 1)[1] for name, each in products.items() if each.is_shared_expert}
    assert shared == {"up", "down"}


def test_scales_of_blocks_make_many_rows_slower_and_none_faster():
    """DeepGEMM's products of 4,096 rows take 1.0 to 1.3 times as long as those with a scale of the tensor on H100."""
    system, formats = load_system("dgx-h100"), Formats("fp8")
    for engine, most in (("sglang", 1.3), ("vllm", 1.5)):
        kernels = load_engine(engine).kernels
        made, published = (
            iteration_tables(load_model(name), system, Sharding(), formats, kernels).layer_times
            for name in ("qwen3-14b", "Qwen/Qwen3-14B-FP8")
        )
        slower = published / made
        assert slower.min() >= 1.0
        assert 1.05 < slower[TOKEN_GRID == 4096] < most
    both = (
        iteration_tables(load_model(name), system, Sharding(), formats)
        for name in ("llama3-8b", "nvidia/Llama-3-8B-FP8")
    )
    assert len({each.layer_times.tobytes() for each in both}) == 1


def test_shared_experts_add_bytes_and_arithmetic_but_no_latency():
    model, system, formats = load_model("deepseek_v3"), load_system("dgx-h200"), Formats("fp8", "fp8")
    work, backend = lower_forward(model, system, Sharding(8), "fp8")
    pricing = _TableBuilder(work, backend, Sharding(8), formats, EngineKernels())
    shared = tuple(each for each in work.layers if each.is_shared_expert)
    few, many = pricing.kernel_times(shared)[[0, -1]]
    read = sum(each.weight_elements * each.count for each in shared) / system.device.memory.bandwidth
    assert read < few < 1.5 * read
    assert many > 20 * few


def test_prompts_of_latent_attention_have_keys_of_their_own_under_sglang():
    model, system = load_model("deepseek_v3"), load_system("dgx-h200")
    sglang, vllm = (
        iteration_tables(model, system, Sharding(8), Formats("fp8"), load_engine(name).kernels)
        for name in ("sglang", "vllm")
    )
    assert np.array_equal(sglang.prefill_attention_times, vllm.prefill_attention_times)
    assert not np.array_equal(sglang.decode_attention_times, vllm.decode_attention_times)


def test_experts_with_narrow_weights_only_have_a_kernel_of_their_own():
    model, engine = load_model("gpt-oss-20b"), load_engine("vllm")
    usual = engine.model_copy(update={"weight_only_expert_kernels": {}})

    def body(system, kernels):
        return iteration_tables(model, load_system(system), Sharding(), parse_formats("mxfp4"), kernels).layer_times

    assert np.all(body("dgx-a100-80gb", engine.kernels) < body("dgx-a100-80gb", usual.kernels))
    assert np.array_equal(body("dgx-h100", engine.kernels), body("dgx-h100", usual.kernels))


def test_experts_in_marlin_keep_most_of_the_rate_of_dense_products():
    phases = iteration_tables(
        load_model("gpt-oss-20b"), load_system("dgx-a100-80gb"), Sharding(), parse_formats("mxfp4"),
        load_engine("vllm").kernels,
    )  # fmt: skip
    tokens = 8192.0
    flops = 24 * 2 * tokens * (4 * 3 * 2880 * 2880 + 2880 * 64 * (2 * 64 + 2 * 8))  # experts and projections
    assert 0.45 * 312e12 < flops / float(phases.non_attention_time(tokens)) < 0.85 * 312e12


def test_attention_with_sinks_runs_in_small_blocks_of_triton_on_ampere_under_vllm():
    def attention(system, engine):
        phases = iteration_tables(
            load_model("gpt-oss-20b"), load_system(system), Sharding(), parse_formats("mxfp4"),
            load_engine(engine).kernels,
        )  # fmt: skip
        return float(phases.prefill_attention_time(1.0, 8192.0, 16384.0))

    own, other = attention("dgx-a100-80gb", "vllm"), attention("dgx-a100-80gb", "tensorrt-llm")
    flops = 12 * 4 * 64 * 64 * 8192 * (16384 + 4096)  # the full layers; windows add less than a hundredth
    assert 0.08 * 312e12 < flops / own < 0.15 * 312e12
    assert own > 3 * other
    assert attention("dgx-h100", "vllm") == attention("dgx-h100", "tensorrt-llm")


def test_a_token_takes_at_least_the_reading_of_the_weights(llama):
    one = float(llama.iteration_time(decoded=1, cached=128))
    least = 2 * 7.5e9 / 3.352e12
    assert least < one < 1.6 * least
    assert float(llama.iteration_time(decoded=64, cached=128)) < 2 * one


def test_prefill_is_below_the_peak_and_above_half_of_it(llama):
    seconds = float(llama.iteration_time(decoded=0, cached=1, chunks=1, length=8192))
    rate = 2 * 7.0e9 * 8192 / seconds
    assert 0.4 * 989e12 < rate < 0.9 * 989e12


def test_iterations_grow_with_every_count(llama):
    batches = llama.iteration_time(decoded=np.array([1, 8, 64, 512, 2048]), cached=1024)
    assert np.all(np.diff(batches) >= 0)
    lengths = llama.iteration_time(decoded=64, cached=np.array([64, 512, 4096, 65536]))
    assert np.all(np.diff(lengths) >= 0)


def test_weight_only_formats_save_bytes_not_arithmetic():
    model, system = load_model("llama3-8b"), load_system("dgx-a100-80gb")
    wide = iteration_tables(model, system, Sharding(), Formats())
    narrow = iteration_tables(model, system, Sharding(), Formats("int4"))
    assert float(narrow.non_attention_time(1)) < 0.5 * float(wide.non_attention_time(1))
    assert float(narrow.non_attention_time(8192)) >= float(wide.non_attention_time(8192))


def test_stages_and_shards_shorten_an_iteration_and_share_the_memory():
    model, system, engine = load_model("llama3-70b"), load_system("dgx-h100"), load_engine("vllm")
    four, eight = (iteration_tables(model, system, Sharding(tp=tp), Formats()) for tp in (4, 8))
    assert float(eight.iteration_time(decoded=8, cached=512)) < float(four.iteration_time(decoded=8, cached=512))
    staged = Sharding(tp=4, pp=2)
    halves = serving_memory(four.lowered, staged, Formats(), engine, system.device)
    whole = serving_memory(four.lowered, Sharding(tp=4), Formats(), engine, system.device)
    assert halves.weights == whole.weights / 2
    assert float(halves.sequence_bytes(64)) == float(whole.sequence_bytes(64)) / 2


def test_experts_that_no_token_hits_are_not_read():
    system = load_system("dgx-h100")
    mixture = iteration_tables(load_model("qwen3-30b-a3b"), system, Sharding(), Formats())
    assert float(mixture.non_attention_time(1)) < 0.3 * float(mixture.non_attention_time(64))


def test_experts_are_those_of_the_engines_kernels_on_their_rank():
    """At the clock that the limit of power leaves: their calibration is from short runs."""
    system, model = load_system("dgx-h100"), load_model("qwen3-30b-a3b")
    tokens = np.array([256.0])
    ones = np.ones(1)
    triton, cutlass = (
        iteration_tables(model, system, Sharding(), Formats(), EngineKernels(expert_kernels=names)).non_attention_time(
            tokens
        )
        for names in ((("Hopper", "triton-vllm"),), ())
    )
    alone = {
        kernel: expert_ffn_time(
            tokens=tokens, hidden=2048 * ones, inner=768 * ones, top_k=8 * ones, experts=128 * ones, tp=ones, ep=ones,
            gated=ones, exponent=EXPERT_POPULARITY_EXPONENT * ones, element_bytes=2.0,
            device=device_datasheet(system.device, "bf16"),
            parameters=find_calibrated_parameters(
                EngineGemmParameters, subject=system.device.name, architecture="Hopper", family=f"experts.{kernel}.bf16"
            ).parameters,
            triton="triton" in kernel,
        )
        for kernel in ("triton-vllm", "cutlass")
    }  # fmt: skip
    card = device_datasheet(system.device, "bf16")
    products = find_calibrated_parameters(
        GemmParameters, subject=card.name, architecture="Hopper", family="gemm.tensor"
    ).parameters
    draw = {
        "energy": products.energy_per_flop,
        "activity": relative_training_energy(products.training_energy_ratio, "bf16", card),
    }
    sustained = {
        name: seconds
        * power_slowdown(busy=seconds, flops=2.0 * 256 * 8 * 3 * 2048 * 768, dram=0.0, device=card, **draw)
        for name, seconds in alone.items()
    }
    assert sustained["cutlass"] >= alone["cutlass"]
    assert triton - cutlass == pytest.approx(48 * (sustained["triton-vllm"] - sustained["cutlass"]), rel=1e-6)


def test_attention_beside_prompts_reads_the_cache_for_each_query_head():
    model, joint = load_model("qwen3-14b"), EngineKernels(joint_attention=True)
    ampere, hopper = (
        iteration_tables(model, load_system(name), Sharding(), Formats(), joint)
        for name in ("dgx-a100-80gb", "dgx-h100")
    )
    beside, alone = (float(ampere.decode_attention_time(64, 4096, joint=each)) for each in (True, False))
    assert 2.0 * alone < beside < 5.0 * alone  # five query heads share a key head
    assert hopper.joint_attention_times is hopper.decode_attention_times
    whole = ampere.iteration_time(decoded=64, cached=4096, chunks=1, length=1024)
    apart = (
        ampere.iteration_time(decoded=64, cached=4096)
        - ampere.non_attention_time(64)
        + ampere.non_attention_time(64 + 1024)
    )
    apart = apart + ampere.prefill_attention_time(1, 1024) + ampere.sampling_time(65) - ampere.sampling_time(64)
    assert whole - apart == pytest.approx(beside - alone)


def test_ranks_of_attention_share_the_limits_of_sglang_alone():
    load = ServingLoad("most", RequestLengths(1000, 100))
    model, system = load_model("deepseek_v3"), load_system("dgx-h200")
    shapes = {}
    for name in ("vllm", "sglang"):
        layouts, _ = fitting_layouts(
            model, system, 8, load_engine(name), [Formats("fp8")], load, [Sharding(1, 1, 8, expert_parallel=True)]
        )
        shapes[name] = layouts[0].batching().max_tokens / layouts[0].limit.tokens
    assert shapes == {"vllm": 8.0, "sglang": 1.0}


def test_refusals_say_what_would_fit():
    system, engine = load_system("dgx-h100"), load_engine("vllm")
    work, _ = lower_forward(load_model("llama3-70b"), system, Sharding(), "bf16")
    memory = serving_memory(work, Sharding(), Formats(), engine, system.device)
    assert not memory.fits
    assert "more devices per replica or narrower weights" in memory.refusal(128)
    with pytest.raises(SpecError, match="unknown format; nearest: 'fp8'"):
        parse_formats("fp9")
    with pytest.raises(SpecError, match="nothing is cached"):
        lower_forward(load_model("resnet50"), system, Sharding(), "bf16")


def test_limits_of_tokens_go_by_the_device():
    vllm = load_engine("vllm")
    found = [vllm.batch_limit(load_device(name)) for name in ("b200", "h100-sxm5-80gb", "a100-sxm4-80gb", "l40s")]
    assert [(each.tokens, each.sequences) for each in found] == [(16384, 1024), (8192, 1024), (2048, 256), (2048, 256)]
    assert engine_of_release("tensorrt-llm", "v1.0").name == "tensorrt-llm"


@pytest.mark.parametrize(
    ("model", "device", "weights"), [("bert_large", "dgx-h100", "fp8"), ("llama3-8b", "aws-g6e.48xlarge", "fp8")]
)
def test_narrow_products_stay_below_the_peak(model, device, weights):
    system = load_system(device)
    priced = iteration_tables(load_model(model), system, Sharding(), Formats(weights))
    flops = 2.0 * sum(each.weight_elements * each.count for each in priced.lowered.layers)
    assert np.all(priced.layer_times * system.device.peak_flops_per_s(weights) > flops * TOKEN_GRID)


def test_encoders_of_eight_bits_between_kernels_are_faster_than_of_sixteen():
    model, system = load_model("bert_large"), load_system("dgx-h100")
    eight, sixteen, usual = (
        iteration_tables(model, system, Sharding(), Formats("fp8"), EngineKernels(encoder_element_bytes=width))
        for width in (1.0, 2.0, 0.0)
    )
    assert eight.non_attention_time(8192) < sixteen.non_attention_time(8192) < usual.non_attention_time(8192)
    seconds = 2.0 * 4.0 * 16 * 64 * 178.0 * 24 / (0.8 * system.device.memory.bandwidth)  # q, k, v and the result
    assert float(sixteen.prefill_attention_time(46, 178) + 0.0) == pytest.approx(46 * seconds, rel=0.02)


def test_a_narrow_cache_doubles_the_products_of_attention_where_the_kernel_has_them():
    model = load_model("llama3-8b")
    hopper, ampere = (
        [iteration_tables(model, load_system(system), Sharding(), Formats("bf16", cache)) for cache in ("bf16", "fp8")]
        for system in ("dgx-h100", "dgx-a100-80gb")
    )
    prompts = [float(each.prefill_attention_time(1, 16384)) for each in hopper]
    assert 0.5 < prompts[1] / prompts[0] < 0.85  # exponentials take as long
    assert float(hopper[1].decode_attention_time(256, 2000)) < 0.6 * float(hopper[0].decode_attention_time(256, 2000))
    assert float(ampere[1].prefill_attention_time(1, 16384)) == pytest.approx(
        float(ampere[0].prefill_attention_time(1, 16384))
    )


def test_large_sums_are_left_to_the_library():
    model, system = load_model("llama3-8b"), load_system("dgx-h100")
    none, most, some = (
        iteration_tables(
            model, system, Sharding(4), Formats(), EngineKernels(all_reduce_latency=latency, all_reduce_max_bytes=limit)
        )
        for latency, limit in ((0.0, 0.0), (4.6e-6, 2.0**40), (4.6e-6, 2.0**20))
    )
    large = TOKEN_GRID * 4096 * 2 >= 2.0**20
    assert np.all(some.collective_times[large] == none.collective_times[large])
    assert np.all(some.collective_times[~large] == most.collective_times[~large])
    assert np.all(some.collective_times[~large] < none.collective_times[~large])


def test_activations_become_nvfp4_in_a_kernel_of_their_own():
    model, system = load_model("llama3-8b"), load_system("dgx-b200")
    times = {
        (weights, own): iteration_tables(
            model, system, Sharding(), Formats(weights, "fp8"), EngineKernels(has_quantisation_kernel=own)
        )
        for weights in ("fp8", "fp4")
        for own in (False, True)
    }
    assert times["fp4", False].non_attention_time(256.0) == times["fp4", True].non_attention_time(256.0)
    assert times["fp8", False].non_attention_time(256.0) < times["fp8", True].non_attention_time(256.0)


def test_an_iteration_without_a_graph_takes_at_least_its_launches():
    model, system, short = load_model("llama3-8b"), load_system("dgx-h100"), {"decoded": 8, "cached": 100}
    engine = EngineKernels(kernel_launch_time=1.0, largest_graph=8, wide_graph=16, has_quantisation_kernel=True)
    tables = iteration_tables(model, system, Sharding(), Formats(), engine)
    # norm and sum in one kernel twice, four products, rotation, three kernels of attention, activation; the embedding
    assert tables.launch_time == 32 * 11 + 1
    assert float(tables.iteration_time(**short)) < 0.1
    assert float(tables.iteration_time(decoded=9, cached=100)) == tables.launch_time
    assert float(tables.iteration_time(**short, chunks=1, length=64)) == tables.launch_time
    wide = iteration_tables(model, system, Sharding(tp=4), Formats("fp8"), engine)
    assert wide.launch_time == 32 * (11 + 4 + 2) + 2  # conversions before products, all-reduces
    assert float(wide.iteration_time(decoded=16, cached=100)) < 0.1


def test_graphs_of_engines_in_front_and_offline():
    engine = load_engine("tensorrt-llm")
    assert (engine.largest_graph, engine.offline_profile.largest_graph) == (32, 2048)
    assert load_engine("vllm").offline_profile.largest_graph == load_engine("vllm").largest_graph
    assert load_engine("sglang").without_source("GPUStack performance lab").issue == pytest.approx(37e-6)


def test_waits_for_launches_are_a_part_of_the_host():
    engine = load_engine("sglang").model_copy(update={"issue": 1e-3})
    lengths = RequestLengths(100.0, 100.0)
    layout = fitting_layouts(
        load_model("llama3-8b"), load_system("dgx-h100"), 1, engine, [Formats()], ServingLoad("most", lengths)
    )[0][0]
    state = saturated_steady_state(layout.iteration_tables, layout.batching(), lengths, 1000.0)
    parts = iteration_time_breakdown(layout, state)
    assert is_launch_bound(layout, state)
    assert not is_launch_bound(layout, replace(state, decoding_sequences=np.array(4.0)))
    assert parts["attention over the cache"] == pytest.approx(0.0, abs=1e-9)
    assert parts["the host"] > 0.9 * layout.iteration_tables.launch_time - parts["products"]
    assert sum(parts.values()) == pytest.approx(float(state.iteration_time))


@pytest.mark.parametrize(("engine", "tuned"), [("sglang", True), ("vllm", True), ("tensorrt-llm", False)])
def test_blocks_of_published_networks_have_tuned_tiles_under_triton(engine, tuned):
    model, system, formats = load_model("qwen3-30b-a3b"), load_system("dgx-h100"), Formats("fp8")
    work, backend = lower_forward(model, system, Sharding(), formats.arithmetic_format(system.device))
    builder = _TableBuilder(work, backend, Sharding(), formats, load_engine(engine).kernels, block_scales=True)
    tiles = builder._grouped(np.array([16.0]), np.array([128.0]))["tiles"]
    assert (tiles is TUNED_BLOCK_SCALED_TILES) == tuned
