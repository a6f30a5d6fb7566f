"""Rules for attention (whole layers, and the core alone) and feed-forward blocks."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

from paleo.importers._builder import (
    NetworkBuilder,
    OnnxNode,
    TensorPlace,
    TorchInvocation,
    TranslatedCall,
    UntranslatableError,
    register_onnx_reader,
    register_torch_reader,
    register_translation,
)
from paleo.importers._network_trace import TracedCall, TracedTensor, dropout_rate

_MULTI_HEAD_TENSORS = (
    "query", "key", "value", "in_proj_weight", "in_proj_bias", "out_proj_weight", "out_proj_bias", "q_proj_weight",
    "k_proj_weight", "v_proj_weight", "bias_k", "bias_v",
)  # fmt: skip


@register_torch_reader("multi_head_attention_forward")
def _read_multi_head(call: TorchInvocation) -> TranslatedCall:
    import torch

    names = tuple(inspect.signature(torch.nn.functional.multi_head_attention_forward).parameters)
    arguments = call.arguments(*names)
    options = {
        "heads": arguments["num_heads"],
        "dropout": arguments.get("dropout_p", 0.0),
        "causal": bool(arguments.get("is_causal")),
        "weights": bool(arguments.get("need_weights", True)),
    }
    return TranslatedCall("mha", [call.tensor(arguments.get(name)) for name in _MULTI_HEAD_TENSORS], options)


@register_onnx_reader("Attention")
def _onnx_attention(node: OnnxNode) -> TranslatedCall:
    query = node.input(0)
    if query is None or len(query.shape) != 4 or any(value is not None for value in node.inputs[4:]):
        return TranslatedCall("unknown", node.inputs)
    causal = {"is_causal": bool(node.options.get("is_causal"))}
    return TranslatedCall("sdpa", [*node.inputs[:3], node.input(3)], causal)


# Layers.


@register_translation("sdpa")
def add_attention_core(b: NetworkBuilder, call: TracedCall) -> None:
    """Append scaled dot-product attention to network ``b`` for a recorded sdpa call: two einsums around a softmax.

    Leading dims other than the batch are heads.
    """
    values = call.inputs[:3]
    if any(value is None or len(value.shape) < 2 for value in values):
        raise UntranslatableError("attention over fewer than 2 dims")
    query, key, value = (_four_dims(b, b.place_of(v), v, call) for v in values if v is not None)
    if key.tensor.sizes[1] != query.tensor.sizes[1]:
        heads = query.tensor.sizes[1]
        key, value = (b.add_view(x, x.dims | {x.tensor.dims[1]: heads}, call.path) for x in (key, value))
    lead = query.tensor.dims[:2]
    key_letters = "b h d k" if call.options.get("transposed_key") else "b h k d"
    dims = [*lead, *(_free(name, lead) for name in ("seq", "keys"))]
    products = {"equation": f"b h q d, {key_letters} -> b h q k", "dims": dims}
    scores = b.add_layer("einsum", products, [query, key], call.path)
    weights = b.add_layer("softmax", {}, [scores.place], call.path)
    rate = dropout_rate(call.options.get("dropout_p"))
    if rate:
        weights = b.add_layer("dropout", {"rate": rate}, [weights.place], call.path)
    context = {"equation": "b h q k, b h k d -> b h q d", "dims": [*dims[:3], _free("head_dim", dims[:3])]}
    out = b.add_layer("einsum", context, [weights.place, value], call.path)
    b.place_by_value[call.out] = b.add_reshape(out.place, call.out.shape, call.path)


def _four_dims(b: NetworkBuilder, place: TensorPlace, value: TracedTensor, call: TracedCall) -> TensorPlace:
    """Return the tensor at ``place`` as a view with four dims (batch, heads, rows, columns) in network ``b``."""
    *lead, rows, columns = value.shape
    return b.add_reshape(place, (lead[0] if lead else 1, math.prod(lead[1:]), rows, columns), call.path)


def _free(name: str, taken: Sequence[str]) -> str:
    return name if name not in taken else f"{name}_rows"


@register_translation("attention")
def add_attention_layer(b: NetworkBuilder, call: TracedCall) -> None:
    """Append one attention layer with its projections to network ``b`` for a recognised group of calls.

    The call's options (heads, kv_heads, head_dim, biases, …) become options of the layer. Afterwards ``b.placed`` maps
    the call's output to the layer.
    """
    options = dict(call.options)
    inputs = [b.place_of(value) for value in call.inputs[: options.pop("inputs")]]
    hidden = inputs[0].tensor.sizes[-1]
    settings: dict[str, Any] = {"heads": options["heads"]}
    settings["kv_heads"] = options["kv_heads"] if options["kv_heads"] != options["heads"] else None
    settings["head_dim"] = options["head_dim"] if options["head_dim"] * options["heads"] != hidden else None
    settings |= {key: options[key] or None for key in ("causal", "rotary", "qk_norm", "dropout")}
    settings["bias"] = None if options["bias"] else False
    settings["key_bias"] = options["key_bias"]
    settings["out_bias"] = options["out_bias"] if options["out_bias"] != options["bias"] else None
    sources = [_sequence(b, place, "keys" if index else "seq", call) for index, place in enumerate(inputs)]
    b.record_output(call.out, b.share_weights(b.add_layer("attention", settings, sources, call.path), call.inputs))


def _sequence(b: NetworkBuilder, place: TensorPlace, seq: str, call: TracedCall) -> TensorPlace:
    """Return the tensor at ``place`` as a view with dims (batch, ``seq``, hidden)."""
    dims = place.tensor.dims
    last = dims[-1] if dims[-1] not in ("batch", "seq", "keys") else "hidden"
    name = dims[1] if dims[1] not in ("batch", last) and seq == "seq" else seq
    name = name if name != "keys" or seq == "keys" else "seq"
    return b.add_view(place, dict(zip(("batch", name, last), place.tensor.sizes, strict=True)), call.path)


@register_translation("mlp")
def add_mlp_layer(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a transformer's feed-forward layer (``mlp``) to network ``b`` for a recognised group of calls.

    Afterwards ``b.placed`` maps the call's output to the layer.
    """
    options = call.options
    settings = {"ffn": options["ffn"], "activation": options["activation"], "bias": None if options["bias"] else False}
    settings["dropout"] = options["dropout"] or None
    entry = b.add_layer("mlp", settings, [b.place_of(call.inputs[0])], call.path)
    b.record_output(call.out, b.share_weights(entry, call.inputs))


@register_translation("mha")
def add_multi_head_attention(b: NetworkBuilder, call: TracedCall) -> None:
    """Append an attention layer to network ``b`` for a call of ``nn.MultiheadAttention``.

    Query, key and value of the call are (seq, batch, hidden), or (seq, hidden) without a batch. The layer works on
    (batch, seq, hidden), so views convert them and its output.
    """
    query, key, value = call.inputs[:3]
    packed, in_bias, out, out_bias = call.inputs[3:7]
    if query is None or key is None or value is None or out is None or call.inputs[10] is not None:
        raise UntranslatableError("attention without a key, or with a bias token")
    if packed is None and any(v is None or v.shape[1] != query.shape[2] for v in call.inputs[7:10]):
        raise UntranslatableError("keys of another width")
    sources = [_batch_first(b, b.place_of(query), "seq", call)]
    if _origin(query) is not _origin(key):
        sources.append(_batch_first(b, b.place_of(key), "keys", call))
    bias = in_bias is not None
    settings: dict[str, Any] = {"heads": call.options["heads"], "causal": call.options["causal"] or None}
    settings |= {"dropout": dropout_rate(call.options["dropout"]) or None, "bias": None if bias else False}
    settings["out_bias"] = (out_bias is not None) if (out_bias is not None) != bias else None
    entry = b.share_weights(b.add_layer("attention", settings, sources, call.path), call.inputs)
    batch, seq, hidden = entry.out.sizes
    if not call.options["weights"]:  # the output of heads is batch-first and is copied for the output projection
        copy = {"kind": "copy", "of": "transpose", "dims": entry.place.dims, "flops_per_element": 0.0}
        entry = b.add_layer("pass", copy | {"kept_per_element": 1.0}, [entry.place], call.path)
    dims = {entry.out.dims[1]: seq, "batch": batch, entry.out.dims[2]: hidden}
    back = b.add_view(entry.place, dims, call.path)
    if len(call.out.shape) == 2:
        back = b.add_reshape(back, call.out.shape, call.path)
    if back.tensor.sizes != call.out.shape:
        raise UntranslatableError("another shape")
    b.place_by_value[call.out] = back


def _origin(value: TracedTensor) -> TracedTensor:
    """Follow a chain of views (reshape, transpose, …) back to the tensor at its start, and return that tensor."""
    while (view := value.producer_of_kind("view")) is not None and view.inputs[0] is not None:
        value = view.inputs[0]
    return value


def _batch_first(b: NetworkBuilder, place: TensorPlace, seq: str, call: TracedCall) -> TensorPlace:
    """Return the tensor (seq, batch, hidden) as a view (batch, seq, hidden).

    A tensor (seq, hidden) gets a batch of 1.
    """
    rows, *batch, hidden = place.tensor.sizes
    return b.add_view(place, {"batch": batch[0] if batch else 1, seq: rows, "hidden": hidden}, call.path)
