"""Collectives of logarithmic depth: trees (binomial, double binary) and butterflies (recursive halving and doubling).

Formulas are written in alpha [s per step], beta [s/byte sent] and gamma [s/byte reduced]. The payload is S [byte], the
number of ranks P, and the fan-out of a level f.
"""

from __future__ import annotations

from paleo.collectives.base import (
    COLLECTIVE_OPERATIONS,
    Array,
    CollectiveAlgorithm,
    LevelTraffic,
    Traffic,
    level_is_used,
    ranks_per_member,
    recursive_doubling_rounds,
    register_algorithm,
    remote_buffer_fraction,
    sequential_phases,
    with_reversed_phases,
)

# Butterfly collectives: in every round each rank exchanges with a partner twice as far away


def _butterfly_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-reduce by recursive doubling: alpha log2 P + beta S log2 P + gamma S log2 P.

    Without alpha and gamma this is Paleo's ceil(log2 n) S / B. Every rank exchanges its whole buffer in every round, so
    a unit (node) of m ranks sends m S a round.
    """
    levels = []
    for fan_out, inside in zip(group, ranks_per_member(group), strict=True):
        rounds = recursive_doubling_rounds(fan_out)
        levels.append(LevelTraffic(rounds, rounds * inside * payload, rounds * payload))
    return sequential_phases(levels)


def _recursive_halving_reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a reduce-scatter by recursive halving: alpha log2 P + beta S (P-1)/P + gamma S (P-1)/P.

    The inner level goes first. At the next level each rank has S divided by the ranks below, so the ranks of a unit
    (node) together send S (f-1)/f.
    """
    levels = []
    for fan_out, inside in zip(group, ranks_per_member(group), strict=True):
        sent = remote_buffer_fraction(fan_out) * payload
        levels.append(LevelTraffic(recursive_doubling_rounds(fan_out), sent, sent / inside))
    return sequential_phases(levels)


def _recursive_doubling_all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-gather by recursive doubling: alpha log2 P + beta S (P-1)/P.

    The outer level goes first.
    """
    levels = [LevelTraffic(recursive_doubling_rounds(n), remote_buffer_fraction(n) * payload) for n in group]
    return with_reversed_phases(sequential_phases(levels))


def _rabenseifner_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of Rabenseifner's all-reduce: 2 alpha log2 P + 2 beta S (P-1)/P + gamma S (P-1)/P."""
    return _recursive_halving_reduce_scatter(payload, group) + _recursive_doubling_all_gather(payload, group)


def _van_de_geijn_broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of van de Geijn's broadcast: 2 alpha log2 P + 2 beta S (P-1)/P.

    The algorithm is a scatter down a tree and an all-gather.
    """
    return _recursive_doubling_all_gather(payload, group) + _recursive_doubling_all_gather(payload, group)


register_algorithm(
    CollectiveAlgorithm(
        name="butterfly",
        summary="recursive doubling and halving; log2 P steps, no root",
        reference="Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, "
        "IJHPCA 19(1), 2005",
        traffic_formulas={
            "all_reduce": _butterfly_all_reduce,
            "reduce_scatter": _recursive_halving_reduce_scatter,
            "all_gather": _recursive_doubling_all_gather,
        },
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS},
        non_neighbour_operations=("all_reduce", "reduce_scatter", "all_gather"),
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="rabenseifner",
        summary="reduce-scatter + all-gather by halving and doubling; few steps and the least bytes, in turns",
        reference="Rabenseifner, Optimization of collective reduction operations, ICCS 2004",
        traffic_formulas={"all_reduce": _rabenseifner_all_reduce, "broadcast": _van_de_geijn_broadcast},
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS},
        non_neighbour_operations=("all_reduce", "broadcast"),
    )
)


# Tree collectives: whole buffers are sent up a tree to its root, and the result is sent back down


def _binomial_tree(payload: Array, group: tuple[Array, ...], *, reduced: float) -> Traffic:
    """Return the traffic of one pass up a binomial tree: log2 f rounds at each level, each with the whole payload."""
    rounds = map(recursive_doubling_rounds, group)
    return sequential_phases([LevelTraffic(n, n * payload, reduced * n * payload) for n in rounds])


def _tree_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of an all-reduce up and down a binomial tree.

    The time is 2 alpha log2 P + 2 beta S log2 P + gamma S log2 P; without alpha and gamma, Paleo's 2 ceil(log2 n) S /
    B.
    """
    return _binomial_tree(payload, group, reduced=1.0) + _tree_broadcast(payload, group)


def _tree_broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a broadcast down a binomial tree: alpha log2 P + beta S log2 P, the outer level first."""
    return with_reversed_phases(_binomial_tree(payload, group, reduced=0.0))


def double_tree_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a double binary tree's all-reduce: 2 alpha log2 P + 2 beta S (P-1)/P + gamma S (P-1)/P.

    Parameters
    ----------
    payload : ndarray
        Buffer of one rank, S [byte].
    group : tuple of ndarray
        Fan-outs from the inner level to the outer one.

    Returns
    -------
    Traffic
        Steps, bytes sent and bytes reduced on each level.

    Notes
    -----
    Pieces are so small that filling the pipeline costs latency only. At a level of fan-out f the two trees have 2 (f-1)
    edges together, and each carries S/2 up and S/2 down. A unit (node) sends 2 S (f-1)/f on average;
    `double_tree_imbalance` gives the factor of the busiest unit. The ranks of a unit share the reduction at each level,
    so that the reduced bytes of all levels add up to S (P-1)/P.
    """
    levels = []
    for fan_out, inside in zip(group, ranks_per_member(group), strict=True):
        sent = remote_buffer_fraction(fan_out) * payload
        levels.append(LevelTraffic(2.0 * recursive_doubling_rounds(fan_out), 2.0 * sent, sent / inside))
    return Traffic.from_levels(*levels)


def double_tree_broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of a double binary tree's broadcast: alpha log2 P + beta S.

    Parameters
    ----------
    payload : ndarray
        Buffer of the root, S [byte].
    group : tuple of ndarray
        Fan-outs from the inner level to the outer one.

    Returns
    -------
    Traffic
        Steps and bytes sent on each level.
    """
    levels = (LevelTraffic(recursive_doubling_rounds(n), payload * level_is_used(n)) for n in group)
    return Traffic.from_levels(*levels)


def _chain_tree_all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Return the traffic of NCCL's ``Tree`` all-reduce: a chain inside each node, a double tree between nodes.

    Both form one pipeline. Inside a node of f ranks: 2 alpha (f-1) + 2 beta S (f-1)/f. The payload goes up the chain's
    f - 1 links and comes back. Chains of different channels begin at different ranks, so that all ranks carry equal
    load.
    """
    sent = remote_buffer_fraction(group[0]) * payload
    chain = LevelTraffic(2.0 * (group[0] - 1.0), 2.0 * sent, sent)
    return Traffic.from_levels(chain, *double_tree_all_reduce(payload, group).phases[0][1:])


register_algorithm(
    CollectiveAlgorithm(
        name="tree",
        summary="binomial tree of whole buffers; few steps, many bytes",
        reference="Ben-Nun and Hoefler, Demystifying parallel and distributed deep learning, ACM CSUR 52(4), 2019",
        traffic_formulas={"all_reduce": _tree_all_reduce, "broadcast": _tree_broadcast},
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS},
        non_neighbour_operations=("all_reduce", "broadcast"),
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="double_tree",
        summary="two complementary binary trees in a pipeline; few steps and the least bytes",
        reference="Sanders, Speck and Traff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, "
        "Parallel Computing 35(12), 2009",
        traffic_formulas={"all_reduce": double_tree_all_reduce, "broadcast": double_tree_broadcast},
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS},
        non_neighbour_operations=("all_reduce", "broadcast"),
    )
)
register_algorithm(
    CollectiveAlgorithm(
        name="chain_tree",
        summary="a chain inside each node, two binary trees between nodes; few steps between nodes",
        reference="Jeaugey, Massively scale your deep learning training with NCCL 2.4, NVIDIA, 2019; NVIDIA/nccl "
        "src/graph/tuning.cc (steps of Tree)",
        traffic_formulas={"all_reduce": _chain_tree_all_reduce},
        operations_by_library={"textbook": COLLECTIVE_OPERATIONS, "nccl": ("all_reduce",)},
        only_between_nodes=True,
        non_neighbour_operations=("all_reduce",),
    )
)
