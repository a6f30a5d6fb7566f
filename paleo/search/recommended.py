"""The plans that a search recommends, as whole predictions."""

from __future__ import annotations

from paleo.predict import Prediction, predict
from paleo.search.plans import search
from paleo.search.space import Space
from paleo.specs.hardware import System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run

#: What frameworks in common use offer: ZeRO-2 saves little beside ZeRO-1, and zero-bubble schedules are rare.
COMMON = Space(schedules=("1f1b", "interleaved"), zero=(0, 1, 3))
#: Plans that are looked at for the first ones that leave memory free.
LOOKED_AT = 100


def recommended(model: ModelSpec, system: System, run: Run, *, headroom: float) -> tuple[list[Prediction], int, int]:
    """The best plan and its runner-up, how many configurations were compared, and how many of them fit.

    Both leave ``headroom`` of the memory free where any plan does. The runner-up differs in step time.
    """
    result = search(model, system, run, space=COMMON, top=LOOKED_AT)
    roomy = (1.0 - headroom) * system.device.memory.capacity
    rows = [row for row in result.plans if row.memory <= roomy] or list(result.plans)
    others = (row for row in rows if abs(row.step_time / rows[0].step_time - 1.0) > 1 / 10_000)
    chosen = [rows[0], *(row for row in [next(others, None)] if row is not None)]
    return [predict(model, system, row.run) for row in chosen], result.configurations, result.fitting
