"""A model file as a graph of layers with inferred shapes, on which counting, splitting and scheduling build.

Layers follow one another unless ``inputs:`` says otherwise. An entry of ``layers:`` is one of

    - relu                                          a layer without options
    - conv: {channels: 64, kernel: 7, stride: 2}    a layer, or a block of the file, with its options
    - {name: head, linear: {features: 10}, inputs: [pool]}
    - {repeat: 12, name: block, layers: [...]}      one counted copy if output and input shapes agree, else unrolled
    - {branches: [[...], []], join: add}            every branch starts at the current tensor
    - {name: fake, judge: {}, share: real}          a layer or block with the weights of an earlier one
    - {linear: {features: 10}, frozen: true}        a layer whose weights are not trained

A value that starts with ``=`` is an expression over the model's ``hyperparameters``, the arguments of the block,
``batch``, and the sizes of the current tensor (``in_channels``, ``in_hidden``, …). With ``when: =stride > 1`` an entry
is used only if the condition holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from paleo.errors import GraphError, SpecError, suggest_names
from paleo.layers.base import (
    LAYERS,
    Layer,
    LayerImplementations,
    LayerOperations,
    format_shape,
    with_frozen_weights,
    without_unneeded_gradients,
)
from paleo.operations.base import Operation, parameters_by_name, with_renamed_parameters
from paleo.operations.tensor import DimSize, Tensor
from paleo.registry import Registry
from paleo.specs.loading import evaluate_model_expression, validate_mapping

if TYPE_CHECKING:
    import networkx as nx

    from paleo.specs.model import ModelSpec
    from paleo.specs.run import Run


_MAX_NODES, _MAX_ENTRIES, _MAX_REPEAT, _MAX_DEPTH = 20_000, 50_000, 100_000, 24
#: Sizes above this cannot be represented exactly as floats.
_MAX_DIM_SIZE = 2**53
#: A thousand times the parameters of the largest network trained so far; a larger number is taken for a typing error.
_MAX_PARAMETERS = 10**16
_RESERVED = frozenset({"name", "inputs", "repeat", "layers", "branches", "join", "when", "share", "frozen"})
#: A folded loop: its name and its number of iterations.
RepeatedBlock = tuple[str, int]
RepeatedBlocks = tuple[RepeatedBlock, ...]


CachedResult = TypeVar("CachedResult")


@dataclass(frozen=True, slots=True)
class Node:
    """One layer of a network graph, with its input tensors, operations and output tensor.

    ``loops`` are the repeated blocks of the model file around the layer (name, iterations), outermost first.
    """

    name: str
    type: str
    inputs: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    out: Tensor
    loops: RepeatedBlocks = ()

    @property
    def repeat(self) -> int:
        return math.prod(times for _, times in self.loops)

    @property
    def parameters(self) -> dict[str, Tensor]:
        return parameters_by_name(self.operations)


@dataclass(frozen=True)
class Graph:
    """Network as a list of layers in topological order, with the shapes of all tensors for one batch."""

    name: str
    nodes: tuple[Node, ...]
    inputs: Mapping[str, Tensor]
    hyperparameters: Mapping[str, Any]
    batch: int
    tokens_per_sample: float | None = None
    #: Folded loop -> names of the tensor that enters it and of the tensor that each iteration passes to the next.
    loop_carried_tensors: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    #: Tensor that is a view of part of another tensor -> name of that tensor, and its size relative to the view.
    view_storage: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    #: Cache shared by graphs of the same network at other batch sizes, for results that do not depend on the batch.
    shared_cache: dict[Hashable, Any] | None = field(default=None, repr=False, compare=False)
    _cache: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def cached_result(
        self, key: Hashable, work: Callable[[], CachedResult], *, any_batch: bool = False
    ) -> CachedResult:
        """Return ``work()``, or the result of an earlier call with the same key.

        A plan search asks for the same counts of a graph on many meshes.

        Parameters
        ----------
        key : Hashable
            Names the result and everything that it depends on.
        work : Callable[[], CachedResult]
            Computes the result.
        any_batch : bool, optional
            True if the result is the same for every batch size of the network.

        Returns
        -------
        CachedResult
            The cached result.
        """
        cache = self._cache if self.shared_cache is None or not any_batch else self.shared_cache
        if key not in cache:
            cache[key] = work()
        known: CachedResult = cache[key]
        return known

    def copy_count(self, tensor: Tensor, keeper: Node) -> int:
        """Count how many copies of a tensor exist in the whole network, where repeated layers are stored once.

        A tensor made inside a loop exists once per iteration. One from outside, such as the encoder output that every
        decoder layer attends to, exists once.

        Parameters
        ----------
        tensor : Tensor
            The tensor.
        keeper : Node
            Layer that reads or writes it.

        Returns
        -------
        int
            Number of copies.
        """
        return math.prod(times for _, times in self.loops_copying_tensor(tensor, keeper))

    def loops_copying_tensor(self, tensor: Tensor, keeper: Node) -> RepeatedBlocks:
        """Find the repeated blocks around a layer whose iterations each have a separate copy of a tensor.

        Parameters
        ----------
        tensor : Tensor
            The tensor.
        keeper : Node
            Layer that reads or writes the tensor.

        Returns
        -------
        RepeatedBlocks
            Repeated blocks as (name, iterations), outermost first.
        """
        if not keeper.loops or tensor.name not in {each.name for each in keeper.inputs}:
            return keeper.loops
        inside = self.writer_loops.get(self.storage_tensor(tensor)[0], ())
        return tuple(loop for loop in keeper.loops if loop in inside or self.is_loop_carried(tensor, loop))

    def is_loop_carried(self, tensor: Tensor, loop: RepeatedBlock) -> bool:
        """Return True if a tensor is the initial value of what a loop's iterations pass on, as a residual stream is.

        The first iteration reads the tensor itself, every later one reads the output of the iteration before.

        Parameters
        ----------
        tensor : Tensor
            The tensor.
        loop : RepeatedBlock
            Name and iterations of a folded block.

        Returns
        -------
        bool
            True if ``loop`` carries the tensor from iteration to iteration.
        """
        enters, _ = self.loop_carried_tensors.get(loop[0], ("", ""))
        return enters == self.storage_tensor(tensor)[0]

    def storage_tensor(self, tensor: Tensor) -> tuple[str, float]:
        """Return the name of the tensor that holds the storage of a view, and the ratio of their sizes.

        Parameters
        ----------
        tensor : Tensor
            A tensor, perhaps a view or a part of another one.

        Returns
        -------
        tuple[str, float]
            Name of the storage, and its size relative to the tensor.
        """
        return self.view_storage.get(tensor.name, (tensor.name, 1.0))

    @cached_property
    def writer_loops(self) -> Mapping[str, RepeatedBlocks]:
        """Repeated blocks around the layer that writes each tensor, by the tensor's name."""
        nodes = reversed(self.nodes)
        return {n.out.name: n.loops for n in nodes if n.operations or n.out.name not in {t.name for t in n.inputs}}

    @cached_property
    def layer_graph(self) -> nx.DiGraph[str]:
        """Network as a networkx graph of layer names; each node's attribute ``layer`` is the `Node`.

        An edge leads from the layer that writes a tensor to each layer that reads it. The tensor that a folded loop
        carries from one iteration to the next is no edge.
        """
        import networkx as nx

        layers: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        writers: dict[str, str] = {}
        for node in self.nodes:
            names = dict.fromkeys(tensor.name for tensor in node.inputs)
            layers.add_node(node.name, layer=node)
            layers.add_edges_from((writers[name], node.name) for name in names if name in writers)
            if node.operations or node.out.name not in names:  # a view of a whole tensor has its name
                writers[node.out.name] = node.name
        return layers

    @property
    def parameters(self) -> int:
        """Number of parameters of the network. A tied weight counts once, a repeated block once per iteration."""
        sizes = {name: t.elements * node.repeat for node in reversed(self.nodes) for name, t in node.parameters.items()}
        return int(sum(sizes.values()))


def build_graph(
    model: ModelSpec,
    *,
    batch: int,
    choices: LayerImplementations | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> Graph:
    """Build the graph of a network for one batch, with all shapes.

    Parameters
    ----------
    model : ModelSpec
        Network, as its model file describes it.
    batch : int
        Samples, at least 1.
    choices : LayerImplementations, optional
        How the framework carries layers out.
    overrides : dict of str to Any, optional
        Parameters of the file (seq, hidden, …) with other values.

    Returns
    -------
    Graph
        Layers in topological order with inferred shapes.

    Raises
    ------
    SpecError
        If the batch or a parameter is not valid.
    GraphError
        If shapes do not fit; the message names the file and the place in it.
    """
    if batch < 1:
        raise SpecError(f"batch: {batch} must be 1 or more")
    params = _parameters(model, batch, overrides or {})
    builder = _Builder(model, params, choices or LayerImplementations())
    inputs = {name: _input(model, name, params) for name in model.inputs}
    if not any("batch" in str(spec.dims.get("batch")) for spec in model.inputs.values()):
        raise SpecError(f"{model.path}: inputs: none has a dim `batch: =batch`, so that no batch can be fed")
    scope = _Scope(names=dict(inputs), values=params)
    first = next(iter(inputs.values()))
    builder.sequence(model.layers, scope, first, ("layers",))
    if not any(node.operations for node in builder.nodes):
        raise GraphError(f"{model.path}: layers: nothing is computed; expected one layer that is more than a view")
    _check_ties(model, builder.nodes)
    tokens = _tokens(model, params)
    graph = Graph(model.name, tuple(builder.nodes), inputs, params, batch, tokens, builder.carried, builder.parts)
    if graph.parameters > _MAX_PARAMETERS:
        raise GraphError(f"{model.path}: layers: {graph.parameters:.3g} parameters; expected at most {_MAX_PARAMETERS}")
    return graph


def _tokens(model: ModelSpec, params: Mapping[str, Any]) -> float | None:
    """Return the number of tokens of one sample, from the model file's expression.

    Returns None for networks that state none.
    """
    tokens = _evaluated(model.tokens, params, f"{model.path}: tokens")
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int | float) or not tokens > 0):
        raise SpecError(f"{model.path}: tokens: {tokens!r} is not a number above zero, or an expression such as '=seq'")
    return tokens


def _check_ties(model: ModelSpec, nodes: list[Node]) -> None:
    """Raise GraphError if two layers share a weight but give it different sizes."""
    seen: dict[str, Tensor] = {}
    for node in nodes:
        for name, tensor in node.parameters.items():
            first = seen.setdefault(name, tensor)
            if first.elements != tensor.elements:
                sizes = f"{format_shape(first)} and {format_shape(tensor)}"
                raise GraphError(f"{model.path}: layer {node.name!r} shares {name!r}, but the shapes differ: {sizes}")


def _parameters(model: ModelSpec, batch: int, overrides: Mapping[str, Any]) -> dict[str, Any]:
    for name in overrides:
        if name not in model.params:
            hint = suggest_names(name, model.params)
            raise SpecError(f"{model.path}: model {model.name!r} has no parameter {name!r}; {hint}")
    params: dict[str, Any] = {"batch": batch}
    for name, value in (dict(model.params) | dict(overrides)).items():
        params[name] = _evaluated(value, params, f"{model.path}: params.{name}")
    return params


def _evaluated(value: Any, names: Mapping[str, Any], where: str) -> Any:
    if isinstance(value, list):
        return [_evaluated(each, names, where) for each in value]
    if isinstance(value, dict):
        return {key: _evaluated(each, names, f"{where}.{key}") for key, each in value.items()}
    if not (isinstance(value, str) and value.startswith("=")):
        return value
    try:
        return evaluate_model_expression(value, names)
    except SpecError as error:
        raise SpecError(f"{where}: {error}") from None


def _input(model: ModelSpec, name: str, params: Mapping[str, Any]) -> Tensor:
    spec = model.inputs[name]
    sizes: dict[str, DimSize] = {}
    for dim, value in spec.dims.items():
        where = f"{model.path}: inputs.{name}.dims.{dim}"
        size = _evaluated(value, params, where)
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size < _MAX_DIM_SIZE:
            raise SpecError(f"{where}: {size!r} must be a whole number of 1 or more, or an expression such as '=batch'")
        sizes[dim] = size
    return Tensor.of(name, sizes, spec.role, needs_gradient=False)


@dataclass(frozen=True, slots=True)
class _Scope:
    """Scope of names in a part of a model file: outputs of layers, and values for expressions.

    A block opens a scope inside that of its caller.
    """

    names: dict[str, Tensor]
    values: Mapping[str, Any]
    prefix: str = ""
    loops: RepeatedBlocks = ()
    depth: int = 0
    counters: dict[str, int] = field(default_factory=dict)

    def nested(self, label: str, values: Mapping[str, Any] | None = None, repeats: RepeatedBlocks = ()) -> _Scope:
        """Return the scope of a block, loop or branch inside this scope.

        Parameters
        ----------
        label : str
            Name of the block, loop or branch; it prefixes the names of layers inside.
        values : mapping of str to object, optional
            Values for expressions inside. None or empty: those of this scope.
        repeats : tuple of RepeatedBlock, optional
            Loops that are opened here, each with its number of iterations.

        Returns
        -------
        _Scope
            Scope that sees the outputs of this one; names added to it stay inside.
        """
        return _Scope(
            dict(self.names), values or self.values, f"{self.prefix}{label}.", self.loops + repeats, self.depth + 1
        )

    def label(self, name: str | None, kind: str) -> str:
        """Return the given name, or the layer's kind with a number that makes it unique in this scope.

        Parameters
        ----------
        name : str or None
            Name that the model file states. None: it states none.
        kind : str
            Kind of the layer, block or loop.

        Returns
        -------
        str
            Name without the prefix of the scope.
        """
        if name is not None:
            return name
        self.counters[kind] = self.counters.get(kind, 0) + 1
        return f"{kind}{self.counters[kind]}"


ModelFilePath = tuple[str | int, ...]


class _Place(NamedTuple):
    """Entry of a model file: its content, the names that it may use, the tensor before it, and the way to it."""

    body: dict[str, Any]
    scope: _Scope
    x: Tensor
    path: ModelFilePath


class _Builder:
    """Builder of a network graph, which walks the entries of a model file and collects layer nodes."""

    def __init__(self, model: ModelSpec, params: Mapping[str, Any], choices: LayerImplementations) -> None:
        self.model, self.choices = model, choices
        self.nodes: list[Node] = []
        self.carried: dict[str, tuple[str, str]] = {}
        self.parts: dict[str, tuple[str, float]] = {}
        #: Names in use, of inputs, layers, loops, blocks and branches; they prefix the names of layers inside them.
        self._taken = set(model.inputs)
        self._added = self._entries = 0

    def sequence(self, entries: Sequence[Any], scope: _Scope, x: Tensor, path: ModelFilePath) -> Tensor:
        """Add the entries of a list to the graph, each reading the output of the one before by default.

        Parameters
        ----------
        entries : sequence of object
            Entries of the model file: layers, blocks, loops and branches.
        scope : _Scope
            Names that the entries may use.
        x : Tensor
            Input of the first entry.
        path : ModelFilePath
            Keys and positions that lead to the list in the model file, for error messages.

        Returns
        -------
        Tensor
            Output of the last entry; ``x`` if there is none.
        """
        if scope.depth > _MAX_DEPTH:
            raise self._error(path, f"nested deeper than {_MAX_DEPTH} levels (a block that uses itself?)")
        if not isinstance(entries, list):
            raise self._error(path, f"expected a list of layers, not {entries!r:.60}")
        for index, entry in enumerate(entries):
            x = self._entry(entry, scope, x, (*path, index))
        return x

    def _entry(self, entry: Any, scope: _Scope, x: Tensor, path: ModelFilePath) -> Tensor:
        self._entries += 1
        if self._entries > _MAX_ENTRIES:
            raise self._error(path, f"more than {_MAX_ENTRIES} entries, blocks and repetitions written out")
        body = {entry: None} if isinstance(entry, str) else entry
        if not isinstance(body, dict) or not body:
            raise self._error(path, f"expected a layer such as 'relu' or 'conv: {{channels: 64}}', not {entry!r:.60}")
        place = _Place(body, scope, x, path)
        if not self._is_included(place):
            return x
        name = body.get("name")
        if name is not None and (not isinstance(name, str) or not name or "." in name):
            raise self._error((*path, "name"), f"{name!r:.60} must be a word without dots")
        if name in scope.names:
            raise self._error((*path, "name"), f"{name!r} stands twice here")
        if "share" in body and ("repeat" in body or "branches" in body):
            raise self._error((*path, "share"), "`share:` goes with a layer or a block of the file")
        if "frozen" in body and not any(key in LAYERS for key in body):
            raise self._error((*path, "frozen"), "`frozen:` goes with a layer")
        place = _Place(body, scope, self._sources(place)[0], path)
        add = self._repeat if "repeat" in body else self._branches if "branches" in body else self._add_single
        out = add(place, [key for key in body if key not in _RESERVED])
        if name is not None:
            scope.names[name] = out
        return out

    def _is_included(self, place: _Place) -> bool:
        if "when" not in place.body:
            return True
        condition = place.body["when"]
        answer = self._values(condition, place, "when")
        if not isinstance(answer, bool):
            raise self._error((*place.path, "when"), f"{condition!r} is not a condition such as '=stride > 1'")
        return answer

    def _sources(self, place: _Place) -> tuple[Tensor, ...]:
        names, known = place.body.get("inputs"), place.scope.names
        if names is None:
            return (place.x,)
        path = (*place.path, "inputs")
        if not isinstance(names, list) or not names or not all(isinstance(each, str) for each in names):
            raise self._error(path, f"expected a list of names, not {names!r:.60}")
        for name in names:
            if name not in known:
                hint = suggest_names(name, known)
                raise self._error(path, f"no layer or input named {name!r} stands before this one; {hint}")
        return tuple(known[name] for name in names)

    def _add_single(self, place: _Place, kinds: list[str]) -> Tensor:
        if len(kinds) != 1:
            known = f"{suggest_names(kinds[-1], [*LAYERS, *self.model.blocks, *_RESERVED])}" if kinds else "none given"
            raise self._error(place.path, f"expected exactly one layer type, found {kinds or 'none'}; {known}")
        kind, options = kinds[0], place.body[kinds[0]]
        path = (*place.path, kind)
        if options is not None and not isinstance(options, dict):
            raise self._error(path, f"expected options such as {{channels: 64}}, not {options!r:.60}")
        values = self._values(options or {}, place, kind)
        if kind not in self.model.blocks and kind not in LAYERS:
            hint = suggest_names(kind, [*LAYERS, *self.model.blocks])
            raise self._error(path, f"unknown layer type {kind!r}; {hint}")
        mark = len(self.nodes)
        out = (self._block if kind in self.model.blocks else self._layer)(kind, values, place)
        if "share" in place.body:
            self._share_weights(place, mark)
        return out

    def _share_weights(self, place: _Place, mark: int) -> None:
        """Make the nodes from index ``mark`` on use the weights of the earlier layer or block that ``share:`` names."""
        scope, path = place.scope, (*place.path, "share")
        name, owner = place.body.get("name"), place.body["share"]
        if name is None or not isinstance(owner, str) or owner == name or owner not in scope.names:
            expected = "expected the name of an earlier layer or block, and a `name:` of its own"
            raise self._error(path, f"{expected}; {suggest_names(str(owner), scope.names)}")
        known = {parameter for node in self.nodes[:mark] for parameter in node.parameters}
        old, new = f"{scope.prefix}{name}.", next(_prefixes(scope.prefix, owner, known), f"{scope.prefix}{owner}.")
        for index, node in enumerate(self.nodes[mark:], start=mark):
            node = replace(node, operations=tuple(with_renamed_parameters(op, old, new) for op in node.operations))
            missing = [parameter for parameter in node.parameters if parameter not in known]
            if missing:
                raise self._error(path, f"{owner!r} has no weight {missing[0].removeprefix(new)!r} to share")
            self.nodes[index] = node

    def _layer(self, kind: str, values: dict[str, Any], place: _Place) -> Tensor:
        schema, scope, path = LAYERS[kind], place.scope, place.path
        layer = validate_mapping(schema, values, self._location((*path, kind)))
        sources = self._sources(place)
        most = None if schema.input_count is None else schema.input_count + schema.optional_input_count
        least = 2 if schema.input_count is None else schema.input_count
        if len(sources) < least or (most is not None and len(sources) > most):
            expected = f"{least} or more" if most is None else f"{least}" if most == least else f"{least} to {most}"
            raise self._error(path, f"{kind} takes {expected} inputs, found {len(sources)}")
        name = scope.prefix + scope.label(place.body.get("name"), kind)
        frozen = place.body.get("frozen", False)
        if not isinstance(frozen, bool):
            raise self._error((*path, "frozen"), f"{frozen!r:.60} must be true or false")
        expansion = self._expanded(self._resolve_tie(layer, scope), name, sources, path, untrained=frozen)
        out, whole = expansion.out, expansion.storage
        if whole is not None:  # the output is a view of part of it
            storage, larger = self.parts.get(whole.name, (whole.name, 1.0))
            self.parts[out.name] = storage, larger * whole.elements / out.elements
        return self._add(Node(name, kind, sources, expansion.operations, out, scope.loops), path)

    def _resolve_tie(self, layer: Layer, scope: _Scope) -> Layer:
        """Return a layer whose ``tie`` is the full name of the other layer instead of the name in this scope."""
        tie = getattr(layer, "tie", None)
        if tie is None:
            return layer
        if tie not in scope.names:
            hint = suggest_names(tie, scope.names)
            raise SpecError(f"{self.model.path}: tie: no layer named {tie!r} stands before this one; {hint}")
        return layer.model_copy(update={"tie": scope.names[tie].name})

    def _expanded(
        self, layer: Layer, name: str, sources: tuple[Tensor, ...], path: ModelFilePath, *, untrained: bool = False
    ) -> LayerOperations:
        try:
            expansion = layer.to_operations(name, sources, self.choices)
        except GraphError as error:
            raise self._error(path, str(error)) from None
        if not all(1 <= size < _MAX_DIM_SIZE for size in expansion.out.sizes):
            raise self._error(path, f"{name}: output {format_shape(expansion.out)} has an impossible size")
        return without_unneeded_gradients(with_frozen_weights(expansion) if untrained else expansion, sources)

    def _claim(self, name: str, path: ModelFilePath) -> None:
        if name in self._taken:
            raise self._error(path, f"two layers are named {name!r}")
        self._taken.add(name)

    def _label(self, place: _Place, kind: str) -> str:
        """Claim the name of a block, loop or branch, and return it without the prefix of its scope."""
        label = place.scope.label(place.body.get("name"), kind)
        self._claim(place.scope.prefix + label, place.path)
        return label

    def _add(self, node: Node, path: ModelFilePath) -> Tensor:
        self._claim(node.name, path)
        self._added += 1
        if self._added > _MAX_NODES:
            raise self._error(
                path, f"more than {_MAX_NODES} layers; a repeated block of constant shape is counted once"
            )
        self.nodes.append(node)
        return node.out

    def _block(self, kind: str, arguments: dict[str, Any], place: _Place) -> Tensor:
        block, path = self.model.blocks[kind], (*place.path, kind)
        for key in arguments:
            if key not in block.args:
                hint = suggest_names(key, block.args)
                raise self._error((*path, key), f"unknown argument of block {kind!r}; {hint}")
        values, known = dict[str, Any](), dict(place.scope.values)
        for key, default in block.args.items():
            value = arguments.get(key, default)
            if value == "required":
                raise self._error(path, f"block {kind!r} needs the argument {key!r}")
            where = self._location(("blocks", kind, "args", key))
            values[key] = _evaluated(value, known | values | _sizes(place.x), where)
        inner = place.scope.nested(self._label(place, kind), known | values)
        inner.names["input"] = place.x
        for index, source in enumerate(self._sources(place)[1:], start=2):
            inner.names[f"input{index}"] = source
        return self.sequence(block.layers, inner, place.x, ("blocks", kind, "layers"))

    def _repeat(self, place: _Place, extra: list[str]) -> Tensor:
        path = (*place.path, "repeat")
        times = self._values(place.body["repeat"], place, "repeat")
        if isinstance(times, bool) or not isinstance(times, int) or not 0 <= times <= _MAX_REPEAT:
            raise self._error(path, f"{times!r} is not a number of repetitions from 0 to {_MAX_REPEAT}")
        in_all = times * math.prod(iterations for _, iterations in place.scope.loops)
        if in_all > _MAX_REPEAT:
            raise self._error(path, f"{in_all} repetitions with the loops round it; expected at most {_MAX_REPEAT}")
        if extra or "layers" not in place.body:
            problem = f"{extra[0]!r} beside it" if extra else "no `layers:`"
            raise self._error(place.path, f"`repeat:` goes with `layers:`; found {problem}")
        label, x = self._label(place, "repeat"), place.x
        if times == 0:
            return x
        folded = self._fold_loop(place, times, label)
        if folded is not None:
            return folded
        for index in range(times):
            inner = place.scope.nested(f"{label}.{index + 1}")
            x = self.sequence(place.body["layers"], inner, x, (*place.path, "layers"))
        return x

    def _fold_loop(self, place: _Place, times: int, label: str) -> Tensor | None:
        """Add the entries of a loop as one body that counts ``times``, and return its output.

        Returns None, and adds no node, if the output of the body has not the shape of its input.
        """
        mark, taken = len(self.nodes), set(self._taken)
        group, x = place.scope.prefix + label, place.x
        inner = place.scope.nested(label, repeats=((group, times),))
        out = self.sequence(place.body["layers"], inner, x, (*place.path, "layers"))
        same = out.dims == x.dims and out.sizes == x.sizes
        if times == 1 or (same and (x.needs_gradient or not out.needs_gradient)):
            self.carried[group] = (x.name, out.name)
            return out
        del self.nodes[mark:]
        self._taken = taken
        if not same:
            return None
        # Later iterations read a tensor that needs a gradient, so the one copy is counted with that gradient.
        return self._fold_loop(place._replace(x=replace(x, needs_gradient=True)), times, label)

    def _branches(self, place: _Place, extra: list[str]) -> Tensor:
        branches, join = place.body["branches"], place.body.get("join")
        if extra or not isinstance(branches, list) or len(branches) < 2 or join not in ("add", "concat", "multiply"):
            expected = "expected {branches: [[...], [...]], join: add|concat|multiply} with two branches or more"
            raise self._error(place.path, expected)
        scope, label = place.scope, self._label(place, "branch")
        outs: tuple[Tensor, ...] = ()
        for index, entries in enumerate(branches):
            inner = scope.nested(f"{label}.{index + 1}")
            inner.names["input"] = place.x
            outs += (self.sequence(entries, inner, place.x, (*place.path, "branches", index)),)
        name = f"{scope.prefix}{label}.{join}"
        maker = self._expanded(LAYERS[join](), name, outs, place.path)
        return self._add(Node(name, join, outs, maker.operations, maker.out, scope.loops), place.path)

    def _values(self, value: Any, place: _Place, key: str) -> Any:
        return _evaluated(value, dict(place.scope.values) | _sizes(place.x), self._location((*place.path, key)))

    def _location(self, path: ModelFilePath) -> str:
        spot = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
        return f"{self.model.path or self.model.name}: {spot if len(spot) < 160 else spot[:160] + '…'}"

    def _error(self, path: ModelFilePath, problem: str) -> GraphError:
        return GraphError(f"{self._location(path)}: {problem}")


def _prefixes(scope: str, owner: str, known: set[str]) -> Iterator[str]:
    """Yield the name prefixes under which a shared layer's weights are known, from the inner scope outwards."""
    parts = scope.split(".")[:-1]
    for depth in range(len(parts), -1, -1):
        full = ".".join([*parts[:depth], owner, ""])
        if any(parameter.startswith(full) for parameter in known):
            yield full


def _sizes(x: Tensor) -> dict[str, DimSize]:
    return {f"in_{dim}": size for dim, size in zip(x.dims, x.sizes, strict=True)}


#: Changes that runs make to a network, each in a file of this folder. A change returns the graph as is if the run does
#: not ask for it.
GRAPH_TRANSFORMS: Registry[Callable[[Graph, Run], Graph]] = Registry("change of a network", "paleo.network")


def apply_graph_transforms(graph: Graph, run: Run) -> Graph:
    """Return a network with all registered changes, such as fine-tuning, that a run asks for.

    Parameters
    ----------
    graph : Graph
        Network as a graph of layers.
    run : Run
        Options of the run: GPUs, batch, parallelism, number format and so on.

    Returns
    -------
    Graph
        The changed network.

    Raises
    ------
    PlanError
        If the run asks for a change wrongly.
    """
    for name in GRAPH_TRANSFORMS:
        graph = GRAPH_TRANSFORMS[name](graph, run)
    return graph
