"""Graph networks on sampled neighbourhoods."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe, project
from paleo.operations.base import MemoryPass, Operation
from paleo.operations.tensor import Tensor


@LAYERS.register("relational_graph_attention")
class RelationalGraphAttention(Layer):
    """Attention of nodes over their sampled neighbours, apart for each of ``relations`` kinds of edges, and summed:
    (batch, nodes, features) to (batch, targets, heads · features).

    The first ``targets`` nodes of a sample receive messages; ``edges`` edges of a sample carry them, all relations
    together. Each relation has a projection to ``heads`` of ``head_dim`` and two vectors of scores a head
    (Velickovic et al., ICLR 2018; Busbridge et al., Relational graph attention networks, 2019). Nodes of
    many kinds take part in several relations: ``projected`` is how often a node is projected, on average.
    """

    arity: ClassVar[int | None] = 1
    relations: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt
    edges: PositiveInt
    targets: PositiveInt
    projected: float = 1.0

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if self.targets > x.sizes[1]:
            raise GraphError(f"{name}: {describe(x)} has fewer nodes than the {self.targets} targets")
        batch, _, features = x.dims
        width = self.heads * self.head_dim
        relation_nodes = x.sizes[1] * self.projected / self.relations
        sorted_nodes = Tensor(f"{name}.by_relation", (batch, "relations", "nodes", features),
                              (x.sizes[0], self.relations, relation_nodes, x.sizes[2]))  # fmt: skip
        copy = MemoryPass(f"{name}.by_relation", "gather", (x,), sorted_nodes, flops_per_element=0.0)
        product, messages = project(
            f"{name}.project", sorted_nodes.reshaped({"relations": self.relations, batch: x.sizes[0],
            "nodes": relation_nodes, features: x.sizes[2]}), {"messages": width}, shared=("relations",),
        )  # fmt: skip
        operations: list[Operation] = [copy, product]
        scores = Tensor(f"{name}.scores", (batch, "edges", "heads"), (x.sizes[0], self.edges, self.heads))
        vectors = Tensor(
            f"{name}.attention", ("relations", "sides", "messages"), (self.relations, 2, width), "parameter"
        )
        score = MemoryPass(scores.name, "softmax", (messages,), scores, (vectors,), (scores, messages), 6.0)
        carried = Tensor(f"{name}.carried", (batch, "edges", "messages"), (x.sizes[0], self.edges, width))
        out = Tensor(name, (batch, "nodes", features), (x.sizes[0], self.targets, width))
        shift = (Tensor(f"{name}.bias", ("relations", "messages"), (self.relations, width), "parameter"),)
        gather = MemoryPass(carried.name, "gather", (messages, scores), carried, flops_per_element=1.0)
        add = MemoryPass(name, "reduce", (carried,), out, shift)
        return Expansion((*operations, score, gather, add), out)
