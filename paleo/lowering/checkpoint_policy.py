"""Which forward operations of a block run again before its backward pass, full and selective recomputation, by the way
in which a framework checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from paleo.operations.base import Operation, is_core
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import Tensor

Selective = Literal["attention", "products"]


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """How a framework recomputes.

    A block ``stops_early`` where its backward pass has all that it needs (PyTorch's non-reentrant checkpoints, 2.1 and
    later), or runs to its end. ``selective`` recomputation is of the core of ``attention`` (Korthikanti et al., 2022),
    or of all but it and every second of the ``products`` (torchtitan's selective activation checkpointing by
    operation).
    """

    stops_early: bool = False
    selective: Selective = "attention"

    def again(self, operation: Operation, left_out: frozenset[str]) -> float:
        """How often full recomputation runs an operation."""
        return 0.0 if self.stops_early and operation.name in left_out else 1.0

    def selected(self, operation: Operation, left_out: frozenset[str]) -> float:
        """How often selective recomputation runs an operation; half for one of two products."""
        core = is_core(operation)
        if self.selective == "attention":
            return float(core)
        once = 0.5 if isinstance(operation, Contraction) else 1.0
        return 0.0 if core else once * self.again(operation, left_out)


#: Blocks run again to their end, or the core of their attention.
WHOLE_BLOCKS = Checkpoints()


def left_out(operations: Sequence[Operation]) -> frozenset[str]:
    """Names of the operations at the end of a block, in order, that backward does not need: those behind the last
    tensor that is kept, and the one that reads it where it keeps no more than its inputs."""
    unneeded: list[str] = []
    for operation in reversed(operations):
        kept = {tensor.name for tensor in kept_tensors(operation)}
        if kept - {tensor.name for tensor in operation.reads}:
            break
        unneeded.append(operation.name)
        if kept:
            break
    return frozenset(unneeded)


def kept_tensors(operation: Operation) -> list[Tensor]:
    """What an operation keeps for its backward pass beside weights."""
    return [tensor for tensor in operation.saves if tensor.role != "parameter"]
