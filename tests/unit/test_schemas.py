"""Every --json document names its schema and fulfils it; every kind of file has a schema and a template that work."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import typer

from paleo.cli import app_with_all_commands
from paleo.cli import run_command_line as run
from paleo.report.json_schemas import SPEC_BY_FILE_KIND, commands_with_json_document, json_schema
from paleo.specs.catalog import kind_of_spec_file, spec_template, template_kinds
from tests.json_documents import CALLS, printed, violations


@pytest.mark.slow
@pytest.mark.parametrize("call", [call for calls in CALLS.values() for call in calls], ids=" ".join)
def test_what_a_command_prints_fulfils_its_schema(call: list[str], tmp_path: Path) -> None:
    command, document = call[0], printed(call, tmp_path)
    assert document["schema"] == json_schema(command)["$id"] == f"paleo.{command}/1"
    assert list(violations(document, json_schema(command))) == []


def test_every_command_with_a_document_has_a_schema() -> None:
    commands = {
        str(command.name or command.callback.__name__): inspect.signature(command.callback).parameters
        for command in app_with_all_commands().registered_commands
        if command.callback is not None
    }
    printing = {name.rstrip("_") for name, parameters in commands.items() if "as_json" in parameters}
    assert printing == set(commands_with_json_document()) == set(CALLS)


def test_a_key_that_is_missing_or_of_another_type_is_found(tmp_path: Path) -> None:
    document = printed(CALLS["scale"][0], tmp_path)
    del document["points"][0]["speedup"]
    document["points"][1]["gpus"] = "two"
    found = list(violations(document, json_schema("scale")))
    assert found == [
        "document.points[0].speedup: is missing",
        "document.points[1].gpus: is string, expected ['number']",
    ]


def undescribed(schema: object) -> set[str]:
    """Keys of a schema, and of all below it, without a meaning."""
    if not isinstance(schema, dict):
        return set()
    fields = schema.get("properties", {})
    below = [*fields.values(), schema.get("items"), schema.get("additionalProperties")]
    return {key for key, field in fields.items() if "description" not in field}.union(*map(undescribed, below))


@pytest.mark.parametrize("command", sorted(commands_with_json_document()))
def test_every_key_of_a_document_has_a_meaning(command: str) -> None:
    assert undescribed(json_schema(command)) == set()


@pytest.mark.parametrize("kind", sorted(SPEC_BY_FILE_KIND))
def test_the_schema_of_a_kind_of_file(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["schema", kind]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$id"] == f"paleo.{kind}-file/1" and schema["type"] == "object"
    assert schema["additionalProperties"] is False
    assert "path" not in schema["properties"]


def test_quantities_are_text_and_entries_may_be_named() -> None:
    assert json_schema("link")["properties"]["bandwidth"]["type"] == "string"
    assert {"type": "object"} in json_schema("system")["$defs"]["Device"]["anyOf"]
    assert json_schema("device")["else"]["required"] == [
        "vendor", "architecture", "multiprocessors", "peak", "memory", "form_factor"
    ]  # fmt: skip


@pytest.mark.parametrize("kind", template_kinds())
def test_a_template_is_a_good_file_of_its_kind(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"{kind}.yaml"
    assert run(["init", kind, "-o", str(path)]) == 0
    assert path.read_text() == spec_template(kind) and spec_template(kind).startswith("# ")
    assert kind_of_spec_file(path) == kind
    assert run(["init", kind, "-o", str(path)]) == 2, "the user's file is not replaced"
    assert run(["show", str(path)]) == 0
    assert "None" not in capsys.readouterr().out
    used = {
        "device": ["estimate", "lenet", "--system", str(path)],
        "system": ["estimate", "lenet", "--system", str(path), "--gpus", "8"],
        "model": ["estimate", str(path), "--system", "rtx-4090", "--batch", "2"],
        "run": ["estimate", "lenet", "--system", "dgx-a100-80gb", "--run", str(path)],
        "link": ["show", str(path), "--json"],
    }
    assert run(used[kind]) == 0, capsys.readouterr().err


def test_the_parameters_that_the_model_template_states_are_those_that_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(spec_template("model").replace("# expect:", "expect:"))
    from paleo.network.graph import build_graph
    from paleo.specs.model import agrees_with_published, load_model

    model = load_model(path)
    assert model.expect is not None
    assert agrees_with_published(model.expect.parameters, build_graph(model, batch=1).parameters)


@pytest.mark.parametrize("call", [["init", "modle"], ["schema", "estimat"]])
def test_kinds_that_there_are_not(call: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(call) == 2
    assert "nearest: " in capsys.readouterr().err


def test_commands_are_those_that_typer_knows() -> None:
    assert {"init", "schema"} <= set(typer.main.get_command(app_with_all_commands()).commands)  # type: ignore[attr-defined]


def untold(schema: object, path: str) -> list[str]:
    """Keys of a schema of which no document told more than that they may be null."""
    if not isinstance(schema, dict):
        return []
    below = {f"{path}.{key}": field for key, field in schema.get("properties", {}).items()}
    below |= {f"{path}[]": schema[key] for key in ("items", "additionalProperties") if key in schema}
    alone = [path] if schema.get("type") == ["null"] else []
    return alone + [found for name, field in below.items() for found in untold(field, name)]


@pytest.mark.parametrize("command", sorted(commands_with_json_document()))
def test_every_key_has_a_type(command: str) -> None:
    """A key that was null in all sample documents is a number or a text in others, which would break the schema."""
    assert untold(json_schema(command), command) == []
