"""Goodput of a long run: what is left of the wall time after checkpoints, lost work, restarts and evaluations.

All formulas are closed forms that broadcast over arrays. Failures are exponential with the job's mean time between
failures; after each the run falls back to its last durable checkpoint and spends ``restart`` seconds until the next new
step. Weibull failures with a falling hazard lose a little less: exponential is the careful choice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from paleo.errors import CapacityError, SpecError
from paleo.step.stragglers import normal_quantile
from paleo.units import DAY, KILO, duration, engineering

Array = npt.NDArray[np.float64]
Numeric = float | Array
#: How a checkpoint reaches storage: training waits for all of it, for the copy to host memory, or for that alone while
#: most failures are survived by the copy in memory.
Checkpointing = Literal["sync", "async", "memory"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("sync", "async", "memory")
#: Failures of GPU nodes per node and second, hardware and software of a tended cluster: 4 per 1,000 node-days, between
#: 2 and 16. Llama 3 405B 3.8 (419 in 54 days of 2,048 nodes), BLOOM 3.0, RSC-1 6.5, RSC-2 2.3, OPT-175B 16.1.
NODE_FAILURES = 4.0 / (KILO * DAY)
NODE_FAILURES_RANGE = (2.0 / (KILO * DAY), 16.0 / (KILO * DAY))
#: Share of failures that leave the copy in host memory intact (DLRover: three of four restart a process).
SURVIVED = 0.75


def mean_time_between_failures(
    *, nodes: Numeric, node_rate: Numeric = NODE_FAILURES, gpus: Numeric = 0.0, gpu_rate: Numeric = 0.0,
    software_rate: Numeric = 0.0,
) -> Array:  # fmt: skip
    """Mean time between failures of a job [s]: 1 / (nodes · node_rate + gpus · gpu_rate + software_rate), rates per
    second. inf where nothing fails.

    >>> round(float(mean_time_between_failures(nodes=2048, node_rate=3.79 / (1000 * 86400))) / 3600, 2)
    3.09
    """
    total = np.asarray(nodes) * node_rate + np.asarray(gpus) * gpu_rate + software_rate
    with np.errstate(divide="ignore"):
        return np.asarray(1.0 / np.asarray(total, dtype=np.float64))


def goodput(*, interval: Numeric, save: Numeric, restart: Numeric, mtbf: Numeric, lag: Numeric = 0.0) -> Array:
    """Share of wall time that makes new steps: a checkpoint of ``save`` seconds every ``interval`` seconds of work.

    interval / T, T = M e^(R/M) (e^((interval + save)/M) − 1); failures strike while saving and restarting, too. With a
    ``lag`` until a checkpoint is durable a failure falls back that much further, on average.

    >>> round(float(goodput(interval=798.0, save=30.0, restart=300.0, mtbf=11135.0)), 3)
    0.904

    Reference: Daly, A higher order estimate of the optimum checkpoint interval, FGCS 22 (2006), eq. 13.
    """
    m, r, work = (np.asarray(value, dtype=np.float64) for value in (mtbf, restart, interval))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        segment = m * np.exp((r + np.asarray(lag)) / m) * np.expm1((work + save) / m)
        return np.asarray(np.where(np.isinf(m), work / (work + save), work / segment))


def losses(*, interval: Numeric, save: Numeric, restart: Numeric, mtbf: Numeric) -> tuple[Array, Array, Array]:
    """To first order the shares lost to saving, to work done again, and to restarts: save / interval, (interval + save)
    / 2 M, R / M."""
    work = np.asarray(interval, dtype=np.float64)
    again = (work + save) / (2.0 * np.asarray(mtbf))
    return np.asarray(save / work), again, np.asarray(np.asarray(restart) / np.asarray(mtbf))


def young_interval(*, save: Numeric, mtbf: Numeric) -> Array:
    """The interval √(2 · save · M), the best to first order (Young, CACM 17, 1974).

    >>> float(young_interval(save=50.0, mtbf=10000.0))
    1000.0
    """
    return np.sqrt(2.0 * np.asarray(save) * np.asarray(mtbf, dtype=np.float64))


def daly_interval(*, save: Numeric, mtbf: Numeric) -> Array:
    """√(2 δ M) [1 + √(δ / 2M) / 3 + δ / 18M] − δ where δ < 2M, else M (Daly 2006, eq. 37)."""
    d, m = np.asarray(save, dtype=np.float64), np.asarray(mtbf, dtype=np.float64)
    root = np.sqrt(d / (2.0 * m))
    series = np.sqrt(2.0 * d * m) * (1.0 + root / 3.0 + root**2 / 9.0) - d
    return np.asarray(np.where(d < 2.0 * m, series, m))


def best_interval(*, save: Numeric, mtbf: Numeric) -> Array:
    """The interval that maximises `goodput`: τ = x M with e^(x + δ/M) (1 − x) = 1, by Newton from Young's.

    >>> tau = float(best_interval(save=30.0, mtbf=11135.0))
    >>> bool(goodput(interval=tau, save=30.0, restart=0.0, mtbf=11135.0)
    ...      >= goodput(interval=tau * 1.05, save=30.0, restart=0.0, mtbf=11135.0))
    True
    """
    m = np.asarray(mtbf, dtype=np.float64)
    ratio = np.minimum(np.asarray(save, dtype=np.float64) / m, HOPELESS)
    x = np.minimum(np.sqrt(2.0 * ratio), 0.999)
    for _ in range(NEWTON_STEPS):
        grown = np.exp(x + ratio)
        x = np.clip(x + (grown * (1.0 - x) - 1.0) / np.maximum(grown * x, 1e-300), x / 2.0, (1.0 + x) / 2.0)
    return np.asarray(np.where(np.isinf(m), np.inf, x * m))


NEWTON_STEPS = 60
#: Seconds of a checkpoint over the mean time between failures from which on no interval is better than another.
HOPELESS = 100.0


def two_level_goodput(
    *, memory_interval: Numeric, memory_save: Numeric, storage_interval: Numeric, storage_save: Numeric,
    restart_memory: Numeric, restart_storage: Numeric, mtbf: Numeric, survived: float = SURVIVED,
) -> Array:  # fmt: skip
    """Goodput with copies in host memory and in storage: the share ``survived`` of failures falls back to the former.

    1 − Σ [δ_i / τ_i + λ_i (τ_i / 2 + R_i)], to first order (Moody et al., SC 2010, two levels).
    """
    rate = 1.0 / np.asarray(mtbf, dtype=np.float64)
    fast = memory_save / np.asarray(memory_interval) + rate * survived * (memory_interval / 2.0 + restart_memory)
    slow = storage_save / np.asarray(storage_interval) + rate * (1.0 - survived) * (
        storage_interval / 2.0 + restart_storage
    )
    return np.asarray(np.clip(1.0 - fast - slow, 0.0, 1.0))


def save_seconds(
    *, total_bytes: Numeric, process_rate: Numeric, processes: Numeric = 1.0, node_rate: Numeric = math.inf,
    nodes: Numeric = 1.0, storage_rate: Numeric = math.inf, fixed: Numeric = 0.0, tensors: Numeric = 0.0,
    per_tensor: Numeric = 0.0,
) -> Array:  # fmt: skip
    """Seconds that a checkpoint takes: the slowest of what a process writes, a node passes on and storage takes in,
    beside a fixed part and one for each tensor.

    >>> float(save_seconds(total_bytes=2e10, process_rate=1e9, processes=8, storage_rate=4e9))
    5.0
    """
    total = np.asarray(total_bytes, dtype=np.float64)
    slowest = np.maximum(total / (process_rate * np.asarray(processes)), total / (node_rate * np.asarray(nodes)))
    return np.asarray(np.maximum(slowest, total / storage_rate) + fixed + np.asarray(tensors) * per_tensor)


def spares_needed(*, nodes: float, node_rate: float, repair: float, quantile: float = 0.99) -> int:
    """Spare nodes that cover repairs with a probability: failed nodes are Poisson with mean nodes · rate · repair.

    >>> spares_needed(nodes=2048, node_rate=4.0 / (1000 * 86400), repair=86400.0)
    16
    """
    mean = nodes * node_rate * repair
    term, reached, count = math.exp(-mean), math.exp(-mean), 0
    while reached < quantile:
        count += 1
        term *= mean / count
        reached += term
    return count


def elastic_goodput(*, base: Numeric, replicas: Numeric, failures_in_repair: Numeric) -> Array:
    """Goodput of a run that goes on with (n − k)/n of its replicas while k are repaired, on average."""
    return np.asarray(base * (1.0 - np.asarray(failures_in_repair) / np.asarray(replicas)))


@dataclass(frozen=True, slots=True)
class Reliability:
    """What fails and what a restart takes [s]: failures are per node and second; ``detect`` is until the failure is
    seen, ``replace`` until a node stands in, ``launch`` until processes run, ``warm_up`` until steps are as fast as
    before. Defaults are a tended cluster with health checks and spares: Llama 3's 90 % at a failure every 3.1 h leave
    340 s for all of it, reading the checkpoint included; without health checks the time-out of collectives (10 min in
    PyTorch) comes first, and by hand it takes hours."""

    node_rate: float = NODE_FAILURES
    detect: float = 60.0
    replace: float = 30.0
    launch: float = 60.0
    warm_up: float = 30.0

    def restart(self, load: float) -> float:
        """Seconds from a failure to the next new step, ``load`` of them reading the checkpoint."""
        return self.detect + self.replace + self.launch + load + self.warm_up


@dataclass(frozen=True, slots=True)
class Goodput:
    """A long run with failures: ``work`` seconds of steps, what it takes in all, and its interval p10 to p90."""

    work: float
    mtbf: float
    checkpoint_bytes: float
    save: float
    interval: float
    restart: float
    share: float

    @property
    def finish(self) -> float:
        """Expected wall time [s]."""
        return self.work / self.share

    @property
    def failures(self) -> float:
        """Failures to be expected until the end."""
        return self.finish / self.mtbf if math.isfinite(self.mtbf) else 0.0

    @property
    def finish_interval(self) -> tuple[float, float]:
        """p10 and p90 of the wall time: failures are Poisson, each loses the restart and work uniform in an interval:
        variance n (R² + R τ + τ²/3)."""
        each = self.restart**2 + self.restart * self.interval + self.interval**2 / 3.0
        sd = math.sqrt(self.failures * each)
        tail = float(normal_quantile(0.9)) * sd
        return max(self.work, self.finish - tail), self.finish + tail

    @property
    def lost(self) -> dict[str, float]:
        """Shares lost to checkpoints, to work done again and to restarts, to first order."""
        if math.isinf(self.mtbf):
            return {"checkpoints": self.save / self.interval, "again": 0.0, "restarts": 0.0}
        shares = losses(interval=self.interval, save=self.save, restart=self.restart, mtbf=self.mtbf)
        return dict(zip(("checkpoints", "again", "restarts"), (float(share) for share in shares), strict=True))


def long_run(
    *, work: float, mtbf: float, checkpoint_bytes: float, save: float, restart: float, interval: float | None = None,
    lag: float = 0.0,
) -> Goodput:  # fmt: skip
    """Goodput of a run with the best interval, or the one given.

    Raises SpecError where a checkpoint takes longer than its interval, CapacityError where the run never finishes.
    """
    chosen = float(best_interval(save=save, mtbf=mtbf)) if interval is None else interval
    if interval is None and math.isinf(chosen):
        chosen = work
    if save + lag > chosen and interval is not None:
        raise SpecError(
            f"checkpoint: one takes {duration(save + lag)}, longer than the interval of {duration(chosen)}; expected a "
            "longer interval or faster storage"
        )
    share = float(goodput(interval=chosen, save=save, restart=restart, mtbf=mtbf, lag=lag))
    if not share > NEVER:
        raise CapacityError(
            f"never finishes: a failure every {duration(mtbf)}, {duration(restart)} to restart, checkpoints of "
            f"{engineering(checkpoint_bytes, 'B')} every {duration(chosen)}"
        )
    return Goodput(work, mtbf, checkpoint_bytes, save, chosen, restart, share)


#: Goodput below which a run is said never to finish.
NEVER = 1e-4


def check_storage(checkpoint_bytes: float, capacity: float | None) -> None:
    """CapacityError where a checkpoint is larger than the storage that is to hold it."""
    if capacity is not None and checkpoint_bytes > capacity:
        raise CapacityError(
            f"storage: a checkpoint of {engineering(checkpoint_bytes, 'B')} does not fit into "
            f"{engineering(capacity, 'B')}"
        )
