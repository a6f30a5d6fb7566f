"""Reference convergence points, with the law of the critical batch between and beyond them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from paleo.errors import SpecError
from paleo.learning.base import LAWS, Count, SamplesLaw
from paleo.learning.critical_batch import critical_batch_samples, fit_critical_batch

if TYPE_CHECKING:
    from paleo.learning.base import Array, Numbers


@LAWS.register("reference_points")
class ReferencePoints(SamplesLaw):
    """The critical-batch law times what the points deviate from it: at a point's batch the samples are the point's.

    Between two points the logarithm of the deviation is linear in that of the batch; beyond the last it stays. Each
    point is [global batch, mean samples]. ``critical_batch`` is left out where the need was not seen to grow with the
    batch: the law is then ``samples_min`` alone, and the points, which scatter about it, are not followed.
    """

    samples_min: Count
    critical_batch: Count | None = None
    points: list[tuple[Count, Count]] = Field(min_length=1)

    def samples(self, global_batch: Numbers) -> Array:
        batch = np.asarray(global_batch, dtype=np.float64)
        if self.critical_batch is None:
            return np.full_like(batch, self.samples_min)
        return self._law(batch) * np.exp(self._deviation(batch))

    def _law(self, batch: Array) -> Array:
        return critical_batch_samples(
            batch, samples_min=self.samples_min, critical_batch=self.critical_batch or math.inf
        )

    def _deviation(self, batch: Array) -> Array:
        batches, samples = np.array(sorted(self.points)).T
        return np.asarray(np.interp(np.log(batch), np.log(batches), np.log(samples / self._law(batches))))


def fitted(points: Sequence[tuple[float, float]], *, source: str, seed_noise: float = 0.0) -> ReferencePoints:
    """The law of measured points (batch, samples); its residual is the rms of predictions of each point from the others
    (of the fit itself, with fewer than four points)."""
    batches, samples = np.array(sorted(points), dtype=np.float64).T
    law = _from(batches, samples, source, seed_noise)
    return law.model_copy(update={"residual": round(_residual(law, batches, samples), 4)})


def _from(batches: Array, samples: Array, source: str, seed_noise: float) -> ReferencePoints:
    least, critical = fit_critical_batch(batches, samples) if len(batches) > 1 else (float(samples[0]), math.inf)
    return ReferencePoints(
        samples_min=least,
        critical_batch=critical if math.isfinite(critical) else None,
        points=list(zip(batches.tolist(), samples.tolist(), strict=True)),
        batches=(float(batches[0]), float(batches[-1])),
        seed_noise=round(seed_noise, 4),
        source=source,
    )


def _residual(law: ReferencePoints, batches: Array, samples: Array) -> float:
    if len(batches) < 4 or law.critical_batch is None:
        errors = law._law(batches) / samples - 1.0
        return float(np.sqrt(np.mean(errors**2)))
    left_out = [left_out_error(batches, samples, index) for index in range(len(batches))]
    return float(np.sqrt(np.mean(np.square(left_out))))


def without(law: ReferencePoints, batch: float) -> ReferencePoints:
    """The law of the points at other batches than this one; SpecError where fewer than two are left."""
    other_points = [point for point in law.points if point[0] != batch]
    if len(other_points) < 2:
        raise SpecError(f"batch {batch:g}: the task has too few other reference points to predict it from")
    batches, samples = np.array(sorted(other_points)).T
    fewer = _from(batches, samples, law.source, law.seed_noise)
    return fewer.model_copy(update={"residual": law.residual})


def left_out_error(batches: Array, samples: Array, index: int) -> float:
    """Relative error of one point as predicted from the others."""
    other_points = np.arange(len(batches)) != index
    law = _from(batches[other_points], samples[other_points], "", 0.0)
    return float(law.samples(batches[index]) / samples[index] - 1.0)
