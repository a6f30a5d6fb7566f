"""The partition of a program into pipeline stages: whole layers, those of repeated blocks one by one, in order; and
what the stages then hold: layers of each section, copies of tied parameters.

A step without a pipeline is one stage that holds the network.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError

if TYPE_CHECKING:
    from paleo.lowering.program import Program, Section, Tie
    from paleo.schedules.base import Schedule
    from paleo.specs.run import Cut

#: A run of layers on one stage: positions of sections, each with how many of its layers are in it.
Chunk = tuple[tuple[int, int], ...]
#: Room for rounding when weights are added up.
_SLACK = 1.0 + 2.0**-40


def cut(program: Program, weights: Sequence[float], pieces: int, how: Cut | None = None) -> list[Chunk]:
    """``pieces`` runs of layers, cut ``how`` a run says. Left to itself: where the layers of the heaviest block divide
    evenly each piece gets as many, as in Megatron, with what comes before on the first piece and what comes after on
    the last; else the slowest piece is made as light as it can be.

    ``weights``: seconds of one layer iteration of each section, forward and backward.
    """
    sections = program.sections
    if isinstance(how, tuple):
        return _stated(program, how)
    if pieces == 1:
        return [tuple((index, section.repeat) for index, section in enumerate(sections))]
    heaviest = max(range(len(sections)), key=lambda i: weights[i] * sections[i].repeat)
    layers = sections[heaviest].repeat
    if how != "time" and layers % pieces == 0:
        return _even(program, heaviest, pieces)
    if how == "uniform":
        problem = f"the {layers} layers of {sections[heaviest].name!r} cannot be divided evenly over {pieces} pieces"
        raise PlanError(f"cut 'uniform': {problem}; use cut=time, or state the layers of each piece")
    return _balanced(program, weights, pieces)


def layer_counts(program: Program) -> list[int]:
    """Layers of each section that a stated cut counts: those of repeated blocks where there are any, else each section
    as one: (sections,)."""
    folded = any(section.repeat > 1 for section in program.sections)
    return [section.repeat if section.repeat > 1 or not folded else 0 for section in program.sections]


def _stated(program: Program, layers: Sequence[int]) -> list[Chunk]:
    """Pieces of stated numbers of layers, with the sections between them beside the layer before (the first ones beside
    the first layer). The first piece may have none, and is what comes before the first layer; the last one too."""
    counts = layer_counts(program)
    if sum(layers) != sum(counts):
        stated = f"cut {list(layers)}: adds up to {sum(layers)} layers"
        raise PlanError(f"{stated}; the network has {sum(counts)} to divide")
    _check_empty(program, layers, counts)
    pieces: list[list[tuple[int, int]]] = [[]]
    left = list(layers)
    for index, (section, count) in enumerate(zip(program.sections, counts, strict=True)):
        if not count:
            if left == [0, 0]:  # behind the last layer
                left.pop(0)
                pieces.append([])
            pieces[-1].append((index, section.repeat))
        while count:
            if not left[0]:
                left.pop(0)
                pieces.append([])
            taken = min(count, left[0])
            pieces[-1].append((index, taken))
            count, left[0] = count - taken, left[0] - taken
    return [tuple(piece) for piece in pieces]


def _check_empty(program: Program, layers: Sequence[int], counts: Sequence[int]) -> None:
    """PlanError for a piece without any section."""
    if 0 in layers[1:-1]:
        raise PlanError(f"cut {list(layers)}: only the first and the last piece may be without layers")
    for place, section, name in ((0, counts[0], "first"), (-1, counts[-1], "last")):
        if layers[place] == 0 and section:
            raise PlanError(f"cut {list(layers)}: the {name} piece is empty; the network has nothing beside its layers")


def balanced_cut(program: Program, weights: Sequence[float], pieces: int) -> tuple[int, ...]:
    """Layers of each piece, as `cut` takes them, so that the heaviest piece is as light as it can be; early pieces are
    the lighter ones. Empty where there are fewer layers than pieces.

    ``weights`` as in `cut`."""
    units = _units(program, weights)
    if len(units) < pieces:
        return ()
    layers = np.cumsum([count for _, count in units])
    ends = np.cumsum(_halved(_lengths([weight for weight, _ in reversed(units)], pieces)[::-1], pieces))
    return tuple(np.diff(layers[ends - 1], prepend=0).tolist())


def heaviest_piece(program: Program, weights: Sequence[float], chunks: Sequence[Chunk]) -> float:
    """Seconds of the slowest of several pieces."""
    return max(sum(weights[section] * layers for section, layers in chunk) for chunk in chunks)


def _units(program: Program, weights: Sequence[float]) -> list[tuple[float, int]]:
    """What may be divided: weight and number of layers (0 or 1) of what comes before the first layer, of each layer
    with the sections behind it, and of what comes after the last layer."""
    units: list[tuple[float, int]] = []
    counts = layer_counts(program)
    last = max((index for index, count in enumerate(counts) if count), default=-1)
    for index, (section, count) in enumerate(zip(program.sections, counts, strict=True)):
        if count:
            units += [(weights[index], 1)] * count
        elif not units or index == last + 1:
            units.append((weights[index] * section.repeat, 0))
        else:
            weight, layers = units[-1]
            units[-1] = (weight + weights[index] * section.repeat, layers)
    return units


def _lengths(weights: Sequence[float], pieces: int) -> list[int]:
    """Units of each of at most ``pieces`` contiguous pieces, filled from the front, whose heaviest is as light as
    possible: by bisection on the heaviest weight, between what a filling reaches and what the next one would."""
    sums = np.cumsum(weights, dtype=np.longdouble).astype(float).tolist()  # each sum rounded once
    low, high = max(weights), sums[-1]
    while low * _SLACK < high:
        middle = (low + high) / 2
        ends = _filled(sums, middle)
        starts = [0.0, *(sums[end - 1] for end in ends[:-1])]
        if len(ends) <= pieces:
            high = min(middle, max(sums[end - 1] - start for start, end in zip(starts, ends, strict=True)))
        else:
            low = max(middle, min(sums[end] - start for start, end in zip(starts, ends[:-1], strict=False)))
    lengths: list[int] = np.diff(_filled(sums, high), prepend=0).tolist()
    return lengths


def _halved(lengths: list[int], pieces: int) -> list[int]:
    """The longest pieces in halves, until there are as many as wanted."""
    while len(lengths) < pieces:
        longest = lengths.index(max(lengths))
        half = lengths[longest] // 2
        lengths[longest : longest + 1] = [half, lengths[longest] - half]
    return lengths


def _filled(sums: Sequence[float], most: float) -> list[int]:
    """Ends of pieces that are filled one after another up to a weight, by the sums of weights up to each unit."""
    ends, base = list[int](), 0.0
    while not ends or ends[-1] < len(sums):
        start = ends[-1] if ends else 0
        ends.append(max(bisect_right(sums, base + most * _SLACK, start), start + 1))
        base = sums[ends[-1] - 1]
    return ends


def cut_by_work(program: Program, pieces: int) -> list[Chunk]:
    """``pieces`` runs of layers by the work of their products of weights, as nanotron cuts: a piece takes layers until
    the sum from the first one on has passed its share of the whole, so early pieces are the fuller ones and the output
    layer counts. Where that leaves a piece empty, as ``cut`` does it."""
    work = [product_flops(section) for section in program.sections]
    total = sum(flops * section.repeat for flops, section in zip(work, program.sections, strict=True))
    filled: list[list[int]] = [[]]
    done = 0.0
    for index, section in enumerate(program.sections):
        for _ in range(section.repeat):
            filled[-1].append(index)
            done += work[index]
            if len(filled) < pieces and done > total * len(filled) / pieces * _SLACK:
                filled.append([])
    complete = len(filled) == pieces and filled[-1]
    return [_counted(piece) for piece in filled] if complete else cut(program, work, pieces)


def product_flops(section: Section) -> float:
    """FLOP of the forward products of one layer that have weights in them: those of attention's core count for none."""
    counted = [kernel for kernel in section.kernels if kernel.kernel.family == "gemm" and not kernel.core]
    return sum(kernel.times * kernel.kernel.flops for kernel in counted if kernel.kernel.phase == "forward")


def _even(program: Program, block: int, pieces: int) -> list[Chunk]:
    """As many layers of a block on each piece."""
    layers = program.sections[block].repeat // pieces
    chunks: list[list[tuple[int, int]]] = [[(block, layers)] for _ in range(pieces)]
    chunks[0][:0] = [(i, program.sections[i].repeat) for i in range(block)]
    chunks[-1] += [(i, program.sections[i].repeat) for i in range(block + 1, len(program.sections))]
    return [tuple(chunk) for chunk in chunks]


def _balanced(program: Program, weights: Sequence[float], pieces: int) -> list[Chunk]:
    """Contiguous pieces whose heaviest is as light as possible, by bisection on the heaviest weight. The output
    layer and its loss stay together: on another stage the loss would be sent all logits (Megatron's
    account_for_loss_in_pipeline_split counts both as one layer, too)."""
    units = _divisible(program, weights)
    if len(units) < pieces:
        raise PlanError(f"{len(units)} layers cannot be cut into {pieces} pipeline stages")
    ends = np.cumsum([0, *_halved(_lengths([weight for _, weight in units], pieces), pieces)]).tolist()
    return [
        _counted([index for sections, _ in units[start:end] for index in sections]) for start, end in pairwise(ends)
    ]


def _divisible(program: Program, weights: Sequence[float]) -> list[tuple[tuple[int, ...], float]]:
    """What may be divided: positions of sections with their weight, layer by layer; the last layer that has parameters
    and what follows it are one."""
    holders = [index for index, section in enumerate(program.sections) if section.parameters]
    last = max([*holders, *(tie.reader for tie in program.ties)], default=len(program.sections) - 1)
    layers = [index for index, section in enumerate(program.sections) for _ in range(section.repeat)]
    units = [((index,), weights[index]) for index in layers if index <= last]
    behind = tuple(index for index in layers if index > last)
    (*earlier, (final, weight)) = units
    return [*earlier, ((*final, *behind), weight + sum(weights[index] for index in behind))]


def _counted(piece: list[int]) -> Chunk:
    return tuple((index, piece.count(index)) for index in dict.fromkeys(piece))


Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


def placed_layers(sections: int, pieces: Sequence[Chunk], places: Sequence[Sequence[int]]) -> Array:
    """Layers of each section in each chunk of each stage, (stages, chunks, sections); ``places``: the pieces of the
    network that a stage's chunks are."""
    placed = np.zeros((len(places), len(places[0]), sections))
    for stage, numbers in enumerate(places):
        for chunk, piece in enumerate(numbers):
            for section, layers in pieces[piece]:
                placed[stage, chunk, section] += layers
    return placed


def tied_copies(layers: Array, ties: Sequence[Tie]) -> Array:
    """1 where a stage reads a tied parameter whose owner lies elsewhere and so holds a copy of it: (stages, ties).

    ``layers``: layers of each section on each stage, (stages, sections).
    """
    copies = np.zeros((len(layers), len(ties)))
    known: dict[str, Mask] = {}
    for column, tie in enumerate(ties):
        owners, reads = known.get(tie.name, layers[:, tie.owner] > 0), layers[:, tie.reader] > 0
        copies[:, column] = reads & ~owners
        known[tie.name] = owners | reads
    return copies


def holdings(placed: Array, ties: Sequence[Tie]) -> Array:
    """What has parameters in each chunk of each stage: layers of each section, then copies of each tied parameter,
    which are with the last chunk: (stages, chunks, sections and ties).

    ``placed``: layers of each section in each chunk of each stage, (stages, chunks, sections)."""
    tied = np.zeros((*placed.shape[:2], len(ties)))
    tied[:, -1] = tied_copies(placed.sum(axis=1), ties)
    return np.concatenate([placed, tied], axis=2)


def tied_pairs(ties: Sequence[Tie], layers: Array) -> list[tuple[int, int, int]]:
    """Tie, stage of its owner and stage of a copy, for each copy of a trained parameter."""
    return [
        (number, int(np.flatnonzero(layers[:, ties[number].owner])[0]), stage)
        for stage, number in np.argwhere(tied_copies(layers, ties)).tolist()
        if ties[number].trained
    ]


def layer_parameters(layers: Array, ties: Sequence[Tie]) -> Array:
    """What a stage gathers, and computes gradients of, in an iteration of each section: the section, and copies of tied
    parameters where it reads them: (stages, sections, sections and ties). ``layers``: as in `tied_copies`."""
    stages, sections = layers.shape
    parts = np.zeros((stages, sections, sections + len(ties)))
    parts[:, range(sections), range(sections)] = 1.0
    parts[:, [tie.reader for tie in ties], range(sections, sections + len(ties))] = tied_copies(layers, ties)
    return parts


class StageKinds:
    """The different holdings of stages, or of chunks: they are few, so figures are computed for each kind, not for each
    stage. ``add`` extends them; figures are to be computed after the last one has been added."""

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}
        self._rows: list[Array] = []

    def add(self, holdings: Array, copies: int) -> Index:
        """Numbers of the kinds of some holdings, (…, sections and ties): (…,)."""
        rows = np.concatenate([holdings, np.full((*holdings.shape[:-1], 1), float(copies))], axis=-1)
        numbers = [self._of(row) for row in rows.reshape(-1, rows.shape[-1])]
        return np.array(numbers, dtype=np.intp).reshape(holdings.shape[:-1])

    def _of(self, row: Array) -> int:
        number = self._number.setdefault(row.tobytes(), len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        return number

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def holdings(self) -> Array:
        """(kinds, sections and ties)."""
        return np.array(self._rows)[:, :-1]

    @property
    def copies(self) -> Array:
        """Copies of the network of which these are holdings: (kinds, 1)."""
        return np.array(self._rows)[:, -1:]


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of whole stages, and of their chunks."""

    stages: StageKinds
    chunks: StageKinds


@dataclass(frozen=True, slots=True)
class Assignment:
    """A network in ``pieces`` laid over stages, ``chunks`` pieces of each of its ``copies`` on every stage.

    ``placed``: layers of each section, (stages, chunks, sections); ``layers``: the same of whole stages, (stages,
    sections); ``stage_kind``: (stages,), ``chunk_kind``: (stages, chunks). ``sends``: how many of a stage's outputs,
    which leave a section, go to other stages for each microbatch, (stages, sections)."""

    pieces: tuple[Chunk, ...]
    chunks: int
    copies: int
    placed: Array
    layers: Array
    sends: Array
    kinds: Kinds
    stage_kind: Index
    chunk_kind: Index

    @classmethod
    def of(
        cls, pieces: Sequence[Chunk], schedule: Schedule, stages: int, chunks: int, ties: Sequence[Tie], kinds: Kinds
    ) -> Assignment:
        """The ``pieces`` placed on stages by a schedule; new kinds of stages are added to ``kinds``."""
        sections = 1 + max(section for piece in pieces for section, _ in piece)
        places = schedule.pieces(stages, chunks) if stages > 1 else ((0,),)
        copies = schedule.copies if stages > 1 else 1
        placed = placed_layers(sections, pieces, places)
        layers = np.asarray(placed.sum(axis=1))
        sends = np.zeros((stages, sections))
        if stages > 1:
            for stage, sent in enumerate(schedule.hands_on(stages, chunks)):
                for piece, leaves in zip(places[stage], sent, strict=True):
                    sends[stage, pieces[piece][-1][0]] += leaves / copies
        stage_kind = kinds.stages.add(holdings(layers[:, None], ties)[:, 0], copies)
        chunk_kind = kinds.chunks.add(holdings(placed, ties), copies)
        return cls(tuple(pieces), chunks, copies, placed, layers, sends, kinds, stage_kind, chunk_kind)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stage_kind)

    @property
    def computed(self) -> Array:
        """Layers of each section that a stage computes for a microbatch, on average over the copies of the network:
        (stages, sections)."""
        return self.layers / self.copies

    @property
    def key(self) -> tuple[object, ...]:
        """Cache key: equal for two assignments with the same chunks on the same stages."""
        return self.chunk_kind.shape, self.chunk_kind.tobytes()

    @property
    def stages_key(self) -> tuple[object, ...]:
        """Cache key: equal for two assignments with the same layers on the same stages, in any chunks."""
        return len(self.stage_kind), self.stage_kind.tobytes()
