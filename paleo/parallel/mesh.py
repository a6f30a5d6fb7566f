"""The mesh of ranks: named axes with degrees, innermost first, so that each axis is a set of groups on the system.

Which dims may be divided, and into how many shares.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from paleo.errors import PlanError
from paleo.operations.base import is_core
from paleo.operations.contraction import Contraction
from paleo.operations.memory_pass import MemoryPass, RecomputedChain
from paleo.operations.recurrence import Recurrence

if TYPE_CHECKING:
    from paleo.network.graph import Node
    from paleo.operations.base import Operation
    from paleo.operations.tensor import Tensor, Window

#: Axes from the innermost (neighbouring ranks) to the outermost, the order of Megatron and of torchtitan; ``spatial``
#: divides images. Experts are spread over ``ep`` of the data-parallel ranks, and states over ``shard`` of them where
#: that is stated: the batch is divided over ``BATCH_AXES`` together.
AXES = ("spatial", "tp", "cp", "ep", "shard", "dp", "pp")
Axes = tuple[str, ...]
BATCH_AXES: Axes = ("ep", "shard", "dp")


def joined(axes: Axes) -> str:
    """One name for the group over several axes that one collective spans.

    >>> joined(("tp", "ep")), Mesh.of({"tp": 2, "ep": 4, "dp": 3}).degree("tp+ep")
    ('tp+ep', 8)
    """
    return "+".join(axes)


@dataclass(frozen=True, slots=True)
class Mesh:
    """Degrees of the axes; ranks are numbered with the first axis fastest.

    >>> mesh = Mesh.of({"dp": 4, "tp": 8})
    >>> mesh.size, mesh.stride(("dp",)), mesh.degree("pp")
    (32, 8, 1)
    """

    degrees: tuple[tuple[str, int], ...]
    _by_axis: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_axis", dict(self.degrees))

    @classmethod
    def of(cls, degrees: Mapping[str, int]) -> Mesh:
        return cls(tuple((axis, degrees.get(axis, 1)) for axis in AXES))

    @property
    def size(self) -> int:
        return math.prod(degree for _, degree in self.degrees)

    def degree(self, axis: str) -> int:
        """Ranks along an axis, or along several joined by ``+`` (`joined`)."""
        known = self._by_axis.get(axis)
        return self.ways(tuple(axis.split("+"))) if known is None else known

    def stride(self, axes: Axes) -> int:
        """How far apart neighbours of a group along the axes are numbered: the stride of the innermost one in use."""
        names = [name for name, _ in self.degrees]
        axes = tuple(name for axis in axes for name in axis.split("+"))
        used = [axis for axis in axes if self.degree(axis) > 1] or list(axes)
        innermost = min(names.index(axis) for axis in used)
        return math.prod(degree for _, degree in self.degrees[:innermost])

    @property
    def replicas(self) -> int:
        """Ranks that share out the batch."""
        return self.ways(BATCH_AXES)

    @property
    def state_axes(self) -> Axes:
        """Axes over which ZeRO shares out states: those of the shard group, or of all replicas, and in either case the
        ranks of cp, which hold the same parameters (Megatron's distributed optimizer and FSDP share states over dp x
        cp)."""
        axes = ("cp", "shard") if self.degree("shard") > 1 else ("cp", "ep", "dp")
        return tuple(axis for axis in axes if self.degree(axis) > 1)

    def ways(self, axes: Axes) -> int:
        """Ranks over which several axes together divide."""
        return math.prod([self._by_axis[axis] for axis in axes])


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
