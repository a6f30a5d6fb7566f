"""Linear layers, feed-forward layers, embeddings, and the tables and interactions of recommendation models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import (
    LAYERS,
    Layer,
    LayerImplementations,
    LayerOperations,
    activation_passes,
    format_shape,
    gated_unit_passes,
    linear_projection,
)
from paleo.operations.base import Kernel, MemoryPass, Operation, elementwise_kernel
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import Tensor

if TYPE_CHECKING:
    from paleo.operations.tensor import Precision


# Linear layers: a product of the last dim with a weight, the feed-forward layers of a transformer, grouped products


@LAYERS.register("linear")
class Linear(Layer):
    """Linear layer: y = x · W + b over the last dim.

    ``dim`` names the new last dim. ``tie`` uses the weight of another layer, such as an embedding.
    """

    tensor_parallel_dims = ("vocab",)
    features: PositiveInt
    bias: bool = True
    dim: str = "features"
    tie: str | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        weight = f"{self.tie}.weight" if self.tie else None
        operation, out = linear_projection(name, inputs[0], {self.dim: self.features}, bias=self.bias, weight=weight)
        tied = tied_gradient_passes(name, operation.rhs, choices) if self.tie else ()
        return LayerOperations((*tied, operation), out)


#: Gated activations -> the function of their gate.
_GATED_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "clamped_swiglu": "silu"}


@LAYERS.register("mlp")
class Mlp(Layer):
    """Feed-forward layers of a transformer: up projection, activation (or gated activation), down projection.

    Their dims are hidden → ffn → hidden.
    """

    tensor_parallel_dims = ("ffn",)
    ffn: PositiveInt
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "swiglu", "geglu", "reglu"] = "gelu"
    bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        operations, inner = up_projection_operations(name, x, self.ffn, self.activation, choices, bias=self.bias)
        if self.dropout:
            mask = inner.like(f"{name}.mask", role="mask")
            dropped = inner.like(f"{name}.dropped")
            operations += (MemoryPass(f"{name}.dropout", "dropout", (inner,), dropped, saved=(mask,)),)
            inner = dropped
        down, out = linear_projection(f"{name}.down", inner, {x.dims[-1]: x.sizes[-1]}, bias=self.bias)
        return LayerOperations((*operations, down), out)


def up_projection_operations(
    name: str,
    x: Tensor,
    ffn: int,
    activation: str,
    choices: LayerImplementations,
    *,
    bias: bool,
    shared: tuple[str, ...] = (),
    dim: str = "ffn",
) -> tuple[tuple[Operation, ...], Tensor]:
    """Return the up projection and activation of a feed-forward block, and the output tensor of ``ffn`` entries.

    The projection yields the dim ``dim``. A gated activation takes one product of twice the
    width.
    """
    if activation in _GATED_ACTIVATIONS:
        up, wide = linear_projection(f"{name}.up", x, {"gates": 2, dim: ffn}, bias=bias, shared=shared)
        separate = choices.gates == "separate"
        function = _GATED_ACTIVATIONS[activation]
        passes, inner = gated_unit_passes(f"{name}.act", function, wide, "gates", separate=separate)
    else:
        up, wide = linear_projection(f"{name}.up", x, {dim: ffn}, bias=bias, shared=shared)
        passes, inner = activation_passes(activation, f"{name}.act", wide, choices)
    return (up, *passes), inner


@LAYERS.register("grouped_linear")
class GroupedLinear(Layer):
    """Grouped product: (rows, features) to (rows, ``features``), with a matrix for each of ``groups`` row groups.

    The rows of each group depend on the data; equal shares are their mean. The FLOP do not depend on the shares.
    """

    groups: PositiveInt
    features: PositiveInt
    dim: str = "features"

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (2,))
        rows, last = x.dims
        shares = x.reshaped({"experts": self.groups, rows: x.sizes[0] / self.groups, last: x.sizes[1]})
        product, out = linear_projection(name, shares, {self.dim: self.features}, shared=("experts",))
        return LayerOperations((product,), out.reshaped({rows: x.sizes[0], self.dim: self.features}))


@LAYERS.register("cross_network")
class CrossNetwork(Layer):
    """Cross network (DCN V2): ``layers`` times x ← x0 · (V (U x) + b) + x, with U and V of ``rank``."""

    layers: PositiveInt
    rank: PositiveInt

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (start,) = inputs
        self.check_rank(name, start, (2,))
        x, operations = start, list[Operation]()
        for index in range(self.layers):
            step = f"{name}.{index + 1}"
            down, low = linear_projection(f"{step}.down", x, {"rank": self.rank})
            up, crossed = linear_projection(f"{step}.up", low, {x.dims[-1]: x.sizes[-1]}, bias=True)
            out = x.like(step)
            operations += [
                down,
                up,
                MemoryPass(step, "elementwise", (start, crossed, x), out, (), (start, crossed), 2.0),
            ]
            x = out
        return LayerOperations(tuple(operations), x)


# Table look-ups: word embeddings; the embedding bags of recommendation models and their interaction; sharded tables


@LAYERS.register("embedding")
class Embedding(Layer):
    """Embedding: looks up one row of a table per index, and adds a dim ``dim`` of ``features`` entries.

    Only the rows that are looked up move. ``tie`` uses the table of another embedding (source and target language of a
    translation model). ``rows`` names the dim of the table's rows. Tensor parallelism splits a ``vocab``; small tables
    (the segments of BERT) use another name and stay whole, as in Megatron-LM.
    """

    tensor_parallel_dims = ("vocab",)
    entries: PositiveInt
    features: PositiveInt
    dim: str = "hidden"
    rows: str = "vocab"
    tie: str | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        table = Tensor(f"{self.tie or name}.weight", (self.rows, self.dim), (self.entries, self.features), "parameter")
        out = choices.with_output_precision(Tensor(name, (*x.dims, self.dim), (*x.sizes, self.features)), "embedding")
        return LayerOperations.of(
            MemoryPass(name, "gather", (x,), out, (table,), (x,), 0.0, table_rows_per_output=True)
        )


@dataclass(frozen=True, slots=True)
class TiedGradientSum:
    """Pass that adds up the gradient of a table used as both embedding and weight, as TensorFlow does.

    The framework concatenates the gradients of all products to one tensor and adds its rows, with atomic sums, into a
    zeroed table. Rows that were looked up are few and not counted. If products read the table in ``table_parts``, the
    gradient of each part is as large as the whole table and zero outside its own rows.

    Reference: Cavdar et al., Densifying assumed-sparse tensors, ISC 2019 (TensorFlow's accumulation).
    """

    name: str
    table: Tensor
    table_parts: int = 1

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return (self.table,)

    @property
    def out(self) -> Tensor:
        """Concatenated table gradients of all matrix products; an empty tensor for a table that is not trained."""
        sizes = (self.table_parts * self.table.needs_gradient, *self.table.sizes)
        return Tensor(self.name, ("parts", *self.table.dims), sizes, "statistic")

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset({"parts"})

    def shard(self, ways: Mapping[str, float]) -> TiedGradientSum:
        return replace(self, table=self.table.shard(ways))

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        return ()

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        if not self.table.needs_gradient:
            return ()
        once, joined = (float(t.elements) * precision.gradient_bytes for t in (self.table, self.out))
        cut = (once, joined + once) if self.table_parts > 1 else (0.0, 0.0)
        read, written = cut[0] + 3.0 * joined, cut[1] + 2.0 * joined + once
        return (elementwise_kernel(self.name, "reduce", "backward", float(self.out.elements), read, written),)


def tied_gradient_passes(
    name: str, table: Tensor, choices: LayerImplementations, parts: int = 1
) -> tuple[TiedGradientSum, ...]:
    """Return TensorFlow's extra gradient passes for a tied ``table`` (embedding and output weight).

    The tuple is empty for other frameworks. ``parts`` is the number of pieces in which products read the table.
    """
    if choices.tied_gradient_accumulation == "sum":
        return ()
    return (TiedGradientSum(f"{name}.slices", table, parts),)


@LAYERS.register("embedding_bag")
class EmbeddingBag(Layer):
    """Embedding bags of many tables: (batch) to (batch, tables, features), each the sum of ``bag`` rows."""

    entries: list[PositiveInt]
    features: PositiveInt
    bag: PositiveInt = 1

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        batch = x.dims[0]
        table = Tensor(f"{name}.weight", ("rows", "features"), (sum(self.entries), self.features), "parameter")
        out = Tensor(name, (batch, "tables", "features"), (x.sizes[0], len(self.entries), self.features))
        flops = float(self.bag - 1)
        return LayerOperations.of(
            MemoryPass(name, "gather", (x,), out, (table,), (x,), flops, table_rows_per_output=self.bag)
        )


@LAYERS.register("dot_interaction")
class DotInteraction(Layer):
    """All pairwise dot products of a dense vector and embeddings, concatenated to the dense vector (DLRM).

    Inputs: dense (batch, features) and rows (batch, tables, features). Output: (batch, features + pairs). Reference:
    Naumov et al., 2019.
    """

    input_count = 2

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        dense, rows = inputs
        if len(dense.dims) != 2 or len(rows.dims) != 3 or dense.sizes[-1] != rows.sizes[-1]:
            shapes = f"{format_shape(dense)} and {format_shape(rows)}"
            raise GraphError(f"{name}: {shapes} do not interact; expected one width of features")
        batch, width, count = dense.sizes[0], dense.sizes[-1], int(rows.sizes[1]) + 1
        stacked = Tensor(f"{name}.stack", (dense.dims[0], "fields", "features"), (batch, count, width))
        other = stacked.with_renamed_dims({"fields": "other_fields"})
        products = Tensor(f"{name}.products", (dense.dims[0], "fields", "other_fields"), (batch, count, count))
        pairs = count * (count - 1) // 2
        out = Tensor(name, (dense.dims[0], "features"), (batch, width + pairs))
        stack = MemoryPass(f"{name}.stack", "copy", (dense, rows), stacked, flops_per_element=0.0)
        taken = products.reshaped({dense.dims[0]: batch, "pairs": pairs})
        join = MemoryPass(name, "copy", (taken, dense), out, flops_per_element=0.0)
        return LayerOperations((stack, Contraction(f"{name}.products", stacked, other, products), join), out)


#: Bytes that a sparse update moves per entry of a row: the fp32 weight is read and written.
_SPARSE_UPDATE_BYTES_PER_ENTRY = 8.0


@LAYERS.register("sharded_embedding_bag")
class ShardedEmbeddingBag(Layer):
    """Embedding bags of many model-parallel tables: (batch, categories) to (batch, tables, features).

    Each output is the sum of ``bags`` rows (one number for all tables, or one per table). With the placement ``{batch:
    null, tables: dp}`` each rank reads the indices of the global batch and looks up its share of the tables. An
    all-to-all returns the sums to the ranks of their samples (Naumov et al., Software-hardware co-design for fast and
    scalable training of deep learning recommendation models, 2021). Only rows that were looked up are updated: no dense
    gradient exists, and none is exchanged.
    """

    entries: list[PositiveInt] = Field(min_length=1)
    features: PositiveInt
    bags: list[PositiveInt] = Field(default_factory=lambda: [1], min_length=1)

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        tables = float(len(self.entries))
        rows = sum(self.bags) if len(self.bags) > 1 else self.bags[0] * len(self.entries)
        sizes = (float(sum(self.entries)), self.features)
        table = Tensor(f"{name}.weight", ("tables", "features"), sizes, "parameter", needs_gradient=False)
        out = Tensor(name, ("batch", "tables", "features"), (x.sizes[0], tables, self.features))
        return LayerOperations((EmbeddingRowLookup(name, x, table, out, rows / tables),), out)


@dataclass(frozen=True, slots=True)
class EmbeddingRowLookup:
    """Operation that looks up and sums table rows, one sum per table and sample, and updates only those rows.

    ``rows_per_sum`` is the average number of rows in a sum.
    """

    name: str
    indices: Tensor
    table: Tensor
    out: Tensor
    rows_per_sum: float

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return (self.indices, self.table)

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return (self.indices,)

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset({*self.indices.dims, *self.table.dims}) - frozenset(self.out.dims)

    def shard(self, ways: Mapping[str, float]) -> EmbeddingRowLookup:
        return replace(self, indices=self.indices.shard(ways), table=self.table.shard(ways), out=self.out.shard(ways))

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        rows = self.rows_per_sum * self.out.elements * precision.parameter_bytes
        return (self._kernel("forward", rows + self.indices.bytes(precision), self.out.bytes(precision)),)

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        if not self.table.needs_gradient:
            return ()
        half = self.rows_per_sum * self.out.elements * _SPARSE_UPDATE_BYTES_PER_ENTRY / 2.0
        return (self._kernel("backward", self.out.bytes(precision) + self.indices.bytes(precision) + half, half),)

    def _kernel(self, phase: str, read: float, written: float) -> Kernel:
        shape = {"rows": float(self.out.elements), "columns": 1.0}
        sums = float((self.rows_per_sum - 1.0) * self.out.elements)
        return Kernel(self.name, "memory", "gather", phase, 0.0, sums, read, written, shape)  # type: ignore[arg-type]
