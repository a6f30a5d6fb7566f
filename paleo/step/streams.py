"""Overlap of computation with gradient exchange and parameter gathers, and the time after the last backward pass.

A step without a pipeline has two streams. Layer iterations run one after another. Gradients are sent in buckets as soon
as the backward pass has filled them, or after that pass. Sharded parameters (ZeRO-3) are gathered before the iteration
that needs them. After its last pass a stage, with or without a pipeline, waits for the exposed gradient sums, updates
its parameters and gathers sharded states.

Arrays have the stages along their first axis (their chunks along the second, if these are distinguished) and the
layouts or the cases along the last. A section is a run of equal layers, a case one configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.schedules.base import Numeric, PassTimes, distinct_values
from paleo.step.gradient_exchange import (
    bucket_count,
    exposed_gradient_exchange_time,
    exposed_parameter_gather_time,
    order_gradient_exchanges,
)
from paleo.step.layouts import Layouts, cached
from paleo.step.memory import HOST_GRADIENT_SUM_BYTES, StageAssignment, host_update_time
from paleo.step.section_times import LayerTimes, section_field_values, sum_per_stage, with_contention

if TYPE_CHECKING:
    from paleo.lowering.program import Program, Section
    from paleo.parallel.placement import Axes, Mesh
    from paleo.step.configuration_batch import ConfigurationBatch
Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class BucketSettings:
    """Settings of the gradient exchange: bucket size, overlap with the backward pass, and sharding of parameters.

    If ``overlaps_backward``, buckets of at least ``min_bucket_bytes`` bytes are sent during the backward pass,
    otherwise all after it. If ``shards_parameters`` (ZeRO-3), parameters are gathered before each layer, forward and
    backward. If ``scatters_every_microbatch`` (ZeRO-2 and 3), gradients are sent with every microbatch.
    ``bytes_per_gradient`` are the bytes of a gradient element.
    """

    min_bucket_bytes: float
    bytes_per_gradient: float
    overlaps_backward: bool
    shards_parameters: bool
    scatters_every_microbatch: bool


@dataclass(frozen=True, slots=True)
class LayerIteration:
    """Consecutive layers of one section in one direction (forward or backward); ``layer_count`` is their number.

    ``waits_for_gather`` is True if the layers wait for a gather of the section's parameters. ``buckets`` are (axes,
    bytes) of the gradients that are sent after them.
    """

    section: int
    direction: Direction
    layer_count: int
    waits_for_gather: bool = False
    buckets: tuple[tuple[Axes, float], ...] = ()


def layer_iterations(program: Program, buckets: BucketSettings, *, last: bool) -> list[LayerIteration]:
    """List the layers of one microbatch in the order in which they run, forward and backward.

    Parameters
    ----------
    program : Program
        Kernels and collectives of one rank.
    buckets : BucketSettings
        Settings of the exchange of gradients and sharded parameters.
    last : bool
        True for the last microbatch of a step, which sends gradients (ZeRO-2 and 3: every microbatch does).

    Returns
    -------
    list of LayerIteration
        Layers in order, with the gradients that are sent after each.
    """
    order: list[LayerIteration] = []
    sends = last or buckets.scatters_every_microbatch
    for index, section in enumerate(program.sections):
        gathers = bool(buckets.shards_parameters and section.parameter_count)
        times = section.repeat if gathers else 1
        order += [LayerIteration(index, "forward", section.repeat // times, gathers)] * times
    pending: dict[Axes, float] = {}
    for index, section in reversed(list(enumerate(program.sections))):
        gathers = bool(buckets.shards_parameters and section.parameter_count and section.has_backward)
        sent_apart = (buckets.overlaps_backward or buckets.shards_parameters) and section.gradients and sends
        times = section.repeat if sent_apart or gathers else 1
        for _ in range(times):
            _collect(pending, section, section.repeat // times, buckets.bytes_per_gradient)
            sent = _flush(pending, buckets.min_bucket_bytes) if buckets.overlaps_backward and sends else ()
            order.append(LayerIteration(index, "backward", section.repeat // times, gathers, sent))
    if sends and order:
        end = order[-1]
        remaining = end.buckets + _flush(pending, 0.0)
        order[-1] = LayerIteration(end.section, end.direction, end.layer_count, end.waits_for_gather, remaining)
    return order


def _collect(pending: dict[Axes, float], section: Section, times: int, gradient_bytes: float) -> None:
    for gradient in section.gradients:
        pending[gradient.axes] = pending.get(gradient.axes, 0.0) + gradient.elements * gradient_bytes * times


def _flush(pending: dict[Axes, float], least: float) -> tuple[tuple[Axes, float], ...]:
    """Remove gradient buckets that have reached ``least`` bytes from ``pending``, and return their (axes, bytes)."""
    sent = tuple((axes, size) for axes, size in pending.items() if axes and size > 0 and size >= least)
    for axes, _ in sent:
        pending[axes] = 0.0
    return sent


def simulate_streams(
    order: Iterable[LayerIteration],
    forward: Array,
    backward: Array,
    gather: Array | None,
    buckets: Sequence[Numeric],
    start: Numeric,
    regather: Array | None = None,
) -> tuple[Numeric, Numeric]:
    """Simulate the compute and network streams of one microbatch, and return when both have finished.

    Each stream runs its work in the order in which the work becomes ready. A parameter gather starts once the iteration
    before the last has ended, and its layers wait for it. Gradient buckets are sent after their layers.

    Parameters
    ----------
    order : iterable of LayerIteration
        Layers in the order in which they run.
    forward : ndarray, shape (sections, ...)
        Forward time of one layer of each section [s].
    backward : ndarray, shape (sections, ...)
        Backward time of one layer of each section [s].
    gather : Array, shape (sections, ...), optional
        Time to gather the parameters of a section [s]; None without sharding.
    buckets : sequence of Numeric, shape (iterations, ...)
        Time of the gradient buckets sent after each iteration [s].
    start : Numeric
        Time at which the compute stream is free [s].
    regather : Array, shape (sections, ...), optional
        Time of parameter gathers before the backward pass, if different [s].

    Returns
    -------
    tuple[Numeric, Numeric]
        (end of the compute stream, end of the network stream) [s].
    """
    again = gather if regather is None else regather
    compute, network, issued = start, 0.0 * np.asarray(start), 0.0 * np.asarray(start)
    sent: list[tuple[Numeric, Numeric]] = []
    for iteration, bucket in zip(order, buckets, strict=True):
        gathers = gather if iteration.direction == "forward" else again
        if iteration.waits_for_gather and gathers is not None:
            network = np.maximum(network, issued) + gathers[iteration.section]
            awaited, issued = network, np.asarray(compute)
            network = _network_end(network, sent)
            compute = np.maximum(compute, awaited)
        seconds = (forward if iteration.direction == "forward" else backward)[iteration.section]
        compute = compute + seconds * iteration.layer_count
        if iteration.buckets:
            sent.append((compute, bucket))
    return compute, _network_end(network, sent)


def _network_end(free: Array, waiting: list[tuple[Numeric, Numeric]]) -> Array:
    for ready, seconds in waiting:
        free = np.maximum(free, ready) + seconds
    waiting.clear()
    return free


#: Structure of an order of iterations: section, direction, count, whether they gather, whether gradients are sent after
#: them.
IterationOrderKey = tuple[tuple[int, str, int, bool, bool], ...]
IterationOrder = list[LayerIteration]


class _Cell(NamedTuple):
    """One gradient sum: layout, mesh axes and bytes, and the rows and column of a table of times to which it counts."""

    layout: int
    axes: Axes
    size: float
    rows: list[int]
    column: int


@dataclass(frozen=True, slots=True)
class StreamEndTimes:
    """Results of the simulated compute and network streams of each configuration, arrays of shape (cases,).

    ``end`` is when both have ended [s]. ``communication_time`` is the time of all collectives in the step [s].
    ``contention_share`` is the share of the full slowdown by contention that applies [-].
    """

    end: Array
    communication_time: Array
    contention_share: Array


@dataclass(frozen=True, slots=True)
class ContendedLayerTimes:
    """Layer times of the last and of earlier microbatches, slowed down by overlapping collectives."""

    last_microbatch: LayerTimes
    earlier_microbatches: LayerTimes

    def with_slowdown_share(self, free: LayerTimes, share: Array) -> ContendedLayerTimes:
        """Return the layer times with only a share (0 to 1) of the slowdown by contention.

        Parameters
        ----------
        free : LayerTimes
            Times without contention.
        share : ndarray, shape (cases,)
            Share of the slowdown that remains, 0 to 1.

        Returns
        -------
        ContendedLayerTimes
            Layer times with part of the slowdown [s].
        """
        parts = []
        for slowed in (self.last_microbatch, self.earlier_microbatches):
            forward = free.forward + share * (slowed.forward - free.forward)
            backward = free.backward + share * (slowed.backward - free.backward)
            parts.append(replace(slowed, forward=forward, backward=backward))
        return ContendedLayerTimes(*parts)


def bucket_settings(batch: ConfigurationBatch, layout: int = 0) -> BucketSettings:
    """Return the settings of one layout's gradient exchange: bucket size, overlap and parameter sharding.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.
    layout : int, optional
        Position of the layout in the batch.

    Returns
    -------
    BucketSettings
        Bucket size [byte], overlap and sharding.
    """
    least, width = float(batch.layouts.bucket_bytes[layout]), batch.backend.formats.accumulated_gradient_bytes
    overlaps, shards = batch.overlaps_gradient_exchange, batch.shards_parameters
    return BucketSettings(least, width, overlaps, shards, batch.scatters_every_pass)


@cached(lambda batch: (batch.sharding, batch.overlaps_gradient_exchange))
def stream_end_times(batch: ConfigurationBatch) -> StreamEndTimes:
    """Simulate the compute and network streams of every configuration, for steps without a pipeline.

    Configurations whose layers run in the same order are computed together.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together.

    Returns
    -------
    StreamEndTimes
        Ends of the streams and time of collectives, arrays of shape (cases,) [s].
    """
    orders: dict[IterationOrderKey, list[tuple[int, IterationOrder]]] = {}
    for layout in distinct_values(batch.cases.layout_index):
        shape, order = _order(batch.layouts, layout, bucket_settings(batch, layout))
        orders.setdefault(shape, []).append((layout, order))
    seconds = StreamEndTimes(*np.zeros((3, len(batch))))
    for members in orders.values():
        cases = np.flatnonzero(np.isin(batch.cases.layout_index, [layout for layout, _ in members]))
        walked = _stream_ends(batch, bucket_settings(batch), members, cases)
        seconds.end[cases], seconds.communication_time[cases], seconds.contention_share[cases] = walked
    return seconds


def _order(layouts: Layouts, layout: int, buckets: BucketSettings) -> tuple[IterationOrderKey, IterationOrder]:
    """Return a hashable structure and the layer order of a layout's program, cached for equal programs."""
    program = layouts.programs[layout]

    def order() -> tuple[IterationOrderKey, IterationOrder]:
        layers = layer_iterations(program, buckets, last=True)
        key = [(i.section, i.direction, i.layer_count, i.waits_for_gather, bool(i.buckets)) for i in layers]
        return tuple(key), layers

    return layouts.program_cache.get_or_compute(("order", id(program), buckets), order)


def _stream_ends(
    batch: ConfigurationBatch, buckets: BucketSettings, members: Sequence[tuple[int, IterationOrder]], cases: Index
) -> tuple[Array, Array, Array]:
    """Return (end of the streams [s], time of collectives [s], share of contention [-]), shape (cases,) each.

    ``members`` are (layout, order of its layers) of the configurations ``cases``. A step takes no longer than without
    any overlap. The end of the streams is a maximum of sums, so it is convex in the time lost to contention. The share
    from linear interpolation keeps the step within that limit.
    """
    column = np.zeros(len(batch.layouts), dtype=np.intp)
    column[[layout for layout, _ in members]] = np.arange(len(members))
    member, order = column[batch.cases.layout_index[cases]], members[0][1]
    seconds = gradient_bucket_exchange_times(batch, members)
    sent = [row[member] if row.any() else 0.0 for row in seconds]
    layout = batch.cases.layout_index[cases]
    gather = section_gather_times(batch.layouts)[:, layout] if buckets.shards_parameters else None
    again = section_gather_times(batch.layouts, "again")[:, layout] if buckets.shards_parameters else None
    count = batch.microbatches[cases]
    program = batch.layouts.programs[members[0][0]]
    plain = order if buckets.scatters_every_microbatch else layer_iterations(program, buckets, last=False)

    def ends(times: ContendedLayerTimes) -> Array:
        last, earlier = times.last_microbatch, times.earlier_microbatches
        backward = last.backward_with_transfers + last.weight_gradients
        if buckets.scatters_every_microbatch:
            once = np.maximum(*simulate_streams(order, last.forward_with_transfers, backward, gather, sent, 0.0, again))
        else:
            passes = earlier.forward_with_transfers, earlier.backward_with_transfers + earlier.weight_gradients
            once = np.maximum(*simulate_streams(plain, *passes, None, [0.0] * len(plain), 0.0))
        return np.maximum(
            *simulate_streams(order, last.forward_with_transfers, backward, gather, sent, (count - 1.0) * once, again)
        )

    travelling = seconds.sum(axis=0)[member] + _gathered(order, gather, again)
    limit = _time_without_overlap(batch, cases, travelling, scattered=buckets.scatters_every_microbatch)
    times = contended_layer_times(batch, cases)
    end, share = ends(times), np.ones(len(cases))
    if np.any(end > limit):
        free = ends(ContendedLayerTimes(*(batch.layer_times.select_configurations(cases),) * 2))
        over = (end > limit) & (end > free)
        share = np.clip(np.divide(limit - free, end - free, out=share, where=over), 0.0, 1.0)
        end = ends(times.with_slowdown_share(batch.layer_times.select_configurations(cases), share))
    return end, np.broadcast_to(travelling * (count if buckets.scatters_every_microbatch else 1.0), end.shape), share


def _time_without_overlap(
    batch: ConfigurationBatch, cases: Index, travelling: Array | float, *, scattered: bool
) -> Array:
    """Return the step time without any overlap of computation and communication, an upper bound, (cases,) [s]."""
    times, count = batch.layer_times.select_configurations(cases), batch.microbatches[cases]
    repeat = section_field_values(batch.layouts.programs[0], "repeat")
    computing = repeat @ (times.forward_with_transfers + times.backward_with_transfers + times.weight_gradients)
    return np.asarray(count * computing + travelling * (count if scattered else 1.0))


def _gathered(order: IterationOrder, gather: Array | None, again: Array | None) -> Array | float:
    """Return the time of all parameter gathers of a microbatch (ZeRO-3) [s]."""
    if gather is None or again is None:
        return 0.0
    passes = {"forward": gather, "backward": again}
    return np.asarray(sum(passes[each.direction][each.section] for each in order if each.waits_for_gather))


def contended_layer_times(batch: ConfigurationBatch, cases: Index) -> ContendedLayerTimes:
    """Return the times of layers, slowed down by the collectives that overlap with them (contention).

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.
    cases : Index
        Positions of the configurations.

    Returns
    -------
    ContendedLayerTimes
        Layer times of the last microbatch and of earlier ones [s].
    """
    times, overlap = batch.layer_times.select_configurations(cases), batch.backend.software.overlap
    overlaps = batch.overlaps_gradient_exchange or batch.scatters_every_pass
    if not overlaps or (overlap.sharded and not overlap.contention):
        return ContendedLayerTimes(times, times)
    layout, none = batch.cases.layout_index[cases], np.zeros((1, 1))
    gathers = section_gather_times(batch.layouts)[:, layout] if batch.shards_parameters else none
    again = section_gather_times(batch.layouts, "again")[:, layout] if batch.shards_parameters else none
    exchanged = batch.overlaps_gradient_exchange
    sums = layer_gradient_exchange_times(batch.layouts, batch.zero)[:, layout] if exchanged else none
    slower = with_contention(times, gathers, sums, overlap, again)
    return ContendedLayerTimes(slower, slower if batch.scatters_every_pass else times)


def gradient_bucket_exchange_times(batch: ConfigurationBatch, members: Sequence[tuple[int, IterationOrder]]) -> Array:
    """Return the exchange time of the gradient buckets that are sent after each layer of the backward pass.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.
    members : Sequence[tuple[int, IterationOrder]]
        Position of each layout, and the order of its layers.

    Returns
    -------
    ndarray, shape (iterations, members)
        Time [s].
    """
    columns: dict[int, list[int]] = {}
    for column, (_, order) in enumerate(members):
        columns.setdefault(id(order), []).append(column)
    cells: list[_Cell] = []
    for equal_columns in columns.values():
        sent: dict[tuple[Axes, float], list[int]] = {}
        for number, iteration in enumerate(members[equal_columns[0]][1]):
            for bucket in iteration.buckets:
                sent.setdefault(bucket, []).append(number)
        for column in equal_columns:
            cells += [_Cell(members[column][0], *bucket, rows, column) for bucket, rows in sent.items()]
    return _summed(batch.layouts, batch.zero, cells, (len(members[0][1]), len(members)))


@cached(lambda layouts, zero: (zero > 0,))
def layer_gradient_exchange_times(layouts: Layouts, zero: int) -> Array:
    """Return the gradient-exchange time of one layer of each section (run of equal layers).

    If the bucket rule counts elements, a bucket holds several layers, and each has its share of the bucket's time.
    Otherwise (`docs/limits.md`, contention by buckets) each layer counts as a separate message.

    Parameters
    ----------
    layouts : Layouts
        Parallel layouts.
    zero : int
        ZeRO stage, 0 to 3.

    Returns
    -------
    ndarray, shape (sections, layouts)
        Time [s].
    """
    width, shape = layouts.backend.formats.accumulated_gradient_bytes, (len(layouts.programs[0].sections), len(layouts))
    cells, layers = [], np.ones(shape)
    for layout, program in enumerate(layouts.programs):
        mesh = layouts.meshes[layout]
        travelling = np.array([_exchanged_elements(section, mesh) for section in program.sections]) * width
        if layouts.backend.limits_bucket_elements:
            whole = float(travelling @ [section.repeat for section in program.sections])
            bucket = min(float(layouts.bucket_bytes[layout]), whole)
            layers[:, layout] = np.maximum(1.0, bucket / np.maximum(travelling, 1.0))
        for number, section in enumerate(program.sections):
            for gradient in section.gradients:
                if gradient.axes:
                    size = gradient.elements * width * float(layers[number, layout])
                    cells.append(_Cell(layout, gradient.axes, size, [number], layout))
    return _summed(layouts, zero, cells, shape) / layers


def _exchanged_elements(section: Section, mesh: Mesh) -> float:
    """Count the gradient elements of one layer that are summed over other ranks of a mesh."""
    return sum(gradient.elements for gradient in section.gradients if mesh.group_size(gradient.axes) > 1)


def _summed(layouts: Layouts, zero: int, cells: Sequence[_Cell], shape: tuple[int, int]) -> Array:
    """Compute the times of gradient sums, and add them up in a table of the given ``shape`` [s]."""
    owed: dict[str, list[tuple[_Cell, Axes, float]]] = {}
    for cell in cells:
        exchanged = layouts.exchange_collectives(cell.layout, "gradients", zero, cell.axes, cell.size)
        for operation, axes, payload in exchanged:
            if axes:
                owed.setdefault(operation, []).append((cell, axes, payload))
    table = np.zeros(shape)
    for operation, members in owed.items():
        owing, sizes = [cell.layout for cell, _, _ in members], np.array([payload for *_, payload in members])
        groups = layouts.communication_groups(owing, [axes for _, axes, _ in members])
        seconds = layouts.exchange_collective_times(operation, owing, groups, sizes)
        counts = [len(cell.rows) for cell, _, _ in members]
        places = [row * shape[1] + cell.column for cell, _, _ in members for row in cell.rows]
        np.add.at(table.reshape(-1), places, np.repeat(seconds, counts))
    return table


def section_gather_times(layouts: Layouts, content: Literal["all", "again"] = "all") -> Array:
    """Return the ZeRO-3 parameter all-gather time of one layer of each section (run of equal layers).

    Parameters
    ----------
    layouts : Layouts
        Parallel layouts.
    content : {'all', 'again'}, optional
        ``again`` for the gather before the backward pass.

    Returns
    -------
    ndarray, shape (sections, layouts)
        Time [s].
    """
    content = content if layouts.has_separate_backward_gathers else "all"
    key = "section gathers", content
    return layouts.cache.get_or_compute(key, lambda: section_gather_times_and_bytes(layouts, content)[0])


def section_gather_times_and_bytes(layouts: Layouts, content: Literal["all", "again"] = "all") -> Array:
    """Return time and bytes of the ZeRO-3 parameter all-gather of one layer of each section (run of equal layers).

    Parameters
    ----------
    layouts : Layouts
        Parallel layouts.
    content : {'all', 'again'}, optional
        ``again`` for the gather before the backward pass.

    Returns
    -------
    ndarray, shape (2, sections, layouts)
        Times [s], and bytes.
    """
    sections = len(layouts.programs[0].sections)
    single = np.eye(sections, sections + len(layouts.programs[0].tied_parameters))[None]
    return layouts.exchange_times_and_bytes(single, 1, content, 3, layouts.backend.formats.parameter_bytes)[:, 0]


#: Gradients that are summed after the last pass. ``none`` without a pipeline, where the streams sum them; ``tied`` if
#: all others are scattered after every pass; ``all``.
GradientsSummedLate = Literal["none", "tied", "all"]


@dataclass(frozen=True, slots=True)
class AfterBackwardTimes:
    """Times of communication and optimizer update after the last backward pass, shape (stages, layouts) [s].

    ``always_exposed`` is the part that nothing hides. ``gradient_sums`` (gradient reductions, shape (stages, chunks,
    layouts)) overlap with passes, and ``parameter_gathers`` (parameter all-gathers) with the next forward pass;
    ``gradient_sum_bucket_count`` and ``gather_bucket_count`` are their numbers of buckets. ``total_communication`` is
    all communication, hidden or not. ``has_communication`` is True for layouts that send anything, shape (layouts,).
    """

    always_exposed: Array
    gradient_sums: Array
    gradient_sum_bucket_count: Array
    parameter_gathers: Array
    gather_bucket_count: Array
    total_communication: Array
    has_communication: Mask


def _after_backward_key(
    layouts: Layouts, assignment: StageAssignment, zero: int, *, overlapped: bool, summed: GradientsSummedLate = "all"
) -> tuple[object, ...]:
    placed = assignment.cache_key if overlapped else assignment.stages_cache_key
    return placed, min(zero, 1) + (zero == 3), overlapped, summed


@cached(_after_backward_key)
def layout_times_after_backward(
    layouts: Layouts, assignment: StageAssignment, zero: int, *, overlapped: bool, summed: GradientsSummedLate = "all"
) -> AfterBackwardTimes:
    """Compute the times after the last backward pass: gradient sums, optimizer update, parameter gathers.

    Parameters
    ----------
    layouts : Layouts
        Parallel layouts.
    assignment : StageAssignment
        Assignment of layers to pipeline stages.
    zero : int
        ZeRO stage, 0 to 3.
    overlapped : bool
        True if gradient buckets are sent during the backward pass.
    summed : GradientsSummedLate, optional
        Gradients that are summed after the backward pass: ``all``, ``tied`` or ``none``.

    Returns
    -------
    AfterBackwardTimes
        Times by part [s].
    """
    backend, kinds, rows = layouts.backend, assignment.distinct_stages_and_chunks.stages, assignment.stage_kind
    sizes = layouts.stage_parameter_counts(kinds, trained=True)[rows] * backend.formats.parameter_bytes
    fixed = np.zeros((assignment.stages, len(layouts)))
    gathers, sums = np.zeros_like(fixed), np.zeros((len(fixed), 1, len(layouts)))
    sent, total = sums, fixed
    if zero in (1, 2) and layouts.has_backward:
        gathers = layouts.state_gather_times(assignment)
    if summed != "none":
        fixed = fixed + layouts.tied_gradient_sum_times(assignment)
    if summed == "all":
        sums, sent = layouts.gradient_exchange_times_and_bytes(assignment, zero, chunks=overlapped)
    exchanged = sums.sum(axis=1)
    total, sends = fixed + exchanged + gathers, np.asarray((exchanged + gathers).any(axis=0))
    if not overlapped:
        fixed, sums = fixed + exchanged, np.zeros_like(sums)
    if not (overlapped and backend.software.overlap.gather):
        fixed, gathers = fixed + gathers, np.zeros_like(gathers)
    sum_buckets, gather_buckets = (bucket_count(each, layouts.bucket_bytes) for each in (sent, sizes))
    if not backend.offload.is_offloaded("optimizer"):
        fixed = fixed + layouts.update_times(kinds, sharded=zero > 0)[rows]
    fixed = fixed + layouts.compression_times(kinds)[rows]
    return AfterBackwardTimes(fixed, sums, sum_buckets, gathers, gather_buckets, total, sends)


def time_after_passes(batch: ConfigurationBatch, passes: PassTimes, *, summed: bool = True) -> Array:
    """Return the time from the last pass of each pipeline stage until its parameters are updated and gathered.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.
    passes : PassTimes
        Times of one microbatch through each stage, shape (stages, cases) [s].
    summed : bool, optional
        True to count gradient sums, False for update and gathers only.

    Returns
    -------
    ndarray, shape (stages, cases)
        Time [s].
    """
    # The same as `time_after_passes` without updates on the host.
    following, contention = after_backward_times(batch, summed=summed), batch.backend.software.overlap.contention
    exposed = batch.expand_to_configurations(following.always_exposed)
    if batch.zero == 3 and batch.backend.compression is not None:  # gradients are coded with every microbatch
        kinds, rows = batch.assignment.distinct_stages_and_chunks.stages, batch.assignment.stage_kind
        coded = batch.expand_to_configurations(batch.layouts.compression_times(kinds)[rows])
        exposed = exposed + coded * (batch.microbatches - 1.0)
    if following.parameter_gathers.any():
        exposed += _exposed_overlapped_gathers(batch, following, passes)
    if contention >= 1.0:  # as in `exposed_gradient_exchange_time`: overlap gains nothing
        exposed += batch.expand_to_configurations(following.gradient_sums.sum(axis=1))
    elif following.gradient_sums.any():
        # The gradient sums of a batch in the order of the schedule.
        key = "sends", batch.assignment.cache_key, min(batch.zero, 1) + (batch.zero == 3), batch.schedule.name
        schedule, chunks = batch.schedule, batch.assignment.chunks_per_stage
        sums = following.gradient_sums, following.gradient_sum_bucket_count
        ordered = batch.layouts.cache.get_or_compute(key, lambda: order_gradient_exchanges(*sums, schedule, chunks))
        sends = ordered.select(batch.cases.layout_index)
        exposed += exposed_gradient_exchange_time(sends, schedule, passes, chunks, contention)
    return exposed + _host_updates(batch) if batch.backend.offload.is_offloaded("optimizer") else exposed


def time_after_last_bucket(batch: ConfigurationBatch) -> Array:
    """Return the time after the last gradient bucket (update and gathers), for steps without a pipeline.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ndarray, shape (cases,)
        Time [s].
    """
    forward = sum_per_stage(batch.assignment.layers_per_microbatch, batch.layer_times.forward_with_transfers)
    return np.asarray(time_after_passes(batch, PassTimes(forward, forward, forward), summed=False)[0])


def _exposed_overlapped_gathers(batch: ConfigurationBatch, following: AfterBackwardTimes, passes: PassTimes) -> Array:
    """Return the exposed part of parameter gathers that overlap with the next forward pass, (stages, cases) [s]."""
    following_gathers = following.parameter_gathers, following.gather_bucket_count
    gathers, buckets = map(batch.expand_to_configurations, following_gathers)
    return exposed_parameter_gather_time(gathers, buckets, passes.forward, batch.backend.software.overlap.contention)


def exposed_parameter_gather_times(batch: ConfigurationBatch, passes: PassTimes) -> Array:
    """Return the exposed time to gather updated parameters (ZeRO-1 and 2).

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.
    passes : PassTimes
        Times of one microbatch through each stage, shape (stages, cases) [s].

    Returns
    -------
    ndarray, shape (stages, cases)
        Time [s].
    """
    if batch.zero not in (1, 2) or not batch.has_backward:
        return np.zeros((batch.assignment.stages, len(batch)))
    if batch.overlaps_gradient_exchange and batch.backend.software.overlap.gather:
        return _exposed_overlapped_gathers(batch, after_backward_times(batch), passes)
    return batch.expand_to_configurations(batch.layouts.state_gather_times(batch.assignment))


def update_times(batch: ConfigurationBatch) -> Array:
    """Return the time of the optimizer update on each pipeline stage, on the device or (offloaded) on the host.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.

    Returns
    -------
    ndarray, shape (stages, cases)
        Time [s].
    """
    if batch.backend.offload.is_offloaded("optimizer"):
        return _host_updates(batch)
    kinds, rows = batch.assignment.distinct_stages_and_chunks.stages, batch.assignment.stage_kind
    return batch.expand_to_configurations(batch.layouts.update_times(kinds, sharded=batch.zero > 0)[rows])


def _host_updates(batch: ConfigurationBatch) -> Array:
    """Return the exposed time of an optimizer update on the host (ZeRO-Offload), with clipping, (stages, cases) [s]."""
    layouts, backend, assignment = batch.layouts, batch.backend, batch.assignment
    if not layouts.has_backward:
        return np.zeros((assignment.stages, len(batch)))
    kinds, sharded, rows = assignment.distinct_stages_and_chunks.stages, batch.zero > 0, assignment.stage_kind
    counts = batch.expand_to_configurations(layouts.updated_elements(kinds, sharded=sharded)[rows])
    times = batch.layer_times
    backward = sum_per_stage(assignment.layers_per_microbatch, times.backward_with_transfers + times.weight_gradients)
    update = host_update_time(counts, backward, backend.optimizer, backend.formats, backend.offload)
    # DeepSpeed's stage3.py: unscale_and_clip_grads
    if backend.clip_method == "scaled" and backend.offload.is_offloaded("gradients"):
        update = update + 2.0 * HOST_GRADIENT_SUM_BYTES * counts / backend.offload.host_memory_rate
    return update + batch.expand_to_configurations(layouts.clipping_times(kinds, sharded=sharded)[rows])


def after_backward_times(batch: ConfigurationBatch, *, summed: bool = True) -> AfterBackwardTimes:
    """Return the times of communication and update after the last backward pass, for the layouts of a batch.

    Scattered gradients (ZeRO-2 and 3) were sent with every microbatch; only those of tied parameters follow.

    Parameters
    ----------
    batch : ConfigurationBatch
        Configurations that are computed together, as arrays.
    summed : bool, optional
        True to count gradient sums, False for update and gathers only.

    Returns
    -------
    AfterBackwardTimes
        Times by part, shape (stages, layouts) [s].
    """
    scattered = batch.scatters_every_pass and batch.assignment.stages > 1
    how: GradientsSummedLate = "none" if not summed else "tied" if scattered else "all"
    return layout_times_after_backward(
        batch.layouts, batch.assignment, batch.zero, overlapped=batch.overlaps_gradient_exchange, summed=how
    )
