"""Blocks of diffusion transformers: image and text as one sequence, with weights apart or shared, modulated by a
vector."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers._attention import attend, normed, rotate
from paleo.layers._linear import feed_forward
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, describe, project
from paleo.operations.base import MemoryPass, Operation
from paleo.operations.tensor import Tensor


def _modulation(name: str, conditioning: Tensor, count: int) -> list[Operation]:
    """``count`` vectors of shifts, scales and gates for each sample, from the conditioning vector."""
    activated = conditioning.like(f"{name}.silu")
    width = int(conditioning.sizes[-1])
    product, _ = project(f"{name}.vectors", activated, {"modulation": count * width}, bias=True)
    silu = MemoryPass(activated.name, "elementwise", (conditioning,), activated, keeps=(conditioning,))
    return [silu, product]


def _modulated_norm(name: str, x: Tensor) -> tuple[MemoryPass, Tensor]:
    """Layer norm without weights, then scale and shift of the sample."""
    out = x.like(name)
    statistic = x.without(x.dims[-1], name=f"{name}.statistics", role="statistic")
    return MemoryPass(name, "norm", (x,), out, (), (x, statistic), 10.0, reduces=(x.dims[-1],)), out


def _gated_sum(name: str, x: Tensor, update: Tensor) -> tuple[MemoryPass, Tensor]:
    out = x.like(name)
    return MemoryPass(name, "elementwise", (x, update), out, keeps=(update,), flops_per_element=2.0), out


def _heads(name: str, x: Tensor, heads: int, head_dim: int) -> tuple[list[Operation], tuple[Tensor, Tensor, Tensor]]:
    """Normalised query and key, and value, as views of one packed product over ``x``."""
    batch, seq = x.dims[:2]
    query = Tensor(f"{name}.query", (batch, seq, "kv_heads", "group", "head_dim"), (*x.sizes[:2], heads, 1, head_dim))
    key, value = (
        Tensor(f"{name}.{part}", (batch, seq, "kv_heads", "head_dim"), (*x.sizes[:2], heads, head_dim))
        for part in ("key", "value")
    )
    norms = [normed(query), normed(key)]
    rotations, (query, key) = rotate(*(norm.out for norm in norms))
    key, value = (tensor.renamed({seq: "keys"}) for tensor in (key, value))
    return [*norms, *rotations], (query, key, value)


class StreamBlock(Layer):
    """Base of both blocks: input (batch, seq, hidden) with the text first, and the conditioning vector."""

    arity: ClassVar[int | None] = 2
    heads: PositiveInt
    ffn: PositiveInt

    def head_dim(self, name: str, x: Tensor, conditioning: Tensor) -> int:
        """Entries of a head; GraphError where the inputs do not go together."""
        if len(x.dims) != 3 or len(conditioning.dims) != 2 or int(x.sizes[-1]) % self.heads:
            raise GraphError(f"{name}: {describe(x)} and {describe(conditioning)} do not make {self.heads} heads")
        return int(x.sizes[-1]) // self.heads


@LAYERS.register("double_stream")
class DoubleStream(StreamBlock):
    """Text and image with weights of their own that attend to both (Esser et al., Scaling rectified flow transformers,
    2024, figure 2b). ``text`` is how many positions are text."""

    text: PositiveInt

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        x, conditioning = inputs
        size, hidden = self.head_dim(name, x, conditioning), x.dims[-1]
        operations: list[Operation] = []
        streams = {"image": x.sizes[1] - self.text, "text": float(self.text)}
        for stream, length in streams.items():
            part = x.reshaped({x.dims[0]: x.sizes[0], x.dims[1]: length, hidden: x.sizes[-1]})
            operations += _modulation(f"{name}.{stream}", conditioning, 6)
            norm, normed = _modulated_norm(f"{name}.{stream}.norm1", part)
            packed, _ = project(f"{name}.{stream}.qkv", normed, {"kv_heads": self.heads, "packed": 3 * size}, bias=True)
            projections, _ = _heads(f"{name}.{stream}", part, self.heads, size)
            operations += [norm, packed, *projections]
        _, (query, key, value) = _heads(name, x, self.heads, size)
        core, context = attend(name, query, key, value, causal=False, window=None, dropout=0.0, choices=choices)
        operations += core
        out = x.like(name)
        for stream, length in streams.items():
            operations += self._after_attention(f"{name}.{stream}", x, context, length, choices)
        parts = tuple(x.reshaped({x.dims[0]: x.sizes[0], x.dims[1]: n, hidden: x.sizes[-1]}, name=f"{name}.{s}.out")
                      for s, n in streams.items())  # fmt: skip
        operations.append(MemoryPass(name, "elementwise", parts, out, backward_pass="free"))
        return Expansion(tuple(operations), out)

    def _after_attention(
        self, name: str, x: Tensor, context: Tensor, length: float, choices: Choices
    ) -> list[Operation]:
        """Output projection, gated sum, and the feed-forward pair of one stream."""
        hidden = x.dims[-1]
        part = x.reshaped({x.dims[0]: x.sizes[0], x.dims[1]: length, hidden: x.sizes[-1]})
        share = context.reshaped(dict(zip(context.dims, (context.sizes[0], length, *context.sizes[2:]), strict=True)))
        product, projected = project(f"{name}.attention", share, {hidden: x.sizes[-1]}, bias=True, contract=3)
        first, summed = _gated_sum(f"{name}.sum1", part, projected)
        norm, normed = _modulated_norm(f"{name}.norm2", summed)
        up, inner = feed_forward(f"{name}.mlp", normed, self.ffn, "gelu_tanh", choices, bias=True)
        down, back = project(f"{name}.mlp.down", inner, {hidden: x.sizes[-1]}, bias=True)
        second, _ = _gated_sum(f"{name}.out", summed, back)
        return [product, first, norm, *up, down, second]


@LAYERS.register("single_stream")
class SingleStream(StreamBlock):
    """Attention and feed-forward side by side over the joint sequence, with one product before and one after
    (Dehghani et al., Scaling vision transformers to 22 billion parameters, 2023, as FLUX.1 has it)."""

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        x, conditioning = inputs
        size, hidden = self.head_dim(name, x, conditioning), x.dims[-1]
        modulation = _modulation(name, conditioning, 3)
        norm, normed = _modulated_norm(f"{name}.norm", x)
        wide = 3 * int(x.sizes[-1]) + self.ffn
        before, packed = project(f"{name}.before", normed, {"ffn": wide}, bias=True)
        projections, (query, key, value) = _heads(name, x, self.heads, size)
        core, _ = attend(name, query, key, value, causal=False, window=None, dropout=0.0, choices=choices)
        inner = packed.reshaped(dict(zip(packed.dims, (*packed.sizes[:2], self.ffn), strict=True)))
        activated = inner.like(f"{name}.gelu")
        gelu = MemoryPass(activated.name, "elementwise", (inner,), activated, keeps=(inner,), flops_per_element=8.0)
        joined = packed.reshaped(
            dict(zip(packed.dims, (*packed.sizes[:2], int(x.sizes[-1]) + self.ffn), strict=True)), name=f"{name}.joined"
        )
        copy = MemoryPass(joined.name, "copy", (activated,), joined, flops_per_element=0.0)
        after, back = project(f"{name}.after", joined, {hidden: x.sizes[-1]}, bias=True)
        gated, out = _gated_sum(name, x, back)
        return Expansion((*modulation, norm, before, *projections, *core, gelu, copy, after, gated), out)
