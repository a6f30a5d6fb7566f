"""How long a training is, where its length is not stated but follows from what it is to reach: a loss, or a task."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

from paleo.errors import SpecError
from paleo.learning.base import LOSS_LAWS
from paleo.learning.critical_batch import critical_batch_samples
from paleo.predict import Prediction
from paleo.specs.model import ModelSpec
from paleo.specs.run import Run
from paleo.specs.task import TrainingTask, load_task
from paleo.studies.target import forward_seconds, run_like, samples_needed, timed, with_noise_scale
from paleo.studies.training import Amount, Need
from paleo.units import counted

#: The law that `--loss` goes by.
LOSS_LAW = "chinchilla"


@dataclass(frozen=True, slots=True)
class Goal:
    """What a training is to reach: a ``loss`` in nats a token, or the quality of a ``target`` task; ``noise_scale`` is
    the critical batch in samples, where it was measured. None: not asked for."""

    loss: float | None = None
    target: str | None = None
    noise_scale: float | None = None


def amount_for(prediction: Prediction, goal: Goal, stated: Amount | None) -> tuple[Amount | None, tuple[str, ...]]:
    """The amount of training that reaches the goal, and warnings of its law; the amount stated where there is none.

    Raises SpecError where a loss or a target is asked for beside an amount, cannot be reached, or does not go with the
    network.
    """
    if goal.noise_scale is not None and not goal.noise_scale > 0:
        raise SpecError(f"--noise-scale {goal.noise_scale:g} must be above zero: samples of the critical batch")
    asked = [name for name in ("loss", "target") if getattr(goal, name) is not None]
    if len(asked) + (stated is not None) > 1:
        raise SpecError(EXCLUDE)
    amount, warnings = stated, tuple[str, ...]()
    if goal.loss is not None:
        amount, warnings = _for_loss(prediction, goal.loss)
    if goal.target is not None:
        return _for_task(prediction, goal.target, goal.noise_scale)
    if amount is None or goal.noise_scale is None:
        return amount, warnings
    batch = prediction.plan.global_batch
    samples = critical_batch_samples(batch, samples_min=amount.samples, critical_batch=goal.noise_scale)
    words = f"{amount.words}, {float(samples) / amount.samples:.2f} times as many at a batch of {batch:,}"
    return replace(amount, samples=float(samples), words=words), warnings


def _for_loss(prediction: Prediction, loss: float) -> tuple[Amount, tuple[str, ...]]:
    """Tokens that bring a language model to a loss, by the parametric law."""
    tokens_per_sample, model = prediction.graph.tokens_per_sample, prediction.model
    if tokens_per_sample is None:
        raise SpecError(f"--loss: samples of model {model.name} are not counted in tokens; no law of loss holds for it")
    if any(node.type == "moe" for node in prediction.graph.nodes):
        raise SpecError(f"--loss: no law of loss is known for mixtures of experts such as {model.name}; state --tokens")
    law, size = LOSS_LAWS[LOSS_LAW], float(prediction.graph.parameters)
    tokens = law.tokens(loss, size)
    words = f"{counted(round(tokens), 'token')} for a loss of {loss:g} nats ({LOSS_LAW})"
    sigma = law.sigma(loss, size)
    return Amount(tokens / tokens_per_sample, words, sigma=sigma), law.warnings(size, tokens)


def _for_task(prediction: Prediction, name: str, noise_scale: float | None) -> tuple[Amount, tuple[str, ...]]:
    """Samples that bring a task's network to its target at the run's batch."""
    task = with_noise_scale(_task_of(prediction.model, name), noise_scale)
    batch = prediction.plan.global_batch * task.packed
    samples, _ = samples_needed(task, batch)
    words = f"{counted(round(samples), task.sample)} to {task.target}, evaluations included"
    return Amount(samples / task.packed, words, target_amount(task).needs), task.law.warnings(batch)


def target_amount(task: TrainingTask) -> Amount:
    """Training until a task's target, whatever the batch: samples by its law, the steps of its code, evaluations.

    ``samples`` are those of the smallest batch of the law.
    """
    batch = (task.law.batches or (1.0, 1.0))[0]
    samples, _ = samples_needed(task, batch)
    return Amount(samples / task.packed, f"{task.title}: {task.target}", partial(_need, task), _batches(task))


#: How many global batches of a task are searched at most.
MOST_BATCHES = 6


def _batches(task: TrainingTask) -> tuple[int, ...]:
    """Global batches in the range of the law, in input rows: powers of two, or every other one where there are many."""
    smallest, largest = task.law.batches or (1.0, 1.0)
    powers = range(max(0, math.ceil(math.log2(smallest / task.packed))), int(math.log2(largest / task.packed)) + 1)
    return tuple(2**power for power in powers[:: math.ceil(len(powers) / MOST_BATCHES) or 1])


def _need(task: TrainingTask, prediction: Prediction) -> Need:
    batch = prediction.plan.global_batch * task.packed
    point = timed(task, prediction, forward_seconds(prediction), global_batch=batch)
    return Need(point.samples / task.packed, point.seconds, point.interval)


def aimed(network: ModelSpec, run: Run, target: str | None, stated: Amount | None) -> tuple[Run, Amount | None]:
    """A run and an amount of training, as stated or, with a target, as its task has them.

    Raises SpecError where both are stated, or where the task is one of another network.
    """
    if target is None:
        return run, stated
    if stated is not None:
        raise SpecError(EXCLUDE)
    task = _task_of(network, target)
    return run_like(task, run), target_amount(task)


def _task_of(network: ModelSpec, target: str) -> TrainingTask:
    task = load_task(target)
    if task.model != network.name:
        raise SpecError(f"--target {target}: is a task of model {task.model}, not of {network.name}")
    return task


EXCLUDE = "--loss, --target, --epochs, --samples and --tokens exclude each other: state one of them"
