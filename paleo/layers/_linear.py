"""Linear layers: one matrix product of the last dim with a weight, the feed-forward pair of a transformer, rows in
groups each with a matrix of its own, and crossed features of a recommendation model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from paleo.layers._embedding import tied_gradient
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, activate, gate, project
from paleo.operations.base import MemoryPass, Operation

if TYPE_CHECKING:
    from paleo.operations.tensor import Tensor


@LAYERS.register("linear")
class Linear(Layer):
    """y = x · W + b over the last dim. ``dim`` names the new last dim, ``tie`` takes the weight of another layer (an
    embedding)."""

    tensor_dims = ("vocab",)
    features: PositiveInt
    bias: bool = True
    dim: str = "features"
    tie: str | None = None

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        weight = f"{self.tie}.weight" if self.tie else None
        operation, out = project(name, inputs[0], {self.dim: self.features}, bias=self.bias, weight=weight)
        tied = tied_gradient(name, operation.rhs, choices) if self.tie else ()
        return Expansion((*tied, operation), out)


#: Gated activations: the function of the gate.
GATED = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "clamped_swiglu": "silu"}


@LAYERS.register("mlp")
class Mlp(Layer):
    """The feed-forward block of a transformer: up, activation (perhaps gated), down, over dims hidden → ffn →
    hidden."""

    tensor_dims = ("ffn",)
    ffn: PositiveInt
    activation: Literal["gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh", "swiglu", "geglu", "reglu"] = "gelu"
    bias: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        operations, inner = feed_forward(name, x, self.ffn, self.activation, choices, bias=self.bias)
        if self.dropout:
            mask = inner.like(f"{name}.mask", role="mask")
            dropped = inner.like(f"{name}.dropped")
            operations += (MemoryPass(f"{name}.dropout", "dropout", (inner,), dropped, keeps=(mask,)),)
            inner = dropped
        down, out = project(f"{name}.down", inner, {x.dims[-1]: x.sizes[-1]}, bias=self.bias)
        return Expansion((*operations, down), out)


def feed_forward(
    name: str,
    x: Tensor,
    ffn: int,
    activation: str,
    choices: Choices,
    *,
    bias: bool,
    shared: tuple[str, ...] = (),
    dim: str = "ffn",
) -> tuple[tuple[Operation, ...], Tensor]:
    """The up projection to ``dim`` and its activation; a gate and its partner come from one product of twice the
    width."""
    if activation in GATED:
        up, wide = project(f"{name}.up", x, {"gates": 2, dim: ffn}, bias=bias, shared=shared)
        separate = choices.gates == "separate"
        passes, inner = gate(f"{name}.act", GATED[activation], wide, "gates", separate=separate)
    else:
        up, wide = project(f"{name}.up", x, {dim: ffn}, bias=bias, shared=shared)
        passes, inner = activate(activation, f"{name}.act", wide, choices)
    return (up, *passes), inner


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
