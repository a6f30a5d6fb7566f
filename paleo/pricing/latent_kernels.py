"""Multi-head latent attention as engines run it: prompts with whole keys, single tokens with absorbed weights.

A prompt multiplies queries and keys of 128 + 64 and values of 128 elements a head, causally. A token multiplies its
queries, which the key's projection is absorbed into, with the latent of 512 + 64 elements that all heads share, and
adds up latents of 512; long caches are split over multiprocessors that would be idle.

    time = launch + joined(waves · work of a block / (efficiency · peak), bytes / bandwidth) + keys of a block · depth

Reference: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.tiles import Array, TileParameters, joined

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceFigures

#: Elements of a head's queries and keys, of its values; of the cached latent with its rotated part, and without it.
QUERY, VALUE, CACHED, LATENT = 192.0, 128.0, 576.0, 512.0
#: Rows of a block of a prompt and of tokens' heads, and the least keys of a part of a split cache.
PROMPT_ROWS, TOKEN_ROWS, LEAST_KEYS = 128.0, 64.0, 256.0


def latent_attention_time(
    *,
    heads: Array,
    batch: Array,
    queries: Array,
    keys: Array,
    single: npt.NDArray[np.bool_],
    cache_bytes: Array,
    device: DeviceFigures,
    parameters: TileParameters,
) -> Array:
    """Time of one layer's attention core on one rank.

    Parameters
    ----------
    heads, batch, queries, keys : array
        Heads of the rank, sequences, new tokens and tokens in all of each sequence.
    single : array of bool
        True where tokens are generated, False for prompts.
    cache_bytes : array
        Bytes of an element of the cached latent.
    device : DeviceFigures
        Peak of the format of the products.
    parameters : TileParameters
        Calibration of the kernel; ``depth`` is cycles for each key of a block.

    Returns
    -------
    array
        Seconds.
    """
    tiles = np.where(
        single, batch * np.ceil(heads * queries / TOKEN_ROWS), batch * heads * np.ceil(queries / PROMPT_ROWS)
    )
    splits = np.clip(np.floor(device.multiprocessors / tiles), 1.0, np.ceil(keys / LEAST_KEYS))
    splits = np.where(single, splits, 1.0)
    seen = np.where(single, keys, keys - queries / 2.0) / splits
    row_flop = np.where(single, TOKEN_ROWS * (CACHED + LATENT), PROMPT_ROWS * (QUERY + VALUE))
    occupied = tiles * splits / device.multiprocessors
    waves = 0.5 * np.ceil(occupied) + 0.5 * np.maximum(occupied, 1.0)
    compute = waves * 2.0 * row_flop * seen / (parameters.efficiency * device.flops_per_clock * device.clock_hz)
    rows = batch * heads * queries
    token_bytes = batch * keys * CACHED * cache_bytes + 2.0 * rows * (CACHED + LATENT)
    prompt_bytes = 2.0 * rows * (QUERY + 2.0 * VALUE) + 2.0 * batch * keys * heads * (QUERY + VALUE)
    moved = np.where(single, token_bytes, prompt_bytes)
    body = joined(compute, moved / (parameters.bandwidth_efficiency * device.memory_bandwidth))
    return np.asarray(parameters.launch + body + seen * parameters.depth / device.clock_hz)
