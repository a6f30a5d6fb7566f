"""Which layers compute activations again before their backward pass: all of them alike, the first ones of each piece of
a pipeline, in groups, or layer by layer.

A *layer iteration* is one pass through one layer of a repeated block, or through a layer that occurs once. Layers of a
section that are treated differently become sections of their own, so that whatever follows (seconds, bytes, timeline)
knows one policy for each section.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, near

if TYPE_CHECKING:
    from paleo.lowering.partition import Chunk
    from paleo.lowering.program import Counted, Program, Section
    from paleo.specs.run import Run

#: Layers of a piece: section, and numbers of its layers in the network.
Layers = list[tuple[int, range]]
Mask = npt.NDArray[np.bool_]
Array = npt.NDArray[np.float64]
RECOMPUTE = ("none", "selective", "full")


class Policy(NamedTuple):
    """What a layer computes again: ``none``, the core of attention (``selective``) or all from its input (``full``), of
    ``group`` layers at once."""

    how: str = "none"
    group: int = 1


class Policies(NamedTuple):
    """Policies of all sections: whether the whole layer or its core is computed again, and layers in a group;
    (sections,) or (sections, configurations)."""

    whole: Mask
    core: Mask
    group: Array

    @classmethod
    def of(cls, program: Program) -> Policies:
        """The policies that a program states."""
        hows = np.array([section.recompute for section in program.sections])
        groups = np.array([section.recompute_group for section in program.sections], dtype=np.float64)
        return cls(hows == "full", hows == "selective", groups)

    @classmethod
    def alike(cls, repeat: Array, how: str) -> Policies:
        """One policy for the whole network."""
        policies = cls.each(len(repeat), how)
        return policies._replace(whole=policies.whole & wholly_recomputed(repeat))

    @classmethod
    def each(cls, sections: int, how: str) -> Policies:
        """The policy ``how`` for every one of ``sections``, those outside the repeated blocks too."""
        whole, core = np.full(sections, how == "full"), np.full(sections, how == "selective")
        return cls(whole, core, np.ones(sections))

    def shaped(self, axes: int) -> tuple[Mask, Mask, Array]:
        """Its arrays with trailing axes of length 1, so that they broadcast with arrays of ``axes`` dimensions."""
        shape = self.whole.shape + (1,) * (axes - self.whole.ndim)
        return self.whole.reshape(shape), self.core.reshape(shape), self.group.reshape(shape)


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


def with_policy(program: Program, how: str) -> Program:
    """The program with one recompute policy for all its layers."""
    whole = _blocks(program)
    hows = [how if how != "full" or blocks else "none" for blocks in whole]
    sections = (replace(section, recompute=each) for section, each in zip(program.sections, hows, strict=True))
    return replace(program, sections=tuple(sections))


def words(run: Run) -> str:
    """What a run recomputes, in short."""
    if run.recompute_by_layer:
        return ", ".join([run.recompute, *(f"{how} of {name}" for name, how in run.recompute_by_layer.items())])
    if run.recompute_layers is not None:
        return f"{run.recompute}, {run.recompute_layers} layer{'s' * (run.recompute_layers != 1)} a stage"
    return run.recompute if run.recompute_every is None else f"{run.recompute}, every {run.recompute_every} layers"


# layers that differ


def uneven(run: Run) -> bool:
    """Whether a run treats some layers differently; PlanError where it contradicts itself."""
    stated = {
        "recompute_layers": run.recompute_layers is not None,
        "recompute_every": run.recompute_every is not None,
        "recompute_by_layer": bool(run.recompute_by_layer),
    }
    names = [name for name, is_stated in stated.items() if is_stated]
    if len(names) > 1:
        raise PlanError(f"{' and '.join(names)}: two ways to choose the layers that are recomputed; state one of them")
    if names and names != ["recompute_by_layer"] and run.recompute != "full":
        raise PlanError(
            f"{names[0]}: chooses layers of full recomputation, but recompute is {run.recompute!r}; use full"
        )
    return bool(names) and not run.forward_only


def policy_shares(program: Program, run: Run, pieces: int) -> dict[str, Array]:
    """For each policy the share of each section's layers that follow it, (sections,), before the network is cut: N
    layers of each piece count as that share of all its layers."""
    sections = program.sections
    if run.recompute_by_layer:
        policies = _by_layer(program, run)
        return {how: np.array([np.mean([p.how == how for p in each]) for each in policies]) for how in RECOMPUTE}
    whole = _blocks(program)
    layers = sum(section.repeat for section, blocks in zip(sections, whole, strict=True) if blocks)
    share = 1.0 if run.recompute_layers is None else min(1.0, run.recompute_layers * pieces / layers)
    full = share * whole.astype(np.float64)
    return {"none": 1.0 - full, "full": full}


class SplitProgram(NamedTuple):
    """A program with a section for each policy of each of its sections, the pieces of the network in these sections,
    and the section of the undivided program that each of them is."""

    program: Program
    pieces: list[Chunk]
    origin: list[int]


def split_by_policy(program: Program, pieces: Sequence[Chunk], run: Run) -> SplitProgram:
    """The program with a section for each policy under which layers of a section are recomputed, those of one policy
    together."""
    whole = _blocks(program)
    layers = [list(_piece_policies(program, run, piece, whole)) for piece in _numbered(pieces)]
    _check_layers(run, max(sum(whole[section] for section, _ in piece) for piece in layers))
    kinds = sorted(dict.fromkeys(kind for piece in layers for kind in piece), key=lambda kind: kind[0])
    number = {kind: index for index, kind in enumerate(kinds)}
    first = {section: index for index, (section, _) in reversed(list(enumerate(kinds)))}
    count = [sum(piece.count(kind) for piece in layers) for kind in kinds]
    sections = (
        replace(program.sections[section], repeat=times, recompute=policy.how, recompute_group=policy.group)
        for (section, policy), times in zip(kinds, count, strict=True)
    )
    # tied parameters lie in sections that occur once, so none of those is divided
    ties = (replace(tie, owner=first[tie.owner], reader=first[tie.reader]) for tie in program.ties)
    chunks = [tuple((number[kind], piece.count(kind)) for kind in kinds if kind in piece) for piece in layers]
    return SplitProgram(replace(program, sections=tuple(sections), ties=tuple(ties)), chunks, [k for k, _ in kinds])


def most_layers(program: Program, pieces: Sequence[Chunk]) -> int:
    """The most layers of one piece that full recomputation would run again."""
    whole = _blocks(program)
    return max(sum(layers for section, layers in piece if whole[section]) for piece in pieces)


def _numbered(pieces: Sequence[Chunk]) -> Iterator[Layers]:
    """Each piece with its layers by number."""
    done: dict[int, int] = {}
    for piece in pieces:
        numbered = []
        for section, layers in piece:
            start = done.get(section, 0)
            numbered.append((section, range(start, start + layers)))
            done[section] = start + layers
        yield numbered


def _piece_policies(program: Program, run: Run, piece: Layers, whole: Mask) -> Iterator[tuple[int, Policy]]:
    """Each layer of a piece, in order, with its policy."""
    if run.recompute_by_layer:
        policies = _by_layer(program, run)
        yield from ((section, policies[section][layer]) for section, layers in piece for layer in layers)
        return
    left = run.recompute_layers
    for section, layers in piece:
        full = whole[section] * (len(layers) if left is None else min(left, len(layers)))
        left = left if left is None else left - full
        size = min(run.recompute_every or 1, full or 1)
        grouped = [Policy("full", size)] * (full - full % size) + [Policy("full", full % size)] * (full % size)
        yield from ((section, policy) for policy in grouped + [Policy()] * (len(layers) - full))


def _check_layers(run: Run, most: int) -> None:
    for name, stated in (("recompute_layers", run.recompute_layers), ("recompute_every", run.recompute_every)):
        if stated is not None and stated > most:
            raise PlanError(f"{name}: {stated} layers; the fullest piece of this network has {most} to recompute")


def _by_layer(program: Program, run: Run) -> list[list[Policy]]:
    """The policy of every layer of every section where layers are named; later entries win over earlier ones."""
    default = with_policy(program, run.recompute)
    policies = [[Policy(section.recompute)] * section.repeat for section in default.sections]
    for pattern, how in run.recompute_by_layer.items():
        places = [(i, layer) for i, layer, name in _names(program) if fnmatchcase(name, pattern)]
        if not places:
            raise PlanError(f"recompute_by_layer: no layer is called {pattern!r}; {near(pattern, _labels(program))}")
        for section, layer in places:
            policies[section][layer] = Policy(how)
    return policies


def _names(program: Program) -> Iterator[tuple[int, int, str]]:
    """Section, number and name of every layer: ``block.0``, ``block.1``, …, or the name of one that occurs once."""
    for index, section in enumerate(program.sections):
        for layer in range(section.repeat):
            yield index, layer, section.name if section.repeat == 1 else f"{section.name}.{layer}"


def _labels(program: Program) -> list[str]:
    """Names for a message: the layers of a block as a pattern."""
    return [section.name + ".*" * (section.repeat > 1) for section in program.sections]
