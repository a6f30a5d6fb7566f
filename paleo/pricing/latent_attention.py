"""Time of multi-head latent attention in inference: prefill with full keys, decode with absorbed weights.

In prefill queries and keys have 128 + 64 elements a head and values 128, with a causal mask. In decode the key
projection is absorbed into the queries, which are multiplied by the latent of 512 + 64 elements that all heads share;
the weighted sum is over latents of 512. Long caches are split over otherwise idle multiprocessors, into at most
``max_splits`` parts.

    body = roofline(waves · (work of a block / (efficiency · peak) + epilogue), bytes / bandwidth)
    time = launch + body + keys of a block · depth + passes over queries, results and new latents

The host time of a call overlaps with it.

Reference: DeepSeek-V2, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.engine_gemm import Array, roofline_with_overlap_loss, time_with_host_launch
from paleo.specs.calibration import calibrated_parameter

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceDatasheet

#: Elements of a head's queries and keys; of its values; of the cached latent with its rotary part; and without it.
QUERY_HEAD_DIM, VALUE_HEAD_DIM, CACHED_LATENT_DIM, LATENT_DIM = 192.0, 128.0, 576.0, 512.0
#: Rows of query heads in a block in decode; and in Triton's kernel (``BLOCK_H`` of vLLM's triton_decode_attention.py).
DECODE_BLOCK_ROWS, TRITON_DECODE_BLOCK_ROWS = 64.0, 16.0
#: Rows of a block in prefill, and the fewest keys of a part of a split cache.
PREFILL_BLOCK_ROWS, MIN_KEYS_PER_SPLIT = 128.0, 64.0


@dataclass(frozen=True, slots=True)
class LatentAttentionParameters:
    """Calibrated parameters of one multi-head latent attention (MLA) kernel on one device."""

    launch_time: float = calibrated_parameter("10 us", "0.5..400 us", "launches of all kernels of a call")
    host_time: float = calibrated_parameter(
        "1 us", "0.1..1000 us", "host time of a call, which the device's time hides"
    )
    efficiency: float = calibrated_parameter("0.6", "0.02..1.2", "share of peak that the main loop reaches")
    bandwidth_efficiency: float = calibrated_parameter(
        "0.75", "0.1..1.1", "share of the memory bandwidth that streams reach"
    )
    cycles_per_key: float = calibrated_parameter(
        "2 cycle", "0.0002..200", "least cycles of a block for each of its keys"
    )
    block_overhead_cycles: float = calibrated_parameter("5000 cycle", "10..200000", "start and end of a block")
    pass_bandwidth_share: float = calibrated_parameter(
        "0.5", "0.005..20", "share of the bandwidth of passes over queries, results, latents"
    )
    max_splits: float = calibrated_parameter("16", "1..200", "the most parts that a cache is split into")


def latent_attention_time(
    *,
    heads: Array,
    batch: Array,
    queries: Array,
    keys: Array,
    single: npt.NDArray[np.bool_],
    cache_bytes: Array,
    token_rows: Array,
    device: DeviceDatasheet,
    parameters: LatentAttentionParameters,
) -> Array:
    """Compute the time of multi-head latent attention (MLA) of one layer on one rank, without projections.

    Parameters
    ----------
    heads, batch, queries, keys : array
        Query heads of the rank, sequences, new tokens per sequence, and all tokens per sequence.
    single : array of bool
        True for decode, False for prefill.
    cache_bytes : array
        Bytes per element of the cached latent.
    token_rows : array
        Rows of query heads in a thread block in decode.
    device : DeviceDatasheet
        Datasheet values, with the peak of the number format of the products.
    parameters : LatentAttentionParameters
        Calibrated parameters of the kernel on the device.

    Returns
    -------
    array
        Time [s].
    """
    p, rows = parameters, batch * heads * queries
    block_rows = np.where(single, token_rows, PREFILL_BLOCK_ROWS)
    of_prompts = batch * heads * np.ceil(queries / PREFILL_BLOCK_ROWS)
    tiles = np.where(single, batch * np.ceil(heads * queries / token_rows), of_prompts)
    splits = np.clip(
        device.multiprocessors / tiles, 1.0, np.minimum(np.maximum(keys / MIN_KEYS_PER_SPLIT, 1.0), p.max_splits)
    )
    splits = np.where(single, splits, 1.0)
    seen = np.where(single, keys, keys - queries / 2.0) / splits
    occupied = tiles * splits / device.multiprocessors
    waves = 0.5 * np.ceil(occupied) + 0.5 * np.maximum(occupied, 1.0)
    flop = 2.0 * block_rows * np.where(single, CACHED_LATENT_DIM + LATENT_DIM, QUERY_HEAD_DIM + VALUE_HEAD_DIM) * seen
    compute = waves * (flop / (p.efficiency * device.flops_per_clock) + p.block_overhead_cycles) / device.clock_hz
    read = (
        np.where(single, CACHED_LATENT_DIM * cache_bytes, 2.0 * heads * (QUERY_HEAD_DIM + VALUE_HEAD_DIM))
        * batch
        * keys
    )
    body = roofline_with_overlap_loss(compute, read / (p.bandwidth_efficiency * device.memory_bandwidth))
    each = np.where(single, CACHED_LATENT_DIM + LATENT_DIM, QUERY_HEAD_DIM + 2.0 * VALUE_HEAD_DIM)
    passed = 2.0 * rows * each + batch * queries * CACHED_LATENT_DIM * (2.0 + cache_bytes)
    busy = (
        p.launch_time
        + body
        + passed / (p.pass_bandwidth_share * device.memory_bandwidth)
        + seen * p.cycles_per_key / device.clock_hz
    )
    return time_with_host_launch(busy, p.host_time)
