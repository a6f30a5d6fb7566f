"""Recurrent layers: vanilla, LSTM, GRU; one or both directions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe, project
from paleo.operations.base import MemoryPass, Operation
from paleo.operations.contraction import GATES, Contraction, Recurrence
from paleo.operations.tensor import Size, Tensor


class Recurrent(Layer):
    """The input products of all time steps as one contraction, then the steps themselves; input (batch, seq, features).

    ``biases`` counts bias vectors for each gate: 2 as in cuDNN and PyTorch, 1 as in most papers, 0 for none. Without
    ``project`` the input already holds gates x hidden entries, which both directions read (cuDNN's skip-input mode).
    ``merge`` says how the two directions meet. ``projection`` narrows the state that goes from step to step (Sak et
    al., 2014); its products are counted for all steps at once. ``kept_per_state`` says how many numbers stay for the
    backward pass for each of the state (PyTorch without cuDNN: 7 for an LSTM, 8 for a GRU).
    """

    cell: ClassVar[str]
    hidden: PositiveInt
    bidirectional: bool = False
    biases: Literal[0, 1, 2] = 2
    merge: Literal["concat", "sum"] = "concat"
    project: bool = True
    projection: PositiveInt | None = None
    kept_per_state: Annotated[float, Field(gt=0)] | None = None

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        batch, seq, _ = x.dims
        looped = float(x.sizes[-1]) if choices.recurrence == "looped" else 0.0
        directions, gates = 1 + self.bidirectional, GATES[self.cell] * self.hidden
        products, gated = self._gates(name, x, directions, gates)
        sizes: dict[str, Size] = {"directions": directions, "in_hidden": self.projection or self.hidden, "gates": gates}
        weight = Tensor(f"{name}.recurrent", tuple(sizes), tuple(sizes.values()), "parameter")
        states = Tensor(name, (batch, seq, "features"), (x.sizes[0], x.sizes[1], self.hidden * directions))
        if self.projection is not None:
            wide = states.like(f"{name}.wide")
            steps = self._steps(name, gated, weight, wide, directions, looped)
            product, out = self._projected(name, wide, directions, self.projection)
            return Expansion((*products, steps, product), out)
        if not self.bidirectional or self.merge == "concat":
            return Expansion((*products, self._steps(name, gated, weight, states, directions, looped)), states)
        directions_states = states.like(f"{name}.states")
        out = states.reshaped({batch: x.sizes[0], seq: x.sizes[1], "features": self.hidden})
        summed = MemoryPass(f"{name}.sum", "elementwise", (directions_states,), out, backward_pass="free")
        return Expansion(
            (*products, self._steps(name, gated, weight, directions_states, directions, looped), summed), out
        )

    def _steps(
        self, name: str, gated: Tensor, weight: Tensor, states: Tensor, directions: int, looped: float
    ) -> Recurrence:
        seq, kept = states.dims[1], self.kept_per_state
        return Recurrence(
            f"{name}.steps",
            self.cell,
            gates=gated,
            weight=weight,
            out=states,
            steps_dim=seq,
            directions=directions,
            kept_per_state=kept,
            looped=looped,
        )

    def _projected(self, name: str, wide: Tensor, directions: int, projection: int) -> tuple[Contraction, Tensor]:
        """The states of each direction times a matrix of that direction, all steps in one product."""
        batch, seq, _ = wide.dims
        rows: dict[str, Size] = {batch: wide.sizes[0], seq: wide.sizes[1], "directions": directions}
        sizes: dict[str, Size] = {"directions": directions, "states": self.hidden, "projection": projection}
        weight = Tensor(f"{name}.projection", tuple(sizes), tuple(sizes.values()), "parameter")
        by_direction = wide.reshaped(rows | {"states": self.hidden})
        result = Tensor(name, (*rows, "projection"), (*rows.values(), projection))
        product = Contraction(f"{name}.projected", by_direction, weight, result)
        return product, result.reshaped({batch: wide.sizes[0], seq: wide.sizes[1], "features": directions * projection})

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
