"""Gradients and states over their replicas: which collectives sum the gradients of a stage and gather its parameters,
over which axes, and how many elements of each a rank owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from paleo.lowering.program import Program
from paleo.parallel.mesh import Axes, Mesh
from paleo.schedules.base import Numeric

Array = npt.NDArray[np.float64]
Count = npt.NDArray[np.int64]
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
        owned[number] += elements / (mesh.ways(axes) * copies)
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
    groups = [(np.full(stages, mesh.stride(axes)), np.full(stages, mesh.ways(axes) * copies))] if axes else []
    if copies > 1:
        apart = np.abs(stages - 1 - 2 * np.arange(stages))
        groups.append((apart * mesh.stride(("pp",)), np.full(stages, copies)))
    return groups


def gradient_exchange(zero: int, axes: Axes, size: Numbers, mesh: Mesh) -> tuple[tuple[str, Axes, Numbers], ...]:
    """The collectives that sum gradients of ``size`` bytes (or elements), with their axes and payloads.

    Where a shard group is smaller than the replicas its ranks first scatter the sum, and each shard is then summed over
    the groups (HSDP: Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2).
    """
    if not zero or mesh.degree("shard") == 1 or "shard" not in axes:
        return (("reduce_scatter" if zero else "all_reduce", axes, size),)
    shared = tuple(axis for axis in axes if axis in mesh.state_axes)
    others = tuple(axis for axis in axes if axis not in shared)
    return ("reduce_scatter", shared, size), ("all_reduce", others, size / mesh.ways(shared))
