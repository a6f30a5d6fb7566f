"""Element-wise functions that layers stand for: activations, softmax, dropout, sums and products of two tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paleo.importers.builder import UntranslatableError
from paleo.importers.operators.passes import memory_pass
from paleo.importers.rules import Reading, onnx_operators, torch_functions, translates
from paleo.importers.trace import dropout_rate
from paleo.layers.base import ACTIVATIONS, LAYERS

if TYPE_CHECKING:
    from paleo.importers.builder import Builder, Placed
    from paleo.importers.rules import Invocation, OnnxNode
    from paleo.importers.trace import Call, Value

_TORCH = {
    "relu": "relu", "relu6": "relu6", "leaky_relu": "leaky_relu", "sigmoid": "sigmoid", "tanh": "tanh", "gelu": "gelu",
    "silu": "silu", "hardswish": "hard_swish", "elu": "elu", "softplus": "softplus", "hardsigmoid": "sigmoid",
    "mish": "silu", "hardtanh": "relu6", "selu": "elu", "celu": "elu",
    "logsigmoid": "softplus", "log_sigmoid": "softplus",
}  # fmt: skip
_ONNX = {
    "Relu": "relu", "Sigmoid": "sigmoid", "Tanh": "tanh", "LeakyRelu": "leaky_relu", "Elu": "elu", "Selu": "elu",
    "Celu": "elu", "Softplus": "softplus", "HardSwish": "hard_swish", "HardSigmoid": "sigmoid", "Gelu": "gelu",
    "Mish": "silu", "Swish": "silu", "ThresholdedRelu": "relu", "QuickGelu": "silu", "FastGelu": "gelu",
    "BiasGelu": "gelu", "Clip": "relu6",
}  # fmt: skip


@torch_functions(" ".join(_TORCH))
def _activation(call: Invocation) -> Reading:
    return Reading("activation", None, {"function": _TORCH[call.name]})


@onnx_operators(" ".join(_ONNX))
def _onnx_activation(node: OnnxNode) -> Reading:
    return Reading("activation", node.inputs[:1], {"function": _ONNX[node.name]})


@torch_functions("add")
def _add(call: Invocation) -> Reading:
    return Reading("add" if call.joins_tensors() else "elementwise")


@torch_functions("mul")
def _mul(call: Invocation) -> Reading:
    return Reading("multiply" if call.joins_tensors() else "elementwise")


@onnx_operators("Add Mul")
def _onnx_join(node: OnnxNode) -> Reading:
    return Reading("add" if node.name == "Add" else "multiply", node.inputs)


@torch_functions("softmax log_softmax softmin gumbel_softmax")
def _softmax(call: Invocation) -> Reading:
    return call.reading("softmax", ("input", "dim"), ("input",))


@onnx_operators("Softmax LogSoftmax")
def _onnx_softmax(node: OnnxNode) -> Reading:
    return Reading("softmax", node.inputs[:1])


@torch_functions("dropout alpha_dropout feature_alpha_dropout feature_dropout dropout1d dropout2d dropout3d")
def _dropout(call: Invocation) -> Reading:
    return call.reading("dropout", ("input", "p"), ("input",))


@onnx_operators("Dropout")
def _onnx_dropout(node: OnnxNode) -> Reading:
    return Reading("dropout", node.inputs[:1], {"p": node.options.get("ratio", 0.5)})


# Layers.


@translates("activation")
def activation(b: Builder, call: Call) -> None:
    """An element-wise function. States ``keeps: input`` if autograd keeps the input, or a copy of an input that is
    overwritten, of a function that usually keeps its output."""
    (x,) = b.moving(call)[:1]
    function = call.options["function"]
    if function not in LAYERS:
        raise UntranslatableError(function)
    kept = call.saved
    other = kept is not None and call.out not in kept and bool(kept or call.kept_elements >= call.out.elements)
    other = other and ACTIVATIONS[function][1] == "output"
    b.put(call.out, b.add(function, {"keeps": "input"} if other else {}, [x], call.path))


@translates("softmax")
def softmax(b: Builder, call: Call) -> None:
    """Over rows."""
    b.put(call.out, b.add("softmax", {}, [b.at(call.inputs[0])], call.path))


@translates("dropout")
def dropout(b: Builder, call: Call) -> None:
    """A mask, and a product with it; nothing at a rate of zero."""
    x = b.at(call.inputs[0])
    rate = dropout_rate(call.options.get("p", 0.5))
    if not rate:
        b.placed[call.out] = x
        return
    b.put(call.out, b.add("dropout", {"rate": rate}, [x], call.path))


@translates("add multiply")
def join(b: Builder, call: Call) -> None:
    """Two tensors element by element, or one and something learned."""
    values = [value for value in call.inputs if value is not None]
    moving = [b.at(value) for value in values if not value.static and not value.index]
    exact = len(moving) == 2 and len({len(source.tensor.dims) for source in moving}) == 1
    largest = max((source.tensor for source in moving), key=lambda tensor: tensor.elements, default=None)
    keeps_both = call.kind == "add" or call.saved is None or all(v in call.saved for v in values if not v.static)
    whole = largest is not None and largest.sizes == call.out.shape and not b.parameters(values)
    if exact and keeps_both and whole:
        b.put(call.out, b.add(call.kind, {}, moving, call.path))
        return
    if not _positions(b, call, moving, values):
        memory_pass(b, call, "elementwise")


def _positions(b: Builder, call: Call, moving: Sequence[Placed], values: Sequence[Value]) -> bool:
    """Whether a learned table of positions is added to a sequence."""
    table = next((value for value in values if value.static and len(value.sources) == 1), None)
    if call.kind != "add" or len(moving) != 1 or table is None or not b.parameters([table]):
        return False
    x = moving[0].tensor
    if len(x.dims) != 3 or x.sizes != call.out.shape or table.elements != x.sizes[1] * x.sizes[2]:
        return False
    rows, left = divmod(b.parameters([table]), int(x.sizes[2]))
    if left or rows < x.sizes[1]:
        return False
    same = "seq" in b.trace.probes and rows > x.sizes[1]
    options: dict[str, Any] = {"positions": rows} if same or rows != x.sizes[1] else {}
    b.put(call.out, b.add("position_embedding", options, moving, call.path))
    return True
