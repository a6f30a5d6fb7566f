"""Sums in a narrower format: gradients are cast, summed on the wire, and cast back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.compression.base import COMPRESSIONS, Coding, Message, no_argument

if TYPE_CHECKING:
    from paleo.compression.base import Array, Compression, SummedGradient

#: Elements that share one fp32 scale, in formats with few exponents.
BLOCK = 256.0
SCALE_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class Cast:
    """``bytes_per_element`` on the wire, with one fp32 scale a block where ``scaled``."""

    name: str
    bytes_per_element: float
    scaled: bool
    reference = "Micikevicius et al., Mixed precision training, ICLR 2018"
    linear = True
    unbiased = True
    sharded = False

    @property
    def summary(self) -> str:
        """What the method does, in a few words."""
        return f"gradients are summed in {self.name}"

    def messages(self, gradient: SummedGradient) -> tuple[Message, ...]:
        scales = SCALE_BYTES / BLOCK * self.scaled
        return (Message("all_reduce", np.asarray(gradient.elements * (self.bytes_per_element + scales))),)

    def encode(self, gradient: SummedGradient) -> Coding:
        reads = 1.0 + self.scaled  # the largest of each block comes first
        return Coding.of(reads * gradient.bytes, gradient.elements * self.bytes_per_element, launches=1.0 + self.scaled)

    def decode(self, gradient: SummedGradient) -> Coding:
        return Coding.of(gradient.elements * self.bytes_per_element, gradient.bytes)

    def state(self, gradient: SummedGradient) -> Array:
        return np.zeros(np.shape(gradient.elements))


def _register(name: str, bytes_per_element: float, *, scaled: bool) -> None:
    @COMPRESSIONS.register(name)
    def method(argument: str) -> Compression:
        no_argument(name, argument)
        return Cast(name, bytes_per_element, scaled)


_register("fp16", 2.0, scaled=False)
_register("bf16", 2.0, scaled=False)
_register("fp8", 1.0, scaled=True)
_register("int8", 1.0, scaled=True)
