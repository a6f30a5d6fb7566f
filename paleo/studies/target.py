"""Time to train a network to a target quality: samples from a fitted law, the predicted step, and evaluations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paleo.errors import PaleoError, PlanError, SpecError
from paleo.learning.base import (
    DEFAULT_LOSS_LAW,
    SamplesToLoss,
    best_batch_tokens,
    law_with_noise_scale,
    samples_to_target,
)
from paleo.network.graph import Graph, build_graph
from paleo.predict import Prediction, predict
from paleo.specs.loading import MAX_EXACT_INTEGER
from paleo.specs.model import ModelSpec, load_model
from paleo.specs.run import Run, flatten_to_paths, replace_fields, user_set_fields
from paleo.specs.task import NO_EVALUATION, QualityEvaluation, TrainingCode, TrainingTask, load_task
from paleo.studies.cost import (
    INTERVAL_STANDARD_DEVIATIONS,
    JOULES_PER_KWH,
    Tariff,
    TrainingAmount,
    TrainingRequirement,
    rent_rate,
    training_energy,
)
from paleo.units import with_noun

if TYPE_CHECKING:
    from paleo.parallel.plan import Plan
    from paleo.specs.calibration import Calibration
    from paleo.specs.device import Device
    from paleo.specs.system import System


#: What nobody modelled stays: two submitters of one system and configuration differ by 2 to 4 %.
_SUBMITTERS = 0.03


@dataclass(frozen=True, slots=True)
class TargetTime:
    """Predicted time until a training task reaches its target quality on one configuration.

    ``samples`` is the number of samples to the target and ``evaluation_time`` the time of one evaluation [s].
    ``prediction`` is the predicted step and ``forward_time`` the time of its forward pass [s]. ``step_time`` is the
    step time corrected for the task's reference code [s]. ``*_log_deviation`` are standard deviations of logarithms.
    """

    task: TrainingTask
    prediction: Prediction
    forward_time: float
    global_batch: float
    samples: float
    step_time: float
    evaluation_count: float
    evaluation_time: float
    samples_log_deviation: float
    step_log_deviation: float
    warnings: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Number of training steps to the target, rounded up."""
        return math.ceil(self.samples / self.global_batch)

    @property
    def total_evaluation_time(self) -> float:
        """Time of all evaluations until the target [s]."""
        return self.evaluation_count * self.evaluation_time

    @property
    def time_to_target(self) -> float:
        """Time until the target quality is reached [s]: steps, evaluations, and the start of a job that is set up.

        MLPerf's rules do not time the initialisation, either.
        """
        return self.samples / self.global_batch * self.step_time + self.total_evaluation_time + self.task.code.start

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the time until the target [s].

        Errors of the number of samples and of the step time are taken as independent.
        """
        variance = self.samples_log_deviation**2 + self.step_log_deviation**2 + _SUBMITTERS**2
        spread = math.exp(INTERVAL_STANDARD_DEVIATIONS * math.sqrt(variance))
        return self.time_to_target / spread, self.time_to_target * spread

    @property
    def step_interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the step time [s]."""
        spread = math.exp(INTERVAL_STANDARD_DEVIATIONS * math.hypot(self.step_log_deviation, _SUBMITTERS))
        return self.step_time / spread, self.step_time * spread

    def usd(self, tariff: Tariff | None = None) -> float | None:
        """Return the rent of the GPUs until the target quality is reached [USD].

        Parameters
        ----------
        tariff : Tariff, optional
            Prices; by default those of the catalog.

        Returns
        -------
        float, optional
            USD; None if no price is known.
        """
        rate, _ = rent_rate(self.prediction.system, self.prediction.plan.gpus, tariff)
        return None if rate is None else rate * self.time_to_target

    def kwh(self, tariff: Tariff | None = None) -> float | None:
        """Return the energy of the training until the target quality is reached [kWh].

        Parameters
        ----------
        tariff : Tariff, optional
            Host power and power usage effectiveness.

        Returns
        -------
        float, optional
            kWh; None if the device file has no design power.
        """
        joules = training_energy(self.prediction, self.time_to_target, tariff or Tariff())
        return None if joules is None else joules / JOULES_PER_KWH


def _code_ratio(code: TrainingCode, device: Device, *, samples_per_gpu: float, nodes: float) -> tuple[float, float]:
    """Return the ratio of measured to predicted step time of a task's reference code, and its uncertainty.

    The uncertainty is the standard deviation of the ratio's logarithm. A device without fitted ratio gets that of its
    architecture. An architecture without one gets the mean ratio, with the spread between architectures added.
    """
    if not code.ratio:
        return 1.0, max(code.residual, _UNFITTED)
    name = next((key for key in (device.name, device.architecture) if key in code.ratio), "all")
    logs = np.log([value for key, value in code.ratio.items() if key != "all"])
    spread = float(logs.std()) if name == "all" and len(logs) > 1 else 0.0
    doublings = math.log2(samples_per_gpu / code.samples_per_gpu)
    change = code.per_doubling * doublings + (code.several_nodes if nodes > 1 else 0.0)
    return code.ratio.get(name, 1.0) * math.exp(change), math.hypot(code.residual, spread)


#: One sigma of the step of a code that nothing was fitted to.
_UNFITTED = 0.25


def _evaluations(evaluation: QualityEvaluation, samples: float) -> float:
    """Count the evaluations of a training of ``samples`` samples, including the one that finds the target reached.

    >>> from paleo.specs.task import QualityEvaluation
    >>> _evaluations(QualityEvaluation(samples=10, every=100, first=300, source="worked"), 500.0)
    3.0
    """
    first = evaluation.first or evaluation.every
    count = 1.0 + max(0.0, math.ceil((samples - first) / evaluation.every - _TOLERANCE))
    return 1.0 if evaluation.beside else count


#: Rounding of samples that are whole numbers of evaluations.
_TOLERANCE = 0.01


def _rows_of(task: TrainingTask, global_batch: float) -> int:
    """Return the number of input sequences in a global batch of samples; several samples are packed in one sequence."""
    return max(1, round(global_batch / task.packed))


def task_run(task: TrainingTask, gpus: int, global_batch: float, **options: Any) -> Run:
    """Return the run with which a task's reference code trains at a global batch.

    Parameters
    ----------
    task : TrainingTask
        Training task: network, data, law of samples, and target quality.
    gpus : int
        Number of GPUs.
    global_batch : float
        Global batch in samples of the task.
    **options : Any
        Fields of the run that replace those of the task.

    Returns
    -------
    Run
        Plan and options of the reference code, with `options` on top.
    """
    stated = flatten_to_paths({name: value for name, value in options.items() if value is not None})
    return Run(**_usual(task) | stated | {"gpus": gpus, "global_batch": _rows_of(task, global_batch)})


def _usual(task: TrainingTask) -> dict[str, Any]:
    """Return the run options that a task's reference code uses, as a dict from the path of a field to its value."""
    return flatten_to_paths({"software": task.code.software, "model": task.params}) | flatten_to_paths(task.run)


def _with_noise_scale(task: TrainingTask, noise_scale: float | None) -> TrainingTask:
    """Copy a training task with a measured gradient noise scale [samples] as critical batch; unchanged for None."""
    if noise_scale is None:
        return task
    if not 1 <= noise_scale <= MAX_EXACT_INTEGER:
        expected = f"must be above zero: samples of the critical batch, from 1 to {MAX_EXACT_INTEGER:.0e}"
        raise SpecError(f"--noise-scale {noise_scale:g} {expected}")
    return task.model_copy(update={"law": law_with_noise_scale(task.law, noise_scale)})


def time_to_target(
    task: TrainingTask,
    system: System,
    run: Run,
    *,
    global_batch: float,
    runs: float = 1.0,
    calibration: Calibration | None = None,
) -> TargetTime:
    """Predict how long a training task takes to reach its target quality on a system.

    Parameters
    ----------
    task : TrainingTask
        Training task: network, data, law of samples, and target quality.
    system : System
        Machine: its devices, nodes and links.
    run : Run
        Plan and options of the training, as `task_run` returns them.
    global_batch : float
        Global batch in samples of the task.
    runs : float, optional
        Number of runs that are averaged (MLPerf's rule), which reduces the noise of random seeds.
    calibration : Calibration, optional
        Calibration to use instead of the run's.

    Returns
    -------
    TargetTime
        Samples, step time, evaluation time and their uncertainty.
    """
    if run.dtype is None:
        run = run.model_copy(update={"dtype": task.for_device_kind(system.device.kind).submission_dtype(system.device)})
    prediction = predict(load_model(task.model, run_code=False), system, run, calibration=calibration)
    forward = forward_pass_time(prediction, calibration)
    return time_from_prediction(task, prediction, forward, global_batch=global_batch, runs=runs)


def time_from_prediction(
    task: TrainingTask, prediction: Prediction, forward: float, *, global_batch: float, runs: float = 1.0
) -> TargetTime:  # fmt: skip
    """Return the time until a task reaches its target quality, from a step that is already predicted.

    Parameters
    ----------
    task : TrainingTask
        Training task: network, data, law of samples, and target quality.
    prediction : Prediction
        Prediction of the step.
    forward : float
        Time of the step's forward pass [s].
    global_batch : float
        Global batch in samples of the task.
    runs : float, optional
        Number of runs that are averaged.

    Returns
    -------
    TargetTime
        Samples, step time, evaluation time and their uncertainty.
    """
    system, plan = prediction.system, prediction.plan
    task = task.for_device_kind(system.device.kind)
    nodes = plan.gpus / max(system.devices_per_node, 1)
    ratio, sigma = _code_ratio(task.code, system.device, samples_per_gpu=global_batch / plan.gpus, nodes=nodes)
    samples, sigma_samples = _samples_needed(task, global_batch, runs)
    if not math.isfinite(samples):
        raise PlanError(f"{task.name}: a global batch of {global_batch:,.0f} never reaches {task.target}")
    if not task.code.ratio:
        sigma = max(sigma, math.log(prediction.interval[1] / prediction.step_time) / INTERVAL_STANDARD_DEVIATIONS)
    return TargetTime(
        task=task,
        prediction=prediction,
        forward_time=forward,
        global_batch=global_batch,
        samples=samples,
        step_time=prediction.step_time * ratio,
        evaluation_count=_evaluations(task.evaluation, samples),
        evaluation_time=_evaluation_time(task, forward * ratio, plan),
        samples_log_deviation=sigma_samples,
        step_log_deviation=sigma,
        warnings=(*prediction.warnings, *task.law.warnings(global_batch)),
    )


def _samples_needed(task: TrainingTask, global_batch: float, runs: float = 1.0) -> tuple[float, float]:
    """Return the samples to a task's target at a global batch, and the standard deviation of their logarithm.

    The samples follow from the task's fitted law, times the excess of published MLPerf submissions where known.
    """
    law, extra = task.law, task.submissions
    samples = float(law.samples(global_batch))
    if extra is None:
        return samples, float(law.log_standard_deviation(global_batch, runs))
    beyond = float(law.doublings_outside_range(global_batch)) * law.residual
    return samples * extra.ratio, math.hypot(extra.residual, beyond)


def _evaluation_time(task: TrainingTask, forward: float, plan: Plan) -> float:
    """Return the time of one evaluation of a task's quality [s]: forward passes over the evaluation set, plus overhead.

    ``forward`` is the time of one forward pass at the training batch [s]. The evaluation samples are divided among the
    replicas.
    """
    evaluation = task.evaluation
    passes = math.ceil(evaluation.samples / plan.mesh.replicas) / (plan.local_batch * task.packed)
    return evaluation.fixed + passes * forward * evaluation.work


def forward_pass_time(prediction: Prediction, calibration: Calibration | None = None) -> float:
    """Return the time of the forward pass alone of a predicted run [s], at the same batch on the same GPUs.

    Parameters
    ----------
    prediction : Prediction
        Prediction of a run.
    calibration : Calibration, optional
        Calibration to use instead of the run's.

    Returns
    -------
    float
        Time [s].
    """
    run, plan = prediction.run, prediction.plan
    keeps = {"forward_only": True, "offload": "none", "recompute": "none", "recompute_layers": None}
    keeps |= {"lora": None, "qlora": False, "freeze": ()}
    spared = replace_fields(run, {**keeps, "microbatch": plan.microbatch})
    try:
        return predict(prediction.model, prediction.system, spared, calibration=calibration).step_time
    except PaleoError:
        return (prediction.step_time - prediction.breakdown.optimizer) * _FORWARD_SHARE


#: The forward pass's share of a training step where it cannot be predicted alone: a third.
_FORWARD_SHARE = 1.0 / 3.0


@dataclass(frozen=True, slots=True)
class TargetScaling:
    """Times to a target quality over GPU counts, with the count from which more GPUs no longer pay.

    Beyond ``knee`` a doubling of the GPUs saves less than a quarter of the time. ``largest_useful_gpus`` is the fastest
    GPU count, None if the time still falls at the last count. ``skipped`` maps counts without a time to reasons.
    """

    points: tuple[TargetTime, ...]
    knee: int | None
    largest_useful_gpus: int | None
    skipped: Mapping[int, str] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Sentence with the fastest GPU count, the knee and the largest useful count."""
        best = min(self.points, key=lambda point: point.time_to_target)
        return "; ".join([f"fastest with {with_noun(best.prediction.plan.gpus, 'GPU')}", *self.limit_texts])

    @property
    def limit_texts(self) -> list[str]:
        """Texts on the GPU counts beyond which a doubling saves little, and beyond which training gets slower."""
        texts = []
        if self.knee is not None:
            texts.append(f"beyond {with_noun(self.knee, 'GPU')} a doubling saves less than a quarter")
        if self.largest_useful_gpus is not None:
            texts.append(f"more than {with_noun(self.largest_useful_gpus, 'GPU')} are slower")
        return texts


#: A doubling of GPUs that saves less than this share of the time is beyond the knee.
_KNEE = 0.25


def target_scaling(points: list[TargetTime], skipped: Mapping[int, str] | None = None) -> TargetScaling:
    """Find the GPU count beyond which a doubling saves little time to a target, and the fastest GPU count.

    Parameters
    ----------
    points : list of TargetTime
        Times on growing GPU counts.
    skipped : mapping of int to str, optional
        Counts without a time, with the reason.

    Returns
    -------
    TargetScaling
        The curve. Beyond the knee a doubling saves less than a quarter of the time.
    """
    ordered = sorted(points, key=lambda point: point.prediction.plan.gpus)
    gpus = [point.prediction.plan.gpus for point in ordered]
    seconds = [point.time_to_target for point in ordered]
    knee = None
    for (fewer, long), (more, short) in pairwise(zip(gpus, seconds, strict=True)):
        if knee is None and 1.0 - (short / long) ** (1.0 / math.log2(more / fewer)) < _KNEE:
            knee = fewer
    best = int(np.argmin(seconds))
    return TargetScaling(tuple(ordered), knee, gpus[best] if best < len(gpus) - 1 else None, skipped or {})


def times_over_gpus(
    task: TrainingTask, system: System, counts: Sequence[int], batch: str, **options: Any
) -> tuple[list[TargetTime], dict[int, str]]:
    """Predict the time to a target on several GPU counts.

    Parameters
    ----------
    task : TrainingTask
        Training task: network, data, law of samples, and target quality.
    system : System
        Machine: its devices, nodes and links.
    counts : sequence of int
        Numbers of GPUs.
    batch : str
        Global batch in samples of the task, or ``auto`` for the best one.
    **options : Any
        Fields of the run that replace those of the task.

    Returns
    -------
    tuple
        One `TargetTime` for each count that can run, and the reason for each other one.

    Raises
    ------
    SpecError
        If `batch` is no positive number.
    PlanError
        If no count can run.
    """
    stated = None if batch == "auto" else _positive_batch(batch)
    task = task.for_device_kind(system.device.kind)
    points, skipped = [], dict[int, str]()
    for gpus in counts:
        tried = _candidate_batches(task, gpus) if stated is None else [stated]
        try:
            point = _best_batch(task, system, gpus, tried, **options)
            searched = stated is None and options.get("strategy") is None
            points.append(_best_layout(task, point) if searched else point)
        except PlanError as error:
            skipped[gpus] = str(error)
    if not points:
        raise PlanError("; ".join(dict.fromkeys(skipped.values())))
    return points, skipped


def _best_layout(task: TrainingTask, point: TargetTime) -> TargetTime:
    """Search a faster parallel plan for a predicted time to target; return the faster of both.

    The search finds the best plan at the same batch, and tries it at half and twice the batch, too. Plans must fit in
    memory.
    """
    from paleo.launch.jobs import supported_search_space
    from paleo.search.plans import search
    from paleo.search.space import SearchSpace

    first = point.prediction
    run = first.run.model_copy(update={"microbatch": None, "strategy": "dp"})
    space = supported_search_space(SearchSpace(), run.software)
    try:
        plan = search(first.model, first.system, run, space=space, top=1).plans[0]
    except PaleoError:
        return point
    if not plan.fits:
        return point
    candidates = [point]
    for batch in _known_batches(task, [point.global_batch * factor for factor in (1.0, 2.0, 0.5)]):
        changed = plan.run.model_copy(update={"global_batch": _rows_of(task, batch)})
        try:
            candidates.append(time_to_target(task, first.system, changed, global_batch=batch))
        except PlanError:
            continue
    return min((each for each in candidates if each.prediction.memory.fits), key=lambda each: each.time_to_target)


def _positive_batch(text: str) -> float:
    """Convert a text to a global batch [samples]; raise SpecError if it is no whole number of one or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1 and value == int(value)):
        raise SpecError(f"--batch {text!r} is neither auto nor a whole number of samples of one or more")
    return value


def _best_batch(
    task: TrainingTask, system: System, gpus: int, candidates: Sequence[float], **options: Any
) -> TargetTime:
    """Return the shortest time to a target over candidate global batches [samples]; runs must fit in memory.

    Where no strategy is given and data parallelism does not fit, plans with more and more model parallelism are tried,
    and the first that fits is taken. PlanError, with the last reason, is raised if nothing can be run.
    """
    tried: list[TargetTime] = []
    reason = "no batch was tried"
    for batch in candidates:
        try:
            point = _first_fitting(task, system, gpus, batch, options)
        except PlanError as error:
            reason = str(error)
            continue
        if point.prediction.memory.fits:
            tried.append(point)
        else:
            reason = f"a global batch of {batch:,.0f} does not fit in memory"
        if len(tried) > 1 and tried[-1].time_to_target > _RISEN * min(point.time_to_target for point in tried):
            break
    if not tried:
        raise PlanError(f"{task.name} on {gpus} GPUs: {reason}")
    return min(tried, key=lambda point: point.time_to_target)


#: A batch that takes this many times as long as the best so far ends the search for larger ones.
_RISEN = 1.5
#: Plans in the order in which they are tried where none is given and data parallelism does not fit.
MODEL_PARALLEL_STRATEGIES = (
    "zero=1", "zero=3", "tp=2,zero=1,sp", "tp=4,zero=1,sp", "tp=8,zero=1,sp", "tp=4,pp=4,zero=1,sp",
    "tp=8,pp=8,zero=1,sp", "tp=8,pp=16,zero=1,sp", "tp=8,pp=4,zero=1,sp",
)  # fmt: skip


def _first_fitting(
    task: TrainingTask, system: System, gpus: int, batch: float, options: Mapping[str, Any]
) -> TargetTime:
    def point_of(**more: Any) -> TargetTime:
        run = task_run(task, gpus, batch, **{**options, **more})
        return time_to_target(task, system, run, global_batch=batch)

    point = point_of()
    if point.prediction.memory.fits or options.get("strategy") is not None:
        return point
    return time_to_target_of_first_feasible_strategy(MODEL_PARALLEL_STRATEGIES, point_of) or point


def time_to_target_of_first_feasible_strategy(
    plans: Sequence[str], point_of: Callable[..., TargetTime]
) -> TargetTime | None:
    """Return the time to a target under the first strategy of a list that runs and fits in memory.

    Parameters
    ----------
    plans : sequence of str
        Strategies such as ``tp=8,pp=4,zero=1,sp``, in the order in which they are tried.
    point_of : callable
        Function of the keywords ``strategy`` and ``microbatch`` that predicts a run. The microbatch is 1 under tensor
        parallelism, where the local batch of a replica is large.

    Returns
    -------
    TargetTime, optional
        Predicted time to the target; None if no strategy fits.
    """
    for strategy in plans:
        try:
            point = point_of(strategy=strategy, microbatch=1 if "tp=" in strategy else None)
        except PaleoError:
            continue
        if point.prediction.memory.fits:
            return point
    return None


def _candidate_batches(task: TrainingTask, gpus: int) -> list[float]:
    """Return the global batches worth trying on a number of GPUs [samples].

    They double from one input sequence a GPU up to twice the largest batch of the task's law. Of them, those in the
    range of the law are returned, if there are any.
    """
    rows = gpus * task.packed
    largest = (task.law.batches or (rows, rows * 64))[1]
    while rows > largest and rows % 2 == 0:
        rows //= 2
    count = max(1, math.ceil(math.log2(max(2.0 * largest / rows, 1.0))) + 1)
    return _known_batches(task, [rows * 2.0**index for index in range(min(count, 20))])


def _known_batches(task: TrainingTask, candidates: Sequence[float]) -> list[float]:
    """Return those global batches [samples] for which the task's sample law was fitted; all batches if none is."""
    return [batch for batch in candidates if task.law.doublings_outside_range(batch) == 0] or list(candidates)


#: Tokens at a global batch over those at the best one from which an estimate says so.
_MORE = 1.02


@dataclass(frozen=True, slots=True)
class TrainingGoal:
    """Goal that a training must reach: a ``loss`` [nat per token], or the quality of the task named by ``target``.

    ``noise_scale`` is the measured gradient noise scale (critical batch) [samples]. Fields that are not given are None.
    """

    loss: float | None = None
    target: str | None = None
    noise_scale: float | None = None


def amount_for_goal(
    prediction: Prediction, goal: TrainingGoal, stated: TrainingAmount | None
) -> tuple[TrainingAmount | None, tuple[str, ...]]:
    """Return the amount of training (samples) that reaches a loss or a target quality.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.
    goal : TrainingGoal
        Loss or target task.
    stated : TrainingAmount, optional
        Amount given by the user.

    Returns
    -------
    tuple[TrainingAmount | None, tuple[str, ...]]
        The amount, and warnings where the law is extrapolated; `stated` if there is no goal.

    Raises
    ------
    SpecError
        If a goal comes with an amount, cannot be reached, or does not suit the network.
    """
    if goal.noise_scale is not None and not goal.noise_scale > 0:
        raise SpecError(f"--noise-scale {goal.noise_scale:g} must be above zero: samples of the critical batch")
    goals = [name for name in ("loss", "target") if getattr(goal, name) is not None]
    if len(goals) + (stated is not None) > 1:
        raise SpecError(_EXCLUDE)
    amount, warnings = stated, tuple[str, ...]()
    if goal.loss is not None:
        amount, warnings = _for_loss(prediction, goal.loss)
    if goal.target is not None:
        return _for_task(prediction, goal.target, goal.noise_scale)
    if amount is None or goal.noise_scale is None:
        return amount, warnings
    batch = prediction.plan.global_batch
    samples = samples_to_target(samples=amount.samples, global_batch=batch, critical_batch=goal.noise_scale)
    words = f"{amount.description}, {float(samples) / amount.samples:.2f} times as many at a batch of {batch:,}"
    return replace(amount, samples=float(samples), description=words), warnings


def _for_loss(prediction: Prediction, loss: float) -> tuple[TrainingAmount, tuple[str, ...]]:
    """Return the amount of training that brings a language model to a loss at the run's global batch, and warnings.

    The amount follows from the default loss law (`DEFAULT_LOSS_LAW`).
    """
    law = _samples_to_loss(prediction.graph, loss)
    batch = prediction.plan.global_batch
    samples = float(law.samples(batch))
    size, best = batch * law.tokens_per_sample, float(best_batch_tokens(law.tokens_at_best_batch))
    if not math.isfinite(samples):
        raise SpecError(f"--loss {loss:g}: a global batch of {size:,.2g} tokens never reaches it; try {best:,.2g}")
    tokens = samples * law.tokens_per_sample
    words = f"{with_noun(round(tokens), 'token')} for a loss of {loss:g} nats ({DEFAULT_LOSS_LAW})"
    if tokens > _MORE * law.tokens_at_best_batch:
        words += f"; {with_noun(round(law.tokens_at_best_batch), 'token')} at the best global batch, {best:,.2g} tokens"
    return TrainingAmount(samples, words, samples_log_deviation=law.residual), law.token_range_warnings(tokens)


def _samples_to_loss(graph: Graph, loss: float) -> SamplesToLoss:
    """Return the scaling law for the samples a language model needs to reach a loss; SpecError if none suits it."""
    if graph.tokens_per_sample is None:
        raise SpecError(f"--loss: samples of model {graph.name} are not counted in tokens; no law of loss holds for it")
    if any(node.type == "moe" for node in graph.nodes):
        raise SpecError(f"--loss: no law of loss is known for mixtures of experts such as {graph.name}; state --tokens")
    return SamplesToLoss.for_network(loss, float(graph.parameters), float(graph.tokens_per_sample))


def _task_of_loss(model: str, loss: float) -> TrainingTask:
    """Make a training task whose target is a loss [nat per token] of a language model, given by name or path."""
    spec = load_model(model)
    return TrainingTask(
        name=f"{spec.name} to {loss:g}", title=spec.name, model=model, sample="sequence", dataset="any text",
        dataset_samples=1.0, target=f"a loss of {loss:g} nats a token",
        law=_samples_to_loss(build_graph(spec, batch=1), loss), evaluation=NO_EVALUATION,
        code=TrainingCode(software=Run().software, source="not fitted"), source=spec.source,
    )  # fmt: skip


def load_or_make_task(
    task: str | Path | TrainingTask, loss: float | None = None, noise_scale: float | None = None
) -> TrainingTask:
    """Load a training task, or make one from a language model and a loss to reach.

    Parameters
    ----------
    task : str | Path | TrainingTask
        Name, path or loaded task; with `loss` the name of a language model.
    loss : float, optional
        Loss to reach [nat per token].
    noise_scale : float, optional
        Measured gradient noise scale, which replaces the critical batch [samples].

    Returns
    -------
    TrainingTask
        Task with network, target and law of samples.

    Raises
    ------
    SpecError
        If both `loss` and `noise_scale` are given, or the task does not suit.
    """
    if loss is None:
        return _with_noise_scale(load_task(task) if isinstance(task, str | Path) else task, noise_scale)
    if noise_scale is not None:
        raise SpecError("--loss: its law has a best batch of its own; leave --noise-scale out")
    if isinstance(task, TrainingTask):
        raise SpecError(f"--loss: {task.name} is a task; expected a language model")
    return _task_of_loss(str(task), loss)


def _for_task(prediction: Prediction, name: str, noise_scale: float | None) -> tuple[TrainingAmount, tuple[str, ...]]:
    """Return the amount of training to the target of a named task at the run's global batch, and warnings."""
    task = _with_noise_scale(_task_of(prediction.model, name), noise_scale)
    batch = prediction.plan.global_batch * task.packed
    samples, _ = _samples_needed(task, batch)
    words = f"{with_noun(round(samples), task.sample)} to {task.target}, evaluations included"
    return TrainingAmount(samples / task.packed, words, _target_amount(task).requirement), task.law.warnings(batch)


def _target_amount(task: TrainingTask) -> TrainingAmount:
    """Return the amount of training until a task's target, which depends on the global batch.

    The amount comprises samples by the task's law, steps of its reference code, and evaluations. ``samples`` is the
    number at the smallest batch of the law.
    """
    batch = (task.law.batches or (1.0, 1.0))[0]
    samples, _ = _samples_needed(task, batch)
    return TrainingAmount(samples / task.packed, f"{task.title}: {task.target}", partial(_need, task), _batches(task))


#: How many global batches of a task are searched at most.
_MOST_BATCHES = 6


def _batches(task: TrainingTask) -> tuple[int, ...]:
    """Return at most six global batches [input sequences] in the range of the task's sample law, powers of two."""
    smallest, largest = task.law.batches or (1.0, 1.0)
    powers = range(max(0, math.ceil(math.log2(smallest / task.packed))), int(math.log2(largest / task.packed)) + 1)
    return tuple(2**power for power in powers[:: math.ceil(len(powers) / _MOST_BATCHES) or 1])


def _need(task: TrainingTask, prediction: Prediction) -> TrainingRequirement:
    batch = prediction.plan.global_batch * task.packed
    point = time_from_prediction(task, prediction, forward_pass_time(prediction), global_batch=batch)
    ratio = point.step_time / prediction.step_time
    samples, evaluation = point.samples / task.packed, point.total_evaluation_time
    return TrainingRequirement(samples, point.time_to_target, point.interval, ratio, evaluation)


def run_and_amount_for_target(
    network: ModelSpec, run: Run, target: str | None, stated: TrainingAmount | None, systems: Sequence[System]
) -> tuple[Run, TrainingAmount | None]:
    """Fill in run options and amount of training from a target task; return both unchanged without a target.

    Parameters
    ----------
    network : ModelSpec
        Network, as its model file describes it.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.
    target : str, optional
        Name of a task; None for no target.
    stated : TrainingAmount, optional
        Amount given by the user.
    systems : sequence of System
        Systems that run the task.

    Returns
    -------
    tuple[Run, TrainingAmount | None]
        Run with the options of the task, and amount of training until its target.

    Raises
    ------
    SpecError
        If target and amount are both given, the task has another network, or the systems have several kinds of devices.
    """
    if target is None:
        return run, stated
    if stated is not None:
        raise SpecError(_EXCLUDE)
    task = _task_of(network, target)
    # The kind of device that all systems have; raise SpecError, which names a system of each kind, if they differ.
    by_kind = {system.device.kind: system.name for system in reversed(systems)}
    if len(by_kind) > 1:
        examples = " and ".join(f"{name} ({kind})" for kind, name in sorted(by_kind.items()))
        raise SpecError(
            f"--target {target}: {examples} run its task with different software, optimizers and formats, and one run "
            "cannot state both; ask for systems of one kind of device at a time"
        )
    (kind,) = by_kind
    return Run(**_usual(task.for_device_kind(kind)) | user_set_fields(run)), _target_amount(task)


def _task_of(network: ModelSpec, target: str) -> TrainingTask:
    task = load_task(target)
    if task.model != network.name:
        raise SpecError(f"--target {target}: is a task of model {task.model}, not of {network.name}")
    return task


_EXCLUDE = "--loss, --target, --epochs, --samples and --tokens exclude each other: state one of them"
