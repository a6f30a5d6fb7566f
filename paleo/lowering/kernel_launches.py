"""Kernel launches of a layer: which element-wise passes are fused, and which operations recomputation runs again.

A compiler, or a framework's hand-written kernels, fuse element-wise passes into one launch. If only one pass reads the
output of the pass before it, that tensor need not be in memory: it is neither written nor read (nor is its gradient in
the backward pass), unless it is saved for the backward pass. Batch normalisation reads its input twice; later passes
are fused into the second read.

Full and selective recomputation run operations again in the way in which a framework checkpoints. A `_RecomputeModule`
selects the operations of one kind, and the tensors that are not saved. `LoweringOptions` holds these choices of the
software, and the way in which tokens reach their experts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from paleo.operations.base import Kernel, MemoryPass, Operation, is_attention_core
from paleo.operations.contraction import Contraction
from paleo.registry import Registry

if TYPE_CHECKING:
    from paleo.network.graph import Graph, Node
    from paleo.operations.tensor import Precision, Tensor


@dataclass(frozen=True, slots=True)
class OperationKernels:
    """Kernels that one operation launches, forward and backward, with the number of runs.

    Attributes
    ----------
    operation : Operation
        The operation.
    layer : str
        Name of its layer.
    repetitions : int
        Repetitions of the layer and of the loops inside it.
    forward : tuple of Kernel
        Kernels of the forward pass.
    backward : tuple of Kernel
        Kernels of the backward pass.
    full_recompute_runs : float
        Additional runs of the operation under full recomputation.
    selective_recompute_runs : float
        Additional runs under selective recomputation.
    """

    operation: Operation
    layer: str
    repetitions: int
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    full_recompute_runs: float = 1.0
    selective_recompute_runs: float = 0.0


#: Chains of passes that are one kernel. ``none``. ``norms``: a sum, a rectifier or both after a batch normalisation,
#: for which libraries have kernels; ``norms forward``: in the forward pass only. ``all``: any element-wise passes.
#: ``convolutions``: those, and passes whose output only convolutions read are fused into the convolutions.
FusedChains = Literal["none", "norms forward", "norms", "all", "convolutions"]


def fuse_passes(
    launches: Sequence[OperationKernels], readers: dict[str, int], precision: Precision, chains: FusedChains = "all"
) -> list[OperationKernels]:
    """Merge chains of element-wise passes into the last pass of each chain.

    Parameters
    ----------
    launches : sequence of OperationKernels
        Operations of a layer with their kernels, in order.
    readers : dict of str to int
        Number of operations that read each tensor, by tensor name.
    precision : Precision
        Number formats (bytes of weights, activations, …).
    chains : FusedChains, optional
        Which chains the software merges.

    Returns
    -------
    list of OperationKernels
        Fewer operations, in order; merged ones no longer move the tensors between them.
    """
    merged: list[OperationKernels] = []
    for launch in launches if chains != "none" else ():
        everything = chains in ("all", "convolutions")
        if merged and _fusable(merged[-1], launch, readers) and (everything or _follows_norm(merged[-1], launch)):
            joined = _join(merged[-1], launch, precision)
            separate_backward = replace(joined, backward=merged[-1].backward + launch.backward)
            merged[-1] = separate_backward if chains == "norms forward" else joined
        else:
            merged.append(launch)
    return merged or list(launches)


def convolution_only_inputs(nodes: Iterable[Node]) -> frozenset[str]:
    """Find the tensors that only convolutions read.

    Parameters
    ----------
    nodes : iterable of Node
        Layers.

    Returns
    -------
    frozenset of str
        Names of tensors.
    """
    reads = [(t.name, operation) for node in nodes for operation in node.operations for t in operation.read_tensors]
    others = {name for name, operation in reads if not (isinstance(operation, Contraction) and operation.windows)}
    return frozenset(name for name, _ in reads) - others


def fuse_into_convolutions(
    launch: OperationKernels, convolved: frozenset[str], precision: Precision
) -> OperationKernels:
    """Fuse an element-wise pass into the convolutions that read the output of the pass.

    The convolutions read the input of the pass, and compute the pass again in the backward pass instead of saving its
    output.

    Parameters
    ----------
    launch : OperationKernels
        The operation; anything but such a pass is returned unchanged.
    convolved : frozenset of str
        Names of tensors that only convolutions read.
    precision : Precision
        Number formats (bytes of weights, activations, …).

    Returns
    -------
    OperationKernels
        The operation with the bytes that it still moves.
    """
    operation = launch.operation
    if not isinstance(operation, MemoryPass) or operation.out.name not in convolved:
        return launch
    if not (operation.kind.is_pointwise or launch.forward[0].kind.reads_input_twice):
        return launch
    size = operation.out.bytes(precision)
    kept = operation.out.name in {tensor.name for tensor in operation.saved_tensors}
    forward = [replace(each, bytes_read=max(0.0, each.bytes_read - size), bytes_written=0.0) for each in launch.forward]
    backward = [replace(each, bytes_read=max(0.0, each.bytes_read - size * kept)) for each in launch.backward]
    return replace(launch, forward=tuple(forward), backward=tuple(backward))


def unfused_softmax(launch: OperationKernels, multiple: int, precision: Precision) -> OperationKernels:
    """Replace a fused softmax of attention by separate passes if the framework's fused kernel does not apply.

    The passes are: cast to fp32, scale, mask, softmax, cast back; the backward pass has as many. The fused kernel of
    Megatron-LM (2021) requires a number of score matrices (batch times heads of a rank) that is a multiple of four, one
    for each warp of a block. The memory of tensors that the separate passes save besides the weights is not counted.

    Parameters
    ----------
    launch : OperationKernels
        The softmax; any other operation is returned unchanged.
    multiple : int
        Number of matrices that the fused kernel processes together; 1 if it accepts any number.
    precision : Precision
        Number formats (bytes of weights, activations, …).

    Returns
    -------
    OperationKernels
        The softmax with one kernel per pass.
    """
    softmax = launch.operation
    if (
        multiple == 1
        or not isinstance(softmax, MemoryPass)
        or softmax.operation != "softmax"
        or len(softmax.out.sizes) < 3
    ):
        return launch
    scores = float(softmax.out.elements)
    if scores / float(softmax.out.sizes[-1] * softmax.out.sizes[-2]) % multiple == 0:
        return launch
    narrow, wide = precision.activation_bytes, precision.bytes_of("statistic")
    cast, passed, back = (narrow, wide), (wide, wide), (wide, narrow)
    forward = _split_into_passes(launch.forward, scores, (cast, passed, passed, passed, back))
    backward = _split_into_passes(launch.backward, scores, ((narrow, wide), (2 * wide, wide), passed, passed, back))
    return replace(launch, forward=forward, backward=backward)


def _split_into_passes(
    fused: tuple[Kernel, ...], elements: float, steps: Sequence[tuple[float, float]]
) -> tuple[Kernel, ...]:
    """Split a fused kernel into separate memory passes.

    ``steps`` gives, for each pass, the bytes read and the bytes written per element.
    """
    return tuple(
        replace(kernel, bytes_read=elements * read, bytes_written=elements * written)
        for kernel in fused
        for read, written in steps
    )


def section_slices(nodes: Sequence[Node], chains: FusedChains) -> list[slice]:
    """Divide a network's layers into sections: runs of layers that form one repeated block, or single layers.

    Parameters
    ----------
    nodes : sequence of Node
        Layers in topological order.
    chains : FusedChains
        Fused chains of passes; a layer of such passes belongs to the section of the layer before.

    Returns
    -------
    list of slice
        Range of indices into ``nodes`` for each section, in order.
    """
    names, starts = list(_section_names(nodes, chains)), [0]
    starts += [index for index in range(1, len(names)) if names[index] != names[index - 1]]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]


def _section_names(nodes: Iterable[Node], chains: FusedChains) -> Iterable[str]:
    """Yield, for each layer, the name of its section: the repeated block, or the layer itself outside blocks.

    If chains of passes are fused, a layer of passes over the output of the layer before belongs to that layer's
    section.
    """
    name, before = "", None
    for node in nodes:
        joins = chains != "none" and before is not None and not before.loops and _passes_over(node, before)
        name = name if joins else node.loops[0][0] if node.loops else node.name
        before = node
        yield name


def _passes_over(node: Node, before: Node) -> bool:
    """Return True if a layer outside repeated blocks consists of element-wise passes over the previous output."""
    written = {operation.out.name for operation in before.operations}
    pointwise = all(isinstance(operation, MemoryPass) and operation.kind.is_pointwise for operation in node.operations)
    return not node.loops and bool(node.operations) and pointwise and any(t.name in written for t in node.inputs)


def _fusable(first: OperationKernels, second: OperationKernels, readers: dict[str, int]) -> bool:
    a, b = first.operation, second.operation
    if not (isinstance(a, MemoryPass) and isinstance(b, MemoryPass)) or first.repetitions != second.repetitions:
        return False
    chains = (a.kind.is_pointwise or a.kind.reads_input_twice) and b.kind.is_pointwise
    read_by_it = any(t.name == a.out.name for t in b.inputs) and readers.get(a.out.name, 0) == 1
    return chains and a.out.elements == b.out.elements and read_by_it


def _follows_norm(first: OperationKernels, second: OperationKernels) -> bool:
    """Return True if ``first`` is a norm and ``second`` a pass of at most one FLOP per element (add, ReLU)."""
    starts = first.forward[0].kind.reads_input_twice if first.forward else False
    return starts and isinstance(second.operation, MemoryPass) and second.operation.flops_per_element <= 1.0


def _join(first: OperationKernels, second: OperationKernels, precision: Precision) -> OperationKernels:
    """Fuse two operations into one kernel, so that the tensor between them is neither written to memory nor read.

    Backward kernels are fused the same way if both operations have one.
    """
    between = first.operation.out.bytes(precision)
    kept = first.operation.out.name in {
        t.name for t in (*first.operation.saved_tensors, *second.operation.saved_tensors)
    }
    forward = _merged(first.forward, second.forward, 0.0 if kept else between, between)
    backward = _merged(first.backward, second.backward, between if first.backward and second.backward else 0.0, between)
    if not (first.backward and second.backward):
        backward = first.backward or second.backward
    recomputed = max(first.full_recompute_runs, second.full_recompute_runs)
    selected = max(first.selective_recompute_runs, second.selective_recompute_runs)
    return replace(
        second, forward=forward, backward=backward, full_recompute_runs=recomputed, selective_recompute_runs=selected
    )


def _merged(first: tuple[Kernel, ...], second: tuple[Kernel, ...], written: float, read: float) -> tuple[Kernel, ...]:
    """Merge two kernels into one; ``written`` and ``read`` are the bytes saved for the tensor between them."""
    if not (first and second):
        return first or second
    a, b = first[0], second[0]
    normalised = a.kind.reads_input_twice
    joined = replace(
        b,
        operation=a.operation if normalised else b.operation,
        shape={**b.shape, "swept": a.shape.get("swept", a.bytes_read)} if normalised else b.shape,
        vector_flops=a.vector_flops + b.vector_flops,
        bytes_read=max(0.0, a.bytes_read + b.bytes_read - read),
        bytes_written=max(0.0, a.bytes_written + b.bytes_written - written),
    )
    return (joined,)


SelectiveRecompute = Literal["attention", "products"]


@dataclass(frozen=True, slots=True)
class _RecomputeModule:
    """Part of a block that selective recomputation runs again, named as in Megatron-Core's ``--recompute-modules``.

    ``selects(layer, name of an operation inside it, operation)`` returns True for the operations to run again. Their
    outputs are not saved unless other layers read them. A module with ``discards_outputs`` does not save
    outputs that other layers read either; they are recomputed before the backward pass of these layers.
    ``view_suffixes`` are suffixes of the names of views of these outputs, which are not saved either.
    """

    name: str
    description: str
    selects_operation: Callable[[Node, str, Operation], bool]
    discards_outputs: bool = False
    view_suffixes: tuple[str, ...] = ()


RECOMPUTE_MODULES: Registry[_RecomputeModule] = Registry("module to recompute", "paleo.lowering")


def _add_recompute_module(module: _RecomputeModule) -> _RecomputeModule:
    """Register a recompute module under ``module.name``."""
    return RECOMPUTE_MODULES.register(module.name)(module)


def _is_norm(layer: Node, part: str, operation: Operation) -> bool:
    """Return True for a normalisation of a repeated block; the one before the head is not in a block."""
    return bool(layer.loops) and layer.type in ("layer_norm", "rms_norm") and isinstance(operation, MemoryPass)


def _is_expert_activation(layer: Node, part: str, operation: Operation) -> bool:
    return layer.type == "moe" and part.startswith("expert.act")


def _is_latent_projection(layer: Node, part: str, operation: Operation) -> bool:
    projected = part in ("q_norm", "query", "kv_norm", "kv_up", "value.copy")
    projected = projected or part.endswith(".rotated") or ".rotary." in part
    return layer.type == "latent_attention" and projected


_CORE_ATTENTION_RECOMPUTE = _add_recompute_module(
    _RecomputeModule(
        "core_attn", "scores, softmax, dropout and weighted sum", lambda _, __, operation: is_attention_core(operation)
    )
)
_add_recompute_module(_RecomputeModule("layernorm", "normalisations between layers", _is_norm, discards_outputs=True))
_add_recompute_module(
    _RecomputeModule("moe_act", "activations of experts", _is_expert_activation, discards_outputs=True)
)
_add_recompute_module(
    _RecomputeModule(
        "mla_up_proj",
        "norms of latent attention's vectors, what it projects out of them, and its rotation",
        _is_latent_projection,
        discards_outputs=True,
        view_suffixes=(".query", ".key", ".value"),
    )
)
_add_recompute_module(_RecomputeModule("mlp", "dense feed-forward layers", lambda layer, _, __: layer.type == "mlp"))
_add_recompute_module(
    _RecomputeModule("moe", "mixtures of experts, router and all", lambda layer, _, __: layer.type == "moe")
)
_add_recompute_module(
    _RecomputeModule(
        "shared_experts",
        "experts that every token visits",
        lambda layer, part, __: layer.type == "moe" and part.startswith("shared."),
    )
)


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """Activation checkpointing of a training framework: which operations the backward pass recomputes.

    If it ``stops_recompute_early``, recomputation of a block ends when its backward pass has all inputs (PyTorch's
    non-reentrant checkpoints, 2.1 and later); otherwise it runs to the end of the block. ``selective_scope`` is
    ``attention`` to recompute ``recompute_modules`` (by default the core of attention, Korthikanti et al., 2022). It is
    ``products`` to recompute all but that core and every second product of repeated blocks. That is torchtitan's
    selective activation checkpointing by operation, which wraps each of `model.layers`, but not head or loss.
    """

    stops_recompute_early: bool = False
    selective_scope: SelectiveRecompute = "attention"
    recompute_modules: tuple[str, ...] = (_CORE_ATTENTION_RECOMPUTE.name,)

    def full_recompute_runs(self, operation: Operation, left_out: frozenset[str]) -> float:
        """Return the number of extra runs of an operation per microbatch under full recomputation (0 or 1).

        Parameters
        ----------
        operation : Operation
            An operation of the block.
        left_out : frozenset of str
            Names of operations at the end of the block whose output backward does not need
            (`operations_unneeded_for_backward`).

        Returns
        -------
        float
            0 or 1.
        """
        return 0.0 if self.stops_recompute_early and operation.name in left_out else 1.0

    def selective_recompute_runs(self, node: Node, operation: Operation, left_out: frozenset[str]) -> float:
        """Return the number of extra runs of an operation per microbatch under selective recomputation.

        Parameters
        ----------
        node : Node
            Layer of the operation.
        operation : Operation
            The operation.
        left_out : frozenset of str
            Names of operations at the end of the block that backward does not need
            (`operations_unneeded_for_backward`).

        Returns
        -------
        float
            0, 0.5 (one of two products) or 1; 0 for layers outside repeated blocks.
        """
        if self.selective_scope == "attention":
            return float(any(_selects(RECOMPUTE_MODULES[name], node, operation) for name in self.recompute_modules))
        if not node.loops:
            return 0.0
        once = 0.5 if isinstance(operation, Contraction) else 1.0
        return 0.0 if is_attention_core(operation) else once * self.full_recompute_runs(operation, left_out)

    def _run_again(self, node: Node) -> frozenset[str]:
        """Return the names of a layer's operations that selective recomputation by module runs again."""
        if self.selective_scope != "attention":
            return frozenset()
        return frozenset(e.name for e in node.operations if self.selective_recompute_runs(node, e, frozenset()))

    def unsaved_tensors(self, nodes: Sequence[Node]) -> frozenset[str]:
        """Find the activations of a block that are not saved, because selective recomputation recomputes them.

        Parameters
        ----------
        nodes : sequence of Node
            Layers of the block.

        Returns
        -------
        frozenset of str
            Names of tensors.
        """
        return frozenset().union(*(_unsaved_tensors(RECOMPUTE_MODULES[name], nodes) for name in self.recompute_modules))


def _selects(module: _RecomputeModule, node: Node, operation: Operation) -> bool:
    return module.selects_operation(node, operation.name.removeprefix(f"{node.name}."), operation)


def unmatched_recompute_module_warnings(modules: Iterable[str], graph: Graph) -> list[str]:
    """Warn about recomputed modules that match no layer of the network.

    Parameters
    ----------
    modules : iterable of str
        Names as in `RecomputeOptions.modules`.
    graph : Graph
        Network as a graph of layers.

    Returns
    -------
    list of str
        One sentence for each such module.
    """
    parts = [(node, operation) for node in graph.nodes for operation in node.operations]
    idle = [name for name in modules if not any(_selects(RECOMPUTE_MODULES[name], *part) for part in parts)]
    return [f"recompute.modules={name} changes nothing: no layer of the network has that part" for name in idle]


def _unsaved_tensors(module: _RecomputeModule, nodes: Sequence[Node]) -> set[str]:
    """List the tensors that a recomputed module writes or saves.

    Outputs that other layers read are not freed, unless the module discards its outputs.
    """
    inner, outer = set[str](), set[str]()
    for node in nodes:
        for operation in node.operations:
            if not _selects(module, node, operation):
                outer.update(tensor.name for tensor in operation.read_tensors)
                continue
            inner.add(operation.out.name)
            inner.update({t.name for t in operation.saved_tensors} - {t.name for t in operation.read_tensors})
            views = [t.name for t in operation.read_tensors if t.name.endswith(module.view_suffixes or ("\0",))]
            inner.update(name for name in views if module.discards_outputs)
    if module.discards_outputs:
        return inner | {name for name in outer if inner and name.endswith(module.view_suffixes or ("\0",))}
    return inner - outer - {node.out.name for node in nodes}


#: Full recomputation of whole blocks, or selective recomputation of attention's core.
_DEFAULT_ACTIVATION_CHECKPOINTING = ActivationCheckpointing()


#: Computation that overlaps with the dispatch of tokens to experts and their return.
DispatchOverlap = Literal["shared experts", "microbatch"]


@dataclass(frozen=True, slots=True)
class TokenDispatch:
    """Method of dispatching tokens to experts (MoE all-to-all): which copies are sent, and what overlaps.

    With ``deduplication_target_count`` (a number of nodes or devices) a token is sent once to each of these, even if
    several of its experts are there; with None it is sent once to each expert. ``overlapped_computation`` names the
    computation that overlaps with the exchange.
    """

    deduplication_target_count: int | None = None
    overlapped_computation: DispatchOverlap | None = None


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """Framework choices that decide which kernels a layer graph launches: fusion, recomputation, MoE dispatch."""

    #: Chains of element-wise passes that are one kernel.
    fused_chains: FusedChains = "none"
    #: True if inputs gathered over tp are saved as shards and gathered again for the backward pass.
    regathers_tensor_parallel_inputs: bool = True
    #: Number of score matrices that the softmax kernel processes together (`unfused_softmax`).
    softmax_matrices_per_kernel: int = 1
    #: Pieces into which gathers and scatters over tp are cut to overlap with products.
    tensor_parallel_overlap_chunks: int = 1
    #: How the framework recomputes.
    checkpointing: ActivationCheckpointing = _DEFAULT_ACTIVATION_CHECKPOINTING


class SectionRecompute(NamedTuple):
    """Effect of activation recomputation on one section (a repeated block or a single layer).

    ``unrecomputed_operations`` are names of operations that are not recomputed, ``unsaved_tensors`` names of tensors
    that are not saved. ``recompute_runs`` hold, for each operation of each layer, its additional runs under full and
    selective recomputation. ``recomputed_module_operations`` maps each layer to the names of its operations in modules
    of selective recomputation.
    """

    unrecomputed_operations: frozenset[str]
    unsaved_tensors: frozenset[str]
    recompute_runs: tuple[tuple[tuple[float, float], ...], ...]
    recomputed_module_operations: Mapping[str, frozenset[str]]

    @classmethod
    def for_section(cls, nodes: Sequence[Node], checkpoints: ActivationCheckpointing) -> SectionRecompute:
        """Determine which operations of a section are recomputed, and which activations are not saved.

        Parameters
        ----------
        nodes : sequence of Node
            Layers of the section.
        checkpoints : ActivationCheckpointing
            How the framework recomputes.

        Returns
        -------
        SectionRecompute
            Names of operations and tensors, and extra runs of each operation.
        """
        spared = operations_unneeded_for_backward([operation for node in nodes for operation in node.operations])
        flags = (
            [
                (checkpoints.full_recompute_runs(e, spared), checkpoints.selective_recompute_runs(node, e, spared))
                for e in node.operations
            ]
            for node in nodes
        )
        recomputed = {node.name: checkpoints._run_again(node) for node in nodes}
        return cls(spared, checkpoints.unsaved_tensors(nodes), tuple(tuple(each) for each in flags), recomputed)


def operations_unneeded_for_backward(operations: Sequence[Operation]) -> frozenset[str]:
    """Find the operations at the end of a block whose output the backward pass does not need.

    These are all operations after the last one that saves a tensor. That one counts, too, if it saves nothing but its
    inputs, since its output is then needed by none.

    Parameters
    ----------
    operations : sequence of Operation
        Operations of the block, in order.

    Returns
    -------
    frozenset of str
        Names of operations.
    """
    unneeded: list[str] = []
    for operation in reversed(operations):
        kept = {tensor.name for tensor in saved_tensors(operation)}
        if kept - {tensor.name for tensor in operation.read_tensors}:
            break
        unneeded.append(operation.name)
        if kept:
            break
    return frozenset(unneeded)


def saved_tensors(operation: Operation) -> list[Tensor]:
    """List the tensors, except weights, that an operation saves for its backward pass.

    Parameters
    ----------
    operation : Operation
        The operation.

    Returns
    -------
    list of Tensor
        Saved tensors.
    """
    return [tensor for tensor in operation.saved_tensors if tensor.role != "parameter"]


class SavedTensorCounter:
    """Counter of activations saved for the backward pass; a tensor saved by several operations counts once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._kept = Counter[tuple[str, str]]()
        self._seen: set[tuple[str, str, str]] = set()

    def count_new_copies(self, tensor: Tensor, keeper: Node, copy: str = "") -> float:
        """Record a layer's saved activation, and count the copies that no earlier layer has saved already.

        Saving a part of a tensor saves its whole storage. If a loop carries the tensor, the first iteration reads the
        tensor that enters the loop, and each other iteration reads the output of the one before.

        Parameters
        ----------
        tensor : Tensor
            The tensor that is saved.
        keeper : Node
            Layer that saves it.
        copy : str, optional
            Format of a copy that is saved instead of the tensor itself.

        Returns
        -------
        float
            Number of tensors of this size that were not saved before.
        """
        loops = self.graph.loops_copying_tensor(tensor, keeper)
        read = tensor.name in {each.name for each in keeper.inputs}
        around = [loop for loop in loops if read and self.graph.is_loop_carried(tensor, loop)]
        outside = loops[: len(loops) - len(around)]
        whole, times_larger = self.graph.storage_tensor(tensor)
        new = self._new_copies(whole, copy, str(outside), math.prod(times for _, times in outside))
        for index, (name, times) in enumerate(around, start=len(outside)):
            iterations = math.prod(times for _, times in loops[:index]) * (times - 1)
            new += self._new_copies(self.graph.loop_carried_tensors[name][1], copy, f"round {name}", iterations)
        return new * times_larger

    def _new_copies(self, name: str, copy: str, which: str, copies: int) -> int:
        """Record ``copies`` of a tensor as saved, and return how many of them no earlier call has recorded."""
        if (name, copy, which) in self._seen:
            return 0
        self._seen.add((name, copy, which))
        maker, before = self.graph.writer_loops.get(name), self._kept[name, copy]
        most = before + copies if maker is None else math.prod(times for _, times in maker)
        self._kept[name, copy] = min(most, before + copies)
        return self._kept[name, copy] - before
