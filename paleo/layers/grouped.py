"""Products of rows in groups, each with a matrix of its own: the experts of a mixture as one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import PositiveInt

from paleo.layers.base import LAYERS, Expansion, Layer, project

if TYPE_CHECKING:
    from paleo.layers.base import Choices
    from paleo.operations.tensor import Tensor


@LAYERS.register("grouped_linear")
class GroupedLinear(Layer):
    """(rows, features) to (rows, ``features``): each of ``groups`` equal shares of the rows times its own matrix.

    How many rows an expert gets depends on data; equal shares are the mean. FLOP are those of the rows, whatever their
    shares.
    """

    groups: PositiveInt
    features: PositiveInt
    dim: str = "features"

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (2,))
        rows, last = x.dims
        shares = x.reshaped({"experts": self.groups, rows: x.sizes[0] / self.groups, last: x.sizes[1]})
        product, out = project(name, shares, {self.dim: self.features}, shared=("experts",))
        return Expansion((product,), out.reshaped({rows: x.sizes[0], self.dim: self.features}))
