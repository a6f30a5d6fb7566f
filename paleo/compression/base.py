"""Gradient compression: which collectives carry how many bytes, and what encoding and decoding cost.

A method counts work without knowing the hardware: `CompressedCollective` s, which are collectives with a payload, and
`CodingWork`, which is passes over memory and matrix products. Links and kernels are priced as for any other operation.
Counts broadcast over configurations. A module of this folder registers its methods under the names that ``--compress``
takes::

    @COMPRESSIONS.register("topk")
    def topk(argument: str) -> Compression: ...

The effect of compression on accuracy is not predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from paleo.errors import PlanError
from paleo.registry import Registry

Array = npt.NDArray[np.float64]
Numeric = float | npt.NDArray[np.floating[Any]]
#: Bytes of an fp32 value, and of its index in a sparse message.
VALUE_BYTES, INDEX_BYTES = 4.0, 4.0
#: Ranks that take part in a message: all replicas, those of one node, or one rank of each node.
RankScope = Literal["all", "node", "across"]


@dataclass(frozen=True, slots=True)
class SummedGradient:
    """Sizes of a gradient that a group of ranks sums, per rank.

    Attributes
    ----------
    elements, tensors : float or ndarray
        Number of elements of the gradient, and of tensors that contain them.
    ranks, ranks_per_node : float or ndarray
        Number of ranks of the group, and of those in one node.
    element_bytes : float or ndarray
        Bytes of an element.
    matrices, matrix_elements, matrix_side_sums : float or ndarray
        Number of matrices (a, b) among the tensors, number of their elements, and sum of their sides a + b.
    fully_connected_elements, fully_connected_side_sums : float or ndarray
        Elements and sides as above, of fully connected layers only.
    fully_connected_samples_per_rank : float or ndarray
        Rows of a rank's batch (samples or tokens) that the fully connected layers multiply.
    """

    elements: Numeric
    tensors: Numeric
    ranks: Numeric
    element_bytes: Numeric = 4.0
    ranks_per_node: Numeric = 1.0
    matrices: Numeric = 0.0
    matrix_elements: Numeric = 0.0
    matrix_side_sums: Numeric = 0.0
    fully_connected_elements: Numeric = 0.0
    fully_connected_side_sums: Numeric = 0.0
    fully_connected_samples_per_rank: Numeric = 1.0

    @property
    def bytes(self) -> Array:
        """Size of the uncompressed gradient [byte]."""
        return np.asarray(self.elements * self.element_bytes, dtype=np.float64)

    @property
    def peer_count(self) -> Array:
        """Number of other ranks in the group, P - 1."""
        return np.asarray(np.maximum(np.asarray(self.ranks, dtype=np.float64) - 1.0, 0.0))


@dataclass(frozen=True, slots=True)
class CompressedCollective:
    """Collective that carries a compressed gradient: operation, payload [byte], and ranks that take part
    (``rank_scope``).

    The payload follows the operation's convention: the whole buffer for all_reduce, all_gather, reduce_scatter and
    all_to_all.
    """

    operation: str
    payload: Array
    rank_scope: RankScope = "all"


@dataclass(frozen=True, slots=True)
class CodingWork:
    """Work of a rank to encode or decode a compressed gradient.

    ``bytes_read`` and ``bytes_written`` [byte] belong to element-wise passes, ``flops`` to matrix products.
    ``launches`` is the number of kernels, ``framework_calls`` the number of framework calls for single matrices.
    """

    bytes_read: Array
    bytes_written: Array
    flops: Array
    launches: Array
    framework_calls: Array

    @classmethod
    def broadcast(
        cls, read: Numeric, written: Numeric, *, flops: Numeric = 0.0, launches: Numeric = 1.0, calls: Numeric = 0.0
    ) -> CodingWork:
        """Build encoding or decoding work from numbers or arrays, broadcast to one shape.

        Parameters
        ----------
        read, written : array-like
            Bytes of element-wise passes.
        flops : array-like, default 0.0
            FLOP of matrix products.
        launches : array-like, default 1.0
            Number of kernels.
        calls : array-like, default 0.0
            Framework calls for single matrices.

        Returns
        -------
        CodingWork
            Work whose fields are arrays of one shape.
        """
        return cls(*(np.asarray(a, np.float64) for a in np.broadcast_arrays(read, written, flops, launches, calls)))

    def __add__(self, other: CodingWork) -> CodingWork:
        return CodingWork.broadcast(
            self.bytes_read + other.bytes_read,
            self.bytes_written + other.bytes_written,
            flops=self.flops + other.flops,
            launches=self.launches + other.launches,
            calls=self.framework_calls + other.framework_calls,
        )

    @property
    def bytes(self) -> Array:
        """Bytes read and written by element-wise passes [byte]."""
        return self.bytes_read + self.bytes_written


class Compression(Protocol):
    """Interface of gradient compression methods (top-k, PowerSGD, …): messages, coding work and memory."""

    @property
    def summary(self) -> str:
        """Description of the compression method in a few words."""

    @property
    def reference(self) -> str:
        """Paper that describes the method."""

    @property
    def sums_without_decoding(self) -> bool:
        """True if an all-reduce can sum compressed gradients without decoding them."""

    @property
    def is_unbiased(self) -> bool:
        """True if the expected value of the decoded sum is the gradient, without error feedback."""

    @property
    def replaces_zero3_collectives(self) -> bool:
        """True if the messages replace ZeRO-3's all-gathers and reduce-scatters instead of a gradient all-reduce."""

    def collectives(self, gradient: SummedGradient) -> tuple[CompressedCollective, ...]:
        """Return the collectives that replace the gradient's all-reduce, one after another.

        Parameters
        ----------
        gradient : SummedGradient
            Sizes of the gradient and of the group that sums it.

        Returns
        -------
        tuple of CompressedCollective
            Collectives with their payloads [byte].
        """

    def encoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work of a rank to compress the gradient before the collectives, on the compute stream.

        Parameters
        ----------
        gradient : SummedGradient
            Sizes of the gradient and of the group that sums it.

        Returns
        -------
        CodingWork
            Bytes, FLOP and kernels of compressing.
        """

    def decoding_work(self, gradient: SummedGradient) -> CodingWork:
        """Count the work of a rank to decompress the gradient after the collectives.

        Parameters
        ----------
        gradient : SummedGradient
            Sizes of the gradient and of the group that sums it.

        Returns
        -------
        CodingWork
            Bytes, FLOP and kernels of decompressing.
        """

    def state_bytes(self, gradient: SummedGradient) -> Array:
        """Count the memory that a rank keeps between steps for the method (error feedback, momentum) [byte].

        Parameters
        ----------
        gradient : SummedGradient
            Sizes of the gradient and of the group that sums it.

        Returns
        -------
        ndarray
            Memory [byte].
        """


#: Name of a method -> function that builds it from its argument, the text after the colon.
COMPRESSIONS: Registry[Callable[[str], Compression]] = Registry("compression", "paleo.compression")


def parse_compression(text: str) -> Compression:
    """Build the compression method that a text such as ``topk:0.001`` names.

    Parameters
    ----------
    text : str
        Name of a method, with its argument after a colon.

    Returns
    -------
    Compression
        Method with its argument.

    Raises
    ------
    PlanError
        If the argument is wrong.

    Examples
    --------
    >>> parse_compression("fp16").sums_without_decoding
    True
    """
    name, _, argument = text.partition(":")
    return COMPRESSIONS[name.strip()](argument.strip())


def wire_bytes(messages: tuple[CompressedCollective, ...], gradient: SummedGradient) -> Array:
    """Return the bytes that a rank sends for the collectives of a compressed gradient.

    A rank sends 2 (P − 1) / P of the payload of an all_reduce, and (P − 1) / P of the payload of other operations.

    Parameters
    ----------
    messages : tuple of CompressedCollective
        Collectives of a compression method.
    gradient : SummedGradient
        Sizes of the gradient and of the group that sums it.

    Returns
    -------
    ndarray
        Bytes sent by one rank [byte].

    Examples
    --------
    >>> gradient = SummedGradient(elements=100.0, tensors=1.0, ranks=4.0)
    >>> float(wire_bytes((CompressedCollective("all_reduce", gradient.bytes),), gradient))
    600.0
    """
    share = gradient.peer_count / np.maximum(gradient.ranks, 1.0)
    sent = sum((2.0 if m.operation == "all_reduce" else 1.0) * m.payload for m in messages)
    return np.asarray(share * sent)


def break_even_bandwidth(dense: Numeric, compressed: Numeric, coding_seconds: Numeric) -> Array:
    """Return the link bandwidth below which gradient compression saves time, if nothing overlaps.

    B* = (V_dense − V_compressed) / (T_encode + T_decode), with V the bytes that a rank sends.

    Parameters
    ----------
    dense, compressed : array-like
        Bytes that a rank sends without and with compression [byte].
    coding_seconds : array-like
        Time of encoding and decoding [s].

    Returns
    -------
    ndarray
        Bandwidth [byte/s]; 0 where the method sends no fewer bytes, infinite where coding takes no time.

    Examples
    --------
    >>> float(break_even_bandwidth(8e8, 1e8, 0.07))
    10000000000.0
    """
    saved = np.maximum(np.asarray(dense) - compressed, 0.0)
    free = np.where(saved > 0, np.inf, 0.0)
    seconds = np.asarray(coding_seconds, dtype=np.float64)
    out = np.broadcast_to(free, np.shape(saved + seconds)).copy()
    return np.asarray(np.divide(saved, seconds, out=out, where=seconds > 0))


def parse_number_argument(
    name: str, argument: str, meaning: str, least: float, most: float, *, whole: bool = False
) -> float:
    """Parse the number after the colon of a compression option, such as 0.001 in ``topk:0.001``.

    Parameters
    ----------
    name : str
        Name of the method.
    argument : str
        Text after the colon; empty without a colon.
    meaning : str
        Meaning of the number, for the error message.
    least, most : float
        Smallest and largest allowed value.
    whole : bool, default False
        True if only whole numbers are allowed.

    Returns
    -------
    float
        Number within the range.

    Raises
    ------
    PlanError
        If the argument is no number of this range; the message says what the number means.
    """
    try:
        number = float(argument)
    except ValueError:
        number = np.nan
    if not least <= number <= most or (whole and number != int(number)):
        stated = f"{name}:{argument}" if argument else name
        kind = "a whole number: " if whole else ""
        raise PlanError(f"compress {stated}: expected {name}:X with X {kind}{meaning}, from {least:g} to {most:g}")
    return number


def check_no_argument(name: str, argument: str) -> None:
    """Raise PlanError if a compression option that takes no argument has one.

    Parameters
    ----------
    name : str
        Name of the method.
    argument : str
        Text after the colon; empty without a colon.

    Raises
    ------
    PlanError
        If there is an argument.
    """
    if argument:
        raise PlanError(f"compress {name}:{argument}: {name} takes no argument")
