"""Linear layers and embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, activate, describe, gate, project
from paleo.operations.base import Kernel, MemoryPass, Operation, flat_pass
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import Tensor

if TYPE_CHECKING:
    from paleo.operations.tensor import Precision


# Linear layers: one matrix product of the last dim with a weight, the feed-forward pair of a transformer, rows in gro


@LAYERS.register("linear")
class Linear(Layer):
    """y = x · W + b over the last dim. ``dim`` names the new last dim, ``tie`` takes the weight of another layer (an
    embedding)."""

    tensor_dims = ("vocab",)
    features: PositiveInt
    bias: bool = True
    dim: str = "features"
    tie: str | None = None

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        weight = f"{self.tie}.weight" if self.tie else None
        operation, out = project(name, inputs[0], {self.dim: self.features}, bias=self.bias, weight=weight)
        tied = tied_gradient(name, operation.rhs, choices) if self.tie else ()
        return Expansion((*tied, operation), out)


#: Gated activations: the function of the gate.
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "clamped_swiglu": "silu"}


@LAYERS.register("mlp")
class Mlp(Layer):
    """The feed-forward block of a transformer: up, activation (perhaps gated), down, over dims hidden → ffn →
    hidden."""

    tensor_dims = ("ffn",)
    ffn: PositiveInt
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "swiglu", "geglu", "reglu"] = "gelu"
    bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        operations, inner = feed_forward(name, x, self.ffn, self.activation, choices, bias=self.bias)
        if self.dropout:
            mask = inner.like(f"{name}.mask", role="mask")
            dropped = inner.like(f"{name}.dropped")
            operations += (MemoryPass(f"{name}.dropout", "dropout", (inner,), dropped, keeps=(mask,)),)
            inner = dropped
        down, out = project(f"{name}.down", inner, {x.dims[-1]: x.sizes[-1]}, bias=self.bias)
        return Expansion((*operations, down), out)


def feed_forward(
    name: str,
    x: Tensor,
    ffn: int,
    activation: str,
    choices: Choices,
    *,
    bias: bool,
    shared: tuple[str, ...] = (),
    dim: str = "ffn",
) -> tuple[tuple[Operation, ...], Tensor]:
    """The up projection to ``dim`` and its activation; a gate and its partner come from one product of twice the
    width."""
    if activation in GATED:
        up, wide = project(f"{name}.up", x, {"gates": 2, dim: ffn}, bias=bias, shared=shared)
        separate = choices.gates == "separate"
        passes, inner = gate(f"{name}.act", GATED[activation], wide, "gates", separate=separate)
    else:
        up, wide = project(f"{name}.up", x, {dim: ffn}, bias=bias, shared=shared)
        passes, inner = activate(activation, f"{name}.act", wide, choices)
    return (up, *passes), inner


@LAYERS.register("grouped_linear")
class GroupedLinear(Layer):
    """(rows, features) to (rows, ``features``): each of ``groups`` equal shares of the rows times its own matrix.

    How many rows an expert gets depends on data; equal shares are the mean. FLOP are those of the rows, whatever their
    shares.
    """

    groups: PositiveInt
    features: PositiveInt
    dim: str = "features"

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (2,))
        rows, last = x.dims
        shares = x.reshaped({"experts": self.groups, rows: x.sizes[0] / self.groups, last: x.sizes[1]})
        product, out = project(name, shares, {self.dim: self.features}, shared=("experts",))
        return Expansion((product,), out.reshaped({rows: x.sizes[0], self.dim: self.features}))


@LAYERS.register("cross_network")
class CrossNetwork(Layer):
    """``layers`` times x ← x0 · (V (U x) + b) + x over (batch, features), U and V of rank ``rank``.

    Reference: Wang et al., DCN V2, WWW 2021, eq. 2 (mixture of one).
    """

    layers: PositiveInt
    rank: PositiveInt

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (start,) = inputs
        self.check_rank(name, start, (2,))
        x, operations = start, list[Operation]()
        for index in range(self.layers):
            step = f"{name}.{index + 1}"
            down, low = project(f"{step}.down", x, {"rank": self.rank})
            up, crossed = project(f"{step}.up", low, {x.dims[-1]: x.sizes[-1]}, bias=True)
            out = x.like(step)
            crossing = MemoryPass(
                step, "elementwise", (start, crossed, x), out, keeps=(start, crossed), flops_per_element=2.0
            )
            operations += [down, up, crossing]
            x = out
        return Expansion(tuple(operations), x)


# Table look-ups: word embeddings and the bags of recommendation models, and how the latter meet; tables too large for


@LAYERS.register("embedding")
class Embedding(Layer):
    """One row of a table for each index: adds the dim ``dim`` of ``features`` entries. Only the rows read move.

    ``tie`` takes the table of another embedding (source and target language of a translation model). ``rows`` is the
    dim of the table's rows: tensor parallelism splits a ``vocab``; tables of a few kinds (the segments of BERT) have
    another and stay whole, as Megatron-LM keeps them.
    """

    tensor_dims = ("vocab",)
    entries: PositiveInt
    features: PositiveInt
    dim: str = "hidden"
    rows: str = "vocab"
    tie: str | None = None

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        table = Tensor(f"{self.tie or name}.weight", (self.rows, self.dim), (self.entries, self.features), "parameter")
        out = choices.output(Tensor(name, (*x.dims, self.dim), (*x.sizes, self.features)), "embedding")
        keeps = (x,)
        gather = MemoryPass(name, "gather", (x,), out, (table,), keeps, flops_per_element=0.0, sparse_rows=True)
        return Expansion((gather,), out)


@dataclass(frozen=True, slots=True)
class JoinedSlices:
    """The gradient of a ``table`` that is looked up and multiplied by, where a framework keeps it as rows with their
    indices: those of all products are joined to one tensor, whose rows are then added up, by atomic sums, in a table of
    zeros. Rows that were looked up are few and not counted.

    Of a table that products read in ``parts``, the gradient of each part is a tensor as large as the whole, of zeros
    but for its own rows.

    Reference: Cavdar et al., Densifying assumed-sparse tensors, ISC 2019 (TensorFlow's accumulation).
    """

    name: str
    table: Tensor
    parts: int = 1

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (self.table,)

    @property
    def out(self) -> Tensor:
        """The joined tensor; nothing of a table that is not trained."""
        sizes = (self.parts * self.table.grad, *self.table.sizes)
        return Tensor(self.name, ("parts", *self.table.dims), sizes, "statistic")

    @property
    def saves(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset({"parts"})

    def split(self, ways: Mapping[str, float]) -> JoinedSlices:
        return replace(self, table=self.table.split(ways))

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        return ()

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        if not self.table.grad:
            return ()
        once, joined = (float(t.elements) * precision.gradient for t in (self.table, self.out))
        cut = (once, joined + once) if self.parts > 1 else (0.0, 0.0)
        read, written = cut[0] + 3.0 * joined, cut[1] + 2.0 * joined + once
        return (flat_pass(self.name, "reduce", "backward", float(self.out.elements), read, written),)


def tied_gradient(name: str, table: Tensor, choices: Choices, parts: int = 1) -> tuple[JoinedSlices, ...]:
    """What the gradient of a tied ``table`` costs beside the products that make it."""
    if choices.tied == "sum":
        return ()
    return (JoinedSlices(f"{name}.slices", table, parts),)


@LAYERS.register("embedding_bag")
class EmbeddingBag(Layer):
    """Many tables at once, one sum of ``bag`` rows from each: (batch) to (batch, tables, features).

    ``entries`` lists the rows of every table (DLRM: the categories of each feature).
    """

    entries: list[PositiveInt]
    features: PositiveInt
    bag: PositiveInt = 1

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        batch = x.dims[0]
        table = Tensor(f"{name}.weight", ("rows", "features"), (sum(self.entries), self.features), "parameter")
        out = Tensor(name, (batch, "tables", "features"), (x.sizes[0], len(self.entries), self.features))
        flops = float(self.bag - 1)
        gather = MemoryPass(name, "gather", (x,), out, (table,), (x,), flops_per_element=flops, sparse_rows=self.bag)
        return Expansion((gather,), out)


@LAYERS.register("dot_interaction")
class DotInteraction(Layer):
    """All pairwise dot products of the dense vector and the table rows, joined to the dense vector (DLRM, Naumov et
    al., 2019).

    Inputs: dense (batch, features) and rows (batch, tables, features). Output (batch, features + pairs).
    """

    arity = 2

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        dense, rows = inputs
        if len(dense.dims) != 2 or len(rows.dims) != 3 or dense.sizes[-1] != rows.sizes[-1]:
            raise GraphError(
                f"{name}: {describe(dense)} and {describe(rows)} do not interact; expected one width of features"
            )
        batch, width, count = dense.sizes[0], dense.sizes[-1], int(rows.sizes[1]) + 1
        stacked = Tensor(f"{name}.stack", (dense.dims[0], "fields", "features"), (batch, count, width))
        other = stacked.renamed({"fields": "other_fields"})
        products = Tensor(f"{name}.products", (dense.dims[0], "fields", "other_fields"), (batch, count, count))
        pairs = count * (count - 1) // 2
        out = Tensor(name, (dense.dims[0], "features"), (batch, width + pairs))
        stack = MemoryPass(f"{name}.stack", "copy", (dense, rows), stacked, flops_per_element=0.0)
        taken = products.reshaped({dense.dims[0]: batch, "pairs": pairs})
        join = MemoryPass(name, "copy", (taken, dense), out, flops_per_element=0.0)
        return Expansion((stack, Contraction(f"{name}.products", stacked, other, products), join), out)


#: Bytes of a row's entry that a sparse update touches: the fp32 weight is read and written.
SPARSE_UPDATE = 8.0


@LAYERS.register("sharded_embedding_bag")
class ShardedEmbeddingBag(Layer):
    """The look-ups of a recommendation model in many tables, a sum of ``bags`` rows from each (one number for all
    tables, or one for each): (batch, categories) to (batch, tables, features).

    Tables are model-parallel: with the placement ``{batch: null, tables: dp}`` each rank looks up its share of the
    tables for the global batch, whose indices it reads itself, and the sums return to the ranks of their samples by an
    all-to-all (Naumov et al., Software-hardware co-design for fast and scalable training of deep learning
    recommendation models, 2021). Only rows that were looked up are updated; no dense gradient exists, and none is
    exchanged.
    """

    entries: list[PositiveInt] = Field(min_length=1)
    features: PositiveInt
    bags: list[PositiveInt] = Field(default_factory=lambda: [1], min_length=1)

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        tables = float(len(self.entries))
        rows = sum(self.bags) if len(self.bags) > 1 else self.bags[0] * len(self.entries)
        sizes = (float(sum(self.entries)), self.features)
        table = Tensor(f"{name}.weight", ("tables", "features"), sizes, "parameter", grad=False)
        out = Tensor(name, ("batch", "tables", "features"), (x.sizes[0], tables, self.features))
        return Expansion((RowLookup(name, x, table, out, rows / tables),), out)


@dataclass(frozen=True, slots=True)
class RowLookup:
    """Rows of tables summed to one for each table and sample, and backward the sparse update of those rows.

    ``rows_each`` is how many rows make up one row of ``out``, on average.
    """

    name: str
    x: Tensor
    table: Tensor
    out: Tensor
    rows_each: float

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (self.x, self.table)

    @property
    def saves(self) -> tuple[Tensor, ...]:
        return (self.x,)

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset({*self.x.dims, *self.table.dims}) - frozenset(self.out.dims)

    def split(self, ways: Mapping[str, float]) -> RowLookup:
        return replace(self, x=self.x.split(ways), table=self.table.split(ways), out=self.out.split(ways))

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        rows = self.rows_each * self.out.elements * precision.parameter
        return (self._kernel("forward", rows + self.x.bytes(precision), self.out.bytes(precision)),)

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        if not self.table.grad:
            return ()
        half = self.rows_each * self.out.elements * SPARSE_UPDATE / 2.0
        return (self._kernel("backward", self.out.bytes(precision) + self.x.bytes(precision) + half, half),)

    def _kernel(self, phase: str, read: float, written: float) -> Kernel:
        shape = {"rows": float(self.out.elements), "columns": 1.0}
        sums = float((self.rows_each - 1.0) * self.out.elements)
        return Kernel(self.name, "memory", "gather", phase, 0.0, sums, read, written, shape)  # type: ignore[arg-type]
