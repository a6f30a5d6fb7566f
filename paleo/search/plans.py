"""The search itself: every configuration of the space, the best ones first, and why the first one wins."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from paleo.compression.zeropp import ZeroPlusPlus
from paleo.errors import CapacityError, PlanError, SpecError, near
from paleo.parallel.plan import plan
from paleo.predict import predict
from paleo.schedules.base import SCHEDULES
from paleo.search.dispatchers import dispatch_words, other_dispatcher
from paleo.search.evaluate import evaluate
from paleo.search.partial_recompute import partly_recomputed
from paleo.search.points import priced
from paleo.search.ranking import Part, Ranking
from paleo.search.space import Space, batch, check_searched, layouts, microbatches
from paleo.step.backend import backend_of
from paleo.step.compression import check_sharded

if TYPE_CHECKING:
    from paleo.compression.base import Compression
    from paleo.predict import Prediction
    from paleo.search.ranking import PlanRow
    from paleo.search.space import Layout
    from paleo.specs.hardware import System
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.step.backend import Backend

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
    return Search(configurations, fitting, seconds, objective, global_batch, plans, front, runner_up, ranking)


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
    """The configurations of one count of GPUs, by each dispatcher of tokens."""
    dtype = plan(model, system, run.model_copy(update={"global_batch": None, "cut": None})).dtype
    backend = backend_of(system, run, dtype)
    space = _compressible(space, backend.compression)
    if space.etp is None and backend.software.parallelism.expert_tensor == "none":
        space = replace(space, etp=(None, 1))
    graph = backend.graph(model, 1)
    chosen = layouts(graph, run.gpus, run.global_batch or 1, space, system.devices_per_node)
    if not chosen:
        stated = ",".join(f"{axis}={degree}" for axis, degree in space.degrees.items())
        under = f" with {stated}" if stated else ""
        raise PlanError(f"{run.gpus} gpus: no layout{under} shares {run.global_batch} samples evenly")
    yield _part(model, chosen, space, backend)
    other, spread = other_dispatcher(backend), [layout for layout in chosen if layout.experts > 1]
    if other is not None and spread:
        changed = run.model_copy(update={"expert_dispatch": other})
        yield _part(model, spread, space, backend_of(system, changed, dtype))


def _part(model: ModelSpec, chosen: Sequence[Layout], space: Space, backend: Backend) -> Part:
    """All configurations of some layouts."""
    points = priced(model, backend, chosen, lambda layout: microbatches(layout.local_batch, space), space)
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
