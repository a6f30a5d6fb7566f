"""Prediction of one step of reinforcement learning.

In a step, answers are generated, their probabilities are computed, the policy is trained, and its new weights are sent
to the engine. Generation ends with the longest answer, so the batch becomes small at the end. It is simulated with
log-normal lengths that are cut at the largest length. Log-probabilities are a forward pass of the policy (and of the
reference policy) over prompts and answers. The training step is that of `paleo.predict`.

On one set of GPUs the parts follow one another, and the states of trainer and engine take turns: each goes to the host
while the other works. On two sets the engine generates up to ``staleness`` steps ahead, and the slower set decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import PaleoError, PlanError
from paleo.predict import predict
from paleo.serving.engines import Engine, load_engine
from paleo.serving.formats import Formats
from paleo.serving.load import Requests, drawn_lengths
from paleo.serving.lowered import Sharding
from paleo.serving.memory import serving_memory
from paleo.serving.phases import phases
from paleo.serving.plans import ReplicaLayout
from paleo.serving.simulation import simulate
from paleo.serving.steady import Lengths, saturated
from paleo.specs.run import Run
from paleo.units import DAY, duration

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.step.memory import Footprint

#: Passes of forward-only networks beside the policy's own, and whether a critic is trained, by algorithm.
ALGORITHMS = {"grpo": (1, False), "rloo": (1, False), "dapo": (0, False), "ppo": (2, True), "dpo": (1, False)}
#: Share of a link's rate that a transfer of weights reaches, and of the memory that an engine gets beside a trainer.
TRANSFER_SHARE, COLOCATED_SHARE = 0.5, 0.6
#: Coefficient of variation of answers where nothing is stated, and most rollouts that are simulated and drawn.
USUAL_VARIATION, MOST_SIMULATED, MOST_DRAWN = 0.7, 4000, 100_000
#: Sequences of the trainer are padded to a multiple of so many tokens.
PADDING = 128


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Sequences that a step generates and trains on.

    Attributes
    ----------
    count, batch : int
        Rollouts of a step; sequences of one optimizer step.
    prompt, answer : float
        Mean tokens.
    longest : float
        Most tokens of an answer.
    variation : float
        Coefficient of variation of answers before they are cut.
    """

    count: int
    batch: int
    prompt: float
    answer: float
    longest: float
    variation: float = USUAL_VARIATION

    @property
    def sequence(self) -> int:
        """Mean tokens of prompt and answer, padded so that any layout divides them."""
        return PADDING * max(math.ceil((self.prompt + self.answer) / PADDING), 1)

    def answers(self, count: int, seed: int = 1) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Draw the lengths of answers; their mean is kept although long ones are cut.

        Parameters
        ----------
        count : int
            Number of answers.
        seed : int, optional
            Seed of the random numbers.

        Returns
        -------
        ndarray
            Tokens, shape (count,).
        """
        random = np.random.default_rng(seed)
        mean = self.answer
        for _ in range(8):
            lengths = np.minimum(drawn_lengths(mean, self.variation, count, np.random.default_rng(seed)), self.longest)
            mean *= self.answer / max(float(lengths.mean()), 1.0)
            mean = min(mean, 50.0 * self.longest)
        return np.asarray(random.permutation(lengths))


@dataclass(frozen=True, slots=True)
class LearningStep:
    """Times of the parts of one step; ``idle`` is the time that the faster of two sets of GPUs waits.

    Attributes
    ----------
    parts : dict
        generation, log_probabilities, reward, training, weights, offload, idle.
    step : float
        Seconds of the step.
    generators, trainers : int
        GPUs of the engine and of the trainer; equal where they are one set.
    layout : str
        Degrees of a replica of the engine.
    strategy : str
        Strategy of the trainer.
    fits : bool
        True if the trainer fits into memory.
    """

    parts: dict[str, float]
    step: float
    generators: int
    trainers: int
    layout: str
    strategy: str
    fits: bool


def engine_replicas(
    model: ModelSpec, system: System, sharding: Sharding, gpus: int, engine: Engine, longest: float
) -> ReplicaLayout:
    """Return the replicas of an engine on some GPUs.

    Parameters
    ----------
    model : ModelSpec
        Model file.
    system : System
        The system.
    sharding : Sharding
        Layout of a replica.
    gpus : int
        Number of GPUs.
    engine : Engine
        The engine.
    longest : float
        Longest sequence [tokens].

    Returns
    -------
    ReplicaLayout
        One replica, and the number of replicas.

    Raises
    ------
    PlanError
        If no replica fits.
    """
    formats = Formats()
    if sharding.gpus > gpus:
        raise PlanError(f"a replica of {sharding.text} needs {sharding.gpus} GPUs, there are {gpus}")
    prices = phases(model, system, sharding, formats, engine.kernels)
    memory = serving_memory(prices.lowered, sharding, formats, engine, system.device)
    if memory.refusal(longest):
        raise PlanError(memory.refusal(longest))
    limit = engine.limit(system.device)
    return ReplicaLayout(sharding, formats, engine, gpus // sharding.gpus, prices, memory, limit)


def generation_time(layout: ReplicaLayout, rollouts: Rollouts, *, steady: bool) -> float:
    """Return the time in which all rollouts of a step are generated [s].

    Replicas get equally many rollouts, and the step waits for the one whose answers are longest together.

    Parameters
    ----------
    layout : ReplicaLayout
        The engine.
    rollouts : Rollouts
        Rollouts of a step.
    steady : bool
        The batch is filled from the next step, so that its end empties nothing.
    """
    batching = replace(layout.batching(), request=0.0, streamed=0.0)
    share = math.ceil(rollouts.count / layout.replicas)
    if steady:
        lengths = Lengths(rollouts.prompt, rollouts.answer, 0.0, min(rollouts.variation, 1.0))
        places = min(layout.places(lengths), 2.0 * share)
        rate = saturated(layout.phases, batching, lengths, places).requests_per_s
        return share / float(rate)
    count = min(share, MOST_SIMULATED)
    replicas = max(min(layout.replicas, MOST_DRAWN // count), 1)
    dealt = rollouts.answers(max(count * replicas, 2))[: count * replicas].reshape(replicas, count)
    answers = dealt[dealt.sum(axis=1).argmax()]
    requests = Requests(np.zeros(count), np.full(count, max(rollouts.prompt, 1.0)), answers)
    batching = replace(
        batching, tokens=float(np.asarray(batching.tokens)), sequences=float(np.asarray(batching.sequences))
    )
    capacity = layout.memory.tokens(rollouts.prompt + rollouts.answer)
    result = simulate(layout.phases, batching, requests, capacity=capacity, reservation=layout.reservation)
    return result.span * share / count


def weights_time(system: System, parameters: float, gpus: int) -> float:
    """Return the time in which new weights reach the engine [s].

    Every tensor is gathered whole on each rank that sends it to an engine, so all weights pass over the link of each
    rank once (as NeMo RL and verl do it; verl states 23.7 s for 235 billion parameters on 64 and 64 GPUs with a
    broadcast in the background, and 58.6 s without).

    Parameters
    ----------
    system : System
        The machine.
    parameters : float
        Parameter elements of the whole network.
    gpus : int
        Devices of trainer and engine.
    """
    levels, total = system.levels, 2.0 * parameters
    if not levels or gpus == 1:
        return total / system.device.memory.bandwidth
    level = levels[-1] if gpus > system.devices_per_node else levels[0]
    return total / (TRANSFER_SHARE * level.link.bandwidth)


def offload_time(system: System, trainer: Footprint, engine_weights: float) -> float:
    """Return the time in which trainer and engine take turns in one memory [s].

    Weights, gradients and optimizer states of the trainer go to the host before generation and come back after it. The
    engine's weights go to the host while the policy is trained (vLLM's sleep at level 1, NeMo RL's choice), and its
    cache is discarded.

    Parameters
    ----------
    system : System
        The machine.
    trainer : Footprint
        Memory of a device of the trainer.
    engine_weights : float
        Weights of the engine on a device [bytes].
    """
    states = trainer.parameters + trainer.gradients + trainer.optimizer
    return 2.0 * (states + engine_weights) / system.device.copy_rate()


def training_step(
    model: ModelSpec, system: System, gpus: int, rollouts: Rollouts, strategy: str, software: str, *, forward: bool
) -> Prediction:
    """Predict one optimizer step, or a forward pass.

    Parameters
    ----------
    model : ModelSpec
        Model file.
    system : System
        The system.
    gpus : int
        Number of GPUs.
    rollouts : Rollouts
        Sequences of a step.
    strategy : str
        Strategy of the trainer.
    software : str
        Software profile of the trainer.
    forward : bool
        Predict a forward pass.

    Returns
    -------
    Prediction
        The prediction.
    """
    run = Run(
        gpus=gpus,
        strategy=strategy,
        global_batch=rollouts.batch,
        microbatch=1,
        software=software,
        forward_only=forward,
        recompute="none" if forward else "full",
        model={"seq": rollouts.sequence},
    )
    return predict(model, system, run)


def learning_step(
    model: ModelSpec,
    system: System,
    gpus: int,
    rollouts: Rollouts,
    *,
    algorithm: str = "grpo",
    sharding: Sharding,
    strategy: str,
    staleness: int = 0,
    generators: int | None = None,
    software: str = "megatron-core",
    engine: Engine | None = None,
) -> LearningStep:
    """Predict one step of reinforcement learning.

    Parameters
    ----------
    model, system, gpus
        Network, machine, total number of devices.
    rollouts : Rollouts
        Sequences that a step generates and trains on.
    algorithm : str
        A key of ``ALGORITHMS``.
    sharding : Sharding
        Division of a replica of the engine.
    strategy : str
        Degrees of the trainer.
    staleness : int
        Steps that the engine may be ahead; 0: both on one set of GPUs, one after the other.
    generators : int, optional
        GPUs of the engine where there are two sets.
    software, engine
        Profile of the trainer; the engine, vLLM by default.

    Raises
    ------
    PlanError, SpecError
        The engine or the trainer cannot be laid out so.
    """
    profile = engine or load_engine("vllm")
    colocated = staleness == 0
    first = gpus if colocated else int(generators or gpus // 2)
    second = gpus if colocated else gpus - first
    if second < 1 or first < 1:
        raise PlanError(f"{first} GPUs generate and {second} train: each needs one at least")
    profile = profile.model_copy(update={"memory_share": COLOCATED_SHARE}) if colocated else profile
    layout = engine_replicas(model, system, sharding, first, profile, rollouts.prompt + rollouts.longest)
    generation = generation_time(layout, rollouts, steady=staleness > 1)
    others, critic = ALGORITHMS[algorithm]
    step = training_step(model, system, second, rollouts, strategy, software, forward=False)
    forward = training_step(model, system, second, rollouts, strategy, software, forward=True)
    steps = max(rollouts.count / rollouts.batch, 1.0)
    parts = {
        "generation": generation,
        "log_probabilities": steps * forward.step_time * (1 + min(others, 1)),
        "reward": steps * forward.step_time * (1.0 if critic else 0.0),
        "training": steps * step.step_time * (2.0 if critic else 1.0),
        "weights": weights_time(system, layout.phases.lowered.parameters * sharding.tp, gpus),
        "offload": offload_time(system, step.memory, layout.memory.weights) if colocated else 0.0,
        "idle": 0.0,
    }
    trained = parts["log_probabilities"] + parts["reward"] + parts["training"]
    if colocated:
        total = sum(parts.values())
    else:
        total = max(generation, trained) + parts["weights"]
        parts["idle"] = abs(generation - trained)
    return LearningStep(parts, total, first, second, sharding.text, step.plan.strategy, step.memory.fits)


def splits(gpus: int, least: int) -> list[int]:
    """Return the numbers of GPUs for the engine that are tried; the trainer gets the others.

    Parameters
    ----------
    gpus : int
        All GPUs.
    least : int
        GPUs of one replica.

    Returns
    -------
    list of int
        Numbers, rising.

    Examples
    --------
    >>> splits(32, 8)
    [8, 16, 24]
    """
    shares = (gpus * part // whole for part, whole in ((1, 8), (1, 4), (1, 3), (1, 2), (2, 3), (3, 4), (7, 8)))
    counts = {count // least * least for count in shares}
    return sorted(count for count in counts if 0 < count < gpus)


def best_step(
    model: ModelSpec, system: System, gpus: int, rollouts: Rollouts, *, layouts: list[Sharding], strategies: list[str],
    staleness: int = 0, algorithm: str = "grpo", software: str = "megatron-core", generators: int | None = None,
) -> tuple[list[LearningStep], list[str]]:  # fmt: skip
    """Predict the steps of all layouts of engine and trainer, on all splits of the GPUs.

    Parameters
    ----------
    model : ModelSpec
        Model file.
    system : System
        The system.
    gpus : int
        All GPUs.
    rollouts : Rollouts
        Sequences of a step.
    layouts : list of Sharding
        Layouts of a replica of the engine.
    strategies : list of str
        Strategies of the trainer.
    staleness : int, optional
        Steps that the engine may be ahead; 0 shares all GPUs.
    algorithm : str, optional
        Algorithm of reinforcement learning.
    software : str, optional
        Software profile of the trainer.
    generators : int, optional
        GPUs of the engine; by default several numbers are tried.

    Returns
    -------
    tuple[list[LearningStep], list[str]]
        Steps, the shortest first, and why layouts were refused.
    """
    steps: list[LearningStep] = []
    refusals: list[str] = []
    for sharding in layouts:
        counts = [None] if staleness == 0 else [generators] if generators else splits(gpus, sharding.gpus)
        for strategy in strategies:
            for count in counts:
                try:
                    steps.append(
                        learning_step(
                            model, system, gpus, rollouts, algorithm=algorithm, sharding=sharding, strategy=strategy,
                            staleness=staleness, generators=count, software=software,
                        )
                    )  # fmt: skip
                except PaleoError as error:
                    refusals.append(f"{sharding.text}, {strategy}: {error}")
    steps.sort(key=lambda each: (not each.fits, each.step))
    return steps, refusals


#: What no step of reinforcement learning has in it.
UNMODELLED = (
    "environments, tools and verifiers that answer during generation",
    "resharding of weights beyond their bytes, start of engines",
    "speculative decoding",
)
#: Factors within which eight of nine measured steps of NeMo RL lie.
INTERVAL = (0.7, 1.5)


@dataclass(frozen=True)
class LearningStudy:
    """Steps of reinforcement learning under several layouts, with the question that they answer.

    Attributes
    ----------
    model, system, gpus, algorithm, rollouts, staleness
        The question.
    steps : tuple of LearningStep
        The shortest first.
    refusals : tuple of str
        Why layouts were left out.
    count : int
        Steps of the run.
    usd_per_s : float or None
        Rent of all devices.
    """

    model: ModelSpec
    system: System
    gpus: int
    algorithm: str
    rollouts: Rollouts
    staleness: int
    steps: tuple[LearningStep, ...]
    refusals: tuple[str, ...]
    count: int
    usd_per_s: float | None

    @property
    def days(self) -> float | None:
        """Duration of the run in days."""
        return self.count * self.steps[0].step / DAY if self.steps else None

    @property
    def usd(self) -> float | None:
        """Rent of the run in USD."""
        return None if self.usd_per_s is None or not self.steps else self.count * self.steps[0].step * self.usd_per_s

    @property
    def verdict(self) -> str:
        """Answer in one sentence."""
        machine = f"{self.gpus} x {self.system.device.name}"
        if not self.steps:
            reasons = "; ".join(dict.fromkeys(self.refusals[:2]))
            return f"No: no layout of engine and trainer of {self.model.title} runs on {machine}: {reasons}."
        best = self.steps[0]
        main = max(best.parts, key=best.parts.__getitem__)
        share = best.parts[main] / best.step
        split = "" if self.staleness == 0 else f", {best.generators} GPUs generate and {best.trainers} train"
        cost = "" if self.usd is None else f", {self.usd:,.0f} USD"
        fits = "" if best.fits else " The trainer does not fit into memory."
        return (
            f"A step of {self.algorithm.upper()} on {self.model.title} takes {duration(best.step)} on {machine}{split};"
            f" {share:.0%} of it {main.replace('_', ' ')}. {self.count:,} steps take {self.days:.2g} days{cost}.{fits}"
        )


def learning_study(
    model: ModelSpec, system: System, gpus: int, rollouts: Rollouts, *, algorithm: str, staleness: int,
    generators: int | None, layouts: list[Sharding] | None, strategies: list[str] | None, software: str, steps: int,
    usd_per_s: float | None,
) -> LearningStudy:  # fmt: skip
    """Predict the steps of given layouts, or of a few usual ones.

    Parameters
    ----------
    model : ModelSpec
        Model file.
    system : System
        The system.
    gpus : int
        All GPUs.
    rollouts : Rollouts
        Sequences of a step.
    algorithm : str
        Algorithm of reinforcement learning.
    staleness : int
        Steps that the engine may be ahead.
    generators : int, optional
        GPUs of the engine.
    layouts : list of Sharding, optional
        Layouts of a replica of the engine.
    strategies : list of str, optional
        Strategies of the trainer.
    software : str
        Software profile of the trainer.
    steps : int
        Number of steps of the training.
    usd_per_s : float, optional
        Rent [USD/s].

    Returns
    -------
    LearningStudy
        The steps.
    """
    node = min(max(system.devices_per_node, 1), gpus)
    powers = [2**power for power in range(node.bit_length()) if 2**power <= node]
    mixture = "experts" in model.params
    usual = [*(f"tp={tp},zero=1,sp" if tp > 1 else "zero=1" for tp in powers), "zero=3"]
    usual += [f"ep={ep},zero=1" for ep in powers if mixture and ep > 1]
    tried, refusals = best_step(
        model, system, gpus, rollouts, layouts=layouts or [Sharding(tp) for tp in powers],
        strategies=strategies or usual, staleness=staleness, algorithm=algorithm, software=software,
        generators=generators,
    )  # fmt: skip
    fitting = [each for each in tried if each.fits] or tried
    return LearningStudy(
        model, system, gpus, algorithm, rollouts, staleness, tuple(fitting), tuple(refusals), steps, usd_per_s
    )
