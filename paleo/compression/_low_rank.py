"""Factors in place of matrices: PowerSGD's low-rank ones, and the exact factors of fully connected layers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paleo.compression.base import (
    COMPRESSIONS,
    VALUE_BYTES,
    Array,
    Coding,
    Compression,
    Message,
    SummedGradient,
    no_argument,
    number_argument,
)


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """One step of a power iteration of ``rank`` r: P = M Q is summed and orthogonalised, Q = Mᵀ P is summed.

    Vectors stay dense. It takes 4 r a b FLOP, 2 r (a + b) values on the wire of two all-reduces, and error feedback.
    """

    rank: float
    reference = "Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019"
    linear = True
    unbiased = False
    sharded = False

    @property
    def summary(self) -> str:
        """What the method does, in a few words."""
        return f"matrices of gradients as factors of rank {self.rank:g}"

    def messages(self, gradient: SummedGradient) -> tuple[Message, ...]:
        """Two all-reduces of the factors, (a and b sides), with the vectors in the first."""
        factors = self._factors(gradient)
        vectors = (gradient.elements - np.asarray(gradient.matrix_elements)) * gradient.width
        return Message("all_reduce", np.asarray(factors / 2.0 + vectors)), Message("all_reduce", factors / 2.0)

    def encode(self, gradient: SummedGradient) -> Coding:
        """M Q and Mᵀ P read the matrix each; the error is added before and kept behind."""
        matrix = VALUE_BYTES * np.asarray(gradient.matrix_elements, dtype=np.float64)
        flops = 4.0 * self.rank * gradient.matrix_elements + 2.0 * self.rank**2 * gradient.matrix_sides
        return Coding.of(4.0 * matrix, 2.0 * matrix, flops=flops, launches=4.0 * gradient.tensors)

    def decode(self, gradient: SummedGradient) -> Coding:
        """P Qᵀ is written, the error is what is left."""
        matrix = VALUE_BYTES * np.asarray(gradient.matrix_elements, dtype=np.float64)
        flops = 2.0 * self.rank * gradient.matrix_elements
        return Coding.of(matrix, 2.0 * matrix, flops=flops, launches=np.asarray(gradient.tensors))

    def state(self, gradient: SummedGradient) -> Array:
        return np.asarray(VALUE_BYTES * np.asarray(gradient.matrix_elements) + self._factors(gradient))

    def _factors(self, gradient: SummedGradient) -> Array:
        largest = np.asarray(gradient.matrix_elements, dtype=np.float64)
        return VALUE_BYTES * np.minimum(self.rank * np.asarray(gradient.matrix_sides, dtype=np.float64), largest)


@dataclass(frozen=True, slots=True)
class SufficientFactors:
    """Factors of the gradient of a fully connected layer: activations and output gradients, B samples a rank.

    Ranks gather both, B (a + b) values, and multiply them. It pays where P B (a + b) < 2 a b; other layers stay as they
    are.
    """

    reference = "Xie et al., Distributed machine learning via sufficient factor broadcasting, 2015; Poseidon, ATC 2017"
    summary = "activations and output gradients of fully connected layers are gathered instead of their gradient"
    linear = False
    unbiased = True
    sharded = False

    def messages(self, gradient: SummedGradient) -> tuple[Message, ...]:
        pays = self._pays(gradient)
        dense_bytes = (gradient.elements - np.where(pays, gradient.dense_elements, 0.0)) * gradient.width
        factors = gradient.ranks * gradient.samples * np.asarray(gradient.dense_sides) * gradient.width
        return Message("all_reduce", np.asarray(dense_bytes)), Message("all_gather", np.where(pays, factors, 0.0))

    def encode(self, gradient: SummedGradient) -> Coding:
        return Coding.of(np.zeros(np.shape(gradient.bytes)), 0.0, launches=0.0)

    def decode(self, gradient: SummedGradient) -> Coding:
        """Count the work to rebuild the gradient from all ranks' factors: 2 P B a b FLOP."""
        flops = 2.0 * gradient.ranks * gradient.samples * np.asarray(gradient.dense_elements)
        read = gradient.ranks * gradient.samples * np.asarray(gradient.dense_sides) * gradient.width
        written = np.asarray(gradient.dense_elements) * gradient.width
        pays = self._pays(gradient)
        return Coding.of(*(np.where(pays, each, 0.0) for each in (read, written)), flops=np.where(pays, flops, 0.0))

    def state(self, gradient: SummedGradient) -> Array:
        return np.zeros(np.shape(gradient.bytes))

    def _pays(self, gradient: SummedGradient) -> npt.NDArray[np.bool_]:
        spent = gradient.ranks * gradient.samples * np.asarray(gradient.dense_sides, dtype=np.float64)
        return np.asarray(spent < 2.0 * np.asarray(gradient.dense_elements))


@COMPRESSIONS.register("powersgd")
def powersgd(argument: str) -> Compression:
    """``powersgd:R``."""
    return PowerSGD(number_argument("powersgd", argument, "the rank of the factors", 1.0, 1023.0, whole=True))


@COMPRESSIONS.register("factors")
def factors(argument: str) -> Compression:
    """``factors``."""
    no_argument("factors", argument)
    return SufficientFactors()
