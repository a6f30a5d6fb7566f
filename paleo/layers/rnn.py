"""Recurrent layers: vanilla, LSTM, GRU; one or both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe, project
from paleo.operations.base import Operation
from paleo.operations.contraction import Contraction
from paleo.operations.memory_pass import MemoryPass
from paleo.operations.recurrence import GATES, Recurrence
from paleo.operations.tensor import Size, Tensor


class Recurrent(Layer):
    """The input products of all time steps as one contraction, then the steps themselves; input (batch, seq, features).

    ``biases`` counts bias vectors for each gate: 2 as in cuDNN and PyTorch, 1 as in most papers, 0 for none. Without
    ``project`` the input already holds gates x hidden entries, which both directions read (cuDNN's skip-input mode).
    ``merge`` says how the two directions meet.
    """

    cell: ClassVar[str]
    hidden: PositiveInt
    bidirectional: bool = False
    biases: Literal[0, 1, 2] = 2
    merge: Literal["concat", "sum"] = "concat"
    project: bool = True

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        batch, seq, _ = x.dims
        directions, gates = 1 + self.bidirectional, GATES[self.cell] * self.hidden
        products, gated = self._gates(name, x, directions, gates)
        sizes: dict[str, Size] = {"directions": directions, "in_hidden": self.hidden, "gates": gates}
        weight = Tensor(f"{name}.recurrent", tuple(sizes), tuple(sizes.values()), "parameter")
        states = Tensor(name, (batch, seq, "features"), (x.sizes[0], x.sizes[1], self.hidden * directions))
        if not self.bidirectional or self.merge == "concat":
            return Expansion(
                (*products, Recurrence(f"{name}.steps", self.cell, gated, weight, states, seq, directions)), states
            )
        both = states.like(f"{name}.states")
        out = states.reshaped({batch: x.sizes[0], seq: x.sizes[1], "features": self.hidden})
        summed = MemoryPass(f"{name}.sum", "elementwise", (both,), out, backward_pass="free")
        return Expansion(
            (*products, Recurrence(f"{name}.steps", self.cell, gated, weight, both, seq, directions), summed), out
        )

    def _gates(self, name: str, x: Tensor, directions: int, gates: int) -> tuple[tuple[Operation, ...], Tensor]:
        """The part of every gate that does not wait for the step before."""
        if not self.project:
            if x.sizes[-1] != gates:
                raise GraphError(
                    f"{name}: without project the input {describe(x)} must hold {gates} features, gates x hidden"
                )
            return (), x
        wide: dict[str, Size] = {"directions": directions, "gates": gates}
        product, gated = project(f"{name}.input", x, wide)
        return (self._shifted(product, name, wide),), gated

    def _shifted(self, product: Contraction, name: str, wide: dict[str, Size]) -> Contraction:
        if not self.biases:
            return product
        return replace(
            product, bias=Tensor(f"{name}.bias", ("biases", *wide), (self.biases, *wide.values()), "parameter")
        )


@LAYERS.register("rnn")
class Rnn(Recurrent):
    """h[t] = f(x[t]·W + h[t−1]·U)."""

    cell = "vanilla"


@LAYERS.register("lstm")
class Lstm(Recurrent):
    """Four gates (Hochreiter and Schmidhuber, 1997)."""

    cell = "lstm"


@LAYERS.register("gru")
class Gru(Recurrent):
    """Three gates (Cho et al., 2014)."""

    cell = "gru"
