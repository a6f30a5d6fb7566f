"""Collectives through servers or a root: workers push gradients and pull the result.

``parameter_server`` has one server, ``sharded_parameter_server`` one beside every worker. In ``one_to_all`` a root
gathers every buffer, combines them, and sends the result to each rank in turn.
"""

from __future__ import annotations

import numpy as np

from paleo.collectives.base import (
    OPERATIONS,
    Algorithm,
    Array,
    LevelTraffic,
    Numeric,
    Traffic,
    active,
    add_algorithm,
    members_below,
    ranks_of,
)


def _parameter_server_all_reduce(payload: Array, group: tuple[Array, ...], *, servers: Numeric) -> Traffic:
    """2 alpha + 2 beta P S/s: what the port of one of ``servers`` servers (1..P, spread evenly) takes in and gives out.

    All P workers talk to a server over its innermost port; over an outer level only those of other units do. The
    arrival of P messages is not charged P latencies (they overlap), as in the literature.
    """
    ranks = ranks_of(group)
    levels = []
    for fan_out, inside in zip(group, members_below(group), strict=True):
        senders = np.where(inside == 1, ranks, ranks - inside)
        servers_inside = np.maximum(1.0, servers * inside / ranks)
        busy = active(fan_out)
        levels.append(LevelTraffic(2.0 * busy, 2.0 * senders * servers_inside / servers * payload * busy))
    levels[0] = LevelTraffic(levels[0].steps, levels[0].wire_bytes, ranks * payload / servers * active(ranks))
    return Traffic.of(*levels)


def _central_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """One server: 2 alpha + 2 beta P S."""
    return _parameter_server_all_reduce(payload, group, servers=1.0)


def _sharded_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a server on every worker's node (s = P): 2 alpha + 2 beta S."""
    return _parameter_server_all_reduce(payload, group, servers=ranks_of(group))


def _root_sends(payload: Array, group: tuple[Array, ...], *, times: float, reduced: float) -> Traffic:
    ranks = ranks_of(group)
    return Traffic.of(
        *(
            LevelTraffic(
                steps=times * (fan_out - 1.0) * inside,
                wire_bytes=times * (ranks - inside) * payload * active(fan_out),
                reduced_bytes=reduced * (fan_out - 1.0) * inside * payload,
            )
            for fan_out, inside in zip(group, members_below(group), strict=True)
        )
    )


def _one_to_all_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha (P-1) + 2 beta S (P-1) + gamma S (P-1); without latency the original Paleo's 2 (n-1) S / B."""
    return _root_sends(payload, group, times=2.0, reduced=1.0)


def _one_to_all_broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha (P-1) + beta S (P-1)."""
    return _root_sends(payload, group, times=1.0, reduced=0.0)


_REFERENCE = "Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014"
add_algorithm(
    Algorithm(
        name="parameter_server",
        summary="one server takes every gradient and answers every worker",
        reference=_REFERENCE,
        formulas={"all_reduce": _central_all_reduce},
        one_port=False,
        distant=("all_reduce",),
    )
)
add_algorithm(
    Algorithm(
        name="sharded_parameter_server",
        summary="each worker is also the server of 1/P of the parameters",
        reference=_REFERENCE,
        formulas={"all_reduce": _sharded_all_reduce},
        one_port=False,
        distant=("all_reduce",),
    )
)
add_algorithm(
    Algorithm(
        name="one_to_all",
        summary="a root receives from each rank in turn and answers each in turn",
        reference="Qi, Sparks and Talwalkar, Paleo, ICLR 2017 (OneToAll)",
        formulas={"all_reduce": _one_to_all_all_reduce, "broadcast": _one_to_all_broadcast},
        libraries={"textbook": OPERATIONS},
        distant=("all_reduce", "broadcast"),
    )
)
