"""Preset strategies: rules that split dims over mesh axes, from which `propagation` derives communication."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from paleo.layers.base import ACTIVATIONS, LAYERS, Layer
from paleo.operations.base import MemoryPass
from paleo.parallel.placement import (
    BATCH_AXES,
    EXPERT_TOKEN_DIMS,
    STRATEGY_PRESETS,
    Axes,
    Placement,
    PlacementRule,
    SplitAxes,
    Strategy,
)

if TYPE_CHECKING:
    from paleo.network.graph import Graph, Node

_BATCH: dict[str, Axes] = {"batch": BATCH_AXES}
#: Types of layers that change no dim, so that they can keep any split of their input.
_ELEMENTWISE_LAYERS = frozenset({*ACTIVATIONS, "dropout", "identity"})


@STRATEGY_PRESETS.register("dp")
def _data_tensor_expert(graph: Graph, strategy: Strategy) -> Placement:
    """Return the placement of Megatron-like data, tensor, sequence, context and expert parallelism.

    The batch is split over the data-parallel ranks. Heads, feed-forward width, vocabulary and other dims in a layer's
    ``tensor_parallel_dims`` are split over tp (Shoeybi et al., Megatron-LM, 2019), experts over ep, the sequence over
    cp. With sequence parallelism the sequence is also split over tp between tensor-parallel layers (Korthikanti et al.,
    2022). The height of images is split over spatial (Dryden et al., IPDPS 2019).
    """
    inside = _BATCH | {"seq": ("cp",)}
    between = _BATCH | {"seq": ("tp", "cp") if strategy.sequence_parallel else ("cp",), "height": ("spatial",)}
    rules = [PlacementRule(between)]
    for name in dict.fromkeys(node.type for node in graph.nodes if node.type in LAYERS):
        layer = LAYERS[name]
        if layer.tensor_parallel_dims or layer.expert_parallel_dims:
            sequence = dict.fromkeys(layer.sequence_parallel_dims, between["seq"])
            rules.append(PlacementRule(inside | sequence | _model_split(layer, strategy), layer_type=name))
    placement = Placement(tuple(rules), strategy.context_parallel_method)
    return replace(placement, rules=(*rules, *_without_space(graph, placement, strategy.degrees.get("spatial", 1))))


def _model_split(layer: type[Layer], strategy: Strategy) -> dict[str, Axes]:
    """Return the mesh axes that split each dim of a layer type under tensor and expert parallelism.

    Tokens in dispatch and combine are split over the batch axes that do not spread experts. Experts folded over tp take
    their tokens from a sequence split over tp, and are not split themselves. Experts split over tp process all tokens
    of a tp group (``in_capacity``), whether each rank sends its share of the tokens (``capacity``) or all of them.
    Shared experts process the whole sequence (``in_seq``).
    """
    tensor: dict[str, Axes] = dict.fromkeys(layer.tensor_parallel_dims or (), ("tp",))
    if not layer.expert_parallel_dims:
        return tensor
    axes = strategy.expert_axes
    experts = dict.fromkeys(layer.expert_parallel_dims, axes)
    tokens: dict[str, Axes] = {}
    over_tp = (strategy.dispatches_own_tokens, strategy.splits_expert_tokens)
    for dim, divided in zip(EXPERT_TOKEN_DIMS, over_tp, strict=True):
        tokens[dim] = tuple(axis for axis in (*BATCH_AXES, "cp", *(("tp",) * divided)) if axis not in axes)
    tokens |= {"seq": ("tp", "cp")} if strategy.dispatches_own_tokens else {}
    shared: dict[str, Axes] = {"in_seq": ("cp",), **dict.fromkeys(layer.shared_expert_dims, ("tp",))}
    return ({} if strategy.splits_expert_tokens else tensor) | experts | tokens | shared


def _without_space(graph: Graph, placement: Placement, ranks: int) -> Iterator[PlacementRule]:
    """Yield rules for layers without image rows, where the spatial ranks split the samples instead of the height.

    If some layers have at least one image row for each rank, smaller images are not split: each rank holds them whole.
    """
    spatial = [node for node in graph.nodes if _has_space(node)] if ranks > 1 else []
    shared = any(_fewest_rows(node) >= ranks for node in spatial)
    if spatial:
        for node in graph.nodes:
            whole = {**placement.split_axes_of(node), "height": ()}
            if not _has_space(node):
                yield PlacementRule({**whole, "batch": ("spatial", *BATCH_AXES)}, name_pattern=node.name)
            elif shared and _fewest_rows(node) < ranks:
                yield PlacementRule(whole, name_pattern=node.name)


def _fewest_rows(node: Node) -> float:
    """Return the height of the smallest image that a layer reads or writes, except images of one row."""
    images = [t.size("height") for t in (*node.inputs, node.out) if "height" in t.dims]
    return min(rows for rows in images if rows > 1)


def _has_space(node: Node) -> bool:
    """Return True if a layer writes an image of several rows, or reduces an image to one row."""
    inputs = [t.size("height") for t in node.inputs if "height" in t.dims]
    if any(isinstance(op, MemoryPass) and op.kind.reduces_dims for op in node.operations):
        return max(inputs, default=1) > 1
    return max(inputs, default=1) > 1 and "height" in node.out.dims and node.out.size("height") > 1


@STRATEGY_PRESETS.register("owt")
def _one_weird_trick(graph: Graph, strategy: Strategy) -> Placement:
    """Split convolutions by the batch and fully connected layers by features over the same ranks (Krizhevsky, 2014).

    Element-wise layers after a fully connected layer are split by features too; the loss is split by the batch again.
    """
    by_feature: SplitAxes = {"features": ("dp",)}
    split, followers = set[str](), []
    for node in graph.nodes:
        follows = node.type in _ELEMENTWISE_LAYERS and node.inputs[0].name in split
        if node.type == "linear" or follows:
            split.add(node.out.name)
        if follows:
            followers.append(PlacementRule(by_feature, name_pattern=node.name))
    return Placement((PlacementRule(_BATCH), PlacementRule(by_feature, layer_type="linear"), *followers))


@STRATEGY_PRESETS.register("batch")
def _batch_only(graph: Graph, strategy: Strategy) -> Placement:
    """Split only the batch over the data-parallel ranks, as a base for the ``placement`` entries of a run."""
    return Placement((PlacementRule(_BATCH),))
