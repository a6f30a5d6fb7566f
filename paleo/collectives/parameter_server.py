"""Parameter server, central or sharded: workers push gradients to servers and pull the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.collectives.base import (
    Algorithm,
    LevelTraffic,
    Traffic,
    active,
    add_algorithm,
    members_below,
    ranks_of,
)

if TYPE_CHECKING:
    from paleo.collectives.base import (
        Array,
        Numeric,
    )


def parameter_server_all_reduce(payload: Array, group: tuple[Array, ...], *, servers: Numeric) -> Traffic:
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


def central(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """One server: 2 alpha + 2 beta P S."""
    return parameter_server_all_reduce(payload, group, servers=1.0)


def sharded(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """A server beside every worker (s = P): 2 alpha + 2 beta S."""
    return parameter_server_all_reduce(payload, group, servers=ranks_of(group))


_REFERENCE = "Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014"

CENTRAL = add_algorithm(
    Algorithm(
        name="parameter_server",
        summary="one server takes every gradient and answers every worker",
        reference=_REFERENCE,
        formulas={"all_reduce": central},
        one_port=False,
        automatic=False,
        distant=("all_reduce",),
    )
)
SHARDED = add_algorithm(
    Algorithm(
        name="sharded_parameter_server",
        summary="each worker is also the server of 1/P of the parameters",
        reference=_REFERENCE,
        formulas={"all_reduce": sharded},
        one_port=False,
        automatic=False,
        distant=("all_reduce",),
    )
)
