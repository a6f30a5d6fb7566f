"""The search itself: every configuration of the space, the best ones first, and why the first one wins."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from paleo.errors import CapacityError, PlanError, SpecError, near
from paleo.lowering.recompute import RECOMPUTE
from paleo.parallel.plan import plan
from paleo.predict import Prediction, predict
from paleo.schedules.base import SCHEDULES
from paleo.search.cases import Results
from paleo.search.evaluate import evaluate
from paleo.search.points import priced
from paleo.search.space import Layout, Space, batch, check_searched, layouts, microbatches
from paleo.specs.hardware import System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.step.backend import backend_of

#: Among so many of the best plans the second strategy is looked for first.
_NEAR = 1000
#: What a search makes as small as it can.
OBJECTIVES = ("time", "cost", "energy", "gpus")


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One configuration: how it is run, seconds of a step, bytes of its fullest device."""

    gpus: int
    strategy: str
    microbatch: int
    recompute: str
    schedule: str
    overlapped: bool
    step_time: float
    memory: float
    fits: bool
    run: Run


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
        _searched(model, system, _sized(run, gpus, global_batch), chosen)
        for gpus in dict.fromkeys(counts or (run.gpus,))
    ]
    found = _Found([part for part in parts if len(part.results)], system, objective)
    if not found.parts:
        tried = ", ".join(map(str, counts or (run.gpus,)))
        ordered = "" if chosen.schedules == tuple(SCHEDULES) else f" under schedule {chosen.schedules[0]}"
        raise PlanError(
            f"no configuration of {tried} gpus shares {global_batch} samples and the layers evenly{ordered}"
        )
    plans, front = found.best(top), found.front()
    configurations = sum(len(part.results) for part in parts)
    fitting = len(found.fitting)
    seconds = time.perf_counter() - started
    return Search(configurations, fitting, seconds, objective, global_batch, plans, front, found.runner_up(plans[0]))


def _sized(run: Run, gpus: int, global_batch: int) -> Run:
    return run.model_copy(
        update={"gpus": gpus, "global_batch": global_batch, "batch": None, "microbatch": None, "strategy": "dp"}
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """The configurations of one count of GPUs."""

    run: Run
    layouts: tuple[Layout, ...]
    results: Results


def _searched(model: ModelSpec, system: System, run: Run, space: Space) -> _Part:
    backend = backend_of(system, run, plan(model, system, run.model_copy(update={"global_batch": None})).dtype)
    graph = backend.graph(model, 1)
    chosen = layouts(graph, run.gpus, run.global_batch or 1, space)
    if not chosen:
        raise PlanError(f"{run.gpus} gpus: no degrees share {run.global_batch} samples evenly")
    points = priced(model, backend, chosen, lambda layout: microbatches(layout.local_batch, space))
    return _Part(run, tuple(chosen), evaluate(points, chosen, space, backend))


class _Found:
    """Results of all counts of GPUs together, ordered."""

    def __init__(self, parts: Sequence[_Part], system: System, objective: str) -> None:
        self.parts, self.capacity = parts, system.device.memory.capacity
        self.step, self.memory = (
            np.concatenate([getattr(part.results, name) for part in parts] or [np.zeros(0)])
            for name in ("step_time", "memory")
        )
        self.first = np.concatenate([[0], np.cumsum([len(part.results) for part in parts])])
        self.fits = self.memory <= self.capacity
        self.fitting = np.flatnonzero(self.fits)
        rates = [_rate(system, part.run.gpus, objective) for part in parts]
        of = [np.ones(len(part.results)) if objective == "gpus" else part.results.step_time for part in parts]
        self.score = np.concatenate([rate * one for rate, one in zip(rates, of, strict=True)] or [np.zeros(0)])

    @cached_property
    def score_of_all(self) -> npt.NDArray[np.float64]:
        """What is made small: the score of those that fit; what does not fit comes behind, the smallest first."""
        behind = self.score[self.fits].max(initial=0.0) + self.memory
        return np.where(self.fits, self.score, behind)

    def leading(self, count: int) -> npt.NDArray[np.intp]:
        """The best ``count`` of them (and their equals), the best first; ties go to the faster, then the smaller."""
        some, score = self.fitting, self.score[self.fitting]
        if len(some) < count:
            some, score = np.arange(len(self.step)), self.score_of_all
        if count < len(some):
            near = np.flatnonzero(score <= np.partition(score, count - 1)[count - 1])
            some, score = some[near], score[near]
        return some[np.lexsort((self.memory[some], self.step[some], score, ~self.fits[some]))]

    def best(self, top: int) -> tuple[PlanRow, ...]:
        """The first ``top`` ones; of two that differ in when gradients travel alone, the better."""
        found: dict[tuple[object, ...], PlanRow] = {}
        for index in self.leading(2 * top):
            row = self.row(int(index))
            found.setdefault((row.gpus, row.strategy, row.microbatch, row.recompute, row.schedule), row)
        return tuple(found.values())[:top]

    def runner_up(self, best: PlanRow) -> PlanRow | None:
        """The first that fits and has another strategy."""
        for count in (_NEAR, len(self.step)):
            for index in self.leading(count):
                row = self.row(int(index))
                if row.fits and (row.gpus, row.strategy) != (best.gpus, best.strategy):
                    return row
        return None

    def front(self) -> tuple[PlanRow, ...]:
        """Pareto-optimal in step time and memory among those that fit, fastest first."""
        left, found = self.fitting, []
        while len(left):
            steps = self.step[left]
            fastest = left[steps == steps.min()]
            best = int(fastest[self.memory[fastest].argmin()])
            found.append(best)
            left = left[self.memory[left] < self.memory[best]]
        return tuple(self.row(index) for index in found)

    def row(self, index: int) -> PlanRow:
        which = int(np.searchsorted(self.first, index, side="right")) - 1
        part, place = self.parts[which], index - int(self.first[which])
        laid, microbatch, again, choice = part.results.at(place)
        layout, overlapped = part.layouts[laid], choice.overlapped
        strategy, schedule = _strategy(layout, choice.zero, choice.chunks), list(SCHEDULES)[choice.schedule]
        recompute, single = RECOMPUTE[again], layout.mesh.degree("pp") == 1
        changed: dict[str, object] = {"strategy": strategy, "microbatch": microbatch, "recompute": recompute}
        changed["schedule"] = "1f1b" if schedule == "interleaved" else schedule
        if part.run.exchange is None:
            changed["exchange"] = "overlapped" if overlapped else "after"
        return PlanRow(
            part.run.gpus,
            strategy,
            microbatch,
            recompute,
            "none" if single else schedule,
            overlapped,
            float(self.step[index]),
            float(self.memory[index]),
            bool(self.fits[index]),
            part.run.model_copy(update=changed),
        )


def _rate(system: System, gpus: int, objective: str) -> float:
    """What a second on so many GPUs counts for."""
    if objective == "time":
        return 1.0
    if objective == "gpus":
        return float(gpus)
    if objective == "energy":
        return float(gpus)
    if system.price_per_node is not None:
        return system.price_per_node.rate * -(-gpus // system.devices_per_node)
    if system.device.price is not None:
        return system.device.price.rate * gpus
    raise SpecError(f"objective 'cost': no price is known for {system.name}; add price_per_node, or use energy")


def _strategy(layout: Layout, zero: int, chunks: int) -> str:
    """The strategy in the spelling of the command line."""
    degrees = {**dict(layout.mesh.degrees), "dp": layout.mesh.replicas}
    parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    parts += [f"vp={chunks}"] if chunks > 1 else []
    parts += [f"zero={zero}"] if zero else []
    return ",".join(parts + (["sp"] if layout.sequence_parallel else [])) or "dp"


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the first plan wins: its breakdown beside the next one that is laid out differently, in words."""

    winner: Prediction
    runner_up: Prediction | None
    text: str


def explain(model: ModelSpec, system: System, found: Search) -> Explanation:
    """The winner against the first plan with another strategy, part by part, and whether the interval can tell them
    apart."""
    if not found.plans or not found.plans[0].fits:
        raise CapacityError(f"none of {found.configurations:,} configurations fits {system.device.name}'s memory")
    first = found.plans[0]
    winner = predict(model, system, first.run)
    second = None if found.runner_up is None else predict(model, system, found.runner_up.run)
    return Explanation(winner, second, _words(winner, second))


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
}
