"""How long a training is, where its length is not stated but follows from what it is to reach: a loss, or a task."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from paleo.errors import SpecError
from paleo.learning.critical_batch import critical_batch_samples
from paleo.learning.loss_target import LOSS_LAW, SamplesToLoss
from paleo.learning.step_law import best_batch_tokens
from paleo.network.graph import build
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.task import UNEVALUATED, Code, TrainingTask, load_task
from paleo.studies.target import forward_seconds, run_like, samples_needed, timed, with_noise_scale
from paleo.studies.training import Amount, Need
from paleo.units import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paleo.network.graph import Graph
    from paleo.predict import Prediction
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

#: Nats that a batch off the best one costs from which an estimate says so.
PENALTY = 0.01


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
    goals = [name for name in ("loss", "target") if getattr(goal, name) is not None]
    if len(goals) + (stated is not None) > 1:
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
    """Tokens that bring a language model to a loss at the best batch, by the parametric law."""
    law = samples_to_loss(prediction.graph, loss)
    tokens, batch = law.best_tokens, prediction.plan.global_batch * law.tokens_per_sample
    words = f"{counted(round(tokens), 'token')} for a loss of {loss:g} nats ({LOSS_LAW})"
    warnings = law.beyond(tokens)
    nats = float(law.nats(prediction.plan.global_batch))
    if nats > PENALTY:
        best = f"the best is about {float(best_batch_tokens(tokens)):,.2g}"
        cost = f"a global batch of {batch:,.2g} tokens costs about {nats:.2g} nats"
        warnings = (*warnings, f"{cost}, not counted here ({best}); paleo target --loss counts it")
    return Amount(tokens / law.tokens_per_sample, words, sigma=law.residual), warnings


def samples_to_loss(graph: Graph, loss: float) -> SamplesToLoss:
    """The law of a network's samples to a loss; SpecError where there is none for it."""
    if graph.tokens_per_sample is None:
        raise SpecError(f"--loss: samples of model {graph.name} are not counted in tokens; no law of loss holds for it")
    if any(node.type == "moe" for node in graph.nodes):
        raise SpecError(f"--loss: no law of loss is known for mixtures of experts such as {graph.name}; state --tokens")
    return SamplesToLoss.of(loss, float(graph.parameters), float(graph.tokens_per_sample))


def task_of_loss(model: str, loss: float) -> TrainingTask:
    """Training a language model of the catalog, or of a file, to a loss, as a task."""
    spec = load_model(model)
    return TrainingTask(
        name=f"{spec.name} to {loss:g}", title=spec.name, model=model, sample="sequence", dataset="any text",
        dataset_samples=1.0, target=f"a loss of {loss:g} nats a token", law=samples_to_loss(build(spec, batch=1), loss),
        evaluation=UNEVALUATED, code=Code(software=Run().software, source="not fitted"), source=spec.source,
    )  # fmt: skip


def task_named(
    task: str | Path | TrainingTask, loss: float | None = None, noise_scale: float | None = None
) -> TrainingTask:
    """A task of the catalog or of a file, its critical batch that of a measured noise scale where one is stated; with a
    ``loss`` the training of a language model to it. SpecError where both are stated."""
    if loss is None:
        return with_noise_scale(load_task(task) if isinstance(task, str | Path) else task, noise_scale)
    if noise_scale is not None:
        raise SpecError("--loss: its law has a best batch of its own; leave --noise-scale out")
    if isinstance(task, TrainingTask):
        raise SpecError(f"--loss: {task.name} is a task; expected a language model")
    return task_of_loss(str(task), loss)


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


def aimed(
    network: ModelSpec, run: Run, target: str | None, stated: Amount | None, systems: Sequence[System]
) -> tuple[Run, Amount | None]:
    """A run and an amount of training, as stated or, with a target, as its task has them on devices of that kind.

    Raises SpecError if both are stated, if the task is one of another network, or if the systems have devices of
    several kinds, which run the task with different software.
    """
    if target is None:
        return run, stated
    if stated is not None:
        raise SpecError(EXCLUDE)
    task = _task_of(network, target)
    return run_like(task.on(_kind_of_all(systems, target)), run), target_amount(task)


def _kind_of_all(systems: Sequence[System], target: str) -> str:
    """The kind of device that all systems have; SpecError names systems of each kind where there are several."""
    by_kind = {system.device.kind: system.name for system in reversed(systems)}
    if len(by_kind) > 1:
        examples = " and ".join(f"{name} ({kind})" for kind, name in sorted(by_kind.items()))
        raise SpecError(
            f"--target {target}: {examples} run its task with different software, optimizers and formats, and one run "
            "cannot state both; ask for systems of one kind of device at a time"
        )
    (kind,) = by_kind
    return kind


def _task_of(network: ModelSpec, target: str) -> TrainingTask:
    task = load_task(target)
    if task.model != network.name:
        raise SpecError(f"--target {target}: is a task of model {task.model}, not of {network.name}")
    return task


EXCLUDE = "--loss, --target, --epochs, --samples and --tokens exclude each other: state one of them"
