"""Passes of pipeline stages whose parameters are sharded (ZeRO-3; FSDP's FULL_SHARD): every microbatch gathers each
layer before its forward and before its backward pass, drops it after either, and scatters its gradients at once.

As without a pipeline (`paleo.timeline`) a layer is gathered while the one before it computes, and its gradients travel
behind the gather that is next; the first gather of a forward pass and the last gradients of a backward pass are waited
for. What lies between is a closed form. A layer i starts at

    start[i + 1] = start[i] + max(compute[i], gradients[i - 1] + gather[i + 1])

Reference: Zhao et al., PyTorch FSDP, VLDB 2023, sections 3.2 and 3.3. All functions broadcast over arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.exchange import copied, gradient_shares
from paleo.lower import Program
from paleo.parallel.mesh import Axes, Mesh
from paleo.schedules.base import Numeric, Passes
from paleo.stages import Chunk

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
    """A turn of a section that is gathered, and what computes behind it until the next one."""

    gathered: int
    computed: tuple[tuple[int, int], ...]

    def seconds(self, figures: Array) -> Array:
        return np.asarray(sum(turns * figures[section] for section, turns in self.computed))


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
    forward = _row(there, f.forward, f.gather, 0.0 * f.gradients, lead.seconds(f.forward) + zero)
    behind = there[-1][0].seconds(f.forward) if there else zero
    last = np.asarray(sum(turns * f.weights[section] for section, turns in chunk)) + zero
    if not splits:
        both = f.backward + f.weights
        backward = _row(back, both, f.gather, f.gradients, back_lead.seconds(both) + zero, behind)
        return Passes(forward, backward - last + late, last)
    backward = _row(back, f.backward, f.gather, 0.0 * f.gradients, back_lead.seconds(f.backward) + zero, behind)
    weights = _row(back, f.weights, 0.0 * f.gather, f.gradients, back_lead.seconds(f.weights) + zero)
    return Passes(forward, backward, weights + late)


def _units(order: Sequence[tuple[int, int]], gathers: Mask) -> tuple[_Row, _Unit]:
    """Units of a pass in order, and what computes before the first of them."""
    found: list[tuple[int, int, list[tuple[int, int]]]] = []
    lead: list[tuple[int, int]] = []
    for section, turns in order:
        if gathers[section]:
            found += [(section, turns - 1, [])] * (turns > 1) + [(section, 1, [])]
        else:
            (found[-1][2] if found else lead).append((section, turns))
    row = [(_Unit(section, ((section, 1), *behind)), turns) for section, turns, behind in found]
    return row, _Unit(-1, tuple(lead))


def _row(row: _Row, compute: Array, gather: Array, gradients: Array, lead: Array, behind: Array | float = 0.0) -> Array:
    """Seconds of units one after another, behind a ``lead`` that has no parameters and ``behind`` seconds of a pass
    before, during both of which the first gather runs; the last gradients are waited for."""
    if not row:
        return lead
    turns = _expanded(row)
    seconds = np.maximum(lead, gather[turns[0][0].gathered] - behind)
    nothing = np.zeros_like(seconds)
    before = nothing
    for (unit, times), (following, _) in zip(turns, [*turns[1:], (None, 0)], strict=True):
        awaited = before + (nothing if following is None else gather[following.gathered])
        seconds = seconds + times * np.maximum(unit.seconds(compute), awaited)
        before = gradients[unit.gathered] + nothing
    return np.asarray(seconds + before)


def _expanded(row: _Row) -> _Row:
    """Turns in a row that have unlike neighbours one by one: what precedes a turn and what follows it count, so of a
    stretch of equal turns the first and the last stand alone."""
    found: _Row = []
    for unit, turns in row:
        found += [(unit, 1), (unit, turns - 1)] if turns > 1 else [(unit, 1)]
    return found


# what travels


def gathered_elements(program: Program, held: Array) -> Array:
    """Parameter elements that a stage gathers for a turn of each section, its copies of tied ones with the section that
    reads them: (stages, sections). ``held``: turns of each section on each stage."""
    own = np.array([section.parameters for section in program.sections])
    return own + copied(held, program.ties) @ _at_readers(program, np.array([tie.elements for tie in program.ties]))


def turn_gradients(program: Program, held: Array, mesh: Mesh, copies: int) -> dict[Axes, Array]:
    """Gradient elements of a turn of each section by the axes over which they are summed, those of copied tied
    parameters with their reader: (stages, sections)."""
    tied, count = copied(held, program.ties), len(program.sections)
    shares = gradient_shares(program, mesh, copies)
    return {axes: one[:count] + tied @ _at_readers(program, one[count:]) for axes, one in shares.items()}


def _at_readers(program: Program, elements: Array) -> Array:
    """Elements of each tie at the section that reads it: (ties, sections)."""
    found = np.zeros((len(program.ties), len(program.sections)))
    for number, tie in enumerate(program.ties):
        found[number, tie.reader] = elements[number]
    return found
