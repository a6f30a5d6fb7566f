"""Model files: name and sources of a network, and its layers as written in the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from paleo import units
from paleo.errors import SpecError
from paleo.operations.tensor import Role
from paleo.specs.catalog import entries, read_entry
from paleo.specs.loading import FileCache, PositiveCount, Spec, Text, validate, with_path


def _published(value: object) -> tuple[float, float]:
    """A published figure and half a unit of its last digit: an integer is exact, ``25.6 M`` means 25.55 to 25.65 M."""
    if isinstance(value, int) and not isinstance(value, bool):
        return float(value), 0.0
    if not isinstance(value, str):
        raise SpecError(f"{value!r} is not a published figure; write it like 25557032, '25.6 M' or '8.2 GFLOP'")
    dimension = "flops" if value.rstrip().endswith("FLOP") else "count"
    number = units.parse(value, dimension)
    digits = value.strip().split()[0].rstrip("kMGTPFLO")
    decimals = len(digits.partition(".")[2])
    unit = number / float(digits) if float(digits) else 1.0
    return number, 0.5 * unit / 10**decimals * (1 + 1e-12)


Published = Annotated[tuple[float, float], BeforeValidator(_published)]


class Expect(Spec):
    """Published figures of the network; a test compares the counts with them."""

    parameters: Published
    flops: Published | None = None
    #: How the published FLOP were counted, where it differs from ours (2 FLOP a multiply-add, contractions only).
    flops_note: str | None = None
    source: Text


class Input(Spec):
    """One input of the network: its dims in order, sizes as numbers or expressions; ``batch`` is the batch."""

    dims: dict[str, int | str] = Field(min_length=1)
    role: Role = "activation"


class Block(Spec):
    """A named group of layers with arguments (``required``, or a default), used like a layer."""

    args: dict[str, Any] = Field(default_factory=dict)
    layers: list[Any] = Field(min_length=1)


class Dataset(Spec):
    """What one epoch is, for time and cost to train. ``tokens``: of a sample on average, of all its sequences and
    without padding, where samples differ in length."""

    name: Text
    samples: PositiveCount
    tokens: Annotated[float, Field(gt=0)] | None = None
    source: Text | None = None


class ModelSpec(Spec):
    """A network as its file states it. ``params`` may be overridden at the command line; ``tokens`` are counted per
    sample."""

    name: Text
    title: Text
    task: Text
    source: Text
    notes: str | None = None
    #: Other names of the network; of releases that differ in their weights alone, too.
    aliases: tuple[Text, ...] = ()
    params: dict[str, int | float | str | bool] = Field(default_factory=dict)
    inputs: dict[str, Input] = Field(min_length=1)
    blocks: dict[str, Block] = Field(default_factory=dict)
    layers: list[Any] = Field(min_length=1)
    tokens: int | str | None = None
    dataset: Dataset | None = None
    expect: Expect | None = None
    #: Where the file was read, for messages.
    path: str = ""

    @property
    def reference(self) -> str:
        """The name that a command takes for the model: its catalog name, or the path of its file."""
        return self.name if not self.path or str(entries("models").get(self.name)) == self.path else self.path


def load_model(name_or_path: str | Path) -> ModelSpec:
    """A model by its catalog name or the path of a YAML file."""
    return _models(name_or_path)


def _model(name_or_path: str | Path) -> ModelSpec:
    path, data = read_entry("models", name_or_path)
    return model_from(data, path)


_models = FileCache(_model)


def model_from(data: Mapping[str, Any], path: str | Path) -> ModelSpec:
    """A model from the mapping of its file."""
    return validate(ModelSpec, {"name": Path(path).stem, **with_path(data, path, str(path))}, path)


def within(figure: tuple[float, float], counted: float) -> bool:
    """Whether a count agrees with a published figure to its last digit."""
    value, slack = figure
    return math.isclose(counted, value, rel_tol=1e-12, abs_tol=slack)
