"""Builder of the entries of a model file from a trace, and the registries of rules for its calls.

The builder knows which entry holds each value of the trace. Rules read functions of torch and operators of ONNX; they
are found by folder. ``operators/table.yaml`` states for most of them which kind of call they are, with one row for each
kind. The other files of ``paleo/importers/operators`` have rules for calls whose arguments decide (``_TORCH_READERS``,
``ONNX_READERS``), and say which layers a kind of call becomes (``LAYER_TRANSLATIONS``). A rule for another function is
a row, or one more file there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError

from paleo.errors import PaleoError, SpecError
from paleo.importers._network_trace import TracedCall, TracedTensor, activation_inputs
from paleo.layers.base import LAYERS, LayerImplementations, with_frozen_weights, without_unneeded_gradients
from paleo.operations.base import Operation, parameters_by_name
from paleo.operations.tensor import DimSize, Tensor, default_precision
from paleo.registry import Registry

if TYPE_CHECKING:
    from paleo.importers._network_trace import Shape, Trace

_FP32, _UNFUSED = default_precision("fp32"), LayerImplementations(attention="unfused")
#: Names of the dims of an input, by their number.
_INPUT_DIMS = {
    1: ("batch",),
    3: ("batch", "seq", "features"),
    4: ("batch", "channels", "height", "width"),
    5: ("batch", "channels", "depth", "height", "width"),
}
#: Most names ``dim0``, ``dim1``, … of a network.
_MAX_DIMS = 99


@dataclass(eq=False)
class LayerEntry:
    """Layer of an imported network under construction, which becomes one line of a model file.

    ``inputs`` are the entries that the layer reads, or names of network inputs. ``weight_owner`` and ``tied_entry``
    name another entry whose weights this one uses. Weights of a ``frozen`` entry are not trained.
    """

    kind: str
    options: dict[str, Any]
    inputs: list[LayerEntry | str]
    out: Tensor
    path: str = ""
    weight_owner: LayerEntry | None = None
    tied_entry: LayerEntry | None = None
    operations: tuple[Operation, ...] = ()
    frozen: bool = False

    @property
    def references(self) -> list[EntryReference]:
        """Entries and inputs of the network that it reads or whose weights it uses; None for weights of its own."""
        return [*self.inputs, self.weight_owner, self.tied_entry]

    @property
    def place(self) -> TensorPlace:
        """Place of the layer's output tensor."""
        return TensorPlace(self, self.out)

    @property
    def unshared_parameter_count(self) -> float:
        """Number of the layer's parameters, without parameters shared with earlier layers.

        Shared and tied weights count where they were first used.
        """
        if self.weight_owner is not None:
            return 0.0
        parameters = parameters_by_name(self.operations).items()
        return sum(float(tensor.elements) for name, tensor in parameters if not name.startswith("tied"))

    @property
    def backward_flops(self) -> float:
        """FLOP of the backward pass, without products for inputs that need no gradient."""
        return sum(kernel.flops for operation in self.operations for kernel in operation.backward_kernels(_FP32))


EntryReference = LayerEntry | str | None


@dataclass(frozen=True)
class TensorPlace:
    """Place of a traced tensor in an imported network: the producing layer entry or network input, and the tensor."""

    producer: LayerEntry | str
    tensor: Tensor

    @property
    def dims(self) -> dict[str, DimSize]:
        """Mapping of dim names to sizes."""
        return self.tensor.shape


@dataclass
class ImportedNetwork:
    """Network under construction: entries in order of execution, inputs with their dims, and the output
    ``output_entry``.
    """

    entries: list[LayerEntry]
    inputs: dict[str, Tensor]
    probe_size_by_dim: Mapping[str, int]
    output_entry: LayerEntry | str = ""
    fixed_batch: int | None = None


class UntranslatableError(Exception):
    """Error for a traced call that no layer of Paleo can express; the importer then takes a more general layer."""


@dataclass
class NetworkBuilder:
    """Builds a network from a trace: appends layer entries, and records which entry holds each tensor and parameter.

    A translation (a function registered with `register_translation`) gets the builder ``b`` and a traced ``call``. It
    appends entries with `add_layer`, and with `record_output` or ``place_by_value`` it records the entry that holds
    each output of the call. ``parameter_owners`` maps each parameter's name to the entry that holds it.
    """

    trace: Trace
    network: ImportedNetwork = field(init=False)
    place_by_value: dict[TracedTensor, TensorPlace] = field(default_factory=dict)
    parameter_owners: dict[str, LayerEntry] = field(default_factory=dict)
    #: Source of each view.
    view_sources: dict[LayerEntry | str, TensorPlace] = field(default_factory=dict)
    #: True while added entries have frozen weights.
    adds_frozen_layers: bool = False

    def __post_init__(self) -> None:
        self.network = ImportedNetwork([], {}, self.trace.probe_size_by_dim, fixed_batch=self.trace.fixed_batch)
        for value in self.trace.inputs:
            role = "index" if value.is_integer else "activation"
            rank, probe = len(value.shape), self.trace.probe_size_by_dim.get("batch")
            names = list(_INPUT_DIMS.get(rank, ("batch", *(f"dim{i}" for i in range(1, rank)))))
            if rank == 2:
                names = ["batch", "seq" if value.is_integer else "features"]
            batch = value.shape.index(probe) if probe in value.shape else 0
            names.insert(batch, names.pop(0))
            tensor = Tensor(value.name, tuple(names), value.shape, role, needs_gradient=False)  # type: ignore[arg-type]
            self.network.inputs[value.name] = tensor
            self.place_by_value[value] = TensorPlace(value.name, tensor)

    @property
    def first_input(self) -> TensorPlace:
        """First input of the network, as a place that entries can read."""
        return TensorPlace(*next(iter(self.network.inputs.items())))

    # Entries.

    def add_layer(
        self,
        kind: str,
        options: Mapping[str, Any],
        sources: Sequence[TensorPlace],
        path: str,
        tie: LayerEntry | None = None,
    ) -> LayerEntry:
        """Append a layer of a kind with options, reading the tensors ``sources``, and return the layer's entry.

        ``path`` is the module of the source, and ``tie`` an entry whose weight the layer uses. UntranslatableError is
        raised if the layer refuses its options or inputs.
        """
        stated = {key: value for key, value in options.items() if value is not None}
        name = f"n{len(self.network.entries)}"
        try:
            layer = LAYERS[kind].model_validate(stated | ({"tie": f"tied{id(tie)}"} if tie is not None else {}))
            tensors = tuple(source.tensor for source in sources)
            expansion = layer.to_operations(name, tensors, _UNFUSED)
            expansion = with_frozen_weights(expansion) if self.adds_frozen_layers else expansion
            expansion = without_unneeded_gradients(expansion, tensors)
        except (PaleoError, ValidationError, ValueError, KeyError) as error:
            raise UntranslatableError(str(error)) from None
        holders = [source.producer for source in sources]
        entry = LayerEntry(kind, stated, holders, expansion.out, path, tied_entry=tie, operations=expansion.operations)
        entry.frozen = self.adds_frozen_layers and entry.unshared_parameter_count > 0
        self.network.entries.append(entry)
        return entry

    def record_output(self, value: TracedTensor, entry: LayerEntry) -> None:
        """Record that an entry outputs the traced tensor ``value``.

        UntranslatableError is raised if their sizes differ.
        """
        if tuple(entry.out.sizes) != value.shape:
            raise UntranslatableError(f"{entry.out.sizes} is not {value.shape}")
        self.place_by_value[value] = entry.place

    def replace_producer(self, old: LayerEntry, new: LayerEntry) -> None:
        """Record the entry ``new`` as the producer of all traced tensors that the entry ``old`` has produced."""
        for value, place in list(self.place_by_value.items()):
            if place.producer is old:
                self.place_by_value[value] = TensorPlace(new, place.tensor)

    def add_parameter_layer(self, parameters: int, source: TensorPlace, label: str, path: str) -> LayerEntry:
        """Append a layer that passes ``source`` on unchanged and only holds learned numbers; return its entry.

        It stands for weights that no other layer of the imported network accounts for.

        Parameters
        ----------
        parameters : int
            Number of learned numbers.
        source : TensorPlace
            Output of the layer that it reads.
        label : str
            Name of the layer in the model file.
        path : str
            Path of the module in the imported network.

        Returns
        -------
        LayerEntry
            Entry of the new layer.
        """
        return self.add_layer("learned", {"parameters": parameters, "of": label}, [source], path)

    # The entries that hold values.

    def place_of(self, value: TracedTensor | None) -> TensorPlace:
        """Return the place (layer entry or network input) that outputs the traced tensor ``value``.

        A view of a network input replaces constants and index tensors that no layer computes.
        UntranslatableError is raised for None and for any other tensor that no call computes.
        """
        if value is None:
            raise UntranslatableError("an input is missing")
        if value not in self.place_by_value:
            if value.is_activation:
                raise UntranslatableError("a tensor that no call computes")
            root = self.first_input if value.source_input is None else self.place_by_value[value.source_input]
            if root.tensor.sizes != value.shape or value.is_static:
                dims = self.dims_of(value.shape, None if value.is_static else root.tensor)
                learned = value.is_static and not value.parameter_names <= self.trace.frozen_parameters
                options = {"dims": dims, "constant": value.is_static or None, "learned": learned or None}
                root = self.add_layer("view", options, [root], "").place
            self.place_by_value[value] = root
        return self.place_by_value[value]

    def add_view(
        self, source: TensorPlace, sizes: Mapping[str, DimSize], path: str, *, keeps_whole: bool = False
    ) -> TensorPlace:
        """Return the tensor ``source`` under the dims ``sizes`` (name to size), by a view layer where needed.

        A view of a view becomes a view of the first tensor. No entry is added if the source has these sizes already and
        no dim of its name moves to another position.
        """
        origin, elements = source, math.prod(sizes.values())
        while (viewed := self.view_sources.get(origin.producer)) is not None and viewed.tensor.elements == elements:
            origin = viewed
        for place in (source, origin):
            dims = place.tensor.dims
            same_batch = (dims[:1] == ("batch",)) == (next(iter(sizes), "") == "batch")
            moved = any(dim in dims and dims.index(dim) != index for index, dim in enumerate(sizes))
            if place.tensor.sizes == tuple(sizes.values()) and same_batch and not moved:
                return place
        entry = self.add_layer("view", {"dims": dict(sizes), "keeps_whole": keeps_whole or None}, [origin], path)
        self.view_sources[entry] = origin
        return entry.place

    def add_reshape(self, source: TensorPlace, shape: Shape, path: str, *, keeps_whole: bool = False) -> TensorPlace:
        """Return ``source`` reshaped to ``shape``; dims of unchanged size keep their names."""
        return self.add_view(source, self.dims_of(shape, source.tensor), path, keeps_whole=keeps_whole)

    def dims_of(self, shape: Shape, like: Tensor | None = None) -> dict[str, int]:
        """Return the size of each dim of a shape by the dim's name (see `dim_names`)."""
        return dict(zip(self.dim_names(shape, like), shape, strict=True))

    def dim_names(self, shape: Shape, like: Tensor | None = None) -> list[str]:
        """Return a name for each dim of a shape.

        Multiples of a probe size are named ``batch`` or ``seq``; a dim as large as one of ``like`` takes its name;
        others are called ``dim0``, ``dim1`` and so on.
        """
        if self.trace.fixed_batch is not None:
            return ["batch", *(f"dim{place}" for place in range(1, len(shape)))][: len(shape)]
        taken: list[str] = []
        old = list(zip(like.dims, like.sizes, strict=True)) if like is not None else []
        probes = self.trace.probe_size_by_dim
        for place, size in enumerate(shape):
            name = next((n for n, p in probes.items() if size and size % p == 0 and n not in taken), None)
            if name is None:
                same = old[place][0] if len(old) == len(shape) and old[place][1] == size else None
                name = same or next((d for d, n in old if n == size and d not in taken and d not in probes), None)
            if name is None or name in taken or (name in probes and size % probes[name]):
                name = next(f"dim{i}" for i in range(place, _MAX_DIMS) if f"dim{i}" not in taken)
            taken.append(name)
        return taken

    def new_parameter_count(self, values: Sequence[TracedTensor | None]) -> int:
        """Return the number of parameters behind the static tensors ``values`` that no entry holds yet."""
        names = frozenset[str]().union(*(v.parameter_names for v in values if v is not None and v.is_static))
        return sum(self.trace.parameter_counts[name] for name in names if name not in self.parameter_owners)

    def activation_inputs(self, call: TracedCall) -> list[TensorPlace]:
        """Return the places of a call's activation inputs: those that depend on a network input (no weights)."""
        return [self.place_of(value) for value in activation_inputs(call) if value.elements]

    def first_activation_input(self, call: TracedCall) -> TensorPlace:
        """Return the first of a call's inputs that depends on a network input.

        Raise UntranslatableError if none does.
        """
        if places := self.activation_inputs(call):
            return places[0]
        raise UntranslatableError("no input of it depends on an input of the network")

    def activation_or_index_inputs(self, call: TracedCall) -> list[TensorPlace]:
        """Return the places of a call's activation inputs, or of the first index tensor if there are none."""
        return self.activation_inputs(call) or [self.place_of(v) for v in call.tensors if not v.is_static][:1]

    def saved_temporaries_per_element(self, call: TracedCall, value: TracedTensor) -> float | None:
        """Return the number of saved temporary elements of a call, per element of its largest input or output.

        Counted are tensors saved for backward besides inputs and outputs. Returns None if there are no such tensors.
        """
        elements = [value.elements, *(source.tensor.elements for source in self.activation_or_index_inputs(call))]
        return call.saved_temporary_elements / max(1, *elements) or None

    def weight_and_owner(self, value: TracedTensor | None) -> tuple[TracedTensor, LayerEntry | None]:
        """Return a weight of a call as (traced tensor, layer entry that already holds the weight, or None).

        UntranslatableError is raised if the value is not computed from parameters alone.
        """
        if value is None or not value.is_static or not value.parameter_names:
            raise UntranslatableError("expected a weight made of parameters")
        holders = {self.parameter_owners.get(name) for name in value.parameter_names}
        return value, next(iter(holders)) if len(holders) == 1 else None

    def share_weights(self, entry: LayerEntry, values: Sequence[TracedTensor | None]) -> LayerEntry:
        """Let a layer share the weights ``values`` with an earlier layer of the same kind that holds them all.

        Return ``entry``.
        """
        owners = {self.parameter_owners.get(name) for v in values if v is not None for name in v.parameter_names}
        if len(owners) == 1 and (owner := next(iter(owners))) is not None and owner.kind == entry.kind:
            self.use_weights_of(owner, entry)
        return entry

    def use_weights_of(self, owner: LayerEntry | None, entry: LayerEntry) -> None:
        """Let the layer ``entry`` use the weights of an earlier layer ``owner``.

        Nothing happens if there is no owner or the owner is of another kind. UntranslatableError is raised if their
        numbers of parameters differ.
        """
        if owner is None or owner.kind != entry.kind:
            return
        if owner.unshared_parameter_count != entry.unshared_parameter_count:
            raise UntranslatableError("weights that an earlier layer has in another form")
        entry.weight_owner = owner

    def finished_network(self) -> ImportedNetwork:
        """Return the finished network, without views that nothing reads.

        Parameters that no call reads are added at its end as one ``learned`` layer.
        """
        names = self.trace.parameter_counts.items()
        left = sum(size for name, size in names if name not in self.parameter_owners)
        place = next((self.place_by_value[v] for v in self.trace.outputs if v in self.place_by_value), None)
        if place is None:
            raise SpecError("the network has no output that depends on its inputs")
        self.network.output_entry = place.producer
        if left:
            self.network.output_entry = self.add_parameter_layer(left, place, "parameters that nothing reads", "")
        read: set[EntryReference] = {self.network.output_entry}
        kept = []
        for entry in reversed(self.network.entries):
            if entry.kind == "view" and entry not in read:
                continue
            kept.append(entry)
            read.update(entry.references)
        self.network.entries = kept[::-1]
        return self.network


_OPERATORS_PACKAGE = "paleo.importers.operators"
Rule = TypeVar("Rule", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class TranslatedCall:
    """Operator call of torch or ONNX in Paleo's terms: kind, input tensors (None: all of the call) and options."""

    kind: str
    inputs: list[TracedTensor | None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


class TensorLookup(Protocol):
    """Protocol of a tracer that tells whether an argument is a tensor, and which traced value a tensor is."""

    def value(self, tensor: Any) -> TracedTensor: ...

    def is_tensor(self, argument: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class TorchInvocation:
    """One recorded call of a torch function: its name without underscores, its arguments and its result."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    tensor_lookup: TensorLookup

    def arguments(self, *names: str) -> dict[str, Any]:
        """Return the arguments as a dict by parameter name; ``names`` are the function's parameters in order."""
        return dict(zip(names, self.args, strict=False)) | {k: v for k, v in self.kwargs.items() if k in names}

    def tensor(self, argument: Any) -> TracedTensor | None:
        """Return the traced value of an argument, or None if the argument is no tensor."""
        return self.tensor_lookup.value(argument) if self.tensor_lookup.is_tensor(argument) else None

    def translated_call(self, kind: str, names: Sequence[str], tensors: Sequence[str], **more: Any) -> TranslatedCall:
        """Convert this torch call to a `TranslatedCall` of a kind; ``names`` are the function's parameters in order.

        Parameters listed in ``tensors`` become its inputs, in that order; the others, and ``more``, become options.
        """
        arguments = self.arguments(*names)
        inputs = [self.tensor(arguments.get(name)) for name in tensors]
        return TranslatedCall(kind, inputs, {k: v for k, v in arguments.items() if k not in tensors} | more)

    def has_two_tensors(self) -> bool:
        """Return True if the first two arguments are tensors."""
        return len(self.args) >= 2 and all(self.tensor_lookup.is_tensor(argument) for argument in self.args[:2])


Numbers = list[float]


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """One node of an ONNX graph: operator, input tensors, attributes, and the numbers in its small constant inputs."""

    name: str
    inputs: list[TracedTensor | None]
    options: Mapping[str, Any]
    numbers: Sequence[Numbers | None]

    def input(self, place: int) -> TracedTensor | None:
        """Return the input tensor at index ``place``, or None if the node omits it."""
        return self.inputs[place] if len(self.inputs) > place else None


TorchRule = Callable[[TorchInvocation], TranslatedCall]
OnnxRule = Callable[[OnnxNode], TranslatedCall]
LayerTranslation = Callable[[NetworkBuilder, TracedCall], None]
_TORCH_READERS: Registry[TorchRule] = Registry("torch function", _OPERATORS_PACKAGE)
ONNX_READERS: Registry[OnnxRule] = Registry("ONNX operator", _OPERATORS_PACKAGE)
LAYER_TRANSLATIONS: Registry[LayerTranslation] = Registry("kind of call", _OPERATORS_PACKAGE)


def register_torch_reader(names: str) -> Callable[[TorchRule], TorchRule]:
    """Return a decorator that registers a reader for calls of torch functions (names separated by spaces).

    A reader takes an `TorchInvocation` and returns a `TranslatedCall`.
    """
    return _several(_TORCH_READERS, names)


def register_onnx_reader(names: str) -> Callable[[OnnxRule], OnnxRule]:
    """Return a decorator that registers a reader for nodes of ONNX operators (names separated by spaces).

    A reader takes an `OnnxNode` and returns a `TranslatedCall`.
    """
    return _several(ONNX_READERS, names)


def register_translation(kinds: str) -> Callable[[LayerTranslation], LayerTranslation]:
    """Return a decorator that registers a translation of kinds of traced calls to layers (kinds separated by spaces).

    A translation takes a `NetworkBuilder` and a `TracedCall`, appends layer entries and returns nothing.
    """
    return _several(LAYER_TRANSLATIONS, kinds)


def _several(registry: Registry[Rule], names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for name in names.split():
            registry.register(name)(rule)
        return rule

    return add


_INVERTED = ("add", "sub", "mul", "truediv", "div", "pow", "matmul", "floordiv", "mod", "and", "or", "xor")
_SAME = {"truediv": "div", "true_divide": "div", "divide": "div", "subtract": "sub", "multiply": "mul"}


def base_operator_name(label: str) -> str:
    """Return a torch function's name without in-place and operator marks: ``add`` for ``__iadd__``.

    >>> base_operator_name("__iadd__"), base_operator_name("__rtruediv__"), base_operator_name("relu_")
    ('add', 'div', 'relu')
    """
    label = label.partition(".")[0] if not label.startswith("_") else label
    if label in _TORCH_READERS:
        return label
    name = label.strip("_") or label
    if label.startswith("__") and name[0] in "ir" and name[1:] in _INVERTED:
        name = name[1:]
    return _SAME.get(name, name)


def read_torch_call(invocation: TorchInvocation) -> TranslatedCall:
    """Convert a torch call to kind, inputs and options, by the reader that is registered for the function.

    The kind is ``unknown`` if no reader is registered.
    """
    name = invocation.name
    return _TORCH_READERS[name](invocation) if name in _TORCH_READERS else TranslatedCall("unknown")


def read_onnx_node(node: OnnxNode) -> TranslatedCall:
    """Convert an ONNX node to kind, inputs and options, by the reader that is registered for the operator.

    Kind ``unknown`` if there is none.
    """
    return ONNX_READERS[node.name](node) if node.name in ONNX_READERS else TranslatedCall("unknown", node.inputs)
