"""Rules for recurrent layers and single cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paleo.importers._builder import (
    LayerEntry,
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
from paleo.importers._network_trace import TracedCall, dropout_rate

#: Largest distance in entries between the first product of a cell and its last entry.
_CELL_ENTRIES = 5
_CELLS = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "rnn", "rnn_relu": "rnn"}


@register_torch_reader(" ".join(_CELLS))
def _layers(call: TorchInvocation) -> TranslatedCall:
    """Convert a call of ``torch.lstm``, ``gru`` or ``rnn_*`` to a `TranslatedCall` of kind ``rnn``.

    The positional arguments are input, states, weights, has-biases, number of layers, dropout, train, bidirectional,
    batch-first. For packed sequences they are data, batch sizes, states, weights and so on.
    """
    args = call.args
    packed = call.tensor_lookup.is_tensor(args[1]) and isinstance(args[3], list | tuple)
    weights, arguments = (args[3], args[4:]) if packed else (args[2], args[3:])
    biases, layers, dropout, _, bidirectional, batch_first = (*arguments, False)[:6]
    options = {
        "cell": _CELLS[call.name],
        "layers": layers,
        "both": bool(bidirectional),
        "bias": bool(biases),
        "batch_first": bool(batch_first) and not packed,
        "dropout": dropout,
        "packed": packed,
        "projected": call.name == "lstm" and len(weights) > 0 and len(weights) % (3 + 2 * bool(biases)) == 0
        and len(weights) // (layers * (1 + bool(bidirectional))) == 3 + 2 * bool(biases),
    }  # fmt: skip
    steps = [call.tensor(args[1])] if packed else []
    return TranslatedCall("rnn", [call.tensor(args[0]), *(call.tensor(w) for w in weights), *steps], options)


@register_torch_reader("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def _cell(call: TorchInvocation) -> TranslatedCall:
    """Convert a call of a single recurrent cell (lstm_cell, …) to a `TranslatedCall` of kind ``cell``.

    The arguments are the input, the states, the weights of input and state, and their biases.
    """
    x, states, *weights = call.args
    listed = states if isinstance(states, list | tuple) else [states]
    weights = [call.tensor(w) for w in [*weights, *call.kwargs.values()]][:4]
    return TranslatedCall("cell", [call.tensor(x), call.tensor(listed[0]), *weights, *map(call.tensor, listed[1:])])


@register_onnx_reader("LSTM GRU RNN")
def _onnx_layers(node: OnnxNode) -> TranslatedCall:
    weight = node.input(2)
    if weight is None or len(weight.shape) != 3 or node.options.get("layout") or not node.options.get("hidden_size"):
        return TranslatedCall("unknown", node.inputs)
    gates = weight.shape[1] / weight.shape[2]
    options = {
        "cell": {4.0: "lstm", 3.0: "gru"}.get(gates, "rnn"),
        "hidden": node.options["hidden_size"],
        "both": weight.shape[0] == 2,
        "bias": node.input(3) is not None,
    }
    return TranslatedCall("sequence_rnn", node.inputs[:4], options)


# Layers.


@register_translation("sequence_rnn")
def add_onnx_rnn(b: NetworkBuilder, call: TracedCall) -> None:
    """Append a recurrent layer to network ``b`` for an ONNX node LSTM, GRU or RNN.

    The input is (seq, batch, features), the output (seq, directions, batch, hidden).
    """
    x = b.place_of(call.inputs[0])
    rows, batch, width = x.tensor.sizes
    x = b.add_view(x, {"batch": batch, "seq": rows, "features": width}, call.path)
    entry = b.add_layer(call.options["cell"], _settings(call, call.options["hidden"]), [x], call.path)
    for value in call.outputs:
        if value.elements:
            b.place_by_value[value] = b.add_view(entry.place, b.dims_of(value.shape), call.path)


def _settings(call: TracedCall, hidden: int) -> dict[str, Any]:
    bidirectional, bias = call.options["both"], call.options["bias"]
    return {"hidden": hidden, "bidirectional": bidirectional or None, "biases": None if bias else 0}


@register_translation("rnn")
def add_torch_rnn(b: NetworkBuilder, call: TracedCall) -> None:
    """Append recurrent layers to network ``b`` for one call of torch.lstm, gru or rnn: one entry per stacked layer.

    Dropout between the layers becomes entries of its own. Afterwards ``b.placed`` maps output and final states to the
    last layer.
    """
    x = _batch_first(b, call)
    options = call.options
    directions = 1 + options["both"]
    last = call.out.shape[-1] // directions
    settings = _settings(call, last)
    if options["projected"]:
        hidden = next(v for v in call.inputs[1:] if v is not None).shape[0] // 4
        settings |= {"hidden": hidden, "projection": last}
    # The elements that autograd saves over all steps, for each element of the states.
    steps = float(x.tensor.sizes[0] * x.tensor.sizes[1]) * (1 + call.options["both"])
    states, layers = steps * settings["hidden"], call.options["layers"]
    between = steps * settings.get("projection", settings["hidden"]) * (layers - 1)
    kept = (call.saved_temporary_elements - between) / (states * layers)
    settings["kept_per_state"] = round(kept, 2) if call.saved_tensors is not None and kept > 0 else None
    rate = dropout_rate(options.get("dropout"))
    for layer in range(options["layers"]):
        x = b.add_layer(options["cell"], settings, [x], call.path).place
        if rate and layer + 1 < options["layers"]:
            x = b.add_layer("dropout", {"rate": rate}, [x], call.path).place
    _place_outputs(b, call, x)


def _batch_first(b: NetworkBuilder, call: TracedCall) -> TensorPlace:
    """Return the input of a recurrent call as (batch, seq, features).

    A packed sequence is taken to hold sequences of equal length; otherwise UntranslatableError is raised.
    """
    x = b.place_of(call.inputs[0])
    sizes = x.tensor.sizes
    if call.options["packed"]:
        steps = call.inputs[-1]
        rows = steps.shape[0] if steps is not None else 1
        if int(sizes[0]) % rows:
            raise UntranslatableError("sequences of several lengths")
        sizes = (int(sizes[0]) // rows, rows, sizes[1])
    elif len(sizes) == 2:
        sizes = (1, *sizes)
    elif not call.options["batch_first"]:
        sizes = (sizes[1], sizes[0], sizes[2])
    return b.add_view(x, dict(zip(("batch", "seq", "features"), sizes, strict=True)), call.path)


def _place_outputs(b: NetworkBuilder, call: TracedCall, x: TensorPlace) -> None:
    batch, seq, _ = x.tensor.sizes
    shape = call.out.shape
    if len(shape) == 3 and not call.options["batch_first"]:
        out = b.add_view(x, {"seq": seq, "batch": batch, "features": x.tensor.sizes[2]}, call.path)
    else:
        out = x if x.tensor.sizes == shape else b.add_reshape(x, shape, call.path)
    if out.tensor.sizes != shape:
        raise UntranslatableError("another shape")
    b.place_by_value[call.out] = out
    for state in call.outputs[1:]:
        if state.elements and not state.is_integer:
            b.place_by_value[state] = b.add_view(x, b.dims_of(state.shape), call.path)


@register_translation("cell")
def add_recurrent_cell(b: NetworkBuilder, call: TracedCall) -> None:
    """Append one step of a recurrent cell to network ``b``: linear layers of input and state, a pass for the gates."""
    weights = call.inputs[2:6]
    biases = len(weights) > 2 and weights[2] is not None
    gates = [_gate_product(b, call, call.inputs[place], weights[place], bias=biases) for place in (0, 1)]
    states = [b.place_of(value) for value in call.inputs[6:] if value is not None and not value.is_static]
    kept = call.saved_temporary_elements / float(gates[0].out.elements)
    keeps = "output" if call.saved_tensors is not None and call.out in call.saved_tensors else None
    for value in call.outputs:
        dims = b.dims_of(value.shape, gates[0].out)
        options = {"kind": "elementwise", "of": call.source_name, "dims": dims, "flops_per_element": 10.0}
        options |= {"kept_per_element": kept or None, "keeps": keeps}
        b.record_output(value, b.add_layer("pass", options, [*(gate.place for gate in gates), *states], call.path))
        kept, keeps = 0.0, None


def _gate_product(b: NetworkBuilder, call: TracedCall, source: Any, weight: Any, *, bias: bool) -> LayerEntry:
    matrix, owner = b.weight_and_owner(weight)
    options = {"features": matrix.shape[0], "dim": "gates", "bias": bias}
    entry = b.add_layer("linear", options, [b.place_of(source)], call.path)
    entry.weight_owner = None if owner is None else _holder(b, owner, matrix.shape)
    return entry


def _holder(b: NetworkBuilder, owner: LayerEntry, shape: Sequence[int]) -> LayerEntry:
    """Return the linear layer with a weight of this shape, among those of the cell whose last entry is ``owner``.

    Later steps of the same cell share its weights.
    """
    entries = b.network.entries
    place = entries.index(owner)
    for entry in entries[max(0, place - _CELL_ENTRIES) : place + 1]:
        if entry.kind == "linear" and entry.weight_owner is None and entry.options["features"] == shape[0]:
            inputs = next((op.read_tensors[1] for op in entry.operations), None)
            if inputs is not None and inputs.elements == shape[0] * shape[1]:
                return entry
    raise UntranslatableError("weights of another layer")
