"""Purchase studies: one run compared on several systems, and the best training plan and GPU count on each system."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, get_args

from paleo.errors import CapacityError, PaleoError, PlanError, SpecError, suggest_names
from paleo.launch.jobs import estimate_command, launch_preparation_text, settings_line
from paleo.network.graph import build_graph
from paleo.parallel.framework_checks import network_quantities
from paleo.parallel.placement import without_data_parallel_degree
from paleo.parallel.plan import plan
from paleo.predict import MEMORY_HEADROOM_SHARE, Prediction, predict
from paleo.specs.loading import MAX_EXACT_INTEGER
from paleo.specs.model import ModelSpec
from paleo.specs.prices import billed_devices
from paleo.specs.run import Run, replace_fields
from paleo.specs.system import System
from paleo.studies.advice import Advice, suggest_memory_savings
from paleo.studies.cost import (
    Power,
    Tariff,
    TrainingAmount,
    TrainingEstimate,
    comparable_tariff,
    default_samples_to_train,
    device_power,
    estimate_training,
)
from paleo.studies.gradient_exchange import ConsistencyStudy, consistency_study
from paleo.studies.scale import ScaleCurve, Scaling, predict_scale_curve
from paleo.studies.what_if import HARDWARE_SCALERS
from paleo.units import DAY, format_dollars, format_duration, parse_quantity

if TYPE_CHECKING:
    from paleo.search.plans import FoundPlans
    from paleo.search.ranking import PlanRow
    from paleo.search.space import SearchSpace
    from paleo.studies.goodput import LongRunOptions


#: Mean over largest number of layers of a stage from which a count is tried as an order.
_EVEN = 0.9
#: Orders of fewer GPUs than this share of those that would meet the deadline at the best use seen are not searched.
_EFFICIENT = 0.8
#: Orders that are tried where the smallest is looked for.
_MOST_ORDERS = 40
#: What systems are ranked by.
Objective = Literal["time", "cost", "energy"]
#: A strategy that means: find one.
AUTO = "auto"
#: A search: best plans first, how many were compared, how many of them fit.
PlanSearch = Callable[[ModelSpec, System, Run], tuple[Sequence[Prediction], int, int]]


def parse_objective(text: str) -> Objective:
    """Check the name of the objective by which systems are ranked: time, cost or energy of the training.

    Parameters
    ----------
    text : str
        ``time``, ``cost`` or ``energy``.

    Returns
    -------
    Objective
        The same name.

    Raises
    ------
    SpecError
        For any other text; the message has the nearest name.
    """
    known = get_args(Objective)
    if text not in known:
        raise SpecError(f"--objective {text!r:.80} is not time, cost or energy; {suggest_names(str(text), known)}")
    return cast("Objective", text)


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """One system of a comparison, with the prediction of the run on it, or the ``problem`` that prevents the run.

    ``training`` holds time, cost and energy of the whole training. ``consistency`` compares asynchronous with
    synchronous steps, None for synchronous steps. ``advice`` lists changes that save memory, if the run fits nowhere.
    """

    system: System
    prediction: Prediction | None = None
    training: TrainingEstimate | None = None
    problem: str = ""
    consistency: ConsistencyStudy | None = None
    advice: tuple[Advice, ...] = ()

    @property
    def name(self) -> str:
        """Name of the system, with its number of GPUs (``name:gpus``) where known, as --systems takes it."""
        return self.system.name + (f":{self.prediction.plan.gpus}" if self.prediction is not None else "")

    @property
    def step_time(self) -> float | None:
        """Step time on this system [s]: the time for one global batch; None if the run cannot be predicted on it."""
        source = self.consistency or self.prediction
        return None if source is None else source.step_time

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of all GPUs of this system [samples/s]; None if the run cannot be predicted on it."""
        source = self.consistency or self.prediction
        return None if source is None else source.samples_per_s

    @property
    def fits(self) -> bool:
        return self.prediction is not None and self.prediction.memory.fits


@dataclass(frozen=True, slots=True)
class SystemComparison:
    """Several systems compared on one run, in the order of the request.

    Speed-ups refer to the first system that has a prediction. ``searched`` is True if each system has its own plan from
    a search.
    """

    amount: TrainingAmount
    candidates: tuple[ComparedSystem, ...]
    searched: bool = False

    def speedup(self, candidate: ComparedSystem) -> float | None:
        """Return the throughput of one compared system relative to the first system that has a prediction.

        Parameters
        ----------
        candidate : ComparedSystem
            One of the compared systems with its prediction.

        Returns
        -------
        float, optional
            Ratio of samples per second; None without a prediction.
        """
        first = next(rate for rate in (each.samples_per_s for each in self.candidates) if rate is not None)
        return None if candidate.samples_per_s is None else candidate.samples_per_s / first

    def best(self, objective: Objective) -> ComparedSystem | None:
        """Return the compared system on which the run fits and takes the least time, cost or energy.

        Parameters
        ----------
        objective : Objective
            ``time``, ``cost`` or ``energy``.

        Returns
        -------
        ComparedSystem, optional
            The system with its prediction; None if the objective is known for no system.
        """
        known = [each for each in self.candidates if each.fits and getattr(each.training, objective) is not None]
        return min(known, key=lambda candidate: getattr(candidate.training, objective), default=None)

    def overlapping_candidates(self, objective: Objective) -> tuple[ComparedSystem, ...]:
        """Return the systems that cannot be told from the best one: their 90 % interval overlaps that of the best.

        Parameters
        ----------
        objective : Objective
            ``time``, ``cost`` or ``energy``.

        Returns
        -------
        tuple of ComparedSystem
            Systems with their predictions, without the best one.
        """
        winner = self.best(objective)
        low, high = (_interval_of(winner, objective) if winner is not None else None) or (0.0, -1.0)
        others = [each for each in self.candidates if each.fits and each is not winner]
        known = ((each, _interval_of(each, objective)) for each in others)
        return tuple(each for each, ends in known if ends is not None and ends[0] <= high and low <= ends[1])

    def ranked(self, objective: Objective) -> SystemComparison:
        """Sort the compared systems, best first; systems without a value come next, those that do not fit last.

        Parameters
        ----------
        objective : Objective
            ``time``, ``cost`` or ``energy``.

        Returns
        -------
        SystemComparison
            A sorted copy.
        """

        def place(candidate: ComparedSystem) -> tuple[bool, bool, float]:
            figure = getattr(candidate.training, objective, None)
            return not candidate.fits, figure is None, figure or 0.0

        return replace(self, candidates=tuple(sorted(self.candidates, key=place)))


def _interval_of(candidate: ComparedSystem, objective: Objective) -> tuple[float, float] | None:
    """Return the 90 % interval of the training time [s], cost [USD] or energy [J] on one system; None if unknown.

    Cost and energy are proportional to the time.
    """
    trained = candidate.training
    value = None if trained is None else getattr(trained, objective)
    if trained is None or value is None:
        return None
    low, high = trained.interval
    return value * low / trained.time, value * high / trained.time


def compare_systems(
    model: ModelSpec,
    systems: Sequence[System],
    run: Run,
    amount: TrainingAmount | None = None,
    tariff: Tariff | None = None,
    long_run: LongRunOptions | None = None,
    *,
    gpus: Sequence[int] = (),
    planner: PlanSearch | None = None,
) -> SystemComparison:
    """Predict the same training run on several systems, with time, cost and energy, for a comparison.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    systems : sequence of System
        Systems to compare.
    run : Run
        The run. With the strategy ``auto``, `planner` finds a plan for each system at one global batch.
    amount : TrainingAmount, optional
        Amount of training; by default one epoch, or a million samples.
    tariff : Tariff, optional
        Prices; by default those of the catalog.
    long_run : LongRunOptions, optional
        Failures and checkpoints.
    gpus : sequence of int, optional
        Number of GPUs of each system; by default that of the run.
    planner : PlanSearch, optional
        Search for plans.

    Returns
    -------
    SystemComparison
        Candidates in the order of `systems`.

    Raises
    ------
    PaleoError
        If no system can run it.
    """
    amount = amount or default_samples_to_train(model)
    machines = list(zip(systems, gpus or [run.gpus] * len(systems), strict=True))
    tariff = comparable_tariff(tariff or Tariff(), systems)
    searched = run.strategy == AUTO
    if searched:
        run = run.model_copy(update={"global_batch": _common_batch(model, machines, run), "batch": None})
    candidates, errors = [], list[PaleoError]()
    for system, count in machines:
        try:
            prediction = _planned(model, system, run.model_copy(update={"gpus": count}), planner)[0][0]
            cost = estimate_training(prediction, amount, tariff, long_run=long_run)
            candidates.append(ComparedSystem(system, prediction, cost, consistency=consistency_study(prediction)))
        except (PlanError, SpecError, CapacityError) as error:
            errors.append(error)
            candidates.append(ComparedSystem(system, problem=str(error)))
    if errors and len(errors) == len(candidates):
        raise errors[0]
    if not any(candidate.fits for candidate in candidates):
        candidates = [
            replace(each, advice=suggest_memory_savings(each.prediction)) if each.prediction is not None else each
            for each in candidates
        ]
    return SystemComparison(amount, tuple(candidates), searched)


def _common_batch(model: ModelSpec, systems: Sequence[tuple[System, int]], run: Run) -> int:
    """Return one global batch [samples] for all compared systems.

    The batch is that of the run if it sets one, and otherwise that of the run on the largest GPU count.
    """
    if run.global_batch is not None:
        return run.global_batch
    system, gpus = max(systems, key=lambda entry: entry[1])
    strategy = "dp" if run.strategy == AUTO else run.strategy
    largest = run.model_copy(update={"gpus": gpus, "microbatch": None, "strategy": strategy})
    return plan(model, system, largest).global_batch


def _planned(
    model: ModelSpec, system: System, run: Run, planner: PlanSearch | None
) -> tuple[Sequence[Prediction], int, int]:
    """Return the predictions of a run, best first, with the numbers of plans compared and of those that fit."""
    if run.strategy != AUTO:
        step = predict(model, system, run)
        return [step], 1, int(step.memory.fits)
    if planner is None:
        raise PlanError("strategy 'auto': nothing searches for one here")
    return planner(model, system, run.model_copy(update={"strategy": "dp"}))


#: How far each figure of the hardware is moved, up and down.
SENSITIVITY_CHANGE = 0.2


@dataclass(frozen=True, slots=True)
class PurchaseRequest:
    """Input of a purchase study: network, amount of training, systems with their GPU counts, and prices."""

    model: ModelSpec
    systems: tuple[tuple[System, int], ...]
    run: Run
    amount: TrainingAmount
    tariff: Tariff = field(default_factory=Tariff)
    critical_batch: float | None = None
    objective: Objective = "cost"
    counts: tuple[int, ...] = ()
    scaling: Scaling = "strong"
    planner: PlanSearch | None = None
    long_run: LongRunOptions | None = None

    def scaling_curve(self, best: Prediction, changes: Mapping[str, object] | None = None) -> ScaleCurve | None:
        """Predict how a training plan scales over those requested GPU counts that hold whole replicas of the plan.

        Parameters
        ----------
        best : Prediction
            Prediction of the plan, whose tensor- and pipeline-parallel degrees are kept.
        changes : mapping of str to object, optional
            Fields of the run with other values, such as ``{"exchange.consistency": "bsp"}``.

        Returns
        -------
        ScaleCurve, optional
            The curve; None if no count fits the plan.
        """
        ranks = best.plan.mesh.size // best.plan.mesh.degree("dp")
        capacity = best.system.max_devices
        counts = [count for count in self.counts if count % ranks == 0 and (capacity is None or count <= capacity)]
        if not counts:
            return None
        strategy = without_data_parallel_degree(best.run.strategy)
        run = replace_fields(best.run, {"strategy": strategy, **(changes or {})})
        if self.scaling == "weak":
            run = run.model_copy(update={"batch": best.plan.local_batch, "global_batch": None})
        try:
            return predict_scale_curve(self.model, best.system, run, counts, self.scaling, self.long_run)
        except PlanError:
            return None


@dataclass(frozen=True, slots=True)
class HardwareSensitivity:
    """Sensitivity of a plan's step time to one hardware property, such as memory bandwidth.

    ``step_ratio_decreased`` and ``step_ratio_increased`` are the step times with the property 20 % lower and higher
    (``SENSITIVITY_CHANGE``), relative to the unchanged one. ``fits_with_decrease`` is True if the run still fits in
    memory with the decreased property.
    """

    hardware_property: str
    step_ratio_decreased: float
    step_ratio_increased: float
    fits_with_decrease: bool

    @property
    def largest_change(self) -> float:
        """Largest relative change of the step time, over both directions (0.1: 10 %)."""
        return max(abs(self.step_ratio_decreased - 1.0), abs(self.step_ratio_increased - 1.0))


@dataclass(frozen=True, slots=True)
class SystemOffer:
    """One system of a purchase study with the training plan recommended on it.

    ``plans_compared`` plans were compared, and ``plans_fitting`` of them fit in memory.
    """

    candidate: ComparedSystem
    gpus: int
    plans_compared: int = 0
    plans_fitting: int = 0
    runner_up: Prediction | None = None
    power: Power | None = None
    sensitivity: tuple[HardwareSensitivity, ...] = ()
    scaling_curve: ScaleCurve | None = None

    @property
    def prediction(self) -> Prediction | None:
        return self.candidate.prediction


@dataclass(frozen=True, slots=True)
class Purchase:
    """Result of a purchase study: the recommended plan on every system, all at one global batch."""

    request: PurchaseRequest
    global_batch: int
    offers: tuple[SystemOffer, ...]

    @property
    def comparison(self) -> SystemComparison:
        return SystemComparison(self.request.amount, tuple(offer.candidate for offer in self.offers))

    def best(self, objective: Objective) -> SystemOffer | None:
        """Return the system whose recommended plan fits in memory and has the least time, cost or energy.

        Parameters
        ----------
        objective : Objective
            ``time``, ``cost`` or ``energy``.

        Returns
        -------
        SystemOffer, optional
            The system with its plan; None if the objective is known for no system.
        """
        winner = self.comparison.best(objective)
        return next((offer for offer in self.offers if offer.candidate is winner), None) if winner is not None else None


def recommend_plans(request: PurchaseRequest) -> Purchase:
    """Recommend a training plan on every system of a purchase study, all at the same global batch.

    Parameters
    ----------
    request : PurchaseRequest
        Network, amount of training, systems and prices.

    Returns
    -------
    Purchase
        One offer for each system; a system that cannot run the network is listed with its error.

    Raises
    ------
    PaleoError
        If no system can run it.
    """
    batch = _common_batch(request.model, request.systems, request.run)
    request = replace(request, tariff=comparable_tariff(request.tariff, (system for system, _ in request.systems)))
    offers, errors = [], list[PaleoError]()
    for system, gpus in request.systems:
        try:
            offers.append(_offer(request, system, gpus, batch))
        except (PlanError, SpecError, CapacityError) as error:
            errors.append(error)
            offers.append(SystemOffer(ComparedSystem(system, problem=str(error)), gpus))
    if len(errors) == len(offers):
        raise errors[0]
    return Purchase(request, batch, tuple(offers))


def _offer(request: PurchaseRequest, system: System, gpus: int, batch: int) -> SystemOffer:
    from paleo.search.gpu_counts import recommended_plans

    run = request.run.model_copy(update={"gpus": gpus, "global_batch": batch, "batch": None})
    predictions, tried, fit = _planned(request.model, system, run, request.planner or recommended_plans)
    best, fitting = predictions[0], [prediction for prediction in predictions if prediction.memory.fits]
    critical, failures = request.critical_batch, request.long_run
    trained = estimate_training(best, request.amount, request.tariff, critical_batch=critical, long_run=failures)
    return SystemOffer(
        ComparedSystem(system, best, trained, consistency=consistency_study(best)),
        gpus,
        plans_compared=tried,
        plans_fitting=fit,
        runner_up=fitting[1] if len(fitting) > 1 else None,
        power=device_power(best),
        sensitivity=hardware_sensitivities(best),
        scaling_curve=request.scaling_curve(best),
    )


# what if the hardware were another


def hardware_sensitivities(
    prediction: Prediction, change: float = SENSITIVITY_CHANGE
) -> tuple[HardwareSensitivity, ...]:
    """Predict how a plan's step time responds to changes of the hardware, one property at a time.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the plan.
    change : float, optional
        Relative change of a property, such as 0.1.

    Returns
    -------
    tuple of HardwareSensitivity
        Step times relative to the unchanged hardware, the most important property first.
    """
    step, sensitivities = prediction.step_time, list[HardwareSensitivity]()
    for name, scale in HARDWARE_SCALERS.items():
        low, high = (prediction.predict_variant(scale(prediction.system, 1 + part)) for part in (-change, change))
        sensitivities.append(HardwareSensitivity(name, low.step_time / step, high.step_time / step, low.memory.fits))
    return tuple(sorted(sensitivities, key=lambda sensitivity: -sensitivity.largest_change))


#: The largest count that is tried to find one that fits, or that is in time.
_MOST_GPUS = 16_384
_OBJECTIVES = ("time", "cost", "energy", "gpus")
#: A system, and the counts of its GPUs that are searched.
_SystemCounts: TypeAlias = "tuple[System, Sequence[int]]"


@dataclass(frozen=True, slots=True)
class PurchaseRequirements:
    """Requirements of a purchase: amount of training, deadline [s], budget [USD] and objective.

    Without an amount, plans are ranked by the step alone. With ``long_run``, failures and checkpoints count, too.
    """

    amount: TrainingAmount | None = None
    deadline: float | None = None
    budget: float | None = None
    objective: str = "time"
    tariff: Tariff = field(default_factory=Tariff)
    long_run: LongRunOptions | None = None


def parse_purchase_requirements(
    amount: TrainingAmount | None, deadline: str | None, budget: str | float | None, objective: str, tariff: Tariff
) -> PurchaseRequirements:
    """Parse deadline, budget and objective of a purchase.

    Parameters
    ----------
    amount : TrainingAmount, optional
        Amount of training; None for a step alone.
    deadline : str, optional
        Such as ``60d`` or ``12h``.
    budget : str | float, optional
        USD, such as ``5M``.
    objective : str
        ``time``, ``cost``, ``energy`` or ``gpus``.
    tariff : Tariff
        Prices.

    Returns
    -------
    PurchaseRequirements
        Requirements in SI units.

    Raises
    ------
    SpecError
        If a text is not valid.

    Examples
    --------
    >>> parse_purchase_requirements(None, "1.5d", "20k USD", "cost", Tariff()).deadline
    129600.0
    """
    seconds = dollars = None
    if deadline is not None:
        try:
            seconds = parse_quantity(str(deadline), "time")
        except SpecError:
            expected = "expected a time with its unit, such as 60d or 12h"
            raise SpecError(f"--deadline {str(deadline)!r}: {expected}") from None
    if budget is not None:
        try:
            dollars = parse_quantity(str(budget).removesuffix("USD").strip(), "count")
        except SpecError:
            dollars = 0.0
        if not 0 < dollars <= MAX_EXACT_INTEGER:
            raise SpecError(f"--budget {str(budget)!r}: expected USD above zero, such as 20000 or 5M")
    if seconds is not None and seconds <= 0:
        raise SpecError(f"--deadline {deadline!r}: expected a time above zero, such as 60d or 12h")
    return PurchaseRequirements(amount, seconds, dollars, objective, tariff)


@dataclass(frozen=True, slots=True)
class PlanWithCost:
    """Training plan of a search, with duration [s], cost [USD] and energy [J] of the training, None where unknown.

    ``best_prediction`` and ``best_training`` belong to the fastest plan on the same system and GPU count. The values of
    this plan are scaled from them by the ratio of the step times.
    """

    system: System
    row: PlanRow
    best_prediction: Prediction
    best_training: TrainingEstimate | None

    @property
    def _step_time_ratio(self) -> float:
        """Step time of the plan, relative to the best plan of its system and GPU count."""
        return self.row.step_time / self.best_prediction.step_time

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the plan's step time [s]."""
        low, high = self.best_prediction.interval
        return low * self._step_time_ratio, high * self._step_time_ratio

    @property
    def mfu(self) -> float:
        return self.best_prediction.mfu / self._step_time_ratio

    @property
    def samples_per_s(self) -> float:
        return self.best_prediction.samples_per_s / self._step_time_ratio

    @property
    def tokens_per_s(self) -> float | None:
        tokens = self.best_prediction.tokens_per_s
        return None if tokens is None else tokens / self._step_time_ratio

    @property
    def training_time(self) -> float | None:
        """Duration of the whole training [s]; None without an amount of training."""
        return self._of_training("time")

    @property
    def usd(self) -> float | None:
        return self._of_training("cost")

    @property
    def joules(self) -> float | None:
        return self._of_training("energy")

    def _of_training(self, figure: str) -> float | None:
        """Return the time, cost or energy of the training with this plan; all are proportional to its step time."""
        value = getattr(self.best_training, figure, None)
        return None if value is None else value * self._step_time_ratio

    @property
    def goodput(self) -> float | None:
        """Goodput (0 to 1): share of wall time left after failures and checkpoints; None if they are not counted."""
        failing = None if self.best_training is None else self.best_training.long_run
        return None if failing is None else failing.goodput

    @property
    def command(self) -> str:
        """Text of the `paleo estimate` command that predicts this plan again."""
        return estimate_command(self.best_prediction.model, self.system, self.row.run)

    def objective_value(self, objective: str) -> float:
        """Return the value of this plan by which plans are ranked: time, cost, energy or number of GPUs.

        Plans whose step times a prediction cannot tell apart get the value of the fastest of them, so that they tie.

        Parameters
        ----------
        objective : str
            ``time``, ``cost``, ``energy`` or ``gpus``.

        Returns
        -------
        float
            Seconds, USD, joules or GPUs; inf if unknown.
        """
        row = self.row
        if objective == "gpus":
            return float(row.gpus)
        value = self._of_training(objective)
        if value is None and objective == "time":
            value = row.step_time
        if value is None:
            return math.inf
        fastest = row.tie_group_step_time / row.step_time if row.tie_group_step_time else 1.0
        return float(f"{value * fastest:.9g}")

    @property
    def has_memory_headroom(self) -> bool:
        """True if the plan leaves enough free memory for allocator fragmentation."""
        return self.row.memory <= (1.0 - MEMORY_HEADROOM_SHARE) * self.system.device.memory.usable_bytes

    def meets(self, wish: PurchaseRequirements) -> bool:
        """Return True if the plan fits in memory and meets deadline and budget.

        Parameters
        ----------
        wish : PurchaseRequirements
            Deadline and budget of the purchase.

        Returns
        -------
        bool
            True if all requirements are met.
        """
        in_time = wish.deadline is None or (self.training_time is not None and self.training_time <= wish.deadline)
        affordable = wish.budget is None or (self.usd is not None and self.usd <= wish.budget)
        return self.row.fits and in_time and affordable


@dataclass(frozen=True, slots=True)
class Remedy:
    """Change to a purchase (more GPUs or offload) that would meet requirements which no plan meets.

    ``command`` is the `paleo estimate` command that predicts the changed run.
    """

    text: str
    command: str


@dataclass(frozen=True, slots=True)
class PurchasePlans:
    """Training plans for all systems and GPU counts of a purchase; those that meet the requirements come first.

    ``searches`` holds the plan search of each system. ``skipped_gpu_counts`` lists systems and GPU counts without a
    plan, with the reason. ``remedies`` are changes that would meet the requirements if no plan does. ``choices`` says
    what the program chose where the user left an option open, with reasons.
    """

    model: ModelSpec
    requirements: PurchaseRequirements
    global_batch: int
    plans: tuple[PlanWithCost, ...]
    searches: tuple[tuple[System, FoundPlans], ...]
    skipped_gpu_counts: tuple[tuple[System, int, str], ...]
    remedies: tuple[Remedy, ...] = ()
    choices: Mapping[str, str] = field(default_factory=dict)

    @property
    def skip_reasons(self) -> tuple[str, ...]:
        """Sentences on GPU counts without a plan: one for all counts of a system with the same reason."""
        # Group the counts of each system by the reason why they have no plan.
        reasons: dict[tuple[str, str], list[int]] = {}
        for system, gpus, why in self.skipped_gpu_counts:
            words = re.sub(rf"^{gpus} gpus: | of {gpus} gpus\b", "", why)
            reasons.setdefault((system.name, words), []).append(gpus)
        return tuple(f"{', '.join(map(str, counts))} GPUs of {name}: {why}" for (name, why), counts in reasons.items())

    @property
    def best(self) -> PlanWithCost | None:
        """Best plan of the purchase, if it meets the requirements; otherwise None."""
        return self.plans[0] if self.plans and self.plans[0].meets(self.requirements) else None

    @property
    def joined_search(self) -> FoundPlans:
        """All plans found on the first system at the global batch of the answer, joined into one search result."""
        from paleo.search.gpu_counts import merge_search_results

        system, batch = self.searches[0][0], self.global_batch
        results = [result for each, result in self.searches if each is system and result.global_batch == batch]
        rows = tuple(plan.row for plan in self.plans if plan.system is system)
        merged = merge_search_results(results, system, results[0].objective)
        return replace(merged, plans=rows, objective=self.requirements.objective)

    @property
    def launch_settings_and_preparation(self) -> tuple[str, str]:
        """Pair of texts: the framework's launch options for the first plan, and preparations before the launch.

        Both are empty if there is no plan or the framework has no known options.
        """
        if not self.plans:
            return "", ""
        first = self.plans[0]
        unchanged = first.row.run == first.best_prediction.run
        prediction = first.best_prediction if unchanged else predict(self.model, first.system, first.row.run)
        flags = settings_line(prediction)
        return flags, launch_preparation_text(prediction) if flags else ""


#: The software and the choices of a search on a system with so many GPUs.
SearchSettingsChooser = Callable[[System, int], tuple[str, "SearchSpace | None"]]


def plan_purchase(
    model: ModelSpec,
    offers: Sequence[_SystemCounts],
    run: Run,
    wish: PurchaseRequirements,
    *,
    space: SearchSpace | None = None,
    top: int = 10,
    settle: SearchSettingsChooser | None = None,
) -> PurchasePlans:
    """Search training plans on every system at each of its GPU counts, and order them by the requirements.

    For a system without GPU counts, the smallest count that meets the requirements is searched.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    offers : sequence of _SystemCounts
        Systems with their GPU counts.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    wish : PurchaseRequirements
        Amount of training, deadline, budget and objective.
    space : SearchSpace, optional
        Values that the search varies.
    top : int, optional
        Number of plans to return.
    settle : callable, optional
        Function of a system and a GPU count that returns software and search space; by default those of ``run`` and
        ``space``.

    Returns
    -------
    PurchasePlans
        Plans, those that meet the requirements first.

    Raises
    ------
    SpecError
        If a deadline or budget comes without an amount of training.
    """
    if wish.objective not in _OBJECTIVES:
        raise SpecError(f"objective {wish.objective!r}; expected one of {', '.join(_OBJECTIVES)}")
    if wish.amount is None and (wish.deadline is not None or wish.budget is not None):
        raise SpecError(
            "--deadline and --budget need an amount of training: state --tokens, --epochs, --samples or --target"
        )
    wish = replace(wish, tariff=comparable_tariff(wish.tariff, (system for system, _ in offers)))
    largest = max((count for _, counts in offers for count in counts), default=0)
    if largest and run.global_batch is None:
        run = run.model_copy(update={"gpus": largest})
    tried = _Searches(model, run, wish, settle or (lambda system, gpus: (run.software, space)), top)
    for system, counts in offers:
        if counts:
            for gpus in counts:
                tried.best_plan(system, gpus)
        else:
            tried.search_smallest_count(system)
    if not tried.searches:
        reasons = (f"{each.gpus_and_nodes_text(gpus)}: {why}" for each, gpus, why in tried.skipped)
        raise PlanError("; ".join(dict.fromkeys(reasons)))

    def place(plan: PlanWithCost) -> tuple[bool, bool, bool, float]:
        value = plan.objective_value(wish.objective)
        return not plan.meets(wish), not plan.row.fits, not plan.has_memory_headroom, value

    priced = sorted(tried.plans, key=place)
    batch = priced[0].best_prediction.plan.global_batch
    leading = tuple(_selected_plans(priced, top, top if not largest else None))
    reply = PurchasePlans(model, wish, batch, leading, tuple(tried.searches), tuple(tried.skipped))
    if reply.best is not None or not largest:
        return reply
    # A larger GPU count (by doublings) that meets the requirements, and offload to host memory if no plan fits.
    kept = run.model_copy(update={"global_batch": batch, "batch": None})
    more = _more_gpus(replace(tried, run=kept, top=1), offers)
    offload = None if any(plan.row.fits for plan in priced) else _offload(model, offers, kept)
    return replace(reply, remedies=tuple(remedy for remedy in (more, offload) if remedy is not None))


@dataclass
class _Searches:
    """State of the searches for a purchase: plans found so far, and skipped GPU counts with their reasons."""

    model: ModelSpec
    run: Run
    requirements: PurchaseRequirements
    choose_search: SearchSettingsChooser
    top: int
    plans: list[PlanWithCost] = field(default_factory=list)
    searches: list[tuple[System, FoundPlans]] = field(default_factory=list)
    skipped: list[tuple[System, int, str]] = field(default_factory=list)

    def best_plan(self, system: System, gpus: int) -> PlanWithCost | None:
        """Search the fastest plan on a number of GPUs of a system; plans that meet the requirements are preferred.

        Plans are searched at each global batch that `_runs_at_all_batches` lists for the run.

        Parameters
        ----------
        system : System
            System whose GPUs are bought or rented.
        gpus : int
            Number of GPUs.

        Returns
        -------
        PlanWithCost or None
            Fastest plan with its cost; None if no plan is found.
        """
        from paleo.search.gpu_counts import search_gpu_counts

        wish, plans = self.requirements, list[PlanWithCost]()
        software, space = self.choose_search(system, gpus)
        stated = {"software": software} if software != self.run.software else {}
        for run in _runs_at_all_batches(self.run.model_copy(update=stated), wish):
            try:  # the fastest plans of one system and GPU count also cost and consume the least there
                result = search_gpu_counts(self.model, system, run, (gpus,), space=space, top=self.top)
                lead, cost = predict(self.model, system, result.plans[0].run), None
                if wish.amount is not None:
                    cost = estimate_training(lead, wish.amount, wish.tariff, long_run=wish.long_run)
                plans += [PlanWithCost(system, row, lead, cost) for row in result.plans]
            except PaleoError as error:
                self.skipped.append((system, gpus, str(error)))
                continue
            self.searches.append((system, result))
        self.plans += plans
        return min(plans, key=lambda plan: (not plan.meets(wish), plan.objective_value("time")), default=None)

    def search_smallest_count(self, system: System) -> None:
        """Search for the smallest GPU count of a system that meets the requirements.

        A count that fails rules out smaller counts whose largest odd divisor is no smaller, since counts nearer to a
        power of two have faster plans. The plans found are added to ``plans``.

        Parameters
        ----------
        system : System
            System whose GPUs are bought or rented.
        """
        unit = billed_devices(system, 1).devices
        high, least, guess = min(_MOST_GPUS, system.max_devices or _MOST_GPUS) // unit + 1, 0.0, 1
        layers = int(network_quantities(build_graph(self.model, batch=1, overrides=self.run.model))["layers"])
        left = [size for size in range(1, high) if _shares_evenly(size * unit, layers, self.run.global_batch)]
        left = [size for size in left if billed_devices(system, size * unit).devices == size * unit]
        for _ in range(_MOST_ORDERS):
            left = [size for size in left if least <= size < high]
            if not left:
                break
            units = min(left, key=lambda size: (abs(size - guess), -size))
            left.remove(units)
            plan = self.best_plan(system, units * unit)
            if plan is None:
                continue
            time, deadline = plan.training_time, self.requirements.deadline
            late = deadline is not None and time is not None and time > deadline
            if plan.meets(self.requirements):
                high, guess = units, units // 2
            elif plan.row.fits and not late:
                break  # too dear, and more GPUs are no cheaper
            else:
                left = [size for size in left if size > units or _odd_factor(size) < _odd_factor(units)]
                guess = 2 * units
            if deadline is not None and time is not None and plan.row.fits:
                ideal = units * time / deadline
                least, guess = max(least, _EFFICIENT * ideal), math.ceil(ideal)


def _odd_factor(count: int) -> int:
    """Return the largest odd divisor of a GPU count, such as 3 for 24; powers of two give 1."""
    return count // (count & -count)


def _shares_evenly(gpus: int, layers: int, global_batch: int | None) -> bool:
    """Return True if a GPU count divides well over data-parallel replicas and pipeline stages.

    The largest odd divisor of the count must divide the global batch, or give stages whose numbers of layers differ by
    at most a tenth. Other counts have plans that waste more than the GPUs they add.
    """
    odd = _odd_factor(gpus)
    if global_batch is None:
        return True
    stages = odd // math.gcd(odd, global_batch)
    return stages == 1 or (stages <= layers and layers / stages / math.ceil(layers / stages) >= _EVEN)


def _selected_plans(priced: Sequence[PlanWithCost], top: int, counts: int | None) -> list[PlanWithCost]:
    """Return the first ``top`` plans in order, and always the best plan of each pair of system and GPU count.

    ``counts`` limits the number of these pairs.
    """
    first: dict[tuple[str, int], int] = {}
    for number, entry in enumerate(priced):
        first.setdefault((entry.system.name, entry.row.gpus), number)
    leading = list(first.values())[:counts]
    others = (number for number in range(len(priced)) if number not in leading)
    return [priced[number] for number in sorted([*leading, *itertools.islice(others, max(top - len(leading), 0))])]


def _runs_at_all_batches(run: Run, wish: PurchaseRequirements) -> list[Run]:
    """Return copies of a run at each global batch worth trying for a purchase.

    The run alone is returned if it sets a batch, or if the amount of training does not depend on the batch.
    """
    free = run.global_batch is None and run.batch is None and wish.amount is not None
    batches = wish.amount.batches if free and wish.amount is not None else ()
    return [run.model_copy(update={"global_batch": batch}) for batch in batches] or [run]


def _more_gpus(tried: _Searches, offers: Sequence[_SystemCounts]) -> Remedy | None:
    for system, counts in offers:
        gpus = max(counts, default=_MOST_GPUS) * 2
        while gpus <= min(_MOST_GPUS, system.max_devices or _MOST_GPUS):
            plan = tried.best_plan(system, gpus)
            if plan is not None and plan.meets(tried.requirements):
                return Remedy(f"{system.gpus_and_nodes_text(gpus)} would do", plan.command)
            gpus *= 2
    return None


def _offload(model: ModelSpec, offers: Sequence[_SystemCounts], run: Run) -> Remedy | None:
    """Return offload to host memory as a remedy, with ZeRO-3 and full recomputation; None if the run fits nowhere."""
    for system, counts in offers:
        for parts in ("optimizer", "optimizer,gradients,parameters"):
            offloaded = {"strategy": "zero=3", "recompute": "full", "microbatch": 1, "offload": parts}
            chosen = replace_fields(run, {"gpus": max(counts), **offloaded})
            with suppress(PaleoError):
                if predict(model, system, chosen).memory.fits:
                    command = estimate_command(model, system, chosen)
                    return Remedy(f"with {parts} in host memory it fits", command)
    return None


def purchase_verdict(reply: PurchasePlans) -> str:
    """Return the answer to a purchase question as a sentence, with commands that would meet unmet requirements.

    Parameters
    ----------
    reply : PurchasePlans
        Result of `plan_purchase`.

    Returns
    -------
    str
        Sentence with the best plan, or with what is missing.
    """
    remedies = "; or ".join(f"{remedy.text}: {remedy.command}" for remedy in reply.remedies)
    return f"{verdict_without_remedies(reply)}; {remedies}." if remedies else f"{verdict_without_remedies(reply)}."


def verdict_without_remedies(reply: PurchasePlans) -> str:
    """Return the answer to a purchase question as a sentence: best plan, or that no plan meets the requirements.

    The sentence has no full stop, since `purchase_verdict` may append remedies.

    Parameters
    ----------
    reply : PurchasePlans
        Result of `plan_purchase`.

    Returns
    -------
    str
        Sentence with time and cost of the best or nearest plan.
    """
    wish, best = reply.requirements, reply.best
    deadline = [] if wish.deadline is None else [format_long_duration(wish.deadline)]
    parts = deadline + ([] if wish.budget is None else [f"{wish.budget:,.0f} USD"])
    limits = " within " + " and ".join(parts) if parts else ""
    if best is not None:
        title = {"time": "Fastest", "cost": "Cheapest", "energy": "Least energy", "gpus": "Fewest GPUs"}[wish.objective]
        return f"{title}{limits}: {_summary(best)}{_deadline_warning(wish, best)}"
    fitting = [plan for plan in reply.plans if plan.row.fits]
    if not fitting:
        nothing = "Nothing fits into memory"
        return nothing if reply.remedies else f"{nothing}, and no larger count or offload that was tried does"
    return f"Nothing is done{limits}. Nearest: {_summary(fitting[0])}"


def _deadline_warning(wish: PurchaseRequirements, plan: PlanWithCost) -> str:
    """Return a warning sentence if the upper end of a plan's 90 % interval is beyond the deadline; else empty."""
    if wish.deadline is None or plan.training_time is None:
        return ""
    slow = plan.training_time * plan.interval[1] / plan.row.step_time
    return ". The slow end of its interval is beyond the deadline" if slow > wish.deadline else ""


def _summary(plan: PlanWithCost) -> str:
    sentence = f"{plan.system.gpus_and_nodes_text(plan.row.gpus)} with {plan.row.strategy or 'dp'}"
    if plan.training_time is not None:
        low, high = (format_long_duration(end / plan.row.step_time * plan.training_time) for end in plan.interval)
        sentence += f", {format_long_duration(plan.training_time)} (90 %: {low} to {high})"
    if plan.usd is not None:
        sentence += f", {format_dollars(plan.usd)}"
    return sentence


def format_long_duration(seconds: float) -> str:
    """Format a duration in days, or in smaller units below a day.

    Parameters
    ----------
    seconds : float
        Duration [s].

    Returns
    -------
    str
        Text such as ``12.5 days``.
    """
    if seconds < DAY:
        return format_duration(seconds)
    return f"{seconds / DAY:{'.3g' if seconds < 100 * DAY else ',.0f'}} days"
