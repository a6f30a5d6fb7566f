"""Which calibration prices a run: the bare roofline, Paleo's constants, or measured parameters of the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paleo.errors import SpecError


@dataclass(frozen=True, slots=True)
class Rates:
    """Constant efficiencies: shares of the datasheet's peaks that computation and links reach, and a launch floor [s].

    ``combine`` says whether arithmetic and memory traffic of a kernel overlap (max) or add up (the original Paleo).
    ``latency`` False drops the alpha of links, as the original did.
    """

    name: str
    compute: float = 1.0
    memory: float = 1.0
    link: float | None = None
    launch: float = 0.0
    combine: Literal["max", "sum"] = "max"
    latency: bool = True
    low: float = 1.0
    high: float = 2.0


IDEAL = Rates("ideal", link=1.0)
#: Systolic arrays that no kernel was timed on: no family of GPU kernels carries over to one large core. Shares of the
#: matrix units as MaxText's published steps reach them (0.5 to 0.68 of peak as MFU), of memory as of HBM elsewhere, of
#: a link by the scaling book (ICI, 0.9).
COMPILED = Rates(
    "assumed for TPUs: 0.7 of the matrix units, 0.85 of memory, 0.9 of a link", 0.7, 0.85, 0.9, low=0.65, high=1.6
)


def constants(device_kind: str, text: str) -> Rates | None:
    """The constants that a calibration asks for, or that ``auto`` means on devices without any measured family."""
    return COMPILED if text == "auto" and device_kind == "tpu" else rates(text)


def rates(text: str) -> Rates | None:
    """``ideal`` or ``ppp=0.6`` / ``ppp=0.6,0.75`` (computation, communication); None for anything else.

    >>> rates("ppp=0.62,0.72").link
    0.72
    """
    if text == "ideal":
        return IDEAL
    if not text.startswith("ppp="):
        return None
    parts = text.removeprefix("ppp=").split(",")
    try:
        values = [float(part) for part in parts]
    except ValueError:
        values = []
    if not 1 <= len(values) <= 2 or not all(0 < value <= 1 for value in values):
        raise SpecError(
            f"calibration {text!r}: expected one or two percentages of peak above 0 and up to 1, such as ppp=0.62,0.72"
        )
    return Rates(text, values[0], values[0], values[-1], combine="sum", latency=False)
