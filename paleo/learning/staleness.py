"""What stale gradients cost in final quality: measured on one network, and no law across networks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from paleo.learning.base import Count, Law, Share

if TYPE_CHECKING:
    from paleo.learning.base import Array, Numbers


class AccuracyOfStaleness(Law):
    """Final accuracy = fresh − slope · staleness, after a fixed number of ``updates`` at one ``batch`` of a worker.

    ``staleness``: mean updates by others between a worker's read and its write, up to ``largest``. The learning rate is
    that of one worker. ``guessing``: accuracy of a network that never learned; ``residual``: rms of single runs.
    """

    model: str
    fresh: Annotated[float, Field(gt=0, le=1)]
    slope: Annotated[float, Field(ge=0)]
    guessing: Annotated[float, Field(ge=0, lt=1)]
    updates: Count
    batch: Count
    largest: Count
    residual: Share

    def accuracy(self, staleness: Numbers) -> Array:
        """Accuracy of a run whose gradients are so many updates late on average; broadcasts.

        >>> float(RESNET32.accuracy(7.0).round(4))
        0.8872
        """
        return np.asarray(self.fresh - self.slope * np.asarray(staleness, dtype=np.float64))

    @property
    def words(self) -> str:
        """The measured cost in a sentence."""
        return f"{100 * self.slope:.2g} points of accuracy for each update that gradients are late ({self.model})"


RESNET32 = AccuracyOfStaleness(
    model="ResNet-32 on CIFAR-10", fresh=0.9286, slope=0.00592, guessing=0.1, updates=64_000, batch=128, largest=7,
    residual=0.0094,
    source=(
        "least squares over 146 runs on K80 and P100 (Li, Walls, Guo: Speeding up deep learning with transient "
        "servers, ICAC 2019, data of cake-lab/transient-deep-learning); 0.74 % off on 84 runs on V100, left out; "
        "linear in staleness errs less than its root, its logarithm or the momentum 1 - 1/N"
    ),
)  # fmt: skip
