"""Tuning methods for hyperparameters; each registers itself in `paleo.tuning.base.TUNING_METHODS`.

In random and grid search, trials are independent of each other and train in full. By the median stopping rule a trial
stops if it is worse than the median of the trials that have ended.

In population-based training all trials train, and the worst continue from checkpoints of the best. In regularised
evolution the best of a sample of the population has a child, and the oldest member dies.

In synchronous successive halving (with Hyperband) a rung is complete before any trial goes on to the next one. In its
asynchronous form trials are promoted as soon as they are among the best of their rung.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import deque
from typing import NamedTuple

from paleo.tuning.base import TUNING_METHODS, SynchronousStage, TrialJob, TuningMethod, TuningProblem

# Independent trials


@TUNING_METHODS.register("random")
class RandomSearch(TuningMethod):
    """Random search over hyperparameters: configurations are random, and every trial trains in full."""

    title = "random search"
    source = "Bergstra and Bengio, JMLR 13 (2012)"

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
        return self.next_new_trial()

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

    rungs = staticmethod(TuningMethod.rungs)

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


# Populations

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


# Successive halving


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
        stages = []
        for bracket in self.brackets():
            begin, rungs = 0.0, self.problem.rungs[bracket.first_rung :]
            for count, end in zip(self.trials_per_rung(bracket), rungs, strict=False):
                stages.append(SynchronousStage(count, begin, end))
                begin = end
        return stages


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
        self.ranked: list[list[float]] = [[] for _ in problem.rungs]
        self.waiting: list[list[tuple[float, int]]] = [[] for _ in problem.rungs]

    def next_job(self) -> TrialJob | None:
        for rung in range(len(self.ranked) - 2, -1, -1):
            ranked, waiting = self.ranked[rung], self.waiting[rung]
            if waiting and bisect_left(ranked, waiting[0][0]) < len(ranked) // self.problem.eta:
                return TrialJob(heapq.heappop(waiting)[1], rung + 1)
        return self.next_new_trial()

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
