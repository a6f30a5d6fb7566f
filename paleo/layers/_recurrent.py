"""Recurrent layers: LSTM and GRU, state spaces, delta rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Layer, LayerImplementations, LayerOperations, format_shape, linear_projection
from paleo.operations.base import MemoryPass, Operation, RecomputedFusedChain
from paleo.operations.contraction import GATES_BY_CELL, Contraction, Recurrence
from paleo.operations.tensor import DimSize, Tensor

# Recurrent layers: vanilla, LSTM, GRU; one or both directions


class Recurrent(Layer):
    """Base of recurrent layers over (batch, seq, features): one GEMM of the input for all time steps, then the steps.

    ``biases`` is the number of bias vectors per gate: 2 as in cuDNN and PyTorch, 1 as in most papers, 0 for none.
    Without ``project`` the input already holds gates x hidden entries, which both directions read (cuDNN's skip-input
    mode). ``merge`` is how the outputs of two directions are combined. ``projection`` narrows the state that one step
    passes to the next (Sak et al., 2014); its products are counted for all steps at once. ``kept_per_state`` is how
    many numbers are saved for the backward pass per number of the state (PyTorch without cuDNN: 7 for an LSTM, 8 for a
    GRU).
    """

    cell: ClassVar[str]
    hidden: PositiveInt
    bidirectional: bool = False
    biases: Literal[0, 1, 2] = 2
    merge: Literal["concat", "sum"] = "concat"
    project: bool = True
    projection: PositiveInt | None = None
    kept_per_state: Annotated[float, Field(gt=0)] | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        batch, seq, _ = x.dims
        looped = float(x.sizes[-1]) if choices.recurrence == "looped" else 0.0
        directions, gates = 1 + self.bidirectional, GATES_BY_CELL[self.cell] * self.hidden
        products, gated = self._gates(name, x, directions, gates)
        sizes = {"directions": directions, "in_hidden": self.projection or self.hidden, "gates": gates}
        weight = Tensor.of(f"{name}.recurrent", sizes, "parameter")
        states = Tensor(name, (batch, seq, "features"), (x.sizes[0], x.sizes[1], self.hidden * directions))
        summed = self.bidirectional and self.merge == "sum"
        inner = states.like(f"{name}.wide" if self.projection else f"{name}.states" if summed else name)
        steps = Recurrence(
            f"{name}.steps", self.cell, gated, weight, inner, seq, directions, self.kept_per_state, looped
        )
        if self.projection is not None:
            product, out = self._project_states(name, inner, directions, self.projection)
            return LayerOperations((*products, steps, product), out)
        if not summed:
            return LayerOperations.of(*products, steps)
        out = states.reshaped({batch: x.sizes[0], seq: x.sizes[1], "features": self.hidden})
        total = MemoryPass(f"{name}.sum", "elementwise", (inner,), out, backward_rule="free")
        return LayerOperations.of(*products, steps, total)

    def _project_states(self, name: str, wide: Tensor, directions: int, projection: int) -> tuple[Contraction, Tensor]:
        """Return the matrix product of an LSTM projection (states to ``projection`` entries), and the output tensor.

        Each direction has its own matrix; all time steps count as one product.
        """
        batch, seq, _ = wide.dims
        rows = {batch: wide.sizes[0], seq: wide.sizes[1], "directions": directions}
        sizes = {"directions": directions, "states": self.hidden, "projection": projection}
        weight = Tensor.of(f"{name}.projection", sizes, "parameter")
        by_direction = wide.reshaped(rows | {"states": self.hidden})
        result = Tensor.of(name, {**rows, "projection": projection})
        product = Contraction(f"{name}.projected", by_direction, weight, result)
        return product, result.reshaped({batch: wide.sizes[0], seq: wide.sizes[1], "features": directions * projection})

    def _gates(self, name: str, x: Tensor, directions: int, gates: int) -> tuple[tuple[Operation, ...], Tensor]:
        """Return the operations that compute the input's contribution to the gates, and the output tensor.

        The operations cover all time steps at once.
        """
        if not self.project:
            if x.sizes[-1] != gates:
                raise GraphError(
                    f"{name}: without project the input {format_shape(x)} must hold {gates} features, gates x hidden"
                )
            return (), x
        wide = {"directions": directions, "gates": gates}
        product, gated = linear_projection(f"{name}.input", x, wide)
        bias = Tensor.of(f"{name}.bias", {"biases": self.biases, **wide}, "parameter") if self.biases else None
        return (replace(product, bias=bias),), gated


@LAYERS.register("rnn")
class Rnn(Recurrent):
    """Vanilla recurrent layer: h[t] = f(x[t]·W + h[t−1]·U)."""

    cell = "vanilla"


@LAYERS.register("lstm")
class Lstm(Recurrent):
    """LSTM, with four gates (Hochreiter and Schmidhuber, 1997)."""

    cell = "lstm"


@LAYERS.register("gru")
class Gru(Recurrent):
    """GRU, with three gates (Cho et al., 2014)."""

    cell = "gru"


def _short_convolution(
    name: str, x: Tensor, rows: Mapping[str, DimSize], mixed: DimSize, taps: int, more: tuple[Tensor, ...] = ()
) -> MemoryPass:
    """Return the memory pass of a causal convolution over ``taps`` positions of the ``mixed`` entries of each group.

    The groups are the last dim of ``rows``.
    """
    before = x.reshaped({**rows, "mixed": mixed}, name=f"{name}.mixed")
    (group, groups) = list(rows.items())[-1]
    weight = Tensor(f"{name}.conv.weight", (group, "mixed", "taps"), (groups, mixed, taps), "parameter")
    after, flops = before.like(f"{name}.conv"), 2.0 * taps + 5.0
    return MemoryPass(after.name, "elementwise", (before,), after, (weight, *more), (before,), flops_per_element=flops)


def _gated_norm(name: str, flat: Tensor, gate: Tensor, scale: Tensor) -> MemoryPass:
    """Return the memory pass of a gated norm: normalise a mixer's output and multiply by a gate."""
    normed, inputs = flat.like(f"{name}.norm"), (flat, gate)
    return MemoryPass(
        normed.name, "norm", inputs, normed, (scale,), inputs, flops_per_element=14.0, reduced_dims=("inner",)
    )


# State-space layers: the selective scan of Mamba-2 in chunks


@LAYERS.register("mamba2")
class Mamba2(Layer):
    """Mamba-2 mixer over (batch, seq, hidden): projection, causal convolution, selective scan, gated norm, projection.

    ``heads`` of ``head_dim`` entries share keys and queries of ``state`` entries in ``groups``, which tensor
    parallelism splits. The convolution covers ``conv`` positions. The scan works in chunks of ``chunk`` positions:
    products inside a chunk, and a state passed from one chunk to the next. Its kernels save only their inputs and
    recompute the rest in the backward pass (Dao and Gu, Transformers are SSMs, ICML 2024).
    """

    tensor_parallel_dims: ClassVar[tuple[str, ...]] = ("ssm_groups",)
    heads: PositiveInt
    head_dim: PositiveInt = 64
    groups: PositiveInt = 8
    state: PositiveInt = 128
    conv: PositiveInt = 4
    chunk: PositiveInt = 128

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if self.heads % self.groups:
            raise GraphError(f"{name}: heads {self.heads} must be a multiple of groups {self.groups}")
        inner, mixed = self._group_width, self._group_width + 2 * self.state
        rows = {x.dims[0]: x.sizes[0], x.dims[1]: x.sizes[1], "ssm_groups": self.groups}
        project_in, _ = linear_projection(
            f"{name}.in", x, {"ssm_groups": self.groups, "packed": inner + mixed + self.heads // self.groups}
        )
        shift = Tensor(f"{name}.conv.bias", ("ssm_groups", "mixed"), (self.groups, mixed), "parameter")
        convolution = _short_convolution(name, x, rows, mixed, self.conv, (shift,))
        scan, scanned = self._scan(name, rows)
        gate = x.reshaped(rows | {"inner": inner}, name=f"{name}.gate")
        scale = Tensor(f"{name}.norm.weight", ("ssm_groups", "inner"), (self.groups, inner), "parameter")
        norm = _gated_norm(name, scanned.reshaped(rows | {"inner": inner}), gate, scale)
        project_out, out = linear_projection(f"{name}.out", norm.out, {x.dims[-1]: x.sizes[-1]}, contract=2)
        return LayerOperations((project_in, convolution, scan, norm, project_out), out)

    @property
    def _group_width(self) -> int:
        """Entries of all heads of one group: heads / groups · head_dim."""
        return self.heads // self.groups * self.head_dim

    def _scan(self, name: str, rows: Mapping[str, DimSize]) -> tuple[Operation, Tensor]:
        """Return the selective scan of Mamba-2 (one kernel, computed in chunks), and the output tensor.

        Products are the scores inside each chunk, each chunk's contribution to the state, and the output from
        scores and state.
        """
        batch, seq, _ = rows
        heads = {"heads": self.heads // self.groups}
        entries, state = heads | {"head_dim": self.head_dim}, {"state": self.state}
        values, keys, queries, steps = (
            Tensor.of(f"{name}.scan.{part}", {**rows, **sizes})
            for part, sizes in (("x", entries), ("b", state), ("c", state), ("dt", heads))
        )
        learned = tuple(
            Tensor(f"{name}.{part}", ("ssm_groups", "heads"), (self.groups, self.heads // self.groups), "parameter")
            for part in ("a", "d", "dt_bias")
        )
        out = values.like(f"{name}.scan")
        length = min(self.chunk, int(rows[seq]))
        chunks = {batch: rows[batch], "chunks": -(-int(rows[seq]) // length), "ssm_groups": self.groups}
        operations = self._products(name, chunks, length, entries)
        decay = MemoryPass(f"{name}.scan.decay", "elementwise", (steps,), steps.like(f"{name}.scan.decays"))
        chain = (decay, *operations)
        inputs = (values, keys, queries, steps, *learned)
        return RecomputedFusedChain(out.name, inputs, out, chain, "mamba_chunk_scan_combined", frozenset({seq})), out

    def _products(
        self, name: str, chunks: Mapping[str, DimSize], length: int, entries: Mapping[str, DimSize]
    ) -> tuple[Operation, ...]:
        def tensor(part: str, **dims: DimSize) -> Tensor:
            return Tensor.of(f"{name}.scan.{part}", {**chunks, **dims})

        queries = tensor("chunk.c", to=length, state=self.state)
        keys = tensor("chunk.b", position=length, state=self.state)
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


# Linear attention by the gated delta rule, in chunks: Gated DeltaNet (Qwen3-Next, Qwen3.5) and Kimi Delta Attention


@LAYERS.register("delta_net")
class DeltaNet(Layer):
    """Gated delta-rule mixer over (batch, seq, hidden), with a state matrix per head.

    The rule is S ← S (α − β k kᵀ) + β v kᵀ, o = S q. There are ``heads`` of keys and queries of ``key_dim`` entries,
    and ``value_heads`` (a multiple) of values of ``value_dim``. Short convolutions over ``conv`` positions come first,
    a gated norm and the output projection last. The decay α is one number per ``head``, or one per ``channel`` of a
    key, from a projection through ``decay_rank`` entries. The output gate is projected from the input, through
    ``gate_rank`` entries if that is not 0. The rule works in chunks of ``chunk`` positions: products inside a chunk,
    and a state passed from one chunk to the next. Its kernels save only their inputs and recompute the rest in the
    backward pass.
    """

    tensor_parallel_dims: ClassVar[tuple[str, ...]] = ("delta_heads",)
    heads: PositiveInt
    value_heads: PositiveInt | None = None
    key_dim: PositiveInt = 128
    value_dim: PositiveInt = 128
    conv: PositiveInt = 4
    decay: Literal["head", "channel"] = "head"
    decay_rank: NonNegativeInt = 0
    gate_rank: NonNegativeInt = 0
    chunk: PositiveInt = 64

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if (self.value_heads or self.heads) % self.heads:
            raise GraphError(f"{name}: value_heads {self.value_heads} must be a multiple of heads {self.heads}")
        rows = {x.dims[0]: x.sizes[0], x.dims[1]: x.sizes[1], "delta_heads": self.heads}
        mixed, gates = 2 * self.key_dim + self._value_width, 0 if self.gate_rank else self._value_width
        decays = 0 if self.decay == "channel" else self._value_heads_per_key
        project_in, _ = linear_projection(
            f"{name}.in", x, {"delta_heads": self.heads, "packed": mixed + gates + self._value_heads_per_key + decays}
        )
        decay_rank = self.decay_rank if self.decay == "channel" else 0
        low_rank = (
            *self._low_rank_projection(f"{name}.decay", x, decay_rank, self.key_dim),
            *self._low_rank_projection(f"{name}.gate", x, self.gate_rank, self._value_width),
        )
        convolution = _short_convolution(name, x, rows, mixed, self.conv)
        rule, out_heads = self._rule(name, rows)
        flat = out_heads.reshaped(rows | {"inner": self._value_width})
        gate = x.reshaped(rows | {"inner": self._value_width}, name=f"{name}.gates")
        scale = Tensor(f"{name}.norm.weight", ("inner",), (self.value_dim,), "parameter")
        norm = _gated_norm(name, flat, gate, scale)
        project_out, out = linear_projection(f"{name}.out", norm.out, {x.dims[-1]: x.sizes[-1]}, contract=2)
        return LayerOperations((project_in, *low_rank, convolution, rule, norm, project_out), out)

    @property
    def _value_heads_per_key(self) -> int:
        """Number of value heads that share one key head."""
        return (self.value_heads or self.heads) // self.heads

    @property
    def _value_width(self) -> int:
        """Entries of all value heads that share one key head."""
        return self._value_heads_per_key * self.value_dim

    def _low_rank_projection(self, name: str, x: Tensor, rank: int, width: int) -> tuple[Operation, ...]:
        """Return the products of a projection to ``width`` entries per head through ``rank`` entries.

        Returns None for a rank of 0.
        """
        if not rank:
            return ()
        down, low = linear_projection(f"{name}.down", x, {"rank": rank})
        up, _ = linear_projection(f"{name}.up", low, {"delta_heads": self.heads, "packed": width})
        return down, up

    def _rule(self, name: str, rows: Mapping[str, DimSize]) -> tuple[Operation, Tensor]:
        """Return the gated delta rule (one kernel, computed in chunks), and the output tensor.

        The kernel reads queries, keys, values, step sizes and decays.
        """
        batch, seq, _ = rows
        widths = {"q": self.key_dim, "k": self.key_dim, "v": self._value_width, "beta": self._value_heads_per_key}
        widths["decay"] = self.key_dim if self.decay == "channel" else self._value_heads_per_key
        queries, keys, values, beta, decay = (
            Tensor.of(f"{name}.rule.{part}", {**rows, "inner": width}) for part, width in widths.items()
        )
        per_head = self.key_dim if self.decay == "channel" else self._value_heads_per_key
        learned = (
            Tensor(f"{name}.a", ("delta_heads", "group"), (self.heads, self._value_heads_per_key), "parameter"),
            Tensor(f"{name}.dt_bias", ("delta_heads", "group"), (self.heads, per_head), "parameter"),
        )
        out = values.like(f"{name}.rule")
        length = min(self.chunk, int(rows[seq]))
        chunks = {batch: rows[batch], "chunks": -(-int(rows[seq]) // length), "delta_heads": self.heads}
        chunks["group"] = self._value_heads_per_key
        step = MemoryPass(f"{name}.rule.decays", "elementwise", (decay,), decay.like(f"{name}.rule.decays"))
        chain = (step, *self._products(name, chunks, length))
        inputs = (queries, keys, values, beta, decay, *learned)
        kernel = "chunk_kda" if self.decay == "channel" else "chunk_gated_delta_rule"
        return RecomputedFusedChain(out.name, inputs, out, chain, kernel, frozenset({seq})), out

    def _products(self, name: str, chunks: Mapping[str, DimSize], length: int) -> tuple[Operation, ...]:
        """Return the matrix products of one chunk of the delta rule.

        The products are keys with keys, the inverse of that matrix, reads and writes of the state, and queries with
        keys and state. The inverse is found by substitution, which costs a third of a product.
        """

        def tensor(part: str, **dims: DimSize) -> Tensor:
            return Tensor.of(f"{name}.rule.{part}", {**chunks, **dims})

        key, value = {"key_dim": self.key_dim}, {"value_dim": self.value_dim}
        keys, others = tensor("keys", to=length, **key), tensor("others", position=length, **key)
        queries, values = tensor("queries", to=length, **key), tensor("values", position=length, **value)
        among, inverse = tensor("among", to=length, position=length), tensor("inverse", to=length, between=length / 3.0)
        scores, state = tensor("scores", to=length, position=length), tensor("state", **key, **value)
        ordered, fresh = tensor("ordered", to=length, **key), tensor("fresh", to=length, **value)
        rows = tensor("rows", between=length / 3.0, position=length)
        solved = tensor("solved", to=length, position=length)
        carried = state.like(f"{name}.rule.carried")
        written = fresh.with_renamed_dims({"to": "position"})
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
