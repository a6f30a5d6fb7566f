"""The exchange of gradients and states between replicas, its exposed time, and compressed gradients.

*Collectives*: which collectives sum the gradients of a stage and gather its parameters, over which axes, and how many
elements of each a rank owns.

*Exposed time*: sums of gradients overlap with the last passes, gathers of updated parameters with the next first pass.
A stage that overlaps starts to send a chunk's gradients inside the last pass that computes them, and continues during
the passes of its other chunks. Only sends that remain when its last pass ends are exposed.

*Compressed gradients*: the messages of a method replace the sums of gradients, its coding follows the last backward
pass, and its state is stored with the optimizer's. Messages are counted for the whole gradient of a rank and divided
among its parts in proportion to their elements, so that their sum is right. Coding occupies the compute stream and
overlaps with nothing.

All functions are pure and broadcast over arrays. Stages are the first axis, their chunks the second if there are any,
configurations the last. A section is a run of equal layers; a tie is a parameter that two layers share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.operations.base import Kernel, elementwise_kernel
from paleo.parallel.placement import Axes, Mesh

if TYPE_CHECKING:
    from paleo.compression.base import CompressedCollective, Compression, SummedGradient
    from paleo.lowering.program import Program
    from paleo.schedules.base import Numeric, PassTimes, Schedule

Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
Index = npt.NDArray[np.intp]
NumberOrArray = TypeVar("NumberOrArray", float, Array)


def gradient_elements_by_axes(program: Program, mesh: Mesh, copies: int) -> dict[Axes, Array]:
    """Count the gradient elements that one rank computes, by the mesh axes over which they are summed.

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.
    mesh : Mesh
        Parallel degrees of the mesh axes.
    copies : int
        Replicas of the network in one pipeline: 2 for bidirectional schedules, else 1.

    Returns
    -------
    dict of Axes to Array
        Array for each set of mesh axes. Its first entries are the gradient elements of one layer of each section (run
        of equal layers), the following ones those of each tied parameter.
    """
    owed = [
        (number, tuple([axis for axis in axes if mesh.degree(axis) > 1]), elements)
        for number, axes, elements in _gradients(program)
    ]
    return _by_axes(program, owed, copies)


def gathered_elements_by_axes(program: Program, mesh: Mesh, copies: int, *, frozen: bool) -> dict[Axes, Array]:
    """Count the parameter elements that a rank all-gathers from ranks that share optimizer states, by mesh axes.

    Experts are shared by fewer ranks.

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.
    mesh : Mesh
        Parallel degrees of the mesh axes.
    copies : int
        Replicas of the network in one pipeline: 2 for bidirectional schedules, else 1.
    frozen : bool
        True to count parameters that are not trained, too.

    Returns
    -------
    dict of Axes to Array
        Array for each set of mesh axes. Its first entries are the gradient elements of one layer of each section (run
        of equal layers), the following ones those of each tied parameter.
    """
    gathered = list(_states(program, mesh))
    if frozen:
        counts = [section.parameter_count - section.trained_parameter_count for section in program.sections]
        counts += [0.0 if tie.trained else tie.elements for tie in program.tied_parameters]
        gathered += [(number, mesh.zero_shard_axes, count) for number, count in enumerate(counts)]
    return _by_axes(program, [part for part in gathered if part[2]], copies)


def zero_owned_elements(program: Program, mesh: Mesh, copies: int) -> Array:
    """Count the trained elements whose optimizer states one rank owns if ZeRO shards them.

    Experts have fewer replicas, so that a rank owns more of their states.

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.
    mesh : Mesh
        Parallel degrees of the mesh axes.
    copies : int
        Replicas of the network in one pipeline: 2 for bidirectional schedules, else 1.

    Returns
    -------
    ndarray, shape (sections and ties,)
        Elements of one layer of each section, then of each tied parameter.
    """
    owned = np.zeros(len(program.sections) + len(program.tied_parameters))
    for number, axes, elements in _states(program, mesh):
        owned[number] += elements / (mesh.group_size(axes) * copies)
    return owned


def _gradients(program: Program) -> list[tuple[int, Axes, float]]:
    """List all gradients of a program as (index of section or tied parameter, axes of the sum, elements).

    Tied parameters are numbered after the sections.
    """
    sections, ties = enumerate(program.sections), enumerate(program.tied_parameters, len(program.sections))
    gradients = [(number, part.axes, part.elements) for number, section in sections for part in section.gradients]
    return gradients + [(number, tie.axes, tie.elements) for number, tie in ties if tie.trained]


def _states(program: Program, mesh: Mesh) -> Iterator[tuple[int, Axes, float]]:
    """Yield all optimizer states as (index of section or tied parameter, axes of ZeRO sharding, elements)."""
    shared = mesh.zero_shard_axes
    for number, axes, elements in _gradients(program):
        yield number, tuple([axis for axis in shared if axis in axes]), elements


def _by_axes(program: Program, owed: Sequence[tuple[int, Axes, float]], copies: int) -> dict[Axes, Array]:
    """Sum the elements of each section and tied parameter by mesh axes.

    Elements without axes are left out unless ``copies`` is 2.
    """
    by_axes: dict[Axes, Array] = {}
    for number, axes, elements in owed:
        if axes or copies > 1:
            by_axes.setdefault(axes, np.zeros(len(program.sections) + len(program.tied_parameters)))[number] += elements
    return by_axes


def mean_sharding_ranks(trained: Array, owned: Array, ranks: Numeric) -> Array:
    """Return the mean number of ranks over which ZeRO shards a trained parameter.

    Parameters
    ----------
    trained : ndarray, shape (...)
        Number of trained parameters.
    owned : ndarray, shape (...)
        Number of trained parameters whose shards one rank owns.
    ranks : Numeric
        Number of ranks to return where the rank owns no parameters.

    Returns
    -------
    ndarray, shape (...)
        ``trained`` / ``owned``.
    """
    return np.divide(trained, owned, out=np.zeros_like(owned) + ranks, where=owned > 0)


def replica_groups(mesh: Mesh, axes: Axes, copies: int) -> list[tuple[IntArray, IntArray]]:
    """List the groups of ranks (stride, size) that reduce the gradients of each stage; the slowest sets the time.

    Two replicas of the network make the group twice as large. The gradients are then also summed between the two stages
    that hold the same piece, so a group of those two is listed as well.

    Parameters
    ----------
    mesh : Mesh
        Parallel degrees of the mesh axes.
    axes : Axes
        Axes over which the gradients are summed.
    copies : int
        Replicas of the network in one pipeline: 2 for bidirectional schedules, else 1.

    Returns
    -------
    list[tuple[IntArray, IntArray]]
        Stride and ranks of each group, arrays of shape (stages,).
    """
    stages = mesh.degree("pp")
    groups = [(np.full(stages, mesh.stride(axes)), np.full(stages, mesh.group_size(axes) * copies))] if axes else []
    if copies > 1:
        distance = np.abs(stages - 1 - 2 * np.arange(stages))
        groups.append((distance * mesh.stride(("pp",)), np.full(stages, copies)))
    return groups


#: Axis of tensor parallelism.
_TENSOR_AXIS = "tp"


def gradient_exchange_collectives(
    zero: int, axes: Axes, size: NumberOrArray, mesh: Mesh
) -> tuple[tuple[str, Axes, NumberOrArray], ...]:
    """List the collectives that sum gradients over data-parallel replicas, under a ZeRO stage.

    If a shard group is smaller than the replicas, its ranks first reduce-scatter, and each shard is then summed over
    the groups (HSDP). Gradients of parameters that every tensor-parallel rank holds whole have a separate all-reduce
    over tp, as in Megatron-Core's finalize_model_grads.py.

    Parameters
    ----------
    zero : int
        ZeRO stage, 0 to 3.
    axes : Axes
        Axes over which the gradients are summed.
    size : array_like
        Gradient bytes (or elements) of one rank.
    mesh : Mesh
        Parallel degrees of the mesh axes.

    Returns
    -------
    tuple[tuple[str, Axes, NumberOrArray], ...]
        Operation, axes and payload of each collective.

    References
    ----------
    Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2 (HSDP).
    """
    replicas = tuple(axis for axis in axes if axis != _TENSOR_AXIS)
    if replicas == axes:
        return _over_replicas(zero, axes, size, mesh)
    beside = (("all_reduce", (_TENSOR_AXIS,), size),)
    return _over_replicas(zero, replicas, size, mesh) + beside if replicas else beside


def _over_replicas(
    zero: int, axes: Axes, size: NumberOrArray, mesh: Mesh
) -> tuple[tuple[str, Axes, NumberOrArray], ...]:
    if not zero or mesh.degree("shard") == 1 or "shard" not in axes:
        return (("reduce_scatter" if zero else "all_reduce", axes, size),)
    shared = tuple(axis for axis in axes if axis in mesh.zero_shard_axes)
    across_shards = tuple(axis for axis in axes if axis not in shared)
    return ("reduce_scatter", shared, size), ("all_reduce", across_shards, size / mesh.group_size(shared))


@dataclass(frozen=True, slots=True)
class OrderedGradientExchanges:
    """Gradient exchanges of each stage's chunks in the order of their start; shape (stages, sends, …).

    The fields determine when a stage's gradient exchange ends.

    Attributes
    ----------
    later_input_gradient_passes, later_weight_gradient_passes : ndarray
        Passes of input gradients and of weight gradients that the stage runs after the chunk's last gradient.
    share_after_first_bucket : ndarray
        Share of a chunk's last gradient pass that comes after its first bucket is full [-].
    time_from_first_bucket, time_from_last_bucket : ndarray
        Time to send from the chunk's first bucket on, and from its last bucket on, with all later chunks [s].
    total_send_time : ndarray, shape (stages, …)
        Time to send all gradients of the stage [s].
    """

    later_input_gradient_passes: Array
    later_weight_gradient_passes: Array
    share_after_first_bucket: Array
    time_from_first_bucket: Array
    time_from_last_bucket: Array
    total_send_time: Array

    def select(self, members: Index) -> OrderedGradientExchanges:
        """Select the exchanges of some configurations, along the last axis.

        Parameters
        ----------
        members : Index
            Positions of the configurations on the last axis.

        Returns
        -------
        OrderedGradientExchanges
            Exchanges of the selected configurations.
        """
        names = ("share_after_first_bucket", "time_from_first_bucket", "time_from_last_bucket", "total_send_time")
        return replace(self, **{name: np.take(getattr(self, name), members, axis=-1) for name in names})


def order_gradient_exchanges(
    seconds: Array, buckets: Array, schedule: Schedule, chunks: int
) -> OrderedGradientExchanges:
    """Order the gradient exchanges of each stage's model chunks by the end of their last gradient pass.

    Among equal chunks only the first and the last can determine the end, so those between are left out.

    Parameters
    ----------
    seconds : ndarray, shape (stages, chunks, ...)
        Time to send the gradients of each chunk [s].
    buckets : ndarray, shape (stages, chunks, ...)
        Number of buckets of each chunk.
    schedule : Schedule
        Pipeline schedule.
    chunks : int
        Number of model chunks of a stage.

    Returns
    -------
    OrderedGradientExchanges
        Exchanges in the order of their start.
    """
    stages, pieces = seconds.shape[:2]
    stage = np.arange(float(stages))
    after = (schedule.passes_after_last_gradient(stage, stages, chunk, chunks) for chunk in range(pieces))
    counts = [[stage * 0.0 + n for n in of_chunk] for of_chunk in after]
    follow = np.array(counts).transpose(2, 0, 1)
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
    return OrderedGradientExchanges(inputs, weights, 1.0 - 1.0 / count, ordered + later, ordered / count + later, total)


def _corners(follow: Array, seconds: Array, buckets: Array) -> list[int]:
    """List the chunks whose gradient exchange can end last: first, last, or different from a neighbour on some stage.

    The ends of all other chunks are interpolated between two of these, so they cannot be the largest.
    """
    figures = np.concatenate([each.reshape(*each.shape[:2], -1) for each in (seconds, buckets)], axis=2)
    equal_neighbours = (figures[:, 1:] == figures[:, :-1]).all(axis=(0, 2))
    even = (np.diff(follow, 2, axis=1) == 0.0).all(axis=(0, 2))
    inner = {place + 1 for place in np.flatnonzero(equal_neighbours[1:] & equal_neighbours[:-1] & even).tolist()}
    return [place for place in range(seconds.shape[1]) if place not in inner]


def exposed_gradient_exchange_time(
    sends: OrderedGradientExchanges, schedule: Schedule, passes: PassTimes, chunks: int, contention: float
) -> Array:
    """Compute the exposed time of the gradient exchange after each stage's last pass.

    Parameters
    ----------
    sends : OrderedGradientExchanges
        Exchanges of the chunks, from `order_gradient_exchanges`.
    schedule : Schedule
        Pipeline schedule.
    passes : PassTimes
        Time of the passes of each stage [s].
    chunks : int
        Number of model chunks of a stage.
    contention : float
        Seconds that the passes lose for each second of overlapping communication.

    Returns
    -------
    ndarray, shape (stages, ...)
        Time [s].
    """
    if contention >= 1.0 or not sends.total_send_time.any():
        return sends.total_send_time
    back, weights = passes.backward / chunks, passes.weight_gradients / chunks
    gradients = weights if schedule.splits_backward else back + weights
    exposed = np.zeros(np.broadcast_shapes(back.shape, sends.total_send_time.shape))
    for k in range(sends.share_after_first_bucket.shape[1]):
        after = sends.later_input_gradient_passes[:, k] * back + sends.later_weight_gradient_passes[:, k] * weights
        first = sends.time_from_first_bucket[:, k] - gradients * sends.share_after_first_bucket[:, k]
        finish = np.maximum(first, sends.time_from_last_bucket[:, k]) - after
        np.maximum(exposed, finish, out=exposed)
    total = sends.total_send_time
    return np.asarray(np.minimum(total, exposed + contention * np.maximum(total - exposed, 0.0)))


def exposed_parameter_gather_time(seconds: Array, buckets: Array, forward: Array, contention: float) -> Array:
    """Return the exposed time of parameter gathers that overlap with the next step's first forward pass.

    At least the first bucket is exposed.

    Parameters
    ----------
    seconds : ndarray, shape (...)
        Time of all gathers [s].
    buckets : ndarray, shape (...)
        Number of buckets.
    forward : ndarray, shape (...)
        Time of the forward pass [s].
    contention : float
        Seconds that the pass loses for each second of overlapping communication.

    Returns
    -------
    ndarray, shape (...)
        Time [s].
    """
    exposed = np.maximum(seconds / buckets, seconds - forward * (1.0 - 1.0 / buckets))
    return np.asarray(np.minimum(seconds, exposed + contention * (seconds - exposed)))


def bucket_count(size: Numeric, bucket: Numeric) -> Array:
    """Compute the number of communication buckets that hold some bytes, at least 1.

    Parameters
    ----------
    size : Numeric
        Bytes.
    bucket : Numeric
        Bytes of one bucket.

    Returns
    -------
    ndarray, shape (...)
        Number of buckets.
    """
    return np.maximum(1.0, np.ceil(np.asarray(size) / np.maximum(bucket, 1.0)))


#: A required collective: operation, axes, bytes or elements.
CollectivePayload = tuple[str, Axes, NumberOrArray]


#: Message for a compression of sharded parameters without ZeRO-3.
COMPRESSION_NEEDS_ZERO3_MESSAGE = "it compresses the gathers of sharded parameters; state --strategy zero=3"


def parse_gradient_compression(text: str | None, *, zero: int | None, forward_only: bool) -> Compression | None:
    """Parse the gradient compression that a run names, and check that the ZeRO stage suits it.

    Parameters
    ----------
    text : str, optional
        Name of the method with arguments; None for no compression.
    zero : int, optional
        ZeRO stage; None in a search, which tries several.
    forward_only : bool
        True for inference.

    Returns
    -------
    Compression, optional
        The method; None without compression.

    Raises
    ------
    PlanError
        If the method does not suit the ZeRO stage.
    """
    if text is None:
        return None
    from paleo.compression.base import parse_compression

    method = parse_compression(text)
    if method.replaces_zero3_collectives and zero not in (None, 3):
        raise PlanError(f"compress {text}: {COMPRESSION_NEEDS_ZERO3_MESSAGE}")
    if zero == 3 and not (method.sums_without_decoding or method.replaces_zero3_collectives or forward_only):
        reason = "with zero=3 gradients are scattered as they come, so only sums in another format do"
        raise PlanError(f"compress {text}: {reason}")
    return None if forward_only else method


@dataclass(slots=True)
class _Matrices:
    """Running sums over the weight matrices of a program, for compression of gradients.

    ``summed`` adds up elements times the rows that the product of the weight gradient sums over.
    """

    number: float = 0.0
    elements: float = 0.0
    summed_side_lengths: float = 0.0
    summed: float = 0.0

    def add(self, rows: float, columns: float, summed: float, count: float) -> None:
        """Add weight matrices of equal shape to the sums.

        Parameters
        ----------
        rows, columns : float
            Sides of each matrix [elements].
        summed : float
            Rows that the product of the weight gradient sums over, such as the tokens of a microbatch.
        count : float
            Number of matrices.
        """
        self.number += count
        self.elements += rows * columns * count
        self.summed_side_lengths += (rows + columns) * count
        self.summed += rows * columns * summed * count


def gradient_sizes_per_element(
    program: Program, ranks: float, width: float, ranks_per_node: float = 1.0
) -> SummedGradient:
    """Return the sizes of a rank's gradient (tensors, matrices, sides) per gradient element, for compression methods.

    Matrices are those of the products that compute weight gradients, m by n. The filters of a convolution are one
    matrix of k by c r s.

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.
    ranks : float
        Ranks that sum the gradient.
    width : float
        Bytes of a gradient element.
    ranks_per_node : float, optional
        Ranks of the group within one node.

    Returns
    -------
    SummedGradient
        Numbers of tensors, matrices, … per gradient element.
    """
    from paleo.compression.base import SummedGradient

    elements, tensors, products, filters = 0.0, 0.0, _Matrices(), _Matrices()
    for section in program.sections:
        elements += section.trained_parameter_count * section.repeat
        tensors += section.trained_tensor_count * section.repeat
        for counted in section.kernels:
            shape, count = counted.kernel.shape, counted.repetitions * section.repeat
            if counted.kernel.phase != "backward_weight":
                continue
            if counted.kernel.family == "gemm":
                products.add(shape["m"], shape["n"], shape["k"], shape.get("batch", 1.0) * count)
            elif counted.kernel.family == "conv":
                groups = shape.get("groups", 1.0)
                window = math.prod(size for name, size in shape.items() if name.startswith("kernel_"))
                filters.add(shape["k"], shape["c"] / groups * window, 1.0, count)
    whole, matrices = max(elements, 1.0), products.elements + filters.elements
    share = min(1.0, elements / max(matrices, 1.0)) / whole
    return SummedGradient(
        elements=1.0, tensors=tensors / whole, ranks=ranks, element_bytes=width, ranks_per_node=ranks_per_node,
        fully_connected_samples_per_rank=products.summed / max(products.elements, 1.0),
        matrices=(products.number + filters.number) / whole,
        matrix_elements=matrices * share,
        matrix_side_sums=(products.summed_side_lengths + filters.summed_side_lengths) * share,
        fully_connected_elements=products.elements * share,
        fully_connected_side_sums=products.summed_side_lengths * share,
    )  # fmt: skip


def compressed_collectives(
    method: Compression, gradient: SummedGradient, owed: Sequence[CollectivePayload[NumberOrArray]]
) -> tuple[CollectivePayload[NumberOrArray], ...]:
    """Replace the collectives that sum a gradient by those of its compressed form.

    Parameters
    ----------
    method : Compression
        Gradient compression method.
    gradient : SummedGradient
        Sizes per gradient element, from `gradient_sizes_per_element`.
    owed : Sequence[CollectivePayload[NumberOrArray]]
        (operation, axes, payload) of each uncompressed collective.

    Returns
    -------
    tuple[CollectivePayload[NumberOrArray], ...]
        (operation, axes, payload) of each collective that replaces them, payload in the unit of the input.
    """
    compressed: list[CollectivePayload[NumberOrArray]] = []
    for plain, axes, size in owed:
        stays = (method.replaces_zero3_collectives and plain == "all_reduce") or axes == (_TENSOR_AXIS,)
        parts = [(plain, 1.0)] if stays else _ratios(method, gradient, scattered=plain == "reduce_scatter")
        compressed += [(operation, axes, size * ratio) for operation, ratio in parts]
    return tuple(compressed)


def compressed_parameter_gather(
    method: Compression, gradient: SummedGradient, width: float, axes: Axes, size: NumberOrArray, *, again: bool
) -> tuple[CollectivePayload[NumberOrArray], ...]:
    """Return the all-gather of sharded parameters (ZeRO-3) in the compressed format of a method.

    Parameters
    ----------
    method : Compression
        Gradient compression method.
    gradient : SummedGradient
        Sizes per gradient element, from `gradient_sizes_per_element`.
    width : float
        Bytes of a parameter.
    axes : Axes
        Axes over which parameters are sharded.
    size : array_like
        Parameter bytes (or elements) that are gathered.
    again : bool
        True for the gather before the backward pass, False for the one before the forward pass.

    Returns
    -------
    tuple[CollectivePayload[NumberOrArray], ...]
        One (operation, axes, payload), payload in the unit of ``size``.
    """
    message = method.collectives(gradient)[int(again)]
    return ((_scoped_name(message), axes, size * (float(message.payload) / width)),)


def _scoped_name(message: CompressedCollective) -> str:
    return message.operation if message.rank_scope == "all" else f"{message.operation}@{message.rank_scope}"


def collective_scope_groups(operation: str, groups: IntArray, devices_per_node: int) -> tuple[str, IntArray]:
    """Split a collective with a scope, such as ``all_gather@node``, into the plain operation and its rank groups.

    ``@node`` means the ranks of each group inside one node, ``@across`` one rank of each node.

    Parameters
    ----------
    operation : str
        Name of the collective.
    groups : IntArray, shape (2, ...)
        Strides and ranks of the whole groups.
    devices_per_node : int
        Number of devices of a node.

    Returns
    -------
    tuple[str, IntArray]
        Operation without scope, and strides and ranks of the groups that take part.

    Examples
    --------
    >>> collective_scope_groups("all_to_all@across", np.array([[1], [64]]), 8)[1].tolist()
    [[8], [8]]
    """
    plain, _, scope = operation.partition("@")
    if not scope:
        return plain, groups
    strides, ranks = groups
    inside = np.clip(devices_per_node // np.maximum(strides, 1), 1, np.maximum(ranks, 1))
    return plain, np.stack([strides, inside] if scope == "node" else [strides * inside, -(-ranks // inside)])


def _ratios(method: Compression, gradient: SummedGradient, *, scattered: bool) -> list[tuple[str, float]]:
    """Return the messages of a compression method as (operation, payload over bytes of the plain gradient).

    If gradients are ``scattered``, all-gathers are left out, and all-reduces become reduce-scatters.
    """
    width, ratios = float(gradient.bytes), []
    for message in method.collectives(gradient):
        ratio = float(message.payload) / width
        if scattered and message.operation == "all_gather":
            continue
        operation = "reduce_scatter" if scattered and message.operation == "all_reduce" else _scoped_name(message)
        if ratio > 0:
            ratios.append((operation, ratio))
    return ratios


def scaled_gradient(gradient: SummedGradient, elements: float) -> SummedGradient:
    """Scale the per-element sizes of a gradient to a number of elements.

    Parameters
    ----------
    gradient : SummedGradient
        Sizes per gradient element, from `gradient_sizes_per_element`.
    elements : float
        Number of elements.

    Returns
    -------
    SummedGradient
        Sizes of the whole gradient.
    """
    counts = ["tensors", "matrices", "matrix_elements", "matrix_side_sums"]
    counts += ["fully_connected_elements", "fully_connected_side_sums"]
    return replace(gradient, elements=elements, **{name: getattr(gradient, name) * elements for name in counts})


def compression_kernels(method: Compression, gradient: SummedGradient, elements: float) -> list[Kernel]:
    """Build the kernel with which a rank compresses and decompresses a gradient.

    Parameters
    ----------
    method : Compression
        Gradient compression method.
    gradient : SummedGradient
        Sizes per gradient element, from `gradient_sizes_per_element`.
    elements : float
        Number of gradient elements.

    Returns
    -------
    list of Kernel
        One memory-bound kernel; FLOP of low-rank products are part of its arithmetic.
    """
    whole = scaled_gradient(gradient, elements)
    work = method.encoding_work(whole) + method.decoding_work(whole)
    read, written, flops = (float(figure) for figure in (work.bytes_read, work.bytes_written, work.flops))
    calls = float(work.launches + work.framework_calls)
    return [elementwise_kernel("coding", "elementwise", "update", elements, read, written, flops=flops, calls=calls)]


def framework_calls_per_gradient_element(method: Compression, gradient: SummedGradient) -> float:
    """Count the framework calls on single tensors that compression needs, per gradient element.

    Parameters
    ----------
    method : Compression
        Gradient compression method.
    gradient : SummedGradient
        Sizes per gradient element, from `gradient_sizes_per_element`.

    Returns
    -------
    float
        Calls per element.
    """
    return float((method.encoding_work(gradient) + method.decoding_work(gradient)).framework_calls)


def compression_state_bytes(method: Compression, gradient: SummedGradient) -> float:
    """Return the memory that a compression method keeps (such as error feedback), per gradient element.

    Parameters
    ----------
    method : Compression
        Gradient compression method.
    gradient : SummedGradient
        Sizes per gradient element, from `gradient_sizes_per_element`.

    Returns
    -------
    float
        Bytes per element.
    """
    return float(method.state_bytes(gradient))
