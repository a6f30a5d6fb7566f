"""Configurations of a search as arrays: their cases, their other choices and their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.policies import RECOMPUTE_POLICIES
from paleo.schedules.base import SCHEDULES, distinct_values
from paleo.search.space import Layout, Space, microbatches
from paleo.step.layouts import ResultCache
from paleo.step.step import step

if TYPE_CHECKING:
    from paleo.search.block_costs import LayoutTimes
    from paleo.step.batch import Batch

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Codes = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """Cases of a search with the same number of pipeline stages. A case is a layout, microbatch and recompute policy.

    The columns hold the positions of each case's layout, priced point and recompute policy. ``before`` is the number of
    cases in earlier groups; ``first`` is one case of each layout.
    """

    stages: int
    before: int
    layouts: tuple[int, ...]
    first: Index
    layout: Index
    point: Index
    microbatch: Array
    microbatches: Array
    recompute: Index

    def __len__(self) -> int:
        return len(self.layout)

    def chosen(self, cases: Index, before: int) -> CaseGroup:
        """Select some of the cases, together with their layouts.

        Parameters
        ----------
        cases : Index
            Positions.
        before : int
            Number of cases in earlier groups.

        Returns
        -------
        CaseGroup
            The smaller group.
        """
        position = np.full(len(self.layouts), -1)
        members = np.flatnonzero(np.bincount(self.layout[cases]))
        position[members] = np.arange(len(members))
        layout = position[self.layout[cases]]
        first = np.unique(layout, return_index=True)[1]
        layouts = tuple(self.layouts[member] for member in members.tolist())
        sizes, counts = self.microbatch[cases], self.microbatches[cases]
        point, recompute = self.point[cases], self.recompute[cases]
        return CaseGroup(self.stages, before, layouts, first, layout, point, sizes, counts, recompute)


def groups(points: LayoutTimes, layouts: Sequence[Layout], space: Space) -> Iterator[CaseGroup]:
    """Group the cases of a search by their number of pipeline stages.

    Parameters
    ----------
    points : LayoutTimes
        Priced layers.
    layouts : sequence of Layout
        Layouts.
    space : Space
        Values that the search varies.

    Yields
    ------
    CaseGroup
        Groups, one stage first.
    """
    of_stages: dict[int, list[int]] = {}
    for index, layout in enumerate(layouts):
        of_stages.setdefault(layout.mesh.degree("pp"), []).append(index)
    sizes = {layout.local_batch: microbatches(layout.local_batch, space) for layout in layouts}
    before = 0
    for stages, indices in sorted(of_stages.items()):
        members: list[int] = []
        rows: list[tuple[int, int, int, int]] = []
        for index in indices:
            local, key = layouts[index].local_batch, points.key(layouts[index])
            known = [(points.positions.get((key, size)), size) for size in sizes[local]]
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


class Choice(NamedTuple):
    """Choices of a configuration besides its layout: schedule, chunks per stage, ZeRO stage, gradient overlap."""

    schedule: int
    chunks: int
    zero: int
    overlapped: bool

    @classmethod
    def named(cls, schedule: str, chunks: int, zero: int, *, overlapped: bool) -> Choice:
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
        Choice
            The choice.
        """
        return cls(list(SCHEDULES).index(schedule), chunks, zero, overlapped)


class EvaluatedCases(NamedTuple):
    """Evaluated configurations that share one choice: positions of their cases, step times [s], memory [byte].

    The memory is that of the fullest stage. ``before`` is the number of cases before those of this ``batch``. ``cut``
    holds the layers of each piece if a run has to state them.
    """

    batch: Batch
    cut: tuple[int, ...] | None
    before: int
    case: Codes
    step_time: Array
    memory: Array

    @property
    def choice(self) -> Choice:
        """Choice that all these configurations share."""
        batch = self.batch
        return Choice.named(
            batch.schedule.name, batch.assignment.chunks_per_stage, batch.zero, overlapped=batch.overlapped
        )


@dataclass(frozen=True, slots=True)
class Results:
    """Results of a search, one entry for each configuration.

    Each entry holds the position of its case and of its batch, the step time [s] and the bytes of the fullest stage. A
    case is a layout at a microbatch under a recompute policy (its position in `RECOMPUTE_POLICIES`). All cases of a
    batch belong to one group; ``before`` of a batch counts the cases of earlier groups.

    ``step_time`` follows the closed form of a schedule where it has one, which is approximate for unequal stages;
    `exact_step_times` is exact.
    """

    cases: tuple[Codes, Codes, Codes]
    batches: tuple[Batch, ...]
    cuts: tuple[tuple[int, ...] | None, ...]
    choices: tuple[Choice, ...]
    before: Codes
    case: Codes
    choice: Codes
    step_time: Array
    memory: Array

    def __len__(self) -> int:
        return len(self.step_time)

    @classmethod
    def of(cls, groups: Sequence[CaseGroup], solved: Sequence[EvaluatedCases]) -> Results:
        """Join the results of all parts, one part after another.

        Parameters
        ----------
        groups : sequence of CaseGroup
            Cases by number of stages.
        solved : sequence of EvaluatedCases
            Steps of the configurations of each choice.

        Returns
        -------
        Results
            Results of all configurations.
        """
        layouts = [np.array(group.layouts)[group.layout] for group in groups]
        figures = layouts, [group.microbatch for group in groups], [group.recompute for group in groups]
        cases = tuple(np.concatenate([np.zeros(0), *column]).astype(np.int32) for column in figures)
        columns = [[getattr(part, name) for part in solved] for name in ("case", "step_time", "memory")]
        case, step, memory = (np.concatenate([np.zeros(0, dtype=np.int32), *column]) for column in columns)
        choice = np.repeat(np.arange(len(solved), dtype=np.int32), [len(part) for part in columns[0]])
        batches = tuple(part.batch for part in solved)
        choices = tuple(part.choice for part in solved)
        cuts = tuple(part.cut for part in solved)
        before = np.array([part.before for part in solved], dtype=np.int32)
        return cls(cases, batches, cuts, choices, before, case, choice, step, memory)  # type: ignore[arg-type]

    def at(self, index: int) -> tuple[int, int, int, Choice]:
        """Return the indices and the choice of one configuration.

        Parameters
        ----------
        index : int
            Its position.

        Returns
        -------
        tuple[int, int, int, Choice]
            Layout, microbatch, recompute policy and choice.
        """
        layout, microbatch, recompute = (int(column[self.case[index]]) for column in self.cases)
        return layout, microbatch, recompute, self.choices[self.choice[index]]

    def find(self, layout: int, microbatch: int, recompute: int, choice: Choice, cut: tuple[int, ...] | None) -> Index:
        """Find the configurations with a given case, choice and cut.

        Parameters
        ----------
        layout : int
            Position of the layout.
        microbatch : int
            Samples.
        recompute : int
            Position of the recompute policy.
        choice : Choice
            The choice.
        cut : tuple of int, optional
            Layers of each piece; None for the default.

        Returns
        -------
        Index
            Positions.
        """
        case = (self.cases[0] == layout) & (self.cases[1] == microbatch) & (self.cases[2] == recompute)
        chosen = [each == choice and other == cut for each, other in zip(self.choices, self.cuts, strict=True)]
        return np.flatnonzero(case[self.case] & np.array(chosen, dtype=bool)[self.choice])

    def rows(self, indices: Index) -> Index:
        """Return the row of each configuration in the arrays of its batch of cases.

        Parameters
        ----------
        indices : Index, shape (n,)
            Numbers of configurations in this result.

        Returns
        -------
        Index, shape (n,)
            Rows within the batch.
        """
        return (self.case[indices] - self.before[self.choice[indices]]).astype(np.intp)

    def cut(self, index: int) -> tuple[int, ...] | None:
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
        return self.cuts[int(self.choice[index])]

    @property
    def exact(self) -> npt.NDArray[np.bool_]:
        """True for configurations whose step time is exact.

        It was computed pass by pass, or by a closed form that holds for them.
        """
        exact = [each.assignment.stages == 1 or each.schedule.closed_forms.exact_for == "any" for each in self.batches]
        return np.array(exact, dtype=bool)[self.choice]

    def exact_step_times(self, indices: Index) -> Array:
        """Compute the exact step times of configurations, pass by pass in the order of the schedule.

        Parameters
        ----------
        indices : Index
            Positions of the configurations.

        Returns
        -------
        ndarray, shape (configurations,)
            Time [s].
        """
        seconds = self.step_time[indices]
        for choice in distinct_values(self.choice[indices]):
            batch, places = self.batches[choice], np.flatnonzero(self.choice[indices] == choice)
            cases = self.rows(indices[places])
            arrival = batch.arrival[cases] if isinstance(batch.arrival, np.ndarray) else batch.arrival
            ordered = replace(
                batch, cases=batch.cases.select(cases), arrival=arrival, stage_end_method="order", cache=ResultCache()
            )
            seconds[places] = step(ordered).step_time
        return seconds

    @property
    def layout(self) -> Codes:
        """Index of the layout of each configuration, shape (configurations,)."""
        return self.cases[0][self.case]

    @property
    def microbatch(self) -> Codes:
        """Microbatch of each configuration [samples], shape (configurations,)."""
        return self.cases[1][self.case]

    @property
    def recompute(self) -> Codes:
        """Index of the recompute policy of each configuration in `RECOMPUTE_POLICIES`, shape (configurations,)."""
        return self.cases[2][self.case]

    def choice_field(self, name: str) -> Codes:
        """Return a field of the choice of every configuration.

        Parameters
        ----------
        name : str
            Field of `Choice`.

        Returns
        -------
        Codes, shape (configurations,)
            Values.
        """
        return np.array([getattr(choice, name) for choice in self.choices])[self.choice]
