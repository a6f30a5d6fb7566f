"""Gradients in fewer bits: narrower formats that sum on the wire, quantised values that ranks decode, and ZeRO++."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paleo.compression.base import (
    COMPRESSIONS,
    VALUE_BYTES,
    Array,
    Coding,
    Compression,
    Message,
    Numeric,
    SummedGradient,
    no_argument,
    number_argument,
)

#: Elements that share one fp32 scale, in formats with few exponents.
_BLOCK = 256.0
_SCALE_BYTES = 4.0


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
        scales = _SCALE_BYTES / _BLOCK * self.scaled
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


@dataclass(frozen=True, slots=True)
class Quantised:
    """Gradients of ``bits`` an element, all tensors as one flat buffer.

    ``warm_up`` is the share of the steps, the first ones, that are dense. ``feedback`` counts fp32 values an element
    that remember what coding lost, on the worker and on the owner of a part; ``norm``: a pass finds the scale first.
    """

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
        """Count the work to scale and pack.

        With ``feedback`` each line of Tang et al.'s algorithm 1 is an operation of the framework on fp32 values (of
        momentum and error): sum with the error, norm, scaled signs, new error, bits.
        """
        packed = gradient.elements * self.bits / 8.0
        if not self.feedback:
            return Coding.of(gradient.bytes * (1.0 + self.norm), packed, launches=1.0 + self.norm)
        return _coded_with_error(gradient.elements, packed)

    def decode(self, gradient: SummedGradient) -> Coding:
        """Count the work to unpack: the owner sums and packs its part, then every rank unpacks the whole.

        With ``feedback`` the values are fp32 and another operation scales them.
        """
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
    """Count reads and writes of five passes over fp32 values.

    Value and error are added, the sum's norm is taken, its signs are scaled, what they miss is the new error, and they
    are packed.
    """
    values = VALUE_BYTES * np.asarray(elements, dtype=np.float64)
    return Coding.of(7.0 * values, 3.0 * values + packed, launches=5.0)


@COMPRESSIONS.register("onebit")
def onebit(argument: str) -> Compression:
    """Build ``onebit`` or ``onebit:W``: signs with error feedback (1-bit SGD, 1-bit Adam and LAMB).

    A dense warm-up of a share W of all steps comes first, 0.15 to 0.25 for 1-bit Adam.
    """
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


#: Bytes of an element in the gather of the forward pass and in the scatter of gradients, and of the 16-bit copy.
_WEIGHT_BYTES, _GRADIENT_BYTES, _COPY_BYTES = 1.0, 0.5, 2.0


@dataclass(frozen=True, slots=True)
class _ZeroPlusPlus:
    """Messages of one pass over all parameters: gather forward, gather backward inside the node, two scatters."""

    summary = "8-bit gathers, 16-bit copies inside a node, 4-bit scatters of sharded training"
    reference = "Wang et al., ZeRO++, 2023"
    linear = False
    unbiased = False
    sharded = True

    def messages(self, gradient: SummedGradient) -> tuple[Message, ...]:
        elements = np.asarray(gradient.elements, dtype=np.float64)
        nodes_share = _GRADIENT_BYTES * elements / np.maximum(gradient.ranks_per_node, 1.0)
        return (
            Message("all_gather", _WEIGHT_BYTES * elements),
            Message("all_gather", _COPY_BYTES * elements, "node"),
            Message("all_to_all", _GRADIENT_BYTES * elements, "node"),
            Message("all_to_all", np.asarray(nodes_share), "across"),
        )

    def encode(self, gradient: SummedGradient) -> Coding:
        """Count the work to code a rank's shard of the parameters, and its gradients twice: before each all-to-all."""
        shard = gradient.elements / np.maximum(np.asarray(gradient.ranks, dtype=np.float64), 1.0)
        second = gradient.elements / np.maximum(np.asarray(gradient.ranks_per_node, dtype=np.float64), 1.0)
        read = _COPY_BYTES * shard + gradient.bytes + _COPY_BYTES * second
        written = _WEIGHT_BYTES * shard + _GRADIENT_BYTES * (gradient.elements + second)
        return Coding.of(read, written, launches=3.0 * gradient.tensors)

    def decode(self, gradient: SummedGradient) -> Coding:
        """Gathered parameters are widened, gradients summed behind each all-to-all."""
        elements = np.asarray(gradient.elements, dtype=np.float64)
        second = elements / np.maximum(np.asarray(gradient.ranks_per_node, dtype=np.float64), 1.0)
        read = _WEIGHT_BYTES * elements + _GRADIENT_BYTES * (elements + second)
        written = _COPY_BYTES * (elements + second)
        return Coding.of(read, written, launches=3.0 * gradient.tensors)

    def state(self, gradient: SummedGradient) -> Array:
        """Return the bytes of the second shard."""
        return np.asarray(_COPY_BYTES * np.asarray(gradient.elements) / np.maximum(gradient.ranks_per_node, 1.0))


@COMPRESSIONS.register("zeropp")
def zeropp(argument: str) -> Compression:
    """``zeropp``: for zero=3."""
    no_argument("zeropp", argument)
    return _ZeroPlusPlus()
