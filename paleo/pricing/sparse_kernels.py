"""Time of attention over keys that an indexer selects, of a layer or one of its parts, in inference on one rank.

    projections = joined(FLOP / (share · peak), weights / (share · bandwidth))
    scores      = joined(FLOP of the indexer in fp8, its keys / bandwidth, keys that one block reads in sequence)
    selection   = scores in fp32 / (share · bandwidth) + waves of queries · (start + time of a key · keys)
    attention   = joined(FLOP over the selected keys, their bytes from caches)
    passes      = inputs, latents, queries and contexts / (share · bandwidth)
    time        = launch + projections + scores + selection + attention + passes

References: DeepSeek-AI, DeepSeek-V3.2, 2025, section 2.1; DeepSeek-V4, 2026, section 2.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.pricing.tiles import joined
from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from paleo.pricing.kernels import DeviceFigures

Array = npt.NDArray[np.float64]
#: Ratio of the rate of 8-bit to that of 16-bit arithmetic; ratio of the bandwidth of caches, from which gathered keys
#: are read again, to that of memory; rows of the narrowest matrix instruction.
NARROW, CACHED, LEAST_HEADS = 2.0, 3.0, 16.0
#: Queries for which a multiprocessor selects keys at once, one block each.
RESIDENT = 2.0
_PICOSECOND = 2.0**-40


@dataclass(frozen=True, slots=True)
class SparseParameters:
    """Calibration of one library's kernels on one device."""

    launch: float = parameter("50 us", "0.5..1500 us", "launches of all kernels")
    products: float = parameter("0.5", "0.02..1.2", "share of peak of projections")
    bandwidth: float = parameter("0.7", "0.05..1.1", "share of the memory bandwidth of weights and keys")
    attention: float = parameter("0.3", "0.005..2", "share of peak of the attention over selected keys")
    indexer: float = parameter("0.4", "0.005..3", "share of the narrow peak of the indexer's scores")
    selection: float = parameter("0.5", "0.00001..20", "share of the bandwidth at which scores are written")
    passes: float = parameter("0.5", "0.005..50", "share of the bandwidth of passes over tokens")
    search: float = parameter("100", "0.001..100000", "picoseconds of each key that a query's search passes")
    row: float = parameter("5 us", "0.001..100 us", "start of a query's search")
    depth: float = parameter("1 cycle", "0.0001..50", "cycles of a block of the indexer for each of its keys")


@dataclass(frozen=True, slots=True)
class SparseWork:
    """Work of a call: FLOP, bytes and keys of each part, as arrays that broadcast."""

    projection_flops: Array
    weight_bytes: Array
    narrow: npt.NDArray[np.bool_]
    score_flops: Array
    index_bytes: Array
    score_bytes: Array
    searched: Array
    searching: Array
    walked: Array
    attention_flops: Array
    key_bytes: Array
    heads: Array
    pass_bytes: Array


def sparse_attention_time(work: SparseWork, device: DeviceFigures, parameters: SparseParameters) -> Array:
    """Compute the time of a layer of sparse attention, or of a part of it with zero work for the other parts.

    Parameters
    ----------
    work : SparseWork
        Work of each call.
    device : DeviceFigures
        Peak in 16 bits and memory of the device.
    parameters : SparseParameters
        Calibration of the kernels.

    Returns
    -------
    ndarray
        Seconds.
    """
    p, peak, bandwidth = parameters, device.peak_flops_per_s, device.memory_bandwidth
    streamed = p.bandwidth * bandwidth
    product_peak = p.products * peak * np.where(work.narrow, NARROW, 1.0)
    padded = np.maximum(work.heads, LEAST_HEADS) / np.maximum(work.heads, 1.0)
    scores = joined(work.score_flops / (p.indexer * NARROW * peak), work.index_bytes / streamed)
    occupied = work.searching / (RESIDENT * device.multiprocessors)
    waves = 0.5 * np.ceil(occupied) + 0.5 * np.maximum(occupied, np.minimum(work.searching, 1.0))
    parts = (
        joined(work.projection_flops / product_peak, work.weight_bytes / streamed),
        joined(scores, work.walked * p.depth / device.clock_hz),
        work.score_bytes / (p.selection * bandwidth) + waves * (p.row + work.searched * p.search * _PICOSECOND),
        joined(work.attention_flops * padded / (p.attention * peak), work.key_bytes / (CACHED * streamed)),
        work.pass_bytes / (p.passes * bandwidth),
    )
    return np.asarray(p.launch + sum(parts))
