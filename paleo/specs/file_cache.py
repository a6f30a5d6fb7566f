"""Which files a spec was read from, and whether they still say the same: caches go by content, not by name."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Generic, TypeVar

Value = TypeVar("Value")
#: Entries of one cache: a study's models and systems, many times over.
MOST_ENTRIES = 512

_LEDGERS: ContextVar[tuple[dict[str, str], ...]] = ContextVar("ledgers", default=())


def digest(content: bytes) -> str:
    """BLAKE2b digest of 128 bits of a file's content, in hexadecimal digits."""
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
    """Files of a ledger that were deleted or whose content has changed since."""
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
