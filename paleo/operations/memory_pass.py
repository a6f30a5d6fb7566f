"""Passes over memory: element-wise work, norms, softmax, pooling, gathers.

Several operations in fused kernels that keep their inputs alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from paleo.operations.base import KINDS, Kernel
from paleo.operations.tensor import halos, split_all, with_rows

if TYPE_CHECKING:
    from paleo.operations.base import Kind, Operation, Phase
    from paleo.operations.tensor import Halos, Precision, Tensor, Window


@dataclass(frozen=True, slots=True)
class MemoryPass:
    """A pass over memory: element-wise work, norms, softmax, pooling, gathers. Its time is that of its bytes.

    ``backward_pass`` None derives the gradient pass: read the gradient of ``out`` and what was kept, write the gradient
    of each input that needs one; "free" says that the gradient is a view (add, slices); "by input" that each input's is
    a pass of its own over what was kept of the others, as large as ``out``, and summed up where the input is smaller
    (products). ``reduces`` names dims whose
    statistics are shared by a row (softmax, norms): split over ranks they owe a small all-reduce. ``sparse_rows`` says
    that of a table only the rows that make up ``out`` move (embedding), so many for each row of ``out``. ``windows``
    slide over the dims of a pool. ``linear`` ones commute with addition, so that partial sums go through.
    """

    name: str
    operation: str
    inputs: tuple[Tensor, ...]
    out: Tensor
    parameters: tuple[Tensor, ...] = ()
    keeps: tuple[Tensor, ...] = ()
    flops_per_element: float = 1.0
    backward_pass: Literal["derived", "free", "by input"] = "derived"
    reduces: tuple[str, ...] = ()
    local_statistics: bool = False
    sparse_rows: int = 0
    windows: tuple[Window, ...] = ()
    halos: Halos = ()
    linear: bool = False

    def __post_init__(self) -> None:
        _ = self.kind

    @property
    def kind(self) -> Kind:
        """The traits of its operation; SpecError, with the nearest names, where that is not registered."""
        return KINDS[self.operation]

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return self.inputs + self.parameters

    @property
    def saves(self) -> tuple[Tensor, ...]:
        return self.keeps

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset(self.reduces) | {window.out for window in self.windows}

    def split(self, ways: Mapping[str, float]) -> MemoryPass:
        tensors = self.inputs, (self.out,), self.parameters, self.keeps
        inputs, (out,), parameters, keeps = (split_all(each, ways) for each in tensors)
        return replace(
            self, inputs=inputs, out=out, parameters=parameters, keeps=keeps, halos=halos(self.windows, ways)
        )

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        new = tuple(t for t in self.keeps if t.name not in {u.name for u in (*self.inputs, self.out)})
        return (self._kernel("forward", self.inputs, (self.out, *new), precision),)

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        targets = tuple(t for t in self.inputs if t.grad)
        learned = tuple(t for t in self.parameters if t.grad)
        if self.backward_pass == "free" or not (targets or learned):
            return ()
        if self.backward_pass == "by input":
            return tuple(kernel for target in targets for kernel in self._gradient(target, precision))
        kept = tuple(t for t in self.keeps if t.name != self.out.name or t.role == "activation")
        kernel = self._kernel("backward", (self.out, *kept), targets, precision)
        if not learned:
            return (kernel,)
        gradients = sum(self._table_elements(t) for t in learned) * precision.gradient
        return (replace(kernel, bytes_written=kernel.bytes_written + gradients),)

    def _gradient(self, target: Tensor, precision: Precision) -> tuple[Kernel, ...]:
        """The gradient of one input of a product, and the sum over what it was broadcast over."""
        others = tuple(t for t in self.keeps if t.name != target.name)
        product = self._kernel("backward", (self.out, *others), (self.out,), precision)
        if target.elements == self.out.elements:
            return (product,)
        summed = self._kernel("backward", (self.out,), (target,), precision)
        return product, replace(summed, operation="reduce")

    def _kernel(
        self, phase: Phase, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], precision: Precision
    ) -> Kernel:
        table = sum([self._table_elements(t) for t in self.parameters]) * precision.parameter
        largest = max([t.elements for t in (*reads, *writes)], default=0)
        row = math.prod([self.inputs[0].size(d) for d in self.reduces if d in self.inputs[0].dims])
        return Kernel(
            self.name,
            "memory",
            self.operation,
            phase,
            0.0,
            float(self.flops_per_element * largest),
            sum([t.bytes(precision) * self._border(t, phase) for t in reads]) + table,
            sum([t.bytes(precision) for t in writes]),
            {"rows": float(largest / max(row, 1)), "columns": float(row)},
            experts=self._experts,
        )

    @property
    def _experts(self) -> float:
        """Experts of a mixture that it sends tokens to, or gets them back from."""
        sent = [t for t in (*self.inputs, self.out) if "capacity" in t.dims]
        return max(float(tensor.size("experts")) for tensor in sent) if sent and self.kind.routes else 0.0

    def _border(self, tensor: Tensor, phase: Phase) -> float:
        """What a pool reads with the rows of its neighbours, over its own rows."""
        if not self.windows:
            return 1.0
        pairs = zip(self.windows, self.halos, strict=False)
        return with_rows(tensor, [(w.out, rows[phase == "backward"]) for w, rows in pairs])

    def _table_elements(self, table: Tensor) -> float:
        return float(min(table.elements, self.sparse_rows * self.out.elements) if self.sparse_rows else table.elements)


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
