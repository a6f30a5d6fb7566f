"""Traces, the common form in which importers read a network: values with shapes, and calls in order of execution."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

Shape = tuple[int, ...]


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


@dataclass(eq=False)
class TracedTensor:
    """Tensor in a trace of a network.

    A ``is_static`` value depends on no network input: parameters, constants and what is computed from them alone.
    ``is_integer`` marks tensors of integers or booleans. ``parameter_names`` names the parameters from which a static
    value is computed.
    """

    shape: Shape
    origin: Literal["input", "parameter", "constant", "call"]
    name: str = ""
    is_integer: bool = False
    is_static: bool = False
    parameter_names: frozenset[str] = frozenset()
    #: Input from which whole numbers were computed.
    source_input: TracedTensor | None = None
    producing_call: TracedCall | None = None

    @property
    def elements(self) -> int:
        """Number of elements of the tensor."""
        return math.prod(self.shape)

    @property
    def is_activation(self) -> bool:
        """True for numbers that depend on a network input, which are neither integers nor booleans."""
        return not (self.is_static or self.is_integer)

    def producer_of_kind(self, kind: str) -> TracedCall | None:
        """Return the call that computes this tensor if the call is of a kind, otherwise None."""
        call = self.producing_call
        return call if call is not None and call.kind == kind else None


@dataclass(eq=False)
class TracedCall:
    """One operator call in a trace.

    ``kind`` is Paleo's name for the operation ("linear", "view", …; "unknown" if there is none), ``source_name`` the
    name in the source library, and ``path`` the module that made the call. ``flops`` are those of matrix products
    inside the call [FLOP], as the source's own counter found them, or None without a counter. ``saved_tensors`` are the
    tensors that autograd saves for the backward pass, or None if the source does not say. ``saved_temporary_elements``
    is the number of further saved elements.
    """

    kind: str
    source_name: str
    inputs: list[TracedTensor | None]
    outputs: list[TracedTensor]
    options: dict[str, Any] = field(default_factory=dict)
    flops: float | None = None
    path: str = ""
    saved_tensors: frozenset[TracedTensor] | None = None
    saved_temporary_elements: float = 0.0
    #: True if the weights that it reads are trained through it, and true if it passes no gradient on.
    trains_weights: bool = True
    stops_gradient: bool = False
    #: Calls that this one replaces, in case that it cannot be used.
    replaced_calls: list[TracedCall] = field(default_factory=list)

    @property
    def out(self) -> TracedTensor:
        """First output of the call."""
        return self.outputs[0]

    @property
    def tensors(self) -> list[TracedTensor]:
        """Inputs of the call that are there, in order."""
        return [value for value in self.inputs if value is not None]

    @property
    def parameter_names(self) -> frozenset[str]:
        """Names of the parameters from which its inputs are made."""
        return frozenset[str]().union(*(value.parameter_names for value in self.tensors))

    def input(self, place: int) -> TracedTensor | None:
        """Return the input at index ``place``, or None if the call has none there."""
        return self.inputs[place] if len(self.inputs) > place else None


@dataclass(frozen=True)
class ModuleCall:
    """Call of a torch module (such as nn.LayerNorm): path, type, input, output and names of parameters."""

    path: str
    type: str
    input_tensor: TracedTensor | None
    output_tensor: TracedTensor | None
    parameters: tuple[str, ...]


@dataclass
class Trace:
    """Record of one run of a network: inputs, outputs and operator calls in order of execution.

    ``parameter_counts`` maps each parameter's name to its number of elements. ``probe_size_by_dim`` are unusual sizes
    by which a dim is recognised: with a batch of 101, a size of 101 is "batch". ``frozen_parameters`` names the
    parameters that are not trained. ``notes`` tell the user what the counts leave out. With a ``fixed_batch`` the first
    dim of every value that depends on an input is taken for the batch. ``checkpointed_modules`` names the modules whose
    activations the source recomputes.
    """

    inputs: list[TracedTensor]
    outputs: list[TracedTensor]
    calls: list[TracedCall]
    parameter_counts: Mapping[str, int]
    probe_size_by_dim: Mapping[str, int]
    module_calls: Sequence[ModuleCall] = ()
    frozen_parameters: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    fixed_batch: int | None = None
    checkpointed_modules: tuple[str, ...] = ()

    def remove_dead_calls(self) -> None:
        """Remove from the trace, in place, the calls on which no output depends."""
        needed = set(self.outputs)
        kept = []
        for call in reversed(self.calls):
            if any(value in needed for value in call.outputs):
                needed.update(call.tensors)
                kept.append(call)
        self.calls = kept[::-1]

    def mark_untrained_calls(self) -> None:
        """Mark calls as untrained, in place, if no gradient from the network's outputs reaches them.

        A gradient passes neither integer tensors (a rounded code, an index) nor calls that stop it.
        """
        reached = {value for value in self.outputs if not value.is_integer}
        if not reached:
            return
        for call in reversed(self.calls):
            if reached.isdisjoint(call.outputs):
                call.trains_weights = False
            elif not call.stops_gradient:
                reached.update(value for value in call.tensors if not value.is_integer)


def make_call(
    kind: str, label: str, inputs: Iterable[TracedTensor | None], shapes: Sequence[tuple[Shape, bool]], **more: Any
) -> TracedCall:
    """Return a new traced call whose outputs have the given shapes; ``shapes`` lists (shape, True for integers).

    A value that is computed from constants alone is static, unless matrix products with parameters compute it, because
    those take time in every step. So is a tensor without elements. A value that is computed from integers alone (a
    mask) counts as integers.
    """
    call = TracedCall(kind, label, list(inputs), [], **more)
    values, sources = call.tensors, call.parameter_names
    static = all(value.is_static for value in values) and not (sources and more.get("flops"))
    sources = sources if static else frozenset()
    root = next((value.source_input for value in values if value.source_input is not None), None)
    bare = not static and all(value.is_integer or (value.is_static and not value.parameter_names) for value in values)
    for shape, whole in shapes:
        index, is_static = whole or bare, static or 0 in shape
        call.outputs.append(TracedTensor(shape, "call", "", index, is_static, sources, root if index else None, call))
    return call


#: Functions whose gradient needs no saved values.
_LINEAR_FUNCTIONS = frozenset({"add", "sub", "rsub", "neg", "masked_fill", "where", "cumsum", "mean", "sum"})


def saved_for_backward(call: TracedCall) -> str | list[int] | None:
    """Return the tensors that a call saves for the backward pass, as recorded or as usual for the kind of call.

    Returns "inputs", "output", "all", a list of positions of the saved inputs, or None if nothing is saved.
    """
    if call.saved_tensors is None:
        plain = call.source_name.strip("_").lower()
        return None if plain in _LINEAR_FUNCTIONS or call.kind == "copy" else "inputs"
    values = activation_inputs(call)
    places = [place for place, value in enumerate(values) if value in call.saved_tensors]
    if not call.saved_tensors.isdisjoint(call.outputs):
        return "all" if places else "output"
    if len(places) == len(values):
        return "inputs" if places else None
    return places or None


def activation_inputs(call: TracedCall) -> list[TracedTensor]:
    """Return the input tensors of a call that depend on a network input, each once."""
    values = dict.fromkeys(call.tensors)
    return [value for value in values if value.is_activation or (value.origin == "input" and not value.is_static)]


def is_parameter_input(call: TracedCall, place: int) -> bool:
    """Return True if the call's input at index ``place`` is made of parameters."""
    value = call.input(place)
    return value is not None and bool(value.parameter_names)


def dropout_rate(rate: object) -> float:
    """Return a dropout rate as a float if it lies between zero and one; zero for anything else."""
    return float(rate) if isinstance(rate, int | float) and 0 < rate < 1 else 0.0


def probe_sizes(taken: Iterable[int], count: int, *, least: int, most: int | None = None) -> list[int]:
    """Return ``count`` primes, from ``least`` to ``most``, that divide none of the sizes in ``taken``.

    A tracer uses them as batch and sequence: a multiple of one in a trace shows which dim it comes from.

    >>> probe_sizes([101, 4], 2, least=100)
    [103, 107]
    """
    sizes = [size for size in taken if size > 1]
    candidates = range(least, 20 * least) if most is None else range(most, least - 1, -1)
    primes = (n for n in candidates if n > 1 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1)))
    return list(islice((prime for prime in primes if all(size % prime for size in sizes)), count))
