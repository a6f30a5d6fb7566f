"""How fast a million matrix products are priced, against a plain roofline of the same rows.

python benchmarks/gemm_pricing.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from paleo.pricing.gemm import GemmParameters, gemm_time
from paleo.pricing.kernels import device_datasheet
from paleo.specs.device import load_device
from paleo.units import MEGA

ROWS = 500_000


def seconds(call: Callable[[], object], repeats: int = 3) -> float:
    """Least wall time of a few calls."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def main() -> None:
    """Print rows per second of both and their ratio, for matrix units and for ordinary cores."""
    random = np.random.default_rng(0)
    m, n, k = np.rint(2 ** random.uniform(3, 14, (3, ROWS)))
    for dtype, size in (("bf16", 2.0), ("fp32", 4.0)):
        device = device_datasheet(load_device("h100-sxm5-80gb"), dtype)

        def priced(device=device, size=size) -> object:  # type: ignore[no-untyped-def]
            return gemm_time(
                m=m, n=n, k=k, element_bytes=size, result_bytes=size, device=device, parameters=GemmParameters()
            )

        def roofline(device=device, size=size) -> object:  # type: ignore[no-untyped-def]
            moved = size * (m * k + k * n + m * n)
            return np.maximum(2 * m * n * k / device.peak_flops_per_s, moved / device.memory_bandwidth)

        model, plain = seconds(priced), seconds(roofline)
        rate, bound = ROWS / model / MEGA, ROWS / plain / MEGA
        print(f"{dtype}: {rate:.2f} M rows/s; roofline {bound:.1f} M rows/s; {model / plain:.0f} times its cost")


if __name__ == "__main__":
    main()
