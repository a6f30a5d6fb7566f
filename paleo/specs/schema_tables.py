"""Tables of a schema's fields (name, unit, default, meaning), for `paleo show`, the docs and messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from paleo.units import (
    Bytes,
    BytesPerSecond,
    FlopsPerSecond,
    Hertz,
    Seconds,
    Watts,
    format_duration,
    format_gibibytes,
    format_quantity,
)

#: Unit or dimension that is printed for each type of quantity.
_UNITS = {Seconds: "time", Bytes: "bytes", BytesPerSecond: "bytes/s", FlopsPerSecond: "FLOP/s", Hertz: "Hz", Watts: "W"}
#: Units in which rates are printed.
_RATES = {"bytes/s": "B/s", "FLOP/s": "FLOP/s", "Hz": "Hz"}


class FieldRow(NamedTuple):
    """One row of a table of a schema's fields: dotted name, unit, default and meaning."""

    field: str
    unit: str
    default: str
    meaning: str


def field_table(schema: type[BaseModel]) -> list[FieldRow]:
    """List the fields of a schema with unit, default and meaning, in the order of their declaration.

    Parameters
    ----------
    schema : type[BaseModel]
        Schema (pydantic model class).

    Returns
    -------
    list of FieldRow
        One row for each field; nested fields have dotted names.
    """
    return list(_rows(schema, ""))


def _rows(schema: type[BaseModel], prefix: str) -> Iterator[FieldRow]:
    for name, field in schema.model_fields.items():
        key = f"{prefix}{field.alias or name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(field.annotation, f"{key}.")
        elif field.description:
            unit = field_unit(field)
            default = "required" if field.is_required() else format_value(field.default, unit)
            yield FieldRow(key, unit, default, field.description)


def field_unit(field: FieldInfo) -> str:
    """Return the unit of a schema field, from its type.

    Parameters
    ----------
    field : FieldInfo
        Field of a pydantic model.

    Returns
    -------
    str
        For example ``bytes/s``; empty for plain numbers, words and flags.
    """
    inside = (field.annotation, *get_args(field.annotation))
    for dimension, unit in _UNITS.items():
        validator = get_args(dimension)[1]
        if dimension in inside or any(entry is validator for entry in field.metadata):
            return unit
    return ""


def format_value(value: Any, unit: str = "") -> str:
    """Format a field's value as text with its unit.

    Parameters
    ----------
    value : Any
        Value in SI units.
    unit : str, optional
        Unit, as `field_unit` returns it.

    Returns
    -------
    str
        Text such as ``8 us``; ``-`` for None.

    Examples
    --------
    >>> format_value(8e-06, "time"), format_value(6e9, "bytes/s")
    ('8 us', '6 GB/s')
    >>> format_value(True), format_value(("norm", "softmax")), format_value(None)
    ('true', 'norm, softmax', '-')
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
        if unit in ("time", "bytes"):
            return format_duration(value) if unit == "time" else format_gibibytes(value)
        return format_quantity(value, _RATES[unit]) if unit in _RATES else f"{value:g}"
    return str(value)
