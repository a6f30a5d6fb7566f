"""Builder of the entries of a model file from a trace, and the registries of rules for its calls.

The builder knows which entry holds each value of the trace. Rules read functions of torch and operators of ONNX; they
are found by folder. ``operators/_table.py`` states for most of them which kind of call they are, with one row for each
kind. The other files of ``paleo/importers/operators`` have rules for calls whose arguments decide (``TORCH``,
``ONNX``), and say which layers a kind of call becomes (``TRANSLATIONS``). A rule for another function is a row, or one
more file there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError

from paleo.errors import PaleoError, SpecError
from paleo.importers._trace import Call, Value
from paleo.layers.base import LAYERS, Choices, with_frozen_weights, with_gradients_as_needed
from paleo.operations.base import Operation, parameters_of
from paleo.operations.tensor import Size, Tensor, precision
from paleo.registry import Registry

if TYPE_CHECKING:
    from paleo.importers._trace import Shape, Trace

_FP32, _UNFUSED = precision("fp32"), Choices(attention="unfused")
#: Names of the dims of an input, by their number.
_INPUT_DIMS = {
    1: ("batch",),
    3: ("batch", "seq", "features"),
    4: ("batch", "channels", "height", "width"),
    5: ("batch", "channels", "depth", "height", "width"),
}
#: Most names ``dim0``, ``dim1``, … of a network.
MOST_DIMS = 99


@dataclass(eq=False)
class LayerEntry:
    """One line of a model file.

    ``inputs`` are entries or names of inputs. ``share`` and ``tie`` name another entry whose weights this one uses.
    Weights of a ``frozen`` entry are not trained.
    """

    kind: str
    options: dict[str, Any]
    inputs: list[LayerEntry | str]
    out: Tensor
    path: str = ""
    share: LayerEntry | None = None
    tie: LayerEntry | None = None
    operations: tuple[Operation, ...] = ()
    frozen: bool = False

    @property
    def own_parameters(self) -> float:
        """Number of parameters, without those that belong to another entry."""
        if self.share is not None:
            return 0.0
        parameters = parameters_of(self.operations).items()
        return sum(float(tensor.elements) for name, tensor in parameters if not name.startswith("tied"))

    @property
    def flops_backward(self) -> float:
        """FLOP of the backward pass, without products for inputs that need no gradient."""
        return sum(kernel.flops for operation in self.operations for kernel in operation.backward(_FP32))


@dataclass(frozen=True)
class Placed:
    """A value of the trace in the model file: the entry or input that holds it, with the value's dims and sizes."""

    holder: LayerEntry | str
    tensor: Tensor

    @classmethod
    def of(cls, entry: LayerEntry) -> Placed:
        """Return the output of an entry as a placed value."""
        return cls(entry, entry.out)

    @property
    def dims(self) -> dict[str, Size]:
        """Sizes of the dims by name."""
        return dict(zip(self.tensor.dims, self.tensor.sizes, strict=True))


@dataclass
class ImportedNetwork:
    """Entries of a network in order, and its inputs with their dims; ``last`` is its output."""

    entries: list[LayerEntry]
    inputs: dict[str, Tensor]
    probes: Mapping[str, int]
    last: LayerEntry | str = ""
    fixed_batch: int | None = None


class UntranslatableError(Exception):
    """Error for a call that a layer cannot express."""


@dataclass
class Builder:
    """Adds entries of a model file, and records which entry holds each value and each parameter."""

    trace: Trace
    network: ImportedNetwork = field(init=False)
    placed: dict[Value, Placed] = field(default_factory=dict)
    owners: dict[str, LayerEntry] = field(default_factory=dict)
    #: Source of each view.
    bases: dict[LayerEntry | str, Placed] = field(default_factory=dict)
    #: True while added entries have frozen weights.
    untrained: bool = False

    def __post_init__(self) -> None:
        self.network = ImportedNetwork([], {}, self.trace.probes, fixed_batch=self.trace.fixed_batch)
        for value in self.trace.inputs:
            role = "index" if value.index else "activation"
            rank, probe = len(value.shape), self.trace.probes.get("batch")
            names = list(_INPUT_DIMS.get(rank, ("batch", *(f"dim{i}" for i in range(1, rank)))))
            if rank == 2:
                names = ["batch", "seq" if value.index else "features"]
            batch = value.shape.index(probe) if probe in value.shape else 0
            names.insert(batch, names.pop(0))
            tensor = Tensor(value.name, tuple(names), value.shape, role, grad=False)  # type: ignore[arg-type]
            self.network.inputs[value.name] = tensor
            self.placed[value] = Placed(value.name, tensor)

    @property
    def first(self) -> Placed:
        """First input of the network."""
        return Placed(*next(iter(self.network.inputs.items())))

    # Entries.

    def add(
        self, kind: str, options: Mapping[str, Any], sources: Sequence[Placed], path: str, tie: LayerEntry | None = None
    ) -> LayerEntry:
        """Add an entry, expanded as in the graph; raise UntranslatableError if its layer refuses the inputs."""
        stated = {key: value for key, value in options.items() if value is not None}
        name = f"n{len(self.network.entries)}"
        try:
            layer = LAYERS[kind].model_validate(stated | ({"tie": f"tied{id(tie)}"} if tie is not None else {}))
            tensors = tuple(source.tensor for source in sources)
            expansion = layer.expand(name, tensors, _UNFUSED)
            expansion = with_gradients_as_needed(
                with_frozen_weights(expansion) if self.untrained else expansion, tensors
            )
        except (PaleoError, ValidationError, ValueError, KeyError) as error:
            raise UntranslatableError(str(error)) from None
        holders = [source.holder for source in sources]
        entry = LayerEntry(
            kind,
            stated,
            inputs=holders,
            out=expansion.out,
            path=path,
            share=None,
            tie=tie,
            operations=expansion.operations,
        )
        entry.frozen = self.untrained and entry.own_parameters > 0
        self.network.entries.append(entry)
        return entry

    def put(self, value: Value, entry: LayerEntry) -> None:
        """Assign the output of an entry to a value of the trace; their sizes must agree."""
        if tuple(entry.out.sizes) != value.shape:
            raise UntranslatableError(f"{entry.out.sizes} is not {value.shape}")
        self.placed[value] = Placed.of(entry)

    def move(self, old: LayerEntry, new: LayerEntry) -> None:
        """Let values of an old entry be read from a new one."""
        for value, place in list(self.placed.items()):
            if place.holder is old:
                self.placed[value] = Placed(new, place.tensor)

    def learned(self, parameters: int, source: Placed, label: str, path: str) -> LayerEntry:
        """Add an entry that holds parameters and passes its input through."""
        return self.add("learned", {"parameters": parameters, "of": label}, [source], path)

    # The entries that hold values.

    def at(self, value: Value | None) -> Placed:
        """Return the placed value; constants and whole numbers have no layer and are placed on a network input."""
        if value is None:
            raise UntranslatableError("an input is missing")
        if value not in self.placed:
            if not (value.static or value.index):
                raise UntranslatableError("a tensor that no call computes")
            root = self.first if value.root is None else self.placed[value.root]
            same = root.tensor.sizes == value.shape and not value.static
            self.placed[value] = root if same else self._stand_in(value, root)
        return self.placed[value]

    def _stand_in(self, value: Value, root: Placed) -> Placed:
        like = None if value.static else root.tensor
        dims = dict(zip(self.names(value.shape, like), value.shape, strict=True))
        learned = value.static and not value.sources <= self.trace.frozen
        options = {"dims": dims, "constant": value.static or None, "learned": learned or None}
        return Placed.of(self.add("view", options, [root], ""))

    def view(self, source: Placed, sizes: Mapping[str, Size], path: str, *, keeps_whole: bool = False) -> Placed:
        """Return the same numbers under other dims; a view of a view is a view of the first tensor.

        There is none where the sizes are those of the source already, unless a name would stand in another place.
        """
        origin = source
        while origin.holder in self.bases and math.prod(sizes.values()) == self.bases[origin.holder].tensor.elements:
            origin = self.bases[origin.holder]
        for place in (source, origin):
            dims = place.tensor.dims
            same_batch = (dims[:1] == ("batch",)) == (next(iter(sizes), "") == "batch")
            moved = any(dim in dims and dims.index(dim) != index for index, dim in enumerate(sizes))
            if place.tensor.sizes == tuple(sizes.values()) and same_batch and not moved:
                return place
        entry = self.add("view", {"dims": dict(sizes), "keeps_whole": keeps_whole or None}, [origin], path)
        self.bases[entry] = origin
        return Placed.of(entry)

    def shaped(self, source: Placed, shape: Shape, path: str, *, keeps_whole: bool = False) -> Placed:
        """Return the same values in another shape, with dims named like those of the source."""
        sizes = dict(zip(self.names(shape, source.tensor), shape, strict=True))
        return self.view(source, sizes, path, keeps_whole=keeps_whole)

    def names(self, shape: Shape, like: Tensor | None = None) -> list[str]:
        """Return names for the dims of a shape: those of ``like`` for equal sizes; batch and seq by probe sizes."""
        if self.trace.fixed_batch is not None:
            return ["batch", *(f"dim{place}" for place in range(1, len(shape)))][: len(shape)]
        taken: list[str] = []
        old = list(zip(like.dims, like.sizes, strict=True)) if like is not None else []
        probes = self.trace.probes
        for place, size in enumerate(shape):
            name = next((n for n, p in probes.items() if size and size % p == 0 and n not in taken), None)
            if name is None:
                same = old[place][0] if len(old) == len(shape) and old[place][1] == size else None
                name = same or next((d for d, n in old if n == size and d not in taken and d not in probes), None)
            if name is None or name in taken or (name in probes and size % probes[name]):
                name = next(f"dim{i}" for i in range(place, MOST_DIMS) if f"dim{i}" not in taken)
            taken.append(name)
        return taken

    def parameters(self, values: Sequence[Value | None]) -> int:
        """Return the number of parameters from which static values are computed and that no entry holds yet."""
        names = frozenset[str]().union(*(v.sources for v in values if v is not None and v.static))
        return sum(self.trace.parameters[name] for name in names if name not in self.owners)

    def moving(self, call: Call) -> list[Placed]:
        """Return the placed inputs of a call that depend on an input of the network."""
        values = dict.fromkeys(value for value in call.inputs if value is not None)
        return [self.at(v) for v in values if v.elements and not v.static and (not v.index or v.origin == "input")]

    def source(self, call: Call) -> Placed:
        """Return the first input of `moving`; raise UntranslatableError if there is none."""
        for placed in self.moving(call):
            return placed
        raise UntranslatableError("no input of it depends on an input of the network")

    def sources(self, call: Call) -> list[Placed]:
        """Return the inputs of `moving`, or those of whole numbers if there are no others."""
        return self.moving(call) or [self.at(v) for v in call.inputs if v is not None and not v.static][:1]

    def kept_per_element(self, call: Call, value: Value) -> float | None:
        """Return the elements that a call saves besides its inputs and outputs, per element of its largest tensor.

        Returns None if it saves none.
        """
        elements = [value.elements, *(source.tensor.elements for source in self.sources(call))]
        return call.kept_elements / max(1, *elements) or None

    def weight(self, value: Value | None) -> tuple[Value, LayerEntry | None]:
        """Return a weight, and the entry that already holds it."""
        if value is None or not value.static or not value.sources:
            raise UntranslatableError("expected a weight made of parameters")
        holders = {self.owners.get(name) for name in value.sources}
        return value, next(iter(holders)) if len(holders) == 1 else None

    def sharing(self, entry: LayerEntry, values: Sequence[Value | None]) -> LayerEntry:
        """Return the entry with the weights of an earlier one if all of these values are its weights."""
        owners = {self.owners.get(name) for v in values if v is not None for name in v.sources}
        if len(owners) == 1 and (owner := next(iter(owners))) is not None and owner.kind == entry.kind:
            self.lend(owner, entry)
        return entry

    def lend(self, owner: LayerEntry | None, entry: LayerEntry) -> None:
        """Let an entry use the weights of ``owner``, an earlier entry of its kind with the same parameters, if there is
        one."""
        if owner is None or owner.kind != entry.kind:
            return
        if owner.own_parameters != entry.own_parameters:
            raise UntranslatableError("weights that an earlier layer has in another form")
        entry.share = owner

    def finished(self) -> ImportedNetwork:
        """Return the network; parameters that no call reads are added at its end."""
        names = self.trace.parameters.items()
        left = sum(size for name, size in names if name not in self.owners)
        place = next((self.placed[v] for v in self.trace.outputs if v in self.placed), None)
        if place is None:
            raise SpecError("the network has no output that depends on its inputs")
        self.network.last = place.holder
        if left:
            self.network.last = self.learned(left, place, "parameters that nothing reads", "")
        read: set[LayerEntry | str] = {self.network.last}
        kept = []
        for entry in reversed(self.network.entries):
            if entry.kind == "view" and entry not in read:
                continue
            kept.append(entry)
            read.update(ref for ref in (*entry.inputs, entry.share, entry.tie) if ref is not None)
        self.network.entries = kept[::-1]
        return self.network


OPERATORS = "paleo.importers.operators"
Rule = TypeVar("Rule", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Reading:
    """A call in Paleo's terms: its kind, its inputs (None: all tensors of the call, in order) and its options."""

    kind: str
    inputs: list[Value | None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Values(Protocol):
    """Source of the trace values of tensors."""

    def value(self, tensor: Any) -> Value: ...

    def is_tensor(self, argument: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call of a torch function: its name without underscores, its arguments and its result."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    values: Values

    def bound(self, *names: str) -> dict[str, Any]:
        """Return the arguments by these names, in the order of the signature."""
        return dict(zip(names, self.args, strict=False)) | {k: v for k, v in self.kwargs.items() if k in names}

    def tensor(self, argument: Any) -> Value | None:
        """Return the value of an argument, or None if it is no tensor."""
        return self.values.value(argument) if self.values.is_tensor(argument) else None

    def reading(self, kind: str, names: Sequence[str], tensors: Sequence[str], **more: Any) -> Reading:
        """Make a reading with arguments by name: ``tensors`` as inputs, the others as options."""
        arguments = self.bound(*names)
        inputs = [self.tensor(arguments.get(name)) for name in tensors]
        return Reading(kind, inputs, {k: v for k, v in arguments.items() if k not in tensors} | more)

    def joins_tensors(self) -> bool:
        """Return True if the first two arguments are tensors."""
        return len(self.args) >= 2 and all(self.values.is_tensor(argument) for argument in self.args[:2])


Numbers = list[float]


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """A node of an ONNX file: operator, inputs, attributes, and the values of small constant inputs."""

    name: str
    inputs: list[Value | None]
    options: Mapping[str, Any]
    numbers: Sequence[Numbers | None]

    def input(self, place: int) -> Value | None:
        """Return the input at a position, or None if it is omitted."""
        return self.inputs[place] if len(self.inputs) > place else None


TorchRule = Callable[[Invocation], Reading]
OnnxRule = Callable[[OnnxNode], Reading]
Translation = Callable[[Builder, Call], None]
TORCH: Registry[TorchRule] = Registry("torch function", OPERATORS)
ONNX: Registry[OnnxRule] = Registry("ONNX operator", OPERATORS)
TRANSLATIONS: Registry[Translation] = Registry("kind of call", OPERATORS)


def torch_functions(names: str) -> Callable[[TorchRule], TorchRule]:
    """Register a rule for these functions; names are separated by spaces."""
    return _several(TORCH, names)


def onnx_operators(names: str) -> Callable[[OnnxRule], OnnxRule]:
    """Register a rule for these operators; names are separated by spaces."""
    return _several(ONNX, names)


def translates(kinds: str) -> Callable[[Translation], Translation]:
    """Register a translation of these kinds of calls; names are separated by spaces."""
    return _several(TRANSLATIONS, kinds)


def _several(registry: Registry[Rule], names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for name in names.split():
            registry.register(name)(rule)
        return rule

    return add


_INVERTED = ("add", "sub", "mul", "truediv", "div", "pow", "matmul", "floordiv", "mod", "and", "or", "xor")
_SAME = {"truediv": "div", "true_divide": "div", "divide": "div", "subtract": "sub", "multiply": "mul"}


def plain_name(label: str) -> str:
    """Return ``add`` for ``add_``, ``__add__``, ``__iadd__`` and ``__radd__``; known names stay as they are.

    >>> plain_name("__iadd__"), plain_name("__rtruediv__"), plain_name("relu_")
    ('add', 'div', 'relu')
    """
    label = label.partition(".")[0] if not label.startswith("_") else label
    if label in TORCH:
        return label
    name = label.strip("_") or label
    if label.startswith("__") and name[0] in "ir" and name[1:] in _INVERTED:
        name = name[1:]
    return _SAME.get(name, name)


def torch_reading(invocation: Invocation) -> Reading:
    """Read a torch call by the rule of its function.

    The kind is ``create`` for a call without tensor arguments, and ``unknown`` if there is no rule.
    """
    if invocation.name in TORCH:
        return TORCH[invocation.name](invocation)
    return Reading("unknown")


def onnx_reading(node: OnnxNode) -> Reading:
    """Read an ONNX node by the rule of its operator; the kind is ``unknown`` if there is none."""
    return ONNX[node.name](node) if node.name in ONNX else Reading("unknown", node.inputs)
