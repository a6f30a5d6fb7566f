"""Pools: windows of the largest or the mean, over parts of an image or all of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paleo.importers.builder import UntranslatableError
from paleo.importers.operators.convolution import SPACE, per_dim, short
from paleo.importers.operators.passes import memory_pass
from paleo.importers.rules import (
    Reading,
    onnx_operators,
    plain_functions,
    torch_functions,
    translates,
)  # fmt: skip

if TYPE_CHECKING:
    from paleo.importers.builder import Builder
    from paleo.importers.rules import (
        Invocation,
        OnnxNode,
    )
    from paleo.importers.trace import Call

plain_functions("pool_pass", "lp_pool1d lp_pool2d lp_pool3d fractional_max_pool2d fractional_max_pool3d")
_MAX = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVERAGE = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")


@torch_functions(
    "max_pool1d max_pool2d max_pool3d max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices "
    "boolean_dispatch1d boolean_dispatch2d boolean_dispatch3d"
)
def _max_pool(call: Invocation) -> Reading:
    return call.reading("max_pool", _MAX, ("input",))


@torch_functions("avg_pool1d avg_pool2d avg_pool3d")
def _avg_pool(call: Invocation) -> Reading:
    return call.reading("avg_pool", _AVERAGE, ("input",))


@torch_functions("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")
def _adaptive(call: Invocation) -> Reading:
    return call.reading("adaptive_avg_pool", ("input", "output_size"), ("input",))


@torch_functions(
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_max_pool1d_with_indices "
    "adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices"
)
def _adaptive_max(call: Invocation) -> Reading:
    return call.reading("pool_pass", ("input", "output_size"), ("input",))


@onnx_operators("AveragePool")
def _onnx_average(node: OnnxNode) -> Reading:
    reading = _onnx_pool(node)
    return Reading("avg_pool", reading.inputs, reading.options) if reading.kind == "max_pool" else reading


@onnx_operators("MaxPool")
def _onnx_pool(node: OnnxNode) -> Reading:
    options = node.options
    pads = list(options.get("pads") or [])
    rank = len(pads) // 2
    automatic = options.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID")
    if not options.get("kernel_shape") or automatic or any(pads[i] != pads[i + rank] for i in range(rank)):
        return Reading("copy", node.inputs[:1])
    kernel = list(options["kernel_shape"])
    more = {"kernel_size": kernel, "stride": options.get("strides") or [1] * len(kernel)}
    more |= {"padding": pads[:rank] or 0, "ceil_mode": options.get("ceil_mode", 0)}
    return Reading("max_pool", node.inputs[:1], more | {"dilation": options.get("dilations")})


@onnx_operators("GlobalAveragePool GlobalMaxPool GlobalLpPool")
def _onnx_global(node: OnnxNode) -> Reading:
    return Reading("adaptive_avg_pool", node.inputs[:1])


@translates("pool_pass")
def pool_pass(b: Builder, call: Call) -> None:
    """A pooling window that no layer describes, as a pass over memory."""
    memory_pass(b, call, "pool")


@translates("max_pool avg_pool")
def pool(b: Builder, call: Call) -> None:
    """Pooling by windows of one size."""
    x, options = b.at(call.inputs[0]), call.options
    rank = len(x.tensor.dims) - 2
    if rank not in SPACE or set(per_dim(options.get("dilation"), rank, 1)) != {1}:
        memory_pass(b, call, "pool")
        return
    if set(call.out.shape[2:]) == {1}:
        settings = {"operation": call.kind.removesuffix("_pool"), "keep_space": True}
        b.put(call.out, b.add("global_pool", settings, [x], call.path))
        return
    kernel = per_dim(options["kernel_size"], rank, 1)
    stride = per_dim(options.get("stride"), rank, 0) if options.get("stride") else kernel
    padding = per_dim(options.get("padding"), rank, 0)
    window: dict[str, Any] = {"kernel": short(kernel), "stride": None if stride == kernel else short(stride)}
    window["padding"] = short(padding) if any(padding) else None
    window["ceil"] = True if options.get("ceil_mode") else None
    window["keeps_input"] = True if call.kind == "max_pool" and call.inputs[0] in (call.saved or ()) else None
    try:
        b.put(call.out, b.add(call.kind, window, [x], call.path))
    except UntranslatableError:
        memory_pass(b, call, "pool")


@translates("adaptive_avg_pool")
def adaptive(b: Builder, call: Call) -> None:
    """Pooling to a stated number of rows and columns."""
    x = b.at(call.inputs[0])
    space = call.out.shape[2:]
    if len(x.tensor.dims) - 2 not in SPACE or len(set(space)) != 1:
        memory_pass(b, call, "pool")
    elif set(space) == {1}:
        b.put(call.out, b.add("global_pool", {"keep_space": True}, [x], call.path))
    else:
        entry = b.add("adaptive_avg_pool", {"size": space[0]}, [x], call.path)
        b.put(call.out, entry)
