"""Pairwise exchange: an all-to-all in which each rank sends every other rank its own message."""

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


def all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha (P-1) + beta S (P-1)/P; a unit of m ranks sends m S (P-m)/P through its own ports."""
    ranks = ranks_of(group)
    return Traffic.of(
        *(
            LevelTraffic((fan_out - 1.0) * inside, inside * payload * (ranks - inside) / ranks * active(fan_out))
            for fan_out, inside in zip(group, members_below(group), strict=True)
        )
    )


PAIRWISE = add_algorithm(
    Algorithm(
        name="pairwise",
        summary="every rank sends to every other rank; the least bytes, P - 1 messages",
        reference="Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, "
        "IJHPCA 19(1), 2005",
        formulas={"all_to_all": all_to_all},
        distant=("all_to_all",),
        libraries={"nccl": ("all_to_all",)},
    )
)
