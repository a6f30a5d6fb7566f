"""Synchronous successive halving and Hyperband: a rung is complete before any trial goes on to the next one."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from paleo.tuning.base import METHODS, Method, Stage, TrialJob, TuningProblem


class Bracket(NamedTuple):
    """Trials that start at one rung together."""

    trials: int
    first: int


@METHODS.register("halving")
class SuccessiveHalving(Method):
    """Synchronous successive halving: floor(n eta^-i) trials at rung i, of which the best 1/eta continue.

    It is Algorithm 1 of the ASHA paper.
    """

    title = "successive halving"
    source = "Jamieson and Talwalkar, AISTATS 2016; as Algorithm 1 of Li et al., MLSys 2020"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.queue: deque[TrialJob] = deque()
        self.running: list[TrialJob] = []
        self.unfinished = 0
        self.sampled = 0
        self.bracket = Bracket(0, 0)
        self.coming = deque(self.brackets())

    def brackets(self) -> list[Bracket]:
        """Return the brackets, which run one after the other."""
        return [Bracket(self.problem.trials, 0)]

    def sizes_of(self, bracket: Bracket) -> list[int]:
        """Return the number of trials of each rung of a bracket, without empty rungs.

        Parameters
        ----------
        bracket : Bracket
            The bracket.

        Returns
        -------
        list of int
            Numbers of trials, from the first rung on.
        """
        rungs = len(self.problem.rungs) - bracket.first
        counts = [bracket.trials // self.problem.eta**halvings for halvings in range(rungs)]
        return [count for count in counts if count]

    def next_job(self) -> TrialJob | None:
        if not self.queue and not self.unfinished and self.coming:
            self.bracket = self.coming.popleft()
            first = self.sampled
            self.sampled += self.bracket.trials
            self._open([TrialJob(trial, self.bracket.first) for trial in range(first, self.sampled)])
        return self.queue.popleft() if self.queue else None

    def _open(self, jobs: list[TrialJob]) -> None:
        """Start a rung with its jobs."""
        self.queue.extend(jobs)
        self.running, self.unfinished = jobs, len(jobs)

    def finish(self, job: TrialJob) -> None:
        self.unfinished -= 1
        if self.unfinished:
            return
        rung, halvings = job.rung + 1, job.rung + 1 - self.bracket.first
        sizes = self.sizes_of(self.bracket)
        if halvings < len(sizes):
            best = sorted(self.running, key=lambda each: self.scores[each.trial][job.rung])[: sizes[halvings]]
            self._open([TrialJob(each.trial, rung) for each in best])

    def stages(self) -> list[Stage]:
        rungs = (0.0, *self.problem.rungs)
        return [
            Stage(count, 0.0 if place == 0 else rungs[bracket.first + place], rungs[bracket.first + place + 1])
            for bracket in self.brackets()
            for place, count in enumerate(self.sizes_of(bracket))
        ]


@METHODS.register("hyperband")
class Hyperband(SuccessiveHalving):
    """Hyperband: brackets of ceil((s_max + 1) eta^s / (s + 1)) trials, each starting at a higher rung.

    The brackets are repeated until all trials are sampled.
    """

    title = "Hyperband"
    source = "Li et al., JMLR 18 (2018), Algorithm 1"

    def brackets(self) -> list[Bracket]:
        top, eta, missing = len(self.problem.rungs) - 1, self.problem.eta, self.problem.trials
        brackets: list[Bracket] = []
        while missing:
            halvings = top - len(brackets) % (top + 1)
            trials = min(-(-(top + 1) * eta**halvings // (halvings + 1)), missing)
            brackets.append(Bracket(trials, top - halvings))
            missing -= trials
        return brackets
