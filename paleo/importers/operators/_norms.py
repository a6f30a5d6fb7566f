"""Rules for norms (batch, layer, RMS, group, instance, and across channels) and lookups in learned tables."""

from __future__ import annotations

import math
from typing import Any

from paleo.importers._builder import Builder, LayerEntry, Placed, UntranslatableError
from paleo.importers._rules import OnnxNode, Reading, onnx_operators, translates
from paleo.importers._trace import Call, learns


@onnx_operators("LayerNormalization")
def _onnx_layer_norm(node: OnnxNode) -> Reading:
    x, axis = node.input(0), node.options.get("axis", -1)
    width = x.shape[axis:] if x is not None and isinstance(axis, int) and -len(x.shape) <= axis < len(x.shape) else ()
    return Reading("layer_norm", node.inputs[:3], {"normalized_shape": list(width)})


@translates("batch_norm")
def batch_norm(b: Builder, call: Call) -> None:
    """Translate a normalisation over each channel."""
    x = b.at(call.inputs[0])
    if len(x.tensor.dims) < 2:
        raise UntranslatableError("no channels")
    b.put(call.out, _normed(b, "batch_norm", {} if learns(call, 1) else {"affine": False}, x, call))


def _normed(b: Builder, kind: str, options: dict[str, Any], x: Placed, call: Call) -> LayerEntry:
    return b.sharing(b.add(kind, options, [x], call.path), call.inputs[1:])


@translates("layer_norm")
def layer_norm(b: Builder, call: Call) -> None:
    """Translate a normalisation over the last dims, folded into one dim."""
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
    """Translate a root-mean-square norm over the last dim."""
    if not learns(call, 1):
        b.put(call.out, _normed(b, "layer_norm", {"affine": False}, b.at(call.inputs[0]), call))
        return
    kept = {value for part in call.parts for value in part.saved or () if value.shape == call.out.shape}
    options = {"keeps": "normalised"} if len(kept - {call.inputs[0]}) == 1 else {}
    b.put(call.out, _normed(b, "rms_norm", options, b.at(call.inputs[0]), call))


@translates("group_norm instance_norm")
def group_norm(b: Builder, call: Call) -> None:
    """Translate a normalisation over groups of channels; instance norms have one channel in each group."""
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
    """Translate a local response normalisation (Krizhevsky et al., 2012)."""
    entry = b.add("local_response_norm", {"size": call.options.get("size", 5)}, [b.at(call.inputs[0])], call.path)
    b.put(call.out, entry)


@onnx_operators("Gather")
def _gather(node: OnnxNode) -> Reading:
    """Read a lookup in a learned table, or a slice at a constant index."""
    table, index = node.input(0), node.input(1)
    if table is None or index is None:
        return Reading("copy", node.inputs)
    rows = table.sources and len(table.shape) == 2 and not index.static and not node.options.get("axis")
    if rows:
        return Reading("embedding", [index, table])
    return Reading("slice" if index.static else "copy", node.inputs)


@translates("embedding")
def embedding(b: Builder, call: Call) -> None:
    """Translate a lookup of one row for each index."""
    x, (table, owner) = b.at(call.inputs[0]), b.weight(call.inputs[1])
    dim = "hidden" if "hidden" not in x.tensor.dims else "features"
    options = {"entries": table.shape[0], "features": table.shape[1], "dim": dim}
    b.put(call.out, b.add("embedding", options, [x], call.path, tie=owner))


@translates("embedding_bag")
def embedding_bag(b: Builder, call: Call) -> None:
    """Translate sums of table rows: over each row of a two-dim index, or over bags that begin at offsets.

    Bags at offsets are taken to be equally long.
    """
    x, (table, owner) = b.at(call.inputs[0]), b.weight(call.inputs[1])
    if owner is not None:
        raise UntranslatableError("a table that is used twice")
    bags = call.out.shape[0]
    if len(x.tensor.sizes) == 1:
        if int(x.tensor.sizes[0]) % bags:
            raise UntranslatableError("bags that are not of one length")
        x = b.view(x, {"batch": bags, "bag": int(x.tensor.sizes[0]) // bags}, call.path)
    options = {"entries": [table.shape[0]], "features": table.shape[1], "bag": x.tensor.sizes[1]}
    entry = b.add("embedding_bag", options, [x], call.path)
    dims = dict(zip(("batch", "features"), call.out.shape, strict=True))
    b.placed[call.out] = b.view(Placed.of(entry), dims, call.path)
