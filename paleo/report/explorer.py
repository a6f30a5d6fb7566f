"""One self-contained page of every evaluated plan of a search: sliders, the front of time, cost and memory, the chosen
plan's breakdown and its command. No server, no network, no library; works by keyboard, on a telephone, dark and light.

Columns are packed as typed arrays in base64, so that 200,000 plans take about 4 MB.
"""

from __future__ import annotations

import base64
import json
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.lowering.policies import words
from paleo.predict import predict
from paleo.report.explorer_assets import SCRIPT, STYLE
from paleo.report.tables import step_parts
from paleo.search.columns import columns
from paleo.specs.prices import devices_per_machine
from paleo.specs.run import Run
from paleo.studies.launch import estimate_command
from paleo.studies.training import rent, training
from paleo.units import HOUR

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.search.columns import PlanColumns
    from paleo.search.plans import Search
    from paleo.specs.hardware import System
    from paleo.specs.model import ModelSpec
    from paleo.studies.buying import Wish
    from paleo.studies.cost import Tariff
    from paleo.studies.training import Training

#: Plans that a page holds; beyond them only the best are kept.
MOST_PLANS = 200_000


def explored(model: ModelSpec, system: System, search: Search, wish: Wish) -> str:
    """The page of all plans of a search on one system; SpecError where it has none."""
    if search.ranking is None or not search.plans:
        raise SpecError("--explore: the search has no plans to show")
    best = predict(model, system, search.plans[0].run)
    whole = None if wish.amount is None else training(best, wish.amount, wish.tariff, long_run=wish.long_run)
    table = columns(search.ranking, MOST_PLANS)
    return explorer(table, best, whole, wish.tariff, objective=wish.objective, global_batch=search.global_batch)


def explorer(
    table: PlanColumns,
    best: Prediction,
    whole: Training | None,
    tariff: Tariff | None = None,
    *,
    objective: str,
    global_batch: int,
) -> str:
    """The page of plans on one system; ``best`` is the one to begin with, ``whole`` its whole training, if any."""
    system, model = best.system, best.model
    machine = devices_per_machine(system)
    rate, _ = rent(system, machine, tariff)
    steps = None if whole is None else whole.steps
    searched = ("gpus", "microbatch", "strategy", "recompute", "schedule")
    unset = {name: Run.model_fields[name].default for name in searched}
    commands = [estimate_command(model, system, run.model_copy(update=unset)) for run in table.runs]
    facts = {
        "model": model.name,
        "system": system.name,
        "objective": objective,
        "globalBatch": global_batch,
        "count": len(table),
        "evaluated": table.evaluated,
        "strategies": table.strategies,
        "policies": table.policies,
        "schedules": table.schedules,
        "capacity": system.device.memory.capacity,
        "perNode": machine,
        "gpuHour": None if rate is None else rate / machine * HOUR,
        "steps": steps,
        "amount": None if whole is None else whole.amount.words,
        "samplesPerStep": global_batch,
        "tokensPerSample": best.graph.tokens_per_sample,
        "command": estimate_command(model, system, best.run),
        "commands": commands,
        "breakdown": step_parts(best),
        "bestIndex": _place(table, best),
        "bestStep": best.step_time,
        "interval": list(best.interval),
        "columns": {name: _packed(values) for name, values in _columns(table).items()},
    }
    title = f"Plans of {model.name} on {system.name}"
    data = json.dumps(facts, allow_nan=False).replace("</", "<\\/")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<style>{STYLE}</style></head>\n<body><main><h1>{escape(title)}</h1>{_BODY}</main>"
        f'<script id="plans" type="application/json">{data}</script><script>{SCRIPT}</script></body></html>\n'
    )


_BODY = """
<p id="verdict" role="status" aria-live="polite"></p>
<section id="controls" aria-label="Filters"></section>
<figure><canvas id="plot" tabindex="0" role="img"
 aria-label="Step time against memory of every plan; arrow keys move along the front"></canvas>
<figcaption id="legend"></figcaption></figure>
<section id="chosen" aria-label="The chosen plan"></section>
<section><h2>The front</h2><div class="scroll"><table id="front"><thead></thead><tbody></tbody></table></div></section>
<noscript>The page needs its own script to draw; nothing is loaded from elsewhere.</noscript>
"""


def _place(table: PlanColumns, best: Prediction) -> int:
    """Where a plan stands among the columns; -1 where it does not."""
    run = best.run
    equal = (table.gpus == run.gpus) & (table.microbatch == best.plan.microbatch)
    equal &= np.array(table.strategies)[table.strategy] == run.strategy
    equal &= np.array(table.policies)[table.policy] == words(run)  # no plan of the table recomputes some layers alone
    if run.exchange is not None:
        equal &= table.overlapped == (run.exchange == "overlapped")
    names = np.array(table.schedules)[table.schedule]
    pipelined = best.plan.stages > 1 and best.plan.parallel.chunks > 1 and run.schedule == "1f1b"
    equal &= names == ("interleaved" if pipelined else run.schedule)
    places = np.flatnonzero(equal)
    return int(places[0]) if len(places) else -1


def _columns(table: PlanColumns) -> dict[str, npt.NDArray[np.generic]]:
    """Each column in the narrowest type that a browser has and that holds it."""
    return {
        "step": table.step_time.astype("<f4"),
        "memory": table.memory.astype("<f4"),
        "gpus": table.gpus.astype("<u4"),
        "microbatch": table.microbatch.astype("<u4"),
        "strategy": table.strategy.astype("<u2"),
        "policy": table.policy.astype("u1"),
        "schedule": table.schedule.astype("u1"),
        "overlapped": table.overlapped.astype("u1"),
        "run": table.run.astype("<u2"),
    }


def _packed(values: npt.NDArray[np.generic]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode("ascii")
