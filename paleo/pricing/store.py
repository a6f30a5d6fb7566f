"""Which calibration entry prices a family on a device: its own, else what its architecture inherits, else the formula's defaults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from paleo.pricing.parameters import from_mapping
from paleo.specs.calibration import Calibration, Entry, calibration_of, load_calibration
from paleo.specs.catalog import entries

P = TypeVar("P")
#: The file of what devices without measurements inherit.
ARCHITECTURES = "architectures"
#: Which way of timing says most of a kernel inside a running step: replayed graphs, then bare kernels, then calls.
STEP_STACKS = ("graph", "kernel", "back-to-back", "eager")
#: Interval of a prediction from the formula's defaults alone: nothing was measured.
UNMEASURED = (0.5, 2.0)


@dataclass(frozen=True, slots=True)
class Found(Generic[P]):
    """Parameters, where they come from (``measured``, ``inherited`` or ``default``), and the interval's factors by predicted time."""

    parameters: P
    origin: str
    subject: str
    interval: tuple[tuple[float, float, float], ...]

    def factors(self, predicted: float) -> tuple[float, float]:
        """Low and high factors for a predicted time [s]."""
        for up_to, low, high in self.interval:
            if predicted <= up_to:
                return low, high
        return self.interval[-1][1:]


def lookup(
    kind: type[P],
    *,
    subject: str,
    architecture: str,
    family: str,
    memory_kind: str = "",
    stacks: Sequence[str] = STEP_STACKS,
    own: Calibration | None = None,
) -> Found[P]:
    """Parameters of ``family`` for a device (or system): the first of ``stacks`` that it was measured in, else those of its
    architecture and kind of memory, else of the architecture, else the defaults of ``kind``. ``own`` is a user's calibration file."""
    for calibration in filter(None, (own, _shipped(subject))):
        for stack in stacks:
            for entry in calibration.entries:
                if entry.family == family and entry.stack == stack:
                    return _found(kind, entry, "measured", calibration.name)
    if ARCHITECTURES in entries("calibrations"):
        inherited = [e for e in load_calibration(ARCHITECTURES).entries if e.family == family and e.architecture == architecture]
        ranked = sorted(inherited, key=lambda e: (e.memory_kind != memory_kind, e.memory_kind is not None, _rank(e.stack, stacks)))
        fitting = [e for e in ranked if e.memory_kind in (None, memory_kind)]
        if fitting:
            return _found(kind, fitting[0], "inherited", architecture)
    return Found(kind(), "default", "formula", ((float("inf"), *UNMEASURED),))


def _rank(stack: str, stacks: Sequence[str]) -> int:
    return list(stacks).index(stack) if stack in stacks else len(stacks)


@cache
def _shipped(subject: str) -> Calibration | None:
    return calibration_of(subject)


def _found(kind: type[P], entry: Entry, origin: str, subject: str) -> Found[Any]:
    bins = tuple((one.up_to_s or float("inf"), one.low, one.high) for one in entry.interval)
    return Found(from_mapping(kind, entry.parameters, where=f"{subject}: {entry.family}"), origin, subject, bins)
