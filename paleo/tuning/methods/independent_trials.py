"""Random and grid search, and the median stopping rule.

Trials are independent of each other and train in full. By the median stopping rule a trial stops if it is worse than
the median of the trials that have ended.
"""

from __future__ import annotations

from bisect import insort

from paleo.tuning.base import TUNING_METHODS, SynchronousStage, TrialJob, TuningMethod, TuningProblem, geometric_rungs


@TUNING_METHODS.register("random")
class RandomSearch(TuningMethod):
    """Random search over hyperparameters: configurations are random, and every trial trains in full."""

    title = "random search"
    source = "Bergstra and Bengio, JMLR 13 (2012)"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.started = 0

    @staticmethod
    def rungs(least: float, most: float, eta: int) -> tuple[float, ...]:
        """Return the only rung of random search, the full training of a trial.

        Parameters
        ----------
        least : float
            Not used.
        most : float
            Full training of a trial [samples].
        eta : int
            Not used.

        Returns
        -------
        tuple of float
            One rung [samples].
        """
        return (most,)

    def next_job(self) -> TrialJob | None:
        if self.started == self.problem.trials:
            return None
        self.started += 1
        return TrialJob(self.started - 1, 0)

    def stages_between_barriers(self) -> list[SynchronousStage]:
        return [SynchronousStage(self.problem.trials, 0.0, self.problem.rungs[-1])]


@TUNING_METHODS.register("grid")
class GridSearch(RandomSearch):
    """Grid search over hyperparameters: configurations are points of a grid, and the sizes of the network alternate."""

    title = "grid search"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.sizes = [trial % problem.network_sizes for trial in range(problem.trials)]


@TUNING_METHODS.register("median")
class MedianStopping(RandomSearch):
    """Median stopping rule: random search that stops trials worse than the median of earlier trials.

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
        """Return the rungs of the median stopping rule, at which trials are compared with the median of others.

        Parameters
        ----------
        least : float
            First rung [samples].
        most : float
            Last rung [samples].
        eta : int
            Ratio of one rung to the next.

        Returns
        -------
        tuple of float
            Rungs [samples], rising.
        """
        return geometric_rungs(least, most, eta)

    def record_finished_job(self, job: TrialJob) -> TrialJob | None:
        """Record that a trial has reached a rung, and decide whether the trial continues.

        The trial stops if its best score is worse than the median of the other trials' averages at this rung.

        Parameters
        ----------
        job : TrialJob
            Job that has ended.

        Returns
        -------
        TrialJob, optional
            Job of the same trial at the next rung; None if the trial ends.
        """
        scores = self.scores[job.trial][: job.rung + 1]
        others = self.averages[job.rung]
        worse = bool(others) and min(scores) > others[(len(others) - 1) // 2]
        if job.rung + 1 < len(self.averages) and not worse:
            return TrialJob(job.trial, job.rung + 1)
        for rung in range(len(scores)):
            insort(self.averages[rung], sum(scores[: rung + 1]) / (rung + 1))
        return None

    def stages_between_barriers(self) -> None:  # type: ignore[override]
        return None
