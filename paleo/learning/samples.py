"""Samples to a target by batch size: the critical-batch law, and reference convergence points that deviate from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from paleo.errors import SpecError
from paleo.learning.base import LAWS, Array, Count, Numbers, SamplesLaw


@LAWS.register("critical_batch")
class CriticalBatch(SamplesLaw):
    """Critical-batch law: S(B) = samples_min (1 + B / critical_batch), see `samples_to_target`.

    Steps are S(B) / B: far above the critical batch more samples a step buy no fewer steps.

    >>> float(CriticalBatch(samples_min=1e6, critical_batch=2048, source="example").samples(2048))
    2000000.0
    """

    samples_min: Count
    critical_batch: Count

    def samples(self, global_batch: Numbers) -> Array:
        """Return the samples to the target at a batch.

        Parameters
        ----------
        global_batch : array-like
            Samples of a step over all ranks.

        Returns
        -------
        ndarray
            The shape of `global_batch`.
        """
        return samples_to_target(
            samples=self.samples_min, global_batch=global_batch, critical_batch=self.critical_batch
        )


def samples_to_target(*, samples: Numbers, global_batch: Numbers, critical_batch: float | None) -> Array:
    """Return the samples that reach the same loss at a global batch, where small batches need ``samples``.

    Parameters
    ----------
    samples : float or ndarray
        Samples at batches far below the critical one.
    global_batch : float or ndarray
        Samples of an optimizer step; broadcasts with ``samples``.
    critical_batch : float or None
        Critical batch, estimated by the gradient noise scale [samples]. None leaves the samples as they are.

    Returns
    -------
    ndarray
        samples (1 + global_batch / critical_batch).

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
    """Fit the critical-batch law by least squares of relative errors.

    Parameters
    ----------
    batches, samples : ndarray
        Global batches and samples to the target of measured points, shape (P,).

    Returns
    -------
    tuple of float
        ``samples_min`` and ``critical_batch``. The latter is inf where samples do not grow with the batch; then
        ``samples_min`` is their harmonic mean.

    Raises
    ------
    SpecError
        There are fewer than two batch sizes.

    Notes
    -----
    The law is linear in samples_min and samples_min / critical_batch.

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


def with_noise_scale(law: SamplesLaw, noise_scale: float) -> CriticalBatch:
    """Replace the critical batch of a law by a measured gradient noise scale.

    Parameters
    ----------
    law : SamplesLaw
        Law of the task; its samples at its smallest batch stay.
    noise_scale : float
        Gradient noise scale [samples].

    Returns
    -------
    CriticalBatch
        The changed law, with the residual and the seed noise of the old one.
    """
    smallest = (law.batches or (1.0, 1.0))[0]
    fewest = float(law.samples(smallest)) / (1.0 + smallest / noise_scale)
    source = f"noise scale {noise_scale:g} as stated, fewest samples of: {law.source}"
    return CriticalBatch(
        samples_min=fewest, critical_batch=noise_scale, source=source, residual=law.residual, seed_noise=law.seed_noise
    )


@LAWS.register("reference_points")
class ReferencePoints(SamplesLaw):
    """Critical-batch law through measured points: at the batch of a point the samples are those of the point.

    Between two points the logarithm of the deviation is linear in that of the batch; beyond the last it stays. Each
    point is [global batch, mean samples]. ``critical_batch`` is left out where the need was not seen to grow with the
    batch: the law is then ``samples_min`` alone, and the points, which scatter about it, are not followed.
    """

    samples_min: Count
    critical_batch: Count | None = None
    points: list[tuple[Count, Count]] = Field(min_length=1)

    def samples(self, global_batch: Numbers) -> Array:
        """Return the samples to the target at a batch.

        Parameters
        ----------
        global_batch : array-like
            Samples of a step over all ranks.

        Returns
        -------
        ndarray
            The shape of `global_batch`.
        """
        batch = np.asarray(global_batch, dtype=np.float64)
        if self.critical_batch is None:
            return np.full_like(batch, self.samples_min)
        return self._law(batch) * np.exp(self._deviation(batch))

    def _law(self, batch: Array) -> Array:
        return samples_to_target(samples=self.samples_min, global_batch=batch, critical_batch=self.critical_batch)

    def _deviation(self, batch: Array) -> Array:
        batches, samples = np.array(sorted(self.points)).T
        return np.asarray(np.interp(np.log(batch), np.log(batches), np.log(samples / self._law(batches))))


def fit_reference_points(
    points: Sequence[tuple[float, float]], *, source: str, seed_noise: float = 0.0
) -> ReferencePoints:
    """Fit a law to measured reference points.

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
    ReferencePoints
        The law. Its residual is the rms error of each point predicted from the others; of the fit itself, with fewer
        than four points.
    """
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
    left_out = [_left_out_error(batches, samples, index) for index in range(len(batches))]
    return float(np.sqrt(np.mean(np.square(left_out))))


def leave_out(law: ReferencePoints, batch: float) -> ReferencePoints:
    """Fit the law again without the points at one batch.

    Parameters
    ----------
    law : ReferencePoints
        Law of all points.
    batch : float
        Global batch that is left out.

    Returns
    -------
    ReferencePoints
        Law of the other points, with the residual of the old one.

    Raises
    ------
    SpecError
        Fewer than two points remain.
    """
    other_points = [point for point in law.points if point[0] != batch]
    if len(other_points) < 2:
        raise SpecError(f"batch {batch:g}: the task has too few other reference points to predict it from")
    batches, samples = np.array(sorted(other_points)).T
    fewer = _from(batches, samples, law.source, law.seed_noise)
    return fewer.model_copy(update={"residual": law.residual})


def _left_out_error(batches: Array, samples: Array, index: int) -> float:
    """Return the relative error of one point predicted from the others.

    Parameters
    ----------
    batches, samples : ndarray
        Global batches and samples of all points, shape (P,).
    index : int
        The point that is left out.

    Returns
    -------
    float
        Predicted over measured samples, less one.
    """
    other_points = np.arange(len(batches)) != index
    law = _from(batches[other_points], samples[other_points], "", 0.0)
    return float(law.samples(batches[index]) / samples[index] - 1.0)
