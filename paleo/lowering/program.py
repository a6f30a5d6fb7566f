"""One rank's kernels and collectives under a parallel split, by section (run of equal layers), without times.

A section is the unit of scheduling: a layer, or one iteration of a folded block with its number of repetitions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from paleo.lowering.kernel_launches import (
    DispatchOverlap,
    FusedChains,
    LoweringOptions,
    OperationKernels,
    SavedTensorCounter,
    SectionRecompute,
    TokenDispatch,
    convolution_only_inputs,
    fuse_into_convolutions,
    fuse_passes,
    saved_tensors,
    section_slices,
    unfused_softmax,
)  # fmt: skip
from paleo.operations.base import (
    ATTENTION_CORE_NAME_INFIX,
    SHARED_EXPERTS_NAME_INFIX,
    Kernel,
    MemoryPass,
    Operation,
    Phase,
    WeightMatrices,
    elementwise_kernel,
    gradient_accumulation_kernel,
    is_attention_core,
)
from paleo.operations.contraction import Contraction, FusedAttention, weight_matrix
from paleo.parallel.propagation import (
    LocalLayer,
    RequiredCollective,
    deduplicated_dispatch_fraction,
    dispatched_tokens,
    experts_per_token,
    propagate_placement,
    without_regather,
)

if TYPE_CHECKING:
    from paleo.network.graph import Graph, Node
    from paleo.operations.tensor import Precision, Tensor
    from paleo.parallel.placement import Axes, Mesh, Placement


@dataclass(frozen=True, slots=True)
class CountedKernel:
    """Kernel of one layer of a section (a run of equal layers), with the number of its runs.

    ``repetitions`` is above 1 for a block folded inside the section's block, and below 1 for a kernel of some
    iterations only. ``full_recompute_runs`` and ``selective_recompute_runs`` are additional runs per run under full
    and selective recomputation. ``sorts_tokens`` is True for sorts of tokens that arrive from other ranks.
    """

    kernel: Kernel
    layer: str
    repetitions: float
    full_recompute_runs: float = 1.0
    selective_recompute_runs: float = 0.0
    sorts_tokens: bool = False

    @property
    def in_attention_core(self) -> bool:
        """True if the kernel belongs to the core of attention: scores, softmax, dropout, weighted sum."""
        return ATTENTION_CORE_NAME_INFIX in self.kernel.name

    @property
    def in_shared_experts(self) -> bool:
        """True if the kernel belongs to shared experts, which process every token."""
        return SHARED_EXPERTS_NAME_INFIX in self.kernel.name


@dataclass(frozen=True, slots=True)
class LayerCollective:
    """Collective of one layer, with its payload and the computation that it can overlap.

    Attributes
    ----------
    name, operation, axis : str
        Name of the operation that needs the collective, kind of collective, and mesh axis of its group.
    payload_bytes : float
        Payload as in nccl-tests: the full buffer of the group [byte].
    phase : Phase
        Pass in which the collective runs.
    calls_per_iteration : int
        Collectives per layer iteration.
    overlapped : bool
        True if the collective runs during independent computation.
    overlap_chunks : int
        Pieces into which the collective is cut to overlap with the matrix product before or after.
    recomputed, selectively_recomputed : bool
        True if full or selective recomputation repeats the collective.
    dispatch_overlap : str, optional
        Computation that overlaps with the exchange of tokens with experts.
    carries_expert_tokens : bool
        True if the collective sends tokens to experts or back.
    routing_counts : tuple of int, optional
        Experts that a token visits, all experts, and ranks that share them, for tokens sorted by expert.
    token_direction : {'', 'dispatch', 'combine'}
        Direction of tokens in a library that sends each of them separately.
    """

    name: str
    operation: str
    axis: str
    payload_bytes: float
    phase: Phase
    calls_per_iteration: int
    overlapped: bool = False
    overlap_chunks: int = 1
    recomputed: bool = True
    selectively_recomputed: bool = False
    dispatch_overlap: DispatchOverlap | None = None
    carries_expert_tokens: bool = False
    routing_counts: tuple[int, int, int] | None = None
    token_direction: Literal["", "dispatch", "combine"] = ""

    def deduplicated_payload_share(self, dispatch: TokenDispatch) -> float:
        """Return the share of the all-to-all payload that remains if each token is sent once per target node or device.

        Parameters
        ----------
        dispatch : TokenDispatch
            How tokens are sent to their experts.

        Returns
        -------
        float
            Share, at most 1.
        """
        if self.routing_counts is None or dispatch.deduplication_target_count is None:
            return 1.0
        visited, experts, devices = self.routing_counts
        return deduplicated_dispatch_fraction(
            visited, experts, dispatch.deduplication_target_count if self.carries_expert_tokens else devices
        )

    @property
    def overlapped_computation(self) -> Literal["nothing", "section", "core", "products", DispatchOverlap]:
        """Name of the computation with which the collective can overlap.

        The name stands for the section, the core of attention (a ring of keys), products with weights, shared experts,
        or another microbatch.
        """
        if self.dispatch_overlap:
            return self.dispatch_overlap
        if self.overlap_chunks > 1:
            return "products"
        return "nothing" if not self.overlapped else "core" if ATTENTION_CORE_NAME_INFIX in self.name else "section"


@dataclass(frozen=True, slots=True)
class Gradient:
    """Parameter gradients of one layer that need an all-reduce over the mesh ``axes``.

    ``elements`` is the number of gradient elements on this rank.
    """

    axes: Axes
    elements: float


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """Parameter shared by two sections of the network, such as a tied embedding and output layer.

    Section ``owner_section`` holds the parameter, and section ``reader_section`` reads the parameter too.

    ``elements`` counts the parameter's elements on this rank. If the parameter is ``trained``, gradients are summed
    over the mesh ``axes``.
    """

    name: str
    owner_section: int
    reader_section: int
    axes: Axes
    elements: float
    trained: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """Section of a network: a single layer, or one iteration of a block that stands ``repeat`` times.

    Bytes and counts are those of one iteration on one rank.

    ``parameter_count`` counts all its weights, frozen ones too. Packed weights count as numbers of the run's format
    with the same bytes. ``trained_tensor_count`` is the number of trained weight tensors.
    """

    name: str
    repeat: int
    kernels: tuple[CountedKernel, ...]
    collectives: tuple[LayerCollective, ...]
    gradients: tuple[Gradient, ...]
    parameter_count: float
    trained_tensor_count: float
    saved_bytes: float
    selectively_freed_bytes: float
    input_bytes: float
    output_bytes: float
    operation_workspace_bytes: tuple[float, ...]
    recompute_policy: str = "none"
    layers_per_checkpoint: int = 1
    weight_matrices: tuple[WeightMatrices, ...] = ()

    @property
    def workspace_bytes(self) -> float:
        """Largest temporary memory of the section's operations [byte]."""
        return max(self.operation_workspace_bytes, default=0.0)

    @property
    def has_backward(self) -> bool:
        """True if the section has a backward pass: not in inference, nor before the first trained weight."""
        return any(counted.kernel.phase != "forward" for counted in self.kernels)

    @property
    def trained_parameter_count(self) -> float:
        """Parameter elements that have gradients; 0 in inference."""
        return sum(gradient.elements for gradient in self.gradients)


@dataclass(frozen=True, slots=True)
class Program:
    """Kernels and collectives of one rank for one microbatch, by section (run of equal layers), in forward order."""

    sections: tuple[Section, ...]
    tied_parameters: tuple[TiedParameter, ...] = ()

    @property
    def parameter_count(self) -> float:
        """Number of parameters on this rank, over all sections."""
        return sum(section.parameter_count * section.repeat for section in self.sections)

    @property
    def saved_bytes(self) -> float:
        """Activations that one forward pass saves for the backward pass [byte]."""
        return sum(section.saved_bytes * section.repeat for section in self.sections)

    def flops(self, phase: Phase | None = None) -> float:
        """Sum the FLOP of this rank in a microbatch, over one phase or all phases.

        Parameters
        ----------
        phase : Phase, optional
            ``forward`` or ``backward``; both by default.

        Returns
        -------
        float
            FLOP of one microbatch on this rank [FLOP].
        """
        return sum(
            counted.kernel.flops * counted.repetitions * section.repeat
            for section in self.sections
            for counted in section.kernels
            if phase in (None, counted.kernel.phase)
        )


def lower_graph(
    graph: Graph,
    placement: Placement,
    mesh: Mesh,
    precision: Precision,
    options: LoweringOptions | None = None,
    sections: int | None = None,
) -> Program:
    """Lower a layer graph to the kernels and collectives of one microbatch on the rank with the most work.

    Parameters
    ----------
    graph : Graph
        The network, with the samples of one rank's microbatch.
    placement : Placement
        How every layer's dims are split over mesh axes.
    mesh : Mesh
        Parallel degrees of the axes.
    precision : Precision
        Number formats (bytes of weights, activations, …).
    options : LoweringOptions, optional
        Choices of the software; by default nothing is fused.
    sections : int, optional
        Number of first sections to lower; all by default.

    Returns
    -------
    Program
        Sections with kernels, collectives and saved bytes.

    Raises
    ------
    PlanError
        If a dim cannot be divided as the placement asks.
    """
    lowering = _Lowering(graph, precision, options or LoweringOptions())
    nodes_of = lowering.nodes_of[:sections]
    placed = propagate_placement(graph, placement, mesh, None if sections is None else nodes_of[-1].stop)
    placed = (
        placed
        if lowering.options.regathers_tensor_parallel_inputs
        else tuple([lowering.cached_without_regather(layer) for layer in placed])
    )
    lowered = [lowering.lower_section(number, placed[nodes]) for number, nodes in enumerate(nodes_of)]
    return Program(tuple([section for section, _ in lowered]), tuple([tie for _, ties in lowered for tie in ties]))


def count_sections_through_embeddings(graph: Graph, chains: FusedChains) -> int:
    """Count the first sections of a network, up to the last one that reads only some rows of a table.

    Parameters
    ----------
    graph : Graph
        The network at any batch.
    chains : FusedChains
        Fused chains of passes, on which sections depend.

    Returns
    -------
    int
        Number of sections; 0 without such tables.
    """
    sparse = [any(getattr(operation, "table_rows_per_output", 0) for operation in n.operations) for n in graph.nodes]
    sections = enumerate(section_slices(graph.nodes, chains), start=1)
    return max((number for number, nodes in sections if any(sparse[nodes])), default=0)


def _owners(nodes: Sequence[Node], nodes_of: Sequence[slice]) -> dict[str, int]:
    """Map each parameter's name to its owner: the index of the first section that reads the parameter."""
    numbered = [(number, node) for number, members in enumerate(nodes_of) for node in nodes[members]]
    return {name: number for number, node in reversed(numbered) for name in node.parameters}


class _Lowering:
    """Lowering of one layer graph to the kernels and collectives of one rank.

    Saved tensors and parameters are recorded by section, so that each counts once.
    """

    def __init__(self, graph: Graph, precision: Precision, options: LoweringOptions) -> None:
        self.graph, self.precision, self.options = graph, precision, options
        self.checkpoints, chains = options.checkpointing, options.fused_chains
        self._readers = graph.cached_result("readers", lambda: _readers(graph.nodes), any_batch=True)
        self._reads = graph.cached_result("reads", lambda: _reader_counts(graph.nodes), any_batch=True)
        self._newly_saved = graph.cached_result(
            ("kept anew", precision), lambda: _newly_saved(graph, precision), any_batch=True
        )
        self._tiled = graph.cached_result("tiled", lambda: _unmaterialised_tensors(graph.nodes), any_batch=True)
        self._shares: dict[Hashable, _LayerShare] = graph.cached_result(("shares", precision), dict, any_batch=True)
        self.nodes_of = graph.cached_result(
            ("sections", chains), lambda: section_slices(graph.nodes, chains), any_batch=True
        )
        self._owners = graph.cached_result(
            ("owners", chains), lambda: _owners(graph.nodes, self.nodes_of), any_batch=True
        )

    def cached_without_regather(self, placed: LocalLayer) -> LocalLayer:
        """Return a layer whose tensor-parallel gathers are kept for the backward pass instead of repeated (cached).

        Parameters
        ----------
        placed : LocalLayer
            Layer with its layout and collectives.

        Returns
        -------
        LocalLayer
            Layer whose gathered operands are kept until the backward pass.
        """
        return self.graph.cached_result(("whole", placed), lambda: without_regather(placed), any_batch=True)

    def lower_section(self, number: int, members: Sequence[LocalLayer]) -> tuple[Section, tuple[TiedParameter, ...]]:
        """Lower consecutive layers to one section and its tied parameters; equal sections share one cached object.

        Parameters
        ----------
        number : int
            Position of the section in the program.
        members : sequence of LocalLayer
            Layers of the section, in order.

        Returns
        -------
        section : Section
            Kernels, collectives and saved bytes of one iteration of the section.
        tied_parameters : tuple of TiedParameter
            Parameters that the section shares with an earlier one.
        """
        key = number, members, self.precision, self.options
        return self.graph.cached_result(key, lambda: self._section(number, members), any_batch=True)

    def _section(self, number: int, members: Sequence[LocalLayer]) -> tuple[Section, tuple[TiedParameter, ...]]:
        first, last = members[0], members[-1]
        name, repeat = first.node.loops[0] if first.node.loops else (first.node.name, 1)
        gradients: dict[Axes, float] = {}
        counted, ties, matrices = set[str](), list[TiedParameter](), list[WeightMatrices]()
        policy = self._section_recompute([layer.node for layer in members])
        saved = core = tensors = parameters = 0.0
        for layer in members:
            for tensor, axes in layer.parameters:
                if tensor.name in counted:
                    continue
                counted.add(tensor.name)
                owner = self._owners[tensor.name]
                elements = tensor.bytes(self.precision) / self.precision.parameter_bytes
                iterations = layer.node.repeat // repeat
                if owner != number:
                    ties.append(TiedParameter(tensor.name, owner, number, axes, elements, tensor.needs_gradient))
                    continue
                parameters += elements * iterations
                if tensor.needs_gradient:
                    tensors += iterations
                    gradients[axes] = gradients.get(axes, 0.0) + elements * iterations
                    matrix = weight_matrix(tensor, layer.operations)
                    matrices += (
                        [] if matrix is None else [matrix._replace(matrix_count=matrix.matrix_count * iterations)]
                    )
            kept, inside = self._saved_bytes(layer, policy.unsaved_tensors)
            saved, core = saved + kept / repeat, core + inside / repeat
        section = Section(
            name,
            repeat,
            kernels=(
                *self._kernels(members, repeat, policy),
                *self._gradient_passes(name, sum(gradients.values()), tensors),
                *(
                    sort
                    for layer in members
                    for sort in self._token_sorts(layer, repeat, policy.unrecomputed_operations)
                ),
            ),
            collectives=tuple(transfer for layer in members for transfer in self._transfers(layer, repeat, policy)),
            gradients=tuple(Gradient(axes, elements) for axes, elements in gradients.items()),
            parameter_count=parameters,
            trained_tensor_count=tensors,
            saved_bytes=saved,
            selectively_freed_bytes=self._freed_bytes(members, repeat, saved, core),
            input_bytes=_local_bytes(first, first.node.inputs[0], self.precision),
            output_bytes=last.operations[-1].out.bytes(self.precision) if last.operations else 0.0,
            operation_workspace_bytes=tuple(size for layer in members for size in self._share(layer).workspaces),
            weight_matrices=tuple(matrices),
        )
        return section, tuple(ties)

    def _section_recompute(self, nodes: list[Node]) -> SectionRecompute:
        """Return the operations that recomputation repeats and the tensors that it frees in one section.

        Results are cached, as they do not depend on the parallel split.
        """
        key = "policy", self.checkpoints, nodes[0].name, len(nodes)
        return self.graph.cached_result(
            key, lambda: SectionRecompute.for_section(nodes, self.checkpoints), any_batch=True
        )

    def _share(self, placed: LocalLayer) -> _LayerShare:
        """Return the kernels and saved tensors of one rank's share of a layer.

        Results are cached, as many meshes split a layer equally.
        """
        if placed.operations_key not in self._shares:
            newly_saved = self._newly_saved[placed.node.name]
            self._shares[placed.operations_key] = _share(placed, self.precision, newly_saved, self._tiled)
        return self._shares[placed.operations_key]

    def _freed_bytes(self, members: Sequence[LocalLayer], repeat: int, saved: float, core: float) -> float:
        """Return the bytes of saved activations per layer iteration that selective recomputation frees.

        If it recomputes all but attention's core and every second product, the input of the block and the outputs of
        these stay saved.
        """
        if self.checkpoints.selective_scope == "attention":
            return core
        if not members[0].node.loops:
            return 0.0
        stays = _local_bytes(members[0], members[0].node.inputs[0], self.precision)
        for layer in members:
            for operation in layer.operations:
                share = 1.0 if is_attention_core(operation) else 0.5 * isinstance(operation, Contraction)
                stays += share * operation.out.bytes(self.precision) * (layer.node.repeat // repeat)
        return max(0.0, saved - stays)

    def _saved_bytes(self, placed: LocalLayer, freed: frozenset[str]) -> tuple[float, float]:
        """Count the activation bytes that a layer saves and no earlier layer has saved.

        Returns (bytes over all iterations of the layer, bytes of the tensors in ``freed`` among them).
        """
        total = core = 0.0
        for name, size, copies in self._share(placed).saved:
            kept = size * (copies / placed.gather_group_sizes.get(name, 1))
            total += kept
            core += kept if name in freed else 0.0
        return total, core

    def _kernels(self, members: Sequence[LocalLayer], repeat: int, policy: SectionRecompute) -> Iterable[CountedKernel]:
        launches = [
            OperationKernels(operation, layer.node.name, iterations, *kernels, *flags)
            for layer, layer_flags in zip(members, policy.recompute_runs, strict=True)
            for iterations in (layer.node.repeat // repeat,)
            for operation, kernels, flags in zip(layer.operations, self._share(layer).kernels, layer_flags, strict=True)
        ]
        launches = [
            unfused_softmax(launch, self.options.softmax_matrices_per_kernel, self.precision) for launch in launches
        ]
        launches = fuse_passes(launches, self._reads, self.precision, self.options.fused_chains)
        if self.options.fused_chains == "convolutions":
            convolved = self.graph.cached_result(
                "convolved", lambda: convolution_only_inputs(self.graph.nodes), any_batch=True
            )
            launches = [fuse_into_convolutions(launch, convolved, self.precision) for launch in launches]
        for launch in launches:
            for kernel in (*launch.forward, *launch.backward):
                yield CountedKernel(
                    kernel,
                    launch.layer,
                    launch.repetitions,
                    launch.full_recompute_runs,
                    launch.selective_recompute_runs,
                )
        for layer in members:
            for tensor in dict.fromkeys(layer.node.inputs):
                times = self._additions(layer.node, tensor) / repeat
                if times:
                    yield CountedKernel(self._accumulate(layer, tensor), layer.node.name, times)
            yield from self._ring_additions(layer, repeat, policy.unrecomputed_operations)

    def _ring_additions(self, placed: LocalLayer, repeat: int, spared: frozenset[str]) -> Iterable[CountedKernel]:
        """Yield the kernels with which ring attention adds up partial results, one for each further share of keys.

        The kernels add to the output, and in the backward pass to the gradients of query, key and value (Liu et al.,
        Ring attention, 2023, algorithm 1).
        """
        for operation in placed.operations:
            if not isinstance(operation, FusedAttention):
                continue
            shares = placed.gather_group_sizes.get(operation.key.name, 1)
            flags = (
                self.checkpoints.full_recompute_runs(operation, spared),
                self.checkpoints.selective_recompute_runs(placed.node, operation, spared),
            )
            merged = (operation.out, 1), (operation.query, 1), (operation.key, shares), (operation.value, shares)
            for tensor, parts in merged if shares > 1 else ():
                phase: Phase = "forward" if tensor is operation.out else "backward"
                more = (shares - 1) / parts
                size = tensor.bytes(self.precision) * more
                kernel = elementwise_kernel(
                    f"{operation.name}.merge", "elementwise", phase, tensor.elements * more, 2.0 * size, size
                )
                yield CountedKernel(kernel, placed.node.name, placed.node.repeat // repeat, *flags)

    def _token_sorts(self, placed: LocalLayer, repeat: int, spared: frozenset[str]) -> Iterable[CountedKernel]:
        """Yield the copy kernels that sort tokens by local expert after MoE dispatch, and back before combine.

        Tokens arrive in the order of the ranks that sent them. With a single local expert no sort is needed.
        """
        owed = {each.tensor.name for each in placed.communications if each.carries_expert_tokens}
        for operation in placed.operations:
            tokens = dispatched_tokens(operation)
            if tokens is None or tokens.name not in owed or tokens.size("experts") <= 1:
                continue
            beside = (each for other in placed.operations for each in (*other.read_tensors, other.out))
            arrived = max((each for each in beside if each.name == tokens.name), key=lambda each: each.elements)
            size = arrived.bytes(self.precision)
            flags = (
                self.checkpoints.full_recompute_runs(operation, spared),
                self.checkpoints.selective_recompute_runs(placed.node, operation, spared),
            )
            phases: tuple[Phase, Phase] = ("forward", "backward")
            for phase in phases:
                kernel = elementwise_kernel(
                    f"{operation.name}.sort", "copy", phase, arrived.elements, size, size, flops=0.0
                )
                yield CountedKernel(kernel, placed.node.name, placed.node.repeat // repeat, *flags, sorts_tokens=True)

    def _gradient_passes(self, section: str, elements: float, tensors: float) -> Iterable[CountedKernel]:
        """Yield the kernels with which the framework accumulates and post-processes weight gradients.

        An accumulator adds it in one launch per tensor, or two if a cast comes first. Otherwise autograd adds it,
        without a launch, or the product itself reads and writes the sum instead of a sixteen-bit result. Further
        accesses take one launch per two accesses, for each tensor or for all tensors of a flat buffer.
        """
        formats, half = self.precision, self.precision.extra_gradient_accesses / 2.0
        moved = half * formats.gradient_bytes
        launches = half if formats.uses_flat_gradient_buffer else tensors * half
        passes = [("gradients", moved, moved, half, launches)]
        if formats.main_gradient_bytes:
            cast = formats.casts_gradients_before_accumulation
            read = (formats.main_gradient_bytes if cast else formats.gradient_bytes) + formats.main_gradient_bytes
            passes.insert(0, ("accumulation", read, formats.main_gradient_bytes, 1.0, tensors))
            if cast:
                passes.insert(0, ("widening", formats.gradient_bytes, formats.main_gradient_bytes, 0.0, tensors))
        if formats.accumulates_gradients_by_autograd:
            passes.insert(0, ("additions", 2.0 * formats.gradient_bytes, formats.gradient_bytes, 1.0, 0.0))
        if formats.fuses_gradient_accumulation:
            passes.insert(
                0,
                ("sums", formats.gradient_bytes, max(formats.gradient_bytes - formats.activation_bytes, 0.0), 1.0, 0.0),
            )
        for name, read, written, flops, calls in passes:
            if read * elements:
                sizes = elements, elements * read, elements * written
                kernel = elementwise_kernel(
                    f"{section}.{name}", "elementwise", "backward_weight", *sizes, flops=elements * flops, calls=calls
                )
                yield CountedKernel(kernel, section, 1)

    def _additions(self, node: Node, tensor: Tensor) -> int:
        """Count the gradient additions of a layer for an input tensor that several layers or iterations read.

        In the backward pass every reader but the first adds to an existing gradient; the first one is the first
        iteration of the last reader.
        """
        readers = self._readers.get(tensor.name, [])
        if node.name not in readers:
            return 0
        return node.repeat - (self.graph.copy_count(tensor, node) if node.name == readers[-1] else 0)

    def _accumulate(self, placed: LocalLayer, tensor: Tensor) -> Kernel:
        """Build the kernel that adds a layer's input gradient to the gradient of a later reader: two reads, one write.

        Fused into the kernel that computes the gradient, the addition costs one read.
        """
        size = _local_bytes(placed, tensor, self.precision)
        added = gradient_accumulation_kernel(placed.node.name, size / self.precision.activation_bytes, size)
        return (
            replace(added, bytes_read=size, bytes_written=0.0) if self.options.fused_chains == "convolutions" else added
        )

    def _transfers(self, placed: LocalLayer, repeat: int, policy: SectionRecompute) -> Iterable[LayerCollective]:
        names = {operation.name for operation in placed.operations}
        recomputed = policy.recomputed_module_operations[placed.node.name]
        wholly = len(recomputed) == len(names) > 0
        for owed in placed.communications:
            phase: Phase = "forward" if owed.phase == "forward" else "backward"
            payload, times = owed.tensor.bytes(self.precision), placed.node.repeat // repeat
            needed = {owed.name} if owed.name in names else names
            again = not self.checkpoints.stops_recompute_early or not needed <= policy.unrecomputed_operations
            pieces = (
                self.options.tensor_parallel_overlap_chunks
                if placed.node.loops and not owed.overlapped and _divisible(owed)
                else 1
            )
            yield LayerCollective(
                owed.name,
                owed.operation,
                owed.axis,
                payload,
                phase,
                times,
                overlapped=owed.overlapped,
                overlap_chunks=pieces,
                recomputed=again,
                selectively_recomputed=phase == "forward"
                and not owed.overlapped
                and (owed.name in recomputed or wholly),
                carries_expert_tokens=owed.is_token_exchange,
                routing_counts=_expert_spread(placed.node, owed) if owed.carries_expert_tokens else None,
            )


def _expert_spread(node: Node, owed: RequiredCollective) -> tuple[int, int, int]:
    """Return (experts per token, total number of experts, ranks over which the experts are spread)."""
    visited, experts = experts_per_token(node)
    return visited, experts, round(experts / owed.tensor.size("experts"))


class _LayerShare(NamedTuple):
    """Kernels that one rank's share of a layer launches, and tensors that it saves.

    ``kernels`` holds (forward, backward) kernels of each operation. ``saved`` holds, for each saved tensor, its name,
    its bytes and the number of its copies that no other layer saves. ``workspaces`` are temporary bytes of each
    operation.
    """

    kernels: tuple[tuple[tuple[Kernel, ...], tuple[Kernel, ...]], ...]
    saved: tuple[tuple[str, float, float], ...]
    workspaces: tuple[float, ...]


def _share(
    placed: LocalLayer, precision: Precision, newly_saved: Sequence[float], tiled: frozenset[str]
) -> _LayerShare:
    formats = _formats(placed.node, precision)
    stored = (
        (t.name, 0.0 if t.name in tiled else _saved_bytes_and_format(operation, t, precision, formats)[0])
        for operation in placed.operations
        for t in saved_tensors(operation)
    )
    return _LayerShare(
        tuple(
            [
                (operation.forward_kernels(formats), operation.backward_kernels(formats))
                for operation in placed.operations
            ]
        ),
        tuple([(name, size, copies) for (name, size), copies in zip(stored, newly_saved, strict=True)]),
        tuple([size for operation in placed.operations for size in _workspaces(operation, precision, tiled)]),
    )


def _newly_saved(graph: Graph, precision: Precision) -> Mapping[str, tuple[float, ...]]:
    """Map each layer's name to the number of copies of each saved tensor that no earlier layer has saved."""
    storage, copies = SavedTensorCounter(graph), dict[str, tuple[float, ...]]()
    for node in graph.nodes:
        formats = _formats(node, precision)
        copies[node.name] = tuple(
            [
                storage.count_new_copies(t, node, _saved_bytes_and_format(operation, t, precision, formats)[1])
                for operation in node.operations
                for t in saved_tensors(operation)
            ]
        )
    return copies


def _formats(node: Node, precision: Precision) -> Precision:
    """Return the number formats of a layer: fp8 and fp4 are used only inside repeated blocks."""
    return precision if node.loops else precision.without_quantisation


def _saved_bytes_and_format(
    operation: Operation, tensor: Tensor, precision: Precision, formats: Precision
) -> tuple[float, str]:
    """Return (bytes that are saved of a tensor, format of the saved copy or '' if the tensor itself is saved).

    Products in a narrow format save the narrow copy of their input (Transformer Engine), even if other operations save
    the tensor itself.
    """
    size = tensor.bytes(precision)
    if isinstance(operation, Contraction) and tensor is operation.lhs:
        narrow = operation.operand_precision(formats)
        if narrow.quantises_operands:
            return size * narrow.operand_bytes / narrow.activation_bytes, narrow.dtype
    return size, ""


def _divisible(communication: RequiredCollective) -> bool:
    """Return True if a collective can be cut into pieces that overlap with a product.

    No rank may need the whole sum before it continues. Grouped products of experts have no such overlap.
    """
    scattered = communication.operation in ("all_gather", "reduce_scatter")
    return communication.axis == "tp" and scattered and not communication.carries_expert_tokens


def _reader_counts(nodes: Sequence[Node]) -> Counter[str]:
    """Count the operations that read each tensor."""
    return Counter(tensor.name for node in nodes for operation in node.operations for tensor in operation.read_tensors)


def _readers(nodes: Sequence[Node]) -> dict[str, list[str]]:
    """Map each tensor that needs a gradient to the names of the layers that read the tensor, in order."""
    readers: dict[str, list[str]] = {}
    for node in nodes:
        for tensor in dict.fromkeys(node.inputs):
            if tensor.needs_gradient and node.operations:
                readers.setdefault(tensor.name, []).append(node.name)
    return readers


def _unmaterialised_tensors(nodes: Sequence[Node]) -> frozenset[str]:
    """Find the tensors that never exist as a whole in memory, because a fused kernel computes them tile by tile."""
    names = set[str]()
    for operation in (operation for node in reversed(nodes) for operation in reversed(node.operations)):
        if isinstance(operation, MemoryPass) and (operation.fused_with_product or operation.out.name in names):
            whole = operation.out.elements
            names.update(t.name for t in operation.inputs if operation.fused_with_product or t.elements == whole)
    return frozenset(names)


def _workspaces(operation: Operation, precision: Precision, tiled: frozenset[str]) -> Iterable[float]:
    """Yield the temporary bytes of an operation at the peak of memory.

    Counted are two tensors as large as the output (a gradient and the next one), the temporaries that the operation
    states, and two copies of packed weights in the format of activations. A tile of a tiled loss has as many numbers as
    the product's input: so many tokens that the logits of a tile fill as much memory as the hidden states
    (fused_linear_cross_entropy.py of Liger, by name, not read again).
    """
    if isinstance(operation, Contraction) and operation.out.name in tiled:
        yield 2.0 * operation.lhs.bytes(precision)
    elif not (isinstance(operation, MemoryPass) and operation.runs_after_backward) and operation.out.name not in tiled:
        yield 2.0 * operation.out.bytes(precision)
    if isinstance(operation, MemoryPass) and operation.temporary_tensor_count:
        yield operation.temporary_tensor_count * sum(tensor.bytes(precision) for tensor in operation.saved)
    yield from (
        2.0 * float(each.elements) * precision.activation_bytes
        for each in operation.read_tensors
        if each.packed_bytes_per_number
    )


def _local_bytes(placed: LocalLayer, tensor: Tensor, precision: Precision) -> float:
    """Return the bytes of a layer's input tensor on this rank, before any gather [byte]."""
    local = next((t for op in placed.operations for t in op.read_tensors if t.name == tensor.name), tensor)
    return local.bytes(precision) / placed.gather_group_sizes.get(tensor.name, 1)


def with_token_dispatch(program: Program, dispatch: TokenDispatch) -> Program:
    """Return a program with the payloads and overlap of another method of MoE token dispatch.

    If each token is sent once to a node or device, its copies are written in sorted order there.

    Parameters
    ----------
    program : Program
        The lowered network, with one copy of a token per expert.
    dispatch : TokenDispatch
        How tokens are sent.

    Returns
    -------
    Program
        Program with other payloads, and without sorts where none are needed.
    """
    return replace(program, sections=tuple([_dispatched(section, dispatch) for section in program.sections]))


def _dispatched(section: Section, dispatch: TokenDispatch) -> Section:
    if not any(transfer.routing_counts for transfer in section.collectives):
        return section
    once = dispatch.deduplication_target_count is not None
    kernels = tuple([counted for counted in section.kernels if not (once and counted.sorts_tokens)])
    transfers = (
        replace(
            owed,
            payload_bytes=owed.payload_bytes * owed.deduplicated_payload_share(dispatch),
            dispatch_overlap=dispatch.overlapped_computation if owed.carries_expert_tokens else None,
            token_direction=("dispatch" if owed.carries_expert_tokens else "combine")
            if once and owed.routing_counts
            else "",
        )
        for owed in section.collectives
    )
    return replace(section, kernels=kernels, collectives=tuple(transfers))


def without_backward(program: Program) -> Program:
    """Return only the forward pass of a program, for inference.

    Parameters
    ----------
    program : Program
        One rank's kernels and collectives (the lowered network).

    Returns
    -------
    Program
        Program without backward kernels, gradients and saved activations.
    """
    kept = (
        replace(
            section,
            kernels=tuple(_inference_kernel(c) for c in section.kernels if c.kernel.phase == "forward"),
            collectives=tuple(t for t in section.collectives if t.phase == "forward"),
            gradients=(),
            saved_bytes=0.0,
            selectively_freed_bytes=0.0,
        )
        for section in program.sections
    )
    return Program(tuple(kept), program.tied_parameters)


def _inference_kernel(counted: CountedKernel) -> CountedKernel:
    """Replace batch normalisation by its inference kind: one pass with the averages of training as statistics."""
    kernel = counted.kernel
    if kernel.family != "memory" or kernel.kind.inference_kind is None:
        return counted
    return replace(counted, kernel=replace(kernel, operation=kernel.kind.inference_kind))
