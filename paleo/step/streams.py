"""A step without a pipeline as two streams: computation, and beside it buckets of gradients and gathers of parameters.

Layer iterations follow one another; gradients go out in buckets as soon as the backward pass has filled them, or after
it; sharded parameters (ZeRO-3) are gathered ahead of the iteration that needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paleo.lowering.program import Program, Section
    from paleo.parallel.mesh import Axes
    from paleo.schedules.base import Numeric

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
        rest = end.buckets + _flush(pending, 0.0)
        order[-1] = LayerIteration(end.section, end.direction, end.count, end.gathers, rest)
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
