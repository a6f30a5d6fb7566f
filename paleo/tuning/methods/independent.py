"""Random and grid search: every trial trains in full, independently of the others."""

from __future__ import annotations

from paleo.tuning.base import METHODS, Method, Stage, TrialJob, TuningProblem


@METHODS.register("random")
class RandomSearch(Method):
    """Random search: configurations are drawn at random."""

    title = "random search"
    source = "Bergstra and Bengio, JMLR 13 (2012)"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.started = 0

    @staticmethod
    def rungs(least: float, most: float, eta: int) -> tuple[float, ...]:
        return (most,)

    def next_job(self) -> TrialJob | None:
        if self.started == self.problem.trials:
            return None
        self.started += 1
        return TrialJob(self.started - 1, 0)

    def stages(self) -> list[Stage]:
        return [Stage(self.problem.trials, 0.0, self.problem.rungs[-1])]


@METHODS.register("grid")
class GridSearch(RandomSearch):
    """Grid search: configurations are points of a grid, and the sizes of the network alternate."""

    title = "grid search"

    def __init__(self, problem: TuningProblem) -> None:
        super().__init__(problem)
        self.sizes = [trial % problem.variants for trial in range(problem.trials)]
