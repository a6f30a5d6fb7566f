"""Search for the shortest step of reinforcement learning over layouts of the generation engine and the trainer.

The engine takes the layouts that an inference service would. The trainer takes a few usual strategies. Where none of
them fits in memory, such as for mixtures of experts larger than a node, a bounded search finds the trainer's plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from paleo.errors import PaleoError
from paleo.serving.plans import candidate_shardings
from paleo.serving.reinforcement import (
    ReinforcementStep,
    RolloutGenerator,
    Rollouts,
    TrainerPrediction,
    predict_generator,
    predict_trainer,
    reinforcement_step,
    trainer_run,
)
from paleo.specs.run import Run
from paleo.studies.defaults import AUTO, with_defaults
from paleo.units import DAY, format_duration

if TYPE_CHECKING:
    from paleo.serving.forward_lowering import Sharding
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System

EngineOrTrainer = TypeVar("EngineOrTrainer", RolloutGenerator, TrainerPrediction)


def generator_gpu_counts(gpus: int, least: int) -> list[int]:
    """List GPU counts to try for the generation engine of reinforcement learning; the trainer gets the other GPUs.

    Parameters
    ----------
    gpus : int
        All GPUs.
    least : int
        GPUs of one replica of the engine.

    Returns
    -------
    list of int
        GPU counts, multiples of `least`, in rising order.

    Examples
    --------
    >>> generator_gpu_counts(32, 8)
    [8, 16, 24]
    """
    shares = (gpus * part // whole for part, whole in ((1, 8), (1, 4), (1, 3), (1, 2), (2, 3), (3, 4), (7, 8)))
    counts = {count // least * least for count in shares}
    return sorted(count for count in counts if 0 < count < gpus)


@dataclass(frozen=True)
class ReinforcementQuestion:
    """Input of a reinforcement learning study: network, machine, rollouts, and perhaps layouts to try.

    Attributes
    ----------
    model, system : ModelSpec, System
        Network and machine.
    gpus : int
        Devices of engine and trainer together.
    rollouts : Rollouts
        Sequences of a step.
    algorithm : str
        A key of `EXTRA_PASSES_AND_CRITIC`.
    staleness : int
        Steps that the engine may be ahead; 0 shares all GPUs.
    generator_gpus : int or None
        GPUs of the engine where there are two sets; None tries several numbers.
    layouts : sequence of Sharding or None
        Layouts of a replica of the engine; None takes those of a service.
    strategies : sequence of str or None
        Strategies of the trainer; None takes the usual ones, and a search where none of them fits.
    software : str
        Software profile of the trainer.
    """

    model: ModelSpec
    system: System
    gpus: int
    rollouts: Rollouts
    algorithm: str = "grpo"
    staleness: int = 0
    generator_gpus: int | None = None
    layouts: Sequence[Sharding] | None = None
    strategies: Sequence[str] | None = None
    software: str = "megatron-core"

    def gpu_splits(self, sharding: Sharding) -> Iterator[tuple[int, int]]:
        """Return the splits of the GPUs between generation engine and trainer to try with a layout of the engine.

        Parameters
        ----------
        sharding : Sharding
            Layout of one replica of the engine.

        Returns
        -------
        iterator of tuple of (int, int)
            GPUs of the engine and of the trainer; both are all GPUs if ``staleness`` is 0.
        """
        if self.staleness == 0:
            return iter([(self.gpus, self.gpus)])
        tried = [self.generator_gpus] if self.generator_gpus else generator_gpu_counts(self.gpus, sharding.gpus)
        return ((first, self.gpus - first) for first in tried if first < self.gpus)

    @property
    def usual_strategies(self) -> list[str]:
        """Parallel strategies of the trainer that are tried before a plan search.

        They are ZeRO-3, tensor parallelism within a node and, for mixtures of experts, expert parallelism within one.
        """
        node = min(max(self.system.devices_per_node, 1), self.gpus)
        powers = [2**power for power in range(node.bit_length()) if 2**power <= node]
        experts = [f"ep={ep},zero=1" for ep in powers[1:] if "experts" in self.model.params]
        return [*(f"tp={tp},zero=1,sp" if tp > 1 else "zero=1" for tp in powers), "zero=3", *experts]


def rank_reinforcement_steps(question: ReinforcementQuestion) -> tuple[list[ReinforcementStep], list[str]]:
    """Predict the step of reinforcement learning for every layout of engine and trainer and every split of the GPUs.

    Engine and trainer are predicted once for each of their layouts and GPU counts.

    Parameters
    ----------
    question : ReinforcementQuestion
        Network, machine, rollouts, and layouts if they are given.

    Returns
    -------
    tuple[list[ReinforcementStep], list[str]]
        Steps, those that fit in memory first, then by rising step time; and why layouts were refused.
    """
    model, system, rollouts = question.model, question.system, question.rollouts
    refusals: dict[str, None] = {}

    def attempted(side: Callable[[], EngineOrTrainer], name: str) -> list[EngineOrTrainer]:
        try:
            return [side()]
        except PaleoError as error:
            refusals[f"{name}: {error}"] = None
            return []

    @cache
    def engines(sharding: Sharding, gpus: int) -> list[RolloutGenerator]:
        ahead = question.staleness
        return attempted(
            lambda: predict_generator(model, system, gpus, rollouts, sharding, staleness=ahead),
            f"engine of {sharding.text}",
        )

    def trained(run: Run) -> list[TrainerPrediction]:
        return attempted(lambda: predict_trainer(model, system, run), f"trainer of {run.strategy}")

    @cache
    def trainers(gpus: int, searched: bool) -> list[TrainerPrediction]:
        runs = _searched(question, gpus) if searched else _stated(question, gpus)
        return [each for run in runs for each in trained(run)]

    def composed(searched: bool) -> list[ReinforcementStep]:
        return [
            reinforcement_step(
                system, engine, each, rollouts, algorithm=question.algorithm, staleness=question.staleness
            )
            for sharding in question.layouts or candidate_shardings(model, system, question.gpus)
            for first, second in question.gpu_splits(sharding)
            for engine in engines(sharding, first)
            for each in trainers(second, searched)
        ]

    steps = composed(searched=False)
    if question.strategies is None and not any(step.trainer_fits for step in steps):
        steps += composed(searched=True)
    if not steps and not refusals:  # no count of GPUs was tried
        refusals[f"of {question.gpus} GPUs none is left to train beside a replica of the engine"] = None
    return sorted(steps, key=lambda each: (not each.trainer_fits, each.step_time)), [*refusals]


def _stated(question: ReinforcementQuestion, gpus: int) -> list[Run]:
    tried = question.strategies or question.usual_strategies
    return [trainer_run(gpus, question.rollouts, strategy, question.software) for strategy in tried]


def _searched(question: ReinforcementQuestion, gpus: int) -> list[Run]:
    """Search the best training plan for the trainer on ``gpus`` GPUs, and return its run as a list of one.

    The search also chooses recomputation and microbatch.
    """
    rollouts = question.rollouts
    stated = Run(
        gpus=gpus, strategy=AUTO, global_batch=rollouts.batch, software=question.software,
        model={"seq": rollouts.sequence_tokens},
    )  # fmt: skip
    return [with_defaults(question.model, question.system, stated).run]


@dataclass(frozen=True)
class ReinforcementStudy:
    """Predicted steps of reinforcement learning under several layouts, with duration and cost of the whole run.

    Attributes
    ----------
    question : ReinforcementQuestion
        Network, machine, rollouts, and layouts if they are given.
    steps : tuple of ReinforcementStep
        The shortest first.
    refusals : tuple of str
        Why layouts were left out.
    step_count : int
        Steps of the run.
    usd_per_s : float or None
        Rent of all devices [USD/s].
    """

    question: ReinforcementQuestion
    steps: tuple[ReinforcementStep, ...]
    refusals: tuple[str, ...]
    step_count: int
    usd_per_s: float | None

    @property
    def days(self) -> float | None:
        """Duration of the whole training run with the best layout [days]; None if no layout runs."""
        return self.step_count * self.steps[0].step_time / DAY if self.steps else None

    @property
    def usd(self) -> float | None:
        """Rent of the whole training run with the best layout [USD]; None without a price or a layout."""
        return (
            None
            if self.usd_per_s is None or not self.steps
            else self.step_count * self.steps[0].step_time * self.usd_per_s
        )

    @property
    def verdict(self) -> str:
        """Text that answers the question: step time, its largest part, and duration and cost of all steps."""
        question = self.question
        machine = f"{question.gpus} x {question.system.device.name}"
        if not self.steps:
            reasons = [text for text in self.refusals if text.startswith("trainer")] or [*self.refusals]
            return f"No: no layout of engine and trainer of {question.model.title} runs on {machine}: {reasons[-1]}."
        best = self.steps[0]
        main = max(best.parts, key=best.parts.__getitem__)
        share = best.parts[main] / best.step_time
        split = (
            "" if question.staleness == 0 else f", {best.generator_gpus} GPUs generate and {best.trainer_gpus} train"
        )
        cost = "" if self.usd is None else f", {self.usd:,.0f} USD"
        fits = "" if best.trainer_fits else " The trainer does not fit into memory."
        return (
            f"A step of {question.algorithm.upper()} on {question.model.title} takes "
            f"{format_duration(best.step_time)} on "
            f"{machine}{split}; {100 * share:.0f} % of it {main.replace('_', ' ')}. "
            f"{self.step_count:,} steps take {self.days:.2g} days{cost}.{fits}"
        )


def reinforcement_study(
    question: ReinforcementQuestion, *, steps: int, usd_per_s: float | None = None
) -> ReinforcementStudy:
    """Study reinforcement learning under all layouts; keep those whose trainer fits in memory, or all if none does.

    Parameters
    ----------
    question : ReinforcementQuestion
        Network, machine, rollouts, and layouts if they are given.
    steps : int
        Number of steps of the training.
    usd_per_s : float, optional
        Rent [USD/s].

    Returns
    -------
    ReinforcementStudy
        The steps, the shortest first.
    """
    tried, refusals = rank_reinforcement_steps(question)
    fitting = [each for each in tried if each.trainer_fits] or tried
    return ReinforcementStudy(question, tuple(fitting), tuple(refusals), steps, usd_per_s)
