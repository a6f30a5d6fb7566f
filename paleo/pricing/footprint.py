"""What a rank must hold in memory at the peak of a step, part by part [bytes]."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes on the fullest device at the end of the forward pass, when most activations live.

    ``workspace`` is the largest temporary: two copies of the largest activation (a gradient and its successor),
    communication buckets, and what the CUDA context and libraries take (``reserved``).
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    capacity: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity
