"""Population-based training and regularised evolution.

In population-based training all trials train, and the worst continue from checkpoints of the best. In regularised
evolution the best of a sample of the population has a child, and the oldest member dies.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from paleo.tuning.base import TUNING_METHODS, TrialJob, TuningMethod, TuningProblem
from paleo.tuning.methods.independent_trials import RandomSearch

#: Fraction of the population that copies others, and that is copied: truncation selection of section 4.1.1.
_TRUNCATED = 0.2


@TUNING_METHODS.register("pbt")
class PopulationBasedTraining(TuningMethod):
    """Population-based training: a population of trials whose worst members copy the best ones.

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
        """Return the rungs of population-based training, at equal distances; there members may copy a better one.

        Parameters
        ----------
        least : float
            Distance between rungs, roughly [samples]; it is rounded so that it divides ``most``.
        most : float
            Full training of a trial [samples].
        eta : int
            Not used.

        Returns
        -------
        tuple of float
            Rungs [samples], rising.
        """
        intervals = max(int(most / least + 0.5), 1)
        return tuple(most * (turn + 1) / intervals for turn in range(intervals))

    def next_job(self) -> TrialJob | None:
        return self.queue.popleft() if self.queue else None

    def record_finished_job(self, job: TrialJob) -> TrialJob | None:
        """Record that a trial has reached a rung, and return its next job.

        A trial among the worst fifth of the population continues from the weights of one of the best fifth.

        Parameters
        ----------
        job : TrialJob
            Job that has ended.

        Returns
        -------
        TrialJob, optional
            Job of the same trial at the next rung; None if the trial is complete or its next job waits in the queue.
        """
        trial, ranking = job.trial, self.ranking
        self._record_score(trial, self.scores[trial][job.rung])
        if job.rung + 1 == len(self.problem.rungs):
            return None
        cut = int(_TRUNCATED * len(ranking))
        copies = bool(cut) and (self.latest[trial], trial) >= ranking[-cut]
        if copies:
            self.scores[trial] = self.scores[ranking[int(self.random.integers(cut))][1]]
            self.copies += 1
        following = TrialJob(trial, job.rung + 1, restores_checkpoint=copies)
        if not self.queue:
            return following
        self.queue.append(following)
        return None

    def _record_score(self, trial: int, score: float) -> None:
        """Record the latest score of a member of the population, and update the ranking."""
        if trial in self.latest:
            self.ranking.pop(bisect_left(self.ranking, (self.latest[trial], trial)))
        self.latest[trial] = score
        insort(self.ranking, (score, trial))


#: Fraction of the population from which the best becomes a parent: 25 of 100 in the paper.
_SAMPLED = 0.25


@TUNING_METHODS.register("evolution")
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
            self.sizes[job.trial] = min(max(step, 0), self.problem.network_sizes - 1)
        return job

    def record_finished_job(self, job: TrialJob) -> TrialJob | None:
        """Add a fully trained trial to the population; the oldest member leaves a full population.

        Parameters
        ----------
        job : TrialJob
            Job that has ended.

        Returns
        -------
        None
            No job continues on the worker.
        """
        self.population.append(job.trial)
        return None
