"""Run times of jobs on each kind of nodes.

The run time of a training follows from its predicted step, that of a hyperparameter search, a service or reinforcement
learning from the study of it (`paleo.tuning.study`, `paleo.serving.service`, `paleo.studies.reinforcement`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paleo.cluster.nodes import nodes_per_rack
from paleo.cluster.simulation import ClusterJob
from paleo.errors import CapacityError, PlanError, SpecError, suggest_names
from paleo.predict import predict
from paleo.serving.engines import load_engine
from paleo.serving.formats import parse_formats
from paleo.serving.plans import LatencyLimits, ServingLoad
from paleo.serving.reinforcement import EXTRA_PASSES_AND_CRITIC, STEP_TIME_INTERVAL_FACTORS, Rollouts
from paleo.serving.service import evaluate_service
from paleo.serving.steady_state import RequestLengths
from paleo.specs.loading import validate_mapping
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.prices import devices_per_machine
from paleo.specs.run import Run
from paleo.studies.cost import TrainingAmount, parse_training_amount
from paleo.studies.defaults import LARGE_RUN_GPUS, with_common_software, with_fixed_global_batch, with_same_software
from paleo.studies.goodput import Interruption, LongRunOptions, RestartTimes, interruption_of
from paleo.studies.target import run_and_amount_for_target
from paleo.units import parse_quantity, with_noun

if TYPE_CHECKING:
    from paleo.cluster.jobs import JobSpec
    from paleo.predict import Prediction
    from paleo.specs.system import System

#: A doubling of GPUs that saves less than this fraction of the run time does not pay, as in `paleo target`.
_LEAST_SAVING = 0.25
#: Relative rounding error of the end of a service; a service that starts late also ends late.
_ROUNDING = 2e-9
#: Keys of jobs other than trainings.
_TUNE_KEYS = ("trials", "method", "max_tokens", "max_samples", "max_epochs", "min_tokens", "min_samples", "min_epochs",
         "eta", "population", "vary", "seed")  # fmt: skip
_SERVE = ("rate", "input", "output", "engine", "weights")
_RL = ("steps", "algorithm", "rollouts", "batch", "input", "output", "max_output", "software")
#: Assumed time of a restart of jobs with a known run time [s]. It has no checkpoint, as its size is not known.
_RESTART_TIME = RestartTimes().launch + RestartTimes().warm_up


@dataclass(frozen=True, slots=True)
class JobRunTime:
    """Predicted run time of a job on a number of GPUs [s], its 90 % interval, and the cost of restarts and failures.

    ``interval_factors`` are the ends of the interval relative to the run time. ``restart_time`` is the time to stop and
    restart the job [s], and ``failure_share`` the share of the time lost to failures and checkpoints. ``mtbf`` is the
    mean time between failures [s], and ``seconds_lost_per_failure`` the mean loss of one failure [s].
    ``slowdown_on_excess_racks`` is the run time on more racks than needed, relative to as few as possible.
    """

    gpus: int
    seconds: float
    interval_factors: tuple[float, float] = (1.0, 1.0)
    restart_time: float = 0.0
    failure_share: float = 0.0
    mtbf: float = math.inf
    seconds_lost_per_failure: float = 0.0
    slowdown_on_excess_racks: float = 1.0


@dataclass(frozen=True)
class PredictedJob:
    """Job with its predicted run times per system and GPU count, and reasons for counts on which it cannot run."""

    spec: JobSpec
    run_times: tuple[Mapping[int, JobRunTime], ...]
    preferred_gpus: tuple[int, ...]
    infeasible_reasons: str

    def cluster_job(self, numbers: Mapping[str, int]) -> ClusterJob:
        """Convert the predicted job to the form that the cluster simulation schedules.

        Parameters
        ----------
        numbers : dict of str to int
            Number of each job by its name.

        Returns
        -------
        ClusterJob
            The job.
        """
        spec = self.spec
        end = spec.deadline if spec.until is None else spec.until * (1.0 + _ROUNDING)
        usual = next(table[gpus] for table, gpus in zip(self.run_times, self.preferred_gpus, strict=True) if gpus)
        return ClusterJob(
            name=spec.name,
            arrival=spec.arrival,
            run_times=tuple({gpus: price.seconds for gpus, price in table.items()} for table in self.run_times),
            preferred_gpus=self.preferred_gpus,
            team=spec.team,
            deadline=math.inf if end is None else end,
            priority=spec.priority,
            preemptible=spec.preemptible and spec.kind != "serve",
            restart_time=usual.restart_time,
            failure_share=usual.failure_share,
            slowdown_on_excess_racks=usual.slowdown_on_excess_racks,
            predecessors=tuple(numbers[name] for name in spec.after),
        )


def predict_job_run_times(spec: JobSpec, systems: Sequence[System], most: Sequence[int]) -> PredictedJob:
    """Predict the run times of a job on every system.

    Parameters
    ----------
    spec : JobSpec
        Job of a job file.
    systems : sequence of System
        Kinds of nodes.
    most : sequence of int
        GPUs of each kind that a job may have.

    Returns
    -------
    PredictedJob
        Run time [s] of the job on each system that can run it.

    Raises
    ------
    SpecError
        If a value is out of range or no number of GPUs can run the job; the message names the job.
    """
    reasons: list[str] = []
    tables: list[dict[int, JobRunTime]] = []
    for system, limit in zip(systems, most, strict=True):
        table: dict[int, JobRunTime] = {}
        try:
            price = _run_time_predictor(spec, system)
            for gpus in _gpu_counts(spec, limit):
                try:
                    table[gpus] = price(gpus)
                except (PlanError, CapacityError) as error:
                    reasons.append(f"{with_noun(gpus, 'GPU')} of {system.name}: {error}")
                    continue
                if _is_enough(spec, table, devices_per_machine(system)):
                    break
        except SpecError as error:
            raise SpecError(f"job {spec.name!r:.60}: {error}") from None
        tables.append(table)
    preferred = tuple(_preferred_gpus(spec, table) for table in tables)
    if not any(preferred):
        low = (spec.gpu_range() or (1, 1))[0]
        few = f"needs {with_noun(low, 'GPU')}, and the cluster has {max(most):,}" if low > max(most) else ""
        reason = few or (reasons[-1] if reasons else "no number of GPUs is allowed")
        raise SpecError(f"job {spec.name!r:.60} can never run: {reason}")
    return PredictedJob(spec, tuple(tables), preferred, "; ".join(reasons[:3]))


def _gpu_counts(spec: JobSpec, limit: int) -> list[int]:
    """Return the GPU counts for which run times are predicted, in rising order: those of the job, or powers of two."""
    low, high = spec.gpu_range() or (1, limit)
    high = min(high, limit)
    sizes = [low * 2**doublings for doublings in range(high.bit_length()) if low * 2**doublings <= high]
    return sizes + ([high] if sizes and sizes[-1] < high and spec.gpus != "auto" else [])


def _half_slack(spec: JobSpec) -> float | None:
    """Return half the time from arrival to deadline of an ``auto`` job [s]; the other half is left for waiting.

    None if the job has no deadline or a given number of GPUs.
    """
    return None if spec.gpus != "auto" or spec.deadline is None else (spec.deadline - spec.arrival) / 2.0


def _is_enough(spec: JobSpec, table: Mapping[int, JobRunTime], node: int) -> bool:
    """Return True if run times on more GPUs need not be predicted.

    For a service the first number that runs is enough. For an ``auto`` job it is the first that ends within its window,
    or that fills a node if there is no deadline. No larger number is predicted after a doubling that does not pay.
    """
    if spec.gpus != "auto" or spec.kind == "serve":
        return spec.kind == "serve"
    *before, last = table.values()
    window = _half_slack(spec)
    enough = last.gpus >= node if window is None else last.seconds <= window
    return enough or (bool(before) and last.seconds > (1.0 - _LEAST_SAVING) * before[-1].seconds)


def _preferred_gpus(spec: JobSpec, table: Mapping[int, JobRunTime]) -> int:
    """Return the number of GPUs of a job that is not resized: the largest whose last doubling saves enough time.

    0 if the job does not run.
    """
    sizes, window = list(table), _half_slack(spec)
    if window is not None and sizes and table[sizes[-1]].seconds <= window:
        return sizes[-1]
    for fewer, more in itertools.pairwise(sizes):
        saved = 1.0 - (table[more].seconds / table[fewer].seconds) ** (1.0 / math.log2(more / fewer))
        if saved < _LEAST_SAVING:
            return fewer
    return sizes[-1] if sizes else 0


_RunTimePredictor = Callable[[int], JobRunTime]


def _run_time_predictor(spec: JobSpec, system: System) -> _RunTimePredictor:
    """Return a function that predicts a job's run time for a number of GPUs; predictions are cached."""
    if spec.kind != "trace":
        return _cached_predictor(spec, system)
    seconds = float(spec.duration or 0.0)
    low = (spec.gpu_range() or (1, 1))[0]
    return lambda gpus: JobRunTime(gpus, seconds * low / gpus, restart_time=_RESTART_TIME)


@functools.lru_cache(maxsize=256)
def _cached_predictor(spec: JobSpec, system: System) -> _RunTimePredictor:
    """Return a cached function that predicts the run time of a job without given duration for a number of GPUs."""
    return functools.cache(_predictor_by_kind(spec, system))


def _predictor_by_kind(spec: JobSpec, system: System) -> _RunTimePredictor:
    network = load_model(str(spec.model))
    run = validate_mapping(Run, spec.run, "run")
    if spec.kind == "serve":
        return _service_predictor(spec, network, system)
    if spec.kind == "rl":
        return _rl_predictor(spec, network, system)
    if run.global_batch is None:
        run = with_fixed_global_batch(network, system, run, max(system.devices_per_node, 1))
    predictor = _tuning_predictor if spec.kind == "tune" else _training_predictor
    return predictor(spec, network, system, run)


def _training_predictor(spec: JobSpec, network: ModelSpec, system: System, run: Run) -> _RunTimePredictor:
    amount = parse_training_amount(network, run, epochs=spec.epochs, samples=spec.samples, tokens=spec.tokens)
    aimed, goal = run_and_amount_for_target(network, run, spec.target, amount, [system])
    if goal is None:
        raise SpecError("tokens: missing; expected tokens, samples, epochs or a target, or the duration of the job")
    aimed, _ = with_common_software(network, system, aimed, (spec.gpu_range() or (1, LARGE_RUN_GPUS))[1])

    def price(gpus: int) -> JobRunTime:
        settled = with_same_software(network, system, aimed.model_copy(update={"gpus": gpus})).run
        step = predict(network, system, settled)
        if not step.memory.fits:
            raise PlanError(f"{network.name} does not fit")
        return _training_time(step, goal, interruption_of(step, LongRunOptions()))

    return price


def _training_time(step: Prediction, goal: TrainingAmount, pause: Interruption) -> JobRunTime:
    """Return the run time of a training from its predicted step.

    The result includes the slowdown if the training is placed on more racks than needed.
    """
    steps = goal.samples / step.plan.global_batch
    seconds = steps * step.step_time if goal.requirement is None else goal.requirement(step).seconds
    low, high = (end / step.step_time for end in step.interval)
    return JobRunTime(
        step.plan.gpus, seconds / pause.goodput, (low, high), pause.save + pause.launch_time + pause.restore,
        1.0 - pause.goodput, pause.mtbf, pause.seconds_lost_per_failure, _slowdown(step),
    )  # fmt: skip


def _slowdown(step: Prediction) -> float:
    """Return the ratio of step times on two leaf switches and on as few as possible; 1 without leaf switches."""
    leaf = nodes_per_rack(step.system)
    nodes = step.plan.gpus // max(step.system.devices_per_node, 1)
    if leaf is None or nodes < 2 or nodes > leaf:
        return 1.0
    try:
        return max(step.predict_variant(nodes="spread:2").step_time / step.step_time, 1.0)
    except (SpecError, PlanError):
        return 1.0


def _tuning_predictor(spec: JobSpec, network: ModelSpec, system: System, run: Run) -> _RunTimePredictor:
    from paleo.tuning.study import (
        DEFAULT_RUNG_SPAN,
        TuningSettings,
        parse_network_sizes,
        parse_trial_samples,
        tuning_study,
        validate_tuning_settings,
    )

    options = dict(spec.tune or {})
    _check_keys("tune", options, _TUNE_KEYS)

    def amounts(end: str) -> dict[str, Any]:
        return {name: options.get(f"{end}_{name}") for name in ("tokens", "samples", "epochs")}

    most = parse_trial_samples(network, run, "max", **amounts("max"))
    stated = any(value is not None for value in amounts("min").values())
    least = parse_trial_samples(network, run, "min", **amounts("min")) if stated else most / DEFAULT_RUNG_SPAN
    vary = options.get("vary", ())
    usual = {name: options[name] for name in ("eta", "population", "seed") if name in options}
    tuning = validate_tuning_settings(
        TuningSettings(
            options.get("trials", 0), str(options.get("method", "asha")), least, most,
            varied_network_sizes=parse_network_sizes([vary] if isinstance(vary,
                str) else [str(each) for each in vary]), **usual,
        )
    )  # fmt: skip

    def price(gpus: int) -> JobRunTime:
        search = tuning_study(network, system, run, tuning, gpus=gpus).fastest_search
        low, high = (end / search.seconds for end in search.interval)
        costs = search.trial_estimate.trial_times
        return JobRunTime(gpus, search.seconds, (low, high), costs.launch_time + costs.save[0] + costs.restore[0])

    return price


def _service_predictor(spec: JobSpec, network: ModelSpec, system: System) -> _RunTimePredictor:
    options = dict(spec.serve or {})
    _check_keys("serve", options, _SERVE)
    usual = {"input": 1000, "output": 300}
    lengths = RequestLengths(*(_positive(name, options.get(name, tokens)) for name, tokens in usual.items()))
    load = ServingLoad("poisson", lengths, rate=_positive("rate", options.get("rate")))
    formats = [parse_formats(str(options.get("weights", network.released)), None)]
    engine = load_engine(str(options.get("engine", "vllm")))

    def price(gpus: int) -> JobRunTime:
        service = evaluate_service(network, system, gpus, engine, load, LatencyLimits(), formats, None, None, None)
        if service.best is None:
            raise PlanError(service.verdict)
        return JobRunTime(gpus, float(spec.until or 0.0) - spec.arrival)

    return price


def _rl_predictor(spec: JobSpec, network: ModelSpec, system: System) -> _RunTimePredictor:
    from paleo.studies.reinforcement import ReinforcementQuestion, reinforcement_study

    options = dict(spec.rl or {})
    _check_keys("rl", options, _RL)
    algorithm, software = str(options.get("algorithm", "grpo")), str(options.get("software", "megatron-core"))
    if algorithm not in EXTRA_PASSES_AND_CRITIC:
        raise SpecError(f"rl.algorithm: {algorithm!r:.40}: {suggest_names(algorithm, EXTRA_PASSES_AND_CRITIC)}")
    output = _positive("output", options.get("output", 1000))
    usual = {"rollouts": 512, "steps": 0}
    rollouts, steps = (int(_positive(name, options.get(name, number))) for name, number in usual.items())
    task = Rollouts(
        rollouts, int(_positive("batch", options.get("batch", rollouts))),
        _positive("input", options.get("input", 200)), output,
        max(_positive("max_output", options.get("max_output", 4.0 * output)), output),
    )  # fmt: skip

    def price(gpus: int) -> JobRunTime:
        question = ReinforcementQuestion(network, system, gpus, task, algorithm, software=software)
        study = reinforcement_study(question, steps=steps)
        if not study.steps or not study.steps[0].trainer_fits:
            raise PlanError(study.verdict)
        return JobRunTime(gpus, study.steps[0].step_time * steps, STEP_TIME_INTERVAL_FACTORS, _RESTART_TIME)

    return price


def _check_keys(part: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in options:
        if name not in known:
            raise SpecError(f"{part}.{name!s:.40}: unknown key; {suggest_names(str(name), known)}")


def _positive(name: str, value: Any) -> float:
    """Return a number above zero from a value with or without a prefix or rate, such as ``2k`` or ``20/s``."""
    try:
        number = parse_quantity(value.removesuffix("/s"), "count") if isinstance(value, str) else float(value)
    except (SpecError, TypeError, ValueError, AttributeError):
        number = math.nan
    if isinstance(value, bool) or not 0 < number < 2.0**40:
        raise SpecError(f"{name}: {value!r:.60}: expected a number above zero")
    return number
