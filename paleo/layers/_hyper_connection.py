"""Hyper-connections: several residual streams, mixed by learned weights of each token before and after every half of a
layer (Zhu et al., Hyper-connections, ICLR 2025; Xie et al., mHC, 2026, as in DeepSeek-V4)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, NORM_FLOPS, Choices, Expansion, Layer, project
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Size, Tensor


@LAYERS.register("hyper_split")
class HyperSplit(Layer):
    """The token (batch, seq, hidden) as ``streams`` equal streams (batch, seq, streams, hidden)."""

    tensor_dims = ()
    streams: PositiveInt

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        sizes: dict[str, Size] = {x.dims[0]: x.sizes[0], x.dims[1]: x.sizes[1], "streams": self.streams}
        out = x.reshaped(sizes | {x.dims[2]: x.sizes[2]}, name=name)
        return Expansion((MemoryPass(name, "copy", (x,), out, flops_per_element=0.0),), out)


@LAYERS.register("hyper_read")
class HyperRead(Layer):
    """One weighted sum of the streams (batch, seq, streams, hidden), by weights that a product over all streams makes.

    ``mixes`` also makes the weights by which `hyper_write` mixes the streams, a doubly stochastic matrix after
    ``iterations`` of Sinkhorn and Knopp's normalisation.
    """

    tensor_dims = ()
    mixes: bool = True
    iterations: NonNegativeInt = 20

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (4,))
        streams = int(x.sizes[2])
        count = streams * (streams + 2) if self.mixes else streams
        scaled = x.like(f"{name}.normed")
        norm = MemoryPass(scaled.name, "norm", (x,), scaled, (), (x,), NORM_FLOPS, reduces=(x.dims[3],))
        product, raw = project(f"{name}.weights", scaled, {"mixing": count}, contract=2)
        learned = tuple(
            Tensor(f"{name}.{part}", ("mixing",), (size,), "parameter")
            for part, size in (("base", count), ("scale", 3 if self.mixes else 1))
        )
        weights = raw.like(f"{name}.mixing", role="statistic")
        flops = 4.0 + (4.0 * self.iterations if self.mixes else 0.0)
        sinkhorn = MemoryPass(weights.name, "elementwise", (raw,), weights, learned, (raw,), flops)
        out = x.without("streams", name=name)
        total = MemoryPass(name, "reduce", (x, weights), out, keeps=(x, weights), flops_per_element=2.0 * streams)
        return Expansion((norm, product, sinkhorn, total), out)


@LAYERS.register("hyper_write")
class HyperWrite(Layer):
    """New streams: the old ones (second input) mixed, and the result of half a layer (first input) added to each."""

    tensor_dims = ()
    arity: ClassVar[int | None] = 2

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        result, streams = inputs
        if len(streams.dims) != 4 or streams.dims[:2] != result.dims[:2] or streams.sizes[3] != result.sizes[-1]:
            raise GraphError(f"{name}: expects the result of half a layer and the streams that it was read from")
        out = streams.like(name)
        flops = 2.0 * float(streams.sizes[2]) + 2.0
        work = MemoryPass(name, "elementwise", (result, streams), out, keeps=(result, streams), flops_per_element=flops)
        return Expansion((work,), out)
