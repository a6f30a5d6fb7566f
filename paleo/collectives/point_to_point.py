"""Messages from rank to rank: one message between two ranks, and exchanges of all ranks with all others.

``point_to_point`` is one message. ``pairwise`` is an all-to-all in which each rank sends every other rank its own
message. ``bruck`` bundles and forwards them, so that log2 P steps do at the price of more bytes.
"""

from __future__ import annotations

from paleo.collectives.base import (
    OPERATIONS,
    Algorithm,
    Array,
    LevelTraffic,
    Traffic,
    active,
    add_algorithm,
    members_below,
    one_level_at_a_time,
    ranks_of,
    rounds,
    units_above,
)


def _send_recv(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha + beta S over the outermost level that the group spans, through the ports of the one rank that sends."""
    crosses = [active(fan_out) * (above == 1) for fan_out, above in zip(group, units_above(group), strict=True)]
    return Traffic.of(*(LevelTraffic(cross, cross * payload, senders=1.0) for cross in crosses))


def _pairwise_all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha (P-1) + beta S (P-1)/P; a unit of m ranks sends m S (P-m)/P through its own ports."""
    ranks = ranks_of(group)
    return Traffic.of(
        *(
            LevelTraffic((fan_out - 1.0) * inside, inside * payload * (ranks - inside) / ranks * active(fan_out))
            for fan_out, inside in zip(group, members_below(group), strict=True)
        )
    )


def _bruck_all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha log2 P + beta (S/2) log2 P: in every round each rank forwards half of its buffer."""
    return one_level_at_a_time(
        [
            LevelTraffic(rounds(fan_out), 0.5 * rounds(fan_out) * inside * payload)
            for fan_out, inside in zip(group, members_below(group), strict=True)
        ]
    )


add_algorithm(
    Algorithm(
        name="point_to_point",
        summary="one message over the widest level between two ranks",
        reference="Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994",
        formulas={"send_recv": _send_recv},
        libraries={"textbook": OPERATIONS, "nccl": ("send_recv",)},
    )
)
add_algorithm(
    Algorithm(
        name="pairwise",
        summary="every rank sends to every other rank; the least bytes, P - 1 messages",
        reference="Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, "
        "IJHPCA 19(1), 2005",
        formulas={"all_to_all": _pairwise_all_to_all},
        libraries={"textbook": OPERATIONS, "nccl": ("all_to_all",)},
        distant=("all_to_all",),
    )
)
add_algorithm(
    Algorithm(
        name="bruck",
        summary="bundled all-to-all; log2 P steps, more bytes",
        reference="Bruck, Ho, Kipnis, Upfal and Weathersby, Efficient algorithms for all-to-all communications in "
        "multiport message-passing systems, IEEE TPDS 8(11), 1997",
        formulas={"all_to_all": _bruck_all_to_all},
        libraries={"textbook": OPERATIONS},
        distant=("all_to_all",),
    )
)
