"""Configurations of a search as columns of arrays, without a Python loop over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.lowering.policies import RECOMPUTE
from paleo.schedules.base import SCHEDULES
from paleo.search.ranking import strategy_words

if TYPE_CHECKING:
    from paleo.search.ranking import Ranking
    from paleo.specs.run import Run

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class PlanColumns:
    """Configurations, one entry each: seconds of a step, bytes of the fullest device, GPUs, samples of a microbatch,
    and positions in ``strategies``, ``policies``, ``schedules`` and ``runs``: a run states all that the other columns
    do not. Steps are those of closed forms where schedules have any; ``evaluated`` configurations there were in all."""

    step_time: Array
    memory: Array
    gpus: Index
    microbatch: Index
    strategy: Index
    policy: Index
    schedule: Index
    overlapped: npt.NDArray[np.bool_]
    run: Index
    strategies: tuple[str, ...]
    policies: tuple[str, ...]
    schedules: tuple[str, ...]
    runs: tuple[Run, ...]
    evaluated: int

    def __len__(self) -> int:
        return len(self.step_time)


def columns(ranking: Ranking, most: int) -> PlanColumns:
    """The best ``most`` configurations by the score of a search, those that fit before those that do not."""
    chosen = np.argsort(ranking.score_of_all, kind="stable")[:most]
    count = len(chosen)
    gpus, microbatch, strategy, policy, schedule, run = (np.zeros(count, dtype=np.intp) for _ in range(6))
    overlapped = np.zeros(count, dtype=bool)
    names: dict[str, int] = {}
    runs: list[Run] = []
    for number, part in enumerate(ranking.parts):
        first, end = ranking.first[number : number + 2]
        places = np.flatnonzero((chosen >= first) & (chosen < end))
        rows, results = chosen[places] - first, part.results
        gpus[places] = part.run.gpus
        microbatch[places], policy[places] = results.microbatch[rows], results.recompute[rows]
        choices = np.array([(c.schedule, c.chunks, c.zero, c.overlapped) for c in results.choices], dtype=np.intp)
        layout, choice = results.layout[rows], results.choice[rows]
        schedule[places], overlapped[places] = choices[choice, 0], choices[choice, 3] > 0
        pairs = np.stack([layout, choices[choice, 1], choices[choice, 2]], axis=1)
        unique, inverse = np.unique(pairs, axis=0, return_inverse=True)
        words = [
            strategy_words(part.layouts[each], int(zero), int(chunks), part.preset) for each, chunks, zero in unique
        ]
        codes = np.array([names.setdefault(word, len(names)) for word in words], dtype=np.intp)
        strategy[places] = codes[inverse.ravel()] if len(codes) else 0
        cuts = list(dict.fromkeys(results.cuts))
        run[places] = len(runs) + np.array([cuts.index(cut) for cut in results.cuts], dtype=np.intp)[choice]
        runs += [part.run if cut is None else part.run.model_copy(update={"cut": cut}) for cut in cuts]
    return PlanColumns(
        ranking.step[chosen],
        ranking.memory[chosen],
        gpus=gpus,
        microbatch=microbatch,
        strategy=strategy,
        policy=policy,
        schedule=schedule,
        overlapped=overlapped,
        run=run,
        strategies=tuple(names),
        policies=tuple(RECOMPUTE),
        schedules=tuple(SCHEDULES),
        runs=tuple(runs),
        evaluated=len(ranking.step),
    )
