"""A vocabulary in clusters by frequency: the softmax that computes the logits of a cluster only for tokens whose word
lies in it, and the embedding whose tables are of those clusters."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from paleo.errors import GraphError
from paleo.layers._embedding import tied_gradient
from paleo.layers._loss import CrossEntropy
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, project
from paleo.operations.base import MemoryPass, Operation
from paleo.operations.tensor import Size, Tensor


class Clustered(Layer):
    """``sizes``: words of each cluster, the most frequent first; ``shares``: parts of all tokens whose word lies in
    each, a fact of the data. Entries of cluster i are narrower by ``narrowing`` to the power of i than the hidden
    states, and a projection of each cluster joins them.

    Reference: Grave et al., Efficient softmax approximation for GPUs, ICML 2017; Baevski and Auli, ICLR 2019.
    """

    tensor_dims = ("vocab",)
    sizes: list[PositiveInt] = Field(min_length=2)
    shares: list[Annotated[float, Field(gt=0, le=1)]]
    narrowing: PositiveInt = 1

    def widths(self, name: str, hidden: int) -> list[int]:
        """Entries of each cluster; GraphError where shares are not those of all clusters, or entries vanish."""
        if len(self.shares) != len(self.sizes) or round(sum(self.shares), 3) != 1.0:
            raise GraphError(
                f"{name}: shares {self.shares} are not {len(self.sizes)} parts of one, one for each cluster"
            )
        widths = [hidden // self.narrowing**cluster for cluster in range(len(self.sizes))]
        if not widths[-1]:
            raise GraphError(f"{name}: narrowing {self.narrowing} leaves no entries of {hidden} in the last cluster")
        return widths


@LAYERS.register("adaptive_embedding")
class AdaptiveEmbedding(Clustered):
    """One row of a cluster's table for each index: adds the dim ``hidden`` of ``features`` entries. Only the rows read
    move."""

    features: PositiveInt

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (2,))
        operations: list[Operation] = []
        for cluster, width in enumerate(self.widths(name, self.features)):
            words = _part(x, self.shares[cluster])
            table = Tensor(f"{name}.{cluster}.weight", ("vocab", "width"), (self.sizes[cluster], width), "parameter")
            rows = Tensor(f"{name}.{cluster}", (*words.dims, "width"), (*words.sizes, width))
            operations.append(MemoryPass(rows.name, "gather", (words,), rows, (table,), (x,), 0.0, sparse_rows=True))
            if self.narrowing > 1:
                product, _ = project(f"{rows.name}.projection", rows, {"hidden": self.features})
                operations.append(product)
        out = Tensor(name, (*x.dims, "hidden"), (*x.sizes, self.features))
        return Expansion(tuple(operations), choices.output(out, "embedding"))


@LAYERS.register("adaptive_softmax")
class AdaptiveSoftmax(Clustered):
    """The loss of each token: logits of the most frequent words, and of the other clusters as wholes, for all tokens;
    those of a cluster's words for the tokens among them alone, whose states are copied out. ``tie`` takes the tables of
    an adaptive embedding, and the projections of all but its first."""

    tie: str | None = None

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        operations: list[Operation] = []
        clusters, _ = project(f"{name}.clusters", x, {"clusters": len(self.sizes) - 1}, bias=True)
        for cluster, width in enumerate(self.widths(name, int(x.sizes[-1]))):
            within = f"{name}.{cluster}"
            states = _part(x, self.shares[cluster] if cluster else 1.0)
            if cluster:
                copied = states.like(f"{within}.states")
                operations.append(MemoryPass(copied.name, "gather", (states,), copied, flops_per_element=0.0))
                states = copied
            operations += self._cluster(within, states, cluster, width, choices)
        out = Tensor(name, x.dims[:-1], x.sizes[:-1], "statistic")
        return Expansion((clusters, *operations), out)

    def _cluster(self, name: str, states: Tensor, cluster: int, width: int, choices: Choices) -> tuple[Operation, ...]:
        """Logits of one cluster and their loss."""
        operations: list[Operation] = []
        tables = f"{self.tie}.{cluster}" if self.tie else name
        if self.narrowing > 1:
            weight = f"{tables if cluster else name}.projection.weight"
            product, states = project(f"{name}.projection", states, {"width": width}, weight=weight)
            operations.append(product)
        sizes: dict[str, Size] = {"vocab": self.sizes[cluster]}
        product, logits = project(f"{name}.logits", states, sizes, bias=True, weight=f"{tables}.weight")
        if self.tie:  # without narrowing, the tables of all clusters are parts of one
            operations += tied_gradient(name, product.rhs, choices, len(self.sizes) if self.narrowing == 1 else 1)
        return (*operations, product, *CrossEntropy().expand(name, (logits,), choices).operations)


def _part(x: Tensor, share: float) -> Tensor:
    """A share of each sample's tokens."""
    return Tensor(x.name, x.dims, (x.sizes[0], x.sizes[1] * share, *x.sizes[2:]), x.role, x.grad)
