"""Collectives that a placement requires, derived by sharding propagation for every kind of parallelism.

Rule A: an operation that sums over a split dim leaves a partial sum. A partial sum needs an all-reduce, or a
reduce-scatter if its reader is split over the same axis. Rule B: if a tensor is split differently by its writer and its
reader, it needs an all-gather, an all-to-all, or a slice, which is free. Rule C: windows over a split dim exchange
halos with the neighbours, and attention over a split sequence sends its keys and values round a ring. The rules apply
to activations, to their gradients, and to gradients of parameters. Data parallelism's gradient all-reduce is rule A on
the weight gradient, which sums over the batch.

Some collectives are inside a layer: statistics of split rows, keys and values of a split sequence, tokens of experts on
several ranks, and halos of windows that slide over a split dim.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from paleo.errors import PlanError
from paleo.operations.base import MemoryPass, Operation, RecomputedFusedChain, is_attention_core
from paleo.operations.contraction import Contraction, FusedAttention, check_parallel_split, halo_rows
from paleo.operations.tensor import Tensor
from paleo.parallel.placement import (
    BATCH_AXES,
    EXPERT_TOKEN_DIMS,
    MERGED_DIM_INDEX,
    Axes,
    ContextParallelMethod,
    Mesh,
    Placement,
    SplitAxes,
    TensorLayout,
    joined_axis_name,
    layer_shard_key,
)

if TYPE_CHECKING:
    from paleo.network.graph import Graph, Node

PassDirection = Literal["forward", "backward"]
_PASS_DIRECTIONS: tuple[PassDirection, PassDirection] = ("forward", "backward")


@dataclass(frozen=True, slots=True)
class RequiredCollective:
    """Collective that sharding a layer requires: the operation, the tensor, the mesh axis and the phase.

    The payload is the size of ``tensor`` [byte], as nccl-tests defines it: the full buffer of the group; for an
    all-to-all the buffer of one rank; for a send the message to one neighbour. ``overlapped`` collectives run during
    computation that does not wait for them.
    """

    name: str
    operation: str
    axis: str
    tensor: Tensor
    phase: PassDirection
    overlapped: bool = False

    @property
    def carries_expert_tokens(self) -> bool:
        """True if the tensor holds tokens sorted by expert (the output of MoE dispatch)."""
        return any(dim in EXPERT_TOKEN_DIMS for dim in self.tensor.dims)

    @property
    def is_token_exchange(self) -> bool:
        """True if the collective dispatches tokens to the ranks of their experts, or combines their results."""
        return self.operation == "all_to_all" and self.carries_expert_tokens


# norms, softmax, losses


def _statistics_all_reduces(node: Node, split: SplitAxes, shards: Mapping[str, float]) -> Iterator[RequiredCollective]:
    """Yield the small all-reduces of statistics in layers that reduce over a split dim (softmax, loss, norms).

    A softmax or loss reduces its maximum, sum and target. A norm reduces its mean and variance, and in the backward
    pass the two sums of its gradient. Batch normalisation reduces over the ranks that share the samples of a replica.

    Parameters
    ----------
    node : Node
        Layer of the network.
    split : SplitAxes
        Mesh axes that split each dim of the layer.
    shards : dict of str to float
        Number of shards of each dim.

    Yields
    ------
    RequiredCollective
        All-reduce of the statistics in one phase.
    """
    for operation in node.operations:
        if not isinstance(operation, MemoryPass) or not operation.reduced_dims:
            continue
        local = {"batch"} if operation.has_per_replica_statistics else set()
        axes = {axis for dim in operation.reduced_dims if dim not in local for axis in split.get(dim, ())}
        for axis in sorted(axes):
            stacked = _exchanged_statistics(operation).shard(shards)
            yield RequiredCollective(operation.name, "all_reduce", axis, stacked, "forward")
            if operation.kind.is_norm:
                yield RequiredCollective(operation.name, "all_reduce", axis, stacked, "backward")


def _exchanged_statistics(operation: MemoryPass) -> Tensor:
    """Return a tensor with the size of the row statistics (such as mean and variance) that ranks all-reduce.

    A norm exchanges its saved statistics. Other operations exchange ``statistics_per_row`` numbers for each row of
    the input.
    """
    kept = [tensor for tensor in operation.saved if tensor.role == "statistic" and operation.kind.is_norm]
    row = kept[0] if kept else operation.inputs[0].without_dims(*operation.reduced_dims, name="row", role="statistic")
    sizes = (operation.kind.statistics_per_row, *row.sizes)
    return Tensor(f"{operation.name}.row", ("numbers", *row.dims), sizes, "statistic")


# context parallelism: attention over a split sequence


def _core_split(node: Node, split: SplitAxes, context: ContextParallelMethod) -> SplitAxes:
    """Return which axes split each dim in the core of a layer (attention scores, or the scan of a state-space layer).

    In the all-to-all form of attention, and in scans, heads or groups are split instead of the sequence.
    """
    axes, scan = split.get("seq", ()), _context_parallel_scan(node)
    if axes and scan is not None:
        group = scan.out.dims[_GROUPS]
        return {**split, "seq": (), group: (*split.get(group, ()), *axes)}
    if context == "ring" or not axes or not any(is_attention_core(operation) for operation in node.operations):
        return split
    return {**split, "seq": (), "kv_heads": (*split.get("kv_heads", ()), *axes)}


#: Layers whose scans take whole sequences of a part of their groups, exchanged by all-to-alls, and position of the
#: groups among the dims of a scan (Megatron-Core 0.16.1, ssm/mamba_context_parallel.py). Its delta nets have none.
_EXCHANGED, _GROUPS = ("mamba2",), 2


def _context_parallel_scan(node: Node) -> RecomputedFusedChain | None:
    """Return the scan of a state-space layer (Mamba) for which context parallelism splits groups, not the sequence.

    Parameters
    ----------
    node : Node
        Layer of the network.

    Returns
    -------
    RecomputedFusedChain, optional
        Scan operation; None for layers without such a scan.
    """
    scans = (operation for operation in node.operations if isinstance(operation, RecomputedFusedChain))
    return next(scans, None) if node.type in _EXCHANGED else None


def _in_core(node: Node, operation: Operation) -> bool:
    """Return True for an operation of the attention core, for a scan, and for the convolution before a scan."""
    scans = isinstance(operation, RecomputedFusedChain) or "mixed" in operation.out.dims
    return is_attention_core(operation) or (scans and _context_parallel_scan(node) is not None)


def _scan_exchange(node: Node, split: SplitAxes, shards: Mapping[str, float]) -> Iterator[RequiredCollective]:
    """Yield the all-to-alls by which a cp rank gets whole sequences of some groups for a scan, and sends results back.

    Gate, convolved inputs and step sizes are sent, and the output comes back. Gradients go the other way.
    """
    scan = _context_parallel_scan(node)
    if scan is None:
        return
    mixed = next(op.out for op in node.operations if "mixed" in op.out.dims)
    sent = [mixed, *(tensor for tensor in scan.inputs if tensor.dims[-1] == "heads" and tensor.role == "activation")]
    gate = next(tensor for op in node.operations for tensor in op.read_tensors if tensor.name.endswith(".gate"))
    for axis in split.get("seq", ()):
        for tensor in (*sent, gate, scan.out):
            for when in _PASS_DIRECTIONS:
                yield RequiredCollective(f"{node.name}.scan", "all_to_all", axis, tensor.shard(shards), when)


def _key_exchange(
    node: Node, split: SplitAxes, core: SplitAxes, shards: Mapping[str, float], mesh: Mesh
) -> Iterator[RequiredCollective]:
    """Yield the collectives of context parallelism, by which queries of a split sequence read all keys and values.

    Ring: keys and values go round, overlapped with the scores of a fused kernel. In the backward pass they go round
    again together with their gradients (Liu et al., Ring attention, 2023). Unfused attention all-gathers them first.
    All-to-all: query, key, value and output change from a split sequence to split heads and back (Jacobs et al.,
    DeepSpeed-Ulysses, 2023).
    """
    axes = split.get("seq", ())
    if not axes or _context_parallel_scan(node) is not None:
        return
    keys, queries_and_outputs = _keys_and_values(node), _queries_and_outputs(node)
    divided = {**shards, "keys": mesh.group_size(axes)}
    for axis in axes:
        if core is not split:
            for tensor in (*keys, *queries_and_outputs):
                for when in _PASS_DIRECTIONS:
                    yield RequiredCollective(f"{node.name}.core", "all_to_all", axis, tensor.shard(divided), when)
            continue
        for tensor in keys:
            name, whole, hidden = f"{node.name}.core", tensor.shard(shards), _has_fused_attention(node)
            yield RequiredCollective(name, "all_gather", axis, whole, "forward", overlapped=hidden)
            if hidden:
                yield RequiredCollective(name, "all_gather", axis, whole, "backward", overlapped=True)
            yield RequiredCollective(name, "reduce_scatter", axis, whole, "backward", overlapped=hidden)


def _ring_group_sizes(node: Node, split: SplitAxes, core: SplitAxes, mesh: Mesh) -> dict[str, int]:
    """Return the number of ring-attention ranks for each tensor of keys or values, by tensor name.

    Each rank saves only its shard of these tensors for the backward pass.
    """
    axes = split.get("seq", ())
    if not axes or core is not split or not _has_fused_attention(node):
        return {}
    return {tensor.name: mesh.group_size(axes) for tensor in _keys_and_values(node)}


def _has_fused_attention(node: Node) -> bool:
    return any(isinstance(operation, FusedAttention) for operation in node.operations)


def _core_tensors(node: Node) -> Iterator[tuple[Operation, Tensor]]:
    """Yield (operation, tensor) for each activation that the attention core reads from operations outside the core."""
    core = [operation for operation in node.operations if is_attention_core(operation)]
    inner = {operation.out.name for operation in core}
    for operation in core:
        for tensor in operation.read_tensors:
            if tensor.role == "activation" and tensor.name not in inner:
                yield operation, tensor


def _keys_and_values(node: Node) -> list[Tensor]:
    tensors = (tensor for _, tensor in _core_tensors(node))
    return list({each.name: each for each in tensors if "keys" in each.dims and "seq" not in each.dims}.values())


def _queries_and_outputs(node: Node) -> list[Tensor]:
    core = [operation for operation in node.operations if is_attention_core(operation)]
    queries = {tensor.name: tensor for _, tensor in _core_tensors(node) if "seq" in tensor.dims}
    return [*queries.values(), *(operation.out for operation in core[-1:])]


# experts


def _expert_all_to_alls(node: Node, split: SplitAxes, shards: Mapping[str, float]) -> Iterator[RequiredCollective]:
    """Yield the all-to-alls that dispatch tokens to experts and combine the results, forward and backward.

    Parameters
    ----------
    node : Node
        Layer of the network.
    split : SplitAxes
        Mesh axes that split each dim of the layer.
    shards : dict of str to float
        Number of shards of each dim.

    Yields
    ------
    RequiredCollective
        All-to-all of one direction in one phase.

    References
    ----------
    Lepikhin et al., GShard, 2020.
    """
    axis = joined_axis_name(split.get("experts", ()))
    for operation in node.operations if axis else ():
        if (tokens := dispatched_tokens(operation)) is not None:
            sent = tokens.shard(shards)
            yield from (RequiredCollective(operation.name, "all_to_all", axis, sent, when) for when in _PASS_DIRECTIONS)


def dispatched_tokens(operation: Operation) -> Tensor | None:
    """Return the tensor of tokens that an operation sends to experts or receives from them.

    Parameters
    ----------
    operation : Operation
        Operation of a mixture of experts.

    Returns
    -------
    Tensor, optional
        Tensor with a dim ``capacity``; None for other operations.
    """
    routes = isinstance(operation, MemoryPass) and operation.kind.routes_tokens
    return next((t for t in (*operation.read_tensors, operation.out) if "capacity" in t.dims), None) if routes else None


def experts_per_token(node: Node) -> tuple[int, int]:
    """Return the number of experts that each token visits (top-k), and the number of all experts.

    Parameters
    ----------
    node : Node
        Layer with experts.

    Returns
    -------
    tuple[int, int]
        Experts per token, and all experts.
    """
    dispatch = next(operation for operation in node.operations if dispatched_tokens(operation) is operation.out)
    tokens, experts = math.prod(dispatch.read_tensors[0].sizes[:-1]), dispatch.out.size("experts")
    return max(1, round(experts * dispatch.out.size("capacity") / tokens)), int(experts)


def deduplicated_dispatch_fraction(chosen: int, experts: int, targets: int) -> float:
    """Return the fraction of the dispatch volume that is left if a token is sent once per node, not once per expert.

    The nodes (or devices) hold equal numbers of experts. The fraction is the expected number of nodes that hold the
    chosen experts, drawn without replacement, divided by the number of chosen experts.

    Parameters
    ----------
    chosen : int
        Experts that a token visits (top-k).
    experts : int
        Number of all experts.
    targets : int
        Number of nodes or devices.

    Returns
    -------
    float
        Fraction, at most 1.

    Examples
    --------
    >>> [round(deduplicated_dispatch_fraction(*each), 3) for each in ((2, 8, 8), (8, 256, 8), (8, 256, 1))]
    [1.0, 0.662, 0.125]
    """
    elsewhere = experts - experts / targets
    missed = math.prod((elsewhere - drawn) / (experts - drawn) for drawn in range(min(chosen, experts)))
    return targets * (1.0 - max(missed, 0.0)) / chosen


# windows over a split dim


def _halo_exchange(
    node: Node, split: SplitAxes, shards: Mapping[str, float], mesh: Mesh
) -> Iterator[RequiredCollective]:
    """Yield the halo exchanges of convolutions whose image is split over ranks (rule C).

    A window at the edge of a rank's rows reads rows of the neighbours: of the input in the forward pass, of the
    output's gradient in the backward pass. With an odd kernel of K taps at stride 1 these are (K − 1)/2 rows from each
    side. Dims are exchanged one after another, so that the exchange of the second dim includes the corners (Dryden et
    al., IPDPS 2019).
    """
    for operation in node.operations:
        if isinstance(operation, Contraction | MemoryPass):
            source = operation.lhs if isinstance(operation, Contraction) else (*operation.inputs, operation.out)[0]
            for when, tensor in zip(_PASS_DIRECTIONS, (source, operation.out), strict=True):
                if operation.windows and (when == "forward" or source.needs_gradient):
                    local = tensor.shard(shards)
                    for window in operation.windows:
                        dim = window.input_dim if when == "forward" else window.output_dim
                        below, above = halo_rows(operation, window, when)
                        for axis in split.get(window.output_dim, ()):
                            ranks = mesh.degree(axis)
                            rows = (below, above) if ranks > 2 else (max(below, above),)
                            for count in filter(None, rows):
                                sent = _resized(local, dim, count)
                                yield RequiredCollective(operation.name, "send_recv", axis, sent, when)
                            local = _resized(local, dim, local.size(dim) + sum(rows))


def _resized(tensor: Tensor, dim: str, size: float) -> Tensor:
    sizes = tuple(size if d == dim else n for d, n in zip(tensor.dims, tensor.sizes, strict=True))
    return replace(tensor, sizes=sizes)


@dataclass(frozen=True, slots=True, eq=False)
class LocalLayer:
    """One rank's share of a layer: operations with local shapes, and collectives.

    ``parameters`` are local tensors, each with the axes over which its gradient is summed. ``gather_group_sizes`` maps
    all-gathered inputs to the size of the gathering group. A rank saves only its shard of such an input and gathers the
    input again in the backward pass. Layers with an equal ``operations_key`` have equal ``operations``.
    """

    node: Node
    operations: tuple[Operation, ...]
    communications: tuple[RequiredCollective, ...]
    parameters: tuple[tuple[Tensor, Axes], ...]
    gather_group_sizes: Mapping[str, int]
    operations_key: Hashable


def propagate_placement(
    graph: Graph, placement: Placement, mesh: Mesh, layers: int | None = None
) -> tuple[LocalLayer, ...]:
    """Propagate a placement through the network: return one rank's share of every layer, with the required collectives.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    placement : Placement
        Mesh axes that split the dims of every layer.
    mesh : Mesh
        Number of ranks along each mesh axis.
    layers : int, optional
        Number of layers to process, from the input on; all by default.

    Returns
    -------
    tuple of LocalLayer
        Shares of the layers in topological order.

    Raises
    ------
    PlanError
        If a dim does not divide into the required number of shards.
    """
    key = "placed", placement, mesh.degrees, layers
    return graph.cached_result(key, lambda: _propagated(graph, placement, mesh, graph.nodes[:layers]))


def _propagated(graph: Graph, placement: Placement, mesh: Mesh, nodes: Sequence[Node]) -> tuple[LocalLayer, ...]:
    layouts = {name: TensorLayout(tuple(_batch_axes(dim, mesh) for dim in t.dims)) for name, t in graph.inputs.items()}
    known: dict[Hashable, tuple[LocalLayer, dict[str, TensorLayout]]]
    known = graph.cached_result("layers", dict, any_batch=True)
    shares: dict[Hashable, tuple[Operation, ...]] = graph.cached_result("shares of operations", dict, any_batch=True)
    batch_axes, placed, joins = _batch_axes("batch", mesh), list[LocalLayer](), list[int]()
    for node in nodes:
        split = _active_split(node, placement, mesh)
        share = layer_shard_key(graph, node, split, layouts, mesh, batch_axes)
        key = share, placement.context_parallel_method, placement.expert_load_imbalance
        if len(_partial_terms(node, layouts)) > 1:
            joins.append(len(placed))
        if key not in known:
            _check_division(graph, node, split, placement, mesh)
            layer = _place(node, split, share.layer_id, placement, mesh, layouts, shares)
            current = {tensor.name: layouts[tensor.name] for tensor in (*node.inputs, node.out)}
            known[key] = layer, current
        placed.append(known[key][0])
        layouts.update(known[key][1])
    return _without_repeats(placed, joins)


def _partial_terms(node: Node, layouts: Mapping[str, TensorLayout]) -> list[str]:
    """Return the inputs of an addition that are partial sums over the same axes, to be added before reduction."""
    terms = [each.name for each in dict.fromkeys(node.inputs if node.type == "add" else ())]
    terms = [name for name in terms if layouts[name].partial_sum_axes]
    return terms if len({layouts[name].partial_sum_axes for name in terms}) == 1 else []


def _without_repeats(placed: list[LocalLayer], joins: list[int]) -> tuple[LocalLayer, ...]:
    """Remove collectives that parallel branches with a common input would repeat.

    Some networks (PaLM, Falcon) have parallel branches whose partial sums are added before their reduction. The common
    input is gathered once, and the sum of its gradients is reduced once.

    Parameters
    ----------
    placed : list of LocalLayer
        Shares of the layers in topological order.
    joins : list of int
        Indices of the layers that add such partial sums.

    Returns
    -------
    tuple of LocalLayer
        Shares without the repeated collectives.
    """
    readers: dict[str, list[int]] = {}
    for index, layer in enumerate(placed if joins else ()):
        for tensor in layer.node.inputs:
            readers.setdefault(tensor.name, []).append(index)
    for join in joins:
        start = next((i + 1 for i in range(join - 1, -1, -1) if placed[i].node.type == "add"), 0)
        seen = set[Hashable]()
        for index in range(start, join):
            owed = [(_transfer_key(each, readers, start, join), each) for each in placed[index].communications]
            once = tuple([each for key, each in owed if key is None or key not in seen])
            seen.update(key for key, _ in owed)
            placed[index] = replace(placed[index], communications=once)
    return tuple(placed)


def _transfer_key(each: RequiredCollective, readers: Mapping[str, list[int]], start: int, end: int) -> Hashable:
    """Return a key that is equal for repeated transfers of a layer input, or None for other communication.

    Also returns None unless all readers of the input have indices in [start, end).
    """
    between = all(start <= index < end for index in readers.get(each.tensor.name, (-1,)))
    arrives = "<" in each.name or ">" in each.name
    return (each.operation, each.axis, each.phase, each.overlapped, each.tensor) if between and arrives else None


def check_divisibility(graph: Graph, placement: Placement, mesh: Mesh) -> None:
    """Raise PlanError unless the dims of all layers divide into the shards of a placement.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    placement : Placement
        Mesh axes that split the dims of every layer.
    mesh : Mesh
        Number of ranks along each mesh axis.

    Raises
    ------
    PlanError
        If a dim does not divide into the required number of shards.
    """
    key = "division", placement, mesh.degrees
    problem = graph.cached_result(key, lambda: _division_problem(graph, placement, mesh))
    if problem:
        raise PlanError(problem)


def _division_problem(graph: Graph, placement: Placement, mesh: Mesh) -> str:
    """Return the error message for the first dim that does not divide as the placement requires; "" if all divide."""
    try:
        for node in graph.nodes:
            _check_division(graph, node, _active_split(node, placement, mesh), placement, mesh)
    except PlanError as error:
        return str(error)
    return ""


def _check_division(graph: Graph, node: Node, split: SplitAxes, placement: Placement, mesh: Mesh) -> None:
    """Raise PlanError unless the dims of a layer divide as required; equal splits are checked once for all batches."""
    core = _shards(_core_split(node, split, placement.context_parallel_method), mesh)
    shards = _shards(split, mesh)
    key = "divided", node.name, *(frozenset(each.items() - {("batch", each.get("batch"))}) for each in (shards, core))
    graph.cached_result(key, lambda: check_parallel_split(node.name, node.operations, shards, core), any_batch=True)


def _batch_axes(dim: str, mesh: Mesh) -> Axes:
    axes = {"batch": BATCH_AXES, "seq": ("cp",), "height": ("spatial",)}.get(dim, ())
    return tuple(axis for axis in axes if mesh.degree(axis) > 1)


def _active_split(node: Node, placement: Placement, mesh: Mesh) -> SplitAxes:
    """Return the split of a layer without axes of degree 1; a window's input dim is split like its output dim."""
    stated = placement.split_axes_of(node).items()
    used = {dim: tuple(axis for axis in axes if mesh.degree(axis) > 1) for dim, axes in stated}
    windows = (w for op in node.operations if isinstance(op, Contraction | MemoryPass) for w in op.windows)
    used |= {window.input_dim: used.get(window.output_dim, ()) for window in windows}
    return {dim: axes for dim, axes in used.items() if axes}


def _shards(split: SplitAxes, mesh: Mesh) -> dict[str, float]:
    return {dim: mesh.group_size(axes) for dim, axes in split.items() if axes}


def _place(
    node: Node,
    split: SplitAxes,
    layer: Hashable,
    placement: Placement,
    mesh: Mesh,
    layouts: dict[str, TensorLayout],
    shares: dict[Hashable, tuple[Operation, ...]],
) -> LocalLayer:
    core = _core_split(node, split, placement.context_parallel_method)
    shards, core_shards = _shards(split, mesh), _shards(core, mesh)
    uneven = dict.fromkeys(EXPERT_TOKEN_DIMS, 1 / placement.expert_load_imbalance) if split.get("experts") else {}
    shards |= {dim: shards.get(dim, 1) / placement.expert_load_imbalance for dim in uneven}
    moves = _LayoutChanges(split, mesh, _current_tensors(node, split, layouts), uneven)
    owed, inner = list[RequiredCollective](), list[RequiredCollective]()
    sums = _gradient_sums(node, split, shards, moves, owed)
    terms, inputs = _partial_terms(node, layouts), dict.fromkeys(node.inputs)
    passed = layouts[terms[0]].partial_sum_axes if len(terms) == len(inputs) > 1 else frozenset[str]()
    for tensor in inputs:
        transfers = list(_input_collectives(node, tensor, moves, sums, layouts, passed))
        owed += [] if tensor.name in terms[1:] else transfers
    partial = passed | _inner_sums(node, split, shards, moves, inner)
    gathers = [*filter(_gathers, owed)]
    gathers += [each for each in filter(_gathers, inner) if moves._saved_after_change(node, each.tensor)]
    gathered = {gather.tensor.name: mesh.degree(gather.axis) for gather in gathers}
    kept = {tensor.name for operation in node.operations for tensor in operation.saved_tensors}
    again = (each for each in filter(_gathers, [*owed, *inner]) if each.tensor.name in kept)
    owed += [replace(each, name=f"{each.name}{_REGATHER_SUFFIX}", phase="backward", overlapped=True) for each in again]
    owed += (
        *inner,
        *_statistics_all_reduces(node, split, shards),
        *_key_exchange(node, split, core, shards, mesh),
        *_scan_exchange(node, split, shards),
        *_expert_all_to_alls(node, split, shards),
        *_halo_exchange(node, split, shards, mesh),
    )
    # Record the layout of the output. A view, or a layer that returns its input, keeps the input's layout.
    written = next((op.out for op in reversed(node.operations) if op.out.name == node.out.name), None)
    if written is not None or node.out.name not in layouts:
        dims = node.out.dims if written is None else written.dims
        axes_by_dim = tuple(split.get(d, ()) if d in dims else () for d in node.out.dims)
        layouts[node.out.name] = TensorLayout(axes_by_dim, partial)
    gathered |= _ring_group_sizes(node, split, core, mesh)
    parameters = tuple(_parameters(node, split, shards))
    local = layer, *(tuple([pair for pair in each.items() if pair[0] != "batch"]) for each in (shards, core_shards))
    if local not in shares:
        shares[local] = tuple([op.shard(core_shards if _in_core(node, op) else shards) for op in node.operations])
    return LocalLayer(node, shares[local], tuple(owed), parameters, gathered, local)


def _axes(tensor: Tensor, split: SplitAxes) -> tuple[Axes, ...]:
    return tuple([split.get(dim, ()) for dim in tensor.dims])


def _current_tensors(node: Node, split: SplitAxes, layouts: Mapping[str, TensorLayout]) -> dict[str, Tensor]:
    """Return the tensors of a layer by name, with the dim names of their layout before an operation reads them.

    A tensor written in the layer has the dim names of its writer. An input has those of the first operation whose split
    equals the layout of the input, or else those of the first reader.
    """
    current = {operation.out.name: operation.out for operation in node.operations}
    readings: dict[str, list[Tensor]] = {tensor.name: [] for tensor in node.inputs}
    for operation in node.operations:
        for tensor in operation.read_tensors:
            if tensor.name in readings:
                readings[tensor.name].append(tensor)
    for name, reads in readings.items():
        as_it_comes = (read for read in reads if _axes(read, split) == layouts[name].axes_by_dim)
        current |= {name: next(as_it_comes, reads[0])} if reads else {}
    return current


class _LayoutChanges(NamedTuple):
    """Layout changes of tensors inside a layer, between operations with different dim names or splits (rule B).

    ``current_layouts`` has each tensor with the dim names of its present layout. If an operation's dim names are split
    differently, the tensor changes its layout before the operation, and the gradient changes back.
    ``mean_over_largest`` is the mean size of a dim over ranks relative to the largest.
    """

    split: SplitAxes
    mesh: Mesh
    current_layouts: Mapping[str, Tensor]
    mean_over_largest: Mapping[str, float]

    def changed_tensors(self, operation: Operation) -> tuple[Tensor, ...]:
        """Return the tensors whose layout must change before an operation can read them.

        The attention core has separate rules (context parallelism).

        Parameters
        ----------
        operation : Operation
            Operation that reads the tensors.

        Returns
        -------
        tuple of Tensor
            Tensors as the operation reads them; empty for the core of attention.
        """
        return () if is_attention_core(operation) else tuple(filter(self._needs_layout_change, operation.read_tensors))

    def _needs_layout_change(self, tensor: Tensor) -> bool:
        """Return True if a tensor's present layout differs from the layout in which an operation reads the tensor.

        Parameters
        ----------
        tensor : Tensor
            Tensor with the dim names by which an operation reads it.

        Returns
        -------
        bool
            Always False for a parameter.
        """
        lies = self.current_layouts.get(tensor.name)
        if lies is None or lies is tensor or len(lies.dims) != len(tensor.dims):
            return False
        return lies.sizes != tensor.sizes or _axes(lies, self.split) != _axes(tensor, self.split)

    def forward(self, operation: Operation, tensor: Tensor, partial: frozenset[str]) -> Iterator[RequiredCollective]:
        """Return the collectives that bring a tensor to the layout in which an operation reads it, in the forward pass.

        A matrix product gathers its operand, and gathers again if recomputed. For a memory pass the writer's output is
        gathered once.

        Parameters
        ----------
        operation : Operation
            Operation that reads the tensor.
        tensor : Tensor
            Tensor with the dim names by which the operation reads it.
        partial : frozenset of str
            Mesh axes over which the tensor is still a partial sum.

        Yields
        ------
        RequiredCollective
            Collective of the forward pass.
        """
        name = operation.name if isinstance(operation, Contraction) else tensor.name
        have = TensorLayout(_axes(self.current_layouts[tensor.name], self.split), partial)
        want, moved = TensorLayout(_axes(tensor, self.split)), tensor.shard(self.mean_over_largest)
        return _layout_collectives(name, moved, have, want, self.mesh, "forward")

    def backward(self, operation: Operation, tensor: Tensor, partial: frozenset[str]) -> Iterator[RequiredCollective]:
        """Return the collectives that bring a tensor's gradient to the layout of the tensor's writer (backward pass).

        Parameters
        ----------
        operation : Operation
            Operation that reads the tensor.
        tensor : Tensor
            Tensor with the dim names by which the operation reads it.
        partial : frozenset of str
            Mesh axes over which the gradient is still a partial sum.

        Yields
        ------
        RequiredCollective
            Collective of the backward pass.
        """
        have = TensorLayout(_axes(tensor, self.split), partial)
        want = TensorLayout(_axes(self.current_layouts[tensor.name], self.split))
        name, moved = f"{operation.name}>{tensor.name}", tensor.shard(self.mean_over_largest)
        return _layout_collectives(name, moved, have, want, self.mesh, "backward")

    def _saved_after_change(self, node: Node, tensor: Tensor) -> bool:
        """Return True if a tensor is saved for the backward pass after its layout has changed, not before."""
        saved = (kept for operation in node.operations for kept in operation.saved_tensors)
        kept = next((each for each in saved if each.name == tensor.name), None)
        return kept is not None and self._needs_layout_change(kept)


def _gathers(communication: RequiredCollective) -> bool:
    """Return True for a forward all-gather whose shards a rank saves instead of the result, except expert tokens."""
    is_gather = communication.phase == "forward" and communication.operation == "all_gather"
    return is_gather and not communication.carries_expert_tokens


def _partial_sum_axes(target: Tensor, operation: Operation, split: SplitAxes) -> frozenset[str]:
    """Return the mesh axes over which ``target`` (an output or gradient) is a partial sum after an operation (rule A).

    These axes split dims that the operation sums over. The gradient of an input that is broadcast along a dim (size 1)
    is summed over this dim, too. Operations that only move data sum nothing.
    """
    if isinstance(operation, MemoryPass) and operation.kind.only_moves_data and not operation.table_rows_per_output:
        return frozenset()
    gone = [dim for dim in split if dim not in target.dims or target.size(dim) == 1]
    if not gone:
        return frozenset()
    tensors, private = (*operation.read_tensors, operation.out), operation.independent_dims
    # a target of size 1 along a dim is a sum only if another tensor has more than one entry there
    summed = (
        dim
        for dim in gone
        if dim not in private and any(dim in t.dims and (dim not in target.dims or t.size(dim) > 1) for t in tensors)
    )
    return frozenset(axis for dim in summed for axis in split[dim])


def _linear(operation: Operation) -> bool:
    """Return True if an operation commutes with addition, so that partial sums can pass through it unreduced."""
    if isinstance(operation, MemoryPass):
        return operation.commutes_with_addition or operation.kind.only_moves_data or operation.backward_rule == "free"
    return not isinstance(operation, FusedAttention)


def _inner_sums(
    node: Node, split: SplitAxes, shards: Mapping[str, float], moves: _LayoutChanges, owed: list[RequiredCollective]
) -> frozenset[str]:
    """Append to ``owed`` the all-reduces of partial sums inside a layer, in the forward pass.

    Returns the axes over which the layer's output is still a partial sum. A partial sum is reduced before an operation
    that does not commute with addition, and when the layout of its tensor changes.
    """
    partial: dict[str, frozenset[str]] = {}
    for operation in node.operations:
        for tensor in moves.changed_tensors(operation):
            owed += moves.forward(operation, tensor, partial.pop(tensor.name, frozenset()))
        arriving = frozenset[str]().union(*(partial.get(t.name, frozenset()) for t in operation.read_tensors))
        if arriving and not _linear(operation):
            for tensor in (t for t in operation.read_tensors if partial.get(t.name)):
                for axis in sorted(partial.pop(tensor.name)):
                    owed.append(RequiredCollective(operation.name, "all_reduce", axis, tensor.shard(shards), "forward"))
            arriving = frozenset()
        partial[operation.out.name] = arriving | _partial_sum_axes(operation.out, operation, split)
    return partial.get(node.out.name, frozenset())


def _gradient_sums(
    node: Node, split: SplitAxes, shards: Mapping[str, float], moves: _LayoutChanges, owed: list[RequiredCollective]
) -> dict[str, frozenset[str]]:
    """Append to ``owed`` the all-reduces of partial gradients inside a layer, in the backward pass.

    Returns, by tensor name, the axes over which the gradient of each tensor is still a partial sum.
    """
    partial: dict[str, frozenset[str]] = {}
    for operation in reversed(node.operations):
        moved = moves.changed_tensors(operation)
        leaving = partial.get(operation.out.name, frozenset())
        if leaving and not (isinstance(operation, MemoryPass) and _linear(operation)):
            name, out, axes = operation.name, operation.out.shard(shards), sorted(partial.pop(operation.out.name))
            owed += [RequiredCollective(name, "all_reduce", axis, out, "backward") for axis in axes]
            leaving = frozenset()
        for tensor in operation.read_tensors:
            if tensor.needs_gradient and tensor.role != "parameter":
                sums = leaving | _partial_sum_axes(tensor, operation, split)
                if tensor in moved:
                    owed += moves.backward(operation, tensor, sums)
                    continue
                scattered = split.get("seq", ()) if is_attention_core(operation) else ()  # by the exchange of keys
                partial[tensor.name] = (partial.get(tensor.name, frozenset()) | sums) - set(scattered)
    return partial


def _input_collectives(
    node: Node,
    tensor: Tensor,
    moves: _LayoutChanges,
    sums: Mapping[str, frozenset[str]],
    layouts: dict[str, TensorLayout],
    passed: frozenset[str],
) -> Iterator[RequiredCollective]:
    """Yield the collectives that change the layout of one layer input (rule B), and of its gradient.

    Partial sums over the ``passed`` axes are not reduced. A layer may sum over a dim that has the name of an output
    dim, or split a dim differently in some operations. Such a dim is called ``in_<dim>`` inside the layer.
    """
    have = replace(layouts[tensor.name], partial_sum_axes=layouts[tensor.name].partial_sum_axes - passed)
    if len(have.axes_by_dim) != len(tensor.dims):  # a view: the batch stays first, other dims are merged
        hidden = frozenset(axis for axes in have.axes_by_dim[1:] for axis in axes)
        have = TensorLayout((have.axes_by_dim[0],) + ((),) * (len(tensor.dims) - 1), have.partial_sum_axes, hidden)
    read, split, mesh = moves.current_layouts.get(tensor.name, tensor), moves.split, moves.mesh
    names = [dim if dim in read.dims else f"in_{dim}" for dim in tensor.dims]
    spread = _broadcast_dims(node, names) if min(tensor.sizes, default=1) <= 1 else frozenset()
    pairs = zip(names, tensor.sizes, strict=True)
    want = TensorLayout(tuple(split.get(dim, ()) if size > 1 or dim not in spread else () for dim, size in pairs))
    yield from _layout_collectives(f"{node.name}<{tensor.name}", tensor, have, want, mesh, "forward")
    if have.partial_sum_axes:
        layouts[tensor.name] = want
    if tensor.needs_gradient:
        back = TensorLayout(want.axes_by_dim, sums.get(tensor.name, frozenset()))
        target = TensorLayout(have.axes_by_dim, merged_axes=have.merged_axes)
        yield from _layout_collectives(f"{node.name}>{tensor.name}", tensor, back, target, mesh, "backward")


def _broadcast_dims(node: Node, dims: Iterable[str]) -> frozenset[str]:
    """Return those of ``dims`` along which a layer input of size 1 would be broadcast."""
    tensors = [tensor for op in node.operations for tensor in (*op.read_tensors, op.out)]
    return frozenset(dim for dim in dims if any(dim in t.dims and t.size(dim) > 1 for t in tensors))


def _layout_collectives(
    name: str, tensor: Tensor, have: TensorLayout, want: TensorLayout, mesh: Mesh, when: PassDirection
) -> Iterator[RequiredCollective]:
    """Yield the collectives that change a tensor's layout from ``have`` to ``want``, one mesh axis after another.

    Taking a slice of a dim that was not split is free.
    """
    if have.axes_by_dim == want.axes_by_dim and not have.partial_sum_axes and not have.merged_axes:
        return
    for axis in (axis for axis, degree in mesh.degrees if degree > 1):
        before, after = have.dim_index(axis), want.dim_index(axis)
        if axis not in have.partial_sum_axes and (before is None or before == after):
            continue
        if axis in have.partial_sum_axes:
            operation = "all_reduce" if after is None else "reduce_scatter"
        else:
            operation = "all_gather" if after is None else "all_to_all"
        shares = {
            d: mesh.group_size(tuple(a for a in axes if a != axis))
            for d, axes in zip(tensor.dims, want.axes_by_dim, strict=True)
        }
        if operation == "all_to_all" and before is not None and after is not None:
            place, lies = (after, want) if after != MERGED_DIM_INDEX else (before, have)
            shares[tensor.dims[place]] = mesh.group_size(lies.axes_by_dim[place])
        yield RequiredCollective(name, operation, axis, tensor.shard(shares), when)


def without_regather(placed: LocalLayer) -> LocalLayer:
    """Return a layer's share changed to save gathered inputs instead of gathering them again in the backward pass.

    Parameters
    ----------
    placed : LocalLayer
        One rank's share of a layer.

    Returns
    -------
    LocalLayer
        Copy without the all-gathers of the backward pass.
    """
    owed = tuple(each for each in placed.communications if not each.name.endswith(_REGATHER_SUFFIX))
    again = {each.tensor.name for each in placed.communications if each.name.endswith(_REGATHER_SUFFIX)}
    again |= {tensor.name for tensor in placed.node.inputs}
    ring = {name: ranks for name, ranks in placed.gather_group_sizes.items() if name not in again}
    return replace(placed, communications=owed, gather_group_sizes=ring)


#: Suffix of the name of a gather that the backward pass repeats.
_REGATHER_SUFFIX = ".again"


def _parameters(node: Node, split: SplitAxes, shards: Mapping[str, float]) -> Iterable[tuple[Tensor, Axes]]:
    """Return one rank's shards of a layer's parameters, with the axes over which their gradients are summed (rule A).

    These are the axes that split dims of the operation which the parameter lacks.
    """
    axes_of: dict[str, set[str]] = {}
    tensors: dict[str, Tensor] = {}
    for operation in node.operations:
        for parameter in (t for t in operation.read_tensors if t.role == "parameter"):
            added = isinstance(operation, Contraction) and operation.bias is parameter
            sources = (operation.out,) if added else (*operation.read_tensors, operation.out)
            dims = {dim for t in sources for dim in t.dims} - set(parameter.dims)
            axes_of.setdefault(parameter.name, set()).update(axis for dim in dims for axis in split.get(dim, ()))
            tensors[parameter.name] = parameter.shard(shards)
    return [(tensor, tuple(sorted(axes_of[name]))) for name, tensor in tensors.items()]
