"""Patterns of functions in elementary steps.

They are GELU by erf, SiLU by sigmoid, and norms by means; products with a learned matrix; and modules whose name says
what their calls compute.

One call replaces a group of calls only if no other call reads the values computed inside. Everything else stays as it
is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paleo.importers._network_trace import ModuleCall, Trace, TracedCall, TracedTensor, make_call

#: Kinds of calls that move data without changing it.
DATA_MOVING_KINDS = frozenset({"view", "slice", "copy"})
NORM_CALL_KINDS = frozenset({"rms_norm", "layer_norm"})
#: Kinds of calls without weights that may be between a projection and the scores: views, rotations, scales.
CHEAP_CALL_KINDS = (
    DATA_MOVING_KINDS | NORM_CALL_KINDS | {"cat", "elementwise", "add", "multiply", "dropout", "activation"}
)


class MatchedSubgraph:
    """Group of traced calls that form one layer, and the single call that can replace the group.

    ``kind``, ``label``, ``inputs`` and ``more`` describe that call; ``output`` is the tensor that the group computes.
    """

    def __init__(
        self,
        calls: Iterable[TracedCall],
        output: TracedTensor,
        kind: str,
        label: str,
        inputs: Iterable[TracedTensor | None],
        **more: Any,
    ) -> None:
        self.calls, self.output = set(calls), output
        self.substitute = make_call(kind, label, inputs, [(output.shape, False)], **more)


class TensorReaders:
    """Calls that read each tensor of a trace, and the outputs of the network."""

    def __init__(self, trace: Trace) -> None:
        self._outputs = set(trace.outputs)
        self._readers: dict[TracedTensor, list[TracedCall]] = {}
        for call in trace.calls:
            for value in dict.fromkeys(call.tensors):
                self._readers.setdefault(value, []).append(call)

    def of(self, value: TracedTensor) -> list[TracedCall]:
        """Return the calls that read a tensor, in order of execution."""
        return self._readers.get(value, [])

    def sole_reader(self, value: TracedTensor) -> TracedCall | None:
        """Return the call that reads a tensor, or None unless there is exactly one."""
        readers = self.of(value)
        return readers[0] if len(readers) == 1 else None

    def is_self_contained(self, calls: Iterable[TracedCall], output: TracedTensor) -> bool:
        """Return True if nothing outside a group of calls reads a tensor of the group except its ``output``."""
        inside = set(calls)
        values = [value for call in inside for value in call.outputs if value is not output and not value.is_static]
        return self._outputs.isdisjoint(values) and all(inside.issuperset(self.of(value)) for value in values)


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
    weights = ((call, name) for call in calls for name in call.parameter_names)
    return len({call.trains_weights and name not in trace.frozen_parameters for call, name in weights}) < 2


def _calls_between(start: TracedTensor, end: TracedTensor, calls: Sequence[TracedCall]) -> list[TracedCall]:
    """Return the subset of ``calls`` on the path that computes the tensor ``end`` from the tensor ``start``."""
    allowed, reached, stack = set(calls), dict[TracedCall, None](), [end]
    while stack:
        value = stack.pop()
        call = value.producing_call
        if value is not start and call is not None and call in allowed and call not in reached:
            reached[call] = None
            stack.extend(call.tensors)
    return list(reached)


def reads_outside_activations(calls: Iterable[TracedCall], inputs: Sequence[TracedTensor]) -> bool:
    """Return True if a group of calls reads an activation from outside the group besides ``inputs``."""
    inside = set(calls)
    read = {value for call in inside for value in call.tensors}
    return any(v.is_activation and v not in inputs and v.producing_call not in inside for v in read)


def find_elementary_step_functions(trace: Trace) -> list[MatchedSubgraph]:
    """Find activations and norms that are computed in elementary steps (power, mean, sqrt, …).

    Each group of such calls is returned with a substitute, one call of kind ``activation`` or a norm.
    """
    readers = TensorReaders(trace)
    groups = []
    for call in trace.calls:
        name, x = call.source_name.lower(), call.input(0)
        if call.out.is_static or x is None:
            continue
        group, maker = None, x.producing_call
        if name == "erf":
            factors = maker.tensors if maker is not None and maker.kind in ("elementwise", "multiply") else []
            group = _elementwise_group("gelu", _sole_moving(factors, x), call, readers)
        elif call.kind == "activation" and call.options.get("function") == "sigmoid":
            product = readers.sole_reader(call.out)
            if product is not None and product.kind == "multiply" and x in product.inputs:
                group = _elementwise_group("silu", x, call, readers)
        elif name == "reducemean" and call.out.shape == (*x.shape[:-1], 1):
            factors = maker.tensors if maker is not None and maker.source_name.lower() in ("pow", "mul") else []
            group = _elementwise_group("norm", _sole_moving(dict.fromkeys(factors), x), call, readers)
        if group is not None:
            groups.append(group)
    return groups


def _elementwise_group(kind: str, x: TracedTensor, seed: TracedCall, readers: TensorReaders) -> MatchedSubgraph | None:
    """Gather the element-wise calls that lead from tensor ``x`` through the call ``seed`` to one result.

    Returns them with a substitute, one call of ``kind``; None if they are no closed group.
    """
    members = {seed: None} | dict.fromkeys(_calls_between(x, seed.out, _light_makers(seed)))
    reach = {x, *(call.out for call in members)}
    frontier, ends = list(reach), list[TracedCall]()
    while frontier and len(members) < 24:
        value = frontier.pop(0)
        for call in readers.of(value):
            moving = [v for v in call.tensors if not v.is_static]
            light = call.kind in ("elementwise", "add", "multiply", "reduce") and call not in members
            if light and all(v in reach for v in moving) and (value is not x or kind == "norm" or len(moving) > 1):
                members[call] = None
                reach.add(call.out)
                frontier.append(call.out)
    for call in members:
        weights = [v for v in call.tensors if v.origin == "parameter" and v.shape == x.shape[-1:]]
        if call.out.shape == x.shape and (kind != "norm" or weights):
            ends.append(call)
    for end in reversed(ends):
        group = _calls_between(x, end.out, list(members))
        if seed in group and readers.is_self_contained(group, end.out):
            return _spelled_group(kind, x, end.out, group)
    return None


def _sole_moving(tensors: Iterable[TracedTensor], x: TracedTensor) -> TracedTensor:
    """Return the only tensor that is no constant, or ``x`` if there are none or several."""
    moving = [value for value in tensors if not value.is_static]
    return moving[0] if len(moving) == 1 else x


def _light_makers(seed: TracedCall) -> list[TracedCall]:
    makers, stack = list[TracedCall](), seed.tensors
    while stack and len(makers) < 6:
        call = stack.pop().producing_call
        if call is not None and call.kind in ("elementwise", "multiply", "add", "reduce") and call not in makers:
            makers.append(call)
            stack.extend(call.tensors)
    return makers


def _spelled_group(
    kind: str, x: TracedTensor, output: TracedTensor, calls: Sequence[TracedCall]
) -> MatchedSubgraph | None:
    weights = [v for call in calls for v in call.tensors if v.origin == "parameter" and v.elements > 1]
    path = calls[0].path
    if kind == "norm":
        centred = sum(call.kind == "reduce" for call in calls) > 1
        name = "layer_norm" if centred else "rms_norm"
        return (
            MatchedSubgraph(calls, output, name, kind, [x, *weights], path=path)
            if len(weights) == 1 + centred
            else None
        )
    return (
        None
        if weights
        else MatchedSubgraph(calls, output, "activation", kind, [x], options={"function": kind}, path=path)
    )


def find_weight_products(trace: Trace) -> list[MatchedSubgraph]:
    """Find products of a tensor, perhaps flattened, with a learned matrix.

    Each is returned with a substitute, one call of kind ``linear``.
    """
    readers = TensorReaders(trace)
    groups = []
    for call in trace.calls:
        x, weight = call.input(0), call.input(1) if call.kind in ("addmm", "matmul") else None
        shift = call.input(2) if call.kind == "addmm" else None
        if weight is None or x is None or x.is_static or len(weight.shape) != 2 or not _is_matrix(weight):
            continue
        if shift is not None and (not shift.is_static or shift.shape != weight.shape[1:]):
            continue
        calls, output = [call], call.out
        flat, back = x.producer_of_kind("view"), readers.sole_reader(output)
        wide = flat.inputs[0] if flat is not None else None
        if flat is not None and wide is not None and back is not None and back.kind == "view":
            same = wide.shape[-1] == x.shape[-1] and back.out.shape == (*wide.shape[:-1], weight.shape[1])
            if same and readers.sole_reader(x) is call and readers.is_self_contained([call, back], back.out):
                calls, x, output = [flat, call, back], wide, back.out
        added = readers.sole_reader(output) if call.kind == "matmul" else None
        if added is not None and added.kind == "add" and added.out.shape == output.shape:
            addends = [v for v in added.tensors if v is not output]
            if len(addends) == 1 and addends[0].origin == "parameter" and addends[0].shape == output.shape[-1:]:
                shift, calls, output = addends[0], [*calls, added], added.out
        inputs = [x, weight, shift]
        groups.append(
            MatchedSubgraph(calls, output, "linear", call.source_name, inputs, flops=call.flops, path=call.path)
        )
    return groups


def _is_matrix(weight: TracedTensor) -> bool:
    """Return True if a weight is a whole parameter or a view (transpose) of one."""
    while (view := weight.producer_of_kind("view")) is not None and view.inputs[0] is not None:
        if view.inputs[0].elements != weight.elements:
            return False
        weight = view.inputs[0]
    return weight.origin == "parameter"


def collapse_modules(trace: Trace) -> None:
    """Replace, in place, the calls inside each activation and norm module by one call of that kind."""
    readers = TensorReaders(trace)
    calls_of: dict[str, list[TracedCall]] = {}
    for call in trace.calls:
        calls_of.setdefault(call.path, []).append(call)
    groups = []
    for scope in trace.module_calls:
        name, taken, result = scope.type.lower(), scope.input_tensor, scope.output_tensor
        if (len(scope.parameters) == 1 and name.endswith("norm")) or "rmsnorm" in name:
            kind = "rms_norm"
        elif scope.parameters:
            continue
        elif "gelu" in name:
            kind = "gelu"
        elif name in ("silu", "swish", "silinactivation", "siluactivation"):
            kind = "silu"
        else:
            continue
        if taken is None or result is None or taken.shape != result.shape:
            continue
        calls = _calls_between(taken, result, calls_of.get(scope.path, []))
        if calls and readers.is_self_contained(calls, result) and not any(call.flops for call in calls):
            group = _module_group(kind, scope, taken, result, calls)
            groups += [group] if group is not None else []
    replace_matched_subgraphs(trace, groups)


def _module_group(
    kind: str, scope: ModuleCall, taken: TracedTensor, result: TracedTensor, calls: Sequence[TracedCall]
) -> MatchedSubgraph | None:
    reads = {value for call in calls for value in call.tensors}
    weights = [v for v in reads if v.origin == "parameter"]
    foreign = [v for v in reads if v is not taken and not v.is_static and v.producing_call not in calls]
    if foreign or any(call.kind in NORM_CALL_KINDS for call in calls):
        return None
    if kind != "rms_norm":
        inner = {call.options.get("function") for call in calls} if kind == "gelu" else set()
        options = {"function": "gelu_tanh" if "tanh" in inner else "quick_gelu" if "sigmoid" in inner else kind}
        group = MatchedSubgraph(calls, result, "activation", kind, [taken], options=options, path=scope.path)
        return None if weights else group
    if len(weights) > 1 or (weights and weights[0].shape != result.shape[-1:]):
        return None
    return MatchedSubgraph(
        calls, result, "rms_norm", scope.type, [taken, weights[0] if weights else None], path=scope.path
    )
