"""Consistency models: how workers that train one network exchange updates, and when they wait for one another.

A model takes the `Workload` of like workers and says how fast they update the model and how stale their gradients are.
Every field is a number or an array of configurations; formulas broadcast. A module of this folder registers its model
under the name that ``--consistency`` takes; what follows a colon is its argument::

    @CONSISTENCY.register("ssp")
    def ssp(argument: str) -> Consistency: ...

Time to quality is not predicted: a stale gradient may need more updates, and no law of that holds across networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.registry import Registry
from paleo.step.waiting import waiting_share

if TYPE_CHECKING:
    from paleo.specs.run import Run
    from paleo.step.waiting import Numeric

Array = npt.NDArray[np.float64]
#: Bytes of a number in the fp32 copies that outer optimizers and averaged models keep.
FP32_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class Server:
    """Parameter servers: ``call`` seconds of software for each tensor pushed and pulled, ``bandwidth`` [byte/s] at
    which one server takes in gradients, applies them and sends parameters, all three together.

    ``largest_share`` is the part of all bytes that the fullest of ``count`` servers holds: 1 / count where balanced.
    """

    call: float
    bandwidth: float
    count: int = 1
    largest_share: float | None = None

    @property
    def share(self) -> float:
        """Part of a push that the fullest server takes."""
        return 1.0 / self.count if self.largest_share is None else self.largest_share


@dataclass(frozen=True, slots=True)
class Workload:
    """What like workers do; seconds, bytes.

    ``compute``: a worker's step without any exchange between workers, its optimizer included. ``all_reduce``: seconds
    in which all workers sum their gradients (or average their parameters), ``hidden`` of them beside computation in a
    synchronous step (negative where buckets beside it cost more than they hide).
    ``neighbour``: seconds in which a worker sends its payload to one other worker. ``payload``: bytes
    of gradients that a worker sends a step; ``parameters``: elements that a worker holds; ``tensors``: how many tensors
    they are. ``jitter`` and ``persistent``: noise of a worker's step, independent and its own, as shares of its mean
    (`paleo.step.waiting`). ``round_trip``: seconds of a message to the server and back, for each tensor's exchange.
    """

    workers: Numeric
    compute: Numeric
    all_reduce: Numeric
    hidden: Numeric
    neighbour: Numeric
    payload: Numeric
    parameters: Numeric
    tensors: Numeric
    jitter: Numeric = 0.0
    persistent: Numeric = 0.0
    round_trip: Numeric = 0.0
    server: Server | None = None

    @property
    def waiting(self) -> Array:
        """Share of a mean step that a synchronous step waits for the slowest worker."""
        return waiting_share(self.workers, self.jitter, self.persistent)


@dataclass(frozen=True, slots=True)
class Cycle:
    """What a consistency model makes of a workload; each field broadcasts over configurations.

    ``step``: seconds between two steps of one worker, exchange and waiting included. ``updates_per_s``: updates of the
    shared model (synchronous models count a step of all workers as one; asynchronous ones each worker's). ``exposed``:
    seconds of a step that are exchange or waiting. ``bytes_per_s``: what a worker sends. ``staleness_mean`` and
    ``staleness_sd``: updates by others between a worker's read and its write. ``extra_memory``: bytes a worker holds
    beside a synchronous one. ``utilization`` and ``knee``: busy share of the fullest server, and the workers from which
    on it is the limit (nan without a server).
    """

    step: Array
    updates_per_s: Array
    exposed: Array
    bytes_per_s: Array
    staleness_mean: Array
    staleness_sd: Array
    extra_memory: Array
    utilization: Array
    knee: Array

    @classmethod
    def of(
        cls,
        workload: Workload,
        step: Numeric,
        *,
        updates_per_step: Numeric = 1.0,
        sent: Numeric = 0.0,
        staleness: tuple[Numeric, Numeric] = (0.0, 0.0),
        extra_memory: Numeric = 0.0,
        server: tuple[Numeric, Numeric] = (np.nan, np.nan),
    ) -> Cycle:
        """All fields as arrays of one shape. ``updates_per_step``: updates of the model while one worker makes a step;
        ``sent``: bytes that a worker sends a step; ``server``: utilization and knee."""
        step = np.asarray(step, dtype=np.float64)
        figures = (
            step,
            updates_per_step / step,
            step - workload.compute,
            sent / step,
            *staleness,
            extra_memory,
            *server,
        )
        return cls(*(np.asarray(each, dtype=np.float64) for each in np.broadcast_arrays(*figures)))


class Consistency(Protocol):
    """A consistency model with its arguments, frozen."""

    @property
    def summary(self) -> str:
        """What the model does, in a few words."""

    @property
    def reference(self) -> str:
        """The paper that describes the model."""

    @property
    def exact(self) -> bool:
        """Whether every update is what a synchronous step would make: no price of staleness is needed."""

    @property
    def uses_servers(self) -> bool:
        """Whether workers exchange through the parameter servers of a run that states some (`Workload.server`)."""

    def cycle(self, workload: Workload) -> Cycle:
        """Seconds, updates, staleness of a workload."""


#: Name -> maker of a model from its argument, the text behind the colon.
CONSISTENCY: Registry[Callable[[str], Consistency]] = Registry("consistency model", "paleo.consistency")


def consistency(text: str) -> Consistency:
    """The model that a text names, ``ssp:4``; PlanError where its argument is wrong.

    >>> consistency("local:32").exact
    False
    """
    name, _, argument = text.partition(":")
    return CONSISTENCY[name.strip()](argument.strip())


def idle_servers(run: Run) -> list[str]:
    """A warning where a run states parameter servers that its consistency model does not use, else nothing.

    >>> from paleo.specs.run import Run
    >>> idle_servers(Run(consistency="local:8", servers=4)), idle_servers(Run(consistency="async", servers=4))
    (['servers=4 changes nothing: workers of local:8 exchange without parameter servers'], [])
    """
    if run.servers is None or run.consistency == "bsp" or run.exchange == "parameter-server":
        return []
    if consistency(run.consistency).uses_servers:
        return []
    return [f"servers={run.servers} changes nothing: workers of {run.consistency} exchange without parameter servers"]


def count_argument(name: str, argument: str, meaning: str, least: int = 1, most: int = 10**7) -> int:
    """The whole number after the colon; PlanError says what the number stands for."""
    if not argument.isascii() or not argument.isdigit() or len(argument) > len(str(most)):
        raise PlanError(f"consistency {name}:{argument}: expected {name}:N, with N {meaning}, from {least} to {most}")
    number = int(argument)
    if not least <= number <= most:
        raise PlanError(f"consistency {name}:{argument}: {meaning} must lie between {least} and {most}")
    return number


def no_argument(name: str, argument: str) -> None:
    """PlanError where a model without arguments has one."""
    if argument:
        raise PlanError(f"consistency {name}:{argument}: {name} takes no argument")
