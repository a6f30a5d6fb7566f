"""Prices of products against the roofline, over random shapes and every GPU of the catalog."""

from __future__ import annotations

import numpy as np
import pytest

from paleo.pricing.calibration_lookup import find_calibrated_parameters
from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.pricing.kernels import device_datasheet
from paleo.specs.catalog import entry_names
from paleo.specs.device import Device, load_device

#: Most that products of 128 and more rows, columns and terms take over roofline and launch on tensor cores. Three would
#: do but for pairs of few tiles with a long sum, which batched kernels do not split.
MOST = 4.5
DEVICES = map(load_device, entry_names("devices"))
CARDS = [device for device in DEVICES if device.kind == "gpu" and device.vendor == "NVIDIA"]
RANDOM = np.random.default_rng(20261123)
M, N, K = (np.floor(2.0 ** RANDOM.uniform(7.0, 14.0, 100)) for _ in range(3))
BATCH = 2.0 ** RANDOM.integers(0, 6, 100)


def priced(device: Device, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Seconds, seconds of arithmetic at peak, seconds at the roofline with a launch."""
    card = device_datasheet(device, dtype)
    entry = find_calibrated_parameters(
        GemmParameters, subject=device.name, architecture=device.architecture, memory_kind=device.memory.kind,
        family="gemm.tensor" if card.tensor_cores else "gemm.simt",
    )  # fmt: skip
    width = 4.0 if dtype == "fp32" else 2.0
    seconds = gemm_time(
        m=M, n=N, k=K, batch=BATCH, element_bytes=width, result_bytes=width, weight_copies=np.inf, device=card,
        parameters=entry.parameters,
    )  # fmt: skip
    arithmetic = 2.0 * M * N * K * BATCH / card.peak_flops_per_s
    traffic = BATCH * width * (M * K + K * N + M * N) / card.memory_bandwidth
    return seconds, arithmetic, np.maximum(arithmetic, traffic) + entry.parameters.launch_time


@pytest.mark.parametrize("device", CARDS, ids=lambda device: device.name)
def test_products_never_exceed_the_peak_and_stay_near_the_roofline(device: Device) -> None:
    for dtype in ("fp32", "fp16"):
        if dtype not in device.peak:
            continue
        seconds, arithmetic, roofline = priced(device, dtype)
        assert (seconds >= arithmetic).all()
        if device_datasheet(device, dtype).tensor_cores:
            assert float((seconds / roofline).max()) <= MOST
