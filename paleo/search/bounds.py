"""Lower bounds of step time and memory, which tell which configurations of a search are worth evaluating.

A configuration is skipped only if its bounds exclude it from the results. Its step is longer than that of the last plan
to return, or a known plan beats it in both time and memory, or no device has enough memory.

Let a pipeline of p stages with v chunks each run m microbatches, and let all layers of the network take S seconds for
one microbatch. A stage starts after the earlier stages have passed on the first microbatch, and the earlier stages end
after it has passed back the last one. However the network is cut, with q = 1 − 1/(m·v) the step takes at least

    S / (v · (1 − qᵖ)) ≥ m·S / p.

The right-hand bound alone holds where microbatches enter the pipeline at several stages. Where the cut is known to be
even, the time of each stage is known too and gives a tighter bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.schedules.base import distinct_values
from paleo.step.memory import live_microbatches
from paleo.step.streams import layer_gradient_exchange_times, section_gather_times

if TYPE_CHECKING:
    from paleo.schedules.base import Schedule
    from paleo.search.pipeline_cuts import PipelineCuts
    from paleo.step.configuration_batch import LayoutConfigurations

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
#: Bounds are lowered by this fraction so that rounding cannot make them too high.
_ROUNDING = 2.0**-30


def pareto_front(seconds: Array, bytes_: Array) -> tuple[Array, Array]:
    """Return the Pareto front of (time, memory) points: the points that no other point beats in both coordinates.

    Parameters
    ----------
    seconds, bytes_ : ndarray
        Step time [s] and memory [byte] of each point, shape (points,).

    Returns
    -------
    tuple of ndarray
        Points of the front, with rising seconds and falling bytes.
    """
    order = np.lexsort((bytes_, seconds))
    seconds, bytes_ = seconds[order], bytes_[order]
    least = np.minimum.accumulate(bytes_)
    steps = np.flatnonzero(bytes_ < np.concatenate([[np.inf], least[:-1]])) if len(bytes_) else np.zeros(0, np.intp)
    return seconds[steps], bytes_[steps]


@dataclass(frozen=True, slots=True)
class SearchLimits:
    """Step time and memory that a configuration must reach to be an answer of a search.

    Attributes
    ----------
    max_step_time : float
        Longest step time of the plans to return [s].
    memory_capacity : float
        Memory of a device [bytes].
    known_pareto_front : tuple of ndarray
        Pareto front of the plans known so far: step times [s] in rising order, memory [byte] in falling order.
    are_estimates : bool
        True if the limits are estimates for evenly cut pipelines rather than step times of evaluated plans. The bounds
        are then those of even cuts, and steps are not bounded again once the cut is known.
    """

    max_step_time: float
    memory_capacity: float
    known_pareto_front: tuple[Array, Array] = field(default_factory=lambda: (np.zeros(0), np.zeros(0)))
    are_estimates: bool = False

    def may_be_optimal(self, seconds: Array, bytes_: Array, *, exact: bool) -> Mask:
        """Return True for configurations whose lower bounds do not yet rule them out of the answers of a search.

        An answer is one of the best plans, or a plan on the Pareto front of step time and memory.

        Parameters
        ----------
        seconds, bytes_ : ndarray
            Lower bounds of step time [s] and memory [byte], shape (configurations,).
        exact : bool
            True if the closed form of the schedule is exact for unequal stages too. Only then are configurations
            compared with the known Pareto front.

        Returns
        -------
        ndarray of bool
            Shape (configurations,).
        """
        possible = seconds <= self.max_step_time
        if exact:
            times, least = self.known_pareto_front
            before = np.searchsorted(times, seconds, side="right")
            possible = possible | (bytes_ < np.concatenate([[np.inf], least])[before])
        return np.asarray(possible & (bytes_ <= self.memory_capacity))


class ConfigurationBounds:
    """Lower bounds of step time and memory for cases (layout, microbatch, recompute policy) of one pipeline depth.

    Parameters
    ----------
    cases : LayoutConfigurations
        Layouts at a microbatch under a recompute policy.
    cuts : PipelineCuts
        Ways to cut the network for these cases.
    stages : int
        Stages of the pipeline.
    """

    def __init__(self, cases: LayoutConfigurations, cuts: PipelineCuts, stages: int) -> None:
        self.cases, self.cuts, self.stages = cases, cuts, stages
        self.microbatches, times = cases.microbatches, cases.layer_times
        self.repeat, rows = cuts.repeat.astype(np.float64), np.arange(len(cuts.repeat))[:, None]
        work = self.repeat[:, None] * times.iteration_time
        self.before = (work * (rows < cuts.heaviest)).sum(axis=0)
        self.behind = (work * (rows > cuts.heaviest)).sum(axis=0)
        self.work, self.saved = work.sum(axis=0), self.repeat @ times.saved_bytes
        self.block = self.work - self.before - self.behind
        self.reserved = cases.layouts.reserved_memory()[cases.layout_index]
        self._states: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._even: dict[tuple[int, ...], Mask] = {}
        self._seconds: dict[tuple[str, int, bool], Array] = {}
        self._travels: dict[int, Array] = {}
        self._lives: dict[tuple[str, int], tuple[Array, Array]] = {}

    @cached_property
    def _send(self) -> Array:
        """Time to send the output of one layer of the heaviest block to the next stage [s], shape (cases,)."""
        sent = np.zeros(len(self.cases))
        for block in distinct_values(self.cuts.heaviest):
            inside = self.cuts.heaviest == block
            sent[inside] = self.cases.send_time(block)[inside]
        return sent

    def has_only_even_cut(self, schedule: Schedule, chunks: int) -> Mask:
        """Return True for cases whose only pipeline cut gives every piece equally many layers.

        The result is cached for each assignment of pieces to stages; see `PipelineCuts.has_only_even_cut`.

        Parameters
        ----------
        schedule : Schedule
            Order of the pipeline's passes.
        chunks : int
            Chunks of each stage.

        Returns
        -------
        Mask, shape (cases,)
            True where the cut is certainly even.
        """
        stages = schedule.chunk_stages(self.stages, chunks)
        if stages not in self._even:
            self._even[stages] = self.cuts.has_only_even_cut(stages)
        return self._even[stages]

    def schedule_independent_bounds(self, zero: int, *, expected: bool = False) -> tuple[Array, Array]:
        """Return lower bounds of step time [s] and memory [byte] that hold whatever the pipeline schedule is.

        Parameters
        ----------
        zero : int
            Highest ZeRO stage that the search tries.
        expected : bool
            Estimate the memory under 1F1B instead of a lower bound.

        Returns
        -------
        tuple of ndarray
            Step time [s] and memory [byte], shape (cases,) each.
        """
        states, _ = self._state_bytes(zero, 1)
        living = np.minimum(self.microbatches, self.stages) if expected else 1.0
        memory = (self.repeat @ states + self.saved * living) / self.stages + self.reserved
        if expected:
            columns = np.arange(len(self.cases))
            memory += self.cases.layer_times.workspace_bytes[self.cuts.heaviest, columns]
            memory += self.cases.layer_times.recompute_bytes[self.cuts.heaviest, columns]
        return self.microbatches * self.work / self.stages * (1.0 - _ROUNDING), memory * (1.0 - _ROUNDING)

    def step_time_lower_bound(self, schedule: Schedule, chunks: int, zero: int, *, expected: bool = False) -> Array:
        """Return a lower bound of the step time of each case under one schedule [s].

        Parameters
        ----------
        schedule : Schedule
            Order of the pipeline's passes.
        chunks : int
            Chunks of each stage.
        zero : int
            ZeRO stage, 0 to 3.
        expected : bool
            Return the bound of an even cut even where the cut may be uneven.

        Returns
        -------
        ndarray
            Lower bound of each case, shape (cases,) [s].
        """
        travelling = self._exchange_seconds(zero)
        if self.stages == 1:
            return np.asarray(self.microbatches * np.maximum(self.work, travelling))
        key = schedule.name, chunks, expected
        if key not in self._seconds:
            self._seconds[key] = self._pipeline_seconds(schedule, chunks, expected)
        return np.maximum(self._seconds[key], self.microbatches * travelling / self.stages)

    def _exchange_seconds(self, zero: int) -> Array:
        """Return the time per microbatch of ZeRO's parameter gathers and gradient scatters [s], shape (cases,).

        Used as a lower bound of the step. The time is 0 unless the software scatters gradients after every pass.
        """
        layouts = self.cases.layouts
        if layouts.has_separate_backward_gathers or not (
            zero > 1 and layouts.backend.scatters_every_pass(zero, self.stages)
        ):
            return np.zeros(len(self.cases))
        if zero not in self._travels:
            seconds = layer_gradient_exchange_times(layouts, zero)
            if zero == 3:
                has_backward = np.array([[each.has_backward] for each in layouts.programs[0].sections])
                seconds = seconds + section_gather_times(layouts) * (1.0 + has_backward)
            self._travels[zero] = (self.repeat @ seconds * (layouts.zero_shard_ranks > 1))[self.cases.layout_index] * (
                1.0 - _ROUNDING
            )
        return self._travels[zero]

    def _pipeline_seconds(self, schedule: Schedule, chunks: int, expected: bool) -> Array:
        """Return a lower bound of the step time of pipelines with two or more stages [s], shape (cases,).

        The formulas are those of the module docstring; cases that are cut evenly get the tighter one.
        """
        count, stages = self.microbatches, self.stages
        least = count * self.work / stages
        paths = schedule.chunk_paths(stages, chunks)
        from_the_front = len(paths) == 1 and [stage for stage, _ in paths[0]] == [*range(stages)] * chunks
        if from_the_front and not schedule.splits_backward:
            least = self.work / (chunks * (1.0 - (1.0 - 1.0 / (count * chunks)) ** stages))
        ends = np.zeros((stages, len(self.cases)))
        for path in paths:
            ends[path[0][0]] += self.before / len(paths)
            ends[path[-1][0]] += self.behind / len(paths)
        sent = np.array(schedule.sends_output(stages, chunks)).sum(axis=1) - 1.0
        busy = self.block / stages + 2.0 * sent.min() / len(paths) * self._send
        slowest = count * (busy + ends.max(axis=0))
        if from_the_front and not schedule.splits_backward:
            filling = self.block * (stages - 1) / (stages * chunks)
            slowest = np.maximum(slowest, filling + count * (busy + ends[-1]))
        even = self.has_only_even_cut(schedule, chunks) | expected
        return np.asarray(np.where(even, np.maximum(least, slowest), least) * (1.0 - _ROUNDING))

    def memory_lower_bound(self, schedule: Schedule, chunks: int, zero: int, *, expected: bool = False) -> Array:
        """Return a lower bound of the memory of the fullest device under one schedule [byte].

        Parameters
        ----------
        schedule : Schedule
            Order of the pipeline's passes.
        chunks : int
            Chunks of each stage.
        zero : int
            ZeRO stage, 0 to 3.
        expected : bool
            Return the bound of an even cut even where the cut may be uneven.

        Returns
        -------
        ndarray
            Lower bound of each case, shape (cases,) [byte].
        """
        stages, times, copies = self.stages, self.cases.layer_times, schedule.replicas if self.stages > 1 else 1
        states, update = self._state_bytes(zero, copies)
        if stages == 1:
            moment = times.workspace_bytes.max(axis=0) + times.recompute_bytes.max(axis=0)
            whole = self.repeat @ states + self.reserved
            return np.asarray((whole + np.maximum(self.saved + moment, self.repeat @ update)) * (1.0 - _ROUNDING))
        fewest, most = self._living(schedule, chunks)
        share, columns, block = copies / stages, np.arange(len(self.cases)), self.cuts.heaviest
        passing = self.saved * fewest * share
        least = self.repeat @ states * share + np.maximum(passing, self.repeat @ update * share)
        layers = self.repeat[block] / stages
        fullest = times.saved_bytes[block, columns] * most * layers / chunks
        moment = times.workspace_bytes[block, columns] + times.recompute_bytes[block, columns]
        known = states[block, columns] * copies * layers + fullest + moment
        even = self.has_only_even_cut(schedule, chunks) | expected
        return np.asarray((np.where(even, np.maximum(known, least), least) + self.reserved) * (1.0 - _ROUNDING))

    def _living(self, schedule: Schedule, chunks: int) -> tuple[Array, Array]:
        """Return how many microbatches keep their activations at once, shape (cases,) for each of two counts.

        The first is the fewest of any model chunk, the second the most of any stage. Equal numbers of microbatches are
        counted once.
        """
        key = schedule.name, chunks
        if key not in self._lives:
            counts, place = np.unique(self.microbatches, return_inverse=True)
            living = live_microbatches(schedule, self.stages, counts, chunks) * float(self.cases.layouts.has_backward)
            self._lives[key] = living.min(axis=(0, 1))[place], living.sum(axis=1).max(axis=0)[place]
        return self._lives[key]

    def _state_bytes(self, zero: int, copies: int) -> tuple[Array, Array]:
        """Return the bytes of one layer's parameters, gradients and optimizer states, and of the update's temporaries.

        Both have the shape (sections, cases). A section is a run of consecutive operations of one layer.
        """
        if (zero, copies) not in self._states:
            layouts, sections = self.cases.layouts, len(self.repeat)
            formats, rule, training = layouts.backend.formats, layouts.backend.optimizer, float(layouts.has_backward)
            whole, trained = (layouts.section_parameter_counts(each)[:sections] for each in (False, True))
            stage = 1 if zero == 2 and not layouts.backend.scatters_every_pass(zero, self.stages) else zero
            owned = trained if stage == 0 else layouts.owned_elements(copies)[:sections]
            states = whole * formats.parameter_bytes / (layouts.zero_shard_ranks * copies if stage == 3 else 1.0)
            states = (
                states
                + (trained if stage < 2 else owned) * (formats.gradient_bytes + formats.main_gradient_bytes) * training
            )
            states = states + owned * rule.state_bytes(formats) * training
            update, layout = owned * rule.temporary_bytes(formats) * training, self.cases.layout_index
            self._states[zero, copies] = states[:, layout], update[:, layout]
        return self._states[zero, copies]
