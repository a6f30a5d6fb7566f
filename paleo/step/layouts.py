"""Parallel layouts whose pipeline stages have equal sections (runs of equal layers), computed together.

Everything here depends on degrees and parameters, not on microbatches, and is computed for all layouts at once. Arrays
have the kinds of stages (`paleo.step.memory.DistinctStagesAndChunks`), or the stages themselves, along their first axis
and the layouts along the last. Ties are parameters that two layers share, such as embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from paleo.lowering.stages_and_recompute import full_recompute_sections
from paleo.parallel.placement import BATCH_AXES, Axes, Mesh
from paleo.schedules.base import distinct_values
from paleo.step.gradient_exchange import (
    collective_scope_groups,
    compressed_collectives,
    compressed_parameter_gather,
    compression_state_bytes,
    gathered_elements_by_axes,
    gradient_elements_by_axes,
    gradient_exchange_collectives,
    gradient_sizes_per_element,
    mean_sharding_ranks,
    replica_groups,
    zero_owned_elements,
)
from paleo.step.memory import (
    GRADIENT_NORM_BYTES,
    DistinctStages,
    StageAssignment,
    StateMemory,
    divide_offloaded_states,
    gradient_norm_axes,
    state_memory,
    tied_stage_pairs,
)
from paleo.step.section_times import section_field_values, sum_per_stage

if TYPE_CHECKING:
    from paleo.compression.base import SummedGradient
    from paleo.lowering.program import Program
    from paleo.operations.base import WeightMatrices
    from paleo.step.backend import Backend

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.intp]
Count = npt.NDArray[np.int64]
CachedValue = TypeVar("CachedValue")
Numbers = TypeVar("Numbers", float, Array)
#: What is sent over the replicas: gradients; or gathers of the trained parameters, of all parameters, or of all of them
#: before the backward pass (``again``).
ExchangedTensors = Literal["gradients", "trained", "all", "again"]


class ResultCache:
    """Cache of results by key, shared by several step predictions."""

    def __init__(self) -> None:
        self._figures: dict[Hashable, object] = {}

    def get_or_compute(self, key: Hashable, compute: Callable[[], CachedValue]) -> CachedValue:
        """Return a cached result, computed at the first call.

        Parameters
        ----------
        key : Hashable
            Name of the result, and everything that the result depends on.
        compute : Callable[[], CachedValue]
            Function that computes the result.

        Returns
        -------
        CachedValue
            Cached or computed result.
        """
        if key not in self._figures:
            self._figures[key] = compute()
        return self._figures[key]  # type: ignore[return-value]

    def clear(self) -> None:
        """Empty the cache, so that results are computed again when they are next needed."""
        self._figures.clear()


class _HasCache(Protocol):
    @property
    def cache(self) -> ResultCache: ...


CacheHolder = TypeVar("CacheHolder", bound=_HasCache)
Arguments = ParamSpec("Arguments")


def cached(
    key: Callable[..., tuple[Hashable, ...]] = lambda *_, **__: (),
) -> Callable[
    [Callable[Concatenate[CacheHolder, Arguments], CachedValue]],
    Callable[Concatenate[CacheHolder, Arguments], CachedValue],
]:
    """Decorate a function of layouts, configurations or a batch, whose results are kept in the ``cache`` of these.

    Parameters
    ----------
    key : callable, optional
        Function from the same arguments to what the result depends on; by default it depends on no argument.

    Returns
    -------
    callable
        Decorator.
    """

    def decorate(
        function: Callable[Concatenate[CacheHolder, Arguments], CachedValue],
    ) -> Callable[Concatenate[CacheHolder, Arguments], CachedValue]:
        name = function.__qualname__

        @wraps(function)
        def look_up(holder: CacheHolder, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> CachedValue:
            full_key = name, *key(holder, *args, **kwargs)
            return holder.cache.get_or_compute(full_key, partial(function, holder, *args, **kwargs))

        return look_up

    return decorate


@dataclass(frozen=True, slots=True)
class _RequiredCollectives:
    """Collectives of one operation (such as reduce-scatter) that several parallel layouts require.

    ``layout_indices`` is the index of the layout of each collective. ``groups`` holds (stride, ranks) of the rank
    groups of each, shape (2, groups, stages or 1, collectives). ``elements`` counts the elements of one layer of each
    section, then of each tied parameter, shape (sections and ties, collectives).
    """

    operation: str
    layout_indices: list[int]
    groups: Count
    elements: Array


@dataclass(frozen=True, slots=True)
class Layouts:
    """Parallel layouts that are computed together, each with its mesh and the program of one rank.

    Their pipeline stages have equal sections (runs of equal layers). ``sequence_parallel`` is True for layouts that
    split the sequence over tp between layers. ``local_batches`` are the samples of each data-parallel rank per step.
    """

    backend: Backend
    meshes: tuple[Mesh, ...]
    programs: tuple[Program, ...]
    sequence_parallel: tuple[bool, ...]
    local_batches: tuple[int, ...]
    cache: ResultCache = field(default_factory=ResultCache, compare=False)
    #: Figures of single programs, which other layouts of the same programs share.
    program_cache: ResultCache = field(default_factory=ResultCache, compare=False)

    def __len__(self) -> int:
        return len(self.meshes)

    @property
    def has_backward(self) -> bool:
        """True if the step has a backward pass (training), False for inference."""
        return not self.backend.run.forward_only

    @property
    def has_separate_backward_gathers(self) -> bool:
        """True if gathers of sharded parameters before the backward pass differ from those before the forward pass."""
        return self.backend.compression is not None and self.backend.compression.replaces_zero3_collectives

    @property
    @cached()
    def replicas(self) -> Array:
        """Number of data-parallel ranks, shape (layouts,)."""
        return np.array([float(mesh.replicas) for mesh in self.meshes])

    @property
    @cached()
    def zero_shard_ranks(self) -> Array:
        """Number of ranks over which ZeRO shards states, shape (layouts,)."""
        return np.array([float(mesh.group_size(mesh.zero_shard_axes)) for mesh in self.meshes])

    @property
    @cached()
    def bucket_bytes(self) -> Array:
        """Size of a gradient bucket in each layout [byte], shape (layouts,).

        Bucket rules depend on the number of ranks that hold the same parameters.
        """
        return self.backend.bucket_bytes(np.array([float(mesh.replicas * mesh.degree("cp")) for mesh in self.meshes]))

    def bucket_memory(self, kinds: DistinctStages) -> Array:
        """Return the memory of gradient bucket buffers beyond the gradients themselves.

        A bucket is at most as large as the gradients of the stage.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).

        Returns
        -------
        ndarray, shape (kinds, layouts)
            Memory [byte].
        """
        stated = self.backend.run.exchange.bucket is not None
        buffers = 2.0 if stated else self.backend.software.gradients.bucket_buffers
        whole = self.stage_parameter_counts(kinds, trained=True) * self.backend.formats.accumulated_gradient_bytes
        return np.asarray(buffers * np.minimum(self.bucket_bytes, whole))

    @cached(lambda layouts, trained: (trained,))
    def section_parameter_counts(self, trained: bool) -> Array:
        """Count the parameter elements of each section (run of equal layers) and each tied parameter.

        Parameters
        ----------
        trained : bool
            True to count trained parameters only.

        Returns
        -------
        ndarray, shape (sections and ties, layouts)
            Number of elements.
        """
        return self._stacked(partial(_elements, trained=trained))

    def _stacked(self, figures: Callable[[Program], Array]) -> Array:
        """Apply a function to every layout's program and stack the results as columns.

        Equal programs are evaluated once.
        """
        known = {number: figures(program) for number, program in {id(each): each for each in self.programs}.items()}
        return np.stack([known[id(program)] for program in self.programs], axis=1)

    @cached(lambda layouts, kinds, trained: (trained,))
    def stage_parameter_counts(self, kinds: DistinctStages, trained: bool) -> Array:
        """Count the parameter elements that each distinct stage holds.

        Copies of tied parameters whose owner is on another stage are included.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).
        trained : bool
            True to count trained parameters only.

        Returns
        -------
        ndarray, shape (kinds, layouts)
            Number of elements.
        """
        return np.asarray(kinds.layer_and_tied_copy_counts @ self.section_parameter_counts(trained))

    # collectives over replicas

    def slowest_group_collective_time(self, operation: str, groups: Count, sizes: Array) -> Array:
        """Return the time of one collective over several groups of ranks, which is that of the slowest group.

        Parameters
        ----------
        operation : str
            Collective operation; ``all_gather@node`` means the part of each group in a node.
        groups : Count, shape (2, groups, stages or 1, layouts)
            Rank stride and number of ranks of each group.
        sizes : ndarray, shape (..., layouts) or (stages, ..., layouts)
            Size of the whole tensor [byte].

        Returns
        -------
        ndarray
            Times [s], of the shape of `sizes`.
        """
        operation, groups = collective_scope_groups(operation, groups, self.backend.system.devices_per_node)
        stages = groups.shape[2:3] if sizes.ndim > 1 else ()
        shape = (*groups.shape[:2], *stages, *(1,) * (sizes.ndim - 2), groups.shape[-1])
        whole = (groups.shape[1], *sizes.shape)
        strides, ranks = np.broadcast_to(groups.reshape(shape), (2, *whole)).reshape(2, -1)
        seconds = self.backend.fabric.collective_times(operation, strides, ranks, np.broadcast_to(sizes, whole).ravel())
        return np.asarray(seconds.reshape(whole).max(axis=0))

    def exchange_collective_times(self, operation: str, layouts: Sequence[int], groups: Count, sizes: Array) -> Array:
        """Return the time of one exchange of gradients or parameters for some layouts.

        A ``broadcast`` exchange comes from the owners of whole tensors. There are as many broadcasts as owners, or as
        tensors if these are fewer. A reduction to the owners takes the same time.

        Parameters
        ----------
        operation : str
            Collective operation, such as ``reduce_scatter``.
        layouts : sequence of int
            Positions of the layouts.
        groups : Count, shape (2, groups, stages or 1, layouts)
            Rank stride and number of ranks of each group.
        sizes : ndarray, shape (..., layouts)
            Size of the whole tensor [byte].

        Returns
        -------
        ndarray
            Times [s], of the shape of `sizes`.
        """
        if operation != "broadcast":
            return self.slowest_group_collective_time(operation, groups, sizes)
        message = np.minimum(sizes, self.owner_broadcast_bytes[list(layouts)])
        count = np.divide(sizes, message, out=np.zeros_like(sizes), where=message > 0)
        return count * self.slowest_group_collective_time(operation, groups, message)

    @property
    @cached()
    def owner_broadcast_bytes(self) -> Array:
        """Bytes that an owner of whole tensors broadcasts at a time, shape (layouts,).

        This is the owner's share of the parameters, or one tensor of mean size if that is larger.
        """
        repeat, tensors = (section_field_values(self.programs[0], name) for name in ("repeat", "trained_tensor_count"))
        trained = repeat @ self.section_parameter_counts(trained=True)[: len(repeat)]
        owners = np.minimum(self.zero_shard_ranks * self.meshes[0].degree("pp"), max(float(repeat @ tensors), 1.0))
        return np.asarray(trained / owners * self.backend.formats.parameter_bytes)

    def communication_groups(self, layouts: Sequence[int], axes: Sequence[Axes], copies: int = 1) -> Count:
        """Return rank strides and sizes of the communication groups over mesh axes, for each layout.

        Parameters
        ----------
        layouts : sequence of int
            Positions of the layouts.
        axes : sequence of Axes
            Mesh axes of each layout's group.
        copies : int, optional
            Replicas of the network in one pipeline: 2 for bidirectional schedules, else 1.

        Returns
        -------
        Count, shape (2, groups, stages, layouts)
            Rank stride and number of ranks of each group; the axis of stages has length 1 if all stages are equal.
        """
        if copies == 1:
            pairs = list(map(self._group, layouts, axes))
            return np.array(pairs, dtype=np.int64).reshape(-1, 2).T[:, None, None]
        groups = [replica_groups(self.meshes[i], each, copies) for i, each in zip(layouts, axes, strict=True)]
        alone = (np.ones(self.meshes[0].degree("pp"), dtype=np.int64),) * 2
        most = max(map(len, groups), default=1)
        padded = [[*each, *[alone] * (most - len(each))] for each in groups]
        return np.array(padded, dtype=np.int64).transpose(2, 1, 3, 0)

    @cached(lambda layouts, layout, axes: (layout, axes))
    def _group(self, layout: int, axes: Axes) -> tuple[int, int]:
        return self.meshes[layout].stride(axes), self.meshes[layout].group_size(axes)

    def exchange_times_and_bytes(
        self, holdings: Array, copies: int, content: ExchangedTensors, zero: int, width: float
    ) -> Array:
        """Return time and bytes of gradient sums over data-parallel ranks, or of parameter all-gathers.

        Parameters
        ----------
        holdings : ndarray, shape (stages, chunks, sections and ties)
            Layers of each section, and tied parameters, whose parameters are sent. The first axis is arbitrary if
            ``copies`` is 1.
        copies : int
            Replicas of the network in one pipeline: 2 for bidirectional schedules, else 1.
        content : ExchangedTensors
            ``gradients``, or which parameters are gathered.
        zero : int
            ZeRO stage, 0 to 3.
        width : float
            Bytes of an element.

        Returns
        -------
        ndarray, shape (2, stages, chunks, layouts)
            Times [s], and bytes.
        """
        seconds = np.zeros((2, *holdings.shape[:2], len(self)))
        for owed in self._grouped_collectives(copies, content, zero):
            sizes = holdings @ owed.elements * width
            figures = self.exchange_collective_times(owed.operation, owed.layout_indices, owed.groups, sizes)
            np.add.at(seconds[0].T, owed.layout_indices, figures.T)
        seconds[1] = holdings @ self._exchanged_elements(copies, content) * width
        return seconds

    @cached(lambda layouts, copies, content, zero: (copies, content, zero > 0))
    def _grouped_collectives(self, copies: int, content: ExchangedTensors, zero: int) -> list[_RequiredCollectives]:
        cells: dict[str, list[tuple[int, Axes, Array]]] = {}
        for layout, shares in enumerate(self._shares(copies, content)):
            for axes, elements in shares.items():
                for operation, over_axes, part in self.exchange_collectives(layout, content, zero, axes, elements):
                    if over_axes or copies > 1:
                        cells.setdefault(operation, []).append((layout, over_axes, part))
        owed = []
        for operation, members in cells.items():
            layouts, over, parts = map(list, zip(*members, strict=True))
            groups = self.communication_groups(layouts, over, copies)
            owed.append(_RequiredCollectives(operation, layouts, groups, np.array(parts).T))
        return owed

    def exchange_collectives(
        self, layout: int, content: ExchangedTensors, zero: int, axes: Axes, elements: Numbers
    ) -> tuple[tuple[str, Axes, Numbers], ...]:
        """List the collectives that exchange gradients, or gather parameters, of one layout.

        Parameters
        ----------
        layout : int
            Position of the layout.
        content : ExchangedTensors
            ``gradients``, or the parameters that are gathered.
        zero : int
            ZeRO stage, 0 to 3.
        axes : Axes
            Mesh axes over which the elements are exchanged.
        elements : array_like
            Elements (or bytes) of one rank.

        Returns
        -------
        tuple[tuple[str, Axes, Numbers], ...]
            (operation, axes, payload) of each collective, payload in the unit of ``elements``.
        """
        owned = self.backend.software.parallelism.whole_tensors and zero in (1, 2)
        if content == "gradients":
            method = self.backend.compression
            whole = self.backend.software.gradients.whole_sums and zero in (1, 2)
            owed = gradient_exchange_collectives(0 if whole else zero, axes, elements, self.meshes[layout])
            owed = owed if method is None else compressed_collectives(method, self.gradient_sizes(layout, axes), owed)
            to_owners = {"reduce_scatter": "broadcast"} if owned else {}  # a sum goes to its owner the same way back
            return tuple((to_owners.get(operation, operation), over, part) for operation, over, part in owed)
        method = self.backend.compression
        if content in ("all", "again") and method is not None and method.replaces_zero3_collectives:
            sizes, width = self.gradient_sizes(layout, axes), self.backend.formats.parameter_bytes
            return compressed_parameter_gather(method, sizes, width, axes, elements, again=content == "again")
        return (("broadcast" if owned else "all_gather", axes, elements),)

    def gradient_sizes(self, layout: int, axes: Axes) -> SummedGradient:
        """Return sizes of a layout's gradient per gradient element, as compression methods need them.

        Sizes are the numbers of tensors and matrices, and the sides of matrices.

        Parameters
        ----------
        layout : int
            Position of the layout.
        axes : Axes
            Axes over which the gradient is summed.

        Returns
        -------
        SummedGradient
            Sizes per gradient element, from `gradient_sizes_per_element`.
        """
        program, ranks = self.programs[layout], self.meshes[layout].group_size(axes)
        stride = self.meshes[layout].stride(axes) if ranks > 1 else 1
        inside = min(ranks, max(1, self.backend.system.devices_per_node // stride))
        width = self.backend.formats.accumulated_gradient_bytes
        sizes = partial(gradient_sizes_per_element, program, float(ranks), width, float(inside))
        return self.cache.get_or_compute(("gradient", id(program), ranks, inside), sizes)

    @cached()
    def compression_times(self, kinds: DistinctStages) -> Array:
        """Return the time to compress and decompress the gradients of each distinct stage.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).

        Returns
        -------
        ndarray, shape (kinds, layouts)
            Times [s].
        """
        trained = self.stage_parameter_counts(kinds, trained=True)
        if self.backend.compression is None or not self.has_backward:
            return np.zeros_like(trained)
        columns = [
            self.backend.compression_times(trained[:, layout], self.gradient_sizes(layout, BATCH_AXES))
            if self.replicas[layout] > 1
            else np.zeros(len(trained))
            for layout in range(len(self))
        ]
        return np.stack(columns, axis=1)

    def _coding_state(self, kinds: DistinctStages) -> Array:
        """Return the memory that gradient compression keeps on each distinct stage, shape (kinds, layouts) [byte]."""
        trained, method = self.stage_parameter_counts(kinds, trained=True), self.backend.compression
        if method is None:
            return np.zeros_like(trained)
        bytes_of_layout = np.zeros(len(self))
        for layout in np.flatnonzero(self.replicas > 1).tolist():
            bytes_of_layout[layout] = compression_state_bytes(method, self.gradient_sizes(layout, BATCH_AXES))
        return np.asarray(trained * bytes_of_layout)

    @cached(lambda layouts, copies, content: (copies, content))
    def _shares(self, copies: int, content: ExchangedTensors) -> list[dict[Axes, Array]]:
        """Count for each layout the elements of each section and tied parameter that are exchanged, by mesh axes."""
        frozen, gradients = content in ("all", "again"), content == "gradients"
        split = gradient_elements_by_axes if gradients else partial(gathered_elements_by_axes, frozen=frozen)
        used = [tuple([axis for axis, degree in mesh.degrees if degree > 1]) for mesh in self.meshes]
        return self._once_per_program(("shares", gradients, frozen), split, copies, used)

    def _once_per_program(
        self,
        name: Hashable,
        figures: Callable[[Program, Mesh, int], CachedValue],
        copies: int,
        meshes: Sequence[Hashable],
    ) -> list[CachedValue]:
        """Apply a function to the program and mesh of every layout, once for equal ones.

        ``meshes`` hold what the result depends on of each mesh, as part of the cache key.
        """
        once = self.program_cache.get_or_compute
        return [
            once((name, copies, id(program), key), partial(figures, program, mesh, copies))
            for program, mesh, key in zip(self.programs, self.meshes, meshes, strict=True)
        ]

    @cached(lambda layouts, copies, content: (copies, content))
    def _exchanged_elements(self, copies: int, content: ExchangedTensors) -> Array:
        """Count the elements of each section and tie that are exchanged, shape (sections and ties, layouts)."""
        zeros = np.zeros(len(self.programs[0].sections) + len(self.programs[0].tied_parameters))
        return np.stack([sum(each.values(), zeros) for each in self._shares(copies, content)], axis=1)

    # sums of gradients, gathers and updates of stages

    def gradient_exchange_times_and_bytes(
        self, assignment: StageAssignment, zero: int, *, chunks: bool
    ) -> tuple[Array, Array]:
        """Return time and bytes of the data-parallel gradient reduction of each stage.

        Parameters
        ----------
        assignment : StageAssignment
            Assignment of layers to pipeline stages.
        zero : int
            ZeRO stage, 0 to 3.
        chunks : bool
            True for each chunk separately, False for all chunks of a stage together.

        Returns
        -------
        tuple[Array, Array], shape (stages, chunks or 1, layouts)
            (times [s], bytes that each rank exchanges).
        """
        kinds, copies = assignment.distinct_stages_and_chunks, assignment.replicas
        stage, chunk = kinds.stages.layer_and_tied_copy_counts, kinds.chunks.layer_and_tied_copy_counts
        if copies > 1:  # how far apart the copies of a stage are depends on the stage
            stage, chunk = stage[assignment.stage_kind], chunk[assignment.chunk_kind]
            holdings = np.concatenate([stage[:, None], chunk], axis=1)
            seconds = self._gradient_exchange(holdings, copies, zero, assignment.cache_key)
            figures = seconds[:, :, 1:] if chunks else seconds[:, :, :1]
            return figures[0], figures[1]
        seconds = self._gradient_exchange(np.concatenate([stage, chunk])[:, None], 1, zero, ())[:, :, 0]
        rows = assignment.chunk_kind + len(kinds.stages) if chunks else assignment.stage_kind[:, None]
        return seconds[0, rows], seconds[1, rows]

    @cached(lambda layouts, holdings, copies, zero, placed: (placed, zero > 0))
    def _gradient_exchange(self, holdings: Array, copies: int, zero: int, placed: tuple[object, ...]) -> Array:
        """Return time and bytes of the gradient reduction of what stages hold, cached by their placement ``placed``."""
        width = self.backend.formats.accumulated_gradient_bytes
        return self.exchange_times_and_bytes(holdings, copies, "gradients", zero, width)

    def state_gather_times(self, assignment: StageAssignment) -> Array:
        """Return the time in which each stage gathers parameters that other ranks have updated (ZeRO-1 and 2).

        The time includes the host time per tensor and rank.

        Parameters
        ----------
        assignment : StageAssignment
            Assignment of layers to pipeline stages.

        Returns
        -------
        ndarray, shape (stages, layouts)
            Times [s].
        """
        kinds, width = assignment.distinct_stages_and_chunks.stages, self.backend.formats.parameter_bytes
        ranks, holdings = self.zero_shard_ranks, kinds.layer_and_tied_copy_counts
        pieces = self._stage_tensor_counts(kinds) * ranks * (ranks > 1) * self.backend.slice_gather_host_time

        def gathers(rows: Index | slice) -> Array:
            seconds = self.exchange_times_and_bytes(holdings[rows, None], assignment.replicas, "trained", 1, width)
            return np.asarray(seconds[0, :, 0] + pieces[rows])

        if assignment.replicas > 1:
            key = "state gathers", assignment.stages_cache_key
            return self.cache.get_or_compute(key, lambda: gathers(assignment.stage_kind))
        return self.cache.get_or_compute("state gathers", lambda: gathers(slice(None)))[assignment.stage_kind]

    @cached(lambda layouts, assignment: assignment.stages_cache_key)
    def tied_gradient_sum_times(self, assignment: StageAssignment) -> Array:
        """Return the time to sum the gradients of tied parameters between the two stages that share each.

        This sum comes after all other gradient sums.

        Parameters
        ----------
        assignment : StageAssignment
            Assignment of layers to pipeline stages.

        Returns
        -------
        ndarray, shape (stages, layouts)
            Times [s].
        """
        seconds = np.zeros((assignment.stages, len(self)))
        if self.has_backward:
            for tie, owner, other in tied_stage_pairs(self.programs[0].tied_parameters, assignment.layers_per_stage):
                seconds[[owner, other]] += self._tied_sum(tie, abs(other - owner))
        return seconds

    @cached(lambda layouts, tie, distance: (tie, distance))
    def _tied_sum(self, tie: int, distance: int) -> Array:
        strides = np.array([mesh.stride(("pp",)) for mesh in self.meshes])
        elements = np.array([program.tied_parameters[tie].elements for program in self.programs])
        sizes = elements * self.backend.formats.accumulated_gradient_bytes
        return self.backend.fabric.collective_times("all_reduce", strides * distance, np.full(len(sizes), 2), sizes)

    @cached(lambda layouts, kinds, sharded: (sharded,))
    def update_times(self, kinds: DistinctStages, *, sharded: bool) -> Array:
        """Return the time of the optimizer update of each distinct stage, with gradient clipping.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).
        sharded : bool
            True if each rank updates only the states that it owns.

        Returns
        -------
        ndarray, shape (kinds, layouts)
            Times [s].
        """
        counts = self.updated_elements(kinds, sharded=sharded)
        if not self.has_backward:
            return np.zeros_like(counts)
        rule, clipping = self.backend.optimizer, self.clipping_times(kinds, sharded=sharded)
        if rule.matrix_update is None:
            return self.backend.update_times(counts, self._stage_tensor_counts(kinds), rule) + clipping
        ranks = self.mean_sharding_ranks(kinds) if sharded else np.ones_like(counts)
        multiplied = self._matrix_sums(kinds, lambda each: each.elements) / ranks
        passes = self.backend.update_times(counts - multiplied, self._stage_tensor_counts(kinds), rule)
        passes = passes + self.backend.update_times(multiplied, 0.0, rule.matrix_update.elementwise_optimizer)
        products = self._matrix_sums(kinds, lambda each: each.matrix_count * self.backend.matrix_update_time(each))
        return passes + np.maximum(products / ranks, self._slowest_matrix_update(kinds)) + clipping

    def _matrix_sums(self, kinds: DistinctStages, value: Callable[[WeightMatrices], float]) -> Array:
        """Sum a function of the weight matrices over each distinct stage, shape (kinds, layouts)."""
        rows = self._stacked(lambda program: np.array([sum(map(value, e.weight_matrices)) for e in program.sections]))
        return sum_per_stage(kinds.layer_and_tied_copy_counts[:, : len(rows)], rows)

    def _slowest_matrix_update(self, kinds: DistinctStages) -> Array:
        """Return the time of the slowest single matrix update (as in Muon) of each distinct stage.

        Ranks that share updates own whole matrices, so the slowest rank takes at least that time. The shape is (kinds,
        layouts) [s].
        """

        def longest(program: Program) -> Array:
            matrices = (section.weight_matrices for section in program.sections)
            return np.array([max(map(self.backend.matrix_update_time, each), default=0.0) for each in matrices])

        rows = self._stacked(longest)
        stages = kinds.layer_and_tied_copy_counts[:, : len(rows)] > 0
        return np.stack([rows[stage].max(axis=0, initial=0.0) for stage in stages])

    def _stage_tensor_counts(self, kinds: DistinctStages) -> Array:
        """Count the parameter tensors of each distinct stage.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).

        Returns
        -------
        ndarray, shape (kinds, 1)
            Number of tensors.
        """
        tensors = section_field_values(self.programs[0], "trained_tensor_count")
        return sum_per_stage(kinds.layer_and_tied_copy_counts[:, : len(tensors)], tensors)[:, None]

    def clipping_times(self, kinds: DistinctStages, *, sharded: bool) -> Array:
        """Return the time of gradient clipping, with the sum of the gradient norm over ranks.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).
        sharded : bool
            True if each rank has only its shard of the gradients.

        Returns
        -------
        ndarray, shape (kinds, layouts)
            Times [s].
        """
        seconds = self.backend.clipping_times(self.updated_elements(kinds, sharded=sharded))
        if self.backend.clip_method == "none":
            return seconds
        groups = self.communication_groups(range(len(self)), [gradient_norm_axes(int(sharded))] * len(self))
        sizes = np.full(len(self), GRADIENT_NORM_BYTES)
        return seconds + self.slowest_group_collective_time("all_reduce", groups, sizes)

    def updated_elements(self, kinds: DistinctStages, *, sharded: bool) -> Array:
        """Count the trained elements of each distinct stage that a rank updates in an optimizer step.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).
        sharded : bool
            True if each rank updates only the states that it owns.

        Returns
        -------
        ndarray, shape (kinds, layouts)
            Number of elements.
        """
        trained = self.stage_parameter_counts(kinds, trained=True)
        return trained / self.mean_sharding_ranks(kinds) if sharded else trained

    # memory of states

    @cached()
    def mean_sharding_ranks(self, kinds: DistinctStages) -> Array:
        """Return over how many ranks ZeRO shards the states of each distinct stage, averaged over its parameters.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).

        Returns
        -------
        ndarray, shape (kinds, layouts)
            Number of ranks.
        """
        owned = np.zeros((len(kinds), len(self)))
        for copies in distinct_values(kinds.replicas.astype(int)):
            same_copies = np.flatnonzero(kinds.replicas[:, 0] == copies)
            owned[same_copies] = kinds.layer_and_tied_copy_counts[same_copies] @ self.owned_elements(copies)
        trained = self.stage_parameter_counts(kinds, trained=True)
        return mean_sharding_ranks(trained, owned, self.zero_shard_ranks * kinds.replicas)

    @cached(lambda layouts, copies: (copies,))
    def owned_elements(self, copies: int) -> Array:
        """Count the trained elements whose states a rank of each layout owns if ZeRO shards them.

        Parameters
        ----------
        copies : int
            Replicas of the network in one pipeline: 2 for bidirectional schedules, else 1.

        Returns
        -------
        ndarray, shape (sections and ties, layouts)
            Number of elements.
        """
        shared = [tuple([mesh.degree(axis) for axis in ("cp", *BATCH_AXES)]) for mesh in self.meshes]
        return np.stack(self._once_per_program("owned", zero_owned_elements, copies, shared), axis=1)

    def state_memory(
        self, kinds: DistinctStages, zero: int, stages: int, *, overlapped: bool
    ) -> tuple[StateMemory, Array]:
        """Compute the memory of parameters, gradients and optimizer states of each distinct pipeline stage.

        Parameters
        ----------
        kinds : DistinctStages
            Distinct pipeline stages (stages with equal layers count once).
        zero : int
            ZeRO stage, 0 to 3.
        stages : int
            Number of pipeline stages.
        overlapped : bool
            True if gradients are summed during the backward pass. Otherwise each rank holds whole gradients until the
            pass ends.

        Returns
        -------
        tuple
            (memory on the device by part, memory on the host), arrays of shape (kinds, layouts) [byte].
        """
        zero = 1 if zero == 2 and not self.backend.scatters_every_pass(zero, stages) else zero
        deferred = zero >= 2 and not overlapped
        gathers_late = self.backend.software.parallelism.parameter_gathers_in_pipelines == "step"
        return self._states(kinds, zero, deferred, deferred or (zero == 1 and stages > 1 and gathers_late))

    @cached(lambda layouts, kinds, *settings: settings)
    def _states(self, kinds: DistinctStages, zero: int, deferred: bool, unreduced: bool) -> tuple[StateMemory, Array]:
        backend, formats, rule = self.backend, self.backend.formats, self.backend.optimizer
        offloads = backend.offload.is_offloaded("parameters")
        largest = self._largest(kinds) if zero == 3 or offloads else np.zeros((1, 1))
        at_once = zero == 3 and backend.software.parallelism.gather_buffers == "root"
        if unreduced and formats.master_bytes and backend.software.gradients.unreduced == "fp32":
            formats = replace(formats, gradient_bytes=formats.fp32_activation_bytes)
        whole = state_memory(
            self.stage_parameter_counts(kinds, trained=False),
            self.stage_parameter_counts(kinds, trained=True),
            self._root_gathered(kinds) / 2.0 if at_once else largest,
            self.mean_sharding_ranks(kinds),
            zero,
            rule,
            formats,
            training=self.has_backward,
            deferred=deferred,
            flat_copies=backend.software.gradients.flat_copies,
        )
        if rule.matrix_update is not None and self.has_backward:
            numbers = self._matrix_sums(kinds, rule.matrix_update.state_count)
            numbers = numbers - rule.state_count * self._matrix_sums(kinds, lambda each: each.elements)
            ranks = self.mean_sharding_ranks(kinds) if zero else 1.0
            whole = replace(whole, optimizer=whole.optimizer + numbers * backend.formats.state_bytes / ranks)
        if backend.compression is not None:
            whole = replace(whole, optimizer=whole.optimizer + self._coding_state(kinds))
        if backend.offload.parts:
            return divide_offloaded_states(whole, backend.offload, largest, backend.formats)
        return whole, np.zeros_like(whole.parameters)

    def _root_gathered(self, kinds: DistinctStages) -> Array:
        """Count the parameters that FSDP2 holds gathered at one time in each distinct stage, (kinds, layouts).

        Gathered are the layers outside repeated blocks and two blocks, and the flat buffers of the larger of these,
        from which the parameters were copied.
        """
        elements, repeated = self.section_parameter_counts(trained=False), full_recompute_sections(self.programs[0])
        count = len(repeated)
        outside = kinds.layer_and_tied_copy_counts[:, count:] @ elements[count:]
        outside = outside + kinds.layer_and_tied_copy_counts[:, :count][:, ~repeated] @ elements[:count][~repeated]
        present = (kinds.layer_and_tied_copy_counts[:, :count, None] > 0) * elements[:count]
        blocks = 2.0 * present[:, repeated].max(axis=1, initial=0.0)
        return np.asarray(outside + blocks + np.maximum(outside, blocks))

    def _largest(self, kinds: DistinctStages) -> Array:
        """Count the elements of the largest section of each distinct stage, with tied parameters, (kinds, layouts)."""
        ties, elements = self.programs[0].tied_parameters, self.section_parameter_counts(trained=False)
        count = len(elements) - len(ties)
        rows = []
        for row in kinds.layer_and_tied_copy_counts:
            sections = elements[:count].copy()
            for number, tie in enumerate(ties):
                sections[tie.reader_section] += elements[count + number] * (row[count + number] > 0)
            rows.append((sections * (row[:count] > 0)[:, None]).max(axis=0))
        return np.array(rows)

    @cached()
    def reserved_memory(self) -> Array:
        """Return the memory of the process outside tensors (CUDA context, NCCL buffers, …), shape (layouts,) [byte]."""
        return np.array([self.backend.reserved_memory(mesh) for mesh in self.meshes])


def _elements(program: Program, trained: bool) -> Array:
    """Count the parameter elements of each section and tied parameter of a program, shape (sections and ties,)."""
    sections = [each.trained_parameter_count if trained else each.parameter_count for each in program.sections]
    ties = [tie.elements * (tie.trained or not trained) for tie in program.tied_parameters]
    return np.array(sections + ties, dtype=np.float64)
