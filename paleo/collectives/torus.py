"""Multi-dimensional torus: pieces of the payload go round all dimensions at the same time, each beginning with another.

A level is one dimension; a unit of a level is what lies on one coordinate of it (a chip, then a row, then a plane).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from paleo.collectives.base import (
    Algorithm,
    LevelTraffic,
    Traffic,
    active,
    add_algorithm,
    members_below,
    ranks_of,
    remote_share,
)

if TYPE_CHECKING:
    from paleo.collectives.base import (
        Array,
    )


def _round_all(payload: Array, group: tuple[Array, ...], *, times: float, reduced: float) -> Traffic:
    """Each chip sends ``times`` S (P-1)/P, in equal parts over the k dimensions of more than one unit."""
    dimensions = np.maximum(sum((active(extent) for extent in group), np.zeros(())), 1.0)
    share = remote_share(ranks_of(group)) * payload / dimensions
    return Traffic.of(
        *(
            LevelTraffic(
                steps=times * np.floor(extent / 2.0),
                wire_bytes=times * inside * share * active(extent),
                reduced_bytes=reduced * share * active(extent),
            )
            for extent, inside in zip(group, members_below(group), strict=True)
        )
    )


def all_reduce(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """2 alpha sum(n/2) + 2 beta S (P-1)/P over all 2 k links of a chip together."""
    return _round_all(payload, group, times=2.0, reduced=1.0)


def reduce_scatter(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha sum(n/2) + beta S (P-1)/P over all 2 k links."""
    return _round_all(payload, group, times=1.0, reduced=1.0)


def all_gather(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha sum(n/2) + beta S (P-1)/P over all 2 k links."""
    return _round_all(payload, group, times=1.0, reduced=0.0)


def all_to_all(payload: Array, group: tuple[Array, ...]) -> Traffic:
    """alpha sum(n/2) + beta S n/4 over the links of the longest dimension: half of all messages cross its middle."""
    return Traffic.of(
        *(
            LevelTraffic(np.floor(extent / 2.0), inside * payload * extent / 4.0 * active(extent))
            for extent, inside in zip(group, members_below(group), strict=True)
        )
    )


TORUS = add_algorithm(
    Algorithm(
        name="torus",
        summary="all dimensions of a torus at once; every link of a chip is busy",
        reference="Jouppi et al., TPU v4: An optically reconfigurable supercomputer, ISCA 2023; Sack and Gropp, "
        "Collective algorithms for multiported torus networks, ACM TOPC 1(2), 2015",
        formulas={
            "all_reduce": all_reduce,
            "reduce_scatter": reduce_scatter,
            "all_gather": all_gather,
            "all_to_all": all_to_all,
        },
        one_port=False,
        topology="torus",
    )
)
