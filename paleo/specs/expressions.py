"""Arithmetic in model files: a text that starts with ``=`` is worked out from the model's parameters, nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from paleo.errors import SpecError, near

Number = int | float | bool

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LONGEST, _LARGEST, _DIGITS = 200, 10.0**15, 15


def _rounded(number: float, digits: int = 0) -> Number:
    """``round``, which for a far number of digits works out powers of ten without end."""
    if abs(digits) > _DIGITS:
        raise SpecError(f"round(…, {digits}): expected at most {_DIGITS} digits")
    return round(number, digits) if digits else round(number)


_FUNCTIONS: dict[str, Callable[..., Number]] = {"min": min, "max": max, "ceil": math.ceil, "round": _rounded}


def evaluate(text: str, names: Mapping[str, Any]) -> Any:
    """The value of ``=expression``: + - * / // % comparisons, min, max, ceil, round over named numbers.

    A bare name may stand for text too. Raises SpecError with the near names for an unknown one.

    >>> evaluate("=4 * hidden // 2", {"hidden": 768})
    1536
    """
    source = text.removeprefix("=").strip()
    if len(source) > _LONGEST:
        raise SpecError(f"expression of {len(source)} characters; expected at most {_LONGEST}")
    try:
        tree = ast.parse(source, mode="eval").body
        value = _value(tree, names)
    except (SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"{text!r} is not an arithmetic expression") from None
    except ZeroDivisionError:
        raise SpecError(f"{text!r} divides by zero") from None
    if isinstance(value, int | float) and not abs(value) < _LARGEST:
        raise SpecError(f"{text!r} is far beyond any size")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return node.value
        case ast.Name(id=name):
            if name not in names:
                raise SpecError(f"unknown name {name!r} in an expression; {near(name, names)}")
            return names[name]
        case ast.BinOp(op=op) if type(op) in _BINARY:
            left, right = _number(node.left, names), _number(node.right, names)
            return _BINARY[type(op)](left, right)
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand, names)
        case ast.Compare(ops=[op]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](_value(node.left, names), _value(node.comparators[0], names))
        case ast.Call(func=ast.Name(id=name), keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_number(argument, names) for argument in node.args))
    allowed = "numbers, names, + - * / // %, min, max, ceil, round"
    raise SpecError(f"{ast.unparse(node)!r} is not allowed in an expression; use {allowed}")


def _number(node: ast.expr, names: Mapping[str, Any]) -> Any:
    value = _value(node, names)
    if not isinstance(value, int | float):
        raise SpecError(f"{ast.unparse(node)!r} is {value!r}, not a number")
    if not abs(value) < _LARGEST:
        raise SpecError(f"{ast.unparse(node)!r} is far beyond any size")
    return value
