"""Tables of learning: final loss, final accuracy of asynchronous training, and MLPerf reference convergence points.

Losses follow scaling laws of parameters, tokens, batch and learning rate. Accuracy follows the staleness of updates.
Each convergence point (samples to target at a batch) is predicted from the other points of its task.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pandas as pd

from paleo.errors import SpecError
from paleo.learning.base import CHINCHILLA, RESNET32_STALENESS_LAW, STEP_LAW, ReferencePointsLaw, refit_without_batch
from paleo.specs.task import mlperf_task
from paleo.studies.cost import INTERVAL_STANDARD_DEVIATIONS
from paleo.tables.run_tables import RUN_TABLES, NonStepTimeTable, Row, RowPrediction, has_value, integer_cell

if TYPE_CHECKING:
    from paleo.specs.software import SoftwareProfile
    from paleo.tables.base import Predictions


def _predicted_final_loss(row: Row) -> tuple[float, float, str]:
    """Predict the final loss of a measured training run by a scaling law.

    Returns (loss [nat per token], relative residual of the law [-], name of the law). Runs with batch and learning rate
    follow Step Law, all others Chinchilla; constants of one law do not hold for data of the other. Raises SpecError if
    the learning rate is outside the law's range.
    """
    size, tokens = float(row["parameters"]), float(row["tokens"])
    if not (has_value(row, "batch_tokens") and has_value(row, "learning_rate")):
        return float(CHINCHILLA.loss(size, tokens)), CHINCHILLA.residual, "chinchilla"
    rate = float(row["learning_rate"])
    off = float(STEP_LAW.log2_learning_rate_ratio(size, tokens, rate))
    low, high = STEP_LAW.fitted_rate_doublings
    if not low <= off <= high:
        raise SpecError(
            f"learning rate outside of the range of the law: {low:g} to {high:g} doublings of the best "
            "(above them runs diverge)"
        )
    loss = STEP_LAW.loss(size, tokens) + STEP_LAW.loss_penalty(size, tokens, float(row["batch_tokens"]), rate)
    return float(loss), STEP_LAW.residual, "step-law"


class LossTable(NonStepTimeTable):
    """Table of language-model training runs, one per row; the measured value is the final loss in nats per token."""

    name = "learning"
    identifying_columns = frozenset({"parameters", "tokens", "loss_nats"})
    optional_columns = "batch_tokens learning_rate seq_len source steps"
    configuration_columns = ("source", "batch_tokens", "learning_rate", "seq_len")
    measured_column = "loss_nats"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the final loss of a training run by a scaling law [nat per token].

        The baseline is one constant per law.
        """
        loss, residual, law = _predicted_final_loss(row)
        spread = 2.0 * residual * loss
        return RowPrediction(loss, loss - spread, loss + spread, 1.0, law, law)


RUN_TABLES.register("learning")(LossTable())


#: Accuracy above guessing, as a share of that of fresh gradients, below which a run never learned.
_LEAST_LEARNED_SHARE = 0.1


class StalenessTable(NonStepTimeTable):
    """Table of asynchronous training runs, one per row; the measured value is the final accuracy [-]."""

    name = "staleness_accuracy"
    identifying_columns = frozenset({"consistency", "workers", "servers", "steps", "final_accuracy"})
    optional_columns = "batch_per_gpu dataset device model notes parameters preemptible"
    configuration_columns = ("model", "dataset", "batch_per_gpu", "device")
    measured_column = "final_accuracy"

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the final accuracy of an asynchronous training run by the staleness law of its network [-].

        With equal workers, the staleness of an update is the number of other workers.
        """
        law, network = RESNET32_STALENESS_LAW, f"{row['model']} on {row['dataset']}"
        if network != law.model or row["consistency"] != "async":
            raise SpecError(f"{network}, {row['consistency']}: no law of staleness; known is {law.model}, async")
        if (integer_cell(row, "steps"), integer_cell(row, "batch_per_gpu")) != (law.measured_updates, law.batch):
            raise SpecError(
                f"the law of staleness holds for {law.measured_updates:,.0f} updates at batch {law.batch:g}"
            )
        staleness = float(integer_cell(row, "workers") - 1)
        if not 0 <= staleness <= law.max_staleness:
            raise SpecError(
                f"staleness {staleness:g} lies outside of the range of its law (0 to {law.max_staleness:g})"
            )
        learnable = law.accuracy_without_staleness - law.chance_accuracy
        if float(row["final_accuracy"]) < law.chance_accuracy + _LEAST_LEARNED_SHARE * learnable:
            raise SpecError(f"the run never learned: its accuracy is that of guessing ({law.chance_accuracy:.0%})")
        accuracy, spread = float(law.accuracy(staleness)), INTERVAL_STANDARD_DEVIATIONS * law.residual
        names = (str(row["device"]), "linear in staleness")
        return RowPrediction(accuracy, accuracy - spread, accuracy + spread, 1.0, *names)


RUN_TABLES.register("staleness_accuracy")(StalenessTable())


#: What makes two rows the same point; rounds repeat those of earlier ones.
_CONVERGENCE_POINT_COLUMNS = ["benchmark", "global_batch_size", "samples_mean"]


class ConvergenceTable(NonStepTimeTable):
    """Table of MLPerf reference convergence points, one per row; the measured value is mean samples to target."""

    name = "convergence"
    identifying_columns = frozenset({"benchmark", "round", "global_batch_size", "samples_mean", "samples_std", "n"})
    optional_columns = "name unit"
    configuration_columns = ("name",)
    measured_column = "samples_mean"

    def predict(self, frame: pd.DataFrame) -> Predictions:
        """Predict MLPerf reference convergence points (samples to target).

        A point that several rounds repeat is predicted once.
        """
        predictions = super().predict(frame)
        repeats = frame.duplicated(_CONVERGENCE_POINT_COLUMNS).to_numpy()
        predictions.values[repeats] = math.nan
        predictions.failure_reasons[repeats] = "the point of another round once more"
        return predictions

    def predict_row(self, row: Row, software: SoftwareProfile | None = None) -> RowPrediction:
        """Predict the samples to target of a reference convergence point by a law fitted to the task's other points."""
        task, batch = mlperf_task(str(row["benchmark"]), str(row["round"])), float(row["global_batch_size"])
        if task is None:
            raise SpecError(f"benchmark {row['benchmark']!r} has no task in the catalog")
        law = task.law
        if isinstance(law, ReferencePointsLaw) and batch in [point for point, _ in law.points]:
            law = refit_without_batch(law, batch)
        spread = math.exp(INTERVAL_STANDARD_DEVIATIONS * float(law.log_standard_deviation(batch, float(row["n"]))))
        names = (str(row["benchmark"]), "other points of the task")
        return RowPrediction.within_factor(float(law.samples(batch)), spread, 1.0, *names)


RUN_TABLES.register("convergence")(ConvergenceTable())
