"""Strategies as presets: each is a list of rules, nothing more. Communication follows from them (see ``propagation``)."""

from __future__ import annotations

from paleo.graph import Graph
from paleo.layers.base import ACTIVATIONS
from paleo.parallel.placement import STRATEGIES, Placement, Rule

_BATCH = {"batch": ("dp",)}
#: Layers that change no dim: they may keep whatever split their input has.
ELEMENTWISE = frozenset({*ACTIVATIONS, "dropout", "identity"})


@STRATEGIES.register("dp")
def data_and_tensor(graph: Graph) -> Placement:
    """The batch over dp; heads, feed-forward width and vocabulary over tp (Shoeybi et al., Megatron-LM, 2019)."""
    heads = _BATCH | {"kv_heads": ("tp",)}
    return Placement(
        (
            Rule(_BATCH),
            Rule(heads, layer="attention"),
            Rule(heads, layer="latent_attention"),
            Rule(_BATCH | {"ffn": ("tp",)}, layer="mlp"),
            Rule(_BATCH | {"ffn": ("tp",)}, layer="moe"),
            Rule(_BATCH | {"vocab": ("tp",)}, layer="embedding"),
            Rule(_BATCH | {"vocab": ("tp",)}, layer="linear"),
            Rule(_BATCH | {"vocab": ("tp",)}, layer="cross_entropy"),
        )
    )


@STRATEGIES.register("owt")
def one_weird_trick(graph: Graph) -> Placement:
    """Convolutions split the batch, fully connected layers their features, over the same ranks (Krizhevsky, 2014).

    What is element-wise after a fully connected layer follows its split; the loss goes back to the batch.
    """
    by_feature = {"features": ("dp",)}
    split, followers = set[str](), []
    for node in graph.nodes:
        follows = node.type in ELEMENTWISE and node.inputs[0].name in split
        if node.type == "linear" or follows:
            split.add(node.out.name)
        if follows:
            followers.append(Rule(by_feature, name=node.name))
    return Placement((Rule(_BATCH), Rule(by_feature, layer="linear"), *followers))
