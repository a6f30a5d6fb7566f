"""Which layers compute activations again before their backward pass: all of them alike, the first ones of each piece of
a pipeline, in groups, or layer by layer.

A *turn* is one layer of a repeated block, or a layer that occurs once. Turns of a section that are treated differently
become sections of their own, so that whatever follows (seconds, bytes, timeline) knows one way for each section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, near
from paleo.lowering.partition import Chunk
from paleo.lowering.program import Counted, Program, Section
from paleo.specs.run import Run

#: Turns of a piece: section, and numbers of its turns in the network.
Turns = list[tuple[int, range]]
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]
RECOMPUTE = ("none", "selective", "full")


class Way(NamedTuple):
    """What a turn computes again: ``none``, the core of attention (``selective``) or all from its input (``full``), of
    ``group`` turns at once."""

    how: str = "none"
    group: int = 1


class Ways(NamedTuple):
    """Ways of all sections: whether the whole turn or its core is made again, and turns in a group; (sections,)."""

    whole: Mask
    core: Mask
    group: Array

    @classmethod
    def of(cls, program: Program) -> Ways:
        """Those that a program states."""
        hows = np.array([section.recompute for section in program.sections])
        groups = np.array([section.recompute_group for section in program.sections], dtype=np.float64)
        return cls(hows == "full", hows == "selective", groups)

    @classmethod
    def alike(cls, repeat: Array, how: str) -> Ways:
        """One way for the whole network."""
        every = cls.each(len(repeat), how)
        return every._replace(whole=every.whole & wholly_recomputed(repeat))

    @classmethod
    def each(cls, sections: int, how: str) -> Ways:
        """One way for each of so many sections, the outer ones too."""
        whole, core = np.full(sections, how == "full"), np.full(sections, how == "selective")
        return cls(whole, core, np.ones(sections))


def wholly_recomputed(repeat: Array) -> Mask:
    """Sections that full recomputation runs again: the repeated blocks, or all where nothing repeats."""
    blocks = repeat > 1
    return blocks if blocks.any() else np.ones_like(blocks)


def _blocks(program: Program) -> Mask:
    """`wholly_recomputed` of a program's sections."""
    return wholly_recomputed(np.array([section.repeat for section in program.sections]))


def runs(section: Section, counted: Counted) -> float:
    """How often a kernel runs in a microbatch: forward kernels run again where they are recomputed."""
    if counted.kernel.phase != "forward":
        return 1.0
    return 1.0 + {"none": 0.0, "full": counted.again, "selective": counted.selected}[section.recompute]


def marked(program: Program, how: str) -> Program:
    """The program with one way for all its layers."""
    whole = _blocks(program)
    ways = [how if how != "full" or blocks else "none" for blocks in whole]
    sections = (replace(section, recompute=way) for section, way in zip(program.sections, ways, strict=True))
    return replace(program, sections=tuple(sections))


def words(run: Run) -> str:
    """What a run recomputes, in short."""
    if run.recompute_by_layer:
        return ", ".join([run.recompute, *(f"{how} of {name}" for name, how in run.recompute_by_layer.items())])
    if run.recompute_layers is not None:
        return f"{run.recompute}, {run.recompute_layers} layers a stage"
    return run.recompute if run.recompute_every is None else f"{run.recompute}, every {run.recompute_every} layers"


# layers that differ


def uneven(run: Run) -> bool:
    """Whether a run treats some layers differently; PlanError where it contradicts itself."""
    stated = {
        "recompute_layers": run.recompute_layers is not None,
        "recompute_every": run.recompute_every is not None,
        "recompute_by_layer": bool(run.recompute_by_layer),
    }
    names = [name for name, given in stated.items() if given]
    if len(names) > 1:
        raise PlanError(f"{' and '.join(names)}: two ways to choose the layers that are recomputed; state one of them")
    if names and names != ["recompute_by_layer"] and run.recompute != "full":
        raise PlanError(
            f"{names[0]}: chooses layers of full recomputation, but recompute is {run.recompute!r}; use full"
        )
    return bool(names) and not run.forward_only


def turn_shares(program: Program, run: Run, pieces: int) -> dict[str, Array]:
    """For each way the share of each section's turns that go it, (sections,), before the network is cut: N layers of
    each piece count as that share of all its layers."""
    sections = program.sections
    if run.recompute_by_layer:
        ways = _by_layer(program, run)
        return {how: np.array([np.mean([way.how == how for way in one]) for one in ways]) for how in RECOMPUTE}
    whole = _blocks(program)
    turns = sum(section.repeat for section, blocks in zip(sections, whole, strict=True) if blocks)
    share = 1.0 if run.recompute_layers is None else min(1.0, run.recompute_layers * pieces / turns)
    full = share * whole.astype(np.float64)
    return {"none": 1.0 - full, "full": full}


def dealt(program: Program, pieces: Sequence[Chunk], run: Run) -> tuple[Program, list[Chunk]]:
    """The program with a section for each way in which turns of a section are treated, those of one way together, and
    the pieces of the network in these sections."""
    whole = _blocks(program)
    turns = [[(section, way) for section, way in _ways(program, run, piece, whole)] for piece in _numbered(pieces)]
    _check_layers(run, max(sum(whole[section] for section, _ in one) for one in turns))
    kinds = sorted(dict.fromkeys(turn for one in turns for turn in one), key=lambda kind: kind[0])
    number = {kind: index for index, kind in enumerate(kinds)}
    first = {section: index for index, (section, _) in reversed(list(enumerate(kinds)))}
    count = [sum(one.count(kind) for one in turns) for kind in kinds]
    sections = (
        replace(program.sections[section], repeat=times, recompute=way.how, recompute_group=way.group)
        for (section, way), times in zip(kinds, count, strict=True)
    )
    # tied parameters lie in sections that occur once, so none of those is divided
    ties = (replace(tie, owner=first[tie.owner], reader=first[tie.reader]) for tie in program.ties)
    made = [tuple((number[kind], one.count(kind)) for kind in kinds if kind in one) for one in turns]
    return Program(tuple(sections), tuple(ties)), made


def most_layers(program: Program, pieces: Sequence[Chunk]) -> int:
    """The most layers of one piece that full recomputation would run again."""
    whole = _blocks(program)
    return max(sum(turns for section, turns in piece if whole[section]) for piece in pieces)


def _numbered(pieces: Sequence[Chunk]) -> Iterator[Turns]:
    done: dict[int, int] = {}
    for piece in pieces:
        found = []
        for section, turns in piece:
            start = done.get(section, 0)
            found.append((section, range(start, start + turns)))
            done[section] = start + turns
        yield found


def _ways(program: Program, run: Run, piece: Turns, whole: Mask) -> Iterator[tuple[int, Way]]:
    """Each turn of a piece, in order, with its way."""
    if run.recompute_by_layer:
        known = _by_layer(program, run)
        yield from ((section, known[section][turn]) for section, turns in piece for turn in turns)
        return
    left = run.recompute_layers
    for section, turns in piece:
        full = whole[section] * (len(turns) if left is None else min(left, len(turns)))
        left = left if left is None else left - full
        size = min(run.recompute_every or 1, full or 1)
        ways = [Way("full", size)] * (full - full % size) + [Way("full", full % size)] * (full % size)
        yield from ((section, way) for way in ways + [Way()] * (len(turns) - full))


def _check_layers(run: Run, most: int) -> None:
    for name, stated in (("recompute_layers", run.recompute_layers), ("recompute_every", run.recompute_every)):
        if stated is not None and stated > most:
            raise PlanError(f"{name}: {stated} layers; the fullest piece of this network has {most} to recompute")


def _by_layer(program: Program, run: Run) -> list[list[Way]]:
    """The way of every turn of every section where layers are named; later entries win over earlier ones."""
    default = marked(program, run.recompute)
    ways = [[Way(section.recompute)] * section.repeat for section in default.sections]
    for pattern, how in run.recompute_by_layer.items():
        places = [(i, turn) for i, turn, name in _names(program) if fnmatchcase(name, pattern)]
        if not places:
            raise PlanError(f"recompute_by_layer: no layer is called {pattern!r}; {near(pattern, _labels(program))}")
        for section, turn in places:
            ways[section][turn] = Way(how)
    return ways


def _names(program: Program) -> Iterator[tuple[int, int, str]]:
    """Section, turn and name of every layer: ``block.0``, ``block.1``, …, or the name of one that occurs once."""
    for index, section in enumerate(program.sections):
        for turn in range(section.repeat):
            yield index, turn, section.name if section.repeat == 1 else f"{section.name}.{turn}"


def _labels(program: Program) -> list[str]:
    """Names for a message: the turns of a block as a pattern."""
    return [section.name + ".*" * (section.repeat > 1) for section in program.sections]
