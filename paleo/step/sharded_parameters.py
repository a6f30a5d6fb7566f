"""Passes of pipeline stages whose parameters are sharded (ZeRO-3; FSDP's FULL_SHARD): every microbatch gathers each
layer before its forward and before its backward pass, drops it after either, and scatters its gradients at once.

As without a pipeline (`paleo.step.timeline`) a layer is gathered while the one before it computes, and its gradients
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
from paleo.lowering.program import Program, Tie
from paleo.schedules.base import Numeric, Passes
from paleo.step.gradient_exchange import copied
from paleo.step.section_times import TurnTimes

Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]


class Figures(NamedTuple):
    """Seconds of one turn of each section, (sections, …): passes with what they wait for, the gather of its parameters,
    the exchange of its gradients."""

    forward: Array
    backward: Array
    weights: Array
    gather: Array
    gradients: Array


@dataclass(frozen=True, slots=True)
class _Unit:
    """A turn of a section that is gathered, and turns without parameters that follow it."""

    gathered: int
    following: tuple[tuple[int, int], ...] = ()

    def rest(self, figures: Array) -> Array:
        """Seconds of what follows the gathered turn."""
        return np.asarray(sum(turns * figures[section] for section, turns in self.following))


#: Units in a row: a turn of a block between two of its kind occurs so many times.
_Row = list[tuple[_Unit, int]]


def sharded_passes(
    chunk: Chunk, figures: Figures, gathered: Mask, goes_back: Mask, *, splits: bool, late: Numeric
) -> Passes:
    """The passes of a chunk. ``gathered``: sections that have parameters, (sections,), ``goes_back`` those that have a
    backward pass. ``splits``: gradients of weights are a pass of their own; ``late``: seconds of gradients that go out
    behind the last pass that makes them, all together."""
    there, lead = _units(chunk, gathered)
    back, back_lead = _units(chunk[::-1], gathered & goes_back)
    f, zero = figures, np.zeros(np.broadcast_shapes(figures.gather[0].shape, figures.forward[0].shape))
    forward = _row(there, f.forward, f.gather, 0.0 * f.gradients, lead.rest(f.forward) + zero)
    behind = f.forward[there[-1][0].gathered] + there[-1][0].rest(f.forward) if there else zero
    last = np.asarray(sum(turns * f.weights[section] for section, turns in chunk)) + zero
    if not splits:
        both = f.backward + f.weights
        backward = _row(back, both, f.gather, f.gradients, back_lead.rest(both) + zero, behind)
        return Passes(forward, backward - last + late, last)
    backward = _row(back, f.backward, f.gather, 0.0 * f.gradients, back_lead.rest(f.backward) + zero, behind)
    weights = _row(back, f.weights, 0.0 * f.gather, f.gradients, back_lead.rest(f.weights) + zero)
    return Passes(forward, backward, weights + late)


def waited_turns(times: TurnTimes, gather: Array, gradients: Array, goes_back: Mask) -> Array:
    """Seconds of one turn of each section in a row of its kind, (sections, …): by these a network is cut."""
    back = gather * goes_back.reshape((-1,) + (1,) * (gather.ndim - 1)) + gradients
    return np.maximum(times.forwards, gather) + np.maximum(times.backwards + times.weights, back)


def _units(order: Sequence[tuple[int, int]], gathers: Mask) -> tuple[_Row, _Unit]:
    """Units of a pass in order, and what computes before the first of them."""
    found: list[tuple[int, int, list[tuple[int, int]]]] = []
    lead: list[tuple[int, int]] = []
    for section, turns in order:
        if gathers[section]:
            found += [(section, turns - 1, [])] * (turns > 1) + [(section, 1, [])]
        else:
            (found[-1][2] if found else lead).append((section, turns))
    row = [(_Unit(section, tuple(following)), turns) for section, turns, following in found]
    return row, _Unit(-1, tuple(lead))


def _row(row: _Row, compute: Array, gather: Array, gradients: Array, lead: Array, behind: Array | float = 0.0) -> Array:
    """Seconds of units one after another, behind a ``lead`` that has no parameters and ``behind`` seconds of a pass
    before, during both of which the first gather runs; the last gradients are waited for.

    Gradients go out once their turn and the gather after it are done: ``early`` is by how much that is before the next
    unit starts, where turns without parameters lie between."""
    if not row:
        return lead
    turns = _expanded(row)
    seconds = np.maximum(lead, gather[turns[0][0].gathered] - behind)
    sent, early = np.zeros_like(seconds), np.zeros_like(seconds)
    for (unit, times), (following, _) in pairwise(turns):
        own = compute[unit.gathered] + unit.rest(compute)
        awaited = np.maximum(sent - early, 0.0) + gather[following.gathered]
        seconds = seconds + times * np.maximum(own, awaited)
        early = np.minimum(unit.rest(compute), np.maximum(own - awaited, 0.0))
        sent = gradients[unit.gathered]
    last = turns[-1][0]
    own = compute[last.gathered]
    done = np.maximum(own, sent - early) + gradients[last.gathered]
    return np.asarray(seconds + np.maximum(own + last.rest(compute), done))


def _expanded(row: _Row) -> _Row:
    """Turns in a row that have unlike neighbours one by one: what precedes a turn and what follows it count, so of a
    stretch of equal turns the first and the last stand alone."""
    found: _Row = []
    for unit, turns in row:
        found += [(unit, 1), (unit, turns - 1)] if turns > 1 else [(unit, 1)]
    return found


# what travels


def turn_of_each(held: Array, ties: Sequence[Tie]) -> Array:
    """What a stage gathers, and makes gradients of, in a turn of each section: the section, and copies of tied
    parameters where it reads them: (stages, sections, sections and ties). ``held``: turns of each section on each
    stage."""
    stages, sections = held.shape
    found = np.zeros((stages, sections, sections + len(ties)))
    found[:, range(sections), range(sections)] = 1.0
    found[:, [tie.reader for tie in ties], range(sections, sections + len(ties))] = copied(held, ties)
    return found


def gathered_elements(program: Program) -> Array:
    """Parameter elements of each section and of each tie: (sections and ties,)."""
    return np.array([one.parameters for one in program.sections] + [one.elements for one in program.ties])
