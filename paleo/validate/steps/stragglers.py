"""Rows of traced stages: the slowest rank's computation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import SpecError
from paleo.step.waiting import expected_largest, normal_quantile, slowest_mean
from paleo.validate.steps.base import Step, StepTable, filled, integer
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.specs.software import Software
    from paleo.validate.steps.base import Row


def rank_means(*, ranks: int, mean: float, slowest: float, deviation: float) -> list[float]:
    """Means of ranks of which the average, the slowest and the deviation are known: the others are spread as a normal
    sample of what deviation the slowest leaves."""
    if ranks == 1:
        return [slowest]
    mean_of_others = (ranks * mean - slowest) / (ranks - 1)
    left = ranks * deviation**2 - (slowest - mean) ** 2 - (ranks - 1) * (mean_of_others - mean) ** 2
    scores = normal_quantile((np.arange(1.0, ranks) - 0.375) / (ranks - 1 + 0.25))
    spread = np.sqrt(max(left, 0.0) / max(float(np.sum(scores**2)), 1.0))
    return [slowest, *np.minimum(mean_of_others + spread * scores, slowest).tolist()]


class Stages(StepTable):
    """One pipeline stage of a traced job a row; the measured quantity is the mean over steps of its slowest rank."""

    name = "stragglers"
    header = frozenset({"trace", "ranks", "persistent_sd_s", "independent_sd_s", "compute_max_s"})
    configuration = ("cause", "stage", "compute_mean_s", "slowest_rank_mean_s")
    measured_column = "compute_max_s"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Expected maximum over the ranks; the baseline is their mean."""
        if not filled(row, "ranks"):
            raise SpecError("ranks is not stated")
        ranks, mean = integer(row, "ranks"), float(row["compute_mean_s"])
        noise, slowest = float(row["independent_sd_s"]), float(row["slowest_rank_mean_s"])
        means = rank_means(ranks=ranks, mean=mean, slowest=slowest, deviation=float(row["persistent_sd_s"]))
        value = slowest_mean(means, noise / mean)
        steps = max(integer(row, "steps", 1), 1)
        error = 1.65 * noise / np.sqrt(steps) + 0.01 * value * float(expected_largest(ranks))
        return Step(value, value - error, value + error, mean, str(row["trace"]), "expected maximum")


STEPS.register("stragglers")(Stages())
