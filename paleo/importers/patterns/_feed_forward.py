"""Pattern of feed-forward blocks: up projection, activation (with or without a gate) and down projection."""

from __future__ import annotations

from paleo.importers._trace import Call, Trace, Value, dropout_rate, record
from paleo.importers.patterns._group import CallGroup, closed, foreign


def feed_forward_blocks(trace: Trace) -> list[CallGroup]:
    """Find feed-forward blocks; each becomes one call ``mlp``."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "linear" and call.inputs[0] is not None and not call.out.static:
            group = _feed_into(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


def _feed_into(down: Call, consumers: dict[Value, list[Call]], outputs: set[Value]) -> CallGroup | None:
    value, calls, dropout = down.inputs[0], [down], 0.0
    if value is not None and value.maker is not None and value.maker.kind == "dropout":
        dropout = dropout_rate(value.maker.options.get("p", 0.5))
        calls.append(value.maker)
        value = value.maker.inputs[0]
    inner = value.maker if value is not None else None
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
        or not closed(calls, down.out, consumers, outputs)
        or foreign(calls, [x])
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
    substitute = record(
        "mlp", "feed forward", [x, *weights], [(down.out.shape, False)], options=options, flops=flops, path=down.path
    )
    return CallGroup(calls, substitute, down.out)


_Up = tuple[str, list[Call], list[Call]]


_PLAIN_FUNCTIONS = frozenset({"gelu", "gelu_tanh", "quick_gelu", "relu", "silu", "tanh"})


_GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu"}


def _projection(value: Value | None) -> Call | None:
    return value.maker if value is not None and value.maker is not None and value.maker.kind == "linear" else None


def _plain_up(act: Call) -> _Up | None:
    up = _projection(act.inputs[0])
    function = act.options.get("function", "")
    return (function, [act], [up]) if up is not None and function in _PLAIN_FUNCTIONS else None


def _gated_up(product: Call) -> _Up | None:
    """Return the calls of a product of an activated and a plain projection of one input."""
    if product.kind != "multiply" or len(product.inputs) != 2:
        return None
    for gate, other in (product.inputs, product.inputs[::-1]):
        act = gate.maker if gate is not None else None
        if act is None or act.kind != "activation" or act.options.get("function") not in _GATES:
            continue
        first, second = _projection(act.inputs[0]), _projection(other)
        halves = [
            v.maker for v in (act.inputs[0], other) if v is not None and v.maker is not None and v.maker.kind == "slice"
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
