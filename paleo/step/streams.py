"""A step without a pipeline as two streams: computation, and beside it buckets of gradients and gathers of parameters;
then what follows them.

Layer iterations follow one another; gradients go out in buckets as soon as the backward pass has filled them, or after
it; sharded parameters (ZeRO-3) are gathered ahead of the iteration that needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.step.section_times import contended

if TYPE_CHECKING:
    from paleo.lowering.program import Program, Section
    from paleo.parallel.mesh import Axes
    from paleo.schedules.base import Numeric
    from paleo.step.batch import Batch
    from paleo.step.layouts import Layouts
    from paleo.step.section_times import LayerTimes

Array = npt.NDArray[np.float64]
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
    """Forward and backward of one microbatch; gradients go out with the ``last`` one, or always where they are
    scattered."""
    order: list[LayerIteration] = []
    sends = last or buckets.scattered
    for index, section in enumerate(program.sections):
        gathers = bool(buckets.sharded and section.parameters)
        times = section.repeat if gathers else 1
        order += [LayerIteration(index, "forward", section.repeat // times, gathers)] * times
    pending: dict[Axes, float] = {}
    for index, section in reversed(list(enumerate(program.sections))):
        gathers = bool(buckets.sharded and section.parameters and section.goes_back)
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
    """What has gathered for each set of axes, once it is ``least`` bytes."""
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


Index = npt.NDArray[np.intp]
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
    """Iterations of the last microbatch and of earlier ones, with what they lose to collectives that overlap."""

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
    """Seconds of what goes out after each iteration: (iterations, members)."""
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


def plain_order(program: Program, buckets: Buckets) -> tuple[Order, Order]:
    """Iterations of an earlier microbatch and of the last one."""
    return iterations(program, buckets, last=False), iterations(program, buckets, last=True)
