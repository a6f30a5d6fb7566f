"""Median stopping rule: a trial stops if it is worse than the median of the trials that have ended."""

from __future__ import annotations

from bisect import insort

from paleo.tuning.base import METHODS, TrialJob, TuningProblem, geometric_rungs
from paleo.tuning.methods.independent import RandomSearch


@METHODS.register("median")
class MedianStopping(RandomSearch):
    """Stop trials below the median of the others (the median stopping rule).

    At each rung the best score of a trial so far is compared with the running averages of the ended trials up to this
    rung.
    """

    title = "median stopping"
    source = "Golovin et al., Google Vizier, KDD 2017, section 3.2.1"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.averages: list[list[float]] = [[] for _ in problem.rungs]

    @staticmethod
    def rungs(least: float, most: float, eta: int) -> tuple[float, ...]:
        return geometric_rungs(least, most, eta)

    def finish(self, job: TrialJob) -> TrialJob | None:
        scores = self.scores[job.trial][: job.rung + 1]
        others = self.averages[job.rung]
        worse = bool(others) and min(scores) > others[(len(others) - 1) // 2]
        if job.rung + 1 < len(self.averages) and not worse:
            return TrialJob(job.trial, job.rung + 1)
        for rung in range(len(scores)):
            insort(self.averages[rung], sum(scores[: rung + 1]) / (rung + 1))
        return None

    def stages(self) -> None:  # type: ignore[override]
        return None
