"""Modules whose name says what their calls add up to: norms and activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from paleo.importers.patterns.group import NORMS, CallGroup, between, closed, replace
from paleo.importers.trace import record

if TYPE_CHECKING:
    from paleo.importers.trace import Call, Scope, Trace, Value


def collapse_modules(trace: Trace) -> None:
    """Replaces the calls of such modules by one call."""
    consumers, outputs = trace.consumers(), set(trace.outputs)
    calls_of: dict[str, list[Call]] = {}
    for call in trace.calls:
        calls_of.setdefault(call.path, []).append(call)
    groups = []
    for scope in trace.scopes:
        kind = _kind_of(scope)
        if kind is None or scope.taken is None or scope.given is None or scope.taken.shape != scope.given.shape:
            continue
        calls = between(scope.taken, scope.given, calls_of.get(scope.path, []))
        if calls and closed(calls, scope.given, consumers, outputs) and not any(call.flops for call in calls):
            substitute = _substitute(kind, scope, scope.taken, scope.given, calls)
            if substitute is not None:
                groups.append(CallGroup(calls, substitute, scope.given))
    replace(trace, groups)


def _kind_of(scope: Scope) -> str | None:
    name = scope.type.lower()
    if (len(scope.parameters) == 1 and name.endswith("norm")) or "rmsnorm" in name:
        return "rms_norm"
    if scope.parameters:
        return None
    if "gelu" in name:
        return "gelu"
    return "silu" if name in ("silu", "swish", "silinactivation", "siluactivation") else None


def _substitute(kind: str, scope: Scope, taken: Value, given: Value, calls: Sequence[Call]) -> Call | None:
    reads = {v for call in calls for v in call.inputs if v is not None}
    weights = [v for v in reads if v.origin == "parameter"]
    foreign = [v for v in reads if v is not taken and not v.static and v.maker not in set(calls)]
    if foreign or any(call.kind in NORMS for call in calls):
        return None
    shape = [(given.shape, False)]
    if kind != "rms_norm":
        inner = {call.options.get("function") for call in calls} if kind == "gelu" else set()
        options = {"function": "gelu_tanh" if "tanh" in inner else "quick_gelu" if "sigmoid" in inner else kind}
        return None if weights else record("activation", kind, [taken], shape, options=options, path=scope.path)
    if len(weights) > 1 or (weights and weights[0].shape != given.shape[-1:]):
        return None
    return record("rms_norm", scope.type, [taken, weights[0] if weights else None], shape, path=scope.path)
