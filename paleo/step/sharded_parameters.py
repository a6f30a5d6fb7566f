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
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.partition import Chunk
from paleo.schedules.base import Passes
from paleo.step.section_times import LayerTimes

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]


class ShardedFigures(NamedTuple):
    """Seconds of one layer iteration of each section, (sections, …): passes with what they wait for, the gather of its
    parameters and that before its backward pass, the exchange of its gradients."""

    forward: Array
    backward: Array
    weights: Array
    gather: Array
    regather: Array
    gradients: Array


@dataclass(frozen=True, slots=True)
class _Unit:
    """An iteration of a section that is gathered, and iterations without parameters that follow it."""

    gathered: int
    following: tuple[tuple[int, int], ...] = ()

    def rest(self, figures: Array) -> Array:
        """Seconds of what follows the gathered iteration."""
        return np.asarray(sum(count * figures[section] for section, count in self.following))


#: Units in a row: an iteration of a block between two of its kind occurs so many times.
_Row = list[tuple[_Unit, int]]


def sharded_passes(chunk: Chunk, figures: ShardedFigures, gathered: Mask, goes_back: Mask, *, splits: bool) -> Passes:
    """The passes of a chunk. ``gathered``: sections that have parameters, (sections,), ``goes_back`` those that have a
    backward pass. ``splits``: gradients of weights are a pass of their own."""
    forth, lead = _units(chunk, gathered)
    back, back_lead = _units(chunk[::-1], gathered & goes_back)
    f, zero = figures, np.zeros(np.broadcast_shapes(figures.gather[0].shape, figures.forward[0].shape))
    none = np.zeros(len(f.forward))
    forward = _row(forth, f.forward, f.gather, none, lead.rest(f.forward) + zero)
    before = f.forward[forth[-1][0].gathered] + forth[-1][0].rest(f.forward) if forth else zero
    last = np.asarray(sum(layers * f.weights[section] for section, layers in chunk)) + zero
    if not splits:
        both = f.backward + f.weights
        backward = _row(back, both, f.regather, f.gradients, back_lead.rest(both) + zero, before)
        return Passes(forward, backward - last, last)
    backward = _row(back, f.backward, f.regather, none, back_lead.rest(f.backward) + zero, before)
    weights = _row(back, f.weights, none, f.gradients, back_lead.rest(f.weights) + zero)
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


def _row(row: _Row, compute: Array, gather: Array, gradients: Array, lead: Array, before: Array | float = 0.0) -> Array:
    """Seconds of units one after another, after a ``lead`` that has no parameters and ``before`` seconds of a pass
    before, during both of which the first gather runs; the last gradients are waited for.

    Gradients go out once their iteration and the gather after it are done: ``early`` is by how much that is before the
    next unit starts, where iterations without parameters lie between."""
    if not row:
        return lead
    units = _expanded(row)
    seconds = np.maximum(lead, gather[units[0][0].gathered] - before)
    sent, early = np.zeros_like(seconds), np.zeros_like(seconds)
    for (unit, times), (following, _) in pairwise(units):
        computing = compute[unit.gathered] + unit.rest(compute)
        awaited = np.maximum(sent - early, 0.0) + gather[following.gathered]
        seconds = seconds + times * np.maximum(computing, awaited)
        early = np.minimum(unit.rest(compute), np.maximum(computing - awaited, 0.0))
        sent = gradients[unit.gathered]
    last = units[-1][0]
    computing = compute[last.gathered]
    done = np.maximum(computing, sent - early) + gradients[last.gathered]
    return np.asarray(seconds + np.maximum(computing + last.rest(compute), done))


def _expanded(row: _Row) -> _Row:
    """Iterations in a row that have unlike neighbours one by one: what precedes an iteration and what follows it count,
    so of a stretch of equal ones the first and the last stand alone."""
    units: _Row = []
    for unit, count in row:
        units += [(unit, 1), (unit, count - 1)] if count > 1 else [(unit, 1)]
    return units
