"""Rows of asynchronous runs of a fixed number of updates: the final accuracy by the workers that made them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.learning.staleness import RESNET32
from paleo.studies.training import NINETY
from paleo.validate.steps.base import Step, StepTable, whole
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.specs.software import Software
    from paleo.validate.steps.base import Row

#: Accuracy above guessing, as a share of that of fresh gradients, below which a run never learned.
LEARNED = 0.1


class StaleRuns(StepTable):
    """One run a row; the measured quantity is its final accuracy."""

    name = "staleness_accuracy"
    header = frozenset({"consistency", "workers", "servers", "steps", "final_accuracy"})
    configuration = ("model", "dataset", "batch_per_gpu", "device")
    measured_column = "final_accuracy"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """The accuracy by the law of the row's network; like workers are as many updates late as there are others."""
        law, network = RESNET32, f"{row['model']} on {row['dataset']}"
        if network != law.model or row["consistency"] != "async":
            raise SpecError(f"{network}, {row['consistency']}: no law of staleness; known is {law.model}, async")
        if (whole(row, "steps"), whole(row, "batch_per_gpu")) != (law.updates, law.batch):
            raise SpecError(f"the law of staleness holds for {law.updates:,.0f} updates at batch {law.batch:g}")
        staleness = float(whole(row, "workers") - 1)
        if not 0 <= staleness <= law.largest:
            raise SpecError(f"staleness {staleness:g} lies outside of the range of its law (0 to {law.largest:g})")
        if float(row["final_accuracy"]) < law.guessing + LEARNED * (law.fresh - law.guessing):
            raise SpecError(f"the run never learned: its accuracy is that of guessing ({law.guessing:.0%})")
        accuracy, spread = float(law.accuracy(staleness)), NINETY * law.residual
        return Step(accuracy, accuracy - spread, accuracy + spread, 1.0, str(row["device"]), "linear in staleness")


STEPS.register("staleness_accuracy")(StaleRuns())
