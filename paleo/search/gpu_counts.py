"""Grouping of plans that are equally fast within the error of a prediction, the simplest plan first."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any

from paleo.errors import PlanError
from paleo.parallel.placement import parse_strategy
from paleo.predict import MEMORY_HEADROOM_SHARE, Prediction, predict
from paleo.search.plans import (
    DEFAULT_PLAN_COUNT,
    FoundPlans,
    check_objective,
    pareto_plans,
    prefer_memory_headroom,
    search,
)
from paleo.search.ranking import MAX_COMPARED_STRATEGIES, Ranking

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from paleo.search.plans import FoundPlans
    from paleo.search.ranking import PlanRow
    from paleo.search.space import SearchSpace
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System

#: Plans on one machine count as equally fast within this fraction of the (logarithmic) distance from a step to the
#: upper end of its 90 % interval. It is less than 1 because the errors of such plans are alike. For 404 pairs of
#: measured plans within this distance (same network, machine and batch; eleven sources) the predicted order is right in
#: 53 %; for 1,610 pairs farther apart than the whole interval it is right in 97 %.
_TIE_INTERVAL_FRACTION = 0.5
#: Longest over shortest step of a class where no interval is known: about half the usual interval.
_DEFAULT_TIE_RATIO = 1.05
#: Schedules that frameworks run by default.
_USUAL = ("none", "1f1b", "interleaved")
#: Fraction of the memory up to which a plan leaves room for errors of the predicted memory.
_COMFORTABLE = 0.85


def simplicity_key(row: PlanRow, capacity: float) -> tuple[float, ...]:
    """Return a sort key that puts plans first that are simpler to set up and to run.

    Parameters
    ----------
    row : PlanRow
        Plan of a search.
    capacity : float
        Memory of a device [bytes].

    Returns
    -------
    tuple
        Number of mesh axes in use, whether stages are uneven, whether the schedule is unusual, whether there are
        virtual stages, whether little memory is left, step time [s].
    """
    axes = sum(degree > 1 for degree in parse_strategy(row.strategy).degrees.values())
    uneven = isinstance(row.run.pipeline.cut, tuple) and len(set(row.run.pipeline.cut)) > 1
    return (
        axes,
        uneven,
        row.schedule not in _USUAL,
        "vp=" in row.strategy,
        row.memory > _COMFORTABLE * capacity,
        row.step_time,
    )


def group_tied_plans(model: ModelSpec, system: System, result: FoundPlans, top: int) -> FoundPlans:
    """Group plans of one GPU count that are equally fast within the prediction's error.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    result : FoundPlans
        Result of the search, with the fastest plans first.
    top : int
        Number of plans to return.

    Returns
    -------
    FoundPlans
        Result with its plans group by group, the simplest first; `PlanRow.tie_group_step_time` is the shortest step of
        a group [s]. Plans that leave less than `MEMORY_HEADROOM_SHARE` of the memory free come last; those that do not
        fit are not grouped.
    """
    first = predict(model, system, result.plans[0].run)
    width = (first.interval[1] / first.step_time) ** _TIE_INTERVAL_FRACTION
    varied = () if result.ranking is None else result.ranking.best_of_each_strategy(MAX_COMPARED_STRATEGIES)
    rows = list(result.plans) + [row for row in varied if row not in result.plans]
    capacity = system.device.memory.usable_bytes
    roomy = (1.0 - MEMORY_HEADROOM_SHARE) * capacity
    rows.sort(key=lambda row: (not row.fits, row.memory > roomy, row.step_time))
    parts = groupby(rows, key=lambda row: (row.fits, row.memory > roomy))
    grouped = [row for (fits, _), part in parts for row in _grouped(part, width if fits else 1.0, capacity)]
    return replace(result, plans=tuple(_selected(grouped, top)))


def simplest_plan(rows: Sequence[PlanRow], capacity: float) -> PlanRow:
    """Return the simplest plan among those about as fast as the first plan.

    Parameters
    ----------
    rows : sequence of PlanRow
        Plans of a search, the best first.
    capacity : float
        Memory of a device [bytes].

    Returns
    -------
    PlanRow
        The simplest plan; the first one if no simpler plan is about as fast and fits.
    """
    first, roomy = rows[0], (1.0 - MEMORY_HEADROOM_SHARE) * capacity
    equals = (row for row in rows if row.step_time <= _DEFAULT_TIE_RATIO * first.step_time and row.memory <= roomy)
    return min(equals, key=lambda row: simplicity_key(row, capacity), default=first)


def _grouped(rows: Iterable[PlanRow], width: float, capacity: float) -> Iterable[PlanRow]:
    """Sort plans by groups of about equal step time, the simplest plan of each first, and set ``tie_group_step_time``.

    ``rows`` are sorted by step time. ``width`` is the largest ratio of step times within a group, ``capacity`` the
    memory of a device [byte].
    """
    lead, classes = 0.0, list["PlanRow"]()
    for row in rows:
        lead = lead if row.step_time <= lead * width else row.step_time
        classes.append(replace(row, tie_group_step_time=lead))
    return sorted(classes, key=lambda r: (r.tie_group_step_time, *(simplicity_key(r, capacity) if r.fits else ())))


def _selected(rows: Sequence[PlanRow], top: int) -> Iterable[PlanRow]:
    """Return the simplest and the fastest plan of each group, then others up to ``top`` plans, in the given order."""
    first = list[int]()
    for _, members in groupby(
        range(len(rows)), key=lambda number: (rows[number].fits, rows[number].tie_group_step_time)
    ):
        simplest, *others = members
        first += dict.fromkeys((simplest, min((simplest, *others), key=lambda number: rows[number].step_time)))
    others_of_all = (number for number in range(len(rows)) if number not in first)
    return [rows[number] for number in sorted([*first, *others_of_all][:top])]


def tie_group_numbers(rows: Sequence[PlanRow]) -> list[int]:
    """Return the group of each plan (plans with about the same step time), numbered from 1 in the order of the plans.

    Parameters
    ----------
    rows : sequence of PlanRow
        Plans of one system.

    Returns
    -------
    list of int
        Number of the class of each plan.
    """
    keys = [(row.gpus, row.fits, row.tie_group_step_time or row.step_time) for row in rows]
    known = list(dict.fromkeys(keys))
    return [known.index(key) + 1 for key in keys]


def merge_search_results(results: Sequence[FoundPlans], system: System, objective: str) -> FoundPlans:
    """Merge plan searches on one system, such as one for each GPU count, into one result.

    Numbers of configurations are added; the Pareto front is that of all plans.

    Parameters
    ----------
    results : sequence of FoundPlans
        Searches on the same system; fields that cannot be merged come from the first.
    system : System
        Machine: its devices, nodes and links.
    objective : str
        What plans are ranked by, such as "time".

    Returns
    -------
    FoundPlans
        Merged result; its ``plans`` are still those of the first search.
    """
    ranking = Ranking.merge([each.ranking for each in results if each.ranking is not None], system, objective)
    front = pareto_plans([row for result in results for row in result.pareto_plans])
    sums = {name: sum(getattr(each, name) for each in results) for name in _SUMS}
    return replace(results[0], pareto_plans=front, ranking=ranking, objective=objective, **sums)


_SUMS = ("covered_configurations", "fitting_configurations", "evaluated_configurations", "search_duration")


def search_gpu_counts(
    model: ModelSpec, system: System, run: Run, counts: Sequence[int], *, objective: str = "time",
    top: int = DEFAULT_PLAN_COUNT,
    **options: Any,
) -> FoundPlans:  # fmt: skip
    """Search plans for each GPU count separately, so that each count gets its best plan or a reason why it has none.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Options of the user; the global batch is kept, the strategy is searched.
    counts : sequence of int
        Numbers of GPUs.
    objective : str
        Quantity that plans are sorted by, as in `search`.
    top : int
        Number of plans to return; at least one for each GPU count.
    **options
        Further arguments of `search`.

    Returns
    -------
    FoundPlans
        Plans in the order of the objective. Plans that are equally fast are grouped (`paleo.search.gpu_counts`).
    """
    check_objective(objective)
    results, skipped = [], list[tuple[int, str]]()
    for gpus in dict.fromkeys(counts):
        try:
            result = search(model, system, run, counts=(gpus,), objective="time", top=top, **options)
            results.append(group_tied_plans(model, system, prefer_memory_headroom(result, system, top), top))
        except PlanError as error:
            skipped.append((gpus, str(error)))
            problem = error
    if not results:
        raise problem
    whole = merge_search_results(results, system, objective) if len(results) > 1 or objective != "time" else results[0]
    rates = {} if whole.ranking is None else whole.ranking.rates
    roomy = (1.0 - MEMORY_HEADROOM_SHARE) * system.device.memory.usable_bytes

    def order(row: PlanRow) -> tuple[float, ...]:
        score = (
            float(row.gpus)
            if objective == "gpus"
            else rates.get(row.gpus, 1.0) * (row.tie_group_step_time or row.step_time)
        )
        return not row.fits, row.memory > roomy, score

    plans = sorted((row for result in results for row in result.plans), key=order)
    return replace(whole, plans=tuple(_first_plans_per_gpu_count(plans, top)), skipped_gpu_counts=tuple(skipped))


def _first_plans_per_gpu_count(rows: Sequence[PlanRow], top: int) -> list[PlanRow]:
    """Return the first ``top`` plans in their order, always including the first plan of each GPU count.

    Parameters
    ----------
    rows : sequence of PlanRow
        Plans, the best first.
    top : int
        Number of plans to return; more are returned if there are more GPU counts.

    Returns
    -------
    list of PlanRow
        Chosen plans, the best first.
    """
    leading = list({row.gpus: number for number, row in reversed(list(enumerate(rows)))}.values())
    others = (number for number in range(len(rows)) if number not in leading)
    return [rows[number] for number in sorted([*leading, *islice(others, max(top - len(leading), 0))])]


def recommended_plans(
    model: ModelSpec, system: System, run: Run, space: SearchSpace | None = None
) -> tuple[list[Prediction], int, int]:
    """Return the best plan for a GPU count and its runner-up, and how many configurations were compared and fit.

    Both plans leave free memory on the devices if any plan does. The runner-up is the next plan with a different step
    time.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine.
    run : Run
        Run whose GPU count is searched; its other fields stay as they are.
    space : SearchSpace, optional
        Choices to search; None takes the usual ones.

    Returns
    -------
    tuple of (list of Prediction, int, int)
        Predictions of the best plan and of its runner-up (if any), configurations compared, and configurations that fit
        into memory.
    """
    result = search_gpu_counts(model, system, run, (run.gpus,), space=space)
    rows = result.plans
    runners_up = (row for row in rows if abs(row.step_time / rows[0].step_time - 1.0) > 1 / 10_000)
    chosen = [rows[0], *(row for row in [next(runners_up, None)] if row is not None)]
    return (
        [predict(model, system, row.run) for row in chosen],
        result.covered_configurations,
        result.fitting_configurations,
    )
