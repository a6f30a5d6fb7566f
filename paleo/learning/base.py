"""Base classes and registries of the laws of learning.

A samples law says how many samples a target takes at a global batch; in the simplest case the number is the same at
every batch. A loss law says which loss a language model reaches, and how many tokens a loss takes.
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
Count = Annotated[float, BeforeValidator(_count)]
RelativeError = Annotated[float, Field(ge=0, lt=10)]


class LearningLaw(BaseModel):
    """Base class of all laws; a task file states the fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    source: str


class SamplesLaw(LearningLaw):
    """Samples to a target by global batch size.

    ``residual`` is the rms relative error on the points of the law, each left out in turn where possible.
    ``seed_noise`` is the relative standard deviation of one run between seeds. ``batches`` are the smallest and the
    largest batch that the law was fitted to (None: any batch).
    """

    residual: RelativeError = 0.0
    seed_noise: RelativeError = 0.0
    batches: tuple[Count, Count] | None = None

    def samples(self, global_batch: Numbers) -> Array:
        """Return the samples to the target.

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

    def doublings_outside(self, global_batch: Numbers) -> Array:
        """Return how far a batch lies outside of the fitted range.

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

    def log_std(self, global_batch: Numbers, runs: float = 1.0) -> Array:
        """Return the standard deviation of the logarithm of the mean samples of several runs.

        Parameters
        ----------
        global_batch : float or ndarray
            Samples of an optimizer step.
        runs : float
            Number of runs that are averaged, which narrows the noise between seeds.

        Returns
        -------
        ndarray
            Standard deviation; each doubling outside of the fitted range adds the residual once more.
        """
        error = self.residual * (1.0 + self.doublings_outside(global_batch))
        return np.asarray(np.sqrt(error**2 + self.seed_noise**2 / runs))

    def warnings(self, global_batch: float) -> tuple[str, ...]:
        """Warn where a batch lies outside of the fitted range, and where the law is weak.

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
        if self.batches is not None and float(self.doublings_outside(global_batch)) > 0:
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
    """Final loss of a language model by parameters and tokens, in nats per token.

    ``parameters`` and ``compute`` are the fitted ranges: parameters, and training FLOP (6 N D).
    """

    def loss(self, parameters: Numbers, tokens: Numbers) -> Array:
        """Return the loss after training.

        Parameters
        ----------
        parameters, tokens : float or ndarray
            Size of the network and tokens of its training; they broadcast.

        Returns
        -------
        ndarray
            Loss [nats per token].
        """
        raise NotImplementedError

    def tokens(self, loss: float, parameters: float) -> float:
        """Return the tokens that reach a loss.

        Parameters
        ----------
        loss : float
            Target [nats per token].
        parameters : float
            Size of the network.

        Returns
        -------
        float
            Tokens.

        Raises
        ------
        SpecError
            No number of tokens reaches the loss.
        """
        raise NotImplementedError

    def log_std(self, loss: float, parameters: float) -> float:
        """Return the standard deviation of the logarithm of `tokens` that follows from the residual of the law.

        Parameters
        ----------
        loss : float
            Target [nats per token].
        parameters : float
            Size of the network.

        Returns
        -------
        float
            Standard deviation.
        """
        raise NotImplementedError

    def warnings(self, parameters: float, tokens: float) -> tuple[str, ...]:
        """Warn where a training lies outside of the fitted range.

        Parameters
        ----------
        parameters, tokens : float
            Size of the network and tokens of its training.

        Returns
        -------
        tuple of str
            Sentences without a full stop.
        """
        raise NotImplementedError


LAWS: Registry[type[SamplesLaw]] = Registry("law of samples", "paleo.learning")
LOSS_LAWS: Registry[LossLaw] = Registry("law of loss", "paleo.learning")


def parse_law(value: object) -> SamplesLaw:
    """Build a law from the mapping of a task file.

    Parameters
    ----------
    value : object
        ``{name: {fields}}``, or a law, which is returned as it is.

    Returns
    -------
    SamplesLaw
        The law.

    Raises
    ------
    SpecError
        The value is no such mapping, or its name is not registered.
    """
    if isinstance(value, SamplesLaw):
        return value
    if not (isinstance(value, dict) and len(value) == 1):
        raise SpecError(f"law: expected one of {', '.join(LAWS)} with its fields, not {value!r:.80}")
    (name, fields), *_ = value.items()
    kind: Any = LAWS[str(name)]
    return kind.model_validate(fields)  # type: ignore[no-any-return]


@LAWS.register("constant")
class ConstantSamplesLaw(SamplesLaw):
    """Constant number of samples at every batch: fixed epochs or tokens, or a need that batches do not change.

    >>> ConstantSamplesLaw(fixed=1000, source="example").samples(np.array([8, 64])).tolist()
    [1000.0, 1000.0]
    """

    fixed: Count

    def samples(self, global_batch: Numbers) -> Array:
        """Return the samples to the target, whatever the batch.

        Parameters
        ----------
        global_batch : array-like
            Samples of a step over all ranks.

        Returns
        -------
        ndarray
            The shape of `global_batch`.
        """
        return np.full_like(np.asarray(global_batch, dtype=np.float64), self.fixed)
