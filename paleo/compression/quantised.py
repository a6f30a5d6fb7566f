"""A few bits an element: every rank decodes, sums and codes again the part that it owns, then all gather the parts.

An all-to-all of m b / 8 bytes brings each rank its part from all others, an all-gather of as many hands the sums round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from paleo.compression.base import (
    COMPRESSIONS,
    VALUE_BYTES,
    Coding,
    Message,
    no_argument,
    number_argument,
)

if TYPE_CHECKING:
    from paleo.compression.base import (
        Array,
        Compression,
        Numeric,
        SummedGradient,
    )


@dataclass(frozen=True, slots=True)
class Quantised:
    """``bits`` an element, all tensors as one flat buffer. ``warm_up``: share of the steps, the first ones, that go
    dense. ``feedback``: fp32 values an element that remember what coding lost, on the worker and on the owner of a
    part; ``norm``: whether a pass finds the scale first."""

    name: str
    bits: float
    feedback: bool
    norm: bool
    unbiased: bool
    reference: str
    warm_up: float = 0.0
    linear = False
    sharded = False

    @property
    def summary(self) -> str:
        """What the method does, in a few words."""
        return f"{self.bits:g} bits an element, decoded and summed by the owner of each part"

    def messages(self, gradient: SummedGradient) -> tuple[Message, ...]:
        payload = np.asarray(gradient.elements * self.bits / 8.0)
        return Message("all_to_all", payload), Message("all_gather", payload)

    def encode(self, gradient: SummedGradient) -> Coding:
        """Scale and packing; with ``feedback`` each line of Tang et al.'s algorithm 1 is an operation of the framework
        on fp32 values (of momentum and error): sum with the error, norm, scaled signs, new error, bits."""
        packed = gradient.elements * self.bits / 8.0
        if not self.feedback:
            return Coding.of(gradient.bytes * (1.0 + self.norm), packed, launches=1.0 + self.norm)
        return _coded_with_error(gradient.elements, packed)

    def decode(self, gradient: SummedGradient) -> Coding:
        """The owner unpacks what all ranks sent of its part, sums and packs it; every rank unpacks the whole, with
        ``feedback`` in fp32 and scaled by an operation of its own."""
        packed = gradient.elements * self.bits / 8.0
        part = gradient.elements / np.maximum(gradient.ranks, 1.0)
        if not self.feedback:
            return Coding.of(2.0 * packed + VALUE_BYTES * part, VALUE_BYTES * part + gradient.bytes, launches=3.0)
        values = VALUE_BYTES * np.asarray(gradient.elements, dtype=np.float64)
        unpacked = Coding.of(packed + values, values + VALUE_BYTES * part, launches=2.0)
        whole = Coding.of(packed + values, 2.0 * values, launches=2.0)
        return unpacked + _coded_with_error(part, part * self.bits / 8.0) + whole

    def state(self, gradient: SummedGradient) -> Array:
        own_part = 1.0 + 1.0 / np.maximum(np.asarray(gradient.ranks, dtype=np.float64), 1.0)
        return np.asarray(VALUE_BYTES * gradient.elements * own_part * self.feedback)


def _coded_with_error(elements: Numeric, packed: Numeric) -> Coding:
    """Reads and writes of five passes over fp32 values: value and error are added, the sum's norm is taken, its signs
    are scaled, what they miss is the new error, and they are packed."""
    values = VALUE_BYTES * np.asarray(elements, dtype=np.float64)
    return Coding.of(7.0 * values, 3.0 * values + packed, launches=5.0)


@COMPRESSIONS.register("onebit")
def onebit(argument: str) -> Compression:
    """``onebit`` or ``onebit:W``: signs with error feedback (1-bit SGD, 1-bit Adam and LAMB), behind a dense warm-up of
    a share W of all steps, 0.15 to 0.25 for 1-bit Adam."""
    warm_up = number_argument("onebit", argument, "the share of dense steps", 0.0, 1.0) if argument else 0.0
    source = "Seide et al., Interspeech 2014; Tang et al., 1-bit Adam, ICML 2021"
    return Quantised("onebit", 1.0, feedback=True, norm=False, unbiased=False, reference=source, warm_up=warm_up)


@COMPRESSIONS.register("qsgd")
def qsgd(argument: str) -> Compression:
    """``qsgd:B``: B bits, rounded at random."""
    bits = number_argument("qsgd", argument, "the bits of an element", 2.0, 16.0)
    source = "Alistarh et al., QSGD, NIPS 2017"
    return Quantised("qsgd", bits, feedback=False, norm=True, unbiased=True, reference=source)


@COMPRESSIONS.register("terngrad")
def terngrad(argument: str) -> Compression:
    """``terngrad``: −1, 0 or 1, rounded at random, in two bits."""
    no_argument("terngrad", argument)
    source = "Wen et al., TernGrad, NIPS 2017"
    return Quantised("terngrad", 2.0, feedback=False, norm=True, unbiased=True, reference=source)
