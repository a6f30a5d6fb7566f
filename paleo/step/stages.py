"""What the stages of a pipeline hold: layers of each section, copies of tied parameters. A step without a pipeline is
one stage that holds the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from paleo.lowering.partition import Chunk
    from paleo.lowering.program import Tie
    from paleo.schedules.base import Schedule

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
