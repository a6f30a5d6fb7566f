"""Schema of model files: name, sources, published sizes and layers of a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paleo import units
from paleo.errors import SpecError
from paleo.files import exists, is_folder
from paleo.operations.tensor import TensorRole
from paleo.registry import Registry
from paleo.specs.catalog import (
    DEFAULT_WEIGHT_FORMAT,
    entry_files,
    is_path,
    model_hub_id,
    parse_weight_format,
    read_entry,
    resolve_entry_name,
)
from paleo.specs.loading import NonEmptyText, PositiveCount, Spec, add_path_key, cache_by_files, validate_mapping


def _published(value: object) -> tuple[float, float]:
    """Parse a published number: return its value and half a unit of its last digit.

    A whole number is exact; ``25.6 M`` means 25.55 to 25.65 M.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value), 0.0
    if not isinstance(value, str):
        raise SpecError(f"{value!r} is not a published figure; write it like 25557032, '25.6 M' or '8.2 GFLOP'")
    dimension = "flops" if value.rstrip().endswith("FLOP") else "count"
    number = units.parse_quantity(value, dimension)
    digits = value.strip().split()[0].rstrip("kMGTPFLO")
    decimals = len(digits.partition(".")[2])
    unit = number / float(digits) if float(digits) else 1.0
    return number, 0.5 * unit / 10**decimals * (1 + 1e-12)


PublishedCount = Annotated[tuple[float, float], BeforeValidator(_published)]


class PublishedCounts(Spec):
    """Published parameter and FLOP counts of a network, which tests compare with the computed counts."""

    parameters: PublishedCount
    flops: PublishedCount | None = None
    #: How the published FLOP were counted, if not as here: 2 FLOP for a multiply-add, contractions only.
    flops_note: str | None = None
    source: NonEmptyText


class ModelInput(Spec):
    """Input tensor of a network: names of its dims in order, with sizes as numbers or expressions.

    The size ``batch`` is the batch.
    """

    dims: dict[str, int | str] = Field(min_length=1)
    role: TensorRole = "activation"


class LayerBlock(Spec):
    """Named group of layers with arguments, used in a model file like a single layer.

    ``args`` maps each argument to ``required`` or to its default.
    """

    args: dict[str, Any] = Field(default_factory=dict)
    layers: list[Any] = Field(min_length=1)


class Dataset(Spec):
    """Data set of a network; its number of ``samples`` is one epoch, for the time and cost of training.

    ``tokens`` is the mean number of tokens of a sample, without padding, for samples of different lengths.
    """

    name: NonEmptyText
    samples: PositiveCount
    tokens: Annotated[float, Field(gt=0)] | None = None
    source: NonEmptyText | None = None


class ModelSpec(Spec):
    """Network as its YAML file describes it: parameters, inputs and layers.

    ``params`` are sizes that users may override. ``tokens`` is the number of tokens of a sample. ``released`` is the
    number format of the published weights.
    """

    name: NonEmptyText
    title: NonEmptyText
    task: NonEmptyText
    source: NonEmptyText
    notes: str | None = None
    #: Other names of the network, including releases that differ only in their weights.
    aliases: tuple[NonEmptyText, ...] = ()
    #: Format of the published weights, such as ``fp8``, or ``fp8+mxfp4`` where experts have another.
    released: NonEmptyText = DEFAULT_WEIGHT_FORMAT
    params: dict[str, int | float | str | bool] = Field(default_factory=dict)
    inputs: dict[str, ModelInput] = Field(min_length=1)
    blocks: dict[str, LayerBlock] = Field(default_factory=dict)
    layers: list[Any] = Field(min_length=1)
    tokens: int | str | None = None
    dataset: Dataset | None = None
    expect: PublishedCounts | None = None
    #: Path of the file, for messages.
    path: str = ""
    #: Warnings for every prediction with this network, such as that another network stands in for it.
    remarks: tuple[NonEmptyText, ...] = Field(default=(), exclude=True)
    #: The name or hub id by which the user asked for the network; empty for a file.
    requested_name: str = Field(default="", exclude=True)

    @property
    def weights_hub_id(self) -> str:
        """Hugging Face id or folder of the network's weights.

        This is the name that the user gave if it names a number format, else the id of the first release, else empty.
        """
        requested = self.requested_name
        return requested if parse_weight_format(requested) else model_hub_id(self.name, requested)

    def with_requested_weights(self, name: str, *remarks: str) -> ModelSpec:
        """Return a copy of the network that refers to the weights which the user named (a hub id or folder).

        Parameters
        ----------
        name : str
            Name that the user wrote; a number format in it replaces the published one.
        *remarks : str
            Further warnings for every prediction with this network.

        Returns
        -------
        ModelSpec
            Copy with these weights and warnings.
        """
        released = parse_weight_format(name) or self.released
        changes = {"requested_name": name, "released": released, "remarks": (*self.remarks, *remarks)}
        return self.model_copy(update=changes)

    @property
    def catalog_name_or_path(self) -> str:
        """Text by which a command finds the model: its catalog name, or the path of its file."""
        return self.name if not self.path or str(entry_files("models").get(self.name)) == self.path else self.path


#: Readers of networks that are neither in the catalog nor in a YAML file. A reader returns None for a text that it does
#: not recognise.
MODEL_READERS: Registry[Callable[[str], ModelSpec | None]] = Registry("source of networks", "paleo.importers")


def load_model(model: str | Path, *, run_code: bool = True) -> ModelSpec:
    """Load a network by name, hub id or file.

    Parameters
    ----------
    model : str or Path
        A name of the catalog in any spelling (``llama3-8b``, ``Llama-3.1-8B``); an id of the Hugging Face hub
        (``Qwen/Qwen3-8B``), whose configuration is taken from the local cache, or else the network of the catalog that
        has this id; a ``config.json`` of transformers, or the folder that holds one; a YAML or ONNX file; or
        ``module:factory@2x3x224x224``, a torch module with the shapes of its inputs. Nothing is downloaded.
    run_code : bool
        True if the code that ``module:factory`` names may run; False for names that are read from a file.

    Returns
    -------
    ModelSpec
        Network; its ``remarks`` say if another network stands in for the requested one.

    Raises
    ------
    SpecError
        If the text names no network (the message has the nearest names), or the network cannot be read.
    """
    text = str(model)
    if not run_code and ":" in text and not exists(text):
        raise SpecError(f"model {text!r:.80}: code runs only where the command line names it; see `paleo import`")
    return _load_model(model)


@cache_by_files
def _load_model(model: str | Path) -> ModelSpec:
    text = str(model)
    if needs_importer(model):
        for source in MODEL_READERS:
            if (network := MODEL_READERS[source](text)) is not None:
                return network
    path, data = read_entry("models", model)
    network = build_model_spec(data, path)
    return network if exists(text) else network.with_requested_weights(text)


def needs_importer(model: str | Path) -> bool:
    """Return True if a text names a source other than the catalog or a YAML file (ONNX, hub id, Python module).

    Parameters
    ----------
    model : str | Path
        What the user wrote: name, path, Hugging Face id, ONNX file, ``module:factory``.

    Returns
    -------
    bool
        True if an importer must read the network.
    """
    text = str(model)
    if not isinstance(model, Path) and text.strip().lower() in entry_files("models"):
        return False
    suffix = Path(text).suffix.lower()
    if suffix in (".yaml", ".yml"):
        return False
    if suffix in (".json", ".onnx") or ":" in text or is_path(model):
        return True
    return resolve_entry_name("models", text) is None and (is_folder(text) or parse_weight_format(text) is not None)


def build_model_spec(data: Mapping[str, Any], path: str | Path) -> ModelSpec:
    """Build and validate a model from the mapping of its YAML file.

    Parameters
    ----------
    data : dict of str to Any
        Mapping of a model file.
    path : str | Path
        Path of the file, whose stem is the default name.

    Returns
    -------
    ModelSpec
        Validated description of the network.

    Raises
    ------
    SpecError
        If the mapping is not valid.
    """
    return validate_mapping(ModelSpec, {"name": Path(path).stem, **add_path_key(data, path, str(path))}, path)


def agrees_with_published(figure: tuple[float, float], counted: float) -> bool:
    """Return True if a count agrees with a published value to the last published digit.

    Parameters
    ----------
    figure : tuple[float, float]
        Published value, and half a unit of its last digit.
    counted : float
        Parameter or FLOP count that Paleo computes.

    Returns
    -------
    bool
        True if they agree.
    """
    value, slack = figure
    return math.isclose(counted, value, rel_tol=1e-12, abs_tol=slack)
