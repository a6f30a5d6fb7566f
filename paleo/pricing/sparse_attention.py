"""Time of sparse attention, whose keys an indexer selects (DeepSeek-V3.2), in inference on one rank.

The time covers a layer or one of its parts.

    projections = roofline(FLOP / (share · peak), weights / (share · bandwidth))
    scores      = roofline(FLOP of the indexer in fp8, its keys / bandwidth, keys that one block reads in sequence)
    selection   = scores in fp32 / (share · bandwidth) + waves of queries · (start + time of a key · keys)
    attention   = roofline(FLOP over the selected keys, their bytes from caches)
    passes      = inputs, latents, queries and contexts / (share · bandwidth)
    pairs       = queries of a prompt · keys of all sequences of the batch · time of a pair; of a paged indexer queries²
    starts      = sequences with several new tokens · time of a sequence
    device      = projections + scores + selection + attention + passes + pairs + starts
    time        = (launches^order + device^order)^(1/order)

where roofline is `paleo.pricing.engine_gemm.roofline_with_overlap_loss`.

A kernel that gathers keys computes whole tiles of heads (64 or 128), so a rank with fewer heads is no faster. Some
kernels multiply all slots of a selection, those without a key too. Attention over all keys has keys and values for each
head. Launches add to the device's time in a CUDA graph (order 1), and hide behind it where a host issues them ahead.
Their number grows where operands are converted first: projections in 8 and 4 bits, and keys for a cache in 8 bits.

References: DeepSeek-AI, DeepSeek-V3.2, 2025, section 2.1; DeepSeek-V4, 2026, section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.engine_gemm import roofline_with_overlap_loss
from paleo.pricing.memory import smooth_maximum
from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceDatasheet

Array = npt.NDArray[np.float64]
#: Ratio of the rate of 8-bit to that of 16-bit arithmetic; ratio of the bandwidth of caches, from which gathered keys
#: are read again, to that of memory; rows of the narrowest matrix instruction.
_FP8_RATE_RATIO, _CACHE_BANDWIDTH_RATIO, MIN_COMPUTED_HEADS = 2.0, 3.0, 16.0
#: Queries for which a multiprocessor selects keys at once, one block each.
_QUERIES_PER_MULTIPROCESSOR = 2.0
_PICOSECOND = 2.0**-40


@dataclass(frozen=True, slots=True)
class SparseAttentionParameters:
    """Calibrated parameters of one library's sparse-attention kernels on one device."""

    launch_time: float = parameter("50 us", "0.5..1500 us", "launches of all kernels")
    projection_peak_share: float = parameter("0.5", "0.02..1.2", "share of peak of projections")
    bandwidth_share: float = parameter("0.7", "0.05..1.1", "share of the memory bandwidth of weights and keys")
    attention_peak_share: float = parameter("0.3", "0.005..2", "share of peak of the attention over selected keys")
    fp8_cache_attention_peak_share: float = parameter(
        "0.3", "0.005..2", "share of peak of the kernel that reads a cache in 8 bits"
    )
    indexer_peak_share: float = parameter("0.4", "0.005..3", "share of the narrow peak of the indexer's scores")
    selection_bandwidth_share: float = parameter("0.5", "0.00001..20", "share of bandwidth at which scores are written")
    pass_bandwidth_share: float = parameter("0.5", "0.005..50", "share of the bandwidth of passes over tokens")
    search_picoseconds_per_key: float = parameter("100", "0.001..100000", "picoseconds per key that a search passes")
    search_start_time: float = parameter("5 us", "0.001..100 us", "start of a query's search")
    cycles_per_key: float = parameter("1 cycle", "0.0001..50", "cycles of a block of the indexer for each of its keys")
    fp8_launch_time: float = parameter("20 us", "0.01..2000 us", "launches more with weights in 8 bits")
    fp4_launch_time: float = parameter("20 us", "0.01..2000 us", "launches more with weights in 4 bits")
    fp8_cache_launch_time: float = parameter("20 us", "0.01..2000 us", "launches more with a cache in 8 bits")
    indexer_launch_time: float = parameter("20 us", "0.01..2000 us", "launches of indexer and selection")
    dense_launch_time: float = parameter("20 us", "0.01..2000 us", "launches more of attention over all keys")
    launch_norm_order: float = parameter("2", "1..10", "order of the norm of launches and device time; 1: their sum")
    picoseconds_per_pair: float = parameter(
        "0.1", "0.00001..100", "picoseconds of each pair of a query and any key of the batch"
    )
    time_per_sequence: float = parameter("0.02 us", "0.0001..20 us", "time of each sequence with several new tokens")


@dataclass(frozen=True, slots=True)
class SparseWork:
    """Work of each sparse-attention call, by part: FLOP, bytes and keys, as arrays that broadcast.

    ``weight_element_bytes`` are bytes of a weight, ``cache_element_bytes`` of an entry of the KV cache. ``has_indexer``
    is True where an indexer scores keys, ``is_dense`` where attention covers all keys without an indexer.
    """

    projection_flops: Array
    weight_bytes: Array
    weight_element_bytes: Array
    cache_element_bytes: Array
    has_indexer: npt.NDArray[np.bool_]
    is_dense: npt.NDArray[np.bool_]
    query_key_pairs: Array
    score_flops: Array
    index_bytes: Array
    score_bytes: Array
    entries_per_search: Array
    searching_queries: Array
    indexer_scored_keys_per_query: Array
    attention_flops: Array
    key_bytes: Array
    reads_8_bit_cache: npt.NDArray[np.bool_]
    sequences: Array
    pass_bytes: Array


def sparse_attention_time(work: SparseWork, device: DeviceDatasheet, parameters: SparseAttentionParameters) -> Array:
    """Compute the time of a layer of sparse attention; parts with zero work are left out.

    Parameters
    ----------
    work : SparseWork
        FLOP, bytes and keys of each call.
    device : DeviceDatasheet
        Datasheet values, with the peak in 16 bits.
    parameters : SparseAttentionParameters
        Calibrated parameters of the kernels on the device.

    Returns
    -------
    ndarray
        Time [s].
    """
    p, peak, bandwidth = parameters, device.peak_flops_per_s, device.memory_bandwidth
    streamed = p.bandwidth_share * bandwidth
    product_peak = p.projection_peak_share * peak * np.where(work.weight_element_bytes < 2.0, _FP8_RATE_RATIO, 1.0)
    rate = np.where(work.reads_8_bit_cache, p.fp8_cache_attention_peak_share, p.attention_peak_share) * peak
    scores = roofline_with_overlap_loss(
        work.score_flops / (p.indexer_peak_share * _FP8_RATE_RATIO * peak), work.index_bytes / streamed
    )
    occupied = work.searching_queries / (_QUERIES_PER_MULTIPROCESSOR * device.multiprocessors)
    waves = 0.5 * np.ceil(occupied) + 0.5 * np.maximum(occupied, np.minimum(work.searching_queries, 1.0))
    parts = (
        roofline_with_overlap_loss(work.projection_flops / product_peak, work.weight_bytes / streamed),
        roofline_with_overlap_loss(scores, work.indexer_scored_keys_per_query * p.cycles_per_key / device.clock_hz),
        work.score_bytes / (p.selection_bandwidth_share * bandwidth)
        + waves * (p.search_start_time + work.entries_per_search * p.search_picoseconds_per_key * _PICOSECOND),
        roofline_with_overlap_loss(work.attention_flops / rate, work.key_bytes / (_CACHE_BANDWIDTH_RATIO * streamed)),
        work.pass_bytes / (p.pass_bandwidth_share * bandwidth),
        work.query_key_pairs * p.picoseconds_per_pair * _PICOSECOND,
        work.sequences * p.time_per_sequence,
    )
    # Sum the launches of a call by its formats and by the kernels that it runs [s].
    narrow = np.select(
        [work.weight_element_bytes < 1.0, work.weight_element_bytes < 2.0], [p.fp4_launch_time, p.fp8_launch_time], 0.0
    )
    stored = np.where(work.cache_element_bytes < 2.0, p.fp8_cache_launch_time, 0.0)
    scored = np.select([work.is_dense, work.has_indexer], [p.dense_launch_time, p.indexer_launch_time], 0.0)
    return smooth_maximum(np.asarray(p.launch_time + narrow + stored + scored), sum(parts), p.launch_norm_order)
