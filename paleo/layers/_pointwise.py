"""Element-wise layers, joins, reshapes and copies."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import (
    ACTIVATIONS,
    LAYERS,
    Layer,
    LayerImplementations,
    LayerOperations,
    activation_passes,
    format_shape,
)
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Tensor


class Activation(Layer):
    """Base of activation layers (relu, gelu, …); one layer type is registered for each entry of ``ACTIVATIONS``.

    With ``keeps: input`` the layer saves its input even if its gradient could be computed from the output. PyTorch does
    so, out of place, for all functions but relu, sigmoid and tanh.
    """

    function: ClassVar[str]
    keeps: Literal["input"] | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        operations, out = activation_passes(self.function, name, inputs[0], choices)
        if self.keeps == "input" and len(operations) == 1:
            operations = (replace(operations[0], saved=inputs),)
        return LayerOperations(operations, out)


for _function in ACTIVATIONS:
    LAYERS.register(_function)(type(_function, (Activation,), {"function": _function, "__module__": __name__}))


@LAYERS.register("dropout")
class Dropout(Layer):
    """Dropout: zeroes a share ``rate`` of the elements; saves a mask of one byte an element."""

    rate: Annotated[float, Field(ge=0, lt=1)] = 0.5

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        if self.rate == 0:
            return LayerOperations((), x)
        out = x.like(name)
        mask = x.like(f"{name}.mask", role="mask")
        return LayerOperations.of(MemoryPass(name, "dropout", (x,), out, saved=(mask,), flops_per_element=2.0))


class TensorJoin(Layer):
    """Base of layers that combine two or more tensors into one."""

    input_count: ClassVar[int | None] = None

    def check_broadcast(self, name: str, inputs: tuple[Tensor, ...]) -> Tensor:
        largest = max(inputs, key=lambda t: t.elements)
        for x in inputs:
            pairs = zip(x.sizes, largest.sizes, strict=False)
            if len(x.dims) != len(largest.dims) or not all(a in (1, b) for a, b in pairs):
                shapes = f"{format_shape(x)} and {format_shape(largest)}"
                raise GraphError(f"{name}: {shapes} cannot be joined element by element")
        return largest


@LAYERS.register("add")
class Add(TensorJoin):
    """Sum of two tensors. Both inputs have the gradient of the output, so the backward pass costs nothing."""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        largest = self.check_broadcast(name, inputs)
        out = replace(largest.like(name), stays_fp32=any(x.stays_fp32 for x in inputs))
        flops = float(len(inputs) - 1)
        return LayerOperations.of(MemoryPass(name, "elementwise", inputs, out, (), (), flops, backward_rule="free"))


@LAYERS.register("multiply")
class Multiply(TensorJoin):
    """Element-wise product, with broadcast over dims of size 1 (squeeze-and-excitation).

    Without a compiler the gradient of a broadcast input is first computed at the size of the product, then summed.
    """

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        out = self.check_broadcast(name, inputs).like(name)
        spread = choices.gates == "separate" and any(x.elements < out.elements for x in inputs)
        backward: Literal["derived", "by input"] = "by input" if spread else "derived"
        return LayerOperations.of(MemoryPass(name, "elementwise", inputs, out, saved=inputs, backward_rule=backward))


@LAYERS.register("concat")
class Concat(TensorJoin):
    """Concatenation along one dim (default: channels of an image, else the last dim)."""

    dim: str | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        first = inputs[0]
        dim = self.dim or ("channels" if "channels" in first.dims else first.dims[-1])
        for x in inputs:
            if dim not in x.dims or x.dims != first.dims or x.shape | {dim: 0} != first.shape | {dim: 0}:
                raise GraphError(f"{name}: {format_shape(x)} and {format_shape(first)} cannot be joined along {dim!r}")
        out = first.reshaped(first.shape | {dim: sum(x.size(dim) for x in inputs)}).like(name)
        return LayerOperations.of(MemoryPass(name, "copy", inputs, out, flops_per_element=0.0))


@LAYERS.register("identity")
class Identity(Layer):
    """Identity: the skip branch of a residual block."""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        return LayerOperations((), inputs[0])


@LAYERS.register("flatten")
class Flatten(Layer):
    """View that merges all dims but the first."""

    dim: str = "features"

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        return LayerOperations((), x.reshaped({x.dims[0]: x.sizes[0], self.dim: math.prod(x.sizes[1:])}))


@LAYERS.register("reshape")
class Reshape(Layer):
    """View of the same elements under other dims, in the order given; the batch dim stays first."""

    dims: dict[str, PositiveInt]

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        sizes = {x.dims[0]: x.sizes[0]} | {d: n for d, n in self.dims.items() if d != x.dims[0]}
        if math.prod(sizes.values()) != x.elements:
            target = " × ".join(f"{d}={n}" for d, n in sizes.items())
            raise GraphError(f"{name}: {format_shape(x)} has {x.elements:g} elements and cannot be viewed as {target}")
        return LayerOperations((), x.reshaped(sizes))


@LAYERS.register("to_sequence")
class ToSequence(Layer):
    """Transposing copy from (batch, channels, space…) to (batch, sequence, hidden), as in vision transformers."""

    dim: str = "hidden"
    sequence: str = "seq"

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        sizes = {x.dims[0]: x.sizes[0], self.sequence: math.prod(x.sizes[2:]), self.dim: x.sizes[1]}
        out = x.reshaped(sizes).like(name)
        return LayerOperations.of(MemoryPass(name, "copy", (x,), out, flops_per_element=0.0))


@LAYERS.register("spectrogram_to_sequence")
class SpectrogramToSequence(Layer):
    """Copy from (batch, channels, frequency, time) to (batch, time, features), for recurrent layers."""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (4,))
        sizes = {x.dims[0]: x.sizes[0], "seq": x.sizes[3], "features": x.sizes[1] * x.sizes[2]}
        out = x.reshaped(sizes).like(name)
        return LayerOperations.of(MemoryPass(name, "copy", (x,), out, flops_per_element=0.0))


@LAYERS.register("select")
class Select(Layer):
    """Selection of one entry along a dim, which is removed (the class token, the last step)."""

    dim: str = "seq"

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        if self.dim not in x.dims:
            raise GraphError(f"{name}: input {format_shape(x)} has no dim {self.dim!r}")
        out = x.without_dims(self.dim, name=name)
        taken = x.without_dims(self.dim, name=x.name)
        return LayerOperations.of(MemoryPass(name, "copy", (taken,), out, flops_per_element=0.0))


@LAYERS.register("take")
class SelectEntries(Layer):
    """Selection of ``count`` entries along a dim, such as the masked tokens that a language model predicts."""

    count: PositiveInt
    dim: str = "seq"

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        if self.dim not in x.dims or self.count > x.size(self.dim):
            raise GraphError(f"{name}: input {format_shape(x)} has no {self.count} entries along {self.dim!r}")
        taken = x.reshaped(x.shape | {self.dim: self.count})
        out = taken.like(name)
        return LayerOperations.of(MemoryPass(name, "gather", (taken,), out, flops_per_element=0.0))


@LAYERS.register("mean")
class Mean(Layer):
    """Mean over one dim, which is removed."""

    dim: str = "seq"

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        if self.dim not in x.dims:
            raise GraphError(f"{name}: input {format_shape(x)} has no dim {self.dim!r}")
        out = x.without_dims(self.dim, name=name)
        return LayerOperations.of(MemoryPass(name, "reduce", (x,), out))


@LAYERS.register("upsample")
class Upsample(Layer):
    """Upsampling of every spatial dim by ``factor``, by repetition or bilinear interpolation."""

    factor: PositiveInt = 2
    bilinear: bool = False

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        out = x.reshaped(x.shape | {dim: x.size(dim) * self.factor for dim in x.dims[2:]}).like(name)
        return LayerOperations.of(MemoryPass(name, "copy", (x,), out, flops_per_element=7.0 if self.bilinear else 0.0))


@LAYERS.register("crop")
class Crop(Layer):
    """Centre crop of every spatial dim to ``size`` or to a second input (skip connections of the original U-Net)."""

    optional_input_count: ClassVar[int] = 1
    size: PositiveInt | list[PositiveInt] | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        x = inputs[0]
        if (self.size is None) == (len(inputs) == 1):
            raise GraphError(f"{name}: crop takes either a size or a second input to be like")
        if self.size is None:
            target = list(inputs[1].sizes[2:])
        else:
            target = list(self.size) if isinstance(self.size, list) else [self.size] * (len(x.dims) - 2)
        if len(target) != len(x.dims) - 2 or any(w > n for w, n in zip(target, x.sizes[2:], strict=True)):
            raise GraphError(f"{name}: {format_shape(x)} cannot be cropped to {target}")
        taken = x.reshaped(x.shape | dict(zip(x.dims[2:], target, strict=True)))
        return LayerOperations.of(MemoryPass(name, "copy", (taken,), taken.like(name), flops_per_element=0.0))


@LAYERS.register("detach")
class Detach(Layer):
    """Identity without a backward pass, such as the input of a GAN's discriminator from the generator."""

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        return LayerOperations((), replace(inputs[0], needs_gradient=False))


@LAYERS.register("class_token")
class ClassToken(Layer):
    """Concatenation of a learned token before the sequence."""

    tensor_parallel_dims = ()

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        _, seq, hidden = x.dims
        out = x.reshaped(x.shape | {seq: x.sizes[1] + 1}).like(name)
        token = Tensor(f"{name}.token", (hidden,), (x.sizes[2],), "parameter")
        return LayerOperations.of(MemoryPass(name, "copy", (x,), out, parameters=(token,), flops_per_element=0.0))


@LAYERS.register("position_embedding")
class PositionEmbedding(Layer):
    """Sum of a sequence with a vector per position: a learned table, perhaps longer, or fixed sinusoids."""

    tensor_parallel_dims = ()
    positions: PositiveInt | None = None
    learned: bool = True

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        _, seq, hidden = x.dims
        rows = self.positions or x.size(seq)
        if rows < x.size(seq):
            raise GraphError(f"{name}: {rows} positions are fewer than the sequence of {x.size(seq):g}")
        table = Tensor(f"{name}.weight", ("positions", hidden), (rows, x.size(hidden)), "parameter")
        tables = (table,) if self.learned else ()
        work = MemoryPass(name, "elementwise", (x,), x.like(name), tables, table_rows_per_output=self.learned)
        return LayerOperations.of(work)


@LAYERS.register("scale")
class LayerScale(Layer):
    """Product with a learned factor for each entry of the last dim (layer scale)."""

    tensor_parallel_dims = ()

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        weight = Tensor(f"{name}.weight", (x.dims[-1],), (x.sizes[-1],), "parameter")
        out = x.like(name)
        return LayerOperations.of(MemoryPass(name, "elementwise", (x,), out, parameters=(weight,), saved=(x,)))
