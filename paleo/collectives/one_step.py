"""Collectives that take one step at each level: reduction inside the switch, pairwise messages, and parameter servers.

Formulas are written in alpha [s per step], beta [s/byte sent] and gamma [s/byte reduced]. The payload is S [byte], the
number of ranks P, and the number of units (nodes) of the outer levels N.
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
    Numeric,
    Traffic,
    group_rank_count,
    level_instances,
    level_is_used,
    ranks_per_member,
    recursive_doubling_rounds,
    register_algorithm,
    remote_buffer_fraction,
    sequential_phases,
)
from paleo.collectives.trees import double_tree_all_reduce, double_tree_broadcast

# In-switch reduction (NVLink SHARP): the switches of the inner level add and multicast; outer levels use a double
# binary tree


def _in_switch_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-reduce in the inner level's switch, pipelined with a double tree outside.

    The inner level costs 2 alpha + beta S (1 + 1/P), the outer ones of N units 2 alpha log2 N + 2 beta S (N-1)/N. The
    switch reads the whole buffer S of each rank and adds; each rank then multicasts its 1/P of the sum.
    """
    used = level_is_used(group[0])
    inner = LevelTraffic(2.0 * used, payload * (1.0 + 1.0 / group[0]) * used)
    return _with_outer_trees(inner, payload, group, double_tree_all_reduce)


def _in_switch_reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a reduce-scatter inside a switch, alpha + beta S.

    The switch reads every buffer and sends 1/P of the sum to each rank.
    """
    used = level_is_used(group[0])
    return Traffic.from_levels(LevelTraffic(used, payload * used)) + _outer_ring(payload, group, 1.0)


def _in_switch_all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-gather inside a switch, alpha + beta S (P-1)/P.

    Each rank multicasts its shard; the limit is that each rank receives (P-1)/P of the payload.
    """
    inner = LevelTraffic(level_is_used(group[0]), remote_buffer_fraction(group[0]) * payload)
    return _outer_ring(payload, group, 0.0) + Traffic.from_levels(inner)


def _in_switch_broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a broadcast as one multicast inside the switch: alpha + beta S."""
    inner = LevelTraffic(level_is_used(group[0]), payload * level_is_used(group[0]))
    return _with_outer_trees(inner, payload, group, double_tree_broadcast)


def _with_outer_trees(
    inner: LevelTraffic, payload: Array, group: tuple[Array, ...], outer: Callable[[Array, tuple[Array, ...]], Traffic]
) -> Traffic:
    """Return the traffic of an in-switch operation with trees over the outer levels, pipelined in one phase."""
    if len(group) == 1:
        return Traffic.from_levels(inner)
    return Traffic.from_levels(inner, *outer(payload, group[1:]).phases[0])


def _outer_ring(payload: Array, group: tuple[Array, ...], reduced: float) -> Traffic:
    """Return the traffic of one trip round a ring over the nodes or racks of the outer levels.

    ``reduced`` is 1 for a reduction, 0 for a copy. The traffic is empty for a group of one level.
    """
    if len(group) == 1:
        return Traffic()
    units = group_rank_count(group[1:])
    share = remote_buffer_fraction(units) * payload
    hops = np.maximum(units - 1.0, 1.0)
    levels = [
        LevelTraffic((n - 1.0) * above, share * level_is_used(n), reduced * share * (n - 1.0) * above / hops)
        for n, above in zip(group[1:], level_instances(group)[1:], strict=True)
    ]
    return Traffic.from_levels(LevelTraffic(), *levels)


register_algorithm(
    CollectiveAlgorithm(
        name="in_switch",
        summary="the switch adds and multicasts; two steps and about half the bytes",
        reference="Klenk, Jiang, Thorson and Dennison, An in-network architecture for accelerating shared-memory "
        "multiprocessor collectives, ISCA 2020",
        traffic_formulas={
            "all_reduce": _in_switch_all_reduce,
            "reduce_scatter": _in_switch_reduce_scatter,
            "all_gather": _in_switch_all_gather,
            "broadcast": _in_switch_broadcast,
        },
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS, "nccl": ("all_reduce",)},
        is_one_port=False,
        reduces_in_network=True,
    )
)


# Messages from rank to rank: one message between two ranks, and exchanges of all ranks with all others


def _send_recv(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of one message, alpha + beta S over the outermost level that the group spans.

    The message leaves through the ports of one sender.
    """
    members = zip(group, level_instances(group), strict=True)
    crosses = [level_is_used(fan_out) * (above == 1) for fan_out, above in members]
    return Traffic.from_levels(*(LevelTraffic(cross, cross * payload, senders_per_member=1.0) for cross in crosses))


def _pairwise_all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-to-all by pairwise messages: alpha (P-1) + beta S (P-1)/P.

    A unit of m ranks sends m S (P-m)/P through its own ports.
    """
    ranks = group_rank_count(group)
    levels = [
        LevelTraffic((fan_out - 1.0) * inside, inside * payload * (ranks - inside) / ranks * level_is_used(fan_out))
        for fan_out, inside in zip(group, ranks_per_member(group), strict=True)
    ]
    return Traffic.from_levels(*levels)


def _bruck_all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of Bruck's all-to-all, alpha log2 P + beta (S/2) log2 P.

    Each rank forwards half of its buffer in every round.
    """
    members = zip(map(recursive_doubling_rounds, group), ranks_per_member(group), strict=True)
    return sequential_phases([LevelTraffic(rounds, 0.5 * rounds * inside * payload) for rounds, inside in members])


register_algorithm(
    CollectiveAlgorithm(
        name="point_to_point",
        summary="one message over the widest level between two ranks",
        reference="Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994",
        traffic_formulas={"send_recv": _send_recv},
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS, "nccl": ("send_recv",)},
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="pairwise",
        summary="every rank sends to every other rank; the least bytes, P - 1 messages",
        reference="Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, "
        "IJHPCA 19(1), 2005",
        traffic_formulas={"all_to_all": _pairwise_all_to_all},
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS, "nccl": ("all_to_all",)},
        non_neighbour_operations=("all_to_all",),
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="bruck",
        summary="bundled all-to-all; log2 P steps, more bytes",
        reference="Bruck, Ho, Kipnis, Upfal and Weathersby, Efficient algorithms for all-to-all communications in "
        "multiport message-passing systems, IEEE TPDS 8(11), 1997",
        traffic_formulas={"all_to_all": _bruck_all_to_all},
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS},
        non_neighbour_operations=("all_to_all",),
    )
)


# Collectives through servers or a root: workers push gradients and pull the result


def _parameter_server_all_reduce(payload: Array, group: tuple[Array, ...], *, servers: Numeric) -> Traffic:
    """Return the traffic of an all-reduce by s parameter servers, spread over the ranks: 2 alpha + 2 beta P S/s.

    Push and pull each cost one alpha and P S/s bytes through a server's port. All P workers reach a server over its
    innermost port; over an outer level only the workers of other units do. The P messages overlap, so their arrival
    costs one alpha, not P, as in the literature.
    """
    ranks = group_rank_count(group)
    levels = []
    for fan_out, inside in zip(group, ranks_per_member(group), strict=True):
        senders = np.where(inside == 1, ranks, ranks - inside)
        servers_inside = np.maximum(1.0, servers * inside / ranks)
        busy = level_is_used(fan_out)
        levels.append(LevelTraffic(2.0 * busy, 2.0 * senders * servers_inside / servers * payload * busy))
    levels[0] = LevelTraffic(levels[0].steps, levels[0].wire_bytes, ranks * payload / servers * level_is_used(ranks))
    return Traffic.from_levels(*levels)


def _sharded_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-reduce by parameter servers on every rank (s = P): 2 alpha + 2 beta S."""
    return _parameter_server_all_reduce(payload, group, servers=group_rank_count(group))


def _root_exchange(payload: Array, group: tuple[Array, ...], *, times: float, reduced: float) -> Traffic:
    """Return the traffic of a root that exchanges messages with all other ranks, one after another (Paleo's OneToAll).

    ``times`` is 1 for a broadcast and 2 for an all-reduce: alpha (P-1) + beta S (P-1) each, and gamma S (P-1).
    """
    ranks = group_rank_count(group)
    return Traffic.from_levels(
        *(
            LevelTraffic(
                steps=times * (fan_out - 1.0) * inside,
                wire_bytes=times * (ranks - inside) * payload * level_is_used(fan_out),
                reduced_bytes=reduced * (fan_out - 1.0) * inside * payload,
            )
            for fan_out, inside in zip(group, ranks_per_member(group), strict=True)
        )
    )


_REFERENCE = "Li et al., Scaling distributed machine learning with the parameter server, OSDI 2014"
register_algorithm(
    CollectiveAlgorithm(
        name="parameter_server",
        summary="one server takes every gradient and answers every worker",
        reference=_REFERENCE,
        traffic_formulas={"all_reduce": partial(_parameter_server_all_reduce, servers=1.0)},
        is_one_port=False,
        non_neighbour_operations=("all_reduce",),
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="sharded_parameter_server",
        summary="each worker is also the server of 1/P of the parameters",
        reference=_REFERENCE,
        traffic_formulas={"all_reduce": _sharded_all_reduce},
        is_one_port=False,
        non_neighbour_operations=("all_reduce",),
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="one_to_all",
        summary="a root receives from each rank in turn and answers each in turn",
        reference="Qi, Sparks and Talwalkar, Paleo, ICLR 2017 (OneToAll)",
        traffic_formulas={
            "all_reduce": partial(_root_exchange, times=2.0, reduced=1.0),  # Paleo's 2 (n-1) S / B, and alpha and gamma
            "broadcast": partial(_root_exchange, times=1.0, reduced=0.0),
        },
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS},
        non_neighbour_operations=("all_reduce", "broadcast"),
    )
)
