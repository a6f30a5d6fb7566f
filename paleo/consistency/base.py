"""Consistency models: how workers that train one network exchange updates, and when they wait for one another.

A model takes the `DataParallelWorkload` of equal workers. It returns how fast they update the network and how stale
their gradients are. Every field is a number or an array of configurations, and formulas broadcast. A module of this
folder registers its model under the name that ``--consistency`` takes; the text after a colon is its argument::

    @CONSISTENCY.register("ssp")
    def ssp(argument: str) -> Consistency: ...

The time to a quality is not predicted here: a stale gradient may need more updates, and no law of this holds for all
networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.registry import Registry
from paleo.step.waiting import Numeric, straggler_wait_share

if TYPE_CHECKING:
    from paleo.specs.run import Run


Array = npt.NDArray[np.float64]
#: Bytes of a number in the fp32 copies of outer optimizers and averaged models.
FP32_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class ParameterServers:
    """Parameter servers that receive gradients from workers, apply them and send parameters back.

    ``seconds_per_tensor`` [s] is the software time for each tensor that is pushed and pulled. ``bandwidth`` [byte/s] is
    the rate of one server for all three tasks together; ``count`` servers hold equal parts of the parameters.
    """

    seconds_per_tensor: float
    bandwidth: float
    count: int = 1

    @property
    def fullest_server_share(self) -> float:
        """Fraction of a worker's gradients that the most loaded parameter server receives."""
        return 1.0 / self.count


@dataclass(frozen=True, slots=True)
class DataParallelWorkload:
    """Work of one of several equal data-parallel workers, in seconds and bytes: the input of a consistency model.

    ``compute_time`` is the time of a worker's step without any exchange between workers, including its optimizer.
    ``all_reduce_time`` is the time in which all workers sum their gradients or average their parameters.
    ``overlapped_exchange_time`` is the part of it that a synchronous step overlaps with computation; it is negative if
    the overlapped buckets slow the step more than they hide. ``neighbour_exchange_time`` is the time in which a worker
    sends its payload to one other worker. ``payload`` is the bytes of gradients that a worker sends in a step,
    ``parameter_count`` the elements that it holds, and ``tensors`` their number of tensors. ``jitter`` and
    ``persistent_jitter`` are the independent and the persistent noise of a worker's step, as fractions of its mean
    (`paleo.step.waiting`). ``round_trip`` is the time of a step's messages to the server and back [s]. ``server`` holds
    the parameter servers, None without any.
    """

    workers: Numeric
    compute_time: Numeric
    all_reduce_time: Numeric
    overlapped_exchange_time: Numeric
    neighbour_exchange_time: Numeric
    payload: Numeric
    parameter_count: Numeric
    tensors: Numeric
    jitter: Numeric = 0.0
    persistent_jitter: Numeric = 0.0
    round_trip: Numeric = 0.0
    server: ParameterServers | None = None

    @property
    def exposed_all_reduce_time(self) -> Array:
        """Time of the sum of gradients that a synchronous step does not overlap with computation [s]."""
        return np.asarray(self.all_reduce_time - np.minimum(self.overlapped_exchange_time, self.all_reduce_time))

    @property
    def waiting_share(self) -> Array:
        """Fraction of a mean step that workers of a synchronous step wait for the slowest worker."""
        return straggler_wait_share(self.workers, self.jitter, self.persistent_jitter)


@dataclass(frozen=True, slots=True)
class ConsistencyResult:
    """Speed and gradient staleness of a workload under a consistency model, as arrays over configurations.

    ``step_time`` is the time between two steps of one worker, including exchange and waiting. ``updates_per_s`` counts
    updates of the shared model: synchronous models count a step of all workers as one, asynchronous ones count each
    worker's. ``exposed_time`` is the time of a step spent on exchange or waiting. ``bytes_per_s`` is the rate at which
    a worker sends. ``staleness_mean`` and ``staleness_sd`` describe the number of updates by others between a worker's
    read and its write. ``extra_memory`` is the bytes that a worker holds in addition to a synchronous one.
    ``utilization`` is the busy fraction of the fullest server, and ``knee`` the number of workers above which it is the
    limit (nan without a server).
    """

    step_time: Array
    updates_per_s: Array
    exposed_time: Array
    bytes_per_s: Array
    staleness_mean: Array
    staleness_sd: Array
    extra_memory: Array
    utilization: Array
    knee: Array

    @classmethod
    def from_step_time(
        cls,
        workload: DataParallelWorkload,
        step: Numeric,
        *,
        updates_per_step: Numeric = 1.0,
        sent: Numeric = 0.0,
        staleness: tuple[Numeric, Numeric] = (0.0, 0.0),
        extra_memory: Numeric = 0.0,
        server: tuple[Numeric, Numeric] = (np.nan, np.nan),
    ) -> ConsistencyResult:
        """Build the result of a consistency model from numbers or arrays, broadcast to one shape.

        Parameters
        ----------
        workload : DataParallelWorkload
            Times and sizes of one worker's step.
        step : array-like
            Time of a worker's step [s].
        updates_per_step : array-like, default 1.0
            Updates of the model while one worker makes a step.
        sent : array-like, default 0.0
            Bytes that a worker sends per step.
        staleness : tuple of (array-like, array-like), default (0.0, 0.0)
            Mean and standard deviation of the number of updates that a gradient misses.
        extra_memory : array-like, default 0.0
            Memory of a worker beyond that of a synchronous one [byte].
        server : tuple of (array-like, array-like), default (np.nan, np.nan)
            Busy fraction of the fullest parameter server, and the number of workers above which it is the limit.

        Returns
        -------
        ConsistencyResult
            Result whose fields are arrays of one shape.
        """
        step = np.asarray(step, dtype=np.float64)
        rates = (step, updates_per_step / step, step - workload.compute_time, sent / step)
        figures = (*rates, *staleness, extra_memory, *server)
        return cls(*(np.asarray(each, dtype=np.float64) for each in np.broadcast_arrays(*figures)))


class ConsistencyModel(Protocol):
    """Consistency model of data-parallel workers (BSP, SSP, asynchronous) with its arguments."""

    @property
    def summary(self) -> str:
        """Description of the consistency model in a few words."""

    @property
    def reference(self) -> str:
        """Paper that describes the consistency model."""

    @property
    def matches_synchronous(self) -> bool:
        """True if every update equals that of a synchronous step, so that staleness costs nothing."""

    @property
    def uses_servers(self) -> bool:
        """True if workers exchange through parameter servers when a run has some (`DataParallelWorkload.server`)."""

    def evaluate(self, workload: DataParallelWorkload) -> ConsistencyResult:
        """Compute step time, update rate and gradient staleness of a workload under this consistency model.

        Parameters
        ----------
        workload : DataParallelWorkload
            Times and sizes of one worker's step.

        Returns
        -------
        ConsistencyResult
            Times [s], rates of updates [1/s] and staleness.
        """


#: Functions that build a model from its argument (the text after the colon), by name.
CONSISTENCY_MODELS: Registry[Callable[[str], ConsistencyModel]] = Registry("consistency model", "paleo.consistency")


def parse_consistency(text: str) -> ConsistencyModel:
    """Build the consistency model that option ``--consistency`` names.

    Parameters
    ----------
    text : str
        Name and argument, such as ``ssp:4``.

    Returns
    -------
    ConsistencyModel
        The model with its argument.

    Raises
    ------
    PlanError
        If the model's argument is wrong.

    Examples
    --------
    >>> parse_consistency("local:32").matches_synchronous
    False
    """
    name, _, argument = text.partition(":")
    return CONSISTENCY_MODELS[name.strip()](argument.strip())


def unused_server_warnings(run: Run) -> list[str]:
    """Warn of parameter servers that a run specifies but its consistency model does not use.

    Parameters
    ----------
    run : Run
        The run.

    Returns
    -------
    list of str
        One warning, or none.

    Examples
    --------
    >>> from paleo.specs.run import Run
    >>> unused_server_warnings(Run(consistency="local:8", servers=4))
    ['servers=4 changes nothing: workers of local:8 exchange without parameter servers']
    >>> unused_server_warnings(Run(consistency="async", servers=4))
    []
    """
    if run.exchange.servers is None or run.exchange.consistency == "bsp" or run.exchange.when == "parameter-server":
        return []
    if parse_consistency(run.exchange.consistency).uses_servers:
        return []
    workers = f"workers of {run.exchange.consistency} exchange without parameter servers"
    return [f"servers={run.exchange.servers} changes nothing: {workers}"]


def count_argument(name: str, argument: str, meaning: str, least: int = 1, most: int = 10**7) -> int:
    """Parse the whole number after the colon of a consistency model's name, such as 4 in ``ssp:4``.

    Parameters
    ----------
    name : str
        Name of the model.
    argument : str
        Text after the colon; empty without a colon.
    meaning : str
        Meaning of the number, for error messages.
    least : int, default 1
        Smallest allowed number.
    most : int, default 10 ** 7
        Largest allowed number.

    Returns
    -------
    int
        The number, checked against its range.

    Raises
    ------
    PlanError
        If the text is no such number; the message says what the number means.
    """
    if not argument.isascii() or not argument.isdigit() or len(argument) > len(str(most)):
        raise PlanError(f"consistency {name}:{argument}: expected {name}:N, with N {meaning}, from {least} to {most}")
    number = int(argument)
    if not least <= number <= most:
        raise PlanError(f"consistency {name}:{argument}: {meaning} must lie between {least} and {most}")
    return number


def check_no_argument(name: str, argument: str) -> None:
    """Check that a consistency model without arguments (``bsp``, ``async``) is given none.

    Parameters
    ----------
    name : str
        Name of the consistency model.
    argument : str
        Text after the colon of the name, or empty.

    Raises
    ------
    PlanError
        If ``argument`` is not empty.
    """
    if argument:
        raise PlanError(f"consistency {name}:{argument}: {name} takes no argument")


@dataclass(frozen=True, slots=True)
class BulkSynchronous:
    """Bulk-synchronous consistency model (BSP): every step waits for all workers and sums their gradients.

    Step time T = μ (1 + W) + exposed all-reduce, with mean compute time μ and the waiting share W for the slowest of N
    workers.
    """

    summary = "every step waits for all workers and sums their gradients"
    reference = "Valiant, A bridging model for parallel computation, CACM 33(8), 1990"
    matches_synchronous = True
    uses_servers = False

    def evaluate(self, workload: DataParallelWorkload) -> ConsistencyResult:
        """Compute step time and update rate of workers that all wait for each other in every step.

        Parameters
        ----------
        workload : DataParallelWorkload
            Times and sizes of one worker's step.

        Returns
        -------
        ConsistencyResult
            Times [s] and rates of updates [1/s]; the staleness is 0.
        """
        step = workload.compute_time * (1.0 + workload.waiting_share) + workload.exposed_all_reduce_time
        sent = workload.payload * (np.asarray(workload.workers) > 1)
        return ConsistencyResult.from_step_time(workload, step, sent=sent)


@CONSISTENCY_MODELS.register("bsp")
def bulk_synchronous_model(argument: str) -> BulkSynchronous:
    """Build the consistency model ``bsp`` (bulk-synchronous): every step waits for all workers.

    Parameters
    ----------
    argument : str
        Text after the colon of the model's name; must be empty.

    Returns
    -------
    BulkSynchronous
        Model that predicts times and updates (`BulkSynchronous.evaluate`).

    Raises
    ------
    PlanError
        If there is an argument.
    """
    check_no_argument("bsp", argument)
    return BulkSynchronous()
