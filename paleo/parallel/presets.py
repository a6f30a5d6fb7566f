"""Strategies as presets: each is a list of rules, nothing more. Communication follows from them (see
``propagation``)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from paleo.layers.base import ACTIVATIONS, LAYERS, Layer
from paleo.operations.base import MemoryPass
from paleo.parallel.placement import BATCH_AXES, PLACES, STRATEGIES, Axes, Placement, Rule, Split, Strategy

if TYPE_CHECKING:
    from paleo.network.graph import Graph, Node

_BATCH: dict[str, Axes] = {"batch": BATCH_AXES}
#: Layers that change no dim: they may keep whatever split their input has.
ELEMENTWISE = frozenset({*ACTIVATIONS, "dropout", "identity"})


@STRATEGIES.register("dp")
def _data_tensor_expert(graph: Graph, strategy: Strategy) -> Placement:
    """The batch over the data-parallel ranks; heads, feed-forward width and vocabulary, or whatever a layer names in
    ``tensor_dims``, over tp (Shoeybi et al., Megatron-LM, 2019); experts over ep; the sequence over cp, and over tp too
    between those layers where sequence parallelism is on (Korthikanti et al., 2022); images over spatial by their
    height (Dryden et al., IPDPS 2019)."""
    inside = _BATCH | {"seq": ("cp",)}
    between = _BATCH | {"seq": ("tp", "cp") if strategy.sequence_parallel else ("cp",), "height": ("spatial",)}
    rules = (
        Rule(between),
        *(
            Rule(
                inside | dict.fromkeys(LAYERS[name].token_dims, between["seq"]) | _model_split(LAYERS[name], strategy),
                layer=name,
            )
            for name in _divisible(graph)
        ),
    )
    placement = Placement(rules, strategy.context)
    return replace(placement, rules=(*rules, *_without_space(graph, placement, strategy.degrees.get("spatial", 1))))


def _divisible(graph: Graph) -> list[str]:
    """Types of layers in the graph that tensor or expert parallelism divides."""
    types = dict.fromkeys(node.type for node in graph.nodes if node.type in LAYERS)
    return [name for name in types if LAYERS[name].tensor_dims or LAYERS[name].expert_dims]


def _model_split(layer: type[Layer], strategy: Strategy) -> dict[str, Axes]:
    """The dims that a layer lets tensor and expert parallelism divide; tokens on their way to experts are shared out
    over the other ranks of the batch.

    Experts that are folded over tp take their tokens from a sequence divided over it, and stay whole themselves. Those
    whose tensors are split over tp take all tokens that its ranks have (``in_capacity``), be they sent by each rank for
    itself (``capacity``) or by all; those that all tokens visit take the whole sequence (``in_seq``).
    """
    tensor: dict[str, Axes] = dict.fromkeys(layer.tensor_dims or (), ("tp",))
    if not layer.expert_dims:
        return tensor
    axes = strategy.expert_axes
    experts = dict.fromkeys(layer.expert_dims, axes)
    tokens: dict[str, Axes] = {
        dim: tuple(axis for axis in (*BATCH_AXES, "cp", *(("tp",) * over_tp)) if axis not in axes)
        for dim, over_tp in zip(PLACES, (strategy.dispatches_own, strategy.experts_apart), strict=True)
    }
    tokens |= {"seq": ("tp", "cp")} if strategy.dispatches_own else {}
    shared: dict[str, Axes] = {"in_seq": ("cp",), **dict.fromkeys(layer.shared_dims, ("tp",))}
    return ({} if strategy.experts_apart else tensor) | experts | tokens | shared


def _without_space(graph: Graph, placement: Placement, ranks: int) -> Iterator[Rule]:
    """Behind the last image its ranks share out the samples instead. Where the first images have rows for all ranks,
    those with fewer are whole on each of them."""
    spatial = [node for node in graph.nodes if _has_space(node)] if ranks > 1 else []
    shared = any(_fewest_rows(node) >= ranks for node in spatial)
    if spatial:
        for node in graph.nodes:
            if not _has_space(node):
                yield Rule({**placement.of(node), "batch": ("spatial", *BATCH_AXES), "height": ()}, name=node.name)
            elif shared and _fewest_rows(node) < ranks:
                yield Rule({**placement.of(node), "height": ()}, name=node.name)


def _fewest_rows(node: Node) -> float:
    """Rows of the lowest image that a layer reads or makes; of one row there is nothing to divide."""
    images = [t.size("height") for t in (*node.inputs, node.out) if "height" in t.dims]
    return min(rows for rows in images if rows > 1)


def _has_space(node: Node) -> bool:
    """Whether a layer makes an image with a height, or sums one up."""
    inputs = [t.size("height") for t in node.inputs if "height" in t.dims]
    if any(isinstance(op, MemoryPass) and op.kind.reduces for op in node.operations):
        return max(inputs, default=1) > 1
    return max(inputs, default=1) > 1 and "height" in node.out.dims and node.out.size("height") > 1


@STRATEGIES.register("owt")
def _one_weird_trick(graph: Graph, strategy: Strategy) -> Placement:
    """Convolutions split the batch, fully connected layers their features, over the same ranks (Krizhevsky, 2014).

    What is element-wise after a fully connected layer follows its split; the loss goes back to the batch.
    """
    by_feature: Split = {"features": ("dp",)}
    split, followers = set[str](), []
    for node in graph.nodes:
        follows = node.type in ELEMENTWISE and node.inputs[0].name in split
        if node.type == "linear" or follows:
            split.add(node.out.name)
        if follows:
            followers.append(Rule(by_feature, name=node.name))
    return Placement((Rule(_BATCH), Rule(by_feature, layer="linear"), *followers))


@STRATEGIES.register("batch")
def _batch_only(graph: Graph, strategy: Strategy) -> Placement:
    """The batch over the data-parallel ranks, all other dims whole: the base of a placement stated in a run."""
    return Placement((Rule(_BATCH),))
