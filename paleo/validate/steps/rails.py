"""Rows of all-to-alls between two nodes, each GPU with the GPUs of its own rail alone or with those of all rails: the
rate that a GPU reaches with messages that follow one another.

A message takes the share of the GPU's NICs that a send to one other rank reaches, or that an exchange with many does;
starting with one more peer hides behind the messages. Nothing is fitted to these rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from paleo.errors import SpecError, near
from paleo.pricing.communication import link_parameters
from paleo.pricing.links.alpha_beta import hidden
from paleo.specs.system import load_system
from paleo.validate.steps.base import Step, StepTable, integer
from paleo.validate.tables import STEPS

if TYPE_CHECKING:
    from paleo.pricing.links.fabric import FabricParameters
    from paleo.specs.software import Software
    from paleo.specs.system import System
    from paleo.validate.steps.base import Row

#: Whom a GPU talks to: the one of its rail in the other node, or all there.
PEERS = ("rail-aligned", "cross-rail")


class Rails(StepTable):
    """Messages of one size between two nodes a row; the measured quantity is the rate of a GPU."""

    name: ClassVar[str] = "rails"
    header: ClassVar[frozenset[str]] = frozenset(
        {"system", "ranks", "ranks_per_node", "peers", "message_bytes", "bytes_per_s_per_gpu"}
    )
    configuration: ClassVar[tuple[str, ...]] = ("peers", "message_bytes", "op")
    measured_column = "bytes_per_s_per_gpu"
    measured_unit = 1.0
    calibrates = False

    def system(self, row: Row) -> System:
        """The row's system."""
        return load_system(str(row["system"]))

    def step(self, row: Row, software: Software | None = None) -> Step:
        """Bytes a second of one GPU."""
        system, peers = self.system(row), str(row["peers"])
        if peers not in PEERS:
            raise SpecError(f"peers: {peers!r} is none of these; {near(peers, PEERS)}")
        if integer(row, "ranks_per_node") != system.devices_per_node:
            raise SpecError(f"ranks_per_node: only whole nodes of {system.devices_per_node} are modelled")
        outer = [level for level in system.levels if system.joins_nodes(level)]
        if not outer:
            raise SpecError(f"system {system.name} has no network between nodes")
        calibrated = link_parameters(system, "collective.fabric")
        nic, size = outer[0].unit_bandwidth / system.devices_per_node, float(integer(row, "message_bytes"))
        seconds = _message_time(
            calibrated.parameters, peers, integer(row, "ranks") / system.devices_per_node, size / nic
        )
        (low, high), rate = calibrated.factors(seconds), size / seconds
        origin = f"{calibrated.origin} ({calibrated.subject})"
        return Step(rate, rate / high, rate / low, nic, system.name, origin)


def _message_time(fabric: FabricParameters, peers: str, nodes: float, wire: float) -> float:
    """Seconds of a message that takes ``wire`` seconds at the datasheet's rate of a GPU's NICs."""
    if peers == "rail-aligned":
        return wire / fabric.send_fraction
    share = fabric.exchange_fraction * nodes**-fabric.congestion
    return float(hidden(fabric.peer, wire / share))


STEPS.register("rails")(Rails())
