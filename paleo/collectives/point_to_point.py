"""Point to point: one message between two ranks, the group being the path between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.collectives.base import Algorithm, LevelTraffic, Traffic, active, add_algorithm, units_above

if TYPE_CHECKING:
    from paleo.collectives.base import Array


def send_recv(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha + beta S over the outermost level that the group spans, through the ports of the one rank that sends."""
    crosses = [active(fan_out) * (above == 1) for fan_out, above in zip(group, units_above(group), strict=True)]
    return Traffic.of(*(LevelTraffic(cross, cross * payload, senders=1.0) for cross in crosses))


POINT_TO_POINT = add_algorithm(
    Algorithm(
        name="point_to_point",
        summary="one message over the widest level between two ranks",
        reference="Hockney, The communication challenge for MPP, Parallel Computing 20(3), 1994",
        formulas={"send_recv": send_recv},
        libraries={"nccl": ("send_recv",)},
    )
)
