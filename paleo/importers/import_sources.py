"""Import of a network from any source, as the text of a model file or as a model in Python.

Common families of transformers configurations (config.json) have readers of their own (`paleo.importers.families`),
which need neither torch nor transformers. For all others the library builds the network on the meta device, and it is
traced. Nothing is downloaded, no weight is needed, and code that a configuration names never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from paleo.errors import SpecError, suggest_names
from paleo.importers._transformers_models import is_transformers_family, trace_library_model
from paleo.importers.model_file import ALL_CALLS_RECOGNISED_TEXT, CALLS_NOT_RECOGNISED_TEXT, validated_yaml
from paleo.importers.onnx import MAX_DIM_SIZE
from paleo.importers.onnx import model_file_of_onnx as onnx_mapping
from paleo.importers.torch import InputSpec, build_module, import_torch, load_module, model_file_of_module, parse_input
from paleo.importers.transformers_configuration import FAMILY_READERS as FAMILIES
from paleo.importers.transformers_configuration import (
    INDEXER_FAMILIES,
    Config,
    ModelMapping,
    UnsupportedHeadError,
    configured_weight_format,
    indexer_top_k,
    read_config,
)
from paleo.layers.imported_layers import OpaqueOperation
from paleo.network.graph import Graph, build_graph
from paleo.operations.tensor import default_precision
from paleo.specs.loading import parse_yaml
from paleo.specs.model import ModelSpec, build_model_spec
from paleo.units import checked_count, format_quantity, parse_whole_number


def model_file_of_config(path: str | Path, *, seq: int | None = None) -> ModelMapping:
    """Convert a configuration of transformers to the content of a model file.

    Parameters
    ----------
    path : str | Path
        ``config.json``, or the folder that holds it.
    seq : int, optional
        Length of the sequences; by default the longest that the model takes, at most 4,096 tokens.

    Returns
    -------
    ModelMapping
        Content of a model file, as YAML reads it.

    Raises
    ------
    SpecError
        If the family is unknown or a key is not valid.
    """
    config = read_config(path)
    kind = config.get("model_type")
    by_hand = isinstance(kind, str) and kind in FAMILIES
    chosen = None if str(kind) in INDEXER_FAMILIES else indexer_top_k(config)
    if chosen is not None and (by_hand or not _in_library(kind)):
        raise SpecError(
            f"{chosen[0]}: sparse attention over keys that an indexer chooses is not modelled; without it, under the "
            "model_type of a family with dense attention (deepseek_v3), the rest can be imported"
        )
    if not by_hand and not _in_library(kind):
        raise _unknown_family_error(config)
    try:
        model = FAMILIES[str(kind)](config) if by_hand else trace_library_model(config, seq)
    except UnsupportedHeadError as head:
        if not _in_library(kind):
            raise SpecError(f"{config.path}: architectures: {head} is read with transformers installed") from None
        model = trace_library_model(config, seq)
    if seq is not None and "seq" in model.get("params", {}):
        model["params"]["seq"] = seq
    if config.remote_code:
        model["notes"] = f"{model.get('notes') or ''} The model's own code ({config.remote_code}) was not run.".strip()
    source = model.pop("source", f"configuration {Path(config.path).name} of {config.get('_name_or_path') or kind}")
    without_title = {key: value for key, value in model.items() if key != "title"}
    released = configured_weight_format(config)
    first = {"title": f"{kind} imported from {config.path}", "task": model.pop("task"), "source": source}
    return first | ({"released": released} if released else {}) | without_title


def _in_library(kind: object) -> bool:
    """Return True if the transformers library knows a model family (``model_type``).

    The library is only asked if needed, because the library loads slowly.
    """
    return isinstance(kind, str) and is_transformers_family(kind)


def _unknown_family_error(config: Config) -> SpecError:
    kind = config.get("model_type")
    hint = suggest_names(str(kind), FAMILIES) if kind is not None else "this key is missing"
    remote = f" Its own code ({config.remote_code}) is not run." if config.remote_code else ""
    return SpecError(
        f"{config.path}: model_type: {kind!r:.60} is not a family that can be imported; {hint}.{remote} Without it: "
        f"{', '.join(FAMILIES)}; with transformers installed also those of that library"
    )


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """Imported network: text of the model file, parsed model, and layer graph for a batch of one."""

    text: str
    model: ModelSpec
    graph: Graph

    @property
    def unknown_functions(self) -> tuple[str, ...]:
        """Names of the source's functions for which Paleo has no layer."""
        return tuple(sorted({operation.function_name for operation in self._unmodelled()}))

    @property
    def functions_without_flops(self) -> tuple[str, ...]:
        """Names of the source's functions whose time follows from their bytes alone, as their FLOP are unknown."""
        return tuple(sorted({op.function_name for op in self._unmodelled() if not op.flops_per_element}))

    def _unmodelled(self) -> list[OpaqueOperation]:
        operations = (operation for node in self.graph.nodes for operation in node.operations)
        return [operation for operation in operations if isinstance(operation, OpaqueOperation)]

    @property
    def assumptions(self) -> str:
        """Assumptions of the import, as sentences from the model's notes.

        The text is empty if the network was read without tracing.
        """
        first, _, others = str(self.model.notes or "").partition(". ")
        return others if first.startswith((ALL_CALLS_RECOGNISED_TEXT, CALLS_NOT_RECOGNISED_TEXT)) else ""

    @property
    def flops(self) -> float:
        """FLOP of the forward pass of one sample [FLOP]."""
        formats = default_precision("fp32")
        operations = ((node.repeat, operation) for node in self.graph.nodes for operation in node.operations)
        return sum(repeat * kernel.flops for repeat, op in operations for kernel in op.forward_kernels(formats))

    @property
    def summary_line(self) -> str:
        """Text with the number of parameters and the forward FLOP of one sample."""
        parameters, flops = format_quantity(self.graph.parameters, ""), format_quantity(self.flops, "FLOP")
        return f"{parameters} parameters, {flops} forward for one sample"

    def document(self, path: str | None) -> dict[str, Any]:
        """Return the counts of the imported network as a JSON document.

        Parameters
        ----------
        path : str, optional
            File to which the model was written.

        Returns
        -------
        dict of str to Any
            The document.
        """
        counts = {"parameters": self.graph.parameters, "flops_forward": self.flops, "layers": len(self.graph.nodes)}
        return {"file": path, **counts, "unknown": list(self.unknown_functions), "notes": self.model.notes}


def import_network(
    kind: str, source: str, *, inputs: Sequence[str] = (), sizes: Mapping[str, int] | None = None, loss: str = "auto"
) -> ImportedModel:
    """Import a network that was written for another library.

    Parameters
    ----------
    kind : str
        ``torch``, ``onnx`` or ``hf``.
    source : str
        ``module:factory``, a file, or a configuration.
    inputs : sequence of str, optional
        Shapes of the inputs of a torch module, such as ``32x3x224x224``.
    sizes : dict of str to int, optional
        Sizes of named dims: ``seq``, and those of an ONNX file.
    loss : str, optional
        ``auto`` ends a classifier with its loss, ``none`` does not.

    Returns
    -------
    ImportedModel
        The model, its text and its graph.

    Raises
    ------
    SpecError
        If the source cannot be imported.
    GraphError
        If the layers do not fit together.
    """
    _check_loss(loss)
    if kind not in _READERS:
        raise SpecError(f"cannot import {kind!r}; {suggest_names(kind, _READERS)}")
    return imported_model(_READERS[kind](source, inputs, dict(sizes or {}), loss))


def _check_loss(loss: str) -> None:
    """Raise SpecError unless the loss is auto or none."""
    if str(loss) not in ("auto", "none"):
        raise SpecError(f"--loss {loss!r}: expected auto or none")


def imported_model(mapping: Mapping[str, Any], name: str = "imported.yaml") -> ImportedModel:
    """Convert the content of a model file to an imported network, by writing the content as YAML and parsing it.

    Parameters
    ----------
    mapping : dict of str to Any
        Content of a model file, as YAML reads it.
    name : str, optional
        File name for messages.

    Returns
    -------
    ImportedModel
        The model, its text and its graph.
    """
    text = validated_yaml(mapping)
    model = build_model_spec(parse_yaml(text, where=name), name)
    return ImportedModel(text, model, build_graph(model, batch=1))


def parse_inputs(texts: Sequence[str]) -> list[InputSpec]:
    """Parse the input shapes of a torch module, before any module code runs.

    Parameters
    ----------
    texts : sequence of str
        Shapes such as ``8x512:int64``.

    Returns
    -------
    list of InputSpec
        Shapes and types.

    Raises
    ------
    SpecError
        If there is none or one is not valid.
    """
    if not texts:
        raise SpecError("import torch: needs --input, such as 32x3x224x224 or 8x512:int64")
    return [parse_input(text) for text in texts]


def _torch(source: str, inputs: Sequence[str], sizes: dict[str, int], loss: str) -> dict[str, Any]:
    specs = parse_inputs(inputs)
    return model_file_of_module(load_module(source), specs, title=source, source=f"torch module {source}", loss=loss)


_READERS: dict[str, Callable[[str, Sequence[str], dict[str, int], str], dict[str, Any]]] = {
    "torch": _torch,
    "onnx": lambda source, inputs, sizes, loss: onnx_mapping(source, sizes=sizes, loss=loss),
    "hf": lambda source, inputs, sizes, loss: model_file_of_config(source, seq=sizes.get("seq")),
}


def from_torch(module: Any, inputs: Any, *, loss: str = "auto") -> ModelSpec:
    """Make a model from a torch module; neither weights nor data are needed.

    What the tracer assumed is written in the model's ``notes``.

    Parameters
    ----------
    module : Any
        A module, or a function that makes one; then no weight is allocated.
    inputs : Any
        Example tensors, shapes, or texts such as ``8x512:int64``: one, several, or by the names of the module's
        arguments. The first size of each is the batch, which stays variable.
    loss : str, optional
        ``auto`` ends a classifier with its loss, ``none`` does not.

    Returns
    -------
    ModelSpec
        A model for `paleo.estimate` and `paleo.predict`.

    Raises
    ------
    SpecError
        If the module cannot be traced.
    """
    torch = import_torch()
    _check_loss(loss)
    specs = _specs(torch, inputs)
    ready = isinstance(module, torch.nn.Module)
    built = module if ready else build_module(module, getattr(module, "__name__", "factory"))
    return import_torch_module(built, specs, loss=loss).model


def from_hf(config: str | Path, *, seq: int | None = None) -> ModelSpec:
    """Convert a config.json of the transformers library to a model; nothing is downloaded, no model code runs.

    Parameters
    ----------
    config : str | Path
        ``config.json``, or the folder that holds it.
    seq : int, optional
        Length of the sequences; by default the longest that the model takes, at most 4,096 tokens.

    Returns
    -------
    ModelSpec
        The model.

    Raises
    ------
    SpecError
        If the family is unknown or a key is not valid.
    """
    sizes = {} if seq is None else {"seq": checked_count("seq", seq, 1, MAX_DIM_SIZE - 1)}
    return import_network("hf", str(config), sizes=sizes).model


def from_onnx(file: str | Path, *, sizes: Mapping[str, int] | None = None, loss: str = "auto") -> ModelSpec:
    """Make a model from an ONNX file, which is read and never run.

    Parameters
    ----------
    file : str | Path
        The ONNX file.
    sizes : dict of str to int, optional
        Sizes of its named dims.
    loss : str, optional
        ``auto`` ends a classifier with its loss, ``none`` does not.

    Returns
    -------
    ModelSpec
        The model.

    Raises
    ------
    SpecError
        If the file cannot be read.
    """
    if not isinstance(sizes, Mapping | None):
        raise SpecError(f"sizes: {sizes!r:.60}: expected a mapping of named dims, such as {{'seq': 128}}")
    named, most = sizes or {}, MAX_DIM_SIZE - 1
    stated = {str(name): checked_count(f"sizes: {name}:", size, 1, most) for name, size in named.items()}
    return import_network("onnx", str(file), sizes=stated, loss=loss).model


def import_torch_module(module: Any, inputs: Sequence[InputSpec], *, loss: str = "auto") -> ImportedModel:
    """Import a torch module that is already built.

    Parameters
    ----------
    module : Any
        The torch module.
    inputs : sequence of InputSpec
        Shapes and types of its inputs.
    loss : str, optional
        ``auto`` ends a classifier with its loss, ``none`` does not.

    Returns
    -------
    ImportedModel
        The model, its text and its graph.
    """
    return imported_model(model_file_of_module(module, inputs, loss=loss), f"{type(module).__name__}.yaml")


def _specs(torch: Any, inputs: Any) -> list[InputSpec]:
    """Convert example tensors, shapes or texts (one, several, or a dict by argument name) to input shapes and types."""
    if isinstance(inputs, Mapping):
        return [replace(_spec(torch, example), name=str(name)) for name, example in inputs.items()]
    single = isinstance(inputs, str | torch.Tensor) or _is_shape(inputs) or not isinstance(inputs, Sequence)
    return [_spec(torch, example) for example in ([inputs] if single else inputs)]


def _spec(torch: Any, example: Any) -> InputSpec:
    if isinstance(example, str):
        return parse_input(example)
    if isinstance(example, torch.Tensor):
        return InputSpec(tuple(example.shape), str(example.dtype).removeprefix("torch."))
    if not _is_shape(example):
        raise SpecError(f"inputs: {example!r:.60}: expected a tensor, a shape such as (32, 784), or 8x512:int64")
    return InputSpec(tuple(int(size) for size in example))


def _is_shape(example: Any) -> bool:
    sizes = example if isinstance(example, list | tuple) else ()
    return bool(sizes) and all(isinstance(size, Integral) and size > 0 for size in sizes)  # type: ignore[operator]


def parse_dim_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Parse texts such as ``seq=2048`` to a dict of sizes by dim name.

    Parameters
    ----------
    texts : sequence of str
        Such as ``seq=2048``.

    Returns
    -------
    dict of str to int
        Sizes by name.

    Raises
    ------
    SpecError
        If a text is not valid.

    Examples
    --------
    >>> parse_dim_sizes(["seq=2048"])
    {'seq': 2048}
    """
    sizes = {}
    for text in texts:
        name, equals, number = text.partition("=")
        size = parse_whole_number(number, MAX_DIM_SIZE - 1)
        if not equals or not size:
            raise SpecError(f"--size {text[:80]!r}: expected a named dim and its size, such as seq=2048")
        sizes[name.strip()] = size
    return sizes
