"""Kernels: the FLOP, bytes and shape of one launch, with no clock in sight.

FLOP are those of contractions, 1 multiply-add = 2 FLOP (the convention of MFU and of torch's flop counter); the
arithmetic of element-wise passes is kept apart as ``vector_flops``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from paleo.operations.kinds import KINDS, Kind

Phase = Literal["forward", "backward", "backward_weight", "update"]


Family = Literal["gemm", "conv", "attention", "memory", "rnn"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch on one device: what it computes and moves, and the shape that its price depends on.

    ``shape`` holds the family's own numbers: gemm (m, n, k, batch), conv (n, c, h, w, k, …), attention (batch, heads,
    …), memory (rows, columns). ``operation`` is the variant within the family. Counts are floats: a rank's share may be
    uneven.
    """

    name: str
    family: Family
    operation: str
    phase: Phase
    flops: float
    vector_flops: float
    bytes_read: float
    bytes_written: float
    shape: Mapping[str, float] = field(default_factory=dict)
    #: Calls of the host: below 1 for the kernels of one operation's backward pass, which come out of one call of the
    #: framework; above 1 where many small launches, one a tensor, are counted as one kernel.
    calls: float = 1.0
    #: Experts of a mixture that it works for: a product of each, or tokens on their way to them and back.
    experts: float = 0.0

    def __post_init__(self) -> None:
        if self.family == "memory":
            _ = self.kind

    @property
    def kind(self) -> Kind:
        """The kind of a pass over memory; SpecError, with the nearest names, where it is not registered."""
        return KINDS[self.operation]

    @property
    def bytes(self) -> float:
        return self.bytes_read + self.bytes_written


def flat_pass(
    name: str,
    operation: str,
    phase: Phase,
    count: float,
    read: float,
    written: float,
    *,
    flops: float | None = None,
    calls: float = 1.0,
) -> Kernel:
    """One pass over ``count`` elements in no rows, of ``read`` and ``written`` bytes; ``flops`` of ordinary cores, one
    an element where nothing else is said."""
    work = count if flops is None else flops
    return Kernel(name, "memory", operation, phase, 0.0, work, read, written, {"rows": count, "columns": 1.0}, calls)


def accumulation(name: str, count: float, size: float) -> Kernel:
    """A gradient of ``count`` elements, ``size`` bytes, added to one that is there: two are read, one is written."""
    return flat_pass(f"{name}.accumulate", "elementwise", "backward", count, 2.0 * size, size)
