"""Recorder of a torch module: it runs once on the meta device, where tensors have no data, and every call is recorded.

The calls are those of torch's own functions (linear, conv2d, scaled_dot_product_attention, …) as the module makes them,
so nothing has to be compiled or exported. torch's FLOP formulas are applied inside every call, so that a call without a
rule still has its FLOP. autograd tells what every call saves for the backward pass.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from paleo.errors import SpecError
from paleo.importers._rules import Invocation, plain_name, torch_reading
from paleo.importers._trace import Call, Scope, Value, record
from paleo.importers._value_answers import BOX_SELECTIONS, computed, guessed, label_of, sampled_boxes

if TYPE_CHECKING:
    from paleo.importers.torch_modules import InputSpec

MOST_CALLS = 400_000
#: Bytes of an fp32 number, the unit in which saved elements are counted.
FP32_BYTES = 4
_SILENT = frozenset(
    [
        *("size", "dim", "stride", "register_hook", "requires_grad_", "is_floating_point", "numel", "__len__", "ndim"),
        *("is_complex", "is_contiguous", "storage_offset", "element_size", "get_device", "is_nonzero", "data_ptr"),
        *("names", "shape", "dtype", "device", "layout", "is_meta", "is_cuda", "is_nested", "requires_grad"),
        *("grad", "grad_fn", "is_leaf", "_version", "_base", "nbytes", "itemsize", "untyped_storage", "is_sparse"),
        *("is_same_size", "is_set_to", "retain_grad", "is_inference", "is_conj", "is_neg", "__repr__", "__format__"),
    ]
)
#: Properties of a tensor that are views of it.
_VIEWED = frozenset({"T", "mT", "H", "mH", "data", "real", "imag"})
_CREATORS = frozenset(
    {"zeros", "ones", "empty", "full", "arange", "linspace", "rand", "randn", "eye", "randint", "randperm", "logspace"}
)


class Tape:
    """Records every torch call while the module runs."""

    def __init__(
        self, torch: Any, module: Any, probes: Mapping[str, int], *, all_meta: bool, half: bool = False
    ) -> None:
        self.torch, self.module, self.probes, self.all_meta = torch, module, probes, all_meta
        #: True to use bf16 instead of fp32, for kernels that only accept 16-bit numbers.
        self.half = half
        self._modules = dict(module.named_modules())
        self.calls: list[Call] = []
        self.inputs: list[Value] = []
        self.scopes: list[Scope] = []
        self.notes: list[str] = []
        self.checkpointed: list[str] = []
        self.stack: list[tuple[str, Value | None]] = []
        #: Storages that autograd saves with their bytes, in order.
        self.packed: list[tuple[int, int]] = []
        #: Calls whose outputs are parts of a tensor in the same storage, with that tensor.
        self._parts: list[tuple[Call, int]] = []
        self.counter = _flop_counter()
        self._values: dict[int, Value] = {}
        self._alive: list[Any] = []
        self._weights = {
            name: self._cast(parameter.detach().to("meta")).requires_grad_(_trainable(parameter))
            for name, parameter in module.named_parameters()
        }
        self._known_storages = {storage_key(weight) for weight in self._weights.values()}
        for name, weight in self._weights.items():
            parameter = Value(tuple(weight.shape), "parameter", name, static=True, sources=frozenset({name}))
            self._bind(weight, parameter)

    def _cast(self, tensor: Any) -> Any:
        return tensor.to(self.torch.bfloat16) if self.half and tensor.dtype == self.torch.float32 else tensor

    # Values.

    def input(self, spec: InputSpec) -> Any:
        """Return a tensor for an input."""
        tensor = self._cast(self.torch.zeros(spec.shape, dtype=getattr(self.torch, spec.dtype), device="meta"))
        value = Value(spec.shape, "input", spec.name or f"input{len(self.inputs) + 1}", index=spec.index)
        value.root = value if spec.index else None
        self.inputs.append(value)
        self._bind(tensor, value)
        return tensor

    def _bind(self, tensor: Any, value: Value) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def value(self, tensor: Any) -> Value:
        """Return the value of a tensor; a tensor that no call returned is a constant."""
        known = self._values.get(id(tensor))
        if known is None:
            index = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
            known = Value(tuple(tensor.shape), "constant", "", index, static=True)
            self._bind(tensor, known)
        return known

    def is_tensor(self, argument: Any) -> bool:
        """Return True if an argument is a tensor."""
        return isinstance(argument, self.torch.Tensor)

    # The run.

    def run(self, tensors: Sequence[Any], names: Sequence[str | None]) -> list[Value]:
        """Run the module and return its outputs; raise SpecError if it reads the data of its tensors."""
        torch = self.torch
        buffers = {name: self._cast(buffer.to("meta")) for name, buffer in self.module.named_buffers()}
        state = self._weights | buffers
        positional = tuple(tensor for tensor, name in zip(tensors, names, strict=True) if name is None)
        keywords = {name: tensor for tensor, name in zip(tensors, names, strict=True) if name is not None}
        boxes = sampled_boxes(self.module, self.notes)
        with self._watched(), _without_checkpoints(self), boxes, torch.enable_grad():
            try:
                hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed)
                with hooks, self.counter, _recorder(self):
                    result = torch.func.functional_call(self.module, state, positional, keywords)
                kept = {key for key, _ in self.packed}
                for call, key in self._parts:
                    call.options["keeps_whole"] = key in kept
            except SpecError:
                raise
            except Exception as error:
                if not self._is_cut_at(error):
                    raise SpecError(_explained(error, self.stack)) from None
                return self._unread_values()
        leaves = [t for t in tensors_in(torch, result) if t.dtype.is_floating_point or t.dtype.is_complex]
        if not leaves:
            raise SpecError(f"the module returned no tensor of real numbers, but a {type(result).__name__}")
        return [self.value(tensor) for tensor in leaves]

    def _pack(self, tensor: Any) -> Any:
        self.packed.append((storage_key(tensor), tensor.untyped_storage().nbytes()))
        self._alive.append(tensor)
        return tensor

    def _is_cut_at(self, error: Exception) -> bool:
        """Return True if a detector failed where it selects boxes by their scores; the calls until then are the
        network."""
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        place = next((name for name in names if any(word in name for word in BOX_SELECTIONS)), None)
        if place is None or not any(call.flops for call in self.calls):
            return False
        self.notes.append(
            f"cut at {place}: the boxes that are kept depend on data; everything after this is not counted"
        )
        return True

    def _unread_values(self) -> list[Value]:
        """Return the values that no call has read."""
        read = {value for call in self.calls for value in call.inputs if value is not None}
        ends = [v for call in self.calls for v in call.outputs if v not in read and not (v.static or v.index)]
        if not ends:
            raise SpecError("the module computes no tensor before its path depends on data")
        return ends

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Install hooks that tell which module a call belongs to, for a ``with`` block."""
        handles = []
        for name, module in self.module.named_modules():
            if isinstance(module, self.torch.jit.ScriptModule):
                continue
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving(name), with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: Any, args: Any, kwargs: Any) -> None:
            tensors = tensors_in(self.torch, (args, kwargs))
            self.stack.append((name, self.value(tensors[0]) if tensors else None))

        return enter

    def _leaving(self, name: str) -> Callable[..., None]:
        def leave(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            taken = None
            while self.stack:
                path, taken = self.stack.pop()
                if path == name:
                    break
            tensors = tensors_in(self.torch, output)
            names = tuple(f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False))
            result = self.value(tensors[0]) if len(tensors) == 1 else None
            self.scopes.append(Scope(name, type(module).__name__, taken, result, names))

        return leave

    # Calls.

    def note(self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any, flops: float, mark: int) -> None:
        """Record a call that returned tensors; it saves the tensors that autograd packed since ``mark``."""
        outputs = tensors_in(self.torch, result)
        if not outputs:
            return
        arguments = tensors_in(self.torch, (args, kwargs))
        label, values = label_of(function), [self.value(tensor) for tensor in arguments]
        reading = torch_reading(Invocation(plain_name(label), args, kwargs, result, self))
        kind = "create" if not arguments and reading.kind == "unknown" else reading.kind
        if kind == "view" and len(outputs) == 1 and self._values.get(id(outputs[0])) in values:
            return
        path = self.stack[-1][0] if self.stack else ""
        if kind == "sdpa" and not reading.options.get("dropout_p"):
            reading.options["dropout_p"] = self._training_dropout(path)
        inputs = [] if kind == "create" else values if reading.inputs is None else reading.inputs
        shapes, options = [_described(tensor) for tensor in outputs], reading.options
        call = record(kind, label, inputs, shapes, options=options, flops=flops, path=path)
        if not hasattr(function, "_overloadpacket"):  # compiled code calls operators without autograd
            self._keep(call, arguments, outputs, mark)
            call.trains = any(tensor.requires_grad for tensor in outputs)
            call.stops = not call.trains and any(tensor.requires_grad for tensor in arguments)
        self.calls.append(call)
        if kind == "slice" and arguments and storage_key(outputs[0]) == storage_key(arguments[0]):
            self._parts.append((call, storage_key(outputs[0])))
        if len(self.calls) > MOST_CALLS:
            raise SpecError(f"more than {MOST_CALLS} calls in one pass; the module loops too long")
        for tensor, value in zip(outputs, call.outputs, strict=True):
            self._bind(tensor, value)
            if tensor._base is not None and _writes(label) and id(tensor._base) in self._values:
                self._rebind(tensor._base, value, label, path)

    def _rebind(self, base: Any, value: Value, label: str, path: str) -> None:
        """Give the source of a view a new value, because the view was written to."""
        old = self._values[id(base)]
        whole = record("copy", f"{label} of a view", [old, value], [(old.shape, old.index)], path=path, flops=0.0)
        whole.saved = frozenset()
        self.calls.append(whole)
        self._bind(base, whole.out)

    def _keep(self, call: Call, arguments: Sequence[Any], outputs: Sequence[Any], mark: int) -> None:
        """Record what autograd saves for the call: inputs and outputs by their storage, other tensors by size."""
        places: dict[int, list[Value]] = {}
        kept, more = set[Value](), 0
        complex_storages = {storage_key(tensor) for tensor in (*outputs, *arguments) if tensor.dtype.is_complex}
        for tensor, value in (*zip(outputs, call.outputs, strict=False), *((t, self.value(t)) for t in arguments)):
            is_expanded = int(tensor.numel() * tensor.element_size()) > int(tensor.untyped_storage().nbytes())
            if not is_expanded:
                places.setdefault(storage_key(tensor), []).append(value)
        for key, size in dict(self.packed[mark:]).items():
            if key in places:
                kept.update(places[key][:1] if _moves(places[key][0]) else places[key])
                more += size // 2 if key in complex_storages else 0  # counted as one element each until here
            elif key not in self._known_storages:
                more += size
                self._known_storages.add(key)
        call.saved, call.kept_elements = frozenset(kept), more / (FP32_BYTES // 2 if self.half else FP32_BYTES)

    def keep_function(self, call: Call, arguments: Sequence[Any], mark: int) -> None:
        """Add the tensors that an autograd function saves to those of its last call."""
        before, elements = call.saved or frozenset(), call.kept_elements
        self._keep(call, arguments, (), mark)
        call.saved, call.kept_elements = before | (call.saved or frozenset()), elements + call.kept_elements

    def _training_dropout(self, path: str) -> float:
        """Return the dropout rate of attention scores that a module has in training only."""
        module = self._modules.get(path)
        for name in ("attention_dropout", "dropout", "attn_dropout", "dropout_p"):
            rate = getattr(module, name, None)
            rate = getattr(rate, "p", rate)
            if isinstance(rate, float) and 0 < rate < 1:
                return rate
        return 0.0


def _moves(value: Value) -> bool:
    return not (value.static or value.index)


def _trainable(parameter: Any) -> bool:
    return bool(parameter.requires_grad) and (parameter.dtype.is_floating_point or parameter.dtype.is_complex)


def storage_key(tensor: Any) -> int:
    """Return the identity of a tensor's storage."""
    return int(tensor.untyped_storage()._cdata)


def _described(tensor: Any) -> tuple[tuple[int, ...], bool]:
    return tuple(tensor.shape), not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _writes(label: str) -> bool:
    """Return True if a function writes into one of its arguments."""
    return label.startswith(("__setitem__", "__i")) or (label.endswith("_") and not label.endswith("__"))


def grouped_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> float:
    """Return the FLOP of grouped products: (rows, k) with (groups, k, n), or (m, rows) with (rows, n)."""
    return 2.0 * float(left.numel()) * float(right.shape[-1])


def flop_formulas() -> dict[Any, Any]:
    """Return torch's FLOP formulas by operator, with formulas that torch lacks."""
    import torch
    from torch.utils.flop_counter import flop_registry

    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    return {**({grouped: grouped_flops} if grouped is not None else {}), **flop_registry}


def _flop_counter() -> Any:
    """Return a dispatch mode that adds up FLOP."""
    from torch.utils._python_dispatch import TorchDispatchMode

    formulas = flop_formulas()

    class Counter(TorchDispatchMode):  # type: ignore[misc]
        total = 0.0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            formula = formulas.get(function._overloadpacket)
            if formula is None:
                with self:
                    result = function.decompose(*args, **kwargs)
                return function(*args, **kwargs) if result is NotImplemented else result
            result = function(*args, **kwargs)
            self.total += float(formula(*args, **kwargs, out_val=result))
            return result

    return Counter()


def _formula_flops(function: Any, args: Any, kwargs: Any, result: Any) -> float:
    """Return the FLOP of an operator in compiled code, which the counter adds after the call."""
    formula = flop_formulas().get(getattr(function, "_overloadpacket", None))
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0


def _recorder(tape: Tape) -> Any:
    from torch.overrides import TorchFunctionMode

    class Recorder(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            answer = guessed(tape, function, args)
            if answer is not None:
                return answer
            label = label_of(function)
            read = getattr(function, "__name__", "") == "__get__" or label in _SILENT
            if (read and label not in _VIEWED) or getattr(function, "__name__", "") == "__set__":
                return function(*args, **kwargs)
            return self._noted(function, label, args, kwargs)

        def _noted(self, function: Any, label: str, args: Any, kwargs: Any) -> Any:
            if tape.all_meta and label in _CREATORS and kwargs.get("device") is None:
                kwargs = {**kwargs, "device": "meta"}
            before, mark = tape.counter.total, len(tape.packed)
            result = computed(tape, function, label, args, kwargs)
            flops = tape.counter.total - before or _formula_flops(function, args, kwargs, result)
            tape.note(function, args, kwargs, args[0] if label == "__setitem__" else result, flops, mark)
            return result

    return Recorder()


@contextlib.contextmanager
def _without_checkpoints(tape: Tape) -> Iterator[None]:
    """Record activation checkpoints and run their functions once, like all other code."""
    from torch.utils import checkpoint

    def noted(*args: Any, **kwargs: Any) -> Iterator[None]:
        tape.checkpointed.append(tape.stack[-1][0] if tape.stack else "")
        yield

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve: Any, *args: Any) -> Any:
            tape.checkpointed.append(tape.stack[-1][0] if tape.stack else "")
            return function(*args)

    names = {"_checkpoint_without_reentrant_generator": noted, "CheckpointFunction": Reentrant}
    old = {name: getattr(checkpoint, name) for name in names}
    try:
        for name, replacement in names.items():
            setattr(checkpoint, name, replacement)
        with _inside_functions(tape):
            yield
    finally:
        for name, replacement in old.items():
            setattr(checkpoint, name, replacement)


@contextlib.contextmanager
def _inside_functions(tape: Tape) -> Iterator[None]:
    """Run the calls inside a ``torch.autograd.Function`` without autograd.

    The outputs of the function show whether the calls are trained. Tensors that the function saves are counted with its
    last call.
    """
    function = tape.torch.autograd.Function
    original = function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        start, mark = len(tape.calls), len(tape.packed)
        result = original.__get__(None, cls)(*args, **kwargs)
        tensors = tensors_in(tape.torch, result)
        if any(tensor.requires_grad for tensor in tensors):
            for call in tape.calls[start:]:
                call.trains, call.stops = True, False
            if tape.calls[start:]:
                arguments = tensors_in(tape.torch, (args, kwargs))
                tape.keep_function(tape.calls[-1], arguments, mark)
            if any(call.flops for call in tape.calls[start:]):
                tape.notes.append(
                    f"the gradient of {cls.__name__} is custom code, counted as that of its matrix products"
                )
        return result

    function.apply = classmethod(apply)
    try:
        yield
    finally:
        function.apply = original


def _explained(error: Exception, stack: Sequence[tuple[str, Any]]) -> str:
    where = f" in {stack[-1][0] or 'the module'}" if stack else ""
    text = " ".join(str(error).split())[:300]
    if "meta" in text and any(word in text for word in ("item", "nonzero", "data-dependent", "local_scalar")):
        text += " (its path depends on the values of tensors; `paleo import hf` reads configurations of such models)"
    if "BatchedTensor" in text:
        text += " (torch.vmap hides the calls that it maps; write them over a batch)"
    return f"the forward pass failed{where}: {type(error).__name__}: {text}"


def tensors_in(torch: Any, tree: Any) -> list[Any]:
    """Return all tensors in nested lists, tuples, mappings and model outputs, each once."""
    tensors: dict[int, Any] = {}
    stack = [tree]
    while stack:
        branch = stack.pop()
        if isinstance(branch, torch.Tensor):
            tensors[id(branch)] = branch
        elif isinstance(branch, Mapping):
            stack.extend(reversed(list(branch.values())))
        elif isinstance(branch, list | tuple):
            stack.extend(reversed(branch))
        elif hasattr(branch, "__dataclass_fields__") and not isinstance(branch, type):
            stack.extend(reversed([getattr(branch, name, None) for name in branch.__dataclass_fields__]))
    return list(tensors.values())
