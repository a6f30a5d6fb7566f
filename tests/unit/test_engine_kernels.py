"""Kernels of inference engines: worked values, limits, and families by library."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from paleo.pricing.engine_gemm import (
    EngineGemmParameters,
    LatentAttentionParameters,
    engine_gemm_time,
    latent_attention_time,
    low_precision_gemm_time,
    time_with_host_launch,
)
from paleo.pricing.experts import (
    GROUPED_GEMM_TILES,
    POPULARITY_CLASSES,
    expert_ffn_time,
    expert_gemm_tiles,
    power_law_expert_loads,
)
from paleo.pricing.kernels import device_datasheet
from paleo.specs.device import load_device
from paleo.tables.kernels import FitTarget
from paleo.tables.kinds._engine_kernels import ExpertKernelTable, LatentAttentionTable, QuantisedGemmTable

B200 = device_datasheet(load_device("b200"), "fp8")
#: Kernels that reach every peak and start at once.
IDEAL = EngineGemmParameters(
    launch_time=0.0, host_time=0.0, efficiency=1.0, bandwidth_efficiency=1.0, cycles_per_summed_element=0.0,
    epilogue_cycles=0.0, balanced_tile_width=0.0,
    pass_bandwidth_share=np.inf, index_bytes_per_element=0.0,
)  # fmt: skip


def array(*values: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


def family_of(kind: ExpertKernelTable | QuantisedGemmTable, library: str, kernel: str, scaling: str, dtype: str) -> str:
    row = {"library": library, "kernel_source": kernel, "scaling": scaling, "dtype": dtype}
    return str(kind.kernel_family(pd.DataFrame([row])).item())


def test_a_product_that_fills_the_device_runs_at_its_peak() -> None:
    """One wave of 148 tiles of 128 x 256: 2 m n k / peak."""
    seconds = engine_gemm_time(
        rows=array(128.0), columns=array(256.0 * 148), length=array(4096.0), tiles=((128, 256),), device=B200,
        parameters=IDEAL,
    )  # fmt: skip
    assert seconds == pytest.approx(2.0 * 128 * 256 * 148 * 4096 / B200.peak_flops_per_s)


def test_one_block_takes_the_time_of_a_wave_and_waits_for_its_reads() -> None:
    shape = {"rows": array(1.0), "columns": array(1.0), "length": array(1024.0), "tiles": ((128, 256),)}
    assert engine_gemm_time(**shape, device=B200, parameters=IDEAL) == pytest.approx(
        2.0 * 128 * 256 * 1024 / (B200.peak_flops_per_s / 148)
    )
    slow = engine_gemm_time(**shape, device=B200, parameters=replace(IDEAL, cycles_per_summed_element=1e3))
    assert slow == pytest.approx(1024 * 1e3 / B200.clock_hz)


def test_a_host_that_is_slower_than_the_device_decides() -> None:
    assert time_with_host_launch(array(1e-6, 1e-3), 1e-4) == pytest.approx([1e-4, 1e-3], rel=1e-6)


def test_quantisation_reads_sixteen_bits_and_writes_eight() -> None:
    size = {"m": array(8192.0), "n": array(32.0), "k": array(8192.0), "element_bytes": 1.0, "device": B200}
    more = low_precision_gemm_time(**size, parameters=replace(IDEAL, pass_bandwidth_share=0.5))
    less = low_precision_gemm_time(**size, parameters=IDEAL)
    assert more - less == pytest.approx(8192.0**2 * 3.0 / (0.5 * B200.memory_bandwidth))


def experts(**changed: float) -> float:
    sizes = {
        "tokens": 4096.0, "hidden": 7168.0, "inner": 2048.0, "top_k": 8.0, "experts": 256.0, "tp": 1.0, "ep": 8.0,
        "gated": 1.0, "exponent": 0.0,
    } | changed  # fmt: skip
    arrays = {name: array(value) for name, value in sizes.items()}
    return float(expert_ffn_time(**arrays, element_bytes=1.0, device=B200, parameters=EngineGemmParameters())[0])


def test_experts_are_bound_by_their_weights_where_tokens_are_few() -> None:
    """One token visits 8 of 256 experts on one rank: 8 x 3 matrices of 7168 x 2048 bytes are read."""
    arrays = {"tokens": 1.0, "hidden": 7168.0, "inner": 2048.0, "top_k": 8.0, "experts": 256.0}
    seconds = expert_ffn_time(
        **{name: array(value) for name, value in arrays.items()}, tp=array(1.0), ep=array(1.0), gated=array(1.0),
        exponent=array(0.0), element_bytes=1.0, device=B200, parameters=replace(IDEAL, efficiency=1e6),
    )  # fmt: skip
    assert seconds == pytest.approx(8 * 3 * 7168 * 2048 / B200.memory_bandwidth, rel=0.01)


def test_more_tokens_wider_experts_and_popular_ones_take_longer() -> None:
    assert experts(tokens=8192.0) > experts() > experts(tp=2.0)
    assert experts(exponent=1.2) > experts()
    assert experts(ep=16.0) < experts()


def test_loads_of_experts_are_drawn_from_a_bounded_power_law() -> None:
    """The density x^-1 between 1 and r has the mean (r - 1) / log r; its median is the root of r."""
    ratio = 8000.0
    classes, busiest = power_law_expert_loads(array(1.0), array(ratio), array(1.0), array(512.0))
    mean = (ratio - 1.0) / np.log(ratio)
    assert classes.mean() == pytest.approx(1.0)
    assert classes[3, 0] * mean < ratio**0.5 < classes[4, 0] * mean
    assert classes[-1, 0] == pytest.approx(
        POPULARITY_CLASSES * (ratio - ratio ** (1.0 - 1.0 / POPULARITY_CLASSES)) / (ratio - 1.0), rel=1e-3
    )
    assert busiest[0] == 1.0


@pytest.mark.parametrize(("ranks", "local"), [(2.0, 64.0), (8.0, 16.0), (32.0, 8.0), (64.0, 4.0)])
def test_the_busiest_rank_is_that_of_drawn_loads(ranks: float, local: float) -> None:
    """Loads are drawn 400 times, normalised, and summed by rank; the law is within 6 % of the largest sum's mean."""
    ratio, generator = 0.8 * 4096, np.random.default_rng(0)
    power = 1.0 - 1.2
    drawn = (1.0 + generator.random((400, int(ranks), int(local))) * (ratio**power - 1.0)) ** (1.0 / power)
    sums = drawn.sum(axis=2)
    largest = float((sums.max(axis=1) / sums.mean(axis=1)).mean())
    _, busiest = power_law_expert_loads(array(1.2), array(ratio), array(ranks), array(local))
    assert busiest[0] == pytest.approx(largest, rel=0.06)


def test_few_experts_of_a_rank_share_its_tokens() -> None:
    """One expert has all of them; of two, the more popular one has more."""
    for local in (1.0, 2.0):
        classes, _ = power_law_expert_loads(array(1.2), array(1000.0), array(64.0), array(local))
        assert len(np.unique(classes.round(9))) == local
        assert classes.mean() == pytest.approx(1.0)


def test_one_token_keeps_at_least_one_expert_of_the_timed_rank_busy() -> None:
    """The rank that is timed has a visit, however many ranks there are."""
    assert experts(tokens=1.0, top_k=1.0, ep=8.0) == pytest.approx(experts(tokens=1.0, top_k=1.0, ep=64.0), rel=1e-6)


#: Latent attention that reaches every rate, starts at once and splits no cache.
IDEAL_LATENT = LatentAttentionParameters(
    launch_time=0.0,
    host_time=0.0,
    efficiency=1.0,
    bandwidth_efficiency=1.0,
    cycles_per_key=0.0,
    block_overhead_cycles=0.0,
    pass_bandwidth_share=np.inf,
    max_splits=1.0,
)


def latent(
    parameters: LatentAttentionParameters, *, batch: float = 64.0, keys: float = 32768.0, rows: float = 64.0
) -> float:
    seconds = latent_attention_time(
        heads=array(16.0), batch=array(batch), queries=array(1.0), keys=array(keys), single=np.array([True]),
        cache_bytes=array(1.0), token_rows=array(rows), device=B200, parameters=parameters,
    )  # fmt: skip
    return float(seconds[0])


def test_a_token_reads_the_latent_cache_once_for_all_heads() -> None:
    seconds = latent(replace(IDEAL_LATENT, efficiency=1e6))
    assert seconds == pytest.approx(64 * 32768 * 576 / B200.memory_bandwidth, rel=0.003)


def test_a_cache_in_one_part_is_walked_by_one_block_whatever_the_sequences() -> None:
    """A100's kernel took 119 ns a key for one sequence as for eight; parts walk side by side."""
    walking = replace(IDEAL_LATENT, efficiency=1e6, bandwidth_efficiency=1e6, cycles_per_key=100.0)
    assert latent(walking, batch=1.0) == pytest.approx(32768 * 100.0 / B200.clock_hz, rel=1e-3)
    assert latent(walking, batch=8.0) == pytest.approx(latent(walking, batch=1.0), rel=1e-3)
    assert latent(replace(walking, max_splits=4.0), batch=1.0) == pytest.approx(
        latent(walking, batch=1.0) / 4, rel=1e-3
    )


def test_releases_with_other_passes_are_stacks() -> None:
    rows = pd.DataFrame(
        {
            "library": ["trtllm", "trtllm", "sglang", "sglang", "vllm"],
            "version": ["1.2.0rc5", "1.3.0rc20", "0.5.9", "0.5.14", "0.14.0"],
            "phase": ["generation", "generation", "context", "context", "context"],
        }
    )
    assert list(LatentAttentionTable().timing_method(rows)) == ["graph/first", "graph", "graph/first", "graph", "graph"]


@pytest.mark.parametrize(
    ("library", "kernel", "scaling", "dtype", "family"),
    [
        ("sglang", "sglang_fused_moe_triton", "", "bf16", "experts.triton-sglang.bf16"),
        ("vllm", "vllm_fused_moe", "", "fp8", "experts.triton-vllm.tensor8"),
        ("vllm", "vllm_fused_moe", "block", "fp8", "experts.triton-vllm.block8"),
        ("trtllm", "moe_torch_flow_min_latency", "block", "fp4", "experts.trtllm.block4"),
        ("trtllm", "moe_torch_flow", "", "fp16", "experts.cutlass.bf16"),
        ("sglang", "sglang_flashinfer_cutlass_moe", "", "bf16", "experts.flashinfer.bf16"),
        ("trtllm", "deepgemm", "block", "fp8", "experts.deepgemm.block8"),
    ],
)
def test_kernels_belong_to_the_family_of_their_library(
    library: str, kernel: str, scaling: str, dtype: str, family: str
) -> None:
    assert family_of(ExpertKernelTable(), library, kernel, scaling, dtype) == family
    assert family in ExpertKernelTable.parameters_by_family


def test_scales_by_tensor_and_by_block_are_families() -> None:
    assert family_of(QuantisedGemmTable(), "trtllm", "torch_flow", "tensor, static", "fp8") == "narrow.tensor8.trtllm"
    assert family_of(QuantisedGemmTable(), "vllm", "vllm_default", "block16", "fp4") == "narrow.block4.vllm"


def release_time(library: str, version: str, device: str = "h100-sxm5-80gb", **changed: float) -> float:
    """Return the predicted seconds of a row of experts."""
    sizes = {"num_tokens": 4096, "hidden_size": 7168, "inter_size": 2048, "topk": 8, "num_experts": 256}
    shape = {**sizes, "moe_tp_size": 1, "moe_ep_size": 16, "gated": 1} | changed
    kernel = {"sglang": "sglang_fused_moe_triton", "vllm": "vllm_fused_moe", "trtllm": "moe_torch_flow_cutlass"}
    words = {"library": library, "version": version, "device": device, "kernel_source": kernel[library]}
    row = pd.DataFrame([{**words, **shape, "dtype": "bf16", "scaling": "", "distribution": "balanced"}])
    figures = device_datasheet(load_device(device), "bf16")
    return float(ExpertKernelTable().predict_times(row, figures, EngineGemmParameters())[0])


def test_a_release_that_multiplies_visits_to_other_ranks_takes_longer_where_a_rank_has_few() -> None:
    """SGLang 0.5.10 multiplies all eight visits of a token; 0.5.9 half a visit of each of 4,096 tokens."""
    assert release_time("sglang", "0.5.10") > 2.0 * release_time("sglang", "0.5.9")
    assert release_time("sglang", "0.5.10", "b200") == release_time("sglang", "0.5.9", "b200")
    whole = {"moe_ep_size": 1.0}
    assert release_time("sglang", "0.5.10", **whole) == pytest.approx(release_time("sglang", "0.5.9", **whole))


def test_passes_run_over_tokens_that_do_not_visit_the_rank_unless_they_are_left_out() -> None:
    assert release_time("sglang", "0.5.14") > 1.2 * release_time("sglang", "0.5.9")


def test_a_release_whose_rows_hold_ten_calls() -> None:
    assert release_time("sglang", "0.5.6.post2") == pytest.approx(10.0 * release_time("sglang", "0.5.14"))


@pytest.mark.parametrize(("experts", "seconds"), [(128.0, 0.0), (256.0, 15e-6 + 40e-12 * 4096 * 256)])
def test_more_than_128_experts_were_routed_by_pytorch(experts: float, seconds: float) -> None:
    early, late = (release_time("trtllm", version, num_experts=experts) for version in ("1.3.0rc10", "1.3.0rc20"))
    assert early - late == pytest.approx(seconds, abs=1e-12)


def test_triton_has_one_tile_where_none_is_tuned() -> None:
    few, many = array(8.0, 512.0), array(16.0, 16.0)
    sglang = expert_gemm_tiles("experts.triton-sglang.bf16", few, many)
    assert all(np.array_equal(np.broadcast_arrays(*tile), [[16.0, 64.0], [32.0, 64.0]]) for tile in sglang)
    assert [tile[0].tolist() for tile in expert_gemm_tiles("experts.triton-vllm.block8", few, many)] == [[16.0, 64.0]]
    assert expert_gemm_tiles("experts.cutlass.bf16", few, many) is GROUPED_GEMM_TILES
    newest = expert_gemm_tiles("experts.triton-vllm.bf16", few, many, 0.0)
    assert [float(np.ravel(rows)[0]) for rows, _ in newest] == [rows for rows, _ in GROUPED_GEMM_TILES]
    assert release_time("vllm", "0.14.0") > release_time("vllm", "0.19.0")


def test_sums_without_vectors_take_longer_where_loads_are_single() -> None:
    """A width of 84 is no multiple of 16; 96 has more arithmetic."""
    shape = {"tokens": 4096.0, "hidden": 4096.0, "top_k": 8.0, "experts": 8.0, "tp": 1.0, "ep": 1.0, "gated": 1.0}
    arrays = {name: np.full(2, value) for name, value in shape.items()}
    single = replace(IDEAL, unaligned_time_ratio=16.0)
    plain, slow = (
        expert_ffn_time(
            **arrays, inner=array(84.0, 96.0), exponent=np.zeros(2), element_bytes=1.0, device=B200, parameters=kernel
        )
        for kernel in (IDEAL, single)
    )
    assert slow[0] > 1.5 * plain[0]
    assert slow[1] == plain[1]


def test_passes_of_tritons_experts_take_the_same_time_on_every_device() -> None:
    """A time for each element of all visits, where other kernels take the time of their bytes."""
    size = {
        "tokens": array(4096.0), "hidden": array(1024.0), "inner": array(512.0), "top_k": array(8.0),
        "experts": array(64.0), "tp": array(1.0), "ep": array(1.0), "gated": array(1.0), "exponent": array(0.0),
        "element_bytes": 2.0,
    }  # fmt: skip
    added = {}
    for name in ("h100-sxm5-80gb", "b200"):
        device = device_datasheet(load_device(name), "bf16")
        for triton in (False, True):
            passes = replace(IDEAL, pass_bandwidth_share=1.0, index_bytes_per_element=4.0, time_per_element=2e-12)
            whole = expert_ffn_time(**size, device=device, parameters=passes, triton=triton)
            without = replace(passes, index_bytes_per_element=0.0, time_per_element=0.0)
            bare = expert_ffn_time(**size, device=device, parameters=without, triton=triton)
            added[name, triton] = float((whole - bare)[0])
    elements = 4096.0 * 8.0 * (1024.0 + 512.0)
    assert added["h100-sxm5-80gb", True] == pytest.approx(2e-12 * elements)
    assert added["b200", True] == pytest.approx(added["h100-sxm5-80gb", True])
    assert added["b200", False] == pytest.approx(4.0 * elements / B200.memory_bandwidth)


def test_visits_are_fitted_for_triton_alone() -> None:
    table, start = ExpertKernelTable(), EngineGemmParameters()
    plans = {
        name: table.fit_settings(FitTarget("b200", f"experts.{name}.bf16", "graph", B200))
        for name in ("cutlass", "triton-vllm")
    }
    assert "time_per_element" in plans["cutlass"].fixed_parameters
    assert "time_per_element" not in plans["triton-vllm"].fixed_parameters
    assert "index_bytes_per_element" in plans["triton-vllm"].fixed_parameters
    assert plans["triton-vllm"].start_values.time_per_element == start.time_per_element
