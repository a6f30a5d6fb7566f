"""Work on systolic arrays: padding of products, convolutions, recurrent steps and heads to the width of the array."""

from __future__ import annotations

import pytest

from paleo.errors import SpecError
from paleo.operations.base import Kernel, Phase
from paleo.predict import predict
from paleo.pricing.systolic import lane_padded_bytes, systolic_array_flops, systolic_gemm_flops
from paleo.questions import compare, estimate
from paleo.specs.catalog import entry_names
from paleo.specs.device import Device, load_device
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.software import load_software
from paleo.specs.system import load_system
from paleo.tables.run_tables import software_profile_name
from paleo.units import MILLISECOND

ARRAYS = [load_device(name) for name in entry_names("devices") if load_device(name).kind == "tpu"]


def gemm(m: float, n: float, k: float, phase: Phase = "forward") -> Kernel:
    return Kernel("product", "gemm", "gemm", phase, 2 * m * n * k, 0.0, 1.0, 1.0, {"m": m, "n": n, "k": k, "batch": 1})


def conv(n: float, c: float, k: float, side: float, operation: str = "fwd") -> Kernel:
    shape = {"n": n, "c": c, "k": k, "h": side, "w": side, "out_h": side, "out_w": side, "kernel_h": 3, "kernel_w": 3}
    flops = 2 * n * c * k * side * side * 9
    return Kernel("conv", "conv", operation, "forward", flops, 0.0, n * c * side * side, n * k * side * side, shape)


def ratio(kernel: Kernel, device: Device) -> float:
    return float(systolic_array_flops([kernel], device)[0]) / kernel.flops


@pytest.mark.parametrize("device", ARRAYS, ids=lambda device: device.name)
def test_every_tpu_states_an_array_that_its_peak_is_a_multiple_of(device: Device) -> None:
    assert device.matrix_unit is not None and device.matrix_unit.width in (128, 256)
    if device.boost_clock is not None:
        arrays = device.peak["bf16"] / (2 * device.matrix_unit.width**2 * device.boost_clock)
        assert arrays == pytest.approx(round(arrays), rel=0.01)


@pytest.mark.parametrize("device", ARRAYS, ids=lambda device: device.name)
@pytest.mark.parametrize("phase", ["forward", "backward_weight"])
def test_wide_products_are_not_padded_and_none_takes_less_than_it_counts(device: Device, phase: Phase) -> None:
    assert ratio(gemm(4096, 8192, 4096, phase), device) == 1
    for sides in ((1, 1, 1), (8, 4096, 1024), (100, 300, 70), (4096, 13, 512), (129, 257, 1000)):
        assert ratio(gemm(*sides, phase), device) >= 1


def test_a_product_is_padded_on_both_sides_of_the_array() -> None:
    v5e, v6e = load_device("tpu-v5e"), load_device("tpu-v6e")
    assert ratio(gemm(4096, 64, 64), v5e) == 4 and ratio(gemm(4096, 64, 64), v6e) == 16
    assert ratio(gemm(4096, 4096, 128), v5e) == 1 and ratio(gemm(4096, 4096, 128), v6e) == 2


def test_few_rows_take_as_long_as_loading_the_next_tile() -> None:
    assert float(systolic_gemm_flops(1.0, 4096.0, 4096.0, 128.0)) == float(
        systolic_gemm_flops(128.0, 4096.0, 4096.0, 128.0)
    )
    two_cores = load_device("tpu-v4")
    assert ratio(gemm(128, 4096, 4096), two_cores) == 2  # 64 rows a core
    assert ratio(gemm(128, 4096, 4096), load_device("tpu-v5e")) == 1


def test_a_volume_of_32_channels_spread_over_cores_fills_a_sixteenth_of_the_array() -> None:
    v4 = load_device("tpu-v4")
    for operation, of_many in (("fwd", 4 * 384 / 288), ("bwd_data", 4 * 384 / 288), ("bwd_filter", 4)):
        assert ratio(conv(1, 32, 32, 128, operation), v4) == pytest.approx(16)
        assert ratio(conv(64, 32, 32, 128, operation), v4) == pytest.approx(of_many)


def test_channels_of_a_lone_sample_are_padded_in_memory() -> None:
    v4 = load_device("tpu-v4")
    assert lane_padded_bytes(conv(1, 32, 32, 128), v4) == 4 * conv(1, 32, 32, 128).bytes
    assert lane_padded_bytes(conv(64, 32, 32, 128), v4) == conv(64, 32, 32, 128).bytes
    assert lane_padded_bytes(conv(1, 32, 32, 128), load_device("a30")) == conv(1, 32, 32, 128).bytes


def test_heads_of_128_use_half_of_an_array_of_256() -> None:
    attention = Kernel("core", "attention", "flash", "forward", 1e12, 0.0, 1.0, 1.0, {"head_dim": 128})
    assert ratio(attention, load_device("tpu-v5p")) == 1 and ratio(attention, load_device("tpu-v6e")) == 2


def test_recurrent_steps_of_few_rows_wait_for_the_weights() -> None:
    shape = {"hidden": 1024, "batch": 16, "timesteps": 32, "gates": 4, "directions": 1}
    steps = Kernel("steps", "rnn", "lstm.fwd", "forward", 2 * 16 * 32 * 4 * 1024**2, 0.0, 1.0, 1.0, shape)
    assert ratio(steps, load_device("tpu-v3")) == 16  # 8 rows a core, 128 clocks a tile
    gradient = Kernel("steps", "rnn", "lstm.bwd_filter", "backward_weight", steps.flops, 0.0, 1.0, 1.0, shape)
    assert ratio(gradient, load_device("tpu-v3")) == 1


@pytest.mark.parametrize(("chips", "ways", "measured_ms"), [(64, 2, 109.4), (512, 16, 20.723)])
def test_unet3d_on_tpu_v4(chips: int, ways: int, measured_ms: float) -> None:
    """Google's steps of MLPerf Training v1.0 (volumes of 128³, 32 of them), from the intervals between evaluations; a
    quarter too fast, nothing fitted."""
    run = Run(gpus=chips, global_batch=32, strategy=f"spatial={ways},dp=32", dtype="bf16", software="xla-tpu@2021")
    step = predict(load_model("unet3d"), load_system("tpu-v4-pod"), run)
    assert step.step_time == pytest.approx(measured_ms * MILLISECOND, rel=0.27)


@pytest.mark.parametrize(("chips", "batch", "measured_ms"), [(8, 2048, 73.604), (64, 8192, 39.075)])
def test_resnet_50_on_tpu_v4(chips: int, batch: int, measured_ms: float) -> None:
    """Google's steps of MLPerf Training v0.7, with 256 and 128 images a chip."""
    run = Run(gpus=chips, global_batch=batch, dtype="bf16", software="xla-tpu@2021", optimizer="lars")
    step = predict(load_model("resnet50-v1.5"), load_system("tpu-v4-pod"), run)
    assert step.step_time == pytest.approx(measured_ms * MILLISECOND, rel=0.1)


def test_a_task_on_tpus_runs_in_the_code_of_its_submissions() -> None:
    step = estimate("resnet50-v1.5", "tpu-v4-pod", gpus=64, global_batch=8192, target="mlperf:resnet").prediction
    assert step.run.software == "xla-tpu@2021" and not step.warnings
    options = {"gpus": 64, "global_batch": 8192, "target": "mlperf:resnet"}
    study = compare("resnet50-v1.5", ["tpu-v3-pod", "tpu-v4-pod"], **options).comparison
    assert {each.prediction.run.software for each in study.candidates if each.prediction} == {"xla-tpu@2021"}
    with pytest.raises(SpecError, match=r"\(gpu\) and .* \(tpu\) run its task with different software"):
        compare("resnet50-v1.5", ["dgx-a100-80gb", "tpu-v4-pod"], **options)


def test_rows_of_tpus_run_what_xla_compiles() -> None:
    assert software_profile_name({"device": "tpu-v6e", "software": "pytorch-eager"}) == "xla-tpu"
    assert not load_software("xla-tpu@2021").overlap.gradients and load_software("xla-tpu").overlap.gradients
