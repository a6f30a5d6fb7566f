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
    communicators. ``fragmentation``: what the framework's allocator holds beside its tensors while there is room, as a
    share of them; it gives that back before it runs out, so that it is no part of the total.

    >>> shown = Footprint(6.0, 2.0, 4.0, 5.0, 2.0, 1.0, 0.125, capacity=20.5)
    >>> shown.allocated, shown.cached, shown.used, shown.fits
    (18.0, 19.5, 20.5, True)
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    workspace: float
    reserved: float
    fragmentation: float
    capacity: float

    @property
    def parts(self) -> dict[str, float]:
        """What the total is made of."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def allocated(self) -> float:
        """What the framework's allocator hands out (torch.cuda.max_memory_allocated)."""
        return self.total - self.reserved

    @property
    def cached(self) -> float:
        """What it reserves (torch.cuda.max_memory_reserved): no more than the device has left, unless the tensors alone
        are more than that."""
        return max(self.allocated, min(self.allocated * (1.0 + self.fragmentation), self.capacity - self.reserved))

    @property
    def used(self) -> float:
        """What the device's driver shows (nvidia-smi): context and communicators, too."""
        return self.cached + self.reserved

    @property
    def fits(self) -> bool:
        return self.total <= self.capacity
