"""Crossing features of a recommendation model with low rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from paleo.layers.base import LAYERS, Expansion, Layer, project
from paleo.operations.base import Operation
from paleo.operations.memory_pass import MemoryPass

if TYPE_CHECKING:
    from paleo.layers.base import Choices
    from paleo.operations.tensor import Tensor


@LAYERS.register("cross_network")
class CrossNetwork(Layer):
    """``layers`` times x ← x0 · (V (U x) + b) + x over (batch, features), U and V of rank ``rank``.

    Reference: Wang et al., DCN V2, WWW 2021, eq. 2 (mixture of one).
    """

    layers: PositiveInt
    rank: PositiveInt

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (start,) = inputs
        self.check_rank(name, start, (2,))
        x, operations = start, list[Operation]()
        for index in range(self.layers):
            step = f"{name}.{index + 1}"
            down, low = project(f"{step}.down", x, {"rank": self.rank})
            up, crossed = project(f"{step}.up", low, {x.dims[-1]: x.sizes[-1]}, bias=True)
            out = x.like(step)
            crossing = MemoryPass(
                step, "elementwise", (start, crossed, x), out, keeps=(start, crossed), flops_per_element=2.0
            )
            operations += [down, up, crossing]
            x = out
        return Expansion(tuple(operations), x)
