"""One self-contained page of every evaluated plan of a search.

It has sliders, the Pareto front of time, cost and memory, the breakdown and command of the chosen plan. It works
without a server or network, by keyboard, on phones, dark and light.

Columns are typed arrays in base64, so that 200,000 plans take about 4 MB. Layout and script are in ``templates``.
"""

from __future__ import annotations

import base64
import json
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from markupsafe import Markup

from paleo.errors import SpecError
from paleo.launch.commands import estimate_command
from paleo.lowering.policies import recompute_summary
from paleo.predict import Prediction, predict
from paleo.report.estimate import step_parts
from paleo.report.page import rendered
from paleo.search.columns import PlanColumns, columns
from paleo.specs.prices import devices_per_machine
from paleo.specs.run import Run, path_of, updated
from paleo.studies.cost import rent, training
from paleo.units import HOUR

if TYPE_CHECKING:
    from paleo.search.plans import Search
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.studies.purchase import Requirements

#: Plans that a page holds; of more, only the best.
MOST_PLANS = 200_000
#: Column -> its type in the browser.
_TYPES = {
    "step_time": "<f4", "memory": "<f4", "gpus": "<u4", "microbatch": "<u4", "strategy": "<u2", "policy": "u1",
    "schedule": "u1", "overlapped": "u1", "run": "<u2",
}  # fmt: skip


def explored(model: ModelSpec, system: System, search: Search, wish: Requirements) -> str:
    """Return the page of all plans of a search.

    Parameters
    ----------
    model : ModelSpec
    system : System
    search : Search
        Its first plan is chosen when the page opens.
    wish : Requirements
        Amount of training, tariff and objective.

    Raises
    ------
    SpecError
        The search has no plans.
    """
    if search.ranking is None or not search.plans:
        raise SpecError("--explore: the search found no plans")
    best = predict(model, system, search.plans[0].run)
    whole = None if wish.amount is None else training(best, wish.amount, wish.tariff, long_run=wish.long_run)
    table = columns(search.ranking, MOST_PLANS)
    machine = devices_per_machine(system)
    rate, _ = rent(system, machine, wish.tariff)
    searched = ("gpus", "microbatch", "strategy", "recompute", "schedule")
    unset = {name: attrgetter(path_of(name))(Run()) for name in searched}
    facts = {
        "model": model.name,
        "system": system.name,
        "objective": wish.objective,
        "globalBatch": search.global_batch,
        "count": len(table),
        "evaluated": table.evaluated,
        "strategies": table.strategies,
        "policies": table.policies,
        "schedules": table.schedules,
        "capacity": system.device.memory.usable,
        "perNode": machine,
        "gpuHour": None if rate is None else rate / machine * HOUR,
        "steps": None if whole is None else whole.steps,
        "amount": None if whole is None else whole.amount.words,
        "samplesPerStep": search.global_batch,
        "tokensPerSample": best.graph.tokens_per_sample,
        "command": estimate_command(model, system, best.run),
        "commands": [estimate_command(model, system, updated(run, unset)) for run in table.runs],
        "breakdown": step_parts(best),
        "bestIndex": _place(table, best),
        "bestStep": best.step_time,
        "interval": list(best.interval),
        "columns": {
            name.removesuffix("_time"): _packed(getattr(table, name).astype(kind)) for name, kind in _TYPES.items()
        },
    }
    data = json.dumps(facts, allow_nan=False).replace("</", "<\\/")
    return rendered("explorer.html", title=f"Plans of {model.name} on {system.name}", data=Markup(data))


def _place(table: PlanColumns, best: Prediction) -> int:
    """Return the index of a plan among the columns, -1 if it is not among them."""
    run = best.run
    equal = (table.gpus == run.gpus) & (table.microbatch == best.plan.microbatch)
    equal &= np.array(table.strategies)[table.strategy] == run.strategy
    equal &= np.array(table.policies)[table.policy] == recompute_summary(
        run
    )  # no plan of the table recomputes single layers
    if run.exchange.when is not None:
        equal &= table.overlapped == (run.exchange.when == "overlapped")
    names = np.array(table.schedules)[table.schedule]
    pipelined = best.plan.stages > 1 and best.plan.parallel.chunks > 1 and run.pipeline.schedule == "1f1b"
    equal &= names == ("interleaved" if pipelined else run.pipeline.schedule)
    places = np.flatnonzero(equal)
    return int(places[0]) if len(places) else -1


def _packed(values: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
