"""Ring collectives: every rank passes pieces of its buffer to its neighbour.

``ring`` is one ring through all ranks. ``hierarchical`` runs rings level by level: first inside every unit (node), then
between units, where each rank exchanges its shard. ``torus`` runs rings along all dimensions of a torus at the same
time: the payload is cut into pieces, and each piece starts with another dimension. There a level is one dimension, and
a unit is a chip, then a row, then a plane.

Formulas are written in alpha [s per step], beta [s/byte sent] and gamma [s/byte reduced]. The payload is S [byte], the
number of ranks P, the fan-out of a level f, and the ranks inside one of its units m.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from paleo.collectives.base import (
    COLLECTIVE_OPERATIONS,
    Array,
    CollectiveAlgorithm,
    LevelTraffic,
    Traffic,
    group_rank_count,
    level_instances,
    level_is_used,
    ranks_per_member,
    register_algorithm,
    remote_buffer_fraction,
    sequential_phases,
    with_reversed_phases,
)


def _ring_passes(
    payload: Array,
    group: tuple[Array, ...],
    *,
    passes: float,
    reduced: float,
    share_of: Callable[[Array], Array] = remote_buffer_fraction,
) -> Traffic:
    """Return the traffic of ``passes`` trips round one ring: alpha (P-1) + beta S (P-1)/P each, and gamma S (P-1)/P.

    ``share_of`` returns the fraction of the payload that each unit sends in a trip, from the number of ranks.

    A ring that enters every unit once crosses the level of fan-out f in (f - 1) hops per parent unit, P - 1 in all.
    Reduced bytes (``reduced`` times the share) are divided among the levels in proportion to their hops.
    """
    share, total_hops = share_of(group_rank_count(group)), np.maximum(group_rank_count(group) - 1.0, 1.0)
    hops_of = [(fan_out - 1.0) * above for fan_out, above in zip(group, level_instances(group), strict=True)]
    return Traffic.from_levels(
        *(
            LevelTraffic(
                steps=passes * hops,
                wire_bytes=passes * share * payload * level_is_used(fan_out),
                reduced_bytes=reduced * share * payload * hops / total_hops,
            )
            for fan_out, hops in zip(group, hops_of, strict=True)
        )
    )


def _level_reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a reduce-scatter by one ring at each level, the inner level first.

    The time is alpha (f-1) + beta S (f-1)/f + gamma S (f-1)/(f m) at a level of fan-out f, because a rank reduces only
    its shard.
    """
    levels = []
    for fan_out, inside in zip(group, ranks_per_member(group), strict=True):
        sent = remote_buffer_fraction(fan_out) * payload
        levels.append(LevelTraffic(fan_out - 1.0, sent, sent / inside))
    return sequential_phases(levels)


def _level_all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-gather by one ring at each level, the outer level first.

    The time is alpha (f-1) + beta S (f-1)/f at a level of fan-out f.
    """
    levels = [LevelTraffic(fan_out - 1.0, remote_buffer_fraction(fan_out) * payload) for fan_out in group]
    return with_reversed_phases(sequential_phases(levels))


def _level_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a hierarchical all-reduce: reduce-scatter from the inner level outwards, all-gather back.

    The time is 2 alpha (f-1) + 2 beta S (f-1)/f at a level of fan-out f, and gamma S (f-1)/(f m).
    """
    return _level_reduce_scatter(payload, group) + _level_all_gather(payload, group)


def _level_all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a hierarchical all-to-all: one exchange per level, the inner level first.

    The time is the sum of alpha (f-1) + beta m S (f-1)/f over levels. Ranks of a unit first collect the data for one
    destination. Messages are fewer (f - 1 per level) and larger, and every byte moves once per level.
    """
    members = zip(group, ranks_per_member(group), strict=True)
    levels = [LevelTraffic(n - 1.0, inside * remote_buffer_fraction(n) * payload) for n, inside in members]
    return sequential_phases(levels)


def _along_all_dimensions(payload: Array, group: tuple[Array, ...], *, times: float, reduced: float) -> Traffic:
    """Return the traffic of ``times`` trips on a torus: alpha sum(n/2) + beta S (P-1)/P each, over all links of a chip.

    The extents of the dimensions are n. The bytes are divided equally among dimensions with more than one unit.
    """
    dimensions = np.maximum(sum((level_is_used(extent) for extent in group), np.zeros(())), 1.0)
    share = remote_buffer_fraction(group_rank_count(group)) * payload / dimensions
    return Traffic.from_levels(
        *(
            LevelTraffic(
                steps=times * np.floor(extent / 2.0),
                wire_bytes=times * inside * share * level_is_used(extent),
                reduced_bytes=reduced * share * level_is_used(extent),
            )
            for extent, inside in zip(group, ranks_per_member(group), strict=True)
        )
    )


def _torus_all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-to-all on a torus: alpha sum(n/2) + beta S n/4 over the longest dimension.

    The bound is the bisection: half of all messages cross the middle of that dimension.
    """
    levels = [
        LevelTraffic(np.floor(extent / 2.0), inside * payload * extent / 4.0 * level_is_used(extent))
        for extent, inside in zip(group, ranks_per_member(group), strict=True)
    ]
    return Traffic.from_levels(*levels)


_RING_OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
register_algorithm(
    CollectiveAlgorithm(
        name="ring",
        summary="pieces go round a ring; the least bytes, P - 1 steps",
        reference="Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009",
        traffic_formulas={
            "all_reduce": partial(_ring_passes, passes=2.0, reduced=1.0),
            "reduce_scatter": partial(_ring_passes, passes=1.0, reduced=1.0),
            "all_gather": partial(_ring_passes, passes=1.0, reduced=0.0),
            # along a chain of ranks, in pieces so small that filling it costs latency only: alpha (P-1) + beta S
            "broadcast": partial(_ring_passes, passes=1.0, reduced=0.0, share_of=level_is_used),
        },
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS, "nccl": _RING_OPERATIONS},
        is_lockstep=True,
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="hierarchical",
        summary="rings level by level; the outer level carries each byte once per unit",
        reference="Cho, Finkler, Serrano, Kung and Hunter, BlueConnect, IBM J. R&D 63(6), 2019",
        traffic_formulas={
            "all_reduce": _level_all_reduce,
            "reduce_scatter": _level_reduce_scatter,
            "all_gather": _level_all_gather,
            "all_to_all": _level_all_to_all,
        },
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS},
        non_neighbour_operations=("all_to_all",),
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="torus",
        summary="all dimensions of a torus at once; every link of a chip is busy",
        reference="Jouppi et al., TPU v4: An optically reconfigurable supercomputer, ISCA 2023; Sack and Gropp, "
        "Collective algorithms for multiported torus networks, ACM TOPC 1(2), 2015",
        traffic_formulas={
            "all_reduce": partial(_along_all_dimensions, times=2.0, reduced=1.0),
            "reduce_scatter": partial(_along_all_dimensions, times=1.0, reduced=1.0),
            "all_gather": partial(_along_all_dimensions, times=1.0, reduced=0.0),
            "all_to_all": _torus_all_to_all,
        },
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS, "xla": COLLECTIVE_OPERATIONS},
        is_one_port=False,
        required_topology="torus",
    )
)
