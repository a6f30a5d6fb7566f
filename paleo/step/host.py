"""What the hosts of the devices do in a step: they hold states and activations that a device has no room for, update
offloaded parameters, and feed the input pipeline, which reads, decodes and copies the samples of a batch.

Every device has its own link to the host, both ways at once; memory, storage and cores of a node are shared evenly, as
far as a system states them. Traffic on the link and the work of the host overlap with computation: only what does not
hide there is waited for. Formulas broadcast over arrays; seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, SpecError, near
from paleo.step.memory import States
from paleo.units import listed

if TYPE_CHECKING:
    from paleo.network.graph import Graph
    from paleo.operations.optimizers import Optimizer
    from paleo.operations.tensor import Precision, Tensor
    from paleo.pricing.store import Rates
    from paleo.specs.hardware import System
    from paleo.specs.run import InputOptions, Run
    from paleo.step.section_times import LayerTimes


def link_rate(system: System, rates: Rates | None = None) -> float:
    """What a device and its host send each other, each way [byte/s]: its PCIe lanes at the share that copies reach, or
    that constant ``rates`` state for links."""
    return system.device.copy_rate(None if rates is None else rates.link)


def host_figure(system: System, key: str, instead: str = "") -> float:
    """A figure of the system's host, for a node; SpecError where it is not stated."""
    value = None if system.host is None else getattr(system.host, key)
    if value is None:
        raise SpecError(f"system {system.name}: host.{key} is not stated; state it in its file{instead}")
    return float(value)


Array = npt.NDArray[np.float64]
Numeric = float | Array
#: What may live in host memory.
PARTS = ("optimizer", "gradients", "parameters", "activations")


@dataclass(frozen=True, slots=True)
class Offload:
    """``parts`` of a rank's state in host memory; ``link`` to it, each way, and what the rank reaches of the host's
    memory bandwidth [byte/s].

    Reference: Ren et al., ZeRO-Offload, USENIX ATC 2021; Rajbhandari et al., ZeRO-Infinity, SC 2021.
    """

    parts: frozenset[str]
    link: float
    memory: float

    def holds(self, part: str) -> bool:
        return part in self.parts


NOTHING = Offload(frozenset(), np.inf, np.inf)
#: Share of a host's memory bandwidth that an optimizer on it reaches: DeepSpeed's CPU-Adam takes 2.57 s for 10e9
#: parameters, 28 bytes each, on the two Xeon 8168 of a DGX-2, of 256 GB/s (Ren et al., USENIX ATC 2021, its table of
#: Adam's latency).
HOST_SHARE = 28.0 * 10.0 / 2.57 / 256.0


def offload_of(text: str, system: System, rates: Rates | None = None) -> Offload:
    """The parts that a run names, ``optimizer,activations``, with the links of the system; SpecError where a name or a
    figure is missing. Constant ``rates`` hold for the host, too: all of its memory bandwidth under ``ideal``."""
    names = listed(text)
    if names == ["none"]:
        return NOTHING
    for name in names:
        if name not in PARTS:
            raise SpecError(f"offload: unknown part {name!r} in {text!r}; {near(name, (*PARTS, 'none'))}")
    parts = frozenset(names)
    lost = sorted(parts & {"gradients", "parameters"})
    if not parts or (lost and "optimizer" not in parts):
        raise PlanError(f"offload {text!r}: {' and '.join(lost) or 'nothing'} cannot go without optimizer")
    if "optimizer" not in parts:
        return Offload(parts, link_rate(system, rates), np.inf)
    share = HOST_SHARE if rates is None else rates.memory
    memory = share * host_figure(system, "memory_bandwidth") / system.devices_per_node
    return Offload(parts, link_rate(system, rates), memory)


@dataclass(frozen=True, slots=True)
class Shares:
    """A rank's part of the weights that it fetches for a layer iteration, and of the gradients that leave it after one;
    whether the host adds those up over several microbatches. Each (configurations,)."""

    weights: Numeric = 1.0
    gradients: Numeric = 1.0
    accumulates: Numeric = 0.0

    @classmethod
    def of(cls, zero: int, ranks: Numeric, microbatches: Numeric, *, scattered: bool) -> Shares:
        """Weights are whole unless ZeRO-3 divides them; gradients unless they are summed over ranks before they go:
        with every microbatch where they are ``scattered`` after each, else with the last one."""
        whole = 1.0 / np.asarray(ranks)
        several = np.asarray(microbatches) > 1
        summed = np.where(several & (not scattered), 1.0, whole) if zero else 1.0
        return cls(whole if zero == 3 else 1.0, summed, several.astype(np.float64))


def streamed(
    times: LayerTimes, parameters: Array, trained: Array, offload: Offload, formats: Precision, shares: Shares
) -> LayerTimes:
    """Layer iterations whose activations, weights or gradients travel while they compute; what an iteration waits for
    them counts as transfer. ``parameters`` and those of them that are ``trained``: elements, (sections, …).

    forward: kept activations go out while weights come in; backward: both come in while gradients go out, and the host
    adds them to an fp32 sum. Of what was kept two layers are on the device at once.
    """
    shape = (-1,) + (1,) * (times.forward.ndim - 1)
    elements, learned = (each.reshape(shape) if each.ndim == 1 else each for each in (parameters, trained))
    kept = times.kept * offload.holds("activations")
    weights = shares.weights * formats.parameter * elements * offload.holds("parameters")
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


def divided(states: States, offload: Offload, largest: Numeric, formats: Precision) -> tuple[States, Array]:
    """States that stay on the device, and bytes of those in host memory, (stages, …). Of offloaded parameters two
    sections, of ``largest`` elements at most, are on the device at once."""
    offloaded = [states.parameters * offload.holds("parameters"), states.gradients * offload.holds("gradients")]
    offloaded.append(states.optimizer * offload.holds("optimizer"))
    gathered = np.maximum(states.gathered, 2.0 * largest * formats.parameter * offload.holds("parameters"))
    stays = States(
        states.parameters - offloaded[0], states.gradients - offloaded[1], states.optimizer - offloaded[2], gathered
    )
    return stays, offloaded[0] + offloaded[1] + offloaded[2]


def host_update(count: Array, backward: Array, optimizer: Optimizer, formats: Precision, offload: Offload) -> Array:
    """Seconds of an update of ``count`` parameters by the host, after a ``backward`` pass of so many seconds.

    max(0, gradients / link − backward) + max(moved / memory, parameters / link)

    Gradients go to the host beside the last backward pass; the update moves all that it reads and writes through host
    memory, and new parameters return in tiles as they are ready.

    >>> from paleo.operations.optimizers import OPTIMIZERS
    >>> from paleo.operations.tensor import precision
    >>> host = Offload(frozenset({"optimizer"}), 20e9, 28e9)
    >>> float(host_update(1e9, 0.06, OPTIMIZERS["adam"], precision("bf16"), host))  # 2 GB out in 0.1 s, 28 GB moved
    1.04
    """
    sent = 0.0 if offload.holds("gradients") else count * formats.gradient / offload.link
    back = 0.0 if offload.holds("parameters") else count * formats.parameter / offload.link
    moved = count * sum(optimizer.update_bytes(formats)) / offload.memory
    return np.asarray(_beyond(sent, backward) + np.maximum(moved, back))


@dataclass(frozen=True, slots=True)
class InputPipeline:
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
        """The slowest part of the input pipeline."""
        names = {"storage": self.storage, "decoding": self.decode, "copies to the device": self.copy}
        return max(names, key=lambda name: float(names[name]))


def input_pipeline(
    stages: InputOptions,
    system: System,
    sample_bytes: float,
    *,
    gpus: int,
    replica: Numeric,
    local_batch: Numeric,
    link: float | None = None,
) -> InputPipeline:
    """How long a batch takes to arrive, where ``replica`` ranks share the ``local_batch`` samples of one model replica.

    A node reads and decodes the samples of all its replicas (of one, where a replica is larger than a node) with its
    storage and its cores; each rank copies the batch of its replica over its own link, at ``link`` byte/s or the usual
    share of its slot.
    """
    devices = min(gpus, system.devices_per_node)
    samples = np.asarray(local_batch) * np.maximum(devices / np.asarray(replica), 1.0)
    storage, decode = 0.0 * samples, 0.0 * samples
    if stages.sample is not None:
        rate = stages.storage or host_figure(system, "storage_bandwidth", ", or input.storage")
        storage = samples * stages.sample / rate
    if stages.decode > 0:
        cores = stages.cores or host_figure(system, "cores", ", or input.cores") / system.devices_per_node
        decode = samples * stages.decode / (cores * devices)
    copied = sample_bytes if stages.copied is None else stages.copied
    return InputPipeline(storage, decode, np.asarray(local_batch) * copied / (link or link_rate(system)))


#: Stored bytes of a photograph (ImageNet-1k: 140 GB in 1.28 million JPEG files), and the side in pixels from which an
#: image of three channels is taken for one.
PHOTOGRAPH, LEAST_SIDE = 110_000.0, 128


def usual_input(run: Run, graph: Graph, system: System, decode: float, gpus: int) -> InputOptions | None:
    """How photographs arrive where the run does not say: a core of the host takes ``decode`` seconds for each, and
    storage counts where the host states its bandwidth. The run has all cores of its nodes, which its ``gpus`` may not
    fill. None where the network takes none, the host's cores are not stated, or ``decode`` is 0: data cost nothing."""
    host = system.host
    if not decode or host is None or host.cores is None or not any(map(_photograph, graph.inputs.values())):
        return None
    cores = host.cores / min(gpus, system.devices_per_node)
    stored = PHOTOGRAPH if host.storage_bandwidth else None
    return run.photographs(sample=stored, decode=decode, cores=cores)


def _photograph(tensor: Tensor) -> bool:
    pixels = tensor.dims[1:] == ("channels", "height", "width") and tensor.sizes[1] == 3
    return pixels and min(tensor.sizes[2:]) >= LEAST_SIDE


#: Bytes of an input's numbers as loaders hand them on: fp32, and int64 for indices.
_WIDTH = {"index": 8.0}


def sample_bytes(graph: Graph) -> float:
    """Bytes of one sample as it is copied to the device."""
    return sum(float(tensor.elements) * _WIDTH.get(tensor.role, 4.0) for tensor in graph.inputs.values()) / graph.batch
