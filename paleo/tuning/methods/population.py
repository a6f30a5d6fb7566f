"""Population-based training: all trials train, and the worst continue from checkpoints of the best."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from paleo.tuning.base import METHODS, Method, TrialJob, TuningProblem

#: Fraction of the population that copies others, and that is copied: truncation selection of section 4.1.1.
_TRUNCATED = 0.2


@METHODS.register("pbt")
class PopulationBasedTraining(Method):
    """Train a population whose worst trials copy the best ones.

    At each interval a member among the worst fifth reads the checkpoint of one of the best fifth (exploit) and changes
    its hyperparameters (explore). No member waits for others. If there are more members than workers, they alternate.
    """

    title = "population-based training"
    source = "Jaderberg et al., Population based training of neural networks, 2017, Algorithm 1"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.queue = deque(TrialJob(trial, 0) for trial in range(problem.trials))
        self.latest: dict[int, float] = {}
        self.ranking: list[tuple[float, int]] = []
        self.copies = 0

    @staticmethod
    def rungs(least: float, most: float, eta: int) -> tuple[float, ...]:
        intervals = max(int(most / least + 0.5), 1)
        return tuple(most * (turn + 1) / intervals for turn in range(intervals))

    def next_job(self) -> TrialJob | None:
        return self.queue.popleft() if self.queue else None

    def finish(self, job: TrialJob) -> TrialJob | None:
        trial, ranking = job.trial, self.ranking
        self._rank(trial, self.scores[trial][job.rung])
        if job.rung + 1 == len(self.problem.rungs):
            return None
        cut = int(_TRUNCATED * len(ranking))
        copies = bool(cut) and (self.latest[trial], trial) >= ranking[-cut]
        if copies:
            self.scores[trial] = self.scores[ranking[int(self.random.integers(cut))][1]]
            self.copies += 1
        following = TrialJob(trial, job.rung + 1, restores=copies)
        if not self.queue:
            return following
        self.queue.append(following)
        return None

    def _rank(self, trial: int, score: float) -> None:
        """Record the latest score of a member."""
        if trial in self.latest:
            self.ranking.pop(bisect_left(self.ranking, (self.latest[trial], trial)))
        self.latest[trial] = score
        insort(self.ranking, (score, trial))
