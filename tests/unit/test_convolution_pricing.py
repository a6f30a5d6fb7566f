"""Convolution times: hand-worked shapes and geometry, limits, workspace, tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from paleo.pricing.convolution import (
    CONVOLUTION_ALGORITHMS,
    FIRST_AUTOTUNED_RELEASE,
    FIRST_CHOSEN_RELEASE,
    NON_CUDNN_RELEASE,
    Array,
    ConvolutionCost,
    ConvolutionDirection,
    ConvolutionParameters,
    ConvolutionSetup,
    ConvolutionShape,
    convolution_costs,
    convolution_shape,
    explicit_im2col_cost,
    fastest_convolution_time,
    lossy_overlap_time,
    power_limited_boost_share,
    tiled_gemm_time,
)
from paleo.pricing.engine_gemm import wave_count
from paleo.pricing.kernels import DeviceDatasheet, device_datasheet
from paleo.specs.device import load_device
from paleo.tables.kernels import KERNEL_TABLES
from paleo.tables.kinds._conv import (
    STRIDED_GRADIENT_UNSUPPORTED_REASON,
    convolution_library_names,
    cudnn_versions,
    layer_convolution_shapes,
)
from paleo.tables.run_tables import find_table_kind
from paleo.units import GIGA, MEGA, TERA

V100 = DeviceDatasheet("v100", "Volta", "HBM2", 80, 1380 * MEGA, 14 * TERA, 900 * GIGA, 6.3 * MEGA, 250, False)
V100_TENSOR = dataclasses.replace(V100, peak_flops_per_s=112 * TERA, tensor_cores=True)
T4 = DeviceDatasheet("t4", "Turing", "GDDR6", 40, 1590 * MEGA, 8.1 * TERA, 320 * GIGA, 4.2 * MEGA, 70, False)
PARAMETERS = ConvolutionParameters()


def square(
    batch: float | Array = 32.0, channels: float = 64.0, size: float = 56.0, filters: float = 64.0, kernel: float = 3.0,
    *, pad: float = 1.0, stride: float = 1.0, groups: float = 1.0, direction: int = ConvolutionDirection.FORWARD,
) -> ConvolutionShape:  # fmt: skip
    return convolution_shape(
        batch=batch, channels=channels, height=size, width=size, filters=filters, kernel_h=kernel, kernel_w=kernel,
        pad_h=pad, pad_w=pad, stride_h=stride, stride_w=stride, groups=groups, direction=direction,
    )  # fmt: skip


def seconds(shape: ConvolutionShape, device: DeviceDatasheet = V100, library: float = 8.0) -> dict[str, float]:
    costs = convolution_costs(shape, device=device, parameters=PARAMETERS, library=library)
    return {name: float(cost.seconds) for name, cost in costs.items()}


def test_first_kernels_for_ampere_sum_over_sixty_four_channels() -> None:
    """80 channels in sixteen bits take the arithmetic of 128 there, later and on Volta that of 96; 32 take theirs."""
    ampere = dataclasses.replace(device_datasheet(load_device("a100-sxm4-40gb"), "fp16"), memory_bandwidth=1e18)
    volta = dataclasses.replace(V100_TENSOR, memory_bandwidth=1e18)

    def product(channels: float, device: DeviceDatasheet, library: float, width: float = 2.0) -> float:
        shape = square(channels=channels, filters=256.0)
        costs = convolution_costs(
            shape, device=device, parameters=PARAMETERS, library=library, element_bytes=width, channels_last=True
        )
        return float(costs["implicit"].seconds)

    assert product(80.0, ampere, 8.0) == pytest.approx(product(128.0, ampere, 8.0))
    for device, library, width in ((ampere, 8.1, 2.0), (volta, 8.0, 2.0), (ampere, 8.0, 4.0)):
        assert product(80.0, device, library, width) == pytest.approx(product(96.0, device, library, width))
        assert product(80.0, device, library, width) < 0.9 * product(128.0, device, library, width)
    assert product(32.0, ampere, 8.0) < 0.7 * product(64.0, ampere, 8.0)


def test_shape_of_a_strided_grouped_layer() -> None:
    shape = square(batch=2.0, channels=32.0, size=57.0, filters=64.0, stride=2.0, groups=4.0)
    assert (float(shape.out_h), float(shape.channels), float(shape.filters)) == (29.0, 8.0, 16.0)
    assert float(shape.flops) == 2 * 2 * 29 * 29 * 8 * 16 * 9 * 4
    assert float(shape.moved_elements) == 2 * 57 * 57 * 32 + 2 * 29 * 29 * 64 + 8 * 16 * 9 * 4


def test_dilation_widens_the_filter() -> None:
    shape = convolution_shape(
        batch=1.0, channels=1.0, height=32.0, width=32.0, filters=1.0, kernel_h=3.0, kernel_w=3.0, dilation_h=4.0
    )
    assert (float(shape.out_h), float(shape.out_w)) == (24.0, 30.0)
    assert seconds(shape)["nonfused"] == np.inf


def test_fused_winograd_charges_whole_blocks_of_8_by_16_outputs() -> None:
    """9 x 17 outputs need 2 x 2 blocks, as many as 16 x 32; one more row costs nothing until the block is full."""
    small, full = (
        seconds(
            convolution_shape(
                batch=40.0,
                channels=256.0,
                height=h,
                width=w,
                filters=64.0,
                kernel_h=3.0,
                kernel_w=3.0,
                pad_h=1.0,
                pad_w=1.0,
            )
        )
        for h, w in ((9.0, 17.0), (16.0, 32.0))
    )
    assert small["winograd"] == pytest.approx(full["winograd"], rel=0.03)
    assert small["implicit"] < 0.6 * full["implicit"]


def fastest_algorithm(costs: Mapping[str, ConvolutionCost]) -> str:
    return min(costs, key=lambda name: float(costs[name].seconds))


def test_frameworks_that_search_find_kernels_that_heuristics_leave() -> None:
    """cuDNN 5.1 has the unfused Winograd forward, but its heuristics take it for the filter gradient alone."""
    shape, known = square(batch=64.0, channels=512.0, size=28.0, filters=512.0), ("implicit", "winograd", "nonfused")

    def fastest(library: float, available: Mapping[str, tuple[float, float, float]]) -> str:
        costs = convolution_costs(
            shape, device=V100, parameters=PARAMETERS, library=library, algorithms=known, available=available
        )
        return fastest_algorithm(costs)

    assert (fastest(5.1, FIRST_CHOSEN_RELEASE), fastest(5.1, FIRST_AUTOTUNED_RELEASE)) == ("winograd", "nonfused")
    assert fastest(5.0, FIRST_AUTOTUNED_RELEASE) == "winograd"


def test_implicit_products_before_cudnn_3_are_slower_by_what_was_measured() -> None:
    old, new = (seconds(square(), library=library)["implicit"] - PARAMETERS.launch_time for library in (2.0, 3.0))
    assert old / new == pytest.approx(1.28)


def test_groups_share_the_steps_of_tensor_cores() -> None:
    """32 groups of 4 channels are priced as 4 products of 32 channels and filters, no less than one dense quarter."""
    grouped = square(channels=128.0, filters=128.0, groups=32.0)
    joined = square(channels=128.0, filters=128.0, groups=4.0)
    one, other = (seconds(shape, V100_TENSOR)["implicit"] for shape in (grouped, joined))
    assert one == pytest.approx(other, rel=0.02)  # the filters themselves are fewer bytes
    on_vectors = [seconds(shape, V100)["implicit"] for shape in (grouped, joined)]
    assert on_vectors[0] > 1.1 * on_vectors[1]


def test_depthwise_filter_gradients_read_their_channel_for_each_tap() -> None:
    """Memory-bound: (elements + (taps - 1)(input + output)) over elements, 1 + 8 where filters are nothing."""
    calm = dataclasses.replace(V100, peak_flops_per_s=1e4 * TERA)
    times = [
        seconds(square(64.0, 96.0, 56.0, 96.0, groups=96.0, direction=way), calm)["direct"] - PARAMETERS.launch_time
        for way in (ConvolutionDirection.FORWARD, ConvolutionDirection.DATA, ConvolutionDirection.FILTER)
    ]
    assert times[1] == pytest.approx(times[0])
    assert times[2] / times[0] == pytest.approx(1 + 8, rel=1e-3)


def test_faster_tensor_cores_need_wider_tiles() -> None:
    """Twice the FLOP a clock over the same shared memory: the large product gains less than twice, the small least."""
    double = dataclasses.replace(V100_TENSOR, peak_flops_per_s=2 * V100_TENSOR.peak_flops_per_s)
    wide, narrow = square(256.0, 512.0, 28.0, 512.0), square(256.0, 512.0, 28.0, 64.0)

    def gain(shape: ConvolutionShape) -> float:
        one, two = (
            convolution_costs(shape, device=d, parameters=PARAMETERS, element_bytes=2.0) for d in (V100_TENSOR, double)
        )
        return float(one["implicit"].seconds / two["implicit"].seconds)

    assert 1.0 < gain(narrow) < gain(wide) < 2.0


def machine(device: DeviceDatasheet = V100, **changes: float) -> ConvolutionSetup:
    parameters = dataclasses.replace(PARAMETERS, block_overhead_cycles=10.0, energy_per_flop=1.0, **changes)
    return ConvolutionSetup(device, parameters, np.array(4.0), np.array(8.0), False)


def test_a_lone_wave_pays_the_latency_of_each_element_of_the_sum() -> None:
    """A 128 x 128 tile takes 2 x 128 x 128 x 1.0625 FLOP at 0.95 of 126.8 FLOP a cycle: 289 cycles an element,
    hidden behind a latency of 500 in one wave, not in four."""
    one, four = (
        float(tiled_gemm_time(*(np.array(x) for x in (rows, 128.0, 1000.0)), 1.0,
            machine(cycles_per_summed_element=500.0),
                           tiles=((128, 128),)))
        for rows in (128.0, 128.0 * 320)
    )  # fmt: skip
    tile = 2 * 128 * 128 * 1.0625 / (0.95 * 14 * TERA / (80 * 1380 * MEGA))
    assert one == pytest.approx((1000 * np.cbrt(tile**3 + 500**3) + 10) / (1380 * MEGA))
    assert four == pytest.approx((1000 * np.cbrt((4 * tile) ** 3 + 500**3) + 40) / (1380 * MEGA))


def test_added_columns_stay_in_their_image_and_fill_it_with_zeros_first() -> None:
    """1 x 1 with stride 2 on 7 x 7: a block owns the 16 positions of one image, whatever the images."""
    shapes = [
        square(n, 2048.0, 7.0, 512.0, 1.0, pad=0.0, stride=2.0, direction=ConvolutionDirection.DATA)
        for n in (8.0, 16.0)
    ]
    few, many = (float(explicit_im2col_cost(shape, machine()).seconds) for shape in shapes)
    assert many > 1.7 * few
    once, twice = (
        float(
            explicit_im2col_cost(
                square(8.0, 64.0, 56.0, 64.0, 1.0, pad=0.0, stride=s, direction=way), machine()
            ).seconds
        )
        for s, way in ((2.0, ConvolutionDirection.FORWARD), (2.0, ConvolutionDirection.DATA))
    )
    filled = 0.5 * 8 * 64 * 56 * 56 * 4 / (PARAMETERS.transform_bandwidth * 900 * GIGA)
    assert twice > once + 0.9 * filled


def test_the_data_gradient_adds_columns_up_without_a_workspace() -> None:
    forward, data = (
        convolution_costs(square(direction=way), device=V100, parameters=PARAMETERS)["explicit"]
        for way in (ConvolutionDirection.FORWARD, ConvolutionDirection.DATA)
    )
    assert float(forward.workspace_bytes) == 32 * 56 * 56 * 64 * 9 * 4
    assert float(data.workspace_bytes) == 0.0


def test_winograd_beats_the_direct_peak_on_wide_layers() -> None:
    shape = square(batch=64.0, channels=512.0, size=28.0, filters=512.0)
    costs = convolution_costs(shape, device=V100, parameters=PARAMETERS, library=8.0)
    assert fastest_algorithm(costs) == "nonfused"
    assert float(shape.flops / fastest_convolution_time(costs)) > 1.5 * V100.peak_flops_per_s


def test_the_library_era_decides_what_there_is() -> None:
    shape = square(channels=256.0, filters=256.0, size=28.0)
    assert seconds(shape, library=4.0)["winograd"] == np.inf
    assert np.isfinite(seconds(shape, library=5.0)["winograd"])
    assert seconds(shape, library=2.0)["fft"] == np.inf
    gradient = square(channels=256.0, filters=256.0, size=28.0, direction=ConvolutionDirection.FILTER)
    assert seconds(gradient, library=9.0)["winograd"] == np.inf
    assert np.isfinite(seconds(gradient, library=NON_CUDNN_RELEASE)["explicit"])


def test_large_filters_go_through_frequencies() -> None:
    shape = square(batch=128.0, channels=64.0, size=64.0, filters=128.0, kernel=9.0, pad=0.0)
    costs = seconds(shape, library=4.0)
    assert costs["fft"] < 0.5 * costs["implicit"]


def test_a_strided_data_gradient_wastes_taps_unless_columns_are_added_up() -> None:
    forward = square(channels=64.0, filters=128.0, kernel=5.0, stride=2.0)
    back = square(channels=64.0, filters=128.0, kernel=5.0, stride=2.0, direction=ConvolutionDirection.DATA)
    assert seconds(back)["implicit"] > 2.5 * seconds(forward)["implicit"]
    assert seconds(back)["explicit"] < seconds(back)["implicit"]
    tensor = seconds(back, V100_TENSOR)
    assert tensor["implicit"] < 2.0 * seconds(forward, V100_TENSOR)["implicit"]
    assert tensor["explicit"] == np.inf


@pytest.mark.parametrize("direction", list(ConvolutionDirection))
@pytest.mark.parametrize("device", [V100, V100_TENSOR, T4])
def test_no_faster_than_the_roofline_of_the_reduced_work(
    direction: ConvolutionDirection, device: DeviceDatasheet
) -> None:
    """At most 6.25 times fewer products than the direct method, FFT apart, and each tensor moved once."""
    shape = square(batch=np.array([1.0, 8.0, 64.0, 256.0]), channels=128.0, filters=256.0, direction=direction)
    costs = convolution_costs(shape, device=device, parameters=PARAMETERS, element_bytes=2.0)
    bound = np.maximum(
        shape.flops / (6.25 * device.peak_flops_per_s), 2.0 * shape.moved_elements / device.memory_bandwidth
    )
    for name in ("implicit", "winograd", "nonfused", "explicit"):
        assert np.all(costs[name].seconds >= bound)
    assert np.all(np.diff(costs["implicit"].seconds) >= 0)


def test_depthwise_is_at_least_its_memory_time() -> None:
    shape = square(batch=64.0, channels=512.0, size=14.0, filters=512.0, groups=512.0)
    costs = seconds(shape)
    assert min(costs, key=lambda name: costs[name]) == "direct"
    assert costs["direct"] >= float(4.0 * shape.moved_elements) / V100.memory_bandwidth
    assert seconds(square())["direct"] == np.inf


def test_scalars_equal_arrays() -> None:
    batches = np.array([1.0, 7.0, 32.0])
    whole = fastest_convolution_time(convolution_costs(square(batches), device=V100, parameters=PARAMETERS))
    single = [
        fastest_convolution_time(convolution_costs(square(b), device=V100, parameters=PARAMETERS)) for b in batches
    ]
    assert whole == pytest.approx(np.array([float(one) for one in single]))


def test_parts() -> None:
    assert float(lossy_overlap_time(np.array(5.0), np.array(0.0))) == pytest.approx(5.0)
    assert float(wave_count(np.array(81.0), 80.0, 0.5)) == pytest.approx(0.5 * 2 + 0.5 * 81 / 80)
    assert power_limited_boost_share(V100, 17.0) == 1.0
    assert power_limited_boost_share(T4, 17.0) == pytest.approx((70 / (17.0 * 8.1)) ** 0.5)
    assert power_limited_boost_share(V100_TENSOR, 17.0) == 1.0
    assert set(CONVOLUTION_ALGORITHMS) == set(FIRST_CHOSEN_RELEASE)


SECOND_LAYER = {
    "channels": 64.0, "height": 27.0, "width": 27.0, "filters": 192.0,
    "kernel_h": 5.0, "kernel_w": 5.0, "pad_h": 2.0, "pad_w": 2.0,
}  # fmt: skip


def test_calls_of_fewer_samples_recover_what_a_workspace_limit_costs() -> None:
    """AlexNet's second layer: 64 MB hold the fast algorithms for a part of the batch only (Oyama, Ben-Nun, Hoefler and
    Matsuoka, Accelerating deep learning frameworks with micro-batches, CLUSTER 2018)."""

    def time_of(samples: float, limit: float) -> float:
        shape = convolution_shape(batch=samples, **SECOND_LAYER)
        costs = convolution_costs(shape, device=V100, parameters=PARAMETERS, library=7.0)
        return float(fastest_convolution_time(costs, limit))

    unlimited, undivided, without = (time_of(256.0, limit) for limit in (np.inf, 64 * MEGA, 0.0))
    divided = min(calls * time_of(256.0 / calls, 64 * MEGA) for calls in (2, 4, 8, 16))
    assert unlimited <= divided < undivided / 1.25
    assert divided < 0.8 * without


def table(**columns: object) -> pd.DataFrame:
    row: dict[str, object] = {
        "source": "deepbench", "device": "p100-pcie-16gb", "library": "cuDNN 6.0.21 (CUDA 8.0.88)", "dtype": "fp32",
        "n": 8, "c": 64, "h": 56, "w": 56, "k": 64, "r": 3, "s": 3, "pad_h": 1, "pad_w": 1,
        "stride_h": 1, "stride_w": 1, "direction": "fwd", "time_us": 193.0, "compute": "",
    }  # fmt: skip
    return pd.DataFrame([row | columns])


def test_the_table_kind_sorts_its_rows() -> None:
    kind = KERNEL_TABLES["conv"]
    frame = pd.concat([table(), table(dtype="fp16"), table(dtype="fp16", compute="fp32")], ignore_index=True)
    assert find_table_kind(frame.columns).name == kind.name
    assert kind.kernel_family(frame).tolist() == ["conv.vector", "conv.half", "conv.vector"]
    assert kind.unsupported_reasons(frame).tolist() == ["", "", ""]
    scatter = table(dtype="fp16", direction="bwd_data", stride_h=2, stride_w=2)
    assert kind.unsupported_reasons(scatter).tolist() == [STRIDED_GRADIENT_UNSUPPORTED_REASON]
    assert "int3" in kind.unsupported_reasons(table(dtype="int3")).iloc[0]
    assert "direction" in kind.unsupported_reasons(table(direction="sideways")).iloc[0]
    assert "extent" in kind.unsupported_reasons(table(h=1, pad_h=0)).iloc[0]
    assert cudnn_versions(frame["library"]).tolist() == [6.0, 6.0, 6.0]


def test_integers_are_convolved_without_transforms() -> None:
    """A 3 x 3 convolution of stride 1, for which Winograd wins in fp32, takes the direct method's time."""
    kind, row = KERNEL_TABLES["conv"], table(dtype="int8", device="titan-x-pascal")
    assert kind.unsupported_reasons(row).tolist() == [""] and kind.kernel_family(row).tolist() == ["conv.int8"]
    figures, parameters = kind.load_datasheet("titan-x-pascal", "int8", ""), ConvolutionParameters()
    flops, _ = kind.flops_and_bytes(row)
    assert kind.predict_times(row, figures, parameters)[0] > flops[0] / figures.peak_flops_per_s


def test_the_table_kind_prices_a_measured_row() -> None:
    """DeepBench, P100: 193 us measured."""
    p100 = DeviceDatasheet("p100", "Pascal", "HBM2", 56, 1303 * MEGA, 9.34 * TERA, 732 * GIGA, 4.2 * MEGA, 250, False)
    predicted = KERNEL_TABLES["conv"].predict_times(table(), p100, dataclasses.replace(PARAMETERS, launch_time=0.00003))
    assert float(predicted[0]) == pytest.approx(193 / MEGA, rel=0.3)
    flops, moved = KERNEL_TABLES["conv"].flops_and_bytes(table())
    assert float(flops[0]) == 2 * 8 * 56 * 56 * 64 * 64 * 9
    assert float(moved[0]) == 4 * (2 * 8 * 56 * 56 * 64 + 64 * 64 * 9)


def layers(**columns: object) -> pd.DataFrame:
    row: dict[str, object] = {
        "source": "convnet-benchmarks", "device": "titan-x-maxwell", "dtype": "fp32", "layer_type": "Convolution",
        "input_shape": "128x192x13x13", "output_shape": "128x384x13x13", "kernel": "3x3", "stride": 1.0, "pad": 1.0,
        "groups": 1.0, "framework": "Caffe", "cudnn": "R4 (inferred)", "forward_ms": 5.48363, "backward_ms": 10.7821,
    }  # fmt: skip
    return pd.DataFrame([row | columns])


def test_layers_of_networks() -> None:
    kind = KERNEL_TABLES["cnn_layers"]
    titan = DeviceDatasheet(
        "titan", "Maxwell", "GDDR5", 24, 1075 * MEGA, 6.6 * TERA, 336.5 * GIGA, 3.1 * MEGA, 250, False
    )
    frame = layers()
    assert find_table_kind(frame.columns).name == kind.name
    assert convolution_library_names(frame).tolist() == ["cudnn4"]
    assert kind.measured_values(frame)[0] == pytest.approx(0.01626573)  # type: ignore[attr-defined]
    assert kind.unsupported_reasons(frame).tolist() == [""]
    assert float(kind.predict_times(frame, titan, PARAMETERS)[0]) == pytest.approx(0.0163, rel=0.35)
    relu = layers(layer_type="ReLU", input_shape="128x64x55x55", output_shape="128x64x55x55")
    assert float(kind.predict_times(relu, titan, PARAMETERS)[0]) == pytest.approx(
        5 * 4 * 128 * 64 * 55 * 55 / (0.76 * 336.5 * GIGA)
    )
    native = layers(cudnn="none (native im2col+GEMM)")
    assert kind.predict_times(native, titan, PARAMETERS)[0] > kind.predict_times(frame, titan, PARAMETERS)[0]
    assert "DeepCL" in kind.unsupported_reasons(layers(framework="DeepCL", cudnn="")).iloc[0]
    assert "not modelled" in kind.unsupported_reasons(layers(layer_type="")).iloc[0]
    dense = layer_convolution_shapes(
        layers(layer_type="InnerProduct", input_shape="128x256x6x6", output_shape="128x4096"),
        ConvolutionDirection.FORWARD,
    )
    assert float(dense.flops[0]) == 2 * 128 * 256 * 36 * 4096


EXTENTS = {
    "batch": 64.0, "channels": 64.0, "height": 56.0, "width": 56.0, "filters": 64.0,
    "kernel_h": 3.0, "kernel_w": 3.0, "pad_h": 1.0, "pad_w": 1.0,
}  # fmt: skip


def _tensor_time(extents: dict[str, Any] = EXTENTS, *, on: str = "a100-sxm4-80gb", **library: Any) -> float:
    priced = {"algorithms": ("implicit",)} | library
    device = device_datasheet(load_device(on), "fp16")
    shape = convolution_shape(**(EXTENTS | extents))
    costs = convolution_costs(shape, element_bytes=2.0, device=device, parameters=ConvolutionParameters(), **priced)
    return float(fastest_convolution_time(costs))


def test_kernels_for_ampere_ask_for_fewer_operands_from_release_8_1_on() -> None:
    many = {"channels": 512.0, "filters": 512.0}
    assert _tensor_time(many, library=8.1) < 0.95 * _tensor_time(many, library=8.0)
    later, earlier = (_tensor_time(many, on="v100-sxm2-16gb", library=release) for release in (8.1, 8.0))
    assert later == earlier


def test_few_channels_laid_out_last_are_padded_to_four() -> None:
    image = {"channels": 3.0, "kernel_h": 7.0, "kernel_w": 7.0, "height": 224.0, "width": 224.0}
    last = _tensor_time(image, library=8.1, channels_last=True)
    assert last < 0.5 * _tensor_time(image, library=8.1)
    four = _tensor_time(image | {"channels": 4.0}, library=8.1, channels_last=True)
    assert last == pytest.approx(four, rel=0.02)  # a fourth channel is read, not summed for nothing
    assert _tensor_time(library=8.1, channels_last=True) == _tensor_time(library=8.1)  # 64 channels are two steps


def test_a_depthwise_filter_gradient_reads_both_tensors_once_a_tap() -> None:
    depthwise = {"channels": 256.0, "filters": 256.0, "groups": 256.0, "direction": ConvolutionDirection.FILTER}
    assert np.isinf(_tensor_time(depthwise))
    seconds = _tensor_time(depthwise, algorithms=("direct",))
    moved = 9 * 2 * 64 * 56 * 56 * 256 * 2.0  # nine taps, two tensors, two bytes
    assert seconds > moved / (ConvolutionParameters().bandwidth_fraction * 2.039e12)
