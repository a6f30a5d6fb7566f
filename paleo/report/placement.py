"""Where a job's nodes lie and what that costs, as a table and as a document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from paleo.report.grid import grid
from paleo.report.tables import percent, prose
from paleo.units import duration

if TYPE_CHECKING:
    from paleo.report.documents import Document
    from paleo.studies.placement import PlacementStudy


def document(study: PlacementStudy) -> Document:
    """Leaf switches, hops of an unsorted ring between them, shares of the nodes' ports, and the packed run's step."""
    share = study.share
    return {
        "nodes": study.prediction.run.nodes,
        "background": study.placement.background,
        "neighbour": study.prediction.run.neighbour,
        "leaves": share.leaves,
        "crossings": share.crossings,
        "share": {
            "ring": share.ring_share,
            "all_to_all": share.exchange_share,
            "unsorted_ring": share.unsorted_share,
            "all_to_all_direct": share.direct_share,
        },
        "packed_step_time_s": study.packed.step_time,
        "slowdown": study.slowdown,
        "advice": study.advice,
    }


def table(study: PlacementStudy) -> RenderableType:
    """The study as a table of figures for the terminal."""
    facts, share = grid("Placement", ["what", "figure"], left=2), study.share
    beside = f", others use {percent(study.placement.background)} of the uplinks" if study.placement.background else ""
    neighbour = study.prediction.run.neighbour
    beside += f", beside a job {neighbour}" if neighbour else ""
    facts.add_row("nodes", f"{study.nodes}, {study.prediction.run.nodes}{beside}")
    facts.add_row(study.units, f"{share.leaves:.3g}; a ring in rank order crosses {share.crossings:.3g} times")
    shares = (share.ring_share, share.exchange_share, share.unsorted_share)
    ring, exchange, unsorted = (percent(each) for each in shares)
    facts.add_row("share of the nodes' ports", f"sorted rings {ring}, all-to-all {exchange}, unsorted rings {unsorted}")
    packed = study.packed.step_time
    facts.add_row("step", f"{duration(study.prediction.step_time)}, packed and alone {duration(packed)}")
    return Group(facts, Text(), prose(study.advice))
