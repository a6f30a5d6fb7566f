"""The experts of one rank, forward: tokens are sorted by expert, multiplied in groups, and put together again.

A rank holds E / ep experts, each split over tp ranks. Of T tokens that visit k experts each, T k / ep reach the rank on
average. Where popularity follows a power law, the busiest of the ranks is timed:

    loads of experts are drawn from the density x^-a between 1 and 0.8 T (a = 0: balanced)
    busiest rank = mean · (1 + skew · √(2 ln ep) · σ / (μ √(experts of a rank))), as the largest of ep normal sums
    experts that are hit: 1 - (1 - load / T)^T of them where routing is random; the rank that is timed has a visit
    time = launch + Σ over both products joined(grouped tiles, weights of the experts that are hit) + sorting

References: Fedus et al., Switch Transformer, arXiv:2101.03961; Gale et al., MegaBlocks, MLSys 2023 (grouped products).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.tiles import Array, TileParameters, joined, product_time

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceFigures

#: Tiles of grouped products: small ones, since an expert has few tokens.
TILES = ((16, 128), (32, 128), (64, 128), (128, 128), (128, 256))
#: Classes of popularity that a rank's experts are summed up in.
CLASSES, SAMPLES = 8, 64
#: Bytes of a token's element in the passes around the products: read in 16 bits, written in 16, added up in fp32.
PASS_BYTES = 8.0
#: Fewest experts that are hit, so that no division is by zero.
LEAST_HIT = 2.0**-30


def popularity(exponent: Array, many: npt.NDArray[np.bool_], tokens: Array) -> tuple[Array, Array]:
    """Return what experts of each class are asked for over the mean, and the coefficient of variation of loads.

    Loads have the density x^-a between two bounds, as benchmarks of mixtures draw them: 1 and four fifths of the
    tokens, or 0.01 and 2 where there are more experts than visits.

    Parameters
    ----------
    exponent : array, shape (rows,)
        Exponent a of the density.
    many : array of bool, shape (rows,)
        True where there are more visits than experts.
    tokens : array, shape (rows,)
        Tokens that are routed.

    Returns
    -------
    loads, spread : array, shapes (CLASSES, rows) and (rows,)
        Dimensionless.
    """
    low, high = np.where(many, 1.0, 0.01), np.where(many, np.maximum(0.8 * tokens, 1.5), 2.0)
    power = 1.0 - np.where(exponent > 0, exponent, 2.0)
    chance = (np.arange(SAMPLES) + 0.5)[:, None] / SAMPLES
    loads = (low**power + chance * (high**power - low**power)) ** (1.0 / power)
    loads = loads / loads.mean(axis=0)
    return loads.reshape(CLASSES, SAMPLES // CLASSES, loads.shape[1]).mean(axis=1), loads.std(axis=0)


def experts_time(
    *,
    tokens: Array,
    hidden: Array,
    inner: Array,
    top_k: Array,
    experts: Array,
    tp: Array,
    ep: Array,
    gated: Array,
    exponent: Array,
    element_bytes: float,
    device: DeviceFigures,
    parameters: TileParameters,
) -> Array:
    """Time of one rank's experts.

    Parameters
    ----------
    tokens : array
        Tokens that are routed, of all ranks.
    hidden, inner : array
        Width of the tokens, and of the experts before they are split.
    top_k, experts : array
        Experts that a token visits, and experts of the layer.
    tp, ep : array
        Ranks that share an expert, and ranks that share the experts.
    gated : array
        1 where an expert has a gate beside its first product, else 0.
    exponent : array
        Exponent of the popularity of experts; 0: every expert has as many tokens.
    element_bytes : float
        Bytes of an element of weights and activations.
    device : DeviceFigures
        Peak of the format of the products.
    parameters : TileParameters
        Calibration of the kernel.

    Returns
    -------
    array
        Seconds from the router's choice to the combined tokens.
    """
    width, local = inner / tp, experts / ep
    loads, spread = popularity(exponent, tokens * top_k > experts, tokens)
    uneven = exponent > 0
    excess = parameters.skew * np.sqrt(2.0 * np.log(ep) / local) * spread
    rows = np.maximum(tokens * top_k / ep * (1.0 + uneven * excess), 1.0)
    rows = np.minimum(rows, tokens * np.minimum(top_k, local))
    share = np.minimum(rows / local * np.where(uneven, loads, 1.0), tokens)
    hit = np.where(uneven, 1.0 - (1.0 - share / tokens) ** tokens, np.minimum(share, 1.0))
    of_expert, count = share / np.maximum(hit, LEAST_HIT), hit * local / CLASSES
    seconds = np.zeros(rows.shape)
    for columns, length in (((1.0 + gated) * width, hidden), (hidden, width)):
        compute = product_time(
            rows=of_expert, columns=columns, length=length, count=count, tiles=TILES, device=device,
            parameters=parameters,
        )  # fmt: skip
        moved = count.sum(axis=0) * columns * length * element_bytes + rows * (length * element_bytes + 2.0 * columns)
        seconds = seconds + joined(compute, moved / (parameters.bandwidth_efficiency * device.memory_bandwidth))
    passes = hidden * rows * PASS_BYTES + tokens * top_k * (hidden + width) * parameters.index
    return parameters.launch + seconds + passes / (parameters.staging * device.memory_bandwidth)
