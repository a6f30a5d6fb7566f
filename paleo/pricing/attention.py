"""Time of fused attention: prefill (and encoders), decode with split keys, and backward.

One thread block owns a tile of query rows and loops over blocks of keys (FlashAttention; Dao et al., 2022, 2023; Shah
et al., 2024). Its time is a start-up cost plus, per key block, the tensor-core time of two matrix products and the time
of the exponentials. Implementations differ only in data (`AttentionKernel`): tile shapes, packing of query heads that
share a key head, and the split of the keys over thread blocks. So calibrations are keyed by *kernel* (fa2, fa3, fa4,
trtllm) and phase, not only by device.

All sizes broadcast; times are in seconds. ``query_length`` counts tokens of one sequence; all sequences have the same
length.

Tiles, packed heads and splits are those of the public sources of FlashAttention-2, -3 and -4 (Dao et al., 2022, 2023;
Shah et al., 2024) and of TensorRT-LLM (trtllm-gen, which FlashInfer and vLLM call on Blackwell).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError, suggest_names
from paleo.pricing.engine_gemm import wave_count
from paleo.pricing.kernels import DeviceDatasheet, as_float_arrays
from paleo.pricing.memory import THREADS_PER_MULTIPROCESSOR, cache_miss_rate, smooth_maximum
from paleo.pricing.power import power_slowdown, slowdown_share
from paleo.specs.calibration import parameter
from paleo.units import MICROSECOND

Array = npt.NDArray[np.float64]
Numeric = Array | float
Mask = npt.NDArray[np.bool_] | bool

#: Head dimensions for which kernels are compiled; other sizes are zero-padded to the next one.
_COMPILED_HEAD_DIMS = (64.0, 96.0, 128.0, 192.0, 256.0, 512.0)
#: Compiled head dimensions that need no copy of the tensors before the launch.
_NATIVE_HEAD_DIMS = (64.0, 128.0, 192.0, 256.0, 512.0)
#: Query rows of one warp group, and of the tile if there are no more rows, above all in decode.
_WARP_GROUP_ROWS = 64.0
#: Largest number of splits of FlashAttention-2 in decode, and largest number of sequences in a captured graph (vLLM's
#: default).
_MAX_WAVE_KV_SPLITS, _MAX_CAPTURED_BATCH = 128, 512


@dataclass(frozen=True, slots=True)
class AttentionKernel:
    """Tile shapes and work division of one fused-attention implementation (FlashAttention, trtllm-gen).

    Attributes
    ----------
    tiles : tuple of (float, float, float)
        Largest head dimension, query rows and key columns of each compiled tile, ascending.
    packs_query_heads : bool
        True if query heads that share a key head fill one tile in prefill, too.
    max_kv_splits : int
        Most parts into which prefill splits the keys of a tile if there are too few tiles for the device; 1: never.
    decode_split_rule : str
        Rule for the number of split-KV splits in decode (`_decode_kv_splits`).
    contiguous_kv_tiles : tuple
        Tiles for contiguous instead of paged keys, if different.
    decode_tiles : tuple
        Tiles for one query token, if not ``tiles`` limited to a warp group.
    starts_longest_tiles_first : bool
        True if the tiles of a causal mask start in the order of their length, so that short ones fill the end.
    pads_values : bool
        True if values are padded to the width of the keys.
    """

    tiles: tuple[tuple[float, float, float], ...]
    packs_query_heads: bool
    max_kv_splits: int
    decode_split_rule: Literal["waves", "balanced", "captured", "filling"]
    contiguous_kv_tiles: tuple[tuple[float, float, float], ...] = ()
    decode_tiles: tuple[tuple[float, float, float], ...] = ()
    starts_longest_tiles_first: bool = True
    pads_values: bool = False


#: FlashAttention-2 (split-KV kernel for pages), -3 (Hopper, paged keys without TMA), -4 (CuTe), and trtllm-gen. Prefill
#: of trtllm-gen does not pack heads; in its decode up to 32 heads are the narrow side of a tile.
ATTENTION_KERNELS = {
    "fa2": AttentionKernel(
        ((64, 64, 256), (128, 64, 128), (512, 64, 64)),
        packs_query_heads=False, max_kv_splits=1, decode_split_rule="waves",
        contiguous_kv_tiles=((64, 128, 128), (512, 128, 64)),
        pads_values=True,
    ),
    "fa3": AttentionKernel(
        ((96, 192, 128), (128, 128, 128), (192, 128, 96), (512, 128, 80)),
        packs_query_heads=True, max_kv_splits=32, decode_split_rule="balanced",
    ),
    "fa4": AttentionKernel(((256, 256, 128), (512, 64, 64)), packs_query_heads=True, max_kv_splits=32,
        decode_split_rule="captured"),
    "trtllm": AttentionKernel(
        ((128, 256, 128), (512, 128, 128)),
        packs_query_heads=False, max_kv_splits=1, decode_split_rule="filling", decode_tiles=((512, 32, 256),),
        starts_longest_tiles_first=False,
    ),
}  # fmt: skip


def attention_kernel(name: str) -> AttentionKernel:
    """Look up an attention kernel: its tile shapes, and how it splits work over thread blocks.

    Parameters
    ----------
    name : str
        Name of the kernel, such as ``fa3``.

    Returns
    -------
    AttentionKernel
        Properties of the kernel.

    Raises
    ------
    SpecError
        If no kernel has that name; the nearest one is named.
    """
    if name not in ATTENTION_KERNELS:
        raise SpecError(f"unknown attention kernel {name!r}; {suggest_names(name, ATTENTION_KERNELS)}")
    return ATTENTION_KERNELS[name]


def default_attention_kernel(architecture: str, memory_kind: str = "HBM") -> str:
    """Return the name of the attention kernel that current software runs on a GPU architecture.

    Parameters
    ----------
    architecture : str
        Architecture of the device, such as ``Hopper``.
    memory_kind : str, default 'HBM'
        Memory technology. Cards with GDDR lack the tensor memory that FlashAttention-4 needs.

    Returns
    -------
    str
        A key of `ATTENTION_KERNELS`.

    Examples
    --------
    >>> (default_attention_kernel("Hopper"), default_attention_kernel("Blackwell"),
    ... default_attention_kernel("Blackwell", "GDDR7"))
    ('fa3', 'fa4', 'fa2')
    """
    if architecture.startswith("Hopper"):
        return "fa3"
    return "fa4" if architecture.startswith("Blackwell") and not memory_kind.startswith("GDDR") else "fa2"


def tile_shape(tiles: tuple[tuple[float, float, float], ...], head_dim: Numeric) -> tuple[Array, Array]:
    """Return the query rows and key columns of the compiled tile that an attention kernel uses for each head dimension.

    Parameters
    ----------
    tiles : tuple of tuple of (float, float, float)
        Largest head dimension, rows and columns of each compiled tile, ascending.
    head_dim : array-like
        Elements of a head.

    Returns
    -------
    tuple of (ndarray, ndarray)
        (query rows, key columns), in the shape of `head_dim`.

    Examples
    --------
    >>> [float(size) for size in tile_shape(ATTENTION_KERNELS["fa2"].tiles, 128)]
    [64.0, 128.0]
    """
    limits, rows, columns = (np.array(part, dtype=np.float64) for part in zip(*tiles, strict=True))
    index = np.minimum(np.searchsorted(limits, as_float_arrays(head_dim)[0]), len(limits) - 1)
    return rows[index], columns[index]


def padded_head_dim(head_dim: Numeric) -> Array:
    """Return the head dimension of the compiled attention kernel that runs each head dimension.

    Kernels are compiled for a few head dimensions only. Smaller heads are padded with zeros to the next one.

    Parameters
    ----------
    head_dim : array-like
        Elements of a head.

    Returns
    -------
    ndarray
        Elements; the shape of `head_dim`.

    Examples
    --------
    >>> [float(size) for size in padded_head_dim(np.array([64, 72, 80, 128, 160]))]
    [64.0, 96.0, 96.0, 128.0, 192.0]
    """
    compiled, (exact,) = np.array(_COMPILED_HEAD_DIMS), as_float_arrays(head_dim)
    return np.asarray(np.maximum(exact, compiled[np.minimum(np.searchsorted(compiled, exact), len(compiled) - 1)]))


def visited_key_blocks(
    *,
    query_tiles: Numeric,
    tokens_per_tile: Numeric,
    columns: Numeric,
    query_length: Numeric,
    kv_length: Numeric,
    causal: Mask,
    window: Numeric = 0.0,
) -> Array:
    """Count the key blocks that all query tiles of one head visit together, under a causal mask or a sliding window.

    Tile i under a causal mask (aligned at the last key) visits ceil((offset + (i + 1) t) / c) blocks of c keys. A tile
    has t tokens, and offset = kv_length - query_length. The sum over i has a closed form, which is exact if t divides c
    or c divides t, and the offset is a multiple of c. A sliding window of w keys skips the blocks before offset + i t -
    w.

    Parameters
    ----------
    query_tiles : array-like
        Tiles of one head.
    tokens_per_tile : array-like
        Query tokens of a tile.
    columns : array-like
        Keys of a block.
    query_length, kv_length : array-like
        Tokens of one sequence whose queries are computed, and keys that they see.
    causal : array-like of bool
        True where a query attends only to keys up to its own position.
    window : array-like, default 0.0
        Keys that a query attends to at most; 0 is no window.

    Returns
    -------
    ndarray
        Blocks; arguments broadcast.

    Examples
    --------
    >>> shape = dict(query_tiles=4, tokens_per_tile=64, columns=128, query_length=256, kv_length=256)
    >>> float(visited_key_blocks(**shape, causal=True))  # 1 + 1 + 2 + 2
    6.0
    """
    n, t, c, nq, nk, span = as_float_arrays(query_tiles, tokens_per_tile, columns, query_length, kv_length, window)
    offset = np.maximum(nk - nq, 0.0)
    full = n * np.ceil(nk / c)
    seen = t / c * n * (n + 1) / 2 + n * np.maximum(0.0, 1 - t / c) / 2 + n * offset / c
    first = np.ceil(np.clip((span - offset) / t, 0.0, n))
    late = n - first
    hidden = late * (offset + first * t - span) + t * late * (late - 1) / 2
    skipped = np.where(span > 0, np.maximum(hidden / c - 0.5 * late, 0.0), 0.0)
    return np.where(causal, np.maximum(np.minimum(seen, full) - skipped, n), full)


def balanced_kv_splits(*, tiles: Numeric, blocks: Numeric, multiprocessors: float, most: int) -> Array:
    """Compute the number of split-KV splits with which all thread blocks fill the device about once.

    This is the rule of FlashAttention-3's scheduler: b = ceil(1.1 tiles blocks / multiprocessors) blocks per part.

    Parameters
    ----------
    tiles : array-like
        Tiles of queries, all heads and sequences together.
    blocks : array-like
        Key blocks of each tile.
    multiprocessors : float
        Multiprocessors of the device.
    most : int
        Largest number of split-KV splits of a tile.

    Returns
    -------
    ndarray
        Split-KV splits of each tile.

    Examples
    --------
    >>> float(balanced_kv_splits(tiles=8, blocks=64, multiprocessors=132, most=32))
    13.0
    """
    n, b = as_float_arrays(tiles, blocks)
    share = np.ceil(n * b * 1.1 / multiprocessors)
    return np.clip(np.ceil(b / np.maximum(share, 1.0)), 1.0, float(most))


def device_filling_kv_splits(*, tiles: Numeric, blocks: Numeric, multiprocessors: float) -> Array:
    """Compute the largest number of split-KV splits with which tiles times splits fit the multiprocessors.

    Parameters
    ----------
    tiles : array-like
        Tiles of queries, all heads and sequences together.
    blocks : array-like
        Key blocks of each tile.
    multiprocessors : float
        Multiprocessors of the device.

    Returns
    -------
    ndarray
        Parts of each tile: at least one, at most one per key block.

    Examples
    --------
    >>> tiles = np.array([1.0, 50.0, 200.0])
    >>> device_filling_kv_splits(tiles=tiles, blocks=8, multiprocessors=148).tolist()
    [8.0, 2.0, 1.0]
    """
    n, b = as_float_arrays(tiles, blocks)
    return np.clip(np.floor(multiprocessors / n), 1.0, b)


def _decode_kv_splits(
    division: AttentionKernel,
    *,
    batch: Array,
    grouped: npt.NDArray[np.bool_],
    tiles: Array,
    blocks: Array,
    multiprocessors: float,
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Compute the number of split-KV splits that a decode kernel uses for each tile, by the kernel's rule.

    The rule ``waves`` fills waves of two blocks per multiprocessor (`full_wave_kv_splits`), ``balanced`` one wave
    (`balanced_kv_splits`). ``captured`` launches the largest number at any length where a CUDA graph was captured for
    the batch size. ``filling`` has no more splits than multiprocessors (`device_filling_kv_splits`).

    Parameters
    ----------
    division : AttentionKernel
        Attention kernel, whose ``decode_split_rule`` decides.
    batch : ndarray
        Number of sequences.
    grouped : ndarray of bool
        True where a tile holds several query heads of a key head.
    tiles : ndarray
        Tiles of queries, all heads and sequences together.
    blocks : ndarray
        Key blocks of each tile.
    multiprocessors : float
        Multiprocessors of the device.

    Returns
    -------
    tuple of (ndarray, ndarray of bool)
        (splits of each tile, True where a captured CUDA graph launches that many at any length).
    """
    never = np.zeros(np.shape(tiles), dtype=np.bool_)
    if division.decode_split_rule == "waves":
        return full_wave_kv_splits(tiles=tiles, blocks=np.where(grouped, blocks, 1.0), slots=2 * multiprocessors), never
    if division.decode_split_rule == "filling":
        return device_filling_kv_splits(tiles=tiles, blocks=blocks, multiprocessors=multiprocessors), never
    captured = batch <= _MAX_CAPTURED_BATCH
    if division.decode_split_rule == "captured":
        return np.broadcast_arrays(np.where(captured, float(division.max_kv_splits), 1.0), blocks)[0], captured
    parts = balanced_kv_splits(tiles=tiles, blocks=blocks, multiprocessors=multiprocessors, most=division.max_kv_splits)
    return parts, captured


def full_wave_kv_splits(*, tiles: Numeric, blocks: Numeric, slots: float, most: int = _MAX_WAVE_KV_SPLITS) -> Array:
    """Compute the smallest number of split-KV splits with which waves of thread blocks are nearly full.

    This is FlashAttention-2's rule: waves are at least 85 % as full as with the best number of splits.

    Parameters
    ----------
    tiles : array-like
        Tiles of queries, all heads and sequences together.
    blocks : array-like
        Key blocks of each tile.
    slots : float
        Thread blocks that run at once.
    most : int, default MAX_WAVE_KV_SPLITS
        Largest number of split-KV splits of a tile.

    Returns
    -------
    ndarray
        Split-KV splits of each tile.

    Examples
    --------
    >>> (float(full_wave_kv_splits(tiles=1, blocks=512, slots=216)),
    ... float(full_wave_kv_splits(tiles=400, blocks=8, slots=216)))
    (128.0, 1.0)
    """
    n, b = np.broadcast_arrays(*as_float_arrays(tiles, blocks))
    shape, (n, b) = n.shape, (n.ravel(), b.ravel())
    result = np.ones(n.shape)
    open_rows = np.flatnonzero((n < 0.8 * slots) & (b > 1))
    if open_rows.size:
        splits = np.arange(1.0, min(most, int(slots), int(b[open_rows].max())) + 1)
        result[open_rows] = _fewest_full(n[open_rows], b[open_rows], splits, slots)
    return result.reshape(shape)


def _fewest_full(n: Array, b: Array, splits: Array, slots: float) -> Array:
    """Return the smallest of the candidate ``splits`` whose waves are at least 85 % as full as the best, for each row.

    A row has ``n`` tiles of ``b`` key blocks, of which ``slots`` thread blocks run at once.
    """
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


#: Most threads that the cache-write kernel gives to a token.
_CACHE_WRITE_THREADS = 512.0
#: Seconds until keys that miss L2 stream at the full rate: 4.4 us on H100, 4.8 on A100, 5.7 on H200, 2.8 on B200 (rows
#: of decode in attention.csv, each fitted alone), 4 in PyTorch's own kernels on another H100 (tests/measured/rows).
DRAM_STREAM_START_TIME = 4.0 * MICROSECOND
#: Steepness of the step from L2-resident to streamed keys.
L2_MISS_STEEPNESS = 8.0


@dataclass(frozen=True, slots=True)
class PrefillParameters:
    """Calibrated parameters of prefill attention (many query tokens at once), for one kernel, phase and device."""

    launch_time: float = parameter("8 us", "2..40 us", "launches and first loads")
    padding_time: float = parameter("1 us", "0.05..8 us", "extra launches of a padded head dimension")
    mma_efficiency: float = parameter("0.9", "0.2..1.3", "rate of the two products over peak at boost clock")
    exp_cycles: float = parameter("0.0625 cycle", "0.005..0.15", "per score element; 1/16 is the rate of exponentials")
    tile_cycles: float = parameter("3000 cycle", "100..40000", "start and end of a query tile at head dimension 128")
    padded_tile_cycles: float = parameter("2200 cycle", "10..30000", "added to a tile whose head dimension is padded")
    wave_quantization: float = parameter("0.8", "0.05..1.3", "share of the last, partly filled wave that is paid")
    bandwidth_fraction: float = parameter("0.9", "0.4..0.96", "achieved memory bandwidth")
    norm_order: float = parameter("1.5", "1..8", "overlap of arithmetic and memory traffic")
    cache_write_time: float = parameter("3 us", "0.1..20 us", "writing of one token into the paged cache")
    combine_time: float = parameter("2 us", "0.05..20 us", "merging of split keys")
    l2_survival_share: float = parameter("0.5", "0.2..1.3", "share of L2 in which tensors survive", fitted=False)
    l2_bytes_per_cycle: float = parameter("40 B/cycle", "4..100", "L2 rate of a multiprocessor", fitted=False)
    energy_per_flop: float = parameter("1 pJ/FLOP", "0.1..10", "energy of a FLOP of the two products", fitted=False)
    backward_efficiency: float = parameter("0.8", "0.3..1.2", "rate of backward's products over forward", fitted=False)


@dataclass(frozen=True, slots=True)
class DecodeParameters:
    """Calibrated parameters of decode attention (one query token per sequence), for one kernel and device."""

    launch_time: float = parameter("8 us", "2..40 us", "launches and first loads")
    extra_kernel_time: float = parameter("1.9 us", "0.2..8 us", "each further small kernel in a captured graph")
    mma_efficiency: float = parameter("0.6", "0.1..1.5", "tensor-core rate on padded tiles over peak at boost clock")
    tile_cycles: float = parameter("3000 cycle", "100..40000", "start and end of a tile at head dimension 128")
    block_search_cycles: float = parameter("1 cycle", "0.01..200", "search of a block for its tile, per sequence")
    wave_quantization: float = parameter("0.8", "0.05..1", "share of the last, partly filled wave that is paid")
    l2_survival_share: float = parameter("0.6", "0.2..1.2", "share of L2 that keys left by the step before survive in")
    bandwidth_fraction: float = parameter("0.9", "0.4..0.96", "achieved memory bandwidth")
    l2_bytes_per_cycle: float = parameter("20 B/cycle", "4..100", "L2 read rate of one multiprocessor")
    norm_order: float = parameter("2", "1..10", "overlap of tile time and memory traffic")
    combine_time: float = parameter("2 us", "0.05..20 us", "merging of split keys")
    combine_time_per_split: float = parameter("0.1 us", "0.0005..1 us", "merging, per split in a chain")
    cache_write_time: float = parameter("3 us", "0.1..20 us", "writing of one token into the paged cache")
    time_per_sequence: float = parameter("0.01 us", "0.0001..0.1 us", "per sequence of a graph with unused splits")


def cache_write_time(
    *, tokens: Numeric, kv_heads: Numeric, head_dim: Numeric, element_bytes: Numeric, write_latency: float,
    bandwidth: float, device: DeviceDatasheet,
) -> Array:  # fmt: skip
    """Compute the time to copy new keys and values into a paged KV cache.

    One thread block of min(kv_heads · head_dim, 512) threads copies one token. The copy takes tokens · threads /
    resident threads rounds of one latency each. Many bytes are limited by the bandwidth; both combine as the root of
    their sum of squares.

    Parameters
    ----------
    tokens : array-like
        New tokens of all sequences.
    kv_heads : array-like
        Heads of keys and values.
    head_dim : array-like
        Elements of a head.
    element_bytes : array-like
        Bytes of a stored element.
    write_latency : float
        Time of a thread block for a token [s].
    bandwidth : float
        Memory bandwidth that is reached [byte/s].
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).

    Returns
    -------
    ndarray
        Time [s]; arguments broadcast.
    """
    n, heads, d = as_float_arrays(tokens, kv_heads, head_dim)
    rounds = n * np.minimum(heads * d, _CACHE_WRITE_THREADS) / (THREADS_PER_MULTIPROCESSOR * device.multiprocessors)
    streamed = 4.0 * n * heads * d * element_bytes / bandwidth
    return np.asarray(np.hypot(rounds * write_latency, streamed))


def attention_prefill_time(
    *,
    batch: Numeric,
    query_heads: Numeric,
    kv_heads: Numeric,
    query_length: Numeric,
    kv_length: Numeric,
    head_dim: Numeric,
    causal: Mask,
    kernel_name: str,
    device: DeviceDatasheet,
    parameters: PrefillParameters,
    window: Numeric = 0.0,
    element_bytes: Numeric = 2.0,
    paged: bool = False,
    sustained: float = 0.0,
    activity: float = 1.0,
    flop_factor: float = 1.0,
    traffic_factor: float = 1.0,
    value_dim: Numeric | None = None,
) -> Array:
    """Compute the time of prefill attention (forward, many query tokens).

        time = launch + hot · ((max(work / S + last wave, longest tile) / clock)^p + (bytes / bandwidth)^p)^(1/p)
               + merge + write

    with work = key blocks · (two products at the tensor rate + exponentials) + tiles · tile_cycles on S
    multiprocessors. Bytes are read from L2 as far as they fit. If there are few tiles, their keys are split
    (``balanced_kv_splits``), and partial sums are merged. ``hot`` is the slow-down at the power limit
    (`paleo.pricing.power`). The slow-down has its full effect under ``sustained`` load and depends on the ``activity``
    of the data. Valid from one tile to kernels of minutes, and for head dimensions up to 512. ``flop_factor`` and
    ``traffic_factor`` scale products and bytes for the backward pass.

    Parameters
    ----------
    batch : array-like
        Sequences, or samples.
    query_heads, kv_heads : array-like
        Heads of queries, and of keys and values.
    query_length, kv_length : array-like
        Tokens of one sequence whose queries are computed, and keys that they see.
    head_dim : array-like
        Elements of a head.
    causal : array-like of bool
        True where a query attends only to keys up to its own position.
    kernel_name : str
        Name in `ATTENTION_KERNELS`.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : PrefillParameters
        Calibrated parameters of the kernel on the device.
    window : array-like, default 0.0
        Keys that a query attends to at most; 0 is no window.
    element_bytes : array-like, default 2.0
        Bytes of a stored element.
    paged : bool, default False
        True to add the write of new keys and values into a paged cache.
    sustained : float, default 0.0
        1 for a device under long load, as in training, on which the power limit has its full effect.
    activity : float, default 1.0
        Switching activity of the data relative to that of random numbers.
    flop_factor, traffic_factor : float, default 1.0
        Factors on the products and the bytes, for the backward pass.
    value_dim : array-like, optional
        Elements of a head's values, if different from those of its keys.

    Returns
    -------
    ndarray
        Time [s]; arguments broadcast.
    """
    b, hq, hk, nq, nk, d = as_float_arrays(batch, query_heads, kv_heads, query_length, kv_length, head_dim)
    p, division = parameters, attention_kernel(kernel_name)
    tile = tile_shape(division.tiles if paged else division.contiguous_kv_tiles or division.tiles, d)
    work = _tiling(division, tile, (b, hq, hk, nq, nk), causal, window, device.multiprocessors)
    padded = ~np.isin(d, _NATIVE_HEAD_DIMS)
    start = p.tile_cycles * (0.5 + d / 256.0) + p.padded_tile_cycles * padded
    wide = padded_head_dim(d)
    v = wide if value_dim is None or division.pads_values else padded_head_dim(value_dim)
    flops = flop_factor * 2 * (wide + v) * work.tile_area
    products = flops / (device.flops_per_clock * p.mma_efficiency)
    block = products + work.tile_area * p.exp_cycles
    busy = _busy_cycles(work, block, start, p.wave_quantization, device.multiprocessors)
    bandwidth = p.bandwidth_fraction * device.memory_bandwidth
    widths = d + (d if value_dim is None else as_float_arrays(value_dim)[0])
    moved = traffic_factor * widths * element_bytes * b * (hq * nq + hk * nk)
    body = smooth_maximum(busy / device.clock_hz, _traffic_time(moved, device, p), p.norm_order)
    hot = power_slowdown(
        busy=body, flops=flops * work.blocks, dram=moved, energy=p.energy_per_flop, activity=activity, device=device
    )
    body = body * (1.0 + (hot - 1.0) * slowdown_share(body, sustained))
    split = work.splits > 1
    merge = split * (p.combine_time + 8.0 * work.splits * b * hq * nq * d / bandwidth)
    write = cache_write_time(
        tokens=b * nq, kv_heads=hk, head_dim=d, element_bytes=element_bytes, write_latency=p.cache_write_time,
        bandwidth=bandwidth, device=device,
    )  # fmt: skip
    return p.launch_time + p.padding_time * padded + body + merge + (write if paged else 0.0)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """Division of one attention call: query tiles of all heads, the key blocks that they visit, and split-KV splits."""

    tiles: Array
    blocks: Array
    longest_tile_blocks: Array
    last_tile_blocks: Array
    tail_blocks: Array
    splits: Array
    tile_area: Array


def _tiling(
    division: AttentionKernel,
    tile: tuple[Array, Array],
    sizes: tuple[Array, ...],
    causal: Mask,
    window: Numeric,
    multiprocessors: float,
) -> _Tiling:
    """Divide one attention call into query tiles, key blocks and split-KV splits.

    ``tile`` holds query rows and key columns. ``b`` is the batch, ``hq`` and ``hk`` the heads of queries and keys,
    ``nq`` and ``nk`` the tokens of queries and keys, and ``d`` the head dimension.
    """
    (rows, columns), (b, hq, hk, nq, nk) = tile, sizes
    group = np.where(np.asarray(causal) & division.packs_query_heads, hq / hk, 1.0)
    rows = np.where(nq * group <= _WARP_GROUP_ROWS, np.minimum(rows, _WARP_GROUP_ROWS), rows)
    tiles, chain = np.ceil(nq * group / rows), np.ceil(nk / columns)
    reach = np.ceil((np.asarray(window) + rows / group) / columns) + 1
    chain = np.where(np.asarray(window) > 0, np.minimum(chain, reach), chain)
    blocks = visited_key_blocks(
        query_tiles=tiles, tokens_per_tile=rows / group, columns=columns, query_length=nq, kv_length=nk,
        causal=causal, window=window,
    )  # fmt: skip
    heads = b * hq / group
    most, all_tiles = division.max_kv_splits, heads * tiles
    splits = balanced_kv_splits(tiles=all_tiles, blocks=chain, multiprocessors=multiprocessors, most=most)
    longest = np.ceil(chain / splits)
    uneven = np.asarray(causal) & (tiles > 1)
    last = np.where(uneven, float(division.starts_longest_tiles_first), longest)
    queued = all_tiles * splits > multiprocessors
    tail = np.where(uneven & queued & (not division.starts_longest_tiles_first), longest, 0.0)
    return _Tiling(all_tiles, heads * blocks, longest, last, tail, splits, rows * columns)


def _busy_cycles(work: _Tiling, block: Array, start: Array, wave_quantization: float, multiprocessors: float) -> Array:
    """Compute the cycles of the busiest multiprocessor: all its tiles and the idle last wave, or the longest tile.

    If tiles of lengths 0 to L start in any order, multiprocessors idle for L - L/3 at the end. One of them has just
    started its longest tile, while the others have L/3 left on average (residual life E[X²] / 2 E[X] of a renewal
    process; Cox, Renewal Theory, 1962). Fits to B200 and GB200 find 0.66 and 0.74 of L.
    """
    waves = work.tiles * work.splits / multiprocessors
    spread = work.blocks * block / multiprocessors + waves * start
    last = (np.ceil(waves) - waves) * (work.last_tile_blocks * block + start)
    idle = wave_quantization * (last + work.tail_blocks * block)
    return np.maximum(spread + idle, work.longest_tile_blocks * block + start)


def attention_backward_time(*, parameters: PrefillParameters, **forward: Any) -> Array:
    """Compute the time of backward attention, from the forward calibration and ``backward_efficiency``.

    The backward pass has five products instead of two (scores again, dV, dP, dQ, dK: 2.5 times the FLOP), and one
    exponential. It moves about three times the bytes: q, k, v, o, do are read; dq, dk, dv written; dq is also
    accumulated in fp32 (Dao, 2023).

    Parameters
    ----------
    parameters : PrefillParameters
        Calibrated parameters of the kernel on the device.
    **forward
        Other arguments of `attention_prefill_time`, of the forward pass, except its factors of FLOP and traffic.

    Returns
    -------
    ndarray
        Time [s]; arguments broadcast.
    """
    slower = replace(parameters, mma_efficiency=parameters.mma_efficiency * parameters.backward_efficiency)
    return attention_prefill_time(**forward, parameters=slower, flop_factor=2.5, traffic_factor=3.0)


def attention_decode_time(
    *,
    batch: Numeric,
    query_heads: Numeric,
    kv_heads: Numeric,
    kv_length: Numeric,
    head_dim: Numeric,
    kernel_name: str,
    device: DeviceDatasheet,
    parameters: DecodeParameters,
    window: Numeric = 0.0,
    element_bytes: Numeric = 2.0,
    paged: Mask = True,
) -> Array:
    """Compute the time of decode attention: one query token per sequence, in a CUDA graph.

    time = launch + ((W tile / clock)^p + (key bytes from memory or L2)^p)^(1/p) + start of the stream from memory
           + partial sums + write of the new token

    W is the number of waves of tiles times splits on the multiprocessors. Query heads that share a key head fill one
    padded tile, so a tile costs the same for 1 to ``rows`` of them. Keys that fit into L2 stay there between steps.

    Parameters
    ----------
    batch : array-like
        Sequences, or samples.
    query_heads, kv_heads : array-like
        Heads of queries, and of keys and values.
    kv_length : array-like
        Cached keys of a sequence.
    head_dim : array-like
        Elements of a head.
    kernel_name : str
        Name in `ATTENTION_KERNELS`.
    device : DeviceDatasheet
        Datasheet values of the device: peak FLOP/s, bandwidth, … (`paleo.pricing.kernels.device_datasheet`).
    parameters : DecodeParameters
        Calibrated parameters of the kernel on the device.
    window : array-like, default 0.0
        Keys that a query attends to at most; 0 is no window.
    element_bytes : array-like, default 2.0
        Bytes of a stored element.
    paged : array-like of bool, default True
        True to add the write of the new token into a paged cache.

    Returns
    -------
    ndarray
        Time [s]; arguments broadcast.
    """
    division, p = attention_kernel(kernel_name), parameters
    b, hq, hk, nk, d = as_float_arrays(batch, query_heads, kv_heads, kv_length, head_dim)
    nk = np.where(np.asarray(window) > 0, np.minimum(nk, window), nk)
    rows, columns = tile_shape(division.decode_tiles or division.tiles, d)
    rows = np.minimum(rows, _WARP_GROUP_ROWS)
    tiles, blocks, grouped = b * hk * np.ceil(hq / hk / rows), np.ceil(nk / columns), hq > hk
    splits, captured = _decode_kv_splits(
        division, batch=b, grouped=grouped, tiles=tiles, blocks=blocks, multiprocessors=device.multiprocessors
    )
    block = 4 * rows * columns * d / (device.flops_per_clock * p.mma_efficiency)
    tile = p.tile_cycles * (0.5 + d / 256.0) + np.ceil(blocks / splits) * block + p.block_search_cycles * b
    waves = wave_count(tiles * splits, device.multiprocessors, p.wave_quantization)
    cached = 2 * b * hk * nk * d * element_bytes
    keys = _traffic_time(cached, device, p)
    waved = division.decode_split_rule == "waves"
    copied = waved & grouped & (hk > 1) & (b > 1)
    partial = 8 * splits * b * hq * d * ((splits > 1) | captured)
    side = _traffic_time(2 * b * hq * d * element_bytes * np.where(copied, 3.0, 1.0) + partial, device, p)
    launches = 1.0 * (waved & grouped) + 3.0 * copied
    merge = (splits > 1) * (p.combine_time + p.combine_time_per_split * splits) + captured * b * p.time_per_sequence
    write = cache_write_time(
        tokens=b, kv_heads=hk, head_dim=d, element_bytes=element_bytes, write_latency=p.cache_write_time,
        bandwidth=p.bandwidth_fraction * device.memory_bandwidth, device=device,
    )  # fmt: skip
    missed = cache_miss_rate(cached, p.l2_survival_share * device.l2_bytes, L2_MISS_STEEPNESS)
    body = DRAM_STREAM_START_TIME * missed + smooth_maximum(waves * tile / device.clock_hz, keys, p.norm_order)
    return p.launch_time + launches * p.extra_kernel_time + body + side + merge + np.where(paged, write, 0.0)


def _traffic_time(moved: Array, device: DeviceDatasheet, p: PrefillParameters | DecodeParameters) -> Array:
    """Compute the time to read ``moved`` bytes that were also read in the previous step, in part from L2 [s].

    All bytes pass through L2. The part that does not stay in L2 from step to step comes from memory.
    """
    missed = moved * cache_miss_rate(moved, p.l2_survival_share * device.l2_bytes, L2_MISS_STEEPNESS)
    memory = missed / (p.bandwidth_fraction * device.memory_bandwidth)
    through = moved / (p.l2_bytes_per_cycle * device.multiprocessors * device.clock_hz)
    return smooth_maximum(memory, through, 4.0)
