"""Samples by the critical batch size: twice the fewest samples at that batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.errors import SpecError
from paleo.learning.base import LAWS, Count, SamplesLaw

if TYPE_CHECKING:
    from paleo.learning.base import Array, Numbers


@LAWS.register("critical_batch")
class CriticalBatch(SamplesLaw):
    """S(B) = samples_min (1 + B / critical_batch).

    Steps are S(B) / B: far above the critical batch more samples a step buy no fewer steps.

    >>> float(CriticalBatch(samples_min=1e6, critical_batch=2048, source="example").samples(2048))
    2000000.0

    Reference: McCandlish, Kaplan, Amodei et al., An empirical model of large-batch training,
    arXiv:1812.06162, eq. 2.11.
    """

    samples_min: Count
    critical_batch: Count

    def samples(self, global_batch: Numbers) -> Array:
        return critical_batch_samples(global_batch, samples_min=self.samples_min, critical_batch=self.critical_batch)


def critical_batch_samples(global_batch: Numbers, *, samples_min: float, critical_batch: float) -> Array:
    """samples_min (1 + global_batch / critical_batch), broadcast over batch sizes."""
    return np.asarray(samples_min * (1.0 + np.asarray(global_batch, dtype=np.float64) / critical_batch))


def fit_critical_batch(batches: Array, samples: Array) -> tuple[float, float]:
    """``samples_min`` and ``critical_batch`` by least squares of relative errors (linear in S_min, S_min / B_crit).

    ``critical_batch`` is inf where samples do not grow with the batch; then ``samples_min`` is their mean. SpecError
    with fewer than two batch sizes.

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
