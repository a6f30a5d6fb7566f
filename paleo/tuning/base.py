"""Simulation of hyperparameter searches: trials, rungs, tuning methods, and a closed form for synchronous methods.

A trial trains up to a rung (an amount of training), is evaluated there, and may be promoted to the next rung. A method
decides which trial an idle worker trains next. `simulate_search` runs any method on the event queue that all
simulations share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from paleo.events import EventQueue
from paleo.registry import Registry

Array = npt.NDArray[np.float64]
#: Tolerance for a ratio of resources that is a power of eta up to rounding.
_TOLERANCE = 2e-9


def _geometric_rungs(least: float, most: float, eta: int) -> tuple[float, ...]:
    """Return the rungs of successive halving, the amounts of training at which trials are evaluated.

    The rungs are R eta^-s, …, R / eta, R, with s = floor(log_eta(R / r)).

    Parameters
    ----------
    least, most : float
        Smallest amount r and largest amount R of training of a trial [samples].
    eta : int
        Ratio of one rung to the next.

    Returns
    -------
    tuple of float
        Rungs, rising [samples].

    References
    ----------
    Li et al., Hyperband, JMLR 18 (2018), Algorithm 1.

    Examples
    --------
    >>> _geometric_rungs(1, 27, 3)
    (1.0, 3.0, 9.0, 27.0)
    """
    halvings = 0
    while least * eta ** (halvings + 1) <= most * (1.0 + _TOLERANCE):
        halvings += 1
    return tuple(most / eta**below for below in range(halvings, -1, -1))


class TrialJob(NamedTuple):
    """Training of one trial of a hyperparameter search up to a rung (a budget level).

    ``restores_checkpoint`` is True if a checkpoint of another trial is loaded first.
    """

    trial: int
    rung: int
    restores_checkpoint: bool = False


class SynchronousStage(NamedTuple):
    """Equal jobs of a synchronous tuning method between two barriers.

    Each of the ``jobs`` trains a trial from ``begin_samples`` to ``end_samples``.
    """

    jobs: int
    begin_samples: float
    end_samples: float


@dataclass(frozen=True, slots=True)
class TuningProblem:
    """Input of a tuning method: trials, rungs, and a validation loss of each trial at each rung.

    Attributes
    ----------
    trials : int
        Configurations to sample.
    eta : int
        Reduction factor of rungs.
    rungs : tuple of float
        Amounts of training at which trials are evaluated, rising.
    scores : numpy.ndarray
        Validation loss of each trial at each rung, shape (trials, rungs); only its order matters.
    population : int
        Members that evolution keeps alive.
    network_sizes : int
        Sizes of the network that trials are drawn from.
    seed : int
        Seed of the random choices of the method.
    """

    trials: int
    eta: int
    rungs: tuple[float, ...]
    scores: Array
    population: int = 20
    network_sizes: int = 1
    seed: int = 0


def sampled_trial_scores(trials: int, rungs: int, correlation: float, seed: int) -> Array:
    """Draw random validation scores of trials at each rung, which correlate with the final scores of the trials.

    Parameters
    ----------
    trials, rungs : int
        Number of trials, and number of rungs (evaluations) of each.
    correlation : float
        Rank correlation (Spearman's) of the score at a rung with the final score; 1 gives every rung the final order.
    seed : int
        Seed of the random numbers.

    Returns
    -------
    ndarray, shape (trials, rungs)
        Scores, lower is better.
    """
    normal = 2.0 * np.sin(np.pi / 6.0 * correlation)  # correlation of normal variables with this rank correlation
    normal = 1.0 if correlation == 1.0 else normal
    random = np.random.default_rng(seed)
    final = random.standard_normal((trials, 1))
    noise = random.standard_normal((trials, rungs)) * (np.arange(rungs) < rungs - 1)
    return np.where(np.arange(rungs) < rungs - 1, normal * final + np.sqrt(max(1.0 - normal**2, 0.0)) * noise, final)


class TuningMethod(ABC):
    """Tuning method (random search, Hyperband, …), which decides the trial that an idle worker trains next.

    Attributes
    ----------
    title, source : str
        Name of the method, and the publication that defines it.
    """

    title: ClassVar[str]
    source: ClassVar[str]

    def __init__(self, problem: TuningProblem) -> None:
        self.problem = problem
        self.random = np.random.default_rng(problem.seed)
        self.scores: list[list[float]] = problem.scores.tolist()
        self.sizes: list[int] = self.random.integers(problem.network_sizes, size=problem.trials).tolist()
        self.started = 0

    @staticmethod
    def rungs(least: float, most: float, eta: int) -> tuple[float, ...]:
        """Return the rungs of the tuning method, the amounts of training at which trials are evaluated.

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
            Rungs, rising [samples].
        """
        return _geometric_rungs(least, most, eta)

    def next_new_trial(self) -> TrialJob | None:
        """Return the first job of the next trial that was not started yet; None if all were."""
        if self.started == self.problem.trials:
            return None
        self.started += 1
        return TrialJob(self.started - 1, 0)

    @abstractmethod
    def next_job(self) -> TrialJob | None:
        """Choose the trial that an idle worker trains next, and its rung; None if the worker must wait."""

    def record_finished_job(self, job: TrialJob) -> TrialJob | None:
        """Record that a trial has reached a rung; return the job with which the worker continues, if any.

        Parameters
        ----------
        job : TrialJob
            Job that has ended.

        Returns
        -------
        TrialJob, optional
            Next job of the same worker without a new launch; None if the worker becomes idle.
        """
        return None

    def stages_between_barriers(self) -> list[SynchronousStage] | None:
        """Return the stages between barriers of a synchronous tuning method; None if the method is asynchronous.

        The wall time of a search has a closed form from the stages (`synchronous_search_time`).
        """
        return None


#: Methods by name.
TUNING_METHODS: Registry[type[TuningMethod]] = Registry("method", "paleo.tuning.methods")


@dataclass(frozen=True, slots=True)
class TrialTimes:
    """Times of training, checkpoints and evaluation of a trial on one worker [s], for each network size.

    Attributes
    ----------
    seconds_per_sample : sequence of float
        Training time of one sample [s], for each size.
    launch_time : float
        Time to launch and warm up processes [s].
    restore, save, evaluation : sequence of float
        Times to read a checkpoint, to write one and to evaluate [s], for each size.
    resumes_from_checkpoint : bool
        True if a promoted trial continues from its checkpoint; otherwise it starts from scratch.
    """

    seconds_per_sample: Sequence[float]
    launch_time: float = 0.0
    restore: Sequence[float] = (0.0,)
    save: Sequence[float] = (0.0,)
    evaluation: Sequence[float] = (0.0,)
    resumes_from_checkpoint: bool = True

    def job_time(self, size: int, begin: float, end: float, *, launched: bool = True, restores: bool = False) -> float:
        """Return the time in which a worker trains a trial from one rung to another, with checkpoints and evaluation.

        Parameters
        ----------
        size : int
            Index of the size of the network.
        begin, end : float
            Amounts of training [samples].
        launched : bool
            True if processes are started for the job; they then read the trial's checkpoint, if it has one.
        restores : bool
            True if the job reads a checkpoint in any case.

        Returns
        -------
        float
            Time [s].
        """
        trained = end - (begin if self.resumes_from_checkpoint else 0.0)
        seconds = self.seconds_per_sample[size] * trained + self.evaluation[size] + self.save[size]
        if launched:
            seconds += self.launch_time
        if restores or (launched and begin > 0.0 and self.resumes_from_checkpoint):
            seconds += self.restore[size]
        return seconds


@dataclass(frozen=True, slots=True)
class TrialTimeline:
    """Timeline of a simulated hyperparameter search: all jobs in the order of their start.

    ``begins`` and ``ends`` are the start and end times of the ``jobs`` [s].
    """

    workers: int
    rungs: tuple[float, ...]
    jobs: list[TrialJob] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    @property
    def wall_time(self) -> float:
        """Wall time of the search [s]."""
        return max(self.ends, default=0.0)

    @property
    def busy_worker_time(self) -> float:
        """Worker time spent on training, evaluation and checkpoints, summed over workers [s]."""
        return float(np.sum(np.subtract(self.ends, self.begins)))

    @property
    def utilisation(self) -> float:
        """Fraction of the worker time (0 to 1) spent on training, evaluation and checkpoints."""
        return self.busy_worker_time / (self.workers * self.wall_time) if self.jobs else 0.0

    @property
    def first_full_trial_time(self) -> float:
        """Time at which the first trial reaches the last rung [s]."""
        last = len(self.rungs) - 1
        return min((end for job, end in zip(self.jobs, self.ends, strict=True) if job.rung == last), default=np.inf)

    @property
    def trials_by_rung(self) -> list[int]:
        """Number of trials that reach each rung, from the first rung on."""
        reached = np.bincount([job.rung for job in self.jobs], minlength=len(self.rungs))
        return [int(count) for count in reached]


def simulate_search(method: TuningMethod, costs: TrialTimes, workers: int) -> TrialTimeline:
    """Simulate a hyperparameter search by a tuning method on workers, each training one trial at a time.

    Parameters
    ----------
    method : TuningMethod
        Tuning method with its problem.
    costs : TrialTimes
        Times of training, checkpoints and evaluation [s].
    workers : int
        Number of trials that train at once.

    Returns
    -------
    TrialTimeline
        Start and end of each job.
    """
    rungs, sizes = method.problem.rungs, method.sizes
    timeline, queue, idle, now = TrialTimeline(workers, rungs), EventQueue(), workers, 0.0
    trained: dict[int, float] = {}

    def begin(job: TrialJob, launched: bool) -> None:
        before, after = trained.get(job.trial, 0.0), rungs[job.rung]
        seconds = costs.job_time(sizes[job.trial], before, after, launched=launched, restores=job.restores_checkpoint)
        trained[job.trial] = after
        queue.push(now + seconds, len(timeline.jobs))
        timeline.jobs.append(job)
        timeline.begins.append(now)
        timeline.ends.append(now + seconds)

    while True:
        while idle and (job := method.next_job()) is not None:
            idle -= 1
            begin(job, launched=True)
        if not queue:
            return timeline
        now, number = queue.pop()
        following = method.record_finished_job(timeline.jobs[number])
        if following is None:
            idle += 1
        else:
            begin(following, launched=False)


def synchronous_search_time(stages: Sequence[SynchronousStage], costs: TrialTimes, workers: npt.ArrayLike) -> Array:
    """Return the wall time of a search by a synchronous tuning method with equal trials.

    A stage between two barriers takes ceil(jobs / workers) waves of jobs.

    Parameters
    ----------
    stages : sequence of SynchronousStage
        Stages of the method, each with the number of its jobs.
    costs : TrialTimes
        Times of a trial for one size of the network.
    workers : array_like
        Numbers of workers, any shape.

    Returns
    -------
    ndarray
        Wall times [s], in the shape of ``workers``.
    """
    counts = np.asarray(workers)
    waves = (-(-stage.jobs // counts) * costs.job_time(0, stage.begin_samples, stage.end_samples) for stage in stages)
    return np.asarray(sum(waves, start=np.zeros(counts.shape)), dtype=np.float64)
