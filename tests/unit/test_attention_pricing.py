"""Prices of fused attention, against numbers worked by hand and limits that any implementation must keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paleo.errors import SpecError
from paleo.pricing.attention import (
    ATTENTION_KERNELS,
    DRAM_STREAM_START_TIME,
    L2_MISS_STEEPNESS,
    DecodeParameters,
    PrefillParameters,
    attention_backward_time,
    attention_decode_time,
    attention_kernel,
    attention_prefill_time,
    balanced_kv_splits,
    cache_write_time,
    default_attention_kernel,
    device_filling_kv_splits,
    full_wave_kv_splits,
    padded_head_dim,
    tile_shape,
    visited_key_blocks,
)
from paleo.pricing.kernels import DeviceDatasheet
from paleo.pricing.memory import cache_miss_rate
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.step.backend import build_backend
from paleo.tables.kernels import FitTarget
from paleo.tables.kinds._attention import AttentionTable

#: One multiprocessor at 1 GHz with 1024 FLOP per clock and 1 TB/s: times are cycles in nanoseconds.
TINY = DeviceDatasheet("tiny", "Ampere", "HBM2", 1.0, 1e9, 1.024e12, 1e12, 4e7, 100.0, True)
A100 = DeviceDatasheet("a100", "Ampere", "HBM2e", 108.0, 1.41e9, 3.12e14, 2.039e12, 4.2e7, 400.0, True)


def prefill(**changes: Any) -> Any:
    shape: dict[str, Any] = {
        "batch": 2.0,
        "query_heads": 8.0,
        "kv_heads": 8.0,
        "query_length": 512.0,
        "kv_length": 512.0,
        "head_dim": 128.0,
        "causal": True,
        "kernel_name": "fa2",
        "device": A100,
        "parameters": PrefillParameters(),
    }
    return attention_prefill_time(**(shape | changes))


def decode(**changes: Any) -> Any:
    shape: dict[str, Any] = {
        "batch": 4.0,
        "query_heads": 32.0,
        "kv_heads": 8.0,
        "kv_length": 4096.0,
        "head_dim": 128.0,
        "kernel_name": "fa2",
        "device": A100,
        "parameters": DecodeParameters(),
    }
    return attention_decode_time(**(shape | changes))


def test_keys_from_memory_stream_after_a_start():
    """Calls of 1 and 2 GB differ by the bytes over the bandwidth; the rest is launch, start and tiles."""
    free = DecodeParameters(
        launch_time=1e-9, mma_efficiency=1.5, tile_cycles=100.0, norm_order=10.0, cache_write_time=1e-7,
        bandwidth_fraction=0.9, l2_bytes_per_cycle=100.0,
    )  # fmt: skip
    small, large = (float(decode(batch=batch, query_heads=8.0, parameters=free)) for batch in (64.0, 128.0))
    assert large - small == pytest.approx(2 * 64 * 8 * 4096 * 128 * 2 / (0.9 * A100.memory_bandwidth), rel=0.01)
    assert 2 * small - large == pytest.approx(DRAM_STREAM_START_TIME, rel=0.1)


def test_one_tile_is_two_products_exponentials_and_its_start():
    exact = PrefillParameters(
        launch_time=5e-6,
        mma_efficiency=1.0,
        exp_cycles=0.0625,
        tile_cycles=1000.0,
        bandwidth_fraction=0.9,
        norm_order=8.0,
    )
    time = prefill(
        batch=1.0,
        query_heads=1.0,
        kv_heads=1.0,
        query_length=64.0,
        kv_length=128.0,
        causal=False,
        device=TINY,
        parameters=exact,
    )
    # 64 x 128 scores: 4 * 128 / 1024 + 1/16 cycles each = 4608; tile start 1000 at head dimension 128; in all 5608 ns.
    from_l2 = 2 * 128 * 2 * (64 + 128) / (40 * 1e9)  # 40 B per cycle; so few bytes stay in L2
    assert time == pytest.approx(5e-6 + (5.608e-6**8 + from_l2**8) ** 0.125, rel=1e-5)


@pytest.mark.parametrize(
    ("tiles", "tokens", "columns", "kv_length", "blocks"),
    [(4, 64, 128, 256, 1 + 1 + 2 + 2), (2, 128, 128, 256, 1 + 2), (2, 128, 128, 512, 3 + 4), (3, 256, 128, 768, 12)],
)
def test_causal_blocks_are_counted_exactly_on_whole_tiles(
    tiles: float, tokens: float, columns: float, kv_length: float, blocks: float
):
    shape = {"query_tiles": tiles, "tokens_per_tile": tokens, "columns": columns, "query_length": tiles * tokens}
    assert visited_key_blocks(**shape, kv_length=kv_length, causal=True) == blocks
    assert visited_key_blocks(**shape, kv_length=kv_length, causal=False) == tiles * np.ceil(kv_length / columns)


def test_causal_tiles_in_any_order_leave_two_thirds_of_the_longest_idle() -> None:
    """Two tiles of 256 queries in each of 16 heads on 8 multiprocessors, of 2 and 4 blocks of 128 keys: 12 blocks each,
    and two thirds of 4 more where long tiles start last. A block of 256 x 128 scores takes 512 / 1024 + 1 / 16 cycles
    a score."""
    exact = PrefillParameters(
        launch_time=1e-12, mma_efficiency=1.0, exp_cycles=0.0625, tile_cycles=10.0, wave_quantization=2 / 3,
        bandwidth_fraction=0.96, norm_order=8.0, l2_bytes_per_cycle=100.0,
    )  # fmt: skip
    eight = replace(TINY, multiprocessors=8.0, peak_flops_per_s=8 * TINY.peak_flops_per_s / TINY.multiprocessors)
    time = prefill(
        batch=1.0, query_heads=16.0, kv_heads=16.0, kernel_name="trtllm", device=eight, parameters=exact,
    )  # fmt: skip
    block = 256 * 128 * (512 / 1024 + 1 / 16) / TINY.clock_hz
    assert time == pytest.approx((12 + 4 * 2 / 3) * block, rel=0.02)


def test_a_sliding_window_makes_long_causal_attention_linear():
    short, long = (
        prefill(query_length=32768.0, kv_length=32768.0, window=1024.0),
        prefill(query_length=65536.0, kv_length=65536.0, window=1024.0),
    )
    assert long / short == pytest.approx(2.0, rel=0.05)
    assert prefill(window=1e9) == pytest.approx(prefill())


def test_long_causal_attention_is_half_of_the_full_one():
    size = {"query_length": 32768.0, "kv_length": 32768.0}
    assert prefill(**size) / prefill(**size, causal=False) == pytest.approx(0.5, rel=0.02)


def test_backward_has_five_products_for_two():
    size = {"query_length": 32768.0, "kv_length": 32768.0}
    no_exp = replace(
        PrefillParameters(),
        exp_cycles=0.005,
        tile_cycles=100.0,
        norm_order=8.0,
        backward_efficiency=1.0,
        energy_per_flop=0.1,
    )
    shape: dict[str, Any] = dict(
        batch=2.0,
        query_heads=8.0,
        kv_heads=8.0,
        head_dim=128.0,
        causal=True,
        kernel_name="fa2",
        device=A100,
        parameters=no_exp,
        **size,
    )
    assert attention_backward_time(**shape) / attention_prefill_time(**shape) == pytest.approx(2.5, rel=0.02)


def test_time_grows_with_every_size():
    for name in ("batch", "query_length", "kv_length"):
        sizes = np.array([1.0, 2.0, 3.0, 8.0]) * {"batch": 1.0}.get(name, 256.0)
        times = prefill(**{name: sizes}, causal=False)
        assert (np.diff(times) >= 0).all(), name
    assert (np.diff(decode(kv_length=np.array([128.0, 1024.0, 65536.0, 1e6]))) > 0).all()


def test_arrays_price_as_their_scalars_do():
    lengths = np.array([16.0, 300.0, 4096.0])
    assert prefill(query_length=lengths, kv_length=lengths) == pytest.approx(
        [float(prefill(query_length=one, kv_length=one)) for one in lengths]
    )
    for name in ATTENTION_KERNELS:
        assert decode(kv_length=lengths, kernel_name=name) == pytest.approx(
            [float(decode(kv_length=one, kernel_name=name)) for one in lengths]
        )


def test_heads_that_share_keys_are_free_in_decode_until_the_tile_is_full():
    times = decode(query_heads=np.array([16.0, 64.0, 512.0]), kernel_name="fa3", kv_length=1e5)
    assert times[1] / times[0] == pytest.approx(1.0, rel=0.02)
    assert times[2] / times[0] == pytest.approx(1.0, rel=0.2)


def test_long_decode_streams_the_keys_at_the_achieved_bandwidth():
    keys = 2 * 64 * 8 * 65536.0 * 128 * 2
    time = decode(batch=64.0, kv_length=65536.0, kernel_name="fa3", parameters=DecodeParameters(norm_order=10.0))
    assert time >= keys / (0.9 * A100.memory_bandwidth)
    assert time <= 1.3 * keys / (0.9 * A100.memory_bandwidth)


def test_more_bandwidth_helps_decode_and_leaves_long_prefill():
    faster = replace(A100, memory_bandwidth=2 * A100.memory_bandwidth)
    assert decode(batch=64.0, kv_length=65536.0, device=faster) < 0.8 * decode(batch=64.0, kv_length=65536.0)
    size = {"query_length": 16384.0, "kv_length": 16384.0}
    assert prefill(**size, device=faster) > 0.97 * prefill(**size)


def test_splits_follow_the_published_rules():
    assert (
        balanced_kv_splits(tiles=8.0, blocks=64.0, multiprocessors=132, most=32) == 13
    )  # ceil(8 * 64 * 1.1 / 132) = 5
    assert balanced_kv_splits(tiles=1000.0, blocks=64.0, multiprocessors=132, most=32) == 1
    assert full_wave_kv_splits(tiles=216.0, blocks=64.0, slots=216) == 1  # the waves are full as it is
    # 2 tiles on 216 slots: 108 splits fill the wave; 94 is the first above 85 % that shortens the longest part.
    assert full_wave_kv_splits(tiles=2.0, blocks=1024.0, slots=216) == 94
    assert full_wave_kv_splits(tiles=1.0, blocks=3.0, slots=216) == 3
    assert device_filling_kv_splits(tiles=10.0, blocks=64.0, multiprocessors=148) == 14  # 140 of 148 multiprocessors
    assert device_filling_kv_splits(tiles=200.0, blocks=64.0, multiprocessors=148) == 1


def test_captured_splits_cost_a_short_sequence_what_filling_ones_do_not():
    """A graph of FlashAttention-4 merges 32 parts of each sequence; trtllm-gen merges none of one block of keys."""
    short = {
        "batch": 512.0,
        "kv_length": 128.0,
        "query_heads": 8.0,
        "parameters": DecodeParameters(combine_time_per_split=1e-7),
    }
    assert decode(**short, kernel_name="fa4") > 1.5 * decode(**short, kernel_name="trtllm")


def test_the_limit_of_power_slows_long_attention_alone():
    size = {"query_length": 16384.0, "kv_length": 16384.0}
    hungry = replace(PrefillParameters(), energy_per_flop=3.0)
    assert prefill(**size, parameters=hungry) > 1.3 * prefill(**size)
    assert prefill(query_length=64.0, kv_length=64.0, parameters=hungry) == pytest.approx(
        prefill(query_length=64.0, kv_length=64.0), rel=0.02
    )
    assert prefill(**size, sustained=1.0, activity=3.0) > prefill(**size, sustained=1.0)


def test_backward_runs_at_its_own_rate():
    size: dict[str, Any] = {
        "batch": 2.0, "query_heads": 8.0, "kv_heads": 8.0, "query_length": 32768.0, "kv_length": 32768.0,
        "head_dim": 128.0, "causal": True, "kernel_name": "fa3", "device": A100,
    }  # fmt: skip
    lean = PrefillParameters(exp_cycles=0.005, energy_per_flop=0.1, tile_cycles=100.0)
    slow, fast = (
        attention_backward_time(**size, parameters=replace(lean, backward_efficiency=rate)) for rate in (0.5, 1.0)
    )
    assert slow / fast == pytest.approx(2.0, rel=0.05)


def test_cache_write_is_bound_by_resident_blocks_then_by_bytes():
    write = {"head_dim": 128.0, "element_bytes": 2.0, "write_latency": 4e-6, "bandwidth": 1e15, "device": TINY}
    assert cache_write_time(tokens=4.0, kv_heads=4.0, **write) == pytest.approx(4e-6)  # 4 blocks of 512 of 2048 threads
    assert cache_write_time(tokens=4.0, kv_heads=1.0, **write) == pytest.approx(1e-6)
    streamed = cache_write_time(tokens=4.0, kv_heads=4.0, **(write | {"bandwidth": 1e6}))
    assert streamed == pytest.approx(4 * 4 * 4 * 128 * 2 / 1e6, rel=1e-6)


def test_tables_of_shapes():
    assert [float(size) for size in tile_shape(ATTENTION_KERNELS["fa3"].tiles, 64.0)] == [192.0, 128.0]
    assert padded_head_dim(80.0) == 96
    assert cache_miss_rate(0.0, 1.0, L2_MISS_STEEPNESS) < 1e-6 < 0.5 == cache_miss_rate(1.0, 1.0, L2_MISS_STEEPNESS)
    assert default_attention_kernel("Turing") == default_attention_kernel("Blackwell", "GDDR7") == "fa2"


def test_unknown_kernel_names_the_nearest():
    with pytest.raises(SpecError, match="fa2"):
        attention_kernel("fa-2")


def table(**columns: Any) -> pd.DataFrame:
    row = {
        "source": "aiconfigurator",
        "device": "h100-sxm5-80gb",
        "library": "vLLM vllm_flash_attn_fa3",
        "dtype": "bf16",
        "phase": "context",
        "batch": 1,
        "q_heads": 8,
        "kv_heads": 2,
        "q_len": 128,
        "kv_len": 128,
        "head_dim": 128,
        "causal": True,
        "time_us": 20.0,
    }
    return pd.DataFrame([row | columns])


@pytest.mark.parametrize(
    ("columns", "family"),
    [
        ({}, "attention.fa3.prefill"),
        ({"q_len": 1, "kv_len": 1}, "attention.fa3.decode"),
        ({"phase": "encoder", "causal": False}, "attention.fa3.encoder"),
        ({"phase": "generation", "q_len": 1}, "attention.fa3.decode"),
        ({"library": "vLLM 0.14.0 vllm_flash_attn", "device": "a100-sxm4-80gb"}, "attention.fa2.prefill"),
        ({"library": "vLLM 0.24.0 vllm_flash_attn_fa4"}, "attention.fa4.prefill"),
        ({"library": "vLLM vllm_flashinfer_trtllmdecode", "device": "b200", "q_len": 1}, "attention.trtllm.decode"),
        ({"library": "vLLM vllm_flash_attn", "device": "h200-sxm"}, "attention.fa3.prefill"),
    ],
)
def test_family_of_a_row(columns: dict[str, Any], family: str):
    assert AttentionTable().kernel_family(table(**columns)).item() == family


def test_work_of_a_causal_row_counts_the_lower_triangle():
    flops, moved = AttentionTable().flops_and_bytes(table())
    assert flops.item() == 4 * 8 * 128 * (128 - 127 / 2) * 128
    assert moved.item() == 2 * 128 * (2 * 8 * 128 + 2 * 2 * 128)


def test_rows_without_a_model_say_why():
    kind = AttentionTable()
    assert kind.unsupported_reasons(table()).item() == ""
    assert kind.unsupported_reasons(table(phase="training")).item() == "unknown phase"
    assert kind.unsupported_reasons(table(dtype="fp4")).item() == "unknown dtype"
    assert "size" in kind.unsupported_reasons(table(batch=0)).item()


def test_the_kind_prices_with_the_parameters_of_the_phase():
    kind = AttentionTable()
    assert kind.predict_times(table(), A100, PrefillParameters()).item() > PrefillParameters().launch_time
    rows = table(phase="generation", q_len=1, kv_len=4096)
    assert kind.predict_times(rows, A100, DecodeParameters()).item() > DecodeParameters().launch_time
    for family, parameters in kind.parameters_by_family.items():
        plan = kind.fit_settings(FitTarget("a100", family, "graph", A100))
        assert isinstance(plan.start_values, parameters)
        assert set(plan.fixed_parameters) <= set(parameters.__dataclass_fields__)


def test_prefill_takes_from_decode_what_its_rows_do_not_tell():
    decode = DecodeParameters(l2_survival_share=0.77, l2_bytes_per_cycle=12.0)
    known = {("a100", "attention.fa2.decode", "graph"): decode}
    plan = AttentionTable().fit_settings(FitTarget("a100", "attention.fa2.prefill", "graph", A100, known))
    assert (plan.start_values.l2_survival_share, plan.start_values.l2_bytes_per_cycle) == (0.77, 12.0)
    assert {"l2_survival_share", "l2_bytes_per_cycle"} & {
        *plan.fixed_parameters
    } == set()  # not fitted as a rule, so not listed


@pytest.mark.parametrize(("formula", "products", "published"), [("forward", 2, 335e12), ("backward", 5, 322e12)])
def test_flash_attention_2_on_hopper_runs_as_published(formula: str, products: int, published: float) -> None:
    """FLOP/s of causal attention, head dimension 128, 16k tokens on H100 SXM: Shah et al., FlashAttention-3 (2024),
    figures 5 and 6, read off their text."""
    run = Run(gpus=1, software="torchtitan", dtype="bf16")
    families = build_backend(load_system("h100-sxm5-80gb"), run, "bf16").predictor
    price = attention_prefill_time if formula == "forward" else attention_backward_time
    seconds = price(
        batch=1, query_heads=16, kv_heads=16, query_length=2**14, kv_length=2**14, head_dim=128, causal=True,
        kernel_name="fa2", device=families.datasheet(),
        parameters=families.parameters_of(PrefillParameters, "attention.fa2.prefill").parameters,
    )  # fmt: skip
    flops = products * 2 * 16 * 2**28 * 128 / 2
    assert flops / float(seconds) == pytest.approx(published, rel=0.05)
