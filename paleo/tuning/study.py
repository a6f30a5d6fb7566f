"""Study of a hyperparameter search: predict its trials, simulate the tuning method, and choose GPUs per trial."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from paleo.errors import CapacityError, PlanError, SpecError, suggest_names
from paleo.predict import predict
from paleo.specs.prices import occupied_machines
from paleo.studies.cost import JOULES_PER_KWH, Tariff, parse_training_amount, rent_rate, training_energy
from paleo.studies.defaults import with_common_software, with_fixed_global_batch, with_same_software
from paleo.studies.goodput import Interruption, LongRunOptions, interruption_of
from paleo.studies.target import forward_pass_time
from paleo.tuning.base import (
    TUNING_METHODS,
    TrialTimeline,
    TrialTimes,
    TuningMethod,
    TuningProblem,
    sampled_trial_scores,
    simulate_search,
    synchronous_search_time,
)
from paleo.units import HOUR, format_duration, format_percent, with_noun

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run
    from paleo.specs.system import System

#: Most trials, and most sizes of the network, of one search.
_MAX_TRIALS, _MAX_NETWORK_SIZES = 100_000, 64
#: Default ratio of the training of a whole trial to that of the first rung, and most jobs of a search.
DEFAULT_RUNG_SPAN, _MOST_JOBS = 64.0, 2_000_000
#: A doubling of a trial's GPUs that saves less than this fraction of its time is the last that is tried.
_LEAST_GAIN = 0.1
#: Number of simulated searches for the interval of the regret.
_DRAWS = 60
_UNMODELLED_EFFECTS = (
    "which trial wins: scores are random",
    "scheduling delays of the framework that runs the trials",
    "the power of GPUs that wait",
)


@dataclass(frozen=True, slots=True)
class TuningSettings:
    """Options of a hyperparameter search: method, number of trials, and training budgets.

    Attributes
    ----------
    trials : int
        Configurations to sample.
    method : str
        Name of a tuning method, a key of `paleo.tuning.base.TUNING_METHODS`.
    first_rung_samples, last_rung_samples : float
        Samples of a trial at the first rung and at the last one.
    eta : int
        Ratio of one rung to the next; the best 1/eta of the trials of a rung continue.
    population : int
        Members that evolution keeps alive.
    resumes_from_checkpoint : bool
        True if promoted trials continue from their checkpoints.
    evaluation_samples : float
        Samples of one evaluation.
    varied_network_sizes : tuple of mapping
        Parameters of the network in which trials differ, such as ``layers``, one mapping for each size.
    correlation : float, optional
        Assumed rank correlation of a trial's score at a rung with its final score, from which the regret follows.
    seed : int
        Seed of the random scores.
    """

    trials: int
    method: str
    first_rung_samples: float
    last_rung_samples: float
    eta: int = 4
    population: int = 20
    resumes_from_checkpoint: bool = True
    evaluation_samples: float = 0.0
    varied_network_sizes: tuple[Mapping[str, Any], ...] = ({},)
    correlation: float | None = None
    seed: int = 0

    @property
    def method_class(self) -> type[TuningMethod]:
        """Class that implements the tuning method, such as `Hyperband`."""
        return TUNING_METHODS[self.method]

    @property
    def rungs(self) -> tuple[float, ...]:
        """Rungs of the search: amounts of training at which trials are evaluated [samples]."""
        return self.method_class.rungs(self.first_rung_samples, self.last_rung_samples, self.eta)

    def tuning_problem(self, correlation: float = 1.0, seed: int | None = None) -> TuningProblem:
        """Return the tuning problem (trials, rungs, sampled scores) on which the method is simulated.

        Parameters
        ----------
        correlation : float, optional
            Rank correlation of scores between rungs, 0 to 1.
        seed : int, optional
            Seed of the scores; by default that of the search.

        Returns
        -------
        TuningProblem
            Input of the tuning method.
        """
        seed, rungs = self.seed if seed is None else seed, self.rungs
        scores = sampled_trial_scores(self.trials, len(rungs), correlation, seed)
        sizes = len(self.varied_network_sizes)
        return TuningProblem(self.trials, self.eta, rungs, scores, self.population, sizes, seed)


@dataclass(frozen=True, slots=True)
class TrialEstimate:
    """Predicted step and trial times of one trial on ``gpus`` GPUs, for each size of the network."""

    gpus: int
    predictions: tuple[Prediction, ...]
    trial_times: TrialTimes

    @property
    def step_time_interval_factors(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the step time, relative to the step time."""
        ends = [tuple(end / each.step_time for end in each.interval) for each in self.predictions]
        return float(np.mean([low for low, _ in ends])), float(np.mean([high for _, high in ends]))

    def scaled_trial_times(self, factor: float) -> TrialTimes:
        """Return the times of a trial with the training time multiplied by a factor.

        Parameters
        ----------
        factor : float
            Factor on the step time.

        Returns
        -------
        TrialTimes
            Times of training, checkpoints and evaluation [s].
        """
        times = self.trial_times
        return replace(times, seconds_per_sample=[unit * factor for unit in times.seconds_per_sample])

    def joules(self, seconds: float, tariff: Tariff) -> float | None:
        """Return the energy of the GPUs of one trial while they are busy.

        Parameters
        ----------
        seconds : float
            Busy time [s].
        tariff : Tariff
            Host power and power usage effectiveness.

        Returns
        -------
        float, optional
            Energy [J]; None if the device file has no design power.
        """
        parts = [training_energy(each, seconds, tariff) for each in self.predictions]
        known = [part for part in parts if part is not None]
        return float(np.mean(known)) if len(known) == len(parts) else None


def _estimate_trial(
    model: ModelSpec, system: System, run: Run, tuning: TuningSettings, long_run: LongRunOptions
) -> TrialEstimate:
    """Predict the times of a trial of a hyperparameter search, for every network size.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Run of one trial, with its number of GPUs.
    tuning : TuningSettings
        Options of the search.
    long_run : LongRunOptions
        Failures and checkpoints.

    Returns
    -------
    TrialEstimate
        Predicted steps, and times of training, checkpoints and evaluation.

    Raises
    ------
    PlanError
        If a size of the network does not fit or does not suit the GPUs.
    """
    predictions: list[Prediction] = []
    pauses: list[Interruption] = []
    for size in tuning.varied_network_sizes:
        settings = run.model_copy(update={"model": {**run.model, **size}})
        step = predict(model, system, with_same_software(model, system, settings).run)
        if not step.memory.fits:
            raise PlanError(f"a trial{_words(size)} does not fit on {with_noun(run.gpus, 'GPU')} of {system.name}")
        predictions.append(step)
        pauses.append(interruption_of(step, long_run))
    times, samples = [step.step_time / step.plan.global_batch for step in predictions], tuning.evaluation_samples
    passes = [samples / step.plan.global_batch * forward_pass_time(step) if samples else 0.0 for step in predictions]
    costs = TrialTimes(
        seconds_per_sample=[seconds / pause.goodput for seconds, pause in zip(times, pauses, strict=True)],
        launch_time=pauses[0].launch_time,
        restore=[pause.restore for pause in pauses],
        save=[pause.save for pause in pauses],
        evaluation=passes,
        resumes_from_checkpoint=tuning.resumes_from_checkpoint,
    )
    return TrialEstimate(run.gpus, tuple(predictions), costs)


def _words(size: Mapping[str, Any]) -> str:
    return " of " + ", ".join(f"{name}={value}" for name, value in size.items()) if size else ""


@dataclass(frozen=True)
class TuningSearch:
    """Time and cost of a whole hyperparameter search on ``gpus`` GPUs.

    Each trial runs on the number of GPUs of ``trial_estimate``.
    """

    tuning: TuningSettings
    gpus: int
    trial_estimate: TrialEstimate

    @property
    def workers(self) -> int:
        """Number of trials that train at the same time."""
        return self.gpus // self.trial_estimate.gpus

    @cached_property
    def timeline(self) -> TrialTimeline:
        """Simulated jobs of the search over time."""
        return simulate_search(self._new_method(), self.trial_estimate.trial_times, self.workers)

    def _new_method(self) -> TuningMethod:
        return self.tuning.method_class(self.tuning.tuning_problem())

    def _wall_time_at_step_factor(self, factor: float = 1.0) -> float:
        """Return the wall time of the search with all step times multiplied by a factor.

        Parameters
        ----------
        factor : float, optional
            Factor on the step time.

        Returns
        -------
        float
            Wall time [s], in closed form for synchronous methods, otherwise simulated.
        """
        one_size = len(self.tuning.varied_network_sizes) == 1
        stages = self._new_method().stages_between_barriers() if one_size else None
        costs = self.trial_estimate.scaled_trial_times(factor)
        if stages is not None:
            return float(synchronous_search_time(stages, costs, self.workers))
        return simulate_search(self._new_method(), costs, self.workers).wall_time

    @cached_property
    def seconds(self) -> float:
        """Wall time of the search [s]."""
        return self._wall_time_at_step_factor()

    @property
    def interval(self) -> tuple[float, float]:
        """Wall time of the search at the ends of the 90 % interval of the step time [s]."""
        low, high = self.trial_estimate.step_time_interval_factors
        return self._wall_time_at_step_factor(low), self._wall_time_at_step_factor(high)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours until the last trial ends, including idle GPUs."""
        return self.gpus * self.seconds / HOUR

    def usd(self, tariff: Tariff) -> float | None:
        """Return the rent of all GPUs until the last trial ends.

        Parameters
        ----------
        tariff : Tariff
            Prices of rent and energy.

        Returns
        -------
        float, optional
            Rent [USD]; None if no price is known.
        """
        rate, _ = rent_rate(self.trial_estimate.predictions[0].system, self.gpus, tariff)
        return None if rate is None else rate * self.seconds

    def kwh(self, tariff: Tariff) -> float | None:
        """Return the energy of the GPUs of a search while they are busy.

        Parameters
        ----------
        tariff : Tariff
            Host power and power usage effectiveness.

        Returns
        -------
        float, optional
            Energy [kWh]; None if the device file has no design power.
        """
        joules = self.trial_estimate.joules(self.timeline.busy_worker_time, tariff)
        return None if joules is None else joules / JOULES_PER_KWH


@dataclass(frozen=True, slots=True)
class DeadlineMargin:
    """Margin between the time of a hyperparameter search and its deadline of ``deadline_seconds`` [s].

    ``meets_deadline`` is True if the search ends in time. ``max_trials`` is the largest number of trials that ends in
    time. ``min_nodes`` is the smallest number of nodes on which all trials end in time; None if even four times as many
    nodes do not suffice.
    """

    deadline_seconds: float
    meets_deadline: bool
    max_trials: int
    min_nodes: int | None


@dataclass(frozen=True, slots=True)
class Regret:
    """Regret of a hyperparameter search: share (0 to 1) of all trials that are better than the returned one.

    ``median`` and 90 % ``interval`` are over random draws of the trials' scores, in which ``correlation`` is the rank
    correlation of scores between rungs.
    """

    correlation: float
    median: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class TuningStudy:
    """Result of ``paleo tune``: time and cost of a hyperparameter search for each number of GPUs per trial.

    All trials use the same software profile; ``software_reason`` says why if the program chose it.
    """

    model: ModelSpec
    system: System
    tuning: TuningSettings
    tariff: Tariff
    searches: tuple[TuningSearch, ...]
    gpus: int
    batch: int
    gpus_per_trial: int | None
    refusals: tuple[str, ...]
    software_reason: str = ""
    deadline_margin: DeadlineMargin | None = None
    regret: Regret | None = None
    unmodelled: tuple[str, ...] = field(default=_UNMODELLED_EFFECTS)

    @property
    def fastest_search(self) -> TuningSearch:
        """Fastest search over all numbers of GPUs per trial, on all GPUs."""
        return min((point for point in self.searches if point.gpus == self.gpus), key=lambda point: point.seconds)

    @property
    def software(self) -> str:
        """Name of the software profile of all trials."""
        return self.searches[0].trial_estimate.predictions[0].run.software

    @property
    def cheapest_search(self) -> TuningSearch:
        """Search with the fewest GPU-hours over all numbers of GPUs and of GPUs per trial."""
        return min(self.searches, key=lambda point: point.gpu_hours)

    @property
    def verdict(self) -> str:
        """Answer of the study in a few sentences: time, cost, cheapest division of GPUs, and deadline."""
        best, kind = self.fastest_search, self.tuning.method_class
        usd = best.usd(self.tariff)
        price = "" if usd is None else f", {usd:,.0f} USD"
        trials = f"{with_noun(self.tuning.trials, 'trial')} by {kind.title}"
        words = (
            f"{trials} take {format_duration(best.seconds)} on {with_noun(self.gpus, 'GPU')} of {self.system.name}, "
            f"{with_noun(best.trial_estimate.gpus, 'GPU')} a trial: {best.gpu_hours:,.0f} GPU-hours{price}, "
            f"{format_percent(best.timeline.utilisation)} busy."
        )
        return " ".join([words, *filter(None, (self._cheaper(), self._margin()))])

    def _cheaper(self) -> str:
        """Return a sentence on the cheapest number of GPUs per trial, if it is not the fastest; otherwise empty."""
        cheap, best = self.cheapest_search, self.fastest_search
        if cheap.gpu_hours > best.gpu_hours * (1.0 - _LEAST_GAIN):
            return ""
        return (
            f"Cheapest is {with_noun(cheap.gpus, 'GPU')}, {cheap.trial_estimate.gpus} a trial: {cheap.gpu_hours:,.0f} "
            f"GPU-hours in {format_duration(cheap.seconds)}."
        )

    def _margin(self) -> str:
        if self.deadline_margin is None:
            return ""
        margin, present = self.deadline_margin, occupied_machines(self.system, self.gpus)
        trials = with_noun(abs(margin.max_trials - self.tuning.trials), "trial")
        nodes = None if margin.min_nodes is None else abs(present - margin.min_nodes)
        deadline = f"The deadline of {format_duration(margin.deadline_seconds)}"
        if margin.meets_deadline:
            fewer = f" or {with_noun(nodes, 'node')} fewer" if nodes else ""
            return f"{deadline} is met: {trials} more{fewer} would do."
        more = "" if nodes is None else f", or {with_noun(nodes, 'node')} more"
        return f"{deadline} is missed: it takes {trials} fewer{more}."


def tuning_study(
    model: ModelSpec,
    system: System,
    run: Run,
    tuning: TuningSettings,
    *,
    gpus: int,
    per_trial: int | None = None,
    deadline: float | None = None,
    tariff: Tariff | None = None,
    long_run: LongRunOptions | None = None,
) -> TuningStudy:
    """Predict time and cost of a hyperparameter search, for each number of GPUs per trial.

    Parameters
    ----------
    model, system, run : ModelSpec, System, Run
        Network, machine, and the run of every trial; without a global batch in it, that of one node is taken.
    tuning : TuningSettings
        Options of the search: method, trials and budgets.
    gpus : int
        Total number of GPUs.
    per_trial : int, optional
        GPUs of one trial; the fastest by default.
    deadline : float, optional
        Wall time that the search should end in [s].
    tariff : Tariff, optional
        Prices of rent and energy.
    long_run : LongRunOptions, optional
        Failures, storage and checkpoints.

    Returns
    -------
    TuningStudy
        Wall time and cost for each number of GPUs per trial.

    Raises
    ------
    PlanError
        If a trial fits on no number of GPUs.
    """
    options = long_run or LongRunOptions()
    run, reason = with_common_software(model, system, run, per_trial or gpus)
    fixed = with_fixed_global_batch(model, system, run, per_trial or min(gpus, system.devices_per_node))
    # price trials on powers of two GPUs until a doubling saves too little
    prices: list[TrialEstimate] = []
    refusals: list[str] = []
    least = np.inf
    for width in [per_trial] if per_trial else [2**power for power in range(gpus.bit_length())]:
        try:
            price = _estimate_trial(model, system, fixed.model_copy(update={"gpus": width}), tuning, options)
        except (PlanError, CapacityError) as error:
            refusals.append(f"{with_noun(width, 'GPU')}: {error}")
            continue
        slowest = max(price.trial_times.seconds_per_sample)
        if slowest > (1.0 - _LEAST_GAIN) * least:
            break
        prices.append(price)
        least = slowest
    if not prices:
        raise PlanError(f"no number of GPUs runs a trial: {refusals[-1]}")
    counts = [gpus] if per_trial else [gpus // 2**halvings for halvings in range(gpus.bit_length())][:6]
    points = tuple(TuningSearch(tuning, count, price) for count in counts for price in prices if price.gpus <= count)
    batch = prices[0].predictions[0].plan.global_batch
    prices_of, refused = tariff or Tariff(), tuple(refusals)
    study = TuningStudy(model, system, tuning, prices_of, points, gpus, batch, per_trial, refused, reason)
    best = study.fastest_search
    margin = None if deadline is None else _margin(best, system, deadline)
    regret = None if tuning.correlation is None else _regret(tuning, best, tuning.correlation)
    return replace(study, deadline_margin=margin, regret=regret)


def _margin(best: TuningSearch, system: System, deadline: float) -> DeadlineMargin:
    """Find the most trials and the fewest nodes with which a hyperparameter search meets its deadline [s]."""

    def in_time(trials: int, gpus: int) -> bool:
        point = TuningSearch(replace(best.tuning, trials=trials), gpus, best.trial_estimate)
        return gpus >= best.trial_estimate.gpus and point.seconds <= deadline

    node = max(system.devices_per_host or system.devices_per_node, 1)
    nodes, trials = occupied_machines(system, best.gpus), best.tuning.trials
    most = _last(lambda count: in_time(count, best.gpus), min(4 * trials, _MAX_TRIALS))
    fewest = _last(lambda missing: in_time(trials, (4 * nodes - missing) * node), 4 * nodes - 1, first=0)
    holds = best.seconds <= deadline
    return DeadlineMargin(deadline, holds, most, None if fewest is None else 4 * nodes - fewest)


def _last(holds: Callable[[int], bool], most: int, first: int | None = None) -> Any:
    """Return the largest count up to ``most`` for which a monotonic condition holds, by bisection.

    Counts start at 1 (0 if the condition never holds), or at ``first`` (None if it never holds).
    """
    low, high = (0 if first is None else first), most
    if first is not None and not holds(first):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def _regret(tuning: TuningSettings, point: TuningSearch, correlation: float) -> Regret:
    """Return the regret of a search, the share of trials better than the returned one, over random draws of scores."""
    shares = []
    for seed in range(_DRAWS):
        problem = tuning.tuning_problem(correlation, seed)
        timeline = simulate_search(tuning.method_class(problem), point.trial_estimate.trial_times, point.workers)
        final = problem.scores[:, -1]
        reached = max(job.rung for job in timeline.jobs)
        trials = [job.trial for job in timeline.jobs if job.rung == reached]
        winner = min(trials, key=lambda trial: problem.scores[trial, reached])
        shares.append(float(np.mean(final < final[winner])))
    low, median, high = np.quantile(shares, [0.05, 0.5, 0.95])
    return Regret(correlation, float(median), (float(low), float(high)))


# options as the user states them


def parse_network_sizes(settings: Sequence[str]) -> tuple[Mapping[str, Any], ...]:
    """Parse the options that vary the network over trials, such as ``layers=12,24``, to all combinations.

    Parameters
    ----------
    settings : sequence of str
        ``layers=12,24`` or ``layers=12..36:12``; several settings give their product.

    Returns
    -------
    tuple of mapping
        Settings of the network, one mapping per combination.

    Raises
    ------
    SpecError
        If a setting is none, or the sizes are too many.

    Examples
    --------
    >>> parse_network_sizes(["layers=12..24:6", "heads=8"])
    ({'layers': 12, 'heads': 8}, {'layers': 18, 'heads': 8}, {'layers': 24, 'heads': 8})
    """
    axes: dict[str, list[Any]] = {}
    for text in settings:
        name, _, values = text.partition("=")
        numbers = list(_numbers(values)) if name and values else []
        if not numbers:
            raise SpecError(
                f"--vary {text[:80]!r}: expected a setting and its values: layers=12,24 or layers=12..36:12"
            )
        axes[name.strip().removeprefix("model.")] = numbers
    product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    if len(product) > _MAX_NETWORK_SIZES:
        raise SpecError(f"--vary: {len(product)} sizes; expected {_MAX_NETWORK_SIZES} or fewer")
    return tuple(product)


def _numbers(text: str) -> Iterator[int]:
    """Yield the whole numbers of a list such as ``12,24`` or ``12..36:12`` (a range with a step).

    The numbers end at the first part that is no number.
    """
    for part in text.split(","):
        ends, _, step = part.partition(":")
        first, dots, last = ends.partition("..")
        words = [first, last or first, step or "1"]
        if not all(word.strip().isdecimal() and len(word) < 10 for word in words) or (step and not dots):
            return
        low, high, stride = (int(word) for word in words)
        yield from itertools.islice(range(low, high + 1, max(stride, 1)), _MAX_NETWORK_SIZES + 1)


def parse_trial_samples(model: ModelSpec, run: Run, name: str, **amounts: Any) -> float:
    """Convert the training of a trial from tokens, samples or epochs to samples.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    run : Run
        Options of the run; its network parameters give the tokens of a sample.
    name : str
        First word of the command-line options, such as ``max``, for messages.
    **amounts : Any
        ``tokens``, ``samples`` and ``epochs``, of which one is given.

    Returns
    -------
    float
        Training of a trial [samples].

    Raises
    ------
    SpecError
        If none or several are given.
    """
    try:
        amount = parse_training_amount(model, run, **amounts)
    except SpecError as error:
        raise SpecError(f"--{name}-{error}") from None
    if amount is None:
        raise SpecError(f"--{name}-tokens, --{name}-samples or --{name}-epochs: expected one of them")
    return amount.samples


def validate_tuning_settings(tuning: TuningSettings) -> TuningSettings:
    """Check that the method, trial counts and budgets of a hyperparameter search are valid, and return the options.

    Parameters
    ----------
    tuning : TuningSettings
        Options of the search.

    Returns
    -------
    TuningSettings
        The same options.

    Raises
    ------
    SpecError
        If a number is out of range.
    """
    if tuning.method not in TUNING_METHODS:
        raise SpecError(f"--method {tuning.method!r:.40}: {suggest_names(tuning.method, TUNING_METHODS)}")
    bounds = {
        "--trials": (tuning.trials, 1, _MAX_TRIALS),
        "--eta": (tuning.eta, 2, _MAX_TRIALS),
        "--population": (tuning.population, 1, _MAX_TRIALS),
        "--seed": (tuning.seed, 0, 2**31),
    }
    for option, (value, least, most) in bounds.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise SpecError(f"{option} {value!r:.40}: expected a whole number from {least} to {most:,}")
    if tuning.first_rung_samples > tuning.last_rung_samples:
        raise SpecError("--min-tokens (or samples, epochs) exceeds the training of a whole trial, --max-tokens")
    if tuning.last_rung_samples / tuning.first_rung_samples > _MAX_TRIALS:
        raise SpecError(f"--min-tokens: expected at least a {_MAX_TRIALS:,}th of --max-tokens")
    if tuning.correlation is not None and not 0.0 <= tuning.correlation <= 1.0:
        raise SpecError(f"--rank-correlation {tuning.correlation!r:.40}: expected a number from 0 to 1")
    if tuning.trials * len(tuning.rungs) > _MOST_JOBS:
        rungs = len(tuning.rungs)
        raise SpecError(f"--trials {tuning.trials}: {rungs} rungs each; expected at most {_MOST_JOBS:,} jobs")
    return tuning
