"""Attention to selected keys or to compressed keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers._attention import Attention, LatentAttention, rms_norm, rotary_embedding_passes
from paleo.layers.base import (
    LAYERS,
    Layer,
    LayerImplementations,
    LayerOperations,
    linear_projection,
    norm_pass,
    parameter_vector,
)
from paleo.operations.base import MemoryPass, Operation, OperationKind, add_operation_kind
from paleo.operations.contraction import Contraction, FusedAttention, causal_score_share
from paleo.operations.tensor import Tensor

# Sparse attention over keys that an indexer selects: latent vectors (DeepSeek-V3.2, GLM 5) or blocks of keys
# (MiniMax M3)

add_operation_kind(OperationKind("key_top_k", "the keys with the highest scores of each query"))
#: FLOP per score of a top-k selection: the passes of a radix selection over four bytes.
_TOP_K_FLOPS_PER_SCORE = 4.0


@dataclass(frozen=True, slots=True)
class _SparseAttentionIndexer:
    """Indexer that selects keys for each query by scores: sum over ``heads`` of weight · relu(q · k).

    Selected are ``top_k`` keys, or blocks of ``keys_per_block`` keys, of which the largest score counts. If
    ``weighted``, each head and query has a learned weight. Otherwise each head selects for its own group of queries.
    """

    heads: int
    head_dim: int
    top_k: int
    keys_per_block: int = 1
    weighted: bool = True

    def selection_operations(
        self, name: str, x: Tensor, source: Tensor, keys: Tensor | None = None
    ) -> tuple[tuple[Operation, ...], Tensor]:
        """Return the operations of the indexer, and the tensor of selected key positions for each query.

        Queries are projected from ``source``. ``keys`` (batch, keys, dim) are given, or projected from ``x``. No
        gradient flows to either.
        """
        x, source = replace(x, needs_gradient=False), replace(source, needs_gradient=False)
        batch, seq = x.dims[:2]
        q_up, query = linear_projection(
            f"{name}.query", source, {"index_heads": self.heads, "index_dim": self.head_dim}
        )
        operations: list[Operation] = [q_up]
        if keys is None:
            k_up, key = linear_projection(f"{name}.key", x, {"index_dim": self.head_dim})
            norm = rms_norm(key) if not self.weighted else _layer_norm(key)
            rotations, (query, key) = rotary_embedding_passes(query, norm.out)
            operations += [k_up, norm, *rotations]
            keys = key.with_renamed_dims({seq: "keys"})
        if not self.weighted:
            operations.append(rms_norm(query))
            query = operations[-1].out
        entries, per_query = keys.sizes[1], {batch: x.sizes[0], seq: x.sizes[1]}
        per_head = {} if self.weighted else {"index_heads": self.heads}
        scores = Tensor.of(f"{name}.scores", per_query | per_head | {"keys": entries}, "statistic")
        still, frozen_keys = replace(query, needs_gradient=False), replace(keys, needs_gradient=False)
        visible = causal_score_share(entries, entries)
        operations.append(Contraction(scores.name, still, frozen_keys, scores, unmasked_share=visible))
        chosen = min(self.top_k, -(-int(entries) // self.keys_per_block))
        picked = Tensor.of(f"{name}.chosen", per_query | per_head | {"chosen": chosen}, "statistic")
        flops = _TOP_K_FLOPS_PER_SCORE
        operations.append(
            MemoryPass(picked.name, "key_top_k", (scores,), picked, flops_per_element=flops, backward_rule="free")
        )
        return (*operations, *self._indexer_loss(name, x, query, keys, chosen * self.keys_per_block)), picked

    def _indexer_loss(self, name: str, x: Tensor, query: Tensor, keys: Tensor, chosen: int) -> tuple[Operation, ...]:
        """Return the operations of the indexer's auxiliary loss: scores of the selected keys, with their gradient."""
        batch, seq = x.dims[:2]
        sizes = {batch: x.sizes[0], "chosen": min(chosen, int(keys.sizes[1])), "index_dim": self.head_dim}
        picked_keys = keys.reshaped(sizes, name=f"{name}.chosen_keys")
        gather = MemoryPass(picked_keys.name, "copy", (keys,), picked_keys, flops_per_element=0.0)
        rows = {batch: x.sizes[0], seq: x.sizes[1]}
        operations: tuple[Operation, ...] = (gather,)
        lhs = query
        if self.weighted:
            to_weights, weights = linear_projection(f"{name}.weights", x, {"index_heads": self.heads})
            lhs = query.like(f"{name}.weighted")
            weigh = MemoryPass(lhs.name, "elementwise", (query, weights), lhs, saved=(query, weights))
            operations = (gather, to_weights, weigh)
        per_head = {} if self.weighted else {"index_heads": self.heads}
        kept_scores = Tensor.of(f"{name}.kept_scores", rows | per_head | {"chosen": sizes["chosen"]}, "statistic")
        product = Contraction(kept_scores.name, lhs, picked_keys, kept_scores)
        loss = kept_scores.like(f"{name}.loss")
        softmax = MemoryPass(loss.name, "softmax", (kept_scores,), loss, (), (loss,), 6.0, reduced_dims=("chosen",))
        return (*operations, product, softmax)


def _layer_norm(x: Tensor) -> MemoryPass:
    """Return the memory pass of a layer norm over the last dim, with scale and shift."""
    out, dim = x.like(f"{x.name}.normed"), x.dims[-1]
    return norm_pass(x, out, tuple(parameter_vector(f"{out.name}.{part}", x, dim) for part in ("weight", "bias")))


@LAYERS.register("sparse_latent_attention")
class SparseLatentAttention(LatentAttention):
    """Latent attention to the ``top_k`` keys that an indexer selects for each query (DeepSeek sparse attention).

    The indexer has ``index_heads`` heads of ``index_dim`` entries. Sequences longer than ``top_k`` attend in latent
    space, where all heads share one key: queries are multiplied by the key half of the up projection, contexts by the
    value half. Shorter sequences attend to all keys, as latent attention does. A layer that ``shares_index`` uses the
    selection of an earlier layer (GLM 5.2).
    """

    index_heads: PositiveInt = 64
    index_dim: PositiveInt = 128
    top_k: PositiveInt = 2048
    shares_index: bool = False

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        dense = super().to_operations(name, inputs, choices)
        index = () if self.shares_index else self._index(name, x, dense.operations)
        if x.sizes[1] <= self.top_k:
            return LayerOperations((*dense.operations[:-1], *index, dense.operations[-1]), dense.out)
        return LayerOperations(
            (*self._latents(name, dense.operations), *index, *self._attend_selected_keys(name, x, dense)), dense.out
        )

    def _index(self, name: str, x: Tensor, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """Return the indexer's operations; queries are projected from the attention's latent query if there is one.

        ``operations`` are those of latent attention.
        """
        latent = next((op.out for op in operations if op.name == f"{name}.q_norm"), x)
        source = latent.with_renamed_dims({latent.dims[1]: x.dims[1]})
        return _SparseAttentionIndexer(self.index_heads, self.index_dim, self.top_k).selection_operations(
            f"{name}.index", x, source
        )[0]

    def _latents(self, name: str, operations: tuple[Operation, ...]) -> tuple[Operation, ...]:
        """Return the operations of latent attention before the attention heads: latent vectors, norms, queries."""
        kept = {f"{name}.{part}" for part in ("q_down", "q_norm", "query", "kv_down", "kv_norm")}
        return tuple(operation for operation in operations if operation.name in kept)

    def _attend_selected_keys(self, name: str, x: Tensor, dense: LayerOperations) -> tuple[Operation, ...]:
        """Return the operations of attention to the selected keys in latent space, where all heads share one key.

        ``dense`` is the same layer as latent attention to all keys.
        """
        batch, seq, hidden = x.dims
        rows = {batch: x.sizes[0], seq: x.sizes[1]}
        heads = {"kv_heads": self.heads, "group": 1}
        narrow = Tensor.of(f"{name}.query", rows | heads | {"head_dim": self.nope_dim})
        absorb, wide = linear_projection(f"{name}.kv_up.key", narrow, {"kv_rank": self.kv_rank}, shared=("kv_heads",))
        query = Tensor.of(f"{name}.latent_query", rows | heads | {"head_dim": self.kv_rank + self.rope_dim})
        latent = next(op.out for op in dense.operations if op.name == f"{name}.kv_norm")
        entries = {batch: x.sizes[0], "keys": x.sizes[1], "latents": 1}
        key = Tensor.of(f"{name}.latent_key", entries | {"head_dim": self.kv_rank + self.rope_dim})
        value = latent.reshaped(entries | {"value_dim": self.kv_rank})
        turned = MemoryPass(query.name, "rope", (narrow, wide), query, flops_per_element=1.0)
        joined = MemoryPass(key.name, "rope", (latent,), key, flops_per_element=1.0)
        context = Tensor.of(f"{name}.latent_context", rows | heads | {"value_dim": self.kv_rank})
        core = FusedAttention(f"{name}.core", query, key, value, context, True, self.top_k)
        back, out = linear_projection(
            f"{name}.kv_up.value", context, {"head_dim": self.value_dim}, shared=("kv_heads",)
        )
        output, _ = linear_projection(f"{name}.out", out, {hidden: x.sizes[2]}, contract=3)
        return (absorb, turned, joined, core, back, output)


@LAYERS.register("sparse_attention")
class SparseAttention(Attention):
    """Grouped-query attention to the ``top_k`` blocks of ``block`` keys that an indexer selects for each query.

    The indexer has ``index_heads`` heads of ``index_dim`` entries. The query's own block is among the selected ones
    (MiniMax M3).
    """

    index_heads: PositiveInt = 4
    index_dim: PositiveInt = 128
    block: PositiveInt = 128
    top_k: PositiveInt = 16
    causal: Literal[True] = True
    optional_input_count = 0

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        attended = min(self.top_k * self.block, int(x.sizes[1]))
        dense = self.model_copy(update={"window": attended})
        expansion = Attention.to_operations(dense, name, inputs, choices)
        indexer = _SparseAttentionIndexer(self.index_heads, self.index_dim, self.top_k, self.block, weighted=False)
        index, _ = indexer.selection_operations(f"{name}.index", x, x)
        return LayerOperations((*expansion.operations[:1], *index, *expansion.operations[1:]), expansion.out)


# Attention over a sliding window and over compressed keys (DeepSeek-V4); all heads share one key, which is also the
# value


@LAYERS.register("compressed_attention")
class CompressedAttention(Layer):
    """Attention of ``heads`` of ``head_dim`` entries to the last ``window`` positions and to compressed keys.

    Queries are projected from a latent vector of ``query_rank`` entries. All heads share one key, which is also the
    value. With a ``ratio`` above 0, each compressed key is a mean, weighted by a softmax, of that many positions; with
    ``overlap``, of twice as many, half of which the key before also covers. With ``top_k`` an indexer of
    ``index_heads`` heads of ``index_dim`` entries selects compressed keys; without it all are attended to. The output
    projection has a matrix of ``out_rank`` columns for each of ``out_groups`` groups of heads, which tensor parallelism
    splits, and a common matrix after them.
    """

    tensor_parallel_dims = ("kv_heads",)
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

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if self.heads % self.out_groups:
            raise GraphError(f"{name}: heads {self.heads} must be a multiple of out_groups {self.out_groups}")
        heads = {"kv_heads": self.out_groups, "group": self.heads // self.out_groups}
        q_down, low = linear_projection(f"{name}.q_down", x, {"q_rank": self.query_rank})
        q_norm = rms_norm(low, f"{name}.q_norm")
        q_up, query = linear_projection(f"{name}.query", q_norm.out, heads | {"head_dim": self.head_dim})
        head_norm = norm_pass(query, query.like(f"{query.name}.normed"))
        kv_up, near = linear_projection(f"{name}.key", x, {"head_dim": self.head_dim})
        kv_norm = rms_norm(near)
        rotations, (query, near) = rotary_embedding_passes(head_norm.out, kv_norm.out)
        operations: tuple[Operation, ...] = (q_down, q_norm, q_up, head_norm, kv_up, kv_norm, *rotations)
        far, entries, chosen = self._compress_keys(name, x, q_norm.out)
        length = x.sizes[1] + (entries.sizes[1] if entries is not None else 0)
        sizes = {x.dims[0]: x.sizes[0], "keys": length, "latents": 1}
        key = Tensor.of(f"{name}.keys", {**sizes, "head_dim": self.head_dim})
        parts = (near,) if entries is None else (near, entries)
        joined = MemoryPass(key.name, "copy", parts, key, flops_per_element=0.0)
        sinks = Tensor.of(f"{name}.sinks", heads, "parameter")
        read = MemoryPass(sinks.name, "copy", (), sinks.like(f"{name}.sink_scores", role="statistic"), (sinks,))
        context = query.with_renamed_dims({"head_dim": "value_dim"}).like(f"{name}.context")
        value = key.with_renamed_dims({"head_dim": "value_dim"})
        attended = min(self.window, int(x.sizes[1])) + chosen
        core = FusedAttention(f"{name}.core", query, key, value, context, True, attended)
        grouped, narrow = linear_projection(
            f"{name}.out_groups", context, {"out_rank": self.out_rank}, contract=2, shared=("kv_heads",)
        )
        output, out = linear_projection(f"{name}.out", narrow, {x.dims[-1]: x.sizes[-1]}, contract=2)
        return LayerOperations((*operations, *far, joined, read, core, grouped, output), out)

    def _compress_keys(self, name: str, x: Tensor, latent: Tensor) -> tuple[tuple[Operation, ...], Tensor | None, int]:
        """Return (operations that compress keys, compressed keys or None, most compressed keys per query)."""
        if not self.ratio:
            return (), None, 0
        operations, entries = self._pooled(f"{name}.compressor", x, self.head_dim)
        if x.sizes[1] < self.ratio:
            return operations, None, 0
        if self.top_k is None:
            return operations, entries, int(entries.sizes[1])
        index_ops, index_keys = self._pooled(f"{name}.index.compressor", x, self.index_dim)
        indexer = _SparseAttentionIndexer(self.index_heads, self.index_dim, self.top_k)
        choice, _ = indexer.selection_operations(
            f"{name}.index", x, latent, index_keys.with_renamed_dims({"entries": "keys", "head_dim": "index_dim"})
        )
        return (*operations, *index_ops, *choice), entries, min(self.top_k, int(entries.sizes[1]))

    def _pooled(self, name: str, x: Tensor, dim: int) -> tuple[tuple[Operation, ...], Tensor]:
        """Return the operations that compress keys, and the keys (batch, entries, dim).

        Each is a mean of ``ratio`` positions, weighted by a learned softmax.
        """
        width = 2 * dim if self.overlap else dim
        both, packed = linear_projection(f"{name}.up", x, {"gates": 2, "pooled": width})
        bias = Tensor(f"{name}.bias", ("positions", "pooled"), (self.ratio, width), "parameter")
        count = max(1, int(x.sizes[1]) // self.ratio)
        pooled = Tensor(f"{name}.pooled", (x.dims[0], "entries", "head_dim"), (x.sizes[0], count, dim))
        pool = MemoryPass(
            pooled.name, "pool", (packed,), pooled, (bias,), (packed,), flops_per_element=8.0 * self.ratio
        )
        norm = rms_norm(pooled)
        out = norm.out.like(f"{name}.rotated")
        turn = MemoryPass(out.name, "rope", (norm.out,), out, flops_per_element=3.0)
        return (both, pool, norm, turn), out
