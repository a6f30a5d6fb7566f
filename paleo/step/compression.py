"""Compressed gradients in a step: a method's messages in place of the sums of gradients, its coding after the last
backward pass, its state beside the optimizer's.

Messages are counted for the whole gradient of a rank and laid to its parts by their elements, so that their sum is
right. Coding occupies the computing stream: nothing hides it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from paleo.compression.base import SummedGradient
from paleo.compression.base import compression as named
from paleo.compression.zeropp import ZeroPlusPlus
from paleo.errors import PlanError
from paleo.operations.base import flat_pass
from paleo.parallel.mesh import Axes

if TYPE_CHECKING:
    from paleo.compression.base import Compression, Message
    from paleo.lowering.program import Program
    from paleo.operations.base import Kernel

Array = npt.NDArray[np.float64]
Numbers = TypeVar("Numbers", float, Array)
Owed = tuple[str, Axes, Numbers]
Groups = npt.NDArray[np.int64]


def method_of(text: str | None, *, zero: int, forward_only: bool) -> Compression | None:
    """The method that a run names; PlanError where it does not suit the run."""
    if text is None or forward_only:
        return None
    method = named(text)
    if zero == 3 and not method.linear and not isinstance(method, ZeroPlusPlus):
        raise PlanError(
            f"compress {text}: with zero=3 gradients are scattered as they come, so only sums in another format do"
        )
    return method


def check_sharded(text: str | None, zero: int) -> None:
    """PlanError where a method of sharded parameters is named for a run that does not shard them."""
    if text is not None and isinstance(named(text), ZeroPlusPlus) and zero != 3:
        raise PlanError(f"compress {text}: it compresses the gathers of sharded parameters; state --strategy zero=3")


@dataclass(slots=True)
class _Matrices:
    """Matrices of weights: elements, sums of their sides, and of elements times the rows that a product sums."""

    number: float = 0.0
    elements: float = 0.0
    sides: float = 0.0
    summed: float = 0.0

    def add(self, rows: float, columns: float, summed: float, count: float) -> None:
        self.number += count
        self.elements += rows * columns * count
        self.sides += (rows + columns) * count
        self.summed += rows * columns * summed * count


def _window(shape: Mapping[str, float]) -> float:
    """Elements of one filter and channel, whatever the number of dims."""
    return math.prod(size for name, size in shape.items() if name.startswith("kernel_"))


def unit_gradient(program: Program, ranks: float, width: float, ranks_per_node: float = 1.0) -> SummedGradient:
    """The gradient of a rank's program, divided by its elements: one element with its share of matrices.

    Matrices are those of the products that make gradients of weights: m by n, where k rows are summed; filters of a
    convolution are one of k by c r s.
    """
    elements, tensors, products, filters = 0.0, 0.0, _Matrices(), _Matrices()
    for section in program.sections:
        elements += section.trained * section.repeat
        tensors += section.tensors * section.repeat
        for counted in section.kernels:
            shape, count = counted.kernel.shape, counted.times * section.repeat
            if counted.kernel.phase != "backward_weight":
                continue
            if counted.kernel.family == "gemm":
                products.add(shape["m"], shape["n"], shape["k"], shape.get("batch", 1.0) * count)
            elif counted.kernel.family == "conv":
                groups = shape.get("groups", 1.0)
                filters.add(shape["k"], shape["c"] / groups * _window(shape), 1.0, count)
    whole, matrices = max(elements, 1.0), products.elements + filters.elements
    share = min(1.0, elements / max(matrices, 1.0)) / whole
    return SummedGradient(
        elements=1.0, tensors=tensors / whole, ranks=ranks, width=width, ranks_per_node=ranks_per_node,
        samples=products.summed / max(products.elements, 1.0),
        matrices=(products.number + filters.number) / whole,
        matrix_elements=matrices * share, matrix_sides=(products.sides + filters.sides) * share,
        dense_elements=products.elements * share, dense_sides=products.sides * share,
    )  # fmt: skip


def compressed(
    method: Compression, gradient: SummedGradient, owed: Sequence[Owed[Numbers]]
) -> tuple[Owed[Numbers], ...]:
    """The collectives of a compressed gradient in place of those ``owed``, with their axes and payloads.

    ``gradient`` is that of one element. Where states are sharded only the sum is needed, not its return: gathers are
    left out and sums are scattered. What a method of sharded parameters does not scatter stays as it is.
    """
    plain_sums = isinstance(method, ZeroPlusPlus)
    return tuple(
        (operation, axes, size * ratio)
        for plain, axes, size in owed
        for operation, ratio in (
            [(plain, 1.0)]
            if plain_sums and plain == "all_reduce"
            else _ratios(method, gradient, scattered=plain == "reduce_scatter")
        )
    )


def compressed_gather(
    method: ZeroPlusPlus, gradient: SummedGradient, width: float, axes: Axes, size: Numbers, *, again: bool
) -> tuple[Owed[Numbers], ...]:
    """The gather of sharded parameters of ``width`` bytes before the forward pass, or ``again`` before the backward
    one; ``gradient`` is that of one element."""
    message = method.messages(gradient)[int(again)]
    return ((_scoped_name(message), axes, size * (float(message.payload) / width)),)


def _scoped_name(message: Message) -> str:
    return message.operation if message.scope == "all" else f"{message.operation}@{message.scope}"


def scoped(operation: str, groups: Groups, devices_per_node: int) -> tuple[str, Groups]:
    """The plain operation of a name such as ``all_gather@node``, and the part of each group, (2, …) strides and ranks,
    that takes part: its ranks of one node, or (``across``) one rank of each node.

    >>> scoped("all_to_all@across", np.array([[1], [64]]), 8)[1].tolist()
    [[8], [8]]
    """
    plain, _, scope = operation.partition("@")
    if not scope:
        return plain, groups
    strides, ranks = groups
    inside = np.clip(devices_per_node // np.maximum(strides, 1), 1, np.maximum(ranks, 1))
    return plain, np.stack([strides, inside] if scope == "node" else [strides * inside, -(-ranks // inside)])


def _ratios(method: Compression, gradient: SummedGradient, *, scattered: bool) -> list[tuple[str, float]]:
    """Operations of a method with their payload over that of the plain gradient."""
    width, ratios = float(gradient.bytes), []
    for message in method.messages(gradient):
        ratio = float(message.payload) / width
        if scattered and message.operation == "all_gather":
            continue
        operation = "reduce_scatter" if scattered and message.operation == "all_reduce" else _scoped_name(message)
        if ratio > 0:
            ratios.append((operation, ratio))
    return ratios


def scaled(gradient: SummedGradient, elements: float) -> SummedGradient:
    """A gradient of so many elements, ``gradient`` being one of them."""
    counts = ("tensors", "matrices", "matrix_elements", "matrix_sides", "dense_elements", "dense_sides")
    return replace(gradient, elements=elements, **{name: getattr(gradient, name) * elements for name in counts})


def coding_kernels(method: Compression, gradient: SummedGradient, elements: float) -> list[Kernel]:
    """The passes of coding; products of factors are counted as arithmetic of these passes."""
    whole = scaled(gradient, elements)
    work = method.encode(whole) + method.decode(whole)
    read, written, flops = (float(figure) for figure in (work.read, work.written, work.flops))
    calls = float(work.launches + work.tensor_calls)
    return [flat_pass("coding", "elementwise", "update", elements, read, written, flops=flops, calls=calls)]


def tensor_calls(method: Compression, gradient: SummedGradient) -> float:
    """Calls of the framework for single tensors that an element of the gradient costs."""
    return float((method.encode(gradient) + method.decode(gradient)).tensor_calls)


def state_bytes(method: Compression, gradient: SummedGradient) -> float:
    """Bytes that a method keeps for an element of the gradient."""
    return float(method.state(gradient))
