"""torch modules: run once on the meta device, where tensors have shapes and no data, and every function call is noted.

The calls are those of torch's own functions (linear, conv2d, scaled_dot_product_attention, …), as the module makes
them, so nothing has to be compiled or exported first, and a module of 70 billion parameters takes seconds. torch's
flop counter listens inside every call, so what is not recognised still brings its FLOP.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paleo.errors import SpecError, near
from paleo.importers.trace import Call, Scope, Trace, Value, probe_sizes, record

MOST_CALLS = 400_000
_INPUT = re.compile(r"(?:([A-Za-z_]\w*)=)?(\d+(?:x\d+)*)(?::(\w+))?\Z")
DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "bool")


def torch_module() -> Any:
    """The library, or an error that says what to install."""
    try:
        return importlib.import_module("torch")
    except ImportError:
        raise SpecError("importing torch modules needs torch: pip install 'paleo-perf[torch]'") from None


@dataclass(frozen=True, slots=True)
class InputSpec:
    """Shape and dtype of one input; ``name`` for a keyword argument."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    name: str | None = None

    @property
    def index(self) -> bool:
        """Whether it holds whole numbers."""
        return self.dtype in ("int64", "int32", "bool")


def parse_input(text: str) -> InputSpec:
    """An input as people write it: ``32x3x224x224``, ``8x512:int64``, ``input_ids=8x512:int64``.

    >>> parse_input("8x512:int64").shape
    (8, 512)
    """
    found = _INPUT.match(text.strip())
    if found is None:
        raise SpecError(f"--input {text!r}: expected sizes such as 32x3x224x224, 8x512:int64 or input_ids=8x512:int64")
    name, sizes, dtype = found.groups()
    shape = tuple(int(size) for size in sizes.split("x"))
    if not all(0 < size < 2**31 for size in shape) or len(shape) > 8:
        raise SpecError(f"--input {text!r}: sizes go from 1 up, at most 8 of them")
    if dtype is not None and dtype not in DTYPES:
        raise SpecError(f"--input {text!r}: unknown dtype {dtype!r}; {near(dtype, DTYPES)}")
    return InputSpec(shape, dtype or "float32", name)


def load_module(target: str) -> Any:
    """The module that ``package.file:factory`` or ``path/file.py:factory`` makes, with no weights allocated.

    ``factory`` is a class or function that needs no arguments, or a module that is there already.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise SpecError(f"{target!r}: expected module:factory, such as torchvision.models:resnet50 or net.py:build")
    found: Any = _imported(place)
    for part in name.split("."):
        if not hasattr(found, part):
            raise SpecError(
                f"{place}: has no {part!r}; {near(part, [one for one in dir(found) if not one.startswith('_')])}"
            )
        found = getattr(found, part)
    torch = torch_module()
    if isinstance(found, torch.nn.Module):
        return found
    if not callable(found):
        raise SpecError(f"{target}: is a {type(found).__name__}; expected a torch module, or a function that makes one")
    return build_module(found, target)


def build_module(factory: Callable[[], Any], where: str) -> Any:
    """What the factory makes on the meta device; small tables that it computes may stay real."""
    torch = torch_module()
    try:
        with torch.device("meta"):
            made = factory()
    except (RuntimeError, NotImplementedError):
        made = _built_beside(factory, where)
    except Exception as error:
        raise SpecError(f"{where}: the factory failed: {type(error).__name__}: {error}") from None
    if not isinstance(made, torch.nn.Module):
        raise SpecError(f"{where}: made a {type(made).__name__}; expected a torch module")
    return made


def _built_beside(factory: Callable[[], Any], where: str) -> Any:
    """For constructors that read values (schedules of drop rates): ranges and literals are real, all else has no
    data."""
    torch = torch_module()
    from torch.overrides import TorchFunctionMode
    from torch.utils._device import _device_constructors

    real = {torch.linspace, torch.arange, torch.tensor, torch.logspace, torch.as_tensor, torch.range}

    class Factories(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            if function in _device_constructors() and function not in real and kwargs.get("device") is None:
                kwargs["device"] = "meta"
            return function(*args, **kwargs)

    try:
        with Factories():
            return factory().to("meta")
    except Exception as error:
        raise SpecError(f"{where}: cannot be built without data: {type(error).__name__}: {error}") from None


def _imported(place: str) -> Any:
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            if spec is None or spec.loader is None or not Path(place).is_file():
                raise SpecError(f"{place}: no such file; expected a Python module")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
        if "" not in sys.path and str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(place)
    except SpecError:
        raise
    except Exception as error:
        raise SpecError(f"{place}: cannot be imported: {type(error).__name__}: {error}") from None


# Running it once.


def trace_module(module: Any, inputs: Sequence[InputSpec], *, probe_seq: bool = True) -> Trace:
    """The calls of one forward pass in inference mode, at probe sizes of batch (and sequence, for token inputs)."""
    torch = torch_module()
    if not inputs:
        raise SpecError("a torch module needs at least one --input")
    given, probes = _probed(module, inputs, probe_seq)
    training = module.training
    module.eval()
    try:
        tape, outputs = _run(torch, module, given)
    finally:
        module.train(training)
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    found = Trace(tape.inputs, outputs, tape.calls, sizes, probes, tape.scopes)
    found.without_dead_calls()
    return found


def _run(torch: Any, module: Any, given: Sequence[InputSpec]) -> tuple[_Tape, list[Value]]:
    """Tensors that the module creates without naming a device are real at first, then without data, too."""
    failed: SpecError | None = None
    for all_meta in (False, True):
        tape = _Tape(torch, module, all_meta=all_meta)
        try:
            return tape, tape.run([tape.input(spec) for spec in given], [spec.name for spec in given])
        except SpecError as error:
            failed = failed or error
    raise failed or SpecError("the module cannot be traced")


def _probed(module: Any, inputs: Sequence[InputSpec], probe_seq: bool) -> tuple[list[InputSpec], dict[str, int]]:
    """Inputs at probe sizes, where no size of the module can be confused with them."""
    taken = {size for tensor in (*module.parameters(), *module.buffers()) for size in tensor.shape}
    batch = inputs[0].shape[0]
    taken |= {size for spec in inputs for size in spec.shape[1:]}
    probes = {"batch": probe_sizes(taken, 1, least=101)[0]}
    replaced = {0: {batch: probes["batch"]}}
    first = inputs[0]
    if probe_seq and first.index and len(first.shape) == 2 and first.shape[1] >= 16:
        primes = probe_sizes(taken - {first.shape[1]}, 1, least=11, most=first.shape[1])
        if primes:
            probes["seq"] = primes[0]
            replaced[1] = {first.shape[1]: primes[0]}
    made = []
    for spec in inputs:
        shape = tuple(
            replaced.get(i, {}).get(size, size) if i == 0 or (spec.index and len(spec.shape) == 2) else size
            for i, size in enumerate(spec.shape)
        )
        made.append(InputSpec(shape, spec.dtype, spec.name))
    return made, probes


class _Tape:
    """Notes every function call of torch while the module runs."""

    def __init__(self, torch: Any, module: Any, *, all_meta: bool) -> None:
        self.torch, self.module, self.all_meta = torch, module, all_meta
        self._modules = dict(module.named_modules())
        self.calls: list[Call] = []
        self.inputs: list[Value] = []
        self.scopes: list[Scope] = []
        self._values: dict[int, Value] = {}
        self._alive: list[Any] = []
        self._stack: list[tuple[str, int, Value | None]] = []
        self._weights = {
            name: parameter.detach().to("meta").requires_grad_(parameter.dtype.is_floating_point)
            for name, parameter in module.named_parameters()
        }
        for name, parameter in self._weights.items():
            self._bind(
                parameter, Value(tuple(parameter.shape), "parameter", name, static=True, sources=frozenset({name}))
            )

    def input(self, spec: InputSpec) -> Any:
        dtype = getattr(self.torch, spec.dtype)
        tensor = self.torch.zeros(spec.shape, dtype=dtype, device="meta")
        value = Value(spec.shape, "input", spec.name or f"input{len(self.inputs) + 1}", index=spec.index)
        value.root = value if spec.index else None
        self.inputs.append(value)
        self._bind(tensor, value)
        return tensor

    def _bind(self, tensor: Any, value: Value) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def value(self, tensor: Any) -> Value:
        """The value of a tensor; one that nobody made here is a constant."""
        found = self._values.get(id(tensor))
        if found is None:
            index = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
            found = Value(tuple(tensor.shape), "constant", "", index, static=True)
            self._bind(tensor, found)
        return found

    def run(self, tensors: Sequence[Any], names: Sequence[str | None]) -> list[Value]:
        """The outputs of the module; SpecError where it reads the values of its tensors."""
        from torch.utils.flop_counter import FlopCounterMode

        torch = self.torch
        state = self._weights | {name: buffer.to("meta") for name, buffer in self.module.named_buffers()}
        counter = FlopCounterMode(display=False)
        recorder = _recorder(self, counter)
        positional = [tensor for tensor, name in zip(tensors, names, strict=True) if name is None]
        keywords = {name: tensor for tensor, name in zip(tensors, names, strict=True) if name is not None}
        with self._watched():
            try:
                with counter, recorder:
                    made = torch.func.functional_call(self.module, state, tuple(positional), keywords)
            except SpecError:
                raise
            except Exception as error:
                raise SpecError(_explained(error, self._stack)) from None
        leaves = _tensors(self.torch, made)
        if not leaves:
            raise SpecError(f"the module gave no tensor, but a {type(made).__name__}")
        return [self.value(tensor) for tensor in leaves]

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Hooks that tell which module a call belongs to; the module must be real on no device but meta."""
        handles = []
        for name, module in self.module.named_modules():
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving(name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: Any, args: Any, kwargs: Any) -> None:
            tensors = _tensors(self.torch, (args, kwargs))
            self._stack.append((name, len(self.calls), self.value(tensors[0]) if tensors else None))

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            while self._stack:
                path, start, given = self._stack.pop()
                if path == name:
                    break
            tensors = _tensors(self.torch, output)
            own = tuple(f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False))
            made = self.value(tensors[0]) if len(tensors) == 1 else None
            self.scopes.append(Scope(name, type(module).__name__, start, len(self.calls), given, made, own))

        return leave

    def _training_dropout(self, path: str) -> float:
        """The dropout of scores that a module has in training and leaves out now."""
        module = self._modules.get(path)
        for name in ("attention_dropout", "dropout", "attn_dropout", "dropout_p"):
            rate = getattr(module, name, None)
            rate = getattr(rate, "p", rate)
            if isinstance(rate, float) and 0 < rate < 1:
                return rate
        return 0.0

    def note(self, function: Any, args: Any, kwargs: Mapping[str, Any], made: Any, flops: float) -> None:
        """Adds a call that gave tensors."""
        outputs = _tensors(self.torch, made)
        if not outputs:
            return
        label = _label(function)
        given = [self.value(tensor) for tensor in _tensors(self.torch, (args, kwargs))]
        kind, inputs, options = classify(label, args, kwargs, self, made)
        if kind == "view" and len(outputs) == 1 and self._values.get(id(outputs[0])) in given:
            return
        floats = [(tuple(t.shape), not (t.dtype.is_floating_point or t.dtype.is_complex)) for t in outputs]
        path = self._stack[-1][0] if self._stack else ""
        if kind == "sdpa" and not options.get("dropout_p"):
            options["dropout_p"] = self._training_dropout(path)
        call = record(kind, label, given if inputs is None else inputs, floats, options=options, flops=flops, path=path)
        self.calls.append(call)
        if len(self.calls) > MOST_CALLS:
            raise SpecError(f"more than {MOST_CALLS} calls in one pass; the module loops too long")
        for tensor, value in zip(outputs, call.outputs, strict=True):
            self._bind(tensor, value)
            base = tensor._base
            if base is not None and label in INPLACE and id(base) in self._values:
                old = self._values[id(base)]
                whole = record(
                    "copy", f"{label} of a view", [old, value], [(old.shape, old.index)], path=path, flops=0.0
                )
                self.calls.append(whole)
                self._bind(base, whole.out)


def _recorder(tape: _Tape, counter: Any) -> Any:
    from torch.overrides import TorchFunctionMode

    class Recorder(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            answer = _guessed(tape, function, args)
            if answer is not None:
                return answer
            if getattr(function, "__name__", "") == "__get__" or _label(function) in _SILENT:
                return (
                    function(*args, **kwargs)
                    if _label(function) not in _VIEWED
                    else self._noted(function, args, kwargs)
                )
            return self._noted(function, args, kwargs)

        def _noted(self, function: Any, args: Any, kwargs: Any) -> Any:
            if tape.all_meta and _needs_meta(function, kwargs):
                kwargs = {**kwargs, "device": "meta"}
            before = counter.get_total_flops()
            made = function(*args, **kwargs)
            if _label(function) == "__setitem__":
                made = args[0]
            tape.note(function, args, kwargs, made, float(counter.get_total_flops() - before))
            return made

    return Recorder()


def _guessed(tape: _Tape, function: Any, args: Any) -> bool | None:
    """What a module is told that asks for a truth value without data: masks are full, and nothing is found.

    So attention masks hide nothing, and there is no padding.
    """
    label = _label(function)
    if label not in ("item", "__bool__", "__contains__") or not args or args[0].device.type != "meta":
        return None
    if label == "__contains__":
        return False
    if args[0].dtype != tape.torch.bool:
        return None
    maker = tape.value(args[0]).maker
    return maker is not None and maker.label == "all"


_CREATORS = frozenset(
    {"zeros", "ones", "empty", "full", "arange", "linspace", "rand", "randn", "eye", "randint", "randperm"}
)


def _needs_meta(function: Any, kwargs: Mapping[str, Any]) -> bool:
    return getattr(function, "__name__", "") in _CREATORS and kwargs.get("device") is None


_SILENT = frozenset(
    {"size", "dim", "stride", "register_hook", "requires_grad_", "is_floating_point", "numel", "__len__", "is_complex"}
)
#: Properties that make tensors.
_VIEWED = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
#: Functions that write into what they take.
INPLACE = frozenset(
    {
        "__setitem__",
        "add_",
        "mul_",
        "sub_",
        "div_",
        "copy_",
        "fill_",
        "zero_",
        "masked_fill_",
        "relu_",
        "__iadd__",
        "__imul__",
    }
)


def _label(function: Any) -> str:
    name = getattr(function, "__name__", "") or str(function)
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)


def _explained(error: Exception, stack: Sequence[tuple[str, int, Any]]) -> str:
    where = f" in {stack[-1][0] or 'the module'}" if stack else ""
    text = " ".join(str(error).split())[:300]
    if "meta" in text and ("item" in text or "nonzero" in text or "data-dependent" in text or "local_scalar" in text):
        text += " (its path depends on the values of tensors; `paleo import hf` reads configurations of such models)"
    return f"the forward pass failed{where}: {type(error).__name__}: {text}"


def _tensors(torch: Any, tree: Any) -> list[Any]:
    """All tensors in nested lists, tuples, mappings and outputs of models, each once."""
    found: dict[int, Any] = {}
    stack = [tree]
    while stack:
        one = stack.pop()
        if isinstance(one, torch.Tensor):
            found[id(one)] = one
        elif isinstance(one, Mapping):
            stack.extend(reversed(list(one.values())))
        elif isinstance(one, list | tuple):
            stack.extend(reversed(one))
        elif hasattr(one, "__dataclass_fields__"):
            stack.extend(reversed([getattr(one, name) for name in one.__dataclass_fields__]))
    return list(found.values())


# What the functions of torch are called here.

Signature = tuple[str, ...]
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVERAGE = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
_NORM = ("input", "running_mean", "running_var", "weight", "bias")
#: Functions whose arguments matter: kind, names of the arguments in order, how many of them are tensors to read.
SIGNATURES: dict[str, tuple[str, Signature, tuple[str, ...]]] = {
    "linear": ("linear", ("input", "weight", "bias"), ("input", "weight", "bias")),
    **{f"conv{n}d": ("conv", _CONV, ("input", "weight", "bias")) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": ("transposed_conv", _TRANSPOSED, ("input", "weight", "bias")) for n in (1, 2, 3)},
    "batch_norm": ("batch_norm", _NORM, ("input", "weight", "bias")),
    "instance_norm": ("instance_norm", _NORM, ("input", "weight", "bias")),
    "layer_norm": ("layer_norm", ("input", "normalized_shape", "weight", "bias"), ("input", "weight", "bias")),
    "rms_norm": ("rms_norm", ("input", "normalized_shape", "weight"), ("input", "weight")),
    "group_norm": ("group_norm", ("input", "num_groups", "weight", "bias"), ("input", "weight", "bias")),
    "embedding": ("embedding", ("input", "weight"), ("input", "weight")),
    "embedding_bag": ("embedding_bag", ("input", "weight"), ("input", "weight")),
    "dropout": ("dropout", ("input", "p"), ("input",)),
    "alpha_dropout": ("dropout", ("input", "p"), ("input",)),
    **{f"dropout{n}d": ("dropout", ("input", "p"), ("input",)) for n in (1, 2, 3)},
    **{f"max_pool{n}d": ("max_pool", _POOL, ("input",)) for n in (1, 2, 3)},
    **{f"boolean_dispatch{n}d": ("max_pool", _POOL, ("input",)) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": ("avg_pool", _AVERAGE, ("input",)) for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": ("adaptive_avg_pool", ("input", "output_size"), ("input",)) for n in (1, 2, 3)},
    "local_response_norm": ("local_response_norm", ("input", "size"), ("input",)),
    "softmax": ("softmax", ("input", "dim"), ("input",)),
    "log_softmax": ("softmax", ("input", "dim"), ("input",)),
    "scaled_dot_product_attention": (
        "sdpa",
        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
        ("query", "key", "value", "attn_mask"),
    ),
    "einsum": ("einsum", (), ()),
    "bmm": ("matmul", ("input", "mat2"), ("input", "mat2")),
    "mm": ("matmul", ("input", "mat2"), ("input", "mat2")),
    "matmul": ("matmul", ("input", "other"), ("input", "other")),
    "__matmul__": ("matmul", ("input", "other"), ("input", "other")),
    "addmm": ("addmm", ("input", "mat1", "mat2"), ("mat1", "mat2", "input")),
    "baddbmm": ("baddbmm", ("input", "batch1", "batch2"), ("batch1", "batch2", "input")),
    "cat": ("cat", ("tensors", "dim"), ("tensors",)),
    "concat": ("cat", ("tensors", "dim"), ("tensors",)),
    "permute": ("permute", (), ()),
    "multi_head_attention_forward": ("mha", (), ()),
}
ELEMENTWISE: dict[str, str] = {
    "relu": "relu", "relu6": "relu6", "leaky_relu": "leaky_relu", "sigmoid": "sigmoid", "tanh": "tanh", "gelu": "gelu",
    "silu": "silu", "hardswish": "hard_swish", "elu": "elu", "softplus": "softplus",
    "hardsigmoid": "sigmoid", "mish": "silu",
    "hardtanh": "relu6", "selu": "elu", "celu": "elu", "logsigmoid": "softplus",
}  # fmt: skip
#: Functions that take the shape of a tensor and none of its numbers.
_LIKE = frozenset(
    [
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty"),
    ]
)
#: What kind of pass over memory functions are whose arguments do not matter.
_NAMES = {
    "view": (
        "view reshape flatten unflatten squeeze unsqueeze expand expand_as transpose swapaxes movedim contiguous "
        "view_as reshape_as T mT t swapdims ravel detach alias data to float type_as half bfloat16 clone moveaxis "
        "positive view_as_real view_as_complex real imag atleast_1d atleast_2d type requires_grad_ broadcast_to "
        "diagonal as_strided unfold_view"
    ),
    "slice": ("__getitem__ chunk split tensor_split unbind narrow select split_with_sizes hsplit"),
    "elementwise": (
        "mul sub div add rsub rmul radd rtruediv truediv imul iadd isub itruediv pow rpow sqrt rsqrt exp log neg "
        "abs square clamp clip where masked_fill addcmul addcdiv lerp sin cos erf reciprocal maximum minimum sign "
        "floor ceil round eq ne lt gt le ge log1p expm1 prelu glu softsign true_divide subtract multiply divide "
        "fmod remainder rrelu hardshrink atan2 float_power log2 atan cumsum cumprod logical_and logical_not "
        "logical_or bitwise_and nan_to_num tril triu polar threshold xlogy logaddexp sinc tanhshrink softshrink "
        "complex clamp_min clamp_max"
    ),
    "reduce": (
        "mean sum amax amin max min norm var std argmax argmin logsumexp prod any all var_mean std_mean "
        "vector_norm linalg_vector_norm linalg_norm normalize cosine_similarity"
    ),
    "copy": (
        "stack pad roll repeat repeat_interleave flip index_select gather take_along_dim pixel_shuffle "
        "pixel_unshuffle interpolate upsample unfold fold scatter scatter_add index_add copy tile channel_shuffle "
        "setitem meshgrid hstack vstack rot90 index_put rot affine_grid new_tensor index grid_sample one_hot "
        "masked_select topk sort argsort"
    ),
}
PASSES = {name: kind for kind, names in reversed(_NAMES.items()) for name in names.split()}


def classify(
    label: str, args: Sequence[Any], kwargs: Mapping[str, Any], tape: _Tape, made: Any
) -> tuple[str, list[Value | None] | None, dict[str, Any]]:
    """Kind, inputs (None: all tensors in order) and options of a call."""
    name = _plain(label)
    if name == "mha_forward" or name == "multi_head_attention_forward":
        return _heads(args, kwargs, tape)
    if name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        return _recurrent(name, args, tape)
    if name == "einsum":
        operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
        return "einsum", [tape.value(one) for one in operands], {"equation": args[0]}
    if name in SIGNATURES:
        return _bound(name, args, kwargs, tape)
    if name in ("add", "iadd", "radd") and _both(args, tape):
        return "add", None, {}
    if name in ("mul", "imul", "rmul", "multiply") and _both(args, tape):
        return "multiply", None, {}
    if name in ELEMENTWISE:
        return "activation", None, {"function": ELEMENTWISE[name]}
    if name == "permute" or name in ("transpose", "swapaxes", "t", "T", "mT", "movedim"):
        return "view", None, {}
    if name in _LIKE:
        return "create", [], {}
    kind = PASSES.get(name)
    return (
        (kind, None, {})
        if kind is not None
        else ("create" if not _tensors(tape.torch, (args, kwargs)) else "unknown", None, {})
    )


def _plain(label: str) -> str:
    """``add`` of ``add_``, ``__add__`` and ``__iadd__``; known names as they are."""
    if label in SIGNATURES or label in PASSES:
        return label
    name = label.strip("_") or label
    if name.startswith("_max_pool") or name.startswith("max_pool"):
        return name.removeprefix("_").removesuffix("_with_indices")
    return name


def _both(args: Sequence[Any], tape: _Tape) -> bool:
    return len(args) >= 2 and all(isinstance(one, tape.torch.Tensor) for one in args[:2])


def _bound(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], tape: _Tape
) -> tuple[str, list[Value | None] | None, dict[str, Any]]:
    """Arguments by name: tensors as inputs, the rest as options."""
    kind, names, read = SIGNATURES[name]
    if not names:
        return ("view" if kind == "permute" else kind), None, {}
    given = dict(zip(names, args, strict=False)) | {key: value for key, value in kwargs.items() if key in names}
    if read == ("tensors",):
        dim = given.get("dim", kwargs.get("axis", 0))
        return kind, [tape.value(one) for one in given["tensors"]], {"dim": dim}
    tensors: list[Value | None] = [
        tape.value(given[key]) if isinstance(given.get(key), tape.torch.Tensor) else None for key in read
    ]
    options = {key: value for key, value in given.items() if key not in read}
    return kind, tensors, options


def _heads(
    args: Sequence[Any], kwargs: Mapping[str, Any], tape: _Tape
) -> tuple[str, list[Value | None] | None, dict[str, Any]]:
    names = list(inspect.signature(tape.torch.nn.functional.multi_head_attention_forward).parameters)
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    keys = (
        "query", "key", "value", "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", "q_proj_weight",
            "k_proj_weight", "v_proj_weight", "bias_k", "bias_v")  # fmt: skip
    tensors = [tape.value(given[key]) if isinstance(given.get(key), tape.torch.Tensor) else None for key in keys]
    options = {
        "heads": given["num_heads"],
        "dropout": given.get("dropout_p", 0.0),
        "causal": bool(given.get("is_causal")),
    }
    return "mha", tensors, options


def _recurrent(name: str, args: Sequence[Any], tape: _Tape) -> tuple[str, list[Value | None] | None, dict[str, Any]]:
    """Arguments of ``torch.lstm`` and its kin: input, states, weights, biases, layers, dropout, train, both ways,
    batch first."""
    torch = tape.torch
    if isinstance(args[1], torch.Tensor) and not isinstance(args[2], list | tuple | torch.Tensor):
        return "unknown", None, {}
    packed = isinstance(args[3], list | tuple)
    x, weights = args[0], args[3] if packed else args[2]
    rest = args[4:] if packed else args[3:]
    if packed:
        return "unknown", None, {}
    biases, layers, dropout, _, both, first = (*rest, False)[:6]
    cell = {"lstm": "lstm", "gru": "gru"}.get(name, "rnn")
    options = {
        "cell": cell,
        "layers": layers,
        "both": bool(both),
        "bias": bool(biases),
        "batch_first": bool(first),
        "dropout": dropout,
    }
    return "rnn", [tape.value(x), *(tape.value(one) for one in weights)], options


# The whole way.


def from_module(
    module: Any, inputs: Sequence[InputSpec], *, title: str = "", source: str = "a torch module", loss: str = "auto"
) -> dict[str, Any]:
    """A torch module as the mapping of a model file.

    The sequence of token inputs stays a parameter (``seq``) where the counts follow it; else it is fixed.
    """
    from paleo.importers.model import model_of

    title = title or type(module).__name__
    failed: SpecError | None = None
    for probe_seq in (True, False):
        try:
            trace = trace_module(module, inputs, probe_seq=probe_seq)
        except SpecError as error:
            if "seq" not in _probed(module, inputs, probe_seq)[1]:
                raise
            failed = error
            continue
        sizes = {name: inputs[0].shape[1] if name == "seq" else 0 for name in trace.probes}
        return model_of(trace, title=title, source=source, sizes=sizes, loss="none" if loss == "none" else "auto")
    raise failed or SpecError("the module cannot be traced")
