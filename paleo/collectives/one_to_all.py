"""One to all: a root gathers every buffer, combines them, and sends the result to each rank in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
    )


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


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha (P-1) + 2 beta S (P-1) + gamma S (P-1); without latency the original Paleo's 2 (n-1) S / B."""
    return _root_sends(payload, group, times=2.0, reduced=1.0)


def broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha (P-1) + beta S (P-1)."""
    return _root_sends(payload, group, times=1.0, reduced=0.0)


ONE_TO_ALL = add_algorithm(
    Algorithm(
        name="one_to_all",
        summary="a root receives from each rank in turn and answers each in turn",
        reference="Qi, Sparks and Talwalkar, Paleo, ICLR 2017 (OneToAll)",
        formulas={"all_reduce": all_reduce, "broadcast": broadcast},
        distant=("all_reduce", "broadcast"),
        libraries={},
    )
)
