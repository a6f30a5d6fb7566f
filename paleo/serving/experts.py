"""Grouped products of the experts of a mixture, as serving engines run them.

A layer's experts are two grouped products between a sort of the tokens by expert and the sum of what returns. Each
expert that a token hits is read once; its rows fill tiles of which half is empty on average; the busiest experts have
more rows than the mean. In the tables that engines tune by

    time = launch + ((hit weights / (share · bandwidth))² + (FLOP of padded rows / (share · peak))²)^½ + tokens / rate.

The constants are fitted together to 14,310 timed layers of vLLM, SGLang and TensorRT-LLM on A100, H100 and B200 in
bf16, fp8 and NVFP4 (aiconfigurator, measured for balanced and power-law routing): 35 % mean error, 22 to 58 % on a
device that is left out of one engine's rows, biases of -8 to +31 %. Single products of as many rows would be 0.4 to 0.8
of what is measured.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from paleo.units import MICROSECOND

Array = npt.NDArray[np.float64]
#: Launches of a layer: sort, permutation, two products, activation, sum.
LAUNCH = 40.0 * MICROSECOND
#: Shares of bandwidth and peak, rows of a tile, share of the bandwidth at which tokens move, and how far the busiest
#: experts exceed the mean under a power law.
BANDWIDTH_SHARE, PEAK_SHARE, TILE, TOKEN_SHARE, SKEW = 0.95, 0.48, 140.0, 0.29, 0.52


def grouped_time(
    *,
    rows: npt.ArrayLike,
    inner: npt.ArrayLike,
    outer: npt.ArrayLike,
    experts: npt.ArrayLike,
    weight_bytes: float,
    peak: float,
    bandwidth: float,
) -> Array:
    """Return the time of one of the two grouped products of a layer [s].

    Parameters
    ----------
    rows : array_like
        Mean rows of each expert that is hit.
    inner, outer : array_like
        Summed and resulting features of an expert on this rank.
    experts : array_like
        Experts that are hit on this rank.
    weight_bytes : float
        Bytes of a weight.
    peak, bandwidth : float
        Dense peak of the arithmetic [FLOP/s] and memory bandwidth [byte/s].

    Returns
    -------
    numpy.ndarray
        Seconds, half of the layer's launches included; shapes are broadcast.
    """
    m, k, n, e = (np.asarray(each, dtype=np.float64) for each in (rows, inner, outer, experts))
    weights = e * k * n
    read = weights * weight_bytes / (BANDWIDTH_SHARE * bandwidth)
    padded = m * (1.0 + SKEW) + 0.5 * TILE
    computed = 2.0 * padded * weights / (PEAK_SHARE * peak)
    moved = 2.0 * e * m * (k + n) / (TOKEN_SHARE * bandwidth)
    return np.asarray(0.5 * LAUNCH + np.hypot(read, computed) + moved)
