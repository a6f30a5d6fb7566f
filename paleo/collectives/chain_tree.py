"""Chains inside a node, two complementary binary trees between nodes: what NCCL calls Tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.collectives import double_tree
from paleo.collectives.base import Algorithm, LevelTraffic, Traffic, add_algorithm, remote_share

if TYPE_CHECKING:
    from paleo.collectives.base import Array


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha (f-1) + 2 beta S (f-1)/f over the f ranks of a node, in a pipeline with the trees between nodes.

    Along a chain of f ranks S goes up and S comes down over f - 1 links; the channels' chains begin at different ranks,
    so that the load is even.
    """
    ranks = group[0]
    chain = LevelTraffic(2.0 * (ranks - 1.0), 2.0 * remote_share(ranks) * payload, remote_share(ranks) * payload)
    if len(group) == 1:
        return Traffic.of(chain)
    between = double_tree.all_reduce(payload, group).phases[0][1:]
    return Traffic.of(chain, *between)


CHAIN_TREE = add_algorithm(
    Algorithm(
        name="chain_tree",
        summary="a chain inside each node, two binary trees between nodes; few steps between nodes",
        reference="Jeaugey, Massively scale your deep learning training with NCCL 2.4, NVIDIA, 2019; NVIDIA/nccl "
        "src/graph/tuning.cc (steps of Tree)",
        formulas={"all_reduce": all_reduce},
        between_nodes=True,
        distant=("all_reduce",),
        libraries={"nccl": ("all_reduce",)},
    )
)
