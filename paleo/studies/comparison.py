"""Which system to buy: one run on several systems, side by side; and for a purchase the best plan found for each, its
scaling, and what would change if the hardware were another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from paleo.errors import CapacityError, PaleoError, PlanError, SpecError, near
from paleo.parallel.placement import without_replicas
from paleo.parallel.plan import plan
from paleo.predict import Prediction, predict
from paleo.search.plans import recommended
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.specs.system import System
from paleo.studies.advice import advise
from paleo.studies.changed_system import FIGURES
from paleo.studies.consistency import studied
from paleo.studies.cost import Tariff, power
from paleo.studies.scaling import scale
from paleo.studies.training import side_by_side, training, usual_amount

if TYPE_CHECKING:
    from paleo.studies.advice import Advice
    from paleo.studies.consistency import ConsistencyStudy
    from paleo.studies.cost import Power
    from paleo.studies.long_run import LongRunOptions
    from paleo.studies.scaling import ScaleCurve, Scaling
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
    def name(self) -> str:
        """The system, and its GPUs where they are known, as --systems takes them: one system may stand there twice."""
        return self.system.name + (f":{self.prediction.plan.gpus}" if self.prediction is not None else "")

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
    """Systems side by side, in the order asked for; speed-ups refer to the first that has a prediction. ``searched``:
    each system has a plan of its own, found by a search."""

    amount: Amount
    candidates: tuple[Candidate, ...]
    searched: bool = False

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

    def rivals(self, objective: Objective) -> tuple[Candidate, ...]:
        """Those that fit whose 90 % interval overlaps that of the best: between them the order is not certain."""
        winner = self.best(objective)
        low, high = (_ends(winner, objective) if winner is not None else None) or (0.0, -1.0)
        others = [each for each in self.candidates if each.runs and each is not winner]
        return tuple(each for each in others if (ends := _ends(each, objective)) and ends[0] <= high and low <= ends[1])

    def ranked(self, objective: Objective) -> Comparison:
        """The same with the best first: those that fit by the figure, those without one, those that do not run."""

        def place(candidate: Candidate) -> tuple[bool, bool, float]:
            figure = getattr(candidate.training, objective, None)
            return not candidate.runs, figure is None, figure or 0.0

        return replace(self, candidates=tuple(sorted(self.candidates, key=place)))


def _ends(candidate: Candidate, objective: Objective) -> tuple[float, float] | None:
    """The interval of a figure: cost and energy move with the time."""
    trained = candidate.training
    value = None if trained is None else getattr(trained, objective)
    if trained is None or value is None:
        return None
    low, high = trained.interval
    return value * low / trained.time, value * high / trained.time


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
    tariff = side_by_side(tariff or Tariff(), systems)
    searched = run.strategy == AUTO
    if searched:
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
    return Comparison(amount, tuple(candidates), searched)


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


#: How far each figure of the hardware is moved, up and down.
CHANGE = 0.2


@dataclass(frozen=True, slots=True)
class PurchaseRequest:
    """The question: what is trained how much, on which systems with how many GPUs each, and at what price of energy."""

    model: ModelSpec
    systems: tuple[tuple[System, int], ...]
    run: Run
    amount: Amount
    tariff: Tariff = field(default_factory=Tariff)
    critical_batch: float | None = None
    objective: Objective = "cost"
    counts: tuple[int, ...] = ()
    scaling: Scaling = "strong"
    planner: Planner = recommended
    long_run: LongRunOptions | None = None

    def curve(self, best: Prediction, **changes: Any) -> ScaleCurve | None:
        """How the plan of a system scales over the counts asked for that its degrees can use; ``changes`` replace
        fields of its run."""
        ranks = best.plan.mesh.size // best.plan.mesh.degree("dp")
        capacity = best.system.capacity
        counts = [count for count in self.counts if count % ranks == 0 and (capacity is None or count <= capacity)]
        if not counts:
            return None
        run = best.run.model_copy(update={"strategy": without_replicas(best.run.strategy), **changes})
        if self.scaling == "weak":
            run = run.model_copy(update={"batch": best.plan.local_batch, "global_batch": None})
        try:
            return scale(self.model, best.system, run, counts, self.scaling, self.long_run)
        except PlanError:
            return None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Step time with one figure of the hardware ``CHANGE`` lower and higher, over that as it is; and whether it still
    fits."""

    figure: str
    lower: float
    higher: float
    fits_lower: bool
    fits_higher: bool

    @property
    def reach(self) -> float:
        """How far the step time moves at most."""
        return max(abs(self.lower - 1.0), abs(self.higher - 1.0))


@dataclass(frozen=True, slots=True)
class Offer:
    """One system with the plan recommended on it; ``tried`` plans were compared, ``fitting`` of them fit."""

    candidate: Candidate
    gpus: int
    tried: int
    fitting: int
    runner_up: Prediction | None
    power: Power | None
    sensitivity: tuple[Sensitivity, ...]
    curve: ScaleCurve | None

    @property
    def prediction(self) -> Prediction | None:
        return self.candidate.prediction


@dataclass(frozen=True, slots=True)
class Purchase:
    """The answer: offers in the order asked, all at one global batch."""

    request: PurchaseRequest
    global_batch: int
    offers: tuple[Offer, ...]

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.request.amount, tuple(offer.candidate for offer in self.offers))

    def best(self, objective: Objective) -> Offer | None:
        """The offer that fits and is best by one figure."""
        winner = self.comparison.best(objective)
        return next((offer for offer in self.offers if offer.candidate is winner), None) if winner is not None else None

    def rivals(self, objective: Objective) -> tuple[Candidate, ...]:
        """Other systems whose interval overlaps that of the best: between them the order is not certain."""
        return self.comparison.rivals(objective)


def purchase(request: PurchaseRequest) -> Purchase:
    """Recommended plans on every system at the same global batch; errors of one system stand beside the others."""
    batch = common_batch(request.model, request.systems, request.run)
    request = replace(request, tariff=side_by_side(request.tariff, (system for system, _ in request.systems)))
    offers, errors = [], list[PaleoError]()
    for system, gpus in request.systems:
        try:
            offers.append(_offer(request, system, gpus, batch))
        except (PlanError, SpecError, CapacityError) as error:
            errors.append(error)
            offers.append(
                Offer(
                    Candidate(system, problem=str(error)),
                    gpus,
                    tried=0,
                    fitting=0,
                    runner_up=None,
                    power=None,
                    sensitivity=(),
                    curve=None,
                )
            )
    if len(errors) == len(offers):
        raise errors[0]
    return Purchase(request, batch, tuple(offers))


def _offer(request: PurchaseRequest, system: System, gpus: int, batch: int) -> Offer:
    run = request.run.model_copy(update={"gpus": gpus, "global_batch": batch, "batch": None})
    if run.strategy == AUTO:
        predictions, tried, fit = request.planner(request.model, system, run.model_copy(update={"strategy": "dp"}))
    else:
        predictions = [predict(request.model, system, run)]
        tried, fit = 1, int(predictions[0].memory.fits)
    best, fitting = predictions[0], [prediction for prediction in predictions if prediction.memory.fits]
    trained = training(
        best, request.amount, request.tariff, critical_batch=request.critical_batch, long_run=request.long_run
    )
    return Offer(
        Candidate(system, best, trained, consistency=studied(best)),
        gpus,
        tried=tried,
        fitting=fit,
        runner_up=fitting[1] if len(fitting) > 1 else None,
        power=power(best),
        sensitivity=sensitivity(best),
        curve=request.curve(best),
    )


# what if the hardware were another


def sensitivity(prediction: Prediction, change: float = CHANGE) -> tuple[Sensitivity, ...]:
    """The same plan on hardware with one figure moved at a time, the most important first."""
    return tuple(
        sorted((_moved(prediction, figure, change) for figure in FIGURES), key=lambda sensitivity: -sensitivity.reach)
    )


def _moved(prediction: Prediction, figure: str, change: float) -> Sensitivity:
    low, high = (prediction.variant(FIGURES[figure](prediction.system, factor)) for factor in (1 - change, 1 + change))
    step = prediction.step_time
    return Sensitivity(figure, low.step_time / step, high.step_time / step, low.memory.fits, high.memory.fits)
