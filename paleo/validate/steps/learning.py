"""Rows of language models: final loss by parameters, tokens, batch and learning rate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.learning.chinchilla import CHINCHILLA
from paleo.learning.step_law import STEP_LAW
from paleo.validate.steps.base import Step, StepTable, filled
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.specs.software import Software
    from paleo.validate.steps.base import Row


def loss_of_row(row: Row) -> tuple[float, float, str]:
    """Loss [nats], the residual of its law and the law's name. Rows that state batch and rate are of Step Law's data,
    the others of Chinchilla's; constants of one do not hold for the other. SpecError where the rate is out of range."""
    size, tokens = float(row["parameters"]), float(row["tokens"])
    if not (filled(row, "batch_tokens") and filled(row, "learning_rate")):
        return float(CHINCHILLA.loss(size, tokens)), CHINCHILLA.residual, "chinchilla"
    rate = float(row["learning_rate"])
    off = float(STEP_LAW.rate_doublings(size, tokens, rate))
    low, high = STEP_LAW.rates
    if not low <= off <= high:
        raise SpecError(
            f"learning rate outside of the range of the law: {low:g} to {high:g} doublings of the best "
            "(above them runs diverge)"
        )
    loss = STEP_LAW.loss(size, tokens) + STEP_LAW.penalty(size, tokens, float(row["batch_tokens"]), rate)
    return float(loss), STEP_LAW.residual, "step-law"


class Losses(StepTable):
    """One training run a row; the measured quantity is its final loss in nats a token."""

    name = "learning"
    header = frozenset({"parameters", "tokens", "loss_nats"})
    configuration = ("source", "batch_tokens", "learning_rate", "seq_len")
    measured_column = "loss_nats"
    measured_unit = 1.0
    calibrates = False

    def step(self, row: Row, software: Software | None = None) -> Step:
        """The loss of the row's law; the baseline is one constant for all rows of a law."""
        loss, residual, law = loss_of_row(row)
        spread = 2.0 * residual * loss
        return Step(loss, loss - spread, loss + spread, 1.0, law, law)


STEPS.register("learning")(Losses())
