"""Search for the best training plans of a model on a system, and a text that explains why the first plan wins.

A mixture of experts has two possible token dispatchers, and the faster one is found. NCCL's all-to-all sends a
token to each of its experts. DeepEP (or HybridEP) sends the token once to each node after a handshake. With few tokens
the handshake costs more, with many tokens the copies do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import CapacityError, PlanError, SpecError, suggest_names
from paleo.parallel.plan import plan
from paleo.predict import MEMORY_HEADROOM_SHARE, Prediction, predict
from paleo.schedules.base import SCHEDULES
from paleo.search.bounds import SearchLimits, pareto_front
from paleo.search.evaluate import ConfigurationEvaluator, SmallestLowerBounds, overlap_needs_paired_passes
from paleo.search.framework_support import FrameworkFilter, can_recompute_some_layers
from paleo.search.layout_costs import GraphsByBatch, layer_times_of_layouts
from paleo.search.partial_recompute import partial_recompute_plans
from paleo.search.ranking import MAX_COMPARED_STRATEGIES, EvaluatedGroup, PlanRow, Ranking
from paleo.search.space import (
    Layout,
    SearchSpace,
    check_search_options,
    divisors,
    list_layouts,
    microbatch_sizes,
    search_global_batch,
)
from paleo.specs.run import replace_fields
from paleo.specs.software import TokenDispatcher, load_software
from paleo.step.backend import Backend, build_backend
from paleo.step.gradient_exchange import COMPRESSION_NEEDS_ZERO3_MESSAGE

if TYPE_CHECKING:
    from paleo.compression.base import Compression
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System

#: Names of the token dispatchers as they are printed.
_TOKEN_DISPATCHER_TITLES: dict[TokenDispatcher, str] = {
    "nccl": "NCCL's all-to-all",
    "deepep": "DeepEP",
    "hybridep": "HybridEP",
}
#: Most microbatches at which the two dispatchers are compared.
_TRIED = 8


def _other_dispatcher(backend: Backend) -> TokenDispatcher | None:
    """Return the token dispatcher (NCCL or DeepEP) that a search tries besides the default of the software.

    Returns None if the run fixes one, or if the software has no other.
    """
    software = backend.software
    if backend.run.experts.dispatch is not None or not software.host.handshake:
        return None
    return "deepep" if software.parallelism.expert_dispatch == "nccl" else "nccl"


def _dispatch_words(winner: Prediction) -> str:
    """Return sentences on which token dispatcher a plan uses, and how fast the step would be with the other one.

    The text also names the microbatch from which the other dispatcher wins, and is empty if no experts are spread over
    ranks.
    """
    software = load_software(winner.run.software)
    used = winner.run.experts.dispatch or software.parallelism.expert_dispatch
    mesh, axes = winner.plan.mesh, winner.plan.strategy.expert_axes
    if mesh.group_size(axes) == 1 or not software.host.handshake:
        return ""
    other: TokenDispatcher = "deepep" if used == "nccl" else "nccl"
    gap = _step(winner, other, winner.plan.microbatch) / winner.step_time - 1.0
    slower = f"{100 * abs(gap):.1f} % {'slower' if gap >= 0 else 'faster'}"
    chosen, alternative = _TOKEN_DISPATCHER_TITLES[used], _TOKEN_DISPATCHER_TITLES[other]
    text = f"Tokens are dispatched to experts by {chosen}; with {alternative} the step would be {slower}."
    return f"{text} {_crossover(winner, used, other)}"


def _crossover(winner: Prediction, used: TokenDispatcher, other: TokenDispatcher) -> str:
    """Return a sentence on the microbatch from which the other token dispatcher is faster."""
    wins = dict(_compared(winner, used, other))
    sizes = list(wins)
    crossing = next((size for before, size in pairwise(sizes) if wins[before] != wins[size]), None)
    if crossing is None:
        first = other if wins[sizes[0]] else used
        return f"At microbatches of {sizes[0]} to {sizes[-1]} {_TOKEN_DISPATCHER_TITLES[first]} is the faster one."
    below, above = (other, used) if wins[sizes[0]] else (used, other)
    smaller, larger = _TOKEN_DISPATCHER_TITLES[below], _TOKEN_DISPATCHER_TITLES[above]
    return f"Below a microbatch of {crossing} {smaller} is faster, from there on {larger}."


def _compared(winner: Prediction, used: TokenDispatcher, other: TokenDispatcher) -> Iterator[tuple[int, bool]]:
    """Yield (microbatch, True if the other token dispatcher is faster) for microbatches that the plan can run."""
    for size in divisors(winner.plan.local_batch)[:_TRIED]:
        with suppress(PlanError):
            yield size, _step(winner, other, size) < _step(winner, used, size)


def _step(winner: Prediction, dispatcher: TokenDispatcher, microbatch: int) -> float:
    """Predict the step time of a plan with another token dispatcher and microbatch [s]."""
    changed = {"experts.dispatch": dispatcher, "microbatch": microbatch}
    return predict(winner.model, winner.system, replace_fields(winner.run, changed)).step_time


#: Quantities that a search can minimise.
_OBJECTIVES = ("time", "cost", "energy", "gpus")


def check_objective(objective: str) -> None:
    """Raise SpecError unless the objective is one that plans can be sorted by.

    Parameters
    ----------
    objective : str
        Name of the objective, such as ``time`` or ``cost``.
    """
    if objective not in _OBJECTIVES:
        raise SpecError(f"objective {objective!r:.80}; {suggest_names(str(objective), _OBJECTIVES)}")


#: Number of plans that are examined, and the number among which plans with free memory are sought if the first have
#: none.
DEFAULT_PLAN_COUNT, _HEADROOM_CANDIDATES = 10, 100
#: Up to this number of cases all configurations are evaluated. The second number says how many configurations with the
#: best bounds are evaluated first, to find the step time and memory that all others must reach.
_FEW_CASES, _FIRST_BOUNDS = 50_000, 24


@dataclass(frozen=True, slots=True)
class FoundPlans:
    """Result of a plan search: the best plans, the Pareto front, the runner-up and the numbers of configurations.

    Attributes
    ----------
    covered_configurations : int
        Number of configurations that were evaluated, or left out because of their bounds.
    fitting_configurations : int
        Number of evaluated configurations that fit in memory.
    evaluated_configurations : int
        Number of configurations whose steps were predicted.
    skipped_gpu_counts : tuple
        GPU counts without a plan, each with the reason.
    search_duration : float
        Duration of the search [s].
    objective : str
        Quantity by which the plans are ordered.
    global_batch : int
        Samples of one optimizer step.
    plans : tuple of PlanRow
        Best plans, the best first. Each uses the way to exchange gradients that is better for it.
    pareto_plans : tuple of PlanRow
        Pareto front: plans that no other beats in both step time and memory.
    runner_up : PlanRow, optional
        Best plan that fits with another strategy than the first plan.
    ranking : Ranking, optional
        All evaluated configurations.
    """

    covered_configurations: int
    fitting_configurations: int
    search_duration: float
    objective: str
    global_batch: int
    plans: tuple[PlanRow, ...]
    pareto_plans: tuple[PlanRow, ...]
    runner_up: PlanRow | None = None
    ranking: Ranking | None = field(default=None, repr=False, compare=False)
    evaluated_configurations: int = 0
    skipped_gpu_counts: tuple[tuple[int, str], ...] = ()


def search(
    model: ModelSpec,
    system: System,
    run: Run,
    *,
    counts: Sequence[int] = (),
    space: SearchSpace | None = None,
    objective: str = "time",
    top: int = 10,
    exhaustive: bool = True,
) -> FoundPlans:
    """Search the best plans on each GPU count, all with the same global batch.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Nodes, devices and links.
    run : Run
        Options of the user; the global batch is kept, the strategy is searched.
    counts : sequence of int
        GPU counts to search; by default that of the run.
    space : SearchSpace, optional
        Choices of the search; all by default.
    objective : str
        Quantity to minimise: ``time`` of a step, its ``cost`` (rent of whole nodes), its ``energy`` (design power), or
        ``gpus``, the fewest that fit. Plans that fit in memory come before those that do not.
    top : int
        Number of plans to return.
    exhaustive : bool
        Evaluate every configuration. Otherwise skip those whose bounds exclude them from the first plans and from the
        Pareto front; the plans returned are the same.

    Returns
    -------
    FoundPlans
        Plans, the best first, with the Pareto front of time and memory.

    Raises
    ------
    PlanError
        If no configuration shares the batch and the layers evenly.
    """
    check_objective(objective)
    check_search_options(run)
    started = time.perf_counter()
    chosen, tried = space or SearchSpace(), dict.fromkeys(counts or (run.gpus,))
    global_batch = search_global_batch(model, run)
    sources = [source for gpus in tried for source in _sources(model, system, _sized(run, gpus, global_batch), chosen)]
    one_rate = objective == "time" or (objective != "gpus" and len(tried) == 1)
    whole = exhaustive or not one_rate or not all(source.bounds_are_valid for source in sources)
    if whole or sum(source.case_count for source in sources) <= _FEW_CASES:
        ranking = Ranking([source.evaluate_within() for source in sources], system, objective)
    else:
        ranking = _bounded(sources, system, objective, top)
    if not ranking.parts:
        ordered = " under schedule " + " or ".join(chosen.schedules) if chosen.schedules else " without pipelines"
        ordered = "" if chosen.schedules == tuple(SCHEDULES) else ordered
        gpus, left = ", ".join(map(str, tried)), f"shares {global_batch} samples and the layers evenly{ordered}"
        reasons = next((source.support.exclusion_message for source in sources if source.support.exclusion_message), "")
        raise PlanError(f"no configuration of {gpus} gpus {left}{reasons}")
    plans = ranking.best_plans(top)
    partial = _partial(model, system, ranking, plans[0]) if can_recompute_some_layers(chosen) else ()
    plans, front = (*partial, *plans)[:top], pareto_plans([*partial, *ranking.pareto_plans()])
    runner_up = ranking.runner_up(plans[0])
    evaluated = len(ranking.step)
    return FoundPlans(
        max(
            evaluated,
            sum(s.covered_cases.configuration_count for s in sources) if ranking.has_skipped_configurations else 0,
        ),
        len(ranking.fitting),
        search_duration=time.perf_counter() - started,
        objective=objective,
        global_batch=global_batch,
        plans=plans,
        pareto_plans=front,
        runner_up=runner_up,
        ranking=ranking,
        evaluated_configurations=evaluated,
    )


def _bounded(sources: Sequence[_Source], system: System, objective: str, count: int) -> Ranking:
    """Rank only configurations whose lower bounds allow them to be among the first plans or on the Pareto front.

    The configurations with the best bounds are evaluated first. All others must be able to reach their step times, or
    to be grouped with plans that are about as fast. If none of the first ``count`` plans leaves memory free, further
    configurations are evaluated.
    """
    capacity = system.device.memory.usable_bytes
    first = SmallestLowerBounds.join(
        [source.covered_cases.smallest_lower_bounds(capacity, _FIRST_BOUNDS) for source in sources], _FIRST_BOUNDS
    )
    limits = SearchLimits(
        float(first.step_time_bounds.max(initial=0.0)), capacity, first.pareto_bounds, are_estimates=True
    )
    tried = Ranking([source.evaluate_within(limits) for source in sources], system, objective)
    exact = tried.fitting[tried.exact[tried.fitting]]
    front = pareto_front(tried.step[exact], tried.memory[exact])
    known = tried.fitting[np.argsort(tried.step[tried.fitting], kind="stable")]
    tight = bool((tried.memory[known[:count]] > (1.0 - MEMORY_HEADROOM_SHARE) * capacity).all())
    within = float(tried.step[known[: 2 * (_HEADROOM_CANDIDATES if tight else count)]].max(initial=0.0)) or math.inf
    varied = tried.strategies_step_time_bound(MAX_COMPARED_STRATEGIES)
    within = max(within, varied) if math.isfinite(varied) else within

    def widen(seconds: float) -> list[EvaluatedGroup]:
        everything = math.isinf(seconds)
        return [s.evaluate_within(None if everything else SearchLimits(seconds, capacity, front)) for s in sources]

    return Ranking(widen(within), system, objective, within, widen)


def _partial(model: ModelSpec, system: System, ranking: Ranking, first: PlanRow) -> tuple[PlanRow, ...]:
    """Return plans that recompute only some layers of each stage and beat the first plan, the best first."""
    if not first.fits or not ranking.timed:
        return ()
    return tuple(reversed(partial_recompute_plans(model, system, ranking, ranking.rates[first.gpus] * first.step_time)))


def pareto_plans(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Return the Pareto front of plans: those that no other plan beats in both step time and memory.

    Parameters
    ----------
    rows : sequence of PlanRow
        Plans to compare.

    Returns
    -------
    tuple of PlanRow
        Plans of the front, the fastest first.
    """
    ordered = sorted(rows, key=lambda row: (row.step_time, row.memory))
    smallest = [math.inf, *accumulate((row.memory for row in ordered), min)]
    return tuple(row for row, before in zip(ordered, smallest, strict=False) if row.memory < before)


def _sized(run: Run, gpus: int, global_batch: int) -> Run:
    return run.model_copy(
        update={"gpus": gpus, "global_batch": global_batch, "batch": None, "microbatch": None, "strategy": "dp"}
    )


@dataclass(frozen=True)
class _Source:
    """Part of a search: the layouts of one GPU count and token dispatcher, with the backend that predicts times."""

    graphs: GraphsByBatch
    layouts: tuple[Layout, ...]
    space: SearchSpace
    backend: Backend
    support: FrameworkFilter
    pairs_passes: bool = False

    @cached_property
    def covered_cases(self) -> ConfigurationEvaluator:
        """All cases of the search (layout, microbatch, recompute policy), with the predicted times of their layers."""
        space, backend = self.space, self.backend
        points = layer_times_of_layouts(
            self.graphs, backend, self.layouts, lambda layout: microbatch_sizes(layout.local_batch, space), space
        )
        return ConfigurationEvaluator(points, self.layouts, space, backend)

    @property
    def bounds_are_valid(self) -> bool:
        """True if lower bounds of step time and memory hold for the run; offload and compression rule them out."""
        backend = self.backend
        return not (
            backend.offload.parts or backend.compression or backend.run.forward_only or backend.run.pipeline.cut
        )

    @property
    def case_count(self) -> int:
        """Number of cases: combinations of layout, microbatch and recompute policy."""
        sizes = sum(len(microbatch_sizes(layout.local_batch, self.space)) for layout in self.layouts)
        return sizes * len(self.space.recompute)

    def evaluate_within(self, limits: SearchLimits | None = None) -> EvaluatedGroup:
        """Return the evaluated configurations that the framework can run and that may reach the limits.

        Parameters
        ----------
        limits : SearchLimits, optional
            Step time and memory that a configuration must reach. None evaluates all.

        Returns
        -------
        EvaluatedGroup
            Step times [s] and memory [byte] of the configurations.
        """
        results = self.covered_cases.evaluate(limits)
        return EvaluatedGroup(
            self.backend.run,
            self.layouts,
            self.support.supported_results(results, self.layouts),
            preset=self.space.preset,
            uses_paired_passes=self.pairs_passes,
        )


def _sources(model: ModelSpec, system: System, run: Run, space: SearchSpace) -> Iterator[_Source]:
    """Yield the parts of a search for one GPU count: its layouts under each token dispatcher.

    Schedules that pair the passes of two microbatches get a separate part, because expert exchange overlaps with
    computation there.
    """
    dtype = plan(model, system, replace_fields(run, {"global_batch": None, "pipeline.cut": None})).dtype
    backend = build_backend(system, run, dtype)
    space = _compressible(space, backend.compression)
    if space.etp is None and backend.software.parallelism.expert_tensor == "none":
        space = replace(space, etp=(None, 1))
    graphs = GraphsByBatch(model, backend)
    support = FrameworkFilter.for_search(space, graphs.graph_at_batch(1), run, system, backend.software, dtype)
    chosen = support.supported_layouts(
        list_layouts(graphs.graph_at_batch(1), run.gpus, run.global_batch or 1, space, system.devices_per_node)
    )
    if not chosen:
        stated = ",".join(f"{axis}={degree}" for axis, degree in space.degrees.items())
        under = f" with {stated}" if stated else ""
        raise PlanError(
            f"{run.gpus} gpus: no layout{under} shares {run.global_batch} samples evenly{support.exclusion_message}"
        )
    spread = [layout for layout in chosen if layout.expert_ranks > 1]
    paired = replace(space, schedules=tuple([n for n in space.schedules if SCHEDULES[n].pairs_forward_with_backward]))
    piped = [layout for layout in spread if _runs(layout, paired)]
    parts = [(backend, chosen)]
    other = _other_dispatcher(backend)
    if other is not None and spread:
        parts.append((build_backend(system, replace_fields(run, {"experts.dispatch": other}), dtype), spread))
    for each, laid_out in parts:
        yield _Source(graphs, tuple(laid_out), space, each, support)
        if overlap_needs_paired_passes(each) and piped:
            software = each.software.with_fields({"overlap.experts": True})
            backend_with_pairs = build_backend(system, each.run, dtype, software)
            yield _Source(graphs, tuple(piped), paired, backend_with_pairs, support, pairs_passes=True)


def _runs(layout: Layout, space: SearchSpace) -> bool:
    """Return True if some schedule of the search space can run the pipeline of a layout."""
    stages, sizes = layout.mesh.degree("pp"), np.array(microbatch_sizes(layout.local_batch, space))
    counts = layout.local_batch // sizes
    return stages > 1 and any(SCHEDULES[name].allows_microbatches(stages, counts).any() for name in space.schedules)


def _compressible(space: SearchSpace, method: Compression | None) -> SearchSpace:
    """Return the search space without the ZeRO stages that the gradient compression of the run rules out.

    Methods for sharded parameters allow ZeRO-3 only. Methods whose gradients cannot be summed on the wire exclude it.
    """
    if method is not None and method.replaces_zero3_collectives:
        if 3 not in space.zero:
            raise PlanError(f"compress zeropp: {COMPRESSION_NEEDS_ZERO3_MESSAGE}")
        return replace(space, zero=(3,))
    if method is None or method.sums_without_decoding:
        return space
    return replace(space, zero=tuple(stage for stage in space.zero if stage < 3), zero3_pipelines=False)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Text that says why the first plan of a search wins, with predictions of this plan and of the runner-up.

    The runner-up is the best plan with another strategy.
    """

    winner: Prediction
    runner_up: Prediction | None
    text: str


def explain_best_plan(model: ModelSpec, system: System, result: FoundPlans) -> Explanation:
    """Explain why the first plan of a search beats the best plan with another strategy.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    result : FoundPlans
        Result of the search.

    Returns
    -------
    Explanation
        Predictions of both plans, and a text that compares their breakdowns and prediction intervals.

    Raises
    ------
    CapacityError
        If no plan fits in memory.
    """
    if not result.plans or not result.plans[0].fits:
        raise CapacityError(
            f"none of {result.covered_configurations:,} configurations fits {system.device.name}'s memory"
        )
    first = result.plans[0]
    winner = predict(model, system, first.run)
    second = None if result.runner_up is None else predict(model, system, result.runner_up.run)
    return Explanation(winner, second, " ".join(filter(None, [_words(winner, second), _dispatch_words(winner)])))


#: Plans whose step times differ by a smaller fraction are equally fast at the number of digits that are printed.
_EQUAL_STEP_TIME_TOLERANCE = 0.0005


def _words(winner: Prediction, other: Prediction | None) -> str:
    largest = max(_PARTS, key=lambda name: getattr(winner.breakdown, name))
    share = getattr(winner.breakdown, largest) / winner.step_time
    text = f"{winner.plan.strategy_text or 'dp'} wins: {100 * share:.0f} % of its step is {_PARTS[largest]}"
    if other is None:
        return f"{text}; no other strategy fits."
    losses = {name: getattr(other.breakdown, name) - getattr(winner.breakdown, name) for name in _PARTS}
    worst = max(losses, key=lambda name: losses[name])
    gap = other.step_time / winner.step_time - 1.0
    slower = f"{100 * gap:.1f} % slower" if gap >= _EQUAL_STEP_TIME_TOLERANCE else "just as fast"
    more = f"{100 * losses[worst] / winner.step_time:.1f} % more {_PARTS[worst]}"
    text += f". Next is {other.plan.strategy_text or 'dp'}, {slower}: {more}"
    low, high = winner.interval
    if low <= other.step_time <= high:
        return f"{text}. That is within the winner's 90 % interval, so either may be the faster one."
    return f"{text}. That is outside the winner's 90 % interval."


_PARTS = {
    "compute": "arithmetic",
    "memory_bound": "memory traffic",
    "launch": "kernel launches",
    "communication_exposed": "exposed communication",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "stragglers": "waiting for the slowest",
}


def plans_with_memory_headroom(
    result: FoundPlans, system: System, top: int = DEFAULT_PLAN_COUNT
) -> tuple[PlanRow, ...]:
    """Return the first plans of a search, plans with free memory (`MEMORY_HEADROOM_SHARE`) before all others.

    If none of the first plans has that much free memory, more plans of the ranking are considered.

    Parameters
    ----------
    result : FoundPlans
        Result of the search.
    system : System
        Machine: its devices, nodes and links.
    top : int, optional
        Number of plans to return.

    Returns
    -------
    tuple of PlanRow
        Plans in the new order.
    """
    roomy = (1.0 - MEMORY_HEADROOM_SHARE) * system.device.memory.usable_bytes
    rows = result.plans
    if result.ranking is not None and rows[0].fits and all(row.memory > roomy for row in rows):
        rows = result.ranking.best_plans(_HEADROOM_CANDIDATES)
    return tuple(sorted(rows, key=lambda row: row.memory > roomy)[:top])


def prefer_memory_headroom(result: FoundPlans, system: System, top: int = DEFAULT_PLAN_COUNT) -> FoundPlans:
    """Reorder the plans of a search so that plans which leave `MEMORY_HEADROOM_SHARE` of the memory free come first.

    The runner-up is chosen again in the same way.

    Parameters
    ----------
    result : FoundPlans
        Result of the search.
    system : System
        Machine: its devices, nodes and links.
    top : int, optional
        Number of plans to return.

    Returns
    -------
    FoundPlans
        Result with the reordered plans; the same object if nothing changes.
    """
    rows = plans_with_memory_headroom(result, system, top)
    if rows[0] == result.plans[0] or result.ranking is None:
        return result
    roomy = (1.0 - MEMORY_HEADROOM_SHARE) * system.device.memory.usable_bytes
    # the first plans mostly have room
    for among in (lambda: rows, lambda ranking=result.ranking: ranking.best_plans(_HEADROOM_CANDIDATES)):
        others = (row for row in among() if row.strategy != rows[0].strategy and row.memory <= roomy)
        if (runner_up := next(others, None)) is not None:
            break
    return replace(result, plans=rows, runner_up=runner_up)
