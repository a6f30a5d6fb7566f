"""The contents of pipeline stages: layers and copies of tied parameters, and bytes on the device and in host memory.

The stages of a pipeline hold layers of each section (run of equal layers). A step without a pipeline is one stage that
holds the network. Memory on the device consists of states, activations and workspace at the peak of a step. The
clipping of gradients is counted as kernels. Host memory holds offloaded states and activations. Every device has a
separate link to the host, with both directions at once. Memory bandwidth, storage and cores of a node are divided
equally among its devices. Offload traffic and work on the host overlap with computation; only the rest is exposed.

All functions are pure and broadcast. Stages are the first axis, configurations the last; units are seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError, SpecError, suggest_names
from paleo.operations.base import Kernel, elementwise_kernel
from paleo.parallel.placement import BATCH_AXES, Axes
from paleo.units import comma_separated

if TYPE_CHECKING:
    from paleo.lowering.program import TiedParameter
    from paleo.lowering.stages_and_recompute import ModelChunk
    from paleo.operations.base import Optimizer
    from paleo.operations.tensor import Precision
    from paleo.pricing.calibration_lookup import ConstantEfficiencies
    from paleo.schedules.base import Schedule
    from paleo.specs.system import System
    from paleo.step.section_times import LayerTimes

Array = npt.NDArray[np.float64]
Numeric = float | Array
Index = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


def count_layers_per_chunk(sections: int, pieces: Sequence[ModelChunk], places: Sequence[Sequence[int]]) -> Array:
    """Count the layers of each section (run of equal layers) in each model chunk of each pipeline stage.

    Parameters
    ----------
    sections : int
        Number of sections.
    pieces : sequence of ModelChunk
        Model chunks of the network, as `cut_into_stages` returns them.
    places : Sequence[Sequence[int]]
        Index in ``pieces`` of each chunk of each stage.

    Returns
    -------
    ndarray, shape (stages, chunks, sections)
        Number of layers.
    """
    placed = np.zeros((len(places), len(places[0]), sections))
    for stage, numbers in enumerate(places):
        for chunk, piece in enumerate(numbers):
            for section, layers in pieces[piece]:
                placed[stage, chunk, section] += layers
    return placed


def tied_copy_mask(layers: Array, ties: Sequence[TiedParameter]) -> Array:
    """Return which stages hold a copy of a tied parameter (such as embeddings) whose owner is on another stage.

    Parameters
    ----------
    layers : ndarray, shape (stages, sections)
        Layers of each section on each stage.
    ties : sequence of TiedParameter
        Parameters that two layers share, such as embeddings.

    Returns
    -------
    ndarray, shape (stages, ties)
        1 for a copy, else 0.
    """
    copies = np.zeros((len(layers), len(ties)))
    known: dict[str, Mask] = {}
    for column, tie in enumerate(ties):
        owners, reads = known.get(tie.name, layers[:, tie.owner_section] > 0), layers[:, tie.reader_section] > 0
        copies[:, column] = reads & ~owners
        known[tie.name] = owners | reads
    return copies


def _layer_and_copy_counts(placed: Array, ties: Sequence[TiedParameter]) -> Array:
    """Count layers of each section, then copies of tied parameters, in each chunk of each stage.

    Copies belong to the last chunk.

    Parameters
    ----------
    placed : ndarray, shape (stages, chunks, sections)
        Layers of each section in each chunk.
    ties : sequence of TiedParameter
        Parameters that two layers share, such as embeddings.

    Returns
    -------
    ndarray, shape (stages, chunks, sections and ties)
        Numbers of layers and copies.
    """
    tied = np.zeros((*placed.shape[:2], len(ties)))
    tied[:, -1] = tied_copy_mask(placed.sum(axis=1), ties)
    return np.concatenate([placed, tied], axis=2)


def tied_stage_pairs(ties: Sequence[TiedParameter], layers: Array) -> list[tuple[int, int, int]]:
    """List the pairs of pipeline stages that share a trained tied parameter, whose gradients they must sum.

    Parameters
    ----------
    ties : sequence of TiedParameter
        Parameters that two layers share, such as embeddings.
    layers : ndarray, shape (stages, sections)
        Number of layers on each stage from each section (run of equal layers).

    Returns
    -------
    list[tuple[int, int, int]]
        Index of the tied parameter, stage of its owner and stage of the copy.
    """
    return [
        (number, int(np.flatnonzero(layers[:, ties[number].owner_section])[0]), stage)
        for stage, number in np.argwhere(tied_copy_mask(layers, ties)).tolist()
        if ties[number].trained
    ]


def gathered_parameter_mask(layers: Array, ties: Sequence[TiedParameter]) -> Array:
    """Return which parameters a stage gathers, and computes gradients of, in one layer of each section (ZeRO-3).

    Gathered are the section's parameters, and copies of the tied parameters that the section reads.

    Parameters
    ----------
    layers : ndarray, shape (stages, sections)
        Layers of each section on each stage.
    ties : sequence of TiedParameter
        Parameters that two layers share, such as embeddings.

    Returns
    -------
    ndarray, shape (stages, sections, sections and ties)
        1 for parameters that are gathered, else 0.
    """
    stages, sections = layers.shape
    parts = np.zeros((stages, sections, sections + len(ties)))
    parts[:, range(sections), range(sections)] = 1.0
    parts[:, [tie.reader_section for tie in ties], range(sections, sections + len(ties))] = tied_copy_mask(layers, ties)
    return parts


class DistinctStages:
    """Distinct stages (or model chunks) by the layers that they hold, so that each is computed once.

    There are few kinds even with many stages. `add_stages` extends the kinds, so call it for all stages before
    computing.
    """

    def __init__(self) -> None:
        self._number: dict[bytes, int] = {}
        self._rows: list[Array] = []

    def add_stages(self, holdings: Array, copies: int) -> Index:
        """Return the kind of each given stage (equal stages are of one kind), and record new kinds.

        Parameters
        ----------
        holdings : ndarray, shape (..., sections and ties)
            Layers and copies, as `_layer_and_copy_counts` returns them.
        copies : int
            Replicas of the network in one pipeline: 2 for bidirectional schedules, else 1.

        Returns
        -------
        Index, shape (...,)
            Index of the kind of each stage.
        """
        rows = np.concatenate([holdings, np.full((*holdings.shape[:-1], 1), float(copies))], axis=-1)
        numbers = []
        for row in rows.reshape(-1, rows.shape[-1]):
            numbers.append(self._number.setdefault(row.tobytes(), len(self._rows)))
            if numbers[-1] == len(self._rows):
                self._rows.append(row)
        return np.array(numbers, dtype=np.intp).reshape(holdings.shape[:-1])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def layer_and_tied_copy_counts(self) -> Array:
        """Layers and tied-parameter copies of each distinct stage, shape (kinds, sections and ties)."""
        return np.array(self._rows)[:, :-1]

    @property
    def replicas(self) -> Array:
        """Number of replicas of the network in the pipeline (2 for DualPipe and Chimera), shape (kinds, 1)."""
        return np.array(self._rows)[:, -1:]


@dataclass(frozen=True, slots=True)
class DistinctStagesAndChunks:
    """Distinct stages and distinct model chunks of several stage assignments; equal ones are computed once."""

    stages: DistinctStages
    chunks: DistinctStages


@dataclass(frozen=True, slots=True)
class StageAssignment:
    """Assignment of model chunks to pipeline stages, of each of ``replicas`` replicas of the network.

    A stage has ``chunks_per_stage`` chunks. ``layers_per_chunk`` are the layers of each section, shape (stages, chunks,
    sections); ``layers_per_stage`` the same of whole stages, shape (stages, sections). ``stage_kind`` has the shape
    (stages,), ``chunk_kind`` (stages, chunks). ``output_sends`` is the number of outputs that a stage sends to other
    stages per microbatch, by the section that computes them, shape (stages, sections).
    """

    model_chunks: tuple[ModelChunk, ...]
    chunks_per_stage: int
    replicas: int
    layers_per_chunk: Array
    layers_per_stage: Array
    output_sends: Array
    distinct_stages_and_chunks: DistinctStagesAndChunks
    stage_kind: Index
    chunk_kind: Index

    @classmethod
    def from_schedule(
        cls,
        pieces: Sequence[ModelChunk],
        schedule: Schedule,
        stages: int,
        chunks: int,
        ties: Sequence[TiedParameter],
        kinds: DistinctStagesAndChunks,
    ) -> StageAssignment:
        """Assign the model chunks of a network to pipeline stages, by a schedule.

        Parameters
        ----------
        pieces : sequence of ModelChunk
            Model chunks of the network, as `cut_into_stages` returns them.
        schedule : Schedule
            Pipeline schedule.
        stages : int
            Number of pipeline stages.
        chunks : int
            Number of model chunks of a stage.
        ties : sequence of TiedParameter
            Parameters that two layers share, such as embeddings.
        kinds : DistinctStagesAndChunks
            Known kinds of stages and chunks; new ones are added.

        Returns
        -------
        StageAssignment
            Layers and model chunks of each stage.
        """
        sections = 1 + max(section for piece in pieces for section, _ in piece)
        places = schedule.stage_chunks(stages, chunks) if stages > 1 else ((0,),)
        copies = schedule.replicas if stages > 1 else 1
        placed = count_layers_per_chunk(sections, pieces, places)
        layers = np.asarray(placed.sum(axis=1))
        sends = np.zeros((stages, sections))
        if stages > 1:
            for stage, sent in enumerate(schedule.sends_output(stages, chunks)):
                for piece, leaves in zip(places[stage], sent, strict=True):
                    sends[stage, pieces[piece][-1][0]] += leaves / copies
        stage_kind = kinds.stages.add_stages(_layer_and_copy_counts(layers[:, None], ties)[:, 0], copies)
        chunk_kind = kinds.chunks.add_stages(_layer_and_copy_counts(placed, ties), copies)
        return cls(tuple(pieces), chunks, copies, placed, layers, sends, kinds, stage_kind, chunk_kind)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stage_kind)

    @property
    def layers_per_microbatch(self) -> Array:
        """Layers of each section that a stage computes for a microbatch, shape (stages, sections).

        With several replicas of the network (bidirectional schedules) this is their mean.
        """
        return self.layers_per_stage / self.replicas

    @property
    def cache_key(self) -> tuple[object, ...]:
        """Cache key: equal for two assignments with the same chunks on the same stages."""
        return self.chunk_kind.shape, self.chunk_kind.tobytes()

    @property
    def stages_cache_key(self) -> tuple[object, ...]:
        """Cache key: equal for two assignments with the same layers on the same stages, in any chunks."""
        return len(self.stage_kind), self.stage_kind.tobytes()


def live_microbatches(schedule: Schedule, stages: int, microbatches: Numeric, chunks: int) -> Array:
    """Count the microbatches whose activations are alive at once, for each model chunk of each pipeline stage.

    Parameters
    ----------
    schedule : Schedule
        Pipeline schedule.
    stages : int
        Number of pipeline stages.
    microbatches : Numeric, shape (...)
        Number of microbatches of a step.
    chunks : int
        Number of model chunks of a stage.

    Returns
    -------
    ndarray, shape (stages, chunks, ...)
        Number of microbatches.
    """
    if stages == 1:
        return np.ones((1, 1) + np.ndim(microbatches) * (1,))
    stage = np.arange(float(stages)).reshape((-1,) + np.ndim(microbatches) * (1,))
    living = schedule.peak_activations_by_chunk(stage, stages, microbatches, chunks)
    shape = np.broadcast_shapes(stage.shape, np.shape(microbatches))
    return np.moveaxis(np.broadcast_to(living, (len(living), *shape)), 0, 1)


@dataclass(frozen=True, slots=True)
class StateMemory:
    """Memory of parameters, gradients and optimizer states on one device of each pipeline stage [byte].

    Arrays have the shape (stages, …), where the last axes are those of the configurations.

    ``gathered_parameters`` are parameters that sharding gathers at a time, ``update_temporaries`` the temporaries of
    the optimizer update, and ``flat_gradient_copies`` the flat copies of gradients before it.
    """

    parameters: Array
    gradients: Array
    optimizer: Array
    gathered_parameters: Numeric
    update_temporaries: Numeric
    flat_gradient_copies: Numeric


def state_memory(
    parameters: Array,
    trained: Array,
    largest: Numeric,
    ranks: Numeric,
    zero: int,
    optimizer: Optimizer,
    formats: Precision,
    *,
    training: bool = True,
    deferred: bool = False,
    flat_copies: tuple[float, float] = (0.0, 0.0),
) -> StateMemory:
    """Compute the memory of parameters, gradients and optimizer states on each pipeline stage.

    Parameters
    ----------
    parameters : ndarray, shape (stages, ...)
        Number of parameter elements.
    trained : ndarray, shape (stages, ...)
        Parameter elements with gradients and optimizer states.
    largest : Numeric, shape (...)
        Elements of the largest section (run of equal layers); ZeRO-3 gathers two sections at once.
    ranks : Numeric, shape (...)
        Ranks over which ZeRO shards states.
    zero : int
        ZeRO stage, 0 to 3.
    optimizer : Optimizer
        Optimizer and its update rule, such as Adam.
    formats : Precision
        Bytes of a number as parameter, gradient, master or optimizer state.
    training : bool, optional
        False for inference, which has parameters only.
    deferred : bool, optional
        True if gradients are scattered only after the backward pass, until when each rank holds them whole.
    flat_copies : tuple of float, optional
        Bytes per parameter of flat copies of gradients between the backward pass and the update, if there are fp32
        masters: of all parameters of the stage, and of those whose states the rank owns (ZeRO-1 and 2).

    Returns
    -------
    StateMemory
        Memory by part [byte].

    References
    ----------
    Rajbhandari et al., ZeRO, SC 2020.
    """
    share = [1.0 / np.asarray(ranks) if zero >= stage else 1.0 for stage in (3, 2, 1)]
    share[1] = 1.0 if deferred else share[1]
    whole, owned = (each * (training and formats.master_bytes > 0) for each in flat_copies)
    copies = trained * (whole + np.where((zero in (1, 2)) | (np.asarray(ranks) == 1), owned * share[2], 0.0))
    return StateMemory(
        parameters * formats.parameter_bytes * share[0],
        trained * ((formats.gradient_bytes + formats.main_gradient_bytes) * training) * share[1],
        trained * (optimizer.state_bytes(formats) * training) * share[2],
        2.0 * largest * formats.parameter_bytes if zero == 3 else 0.0 * np.asarray(largest),
        np.maximum(trained * (optimizer.temporary_bytes(formats) * training) * share[2], copies),
        copies,
    )


def workspace_memory(layers: Array, workspace_bytes: Array, transient: Array, buckets: Numeric) -> Array:
    """Compute the temporary memory of each stage: largest operation, communication buckets, recomputed activations.

    Parameters
    ----------
    layers : ndarray, shape (stages, sections)
        Layers of each section on each stage; only sections with layers count.
    workspace_bytes : ndarray, shape (sections, ...)
        Temporaries of the largest operation of each section.
    transient : ndarray, shape (sections, ...)
        Activations that exist during recomputation.
    buckets : Numeric, shape (...)
        Bytes of communication buckets.

    Returns
    -------
    ndarray, shape (stages, ...)
        Size [byte].
    """
    known: dict[bytes, Array] = {}
    rows = []
    for sections in layers > 0:  # few stages differ in what they hold
        kind = sections.tobytes()
        if kind not in known:
            most = (figures[sections].max(axis=0, initial=0.0) for figures in (workspace_bytes, transient))
            known[kind] = next(most) + next(most) + np.asarray(buckets)
        rows.append(known[kind])
    return np.stack(rows)


def with_update_temporaries(work: Array, states: StateMemory, activations: Array) -> Array:
    """Raise the temporary memory of a stage to that of the optimizer update, if that is larger.

    The update can reuse the memory of activations.

    Parameters
    ----------
    work : ndarray, shape (stages, ...)
        Temporary memory [byte].
    states : StateMemory
        Bytes of states, and of temporaries of the update.
    activations : ndarray, shape (stages, ...)
        Memory of activations [byte].

    Returns
    -------
    ndarray, shape (stages, ...)
        Size [byte].
    """
    return np.maximum(work, states.update_temporaries - states.gathered_parameters - activations)


def total_stage_memory(states: StateMemory, activations: Array, work: Numeric) -> Array:
    """Sum the memory of states, activations and temporaries on each pipeline stage [byte].

    Parameters
    ----------
    states : StateMemory
        Memory of parameters, gradients and optimizer states [byte].
    activations : ndarray, shape (stages, ...)
        Memory of activations [byte].
    work : Numeric, shape (stages, ...)
        Temporary memory [byte].

    Returns
    -------
    ndarray, shape (stages, ...)
        Size [byte].
    """
    return states.parameters + states.gradients + states.optimizer + activations + work + states.gathered_parameters


#: The squared norm of the gradients is exchanged as one fp32 number.
GRADIENT_NORM_BYTES = 4.0


def gradient_clipping_kernels(count: float, clip: str, formats: Precision) -> list[Kernel]:
    """Build the memory passes of gradient clipping to a global norm.

    Gradients are read once for the norm. If they are scaled in a separate pass before the update, they are read and
    written once more.

    Parameters
    ----------
    count : float
        Number of gradient elements.
    clip : str
        ``none``, ``norm`` or ``scaled``.
    formats : Precision
        Bytes of a number as parameter, gradient, master or optimizer state.

    Returns
    -------
    list of Kernel
        Memory-bound kernels; none without clipping.

    References
    ----------
    Pascanu et al., On the difficulty of training recurrent neural networks, ICML 2013.
    """
    size = count * formats.accumulated_gradient_bytes
    norm = elementwise_kernel("norm of gradients", "reduce", "update", count, size, 0.0, flops=2.0 * count)
    scale = elementwise_kernel("scaled gradients", "elementwise", "update", count, size, size)
    return {"none": [], "norm": [norm], "scaled": [norm, scale]}[clip]


def gradient_norm_axes(zero: int) -> Axes:
    """Return the mesh axes over which the global gradient norm is summed.

    The axes are those that split gradients: tp and pp, with ZeRO the data-parallel axes, too.

    Parameters
    ----------
    zero : int
        ZeRO stage, 0 to 3.

    Returns
    -------
    Axes
        Mesh axes.
    """
    return ("tp", "cp", *BATCH_AXES, "pp") if zero else ("tp", "pp")


#: Parts of the memory of a device.
_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass(frozen=True, slots=True)
class MemoryFootprint:
    """Memory of the fullest device at the end of the forward pass, when most activations are alive [byte].

    ``workspace`` is the largest temporary memory. That is two copies of the largest activation (a gradient and the next
    one) and communication buckets, or the temporaries of the update if these exceed the former and the activations.
    Part of the workspace is ``reserved``, the memory outside tensors: the context of the process and buffers of its
    communicators. ``fragmentation`` is the memory that the framework's allocator caches in addition to its tensors, as
    a share of them. ``flat_buffer_cache`` is what the allocator caches for flat buffers, for which the blocks of
    smaller tensors are too small. Both are freed before memory runs out, so they are not part of the total.

    >>> shown = MemoryFootprint(6.0, 2.0, 4.0, 5.0, 2.0, 1.0, 0.125, capacity=20.5)
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
    flat_buffer_cache: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """Memory of each part (parameters, gradients, …) [byte]; the parts sum to the total."""
        return {name: getattr(self, name) for name in _MEMORY_PARTS}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """Memory of tensors in the framework's allocator (``torch.cuda.max_memory_allocated``) [byte]."""
        return self.total - self.reserved

    @property
    def cached(self) -> float:
        """Memory that torch's caching allocator reserves (``torch.cuda.max_memory_reserved``) [byte].

        The allocator reserves at most the memory of the device, unless the tensors exceed that.
        """
        blocks = self.allocated * (1.0 + self.fragmentation) + self.flat_buffer_cache
        return max(self.allocated, min(blocks, self.capacity - self.reserved))

    @property
    def used(self) -> float:
        """Memory that the device's driver reports (nvidia-smi), with context and communicators [byte]."""
        return self.cached + self.reserved

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity


def host_link_rate(system: System, rates: ConstantEfficiencies | None = None) -> float:
    """Return the rate of copies between a device and its host (PCIe or NVLink-C2C), in each direction.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    rates : ConstantEfficiencies, optional
        Constant rates that replace the calibrated ones.

    Returns
    -------
    float
        Copy bandwidth in each direction [byte/s].
    """
    return system.device.host_copy_bandwidth(None if rates is None else rates.link)


def required_host_property(system: System, key: str, instead: str = "") -> float:
    """Return a property of the host of one node of a system, such as its number of cores.

    Parameters
    ----------
    system : System
        Machine: its devices, nodes and links.
    key : str
        Field of the host, such as ``cores``.
    instead : str, optional
        Option that the user can give instead, for the message.

    Returns
    -------
    float
        Value in SI units.

    Raises
    ------
    SpecError
        If the system file lacks the property.
    """
    value = None if system.host is None else getattr(system.host, key)
    if value is None:
        raise SpecError(f"system {system.name}: host.{key} is not stated; state it in its file{instead}")
    return float(value)


#: Parts that can be offloaded to host memory.
_OFFLOADABLE_PARTS = ("optimizer", "gradients", "parameters", "activations")


@dataclass(frozen=True, slots=True)
class Offload:
    """Parts of a rank's state that are offloaded to host memory, with the rates of the links to the host.

    ``link_rate`` is the rate of copies in each direction, and ``host_memory_rate`` the rank's share of the host's
    memory bandwidth [byte/s]. ``activation_layers`` is the number of layers whose activations are offloaded (None:
    all).

    Reference: Ren et al., ZeRO-Offload, USENIX ATC 2021; Rajbhandari et al., ZeRO-Infinity, SC 2021.
    """

    parts: frozenset[str]
    link_rate: float
    host_memory_rate: float
    activation_layers: int | None = None

    def is_offloaded(self, part: str) -> bool:
        """Return True if a part of the state is offloaded to host memory.

        Parameters
        ----------
        part : str
            ``parameters``, ``gradients``, ``optimizer`` or ``activations``.

        Returns
        -------
        bool
            True if the part is offloaded.
        """
        return part in self.parts

    def activation_share(self, repeat: Array, blocks: Mask) -> Array:
        """Compute the share of each section's activations that is offloaded to host memory.

        A limited number of layers counts as an equal share of every repeated block.

        Parameters
        ----------
        repeat : ndarray, shape (sections,)
            Layers of each section.
        blocks : Mask, shape (sections,)
            True for repeated blocks.

        Returns
        -------
        ndarray, shape (sections,)
            Shares, 0 to 1.

        Raises
        ------
        PlanError
            If the network has fewer layers than the run offloads.

        Examples
        --------
        >>> offload = Offload(frozenset({"activations"}), 1.0, 1.0, activation_layers=40)
        >>> offload.activation_share(np.array([1.0, 80.0, 1.0]), np.array([False, True, False]))
        array([0. , 0.5, 0. ])
        """
        if self.activation_layers is None or not self.is_offloaded("activations"):
            return np.full(len(repeat), float(self.is_offloaded("activations")))
        layers = repeat[blocks].sum()
        if self.activation_layers > layers:
            raise PlanError(f"offload.layers: {self.activation_layers} layers; the network has {layers:.0f}")
        return np.asarray(blocks * (self.activation_layers / layers))


_NO_OFFLOAD = Offload(frozenset(), np.inf, np.inf)
#: Share of a host's memory bandwidth that an optimizer on the host reaches. DeepSpeed's CPU-Adam takes 2.57 s for 10e9
#: parameters, 28 bytes each, on the two Xeon 8168 of a DGX-2, which have 256 GB/s (Ren et al., USENIX ATC 2021, its
#: table of Adam's latency).
HOST_OPTIMIZER_BANDWIDTH_SHARE = 28.0 * 10.0 / 2.57 / 256.0


def parse_offload(
    text: str, system: System, rates: ConstantEfficiencies | None = None, layers: int | None = None
) -> Offload:
    """Parse the offloaded parts that a run names, and find the rates of the links to host memory.

    Parameters
    ----------
    text : str
        Names of parts, such as ``optimizer,activations``.
    system : System
        Machine: its devices, nodes and links.
    rates : ConstantEfficiencies, optional
        Constant rates that replace the calibrated ones; ``ideal`` reaches the host's full memory bandwidth.
    layers : int, optional
        Layers whose activations go to host memory; None for all.

    Returns
    -------
    Offload
        Offloaded parts, and rates of the links [byte/s].

    Raises
    ------
    SpecError
        If a part is unknown, or the system file lacks a bandwidth.
    PlanError
        If one part cannot be offloaded without another.
    """
    names = comma_separated(text)
    if layers is not None and "activations" not in names:
        problem = f"counts layers whose activations go to host memory, but offload is {text!r}"
        raise PlanError(f"offload.layers: {problem}; use activations")
    if names == ["none"]:
        return _NO_OFFLOAD
    for name in names:
        if name not in _OFFLOADABLE_PARTS:
            near = suggest_names(name, (*_OFFLOADABLE_PARTS, "none"))
            raise SpecError(f"offload: unknown part {name!r} in {text!r}; {near}")
    parts = frozenset(names)
    lost = sorted(parts & {"gradients", "parameters"})
    if not parts or (lost and "optimizer" not in parts):
        raise PlanError(f"offload {text!r}: {' and '.join(lost) or 'nothing'} cannot go without optimizer")
    if "optimizer" not in parts:
        return Offload(parts, host_link_rate(system, rates), np.inf, layers)
    share = HOST_OPTIMIZER_BANDWIDTH_SHARE if rates is None else rates.memory
    memory = share * required_host_property(system, "memory_bandwidth") / system.devices_per_node
    return Offload(parts, host_link_rate(system, rates), memory, layers)


@dataclass(frozen=True, slots=True)
class OffloadShares:
    """Shares of a layer's weights and gradients that are copied between device and host, shape (configurations,).

    ``accumulates_on_host`` is 1 if the host sums gradients over several microbatches. ``activations`` is the share of
    saved activations that is offloaded, shape (sections,).
    """

    weights: Numeric = 1.0
    gradients: Numeric = 1.0
    accumulates_on_host: Numeric = 0.0
    activations: Numeric = 1.0

    @classmethod
    def from_zero_stage(
        cls, zero: int, ranks: Numeric, microbatches: Numeric, *, scattered: bool, activations: Numeric = 1.0
    ) -> OffloadShares:
        """Compute a rank's share of the weights and gradients that are copied between device and host.

        Weights are whole unless ZeRO-3 shards them. Gradients are whole until ranks sum them: after every microbatch if
        `scattered`, else after the last one.

        Parameters
        ----------
        zero : int
            ZeRO stage, 0 to 3.
        ranks : Numeric, shape (configurations,)
            Ranks that share states.
        microbatches : Numeric, shape (configurations,)
            Number of microbatches of a step.
        scattered : bool
            True if gradients are reduce-scattered after every microbatch.
        activations : Numeric, shape (sections,), optional
            Share of each section's saved activations that is offloaded.

        Returns
        -------
        OffloadShares
            Shares, 0 to 1.
        """
        whole = 1.0 / np.asarray(ranks)
        several = np.asarray(microbatches) > 1
        summed = np.where(several & (not scattered), 1.0, whole) if zero else 1.0
        return cls(whole if zero == 3 else 1.0, summed, several.astype(np.float64), activations)


def with_offload_traffic(
    times: LayerTimes, parameters: Array, trained: Array, offload: Offload, formats: Precision, shares: OffloadShares
) -> LayerTimes:
    """Add the exposed copies between device and host (offload) to the times of layers.

    In the forward pass saved activations are copied out while weights are copied in. In the backward pass both are
    copied in while gradients are copied out, and the host adds the gradients to an fp32 sum. The activations of two
    layers are on the device at once: one being copied, one computing.

    Parameters
    ----------
    times : LayerTimes
        Times of layer iterations without offload.
    parameters : ndarray, shape (sections, ...)
        Number of parameter elements.
    trained : ndarray, shape (sections, ...)
        Number of trained parameter elements.
    offload : Offload
        Parts of the state in host memory, with link rates.
    formats : Precision
        Bytes of a number as parameter, gradient, master or optimizer state.
    shares : OffloadShares
        Shares of weights, gradients and activations that the rank copies.

    Returns
    -------
    LayerTimes
        Time and memory of one layer of each section (run of equal layers).
    """
    shape = (-1,) + (1,) * (times.forward.ndim - 1)
    elements, learned = (each.reshape(shape) if each.ndim == 1 else each for each in (parameters, trained))
    share = np.reshape(shares.activations, shape) * offload.is_offloaded("activations")
    kept = times.saved_bytes * share
    weights = shares.weights * formats.parameter_bytes * elements * offload.is_offloaded("parameters")
    sent = shares.gradients * learned * offload.is_offloaded("gradients")
    added_bytes = formats.gradient_bytes + 2.0 * HOST_GRADIENT_SUM_BYTES
    added = sent * shares.accumulates_on_host * added_bytes / offload.host_memory_rate
    out = np.maximum(kept, weights) / offload.link_rate
    back = np.maximum(np.maximum(kept + weights, sent * formats.gradient_bytes) / offload.link_rate, added)
    return replace(
        times,
        forward_transfers=times.forward_transfers + _exposed(out, times.forward),
        backward_transfers=times.backward_transfers + _exposed(back, times.backward + times.weight_gradients),
        saved_bytes=times.saved_bytes - kept,
        offloaded_bytes=times.offloaded_bytes + kept,
        recompute_bytes=times.recompute_bytes + times.saved_bytes * np.where(share == 1.0, 2.0, np.ceil(share)),
    )


#: Bytes of a gradient in the host's sums, which are fp32.
HOST_GRADIENT_SUM_BYTES = 4.0


def _exposed(seconds: Numeric, hidden_by: Numeric) -> Array:
    return np.maximum(0.0, np.asarray(seconds) - hidden_by)


def divide_offloaded_states(
    states: StateMemory, offload: Offload, largest: Numeric, formats: Precision
) -> tuple[StateMemory, Array]:
    """Split parameters, gradients and optimizer states between device and host memory.

    The device holds two sections of offloaded parameters at once.

    Parameters
    ----------
    states : StateMemory
        Memory of parameters, gradients and optimizer states [byte].
    offload : Offload
        Parts of the state in host memory, with link rates.
    largest : Numeric
        Elements of the largest section.
    formats : Precision
        Bytes of a number as parameter, gradient, master or optimizer state.

    Returns
    -------
    tuple[StateMemory, Array]
        States on the device, and bytes in host memory of shape (stages, ...).
    """
    away = {part: offload.is_offloaded(part) for part in ("parameters", "gradients", "optimizer")}
    offloaded = {part: getattr(states, part) * goes for part, goes in away.items()}
    stays = StateMemory(
        **{part: getattr(states, part) - figures for part, figures in offloaded.items()},
        gathered_parameters=np.maximum(
            states.gathered_parameters, 2.0 * largest * formats.parameter_bytes * away["parameters"]
        ),
        update_temporaries=states.update_temporaries * (not away["optimizer"]),
        flat_gradient_copies=states.flat_gradient_copies * (not away["optimizer"]),
    )
    return stays, offloaded["parameters"] + offloaded["gradients"] + offloaded["optimizer"]


def host_update_time(
    count: Array, backward: Array, optimizer: Optimizer, formats: Precision, offload: Offload
) -> Array:
    """Compute the exposed time of an optimizer update on the host (ZeRO-Offload).

    max(0, gradients / link − backward) + max(moved / memory, parameters / link). Gradients are copied to the host
    during the last backward pass. The update reads and writes host memory, and new parameters are copied back in tiles
    as they are ready.

    Parameters
    ----------
    count : ndarray, shape (...)
        Number of parameters that are updated.
    backward : ndarray, shape (...)
        Time of the last backward pass [s].
    optimizer : Optimizer
        Optimizer and its update rule, such as Adam.
    formats : Precision
        Bytes of a number as parameter, gradient, master or optimizer state.
    offload : Offload
        Parts of the state in host memory, with link rates.

    Returns
    -------
    ndarray, shape (...)
        Time [s].

    References
    ----------
    Ren et al., ZeRO-Offload, USENIX ATC 2021.

    Examples
    --------
    >>> from paleo.operations.base import OPTIMIZERS
    >>> from paleo.operations.tensor import default_precision
    >>> host = Offload(frozenset({"optimizer"}), 20e9, 28e9)
    >>> # 2 GB sent, 28 GB moved
    >>> float(host_update_time(1e9, 0.06, OPTIMIZERS["adam"], default_precision("bf16"), host))
    1.04
    """
    sent = 0.0 if offload.is_offloaded("gradients") else count * formats.gradient_bytes / offload.link_rate
    back = 0.0 if offload.is_offloaded("parameters") else count * formats.parameter_bytes / offload.link_rate
    at_once = replace(optimizer, foreach=False)  # lists are the GPU's way
    moved = count * sum(at_once.update_bytes(formats)) / offload.host_memory_rate
    return np.asarray(_exposed(sent, backward) + np.maximum(moved, back))
