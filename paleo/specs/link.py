"""Links as their makers describe them, in SI units, with sources.

Bandwidth is per direction. Measured values are in calibrations. The one exception is ``achieved_fraction``, which is
stated here beside its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from paleo.specs.catalog import read_entry
from paleo.specs.loading import NOT_STATED, FileCache, Spec, Text, validate
from paleo.units import BytesPerSecond, Seconds

Fraction = Annotated[float, Field(strict=True, gt=0, le=1)]
LinkKind = Literal[
    "pcie", "nvlink", "nvswitch", "infinity_fabric", "ici", "qpi", "ethernet", "infiniband", "efa", "slingshot", "other"
]


class Link(Spec):
    """One link: bandwidth per direction [byte/s] and one-way latency of a small message [s].

    ``scope`` says what counts as one link (a port, all NVLinks of one GPU, …). ``achieved_fraction`` is the fraction of
    the bandwidth that large messages reach. ``in_switch_bandwidth`` is the published bus bandwidth [byte/s] of large
    all-reduces that the switches add up; it bounds groups of any size. ``stated_latency`` is the latency that
    calibrated times of the link contain. It is that of the base entry of a chain of ``extend:``; no file states it
    directly.
    """

    name: Text
    kind: LinkKind
    scope: Text
    bandwidth: BytesPerSecond
    achieved_fraction: Fraction | None = None
    achieved_source: Text | None = None
    in_switch_bandwidth: BytesPerSecond | None = None
    latency: Seconds | None = None
    latency_source: Text | None = None
    stated_latency: Annotated[Seconds | None, Field(exclude=True)] = None
    notes: Text | None = None
    source: Text = NOT_STATED


def load_link(name_or_path: str | Path) -> Link:
    """Load a link by catalog name or path.

    Parameters
    ----------
    name_or_path : str | Path
        Entry of the catalog, or a YAML file.

    Returns
    -------
    Link
        The link.

    Raises
    ------
    SpecError
        If there is no such entry or the file is not valid.
    """
    return _links(name_or_path)


def _link(name_or_path: str | Path) -> Link:
    path, data = read_entry("links", name_or_path)
    return validate(Link, {"name": path.stem, **data}, path)


_links = FileCache(_link)
