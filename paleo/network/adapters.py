"""Fine-tuning with frozen weights: low-rank adapters beside the products of the repeated blocks (Hu et al., LoRA, ICLR
2022).

y = x·W + (α/r) · (x·A)·B, with W (in, out) frozen, A (in, r) and B (r, out) learned. It is a change of the graph: all
that is derived from one (backward kernels, exchange, states, memory, FLOP) follows. What is not counted: dropout before
A, which recipes set to 0 or to a few per cent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from paleo.errors import PlanError
from paleo.network.graph import Graph, Node
from paleo.operations.base import Operation, with_tensors
from paleo.operations.contraction import Contraction
from paleo.operations.kernel import Kernel, accumulation
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.precision import Precision
from paleo.operations.tensor import Size, Tensor

#: Which products get an adapter: those of attention layers, or all.
Adapted = Literal["attention", "all"]


@dataclass(frozen=True, slots=True)
class AdapterProduct(Contraction):
    """x·A or (x·A)·B, in sixteen bits beside products in narrower formats. The gradient that A's product ``joins`` is
    there already, from the frozen product: it is added in a pass of its own."""

    joins: bool = False

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        kernels = Contraction.backward(self, precision)
        if not (self.joins and self.lhs.grad):
            return kernels
        return (*kernels, accumulation(self.name, float(self.lhs.elements), self.lhs.bytes(precision)))

    def _operands(self, precision: Precision) -> Precision:
        return precision.sixteen_bits


def adapted(graph: Graph, rank: int | None, where: Adapted) -> Graph:
    """The graph with all its weights frozen and adapters of ``rank`` beside products of its repeated blocks; None
    leaves it as it is.

    Gradients go back as far as the first adapter: what lies before has no backward pass. A folded block counts its
    first iteration like the others.
    """
    if rank is None:
        return graph
    nodes = [_with_adapters(node, rank) if _chosen(node, where) else _frozen(node) for node in graph.nodes]
    if not any(_trains(node) for node in nodes):
        raise PlanError(
            f"adapters: model {graph.name!r} has no products with weights in repeated blocks"
            + (" whose layers are called attention; try adapted=all" if where == "attention" else "")
        )
    live = _with_gradients(graph, nodes)
    dead = {node.out.name for node in nodes} - live
    return replace(graph, nodes=tuple(_marked(node, live, dead) for node in nodes))


def _chosen(node: Node, where: Adapted) -> bool:
    return bool(node.repeats) and (where == "all" or node.type.endswith("attention"))


def _frozen(node: Node) -> Node:
    return replace(node, operations=tuple(with_tensors(operation, _without_training) for operation in node.operations))


def _without_training(tensor: Tensor) -> Tensor:
    return replace(tensor, grad=False) if tensor.role == "parameter" else tensor


def _with_adapters(node: Node, rank: int) -> Node:
    """The layer with frozen weights and an adapter beside each product with one; convolutions have none."""
    changed: list[Operation] = []
    for operation in _frozen(node).operations:
        beside = isinstance(operation, Contraction) and operation.rhs.role == "parameter" and not operation.windows
        changed += _beside(operation, rank) if isinstance(operation, Contraction) and beside else [operation]
    return replace(node, operations=tuple(changed))


def _beside(product: Contraction, rank: int) -> Iterator[Operation]:
    """The product, its adapter, the factor α/r over its output and the sum, as NeMo and PEFT do them."""
    x, weight, out, name = product.lhs, product.rhs, product.out, f"{product.name}.adapter"
    of = dict(zip(weight.dims, weight.sizes, strict=True))
    kept: dict[str, Size] = {dim: size for dim, size in of.items() if dim in x.dims and dim in out.dims}
    narrow: dict[str, Size] = {
        dim: size for dim, size in zip(x.dims, x.sizes, strict=True) if dim not in of or dim in kept
    }
    into = {dim: size for dim, size in of.items() if dim not in out.dims}
    outof = {dim: size for dim, size in of.items() if dim not in x.dims}
    base, wide = out.like(f"{name}.base"), out.like(f"{name}.up")
    low = _tensor(f"{name}.down", narrow | {"rank": rank})
    down = _tensor(f"{name}.A", kept | into | {"rank": rank}, learned=True)
    up = _tensor(f"{name}.B", kept | {"rank": rank} | outof, learned=True)
    scaled = out.like(f"{name}.scaled")
    yield replace(product, out=base)
    yield AdapterProduct(low.name, x, down, low, joins=True)
    yield AdapterProduct(wide.name, low, up, wide)
    yield MemoryPass(scaled.name, "elementwise", (wide,), scaled, linear=True)
    yield MemoryPass(f"{name}.add", "elementwise", (base, scaled), out, backward_pass="free")


def _tensor(name: str, sizes: dict[str, Size], *, learned: bool = False) -> Tensor:
    return Tensor(name, tuple(sizes), tuple(sizes.values()), "parameter" if learned else "activation")


def _trains(node: Node) -> bool:
    return any(tensor.grad for tensor in node.parameters.values())


def _with_gradients(graph: Graph, nodes: list[Node]) -> set[str]:
    """Outputs behind the first adapter, and what enters a loop that makes such: later iterations read it so."""
    iterations = {loop: times for node in nodes for loop, times in node.repeats}
    live: set[str] = set()
    while True:
        before = len(live)
        for node in nodes:
            if _trains(node) or any(tensor.grad and tensor.name in live for tensor in node.inputs):
                live.add(node.out.name)
        live |= {
            enters
            for loop, (enters, changed) in graph.carried.items()
            if changed in live and iterations.get(loop, 1) > 1
        }
        if len(live) == before:
            return live


def _marked(node: Node, live: set[str], dead: set[str]) -> Node:
    """The layer with no gradient for what ``dead`` layers made, nor inside it where it is one of them."""
    idle = not (_trains(node) or any(tensor.name in live for tensor in node.inputs))

    def marked(tensor: Tensor) -> Tensor:
        gone = tensor.role != "parameter" and (idle or tensor.name in dead)
        return replace(tensor, grad=False) if gone else tensor

    return replace(
        node,
        inputs=tuple(marked(tensor) for tensor in node.inputs),
        operations=tuple(with_tensors(operation, marked) for operation in node.operations),
        out=replace(node.out, grad=node.out.grad and node.out.name in live),
    )
