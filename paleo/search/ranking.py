"""The configurations of a search in order: the best first, the front of those that no other beats, and rows of a table.

Most schedules have closed forms that are near where stages differ; they order the configurations, and those that come
first are then run pass by pass, in the order of their schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.lowering.policies import RECOMPUTE
from paleo.schedules.base import SCHEDULES
from paleo.specs.prices import rented

if TYPE_CHECKING:
    from paleo.search.configurations import Choice, Results
    from paleo.search.space import Layout
    from paleo.specs.run import Run
    from paleo.specs.system import System

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
#: Among so many of the best plans the second strategy is looked for first.
_NEAR = 1000
#: Batches of near closed forms whose best configuration is run pass by pass, and rounds in which those that have come
#: first are.
_BATCHES, _ROUNDS = 6, 6


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One configuration: how it runs, seconds of its step, bytes of its fullest device."""

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
class Part:
    """The configurations of one count of GPUs."""

    run: Run
    layouts: tuple[Layout, ...]
    results: Results
    preset: str = "dp"


class Ranking:
    """Results of all counts of GPUs together, ordered. ``rates``: what a second on each count of GPUs counts for;
    ``timed``: whether seconds count at all."""

    def __init__(self, parts: Sequence[Part], system: System, objective: str) -> None:
        self.parts, self.capacity = parts, system.device.memory.usable
        self.step, self.memory = (
            np.concatenate([getattr(part.results, name) for part in parts] or [np.zeros(0)])
            for name in ("step_time", "memory")
        )
        self.first = np.concatenate([[0], np.cumsum([len(part.results) for part in parts])]).astype(np.intp)
        self.fits = self.memory <= self.capacity
        self.fitting = np.flatnonzero(self.fits)
        self.exact = np.concatenate([part.results.exact for part in parts] or [np.zeros(0, dtype=bool)])
        self.rates = {part.run.gpus: _rate(system, part.run.gpus, objective) for part in parts}
        rates = [self.rates[part.run.gpus] for part in parts]
        self._rates = np.repeat(rates, [len(part.results) for part in parts])
        self.timed = objective != "gpus"

    @classmethod
    def joined(cls, rankings: Sequence[Ranking], system: System, objective: str) -> Ranking:
        """Several rankings as one, with the configurations that each has run pass by pass."""
        whole = cls([part for ranking in rankings for part in ranking.parts], system, objective)
        whole.step, whole.exact = (
            np.concatenate([getattr(ranking, name) for ranking in rankings]) for name in ("step", "exact")
        )
        return whole

    @property
    def score(self) -> Array:
        """The figure that the ranking minimises: (configurations,)."""
        return self._rates * self.step if self.timed else self._rates

    @property
    def score_of_all(self) -> Array:
        """The score of those that fit; what does not fit comes after them, the smallest first."""
        score = self.score
        later = score[self.fits].max(initial=0.0) + self.memory
        return np.where(self.fits, score, later)

    def play(self, indices: Index) -> bool:
        """Runs configurations pass by pass; whether any had not been."""
        left = indices[~self.exact[indices]]
        for number, part in enumerate(self.parts):
            first, end = self.first[number : number + 2]
            part_rows = left[(left >= first) & (left < end)]
            if len(part_rows):
                self.step[part_rows] = part.results.by_order(part_rows - first)
                self.exact[part_rows] = True
        return bool(len(left))

    @cached_property
    def _sampled(self) -> bool:
        """Runs the best configuration of the first batches, as closed forms err alike within a batch."""
        score = self.score_of_all
        best: list[int] = []
        for number, part in enumerate(self.parts):
            starts = self.first[number] + np.flatnonzero(np.diff(part.results.choice, prepend=-1))
            best += [int(start + each.argmin()) for start, each in self._batches(number, starts, score)]
        leads = np.array(best, dtype=np.intp)
        leads = leads[~self.exact[leads]]
        return self.play(leads[np.argsort(score[leads], kind="stable")[:_BATCHES]])

    def _batches(self, number: int, starts: Index, score: Array) -> Iterator[tuple[int, Array]]:
        """Where each batch of a part starts, and the scores of its configurations, which follow one another."""
        ends = [*starts[1:].tolist(), int(self.first[number + 1])]
        yield from ((start, score[start:end]) for start, end in zip(starts.tolist(), ends, strict=True))

    def _ordered(self, count: int) -> Index:
        """The best ``count`` of them as far as is known, the best first; ties go to the faster, then the smaller."""
        candidates, score = self.fitting, self.score[self.fitting]
        if len(candidates) < count:
            candidates, score = np.arange(len(self.step)), self.score_of_all
        if count < len(candidates):
            leaders = np.flatnonzero(score <= np.partition(score, count - 1)[count - 1])
            candidates, score = candidates[leaders], score[leaders]
        return np.asarray(
            candidates[np.lexsort((self.memory[candidates], self.step[candidates], score, ~self.fits[candidates]))]
        )

    def leading(self, count: int) -> Index:
        """The best ``count`` of them (and their equals), run pass by pass, the best first."""
        if len(self.step):
            _ = self._sampled
        order = self._ordered(count)
        for _ in range(_ROUNDS):
            if not self.play(order):
                return order
            order = self._ordered(count)
        return np.asarray(order[self.exact[order]])

    def best(self, top: int) -> tuple[PlanRow, ...]:
        """The first ``top`` ones; of two that differ in when gradients travel alone, the better, and of two cuts that
        make no difference the first."""
        rows: dict[tuple[object, ...], PlanRow] = {}
        known_figures: set[tuple[object, ...]] = set()
        for index in self.leading(2 * top):
            row = self.row(int(index))
            choices = row.recompute, row.schedule, row.run.expert_dispatch
            key = row.gpus, row.strategy, row.microbatch, *choices
            figures = *key, f"{row.step_time:.9e}", f"{row.memory:.9e}"
            if figures not in known_figures:
                rows.setdefault((*key, row.run.cut), row)
            known_figures.add(figures)
        return tuple(rows.values())[:top]

    def runner_up(self, best: PlanRow) -> PlanRow | None:
        """The first that fits and has another strategy."""
        for count in (_NEAR, len(self.step)):
            for index in self._ordered(count).tolist():
                if not self.fits[index] or self._strategy(index) == (best.gpus, best.strategy):
                    continue
                if self.play(np.array([index])):  # it may have moved
                    return self.runner_up(best)
                return self.row(index)
        return None

    def front(self) -> tuple[PlanRow, ...]:
        """Pareto-optimal in step time and memory among those that fit and whose steps are exact, fastest first."""
        left, rows = self.fitting[self.exact[self.fitting]], []
        while len(left):
            steps = self.step[left]
            fastest = left[steps == steps.min()]
            best = int(fastest[self.memory[fastest].argmin()])
            rows.append(self.row(best))
            left = left[self.memory[left] < self.memory[best]]
        return tuple(rows)

    def _strategy(self, index: int) -> tuple[int, str]:
        part, layout, _, _, choice = self._at(index)
        return part.run.gpus, strategy_words(part.layouts[layout], choice.zero, choice.chunks, part.preset)

    def _at(self, index: int) -> tuple[Part, int, int, int, Choice]:
        """The part of a configuration, and its layout, microbatch, recompute policy and choice."""
        number = self._part(index)
        part = self.parts[number]
        return part, *part.results.at(index - int(self.first[number]))

    def _part(self, index: int) -> int:
        return int(np.searchsorted(self.first, index, side="right")) - 1

    def row(self, index: int) -> PlanRow:
        """One configuration as a row of a table, run pass by pass."""
        self.play(np.array([index], dtype=np.intp))
        part, position, microbatch, policy, choice = self._at(index)
        layout, schedule = part.layouts[position], list(SCHEDULES)[choice.schedule]
        strategy, recompute = strategy_words(layout, choice.zero, choice.chunks, part.preset), RECOMPUTE[policy]
        changed: dict[str, object] = {"strategy": strategy, "microbatch": microbatch, "recompute": recompute}
        changed["schedule"] = "1f1b" if schedule == "interleaved" else schedule
        cut = part.results.cut(index - int(self.first[self._part(index)]))
        if cut is not None:
            changed["cut"] = cut
        if part.run.exchange is None:
            changed["exchange"] = "overlapped" if choice.overlapped else "after"
        return PlanRow(
            part.run.gpus,
            strategy,
            microbatch=microbatch,
            recompute=recompute,
            schedule="none" if layout.mesh.degree("pp") == 1 else schedule,
            overlapped=choice.overlapped,
            step_time=float(self.step[index]),
            memory=float(self.memory[index]),
            fits=bool(self.fits[index]),
            run=part.run.model_copy(update=changed),
        )


def _rate(system: System, gpus: int, objective: str) -> float:
    """Weight of a second on ``gpus`` GPUs: 1 for time, ``gpus`` for gpus and energy, USD for cost."""
    if objective == "time":
        return 1.0
    if objective == "gpus":
        return float(gpus)
    if objective == "energy":
        return float(gpus)
    offer = rented(system, gpus)
    if offer is not None:
        return offer[0]
    raise SpecError(f"objective 'cost': no price is known for {system.name}; add price_per_node, or use energy")


def strategy_words(layout: Layout, zero: int, chunks: int, preset: str = "dp") -> str:
    """The strategy in the spelling of the command line."""
    degrees = {**dict(layout.mesh.degrees), "dp": layout.mesh.replicas, "ep": layout.experts}
    parts = [f"{axis}={degree}" for axis, degree in degrees.items() if degree > 1]
    parts += [f"vp={chunks}"] if chunks > 1 else []
    parts += [] if layout.etp is None else [f"etp={layout.etp}"]
    parts += [f"zero={zero}"] if zero else []
    flags = ["sp"] * layout.sequence_parallel + ["ulysses"] * (layout.context == "all_to_all")
    return ",".join([*([] if preset == "dp" and parts else [preset]), *parts, *flags])
