"""Time of fp8 and NVFP4 products in inference engines: scales by tensor, by blocks of 128 or of 16, with quantisation.

    time = launch + ((product's arithmetic)³ + (operands and result over the bandwidth)³)^(1/3) + quantisation
    quantisation = the activations read in 16 bits and written narrow, at a share of the bandwidth

Formats: Micikevicius et al., "FP8 formats for deep learning", arXiv:2209.05433; scales of 128 elements as in
DeepSeek-V3 (arXiv:2412.19437, section 3.3); NVFP4 has a scale of one byte for 16 elements (NVIDIA, 2025).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.pricing.tiles import Array, TileParameters, behind_host, joined, product_time

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceFigures

#: Tiles of the libraries, and the numbers of parts into which they split a sum.
TILES, SPLITS = ((128, 256), (128, 128), (128, 64), (128, 32), (64, 64), (64, 32)), (1, 4)
#: Bytes of an element with its share of the scales.
ELEMENT_BYTES = {"fp8": 1.0, "fp4": 0.5 + 1.0 / 16.0}


def narrow_product_time(
    *, m: Array, n: Array, k: Array, element_bytes: float, device: DeviceFigures, parameters: TileParameters
) -> Array:
    """Compute the time of C[m,n] = A[m,k] B[k,n], with activations A first quantised from 16 bits.

    Parameters
    ----------
    m, n, k : array
        Extents, at least 1.
    element_bytes : float
        Bytes of a narrow element, its scales included.
    device : DeviceFigures
        Peak of the narrow format.
    parameters : TileParameters
        Calibration of the kernel.

    Returns
    -------
    array
        Seconds of a call.
    """
    compute = product_time(
        rows=m, columns=n, length=k, tiles=TILES, splits=SPLITS, device=device, parameters=parameters
    )
    traffic = ((m + n) * k * element_bytes + 2.0 * m * n) / device.memory_bandwidth
    quantised = m * k * (2.0 + element_bytes) / (parameters.staging * device.memory_bandwidth)
    body = joined(compute, traffic / parameters.bandwidth_efficiency)
    return behind_host(parameters.launch + body + quantised, parameters.host)
