"""Gradient compression methods: PowerSGD, sufficient factors, narrow formats, quantisation, ZeRO++ and top-k."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from paleo.compression.base import (
    COMPRESSIONS,
    INDEX_BYTES,
    VALUE_BYTES,
    Array,
    CodingWork,
    CompressedCollective,
    Compression,
    Numeric,
    SummedGradient,
    check_no_argument,
    parse_number_argument,
    wire_bytes,
)

# Factors in place of matrices: PowerSGD's low-rank ones, and the exact factors of fully connected layers


@dataclass(frozen=True, slots=True)
class PowerSGD:
    """PowerSGD: low-rank factors of each gradient matrix, by one step of power iteration.

    P = M Q is summed over the ranks and orthogonalised, then Q = Mᵀ P is summed. For a matrix (a, b) and rank r this
    takes 4 r a b FLOP and two all-reduces of r (a + b) values together, with error feedback. Vectors are sent
    uncompressed.
    """

    rank: float
    reference = "Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019"
    sums_without_decoding = True
    is_unbiased = False
    replaces_zero3_collectives = False

    @property
    def summary(self) -> str:
        """Short description of the method, for tables."""
        return f"matrices of gradients as factors of rank {self.rank:g}"

    def collectives(self, gradient: SummedGradient) -> tuple[CompressedCollective, ...]:
        """Return the all-reduces of PowerSGD's two factors (with a and b rows); the first also carries the vectors."""
        factors = self._factors(gradient)
        vectors = (gradient.elements - np.asarray(gradient.matrix_elements)) * gradient.element_bytes
        return CompressedCollective("all_reduce", np.asarray(factors / 2.0 + vectors)), CompressedCollective(
            "all_reduce", factors / 2.0
        )

    def encoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work before the all-reduces: the products M Q and Mᵀ P, and the error feedback."""
        matrix = VALUE_BYTES * np.asarray(gradient.matrix_elements, dtype=np.float64)
        flops = 4.0 * self.rank * gradient.matrix_elements + 2.0 * self.rank**2 * gradient.matrix_side_sums
        return CodingWork.broadcast(4.0 * matrix, 2.0 * matrix, flops=flops, launches=4.0 * gradient.tensors)

    def decoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work after the all-reduces: the product P Qᵀ, and the writes of the result and of the new error."""
        matrix = VALUE_BYTES * np.asarray(gradient.matrix_elements, dtype=np.float64)
        flops = 2.0 * self.rank * gradient.matrix_elements
        return CodingWork.broadcast(matrix, 2.0 * matrix, flops=flops, launches=np.asarray(gradient.tensors))

    def state_bytes(self, gradient: SummedGradient) -> Array:
        return np.asarray(VALUE_BYTES * np.asarray(gradient.matrix_elements) + self._factors(gradient))

    def _factors(self, gradient: SummedGradient) -> Array:
        largest = np.asarray(gradient.matrix_elements, dtype=np.float64)
        return VALUE_BYTES * np.minimum(self.rank * np.asarray(gradient.matrix_side_sums, dtype=np.float64), largest)


@dataclass(frozen=True, slots=True)
class SufficientFactors:
    """Sufficient factor broadcasting: a fully connected layer's activations and output gradients replace its gradient.

    With B samples a rank, ranks gather B (a + b) values each and multiply them. The method is used where this sends
    fewer bytes, P B (a + b) < 2 a b. Elsewhere, and in other layers, the gradient is all-reduced.
    """

    reference = "Xie et al., Distributed machine learning via sufficient factor broadcasting, 2015; Poseidon, ATC 2017"
    summary = "activations and output gradients of fully connected layers are gathered instead of their gradient"
    sums_without_decoding = False
    is_unbiased = True
    replaces_zero3_collectives = False

    def collectives(self, gradient: SummedGradient) -> tuple[CompressedCollective, ...]:
        pays = self._pays(gradient)
        dense_bytes = (
            gradient.elements - np.where(pays, gradient.fully_connected_elements, 0.0)
        ) * gradient.element_bytes
        factors = (
            gradient.ranks
            * gradient.fully_connected_samples_per_rank
            * np.asarray(gradient.fully_connected_side_sums)
            * gradient.element_bytes
        )
        return CompressedCollective("all_reduce", np.asarray(dense_bytes)), CompressedCollective(
            "all_gather", np.where(pays, factors, 0.0)
        )

    def encoding_work(self, gradient: SummedGradient) -> CodingWork:
        return CodingWork.broadcast(np.zeros(np.shape(gradient.bytes)), 0.0, launches=0.0)

    def decoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work of rebuilding the gradient from all ranks' factors: 2 P B a b FLOP for a layer (a, b)."""
        flops = (
            2.0
            * gradient.ranks
            * gradient.fully_connected_samples_per_rank
            * np.asarray(gradient.fully_connected_elements)
        )
        read = (
            gradient.ranks
            * gradient.fully_connected_samples_per_rank
            * np.asarray(gradient.fully_connected_side_sums)
            * gradient.element_bytes
        )
        written = np.asarray(gradient.fully_connected_elements) * gradient.element_bytes
        pays = self._pays(gradient)
        return CodingWork.broadcast(
            *(np.where(pays, each, 0.0) for each in (read, written)), flops=np.where(pays, flops, 0.0)
        )

    def state_bytes(self, gradient: SummedGradient) -> Array:
        return np.zeros(np.shape(gradient.bytes))

    def _pays(self, gradient: SummedGradient) -> npt.NDArray[np.bool_]:
        """Return True where the gathered factors take fewer bytes than the all-reduced gradient."""
        spent = (
            gradient.ranks
            * gradient.fully_connected_samples_per_rank
            * np.asarray(gradient.fully_connected_side_sums, dtype=np.float64)
        )
        return np.asarray(spent < 2.0 * np.asarray(gradient.fully_connected_elements))


@COMPRESSIONS.register("powersgd")
def powersgd(argument: str) -> Compression:
    """Build the method ``powersgd:R``: PowerSGD with factors of rank R."""
    return PowerSGD(parse_number_argument("powersgd", argument, "the rank of the factors", 1.0, 1023.0, whole=True))


@COMPRESSIONS.register("factors")
def sufficient_factor_broadcasting(argument: str) -> Compression:
    """Build the method ``factors`` (sufficient factor broadcasting), which takes no argument."""
    check_no_argument("factors", argument)
    return SufficientFactors()


# Gradients in fewer bits: narrower formats that an all-reduce can sum, quantised values that ranks decode, and ZeRO++

#: Elements that share one fp32 scale in formats of narrow range (fp8, int8).
_BLOCK = 256.0
_SCALE_BYTES = 4.0


@dataclass(frozen=True, slots=True)
class NarrowFormatCast:
    """Gradients cast to a narrower number format of ``bytes_per_element``, in which the all-reduce sums.

    With ``has_block_scales`` each block of 256 elements has an fp32 scale.
    """

    name: str
    bytes_per_element: float
    has_block_scales: bool
    reference = "Micikevicius et al., Mixed precision training, ICLR 2018"
    sums_without_decoding = True
    is_unbiased = True
    replaces_zero3_collectives = False

    @property
    def summary(self) -> str:
        """Short description of the method, for tables."""
        return f"gradients are summed in {self.name}"

    def collectives(self, gradient: SummedGradient) -> tuple[CompressedCollective, ...]:
        scales = _SCALE_BYTES / _BLOCK * self.has_block_scales
        return (CompressedCollective("all_reduce", np.asarray(gradient.elements * (self.bytes_per_element + scales))),)

    def encoding_work(self, gradient: SummedGradient) -> CodingWork:
        reads = 1.0 + self.has_block_scales  # a first pass finds the largest value of each block
        return CodingWork.broadcast(
            reads * gradient.bytes, gradient.elements * self.bytes_per_element, launches=1.0 + self.has_block_scales
        )

    def decoding_work(self, gradient: SummedGradient) -> CodingWork:
        return CodingWork.broadcast(gradient.elements * self.bytes_per_element, gradient.bytes)

    def state_bytes(self, gradient: SummedGradient) -> Array:
        return np.zeros(np.shape(gradient.elements))


def _register(name: str, bytes_per_element: float, *, scaled: bool) -> None:
    @COMPRESSIONS.register(name)
    def method(argument: str) -> Compression:
        check_no_argument(name, argument)
        return NarrowFormatCast(name, bytes_per_element, scaled)


_register("fp16", 2.0, scaled=False)
_register("bf16", 2.0, scaled=False)
_register("fp8", 1.0, scaled=True)
_register("int8", 1.0, scaled=True)


@dataclass(frozen=True, slots=True)
class QuantisedGradients:
    """Gradients quantised to ``bits`` per element, all tensors in one flat buffer (1-bit Adam, QSGD, TernGrad).

    ``dense_warm_up_fraction`` is the fraction of training, at its start, that sends uncompressed gradients. With
    ``has_error_feedback`` fp32 error values are kept on the worker and on the rank that sums each part. With
    ``has_scale_pass`` an extra pass finds the scale.
    """

    name: str
    bits: float
    has_error_feedback: bool
    has_scale_pass: bool
    is_unbiased: bool
    reference: str
    dense_warm_up_fraction: float = 0.0
    sums_without_decoding = False
    replaces_zero3_collectives = False

    @property
    def summary(self) -> str:
        """Short description of the method, for tables."""
        return f"{self.bits:g} bits an element, decoded and summed by the owner of each part"

    def collectives(self, gradient: SummedGradient) -> tuple[CompressedCollective, ...]:
        payload = np.asarray(gradient.elements * self.bits / 8.0)
        return CompressedCollective("all_to_all", payload), CompressedCollective("all_gather", payload)

    def encoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work to scale and pack the gradient before it is sent.

        With ``has_error_feedback`` each line of Tang et al.'s algorithm 1 is one operation of the framework on fp32
        values (of momentum and error): sum with the error, norm, scaled signs, new error, packed bits.
        """
        packed = gradient.elements * self.bits / 8.0
        if not self.has_error_feedback:
            return CodingWork.broadcast(
                gradient.bytes * (1.0 + self.has_scale_pass), packed, launches=1.0 + self.has_scale_pass
            )
        return _coded_with_error(gradient.elements, packed)

    def decoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work to decode: each rank sums and packs one part of the gradient, then unpacks the whole sum.

        With ``has_error_feedback`` the values are fp32 and another operation scales them.
        """
        packed = gradient.elements * self.bits / 8.0
        part = gradient.elements / np.maximum(gradient.ranks, 1.0)
        if not self.has_error_feedback:
            return CodingWork.broadcast(
                2.0 * packed + VALUE_BYTES * part, VALUE_BYTES * part + gradient.bytes, launches=3.0
            )
        values = VALUE_BYTES * np.asarray(gradient.elements, dtype=np.float64)
        unpacked = CodingWork.broadcast(packed + values, values + VALUE_BYTES * part, launches=2.0)
        whole = CodingWork.broadcast(packed + values, 2.0 * values, launches=2.0)
        return unpacked + _coded_with_error(part, part * self.bits / 8.0) + whole

    def state_bytes(self, gradient: SummedGradient) -> Array:
        own_part = 1.0 + 1.0 / np.maximum(np.asarray(gradient.ranks, dtype=np.float64), 1.0)
        return np.asarray(VALUE_BYTES * gradient.elements * own_part * self.has_error_feedback)


def _coded_with_error(elements: Numeric, packed: Numeric) -> CodingWork:
    """Count the work to quantise fp32 values with error feedback, in five element-wise passes.

    The passes are: add the error, norm, scale the signs, new error, pack.
    """
    values = VALUE_BYTES * np.asarray(elements, dtype=np.float64)
    return CodingWork.broadcast(7.0 * values, 3.0 * values + packed, launches=5.0)


@COMPRESSIONS.register("onebit")
def onebit(argument: str) -> Compression:
    """Build the method ``onebit`` or ``onebit:W``: signs with error feedback (1-bit SGD, 1-bit Adam and LAMB).

    W is the fraction of all steps that are sent uncompressed and come first: 0.15 to 0.25 for 1-bit Adam.
    """
    warm_up = parse_number_argument("onebit", argument, "the share of dense steps", 0.0, 1.0) if argument else 0.0
    source = "Seide et al., Interspeech 2014; Tang et al., 1-bit Adam, ICML 2021"
    return QuantisedGradients(
        "onebit",
        1.0,
        has_error_feedback=True,
        has_scale_pass=False,
        is_unbiased=False,
        reference=source,
        dense_warm_up_fraction=warm_up,
    )


@COMPRESSIONS.register("qsgd")
def qsgd(argument: str) -> Compression:
    """Build the method ``qsgd:B``: B bits per element, with stochastic rounding."""
    bits = parse_number_argument("qsgd", argument, "the bits of an element", 2.0, 16.0)
    source = "Alistarh et al., QSGD, NIPS 2017"
    return QuantisedGradients(
        "qsgd", bits, has_error_feedback=False, has_scale_pass=True, is_unbiased=True, reference=source
    )


@COMPRESSIONS.register("terngrad")
def terngrad(argument: str) -> Compression:
    """Build the method ``terngrad``: −1, 0 or 1 in two bits, with stochastic rounding."""
    check_no_argument("terngrad", argument)
    source = "Wen et al., TernGrad, NIPS 2017"
    return QuantisedGradients(
        "terngrad", 2.0, has_error_feedback=False, has_scale_pass=True, is_unbiased=True, reference=source
    )


#: Bytes per element of ZeRO++: in the forward all-gather, in the gradients' all-to-all, and in the copy inside a node.
_WEIGHT_BYTES, _GRADIENT_BYTES, _COPY_BYTES = 1.0, 0.5, 2.0


@dataclass(frozen=True, slots=True)
class _ZeroPlusPlus:
    """ZeRO++: quantised collectives of ZeRO-3, for one pass over all parameters.

    The collectives are the forward all-gather, the backward all-gather within a node, and two all-to-alls of gradients.
    """

    summary = "8-bit gathers, 16-bit copies inside a node, 4-bit scatters of sharded training"
    reference = "Wang et al., ZeRO++, 2023"
    sums_without_decoding = False
    is_unbiased = False
    replaces_zero3_collectives = True

    def collectives(self, gradient: SummedGradient) -> tuple[CompressedCollective, ...]:
        elements = np.asarray(gradient.elements, dtype=np.float64)
        nodes_share = _GRADIENT_BYTES * elements / np.maximum(gradient.ranks_per_node, 1.0)
        return (
            CompressedCollective("all_gather", _WEIGHT_BYTES * elements),
            CompressedCollective("all_gather", _COPY_BYTES * elements, "node"),
            CompressedCollective("all_to_all", _GRADIENT_BYTES * elements, "node"),
            CompressedCollective("all_to_all", np.asarray(nodes_share), "across"),
        )

    def encoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work to quantise a rank's shard of the parameters, and its gradients before two all-to-alls."""
        shard = gradient.elements / np.maximum(np.asarray(gradient.ranks, dtype=np.float64), 1.0)
        second = gradient.elements / np.maximum(np.asarray(gradient.ranks_per_node, dtype=np.float64), 1.0)
        read = _COPY_BYTES * shard + gradient.bytes + _COPY_BYTES * second
        written = _WEIGHT_BYTES * shard + _GRADIENT_BYTES * (gradient.elements + second)
        return CodingWork.broadcast(read, written, launches=3.0 * gradient.tensors)

    def decoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work to dequantise gathered parameters and to sum gradients after each all-to-all."""
        elements = np.asarray(gradient.elements, dtype=np.float64)
        second = elements / np.maximum(np.asarray(gradient.ranks_per_node, dtype=np.float64), 1.0)
        read = _WEIGHT_BYTES * elements + _GRADIENT_BYTES * (elements + second)
        written = _COPY_BYTES * (elements + second)
        return CodingWork.broadcast(read, written, launches=3.0 * gradient.tensors)

    def state_bytes(self, gradient: SummedGradient) -> Array:
        """Count the bytes of the secondary copy of the parameters, sharded inside each node."""
        return np.asarray(_COPY_BYTES * np.asarray(gradient.elements) / np.maximum(gradient.ranks_per_node, 1.0))


@COMPRESSIONS.register("zeropp")
def zeropp(argument: str) -> Compression:
    """Build the method ``zeropp``: ZeRO++'s quantised collectives for ZeRO-3."""
    check_no_argument("zeropp", argument)
    return _ZeroPlusPlus()


# Only the largest elements: values with their indices, gathered from all ranks or summed on their way

_PAIR_BYTES = VALUE_BYTES + INDEX_BYTES


def union_density_of_ranks(density: Numeric, ranks: Numeric) -> Array:
    """Return the fraction of elements that at least one of ``ranks`` ranks sends: 1 − (1 − d)^P for density d.

    >>> float(union_density_of_ranks(0.01, 64.0).round(4))
    0.4744
    """
    return np.asarray(-np.expm1(np.asarray(ranks) * np.log1p(-np.minimum(np.asarray(density), 1.0 - 2.0**-52))))


def _entry_bytes(density: Numeric) -> Array:
    """Return the bytes per element of a vector with a density of nonzero entries, in sparse or dense form.

    The sparse form has index and value of each entry; the smaller form counts.
    """
    return np.asarray(np.minimum(_PAIR_BYTES * np.asarray(density), VALUE_BYTES))


def recursive_doubling_bytes(density: Numeric, ranks: Numeric) -> Array:
    """Return the bytes that a rank sends per gradient element if sparse gradients are summed by recursive doubling.

    In round i of ⌈log₂ P⌉ a rank sends the union of the entries of 2^i ranks, in dense form once that is smaller.
    """
    ranks = np.asarray(ranks, dtype=np.float64)
    rounds = np.ceil(np.log2(np.maximum(ranks, 1.0)))
    sent = np.zeros(np.broadcast_shapes(np.shape(density), ranks.shape))
    for number in range(int(np.max(rounds, initial=0.0))):
        sent = sent + np.where(number < rounds, _entry_bytes(union_density_of_ranks(density, 2.0**number)), 0.0)
    return np.asarray(sent)


@dataclass(frozen=True, slots=True)
class _Sparse:
    """Sparse gradients (top-k): each rank sends the fraction ``density`` of elements with the largest magnitude.

    The rest is added to the next gradient (error feedback). With ``momentum`` the optimizer's momentum is kept per rank
    and corrected too (DGC).
    """

    name: str
    density: float
    momentum: bool
    reference: str
    sums_without_decoding = False
    is_unbiased = False
    replaces_zero3_collectives = False

    @property
    def summary(self) -> str:
        """Short description of the method, for tables."""
        return f"the largest {self.density:g} of the elements, with their indices"

    def schemes(self, gradient: SummedGradient) -> dict[str, tuple[CompressedCollective, ...]]:
        """Return the collectives of three ways to sum sparse gradients, by name.

        The ways are: gather all entries; split the entries among ranks, sum, and gather the sums; recursive doubling
        (SparCML). Payloads are those of all-gathers, of which a rank sends (P - 1) / P.
        """
        ranks, elements = np.asarray(gradient.ranks, dtype=np.float64), np.asarray(gradient.elements)
        pairs = _PAIR_BYTES * self.density * elements
        sums = np.asarray(_entry_bytes(union_density_of_ranks(self.density, ranks)) * elements)
        share = np.divide(ranks, ranks - 1.0, out=np.zeros_like(ranks), where=ranks > 1.0)
        doubled = np.asarray(recursive_doubling_bytes(self.density, ranks) * elements * share)
        return {
            "gather all": (CompressedCollective("all_gather", np.asarray(pairs * ranks)),),
            "split and gather": (
                CompressedCollective("all_to_all", np.asarray(pairs)),
                CompressedCollective("all_gather", sums),
            ),
            "recursive doubling": (CompressedCollective("all_gather", doubled),),
        }

    def collectives(self, gradient: SummedGradient) -> tuple[CompressedCollective, ...]:
        """Return the collectives of the scheme in which a rank sends the fewest bytes, for each configuration."""
        schemes = self.schemes(gradient)
        sent = np.stack(np.broadcast_arrays(*(wire_bytes(messages, gradient) for messages in schemes.values())))
        gathered = np.stack(np.broadcast_arrays(*(messages[-1].payload for messages in schemes.values())))
        best = np.argmin(sent, axis=0)
        pairs = np.where(best == 1, schemes["split and gather"][0].payload, 0.0)
        return CompressedCollective("all_to_all", pairs), CompressedCollective(
            "all_gather", np.take_along_axis(gathered, best[None], 0)[0]
        )

    def encoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work to update momentum and velocity, find a threshold on a sample, and select the entries."""
        kept = VALUE_BYTES * gradient.elements * (2.0 if self.momentum else 1.0)
        chosen = _PAIR_BYTES * self.density * gradient.elements
        read = gradient.bytes + kept + VALUE_BYTES * gradient.elements
        return CodingWork.broadcast(read, kept + chosen, launches=4.0 + 2.0 * self.momentum, calls=gradient.matrices)

    def decoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work to add the entries of all ranks, or their sums, into a zeroed gradient."""
        ranks = np.asarray(gradient.ranks, dtype=np.float64)
        entries = np.minimum(ranks * self.density, union_density_of_ranks(self.density, ranks) + self.density)
        moved = _PAIR_BYTES * entries * gradient.elements
        return CodingWork.broadcast(moved, gradient.bytes + moved, launches=2.0)

    def state_bytes(self, gradient: SummedGradient) -> Array:
        return np.asarray(VALUE_BYTES * gradient.elements * (2.0 if self.momentum else 1.0))


@dataclass(frozen=True, slots=True)
class GlobalTopK:
    """Sparse gradients with the largest entries over all ranks (gTop-k).

    In each of log₂ P rounds two selections of k entries are merged into one of k, so a rank sends 2 k log₂ P pairs in
    all.
    """

    density: float
    reference = "Shi et al., gTop-k, ICDCS 2019"
    sums_without_decoding = False
    is_unbiased = False
    replaces_zero3_collectives = False

    @property
    def summary(self) -> str:
        """Short description of the method, for tables."""
        return f"the largest {self.density:g} of all ranks' elements"

    def collectives(self, gradient: SummedGradient) -> tuple[CompressedCollective, ...]:
        ranks = np.maximum(np.asarray(gradient.ranks, dtype=np.float64), 1.0)
        pairs = _PAIR_BYTES * self.density * np.asarray(gradient.elements)
        # the payload of the all-gather of which a rank sends (P - 1) / P
        share = np.divide(ranks, ranks - 1.0, out=np.zeros_like(ranks), where=ranks > 1.0)
        return (CompressedCollective("all_gather", np.asarray(2.0 * pairs * np.ceil(np.log2(ranks)) * share)),)

    def encoding_work(self, gradient: SummedGradient) -> CodingWork:
        kept = VALUE_BYTES * gradient.elements
        read = gradient.bytes + kept + VALUE_BYTES * gradient.elements
        return CodingWork.broadcast(read, kept, launches=4.0, calls=gradient.matrices)

    def decoding_work(self, gradient: SummedGradient) -> CodingWork:
        rounds = np.ceil(np.log2(np.maximum(gradient.ranks, 1.0)))
        chosen = _PAIR_BYTES * self.density * gradient.elements
        return CodingWork.broadcast(
            2.0 * rounds * chosen, gradient.bytes + rounds * chosen, launches=1.0 + 2.0 * rounds
        )

    def state_bytes(self, gradient: SummedGradient) -> Array:
        return np.asarray(VALUE_BYTES * np.asarray(gradient.elements, dtype=np.float64))


def _density(name: str, argument: str) -> float:
    return parse_number_argument(name, argument, "the share of elements that is sent", 1e-7, 1.0)


@COMPRESSIONS.register("topk")
def topk(argument: str) -> Compression:
    """Build the method ``topk:D``: the fraction D of the elements is sent, the rest is added to the next gradient."""
    return _Sparse("topk", _density("topk", argument), momentum=False, reference="Renggli et al., SparCML, SC 2019")


@COMPRESSIONS.register("dgc")
def dgc(argument: str) -> Compression:
    """Build the method ``dgc:D``: deep gradient compression, which is top-k with momentum correction."""
    return _Sparse("dgc", _density("dgc", argument), momentum=True, reference="Lin et al., DGC, ICLR 2018")


@COMPRESSIONS.register("gtopk")
def gtopk(argument: str) -> Compression:
    """Build the method ``gtopk:D``: the fraction D of elements that is largest over all ranks."""
    return GlobalTopK(_density("gtopk", argument))
