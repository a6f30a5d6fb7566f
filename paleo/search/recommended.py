"""The plans that a search recommends, as whole predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.predict import predict
from paleo.search.plans import search

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.search.plans import Search
    from paleo.search.ranking import PlanRow
    from paleo.search.space import Space
    from paleo.specs.hardware import System
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run

#: Share of the memory that a recommended plan leaves free: fragmentation is not modelled.
HEADROOM = 0.05
#: Plans that are looked at, and those among which one that leaves memory free is looked for where these do not.
FIRST, LOOKED_AT = 10, 100


def with_room(result: Search, system: System, top: int = FIRST) -> tuple[PlanRow, ...]:
    """The first plans of a search, those that leave `HEADROOM` of the memory free before all others; further ones where
    none of the first does."""
    roomy = (1.0 - HEADROOM) * system.device.memory.capacity
    rows = result.plans
    if result.ranking is not None and rows[0].fits and all(row.memory > roomy for row in rows):
        rows = result.ranking.best(LOOKED_AT)
    return tuple(sorted(rows, key=lambda row: row.memory > roomy)[:top])


def recommended(
    model: ModelSpec, system: System, run: Run, space: Space | None = None
) -> tuple[list[Prediction], int, int]:
    """The best plan and its runner-up, how many configurations were compared, and how many of them fit.

    Both leave room in memory where any plan does. The runner-up differs in step time.
    """
    result = search(model, system, run, space=space, top=FIRST)
    rows = with_room(result, system)
    others = (row for row in rows if abs(row.step_time / rows[0].step_time - 1.0) > 1 / 10_000)
    chosen = [rows[0], *(row for row in [next(others, None)] if row is not None)]
    return [predict(model, system, row.run) for row in chosen], result.configurations, result.fitting
