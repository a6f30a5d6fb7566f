"""Rows of learned tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paleo.importers.builder import Placed, UntranslatableError
from paleo.importers.rules import Reading, onnx_operators, torch_functions, translates

if TYPE_CHECKING:
    from paleo.importers.builder import Builder
    from paleo.importers.rules import Invocation, OnnxNode
    from paleo.importers.trace import Call


@torch_functions("embedding")
def _embedding(call: Invocation) -> Reading:
    return call.reading("embedding", ("input", "weight"), ("input", "weight"))


@torch_functions("embedding_bag")
def _bag(call: Invocation) -> Reading:
    return call.reading("embedding_bag", ("input", "weight", "offsets"), ("input", "weight", "offsets"))


@onnx_operators("Gather")
def _gather(node: OnnxNode) -> Reading:
    """Rows of a learned table, or a slice at a constant index."""
    table, index = node.input(0), node.input(1)
    if table is None or index is None:
        return Reading("copy", node.inputs)
    rows = table.sources and len(table.shape) == 2 and not index.static and not node.options.get("axis")
    if rows:
        return Reading("embedding", [index, table])
    return Reading("slice" if index.static else "copy", node.inputs)


@translates("embedding")
def embedding(b: Builder, call: Call) -> None:
    """One row for each index."""
    x, (table, owner) = b.at(call.inputs[0]), b.weight(call.inputs[1])
    dim = "hidden" if "hidden" not in x.tensor.dims else "features"
    options = {"entries": table.shape[0], "features": table.shape[1], "dim": dim}
    b.put(call.out, b.add("embedding", options, [x], call.path, tie=owner))


@translates("embedding_bag")
def embedding_bag(b: Builder, call: Call) -> None:
    """Sums of rows of one table: of each row of an index of two dims, or of bags that begin at offsets, as long as
    each other on average."""
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
