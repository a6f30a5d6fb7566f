"""What every operation offers. A layer states operations; an operation becomes kernels.

An *operation* (``Contraction``, ``MemoryPass``, ``FusedAttention``, ``Recurrence``) names the dims of its tensors, so
that a strategy can split them; its backward operations are derived, not written in the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Protocol

from paleo.operations.kernel import Kernel
from paleo.operations.precision import Precision
from paleo.operations.tensor import Tensor

#: Marks the operations of attention between its projections, those that selective recomputation runs again (Korthikanti
#: et al., 2022).
ATTENTION_CORE = ".core"


class Operation(Protocol):
    """What every operation offers to the graph, to strategies and to lowering."""

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> tuple[Tensor, ...]: ...

    @property
    def out(self) -> Tensor: ...

    @property
    def saves(self) -> tuple[Tensor, ...]:
        """Tensors that must live until the backward pass."""

    @property
    def private_dims(self) -> frozenset[str]:
        """Dims whose split is no partial sum: windowed dims, and those whose statistics stay local by choice."""

    def split(self, ways: Mapping[str, float]) -> Operation:
        """The same operation on one rank when dims are divided."""

    def forward(self, precision: Precision) -> tuple[Kernel, ...]: ...

    def backward(self, precision: Precision) -> tuple[Kernel, ...]: ...


def model_flops(operation: Operation, precision: Precision) -> tuple[float, float]:
    """FLOP that the network asks for, forward and backward: not what a kernel computes again, nor what a mask hides."""
    forward, backward = getattr(operation, "useful", (1.0, 1.0))
    return (
        forward * sum(kernel.flops for kernel in operation.forward(precision)),
        backward * sum(kernel.flops for kernel in operation.backward(precision)),
    )


def is_core(operation: Operation) -> bool:
    """Whether an operation belongs to the core of attention: scores, softmax, dropout, weighted sum."""
    return ATTENTION_CORE in operation.name


def parameters_of(operations: Iterable[Operation]) -> dict[str, Tensor]:
    """The parameters that operations read, by name; a tied weight appears once."""
    return {t.name: t for op in operations for t in op.reads if t.role == "parameter"}


def with_parameters_of(operation: Operation, prefix: str, replacement: str) -> Operation:
    """The operation with the parameters whose names start with ``own`` replaced by those that start with ``other``."""

    def shared(tensor: Tensor) -> Tensor:
        if tensor.role != "parameter" or not tensor.name.startswith(prefix):
            return tensor
        return replace(tensor, name=replacement + tensor.name.removeprefix(prefix))

    return with_tensors(operation, shared)


def with_tensors(operation: Operation, change: Callable[[Tensor], Tensor]) -> Operation:
    """The operation with each of its tensors changed."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return change(value)
        if is_dataclass(value) and hasattr(value, "forward"):
            return with_tensors(value, change)  # type: ignore[arg-type]
        return tuple(map(changed, value)) if isinstance(value, tuple) else value

    result: Operation = replace(operation, **{f.name: changed(getattr(operation, f.name)) for f in fields(operation)})  # type: ignore
    return result
