"""What a system states about its hosts: their links to the devices, memory, storage and cores."""

from __future__ import annotations

from paleo.errors import SpecError
from paleo.specs.hardware import System, load_link


def link_rate(system: System) -> float:
    """What a device and its host send each other, each way [byte/s]: its PCIe lanes at the share that copies reach."""
    device = system.device
    if device.pcie is None:
        raise SpecError(f"device {device.name}: pcie is not stated, so the time of copies to the host is not known")
    link = load_link(f"pcie{device.pcie.generation}-x16")
    return link.bandwidth * (link.achieved_fraction or 1.0) * device.pcie.lanes / 16


def host_figure(system: System, key: str, instead: str = "") -> float:
    """A figure of the system's host, for a node; SpecError where it is not stated."""
    value = None if system.host is None else getattr(system.host, key)
    if value is None:
        raise SpecError(f"system {system.name}: host.{key} is not stated; state it in its file{instead}")
    return float(value)
