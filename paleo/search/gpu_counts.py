"""Plan searches over several GPU counts: the best plan of each count, or a reason why there is none."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from paleo.errors import PlanError
from paleo.predict import MEMORY_HEADROOM_SHARE, Prediction, predict
from paleo.search.plans import (
    DEFAULT_PLAN_COUNT,
    FoundPlans,
    check_objective,
    pareto_plans,
    prefer_memory_headroom,
    search,
)
from paleo.search.ranking import Ranking
from paleo.search.space import search_global_batch
from paleo.search.tied_plans import group_tied_plans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paleo.search.ranking import PlanRow
    from paleo.search.space import SearchSpace
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System


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
        Plans in the order of the objective. Plans that are equally fast are grouped (`paleo.search.tied_plans`).
    """
    check_objective(objective)
    results, skipped, batch_of_all = [], list[tuple[int, str]](), search_global_batch(model, run)
    for gpus in dict.fromkeys(counts):
        try:
            sized = run.model_copy(
                update={"gpus": gpus, "global_batch": batch_of_all, "batch": None, "microbatch": None, "strategy": "dp"}
            )
            result = search(model, system, sized, objective="time", top=top, **options)
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
    return replace(whole, plans=tuple(first_plans_per_gpu_count(plans, top)), skipped_gpu_counts=tuple(skipped))


def first_plans_per_gpu_count(rows: Sequence[PlanRow], top: int) -> list[PlanRow]:
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
