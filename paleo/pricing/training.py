"""Time of kernels in a framework's training step: products under long load, experts in a loop, attention.

    experts   = launches + products of ``STREAMS`` experts at a time, each on its own multiprocessors
    attention = the formula of `paleo.pricing.attention`, its rates scaled from an engine's kernel to training's

Transformer Engine's GroupedLinear issues the products of a rank's experts one after the other on four streams
(transformer_engine/common/gemm/cublaslt_gemm.cu, ``num_streams``). A weight gradient that is accumulated reads and
writes the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paleo.pricing.gemm import gemm_time
from paleo.pricing.power import felt
from paleo.specs.calibration import parameter

if TYPE_CHECKING:
    from paleo.pricing.attention import PrefillParameters

Array = npt.NDArray[np.float64]
#: Experts whose products run concurrently.
STREAMS = 4.0


@dataclass(frozen=True, slots=True)
class TrainingParameters:
    """Calibration of one kind of training kernel on one device."""

    launch: float = parameter("5 us", "0.1..300 us", "what a call takes beside its kernel; of experts: each of them")
    ramp: float = parameter("0.1 ms", "1 us..10 ms", "kernel time that feels half the power limit in a test run")
    forward: float = parameter("1", "0.4..2", "rate of attention's products over that of an engine's kernel")
    backward: float = parameter("0.7", "0.2..1.5", "rate of backward attention's products over forward's")


def experts_product_time(*, experts: npt.ArrayLike, launch: float, **product: Any) -> Array:
    """Compute the time of one product for each of a rank's experts.

    Parameters
    ----------
    experts : array-like
        Experts of the rank.
    launch : float
        Seconds that each expert adds.
    **product
        Arguments of `paleo.pricing.gemm.gemm_time`, but for ``batch``.

    Returns
    -------
    ndarray
        Seconds of all experts.
    """
    count = np.asarray(experts, dtype=np.float64)
    together = np.minimum(count, STREAMS)
    return np.asarray(count / together * gemm_time(batch=together, **product) + count * launch)


def hardened(cold: Array, hot: Array, ramp: float) -> Array:
    """Interpolate between a kernel's times at the clock of short runs and of long load, by the length of a test run.

    Parameters
    ----------
    cold, hot : ndarray
        Times at the clock of a short run and of long load [s].
    ramp : float
        Kernel time at which half of the difference applies [s].

    Returns
    -------
    ndarray
        Seconds.

    Examples
    --------
    >>> float(hardened(np.array(1.0), np.array(3.0), ramp=1.0))
    2.0
    """
    return np.asarray(cold + (hot - cold) * felt(cold, 0.0, ramp))


def trained_attention(engine: PrefillParameters, training: TrainingParameters) -> PrefillParameters:
    """Convert the parameters of an engine's attention kernel to those of attention in training.

    Parameters
    ----------
    engine : PrefillParameters
        Calibration of the kernel as inference engines run it.
    training : TrainingParameters
        Calibration of training. Its ``launch`` is that of single calls, which other kernels hide in a step.

    Returns
    -------
    PrefillParameters
    """
    rate = engine.mma_efficiency * training.forward
    return replace(engine, mma_efficiency=rate, backward_efficiency=training.backward)
