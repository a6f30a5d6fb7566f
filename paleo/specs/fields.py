"""A schema as a table: field, unit, default, meaning; for `paleo show`, for the docs, and for messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paleo.units import Bytes, BytesPerSecond, FlopsPerSecond, Hertz, Seconds, Watts, duration, engineering, gibibytes

#: How values of each dimension are written.
_UNITS = {
    Seconds: "time",
    Bytes: "bytes",
    BytesPerSecond: "bytes/s",
    FlopsPerSecond: "FLOP/s",
    Hertz: "Hz",
    Watts: "W",
}
#: How rates among them are written out.
_RATES = {"bytes/s": "B/s", "FLOP/s": "FLOP/s", "Hz": "Hz"}


class FieldRow(NamedTuple):
    """One field of a schema: dotted name, dimension of the value, default, meaning."""

    field: str
    unit: str
    default: str
    meaning: str


def field_table(schema: type[BaseModel]) -> list[FieldRow]:
    """The described fields of a schema, those of nested ones under dotted names, in the order of their declaration."""
    return list(_rows(schema, ""))


def _rows(schema: type[BaseModel], prefix: str) -> Iterator[FieldRow]:
    for name, field in schema.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{key}.")
        elif field.description:
            unit = unit_of(field)
            yield FieldRow(
                key, unit, "required" if field.is_required() else shown(field.default, unit), field.description
            )


def unit_of(field: FieldInfo) -> str:
    """The dimension of a field's value; empty for numbers without one, words and flags."""
    inside = (field.annotation, *get_args(field.annotation))
    for dimension, unit in _UNITS.items():
        validator = get_args(dimension)[1]
        if dimension in inside or any(entry is validator for entry in field.metadata):
            return unit
    return ""


def shown(value: Any, unit: str = "") -> str:
    """A value for people.

    >>> shown(8e-06, "time"), shown(6e9, "bytes/s"), shown(True), shown(("norm", "softmax")), shown(None)
    ('8 us', '6 GB/s', 'true', 'norm, softmax', '-')
    """
    if value is None or value == ():
        return "-"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {number:g}" for key, number in value.items())
    if isinstance(value, int | float):
        if unit in _RATES:
            return engineering(value, _RATES[unit])
        return duration(value) if unit == "time" else gibibytes(value) if unit == "bytes" else f"{value:g}"
    return str(value)
