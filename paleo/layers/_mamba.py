"""State-space layers: the selective scan of Mamba-2 in chunks."""

from __future__ import annotations

from typing import ClassVar

from pydantic import PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Choices, Expansion, Layer, project
from paleo.operations.base import MemoryPass, Operation, RecomputedChain
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import Size, Tensor


@LAYERS.register("mamba2")
class Mamba2(Layer):
    """A Mamba-2 mixer over (batch, seq, hidden): input projection, causal convolution over ``conv`` positions,
    selective scan, gated norm, output projection (Dao and Gu, Transformers are SSMs, ICML 2024).

    ``heads`` of ``head_dim`` entries share keys and queries of ``state`` entries in ``groups``, which tensor
    parallelism divides. The scan works in chunks of ``chunk`` positions: products inside a chunk, and a state that goes
    from one to the next; its kernels keep their inputs alone and run again backward.
    """

    tensor_dims: ClassVar[tuple[str, ...]] = ("ssm_groups",)
    heads: PositiveInt
    head_dim: PositiveInt = 64
    groups: PositiveInt = 8
    state: PositiveInt = 128
    conv: PositiveInt = 4
    chunk: PositiveInt = 128

    def expand(self, name: str, inputs: tuple[Tensor, ...], choices: Choices) -> Expansion:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if self.heads % self.groups:
            raise GraphError(f"{name}: heads {self.heads} must be a multiple of groups {self.groups}")
        inner, mixed = self._inner, self._inner + 2 * self.state
        rows: dict[str, Size] = {x.dims[0]: x.sizes[0], x.dims[1]: x.sizes[1], "ssm_groups": self.groups}
        project_in, _ = project(
            f"{name}.in", x, {"ssm_groups": self.groups, "packed": inner + mixed + self.heads // self.groups}
        )
        before = x.reshaped(rows | {"mixed": mixed}, name=f"{name}.mixed")
        taps = Tensor(
            f"{name}.conv.weight", ("ssm_groups", "mixed", "taps"), (self.groups, mixed, self.conv), "parameter"
        )
        shift = Tensor(f"{name}.conv.bias", ("ssm_groups", "mixed"), (self.groups, mixed), "parameter")
        after = before.like(f"{name}.conv")
        flops = 2.0 * self.conv + 5.0
        convolution = MemoryPass(
            f"{name}.conv", "elementwise", (before,), after, (taps, shift), (before,), flops_per_element=flops
        )
        scan, scanned = self._scan(name, rows)
        gate = x.reshaped(rows | {"inner": inner}, name=f"{name}.gate")
        scale = Tensor(f"{name}.norm.weight", ("ssm_groups", "inner"), (self.groups, inner), "parameter")
        flat = scanned.reshaped(rows | {"inner": inner})
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
        return Expansion((project_in, convolution, scan, norm, project_out), out)

    @property
    def _inner(self) -> int:
        """Entries of the heads of a group."""
        return self.heads // self.groups * self.head_dim

    def _scan(self, name: str, rows: dict[str, Size]) -> tuple[Operation, Tensor]:
        """The scan in chunks: scores of each chunk's positions, what a chunk adds to the state, the state from chunk to
        chunk, and both contributions to the output."""
        batch, seq, _ = rows
        heads: dict[str, Size] = {"heads": self.heads // self.groups}
        entries = heads | {"head_dim": self.head_dim}
        values, keys, queries, steps = (
            Tensor(f"{name}.scan.{part}", tuple(rows | sizes), tuple((rows | sizes).values()))
            for part, sizes in (
                ("x", entries),
                ("b", {"state": self.state}),
                ("c", {"state": self.state}),
                ("dt", heads),
            )
        )
        learned = tuple(
            Tensor(f"{name}.{part}", ("ssm_groups", "heads"), (self.groups, self.heads // self.groups), "parameter")
            for part in ("a", "d", "dt_bias")
        )
        out = values.like(f"{name}.scan")
        length = min(self.chunk, int(rows[seq]))
        chunks: dict[str, Size] = {
            batch: rows[batch],
            "chunks": -(-int(rows[seq]) // length),
            "ssm_groups": self.groups,
        }
        operations = self._products(name, chunks, length, entries)
        decay = MemoryPass(f"{name}.scan.decay", "elementwise", (steps,), steps.like(f"{name}.scan.decays"))
        chain = (decay, *operations)
        inputs = (values, keys, queries, steps, *learned)
        return RecomputedChain(out.name, inputs, out, chain, "mamba_chunk_scan_combined", frozenset({seq})), out

    def _products(
        self, name: str, chunks: dict[str, Size], length: int, entries: dict[str, Size]
    ) -> tuple[Operation, ...]:
        def tensor(part: str, **dims: Size) -> Tensor:
            sizes = chunks | dims
            return Tensor(f"{name}.scan.{part}", tuple(sizes), tuple(sizes.values()))

        queries, keys = (
            tensor("chunk.c", to=length, state=self.state),
            tensor("chunk.b", position=length, state=self.state),
        )
        values = tensor("chunk.x", position=length, **entries)
        scores = tensor("scores", to=length, position=length)
        heads, width = entries.items()
        added = tensor("state", **dict([heads, ("state", self.state), width]))
        carried = added.like(f"{name}.scan.carried")
        return (
            Contraction(scores.name, queries, keys, scores),
            Contraction(added.name, keys, values, added),
            MemoryPass(carried.name, "elementwise", (added,), carried, flops_per_element=2.0),
            Contraction(f"{name}.scan.within", scores, values, tensor("within", to=length, **entries)),
            Contraction(f"{name}.scan.across", queries, carried, tensor("across", to=length, **entries)),
        )
