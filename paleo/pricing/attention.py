"""Fused attention: prefill (and encoder), decode with split keys, and backward.

One thread block owns a tile of query rows and walks over blocks of keys (FlashAttention; Dao et al., 2022, 2023;
Shah et al., 2024). Its time is a start-up cost and, per key block, the tensor-core time of two matrix products and the
time of the exponentials. What differs between implementations is data (`attention_kernels`): tile shapes, whether the
query heads that share a key head are packed into one tile, and how the keys are split over thread blocks. So
calibrations are keyed by *kernel* (fa2, fa3, fa4, trtllm) and phase, not by device.

All sizes broadcast; times are seconds. ``query_length`` counts tokens of one sequence, sequences are of equal length.

Kernels, with their tiles of queries and keys, packed heads and splits of the keys, are those of FlashAttention-2, -3
and -4 (Dao et al., 2022, 2023; Shah et al., 2024) and of TensorRT-LLM (trtllm-gen, which FlashInfer and vLLM call on
Blackwell), by their public sources.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError, near
from paleo.pricing.kernels import floats
from paleo.pricing.power import felt, slow_down
from paleo.specs.calibration import parameter
from paleo.units import MICROSECOND

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceFigures

Array = npt.NDArray[np.float64]
Sizes = Array | float
Mask = npt.NDArray[np.bool_] | bool

#: Head dimensions that kernels are compiled for; others are zero-padded to the next one.
COMPILED_HEAD_DIMS = (64.0, 96.0, 128.0, 192.0, 256.0, 512.0)
#: Of those, the ones that need no copy of the tensors before the launch.
NATIVE_HEAD_DIMS = (64.0, 128.0, 192.0, 256.0, 512.0)
#: Query rows of one warp group: the tile where no more rows than these exist, in decode above all.
WARP_GROUP_ROWS = 64.0
#: Largest number of splits of FlashAttention-2 in decode, and of sequences in a captured graph (vLLM's default).
WAVE_SPLITS, CAPTURED_BATCH = 128, 512


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """How one implementation divides the work, by its public source.

    ``tiles``: (largest head dimension, query rows, key columns), ascending; ``dense_tiles`` those of keys that lie in a
    row instead of pages, where they differ, ``decode_tiles`` those of one token, where they are not ``tiles`` cut to a
    warp group. ``packs``: query heads that share a key head fill one tile in prefill
    too. ``most_splits``: the most parts into which prefill cuts the keys of one tile when tiles are too few for the
    device; 1 never splits. ``decode_splits``: how decode chooses their number (`decode_splits`). ``longest_first``: the
    tiles of a causal mask start in order of their length, so that short ones fill the end.
    """

    tiles: tuple[tuple[float, float, float], ...]
    packs: bool
    most_splits: int
    decode_splits: Literal["waves", "balanced", "captured", "filling"]
    dense_tiles: tuple[tuple[float, float, float], ...] = ()
    decode_tiles: tuple[tuple[float, float, float], ...] = ()
    longest_first: bool = True


#: FlashAttention-2 (split-KV kernel for pages), -3 (Hopper, paged keys without TMA), -4 (CuTe) and
#: trtllm-gen, whose prefill does not pack heads and whose decode holds up to 32 heads in the narrow side of a tile.
KERNELS = {
    "fa2": AttentionKernel(
        ((64, 64, 256), (128, 64, 128), (512, 64, 64)),
        packs=False, most_splits=1, decode_splits="waves", dense_tiles=((64, 128, 128), (512, 128, 64)),
    ),
    "fa3": AttentionKernel(
        ((96, 192, 128), (128, 128, 128), (192, 128, 96), (512, 128, 80)),
        packs=True, most_splits=32, decode_splits="balanced",
    ),
    "fa4": AttentionKernel(((256, 256, 128), (512, 64, 64)), packs=True, most_splits=32, decode_splits="captured"),
    "trtllm": AttentionKernel(
        ((128, 256, 128), (512, 128, 128)),
        packs=False, most_splits=1, decode_splits="filling", decode_tiles=((512, 32, 256),), longest_first=False,
    ),
}  # fmt: skip


def kernel(name: str) -> AttentionKernel:
    """The division of work of a kernel by name; SpecError with the nearest one."""
    if name not in KERNELS:
        raise SpecError(f"unknown attention kernel {name!r}; {near(name, KERNELS)}")
    return KERNELS[name]


def default_kernel(architecture: str, memory_kind: str = "HBM") -> str:
    """The kernel that current software runs on an architecture; Blackwell cards with graphics memory lack the tensor
    memory that FlashAttention-4 needs.

    >>> default_kernel("Hopper"), default_kernel("Blackwell"), default_kernel("Blackwell", "GDDR7")
    ('fa3', 'fa4', 'fa2')
    """
    if architecture.startswith("Hopper"):
        return "fa3"
    return "fa4" if architecture.startswith("Blackwell") and not memory_kind.startswith("GDDR") else "fa2"


def tile_shape(tiles: tuple[tuple[float, float, float], ...], head_dim: Sizes) -> tuple[Array, Array]:
    """Query rows and key columns of a tile for each head dimension.

    >>> [float(size) for size in tile_shape(KERNELS["fa2"].tiles, 128)]
    [64.0, 128.0]
    """
    limits, rows, columns = (np.array(part, dtype=np.float64) for part in zip(*tiles, strict=True))
    index = np.minimum(np.searchsorted(limits, floats(head_dim)[0]), len(limits) - 1)
    return rows[index], columns[index]


def padded_head_dim(head_dim: Sizes) -> Array:
    """The compiled head dimension that holds ``head_dim``.

    >>> [float(size) for size in padded_head_dim(np.array([64, 72, 80, 128, 160]))]
    [64.0, 96.0, 96.0, 128.0, 192.0]
    """
    compiled, (exact,) = np.array(COMPILED_HEAD_DIMS), floats(head_dim)
    return np.asarray(np.maximum(exact, compiled[np.minimum(np.searchsorted(compiled, exact), len(compiled) - 1)]))


def key_blocks(
    *,
    query_tiles: Sizes,
    tokens_per_tile: Sizes,
    columns: Sizes,
    query_length: Sizes,
    kv_length: Sizes,
    causal: Mask,
    window: Sizes = 0.0,
) -> Array:
    """Key blocks that the query tiles of one head visit, all tiles together.

    Tile i of a causal mask (aligned at the last key) sees ceil((offset + (i + 1) t) / c) blocks of c keys, t tokens a
    tile and offset = kv_length - query_length; the sum over i is taken in closed form, exact where t divides c or c
    divides t and the offset is a multiple of c. A sliding window of w keys drops the blocks before offset + i t - w.

    >>> shape = dict(query_tiles=4, tokens_per_tile=64, columns=128, query_length=256, kv_length=256)
    >>> float(key_blocks(**shape, causal=True))  # 1 + 1 + 2 + 2
    6.0
    """
    n, t, c, nq, nk, span = floats(query_tiles, tokens_per_tile, columns, query_length, kv_length, window)
    offset = np.maximum(nk - nq, 0.0)
    full = n * np.ceil(nk / c)
    seen = t / c * n * (n + 1) / 2 + n * np.maximum(0.0, 1 - t / c) / 2 + n * offset / c
    first = np.ceil(np.clip((span - offset) / t, 0.0, n))
    late = n - first
    hidden = late * (offset + first * t - span) + t * late * (late - 1) / 2
    skipped = np.where(span > 0, np.maximum(hidden / c - 0.5 * late, 0.0), 0.0)
    return np.where(causal, np.maximum(np.minimum(seen, full) - skipped, n), full)


def balanced_splits(*, tiles: Sizes, blocks: Sizes, multiprocessors: float, most: int) -> Array:
    """Parts into which the keys of each tile are cut so that all parts of all tiles fill the device about once.

    The rule of FlashAttention-3's scheduler: b = ceil(1.1 tiles blocks / multiprocessors) blocks a part.

    >>> float(balanced_splits(tiles=8, blocks=64, multiprocessors=132, most=32))
    13.0
    """
    n, b = floats(tiles, blocks)
    share = np.ceil(n * b * 1.1 / multiprocessors)
    return np.clip(np.ceil(b / np.maximum(share, 1.0)), 1.0, float(most))


def filling_splits(*, tiles: Sizes, blocks: Sizes, multiprocessors: float) -> Array:
    """As many parts as leave no more tiles than multiprocessors; at least one, at most one a key block.

    >>> [float(parts) for parts in filling_splits(tiles=np.array([1.0, 50.0, 200.0]), blocks=8, multiprocessors=148)]
    [8.0, 2.0, 1.0]
    """
    n, b = floats(tiles, blocks)
    return np.clip(np.floor(multiprocessors / n), 1.0, b)


def decode_splits(
    division: AttentionKernel,
    *,
    batch: Array,
    grouped: npt.NDArray[np.bool_],
    tiles: Array,
    blocks: Array,
    multiprocessors: float,
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Parts of the keys of each tile of one token, and whether a captured graph launches them whatever the length.

    ``waves`` fills waves of two blocks a multiprocessor (`wave_splits`), ``balanced`` one wave (`balanced_splits`);
    ``captured`` launches the most there are wherever the batch is one that graphs are captured for; ``filling`` leaves
    no more parts than multiprocessors (`filling_splits`).
    """
    never = np.zeros(np.shape(tiles), dtype=np.bool_)
    if division.decode_splits == "waves":
        return wave_splits(tiles=tiles, blocks=np.where(grouped, blocks, 1.0), slots=2 * multiprocessors), never
    if division.decode_splits == "filling":
        return filling_splits(tiles=tiles, blocks=blocks, multiprocessors=multiprocessors), never
    captured = batch <= CAPTURED_BATCH
    if division.decode_splits == "captured":
        return np.broadcast_arrays(np.where(captured, float(division.most_splits), 1.0), blocks)[0], captured
    parts = balanced_splits(tiles=tiles, blocks=blocks, multiprocessors=multiprocessors, most=division.most_splits)
    return parts, captured


def wave_splits(*, tiles: Sizes, blocks: Sizes, slots: float, most: int = WAVE_SPLITS) -> Array:
    """The fewest splits whose waves are at least 85 % as full as those of the best split.

    FlashAttention-2's ``num_splits_heuristic``: ``slots`` thread blocks run at once; no split where the tiles fill
    80 % of them; a number of splits that leaves the largest part as long as one fewer would is passed over.

    >>> float(wave_splits(tiles=1, blocks=512, slots=216)), float(wave_splits(tiles=400, blocks=8, slots=216))
    (128.0, 1.0)
    """
    n, b = np.broadcast_arrays(*floats(tiles, blocks))
    shape, (n, b) = n.shape, (n.ravel(), b.ravel())
    result = np.ones(n.shape)
    open_rows = np.flatnonzero((n < 0.8 * slots) & (b > 1))
    if open_rows.size:
        splits = np.arange(1.0, min(most, int(slots), int(b[open_rows].max())) + 1)
        result[open_rows] = _fewest_full(n[open_rows], b[open_rows], splits, slots)
    return result.reshape(shape)


def _fewest_full(n: Array, b: Array, splits: Array, slots: float) -> Array:
    best, chosen = np.zeros(n.shape), np.zeros(n.shape)
    fullness = []
    for s in splits:
        waves = n * s / slots
        shorter = (s == 1) | (np.ceil(b / s) != np.ceil(b / max(s - 1, 1)))
        fullness.append(np.where((s <= b) & shorter, waves / np.ceil(waves), 0.0))
        best = np.maximum(best, fullness[-1])
    for s, full in zip(splits, fullness, strict=True):
        chosen = np.where((chosen == 0) & (full >= 0.85 * best), s, chosen)
    return np.maximum(chosen, 1.0)


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
    tail: Array
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
    uneven = np.asarray(causal) & (tiles > 1)
    last = np.where(uneven, float(division.longest_first), longest)
    queued = heads * tiles * splits > device.multiprocessors
    tail = np.where(uneven & queued & (not division.longest_first), longest, 0.0)
    return _Tiling(heads * tiles, heads * blocks, longest, last, tail, splits, rows * columns)


def _busy_cycles(work: _Tiling, block: Array, start: Array, wave_quantization: float, multiprocessors: float) -> Array:
    """Cycles of the busiest multiprocessor: its share and what the last wave leaves idle, or the longest tile.

    Tiles of lengths 0 to L that start in any order leave multiprocessors idle for L - L/3 at the end: one of them has
    just begun its longest tile, the mean of the others has L/3 to go (residual life E[X²] / 2 E[X] of a renewal
    process; Cox, Renewal Theory, 1962). Fits to B200 and GB200 find 0.66 and 0.74 of L.
    """
    waves = work.tiles * work.splits / multiprocessors
    spread = work.blocks * block / multiprocessors + waves * start
    idle = wave_quantization * ((np.ceil(waves) - waves) * (work.last * block + start) + work.tail * block)
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
