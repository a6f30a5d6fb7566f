"""Passes of pipeline stages whose parameters are sharded (ZeRO-3; FSDP's FULL_SHARD): every microbatch gathers each
layer before its forward and before its backward pass, drops it after either, and scatters its gradients at once.

As without a pipeline (`paleo.step.streams`) a layer is gathered while the one before it computes, and its gradients
travel behind the gather that is next; the first gather of a forward pass and the last gradients of a backward pass are
waited for. What lies between is a closed form. A layer i starts at

    start[i + 1] = start[i] + max(compute[i], gradients[i - 1] + gather[i + 1])

to which layers without parameters add where they stand between.

Reference: Zhao et al., PyTorch FSDP, VLDB 2023, sections 3.2 and 3.3. All functions broadcast over arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.schedules.base import Passes

if TYPE_CHECKING:
    from paleo.lowering.partition import Chunk
    from paleo.step.section_times import LayerTimes

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ShardedFigures:
    """Seconds of one layer iteration of each section, (sections, …): passes with what they wait for, the gather of its
    parameters and that before its backward pass, the exchange of its gradients; None where nothing travels."""

    forward: Array
    backward: Array
    weights: Array
    gather: Array | None
    regather: Array | None
    gradients: Array | None

    @cached_property
    def gradient_passes(self) -> Array:
        """Seconds of the gradients of inputs and of weights in one pass."""
        return self.backward + self.weights


@dataclass(frozen=True, slots=True)
class _Unit:
    """An iteration of a section that is gathered, and iterations without parameters that follow it."""

    gathered: int
    following: tuple[tuple[int, int], ...] = ()

    def rest(self, figures: Array) -> Array:
        """Seconds of what follows the gathered iteration."""
        return np.asarray(sum(count * figures[section] for section, count in self.following))

    def whole(self, figures: Array) -> Array:
        """Seconds of the gathered iteration and of what follows it."""
        gathered: Array = figures[self.gathered]
        return gathered + self.rest(figures) if self.following else gathered


#: Units in a row: an iteration of a block between two of its kind occurs so many times.
_Row = list[tuple[_Unit, int]]


def sharded_passes(chunk: Chunk, figures: ShardedFigures, gathered: Mask, goes_back: Mask, *, splits: bool) -> Passes:
    """The passes of a chunk. ``gathered``: sections that have parameters, (sections,), ``goes_back`` those that have a
    backward pass. ``splits``: gradients of weights are a pass of their own."""
    forth, lead = _units(chunk, gathered)
    back, back_lead = _units(chunk[::-1], gathered & goes_back)
    f, before = figures, forth[-1][0].whole(figures.forward) if forth else 0.0
    forward = _row(forth, f.forward, lead.rest(f.forward), gather=f.gather)
    if not splits:
        gradient_passes, last = (
            f.gradient_passes,
            np.asarray(sum(layers * f.weights[section] for section, layers in chunk)),
        )
        backward = _row(back, gradient_passes, back_lead.rest(gradient_passes), f.regather, f.gradients, before)
        return Passes(forward, backward - last, last)
    backward = _row(back, f.backward, back_lead.rest(f.backward), f.regather, before=before)
    weights = _row(back, f.weights, back_lead.rest(f.weights), gradients=f.gradients)
    return Passes(forward, backward, weights)


def waited_iterations(times: LayerTimes, gather: Array, regather: Array, gradients: Array, goes_back: Mask) -> Array:
    """Seconds of one layer iteration of each section in a row of its kind, (sections, …): by these a network is cut."""
    back = regather * goes_back.reshape((-1,) + (1,) * (gather.ndim - 1)) + gradients
    return np.maximum(times.forwards, gather) + np.maximum(times.backwards + times.weights, back)


def _units(order: Sequence[tuple[int, int]], gathers: Mask) -> tuple[_Row, _Unit]:
    """Units of a pass in order, and what computes before the first of them."""
    units: list[tuple[int, int, list[tuple[int, int]]]] = []
    lead: list[tuple[int, int]] = []
    for section, layers in order:
        if gathers[section]:
            units += [(section, layers - 1, [])] * (layers > 1) + [(section, 1, [])]
        else:
            (units[-1][2] if units else lead).append((section, layers))
    row = [(_Unit(section, tuple(following)), layers) for section, layers, following in units]
    return row, _Unit(-1, tuple(lead))


def _row(
    row: _Row,
    compute: Array,
    lead: Array,
    gather: Array | None = None,
    gradients: Array | None = None,
    before: Array | float = 0.0,
) -> Array:
    """Seconds of units one after another, after a ``lead`` that has no parameters and ``before`` seconds of a pass
    before, during both of which the first gather runs; the last gradients are waited for.

    Gradients go out once their iteration and the gather after it are done: ``early`` is by how much that is before the
    next unit starts, where iterations without parameters lie between."""
    units = _expanded(row)
    if gather is None and gradients is None:
        return np.asarray(lead + sum(times * unit.whole(compute) for unit, times in units))
    if not row:
        return lead
    zeros = np.zeros(len(compute))
    gather, gradients = zeros if gather is None else gather, zeros if gradients is None else gradients
    seconds = np.maximum(lead, gather[units[0][0].gathered] - before)
    sent, early = np.zeros(()), np.zeros(())
    for (unit, times), (following, _) in pairwise(units):
        computing, idle = unit.whole(compute), unit.rest(compute)
        awaited = np.maximum(sent - early, 0.0) + gather[following.gathered]
        seconds = seconds + times * np.maximum(computing, awaited)
        early = np.minimum(idle, np.maximum(computing - awaited, 0.0)) if unit.following else np.zeros(())
        sent = gradients[unit.gathered]
    last = units[-1][0]
    computing = compute[last.gathered]
    done = np.maximum(computing, sent - early) + gradients[last.gathered]
    return np.asarray(seconds + np.maximum(last.whole(compute), done))


def _expanded(row: _Row) -> _Row:
    """Iterations in a row that have unlike neighbours one by one: what precedes an iteration and what follows it count,
    so of a stretch of equal ones the first and the last stand alone."""
    units: _Row = []
    for unit, count in row:
        units += [(unit, 1), (unit, count - 1)] if count > 1 else [(unit, 1)]
    return units
