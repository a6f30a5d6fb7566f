"""JSON Schema of every kind of spec file and of what every command prints with --json.

A document names its schema by its key ``schema``, such as ``paleo.estimate/1``; the number rises when a key changes its
meaning or goes away, not when one is added. Schemas of documents lie in `schemas`, those of spec files come from
their models: text with a unit where a quantity is meant, a name or a path where another entry may stand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paleo.errors import SpecError, suggest_names
from paleo.report.columns import key_meanings
from paleo.specs.calibration import Calibration
from paleo.specs.device import Device, Link
from paleo.specs.model import ModelSpec
from paleo.specs.run import MAIN_FIELD_OF_GROUP, SHORT_FIELD_NAMES, Run
from paleo.specs.software import SoftwareProfile
from paleo.specs.system import System
from paleo.studies.sweep import SweepStudy

JSON_SCHEMA_DRAFT_URL = "https://json-schema.org/draft/2020-12/schema"
SPEC_BY_FILE_KIND: dict[str, type[BaseModel]] = {
    "device": Device,
    "link": Link,
    "system": System,
    "model": ModelSpec,
    "run": Run,
    "software": SoftwareProfile,
    "calibration": Calibration,
    "study": SweepStudy,
}
#: Kinds whose files may extend another; the entries that a key may name instead of holding them.
_EXTENDABLE_KINDS = frozenset(SPEC_BY_FILE_KIND) - {"run", "study"}
_SPECS_GIVEN_BY_NAME = {"system": ("Device", "Link")}
_FOLDER = Path(__file__).parent / "schemas"


def commands_with_json_document() -> list[str]:
    """Return the names of the commands that print JSON documents."""
    return sorted(path.stem for path in _FOLDER.glob("*.json"))


def json_schema(kind: str) -> dict[str, Any]:
    """Return the JSON Schema of a kind of file, or of the document that a command prints.

    Parameters
    ----------
    kind : str
        Kind of file, name of a command, or ``table:KIND``.

    Returns
    -------
    dict of str to Any
        The schema.

    Raises
    ------
    SpecError
        If the kind is unknown; the message lists the known ones.
    """
    if kind in SPEC_BY_FILE_KIND:
        return _of_file(kind)
    if kind in commands_with_json_document():
        return _described(json.loads((_FOLDER / f"{kind}.json").read_text(encoding="utf-8")))
    if kind.startswith("table:"):
        from paleo.tables.base import row_schema
        from paleo.tables.run_tables import table_kinds

        name = kind.partition(":")[2]
        if name not in table_kinds():
            raise SpecError(f"no kind of table is called {name!r:.80}; {suggest_names(name, table_kinds())}")
        return row_schema(name, table_kinds()[name].identifying_columns, table_kinds()[name].columns)
    known = [*SPEC_BY_FILE_KIND, *commands_with_json_document(), "table:KIND"]
    raise SpecError(f"no schema of {kind!r:.80}; {suggest_names(kind, known)} (all: {', '.join(sorted(known))})")


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with unit and meaning added to every key, and null allowed where that has a meaning."""
    for key, field in schema.get("properties", {}).items():
        if key in key_meanings():
            unit, meaning = key_meanings()[key]
            field["description"] = f"{meaning} [{unit}]" if unit else meaning
            if "null: " in meaning and "type" in field:
                field["type"] = sorted({*field["type"], "null"})
        _described(field)
    for inner in (schema.get("items"), schema.get("additionalProperties")):
        if isinstance(inner, dict):
            _described(inner)
    return schema


def _of_file(kind: str) -> dict[str, Any]:
    schema = SPEC_BY_FILE_KIND[kind].model_json_schema(by_alias=True)
    properties = schema["properties"]
    for name in ("path", "stated_latency"):  # where a model was read and what it extends, which no file states
        properties.pop(name, None)
    required = [key for key in schema.pop("required", []) if key not in ("name", "full_name")]
    for name in _SPECS_GIVEN_BY_NAME.get(kind, ()):
        schema["$defs"][name] = {"anyOf": [{"type": "string", "description": "a name, or a path"}, {"type": "object"}]}
    if kind == "run":
        _add_short_forms(schema)
    if kind in _EXTENDABLE_KINDS:
        properties["extend"] = {"type": "string", "description": "a name or a path; its keys stand below these"}
        schema |= {"if": {"required": ["extend"]}, "else": {"required": required}}
    else:
        schema["required"] = required
    return {"$schema": JSON_SCHEMA_DRAFT_URL, "$id": f"paleo.{kind}-file/1", **schema}


def _add_short_forms(schema: dict[str, Any]) -> None:
    """Add to a schema, in place, the short forms of a run's groups: names of options, and plain values of groups."""
    properties = schema["properties"]
    groups = {name: field["$ref"].rpartition("/")[2] for name, field in properties.items() if "$ref" in field}
    fields = {name: schema["$defs"][group]["properties"] for name, group in groups.items()}
    for name, path in SHORT_FIELD_NAMES.items():
        group, _, field = path.partition(".")
        properties[name] = fields[group][field] if group in fields else {"type": "integer"}
    for group, field in MAIN_FIELD_OF_GROUP.items():
        properties[group] = {"anyOf": [properties[group], fields[group][field]]}
