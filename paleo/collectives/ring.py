"""Ring (pipeline): every rank passes pieces of its buffer to its neighbour."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.collectives.base import (
    Algorithm,
    LevelTraffic,
    Traffic,
    active,
    add_algorithm,
    ranks_of,
    remote_share,
    units_above,
)

if TYPE_CHECKING:
    from paleo.collectives.base import (
        Array,
    )


def ring_hops(group: tuple[Array, ...]) -> tuple[Array, ...]:
    """Hops of one pass of the ring that use each level, inner to outer; together P - 1.

    A ring that enters every unit once crosses the level of fan-out f in (f - 1) hops per parent unit.
    """
    return tuple((fan_out - 1.0) * above for fan_out, above in zip(group, units_above(group), strict=True))


def ring_passes(payload: Array, group: tuple[Array, ...], *, passes: float, share: Array, reduced: float) -> Traffic:
    """``passes`` passes of the ring in which every unit passes ``share`` of the payload a pass through its ports.

    The reduced bytes (``reduced`` times the share) are laid to the levels by their hops.
    """
    total_hops = np.maximum(ranks_of(group) - 1.0, 1.0)
    return Traffic.of(
        *(
            LevelTraffic(
                steps=passes * hops,
                wire_bytes=passes * share * payload * active(fan_out),
                reduced_bytes=reduced * share * payload * hops / total_hops,
            )
            for fan_out, hops in zip(group, ring_hops(group), strict=True)
        )
    )


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha (P-1) + 2 beta S (P-1)/P + gamma S (P-1)/P."""
    return ring_passes(payload, group, passes=2.0, share=remote_share(ranks_of(group)), reduced=1.0)


def reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha (P-1) + beta S (P-1)/P + gamma S (P-1)/P."""
    return ring_passes(payload, group, passes=1.0, share=remote_share(ranks_of(group)), reduced=1.0)


def all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha (P-1) + beta S (P-1)/P."""
    return ring_passes(payload, group, passes=1.0, share=remote_share(ranks_of(group)), reduced=0.0)


def broadcast(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """A pipelined chain: alpha (P-1) + beta S, its pieces small enough that filling the chain is all latency."""
    return ring_passes(payload, group, passes=1.0, share=active(ranks_of(group)), reduced=0.0)


RING = add_algorithm(
    Algorithm(
        name="ring",
        summary="pieces go round a ring; the least bytes, P - 1 steps",
        reference="Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms, JPDC 69(2), 2009",
        formulas={
            "all_reduce": all_reduce,
            "reduce_scatter": reduce_scatter,
            "all_gather": all_gather,
            "broadcast": broadcast,
        },
        lockstep=True,
        libraries={"nccl": ("all_reduce", "reduce_scatter", "all_gather", "broadcast")},
    )
)
