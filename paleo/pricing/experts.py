"""Time of one rank's experts in inference: tokens are sorted by expert, multiplied in grouped products, and combined.

A rank holds E / ep experts, each split over tp ranks. Of T tokens with k experts each, T k / ep reach the rank on
average. If the popularity of experts follows a power law, the busiest rank has ep^skew times as many.

    an expert of rank i in popularity has tokens in proportion to i^-a (a = 0: balanced)
    experts that are hit: 1 - exp(-tokens) of them for random routing
    time = launch + Σ over both products joined(grouped tiles, weights of the experts that are hit) + sorting

References: Fedus et al., Switch Transformer, arXiv:2101.03961; Gale et al., MegaBlocks, MLSys 2023 (grouped products).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.pricing.tiles import Array, TileParameters, joined, product_time

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceFigures

#: Tiles of grouped products, including small ones, since an expert has few tokens.
TILES = ((16, 128), (32, 128), (64, 128), (128, 128), (128, 256))
#: Classes of popularity into which a rank's experts are grouped.
CLASSES = 8
#: Bytes per element of a token in the passes around the products: read and written in 16 bits, summed in fp32.
PASS_BYTES = 8.0
#: Smallest number of experts that are hit, which avoids a division by zero.
LEAST_HIT = 2.0**-30


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
    """Compute the time of one rank's experts.

    Parameters
    ----------
    tokens : array
        Tokens that are routed, of all ranks.
    hidden, inner : array
        Width of the tokens, and of the unsplit experts.
    top_k, experts : array
        Experts that a token visits, and experts of the layer.
    tp, ep : array
        Ranks that share an expert, and ranks that share the experts.
    gated : array
        1 if an expert has a gate in addition to its first product, else 0.
    exponent : array
        Exponent of the popularity of experts; 0: all experts have equally many tokens.
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
    uneven = exponent > 0
    busiest = np.where(uneven, ep**parameters.skew, 1.0)
    rows = np.minimum(tokens * top_k / ep * busiest, tokens * np.minimum(top_k, local))
    places = (np.arange(CLASSES) + 0.5)[:, None] / CLASSES * local + 0.5
    popularity = places**-exponent
    share = rows / local * popularity / popularity.mean(axis=0)
    hit = np.where(uneven, -np.expm1(-share), np.minimum(share, 1.0))
    of_expert, count = share / np.maximum(hit, LEAST_HIT), hit * local / CLASSES
    seconds = np.zeros(rows.shape)
    for columns, length in (((1.0 + gated) * width, hidden), (hidden, width)):
        compute = product_time(
            rows=of_expert, columns=columns, length=length, count=count, tiles=TILES, device=device,
            parameters=parameters,
        )  # fmt: skip
        moved = count.sum(axis=0) * columns * length * element_bytes + rows * (length * element_bytes + 2.0 * columns)
        seconds = seconds + joined(compute, moved / (parameters.bandwidth_efficiency * device.memory_bandwidth))
    passes = hidden * (rows * PASS_BYTES + tokens * parameters.index)
    return parameters.launch + seconds + passes / (parameters.staging * device.memory_bandwidth)
