"""What a law of learning is. A samples law says how many samples a target takes at a global batch size, in the simplest
case the same at every batch; a loss law says what loss a language model reaches, and how many tokens a loss takes."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from paleo.errors import SpecError
from paleo.registry import Registry
from paleo.units import parse

Array = npt.NDArray[np.float64]
Numbers = float | Array


def _count(value: object) -> float:
    number = parse(value, "count")
    if number <= 0:
        raise SpecError(f"{value!r} must be above zero")
    return number


#: A number of samples, sequences or tokens: ``44.7M`` or 44700000.
Count = Annotated[float, BeforeValidator(_count)]
Share = Annotated[float, Field(ge=0, lt=10)]


class Law(BaseModel):
    """Base of all laws: the fields are what a task file may say of it."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    source: str


class SamplesLaw(Law):
    """Samples to a target by global batch size.

    ``residual`` is the rms relative error on the points of the law, each left out in turn where that is possible;
    ``seed_noise`` the relative standard deviation of one run between seeds; ``batches`` the smallest and the largest
    batch that the law was fitted to (None: it holds at any).
    """

    residual: Share = 0.0
    seed_noise: Share = 0.0
    batches: tuple[Count, Count] | None = None

    def samples(self, global_batch: Numbers) -> Array:
        """Samples to the target; broadcasts over batch sizes."""
        raise NotImplementedError

    def doublings_outside(self, global_batch: Numbers) -> Array:
        """How many doublings a batch lies outside of those that were fitted."""
        batch = np.asarray(global_batch, dtype=np.float64)
        if self.batches is None:
            return np.zeros_like(batch)
        low, high = self.batches
        return np.asarray(np.maximum(0.0, np.maximum(np.log2(batch / high), np.log2(low / batch))))

    def sigma(self, global_batch: Numbers, runs: float = 1.0) -> Array:
        """One sigma of the logarithm of the mean samples of ``runs`` runs; a doubling outside of the range of the law
        adds its residual once more."""
        error = self.residual * (1.0 + self.doublings_outside(global_batch))
        return np.asarray(np.sqrt(error**2 + self.seed_noise**2 / runs))

    def warnings(self, global_batch: float) -> tuple[str, ...]:
        """What is to be said of the law at this batch: that it is left, that it is weak."""
        sentences: list[str] = []
        if self.batches is not None and float(self.doublings_outside(global_batch)) > 0:
            low, high = self.batches
            sentences.append(
                f"global batch {global_batch:,.0f} lies outside of the range of the law ({low:,.0f} to {high:,.0f})"
            )
        if self.seed_noise > WEAK or self.residual > WEAK:
            seeds = f"runs differ by {self.seed_noise:.0%} between seeds, " if self.seed_noise else ""
            sentences.append(f"the law of this task is weak: {seeds}its points by {self.residual:.0%}")
        return tuple(sentences)


#: Seed noise or residual from which a law is called weak.
WEAK = 0.08


class LossLaw(Law):
    """Final loss [nats a token] of a language model by parameters and tokens.

    ``parameters`` and ``compute`` are the range of what was fitted: parameters, and training FLOP (6 N D).
    """

    def loss(self, parameters: Numbers, tokens: Numbers) -> Array:
        """Loss after training on so many tokens; broadcasts."""
        raise NotImplementedError

    def tokens(self, loss: float, parameters: float) -> float:
        """Tokens that reach a loss; SpecError where no number of tokens does."""
        raise NotImplementedError

    def sigma(self, loss: float, parameters: float) -> float:
        """One sigma of the logarithm of `tokens`, as the residual of the law makes it."""
        raise NotImplementedError

    def warnings(self, parameters: float, tokens: float) -> tuple[str, ...]:
        """A warning where a run lies outside of the law's range."""
        raise NotImplementedError


LAWS: Registry[type[SamplesLaw]] = Registry("law of samples", "paleo.learning")
LOSS_LAWS: Registry[LossLaw] = Registry("law of loss", "paleo.learning")


def law_of(value: object) -> SamplesLaw:
    """A law from the mapping of a task file, ``{name: {fields}}``."""
    if isinstance(value, SamplesLaw):
        return value
    if not (isinstance(value, dict) and len(value) == 1):
        raise SpecError(f"law: expected one of {', '.join(LAWS)} with its fields, not {value!r:.80}")
    (name, fields), *_ = value.items()
    kind: Any = LAWS[str(name)]
    return kind.model_validate(fields)  # type: ignore[no-any-return]


@LAWS.register("constant")
class Constant(SamplesLaw):
    """The same samples at every batch: a fixed number of epochs or tokens, or a task whose need was not seen to grow.

    >>> Constant(fixed=1000, source="example").samples(np.array([8, 64])).tolist()
    [1000.0, 1000.0]
    """

    fixed: Count

    def samples(self, global_batch: Numbers) -> Array:
        return np.full_like(np.asarray(global_batch, dtype=np.float64), self.fixed)
