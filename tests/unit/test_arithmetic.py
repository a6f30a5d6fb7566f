"""Libraries multiply sixteen-bit numbers in fp32 where a device is faster at that."""

from __future__ import annotations

import pytest

from paleo.predict import Prediction, predict
from paleo.specs.catalog import entry_names
from paleo.specs.device import load_device
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system


def predicted(device: str, dtype: str, calibration: str = "auto") -> Prediction:
    run = Run(batch=32, dtype=dtype, calibration=calibration)
    return predict(load_model("resnet50"), load_system(device), run)


@pytest.mark.parametrize("calibration", ["auto", "ideal"])
def test_half_precision_on_a_geforce_of_pascal_is_no_slower_than_single(calibration: str) -> None:
    """Natively it would take 64 times as long; a step was 28 times too slow."""
    half, single = (predicted("gtx-1080-ti", dtype, calibration) for dtype in ("fp16", "fp32"))
    assert 0.4 * single.step_time < half.step_time < 1.05 * single.step_time
    assert half.mfu < 1.0


@pytest.mark.parametrize("name", entry_names("devices"))
def test_the_arithmetic_chosen_is_the_faster_one(name: str) -> None:
    device = load_device(name)
    for dtype in ("fp16", "bf16"):
        if dtype in device.peak and "fp32" in device.vector_peak:
            assert device.peak_flops_per_s(device.arithmetic_dtype(dtype)) >= device.vector_peak["fp32"]
    assert device.arithmetic_dtype("fp8") == "fp8" and device.arithmetic_dtype("fp32") == "fp32"
