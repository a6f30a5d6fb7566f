"""Butterfly (recursive doubling): in every round each rank exchanges with a partner twice as far away."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.collectives.base import (
    Algorithm,
    LevelTraffic,
    add_algorithm,
    members_below,
    one_level_at_a_time,
    outer_first,
    remote_share,
    rounds,
)

if TYPE_CHECKING:
    from paleo.collectives.base import (
        Array,
        Traffic,
    )


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha log2 P + beta S log2 P + gamma S log2 P; without latency the original Paleo's ceil(log2 n) S / B.

    Every rank exchanges its whole buffer in every round, so a unit of m ranks sends m S a round.
    """
    return one_level_at_a_time(
        [
            LevelTraffic(rounds(fan_out), rounds(fan_out) * inside * payload, rounds(fan_out) * payload)
            for fan_out, inside in zip(group, members_below(group), strict=True)
        ]
    )


def reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Recursive halving: alpha log2 P + beta S (P-1)/P + gamma S (P-1)/P.

    The inner level goes first; what is left for the level above is S over the ranks below it, and the ranks of a unit
    send together S (f-1)/f.
    """
    return one_level_at_a_time(
        [
            LevelTraffic(rounds(fan_out), remote_share(fan_out) * payload, remote_share(fan_out) * payload / inside)
            for fan_out, inside in zip(group, members_below(group), strict=True)
        ]
    )


def all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Recursive doubling: alpha log2 P + beta S (P-1)/P, the outer level first."""
    return outer_first(
        one_level_at_a_time([LevelTraffic(rounds(fan_out), remote_share(fan_out) * payload) for fan_out in group])
    )


BUTTERFLY = add_algorithm(
    Algorithm(
        name="butterfly",
        summary="recursive doubling and halving; log2 P steps, no root",
        reference="Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, "
        "IJHPCA 19(1), 2005",
        formulas={"all_reduce": all_reduce, "reduce_scatter": reduce_scatter, "all_gather": all_gather},
        distant=("all_reduce", "reduce_scatter", "all_gather"),
        libraries={},
    )
)
