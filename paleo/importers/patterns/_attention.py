"""Patterns of recorded calls that are recognised as attention or feed-forward blocks.

Projections, attention and output projection become one call ``attention``. Scores, softmax and weighted sum in separate
calls become one call ``sdpa``. A feed-forward block has an up projection, an activation (with or without a gate) and a
down projection.
"""

from __future__ import annotations

from typing import Any

from paleo.importers._network_trace import Trace, TracedCall, TracedTensor, dropout_rate, make_call
from paleo.importers.patterns._elementary_steps import (
    CHEAP_CALL_KINDS,
    DATA_MOVING_KINDS,
    NORM_CALL_KINDS,
    MatchedSubgraph,
    is_self_contained,
    reads_outside_activations,
)


def find_unfused_attention(trace: Trace) -> list[MatchedSubgraph]:
    """Find attention that is written as score product, softmax and weighted sum.

    Each group of such calls is returned with a substitute, one call of kind ``sdpa``.
    """
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "softmax" and len(call.out.shape) in (3, 4) and not call.out.is_static:
            group = _scores_around(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


def _scores_around(
    softmax: TracedCall, consumers: dict[TracedTensor, list[TracedCall]], outputs: set[TracedTensor]
) -> MatchedSubgraph | None:
    before = _up_to_product(softmax)
    after = _down_to_product(softmax, consumers)
    if before is None or after is None:
        return None
    scores, chain, causal = before
    context, passes, dropout = after
    query, key = scores.inputs[0], scores.inputs[1]
    value = context.inputs[1]
    if query is None or key is None or value is None or len(query.shape) not in (3, 4):
        return None
    calls = [scores, *chain, softmax, *passes, context]
    if not is_self_contained(calls, context.out, consumers, outputs):
        return None
    masks = [v for call in chain for v in call.inputs if v is not None and v.is_static and v.parameter_names]
    options = {"is_causal": causal, "dropout_p": dropout, "transposed_key": True}
    flops = (scores.flops or 0.0) + (context.flops or 0.0)
    substitute = make_call(
        "sdpa",
        "attention written out",
        [query, key, value, None, *dict.fromkeys(masks)],
        [(context.out.shape, False)],
        options=options,
        flops=flops,
        path=softmax.path,
    )
    return MatchedSubgraph(calls, substitute, context.out)


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
        moving = [v for v in call.inputs if v is not None and not v.is_static and not v.is_integer]
        if call.kind not in ("elementwise", "add", "multiply", "view", "dropout", "copy", "activation") or not moving:
            return None
        causal = causal or is_causal_mask(call)
        large = [v for v in moving if v.elements == softmax.out.elements]
        if len(large) != 1 or len(moving) != 1:
            return None
        chain.append(call)
        value = large[0]
    return None


def is_causal_mask(call: TracedCall, depth: int = 12) -> bool:
    """Return True if ``tril`` or ``triu`` made a static input of a call, which is then a causal mask.

    At most ``depth`` calls are followed backwards.
    """
    stack, seen = [(v, depth) for v in call.inputs if v is not None and v.is_static], set[int]()
    while stack:
        value, left = stack.pop()
        if value.producing_call is None or id(value) in seen or not left:
            continue
        seen.add(id(value))
        if value.producing_call.source_name.strip("_") in ("tril", "triu"):
            return True
        stack.extend((v, left - 1) for v in value.producing_call.inputs if v is not None)
    return False


def _down_to_product(
    softmax: TracedCall, consumers: dict[TracedTensor, list[TracedCall]]
) -> tuple[TracedCall, list[TracedCall], float] | None:
    """Trace forward from a softmax to the product with the values, across dropout and views.

    Returns (call of the product, calls in between, dropout rate), or None if no product is found.
    """
    chain: list[TracedCall] = []
    dropout, value = 0.0, softmax.out
    for _ in range(8):
        readers = consumers.get(value, [])
        if len(readers) != 1:
            return None
        call = readers[0]
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
            call.kind in ("multiply", "elementwise")
            and any(v is not None and v.is_static and v.elements > 1 for v in call.inputs)
            for call in calls
        )
        self.norms = [call for call in calls if call.kind in NORM_CALL_KINDS]


def _source(value: TracedTensor) -> _Source | None:
    """Find the linear projection behind a query, key or value, across element-wise calls; None if not unique."""
    linear, calls, stack, seen = None, list[TracedCall](), [value], set[int]()
    while stack:
        value = stack.pop()
        if value.is_static or value.is_integer or id(value) in seen:
            continue
        seen.add(id(value))
        call = value.producing_call
        if call is None:
            return None
        if call.kind == "linear":
            if linear is not None and call is not linear:
                return None
            linear = call
        elif call.kind in CHEAP_CALL_KINDS:
            if call not in calls:
                calls.append(call)
                stack.extend(v for v in call.inputs if v is not None)
        else:
            return None
    return None if linear is None else _Source(linear, calls)


def find_attention_layers(trace: Trace) -> list[MatchedSubgraph]:
    """Find scaled dot-product attention together with the query, key, value and output projections around the core.

    Each group of such calls is returned with a substitute, one call of kind ``attention``.
    """
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "sdpa":
            group = _attention_around(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


class _Projections:
    """Traced calls of one attention layer: input projections, scaled dot-product attention, output projection.

    Kept are the origins of query, key and value, the calls that move the result, and the output projection.
    """

    def __init__(
        self, sources: tuple[_Source, _Source, _Source], core: TracedCall, moves: list[TracedCall], output: TracedCall
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


def _projections(core: TracedCall, consumers: dict[TracedTensor, list[TracedCall]]) -> _Projections | None:
    sources = [_source(value) for value in core.inputs[:3] if value is not None]
    output = _output_projection(core, consumers)
    match sources:
        case [_Source() as query, _Source() as key, _Source() as value] if output is not None:
            return _Projections((query, key, value), core, *output)
    return None


def _attention_around(
    core: TracedCall, consumers: dict[TracedTensor, list[TracedCall]], outputs: set[TracedTensor]
) -> MatchedSubgraph | None:
    projections = _projections(core, consumers)
    sizes = None if projections is None else _heads(core, *projections.linears, projections.output)
    if projections is None or sizes is None:
        return None
    heads, inputs = sizes
    options, calls, output = projections.options(heads["head_dim"]), projections.calls, projections.output
    if (
        options is None
        or not is_self_contained(calls, output.out, consumers, outputs)
        or reads_outside_activations(calls, inputs)
    ):
        return None
    substitute = make_call(
        "attention",
        "attention",
        [*inputs, *projections.weights],
        [(output.out.shape, False)],
        options=heads | options | {"inputs": len(inputs)},
        flops=sum(call.flops or 0.0 for call in calls),
        path=core.path,
    )
    return MatchedSubgraph(calls, substitute, output.out)


def _masked(core: TracedCall) -> bool:
    mask = core.inputs[3] if len(core.inputs) > 3 else None
    return (
        mask is not None
        and mask.producing_call is not None
        and (mask.producing_call.source_name.strip("_") in ("tril", "triu") or is_causal_mask(mask.producing_call))
    )


def _output_projection(
    core: TracedCall, consumers: dict[TracedTensor, list[TracedCall]]
) -> tuple[list[TracedCall], TracedCall] | None:
    chain, value = list[TracedCall](), core.out
    for _ in range(12):
        readers = consumers.get(value, [])
        if len(readers) != 1:
            return None
        call = readers[0]
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
    kv = total // head_dim - heads
    if total % head_dim or kv < 2 or kv % 2 or heads % (kv // 2):
        return None
    kv_heads = kv // 2
    packed_all, packed_kv = query is key and key is value, key is value and query is not key
    separate = query is not key and key is not value and query is not value
    if packed_all and memory is not x:
        return None
    if separate and (widths[id(query)] != heads * head_dim or widths[id(key)] != widths[id(value)]):
        return None
    if not (packed_all or packed_kv or separate):
        return None
    inputs = [x] if memory is x else [x, memory]
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}, inputs


def _query_norms(query: _Source, key: _Source, value: _Source, head_dim: int) -> bool | None:
    """Return True if queries and keys have a norm per head, False if they have none, None for any other norms."""
    if not (query.norms or key.norms or value.norms):
        return False
    norm_sizes = [
        [w.elements for w in call.inputs[1:] if w is not None] for source in (query, key) for call in source.norms
    ]
    good = len(query.norms) == 1 and len(key.norms) == 1 and query.linear is not key.linear and not value.norms
    return True if good and all(sizes == [head_dim] for sizes in norm_sizes) else None


def _biases(query: TracedCall, key: TracedCall, value: TracedCall, output: TracedCall) -> dict[str, bool | None] | None:
    q, k, v, o = (len(call.inputs) > 2 and call.inputs[2] is not None for call in (query, key, value, output))
    if q == v and (k == q or q):
        return {"bias": q, "key_bias": None if k == q else False, "out_bias": o}
    return None


def find_feed_forward_blocks(trace: Trace) -> list[MatchedSubgraph]:
    """Find feed-forward blocks: up projection, activation (perhaps gated) and down projection.

    Each group of such calls is returned with a substitute, one call of kind ``mlp``.
    """
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "linear" and call.inputs[0] is not None and not call.out.is_static:
            group = _feed_forward_before(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


def _feed_forward_before(
    down: TracedCall, consumers: dict[TracedTensor, list[TracedCall]], outputs: set[TracedTensor]
) -> MatchedSubgraph | None:
    value, calls, dropout = down.inputs[0], [down], 0.0
    if value is not None and value.producing_call is not None and value.producing_call.kind == "dropout":
        dropout = dropout_rate(value.producing_call.options.get("p", 0.5))
        calls.append(value.producing_call)
        value = value.producing_call.inputs[0]
    inner = value.producing_call if value is not None else None
    block = None if inner is None else _plain_up(inner) if inner.kind == "activation" else _gated_up(inner)
    if block is None:
        return None
    function, more, ups = block
    calls += [*more, *ups]
    x = ups[0].inputs[0]
    same = x is not None and x.shape == down.out.shape and len(x.shape) > 1
    biases = {len(call.inputs) > 2 and call.inputs[2] is not None for call in (*ups, down)}
    if (
        x is None
        or not same
        or len(biases) != 1
        or not is_self_contained(calls, down.out, consumers, outputs)
        or reads_outside_activations(calls, [x])
    ):
        return None
    options = {
        "ffn": down.inputs[0].shape[-1] if down.inputs[0] else 0,
        "activation": function,
        "bias": biases.pop(),
        "dropout": dropout,
    }
    weights = [w for call in (*ups, down) for w in call.inputs[1:] if w is not None]
    flops = sum(call.flops or 0.0 for call in calls)
    substitute = make_call(
        "mlp", "feed forward", [x, *weights], [(down.out.shape, False)], options=options, flops=flops, path=down.path
    )
    return MatchedSubgraph(calls, substitute, down.out)


_Up = tuple[str, list[TracedCall], list[TracedCall]]


_PLAIN_FUNCTIONS = frozenset({"gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh"})


_GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu"}


def _projection(value: TracedTensor | None) -> TracedCall | None:
    return (
        value.producing_call
        if value is not None and value.producing_call is not None and value.producing_call.kind == "linear"
        else None
    )


def _plain_up(act: TracedCall) -> _Up | None:
    up = _projection(act.inputs[0])
    function = act.options.get("function", "")
    return (function, [act], [up]) if up is not None and function in _PLAIN_FUNCTIONS else None


def _gated_up(product: TracedCall) -> _Up | None:
    """Return the calls of a gated up projection, f(x·W) · (x·V), that ends in ``product``; None if not gated."""
    if product.kind != "multiply" or len(product.inputs) != 2:
        return None
    for gate, other in (product.inputs, product.inputs[::-1]):
        act = gate.producing_call if gate is not None else None
        if act is None or act.kind != "activation" or act.options.get("function") not in _GATES:
            continue
        first, second = _projection(act.inputs[0]), _projection(other)
        halves = [
            v.producing_call
            for v in (act.inputs[0], other)
            if v is not None and v.producing_call is not None and v.producing_call.kind == "slice"
        ]
        packed = _projection(halves[0].inputs[0]) if len(halves) == 2 else None
        if packed is not None and all(half.inputs[0] is packed.out for half in halves):
            return _GATES[act.options["function"]], list(dict.fromkeys([product, act, *halves])), [packed]
        if (
            first is not None
            and second is not None
            and first.inputs[0] is second.inputs[0]
            and first.out.shape == second.out.shape
        ):
            return _GATES[act.options["function"]], [product, act], [first, second]
    return None
