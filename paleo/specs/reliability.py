"""Failure rates of nodes: as the system's file states them, else those of similar systems."""

from __future__ import annotations

import math
from functools import cache

from paleo.specs.catalog import entries
from paleo.specs.system import Reliability, System, load_system
from paleo.units import DAY, KILO

#: Between RSC-2 (2.3) and OPT-175B (16.1 failures per thousand node-days); near Llama 3 (3.8) and BLOOM (3.0).
USUAL = Reliability.model_construct(
    failures=4.0 / (KILO * DAY),
    low=2.0 / (KILO * DAY),
    high=16.0 / (KILO * DAY),
    source="the usual rate of tended clusters of GPUs: published runs lie between 2.3 and 16 per thousand node-days",
)


def reliability_of(system: System) -> Reliability:
    """Return how often a node of a system fails, from the most similar system that is known.

    The order is: the system's own file, catalog systems with its device, systems with a device of its architecture, and
    the `USUAL` rate. What is inherited is the geometric mean, in a range that holds all of them and the usual rate,
    because clusters of one kind of machine differ as much as clusters of different kinds.

    Parameters
    ----------
    system : System
        The system.

    Returns
    -------
    Reliability
        Failures per node and second, with a 90 % range.
    """
    if system.reliability is not None:
        return system.reliability
    known = _systems_with_failures()
    for relatives, words in (
        ([other for other in known if other.device.name == system.device.name], system.device.name),
        ([other for other in known if other.device.architecture == system.device.architecture], "its architecture"),
    ):
        if relatives:
            return _inherited(relatives, words)
    return USUAL


def _inherited(systems: list[System], words: str) -> Reliability:
    stated = [system.reliability for system in systems if system.reliability is not None]
    mean = math.exp(sum(math.log(entry.failures) for entry in stated) / len(stated))
    return Reliability.model_construct(
        failures=mean,
        low=min(USUAL.low, *(entry.low for entry in stated)),
        high=max(USUAL.high, *(entry.high for entry in stated)),
        source=f"of other systems with {words}: {', '.join(system.name for system in systems)}",
    )


@cache
def _systems_with_failures() -> list[System]:
    """Systems of the catalog whose files state failures; a look into the text spares reading all the others."""
    stating = [name for name, path in entries("systems").items() if "\nreliability:" in path.read_text("utf-8")]
    return [load_system(name) for name in stating]


def nodes_of(system: System, gpus: int) -> int:
    """Count the machines that a job occupies.

    Parameters
    ----------
    system : System
        The system.
    gpus : int
        Devices of the job.

    Returns
    -------
    int
        Nodes, or hosts where one NVLink domain joins several.

    Examples
    --------
    >>> nodes_of(load_system("dgx-h100"), 20), nodes_of(load_system("gb200-nvl72"), 72)
    (3, 18)
    """
    return math.ceil(gpus / (system.devices_per_host or system.devices_per_node))
