"""Translation of a trace to entries of a model file.

Every call becomes layers with named dims. The FLOP of the layers are compared with those that the source counted. If
the layers do not reproduce shape and FLOP of the call, the call becomes an opaque layer with its bytes and FLOP, so
that nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paleo.errors import SpecError
from paleo.importers._builder import Builder, ImportedNetwork, LayerEntry, Placed, UntranslatableError
from paleo.importers._rules import TRANSLATIONS
from paleo.importers._trace import Call, Trace, keeps_of
from paleo.operations.tensor import precision

_FP32 = precision("fp32")
#: Largest relative difference between the FLOP of layers and those that the source counted.
TOLERANCE = 0.0005
#: Calls that move data without computing.
_WITHOUT_FLOPS = frozenset({"cat", "view", "slice"})


def translated(trace: Trace) -> ImportedNetwork:
    """Translate all calls of a trace to entries, in their order."""
    builder = Builder(trace)
    for call in trace.calls:
        try:
            _place(builder, call)
        except UntranslatableError as error:
            raise SpecError(f"{call.path or 'the network'}: cannot place {call.label}: {error}") from None
    return builder.finished()


def _place(builder: Builder, call: Call) -> None:
    if all(value.static or value.index for value in call.outputs):
        return
    names = {name for value in call.inputs if value is not None for name in value.sources}
    builder.untrained = bool(names) and (names <= builder.trace.frozen or not call.trains)
    mark = len(builder.network.entries)
    known = dict(builder.placed), dict(builder.owners), dict(builder.bases)
    try:
        _translate(builder, call)
    except UntranslatableError:
        del builder.network.entries[mark:]
        builder.placed, builder.owners, builder.bases = known
        for part in call.parts:
            _place(builder, part)
        if not call.parts:
            _place_opaque(builder, call)
    if call.stops:
        _stop_gradient(builder, call)


def _stop_gradient(builder: Builder, call: Call) -> None:
    """Mark the outputs of a call as needing no gradient."""
    for value in call.outputs:
        if value in builder.placed and not (value.static or value.index):
            builder.placed[value] = Placed.of(builder.add("detach", {}, [builder.placed[value]], call.path))


def _translate(builder: Builder, call: Call) -> None:
    if call.kind not in TRANSLATIONS:
        raise UntranslatableError(call.kind)
    mark = len(builder.network.entries)
    before = set(builder.owners)
    TRANSLATIONS[call.kind](builder, call)
    entries = builder.network.entries[mark:]
    if call.flops is not None and call.kind not in _WITHOUT_FLOPS:
        kernels = (kernel for e in entries for operation in e.operations for kernel in operation.forward(_FP32))
        counted = sum(kernel.flops for kernel in kernels)
        if abs(counted - call.flops) > TOLERANCE * max(counted, call.flops):
            raise UntranslatableError(f"{counted} FLOP, not {call.flops}")
    _check_parameters(builder, call, entries, before)


def _check_parameters(builder: Builder, call: Call, entries: Sequence[LayerEntry], before: set[str]) -> None:
    """Check that the entries of a call hold as many new parameters as the call is the first to read."""
    names = frozenset[str]().union(*(v.sources for v in call.inputs if v is not None))
    new = sum(builder.trace.parameters[name] for name in names if name not in before)
    stated = sum(entry.own_parameters for entry in entries)
    learned = [entry for entry in entries if entry.own_parameters]
    owners = learned if len(learned) == 1 else (entries or builder.network.entries)[-1:]
    if names and not owners:
        raise UntranslatableError("weights before the first layer")
    for name in names:
        builder.owners.setdefault(name, owners[0])
    if stated > new:
        raise UntranslatableError(f"{stated:g} parameters, not {new}")
    if stated < new and entries:
        last = entries[-1]
        builder.move(last, builder.learned(int(new - stated), Placed.of(last), call.label, call.path))


def _place_opaque(builder: Builder, call: Call) -> None:
    """Add a call that no layer describes as an opaque layer with its bytes, FLOP and parameters."""
    sources = builder.sources(call) or [builder.first]
    largest = max(sources, key=lambda source: source.tensor.elements).tensor
    values = [value for value in call.outputs if not (value.static or value.index) and value.elements]
    for value in values:
        options: dict[str, Any] = {"of": call.label, "parameters": builder.parameters(call.inputs) or None}
        options["dims"] = dict(zip(builder.names(value.shape, largest), value.shape, strict=True)) or {"batch": 1}
        options["keeps"] = "nothing"
        if value is values[0]:
            kept = {"keeps": keeps_of(call) or "nothing", "kept_per_element": builder.kept_per_element(call, value)}
            options |= kept | {"flops_per_element": call.flops / value.elements if call.flops else None}
        entry = builder.add("opaque", options, sources, call.path)
        builder.placed[value] = Placed.of(entry)
        for name in frozenset[str]().union(*(v.sources for v in call.inputs if v is not None)):
            builder.owners.setdefault(name, entry)
