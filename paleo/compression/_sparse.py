"""The largest elements alone: values with their indices, gathered from all ranks, or summed as they go.

Of P ranks that each send a density d of the elements, their union holds u = 1 − (1 − d)^P of them where ranks choose
independently (the worst case). SparCML sums sparse vectors by recursive doubling, or splits them among ranks and
gathers the sums; either goes on densely from the round on in which indices cost more than they save.

References: Lin et al., Deep gradient compression, ICLR 2018; Renggli et al., SparCML, SC 2019; Shi et al., gTop-k,
ICDCS 2019; Li and Hoefler, Ok-Topk, PPoPP 2022.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from paleo.compression.base import (
    COMPRESSIONS,
    INDEX_BYTES,
    VALUE_BYTES,
    Array,
    Coding,
    Compression,
    Message,
    Numeric,
    SummedGradient,
    number_argument,
    wire_bytes,
)

_PAIR_BYTES = VALUE_BYTES + INDEX_BYTES


def union_density(density: Numeric, ranks: Numeric) -> Array:
    """Share of elements that at least one of ``ranks`` sends: 1 − (1 − d)^P.

    >>> float(union_density(0.01, 64.0).round(4))
    0.4744
    """
    return np.asarray(-np.expm1(np.asarray(ranks) * np.log1p(-np.minimum(np.asarray(density), 1.0 - 2.0**-52))))


def _entry_bytes(density: Numeric) -> Array:
    """Bytes of a vector an element of its full length, sparse or dense, whichever is less."""
    return np.asarray(np.minimum(_PAIR_BYTES * np.asarray(density), VALUE_BYTES))


def doubling_bytes(density: Numeric, ranks: Numeric) -> Array:
    """Return the bytes that a rank sends an element of the gradient in recursive doubling.

    In ⌈log₂ P⌉ rounds it sends the union of 1, 2, 4, … ranks, dense from the round on where that is less.
    """
    ranks = np.asarray(ranks, dtype=np.float64)
    rounds = np.ceil(np.log2(np.maximum(ranks, 1.0)))
    sent = np.zeros(np.broadcast_shapes(np.shape(density), ranks.shape))
    for number in range(int(np.max(rounds, initial=0.0))):
        sent = sent + np.where(number < rounds, _entry_bytes(union_density(density, 2.0**number)), 0.0)
    return np.asarray(sent)


@dataclass(frozen=True, slots=True)
class _Sparse:
    """Gradients of a ``density`` of the elements, chosen by size.

    ``momentum``: velocity and momentum are saved and corrected with what was not sent (DGC), else only the remainder
    is.
    """

    name: str
    density: float
    momentum: bool
    reference: str
    linear = False
    unbiased = False
    sharded = False

    @property
    def summary(self) -> str:
        """What the method does, in a few words."""
        return f"the largest {self.density:g} of the elements, with their indices"

    def schemes(self, gradient: SummedGradient) -> dict[str, tuple[Message, ...]]:
        """Return the ways to sum sparse gradients, as payloads of an all-gather; a rank sends (P - 1) / P of it.

        They are: all entries gathered; split among ranks and the sums gathered; recursive doubling (SparCML).
        """
        ranks, elements = np.asarray(gradient.ranks, dtype=np.float64), np.asarray(gradient.elements)
        pairs = _PAIR_BYTES * self.density * elements
        sums = np.asarray(_entry_bytes(union_density(self.density, ranks)) * elements)
        share = np.divide(ranks, ranks - 1.0, out=np.zeros_like(ranks), where=ranks > 1.0)
        doubled = np.asarray(doubling_bytes(self.density, ranks) * elements * share)
        return {
            "gather all": (Message("all_gather", np.asarray(pairs * ranks)),),
            "split and gather": (Message("all_to_all", np.asarray(pairs)), Message("all_gather", sums)),
            "recursive doubling": (Message("all_gather", doubled),),
        }

    def messages(self, gradient: SummedGradient) -> tuple[Message, ...]:
        """Return the cheapest of the schemes, by the bytes that a rank sends."""
        schemes = self.schemes(gradient)
        sent = np.stack(np.broadcast_arrays(*(wire_bytes(messages, gradient) for messages in schemes.values())))
        gathered = np.stack(np.broadcast_arrays(*(messages[-1].payload for messages in schemes.values())))
        best = np.argmin(sent, axis=0)
        pairs = np.where(best == 1, schemes["split and gather"][0].payload, 0.0)
        return Message("all_to_all", pairs), Message("all_gather", np.take_along_axis(gathered, best[None], 0)[0])

    def encode(self, gradient: SummedGradient) -> Coding:
        """Momentum and velocity are read and written, a threshold is found on a sample, and entries are selected."""
        kept = VALUE_BYTES * gradient.elements * (2.0 if self.momentum else 1.0)
        chosen = _PAIR_BYTES * self.density * gradient.elements
        read = gradient.bytes + kept + VALUE_BYTES * gradient.elements
        return Coding.of(read, kept + chosen, launches=4.0 + 2.0 * self.momentum, calls=gradient.matrices)

    def decode(self, gradient: SummedGradient) -> Coding:
        """Entries of all ranks, or their sums, are added into an empty gradient."""
        ranks = np.asarray(gradient.ranks, dtype=np.float64)
        entries = np.minimum(ranks * self.density, union_density(self.density, ranks) + self.density)
        moved = _PAIR_BYTES * entries * gradient.elements
        return Coding.of(moved, gradient.bytes + moved, launches=2.0)

    def state(self, gradient: SummedGradient) -> Array:
        return np.asarray(VALUE_BYTES * gradient.elements * (2.0 if self.momentum else 1.0))


@dataclass(frozen=True, slots=True)
class GlobalTopK:
    """Largest entries of all ranks: each of log₂ P rounds merges two choices and selects anew.

    So a message never grows: 2 k log₂ P pairs.
    """

    density: float
    reference = "Shi et al., gTop-k, ICDCS 2019"
    linear = False
    unbiased = False
    sharded = False

    @property
    def summary(self) -> str:
        """What the method does, in a few words."""
        return f"the largest {self.density:g} of all ranks' elements"

    def messages(self, gradient: SummedGradient) -> tuple[Message, ...]:
        ranks = np.maximum(np.asarray(gradient.ranks, dtype=np.float64), 1.0)
        pairs = _PAIR_BYTES * self.density * np.asarray(gradient.elements)
        # as an all-gather's payload, of which a rank sends (P - 1) / P
        share = np.divide(ranks, ranks - 1.0, out=np.zeros_like(ranks), where=ranks > 1.0)
        return (Message("all_gather", np.asarray(2.0 * pairs * np.ceil(np.log2(ranks)) * share)),)

    def encode(self, gradient: SummedGradient) -> Coding:
        kept = VALUE_BYTES * gradient.elements
        read = gradient.bytes + kept + VALUE_BYTES * gradient.elements
        return Coding.of(read, kept, launches=4.0, calls=gradient.matrices)

    def decode(self, gradient: SummedGradient) -> Coding:
        rounds = np.ceil(np.log2(np.maximum(gradient.ranks, 1.0)))
        chosen = _PAIR_BYTES * self.density * gradient.elements
        return Coding.of(2.0 * rounds * chosen, gradient.bytes + rounds * chosen, launches=1.0 + 2.0 * rounds)

    def state(self, gradient: SummedGradient) -> Array:
        return np.asarray(VALUE_BYTES * np.asarray(gradient.elements, dtype=np.float64))


def _density(name: str, argument: str) -> float:
    return number_argument(name, argument, "the share of elements that is sent", 1e-7, 1.0)


@COMPRESSIONS.register("topk")
def topk(argument: str) -> Compression:
    """``topk:D``: a density D, what is left out is added to the next gradient."""
    return _Sparse("topk", _density("topk", argument), momentum=False, reference="Renggli et al., SparCML, SC 2019")


@COMPRESSIONS.register("dgc")
def dgc(argument: str) -> Compression:
    """``dgc:D``: deep gradient compression, with momentum correction."""
    return _Sparse("dgc", _density("dgc", argument), momentum=True, reference="Lin et al., DGC, ICLR 2018")


@COMPRESSIONS.register("gtopk")
def gtopk(argument: str) -> Compression:
    """``gtopk:D``: the global top-k."""
    return GlobalTopK(_density("gtopk", argument))
