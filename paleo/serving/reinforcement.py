"""Prediction of one step of reinforcement learning of a language model: rollouts, training and weight transfer.

In a step, answers are generated, their log-probabilities are computed, the policy is trained, and its new weights are
sent to the generation engine. Generation ends with the longest answer, so the batch becomes small at the end.
Generation is simulated with log-normal lengths that are cut at the largest length. Log-probabilities are a forward pass
of the policy (and of the reference policy) over prompts and answers. The training step is that of `paleo.predict`.

On one set of GPUs the parts follow one another. The states of trainer and engine then alternate between GPU and host
memory. On two sets of GPUs the engine generates up to ``staleness`` steps ahead, and the slower set limits the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import PlanError
from paleo.predict import predict
from paleo.serving.engines import ServingEngine, load_engine
from paleo.serving.formats import Formats
from paleo.serving.iteration_times import iteration_tables
from paleo.serving.memory import serving_memory
from paleo.serving.plans import ReplicaLayout
from paleo.serving.requests import Requests, sample_lengths
from paleo.serving.simulation import simulate_requests
from paleo.serving.steady_state import RequestLengths, saturated_steady_state
from paleo.specs.run import Run, replace_fields

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.serving.forward_lowering import Sharding
    from paleo.specs.model import ModelSpec
    from paleo.specs.system import System
    from paleo.step.memory import MemoryFootprint

#: Passes of forward-only networks beside the policy's own, and whether a critic is trained, by algorithm.
EXTRA_PASSES_AND_CRITIC = {
    "grpo": (1, False),
    "rloo": (1, False),
    "dapo": (0, False),
    "ppo": (2, True),
    "dpo": (1, False),
}
#: Share of a link's rate that a transfer of weights reaches, and of the memory that an engine gets beside a trainer.
_WEIGHT_TRANSFER_BANDWIDTH_SHARE, _COLOCATED_ENGINE_MEMORY_SHARE = 0.5, 0.6
#: Coefficient of variation of answers where nothing is stated, and most rollouts that are simulated and drawn.
_DEFAULT_ANSWER_VARIATION, _MAX_SIMULATED_ROLLOUTS, _MAX_SAMPLED_ROLLOUTS = 0.7, 4000, 100_000
#: What no step of reinforcement learning has in it.
UNMODELLED_EFFECTS = (
    "environments, tools and verifiers that answer during generation",
    "resharding of weights beyond their bytes, start of engines",
    "speculative decoding",
    "generation in fewer than the sixteen bits of the trainer",
)
#: Factors within which eight of nine measured steps of NeMo RL lie.
STEP_TIME_INTERVAL_FACTORS = (0.7, 1.5)
#: Sequences of the trainer are padded to a multiple of so many tokens.
_SEQUENCE_PADDING_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Rollouts of a step of reinforcement learning: the sequences that it generates and trains on.

    Attributes
    ----------
    count, batch : int
        Number of rollouts of a step; number of sequences of one optimizer step.
    mean_prompt_tokens, mean_answer_tokens : float
        Mean tokens of prompts and of answers.
    max_answer_tokens : float
        Largest number of tokens of an answer.
    variation : float
        Coefficient of variation of answers before they are cut.
    """

    count: int
    batch: int
    mean_prompt_tokens: float
    mean_answer_tokens: float
    max_answer_tokens: float
    variation: float = _DEFAULT_ANSWER_VARIATION

    @property
    def sequence_tokens(self) -> int:
        """Mean tokens of prompt and answer together, padded to a multiple of 128 so that any layout divides them."""
        tokens = self.mean_prompt_tokens + self.mean_answer_tokens
        return _SEQUENCE_PADDING_TOKENS * max(math.ceil(tokens / _SEQUENCE_PADDING_TOKENS), 1)

    def sampled_answer_lengths(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """Draw answer lengths from a log-normal distribution that is cut at the largest length and keeps the mean.

        Parameters
        ----------
        count : int
            Number of answers.

        Returns
        -------
        ndarray
            Lengths [tokens], shape (count,).
        """
        mean = self.mean_answer_tokens
        for _ in range(8):
            drawn = sample_lengths(mean, self.variation, count, np.random.default_rng(1))
            lengths = np.minimum(drawn, self.max_answer_tokens)
            mean *= self.mean_answer_tokens / max(float(lengths.mean()), 1.0)
            mean = min(mean, 50.0 * self.max_answer_tokens)
        return np.asarray(np.random.default_rng(1).permutation(lengths))


@dataclass(frozen=True, slots=True)
class ReinforcementStep:
    """Predicted step of reinforcement learning: step time with its parts, and the layouts of engine and trainer.

    Attributes
    ----------
    parts : dict
        Times [s] by part: generation, log_probabilities, reward, training, weights (transfer), offload, and idle
        (waiting of the faster of two sets of GPUs).
    step_time : float
        Time of the step [s].
    generator_gpus, trainer_gpus : int
        GPUs of the engine and of the trainer; equal if both share one set.
    layout : str
        Parallel degrees of a replica of the engine.
    strategy : str
        Parallel strategy of the trainer.
    trainer_fits : bool
        True if the trainer fits in memory.
    """

    parts: dict[str, float]
    step_time: float
    generator_gpus: int
    trainer_gpus: int
    layout: str
    strategy: str
    trainer_fits: bool


def generation_engine_layout(
    model: ModelSpec, system: System, sharding: Sharding, gpus: int, engine: ServingEngine, longest: float
) -> ReplicaLayout:
    """Lay out the generation engine of reinforcement learning over a number of GPUs, as equal replicas.

    Weights are in bf16, since they come from the trainer: NeMo RL and verl generate in the trainer's 16 bits by
    default.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    system : System
        Machine: its devices, nodes and links.
    sharding : Sharding
        Parallel degrees of a replica.
    gpus : int
        Number of GPUs.
    engine : ServingEngine
        Profile of the engine.
    longest : float
        Longest sequence [tokens].

    Returns
    -------
    ReplicaLayout
        Layout of one replica, and the number of replicas.

    Raises
    ------
    PlanError
        If no replica fits.
    """
    formats = Formats()
    if sharding.gpus > gpus:
        raise PlanError(f"a replica of {sharding.text} needs {sharding.gpus} GPUs, there are {gpus}")
    prices = iteration_tables(model, system, sharding, formats, engine.kernels)
    limit = engine.batch_limit(system.device)
    memory = serving_memory(prices.lowered, sharding, formats, engine, system.device, limit)
    if memory.refusal(longest):
        raise PlanError(memory.refusal(longest))
    return ReplicaLayout(sharding, formats, engine, gpus // sharding.gpus, prices, memory, limit)


def generation_time(layout: ReplicaLayout, rollouts: Rollouts, *, steady: bool) -> float:
    """Predict the time in which the engine generates all rollouts of a step of reinforcement learning.

    Each replica gets the same number of rollouts, and the step waits for the slowest replica.

    Parameters
    ----------
    layout : ReplicaLayout
        Layout and number of the engine's replicas.
    rollouts : Rollouts
        Number and lengths of the rollouts of a step.
    steady : bool
        True if rollouts of the next step fill the batch, so that the batch does not run empty at the end.

    Returns
    -------
    float
        Time [s].
    """
    batching = replace(layout.batching(), time_per_request=0.0, time_per_token=0.0)
    share = math.ceil(rollouts.count / layout.replicas)
    if steady:
        tokens = rollouts.mean_prompt_tokens, rollouts.mean_answer_tokens
        lengths = RequestLengths(*tokens, output_variation=min(rollouts.variation, 1.0))
        places = min(layout.max_cached_sequences(lengths), 2.0 * share)
        rate = saturated_steady_state(layout.iteration_tables, batching, lengths, places).requests_per_s
        return share / float(rate)
    count = min(share, _MAX_SIMULATED_ROLLOUTS)
    replicas = max(min(layout.replicas, _MAX_SAMPLED_ROLLOUTS // count), 1)
    dealt = rollouts.sampled_answer_lengths(max(count * replicas, 2))[: count * replicas].reshape(replicas, count)
    answers = dealt[dealt.sum(axis=1).argmax()]
    requests = Requests(np.zeros(count), np.full(count, max(rollouts.mean_prompt_tokens, 1.0)), answers)
    capacity = layout.memory.max_cached_tokens(rollouts.mean_prompt_tokens + rollouts.mean_answer_tokens)
    result = simulate_requests(
        layout.iteration_tables, batching, requests, capacity=capacity, reservation=layout.reserved_answer_share
    )
    return result.makespan * share / count


def weight_transfer_time(system: System, parameters: float, gpus: int) -> float:
    """Predict the time in which the trainer's new weights reach the generation engine.

    Every tensor is gathered whole on each rank that sends it to an engine, as in NeMo RL and verl. Therefore all
    weights pass over the link of each rank once. (verl publishes 23.7 s for 235 billion parameters on 64 and 64 GPUs
    with a broadcast in the background, and 58.6 s without.)

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    parameters : float
        Number of parameters of the whole network.
    gpus : int
        Number of devices of trainer and engine.

    Returns
    -------
    float
        Time [s].
    """
    levels, total = system.levels, 2.0 * parameters
    if not levels or gpus == 1:
        return total / system.device.memory.bandwidth
    level = levels[-1] if gpus > system.devices_per_node else levels[0]
    return total / (_WEIGHT_TRANSFER_BANDWIDTH_SHARE * level.link.bandwidth)


def state_swap_time(system: System, trainer: MemoryFootprint, engine_weights: float) -> float:
    """Predict the time to swap the states of trainer and engine between GPU and host memory in a step.

    Weights, gradients and optimizer states of the trainer go to the host before generation and come back after it. The
    engine's weights go to the host while the policy is trained (vLLM's sleep at level 1, NeMo RL's choice), and its KV
    cache is discarded.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    trainer : MemoryFootprint
        Memory of one device of the trainer [byte], by part.
    engine_weights : float
        Weights of the engine on a device [byte].

    Returns
    -------
    float
        Time of both moves, to the host and back [s].
    """
    states = trainer.parameters + trainer.gradients + trainer.optimizer
    return 2.0 * (states + engine_weights) / system.device.host_copy_bandwidth()


@dataclass(frozen=True, slots=True)
class RolloutGenerator:
    """Generation engine of reinforcement learning on its GPUs.

    ``seconds`` is the time in which the engine generates all rollouts of a step [s].
    """

    layout: ReplicaLayout
    gpus: int
    seconds: float


@dataclass(frozen=True, slots=True)
class TrainerPrediction:
    """Predictions of the trainer: one optimizer step of the policy, and a forward pass over the same sequences."""

    step: Prediction
    forward: Prediction


def predict_generator(
    model: ModelSpec, system: System, gpus: int, rollouts: Rollouts, sharding: Sharding, *, staleness: int = 0
) -> RolloutGenerator:
    """Lay out the generation engine over its GPUs, and predict the time in which it generates all rollouts of a step.

    Parameters
    ----------
    model, system : ModelSpec, System
        Network and machine.
    gpus : int
        GPUs of the engine.
    rollouts : Rollouts
        Number and lengths of the rollouts of a step.
    sharding : Sharding
        Parallel degrees of a replica.
    staleness : int
        Number of steps that the engine may be ahead; 0: the engine shares its GPUs with the trainer.

    Returns
    -------
    RolloutGenerator
        Layout of the engine, and its time [s].

    Raises
    ------
    PlanError, SpecError
        If no replica fits.
    """
    engine = load_engine("vllm")
    engine = engine if staleness else engine.model_copy(update={"memory_share": _COLOCATED_ENGINE_MEMORY_SHARE})
    longest = rollouts.mean_prompt_tokens + rollouts.max_answer_tokens
    layout = generation_engine_layout(model, system, sharding, gpus, engine, longest)
    return RolloutGenerator(layout, gpus, generation_time(layout, rollouts, steady=staleness > 1))


def trainer_run(gpus: int, rollouts: Rollouts, strategy: str, software: str) -> Run:
    """Return the run (plan and options) of one optimizer step of the policy, for a prediction.

    Parameters
    ----------
    gpus : int
        GPUs of the trainer.
    rollouts : Rollouts
        Number and lengths of the rollouts of a step.
    strategy, software : str
        Parallel strategy and software profile of the trainer.

    Returns
    -------
    Run
        Run with full recomputation and a microbatch of one sequence.
    """
    return Run(
        gpus=gpus,
        strategy=strategy,
        global_batch=rollouts.batch,
        microbatch=1,
        software=software,
        recompute="full",
        model={"seq": rollouts.sequence_tokens},
    )


def predict_trainer(model: ModelSpec, system: System, run: Run) -> TrainerPrediction:
    """Predict an optimizer step of the policy, and a forward pass under the same parallel plan.

    Parameters
    ----------
    model, system : ModelSpec, System
        Network and machine.
    run : Run
        Run of the optimizer step.

    Returns
    -------
    TrainerPrediction
        Predictions of the optimizer step and of the forward pass.

    Raises
    ------
    PlanError, SpecError
        If the plan does not suit the network.
    """
    forward = replace_fields(run, {"forward_only": True, "recompute": "none"})
    return TrainerPrediction(predict(model, system, run), predict(model, system, forward))


def reinforcement_step(
    system: System,
    engine: RolloutGenerator,
    trainer: TrainerPrediction,
    rollouts: Rollouts,
    *,
    algorithm: str = "grpo",
    staleness: int,
) -> ReinforcementStep:
    """Combine the times of engine and trainer into one step of reinforcement learning.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    engine, trainer : RolloutGenerator, TrainerPrediction
        Predictions of generation engine and trainer, each on its GPUs.
    rollouts : Rollouts
        Sequences that a step generates and trains on.
    algorithm : str
        A key of `EXTRA_PASSES_AND_CRITIC`.
    staleness : int
        Number of steps that the engine may be ahead; 0: both share one set of GPUs, one after the other.

    Returns
    -------
    ReinforcementStep
        Times of the step and its parts [s].
    """
    others, critic = EXTRA_PASSES_AND_CRITIC[algorithm]
    step, forward = trainer.step, trainer.forward.step_time
    steps, gpus = max(rollouts.count / rollouts.batch, 1.0), step.plan.gpus
    parts = {
        "generation": engine.seconds,
        "log_probabilities": steps * forward * (1 + min(others, 1)),
        "reward": steps * forward * (1.0 if critic else 0.0),
        "training": steps * step.step_time * (2.0 if critic else 1.0),
        "weights": weight_transfer_time(system, step.graph.parameters, gpus + (engine.gpus if staleness else 0)),
        "offload": 0.0 if staleness else state_swap_time(system, step.memory, engine.layout.memory.weights),
        "idle": 0.0,
    }
    total = sum(parts.values())
    if staleness:
        trained = parts["log_probabilities"] + parts["reward"] + parts["training"]
        total = max(engine.seconds, trained) + parts["weights"]
        parts["idle"] = abs(engine.seconds - trained)
    layout, fits = engine.layout.sharding.text, step.memory.fits
    return ReinforcementStep(parts, total, engine.gpus, gpus, layout, step.plan.strategy_text, fits)
