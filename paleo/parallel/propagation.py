"""Communication from placements: the rules that insert every collective of data, tensor, sequence, expert and hybrid
parallelism.

Rule A: an operation that sums over a split dim leaves a partial sum; a partial sum owes an all-reduce, or a
reduce-scatter where the consumer is split over the same axis. Rule B: a producer and a consumer that are split
differently owe an all-gather, an all-to-all, or a free slice. Rule C: windows over a split dim exchange their borders
with the neighbours, attention over a split sequence its keys and values round the ring (both in ``exchanges``). All
hold for activations forward, for their gradients backward, and for parameter gradients: the gradient all-reduce of data
parallelism is rule A on the weight gradient, which sums over the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from paleo.network.graph import Graph, Node
from paleo.operations.attention import FusedAttention
from paleo.operations.base import Operation, is_core
from paleo.operations.contraction import Contraction
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.tensor import Tensor
from paleo.parallel.divisions import check_division
from paleo.parallel.layer_collectives import (
    Communication,
    When,
    core_split,
    expert_exchange,
    halo_exchange,
    key_exchange,
    ring_kept,
    statistics,
)
from paleo.parallel.mesh import BATCH_AXES, Axes, Mesh
from paleo.parallel.placement import Placement, Split


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How a tensor lies over the mesh: axes of each dim, in order of its dims, axes over which it is a partial sum, and
    axes that divide dims which a view has merged with others."""

    dims: tuple[Axes, ...]
    partial: frozenset[str] = frozenset()
    merged: frozenset[str] = frozenset()

    def place(self, axis: str) -> int | None:
        """The position of the dim that an axis divides; _MERGED where a view hides it, None where the axis has all."""
        for index, axes in enumerate(self.dims):
            if axis in axes:
                return index
        return _MERGED if axis in self.merged else None


#: Stands for a dim that a view has merged with others.
_MERGED = -1


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
    layouts = {name: TensorLayout(tuple(_batch_axes(dim, mesh) for dim in t.dims)) for name, t in graph.inputs.items()}
    return tuple(_place(node, placement, mesh, layouts) for node in graph.nodes)


def check_divisions(graph: Graph, placement: Placement, mesh: Mesh) -> None:
    """PlanError where a dim cannot be divided as a placement asks; `propagate` checks the same on its way."""
    for node in graph.nodes:
        split = _active(node, placement.of(node), mesh)
        core = core_split(node, split, placement.context)
        check_division(node, _ways(split, mesh), _ways(core, mesh))


def _batch_axes(dim: str, mesh: Mesh) -> Axes:
    axes = {"batch": BATCH_AXES, "seq": ("cp",), "height": ("spatial",)}.get(dim, ())
    return tuple(axis for axis in axes if mesh.degree(axis) > 1)


def _active(node: Node, split: Split, mesh: Mesh) -> Split:
    """The axes in use; the source of a window is split as its output is."""
    used = {dim: tuple(axis for axis in axes if mesh.degree(axis) > 1) for dim, axes in split.items()}
    windows = (w for op in node.operations if isinstance(op, Contraction | MemoryPass) for w in op.windows)
    used |= {window.source: used.get(window.out, ()) for window in windows}
    return {dim: axes for dim, axes in used.items() if axes}


def _ways(split: Split, mesh: Mesh) -> dict[str, float]:
    return {dim: mesh.ways(axes) for dim, axes in split.items() if axes}


def _place(node: Node, placement: Placement, mesh: Mesh, layouts: dict[str, TensorLayout]) -> PlacedNode:
    split = _active(node, placement.of(node), mesh)
    core = core_split(node, split, placement.context)
    ways, core_ways = _ways(split, mesh), _ways(core, mesh)
    check_division(node, ways, core_ways)
    if split.get("experts"):
        ways["capacity"] = ways.get("capacity", 1) / placement.imbalance
    owed: list[Communication] = []
    sums = _gradient_sums(node, split, ways, owed)
    for tensor in dict.fromkeys(node.inputs):
        owed += _arrive(node, tensor, split, sums, mesh, layouts)
    gathered = {c.tensor.name: mesh.degree(c.axis) for c in owed if c.operation == "all_gather" and c.when == "forward"}
    owed += _regather(node, owed)
    partial = _inner_sums(node, split, ways, owed)
    owed += (
        *statistics(node, split, ways),
        *key_exchange(node, split, core, ways, mesh),
        *expert_exchange(node, split, ways),
        *halo_exchange(node, split, ways, mesh),
    )
    _leave(node, split, partial, layouts)
    local = tuple(operation.split(core_ways if is_core(operation) else ways) for operation in node.operations)
    gathered |= ring_kept(node, split, core, mesh)
    return PlacedNode(node, local, tuple(owed), tuple(_parameters(node, split, ways)), gathered)


def _leave(node: Node, split: Split, partial: frozenset[str], layouts: dict[str, TensorLayout]) -> None:
    """How the output lies; a view, or a layer that hands its input on, leaves that as it is."""
    written = next((op.out for op in reversed(node.operations) if op.out.name == node.out.name), None)
    if written is not None or node.out.name not in layouts:
        dims = node.out.dims if written is None else written.dims
        layouts[node.out.name] = TensorLayout(
            tuple(split.get(d, ()) if d in dims else () for d in node.out.dims), partial
        )


def _summed(target: Tensor, operation: Operation, split: Split) -> frozenset[str]:
    """Rule A: the axes of every split dim that the operation sums over on its way to ``target`` (one entry that is used
    all along a dim has a summed gradient, too); moving data sums nothing."""
    if isinstance(operation, MemoryPass) and operation.kind.moves and not operation.sparse_rows:
        return frozenset()
    gone = [dim for dim in split if dim not in target.dims or target.size(dim) == 1]
    if not gone:
        return frozenset()
    tensors, private = (*operation.reads, operation.out), operation.private_dims
    summed = (dim for dim in gone if dim not in private and any(_varies(t, dim, dim in target.dims) for t in tensors))
    return frozenset(axis for dim in summed for axis in split[dim])


def _varies(tensor: Tensor, dim: str, beyond_one: bool) -> bool:
    """Whether a tensor has the dim, with more than one entry if that is asked."""
    return dim in tensor.dims and (not beyond_one or tensor.size(dim) > 1)


def _linear(operation: Operation) -> bool:
    """Whether a partial sum may go through: the operation commutes with addition."""
    if isinstance(operation, MemoryPass):
        return operation.linear or operation.kind.moves or operation.backward_pass == "free"
    return not isinstance(operation, FusedAttention)


def _inner_sums(node: Node, split: Split, ways: Mapping[str, float], owed: list[Communication]) -> frozenset[str]:
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
    node: Node, split: Split, ways: Mapping[str, float], owed: list[Communication]
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
                scattered = split.get("seq", ()) if is_core(operation) else ()  # by the exchange of keys
                partial[tensor.name] = sums - set(scattered)
    return partial


def _arrive(
    node: Node,
    tensor: Tensor,
    split: Split,
    sums: Mapping[str, frozenset[str]],
    mesh: Mesh,
    layouts: dict[str, TensorLayout],
) -> Iterator[Communication]:
    """Rule B on one input, forward; then the way back of its gradient."""
    have = layouts[tensor.name]
    if len(have.dims) != len(tensor.dims):  # a view: the batch stays first, other dims are merged
        hidden = frozenset(axis for axes in have.dims[1:] for axis in axes)
        have = TensorLayout((have.dims[0],) + ((),) * (len(tensor.dims) - 1), have.partial, hidden)
    names = [_inside(node, tensor, dim) for dim in tensor.dims]
    spread = _spread(node, names)
    pairs = zip(names, tensor.sizes, strict=True)
    want = TensorLayout(tuple(split.get(dim, ()) if size > 1 or dim not in spread else () for dim, size in pairs))
    yield from _transition(f"{node.name}<{tensor.name}", tensor, have, want, mesh, "forward")
    if have.partial:
        layouts[tensor.name] = want
    if tensor.grad:
        back = TensorLayout(want.dims, sums.get(tensor.name, frozenset()))
        target = TensorLayout(have.dims, merged=have.merged)
        yield from _transition(f"{node.name}>{tensor.name}", tensor, back, target, mesh, "backward")


def _spread(node: Node, dims: Iterable[str]) -> frozenset[str]:
    """Dims of more than one entry in the layer: an input of size 1 there is used all along them."""
    tensors = [tensor for op in node.operations for tensor in (*op.reads, op.out)]
    return frozenset(dim for dim in dims if any(dim in t.dims and t.size(dim) > 1 for t in tensors))


def _inside(node: Node, tensor: Tensor, dim: str) -> str:
    """The name that a dim of an input has inside the layer: a summed dim whose name returns in the output is
    ``in_<dim>``."""
    for operation in node.operations:
        for read in operation.reads:
            if read.name == tensor.name:
                return dim if dim in read.dims else f"in_{dim}"
    return dim


def _transition(
    name: str, tensor: Tensor, have: TensorLayout, want: TensorLayout, mesh: Mesh, when: When
) -> Iterator[Communication]:
    """The collectives from one layout to another, axis by axis; a slice of something whole is free."""
    for axis, degree in mesh.degrees:
        if degree == 1:
            continue
        before, after = have.place(axis), want.place(axis)
        if axis not in have.partial and (before is None or before == after):
            continue
        if axis in have.partial:
            operation = "all_reduce" if after is None else "reduce_scatter"
        else:
            operation = "all_gather" if after is None else "all_to_all"
        shares = {
            d: mesh.ways(tuple(a for a in axes if a != axis)) for d, axes in zip(tensor.dims, want.dims, strict=True)
        }
        if operation == "all_to_all" and before is not None and after is not None:
            place, lies = (after, want) if after != _MERGED else (before, have)
            shares[tensor.dims[place]] = mesh.ways(lies.dims[place])
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
    owed = tuple(each for each in placed.communications if not each.name.endswith(AGAIN))
    arrived = {tensor.name for tensor in placed.node.inputs}
    inside = {name: ranks for name, ranks in placed.gathered.items() if name not in arrived}
    return replace(placed, communications=owed, gathered=inside)


#: Ends the name of a gather that is made again for the backward pass.
AGAIN = ".again"


def _parameters(node: Node, split: Split, ways: Mapping[str, float]) -> Iterable[tuple[Tensor, Axes]]:
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
