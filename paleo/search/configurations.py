"""Configurations of a plan search as numpy arrays: layouts, microbatches, schedules and their predicted results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES
from paleo.schedules.base import SCHEDULES, distinct_values
from paleo.search.space import Layout, SearchSpace, microbatch_sizes
from paleo.step.step import predict_steps

if TYPE_CHECKING:
    from paleo.search.layout_costs import LayoutTimes
    from paleo.step.configuration_batch import ConfigurationBatch

Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
IntegerArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class EqualDepthCases:
    """Cases of a search with the same number of pipeline stages. A case is a layout, microbatch and recompute policy.

    The arrays have one entry for each case: the index of its layout, of its layer times (``layer_times_index``) and of
    its recompute policy. ``case_offset`` is the number of cases in earlier groups. ``first_case_of_layout`` is the
    index of the first case of each layout.
    """

    stages: int
    case_offset: int
    layouts: tuple[int, ...]
    first_case_of_layout: IndexArray
    layout_index: IndexArray
    layer_times_index: IndexArray
    microbatch: Array
    microbatch_count: Array
    recompute_index: IndexArray

    def __len__(self) -> int:
        return len(self.layout_index)

    def select_cases(self, cases: IndexArray, before: int) -> EqualDepthCases:
        """Select some of the cases, together with their layouts.

        Parameters
        ----------
        cases : IndexArray
            Indices of the cases to keep.
        before : int
            Number of cases in earlier groups, the ``case_offset`` of the new group.

        Returns
        -------
        EqualDepthCases
            Group of the selected cases alone.
        """
        position = np.full(len(self.layouts), -1)
        members = np.flatnonzero(np.bincount(self.layout_index[cases]))
        position[members] = np.arange(len(members))
        layout = position[self.layout_index[cases]]
        first = np.unique(layout, return_index=True)[1]
        layouts = tuple(self.layouts[member] for member in members.tolist())
        sizes, counts = self.microbatch[cases], self.microbatch_count[cases]
        point, recompute = self.layer_times_index[cases], self.recompute_index[cases]
        return EqualDepthCases(self.stages, before, layouts, first, layout, point, sizes, counts, recompute)


def cases_by_pipeline_depth(
    points: LayoutTimes, layouts: Sequence[Layout], space: SearchSpace
) -> Iterator[EqualDepthCases]:
    """Combine layouts, microbatches and recompute policies into cases, grouped by number of pipeline stages.

    Parameters
    ----------
    points : LayoutTimes
        Layer times of every layout and microbatch.
    layouts : sequence of Layout
        Layouts of the search.
    space : SearchSpace
        Values that the search varies.

    Yields
    ------
    EqualDepthCases
        Cases with equal numbers of stages, in ascending order of stages.
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
            known = [(points.index_by_layout.get((key, size)), size) for size in sizes[local]]
            priced = [(len(members), point, size, local // size) for point, size in known if point is not None]
            members += [index] if priced else []
            rows += priced
        if rows:
            policies = [RECOMPUTE_POLICIES.index(name) for name in space.recompute]
            layout_of, point_of, size, count = (np.tile(row, len(policies)) for row in np.array(rows, np.intp).T)
            first = np.flatnonzero(np.diff(layout_of[: len(rows)], prepend=-1))
            counts = size.astype(np.float64), count.astype(np.float64), np.repeat(policies, len(rows))
            yield EqualDepthCases(stages, before, tuple(members), first, layout_of, point_of, *counts)
            before += len(layout_of)


class ExecutionChoice(NamedTuple):
    """Choices of a configuration besides its layout: schedule, chunks per stage, ZeRO stage, gradient overlap."""

    schedule: int
    chunks: int
    zero: int
    overlaps_gradient_exchange: bool

    @classmethod
    def from_schedule_name(cls, schedule: str, chunks: int, zero: int, *, overlapped: bool) -> ExecutionChoice:
        """Build a choice from the name of a pipeline schedule and the other fields.

        Parameters
        ----------
        schedule : str
            Name of the schedule.
        chunks : int
            Chunks of a stage.
        zero : int
            ZeRO stage, 0 to 3.
        overlapped : bool
            True if gradients are exchanged during the backward pass.

        Returns
        -------
        ExecutionChoice
            Choice that holds the index of the schedule.
        """
        return cls(list(SCHEDULES).index(schedule), chunks, zero, overlapped)


class EvaluatedCases(NamedTuple):
    """Evaluated configurations that share one choice of schedule, chunks, ZeRO stage and gradient overlap.

    ``step_time`` is in seconds, ``memory`` that of the fullest stage [byte]. ``case_offset`` is the number of cases in
    earlier groups. ``layers_per_piece`` holds the layers of each pipeline piece; None is the framework's default cut.
    """

    batch: ConfigurationBatch
    layers_per_piece: tuple[int, ...] | None
    case_offset: int
    case_index: IntegerArray
    step_time: Array
    memory: Array

    @property
    def choice(self) -> ExecutionChoice:
        """Schedule, chunks, ZeRO stage and gradient overlap that all these configurations share."""
        batch = self.batch
        return ExecutionChoice.from_schedule_name(
            batch.schedule.name,
            batch.assignment.chunks_per_stage,
            batch.zero,
            overlapped=batch.overlaps_gradient_exchange,
        )


@dataclass(frozen=True, slots=True)
class ConfigurationResults:
    """Step times and memory of all configurations that a search evaluated, one entry for each.

    Each entry holds the index of its case and of its batch, the step time [s] and the memory of the fullest stage
    [byte]. A case is a layout at a microbatch under a recompute policy (its index in `RECOMPUTE_POLICIES`). A batch is
    a set of cases that were evaluated at once; ``batch_case_offsets`` counts the cases of the groups before each batch.

    ``step_time`` follows the closed form of a schedule where it has one, which is approximate for unequal stages;
    `exact_step_times` is exact.
    """

    layout_microbatch_policy: tuple[IntegerArray, IntegerArray, IntegerArray]
    batches: tuple[ConfigurationBatch, ...]
    layers_per_piece_by_batch: tuple[tuple[int, ...] | None, ...]
    execution_choice_by_batch: tuple[ExecutionChoice, ...]
    batch_case_offsets: IntegerArray
    case_index: IntegerArray
    batch_index: IntegerArray
    step_time: Array
    memory: Array

    def __len__(self) -> int:
        return len(self.step_time)

    @classmethod
    def from_groups(cls, groups: Sequence[EqualDepthCases], solved: Sequence[EvaluatedCases]) -> ConfigurationResults:
        """Concatenate the evaluated configurations of all groups into one result.

        Parameters
        ----------
        groups : sequence of EqualDepthCases
            Cases, grouped by number of pipeline stages.
        solved : sequence of EvaluatedCases
            Evaluated configurations, one part for each schedule, ZeRO stage and other choices.

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

    def configuration_at(self, index: int) -> tuple[int, int, int, ExecutionChoice]:
        """Return layout, microbatch, recompute policy and execution choice of one configuration.

        Parameters
        ----------
        index : int
            Index of the configuration.

        Returns
        -------
        tuple[int, int, int, ExecutionChoice]
            Index of the layout, microbatch [samples], index of the recompute policy, and the choice.
        """
        layout, microbatch, recompute = (int(c[self.case_index[index]]) for c in self.layout_microbatch_policy)
        return layout, microbatch, recompute, self.execution_choice_by_batch[self.batch_index[index]]

    def find_configurations(
        self, layout: int, microbatch: int, recompute: int, choice: ExecutionChoice, cut: tuple[int, ...] | None
    ) -> IndexArray:
        """Find the configurations with a given layout, microbatch, recompute policy, execution choice and pipeline cut.

        Parameters
        ----------
        layout : int
            Index of the layout.
        microbatch : int
            Samples.
        recompute : int
            Index of the policy in `RECOMPUTE_POLICIES`.
        choice : ExecutionChoice
            Schedule, chunks, ZeRO stage and gradient overlap.
        cut : tuple of int, optional
            Layers of each piece; None for the default.

        Returns
        -------
        IndexArray
            Indices of the configurations found.
        """
        case = (
            (self.layout_microbatch_policy[0] == layout)
            & (self.layout_microbatch_policy[1] == microbatch)
            & (self.layout_microbatch_policy[2] == recompute)
        )
        chosen = [
            each == choice and other == cut
            for each, other in zip(self.execution_choice_by_batch, self.layers_per_piece_by_batch, strict=True)
        ]
        return np.flatnonzero(case[self.case_index] & np.array(chosen, dtype=bool)[self.batch_index])

    def indices_in_batch(self, indices: IndexArray) -> IndexArray:
        """Return the index of each configuration within the arrays of its batch (cases evaluated at once).

        Parameters
        ----------
        indices : IndexArray, shape (n,)
            Indices of configurations in this result.

        Returns
        -------
        IndexArray, shape (n,)
            Indices within the batch.
        """
        return (self.case_index[indices] - self.batch_case_offsets[self.batch_index[indices]]).astype(np.intp)

    def layers_per_piece(self, index: int) -> tuple[int, ...] | None:
        """Return the number of layers in each pipeline piece of a configuration.

        Parameters
        ----------
        index : int
            Index of the configuration.

        Returns
        -------
        tuple of int, optional
            Layers; None for the default cut.
        """
        return self.layers_per_piece_by_batch[int(self.batch_index[index])]

    @property
    def has_exact_step_time(self) -> npt.NDArray[np.bool_]:
        """True for configurations whose step time is exact, shape (configurations,).

        The time is exact if it was simulated pass by pass, or if the schedule's closed form also holds for unequal
        stages.
        """
        exact = [e.assignment.stages == 1 or e.schedule.closed_forms.exact_for_stages == "any" for e in self.batches]
        return np.array(exact, dtype=bool)[self.batch_index]

    def exact_step_times(self, indices: IndexArray) -> Array:
        """Compute exact step times of selected configurations by simulating every pass in the order of the schedule.

        Parameters
        ----------
        indices : IndexArray
            Indices of the configurations.

        Returns
        -------
        ndarray, shape (configurations,)
            Step time [s].
        """
        seconds = self.step_time[indices]
        for choice in distinct_values(self.batch_index[indices]):
            batch, places = self.batches[choice], np.flatnonzero(self.batch_index[indices] == choice)
            selected = batch.select(self.indices_in_batch(indices[places]))
            seconds[places] = predict_steps(replace(selected, stage_end_method="order")).step_time
        return seconds

    @property
    def layout_index(self) -> IntegerArray:
        """Index of the layout of each configuration, shape (configurations,)."""
        return self.layout_microbatch_policy[0][self.case_index]

    @property
    def microbatch(self) -> IntegerArray:
        """Microbatch of each configuration [samples], shape (configurations,)."""
        return self.layout_microbatch_policy[1][self.case_index]

    @property
    def recompute_index(self) -> IntegerArray:
        """Index of the recompute policy of each configuration in `RECOMPUTE_POLICIES`, shape (configurations,)."""
        return self.layout_microbatch_policy[2][self.case_index]

    def choice_field(self, name: str) -> IntegerArray:
        """Return one field of `ExecutionChoice`, such as the ZeRO stage, for every configuration.

        Parameters
        ----------
        name : str
            Name of the field.

        Returns
        -------
        IntegerArray, shape (configurations,)
            Values of the field.
        """
        return np.array([getattr(choice, name) for choice in self.execution_choice_by_batch])[self.batch_index]
