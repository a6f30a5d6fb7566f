"""The launches of a layer: which passes a kernel merges, and which operations run again before the backward pass.

Fusion of element-wise passes is what a compiler, or a framework's hand-written kernels, merge into one launch. A pass
that reads what the pass before it wrote, and alone reads it, need not meet memory in between: the tensor is neither
written nor read again (nor is its gradient on the way back), unless it is kept for the backward pass. Batch
normalisation takes the passes after it into its second sweep; the first, over its input, stays.

Full and selective recomputation run operations again by the way in which a framework checkpoints. A `RecomputeModule`
names the operations of one kind, and what is kept for them. These choices of the software, and how tokens reach their
experts, are `LoweringOptions`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from paleo.operations.base import Kernel, MemoryPass, Operation, is_core
from paleo.operations.contraction import Contraction
from paleo.registry import Registry

if TYPE_CHECKING:
    from paleo.network.graph import Graph, Node
    from paleo.operations.tensor import Precision, Tensor


@dataclass(frozen=True, slots=True)
class OperationKernels:
    """Kernels of one operation, forward and backward, and how often they run.

    Attributes
    ----------
    operation : Operation
        The operation.
    layer : str
        Name of its layer.
    times : int
        Repetitions of the layer and of the loops inside it.
    forward : tuple of Kernel
        Kernels of the forward pass.
    backward : tuple of Kernel
        Kernels of the backward pass.
    recomputed : float
        How often full recomputation runs the operation again.
    selected : float
        How often selective recomputation runs it again.
    """

    operation: Operation
    layer: str
    times: int
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    recomputed: float = 1.0
    selected: float = 0.0


#: Chains that are one kernel: none; a sum, a rectifier or both after a batch normalisation, which libraries have
#: kernels for, in the forward pass alone or both ways; whatever touches each element on its own; or that, and what only
#: convolutions read as part of them.
Chains = Literal["none", "norms forward", "norms", "all", "convolutions"]


def fuse_passes(
    launches: Sequence[OperationKernels], readers: dict[str, int], precision: Precision, chains: Chains = "all"
) -> list[OperationKernels]:
    """Merge chains of element-wise passes into the last pass of each chain.

    Parameters
    ----------
    launches : sequence of Launches
        Launches of a layer, in order.
    readers : dict of str to int
        Number of operations that read each tensor, by tensor name.
    precision : Precision
        Bytes of each role of a number.
    chains : Chains, optional
        Which chains the software merges.

    Returns
    -------
    list of Launches
        Fewer launches, in order.
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


def convolved_tensors(nodes: Iterable[Node]) -> frozenset[str]:
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
    reads = [(tensor.name, operation) for node in nodes for operation in node.operations for tensor in operation.reads]
    others = {name for name, operation in reads if not (isinstance(operation, Contraction) and operation.windows)}
    return frozenset(name for name, _ in reads) - others


def fused_into_convolution(
    launch: OperationKernels, convolved: frozenset[str], precision: Precision
) -> OperationKernels:
    """Merge a pass into the convolutions that read its result.

    The convolutions read what the pass reads, and compute the pass again in the backward pass instead of saving its
    result.

    Parameters
    ----------
    launch : Launches
        The pass; anything else is returned as it is.
    convolved : frozenset of str
        Names of tensors that only convolutions read.
    precision : Precision
        Bytes of each role of a number.

    Returns
    -------
    Launches
        The launch with the bytes that remain.
    """
    operation = launch.operation
    if not isinstance(operation, MemoryPass) or operation.out.name not in convolved:
        return launch
    if not (operation.kind.pointwise or launch.forward[0].kind.two_sweeps):
        return launch
    size = operation.out.bytes(precision)
    kept = operation.out.name in {tensor.name for tensor in operation.saves}
    forward = [replace(each, bytes_read=max(0.0, each.bytes_read - size), bytes_written=0.0) for each in launch.forward]
    backward = [replace(each, bytes_read=max(0.0, each.bytes_read - size * kept)) for each in launch.backward]
    return replace(launch, forward=tuple(forward), backward=tuple(backward))


def unfused_softmax(launch: OperationKernels, multiple: int, precision: Precision) -> OperationKernels:
    """Replace a fused softmax of attention by separate passes where the framework's kernel does not apply.

    The passes are: cast to fp32, scale, mask, softmax, cast back; and the same way back. The fused kernel of
    Megatron-LM (2021) takes matrices of scores (batch times heads of a rank) by fours, one for each warp of a block.
    Tensors that the separate passes save besides the weights are not counted as memory.

    Parameters
    ----------
    launch : Launches
        The softmax; anything else is returned as it is.
    multiple : int
        Number of matrices that the fused kernel takes at a time; 1 if it takes any.
    precision : Precision
        Bytes of each role of a number.

    Returns
    -------
    Launches
        The launch, with one kernel a pass.
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
    narrow, wide = precision.activation, precision.bytes_of("statistic")
    cast, passed, back = (narrow, wide), (wide, wide), (wide, narrow)
    forward = _passes(launch.forward, scores, (cast, passed, passed, passed, back))
    backward = _passes(launch.backward, scores, ((narrow, wide), (2 * wide, wide), passed, passed, back))
    return replace(launch, forward=forward, backward=backward)


def _passes(fused: tuple[Kernel, ...], elements: float, steps: Sequence[tuple[float, float]]) -> tuple[Kernel, ...]:
    """A fused kernel divided into passes; ``steps``: bytes read and written by each, per element."""
    return tuple(
        replace(kernel, bytes_read=elements * read, bytes_written=elements * written)
        for kernel in fused
        for read, written in steps
    )


def section_nodes(nodes: Sequence[Node], chains: Chains) -> list[slice]:
    """Divide layers, in order, into sections: repeated blocks and single layers.

    Parameters
    ----------
    nodes : sequence of Node
        Layers in topological order.
    chains : Chains
        Merged chains of passes; a layer of such passes joins the section of the layer before.

    Returns
    -------
    list of slice
        The layers of each section.
    """
    names, starts = list(_section_names(nodes, chains)), [0]
    starts += [index for index in range(1, len(names)) if names[index] != names[index - 1]]
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], len(names)], strict=True)]


def _section_names(nodes: Iterable[Node], chains: Chains) -> Iterable[str]:
    """The section of each layer: its repeated block, or one of its own. Where chains of passes are merged, a layer of
    passes over the output of the layer before belongs to that layer's section."""
    name, before = "", None
    for node in nodes:
        joins = chains != "none" and before is not None and not before.repeats and _passes_over(node, before)
        name = name if joins else node.repeats[0][0] if node.repeats else node.name
        before = node
        yield name


def _passes_over(node: Node, before: Node) -> bool:
    """Whether a layer outside repeated blocks touches each element of the other's result on its own."""
    written = {operation.out.name for operation in before.operations}
    pointwise = all(isinstance(operation, MemoryPass) and operation.kind.pointwise for operation in node.operations)
    return not node.repeats and bool(node.operations) and pointwise and any(t.name in written for t in node.inputs)


def _fusable(first: OperationKernels, second: OperationKernels, readers: dict[str, int]) -> bool:
    a, b = first.operation, second.operation
    if not (isinstance(a, MemoryPass) and isinstance(b, MemoryPass)) or first.times != second.times:
        return False
    chains = (a.kind.pointwise or a.kind.two_sweeps) and b.kind.pointwise
    read_by_it = any(t.name == a.out.name for t in b.inputs) and readers.get(a.out.name, 0) == 1
    return chains and a.out.elements == b.out.elements and read_by_it


def _follows_norm(first: OperationKernels, second: OperationKernels) -> bool:
    """Whether the chain starts with a normalisation and goes on with one operation an element: a sum, a rectifier."""
    starts = first.forward[0].kind.two_sweeps if first.forward else False
    return starts and isinstance(second.operation, MemoryPass) and second.operation.flops_per_element <= 1.0


def _join(first: OperationKernels, second: OperationKernels, precision: Precision) -> OperationKernels:
    """One launch for both: the tensor between them is spared, forward and (where both have a pass) backward."""
    between = first.operation.out.bytes(precision)
    kept = first.operation.out.name in {t.name for t in (*first.operation.saves, *second.operation.saves)}
    forward = _merged(first.forward, second.forward, 0.0 if kept else between, between)
    backward = _merged(first.backward, second.backward, between if first.backward and second.backward else 0.0, between)
    if not (first.backward and second.backward):
        backward = first.backward or second.backward
    recomputed, selected = max(first.recomputed, second.recomputed), max(first.selected, second.selected)
    return replace(second, forward=forward, backward=backward, recomputed=recomputed, selected=selected)


def _merged(first: tuple[Kernel, ...], second: tuple[Kernel, ...], written: float, read: float) -> tuple[Kernel, ...]:
    """The second launch with the work of the first, less what is no longer written and read between them."""
    if not (first and second):
        return first or second
    a, b = first[0], second[0]
    normalised = a.kind.two_sweeps
    joined = replace(
        b,
        operation=a.operation if normalised else b.operation,
        shape={**b.shape, "swept": a.shape.get("swept", a.bytes_read)} if normalised else b.shape,
        vector_flops=a.vector_flops + b.vector_flops,
        bytes_read=max(0.0, a.bytes_read + b.bytes_read - read),
        bytes_written=max(0.0, a.bytes_written + b.bytes_written - written),
    )
    return (joined,)


Selective = Literal["attention", "products"]


@dataclass(frozen=True, slots=True)
class RecomputeModule:
    """Part of a block that selective recomputation runs again, named as in Megatron-Core's ``--recompute-modules``.

    ``selects(layer, name of an operation within it, operation)`` says which operations it runs again. What
    they make is not kept, but for tensors that others read, too; a module that ``discards`` its outputs gives those up
    as well (they are made again before whoever reads them runs backward), with the ``views`` of them, by the ends of
    their names.
    """

    name: str
    meaning: str
    selects: Callable[[Node, str, Operation], bool]
    discards: bool = False
    views: tuple[str, ...] = ()


RECOMPUTE_MODULES: Registry[RecomputeModule] = Registry("module to recompute", "paleo.lowering")


def _add_recompute_module(module: RecomputeModule) -> RecomputeModule:
    """Register a module under its own name."""
    return RECOMPUTE_MODULES.register(module.name)(module)


def _is_norm(layer: Node, part: str, operation: Operation) -> bool:
    """A normalisation of a repeated block, not that before the head."""
    return bool(layer.repeats) and layer.type in ("layer_norm", "rms_norm") and isinstance(operation, MemoryPass)


def _is_expert_activation(layer: Node, part: str, operation: Operation) -> bool:
    return layer.type == "moe" and part.startswith("expert.act")


def _is_latent_projection(layer: Node, part: str, operation: Operation) -> bool:
    projected = part in ("q_norm", "query", "kv_norm", "kv_up", "value.copy")
    projected = projected or part.endswith(".rotated") or ".rotary." in part
    return layer.type == "latent_attention" and projected


CORE = _add_recompute_module(
    RecomputeModule(
        "core_attn", "scores, softmax, dropout and weighted sum", lambda _, __, operation: is_core(operation)
    )
)
_add_recompute_module(RecomputeModule("layernorm", "normalisations between layers", _is_norm, discards=True))
_add_recompute_module(RecomputeModule("moe_act", "activations of experts", _is_expert_activation, discards=True))
_add_recompute_module(
    RecomputeModule(
        "mla_up_proj",
        "norms of latent attention's vectors, what it projects out of them, and its rotation",
        _is_latent_projection,
        discards=True,
        views=(".query", ".key", ".value"),
    )
)
_add_recompute_module(RecomputeModule("mlp", "dense feed-forward layers", lambda layer, _, __: layer.type == "mlp"))
_add_recompute_module(
    RecomputeModule("moe", "mixtures of experts, router and all", lambda layer, _, __: layer.type == "moe")
)
_add_recompute_module(
    RecomputeModule(
        "shared_experts",
        "experts that every token visits",
        lambda layer, part, __: layer.type == "moe" and part.startswith("shared."),
    )
)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How a framework recomputes.

    A block ``stops_early`` where its backward pass has all that it needs (PyTorch's non-reentrant checkpoints, 2.1 and
    later), or runs to its end. ``selective`` recomputation is of ``modules`` (the core of attention alone, Korthikanti
    et al., 2022), or of all but that core and every second of the ``products`` of repeated blocks (torchtitan's
    selective activation checkpointing by operation, which wraps each of `model.layers` and neither head nor loss).
    """

    stops_early: bool = False
    selective: Selective = "attention"
    modules: tuple[str, ...] = (CORE.name,)

    def recomputed(self, operation: Operation, left_out: frozenset[str]) -> float:
        """Return how often full recomputation runs an operation again.

        Parameters
        ----------
        operation : Operation
            An operation of the block.
        left_out : frozenset of str
            Names of operations at the end of the block that backward does not need (`unneeded_for_backward`).

        Returns
        -------
        float
            0 or 1.
        """
        return 0.0 if self.stops_early and operation.name in left_out else 1.0

    def selected(self, node: Node, operation: Operation, left_out: frozenset[str]) -> float:
        """Return how often selective recomputation runs an operation again.

        Parameters
        ----------
        node : Node
            Layer of the operation.
        operation : Operation
            The operation.
        left_out : frozenset of str
            Names of operations at the end of the block that backward does not need (`unneeded_for_backward`).

        Returns
        -------
        float
            0, 0.5 (one of two products) or 1; 0 for layers outside repeated blocks.
        """
        if self.selective == "attention":
            return float(any(_selects(RECOMPUTE_MODULES[name], node, operation) for name in self.modules))
        if not node.repeats:
            return 0.0
        once = 0.5 if isinstance(operation, Contraction) else 1.0
        return 0.0 if is_core(operation) else once * self.recomputed(operation, left_out)

    def _run_again(self, node: Node) -> frozenset[str]:
        """Names of the operations of a layer that modules of selective recomputation run again."""
        if self.selective != "attention":
            return frozenset()
        return frozenset(each.name for each in node.operations if self.selected(node, each, frozenset()))

    def freed(self, nodes: Sequence[Node]) -> frozenset[str]:
        """Find the tensors of a block that selective recomputation of modules does not save.

        Parameters
        ----------
        nodes : sequence of Node
            Layers of the block.

        Returns
        -------
        frozenset of str
            Names of tensors.
        """
        return frozenset().union(*(_freed(RECOMPUTE_MODULES[name], nodes) for name in self.modules))


def _selects(module: RecomputeModule, node: Node, operation: Operation) -> bool:
    return module.selects(node, operation.name.removeprefix(f"{node.name}."), operation)


def unmatched_module_warnings(modules: Iterable[str], graph: Graph) -> list[str]:
    """Warn about recomputed modules that no layer of the network has.

    Parameters
    ----------
    modules : iterable of str
        Names as in `Run.recompute_modules`.
    graph : Graph
        The network.

    Returns
    -------
    list of str
        One sentence for each such module.
    """
    parts = [(node, operation) for node in graph.nodes for operation in node.operations]
    idle = [name for name in modules if not any(_selects(RECOMPUTE_MODULES[name], *part) for part in parts)]
    return [f"recompute.modules={name} changes nothing: no layer of the network has that part" for name in idle]


def _freed(module: RecomputeModule, nodes: Sequence[Node]) -> set[str]:
    """Tensors that a recomputed module writes or keeps for itself. Outputs that other layers read stay, unless the
    module discards its outputs."""
    inner, outer = set[str](), set[str]()
    for node in nodes:
        for operation in node.operations:
            if not _selects(module, node, operation):
                outer.update(tensor.name for tensor in operation.reads)
                continue
            inner.add(operation.out.name)
            inner.update({tensor.name for tensor in operation.saves} - {tensor.name for tensor in operation.reads})
            views = [tensor.name for tensor in operation.reads if tensor.name.endswith(module.views or ("\0",))]
            inner.update(name for name in views if module.discards)
    if module.discards:
        return inner | {name for name in outer if inner and name.endswith(module.views or ("\0",))}
    return inner - outer - {node.out.name for node in nodes}


#: Blocks run again to their end, or the core of their attention.
WHOLE_BLOCKS = Checkpoints()


#: What a device works on while tokens go to experts or return.
BesideDispatch = Literal["shared experts", "microbatch"]


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How tokens travel to their experts.

    With ``targets`` a token travels once to each of these nodes or devices, however many of its experts are there; with
    None it travels once to each expert. ``beside`` is what overlaps with the exchange.
    """

    targets: int | None = None
    beside: BesideDispatch | None = None


#: A copy of a token to each of its experts.
ALL_TO_ALL = Dispatch()


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """How the software carries out a rank's work."""

    #: Which chains of element-wise passes are one kernel.
    chains: Chains = "none"
    #: Whether inputs that were gathered over tp are kept as shards and gathered again for backward.
    regather: bool = True
    #: By how many matrices of scores the unfused softmax kernel works (`unfused_softmax`).
    softmax_multiple: int = 1
    #: Pieces in which gathers and scatters over tp go beside products.
    gather_pieces: int = 1
    dispatch: Dispatch = ALL_TO_ALL
    #: What recomputation runs again.
    checkpoints: Checkpoints = WHOLE_BLOCKS


class SectionCheckpoints(NamedTuple):
    """What recomputation does to one section.

    ``spared`` are the names of operations that it does not run again and ``freed`` those of tensors that are not saved.
    ``flags`` hold for each operation of each layer how often full and selective recomputation run it. ``recomputed``
    names, by layer, the operations of the modules of selective recomputation.
    """

    spared: frozenset[str]
    freed: frozenset[str]
    flags: tuple[tuple[tuple[float, float], ...], ...]
    recomputed: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, nodes: Sequence[Node], checkpoints: Checkpoints) -> SectionCheckpoints:
        """Collect what recomputation does to the layers of one section.

        Parameters
        ----------
        nodes : sequence of Node
            Layers of the section.
        checkpoints : Checkpoints
            How the framework recomputes.

        Returns
        -------
        SectionCheckpoints
            The collected names and counts.
        """
        spared = unneeded_for_backward([operation for node in nodes for operation in node.operations])
        flags = (
            [
                (checkpoints.recomputed(each, spared), checkpoints.selected(node, each, spared))
                for each in node.operations
            ]
            for node in nodes
        )
        recomputed = {node.name: checkpoints._run_again(node) for node in nodes}
        return cls(spared, checkpoints.freed(nodes), tuple(tuple(each) for each in flags), recomputed)


def unneeded_for_backward(operations: Sequence[Operation]) -> frozenset[str]:
    """Find the operations at the end of a block that the backward pass does not need.

    They follow the last saved tensor. The operation that reads it belongs to them if it saves only its inputs.

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
        if kept - {tensor.name for tensor in operation.reads}:
            break
        unneeded.append(operation.name)
        if kept:
            break
    return frozenset(unneeded)


def saved_tensors(operation: Operation) -> list[Tensor]:
    """Return the tensors, without weights, that an operation saves for its backward pass.

    Parameters
    ----------
    operation : Operation
        The operation.

    Returns
    -------
    list of Tensor
        Saved tensors.
    """
    return [tensor for tensor in operation.saves if tensor.role != "parameter"]


class SavedTensorCounter:
    """Counter of tensors saved for the backward pass; a storage counts once even if several operations save it."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._kept = Counter[tuple[str, str]]()
        self._seen: set[tuple[str, str, str]] = set()

    def add(self, tensor: Tensor, keeper: Node, copy: str = "") -> float:
        """Count the new tensors that are saved when a layer saves a tensor in each of its iterations.

        A part of a storage saves the whole storage. Of a tensor that a loop carries, the first iteration reads what
        enters the loop and the others read the output of the iteration before.

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
        loops = self.graph.loops_of(tensor, keeper)
        read = tensor.name in {each.name for each in keeper.inputs}
        around = [loop for loop in loops if read and self.graph.enters(tensor, loop)]
        outside = loops[: len(loops) - len(around)]
        whole, times_larger = self.graph.storage_of(tensor)
        new = self._new_copies(whole, copy, str(outside), math.prod(times for _, times in outside))
        for index, (name, times) in enumerate(around, start=len(outside)):
            iterations = math.prod(times for _, times in loops[:index]) * (times - 1)
            new += self._new_copies(self.graph.carried[name][1], copy, f"round {name}", iterations)
        return new * times_larger

    def _new_copies(self, name: str, copy: str, which: str, copies: int) -> int:
        """``copies`` of the tensor of that name are kept, those of these loops: how many are new."""
        if (name, copy, which) in self._seen:
            return 0
        self._seen.add((name, copy, which))
        maker, before = self.graph.written_in.get(name), self._kept[name, copy]
        most = before + copies if maker is None else math.prod(times for _, times in maker)
        self._kept[name, copy] = min(most, before + copies)
        return self._kept[name, copy] - before
