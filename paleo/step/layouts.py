"""Layouts of ranks whose programs have the same sections: all that follows from degrees and parameters, not from
microbatches, for all of them at once.

Arrays have the kinds of stages (`paleo.step.memory.Kinds`) or the stages themselves along their first axis and
the layouts along the last."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from paleo.parallel.placement import BATCH_AXES
from paleo.step.exchange import (
    compressed,
    compressed_gather,
    gathered_shares,
    gradient_exchange,
    gradient_shares,
    owned_elements,
    replica_groups,
    scoped,
    sharers,
    state_bytes,
    unit_gradient,
)
from paleo.step.memory import NORM_BYTES, clip_axes, divided, states, tied_pairs
from paleo.step.section_times import per_stage, section_figures

if TYPE_CHECKING:
    from paleo.compression.base import SummedGradient
    from paleo.lowering.program import Program
    from paleo.parallel.placement import Axes, Mesh
    from paleo.step.backend import Backend
    from paleo.step.memory import Assignment, StageKinds, States

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Count = npt.NDArray[np.int64]
Value = TypeVar("Value")
Numbers = TypeVar("Numbers", float, Array)
#: What is sent over the replicas: gradients, or parameters of which the trained or all are gathered, or all of them
#: again before the backward pass.
Sent = Literal["gradients", "trained", "all", "again"]


class Shared:
    """Figures that several steps have in common, each computed once."""

    def __init__(self) -> None:
        self._figures: dict[Hashable, object] = {}

    def once(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The figure of a key, computed at its first use."""
        if key not in self._figures:
            self._figures[key] = compute()
        return self._figures[key]  # type: ignore[return-value]

    def forget(self) -> None:
        """Empties the cache; figures are computed again when they are next needed."""
        self._figures.clear()


@dataclass(frozen=True, slots=True)
class Owed:
    """Collectives of one operation that layouts owe: the layout of each, the stride and ranks of its groups, (2,
    groups, stages or 1, collectives), and its elements of each holding, (sections and ties, collectives)."""

    operation: str
    layout: list[int]
    groups: Count
    elements: Array


@dataclass(frozen=True, slots=True)
class Layouts:
    """Layouts of equal stages: ``meshes`` and ``programs``, one of each a layout; ``sequence_parallel`` says which
    split the sequence over tp between layers, ``local_batches`` the samples of each data-parallel rank."""

    backend: Backend
    meshes: tuple[Mesh, ...]
    programs: tuple[Program, ...]
    sequence_parallel: tuple[bool, ...]
    local_batches: tuple[int, ...]
    shared: Shared = field(default_factory=Shared, compare=False)

    def __len__(self) -> int:
        return len(self.meshes)

    @property
    def training(self) -> bool:
        """Whether there is a backward pass."""
        return not self.backend.run.forward_only

    @property
    def regathers(self) -> bool:
        """Whether gathers of sharded parameters differ before the backward pass."""
        return self.backend.compression is not None and self.backend.compression.sharded

    @property
    def replicas(self) -> Array:
        """Ranks that share out the batch: (layouts,)."""
        return self.shared.once("replicas", lambda: np.array([float(mesh.replicas) for mesh in self.meshes]))

    @property
    def shards(self) -> Array:
        """Ranks over which ZeRO shares out states: (layouts,)."""
        return self.shared.once("shards", lambda: np.array([float(m.group_size(m.state_axes)) for m in self.meshes]))

    def parameters(self, trained: bool) -> Array:
        """Parameter elements of each section and tie, or the trained ones of them: (sections and ties, layouts)."""
        return self.shared.once(("parameters", trained), lambda: self._stacked(partial(_elements, trained=trained)))

    def _stacked(self, figures: Callable[[Program], Array]) -> Array:
        """Figures of every layout's program, side by side; many layouts share a program."""
        known: dict[int, Array] = {}
        columns = []
        for program in self.programs:
            if id(program) not in known:
                known[id(program)] = figures(program)
            columns.append(known[id(program)])
        return np.stack(columns, axis=1)

    def elements(self, kinds: StageKinds, trained: bool) -> Array:
        """Parameter elements of each kind of stage, copies of tied ones too: (kinds, layouts)."""
        key = "elements", trained
        return self.shared.once(key, lambda: np.asarray(kinds.holdings @ self.parameters(trained)))

    # collectives over replicas

    def collective(self, operation: str, groups: Count, sizes: Array) -> Array:
        """Seconds of one collective of ``sizes`` bytes, (…, layouts) or (stages, …, layouts), in the slowest of its
        ``groups``, (2, groups, stages or 1, layouts), which hold strides and ranks. An operation may name a part of
        each group, ``all_gather@node``."""
        operation, groups = scoped(operation, groups, self.backend.system.devices_per_node)
        stages = groups.shape[2:3] if sizes.ndim > 1 else ()
        shape = (*groups.shape[:2], *stages, *(1,) * (sizes.ndim - 2), groups.shape[-1])
        whole = (groups.shape[1], *sizes.shape)
        strides, ranks = np.broadcast_to(groups.reshape(shape), (2, *whole)).reshape(2, -1)
        seconds = self.backend.fabric.times(operation, strides, ranks, np.broadcast_to(sizes, whole).ravel())
        return np.asarray(seconds.reshape(whole).max(axis=0))

    def exchanged(self, operation: str, layouts: Sequence[int], groups: Count, sizes: Array) -> Array:
        """The same of some layouts, where ranks own whole tensors a broadcast from each owner in turn: as many as there
        are owners, or tensors where these are fewer (to its owner a sum goes the same way back, as long)."""
        if operation != "broadcast":
            return self.collective(operation, groups, sizes)
        message = np.minimum(sizes, self.message_bytes[list(layouts)])
        count = np.divide(sizes, message, out=np.zeros_like(sizes), where=message > 0)
        return count * self.collective(operation, groups, message)

    @property
    def message_bytes(self) -> Array:
        """Bytes that an owner of whole tensors sends: its share, or one tensor of mean size: (layouts,)."""
        return self.shared.once("message", self._message_bytes)

    def _message_bytes(self) -> Array:
        repeat, tensors = (section_figures(self.programs[0], name) for name in ("repeat", "tensors"))
        trained = repeat @ self.parameters(trained=True)[: len(repeat)]
        owners = self.shards * self.meshes[0].degree("pp")
        return np.asarray(
            trained / np.minimum(owners, max(float(repeat @ tensors), 1.0)) * self.backend.formats.parameter
        )

    def groups(self, layouts: Sequence[int], axes: Sequence[Axes], copies: int = 1) -> Count:
        """Stride and ranks of the groups over some axes of each of some layouts, with ``copies`` of the network: (2,
        groups, stages, layouts); one stage stands for all where they are alike."""
        if copies == 1:
            pairs = [self._group(layout, each) for layout, each in zip(layouts, axes, strict=True)]
            return np.array(pairs, dtype=np.int64).reshape(-1, 2).T[:, None, None]
        groups = [replica_groups(self.meshes[i], each, copies) for i, each in zip(layouts, axes, strict=True)]
        alone = (np.ones(self.meshes[0].degree("pp"), dtype=np.int64),) * 2
        most = max(map(len, groups), default=1)
        padded = [[*each, *[alone] * (most - len(each))] for each in groups]
        return np.array(padded, dtype=np.int64).transpose(2, 1, 3, 0)

    def _group(self, layout: int, axes: Axes) -> tuple[int, int]:
        mesh = self.meshes[layout]
        return self.shared.once(("group", layout, axes), lambda: (mesh.stride(axes), mesh.group_size(axes)))

    def sent(self, holdings: Array, copies: int, content: Sent, zero: int, width: float) -> Array:
        """Seconds in which the gradients of some holdings are summed over their replicas, or their parameters gathered,
        and their bytes, ``width`` for each element: (2, stages, chunks, layouts) of (stages, chunks, sections and
        ties). With several ``copies`` the first axis is that of the stages."""
        seconds = np.zeros((2, *holdings.shape[:2], len(self)))
        for owed in self._owed(copies, content, zero):
            figures = self.exchanged(owed.operation, owed.layout, owed.groups, holdings @ owed.elements * width)
            np.add.at(seconds[0].T, owed.layout, figures.T)
        seconds[1] = holdings @ self._travelling(copies, content) * width
        return seconds

    def _owed(self, copies: int, content: Sent, zero: int) -> list[Owed]:
        """The collectives of every layout, by operation."""
        key = "owed", copies, content, zero > 0
        return self.shared.once(key, lambda: self._priced_together(copies, content, zero))

    def _priced_together(self, copies: int, content: Sent, zero: int) -> list[Owed]:
        cells: dict[str, list[tuple[int, Axes, Array]]] = {}
        for layout, shares in enumerate(self._shares(copies, content)):
            for axes, elements in shares.items():
                for operation, over_axes, part in self.operations(layout, content, zero, axes, elements):
                    if over_axes or copies > 1:
                        cells.setdefault(operation, []).append((layout, over_axes, part))
        owed = []
        for operation, members in cells.items():
            layouts, groups = [cell[0] for cell in members], [cell[1] for cell in members]
            elements = np.array([cell[2] for cell in members]).T
            owed.append(Owed(operation, layouts, self.groups(layouts, groups, copies), elements))
        return owed

    def operations(
        self, layout: int, content: Sent, zero: int, axes: Axes, elements: Numbers
    ) -> tuple[tuple[str, Axes, Numbers], ...]:
        """The collectives of some elements (or bytes)."""
        owned = self.backend.software.parallelism.whole_tensors and zero in (1, 2)
        if content == "gradients":
            owed, method = gradient_exchange(zero, axes, elements, self.meshes[layout]), self.backend.compression
            owed = owed if method is None else compressed(method, self.gradient(layout, axes), owed)
            to_owners = {"reduce_scatter": "broadcast"} if owned else {}  # a sum goes to its owner the same way back
            return tuple((to_owners.get(operation, operation), over, part) for operation, over, part in owed)
        method = self.backend.compression
        if content in ("all", "again") and method is not None and method.sharded:
            width = self.backend.formats.parameter
            return compressed_gather(
                method, self.gradient(layout, axes), width, axes, elements, again=content == "again"
            )
        return (("broadcast" if owned else "all_gather", axes, elements),)

    def gradient(self, layout: int, axes: Axes) -> SummedGradient:
        """One element of the gradient of a layout's ranks, as compressed for some axes."""
        program, ranks = self.programs[layout], self.meshes[layout].group_size(axes)
        stride = self.meshes[layout].stride(axes) if ranks > 1 else 1
        inside = min(ranks, max(1, self.backend.system.devices_per_node // stride))
        key = "gradient", id(program), ranks, inside
        width = self.backend.formats.summed
        return self.shared.once(key, lambda: unit_gradient(program, float(ranks), width, float(inside)))

    def coding(self, kinds: StageKinds) -> Array:
        """Seconds in which each kind of stage codes and decodes its gradients: (kinds, layouts)."""
        return self.shared.once("coding", lambda: self._coding(kinds))

    def _coding(self, kinds: StageKinds) -> Array:
        trained = self.elements(kinds, trained=True)
        if self.backend.compression is None or not self.training:
            return np.zeros_like(trained)
        columns = [
            self.backend.coded(trained[:, layout], self.gradient(layout, BATCH_AXES))
            if self.replicas[layout] > 1
            else np.zeros(len(trained))
            for layout in range(len(self))
        ]
        return np.stack(columns, axis=1)

    def _coding_state(self, kinds: StageKinds) -> Array:
        """Bytes that compression keeps on each kind of stage: (kinds, layouts)."""
        trained, method = self.elements(kinds, trained=True), self.backend.compression
        if method is None:
            return np.zeros_like(trained)
        bytes_of_layout = [
            state_bytes(method, self.gradient(layout, BATCH_AXES)) if self.replicas[layout] > 1 else 0.0
            for layout in range(len(self))
        ]
        return np.asarray(trained * np.array(bytes_of_layout))

    def _shares(self, copies: int, content: Sent) -> list[dict[Axes, Array]]:
        """Elements of each holding by the axes over which they travel, for each layout."""
        return self.shared.once(("shares", copies, content), lambda: self._by_axes(copies, content))

    def _by_axes(self, copies: int, content: Sent) -> list[dict[Axes, Array]]:
        known: dict[tuple[object, ...], dict[Axes, Array]] = {}
        shares = []
        for program, mesh in zip(self.programs, self.meshes, strict=True):
            key = id(program), tuple(axis for axis, degree in mesh.degrees if degree > 1)
            if key not in known:
                split = (
                    gradient_shares
                    if content == "gradients"
                    else partial(gathered_shares, frozen=content in ("all", "again"))
                )
                known[key] = split(program, mesh, copies)
            shares.append(known[key])
        return shares

    def _travelling(self, copies: int, content: Sent) -> Array:
        """Elements of each holding that travel at all: (sections and ties, layouts)."""
        zeros = np.zeros(len(self.programs[0].sections) + len(self.programs[0].ties))
        shares = self._shares(copies, content)
        return self.shared.once(
            ("travelling", copies, content), lambda: np.stack([sum(each.values(), zeros) for each in shares], axis=1)
        )

    # sums of gradients, gathers and updates of stages

    def exchange(self, assignment: Assignment, zero: int, *, chunks: bool) -> tuple[Array, Array]:
        """Seconds in which gradients are summed, and their bytes: of each chunk (stages, chunks, layouts), or of all
        chunks of a stage in one go (stages, 1, layouts)."""
        kinds, copies = assignment.kinds, assignment.copies
        width = self.backend.formats.summed
        if copies > 1:  # how far apart the copies of a stage are depends on the stage
            stage, chunk = kinds.stages.holdings[assignment.stage_kind], kinds.chunks.holdings[assignment.chunk_kind]
            holdings = np.concatenate([stage[:, None], chunk], axis=1)
            placed = "exchange", assignment.key, zero > 0
            seconds = self.shared.once(placed, lambda: self.sent(holdings, copies, "gradients", zero, width))
            figures = seconds[:, :, 1:] if chunks else seconds[:, :, :1]
            return figures[0], figures[1]
        holdings = np.concatenate([kinds.stages.holdings, kinds.chunks.holdings])[:, None]
        key = "exchange", zero > 0
        seconds = self.shared.once(key, lambda: self.sent(holdings, 1, "gradients", zero, width))[:, :, 0]
        rows = assignment.chunk_kind + len(kinds.stages) if chunks else assignment.stage_kind[:, None]
        return seconds[0, rows], seconds[1, rows]

    def state_gathers(self, assignment: Assignment) -> Array:
        """Seconds in which each stage gathers the parameters that other ranks updated, the host's for their pieces too:
        (stages, layouts)."""
        kinds, width = assignment.kinds.stages, self.backend.formats.parameter
        pieces = self.tensors(kinds) * self.shards * (self.shards > 1) * self.backend.piece

        def gathers(rows: Index | slice) -> Array:
            seconds = self.sent(kinds.holdings[rows, None], assignment.copies, "trained", 1, width)[0, :, 0]
            return np.asarray(seconds + pieces[rows])

        if assignment.copies > 1:
            key = "state gathers", assignment.stages_key
            return self.shared.once(key, lambda: gathers(assignment.stage_kind))
        return self.shared.once("state gathers", lambda: gathers(slice(None)))[assignment.stage_kind]

    def tied_sums(self, assignment: Assignment) -> Array:
        """Seconds in which the two stages that hold a tied parameter sum its gradients, after all others: (stages,
        layouts)."""
        return self.shared.once(("tied", assignment.stages_key), lambda: self._tied_sums(assignment))

    def _tied_sums(self, assignment: Assignment) -> Array:
        seconds = np.zeros((assignment.stages, len(self)))
        pairs = tied_pairs(self.programs[0].ties, assignment.layers) if self.training else []
        for tie, owner, other in pairs:
            key = "tie", tie, abs(other - owner)
            seconds[[owner, other]] += self.shared.once(key, partial(self._tied_sum, tie, abs(other - owner)))
        return seconds

    def _tied_sum(self, tie: int, distance: int) -> Array:
        strides = np.array([mesh.stride(("pp",)) for mesh in self.meshes])
        sizes = np.array([program.ties[tie].elements for program in self.programs]) * self.backend.formats.summed
        return self.backend.fabric.times("all_reduce", strides * distance, np.full(len(sizes), 2), sizes)

    def updates(self, kinds: StageKinds, *, sharded: bool) -> Array:
        """Seconds in which a device updates the parameters that it owns of each kind of stage, clipping too: (kinds,
        layouts)."""
        return self.shared.once(("updates", sharded), lambda: self._updates(kinds, sharded))

    def _updates(self, kinds: StageKinds, sharded: bool) -> Array:
        counts = self.updated_elements(kinds, sharded=sharded)
        if not self.training:
            return np.zeros_like(counts)
        return self.backend.updated(counts, self.tensors(kinds)) + self.clipping(kinds, sharded=sharded)

    def tensors(self, kinds: StageKinds) -> Array:
        """Parameter tensors of each kind of stage: (kinds, 1)."""
        tensors_of_section = section_figures(self.programs[0], "tensors")
        return per_stage(kinds.holdings[:, : len(tensors_of_section)], tensors_of_section)[:, None]

    def clipping(self, kinds: StageKinds, *, sharded: bool) -> Array:
        """Seconds in which gradients are clipped, the sum of their norm over ranks too: (kinds, layouts)."""
        seconds = self.backend.clipped(self.updated_elements(kinds, sharded=sharded))
        if self.backend.clip == "none":
            return seconds
        groups = self.groups(range(len(self)), [clip_axes(int(sharded))] * len(self))
        return seconds + self.collective("all_reduce", groups, np.full(len(self), NORM_BYTES))

    def updated_elements(self, kinds: StageKinds, *, sharded: bool) -> Array:
        """Trained elements of each kind of stage that a rank updates: (kinds, layouts)."""
        trained = self.elements(kinds, trained=True)
        return trained / self.sharers(kinds) if sharded else trained

    # memory of states

    def sharers(self, kinds: StageKinds) -> Array:
        """Ranks over which ZeRO shares out the states of each kind of stage, its mean parameter's: (kinds, layouts)."""
        return self.shared.once("sharers", lambda: self._sharers(kinds))

    def _sharers(self, kinds: StageKinds) -> Array:
        owned = np.zeros((len(kinds), len(self)))
        for copies in np.unique(kinds.copies).astype(int).tolist():
            same_copies = np.flatnonzero(kinds.copies[:, 0] == copies)
            owned[same_copies] = kinds.holdings[same_copies] @ self._owned_elements(copies)
        return sharers(self.elements(kinds, trained=True), owned, self.shards * kinds.copies)

    def _owned_elements(self, copies: int) -> Array:
        """`owned_elements` of each layout: (sections and ties, layouts)."""
        known: dict[tuple[object, ...], Array] = {}
        columns = []
        for program, mesh in zip(self.programs, self.meshes, strict=True):
            key = id(program), *(mesh.degree(axis) for axis in ("cp", *BATCH_AXES))
            if key not in known:
                known[key] = owned_elements(program, mesh, copies)
            columns.append(known[key])
        return np.stack(columns, axis=1)

    def states(self, kinds: StageKinds, zero: int, stages: int) -> tuple[States, Array]:
        """Bytes of the states of each kind of stage on the device, and in host memory: (kinds, layouts) each."""
        zero = 1 if zero == 2 and not self.backend.scatters(zero, stages) else zero
        return self.shared.once(("states", zero), lambda: self._states(kinds, zero))

    def _states(self, kinds: StageKinds, zero: int) -> tuple[States, Array]:
        backend = self.backend
        offloads = backend.offload.holds("parameters")
        largest = self._largest(kinds) if zero == 3 or offloads else np.zeros((1, 1))
        whole = states(
            self.elements(kinds, trained=False),
            self.elements(kinds, trained=True),
            largest,
            self.sharers(kinds),
            zero,
            backend.optimizer,
            backend.formats,
            training=self.training,
        )
        if backend.compression is not None:
            whole = replace(whole, optimizer=whole.optimizer + self._coding_state(kinds))
        if backend.offload.parts:
            return divided(whole, backend.offload, largest, backend.formats)
        return whole, np.zeros_like(whole.parameters)

    def _largest(self, kinds: StageKinds) -> Array:
        """Elements of the largest section of each kind of stage, with the tied parameters that it reads: (kinds,
        layouts)."""
        ties, elements = self.programs[0].ties, self.parameters(trained=False)
        count = len(elements) - len(ties)
        rows = []
        for row in kinds.holdings:
            sections = elements[:count].copy()
            for number, tie in enumerate(ties):
                sections[tie.reader] += elements[count + number] * (row[count + number] > 0)
            rows.append((sections * (row[:count] > 0)[:, None]).max(axis=0))
        return np.array(rows)

    def reserved(self) -> Array:
        """Bytes that the process itself takes: (layouts,)."""
        return self.shared.once("reserved", lambda: np.array([self.backend.reserved(mesh) for mesh in self.meshes]))


def _elements(program: Program, trained: bool) -> Array:
    """Parameter elements of each section and tie of a program: (sections and ties,)."""
    sections = [each.trained if trained else each.parameters for each in program.sections]
    return np.array(sections + [tie.elements * (tie.trained or not trained) for tie in program.ties], dtype=np.float64)
