"""Registries of named entries (schedules, collectives, launchers, …) that the modules of a folder add.

An unknown name raises an error that suggests similar names. A name that is registered twice is an error.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from paleo.errors import SpecError, suggest_names

Entry = TypeVar("Entry")


class Registry(Generic[Entry]):
    """Mapping from names to entries; a decorator beside the code of an entry registers it.

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
        self._complete = package is None
        self._lock = threading.Lock()
        self._importing = threading.local()

    def register(self, name: str) -> Callable[[Entry], Entry]:
        """Return a decorator that registers a class, function or other object under a name.

        Parameters
        ----------
        name : str
            Name of the entry.

        Returns
        -------
        Callable[[Entry], Entry]
            The decorator; it returns the object itself.

        Raises
        ------
        SpecError
            If the name is taken.
        """

        def add(entry: Entry) -> Entry:
            with self._lock:
                if name in self._entries:
                    remedy = "a session keeps the first, so restart it (a notebook's kernel) or choose another name"
                    raise SpecError(f"{self.kind} {name!r} is registered twice; {remedy}")
                # a new dict, as others may be iterating over the old one
                self._entries = {**self._entries, name: entry}
            return entry

        return add

    def _loaded(self) -> dict[str, Entry]:
        """Return all entries; the modules of the package are imported first if that is not done yet."""
        if not self._complete and not getattr(self._importing, "now", False):
            self._importing.now = True
            try:  # if several threads ask at once, one imports a module and the others wait
                folder = getattr(importlib.import_module(str(self._package)), "__path__", ())  # a module has none
                for module in sorted(info.name for info in pkgutil.iter_modules(folder)):
                    importlib.import_module(f"{self._package}.{module}")
            finally:
                self._importing.now = False
            self._complete = True
        return self._entries

    def __getitem__(self, name: str) -> Entry:
        entries = self._entries if self._complete else self._loaded()
        try:
            return entries[name]
        except KeyError:
            raise SpecError(f"unknown {self.kind} {name!r}; {suggest_names(name, entries)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._loaded()

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._loaded()))

    def __len__(self) -> int:
        return len(self._loaded())

    def items(self) -> list[tuple[str, Entry]]:
        """Return all entries in the order of their names."""
        return sorted(self._loaded().items())
