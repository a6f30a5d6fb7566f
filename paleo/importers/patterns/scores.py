"""Attention written out: scores, softmax and weighted sum, as one call ``sdpa``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.importers.patterns.group import CallGroup, closed
from paleo.importers.trace import dropout_rate, record

if TYPE_CHECKING:
    from paleo.importers.trace import Call, Trace, Value


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
    context, rest, dropout = after
    query, key = scores.inputs[0], scores.inputs[1]
    value = context.inputs[1]
    if query is None or key is None or value is None or len(query.shape) not in (3, 4):
        return None
    calls = [scores, *chain, softmax, *rest, context]
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
