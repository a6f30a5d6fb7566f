"""The cost of a job's placement: its step on the stated nodes beside packed nodes, and when the difference matters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paleo.pricing.links.topology import node_placement, placed
from paleo.units import whole_percent

if TYPE_CHECKING:
    from paleo.predict import Prediction
    from paleo.pricing.links.topology import NetworkShare, NodePlacement

#: A longer step than this, as a share of it, is a loss worth a word; a share of the ports below it is lost bandwidth.
NOTABLE = 0.01
#: What several nodes of a network share, in the plural and in the singular.
UNITS = {"leaf switches": "leaf switch", "units of rails": "unit of rails", "groups": "group"}


@dataclass(frozen=True, slots=True)
class PlacementStudy:
    """A run whose nodes lie as it says, beside the run on packed nodes that it has to itself; ``share`` is what its
    nodes keep of their ports."""

    prediction: Prediction
    packed: Prediction
    placement: NodePlacement
    share: NetworkShare
    nodes: int

    @property
    def slowdown(self) -> float:
        """Step time over that of the packed run."""
        return self.prediction.step_time / self.packed.step_time

    @property
    def matters(self) -> bool:
        """Whether the step is notably longer."""
        return self.slowdown > 1.0 + NOTABLE

    @property
    def unit(self) -> str:
        """What neighbouring nodes share: a leaf switch, a unit of rail switches or a group of a dragonfly."""
        return UNITS[self.units]

    @property
    def units(self) -> str:
        """Name, in the plural, of what nodes hang on: leaf switches, groups of a dragonfly or units of rails."""
        outer = (level for level in self.prediction.system.levels if self.prediction.system.joins_nodes(level))
        level = next(outer)
        if level.topology == "dragonfly":
            return "groups"
        return "units of rails" if level.routing == "rail" else "leaf switches"

    @property
    def advice(self) -> str:
        """When the placement matters, in a sentence or two."""
        return _advice(self)


def studied(prediction: Prediction) -> PlacementStudy | None:
    """The study of a run that says where its nodes lie or that others use the network; None for the usual run."""
    run, system = prediction.run, prediction.system
    placement = node_placement(run.nodes, run.background, run.neighbour)
    if placement.usual or not any(system.joins_nodes(level) for level in system.levels):
        return None
    nodes = math.ceil(prediction.plan.gpus / system.devices_per_node)
    packed = prediction.variant(nodes="packed", background=0.0, neighbour=None)
    return PlacementStudy(prediction, packed, placement, placed(system, nodes, placement), nodes)


def _advice(study: PlacementStudy) -> str:
    share = study.share
    if share.leaves <= 1:
        return f"All nodes lie on one {study.unit}: what lies above it does not matter.{_rails(share)}"
    rings = f"rings sorted by leaf keep {whole_percent(share.ring_share)} of the nodes' ports"
    exchanges = f"all-to-alls {whole_percent(share.exchange_share)}"
    unsorted = f"rings in the order of the ranks would keep {whole_percent(share.unsorted_share)}"
    if study.matters:
        longer = f"The step is {100 * (study.slowdown - 1):.0f} % longer than on packed nodes of one's own"
        ask = f"Ask for nodes that share {study.units}"
        return f"Placement matters: {longer}; {rings}, {exchanges}. {ask}.{_rails(share)}"
    if study.slowdown < 1.0 - NOTABLE:
        shorter = f"The step is {100 * (1 - study.slowdown):.0f} % shorter than on packed nodes"
        reason = f"{exchanges} over the links of {share.leaves:.3g} {study.units}, as long as others leave them idle"
        return f"Spread nodes are faster here: {shorter}; {rings}, {reason}.{_rails(share)}"
    if share.exchange_share < 1.0 - NOTABLE or share.unsorted_share < 1.0 - NOTABLE:
        return f"Placement does not matter to this run: {rings}. It would to others: {exchanges}, and {unsorted}."
    return f"Placement does not matter: the links above a {study.unit} carry what its nodes can send; {rings}."


def _rails(share: NetworkShare) -> str:
    """What exchanges between unlike rails would keep that do not go over NVLink first."""
    if share.direct_share is None or share.direct_share >= share.exchange_share - NOTABLE:
        return ""
    direct = whole_percent(share.direct_share)
    return f" Straight between unlike rails, not over NVLink first (PXN), all-to-alls would keep {direct}."
