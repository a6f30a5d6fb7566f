"""Patterns of functions in elementary steps.

They are GELU by erf, SiLU by sigmoid, and norms by means; products with a learned matrix; and modules whose name says
what their calls compute.

One call replaces a group of calls only if no other call reads the values computed inside. Everything else stays as it
is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paleo.importers._network_trace import ModuleCall, Trace, TracedCall, TracedTensor, make_call

#: Kinds of calls without weights that may be between a projection and the scores: views, rotations, scales.
CHEAP_CALL_KINDS = frozenset(
    [
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
    ]
)
#: Kinds of calls that move data without changing it.
DATA_MOVING_KINDS = frozenset({"view", "slice", "copy"})
NORM_CALL_KINDS = frozenset({"rms_norm", "layer_norm"})


class MatchedSubgraph:
    """Group of traced calls that form one layer, and the single call that can replace the group."""

    def __init__(self, calls: Iterable[TracedCall], substitute: TracedCall, output: TracedTensor) -> None:
        self.calls, self.substitute, self.output = set(calls), substitute, output


def replace_matched_subgraphs(trace: Trace, groups: Sequence[MatchedSubgraph]) -> None:
    """Replace each group of calls in a trace, in place, by the single call that stands for the group.

    A group that overlaps an earlier one, or of which only some weights are trained, is skipped.
    """
    places = {call: place for place, call in enumerate(trace.calls)}
    gone: set[TracedCall] = set()
    last: dict[TracedCall, MatchedSubgraph] = {}
    for group in groups:
        if not group.calls & gone and _trained_alike(group.calls, trace):
            gone |= group.calls
            last[max(group.calls, key=places.__getitem__)] = group
    calls = []
    for call in trace.calls:
        if call in last:
            substitute, output = last[call].substitute, last[call].output
            substitute.replaced_calls = sorted(last[call].calls, key=places.__getitem__)
            substitute.trains_weights = any(part.trains_weights for part in substitute.replaced_calls)
            substitute.stops_gradient = substitute.replaced_calls[-1].stops_gradient
            substitute.outputs, output.producing_call = [output], substitute
            calls.append(substitute)
        elif call not in gone:
            calls.append(call)
    trace.calls = calls


def _trained_alike(calls: Iterable[TracedCall], trace: Trace) -> bool:
    """Return True if the weights that the calls read are all trained or all frozen."""
    weights = ((call, name) for call in calls for v in call.inputs if v is not None for name in v.parameter_names)
    return len({call.trains_weights and name not in trace.frozen_parameters for call, name in weights}) < 2


def calls_between(start: TracedTensor, end: TracedTensor, calls: Sequence[TracedCall]) -> list[TracedCall]:
    """Return the subset of ``calls`` on the path that computes the tensor ``end`` from the tensor ``start``."""
    allowed, reached, stack = set(calls), dict[TracedCall, None](), [end]
    while stack:
        value = stack.pop()
        if (
            value is start
            or value.producing_call is None
            or value.producing_call not in allowed
            or value.producing_call in reached
        ):
            continue
        reached[value.producing_call] = None
        stack.extend(v for v in value.producing_call.inputs if v is not None)
    return list(reached)


def is_self_contained(
    calls: Iterable[TracedCall],
    output: TracedTensor,
    consumers: dict[TracedTensor, list[TracedCall]],
    outputs: set[TracedTensor],
) -> bool:
    """Return True if calls outside a group read no tensor of the group except its ``output``."""
    inside = set(calls)
    values = [value for call in inside for value in call.outputs if value is not output and not value.is_static]
    readers = (reader for value in values for reader in consumers.get(value, ()))
    return not any(value in outputs for value in values) and all(reader in inside for reader in readers)


def reads_outside_activations(calls: Iterable[TracedCall], inputs: Sequence[TracedTensor]) -> bool:
    """Return True if a group of calls reads an activation from outside the group besides ``inputs``."""
    inside = set(calls)
    read = {v for call in inside for v in call.inputs if v is not None}
    return any(not (v.is_static or v.is_integer or v in inputs or v.producing_call in inside) for v in read)


def find_elementary_step_functions(trace: Trace) -> list[MatchedSubgraph]:
    """Find activations and norms that are computed in elementary steps (power, mean, sqrt, …).

    Each group of such calls is returned with a substitute, one call of kind ``activation`` or a norm.
    """
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        name = call.source_name.lower()
        if call.out.is_static or not call.inputs or call.inputs[0] is None:
            continue
        group = None
        if name == "erf":
            group = _elementwise_group("gelu", _without_scale(call.inputs[0]), call, consumers, outputs)
        elif call.kind == "activation" and call.options.get("function") == "sigmoid":
            readers = consumers.get(call.out, [])
            alone = len(readers) == 1 and readers[0].kind == "multiply" and call.inputs[0] in readers[0].inputs
            group = _elementwise_group("silu", call.inputs[0], call, consumers, outputs) if alone else None
        elif name == "reducemean" and call.out.shape == (*call.inputs[0].shape[:-1], 1):
            group = _elementwise_group("norm", _without_square(call.inputs[0]), call, consumers, outputs)
        if group is not None:
            groups.append(group)
    return groups


def _without_scale(value: TracedTensor) -> TracedTensor:
    """Return the tensor before scaling by a constant; ``value`` itself if no such scaling made the tensor."""
    maker = value.producing_call
    if maker is not None and maker.kind in ("elementwise", "multiply"):
        moving = [v for v in maker.inputs if v is not None and not v.is_static]
        return moving[0] if len(moving) == 1 else value
    return value


def _without_square(value: TracedTensor) -> TracedTensor:
    maker = value.producing_call
    if maker is not None and maker.source_name.lower() in ("pow", "mul"):
        moving = {v for v in maker.inputs if v is not None and not v.is_static}
        return next(iter(moving)) if len(moving) == 1 else value
    return value


def _elementwise_group(
    kind: str,
    x: TracedTensor,
    seed: TracedCall,
    consumers: dict[TracedTensor, list[TracedCall]],
    outputs: set[TracedTensor],
) -> MatchedSubgraph | None:
    """Gather the element-wise calls that lead from tensor ``x`` through the call ``seed`` to one result.

    Returns them with a substitute, one call of ``kind``; None if they are no closed group.
    """
    members = {seed: None} | dict.fromkeys(calls_between(x, seed.out, _light_makers(seed)))
    reach = {x, *(call.out for call in members)}
    frontier, ends = list(reach), list[TracedCall]()
    while frontier and len(members) < 24:
        value = frontier.pop(0)
        for call in consumers.get(value, ()):
            moving = [v for v in call.inputs if v is not None and not v.is_static]
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
        group = calls_between(x, end.out, list(members))
        if seed in group and is_self_contained(group, end.out, consumers, outputs):
            return _spelled_group(kind, x, end.out, group)
    return None


def _light_makers(seed: TracedCall) -> list[TracedCall]:
    makers, stack = (
        list[TracedCall](),
        [v.producing_call for v in seed.inputs if v is not None and v.producing_call is not None],
    )
    while stack and len(makers) < 6:
        call = stack.pop()
        if call.kind in ("elementwise", "multiply", "add", "reduce") and call not in makers:
            makers.append(call)
            stack.extend(v.producing_call for v in call.inputs if v is not None and v.producing_call is not None)
    return makers


def _spelled_group(
    kind: str, x: TracedTensor, output: TracedTensor, calls: Sequence[TracedCall]
) -> MatchedSubgraph | None:
    weights = [v for call in calls for v in call.inputs if v is not None and v.origin == "parameter" and v.elements > 1]
    if kind == "norm":
        centred = sum(call.kind == "reduce" for call in calls) > 1
        if len(weights) != 1 + centred:
            return None
        substitute = make_call(
            "layer_norm" if centred else "rms_norm", kind, [x, *weights], [(output.shape, False)], path=calls[0].path
        )
        return MatchedSubgraph(calls, substitute, output)
    options = {"function": kind}
    substitute = make_call("activation", kind, [x], [(output.shape, False)], options=options, path=calls[0].path)
    return None if weights else MatchedSubgraph(calls, substitute, output)


def find_weight_products(trace: Trace) -> list[MatchedSubgraph]:
    """Find products of a tensor, perhaps flattened, with a learned matrix.

    Each is returned with a substitute, one call of kind ``linear``.
    """
    consumers, outputs = trace.consumers(), set(trace.outputs)
    groups = []
    for call in trace.calls:
        weight = call.inputs[1] if call.kind in ("addmm", "matmul") and len(call.inputs) > 1 else None
        shift = call.inputs[2] if call.kind == "addmm" and len(call.inputs) > 2 else None
        x = call.inputs[0] if call.inputs else None
        if weight is None or x is None or x.is_static or len(weight.shape) != 2 or not _is_matrix(weight):
            continue
        if shift is not None and (not shift.is_static or shift.shape != weight.shape[1:]):
            continue
        calls, output = [call], call.out
        flat = x.producing_call
        readers = consumers.get(output, [])
        if flat is not None and flat.kind == "view" and flat.inputs[0] is not None and len(readers) == 1:
            wide = flat.inputs[0]
            same = wide.shape[-1] == x.shape[-1] and readers[0].out.shape == (*wide.shape[:-1], weight.shape[1])
            if same and readers[0].kind == "view" and consumers.get(x) == [call] and output not in outputs:
                calls, x, output = [flat, call, readers[0]], wide, readers[0].out
        shift, calls, output = _with_bias(call, shift, calls, output, consumers)
        substitute = make_call(
            "linear", call.source_name, [x, weight, shift], [(output.shape, False)], flops=call.flops, path=call.path
        )
        groups.append(MatchedSubgraph(calls, substitute, output))
    return groups


def _with_bias(
    call: TracedCall,
    shift: TracedTensor | None,
    calls: list[TracedCall],
    output: TracedTensor,
    consumers: dict[TracedTensor, list[TracedCall]],
) -> tuple[TracedTensor | None, list[TracedCall], TracedTensor]:
    """Extend a matrix product by its bias addition, if the addition alone reads the product.

    Returns (bias or None, calls of the group, output tensor of the group).
    """
    readers = consumers.get(output, [])
    if call.kind != "matmul" or len(readers) != 1 or readers[0].kind != "add" or readers[0].out.shape != output.shape:
        return shift, calls, output
    addends = [v for v in readers[0].inputs if v is not None and v is not output]
    if len(addends) != 1 or addends[0].origin != "parameter" or addends[0].shape != output.shape[-1:]:
        return shift, calls, output
    return addends[0], [*calls, readers[0]], readers[0].out


def _is_matrix(weight: TracedTensor) -> bool:
    """Return True if a weight is a whole parameter or a view (transpose) of one."""
    while (
        weight.producing_call is not None
        and weight.producing_call.kind == "view"
        and weight.producing_call.inputs[0] is not None
    ):
        if weight.producing_call.inputs[0].elements != weight.elements:
            return False
        weight = weight.producing_call.inputs[0]
    return weight.origin == "parameter"


def collapse_modules(trace: Trace) -> None:
    """Replace, in place, the calls inside each activation and norm module by one call of that kind."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    calls_of: dict[str, list[TracedCall]] = {}
    for call in trace.calls:
        calls_of.setdefault(call.path, []).append(call)
    groups = []
    for scope in trace.module_calls:
        name = scope.type.lower()
        if (len(scope.parameters) == 1 and name.endswith("norm")) or "rmsnorm" in name:
            kind = "rms_norm"
        elif scope.parameters:
            kind = None
        elif "gelu" in name:
            kind = "gelu"
        else:
            kind = "silu" if name in ("silu", "swish", "silinactivation", "siluactivation") else None
        if (
            kind is None
            or scope.input_tensor is None
            or scope.output_tensor is None
            or scope.input_tensor.shape != scope.output_tensor.shape
        ):
            continue
        calls = calls_between(scope.input_tensor, scope.output_tensor, calls_of.get(scope.path, []))
        if (
            calls
            and is_self_contained(calls, scope.output_tensor, consumers, outputs)
            and not any(call.flops for call in calls)
        ):
            substitute = _substitute(kind, scope, scope.input_tensor, scope.output_tensor, calls)
            if substitute is not None:
                groups.append(MatchedSubgraph(calls, substitute, scope.output_tensor))
    replace_matched_subgraphs(trace, groups)


def _substitute(
    kind: str, scope: ModuleCall, taken: TracedTensor, result: TracedTensor, calls: Sequence[TracedCall]
) -> TracedCall | None:
    reads = {v for call in calls for v in call.inputs if v is not None}
    weights = [v for v in reads if v.origin == "parameter"]
    foreign = [v for v in reads if v is not taken and not v.is_static and v.producing_call not in set(calls)]
    if foreign or any(call.kind in NORM_CALL_KINDS for call in calls):
        return None
    shape = [(result.shape, False)]
    if kind != "rms_norm":
        inner = {call.options.get("function") for call in calls} if kind == "gelu" else set()
        options = {"function": "gelu_tanh" if "tanh" in inner else "quick_gelu" if "sigmoid" in inner else kind}
        return None if weights else make_call("activation", kind, [taken], shape, options=options, path=scope.path)
    if len(weights) > 1 or (weights and weights[0].shape != result.shape[-1:]):
        return None
    return make_call("rms_norm", scope.type, [taken, weights[0] if weights else None], shape, path=scope.path)
