"""Memory of a serving replica: weights, paged KV cache, activations, engine reserve, and the sequences that fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.units import format_gibibytes

if TYPE_CHECKING:
    from paleo.serving.engines import BatchLimit, ServingEngine
    from paleo.serving.formats import Formats
    from paleo.serving.forward_lowering import LoweredForward, Sharding, TokenScaledKernel
    from paleo.specs.device import Device

Array = npt.NDArray[np.float64]
#: Bytes of a number of a recurrent state (fp32), of a logit while it is sampled (bf16, its copy in fp32, and the
#: probabilities), and tensors as wide as a layer's widest that are alive at once.
STATE_ELEMENT_BYTES, _SAMPLED_LOGIT_BYTES, _WIDEST_TENSORS_ALIVE = 4.0, 10.0, 2.0
_MIN_DIVISOR = 2.0**-30


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """KV cache of all layers with one kind of attention, on one device.

    ``token_bytes`` is the size per token [byte], and ``window`` the sliding window [tokens]; 0 for full attention.
    """

    token_bytes: float
    window: float


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Memory of one device of a serving replica, divided among weights, activations, engine and KV cache.

    Attributes
    ----------
    weights, activations, engine_reserve : float
        Weights; activations of the largest iteration; contexts, workspaces and CUDA graphs [byte].
    kv_cache : float
        Memory left for the KV cache [byte]; negative if the weights alone do not fit.
    capacity : float
        Usable memory of the device [byte].
    groups : tuple of KVCacheGroup
        KV-cache bytes per token, by kind of attention.
    state_bytes_per_sequence : float
        Bytes of a sequence that do not depend on its length (recurrent states).
    attention_dp_ranks : int
        Ranks of a replica that hold different sequences (attention data parallelism).
    tokens_per_page : int
        Tokens per page of the paged KV cache.
    """

    weights: float
    activations: float
    engine_reserve: float
    kv_cache: float
    capacity: float
    groups: tuple[KVCacheGroup, ...]
    state_bytes_per_sequence: float
    attention_dp_ranks: int
    tokens_per_page: int

    def sequence_bytes(self, tokens: npt.ArrayLike) -> Array:
        """Return the KV-cache memory of one sequence on a device, in whole pages.

        Parameters
        ----------
        tokens : array_like, shape (...)
            Tokens of the sequence.

        Returns
        -------
        ndarray, shape (...)
            Memory [byte].
        """
        length = np.ceil(np.asarray(tokens, dtype=np.float64) / self.tokens_per_page) * self.tokens_per_page
        total = np.full(length.shape, self.state_bytes_per_sequence)
        for group in self.groups:
            total = total + group.token_bytes * (np.minimum(length, group.window) if group.window else length)
        return total

    def max_cached_sequences(self, tokens: npt.ArrayLike) -> Array:
        """Return the number of equally long sequences that fit in a replica's KV cache.

        Parameters
        ----------
        tokens : array_like, shape (...)
            Tokens of each sequence.

        Returns
        -------
        ndarray, shape (...)
            Number of sequences.
        """
        each = np.maximum(self.sequence_bytes(tokens), 1.0)
        return np.asarray(self.attention_dp_ranks * np.floor(max(self.kv_cache, 0.0) / each))

    def max_cached_tokens(self, length: float) -> float:
        """Return the capacity of a replica's KV cache in tokens, for sequences of a typical length.

        Parameters
        ----------
        length : float
            Typical length of a sequence [tokens].

        Returns
        -------
        float
            Number of tokens.
        """
        each = max(float(self.sequence_bytes(length)) / max(length, 1.0), _MIN_DIVISOR)
        return float(self.attention_dp_ranks * max(self.kv_cache, 0.0) / each)

    @property
    def fits(self) -> bool:
        """True if memory is left for a KV cache."""
        return self.kv_cache > 0.0

    def refusal(self, length: float) -> str:
        """Explain why a sequence does not fit in the KV cache of a replica, and what would help.

        Parameters
        ----------
        length : float
            Length of the sequence [tokens].

        Returns
        -------
        str
            Reason for the user; empty if the sequence fits.
        """
        needed = float(self.sequence_bytes(length))
        if self.kv_cache >= needed:
            return ""
        parts = (format_gibibytes(each) for each in (self.weights, self.activations, self.engine_reserve))
        taken = "weights {}, activations {} and {} of the engine".format(*parts)
        if self.kv_cache <= 0:
            cure = "more devices per replica or narrower weights help"
            return f"{taken} do not fit into {format_gibibytes(self.capacity)}; {cure}"
        return (
            f"one sequence of {length:,.0f} tokens takes {format_gibibytes(needed)} of cache, "
            f"{format_gibibytes(self.kv_cache)} are left beside {taken}; a cache of {needed / self.kv_cache:.1f} times "
            "as much, narrower numbers or more devices would hold it"
        )


def serving_memory(
    work: LoweredForward,
    sharding: Sharding,
    formats: Formats,
    engine: ServingEngine,
    device: Device,
    limit: BatchLimit | None = None,
) -> ServingMemory:
    """Divide the memory of one device of a serving replica among weights, activations, engine reserve and KV cache.

    Parameters
    ----------
    work, sharding, formats : LoweredForward, Sharding, Formats
        Kernels of one rank, parallel degrees of a replica, number formats of weights and KV cache.
    engine, device : ServingEngine, Device
        Engine with its memory rules, and the device.
    limit : BatchLimit, optional
        Largest tokens and sequences of an iteration; by default the engine's for the device.

    Returns
    -------
    ServingMemory
        Memory of each part [byte], and sizes of the KV cache per token.
    """
    bound = limit or engine.batch_limit(device)
    weights = _weights(work, sharding, formats)
    sampled = _SAMPLED_LOGIT_BYTES / 4.0 * _widest(work.head_kernels) * min(bound.sequences, bound.tokens)
    activations = _WIDEST_TENSORS_ALIVE * _widest(work.layers) * bound.tokens + sampled
    total = device.memory.usable_bytes
    if engine.share_of == "total":
        left = engine.memory_share * total - weights - activations - engine.reserve
    else:
        left = engine.memory_share * (total - weights - activations - engine.reserve)
    width, causal = formats.cache_bytes, [each for each in work.attention if each.causal]
    sizes = [each.count * each.cache_elements_per_token * width / sharding.pp for each in causal]
    groups = tuple(KVCacheGroup(size, each.window) for size, each in zip(sizes, causal, strict=True))
    return ServingMemory(
        weights,
        activations,
        engine.reserve,
        left,
        total,
        groups,
        state_bytes_per_sequence=STATE_ELEMENT_BYTES * work.state_elements / sharding.pp,
        attention_dp_ranks=sharding.attention_dp,
        tokens_per_page=engine.page,
    )


def _weights(work: LoweredForward, sharding: Sharding, formats: Formats) -> float:
    """Return the bytes of weights on a device: GEMMs in the quantised format, everything else in 16 bits (or fp32)."""
    experts = work.expert_weight_elements
    dense = sum(each.weight_elements * each.count for each in work.layers if not each.is_expert_gemm)
    quantised = experts / sharding.attention_dp * formats.expert_formats.weight_bytes + dense * formats.weight_bytes
    wide = 4.0 if formats.weight_format == "fp32" else 2.0
    return (quantised + max(work.parameters - experts - dense, 0.0) * wide) / sharding.pp


def _widest(kernels: tuple[TokenScaledKernel, ...]) -> float:
    """Return the largest number of bytes that any of the kernels writes for each further token."""
    return max([0.0, *(each.kernel_at(2.0).bytes_written - each.kernel_at(1.0).bytes_written for each in kernels)])
