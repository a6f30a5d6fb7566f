"""Groups of calls that one call replaces.

A group is replaced only if no other call reads the values computed inside. Everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from paleo.importers._trace import Call, Trace, Value

#: Kinds of calls without weights that may be between a projection and the scores: views, rotations, scales.
LIGHT = frozenset(
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
PLAIN = frozenset({"view", "slice", "copy"})
NORMS = frozenset({"rms_norm", "layer_norm"})


class CallGroup:
    """Calls that one call replaces."""

    def __init__(self, calls: Iterable[Call], substitute: Call, output: Value) -> None:
        self.calls, self.substitute, self.output = set(calls), substitute, output


def replace(trace: Trace, groups: Sequence[CallGroup]) -> None:
    """Put each substitute in the place of its group's last call; a group that overlaps an earlier one is skipped."""
    places = {call: place for place, call in enumerate(trace.calls)}
    gone: set[Call] = set()
    last: dict[Call, CallGroup] = {}
    for group in groups:
        if not group.calls & gone and _trained_alike(group.calls, trace):
            gone |= group.calls
            last[max(group.calls, key=places.__getitem__)] = group
    calls = []
    for call in trace.calls:
        if call in last:
            substitute, output = last[call].substitute, last[call].output
            substitute.parts = sorted(last[call].calls, key=places.__getitem__)
            substitute.trains = any(part.trains for part in substitute.parts)
            substitute.stops = substitute.parts[-1].stops
            substitute.outputs, output.maker = [output], substitute
            calls.append(substitute)
        elif call not in gone:
            calls.append(call)
    trace.calls = calls


def _trained_alike(calls: Iterable[Call], trace: Trace) -> bool:
    """Return True if all weights that the calls read are trained, or if none is."""
    weights = ((call, name) for call in calls for v in call.inputs if v is not None for name in v.sources)
    return len({call.trains and name not in trace.frozen for call, name in weights}) < 2


def between(start: Value, end: Value, calls: Sequence[Call]) -> list[Call]:
    """Return those of ``calls`` that lie on the way back from ``end`` to ``start``."""
    allowed, reached, stack = set(calls), dict[Call, None](), [end]
    while stack:
        value = stack.pop()
        if value is start or value.maker is None or value.maker not in allowed or value.maker in reached:
            continue
        reached[value.maker] = None
        stack.extend(v for v in value.maker.inputs if v is not None)
    return list(reached)


def closed(calls: Iterable[Call], output: Value, consumers: dict[Value, list[Call]], outputs: set[Value]) -> bool:
    """Return True if no other call reads a value of the group except its output."""
    inside = set(calls)
    values = [value for call in inside for value in call.outputs if value is not output and not value.static]
    readers = (reader for value in values for reader in consumers.get(value, ()))
    return not any(value in outputs for value in values) and all(reader in inside for reader in readers)


def foreign(calls: Iterable[Call], inputs: Sequence[Value]) -> bool:
    """Return True if a group reads a value that depends on the network's inputs, besides its own inputs."""
    inside = set(calls)
    read = {v for call in inside for v in call.inputs if v is not None}
    return any(not (v.static or v.index or v in inputs or v.maker in inside) for v in read)
