"""Norms: batch, layer, RMS, group, instance, and across channels."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from paleo.importers.builder import Placed, UntranslatableError
from paleo.importers.rules import Reading, onnx_operators, torch_functions, translates
from paleo.importers.trace import learns

if TYPE_CHECKING:
    from paleo.importers.builder import Builder, LayerEntry
    from paleo.importers.rules import Invocation, OnnxNode
    from paleo.importers.trace import Call

_AFFINE = ("input", "weight", "bias")


@torch_functions("batch_norm instance_norm")
def _running(call: Invocation) -> Reading:
    return call.reading(call.name, ("input", "running_mean", "running_var", "weight", "bias"), _AFFINE)


@torch_functions("layer_norm")
def _layer_norm(call: Invocation) -> Reading:
    return call.reading("layer_norm", ("input", "normalized_shape", "weight", "bias"), _AFFINE)


@torch_functions("rms_norm")
def _rms_norm(call: Invocation) -> Reading:
    return call.reading("rms_norm", ("input", "normalized_shape", "weight"), ("input", "weight"))


@torch_functions("group_norm")
def _group_norm(call: Invocation) -> Reading:
    return call.reading("group_norm", ("input", "num_groups", "weight", "bias"), _AFFINE)


@torch_functions("local_response_norm")
def _response(call: Invocation) -> Reading:
    return call.reading("local_response_norm", ("input", "size"), ("input",))


@onnx_operators("BatchNormalization")
def _onnx_batch_norm(node: OnnxNode) -> Reading:
    return Reading("batch_norm", node.inputs[:3])


@onnx_operators("LayerNormalization")
def _onnx_layer_norm(node: OnnxNode) -> Reading:
    x, axis = node.input(0), node.options.get("axis", -1)
    width = x.shape[axis:] if x is not None and isinstance(axis, int) and -len(x.shape) <= axis < len(x.shape) else ()
    return Reading("layer_norm", node.inputs[:3], {"normalized_shape": list(width)})


@onnx_operators("RMSNormalization SimplifiedLayerNormalization")
def _onnx_rms_norm(node: OnnxNode) -> Reading:
    return Reading("rms_norm", node.inputs[:2])


@onnx_operators("GroupNormalization")
def _onnx_group_norm(node: OnnxNode) -> Reading:
    return Reading("group_norm", node.inputs[:3], {"num_groups": node.options.get("num_groups", 1)})


@onnx_operators("InstanceNormalization")
def _onnx_instance_norm(node: OnnxNode) -> Reading:
    return Reading("instance_norm", node.inputs[:3])


@onnx_operators("LRN")
def _onnx_response(node: OnnxNode) -> Reading:
    return Reading("local_response_norm", node.inputs[:1], {"size": node.options.get("size", 5)})


@translates("batch_norm")
def batch_norm(b: Builder, call: Call) -> None:
    """Statistics of each channel."""
    x = b.at(call.inputs[0])
    if len(x.tensor.dims) < 2:
        raise UntranslatableError("no channels")
    b.put(call.out, _normed(b, "batch_norm", {} if learns(call, 1) else {"affine": False}, x, call))


def _normed(b: Builder, kind: str, options: dict[str, Any], x: Placed, call: Call) -> LayerEntry:
    return b.sharing(b.add(kind, options, [x], call.path), call.inputs[1:])


@translates("layer_norm")
def layer_norm(b: Builder, call: Call) -> None:
    """Normalisation over the last dims, folded into one dim."""
    x = b.at(call.inputs[0])
    weight = next((value for value in call.inputs[1:3] if value is not None), None)
    shape = call.options.get("normalized_shape") or (weight.shape if weight is not None else x.tensor.sizes[-1:])
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    options = {} if learns(call, 2) else {"bias": False} if learns(call, 1) else {"affine": False}
    if len(shape) == 1:
        b.put(call.out, _normed(b, "layer_norm", options, x, call))
        return
    kept = x.tensor.sizes[: len(x.tensor.sizes) - len(shape)]
    flat = b.shaped(x, (*(int(size) for size in kept), math.prod(int(size) for size in shape)), call.path)
    entry = _normed(b, "layer_norm", options, flat, call)
    b.placed[call.out] = b.view(Placed.of(entry), x.dims, call.path)


@translates("rms_norm")
def rms_norm(b: Builder, call: Call) -> None:
    """Root mean square of the last dim."""
    if not learns(call, 1):
        b.put(call.out, _normed(b, "layer_norm", {"affine": False}, b.at(call.inputs[0]), call))
        return
    kept = {value for part in call.parts for value in part.saved or () if value.shape == call.out.shape}
    options = {"keeps": "normalised"} if len(kept - {call.inputs[0]}) == 1 else {}
    b.put(call.out, _normed(b, "rms_norm", options, b.at(call.inputs[0]), call))


@translates("group_norm instance_norm")
def group_norm(b: Builder, call: Call) -> None:
    """Statistics of groups of channels; one channel a group for instance norms."""
    x = b.at(call.inputs[0])
    groups = call.options.get("num_groups") if call.kind == "group_norm" else int(x.tensor.sizes[1])
    if not (learns(call, 1) and learns(call, 2)):
        options = {"kind": "norm", "dims": x.dims, "keeps": "inputs", "flops_per_element": 8.0, "of": call.label}
        options["parameters"] = b.parameters(call.inputs[1:]) or None
        b.put(call.out, b.add("pass", options, [x], call.path))
        return
    b.put(call.out, _normed(b, "group_norm", {"groups": groups}, x, call))


@translates("local_response_norm")
def local_response_norm(b: Builder, call: Call) -> None:
    """Krizhevsky et al., 2012."""
    entry = b.add("local_response_norm", {"size": call.options.get("size", 5)}, [b.at(call.inputs[0])], call.path)
    b.put(call.out, entry)
