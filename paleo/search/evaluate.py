"""Every configuration of a search: cases grouped by equal structure, and `paleo.step.step.step` for each group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.lowering.policies import Policies
from paleo.parallel.placement import has_shard_groups
from paleo.schedules.base import SCHEDULES
from paleo.search.configurations import Results, Solved, groups
from paleo.search.cuts import Cuts, chunk_counts
from paleo.step.batch import Batch, Cases
from paleo.step.layouts import Layouts, Shared
from paleo.step.memory import Assignment, Kinds, StageKinds
from paleo.step.pipeline import iteration_seconds
from paleo.step.section_times import layer_times
from paleo.step.step import step
from paleo.step.streams import tails

if TYPE_CHECKING:
    from paleo.lowering.program import Program
    from paleo.schedules.base import Schedule
    from paleo.search.block_costs import Points
    from paleo.search.configurations import CaseGroup
    from paleo.search.space import Layout, Space
    from paleo.step.backend import Backend
    from paleo.step.step import StepArrays

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


def evaluate(points: Points, layouts: Sequence[Layout], space: Space, backend: Backend) -> Results:
    """Every configuration of the space over the layouts."""
    case_groups = list(groups(points, layouts, space))
    solved: list[Solved] = []
    for group in case_groups:
        members = _Members.of(points, layouts, space, backend, group)
        solved += members.single() if group.stages == 1 else members.pipelined()
        members.cases.shared.forget()
        members.cases.layouts.shared.forget()
    return Results.of(case_groups, solved)


@dataclass(frozen=True, slots=True)
class _Cut:
    """The network laid over the stages of some cases, as ``schedules`` do; ``stated``: layers of each piece, where a
    run has to say them. With ``sharded`` parameters it is cut apart, as their gathers weigh, too."""

    cases: Index
    sharded: bool
    schedules: list[Schedule]
    assignment: Assignment
    stated: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Members:
    """The cases of a group with their times, seconds in which the batch of each arrives, and whether it spreads
    experts."""

    group: CaseGroup
    space: Space
    backend: Backend
    programs: tuple[Program, ...]
    block_of: Index
    cases: Cases
    arrival: Array
    spread: npt.NDArray[np.bool_]

    @classmethod
    def of(
        cls, points: Points, layouts: Sequence[Layout], space: Space, backend: Backend, group: CaseGroup
    ) -> _Members:
        """The evaluations of a group."""
        members = [layouts[index] for index in group.layouts]
        block_of = points.block_of[group.point]
        programs = tuple(points.programs[block] for block in block_of[group.first])
        meshes, sequence = tuple(each.mesh for each in members), tuple(each.sequence_parallel for each in members)
        repeat = points.costs.repeat
        hows = group.recompute if not backend.run.forward_only else np.zeros_like(group.recompute)
        times = layer_times(points.costs.of(group.point), Policies.of_configurations(repeat, hows))
        local_batches = tuple(each.local_batch for each in members)
        group_layouts = Layouts(backend, meshes, programs, sequence, local_batches)
        cases = Cases(group_layouts, group.layout, group.microbatches, times)
        arrival = _arrival(points, members, backend)[group.layout]
        spread = np.array([each.experts > 1 for each in members])[group.layout]
        return cls(group, space, backend, points.programs, block_of, cases, arrival, spread)

    @property
    def several(self) -> npt.NDArray[np.bool_]:
        """Cases whose states may be shared out over several ranks."""
        return self.cases.layouts.shards[self.cases.layout] > 1

    @property
    def zero(self) -> tuple[int, ...]:
        """Stages of ZeRO; a shard group has states to share out. ZeRO-2 of software that scatters gradients once a step
        is ZeRO-1."""
        least = 1 if has_shard_groups(self.space.degrees) else 0
        same = {2} if 1 in self.space.zero and not self.backend.scatters(2, self.group.stages) else set[int]()
        return tuple(zero for zero in self.space.zero if zero >= least and zero not in same)

    def single(self) -> Iterator[Solved]:
        """Configurations without a pipeline."""
        schedule, sections = SCHEDULES["1f1b"], self.programs[0].sections
        whole = [tuple((index, section.repeat) for index, section in enumerate(sections))]
        assignment = Assignment.of(whole, schedule, 1, 1, self.programs[0].ties, Kinds(StageKinds(), StageKinds()))
        indices, several = np.arange(len(self.cases)), np.flatnonzero(self.several)
        sharing = {False: (self.cases, Shared()), True: (self.cases.of(several), Shared())}
        for overlapped in modes(self.space, self.backend):
            for zero in self.zero:
                cases, shared = sharing[zero > 0]
                index = several if zero else indices
                steps = self._steps(index, cases, assignment, schedule, shared, zero=zero, overlapped=overlapped)
                yield self._solved(index, steps)

    def pipelined(self) -> Iterator[Solved]:
        """Configurations of two stages or more."""
        for cut in list(self._cuts()):  # all of them first: what they have in common is priced once
            yield from self._scheduled(cut)

    def _scheduled(self, cut: _Cut) -> Iterator[Solved]:
        """The schedules that lay a cut over the stages in the same way."""
        is_complete = len(cut.cases) == len(self.cases)
        cases, shared = self.cases if is_complete else self.cases.of(cut.cases), Shared()
        for schedule in cut.schedules:
            runnable = schedule.runs(self.group.stages, cases.microbatches)
            if cut.sharded:
                runnable = runnable & self.several[cut.cases]
            if schedule.pairs and pairs_imply_overlap(self.backend):
                runnable = runnable & ~self.spread[cut.cases]
            if runnable.all():
                yield from self._chosen(cut, schedule, cut.cases, cases, shared)
            elif runnable.any():
                inside = np.flatnonzero(runnable)
                yield from self._chosen(cut, schedule, cut.cases[inside], cases.of(inside), Shared())

    def _chosen(self, cut: _Cut, schedule: Schedule, index: Index, cases: Cases, shared: Shared) -> Iterator[Solved]:
        """What each ZeRO stage and each way to exchange gradients makes of some cases."""
        several = self.several[index]
        for zero in (zero for zero in self.zero if (zero == 3) == cut.sharded):
            if self.backend.scatters(zero, self.group.stages) and not several.all():
                rows = np.flatnonzero(several)  # of these alone are gradients scattered
                yield from self._exchanged(cut, schedule, zero, index[rows], cases.of(rows), Shared())
            else:
                yield from self._exchanged(cut, schedule, zero, index, cases, shared)

    def _exchanged(
        self, cut: _Cut, schedule: Schedule, zero: int, index: Index, cases: Cases, shared: Shared
    ) -> Iterator[Solved]:
        """What each way to exchange gradients makes of some cases under one stage of ZeRO."""
        choices, several = modes(self.space, self.backend), self.several[index]
        for overlapped in choices:
            chosen = several if zero else np.ones_like(several)
            if overlapped and len(choices) > 1 and not cut.sharded:
                following = tails(cases.layouts, cut.assignment, zero, overlapped=True)
                chosen = chosen & following.sends[cases.layout]
            if len(index):
                steps = self._steps(index, cases, cut.assignment, schedule, shared, zero=zero, overlapped=overlapped)
                yield self._solved(index, steps, chosen, cut.stated)

    def _steps(
        self,
        index: Index,
        cases: Cases,
        assignment: Assignment,
        schedule: Schedule,
        shared: Shared,
        *,
        zero: int,
        overlapped: bool,
    ) -> StepArrays:
        """Steps of cases that stand at some positions of the group, their stages' ends in closed form."""
        arrival = self.arrival[index]
        return step(
            Batch(
                cases,
                assignment,
                schedule=schedule,
                zero=zero,
                overlapped=overlapped,
                arrival=arrival,
                ends="closed",
                shared=shared,
            )
        )

    def _solved(
        self,
        index: Index,
        steps: StepArrays,
        chosen: npt.NDArray[np.bool_] | None = None,
        stated: tuple[int, ...] | None = None,
    ) -> Solved:
        """Steps of the cases at some positions; of these, those that are configurations of their own."""
        case = (index + self.group.before).astype(np.int32)
        # the cases of the group, which all of its batches share: those of a cut alone would take much memory
        batch = replace(steps.batch, cases=self.cases, arrival=self.arrival, shared=Shared())
        step_time, memory = steps.step_time, steps.memory
        if chosen is not None and not chosen.all():
            case, step_time, memory = case[chosen], step_time[chosen], memory[chosen]
        return Solved(batch, stated, self.group.before, case, step_time, memory)

    # cuts

    def _cuts(self) -> Iterator[_Cut]:
        """Every way to cut the network and to lay it over the stages."""
        stages, ties = self.group.stages, self.programs[0].ties
        kinds = Kinds(StageKinds(), StageKinds())
        for sharded in (False, True) if self.space.sharded_pipelines else (False,):
            times, layouts = self.cases.times, self.cases.layouts
            seconds = iteration_seconds(times, layouts, self.cases.layout, sharded=sharded)
            cuts = Cuts(self.programs, self.block_of, seconds, self.backend)
            for chunks in chunk_counts(self.programs[0], stages, self.space, self.backend):
                for pieces, cases, stated in cuts.of(stages * chunks):
                    for schedules in self._schedules_by_cut(chunks):
                        assignment = Assignment.of(pieces, schedules[0], stages, chunks, ties, kinds)
                        yield _Cut(cases, sharded, schedules, assignment, stated)

    def _schedules_by_cut(self, chunks: int) -> list[list[Schedule]]:
        """Schedules that lay a cut over the stages in the same way."""
        shared: dict[tuple[object, ...], list[Schedule]] = {}
        stages = self.group.stages
        for schedule in (SCHEDULES[name] for name in self.space.schedules):
            if schedule.takes(chunks):
                places = schedule.pieces(stages, chunks), schedule.sends_output(stages, chunks)
                shared.setdefault((*places, schedule.copies), []).append(schedule)
        return list(shared.values())


def pairs_imply_overlap(backend: Backend) -> bool:
    """Whether tokens travel beside computation under schedules that pair passes alone (`Schedule.pairs`), so that other
    prices hold there."""
    return backend.software.overlap.experts is None


def modes(space: Space, backend: Backend) -> tuple[bool, ...]:
    """Whether gradients travel during backward: as the run or the space says, else both ways."""
    if space.overlapped is not None:
        return (space.overlapped,)
    return (False, True) if backend.run.exchange is None else (backend.overlapped,)


def _arrival(points: Points, members: Sequence[Layout], backend: Backend) -> Array:
    """Seconds in which the batch of each layout arrives; 0 for synthetic data: (layouts,)."""
    replica = np.array([each.mesh.size / each.mesh.replicas for each in members])
    local = np.array([float(each.local_batch) for each in members])
    arriving = backend.input_pipeline(points.graph, backend.run.gpus, replica, local)
    return np.zeros(len(members)) if arriving is None else np.asarray(arriving.total)
