"""Layers that normalise activations, and hyper-connections."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt

from paleo.errors import GraphError
from paleo.layers.base import (
    LAYERS,
    NORM_FLOPS_PER_ELEMENT,
    POWER_GRADIENT_TRAFFIC_FACTOR,
    Layer,
    LayerImplementations,
    LayerOperations,
    format_shape,
    linear_projection,
    norm_pass,
    parameter_vector,
)
from paleo.operations.base import MemoryPass
from paleo.operations.tensor import Tensor

# Normalisation layers. Each saves its input and its statistics for the backward pass


def _normalise(
    name: str,
    x: Tensor,
    weights: tuple[Tensor, ...],
    reduces: tuple[str, ...],
    statistic: Tensor,
    choices: LayerImplementations,
    *,
    local: bool = False,
) -> LayerOperations:
    """Expand a normalisation layer to one memory pass.

    ``local`` marks batch norms, whose statistics cover one replica. ``reduces`` are the dims over which ``statistic``
    is computed.
    """
    out = x.like(name) if local else choices.with_output_precision(x.like(name), "norm")
    work = MemoryPass(
        name, "batch_norm" if local else "norm", (x,), out, weights, (x, statistic), NORM_FLOPS_PER_ELEMENT,
        reduced_dims=reduces, has_per_replica_statistics=local,
    )  # fmt: skip
    return LayerOperations.of(work)


@LAYERS.register("batch_norm")
class BatchNorm(Layer):
    """Batch normalisation with per-channel statistics over batch and space, of each replica by itself.

    ``dim`` names the channels if they are not the second dim (features of a sequence). Reference: Ioffe and Szegedy,
    2015.
    """

    tensor_parallel_dims = ()
    affine: bool = True
    scale: bool = True
    dim: str | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        if len(x.dims) < 2:
            raise GraphError(f"{name}: {format_shape(x)} has no channels to normalise")
        channel = self.dim or x.dims[1]
        if channel not in x.dims:
            raise GraphError(f"{name}: {format_shape(x)} has no dim {channel!r}")
        names = (["weight"] if self.scale else []) + ["bias"] if self.affine else []
        weights = tuple(parameter_vector(f"{name}.{part}", x, channel) for part in names)
        reduced = tuple(d for d in x.dims if d != channel)
        statistic = x.without_dims(*reduced, name=f"{name}.statistics", role="statistic")
        return _normalise(name, x, weights, reduced, statistic, choices, local=True)


@LAYERS.register("layer_norm")
class LayerNorm(Layer):
    """Layer normalisation: mean and variance over the last dim (Ba et al., 2016)."""

    tensor_parallel_dims = ()
    affine: bool = True
    bias: bool = True

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        last = x.dims[-1]
        names = (["weight"] + (["bias"] if self.bias else [])) if self.affine else []
        weights = tuple(parameter_vector(f"{name}.{part}", x, last) for part in names)
        statistic = x.without_dims(last, name=f"{name}.statistics", role="statistic")
        return _normalise(name, x, weights, (last,), statistic, choices)


@LAYERS.register("rms_norm")
class RmsNorm(Layer):
    """Root-mean-square norm over the last dim, with a scale and no shift (Zhang and Sennrich, 2019).

    With ``keeps: normalised`` the code applies the scale in a separate pass and saves the normalised input for it, as
    plain framework code does.
    """

    tensor_parallel_dims = ()
    keeps: Literal["normalised"] | None = None

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        last = x.dims[-1]
        if choices.rms_norm == "stepwise":
            return _root_mean_square_by_steps(name, x)
        statistic = x.without_dims(last, name=f"{name}.statistics", role="statistic")
        weights = (parameter_vector(f"{name}.weight", x, last),)
        if choices.rms_norm == "upcast":
            wide = replace(x.like(f"{name}.wide"), stays_fp32=True)
            kept, out = (wide, statistic), x.like(name)
            over = MemoryPass(name, "norm", (wide,), out, weights, kept, NORM_FLOPS_PER_ELEMENT, reduced_dims=(last,))
            return LayerOperations((MemoryPass(wide.name, "eager", (x,), wide), over), out)
        plain = _normalise(name, x, weights, (last,), statistic, choices)
        if self.keeps is None:
            return plain
        (norm,) = plain.operations
        assert isinstance(norm, MemoryPass)
        return LayerOperations((replace(norm, saved=(*norm.saved, x.like(f"{name}.normalised"))),), plain.out)


def _root_mean_square_by_steps(name: str, x: Tensor) -> LayerOperations:
    """Return the expansion of an RMS norm as plain PyTorch code computes it, one pass per step.

    The steps are a cast to fp32, squares, their mean, the product with its inverse root, the cast back and the scale.
    Autograd saves the fp32 input and the input of the scale. It moves 36 bytes an element forward in sixteen bits,
    about twice that backward (torchtitan's RMSNorm, models/norms.py of 2024; LlamaRMSNorm of transformers).
    """
    last = x.dims[-1]
    wide, squares, scaled = (replace(x.like(f"{name}.{s}"), stays_fp32=True) for s in ("wide", "squares", "scaled"))
    narrow, out = x.like(f"{name}.normalised"), x.like(name)
    root = x.without_dims(last, name=f"{name}.statistics", role="statistic")
    weight = parameter_vector(f"{name}.weight", x, last)
    mean = MemoryPass(f"{name}.mean", "eager", (squares,), root, (), (root,), reduced_dims=(last,))
    factor = POWER_GRADIENT_TRAFFIC_FACTOR
    return LayerOperations.of(
        MemoryPass(wide.name, "eager", (x,), wide),
        MemoryPass(squares.name, "eager", (wide,), squares, (), (wide,), backward_traffic_factor=factor),
        replace(mean, host_calls=(3.0, 3.0)),
        MemoryPass(scaled.name, "eager", (wide, root), scaled, (), (wide, root), backward_rule="by input"),
        MemoryPass(narrow.name, "eager", (scaled,), narrow),
        MemoryPass(name, "eager", (narrow,), out, (weight,), (narrow,)),
    )


@LAYERS.register("group_norm")
class GroupNorm(Layer):
    """Group normalisation: statistics over groups of channels and space (Wu and He, 2018)."""

    tensor_parallel_dims = ()
    groups: PositiveInt = 32

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3, 4, 5))
        channels = x.sizes[1]
        if channels % self.groups:
            raise GraphError(f"{name}: {channels:g} channels cannot be cut into {self.groups} groups")
        statistic = Tensor(f"{name}.statistics", (x.dims[0], "groups"), (x.sizes[0], self.groups), "statistic")
        weights = tuple(parameter_vector(f"{name}.{part}", x, x.dims[1]) for part in ("weight", "bias"))
        return _normalise(name, x, weights, x.dims[2:], statistic, choices)


@LAYERS.register("local_response_norm")
class LocalResponseNorm(Layer):
    """Local response normalisation across ``size`` neighbouring channels (Krizhevsky et al., 2012)."""

    size: PositiveInt = 5

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        out = x.like(name)
        kept = (x, x.like(f"{name}.scale"), out)
        return LayerOperations.of(MemoryPass(name, "elementwise", (x,), out, (), kept, 2.0 * self.size + 4.0))


@LAYERS.register("frozen_batch_norm")
class FrozenBatchNorm(Layer):
    """Batch normalisation with constant statistics: x · scale + shift along the channels.

    No parameters are counted, as torchvision stores the four constants as buffers. The backward pass needs only the
    scale.
    """

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        return LayerOperations.of(MemoryPass(name, "elementwise", (x,), x.like(name), flops_per_element=2.0))


# Hyper-connections: several residual streams, mixed by learned weights of each token around every half of a layer


@LAYERS.register("hyper_split")
class HyperConnectionSplit(Layer):
    """Start of hyper-connections: copies tokens (batch, seq, hidden) to residual streams (…, streams, hidden)."""

    tensor_parallel_dims = ()
    streams: PositiveInt

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (3,))
        sizes = {x.dims[0]: x.sizes[0], x.dims[1]: x.sizes[1], "streams": self.streams}
        out = x.reshaped(sizes | {x.dims[2]: x.sizes[2]}, name=name)
        return LayerOperations.of(MemoryPass(name, "copy", (x,), out, flops_per_element=0.0))


@LAYERS.register("hyper_read")
class HyperConnectionRead(Layer):
    """Hyper-connection input: weighted sum of residual streams (batch, seq, streams, hidden) with learned weights.

    A matrix product over all streams yields the weights.

    With ``mixes`` the product also yields the weights by which `HyperConnectionWrite` mixes the streams: a doubly
    stochastic matrix after ``iterations`` of Sinkhorn and Knopp's normalisation.
    """

    tensor_parallel_dims = ()
    mixes: bool = True
    iterations: NonNegativeInt = 20

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        (x,) = inputs
        self.check_rank(name, x, (4,))
        streams = int(x.sizes[2])
        count = streams * (streams + 2) if self.mixes else streams
        norm = norm_pass(x, x.like(f"{name}.normed"))
        product, raw = linear_projection(f"{name}.weights", norm.out, {"mixing": count}, contract=2)
        learned = tuple(
            Tensor(f"{name}.{part}", ("mixing",), (size,), "parameter")
            for part, size in (("base", count), ("scale", 3 if self.mixes else 1))
        )
        weights = raw.like(f"{name}.mixing", role="statistic")
        flops = 4.0 + (4.0 * self.iterations if self.mixes else 0.0)
        sinkhorn = MemoryPass(weights.name, "elementwise", (raw,), weights, learned, (raw,), flops)
        out = x.without_dims("streams", name=name)
        total = MemoryPass(name, "reduce", (x, weights), out, saved=(x, weights), flops_per_element=2.0 * streams)
        return LayerOperations((norm, product, sinkhorn, total), out)


@LAYERS.register("hyper_write")
class HyperConnectionWrite(Layer):
    """Hyper-connection output: mixes the residual streams (second input) and adds a block's output (first input)."""

    tensor_parallel_dims = ()
    input_count: ClassVar[int | None] = 2

    def to_operations(self, name: str, inputs: tuple[Tensor, ...], choices: LayerImplementations) -> LayerOperations:
        result, streams = inputs
        if len(streams.dims) != 4 or streams.dims[:2] != result.dims[:2] or streams.sizes[3] != result.sizes[-1]:
            raise GraphError(f"{name}: expects the result of half a layer and the streams that it was read from")
        out = streams.like(name)
        flops = 2.0 * float(streams.sizes[2]) + 2.0
        work = MemoryPass(name, "elementwise", (result, streams), out, saved=(result, streams), flops_per_element=flops)
        return LayerOperations.of(work)
