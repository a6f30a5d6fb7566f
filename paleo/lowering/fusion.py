"""Fusion of element-wise passes: what a compiler, or a framework's hand-written kernels, merge into one launch.

A pass that reads what the pass before it wrote, and alone reads it, need not meet memory in between: the tensor is
neither written nor read again (nor is its gradient on the way back), unless it is kept for the backward pass. Batch
normalisation takes the passes after it into its second sweep; the first, over its input, stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paleo.operations.base import MemoryPass

if TYPE_CHECKING:
    from paleo.operations.base import Kernel, Operation
    from paleo.operations.tensor import Precision


@dataclass(frozen=True, slots=True)
class Launches:
    """The kernels of one operation, forward and backward, and the layer and inner repetitions that it belongs to; how
    often full recomputation runs it ``again``, and how often where it is ``selected``."""

    operation: Operation
    layer: str
    times: int
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    again: float = 1.0
    selected: float = 0.0


#: Chains that are one kernel: none; a sum, a rectifier or both after a batch normalisation, which libraries have
#: kernels for, in the forward pass alone or both ways; or whatever touches each element on its own.
Chains = Literal["none", "norms forward", "norms", "all"]


def fuse(
    launches: Sequence[Launches], readers: dict[str, int], precision: Precision, chains: Chains = "all"
) -> list[Launches]:
    """Chains of element-wise passes merged into their last one. ``readers`` counts who reads each tensor."""
    merged: list[Launches] = []
    for launch in launches if chains != "none" else ():
        if merged and _fusable(merged[-1], launch, readers) and (chains == "all" or _follows_norm(merged[-1], launch)):
            joined = _join(merged[-1], launch, precision)
            separate_backward = replace(joined, backward=merged[-1].backward + launch.backward)
            merged[-1] = separate_backward if chains == "norms forward" else joined
        else:
            merged.append(launch)
    return merged or list(launches)


def softmax_by_steps(launch: Launches, multiple: int, precision: Precision) -> Launches:
    """Attention's softmax as the framework does it where its fused kernel cannot: cast to fp32, scale, mask, softmax,
    cast back, and the same way back.

    The fused kernel of Megatron-LM (2021) takes matrices of scores (batch times heads of a rank) by fours, one for each
    warp of a block; other counts go through separate passes over all scores. What these keep beside the weights is not
    counted as memory.
    """
    softmax = launch.operation
    if (
        multiple == 1
        or not isinstance(softmax, MemoryPass)
        or softmax.operation != "softmax"
        or len(softmax.out.sizes) < 3
    ):
        return launch
    scores = float(softmax.out.elements)
    if scores / float(softmax.out.sizes[-1] * softmax.out.sizes[-2]) % multiple == 0:
        return launch
    narrow, wide = precision.activation, precision.bytes_of("statistic")
    cast, passed, back = (narrow, wide), (wide, wide), (wide, narrow)
    forward = _passes(launch.forward, scores, (cast, passed, passed, passed, back))
    backward = _passes(launch.backward, scores, ((narrow, wide), (2 * wide, wide), passed, passed, back))
    return replace(launch, forward=forward, backward=backward)


def _passes(fused: tuple[Kernel, ...], elements: float, steps: Sequence[tuple[float, float]]) -> tuple[Kernel, ...]:
    """A fused kernel divided into passes; ``steps``: bytes read and written by each, per element."""
    return tuple(
        replace(kernel, bytes_read=elements * read, bytes_written=elements * written)
        for kernel in fused
        for read, written in steps
    )


def _fusable(first: Launches, second: Launches, readers: dict[str, int]) -> bool:
    a, b = first.operation, second.operation
    if not (isinstance(a, MemoryPass) and isinstance(b, MemoryPass)) or first.times != second.times:
        return False
    chains = (a.kind.pointwise or a.kind.two_sweeps) and b.kind.pointwise
    read_by_it = any(t.name == a.out.name for t in b.inputs) and readers.get(a.out.name, 0) == 1
    return chains and a.out.elements == b.out.elements and read_by_it


def _follows_norm(first: Launches, second: Launches) -> bool:
    """Whether the chain starts with a normalisation and goes on with one operation an element: a sum, a rectifier."""
    starts = first.forward[0].kind.two_sweeps if first.forward else False
    return starts and isinstance(second.operation, MemoryPass) and second.operation.flops_per_element <= 1.0


def _join(first: Launches, second: Launches, precision: Precision) -> Launches:
    """One launch for both: the tensor between them is spared, forward and (where both have a pass) backward."""
    between = first.operation.out.bytes(precision)
    kept = first.operation.out.name in {t.name for t in (*first.operation.saves, *second.operation.saves)}
    forward = _merged(first.forward, second.forward, 0.0 if kept else between, between)
    backward = _merged(first.backward, second.backward, between if first.backward and second.backward else 0.0, between)
    if not (first.backward and second.backward):
        backward = first.backward or second.backward
    again, selected = max(first.again, second.again), max(first.selected, second.selected)
    return replace(second, forward=forward, backward=backward, again=again, selected=selected)


def _merged(first: tuple[Kernel, ...], second: tuple[Kernel, ...], written: float, read: float) -> tuple[Kernel, ...]:
    """The second launch with the work of the first, less what is no longer written and read between them."""
    if not (first and second):
        return first or second
    a, b = first[0], second[0]
    normalised = a.kind.two_sweeps
    joined = replace(
        b,
        operation=a.operation if normalised else b.operation,
        shape={**b.shape, "swept": a.shape.get("swept", a.bytes_read)} if normalised else b.shape,
        vector_flops=a.vector_flops + b.vector_flops,
        bytes_read=max(0.0, a.bytes_read + b.bytes_read - read),
        bytes_written=max(0.0, a.bytes_written + b.bytes_written - written),
    )
    return (joined,)
