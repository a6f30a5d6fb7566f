"""Evaluation of the configurations of a plan search.

Configurations of equal structure (pipeline cut, schedule, ZeRO stage) are computed together as arrays, by
`paleo.step.step.predict_steps`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES, RecomputePolicies
from paleo.parallel.placement import has_shard_groups
from paleo.schedules.base import SCHEDULES, Schedule
from paleo.search.bounds import ConfigurationBounds, SearchLimits, pareto_front
from paleo.search.configurations import ConfigurationResults, EqualDepthCases, EvaluatedCases, cases_by_pipeline_depth
from paleo.search.partial_recompute import full_recompute_counterparts
from paleo.search.pipeline_cuts import PipelineCuts, candidate_chunk_counts
from paleo.step.configuration_batch import ConfigurationBatch, LayoutConfigurations
from paleo.step.layouts import Layouts, ResultCache
from paleo.step.memory import DistinctStages, DistinctStagesAndChunks, StageAssignment
from paleo.step.pipeline import layer_iteration_times, stage_end_times
from paleo.step.section_times import layer_times
from paleo.step.step import fullest_stage_memory, predict_steps
from paleo.step.streams import layout_times_after_backward

if TYPE_CHECKING:
    from paleo.lowering.program import Program
    from paleo.search.layout_costs import LayoutTimes
    from paleo.search.space import Layout, SearchSpace
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True)
class ConfigurationEvaluator:
    """Cases of a plan search (layout, microbatch, recompute policy), with methods to evaluate, bound and count them.

    Attributes
    ----------
    layout_times : LayoutTimes
        Layer times of every layout and microbatch.
    layouts : sequence of Layout
        Layouts of the search: meshes of ranks and how they are used.
    space : SearchSpace
        Choices of the search.
    backend : Backend
        Software, kernel times and links of the run.
    """

    layout_times: LayoutTimes
    layouts: Sequence[Layout]
    space: SearchSpace
    backend: Backend

    @cached_property
    def _members(self) -> tuple[_Members, ...]:
        """Cases of the search in groups with equal numbers of pipeline stages."""
        each = (self.layout_times, self.layouts, self.space, self.backend)
        return tuple(
            _Members.from_group(*each, group)
            for group in cases_by_pipeline_depth(self.layout_times, self.layouts, self.space)
        )

    def evaluate(self, limits: SearchLimits | None = None) -> ConfigurationResults:
        """Compute step time and memory of each configuration, or of those that can reach given limits.

        Parameters
        ----------
        limits : SearchLimits, optional
            Step time and memory that a configuration must reach; those that cannot are left out. None evaluates all.

        Returns
        -------
        ConfigurationResults
            One entry for each configuration.
        """
        solved: list[EvaluatedCases] = []
        case_groups: list[EqualDepthCases] = []
        for members in self._members:
            for part in (
                [members] if limits is None else members.narrow_to_limits(self.layout_times, self.layouts, limits)
            ):
                part = replace(part, group=replace(part.group, case_offset=sum(map(len, case_groups))))
                solved += (
                    part.evaluate_unpipelined(limits) if part.group.stages == 1 else part.evaluate_pipelined(limits)
                )
                case_groups.append(part.group)
                part.cases.cache.clear()
                part.cases.layouts.cache.clear()
        return ConfigurationResults.from_groups(case_groups, solved)

    def smallest_lower_bounds(self, capacity: float, count: int) -> SmallestLowerBounds:
        """Return the smallest lower bounds of step time, and lower bounds of the Pareto front of time and memory.

        The search evaluates the configurations with these bounds first, to learn which others it can leave out.

        Parameters
        ----------
        capacity : float
            Memory of a device [byte].
        count : int
            Number of shortest step times to bound.

        Returns
        -------
        SmallestLowerBounds
            Lower bounds of step times [s] and of memory [byte].
        """
        candidates = []
        for members in self._members:
            promising = members.promising_cases(capacity, count)
            if len(promising):
                chosen = members.group.select_cases(promising, 0)
                part = _Members.from_group(self.layout_times, self.layouts, self.space, self.backend, chosen)
                candidates.append(part.best_bounds(capacity, count))
        return SmallestLowerBounds.join(candidates, count)

    @property
    def configuration_count(self) -> int:
        """Number of configurations of all cases, counting one pipeline cut for each case."""
        return sum(members.configuration_count for members in self._members)


class SmallestLowerBounds(NamedTuple):
    """Smallest lower bounds of step time of plans that may fit in memory [s], and the Pareto front of bounds."""

    step_time_bounds: Array
    pareto_bounds: tuple[Array, Array]

    @classmethod
    def join(cls, parts: Sequence[SmallestLowerBounds], count: int) -> SmallestLowerBounds:
        """Merge the bounds of several groups of cases.

        Parameters
        ----------
        parts : sequence of SmallestLowerBounds
            Bounds of each group.
        count : int
            Number of shortest steps to return.

        Returns
        -------
        SmallestLowerBounds
            Shortest step times and Pareto front of all groups together.
        """
        seconds = np.sort(np.concatenate([np.zeros(0), *(part.step_time_bounds for part in parts)]))[:count]
        fronts = zip(*(part.pareto_bounds for part in parts), strict=True)
        times, sizes = (np.concatenate([np.zeros(0), *each]) for each in (fronts if parts else ((), ())))
        return cls(seconds, pareto_front(times, sizes))


@dataclass(frozen=True, slots=True)
class _Cut:
    """Cut of the network into pipeline stages, with the cases and the ``schedules`` that it is used for.

    ``layers_per_piece`` holds the layers of each piece, or None for the framework's default cut. Cuts for ZeRO-3
    (``has_sharded_parameters``) are separate, because gathering parameters adds to the time of a layer.
    """

    cases: IndexArray
    has_sharded_parameters: bool
    schedules: list[Schedule]
    assignment: StageAssignment
    layers_per_piece: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class _Members:
    """Evaluator of cases with the same number of pipeline stages, with the times of their layers.

    A case is a layout at a microbatch under a recompute policy. ``input_arrival_times`` is the interval at which input
    batches of each case arrive [s]. ``has_spread_experts`` is True for cases whose experts are spread over ranks.
    ``full_recompute_case`` is the index of the otherwise equal case that recomputes every layer.
    """

    group: EqualDepthCases
    space: SearchSpace
    backend: Backend
    programs: tuple[Program, ...]
    program_of_case: IndexArray
    cases: LayoutConfigurations
    input_arrival_times: Array
    has_spread_experts: npt.NDArray[np.bool_]
    full_recompute_case: IndexArray

    @classmethod
    def from_group(
        cls,
        points: LayoutTimes,
        layouts: Sequence[Layout],
        space: SearchSpace,
        backend: Backend,
        group: EqualDepthCases,
    ) -> _Members:
        """Build the evaluator of a group of cases: collect their programs, layer times and input arrival times.

        Parameters
        ----------
        points : LayoutTimes
            Times and bytes of the layers of all layouts and microbatches.
        layouts : sequence of Layout
            Layouts of the search.
        space : SearchSpace
            What the search varies.
        backend : Backend
            Backend that times kernels and collectives.
        group : EqualDepthCases
            Cases with the same number of pipeline stages.

        Returns
        -------
        _Members
            Cases of the group, in its order.
        """
        members = [layouts[index] for index in group.layouts]
        block_of = points.program_index[group.layer_times_index]
        programs = tuple(points.programs[block] for block in block_of[group.first_case_of_layout])
        meshes, sequence = tuple(each.mesh for each in members), tuple(each.sequence_parallel for each in members)
        repeat = points.times_by_section.repeat
        hows = group.recompute_index if not backend.run.forward_only else np.zeros_like(group.recompute_index)
        times = layer_times(
            points.times_by_section.select_configurations(group.layer_times_index),
            RecomputePolicies.for_configurations(repeat, hows),
        )
        local_batches = tuple(each.local_batch for each in members)
        group_layouts = Layouts(backend, meshes, programs, sequence, local_batches, program_cache=points.program_cache)
        cases = LayoutConfigurations(group_layouts, group.layout_index, group.microbatch_count, times)
        arrival = _arrival(points, members, backend)[group.layout_index]
        spread = np.array([each.expert_ranks > 1 for each in members])[group.layout_index]
        twin = full_recompute_counterparts(
            (group.layout_index, group.microbatch.astype(np.intp), group.recompute_index)
        )
        return cls(group, space, backend, points.programs, block_of, cases, arrival, spread, twin)

    @property
    def _has_several_shards(self) -> npt.NDArray[np.bool_]:
        """True for cases whose optimizer states ZeRO can shard over several ranks, shape (cases,)."""
        return self.cases.layouts.zero_shard_ranks[self.cases.layout_index] > 1

    @property
    def _allowed_zero_stages(self) -> tuple[int, ...]:
        """ZeRO stages that the search tries for these cases.

        Shard groups (HSDP) need stage 1 at least. ZeRO-2 is dropped where ZeRO-1 is tried and the software scatters
        gradients once a step, because both are then the same.
        """
        least = 1 if has_shard_groups(self.space.degrees) else 0
        same = (
            {2} if 1 in self.space.zero and not self.backend.scatters_every_pass(2, self.group.stages) else set[int]()
        )
        return tuple(zero for zero in self.space.zero if zero >= least and zero not in same)

    def evaluate_unpipelined(self, limits: SearchLimits | None) -> Iterator[EvaluatedCases]:
        """Evaluate the configurations that have no pipeline.

        Parameters
        ----------
        limits : SearchLimits or None
            Step time and memory that a configuration must reach; those that cannot are left out. None evaluates all.

        Yields
        ------
        EvaluatedCases
            Step times [s] and memory [byte] of the cases under one ZeRO stage and one overlap of the exchange.
        """
        schedule, sections = SCHEDULES["1f1b"], self.programs[0].sections
        whole = [tuple((index, section.repeat) for index, section in enumerate(sections))]
        assignment = StageAssignment.from_schedule(
            whole,
            schedule,
            1,
            1,
            self.programs[0].tied_parameters,
            DistinctStagesAndChunks(DistinctStages(), DistinctStages()),
        )
        chosen = {zero: self._chosen_whole(schedule, zero, limits) for zero in self._allowed_zero_stages}
        batches = {index.tobytes(): self._batch(index, assignment, schedule) for index in chosen.values()}
        for overlapped in _gradient_overlap_options(self.space, self.backend):
            for zero, index in chosen.items():
                if len(index):
                    batch = replace(batches[index.tobytes()], zero=zero, overlaps_gradient_exchange=overlapped)
                    yield self._evaluated(index, batch)

    def _chosen_whole(self, schedule: Schedule, zero: int, limits: SearchLimits | None) -> IndexArray:
        """Return the indices of unpipelined cases that may reach the limits under a ZeRO stage."""
        inside = self._has_several_shards if zero else np.ones(len(self.cases), dtype=bool)
        if limits is not None:
            bounds = self._bounds(sharded=False)
            seconds, memory = (b(schedule, 1, zero) for b in (bounds.step_time_lower_bound, bounds.memory_lower_bound))
            inside = inside & self._reached(limits, seconds, memory, exact=True)
        return np.flatnonzero(inside)

    def evaluate_pipelined(self, limits: SearchLimits | None) -> Iterator[EvaluatedCases]:
        """Evaluate the configurations that have two or more pipeline stages.

        Parameters
        ----------
        limits : SearchLimits or None
            Step time and memory that a configuration must reach; those that cannot are left out. None evaluates all.

        Yields
        ------
        EvaluatedCases
            Step times [s] and memory [byte] of the cases that share one choice, such as a schedule.
        """
        for cut in list(self._cuts(limits)):  # listed before any is evaluated, so that common parts are priced once
            yield from self._scheduled(cut, limits)

    def _scheduled(self, cut: _Cut, limits: SearchLimits | None) -> Iterator[EvaluatedCases]:
        """Evaluate the cases of one pipeline cut under each of its schedules; yield the results."""
        whole, zeros = self._batch(cut.cases, cut.assignment, cut.schedules[0]), self._zeros(cut.has_sharded_parameters)
        for schedule in cut.schedules:
            batch, tried = replace(whole, schedule=schedule), zeros
            runnable = self._runnable(schedule, cut.has_sharded_parameters)[cut.cases]
            if limits is not None and not cut.has_sharded_parameters and runnable.any():
                reached = self._reached_when_cut(cut, batch, zeros, limits)
                tried = tuple(zero for zero in zeros if (reached[zero] & runnable).any())
                runnable = runnable & np.logical_or.reduce([reached[zero] for zero in tried] or [~runnable])
            if runnable.any():
                yield from self._chosen(cut, tried, *_select(cut.cases, batch, runnable))

    def _reached_when_cut(
        self, cut: _Cut, batch: ConfigurationBatch, zeros: Sequence[int], limits: SearchLimits
    ) -> dict[int, npt.NDArray[np.bool_]]:
        """Return, for each ZeRO stage, True for the cases of a cut that may still reach the search limits.

        The bounds are the end of the last pass and the memory of the fullest stage, which are known once the cut is.
        """
        # gradients that are exchanged during the backward pass take less memory
        least = any(_gradient_overlap_options(self.space, self.backend))
        batch = replace(batch, overlaps_gradient_exchange=least)
        (seconds, memory), reached = np.full((2, len(self.cases)), np.inf), dict[int, npt.NDArray[np.bool_]]()
        seconds[cut.cases] = 0.0 if limits.are_estimates else stage_end_times(batch).max(axis=0)
        for zero in zeros:
            memory[cut.cases] = fullest_stage_memory(replace(batch, zero=zero))
            reached[zero] = self._reached(limits, seconds, memory, exact=self._exact(batch.schedule))[cut.cases]
        return reached

    def _chosen(
        self, cut: _Cut, zeros: Sequence[int], index: IndexArray, batch: ConfigurationBatch
    ) -> Iterator[EvaluatedCases]:
        """Evaluate cases of a cut, at positions ``index``, under each ZeRO stage and way to exchange gradients."""
        several = self._has_several_shards[index]
        for zero in zeros:
            # gradients are scattered in cases with several shards only
            scatters = self.backend.scatters_every_pass(zero, self.group.stages)
            rows = several if scatters else np.ones_like(several)
            if rows.any():
                yield from self._exchanged(cut, zero, *_select(index, batch, rows))

    def _exchanged(
        self, cut: _Cut, zero: int, index: IndexArray, batch: ConfigurationBatch
    ) -> Iterator[EvaluatedCases]:
        """Evaluate cases of a cut under one ZeRO stage and each way to exchange gradients (overlapped or not)."""
        choices, several = _gradient_overlap_options(self.space, self.backend), self._has_several_shards[index]
        for overlapped in choices:
            chosen = several if zero else np.ones_like(several)
            if overlapped and len(choices) > 1 and not cut.has_sharded_parameters:
                following = layout_times_after_backward(batch.layouts, cut.assignment, zero, overlapped=True)
                chosen = chosen & following.has_communication[batch.cases.layout_index]
            exchanged = replace(batch, zero=zero, overlaps_gradient_exchange=overlapped)
            yield self._evaluated(index, exchanged, chosen, cut.layers_per_piece)

    def _batch(self, index: IndexArray, assignment: StageAssignment, schedule: Schedule) -> ConfigurationBatch:
        """Return the cases at positions ``index`` as a batch, without ZeRO and with gradients exchanged at the end."""
        return ConfigurationBatch(
            self.cases if len(index) == len(self.cases) else self.cases.select(index),
            assignment,
            schedule=schedule,
            zero=0,
            overlaps_gradient_exchange=False,
            input_arrival_time=self.input_arrival_times[index],
            stage_end_method="closed",
        )

    def _evaluated(
        self,
        index: IndexArray,
        batch: ConfigurationBatch,
        chosen: npt.NDArray[np.bool_] | None = None,
        layers_per_piece: tuple[int, ...] | None = None,
    ) -> EvaluatedCases:
        """Predict the steps of a batch, which holds the cases at positions ``index``; return the ``chosen`` ones."""
        steps = predict_steps(batch)
        case = (index + self.group.case_offset).astype(np.int32)
        # the cases of the group, which all of its batches share: those of a cut alone would take much memory
        batch = replace(steps.batch, cases=self.cases, input_arrival_time=self.input_arrival_times, cache=ResultCache())
        step_time, memory = steps.step_time, steps.fullest_stage_memory
        if chosen is not None and not chosen.all():
            case, step_time, memory = case[chosen], step_time[chosen], memory[chosen]
        return EvaluatedCases(batch, layers_per_piece, self.group.case_offset, case, step_time, memory)

    # cuts

    def _bounds(self, *, sharded: bool) -> ConfigurationBounds:
        """Return lower bounds of step time and memory of the cases; ``sharded`` selects ZeRO-3 pipelines."""
        return self.cases.cache.get_or_compute(("bounds", sharded), lambda: self._uncached_bounds(sharded))

    def _uncached_bounds(self, sharded: bool) -> ConfigurationBounds:
        times, layouts = self.cases.layer_times, self.cases.layouts
        seconds = layer_iteration_times(times, layouts, self.cases.layout_index, sharded=sharded)
        return ConfigurationBounds(
            self.cases, PipelineCuts(self.programs, self.program_of_case, seconds, self.backend), self.group.stages
        )

    def _cuts(self, limits: SearchLimits | None) -> Iterator[_Cut]:
        """Yield every pipeline cut that the search tries, with the cases that may reach the limits."""
        stages, ties = self.group.stages, self.programs[0].tied_parameters
        kinds = DistinctStagesAndChunks(DistinctStages(), DistinctStages())
        for sharded in (False, True) if self.space.zero3_pipelines else (False,):
            bounds = self._bounds(sharded=sharded)
            for chunks in candidate_chunk_counts(self.programs[0], stages, self.space, self.backend):
                for schedules in self._schedules_by_assignment(chunks):
                    mask = self._wanted(bounds, chunks, schedules, limits, sharded)
                    if not mask.any():
                        continue
                    for pieces, cases, stated in bounds.cuts.candidate_partitions(
                        schedules[0].chunk_stages(stages, chunks), mask
                    ):
                        if mask[cases].any():
                            assignment = StageAssignment.from_schedule(
                                pieces, schedules[0], stages, chunks, ties, kinds
                            )
                            yield _Cut(cases[mask[cases]], sharded, schedules, assignment, stated)

    def _wanted(
        self,
        bounds: ConfigurationBounds,
        chunks: int,
        schedules: Sequence[Schedule],
        limits: SearchLimits | None,
        sharded: bool,
    ) -> npt.NDArray[np.bool_]:
        """Return True for cases that may reach the limits under any of the schedules, shape (cases,).

        Lower bounds of step time and memory decide.
        """
        if limits is None:
            return np.ones(len(self.cases), dtype=bool)
        mask = np.zeros(len(self.cases), dtype=bool)
        for schedule in schedules:
            reached = [self._reached_by_bounds(bounds, schedule, chunks, zero, limits) for zero in self._zeros(sharded)]
            mask |= self._runnable(schedule, sharded) & np.logical_or.reduce(reached)
        return mask

    def _reached_by_bounds(
        self, bounds: ConfigurationBounds, schedule: Schedule, chunks: int, zero: int, limits: SearchLimits
    ) -> npt.NDArray[np.bool_]:
        """Return True for cases whose lower bounds of step time and memory may reach the limits, shape (cases,)."""
        seconds = bounds.step_time_lower_bound(schedule, chunks, zero, expected=limits.are_estimates)
        memory = bounds.memory_lower_bound(schedule, chunks, zero, expected=limits.are_estimates)
        return self._reached(limits, seconds, memory, exact=self._exact(schedule))

    def _exact(self, schedule: Schedule) -> bool:
        """Return True if the closed form of a schedule also holds for unequal stages."""
        return self.group.stages == 1 or schedule.closed_forms.exact_for_stages == "any"

    def _reached(self, limits: SearchLimits, seconds: Array, memory: Array, *, exact: bool) -> npt.NDArray[np.bool_]:
        """Return True for cases whose bounds of step time [s] and memory [byte] may reach the limits, shape (cases,).

        A case that fits only if some layers are recomputed counts too, together with the otherwise equal case that
        recomputes every layer.
        """
        reached = limits.may_be_optimal(seconds, memory, exact=exact)
        twin, plain = self.full_recompute_case, self.group.recompute_index == RECOMPUTE_POLICIES.index("none")
        partly = np.flatnonzero(plain & (twin >= 0) & (seconds <= limits.max_step_time))
        partly = partly[memory[twin[partly]] <= limits.memory_capacity]
        reached[partly] = reached[twin[partly]] = True
        return reached

    def narrow_to_limits(
        self, points: LayoutTimes, layouts: Sequence[Layout], limits: SearchLimits
    ) -> Iterator[_Members]:
        """Yield the cases that may reach the search limits, as smaller groups.

        Schedules whose closed forms are exact and other schedules get separate groups.

        Parameters
        ----------
        points : LayoutTimes
            Times and bytes of the layers of all layouts and microbatches.
        layouts : sequence of Layout
            Layouts of the search.
        limits : SearchLimits
            Step time [s] and memory [byte] that a configuration has to reach.

        Yields
        ------
        _Members
            Cases of this group under some of its schedules; groups without cases are left out.
        """
        seconds, memory = self._bounds(sharded=False).schedule_independent_bounds(self._most_shared)
        names = self.space.schedules if self.group.stages > 1 else ("1f1b",)
        for exact in (True, False):
            chosen = [name for name in names if exact == self._exact(SCHEDULES[name])]
            near = np.flatnonzero(self._reached(limits, seconds, memory, exact=exact))
            if not (chosen and len(near)):
                continue
            space = replace(self.space, schedules=tuple(chosen))
            members = _Members.from_group(points, layouts, space, self.backend, self.group.select_cases(near, 0))
            reaching = np.flatnonzero(members.may_reach_limits(limits))
            if len(reaching):
                yield _Members.from_group(points, layouts, space, self.backend, members.group.select_cases(reaching, 0))

    def promising_cases(self, capacity: float, count: int) -> IndexArray:
        """Return the cases that a search should evaluate first.

        These are the cases with the shortest estimated steps that should fit in memory, and those on the Pareto front.

        Parameters
        ----------
        capacity : float
            Memory of a device [byte].
        count : int
            Number of cases with the shortest steps.

        Returns
        -------
        ndarray of int, shape (chosen,)
            Positions of the cases, ascending.
        """
        seconds, memory = self._bounds(sharded=False).schedule_independent_bounds(self._most_shared, expected=True)
        inside = np.flatnonzero(memory <= capacity)
        shortest = inside[np.argsort(seconds[inside], kind="stable")[:count]]
        front, _ = pareto_front(seconds[inside], memory[inside])
        chosen = np.zeros(len(seconds), dtype=bool)
        chosen[shortest] = True
        chosen[inside] |= np.searchsorted(front, seconds[inside], "right") > np.searchsorted(front, seconds[inside])
        return np.flatnonzero(chosen)

    @property
    def configuration_count(self) -> int:
        """Number of configurations of these cases, counting one pipeline cut for each."""
        several = self._has_several_shards
        counts = [np.sum(runnable & several if zero else runnable) for *_, zero, runnable in self._choices()]
        return len(_gradient_overlap_options(self.space, self.backend)) * int(sum(counts))

    def may_reach_limits(self, limits: SearchLimits) -> npt.NDArray[np.bool_]:
        """Return True for each case of which at least one configuration may reach the search limits.

        Parameters
        ----------
        limits : SearchLimits
            Step time [s] and memory [byte] that a configuration has to reach.

        Returns
        -------
        ndarray of bool, shape (cases,)
            True for cases that may reach the limits.
        """
        reaching = np.zeros(len(self.cases), dtype=bool)
        for bounds, schedule, chunks, zero, runnable in self._choices():
            reaching |= runnable & self._reached_by_bounds(bounds, schedule, chunks, zero, limits)
        return reaching

    def best_bounds(self, capacity: float, count: int) -> SmallestLowerBounds:
        """Return the smallest lower bounds of step time of plans that may fit, and bounds of the Pareto front.

        Parameters
        ----------
        capacity : float
            Memory of a device [byte].
        count : int
            Number of shortest step times to bound.

        Returns
        -------
        SmallestLowerBounds
            Lower bounds of step times [s] and of memory [byte].
        """
        parts = []
        for bounds, schedule, chunks, zero, runnable in self._choices():
            seconds = bounds.step_time_lower_bound(schedule, chunks, zero, expected=True)
            memory = bounds.memory_lower_bound(schedule, chunks, zero, expected=True)
            inside = np.flatnonzero(runnable & (memory <= capacity))
            seconds, memory, shortest = seconds[inside], memory[inside], seconds[inside]
            # the step waits for the scatter
            if self.backend.scatters_every_pass(zero, self.group.stages) and len(self._allowed_zero_stages) > 1:
                shortest = np.zeros(0)
            if len(shortest) > count:
                shortest = np.partition(shortest, count)[:count]
            front = pareto_front(seconds, memory) if self._exact(schedule) else (np.zeros(0), np.zeros(0))
            parts.append(SmallestLowerBounds(shortest, front))
        return SmallestLowerBounds.join(parts, count)

    def _choices(self) -> Iterator[tuple[ConfigurationBounds, Schedule, int, int, npt.NDArray[np.bool_]]]:
        """Yield each choice as (bounds, schedule, chunks per stage, ZeRO stage, True for cases that can run it)."""
        piped = self.group.stages > 1
        for sharded in (False, True) if self.space.zero3_pipelines and piped else (False,):
            bounds, programs = self._bounds(sharded=sharded), self.programs
            tried = candidate_chunk_counts(programs[0], self.group.stages, self.space, self.backend) if piped else (1,)
            for chunks in tried:
                ways = self._schedules_by_assignment(chunks) if piped else [[SCHEDULES["1f1b"]]]
                for schedule in chain.from_iterable(ways):
                    runnable = self._runnable(schedule, sharded)
                    yield from ((bounds, schedule, chunks, zero, runnable) for zero in self._zeros(sharded))

    def _zeros(self, sharded: bool) -> tuple[int, ...]:
        """Return the ZeRO stages that are tried: ZeRO-3 alone for ``sharded`` pipelines, others for other pipelines.

        All stages are tried without a pipeline.
        """
        return (
            self._allowed_zero_stages
            if self.group.stages == 1
            else tuple(zero for zero in self._allowed_zero_stages if (zero == 3) == sharded)
        )

    @property
    def _most_shared(self) -> int:
        """Highest ZeRO stage that the search tries."""
        return max((*self._zeros(sharded=False), *self._zeros(sharded=self.space.zero3_pipelines)))

    def _runnable(self, schedule: Schedule, sharded: bool) -> npt.NDArray[np.bool_]:
        """Return True for cases that a pipeline schedule can run, shape (cases,); ``sharded`` means ZeRO-3."""
        if self.group.stages == 1:
            return np.ones(len(self.cases), dtype=bool)
        runnable = schedule.allows_microbatches(self.group.stages, self.cases.microbatches)
        if sharded:
            runnable = runnable & self._has_several_shards
        if schedule.pairs_forward_with_backward and overlap_needs_paired_passes(self.backend):
            runnable = runnable & ~self.has_spread_experts
        return runnable

    def _schedules_by_assignment(self, chunks: int) -> list[list[Schedule]]:
        """Group the schedules that allow a number of chunks by how they assign pieces of the network to stages."""
        shared: dict[tuple[object, ...], list[Schedule]] = {}
        stages = self.group.stages
        for schedule in (SCHEDULES[name] for name in self.space.schedules):
            if schedule.allows_chunks(chunks):
                places = schedule.stage_chunks(stages, chunks), schedule.sends_output(stages, chunks)
                shared.setdefault((*places, schedule.replicas), []).append(schedule)
        return list(shared.values())


def _select(
    index: IndexArray, batch: ConfigurationBatch, chosen: npt.NDArray[np.bool_]
) -> tuple[IndexArray, ConfigurationBatch]:
    """Return the ``chosen`` cases of a batch with their positions; the same batch, and its cache, if all are chosen."""
    if chosen.all():
        return index, batch
    rows = np.flatnonzero(chosen)
    return index[rows], batch.select(rows)


def overlap_needs_paired_passes(backend: Backend) -> bool:
    """Return True if expert exchange overlaps with computation only under schedules that pair two microbatches' passes.

    Layers then have different times under such schedules (`Schedule.pairs_forward_with_backward`).

    Parameters
    ----------
    backend : Backend
        Software, prices and links of the run.

    Returns
    -------
    bool
        True if overlap needs paired passes.
    """
    return backend.software.overlap.experts is None


def _gradient_overlap_options(space: SearchSpace, backend: Backend) -> tuple[bool, ...]:
    """Return the settings of gradient overlap that a search tries: the one that the user fixed, or both.

    Parameters
    ----------
    space : SearchSpace
        Values that the search varies.
    backend : Backend
        Software, prices and links of the run.

    Returns
    -------
    tuple of bool
        True for overlap, False for exchange after the pass.
    """
    if space.overlaps_gradient_exchange is not None:
        return (space.overlaps_gradient_exchange,)
    return (False, True) if backend.run.exchange.when is None else (backend.overlaps_gradient_exchange,)


def _arrival(points: LayoutTimes, members: Sequence[Layout], backend: Backend) -> Array:
    """Return the interval at which input batches reach each layout [s], shape (layouts,); 0 for synthetic data."""
    replica = np.array([each.mesh.size / each.mesh.replicas for each in members])
    local = np.array([float(each.local_batch) for each in members])
    arriving = backend.input_pipeline(points.graph, backend.run.gpus, replica, local)
    return np.zeros(len(members)) if arriving is None else np.asarray(arriving.batch_interval)
