"""The configurations of a search as arrays: layouts at a microbatch under a recomputation, their other choices, and
their results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.policies import RECOMPUTE
from paleo.schedules.base import SCHEDULES
from paleo.search.space import microbatches
from paleo.step.layouts import Shared
from paleo.step.step import step

if TYPE_CHECKING:
    from paleo.search.block_costs import Points
    from paleo.search.space import Layout, Space
    from paleo.step.batch import Batch

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Codes = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class CaseGroup:
    """Layouts of one number of stages, and their cases: positions of layouts, points and recompute policies, one entry
    a case. ``before`` are cases of groups before it; ``first`` is a case of each layout."""

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


def groups(points: Points, layouts: Sequence[Layout], space: Space) -> Iterator[CaseGroup]:
    """The cases of a search, those of one stage first."""
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
            policies = [RECOMPUTE.index(name) for name in space.recompute]
            layout_of, point_of, size, count = (np.tile(row, len(policies)) for row in np.array(rows, np.intp).T)
            first = np.flatnonzero(np.diff(layout_of[: len(rows)], prepend=-1))
            counts = size.astype(np.float64), count.astype(np.float64), np.repeat(policies, len(rows))
            yield CaseGroup(stages, before, tuple(members), first, layout_of, point_of, *counts)
            before += len(layout_of)


class Choice(NamedTuple):
    """What configurations of many layouts have in common: position in `SCHEDULES`, chunks of a stage, ZeRO's stage,
    whether gradients travel during backward."""

    schedule: int
    chunks: int
    zero: int
    overlapped: bool

    @classmethod
    def named(cls, schedule: str, chunks: int, zero: int, *, overlapped: bool) -> Choice:
        """From the name of a schedule."""
        return cls(list(SCHEDULES).index(schedule), chunks, zero, overlapped)


class Solved(NamedTuple):
    """Configurations of one choice: positions of their cases among all, of which ``before`` come before those of their
    ``batch``, seconds of a step, bytes of the fullest stage. ``cut``: layers of each piece, where they have to be
    stated."""

    batch: Batch
    cut: tuple[int, ...] | None
    before: int
    case: Codes
    step_time: Array
    memory: Array

    @property
    def choice(self) -> Choice:
        """The choices that the cases have in common."""
        batch = self.batch
        return Choice.named(batch.schedule.name, batch.assignment.chunks, batch.zero, overlapped=batch.overlapped)


@dataclass(frozen=True, slots=True)
class Results:
    """One entry for each configuration: position of its case and of its batch, seconds of a step, bytes of the fullest
    stage. A case is a layout (its position) at a microbatch under a recompute policy (its position in `RECOMPUTE`).
    The cases of a batch are all of a group; ``before`` of a batch are those of the groups before that.

    ``step_time`` is by closed forms where a schedule has any, which are near on unequal stages; `by_order` is exact."""

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
    def of(cls, groups: Sequence[CaseGroup], solved: Sequence[Solved]) -> Results:
        """The solved cases of all parts, one part after another."""
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
        """Layout, microbatch, recomputation and choice of one configuration."""
        layout, microbatch, recompute = (int(column[self.case[index]]) for column in self.cases)
        return layout, microbatch, recompute, self.choices[self.choice[index]]

    def rows(self, indices: Index) -> Index:
        """Where configurations stand among the cases of their batch."""
        return (self.case[indices] - self.before[self.choice[indices]]).astype(np.intp)

    def cut(self, index: int) -> tuple[int, ...] | None:
        """Layers of each piece of one configuration, where a run has to state them."""
        return self.cuts[int(self.choice[index])]

    @property
    def exact(self) -> npt.NDArray[np.bool_]:
        """Whether the step of each configuration is that of its schedule's order."""
        exact = [each.assignment.stages == 1 or each.schedule.closed.exact == "any" for each in self.batches]
        return np.array(exact, dtype=bool)[self.choice]

    def by_order(self, indices: Index) -> Array:
        """Seconds of steps of some configurations, each pass in the order of its schedule."""
        seconds = self.step_time[indices]
        for choice in np.unique(self.choice[indices]).tolist():
            batch, places = self.batches[choice], np.flatnonzero(self.choice[indices] == choice)
            cases = self.rows(indices[places])
            arrival = batch.arrival[cases] if isinstance(batch.arrival, np.ndarray) else batch.arrival
            ordered = replace(batch, cases=batch.cases.of(cases), arrival=arrival, ends="order", shared=Shared())
            seconds[places] = step(ordered).step_time
        return seconds

    @property
    def layout(self) -> Codes:
        """Positions of layouts."""
        return self.cases[0][self.case]

    @property
    def microbatch(self) -> Codes:
        """Samples of a microbatch."""
        return self.cases[1][self.case]

    @property
    def recompute(self) -> Codes:
        """Positions in `RECOMPUTE`."""
        return self.cases[2][self.case]

    def chosen(self, name: str) -> Codes:
        """A field of `Choice`."""
        return np.array([getattr(choice, name) for choice in self.choices])[self.choice]
