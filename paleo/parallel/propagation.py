"""Communication from placements: the rules that insert every collective of data, tensor, sequence, expert and hybrid
parallelism.

Rule A: an operation that sums over a split dim leaves a partial sum; a partial sum owes an all-reduce, or a
reduce-scatter where the consumer is split over the same axis. Rule B: a producer and a consumer that are split
differently owe an all-gather, an all-to-all, or a free slice. Rule C: attention over a split sequence exchanges keys
and values round the ring. All hold for activations forward, for their gradients backward, and for parameter gradients:
the gradient all-reduce of data parallelism is rule A on the weight gradient, which sums over the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paleo.errors import PlanError
from paleo.graph import Graph, Node
from paleo.parallel.mesh import Axes, Mesh
from paleo.parallel.placement import Placement, Split
from paleo.work import Contraction, FusedAttention, MemoryPass, Operation, Tensor

When = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective that a layer owes. ``tensor`` is its payload as nccl-tests counts it: the full buffer of the
    group, for an all-to-all the buffer of one rank. ``overlapped`` ones run beside computation that does not wait for
    them."""

    name: str
    operation: str
    axis: str
    tensor: Tensor
    when: When
    overlapped: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies over the mesh: axes of each dim, in order of its dims, and axes over which it is a partial
    sum."""

    dims: tuple[Axes, ...]
    partial: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class PlacedNode:
    """One rank's share of a layer: its operations on local sizes and the collectives that it owes.

    ``parameters`` are local tensors with the axes over which each gradient is summed. ``gathered`` names inputs that
    arrive by an all-gather over the axis given: only the rank's own shard is kept for backward, and gathered again
    there.
    """

    node: Node
    operations: tuple[Operation, ...]
    communications: tuple[Communication, ...]
    parameters: tuple[tuple[Tensor, Axes], ...]
    gathered: Mapping[str, int]


def propagate(graph: Graph, placement: Placement, mesh: Mesh) -> tuple[PlacedNode, ...]:
    """Every layer's share and what it must communicate, in topological order."""
    layouts = {name: Layout(tuple(_batch_axes(dim, mesh) for dim in t.dims)) for name, t in graph.inputs.items()}
    return tuple(_place(node, _active(placement.of(node), mesh), mesh, layouts) for node in graph.nodes)


def check_divisions(graph: Graph, placement: Placement, mesh: Mesh) -> None:
    """PlanError where a dim cannot be divided as a placement asks; `propagate` checks the same on its way."""
    for node in graph.nodes:
        split = _active(placement.of(node), mesh)
        _check_division(node, {dim: mesh.ways(axes) for dim, axes in split.items()})


def _batch_axes(dim: str, mesh: Mesh) -> Axes:
    axes = {"batch": ("ep", "dp"), "seq": ("cp",)}.get(dim, ())
    return tuple(axis for axis in axes if mesh.degree(axis) > 1)


def _active(split: Split, mesh: Mesh) -> Split:
    used = {dim: tuple(axis for axis in axes if mesh.degree(axis) > 1) for dim, axes in split.items()}
    return {dim: axes for dim, axes in used.items() if axes}


def _place(node: Node, split: Split, mesh: Mesh, layouts: dict[str, Layout]) -> PlacedNode:
    ways = {dim: mesh.ways(axes) for dim, axes in split.items()}
    _check_division(node, ways)
    owed: list[Communication] = []
    sums = _gradient_sums(node, split, ways, owed)
    for tensor in dict.fromkeys(node.inputs):
        owed += _arrive(node, tensor, split, sums, mesh, layouts)
    gathered = {c.tensor.name: mesh.degree(c.axis) for c in owed if c.operation == "all_gather" and c.when == "forward"}
    owed += _regather(node, owed)
    partial = _inner_sums(node, split, ways, owed)
    owed += (
        *_statistics(node, split, ways),
        *_key_exchange(node, split, ways),
        *_expert_exchange(node, split, ways, mesh),
    )
    if node.operations or node.out.name not in layouts:
        layouts[node.out.name] = Layout(tuple(split.get(dim, ()) for dim in node.out.dims), partial)
    local = tuple(operation.split(ways) for operation in node.operations)
    return PlacedNode(node, local, tuple(owed), tuple(_parameters(node, split, ways)), gathered)


def _check_division(node: Node, ways: Mapping[str, int]) -> None:
    tensors = [t for op in node.operations for t in (*op.reads, op.out)]
    for dim, n in ways.items():
        sizes = [t.size(dim) for t in tensors if dim in t.dims]
        if n > 1 and sizes and isinstance(sizes[0], int) and sizes[0] % n and dim not in PADDED:
            raise PlanError(f"layer {node.name!r}: {dim} {sizes[0]:g} cannot be divided over {n} ranks")


#: Dims that need not divide evenly: the fullest rank sets the pace (a short batch, a vocabulary padded to the ranks).
PADDED = frozenset({"batch", "vocab"})


def _summed(target: Tensor, operation: Operation, split: Split) -> frozenset[str]:
    """Rule A: the axes of every split dim that the operation sums over on its way to ``target``; moving data sums
    nothing."""
    if isinstance(operation, MemoryPass) and operation.operation in MOVES and not operation.sparse_rows:
        return frozenset()
    dims = {dim for tensor in (*operation.reads, operation.out) for dim in tensor.dims}
    return frozenset(axis for dim in dims - set(target.dims) - operation.private_dims for axis in split.get(dim, ()))


#: Passes that only move elements.
MOVES = frozenset({"copy", "gather", "scatter"})


def _linear(operation: Operation) -> bool:
    """Whether a partial sum may go through: the operation commutes with addition."""
    if isinstance(operation, MemoryPass):
        return operation.operation in MOVES or operation.backward_pass == "free"
    return not isinstance(operation, FusedAttention)


def _inner_sums(node: Node, split: Split, ways: Mapping[str, int], owed: list[Communication]) -> frozenset[str]:
    """Partial sums inside a layer: settled before whatever does not commute with them; returns those that its output
    still owes."""
    partial: dict[str, frozenset[str]] = {}
    for operation in node.operations:
        arriving = frozenset[str]().union(*(partial.get(t.name, frozenset()) for t in operation.reads))
        if arriving and not _linear(operation):
            for tensor in (t for t in operation.reads if partial.get(t.name)):
                owed += (
                    Communication(operation.name, "all_reduce", axis, tensor.split(ways), "forward")
                    for axis in sorted(partial.pop(tensor.name))
                )
            arriving = frozenset()
        partial[operation.out.name] = arriving | _summed(operation.out, operation, split)
    return partial.get(node.out.name, frozenset())


def _gradient_sums(
    node: Node, split: Split, ways: Mapping[str, int], owed: list[Communication]
) -> dict[str, frozenset[str]]:
    """The same backward: over which axes the gradient of each tensor is a partial sum when it leaves the layer."""
    partial: dict[str, frozenset[str]] = {}
    for operation in reversed(node.operations):
        leaving = partial.get(operation.out.name, frozenset())
        if leaving and not (isinstance(operation, MemoryPass) and _linear(operation)):
            owed += (
                Communication(operation.name, "all_reduce", axis, operation.out.split(ways), "backward")
                for axis in sorted(partial.pop(operation.out.name))
            )
            leaving = frozenset()
        for tensor in operation.reads:
            if tensor.grad and tensor.role != "parameter":
                sums = partial.get(tensor.name, frozenset()) | leaving | _summed(tensor, operation, split)
                partial[tensor.name] = sums
    return partial


def _arrive(
    node: Node, tensor: Tensor, split: Split, sums: Mapping[str, frozenset[str]], mesh: Mesh, layouts: dict[str, Layout]
) -> Iterator[Communication]:
    """Rule B on one input, forward; then the way back of its gradient."""
    have = layouts[tensor.name]
    if len(have.dims) != len(tensor.dims):  # a view: the batch stays first, the rest is whole
        have = Layout((have.dims[0],) + ((),) * (len(tensor.dims) - 1), have.partial)
    want = Layout(tuple(split.get(_inside(node, tensor, dim), ()) for dim in tensor.dims))
    yield from _transition(f"{node.name}<{tensor.name}", tensor, have, want, mesh, "forward")
    if have.partial:
        layouts[tensor.name] = want
    if tensor.grad:
        back = Layout(want.dims, sums.get(tensor.name, frozenset()))
        yield from _transition(f"{node.name}>{tensor.name}", tensor, back, Layout(have.dims), mesh, "backward")


def _inside(node: Node, tensor: Tensor, dim: str) -> str:
    """The name that a dim of an input has inside the layer: a summed dim whose name returns in the output is
    ``in_<dim>``."""
    for operation in node.operations:
        for read in operation.reads:
            if read.name == tensor.name:
                return dim if dim in read.dims else f"in_{dim}"
    return dim


def _transition(
    name: str, tensor: Tensor, have: Layout, want: Layout, mesh: Mesh, when: When
) -> Iterator[Communication]:
    """The collectives from one layout to another, axis by axis; a slice of something whole is free."""
    for axis, degree in mesh.degrees:
        before = next((i for i, axes in enumerate(have.dims) if axis in axes), None)
        after = next((i for i, axes in enumerate(want.dims) if axis in axes), None)
        if degree == 1 or (axis not in have.partial and (before is None or before == after)):
            continue
        if axis in have.partial:
            operation = "all_reduce" if after is None else "reduce_scatter"
        else:
            operation = "all_gather" if after is None else "all_to_all"
        shares = {
            d: mesh.ways(tuple(a for a in axes if a != axis)) for d, axes in zip(tensor.dims, want.dims, strict=True)
        }
        if operation == "all_to_all" and after is not None:
            shares[tensor.dims[after]] = mesh.ways(want.dims[after])
        yield Communication(name, operation, axis, tensor.split(shares), when)


def _regather(node: Node, owed: list[Communication]) -> list[Communication]:
    """Inputs that were gathered forward and are needed for weight gradients are gathered again, beside the input
    gradients."""
    kept = {tensor.name for operation in node.operations for tensor in operation.saves}
    return [
        Communication(f"{c.name}{AGAIN}", "all_gather", c.axis, c.tensor, "backward", overlapped=True)
        for c in owed
        if c.operation == "all_gather" and c.when == "forward" and c.tensor.name in kept
    ]


def kept_whole(placed: PlacedNode) -> PlacedNode:
    """The same share when gathered inputs stay whole until the backward pass instead of being gathered again."""
    owed = tuple(one for one in placed.communications if not one.name.endswith(AGAIN))
    return replace(placed, communications=owed, gathered={})


#: Ends the name of a gather that is made again for the backward pass.
AGAIN = ".again"


def _statistics(node: Node, split: Split, ways: Mapping[str, int]) -> Iterator[Communication]:
    """Softmax, losses and norms over a split dim exchange a few numbers a row (maximum, sum, target; or mean,
    variance)."""
    for operation in node.operations:
        if isinstance(operation, MemoryPass) and operation.reduces and not operation.local_statistics:
            axes = {axis for dim in operation.reduces for axis in split.get(dim, ())}
            source = operation.inputs[0]
            row = source.without(*operation.reduces, name=f"{operation.name}.row", role="statistic").split(ways)
            count = 3 if operation.operation == "softmax" else 2
            stacked = Tensor(row.name, ("numbers", *row.dims), (count, *row.sizes), "statistic")
            for axis in sorted(axes):
                yield Communication(operation.name, "all_reduce", axis, stacked, "forward")


def _key_exchange(node: Node, split: Split, ways: Mapping[str, int]) -> Iterator[Communication]:
    """Rule C: queries of a split sequence need all keys and values; the ring hides behind the scores (Liu et al., Ring
    attention, 2023)."""
    for operation in node.operations:
        if isinstance(operation, FusedAttention):
            for axis in split.get("seq", ()):
                for tensor in (operation.key.split(ways), operation.value.split(ways)):
                    yield Communication(operation.name, "all_gather", axis, tensor, "forward", overlapped=True)
                    yield Communication(operation.name, "all_gather", axis, tensor, "backward", overlapped=True)
                    yield Communication(operation.name, "reduce_scatter", axis, tensor, "backward", overlapped=True)


def _expert_exchange(node: Node, split: Split, ways: Mapping[str, int], mesh: Mesh) -> Iterator[Communication]:
    """Rule B inside a mixture of experts: tokens are split by the batch before dispatch and by experts after it, and
    back."""
    for operation in node.operations:
        moved = [t for t in (*operation.reads, operation.out) if "capacity" in t.dims and t.role == "activation"]
        if moved and isinstance(operation, MemoryPass) and operation.operation in ("gather", "scatter"):
            for axis in split.get("experts", ()):
                for when in ("forward", "backward"):
                    yield Communication(operation.name, "all_to_all", axis, moved[0].split(ways), when)


def _parameters(node: Node, split: Split, ways: Mapping[str, int]) -> Iterable[tuple[Tensor, Axes]]:
    """Rule A on parameters: a gradient is summed over every split dim of its operation that the parameter lacks."""
    axes_of: dict[str, set[str]] = {}
    tensors: dict[str, Tensor] = {}
    for operation in node.operations:
        for parameter in (t for t in operation.reads if t.role == "parameter"):
            added = isinstance(operation, Contraction) and operation.bias is parameter
            sources = (operation.out,) if added else (*operation.reads, operation.out)
            dims = {dim for t in sources for dim in t.dims} - set(parameter.dims)
            axes_of.setdefault(parameter.name, set()).update(axis for dim in dims for axis in split.get(dim, ()))
            tensors[parameter.name] = parameter.split(ways)
    return [(tensor, tuple(sorted(axes_of[name]))) for name, tensor in tensors.items()]
