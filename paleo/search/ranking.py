"""Ranking of the configurations of a plan search: the best plans, the runner-up and the Pareto front.

Most pipeline schedules have closed forms of the step time, which are approximate for unequal stages. The closed forms
order all configurations. The leading configurations are then simulated pass by pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES
from paleo.schedules.base import SCHEDULES
from paleo.specs.prices import machine_rent
from paleo.specs.run import replace_fields

if TYPE_CHECKING:
    from paleo.search.configurations import ConfigurationResults, ExecutionChoice
    from paleo.search.space import Layout
    from paleo.specs.run import Run
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
#: Number of the best plans among which another strategy is sought first.
_NEAR = 1000
#: Most plans of different strategies that are grouped into classes.
MAX_COMPARED_STRATEGIES = 40
#: Number of batches whose best configuration is computed pass by pass, and number of rounds in which configurations
#: that now lead the ranking are.
_BATCHES, _ROUNDS = 6, 6
#: Scores are rounded to this fraction of the best score before they are compared.
_SAME = 2.0**-33
#: Fraction by which a search extends the limit of step times beyond what is needed.
_MARGIN = 0.002


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One plan of a search: strategy and other options, step time [s], and memory of the fullest device [byte].

    ``tie_group_step_time`` is the shortest step time among plans that are equally fast within the prediction's error
    [s]; 0 if not computed.
    """

    gpus: int
    strategy: str
    microbatch: int
    recompute: str
    schedule: str
    overlaps_gradient_exchange: bool
    step_time: float
    memory: float
    fits: bool
    run: Run
    tie_group_step_time: float = 0.0


@dataclass(frozen=True, slots=True)
class EvaluatedGroup:
    """Evaluated configurations of one GPU count and token dispatcher.

    ``uses_paired_passes`` is True if their schedules pair the passes of two microbatches, which changes layer times.
    """

    run: Run
    layouts: tuple[Layout, ...]
    results: ConfigurationResults
    preset: str = "dp"
    uses_paired_passes: bool = False


#: Function that returns the parts of a search, with all configurations whose step takes at most the given time [s].
_EvaluateUpToStepTime = Callable[[float], Sequence[EvaluatedGroup]]


class Ranking:
    """Ranking of all evaluated configurations by an objective, with exact step times for the leading ones.

    Parameters
    ----------
    parts : sequence of EvaluatedGroup
        Evaluated configurations of each GPU count.
    system : System
        Machine; its memory decides which plans fit, its rent what they cost.
    objective : str
        One of ``time``, ``cost``, ``energy``, ``gpus``.
    within : float
        Step time [s] up to which every fitting configuration has been evaluated.
    widen : callable, optional
        Function that evaluates all configurations up to a longer step time [s] and returns the groups.

    Attributes
    ----------
    timed : bool
        True if the objective depends on time.
    """

    def __init__(
        self,
        parts: Sequence[EvaluatedGroup],
        system: System,
        objective: str,
        within: float = np.inf,
        widen: _EvaluateUpToStepTime | None = None,
    ) -> None:
        self.capacity, self.timed = system.device.memory.usable_bytes, objective != "gpus"
        self._rate_of = partial(_weight_of_second, system, objective=objective)
        self._widen, self._within, self._has_sampled = widen, within, False
        self._load(parts)

    def _load(self, parts: Sequence[EvaluatedGroup]) -> None:
        """Replace the configurations of the ranking by those of the given groups."""
        self.parts = parts = [part for part in parts if len(part.results)]
        self.step, self.memory = (
            np.concatenate([getattr(part.results, name) for part in parts] or [np.zeros(0)])
            for name in ("step_time", "memory")
        )
        self.first = np.concatenate([[0], np.cumsum([len(part.results) for part in parts])]).astype(np.intp)
        self.fits = self.memory <= self.capacity
        self.fitting = np.flatnonzero(self.fits)
        self.exact = np.concatenate([part.results.has_exact_step_time for part in parts] or [np.zeros(0, dtype=bool)])
        self._played = np.zeros(len(self.step), dtype=bool)
        self.rates = {part.run.gpus: self._rate_of(part.run.gpus) for part in parts}
        rates = [self.rates[part.run.gpus] for part in parts]
        self._rates = np.repeat(rates, [len(part.results) for part in parts])

    @property
    def has_skipped_configurations(self) -> bool:
        """True if configurations were left out because their lower bounds exceed a limit."""
        return self._widen is not None and self._within < np.inf

    def _extend_to(self, seconds: float) -> bool:
        """Evaluate all fitting configurations with a step time up to ``seconds``; return True if this added any.

        Exact step times that were already computed are kept.
        """
        if seconds <= self._within or self._widen is None:
            return False
        played = [(self._at(i), self._cut(i), self.step[i]) for i in np.flatnonzero(self._played).tolist()]
        self._within = seconds * (1.0 + _MARGIN)
        self._load(self._widen(self._within))
        for (part, layout, microbatch, policy, choice), cut, step in played:
            alike = (
                part.run is other.run and part.uses_paired_passes == other.uses_paired_passes for other in self.parts
            )
            number = next(number for number, same in enumerate(alike) if same)
            configurations = self.parts[number].results.find_configurations(layout, microbatch, policy, choice, cut)
            rows = self.first[number] + configurations
            self.step[rows], self.exact[rows], self._played[rows] = step, True, True
        return True

    @classmethod
    def merge(cls, rankings: Sequence[Ranking], system: System, objective: str) -> Ranking:
        """Merge several rankings of one system, such as those of several GPU counts.

        Parameters
        ----------
        rankings : sequence of Ranking
            Rankings to merge.
        system : System
            Machine, whose memory and rent apply.
        objective : str
            ``time``, ``cost``, ``energy`` or ``gpus``.

        Returns
        -------
        Ranking
            Ranking of all configurations.
        """
        whole = cls([part for ranking in rankings for part in ranking.parts], system, objective)
        whole.step, whole.exact = (np.concatenate([getattr(r, name) for r in rankings]) for name in ("step", "exact"))
        return whole

    @property
    def scores(self) -> Array:
        """Score that the ranking minimises (step time, cost, energy or GPUs), shape (configurations,)."""
        return self._rates * self.step if self.timed else self._rates

    @property
    def ordering_scores(self) -> Array:
        """Score by which all configurations are ordered, shape (configurations,).

        Configurations that do not fit in memory come after those that do, ordered by memory.
        """
        score = self.scores
        later = score[self.fits].max(initial=0.0) + self.memory
        return np.where(self.fits, score, later)

    def _compute_pass_by_pass(self, indices: IndexArray) -> bool:
        """Simulate the step times of configurations pass by pass; return True if any was not yet exact."""
        left = indices[~self.exact[indices]]
        for number, part in enumerate(self.parts):
            first, end = self.first[number : number + 2]
            part_rows = left[(left >= first) & (left < end)]
            if len(part_rows):
                self.step[part_rows] = part.results.exact_step_times(part_rows - first)
                self.exact[part_rows] = self._played[part_rows] = True
        return bool(len(left))

    def _sample(self, count: int) -> None:
        """Compute the exact step time of the best configuration in each of the leading batches of configurations.

        Closed forms have similar errors within a batch, so this corrects the order early.
        """
        leads: dict[tuple[int, int], int] = {}
        for index in self._known(count).tolist():
            number = self._part(index)
            batch = number, int(self.parts[number].results.batch_index[index - self.first[number]])
            leads.setdefault(batch, index)
        first = [index for index in leads.values() if not self.exact[index]]
        self._compute_pass_by_pass(np.array(first[:_BATCHES], dtype=np.intp))

    def _known(self, count: int) -> IndexArray:
        """Return the indices of the best ``count`` configurations, after evaluating all that could be among them."""
        order = self._ordered(count)
        while self._extend_to(float(self.step[order].max(initial=0.0)) if len(self.fitting) >= count else np.inf):
            order = self._ordered(count)
        return order

    def _ordered(self, count: int) -> IndexArray:
        """Return the indices of the best ``count`` configurations by the step times known so far.

        Equal scores are ordered by step time, then by memory.
        """
        candidates, score = self.fitting, self.scores[self.fitting]
        if len(candidates) < count:
            candidates, score = np.arange(len(self.step)), self.ordering_scores
        score, step = _rounded(score), _rounded(self.step[candidates])
        if count < len(candidates):
            leaders = np.flatnonzero(score <= np.partition(score, count - 1)[count - 1])
            candidates, score, step = candidates[leaders], score[leaders], step[leaders]
        return np.asarray(candidates[np.lexsort((self.memory[candidates], step, score, ~self.fits[candidates]))])

    def best_indices(self, count: int) -> IndexArray:
        """Return the indices of the best configurations, including ties with the last one.

        Their step times are computed exactly first: simulated pass by pass, where closed forms are approximate.

        Parameters
        ----------
        count : int
            Number of configurations to return.

        Returns
        -------
        IndexArray
            Indices of configurations, the best first.
        """
        if len(self.step) and not self._has_sampled:
            self._sample(count)
            self._has_sampled = True
        order = self._known(count)
        for _ in range(_ROUNDS):
            if not self._compute_pass_by_pass(order):
                return order
            order = self._known(count)
        return np.asarray(order[self.exact[order]])

    def best_plans(self, top: int) -> tuple[PlanRow, ...]:
        """Return the best plans, without near-duplicates.

        The better one is returned of two configurations that differ only in when gradients are exchanged. The first is
        returned of two pipeline cuts with equal step time and memory.

        Parameters
        ----------
        top : int
            Number of plans to return.

        Returns
        -------
        tuple of PlanRow
            Plans, the best first.
        """
        rows: dict[tuple[object, ...], PlanRow] = {}
        known_figures: set[tuple[object, ...]] = set()
        for index in self.best_indices(2 * top):
            row = self.plan_row(int(index))
            choices = row.recompute, row.schedule, row.run.experts.dispatch
            key = row.gpus, row.strategy, row.microbatch, *choices
            figures = *key, f"{row.step_time:.9e}", f"{row.memory:.9e}"
            if figures not in known_figures:
                rows.setdefault((*key, row.run.pipeline.cut), row)
            known_figures.add(figures)
        return tuple(rows.values())[:top]

    def best_of_each_strategy(self, count: int) -> tuple[PlanRow, ...]:
        """Return the best plan of each of the first ``count`` strategies (degrees of tp, pp, dp, …), the best first.

        Only the best `_NEAR` configurations that fit into the memory of a device are considered. The result does not
        depend on which slower configurations were evaluated.

        Parameters
        ----------
        count : int
            Most plans to return.

        Returns
        -------
        tuple of PlanRow
            At most ``count`` plans of different strategies.
        """
        first, slowest = self._first_of_strategies(count)
        if self._extend_to(slowest):
            first, _ = self._first_of_strategies(count)
        # computed together: configurations of a batch share one evaluation
        self._compute_pass_by_pass(np.array(first, dtype=np.intp))
        return tuple(self.plan_row(index) for index in first)

    def strategies_step_time_bound(self, count: int) -> float:
        """Return an upper bound of the step times of `best_of_each_strategy` [s], before exact times are computed.

        Parameters
        ----------
        count : int
            Most plans that `best_of_each_strategy` returns.

        Returns
        -------
        float
            Step time [s]; infinite if too few configurations fit.
        """
        return self._first_of_strategies(count)[1]

    def _first_of_strategies(self, count: int) -> tuple[list[int], float]:
        """Return the index of the best evaluated configuration of each of the first ``count`` strategies.

        Also return the step time [s] up to which configurations must be evaluated so that these are certainly the best.
        """
        first, order = dict[tuple[int, str], int](), self._ordered(_NEAR)
        for index in order.tolist():
            if self.fits[index]:
                first.setdefault(self._strategy(index), index)
            if len(first) == count:
                return list(first.values()), float(self.step[index])
        return list(first.values()), float(self.step[order].max()) if len(self.fitting) >= _NEAR else np.inf

    def runner_up(self, best: PlanRow) -> PlanRow | None:
        """Return the best fitting plan whose strategy differs from that of the first plan.

        Parameters
        ----------
        best : PlanRow
            First plan of the ranking.

        Returns
        -------
        PlanRow, optional
            Runner-up; None if no other strategy fits.
        """
        for count in (_NEAR, len(self.step)):
            for index in self._ordered(count).tolist():
                if not self.fits[index] or self._strategy(index) == (best.gpus, best.strategy):
                    continue
                # its position may have changed
                if self._extend_to(float(self.step[index])) or self._compute_pass_by_pass(np.array([index])):
                    return self.runner_up(best)
                return self.plan_row(index)
        return self.runner_up(best) if self._extend_to(np.inf) else None

    def pareto_plans(self) -> tuple[PlanRow, ...]:
        """Return the Pareto front of step time and memory among evaluated plans that fit, the fastest first."""
        left, rows = self.fitting[self.exact[self.fitting]], []
        while len(left):
            steps = self.step[left]
            fastest = left[steps == steps.min()]
            best = int(fastest[self.memory[fastest].argmin()])
            rows.append(self.plan_row(best))
            left = left[self.memory[left] < self.memory[best]]
        return tuple(rows)

    def _strategy(self, index: int) -> tuple[int, str]:
        part, layout, _, _, choice = self._at(index)
        return part.run.gpus, strategy_text(part.layouts[layout], choice.zero, choice.chunks, part.preset)

    def _at(self, index: int) -> tuple[EvaluatedGroup, int, int, int, ExecutionChoice]:
        """Return the (group, layout, microbatch, recompute policy, choice) of the configuration with an index."""
        number = self._part(index)
        part = self.parts[number]
        return part, *part.results.configuration_at(index - int(self.first[number]))

    def _cut(self, index: int) -> tuple[int, ...] | None:
        """Return the layers of each pipeline piece of a configuration; None for the framework's default cut."""
        number = self._part(index)
        return self.parts[number].results.layers_per_piece(index - int(self.first[number]))

    def _part(self, index: int) -> int:
        """Return the index of the group (`EvaluatedGroup`) that holds a configuration."""
        return int(np.searchsorted(self.first, index, side="right")) - 1

    def plan_row(self, index: int) -> PlanRow:
        """Return the configuration with an index as a plan, with its exact step time.

        Parameters
        ----------
        index : int
            Index of the configuration.

        Returns
        -------
        PlanRow
            Plan with its options, step time [s] and memory [byte].
        """
        self._compute_pass_by_pass(np.array([index], dtype=np.intp))
        part, position, microbatch, policy, choice = self._at(index)
        layout, schedule = part.layouts[position], list(SCHEDULES)[choice.schedule]
        strategy, recompute = strategy_text(layout, choice.zero, choice.chunks, part.preset), RECOMPUTE_POLICIES[policy]
        changed: dict[str, object] = {"strategy": strategy, "microbatch": microbatch, "recompute": recompute}
        changed["schedule"] = "1f1b" if schedule == "interleaved" else schedule
        cut = self._cut(index)
        if cut is not None:
            changed["pipeline.cut"] = cut
        if part.run.exchange.when is None:
            changed["exchange"] = "overlapped" if choice.overlaps_gradient_exchange else "after"
        return PlanRow(
            part.run.gpus,
            strategy,
            microbatch=microbatch,
            recompute=recompute,
            schedule="none" if layout.mesh.degree("pp") == 1 else schedule,
            overlaps_gradient_exchange=choice.overlaps_gradient_exchange,
            step_time=float(self.step[index]),
            memory=float(self.memory[index]),
            fits=bool(self.fits[index]),
            run=replace_fields(part.run, changed),
        )


def _rounded(figures: Array) -> Array:
    """Round values to a tiny fraction of the smallest, so that rounding errors of array sums change no order."""
    least = figures.min(initial=np.inf)
    return np.rint(figures / (_SAME * least)) if 0.0 < least < np.inf else figures


def _weight_of_second(system: System, gpus: int, objective: str) -> float:
    """Return the factor that turns a step time into the score of an objective.

    The factor is 1 for time, ``gpus`` for gpus and energy, and the rent in USD per second for cost.
    """
    if objective == "time":
        return 1.0
    if objective == "gpus":
        return float(gpus)
    if objective == "energy":
        return float(gpus)
    offer = machine_rent(system, gpus)
    if offer is not None:
        return offer[0]
    raise SpecError(f"objective 'cost': no price is known for {system.name}; add price_per_node, or use energy")


def strategy_text(layout: Layout, zero: int, chunks: int, preset: str = "dp") -> str:
    """Format a layout as the text of the command line's strategy option.

    Parameters
    ----------
    layout : Layout
        Mesh degrees and flags, such as sequence parallelism.
    zero : int
        ZeRO stage, 0 to 3.
    chunks : int
        Chunks of a stage.
    preset : str, optional
        Base placement that the degrees refine, such as ``dp``.

    Returns
    -------
    str
        For example ``tp=8,pp=4,zero=1,sp``.
    """
    degrees = {**dict(layout.mesh.degrees), "dp": layout.mesh.replicas, "ep": layout.expert_ranks}
    parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    parts += [f"vp={chunks}"] if chunks > 1 else []
    parts += [] if layout.etp is None else [f"etp={layout.etp}"]
    parts += [f"zero={zero}"] if zero else []
    flags = ["sp"] * layout.sequence_parallel + ["ulysses"] * (layout.context_parallel_method == "all_to_all")
    return ",".join([*([] if preset == "dp" and parts else [preset]), *parts, *flags])
