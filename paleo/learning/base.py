"""Base classes and registries of laws of learning: samples to a target, and scaling laws of the loss.

A samples law predicts how many training samples a target takes at a global batch; in the simplest case the number is
the same at every batch. A loss law predicts the loss of a language model, and how many tokens a loss takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from paleo.errors import SpecError
from paleo.registry import Registry
from paleo.units import parse_quantity

Array = npt.NDArray[np.float64]
Numbers = float | Array


def _count(value: object) -> float:
    number = parse_quantity(value, "count")
    if number <= 0:
        raise SpecError(f"{value!r} must be above zero")
    return number


#: A number of samples, sequences or tokens: ``44.7M`` or 44700000.
PositiveQuantity = Annotated[float, BeforeValidator(_count)]
RelativeError = Annotated[float, Field(ge=0, lt=10)]


class LearningLaw(BaseModel):
    """Base class of all laws of learning; a task file gives the values of the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    source: str


class SamplesLaw(LearningLaw):
    """Law of the number of training samples that reach a target quality, by global batch size.

    ``residual`` is the rms relative error on the points of the law, each left out in turn where possible.
    ``seed_noise`` is the relative standard deviation of one run between seeds. ``batches`` are the smallest and the
    largest batch that the law was fitted to (None: any batch).
    """

    residual: RelativeError = 0.0
    seed_noise: RelativeError = 0.0
    batches: tuple[PositiveQuantity, PositiveQuantity] | None = None

    def samples(self, global_batch: Numbers) -> Array:
        """Return the number of training samples that reach the target at a global batch.

        Parameters
        ----------
        global_batch : float or ndarray
            Samples of an optimizer step.

        Returns
        -------
        ndarray
            Samples, of the shape of ``global_batch``.
        """
        raise NotImplementedError

    def doublings_outside_range(self, global_batch: Numbers) -> Array:
        """Return by how many doublings a batch lies outside the range to which the law was fitted.

        Parameters
        ----------
        global_batch : float or ndarray
            Samples of an optimizer step.

        Returns
        -------
        ndarray
            Doublings above the largest or below the smallest fitted batch; 0 inside.
        """
        batch = np.asarray(global_batch, dtype=np.float64)
        if self.batches is None:
            return np.zeros_like(batch)
        low, high = self.batches
        return np.asarray(np.maximum(0.0, np.maximum(np.log2(batch / high), np.log2(low / batch))))

    def log_standard_deviation(self, global_batch: Numbers, runs: float = 1.0) -> Array:
        """Return the standard deviation of log(samples to target), for the mean of several runs.

        Parameters
        ----------
        global_batch : float or ndarray
            Samples of an optimizer step.
        runs : float
            Number of runs that are averaged, which narrows the noise between seeds.

        Returns
        -------
        ndarray
            Standard deviation [-]; each doubling outside the fitted range adds the residual once more.
        """
        error = self.residual * (1.0 + self.doublings_outside_range(global_batch))
        return np.asarray(np.sqrt(error**2 + self.seed_noise**2 / runs))

    def warnings(self, global_batch: float) -> tuple[str, ...]:
        """Return warnings if a batch lies outside the fitted range, or if the law fits its data badly.

        Parameters
        ----------
        global_batch : float
            Samples of an optimizer step.

        Returns
        -------
        tuple of str
            Sentences without a full stop.
        """
        sentences: list[str] = []
        if self.batches is not None and float(self.doublings_outside_range(global_batch)) > 0:
            low, high = self.batches
            beyond = f"outside of the range of the law ({low:,.0f} to {high:,.0f})"
            sentences.append(f"global batch {global_batch:,.0f} lies {beyond}")
        if self.seed_noise > _WEAK_LAW_ERROR or self.residual > _WEAK_LAW_ERROR:
            seeds = f"runs differ by {self.seed_noise:.0%} between seeds, and " if self.seed_noise else ""
            off = f"its samples were {self.residual:.0%} off the points that it was fitted to"
            sentences.append(f"the law of this task is weak: {seeds}{off}")
        return tuple(sentences)


#: Seed noise or residual above which a law is called weak.
_WEAK_LAW_ERROR = 0.08


SAMPLES_LAWS: Registry[type[SamplesLaw]] = Registry("law of samples", "paleo.learning")


def parse_law(value: object) -> SamplesLaw:
    """Build the law of a task file that gives the samples needed to reach the target at each batch size.

    Parameters
    ----------
    value : object
        Mapping from the name of a law to its fields, such as ``{reference_points: {…}}``, or a law, which is returned
        unchanged.

    Returns
    -------
    SamplesLaw
        Law with these fields.

    Raises
    ------
    SpecError
        If the value is no such mapping, or the name is not registered.
    """
    if isinstance(value, SamplesLaw):
        return value
    if not (isinstance(value, dict) and len(value) == 1):
        raise SpecError(f"law: expected one of {', '.join(SAMPLES_LAWS)} with its fields, not {value!r:.80}")
    (name, fields), *_ = value.items()
    kind: Any = SAMPLES_LAWS[str(name)]
    return kind.model_validate(fields)  # type: ignore[no-any-return]


@SAMPLES_LAWS.register("constant")
class ConstantSamplesLaw(SamplesLaw):
    """Samples law with the same number of samples at every batch, such as fixed epochs or tokens.

    >>> ConstantSamplesLaw(fixed=1000, source="example").samples(np.array([8, 64])).tolist()
    [1000.0, 1000.0]
    """

    fixed: PositiveQuantity

    def samples(self, global_batch: Numbers) -> Array:
        """Return the number of training samples that reach the target, the same at every batch.

        Parameters
        ----------
        global_batch : array-like
            Samples of a step over all ranks.

        Returns
        -------
        ndarray
            Samples, of the shape of ``global_batch``.
        """
        return np.full_like(np.asarray(global_batch, dtype=np.float64), self.fixed)


# Loss of a language model by parameters, tokens, batch and learning rate; samples to a loss; accuracy by staleness

Exponent = Annotated[float, Field(gt=0, lt=2)]


class ParametricLossLaw(LearningLaw):
    """Parametric scaling law of the loss: L(N, D) = irreducible + a / N^alpha + b / D^beta [nats per token].

    Reference: Hoffmann et al., Training compute-optimal large language models, 2022, eq. 2.
    """

    irreducible_loss: Annotated[float, Field(ge=0)]
    a: Annotated[float, Field(gt=0)]
    alpha: Exponent
    b: Annotated[float, Field(gt=0)]
    beta: Exponent
    fitted_parameter_range: tuple[PositiveQuantity, PositiveQuantity]
    fitted_flops_range: tuple[PositiveQuantity, PositiveQuantity]
    residual: float

    def loss(self, parameters: Numbers, tokens: Numbers) -> Array:
        """Predict the final training loss.

        Parameters
        ----------
        parameters : array-like
            Parameters of the network.
        tokens : array-like
            Tokens of training.

        Returns
        -------
        ndarray
            Loss [nats per token]; arguments broadcast.
        """
        size, data = np.asarray(parameters, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
        return np.asarray(self.irreducible_loss + self.a / size**self.alpha + self.b / data**self.beta)

    def tokens_to_loss(self, loss: float, parameters: float) -> float:
        """Return the number of training tokens that reach a loss.

        Parameters
        ----------
        loss : float
            Target loss [nats per token].
        parameters : float
            Parameters of the network.

        Returns
        -------
        float
            Number of training tokens.

        Raises
        ------
        SpecError
            If no number of tokens reaches the loss.
        """
        reducible = loss - self.irreducible_loss - self.a / parameters**self.alpha
        if reducible <= 0:
            lowest = self.irreducible_loss + self.a / parameters**self.alpha
            raise SpecError(
                f"loss: {loss:g} is below {lowest:.3f}, which this law lets {parameters:,.0f} parameters reach with "
                "endless data; expected a higher loss or a larger network"
            )
        return float((self.b / reducible) ** (1.0 / self.beta))

    def log_standard_deviation(self, loss: float, parameters: float) -> float:
        # error of the loss over its slope in ln D, which is small near the lowest loss that a network size can reach
        """Return the standard deviation of log(training tokens to a loss), from the residual of the law.

        Parameters
        ----------
        loss : float
            Target loss [nats per token].
        parameters : float
            Parameters of the network.

        Returns
        -------
        float
            Standard deviation of log(tokens) [-].
        """
        slope = self.beta * self.b / self.tokens_to_loss(loss, parameters) ** self.beta
        return float(self.residual * loss / slope)

    def warnings(self, parameters: float, tokens: float) -> tuple[str, ...]:
        """Return warnings if a training run lies outside the range to which the law was fitted.

        Parameters
        ----------
        parameters : float
            Parameters of the network.
        tokens : float
            Tokens of training.

        Returns
        -------
        tuple of str
            Sentences without a full stop.
        """
        sentences = []
        for name, value, (low, high) in (
            ("parameters", parameters, self.fitted_parameter_range),
            ("training FLOP", 6.0 * parameters * tokens, self.fitted_flops_range),
        ):
            if not low <= value <= high:
                sentences.append(f"{value:.3g} {name} are outside the range of the law ({low:.3g} to {high:.3g})")
        return tuple(sentences)


LOSS_LAWS: Registry[ParametricLossLaw] = Registry("law of loss", "paleo.learning")
CHINCHILLA = ParametricLossLaw(
    irreducible_loss=1.8172, a=482.01, alpha=0.3478, b=2085.43, beta=0.3658,
    fitted_parameter_range=("44M", "16.2G"), fitted_flops_range=("1390P", "12990E"), residual=0.009,
    source="Besiroglu et al., Chinchilla scaling: a replication attempt, arXiv:2404.10102, table 1 (best fit)",
)  # fmt: skip
LOSS_LAWS.register("chinchilla")(CHINCHILLA)
_CHINCHILLA_AS_PRINTED = ParametricLossLaw(
    irreducible_loss=1.69, a=406.4, alpha=0.34, b=410.7, beta=0.28,
    fitted_parameter_range=CHINCHILLA.fitted_parameter_range, fitted_flops_range=CHINCHILLA.fitted_flops_range,
    residual=0.021, source="Hoffmann et al. 2022, eq. 10, as printed; superseded by the corrected constants",
)  # fmt: skip
LOSS_LAWS.register("chinchilla-2022")(_CHINCHILLA_AS_PRINTED)


def best_batch_tokens(tokens: Numbers) -> Array:
    """Return the global batch that minimises the loss of a run with a fixed token budget D, in tokens: 0.58 D^0.571.

    Parameters
    ----------
    tokens : float or ndarray
        Training tokens D.

    Returns
    -------
    ndarray
        Tokens of the best batch.

    References
    ----------
    Li et al., Step Law, arXiv:2503.04715.

    >>> round(float(best_batch_tokens(20e9)))
    441892
    """
    return np.asarray(0.58 * np.asarray(tokens, dtype=np.float64) ** 0.571)


def best_learning_rate(parameters: Numbers, tokens: Numbers) -> Array:
    """Return the peak learning rate of AdamW that minimises the loss: 1.79 N^-0.713 D^0.307.

    Parameters
    ----------
    parameters : float or ndarray
        Parameters N without embeddings.
    tokens : float or ndarray
        Training tokens D; broadcasts with ``parameters``.

    Returns
    -------
    ndarray
        Peak learning rate.

    References
    ----------
    Li et al., Step Law, arXiv:2503.04715.

    >>> round(float(best_learning_rate(1.0737e9, 20e9)), 6)
    0.000947
    """
    size, data = np.asarray(parameters, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    return np.asarray(1.79 * size**-0.713 * data**0.307)


class PenalisedLossLaw(ParametricLossLaw):
    """Parametric loss law with penalties for batches and learning rates that differ from the best ones [nats].

    The penalty is quadratic in the doublings x of the batch and y of the learning rate from their best values:
    ``batch_penalty`` x^2 + ``batch_rate_coupling`` x y + ``low_rate_penalty`` min(y, 0)^2 + ``high_rate_penalty``
    max(y, 0)^2. The coupling says that a larger batch tolerates a higher rate. ``fitted_rate_doublings`` are the
    doublings between which the rate was fitted; runs with higher rates diverge.
    """

    batch_penalty: float
    batch_rate_coupling: float
    low_rate_penalty: float
    high_rate_penalty: float
    fitted_rate_doublings: tuple[float, float]

    def loss_penalty(
        self, parameters: Numbers, tokens: Numbers, batch_tokens: Numbers, learning_rate: Numbers | None = None
    ) -> Array:
        """Return the increase of the loss by a batch and learning rate that differ from the best ones.

        Parameters
        ----------
        parameters, tokens, batch_tokens : float or ndarray
            Parameters of the network, training tokens, and tokens of the global batch; they broadcast.
        learning_rate : float or ndarray, optional
            Peak learning rate; the best one by default.

        Returns
        -------
        ndarray
            Penalty [nats per token].
        """
        x = np.log2(np.asarray(batch_tokens) / best_batch_tokens(tokens))
        y = np.zeros_like(x)
        if learning_rate is not None:
            y = self.log2_learning_rate_ratio(parameters, tokens, learning_rate)
        off = self.low_rate_penalty * np.minimum(y, 0.0) ** 2 + self.high_rate_penalty * np.maximum(y, 0.0) ** 2
        return np.asarray(self.batch_penalty * x**2 + self.batch_rate_coupling * x * y + off)

    def log2_learning_rate_ratio(self, parameters: Numbers, tokens: Numbers, learning_rate: Numbers) -> Array:
        """Return the base-2 logarithm of a learning rate over the best learning rate.

        Parameters
        ----------
        parameters, tokens, learning_rate : float or ndarray
            Parameters of the network, training tokens, and peak learning rate; they broadcast.

        Returns
        -------
        ndarray
            Doublings; negative below the best rate.
        """
        return np.asarray(np.log2(np.asarray(learning_rate) / best_learning_rate(parameters, tokens)))


STEP_LAW = PenalisedLossLaw(
    irreducible_loss=1.6767, a=404.1, alpha=0.348, b=1480.6, beta=0.366,
    batch_penalty=0.0098, batch_rate_coupling=-0.0064, low_rate_penalty=0.0054, high_rate_penalty=0.0184,
    fitted_rate_doublings=(-3.0, 2.0), fitted_parameter_range=("214M", "1.08G"), fitted_flops_range=("5.1E", "129E"),
    residual=0.0052,
    source=(
        "fitted to 1,016 runs of Li et al., arXiv:2503.04715 (their own data; parameters without embeddings), "
        "exponents as Besiroglu et al. 2024; beyond the median compute of its fit it errs by 0.8 %"
    ),
)  # fmt: skip
LOSS_LAWS.register("step-law")(STEP_LAW)


#: Name of the loss law that `--loss` uses.
DEFAULT_LOSS_LAW = "chinchilla"
#: Smallest and largest batch [tokens] of the runs of Step Law to which the batch penalty was fitted.
_FITTED_BATCHES = (33e3, 4e6)


@SAMPLES_LAWS.register("loss")
class SamplesToLoss(SamplesLaw):
    """Samples law of a language model that is trained to a loss: S(B) = D / ``tokens_per_sample``.

    The tokens D solve L(N, D) = ``loss`` − k (log₂ B / B_best)², and are infinite if no amount of data compensates for
    the batch. L is the law named ``by``, for N ``parameters``. The constants are k = 0.0098 nats and B_best = 0.58
    D^0.571 tokens for the D of the best batch (Li et al., Step Law, arXiv:2503.04715). With a fixed schedule, batches
    below the best one cost samples as well. ``residual`` is that of L over its slope in ln D.
    """

    loss: float
    parameters: PositiveQuantity
    tokens_per_sample: PositiveQuantity
    by: str = DEFAULT_LOSS_LAW

    @classmethod
    def for_network(cls, loss: float, parameters: float, tokens_per_sample: float) -> SamplesToLoss:
        """Build the law for a network and a target loss.

        Parameters
        ----------
        loss : float
            Target loss [nats per token].
        parameters : float
            Parameters of the network.
        tokens_per_sample : float
            Sequence length [tokens].

        Returns
        -------
        SamplesToLoss
            Law based on the loss law `DEFAULT_LOSS_LAW`.

        Raises
        ------
        SpecError
            If no number of tokens reaches the loss.
        """
        law = LOSS_LAWS[DEFAULT_LOSS_LAW]
        low, high = (tokens / tokens_per_sample for tokens in _FITTED_BATCHES)
        return cls(
            loss=loss, parameters=parameters, tokens_per_sample=tokens_per_sample, batches=(max(low, 1.0), high),
            residual=law.log_standard_deviation(loss, parameters),
            source=f"{DEFAULT_LOSS_LAW}: {law.source}; batches: {STEP_LAW.batch_penalty:g} nats times the square of "
            "the doublings from the best one, as fitted to the runs of Li et al., arXiv:2503.04715",
        )  # fmt: skip

    @property
    def tokens_at_best_batch(self) -> float:
        """Training tokens to the target loss at the batch size that needs the fewest; SpecError if none reach it."""
        return LOSS_LAWS[self.by].tokens_to_loss(self.loss, self.parameters)

    def _batch_penalty_nats(self, global_batch: Numbers) -> Array:
        """Return the increase of the loss by a global batch that differs from the best batch.

        Parameters
        ----------
        global_batch : float or ndarray
            Sequences of an optimizer step.

        Returns
        -------
        ndarray
            Penalty [nats per token].
        """
        batch = np.asarray(global_batch, dtype=np.float64) * self.tokens_per_sample
        return STEP_LAW.loss_penalty(self.parameters, self.tokens_at_best_batch, batch)

    def samples(self, global_batch: Numbers) -> Array:
        """Return the number of training samples that reach the target loss at a global batch.

        Parameters
        ----------
        global_batch : array-like
            Samples of a step over all ranks.

        Returns
        -------
        ndarray
            Samples, of the shape of ``global_batch``; infinite if the loss cannot be reached.
        """
        losses = self.loss - self._batch_penalty_nats(global_batch)
        tokens = np.array([self._tokens(loss) for loss in losses.ravel().tolist()])
        return np.asarray(tokens.reshape(losses.shape) / self.tokens_per_sample)

    def _tokens(self, loss: float) -> float:
        try:
            return LOSS_LAWS[self.by].tokens_to_loss(loss, self.parameters)
        except SpecError:
            return math.inf

    def token_range_warnings(self, tokens: float) -> tuple[str, ...]:
        """Return warnings if a training run lies outside the range of the loss law.

        Parameters
        ----------
        tokens : float
            Training tokens.

        Returns
        -------
        tuple of str
            Sentences without a full stop.
        """
        return LOSS_LAWS[self.by].warnings(self.parameters, tokens)

    def warnings(self, global_batch: float) -> tuple[str, ...]:
        """Return warnings if a batch or its training tokens lie outside the range of the law.

        Parameters
        ----------
        global_batch : float
            Samples of a step over all ranks.

        Returns
        -------
        tuple of str
            Sentences without a full stop.

        Raises
        ------
        SpecError
            If a run with this batch never reaches the loss.
        """
        tokens = float(self.samples(global_batch)) * self.tokens_per_sample
        if not np.isfinite(tokens):
            raise SpecError(f"a global batch of {global_batch:,.0f} never reaches a loss of {self.loss:g}")
        return (*super().warnings(global_batch), *self.token_range_warnings(tokens))


class StalenessAccuracyLaw(LearningLaw):
    """Law of the final accuracy under stale gradients: accuracy = fresh - slope · staleness.

    The law holds after ``measured_updates`` updates with one ``batch`` [samples] per worker, at the learning rate of
    one worker. ``staleness`` is the mean number of updates by others between a worker's read and its write, up to
    ``max_staleness``. ``chance_accuracy`` is the accuracy of an untrained network. ``residual`` is the rms error of
    single runs [-].
    """

    model: str
    accuracy_without_staleness: Annotated[float, Field(gt=0, le=1)]
    accuracy_loss_per_update: Annotated[float, Field(ge=0)]
    chance_accuracy: Annotated[float, Field(ge=0, lt=1)]
    measured_updates: PositiveQuantity
    batch: PositiveQuantity
    max_staleness: PositiveQuantity
    residual: RelativeError

    def accuracy(self, staleness: Numbers) -> Array:
        """Return the final accuracy of a run with stale gradients.

        Parameters
        ----------
        staleness : float or ndarray
            Mean updates by others between a worker's read and its write.

        Returns
        -------
        ndarray
            Accuracy, of the shape of ``staleness``.

        >>> float(RESNET32_STALENESS_LAW.accuracy(7.0).round(4))
        0.8872
        """
        return np.asarray(
            self.accuracy_without_staleness - self.accuracy_loss_per_update * np.asarray(staleness, dtype=np.float64)
        )

    @property
    def summary(self) -> str:
        """Sentence on the measured loss of accuracy by stale gradients."""
        points = f"{100 * self.accuracy_loss_per_update:.2g} points of accuracy"
        return f"{points} for each update that gradients are late ({self.model})"


RESNET32_STALENESS_LAW = StalenessAccuracyLaw(
    model="ResNet-32 on CIFAR-10", accuracy_without_staleness=0.9286, accuracy_loss_per_update=0.00592,
    chance_accuracy=0.1, measured_updates=64_000, batch=128, max_staleness=7, residual=0.0094,
    source=(
        "least squares over 146 runs on K80 and P100 (Li, Walls, Guo: Speeding up deep learning with transient "
        "servers, ICAC 2019, data of cake-lab/transient-deep-learning); 0.74 % off on 84 runs on V100, left out; "
        "linear in staleness errs less than its root, its logarithm or the momentum 1 - 1/N"
    ),
)  # fmt: skip


# Samples to a target by batch size: the critical-batch law, and reference convergence points that deviate from it


@SAMPLES_LAWS.register("critical_batch")
class CriticalBatchLaw(SamplesLaw):
    """Samples law with a critical batch: S(B) = samples_min (1 + B / critical_batch), see `samples_to_target`.

    The number of steps is S(B) / B. Far above the critical batch, more samples in a step no longer reduce the number of
    steps.

    >>> float(CriticalBatchLaw(samples_min=1e6, critical_batch=2048, source="example").samples(2048))
    2000000.0
    """

    samples_min: PositiveQuantity
    critical_batch: PositiveQuantity

    def samples(self, global_batch: Numbers) -> Array:
        """Return the number of training samples that reach the target at a global batch.

        Parameters
        ----------
        global_batch : array-like
            Samples of a step over all ranks.

        Returns
        -------
        ndarray
            Samples, of the shape of ``global_batch``.
        """
        critical = self.critical_batch
        return samples_to_target(samples=self.samples_min, global_batch=global_batch, critical_batch=critical)


def samples_to_target(*, samples: Numbers, global_batch: Numbers, critical_batch: float | None) -> Array:
    """Return the training samples that reach a target at a global batch, by the critical-batch law.

    Parameters
    ----------
    samples : float or ndarray
        Samples to the target at batches far below the critical batch.
    global_batch : float or ndarray
        Samples of an optimizer step; broadcasts with ``samples``.
    critical_batch : float or None
        Critical batch, estimated by the gradient noise scale [samples]. None leaves the samples as they are.

    Returns
    -------
    ndarray
        Samples to the target, samples (1 + global_batch / critical_batch).

    Notes
    -----
    A run at the critical batch takes twice the fewest samples and twice the fewest steps; beyond it more GPUs buy ever
    less.

    References
    ----------
    McCandlish, Kaplan, Amodei et al., An empirical model of large-batch training, arXiv:1812.06162, eq. 2.11.

    >>> samples_to_target(samples=1e6, global_batch=2048, critical_batch=2048)
    array(2000000.)
    """
    batch = np.asarray(global_batch, dtype=np.float64)
    return np.asarray(samples * (1.0 + batch / (math.inf if critical_batch is None else critical_batch)))


def fit_critical_batch(batches: Array, samples: Array) -> tuple[float, float]:
    """Fit the critical-batch law to measured points by least squares of relative errors.

    Parameters
    ----------
    batches, samples : ndarray
        Global batches and samples to the target of measured points, shape (P,).

    Returns
    -------
    tuple of float
        Samples to the target at small batches, and the critical batch [samples]. The latter is inf if samples do not
        grow with the batch; the former is then the harmonic mean of the samples.

    Raises
    ------
    SpecError
        If there are fewer than two batch sizes.

    Notes
    -----
    The law is linear in the samples at small batches and in these over the critical batch.

    >>> fit_critical_batch(np.array([100.0, 200.0, 400.0]), np.array([1100.0, 1200.0, 1400.0]))
    (1000.0, 1000.0)
    """
    if len(np.unique(batches)) < 2:
        raise SpecError("a critical batch needs reference points at two batch sizes or more")
    design = np.stack([1.0 / samples, batches / samples], axis=1)
    least, slope = np.linalg.lstsq(design, np.ones(len(samples)), rcond=None)[0]
    if slope <= 0 or least <= 0:
        return float(len(samples) / np.sum(1.0 / samples)), float("inf")
    return round(float(least), 6), round(float(least / slope), 6)


def law_with_noise_scale(law: SamplesLaw, noise_scale: float) -> CriticalBatchLaw:
    """Replace the critical batch of a samples law by a measured gradient noise scale.

    Parameters
    ----------
    law : SamplesLaw
        Law of the task, whose samples at its smallest batch are kept.
    noise_scale : float
        Gradient noise scale [samples].

    Returns
    -------
    CriticalBatchLaw
        Changed law, with the residual and the seed noise of the old law.
    """
    smallest = (law.batches or (1.0, 1.0))[0]
    fewest = float(law.samples(smallest)) / (1.0 + smallest / noise_scale)
    source = f"noise scale {noise_scale:g} as stated, fewest samples of: {law.source}"
    return CriticalBatchLaw(
        samples_min=fewest, critical_batch=noise_scale, source=source, residual=law.residual, seed_noise=law.seed_noise
    )


@SAMPLES_LAWS.register("reference_points")
class ReferencePointsLaw(SamplesLaw):
    """Critical-batch law with corrections that make it pass through measured points [global batch, mean samples].

    Between two points the logarithm of the correction is linear in the logarithm of the batch; beyond the last point it
    is constant. Without a ``critical_batch`` the samples did not grow with the batch. The law is then ``samples_min``
    alone, and the points, which scatter about it, are not followed.
    """

    samples_min: PositiveQuantity
    critical_batch: PositiveQuantity | None = None
    points: list[tuple[PositiveQuantity, PositiveQuantity]] = Field(min_length=1)

    def samples(self, global_batch: Numbers) -> Array:
        """Return the number of training samples that reach the target at a global batch.

        Parameters
        ----------
        global_batch : array-like
            Samples of a step over all ranks.

        Returns
        -------
        ndarray
            Samples, of the shape of ``global_batch``.
        """
        batch = np.asarray(global_batch, dtype=np.float64)
        if self.critical_batch is None:
            return np.full_like(batch, self.samples_min)
        return self._critical_batch_samples(batch) * np.exp(self._deviation(batch))

    def _critical_batch_samples(self, batch: Array) -> Array:
        return samples_to_target(samples=self.samples_min, global_batch=batch, critical_batch=self.critical_batch)

    def _deviation(self, batch: Array) -> Array:
        batches, samples = np.array(sorted(self.points)).T
        deviations = np.log(samples / self._critical_batch_samples(batches))
        return np.asarray(np.interp(np.log(batch), np.log(batches), deviations))


def fit_reference_points(
    points: Sequence[tuple[float, float]], *, source: str, seed_noise: float = 0.0
) -> ReferencePointsLaw:
    """Fit a samples law to measured reference points of a training task.

    Parameters
    ----------
    points : sequence of (float, float)
        Global batch and mean samples to the target of each point.
    source : str
        Origin of the points.
    seed_noise : float
        Relative standard deviation of one run between seeds.

    Returns
    -------
    ReferencePointsLaw
        Law whose residual is the rms error of each point predicted from the others (leave-one-out); with fewer than
        four points, of the fit itself.
    """
    batches, samples = np.array(sorted(points), dtype=np.float64).T
    law = _fit_points(batches, samples, source, seed_noise)
    return law.model_copy(update={"residual": round(_residual(law, batches, samples), 4)})


def _fit_points(batches: Array, samples: Array, source: str, seed_noise: float) -> ReferencePointsLaw:
    least, critical = fit_critical_batch(batches, samples) if len(batches) > 1 else (float(samples[0]), math.inf)
    return ReferencePointsLaw(
        samples_min=least,
        critical_batch=critical if math.isfinite(critical) else None,
        points=list(zip(batches.tolist(), samples.tolist(), strict=True)),
        batches=(float(batches[0]), float(batches[-1])),
        seed_noise=round(seed_noise, 4),
        source=source,
    )


def _residual(law: ReferencePointsLaw, batches: Array, samples: Array) -> float:
    if len(batches) < 4 or law.critical_batch is None:
        errors = law._critical_batch_samples(batches) / samples - 1.0
        return float(np.sqrt(np.mean(errors**2)))
    left_out = [_left_out_error(batches, samples, index) for index in range(len(batches))]
    return float(np.sqrt(np.mean(np.square(left_out))))


def refit_without_batch(law: ReferencePointsLaw, batch: float) -> ReferencePointsLaw:
    """Refit a samples law without the reference points at one batch, to test its prediction there.

    Parameters
    ----------
    law : ReferencePointsLaw
        Law of all points.
    batch : float
        Global batch that is left out [samples].

    Returns
    -------
    ReferencePointsLaw
        Law of the other points, with the residual and seed noise of ``law``, which has more points to estimate them
        from.

    Raises
    ------
    SpecError
        If fewer than two points remain.
    """
    other_points = [point for point in law.points if point[0] != batch]
    if len(other_points) < 2:
        raise SpecError(f"batch {batch:g}: the task has too few other reference points to predict it from")
    batches, samples = np.array(sorted(other_points)).T
    fewer = _fit_points(batches, samples, law.source, law.seed_noise)
    return fewer.model_copy(update={"residual": law.residual})


def _left_out_error(batches: Array, samples: Array, index: int) -> float:
    """Return the relative error of one reference point predicted from the others.

    Parameters
    ----------
    batches, samples : ndarray
        Global batches and samples of all points, shape (points,).
    index : int
        Index of the point that is left out.

    Returns
    -------
    float
        Predicted over measured samples, minus one.
    """
    other_points = np.arange(len(batches)) != index
    law = _fit_points(batches[other_points], samples[other_points], "", 0.0)
    return float(law.samples(batches[index]) / samples[index] - 1.0)
