"""Linear attention by the gated delta rule, in chunks: Gated DeltaNet (Qwen3-Next, Qwen3.5) and Kimi Delta Attention.

References: Yang, Kautz and Hatamizadeh, Gated delta networks, ICLR 2025; Kimi Team, Kimi Linear, 2025.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, project
from paleo.operations.base import MemoryPass, Operation, RecomputedChain
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import Size, Tensor


@LAYERS.register("delta_net")
class DeltaNet(Layer):
    """A mixer over (batch, seq, hidden) whose state of each head is a matrix: S ← S (α − β k kᵀ) + β v kᵀ, o = S q.

    ``heads`` of keys and queries of ``key_dim`` entries, ``value_heads`` (a multiple) of values of ``value_dim``; short
    convolutions over ``conv`` positions before, a gated norm and the output projection behind. The decay α is a number
    for each ``head``, or for each ``channel`` of a key out of a projection through ``decay_rank`` entries. The gate of
    the output comes out of the input, through ``gate_rank`` entries where that is not 0. The rule works in chunks of
    ``chunk`` positions: products inside a chunk, and a state that goes from one to the next; its kernels keep their
    inputs alone and run again backward.
    """

    tensor_dims: ClassVar[tuple[str, ...]] = ("delta_heads",)
    heads: PositiveInt
    value_heads: PositiveInt | None = None
    key_dim: PositiveInt = 128
    value_dim: PositiveInt = 128
    conv: PositiveInt = 4
    decay: Literal["head", "channel"] = "head"
    decay_rank: NonNegativeInt = 0
    gate_rank: NonNegativeInt = 0
    chunk: PositiveInt = 64

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if (self.value_heads or self.heads) % self.heads:
            raise GraphError(f"{name}: value_heads {self.value_heads} must be a multiple of heads {self.heads}")
        rows: dict[str, Size] = {x.dims[0]: x.sizes[0], x.dims[1]: x.sizes[1], "delta_heads": self.heads}
        mixed, gates = 2 * self.key_dim + self._values, 0 if self.gate_rank else self._values
        decays = 0 if self.decay == "channel" else self._group
        project_in, _ = project(
            f"{name}.in", x, {"delta_heads": self.heads, "packed": mixed + gates + self._group + decays}
        )
        low_rank = [
            *self._through(f"{name}.decay", x, self.decay_rank if self.decay == "channel" else 0, self.key_dim),
            *self._through(f"{name}.gate", x, self.gate_rank, self._values),
        ]
        before = x.reshaped(rows | {"mixed": mixed}, name=f"{name}.mixed")
        taps = Tensor(
            f"{name}.conv.weight", ("delta_heads", "mixed", "taps"), (self.heads, mixed, self.conv), "parameter"
        )
        after = before.like(f"{name}.conv")
        convolution = MemoryPass(
            after.name, "elementwise", (before,), after, (taps,), (before,), flops_per_element=2.0 * self.conv + 5.0
        )
        rule, out_heads = self._rule(name, rows)
        flat = out_heads.reshaped(rows | {"inner": self._values})
        gate = x.reshaped(rows | {"inner": self._values}, name=f"{name}.gates")
        scale = Tensor(f"{name}.norm.weight", ("inner",), (self.value_dim,), "parameter")
        normed = flat.like(f"{name}.norm")
        norm = MemoryPass(
            normed.name,
            "norm",
            (flat, gate),
            normed,
            (scale,),
            (flat, gate),
            flops_per_element=14.0,
            reduces=("inner",),
        )
        project_out, out = project(f"{name}.out", normed, {x.dims[-1]: x.sizes[-1]}, contract=2)
        return Expansion((project_in, *low_rank, convolution, rule, norm, project_out), out)

    @property
    def _group(self) -> int:
        """Heads of values for each of keys."""
        return (self.value_heads or self.heads) // self.heads

    @property
    def _values(self) -> int:
        """Entries of the values that share a key."""
        return self._group * self.value_dim

    def _through(self, name: str, x: Tensor, rank: int, width: int) -> tuple[Operation, ...]:
        """A projection to ``width`` entries of each head through ``rank`` entries; none for a rank of 0."""
        if not rank:
            return ()
        down, low = project(f"{name}.down", x, {"rank": rank})
        up, _ = project(f"{name}.up", low, {"delta_heads": self.heads, "packed": width})
        return down, up

    def _rule(self, name: str, rows: dict[str, Size]) -> tuple[Operation, Tensor]:
        """The delta rule in chunks, from queries, keys, values, step sizes and decays."""
        batch, seq, _ = rows
        widths = {"q": self.key_dim, "k": self.key_dim, "v": self._values, "beta": self._group}
        widths["decay"] = self.key_dim if self.decay == "channel" else self._group
        queries, keys, values, beta, decay = (
            Tensor(f"{name}.rule.{part}", (*rows, "inner"), (*rows.values(), width)) for part, width in widths.items()
        )
        per_head = self.key_dim if self.decay == "channel" else self._group
        learned = (
            Tensor(f"{name}.a", ("delta_heads", "group"), (self.heads, self._group), "parameter"),
            Tensor(f"{name}.dt_bias", ("delta_heads", "group"), (self.heads, per_head), "parameter"),
        )
        out = values.like(f"{name}.rule")
        length = min(self.chunk, int(rows[seq]))
        chunks: dict[str, Size] = {
            batch: rows[batch],
            "chunks": -(-int(rows[seq]) // length),
            "delta_heads": self.heads,
            "group": self._group,
        }
        step = MemoryPass(f"{name}.rule.decays", "elementwise", (decay,), decay.like(f"{name}.rule.decays"))
        chain = (step, *self._products(name, chunks, length))
        inputs = (queries, keys, values, beta, decay, *learned)
        kernel = "chunk_kda" if self.decay == "channel" else "chunk_gated_delta_rule"
        return RecomputedChain(out.name, inputs, out, chain, kernel, frozenset({seq})), out

    def _products(self, name: str, chunks: dict[str, Size], length: int) -> tuple[Operation, ...]:
        """Products of one chunk: its keys with each other, the inverse that orders them (a third of a product, by
        substitution), what they read of and write to the state, its queries with its keys and with the state."""

        def tensor(part: str, **dims: Size) -> Tensor:
            sizes = chunks | dims
            return Tensor(f"{name}.rule.{part}", tuple(sizes), tuple(sizes.values()))

        key, value = {"key_dim": self.key_dim}, {"value_dim": self.value_dim}
        keys, others = tensor("keys", to=length, **key), tensor("others", position=length, **key)
        queries, values = tensor("queries", to=length, **key), tensor("values", position=length, **value)
        among, inverse = tensor("among", to=length, position=length), tensor("inverse", to=length, between=length / 3.0)
        scores, state = tensor("scores", to=length, position=length), tensor("state", **key, **value)
        ordered, fresh = tensor("ordered", to=length, **key), tensor("fresh", to=length, **value)
        rows = tensor("rows", between=length / 3.0, position=length)
        solved = tensor("solved", to=length, position=length)
        carried = state.like(f"{name}.rule.carried")
        written = fresh.renamed({"to": "position"})
        return (
            Contraction(among.name, keys, others, among),
            Contraction(solved.name, inverse, rows, solved),
            Contraction(ordered.name, solved, others, ordered),
            Contraction(fresh.name, solved, values, fresh),
            Contraction(f"{name}.rule.read", ordered, state, fresh.like(f"{name}.rule.read")),
            Contraction(scores.name, queries, others, scores),
            Contraction(f"{name}.rule.within", scores, written, tensor("within", to=length, **value)),
            Contraction(f"{name}.rule.across", queries, state, tensor("across", to=length, **value)),
            Contraction(state.name, others, written, state),
            MemoryPass(carried.name, "elementwise", (state,), carried, flops_per_element=2.0),
        )
