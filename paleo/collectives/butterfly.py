"""Butterfly collectives: in every round each rank exchanges with a partner twice as far away.

``butterfly`` is recursive doubling of whole buffers. ``rabenseifner`` is a reduce-scatter by recursive halving, then an
all-gather by recursive doubling.
"""

from __future__ import annotations

from paleo.collectives.base import (
    OPERATIONS,
    Algorithm,
    Array,
    LevelTraffic,
    Traffic,
    add_algorithm,
    members_below,
    one_level_at_a_time,
    outer_first,
    remote_share,
    rounds,
)


def _butterfly_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha log2 P + beta S log2 P + gamma S log2 P; without latency the original Paleo's ceil(log2 n) S / B.

    Every rank exchanges its whole buffer in every round, so a unit of m ranks sends m S a round.
    """
    return one_level_at_a_time(
        [
            LevelTraffic(rounds(fan_out), rounds(fan_out) * inside * payload, rounds(fan_out) * payload)
            for fan_out, inside in zip(group, members_below(group), strict=True)
        ]
    )


def _reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Recursive halving: alpha log2 P + beta S (P-1)/P + gamma S (P-1)/P.

    The inner level goes first. The level above has S over the ranks below it, and the ranks of a unit send together
    S (f-1)/f.
    """
    return one_level_at_a_time(
        [
            LevelTraffic(rounds(fan_out), remote_share(fan_out) * payload, remote_share(fan_out) * payload / inside)
            for fan_out, inside in zip(group, members_below(group), strict=True)
        ]
    )


def _all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Recursive doubling: alpha log2 P + beta S (P-1)/P, the outer level first."""
    return outer_first(
        one_level_at_a_time([LevelTraffic(rounds(fan_out), remote_share(fan_out) * payload) for fan_out in group])
    )


def _rabenseifner_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha log2 P + 2 beta S (P-1)/P + gamma S (P-1)/P."""
    return _reduce_scatter(payload, group) + _all_gather(payload, group)


def _rabenseifner_broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Scatter down a tree, then all-gather (van de Geijn): 2 alpha log2 P + 2 beta S (P-1)/P."""
    return _all_gather(payload, group) + _all_gather(payload, group)


add_algorithm(
    Algorithm(
        name="butterfly",
        summary="recursive doubling and halving; log2 P steps, no root",
        reference="Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, "
        "IJHPCA 19(1), 2005",
        formulas={"all_reduce": _butterfly_all_reduce, "reduce_scatter": _reduce_scatter, "all_gather": _all_gather},
        libraries={"textbook": OPERATIONS},
        distant=("all_reduce", "reduce_scatter", "all_gather"),
    )
)
add_algorithm(
    Algorithm(
        name="rabenseifner",
        summary="reduce-scatter + all-gather by halving and doubling; few steps and the least bytes, in turns",
        reference="Rabenseifner, Optimization of collective reduction operations, ICCS 2004",
        formulas={"all_reduce": _rabenseifner_all_reduce, "broadcast": _rabenseifner_broadcast},
        libraries={"textbook": OPERATIONS},
        distant=("all_reduce", "broadcast"),
    )
)
