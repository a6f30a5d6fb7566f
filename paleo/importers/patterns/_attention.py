"""Patterns of recorded calls that are recognised as attention or feed-forward blocks.

Projections, attention and output projection become one call ``attention``. Scores, softmax and weighted sum in separate
calls become one call ``sdpa``. A feed-forward block has an up projection, an activation (with or without a gate) and a
down projection.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paleo.importers._network_trace import Trace, TracedCall, TracedTensor, dropout_rate
from paleo.importers.patterns._elementary_steps import (
    CHEAP_CALL_KINDS,
    DATA_MOVING_KINDS,
    NORM_CALL_KINDS,
    MatchedSubgraph,
    TensorReaders,
    reads_outside_activations,
)
from paleo.importers.transformers_configuration import GATED_ACTIVATIONS


def find_unfused_attention(trace: Trace) -> list[MatchedSubgraph]:
    """Find attention that is written as score product, softmax and weighted sum.

    Each group of such calls is returned with a substitute, one call of kind ``sdpa``.
    """
    readers = TensorReaders(trace)
    softmaxes = (call for call in trace.calls if call.kind == "softmax" and not call.out.is_static)
    groups = (_scores_around(call, readers) for call in softmaxes if len(call.out.shape) in (3, 4))
    return [group for group in groups if group is not None]


def _scores_around(softmax: TracedCall, readers: TensorReaders) -> MatchedSubgraph | None:
    before, after = _up_to_product(softmax), _down_to_product(softmax, readers)
    if before is None or after is None:
        return None
    scores, chain, causal = before
    context, passes, dropout = after
    (query, key), value = scores.inputs[:2], context.inputs[1]
    if query is None or key is None or value is None or len(query.shape) not in (3, 4):
        return None
    calls = [scores, *chain, softmax, *passes, context]
    if not readers.is_self_contained(calls, context.out):
        return None
    masks = dict.fromkeys(v for call in chain for v in call.tensors if v.is_static and v.parameter_names)
    options = {"is_causal": causal, "dropout_p": dropout, "transposed_key": True}
    flops = (scores.flops or 0.0) + (context.flops or 0.0)
    inputs = [query, key, value, None, *masks]
    return MatchedSubgraph(
        calls, context.out, "sdpa", "attention written out", inputs, options=options, flops=flops, path=softmax.path
    )


def _up_to_product(softmax: TracedCall) -> tuple[TracedCall, list[TracedCall], bool] | None:
    """Trace back from a softmax to the product q·kᵀ that computes the scores, across scales, masks and biases.

    Returns (call of the product, calls in between, True if a mask is causal), or None if no product is found.
    """
    chain: list[TracedCall] = []
    causal = False
    value = softmax.inputs[0]
    for _ in range(16):
        call = value.producing_call if value is not None else None
        if call is None:
            return None
        if call.kind in ("matmul", "baddbmm") and call.out.elements == softmax.out.elements:
            return call, chain, causal
        moving = [v for v in call.tensors if v.is_activation]
        if call.kind not in ("elementwise", "add", "multiply", "view", "dropout", "copy", "activation"):
            return None
        if len(moving) != 1 or moving[0].elements != softmax.out.elements:
            return None
        causal = causal or _is_causal_mask(call)
        chain.append(call)
        value = moving[0]
    return None


def _is_causal_mask(call: TracedCall, depth: int = 12) -> bool:
    """Return True if ``tril`` or ``triu`` made a static input of a call, which is then a causal mask.

    At most ``depth`` calls are followed backwards.
    """
    stack, seen = [(v, depth) for v in call.tensors if v.is_static], set[int]()
    while stack:
        value, left = stack.pop()
        if value.producing_call is None or id(value) in seen or not left:
            continue
        seen.add(id(value))
        if value.producing_call.source_name.strip("_") in ("tril", "triu"):
            return True
        stack.extend((v, left - 1) for v in value.producing_call.tensors)
    return False


def _down_to_product(softmax: TracedCall, readers: TensorReaders) -> tuple[TracedCall, list[TracedCall], float] | None:
    """Trace forward from a softmax to the product with the values, across dropout and views.

    Returns (call of the product, calls in between, dropout rate), or None if no product is found.
    """
    chain: list[TracedCall] = []
    dropout, value = 0.0, softmax.out
    for _ in range(8):
        call = readers.sole_reader(value)
        if call is None:
            return None
        if call.kind == "matmul" and call.inputs[0] is value:
            return call, chain, dropout
        if call.kind not in ("dropout", "view", "copy") or call.out.elements != softmax.out.elements:
            return None
        dropout = dropout_rate(call.options.get("p", 0.5)) if call.kind == "dropout" else dropout
        chain.append(call)
        value = call.out
    return None


class _Source:
    """Origin of a query, key or value tensor: the linear projection and the calls between projection and attention.

    ``rotary`` is True if these calls apply rotary position embedding; ``norms`` are the norms among the calls.
    """

    def __init__(self, linear: TracedCall, calls: list[TracedCall]) -> None:
        self.linear, self.calls = linear, calls
        self.rotary = any(
            call.kind in ("multiply", "elementwise") and any(v.is_static and v.elements > 1 for v in call.tensors)
            for call in calls
        )
        self.norms = [call for call in calls if call.kind in NORM_CALL_KINDS]


def _source(value: TracedTensor) -> _Source | None:
    """Find the linear projection behind a query, key or value, across element-wise calls; None if not unique."""
    linear, calls, stack, seen = None, list[TracedCall](), [value], set[int]()
    while stack:
        value = stack.pop()
        if not value.is_activation or id(value) in seen:
            continue
        seen.add(id(value))
        call = value.producing_call
        if call is not None and call.kind == "linear" and linear in (None, call):
            linear = call
        elif call is None or call.kind not in CHEAP_CALL_KINDS:
            return None
        elif call not in calls:
            calls.append(call)
            stack.extend(call.tensors)
    return None if linear is None else _Source(linear, calls)


def find_attention_layers(trace: Trace) -> list[MatchedSubgraph]:
    """Find scaled dot-product attention together with the query, key, value and output projections around the core.

    Each group of such calls is returned with a substitute, one call of kind ``attention``.
    """
    readers = TensorReaders(trace)
    groups = (_attention_around(call, readers) for call in trace.calls if call.kind == "sdpa")
    return [group for group in groups if group is not None]


class _Projections:
    """Traced calls of one attention layer: input projections, scaled dot-product attention, output projection.

    Kept are the origins of query, key and value, the calls that move the result, and the output projection.
    """

    def __init__(
        self, sources: Sequence[_Source], core: TracedCall, moves: list[TracedCall], output: TracedCall
    ) -> None:
        self.query, self.key, self.value = self.sources = sources
        self.core, self.moves, self.output = core, moves, output
        self.linears = (self.query.linear, self.key.linear, self.value.linear)

    @property
    def calls(self) -> dict[TracedCall, None]:
        """All calls from the projections of the inputs to the output projection, in order."""
        calls = [call for source in self.sources for call in source.calls]
        ordered = dict.fromkeys([*calls, *self.linears, self.core, *self.moves, self.output])
        return {call: None for call in ordered if not call.out.is_static}

    @property
    def weights(self) -> list[TracedTensor]:
        """Weight tensors of the projections, of query and key norms, and of learned masks."""
        products = [value for call in self.calls if call.kind == "linear" for value in call.inputs[1:]]
        norms = [value for norm in (*self.query.norms, *self.key.norms) for value in norm.inputs[1:]]
        distinct = [*dict.fromkeys(products), *norms, *self.core.inputs[3:]]
        return [value for value in distinct if value is not None and value.parameter_names]

    def options(self, head_dim: int) -> dict[str, Any] | None:
        """Return the attention layer's options except head counts: biases, norms, rotary, causal, dropout.

        Returns None if no attention layer has such norms or biases.
        """
        normed = _query_norms(self.query, self.key, self.value, head_dim)
        biases = _biases(*self.linears, self.output)
        if normed is None or biases is None:
            return None
        return biases | {
            "qk_norm": normed,
            "rotary": self.query.rotary and self.key.rotary,
            "causal": bool(self.core.options.get("is_causal")) or _masked(self.core),
            "dropout": dropout_rate(self.core.options.get("dropout_p")),
        }


def _attention_around(core: TracedCall, readers: TensorReaders) -> MatchedSubgraph | None:
    sources = [source for value in core.tensors[:3] if (source := _source(value)) is not None]
    ending = _output_projection(core, readers)
    if None in core.inputs[:3] or len(sources) != 3 or ending is None:
        return None
    projections, output = _Projections(sources, core, *ending), ending[1].out
    sizes = _heads(core, *projections.linears, projections.output)
    if sizes is None:
        return None
    heads, inputs = sizes
    options, calls = projections.options(heads["head_dim"]), projections.calls
    if options is None or not readers.is_self_contained(calls, output) or reads_outside_activations(calls, inputs):
        return None
    options |= heads | {"inputs": len(inputs)}
    flops = sum(call.flops or 0.0 for call in calls)
    inputs += projections.weights
    return MatchedSubgraph(
        calls, output, "attention", "attention", inputs, options=options, flops=flops, path=core.path
    )


def _masked(core: TracedCall) -> bool:
    mask = core.input(3)
    maker = mask.producing_call if mask is not None else None
    return maker is not None and (maker.source_name.strip("_") in ("tril", "triu") or _is_causal_mask(maker))


def _output_projection(core: TracedCall, readers: TensorReaders) -> tuple[list[TracedCall], TracedCall] | None:
    chain, value = list[TracedCall](), core.out
    for _ in range(12):
        call = readers.sole_reader(value)
        if call is None:
            return None
        if call.kind == "linear" and call.inputs[0] is value:
            return chain, call
        if call.kind not in DATA_MOVING_KINDS or call.out.elements != value.elements:
            return None
        chain.append(call)
        value = call.out
    return None


def _heads(
    core: TracedCall, query: TracedCall, key: TracedCall, value: TracedCall, output: TracedCall
) -> tuple[dict[str, int], list[TracedTensor]] | None:
    """Return the head counts of an attention layer over (batch, seq, hidden), and the layer's input tensors.

    Returns (dict with heads, kv_heads and head_dim; the inputs: one, or two for cross attention). Returns None if the
    projections are not those of one attention.
    """
    q, v = core.inputs[0], core.inputs[2]
    x, memory = query.inputs[0], key.inputs[0]
    if q is None or v is None or x is None or memory is None or len(x.shape) != 3 or len(memory.shape) != 3:
        return None
    head_dim, rows = q.shape[-1], q.shape[-2]
    widths = {id(call): call.out.shape[-1] for call in (query, key, value)}
    heads = output.inputs[0].shape[-1] // head_dim if output.inputs[0] is not None else 0
    if v.shape[-1] != head_dim or value.inputs[0] is not memory or rows != x.shape[1] or memory.shape[0] != x.shape[0]:
        return None
    if v.shape[-2] != memory.shape[1] or output.out.shape != x.shape or heads < 1:
        return None
    total = sum(widths.values())
    kv_heads, odd = divmod(total // head_dim - heads, 2)
    if total % head_dim or kv_heads < 1 or odd or heads % kv_heads:
        return None
    if len(widths) == 1 and memory is not x:
        return None
    if len(widths) == 2 and key is not value:  # the query's product holds the keys or the values alone
        return None
    if len(widths) == 3 and (widths[id(query)] != heads * head_dim or widths[id(key)] != widths[id(value)]):
        return None
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}, [x] if memory is x else [x, memory]


def _query_norms(query: _Source, key: _Source, value: _Source, head_dim: int) -> bool | None:
    """Return True if queries and keys have a norm per head, False if they have none, None for any other norms."""
    if not (query.norms or key.norms or value.norms):
        return False
    norms = [*query.norms, *key.norms]
    alike = len(query.norms) == len(key.norms) == 1 and query.linear is not key.linear and not value.norms
    sizes = [[weight.elements for weight in norm.inputs[1:] if weight is not None] for norm in norms]
    return True if alike and sizes == [[head_dim]] * 2 else None


def _biases(query: TracedCall, key: TracedCall, value: TracedCall, output: TracedCall) -> dict[str, bool | None] | None:
    q, k, v, o = (call.input(2) is not None for call in (query, key, value, output))
    if q == v and (k == q or q):
        return {"bias": q, "key_bias": None if k == q else False, "out_bias": o}
    return None


def find_feed_forward_blocks(trace: Trace) -> list[MatchedSubgraph]:
    """Find feed-forward blocks: up projection, activation (perhaps gated) and down projection.

    Each group of such calls is returned with a substitute, one call of kind ``mlp``.
    """
    readers = TensorReaders(trace)
    linears = (call for call in trace.calls if call.kind == "linear" and not call.out.is_static)
    groups = (_feed_forward_before(call, call.inputs[0], readers) for call in linears if call.inputs[0] is not None)
    return [group for group in groups if group is not None]


def _feed_forward_before(down: TracedCall, hidden: TracedTensor, readers: TensorReaders) -> MatchedSubgraph | None:
    """Find the feed-forward block around its down projection, which reads ``hidden``; None if there is none."""
    calls, dropout, value = [down], 0.0, hidden
    if (dropped := value.producer_of_kind("dropout")) is not None and dropped.inputs[0] is not None:
        dropout, value = dropout_rate(dropped.options.get("p", 0.5)), dropped.inputs[0]
        calls.append(dropped)
    inner = value.producing_call
    block = None if inner is None else _plain_up(inner) if inner.kind == "activation" else _gated_up(inner)
    if block is None:
        return None
    function, more, ups = block
    calls += [*more, *ups]
    x = ups[0].inputs[0]
    biases = {call.input(2) is not None for call in (*ups, down)}
    if x is None or x.shape != down.out.shape or len(x.shape) < 2 or len(biases) != 1:
        return None
    if not readers.is_self_contained(calls, down.out) or reads_outside_activations(calls, [x]):
        return None
    options = {"ffn": hidden.shape[-1], "activation": function, "bias": biases.pop(), "dropout": dropout}
    weights = [w for call in (*ups, down) for w in call.inputs[1:] if w is not None]
    flops = sum(call.flops or 0.0 for call in calls)
    return MatchedSubgraph(
        calls, down.out, "mlp", "feed forward", [x, *weights], options=options, flops=flops, path=down.path
    )


#: Activation, calls between the projections, and up projections of a feed-forward block.
_Up = tuple[str, list[TracedCall], list[TracedCall]]
_PLAIN_FUNCTIONS = frozenset({"gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh"})


def _plain_up(act: TracedCall) -> _Up | None:
    x, function = act.inputs[0], act.options.get("function", "")
    up = x.producer_of_kind("linear") if x is not None else None
    return (function, [act], [up]) if up is not None and function in _PLAIN_FUNCTIONS else None


def _gated_up(product: TracedCall) -> _Up | None:
    """Return the calls of a gated up projection, f(x·W) · (x·V), that ends in ``product``; None if not gated."""
    if product.kind != "multiply" or len(product.inputs) != 2:
        return None
    for gate, other in (product.inputs, product.inputs[::-1]):
        act = gate.producer_of_kind("activation") if gate is not None else None
        gated = GATED_ACTIVATIONS.get(act.options.get("function", "")) if act is not None else None
        if act is None or gated is None:
            continue
        factors = [value for value in (act.inputs[0], other) if value is not None]
        halves = [half for value in factors if (half := value.producer_of_kind("slice")) is not None]
        source = halves[0].inputs[0] if len(halves) == 2 else None
        packed = source.producer_of_kind("linear") if source is not None else None
        if packed is not None and all(half.inputs[0] is packed.out for half in halves):
            return gated, list(dict.fromkeys([product, act, *halves])), [packed]
        ups = [up for value in factors if (up := value.producer_of_kind("linear")) is not None]
        if len(ups) == 2 and ups[0].inputs[0] is ups[1].inputs[0] and ups[0].out.shape == ups[1].out.shape:
            return gated, [product, act], ups
    return None
