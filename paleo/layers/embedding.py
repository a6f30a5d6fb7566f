"""Table look-ups: word embeddings and the bags of recommendation models, and how the latter meet."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Expansion, Layer, describe
from paleo.operations.contraction import Contraction
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.tensor import Tensor

if TYPE_CHECKING:
    from paleo.layers.base import Choices


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
