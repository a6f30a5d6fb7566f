"""Asynchronous successive halving: trials are promoted as soon as they are among the best of their rung."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort

from paleo.tuning.base import METHODS, Method, TrialJob, TuningProblem


@METHODS.register("asha")
class AsynchronousHalving(Method):
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

    def finish(self, job: TrialJob) -> TrialJob | None:
        score = self.scores[job.trial][job.rung]
        insort(self.ranked[job.rung], score)
        heapq.heappush(self.waiting[job.rung], (score, job.trial))
        return None


@METHODS.register("asha-stopping")
class AsynchronousStopping(AsynchronousHalving):
    """Asynchronous successive halving with stopping.

    A trial continues on its worker if it is among the best 1/eta that its rung has seen; otherwise it ends.
    """

    title = "ASHA (stopping)"
    source = "Klein et al., Model-based asynchronous hyperparameter and neural architecture search, 2020, section 3"

    def next_job(self) -> TrialJob | None:
        self.waiting = [[] for _ in self.ranked]
        return super().next_job()

    def finish(self, job: TrialJob) -> TrialJob | None:
        score, ranked = self.scores[job.trial][job.rung], self.ranked[job.rung]
        insort(ranked, score)
        goes_on = bisect_left(ranked, score) < max(len(ranked) // self.problem.eta, 1)
        return TrialJob(job.trial, job.rung + 1) if goes_on and job.rung + 1 < len(self.ranked) else None
