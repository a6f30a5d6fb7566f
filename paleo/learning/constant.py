"""Samples that do not depend on the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.learning.base import LAWS, Count, SamplesLaw

if TYPE_CHECKING:
    from paleo.learning.base import Array, Numbers


@LAWS.register("constant")
class Constant(SamplesLaw):
    """The same samples at every batch: a fixed number of epochs or tokens, or a task whose need was not seen to grow.

    >>> Constant(fixed=1000, source="example").samples(np.array([8, 64])).tolist()
    [1000.0, 1000.0]
    """

    fixed: Count

    def samples(self, global_batch: Numbers) -> Array:
        return np.full_like(np.asarray(global_batch, dtype=np.float64), self.fixed)
