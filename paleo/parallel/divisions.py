"""Which dims may be divided, and into how many shares."""

from __future__ import annotations

from collections.abc import Mapping

from paleo.errors import PlanError
from paleo.network.graph import Node
from paleo.operations.base import Operation, is_core
from paleo.operations.chain import RecomputedChain
from paleo.operations.contraction import Contraction
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.recurrence import Recurrence
from paleo.operations.tensor import Tensor
from paleo.operations.window import Window

#: Spatial dims of images, as a window's output and its source call them.
SPACE = frozenset({"height", "width", "depth", "in_height", "in_width", "in_depth"})
#: Dims that need not divide evenly: the fullest rank sets the pace (a short batch, a vocabulary padded to the ranks, an
#: image of odd height).
PADDED = frozenset({"batch", "vocab"}) | SPACE
#: Dims of attention that its views pack with others.
_PACKED = frozenset({"keys", "group", "head_dim", "value_dim", "packed"})


def check_division(node: Node, ways: Mapping[str, float], core: Mapping[str, float]) -> None:
    """PlanError where a layer's dims cannot be divided in so many ways; ``core``: those of the core of attention."""
    tensors = [t for op in node.operations for t in (*op.reads, op.out)]
    for of in (ways,) if core == ways else (ways, core):
        for dim, n in of.items():
            _check_sizes(node, dim, int(n), [t for t in tensors if dim in t.dims])
    for operation in node.operations:
        whole, why = _undivided(operation)
        for dim in sorted(whole & set(ways)):
            raise PlanError(f"layer {node.name!r}: {dim} cannot be divided: {why}")
        if isinstance(operation, Contraction | MemoryPass):
            for window in operation.windows:
                _check_window(node, operation, window, int(ways.get(window.out, 1)))


def _check_sizes(node: Node, dim: str, n: int, tensors: list[Tensor]) -> None:
    sizes = [t.size(dim) for t in tensors]
    if n == 1 or not sizes or not isinstance(sizes[0], int):
        return
    if dim in SPACE:
        least = min(t.size(dim) for t in tensors if t.size(dim) > 1 or not any(t in op.reads for op in node.operations))
        if least < n:
            raise PlanError(
                f"layer {node.name!r}: {dim} {least:g} cannot be divided over {n} ranks: some would have none"
            )
    elif sizes[0] % n and dim not in PADDED:
        raise PlanError(f"layer {node.name!r}: {dim} {sizes[0]:g} cannot be divided over {n} ranks")


def _undivided(operation: Operation) -> tuple[frozenset[str], str]:
    """Dims whose shares would have to wait for one another, or that a view hides, and why they stay whole."""
    if isinstance(operation, Recurrence):
        return frozenset({operation.steps_dim}), "its steps wait for one another"
    if isinstance(operation, RecomputedChain):
        return operation.whole_dims, "its steps wait for one another"
    if is_core(operation):
        return _PACKED, "attention is divided by batch, seq or kv_heads"
    if isinstance(operation, Contraction):
        return frozenset(window.kernel for window in operation.windows), "it is the window of a convolution"
    moved = {dim for tensor in operation.reads for dim in tensor.dims} - set(operation.out.dims)
    merged = isinstance(operation, MemoryPass) and operation.kind.merges_dims
    return frozenset(moved if merged else ()), "the layer moves it into another dim"


def _check_window(node: Node, operation: Contraction | MemoryPass, window: Window, n: int) -> None:
    """Borders come from the next neighbour alone."""
    if n == 1:
        return
    source = operation.lhs if isinstance(operation, Contraction) else operation.inputs[0]
    for tensor, dim, rows in (
        (source, window.source, window.halo),
        (operation.out, window.out, window.gradient_halo),
    ):
        share = int(tensor.size(dim)) // n
        if share < max(rows):
            reach = f"its windows reach {max(rows)} beyond a share of {share}"
            raise PlanError(f"layer {node.name!r}: {window.out} {tensor.size(dim):g} over {n} ranks: {reach}")
