"""Software profiles: groups of fields, dates, inheritance, and the table of what every field means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from paleo.cli import run
from paleo.errors import SpecError
from paleo.specs.catalog import names
from paleo.specs.software import Software, field_table, load_software
from paleo.units import MICROSECOND


def described(schema: type[BaseModel], prefix: str = "") -> dict[str, bool]:
    """Dotted names of all fields below the groups of a schema, and whether they say what they mean."""
    found: dict[str, bool] = {}
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= described(field.annotation, f"{prefix}{name}.")
        elif prefix:
            found[prefix + name] = bool(field.description)
    return found


def test_every_field_says_what_it_means_and_stands_in_the_table() -> None:
    fields = described(Software)
    assert len(fields) > 35 and all(fields.values())
    assert {row.field for row in field_table(Software) if "." in row.field} == set(fields)


def test_the_table_has_units_and_defaults() -> None:
    rows = {row.field: row for row in field_table(Software)}
    assert (rows["host.forward"].unit, rows["host.forward"].default) == ("time", "required")
    assert (rows["memory.context"].unit, rows["memory.context"].default) == ("bytes", "512.0 MiB")
    assert (rows["overlap.gradients"].unit, rows["overlap.gradients"].default) == ("", "true")


def test_a_profile_inherits_groups_field_by_field(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("extend: megatron-core\ntitle: mine\nsource: this test\noverlap: {tensor: false}\nuntil: 2025-06\n")
    profile, base = load_software(file), load_software("megatron-core")
    assert profile.overlap == base.overlap.model_copy(update={"tensor": False})
    assert (profile.host, profile.fusion, profile.since) == (base.host, base.fusion, base.since)


def test_dates_are_compared_as_far_as_both_are_stated() -> None:
    profile = load_software("pytorch-eager").changed({"since": "2023-03", "until": "2024"})
    assert [profile.covers(date) for date in ("2023-02", "2023", "2023-03-15", "2024-12", "2025")] == [
        False, True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("name", names("software"))
def test_catalog_profiles_are_dated_but_for_what_has_no_release(name: str) -> None:
    profile = load_software(name)
    assert profile.since is not None or name == "cuda-graph"
    assert profile.until is None or profile.since is None or profile.since <= profile.until


def test_changed_takes_dotted_names_and_leaves_the_rest() -> None:
    base = load_software("torchtitan")
    profile = base.changed({"host.forward": MICROSECOND, "overlap.contention": 0.5, "title": "other"})
    assert (profile.host.forward, profile.overlap.contention, profile.title) == (MICROSECOND, 0.5, "other")
    assert (profile.host.backward, profile.attention) == (base.host.backward, base.attention)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("host_forward: 5 us", "host_forward: unknown key; nearest: 'host.forward'"),
        ("overlap: {contension: 1.0}", "overlap.contension: unknown key; nearest: 'contention'"),
        ("from: spring", "from: 'spring'"),
    ],
)
def test_a_wrong_field_is_named_with_its_nearest_place(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"title: mine\nsource: this test\nhost: {{forward: 1 us, backward: 1 us}}\n{line}\n")
    with pytest.raises(SpecError, match=message.replace(".", r"\.")):
        load_software(file)


def test_show_prints_fields_with_value_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "software", "megatron-core"]) == 0
    printed = capsys.readouterr().out
    assert "overlap.gather" in printed and "gathered during the next forward pass" in printed
    assert run(["show", "software", "megatron-core", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["software"]["overlap"]["gather"] is True


def test_show_of_an_unknown_kind_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", "softwar", "megatron-core"]) == 2
    assert "unknown kind 'softwar'; nearest: 'software'" in capsys.readouterr().err
