"""Matrix products: limits worked by hand, the table kind, and measured rows against their calibration."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

from paleo.errors import SpecError
from paleo.operations.base import Kernel
from paleo.pricing.calibration_lookup import find_calibrated_parameters
from paleo.pricing.engine_gemm import wave_count
from paleo.pricing.gemm import (
    GemmParameters,
    cache_miss_rate,
    gemm_time,
    kernel_choice_odds,
    quantisation_time,
    transposed_operand_read_time,
    unaligned_batched_gemm_time,
    unaligned_gemm_time,
)
from paleo.pricing.kernels import (
    DeviceDatasheet,
    KernelFamilyPredictor,
    arithmetic_unit,
    datasheet_clock,
    device_datasheet,
)
from paleo.pricing.power import power_slowdown, throttle_factor
from paleo.specs.catalog import entry_names
from paleo.specs.device import load_device
from paleo.specs.software import load_software
from paleo.tables.cells import number_column, read_table
from paleo.tables.kernels import KERNEL_TABLES, best_constant_roofline_efficiency, group_rows_for_prediction
from paleo.tables.kinds._gemm import GemmTable
from paleo.tables.run_tables import find_table_kind
from paleo.units import GIGA, MEGA, MICROSECOND, MILLISECOND, TERA

DEVICE = DeviceDatasheet("d", "Ampere", "HBM2e", 100, GIGA, 200 * TERA, 2 * TERA, 40 * MEGA, math.inf, True)
#: Hardly any overhead: launch, fill, spread, epilogue and split near zero, perfect rates.
BARE = GemmParameters(
    launch_time=0.5 * MICROSECOND, efficiency=1.0, bandwidth_efficiency=1.0, l2_rate=0.2, wave_quantisation=1.0,
    epilogue_cycles=50.0,
    dram_latency_cycles=20.0, block_start_cycles=10.0, energy_per_flop=0.1, page_stall_ratio=0.01,
)  # fmt: skip


def time(
    m: float, n: float, k: float, p: GemmParameters = BARE, device: DeviceDatasheet = DEVICE, **more: float
) -> float:
    shape = {"m": m, "n": n, "k": k, "element_bytes": 2.0, "result_bytes": 2.0} | more
    return float(gemm_time(**shape, device=device, parameters=p))


def test_full_waves_run_at_peak() -> None:
    # 10 x 10 tiles of 256 x 128 on 100 multiprocessors, one full wave:
    # 2·2560·1280·65536 FLOP at 200 TFLOP/s = 2.1475 ms
    assert time(2560, 1280, 65536) == pytest.approx(2.1475 * MILLISECOND, rel=0.02)


def test_one_more_tile_costs_a_whole_wave_only_when_waves_are_rounded() -> None:
    whole, more = time(2560, 1280, 8192), time(2561, 1280, 8192)
    balanced = dataclasses.replace(BARE, wave_quantisation=0.02)
    assert more / whole > 1.2
    assert time(2561, 1280, 8192, balanced) / time(2560, 1280, 8192, balanced) < 1.2


def test_thin_products_run_at_memory_bandwidth() -> None:
    # B is 65536 x 8192 x 2 B = 1.0737 GB at 2 TB/s = 537 us, always from DRAM; tiles of 64 rows add their share
    assert 537 < time(16, 65536, 8192, weight_copies=math.inf) / MICROSECOND < 1.1 * 537


def test_the_latency_of_dram_is_paid_where_dram_is_read() -> None:
    slow = dataclasses.replace(BARE, dram_latency_cycles=1000.0)  # 1000 cycles at 1 GHz
    shape = {"m": 16, "n": 4096, "k": 1024, "device": dataclasses.replace(DEVICE, l2_bytes=80 * MEGA)}
    cold, warm = (time(**shape, p=slow, weight_copies=c) - time(**shape, weight_copies=c) for c in (math.inf, 1.0))
    share = 4096 * 1024 / (4096 * 1024 + 16 * (4096 + 1024))
    assert cold == pytest.approx(share * 0.98 * MICROSECOND) and warm < 0.01 * MICROSECOND


def test_products_of_few_columns_have_narrow_tiles() -> None:
    """100 tiles of 128 x 32 fill the device once, and so do 100 tiles of 128 x 64, which take twice as long."""
    small, cached = dataclasses.replace(BARE, min_tile_area=500.0), dataclasses.replace(DEVICE, l2_bytes=4000 * MEGA)
    narrow, wide = (time(12800, n, 8192, small, cached) - BARE.launch_time for n in (32, 64))
    assert narrow / wide == pytest.approx(0.5, abs=0.15)


def test_blocks_take_their_time_to_spread_over_the_device() -> None:
    """100 multiprocessors at 1 GHz: 1000 cycles for a hundred blocks or more, a tenth of it for ten."""
    slow = dataclasses.replace(BARE, block_start_cycles=1010.0)

    def extra(m: float) -> float:  # batched products are not split
        return time(m, 32, 64, slow, batch=10.0) - time(m, 32, 64, batch=10.0)

    assert extra(32) == pytest.approx(0.1 * MICROSECOND, rel=0.02)
    assert extra(64 * 100) == pytest.approx(MICROSECOND, rel=0.02)


def test_a_short_sum_takes_half_a_step_before_the_tensor_memory_accelerator() -> None:
    hopper = dataclasses.replace(DEVICE, architecture="Hopper")
    shape = (12800, 12800)
    assert time(*shape, 64) == time(*shape, 64, device=hopper)
    assert time(*shape, 32) < time(*shape, 32, device=hopper)


def test_a_reduction_over_a_cluster_has_no_more_than_sixteen_parts() -> None:
    """One tile of 65536 summands: 4096 of them in each of sixteen parts; parts are summed up one after the other."""
    hopper = dataclasses.replace(DEVICE, architecture="Hopper")
    slow = dataclasses.replace(BARE, min_tile_area=128 * 128.0, split_time=0.2 * MICROSECOND)
    by_hand = 65536 / 16 * 2 * 128 * 128 / (DEVICE.flops_per_clock * DEVICE.clock_hz)
    assert time(64, 32, 65536, slow, hopper) == pytest.approx(by_hand, rel=0.1)
    assert time(64, 32, 65536, slow) < 0.3 * by_hand
    serial = dataclasses.replace(slow, time_per_split=MICROSECOND)
    assert time(64, 32, 65536, serial, hopper) - time(64, 32, 65536, slow, hopper) == pytest.approx(
        16 * MICROSECOND, rel=0.05
    )


def test_libraries_take_likely_kernels_not_the_fastest() -> None:
    """Two kernels as fast as each other are as likely; one that takes a tenth longer is taken once in five times."""
    shares = kernel_choice_odds(np.array([1.0, 1.1]), np.array(1.0))
    assert float(shares[1] / shares.sum()) == pytest.approx(1 / (1 + 1.1**16))


def test_what_fits_the_cache_is_not_read_from_dram() -> None:
    large = dataclasses.replace(DEVICE, l2_bytes=400 * MEGA)
    cold, warm = (time(64, 16384, 1024, device=large, weight_copies=copies) for copies in (math.inf, 1.0))
    assert cold - BARE.launch_time > 16.8 * MICROSECOND  # B is 33.6 MB at 2 TB/s
    assert warm < 0.85 * cold


def test_a_long_reduction_into_one_tile_is_split() -> None:
    unsplit = time(128, 128, 65536, batch=2.0) - BARE.launch_time
    assert time(128, 128, 65536) - BARE.launch_time < 0.3 * unsplit


def test_the_power_limit_slows_long_kernels_only() -> None:
    hungry = dataclasses.replace(BARE, energy_per_flop=4.0)  # 200 TFLOP/s x 4 pJ = 800 W at full clock
    limited = dataclasses.replace(DEVICE, power_watts=400.0)
    short, long = ((256, 256, 512), (2560, 12800, 65536))
    assert time(*short, hungry, limited) == pytest.approx(time(*short, hungry), rel=0.02)
    # limit 340 W less memory; 800 / 335 = 2.4
    assert time(*long, hungry, limited, sustained=1.0) / time(*long, hungry) == pytest.approx(2.35, abs=0.12)
    assert time(*short, hungry, limited, sustained=1.0) >= time(*short, hungry, limited)
    assert time(*long, hungry, limited, activity=0.2) == pytest.approx(time(*long, hungry), rel=0.02)


def test_scalars_equal_arrays_and_broadcast() -> None:
    m = np.array([1.0, 100.0, 5000.0])[:, None]
    n = np.array([32.0, 4096.0])
    table = gemm_time(m=m, n=n, k=512, element_bytes=2, result_bytes=2, device=DEVICE, parameters=GemmParameters())
    assert table.shape == (3, 2)
    for row, column in np.ndindex(3, 2):
        assert table[row, column] == pytest.approx(time(float(m[row, 0]), float(n[column]), 512, GemmParameters()))


def test_never_faster_than_the_roofline() -> None:
    random = np.random.default_rng(0)
    m, n, k = np.rint(2 ** random.uniform(0, 14, (3, 2000)))
    p = dataclasses.replace(GemmParameters(), efficiency=1.0, bandwidth_efficiency=1.0)
    seconds = gemm_time(m=m, n=n, k=k, element_bytes=2, result_bytes=2, device=DEVICE, parameters=p)
    assert (seconds >= 2 * m * n * k / DEVICE.peak_flops_per_s).all()
    assert np.isfinite(seconds).all() and (seconds > p.launch_time).all()


@pytest.mark.parametrize("name", ["m", "n", "k", "batch"])
def test_more_work_takes_longer_by_and_large(name: str) -> None:
    def seconds(m: float = 512.0, n: float = 512.0, k: float = 512.0, batch: float = 2.0) -> float:
        return time(m, n, k, batch=batch)

    assert seconds(**{name: 8 * (2.0 if name == "batch" else 512.0)}) > seconds()


def test_sub_functions() -> None:
    assert wave_count(np.array([101.0]), 100.0, 1.0)[0] == 2.0
    assert cache_miss_rate(np.array([math.inf]), 1.0)[0] == 1.0
    assert throttle_factor(np.array([0.1]), np.array([1.0]))[0] == pytest.approx(1.0, abs=0.001)
    # 1 G elements of 2 B read twice and written once as 1 B: 5 GB at 2 TB/s
    quantise = quantisation_time(
        elements=GIGA, source_bytes=2.0, target_bytes=1.0, device=DEVICE, bandwidth_efficiency=1.0, capacity=MEGA
    )
    assert float(quantise) == pytest.approx(2.5 * MILLISECOND)


def test_heat_by_hand() -> None:
    """200 W: 30 W idle and 20 W for 0.5 GB of memory traffic a millisecond leave 150 W; 600 W of arithmetic take the
    clock to a quarter (but for the soft knee), 37.5 W leave it."""
    device = dataclasses.replace(DEVICE, power_watts=200.0)
    work = {"busy": np.full(2, MILLISECOND), "dram": np.full(2, 0.5 * GIGA), "device": device}
    flops = np.array([0.6, 0.0375]) * TERA
    assert power_slowdown(flops=flops, energy=1.0, **work) == pytest.approx([4.0, 1.0], rel=0.002)
    assert power_slowdown(flops=flops / 2, energy=1.0, activity=2.0, **work) == pytest.approx([4.0, 1.0], rel=0.002)


def test_a_lone_block_waits_for_its_reads() -> None:
    """One tile of 32 rows and columns sums up 65,536 numbers of 2 bytes, which no split divides: 20 cycles each at
    1 GHz are 1.31 ms, whatever the arithmetic; numbers of one byte take half. A full device computes for longer."""
    still = dataclasses.replace(BARE, cycles_per_summed_element=20.0, split_time=1.0)
    waiting = 65536 * 20 / GIGA
    assert time(32, 32, 65536, still) == pytest.approx(waiting, rel=0.01)
    assert time(32, 32, 65536, still, element_bytes=1.0) == pytest.approx(waiting / 2, rel=0.02)
    assert time(2560, 1280, 65536, still) < 1.05 * time(2560, 1280, 65536)


def test_few_rows_pay_for_a_wide_tile_where_the_library_has_no_narrow_one() -> None:
    """Ordinary cores of 200 TFLOP/s: 2·16·12800·4096 FLOP as tiles of 128 rows are 8 times as many, 67 us; 32 rows take
    tiles of 32, a quarter of that; products of a batch have kernels of their own."""
    ordinary = dataclasses.replace(DEVICE, tensor_cores=False, memory_bandwidth=20 * TERA)
    wide = dataclasses.replace(BARE, min_tile_area=500.0, min_narrow_tile_rows=32.0)
    padded = 2 * 128 * 12800 * 4096 / (200 * TERA)
    assert time(16, 12800, 4096, wide, ordinary) == pytest.approx(padded, rel=0.1)
    assert time(16, 12800, 4096, wide, ordinary, k_contiguous=0.5) == pytest.approx(padded / 2, rel=0.1)
    assert time(32, 12800, 4096, wide, ordinary) < 0.5 * padded
    assert time(16, 12800, 4096, wide, ordinary, batch=2.0) < padded


def test_results_survive_in_less_of_the_cache_than_operands() -> None:
    """A cache of 40 MB that keeps all it has: of 34 MB of results, which have 30 MB, 0.88 go to memory of 2 TB/s (the
    16th power of 34/30, over itself and one); of 34 MB of operands it keeps most."""
    share = dataclasses.replace(BARE, l2_survival_share=1.0)
    assert time(2048, 8192, 16, share) > 0.85 * 33.5 * MEGA / (2 * TERA)
    assert time(2048, 16, 8192, share) < 0.7 * time(2048, 8192, 16, share)


def test_a_cut_rate_leaves_the_paths_and_what_runs_beside_it() -> None:
    """A quarter of the rate on the same silicon: an L2 of 0.002 elements of 2 bytes a FLOP of 200 TFLOP/s still gives
    800 GB/s, a B of 1.0737 GB in 1.34 ms. Of 850 W that are left 450 go to whatever runs, four times as long a FLOP:
    (400 + 4 · 450) / 850 of the energy."""
    cut = dataclasses.replace(DEVICE, peak_flops_per_s=50 * TERA, uncapped_rate_ratio=4.0)
    thin = dataclasses.replace(BARE, l2_rate=0.002, min_tile_area=500.0)
    assert 1.34 < time(32, 65536, 8192, thin, cut) / MILLISECOND < 2.0
    assert time(32, 65536, 8192, thin, dataclasses.replace(cut, uncapped_rate_ratio=1.0)) > 4 * 1.34 * MILLISECOND
    work = {"busy": 1.0, "flops": 4000 * TERA, "dram": 0.0, "energy": 1.0}
    hot = dataclasses.replace(cut, power_watts=1e3)
    assert float(power_slowdown(device=hot, **work)) == pytest.approx(4000 * 2.2 / 0.85 / 850, rel=0.001)


def test_ordinary_cores_draw_by_time_whatever_they_reach() -> None:
    """0.45 of 0.85 of the energy goes with time: at a tenth of 1,000 TFLOP/s (0.9 · 0.45 / 0.85 + 0.1) of 1,000 W meet
    85 W; tensor cores, which draw by FLOP, meet them with 100 W."""
    work = {"busy": 1.0, "flops": 100 * TERA, "dram": 0.0, "energy": 1.0}
    card = dataclasses.replace(DEVICE, peak_flops_per_s=1000 * TERA, power_watts=100.0)
    cards = (dataclasses.replace(card, tensor_cores=unit) for unit in (False, True))
    ordinary, tensor = (float(power_slowdown(device=each, **work)) for each in cards)
    by_time = 0.45 / 0.85
    assert ordinary == pytest.approx(1000 * (0.9 * by_time + 0.1) / 85, rel=0.001)
    assert tensor == pytest.approx((1 + (100 / 85) ** 4) ** 0.25, rel=1e-6)


def test_rates_that_makers_cut() -> None:
    cards = ("rtx-3090", "rtx-4090", "rtx-5090", "h20", "h100-sxm5-80gb", "b300", "l40s", "t4", "mi300x")
    assert [device_datasheet(load_device(name), "fp16").uncapped_rate_ratio for name in cards] == [2.0] * 3 + [4.0] + [
        1.0
    ] * 5
    assert (
        device_datasheet(load_device("rtx-4090"), "int8").uncapped_rate_ratio == 1.0
    )  # integers run at the full rate there
    assert device_datasheet(load_device("rtx-4090"), "fp32").uncapped_rate_ratio == 1.0  # ordinary cores


def test_products_of_every_card_lie_in_a_band() -> None:
    """Sixteen bits under long load: large products above 0.3 of the peak (T4 and L4 are held by their 70 W), weights of
    128 MiB against 16 and 128 rows above 0.45 of what memory allows, and none above what arithmetic or memory allow."""
    cards = [card for card in map(load_device, entry_names("devices")) if card.kind == "gpu" and card.has_tensor_cores]
    assert len(cards) > 40
    rows, side = np.array([8192.0, 128.0, 16.0]), 8192.0
    flops, moved = 2 * rows * side**2, 2 * (2 * rows * side + side**2)
    for card in cards:
        limits = device_datasheet(card, card.training_dtype)
        entry = find_calibrated_parameters(
            GemmParameters, subject=card.name, architecture=card.architecture, memory_kind=card.memory.kind,
            family="gemm.tensor",
        )  # fmt: skip
        seconds = gemm_time(
            m=rows, n=side, k=side, element_bytes=2.0, result_bytes=2.0, weight_copies=math.inf, sustained=1.0,
            activity=entry.parameters.training_energy_ratio, device=limits, parameters=entry.parameters,
        )  # fmt: skip
        reached = np.maximum(flops / limits.peak_flops_per_s, moved / limits.memory_bandwidth) / seconds
        assert (reached > [0.3, 0.45, 0.45]).all() and (reached < 0.97).all(), (card.name, reached)


def test_figures_of_a_device() -> None:
    a100, p100 = load_device("a100-sxm4-80gb"), load_device("p100-pcie-16gb")
    assert device_datasheet(a100, "tf32").peak_flops_per_s == 156 * TERA
    assert device_datasheet(a100, "fp16", "fp32").peak_flops_per_s == 19.5 * TERA
    assert device_datasheet(p100, "fp16").peak_flops_per_s == 18.68 * TERA
    assert arithmetic_unit(p100, "fp16") == "vector"
    assert datasheet_clock(load_device("gb300")) == pytest.approx(2.06 * GIGA, rel=0.01)
    h100, mi300x = load_device("h100-sxm5-80gb"), load_device("mi300x")
    assert device_datasheet(h100, "bf16").peak_flops_per_s == 4096 * 132 * 1.98 * GIGA  # 989 TFLOP/s are at 1.83 GHz
    assert device_datasheet(mi300x, "bf16").peak_flops_per_s == mi300x.peak["bf16"]
    with pytest.raises(SpecError, match="no peak for dtype 'fp8'"):
        device_datasheet(a100, "fp8")
    with pytest.raises(SpecError, match="compute 'tensr' is unknown"):
        device_datasheet(a100, "bf16", "tensr")


ROWS = pd.DataFrame(
    {
        "source": ["aiconfigurator", "neusight", "neusight", "deepbench", "vidur", "elsewhere"],
        "device": [
            "h100-sxm5-80gb", "a100-pcie-40gb", "a100-pcie-40gb", "v100-sxm2-16gb", "a100-sxm4-80gb", "h100-sxm5-80gb",
        ],
        "library": ["", "eager torch.bmm", "eager nn.Linear", "", "", ""],
        "dtype": ["bf16", "fp32", "fp32", "fp16", "fp16", "int4"],
        "compute": ["", "", "", "tensor", "", ""],
        "m": [4096, 64, 64, 1760, 128, 1], "n": [4096, 64, 64, 128, 4096, 1], "k": [4096, 64, 64, 1760, 4096, 1],
        "batch": [1, 64, 1, 1, 1, 1], "time_us": [200.0, 30.0, 40.0, 20.0, 30.0, 1.0],
    }
)  # fmt: skip


def test_kind_of_table_and_its_keys() -> None:
    kind = KERNEL_TABLES["gemm"]
    assert find_table_kind(ROWS.columns).name == "gemm"
    assert list(kind.timing_method(ROWS)) == [
        "graph",
        "eager",
        "eager/linear",
        "back-to-back",
        "kernel",
        "back-to-back",
    ]
    assert list(kind.kernel_family(ROWS))[:5] == ["gemm.tensor", "gemm.simt", "gemm.simt", "gemm.tensor", "gemm.tensor"]
    assert list(kind.unsupported_reasons(ROWS))[:5] == [""] * 5
    assert "int4" in kind.unsupported_reasons(ROWS).iloc[5]
    flops, moved = kind.flops_and_bytes(ROWS)
    assert flops[1] == 2 * 64**4 and moved[1] == 64 * 3 * 64 * 64 * 4
    assert sum(len(group.frame) for group in group_rows_for_prediction(kind, ROWS)) == 5
    with pytest.raises(SpecError, match="the nearest"):
        find_table_kind(["m", "n", "k", "spam"])


def test_integers_have_a_family_of_their_own_and_results_of_four_bytes() -> None:
    kind, row = KERNEL_TABLES["gemm"], ROWS.iloc[[0]].assign(dtype="int8", device="titan-x-pascal", source="deepbench")
    assert list(kind.unsupported_reasons(row)) == [""] and list(kind.kernel_family(row)) == ["gemm.int8"]
    _, moved = kind.flops_and_bytes(row)
    assert moved[0] == 4096**2 * (1 + 1 + 4)
    figures = kind.load_datasheet("titan-x-pascal", "int8", "")
    assert kind.start_values("gemm.int8", figures)[0].energy_per_flop == 14.0 / 4  # four products an fp32 lane (dp4a)


def test_replayed_layers_take_turns_until_they_overflow_the_cache() -> None:
    """L40S keeps 96 MiB: three matrices of 32 MiB are read from L2, three of 42 MiB from memory."""
    kind, parameters = KERNEL_TABLES["gemm"], GemmParameters(l2_survival_share=1.1)
    rows = pd.concat([ROWS.iloc[[0]]] * 2, ignore_index=True).assign(device="l40s", m=1, n=[8192, 10752], k=2048)
    fits, streams = kind.predict_times(rows, kind.load_datasheet("l40s", "bf16", ""), parameters)
    assert streams / 42 > 1.4 * fits / 32


def test_transposed_operands_open_a_page_a_row() -> None:
    """64 MB of B, read twice by 2 x 40 blocks on 20 multiprocessors, at a tenth of 400 GB/s: 3.28 ms; half where rows
    are a power of two apart; nothing where an operand does not lie along the sum, or the memory does not mind."""
    graphics = dataclasses.replace(DEVICE, memory_kind="GDDR5X", tensor_cores=False, multiprocessors=20.0)
    graphics = dataclasses.replace(graphics, memory_bandwidth=400 * GIGA, l2_bytes=3 * MEGA)
    m, n, one, k = 256.0, 40 * 128.0, np.array(1.0), 3200.0
    seconds = transposed_operand_read_time(m * one, n * one, k * one, one, 4 * one, 0.1, graphics)
    assert float(seconds) == pytest.approx(2 * n * k * 4 / 40e9)
    assert float(
        transposed_operand_read_time(m * one, n * one, 4096 * one, one, 4 * one, 0.1, graphics)
    ) == pytest.approx(n * 4096 * 4 / 40e9)
    batched = transposed_operand_read_time(m * one, n * one, k * one, 64 * one, 4 * one, 0.1, graphics)
    assert float(batched) == pytest.approx(64 * float(seconds))
    slow, plain = dataclasses.replace(BARE, scattered_read_efficiency=0.1), {"element_bytes": 4.0, "result_bytes": 4.0}
    transposed = time(m, n, k, slow, graphics, **plain)
    assert transposed == pytest.approx(float(seconds), rel=0.02)
    for other in (
        time(m, n, k, slow, graphics, k_contiguous=0.5, **plain),
        time(m, n, k, BARE, graphics, **plain),
        time(m, n, k, slow, dataclasses.replace(graphics, tensor_cores=True), **plain),
    ):
        assert other < 0.2 * transposed


def test_column_major_rows_are_transposed() -> None:
    kind = GemmTable()
    row = ROWS.iloc[[3]].assign(dtype="fp32", compute="")
    device = device_datasheet(load_device("v100-sxm2-16gb"), "fp32")
    turned = row.assign(source="elsewhere", m=row["n"], n=row["m"])
    p = GemmParameters(page_stall_ratio=0.01)
    assert kind.predict_times(row, device, p)[0] == pytest.approx(kind.predict_times(turned, device, p)[0], rel=0.01)


def test_bad_tables_are_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no such file"):
        read_table(tmp_path / "missing.csv")
    with pytest.raises(SpecError, match="is a folder"):
        read_table(tmp_path)
    junk = tmp_path / "junk.csv.gz"
    junk.write_bytes(b"\x1f\x8b\x08\x00 not really gzip")
    with pytest.raises(SpecError, match="cannot be read"):
        read_table(junk)
    empty = tmp_path / "empty.csv"
    empty.write_text("m,n\n")
    with pytest.raises(SpecError, match="no rows"):
        read_table(empty)
    twice = tmp_path / "twice.csv"
    twice.write_text("m,n, m\n1,2,3\n")
    with pytest.raises(SpecError, match="two columns are named 'm'"):
        read_table(twice)
    with pytest.raises(SpecError, match="'wide' is not a finite number"):
        number_column(pd.DataFrame({"m": ["1", "wide"]}), "m")
    with pytest.raises(SpecError, match="'batch' is missing"):
        number_column(pd.DataFrame({"batches": [1]}), "batch")


def test_best_constant_efficiency_beats_its_neighbours() -> None:
    random = np.random.default_rng(1)
    roofline, measured = random.uniform(0.5, 1.0, 500), np.ones(500)
    best = best_constant_roofline_efficiency(roofline, measured)

    def error(efficiency: float) -> float:
        return float(np.abs(roofline / efficiency / measured - 1).mean())

    assert error(best) <= min(error(best * 0.98), error(best * 1.02))


def test_products_in_tf32_meet_the_limit_of_power_as_those_in_16_bits_do() -> None:
    """At half the rate and twice the energy per FLOP a large product draws the same watts and takes twice as long."""
    shape = {"m": 8192.0, "n": 8192.0, "k": 8192.0, "batch": 1.0}
    kernel = Kernel("x", "gemm", "linear", "forward", 2 * 8192.0**3, 0.0, 0.0, 0.0, shape)

    def seconds(dtype: str, device: str) -> float:
        prices = KernelFamilyPredictor(load_device(device), dtype, load_software("pytorch-eager"))
        return float(prices.device_times([kernel]).seconds[0])

    for device in ("a100-sxm4-80gb", "a100-pcie-40gb", "h100-sxm5-80gb"):
        assert seconds("tf32", device) == pytest.approx(2 * seconds("fp16", device), rel=0.03)


@pytest.mark.parametrize(("n", "k", "batch", "slow"), [(2048, 108, 32, True), (150, 2048, 32, True),
    (197, 64, 32, False),
    (2048, 104, 32, False), (2048, 108, 1, False)])  # fmt: skip
def test_heads_that_tensor_cores_cannot_load_run_on_ordinary_cores(n: int, k: int, batch: int, slow: bool) -> None:
    one = np.array(1.0)
    card = dataclasses.replace(DEVICE, architecture="Ampere", peak_flops_per_s=20e12)
    seconds = float(unaligned_batched_gemm_time(2048 * one, n * one, k * one, batch * one, card))
    assert seconds == pytest.approx(2.0 * 2048 * n * k * batch / 10e12 if slow else 0.0)
    hopper = dataclasses.replace(card, architecture="Hopper")
    assert float(unaligned_batched_gemm_time(2048 * one, n * one, k * one, batch * one, hopper)) == 0.0


@pytest.mark.parametrize(("extents", "along_sum", "odd"), [
    ((4096, 50257, 768), (1, 1), True), ((4096, 50257, 768), (1, 0), True), ((4096, 50257, 768), (0, 0), True),
    ((2048, 4096, 4095), (1, 1), True), ((2048, 4096, 4095), (1, 0), True), ((2048, 4096, 4095), (0, 0), False),
    ((4095, 2048, 4096), (1, 1), False), ((4095, 2048, 4096), (1, 0), False), ((4095, 2048, 4096), (0, 0), True),
    ((4096, 50257, 768), (0, 1), True), ((2048, 4096, 4095), (0, 1), True), ((4095, 2048, 4096), (0, 1), True),
])  # fmt: skip
def test_products_whose_rows_are_no_multiple_of_16_bytes_are_slow_on_hopper(
    extents: tuple[int, int, int], along_sum: tuple[int, int], odd: bool
) -> None:
    """Nine products as timed on H100: those with an odd row took 2 to 3.3 ms for 316 GFLOP, the others a fifth.

    Three more have both operands transposed; each of their extents is the length of some rows. None was timed.
    """
    card = device_datasheet(load_device("h100-sxm5-80gb"), "bf16")
    seconds = float(unaligned_gemm_time(*extents, along_sum, card))
    rate = 2.0 * math.prod(extents) / seconds if odd else math.inf
    assert (seconds > 0.0) == odd and (not odd or 95e12 < rate < 155e12)
    assert (
        float(unaligned_gemm_time(*extents, along_sum, device_datasheet(load_device("v100-sxm2-16gb"), "fp16"))) == 0.0
    )


def test_software_that_pads_pays_nothing_for_odd_vocabularies() -> None:
    """The head of GPT-2: 50,257 words."""
    kernels = [
        Kernel("head", "gemm", "gemm", phase, 2.0 * m * n * k, 0.0, 0.0, 0.0, {"m": m, "n": n, "k": k, "batch": 1.0})
        for phase, m, n, k in (("forward", 4096, 50257, 768), ("backward", 4096, 768, 50257),
                               ("backward_weight", 768, 50257, 4096))
    ]  # fmt: skip

    def seconds(name: str) -> npt.NDArray[np.float64]:
        return (
            KernelFamilyPredictor(load_device("h100-sxm5-80gb"), "bf16", load_software(name))
            .device_times(kernels)
            .seconds
        )

    eager, compiled, padded = (seconds(name) for name in ("pytorch-eager", "pytorch-compile", "megatron-core"))
    assert (eager > 3.0 * padded).all()
    assert (compiled > 3.0 * padded).tolist() == [False, False, True]
