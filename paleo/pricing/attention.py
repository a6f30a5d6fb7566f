"""Fused attention: prefill (and encoder), decode with split keys, and backward.

One thread block owns a tile of query rows and walks over blocks of keys (FlashAttention; Dao et al., 2022, 2023;
Shah et al., 2024). Its time is a start-up cost and, per key block, the tensor-core time of two matrix products and the
time of the exponentials. What differs between implementations is data (`attention_kernels`): tile shapes, whether the
query heads that share a key head are packed into one tile, and how the keys are split over thread blocks. So
calibrations are keyed by *kernel* (fa2, fa3, fa4, trtllm) and phase, not by device.

All sizes broadcast; times are seconds. ``query_length`` counts tokens of one sequence, sequences are of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paleo.pricing.attention_kernels import (
    NATIVE_HEAD_DIMS,
    WARP_GROUP_ROWS,
    AttentionKernel,
    balanced_splits,
    decode_splits,
    kernel,
    key_blocks,
    padded_head_dim,
    tile_shape,
)
from paleo.pricing.parameters import DeviceFigures, floats, parameter
from paleo.pricing.power import felt, slow_down
from paleo.units import MICROSECOND

Array = npt.NDArray[np.float64]
Sizes = Array | float
Mask = npt.NDArray[np.bool_] | bool

#: Resident threads of one multiprocessor on every datacentre GPU since Pascal but Turing (CUDA C++ guide, table of
#: compute capabilities), and the most threads that the cache-write kernel gives to a token.
RESIDENT_THREADS, WRITE_THREADS = 2048.0, 512.0
#: Steepness of the step from L2-resident to streamed keys.
CACHE_STEEPNESS = 8.0


@dataclass(frozen=True, slots=True)
class PrefillParameters:
    """Attention of many query tokens at once: one calibration per kernel, phase and device."""

    launch_time: float = parameter(
        8 * MICROSECOND, low=2 * MICROSECOND, high=40 * MICROSECOND, unit="s", meaning="launches and first loads"
    )
    padding_time: float = parameter(
        1 * MICROSECOND, low=0.05 * MICROSECOND, high=8 * MICROSECOND, unit="s",
        meaning="extra launches where the head dimension has no compiled kernel",
    )  # fmt: skip
    mma_efficiency: float = parameter(
        0.9, low=0.2, high=1.3, unit="1", meaning="tensor-core rate of the two products over peak at boost clock"
    )
    exp_cycles: float = parameter(
        0.0625, low=0.005, high=0.15, unit="cycle", meaning="per score element; 1/16 is the rate of exponentials"
    )
    tile_cycles: float = parameter(
        3000.0, low=100.0, high=40000.0, unit="cycle", meaning="start and end of a query tile at head dimension 128"
    )
    padded_tile_cycles: float = parameter(
        2200.0, low=10.0, high=30000.0, unit="cycle", meaning="added to a tile whose head dimension is padded"
    )
    wave_quantization: float = parameter(
        0.8, low=0.05, high=1.3, unit="1", meaning="share of the last, partly filled wave that is paid"
    )
    bandwidth_fraction: float = parameter(0.9, low=0.4, high=0.96, unit="1", meaning="achieved memory bandwidth")
    norm_order: float = parameter(1.5, low=1.0, high=8.0, unit="1", meaning="overlap of arithmetic and memory traffic")
    write_latency: float = parameter(
        3 * MICROSECOND, low=0.1 * MICROSECOND, high=20 * MICROSECOND, unit="s",
        meaning="residence of a thread block that writes one token into the paged cache",
    )  # fmt: skip
    combine_time: float = parameter(
        2 * MICROSECOND, low=0.05 * MICROSECOND, high=20 * MICROSECOND, unit="s", meaning="merging of split keys"
    )
    cache_fraction: float = parameter(
        0.5, low=0.2, high=1.3, unit="1", fitted=False, meaning="share of L2 in which tensors survive; as in decode"
    )
    l2_bytes_per_cycle: float = parameter(
        40.0, low=4.0, high=100.0, unit="B/cycle", fitted=False, meaning="L2 rate of a multiprocessor; as in decode"
    )
    energy: float = parameter(
        1.0, low=0.1, high=10.0, unit="pJ/FLOP", fitted=False, meaning="energy of a FLOP of the two products"
    )
    backward_efficiency: float = parameter(
        0.8, low=0.3, high=1.2, unit="1", fitted=False,
        meaning="rate of backward's five products against that of forward's two",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class DecodeParameters:
    """Attention of one query token to a cache of keys: one calibration per kernel and device."""

    launch_time: float = parameter(
        8 * MICROSECOND, low=2 * MICROSECOND, high=40 * MICROSECOND, unit="s", meaning="launches and first loads"
    )
    kernel_time: float = parameter(
        1.9 * MICROSECOND, low=0.2 * MICROSECOND, high=8 * MICROSECOND, unit="s",
        meaning="each further small kernel in a captured graph",
    )  # fmt: skip
    mma_efficiency: float = parameter(
        0.6, low=0.1, high=1.5, unit="1", meaning="tensor-core rate on padded tiles over peak at boost clock"
    )
    tile_cycles: float = parameter(
        3000.0, low=100.0, high=40000.0, unit="cycle", meaning="start and end of a tile at head dimension 128"
    )
    scan_cycles: float = parameter(
        1.0,
        low=0.01,
        high=200.0,
        unit="cycle",
        meaning="search of a thread block for its tile, per sequence in the batch",
    )
    wave_quantization: float = parameter(
        0.8, low=0.05, high=1.0, unit="1", meaning="share of the last, partly filled wave that is paid"
    )
    cache_fraction: float = parameter(
        0.6, low=0.2, high=1.2, unit="1", meaning="share of L2 that keys left by the step before survive in"
    )
    bandwidth_fraction: float = parameter(0.9, low=0.4, high=0.96, unit="1", meaning="achieved memory bandwidth")
    l2_bytes_per_cycle: float = parameter(
        20.0, low=4.0, high=100.0, unit="B/cycle", meaning="L2 read rate of one multiprocessor"
    )
    norm_order: float = parameter(2.0, low=1.0, high=10.0, unit="1", meaning="overlap of tile time and memory traffic")
    combine_time: float = parameter(
        2 * MICROSECOND, low=0.05 * MICROSECOND, high=20 * MICROSECOND, unit="s", meaning="merging of split keys"
    )
    combine_step: float = parameter(
        0.1 * MICROSECOND,
        low=0.0005 * MICROSECOND,
        high=1 * MICROSECOND,
        unit="s",
        meaning="merging, per split in a chain",
    )
    write_latency: float = parameter(
        3 * MICROSECOND, low=0.1 * MICROSECOND, high=20 * MICROSECOND, unit="s",
        meaning="residence of a thread block that writes one token into the paged cache",
    )  # fmt: skip
    sequence_time: float = parameter(
        0.01 * MICROSECOND, low=0.0001 * MICROSECOND, high=0.1 * MICROSECOND, unit="s",
        meaning="per sequence of a captured graph that launches unused splits",
    )  # fmt: skip


def cache_write_time(
    *, tokens: Sizes, kv_heads: Sizes, head_dim: Sizes, element_bytes: Sizes, write_latency: float,
    bandwidth: float, device: DeviceFigures,
) -> Array:  # fmt: skip
    """Time to copy new keys and values into a paged cache [s].

    One thread block of min(kv_heads · head_dim, 512) threads copies one token. Few threads a block mean many blocks
    at once: tokens · threads / resident threads rounds of one latency each; many bytes meet the bandwidth.
    """
    n, heads, d = floats(tokens, kv_heads, head_dim)
    rounds = n * np.minimum(heads * d, WRITE_THREADS) / (RESIDENT_THREADS * device.multiprocessors)
    streamed = 4.0 * n * heads * d * element_bytes / bandwidth
    return np.asarray(np.hypot(rounds * write_latency, streamed))


def miss_fraction(footprint: Sizes, capacity: float) -> Array:
    """Share of a repeatedly read footprint that comes from memory: a steep step at the cache's capacity.

    >>> [round(float(share), 3) for share in miss_fraction(np.array([10.0, 20.0, 40.0]), 20.0)]
    [0.004, 0.5, 0.996]
    """
    (moved,) = floats(footprint)
    inverse = capacity / np.maximum(moved, capacity * np.finfo(np.float32).eps)
    return np.asarray(1.0 / (1.0 + inverse**CACHE_STEEPNESS))


def attention_prefill_time(
    *,
    batch: Sizes,
    query_heads: Sizes,
    kv_heads: Sizes,
    query_length: Sizes,
    kv_length: Sizes,
    head_dim: Sizes,
    causal: Mask,
    kernel_name: str,
    device: DeviceFigures,
    parameters: PrefillParameters,
    window: Sizes = 0.0,
    element_bytes: Sizes = 2.0,
    paged: bool = False,
    sustained: float = 0.0,
    activity: float = 1.0,
    flop_factor: float = 1.0,
    traffic_factor: float = 1.0,
) -> Array:
    """Forward attention of ``query_length`` tokens to ``kv_length`` keys [s]; ``paged`` adds the cache write.

    time = launch + hot · ((max(work / S + last wave, longest tile) / clock)^p + (bytes / bandwidth)^p)^(1/p) + merge
           + write

    with work = key blocks · (two products at the tensor rate + exponentials) + tiles · tile_cycles on S
    multiprocessors. Bytes come from L2 as far as they fit; few tiles split their keys (``balanced_splits``) and merge
    partial sums. ``hot`` is the slow-down at the limit of power (`paleo.pricing.power`), which ``sustained`` load feels
    in full and whose ``activity`` is that of the data. Holds from one tile to minutes and for head dimensions to 512.
    ``flop_factor`` and ``traffic_factor`` scale products and bytes (the backward pass). ``window`` 0 is none.
    """
    p, (b, hq, hk, nq, nk, d) = parameters, floats(batch, query_heads, kv_heads, query_length, kv_length, head_dim)
    division = kernel(kernel_name)
    tile = tile_shape(division.tiles if paged else division.dense_tiles or division.tiles, d)
    work = _tiling(division, tile, b, hq, hk, nq, nk, d, causal, window, device)
    padded = ~np.isin(d, NATIVE_HEAD_DIMS)
    start = p.tile_cycles * (0.5 + d / 256.0) + p.padded_tile_cycles * padded
    flops = flop_factor * 4 * padded_head_dim(d) * work.area
    products = flops / (device.flops_per_clock * p.mma_efficiency)
    busy = _busy_cycles(work, products + work.area * p.exp_cycles, start, p.wave_quantization, device.multiprocessors)
    bandwidth = p.bandwidth_fraction * device.memory_bandwidth
    moved = traffic_factor * 2 * d * element_bytes * b * (hq * nq + hk * nk)
    body = _norm(busy / device.clock_hz, _traffic_time(moved, device, p), p.norm_order)
    hot = slow_down(busy=body, flops=flops * work.blocks, dram=moved, energy=p.energy, activity=activity, device=device)
    body = body * (1.0 + (hot - 1.0) * felt(body, sustained))
    split = work.splits > 1
    merge = split * (p.combine_time + 8.0 * work.splits * b * hq * nq * d / bandwidth)
    write = cache_write_time(
        tokens=b * nq, kv_heads=hk, head_dim=d, element_bytes=element_bytes, write_latency=p.write_latency,
        bandwidth=bandwidth, device=device,
    )  # fmt: skip
    return p.launch_time + p.padding_time * padded + body + merge + (write if paged else 0.0)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Query tiles of all heads, the key blocks that they visit, and how their keys are split."""

    tiles: Array
    blocks: Array
    longest: Array
    last: Array
    splits: Array
    area: Array


def _tiling(
    division: AttentionKernel,
    tile: tuple[Array, Array],
    b: Array,
    hq: Array,
    hk: Array,
    nq: Array,
    nk: Array,
    d: Array,
    causal: Mask,
    window: Sizes,
    device: DeviceFigures,
) -> _Tiling:
    rows, columns = tile
    group = np.where(np.asarray(causal) & division.packs, hq / hk, 1.0)
    rows = np.where(nq * group <= WARP_GROUP_ROWS, np.minimum(rows, WARP_GROUP_ROWS), rows)
    tiles, chain = np.ceil(nq * group / rows), np.ceil(nk / columns)
    reach = np.ceil((np.asarray(window) + rows / group) / columns) + 1
    chain = np.where(np.asarray(window) > 0, np.minimum(chain, reach), chain)
    blocks = key_blocks(
        query_tiles=tiles, tokens_per_tile=rows / group, columns=columns, query_length=nq, kv_length=nk,
        causal=causal, window=window,
    )  # fmt: skip
    heads = b * hq / group
    splits = balanced_splits(
        tiles=heads * tiles, blocks=chain, multiprocessors=device.multiprocessors, most=division.most_splits
    )
    longest = np.ceil(chain / splits)
    last = np.where(np.asarray(causal) & (tiles > 1), 1.0, longest)
    return _Tiling(heads * tiles, heads * blocks, longest, last, splits, rows * columns)


def _busy_cycles(work: _Tiling, block: Array, start: Array, wave_quantization: float, multiprocessors: float) -> Array:
    """Cycles of the busiest multiprocessor: its share and what the last wave leaves idle, or the longest tile."""
    waves = work.tiles * work.splits / multiprocessors
    spread = work.blocks * block / multiprocessors + waves * start
    idle = wave_quantization * (np.ceil(waves) - waves) * (work.last * block + start)
    return np.maximum(spread + idle, work.longest * block + start)


def attention_backward_time(
    *,
    batch: Sizes,
    query_heads: Sizes,
    kv_heads: Sizes,
    query_length: Sizes,
    kv_length: Sizes,
    head_dim: Sizes,
    causal: Mask,
    kernel_name: str,
    device: DeviceFigures,
    parameters: PrefillParameters,
    window: Sizes = 0.0,
    element_bytes: Sizes = 2.0,
    sustained: float = 0.0,
    activity: float = 1.0,
) -> Array:
    """Backward attention [s], from the forward calibration and ``backward_efficiency``.

    Five products where the forward has two (scores again, dV, dP, dQ, dK: 2.5 times the FLOP), one exponential, and
    about three times the bytes: q, k, v, o, do read; dq, dk, dv written; dq also accumulated in fp32 (Dao, 2023).
    """
    slower = replace(parameters, mma_efficiency=parameters.mma_efficiency * parameters.backward_efficiency)
    return attention_prefill_time(
        batch=batch, query_heads=query_heads, kv_heads=kv_heads, query_length=query_length, kv_length=kv_length,
        head_dim=head_dim, causal=causal, kernel_name=kernel_name, device=device, parameters=slower, window=window,
        element_bytes=element_bytes, sustained=sustained, activity=activity, flop_factor=2.5, traffic_factor=3.0,
    )  # fmt: skip


def attention_decode_time(
    *,
    batch: Sizes,
    query_heads: Sizes,
    kv_heads: Sizes,
    kv_length: Sizes,
    head_dim: Sizes,
    kernel_name: str,
    device: DeviceFigures,
    parameters: DecodeParameters,
    window: Sizes = 0.0,
    element_bytes: Sizes = 2.0,
    paged: Mask = True,
) -> Array:
    """Attention of one new token per sequence to ``kv_length`` cached keys, in a captured graph [s].

    time = launch + ((W tile / clock)^p + (key bytes from memory or L2)^p)^(1/p) + partial sums + write of the new token

    W is the number of waves of tiles times splits on the multiprocessors. Query heads that share a key head fill one
    padded tile, so a tile costs the same for 1 to ``rows`` of them. Keys that fit L2 stay there between steps.
    """
    division, p = kernel(kernel_name), parameters
    b, hq, hk, nk, d = floats(batch, query_heads, kv_heads, kv_length, head_dim)
    nk = np.where(np.asarray(window) > 0, np.minimum(nk, window), nk)
    rows, columns = tile_shape(division.decode_tiles or division.tiles, d)
    rows = np.minimum(rows, WARP_GROUP_ROWS)
    tiles, blocks, grouped = b * hk * np.ceil(hq / hk / rows), np.ceil(nk / columns), hq > hk
    splits, captured = decode_splits(
        division, batch=b, grouped=grouped, tiles=tiles, blocks=blocks, multiprocessors=device.multiprocessors
    )
    block = 4 * rows * columns * d / (device.flops_per_clock * p.mma_efficiency)
    tile = p.tile_cycles * (0.5 + d / 256.0) + np.ceil(blocks / splits) * block + p.scan_cycles * b
    x = tiles * splits / device.multiprocessors
    waves = p.wave_quantization * np.ceil(x) + (1 - p.wave_quantization) * np.maximum(x, 1.0)
    keys = _traffic_time(2 * b * hk * nk * d * element_bytes, device, p)
    waved = division.decode_splits == "waves"
    copied = waved & grouped & (hk > 1) & (b > 1)
    partial = 8 * splits * b * hq * d * ((splits > 1) | captured)
    side = _traffic_time(2 * b * hq * d * element_bytes * np.where(copied, 3.0, 1.0) + partial, device, p)
    launches = 1.0 * (waved & grouped) + 3.0 * copied
    merge = (splits > 1) * (p.combine_time + p.combine_step * splits) + captured * b * p.sequence_time
    write = cache_write_time(
        tokens=b, kv_heads=hk, head_dim=d, element_bytes=element_bytes, write_latency=p.write_latency,
        bandwidth=p.bandwidth_fraction * device.memory_bandwidth, device=device,
    )  # fmt: skip
    body = _norm(waves * tile / device.clock_hz, keys, p.norm_order)
    return p.launch_time + launches * p.kernel_time + body + side + merge + np.where(paged, write, 0.0)


def _traffic_time(moved: Array, device: DeviceFigures, p: PrefillParameters | DecodeParameters) -> Array:
    """Bytes that were used in the step before: through L2 at its rate, and from memory as far as they do not fit."""
    missed = moved * miss_fraction(moved, p.cache_fraction * device.l2_bytes)
    memory = missed / (p.bandwidth_fraction * device.memory_bandwidth)
    through = moved / (p.l2_bytes_per_cycle * device.multiprocessors * device.clock_hz)
    return _norm(memory, through, 4.0)


def _norm(first: Array, second: Array, order: float) -> Array:
    """(a^p + b^p)^(1/p): a sum at p = 1, a maximum as p grows."""
    high, low = np.maximum(first, second), np.minimum(first, second)
    ratio = np.divide(low, high, out=np.zeros(np.broadcast(low, high).shape), where=high > 0)
    return np.asarray(high * (1.0 + ratio**order) ** (1.0 / order))
