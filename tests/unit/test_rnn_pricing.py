"""Recurrent layers: registers, steps, directions, and the measured table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from paleo.pricing.convolution import cached_share
from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.pricing.kernels import DeviceDatasheet, device_datasheet
from paleo.pricing.rnn import (
    RnnDirection,
    RnnParameters,
    early_cudnn_recurrent_gemm_time,
    persistent_rnn_timestep_time,
    rnn_time,
    rnn_timestep_time,
    rnn_weight_gradient_time,
    weights_fit_registers,
)
from paleo.specs.calibration import load_calibration
from paleo.specs.device import load_device
from paleo.tables.kernels import KERNEL_TABLES
from paleo.tables.run_tables import find_table_kind
from paleo.units import GIGA, MEGA, MICROSECOND, TERA

TITAN_X = DeviceDatasheet(
    "titan x", "Maxwell", "GDDR5", 24, 1075 * MEGA, 6.6 * TERA, 336.5 * GIGA, 3.1 * MEGA, 250, False
)
V100 = DeviceDatasheet("v100", "Volta", "HBM2", 80, 1530 * MEGA, 15.7 * TERA, 900 * GIGA, 6.3 * MEGA, 300, False)
P100 = DeviceDatasheet("p100", "Pascal", "HBM2", 56, 1303 * MEGA, 9.34 * TERA, 732 * GIGA, 4 * MEGA, 250, False)
PARAMETERS = RnnParameters()
LATE = dataclasses.replace(PARAMETERS, cycles_per_summed_element=160.0)


def layer(device: DeviceDatasheet = V100, **changes: object) -> np.ndarray:
    extents: dict[str, object] = {"gate_count": 1.0, "hidden": 1760.0, "batch": 32.0, "timesteps": 50.0}
    return rnn_time(**(extents | changes), device=device, parameters=PARAMETERS)  # type: ignore[arg-type]


def test_weights_of_1152_units_stay_in_the_registers_of_a_titan_x() -> None:
    units = np.array([512.0, 1152.0, 1216.0, 1760.0])
    assert weights_fit_registers(weight_bytes=4.0 * units**2, device=TITAN_X).tolist() == [True, True, False, False]


def test_persistent_kernels_win_at_small_batches_only_where_weights_fit() -> None:
    small = layer(TITAN_X, hidden=1152.0, batch=4.0)
    kept = layer(TITAN_X, hidden=1152.0, batch=4.0, persistent=True)
    assert kept < 0.4 * small
    assert layer(TITAN_X, hidden=1760.0, batch=4.0, persistent=True) == layer(TITAN_X, hidden=1760.0, batch=4.0)


def test_persistent_step_by_hand() -> None:
    """1152 units, batch 4: 10.6 MFLOP at 0.8 of 6.6 TFLOP/s, a barrier, and 18 kB of state to each of 24 SMs."""
    arrays = {name: np.array(value) for name, value in
              {"gate_count": 1.0, "hidden": 1152.0, "batch": 4.0, "element_bytes": 4.0}.items()}  # fmt: skip
    seconds = persistent_rnn_timestep_time(**arrays, device=TITAN_X, parameters=PARAMETERS)
    expected = 2.5 * MICROSECOND + 2 * 1152**2 * 4 / (0.8 * 6.6 * TERA) + 1152 * 4 * 4 * 24 / (3 * 336.5 * GIGA)
    assert float(seconds) == pytest.approx(expected)


def test_a_step_reads_weights_that_exceed_l2() -> None:
    arrays = {name: np.array(value) for name, value in
              {"gate_count": 4.0, "hidden": 4096.0, "batch": 16.0, "element_bytes": 4.0}.items()}  # fmt: skip
    weights = 4 * 4096**2 * 4
    assert rnn_timestep_time(**arrays, device=V100, parameters=PARAMETERS) >= weights / V100.memory_bandwidth
    assert 1.0 - float(cached_share(0.1 * MEGA, 0.6 * 6.3 * MEGA)) < 0.001


def test_time_is_linear_in_layers_directions_and_late_steps() -> None:
    one = layer()
    assert layer(layers=3.0) == pytest.approx(3 * one)
    assert layer(bidirectional=1.0) == pytest.approx(2 * one)
    late = layer(timesteps=np.array([200.0, 300.0, 400.0]))
    assert np.diff(late)[0] == pytest.approx(np.diff(late)[1])


def test_both_gradients_are_the_sum_of_each() -> None:
    ways = np.array([RnnDirection.DATA, RnnDirection.FILTER, RnnDirection.BACKWARD])
    data, filters, both = layer(direction=ways)
    assert both == pytest.approx(data + filters - PARAMETERS.launch_time)
    assert filters < data


def test_small_batches_cost_as_much_as_larger_ones() -> None:
    times = layer(batch=np.array([8.0, 16.0, 32.0, 64.0, 128.0]))
    assert np.all(np.diff(times) >= -0.01 * times[:-1])
    assert times[2] < 1.3 * times[0]


PRODUCTS = GemmParameters()
LSTM = {"gate_count": 4.0, "hidden": 2048.0, "batch": 16.0, "element_bytes": 4.0}


def test_products_of_a_later_library_are_priced_as_plain_ones() -> None:
    """cuDNN 7 takes the product's kernel that a plain product would; cuDNN 6 knows nothing of it."""
    arrays = {name: np.array(value) for name, value in LSTM.items()}
    common = {"device": V100, "parameters": PARAMETERS}
    step = rnn_timestep_time(**arrays, library=7.0, products=PRODUCTS, **common)
    product = gemm_time(m=16, n=8192, k=2048, element_bytes=4, result_bytes=4, device=V100, parameters=PRODUCTS)
    pointwise = 4 * 8192 * 16 * 4 / (PARAMETERS.bandwidth_fraction * V100.memory_bandwidth)
    assert float(step) == pytest.approx(float(product) - PRODUCTS.launch_time + pointwise, rel=1e-3)
    early = rnn_timestep_time(**arrays, library=6.0, products=PRODUCTS, **common)
    assert float(early) == float(rnn_timestep_time(**arrays, library=6.0, **common)) != float(step)


def test_gradients_of_weights_are_added_to_what_is_there() -> None:
    """One read of 67 MB more than the product (2048 x 400)(400 x 8192), which itself only writes them."""
    arrays = {name: np.array(value) for name, value in LSTM.items()}
    seconds = rnn_weight_gradient_time(
        **arrays, timesteps=np.array(25.0), library=7.6, device=V100, parameters=PARAMETERS, products=PRODUCTS
    )
    product = gemm_time(
        m=2048, n=8192, k=400, element_bytes=4, result_bytes=4, k_contiguous=0, device=V100, parameters=PRODUCTS
    )
    read = 4 * 8192 * 2048 / (PARAMETERS.bandwidth_fraction * V100.memory_bandwidth)
    assert float(seconds) == pytest.approx(float(product) - PRODUCTS.launch_time + read)


def table(**columns: object) -> pd.DataFrame:
    row: dict[str, object] = {
        "source": "deepbench", "device": "v100-sxm2-16gb", "dtype": "fp32", "cell": "lstm", "hidden": 1024, "batch": 32,
        "timesteps": 25, "direction": "fwd", "time_us": 1978.0, "compute": "",
    }  # fmt: skip
    return pd.DataFrame([row | columns])


def test_the_table_kind() -> None:
    kind = KERNEL_TABLES["rnn"]
    frame = pd.concat(
        [table(), table(dtype="fp16", compute="tensor"), table(device="p100-pcie-16gb", dtype="fp16", compute="fp32")],
        ignore_index=True,
    )
    assert find_table_kind(frame.columns).name == kind.name
    assert kind.kernel_family(frame).tolist() == ["rnn.vector", "rnn.tensor", "rnn.half"]
    assert kind.unsupported_reasons(frame).tolist() == ["", "", ""]
    assert "cell" in kind.unsupported_reasons(table(cell="mamba")).iloc[0]
    assert "extent" in kind.unsupported_reasons(table(hidden=0)).iloc[0]
    flops, moved = kind.flops_and_bytes(table())
    assert float(flops[0]) == 2 * 4 * 1024**2 * 32 * 25
    assert float(moved[0]) == 4 * (4 * 1024**2 * 25 + 5 * 1024 * 32 * 25)


def test_the_table_kind_prices_a_measured_row() -> None:
    """DeepBench, V100: 1978 us measured; parameters near those that its other rows give."""
    near = dataclasses.replace(
        PARAMETERS,
        step_launch_time=13 * MICROSECOND,
        early_step_time=22 * MICROSECOND,
        gemm_efficiency=1.1,
        bandwidth_fraction=0.95,
    )
    assert float(KERNEL_TABLES["rnn"].predict_times(table(), V100, near)[0]) == pytest.approx(
        1978 * MICROSECOND, rel=0.25
    )


def by_columns(m: float, n: float, k: float, stream: float, *, half: bool = False, backward: bool = False) -> float:
    arrays = (np.array(size) for size in (m, n, k, stream))
    return float(
        early_cudnn_recurrent_gemm_time(*arrays, half=np.array(half), backward=backward, device=P100, parameters=LATE)
    )  # fmt: skip


def test_narrow_products_reread_their_weights_for_every_four_columns() -> None:
    """LSTM of 4096 units on a P100: 16384 rows are far more than run at once, 600 rows all are."""
    latency = 4096 * 160 / 4 / (1303 * MEGA)
    assert by_columns(16384, 4, 4096, 5e-4) == pytest.approx(np.hypot(latency, 5e-4))
    assert by_columns(16384, 16, 4096, 5e-4) == pytest.approx(np.hypot(latency, 4 * 5e-4))
    assert by_columns(600, 16, 4096, 5e-4) == pytest.approx(np.hypot(latency, 5e-4))
    assert by_columns(2400, 16, 4096, 5e-4) == pytest.approx(np.hypot(latency, 2 * 5e-4))


def test_32_columns_pay_the_latency_of_the_whole_sum() -> None:
    """Two blocks of a 128 x 32 tile, at 2 x 128 x 32 FLOP times 1 + (16 (1/128 + 1/32))^2, against 160 cycles each of
    1024 elements: the latency rules, and the half precision kernel forward takes 2.8 times as long."""
    arithmetic = 2 * 128 * 32 * (1 + 0.625**2) / (0.8 * 9.34 * TERA / (56 * 1303 * MEGA))
    expected = 1024 * np.cbrt(arithmetic**3 + 160**3) / (1303 * MEGA)
    assert by_columns(256, 32, 1024, 0.0) == pytest.approx(expected)
    assert by_columns(256, 32, 1024, 0.0, half=True) == pytest.approx(2.8 * expected)
    assert by_columns(256, 32, 1024, 0.0, half=True, backward=True) == pytest.approx(expected)


def test_wide_products_split_their_sum_only_while_multiprocessors_idle() -> None:
    deep = 16384
    assert by_columns(1024, 64, deep, 0.0) < 0.5 * by_columns(1024, 32, deep, 0.0)
    assert by_columns(1024, 64, deep, 0.0, half=True) > 2 * by_columns(1024, 64, deep, 0.0)
    assert by_columns(8192, 64, deep, 0.0) == by_columns(8192, 64, deep, 0.0, half=True)


def test_old_libraries_on_pascal_take_longer_for_32_sequences_than_for_64() -> None:
    """DeepBench, P100, cuDNN 6: 270 us a step backward at 32, 128 at 64 (1760 units); not so where the fastest kernel
    is chosen, nor on another architecture."""
    extents = {"hidden": 1760.0, "direction": np.array(RnnDirection.DATA), "batch": np.array([32.0, 64.0])}
    step = {"gate_count": 1.0, "timesteps": 50.0, "parameters": LATE}
    early, later, other = (
        rnn_time(**(extents | step), library=library, device=device)
        for library, device in ((6.0, P100), (7.6, P100), (6.0, V100))
    )
    assert early[0] > 1.3 * early[1]
    assert later[0] <= later[1] and other[0] <= other[1]


@pytest.mark.shared
@pytest.mark.parametrize(
    ("measured", "left_out"), [("p100-pcie-16gb", "titan-x-pascal"), ("titan-x-pascal", "p100-pcie-16gb")]
)
def test_a_card_left_out_of_its_generation(shared: Path, measured: str, left_out: str) -> None:
    """One card's parameters price the other's rows within the 20 % that recurrent layers aim at."""
    rows = pd.read_csv(shared / "measurements" / "rnn.csv", keep_default_na=False)
    rows = rows[(rows["device"] == left_out) & (rows["dtype"] == "fp32")]
    entry = next(e for e in load_calibration(measured).entries if e.family == "rnn.vector")
    device = device_datasheet(load_device(left_out), "fp32")
    seconds = KERNEL_TABLES["rnn"].predict_times(rows, device, RnnParameters(**entry.parameters))
    assert len(rows) >= 159
    assert np.mean(np.abs(seconds / (rows["time_us"].to_numpy() * MICROSECOND) - 1)) < 0.16


@pytest.mark.shared
@pytest.mark.parametrize(("dtype", "bar"), [("fp32", 0.17), ("fp16", 0.20)])
def test_a_generation_left_out(shared: Path, dtype: str, bar: float) -> None:
    """Products of the V100, all else of a P100 under another library: no recurrent row of the V100 is known."""
    rows = pd.read_csv(shared / "measurements" / "rnn.csv", keep_default_na=False)
    rows = rows[(rows["device"] == "v100-sxm2-16gb") & (rows["dtype"] == dtype)]
    entry = next(e for e in load_calibration("p100-pcie-16gb").entries if e.family == "rnn.vector")
    device = device_datasheet(load_device("v100-sxm2-16gb"), dtype)
    seconds = KERNEL_TABLES["rnn"].predict_times(rows, device, RnnParameters(**entry.parameters))
    assert len(rows) >= 159
    assert np.mean(np.abs(seconds / (rows["time_us"].to_numpy() * MICROSECOND) - 1)) < bar
