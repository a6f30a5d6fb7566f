"""Loading of YAML files as validated objects, with one clear message for the first mistake.

Spec files are written by people, so only a small part of YAML is allowed: one document, a mapping, UTF-8, no anchors,
no tags, no repeated key. Plain scalars follow the YAML 1.2 core schema: ``on``, ``yes`` and ``12:30`` are text and
``1e9`` is a number. ``.nan``, ``.inf`` and numbers beyond a double are refused. Keys are always text. In model files a
text that starts with ``=`` is arithmetic on the model's parameters.

Loaded specs are cached by the content of their files, not by their names.
"""

from __future__ import annotations

import ast
import hashlib
import math
import operator
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paleo.docstrings import split_parameters_section
from paleo.errors import SpecError, suggest_names

CachedValue = TypeVar("CachedValue")
Arguments = ParamSpec("Arguments")
ReturnValue = TypeVar("ReturnValue")
#: Most entries of one cache: many more than the models and systems of a study.
_MAX_CACHE_ENTRIES = 512

_LEDGERS: ContextVar[tuple[dict[str, str], ...]] = ContextVar("ledgers", default=())


def file_digest(content: bytes) -> str:
    """Return the BLAKE2b digest (128 bits) of a file's content in hexadecimal digits.

    Parameters
    ----------
    content : bytes
        Content of the file.

    Returns
    -------
    str
        Digest of 32 hexadecimal digits.
    """
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def record_file_digest(path: str | Path, content: bytes) -> None:
    """Record the digest of a file that was just read, for cache invalidation (see `record_read_files`).

    Parameters
    ----------
    path : str | Path
        Path of the file.
    content : bytes
        Content of the file.
    """
    if ledgers := _LEDGERS.get():
        _enter(ledgers, {os.path.realpath(path): file_digest(content)})


def _enter(ledgers: tuple[dict[str, str], ...], digests: Mapping[str, str]) -> None:
    for ledger in ledgers:
        ledger.update(digests)


@contextmanager
def record_read_files() -> Iterator[dict[str, str]]:
    """Record which files are read inside a ``with`` block; yield a dict of content digests by real path."""
    ledger: dict[str, str] = {}
    token = _LEDGERS.set((*_LEDGERS.get(), ledger))
    try:
        yield ledger
    finally:
        _LEDGERS.reset(token)


def changed_files(digests: Mapping[str, str]) -> list[str]:
    """List the recorded files that were deleted or changed since they were read.

    Parameters
    ----------
    digests : dict of str to str
        Digests by path, from `record_read_files`.

    Returns
    -------
    list of str
        Paths of these files.
    """
    return [path for path, known in digests.items() if _digest_of(path) != known]


def _digest_of(path: str) -> str | None:
    try:
        return file_digest(Path(path).read_bytes())
    except OSError:
        return None


def cache_by_files(load: Callable[[str | Path], CachedValue]) -> Callable[[str | Path], CachedValue]:
    """Decorate the loader of a spec, so that a spec is loaded again only after one of its files has changed.

    Parameters
    ----------
    load : callable
        Loader of a spec by catalog name or path.

    Returns
    -------
    callable
        Loader that remembers specs by name; errors are not remembered.
    """
    entries: dict[tuple[str, str | Path], tuple[CachedValue, dict[str, str]]] = {}

    def loaded(key: tuple[str, str | Path]) -> tuple[CachedValue, dict[str, str]]:
        with record_read_files() as digests:
            value = load(key[1])
        if len(entries) >= _MAX_CACHE_ENTRIES:
            entries.clear()
        entries[key] = value, digests
        return value, digests

    @wraps(load)
    def cached(name_or_path: str | Path) -> CachedValue:
        if not isinstance(name_or_path, str | Path):
            raise SpecError(f"{name_or_path!r:.80}: expected a name of the catalog or a path")
        key = (os.getcwd(), name_or_path)  # noqa: PTH109 (called for each prediction)
        value, digests = entries.get(key) or loaded(key)
        if changed_files(digests):
            value, digests = loaded(key)
        _enter(_LEDGERS.get(), digests)
        return value

    return cached


#: Limits on a spec file: far above what people write, and low enough that reading a file never takes long.
MAX_FILE_BYTES = 4_000_000
_MAX_YAML_NODES = 250_000
_MAX_YAML_DEPTH = 32
_MAX_MESSAGE_LENGTH = 600

#: Largest number below which all whole numbers are exact as floats.
MAX_EXACT_INTEGER = 2**53
#: Smallest and largest magnitude of a number without a unit; zero is allowed too.
_LEAST, _MOST = 2.0**-80, 2.0**60
PositiveCount = Annotated[int, Field(strict=True, gt=0, le=MAX_EXACT_INTEGER)]
NonEmptyText = Annotated[str, Field(strict=True, min_length=1)]
StrictBool = Annotated[bool, Field(strict=True)]
Year = Annotated[int, Field(strict=True, ge=1990, le=2100)]
#: Default source in a user's own file. Entries of the catalog always state their sources.
UNKNOWN_SOURCE = "not stated"

_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INTEGER = re.compile(r"[-+]?[0-9]{1,18}\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_NOT_FINITE = re.compile(r"[-+]?\.?(nan|inf|infinity)\Z", re.IGNORECASE)
_WORDS = {None: ("~", "null", "Null", "NULL"), True: ("true", "True", "TRUE"), False: ("false", "False", "FALSE")}
_CONSTANTS = {word: value for value, words in _WORDS.items() for word in words}

#: Part of pydantic's messages about Python objects, which a file cannot contain.
_INSTANCE = re.compile(r" or instance of \w+")
_WORDING = {
    "Input should": "it should",
    "valid dictionary": "mapping of `key: value` lines",
    "valid tuple": "list",
    "valid list": "list",
    "valid string": "text",
    "valid integer": "whole number",
    "a valid boolean": "true or false",
}


class Spec(BaseModel):
    """Base class of all schemas read from YAML files. Instances are frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    if not TYPE_CHECKING:  # type checkers use the fields instead

        def __init__(self, **data: Any) -> None:
            """Build a spec from keyword arguments; raise SpecError, as for a file, if they are invalid."""
            stated = to_python_numbers(data)
            try:
                super().__init__(**stated)
            except ValidationError as error:
                raise SpecError(_first_problem(type(self), stated, type(self).__name__, error)) from None

        __init__.__pydantic_base_init__ = True  # files are validated elsewhere, with the file name in messages

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with some fields changed; pydantic alone would keep the value of a misspelt field."""
        if unknown := {*(update or {})} - {*type(self).model_fields}:
            raise AttributeError(f"{type(self).__name__} has no fields {sorted(unknown)}")
        return super().model_copy(update=update, deep=deep)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Move the docstring's ``Parameters`` section to the descriptions of the fields, for schema tables."""
        cls.__doc__, meanings = split_parameters_section(cls.__doc__)
        for name, meaning in meanings.items():
            cls.model_fields[name].description = meaning.text

    @classmethod
    def extra_keys(cls) -> Sequence[str]:
        """Return keys that a YAML file may have in addition to the names of the fields; none by default.

        Returns
        -------
        sequence of str
            Additional keys; none by default.
        """
        return ()

    def __hash__(self) -> int:
        """Hash the fields that are texts or numbers; other fields are ignored, because mappings have no hash."""
        fields = (value for value in self.__dict__.values() if isinstance(value, str | int | float | None))
        return hash((type(self), *fields))


def to_python_numbers(value: Any) -> Any:
    """Convert numpy numbers, texts and arrays to Python's, inside mappings and lists too.

    Parameters
    ----------
    value : Any
        Value that a caller passes as a field of a spec.

    Returns
    -------
    Any
        Same structure with Python's numbers, texts and lists.

    Examples
    --------
    >>> import numpy as np
    >>> to_python_numbers({"gpus": np.int64(8), "model": {"seq": np.int32(512)}})
    {'gpus': 8, 'model': {'seq': 512}}
    """
    if isinstance(value, Mapping):
        return {key: to_python_numbers(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(to_python_numbers, value)) if type(value) in (list, tuple) else value
    plain = type(value).__module__ == "numpy" and getattr(getattr(value, "dtype", None), "kind", "") in "biufcU"
    return value.tolist() if plain and hasattr(value, "tolist") else value


def convert_numpy_arguments(function: Callable[Arguments, ReturnValue]) -> Callable[Arguments, ReturnValue]:
    """Wrap a function so that numpy numbers in its arguments are converted to Python numbers.

    Parameters
    ----------
    function : callable
        Function of the public Python interface.

    Returns
    -------
    callable
        Wrapped function with the same signature.
    """

    @wraps(function)
    def called(*args: Arguments.args, **kwargs: Arguments.kwargs) -> ReturnValue:
        plain = {name: to_python_numbers(value) for name, value in kwargs.items()}
        return function(*map(to_python_numbers, args), **plain)

    return called


Model = TypeVar("Model", bound=BaseModel)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that contains one mapping, within the limits on size and syntax.

    Parameters
    ----------
    path : str | Path
        Path of the file.

    Returns
    -------
    dict of str to Any
        Keys and values of the file.

    Raises
    ------
    SpecError
        If the file cannot be read or contains anything but a mapping; the message names file and line.
    """
    return parse_yaml(_read_text(path), where=path)


def parse_yaml(text: str, *, where: str | Path) -> dict[str, Any]:
    r"""Parse a YAML text that contains one mapping.

    Parameters
    ----------
    text : str
        YAML text.
    where : str | Path
        Name of the text in error messages.

    Returns
    -------
    dict of str to Any
        Keys and values of the text.

    Raises
    ------
    SpecError
        If the text is not a YAML mapping.

    Examples
    --------
    >>> parse_yaml("ranks: 8\nlatency: 5 us\nfast: on", where="example")
    {'ranks': 8, 'latency': '5 us', 'fast': 'on'}
    """
    try:
        data = _Builder(str(where)).build(text)
    except yaml.YAMLError as error:
        raise SpecError(_capped(f"{where}: {_yaml_problem(error)}")) from None
    except UnicodeEncodeError:
        raise SpecError(f"{where}: is not Unicode text; expected YAML") from None
    if not isinstance(data, dict):
        content = "nothing" if data is None else f"a {type(data).__name__}"
        raise SpecError(f"{where}: holds {content}; expected a mapping of `key: value` lines")
    return data


def _read_text(path: str | Path) -> str:
    try:
        path = Path(path)
        if not stat.S_ISREG(path.stat().st_mode):
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise SpecError(_capped(f"{path}: is {kind}; expected a YAML file"))
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except SpecError:
        raise
    except FileNotFoundError:
        raise SpecError(_capped(f"{path}: no such file; expected a YAML file")) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{_shown(str(path))}: cannot be read ({reason})") from None
    record_file_digest(path, raw)
    if len(raw) > MAX_FILE_BYTES:
        raise SpecError(f"{path}: is larger than {MAX_FILE_BYTES} bytes; a spec is a page or two of YAML")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: byte {error.start} is not UTF-8 text; expected a YAML file") from None
    if not text.strip():
        raise SpecError(f"{path}: is empty; expected a mapping of `key: value` lines")
    return text


def _yaml_problem(error: Any) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"line {mark.line + 1}: " if mark is not None else ""
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
    if "nesting depth" in problem:  # newer releases of the parser stop before `_MAX_YAML_DEPTH` is checked
        return f"{place}nested deeper than {_MAX_YAML_DEPTH} levels"
    return f"{place}not valid YAML: {problem}"


class _Builder:
    """Parser of a restricted YAML that builds values from events, and checks every limit before memory grows."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._nodes = 0
        self._parser: Any = None

    def build(self, text: str) -> Any:
        """Parse a YAML text into mappings, lists and scalars, within the limits on size and depth.

        Parameters
        ----------
        text : str
            Text of the file.

        Returns
        -------
        object
            Value of the document: mappings, lists and scalars.
        """
        self._parser = _PARSER(text)
        try:
            return self._document()
        finally:
            self._parser.dispose()

    def _document(self) -> Any:
        self._parser.get_event()
        if self._parser.check_event(yaml.StreamEndEvent):
            return None
        self._parser.get_event()
        value = self._value(self._next(), depth=0)
        self._parser.get_event()
        if not self._parser.check_event(yaml.StreamEndEvent):
            raise self._error(self._parser.peek_event(), "a second YAML document starts here; a file may have only one")
        return value

    def _next(self) -> Any:
        event = self._parser.get_event()
        self._nodes += 1
        if self._nodes > _MAX_YAML_NODES:
            raise self._error(event, f"more than {_MAX_YAML_NODES} values; a spec is a page or two of YAML")
        if getattr(event, "anchor", None) is not None:
            raise self._error(event, f"anchors and aliases ({event.anchor!r}) are not allowed; write the value out")
        if getattr(event, "tag", None) not in (None, "!"):
            raise self._error(event, f"tags ({event.tag!r}) are not allowed; write plain values")
        return event

    def _value(self, event: Any, depth: int) -> Any:
        if depth > _MAX_YAML_DEPTH:
            raise self._error(event, f"nested deeper than {_MAX_YAML_DEPTH} levels")
        if isinstance(event, yaml.ScalarEvent):
            return event.value if event.style else self._plain(event)
        return self._mapping(depth) if isinstance(event, yaml.MappingStartEvent) else self._sequence(depth)

    def _sequence(self, depth: int) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := self._next(), yaml.SequenceEndEvent):
            values.append(self._value(event, depth + 1))
        return values

    def _mapping(self, depth: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        while not isinstance(event := self._next(), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or not event.value:
                raise self._error(event, "a key must be a plain word")
            key, line = event.value, _line(event)
            if key in values:
                raise self._error(event, f"key {_shown(key)} is repeated (first on line {lines[key]}); keep one")
            lines[key] = line
            values[key] = self._value(self._next(), depth + 1)
        return values

    def _plain(self, event: Any) -> Any:
        text = event.value
        if not text:
            return None
        if _INTEGER.match(text):
            return int(text)
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        number = float(text) if len(text) < 64 and _FLOAT.match(text) else None
        if _NOT_FINITE.match(text) or (number is not None and not math.isfinite(number)):
            raise self._error(event, f"{text!r} is not a finite number")
        return text if number is None else number

    def _error(self, event: Any, problem: str) -> SpecError:
        return SpecError(_capped(f"{self._where}: line {_line(event)}: {problem}"))


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def validate_mapping(model: type[Model], data: object, where: str | Path) -> Model:
    """Validate a mapping against a schema and build the object; report the first error in one clear message.

    A misspelt key is reported, with the nearest valid key, before the keys that are missing because of it.

    Parameters
    ----------
    model : type[Model]
        Schema (pydantic model class).
    data : object
        Mapping from a file or a caller.
    where : str | Path
        File name for error messages.

    Returns
    -------
    Model
        Validated instance of `model`.

    Raises
    ------
    SpecError
        If the mapping is invalid; the message has file, key, value and what was expected.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"{where}: expected a mapping of `key: value` lines, not {_shown(data)}")
    _refuse_not_finite(data, where, ())
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise SpecError(_first_problem(model, data, where, error)) from None


def path_in_folder(folder: Path, name: str) -> Path:
    """Resolve a path that one file names relative to its folder; the target must lie in this folder or below.

    Parameters
    ----------
    folder : Path
        Folder of the file that contains the path.
    name : str
        Relative path as written in the file.

    Returns
    -------
    Path
        ``folder`` joined with ``name``.

    Raises
    ------
    SpecError
        If the target lies elsewhere, because a file from another person must not read other files of this machine.
    """
    root, place = (os.path.abspath(path) for path in (folder, folder / name))  # noqa: PTH100 (keeps symbolic links)
    if os.path.commonpath([root, place]) != root:
        raise SpecError(f"{name[:200]!r} lies outside the folder of the file that names it; move it there, or below")
    return folder / name


def add_path_key(data: Mapping[str, Any], file: str | Path, path: str) -> dict[str, Any]:
    """Add key ``path`` to the mapping of a file, so that later messages and commands can name the file.

    Parameters
    ----------
    data : dict of str to Any
        Mapping of the file.
    file : str | Path
        File name for error messages.
    path : str
        Path to add.

    Returns
    -------
    dict of str to Any
        Copy of the mapping with the key ``path``.

    Raises
    ------
    SpecError
        If the file itself has a key ``path``.
    """
    if "path" in data:
        raise SpecError(f"{file}: path: unknown key")
    return {**data, "path": path}


def _first_problem(model: type[BaseModel], data: object, where: str | Path, error: ValidationError) -> str:
    """Return an error message for the first validation error, with the number of further errors."""
    errors, data = error.errors(include_url=False), _nested(data)
    depth = {id(error): len(_path_in_data(data, error["loc"], error["type"])) for error in errors}
    first = min(errors, key=lambda error: (error["type"] != "extra_forbidden", -depth[id(error)]))
    if first["type"] == "missing":
        return _capped(f"{where}: {_all_missing(data, errors)}")
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return _capped(f"{where}: {_explained(model, data, first)}", more)


def _all_missing(data: object, errors: Sequence[Any]) -> str:
    """Return one error message for all missing keys, with the number of other errors."""
    missing = [error for error in errors if error["type"] == "missing"]
    keys = list(dict.fromkeys(_dotted(_path_in_data(data, error["loc"], "missing")) for error in missing))
    other_errors = len(errors) - len(missing)
    more = f" (and {other_errors} more)" if other_errors else ""
    return f"{', '.join(keys)}: {'this key is' if len(keys) == 1 else 'these keys are'} missing{more}"


def _refuse_not_finite(value: object, where: str | Path, path: tuple[str | int, ...]) -> None:
    if isinstance(value, Mapping):
        for key, item in value.items():
            _refuse_not_finite(item, where, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_not_finite(item, where, (*path, index))
    elif (isinstance(value, float) and not math.isfinite(value)) or (
        isinstance(value, str) and _NOT_FINITE.match(value.strip())
    ):
        raise SpecError(_capped(f"{where}: {_dotted(path)}: {value!r} is not a finite value"))
    elif isinstance(value, float) and value != 0 and not _LEAST <= abs(value) <= _MOST:
        expected = f"expected 0, or {_LEAST:.0e} to {_MOST:.0e}"
        raise SpecError(_capped(f"{where}: {_dotted(path)}: {_shown(value)}: {expected}"))


def _explained(model: type[BaseModel], data: object, error: Any) -> str:
    """Return an error message for one of pydantic's validation errors: key, value, and what was expected."""
    kind, value = error["type"], error["input"]
    path = _path_in_data(data, error["loc"], kind) or error["loc"][:1]
    key = _dotted(path)
    if kind == "extra_forbidden":
        *outer, misspelt = path
        nearest = suggest_names(str(misspelt), _keys_at(model, tuple(outer)), within=_dotted(tuple(outer)))
        return f"{key}: unknown key; {nearest}"
    if kind == "missing":
        return f"{key}: this key is missing"
    cause = error.get("ctx", {}).get("error")
    prefix = f"{key}: " if key else ""
    return prefix + (str(cause) if cause is not None else f"{_shown(value)}: {_plainly(error['msg'])}")


def _plainly(message: str) -> str:
    """Rewrite a pydantic error message in terms of YAML instead of Python."""
    message = _INSTANCE.sub("", message)
    for pattern, wording in _WORDING.items():
        message = message.replace(pattern, wording)
    return message[:1].lower() + message[1:]


def _nested(data: object) -> object:
    """Replace dotted keys (``recompute.layers``) by nested mappings, which pydantic's error locations refer to."""
    if not isinstance(data, Mapping):
        return data
    groups: dict[str, Any] = {key: value for key, value in data.items() if "." not in str(key)}
    for key, value in data.items():
        group, dot, field = str(key).partition(".")
        if dot and isinstance(of := groups.setdefault(group, {}), dict):
            of.setdefault(field, value)
    return groups


def _path_in_data(data: object, location: tuple[str | int, ...], kind: str) -> tuple[str | int, ...]:
    """Return the location of a pydantic error as keys of the file, without the names of union members."""
    path: list[str | int] = []
    for index, part in enumerate(location):
        try:
            data = data[part]  # type: ignore[index]
        except (LookupError, TypeError):
            if not (kind == "missing" and index == len(location) - 1):
                continue
        path.append(part)
    return tuple(path)


def _keys_at(model: type[BaseModel], path: tuple[str | int, ...]) -> set[str]:
    """Return the keys that a schema allows at a path of nested keys, over all members of a union."""
    models = [model]
    for part in path:
        fields = [owner.model_fields[str(part)] for owner in models if str(part) in owner.model_fields]
        models = [nested for field in fields for nested in _models_in(field.annotation)] or models
    names = {field.alias or name for owner in models for name, field in owner.model_fields.items()}
    return names.union(*(owner.extra_keys() for owner in models if issubclass(owner, Spec)))


def _models_in(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [nested for argument in get_args(annotation) for nested in _models_in(argument)]


def _dotted(path: tuple[str | int, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    return text if len(text) <= 120 else text[:117] + "..."


def _shown(value: object) -> str:
    if isinstance(value, Mapping | list | tuple):
        return f"a {'mapping' if isinstance(value, Mapping) else 'list'}"
    text = repr(value if not isinstance(value, str) else value[:100])
    return text if len(text) <= 120 else text[:117] + "..."


def _capped(message: str, tail: str = "") -> str:
    message = " ".join(message.split())
    return (message if len(message) <= _MAX_MESSAGE_LENGTH else message[: _MAX_MESSAGE_LENGTH - 3] + "...") + tail


Number = int | float | bool

#: Operations of arithmetic expressions by the class of their syntax node, and comparisons.
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_LONGEST, _LARGEST, _DIGITS = 200, 10.0**15, 15


def _rounded(number: float, digits: int = 0) -> Number:
    """Round a number like the builtin ``round``, but refuse very many digits, which would take endless time."""
    if abs(digits) > _DIGITS:
        raise SpecError(f"round(…, {digits}): expected at most {_DIGITS} digits")
    return round(number, digits) if digits else round(number)


_FUNCTIONS: dict[str, Callable[..., Number]] = {"min": min, "max": max, "ceil": math.ceil, "round": _rounded}


def evaluate_model_expression(text: str, names: Mapping[str, Any]) -> Any:
    """Evaluate an arithmetic expression of a model file, such as ``=4 * hidden``, over the model's parameters.

    Allowed are + - * / // %, comparisons, min, max, ceil and round. The value of a bare name may also be a text.

    Parameters
    ----------
    text : str
        Expression, with or without ``=``.
    names : dict of str to Any
        Parameters of the model by name.

    Returns
    -------
    Any
        Value of the expression: a number or a text.

    Raises
    ------
    SpecError
        If a name is unknown (with the nearest names) or the expression is not valid.

    Examples
    --------
    >>> evaluate_model_expression("=4 * hidden // 2", {"hidden": 768})
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
                raise SpecError(f"unknown name {name!r} in an expression; {suggest_names(name, names)}")
            return names[name]
        case ast.BinOp(op=op) if type(op) in _BINARY:
            left, right = _number(node.left, names), _number(node.right, names)
            return _BINARY[type(op)](left, right)
        case ast.UnaryOp(op=ast.USub()):
            return -_number(node.operand, names)
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            return COMPARISONS[type(op)](_value(node.left, names), _value(node.comparators[0], names))
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
