"""Double binary tree: two trees, each rank a leaf in one and inside in the other, share the payload in a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.collectives.base import (
    Algorithm,
    LevelTraffic,
    Traffic,
    active,
    add_algorithm,
    members_below,
    remote_share,
    rounds,
)

if TYPE_CHECKING:
    from paleo.collectives.base import (
        Array,
    )


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha log2 P + 2 beta S (P-1)/P + gamma S (P-1)/P, pieces small enough that filling the pipe is all latency.

    At a level of fan-out f both trees together have 2 (f-1) edges that carry S/2 up and S/2 down: 2 S (f-1)/f of each
    unit in the mean (between N nodes 2 S (N-1)/N; `tree_imbalance` of the busiest). What a rank combines at a level was
    shared among the ranks below it, so that all levels add up to S (P-1)/P.
    """
    return Traffic.of(
        *(
            LevelTraffic(
                2.0 * rounds(fan_out), 2.0 * remote_share(fan_out) * payload, remote_share(fan_out) * payload / inside
            )
            for fan_out, inside in zip(group, members_below(group), strict=True)
        )
    )


def broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha log2 P + beta S."""
    return Traffic.of(*(LevelTraffic(rounds(fan_out), payload * active(fan_out)) for fan_out in group))


DOUBLE_TREE = add_algorithm(
    Algorithm(
        name="double_tree",
        summary="two complementary binary trees in a pipeline; few steps and the least bytes",
        reference="Sanders, Speck and Traff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, "
        "Parallel Computing 35(12), 2009",
        formulas={"all_reduce": all_reduce, "broadcast": broadcast},
        distant=("all_reduce", "broadcast"),
        libraries={},
    )
)
