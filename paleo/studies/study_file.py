"""A study file: the axes of a sweep, every value checked before anything is computed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from paleo.errors import SpecError, near
from paleo.specs.loading import Spec, Text, read_yaml, validate
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.system import load_system
from paleo.studies.changed_system import changed
from paleo.studies.cost import Tariff
from paleo.studies.training import MOST_AMOUNT
from paleo.units import parse

Value = int | float | str | bool | None
Point = dict[str, Value]

#: Axes that leave the step as it is: how much is trained, and what is paid for it.
AMOUNTS = ("epochs", "samples", "tokens")
ACCOUNTS = (*AMOUNTS, "critical_batch", "electricity", "pue", "host_power", "gpu_price")
#: The most rows of a table.
MOST_ROWS = 100_000_000


class Study(Spec):
    """A study file.

    ``axes`` are run fields, ``model.NAME``, ``system.PATH`` (such as ``system.device.memory.bandwidth``), amounts or
    prices, each with its values; a value of a system is ``x0.8`` (a factor) or a figure with its unit.
    """

    name: Text = "sweep"
    models: list[Text] = Field(min_length=1)
    systems: list[Text] = Field(min_length=1)
    run: dict[str, Any] = Field(default_factory=dict)
    axes: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)

    @field_validator("axes")
    @classmethod
    def _amounts_with_prefixes(cls, axes: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Amounts as the command line takes them: ``15T`` tokens, ``4M`` samples."""
        return {
            name: [parse(value, "count") if isinstance(value, str) else value for value in values]
            if name in AMOUNTS
            else values
            for name, values in axes.items()
        }

    @property
    def steps(self) -> dict[str, list[Any]]:
        """Axes that change the step, slowest first."""
        changing = {name: values for name, values in self.axes.items() if name not in ACCOUNTS}
        return {"model": list(self.models), "system": list(self.systems), **changing}

    @property
    def accounts(self) -> dict[str, list[Any]]:
        """Axes of prices and amounts of training, which leave the predicted step as it is."""
        return {name: values for name, values in self.axes.items() if name in ACCOUNTS}

    @property
    def points(self) -> int:
        return math.prod(len(values) for values in self.steps.values())

    @property
    def rows(self) -> int:
        return self.points * math.prod(len(values) for values in self.accounts.values())

    def point(self, index: int) -> Point:
        """The values of one point; the last axis changes fastest."""
        point = {}
        for name, values in reversed(self.steps.items()):
            index, position = divmod(index, len(values))
            point[name] = values[position]
        return dict(reversed(point.items()))


def load_study(path: str | Path) -> Study:
    """A study from its YAML file, every axis checked before anything is computed."""
    study = validate(Study, {"name": Path(path).stem, **read_yaml(path)}, path)
    try:
        check(study)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    return study


def check(study: Study) -> None:
    """SpecError for an axis, a value or a name of a study that is none."""
    if study.rows > MOST_ROWS:
        raise SpecError(f"axes: their product is {study.rows:,} rows; at most {MOST_ROWS:,} are made")
    if len([name for name in study.accounts if name in AMOUNTS]) > 1:
        raise SpecError(f"axes: {', '.join(name for name in study.accounts if name in AMOUNTS)}: state one of them")
    for name, values in {"models": study.models, "systems": study.systems}.items():
        if len(set(values)) < len(values):
            raise SpecError(f"{name}: an entry stands there twice")
    for name, values in study.axes.items():
        if len({json.dumps(value) for value in values}) < len(values):
            raise SpecError(f"axes.{name}: a value stands there twice")
        if name in study.run:
            raise SpecError(f"axes.{name}: stands under run, too; keep one")
    for name in study.models:
        load_model(name)
    for name in study.systems:
        machine = load_system(name)
        for key, values in study.axes.items():
            for value in values if key.startswith("system.") else ():
                changed(machine, key.removeprefix("system."), value)
    for point in corners(study):
        run_of(study, point)
    for account in accounts_of(study):
        tariff_of(account)


def corners(study: Study) -> Iterator[Point]:
    """Points that hold every value of every axis once."""
    for index in range(max(len(values) for values in study.steps.values())):
        yield {name: values[min(index, len(values) - 1)] for name, values in study.steps.items()}


def accounts_of(study: Study) -> list[Point]:
    """All combinations of what is paid, the last axis fastest."""
    names = list(study.accounts)
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*study.accounts.values())]


def tariff_of(account: Point) -> Tariff:
    """The tariff that an account states; SpecError for an amount that is not above zero."""
    for name in (*AMOUNTS, "critical_batch"):
        value = account.get(name)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in account and not (number and 0 < value <= MOST_AMOUNT):  # type: ignore[operator]
            raise SpecError(f"axes.{name}: {value!r:.60} must be a number above zero, and at most {MOST_AMOUNT:.0e}")
    stated = {key: account[key] for key in Tariff.model_fields if account.get(key) is not None}
    return validate(Tariff, stated, "axes")


def run_of(study: Study, point: Point) -> Run:
    """The run of a point: what the study states for all of them, and the point's own values."""
    data = dict(study.run)
    for key, value in point.items():
        part, _, name = key.partition(".")
        if name and part in ("model", "input"):
            data[part] = {**data.get(part, {}), name: value}
        elif key not in ("model", "system") and not key.startswith("system."):
            if key not in Run.model_fields:
                known = [*Run.model_fields, *ACCOUNTS, "model.NAME", "input.NAME", "system.PATH"]
                raise SpecError(f"axes.{key}: unknown axis; {near(key, known)}")
            data[key] = value
    return validate(Run, data, "run")
