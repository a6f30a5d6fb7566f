"""Spoils good inputs: data key by key, text and bytes place by place."""

from __future__ import annotations

import copy
import gzip
import random
import re
from typing import Any

#: Values that have broken programs: signs, sizes, units, formulas, paths, characters, nothing at all.
HOSTILE: tuple[Any, ...] = (
    None, True, False, "", " ", "x", "-", "=", "=1/0", "=round(5,-99999999)", "=9*9*9", "=seq", "=batch", "=(", "=a.b",
    "=min()", "=max(1,2", -1, 0, 1, 2, 3, 7, 2**31, 2**53 + 1, 10**17, 1e308, 1e-308, -0.0, 0.5, 1.5, "nan", ".inf",
    "-inf",
    "1e999", "9" * 400, "9" * 5000, "0" * 70 + "1 GB", "9e999999GB", "1e-300 GB/s", "1e30 h", "0 B", "1 B", "5 us",
    "900 GB/s", "80 GiB", "989 TFLOP/s", "400 W", "1 USD/h", "-5 us", "5", "GB/s", "1 GB/s/s", [], {}, [[]], [[[[]]]],
    {"a": {}},
    [None], [1, "2", []], {"": 1}, {"a b": 2}, "\0", "a\0b", "\x1b[31m", "\u202e", "é", "日本", "a" * 300, "(" * 60,
    "a.b.c[0]",
    "../..", "/", "/dev/zero", "/dev/null", "/dev/full", "./model.yaml", "nothing.yaml", "lenet", "dgx-a100-80gb",
    "resnet50",
    "*", "block.*", "[", "**", "batch", "tp", "dp", "zero=3", "tp=8,pp=8", "tp=2.4", "tp=0", "tp=-1",
    "tp=99999999999", "pp=3",
    "auto", "ideal", "ppp=0.6", "ppp=", "ppp=nan", "ppp=1e-300", "fp16", "bf16", "fp4", "int8", "required", "all",
    "none", "full",
    "2020-13-45", "1e9", "0x10", "1_000", "on", "yes", "12:30", "~", "!!python/object", "&a", "*a", "%", "{{}}",
    "${HOME}",
)  # fmt: skip
#: Pieces of text that are put into files.
FRAGMENTS = (
    "\0", "\t", "\n", "\r\n", "\ufeff", ": ", "- ", "{", "}", "[", "]", "&a ", "*a", "!!int ", "---\n", "...\n", "# ",
    "'", '"', "|\n",
    ">\n", "? ", "<<: ", "9" * 4400, "1e999", ",", ",,,", '"\n', "=cmd|'/C calc'!A0", "\u2028", "\ud7ff", "é", "nan",
    "inf", "-1", "0",
)  # fmt: skip


def mutated(data: Any, rng: random.Random) -> Any:
    """A copy of data with one to four changes."""
    data = copy.deepcopy(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        data = _changed(data, rng)
    return data


def _changed(data: Any, rng: random.Random) -> Any:
    owners = [node for node in _nodes(data) if node]
    if not owners or rng.random() < 0.01:
        return _hostile(rng)
    owner = rng.choice(owners)
    key = rng.choice(list(owner)) if isinstance(owner, dict) else rng.randrange(len(owner))
    action = rng.randrange(13)
    if action == 0:
        del owner[key]
    elif action == 1 and isinstance(owner, dict):
        owner[_misspelt(str(key), rng)] = owner.pop(key)
    elif action == 2 and isinstance(owner, dict):
        owner[rng.choice(("extend", "name", "path", "notes", "x", "", "repeat", "source"))] = _hostile(rng)
    elif action == 3:
        other = rng.choice(owners)
        part = rng.choice(list(other.values()) if isinstance(other, dict) else other)
        owner[key] = copy.deepcopy(part)
    elif action in (4, 10, 11) and isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
        owner[key] = _other_number(owner[key], rng)
    elif action in (10, 11, 12) and isinstance(owner[key], str):
        owner[key] = _NUMBERS.sub(lambda match: _other_digits(match[0], rng), owner[key])
    elif action == 5 and isinstance(owner[key], str):
        owner[key] = text_mutated(owner[key], rng)
    elif action == 6 and isinstance(owner, list):
        owner.insert(key, copy.deepcopy(owner[key]))
    else:
        owner[key] = _hostile(rng)
    return data


def _hostile(rng: random.Random) -> Any:
    """A copy: a later change of the data must not change the list of values, nor put one into itself."""
    return copy.deepcopy(rng.choice(HOSTILE))


_NUMBERS = re.compile(r"\d{1,30}(?:\.\d{1,30})?")


def _other_number(number: float, rng: random.Random) -> float:
    """A number that might stand there, or might not."""
    if isinstance(number, int):
        return rng.choice((number + 1, number - 1, 2 * number, number // 2, 1, 3, -number, 10**6, 10**12, 10**17))
    return rng.choice((0.5, 2.0, 3.0, 0.1, 10.0, 1e6, 1e12, 1e-9, 1e-3, -1.0, 0.0)) * number


def _other_digits(digits: str, rng: random.Random) -> str:
    number = float(digits) if "." in digits else int(digits)
    return str(_other_number(number, rng))


def _nodes(data: Any) -> list[Any]:
    if isinstance(data, dict):
        return [data, *(node for value in data.values() for node in _nodes(value))]
    if isinstance(data, list):
        return [data, *(node for value in data for node in _nodes(value))]
    return []


def _misspelt(key: str, rng: random.Random) -> str:
    place = rng.randrange(len(key) + 1)
    return key[:place] + rng.choice(("", "x", "_", " ", "é")) + key[place + 1 :]


def text_mutated(text: str, rng: random.Random) -> str:
    """Text with a piece put in, taken out, repeated or replaced."""
    place, length = rng.randrange(len(text) + 1), rng.choice((0, 1, 1, 2, 8, 40))
    piece = rng.choice(
        (*FRAGMENTS, *(value for value in HOSTILE if isinstance(value, str)), text[place : place + 30] * 3)
    )
    return text[:place] + (piece if rng.random() < 0.7 else "") + text[place + length :]


def bytes_mutated(content: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, repeated, or packed as something that they are not."""
    action = rng.randrange(8)
    if action == 0:
        return content[: rng.randrange(len(content) + 1)]
    if action == 1:
        return gzip.compress(content, mtime=0)
    if action == 2:
        return gzip.compress(content, mtime=0)[: rng.randrange(20, 60)]
    if action == 3:
        return rng.randbytes(rng.randrange(200))
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        if changed:
            changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)
