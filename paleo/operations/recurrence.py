"""The steps of a recurrent layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from paleo.operations.base import Kernel
from paleo.operations.tensor import split_all

if TYPE_CHECKING:
    from paleo.operations.base import Phase
    from paleo.operations.tensor import Precision, Tensor

#: Gates of a recurrent cell: how many hidden x hidden products a step makes.
GATES = {"vanilla": 1, "gru": 3, "lstm": 4}


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The steps of a recurrent layer that wait for one another: h[t] = f(gates[t] + h[t-1] · U), t over ``steps``.

    The input products of all steps are one Contraction before it. The weight gradient is one product over all steps.
    """

    name: str
    cell: str
    gates: Tensor
    weight: Tensor
    out: Tensor
    steps_dim: str = "seq"
    directions: int = 1
    #: Numbers that stay for the backward pass, for each of the output; None for the gates, the output and LSTM's cell.
    kept_per_state: float | None = None

    @property
    def reads(self) -> tuple[Tensor, ...]:
        return (self.gates, self.weight)

    @property
    def saves(self) -> tuple[Tensor, ...]:
        if not (self.gates.grad or self.weight.grad):
            return ()
        if self.kept_per_state is not None:
            sizes = (*self.out.sizes[:-1], self.out.sizes[-1] * self.kept_per_state)
            return (replace(self.out, name=f"{self.name}.kept", sizes=sizes),)
        cells = (self.out.like(f"{self.name}.cell"),) if self.cell == "lstm" else ()
        return (self.gates, self.out, *cells)

    @property
    def private_dims(self) -> frozenset[str]:
        return frozenset({self.steps_dim})

    def split(self, ways: Mapping[str, float]) -> Recurrence:
        gates, weight, out = split_all((self.gates, self.weight, self.out), ways)
        return replace(self, gates=gates, weight=weight, out=out)

    @property
    def flops(self) -> float:
        steps = self.gates.size(self.steps_dim)
        return 2.0 * steps * self.gates.size("batch") * float(self.weight.elements)

    def forward(self, precision: Precision) -> tuple[Kernel, ...]:
        return (self._kernel("forward", "fwd", (self.gates, self.weight), (self.out, *self.saves[2:]), precision),)

    def backward(self, precision: Precision) -> tuple[Kernel, ...]:
        if not self.saves:
            return ()
        data = self._kernel("backward", "bwd_data", (self.out, self.weight, *self.saves), (self.gates,), precision)
        weight = self._kernel("backward_weight", "bwd_filter", (self.out, self.gates), (self.weight,), precision)
        return (data, weight) if self.weight.grad else (data,)

    def _kernel(
        self, phase: Phase, operation: str, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], precision: Precision
    ) -> Kernel:
        shape = {
            "hidden": float(self.out.sizes[-1]) / self.directions,
            "batch": float(self.gates.size("batch")),
            "timesteps": float(self.gates.size(self.steps_dim)),
            "gates": float(GATES[self.cell]),
            "directions": float(self.directions),
        }
        read, written = sum(t.bytes(precision) for t in reads), sum(t.bytes(precision) for t in writes)
        vector = 10.0 * float(self.gates.elements)
        return Kernel(self.name, "rnn", f"{self.cell}.{operation}", phase, self.flops, vector, read, written, shape)
