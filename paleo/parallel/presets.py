"""Strategies as presets: each is a list of rules, nothing more. Communication follows from them (see
``propagation``)."""

from __future__ import annotations

from paleo.graph import Graph
from paleo.layers.base import ACTIVATIONS
from paleo.parallel.mesh import Axes
from paleo.parallel.placement import STRATEGIES, Placement, Rule, Split, Strategy

_BATCH: dict[str, Axes] = {"batch": ("ep", "dp")}
#: Layers that change no dim: they may keep whatever split their input has.
ELEMENTWISE = frozenset({*ACTIVATIONS, "dropout", "identity"})


@STRATEGIES.register("dp")
def data_tensor_expert(graph: Graph, strategy: Strategy) -> Placement:
    """The batch over the data-parallel ranks, heads, feed-forward width and vocabulary over tp (Shoeybi et al.,
    Megatron-LM, 2019), experts over ep, the sequence over cp, and over tp too between those layers where sequence
    parallelism is on (Korthikanti et al., 2022)."""
    inside = _BATCH | {"seq": ("cp",)}
    between = _BATCH | {"seq": ("tp", "cp") if strategy.sequence_parallel else ("cp",)}
    experts = {"experts": ("ep",), "capacity": ("dp", "cp"), "ffn": ("tp",)}
    return Placement(
        (
            Rule(between),
            Rule(inside | {"kv_heads": ("tp",)}, layer="attention"),
            Rule(inside | {"kv_heads": ("tp",)}, layer="latent_attention"),
            Rule(inside | {"ffn": ("tp",)}, layer="mlp"),
            Rule(inside | experts, layer="moe"),
            *(Rule(inside | {"vocab": ("tp",)}, layer=layer) for layer in ("embedding", "linear", "cross_entropy")),
        )
    )


@STRATEGIES.register("owt")
def one_weird_trick(graph: Graph, strategy: Strategy) -> Placement:
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
    return Placement((Rule({"batch": ("dp",)}), Rule(by_feature, layer="linear"), *followers))
