"""Time to a target: steps from a law of learning, seconds of a step from a prediction, evaluations at their cadence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from paleo.errors import PaleoError, PlanError, SpecError
from paleo.learning.critical_batch import CriticalBatch
from paleo.predict import predict
from paleo.specs.loading import MOST_COUNT
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.studies.cost import Tariff, energy
from paleo.studies.training import JOULES_PER_KWH, NINETY, rent
from paleo.units import counted

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.calibration import Calibration
    from paleo.specs.device import Device
    from paleo.specs.system import System
    from paleo.specs.task import Code, Evaluation, TrainingTask

    pass

#: What nobody modelled stays: two submitters of one system and configuration differ by 2 to 4 %.
SUBMITTERS = 0.03


@dataclass(frozen=True, slots=True)
class TargetTime:
    """What a task takes on one configuration: samples, seconds of a step and of all evaluations, with one sigma of the
    logarithm of each part; ``prediction`` is the step's and ``forward`` the seconds of its forward pass, ``step_time``
    is that of the task's code."""

    task: TrainingTask
    prediction: Prediction
    forward: float
    global_batch: float
    samples: float
    step_time: float
    evaluations: float
    evaluation_time: float
    sigma_samples: float
    sigma_step: float
    warnings: tuple[str, ...]

    @property
    def steps(self) -> int:
        """Whole steps to the target."""
        return math.ceil(self.samples / self.global_batch)

    @property
    def evaluation_seconds(self) -> float:
        """Seconds of all evaluations."""
        return self.evaluations * self.evaluation_time

    @property
    def seconds(self) -> float:
        """Seconds to the target, evaluations included; initialisation is not timed by MLPerf's rules."""
        return self.samples / self.global_batch * self.step_time + self.evaluation_seconds

    @property
    def interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the seconds: errors of samples and of the step are independent."""
        spread = math.exp(NINETY * math.sqrt(self.sigma_samples**2 + self.sigma_step**2 + SUBMITTERS**2))
        return self.seconds / spread, self.seconds * spread

    @property
    def step_interval(self) -> tuple[float, float]:
        """Ends of the 90 % interval of the seconds of a step."""
        spread = math.exp(NINETY * math.hypot(self.sigma_step, SUBMITTERS))
        return self.step_time / spread, self.step_time * spread

    def usd(self, tariff: Tariff | None = None) -> float | None:
        """Rent until the target; None where no price is known."""
        rate, _ = rent(self.prediction.system, self.prediction.plan.gpus, tariff)
        return None if rate is None else rate * self.seconds

    def kwh(self, tariff: Tariff | None = None) -> float | None:
        """Energy until the target; None where the device states no power."""
        joules = energy(self.prediction, self.seconds, tariff or Tariff())
        return None if joules is None else joules / JOULES_PER_KWH


def code_ratio(code: Code, device: Device, *, samples_per_gpu: float, nodes: float) -> tuple[float, float]:
    """Measured over predicted step time of a task's code, and one sigma of its logarithm.

    A device that was not fitted has its architecture's ratio; an architecture that was not, that of all, with the
    spread between architectures added.
    """
    if not code.ratio:
        return 1.0, max(code.residual, UNFITTED)
    name = next((key for key in (device.name, device.architecture) if key in code.ratio), "all")
    logs = np.log([value for key, value in code.ratio.items() if key != "all"])
    spread = float(logs.std()) if name == "all" and len(logs) > 1 else 0.0
    doublings = math.log2(samples_per_gpu / code.samples_per_gpu)
    change = code.per_doubling * doublings + (code.several_nodes if nodes > 1 else 0.0)
    return code.ratio.get(name, 1.0) * math.exp(change), math.hypot(code.residual, spread)


#: One sigma of the step of a code that nothing was fitted to.
UNFITTED = 0.25


def evaluations(evaluation: Evaluation, samples: float) -> float:
    """How many evaluations lie on the way to ``samples``, the one that meets the target included.

    >>> from paleo.specs.task import Evaluation
    >>> evaluations(Evaluation(samples=10, every=100, first=300, source="worked"), 500.0)
    3.0
    """
    first = evaluation.first or evaluation.every
    count = 1.0 + max(0.0, math.ceil((samples - first) / evaluation.every - TOLERANCE))
    return 1.0 if evaluation.beside else count


#: Rounding of samples that are whole numbers of evaluations.
TOLERANCE = 0.01


def rows_of(task: TrainingTask, global_batch: float) -> int:
    """Input rows of the network in a global batch of samples: packed samples share one."""
    return max(1, round(global_batch / task.packed))


def run_of(task: TrainingTask, gpus: int, global_batch: float, **options: Any) -> Run:
    """The run of a task at a global batch; ``options`` replace those of the task."""
    fields = {"software": task.code.software, **task.run, **{k: v for k, v in options.items() if v is not None}}
    sizes = {**task.params, **fields.pop("model", {})}
    return Run(gpus=gpus, global_batch=rows_of(task, global_batch), model=sizes, **fields)


def run_like(task: TrainingTask, run: Run) -> Run:
    """The run with the task's usual settings in every field that it does not state."""
    usual = {"software": task.code.software, **task.run}
    sizes = {**task.params, **usual.pop("model", {}), **run.model}
    left = {name: value for name, value in usual.items() if name not in run.model_fields_set}
    return Run.model_validate({**{name: getattr(run, name) for name in run.model_fields_set}, **left, "model": sizes})


def with_noise_scale(task: TrainingTask, noise_scale: float | None) -> TrainingTask:
    """The task with the gradient-noise scale that was measured [samples] in place of its law's critical batch."""
    if noise_scale is None:
        return task
    if not 1 <= noise_scale <= MOST_COUNT:
        expected = f"must be above zero: samples of the critical batch, from 1 to {MOST_COUNT:.0e}"
        raise SpecError(f"--noise-scale {noise_scale:g} {expected}")
    law = task.law
    smallest = (law.batches or (1.0, 1.0))[0]
    fewest = float(law.samples(smallest)) / (1.0 + smallest / noise_scale)
    known = {name: getattr(law, name) for name in ("residual", "seed_noise")}
    source = f"noise scale {noise_scale:g} as stated, fewest samples of: {law.source}"
    changed = CriticalBatch(samples_min=fewest, critical_batch=noise_scale, source=source, **known)
    return task.model_copy(update={"law": changed})


def time_to_target(
    task: TrainingTask,
    system: System,
    run: Run,
    *,
    global_batch: float,
    runs: float = 1.0,
    calibration: Calibration | None = None,
) -> TargetTime:
    """What the task takes with a run on a system; ``global_batch`` is in samples of the task, ``runs`` how many runs
    are averaged (MLPerf's rule), which narrows the noise of seeds; ``calibration`` as in `predict`."""
    prediction = predict(load_model(task.model), system, run, calibration=calibration)
    forward = forward_seconds(prediction, calibration)
    return timed(task, prediction, forward, global_batch=global_batch, runs=runs)


def timed(
    task: TrainingTask, prediction: Prediction, forward: float, *, global_batch: float, runs: float = 1.0
) -> TargetTime:  # fmt: skip
    """As `time_to_target`, of a step that has been predicted; ``forward`` are the seconds of its forward pass."""
    system, plan = prediction.system, prediction.plan
    task = task.on(system.device.kind)
    ratio, sigma = code_ratio(
        task.code,
        system.device,
        samples_per_gpu=global_batch / plan.gpus,
        nodes=plan.gpus / max(system.devices_per_node, 1),
    )
    samples, sigma_samples = samples_needed(task, global_batch, runs)
    if not math.isfinite(samples):
        raise PlanError(f"{task.name}: a global batch of {global_batch:,.0f} never reaches {task.target}")
    spread = math.log(prediction.interval[1] / prediction.step_time) / NINETY if not task.code.ratio else 0.0
    return TargetTime(
        task=task,
        prediction=prediction,
        forward=forward,
        global_batch=global_batch,
        samples=samples,
        step_time=prediction.step_time * ratio,
        evaluations=evaluations(task.evaluation, samples),
        evaluation_time=evaluation_time(task, forward * ratio, plan.global_batch * task.packed),
        sigma_samples=sigma_samples,
        sigma_step=max(sigma, spread),
        warnings=(*prediction.warnings, *task.law.warnings(global_batch)),
    )


def samples_needed(task: TrainingTask, global_batch: float, runs: float = 1.0) -> tuple[float, float]:
    """Samples to the target at a batch, and one sigma of their logarithm: the law, and what submissions need over it
    where that is known."""
    law, extra = task.law, task.submissions
    samples = float(law.samples(global_batch))
    if extra is None:
        return samples, float(law.sigma(global_batch, runs))
    beyond = float(law.doublings_outside(global_batch)) * law.residual
    return samples * extra.ratio, math.hypot(extra.residual, beyond)


def evaluation_time(task: TrainingTask, forward: float, batch: float) -> float:
    """Seconds of one evaluation: forward passes of ``forward`` seconds over its samples on all GPUs at the batch of
    training, and what is fixed. A batch that the samples do not fill takes its share."""
    evaluation = task.evaluation
    return evaluation.fixed + evaluation.samples / batch * forward * evaluation.work


def forward_seconds(prediction: Prediction, calibration: Calibration | None = None) -> float:
    """Seconds of the forward pass of the same batch on the same GPUs; ``calibration`` as in `predict`."""
    run, plan = prediction.run, prediction.plan
    keeps = {"forward_only": True, "offload": "none", "recompute": "none", "recompute_layers": None}
    keeps |= {"lora": None, "qlora": False, "freeze": ()}
    spared = run.model_copy(update={**keeps, "microbatch": plan.microbatch})
    try:
        return predict(prediction.model, prediction.system, spared, calibration=calibration).step_time
    except PaleoError:
        return (prediction.step_time - prediction.breakdown.optimizer) * FORWARD_SHARE


#: The forward pass's share of a training step where it cannot be predicted alone: a third.
FORWARD_SHARE = 1.0 / 3.0


@dataclass(frozen=True, slots=True)
class TargetScaling:
    """A task over counts of GPUs: the times, the knee beyond which a doubling saves less than a quarter of the time,
    and the largest useful count (None: time still falls at the last)."""

    points: tuple[TargetTime, ...]
    knee: int | None
    largest_useful: int | None

    @property
    def verdict(self) -> str:
        """The fastest count, the knee and the largest useful count in a sentence."""
        best = min(self.points, key=lambda point: point.seconds)
        return "; ".join([f"fastest with {counted(best.prediction.plan.gpus, 'GPU')}", *self.limits])

    @property
    def limits(self) -> list[str]:
        """The knee and the largest useful count in words, where there are any."""
        knee = [] if self.knee is None else [f"beyond {counted(self.knee, 'GPU')} a doubling saves less than a quarter"]
        end = [] if self.largest_useful is None else [f"more than {counted(self.largest_useful, 'GPU')} are slower"]
        return knee + end


#: A doubling of GPUs that saves less than this share of the time is beyond the knee.
KNEE = 0.25


def scaling(points: list[TargetTime]) -> TargetScaling:
    """Knee and largest useful count of times over growing counts of GPUs."""
    ordered = sorted(points, key=lambda point: point.prediction.plan.gpus)
    gpus = [point.prediction.plan.gpus for point in ordered]
    seconds = [point.seconds for point in ordered]
    knee = None
    for (fewer, long), (more, short) in zip(
        zip(gpus, seconds, strict=True), zip(gpus[1:], seconds[1:], strict=True), strict=False
    ):
        doublings = math.log2(more / fewer)
        if knee is None and 1.0 - (short / long) ** (1.0 / doublings) < KNEE:
            knee = fewer
    best = int(np.argmin(seconds))
    return TargetScaling(tuple(ordered), knee, gpus[best] if best < len(gpus) - 1 else None)


def over_counts(
    task: TrainingTask, system: System, counts: Sequence[int], batch: str, **options: Any
) -> list[TargetTime]:
    """The task on each count of GPUs, at a global batch or at the best one (``auto``).

    Raises SpecError where ``batch`` is no number above zero, PlanError where no count can be run.
    """
    stated = None if batch == "auto" else positive_batch(batch)
    task = task.on(system.device.kind)
    points, reason = [], ""
    for gpus in counts:
        tried = batches(task, gpus) if stated is None else [stated]
        try:
            point = best_batch(task, system, gpus, tried, **options)
            searched = stated is None and options.get("strategy") is None
            points.append(best_layout(task, point) if searched else point)
        except PlanError as error:
            reason = str(error)
    if not points:
        raise PlanError(reason)
    return points


def best_layout(task: TrainingTask, point: TargetTime) -> TargetTime:
    """The soonest of a point, of the best plan that a search finds at its batch, and of that plan at half and twice the
    batch, where it fits; layout and batch are planned in turn."""
    from paleo.search.plans import search
    from paleo.search.space import Space
    from paleo.studies.launch import runnable

    first = point.prediction
    run = first.run.model_copy(update={"microbatch": None, "strategy": "dp"})
    try:
        plan = search(first.model, first.system, run, space=runnable(Space(), run.software), top=1).plans[0]
    except PaleoError:
        return point
    if not plan.fits:
        return point
    candidates = [point]
    for batch in known_batches(task, [point.global_batch * factor for factor in (1.0, 2.0, 0.5)]):
        changed = plan.run.model_copy(update={"global_batch": rows_of(task, batch)})
        try:
            candidates.append(time_to_target(task, first.system, changed, global_batch=batch))
        except PlanError:
            continue
    return min((each for each in candidates if each.prediction.memory.fits), key=lambda each: each.seconds)


def positive_batch(text: str) -> float:
    """A global batch from text; SpecError where it is no number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 1 and value == int(value)):
        raise SpecError(f"--batch {text!r} is neither auto nor a whole number of samples of one or more")
    return value


def best_batch(
    task: TrainingTask, system: System, gpus: int, candidates: Sequence[float], **options: Any
) -> TargetTime:
    """The batch, of the candidates, that reaches the target soonest; runs that do not fit in memory are left out.

    Where no strategy is given and data parallelism does not fit, plans that share a model over more and more ranks are
    tried, the first that fits is taken. Raises PlanError, with the reason of the last, where nothing can be run.
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
        if len(tried) > 1 and tried[-1].seconds > RISEN * min(point.seconds for point in tried):
            break
    if not tried:
        raise PlanError(f"{task.name} on {gpus} GPUs: {reason}")
    return min(tried, key=lambda point: point.seconds)


#: A batch that takes this many times as long as the best so far ends the search for larger ones.
RISEN = 1.5
#: Plans in the order in which they are tried where none is given and data parallelism does not fit.
MODEL_PARALLEL = ("zero=1", "zero=3", "tp=2,zero=1,sp", "tp=4,zero=1,sp", "tp=8,zero=1,sp", "tp=4,pp=4,zero=1,sp",
                  "tp=8,pp=8,zero=1,sp", "tp=8,pp=16,zero=1,sp")  # fmt: skip


def _first_fitting(
    task: TrainingTask, system: System, gpus: int, batch: float, options: Mapping[str, Any]
) -> TargetTime:
    def point_of(**more: Any) -> TargetTime:
        run = run_of(task, gpus, batch, **{**options, **more})
        return time_to_target(task, system, run, global_batch=batch)

    point = point_of()
    if point.prediction.memory.fits or options.get("strategy") is not None:
        return point
    for strategy in MODEL_PARALLEL:
        try:
            other = point_of(strategy=strategy, microbatch=1 if "tp=" in strategy else None)
        except PlanError:
            continue
        if other.prediction.memory.fits:
            return other
    return point


def batches(task: TrainingTask, gpus: int) -> list[float]:
    """Global batches worth trying: from one input row a GPU up by doublings, to twice the largest batch of the law; of
    them those that the law was made for, where there are any."""
    rows = gpus * task.packed
    largest = (task.law.batches or (rows, rows * 64))[1]
    count = max(1, math.ceil(math.log2(max(2.0 * largest / rows, 1.0))) + 1)
    return known_batches(task, [rows * 2.0**index for index in range(min(count, 20))])


def known_batches(task: TrainingTask, candidates: Sequence[float]) -> list[float]:
    """Batches in the range of the task's law; all of the candidates where none is."""
    return [batch for batch in candidates if task.law.doublings_outside(batch) == 0] or list(candidates)
