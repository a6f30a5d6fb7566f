"""Layers for importers: views, products by equation, known memory passes, unknown functions, and learned tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import LAYERS, Layer, LayerImplementations, LayerOperations, format_shape
from paleo.operations.base import OPERATION_KINDS, Kernel, MemoryPass, OperationKind, Phase, add_operation_kind
from paleo.operations.contraction import Contraction
from paleo.operations.tensor import Precision, Tensor, shard_tensors

#: Largest number of inputs of a pass.
_MAX_MEMORY_PASS_INPUTS = 10_000


@LAYERS.register("view")
class View(Layer):
    """Reshape, transpose, slice or broadcast of a tensor, which costs no time.

    A ``constant`` view holds numbers that exist throughout, not an activation; a ``learned`` constant has a gradient.
    With ``keeps_whole``, saving a part for the backward pass saves all of the tensor that it is a part of, as they
    share storage.
    """

    dims: dict[str, PositiveInt]
    constant: bool = False
    learned: bool = False
    keeps_whole: bool = False

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        """Rename and resize the dims of the input; a view runs no kernel.

        Parameters
        ----------
        name : str
            Name of the layer in the network.
        inputs : tuple of Tensor
            One tensor.
        choices : LayerImplementations
            Not used.

        Returns
        -------
        LayerOperations
            No operations, and the input with the dims of the layer (or a constant tensor, if the layer is constant).
        """
        (x,) = inputs
        sizes = dict(self.dims)
        if self.constant:
            return LayerOperations((), Tensor.of(name, sizes, "statistic", needs_gradient=self.learned))
        elements = math.prod(sizes.values())
        whole = x if self.keeps_whole and elements < x.elements else None
        return LayerOperations((), x.reshaped(sizes, name=x.name if elements == x.elements else name), whole)


@LAYERS.register("einsum")
class Einsum(Layer):
    """Product of two tensors by an equation such as ``b h q d, b h k d -> b h q k``.

    ``dims`` names the dims of the output, one per letter. With one input the second factor is a weight of the sizes
    ``weight``. Letters missing from the output are summed.
    """

    optional_input_count: ClassVar[int] = 1
    equation: str
    dims: list[str]
    weight: list[PositiveInt] | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        """Return the contraction of two inputs, or of one input and a weight.

        Parameters
        ----------
        name : str
            Name of the layer in the network.
        inputs : tuple of Tensor
            Both factors, or one factor if the layer has a weight.
        choices : LayerImplementations
            Not used.

        Returns
        -------
        LayerOperations
            One contraction, and its output.

        Raises
        ------
        GraphError
            If the number of inputs, the letters of the equation or the sizes of dims do not fit.
        """
        left, right, result = self._letters(name)
        if (self.weight is None) == (len(inputs) == 1):
            raise GraphError(f"{name}: einsum takes either a second input or the sizes of a weight")
        if len(self.dims) != len(result) or len(set(self.dims)) != len(result):
            raise GraphError(f"{name}: dims {self.dims} must name each of {' '.join(result)} once")
        names = dict(zip(result, self.dims, strict=True))
        x = inputs[0]
        factor = (
            inputs[1]
            if self.weight is None
            else Tensor(f"{name}.weight", tuple(right), tuple(self.weight), "parameter")
        )
        lhs, rhs = _lettered(name, x, left, names), _lettered(name, factor, right, names)
        sizes = {d: n for t in (rhs, lhs) for d, n in t.shape.items() if n != 1} | {}
        result_sizes = {names[letter]: sizes.get(names[letter], 1) for letter in result}
        for tensor in (lhs, rhs):
            clash = [d for d, n in tensor.shape.items() if n not in (1, sizes.get(d, 1))]
            if clash:
                raise GraphError(f"{name}: {format_shape(lhs)} and {format_shape(rhs)} differ in {clash[0]!r}")
        out = Tensor.of(name, result_sizes)
        return LayerOperations((Contraction(name, lhs, rhs, out),), out)

    def _letters(self, name: str) -> tuple[list[str], list[str], list[str]]:
        sides, arrow, result = self.equation.partition("->")
        factors = [side.split() for side in sides.split(",")]
        letters = {letter for side in factors for letter in side}
        if (
            not arrow
            or len(factors) != 2
            or not set(result.split()) <= letters
            or any(len(set(f)) != len(f) for f in factors)
        ):
            raise GraphError(f"{name}: {self.equation!r} is not an equation such as 'b q d, b k d -> b q k'")
        return factors[0], factors[1], result.split()


def _lettered(name: str, x: Tensor, letters: list[str], names: Mapping[str, str]) -> Tensor:
    """Return a tensor with its dims renamed by the letters of an einsum; broadcast dims of size one have no letter."""
    if len(x.dims) != len(letters):
        raise GraphError(f"{name}: {format_shape(x)} does not fit {' '.join(letters)!r}")
    return replace(x, dims=tuple(names.get(letter, f"in_{letter}") for letter in letters))


class GenericMemoryPass(Layer):
    """Base of generic memory passes from any number of inputs to one output of the sizes ``dims``.

    ``parameters`` is the number of learned numbers that it reads. ``keeps`` says which tensors are saved for the
    backward pass: inputs by their positions, or a word. ``kept_per_element`` is how many further numbers are saved, per
    element of the largest tensor read or written.
    """

    input_count: ClassVar[int | None] = 1
    optional_input_count: ClassVar[int] = _MAX_MEMORY_PASS_INPUTS
    dims: dict[str, PositiveInt]
    parameters: NonNegativeInt = 0
    keeps: Literal["inputs", "output", "all", "nothing"] | list[NonNegativeInt] = "nothing"
    kept_per_element: Annotated[float, Field(ge=0)] = 0.0

    def saved_tensors(self, name: str, inputs: tuple[Tensor, ...], out: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors that are saved for the backward pass.

        Parameters
        ----------
        name : str
            Name of the layer.
        inputs : tuple of Tensor
            Inputs of the layer.
        out : Tensor
            Output of the layer.

        Returns
        -------
        tuple of Tensor
            Saved tensors.

        Raises
        ------
        GraphError
            If ``keeps`` names an input that does not exist.
        """
        places = self.keeps if isinstance(self.keeps, list) else range(len(inputs))
        if any(place >= len(inputs) for place in places):
            raise GraphError(f"{name}: keeps {self.keeps}, but there are {len(inputs)} inputs")
        read = () if self.keeps in ("output", "nothing") else tuple(inputs[place] for place in places)
        written = (out,) if self.keeps in ("output", "all") else ()
        more = math.ceil(self.kept_per_element * max(t.elements for t in (*inputs, out)))
        kept_entries = (Tensor(f"{name}.kept", ("entries",), (more,)),) if more else ()
        return (*(t for t in read if t.role == "activation"), *written, *kept_entries)


@LAYERS.register("pass")
class ImportedMemoryPass(GenericMemoryPass):
    """Memory pass of an imported function (element-wise, copy, reduction or gather), timed by the bytes moved.

    ``of`` is the name of the function in the source.
    """

    kind: Annotated[str, AfterValidator(lambda name: OPERATION_KINDS[name].name)] = "elementwise"
    of: str = ""
    flops_per_element: Annotated[float, Field(ge=0)] = 1.0

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        """Return one memory pass from the inputs to an output with the dims of the layer.

        Parameters
        ----------
        name : str
            Name of the layer in the network.
        inputs : tuple of Tensor
            Tensors that the pass reads.
        choices : LayerImplementations
            Not used.

        Returns
        -------
        LayerOperations
            One memory pass, and its output.

        Raises
        ------
        GraphError
            If ``keeps`` names an input that does not exist.
        """
        out = Tensor(name, tuple(self.dims), tuple(self.dims.values()))
        kept = self.saved_tensors(name, inputs, out)
        work = MemoryPass(name, self.kind, inputs, out, _table(name, self.parameters), kept, self.flops_per_element)
        return LayerOperations.of(work)


def _table(name: str, parameters: int) -> tuple[Tensor, ...]:
    return (Tensor(f"{name}.weight", ("entries",), (parameters,), "parameter"),) if parameters else ()


add_operation_kind(OperationKind("opaque", "a function that an importer did not know"))


@LAYERS.register("opaque")
class OpaqueFunction(GenericMemoryPass):
    """Imported function for which Paleo has no layer, timed as one matrix product of the FLOP that the tracer counted.

    ``flops_per_element`` are FLOP of matrix products per element of the output. The backward pass is assumed to be one
    product of the same FLOP for each tensor that needs a gradient, at most two. Predictions list the function as
    unmodelled.
    """

    of: str
    flops_per_element: Annotated[float, Field(ge=0)] = 0.0
    keeps: Literal["inputs", "output", "all", "nothing"] | list[NonNegativeInt] = "inputs"

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        """Return one opaque operation from the inputs to an output with the dims of the layer.

        Parameters
        ----------
        name : str
            Name of the layer in the network.
        inputs : tuple of Tensor
            Tensors that the operation reads.
        choices : LayerImplementations
            Not used.

        Returns
        -------
        LayerOperations
            One operation, and its output.

        Raises
        ------
        GraphError
            If ``keeps`` names an input that does not exist.
        """
        out = Tensor(name, tuple(self.dims), tuple(self.dims.values()))
        table, kept = _table(name, self.parameters), self.saved_tensors(name, inputs, out)
        return LayerOperations((OpaqueOperation(name, self.of, inputs, out, table, self.flops_per_element, kept),), out)


@dataclass(frozen=True, slots=True)
class OpaqueOperation:
    """Operation of an `OpaqueFunction` layer, which counts as one matrix product."""

    name: str
    function_name: str
    inputs: tuple[Tensor, ...]
    out: Tensor
    parameters: tuple[Tensor, ...]
    flops_per_element: float
    saved: tuple[Tensor, ...] = ()

    @property
    def read_tensors(self) -> tuple[Tensor, ...]:
        return self.inputs + self.parameters

    @property
    def saved_tensors(self) -> tuple[Tensor, ...]:
        return self.saved

    @property
    def independent_dims(self) -> frozenset[str]:
        return frozenset(d for t in self.inputs for d in t.dims) - frozenset(self.out.dims)

    def shard(self, ways: Mapping[str, float]) -> OpaqueOperation:
        """Return one rank's shard of the operation.

        Parameters
        ----------
        ways : mapping of str to float
            Number of parts of each dim.

        Returns
        -------
        OpaqueOperation
            Share of one rank: every tensor is divided along its dims.
        """
        inputs, parameters, keeps = (shard_tensors(group, ways) for group in (self.inputs, self.parameters, self.saved))
        return replace(self, inputs=inputs, out=self.out.shard(ways), parameters=parameters, saved=keeps)

    def forward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass, with FLOP, bytes and shapes.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            One kernel, with its FLOP and bytes.
        """
        return (self._kernel("forward", self.read_tensors, (self.out,), 1.0, precision),)

    def backward_kernels(self, precision: Precision) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass: the FLOP of the forward pass for each gradient, at most twice.

        Parameters
        ----------
        precision : Precision
            Formats of tensors and products.

        Returns
        -------
        tuple of Kernel
            One kernel; empty if nothing that the operation reads needs a gradient.
        """
        written = tuple(t for t in self.read_tensors if t.needs_gradient and t.role in ("activation", "parameter"))
        products = min(2.0, float(len(written)))
        return (
            (self._kernel("backward", (*self.read_tensors, self.out), written, products, precision),) if written else ()
        )

    def _kernel(
        self, phase: Phase, reads: tuple[Tensor, ...], writes: tuple[Tensor, ...], factor: float, precision: Precision
    ) -> Kernel:
        read, written = (sum(t.bytes(precision) for t in tensors) for tensors in (reads, writes))
        flops = factor * self.flops_per_element * self.out.elements
        name, count = f"{self.name} ({self.function_name})", float(self.out.elements)
        if not flops:
            shape = {"rows": float(max((t.elements for t in reads), default=0)), "columns": 1.0}
            return Kernel(name, "memory", "opaque", phase, 0.0, count, read, written, shape)
        columns = float(self.out.sizes[-1])
        shape = {"m": count / columns, "n": columns, "k": flops / 2.0 / count, "batch": 1.0}
        return Kernel(name, "gemm", "gemm", phase, flops, 0.0, read, written, shape)


@LAYERS.register("learned")
class LearnedParameters(Layer):
    """Identity layer that holds learned parameters of an imported network; every step reads the parameters."""

    parameters: PositiveInt
    of: str = ""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        """Return the pass that reads the learned parameters; the input goes through unchanged.

        Parameters
        ----------
        name : str
            Name of the layer in the network.
        inputs : tuple of Tensor
            One tensor.
        choices : LayerImplementations
            Not used.

        Returns
        -------
        LayerOperations
            One memory pass that copies the parameters, and the input as output.
        """
        (x,) = inputs
        (table,) = _table(name, self.parameters)
        return LayerOperations(
            (MemoryPass(f"{name}.read", "copy", (), table.like(f"{name}.copy", role="statistic"), (table,)),), x
        )


@LAYERS.register("relative_bias")
class RelativeBias(Layer):
    """Learned bias of attention scores per head and bucket of distances, used by many layers (Raffel et al., T5, 2020).

    The input (batch, seq, hidden) passes through; the table of scores (heads, seq, seq) is written once.
    """

    tensor_parallel_dims = ()
    buckets: PositiveInt
    heads: PositiveInt

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        """Return the pass that gathers the bias of each pair of positions; the input goes through unchanged.

        Parameters
        ----------
        name : str
            Name of the layer in the network.
        inputs : tuple of Tensor
            One tensor of three dims, the second of which is the sequence.
        choices : LayerImplementations
            Not used.

        Returns
        -------
        LayerOperations
            One memory pass that writes (heads, positions, positions) numbers, and the input as output.

        Raises
        ------
        GraphError
            If the input has not three dims.
        """
        (x,) = inputs
        self.check_rank(name, x, (3,))
        seq = x.dims[1]
        table = Tensor(f"{name}.weight", ("buckets", "heads"), (self.buckets, self.heads), "parameter")
        scores = Tensor(f"{name}.scores", ("heads", seq, "keys"), (self.heads, x.sizes[1], x.sizes[1]))
        gather = MemoryPass(f"{name}.scores", "gather", (), scores, (table,), table_rows_per_output=True)
        return LayerOperations((gather,), x)
