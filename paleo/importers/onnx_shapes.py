"""Sizes of ONNX tensors: what a file computes of shapes, and rules where ONNX's own inference has none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from paleo.importers.trace import Shape

#: Constants up to so many elements keep their numbers: the shapes that reshapes ask for.
SMALL = 64
#: Numbers of element types: floating point, and whole numbers that shapes are made of.
FLOATS = frozenset({1, 10, 11, 16, 17, 18, 19, 20})
WHOLE, SINGLE = frozenset({6, 7}), frozenset({1})

Numbers = list[float]


def shape_arithmetic(
    op: str,
    inputs: Sequence[str],
    options: Mapping[str, Any],
    known: Mapping[str, Numbers],
    sizes: Mapping[str, Shape],
) -> Numbers | None:
    """The few numbers that a node makes of shapes and other known numbers, flat; None for what is no such arithmetic.

    >>> shape_arithmetic("Shape", ["x"], {}, {}, {"x": (2, 3)})
    [2, 3]
    >>> shape_arithmetic("Mul", ["a", "b"], {}, {"a": [2, 3], "b": [4]}, {})
    [8, 12]
    """
    if op == "Shape":
        shape = sizes.get(inputs[0]) if inputs else None
        return None if shape is None else list[float](shape[options.get("start", 0) or 0 : options.get("end")])
    values = [known.get(name) for name in inputs if name]
    if not values or any(value is None for value in values):
        return None
    first, *rest = [value for value in values if value is not None]
    if op == "Cast" and options.get("to") in WHOLE:
        return [int(number) for number in first]
    if op in ("Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape", "Flatten"):
        return first
    if op == "Concat":
        return [number for value in (first, *rest) for number in value]
    if op == "Gather" and len(rest) == 1 and first:
        inside = all(-len(first) <= place < len(first) for place in rest[0])
        return [first[int(place)] for place in rest[0]] if inside else None
    if op == "Slice" and len(rest) in (2, 3, 4) and all(len(numbers) == 1 for numbers in rest):
        start, stop, step = (int(numbers[0]) for numbers in (rest[0], rest[1], rest[3] if len(rest) == 4 else [1]))
        return first[start:stop:step] if step else None
    if op == "ConstantOfShape" and all(number >= 0 for number in first) and math.prod(first) <= SMALL:
        return [int(options.get("value") or 0)] * int(math.prod(first))
    if op == "Where" and len(rest) == 2 and len(first) == len(rest[0]) == len(rest[1]):
        return [a if yes else b for yes, a, b in zip(first, *rest, strict=True)]
    return _pairwise(op, first, rest[0]) if len(rest) == 1 else None


def _pairwise(op: str, left: Numbers, right: Numbers) -> Numbers | None:
    """Element-wise arithmetic, a single number against all of the other."""
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
        case "Equal":
            return [int(a == b) for a, b in pairs]
        case "Div":
            return [math.trunc(a / b) if isinstance(a, int) and isinstance(b, int) else a / b for a, b in pairs]
        case _:
            return None
