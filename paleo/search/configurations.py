"""Configurations of a search as arrays: their cases, their other choices and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.policies import RECOMPUTE_POLICIES
from paleo.schedules.base import SCHEDULES, distinct_values
from paleo.search.space import Layout, SearchSpace, microbatch_sizes
from paleo.step.layouts import ResultCache
from paleo.step.step import predict_steps

if TYPE_CHECKING:
    from paleo.search.layout_costs import LayoutTimes
    from paleo.step.configuration_batch import ConfigurationBatch

Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
IntegerArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """Cases of a search with the same number of pipeline stages. A case is a layout, microbatch and recompute policy.

    The columns hold the positions of each case's layout, priced point and recompute policy. ``case_offset`` is the
    number of cases in earlier groups; ``case_of_layout`` is one case of each layout.
    """

    stages: int
    case_offset: int
    layouts: tuple[int, ...]
    case_of_layout: IndexArray
    layout_index: IndexArray
    point_index: IndexArray
    microbatch: Array
    microbatch_count: Array
    recompute_index: IndexArray

    def __len__(self) -> int:
        return len(self.layout_index)

    def select_cases(self, cases: IndexArray, before: int) -> CaseGroup:
        """Select some of the cases, together with their layouts.

        Parameters
        ----------
        cases : IndexArray
            Positions.
        before : int
            Number of cases in earlier groups.

        Returns
        -------
        CaseGroup
            The smaller group.
        """
        position = np.full(len(self.layouts), -1)
        members = np.flatnonzero(np.bincount(self.layout_index[cases]))
        position[members] = np.arange(len(members))
        layout = position[self.layout_index[cases]]
        first = np.unique(layout, return_index=True)[1]
        layouts = tuple(self.layouts[member] for member in members.tolist())
        sizes, counts = self.microbatch[cases], self.microbatch_count[cases]
        point, recompute = self.point_index[cases], self.recompute_index[cases]
        return CaseGroup(self.stages, before, layouts, first, layout, point, sizes, counts, recompute)


def group_cases_by_stages(points: LayoutTimes, layouts: Sequence[Layout], space: SearchSpace) -> Iterator[CaseGroup]:
    """Group the cases of a search by their number of pipeline stages.

    Parameters
    ----------
    points : LayoutTimes
        Priced layers.
    layouts : sequence of Layout
        Layouts.
    space : SearchSpace
        Values that the search varies.

    Yields
    ------
    CaseGroup
        Groups, one stage first.
    """
    of_stages: dict[int, list[int]] = {}
    for index, layout in enumerate(layouts):
        of_stages.setdefault(layout.mesh.degree("pp"), []).append(index)
    sizes = {layout.local_batch: microbatch_sizes(layout.local_batch, space) for layout in layouts}
    before = 0
    for stages, indices in sorted(of_stages.items()):
        members: list[int] = []
        rows: list[tuple[int, int, int, int]] = []
        for index in indices:
            local, key = layouts[index].local_batch, points.key_of_layout(layouts[index])
            known = [(points.position_of_layout.get((key, size)), size) for size in sizes[local]]
            priced = [(len(members), point, size, local // size) for point, size in known if point is not None]
            members += [index] if priced else []
            rows += priced
        if rows:
            policies = [RECOMPUTE_POLICIES.index(name) for name in space.recompute]
            layout_of, point_of, size, count = (np.tile(row, len(policies)) for row in np.array(rows, np.intp).T)
            first = np.flatnonzero(np.diff(layout_of[: len(rows)], prepend=-1))
            counts = size.astype(np.float64), count.astype(np.float64), np.repeat(policies, len(rows))
            yield CaseGroup(stages, before, tuple(members), first, layout_of, point_of, *counts)
            before += len(layout_of)


class ExecutionChoice(NamedTuple):
    """Choices of a configuration besides its layout: schedule, chunks per stage, ZeRO stage, gradient overlap."""

    schedule: int
    chunks: int
    zero: int
    overlapped: bool

    @classmethod
    def from_schedule_name(cls, schedule: str, chunks: int, zero: int, *, overlapped: bool) -> ExecutionChoice:
        """Return a choice from the name of a schedule and the other choices.

        Parameters
        ----------
        schedule : str
            Name of the schedule.
        chunks : int
            Chunks of a stage.
        zero : int
            ZeRO stage, 0 to 3.
        overlapped : bool
            Gradients are exchanged during the backward pass.

        Returns
        -------
        ExecutionChoice
            The choice.
        """
        return cls(list(SCHEDULES).index(schedule), chunks, zero, overlapped)


class EvaluatedCases(NamedTuple):
    """Evaluated configurations that share one choice: positions of their cases, step times [s], memory [byte].

    The memory is that of the fullest stage. ``case_offset`` is the number of cases before those of this ``batch``.
    ``layers_per_piece`` holds the layers of each piece if a run has to state them.
    """

    batch: ConfigurationBatch
    layers_per_piece: tuple[int, ...] | None
    case_offset: int
    case_index: IntegerArray
    step_time: Array
    memory: Array

    @property
    def choice(self) -> ExecutionChoice:
        """Choice that all these configurations share."""
        batch = self.batch
        return ExecutionChoice.from_schedule_name(
            batch.schedule.name,
            batch.assignment.chunks_per_stage,
            batch.zero,
            overlapped=batch.overlaps_gradient_exchange,
        )


@dataclass(frozen=True, slots=True)
class ConfigurationResults:
    """Results of a search, one entry for each configuration.

    Each entry holds the position of its case and of its batch, the step time [s] and the bytes of the fullest stage. A
    case is a layout at a microbatch under a recompute policy (its position in `RECOMPUTE_POLICIES`). All cases of a
    batch belong to one group; ``batch_case_offsets`` of a batch counts the cases of earlier groups.

    ``step_time`` follows the closed form of a schedule where it has one, which is approximate for unequal stages;
    `exact_step_times` is exact.
    """

    case_columns: tuple[IntegerArray, IntegerArray, IntegerArray]
    batches: tuple[ConfigurationBatch, ...]
    layers_per_piece_by_batch: tuple[tuple[int, ...] | None, ...]
    choices: tuple[ExecutionChoice, ...]
    batch_case_offsets: IntegerArray
    case_index: IntegerArray
    batch_index: IntegerArray
    step_time: Array
    memory: Array

    def __len__(self) -> int:
        return len(self.step_time)

    @classmethod
    def join_parts(cls, groups: Sequence[CaseGroup], solved: Sequence[EvaluatedCases]) -> ConfigurationResults:
        """Join the results of all parts, one part after another.

        Parameters
        ----------
        groups : sequence of CaseGroup
            Cases by number of stages.
        solved : sequence of EvaluatedCases
            Steps of the configurations of each choice.

        Returns
        -------
        ConfigurationResults
            Results of all configurations.
        """
        layouts = [np.array(group.layouts)[group.layout_index] for group in groups]
        figures = layouts, [group.microbatch for group in groups], [group.recompute_index for group in groups]
        cases = tuple(np.concatenate([np.zeros(0), *column]).astype(np.int32) for column in figures)
        columns = [[getattr(part, name) for part in solved] for name in ("case_index", "step_time", "memory")]
        case, step, memory = (np.concatenate([np.zeros(0, dtype=np.int32), *column]) for column in columns)
        choice = np.repeat(np.arange(len(solved), dtype=np.int32), [len(part) for part in columns[0]])
        batches = tuple(part.batch for part in solved)
        choices = tuple(part.choice for part in solved)
        cuts = tuple(part.layers_per_piece for part in solved)
        before = np.array([part.case_offset for part in solved], dtype=np.int32)
        return cls(cases, batches, cuts, choices, before, case, choice, step, memory)  # type: ignore[arg-type]

    def indices_and_choice(self, index: int) -> tuple[int, int, int, ExecutionChoice]:
        """Return the indices and the choice of one configuration.

        Parameters
        ----------
        index : int
            Its position.

        Returns
        -------
        tuple[int, int, int, ExecutionChoice]
            Layout, microbatch, recompute policy and choice.
        """
        layout, microbatch, recompute = (int(column[self.case_index[index]]) for column in self.case_columns)
        return layout, microbatch, recompute, self.choices[self.batch_index[index]]

    def find(
        self, layout: int, microbatch: int, recompute: int, choice: ExecutionChoice, cut: tuple[int, ...] | None
    ) -> IndexArray:
        """Find the configurations with a given case, choice and cut.

        Parameters
        ----------
        layout : int
            Position of the layout.
        microbatch : int
            Samples.
        recompute : int
            Position of the recompute policy.
        choice : ExecutionChoice
            The choice.
        cut : tuple of int, optional
            Layers of each piece; None for the default.

        Returns
        -------
        IndexArray
            Positions.
        """
        case = (
            (self.case_columns[0] == layout)
            & (self.case_columns[1] == microbatch)
            & (self.case_columns[2] == recompute)
        )
        chosen = [
            each == choice and other == cut
            for each, other in zip(self.choices, self.layers_per_piece_by_batch, strict=True)
        ]
        return np.flatnonzero(case[self.case_index] & np.array(chosen, dtype=bool)[self.batch_index])

    def rows_in_batch(self, indices: IndexArray) -> IndexArray:
        """Return the row of each configuration in the arrays of its batch of cases.

        Parameters
        ----------
        indices : IndexArray, shape (n,)
            Numbers of configurations in this result.

        Returns
        -------
        Index, shape (n,)
            Rows within the batch.
        """
        return (self.case_index[indices] - self.batch_case_offsets[self.batch_index[indices]]).astype(np.intp)

    def layers_per_piece(self, index: int) -> tuple[int, ...] | None:
        """Return the layers of each piece of a configuration.

        Parameters
        ----------
        index : int
            Its position.

        Returns
        -------
        tuple of int, optional
            Layers; None for the default cut.
        """
        return self.layers_per_piece_by_batch[int(self.batch_index[index])]

    @property
    def is_exact(self) -> npt.NDArray[np.bool_]:
        """True for configurations whose step time is exact.

        It was computed pass by pass, or by a closed form that holds for them.
        """
        exact = [
            each.assignment.stages == 1 or each.schedule.closed_forms.exact_for_stages == "any" for each in self.batches
        ]
        return np.array(exact, dtype=bool)[self.batch_index]

    def exact_step_times(self, indices: IndexArray) -> Array:
        """Compute the exact step times of configurations, pass by pass in the order of the schedule.

        Parameters
        ----------
        indices : IndexArray
            Positions of the configurations.

        Returns
        -------
        ndarray, shape (configurations,)
            Time [s].
        """
        seconds = self.step_time[indices]
        for choice in distinct_values(self.batch_index[indices]):
            batch, places = self.batches[choice], np.flatnonzero(self.batch_index[indices] == choice)
            cases = self.rows_in_batch(indices[places])
            arrival = (
                batch.input_arrival_time[cases]
                if isinstance(batch.input_arrival_time, np.ndarray)
                else batch.input_arrival_time
            )
            ordered = replace(
                batch,
                cases=batch.cases.select(cases),
                input_arrival_time=arrival,
                stage_end_method="order",
                cache=ResultCache(),
            )
            seconds[places] = predict_steps(ordered).step_time
        return seconds

    @property
    def layout_index(self) -> IntegerArray:
        """Index of the layout of each configuration, shape (configurations,)."""
        return self.case_columns[0][self.case_index]

    @property
    def microbatch(self) -> IntegerArray:
        """Microbatch of each configuration [samples], shape (configurations,)."""
        return self.case_columns[1][self.case_index]

    @property
    def recompute_index(self) -> IntegerArray:
        """Index of the recompute policy of each configuration in `RECOMPUTE_POLICIES`, shape (configurations,)."""
        return self.case_columns[2][self.case_index]

    def choice_field(self, name: str) -> IntegerArray:
        """Return a field of the choice of every configuration.

        Parameters
        ----------
        name : str
            Field of `ExecutionChoice`.

        Returns
        -------
        Codes, shape (configurations,)
            Values.
        """
        return np.array([getattr(choice, name) for choice in self.choices])[self.batch_index]
