"""Named entries found by folder: a dict whose duplicate is an error and whose miss suggests near names."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from paleo.errors import SpecError, near

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Entries by name, registered by a decorator beside their code.

    The modules of ``package`` are imported at the first look-up, so a new file in that folder is all that a new
    entry needs.

    >>> shapes = Registry[type]("shape")
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes["square"].__name__
    'Square'
    """

    def __init__(self, kind: str, package: str | None = None) -> None:
        self.kind = kind
        self._package = package
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Entry], Entry]:
        def add(entry: Entry) -> Entry:
            if name in self._entries:
                raise SpecError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return add

    def _discover(self) -> None:
        if self._package is None:
            return
        package, self._package = importlib.import_module(self._package), None
        for module in sorted(info.name for info in pkgutil.iter_modules(package.__path__)):
            importlib.import_module(f"{package.__name__}.{module}")

    def __getitem__(self, name: str) -> Entry:
        self._discover()
        try:
            return self._entries[name]
        except KeyError:
            raise SpecError(f"unknown {self.kind} {name!r}; {near(name, self._entries)}") from None

    def __contains__(self, name: object) -> bool:
        self._discover()
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._entries))

    def __len__(self) -> int:
        self._discover()
        return len(self._entries)

    def items(self) -> list[tuple[str, Entry]]:
        """All entries, in the order of their names."""
        self._discover()
        return sorted(self._entries.items())
