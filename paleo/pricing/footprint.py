"""What a rank must hold in memory at the peak of a step, part by part [bytes]."""

from __future__ import annotations

from dataclasses import dataclass

#: What fills the memory.
PARTS = ("parameters", "gradients", "optimizer", "activations", "workspace")


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the fullest device at the end of the forward pass, when most activations live.

    ``workspace`` is the largest temporary: two copies of the largest activation (a gradient and its successor),
    communication buckets, and what is ``reserved``, which no tensor gets: the context of the process and buffers of its
    communicators.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    reserved: float
    capacity: float

    @property
    def parts(self) -> dict[str, float]:
        """What the total is made of."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def tensors(self) -> float:
        """What the framework's allocator hands out, and counts."""
        return self.total - self.reserved

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity
