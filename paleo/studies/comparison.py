"""Which system to buy: one run on several systems, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paleo.errors import PaleoError, PlanError, SpecError
from paleo.predict import Prediction, predict
from paleo.specs.hardware import System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.studies.cost import Tariff
from paleo.studies.training import Amount, Training, amount, training
from paleo.units import MEGA

#: What systems are ranked by.
Objective = Literal["time", "cost", "energy"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One system of a comparison, or why it cannot take part."""

    system: System
    prediction: Prediction | None = None
    training: Training | None = None
    problem: str = ""

    @property
    def runs(self) -> bool:
        return self.prediction is not None and self.prediction.memory.fits


@dataclass(frozen=True, slots=True)
class Comparison:
    """Systems side by side, in the order asked for; speed-ups refer to the first that has a prediction."""

    amount: Amount
    candidates: tuple[Candidate, ...]

    def speedup(self, candidate: Candidate) -> float | None:
        first = next(one.prediction for one in self.candidates if one.prediction is not None)
        return None if candidate.prediction is None else candidate.prediction.samples_per_s / first.samples_per_s

    def best(self, what: Objective) -> Candidate | None:
        """The candidate that fits and takes the least time, money or energy; None where no figure is known."""
        known = [(getattr(one.training, what), index) for index, one in enumerate(self.candidates) if one.runs]
        figures = [pair for pair in known if pair[0] is not None]
        return self.candidates[min(figures)[1]] if figures else None

    def ranked(self, what: Objective) -> Comparison:
        """The same with the best first: those that fit by the figure, those without one, those that do not run."""

        def place(one: Candidate) -> tuple[bool, bool, float]:
            figure = getattr(one.training, what, None)
            return not one.runs, figure is None, figure or 0.0

        return Comparison(self.amount, tuple(sorted(self.candidates, key=place)))


def usual_amount(model: ModelSpec) -> Amount:
    """One epoch, or a million samples without a data set."""
    epoch = amount(model, epochs=1) if model.dataset is not None else None
    return epoch or Amount(MEGA, "1 million samples")


def compare(
    model: ModelSpec,
    systems: Sequence[System],
    run: Run,
    wanted: Amount | None = None,
    tariff: Tariff | None = None,
) -> Comparison:
    """The same run on several systems. Amount left out: one epoch, or a million samples without a data set."""
    wanted = wanted or usual_amount(model)
    found, errors = [], list[PaleoError]()
    for system in systems:
        try:
            prediction = predict(model, system, run)
            found.append(Candidate(system, prediction, training(prediction, wanted, tariff)))
        except (PlanError, SpecError) as error:
            errors.append(error)
            found.append(Candidate(system, problem=str(error)))
    if errors and len(errors) == len(found):
        raise errors[0]
    return Comparison(wanted, tuple(found))
