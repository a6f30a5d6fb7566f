"""Binomial tree: whole buffers climb a tree of pairs to a root, and the result climbs down."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.collectives.base import (
    Algorithm,
    LevelTraffic,
    add_algorithm,
    one_level_at_a_time,
    outer_first,
    rounds,
)

if TYPE_CHECKING:
    from paleo.collectives.base import (
        Array,
        Traffic,
    )


def _climb(payload: Array, group: tuple[Array, ...], *, reduced: float) -> Traffic:
    return one_level_at_a_time(
        [
            LevelTraffic(rounds(fan_out), rounds(fan_out) * payload, reduced * rounds(fan_out) * payload)
            for fan_out in group
        ]
    )


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha log2 P + 2 beta S log2 P + gamma S log2 P; without latency the original Paleo's 2 ceil(log2 n) S / B."""
    return _climb(payload, group, reduced=1.0) + broadcast(payload, group)


def broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha log2 P + beta S log2 P, the outer level first."""
    return outer_first(_climb(payload, group, reduced=0.0))


TREE = add_algorithm(
    Algorithm(
        name="tree",
        summary="binomial tree of whole buffers; few steps, many bytes",
        reference="Ben-Nun and Hoefler, Demystifying parallel and distributed deep learning, ACM CSUR 52(4), 2019",
        formulas={"all_reduce": all_reduce, "broadcast": broadcast},
        distant=("all_reduce", "broadcast"),
        libraries={},
    )
)
