"""Rows of MLPerf Training: minutes to target, with the parts of each apart."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from paleo.errors import PaleoError
from paleo.units import MILLISECOND
from paleo.validate.kinds.base import number
from paleo.validate.steps.base import Step, StepTable, ideal_seconds, records
from paleo.validate.steps.submissions import pairs_of, system_of_row, target_of_row
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.specs.hardware import System
    from paleo.specs.software import Software
    from paleo.studies.target import TargetTime
    from paleo.validate.kinds.base import Array
    from paleo.validate.steps.base import Row
    from paleo.validate.tables import Predictions

#: Seconds of a minute.
MINUTE = 60.0


class TrainingRuns(StepTable):
    """One submission a row; the measured quantity is minutes to target.

    Rows whose samples, batch, system and minutes repeat another's are copies of its logs and are counted once.
    """

    name = "training_runs"
    header = frozenset({"benchmark", "round", "device", "n_gpus", "global_batch", "minutes_to_target"})
    configuration = (
        "submitter", "system", "nodes", "dtype", "tp", "pp", "cp", "vp", "micro_batch", "sequence_parallel",
        "distributed_optimizer", "recompute", "runs",
    )  # fmt: skip
    measured_column = "minutes_to_target"
    measured_unit = MINUTE
    calibrates = False

    def system(self, row: Row) -> System:
        """As `system_of_row`."""
        return system_of_row(row)

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Seconds to the target with their interval; the roofline is the FLOP of all samples at the peak."""
        point = target_of_row(row, self.calibration_of(self.system(row)))
        low, high = point.interval
        ideal = ideal_seconds(point.prediction) * point.samples / point.global_batch
        return Step(point.seconds, low, high, ideal, point.prediction.system.device.name, point.task.name)

    def parts(self, frame: pd.DataFrame) -> dict[str, tuple[Array, Array]]:
        """Predicted and measured seconds of a step, samples to the target and seconds of all evaluations, row by row;
        nan where either is missing."""
        points = [self._point(row) for row in records(frame)]
        measured = {
            "step": number(frame, "step_ms", float("nan")) * MILLISECOND,
            "samples": np.array([_samples(row) for row in records(frame)]),
            "evaluation": number(frame, "evaluation_s", float("nan")),
        }
        predicted = {
            "step": [np.nan if point is None else point.step_time for point in points],
            "samples": [np.nan if point is None else point.samples for point in points],
            "evaluation": [np.nan if point is None else point.evaluation_seconds for point in points],
        }
        alone = ~copies(frame)
        known = {name: np.where(alone & (values > 0), values, np.nan) for name, values in measured.items()}
        return {name: (np.array(predicted[name], dtype=np.float64), values) for name, values in known.items()}

    def _point(self, row: Row) -> TargetTime | None:
        try:
            return target_of_row(row, self.calibration_of(self.system(row)))
        except PaleoError:
            return None

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """As any table of steps; copies of a run's log are told apart and left out."""
        predictions = super().predict(frame)
        predictions.reasons[copies(frame)] = "repeats the log of another row"
        return predictions


def _samples(row: Row) -> float:
    """Samples to the target as the task counts them; nan where they are not known."""
    try:
        return pairs_of(row, "samples_to_target")
    except (PaleoError, ValueError, KeyError):
        return float("nan")


def copies(frame: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Rows that repeat an earlier one's benchmark, round, device, count, batch, samples and minutes."""
    same = ["benchmark", "round", "device", "n_gpus", "global_batch", "samples_to_target", "minutes_to_target"]
    known = [name for name in same if name in frame.columns]
    return frame.duplicated(known).to_numpy()


STEPS.register("training_runs")(TrainingRuns())
