"""Rules for products of two tensors: linear layers, matrix products, einsums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from paleo.importers._builder import (
    LayerEntry,
    NetworkBuilder,
    OnnxNode,
    TorchInvocation,
    TranslatedCall,
    UntranslatableError,
    register_onnx_reader,
    register_torch_reader,
    register_translation,
)
from paleo.importers._network_trace import Shape, TracedCall, TracedTensor, is_parameter_input
from paleo.importers.operators._pointwise import add_memory_pass

if TYPE_CHECKING:
    from paleo.operations.tensor import Tensor

# torch and ONNX.


@register_torch_reader("mm bmm matmul dot mv inner")
def _matmul(call: TorchInvocation) -> TranslatedCall:
    left, right = [*call.args, *call.kwargs.values()][:2]
    return TranslatedCall("matmul", [call.tensor(left), call.tensor(right)])


@register_torch_reader("addmm baddbmm addbmm addmv")
def _addmm(call: TorchInvocation) -> TranslatedCall:
    kind = "addmm" if call.name == "addmm" else "baddbmm"
    added, left, right = [*call.args, *call.kwargs.values()][:3]
    return TranslatedCall(kind, [call.tensor(left), call.tensor(right), call.tensor(added)])


@register_torch_reader("einsum")
def _einsum(call: TorchInvocation) -> TranslatedCall:
    listed = len(call.args) == 2 and isinstance(call.args[1], list | tuple)
    operands = call.args[1] if listed else call.args[1:]
    return TranslatedCall("einsum", [call.tensor(operand) for operand in operands], {"equation": call.args[0]})


@register_torch_reader("tensordot")
def _tensordot(call: TorchInvocation) -> TranslatedCall:
    """Convert a torch.tensordot call to a `TranslatedCall` of kind ``einsum`` with an equation.

    The argument ``dims`` is a number n (the last n dims of the first factor are summed with the first n of the second)
    or two lists of dims.
    """
    arguments = call.arguments("a", "b", "dims")
    left, right = call.tensor(arguments["a"]), call.tensor(arguments["b"])
    if left is None or right is None:
        return TranslatedCall("unknown")
    dims = arguments.get("dims", 2)
    a, b = len(left.shape), len(right.shape)
    pairs = (
        list(zip(range(a - dims, a), range(dims), strict=True))
        if isinstance(dims, int)
        else [(x % a, y % b) for x, y in zip(*dims, strict=True)]
    )
    letters = [chr(ord("a") + place) for place in range(a + b)]
    first, second = letters[:a], letters[a:]
    for x, y in pairs:
        second[y] = first[x]
    summed = {first[x] for x, _ in pairs}
    result = [letter for letter in (*first, *second) if letter not in summed]
    equation = f"{''.join(first)},{''.join(second)}->{''.join(result)}"
    return TranslatedCall("einsum", [left, right], {"equation": equation})


@register_onnx_reader("Gemm")
def _gemm(node: OnnxNode) -> TranslatedCall:
    left, right, shift = node.input(0), node.input(1), node.input(2)
    plain = right is not None and right.is_static and bool(right.parameter_names) and not node.options.get("transA")
    if plain and (shift is None or (shift.is_static and len(shift.shape) == 1)):
        return TranslatedCall("linear", [left, right, shift])
    return TranslatedCall("unknown", node.inputs)


# Layers.


@register_translation("linear")
def add_linear_layer(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a linear layer to network ``b`` for a recorded call such as torch's linear.

    The call's inputs are the tensor, a weight matrix and perhaps a bias. Afterwards ``b.placed`` maps the call's output
    to the layer. A weight that an earlier layer holds is shared with it or tied to it.
    """
    x, (weight, owner) = b.place_of(call.inputs[0]), b.weight_and_owner(call.inputs[1])
    if len(weight.shape) != 2:
        raise UntranslatableError("a weight that is no matrix")
    features = call.out.shape[-1]
    dim = _output_dim_name(b, x.tensor, features)
    options: dict[str, Any] = {"features": features, "dim": dim, "bias": is_parameter_input(call, 2)}
    same = owner is not None and owner.kind == "linear" and _is_same_product(owner, options)
    if same and not b.new_parameter_count([call.input(2)]):
        entry = b.add_layer("linear", options, [x], call.path)
        b.use_weights_of(owner, entry)
    else:
        entry = b.add_layer("linear", options, [x], call.path, tie=owner)
    b.record_output(call.out, entry)


def _is_same_product(owner: LayerEntry, options: dict[str, Any]) -> bool:
    stated = owner.options["features"], bool(owner.options.get("bias"))
    return stated == (options["features"], options["bias"])


def _output_dim_name(b: NetworkBuilder, x: Tensor, features: int) -> str:
    """Return a name for the output dim of a linear layer with ``features`` outputs on the input ``x``.

    The name is hidden for the model's own width, vocab for the rows of a table, and ffn for a width that is projected
    back.
    """
    last = x.dims[-1]
    tables = {entry.options.get("entries") for entry in b.network.entries if entry.kind == "embedding"}
    name = "vocab" if features in tables else last if x.sizes[-1] == features else None
    if name is None:
        width = next((e.out.sizes[-1] for e in b.network.entries if e.kind in ("embedding", "attention")), None)
        name = "hidden" if features == width else "ffn" if features > x.sizes[-1] and last == "hidden" else "features"
    kept = x.dims[:-1]
    return name if name not in kept else next(f"{name}{i}" for i in range(2, 99) if f"{name}{i}" not in kept)


@register_translation("matmul addmm baddbmm einsum")
def add_tensor_product(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a product of two tensors (matmul, bmm, einsum) to network ``b`` for a recorded call.

    The product is described by one letter per dim. A factor made of parameters alone is a weight. An einsum of one
    factor becomes a memory pass; one of more factors, a chain of products.
    """
    if call.kind == "einsum" and (len(call.inputs) != 2 or call.flops == 0.0):
        _add_unusual_einsum(b, call)
        return
    left, right = call.input(0), call.input(1)
    if left is None or right is None:
        raise UntranslatableError("a product of other than two tensors")
    if call.kind == "einsum":
        sides, letters = _einsum_equation_letters(str(call.options["equation"]), left, right)
    else:
        sides, letters = _matmul_einsum_letters(left.shape, right.shape)
    if left.is_static:
        left, right, sides = right, left, sides[::-1]
    x = b.place_of(left)
    if not letters:
        raise UntranslatableError("a product that is one number")
    equation = f"{' '.join(sides[0])}, {' '.join(sides[1])} -> {' '.join(letters)}"
    options: dict[str, Any] = {"equation": equation, "dims": b.dim_names(call.out.shape, x.tensor)}
    if not (right.is_static and right.parameter_names):
        b.record_output(call.out, b.add_layer("einsum", options, [x, b.place_of(right)], call.path))
        return
    weight, owner = b.weight_and_owner(right)
    entry = b.add_layer("einsum", options | {"weight": list(weight.shape)}, [x], call.path)
    b.use_weights_of(owner, entry)
    b.record_output(call.out, entry)


@register_translation("grouped_product")
def add_grouped_product(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a grouped linear layer to network ``b``, for a call such as torch's grouped_mm.

    Each group of rows is multiplied by its own matrix: (rows, features) with (groups, features, out).
    """
    x, (weight, _) = b.place_of(call.inputs[0]), b.weight_and_owner(call.inputs[1])
    if len(weight.shape) != 3 or len(x.tensor.dims) != 2:
        raise UntranslatableError("groups of another shape")
    groups, features = weight.shape[0], call.out.shape[-1]
    options = {"groups": groups, "features": features, "dim": _output_dim_name(b, x.tensor, features)}
    b.record_output(call.out, b.share_weights(b.add_layer("grouped_linear", options, [x], call.path), call.inputs[1:2]))


def _add_unusual_einsum(b: NetworkBuilder, call: TracedCall) -> None:
    if len(call.inputs) > 2:
        _chain(b, call)
    elif len(call.inputs) == 2:  # one factor has size 1 along a summed dim
        add_memory_pass(b, call, "elementwise")
    else:
        add_memory_pass(b, call, "reduce" if call.out.elements < (call.input(0) or call.out).elements else "copy")


def _chain(b: NetworkBuilder, call: TracedCall) -> None:
    """Append an einsum of more than two factors to network ``b`` as a chain of products of two, from left to right."""
    sides, _, result = str(call.options["equation"]).replace(" ", "").partition("->")
    factors = sides.split(",")
    if "..." in sides or len(factors) != len(call.inputs):
        raise UntranslatableError(sides)
    left, letters = call.inputs[0], factors[0]
    for index in range(1, len(factors)):
        right, side = call.inputs[index], factors[index]
        last = index == len(factors) - 1
        later = set("".join([*factors[index + 1 :], result]))
        out = result if last else "".join(dict.fromkeys(c for c in letters + side if c in later))
        if left is None or right is None:
            raise UntranslatableError(sides)
        sizes = dict(zip(letters, left.shape, strict=True)) | dict(zip(side, right.shape, strict=True))
        equation = {"equation": f"{letters},{side}->{out}"}
        step = TracedCall("einsum", call.source_name, [left, right], [call.out], equation, path=call.path)
        if not last:
            step.outputs = [TracedTensor(tuple(sizes[letter] for letter in out), "call", producing_call=step)]
        add_tensor_product(b, step)
        left, letters = step.out, out


def _matmul_einsum_letters(left: Shape, right: Shape) -> tuple[list[list[str]], list[str]]:
    """Return one letter per dim for a matrix product of two shapes, with batch dims broadcast as in torch and ONNX.

    Returns (letters of both factors, letters of the result). A factor that is a vector has no row or column letter.
    """
    rank = max(len(left), len(right))
    batch = [f"b{i}" for i in range(rank - 2)]
    leads = [batch[rank - len(shape) :] if len(shape) > 1 else [] for shape in (left, right)]
    rows, columns = (["m"] if len(left) > 1 else []), (["n"] if len(right) > 1 else [])
    return [[*leads[0], *rows, "k"], [*leads[1], "k", *columns]], [*batch, *rows, *columns]


def _einsum_equation_letters(text: str, left: TracedTensor, right: TracedTensor) -> tuple[list[list[str]], list[str]]:
    """Split an einsum equation of two factors into letters.

    Returns (letters of both factors, letters of the result). An ellipsis is replaced by one letter for each dim it
    covers. If the equation has no ``->``, the result has the letters that occur once, in alphabetical order.
    """
    sides, arrow, result = text.replace(" ", "").partition("->")
    factors = sides.split(",")
    if len(factors) != 2:
        raise UntranslatableError(text)
    shapes = (left.shape, right.shape)
    ellipses = [_ellipsis(side, shape) for side, shape in zip(factors, shapes, strict=True)]
    lettered = [_spelled_out(side, ellipsis) for side, ellipsis in zip(factors, ellipses, strict=True)]
    for side, letters, shape in zip(factors, lettered, shapes, strict=True):
        if len(letters) != len(shape):
            raise UntranslatableError(side)
    if arrow:
        return lettered, _spelled_out(result, max(ellipses, key=len))
    counts = Counter(chain(*lettered))
    return lettered, sorted(letter for letter, count in counts.items() if count == 1)


def _ellipsis(side: str, shape: Shape) -> list[str]:
    count = len(shape) - len(side.replace("...", "")) if "..." in side else 0
    return [f"e{place}" for place in range(count)][::-1]


def _spelled_out(side: str, ellipsis: Sequence[str]) -> list[str]:
    before, dots, after = side.partition("...")
    return [*before, *(ellipsis if dots else []), *after]
