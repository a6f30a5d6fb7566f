"""Prices of memory-bound kernels, against numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paleo.pricing.calibration_lookup import streaming_bandwidth_share
from paleo.pricing.kernels import DeviceDatasheet
from paleo.pricing.memory import (
    MemoryParameters,
    block_row_traffic,
    cache_miss_rate,
    layer_norm_row_traffic,
    memory_kernel_time,
    resident_blocks,
    smooth_maximum,
    softmax_row_traffic,
)
from paleo.tables.kernels import FitTarget
from paleo.tables.kinds._memory_passes import FAMILY_OF_OPERATION, OPERATIONS_OF_FAMILY, ElementwiseTable

V100 = DeviceDatasheet("v100", "Volta", "HBM2", 80.0, 1.38e9, 14e12, 9e11, 6e6, 250.0, False)
PLAIN = MemoryParameters(
    launch_time=30e-6,
    kernel_time=5e-6,
    host_overlap=20.0,
    bandwidth_fraction=0.9,
    l2_bytes_per_cycle=120.0,
    elements_per_cycle=128.0,
)


def time(**changes: Any) -> Any:
    call: dict[str, Any] = {"moved_bytes": 8.1e9, "elements": 1e9, "device": V100, "parameters": PLAIN}
    return memory_kernel_time(**(call | changes))


def test_a_long_stream_runs_at_the_achieved_bandwidth():
    assert time(elements=0.0) == pytest.approx(0.01 + 5e-6, rel=2e-3)  # 8.1 GB at 0.81 TB/s


def test_a_short_call_costs_the_host_and_a_scalar_call_more():
    assert time(moved_bytes=100.0, elements=25.0) == pytest.approx(30e-6)
    assert time(moved_bytes=100.0, elements=25.0, host_calls=1.2) == pytest.approx(36e-6)


def test_host_and_device_overlap():
    late = replace(PLAIN, host_overlap=40.0)
    assert time(parameters=late, moved_bytes=81e6, elements=0.0) == pytest.approx(1.05e-4, rel=1e-2)
    assert smooth_maximum(1.0, 1.0, 1.0) == 2.0
    assert smooth_maximum(1e-6, 1.0, 40.0) == 1.0


def test_a_warm_input_stays_in_the_cache_only_while_it_fits():
    quick = replace(PLAIN, launch_time=0.2e-6, kernel_time=0.1e-6)
    small, large = (
        np.array([time(parameters=quick, moved_bytes=size, elements=0.0, warm=warm) for warm in (True, False)])
        for size in (1e6, 1e9)
    )
    assert small[0] < 0.5 * small[1]
    assert large[0] == pytest.approx(large[1], rel=1e-4)


def test_issue_limits_narrow_elements_on_a_fast_memory():
    slow = replace(PLAIN, elements_per_cycle=1.0)
    assert time(parameters=slow, elements=1.104e10) == pytest.approx(0.1, rel=1e-3)  # 80 * 1.38e9 elements a second


def test_rows_run_in_whole_waves():
    row = replace(PLAIN, launch_time=0.2e-6, cycles_per_row_step=1380.0)  # one microsecond a row
    shape = {"parameters": row, "moved_bytes": 1.0, "elements": 0.0, "threads_per_row": 1024.0}
    assert time(**shape, rows=160.0) == pytest.approx(5e-6 + 1e-6, rel=1e-3)  # 2 blocks on each of 80
    assert time(**shape, rows=161.0) == pytest.approx(5e-6 + 2e-6, rel=1e-3)
    assert time(**shape, rows=161.0, warm=True) == pytest.approx(5e-6 + 1e-6, rel=1e-3)  # half the latency in L2
    assert time(**shape, rows=161.0, steps_per_row=10.0) == pytest.approx(5e-6 + 20e-6, rel=1e-3)


def test_time_grows_with_bytes_and_falls_with_bandwidth():
    sizes = np.geomspace(1e3, 1e10, 30)
    assert (np.diff(time(moved_bytes=sizes, elements=sizes / 4)) >= 0).all()
    faster = replace(V100, memory_bandwidth=1.8e12)
    assert time(device=faster, elements=0.0) == pytest.approx(0.5 * time(elements=0.0), rel=1e-2)


def test_passes_of_softmax():
    short = softmax_row_traffic(rows=10.0, length=600.0, element_bytes=4.0, device=V100)
    assert (short.elements, short.reread_bytes, short.steps_per_row) == (10240.0, 0.0, 1.0)
    long = softmax_row_traffic(rows=1e6, length=16384.0, element_bytes=4.0, device=V100)
    assert long.reread_bytes == 2 * 1e6 * 16384 * 4
    assert long.reread_footprint == 80 * 2 * 16384 * 4
    assert long.steps_per_row == 3 * 4 + 4


def test_layer_norm_reads_twice_and_ragged_rows_take_two_kernels():
    vector = layer_norm_row_traffic(rows=1e6, length=1024.0, element_bytes=4.0, device=V100)
    ragged = layer_norm_row_traffic(rows=1e6, length=1023.0, element_bytes=4.0, device=V100)
    assert vector.reread_bytes == 1e6 * 4096
    assert vector.reread_footprint == 80 * 16 * 4096
    assert ragged.reread_footprint == 1e6 * 4092


def test_block_kernels_step_through_the_row():
    passes = block_row_traffic(rows=1.0, length=28672.0, element_bytes=2.0, moved_bytes=172032.0)
    assert (passes.steps_per_row, passes.elements, passes.reread_bytes) == (28.0, 86016.0, 0.0)


def test_streaming_fraction_by_kind_of_memory():
    fractions = {
        "hbm": streaming_bandwidth_share(memory_kind="HBM3", architecture="Hopper", inline_ecc=False),
        "gddr": streaming_bandwidth_share(memory_kind="GDDR6X", architecture="Ampere", inline_ecc=False),
        "ecc": streaming_bandwidth_share(memory_kind="GDDR6", architecture="Turing", inline_ecc=True),
        "pascal": streaming_bandwidth_share(memory_kind="HBM2", architecture="Pascal", inline_ecc=False),
    }
    assert fractions["hbm"] > fractions["gddr"] > fractions["ecc"] > fractions["pascal"]
    assert fractions["ecc"] == pytest.approx(fractions["gddr"] * 8 / 9)


def test_limits_of_the_helpers():
    assert cache_miss_rate(0.0, 1.0) == pytest.approx(0.0, abs=1e-12)
    assert [float(resident_blocks(threads)) for threads in (1.0, 128.0, 1024.0)] == [32.0, 16.0, 2.0]


def table(**columns: Any) -> pd.DataFrame:
    row = {
        "source": "neusight",
        "device": "v100-pcie-32gb",
        "library": "PyTorch, eager",
        "dtype": "fp32",
        "op": "add",
        "shape": "128x1024",
        "bytes_moved": 1572864.0,
        "time_us": 30.0,
    }
    return pd.DataFrame([row | columns])


@pytest.mark.parametrize(
    ("columns", "family", "stack"),
    [
        ({}, "memory.elementwise", "eager"),
        ({"op": "softmax"}, "memory.softmax", "eager"),
        ({"op": "layernorm_bwd"}, "memory.layernorm", "eager"),
        ({"op": "rmsnorm", "source": "vidur", "library": "vLLM CUDA kernels"}, "memory.rmsnorm", "kernel"),
        ({"op": "fp8_scale_matrix", "source": "aiconfigurator", "library": "TensorRT-LLM"}, "memory.quantize", "graph"),
    ],
)
def test_family_and_stack_of_a_row(columns: dict[str, Any], family: str, stack: str):
    kind = ElementwiseTable()
    assert kind.kernel_family(table(**columns)).item() == family
    assert kind.timing_method(table(**columns)).item() == stack


def test_rows_without_a_model_say_why():
    kind = ElementwiseTable()
    assert kind.unsupported_reasons(table()).item() == ""
    assert kind.unsupported_reasons(table(op="fft")).item() == "unknown operation fft"
    assert kind.unsupported_reasons(table(dtype="bf16->fp8")).item() == ""
    assert kind.unsupported_reasons(table(dtype="fp3")).item() == "unknown dtype"
    assert "shape" in kind.unsupported_reasons(table(shape="128 by 1024")).item()
    assert "bytes_moved" in kind.unsupported_reasons(table(bytes_moved=-1.0)).item()


@pytest.mark.parametrize("family", sorted(OPERATIONS_OF_FAMILY))
def test_every_family_is_priced_and_has_a_start(family: str):
    kind, operation = ElementwiseTable(), OPERATIONS_OF_FAMILY[family][0]
    rows = pd.concat([table(op=operation), table(op=operation, shape="1x24x512x1024", bytes_moved=1e8)])
    plan = kind.fit_settings(FitTarget("v100", f"memory.{family}", "eager", V100))
    times = kind.predict_times(rows, V100, plan.start_values)
    assert times.shape == (2,)
    assert 0 < times[0] <= times[1]
    assert set(plan.fixed_parameters) <= set(MemoryParameters.__dataclass_fields__)
    assert FAMILY_OF_OPERATION[operation] == family


def test_the_roofline_of_a_row_moves_its_stated_bytes():
    flops, moved = ElementwiseTable().flops_and_bytes(table())
    assert (flops.item(), moved.item()) == (131072.0, 1572864.0)
