"""Several operations in fused kernels that keep their inputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paleo.operations.base import Operation
from paleo.operations.kernel import Kernel
from paleo.operations.precision import Precision
from paleo.operations.tensor import Tensor, split_all


@dataclass(frozen=True, slots=True)
class RecomputedChain:
    """``operations`` from ``inputs`` to ``out`` that keep nothing between them: backward they first run again.

    ``whole_dims`` cannot be divided, as their entries wait for one another. Dims that stand in ``operations`` alone are
    inside the kernels: no strategy sees them.
    """

    name: str
    inputs: tuple[Tensor, ...]
    out: Tensor
    operations: tuple[Operation, ...]
    whole_dims: frozenset[str] = frozenset()

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return self.inputs

    @property
    def saves(self) -> tuple[Tensor, ...]:
        trained = any(tensor.grad for tensor in self.inputs)
        return tuple(tensor for tensor in self.inputs if trained and tensor.role != "parameter")

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset()

    @property
    def useful(self) -> tuple[float, float]:
        """Shares of its FLOP, forward and backward, that the network asks for: backward runs products three times, once
        of them again."""
        return 1.0, 2.0 / 3.0

    def split(self, ways: Mapping[str, float]) -> RecomputedChain:
        operations = tuple(operation.split(ways) for operation in self.operations)
        inputs, out = split_all(self.inputs, ways), self.out.split(ways)
        return replace(self, inputs=inputs, out=out, operations=operations)

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        return tuple(kernel for operation in self.operations for kernel in operation.forward(precision))

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        if not any(tensor.grad for tensor in self.reads):
            return ()
        again = tuple(replace(kernel, phase="backward") for kernel in self.forward(precision))
        back = (kernel for operation in reversed(self.operations) for kernel in operation.backward(precision))
        return (*again, *(replace(kernel, phase="backward") for kernel in back))
