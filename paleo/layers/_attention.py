"""Attention layers: multi-head, grouped-query, multi-query, latent (MLA), additive, relative, and graph attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import (
    LAYERS,
    Layer,
    LayerImplementations,
    LayerOperations,
    format_shape,
    linear_projection,
    norm_pass,
    parameter_vector,
)
from paleo.operations.base import MemoryPass, Operation
from paleo.operations.contraction import Contraction, FusedAttention, LoopInputGradientSum, causal_score_share
from paleo.operations.tensor import DimSize, RotaryImplementation, Tensor

#: Calls of the host, forward and backward.
ForwardBackwardHostCalls = tuple[float, float]


def attention_operations(
    name: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool,
    window: int | None,
    dropout: float,
    choices: LayerImplementations,
) -> tuple[tuple[Operation, ...], Tensor]:
    """Return the operations of softmax(q·kᵀ)·v, and the output tensor.

    The operations are one fused kernel, or scores (saved), softmax, dropout and weighted sum. Shapes: query (batch,
    seq, kv_heads, group, head_dim); key (batch, keys, kv_heads, head_dim); value (batch, keys, kv_heads, value_dim).
    With ``choices.attention`` ``stepwise``, plain code also copies heads to contiguous rows and back, scales the scores
    and adds the mask in separate passes.
    """
    batch, seq, kv_heads, group, _ = query.dims
    keys = key.dims[1]
    sizes = {d: query.size(d) for d in (batch, seq, kv_heads, group)} | {"value_dim": value.sizes[-1]}
    out = Tensor.of(f"{name}.context", sizes)
    if choices.attention == "fused":
        attended = min(window or key.sizes[1], key.sizes[1])
        return (FusedAttention(f"{name}.core", query, key, value, out, causal, attended, dropout > 0.0),), out
    score_sizes = {d: query.size(d) for d in (batch, kv_heads, group, seq)} | {keys: key.sizes[1]}
    scores = Tensor.of(f"{name}.core.scores", score_sizes)
    plain = choices.attention == "stepwise"
    copies, (query, key, value) = _copy_heads(f"{name}.core", query, key, value) if plain else ((), (query, key, value))
    visible = causal_score_share(key.sizes[1], min(window or key.sizes[1], key.sizes[1])) if causal else 1.0
    chain: list[Operation] = [*copies, Contraction(scores.name, query, key, scores, unmasked_share=visible)]
    if plain:
        passes, scores = _scale_and_mask(f"{name}.core", scores)
        chain += passes
    return (
        *chain,
        *_softmax_weighted_sum(name, scores, value, out, dropout=dropout, visible=visible, choices=choices),
    ), out


def _softmax_weighted_sum(
    name: str,
    scores: Tensor,
    value: Tensor,
    out: Tensor,
    *,
    dropout: float,
    visible: float,
    choices: LayerImplementations,
    transposed: bool = False,
) -> tuple[Operation, ...]:
    """Return the operations after the attention scores: softmax over the last dim, dropout, and weighted sum of values.

    ``visible`` is the share of scores that the mask leaves. Plain code (``stepwise``) also copies the result back to
    its layout. If ``transposed``, keys are not the last dim in memory: scores are transposed before the softmax, after
    it, and before the sum.
    """
    weights = choices.with_output_precision(scores.like(f"{name}.core.softmax"), "softmax")
    keys = scores.dims[-1]
    chain: list[Operation] = []
    if transposed:
        scores = _append_transpose(scores, chain)
    chain.append(MemoryPass(weights.name, "softmax", (scores,), weights, (), (weights,), 6.0, reduced_dims=(keys,)))
    if transposed:
        weights = _append_transpose(_append_downcast(weights, chain), chain)
    if dropout:
        dropped, mask = scores.like(f"{name}.core.dropped"), scores.like(f"{name}.core.mask", role="mask")
        chain.append(MemoryPass(f"{name}.core.dropout", "dropout", (weights,), dropped, (), (mask,), 2.0))
        weights = dropped
    if transposed:
        weights = _append_transpose(weights, chain)
    plain = choices.attention == "stepwise"
    product = out.like(f"{name}.core.context") if plain else out
    values = value.with_renamed_dims({value.dims[-1]: "value_dim"})
    summed = Contraction(f"{name}.core.context", weights, values, product, unmasked_share=visible)
    back = (MemoryPass(out.name, "copy", (product,), out, flops_per_element=0.0),) if plain else ()
    return (*chain, summed, *back)


def _append_transpose(x: Tensor, chain: list[Operation]) -> Tensor:
    """Append to ``chain`` a copy that changes the order of a tensor's dims in memory; return its output."""
    return _append_copy(x, f"{x.name}.transposed", chain)


def _append_copy(x: Tensor, name: str, chain: list[Operation]) -> Tensor:
    out = x.like(name)
    chain.append(MemoryPass(name, "copy", (x,), out, flops_per_element=0.0))
    return out


def _append_downcast(x: Tensor, chain: list[Operation]) -> Tensor:
    """Append to ``chain`` a cast from fp32 to the format of products, if the tensor is in fp32; return the result."""
    if not x.stays_fp32:
        return x
    out = replace(x.like(f"{x.name}.narrow"), stays_fp32=False)
    chain.append(MemoryPass(out.name, "copy", (x,), out, flops_per_element=0.0))
    return out


def _scale_and_mask(name: str, scores: Tensor) -> tuple[tuple[Operation, ...], Tensor]:
    """Return the passes that divide scores by √head_dim and add the mask, and the masked scores."""
    scaled, masked = scores.like(f"{name}.scaled"), scores.like(f"{name}.masked")
    scale = MemoryPass(scaled.name, "elementwise", (scores,), scaled)
    return (scale, MemoryPass(masked.name, "elementwise", (scaled,), masked, backward_rule="free")), masked


def _copy_heads(name: str, *tensors: Tensor) -> tuple[tuple[Operation, ...], tuple[Tensor, ...]]:
    """Return the copies that make each head's rows of query, key and value contiguous, and the copied tensors.

    Batched products need them.
    """
    copies = tuple(t.like(f"{t.name}.heads") for t in tensors)
    pairs = zip(tensors, copies, strict=True)
    return tuple(MemoryPass(u.name, "copy", (t,), u, flops_per_element=0.0) for t, u in pairs), copies


def rotary_embedding_passes(
    query: Tensor, key: Tensor, *, calls: ForwardBackwardHostCalls = (2.0, 2.0), shared: tuple[Tensor, ...] = ()
) -> tuple[tuple[Operation, ...], tuple[Tensor, Tensor]]:
    """Return the passes that apply rotary position embedding (Su et al., 2021) to query and key, and the two outputs.

    Each pass saves nothing. ``calls`` are the numbers of CPU calls (such as kernel launches) of both passes, forward
    and backward. ``shared`` are further inputs of the key's pass: the rotary key that all heads share.
    """
    each = calls[0] / 2.0, calls[1] / 2.0
    new_query, new_key = (old.like(f"{old.name}.rotated") for old in (query, key))
    passes = (
        MemoryPass(new.name, "rope", inputs, new, flops_per_element=3.0, host_calls=each)
        for inputs, new in (((query,), new_query), ((key, *shared), new_key))
    )
    return tuple(passes), (new_query, new_key)


def _stepwise_rotary_passes(name: str, part: Tensor) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """Return the passes of rotary position embedding in plain code, one for each step, and the output tensor.

    The steps (Megatron-Core's _apply_rotary_pos_emb_bshd in rope_utils.py): reorder pairs as halves; multiply by
    cosines; negate one half; swap the halves; multiply by sines; add; copy. All are linear, so nothing is saved, and
    partial sums remain valid. Not counted: the backward passes that place the strided gradients of pairs and add them.
    """
    halves, cosines, rotated_half, sines, total, out = (
        part.like(f"{name}.{step}") for step in ("halves", "cosines", "rotated_half", "sines", "sum", "rotated")
    )
    half = part.shape | {part.dims[-1]: int(part.sizes[-1]) // 2}
    first, second, minus = (part.reshaped(half, name=f"{name}.{step}") for step in ("first", "second", "minus"))
    summed = replace(_unfused_pass((cosines, sines), total), backward_rule="free")
    return (
        _unfused_pass((part,), halves),
        _unfused_pass((halves,), cosines),
        _unfused_pass((second,), minus),
        _unfused_pass((first, minus), rotated_half),
        _unfused_pass((rotated_half,), sines),
        summed,
        _unfused_pass((total,), out),
    ), out


def _rotate_by_implementation(
    rotation: RotaryImplementation, query: Tensor, key: Tensor
) -> tuple[tuple[Operation, ...], tuple[Tensor, Tensor]]:
    """Return the rotary-embedding passes of the implementation ``rotation``, and the rotated query and key.

    Query and key take one kernel each, or the passes of plain code.
    """
    if rotation not in ("complex", "halves"):
        return rotary_embedding_passes(query, key)
    steps = _rotate_complex if rotation == "complex" else _stepwise_rotary_passes
    (of_query, new_query), (of_key, new_key) = (steps(f"{old.name}.rotary", old) for old in (query, key))
    passes: tuple[Operation, ...] = (*of_query, *of_key)
    return passes, (new_query, new_key)


def _rotate_complex(name: str, part: Tensor) -> tuple[tuple[MemoryPass, ...], Tensor]:
    """Return the passes of rotary position embedding as complex products in fp32, and the output tensor.

    The passes are cast, product and cast back. They move 20 bytes an element in each direction with sixteen-bit
    activations (apply_rotary_emb of torchtitan, models/llama/model.py of 2024).
    """
    wide, turned = (replace(part.like(f"{name}.{step}"), stays_fp32=True) for step in ("wide", "product"))
    out = part.like(f"{name}.rotated")
    return (_unfused_pass((part,), wide), _unfused_pass((wide,), turned), _unfused_pass((turned,), out)), out


def _unfused_pass(inputs: tuple[Tensor, ...], out: Tensor) -> MemoryPass:
    """Return a memory pass of plain framework code, which compilers do not fuse with others."""
    return MemoryPass(out.name, "eager", inputs, out, commutes_with_addition=True)


@LAYERS.register("attention")
class Attention(Layer):
    """Multi-head attention with its projections, over (batch, seq, hidden).

    ``kv_heads`` < ``heads`` is grouped-query attention, 1 is multi-query. ``window`` limits how many earlier positions
    a query attends to. A second input makes it a cross attention: keys and values come from it. ``head_dim`` defaults
    to hidden / heads, ``value_dim`` to ``head_dim``. With ``shared_value`` the values are the keys before norm and
    rotation, so that they have no weight (Gemma 4). ``qk_norm`` is true for a norm of each head's query and key, ``all
    heads`` for one norm over all heads together (MiniMax M2). ``gate`` multiplies the heads' output by a sigmoid of the
    input, for each ``element`` (Qwen3-Next) or each ``head`` (Step 3.7). ``key_bias`` and ``out_bias`` default to
    ``bias``. ``sinks`` adds a learned score to each head's softmax.
    """

    optional_input_count: ClassVar[int] = 1
    tensor_parallel_dims = ("kv_heads",)
    heads: PositiveInt
    kv_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    causal: bool = False
    window: PositiveInt | None = None
    rotary: bool = False
    qk_norm: bool | Literal["all heads"] = False
    value_dim: PositiveInt | None = None
    shared_value: bool = False
    gate: Literal["element", "head"] | None = None
    bias: bool = True
    key_bias: bool | None = None
    out_bias: bool | None = None
    sinks: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        x = inputs[0]
        self.check_rank(name, x, (3,))
        hidden = int(x.sizes[-1])
        shape = self._head_shape(name, hidden)
        operations, (query, key, value) = self._projections(name, inputs, shape, choices.gathered_key_heads)
        if self.qk_norm:
            norms = tuple((rms_norm if self.qk_norm is True else _joint_rms_norm)(part) for part in (query, key))
            operations, (query, key) = (*operations, *norms), (norm.out for norm in norms)
        if self.rotary:
            rotations, (query, key) = _rotate_by_implementation(choices.rotation, query, key)
            operations += rotations
        if self.sinks:
            operations += (_sinks(name, shape),)
        key, value = (tensor.with_renamed_dims({inputs[-1].dims[1]: "keys"}) for tensor in (key, value))
        core, context = attention_operations(
            name, query, key, value, causal=self.causal, window=self.window, dropout=self.dropout, choices=choices
        )
        if self.gate is not None:
            gating, context = _sigmoid_gate(name, context, per_head=self.gate == "head")
            core = (*core, gating)
        bias = self.bias if self.out_bias is None else self.out_bias
        output, out = linear_projection(f"{name}.out", context, {x.dims[-1]: hidden}, bias=bias, contract=3)
        return LayerOperations((*operations, *core, output), out)

    def _head_shape(self, name: str, hidden: int) -> tuple[int, int, int]:
        """Return (number of key heads, query heads per key head, entries of a head)."""
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            raise GraphError(f"{name}: heads {self.heads} must be a multiple of kv_heads {kv_heads}")
        if self.head_dim is None and hidden % self.heads:
            raise GraphError(f"{name}: hidden {hidden} is not a multiple of heads {self.heads}; state head_dim")
        return kv_heads, self.heads // kv_heads, self.head_dim or hidden // self.heads

    def _projections(
        self, name: str, inputs: tuple[Tensor, ...], shape: tuple[int, int, int], gathered: int | None
    ) -> tuple[tuple[Operation, ...], tuple[Tensor, Tensor, Tensor]]:
        """Return the projections to query, key and value, and these three tensors.

        One product with the packed weight yields all three; cross attention has two products. Norms and rotations apply
        to each rank's part of the keys before context parallelism exchanges them. If the network has fewer key heads
        than ranks, ``gathered``, each rank gathers the packed output of all and keeps what its own heads need.
        """
        kv_heads, group, head_dim = shape
        value_dim = self.value_dim or head_dim
        x, memory = inputs[0], inputs[-1]
        q = _headed(f"{name}.query", x, {"kv_heads": kv_heads, "group": group, "head_dim": head_dim})
        k, v = (
            _headed(f"{name}.{part}", memory, {"kv_heads": kv_heads, "head_dim": size})
            for part, size in (("key", head_dim), ("value", value_dim))
        )
        gates = {"element": group * value_dim, "head": group, None: 0}[self.gate]
        if len(inputs) == 1:
            pair = head_dim + (0 if self.shared_value else value_dim)
            width = group * head_dim + gates + pair
            copied = 0 if gathered is None else pair * (kv_heads - gathered) // kv_heads
            packed, out = linear_projection(
                f"{name}.qkv", x, {"kv_heads": kv_heads, "packed": width - copied}, bias=self.bias
            )
            product = self._without_key_bias(packed, width - head_dim)
            if gathered is None:
                return (product,), (q, k, v)
            heads = _headed(f"{name}.own_heads", x, {"kv_heads": kv_heads, "own": width})
            cut = _unfused_pass((out.with_renamed_dims({"kv_heads": "all_heads"}),), heads)
            return (product, replace(cut, host_calls=(1.0, 3.0))), (q, k, v)
        if gates or self.shared_value or value_dim != head_dim:
            raise GraphError(f"{name}: gate, shared_value and value_dim go with self attention")
        if memory.dims[0] != x.dims[0] or memory.sizes[0] != x.sizes[0] or len(memory.dims) != 3:
            raise GraphError(f"{name}: memory {format_shape(memory)} does not go with the input {format_shape(x)}")
        first, _ = linear_projection(f"{name}.q", x, {"kv_heads": kv_heads, "packed": group * head_dim}, bias=self.bias)
        second, _ = linear_projection(
            f"{name}.kv", memory, {"kv_heads": kv_heads, "packed": 2 * head_dim}, bias=self.bias
        )
        return (first, self._without_key_bias(second, head_dim)), (q, k, v)

    def _without_key_bias(self, product: Contraction, packed: int) -> Contraction:
        """Return a query-key-value projection, with a bias of only ``packed`` entries per head if keys have none.

        Whisper and BEiT have such keys.
        """
        if product.bias is None or self.key_bias is not False:
            return product
        return replace(product, bias=replace(product.bias, sizes=(product.bias.sizes[0], packed)))


def rms_norm(x: Tensor, name: str | None = None) -> MemoryPass:
    """Return the memory pass of an RMS norm, with a weight, over the last dim of a query, key or latent vector."""
    out = x.like(name or f"{x.name}.normed")
    return norm_pass(x, out, (parameter_vector(f"{out.name}.weight", x, x.dims[-1]),))


def _joint_rms_norm(x: Tensor) -> MemoryPass:
    """Return the memory pass of an RMS norm over all heads of a query or key together, with a weight for each entry."""
    out = x.like(f"{x.name}.normed")
    weight = Tensor(f"{out.name}.weight", x.dims[2:], x.sizes[2:], "parameter")
    return norm_pass(x, out, (weight,), x.dims[2:])


def _sigmoid_gate(name: str, context: Tensor, *, per_head: bool = False) -> tuple[MemoryPass, Tensor]:
    """Return the pass that multiplies the heads' output by a sigmoid of gates, and its output tensor.

    The query's projection also yields the gates: one per entry, or one ``per_head``.
    """
    gates = context.like(f"{name}.gates")
    gates = gates.without_dims(context.dims[-1], name=gates.name) if per_head else gates
    out = context.like(f"{name}.gated")
    work = MemoryPass(out.name, "elementwise", (context, gates), out, saved=(context, gates), flops_per_element=5.0)
    return work, out


def _sinks(name: str, shape: tuple[int, int, int]) -> MemoryPass:
    """Return the pass that reads the attention sinks, one learned score a head without a value.

    Reference: Xiao et al., ICLR 2024.
    """
    scores = Tensor(f"{name}.sinks", ("kv_heads", "group"), shape[:2], "parameter")
    return MemoryPass(f"{name}.sinks", "copy", (), scores.like(f"{name}.sink_scores", role="statistic"), (scores,))


def _headed(name: str, x: Tensor, heads: Mapping[str, DimSize]) -> Tensor:
    return Tensor.of(name, {**dict(zip(x.dims[:2], x.sizes[:2], strict=True)), **heads})


@LAYERS.register("latent_attention")
class LatentAttention(Layer):
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values are projected from a low-rank latent vector.

    A head's query and key have ``nope_dim`` + ``rope_dim`` entries, its value ``value_dim``. All heads share the rotary
    key. Without ``query_rank`` the query is projected directly from the input; without ``rotary`` there is no rotation.
    With ``gate`` the heads' output is multiplied by a sigmoid of a projection of the input (Kimi K3).

    Some frameworks project the latents of each rank's ``own`` tokens only (`LayerImplementations.latent_tokens`). The
    sequence is then called ``in_seq`` up to the latents and their norms. If tp splits it there, latents and rotary key
    are all-gathered before the heads' projections, and their gradients reduce-scattered (Megatron-Core's
    multi_latent_attention.py, where every rank has the whole down projections).
    """

    tensor_parallel_dims = ("kv_heads",)
    sequence_parallel_dims = ("in_seq",)
    heads: PositiveInt
    query_rank: PositiveInt | None = None
    kv_rank: PositiveInt
    nope_dim: PositiveInt
    rope_dim: PositiveInt
    value_dim: PositiveInt
    causal: bool = True
    rotary: bool = True
    gate: bool = False

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        tokens = x.with_renamed_dims({x.dims[1]: "in_seq"}) if choices.latent_tokens == "own" else x
        q_down, query_latent = self._query_latent(name, tokens)
        kv_down, packed = linear_projection(f"{name}.kv_down", tokens, {"kv_rank": self.kv_rank + self.rope_dim})
        q_ops, query = self._query(name, x, query_latent)
        kv_ops, key, value = self._key_value(name, x, packed)
        rotary = packed.reshaped({d: x.size(d) for d in x.dims[:2]} | {"kv_rank": self.rope_dim})
        rotations: tuple[Operation, ...] = ()
        calls = choices.latent_rotation_calls
        if self.rotary and choices.rotation != "fused":
            rotations, (query, key, value) = self._rotated_by_steps(query, key, value, rotary, calls)
        elif self.rotary:
            shared = (rotary,) if choices.latent_tokens == "own" else ()
            rotations, (query, key) = rotary_embedding_passes(query, key, calls=calls, shared=shared)
        key, value = (tensor.with_renamed_dims({x.dims[1]: "keys"}) for tensor in (key, value))
        core, context = attention_operations(
            name, query, key, value, causal=self.causal, window=None, dropout=0.0, choices=choices
        )
        if self.gate:
            gates, _ = linear_projection(f"{name}.gate", x, {"kv_heads": self.heads, "gates": self.value_dim})
            gating, context = _sigmoid_gate(name, context)
            core = (*core, gates, gating)
        output, out = linear_projection(f"{name}.out", context, {x.dims[-1]: x.sizes[-1]}, contract=3)
        return LayerOperations((*q_down, kv_down, *q_ops, *kv_ops, *rotations, *core, output), out)

    def _rotated_by_steps(
        self, query: Tensor, key: Tensor, value: Tensor, rotary: Tensor, calls: ForwardBackwardHostCalls
    ) -> tuple[tuple[Operation, ...], tuple[Tensor, Tensor, Tensor]]:
        """Return unfused rotary-embedding passes for latent attention, and (query, key, value) after the passes.

        The rotated parts are joined to the others, and the values are copied because one product yields them together
        with the keys.
        """
        rope_query = query.reshaped(query.shape | {query.dims[-1]: self.rope_dim})
        nope_key = key.reshaped(key.shape | {key.dims[-1]: self.nope_dim})
        of_query, query_part = _stepwise_rotary_passes(f"{query.name}.rotary", rope_query)
        of_key, key_part = _stepwise_rotary_passes(f"{key.name}.rotary", rotary)
        joined = query.like(f"{query.name}.rotated"), key.like(f"{key.name}.rotated"), value.like(f"{value.name}.copy")
        nope_query = nope_key.reshaped(query.shape | {query.dims[-1]: self.nope_dim}, name=f"{query.name}.rest")
        inputs = (nope_query, query_part), (nope_key, key_part), (value,)
        passes = (*of_query, *of_key, *(_unfused_pass(each, out) for each, out in zip(inputs, joined, strict=True)))
        each = calls[0] / len(passes), calls[1] / sum(step.backward_rule != "free" for step in passes)
        return tuple(replace(step, host_calls=each) for step in passes), joined

    def _query_latent(self, name: str, tokens: Tensor) -> tuple[tuple[Operation, ...], Tensor | None]:
        if self.query_rank is None:
            return (), None
        down, latent = linear_projection(f"{name}.q_down", tokens, {"q_rank": self.query_rank})
        return (down,), latent

    def _query(self, name: str, x: Tensor, latent: Tensor | None) -> tuple[tuple[Operation, ...], Tensor]:
        """Return the projection to the queries of all heads (from latent vector or input), and the query tensor."""
        wide = {"kv_heads": self.heads, "group": 1, "head_dim": self.nope_dim + self.rope_dim}
        if latent is None:
            direct, query = linear_projection(f"{name}.query", x, wide)
            return (direct,), query
        norm = rms_norm(latent, f"{name}.q_norm")
        latent = norm.out
        up, query = linear_projection(f"{name}.query", latent.with_renamed_dims({latent.dims[1]: x.dims[1]}), wide)
        return (norm, up), query

    def _key_value(self, name: str, x: Tensor, packed: Tensor) -> tuple[tuple[Operation, ...], Tensor, Tensor]:
        """Return the projections to keys and values of all heads through the latent vector, the keys, and the values.

        ``packed`` holds the latent vector from which they are projected, and the rotary key.
        """
        batch, seq, _ = packed.dims
        sizes = {batch: packed.sizes[0], seq: packed.sizes[1], "kv_rank": self.kv_rank}
        latent = packed.reshaped(sizes, name=f"{name}.latent")
        norm = rms_norm(latent, f"{name}.kv_norm")
        heads = {"kv_heads": self.heads}
        latent = norm.out.with_renamed_dims({seq: x.dims[1]})
        up, _ = linear_projection(f"{name}.kv_up", latent, heads | {"packed": self.nope_dim + self.value_dim})
        key = _headed(f"{name}.key", x, heads | {"head_dim": self.nope_dim + self.rope_dim})
        value = _headed(f"{name}.value", x, heads | {"value_dim": self.value_dim})
        return (norm, up), key, value


@LAYERS.register("additive_attention")
class AdditiveAttention(Layer):
    """Attention whose score is v · tanh(W·query + U·key) (Bahdanau et al., ICLR 2015).

    Inputs are query and memory, the output is the context. Each pair of query and key has a vector of ``hidden``
    entries, so that memory traffic determines the time. ``normalized`` scales v to a learned length and adds a bias
    (Salimans and Kingma, 2016), as GNMT does.
    """

    input_count: ClassVar[int | None] = 2
    hidden: PositiveInt
    normalized: bool = False

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        x, memory = inputs
        if len(x.dims) != 3 or len(memory.dims) != 3 or x.sizes[0] != memory.sizes[0]:
            raise GraphError(f"{name}: memory {format_shape(memory)} does not go with the input {format_shape(x)}")
        batch, seq, features = x.dims
        source = replace(memory, dims=(batch, "keys", features))
        to_query, query = linear_projection(f"{name}.query", x, {"units": self.hidden})
        to_key, key = linear_projection(f"{name}.key", source, {"units": self.hidden})
        pairs = query.reshaped({batch: x.sizes[0], seq: x.sizes[1], "keys": key.sizes[1], "units": self.hidden})
        mixed = pairs.like(f"{name}.tanh")
        extra = (parameter_vector(f"{name}.bias", pairs, "units"),) if self.normalized else ()
        tanh = MemoryPass(f"{name}.tanh", "elementwise", (query, key), mixed, extra, (mixed,), flops_per_element=6.0)
        mixing: tuple[Operation, ...] = (tanh,)
        if choices.recurrence == "looped":
            # Build tanh(query + key + b) times v for one query step at a time, in four separate passes a step.
            steps = float(query.sizes[1])
            calls = _ADDITIVE_ATTENTION_HOST_CALLS[0] * steps, _ADDITIVE_ATTENTION_HOST_CALLS[1] * steps
            keys, summed, shifted, weighted = (
                mixed.like(f"{name}.{part}") for part in ("keys", "sum", "shifted", "weighted")
            )
            passes = (
                MemoryPass(summed.name, "elementwise", (query, keys), summed, host_calls=calls),
                MemoryPass(shifted.name, "elementwise", (summed,), shifted, extra, host_calls=calls),
                MemoryPass(mixed.name, "elementwise", (shifted,), mixed, (), (mixed,), 5.0, host_calls=calls),
                MemoryPass(weighted.name, "elementwise", (mixed,), weighted, (), (mixed,), host_calls=calls),
            )
            sizes = {query.dims[1]: query.sizes[1]} | source.shape
            sums = (LoopInputGradientSum(each, steps) for each in (keys, source.reshaped(sizes, name=f"{name}.memory")))
            mixing, mixed = (*passes, *sums), weighted
        weight = parameter_vector(f"{name}.weight", pairs, "units")
        scores = pairs.without_dims("units", name=f"{name}.scores")
        weights, context = scores.like(f"{name}.softmax"), Tensor(name, x.dims, (*x.sizes[:2], memory.sizes[-1]))
        length = (Tensor(f"{name}.length", ("one",), (1,), "parameter"),) if self.normalized else ()
        soft = MemoryPass(
            f"{name}.softmax", "softmax", (scores,), weights, length, (weights,), 6.0, reduced_dims=("keys",)
        )
        operations = (to_query, to_key, *mixing, Contraction(f"{name}.scores", mixed, weight, scores), soft)
        return LayerOperations((*operations, Contraction(f"{name}.core.context", weights, source, context)), context)


#: Calls of the host for each of the four passes of a step of additive attention in a loop, forward and backward. With
#: products, softmax, sums, reshapes and the concatenation to the cell's input, a step has 16 and 28 operations
#: (TensorFlow's attention_wrapper.py, by name).
_ADDITIVE_ATTENTION_HOST_CALLS = (4.0, 7.0)


@LAYERS.register("relative_attention")
class RelativeAttention(Layer):
    """Causal attention with relative positions over a segment and the saved states of ``memory`` earlier positions.

    Scores depend on content and distance: (q + u) · k + (q + v) · r, with r a projection of encoded distances. No
    gradient flows to the saved states.

    One product yields query, key and value of saved states and segment. The projection of distances is the same for all
    samples; it counts as a pass over its weight whose result is not saved. All scores are saved, as no fused kernel
    supports them. An extra pass shifts the scores by distance, so that each row starts at its own position.

    Code that keeps heads as the last dim (`LayerImplementations.relative_attention_layout`, as the paper's code does)
    transposes scores after each product, before the sum, and twice for the softmax. It shifts them by a pad and a
    slice, and masks them by a product and a sum.

    Reference: Dai et al., Transformer-XL, ACL 2019, section 3.3.
    """

    tensor_parallel_dims = ("kv_heads",)
    heads: PositiveInt
    head_dim: PositiveInt | None = None
    memory: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        batch, seq, hidden = x.dims
        head_dim = self.head_dim or int(x.sizes[-1]) // self.heads
        head_sizes = {"kv_heads": self.heads, "head_dim": head_dim}
        states = {batch: x.sizes[0], "keys": x.sizes[1] + self.memory, hidden: x.sizes[2]}
        joined = Tensor.of(f"{name}.joined", states)
        join = MemoryPass(joined.name, "copy", (x,), joined, flops_per_element=0.0)
        packed, _ = linear_projection(f"{name}.qkv", joined, {"kv_heads": self.heads, "packed": 3 * head_dim})
        query = _headed(f"{name}.query", x, head_sizes)
        key, value = (_headed(f"{name}.{part}", joined, head_sizes) for part in ("key", "value"))
        transposed = choices.relative_attention_layout == "heads last"
        scored, scores = self._scores(name, query, key, x, transposed=transposed)
        dims = {d: query.size(d) for d in (batch, seq, "kv_heads")} | {"value_dim": head_dim}
        context = Tensor.of(f"{name}.context", dims)
        core = _softmax_weighted_sum(
            name, scores, value, context, dropout=self.dropout, visible=1.0, choices=choices, transposed=transposed
        )
        output, out = linear_projection(f"{name}.out", context, {hidden: x.sizes[-1]}, contract=2)
        host_copies = self._memories_through_host(name, x) if choices.memories_through_host else ()
        return LayerOperations((*host_copies, join, packed, *scored, *core, output), out)

    def _memories_through_host(self, name: str, x: Tensor) -> tuple[Operation, ...]:
        """Return the passes that copy Transformer-XL memories between steps through host memory, in fp32."""
        sizes = {x.dims[0]: x.sizes[0], "remembered": self.memory, x.dims[2]: x.sizes[2]}
        states = Tensor.of(f"{name}.memory", sizes, needs_gradient=False, stays_fp32=True)
        copied = replace(states, name=f"{name}.fed")
        return (MemoryPass(copied.name, "feed", (states,), copied, flops_per_element=0.0, backward_rule="free"),)

    def _scores(
        self, name: str, query: Tensor, key: Tensor, x: Tensor, *, transposed: bool
    ) -> tuple[tuple[Operation, ...], Tensor]:
        """Return the operations of the scores by content and by distance, and the scores.

        The scores are shifted, summed, scaled and masked.
        """
        batch, seq, heads, head_dim = query.dims
        head_sizes = {heads: query.size(heads), head_dim: query.size(head_dim)}
        weight = Tensor(
            f"{name}.distance.weight", ("in_hidden", *head_sizes), (x.sizes[-1], *head_sizes.values()), "parameter"
        )
        distance = Tensor(f"{name}.distance", ("keys", *head_sizes), (key.sizes[1], *head_sizes.values()), "statistic")
        projected = MemoryPass(distance.name, "copy", (), distance, (weight,), flops_per_element=0.0)
        dims = {batch: query.sizes[0], heads: head_sizes[heads], seq: query.sizes[1], "keys": key.sizes[1]}
        content = Tensor.of(f"{name}.core.content", dims)
        placed, shifted, summed = (content.like(f"{name}.core.{part}") for part in ("placed", "shifted", "summed"))
        operations: list[Operation] = [projected]
        for scores, keys in ((content, key), (placed, distance)):
            biased = query.like(f"{scores.name}.query")
            shift = Tensor.of(f"{scores.name}.bias", head_sizes, "parameter")
            operations.append(MemoryPass(biased.name, "elementwise", (query,), biased, (shift,)))
            operations.append(Contraction(scores.name, biased, keys, scores))
        if transposed:
            content, placed = (_append_transpose(scores, operations) for scores in (content, placed))
            placed = _append_copy(placed, f"{placed.name}.padded", operations)
        operations.append(MemoryPass(shifted.name, "copy", (placed,), shifted, flops_per_element=0.0))
        operations.append(MemoryPass(summed.name, "elementwise", (content, shifted), summed, backward_rule="free"))
        if transposed:
            masked_rows = summed.like(f"{name}.core.shown")
            operations.append(MemoryPass(masked_rows.name, "elementwise", (summed,), masked_rows))
            summed = masked_rows
        masked, scores = _scale_and_mask(f"{name}.core", summed)
        return (*operations, *masked), scores


# Graph networks on sampled neighbourhoods


@LAYERS.register("relational_graph_attention")
class RelationalGraphAttention(Layer):
    """Graph attention over sampled neighbours, computed for each of ``relations`` kinds of edges and summed.

    Shapes: (batch, nodes, features) to (batch, targets, heads · features). The first ``targets`` nodes of a sample
    receive messages over its ``edges`` edges of all relations. Each relation has a projection to ``heads`` of
    ``head_dim``, and two score vectors a head (Velickovic et al., ICLR 2018; Busbridge et al., Relational graph
    attention networks, 2019). ``projected`` is the average number of relations that project a node.
    """

    input_count: ClassVar[int | None] = 1
    relations: PositiveInt
    heads: PositiveInt
    head_dim: PositiveInt
    edges: PositiveInt
    targets: PositiveInt
    projected: float = 1.0

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        if self.targets > x.sizes[1]:
            raise GraphError(f"{name}: {format_shape(x)} has fewer nodes than the {self.targets} targets")
        batch, _, features = x.dims
        width = self.heads * self.head_dim
        relation_nodes = x.sizes[1] * self.projected / self.relations
        sorted_nodes = Tensor(f"{name}.by_relation", ("relations", batch, "nodes", features),
                              (self.relations, x.sizes[0], relation_nodes, x.sizes[2]))  # fmt: skip
        copy = MemoryPass(f"{name}.by_relation", "gather", (x,), sorted_nodes, flops_per_element=0.0)
        product, messages = linear_projection(
            f"{name}.project", sorted_nodes, {"messages": width}, shared=("relations",)
        )
        operations: list[Operation] = [copy, product]
        scores = Tensor(f"{name}.scores", (batch, "edges", "heads"), (x.sizes[0], self.edges, self.heads))
        vectors = Tensor(
            f"{name}.attention", ("relations", "sides", "messages"), (self.relations, 2, width), "parameter"
        )
        score = MemoryPass(scores.name, "softmax", (messages,), scores, (vectors,), (scores, messages), 6.0)
        carried = Tensor(f"{name}.carried", (batch, "edges", "messages"), (x.sizes[0], self.edges, width))
        out = Tensor(name, (batch, "nodes", features), (x.sizes[0], self.targets, width))
        shift = (Tensor(f"{name}.bias", ("relations", "messages"), (self.relations, width), "parameter"),)
        gather = MemoryPass(carried.name, "gather", (messages, scores), carried, flops_per_element=1.0)
        add = MemoryPass(name, "reduce", (carried,), out, shift)
        return LayerOperations((*operations, score, gather, add), out)
