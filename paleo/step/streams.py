"""Computation, and what runs beside and after it: buckets of gradients, gathers of parameters, the update.

A step without a pipeline is two streams. Layer iterations follow one another; gradients go out in buckets as soon as
the backward pass has filled them, or after it; sharded parameters (ZeRO-3) are gathered ahead of the iteration that
needs them. After its last pass a stage, with or without a pipeline, waits for sums of gradients that are not hidden,
updates its parameters and gathers sharded states.

Arrays have the stages along their first axis (their chunks along the second, where they are told apart) and the layouts
or the cases along the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.schedules.base import Passes
from paleo.step.exchange import bucket_count, exposed_gather, exposed_sends, in_order
from paleo.step.memory import SUM_BYTES, host_update
from paleo.step.section_times import contended, per_stage

if TYPE_CHECKING:
    from paleo.lowering.program import Program, Section
    from paleo.parallel.placement import Axes
    from paleo.schedules.base import Numeric
    from paleo.step.batch import Batch
    from paleo.step.exchange import Sends
    from paleo.step.layouts import Layouts
    from paleo.step.memory import Assignment
    from paleo.step.section_times import LayerTimes

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Buckets:
    """How gradients and sharded parameters travel.

    ``overlapped`` starts buckets of ``least`` bytes inside backward, else all go out after it. ``sharded`` parameters
    (ZeRO-3) are gathered before each layer iteration, forward and backward; ``scattered`` gradients are sent with every
    microbatch (ZeRO-2 and 3).
    """

    least: float
    gradient_bytes: float
    overlapped: bool
    sharded: bool
    scattered: bool


@dataclass(frozen=True, slots=True)
class LayerIteration:
    """``count`` iterations of a section in one direction, as one stretch. ``gathers``: they wait for the section's
    parameters; ``buckets``: axes and bytes of the gradients that go out after them."""

    section: int
    direction: Direction
    count: int
    gathers: bool = False
    buckets: tuple[tuple[Axes, float], ...] = ()


def iterations(program: Program, buckets: Buckets, *, last: bool) -> list[LayerIteration]:
    """Iterations of forward and backward of one microbatch; gradients are sent with the ``last`` microbatch, or with
    each if they are scattered."""
    order: list[LayerIteration] = []
    sends = last or buckets.scattered
    for index, section in enumerate(program.sections):
        gathers = bool(buckets.sharded and section.parameters)
        times = section.repeat if gathers else 1
        order += [LayerIteration(index, "forward", section.repeat // times, gathers)] * times
    pending: dict[Axes, float] = {}
    for index, section in reversed(list(enumerate(program.sections))):
        gathers = bool(buckets.sharded and section.parameters and section.has_backward)
        sent_apart = (buckets.overlapped or buckets.sharded) and section.gradients and sends
        times = section.repeat if sent_apart or gathers else 1
        for _ in range(times):
            _collect(pending, section, section.repeat // times, buckets.gradient_bytes)
            sent = _flush(pending, buckets.least) if buckets.overlapped and sends else ()
            order.append(LayerIteration(index, "backward", section.repeat // times, gathers, sent))
    if sends and order:
        end = order[-1]
        remaining = end.buckets + _flush(pending, 0.0)
        order[-1] = LayerIteration(end.section, end.direction, end.count, end.gathers, remaining)
    return order


def _collect(pending: dict[Axes, float], section: Section, times: int, gradient_bytes: float) -> None:
    for gradient in section.gradients:
        pending[gradient.axes] = pending.get(gradient.axes, 0.0) + gradient.elements * gradient_bytes * times


def _flush(pending: dict[Axes, float], least: float) -> tuple[tuple[Axes, float], ...]:
    """Takes out of ``pending`` the gradients of each set of axes that have gathered to ``least`` bytes or more."""
    sent = tuple((axes, size) for axes, size in pending.items() if axes and size > 0 and size >= least)
    for axes, _ in sent:
        pending[axes] = 0.0
    return sent


def walk(
    order: Iterable[LayerIteration],
    forward: Array,
    backward: Array,
    gather: Array | None,
    buckets: Sequence[Numeric],
    start: Numeric,
    regather: Array | None = None,
) -> tuple[Numeric, Numeric]:
    """When the computing and the network stream have done one pass [s]; the computing one is free from ``start`` on.

    Each stream is served in the order in which its work becomes ready. A gather starts once the iteration before the
    last has ended, and its own iteration waits for it; buckets go out after their iteration. ``forward``, ``backward``
    and ``gather`` are seconds by section, ``buckets`` by iteration; all broadcast with ``start``. ``regather``: gathers
    before the backward pass, where they differ."""
    again = gather if regather is None else regather
    compute, network, issued = start, 0.0 * np.asarray(start), 0.0 * np.asarray(start)
    sent: list[tuple[Numeric, Numeric]] = []
    for iteration, bucket in zip(order, buckets, strict=True):
        gathers = gather if iteration.direction == "forward" else again
        if iteration.gathers and gathers is not None:
            network = np.maximum(network, issued) + gathers[iteration.section]
            awaited, issued = network, np.asarray(compute)
            network = _served(network, sent)
            compute = np.maximum(compute, awaited)
        seconds = (forward if iteration.direction == "forward" else backward)[iteration.section]
        compute = compute + seconds * iteration.count
        if iteration.buckets:
            sent.append((compute, bucket))
    return compute, _served(network, sent)


def _served(free: Array, waiting: list[tuple[Numeric, Numeric]]) -> Array:
    for ready, seconds in waiting:
        free = np.maximum(free, ready) + seconds
    waiting.clear()
    return free


#: How iterations follow one another: section, direction, count, whether they gather, whether gradients go out after
#: them.
Shape = tuple[tuple[int, str, int, bool, bool], ...]
Order = list[LayerIteration]


class Cell(NamedTuple):
    """Gradients of ``size`` bytes that a layout sums over axes, and the rows and the column of a table where their
    seconds belong."""

    layout: int
    axes: Axes
    size: float
    rows: list[int]
    column: int


@dataclass(frozen=True, slots=True)
class StreamSeconds:
    """When the gradients of each case have travelled, before the update, and seconds of what travels during the last
    microbatch: (cases,) each."""

    end: Array
    communication: Array


@dataclass(frozen=True, slots=True)
class Contended:
    """Iterations of the last microbatch and of earlier ones, slowed by overlapping collectives."""

    last: LayerTimes
    earlier: LayerTimes


def buckets_of(batch: Batch) -> Buckets:
    """How the gradients and parameters of a batch travel."""
    backend = batch.backend
    return Buckets(backend.run.bucket, backend.formats.summed, batch.overlapped, batch.sharded, batch.scattered)


def stream_seconds(batch: Batch) -> StreamSeconds:
    """The streams of every case; those whose iterations follow one another alike are walked together."""
    return batch.shared.once(("streams", batch.sharding, batch.overlapped), lambda: _stream_seconds(batch))


def _stream_seconds(batch: Batch) -> StreamSeconds:
    orders: dict[Shape, list[tuple[int, Order]]] = {}
    buckets = buckets_of(batch)
    for layout in np.unique(batch.cases.layout).tolist():
        shape, order = _order(batch.layouts, layout, buckets)
        orders.setdefault(shape, []).append((layout, order))
    seconds = StreamSeconds(np.zeros(len(batch)), np.zeros(len(batch)))
    for members in orders.values():
        cases = np.flatnonzero(np.isin(batch.cases.layout, [layout for layout, _ in members]))
        seconds.end[cases], seconds.communication[cases] = _walked(batch, buckets, members, cases)
    return seconds


def _order(layouts: Layouts, layout: int, buckets: Buckets) -> tuple[Shape, Order]:
    """The iterations of a layout's program, and in which way they follow one another; many layouts share a program."""
    program = layouts.programs[layout]

    def order() -> tuple[Shape, Order]:
        order_ = iterations(program, buckets, last=True)
        return tuple((i.section, i.direction, i.count, i.gathers, bool(i.buckets)) for i in order_), order_

    return layouts.shared.once(("order", id(program), buckets), order)


def _walked(batch: Batch, buckets: Buckets, members: Sequence[tuple[int, Order]], cases: Index) -> tuple[Array, Array]:
    """End of the streams and seconds of what travels in the last microbatch, of the given ``cases``, (cases,) each;
    ``members``: their layouts."""
    column = np.zeros(len(batch.layouts), dtype=np.intp)
    column[[layout for layout, _ in members]] = np.arange(len(members))
    member, order = column[batch.cases.layout[cases]], members[0][1]
    seconds = bucket_seconds(batch, members)
    sent = [row[member] if row.any() else 0.0 for row in seconds]
    layout = batch.cases.layout[cases]
    gather = section_gathers(batch.layouts)[:, layout] if buckets.sharded else None
    again = section_gathers(batch.layouts, "again")[:, layout] if buckets.sharded else None
    times = contended_times(batch, cases)
    last, count = times.last, batch.microbatches[cases]
    backward = last.backwards + last.weights
    if buckets.scattered:
        once = np.maximum(*walk(order, last.forwards, backward, gather, sent, 0.0, again))
    else:
        program, earlier = batch.layouts.programs[members[0][0]], times.earlier
        plain = iterations(program, buckets, last=False)
        ends = walk(plain, earlier.forwards, earlier.backwards + earlier.weights, None, [0.0] * len(plain), 0.0)
        once = np.maximum(*ends)
    end = np.maximum(*walk(order, last.forwards, backward, gather, sent, (count - 1.0) * once, again))
    return end, seconds.sum(axis=0)[member] + _gathered(order, gather, again)


def _gathered(order: Order, gather: Array | None, again: Array | None) -> Array | float:
    """Seconds of all gathers of a microbatch."""
    if gather is None or again is None:
        return 0.0
    passes = {"forward": gather, "backward": again}
    return np.asarray(sum(passes[each.direction][each.section] for each in order if each.gathers))


def contended_times(batch: Batch, cases: Index) -> Contended:
    """Times of layers of some cases beside the collectives that overlap with them."""
    times, overlap = batch.times.of(cases), batch.backend.software.overlap
    if (overlap.sharded and not overlap.contention) or not (batch.overlapped or batch.scattered):
        return Contended(times, times)
    layout = batch.cases.layout[cases]
    gathers = section_gathers(batch.layouts)[:, layout] if batch.sharded else np.zeros((1, 1))
    again = section_gathers(batch.layouts, "again")[:, layout] if batch.sharded else gathers
    sums = section_exchanges(batch.layouts, batch.zero)[:, layout] if batch.overlapped else np.zeros((1, 1))
    slower = contended(times, gathers, sums, overlap, again)
    return Contended(slower, slower if batch.scattered else times)


def bucket_seconds(batch: Batch, members: Sequence[tuple[int, Order]]) -> Array:
    """Seconds of the buckets sent after each iteration: (iterations, members)."""
    columns: dict[int, list[int]] = {}
    for column, (_, order) in enumerate(members):
        columns.setdefault(id(order), []).append(column)
    cells: list[Cell] = []
    for equal_columns in columns.values():
        sent: dict[tuple[Axes, float], list[int]] = {}
        for number, iteration in enumerate(members[equal_columns[0]][1]):
            for bucket in iteration.buckets:
                sent.setdefault(bucket, []).append(number)
        cells += [
            Cell(members[column][0], *bucket, rows, column) for column in equal_columns for bucket, rows in sent.items()
        ]
    return _summed(batch.layouts, batch.zero, cells, (len(members[0][1]), len(members)))


def section_exchanges(layouts: Layouts, zero: int) -> Array:
    """Seconds in which the gradients of one layer iteration of each section travel: (sections, layouts)."""
    return layouts.shared.once(("section exchanges", zero > 0), lambda: _section_exchanges(layouts, zero))


def _section_exchanges(layouts: Layouts, zero: int) -> Array:
    width = layouts.backend.formats.summed
    shape = len(layouts.programs[0].sections), len(layouts)
    if layouts.backend.run.bucket <= 0:
        return np.zeros(shape)
    cells = [
        Cell(layout, gradient.axes, gradient.elements * width, [number], layout)
        for layout, program in enumerate(layouts.programs)
        for number, section in enumerate(program.sections)
        for gradient in section.gradients
        if gradient.axes
    ]
    return _summed(layouts, zero, cells, shape)


def _summed(layouts: Layouts, zero: int, cells: Sequence[Cell], shape: tuple[int, int]) -> Array:
    """Seconds of sums of gradients, added up at their places in a table of some ``shape``."""
    owed: dict[str, list[tuple[Cell, Axes, float]]] = {}
    for cell in cells:
        for operation, axes, payload in layouts.operations(cell.layout, "gradients", zero, cell.axes, cell.size):
            if axes:
                owed.setdefault(operation, []).append((cell, axes, payload))
    table = np.zeros(shape)
    for operation, members in owed.items():
        owing = [cell.layout for cell, _, _ in members]
        groups = layouts.groups(owing, [axes for _, axes, _ in members])
        seconds = layouts.exchanged(operation, owing, groups, np.array([payload for *_, payload in members]))
        for (cell, _, _), duration in zip(members, seconds.tolist(), strict=True):
            np.add.at(table[:, cell.column], cell.rows, duration)
    return table


def section_gathers(layouts: Layouts, content: Literal["all", "again"] = "all") -> Array:
    """Seconds in which the parameters of one layer of each section are gathered, or gathered ``again`` before its
    backward pass: (sections, layouts)."""
    content = content if layouts.regathers else "all"
    return layouts.shared.once(("section gathers", content), lambda: section_gather_figures(layouts, content)[0])


def section_gather_figures(layouts: Layouts, content: Literal["all", "again"] = "all") -> Array:
    """Seconds and bytes in which the weights of each section are gathered: (2, sections, layouts)."""
    sections = len(layouts.programs[0].sections)
    single = np.eye(sections, sections + len(layouts.programs[0].ties))[None]
    return layouts.sent(single, 1, content, 3, layouts.backend.formats.parameter)[:, 0]


#: Gradients that are summed after the last pass: none without a pipeline (`paleo.step.streams` has them), those of tied
#: parameters alone where all others are scattered after every pass.
Summed = Literal["none", "tied", "all"]


@dataclass(frozen=True, slots=True)
class Tails:
    """What follows the last passes, (stages, layouts): ``fixed`` seconds that nothing hides; ``sums`` of gradients that
    overlap, by chunk, (stages, chunks, layouts), and ``gathers`` that the next pass hides, with the buckets in which
    they go out. ``total``: seconds of all communication. ``sends``: layouts that have anything to send, (layouts,)."""

    fixed: Array
    sums: Array
    sum_buckets: Array
    gathers: Array
    gather_buckets: Array
    total: Array
    sends: Mask


def tails(layouts: Layouts, assignment: Assignment, zero: int, *, overlapped: bool, summed: Summed = "all") -> Tails:
    """What follows the last backward pass: the gradients that are ``summed`` then, the update unless the host does it,
    and gathers of sharded states."""
    part = assignment.key if overlapped else assignment.stages_key
    key = "tails", part, min(zero, 1) + (zero == 3), overlapped, summed
    return layouts.shared.once(key, lambda: _tails(layouts, assignment, zero, overlapped, summed))


def _tails(layouts: Layouts, assignment: Assignment, zero: int, overlapped: bool, summed: Summed) -> Tails:
    backend, kinds, rows = layouts.backend, assignment.kinds.stages, assignment.stage_kind
    sizes = layouts.elements(kinds, trained=True)[rows] * backend.formats.parameter
    fixed = np.zeros((assignment.stages, len(layouts)))
    gathers, sums = np.zeros_like(fixed), np.zeros((len(fixed), 1, len(layouts)))
    sent, total = sums, fixed
    if zero in (1, 2) and layouts.training:
        gathers = layouts.state_gathers(assignment)
    if summed != "none":
        fixed = fixed + layouts.tied_sums(assignment)
    if summed == "all":
        sums, sent = layouts.exchange(assignment, zero, chunks=overlapped)
    exchanged = sums.sum(axis=1)
    total, sends = fixed + exchanged + gathers, np.asarray((exchanged + gathers).any(axis=0))
    if not overlapped:
        fixed, sums = fixed + exchanged, np.zeros_like(sums)
    if not (overlapped and backend.software.overlap.gather):
        fixed, gathers = fixed + gathers, np.zeros_like(gathers)
    buckets = bucket_count(sent, backend.run.bucket), bucket_count(sizes, backend.run.bucket)
    if not backend.offload.holds("optimizer"):
        fixed = fixed + layouts.updates(kinds, sharded=zero > 0)[rows]
    fixed = fixed + layouts.coding(kinds)[rows]
    return Tails(fixed, sums, buckets[0], gathers, buckets[1], total, sends)


def after_passes(batch: Batch, passes: Passes, *, summed: bool = True) -> Array:
    """Seconds after each stage's last pass until its update is done and its parameters are gathered: (stages,
    cases)."""
    exposed = exposed_communication(batch, passes, summed=summed)
    return exposed + host_updates(batch) if batch.backend.offload.holds("optimizer") else exposed


def after_streams(batch: Batch) -> Array:
    """Without a pipeline, seconds after the last bucket of gradients: (cases,)."""
    forward = per_stage(batch.assignment.computed, batch.times.forwards)
    return np.asarray(after_passes(batch, Passes(forward, forward, forward), summed=False)[0])


def exposed_communication(batch: Batch, passes: Passes, *, summed: bool = True) -> Array:
    """The same without updates of the host."""
    following, contention = batch_tails(batch, summed=summed), batch.backend.software.overlap.contention
    seconds = batch.per_case(following.fixed)
    if batch.zero == 3 and batch.backend.compression is not None:  # gradients are coded with every microbatch
        kinds, rows = batch.assignment.kinds.stages, batch.assignment.stage_kind
        seconds = seconds + batch.per_case(batch.layouts.coding(kinds)[rows]) * (batch.microbatches - 1.0)
    if following.gathers.any():
        seconds += overlapped_gathers(batch, following, passes)
    if contention >= 1.0:  # as `exposed_sends` has it: nothing is won
        seconds += batch.per_case(following.sums.sum(axis=1))
    elif following.sums.any():
        ordered = _sends_in_order(batch, following).of(batch.cases.layout)
        seconds += exposed_sends(ordered, batch.schedule, passes, batch.assignment.chunks, contention)
    return seconds


def overlapped_gathers(batch: Batch, following: Tails, passes: Passes) -> Array:
    """What the next first pass leaves exposed of gathers that overlap with it: (stages, cases)."""
    gathers, buckets = batch.per_case(following.gathers), batch.per_case(following.gather_buckets)
    return exposed_gather(gathers, buckets, passes.forward, batch.backend.software.overlap.contention)


def exposed_gathers(batch: Batch, passes: Passes) -> Array:
    """Seconds in which stages gather updated parameters (ZeRO-1 and 2) that nothing hides: (stages, cases)."""
    if batch.zero not in (1, 2) or not batch.training:
        return np.zeros((batch.assignment.stages, len(batch)))
    if batch.overlapped and batch.backend.software.overlap.gather:
        return overlapped_gathers(batch, batch_tails(batch), passes)
    return batch.per_case(batch.layouts.state_gathers(batch.assignment))


def updates(batch: Batch) -> Array:
    """Seconds of the update on each stage, by the device or by its host: (stages, cases)."""
    if batch.backend.offload.holds("optimizer"):
        return host_updates(batch)
    kinds, rows = batch.assignment.kinds.stages, batch.assignment.stage_kind
    return batch.per_case(batch.layouts.updates(kinds, sharded=batch.zero > 0)[rows])


def host_updates(batch: Batch) -> Array:
    """Seconds of an update by the host, after the last backward pass, and of clipping: (stages, cases)."""
    layouts, backend, assignment = batch.layouts, batch.backend, batch.assignment
    if not layouts.training:
        return np.zeros((assignment.stages, len(batch)))
    kinds, sharded, rows = assignment.kinds.stages, batch.zero > 0, assignment.stage_kind
    counts = batch.per_case(layouts.updated_elements(kinds, sharded=sharded)[rows])
    backward = per_stage(assignment.computed, batch.times.backwards + batch.times.weights)
    update = host_update(counts, backward, backend.optimizer, backend.formats, backend.offload)
    if backend.clip == "scaled" and backend.offload.holds("gradients"):  # DeepSpeed's stage3.py: unscale_and_clip_grads
        update = update + 2.0 * SUM_BYTES * counts / backend.offload.memory
    return update + batch.per_case(layouts.clipping(kinds, sharded=sharded)[rows])


def batch_tails(batch: Batch, *, summed: bool = True) -> Tails:
    """The tails of a batch; scattered gradients have gone out with every microbatch, those of tied parameters alone
    have not."""
    scattered = batch.scattered and batch.assignment.stages > 1
    how: Summed = "none" if not summed else "tied" if scattered else "all"
    return tails(batch.layouts, batch.assignment, batch.zero, overlapped=batch.overlapped, summed=how)


def _sends_in_order(batch: Batch, following: Tails) -> Sends:
    """The sums of gradients in the order of the schedule."""
    key = "sends", batch.assignment.key, min(batch.zero, 1) + (batch.zero == 3), batch.schedule.name
    chunks = batch.assignment.chunks
    return batch.layouts.shared.once(
        key, lambda: in_order(following.sums, following.sum_buckets, batch.schedule, chunks)
    )
