"""What the host does beside its devices: it feeds them, and holds what they have no room for.

Every device has its own link to the host, both ways at once; memory, storage and cores of a node are shared evenly.
Formulas broadcast over arrays; seconds and bytes. Traffic on the link and the work of the host run beside computation:
only what does not hide there is waited for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, SpecError, near
from paleo.network.graph import Graph
from paleo.operations.optimizers import Optimizer
from paleo.operations.precision import Precision
from paleo.specs.hardware import System, load_link
from paleo.specs.run import Input
from paleo.step.section_times import Columns, States, TurnTimes

Array = npt.NDArray[np.float64]
Numeric = float | Array
#: What may live in host memory.
PARTS = ("optimizer", "gradients", "parameters", "activations")


def link_rate(system: System) -> float:
    """What a device and its host send each other, each way [byte/s]: its PCIe lanes at the share that copies reach."""
    device = system.device
    if device.pcie is None:
        raise SpecError(f"device {device.name}: pcie is not stated, so the time of copies to the host is not known")
    link = load_link(f"pcie{device.pcie.generation}-x16")
    return link.bandwidth * (link.achieved_fraction or 1.0) * device.pcie.lanes / 16


def _stated(system: System, key: str, instead: str = "") -> float:
    """A figure of the system's host, for a node; SpecError where it is not stated."""
    value = None if system.host is None else getattr(system.host, key)
    if value is None:
        raise SpecError(f"system {system.name}: host.{key} is not stated; state it in its file{instead}")
    return float(value)


# offload


@dataclass(frozen=True, slots=True)
class Offload:
    """``parts`` of a rank's state in host memory; ``link`` to it, each way, and the rank's share of the host's memory
    bandwidth [byte/s].

    Reference: Ren et al., ZeRO-Offload, USENIX ATC 2021; Rajbhandari et al., ZeRO-Infinity, SC 2021.
    """

    parts: frozenset[str]
    link: float
    memory: float

    def holds(self, part: str) -> bool:
        return part in self.parts


NOTHING = Offload(frozenset(), np.inf, np.inf)


def offload_of(text: str, system: System) -> Offload:
    """The parts that a run names, ``optimizer,activations``, with the links of the system; SpecError where a name or a
    figure is missing."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if names == ["none"]:
        return NOTHING
    for name in names:
        if name not in PARTS:
            raise SpecError(f"offload: unknown part {name!r} in {text!r}; {near(name, (*PARTS, 'none'))}")
    parts = frozenset(names)
    lost = sorted(parts & {"gradients", "parameters"})
    if not parts or (lost and "optimizer" not in parts):
        raise PlanError(f"offload {text!r}: {' and '.join(lost) or 'nothing'} cannot go without optimizer")
    rate = _stated(system, "memory_bandwidth") / system.devices_per_node if "optimizer" in parts else np.inf
    return Offload(parts, link_rate(system), rate)


@dataclass(frozen=True, slots=True)
class Shares:
    """A rank's part of the weights that it fetches for a turn, and of the gradients that leave it after one; whether
    the host adds those up over several microbatches."""

    weights: float = 1.0
    gradients: float = 1.0
    accumulates: bool = False

    @classmethod
    def of(cls, zero: int, ranks: int, microbatches: int) -> Shares:
        """Weights are whole unless ZeRO-3 divides them; gradients unless they are summed over ranks before they go:
        with every microbatch in ZeRO-3, else with the last one."""
        summed = zero == 3 or (zero > 0 and microbatches == 1)
        return cls(1.0 / ranks if zero == 3 else 1.0, 1.0 / ranks if summed else 1.0, microbatches > 1)


def streamed(times: TurnTimes, columns: Columns, offload: Offload, formats: Precision, shares: Shares) -> TurnTimes:
    """Turns whose activations, weights or gradients travel beside them; what a turn waits for them counts as transfer.

    forward: kept activations go out while weights come in; backward: both come in while gradients go out, and the host
    adds them to an fp32 sum. Of what was kept two turns are on the device at once.
    """
    shape = (-1,) + (1,) * (times.forward.ndim - columns.parameters.ndim)
    each, learned = columns.parameters.reshape(shape), columns.trained.reshape(shape)
    kept = times.kept * offload.holds("activations")
    weights = shares.weights * formats.parameter * each * offload.holds("parameters")
    sent = shares.gradients * learned * offload.holds("gradients")
    added = sent * shares.accumulates * (formats.gradient + 2.0 * SUM_BYTES) / offload.memory
    out = np.maximum(kept, weights) / offload.link
    back = np.maximum(np.maximum(kept + weights, sent * formats.gradient) / offload.link, added)
    return replace(
        times,
        forward_transfers=times.forward_transfers + _beyond(out, times.forward),
        backward_transfers=times.backward_transfers + _beyond(back, times.backward + times.weights),
        kept=times.kept - kept,
        away=times.away + kept,
        transient=times.transient + 2.0 * kept,
    )


#: The host sums gradients in fp32: read and written.
SUM_BYTES = 4.0


def _beyond(seconds: Numeric, hidden_by: Numeric) -> Array:
    return np.maximum(0.0, np.asarray(seconds) - hidden_by)


def divided(held: States, offload: Offload, largest: Numeric, formats: Precision) -> tuple[States, Array]:
    """States that stay on the device, and bytes of those in host memory, (stages, …). Of offloaded parameters two
    sections, of ``largest`` elements at most, are on the device at once."""
    away = [held.parameters * offload.holds("parameters"), held.gradients * offload.holds("gradients")]
    away.append(held.optimizer * offload.holds("optimizer"))
    gathered = np.maximum(held.gathered, 2.0 * largest * formats.parameter * offload.holds("parameters"))
    stays = States(held.parameters - away[0], held.gradients - away[1], held.optimizer - away[2], gathered)
    return stays, away[0] + away[1] + away[2]


def host_update(count: Array, behind: Array, chosen: Optimizer, formats: Precision, offload: Offload) -> Array:
    """Seconds of an update of ``count`` parameters by the host, after a backward pass of ``behind`` seconds.

    max(0, gradients / link − behind) + max(moved / memory, parameters / link)

    Gradients go to the host beside the last backward pass; the update moves all that it reads and writes through host
    memory, and new parameters return in tiles as they are made.

    >>> from paleo.operations.optimizers import OPTIMIZERS
    >>> from paleo.operations.precision import precision
    >>> one = Offload(frozenset({"optimizer"}), 20e9, 28e9)
    >>> float(host_update(1e9, 0.06, OPTIMIZERS["adam"], precision("bf16"), one))  # 2 GB out in 0.1 s, 28 GB moved
    1.04
    """
    sent = 0.0 if offload.holds("gradients") else count * formats.gradient / offload.link
    back = 0.0 if offload.holds("parameters") else count * formats.parameter / offload.link
    moved = count * sum(chosen.update_bytes(formats)) / offload.memory
    return np.asarray(_beyond(sent, behind) + np.maximum(moved, back))


# input


@dataclass(frozen=True, slots=True)
class Feeding:
    """Seconds in which a step's batch is read, decoded and copied: three stages that work at the same time, ahead of
    the step that needs it."""

    storage: Numeric
    decode: Numeric
    copy: Numeric

    @property
    def total(self) -> Array:
        """Seconds between two batches in steady state: the slowest stage sets the pace."""
        return np.maximum(np.maximum(self.storage, self.decode), self.copy)

    @property
    def slowest(self) -> str:
        """What sets the pace."""
        names = {"storage": self.storage, "decoding": self.decode, "copies to the device": self.copy}
        return max(names, key=lambda name: float(names[name]))


def feeding(
    wanted: Input, system: System, sample_bytes: float, *, gpus: int, replica: Numeric, local_batch: Numeric
) -> Feeding:
    """How long a batch takes to arrive, where ``replica`` ranks share the ``local_batch`` samples of one model replica.

    A node reads and decodes the samples of all its replicas (of one, where a replica is larger than a node) with its
    storage and its cores; each rank copies the batch of its replica over its own link.
    """
    devices = min(gpus, system.devices_per_node)
    samples = np.asarray(local_batch) * np.maximum(devices / np.asarray(replica), 1.0)
    storage, decode = 0.0 * samples, 0.0 * samples
    if wanted.sample is not None:
        rate = wanted.storage or _stated(system, "storage_bandwidth", ", or input.storage")
        storage = samples * wanted.sample / rate
    if wanted.decode > 0:
        cores = wanted.cores or _stated(system, "cores", ", or input.cores") / system.devices_per_node
        decode = samples * wanted.decode / (cores * devices)
    copied = sample_bytes if wanted.copied is None else wanted.copied
    return Feeding(storage, decode, np.asarray(local_batch) * copied / link_rate(system))


#: Bytes of an input's numbers as loaders hand them on: fp32, and int64 for indices.
_WIDTH = {"index": 8.0}


def sample_bytes(graph: Graph) -> float:
    """Bytes of one sample as it is copied to the device."""
    return sum(float(one.elements) * _WIDTH.get(one.role, 4.0) for one in graph.inputs.values()) / graph.batch
