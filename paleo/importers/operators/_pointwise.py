"""Rules for calls without matrix products.

They are functions of elements, activations, softmax, dropout, sums and products of two tensors, reductions, copies,
views and Fourier transforms; norms (batch, layer, RMS, group, instance, and across channels); and lookups in learned
tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from paleo.importers._builder import (
    NetworkBuilder,
    OnnxNode,
    TensorPlace,
    TorchInvocation,
    TranslatedCall,
    UntranslatableError,
    register_onnx_reader,
    register_torch_reader,
    register_translation,
)
from paleo.importers._network_trace import (
    TracedCall,
    TracedTensor,
    dropout_rate,
    is_parameter_input,
    saved_for_backward,
)
from paleo.layers.base import ACTIVATIONS, LAYERS

_TORCH = {
    "relu": "relu", "relu6": "relu6", "leaky_relu": "leaky_relu", "sigmoid": "sigmoid", "tanh": "tanh", "gelu": "gelu",
    "silu": "silu", "hardswish": "hard_swish", "elu": "elu", "softplus": "softplus", "hardsigmoid": "sigmoid",
    "mish": "silu", "hardtanh": "relu6", "selu": "elu", "celu": "elu",
    "logsigmoid": "softplus", "log_sigmoid": "softplus",
}  # fmt: skip
_ONNX = {
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "LeakyRelu": "leaky_relu", "Elu": "elu", "Selu": "elu",
    "Celu": "elu", "Softplus": "softplus", "HardSwish": "hard_swish", "HardSigmoid": "sigmoid", "Gelu": "gelu",
    "Mish": "silu", "Swish": "silu", "ThresholdedRelu": "relu", "QuickGelu": "silu", "FastGelu": "gelu",
    "BiasGelu": "gelu", "Clip": "relu6",
}  # fmt: skip


@register_torch_reader(" ".join(_TORCH))
def _activation(call: TorchInvocation) -> TranslatedCall:
    return TranslatedCall("activation", None, {"function": _TORCH[call.name]})


@register_onnx_reader(" ".join(_ONNX))
def _onnx_activation(node: OnnxNode) -> TranslatedCall:
    return TranslatedCall("activation", node.inputs[:1], {"function": _ONNX[node.name]})


@register_torch_reader("expand_as view_as reshape_as")
def _as_another(call: TorchInvocation) -> TranslatedCall:
    """Convert a call of expand_as, view_as or reshape_as to a ``view`` of its first tensor.

    The second gives only a shape.
    """
    return TranslatedCall("view", [call.tensor(call.args[0])])


_SUMS_AND_PRODUCTS = {"add": "add", "mul": "multiply"}


@register_torch_reader("add mul")
def _sum_or_product(call: TorchInvocation) -> TranslatedCall:
    return TranslatedCall(_SUMS_AND_PRODUCTS[call.name] if call.has_two_tensors() else "elementwise")


@register_onnx_reader("Add Mul")
def _onnx_sum_or_product(node: OnnxNode) -> TranslatedCall:
    return TranslatedCall(_SUMS_AND_PRODUCTS[node.name.lower()], node.inputs)


@register_translation("activation")
def add_activation(b: NetworkBuilder, call: TracedCall) -> None:
    """Append an element-wise activation layer to network ``b`` for a recorded call such as relu or GELU.

    Afterwards ``b.placed`` maps the call's output to the layer. The option ``keeps: input`` is set if autograd saved
    the input, or a copy of an overwritten input, for a function that usually saves its output.
    """
    x = b.first_activation_input(call)
    function = call.options["function"]
    if function not in LAYERS:
        raise UntranslatableError(function)
    kept = call.saved_tensors
    other = kept is not None and call.out not in kept and ACTIVATIONS[function][1] == "output"
    keeps_input = other and (kept or call.saved_temporary_elements >= call.out.elements)
    b.record_output(call.out, b.add_layer(function, {"keeps": "input"} if keeps_input else {}, [x], call.path))


@register_translation("softmax")
def add_softmax(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a softmax layer to network ``b`` for a recorded call (softmax, log_softmax, ONNX Softmax)."""
    b.record_output(call.out, b.add_layer("softmax", {}, [b.place_of(call.inputs[0])], call.path))


@register_translation("dropout")
def add_dropout(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a dropout layer to network ``b``; at a rate of zero the call's output is simply its input."""
    x = b.place_of(call.inputs[0])
    rate = dropout_rate(call.options.get("p", 0.5))
    if rate:
        b.record_output(call.out, b.add_layer("dropout", {"rate": rate}, [x], call.path))
    else:
        b.place_by_value[call.out] = x


@register_translation("add multiply")
def add_sum_or_product(b: NetworkBuilder, call: TracedCall) -> None:
    """Append the sum or product of two tensors, or of one tensor and parameters, to network ``b`` for a recorded call.

    Two tensors of equal rank become a layer ``add`` or ``multiply``; a learned table of positions becomes
    ``position_embedding``; all other cases, such as broadcasts, become a generic memory pass.
    """
    values, kept = call.tensors, call.saved_tensors
    moving = [b.place_of(value) for value in values if value.is_activation]
    exact = len(moving) == 2 and len({len(source.tensor.dims) for source in moving}) == 1
    largest = max((source.tensor for source in moving), key=lambda tensor: tensor.elements, default=None)
    keeps_both = call.kind == "add" or kept is None or all(v in kept for v in values if not v.is_static)
    whole = largest is not None and largest.sizes == call.out.shape and not b.new_parameter_count(values)
    if exact and keeps_both and whole:
        b.record_output(call.out, b.add_layer(call.kind, {}, moving, call.path))
        return
    if not _positions(b, call, moving, values):
        add_memory_pass(b, call, "elementwise")


def _positions(
    b: NetworkBuilder, call: TracedCall, moving: Sequence[TensorPlace], values: Sequence[TracedTensor]
) -> bool:
    """Append a position embedding if the call adds a learned (seq, hidden) table to a (batch, seq, hidden) tensor.

    Returns True if so; otherwise False, and network ``b`` is unchanged.
    """
    table = next((value for value in values if value.is_static and len(value.parameter_names) == 1), None)
    if call.kind != "add" or len(moving) != 1 or table is None or not b.new_parameter_count([table]):
        return False
    x = moving[0].tensor
    if len(x.dims) != 3 or x.sizes != call.out.shape or table.elements != x.sizes[1] * x.sizes[2]:
        return False
    rows, left = divmod(b.new_parameter_count([table]), int(x.sizes[2]))
    if left or rows < x.sizes[1]:
        return False
    same = "seq" in b.trace.probe_size_by_dim and rows > x.sizes[1]
    options: dict[str, Any] = {"positions": rows} if same or rows != x.sizes[1] else {}
    b.record_output(call.out, b.add_layer("position_embedding", options, moving, call.path))
    return True


@register_torch_reader("cat concat concatenate")
def _cat(call: TorchInvocation) -> TranslatedCall:
    arguments = call.arguments("tensors", "dim")
    tensors = [call.tensor(tensor) for tensor in arguments["tensors"]]
    return TranslatedCall("cat", tensors, {"dim": arguments.get("dim", 0)})


def add_memory_pass(b: NetworkBuilder, call: TracedCall, kind: str, *, flops: float | None = None) -> None:
    """Append a generic layer ``pass`` to network ``b`` for each output of a call, timed by the bytes read and written.

    ``kind`` names the sort of pass (``elementwise``, ``reduce``, ``copy``, ``gather``, ``pool``). ``flops`` is the
    number of vector FLOP per element; None leaves it to the kind's default.
    """
    sources = b.activation_or_index_inputs(call)
    if not sources:
        raise UntranslatableError("nothing moves")
    largest = max(sources, key=lambda source: source.tensor.elements)
    values = [value for value in call.outputs if value.is_activation and value.elements]
    for value in values:
        dims, first = b.dims_of(value.shape, largest.tensor) or {"batch": 1}, value is values[0]
        options: dict[str, Any] = {"kind": kind, "of": call.source_name, "dims": dims, "flops_per_element": flops}
        options["keeps"] = saved_for_backward(call) if first else None
        options["parameters"] = b.new_parameter_count(call.inputs) or None
        options["kept_per_element"] = b.saved_temporaries_per_element(call, value) if first else None
        entry = b.add_layer("pass", options, sources, call.path)
        if value.shape:
            b.record_output(value, entry)
        else:
            b.place_by_value[value] = entry.place


#: Kinds of calls that no layer describes, with the kinds of their passes and the FLOP of an element: element-wise
#: functions such as exp, reductions such as mean, copies (pad, stack, roll, sort, …), and pooling of unusual windows.
_PASSES = {
    "elementwise": ("elementwise", None),
    "reduce": ("reduce", None),
    "copy": ("copy", 0.0),
    "pool_pass": ("pool", None),
}
for _call_kind, (_pass_kind, _flops) in _PASSES.items():
    register_translation(_call_kind)(partial(add_memory_pass, kind=_pass_kind, flops=_flops))


@register_translation("cat")
def add_concatenation(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a concatenation to network ``b`` as a copy; a learned token before a sequence becomes ``class_token``."""
    values = [value for value in call.tensors if value.elements]
    moving = [b.place_of(value) for value in values if not value.is_static]
    longer = len(moving) == 1 and len(call.out.shape) == 3 and call.out.shape[1] == moving[0].tensor.sizes[1] + 1
    if longer and b.new_parameter_count(values) == call.out.shape[2]:
        b.record_output(call.out, b.add_layer("class_token", {}, moving, call.path))
        return
    add_memory_pass(b, call, "copy", flops=0.0)


@register_translation("view")
def add_views(b: NetworkBuilder, call: TracedCall) -> None:
    """Record that a call's outputs are views of its input (reshape, transpose, cast, …), which cost no time."""
    x = b.place_of(next(value for value in call.tensors if not value.is_static))
    for value in call.outputs:
        b.place_by_value[value] = x if value.shape == x.tensor.sizes else b.add_reshape(x, value.shape, call.path)


@register_translation("slice")
def add_slice_views(b: NetworkBuilder, call: TracedCall) -> None:
    """Record that a call's outputs are slices of its input; slices at computed positions become a ``gather`` pass."""
    if any(value is not None and value.is_integer and not value.is_static for value in call.inputs[1:]):
        add_memory_pass(b, call, "gather", flops=0.0)
        return
    x = b.place_of(next(value for value in call.tensors if not value.is_static))
    whole = bool(call.options.get("keeps_whole"))
    for value in call.outputs:
        if not value.is_integer and value.elements:
            same = value.shape == x.tensor.sizes
            b.place_by_value[value] = x if same else b.add_reshape(x, value.shape, call.path, keeps_whole=whole)


@register_translation("fourier")
def add_fourier_pass(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a memory pass to network ``b`` for a Fourier transform, with 5 log2(n) vector FLOP an element.

    n is the largest dim but the batch. The count is Cooley and Tukey's 5 n log2(n) (1965).
    """
    source = b.first_activation_input(call)
    if not call.out.elements:
        raise UntranslatableError("an empty transform")
    dims = b.dims_of(call.out.shape, source.tensor)
    length = max(int(size) for size in source.tensor.sizes[1:] or source.tensor.sizes)
    work = {"kind": "copy", "of": call.source_name, "flops_per_element": 5.0 * math.log2(max(length, 2))}
    entry = b.add_layer("pass", work | {"dims": dims, "keeps": saved_for_backward(call)}, [source], call.path)
    b.place_by_value[call.out] = entry.place


@register_onnx_reader("LayerNormalization")
def _onnx_layer_norm(node: OnnxNode) -> TranslatedCall:
    x, axis = node.input(0), node.options.get("axis", -1)
    width = x.shape[axis:] if x is not None and isinstance(axis, int) and -len(x.shape) <= axis < len(x.shape) else ()
    return TranslatedCall("layer_norm", node.inputs[:3], {"normalized_shape": list(width)})


@register_translation("batch_norm")
def add_batch_norm(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a batch-normalisation layer to network ``b`` for a recorded call.

    Without weights it has ``affine: false``.
    """
    x = b.place_of(call.inputs[0])
    if len(x.tensor.dims) < 2:
        raise UntranslatableError("no channels")
    _add_norm(b, call, "batch_norm", {} if is_parameter_input(call, 1) else {"affine": False}, x)


def _add_norm(b: NetworkBuilder, call: TracedCall, kind: str, options: dict[str, Any], x: TensorPlace) -> None:
    b.record_output(call.out, b.share_weights(b.add_layer(kind, options, [x], call.path), call.inputs[1:]))


@register_translation("layer_norm")
def add_layer_norm(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a layer norm to network ``b`` for a recorded call.

    If the call normalises several trailing dims, they are folded into one by a view before the layer and restored after
    it.
    """
    x = b.place_of(call.inputs[0])
    weight = next((value for value in call.inputs[1:3] if value is not None), None)
    shape = call.options.get("normalized_shape") or (weight.shape if weight is not None else x.tensor.sizes[-1:])
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    scaled = {"bias": False} if is_parameter_input(call, 1) else {"affine": False}
    options = {} if is_parameter_input(call, 2) else scaled
    if len(shape) == 1:
        _add_norm(b, call, "layer_norm", options, x)
        return
    kept = x.tensor.sizes[: len(x.tensor.sizes) - len(shape)]
    flat = b.add_reshape(x, (*(int(size) for size in kept), math.prod(int(size) for size in shape)), call.path)
    entry = b.share_weights(b.add_layer("layer_norm", options, [flat], call.path), call.inputs[1:])
    b.place_by_value[call.out] = b.add_view(entry.place, x.dims, call.path)


@register_translation("rms_norm")
def add_rms_norm(b: NetworkBuilder, call: TracedCall) -> None:
    """Append an RMS norm over the last dim to network ``b`` for a recorded call.

    A norm without a learned scale becomes a ``add_layer_norm`` with ``affine: false``.
    """
    x = b.place_of(call.inputs[0])
    if not is_parameter_input(call, 1):
        _add_norm(b, call, "layer_norm", {"affine": False}, x)
        return
    saved = {value for part in call.replaced_calls for value in part.saved_tensors or ()} - {call.inputs[0]}
    normalised = sum(value.shape == call.out.shape for value in saved) == 1
    _add_norm(b, call, "rms_norm", {"keeps": "normalised"} if normalised else {}, x)


@register_translation("group_norm instance_norm")
def add_group_norm(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a group norm to network ``b`` for a recorded call; an instance norm has one channel per group.

    Without learned scale and shift the call becomes a generic memory pass.
    """
    x = b.place_of(call.inputs[0])
    groups = call.options.get("num_groups") if call.kind == "group_norm" else int(x.tensor.sizes[1])
    if not (is_parameter_input(call, 1) and is_parameter_input(call, 2)):
        options = {"kind": "norm", "dims": x.dims, "keeps": "inputs", "flops_per_element": 8.0, "of": call.source_name}
        options["parameters"] = b.new_parameter_count(call.inputs[1:]) or None
        b.record_output(call.out, b.add_layer("pass", options, [x], call.path))
        return
    _add_norm(b, call, "group_norm", {"groups": groups}, x)


@register_translation("local_response_norm")
def add_local_response_norm(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a local response normalisation (Krizhevsky et al., 2012) to network ``b`` for a recorded call."""
    options, x = {"size": call.options.get("size", 5)}, b.place_of(call.inputs[0])
    b.record_output(call.out, b.add_layer("local_response_norm", options, [x], call.path))


@register_onnx_reader("Gather")
def _gather(node: OnnxNode) -> TranslatedCall:
    """Convert an ONNX Gather to ``embedding`` (learned table), ``slice`` (constant index) or ``copy``."""
    table, index = node.input(0), node.input(1)
    if table is None or index is None:
        return TranslatedCall("copy", node.inputs)
    rows = table.parameter_names and len(table.shape) == 2 and not index.is_static and not node.options.get("axis")
    if rows:
        return TranslatedCall("embedding", [index, table])
    return TranslatedCall("slice" if index.is_static else "copy", node.inputs)


@register_translation("embedding")
def add_embedding(b: NetworkBuilder, call: TracedCall) -> None:
    """Append an embedding layer to network ``b`` for a call that looks up one table row per index.

    A table that an earlier layer holds is tied to it.
    """
    x, (table, owner) = b.place_of(call.inputs[0]), b.weight_and_owner(call.inputs[1])
    dim = "hidden" if "hidden" not in x.tensor.dims else "features"
    options = {"entries": table.shape[0], "features": table.shape[1], "dim": dim}
    b.record_output(call.out, b.add_layer("embedding", options, [x], call.path, tie=owner))


@register_translation("embedding_bag")
def add_embedding_bag(b: NetworkBuilder, call: TracedCall) -> None:
    """Append an embedding bag to network ``b`` for a call that sums several table rows per sample.

    The bags are the rows of an index matrix, or begin at offsets in a flat index; the latter are taken to be equally
    long.
    """
    x, (table, owner) = b.place_of(call.inputs[0]), b.weight_and_owner(call.inputs[1])
    if owner is not None:
        raise UntranslatableError("a table that is used twice")
    bags = call.out.shape[0]
    if len(x.tensor.sizes) == 1:
        if int(x.tensor.sizes[0]) % bags:
            raise UntranslatableError("bags that are not of one length")
        x = b.add_view(x, {"batch": bags, "bag": int(x.tensor.sizes[0]) // bags}, call.path)
    options = {"entries": [table.shape[0]], "features": table.shape[1], "bag": x.tensor.sizes[1]}
    entry = b.add_layer("embedding_bag", options, [x], call.path)
    dims = dict(zip(("batch", "features"), call.out.shape, strict=True))
    b.place_by_value[call.out] = b.add_view(entry.place, dims, call.path)
