"""The exchange of gradients and states between replicas: what travels, what of it is exposed, and compressed gradients.

*What travels*: which collectives sum the gradients of a stage and gather its parameters, over which axes, and how many
elements of each a rank owns.

*What is exposed*: sums of gradients overlap with the last passes, gathers of updated parameters with the next first
pass. A stage that overlaps starts to send a chunk's gradients inside the last pass that computes them, and goes on
during the passes of its other chunks; only what is left when its last pass ends is exposed.

*Compressed gradients*: a method's messages stand in for the sums of gradients, its coding follows the last backward
pass, its state lies beside the optimizer's. Messages are counted for the whole gradient of a rank and divided among its
parts by their elements, so that their sum is right. Coding occupies the computing stream: nothing hides it.

Pure functions that broadcast over arrays: the stages are the first axis, their chunks the second where there are any,
configurations the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.operations.base import flat_pass
from paleo.parallel.placement import Axes

if TYPE_CHECKING:
    from paleo.compression.base import Compression, Message, SummedGradient
    from paleo.lowering.program import Program
    from paleo.operations.base import Kernel
    from paleo.parallel.placement import Mesh
    from paleo.schedules.base import Numeric, Passes, Schedule

Array = npt.NDArray[np.float64]
Count = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]
Numbers = TypeVar("Numbers", float, Array)


def gradient_shares(program: Program, mesh: Mesh, copies: int) -> dict[Axes, Array]:
    """Gradient elements that one of `holdings` computes, by the axes over which they are summed: (sections and
    ties,)."""
    owed = [
        (number, tuple([axis for axis in axes if mesh.degree(axis) > 1]), elements)
        for number, axes, elements in _gradients(program)
    ]
    return _by_axes(program, owed, copies)


def gathered_shares(program: Program, mesh: Mesh, copies: int, *, frozen: bool) -> dict[Axes, Array]:
    """Parameter elements that one of `holdings` gathers from the ranks that share out their states, by the axes
    of these ranks, which are fewer for experts: (sections and ties,). ``frozen``: those too that are not trained."""
    gathered = list(_states(program, mesh))
    if frozen:
        first, shared = len(program.sections), mesh.state_axes
        gathered += [(i, shared, each.parameters - each.trained) for i, each in enumerate(program.sections)]
        gathered += [(first + i, shared, tie.elements) for i, tie in enumerate(program.ties) if not tie.trained]
    return _by_axes(program, [part for part in gathered if part[2]], copies)


def owned_elements(program: Program, mesh: Mesh, copies: int) -> Array:
    """Trained elements that a rank owns of one of `holdings` where states are shared out over their replicas,
    which experts have fewer of: (sections and ties,)."""
    owned = np.zeros(len(program.sections) + len(program.ties))
    for number, axes, elements in _states(program, mesh):
        owned[number] += elements / (mesh.group_size(axes) * copies)
    return owned


def _gradients(program: Program) -> list[tuple[int, Axes, float]]:
    """Position among `holdings`, axes and elements of all gradients."""
    first = len(program.sections)
    gradients = [
        (i, part.axes, part.elements) for i, section in enumerate(program.sections) for part in section.gradients
    ]
    return gradients + [(first + i, tie.axes, tie.elements) for i, tie in enumerate(program.ties) if tie.trained]


def _states(program: Program, mesh: Mesh) -> Iterator[tuple[int, Axes, float]]:
    """The same with the axes over which the states of those parameters are shared out."""
    shared = mesh.state_axes
    for number, axes, elements in _gradients(program):
        yield number, tuple([axis for axis in shared if axis in axes]), elements


def _by_axes(program: Program, owed: Sequence[tuple[int, Axes, float]], copies: int) -> dict[Axes, Array]:
    """Elements side by side for each set of axes; with one copy of the network nothing travels over none."""
    by_axes: dict[Axes, Array] = {}
    for number, axes, elements in owed:
        if axes or copies > 1:
            by_axes.setdefault(axes, np.zeros(len(program.sections) + len(program.ties)))[number] += elements
    return by_axes


def sharers(trained: Array, owned: Array, ranks: Numeric) -> Array:
    """Ranks that share out ``trained`` elements, of which each ``owned`` some; ``ranks`` where there are none."""
    return np.divide(trained, owned, out=np.zeros_like(owned) + ranks, where=owned > 0)


def replica_groups(mesh: Mesh, axes: Axes, copies: int) -> list[tuple[Count, Count]]:
    """Stride and ranks of the groups that sum a stage's gradients over ``axes``, (stages,) each; the slowest of them
    counts.

    With two copies of the network the group is twice as large, and what it sums crosses between the two stages that
    hold the same piece: no faster than those two alone.
    """
    stages = mesh.degree("pp")
    groups = [(np.full(stages, mesh.stride(axes)), np.full(stages, mesh.group_size(axes) * copies))] if axes else []
    if copies > 1:
        distance = np.abs(stages - 1 - 2 * np.arange(stages))
        groups.append((distance * mesh.stride(("pp",)), np.full(stages, copies)))
    return groups


#: The axis of ranks that divide tensors.
TENSOR_AXIS = "tp"


def gradient_exchange(zero: int, axes: Axes, size: Numbers, mesh: Mesh) -> tuple[tuple[str, Axes, Numbers], ...]:
    """The collectives that sum gradients of ``size`` bytes (or elements), with their axes and payloads.

    Where a shard group is smaller than the replicas its ranks first scatter the sum, and each shard is then summed over
    the groups (HSDP: Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2). Parameters that ranks of tp have whole, each
    for its part of the sequence, are summed over these apart, whole: their states are shared out over replicas alone
    (Megatron-Core's finalize_model_grads.py).
    """
    replicas = tuple(axis for axis in axes if axis != TENSOR_AXIS)
    if replicas == axes:
        return _over_replicas(zero, axes, size, mesh)
    beside = (("all_reduce", (TENSOR_AXIS,), size),)
    return _over_replicas(zero, replicas, size, mesh) + beside if replicas else beside


def _over_replicas(zero: int, axes: Axes, size: Numbers, mesh: Mesh) -> tuple[tuple[str, Axes, Numbers], ...]:
    if not zero or mesh.degree("shard") == 1 or "shard" not in axes:
        return (("reduce_scatter" if zero else "all_reduce", axes, size),)
    shared = tuple(axis for axis in axes if axis in mesh.state_axes)
    across_shards = tuple(axis for axis in axes if axis not in shared)
    return ("reduce_scatter", shared, size), ("all_reduce", across_shards, size / mesh.group_size(shared))


def exposed_exchange(
    seconds: Array, buckets: Array, schedule: Schedule, passes: Passes, chunks: int, contention: float
) -> Array:
    """Seconds after each stage's last pass until all its gradients have been sent: (stages, …).

    ``seconds`` and ``buckets``: time and number of buckets of each chunk, (stages, chunks, …). A bucket is ready
    once its share of the chunk's last gradient pass is done. ``contention``: what the passes lose for each second of
    sending beside them; at 1 nothing is won.
    """
    return exposed_sends(in_order(seconds, buckets, schedule, chunks), schedule, passes, chunks, contention)


@dataclass(frozen=True, slots=True)
class Sends:
    """The sends of chunks, one after another, which decide when a stage ends; each field (stages, sends, …).

    ``inputs`` and ``weights`` passes follow a chunk's last gradient, the first ``share`` of whose pass lies behind its
    first bucket. From that bucket on sending lasts ``from_first`` seconds, all later chunks in it, from the last one on
    ``from_last``. ``total``: seconds of all sends, (stages, …)."""

    inputs: Array
    weights: Array
    share: Array
    from_first: Array
    from_last: Array
    total: Array

    def of(self, members: Index) -> Sends:
        """The exchanges at some positions of the last axis."""
        parts = (np.take(part, members, axis=-1) for part in (self.share, self.from_first, self.from_last, self.total))
        return Sends(self.inputs, self.weights, *parts)


def in_order(seconds: Array, buckets: Array, schedule: Schedule, chunks: int) -> Sends:
    """The sends of each stage in the order in which its chunks are done; arguments as in `exposed_exchange`.

    Between two chunks the time to the end is linear where all of them are alike; then neither the inner ones nor their
    buckets can be the last to be waited for, and they are left out.
    """
    follow = _remaining_passes(schedule, seconds.shape[0], seconds.shape[1], chunks)
    order = np.argsort(-follow.sum(axis=2), axis=1, kind="stable")
    rows = np.arange(len(seconds))[:, None]
    follow, ordered, count = follow[rows, order], seconds[rows, order], buckets[rows, order]
    corners = _corners(follow, ordered, count)
    later = np.zeros_like(ordered)
    for place in range(ordered.shape[1] - 2, -1, -1):
        later[:, place] = later[:, place + 1] + ordered[:, place + 1]
    ordered, count, left, later = ordered[:, corners], count[:, corners], follow[:, corners], later[:, corners]
    inputs, weights = (left[..., kind].reshape(left.shape[:2] + (1,) * (seconds.ndim - 2)) for kind in range(2))
    total = seconds.sum(axis=1)
    return Sends(inputs, weights, 1.0 - 1.0 / count, ordered + later, ordered / count + later, total)


def _corners(follow: Array, seconds: Array, buckets: Array) -> list[int]:
    """Chunks that are first, last or, on some stage, unlike a neighbour: all others lie on a line between two of
    these."""
    figures = np.concatenate([each.reshape(*each.shape[:2], -1) for each in (seconds, buckets)], axis=2)
    equal_neighbours = (figures[:, 1:] == figures[:, :-1]).all(axis=(0, 2))
    even = (np.diff(follow, 2, axis=1) == 0.0).all(axis=(0, 2))
    inner = {place + 1 for place in np.flatnonzero(equal_neighbours[1:] & equal_neighbours[:-1] & even).tolist()}
    return [place for place in range(seconds.shape[1]) if place not in inner]


def exposed_sends(sends: Sends, schedule: Schedule, passes: Passes, chunks: int, contention: float) -> Array:
    """`exposed_exchange` of sends in order."""
    if contention >= 1.0 or not sends.total.any():
        return sends.total
    back, weights = passes.backward / chunks, passes.weights / chunks
    gradients = weights if schedule.splits_backward else back + weights
    exposed = np.zeros(np.broadcast_shapes(back.shape, sends.total.shape))
    for k in range(sends.share.shape[1]):
        after = sends.inputs[:, k] * back + sends.weights[:, k] * weights
        finish = np.maximum(sends.from_first[:, k] - gradients * sends.share[:, k], sends.from_last[:, k]) - after
        np.maximum(exposed, finish, out=exposed)
    return np.asarray(np.minimum(sends.total, exposed + contention * np.maximum(sends.total - exposed, 0.0)))


def _remaining_passes(schedule: Schedule, stages: int, pieces: int, chunks: int) -> Array:
    """Passes that a stage still runs after the last gradient of each chunk: of inputs and of weights, (stages, chunks,
    2)."""
    stage = np.arange(float(stages))
    counts = [[stage * 0.0 + n for n in schedule.remaining(stage, stages, chunk, chunks)] for chunk in range(pieces)]
    return np.array(counts).transpose(2, 0, 1)


def exposed_gather(seconds: Array, buckets: Array, forward: Array, contention: float) -> Array:
    """Seconds of gathering that the first forward pass of the next step, ``forward`` long, does not hide: the first
    bucket at least."""
    exposed = np.maximum(seconds / buckets, seconds - forward * (1.0 - 1.0 / buckets))
    return np.asarray(np.minimum(seconds, exposed + contention * (seconds - exposed)))


def bucket_count(size: Numeric, bucket: float) -> Array:
    """Number of buckets, 1 or more, of ``bucket`` bytes each (at least one byte) that hold ``size`` bytes."""
    return np.maximum(1.0, np.ceil(np.asarray(size) / max(bucket, 1.0)))


#: A collective that is owed: operation, axes, bytes or elements.
Owed = tuple[str, Axes, Numbers]


def method_of(text: str | None, *, zero: int, forward_only: bool) -> Compression | None:
    """The method that a run names; PlanError where it does not suit the run."""
    if text is None or forward_only:
        return None
    from paleo.compression.base import compression

    method = compression(text)
    if zero == 3 and not method.linear and not method.sharded:
        raise PlanError(
            f"compress {text}: with zero=3 gradients are scattered as they come, so only sums in another format do"
        )
    return method


def check_sharded(text: str | None, zero: int) -> None:
    """PlanError where a method of sharded parameters is named for a run that does not shard them."""
    if text is None or zero == 3:
        return
    from paleo.compression.base import compression

    if compression(text).sharded:
        raise PlanError(f"compress {text}: it compresses the gathers of sharded parameters; state --strategy zero=3")


@dataclass(slots=True)
class _Matrices:
    """Matrices of weights: elements, sums of their sides, and of elements times the rows that a product sums."""

    number: float = 0.0
    elements: float = 0.0
    sides: float = 0.0
    summed: float = 0.0

    def add(self, rows: float, columns: float, summed: float, count: float) -> None:
        self.number += count
        self.elements += rows * columns * count
        self.sides += (rows + columns) * count
        self.summed += rows * columns * summed * count


def _window(shape: Mapping[str, float]) -> float:
    """Elements of one filter and channel, whatever the number of dims."""
    return math.prod(size for name, size in shape.items() if name.startswith("kernel_"))


def unit_gradient(program: Program, ranks: float, width: float, ranks_per_node: float = 1.0) -> SummedGradient:
    """The gradient of a rank's program per element: one element, with its share of the matrices.

    Matrices are those of the products that make gradients of weights: m by n, where k rows are summed; filters of a
    convolution are one of k by c r s.
    """
    from paleo.compression.base import SummedGradient

    elements, tensors, products, filters = 0.0, 0.0, _Matrices(), _Matrices()
    for section in program.sections:
        elements += section.trained * section.repeat
        tensors += section.tensors * section.repeat
        for counted in section.kernels:
            shape, count = counted.kernel.shape, counted.times * section.repeat
            if counted.kernel.phase != "backward_weight":
                continue
            if counted.kernel.family == "gemm":
                products.add(shape["m"], shape["n"], shape["k"], shape.get("batch", 1.0) * count)
            elif counted.kernel.family == "conv":
                groups = shape.get("groups", 1.0)
                filters.add(shape["k"], shape["c"] / groups * _window(shape), 1.0, count)
    whole, matrices = max(elements, 1.0), products.elements + filters.elements
    share = min(1.0, elements / max(matrices, 1.0)) / whole
    return SummedGradient(
        elements=1.0, tensors=tensors / whole, ranks=ranks, width=width, ranks_per_node=ranks_per_node,
        samples=products.summed / max(products.elements, 1.0),
        matrices=(products.number + filters.number) / whole,
        matrix_elements=matrices * share, matrix_sides=(products.sides + filters.sides) * share,
        dense_elements=products.elements * share, dense_sides=products.sides * share,
    )  # fmt: skip


def compressed(
    method: Compression, gradient: SummedGradient, owed: Sequence[Owed[Numbers]]
) -> tuple[Owed[Numbers], ...]:
    """The collectives of a compressed gradient in place of those ``owed``, with their axes and payloads.

    ``gradient`` is that of one element. Where states are sharded only the sum is needed, not its return: gathers are
    left out and sums are scattered. What a method of sharded parameters does not scatter stays as it is, as do sums
    over tp.
    """
    return tuple(
        (operation, axes, size * ratio)
        for plain, axes, size in owed
        for operation, ratio in (
            [(plain, 1.0)]
            if (method.sharded and plain == "all_reduce") or axes == (TENSOR_AXIS,)
            else _ratios(method, gradient, scattered=plain == "reduce_scatter")
        )
    )


def compressed_gather(
    method: Compression, gradient: SummedGradient, width: float, axes: Axes, size: Numbers, *, again: bool
) -> tuple[Owed[Numbers], ...]:
    """The gather of sharded parameters of ``width`` bytes before the forward pass, or ``again`` before the backward
    one; ``gradient`` is that of one element."""
    message = method.messages(gradient)[int(again)]
    return ((_scoped_name(message), axes, size * (float(message.payload) / width)),)


def _scoped_name(message: Message) -> str:
    return message.operation if message.scope == "all" else f"{message.operation}@{message.scope}"


def scoped(operation: str, groups: Count, devices_per_node: int) -> tuple[str, Count]:
    """The plain operation of a name such as ``all_gather@node``, and the part of each group, (2, …) strides and ranks,
    that takes part: its ranks of one node, or (``across``) one rank of each node.

    >>> scoped("all_to_all@across", np.array([[1], [64]]), 8)[1].tolist()
    [[8], [8]]
    """
    plain, _, scope = operation.partition("@")
    if not scope:
        return plain, groups
    strides, ranks = groups
    inside = np.clip(devices_per_node // np.maximum(strides, 1), 1, np.maximum(ranks, 1))
    return plain, np.stack([strides, inside] if scope == "node" else [strides * inside, -(-ranks // inside)])


def _ratios(method: Compression, gradient: SummedGradient, *, scattered: bool) -> list[tuple[str, float]]:
    """Operations of a method with their payload over that of the plain gradient."""
    width, ratios = float(gradient.bytes), []
    for message in method.messages(gradient):
        ratio = float(message.payload) / width
        if scattered and message.operation == "all_gather":
            continue
        operation = "reduce_scatter" if scattered and message.operation == "all_reduce" else _scoped_name(message)
        if ratio > 0:
            ratios.append((operation, ratio))
    return ratios


def scaled(gradient: SummedGradient, elements: float) -> SummedGradient:
    """A gradient of ``elements`` elements; ``gradient`` states figures per element."""
    counts = ("tensors", "matrices", "matrix_elements", "matrix_sides", "dense_elements", "dense_sides")
    return replace(gradient, elements=elements, **{name: getattr(gradient, name) * elements for name in counts})


def coding_kernels(method: Compression, gradient: SummedGradient, elements: float) -> list[Kernel]:
    """The passes of coding; products of factors are counted as arithmetic of these passes."""
    whole = scaled(gradient, elements)
    work = method.encode(whole) + method.decode(whole)
    read, written, flops = (float(figure) for figure in (work.read, work.written, work.flops))
    calls = float(work.launches + work.tensor_calls)
    return [flat_pass("coding", "elementwise", "update", elements, read, written, flops=flops, calls=calls)]


def tensor_calls(method: Compression, gradient: SummedGradient) -> float:
    """Calls of the framework for single tensors that an element of the gradient costs."""
    return float((method.encode(gradient) + method.decode(gradient)).tensor_calls)


def state_bytes(method: Compression, gradient: SummedGradient) -> float:
    """Bytes that a method keeps for an element of the gradient."""
    return float(method.state(gradient))
