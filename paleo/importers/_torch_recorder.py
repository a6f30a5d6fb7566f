"""Recorder of a torch module: it runs once on the meta device, where tensors have no data, and every call is recorded.

The calls are those of torch's own functions (linear, conv2d, scaled_dot_product_attention, …) as the module makes them,
so nothing has to be compiled or exported. torch's FLOP formulas are applied inside every call, so that a call without a
rule still has its FLOP. autograd tells what every call saves for the backward pass.

Modules that read the data of tensors get answers, since the meta device has no data. Masks are full, conditions are
false, no box is suppressed, tensors of one shape are equal, and tokens are spread evenly over experts. Detectors select
boxes by their scores. One-stage detectors are cut at this point. In two-stage detectors of torchvision the second stage
runs with as many boxes for each image as in training (Ren et al., Faster R-CNN, 2015, section 3.1.3; He et al., Mask
R-CNN, 2017, section 3.1).
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from paleo.errors import SpecError
from paleo.importers._builder import TorchInvocation, base_operator_name, read_torch_call
from paleo.importers._network_trace import InputSpec, ModuleCall, TracedCall, TracedTensor, make_call

#: Functions that select boxes by their scores.
_BOX_SELECTION_FUNCTIONS = (
    "nms", "postprocess", "post_process", "filter_proposals", "select_training_samples", "keypointrcnn_inference",
)  # fmt: skip


def _active_box_selector() -> str | None:
    """Return the name of the detector function on the Python call stack that selects boxes by score.

    Returns None if there is none.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if _selects_boxes(frame.f_code.co_name):
            return frame.f_code.co_name
        frame = frame.f_back  # type: ignore[assignment]
    return None


def _selects_boxes(name: str) -> bool:
    return any(word in name for word in _BOX_SELECTION_FUNCTIONS)


@contextlib.contextmanager
def _fixed_training_box_counts(module: Any, notes: list[str]) -> Iterator[None]:
    """Make a torchvision detector keep a fixed number of boxes per image inside a ``with`` block.

    The number is that which the detector samples in training. ``notes`` gets a sentence on this assumption.
    """
    stage = next((part for part in module.modules() if type(part).__name__ == "RoIHeads"), None)
    network = next((part for part in module.modules() if type(part).__name__ == "RegionProposalNetwork"), None)
    sampler = getattr(stage, "fg_bg_sampler", None)
    if stage is None or network is None or sampler is None:
        yield
        return
    boxes = int(sampler.batch_size_per_image)
    positive = int(boxes * sampler.positive_fraction)

    def proposed(proposals: Any, objectness: Any, sizes: Any, anchors: Any) -> Any:
        return list(proposals[:, :boxes].unbind(0)), None

    def detected(logits: Any, regression: Any, proposals: Any, sizes: Any) -> Any:
        whole = logits.new_zeros(positive)
        return [each[:positive] for each in proposals], [whole] * len(sizes), [whole.long()] * len(sizes)

    notes.append(f"each image has {boxes} boxes, {positive} of them on objects, as training samples them")
    network.filter_proposals, stage.postprocess_detections = proposed, detected
    try:
        yield
    finally:
        del network.filter_proposals, stage.postprocess_detections


#: Functions that select experts by their scores, one row for each token.
_ROUTERS = frozenset({"topk", "argmax", "max", "argsort", "sort"})
_INDEX_FUNCTIONS = frozenset({"nonzero", "where", "argwhere"})
#: Functions whose answer is guessed, as it depends on the data of a tensor; also those whose name ends in nms.
_GUESSED_FUNCTIONS = frozenset({"tolist", "equal", "item", "__bool__", "__contains__"})


class GuessingTracer(Protocol):
    """Protocol of a tracer that guesses data-dependent values: traced tensors, probe sizes, and notes for the user."""

    torch: Any
    probe_size_by_dim: Mapping[str, int]
    notes: list[str]

    def value(self, tensor: Any) -> TracedTensor: ...

    def is_tensor(self, argument: Any) -> bool: ...


def function_name(function: Any) -> str:
    """Return the name of a torch function; for a property such as ``T``, the property's name."""
    name = getattr(function, "__name__", "") or str(function)
    if name == "__get__":
        return str(getattr(getattr(function, "__self__", None), "__name__", name))
    return str(name)


def _run_on_meta(tape: GuessingTracer, function: Any, label: str, args: Any, kwargs: Any) -> Any:
    """Run a torch call on the meta device (tensors without data), with guesses where the result depends on data.

    A boolean mask selects everything, or the share of tokens that an expert gets. A grouped product for which torch has
    no kernel (fp32, sizes that are no multiple of 16 bytes) is computed as one product with the same FLOP.
    """
    if label in ("__getitem__", "__setitem__") and (mask := _mask(tape, args[1])) is not None:
        rows = _true_count(tape, mask)
        return _all_selected(args[0], args[1], mask, rows) if label == "__getitem__" else None
    if label in _INDEX_FUNCTIONS and len(args) == 1 and tape.is_tensor(args[0]) and args[0].device.type == "meta":
        return _true_indices(tape, args[0], label == "where" or bool(kwargs.get("as_tuple")))
    try:
        return function(*args, **kwargs)
    except RuntimeError:
        if "grouped_mm" not in label or len(args) < 2 or args[1].dim() != 3:
            raise
        return args[0] @ (args[1] if args[0].dim() == 3 else args[1][0])


def _true_indices(tape: GuessingTracer, mask: Any, by_dim: bool) -> Any:
    """Return the indices of the assumed true elements of a mask, as a tensor (n, dims) or a tuple of tensors by dim.

    A mask with one element for each expert says which experts have tokens: all of them.
    """
    router = _router_sizes(tape, mask)
    if router is not None and tuple(mask.shape) == (router[0],) and not by_dim:
        return tape.torch.arange(router[0])[:, None]
    rows = _true_count(tape, mask)
    if by_dim:
        return tuple(tape.torch.zeros(rows, dtype=tape.torch.int64, device="meta") for _ in range(mask.dim()))
    return tape.torch.zeros(rows, mask.dim(), dtype=tape.torch.int64, device="meta")


def _true_count(tape: GuessingTracer, mask: Any) -> int:
    """Return the assumed number of true elements of a mask: an expert's even share of tokens, otherwise all.

    SpecError is raised if the probe sizes do not divide evenly; the next attempt uses the stated sizes.
    """
    router, total = _router_sizes(tape, mask), int(mask.numel())
    if router is None:
        if (name := _active_box_selector()) is not None:
            raise RuntimeError(f"{name} chooses boxes by their values")
        tape.notes.append("masks that select rows are taken to select all of them")
        return total
    return math.ceil(_tokens_per_expert(tape, router, total))


def _tokens_per_expert(tape: GuessingTracer, router: tuple[int, int], total: int) -> float:
    """Return the number of tokens of one expert if ``total`` tokens spread evenly; ``router`` is (experts, choices)."""
    experts, choices = router
    tape.notes.append(f"tokens are taken to spread evenly over {experts} experts")
    rows = min(float(total), choices / experts)
    unit = math.prod(probe for probe in tape.probe_size_by_dim.values() if total % probe == 0)
    if unit > 1 and rows % unit:
        raise SpecError(f"{choices} choices of {experts} experts do not spread evenly at these sizes")
    return rows


def _router_sizes(tape: GuessingTracer, mask: Any) -> tuple[int, int] | None:
    """Return (number of experts, number of routing choices) behind a mask of tokens.

    Returns None if no top-k choice made the mask.
    """
    stack, seen = [tape.value(mask)], set[TracedTensor]()
    while stack:
        value = stack.pop()
        call = value.producing_call
        if call is None or value in seen:
            continue
        seen.add(value)
        if call.source_name == "one_hot" and call.out.shape[-1] > 1:
            return call.out.shape[-1], call.out.elements // call.out.shape[-1]
        # A call that selects some of the scores in each row.
        scores = call.input(0)
        chooses = call.source_name in _ROUTERS and call.outputs[-1].is_integer
        if chooses and scores is not None and not scores.is_integer and scores.shape and scores.shape[-1] > 1:
            return scores.shape[-1], call.outputs[-1].elements
        stack.extend(source for source in call.tensors if not source.is_activation)
    return None


def _mask(tape: GuessingTracer, index: Any) -> Any:
    """Return the boolean mask in an index expression ``tensor[index]``.

    Returns None unless the expression has exactly one mask besides slices and positions.
    """
    entries = index if isinstance(index, tuple) else (index,)
    masks = [entry for entry in entries if tape.is_tensor(entry)]
    plain = all(tape.is_tensor(entry) or isinstance(entry, slice | int) or entry is Ellipsis for entry in entries)
    single = len(masks) == 1 and masks[0].dtype == tape.torch.bool and masks[0].device.type == "meta"
    return masks[0] if single and plain and masks[0].dim() else None


def _all_selected(tensor: Any, index: Any, mask: Any, rows: int) -> Any:
    """Return a tensor with the shape of ``tensor[mask]`` if ``rows`` elements of the mask are true.

    The dims of the mask are joined to one, of size ``rows``.
    """
    entries = list(index) if isinstance(index, tuple) else [index]
    place = next(i for i, entry in enumerate(entries) if entry is mask)
    before, behind = entries[:place], entries[place + 1 :]
    start = tensor.dim() - mask.dim() - len(behind) if Ellipsis in before else place
    flat = tensor.flatten(start, start + mask.dim() - 1)
    return flat[(*before, slice(None) if rows == mask.numel() else slice(rows), *behind)]


def _guess_tensor_value(tape: GuessingTracer, function: Any, args: Any) -> Any:
    """Return an assumed value for a torch call that needs tensor data, which the meta device does not have.

    Returns None if the call does not ask for values. Attention masks are taken to hide nothing, there is no padding,
    and every expert has tokens.
    """
    label = function_name(function)
    if not (label in _GUESSED_FUNCTIONS or label.endswith("nms")):
        return None
    if not args or not tape.is_tensor(args[0]) or args[0].device.type != "meta":
        return None
    if label == "tolist" and args[0].dim() == 1:
        return _tokens_of_rows(tape, args[0])
    if label.endswith("nms"):
        tape.notes.append("non-maximum suppression is taken to suppress nothing")
        return tape.torch.zeros(args[0].shape[0], dtype=tape.torch.int64, device="meta")
    if label == "equal":
        return args[0].shape == args[1].shape
    if label == "__contains__":
        return False
    if label == "tolist" or args[0].dtype != tape.torch.bool:
        return None
    maker = tape.value(args[0]).producing_call
    if maker is None or maker.source_name not in ("all", "any"):
        tape.notes.append("a condition on the values of tensors is taken to be false; its other path is not counted")
        return False
    return maker.source_name == "all" or _router_sizes(tape, args[0]) is not None


def _tokens_of_rows(tape: GuessingTracer, tokens: Any) -> list[int] | None:
    """Return the tokens of each expert, or of each row of a mask, if the tensor counts them; otherwise None."""
    router = _router_sizes(tape, tokens)
    if router is not None and tokens.shape[0] == router[0]:
        experts, choices = router
        share = int(_tokens_per_expert(tape, router, choices))
        return [share + (index < choices - share * experts) for index in range(experts)]
    maker = tape.value(tokens).producing_call
    mask = maker.inputs[0] if maker is not None and maker.source_name == "sum" else None
    if mask is None or not mask.is_integer or mask.source_input is None or mask.shape[:-1] != tuple(tokens.shape):
        return None
    return [mask.shape[-1]] * tokens.shape[0]


_MAX_RECORDED_CALLS = 400_000
#: Bytes of an fp32 number, the unit in which saved elements are counted.
_FP32_BYTES = 4
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


class TorchCallRecorder:
    """Tracer that runs a torch module on the meta device and records every torch call."""

    def __init__(
        self, torch: Any, module: Any, probes: Mapping[str, int], *, all_meta: bool, half: bool = False
    ) -> None:
        self.torch, self.module, self.probe_size_by_dim, self.all_meta = torch, module, probes, all_meta
        #: True to use bf16 instead of fp32, for kernels that only accept 16-bit numbers.
        self.half = half
        self._modules = dict(module.named_modules())
        self.calls: list[TracedCall] = []
        self.inputs: list[TracedTensor] = []
        self.scopes: list[ModuleCall] = []
        self.notes: list[str] = []
        self.checkpointed: list[str] = []
        self.stack: list[tuple[str, TracedTensor | None]] = []
        #: Storages that autograd saves with their bytes, in order.
        self.packed: list[tuple[int, int]] = []
        #: Calls whose outputs are parts of a tensor in the same storage, with that tensor.
        self._parts: list[tuple[TracedCall, int]] = []
        self.counter = _flop_counter()
        self._values: dict[int, TracedTensor] = {}
        self._alive: list[Any] = []
        self._weights = {
            name: self._cast(parameter.detach().to("meta")).requires_grad_(_trainable(parameter))
            for name, parameter in module.named_parameters()
        }
        self._known_storages = {_storage_key(weight) for weight in self._weights.values()}
        for name, weight in self._weights.items():
            names = frozenset({name})
            self._bind(weight, TracedTensor(tuple(weight.shape), "parameter", name, False, True, names))

    def _cast(self, tensor: Any) -> Any:
        return tensor.to(self.torch.bfloat16) if self.half and tensor.dtype == self.torch.float32 else tensor

    # Values.

    def add_input(self, spec: InputSpec) -> Any:
        """Return a tensor without data for one network input, and record it as an input of the trace."""
        tensor = self._cast(self.torch.zeros(spec.shape, dtype=getattr(self.torch, spec.dtype), device="meta"))
        value = TracedTensor(spec.shape, "input", spec.name or f"input{len(self.inputs) + 1}", spec.is_integer)
        value.source_input = value if spec.is_integer else None
        self.inputs.append(value)
        self._bind(tensor, value)
        return tensor

    def _bind(self, tensor: Any, value: TracedTensor) -> None:
        self._values[id(tensor)] = value
        self._alive.append(tensor)

    def value(self, tensor: Any) -> TracedTensor:
        """Return the traced value of a torch tensor; a tensor that no recorded call returned is a constant."""
        known = self._values.get(id(tensor))
        if known is None:
            shape, index = _described(tensor)
            known = TracedTensor(shape, "constant", "", index, is_static=True)
            self._bind(tensor, known)
        return known

    def is_tensor(self, argument: Any) -> bool:
        """Return True if an argument is a tensor."""
        return isinstance(argument, self.torch.Tensor)

    # The run.

    def run(self, tensors: Sequence[Any], names: Sequence[str | None]) -> list[TracedTensor]:
        """Run the module on its inputs and return the traced outputs.

        Raise SpecError if the module reads the data of tensors.
        """
        torch = self.torch
        buffers = {name: self._cast(buffer.to("meta")) for name, buffer in self.module.named_buffers()}
        state = self._weights | buffers
        positional = tuple(tensor for tensor, name in zip(tensors, names, strict=True) if name is None)
        keywords = {name: tensor for tensor, name in zip(tensors, names, strict=True) if name is not None}
        boxes = _fixed_training_box_counts(self.module, self.notes)
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
                if not self._failed_at_box_selection(error):
                    raise SpecError(_explained(error, self.stack)) from None
                return self._unread_values()
        leaves = [tensor for tensor in tensors_in(torch, result) if not _described(tensor)[1]]
        if not leaves:
            raise SpecError(f"the module returned no tensor of real numbers, but a {type(result).__name__}")
        return [self.value(tensor) for tensor in leaves]

    def _pack(self, tensor: Any) -> Any:
        self.packed.append((_storage_key(tensor), tensor.untyped_storage().nbytes()))
        self._alive.append(tensor)
        return tensor

    def _failed_at_box_selection(self, error: Exception) -> bool:
        """Return True if an error arose where a detector selects boxes by score, which needs tensor data.

        The calls until then count as the network.
        """
        names = (frame.name for frame in traceback.extract_tb(error.__traceback__))
        place = next(filter(_selects_boxes, names), None)
        if place is None or not any(call.flops for call in self.calls):
            return False
        reason = "the boxes that are kept depend on data"
        self.notes.append(f"cut at {place}: {reason}; everything after this is not counted")
        return True

    def _unread_values(self) -> list[TracedTensor]:
        """Return the traced activations that no call has read, as outputs of a network whose run stopped early."""
        read = {value for call in self.calls for value in call.tensors}
        ends = [v for call in self.calls for v in call.outputs if v.is_activation and v not in read]
        if not ends:
            raise SpecError("the module computes no tensor before its path depends on data")
        return ends

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Install module hooks inside a ``with`` block, so that each recorded call knows its module."""
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
            self.scopes.append(ModuleCall(name, type(module).__name__, taken, result, names))

        return leave

    # Calls.

    def record_call(
        self, function: Any, args: Any, kwargs: Mapping[str, Any], result: Any, flops: float, mark: int
    ) -> None:
        """Record a torch call that returned tensors, with its FLOP and the tensors that autograd saves.

        ``mark`` is the number of tensors that autograd had packed before the call.
        """
        outputs = tensors_in(self.torch, result)
        if not outputs:
            return
        arguments = tensors_in(self.torch, (args, kwargs))
        label, values = function_name(function), [self.value(tensor) for tensor in arguments]
        reading = read_torch_call(TorchInvocation(base_operator_name(label), args, kwargs, result, self))
        kind = "create" if not arguments and reading.kind == "unknown" else reading.kind
        if kind == "view" and len(outputs) == 1 and self._values.get(id(outputs[0])) in values:
            return
        path = self.stack[-1][0] if self.stack else ""
        if kind == "sdpa" and not reading.options.get("dropout_p"):
            reading.options["dropout_p"] = self._training_dropout(path)
        inputs = [] if kind == "create" else values if reading.inputs is None else reading.inputs
        shapes, options = [_described(tensor) for tensor in outputs], reading.options
        call = make_call(kind, label, inputs, shapes, options=options, flops=flops, path=path)
        if not hasattr(function, "_overloadpacket"):  # compiled code calls operators without autograd
            self._keep(call, arguments, outputs, mark)
            call.trains_weights = any(tensor.requires_grad for tensor in outputs)
            call.stops_gradient = not call.trains_weights and any(tensor.requires_grad for tensor in arguments)
        self.calls.append(call)
        if kind == "slice" and arguments and _storage_key(outputs[0]) == _storage_key(arguments[0]):
            self._parts.append((call, _storage_key(outputs[0])))
        if len(self.calls) > _MAX_RECORDED_CALLS:
            raise SpecError(f"more than {_MAX_RECORDED_CALLS} calls in one pass; the module loops too long")
        for tensor, value in zip(outputs, call.outputs, strict=True):
            self._bind(tensor, value)
            if tensor._base is not None and _writes(label) and id(tensor._base) in self._values:
                self._rebind(tensor._base, value, label, path)

    def _rebind(self, base: Any, value: TracedTensor, label: str, path: str) -> None:
        """Record that an in-place write into a view has changed the base tensor ``base``."""
        old = self._values[id(base)]
        shapes = [(old.shape, old.is_integer)]
        whole = make_call("copy", f"{label} of a view", [old, value], shapes, path=path, flops=0.0)
        whole.saved_tensors = frozenset()
        self.calls.append(whole)
        self._bind(base, whole.out)

    def _keep(self, call: TracedCall, arguments: Sequence[Any], outputs: Sequence[Any], mark: int) -> None:
        """Record what autograd saves for a call: inputs and outputs by their storage, other tensors by size."""
        places: dict[int, list[TracedTensor]] = {}
        kept, more = set[TracedTensor](), 0
        complex_storages = {_storage_key(tensor) for tensor in (*outputs, *arguments) if tensor.dtype.is_complex}
        for tensor, value in (*zip(outputs, call.outputs, strict=False), *((t, self.value(t)) for t in arguments)):
            if int(tensor.numel() * tensor.element_size()) <= int(tensor.untyped_storage().nbytes()):  # not expanded
                places.setdefault(_storage_key(tensor), []).append(value)
        for key, size in dict(self.packed[mark:]).items():
            if key in places:
                kept.update(places[key][:1] if places[key][0].is_activation else places[key])
                more += size // 2 if key in complex_storages else 0  # counted as one element each until here
            elif key not in self._known_storages:
                more += size
                self._known_storages.add(key)
        call.saved_tensors = frozenset(kept)
        call.saved_temporary_elements = more / (_FP32_BYTES // 2 if self.half else _FP32_BYTES)

    def record_saved_tensors(self, call: TracedCall, arguments: Sequence[Any], mark: int) -> None:
        """Add the tensors that a ``torch.autograd.Function`` saves to the saved tensors of the recorded ``call``."""
        before, elements = call.saved_tensors or frozenset(), call.saved_temporary_elements
        self._keep(call, arguments, (), mark)
        call.saved_tensors = before | (call.saved_tensors or frozenset())
        call.saved_temporary_elements += elements

    def _training_dropout(self, path: str) -> float:
        """Return the dropout rate of attention scores in training, for the module at ``path``.

        Dropout is off while the module is traced.
        """
        module = self._modules.get(path)
        for name in ("attention_dropout", "dropout", "attn_dropout", "dropout_p"):
            rate = getattr(module, name, None)
            rate = getattr(rate, "p", rate)
            if isinstance(rate, float) and 0 < rate < 1:
                return rate
        return 0.0


def _trainable(parameter: Any) -> bool:
    return bool(parameter.requires_grad) and (parameter.dtype.is_floating_point or parameter.dtype.is_complex)


def _storage_key(tensor: Any) -> int:
    """Return a number that is equal for tensors that share a storage."""
    return int(tensor.untyped_storage()._cdata)


def _described(tensor: Any) -> tuple[tuple[int, ...], bool]:
    return tuple(tensor.shape), not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def _writes(label: str) -> bool:
    """Return True if the torch function ``label`` works in place, on one of its arguments."""
    return label.startswith(("__setitem__", "__i")) or (label.endswith("_") and not label.endswith("__"))


def _grouped_gemm_flops(left: Any, right: Any, *args: Any, **kwargs: Any) -> float:
    """Return the FLOP of a grouped matrix product: (rows, k) with (groups, k, n), or (m, rows) with (rows, n)."""
    return 2.0 * float(left.numel()) * float(right.shape[-1])


def _flop_formulas() -> dict[Any, Any]:
    """Return a dict from torch operators to functions that count their FLOP, with some that torch's registry lacks."""
    import torch
    from torch.utils.flop_counter import flop_registry

    grouped = getattr(torch.ops.aten, "_grouped_mm", None)
    return {**({grouped: _grouped_gemm_flops} if grouped is not None else {}), **flop_registry}


def _flop_counter() -> Any:
    """Return a torch dispatch mode that adds up the FLOP of the operators that run inside it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    formulas = _flop_formulas()

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
    """Return the FLOP of one operator call inside compiled code."""
    formula = _flop_formulas().get(getattr(function, "_overloadpacket", None))
    return float(formula(*args, **kwargs, out_val=result)) if formula is not None else 0.0


def _recorder(tape: TorchCallRecorder) -> Any:
    from torch.overrides import TorchFunctionMode

    class Recorder(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            answer = _guess_tensor_value(tape, function, args)
            if answer is not None:
                return answer
            label = function_name(function)
            read = getattr(function, "__name__", "") == "__get__" or label in _SILENT
            if (read and label not in _VIEWED) or getattr(function, "__name__", "") == "__set__":
                return function(*args, **kwargs)
            return self._noted(function, label, args, kwargs)

        def _noted(self, function: Any, label: str, args: Any, kwargs: Any) -> Any:
            if tape.all_meta and label in _CREATORS and kwargs.get("device") is None:
                kwargs = {**kwargs, "device": "meta"}
            before, mark = tape.counter.total, len(tape.packed)
            result = _run_on_meta(tape, function, label, args, kwargs)
            flops = tape.counter.total - before or _formula_flops(function, args, kwargs, result)
            tape.record_call(function, args, kwargs, args[0] if label == "__setitem__" else result, flops, mark)
            return result

    return Recorder()


@contextlib.contextmanager
def _without_checkpoints(tape: TorchCallRecorder) -> Iterator[None]:
    """Run functions under activation checkpointing only once, inside ``with``, and record their modules on the tape."""
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
def _inside_functions(tape: TorchCallRecorder) -> Iterator[None]:
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
                call.trains_weights, call.stops_gradient = True, False
            if tape.calls[start:]:
                arguments = tensors_in(tape.torch, (args, kwargs))
                tape.record_saved_tensors(tape.calls[-1], arguments, mark)
            if any(call.flops for call in tape.calls[start:]):
                note = "is custom code, counted as that of its matrix products"
                tape.notes.append(f"the gradient of {cls.__name__} {note}")
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
