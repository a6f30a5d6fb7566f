"""A model as readable YAML: short things on one line, lists of layers one entry a line, long texts folded."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from paleo.errors import SpecError
from paleo.specs.loading import MAX_FILE_BYTES, parse_yaml

WIDTH = 116
_PLAIN = re.compile(r"(=[A-Za-z0-9_(]|[A-Za-z_(])[A-Za-z0-9_./ +*()<>=-]*\Z")
_RESERVED = re.compile(r"(~|null|true|false|yes|no|on|off|nan|inf|infinity)\Z", re.IGNORECASE)
#: Keys whose values stay one entry a line, however short.
_TALL = frozenset({"layers", "branches", "blocks"})
#: Keys of the top level that hold prose.
_PROSE = frozenset({"notes"})


def to_yaml(model: Mapping[str, Any]) -> str:
    """The text of a model file; reading it gives ``model`` back.

    >>> print(to_yaml({"params": {"hidden": 8}, "layers": ["relu", {"linear": {"features": "=hidden"}}]}), end="")
    params: {hidden: 8}
    layers:
      - relu
      - linear: {features: =hidden}
    """
    lines: list[str] = []
    for key, value in model.items():
        if key in _PROSE and isinstance(value, str):
            lines += [f"{key}: >-", *textwrap.wrap(value, WIDTH - 2, initial_indent="  ", subsequent_indent="  ")]
        else:
            lines += _keyed(_scalar(key), value, 0, tall=key in _TALL or key == "inputs")
    text = "\n".join(lines) + "\n"
    if len(text) > MAX_FILE_BYTES:
        raise SpecError(
            f"the model has {len(text)} characters as YAML, more than {MAX_FILE_BYTES}; its blocks do not fold"
        )
    return text


def checked(model: Mapping[str, Any]) -> str:
    """The YAML text of a model, read back to prove that it says the same."""
    text = to_yaml(model)
    if _trimmed(parse_yaml(text, where="import")) != _trimmed(dict(model)):
        raise SpecError("the model cannot be written as YAML and read back; a name in it is too odd")
    return text


def _trimmed(model: dict[str, Any]) -> dict[str, Any]:
    return {key: " ".join(value.split()) if key in _PROSE else value for key, value in model.items()}


def _keyed(key: str, value: Any, indent: int, *, tall: bool = False) -> list[str]:
    """``key: value`` on one line if it fits, else the value below it."""
    pad = " " * indent
    if not isinstance(value, Mapping | list) or not value or not tall:
        line = f"{pad}{key}: {_flow(value)}"
        if len(line) <= WIDTH or not isinstance(value, Mapping | list) or not value:
            return [line.rstrip()]
    return [f"{pad}{key}:", *_below(value, indent + 2)]


def _below(value: Mapping[str, Any] | Sequence[Any], indent: int) -> list[str]:
    if isinstance(value, Mapping):
        return [line for key, entry in value.items() for line in _keyed(_scalar(key), entry, indent, tall=key in _TALL)]
    return [line for entry in value for line in _item(entry, indent)]


def _item(value: Any, indent: int) -> list[str]:
    """An entry of a list, after its dash."""
    pad = " " * indent
    line = f"{pad}- {_flow(value)}" if not _single(value) else f"{pad}- {_flow(value)[1:-1]}"
    loop = isinstance(value, Mapping) and "layers" in value
    if (len(line) <= WIDTH and not loop) or not isinstance(value, Mapping | list) or not value:
        return [line]
    first, *lines = _below(value, indent + 2)
    return [f"{pad}- {first.lstrip()}", *lines]


def _single(value: Any) -> bool:
    """Whether braces can be left out: a mapping of one key to a value that is not bare."""
    return isinstance(value, Mapping) and len(value) == 1 and next(iter(value.values())) is not None


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(entry)}".rstrip() for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(entry) for entry in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    if _PLAIN.match(text) and text == text.strip() and not _RESERVED.match(text):
        return text
    escaped = "".join(_escaped(char) for char in text)
    return f'"{escaped}"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\U{ord(char):08x}"
