"""Projections, attention and output projection, as one call ``attention``; scores, softmax and weighted sum written
out, as one call ``sdpa``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paleo.importers.patterns.group import LIGHT, NORMS, PLAIN, CallGroup, closed, foreign
from paleo.importers.trace import Call, dropout_rate, record

if TYPE_CHECKING:
    from paleo.importers.trace import Trace, Value


def written_out_scores(trace: Trace) -> list[CallGroup]:
    """Scores, softmax and weighted sum written out, as one call ``sdpa``."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "softmax" and len(call.out.shape) in (3, 4) and not call.out.static:
            group = _scores_around(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


def _scores_around(softmax: Call, consumers: dict[Value, list[Call]], outputs: set[Value]) -> CallGroup | None:
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
    if not closed(calls, context.out, consumers, outputs):
        return None
    masks = [v for call in chain for v in call.inputs if v is not None and v.static and v.sources]
    options = {"is_causal": causal, "dropout_p": dropout, "transposed_key": True}
    flops = (scores.flops or 0.0) + (context.flops or 0.0)
    substitute = record(
        "sdpa",
        "attention written out",
        [query, key, value, None, *dict.fromkeys(masks)],
        [(context.out.shape, False)],
        options=options,
        flops=flops,
        path=softmax.path,
    )
    return CallGroup(calls, substitute, context.out)


def _up_to_product(softmax: Call) -> tuple[Call, list[Call], bool] | None:
    """From the softmax back to the product that makes the scores, over scales, masks and biases."""
    chain: list[Call] = []
    causal = False
    value = softmax.inputs[0]
    for _ in range(16):
        call = value.maker if value is not None else None
        if call is None:
            return None
        if call.kind in ("matmul", "baddbmm") and call.out.elements == softmax.out.elements:
            return call, chain, causal
        moving = [v for v in call.inputs if v is not None and not v.static and not v.index]
        if call.kind not in ("elementwise", "add", "multiply", "view", "dropout", "copy", "activation") or not moving:
            return None
        causal = causal or triangular(call)
        large = [v for v in moving if v.elements == softmax.out.elements]
        if len(large) != 1 or len(moving) != 1:
            return None
        chain.append(call)
        value = large[0]
    return None


def triangular(call: Call, depth: int = 12) -> bool:
    """Whether a mask was substitute by ``tril`` or ``triu``."""
    stack, seen = [(v, depth) for v in call.inputs if v is not None and v.static], set[int]()
    while stack:
        value, left = stack.pop()
        if value.maker is None or id(value) in seen or not left:
            continue
        seen.add(id(value))
        if value.maker.label.strip("_") in ("tril", "triu"):
            return True
        stack.extend((v, left - 1) for v in value.maker.inputs if v is not None)
    return False


def _down_to_product(softmax: Call, consumers: dict[Value, list[Call]]) -> tuple[Call, list[Call], float] | None:
    """From the softmax to the product with the values, over dropout and views."""
    chain: list[Call] = []
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
    """Where a query, key or value comes from: the projection, the calls between, and what they do."""

    def __init__(self, linear: Call, calls: list[Call]) -> None:
        self.linear, self.calls = linear, calls
        self.rotary = any(
            call.kind in ("multiply", "elementwise")
            and any(v is not None and v.static and v.elements > 1 for v in call.inputs)
            for call in calls
        )
        self.norms = [call for call in calls if call.kind in NORMS]


def _source(value: Value) -> _Source | None:
    """The single projection that a value is computed from through cheap calls, or None."""
    linear, calls, stack, seen = None, list[Call](), [value], set[int]()
    while stack:
        value = stack.pop()
        if value.static or value.index or id(value) in seen:
            continue
        seen.add(id(value))
        call = value.maker
        if call is None:
            return None
        if call.kind == "linear":
            if linear is not None and call is not linear:
                return None
            linear = call
        elif call.kind in LIGHT:
            if call not in calls:
                calls.append(call)
                stack.extend(v for v in call.inputs if v is not None)
        else:
            return None
    return None if linear is None else _Source(linear, calls)


def attention_layers(trace: Trace) -> list[CallGroup]:
    """Projections, attention and output projection, as one call ``attention``."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "sdpa":
            group = _attention_around(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


def _attention_around(core: Call, consumers: dict[Value, list[Call]], outputs: set[Value]) -> CallGroup | None:
    values = [value for value in core.inputs[:3] if value is not None]
    sources = [_source(value) for value in values]
    down = _output_projection(core, consumers)
    if len(sources) != 3 or any(source is None for source in sources) or down is None:
        return None
    query, key, value = (source for source in sources if source is not None)
    passes, output = down
    sizes = _heads(core, query.linear, key.linear, value.linear, output)
    if sizes is None:
        return None
    shape, inputs = sizes
    options: dict[str, Any] = dict(shape)
    normed = _query_norms(query, key, value, shape["head_dim"])
    biases = _biases(query.linear, key.linear, value.linear, output)
    if normed is None or biases is None:
        return None
    calls = dict.fromkeys(
        [*query.calls, *key.calls, *value.calls, query.linear, key.linear, value.linear, core, *passes, output]
    )
    calls = {call: None for call in calls if not call.out.static}
    if not closed(calls, output.out, consumers, outputs) or foreign(calls, inputs):
        return None
    options |= biases | {"qk_norm": normed, "rotary": query.rotary and key.rotary}
    options |= {
        "causal": bool(core.options.get("is_causal")) or _masked(core),
        "dropout": dropout_rate(core.options.get("dropout_p")),
    }
    flops = sum(call.flops or 0.0 for call in calls)
    weights = list(
        dict.fromkeys(
            w for call in calls for w in call.inputs[1:] if w is not None and w.sources and call.kind == "linear"
        )
    )
    weights += [w for norm in (*query.norms, *key.norms) for w in norm.inputs[1:] if w is not None and w.sources]
    weights += [w for w in core.inputs[3:] if w is not None and w.sources]
    substitute = record(
        "attention",
        "attention",
        [*inputs, *weights],
        [(output.out.shape, False)],
        options=options,
        flops=flops,
        path=core.path,
    )
    options["inputs"] = len(inputs)
    return CallGroup(calls, substitute, output.out)


def _masked(core: Call) -> bool:
    mask = core.inputs[3] if len(core.inputs) > 3 else None
    return (
        mask is not None
        and mask.maker is not None
        and (mask.maker.label.strip("_") in ("tril", "triu") or triangular(mask.maker))
    )


def _output_projection(core: Call, consumers: dict[Value, list[Call]]) -> tuple[list[Call], Call] | None:
    chain, value = list[Call](), core.out
    for _ in range(12):
        readers = consumers.get(value, [])
        if len(readers) != 1:
            return None
        call = readers[0]
        if call.kind == "linear" and call.inputs[0] is value:
            return chain, call
        if call.kind not in PLAIN or call.out.elements != value.elements:
            return None
        chain.append(call)
        value = call.out
    return None


def _heads(core: Call, query: Call, key: Call, value: Call, output: Call) -> tuple[dict[str, int], list[Value]] | None:
    """Heads, their size and the inputs, if the projections are those of one attention over (batch, seq, hidden)."""
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
    """Whether queries and keys are normed head by head; None for norms of another kind."""
    if not (query.norms or key.norms or value.norms):
        return False
    norm_sizes = [
        [w.elements for w in call.inputs[1:] if w is not None] for source in (query, key) for call in source.norms
    ]
    good = len(query.norms) == 1 and len(key.norms) == 1 and query.linear is not key.linear and not value.norms
    return True if good and all(sizes == [head_dim] for sizes in norm_sizes) else None


def _biases(query: Call, key: Call, value: Call, output: Call) -> dict[str, bool | None] | None:
    q, k, v, o = (len(call.inputs) > 2 and call.inputs[2] is not None for call in (query, key, value, output))
    if q == v and (k == q or q):
        return {"bias": q, "key_bias": None if k == q else False, "out_bias": o}
    return None
