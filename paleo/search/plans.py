"""The search itself: every configuration of the space, the best ones first, why the first one wins, and the plans that
are recommended.

Of two dispatchers of tokens to experts the better is found: an all-to-all that sends a token to each of its experts, or
one that sends it once to each node and shakes hands first. Few tokens pay for the handshake, many for the copies.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from paleo.compression.zeropp import ZeroPlusPlus
from paleo.errors import CapacityError, PlanError, SpecError, near
from paleo.parallel.plan import plan
from paleo.predict import HEADROOM, predict
from paleo.schedules.base import SCHEDULES
from paleo.search.block_costs import Graphs, priced
from paleo.search.evaluate import evaluate, pairs_imply_overlap
from paleo.search.partial_recompute import partly_recomputed
from paleo.search.ranking import Part, Ranking
from paleo.search.space import Space, batch, check_searched, divisors, layouts, microbatches
from paleo.specs.software import load_software
from paleo.step.backend import backend_of
from paleo.step.exchange import check_sharded

if TYPE_CHECKING:
    from paleo.compression.base import Compression
    from paleo.predict import Prediction
    from paleo.search.ranking import PlanRow
    from paleo.search.space import Layout
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.software import Dispatch
    from paleo.specs.system import System
    from paleo.step.backend import Backend

#: Dispatchers by their names in words.
NAMES: dict[Dispatch, str] = {"nccl": "NCCL's all-to-all", "deepep": "DeepEP", "hybridep": "HybridEP"}
#: Microbatches that are tried for a crossover.
_TRIED = 8


def other_dispatcher(backend: Backend) -> Dispatch | None:
    """The dispatcher that a search tries beside the software's own; None where the run states one, or where the
    software has no other."""
    software = backend.software
    if backend.run.expert_dispatch is not None or not software.host.handshake:
        return None
    return "deepep" if software.parallelism.expert_dispatch == "nccl" else "nccl"


def dispatch_words(winner: Prediction) -> str:
    """How a plan's tokens travel, what the other dispatcher would cost, and at which microbatches it would win; empty
    where no experts are spread."""
    software = load_software(winner.run.software)
    used = winner.run.expert_dispatch or software.parallelism.expert_dispatch
    mesh, axes = winner.plan.mesh, winner.plan.parallel.expert_axes
    if mesh.group_size(axes) == 1 or not software.host.handshake:
        return ""
    other: Dispatch = "deepep" if used == "nccl" else "nccl"
    gap = _step(winner, other, winner.plan.microbatch) / winner.step_time - 1.0
    slower = f"{100 * abs(gap):.1f} % {'slower' if gap >= 0 else 'faster'}"
    text = f"Tokens travel by {NAMES[used]}; {NAMES[other]} would be {slower}."
    return f"{text} {_crossover(winner, used, other)}"


def _crossover(winner: Prediction, used: Dispatch, other: Dispatch) -> str:
    """From which microbatch on the faster of two dispatchers is another one."""
    wins = dict(_compared(winner, used, other))
    sizes = list(wins)
    crossing = next((size for before, size in pairwise(sizes) if wins[before] != wins[size]), None)
    if crossing is None:
        first = other if wins[sizes[0]] else used
        return f"At microbatches of {sizes[0]} to {sizes[-1]} {NAMES[first]} is the faster one."
    below, above = (other, used) if wins[sizes[0]] else (used, other)
    return f"Below a microbatch of {crossing} {NAMES[below]} is faster, from there on {NAMES[above]}."


def _compared(winner: Prediction, used: Dispatch, other: Dispatch) -> Iterator[tuple[int, bool]]:
    """Microbatches that the plan's schedule can run, and whether the other dispatcher is faster there."""
    for size in divisors(winner.plan.local_batch)[:_TRIED]:
        with suppress(PlanError):
            yield size, _step(winner, other, size) < _step(winner, used, size)


def _step(winner: Prediction, dispatcher: Dispatch, microbatch: int) -> float:
    """Seconds of a plan's step by another dispatcher and microbatch."""
    changed = {"expert_dispatch": dispatcher, "microbatch": microbatch}
    return predict(winner.model, winner.system, winner.run.model_copy(update=changed)).step_time


#: What a search makes as small as it can.
OBJECTIVES = ("time", "cost", "energy", "gpus")


@dataclass(frozen=True, slots=True)
class Search:
    """What was found: the best plans first, each with gradients travelling when it is better, the front of those that
    no other beats in both time and memory, and the first that fits with another strategy than the best."""

    configurations: int
    fitting: int
    seconds: float
    objective: str
    global_batch: int
    plans: tuple[PlanRow, ...]
    front: tuple[PlanRow, ...]
    runner_up: PlanRow | None = None
    ranking: Ranking | None = field(default=None, repr=False, compare=False)


def search(
    model: ModelSpec,
    system: System,
    run: Run,
    *,
    counts: Sequence[int] = (),
    space: Space | None = None,
    objective: str = "time",
    top: int = 10,
) -> Search:
    """Every configuration of ``space`` on each count of GPUs (those of the run by default), all with the same global
    batch.

    The best plans come first by ``objective``: ``time`` of a step, ``cost`` and ``energy`` of one (rent of whole nodes,
    design power), or ``gpus`` (the fewest that fit). What fits comes before what does not, and of that the smallest
    comes first."""
    if objective not in OBJECTIVES:
        raise SpecError(f"objective {objective!r}; {near(objective, OBJECTIVES)}")
    check_searched(run)
    started = time.perf_counter()
    chosen = space or Space()
    global_batch = batch(model, run)
    parts = [
        part
        for gpus in dict.fromkeys(counts or (run.gpus,))
        for part in _searched(model, system, _sized(run, gpus, global_batch), chosen)
    ]
    ranking = Ranking([part for part in parts if len(part.results)], system, objective)
    if not ranking.parts:
        tried = ", ".join(map(str, counts or (run.gpus,)))
        ordered = " under schedule " + " or ".join(chosen.schedules) if chosen.schedules else " without pipelines"
        ordered = "" if chosen.schedules == tuple(SCHEDULES) else ordered
        raise PlanError(
            f"no configuration of {tried} gpus shares {global_batch} samples and the layers evenly{ordered}"
        )
    plans = ranking.best(top)
    partial = _partial(model, system, ranking, plans[0])
    plans, front = (*partial, *plans)[:top], unbeaten([*partial, *ranking.front()])
    runner_up = ranking.runner_up(plans[0])
    configurations, fitting = sum(len(part.results) for part in parts), len(ranking.fitting)
    seconds = time.perf_counter() - started
    return Search(
        configurations,
        fitting,
        seconds=seconds,
        objective=objective,
        global_batch=global_batch,
        plans=plans,
        front=front,
        runner_up=runner_up,
        ranking=ranking,
    )


def _partial(model: ModelSpec, system: System, ranking: Ranking, first: PlanRow) -> tuple[PlanRow, ...]:
    """Plans before the first one that recompute some layers alone, the best first."""
    if not first.fits or not ranking.timed:
        return ()
    return tuple(reversed(partly_recomputed(model, system, ranking, ranking.rates[first.gpus] * first.step_time)))


def unbeaten(rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
    """Those that no other beats in both step time and memory, the fastest first."""
    ordered = sorted(rows, key=lambda row: (row.step_time, row.memory))
    smallest = [math.inf, *accumulate((row.memory for row in ordered), min)]
    return tuple(row for row, before in zip(ordered, smallest, strict=False) if row.memory < before)


def _sized(run: Run, gpus: int, global_batch: int) -> Run:
    return run.model_copy(
        update={"gpus": gpus, "global_batch": global_batch, "batch": None, "microbatch": None, "strategy": "dp"}
    )


def _searched(model: ModelSpec, system: System, run: Run, space: Space) -> Iterator[Part]:
    """The configurations of one count of GPUs, by each dispatcher of tokens; apart from others those under schedules
    that pair passes, beside which tokens travel."""
    dtype = plan(model, system, run.model_copy(update={"global_batch": None, "cut": None})).dtype
    backend = backend_of(system, run, dtype)
    space = _compressible(space, backend.compression)
    if space.etp is None and backend.software.parallelism.expert_tensor == "none":
        space = replace(space, etp=(None, 1))
    graphs = Graphs(model, backend)
    chosen = layouts(graphs.at(1), run.gpus, run.global_batch or 1, space, system.devices_per_node)
    if not chosen:
        stated = ",".join(f"{axis}={degree}" for axis, degree in space.degrees.items())
        under = f" with {stated}" if stated else ""
        raise PlanError(f"{run.gpus} gpus: no layout{under} shares {run.global_batch} samples evenly")
    spread = [layout for layout in chosen if layout.experts > 1]
    paired = replace(space, schedules=tuple([name for name in space.schedules if SCHEDULES[name].pairs]))
    piped = [layout for layout in spread if _runs(layout, paired)]
    parts = [(backend, chosen)]
    other = other_dispatcher(backend)
    if other is not None and spread:
        parts.append((backend_of(system, run.model_copy(update={"expert_dispatch": other}), dtype), spread))
    for each, laid_out in parts:
        yield _part(graphs, laid_out, space, each)
        if pairs_imply_overlap(each) and piped:
            software = each.software.changed({"overlap.experts": True})
            yield _part(graphs, piped, paired, backend_of(system, each.run, dtype, software))


def _runs(layout: Layout, space: Space) -> bool:
    """Whether a pipeline of a layout can run under a schedule of a space."""
    stages, sizes = layout.mesh.degree("pp"), np.array(microbatches(layout.local_batch, space))
    counts = layout.local_batch // sizes
    return stages > 1 and any(SCHEDULES[name].runs(stages, counts).any() for name in space.schedules)


def _part(graphs: Graphs, chosen: Sequence[Layout], space: Space, backend: Backend) -> Part:
    """All configurations of some layouts."""
    points = priced(graphs, backend, chosen, lambda layout: microbatches(layout.local_batch, space), space)
    return Part(backend.run, tuple(chosen), evaluate(points, chosen, space, backend), space.preset)


def _compressible(space: Space, method: Compression | None) -> Space:
    """The part of a space that an estimate accepts with a compression: of sharded parameters those with ZeRO-3 alone,
    of methods that cannot be summed on the wire those without."""
    if isinstance(method, ZeroPlusPlus):
        check_sharded("zeropp", 3 if 3 in space.zero else 0)
        return replace(space, zero=(3,))
    if method is None or method.linear:
        return space
    return replace(space, zero=tuple(stage for stage in space.zero if stage < 3), sharded_pipelines=False)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the first plan wins: its breakdown beside the next one that is laid out differently, in words."""

    winner: Prediction
    runner_up: Prediction | None
    text: str


def explain(model: ModelSpec, system: System, result: Search) -> Explanation:
    """The winner against the first plan with another strategy, part by part, and whether the interval can tell them
    apart."""
    if not result.plans or not result.plans[0].fits:
        raise CapacityError(f"none of {result.configurations:,} configurations fits {system.device.name}'s memory")
    first = result.plans[0]
    winner = predict(model, system, first.run)
    second = None if result.runner_up is None else predict(model, system, result.runner_up.run)
    return Explanation(winner, second, " ".join(filter(None, [_words(winner, second), dispatch_words(winner)])))


#: Plans whose steps differ by less are equally fast, as figures are shown.
SAME = 0.0005


def _words(winner: Prediction, other: Prediction | None) -> str:
    largest = max(_PARTS, key=lambda name: getattr(winner.breakdown, name))
    share = getattr(winner.breakdown, largest) / winner.step_time
    text = f"{winner.plan.strategy or 'dp'} wins: {100 * share:.0f} % of its step is {_PARTS[largest]}"
    if other is None:
        return f"{text}; no other strategy fits."
    losses = {name: getattr(other.breakdown, name) - getattr(winner.breakdown, name) for name in _PARTS}
    worst = max(losses, key=lambda name: losses[name])
    gap = other.step_time / winner.step_time - 1.0
    slower = f"{100 * gap:.1f} % slower" if gap >= SAME else "just as fast"
    more = f"{100 * losses[worst] / winner.step_time:.1f} % more {_PARTS[worst]}"
    text += f". Next is {other.plan.strategy or 'dp'}, {slower}: {more}"
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


#: Plans that are looked at, and those among which one that leaves memory free is looked for where these do not.
FIRST, LOOKED_AT = 10, 100


def with_room(result: Search, system: System, top: int = FIRST) -> tuple[PlanRow, ...]:
    """The first plans of a search, those that leave `HEADROOM` of the memory free before all others; further ones where
    none of the first does."""
    roomy = (1.0 - HEADROOM) * system.device.memory.usable
    rows = result.plans
    if result.ranking is not None and rows[0].fits and all(row.memory > roomy for row in rows):
        rows = result.ranking.best(LOOKED_AT)
    return tuple(sorted(rows, key=lambda row: row.memory > roomy)[:top])


def leaving_room(result: Search, system: System, top: int = FIRST) -> Search:
    """The search with plans that leave `HEADROOM` of the memory free before all others, the runner-up among them."""
    rows = with_room(result, system, top)
    if rows[0] == result.plans[0] or result.ranking is None:
        return result
    roomy = (1.0 - HEADROOM) * system.device.memory.usable
    others = (row for row in (*rows, *result.ranking.best(LOOKED_AT)) if row.strategy != rows[0].strategy)
    return replace(result, plans=rows, runner_up=next((row for row in others if row.memory <= roomy), None))


def recommended(
    model: ModelSpec, system: System, run: Run, space: Space | None = None
) -> tuple[list[Prediction], int, int]:
    """The best plan and its runner-up, how many configurations were compared, and how many of them fit.

    Both leave room in memory where any plan does. The runner-up differs in step time.
    """
    result = search(model, system, run, space=space, top=FIRST)
    rows = with_room(result, system)
    runners_up = (row for row in rows if abs(row.step_time / rows[0].step_time - 1.0) > 1 / 10_000)
    chosen = [rows[0], *(row for row in [next(runners_up, None)] if row is not None)]
    return [predict(model, system, row.run) for row in chosen], result.configurations, result.fitting
