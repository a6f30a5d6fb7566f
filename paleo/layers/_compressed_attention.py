"""Attention over a window and over compressed keys (DeepSeek-V4): one key that is its own value serves all heads; far
keys are means of ``ratio`` positions each, of which an indexer may choose.

Reference: DeepSeek-AI, DeepSeek-V4, 2026, section 2.3.
"""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers._attention import normed, rotate
from paleo.layers._sparse_attention import Indexer
from paleo.layers.base import LAYERS, NORM_FLOPS, Choices, Expansion, Layer, project
from paleo.operations.base import MemoryPass, Operation
from paleo.operations.contraction import FusedAttention
from paleo.operations.tensor import Size, Tensor


@LAYERS.register("compressed_attention")
class CompressedAttention(Layer):
    """Attention of ``heads`` of ``head_dim`` entries to the last ``window`` positions and to compressed entries.

    Queries come out of a latent vector of ``query_rank`` entries, all heads share one key, which is its own value. With
    a ``ratio`` above 0 a softmax over as many positions makes each compressed entry; ``overlap``: over twice as many,
    half of them of the entry before. With ``top_k`` an indexer of ``index_heads`` heads of ``index_dim`` entries
    chooses among the compressed entries, else all of them are attended to. The output projection has a matrix of
    ``out_rank`` columns for each of ``out_groups`` groups of heads, which tensor parallelism divides, and one over
    all of these.
    """

    tensor_dims = ("kv_heads",)
    heads: PositiveInt
    head_dim: PositiveInt
    query_rank: PositiveInt
    window: PositiveInt
    ratio: Literal[0, 4, 8, 16, 32, 64, 128] = 0
    overlap: bool = False
    top_k: PositiveInt | None = None
    index_heads: PositiveInt = 64
    index_dim: PositiveInt = 128
    out_groups: PositiveInt
    out_rank: PositiveInt

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if self.heads % self.out_groups:
            raise GraphError(f"{name}: heads {self.heads} must be a multiple of out_groups {self.out_groups}")
        heads: dict[str, Size] = {"kv_heads": self.out_groups, "group": self.heads // self.out_groups}
        q_down, low = project(f"{name}.q_down", x, {"q_rank": self.query_rank})
        q_norm = normed(low, f"{name}.q_norm")
        q_up, query = project(f"{name}.query", q_norm.out, heads | {"head_dim": self.head_dim})
        unweighted = query.like(f"{query.name}.normed")
        head_norm = MemoryPass(
            unweighted.name, "norm", (query,), unweighted, (), (query,), NORM_FLOPS, reduces=("head_dim",)
        )
        kv_up, near = project(f"{name}.key", x, {"head_dim": self.head_dim})
        kv_norm = normed(near)
        rotations, (query, near) = rotate(unweighted, kv_norm.out)
        operations: tuple[Operation, ...] = (q_down, q_norm, q_up, head_norm, kv_up, kv_norm, *rotations)
        far, entries, chosen = self._compressed(name, x, q_norm.out)
        length = x.sizes[1] + (entries.sizes[1] if entries is not None else 0)
        sizes: dict[str, Size] = {x.dims[0]: x.sizes[0], "keys": length, "latents": 1}
        key = Tensor(f"{name}.keys", (*sizes, "head_dim"), (*sizes.values(), self.head_dim))
        joined = MemoryPass(
            key.name, "copy", (near,) if entries is None else (near, entries), key, flops_per_element=0.0
        )
        sinks = Tensor(f"{name}.sinks", tuple(heads), tuple(heads.values()), "parameter")
        read = MemoryPass(sinks.name, "copy", (), sinks.like(f"{name}.sink_scores", role="statistic"), (sinks,))
        context = query.renamed({"head_dim": "value_dim"}).like(f"{name}.context")
        value = key.renamed({"head_dim": "value_dim"})
        attended = min(self.window, int(x.sizes[1])) + chosen
        core = FusedAttention(f"{name}.core", query, key, value, context, True, attended)
        grouped, narrow = project(
            f"{name}.out_groups", context, {"out_rank": self.out_rank}, contract=2, shared=("kv_heads",)
        )
        output, out = project(f"{name}.out", narrow, {x.dims[-1]: x.sizes[-1]}, contract=2)
        return Expansion((*operations, *far, joined, read, core, grouped, output), out)

    def _compressed(self, name: str, x: Tensor, latent: Tensor) -> tuple[tuple[Operation, ...], Tensor | None, int]:
        """Compressed entries, and how many of them a query sees at most."""
        if not self.ratio or x.sizes[1] < self.ratio:
            return self._unread(name, x), None, 0
        operations, entries = self._pooled(f"{name}.compressor", x, self.head_dim)
        if self.top_k is None:
            return operations, entries, int(entries.sizes[1])
        index_ops, index_keys = self._pooled(f"{name}.index.compressor", x, self.index_dim)
        indexer = Indexer(self.index_heads, self.index_dim, self.top_k)
        choice, _ = indexer.choose(
            f"{name}.index", x, latent, index_keys.renamed({"entries": "keys", "head_dim": "index_dim"})
        )
        return (*operations, *index_ops, *choice), entries, min(self.top_k, int(entries.sizes[1]))

    def _unread(self, name: str, x: Tensor) -> tuple[Operation, ...]:
        """The weights of a compressor that a short sequence leaves idle."""
        if not self.ratio:
            return ()
        return self._pooled(f"{name}.compressor", x, self.head_dim)[0]

    def _pooled(self, name: str, x: Tensor, dim: int) -> tuple[tuple[Operation, ...], Tensor]:
        """Entries (batch, entries, dim): means of ``ratio`` positions each, weighted by a softmax of learned scores."""
        width = 2 * dim if self.overlap else dim
        both, packed = project(f"{name}.up", x, {"gates": 2, "pooled": width})
        bias = Tensor(f"{name}.bias", ("positions", "pooled"), (self.ratio, width), "parameter")
        count = max(1, int(x.sizes[1]) // self.ratio)
        pooled = Tensor(f"{name}.pooled", (x.dims[0], "entries", "head_dim"), (x.sizes[0], count, dim))
        pool = MemoryPass(
            pooled.name, "pool", (packed,), pooled, (bias,), (packed,), flops_per_element=8.0 * self.ratio
        )
        norm = normed(pooled)
        out = norm.out.like(f"{name}.rotated")
        turn = MemoryPass(out.name, "rope", (norm.out,), out, flops_per_element=3.0)
        return (both, pool, norm, turn), out
