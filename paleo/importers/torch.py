"""Importer of torch modules, which run once on the meta device with probe sizes for batch and sequence.

Modules come from Python files, and are built without weights.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paleo.errors import SpecError, suggest_names
from paleo.files import is_file
from paleo.importers._network_trace import InputSpec as InputSpec
from paleo.importers._network_trace import Trace, TracedTensor, probe_sizes
from paleo.importers._torch_recorder import TorchCallRecorder
from paleo.specs.loading import record_file_digest
from paleo.units import parse_whole_number

_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*)(?::(\w+))?\Z")
_INPUT_DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")


def import_torch() -> Any:
    """Import the torch library, or raise an error that says what to install."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise SpecError("importing torch modules needs torch: pip install 'paleo-perf[torch]'") from None


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
    if dtype is not None and dtype not in _INPUT_DTYPES:
        raise SpecError(f"--input {text!r}: unknown dtype {dtype!r}; {suggest_names(dtype, _INPUT_DTYPES)}")
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


#: Shortest sequence for which a probe size can be found.
_MIN_PROBED_SEQ = 16


@dataclass(frozen=True, slots=True)
class _ProbedInputs:
    """Input shapes for one attempt to trace a network.

    ``probes`` maps each variable dim to a prime size that marks the dim in the shapes of the trace. ``fixed_batch`` is
    the batch size if the trace has no probe for the batch.
    """

    inputs: tuple[InputSpec, ...]
    probes: dict[str, int]
    fixed_batch: int | None = None


def _traced(module: Any, sizes: _ProbedInputs) -> Trace:
    torch = import_torch()
    failed: SpecError | None = None
    # Tensors that the module creates without a device have data in the first attempt and none in the second.
    for all_meta, half in ((False, False), (True, False), (True, True)):
        if half and (failed is None or ("bf16" not in str(failed).lower() and "bfloat16" not in str(failed).lower())):
            continue
        tape = TorchCallRecorder(torch, module, sizes.probes, all_meta=all_meta, half=half)
        try:
            with _inference(module):
                outputs = tape.run([tape.add_input(s) for s in sizes.inputs], [s.name for s in sizes.inputs])
        except SpecError as error:
            failed = failed or error
            continue
        return _trace_of(module, tape, outputs, sizes)
    raise failed or SpecError("the module cannot be traced")


def _trace_of(module: Any, tape: TorchCallRecorder, outputs: list[TracedTensor], sizes: _ProbedInputs) -> Trace:
    parameters = dict(module.named_parameters())
    trace = Trace(
        tape.inputs,
        outputs,
        calls=tape.calls,
        parameter_counts={name: parameter.numel() for name, parameter in parameters.items()},
        probe_size_by_dim=sizes.probes,
        module_calls=tape.scopes,
        frozen_parameters=frozenset(name for name, parameter in parameters.items() if not parameter.requires_grad),
        notes=tuple(dict.fromkeys(tape.notes)),
        fixed_batch=sizes.fixed_batch,
    )
    parts = module.named_modules()
    recomputed = tuple(name for name, part in parts if getattr(part, "gradient_checkpointing", False) is True)
    trace.checkpointed_modules = tuple(tape.checkpointed) or recomputed
    trace.remove_dead_calls()
    trace.mark_untrained_calls()
    return trace


@contextlib.contextmanager
def _inference(module: Any) -> Iterator[None]:
    """Put the module in inference mode without key-value caches, and restore every part afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with on_meta_device(module):
            yield
    finally:
        for part, training in modes:
            part.training = training


@contextlib.contextmanager
def on_meta_device(module: Any) -> Iterator[None]:
    """Prepare a torch module to run on the meta device inside a ``with`` block.

    The module's key-value caches are off, and so are changes of number formats for that device, which torch refuses.

    Parameters
    ----------
    module : Any
        The torch module.

    Yields
    ------
    None
        None.
    """
    parts = (getattr(part, "config", None) for part in module.modules())
    configs: dict[int, Any] = {id(config): config for config in parts if getattr(config, "use_cache", None) is True}
    torch = import_torch()
    autocast = torch.autocast

    def cast(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return contextlib.nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    for config in configs.values():
        config.use_cache = False
    torch.autocast = torch.amp.autocast = cast
    try:
        yield
    finally:
        torch.autocast = torch.amp.autocast = autocast
        for config in configs.values():
            config.use_cache = True


def _module_sizes(module: Any) -> set[int]:
    return {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape}


def _probed(module: Any, inputs: Sequence[InputSpec], *, probe_seq: bool, share: float = 1.0) -> _ProbedInputs:
    """Return the inputs with batch, and perhaps sequence, set to prime probe sizes that the module does not use.

    The probe for the sequence is at most ``share`` times the stated length.
    """
    if not inputs:
        raise SpecError("a torch module needs at least one --input")
    first, batch = inputs[0], inputs[0].shape[0]
    taken = _module_sizes(module) | {size for spec in inputs for size in spec.shape[1:]}
    probes = {"batch": probe_sizes(taken, 1, least=101)[0]}
    seq = None
    if probe_seq and first.is_integer and len(first.shape) == 2 and first.shape[1] >= _MIN_PROBED_SEQ:
        primes = probe_sizes(taken - {first.shape[1]}, 1, least=11, most=int(share * first.shape[1]))
        seq, probes = (first.shape[1], probes | {"seq": primes[0]}) if primes else (None, probes)

    def replaced(spec: InputSpec) -> InputSpec:
        lead, *inner = spec.shape
        tokens = len(inner) == 1 and spec.is_integer and seq is not None and inner[0] == seq
        shape = (probes["batch"] if lead == batch else lead, *([probes["seq"]] if tokens else inner))
        return InputSpec(shape, spec.dtype, spec.name)

    return _ProbedInputs(tuple(replaced(spec) for spec in inputs), probes)


def _attempts(module: Any, inputs: Sequence[InputSpec], *, open_seq: bool) -> Iterator[_ProbedInputs]:
    """Yield the sizes to try: batch and sequence at probe sizes, then only the batch, then all sizes as stated."""
    for probe_seq in (True, False) if open_seq else (False,):
        sizes = _probed(module, inputs, probe_seq=probe_seq)
        if probe_seq is False or "seq" in sizes.probes:
            yield sizes
    yield _ProbedInputs(tuple(inputs), {}, inputs[0].shape[0])


def _seq_is_open(module: Any, inputs: Sequence[InputSpec], sizes: _ProbedInputs, trace: Trace) -> bool:
    """Return True if all sizes in a trace that depend on the sequence length are multiples of the length.

    Then the sequence length can be a parameter of the model file; a fixed prompt before it, for example, makes the
    answer False. Sizes that belong to neither the module nor the inputs are compared with a second trace at a shorter
    sequence, where there are any.
    """
    if "seq" not in sizes.probes:
        return True
    known = _module_sizes(module) | {size for spec in inputs for size in spec.shape}
    least = sizes.probes["seq"] // 2

    def others(trace: Trace) -> set[int]:
        values = (value for call in trace.calls for value in call.outputs if not value.is_static)
        sizes = {size for value in values for size in value.shape if size >= least} - known
        return {size for size in sizes if all(size % probe for probe in trace.probe_size_by_dim.values())}

    remaining = others(trace)
    return not remaining or remaining == others(_traced(module, _probed(module, inputs, probe_seq=True, share=0.6)))


def model_file_of_module(
    module: Any, inputs: Sequence[InputSpec], *, title: str = "", source: str = "a torch module", loss: str = "auto",
    open_seq: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Trace a torch module and return the content of a model file.

    The sequence of token inputs stays a parameter (``seq``) if the counts follow it; otherwise it is fixed. If the
    module runs with no other batch than the given one, a sample of the model is that whole batch, and its notes say so.

    Parameters
    ----------
    module : Any
        The torch module.
    inputs : sequence of InputSpec
        Shapes and types of its inputs.
    title : str, optional
        Title of the model; by default the name of its class.
    source : str, optional
        Origin of the network.
    loss : str, optional
        ``auto`` ends a classifier with its loss, ``none`` does not.
    open_seq : bool, optional
        Whether the sequence may stay a parameter; otherwise it is fixed.

    Returns
    -------
    dict of str to Any
        Content of a model file, as YAML reads it.

    Raises
    ------
    SpecError
        If the module cannot be traced.
    """
    from paleo.importers.model_file import model_file_of_trace

    title = title or type(module).__name__
    _initialise_lazy_layers(module, inputs)
    failed: SpecError | None = None
    for sizes in _attempts(module, inputs, open_seq=open_seq):
        try:
            trace = _traced(module, sizes)
            if not _seq_is_open(module, inputs, sizes, trace):
                continue
            stated = {name: inputs[0].shape[1] if name == "seq" else 0 for name in trace.probe_size_by_dim}
            return model_file_of_trace(trace, title=title, source=source, sizes=stated, loss=loss)
        except SpecError as error:
            failed = failed or error
    raise failed or SpecError("the module cannot be traced")


def _initialise_lazy_layers(module: Any, inputs: Sequence[InputSpec]) -> None:
    """Run a module with lazy layers (such as nn.LazyLinear) once, so that the lazy layers get sizes."""
    torch = import_torch()
    uninitialized = torch.nn.parameter.UninitializedTensorMixin
    if not any(isinstance(tensor, uninitialized) for tensor in (*module.parameters(), *module.buffers())):
        return
    tensors = [(s.name, torch.zeros(s.shape, dtype=getattr(torch, s.dtype), device="meta")) for s in inputs]
    positional = [tensor for name, tensor in tensors if name is None]
    try:
        with torch.no_grad(), _inference(module):
            module(*positional, **{name: tensor for name, tensor in tensors if name is not None})
    except Exception as error:
        problem = f"{type(error).__name__}: {_short(error)}"
        raise SpecError(f"the lazy layers cannot take these inputs: {problem}") from None
