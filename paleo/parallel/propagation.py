"""Communication from placements: the two rules that insert every collective of data, tensor and hybrid parallelism.

Rule A: an operation that sums over a split dim leaves a partial sum; a partial sum owes an all-reduce, or a reduce-scatter where
the consumer is split over the same axis. Rule B: a producer and a consumer that are split differently owe an all-gather, an
all-to-all, or a free slice. Both hold for activations forward, for their gradients backward, and for parameter gradients: the
gradient all-reduce of data parallelism is rule A on the weight gradient, which sums over the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from paleo.errors import PlanError
from paleo.graph import Graph, Node
from paleo.parallel.mesh import Mesh
from paleo.parallel.placement import Placement, Split
from paleo.work import MemoryPass, Operation, Tensor

When = Literal["forward", "backward", "gradient"]


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective that a layer owes: ``tensor`` is the full buffer of one group, before its ranks divide it."""

    name: str
    operation: str
    axis: str
    tensor: Tensor
    when: When


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies over the mesh: axes of each dim, in order of its dims, and axes over which it is a partial sum."""

    dims: tuple[tuple[str, ...], ...]
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """One rank's share of a layer: its operations on local sizes and the collectives that it owes."""

    node: Node
    operations: tuple[Operation, ...]
    communications: tuple[Communication, ...]
    #: local parameter tensors, and over which axes each is replicated (its gradient is summed there)
    parameters: tuple[tuple[Tensor, tuple[str, ...]], ...]


def propagate(graph: Graph, placement: Placement, mesh: Mesh) -> tuple[PlacedNode, ...]:
    """Every layer's share and what it must communicate, in topological order."""
    layouts: dict[str, Layout] = {}
    for name, tensor in graph.inputs.items():
        layouts[name] = Layout(tuple(("dp",) if dim == "batch" else () for dim in tensor.dims))
    return tuple(_place(node, _active(placement.of(node), mesh), mesh, layouts) for node in graph.nodes)


def _active(split: Split, mesh: Mesh) -> Split:
    used = {dim: tuple(axis for axis in axes if mesh.degree(axis) > 1) for dim, axes in split.items()}
    return {dim: axes for dim, axes in used.items() if axes}


def _place(node: Node, split: Split, mesh: Mesh, layouts: dict[str, Layout]) -> PlacedNode:
    ways = {dim: mesh.ways(axes) for dim, axes in split.items()}
    _check_division(node, ways)
    owed: list[Communication] = []
    for tensor in dict.fromkeys(node.inputs):
        owed += _arrive(node, tensor, split, mesh, layouts)
    owed += _statistics(node, split, ways)
    partial = _partial(node.operations[-1].out, node.operations[-1], split) if node.operations else frozenset()
    if node.operations or node.out.name not in layouts:
        layouts[node.out.name] = Layout(tuple(split.get(dim, ()) for dim in node.out.dims), partial)
    local = tuple(operation.split(ways) for operation in node.operations)
    return PlacedNode(node, local, tuple(owed), tuple(_parameters(node, split, ways)))


def _check_division(node: Node, ways: Mapping[str, int]) -> None:
    tensors = [t for op in node.operations for t in (*op.reads, op.out)]
    for dim, n in ways.items():
        sizes = [t.size(dim) for t in tensors if dim in t.dims]
        if sizes and dim != "batch" and sizes[0] % n:
            raise PlanError(f"layer {node.name!r}: {dim} {sizes[0]:g} cannot be divided over {n} ranks")


def _partial(target: Tensor, operation: Operation, split: Split) -> frozenset[str]:
    """Rule A: the axes of every split dim that the operation sums over on its way to ``target``."""
    if isinstance(operation, MemoryPass) and operation.operation in ("copy", "scatter"):
        return frozenset()
    dims = {dim for tensor in (*operation.reads, operation.out) for dim in tensor.dims}
    summed = dims - set(target.dims) - operation.private_dims
    return frozenset(axis for dim in summed for axis in split.get(dim, ()))


def _arrive(
    node: Node, tensor: Tensor, split: Split, mesh: Mesh, layouts: dict[str, Layout]
) -> Iterable[Communication]:
    """Rule B on one input, forward; then the way back of its gradient."""
    have = layouts[tensor.name]
    if len(have.dims) != len(tensor.dims):  # a view: the batch stays first, the rest is whole
        have = Layout((have.dims[0],) + ((),) * (len(tensor.dims) - 1), have.partial)
    want = Layout(tuple(split.get(_inside(node, tensor, dim), ()) for dim in tensor.dims))
    yield from _transition(f"{node.name}<{tensor.name}", tensor, have, want, mesh, "forward")
    if have.partial:
        layouts[tensor.name] = want
    if tensor.grad:
        summed = frozenset().union(*(_partial(t, op, split) for op in node.operations for t in op.reads if t.name == tensor.name))
        yield from _transition(f"{node.name}>{tensor.name}", tensor, Layout(want.dims, summed), Layout(have.dims), mesh, "backward")


def _inside(node: Node, tensor: Tensor, dim: str) -> str:
    """The name that a dim of an input has inside the layer: a summed dim whose name returns in the output is ``in_<dim>``."""
    for operation in node.operations:
        for read in operation.reads:
            if read.name == tensor.name:
                return dim if dim in read.dims else f"in_{dim}"
    return dim


def _transition(name: str, tensor: Tensor, have: Layout, want: Layout, mesh: Mesh, when: When) -> Iterable[Communication]:
    """The collectives from one layout to another, axis by axis; a slice of something whole is free."""
    for axis, degree in mesh.degrees:
        if degree == 1:
            continue
        before = next((i for i, axes in enumerate(have.dims) if axis in axes), None)
        after = next((i for i, axes in enumerate(want.dims) if axis in axes), None)
        if axis in have.partial:
            operation = "all_reduce" if after is None else "reduce_scatter"
        elif before is None or before == after:
            continue
        else:
            operation = "all_gather" if after is None else "all_to_all"
        others = {
            dim: mesh.ways(tuple(a for a in axes if a != axis)) for dim, axes in zip(tensor.dims, want.dims, strict=True)
        }
        yield Communication(name, operation, axis, tensor.split(others), when)


def _statistics(node: Node, split: Split, ways: Mapping[str, int]) -> Iterable[Communication]:
    """Softmax, losses and norms over a split dim exchange a few numbers a row (maximum, sum, target; or mean, variance)."""
    for operation in node.operations:
        if isinstance(operation, MemoryPass) and operation.reduces and not operation.local_statistics:
            axes = {axis for dim in operation.reduces for axis in split.get(dim, ())}
            source = operation.inputs[0]
            row = source.without(*operation.reduces, name=f"{operation.name}.row", role="statistic").split(ways)
            count = 3 if operation.operation == "softmax" else 2
            stacked = Tensor(row.name, ("numbers", *row.dims), (count, *row.sizes), "statistic")
            for axis in sorted(axes):
                yield Communication(operation.name, "all_reduce", axis, stacked, "forward")


def _parameters(node: Node, split: Split, ways: Mapping[str, int]) -> Iterable[tuple[Tensor, tuple[str, ...]]]:
    """Rule A on parameters: a gradient is summed over every split dim of its operation that the parameter lacks."""
    axes_of: dict[str, set[str]] = {}
    tensors: dict[str, Tensor] = {}
    for operation in node.operations:
        for parameter in (t for t in operation.reads if t.role == "parameter"):
            dims = {dim for t in (*operation.reads, operation.out) for dim in t.dims} - set(parameter.dims)
            axes_of.setdefault(parameter.name, set()).update(axis for dim in dims for axis in split.get(dim, ()))
            tensors[parameter.name] = parameter.split(ways)
    return [(tensor, tuple(sorted(axes_of[name]))) for name, tensor in tensors.items()]


def gradient_axes(placed: Sequence[PlacedNode]) -> dict[tuple[str, ...], float]:
    """Parameter elements to be summed, by the axes that they are summed over (one iteration of each repeated block)."""
    totals: dict[tuple[str, ...], float] = {}
    for one in placed:
        for tensor, axes in one.parameters:
            totals[axes] = totals.get(axes, 0.0) + float(tensor.elements)
    return totals
