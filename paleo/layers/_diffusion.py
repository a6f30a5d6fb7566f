"""Layers of diffusion transformers (blocks with adaptive norms), and layers over a clustered vocabulary."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt

from paleo.errors import GraphError
from paleo.layers._attention import attention_operations, rms_norm, rotary_embedding_passes
from paleo.layers._linear import tied_gradient_passes, up_projection_operations
from paleo.layers._loss import CrossEntropy
from paleo.layers.base import LAYERS, Layer, LayerImplementations, LayerOperations, format_shape, linear_projection
from paleo.operations.base import MemoryPass, Operation
from paleo.operations.tensor import Tensor

# A vocabulary in clusters by frequency: a cluster's logits are computed only for the tokens whose word is in it


class ClusteredVocabulary(Layer):
    """Base of adaptive embedding and softmax, whose vocabulary is divided into clusters of words by frequency.

    ``sizes`` are the words of each cluster, the most frequent first. ``shares`` are the parts of all tokens whose word
    is in each cluster, which depend on the data. Embeddings of cluster i have hidden / ``narrowing``^i entries, and a
    projection of each cluster widens them to the hidden size.

    Reference: Grave et al., Efficient softmax approximation for GPUs, ICML 2017; Baevski and Auli, ICLR 2019.
    """

    tensor_parallel_dims = ("vocab",)
    sizes: list[PositiveInt] = Field(min_length=2)
    shares: list[Annotated[float, Field(gt=0, le=1)]]
    narrowing: PositiveInt = 1

    def cluster_widths(self, name: str, hidden: int) -> list[int]:
        """List the embedding width of each cluster [entries].

        Raise GraphError if a width is 0 or shares do not match.
        """
        if len(self.shares) != len(self.sizes) or round(sum(self.shares), 3) != 1.0:
            raise GraphError(
                f"{name}: shares {self.shares} are not {len(self.sizes)} parts of one, one for each cluster"
            )
        widths = [hidden // self.narrowing**cluster for cluster in range(len(self.sizes))]
        if not widths[-1]:
            raise GraphError(f"{name}: narrowing {self.narrowing} leaves no entries of {hidden} in the last cluster")
        return widths


@LAYERS.register("adaptive_embedding")
class AdaptiveEmbedding(ClusteredVocabulary):
    """Embedding with one table per cluster: adds the dim ``hidden`` of ``features`` entries."""

    features: PositiveInt

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (2,))
        operations: list[Operation] = []
        for cluster, width in enumerate(self.cluster_widths(name, self.features)):
            words = _part(x, self.shares[cluster])
            table = Tensor(f"{name}.{cluster}.weight", ("vocab", "width"), (self.sizes[cluster], width), "parameter")
            rows = Tensor(f"{name}.{cluster}", (*words.dims, "width"), (*words.sizes, width))
            gather = MemoryPass(rows.name, "gather", (words,), rows, (table,), (x,), 0.0, table_rows_per_output=True)
            operations.append(gather)
            if self.narrowing > 1:
                product, _ = linear_projection(f"{rows.name}.projection", rows, {"hidden": self.features})
                operations.append(product)
        out = Tensor(name, (*x.dims, "hidden"), (*x.sizes, self.features))
        return LayerOperations(tuple(operations), choices.with_output_precision(out, "embedding"))


@LAYERS.register("adaptive_softmax")
class AdaptiveSoftmax(ClusteredVocabulary):
    """Adaptive softmax: the loss of each token, with logits of rare words only where they are needed.

    For all tokens it computes the logits of the most frequent words and one logit per further cluster. The words of a
    further cluster get logits only for the tokens in it, whose states are gathered. ``tie`` uses the tables of an
    adaptive embedding, and the projections of all clusters but the first.
    """

    tie: str | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        operations: list[Operation] = []
        clusters, _ = linear_projection(f"{name}.clusters", x, {"clusters": len(self.sizes) - 1}, bias=True)
        for cluster, width in enumerate(self.cluster_widths(name, int(x.sizes[-1]))):
            within = f"{name}.{cluster}"
            states = _part(x, self.shares[cluster] if cluster else 1.0)
            if cluster:
                copied = states.like(f"{within}.states")
                operations.append(MemoryPass(copied.name, "gather", (states,), copied, flops_per_element=0.0))
                states = copied
            operations += self._cluster(within, states, cluster, width, choices)
        out = Tensor(name, x.dims[:-1], x.sizes[:-1], "statistic")
        return LayerOperations((clusters, *operations), out)

    def _cluster(
        self, name: str, states: Tensor, cluster: int, width: int, choices: LayerImplementations
    ) -> tuple[Operation, ...]:
        """Return the operations for logits and loss of one vocabulary cluster, for the tokens of that cluster."""
        operations: list[Operation] = []
        tables = f"{self.tie}.{cluster}" if self.tie else name
        if self.narrowing > 1:
            weight = f"{tables if cluster else name}.projection.weight"
            product, states = linear_projection(f"{name}.projection", states, {"width": width}, weight=weight)
            operations.append(product)
        sizes = {"vocab": self.sizes[cluster]}
        product, logits = linear_projection(f"{name}.logits", states, sizes, bias=True, weight=f"{tables}.weight")
        if self.tie:  # without narrowing, the tables of all clusters are parts of one
            parts = len(self.sizes) if self.narrowing == 1 else 1
            operations += tied_gradient_passes(name, product.rhs, choices, parts)
        return (*operations, product, *CrossEntropy().to_operations(name, (logits,), choices).operations)


def _part(x: Tensor, share: float) -> Tensor:
    """Return a tensor like ``x`` that holds only a ``share`` (0 to 1) of each sample's tokens."""
    return Tensor(x.name, x.dims, (x.sizes[0], x.sizes[1] * share, *x.sizes[2:]), x.role, x.needs_gradient)


# Blocks of diffusion transformers: attention over image and text together, with separate or shared weights, modulated
# by a conditioning vector


def _modulation(name: str, conditioning: Tensor, count: int) -> list[Operation]:
    """Return the operations that compute ``count`` vectors of shifts, scales and gates per sample.

    The vectors are projected from the ``conditioning`` vector.
    """
    activated = conditioning.like(f"{name}.silu")
    width = int(conditioning.sizes[-1])
    product, _ = linear_projection(f"{name}.vectors", activated, {"modulation": count * width}, bias=True)
    silu = MemoryPass(activated.name, "elementwise", (conditioning,), activated, saved=(conditioning,))
    return [silu, product]


def _modulated_norm(name: str, x: Tensor) -> tuple[MemoryPass, Tensor]:
    """Return a layer norm without weights, scaled and shifted per sample, as (memory pass, output tensor)."""
    out = x.like(name)
    statistic = x.without_dims(x.dims[-1], name=f"{name}.statistics", role="statistic")
    return MemoryPass(name, "norm", (x,), out, (), (x, statistic), 10.0, reduced_dims=(x.dims[-1],)), out


def _gated_sum(name: str, x: Tensor, update: Tensor) -> tuple[MemoryPass, Tensor]:
    out = x.like(name)
    return MemoryPass(name, "elementwise", (x, update), out, saved=(update,), flops_per_element=2.0), out


def _heads(name: str, x: Tensor, heads: int, head_dim: int) -> tuple[list[Operation], tuple[Tensor, Tensor, Tensor]]:
    """Return the projections to query, key and value of all heads, and these three tensors.

    One product over ``x`` yields all three; query and key are then normalised and rotated.
    """
    batch, seq = x.dims[:2]
    query = Tensor(f"{name}.query", (batch, seq, "kv_heads", "group", "head_dim"), (*x.sizes[:2], heads, 1, head_dim))
    key, value = (
        Tensor(f"{name}.{part}", (batch, seq, "kv_heads", "head_dim"), (*x.sizes[:2], heads, head_dim))
        for part in ("key", "value")
    )
    norms = [rms_norm(query), rms_norm(key)]
    rotations, (query, key) = rotary_embedding_passes(*(norm.out for norm in norms))
    key, value = (tensor.with_renamed_dims({seq: "keys"}) for tensor in (key, value))
    return [*norms, *rotations], (query, key, value)


class DiffusionStreamBlock(Layer):
    """Base of the blocks of a diffusion transformer with text and image streams, as in FLUX.1.

    Inputs: (batch, seq, hidden) with the text positions first, and the conditioning vector of each sample.
    """

    input_count: ClassVar[int | None] = 2
    heads: PositiveInt
    ffn: PositiveInt

    def head_dim(self, name: str, x: Tensor, conditioning: Tensor) -> int:
        """Return the number of entries of a head; raise GraphError if the inputs do not match the block."""
        if len(x.dims) != 3 or len(conditioning.dims) != 2 or int(x.sizes[-1]) % self.heads:
            raise GraphError(
                f"{name}: {format_shape(x)} and {format_shape(conditioning)} do not make {self.heads} heads"
            )
        return int(x.sizes[-1]) // self.heads


@LAYERS.register("double_stream")
class DoubleStreamBlock(DiffusionStreamBlock):
    """Diffusion block with separate weights for text and image, and attention over both.

    ``text`` is the number of text positions (Esser et al., Scaling rectified flow transformers, 2024, figure 2b).
    """

    text: PositiveInt

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        x, conditioning = inputs
        size = self.head_dim(name, x, conditioning)
        operations: list[Operation] = []
        streams = {"image": x.sizes[1] - self.text, "text": float(self.text)}
        for stream, length in streams.items():
            part = x.reshaped(x.shape | {x.dims[1]: length})
            operations += _modulation(f"{name}.{stream}", conditioning, 6)
            norm, normed = _modulated_norm(f"{name}.{stream}.norm1", part)
            outputs = {"kv_heads": self.heads, "packed": 3 * size}
            packed, _ = linear_projection(f"{name}.{stream}.qkv", normed, outputs, bias=True)
            projections, _ = _heads(f"{name}.{stream}", part, self.heads, size)
            operations += [norm, packed, *projections]
        _, (query, key, value) = _heads(name, x, self.heads, size)
        core, context = attention_operations(
            name, query, key, value, causal=False, window=None, dropout=0.0, choices=choices
        )
        operations += core
        out = x.like(name)
        for stream, length in streams.items():
            operations += self._after_attention(f"{name}.{stream}", x, context, length, choices)
        parts = tuple(x.reshaped(x.shape | {x.dims[1]: n}, name=f"{name}.{s}.out") for s, n in streams.items())
        operations.append(MemoryPass(name, "elementwise", parts, out, backward_rule="free"))
        return LayerOperations(tuple(operations), out)

    def _after_attention(
        self, name: str, x: Tensor, context: Tensor, length: float, choices: LayerImplementations
    ) -> list[Operation]:
        """Return the operations of one stream after attention: output projection, gated sum and feed-forward layers."""
        hidden = x.dims[-1]
        part, share = (each.reshaped(each.shape | {each.dims[1]: length}) for each in (x, context))
        product, projected = linear_projection(f"{name}.attention", share, {hidden: x.sizes[-1]}, bias=True, contract=3)
        first, summed = _gated_sum(f"{name}.sum1", part, projected)
        norm, normed = _modulated_norm(f"{name}.norm2", summed)
        up, inner = up_projection_operations(f"{name}.mlp", normed, self.ffn, "gelu_tanh", choices, bias=True)
        down, back = linear_projection(f"{name}.mlp.down", inner, {hidden: x.sizes[-1]}, bias=True)
        second, _ = _gated_sum(f"{name}.out", summed, back)
        return [product, first, norm, *up, down, second]


@LAYERS.register("single_stream")
class SingleStreamBlock(DiffusionStreamBlock):
    """Diffusion block with parallel attention and feed-forward over the joint sequence.

    One product comes before both and one after both (Dehghani et al., Scaling vision transformers to 22 billion
    parameters, 2023, as in FLUX.1).
    """

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        x, conditioning = inputs
        size, hidden = self.head_dim(name, x, conditioning), x.dims[-1]
        modulation = _modulation(name, conditioning, 3)
        norm, normed = _modulated_norm(f"{name}.norm", x)
        wide = 3 * int(x.sizes[-1]) + self.ffn
        before, packed = linear_projection(f"{name}.before", normed, {"ffn": wide}, bias=True)
        projections, (query, key, value) = _heads(name, x, self.heads, size)
        core, _ = attention_operations(name, query, key, value, causal=False, window=None, dropout=0.0, choices=choices)
        inner = packed.reshaped(packed.shape | {packed.dims[-1]: self.ffn})
        activated = inner.like(f"{name}.gelu")
        gelu = MemoryPass(activated.name, "elementwise", (inner,), activated, saved=(inner,), flops_per_element=8.0)
        joined = packed.reshaped(packed.shape | {packed.dims[-1]: int(x.sizes[-1]) + self.ffn}, name=f"{name}.joined")
        copy = MemoryPass(joined.name, "copy", (activated,), joined, flops_per_element=0.0)
        after, back = linear_projection(f"{name}.after", joined, {hidden: x.sizes[-1]}, bias=True)
        gated, out = _gated_sum(name, x, back)
        return LayerOperations((*modulation, norm, before, *projections, *core, gelu, copy, after, gated), out)
