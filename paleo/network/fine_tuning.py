"""Fine-tuning: frozen layers, low-rank adapters, and frozen weights stored in four bits.

``freeze`` names layers whose weights are not trained; layers before the first trained weight have no backward pass.
``lora`` (Hu et al., LoRA, ICLR 2022): y = x·W + (α/r) · (x·A)·B, with W (in, out) frozen, A (in, r) and B (r, out)
trained. ``qlora`` (Dettmers et al., QLoRA, NeurIPS 2023): W of the products in repeated blocks is stored in NF4 and
converted to sixteen bits before each product, forward and backward. All three change the graph, so that backward
kernels, gradient exchange, optimizer states, memory and FLOP follow from it. Not counted: dropout before A, which
recipes set to 0 or a few per cent, and optimizer states paged out to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from itertools import accumulate, groupby
from typing import TYPE_CHECKING

from paleo.errors import PlanError, suggest_names
from paleo.layers.base import LayerOperations, with_frozen_weights
from paleo.network.graph import GRAPH_TRANSFORMS, Graph, Node
from paleo.operations.base import (
    Kernel,
    MemoryPass,
    Operation,
    Phase,
    elementwise_kernel,
    gradient_accumulation_kernel,
    map_tensors,
)
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import Precision, Tensor

if TYPE_CHECKING:
    from paleo.specs.run import Run

#: Words for the products that get an adapter; other targets are patterns of names.
_ADAPTER_TARGETS = ("attention", "mlp", "all")
#: Rank and targets of ``qlora`` without ``lora``: those of its paper (section 4 and appendix B).
_DEFAULT_QLORA_ADAPTERS = "64:all"
#: Bytes of a number in NF4 with double quantisation: half a byte, plus one byte for the constant of each block of 64
#: numbers, plus four bytes for each 256 such constants (QLoRA, section 3).
NF4_BYTES_PER_NUMBER = 0.5 + 1.0 / 64 + 4.0 / (64 * 256)


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Fine-tuning of a network: LoRA adapters, frozen layers, and NF4 storage of frozen weights.

    Attributes
    ----------
    lora_rank : int, optional
        Rank of the adapters. None: the weights themselves are trained.
    adapter_targets : str
        Products that get an adapter: ``attention``, ``mlp``, ``all`` or a pattern of names.
    nf4_weights : bool
        True if frozen products are stored in NF4.
    frozen_patterns : tuple of str
        Patterns of layers that are not trained and get no adapter.
    """

    lora_rank: int | None = None
    adapter_targets: str = "attention"
    nf4_weights: bool = False
    frozen_patterns: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        """Return the fine-tuning as short text: ``LoRA of rank 16 (attention), NF4``."""
        words = [] if self.lora_rank is None else [f"LoRA of rank {self.lora_rank} ({self.adapter_targets})"]
        words += ["frozen weights in NF4"] if self.nf4_weights else []
        return ", ".join(words + ([f"frozen: {', '.join(self.frozen_patterns)}"] if self.frozen_patterns else []))


def fine_tuning_of_run(run: Run) -> FineTuning | None:
    """Return the fine-tuning that a run asks for.

    Parameters
    ----------
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    FineTuning, optional
        What it trains; None if all weights are trained.

    Raises
    ------
    PlanError
        If `lora` is not of the form "RANK" or "RANK:TARGETS", or the run cannot have adapters.

    Examples
    --------
    >>> from paleo.specs.run import Run
    >>> print(fine_tuning_of_run(Run(lora="16")))
    LoRA of rank 16 (attention)
    """
    options = run.fine_tuning
    stated = _DEFAULT_QLORA_ADAPTERS if options.lora is None and options.qlora else options.lora
    if stated is None:
        return FineTuning(frozen_patterns=options.freeze) if options.freeze else None
    if run.forward_only:
        raise PlanError(f"lora: {stated} is for training; a forward pass has adapters merged into the weights")
    rank, _, targets = str(stated).partition(":")
    if not rank.isdecimal() or not 1 <= int(rank) <= _MAX_ADAPTER_RANK or (":" in str(stated) and not targets):
        raise PlanError(
            f"lora: {stated!r}: expected RANK or RANK:TARGETS, a rank from 1 to {_MAX_ADAPTER_RANK} and attention, "
            "mlp, all or a pattern of layers' names, such as 16 or 64:all"
        )
    return FineTuning(int(rank), targets or "attention", options.qlora, options.freeze)


#: The highest rank of an adapter. A larger one exceeds the width of every product that is adapted in practice.
_MAX_ADAPTER_RANK = 65536


@dataclass(frozen=True, slots=True)
class _AdapterProduct(Contraction):
    """One product of a LoRA adapter, x·A or (x·A)·B, in sixteen bits even if the frozen product is narrower.

    Where ``adds_to_input_gradient`` is set, the frozen product has already written the gradient of x; A's product adds
    to it in an extra pass.
    """

    adds_to_input_gradient: bool = False

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass, with the pass that adds to the gradient of x.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            Kernels of a matrix product, then the accumulation if x needs a gradient that is already written.
        """
        kernels = Contraction.backward_kernels(self, precision)
        if not (self.adds_to_input_gradient and self.lhs.needs_gradient):
            return kernels
        return (*kernels, gradient_accumulation_kernel(self.name, float(self.lhs.elements), self.lhs.bytes(precision)))

    def operand_precision(self, precision: Precision) -> Precision:
        """Return the number formats of the operands: at least sixteen bits.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        Precision
            Formats without quantisation.
        """
        return precision.without_quantisation


@dataclass(frozen=True, slots=True)
class _PackedProduct(Contraction):
    """Matrix product with a frozen weight stored in four bits (QLoRA's NF4).

    A pass over the weight converts it to sixteen bits before each product that reads it.
    """

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass, with FLOP, bytes and shapes.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            Conversion of the weight to sixteen bits, then the product.
        """
        return (self._dequantise_kernel("forward", precision), *Contraction.forward_kernels(self, precision))

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass, with FLOP, bytes and shapes.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            Kernels of a matrix product, after a conversion of the weight if the input needs a gradient.
        """
        kernels = Contraction.backward_kernels(self, precision)
        return (self._dequantise_kernel("backward", precision), *kernels) if self.lhs.needs_gradient else kernels

    def _dequantise_kernel(self, phase: Phase, precision: Precision) -> Kernel:
        count = float(self.rhs.elements)
        read, written = self.rhs.bytes(precision), count * precision.activation_bytes
        return elementwise_kernel(f"{self.name}.dequantise", "elementwise", phase, count, read, written)

    def operand_precision(self, precision: Precision) -> Precision:
        """Return the number formats of the operands: the weight is converted to sixteen bits before the product.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        Precision
            Formats without quantisation.
        """
        return precision.without_quantisation


@GRAPH_TRANSFORMS.register("fine-tuning")
def with_fine_tuning(graph: Graph, run: Run) -> Graph:
    """Return a network in which weights that a run does not train are frozen, with LoRA adapters beside linear layers.

    Gradients go back as far as the first trained weight; earlier layers have no backward pass. Iterations of a folded
    block that differ in what is frozen become separate blocks.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    Graph
        The changed network; the same one if all weights are trained.

    Raises
    ------
    PlanError
        If nothing would be trained.
    """
    tuning = fine_tuning_of_run(run)
    if tuning is None:
        return graph
    graph, frozen = _split_by_frozen_layers(graph, tuning.frozen_patterns)
    nodes = [_fine_tuned_layer(node, tuning, node.name in frozen) for node in graph.nodes]
    if not any(_trains(node) for node in nodes):
        raise PlanError(_nothing_trained_message(graph, tuning))
    # Find the names of the tensors that need a gradient: all that are computed from a trained weight.
    import networkx as nx

    reads: nx.DiGraph[str | tuple[str, str]] = nx.DiGraph()
    for node in nodes:
        names = [tensor.name for tensor in node.inputs if tensor.needs_gradient] + [_TRAINED] * _trains(node)
        reads.add_edges_from((name, node.out.name) for name in names)
        reads.add_edges_from(((loop, name), node.out.name) for loop, _ in node.loops for name in names)
    repeated = {loop for node in nodes for loop, times in node.loops if times > 1}
    reads.add_edges_from(
        (changed, (loop, enters)) for loop, (enters, changed) in graph.loop_carried_tensors.items() if loop in repeated
    )
    live = set(nx.descendants(reads, _TRAINED))
    dead = {node.out.name for node in nodes if node.out.name not in live}
    return replace(graph, nodes=tuple(_without_dead_gradients(node, live, dead) for node in nodes))


def _nothing_trained_message(graph: Graph, tuning: FineTuning) -> str:
    if tuning.lora_rank is None:
        return f"freeze: {', '.join(tuning.frozen_patterns)} leaves no weight of {graph.name} to train"
    hints = {"attention": " whose layers are called attention; try all", "all": ""}
    products = [op.name for node in graph.nodes for op in node.operations if _has_weight(op)]
    near = suggest_names(tuning.adapter_targets, [*_ADAPTER_TARGETS, *products])
    names = f" called {tuning.adapter_targets!r}; {near}"
    hint = hints.get(tuning.adapter_targets, names)
    return f"lora: model {graph.name!r} has no products with weights in repeated blocks{hint}"


def _fine_tuned_layer(node: Node, tuning: FineTuning, frozen: bool) -> Node:
    """Return a layer after fine-tuning is applied: weights frozen, stored in NF4 or given LoRA adapters."""
    if tuning.lora_rank is None:
        return _freeze_layer(node) if frozen else node
    rank = None if frozen or not node.loops else tuning.lora_rank
    packs = tuning.nf4_weights and bool(node.loops)
    changed: list[Operation] = []
    for operation in _freeze_layer(node).operations:
        if not (isinstance(operation, Contraction) and _has_weight(operation)):
            changed.append(operation)
            continue
        product = _with_nf4_weight(operation) if packs else operation
        chosen = rank is not None and _gets_adapter(node, operation, tuning.adapter_targets)
        changed += _with_adapter(product, rank) if rank is not None and chosen else [product]
    return replace(node, operations=tuple(changed))


def _has_weight(operation: Operation) -> bool:
    """Return True if an operation is a product with a weight, so that it can have an adapter. Convolutions are none."""
    return isinstance(operation, Contraction) and operation.rhs.role == "parameter" and not operation.windows


def _gets_adapter(node: Node, product: Contraction, targets: str) -> bool:
    attention = node.type.endswith("attention")
    if targets in _ADAPTER_TARGETS:
        return targets == "all" or attention == (targets == "attention")
    return _matches(product.name, targets)


def _matches(name: str, pattern: str) -> bool:
    """Return True if a pattern matches a layer's name, its last part, or the name of a block around it.

    ``block`` and ``block.*.mlp1`` match all layers inside.
    """
    parts = name.split(".")
    names = (".".join(parts[: end + 1]) for end in range(len(parts)))
    return any(fnmatchcase(each, pattern) for each in names) or fnmatchcase(parts[-1], pattern)


def _freeze_layer(node: Node) -> Node:
    return replace(node, operations=with_frozen_weights(LayerOperations(node.operations, node.out)).operations)


def _with_nf4_weight(product: Contraction) -> Contraction:
    """Return the matrix product with the weight stored in NF4 (4-bit)."""
    stored = replace(product.rhs, packed_bytes_per_number=NF4_BYTES_PER_NUMBER)
    parts = {part.name: getattr(product, part.name) for part in fields(product)}
    return _PackedProduct(**parts | {"rhs": stored})


def _with_adapter(product: Contraction, rank: int) -> Iterator[Operation]:
    """Yield a matrix product and the operations of its LoRA adapter, in the order of NeMo and PEFT.

    The adapter's operations are x·A, (x·A)·B, the scaling by α/r and the sum.
    """
    x, weight, out, name = product.lhs, product.rhs, product.out, f"{product.name}.adapter"
    weight_sizes = weight.shape
    kept = {dim: size for dim, size in weight_sizes.items() if dim in x.dims and dim in out.dims}
    narrow = {dim: size for dim, size in x.shape.items() if dim not in weight_sizes or dim in kept}
    into = {dim: size for dim, size in weight_sizes.items() if dim not in out.dims}
    outof = {dim: size for dim, size in weight_sizes.items() if dim not in x.dims}
    base, wide = out.like(f"{name}.base"), out.like(f"{name}.up")
    low = Tensor.of(f"{name}.down", narrow | {"rank": rank})
    down = Tensor.of(f"{name}.A", kept | into | {"rank": rank}, "parameter")
    up = Tensor.of(f"{name}.B", kept | {"rank": rank} | outof, "parameter")
    scaled = out.like(f"{name}.scaled")
    yield replace(product, out=base)
    yield _AdapterProduct(low.name, x, down, low, adds_to_input_gradient=True)
    yield _AdapterProduct(wide.name, low, up, wide)
    yield MemoryPass(scaled.name, "elementwise", (wide,), scaled, commutes_with_addition=True)
    yield MemoryPass(f"{name}.add", "elementwise", (base, scaled), out, backward_rule="free")


def _trains(node: Node) -> bool:
    return any(tensor.needs_gradient for tensor in node.parameters.values())


#: Names of tensors that need a gradient. A pair (loop, name) is a tensor that needs one only in later iterations of a
#: loop.
_GradientTensorNames = set[str | tuple[str, str]]
#: Node of the graph of reads that stands for all trained weights.
_TRAINED = ""


def _is_live(node: Node, tensor: Tensor, live: _GradientTensorNames) -> bool:
    return tensor.name in live or any((loop, tensor.name) in live for loop, _ in node.loops)


def _without_dead_gradients(node: Node, live: _GradientTensorNames, dead: set[str]) -> Node:
    """Return a layer without gradients for the outputs of ``dead`` layers, which no trained weight influences.

    A layer without any gradient saves nothing for the backward pass.
    """
    idle = not (_trains(node) or any(_is_live(node, tensor, live) for tensor in node.inputs))

    def marked(tensor: Tensor) -> Tensor:
        gone = tensor.role != "parameter" and (idle or (tensor.name in dead and not _is_live(node, tensor, live)))
        return replace(tensor, needs_gradient=False) if gone else tensor

    def changed(operation: Operation) -> Operation:
        result = map_tensors(operation, marked)
        return replace(result, saved=()) if idle and isinstance(result, MemoryPass) else result

    return replace(
        node,
        inputs=tuple(marked(tensor) for tensor in node.inputs),
        operations=tuple(map(changed, node.operations)),
        out=replace(node.out, needs_gradient=node.out.needs_gradient and node.out.name in live),
    )


# frozen layers, and folded blocks of which only some iterations are frozen


def _split_by_frozen_layers(graph: Graph, patterns: Sequence[str]) -> tuple[Graph, frozenset[str]]:
    """Split each folded block where its iterations (``block.0``, ``block.1``, …) differ in their frozen layers.

    Returns the graph and the names of its frozen layers. Raises PlanError for a pattern that matches no layer.
    """
    names = {
        name
        for node in graph.nodes
        if node.operations
        for iteration in range(node.loops[0][1] if node.loops else 1)
        for name in _names(node, iteration)
    }
    for pattern in patterns:
        if not any(_matches(name, pattern) for name in names):
            hint = suggest_names(pattern, dict.fromkeys(node.name for node in graph.nodes))
            raise PlanError(f"freeze: no layer of {graph.name} is called {pattern!r}; {hint}")
    frozen = {node.name for node in graph.nodes if not node.loops and _is_frozen((node.name,), patterns)}
    for loop, times in dict.fromkeys(node.loops[0] for node in graph.nodes if node.loops):
        inside = [node for node in graph.nodes if node.loops[:1] == ((loop, times),)]
        layers = [
            frozenset(node.name for node in inside if _is_frozen(_names(node, iteration), patterns))
            for iteration in range(times)
        ]
        groups = [(names, len(list(members))) for names, members in groupby(layers)]
        if len(groups) == 1:
            frozen |= layers[0]
            continue
        parts = _part_iterations(loop, [length for _, length in groups])
        graph = _with_loop_in_parts(graph, loop, parts)
        frozen |= {part + name.removeprefix(loop) for (n, _), part in zip(groups, parts, strict=True) for name in n}
    return graph, frozenset(frozen)


def _names(node: Node, iteration: int) -> tuple[str, ...]:
    """List the names of a layer in one iteration of its outermost folded block: "block.mlp1" and "block.3.mlp1"."""
    if not node.loops:
        return (node.name,)
    loop = node.loops[0][0]
    return node.name, f"{loop}.{iteration}{node.name.removeprefix(loop)}"


def _is_frozen(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(_matches(name, pattern) for name in names for pattern in patterns)


def _part_iterations(loop: str, lengths: Sequence[int]) -> dict[str, int]:
    """Map the name of each part of a block (``block.0-3`` or ``block.4``) to its number of iterations."""
    ends = list(accumulate(lengths))
    starts = [end - length for end, length in zip(ends, lengths, strict=True)]
    return {
        f"{loop}.{start}" if length == 1 else f"{loop}.{start}-{start + length - 1}": length
        for start, length in zip(starts, lengths, strict=True)
    }


def _with_loop_in_parts(graph: Graph, loop: str, parts: Mapping[str, int]) -> Graph:
    """Return the graph with one folded block for each part; each part reads the output of the part before."""
    enters, changed = graph.loop_carried_tensors.get(loop, ("", ""))
    names = list(parts)
    before = dict(zip(names[1:], names, strict=False))

    def inside(tensor: Tensor, part: str) -> Tensor:
        if tensor.name == enters and part in before:
            return replace(tensor, name=_replace_prefix(changed, loop, before[part]))
        return outside(tensor, part)

    def outside(tensor: Tensor, part: str) -> Tensor:
        return replace(tensor, name=_replace_prefix(tensor.name, loop, part))

    nodes: list[Node] = []
    for folded, members in groupby(graph.nodes, key=lambda node: bool(node.loops) and node.loops[0][0] == loop):
        if folded:
            copies = list(members)
            nodes += [_renamed(node, loop, part, parts[part], inside) for part in names for node in copies]
        else:
            nodes += [_renamed(node, loop, names[-1], 0, outside) for node in members]
    carried = {n: ends for n, ends in graph.loop_carried_tensors.items() if n != loop and not n.startswith(f"{loop}.")}
    around = {name: ends for name, ends in graph.loop_carried_tensors.items() if name not in carried}
    for part in names:
        entry = _replace_prefix(changed, loop, before[part]) if part in before else enters
        for name, (first, last) in around.items():
            start = entry if first == enters else _replace_prefix(first, loop, part)
            carried[_replace_prefix(name, loop, part)] = start, _replace_prefix(last, loop, part)
    return replace(graph, nodes=tuple(nodes), loop_carried_tensors=carried)


def _replace_prefix(name: str, loop: str, part: str) -> str:
    """Return a name with the prefix ``loop`` replaced by ``part``; other names are unchanged."""
    return part + name.removeprefix(loop) if name == loop or name.startswith(f"{loop}.") else name


def _renamed(node: Node, loop: str, part: str, times: int, renamed: Callable[[Tensor, str], Tensor]) -> Node:
    """Return the layer with its name, inputs and tensors renamed from the block ``loop`` to its ``part``."""

    def operation(original: Operation) -> Operation:
        changed: Operation = map_tensors(original, lambda tensor: renamed(tensor, part))
        return replace(changed, name=_replace_prefix(original.name, loop, part))  # type: ignore[type-var]

    repeats = tuple((_replace_prefix(name, loop, part), times if name == loop else count) for name, count in node.loops)
    return replace(
        node,
        name=_replace_prefix(node.name, loop, part),
        inputs=tuple(renamed(tensor, part) for tensor in node.inputs),
        operations=tuple(map(operation, node.operations)),
        out=renamed(node.out, part),
        loops=repeats,
    )
