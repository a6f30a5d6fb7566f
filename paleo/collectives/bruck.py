"""Bruck's all-to-all: messages are bundled and forwarded, so that log2 P steps do at the price of more bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.collectives.base import (
    Algorithm,
    LevelTraffic,
    add_algorithm,
    members_below,
    one_level_at_a_time,
    rounds,
)

if TYPE_CHECKING:
    from paleo.collectives.base import (
        Array,
        Traffic,
    )


def all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha log2 P + beta (S/2) log2 P: in every round each rank forwards half of its buffer."""
    return one_level_at_a_time(
        [
            LevelTraffic(rounds(fan_out), 0.5 * rounds(fan_out) * inside * payload)
            for fan_out, inside in zip(group, members_below(group), strict=True)
        ]
    )


BRUCK = add_algorithm(
    Algorithm(
        name="bruck",
        summary="bundled all-to-all; log2 P steps, more bytes",
        reference="Bruck, Ho, Kipnis, Upfal and Weathersby, Efficient algorithms for all-to-all communications in "
        "multiport message-passing systems, IEEE TPDS 8(11), 1997",
        formulas={"all_to_all": all_to_all},
        distant=("all_to_all",),
        libraries={},
    )
)
