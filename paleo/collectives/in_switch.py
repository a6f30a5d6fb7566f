"""In-switch reduction (NVLink SHARP): the switches of the inner level add and multicast; outer levels use two trees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paleo.collectives.base import (
    OPERATIONS,
    Algorithm,
    Array,
    LevelTraffic,
    Traffic,
    active,
    add_algorithm,
    ranks_of,
    remote_share,
)
from paleo.collectives.tree import double_tree_all_reduce, double_tree_broadcast


def _all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha + beta S (1 + 1/P) inside; 2 alpha log2 N + 2 beta S (N-1)/N over N units, in a pipeline.

    Each rank lets the switch read all of its buffer (S) and multicasts the 1/P that it owns; the switch adds.
    """
    inner = LevelTraffic(2.0 * active(group[0]), payload * (1.0 + 1.0 / group[0]) * active(group[0]))
    return _with_trees(inner, payload, group, double_tree_all_reduce)


def _reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha + beta S of one level: the switch reads all of every buffer, and sends 1/P of the sum to each rank."""
    return Traffic.of(LevelTraffic(active(group[0]), payload * active(group[0]))) + _outer_ring(payload, group, 1.0)


def _all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha + beta S (P-1)/P: each rank multicasts its shard; the limit is the (P-1)/P of S that each rank receives."""
    return _outer_ring(payload, group, 0.0) + Traffic.of(
        LevelTraffic(active(group[0]), remote_share(group[0]) * payload)
    )


def _broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha + beta S inside: one multicast."""
    inner = LevelTraffic(active(group[0]), payload * active(group[0]))
    return _with_trees(inner, payload, group, double_tree_broadcast)


def _with_trees(
    inner: LevelTraffic, payload: Array, group: tuple[Array, ...], outer: Callable[[Array, tuple[Array, ...]], Traffic]
) -> Traffic:
    if len(group) == 1:
        return Traffic.of(inner)
    return Traffic.of(inner, *outer(payload, group[1:]).phases[0])


def _outer_ring(payload: Array, group: tuple[Array, ...], reduced: float) -> Traffic:
    if len(group) == 1:
        return Traffic()
    units = ranks_of(group[1:])
    share = remote_share(units) * payload
    hops = np.maximum(units - 1.0, 1.0)
    levels = [
        LevelTraffic((fan_out - 1.0) * above, share * active(fan_out), reduced * share * (fan_out - 1.0) * above / hops)
        for fan_out, above in zip(group[1:], (ranks_of(group[i + 1 :]) for i in range(1, len(group))), strict=True)
    ]
    return Traffic.of(LevelTraffic(), *levels)


add_algorithm(
    Algorithm(
        name="in_switch",
        summary="the switch adds and multicasts; two steps and about half the bytes",
        reference="Klenk, Jiang, Thorson and Dennison, An in-network architecture for accelerating shared-memory "
        "multiprocessor collectives, ISCA 2020",
        formulas={
            "all_reduce": _all_reduce,
            "reduce_scatter": _reduce_scatter,
            "all_gather": _all_gather,
            "broadcast": _broadcast,
        },
        libraries={"textbook": OPERATIONS, "nccl": ("all_reduce",)},
        one_port=False,
        in_network=True,
    )
)
