"""Successive halving: synchronous (with Hyperband) or asynchronous.

In the synchronous form a rung is complete before any trial goes on to the next one.

In asynchronous successive halving trials are promoted as soon as they are among the best of their rung.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

from paleo.tuning.base import TUNING_METHODS, SynchronousStage, TrialJob, TuningMethod, TuningProblem


class HalvingBracket(NamedTuple):
    """Bracket of successive halving: ``trials`` trials that start together at rung ``first_rung``."""

    trials: int
    first_rung: int


@TUNING_METHODS.register("halving")
class SuccessiveHalving(TuningMethod):
    """Synchronous successive halving: floor(n eta^-i) trials at rung i, of which the best 1/eta continue.

    The method is Algorithm 1 of the ASHA paper.
    """

    title = "successive halving"
    source = "Jamieson and Talwalkar, AISTATS 2016; as Algorithm 1 of Li et al., MLSys 2020"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.queue: deque[TrialJob] = deque()
        self.running: list[TrialJob] = []
        self.unfinished = 0
        self.sampled = 0
        self.bracket = HalvingBracket(0, 0)
        self.coming = deque(self.brackets())

    def brackets(self) -> list[HalvingBracket]:
        """Return the brackets of the search, which run one after the other; successive halving has one bracket."""
        return [HalvingBracket(self.problem.trials, 0)]

    def trials_per_rung(self, bracket: HalvingBracket) -> list[int]:
        """Return the number of trials of each rung of a bracket, without empty rungs.

        Parameters
        ----------
        bracket : HalvingBracket
            Trials that start at one rung together.

        Returns
        -------
        list of int
            Numbers of trials, from the first rung on.
        """
        rungs = len(self.problem.rungs) - bracket.first_rung
        counts = [bracket.trials // self.problem.eta**halvings for halvings in range(rungs)]
        return [count for count in counts if count]

    def next_job(self) -> TrialJob | None:
        if not self.queue and not self.unfinished and self.coming:
            self.bracket = self.coming.popleft()
            first = self.sampled
            self.sampled += self.bracket.trials
            self._open([TrialJob(trial, self.bracket.first_rung) for trial in range(first, self.sampled)])
        return self.queue.popleft() if self.queue else None

    def _open(self, jobs: list[TrialJob]) -> None:
        """Start a rung of the current bracket by queuing its jobs."""
        self.queue.extend(jobs)
        self.running, self.unfinished = jobs, len(jobs)

    def record_finished_job(self, job: TrialJob) -> None:
        """Record that a trial has reached a rung.

        Once all trials of the rung have reached it, the best 1/eta of them continue to the next rung.

        Parameters
        ----------
        job : TrialJob
            Job that has ended.
        """
        self.unfinished -= 1
        if self.unfinished:
            return
        rung, halvings = job.rung + 1, job.rung + 1 - self.bracket.first_rung
        sizes = self.trials_per_rung(self.bracket)
        if halvings < len(sizes):
            best = sorted(self.running, key=lambda each: self.scores[each.trial][job.rung])[: sizes[halvings]]
            self._open([TrialJob(each.trial, rung) for each in best])

    def stages_between_barriers(self) -> list[SynchronousStage]:
        rungs = (0.0, *self.problem.rungs)
        return [
            SynchronousStage(
                count, 0.0 if place == 0 else rungs[bracket.first_rung + place], rungs[bracket.first_rung + place + 1]
            )
            for bracket in self.brackets()
            for place, count in enumerate(self.trials_per_rung(bracket))
        ]


@TUNING_METHODS.register("hyperband")
class Hyperband(SuccessiveHalving):
    """Hyperband: brackets of ceil((s_max + 1) eta^s / (s + 1)) trials, each starting at a higher rung.

    The brackets are repeated until all trials are sampled.
    """

    title = "Hyperband"
    source = "Li et al., JMLR 18 (2018), Algorithm 1"

    def brackets(self) -> list[HalvingBracket]:
        top, eta, missing = len(self.problem.rungs) - 1, self.problem.eta, self.problem.trials
        brackets: list[HalvingBracket] = []
        while missing:
            halvings = top - len(brackets) % (top + 1)
            trials = min(-(-(top + 1) * eta**halvings // (halvings + 1)), missing)
            brackets.append(HalvingBracket(trials, top - halvings))
            missing -= trials
        return brackets


@TUNING_METHODS.register("asha")
class AsynchronousHalving(TuningMethod):
    """Asynchronous successive halving with promotion.

    An idle worker promotes one of the best 1/eta trials of the highest rung that has any, and otherwise samples a new
    trial (Algorithm 2, ``get_job``). The scores of a rung are sorted, and trials that are not promoted yet form a heap.
    The best of the heap can be promoted if its rank is below floor(size / eta).
    """

    title = "ASHA (promotion)"
    source = "Li et al., A system for massively parallel hyperparameter tuning, MLSys 2020, Algorithm 2"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.started = 0
        self.ranked: list[list[float]] = [[] for _ in problem.rungs]
        self.waiting: list[list[tuple[float, int]]] = [[] for _ in problem.rungs]

    def next_job(self) -> TrialJob | None:
        for rung in range(len(self.ranked) - 2, -1, -1):
            ranked, waiting = self.ranked[rung], self.waiting[rung]
            if waiting and bisect_left(ranked, waiting[0][0]) < len(ranked) // self.problem.eta:
                return TrialJob(heapq.heappop(waiting)[1], rung + 1)
        if self.started == self.problem.trials:
            return None
        self.started += 1
        return TrialJob(self.started - 1, 0)

    def record_finished_job(self, job: TrialJob) -> TrialJob | None:
        """Record the score of a trial at a rung; the trial waits there for promotion.

        Parameters
        ----------
        job : TrialJob
            Job that has ended.

        Returns
        -------
        None
            No job continues on the worker.
        """
        score = self.scores[job.trial][job.rung]
        insort(self.ranked[job.rung], score)
        heapq.heappush(self.waiting[job.rung], (score, job.trial))
        return None


@TUNING_METHODS.register("asha-stopping")
class AsynchronousStopping(AsynchronousHalving):
    """Asynchronous successive halving with stopping.

    A trial continues on its worker if it is among the best 1/eta that its rung has seen; otherwise it ends.
    """

    title = "ASHA (stopping)"
    source = "Klein et al., Model-based asynchronous hyperparameter and neural architecture search, 2020, section 3"

    def next_job(self) -> TrialJob | None:
        self.waiting = [[] for _ in self.ranked]
        return super().next_job()

    def record_finished_job(self, job: TrialJob) -> TrialJob | None:
        """Record the score of a trial at a rung, and decide whether the trial continues.

        The trial continues if it is among the best 1/eta that the rung has seen.

        Parameters
        ----------
        job : TrialJob
            Job that has ended.

        Returns
        -------
        TrialJob, optional
            Job of the same trial at the next rung; None if the trial ends.
        """
        score, ranked = self.scores[job.trial][job.rung], self.ranked[job.rung]
        insort(ranked, score)
        goes_on = bisect_left(ranked, score) < max(len(ranked) // self.problem.eta, 1)
        return TrialJob(job.trial, job.rung + 1) if goes_on and job.rung + 1 < len(self.ranked) else None
