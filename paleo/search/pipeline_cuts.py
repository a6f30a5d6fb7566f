"""Cuts of a network into pipeline stages and chunks that a search tries.

An even cut is tried first. A balanced cut makes the heaviest stage as light as possible; it is tried where the layers
do not divide evenly, or where the layers outside the repeated blocks weigh much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import (
    ModelChunk,
    balanced_chunk_layers,
    cut_into_stages,
    layer_counts_for_cut,
    slowest_stage_time,
)
from paleo.schedules.base import distinct_values
from paleo.search.space import SearchSpace, divisors

if TYPE_CHECKING:
    from paleo.lowering.program import Program
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
#: Weights of sections are rounded to this fraction of the weight of one layer of the heaviest block.
_WEIGHT_ROUNDING = 1 / 20
#: Largest ratio of the heaviest stages (balanced over even cut) at which a balanced cut is worth trying.
_MAX_BALANCED_RATIO = 0.995
#: Numbers of chunks that are tried besides those that divide the layers evenly: two for schedules that need two chunks,
#: and a few more where hardly any number divides the layers.
_TWO, _FEW = (2,), (2, 3, 4)
#: Most chunks of a stage that are tried unless the user states them, for even and for uneven divisions of the layers.
#: The limit keeps searches over thousands of layers short. Schedules in use have a handful; each further chunk adds
#: messages.
_MOST_EVEN, _MOST_UNEVEN = 64, 32

PipelineChunks = tuple[ModelChunk, ...]


class PipelinePartition(NamedTuple):
    """Network cut into pipeline pieces, and the indices of the cases (layout, microbatch, policy) that use this cut.

    ``layers_per_chunk`` is set if the cut differs from the framework's default, so that a run has to name the layers.
    """

    pieces: PipelineChunks
    case_indices: IndexArray
    layers_per_chunk: tuple[int, ...] | None = None


def candidate_chunk_counts(program: Program, stages: int, space: SearchSpace, backend: Backend) -> tuple[int, ...]:
    """Return the numbers of chunks per stage (virtual pipeline sizes) that a search tries.

    Parameters
    ----------
    program : Program
        One rank's program.
    stages : int
        Pipeline stages.
    space : SearchSpace
        Values that the search varies.
    backend : Backend
        Software, prices and links of the run.

    Returns
    -------
    tuple of int
        Numbers of chunks.
    """
    stated = backend.run.pipeline.cut
    if isinstance(stated, tuple):
        chunks = (len(stated) // stages,) if len(stated) % stages == 0 else ()
        return tuple(n for n in chunks if space.chunks is None or n in space.chunks)
    repeats = {s.repeat for s in program.sections if s.repeat > 1 and s.repeat % stages == 0}
    even = {chunks for repeat in repeats for chunks in divisors(repeat // stages)}
    layers = sum(layer_counts_for_cut(program))
    most = (layers + 2) // stages
    if not any(section.repeat > 1 for section in program.sections) or backend.run.pipeline.cut == "uniform":
        tried = even | {1}
    elif even:
        tried = even | {n for n in (_TWO if len(even) > 2 else _FEW) if n * stages <= layers}
    else:
        tried = set(range(1, min(most, _MOST_UNEVEN) + 1))
    if space.chunks is None:
        return tuple(sorted(n for n in tried if n <= _MOST_EVEN))
    return tuple(sorted({n for n in space.chunks if n in even or n <= most}))


class PipelineCuts:
    """Pipeline cuts that a search tries, for cases (layout, microbatch, recompute policy) of one pipeline depth.

    ``seconds`` are times of one layer iteration of each section [s], shape (sections, cases).
    """

    def __init__(self, programs: Sequence[Program], program_of: IndexArray, seconds: Array, backend: Backend) -> None:
        self.programs, self.program_of, self.seconds, self.backend = programs, program_of, seconds, backend
        sections = programs[0].sections
        self.repeat = np.array([section.repeat for section in sections])
        self.folded = any(section.repeat > 1 for section in sections)
        self.heaviest = (seconds * self.repeat[:, None]).argmax(axis=0)
        columns = np.arange(seconds.shape[1])
        self.relative = np.rint(seconds / seconds[self.heaviest, columns] / _WEIGHT_ROUNDING) * _WEIGHT_ROUNDING
        self._profiles: list[tuple[list[float], IndexArray]] | None = None

    def has_only_even_cut(self, stages: Sequence[int]) -> npt.NDArray[np.bool_]:
        """Return True for cases with a single pipeline cut to try: equally many repeated layers in each piece.

        Parameters
        ----------
        stages : sequence of int, shape (pieces,)
            Stage of each piece of the network.

        Returns
        -------
        ndarray of bool
            Shape (cases,).
        """
        run, backend = self.backend.run, self.backend
        if isinstance(run.pipeline.cut, tuple) or backend.offload.parts or not self.folded:
            return np.zeros(len(self.heaviest), dtype=bool)
        divides = self.repeat[self.heaviest] % len(stages) == 0
        if run.pipeline.cut is not None:
            return np.asarray(divides)
        if backend.software.parallelism.stages == "work":
            return np.zeros(len(self.heaviest), dtype=bool)
        work, rows = self.relative * self.repeat[:, None], np.arange(len(self.repeat))[:, None]
        ends = (work * (rows < self.heaviest)).sum(axis=0), (work * (rows > self.heaviest)).sum(axis=0)
        most = 1.0 + (1.0 - _MAX_BALANCED_RATIO) * self.repeat[self.heaviest] / len(set(stages))
        return np.asarray(divides & (_heavier(*ends, stages) <= most * (1.0 - 2.0**-30)))

    def candidate_partitions(self, stages: Sequence[int], inside: npt.NDArray[np.bool_]) -> Iterator[PipelinePartition]:
        """Yield the pipeline cuts that a search tries, each with the cases (layout, microbatch, policy) that use it.

        Parameters
        ----------
        stages : sequence of int, shape (pieces,)
            Stage of each piece of the network.
        inside : ndarray, shape (cases,)
            True for the cases to cut.

        Yields
        ------
        PipelinePartition
            A cut of the network into pieces, with the cases for which it is used.
        """
        run, program = self.backend.run, self.programs[0]
        if isinstance(run.pipeline.cut, tuple):
            stated = cut_into_stages(program, self.seconds[:, 0].tolist(), stages, run.pipeline.cut)
            yield PipelinePartition(tuple(stated), np.arange(self.seconds.shape[1]))
        elif self.backend.offload.parts:  # offload to the host adds time that depends on the ZeRO stage
            yield from self._balanced(stages, inside)
        elif self.backend.software.parallelism.stages == "work" and run.pipeline.cut is None:
            yield from self._by_work(stages)
        elif self.folded:
            yield from self._even(stages)
            if run.pipeline.cut is None:
                yield from self._balanced(stages, inside)
        else:
            yield from self._each_case(stages, inside)

    def _even(self, stages: Sequence[int]) -> Iterator[PipelinePartition]:
        """Yield cuts with equally many whole layers in each piece, one for all cases with the same heaviest block."""
        for block in distinct_values(self.heaviest):
            if self.repeat[block] % len(stages) == 0:
                cases = np.flatnonzero(self.heaviest == block)
                weights = self.seconds[:, cases[0]].tolist()
                yield PipelinePartition(tuple(cut_into_stages(self.programs[0], weights, stages)), cases)

    def _balanced(self, stages: Sequence[int], inside: npt.NDArray[np.bool_]) -> Iterator[PipelinePartition]:
        """Yield cuts that minimise the time of the slowest stage, for cases where this beats an even cut."""
        by_layers: dict[tuple[int, ...], list[IndexArray]] = {}
        program = self.programs[0]
        for weights, cases in self._section_time_profiles:
            if not inside[cases].any():
                continue
            block = int(np.argmax(np.array(weights) * self.repeat))
            even = self.repeat[block] % len(stages) == 0 and not self.backend.offload.parts
            if even and self._light_ends(weights, block, stages):
                continue
            layers = balanced_chunk_layers(program, weights, stages)
            if not layers:
                continue
            if even:
                balanced, plain = (
                    slowest_stage_time(program, weights, cut_into_stages(program, weights, stages, how), stages)
                    for how in (layers, None)
                )
                if balanced > _MAX_BALANCED_RATIO * plain:
                    continue
            by_layers.setdefault(layers, []).append(cases)
        for layers, cases_of in by_layers.items():
            chunks = cut_into_stages(program, self.seconds[:, 0].tolist(), stages, layers)
            yield PipelinePartition(tuple(chunks), np.sort(np.concatenate(cases_of)), layers)

    def _light_ends(self, weights: Sequence[float], block: int, stages: Sequence[int]) -> bool:
        """Return True if the layers around a block are too light for an uneven cut of the block to be faster."""
        ends = [sum(w * r for w, r in zip(weights[p], self.repeat[p], strict=True)) for p in _before_and_after(block)]
        most = weights[block] * (1.0 + (1.0 - _MAX_BALANCED_RATIO) * self.repeat[block] / len(set(stages)))
        return bool(_heavier(np.array(ends[0]), np.array(ends[1]), stages) <= most)

    @property
    def _section_time_profiles(self) -> list[tuple[list[float], IndexArray]]:
        """Pairs of relative section times and the indices of the cases that share them after rounding.

        Times are relative to one layer of the heaviest block.
        """
        if self._profiles is None:
            kinds, kind_of = np.unique(self.relative, axis=1, return_inverse=True)
            cases = [np.flatnonzero(kind_of.ravel() == kind) for kind in range(kinds.shape[1])]
            self._profiles = [(kinds[:, kind].tolist(), each) for kind, each in enumerate(cases)]
        return self._profiles

    def _by_work(self, stages: Sequence[int]) -> Iterator[PipelinePartition]:
        """Yield cuts that balance the FLOP of matrix products over stages, one for all microbatches of a layout."""
        if len(stages) > self.repeat.sum():
            return
        known: dict[PipelineChunks, list[IndexArray]] = {}
        for number in distinct_values(self.program_of):
            cases = np.flatnonzero(self.program_of == number)
            chunks = self.backend.cut_into_stages(self.programs[number], self.seconds[:, cases[0]], stages)
            known.setdefault(tuple(chunks), []).append(cases)
        yield from (PipelinePartition(chunks, np.sort(np.concatenate(cases))) for chunks, cases in known.items())

    def _each_case(self, stages: Sequence[int], inside: npt.NDArray[np.bool_]) -> Iterator[PipelinePartition]:
        """Yield a pipeline cut for each case (layout, microbatch, policy), for networks without repeated layers."""
        if len(stages) > len(self.repeat):
            return
        known: dict[PipelineChunks, list[int]] = {}
        for case in np.flatnonzero(inside).tolist():
            chunks = self.backend.cut_into_stages(
                self.programs[int(self.program_of[case])], self.seconds[:, case], stages
            )
            known.setdefault(tuple(chunks), []).append(case)
        yield from (PipelinePartition(chunks, np.array(cases, dtype=np.intp)) for chunks, cases in known.items())


def _heavier(before: Array, behind: Array, stages: Sequence[int]) -> Array:
    """Return the time that the layers before and behind a block add at most to one stage.

    The two add up if the first and the last piece lie on the same stage.
    """
    return before + behind if stages[0] == stages[-1] else np.maximum(before, behind)


def _before_and_after(block: int) -> tuple[slice, slice]:
    """Return slices of the sections before and after the section with index ``block``."""
    return slice(0, block), slice(block + 1, None)
