"""Loss by parameters, tokens, batch and learning rate: the parametric law with what a batch or a rate off the best ones
costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.learning.base import LOSS_LAWS
from paleo.learning.chinchilla import Parametric

if TYPE_CHECKING:
    from paleo.learning.base import Array, Numbers


def best_batch_tokens(tokens: Numbers) -> Array:
    """Tokens in the best batch of a run with a fixed schedule.

    >>> round(float(best_batch_tokens(20e9)))
    441892

    Reference: Li et al., Step Law, arXiv:2503.04715: 0.58 D^0.571.
    """
    return np.asarray(0.58 * np.asarray(tokens, dtype=np.float64) ** 0.571)


def best_learning_rate(parameters: Numbers, tokens: Numbers) -> Array:
    """The best peak learning rate of AdamW by parameters (without embeddings) and tokens.

    >>> round(float(best_learning_rate(1.0737e9, 20e9)), 6)
    0.000947

    Reference: Li et al., Step Law, arXiv:2503.04715: 1.79 N^-0.713 D^0.307.
    """
    size, data = np.asarray(parameters, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    return np.asarray(1.79 * size**-0.713 * data**0.307)


class WithPenalties(Parametric):
    """The parametric law plus penalties in nats, quadratic in doublings of batch and rate away from the best ones.

    ``batch_penalty`` x^2 + ``coupling`` x y + ``rate_below`` min(y, 0)^2 + ``rate_above`` max(y, 0)^2, with x the
    doublings of the batch and y those of the learning rate: a larger batch bears a higher rate. ``rates`` are the
    doublings between which the rate was fitted; above them runs diverge.
    """

    batch_penalty: float
    coupling: float
    rate_below: float
    rate_above: float
    rates: tuple[float, float]

    def penalty(
        self, parameters: Numbers, tokens: Numbers, batch_tokens: Numbers, learning_rate: Numbers | None = None
    ) -> Array:
        """Nats that this batch, and this rate where it is given, cost over the best ones."""
        x = np.log2(np.asarray(batch_tokens) / best_batch_tokens(tokens))
        y = np.zeros_like(x) if learning_rate is None else self.rate_doublings(parameters, tokens, learning_rate)
        off = self.rate_below * np.minimum(y, 0.0) ** 2 + self.rate_above * np.maximum(y, 0.0) ** 2
        return np.asarray(self.batch_penalty * x**2 + self.coupling * x * y + off)

    def rate_doublings(self, parameters: Numbers, tokens: Numbers, learning_rate: Numbers) -> Array:
        """Doublings of a learning rate above the best one."""
        return np.asarray(np.log2(np.asarray(learning_rate) / best_learning_rate(parameters, tokens)))


STEP_LAW = WithPenalties(
    irreducible=1.6767, a=404.1, alpha=0.348, b=1480.6, beta=0.366,
    batch_penalty=0.0098, coupling=-0.0064, rate_below=0.0054, rate_above=0.0184, rates=(-3.0, 2.0),
    parameters=("214M", "1.08G"), compute=("5.1E", "129E"), residual=0.0052,
    source=(
        "fitted to 1,016 runs of Li et al., arXiv:2503.04715 (their own data; parameters without embeddings), "
        "exponents as Besiroglu et al. 2024; beyond the median compute of its fit it errs by 0.8 %"
    ),
)  # fmt: skip
LOSS_LAWS.register("step-law")(STEP_LAW)
