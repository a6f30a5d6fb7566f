"""Reduce-scatter by recursive halving, then all-gather by recursive doubling (Rabenseifner)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.collectives import butterfly
from paleo.collectives.base import Algorithm, add_algorithm

if TYPE_CHECKING:
    from paleo.collectives.base import Array, Traffic


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha log2 P + 2 beta S (P-1)/P + gamma S (P-1)/P."""
    return butterfly.reduce_scatter(payload, group) + butterfly.all_gather(payload, group)


def broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """Scatter down a tree, then all-gather (van de Geijn): 2 alpha log2 P + 2 beta S (P-1)/P."""
    return butterfly.all_gather(payload, group) + butterfly.all_gather(payload, group)


RABENSEIFNER = add_algorithm(
    Algorithm(
        name="rabenseifner",
        summary="reduce-scatter + all-gather by halving and doubling; few steps and the least bytes, in turns",
        reference="Rabenseifner, Optimization of collective reduction operations, ICCS 2004",
        formulas={"all_reduce": all_reduce, "broadcast": broadcast},
        distant=("all_reduce", "broadcast"),
        libraries={},
    )
)
