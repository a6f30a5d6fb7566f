"""Goodput of a long run: the share of wall time left after checkpoints, lost work and restarts.

All formulas are closed forms that broadcast over arrays. Times between failures are exponential, with the job's mean
time between failures. After each failure the run falls back to its last durable checkpoint and spends ``restart``
seconds until the next new step. Weibull failures with a falling hazard would lose a little less time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from paleo.errors import CapacityError, SpecError, suggest_names
from paleo.operations.base import configure_optimizer
from paleo.operations.contraction import weight_matrix
from paleo.operations.tensor import default_precision
from paleo.specs.prices import occupied_machines, system_reliability
from paleo.specs.system import Reliability
from paleo.step.waiting import normal_quantile
from paleo.units import DAY, GIGA, MEGA, MILLISECOND, SECONDS_PER_YEAR, Quantity, format_duration, format_quantity

if TYPE_CHECKING:
    from paleo.predict import Prediction


Array = npt.NDArray[np.float64]
FloatOrArray = float | Array
#: How a checkpoint reaches storage: training waits for all of it, for the copy to host memory, or for that alone while
#: most failures are survived by the copy in memory.
CheckpointMode = Literal["sync", "async", "memory"]
#: Share of failures that leave the copy in host memory intact (DLRover: three of four restart a process).
_MEMORY_SURVIVAL_SHARE = 0.75


def mean_time_between_failures(
    *, nodes: FloatOrArray, node_rate: FloatOrArray, gpus: FloatOrArray = 0.0, gpu_rate: FloatOrArray = 0.0,
    software_rate: FloatOrArray = 0.0,
) -> Array:  # fmt: skip
    """Return the mean time between failures of a job [s]: 1 / (nodes · node_rate + gpus · gpu_rate + software_rate).

    Parameters
    ----------
    nodes : FloatOrArray
        Nodes of the job.
    node_rate : FloatOrArray
        Failures of one node [1/s].
    gpus : FloatOrArray, optional
        GPUs of the job.
    gpu_rate : FloatOrArray, optional
        Failures of one GPU [1/s].
    software_rate : FloatOrArray, optional
        Failures of the job's software [1/s].

    Returns
    -------
    ndarray
        Seconds; inf if nothing fails. All arguments broadcast.

    Examples
    --------
    >>> round(float(mean_time_between_failures(nodes=2048, node_rate=3.79 / (1000 * 86400))) / 3600, 2)
    3.09
    """
    total = np.asarray(nodes) * node_rate + np.asarray(gpus) * gpu_rate + software_rate
    with np.errstate(divide="ignore"):
        return np.asarray(1.0 / np.asarray(total, dtype=np.float64))


def goodput(
    *, interval: FloatOrArray, save: FloatOrArray, restart: FloatOrArray, mtbf: FloatOrArray, lag: FloatOrArray = 0.0
) -> Array:
    """Return the goodput of a run: the share of wall time that makes new steps, with checkpoints at a fixed interval.

    The goodput is interval / T, where T = M e^(R/M) (e^((interval + save)/M) − 1) is the expected wall time of one
    interval. Failures also strike during saves and restarts R.

    Parameters
    ----------
    interval : FloatOrArray
        Work between checkpoints [s].
    save : FloatOrArray
        Time in which training stops for a checkpoint [s].
    restart : FloatOrArray
        Time from a failure to the next new step [s].
    mtbf : FloatOrArray
        Mean time M between failures [s].
    lag : FloatOrArray, optional
        Time until a checkpoint is durable [s]; a failure falls back that much further on average.

    Returns
    -------
    ndarray
        Share, 0 to 1. All arguments broadcast.

    References
    ----------
    Daly, A higher order estimate of the optimum checkpoint interval, FGCS 22 (2006), eq. 13.

    Examples
    --------
    >>> round(float(goodput(interval=798.0, save=30.0, restart=300.0, mtbf=11135.0)), 3)
    0.904
    """
    m, r, work = (np.asarray(value, dtype=np.float64) for value in (mtbf, restart, interval))
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        segment = m * np.exp((r + np.asarray(lag)) / m) * np.expm1((work + save) / m)
        return np.asarray(np.where(np.isinf(m), work / (work + save), work / segment))


def best_checkpoint_interval(*, save: FloatOrArray, mtbf: FloatOrArray) -> Array:
    """Return the checkpoint interval that maximises `goodput`, the share of wall time that makes new steps.

    The interval is τ = x M with e^(x + δ/M) (1 − x) = 1, solved by Newton's method from √(2 δ M).

    Parameters
    ----------
    save : FloatOrArray
        Time δ in which training stops for a checkpoint [s].
    mtbf : FloatOrArray
        Mean time M between failures [s].

    Returns
    -------
    ndarray
        Interval [s]. All arguments broadcast.

    References
    ----------
    Young, CACM 17 (1974), for the first-order optimum √(2 δ M).

    Examples
    --------
    >>> tau = float(best_checkpoint_interval(save=30.0, mtbf=11135.0))
    >>> bool(goodput(interval=tau, save=30.0, restart=0.0, mtbf=11135.0)
    ...      >= goodput(interval=tau * 1.05, save=30.0, restart=0.0, mtbf=11135.0))
    True
    """
    m = np.asarray(mtbf, dtype=np.float64)
    ratio = np.minimum(np.asarray(save, dtype=np.float64) / m, _HOPELESS)
    x = np.minimum(np.sqrt(2.0 * ratio), 0.999)
    for _ in range(_NEWTON_STEPS):
        grown = np.exp(x + ratio)
        x = np.clip(x + (grown * (1.0 - x) - 1.0) / np.maximum(grown * x, 1e-300), x / 2.0, (1.0 + x) / 2.0)
    return np.asarray(np.where(np.isinf(m), np.inf, x * m))


_NEWTON_STEPS = 60
#: Seconds of a checkpoint over the mean time between failures from which on no interval is better than another.
_HOPELESS = 100.0


def two_level_goodput(
    *, memory_interval: FloatOrArray, memory_save: FloatOrArray, storage_interval: FloatOrArray,
    storage_save: FloatOrArray, restart_memory: FloatOrArray, restart_storage: FloatOrArray, mtbf: FloatOrArray,
    survived: float = _MEMORY_SURVIVAL_SHARE, lag: FloatOrArray = 0.0,
) -> Array:  # fmt: skip
    """Return the goodput of a run with checkpoints at two levels, in host memory and in storage.

    The goodput is (w − Σ p_i l_i / M) / (1 + Σ p_i r_i / M), summed over the two levels i:

    - w = 1 / (1 + Σ δ / τ) is the share of running time that is not saving;
    - p_i is the share of failures from which level i recovers, and l_i the mean work lost;
    - r_i = M (e^(R_i/M) − 1) is the restart time, with failures during restarts.

    The mean age of a copy at a failure is M − s / (e^(s/M) − 1), with s the time between copies. Copies in storage are
    older by `lag`.

    Parameters
    ----------
    memory_interval : FloatOrArray
        Work between copies in host memory [s].
    memory_save : FloatOrArray
        Time in which training stops for a copy in host memory [s].
    storage_interval : FloatOrArray
        Work between copies in storage [s].
    storage_save : FloatOrArray
        Time in which training stops for a copy in storage [s].
    restart_memory : FloatOrArray
        Time of a restart from host memory [s].
    restart_storage : FloatOrArray
        Time of a restart from storage [s].
    mtbf : FloatOrArray
        Mean time M between failures [s].
    survived : float, optional
        Share of failures that the copies in memory survive.
    lag : FloatOrArray, optional
        Time until a copy in storage is durable [s].

    Returns
    -------
    ndarray
        Share, 0 to 1. All arguments broadcast.

    References
    ----------
    Moody et al., Design, modeling, and evaluation of a scalable multi-level checkpointing system, SC 2010.
    """
    m = np.asarray(mtbf, dtype=np.float64)
    running = 1.0 / (1.0 + memory_save / np.asarray(memory_interval) + storage_save / np.asarray(storage_interval))
    fast = _age(np.asarray(memory_interval) / running, m)
    slow = _age(np.asarray(storage_interval) / running, m) + lag
    lost = (survived * fast + (1.0 - survived) * slow) * running
    restarts = survived * np.expm1(restart_memory / m) + (1.0 - survived) * np.expm1(restart_storage / m)
    return np.asarray(np.clip(running - lost / m, 0.0, 1.0) / (1.0 + restarts))


def _age(between: FloatOrArray, mtbf: Array) -> Array:
    """Return the mean age of the last checkpoint copy when a failure strikes [s].

    Copies are ``between`` seconds apart, and ``mtbf`` is the mean time between failures [s].
    """
    with np.errstate(invalid="ignore", divide="ignore"):
        aged = mtbf - between / np.expm1(between / mtbf)
    return np.where(np.asarray(between) < _SHORT * mtbf, np.asarray(between) / 2.0, aged)


#: Below this share of the mean time between failures the age of a copy is half the time between two.
_SHORT = 1e-4


def _write_time(
    total_bytes: float, process_rate: float, processes: float, storage_rate: float, *,
    nodes: float = 1.0, node_rate: float = math.inf,
) -> float:  # fmt: skip
    """Return the time to write a checkpoint to storage [s]; processes, node links or storage limit the rate [byte/s].

    >>> _write_time(2e10, process_rate=1e9, processes=8, storage_rate=4e9)
    5.0
    """
    return max(total_bytes / (process_rate * processes), total_bytes / (node_rate * nodes), total_bytes / storage_rate)


def spare_node_count(*, nodes: float, node_rate: float, repair: float, quantile: float = 0.99) -> int:
    """Return the number of spare nodes that replace all failed nodes during their repair, with a given probability.

    The number of failed nodes is Poisson-distributed with mean nodes · node_rate · repair.

    Parameters
    ----------
    nodes : float
        Nodes of the job.
    node_rate : float
        Failures of one node [1/s].
    repair : float
        Time to repair a node [s].
    quantile : float, optional
        Probability that the spares suffice.

    Returns
    -------
    int
        Number of spare nodes.

    Examples
    --------
    >>> spare_node_count(nodes=2048, node_rate=4.0 / (1000 * 86400), repair=86400.0)
    16
    """
    mean = nodes * node_rate * repair
    if mean > _NORMAL:
        return math.ceil(mean + float(normal_quantile(quantile)) * math.sqrt(mean))
    return int(np.searchsorted(np.cumsum(_poisson(mean)), quantile))


#: Mean from which on a law of Poisson is taken as normal.
_NORMAL = 400.0


def mean_node_replacement_time(*, mean_in_repair: float, spares: int, repair: float, swap: float) -> float:
    """Return the expected time until a failed node of a run is replaced [s].

    With a free spare node the time is `swap`. Otherwise the run waits for the first repaired node, repair / (k + 1)
    with k other nodes in repair. The number of nodes in repair is Poisson-distributed.

    Parameters
    ----------
    mean_in_repair : float
        Mean number of nodes in repair.
    spares : int
        Spare nodes.
    repair : float
        Time to repair a node [s].
    swap : float
        Time to take in a spare node [s].

    Returns
    -------
    float
        Time [s].

    Examples
    --------
    >>> round(mean_node_replacement_time(mean_in_repair=1.0, spares=0, repair=86400.0, swap=30.0))  # repair (1 - 1/e)
    54615
    """
    if mean_in_repair > _NORMAL:
        return swap if spares > mean_in_repair else max(repair / (mean_in_repair + 1.0), swap)
    probabilities = _poisson(mean_in_repair)
    counts = np.arange(len(probabilities))
    waits = np.where(counts < spares, swap, np.maximum(repair / (counts + 1.0), swap))
    return float(np.sum(probabilities * waits) / np.sum(probabilities))


#: Standard deviations up to which the law of Poisson is summed.
_TAIL = 8.0


def _poisson(mean: float) -> Array:
    """Return the Poisson probabilities of 0, 1, 2, … up to `_TAIL` standard deviations above a mean of up to `_NORMAL`.

    >>> _poisson(1.0)[:3].round(3).tolist()
    [0.368, 0.368, 0.184]
    """
    counts = np.arange(math.ceil(mean + _TAIL * math.sqrt(mean) + _TAIL) + 1.0)
    ratios = np.divide(mean, counts, out=np.ones_like(counts), where=counts > 0)
    return np.asarray(math.exp(-mean) * np.cumprod(ratios))


def elastic_goodput(*, base: FloatOrArray, replicas: FloatOrArray, failures_in_repair: FloatOrArray) -> Array:
    """Return the goodput of an elastic run, which goes on with the remaining replicas while others are repaired.

    Parameters
    ----------
    base : FloatOrArray
        Goodput with all replicas.
    replicas : FloatOrArray
        Data-parallel replicas n.
    failures_in_repair : FloatOrArray
        Mean number k of replicas in repair.

    Returns
    -------
    ndarray
        Goodput base · (1 − k / n), from 0 to 1. All arguments broadcast.
    """
    return np.asarray(base * (1.0 - np.asarray(failures_in_repair) / np.asarray(replicas)))


@dataclass(frozen=True, slots=True)
class RestartTimes:
    """Times of the parts of a restart after a failure [s]: detect the failure, replace the node, launch, warm up.

    Defaults are those of a well-run cluster with health checks and spares: Llama 3's goodput of 90 % at a failure every
    3.1 h leaves 340 s for the whole restart. Without health checks, detection waits for the time-out of collectives
    (10 min in PyTorch). Restarts by hand take hours.
    """

    detect: float = 60.0
    replace: float = 30.0
    launch: float = 60.0
    warm_up: float = 30.0

    def total_time(self, load: float, replace: float | None = None) -> float:
        """Return the time from a failure to the next new step: detect, replace, launch, load and warm up.

        Parameters
        ----------
        load : float
            Time to read the checkpoint [s].
        replace : float, optional
            Time until a spare node replaces the failed one [s]; by default the field ``replace``.

        Returns
        -------
        float
            Time [s].
        """
        return self.detect + (self.replace if replace is None else replace) + self.launch + load + self.warm_up


@dataclass(frozen=True, slots=True)
class _Boot:
    """Boot time of a rented cloud machine [s], from order to first response, with the 90 % range of its mean."""

    seconds: float
    low: float
    high: float
    source: str


#: Machines of a cloud that are kept, and such as may be taken away again.
ON_DEMAND_BOOT_TIME = _Boot(69.0, 63.0, 76.0, "CM-DARE, 55 GPU machines of Google Cloud, two regions, K80 and P100")
SPOT_BOOT_TIME = _Boot(87.0, 78.0, 96.0, "CM-DARE, 45 preemptible GPU machines of Google Cloud, likewise")


@dataclass(frozen=True, slots=True)
class CheckpointTimes:
    """Times of the checkpoints and restarts of a run [s], from which its goodput follows.

    Training stops for ``save``, a copy is durable ``durable_lag`` later, and ``restart`` is the time from a failure to
    the next new step.

    ``memory_survival_share`` is the share of failures that leave a copy in host memory intact. These failures take
    ``restart_memory`` and lose the work since that copy; others fall back to storage, which is written in the
    background. With ``replicas`` above zero the run is elastic: a failure stops all replicas for ``restart``, after
    which the failed replica is missing for ``repair`` seconds.
    """

    save: float
    restart: float
    durable_lag: float = 0.0
    memory_survival_share: float = 0.0
    restart_memory: float = 0.0
    replicas: int = 0
    repair: float = 0.0

    def best_interval(self, mtbf: float) -> float:
        """Return the checkpoint interval with the highest goodput; for copies in host memory an approximation.

        Parameters
        ----------
        mtbf : float
            Mean time between failures [s].

        Returns
        -------
        float
            Time [s].
        """
        mean = mtbf / self.memory_survival_share if self.memory_survival_share else mtbf
        return float(best_checkpoint_interval(save=self.save, mtbf=mean))

    def storage_checkpoint_interval(self, interval: float) -> float:
        """Return the time between checkpoint copies in storage: at least the time in which one copy is written.

        Parameters
        ----------
        interval : float
            Work between checkpoints [s].

        Returns
        -------
        float
            Time [s].
        """
        return max(interval, self.durable_lag)

    def goodput(self, interval: FloatOrArray, mtbf: FloatOrArray) -> Array:
        """Return the goodput of a run under these checkpoints: the share of wall time that makes new steps.

        Parameters
        ----------
        interval : FloatOrArray
            Work between checkpoints [s].
        mtbf : FloatOrArray
            Mean time between failures [s].

        Returns
        -------
        ndarray
            Share, 0 to 1. All arguments broadcast.
        """
        if self.replicas:
            standing = 1.0 - self.restart / np.asarray(mtbf, dtype=np.float64)
            base = np.maximum(standing, 0.0) / (1.0 + self.save / np.asarray(interval))
            return elastic_goodput(base=base, replicas=self.replicas, failures_in_repair=self.repair / np.asarray(mtbf))
        if self.memory_survival_share:
            return two_level_goodput(
                memory_interval=interval, memory_save=self.save, storage_save=0.0, lag=self.durable_lag,
                storage_interval=np.maximum(interval, self.durable_lag), restart_memory=self.restart_memory,
                restart_storage=self.restart, mtbf=mtbf, survived=self.memory_survival_share,
            )  # fmt: skip
        return goodput(interval=interval, save=self.save, restart=self.restart, mtbf=mtbf, lag=self.durable_lag)


@dataclass(frozen=True, slots=True)
class LongRun:
    """Duration of a long run with failures: goodput, expected wall time [s] and its 10th to 90th percentile.

    ``failure_free_time`` [s] is the time of all steps without failures, and ``job_mtbf`` [s] the job's mean time
    between failures. ``failure_rate_range`` is the range of failure rates relative to the assumed rate, and
    ``failure_rate_source`` names where that rate is from. ``spares`` is the number of spare nodes that are paid
    for: by default enough for 99 % of repairs, and none on a cloud that boots new nodes.
    """

    failure_free_time: float
    job_mtbf: float
    checkpoint_bytes: float
    checkpoints: CheckpointTimes
    checkpoint_interval: float
    goodput: float
    failure_rate_range: tuple[float, float] = (1.0, 1.0)
    failure_rate_source: str = "as stated"
    spares: int = 0

    @property
    def save(self) -> float:
        """Time for which training stops to save a checkpoint [s]."""
        return self.checkpoints.save

    @property
    def restart(self) -> float:
        """Time from a failure to the next new step [s]."""
        return self.checkpoints.restart

    @property
    def wall_time(self) -> float:
        """Expected wall time of the run with checkpoints, lost work and restarts [s]."""
        return self.failure_free_time / self.goodput

    @property
    def expected_failures(self) -> float:
        """Expected number of failures until the run ends."""
        return self.wall_time / self.job_mtbf if math.isfinite(self.job_mtbf) else 0.0

    @property
    def goodput_range(self) -> tuple[float, float]:
        """Goodput (0 to 1) at the highest and at the lowest failure rate of the range, with the same interval."""
        ends = self.checkpoints.goodput(self.checkpoint_interval, self.job_mtbf / np.array(self.failure_rate_range))
        return float(ends[1]), float(ends[0])

    @property
    def wall_time_interval(self) -> tuple[float, float]:
        """10th and 90th percentile of the wall time [s].

        The number n of failures is Poisson-distributed. Each loses the restart R and work that is uniform over the
        interval τ, which gives the variance n (R² + R τ + τ²/3). The failure rate is lognormal, its range holds nine of
        ten clusters, and the lost time is proportional to the rate.
        """
        variance = self.restart**2 + self.restart * self.checkpoint_interval + self.checkpoint_interval**2 / 3.0
        low, high = self.failure_rate_range
        rate_sigma = math.log(high / low) / (2.0 * float(normal_quantile(0.95)))
        lost = (self.wall_time - self.failure_free_time) * rate_sigma
        tail = float(normal_quantile(0.9)) * math.sqrt(self.expected_failures * variance + lost**2)
        return max(self.failure_free_time, self.wall_time - tail), self.wall_time + tail

    @property
    def lost_time_shares(self) -> dict[str, float]:
        """Shares (0 to 1) of the wall time lost to checkpoints, repeated work and restarts, by name, to first order.

        An elastic run loses, instead of repeated work, the time of missing replicas.
        """
        saving = self.save / self.checkpoint_interval
        if math.isinf(self.job_mtbf):
            return {"checkpoints": saving, "again": 0.0, "restarts": 0.0}
        checkpoints = self.checkpoints
        if checkpoints.replicas:
            absence = checkpoints.repair / self.job_mtbf / checkpoints.replicas
            return {"checkpoints": saving, "restarts": checkpoints.restart / self.job_mtbf, "replicas away": absence}
        storage_interval = checkpoints.storage_checkpoint_interval(self.checkpoint_interval)
        survived = checkpoints.memory_survival_share
        from_memory, from_storage = survived / self.job_mtbf, (1.0 - survived) / self.job_mtbf
        repeated = from_memory * (self.checkpoint_interval + checkpoints.save) / 2.0
        repeated += from_storage * ((storage_interval + checkpoints.save) / 2.0 + checkpoints.durable_lag)
        restarts = from_memory * checkpoints.restart_memory + from_storage * checkpoints.restart
        return {"checkpoints": saving, "again": repeated, "restarts": restarts}


def _long_run(
    *,
    work: float,
    mtbf: float,
    checkpoint_bytes: float,
    checkpoints: CheckpointTimes,
    interval: float | None = None,
    rate_range: tuple[float, float] = (1.0, 1.0),
    source: str = "as stated",
    spares: int = 0,
) -> LongRun:
    """Return goodput and duration of a run that takes ``work`` seconds without failures.

    The checkpoint interval is the given one, or the best. CapacityError is raised if a checkpoint takes longer than its
    interval, or if the run never finishes.
    """
    save, lag = checkpoints.save, 0.0 if checkpoints.memory_survival_share else checkpoints.durable_lag
    best = checkpoints.best_interval(mtbf) if interval is None else interval
    chosen = work if math.isinf(best) else max(best, lag + save) if interval is None else best
    if save + lag > chosen:
        raise CapacityError(
            f"never finishes: a checkpoint takes {format_duration(save + lag)}, longer than the interval of "
            f"{format_duration(chosen)}; expected a longer interval or faster storage"
        )
    share = float(checkpoints.goodput(chosen, mtbf))
    if not share > _NEVER:
        raise CapacityError(
            f"never finishes: a failure every {format_duration(mtbf)}, {format_duration(checkpoints.restart)} to "
            f"restart, checkpoints of {format_quantity(checkpoint_bytes, 'B')} every {format_duration(chosen)}"
        )
    return LongRun(work, mtbf, checkpoint_bytes, checkpoints, chosen, share, rate_range, source, spares)


#: Goodput below which a run is said never to finish.
_NEVER = 1e-4


def _check_room(place: str, needed: float, capacity: float | None) -> None:
    """Raise CapacityError if a checkpoint of ``needed`` bytes exceeds the ``capacity`` [byte] of ``place``."""
    if capacity is not None and needed > capacity:
        sizes = f"{format_quantity(needed, 'B')} does not fit into {format_quantity(capacity, 'B')}"
        raise CapacityError(f"{place}: a checkpoint of {sizes}")


_Entry = TypeVar("_Entry")


@dataclass(frozen=True, slots=True)
class _Writer:
    """Speed of a checkpointing library: ``rate`` at which one process writes [byte/s].

    ``single`` is True if one process writes for all. ``passes`` is how often the whole state then passes through it, as
    sharded states are gathered first. ``copy_rate`` is the rate of a process into host memory [byte/s], and ``pause``
    the time for which an asynchronous save stops training [s].
    """

    rate: float
    single: bool = False
    passes: float = 1.0
    copy_rate: float = 10.0 * GIGA
    pause: float = 0.2
    source: str = ""


#: Writers by words of the software, the first that fits.
_WRITERS: dict[str, _Writer] = {
    "torch.save": _Writer(0.6 * GIGA, single=True, source="torchsnapshot benchmark: 20 GB in 32 s, whatever the GPUs"),
    "torchsnapshot": _Writer(1.4 * GIGA, source="torchsnapshot benchmark: 20 GB from one process in 14 s"),
    "fsdp": _Writer(1.2 * GIGA, single=True, passes=2.8, source="whole state gathered on rank 0 and copied before it "
                   "is written (DLRover's chart: 51 s against 18)"),
    "zero-1": _Writer(0.75 * GIGA, source="as ZeRO-3, with weights from one process besides"),
    "zero": _Writer(1.2 * GIGA, source="a file a rank (DLRover's chart, NVMe)"),
    "ddp": _Writer(1.2 * GIGA, single=True, source="rank 0 writes (DLRover's chart, NVMe)"),
    "megatron": _Writer(1.2 * GIGA, source="a file a model-parallel rank"),
    "tensorflow": _Writer(1.0 * GIGA, single=True, source="CM-DARE: never the limit"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointStorage:
    """Speed of a checkpoint storage: total and per-node bandwidth [byte/s], fixed times per save and per tensor [s]."""

    rate: float = math.inf
    node_rate: float = math.inf
    seconds_per_save: float = 0.0
    seconds_per_tensor: float = 0.0
    source: str = ""


#: Storages by words of their names, the first that fits.
_STORAGES: dict[str, CheckpointStorage] = {
    "google cloud": CheckpointStorage(rate=61.0 * MEGA, seconds_per_save=3.14, seconds_per_tensor=0.5 * MILLISECOND,
                            source="fitted to CM-DARE's saves (16 rows, 3 %)"),
    "local disk": CheckpointStorage(rate=1.0 * GIGA, seconds_per_tensor=3.7 * MILLISECOND,
                          source="CM-DARE's worker's disk: time goes by tensors, not by bytes (13 rows)"),
    "local file": CheckpointStorage(node_rate=5.5 * GIGA, source="instance NVMe of p4d, 8 processes"),
    "lustre": CheckpointStorage(node_rate=2.6 * GIGA, rate=8.0 * GIGA, source="FSx for Lustre from p4d"),
    "nas": CheckpointStorage(rate=0.15 * GIGA, source="DLRover's NAS beats the 100 MB/s that its chart states"),
    "cpfs": CheckpointStorage(rate=9.0 * GIGA, source="GLM-65B: 910 GB in 102 s"),
    "gpfs": CheckpointStorage(rate=60.0 * GIGA, source="BLOOM: 2.3 TB in 40 s on NVMe"),
    "nvme": CheckpointStorage(rate=2.0 * GIGA, source="a drive"),
}  # fmt: skip


def storage_by_name(name: str, rate: float | None = None) -> CheckpointStorage:
    """Return bandwidths and fixed times of a checkpoint storage by its name, such as ``lustre``.

    Parameters
    ----------
    name : str
        Such as ``nvme`` or ``lustre``; part of a longer name suffices.
    rate : float, optional
        Write rate of an unknown storage [byte/s].

    Returns
    -------
    CheckpointStorage
        The known storage, or one of the given rate.

    Raises
    ------
    SpecError
        If the name is unknown and has no rate.
    """
    if rate is None or any(word in name.lower() for word in _STORAGES):
        return _by_word("storage", name, _STORAGES)
    return CheckpointStorage(rate=rate)


def _by_word(kind: str, name: str, table: Mapping[str, _Entry]) -> _Entry:
    entry = next((value for word, value in table.items() if word in name.lower()), None)
    if entry is None:
        raise SpecError(f"{kind}: {name!r} is not known; {suggest_names(name, table)}")
    return entry


def checkpoint_pause(
    *,
    total_bytes: float,
    software: str,
    processes: float,
    nodes: float,
    storage: CheckpointStorage,
    mode: CheckpointMode = "sync",
    tensors: float = 0.0,
) -> float:
    """Return the time for which training stops to save a checkpoint, by checkpointing library and storage.

    Training stops for the whole write, or only for the copy to host memory. Libraries that gather sharded states on one
    rank do so only within a node; over several nodes each rank writes its shard.

    Parameters
    ----------
    total_bytes : float
        Size of the checkpoint [byte].
    software : str
        Name of the checkpointing library, such as ``torch.save`` or ``megatron``.
    processes : float
        Number of ranks that write.
    nodes : float
        Nodes of the run.
    storage : CheckpointStorage
        Storage that takes the checkpoint.
    mode : CheckpointMode, optional
        ``sync`` or a mode that copies to host memory first.
    tensors : float, optional
        Number of tensors in the checkpoint.

    Returns
    -------
    float
        Time [s].
    """
    writer = _by_word("software", software, _WRITERS)
    single = writer.single and not (writer.passes > 1.0 and nodes > 1)
    writing, passes = (1.0, writer.passes) if single else (processes, 1.0)
    if mode != "sync":
        return writer.pause + total_bytes / (writer.copy_rate * writing)
    storing = {"nodes": 1.0 if single else nodes, "node_rate": storage.node_rate}
    written = _write_time(total_bytes * passes, writer.rate, writing, storage.rate * passes, **storing)
    return written + storage.seconds_per_save + tensors * storage.seconds_per_tensor


#: Bytes kept of a parameter: weight in 16 bits, fp32 master and two states of Adam.
CHECKPOINT_BYTES_PER_PARAMETER = 14.0


#: What shared storage takes in where nobody states it [byte/s]: a parallel file system of a large cluster.
_STORAGE_RATE = 100.0 * GIGA
#: Bytes per second that a process copies into host memory, and seconds that the call takes.
_COPY_RATE, _PAUSE = 10.0 * GIGA, 0.2
#: How long a failed node is away where nobody states it: a technician a day.
_REPAIR = DAY


def _quantity(
    option: str, text: str | None, dimension: str, default: _Entry, *, positive: bool = False
) -> float | _Entry:
    """Convert the text of a command-line option to SI units; raise SpecError, which names the option, if it fails."""
    if text is None:
        return default
    try:
        return Quantity(dimension, positive).parse_text(text)
    except SpecError as error:
        raise SpecError(f"--{option} {error}") from None


@dataclass(frozen=True, slots=True)
class LongRunOptions:
    """Command-line options on failures and checkpoints, as texts; None where an option is not given."""

    failures: str | None = None
    checkpoint: str | None = None
    checkpointing: str | None = None
    storage: str | None = None
    storage_size: str | None = None
    restart: str | None = None
    spares: int | None = None
    repair: str | None = None
    elastic: bool = False


def parse_long_run(*, goodput: bool = False, **options: Any) -> LongRunOptions | None:
    """Collect the options on failures and checkpoints of a long run.

    Parameters
    ----------
    goodput : bool, optional
        Count failures even if no option is given.
    **options : Any
        Fields of `LongRunOptions`.

    Returns
    -------
    LongRunOptions, optional
        The options; None if failures are not asked for.
    """
    stated = LongRunOptions(**options)
    return stated if goodput or stated != LongRunOptions() else None


def _checkpoint_bytes(prediction: Prediction) -> float:
    """Return the size of a checkpoint of a run [byte]: weights, fp32 master weights and optimizer states, each once."""
    formats = default_precision(prediction.plan.dtype)
    rule, matrices = configure_optimizer(prediction.run.optimizer), 0.0
    if rule.matrix_update is not None:
        for node in prediction.graph.nodes:
            whole = [weight_matrix(tensor, node.operations) for tensor in node.parameters.values()]
            more = sum(rule.matrix_update.state_count(m) - rule.state_count * m.elements for m in whole if m)
            matrices += more * node.repeat
    bytes_of_parameter = formats.parameter_bytes + rule.state_bytes(formats)
    return float(prediction.graph.parameters * bytes_of_parameter + matrices * formats.state_bytes)


@dataclass(frozen=True, slots=True)
class Interruption:
    """Cost in time of stopping a run on purpose and continuing it later, as a cluster scheduler does.

    ``save`` is the time to write a checkpoint, ``launch_time`` to launch and warm up processes, and ``restore`` to
    read the checkpoint [s]. ``goodput`` is the goodput while the run lasts (0 to 1), and ``mtbf`` its mean time between
    failures [s]. ``seconds_lost_per_failure`` is the mean restart time and lost work of one failure [s].
    """

    save: float
    launch_time: float
    restore: float
    goodput: float = 1.0
    mtbf: float = math.inf
    seconds_lost_per_failure: float = 0.0


def interruption_of(prediction: Prediction, options: LongRunOptions) -> Interruption:
    """Return the times that a predicted run needs to save, restart and recover, from its storage and failure rates.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.
    options : LongRunOptions
        Failures, checkpoints, spares.

    Returns
    -------
    Interruption
        Times of saves, starts and restores [s], and the goodput between them.

    Raises
    ------
    SpecError
        If an option is not valid.
    CapacityError
        If the run never finishes or its checkpoint does not fit into the storage.
    """
    long, path = predict_long_run(prediction, SECONDS_PER_YEAR, options), RestartTimes()
    restore = long.checkpoint_bytes / _checkpoint_storage_bandwidth(options)
    lost = long.restart + min(long.checkpoint_interval, SECONDS_PER_YEAR) / 2.0
    return Interruption(long.save, path.launch + path.warm_up, restore, long.goodput, long.job_mtbf, lost)


def predict_long_run(prediction: Prediction, work: float, options: LongRunOptions) -> LongRun:
    """Predict goodput and wall time of a long run with failures and checkpoints.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.
    work : float
        Time of all steps of the run without failures [s].
    options : LongRunOptions
        Failures, checkpoints, spares.

    Returns
    -------
    LongRun
        Goodput, duration and its interval.

    Raises
    ------
    SpecError
        If an option is not valid.
    CapacityError
        If a checkpoint does not fit or the run never finishes.
    """
    nodes = occupied_machines(prediction.system, prediction.plan.gpus)
    rates = system_reliability(prediction.system)
    if options.failures is not None:  # failures per node and second, such as ``4/knodeday`` or ``0.004/nodeday``
        rate = _quantity("failures", options.failures, "failures", 0.0)
        rates = Reliability.model_construct(failures=rate, low=rate, high=rate, source="as stated")
    repair = _quantity("repair", options.repair, "time", _REPAIR)
    spares = options.spares
    if spares is None:
        ready = prediction.system.price_per_node is None
        spares = spare_node_count(nodes=nodes, node_rate=rates.failures, repair=repair) if ready else 0
    return _long_run(
        work=work,
        mtbf=float(mean_time_between_failures(nodes=nodes, node_rate=rates.failures)),
        checkpoint_bytes=_checkpoint_bytes(prediction),
        checkpoints=_checkpoints_of(prediction, options, in_repair=nodes * rates.failures * repair, repair=repair),
        interval=_checkpoint_interval(options.checkpoint, prediction.step_time),
        rate_range=(rates.low / rates.failures, rates.high / rates.failures) if rates.failures else (1.0, 1.0),
        source=rates.source,
        spares=spares,
    )


def goodput_of_prediction(prediction: Prediction, options: LongRunOptions) -> float:
    """Return the goodput of a predicted run with failures and checkpoints; the length of the run does not matter.

    Parameters
    ----------
    prediction : Prediction
        Prediction of the run.
    options : LongRunOptions
        Failures, checkpoints, spares.

    Returns
    -------
    float
        Share, 0 to 1; 0 if the run never finishes or its checkpoints do not fit.
    """
    try:
        return predict_long_run(prediction, SECONDS_PER_YEAR, options).goodput
    except CapacityError:
        return 0.0


def _checkpoints_of(
    prediction: Prediction, options: LongRunOptions, *, in_repair: float, repair: float
) -> CheckpointTimes:  # fmt: skip
    """Return the checkpoint and restart times of a predicted run under its options.

    On average ``in_repair`` nodes are in repair at a time, each for ``repair`` seconds.
    """
    total, plan = _checkpoint_bytes(prediction), prediction.plan
    nodes = occupied_machines(prediction.system, plan.gpus)
    rate = _checkpoint_storage_bandwidth(options)
    copy = total / plan.gpus / _COPY_RATE
    _check_room("storage", total, _quantity("storage-size", options.storage_size, "bytes", None, positive=True))
    mode, writer = cast("CheckpointMode", options.checkpointing or "sync"), _WRITERS["megatron"].rate
    if mode not in get_args(CheckpointMode):
        raise SpecError(f"--checkpointing {mode!r} is none of {', '.join(get_args(CheckpointMode))}")
    write, pause, path = _write_time(total, writer, plan.gpus, rate), _PAUSE + copy, RestartTimes()
    # Compute the seconds until a node is replaced: by a spare, by a cloud machine that boots, or by the first
    # repaired one.
    replace = path.replace if prediction.system.price_per_node is None else ON_DEMAND_BOOT_TIME.seconds
    if options.spares is not None:
        replace = mean_node_replacement_time(
            mean_in_repair=in_repair, spares=options.spares, repair=repair, swap=path.replace
        )
    restart = _quantity("restart", options.restart, "time", path.total_time(total / rate, replace))
    if options.elastic:
        if plan.dp < 2 or plan.strategy.zero:
            lacks = f"--elastic: {plan.strategy_text or 'one GPU'} has no replica that others can do without"
            raise SpecError(f"{lacks}; expected dp of 2 or more whose states are not sharded (zero=0)")
        standing = path.detect + path.warm_up if options.restart is None else restart
        save, absence = write if mode == "sync" else pause, replace + path.launch + copy
        return CheckpointTimes(save, standing, 0.0, replicas=plan.dp, repair=absence)
    if mode == "sync":
        return CheckpointTimes(write, restart)
    if mode == "async":
        return CheckpointTimes(pause, restart, write)
    host = prediction.system.host
    if host is not None and host.memory is not None:
        _check_room("host memory of a node", (total / nodes), host.memory)
    memory_restart = min(path.total_time(copy, 0.0), restart)
    return CheckpointTimes(pause, restart, write, _MEMORY_SURVIVAL_SHARE, memory_restart)


def _checkpoint_storage_bandwidth(options: LongRunOptions) -> float:
    """Return the bandwidth of the checkpoint storage: that of the option, or 100 GB/s by default.

    Parameters
    ----------
    options : LongRunOptions
        Options of a long run.

    Returns
    -------
    float
        Rate [byte/s].

    Raises
    ------
    SpecError
        If the option is not valid.
    """
    return _quantity("storage", options.storage, "bandwidth", _STORAGE_RATE, positive=True)


def _checkpoint_interval(text: str | None, step_time: float) -> float | None:
    """Convert ``30min`` or ``250steps`` to the time between checkpoints [s]; None for ``auto``, the best interval."""
    if text in (None, "auto"):
        return None
    if steps := re.match(r"\s*(\d{1,15})\s*steps?\s*\Z", str(text)):
        return float(steps.group(1)) * step_time
    try:
        return Quantity("time").parse_text(text)
    except SpecError:
        expected = "expected auto, a time as 30min or whole steps as 250steps"
        raise SpecError(f"--checkpoint {text!r:.60}: {expected}") from None
