"""Which tensors need a gradient: those that something trained has gone into."""

from __future__ import annotations

from dataclasses import replace

from paleo.layers.base import Expansion
from paleo.operations.base import with_tensors
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.tensor import Tensor


def frozen(expansion: Expansion) -> Expansion:
    """The layer with weights that are not trained."""

    def untrained(tensor: Tensor) -> Tensor:
        return replace(tensor, grad=False) if tensor.role == "parameter" else tensor

    return replace(
        expansion, operations=tuple(with_tensors(operation, untrained) for operation in expansion.operations)
    )


def with_gradients_as_needed(expansion: Expansion, inputs: tuple[Tensor, ...]) -> Expansion:
    """No gradient for what a layer gives that has neither weights to train nor an input that needs one; such a layer
    keeps nothing, either.

    A layer whose inputs need none computes without gradients up to its first weight.
    """
    if any(tensor.grad for tensor in inputs) or not expansion.operations:
        return expansion
    idle = {tensor.name for tensor in inputs}
    operations = []
    for operation in expansion.operations:
        needs = any(t.grad and t.name not in idle and t.role in ("activation", "parameter") for t in operation.reads)
        if not needs:
            idle.add(operation.out.name)

        def marked(tensor: Tensor, names: frozenset[str] = frozenset(idle)) -> Tensor:
            return replace(tensor, grad=False) if tensor.name in names else tensor

        changed = with_tensors(operation, marked)
        if not needs and isinstance(changed, MemoryPass):
            changed = replace(changed, keeps=())
        operations.append(changed)
    needed = expansion.out.grad and expansion.out.name not in idle
    return Expansion(tuple(operations), replace(expansion.out, grad=needed))
