"""Reference convergence points: samples to a target at a batch, each predicted from the other points of its task."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd

from paleo.errors import SpecError
from paleo.learning.reference_points import ReferencePoints, without
from paleo.specs.task import task_of
from paleo.studies.training import NINETY
from paleo.validate.steps.base import Step, StepTable
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.specs.software import Software
    from paleo.validate.steps.base import Row
    from paleo.validate.tables import Predictions

#: What makes two rows the same point; rounds repeat those of earlier ones.
POINT = ["benchmark", "global_batch_size", "samples_mean"]


class ConvergencePoints(StepTable):
    """One reference point a row; the measured quantity is the mean of its samples to the target."""

    name = "convergence"
    header = frozenset({"benchmark", "round", "global_batch_size", "samples_mean", "samples_std", "n"})
    configuration = ("name",)
    measured_column = "samples_mean"
    measured_unit = 1.0
    calibrates = False

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Row by row; a point that a later round repeats counts once."""
        predictions = super().predict(frame)
        again = frame.duplicated(POINT).to_numpy()
        predictions.seconds[again] = math.nan
        predictions.reasons[again] = "the point of another round once more"
        return predictions

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Samples by the law of the row's task; where the point is one of the law's, by its other points."""
        task, batch = task_of(str(row["benchmark"]), str(row["round"])), float(row["global_batch_size"])
        if task is None:
            raise SpecError(f"benchmark {row['benchmark']!r} has no task in the catalog")
        law = task.law
        if isinstance(law, ReferencePoints) and batch in [point for point, _ in law.points]:
            law = without(law, batch)
        samples, spread = float(law.samples(batch)), math.exp(NINETY * float(law.sigma(batch, float(row["n"]))))
        return Step(samples, samples / spread, samples * spread, 1.0, str(row["benchmark"]), "other points of the task")


STEPS.register("convergence")(ConvergencePoints())
