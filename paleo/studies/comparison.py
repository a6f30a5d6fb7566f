"""Which system to buy: one run on several systems, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, cast, get_args

from paleo.errors import CapacityError, PaleoError, PlanError, SpecError, near
from paleo.parallel.plan import plan
from paleo.predict import Prediction, predict
from paleo.specs.hardware import System
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.studies.advice import advise
from paleo.studies.consistency import studied
from paleo.studies.training import training, usual_amount

if TYPE_CHECKING:
    from paleo.studies.advice import Advice
    from paleo.studies.consistency import ConsistencyStudy
    from paleo.studies.cost import Tariff
    from paleo.studies.long_run import LongRunOptions
    from paleo.studies.training import Amount, Training

#: What systems are ranked by.
Objective = Literal["time", "cost", "energy"]
#: A strategy that means: find one.
AUTO = "auto"
#: A search: best plans first, how many were compared, how many of them fit.
Planner = Callable[[ModelSpec, System, Run], tuple[Sequence[Prediction], int, int]]


def objective_named(text: str) -> Objective:
    """An objective by its name; SpecError with the nearest."""
    known = get_args(Objective)
    if text not in known:
        raise SpecError(f"--objective {text!r} is not time, cost or energy; {near(text, known)}")
    return cast("Objective", text)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One system of a comparison, or why it cannot take part; ``consistency`` is what the run's consistency model makes
    of the step, None for plain synchronous steps; ``advice``: what would make it fit, where no candidate does."""

    system: System
    prediction: Prediction | None = None
    training: Training | None = None
    problem: str = ""
    consistency: ConsistencyStudy | None = None
    advice: tuple[Advice, ...] = ()

    @property
    def step_time(self) -> float | None:
        """Seconds in which the global batch is seen once; None without a prediction."""
        if self.consistency is not None:
            return self.consistency.step_time
        return None if self.prediction is None else self.prediction.step_time

    @property
    def samples_per_s(self) -> float | None:
        """Samples that all GPUs see a second; None without a prediction."""
        if self.consistency is not None:
            return self.consistency.samples_per_s
        return None if self.prediction is None else self.prediction.samples_per_s

    @property
    def runs(self) -> bool:
        return self.prediction is not None and self.prediction.memory.fits


@dataclass(frozen=True, slots=True)
class Comparison:
    """Systems side by side, in the order asked for; speed-ups refer to the first that has a prediction."""

    amount: Amount
    candidates: tuple[Candidate, ...]

    def speedup(self, candidate: Candidate) -> float | None:
        first = next(rate for rate in (each.samples_per_s for each in self.candidates) if rate is not None)
        return None if candidate.samples_per_s is None else candidate.samples_per_s / first

    def best(self, objective: Objective) -> Candidate | None:
        """The candidate that fits and takes the least time, money or energy; None where no figure is known."""
        known = [
            (getattr(candidate.training, objective), index)
            for index, candidate in enumerate(self.candidates)
            if candidate.runs
        ]
        figures = [pair for pair in known if pair[0] is not None]
        return self.candidates[min(figures)[1]] if figures else None

    def ranked(self, objective: Objective) -> Comparison:
        """The same with the best first: those that fit by the figure, those without one, those that do not run."""

        def place(candidate: Candidate) -> tuple[bool, bool, float]:
            figure = getattr(candidate.training, objective, None)
            return not candidate.runs, figure is None, figure or 0.0

        return Comparison(self.amount, tuple(sorted(self.candidates, key=place)))


def compare(
    model: ModelSpec,
    systems: Sequence[System],
    run: Run,
    amount: Amount | None = None,
    tariff: Tariff | None = None,
    long_run: LongRunOptions | None = None,
    *,
    gpus: Sequence[int] = (),
    planner: Planner | None = None,
) -> Comparison:
    """The same run on several systems, with so many ``gpus`` of each (those of the run by default), and with failures
    where a ``long_run`` is asked for. Amount left out:
    one epoch, or a million samples without a data set. Where the run's strategy is ``auto``, ``planner`` finds that of
    each system, at one global batch."""
    amount = amount or usual_amount(model)
    machines = list(zip(systems, gpus or [run.gpus] * len(systems), strict=True))
    if run.strategy == AUTO:
        run = run.model_copy(update={"global_batch": common_batch(model, machines, run), "batch": None})
    candidates, errors = [], list[PaleoError]()
    for system, count in machines:
        try:
            prediction = _predicted(model, system, run.model_copy(update={"gpus": count}), planner)
            cost = training(prediction, amount, tariff, long_run=long_run)
            candidates.append(Candidate(system, prediction, cost, consistency=studied(prediction)))
        except (PlanError, SpecError, CapacityError) as error:
            errors.append(error)
            candidates.append(Candidate(system, problem=str(error)))
    if errors and len(errors) == len(candidates):
        raise errors[0]
    if not any(candidate.runs for candidate in candidates):
        candidates = [_advised(candidate) for candidate in candidates]
    return Comparison(amount, tuple(candidates))


def common_batch(model: ModelSpec, systems: Sequence[tuple[System, int]], run: Run) -> int:
    """The global batch stated, or the batch of each rank times the ranks of the largest system."""
    if run.global_batch is not None:
        return run.global_batch
    system, gpus = max(systems, key=lambda entry: entry[1])
    strategy = "dp" if run.strategy == AUTO else run.strategy
    return plan(
        model, system, run.model_copy(update={"gpus": gpus, "microbatch": None, "strategy": strategy})
    ).global_batch


def _predicted(model: ModelSpec, system: System, run: Run, planner: Planner | None) -> Prediction:
    if run.strategy != AUTO:
        return predict(model, system, run)
    if planner is None:
        raise PlanError("strategy 'auto': nothing searches for one here")
    return planner(model, system, run.model_copy(update={"strategy": "dp"}))[0][0]


def _advised(candidate: Candidate) -> Candidate:
    return candidate if candidate.prediction is None else replace(candidate, advice=advise(candidate.prediction))
