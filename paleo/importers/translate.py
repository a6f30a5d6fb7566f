"""A trace as entries of a model file: every call becomes a layer, its dims named, its FLOP held to those that the
source counted.

A layer that does not reproduce the shape and the FLOP of its call is not used; the call becomes an opaque pass
instead, with its bytes and FLOP, so that nothing is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from paleo.errors import PaleoError, SpecError
from paleo.importers.trace import Call, Shape, Trace, Value
from paleo.layers.base import LAYERS, Choices
from paleo.operations.base import Operation, parameters_of
from paleo.operations.precision import precision
from paleo.operations.tensor import Size, Tensor

_FP32, _UNFUSED = precision("fp32"), Choices(attention="unfused")
#: How far the FLOP of a layer may be from those that were counted.
TOLERANCE = 0.002


@dataclass(eq=False)
class Entry:
    """One line of a model file. ``inputs`` are entries or names of inputs; ``share`` and ``tie`` lend another
    one's weights."""

    kind: str
    options: dict[str, Any]
    inputs: list[Entry | str]
    out: Tensor
    path: str = ""
    share: Entry | None = None
    tie: Entry | None = None
    operations: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Placed:
    """Where a value stands: the entry or input that holds it, as a tensor with the dims and sizes of the value."""

    holder: Entry | str
    tensor: Tensor


@dataclass
class Network:
    """Entries in order, inputs with their dims, and what was not recognised."""

    entries: list[Entry]
    inputs: dict[str, Tensor]
    probes: Mapping[str, int]
    unread: int = 0
    last: Entry | str = ""


class UntranslatableError(Exception):
    """A call does not fit the layer that was tried."""


@dataclass
class Translator:
    """Walks the calls in order."""

    trace: Trace
    network: Network = field(init=False)
    placed: dict[Value, Placed] = field(default_factory=dict)
    owners: dict[str, Entry] = field(default_factory=dict)
    #: What a view looks at.
    bases: dict[Entry | str, Placed] = field(default_factory=dict)

    def translate(self) -> Network:
        """All entries; parameters that nothing reads stand at the end."""
        inputs = {}
        for value in self.trace.inputs:
            tensor = Tensor(value.name, *self._input_dims(value), "index" if value.index else "activation", grad=False)
            inputs[value.name] = tensor
            self.placed[value] = Placed(value.name, tensor)
        self.network = Network([], inputs, self.trace.probes)
        for call in self.trace.calls:
            try:
                self._call(call)
            except UntranslatableError as error:
                raise SpecError(f"{call.path or 'the network'}: cannot place {call.label}: {error}") from None
        self._rest()
        return self.network

    def _input_dims(self, value: Value) -> tuple[tuple[str, ...], Shape]:
        shape = value.shape
        names = {
            1: ["batch"], 2: ["batch", "seq" if value.index else "features"], 3: ["batch", "seq", "features"],
            4: ["batch", "channels", "height", "width"], 5: ["batch", "channels", "depth", "height", "width"],
        }.get(len(shape), ["batch", *(f"dim{i}" for i in range(1, len(shape)))])[: len(shape)]  # fmt: skip
        batch = shape.index(probe) if (probe := self.trace.probes.get("batch")) in shape else 0
        names.insert(batch, names.pop(0))
        return tuple(names), shape

    def _rest(self) -> None:
        """Weights that no call reads are memory all the same."""
        left = sum(size for name, size in self.trace.parameters.items() if name not in self.owners)
        self.network.unread = left
        holder = next((self.placed[v].holder for v in self.trace.outputs if v in self.placed), None)
        if holder is None:
            raise SpecError("the network has no output that depends on its inputs")
        self.network.last = holder
        if left:
            held = next(p for p in self.placed.values() if p.holder is holder)
            self.network.last = self.add(
                "learned", {"parameters": left, "of": "parameters that nothing reads"}, [held], ""
            )
        self._without_idle_views()

    def _without_idle_views(self) -> None:
        """Drops views that nothing looks at."""
        read: set[Entry | str] = {self.network.last}
        kept = []
        for entry in reversed(self.network.entries):
            if entry.kind == "view" and entry not in read:
                continue
            kept.append(entry)
            read.update(ref for ref in (*entry.inputs, entry.share, entry.tie) if ref is not None)
        self.network.entries = kept[::-1]

    # Entries.

    def add(
        self, kind: str, options: dict[str, Any], sources: Sequence[Placed], path: str, tie: Entry | None = None
    ) -> Entry:
        """One more entry, expanded as the graph will do; UntranslatableError where the layer refuses."""
        given = {key: value for key, value in options.items() if value is not None}
        name = f"n{len(self.network.entries)}"
        try:
            layer = LAYERS[kind].model_validate(given | ({"tie": f"tied{id(tie)}"} if tie is not None else {}))
            made = layer.expand(name, tuple(one.tensor for one in sources), _UNFUSED)
        except (PaleoError, ValidationError, ValueError, KeyError) as error:
            raise UntranslatableError(str(error)) from None
        entry = Entry(kind, given, [one.holder for one in sources], made.out, path, None, tie, made.operations)
        self.network.entries.append(entry)
        return entry

    def _call(self, call: Call) -> None:
        if all(value.static or value.index for value in call.outputs):
            return
        mark = len(self.network.entries)
        known = dict(self.placed), dict(self.owners)
        try:
            self._translated(call)
        except UntranslatableError:
            del self.network.entries[mark:]
            self.placed, self.owners = known
            for part in call.parts:
                self._call(part)
            if not call.parts:
                self._opaque(call)

    def _translated(self, call: Call) -> None:
        from paleo.importers.calls import HANDLERS

        handler = HANDLERS.get(call.kind)
        if handler is None:
            raise UntranslatableError(call.kind)
        mark = len(self.network.entries)
        before = set(self.owners)
        handler(self, call)
        made = self.network.entries[mark:]
        if call.flops is not None and call.kind not in ("cat", "view", "slice"):
            counted = sum(k.flops for e in made for op in e.operations for k in op.forward(_FP32))
            if abs(counted - call.flops) > TOLERANCE * max(counted, call.flops):
                raise UntranslatableError(f"{counted} FLOP, not {call.flops}")
        self._settle(call, made, before)

    def _settle(self, call: Call, made: Sequence[Entry], before: set[str]) -> None:
        """The entries of a call must hold as many new parameters as the call is the first to read."""
        names = frozenset().union(*(v.sources for v in call.inputs if v is not None))
        new = sum(self.trace.parameters[name] for name in names if name not in before)
        held = sum(
            t.elements
            for e in made
            for n, t in parameters_of(e.operations).items()
            if not n.startswith("tied") and e.share is None
        )
        for name in names:
            self.owners.setdefault(name, made[-1] if made else self.network.entries[-1])
        if held > new:
            raise UntranslatableError(f"{held:g} parameters, not {new}")
        if held < new and made:
            last = made[-1]
            entry = self.add(
                "learned", {"parameters": int(new - held), "of": call.label}, [Placed(last, last.out)], call.path
            )
            self.move(last, entry)

    def move(self, old: Entry, new: Entry) -> None:
        for value, one in list(self.placed.items()):
            if one.holder is old:
                self.placed[value] = Placed(new, one.tensor)

    def put(self, value: Value, entry: Entry) -> None:
        """The value is what the entry makes; its sizes must agree."""
        if tuple(entry.out.sizes) != value.shape:
            raise UntranslatableError(f"{entry.out.sizes} is not {value.shape}")
        self.placed[value] = Placed(entry, entry.out)

    # Where values stand.

    def at(self, value: Value | None) -> Placed:
        """The place of a value: constants and whole numbers have no layer, and stand on an input of the network."""
        if value is None:
            raise UntranslatableError("an input is missing")
        if value not in self.placed:
            if not (value.static or value.index):
                raise UntranslatableError("a tensor from nowhere")
            first = Placed(*next(iter(self.network.inputs.items())))
            root = first if value.root is None else self.placed[value.root]
            self.placed[value] = root if root.tensor.sizes == value.shape else self._stand_in(value, root)
        return self.placed[value]

    def _stand_in(self, value: Value, root: Placed) -> Placed:
        like = None if value.static else root.tensor
        dims = dict(zip(self.names(value.shape, like), value.shape, strict=True))
        entry = self.add("view", {"dims": dims}, [root], "")
        return Placed(entry, entry.out)

    def view(self, source: Placed, sizes: Mapping[str, Size], path: str) -> Placed:
        """The same numbers under other dims; a view of a view is one of what that one looks at."""
        origin = source
        while origin.holder in self.bases and math.prod(sizes.values()) == self.bases[origin.holder].tensor.elements:
            origin = self.bases[origin.holder]
        for one in (source, origin):
            if one.tensor.sizes == tuple(sizes.values()) and (one.tensor.dims[0] == "batch") == (
                next(iter(sizes)) == "batch"
            ):
                return one
        entry = self.add("view", {"dims": dict(sizes)}, [origin], path)
        self.bases[entry] = origin
        return Placed(entry, entry.out)

    def names(self, shape: Shape, like: Tensor | None = None) -> list[str]:
        """Names for the dims of a shape: those of ``like`` where sizes agree, batch and seq by their probes."""
        taken: list[str] = []
        old = list(zip(like.dims, like.sizes, strict=True)) if like is not None else []
        probes = self.trace.probes
        for place, size in enumerate(shape):
            name = next((n for n, p in probes.items() if size % p == 0 and n not in taken), None)
            if name is None:
                same = old[place][0] if len(old) == len(shape) and old[place][1] == size else None
                name = same or next((d for d, n in old if n == size and d not in taken and d not in probes), None)
            if name is None or name in taken or (name in probes and size % probes[name]):
                name = next(f"dim{i}" for i in range(place, 99) if f"dim{i}" not in taken)
            taken.append(name)
        return taken

    def parameters(self, values: Sequence[Value | None]) -> int:
        """How many parameters static values are made of that no entry holds yet."""
        names = frozenset().union(*(v.sources for v in values if v is not None and v.static))
        return sum(self.trace.parameters[name] for name in names if name not in self.owners)

    def moving(self, call: Call) -> list[Placed]:
        return [
            self.at(v)
            for v in dict.fromkeys(call.inputs)
            if v is not None and not v.static and (not v.index or v.origin == "input")
        ]

    def _opaque(self, call: Call) -> None:
        """A call that no layer says: its bytes, its FLOP, its parameters."""
        sources = self.moving(call) or [self.at(v) for v in call.inputs if v is not None and not v.static][:1]
        sources = sources or [Placed(*next(iter(self.network.inputs.items())))]
        first = max(sources, key=lambda one: one.tensor.elements)
        for value in call.outputs:
            if value.static or value.index:
                continue
            dims = self.names(value.shape, first.tensor)
            options: dict[str, Any] = {"of": call.label, "dims": dict(zip(dims, value.shape, strict=True))}
            options |= {
                "flops_per_element": call.flops / value.elements if call.flops else None,
                "parameters": self.parameters(call.inputs) or None,
            }
            entry = self.add("opaque", options, sources, call.path)
            self.put(value, entry)
            for name in frozenset().union(*(v.sources for v in call.inputs if v is not None)):
                self.owners.setdefault(name, entry)
            call.flops = 0.0
