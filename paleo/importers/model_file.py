"""Translation of traced networks into model files.

Entries get names where others refer to them, sizes become expressions of batch and seq, repeated entries become loops,
and a classifier gets a loss at its end. The YAML is made readable: short values on one line, one layer on each line,
long texts folded.

A trace is first translated into entries. Every call becomes layers with named dims. The FLOP of the layers are compared
with those that the source counted. If the layers do not reproduce shape and FLOP of the call, the call becomes an
opaque layer with its bytes and FLOP, so that nothing is lost.

Repeated entries are folded into loops. Repetitions are found by comparing the chain of entries with itself, shifted. A
loop carries one tensor from each iteration to the next.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from paleo.errors import SpecError
from paleo.importers._builder import (
    LAYER_TRANSLATIONS,
    EntryReference,
    ImportedNetwork,
    LayerEntry,
    NetworkBuilder,
    UntranslatableError,
)
from paleo.importers._network_trace import Trace, TracedCall, saved_for_backward
from paleo.importers.patterns import recognise_patterns
from paleo.layers.base import LAYERS
from paleo.operations.tensor import default_precision
from paleo.specs.loading import MAX_FILE_BYTES, parse_yaml

#: Most places that are tried for a repetition, in all and in one run, and the longest iteration.
_MAX_REPETITION_TRIALS, _MAX_REPETITION_STARTS, _MAX_REPEATED_BODY_LENGTH = 4000, 16, 3000


@dataclass(eq=False)
class _LayerLoop:
    """Repeated block of layers in an imported network: ``times`` iterations of ``body``.

    ``carried_input`` is the input of the first iteration, ``last_entry`` the layer whose output leaves the last
    iteration.
    """

    times: int
    body: list[EntryOrLoop]
    carried_input: LayerEntry | str
    last_entry: LayerEntry


_EntrySignatureIds = npt.NDArray[np.int64]
#: Layers that read the output, or use the weights, of a layer or of an input of the network.
_Consumers = Mapping[EntryReference, list[LayerEntry]]
EntryOrLoop = LayerEntry | _LayerLoop


def _fold_repeated_layers(entries: Sequence[LayerEntry]) -> list[EntryOrLoop]:
    """Fold repeated parts of a list of layers into loops, starting with the loop that saves most lines.

    Parameters
    ----------
    entries : sequence of LayerEntry
        Layers in order.

    Returns
    -------
    list of LayerEntry or LayerLoop
        Layers and loops in order.
    """
    consumers: dict[EntryReference, list[LayerEntry]] = {}
    for entry in entries:
        for ref in entry.references:
            consumers.setdefault(ref, []).append(entry)
    kinds: dict[str, int] = {}
    marks = np.array([kinds.setdefault(_signature(entry), len(kinds)) for entry in entries], dtype=np.int64)
    return _folded(list(entries), marks, consumers)


def _signature(entry: LayerEntry) -> str:
    lent = [entry.weight_owner is None, entry.tied_entry is None, entry.frozen, entry.backward_flops]
    out = entry.out
    return json.dumps([entry.kind, entry.options, len(entry.inputs), lent, out.dims, out.sizes], default=str)


def _folded(entries: list[LayerEntry], marks: _EntrySignatureIds, consumers: _Consumers) -> list[EntryOrLoop]:
    best = _best(entries, marks, consumers)
    if best is None:
        return list(entries)
    start, length, times, carry = best
    stop = start + length * times
    parts = (slice(None, start), slice(start, start + length), slice(stop, None))
    left, body, right = (_folded(entries[part], marks[part], consumers) for part in parts)
    return [*left, _LayerLoop(times, body, carry, entries[stop - 1]), *right]


def _best(
    entries: list[LayerEntry], marks: _EntrySignatureIds, consumers: _Consumers
) -> tuple[int, int, int, LayerEntry | str] | None:
    """Find the repeated block of layers whose folding into a loop saves most entries; None without repetition.

    Returns (index of the first entry, entries per iteration, number of iterations, input of the first iteration).
    """
    # Return for each boundary the last entry that reads across it, except from the entry just before it.
    places = {entry: place for place, entry in enumerate(entries)}
    over = np.full(len(entries) + 1, -1, dtype=np.int64)
    for place, entry in enumerate(entries):
        readers = [places.get(reader, len(entries)) for reader in consumers.get(entry, ())]
        over[place + 2 : max(readers, default=0) + 1] = place
    repetitions = _candidates(marks, over)
    candidates = sorted(repetitions, key=lambda r: (-r[1] * (r[2] - 1), r[1], r[0]))
    for start, length, times in candidates[:_MAX_REPETITION_TRIALS]:
        carry = _carried(entries, start, length, times, consumers)
        if carry is not None:
            return start, length, times, carry
    return None


def _candidates(marks: _EntrySignatureIds, over: _EntrySignatureIds) -> Iterator[tuple[int, int, int]]:
    """Yield (start, length, times) of repeated layer sequences whose iterations pass on only their last output."""
    count = len(marks)
    for length in range(1, min(count // 2, _MAX_REPEATED_BODY_LENGTH) + 1):
        same = np.concatenate(([False], marks[:-length] == marks[length:], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1])
        for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            starts = np.arange(begin, min(begin + length + 1, end - length + 1))
            for start in starts[over[starts + length] < starts][:_MAX_REPETITION_STARTS].tolist():
                times = (end - start) // length + 1
                if times >= 2 and length * (times - 1) >= 2:
                    yield start, length, times


def _carried(
    entries: list[LayerEntry], start: int, length: int, times: int, consumers: _Consumers
) -> LayerEntry | str | None:
    """Return the tensor that enters the first iteration from outside and each later one from the iteration before.

    Returns None if the entries form no loop.
    """
    places: dict[EntryReference, int] = {e: place for place, e in enumerate(entries[start : start + length * times])}
    carries: dict[EntryReference, None] = {}
    for place in range(length):
        iterations = [entries[start + iteration * length + place].references for iteration in range(times)]
        for refs in zip(*iterations, strict=True):
            kind = _relation(refs, length, places)
            if kind is None:
                return None
            carries |= {refs[0]: None} if kind == "carried" else {}
    carry, last = next(iter(carries), None), entries[start + length - 1].out
    if carry is None or len(carries) > 1:
        return None
    if isinstance(carry, LayerEntry) and (carry.out.dims, carry.out.sizes) != (last.dims, last.sizes):
        return None  # the graph checks the inputs of the network
    return carry if _is_self_contained(length, times, places, consumers) else None


def _relation(refs: tuple[EntryReference, ...], length: int, places: Mapping[EntryReference, int]) -> str | None:
    """Classify the source of a layer's input in all iterations of a loop: "inside", "outside" or "carried".

    "inside" is the same iteration, "outside" a tensor from before the loop, "carried" the previous iteration.

    Returns None if the iterations differ.
    """
    inside = [places.get(ref) for ref in refs]
    if all(position is None for position in inside):
        return "outside" if all(ref == refs[0] for ref in refs) else None
    if inside[0] is not None and inside == [inside[0] + iteration * length for iteration in range(len(refs))]:
        return "inside" if inside[0] < length else None
    carried = all(position == iteration * length - 1 for iteration, position in enumerate(inside) if iteration)
    return "carried" if inside[0] is None and carried else None


def _is_self_contained(length: int, times: int, places: Mapping[EntryReference, int], consumers: _Consumers) -> bool:
    """Return True if only the last output of each iteration of a candidate loop is read outside that iteration."""
    for entry, position in places.items():
        iteration, place = divmod(position, length)
        for reader in consumers.get(entry, ()):
            read_at = places.get(reader)
            if read_at is not None and read_at // length == iteration:
                continue
            follows = iteration == times - 1 if read_at is None else read_at // length == iteration + 1
            if place != length - 1 or not follows:
                return False
    return True


_FP32 = default_precision("fp32")
#: Largest relative difference between the FLOP of layers and those that the source counted.
_FLOP_TOLERANCE = 0.0005
#: Calls that move data without computing.
_WITHOUT_FLOPS = frozenset({"cat", "view", "slice"})


def _network_of_trace(trace: Trace) -> ImportedNetwork:
    """Convert the operator calls of a trace to the layers of a network, in order.

    Parameters
    ----------
    trace : Trace
        Recorded operator calls of a network.

    Returns
    -------
    ImportedNetwork
        Layers with their inputs.

    Raises
    ------
    SpecError
        If a call cannot be expressed as layers; the message names its module and operator.
    """
    builder = NetworkBuilder(trace)
    for call in trace.calls:
        try:
            _place(builder, call)
        except UntranslatableError as error:
            raise SpecError(f"{call.path or 'the network'}: cannot place {call.source_name}: {error}") from None
    return builder.finished_network()


def _place(builder: NetworkBuilder, call: TracedCall) -> None:
    if not any(value.is_activation for value in call.outputs):
        return
    names = call.parameter_names
    builder.adds_frozen_layers = bool(names) and (names <= builder.trace.frozen_parameters or not call.trains_weights)
    mark = len(builder.network.entries)
    known = dict(builder.place_by_value), dict(builder.parameter_owners), dict(builder.view_sources)
    try:
        _translate(builder, call)
    except UntranslatableError:
        del builder.network.entries[mark:]
        builder.place_by_value, builder.parameter_owners, builder.view_sources = known
        for part in call.replaced_calls:
            _place(builder, part)
        if not call.replaced_calls:
            _place_opaque(builder, call)
    if call.stops_gradient:
        for value in call.outputs:
            if value in builder.place_by_value and value.is_activation:
                entry = builder.add_layer("detach", {}, [builder.place_by_value[value]], call.path)
                builder.place_by_value[value] = entry.place


def _translate(builder: NetworkBuilder, call: TracedCall) -> None:
    if call.kind not in LAYER_TRANSLATIONS:
        raise UntranslatableError(call.kind)
    mark = len(builder.network.entries)
    before = set(builder.parameter_owners)
    LAYER_TRANSLATIONS[call.kind](builder, call)
    entries = builder.network.entries[mark:]
    if call.flops is not None and call.kind not in _WITHOUT_FLOPS:
        kernels = (kernel for e in entries for operation in e.operations for kernel in operation.forward_kernels(_FP32))
        counted = sum(kernel.flops for kernel in kernels)
        if abs(counted - call.flops) > _FLOP_TOLERANCE * max(counted, call.flops):
            raise UntranslatableError(f"{counted} FLOP, not {call.flops}")
    _check_parameters(builder, call, entries, before)


def _check_parameters(
    builder: NetworkBuilder, call: TracedCall, entries: Sequence[LayerEntry], before: set[str]
) -> None:
    """Check that the layers made from a call hold as many new parameters as the call is the first to read."""
    names = call.parameter_names
    new = sum(builder.trace.parameter_counts[name] for name in names if name not in before)
    stated = sum(entry.unshared_parameter_count for entry in entries)
    learned = [entry for entry in entries if entry.unshared_parameter_count]
    owners = learned if len(learned) == 1 else (entries or builder.network.entries)[-1:]
    if names and not owners:
        raise UntranslatableError("weights before the first layer")
    for name in names:
        builder.parameter_owners.setdefault(name, owners[0])
    if stated > new:
        raise UntranslatableError(f"{stated:g} parameters, not {new}")
    if stated < new and entries:
        holder = builder.add_parameter_layer(int(new - stated), entries[-1].place, call.source_name, call.path)
        builder.replace_producer(entries[-1], holder)


def _place_opaque(builder: NetworkBuilder, call: TracedCall) -> None:
    """Append an ``opaque`` layer for a call that no layer describes, with its bytes, FLOP and parameters."""
    sources = builder.activation_or_index_inputs(call) or [builder.first_input]
    largest = max(sources, key=lambda source: source.tensor.elements).tensor
    values = [value for value in call.outputs if value.is_activation and value.elements]
    for value in values:
        options: dict[str, Any] = {"of": call.source_name}
        options["parameters"] = builder.new_parameter_count(call.inputs) or None
        options["dims"] = builder.dims_of(value.shape, largest) or {"batch": 1}
        options["keeps"] = (saved_for_backward(call) if value is values[0] else None) or "nothing"
        if value is values[0]:
            options["kept_per_element"] = builder.saved_temporaries_per_element(call, value)
            options["flops_per_element"] = call.flops / value.elements if call.flops else None
        entry = builder.add_layer("opaque", options, sources, call.path)
        builder.place_by_value[value] = entry.place
        for name in call.parameter_names:
            builder.parameter_owners.setdefault(name, entry)


def model_file_of_trace(
    trace: Trace, *, title: str, source: str, sizes: Mapping[str, int], loss: str = "auto"
) -> dict[str, Any]:
    """Convert a trace to the content of a model file, a dict ready for YAML.

    Parameters
    ----------
    trace : Trace
        Calls of a network.
    title : str
        Title of the model.
    source : str
        Origin of the network.
    sizes : dict of str to int
        Default values of the sizes that the trace found to be variable, such as ``seq``.
    loss : str, optional
        ``auto`` ends a classifier with its loss, ``none`` does not.

    Returns
    -------
    dict of str to Any
        Content of a model file, as YAML reads it.
    """
    network = _network_of_trace(recognise_patterns(trace))
    writer = _Writer(network)
    ending = None if loss == "none" else _loss(network)
    layers = writer.network_lines(_fold_repeated_layers(network.entries), ending)
    params = {name: size for name, size in sizes.items() if name != "batch"}
    # Sentences about what the counts assume or leave out.
    notes = [f"{note[:1].upper()}{note[1:]}." for note in trace.notes]
    if trace.fixed_batch is not None:
        notes.append(f"The module runs at a batch of {trace.fixed_batch} alone: a sample is that whole batch.")
    if trace.checkpointed_modules:
        modules = sorted(set(trace.checkpointed_modules))
        names = ", ".join(name or "the module itself" for name in modules[:3]) + (", …" if len(modules) > 3 else "")
        notes.append(f"The module computes activations again ({names}): predict with --recompute full.")
    if trace.frozen_parameters:
        count = sum(trace.parameter_counts[name] for name in trace.frozen_parameters)
        notes.append(f"{count} parameters are not trained.")
    model: dict[str, Any] = {"title": title, "task": "imported", "source": source}
    model["notes"] = " ".join([_notes(network), *notes])
    model |= {"params": params} if params else {}
    model |= {"tokens": "=seq"} if "seq" in params else {}
    inputs = {name: writer.input(name) for name in network.inputs}
    return model | {"inputs": inputs, "layers": layers}


def _loss(network: ImportedNetwork) -> str | None:
    last = network.output_entry.out if isinstance(network.output_entry, LayerEntry) else None
    if last is None or last.role != "activation":
        return None
    classes = len(last.dims) == 2 and last.dims[0] == "batch" and last.sizes[1] > 1
    return "cross_entropy" if classes or last.dims[-1] == "vocab" else None


#: First words of the notes on a traced network: every call became a layer, or some did not.
ALL_CALLS_RECOGNISED_TEXT, CALLS_NOT_RECOGNISED_TEXT = "Every call was recognised", "Not recognised"


def _notes(network: ImportedNetwork) -> str:
    opaque = sorted({entry.options["of"] for entry in network.entries if entry.kind == "opaque"})
    if not opaque:
        return f"{ALL_CALLS_RECOGNISED_TEXT}."
    listed = ", ".join(opaque[:20]) + (", …" if len(opaque) > 20 else "")
    return f"{CALLS_NOT_RECOGNISED_TEXT}, priced as passes over memory: {listed}."


class _Writer:
    """Converts an imported network to lines of a model file; only layers that other lines refer to get names."""

    def __init__(self, network: ImportedNetwork) -> None:
        self.network = network
        self._names: dict[LayerEntry | str, str] = {name: name for name in network.inputs}
        #: Names of the entries whose weights others share.
        self._lenders: dict[LayerEntry, str] = {}
        self._taken = set(network.inputs) | {"input"}
        self._loops = 0

    def input(self, name: str) -> dict[str, Any]:
        """Return the entry of one input in the model file.

        Parameters
        ----------
        name : str
            Name of the input.

        Returns
        -------
        dict
            Size of each dim, and the role of an index tensor.
        """
        tensor = self.network.inputs[name]
        dims = self.dims(tensor.shape)
        return {"dims": dims} | ({"role": "index"} if tensor.role == "index" else {})

    def dims(self, sizes: Mapping[str, Any]) -> dict[str, Any]:
        """Return the size of each dim as a number or an expression such as ``=batch``.

        Parameters
        ----------
        sizes : mapping of str to object
            Size of each dim in the imported network [elements].

        Returns
        -------
        dict
            Number or expression, by dim.
        """
        fixed = self.network.fixed_batch is not None
        return {d: _times(int(n), ["batch"]) if fixed and d == "batch" else self.size(n) for d, n in sizes.items()}

    def size(self, number: Any) -> Any:
        """Return a size as an expression such as ``=2 * seq`` if it is a multiple of a probe size.

        Other sizes are returned as they are.

        Parameters
        ----------
        number : object
            Size of a dim in the imported network [elements], or another value, which is returned as it is.

        Returns
        -------
        object
            Expression or the value itself.
        """
        if not isinstance(number, int) or isinstance(number, bool):
            return number
        names = []
        for name, probe in self.network.probe_size_by_dim.items():
            while number and number % probe == 0:
                names.append(name)
                number //= probe
        return _times(number, names) if names else number

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a layer, with the sizes of its dims as expressions.

        Parameters
        ----------
        options : mapping of str to object
            Options of the layer in the imported network.

        Returns
        -------
        dict
            Options of the layer in the model file.
        """
        return {key: self.dims(v) if key == "dims" and isinstance(v, Mapping) else v for key, v in options.items()}

    def network_lines(self, items: Sequence[EntryOrLoop], loss: str | None) -> list[Any]:
        """Return the value of ``layers:`` in the model file: a line per layer, and the loss if there is one.

        Parameters
        ----------
        items : sequence of LayerEntry or LayerLoop
            Layers and loops of the whole network, in order.
        loss : str or None
            Kind of the loss layer. None: no loss is written.

        Returns
        -------
        list
            Value of ``layers:`` in the model file.
        """
        first = next(iter(self.network.inputs))
        final = _last_entry(items[-1]) if items else first
        self._walk(items, first)
        aside = loss is not None and self.network.output_entry is not final
        name = self._name(self.network.output_entry) if aside else ""
        lines = self.body(items, first)
        if loss is not None:
            lines.append({"inputs": [name], loss: {}} if aside else loss)
        return lines

    def body(self, items: Sequence[EntryOrLoop], current: LayerEntry | str) -> list[Any]:
        """Return the model-file lines of a sequence of layers and loops.

        References to a loop's output mean the last entry of its last iteration.

        Parameters
        ----------
        items : sequence of LayerEntry or LayerLoop
            Layers and loops, in order.
        current : LayerEntry or str
            Layer or network input that the first item reads by default.

        Returns
        -------
        list
            One line for each item.
        """
        lines: list[Any] = []
        for item in items:
            lines.append(self._loop(item, current) if isinstance(item, _LayerLoop) else self._entry(item, current))
            current = _last_entry(item)
        return lines

    def _walk(self, items: Sequence[EntryOrLoop], current: LayerEntry | str) -> None:
        """Give a name to each layer that something other than the next line refers to."""
        for item in items:
            inputs = [item.carried_input] if isinstance(item, _LayerLoop) else item.inputs
            if inputs != [current]:
                for ref in inputs:
                    self._name(ref)
            current = _last_entry(item)
            if isinstance(item, _LayerLoop):
                self._walk(item.body, item.carried_input)
                continue
            for lent in (item.weight_owner, item.tied_entry):
                if lent is not None:
                    self._lenders[lent] = self._name(lent)
            if item.weight_owner is not None:
                self._name(item)

    def _name(self, ref: LayerEntry | str) -> str:
        if ref not in self._names:
            self._names[ref] = self._unique(ref if isinstance(ref, str) else _word(ref))
        return self._names[ref]

    def _unique(self, word: str) -> str:
        kind = word.rstrip("0123456789")
        word = f"{word}_" if kind in LAYERS or kind in ("branch", "repeat") else word
        name, count = word, 1
        while name in self._taken:
            count += 1
            name = f"{word}_{count}"
        self._taken.add(name)
        return name

    def _entry(self, entry: LayerEntry, current: LayerEntry | str) -> Any:
        line: dict[str, Any] = {"name": self._names[entry]} if entry in self._names else {}
        options = self.options(entry.options)
        if entry.tied_entry is not None:
            options["tie"] = self._lenders[entry.tied_entry]
        if entry.inputs != [current]:
            line["inputs"] = [self._name(ref) for ref in entry.inputs]
        if entry.weight_owner is not None:
            line["share"] = self._lenders[entry.weight_owner]
        if entry.frozen:
            line["frozen"] = True
        if not line and not options:
            return entry.kind
        return line | {entry.kind: options}

    def _loop(self, loop: _LayerLoop, current: LayerEntry | str) -> dict[str, Any]:
        self._loops += 1
        name = self._names.get(loop.last_entry) or self._unique("block" if self._loops == 1 else f"block{self._loops}")
        line: dict[str, Any] = {"repeat": loop.times, "name": name}
        if loop.carried_input is not current:
            line["inputs"] = [self._name(loop.carried_input)]
        start, outer = self._unique("start"), self._names.get(loop.carried_input)
        self._names[loop.carried_input] = start
        body = self.body(loop.body, loop.carried_input)
        if outer is None:
            del self._names[loop.carried_input]
        else:
            self._names[loop.carried_input] = outer
        head = [{"name": start, "identity": {}}] if _mentions(body, start) else []
        return line | {"layers": [*head, *body]}


def _last_entry(item: EntryOrLoop) -> LayerEntry:
    return item.last_entry if isinstance(item, _LayerLoop) else item


def _times(number: int, names: Sequence[str]) -> str:
    return "=" + " * ".join(([str(number)] if number != 1 else []) + list(names))


def _mentions(lines: Sequence[Any], name: str) -> bool:
    return any(
        name in line.get("inputs", ()) or _mentions(line.get("layers", ()), name)
        for line in lines
        if isinstance(line, Mapping)
    )


def _word(entry: LayerEntry) -> str:
    """Return a readable name for an imported layer: the last two words of the module path, or the layer's kind."""
    parts = [part for part in re.split(r"[^A-Za-z0-9_]+", entry.path) if part]
    words = [part for part in parts if not part.isdigit()]
    word = "_".join(words[-2:]) or entry.kind
    return word if word[0].isalpha() else f"n{word}"


_YAML_LINE_WIDTH = 116
_PLAIN = re.compile(r"(=[A-Za-z0-9_(]|[A-Za-z_(])[A-Za-z0-9_./ +*()<>=-]*\Z")
_RESERVED = re.compile(r"(~|null|true|false|yes|no|on|off|nan|inf|infinity)\Z", re.IGNORECASE)
#: Keys whose values are written with one entry on each line, however short.
_ONE_PER_LINE_KEYS = frozenset({"layers", "branches", "blocks"})
#: Top-level keys whose values are sentences.
_PROSE = frozenset({"notes"})


def to_yaml(model: Mapping[str, Any]) -> str:
    """Return the content of a model file as YAML text, which parses to the same content.

    Parameters
    ----------
    model : dict of str to Any
        Content of a model file, as YAML reads it.

    Returns
    -------
    str
        YAML: short things on one line, lists of layers one entry a line.

    Examples
    --------
    >>> print(to_yaml({"params": {"hidden": 8}, "layers": ["relu", {"linear": {"features": "=hidden"}}]}), end="")
    params: {hidden: 8}
    layers:
      - relu
      - linear: {features: =hidden}
    """
    lines: list[str] = []
    for key, value in model.items():
        if key in _PROSE and isinstance(value, str):
            sentences = textwrap.wrap(value, _YAML_LINE_WIDTH - 2, initial_indent="  ", subsequent_indent="  ")
            lines += [f"{key}: >-", *sentences]
        else:
            lines += _keyed(_scalar(key), value, 0, tall=key in _ONE_PER_LINE_KEYS or key == "inputs")
    text = "\n".join(lines) + "\n"
    if len(text) > MAX_FILE_BYTES:
        raise SpecError(
            f"the model has {len(text)} characters as YAML, more than {MAX_FILE_BYTES}; its blocks do not fold"
        )
    return text


def validated_yaml(model: Mapping[str, Any]) -> str:
    """Return a model as YAML text, after checking that the text parses to the same model.

    Parameters
    ----------
    model : dict of str to Any
        Content of a model file, as YAML reads it.

    Returns
    -------
    str
        YAML.

    Raises
    ------
    SpecError
        If the text says something else.
    """
    text = to_yaml(model)
    if _trimmed(parse_yaml(text, where="import")) != _trimmed(dict(model)):
        raise SpecError("the model cannot be written as YAML and read back; a name in it cannot be written")
    return text


def _trimmed(model: dict[str, Any]) -> dict[str, Any]:
    return {key: " ".join(value.split()) if key in _PROSE else value for key, value in model.items()}


def _keyed(key: str, value: Any, indent: int, *, tall: bool = False) -> list[str]:
    """Return the YAML lines of ``key: value``: one line if short enough, otherwise the value on the lines below."""
    pad = " " * indent
    if not isinstance(value, Mapping | list) or not value or not tall:
        line = f"{pad}{key}: {_flow(value)}"
        if len(line) <= _YAML_LINE_WIDTH or not isinstance(value, Mapping | list) or not value:
            return [line.rstrip()]
    return [f"{pad}{key}:", *_below(value, indent + 2)]


def _below(value: Mapping[str, Any] | Sequence[Any], indent: int) -> list[str]:
    if not isinstance(value, Mapping):
        return [line for entry in value for line in _item(entry, indent)]
    entries = ((_scalar(key), entry, key in _ONE_PER_LINE_KEYS) for key, entry in value.items())
    return [line for key, entry, tall in entries for line in _keyed(key, entry, indent, tall=tall)]


def _item(value: Any, indent: int) -> list[str]:
    """Return the YAML lines of one list entry, the first with a dash."""
    pad = " " * indent
    # A mapping of one key to a value that is not a bare word needs no braces.
    bare = isinstance(value, Mapping) and len(value) == 1 and next(iter(value.values())) is not None
    line = f"{pad}- {_flow(value)[1:-1] if bare else _flow(value)}"
    loop = isinstance(value, Mapping) and "layers" in value
    if (len(line) <= _YAML_LINE_WIDTH and not loop) or not isinstance(value, Mapping | list) or not value:
        return [line]
    first, *lines = _below(value, indent + 2)
    return [f"{pad}- {first.lstrip()}", *lines]


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_scalar(key)}: {_flow(entry)}".rstrip() for key, entry in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_flow(entry) for entry in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    if _PLAIN.match(text) and text == text.strip() and not _RESERVED.match(text):
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else f"\\U{ord(char):08x}" for char in quoted) + '"'
