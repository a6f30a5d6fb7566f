"""What a layer owes inside itself when its dims are split: statistics of split rows, keys and values of a split
sequence, tokens of spread experts, and the borders of windows that slide over a split dim."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from paleo.network.graph import Node
from paleo.operations.attention import FusedAttention
from paleo.operations.base import Operation, is_core
from paleo.operations.contraction import Contraction
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.tensor import Tensor
from paleo.operations.window import Window
from paleo.parallel.mesh import Mesh, joined
from paleo.parallel.placement import Context, Split

When = Literal["forward", "backward"]
WAYS: tuple[When, When] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective that a layer owes. ``tensor`` is its payload as nccl-tests counts it: the full buffer of the
    group, for an all-to-all the buffer of one rank, for a send what goes to one neighbour. ``overlapped`` ones run
    beside computation that does not wait for them. What a mixture of experts deals out states how many of how many
    experts a token visits, ``chosen``."""

    name: str
    operation: str
    axis: str
    tensor: Tensor
    when: When
    overlapped: bool = False
    chosen: tuple[int, int] | None = None


# norms, softmax, losses


def statistics(node: Node, split: Split, ways: Mapping[str, float]) -> Iterator[Communication]:
    """Rows over a split dim exchange a few numbers: a softmax or loss its maximum, sum and target, a norm its mean and
    variance, and backward the two sums of its gradient.

    A batch norm of one's own replica still sums over the ranks that share its samples.
    """
    for operation in node.operations:
        if not isinstance(operation, MemoryPass) or not operation.reduces:
            continue
        local = {"batch"} if operation.local_statistics else set()
        axes = {axis for dim in operation.reduces if dim not in local for axis in split.get(dim, ())}
        for axis in sorted(axes):
            stacked = _row(operation).split(ways)
            yield Communication(operation.name, "all_reduce", axis, stacked, "forward")
            if operation.kind.norm:
                yield Communication(operation.name, "all_reduce", axis, stacked, "backward")


def _row(operation: MemoryPass) -> Tensor:
    """The numbers of each row that ranks exchange: one for each statistic that a norm keeps, else for what is left of
    its input."""
    kept = [tensor for tensor in operation.keeps if tensor.role == "statistic" and operation.kind.norm]
    row = kept[0] if kept else operation.inputs[0].without(*operation.reduces, name="row", role="statistic")
    return Tensor(
        f"{operation.name}.row", ("numbers", *row.dims), (operation.kind.row_statistics, *row.sizes), "statistic"
    )


# attention over a split sequence


def core_split(node: Node, split: Split, context: Context) -> Split:
    """How the core of attention is split: by the all-to-all form heads take the place of the sequence."""
    if context == "ring" or not split.get("seq") or not any(is_core(operation) for operation in node.operations):
        return split
    return {**split, "seq": (), "kv_heads": (*split.get("kv_heads", ()), *split["seq"])}


def key_exchange(
    node: Node, split: Split, core: Split, ways: Mapping[str, float], mesh: Mesh
) -> Iterator[Communication]:
    """Queries of a split sequence need all keys and values.

    Ring: they pass round, hidden behind the scores of a fused kernel, and again with their gradients backward (Liu et
    al., Ring attention, 2023); unfused attention gathers them first. All-to-all: query, key, value and the output
    change from a split sequence to split heads and back (Jacobs et al., DeepSpeed-Ulysses, 2023).
    """
    axes = split.get("seq", ())
    if not axes:
        return
    keys, others = _keys_and_values(node), _queries_and_outputs(node)
    divided = {**ways, "keys": mesh.ways(axes)}
    for axis in axes:
        if core is not split:
            for tensor in (*keys, *others):
                for when in WAYS:
                    yield Communication(f"{node.name}.core", "all_to_all", axis, tensor.split(divided), when)
            continue
        for tensor in keys:
            name, whole, hidden = f"{node.name}.core", tensor.split(ways), _hides(node)
            yield Communication(name, "all_gather", axis, whole, "forward", overlapped=hidden)
            if hidden:
                yield Communication(name, "all_gather", axis, whole, "backward", overlapped=True)
            yield Communication(name, "reduce_scatter", axis, whole, "backward", overlapped=hidden)


def ring_kept(node: Node, split: Split, core: Split, mesh: Mesh) -> dict[str, int]:
    """Keys and values of which a ring keeps each rank's own share alone, with the ranks that share them."""
    axes = split.get("seq", ())
    if not axes or core is not split or not _hides(node):
        return {}
    return {tensor.name: mesh.ways(axes) for tensor in _keys_and_values(node)}


def _hides(node: Node) -> bool:
    return any(isinstance(operation, FusedAttention) for operation in node.operations)


def _core_tensors(node: Node) -> Iterator[tuple[Operation, Tensor]]:
    """What enters the core of attention from outside it."""
    core = [operation for operation in node.operations if is_core(operation)]
    inner = {operation.out.name for operation in core}
    for operation in core:
        yield from (
            (operation, tensor)
            for tensor in operation.reads
            if tensor.role == "activation" and tensor.name not in inner
        )


def _keys_and_values(node: Node) -> list[Tensor]:
    keys = {
        tensor.name: tensor for _, tensor in _core_tensors(node) if "keys" in tensor.dims and "seq" not in tensor.dims
    }
    return list(keys.values())


def _queries_and_outputs(node: Node) -> list[Tensor]:
    core = [operation for operation in node.operations if is_core(operation)]
    queries = {tensor.name: tensor for _, tensor in _core_tensors(node) if "seq" in tensor.dims}
    return [*queries.values(), *(operation.out for operation in core[-1:])]


# experts


def expert_exchange(node: Node, split: Split, ways: Mapping[str, float]) -> Iterator[Communication]:
    """Rule B inside a mixture of experts: tokens are split by the batch before dispatch and by experts after it, and
    back (GShard, Lepikhin et al., 2020)."""
    chosen = _chosen(node)
    for operation in node.operations:
        moved = [t for t in (*operation.reads, operation.out) if "capacity" in t.dims and t.role == "activation"]
        if moved and isinstance(operation, MemoryPass) and operation.kind.routes:
            axis = joined(split.get("experts", ()))
            for when in WAYS if axis else ():
                yield Communication(operation.name, "all_to_all", axis, moved[0].split(ways), when, chosen=chosen)


def _chosen(node: Node) -> tuple[int, int] | None:
    """How many experts a token visits, and how many there are."""
    for operation in node.operations:
        if isinstance(operation, MemoryPass) and operation.kind.routes and "capacity" in operation.out.dims:
            tokens, experts = math.prod(operation.inputs[0].sizes[:-1]), operation.out.size("experts")
            return max(1, round(experts * operation.out.size("capacity") / tokens)), int(experts)
    return None


def sent_once(chosen: int, experts: int, targets: int) -> float:
    """Share of its copies that a token sends where it goes once to each of ``targets`` (nodes or devices), which hold
    equal parts of the experts: the targets that ``chosen`` experts lie on, drawn without replacement, over them.

    >>> sent_once(2, 8, 8), round(sent_once(8, 256, 8), 3), sent_once(8, 256, 1)
    (1.0, 0.662, 0.125)
    """
    missed = math.prod(
        (experts - experts / targets - drawn) / (experts - drawn) for drawn in range(min(chosen, experts))
    )
    return targets * (1.0 - max(missed, 0.0)) / chosen


# windows over a split dim


def halo_exchange(node: Node, split: Split, ways: Mapping[str, float], mesh: Mesh) -> Iterator[Communication]:
    """Rule C: a window at the border of a rank's share reads rows of its neighbours: those of the input forward, those
    of the output's gradient backward.

    For an odd kernel of K taps at stride 1 that is (K − 1)/2 rows from either side. Dims are exchanged one after
    another, so that corners travel with the second one (Dryden et al., IPDPS 2019).
    """
    for operation in node.operations:
        if isinstance(operation, Contraction | MemoryPass):
            source = operation.lhs if isinstance(operation, Contraction) else (*operation.inputs, operation.out)[0]
            for when, tensor in zip(WAYS, (source, operation.out), strict=True):
                if operation.windows and (when == "forward" or source.grad):
                    yield from _borders(operation, tensor, when, split, ways, mesh)


def _borders(
    operation: Contraction | MemoryPass, tensor: Tensor, when: When, split: Split, ways: Mapping[str, float], mesh: Mesh
) -> Iterator[Communication]:
    local = tensor.split(ways)
    for window in operation.windows:
        dim = window.source if when == "forward" else window.out
        below, above = halo_of(operation, window, when)
        for axis in split.get(window.out, ()):
            ranks = mesh.degree(axis)
            rows = (below, above) if ranks > 2 else (max(below, above),)
            for count in filter(None, rows):
                yield Communication(operation.name, "send_recv", axis, _resized(local, dim, count), when)
            local = _resized(local, dim, local.size(dim) + sum(rows))


def halo_of(operation: Contraction | MemoryPass, window: Window, when: When) -> tuple[int, int]:
    """Rows of the neighbours below and above; a transposed convolution is the gradient of one."""
    transposed = isinstance(operation, Contraction) and operation.transposed
    return window.halo if (when == "forward") != transposed else window.gradient_halo


def _resized(tensor: Tensor, dim: str, size: float) -> Tensor:
    sizes = tuple(size if d == dim else n for d, n in zip(tensor.dims, tensor.sizes, strict=True))
    return replace(tensor, sizes=sizes)
