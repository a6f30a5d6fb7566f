"""Importer of ONNX files. They are read, never run.

Shapes come from ONNX's own inference. Weights are counted by their sizes; their data are not read. The bytes, nodes and
nesting of a file are checked against limits before anything else is read.

Of a condition, the branch that shapes tell is read, or the longer one where only data would tell.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from paleo.errors import SpecError, suggest_names
from paleo.files import read_bytes
from paleo.importers._builder import OnnxNode, TranslatedCall, read_onnx_node
from paleo.importers._network_trace import Shape, Trace, TracedCall, TracedTensor, make_call, probe_sizes
from paleo.importers._onnx_shapes import (
    FLOAT32_TYPE,
    FLOAT_TYPES,
    INTEGER_TYPES,
    MAX_CONSTANT_ELEMENTS,
    computed_shape_values,
    shape_of_output,
)
from paleo.specs import loading


def _inline_known_branches(onnx: Any, graph: Any, truth: Callable[[Any], bool | None]) -> list[Any]:
    """Replace every ONNX `If` node whose condition is known by the nodes of the branch taken, in place.

    Parameters
    ----------
    onnx : Any
        The library.
    graph : Any
        The graph, which is changed.
    truth : callable
        Tells the condition of a node, or None.

    Returns
    -------
    list
        The branches that were taken.
    """
    nodes, taken = [], []
    for place, node in enumerate(graph.node):
        chosen = truth(node) if node.op_type == "If" else None
        name = "then_branch" if chosen else "else_branch"
        branch = next((item.g for item in node.attribute if item.name == name and item.HasField("g")), None)
        if chosen is None or branch is None or len(branch.output) != len(node.output):
            nodes.append(node)
            continue
        _rename(branch, {tensor: f"{tensor}@{place}" for tensor in _made_in(branch)})
        nodes += branch.node
        ends = zip(branch.output, node.output, strict=True)
        nodes += [onnx.helper.make_node("Identity", [inner.name], [outer]) for inner, outer in ends if outer]
        taken.append(branch)
    if taken:
        copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
        graph.initializer.extend([tensor for branch in taken for tensor in branch.initializer])
        del graph.node[:]
        graph.node.extend(copies)
    return taken


def _is_then_branch_longer(node: Any) -> bool:
    """Return True if an ONNX ``If`` node has at least as many nodes in its then-branch as in its else-branch.

    Parameters
    ----------
    node : onnx.NodeProto
        An ``If`` node.

    Returns
    -------
    bool
        True if the then-branch is at least as long.
    """
    sizes = {attribute.name: _size(attribute.g) for attribute in node.attribute if attribute.HasField("g")}
    return sizes.get("then_branch", 0) >= sizes.get("else_branch", 0)


def _subgraphs_of_node(node: Any) -> Iterator[Any]:
    """Yield the subgraphs in the attributes of an ONNX node, such as the branches of ``If``.

    Parameters
    ----------
    node : Any
        Node of the ONNX graph.

    Yields
    ------
    Any
        A graph of an attribute.
    """
    for attribute in node.attribute:
        yield from [attribute.g] if attribute.HasField("g") else attribute.graphs


def _size(graph: Any) -> int:
    """Count the nodes of an ONNX graph, including all subgraphs inside nodes."""
    return sum(1 + sum(_size(inner) for inner in _subgraphs_of_node(node)) for node in graph.node)


def _made_in(graph: Any) -> set[str]:
    """Return the names of the tensors that an ONNX graph defines: node outputs and constants."""
    outputs = {name for node in graph.node for name in node.output if name}
    return outputs | {tensor.name for tensor in graph.initializer}


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Rename tensors, in place, throughout a graph and the graphs inside it; ``names`` maps old names to new ones."""
    for tensor in (*graph.initializer, *graph.output):
        tensor.name = names.get(tensor.name, tensor.name)
    for node in graph.node:
        for texts in (node.input, node.output):
            texts[:] = [names.get(name, name) for name in texts]
        for inner in _subgraphs_of_node(node):
            _rename(inner, names)


_MAX_ONNX_FILE_BYTES, _MAX_GRAPH_NODES, _MAX_SUBGRAPH_DEPTH, _MAX_TENSOR_RANK = 700_000_000, 50_000, 4, 8
#: Most nested calls of functions.
_MAX_FUNCTION_DEPTH = 64
#: Most rounds of shape inference and arithmetic on shapes.
_MAX_SHAPE_PASSES = 20
#: Largest version of the operators, which is a 32-bit number.
_NEWEST_OPSET = 2**31 - 1
#: Largest size of a dim; larger ones are errors in the file.
MAX_DIM_SIZE = 2**40
#: Operators -> places of the inputs that are learned, whichever node makes them. Not so norms: exporters give those
#: without parameters ones and zeros.
_WEIGHT_INPUT_INDICES = {
    **dict.fromkeys(("Conv", "ConvTranspose", "Gemm", "BatchNormalization"), (1, 2)),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), (1, 2, 3)),
    **dict.fromkeys(("MatMul", "PRelu"), (1,)),
}


def _import_onnx() -> Any:
    """Import the onnx library, or raise an error that says what to install."""
    try:
        importlib.import_module("onnx.shape_inference")
        return importlib.import_module("onnx")
    except ImportError:
        raise SpecError("importing ONNX files needs onnx: pip install 'paleo-perf[onnx]'") from None


def model_file_of_onnx(
    path: str | Path, *, sizes: Mapping[str, int] | None = None, title: str = "", loss: str = "auto"
) -> dict[str, Any]:
    """Convert an ONNX file to the content of a model file.

    Parameters
    ----------
    path : str | Path
        The ONNX file, which is read and never run.
    sizes : dict of str to int, optional
        Sizes of the named dims of its inputs, apart from the batch.
    title : str, optional
        Title of the model; by default the file name.
    loss : str, optional
        ``auto`` ends a classifier with its loss, ``none`` does not.

    Returns
    -------
    dict of str to Any
        Content of a model file, as YAML reads it.

    Raises
    ------
    SpecError
        If the file cannot be read; the message names the node.
    """
    from paleo.importers.model_file import model_file_of_trace

    trace, name = _trace_onnx_file(path, sizes or {}), Path(path).name
    return model_file_of_trace(trace, title=f"{title or name} (ONNX)", source=f"ONNX file {name}", sizes={}, loss=loss)


def _trace_onnx_file(path: str | Path, sizes: Mapping[str, int]) -> Trace:
    """Read an ONNX file as a trace, with a probe size for the batch.

    Parameters
    ----------
    path : str | Path
        The ONNX file.
    sizes : dict of str to int
        Sizes of its named dims.

    Returns
    -------
    Trace
        Calls of the network.

    Raises
    ------
    SpecError
        If the file cannot be read.
    """
    onnx = _import_onnx()
    model = _loaded(onnx, Path(path))
    _check_graph_size(model.graph, str(path))
    _remove_weights(model.graph)
    failed: SpecError | None = None
    for probing in (True, False):
        try:
            return _Reader(onnx, model, str(path), sizes, probing=probing).read()
        except SpecError as error:
            failed = failed or error
        except Exception as error:  # the file has values of wrong types, such as numbers in place of lists
            failed = failed or SpecError(f"{path}: is malformed ({type(error).__name__}: {_short(error)})")
    raise failed or SpecError(f"{path}: cannot be read")


def _loaded(onnx: Any, path: Path) -> Any:
    raw = read_bytes(
        path, most=_MAX_ONNX_FILE_BYTES, expected="an ONNX model, its weights as external data where large"
    )
    loading.record_file_digest(path, raw)
    try:
        model = onnx.load_model_from_string(raw)
        if model.functions:
            _check_function_size(model, str(path))
            model = importlib.import_module("onnx.inliner").inline_local_functions(model)
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"{path}: is no ONNX model ({type(error).__name__}: {_short(error)})") from None
    if not model.graph.node:
        raise SpecError(f"{path}: holds no nodes; expected an ONNX model")
    return model


def _check_function_size(model: Any, path: str) -> None:
    """Raise SpecError if the file's functions, expanded at each call, would have too many nodes."""
    bodies = {(function.domain, function.name): function.node for function in model.functions}
    sizes: dict[tuple[str, str], int] = {}

    def written_out(nodes: Any, calling: tuple[tuple[str, str], ...]) -> int:
        total = 0
        for node in nodes:
            key = (node.domain, node.op_type)
            if key in calling or len(calling) > _MAX_FUNCTION_DEPTH:
                raise SpecError(f"{path}: function {node.op_type[:60]!r} calls itself, or calls nest too deeply")
            if key in bodies and key not in sizes:
                sizes[key] = written_out(bodies[key], (*calling, key))
            total += sizes.get(key, 1) + sum(written_out(graph.node, calling) for graph in _subgraphs_of_node(node))
        return total

    if written_out(model.graph.node, ()) > _MAX_GRAPH_NODES:
        raise SpecError(f"{path}: more than {_MAX_GRAPH_NODES} nodes once its functions are expanded")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _check_graph_size(graph: Any, path: str, depth: int = 0) -> None:
    """Raise SpecError if a graph has too many nodes or is nested too deeply."""
    if depth > _MAX_SUBGRAPH_DEPTH:
        raise SpecError(f"{path}: subgraphs nested deeper than {_MAX_SUBGRAPH_DEPTH} levels")
    if len(graph.node) > _MAX_GRAPH_NODES:
        raise SpecError(f"{path}: {len(graph.node)} nodes; at most {_MAX_GRAPH_NODES} are read")
    for node in graph.node:
        for inner in _subgraphs_of_node(node):
            _check_graph_size(inner, path, depth + 1)
    for tensor in graph.initializer:
        if len(tensor.dims) > _MAX_TENSOR_RANK or any(not 0 <= size < MAX_DIM_SIZE for size in tensor.dims):
            raise SpecError(f"{path}: initializer {tensor.name[:60]!r} has impossible sizes {list(tensor.dims)[:8]}")


def _remove_weights(graph: Any) -> None:
    """Remove the data of all large constant tensors of a graph, in place; their sizes remain."""
    for node in graph.node:
        for inner in _subgraphs_of_node(node):
            _remove_weights(inner)
    for tensor in graph.initializer:
        if math.prod(tensor.dims) > MAX_CONSTANT_ELEMENTS:
            for data in ("raw", "float", "int32", "int64", "double", "uint64", "string", "external"):
                tensor.ClearField(f"{data}_data")
            tensor.ClearField("data_location")


class _Reader:
    """Reader of an ONNX file at given input sizes, which infers shapes and converts nodes to traced calls."""

    def __init__(self, onnx: Any, model: Any, path: str, sizes: Mapping[str, int], *, probing: bool) -> None:
        self.onnx, self.path, self.sizes, self.probing = onnx, path, sizes, probing
        self.model = onnx.ModelProto()
        self.model.CopyFrom(model)
        self.graph = self.model.graph
        self.values: dict[str, TracedTensor] = {"": None}  # type: ignore[dict-item]
        self.constants: dict[str, list[float]] = {}
        self.probe = 1
        self.batch = ""
        self.notes: list[str] = []
        self._readers: dict[str, Any] = {}

    def read(self) -> Trace:
        self._initializers(self.graph.initializer)
        inputs = self._inputs()
        shapes = self._shapes()
        calls = [call for node in self.graph.node if (call := self._call(node, shapes)) is not None]
        outputs = [self.values[output.name] for output in self.graph.output if output.name in self.values]
        outputs = [value for value in outputs if value is not None and not value.is_static]
        if not outputs:
            raise SpecError(f"{self.path}: no output depends on an input")
        sizes = {v.name: v.elements for v in self.values.values() if v is not None and v.origin == "parameter"}
        probes = {"batch": self.probe} if self.probe > 1 else {}
        fixed = None if self.probing else next((value.shape[0] for value in inputs if value.shape), None)
        trace = Trace(inputs, outputs, calls, sizes, probes, notes=tuple(self.notes), fixed_batch=fixed)
        trace.remove_dead_calls()
        live = {name for call in trace.calls for name in call.parameter_names}
        trace.parameter_counts = {name: size for name, size in sizes.items() if name in live}
        return trace

    def _initializers(self, tensors: Iterable[Any]) -> None:
        norms = (node for node in self.graph.node if node.op_type == "BatchNormalization")
        statistics = {name for node in norms for name in list(node.input)[3:5]}
        for tensor in tensors:
            index = tensor.data_type not in FLOAT_TYPES
            learned = not index and tensor.name not in statistics and math.prod(tensor.dims) > 1
            shape = tuple(int(size) for size in tensor.dims)
            self.values[tensor.name] = self._constant(tensor.name, shape, index=index, learned=learned)
            self._remember(tensor.name, tensor)

    @staticmethod
    def _constant(name: str, shape: Shape, *, index: bool, learned: bool = False) -> TracedTensor:
        if learned:
            return TracedTensor(shape, "parameter", name, index, True, frozenset({name}))
        return TracedTensor(shape, "constant", name, index, is_static=True)

    def _remember(self, name: str, tensor: Any, *, constant: bool = False) -> None:
        """Keep the numbers of a small constant tensor (integers.

        For constant nodes also floats, such as resize scales).
        """
        kinds = (*INTEGER_TYPES, *FLOAT32_TYPE) if constant else INTEGER_TYPES
        if tensor.data_type in kinds and math.prod(tensor.dims) <= MAX_CONSTANT_ELEMENTS:
            try:
                numbers = self.onnx.numpy_helper.to_array(tensor).reshape(-1).tolist()
            except Exception:  # the data are not needed, whatever is wrong with them
                return
            if all(math.isfinite(number) and abs(number) < 2**63 for number in numbers):
                self.constants[name] = numbers

    def _inputs(self) -> list[TracedTensor]:
        taken = {int(size) for tensor in self.graph.initializer for size in tensor.dims}
        protos = [proto for proto in self.graph.input if proto.name not in self.values]
        if not protos:
            raise SpecError(f"{self.path}: has no inputs")
        taken |= {d.dim_value for proto in protos for d in proto.type.tensor_type.shape.dim}
        self.probe = probe_sizes(taken, 1, least=101)[0] if self.probing else 1
        symbols = [d.dim_param for proto in protos for d in proto.type.tensor_type.shape.dim if d.dim_param]
        self.batch = next((s for s in symbols if s.lower() in ("n", "b") or s.lower().startswith("batch")), "")
        values = []
        for place, proto in enumerate(protos):
            tensor = proto.type.tensor_type
            if not proto.type.HasField("tensor_type") or len(tensor.shape.dim) > _MAX_TENSOR_RANK:
                raise SpecError(f"{self.path}: input {proto.name[:60]!r} is no tensor of up to {_MAX_TENSOR_RANK} dims")
            shape = tuple(self._size(proto.name, d, i) for i, d in enumerate(tensor.shape.dim))
            for dim, size in zip(tensor.shape.dim, shape, strict=True):
                dim.Clear()
                dim.dim_value = size
            value = TracedTensor(shape, "input", _word(proto.name, place), tensor.elem_type not in FLOAT_TYPES)
            value.source_input = value if value.is_integer else None
            self.values[proto.name] = value
            if shape:
                values.append(value)
            else:  # a setting, such as a sampling rate
                value.origin, value.is_static = "constant", True
        return values

    def _size(self, name: str, dim: Any, place: int) -> int:
        """Return the size of one dim of an input.

        The first dim is the batch. Others have the size in the file, or that asked for, by the dim's name or by input
        and position.
        """
        stated = dim.dim_value if dim.HasField("dim_value") else None
        if self.probing and (dim.dim_param == self.batch if self.batch else place == 0):
            return self.probe
        symbol = dim.dim_param or f"{name}.{place}"
        length = self.sizes.get(f"{name}.{place}", self.sizes.get(symbol))
        if stated is None and length is not None:
            return length
        if stated is None and (place == 0 or (self.batch and dim.dim_param == self.batch)):
            return 1
        if stated is None:
            hint = f"state it with --size {symbol[:60]}=128"
            known = f"; {suggest_names(symbol, self.sizes)}" if self.sizes else ""
            raise SpecError(f"{self.path}: input {name[:60]!r} has no size for {symbol[:60]!r}; {hint}{known}")
        if not 1 <= stated < MAX_DIM_SIZE:
            raise SpecError(f"{self.path}: input {name[:60]!r} has the size {stated}; expected 1 or more")
        return int(stated)

    def _shapes(self) -> dict[str, tuple[Shape, bool]]:
        """Return (shape, True for integers) of each tensor whose shape ONNX can infer, by name."""
        del self.graph.value_info[:]
        for output in self.graph.output:
            output.type.tensor_type.ClearField("shape")
        for node in self.graph.node:
            if node.op_type == "Constant":
                self._constant_node(node)
        for _ in range(_MAX_SHAPE_PASSES):
            shapes = self._inferred()
            if self._rewrite_fixed_batch(shapes):  # before anything is worked out of shapes that change with it
                del self.graph.value_info[:]
                continue
            changed = self._fold_shapes(shapes) | self._add_shapes(shapes) | self._take_branches(self._condition)
            if not changed and self._take_branches(_is_then_branch_longer):
                self.notes = ["of a condition on data the longer branch is read"]
            elif not changed:
                break
        return shapes

    def _rewrite_fixed_batch(self, shapes: Mapping[str, tuple[Shape, bool]]) -> bool:
        """Replace a constant batch of one in Reshape nodes by the probe size of the batch.

        Files exported at a fixed batch contain such nodes. Returns True if a node changed; shapes computed from changed
        nodes must then be inferred again.
        """
        following: set[str] = set()
        for place, node in enumerate(self.graph.node):
            follows = not following.isdisjoint(node.input)
            if node.op_type == "Reshape" and len(node.input) > 1 and self.probe > 1:
                value, target = self.values.get(node.input[0]), self.constants.get(node.input[1], [])
                source = value.shape if value is not None else shapes.get(node.input[0], ((), False))[0]
                if source[:1] == (1 if follows else self.probe,) and _keeps_batch_of_one(source, target):
                    name, sizes = f"{node.input[1]}@{place}", [self.probe, *(int(size) for size in target[1:])]
                    kind = self.onnx.TensorProto.INT64
                    self.graph.initializer.append(self.onnx.helper.make_tensor(name, kind, [len(sizes)], sizes))
                    self._initializers(self.graph.initializer[-1:])
                    node.input[1], follows = name, True
            if follows:
                following.update(node.output)
        return bool(following)

    def _condition(self, node: Any) -> bool | None:
        """Return the truth value of an If node's condition if shapes determine it, otherwise None."""
        numbers = self.constants.get(node.input[0]) if node.input else None
        return None if numbers is None or len(numbers) != 1 else bool(numbers[0])

    def _take_branches(self, truth: Callable[[Any], bool | None]) -> bool:
        """Replace each If node whose condition is known by the nodes of one branch; return True if there was any."""
        taken = _inline_known_branches(self.onnx, self.graph, truth)
        self._initializers([tensor for branch in taken for tensor in branch.initializer])
        if taken:
            _check_graph_size(self.graph, self.path)
        return bool(taken)

    def _add_shapes(self, shapes: dict[str, tuple[Shape, bool]]) -> bool:
        """Add output shapes by Paleo's own rules where ONNX's inference stops; return True if any was added."""
        sizes = {name: shape for name, (shape, _) in shapes.items()}
        sizes |= {name: value.shape for name, value in self.values.items() if value is not None}
        added = False
        for node in self.graph.node:
            name = node.output[0] if node.output else ""
            if not name or name in sizes or name in self.constants:
                continue
            options = {attribute.name: self._attribute(attribute) for attribute in node.attribute}
            numbers = [self.constants.get(each) for each in node.input]
            shape = shape_of_output(node.op_type, [sizes.get(each) for each in node.input], options, numbers)
            if shape is None or len(shape) > _MAX_TENSOR_RANK or any(size >= MAX_DIM_SIZE for size in shape):
                continue
            index = shapes.get(node.input[0], ((), False))[1]
            kind = self.onnx.TensorProto.INT64 if index else self.onnx.TensorProto.FLOAT
            self.graph.value_info.append(self.onnx.helper.make_tensor_value_info(name, kind, shape))
            sizes[name], shapes[name], added = shape, (shape, index), True
        return added

    def _inferred(self) -> dict[str, tuple[Shape, bool]]:
        try:
            inferred = self.onnx.shape_inference.infer_shapes(self.model, strict_mode=False, data_prop=True)
        except Exception as error:
            problem = f"{type(error).__name__}: {_short(error)}"
            raise SpecError(f"{self.path}: its shapes do not fit together ({problem})") from None
        shapes = {}
        for info in (*inferred.graph.value_info, *inferred.graph.output):
            tensor = info.type.tensor_type
            dims = tuple(int(d.dim_value) if d.HasField("dim_value") else -1 for d in tensor.shape.dim)
            if (
                tensor.HasField("shape")
                and len(dims) <= _MAX_TENSOR_RANK
                and all(0 <= size < MAX_DIM_SIZE for size in dims)
            ):
                shapes[info.name] = (dims, tensor.elem_type not in FLOAT_TYPES)
        return shapes

    def _fold_shapes(self, shapes: Mapping[str, tuple[Shape, bool]]) -> bool:
        """Compute nodes that calculate with shapes, and store their results as constants.

        Return True if there were new ones.
        """
        folded = False
        sizes = {name: shape for name, (shape, _) in shapes.items()}
        sizes |= {name: value.shape for name, value in self.values.items() if value is not None}
        for node in self.graph.node:
            if node.op_type == "Constant":
                self._constant_node(node)
            if len(node.output) != 1 or node.output[0] in self.constants:
                continue
            options = {attribute.name: self._attribute(attribute) for attribute in node.attribute}
            numbers = computed_shape_values(node.op_type, list(node.input), options, self.constants, sizes)
            if numbers is None or len(numbers) > MAX_CONSTANT_ELEMENTS or any(abs(n) >= MAX_DIM_SIZE for n in numbers):
                continue
            name = node.output[0]
            self.constants[name] = numbers
            if name in shapes and node.op_type != "Constant":
                shape = sizes[name] if math.prod(sizes[name]) == len(numbers) else (len(numbers),)
                whole = shapes[name][1]
                kind = self.onnx.TensorProto.INT64 if whole else self.onnx.TensorProto.FLOAT
                tensor = self.onnx.helper.make_tensor(name, kind, shape, list(map(int, numbers)) if whole else numbers)
                node.CopyFrom(self.onnx.helper.make_node("Constant", [], [name], value=tensor))
                folded = True
        return folded

    def _call(self, node: Any, shapes: Mapping[str, tuple[Shape, bool]]) -> TracedCall | None:
        options = {attribute.name: self._attribute(attribute) for attribute in node.attribute}
        if node.op_type == "Constant":
            self._constant_node(node)
            return None
        inputs = [self._unmerged(self._learned(name, place, node), node) for place, name in enumerate(node.input)]
        if inputs and all(v is None or (v.is_static and v.is_integer) for v in inputs):
            self._static(node, shapes)
            return None
        missing = [name for name in node.output if name and name not in shapes]
        shaped = [name for name in node.output if name and name in shapes]
        if not shaped:
            if not any(v is not None and v.is_activation for v in inputs):
                self._static(node, shapes)
                return None
            gives = f"what {node.op_type[:60]} of {node.domain[:60] or 'ONNX'} gives"
            where = f"{self.path}: node {node.name[:60]!r}"
            raise SpecError(f"{where}: no shape can be inferred for {gives} ({missing[0]!r:.60})")
        source, elements = inputs[0] if inputs else None, math.prod(shapes[shaped[0]][0])
        if node.op_type == "Reshape" and source is not None and source.elements != elements:
            where = f"{self.path}: node {node.name[:60]!r}"
            raise SpecError(f"{where}: Reshape makes {elements} numbers of {source.elements}")
        numbers = [self.constants.get(name) for name in node.input]
        reading = TranslatedCall("unknown", inputs)
        if len(inputs) >= self._fewest_inputs(node):
            reading = read_onnx_node(OnnxNode(node.op_type, inputs, options, numbers))
        outputs = [shapes[name] for name in shaped]
        path = ".".join(node.name.strip("/").split("/")[:-1])[:120]
        call = make_call(reading.kind, node.op_type, reading.inputs or [], outputs, options=reading.options, path=path)
        call.flops = _flops(call)
        for name, value in zip(shaped, call.outputs, strict=True):
            self.values[name] = value
        return call

    def _fewest_inputs(self, node: Any) -> int:
        """Return the minimum number of inputs of an ONNX operator, by the schema of the opset; 0 without a schema."""
        versions = {opset.domain: opset.version for opset in self.model.opset_import}
        version = min(versions.get(node.domain, 0), _NEWEST_OPSET)
        for schema in ((node.op_type, version, node.domain), (node.op_type,)):
            try:
                return int(self.onnx.defs.get_schema(*schema).min_input)
            except self.onnx.defs.SchemaError:
                continue
        return 0

    def _static(self, node: Any, shapes: Mapping[str, tuple[Shape, bool]]) -> None:
        """Record the outputs of a node that calculates with shapes as constants, as such nodes take no time."""
        for name in node.output:
            shape, index = shapes.get(name, ((1,), True))
            self.values[name] = self._constant(name, shape, index=index)

    def _constant_node(self, node: Any) -> None:
        for attribute in node.attribute:
            if attribute.name == "value" and attribute.HasField("t"):
                shape = tuple(int(size) for size in attribute.t.dims)
                if any(not 0 <= size < MAX_DIM_SIZE for size in shape):
                    raise SpecError(f"{self.path}: constant {node.output[0][:60]!r} has impossible sizes")
                index = attribute.t.data_type not in FLOAT_TYPES
                learned = not index and math.prod(shape) > MAX_CONSTANT_ELEMENTS and len(shape) > 1
                self.values[node.output[0]] = self._constant(node.output[0], shape, index=index, learned=learned)
                self._remember(node.output[0], attribute.t, constant=True)
                return
        for name in node.output:
            self.values[name] = self._constant(name, (1,), index=False)

    def _unmerged(self, value: TracedTensor | None, node: Any) -> TracedTensor | None:
        """Return a bias vector as a separate parameter for each node that reads the vector.

        Exporters merge equal vectors, such as biases of zeros, that were separate in the network.
        """
        if value is None or value.origin != "parameter" or len(value.shape) != 1:
            return value
        used = self._readers.setdefault(value.name, node)
        if used is node:
            return value
        name = f"{value.name}@{len(self.values)}"
        self.values[name] = copy = self._constant(name, value.shape, index=value.is_integer, learned=True)
        return copy

    def _learned(self, name: str, place: int, node: Any) -> TracedTensor | None:
        """Return the traced value of a node's input; a constant at a position for weights counts as a parameter."""
        value = self._value(name, node)
        if value is None or place not in _WEIGHT_INPUT_INDICES.get(node.op_type, ()) or value.elements == 1:
            return value
        if value.is_static and not value.is_integer and not value.parameter_names:
            self.values[name] = value = self._constant(name, value.shape, index=False, learned=True)
        return value

    def _value(self, name: str, node: Any) -> TracedTensor | None:
        if name not in self.values:
            raise SpecError(
                f"{self.path}: node {node.name[:60] or node.op_type!r} reads {name[:60]!r}, which no node computes"
            )
        return self.values[name]

    def _attribute(self, attribute: Any) -> Any:
        try:
            value = self.onnx.helper.get_attribute_value(attribute)
            if isinstance(value, self.onnx.TensorProto):
                whole = value.data_type in INTEGER_TYPES and math.prod(value.dims) == 1
                return int(self.onnx.numpy_helper.to_array(value).reshape(-1)[0]) if whole else None
        except Exception:
            return None
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _keeps_batch_of_one(source: Shape, target: Sequence[float]) -> bool:
    """Return True if a Reshape to ``target`` has a batch of 1 before the elements of one sample of ``source``."""
    if len(target) < 2 or target[0] != 1 or 0 in target:
        return False
    stated, elements = abs(math.prod(target)), math.prod(source[1:])
    return elements % stated == 0 if -1 in target else elements == stated


def _flops(call: TracedCall) -> float | None:
    """Return the FLOP of a matrix product or convolution, from the sizes of its operands.

    Returns None for other calls, whose layers count their own.
    """
    left, right = call.input(0), call.input(1)
    if left is None or right is None or call.out.is_integer:
        return None
    if call.kind == "conv" and len(right.shape) > 2:
        return 2.0 * call.out.elements * math.prod(right.shape[1:])
    if call.kind == "transposed_conv" and len(right.shape) > 2:
        return 2.0 * left.elements * math.prod(right.shape[1:])
    if call.kind in ("linear", "matmul") and left.shape:
        return 2.0 * call.out.elements * left.shape[-1]
    if call.kind == "unknown" and call.source_name == "Attention" and len(left.shape) == len(right.shape) == 3:
        # all heads together: scores, and their weighted sum
        return 2.0 * (left.elements + call.out.elements) * right.shape[1]
    return None


def _word(name: str, place: int) -> str:
    word = "".join(char if char.isascii() and char.isalnum() else "_" for char in name)[:40].strip("_")
    return word if word and not word[0].isdigit() else f"input{place + 1}"
