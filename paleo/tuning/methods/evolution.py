"""Regularised evolution: the best of a sample of the population has a child, and the oldest member dies."""

from __future__ import annotations

from collections import deque

from paleo.tuning.base import METHODS, TrialJob, TuningProblem
from paleo.tuning.methods.independent import RandomSearch

#: Fraction of the population from which the best becomes a parent: 25 of 100 in the paper.
_SAMPLED = 0.25


@METHODS.register("evolution")
class RegularisedEvolution(RandomSearch):
    """Regularised evolution. Every trial trains in full, and a child's network size is next to that of its parent."""

    title = "regularised evolution"
    source = "Real et al., Regularized evolution for image classifier architecture search, AAAI 2019, Algorithm 1"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.population: deque[int] = deque(maxlen=problem.population)

    def next_job(self) -> TrialJob | None:
        job = super().next_job()
        if job is not None and job.trial >= self.problem.population and self.population:
            sample = self.random.choice(self.population, max(int(_SAMPLED * len(self.population)), 1), replace=False)
            parent = min(sample.tolist(), key=lambda trial: self.scores[trial][0])
            step = self.sizes[parent] + int(self.random.integers(-1, 2))
            self.sizes[job.trial] = min(max(step, 0), self.problem.variants - 1)
        return job

    def finish(self, job: TrialJob) -> TrialJob | None:
        self.population.append(job.trial)
        return None
