"""Double binary tree: two trees, each rank a leaf in one and inside in the other, share the payload in a pipeline."""

from __future__ import annotations

from paleo.collectives.base import Algorithm, active, add_algorithm, members_below, others, ranks_of, rounds
from paleo.collectives.traffic import Array, LevelTraffic, Traffic


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha log2 P + 2 beta S (P-1)/P + gamma S (P-1)/P, pieces small enough that filling the pipe is all latency.

    Both trees together have 2 (P-1) edges that carry S/2 up and S/2 down; the load is even but for the two roots.
    """
    share = others(ranks_of(group))
    return _both_trees(payload, group, share=share, ways=2.0, reduced=1.0)


def broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha log2 P + beta S."""
    return _both_trees(payload, group, share=active(ranks_of(group)), ways=1.0, reduced=0.0)


# What a rank combines at a level was shared among the ranks below it, so that all levels add up to S (P-1)/P.
def _both_trees(payload: Array, group: tuple[Array, ...], *, share: Array, ways: float, reduced: float) -> Traffic:
    return Traffic.of(
        *(
            LevelTraffic(
                steps=ways * rounds(fan_out),
                wire_bytes=ways * share * payload * active(fan_out),
                reduced_bytes=reduced * others(fan_out) * payload / inside,
            )
            for fan_out, inside in zip(group, members_below(group), strict=True)
        )
    )


DOUBLE_TREE = add_algorithm(
    Algorithm(
        name="double_tree",
        summary="two complementary binary trees in a pipeline; few steps and the least bytes",
        reference="Sanders, Speck and Traff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, "
        "Parallel Computing 35(12), 2009",
        formulas={"all_reduce": all_reduce, "broadcast": broadcast},
    )
)
