"""Time of the MoE experts of one rank in inference: sorted tokens, grouped GEMMs, combined results.

A rank holds E / ep experts, each split over tp ranks. Of T tokens that visit k experts each, T k / ep reach the rank on
average. Where popularity follows a power law, the busiest of the ranks determines the time:

    loads of experts are drawn from the density x^-a between 1 and 0.8 T, or 200 for few tokens (a = 0: even)
    n = experts of a rank;  σ, μ, g: deviation, mean and skewness of the loads;  y = largest of ep normal numbers
    busiest rank = mean · (1 + z · σ / (μ √n) · √(1 - 1/ep)),  z = y + (y² - 1) · g / (6 √n)
    experts that are hit: 1 - (1 - load / T)^T of them; the busiest rank has at least one visit
    time = launch + Σ over both products roofline(grouped tiles, weights of the experts that are hit) + passes

Passes (sorting, activation, sum over a token's visits) run over all visits of the tokens on the rank, those to experts
of other ranks included. In vLLM with Triton's kernels passes take 1.9 to 2.1 ps an element of 16 bits on A100, H100 and
B200, whose bandwidths differ by a factor of four. Around other kernels they take the time of their bytes.

References: Fedus et al., Switch Transformer, arXiv:2101.03961; Gale et al., MegaBlocks, MLSys 2023 (grouped products);
Blom, Statistical Estimates and Transformed Beta-Variables, 1958 (largest of normal numbers); Cornish and Fisher, 1938,
Moments and Cumulants in the Specification of Distributions (skewness).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.pricing.engine_gemm import Array, EngineGemmParameters, Tile, engine_gemm_time, roofline_with_overlap_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paleo.pricing.kernels import DeviceDatasheet

#: Tiles of grouped products, including small ones, since an expert has few tokens.
GROUPED_GEMM_TILES: tuple[Tile, ...] = ((16, 128), (32, 128), (64, 128), (128, 128), (128, 256))
#: Tile of Triton's kernels where no file of tuned ones is found: for no more tokens than a rank has experts, and for
#: more; and that of products with blocks of scales, for few tokens in vLLM, and for more.
#: https://github.com/sgl-project/sglang, fused_moe_triton_config.py; https://github.com/vllm-project/vllm, fused_moe.py
_UNTUNED_TRITON_TILES = ((16, 32), (64, 64))
_UNTUNED_BLOCK_SCALED_TILES = ((16, 128), (64, 128))
_FEW_TOKEN_LIMIT = 64.0
#: Tiles of products with blocks of scales in the files of tuned ones, which engines have for published networks.
TUNED_BLOCK_SCALED_TILES: tuple[Tile, ...] = ((16, 128), (32, 128), (64, 128), (128, 128))
#: Sums whose length is a multiple of this are read in vectors by Triton's kernels.
_VECTOR_LOAD_ELEMENTS = 16.0
#: Classes of popularity into which a rank's experts are grouped.
POPULARITY_CLASSES = 8
#: Loads in benchmarks of mixtures: at most this share of the tokens beside at least one, and the ratio of the most to
#: the least where there are no more visits than experts.
_MAX_EXPERT_TOKEN_SHARE, _FEW_VISITS_LOAD_RATIO = 0.8, 200.0
#: Bytes per element of a token in the passes around the products: read and written in 16 bits, summed in fp32.
_PASS_BYTES_PER_ELEMENT = 8.0
#: Smallest number of experts that are hit, which avoids a division by zero.
_MIN_ACTIVE_EXPERTS = 2.0**-30
#: Added to exponents, so that no integral of a power is a logarithm.
_POWER_LAW_EXPONENT_OFFSET = 2.0**-20


def _expected_normal_maximum(count: Array) -> Array:
    """Compute the expected maximum of n standard normal numbers, by Blom's plotting position.

    Parameters
    ----------
    count : array
        Number n of normal numbers.

    Returns
    -------
    array
        In standard deviations above the mean.

    References
    ----------
    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.22 (inverse of the normal distribution).

    Examples
    --------
    >>> _expected_normal_maximum(np.array([1.0, 2.0, 64.0])).round(2)
    array([0.  , 0.59, 2.34])
    """
    t = np.sqrt(2.0 * np.log((count + 0.25) / 0.625))
    return np.where(count > 1.0, t - (2.30753 + 0.27061 * t) / (1.0 + 0.99229 * t + 0.04481 * t * t), 0.0)


def power_law_expert_loads(exponent: Array, ratio: Array, ranks: Array, local: Array) -> tuple[Array, Array]:
    """Compute the uneven load of MoE experts whose popularity follows a power law.

    Loads have the density x^-a between 1 and `ratio`. Their moments have a closed form, as has the share of all visits
    that the less popular experts have.

    Parameters
    ----------
    exponent : array, shape (rows,)
        Exponent a of the density.
    ratio : array, shape (rows,)
        Most over least load of an expert.
    ranks : array, shape (rows,)
        Number of expert-parallel ranks that share the experts.
    local : array, shape (rows,)
        Number of experts of a rank.

    Returns
    -------
    classes, busiest : array, shapes (POPULARITY_CLASSES, rows) and (rows,)
        Load of each class of experts over an expert's mean load; load of the busiest rank over a rank's mean load [-].
    """
    power = exponent + _POWER_LAW_EXPONENT_OFFSET

    def integral(order: float, end: Array) -> Array:
        return np.asarray((end ** (order - power) - 1.0) / (order - power))

    whole, mean, square, cube = (integral(order, ratio) for order in (1.0, 2.0, 3.0, 4.0))
    mean, square, cube = mean / whole, square / whole, cube / whole
    deviation = np.sqrt(square - mean**2)
    skewness = (cube - 3.0 * mean * square + 2.0 * mean**3) / deviation**3
    z = _expected_normal_maximum(ranks)
    z = z + (ranks > 1.0) * np.maximum((z * z - 1.0) * skewness / (6.0 * np.sqrt(local)), -z)
    busiest = 1.0 + z * deviation / mean * np.sqrt((1.0 - 1.0 / ranks) / local)
    groups = np.clip(np.round(local), 1.0, POPULARITY_CLASSES)
    group = np.floor((np.arange(POPULARITY_CLASSES) + 0.5)[:, None] / POPULARITY_CLASSES * groups)
    parts = ((group + step) / groups for step in (0.0, 1.0))
    ends = ((1.0 + part * (ratio ** (1.0 - power) - 1.0)) ** (1.0 / (1.0 - power)) for part in parts)
    less, more = (integral(2.0, end) for end in ends)
    classes = more - less
    return classes / classes.mean(axis=0), busiest


def expert_gemm_tiles(
    family: str, tokens: Array, local: Array, untuned: Array | float | None = None
) -> tuple[Tile, ...]:
    """Return the tile shapes from which a kernel of grouped expert GEMMs chooses.

    Parameters
    ----------
    family : str
        Calibration family, such as ``experts.triton-sglang.bf16``: kernel and scaling.
    tokens, local : array
        Tokens on the rank, and its experts.
    untuned : array, optional
        1 where Triton's kernel is untuned and has a single tile; by default so in SGLang.

    Returns
    -------
    tuple of (rows, columns)
        Numbers, or arrays with one tile per configuration.
    """
    if "triton" not in family:
        return GROUPED_GEMM_TILES
    if family.endswith("block8"):
        (few_rows, columns), (rows, _) = _UNTUNED_BLOCK_SCALED_TILES
        return ((np.where(("vllm" in family) & (tokens <= _FEW_TOKEN_LIMIT), few_rows, rows), columns),)
    alone = float("sglang" in family) if untuned is None else untuned
    few = tokens <= local
    height, width = (np.where(few, *sides) for sides in zip(*_UNTUNED_TRITON_TILES, strict=True))
    return tuple((np.where(alone, height, m), np.where(alone, width, n)) for m, n in GROUPED_GEMM_TILES)


def expert_ffn_time(
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
    device: DeviceDatasheet,
    parameters: EngineGemmParameters,
    tiles: Sequence[Tile] = GROUPED_GEMM_TILES,
    visitors_only: Array | float = 0.0,
    unfiltered: Array | float = 0.0,
    padded: bool = False,
    triton: bool = False,
) -> Array:
    """Compute the time of the expert FFN (GEMMs and token permutation) on the busiest expert-parallel rank.

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
    device : DeviceDatasheet
        Datasheet values, with the peak of the number format of the products.
    parameters : EngineGemmParameters
        Calibrated parameters of the kernel on the device.
    tiles : sequence of (rows, columns)
        Tiles of the kernel.
    visitors_only : array
        1 where the rank holds only tokens that visit its experts; 0 where it holds all tokens.
    unfiltered : array
        1 where visits to experts of other ranks are computed, too, like one more expert.
    padded : bool
        True if passes run over as many visits of each expert as the most popular one has.
    triton : bool
        True if passes over visits take a time for each element, whatever the bandwidth.

    Returns
    -------
    array
        Seconds from the router's choice to the combined tokens.
    """
    width, local = inner / tp, experts / ep
    uneven = exponent > 0
    ratio = np.where(
        tokens * top_k > experts, np.maximum(_MAX_EXPERT_TOKEN_SHARE * tokens, 1.5), _FEW_VISITS_LOAD_RATIO
    )
    loads, busiest = power_law_expert_loads(exponent, ratio, ep, local)
    rows = np.maximum(tokens * top_k / ep * np.where(uneven, busiest, 1.0), 1.0)
    rows = np.minimum(rows, tokens * np.minimum(top_k, local))
    share = np.minimum(rows / local * np.where(uneven, loads, 1.0), tokens)
    hit = np.where(uneven, 1.0 - (1.0 - share / tokens) ** tokens, np.minimum(share, 1.0))
    of_expert, count = share / np.maximum(hit, _MIN_ACTIVE_EXPERTS), hit * local / POPULARITY_CLASSES
    spread = tokens * (1.0 - (1.0 - rows / (tokens * top_k)) ** top_k)
    visitors = np.where(uneven, spread, np.minimum(tokens, rows))
    visits = np.where(visitors_only, visitors, tokens) * top_k
    others = np.where(unfiltered, np.maximum(visits - rows, 0.0), 0.0)
    of_expert, count = np.vstack([of_expert, np.maximum(others, 1.0)]), np.vstack([count, others > 0.0])
    seconds = np.zeros(rows.shape)
    for columns, length in (((1.0 + gated) * width, hidden), (hidden, width)):
        compute = engine_gemm_time(
            rows=of_expert, columns=columns, length=length, count=count, tiles=tiles, device=device,
            parameters=parameters,
        )  # fmt: skip
        compute = compute * np.where(length % _VECTOR_LOAD_ELEMENTS > 0.0, parameters.unaligned_time_ratio, 1.0)
        tokens_moved = (rows + others) * (length * element_bytes + 2.0 * columns)
        traffic = count.sum(axis=0) * columns * length * element_bytes + tokens_moved
        traffic = traffic / (parameters.bandwidth_efficiency * device.memory_bandwidth)
        seconds = seconds + roofline_with_overlap_loss(compute, traffic)
    passed = local * np.maximum(share.max(axis=0), 1.0) if padded else visits
    rate = parameters.pass_bandwidth_share * device.memory_bandwidth
    of_element = parameters.time_per_element if triton else parameters.index_bytes_per_element / rate
    passes = passed * (hidden + width) * of_element
    return parameters.launch_time + seconds + hidden * rows * _PASS_BYTES_PER_ELEMENT / rate + passes
