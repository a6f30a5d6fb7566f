"""Passes that an importer knows by their shapes alone, and the pieces of attention that stand outside of it."""

from __future__ import annotations

from pydantic import PositiveInt

from paleo.layers.base import LAYERS, Choices, Expansion, Layer
from paleo.work import MemoryPass, Tensor


@LAYERS.register("relative_bias")
class RelativeBias(Layer):
    """A learned bias of the scores for each head and bucket of distances (Raffel et al., T5, 2020), made once for many layers.

    The input (batch, seq, hidden) goes through; the table of scores (heads, seq, seq) is written once.
    """

    buckets: PositiveInt
    heads: PositiveInt

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        seq = x.dims[1]
        table = Tensor(f"{name}.weight", ("buckets", "heads"), (self.buckets, self.heads), "parameter")
        scores = Tensor(f"{name}.scores", ("heads", seq, "keys"), (self.heads, x.sizes[1], x.sizes[1]))
        gather = MemoryPass(f"{name}.scores", "gather", (), scores, (table,), sparse_rows=True)
        return Expansion((gather,), x)
