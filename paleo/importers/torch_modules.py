"""torch modules from Python files: parsing of their input shapes, and building without weights."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paleo.errors import SpecError, suggest_names
from paleo.files import is_file
from paleo.specs.loading import record_file_digest
from paleo.units import parse_whole_number

_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*)(?::(\w+))?\Z")
INPUT_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")


def import_torch() -> Any:
    """Import the torch library, or raise an error that says what to install."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise SpecError("importing torch modules needs torch: pip install 'paleo-perf[torch]'") from None


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape and dtype of one input; ``name`` is set for a keyword argument."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    name: str | None = None

    @property
    def is_integer(self) -> bool:
        """True if the input holds integers or booleans, such as token ids."""
        return self.dtype in ("int64", "int32", "bool")


def parse_input(text: str) -> InputSpec:
    """Parse the text of one input of a torch module, such as ``8x512:int64``, to shape, dtype and name.

    Parameters
    ----------
    text : str
        ``32x3x224x224``, ``8x512:int64`` or ``input_ids=8x512:int64``.

    Returns
    -------
    InputSpec
        Shape, type and name.

    Raises
    ------
    SpecError
        If the text is not valid.

    Examples
    --------
    >>> parse_input("8x512:int64").shape
    (8, 512)
    """
    match = _INPUT.match(text.strip())
    if match is None:
        raise SpecError(f"--input {text!r}: expected sizes such as 32x3x224x224, 8x512:int64 or input_ids=8x512:int64")
    name, sizes, dtype = match.groups()
    shape = tuple(parse_whole_number(size, 2**31 - 1) or 0 for size in sizes.split("x"))
    if not all(shape) or len(shape) > 8:
        raise SpecError(f"--input {text[:80]!r}: expected at most 8 sizes of 1 or more")
    if dtype is not None and dtype not in INPUT_DTYPES:
        raise SpecError(f"--input {text!r}: unknown dtype {dtype!r}; {suggest_names(dtype, INPUT_DTYPES)}")
    return InputSpec(shape, dtype or "float32", name)


def check_factory_text(target: str) -> None:
    """Check that a text is ``module:factory`` and that the module exists, without running module code.

    Parameters
    ----------
    target : str
        The text.

    Raises
    ------
    SpecError
        If it is not.
    """
    place = _place_and_name(target)[0]
    if place.endswith(".py"):
        _check_file(place)
        return
    _import_from_the_working_folder()
    package = place.partition(".")[0]
    if not package or importlib.util.find_spec(package) is None:
        raise SpecError(f"{place}: no module named {package!r}; expected one that can be imported, or a path to a .py")


def _place_and_name(target: str) -> tuple[str, str]:
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise SpecError(f"{target!r}: expected module:factory, such as torchvision.models:resnet50 or net.py:build")
    return place, name


def _import_from_the_working_folder() -> None:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))


def _check_file(place: str) -> None:
    if not is_file(place):
        raise SpecError(f"{place}: no such file; expected a Python module")
    record_file_digest(place, Path(place).read_bytes())


def load_module(target: str) -> Any:
    """Build the module of ``package.file:factory`` or ``path/file.py:factory`` without allocating weights.

    The code of the file runs.

    Parameters
    ----------
    target : str
        The factory: a class or function without arguments, or a module that exists already.

    Returns
    -------
    Any
        The module.

    Raises
    ------
    SpecError
        If it cannot be built.
    """
    place, name = _place_and_name(target)
    factory: Any = _imported(place)
    for part in name.split("."):
        if not hasattr(factory, part):
            public = [word for word in dir(factory) if not word.startswith("_")]
            raise SpecError(f"{place}: has no {part!r}; {suggest_names(part, public)}")
        factory = getattr(factory, part)
    torch = import_torch()
    if isinstance(factory, torch.nn.Module):
        return factory
    if not callable(factory):
        kind = type(factory).__name__
        raise SpecError(f"{target}: has type {kind}; expected a torch module, or a function that makes one")
    return build_module(factory, target)


def build_module(factory: Callable[[], Any], where: str) -> Any:
    """Return a module built on torch's meta device, so that no weight is allocated.

    Small tables that it computes may stay real. If nothing else works, the module is built with its data, which are
    dropped.

    Parameters
    ----------
    factory : Callable[[], Any]
        Makes the module.
    where : str
        Its name, for messages.

    Returns
    -------
    Any
        The module.

    Raises
    ------
    SpecError
        If it cannot be built.
    """
    torch = import_torch()
    failed: Exception | None = None
    for attempt in (_built_on_meta, _built_with_literal_data, _built_with_data):
        if attempt is _built_with_data and "meta" not in str(failed).lower():
            break
        try:
            module = attempt(factory)
        except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, AssertionError) as error:
            failed = failed or error
        except Exception as error:
            raise SpecError(f"{where}: the factory failed: {type(error).__name__}: {_short(error)}") from None
        else:
            if not isinstance(module, torch.nn.Module):
                raise SpecError(f"{where}: returned a {type(module).__name__}; expected a torch module")
            return module
    raise SpecError(f"{where}: the factory failed: {type(failed).__name__}: {_short(failed)}")


def _short(error: Exception | None) -> str:
    return " ".join(str(error).split())[:300]


def _built_on_meta(factory: Callable[[], Any]) -> Any:
    with import_torch().device("meta"):
        return factory()


def _built_with_data(factory: Callable[[], Any]) -> Any:
    module = factory()
    return module.to("meta") if isinstance(module, import_torch().nn.Module) else module


def _built_with_literal_data(factory: Callable[[], Any]) -> Any:
    """Build a module on the meta device, but give data to ranges and literals that its constructor reads."""
    torch = import_torch()
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    real = {torch.linspace, torch.arange, torch.tensor, torch.logspace, torch.as_tensor, torch.range}

    class Factories(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function in _device_constructors() and function not in real and kwargs.get("device") is None:
                kwargs["device"] = "meta"
            return function(*args, **kwargs)

    with Factories():
        return factory().to("meta")


def _imported(place: str) -> Any:
    try:
        if place.endswith(".py"):
            _check_file(place)
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None:
                raise SpecError(f"{place}: no such file; expected a Python module")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        _import_from_the_working_folder()
        return importlib.import_module(place)
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"{place}: cannot be imported: {type(error).__name__}: {error}") from None
