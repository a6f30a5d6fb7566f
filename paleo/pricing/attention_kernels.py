"""How kernels of fused attention divide their work: tiles of queries and keys, packed heads, splits of the keys.

All sizes broadcast. Kernels are those of FlashAttention-2, -3 and -4 (Dao et al., 2022, 2023; Shah et al., 2024) and of
TensorRT-LLM (trtllm-gen, which FlashInfer and vLLM call on Blackwell), by their public sources.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError, near
from paleo.pricing.parameters import floats

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
    """How one implementation divides the work, from its public source.

    ``tiles``: (largest head dimension, query rows, key columns), ascending; ``dense_tiles`` those of keys that lie in a
    row instead of pages, where they differ, ``decode_tiles`` those of one token, where they are not ``tiles`` cut to a
    warp group. ``packs``: query heads that share a key head fill one tile in prefill
    too. ``most_splits``: the most parts into which prefill cuts the keys of one tile when tiles are too few for the
    device; 1 never splits. ``decode_splits``: how decode chooses their number (`decode_splits`).
    """

    tiles: tuple[tuple[float, float, float], ...]
    packs: bool
    most_splits: int
    decode_splits: Literal["waves", "balanced", "captured", "filling"]
    dense_tiles: tuple[tuple[float, float, float], ...] = ()
    decode_tiles: tuple[tuple[float, float, float], ...] = ()


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
        packs=False, most_splits=1, decode_splits="filling", decode_tiles=((512, 32, 256),),
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
    compiled, (wanted,) = np.array(COMPILED_HEAD_DIMS), floats(head_dim)
    return np.asarray(np.maximum(wanted, compiled[np.minimum(np.searchsorted(compiled, wanted), len(compiled) - 1)]))


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
