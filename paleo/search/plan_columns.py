"""Best configurations of a plan search as numpy columns, for plots and tables of many configurations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import RECOMPUTE_POLICIES
from paleo.schedules.base import SCHEDULES
from paleo.search.ranking import EvaluatedGroup, Ranking, strategy_text
from paleo.specs.run import replace_fields

if TYPE_CHECKING:
    from paleo.specs.run import Run

Array = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class PlanColumns:
    """Best configurations of a plan search as arrays, one entry for each configuration.

    ``step_time`` is in seconds, ``memory`` that of the fullest device [byte], ``microbatch`` in samples. ``strategy``,
    ``recompute_policy``, ``schedule`` and ``run`` are indices in the tuples ``strategies``, ``recompute_policies``
    (recomputation), ``schedules`` and ``runs``. A run holds all options that have no column. Step times follow the
    closed form of a schedule where it has one. ``evaluated_count`` is the number of all evaluated configurations.
    """

    step_time: Array
    memory: Array
    gpus: IndexArray
    microbatch: IndexArray
    strategy: IndexArray
    recompute_policy: IndexArray
    schedule: IndexArray
    overlaps_gradient_exchange: npt.NDArray[np.bool_]
    run: IndexArray
    strategies: tuple[str, ...]
    recompute_policies: tuple[str, ...]
    schedules: tuple[str, ...]
    runs: tuple[Run, ...]
    evaluated_count: int

    def __len__(self) -> int:
        return len(self.step_time)


def plan_columns(ranking: Ranking, most: int) -> PlanColumns:
    """Return the best configurations of a search as arrays; those that fit in memory come first.

    Parameters
    ----------
    ranking : Ranking
        Evaluated configurations with their scores.
    most : int
        Largest number of configurations to return.

    Returns
    -------
    PlanColumns
        Arrays with one entry for each configuration.
    """
    best = np.argsort(ranking.ordering_scores, kind="stable")[:most]
    gpus, microbatch, strategy, policy, schedule, overlapped, run = np.zeros((7, len(best)), dtype=np.intp)
    strategies: dict[str, int] = {}
    runs: list[Run] = []
    for number, part in enumerate(ranking.parts):
        first, end = ranking.first[number : number + 2]
        places = np.flatnonzero((best >= first) & (best < end))
        rows, results = best[places] - first, part.results
        gpus[places] = part.run.gpus
        microbatch[places], policy[places] = results.microbatch[rows], results.recompute_index[rows]
        schedule[places], overlapped[places] = (
            results.choice_field("schedule")[rows],
            results.choice_field("overlaps_gradient_exchange")[rows],
        )
        strategy[places] = _strategies(part, rows, strategies)
        cuts = list(dict.fromkeys(results.layers_per_piece_by_batch))
        cut_of_choice = np.array([cuts.index(cut) for cut in results.layers_per_piece_by_batch], dtype=np.intp)
        run[places] = len(runs) + cut_of_choice[results.batch_index[rows]]
        runs += [part.run if cut is None else replace_fields(part.run, {"pipeline.cut": cut}) for cut in cuts]
    return PlanColumns(
        ranking.step[best],
        ranking.memory[best],
        gpus=gpus,
        microbatch=microbatch,
        strategy=strategy,
        recompute_policy=policy,
        schedule=schedule,
        overlaps_gradient_exchange=overlapped > 0,
        run=run,
        strategies=tuple(strategies),
        recompute_policies=tuple(RECOMPUTE_POLICIES),
        schedules=tuple(SCHEDULES),
        runs=tuple(runs),
        evaluated_count=len(ranking.step),
    )


def _strategies(part: EvaluatedGroup, rows: IndexArray, known: dict[str, int]) -> IndexArray:
    """Return the index of each configuration's strategy text in ``known``; new texts are added to ``known``."""
    results = part.results
    choices = np.column_stack([results.layout_index, results.choice_field("chunks"), results.choice_field("zero")])[
        rows
    ]
    distinct, position = np.unique(choices, axis=0, return_inverse=True)
    words = [strategy_text(part.layouts[layout], int(z), int(chunks), part.preset) for layout, chunks, z in distinct]
    numbers = np.array([known.setdefault(word, len(known)) for word in words], dtype=np.intp)
    return numbers[position.ravel()]
