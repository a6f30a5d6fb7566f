"""Rules that read functions of torch and operators of ONNX; they are found by folder.

``operators/_table.py`` states for most of them which kind of call they are, with one row for each kind. The other files
of ``paleo/importers/operators`` have rules for calls whose arguments decide (``TORCH``, ``ONNX``), and say which layers
a kind of call becomes (``TRANSLATIONS``). A rule for another function is a row, or one more file there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from paleo.importers._builder import Builder
from paleo.importers._trace import Call, Value
from paleo.registry import Registry

OPERATORS = "paleo.importers.operators"
Rule = TypeVar("Rule", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Reading:
    """A call in Paleo's terms: its kind, its inputs (None: all tensors of the call, in order) and its options."""

    kind: str
    inputs: list[Value | None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Values(Protocol):
    """Source of the trace values of tensors."""

    def value(self, tensor: Any) -> Value: ...

    def is_tensor(self, argument: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call of a torch function: its name without underscores, its arguments and its result."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any
    values: Values

    def bound(self, *names: str) -> dict[str, Any]:
        """Return the arguments by these names, in the order of the signature."""
        return dict(zip(names, self.args, strict=False)) | {k: v for k, v in self.kwargs.items() if k in names}

    def tensor(self, argument: Any) -> Value | None:
        """Return the value of an argument, or None if it is no tensor."""
        return self.values.value(argument) if self.values.is_tensor(argument) else None

    def reading(self, kind: str, names: Sequence[str], tensors: Sequence[str], **more: Any) -> Reading:
        """Make a reading with arguments by name: ``tensors`` as inputs, the others as options."""
        arguments = self.bound(*names)
        inputs = [self.tensor(arguments.get(name)) for name in tensors]
        return Reading(kind, inputs, {k: v for k, v in arguments.items() if k not in tensors} | more)

    def joins_tensors(self) -> bool:
        """Return True if the first two arguments are tensors."""
        return len(self.args) >= 2 and all(self.values.is_tensor(argument) for argument in self.args[:2])


Numbers = list[float]


@dataclass(frozen=True, slots=True)
class OnnxNode:
    """A node of an ONNX file: operator, inputs, attributes, and the values of small constant inputs."""

    name: str
    inputs: list[Value | None]
    options: Mapping[str, Any]
    numbers: Sequence[Numbers | None]

    def input(self, place: int) -> Value | None:
        """Return the input at a position, or None if it is omitted."""
        return self.inputs[place] if len(self.inputs) > place else None


TorchRule = Callable[[Invocation], Reading]
OnnxRule = Callable[[OnnxNode], Reading]
Translation = Callable[[Builder, Call], None]
TORCH: Registry[TorchRule] = Registry("torch function", OPERATORS)
ONNX: Registry[OnnxRule] = Registry("ONNX operator", OPERATORS)
TRANSLATIONS: Registry[Translation] = Registry("kind of call", OPERATORS)


def torch_functions(names: str) -> Callable[[TorchRule], TorchRule]:
    """Register a rule for these functions; names are separated by spaces."""
    return _several(TORCH, names)


def onnx_operators(names: str) -> Callable[[OnnxRule], OnnxRule]:
    """Register a rule for these operators; names are separated by spaces."""
    return _several(ONNX, names)


def translates(kinds: str) -> Callable[[Translation], Translation]:
    """Register a translation of these kinds of calls; names are separated by spaces."""
    return _several(TRANSLATIONS, kinds)


def _several(registry: Registry[Rule], names: str) -> Callable[[Rule], Rule]:
    def add(rule: Rule) -> Rule:
        for name in names.split():
            registry.register(name)(rule)
        return rule

    return add


_INVERTED = ("add", "sub", "mul", "truediv", "div", "pow", "matmul", "floordiv", "mod", "and", "or", "xor")
_SAME = {"truediv": "div", "true_divide": "div", "divide": "div", "subtract": "sub", "multiply": "mul"}


def plain_name(label: str) -> str:
    """Return ``add`` for ``add_``, ``__add__``, ``__iadd__`` and ``__radd__``; known names stay as they are.

    >>> plain_name("__iadd__"), plain_name("__rtruediv__"), plain_name("relu_")
    ('add', 'div', 'relu')
    """
    label = label.partition(".")[0] if not label.startswith("_") else label
    if label in TORCH:
        return label
    name = label.strip("_") or label
    if label.startswith("__") and name[0] in "ir" and name[1:] in _INVERTED:
        name = name[1:]
    return _SAME.get(name, name)


def torch_reading(invocation: Invocation) -> Reading:
    """Read a torch call by the rule of its function.

    The kind is ``create`` for a call without tensor arguments, and ``unknown`` if there is no rule.
    """
    if invocation.name in TORCH:
        return TORCH[invocation.name](invocation)
    return Reading("unknown")


def onnx_reading(node: OnnxNode) -> Reading:
    """Read an ONNX node by the rule of its operator; the kind is ``unknown`` if there is none."""
    return ONNX[node.name](node) if node.name in ONNX else Reading("unknown", node.inputs)
