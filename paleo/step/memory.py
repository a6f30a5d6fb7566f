"""What stages hold: layers and copies of tied parameters, and bytes on the device and in host memory.

The stages of a pipeline hold layers of each section; a step without a pipeline is one stage that holds the network. Of
the bytes on a device there are states, activations and workspace: what a rank must hold at the peak of a step, part by
part, and the optimizer's update and the clipping of gradients before it, as kernels. Host memory takes states and
activations that a device has no room for. Every device has its own link to the host, both ways at once; memory, storage
and cores of a node are shared evenly, as far as a system states them. Traffic on the link and the work of the host
overlap with computation: only what does not hide there is waited for.

Pure functions that broadcast: stages are the first axis, configurations the last; seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, SpecError, near
from paleo.operations.base import flat_pass
from paleo.parallel.placement import BATCH_AXES
from paleo.units import listed

if TYPE_CHECKING:
    from paleo.lowering.policies import Chunk
    from paleo.lowering.program import Tie
    from paleo.operations.base import Kernel, Optimizer
    from paleo.operations.tensor import Precision
    from paleo.parallel.placement import Axes
    from paleo.pricing.store import Rates
    from paleo.schedules.base import Schedule
    from paleo.specs.system import System
    from paleo.step.section_times import LayerTimes

Array = npt.NDArray[np.float64]
Numeric = float | Array
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


def placed_layers(sections: int, pieces: Sequence[Chunk], places: Sequence[Sequence[int]]) -> Array:
    """Layers of each section in each chunk of each stage, (stages, chunks, sections); ``places``: the pieces of the
    network that a stage's chunks are."""
    placed = np.zeros((len(places), len(places[0]), sections))
    for stage, numbers in enumerate(places):
        for chunk, piece in enumerate(numbers):
            for section, layers in pieces[piece]:
                placed[stage, chunk, section] += layers
    return placed


def tied_copies(layers: Array, ties: Sequence[Tie]) -> Array:
    """1 where a stage reads a tied parameter whose owner lies elsewhere and so holds a copy of it: (stages, ties).

    ``layers``: layers of each section on each stage, (stages, sections).
    """
    copies = np.zeros((len(layers), len(ties)))
    known: dict[str, Mask] = {}
    for column, tie in enumerate(ties):
        owners, reads = known.get(tie.name, layers[:, tie.owner] > 0), layers[:, tie.reader] > 0
        copies[:, column] = reads & ~owners
        known[tie.name] = owners | reads
    return copies


def holdings(placed: Array, ties: Sequence[Tie]) -> Array:
    """What has parameters in each chunk of each stage: layers of each section, then copies of each tied parameter,
    which are with the last chunk: (stages, chunks, sections and ties).

    ``placed``: layers of each section in each chunk of each stage, (stages, chunks, sections)."""
    tied = np.zeros((*placed.shape[:2], len(ties)))
    tied[:, -1] = tied_copies(placed.sum(axis=1), ties)
    return np.concatenate([placed, tied], axis=2)


def tied_pairs(ties: Sequence[Tie], layers: Array) -> list[tuple[int, int, int]]:
    """Tie, stage of its owner and stage of a copy, for each copy of a trained parameter."""
    return [
        (number, int(np.flatnonzero(layers[:, ties[number].owner])[0]), stage)
        for stage, number in np.argwhere(tied_copies(layers, ties)).tolist()
        if ties[number].trained
    ]


def layer_parameters(layers: Array, ties: Sequence[Tie]) -> Array:
    """What a stage gathers, and computes gradients of, in an iteration of each section: the section, and copies of tied
    parameters where it reads them: (stages, sections, sections and ties). ``layers``: as in `tied_copies`."""
    stages, sections = layers.shape
    parts = np.zeros((stages, sections, sections + len(ties)))
    parts[:, range(sections), range(sections)] = 1.0
    parts[:, [tie.reader for tie in ties], range(sections, sections + len(ties))] = tied_copies(layers, ties)
    return parts


class StageKinds:
    """The different holdings of stages, or of chunks: they are few, so figures are computed for each kind, not for each
    stage. ``add`` extends them; figures are to be computed after the last one has been added."""

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}
        self._rows: list[Array] = []

    def add(self, holdings: Array, copies: int) -> Index:
        """Numbers of the kinds of some holdings, (…, sections and ties): (…,)."""
        rows = np.concatenate([holdings, np.full((*holdings.shape[:-1], 1), float(copies))], axis=-1)
        numbers = [self._of(row) for row in rows.reshape(-1, rows.shape[-1])]
        return np.array(numbers, dtype=np.intp).reshape(holdings.shape[:-1])

    def _of(self, row: Array) -> int:
        number = self._number.setdefault(row.tobytes(), len(self._rows))
        if number == len(self._rows):
            self._rows.append(row)
        return number

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def holdings(self) -> Array:
        """(kinds, sections and ties)."""
        return np.array(self._rows)[:, :-1]

    @property
    def copies(self) -> Array:
        """Copies of the network of which these are holdings: (kinds, 1)."""
        return np.array(self._rows)[:, -1:]


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of whole stages, and of their chunks."""

    stages: StageKinds
    chunks: StageKinds


@dataclass(frozen=True, slots=True)
class Assignment:
    """A network in ``pieces`` laid over stages, ``chunks`` pieces of each of its ``copies`` on every stage.

    ``placed``: layers of each section, (stages, chunks, sections); ``layers``: the same of whole stages, (stages,
    sections); ``stage_kind``: (stages,), ``chunk_kind``: (stages, chunks). ``sends``: how many of a stage's outputs,
    which leave a section, go to other stages for each microbatch, (stages, sections)."""

    pieces: tuple[Chunk, ...]
    chunks: int
    copies: int
    placed: Array
    layers: Array
    sends: Array
    kinds: Kinds
    stage_kind: Index
    chunk_kind: Index

    @classmethod
    def of(
        cls, pieces: Sequence[Chunk], schedule: Schedule, stages: int, chunks: int, ties: Sequence[Tie], kinds: Kinds
    ) -> Assignment:
        """The ``pieces`` placed on stages by a schedule; new kinds of stages are added to ``kinds``."""
        sections = 1 + max(section for piece in pieces for section, _ in piece)
        places = schedule.pieces(stages, chunks) if stages > 1 else ((0,),)
        copies = schedule.copies if stages > 1 else 1
        placed = placed_layers(sections, pieces, places)
        layers = np.asarray(placed.sum(axis=1))
        sends = np.zeros((stages, sections))
        if stages > 1:
            for stage, sent in enumerate(schedule.sends_output(stages, chunks)):
                for piece, leaves in zip(places[stage], sent, strict=True):
                    sends[stage, pieces[piece][-1][0]] += leaves / copies
        stage_kind = kinds.stages.add(holdings(layers[:, None], ties)[:, 0], copies)
        chunk_kind = kinds.chunks.add(holdings(placed, ties), copies)
        return cls(tuple(pieces), chunks, copies, placed, layers, sends, kinds, stage_kind, chunk_kind)

    @property
    def stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stage_kind)

    @property
    def computed(self) -> Array:
        """Layers of each section that a stage computes for a microbatch, on average over the copies of the network:
        (stages, sections)."""
        return self.layers / self.copies

    @property
    def key(self) -> tuple[object, ...]:
        """Cache key: equal for two assignments with the same chunks on the same stages."""
        return self.chunk_kind.shape, self.chunk_kind.tobytes()

    @property
    def stages_key(self) -> tuple[object, ...]:
        """Cache key: equal for two assignments with the same layers on the same stages, in any chunks."""
        return len(self.stage_kind), self.stage_kind.tobytes()


def alive(schedule: Schedule, stages: int, microbatches: Numeric, chunks: int) -> Array:
    """Microbatches whose activations live at once in each piece of the network (chunks, copies) that a stage has:
    (stages, pieces, …)."""
    if stages == 1:
        return np.ones((1, 1) + np.ndim(microbatches) * (1,))
    stage = np.arange(float(stages)).reshape((-1,) + np.ndim(microbatches) * (1,))
    living = schedule.alive_by_piece(stage, stages, microbatches, chunks)
    shape = np.broadcast_shapes(stage.shape, np.shape(microbatches))
    return np.moveaxis(np.broadcast_to(living, (len(living), *shape)), 0, 1)


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of what training keeps for each parameter on a stage, (stages, …), of what sharding gathers at a time, and
    of temporaries of the ``update``, when nothing is gathered and no activation lives."""

    parameters: Array
    gradients: Array
    optimizer: Array
    gathered: Numeric
    update: Numeric


def states(
    parameters: Array,
    trained: Array,
    largest: Numeric,
    ranks: Numeric,
    zero: int,
    optimizer: Optimizer,
    formats: Precision,
    *,
    training: bool = True,
) -> States:
    """States of ``parameters`` elements on each stage, ``trained`` of them with gradients and optimizer states, sharded
    over ``ranks`` as ZeRO's stages say (Rajbhandari et al., SC 2020).

    ``largest``: elements of the largest section; with sharded parameters two of them are whole at once.
    """
    share = [1.0 / np.asarray(ranks) if zero >= stage else 1.0 for stage in (3, 2, 1)]
    return States(
        parameters * formats.parameter * share[0],
        trained * ((formats.gradient + formats.accumulator) * training) * share[1],
        trained * (optimizer.state_bytes(formats) * training) * share[2],
        2.0 * largest * formats.parameter if zero == 3 else 0.0 * np.asarray(largest),
        trained * (optimizer.temporary_bytes(formats) * training) * share[2],
    )


def workspace(layers: Array, workspace_bytes: Array, transient: Array, bucket: Numeric) -> Array:
    """What a stage needs for a moment, (stages, …): the most that an operation needs (of ``workspace_bytes``, those of
    sections), two buckets, and what recomputation brings back. Only sections that a stage holds count."""
    known: dict[bytes, Array] = {}
    rows = []
    for sections in layers > 0:  # few stages differ in what they hold
        kind = sections.tobytes()
        if kind not in known:
            most = (figures[sections].max(axis=0, initial=0.0) for figures in (workspace_bytes, transient))
            known[kind] = next(most) + next(most) + 2.0 * np.asarray(bucket)
        rows.append(known[kind])
    return np.stack(rows)


def with_update(work: Array, states: States, activations: Array) -> Array:
    """What a stage needs for a moment beside its ``activations``, raised to what the update takes in their place where
    that is more."""
    return np.maximum(work, states.update - states.gathered - activations)


def total_memory(states: States, activations: Array, work: Numeric) -> Array:
    """Bytes of each stage, all parts together."""
    return states.parameters + states.gradients + states.optimizer + activations + work + states.gathered


#: The squared norm of the gradients is exchanged as one fp32 number.
NORM_BYTES = 4.0


def update_kernel(count: float, tensors: float, optimizer: Optimizer, formats: Precision) -> Kernel:
    """The optimizer as one pass over all that it reads and writes of ``count`` parameters in ``tensors``."""
    read, written = (count * per_parameter for per_parameter in optimizer.update_bytes(formats))
    calls, flops = optimizer.launches(tensors), count * optimizer.flops
    return flat_pass("update", "optimizer", "update", count, read, written, flops=flops, calls=calls)


def clip_kernels(count: float, clip: str, formats: Precision) -> list[Kernel]:
    """Passes over ``count`` gradients before an update that is clipped to a global norm: they are read once for the
    norm and, where they are ``scaled`` apart from the update, read and written once more (Pascanu et al., ICML
    2013)."""
    size = count * formats.summed
    norm = flat_pass("norm of gradients", "reduce", "update", count, size, 0.0, flops=2.0 * count)
    scale = flat_pass("scaled gradients", "elementwise", "update", count, size, size)
    return {"none": [], "norm": [norm], "scaled": [norm, scale]}[clip]


def clip_axes(zero: int) -> Axes:
    """The axes over which parts of the norm are summed: whatever parameters, or shards of their gradients, are divided
    over."""
    return ("tp", "cp", *BATCH_AXES, "pp") if zero else ("tp", "pp")


#: What fills the memory.
PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the fullest device at the end of the forward pass, when most activations live.

    ``workspace`` is the largest temporary: two copies of the largest activation (a gradient and its successor),
    communication buckets (or, if that is more, what the update takes in place of activations), and what is
    ``reserved``, which no tensor gets: the context of the process and buffers of its communicators.
    ``fragmentation``: what the framework's allocator holds beside its tensors while there is room, as a share of them;
    it gives that back before it runs out, so that it is no part of the total.

    >>> shown = Footprint(6.0, 2.0, 4.0, 5.0, 2.0, 1.0, 0.125, capacity=20.5)
    >>> shown.allocated, shown.cached, shown.used, shown.fits
    (18.0, 19.5, 20.5, True)
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    reserved: float
    fragmentation: float
    capacity: float

    @property
    def parts(self) -> dict[str, float]:
        """The bytes by part; they add up to the total."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """What the framework's allocator hands out (torch.cuda.max_memory_allocated)."""
        return self.total - self.reserved

    @property
    def cached(self) -> float:
        """Memory that the allocator reserves (torch.cuda.max_memory_reserved): at most what the device offers, unless
        the tensors alone exceed that."""
        return max(self.allocated, min(self.allocated * (1.0 + self.fragmentation), self.capacity - self.reserved))

    @property
    def used(self) -> float:
        """What the device's driver shows (nvidia-smi): context and communicators, too."""
        return self.cached + self.reserved

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


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


#: What may live in host memory.
OFFLOADABLE = ("optimizer", "gradients", "parameters", "activations")


@dataclass(frozen=True, slots=True)
class Offload:
    """``parts`` of a rank's state in host memory; ``link`` to it, each way, and what the rank reaches of the host's
    memory bandwidth [byte/s]. ``layers`` whose activations go there (None: those of the whole network).

    Reference: Ren et al., ZeRO-Offload, USENIX ATC 2021; Rajbhandari et al., ZeRO-Infinity, SC 2021.
    """

    parts: frozenset[str]
    link: float
    memory: float
    layers: int | None = None

    def holds(self, part: str) -> bool:
        return part in self.parts

    def activation_share(self, repeat: Array, blocks: Mask) -> Array:
        """The part of each section's activations that goes to host memory: (sections,). So many layers of all are that
        share of every one of the repeated ``blocks``; PlanError where there are fewer.

        >>> offload = Offload(frozenset({"activations"}), 1.0, 1.0, layers=40)
        >>> offload.activation_share(np.array([1.0, 80.0, 1.0]), np.array([False, True, False]))
        array([0. , 0.5, 0. ])
        """
        if self.layers is None or not self.holds("activations"):
            return np.full(len(repeat), float(self.holds("activations")))
        layers = repeat[blocks].sum()
        if self.layers > layers:
            raise PlanError(f"offload_layers: {self.layers} layers; the network has {layers:.0f}")
        return np.asarray(blocks * (self.layers / layers))


NOTHING = Offload(frozenset(), np.inf, np.inf)
#: Share of a host's memory bandwidth that an optimizer on it reaches: DeepSpeed's CPU-Adam takes 2.57 s for 10e9
#: parameters, 28 bytes each, on the two Xeon 8168 of a DGX-2, of 256 GB/s (Ren et al., USENIX ATC 2021, its table of
#: Adam's latency).
HOST_SHARE = 28.0 * 10.0 / 2.57 / 256.0


def offload_of(text: str, system: System, rates: Rates | None = None, layers: int | None = None) -> Offload:
    """The parts that a run names, ``optimizer,activations``, the latter of so many ``layers``, with the links of the
    system; SpecError where a name or a figure is missing, PlanError where one part cannot go without another. Constant
    ``rates`` hold for the host, too: all of its memory bandwidth under ``ideal``."""
    names = listed(text)
    if layers is not None and "activations" not in names:
        problem = f"counts layers whose activations go to host memory, but offload is {text!r}"
        raise PlanError(f"offload_layers: {problem}; use activations")
    if names == ["none"]:
        return NOTHING
    for name in names:
        if name not in OFFLOADABLE:
            raise SpecError(f"offload: unknown part {name!r} in {text!r}; {near(name, (*OFFLOADABLE, 'none'))}")
    parts = frozenset(names)
    lost = sorted(parts & {"gradients", "parameters"})
    if not parts or (lost and "optimizer" not in parts):
        raise PlanError(f"offload {text!r}: {' and '.join(lost) or 'nothing'} cannot go without optimizer")
    if "optimizer" not in parts:
        return Offload(parts, link_rate(system, rates), np.inf, layers)
    share = HOST_SHARE if rates is None else rates.memory
    memory = share * host_figure(system, "memory_bandwidth") / system.devices_per_node
    return Offload(parts, link_rate(system, rates), memory, layers)


@dataclass(frozen=True, slots=True)
class Shares:
    """A rank's part of the weights that it fetches for a layer iteration, and of the gradients that leave it after one;
    whether the host adds those up over several microbatches. Each (configurations,). ``activations``: the part of what
    sections keep that travels, (sections,)."""

    weights: Numeric = 1.0
    gradients: Numeric = 1.0
    accumulates: Numeric = 0.0
    activations: Numeric = 1.0

    @classmethod
    def of(
        cls, zero: int, ranks: Numeric, microbatches: Numeric, *, scattered: bool, activations: Numeric = 1.0
    ) -> Shares:
        """Weights are whole unless ZeRO-3 divides them. Gradients are whole until ranks sum them: after every
        microbatch if ``scattered``, else after the last one."""
        whole = 1.0 / np.asarray(ranks)
        several = np.asarray(microbatches) > 1
        summed = np.where(several & (not scattered), 1.0, whole) if zero else 1.0
        return cls(whole if zero == 3 else 1.0, summed, several.astype(np.float64), activations)


def streamed(
    times: LayerTimes, parameters: Array, trained: Array, offload: Offload, formats: Precision, shares: Shares
) -> LayerTimes:
    """Layer iterations whose activations, weights or gradients travel while they compute; what an iteration waits for
    them counts as transfer. ``parameters`` and those of them that are ``trained``: elements, (sections, …).

    forward: kept activations go out while weights come in; backward: both come in while gradients go out, and the host
    adds them to an fp32 sum. Where the activations of some layers alone go out, each of them travels until the next
    such layer has computed, so every layer counts its share. Of what was kept two layers are on the device at once: one
    that travels, and one that computes unless it stays there.
    """
    shape = (-1,) + (1,) * (times.forward.ndim - 1)
    elements, learned = (each.reshape(shape) if each.ndim == 1 else each for each in (parameters, trained))
    share = np.reshape(shares.activations, shape) * offload.holds("activations")
    kept = times.saved_bytes * share
    weights = shares.weights * formats.parameter * elements * offload.holds("parameters")
    sent = shares.gradients * learned * offload.holds("gradients")
    added = sent * shares.accumulates * (formats.gradient + 2.0 * SUM_BYTES) / offload.memory
    out = np.maximum(kept, weights) / offload.link
    back = np.maximum(np.maximum(kept + weights, sent * formats.gradient) / offload.link, added)
    return replace(
        times,
        forward_transfers=times.forward_transfers + _beyond(out, times.forward),
        backward_transfers=times.backward_transfers + _beyond(back, times.backward + times.weights),
        saved_bytes=times.saved_bytes - kept,
        offloaded_bytes=times.offloaded_bytes + kept,
        transient=times.transient + times.saved_bytes * np.where(share == 1.0, 2.0, np.ceil(share)),
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
    kept = states.parameters - offloaded[0], states.gradients - offloaded[1], states.optimizer - offloaded[2]
    stays = States(*kept, gathered, states.update * (not offload.holds("optimizer")))
    return stays, offloaded[0] + offloaded[1] + offloaded[2]


def host_update(count: Array, backward: Array, optimizer: Optimizer, formats: Precision, offload: Offload) -> Array:
    """Seconds of an update of ``count`` parameters by the host, after a ``backward`` pass of so many seconds.

    max(0, gradients / link − backward) + max(moved / memory, parameters / link)

    Gradients go to the host beside the last backward pass; the update moves all that it reads and writes through host
    memory, and new parameters return in tiles as they are ready.

    >>> from paleo.operations.base import OPTIMIZERS
    >>> from paleo.operations.tensor import precision
    >>> host = Offload(frozenset({"optimizer"}), 20e9, 28e9)
    >>> float(host_update(1e9, 0.06, OPTIMIZERS["adam"], precision("bf16"), host))  # 2 GB out in 0.1 s, 28 GB moved
    1.04
    """
    sent = 0.0 if offload.holds("gradients") else count * formats.gradient / offload.link
    back = 0.0 if offload.holds("parameters") else count * formats.parameter / offload.link
    moved = count * sum(optimizer.update_bytes(formats)) / offload.memory
    return np.asarray(_beyond(sent, backward) + np.maximum(moved, back))
