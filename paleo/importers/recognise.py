"""Groups of calls that are one layer: norms and activations written out, attention, feed-forward blocks.

A group is taken only where nobody else reads what it makes inside; everything else stays as it is, call by call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paleo.importers.trace import Call, Scope, Trace, Value, record

#: What may stand between a projection and the scores without a weight of its own: views, rotations, scales.
_LIGHT = frozenset(
    {
        "view",
        "slice",
        "copy",
        "cat",
        "elementwise",
        "add",
        "multiply",
        "dropout",
        "activation",
        "rms_norm",
        "layer_norm",
    }
)
_PLAIN = frozenset({"view", "slice", "copy"})
_NORMS = frozenset({"rms_norm", "layer_norm"})


def recognise(trace: Trace) -> Trace:
    """The trace with groups replaced by single calls of kinds ``rms_norm``, ``activation``, ``attention``, ``mlp``."""
    _collapse_scopes(trace)
    trace.without_dead_calls()
    for step in (_written_out_functions, _affine, _written_out_scores, _attention, _feed_forward):
        _replace(trace, step(trace))
        trace.without_dead_calls()
    return trace


class Group:
    """Calls that one call replaces."""

    def __init__(self, calls: Iterable[Call], made: Call, output: Value) -> None:
        self.calls, self.made, self.output = set(calls), made, output


def _replace(trace: Trace, groups: Sequence[Group]) -> None:
    """Puts the made call in the place of its group's last one; groups that overlap an earlier one are left alone."""
    gone: set[Call] = set()
    last: dict[Call, Group] = {}
    for group in groups:
        if group.calls & gone:
            continue
        gone |= group.calls
        last[max(group.calls, key=_Order(trace))] = group
    calls = []
    for call in trace.calls:
        if call in last:
            made, output = last[call].made, last[call].output
            made.parts = [one for one in trace.calls if one in last[call].calls]
            made.outputs, output.maker = [output], made
            calls.append(made)
        elif call not in gone:
            calls.append(call)
    trace.calls = calls


class _Order:
    def __init__(self, trace: Trace) -> None:
        self._places = {id(call): place for place, call in enumerate(trace.calls)}

    def __call__(self, call: Call) -> int:
        return self._places[id(call)]


def _affine(trace: Trace) -> list[Group]:
    """Products with a learned matrix, perhaps of a flattened tensor, as linear layers."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        weight = call.inputs[1] if call.kind in ("addmm", "matmul") and len(call.inputs) > 1 else None
        shift = call.inputs[2] if call.kind == "addmm" and len(call.inputs) > 2 else None
        x = call.inputs[0] if call.inputs else None
        if weight is None or x is None or x.static or len(weight.shape) != 2 or not _is_matrix(weight):
            continue
        if shift is not None and (not shift.static or shift.shape != weight.shape[1:]):
            continue
        calls, output = [call], call.out
        flat = x.maker
        readers = consumers.get(output, [])
        if flat is not None and flat.kind == "view" and flat.inputs[0] is not None and len(readers) == 1:
            wide = flat.inputs[0]
            same = wide.shape[-1] == x.shape[-1] and readers[0].out.shape == (*wide.shape[:-1], weight.shape[1])
            if same and readers[0].kind == "view" and consumers.get(x) == [call] and output not in outputs:
                calls, x, output = [flat, call, readers[0]], wide, readers[0].out
        shift, calls, output = _shifted(call, shift, calls, output, consumers)
        made = record(
            "linear", call.label, [x, weight, shift], [(output.shape, False)], flops=call.flops, path=call.path
        )
        groups.append(Group(calls, made, output))
    return groups


def _shifted(
    call: Call, shift: Value | None, calls: list[Call], output: Value, consumers: dict[Value, list[Call]]
) -> tuple[Value | None, list[Call], Value]:
    """A learned vector that is added to the product, and to nothing else, is its bias."""
    readers = consumers.get(output, [])
    if call.kind != "matmul" or len(readers) != 1 or readers[0].kind != "add" or readers[0].out.shape != output.shape:
        return shift, calls, output
    others = [v for v in readers[0].inputs if v is not None and v is not output]
    if len(others) != 1 or others[0].origin != "parameter" or others[0].shape != output.shape[-1:]:
        return shift, calls, output
    return others[0], [*calls, readers[0]], readers[0].out


def _is_matrix(weight: Value) -> bool:
    """Whether a value is a parameter, or one turned over."""
    while weight.maker is not None and weight.maker.kind == "view" and weight.maker.inputs[0] is not None:
        if weight.maker.inputs[0].elements != weight.elements:
            return False
        weight = weight.maker.inputs[0]
    return weight.origin == "parameter"


# Modules whose name says what their calls add up to.


def _collapse_scopes(trace: Trace) -> None:
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for scope in trace.scopes:
        kind = _kind_of(scope)
        if kind is None or scope.given is None or scope.made is None or scope.given.shape != scope.made.shape:
            continue
        calls = [call for call in trace.calls if _within(call, scope)]
        calls = _between(scope.given, scope.made, calls)
        if calls and _closed(calls, scope.made, consumers, outputs) and not any(call.flops for call in calls):
            made = _collapsed(kind, scope, calls)
            if made is not None:
                groups.append(Group(calls, made, scope.made))
    _replace(trace, groups)


def _kind_of(scope: Scope) -> str | None:
    name = scope.type.lower()
    if (
        "rmsnorm" in name
        or ("layernorm" in name and len(scope.parameters) == 1)
        or (name.endswith("norm") and len(scope.parameters) == 1)
    ):
        return "rms_norm"
    if scope.parameters:
        return None
    if "gelu" in name:
        return "gelu"
    return "silu" if name in ("silu", "swish", "silinactivation", "siluactivation") else None


def _within(call: Call, scope: Scope) -> bool:
    return call.path == scope.path


def _between(start: Value, end: Value, calls: Sequence[Call]) -> list[Call]:
    """Those of ``calls`` on the way back from ``end`` to ``start``."""
    allowed, found, stack = set(calls), dict[Call, None](), [end]
    while stack:
        value = stack.pop()
        if value is start or value.maker is None or value.maker not in allowed or value.maker in found:
            continue
        found[value.maker] = None
        stack.extend(one for one in value.maker.inputs if one is not None)
    return list(found)


def _closed(calls: Iterable[Call], output: Value, consumers: dict[Value, list[Call]], outputs: set[Value]) -> bool:
    """Whether nobody outside reads anything that the calls make, their output apart."""
    inside = set(calls)
    made = [value for call in inside for value in call.outputs if value is not output and not value.static]
    return not any(value in outputs or any(one not in inside for one in consumers.get(value, ())) for value in made)


def _collapsed(kind: str, scope: Scope, calls: Sequence[Call]) -> Call | None:
    given, made = scope.given, scope.made
    assert given is not None and made is not None
    reads = {v for call in calls for v in call.inputs if v is not None}
    weights = [v for v in reads if v.origin == "parameter"]
    foreign = [v for v in reads if v is not given and not v.static and v.maker not in set(calls)]
    if foreign or any(call.kind in _NORMS for call in calls):
        return None
    shape = [(made.shape, False)]
    if kind != "rms_norm":
        spelled = kind == "gelu" and any(call.options.get("function") == "tanh" for call in calls)
        function = "gelu_tanh" if spelled else kind
        return (
            record("activation", kind, [given], shape, options={"function": function}, path=scope.path)
            if not weights
            else None
        )
    if len(weights) > 1 or (weights and weights[0].shape != made.shape[-1:]):
        return None
    return record("rms_norm", scope.type, [given, *(weights or [None])], shape, path=scope.path)  # type: ignore[list-item]


# Functions that a file spells out: GELU by erf, SiLU by sigmoid, norms by means.


def _written_out_functions(trace: Trace) -> list[Group]:
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        name = call.label.lower()
        if call.out.static or not call.inputs or call.inputs[0] is None:
            continue
        found = None
        if name == "erf":
            found = _spelled("gelu", _behind_scale(call.inputs[0]), call, consumers, outputs)
        elif call.kind == "activation" and call.options.get("function") == "sigmoid":
            readers = consumers.get(call.out, [])
            own = len(readers) == 1 and readers[0].kind == "multiply" and call.inputs[0] in readers[0].inputs
            found = _spelled("silu", call.inputs[0], call, consumers, outputs) if own else None
        elif name == "reducemean" and call.out.shape == (*call.inputs[0].shape[:-1], 1):
            found = _spelled("norm", _behind_square(call.inputs[0]), call, consumers, outputs)
        if found is not None:
            groups.append(found)
    return groups


def _behind_scale(value: Value) -> Value:
    """What a constant multiple is a multiple of."""
    maker = value.maker
    if maker is not None and maker.kind in ("elementwise", "multiply"):
        moving = [v for v in maker.inputs if v is not None and not v.static]
        return moving[0] if len(moving) == 1 else value
    return value


def _behind_square(value: Value) -> Value:
    maker = value.maker
    if maker is not None and maker.label.lower() in ("pow", "mul"):
        moving = {v for v in maker.inputs if v is not None and not v.static}
        return next(iter(moving)) if len(moving) == 1 else value
    return value


def _spelled(kind: str, x: Value, seed: Call, consumers: dict[Value, list[Call]], outputs: set[Value]) -> Group | None:
    """The element-wise calls from ``x`` over ``seed`` to where they end, as one call."""
    members = {seed: None} | dict.fromkeys(_between(x, seed.out, _light_makers(seed)))
    reach = {x, *(call.out for call in members)}
    frontier, ends = list(reach), list[Call]()
    while frontier and len(members) < 24:
        value = frontier.pop(0)
        for call in consumers.get(value, ()):
            moving = [v for v in call.inputs if v is not None and not v.static]
            light = call.kind in ("elementwise", "add", "multiply", "reduce") and call not in members
            if light and all(v in reach for v in moving) and (value is not x or kind == "norm" or len(moving) > 1):
                members[call] = None
                reach.add(call.out)
                frontier.append(call.out)
    for call in members:
        weights = [v for v in call.inputs if v is not None and v.origin == "parameter" and v.shape == x.shape[-1:]]
        if call.out.shape == x.shape and (kind != "norm" or weights):
            ends.append(call)
    for end in reversed(ends):
        group = _between(x, end.out, list(members))
        if seed in group and _closed(group, end.out, consumers, outputs):
            return _spelled_group(kind, x, end.out, group)
    return None


def _light_makers(seed: Call) -> list[Call]:
    found, stack = list[Call](), [v.maker for v in seed.inputs if v is not None and v.maker is not None]
    while stack and len(found) < 6:
        call = stack.pop()
        if call.kind in ("elementwise", "multiply", "add", "reduce") and call not in found:
            found.append(call)
            stack.extend(v.maker for v in call.inputs if v is not None and v.maker is not None)
    return found


def _spelled_group(kind: str, x: Value, output: Value, calls: Sequence[Call]) -> Group | None:
    weights = [v for call in calls for v in call.inputs if v is not None and v.origin == "parameter" and v.elements > 1]
    if kind == "norm":
        centred = sum(call.kind == "reduce" for call in calls) > 1
        if len(weights) != 1 + centred:
            return None
        made = record(
            "layer_norm" if centred else "rms_norm", kind, [x, *weights], [(output.shape, False)], path=calls[0].path
        )
        return Group(calls, made, output)
    made = record("activation", kind, [x], [(output.shape, False)], options={"function": kind}, path=calls[0].path)
    return None if weights else Group(calls, made, output)


# Attention.


def _written_out_scores(trace: Trace) -> list[Group]:
    """Scores, softmax and weighted sum written out, as one call ``sdpa``."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "softmax" and len(call.out.shape) in (3, 4) and not call.out.static:
            group = _scores_around(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


def _scores_around(softmax: Call, consumers: dict[Value, list[Call]], outputs: set[Value]) -> Group | None:
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
    if not _closed(calls, context.out, consumers, outputs):
        return None
    masks = [v for call in chain for v in call.inputs if v is not None and v.static and v.sources]
    options = {"is_causal": causal, "dropout_p": dropout, "transposed_key": True}
    flops = (scores.flops or 0.0) + (context.flops or 0.0)
    made = record(
        "sdpa",
        "attention written out",
        [query, key, value, None, *dict.fromkeys(masks)],
        [(context.out.shape, False)],
        options=options,
        flops=flops,
        path=softmax.path,
    )
    return Group(calls, made, context.out)


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
        causal = causal or _triangular(call)
        large = [v for v in moving if v.elements == softmax.out.elements]
        if len(large) != 1 or len(moving) != 1:
            return None
        chain.append(call)
        value = large[0]
    return None


def _triangular(call: Call, depth: int = 12) -> bool:
    """Whether a mask was made by ``tril`` or ``triu``."""
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
        dropout = _rate(call) if call.kind == "dropout" else dropout
        chain.append(call)
        value = call.out
    return None


def _rate(call: Call) -> float:
    rate = call.options.get("p", 0.5)
    return float(rate) if isinstance(rate, int | float) and 0 <= rate < 1 else 0.0


class _Source:
    """Where a query, key or value comes from: the projection, the calls between, and what they do."""

    def __init__(self, linear: Call, calls: list[Call]) -> None:
        self.linear, self.calls = linear, calls
        self.rotary = any(
            call.kind in ("multiply", "elementwise")
            and any(v is not None and v.static and v.elements > 1 for v in call.inputs)
            for call in calls
        )
        self.norms = [call for call in calls if call.kind in _NORMS]


def _source(value: Value) -> _Source | None:
    """The one projection that a value is made from over light calls, if there is one."""
    linear, calls, stack, seen = None, list[Call](), [value], set[int]()
    while stack:
        one = stack.pop()
        if one.static or one.index or id(one) in seen:
            continue
        seen.add(id(one))
        call = one.maker
        if call is None:
            return None
        if call.kind == "linear":
            if linear is not None and call is not linear:
                return None
            linear = call
        elif call.kind in _LIGHT:
            if call not in calls:
                calls.append(call)
                stack.extend(v for v in call.inputs if v is not None)
        else:
            return None
    return None if linear is None else _Source(linear, calls)


def _attention(trace: Trace) -> list[Group]:
    """Projections, attention and output projection, as one call ``attention``."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "sdpa":
            group = _attention_around(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


def _attention_around(core: Call, consumers: dict[Value, list[Call]], outputs: set[Value]) -> Group | None:
    values = [value for value in core.inputs[:3] if value is not None]
    sources = [_source(value) for value in values]
    down = _output_projection(core, consumers)
    if len(sources) != 3 or any(one is None for one in sources) or down is None:
        return None
    query, key, value = (one for one in sources if one is not None)
    rest, output = down
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
        [*query.calls, *key.calls, *value.calls, query.linear, key.linear, value.linear, core, *rest, output]
    )
    calls = {call: None for call in calls if not call.out.static}
    if not _closed(calls, output.out, consumers, outputs) or _foreign(calls, inputs):
        return None
    options |= biases | {"qk_norm": normed, "rotary": query.rotary and key.rotary}
    options |= {
        "causal": bool(core.options.get("is_causal")) or _masked(core),
        "dropout": _number(core.options.get("dropout_p")),
    }
    flops = sum(call.flops or 0.0 for call in calls)
    weights = list(
        dict.fromkeys(
            w for call in calls for w in call.inputs[1:] if w is not None and w.sources and call.kind == "linear"
        )
    )
    weights += [w for one in (*query.norms, *key.norms) for w in one.inputs[1:] if w is not None and w.sources]
    weights += [w for w in core.inputs[3:] if w is not None and w.sources]
    made = record(
        "attention",
        "attention",
        [*inputs, *weights],
        [(output.out.shape, False)],
        options=options,
        flops=flops,
        path=core.path,
    )
    options["inputs"] = len(inputs)
    return Group(calls, made, output.out)


def _masked(core: Call) -> bool:
    mask = core.inputs[3] if len(core.inputs) > 3 else None
    return (
        mask is not None
        and mask.maker is not None
        and (mask.maker.label.strip("_") in ("tril", "triu") or _triangular(mask.maker))
    )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and 0 < value < 1 else 0.0


def _output_projection(core: Call, consumers: dict[Value, list[Call]]) -> tuple[list[Call], Call] | None:
    chain, value = list[Call](), core.out
    for _ in range(12):
        readers = consumers.get(value, [])
        if len(readers) != 1:
            return None
        call = readers[0]
        if call.kind == "linear" and call.inputs[0] is value:
            return chain, call
        if call.kind not in _PLAIN or call.out.elements != value.elements:
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
    apart = query is not key and key is not value and query is not value
    if packed_all and memory is not x:
        return None
    if apart and (widths[id(query)] != heads * head_dim or widths[id(key)] != widths[id(value)]):
        return None
    if not (packed_all or packed_kv or apart):
        return None
    inputs = [x] if memory is x else [x, memory]
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}, inputs


def _query_norms(query: _Source, key: _Source, value: _Source, head_dim: int) -> bool | None:
    """Whether queries and keys are normed head by head; None for norms of another kind."""
    if not (query.norms or key.norms or value.norms):
        return False
    each = [[w.elements for w in call.inputs[1:] if w is not None] for one in (query, key) for call in one.norms]
    good = len(query.norms) == 1 and len(key.norms) == 1 and query.linear is not key.linear and not value.norms
    return True if good and all(sizes == [head_dim] for sizes in each) else None


def _biases(query: Call, key: Call, value: Call, output: Call) -> dict[str, bool | None] | None:
    q, k, v, o = (len(call.inputs) > 2 and call.inputs[2] is not None for call in (query, key, value, output))
    if q == v and (k == q or q):
        return {"bias": q, "key_bias": None if k == q else False, "out_bias": o}
    return None


def _foreign(calls: Iterable[Call], inputs: Sequence[Value]) -> bool:
    """Whether a group reads anything that moves beside its inputs."""
    inside = set(calls)
    read = {v for call in inside for v in call.inputs if v is not None}
    return any(not (v.static or v.index or v in inputs or v.maker in inside) for v in read)


# Feed-forward blocks.


def _feed_forward(trace: Trace) -> list[Group]:
    """Up, activation (perhaps gated), down, as one call ``mlp``."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        if call.kind == "linear" and call.inputs[0] is not None and not call.out.static:
            group = _feed_into(call, consumers, outputs)
            if group is not None:
                groups.append(group)
    return groups


def _feed_into(down: Call, consumers: dict[Value, list[Call]], outputs: set[Value]) -> Group | None:
    value, calls, dropout = down.inputs[0], [down], 0.0
    if value is not None and value.maker is not None and value.maker.kind == "dropout":
        dropout = _rate(value.maker)
        calls.append(value.maker)
        value = value.maker.inputs[0]
    inner = value.maker if value is not None else None
    found = None if inner is None else _plain_up(inner) if inner.kind == "activation" else _gated_up(inner)
    if found is None:
        return None
    function, more, ups = found
    calls += [*more, *ups]
    x = ups[0].inputs[0]
    same = x is not None and x.shape == down.out.shape and len(x.shape) > 1
    biases = {len(call.inputs) > 2 and call.inputs[2] is not None for call in (*ups, down)}
    if (
        x is None
        or not same
        or len(biases) != 1
        or not _closed(calls, down.out, consumers, outputs)
        or _foreign(calls, [x])
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
    made = record(
        "mlp", "feed forward", [x, *weights], [(down.out.shape, False)], options=options, flops=flops, path=down.path
    )
    return Group(calls, made, down.out)


_Up = tuple[str, list[Call], list[Call]]
_PLAIN_FUNCTIONS = frozenset({"gelu", "gelu_tanh", "relu", "silu", "tanh"})
_GATES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "relu": "reglu"}


def _projection(value: Value | None) -> Call | None:
    return value.maker if value is not None and value.maker is not None and value.maker.kind == "linear" else None


def _plain_up(act: Call) -> _Up | None:
    up = _projection(act.inputs[0])
    function = act.options.get("function", "")
    return (function, [act], [up]) if up is not None and function in _PLAIN_FUNCTIONS else None


def _gated_up(product: Call) -> _Up | None:
    """The product of an activated and a plain projection of one input."""
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
