"""Sizes of ONNX tensors: constant arithmetic on shapes, and shape rules where ONNX's own inference has none."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from paleo.importers._network_trace import Shape

#: Largest number of elements for which a constant keeps its values, such as the target shape of a reshape.
MAX_CONSTANT_ELEMENTS = 64
#: ONNX codes of element types: floating point, and the whole numbers of which shapes consist.
FLOAT_TYPES = frozenset({1, 10, 11, 16, 17, 18, 19, 20})
INTEGER_TYPES, FLOAT32_TYPE = frozenset({6, 7}), frozenset({1})

KnownValues = list[float]


def computed_shape_values(
    op: str,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    known: Mapping[str, KnownValues],
    sizes: Mapping[str, Shape],
) -> KnownValues | None:
    """Compute the output of an ONNX node from shapes and known constants; None if other values are needed.

    Parameters: ``op`` is the operator, ``inputs`` the names of its inputs, ``options`` its attributes; ``known`` maps
    names to flat lists of numbers, ``sizes`` names to shapes.

    >>> computed_shape_values("Shape", ["x"], {}, {}, {"x": (2, 3)})
    [2, 3]
    >>> computed_shape_values("Mul", ["a", "b"], {}, {"a": [2, 3], "b": [4]}, {})
    [8, 12]
    """
    if op in ("Shape", "Size"):
        shape = sizes.get(inputs[0]) if inputs else None
        if shape is None or op == "Size":
            return None if shape is None else [math.prod(shape)]
        return list[float](shape[options.get("start", 0) or 0 : options.get("end")])
    values = [known.get(name) for name in inputs if name]
    if not values or any(value is None for value in values):
        return None
    first, *operands = [value for value in values if value is not None]
    if op == "Cast" and options.get("to") in INTEGER_TYPES:
        return [int(number) for number in first]
    if op == "Not":
        return [int(not number) for number in first]
    if op in ("Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Flatten"):
        return first
    if op == "Concat":
        return [number for value in (first, *operands) for number in value]
    if op == "Gather" and len(operands) == 1 and first:
        inside = all(-len(first) <= place < len(first) for place in operands[0])
        return [first[int(place)] for place in operands[0]] if inside else None
    if op in ("Slice", "Transpose"):
        return _rearranged(op, first, operands, options, sizes.get(inputs[0]) or (len(first),))
    if op == "ConstantOfShape" and all(number >= 0 for number in first) and math.prod(first) <= MAX_CONSTANT_ELEMENTS:
        return [int(options.get("value") or 0)] * int(math.prod(first))
    if op == "Where" and len(operands) == 2 and len(first) == len(operands[0]) == len(operands[1]):
        return [a if yes else b for yes, a, b in zip(first, *operands, strict=True)]
    return _pairwise(op, first, operands[0]) if len(operands) == 1 else None


def _rearranged(
    op: str, first: KnownValues, operands: Sequence[KnownValues], options: Mapping[str, Any], shape: Shape
) -> KnownValues | None:
    """Return the numbers of a small tensor after a transpose or slice, in row-major order.

    ``shape`` is that of the input.
    """
    if math.prod(shape) != len(first):
        return None
    table = np.array(first, dtype=object).reshape(shape)
    if op == "Transpose":
        axes = _permutation(options, len(shape))
        return None if axes is None else list(table.transpose(axes).ravel())
    starts, stops, *more = operands if len(operands) >= 2 else ([], [])
    axes = [int(axis) for axis in (more[0] if more else range(len(starts)))]
    steps = [int(step) for step in (more[1] if len(more) > 1 else [1] * len(starts))]
    if not (len(starts) == len(stops) == len(axes) == len(steps) and all(steps)):
        return None
    cuts = [slice(None)] * len(shape)
    for axis, start, stop, step in zip(axes, starts, stops, steps, strict=True):
        if not -len(shape) <= axis < len(shape):
            return None
        cuts[axis] = slice(int(start), int(stop), step)
    return list(table[tuple(cuts)].ravel())


#: Operators whose output has the shape of their first input, in any version of ONNX.
_SHAPE_PRESERVING = frozenset({
    "BatchNormalization", "Clip", "Dropout", "Elu", "Erf", "FastGelu", "Gelu", "GroupNormalization", "HardSigmoid",
    "HardSwish", "Identity", "InstanceNormalization", "LayerNormalization", "LeakyRelu", "LogSoftmax", "Mish",
    "QuickGelu", "RMSNormalization", "Relu", "Sigmoid", "SimplifiedLayerNormalization", "Softmax", "Softplus", "Sqrt",
    "Swish", "Tanh",
})  # fmt: skip
_BROADCAST = frozenset({"Add", "BiasGelu", "Div", "Mul", "Pow", "Sub", "Where", "Max", "Min"})


def shape_of_output(
    op: str, shapes: Sequence[Shape | None], options: Mapping[str, Any], numbers: Sequence[KnownValues | None]
) -> Shape | None:
    """Return the output shape of an ONNX node by Paleo's own rules; None for operators that have no rule.

    ``shapes`` are those of its inputs, and ``numbers`` the values of inputs that are known constants.

    >>> shape_of_output("Pad", [(2, 3), (4,)], {}, [None, [0, 1, 0, 1]])
    (2, 5)
    >>> shape_of_output("Reshape", [(2, 3, 4), (2,)], {}, [None, [0, -1]])
    (2, 12)
    """
    first = shapes[0] if shapes else None
    if first is None:
        return None
    if op in _SHAPE_PRESERVING:
        return first
    if op in _BROADCAST:
        return _broadcast(shapes)
    if op == "Transpose":
        axes = _permutation(options, len(first))
        return None if axes is None else tuple(first[axis] for axis in axes)
    if op == "MatMul" and len(first) > 1 and shapes[1] is not None and len(shapes[1]) > 1:
        lead = _broadcast([first[:-2], shapes[1][:-2]])
        return None if lead is None else (*lead, first[-2], shapes[1][-1])
    target = numbers[1] if len(numbers) > 1 else None
    if target is None:
        return None
    if op == "Reshape":
        sizes = [int(size) for size in target]
        if not bool(options.get("allowzero")):
            if any(size == 0 and place >= len(first) for place, size in enumerate(sizes)):
                return None
            sizes = [first[place] if size == 0 else size for place, size in enumerate(sizes)]
        stated, total = math.prod(size for size in sizes if size != -1), math.prod(first)
        if sizes.count(-1) == 1 and stated > 0 and total % stated == 0:
            sizes[sizes.index(-1)] = total // stated
        return tuple(sizes) if min(sizes, default=0) >= 0 and math.prod(sizes) == total else None
    return _padded(first, target, numbers[3] if len(numbers) > 3 else None) if op == "Pad" else None


def _permutation(options: Mapping[str, Any], rank: int) -> list[int] | None:
    """Return the axis order of an ONNX Transpose (by default the reverse), or None for an invalid order."""
    axes = list(options.get("perm") or range(rank)[::-1])
    return axes if sorted(axes) == list(range(rank)) else None


def _broadcast(shapes: Sequence[Shape | None]) -> Shape | None:
    known = [shape for shape in shapes if shape is not None]
    try:
        return np.broadcast_shapes(*known) if len(known) == len(shapes) else None
    except ValueError:
        return None


def _padded(shape: Shape, pads: KnownValues, axes: KnownValues | None) -> Shape | None:
    places = [int(axis) for axis in (range(len(shape)) if axes is None else axes)]
    if len(pads) != 2 * len(places) or not all(-len(shape) <= place < len(shape) for place in places):
        return None
    sizes = list(shape)
    for place, before, after in zip(places, pads, pads[len(places) :], strict=False):
        sizes[place] += int(before + after)
    return tuple(sizes) if min(sizes, default=1) > 0 else None


_TRUTHS: dict[str, Callable[[float, float], bool]] = {
    "Equal": operator.eq, "Less": operator.lt, "Greater": operator.gt,
    "And": lambda a, b: bool(a and b), "Or": lambda a, b: bool(a or b),
}  # fmt: skip


def _pairwise(op: str, left: KnownValues, right: KnownValues) -> KnownValues | None:
    """Compute element-wise arithmetic, where either operand may be a single number."""
    length = max(len(left), len(right))
    if {len(left), len(right)} - {1, length} or (op == "Div" and 0 in right):
        return None
    pairs = list(zip(left * (length // max(len(left), 1)), right * (length // max(len(right), 1)), strict=False))
    match op:
        case "Add":
            return [a + b for a, b in pairs]
        case "Sub":
            return [a - b for a, b in pairs]
        case "Mul":
            return [a * b for a, b in pairs]
        case "Mod":
            return [a % b for a, b in pairs] if 0 not in right else None
        case "Equal" | "Less" | "Greater" | "And" | "Or":
            return [int(_TRUTHS[op](a, b)) for a, b in pairs]
        case "Div":
            return [math.trunc(a / b) if isinstance(a, int) and isinstance(b, int) else a / b for a, b in pairs]
        case _:
            return None
