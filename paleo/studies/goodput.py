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

from paleo.errors import CapacityError
from paleo.step.waiting import normal_quantile
from paleo.units import duration, engineering

Array = npt.NDArray[np.float64]
Numeric = float | Array
#: How a checkpoint reaches storage: training waits for all of it, for the copy to host memory, or for that alone while
#: most failures are survived by the copy in memory.
Checkpointing = Literal["sync", "async", "memory"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("sync", "async", "memory")
#: Share of failures that leave the copy in host memory intact (DLRover: three of four restart a process).
SURVIVED = 0.75


def mean_time_between_failures(
    *, nodes: Numeric, node_rate: Numeric, gpus: Numeric = 0.0, gpu_rate: Numeric = 0.0,
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
    repeated = (work + save) / (2.0 * np.asarray(mtbf))
    return np.asarray(save / work), repeated, np.asarray(np.asarray(restart) / np.asarray(mtbf))


def best_interval(*, save: Numeric, mtbf: Numeric) -> Array:
    """The interval that maximises `goodput`: τ = x M with e^(x + δ/M) (1 − x) = 1, by Newton from √(2 δ M), the best to
    first order (Young, CACM 17, 1974).

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
    restart_memory: Numeric, restart_storage: Numeric, mtbf: Numeric, survived: float = SURVIVED, lag: Numeric = 0.0,
) -> Array:  # fmt: skip
    """Goodput with copies in host memory and in storage: the share ``survived`` of failures falls back to the former.

    (w − Σ p_i l_i / M) / (1 + Σ p_i r_i / M), with w = 1 / (1 + Σ δ / τ) the share of running time that is not saving,
    l_i the work lost, on average, and r_i = M (e^(R_i/M) − 1) a restart that failures strike, too. A failure finds a
    copy in memory that is M − s / (e^(s/M) − 1) old, s the time between two; one in storage is older by ``lag``.

    Two levels as in Moody et al., SC 2010.
    """
    m = np.asarray(mtbf, dtype=np.float64)
    running = 1.0 / (1.0 + memory_save / np.asarray(memory_interval) + storage_save / np.asarray(storage_interval))
    fast = _age(np.asarray(memory_interval) / running, m)
    slow = _age(np.asarray(storage_interval) / running, m) + lag
    lost = (survived * fast + (1.0 - survived) * slow) * running
    restarts = survived * np.expm1(restart_memory / m) + (1.0 - survived) * np.expm1(restart_storage / m)
    return np.asarray(np.clip(running - lost / m, 0.0, 1.0) / (1.0 + restarts))


def _age(between: Numeric, mtbf: Array) -> Array:
    """Mean age of the last copy when a failure strikes, with ``between`` seconds from one to the next."""
    with np.errstate(invalid="ignore", divide="ignore"):
        aged = mtbf - between / np.expm1(between / mtbf)
    return np.where(np.asarray(between) < SHORT * mtbf, np.asarray(between) / 2.0, aged)


#: Below this share of the mean time between failures the age of a copy is half the time between two.
SHORT = 1e-4


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
    if mean > NORMAL:
        return math.ceil(mean + float(normal_quantile(quantile)) * math.sqrt(mean))
    return int(np.searchsorted(np.cumsum(_poisson(mean)), quantile))


#: Mean from which on a law of Poisson is taken as normal.
NORMAL = 400.0


def replacement_wait(*, mean_in_repair: float, spares: int, repair: float, swap: float) -> float:
    """Expected seconds until a node stands in for a failed one: ``swap`` with a spare, else until the first of those in
    repair is back, repair / (k + 1) with k others there. Nodes in repair are Poisson with their mean.

    >>> round(replacement_wait(mean_in_repair=1.0, spares=0, repair=86400.0, swap=30.0))  # repair (1 - 1/e)
    54615
    """
    if mean_in_repair > NORMAL:
        return swap if spares > mean_in_repair else max(repair / (mean_in_repair + 1.0), swap)
    probabilities = _poisson(mean_in_repair)
    counts = np.arange(len(probabilities))
    waits = np.where(counts < spares, swap, np.maximum(repair / (counts + 1.0), swap))
    return float(np.sum(probabilities * waits) / np.sum(probabilities))


#: Standard deviations up to which the law of Poisson is summed.
TAIL = 8.0


def _poisson(mean: float) -> Array:
    """Probabilities of 0, 1, 2, … up to `TAIL` standard deviations above a mean of up to `NORMAL`.

    >>> _poisson(1.0)[:3].round(3).tolist()
    [0.368, 0.368, 0.184]
    """
    counts = np.arange(math.ceil(mean + TAIL * math.sqrt(mean) + TAIL) + 1.0)
    ratios = np.divide(mean, counts, out=np.ones_like(counts), where=counts > 0)
    return np.asarray(math.exp(-mean) * np.cumprod(ratios))


def elastic_goodput(*, base: Numeric, replicas: Numeric, failures_in_repair: Numeric) -> Array:
    """Goodput of a run that goes on with (n − k)/n of its replicas while k are repaired, on average."""
    return np.asarray(base * (1.0 - np.asarray(failures_in_repair) / np.asarray(replicas)))


@dataclass(frozen=True, slots=True)
class RestartPath:
    """What a restart takes [s]: ``detect`` is until the failure is seen, ``replace`` until a spare node stands in,
    ``launch`` until processes run, ``warm_up`` until steps are as fast as before. Defaults are a tended cluster with
    health checks and spares: Llama 3's 90 % at a failure every 3.1 h leave 340 s for all of it, reading the checkpoint
    included; without health checks the time-out of collectives (10 min in PyTorch) comes first, and by hand it takes
    hours."""

    detect: float = 60.0
    replace: float = 30.0
    launch: float = 60.0
    warm_up: float = 30.0

    def restart(self, load: float, replace: float | None = None) -> float:
        """Seconds from a failure to the next new step, ``load`` of them reading the checkpoint."""
        return self.detect + (self.replace if replace is None else replace) + self.launch + load + self.warm_up


@dataclass(frozen=True, slots=True)
class Boot:
    """Seconds from the order of a rented machine to one that answers, and where nine of ten means lie."""

    seconds: float
    low: float
    high: float
    source: str


#: Machines of a cloud that are kept, and such as may be taken away again.
ON_DEMAND_BOOT = Boot(69.0, 63.0, 76.0, "CM-DARE, 55 GPU machines of Google Cloud, two regions, K80 and P100")
SPOT_BOOT = Boot(87.0, 78.0, 96.0, "CM-DARE, 45 preemptible GPU machines of Google Cloud, likewise")


@dataclass(frozen=True, slots=True)
class CheckpointSchedule:
    """How a run saves and comes back [s]: training stops for ``save``, a copy is durable ``lag`` later, and ``restart``
    lies between a failure and the next new step.

    ``survived``: share of failures that leave a copy in host memory intact; these take ``restart_memory`` and lose what
    was done since that copy, the others fall back to storage, which is written to without a pause. ``replicas`` above
    zero: the run is elastic, a failure stops it for ``restart`` alone while others hold its states, and the replica is
    away for ``repair`` seconds.
    """

    save: float
    restart: float
    lag: float = 0.0
    survived: float = 0.0
    restart_memory: float = 0.0
    replicas: int = 0
    repair: float = 0.0

    def best_interval(self, mtbf: float) -> float:
        """The interval of the highest goodput; of copies in memory, to first order for the failures they survive."""
        return float(best_interval(save=self.save, mtbf=mtbf / self.survived if self.survived else mtbf))

    def storage_interval(self, interval: float) -> float:
        """Seconds between copies in storage: one is written after the other."""
        return max(interval, self.lag)

    def goodput(self, interval: Numeric, mtbf: Numeric) -> Array:
        """Share of wall time that makes new steps; broadcasts."""
        if self.replicas:
            standing = 1.0 - self.restart / np.asarray(mtbf, dtype=np.float64)
            base = np.maximum(standing, 0.0) / (1.0 + self.save / np.asarray(interval))
            return elastic_goodput(base=base, replicas=self.replicas, failures_in_repair=self.repair / np.asarray(mtbf))
        if self.survived:
            return two_level_goodput(
                memory_interval=interval, memory_save=self.save, storage_save=0.0, lag=self.lag,
                storage_interval=np.maximum(interval, self.lag), restart_memory=self.restart_memory,
                restart_storage=self.restart, mtbf=mtbf, survived=self.survived,
            )  # fmt: skip
        return goodput(interval=interval, save=self.save, restart=self.restart, mtbf=mtbf, lag=self.lag)


@dataclass(frozen=True, slots=True)
class Goodput:
    """A long run with failures: ``work`` seconds of steps, what it takes in all, and its interval p10 to p90.

    ``rate_range``: the range of failure rates over the rate taken; ``source`` says where that is from. ``spares``:
    nodes that cover repairs with 99 %.
    """

    work: float
    mtbf: float
    checkpoint_bytes: float
    checkpoints: CheckpointSchedule
    interval: float
    share: float
    rate_range: tuple[float, float] = (1.0, 1.0)
    source: str = "as stated"
    spares: int = 0

    @property
    def save(self) -> float:
        """Seconds that training stops for a checkpoint."""
        return self.checkpoints.save

    @property
    def restart(self) -> float:
        """Seconds from a failure to the next new step."""
        return self.checkpoints.restart

    @property
    def finish(self) -> float:
        """Expected wall time [s]."""
        return self.work / self.share

    @property
    def failures(self) -> float:
        """Failures to be expected until the end."""
        return self.finish / self.mtbf if math.isfinite(self.mtbf) else 0.0

    @property
    def share_range(self) -> tuple[float, float]:
        """Goodput at the high and the low end of the failure rates, the interval kept."""
        ends = self.checkpoints.goodput(self.interval, self.mtbf / np.array(self.rate_range))
        return float(ends[1]), float(ends[0])

    @property
    def finish_interval(self) -> tuple[float, float]:
        """p10 and p90 of the wall time.

        Failures are Poisson, and each loses the restart and work uniform in an interval: variance n (R² + R τ + τ²/3).
        The rate itself is lognormal, its range holding nine of ten clusters: what is lost moves with it.
        """
        variance = self.restart**2 + self.restart * self.interval + self.interval**2 / 3.0
        low, high = self.rate_range
        rate_sigma = math.log(high / low) / (2.0 * float(normal_quantile(0.95)))
        lost = (self.finish - self.work) * rate_sigma
        tail = float(normal_quantile(0.9)) * math.sqrt(self.failures * variance + lost**2)
        return max(self.work, self.finish - tail), self.finish + tail

    @property
    def lost(self) -> dict[str, float]:
        """Shares lost to checkpoints, to work done again and to restarts (with an elastic run: to replicas that are
        away), to first order."""
        saving = self.save / self.interval
        if math.isinf(self.mtbf):
            return {"checkpoints": saving, "again": 0.0, "restarts": 0.0}
        checkpoints = self.checkpoints
        if checkpoints.replicas:
            absence = checkpoints.repair / self.mtbf / checkpoints.replicas
            return {"checkpoints": saving, "restarts": checkpoints.restart / self.mtbf, "replicas away": absence}
        storage_interval = checkpoints.storage_interval(self.interval)
        from_memory, from_storage = checkpoints.survived / self.mtbf, (1.0 - checkpoints.survived) / self.mtbf
        repeated = from_memory * (self.interval + checkpoints.save) / 2.0
        repeated += from_storage * ((storage_interval + checkpoints.save) / 2.0 + checkpoints.lag)
        restarts = from_memory * checkpoints.restart_memory + from_storage * checkpoints.restart
        return {"checkpoints": saving, "again": repeated, "restarts": restarts}


def long_run(
    *,
    work: float,
    mtbf: float,
    checkpoint_bytes: float,
    checkpoints: CheckpointSchedule,
    interval: float | None = None,
    rate_range: tuple[float, float] = (1.0, 1.0),
    source: str = "as stated",
    spares: int = 0,
) -> Goodput:
    """Goodput of a run with the best interval, or the one given.

    Raises CapacityError where a checkpoint takes longer than its interval, and where the run never finishes.
    """
    save, lag = checkpoints.save, 0.0 if checkpoints.survived else checkpoints.lag
    best = checkpoints.best_interval(mtbf) if interval is None else interval
    chosen = work if math.isinf(best) else max(best, lag + save) if interval is None else best
    if save + lag > chosen:
        raise CapacityError(
            f"never finishes: a checkpoint takes {duration(save + lag)}, longer than the interval of "
            f"{duration(chosen)}; expected a longer interval or faster storage"
        )
    share = float(checkpoints.goodput(chosen, mtbf))
    if not share > NEVER:
        raise CapacityError(
            f"never finishes: a failure every {duration(mtbf)}, {duration(checkpoints.restart)} to restart, "
            f"checkpoints of {engineering(checkpoint_bytes, 'B')} every {duration(chosen)}"
        )
    return Goodput(
        work,
        mtbf,
        checkpoint_bytes=checkpoint_bytes,
        checkpoints=checkpoints,
        interval=chosen,
        share=share,
        rate_range=rate_range,
        source=source,
        spares=spares,
    )


#: Goodput below which a run is said never to finish.
NEVER = 1e-4


def check_room(place: str, needed: float, capacity: float | None) -> None:
    """CapacityError where a checkpoint is larger than the place that is to hold it."""
    if capacity is not None and needed > capacity:
        raise CapacityError(
            f"{place}: a checkpoint of {engineering(needed, 'B')} does not fit into {engineering(capacity, 'B')}"
        )
