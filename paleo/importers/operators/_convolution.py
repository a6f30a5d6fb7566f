"""Rules for convolutions, transposed convolutions and pooling in one to three dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from paleo.importers._builder import (
    NetworkBuilder,
    OnnxNode,
    TranslatedCall,
    UntranslatableError,
    register_onnx_reader,
    register_translation,
)
from paleo.importers._network_trace import TracedCall, TracedTensor, is_parameter_input
from paleo.importers.operators._pointwise import add_memory_pass

if TYPE_CHECKING:
    from paleo.operations.tensor import Tensor

_SPATIAL_DIMS = {1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}


@register_onnx_reader("Conv")
def _onnx_conv(node: OnnxNode) -> TranslatedCall:
    return TranslatedCall("conv", node.inputs[:3], _onnx_windows(node) | {"groups": node.options.get("group", 1)})


@register_onnx_reader("ConvTranspose")
def _onnx_transposed(node: OnnxNode) -> TranslatedCall:
    more = {"groups": node.options.get("group", 1), "output_padding": node.options.get("output_padding")}
    return TranslatedCall("transposed_conv", node.inputs[:3], _onnx_windows(node) | more)


def _onnx_windows(node: OnnxNode) -> dict[str, Any]:
    options = node.options
    automatic = {"SAME_UPPER": "same", "SAME_LOWER": "same", "VALID": 0}
    padding = automatic.get(options.get("auto_pad", "NOTSET"), list(options.get("pads") or []) or 0)
    return {"stride": options.get("strides"), "dilation": options.get("dilations"), "padding": padding}


@register_translation("conv transposed_conv")
def add_convolution(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a convolution, or transposed convolution, to network ``b`` for a recorded call.

    The image has one to three spatial dims; an image without a batch gets a batch of 1. Afterwards ``b.placed`` maps
    the call's output to the layer. Weights that an earlier layer holds already are shared with it.
    """
    source, (weight, owner) = b.place_of(call.inputs[0]), b.weight_and_owner(call.inputs[1])
    rank = len(weight.shape) - 2
    if len(source.tensor.dims) == rank + 1:
        names = ("batch", "channels", *_SPATIAL_DIMS[rank])
        source = b.add_view(source, dict(zip(names, (1, *source.tensor.sizes), strict=True)), call.path)
    if len(source.tensor.dims) != len(weight.shape):
        raise UntranslatableError("an image of another rank")
    names = ("batch", "channels", *_SPATIAL_DIMS[rank])
    source = b.add_view(source, dict(zip(names, source.tensor.sizes, strict=True)), call.path)
    entry = b.add_layer(call.kind, _conv_options(call, weight, source.tensor), [source], call.path)
    b.use_weights_of(owner, entry)
    if len(call.out.shape) == len(weight.shape):
        b.record_output(call.out, entry)
    else:
        b.place_by_value[call.out] = b.add_reshape(entry.place, call.out.shape, call.path)


def _conv_options(call: TracedCall, weight: TracedTensor, x: Tensor) -> dict[str, Any]:
    rank, stated = len(x.dims) - 2, call.options
    groups = stated.get("groups") or 1
    transposed = call.kind == "transposed_conv"
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    stride, dilation = (_values_per_spatial_dim(stated.get(key), rank, 1) for key in ("stride", "dilation"))
    extra = _values_per_spatial_dim(stated.get("output_padding"), rank, 0)
    options: dict[str, Any] = {
        "channels": channels,
        "kernel": _collapse_equal_values(list(weight.shape[2:])),
        "stride": None if set(stride) == {1} else _collapse_equal_values(stride),
        "padding": _padding(stated.get("padding") or 0, rank),
        "dilation": None if set(dilation) == {1} else _collapse_equal_values(dilation),
        "groups": None if groups == 1 else groups,
        "output_padding": _collapse_equal_values(extra) if transposed and any(extra) else None,
    }
    return {key: value for key, value in options.items() if value is not None} | {"bias": is_parameter_input(call, 2)}


def _padding(padding: Any, rank: int) -> Any:
    """Convert a call's padding to the ``padding`` option of a conv layer.

    Returns one number, a list of one number per spatial dim, or ``same``; None for no padding. The ONNX form (begins,
    then ends) is accepted if both ends are equal.
    """
    if isinstance(padding, str):
        return None if padding == "valid" else padding
    if isinstance(padding, Sequence) and len(padding) == 2 * rank:
        if list(padding[:rank]) != list(padding[rank:]):
            raise UntranslatableError("padding that differs from side to side")
        padding = padding[:rank]
    numbers = _values_per_spatial_dim(padding, rank, 0)
    return _collapse_equal_values(numbers) if any(numbers) else None


def _values_per_spatial_dim(value: Any, rank: int, default: int) -> list[int]:
    """Expand an operator's argument to a list of one number per spatial dim (``rank`` of them); None gives ``default``.

    >>> _values_per_spatial_dim(3, 2, 1), _values_per_spatial_dim(None, 2, 1), _values_per_spatial_dim([1, 2], 2, 1)
    ([3, 3], [1, 1], [1, 2])
    """
    numbers = list(value) if isinstance(value, Sequence) else [] if value is None else [value]
    if not numbers:
        return [default] * rank
    return [int(number) for number in (numbers * rank if len(numbers) == 1 else numbers)]


def _collapse_equal_values(values: list[int]) -> int | list[int]:
    """Return one number if all entries of a list are equal, otherwise the list.

    Model files state it in this short form.
    """
    return values[0] if len(set(values)) == 1 else values


@register_onnx_reader("AveragePool")
def _onnx_average(node: OnnxNode) -> TranslatedCall:
    reading = _onnx_pool(node)
    return TranslatedCall("avg_pool", reading.inputs, reading.options) if reading.kind == "max_pool" else reading


@register_onnx_reader("MaxPool")
def _onnx_pool(node: OnnxNode) -> TranslatedCall:
    options = node.options
    pads = list(options.get("pads") or [])
    rank = len(pads) // 2
    automatic = options.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if not options.get("kernel_shape") or automatic or any(pads[i] != pads[i + rank] for i in range(rank)):
        return TranslatedCall("copy", node.inputs[:1])
    kernel = list(options["kernel_shape"])
    more = {"kernel_size": kernel, "stride": options.get("strides") or [1] * len(kernel)}
    more |= {"padding": pads[:rank] or 0, "ceil_mode": options.get("ceil_mode", 0)}
    return TranslatedCall("max_pool", node.inputs[:1], more | {"dilation": options.get("dilations")})


@register_translation("max_pool avg_pool")
def add_pool_layer(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a max or average pooling layer to network ``b`` for a call with a fixed window size.

    A window over the whole image becomes ``global_pool``; dilated windows and other unusual ones become a generic
    memory pass. Afterwards ``b.placed`` maps the call's output to the layer.
    """
    x, options = b.place_of(call.inputs[0]), call.options
    rank = len(x.tensor.dims) - 2
    if rank not in _SPATIAL_DIMS or set(_values_per_spatial_dim(options.get("dilation"), rank, 1)) != {1}:
        add_memory_pass(b, call, "pool")
        return
    if set(call.out.shape[2:]) == {1}:
        settings = {"operation": call.kind.removesuffix("_pool"), "keep_space": True}
        b.record_output(call.out, b.add_layer("global_pool", settings, [x], call.path))
        return
    kernel = _values_per_spatial_dim(options["kernel_size"], rank, 1)
    stride = _values_per_spatial_dim(options.get("stride"), rank, 0) if options.get("stride") else kernel
    padding = _values_per_spatial_dim(options.get("padding"), rank, 0)
    window: dict[str, Any] = {"kernel": _collapse_equal_values(kernel)}
    window["stride"] = None if stride == kernel else _collapse_equal_values(stride)
    window["padding"] = _collapse_equal_values(padding) if any(padding) else None
    window["ceil"] = True if options.get("ceil_mode") else None
    window["keeps_input"] = True if call.kind == "max_pool" and call.inputs[0] in (call.saved_tensors or ()) else None
    try:
        b.record_output(call.out, b.add_layer(call.kind, window, [x], call.path))
    except UntranslatableError:
        add_memory_pass(b, call, "pool")


@register_translation("adaptive_avg_pool")
def add_adaptive_pool(b: NetworkBuilder, call: TracedCall) -> None:
    """Append average pooling to a fixed output size to network ``b``, for a call such as adaptive_avg_pool2d.

    An output of size 1 becomes ``global_pool``. Unequal sizes become a generic memory pass.
    """
    x = b.place_of(call.inputs[0])
    space = call.out.shape[2:]
    if len(x.tensor.dims) - 2 not in _SPATIAL_DIMS or len(set(space)) != 1:
        add_memory_pass(b, call, "pool")
    elif set(space) == {1}:
        b.record_output(call.out, b.add_layer("global_pool", {"keep_space": True}, [x], call.path))
    else:
        b.record_output(call.out, b.add_layer("adaptive_avg_pool", {"size": space[0]}, [x], call.path))
