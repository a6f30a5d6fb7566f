"""Base classes and registries of laws of learning: samples to a target, and scaling laws of the loss.

A samples law predicts how many training samples a target takes at a global batch; in the simplest case the number is
the same at every batch. A loss law predicts the loss of a language model, and how many tokens a loss takes.
"""

from __future__ import annotations

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
            sentences.append(
                f"global batch {global_batch:,.0f} lies outside of the range of the law ({low:,.0f} to {high:,.0f})"
            )
        if self.seed_noise > _WEAK_LAW_ERROR or self.residual > _WEAK_LAW_ERROR:
            seeds = f"runs differ by {self.seed_noise:.0%} between seeds, and " if self.seed_noise else ""
            off = f"its samples were {self.residual:.0%} off the points that it was fitted to"
            sentences.append(f"the law of this task is weak: {seeds}{off}")
        return tuple(sentences)


#: Seed noise or residual above which a law is called weak.
_WEAK_LAW_ERROR = 0.08


class LossLaw(LearningLaw):
    """Scaling law of the final loss of a language model, by parameters and training tokens [nats per token].

    Subclasses have the fitted ranges as ``parameters`` and ``compute`` (training FLOP, 6 N D).
    """

    def loss(self, parameters: Numbers, tokens: Numbers) -> Array:
        """Return the final training loss of a network after a number of tokens.

        Parameters
        ----------
        parameters, tokens : float or ndarray
            Parameters of the network and training tokens; they broadcast.

        Returns
        -------
        ndarray
            Loss [nats per token].
        """
        raise NotImplementedError

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
            Training tokens.

        Raises
        ------
        SpecError
            If no number of tokens reaches the loss.
        """
        raise NotImplementedError

    def log_standard_deviation(self, loss: float, parameters: float) -> float:
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
            Standard deviation [-].
        """
        raise NotImplementedError

    def warnings(self, parameters: float, tokens: float) -> tuple[str, ...]:
        """Return warnings if a training run lies outside the range to which the law was fitted.

        Parameters
        ----------
        parameters, tokens : float
            Parameters of the network and training tokens.

        Returns
        -------
        tuple of str
            Sentences without a full stop.
        """
        raise NotImplementedError


SAMPLES_LAWS: Registry[type[SamplesLaw]] = Registry("law of samples", "paleo.learning")
LOSS_LAWS: Registry[LossLaw] = Registry("law of loss", "paleo.learning")


def parse_law(value: object) -> SamplesLaw:
    """Build a samples law from its mapping in a task file.

    Parameters
    ----------
    value : object
        Mapping ``{name: {fields}}``, or a law, which is returned unchanged.

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
