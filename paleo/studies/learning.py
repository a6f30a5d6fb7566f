"""How long a training is, where its length is not stated but follows from what it is to reach: a loss, or a task."""

from __future__ import annotations

from dataclasses import dataclass

from paleo.errors import SpecError
from paleo.learning.base import LOSS_LAWS
from paleo.learning.critical_batch import critical_batch_samples
from paleo.predict import Prediction
from paleo.specs.task import load_task
from paleo.studies.target import samples_needed
from paleo.studies.training import Amount
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
        raise SpecError("--loss, --target, --epochs, --samples and --tokens exclude each other: state one of them")
    amount, warnings = stated, tuple[str, ...]()
    if goal.loss is not None:
        amount, warnings = _for_loss(prediction, goal.loss)
    if goal.target is not None:
        amount, warnings = _for_task(prediction, goal.target)
    if amount is None or goal.noise_scale is None:
        return amount, warnings
    batch = prediction.plan.global_batch
    samples = critical_batch_samples(batch, samples_min=amount.samples, critical_batch=goal.noise_scale)
    words = f"{amount.words}, {float(samples) / amount.samples:.2f} times as many at a batch of {batch:,}"
    return Amount(float(samples), words), warnings


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
    return Amount(tokens / tokens_per_sample, words), law.warnings(size, tokens)


def _for_task(prediction: Prediction, name: str) -> tuple[Amount, tuple[str, ...]]:
    """Samples that bring a task's network to its target at the run's batch."""
    task = load_task(name)
    if task.model != prediction.model.name:
        raise SpecError(f"--target {name}: is a task of model {task.model}, not of {prediction.model.name}")
    batch = prediction.plan.global_batch * task.packed
    samples, _ = samples_needed(task, batch)
    words = f"{counted(round(samples), task.sample)} to {task.target}"
    return Amount(samples / task.packed, words), task.law.warnings(batch)
