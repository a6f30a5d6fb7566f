"""Arithmetic in model files: a text that starts with ``=`` is worked out from the model's parameters, nothing else.

Which files a spec was read from, and whether they still say the same: caches go by content, not by name.
"""

from __future__ import annotations

import ast
import hashlib
import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Generic, TypeVar

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


Value = TypeVar("Value")
#: Entries of one cache: a study's models and systems, many times over.
MOST_ENTRIES = 512

_LEDGERS: ContextVar[tuple[dict[str, str], ...]] = ContextVar("ledgers", default=())


def digest(content: bytes) -> str:
    """What tells two contents apart."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def record(path: str | Path, content: bytes) -> None:
    """Enter a file that was just read in every open ledger."""
    if ledgers := _LEDGERS.get():
        _enter(ledgers, {os.path.realpath(path): digest(content)})


def _enter(ledgers: tuple[dict[str, str], ...], digests: Mapping[str, str]) -> None:
    for ledger in ledgers:
        ledger.update(digests)


@contextmanager
def recorded() -> Iterator[dict[str, str]]:
    """A ledger of the files that are read in this block: real path -> digest of the content."""
    ledger: dict[str, str] = {}
    token = _LEDGERS.set((*_LEDGERS.get(), ledger))
    try:
        yield ledger
    finally:
        _LEDGERS.reset(token)


def changed_files(digests: Mapping[str, str]) -> list[str]:
    """Files of a ledger that have gone or say something else now."""
    return [path for path, known in digests.items() if _digest_of(path) != known]


def _digest_of(path: str) -> str | None:
    try:
        return digest(Path(path).read_bytes())
    except OSError:
        return None


class FileCache(Generic[Value]):
    """Loads what a name or a path means once, and again as soon as one of the files that it was read from changes."""

    def __init__(self, load: Callable[[str | Path], Value]) -> None:
        self._load = load
        self._entries: dict[tuple[str, str], tuple[Value, dict[str, str]]] = {}

    def __call__(self, name_or_path: str | Path) -> Value:
        """The entry; errors of loading are raised each time anew."""
        key = (os.getcwd(), str(name_or_path))  # noqa: PTH109 (called for each prediction)
        value, digests = self._entries.get(key) or self._loaded(key, name_or_path)
        if changed_files(digests):
            value, digests = self._loaded(key, name_or_path)
        _enter(_LEDGERS.get(), digests)
        return value

    def _loaded(self, key: tuple[str, str], name_or_path: str | Path) -> tuple[Value, dict[str, str]]:
        with recorded() as digests:
            value = self._load(name_or_path)
        if len(self._entries) >= MOST_ENTRIES:
            self._entries = {}
        self._entries[key] = value, digests
        return value, digests
