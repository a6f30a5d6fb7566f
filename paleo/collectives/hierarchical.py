"""Hierarchical: a ring inside every unit, then rings over the units, each rank with its own shard, level by level."""

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
)

if TYPE_CHECKING:
    from paleo.collectives.base import (
        Array,
        Traffic,
    )


def reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Per level of fan-out f: alpha (f-1) + beta S (f-1)/f, gamma over the shard that a rank holds there."""
    return one_level_at_a_time(
        [
            LevelTraffic(fan_out - 1.0, remote_share(fan_out) * payload, remote_share(fan_out) * payload / inside)
            for fan_out, inside in zip(group, members_below(group), strict=True)
        ]
    )


def all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Per level of fan-out f: alpha (f-1) + beta S (f-1)/f, the outer level first."""
    return outer_first(
        one_level_at_a_time([LevelTraffic(fan_out - 1.0, remote_share(fan_out) * payload) for fan_out in group])
    )


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Reduce-scatter inwards out, all-gather outwards in: sum over levels of 2 alpha (f-1) + 2 beta S (f-1)/f."""
    return reduce_scatter(payload, group) + all_gather(payload, group)


def all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """One exchange per level, inner first: sum over levels of alpha (f-1) + beta m S (f-1)/f.

    Ranks of a unit first bring together what goes to the same place: messages get fewer (f - 1 per level) and larger,
    and every byte is moved once per level.
    """
    return one_level_at_a_time(
        [
            LevelTraffic(fan_out - 1.0, inside * remote_share(fan_out) * payload)
            for fan_out, inside in zip(group, members_below(group), strict=True)
        ]
    )


HIERARCHICAL = add_algorithm(
    Algorithm(
        name="hierarchical",
        summary="rings level by level; the outer level carries each byte once per unit",
        reference="Cho, Finkler, Serrano, Kung and Hunter, BlueConnect, IBM J. R&D 63(6), 2019",
        formulas={
            "all_reduce": all_reduce,
            "reduce_scatter": reduce_scatter,
            "all_gather": all_gather,
            "all_to_all": all_to_all,
        },
        distant=("all_to_all",),
        libraries={},
    )
)
