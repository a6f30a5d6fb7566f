"""Samples of a language model to a loss: tokens of a law of loss, and what a batch off the best one costs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import SpecError
from paleo.learning.base import LAWS, LOSS_LAWS, Count, SamplesLaw
from paleo.learning.step_law import STEP_LAW

if TYPE_CHECKING:
    from paleo.learning.base import Array, Numbers

#: The law that `--loss` goes by.
LOSS_LAW = "chinchilla"
#: Tokens of the batches of Step Law's runs, between which its penalty was fitted.
FITTED_BATCHES = (33e3, 4e6)


@LAWS.register("loss")
class SamplesToLoss(SamplesLaw):
    """S(B) = D / ``tokens_per_sample`` with L(N, D) = ``loss`` − k (log₂ B / B_best)²; infinite where no data makes up
    for the batch.

    L is the law named ``by`` of N ``parameters``; k = 0.0098 nats, and B_best = 0.58 D^0.571 tokens for the D of the
    best batch (Li et al., Step Law, arXiv:2503.04715): where the schedule is fixed, batches below it cost as well.
    ``residual``: that of L over its slope in ln D.
    """

    loss: float
    parameters: Count
    tokens_per_sample: Count
    by: str = LOSS_LAW

    @classmethod
    def of(cls, loss: float, parameters: float, tokens_per_sample: float) -> SamplesToLoss:
        """The law of a network; SpecError where no number of tokens brings it to the loss."""
        law = LOSS_LAWS[LOSS_LAW]
        low, high = (tokens / tokens_per_sample for tokens in FITTED_BATCHES)
        return cls(
            loss=loss, parameters=parameters, tokens_per_sample=tokens_per_sample, batches=(max(low, 1.0), high),
            residual=law.sigma(loss, parameters),
            source=f"{LOSS_LAW}: {law.source}; batches: {STEP_LAW.batch_penalty:g} nats times the square of the "
            "doublings from the best one, as fitted to the runs of Li et al., arXiv:2503.04715",
        )  # fmt: skip

    @property
    def best_tokens(self) -> float:
        """Tokens to the loss at the best batch; SpecError where no number of them reaches it."""
        return LOSS_LAWS[self.by].tokens(self.loss, self.parameters)

    def nats(self, global_batch: Numbers) -> Array:
        """What a batch costs over the best one of as many tokens as that takes."""
        batch = np.asarray(global_batch, dtype=np.float64) * self.tokens_per_sample
        return STEP_LAW.penalty(self.parameters, self.best_tokens, batch)

    def samples(self, global_batch: Numbers) -> Array:
        left = self.loss - self.nats(global_batch)
        tokens = np.array([self._tokens(loss) for loss in left.ravel().tolist()])
        return np.asarray(tokens.reshape(left.shape) / self.tokens_per_sample)

    def _tokens(self, loss: float) -> float:
        try:
            return LOSS_LAWS[self.by].tokens(loss, self.parameters)
        except SpecError:
            return math.inf

    def beyond(self, tokens: float) -> tuple[str, ...]:
        """A warning where a run lies outside of the range of the law of loss."""
        return LOSS_LAWS[self.by].warnings(self.parameters, tokens)

    def warnings(self, global_batch: float) -> tuple[str, ...]:
        tokens = float(self.samples(global_batch)) * self.tokens_per_sample
        if not np.isfinite(tokens):
            raise SpecError(f"a global batch of {global_batch:,.0f} never reaches a loss of {self.loss:g}")
        return (*super().warnings(global_batch), *self.beyond(tokens))
