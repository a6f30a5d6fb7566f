"""Software profiles: groups of fields, dates, inheritance, and the table of what every field means."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from paleo.cli import run_command_line as command
from paleo.errors import SpecError
from paleo.predict import predict
from paleo.specs.catalog import entry_names
from paleo.specs.model import load_model
from paleo.specs.run import Run
from paleo.specs.schema_tables import field_table
from paleo.specs.software import SoftwareProfile, load_software
from paleo.specs.system import load_system
from paleo.tables.run_tables import profile_at_release
from paleo.units import MICROSECOND


def described(schema: type[BaseModel], prefix: str = "") -> dict[str, bool]:
    """Dotted names of all fields below the groups of a schema, and whether they say what they mean."""
    found: dict[str, bool] = {}
    for name, field in schema.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            found |= described(field.annotation, f"{prefix}{name}.")
        elif prefix:
            found[prefix + (field.alias or name)] = bool(field.description)
    return found


def test_every_field_says_what_it_means_and_stands_in_the_table() -> None:
    fields = described(SoftwareProfile)
    assert len(fields) > 35 and all(fields.values())
    assert {row.field for row in field_table(SoftwareProfile) if "." in row.field} == set(fields)


def test_the_table_has_units_and_defaults() -> None:
    rows = {row.field: row for row in field_table(SoftwareProfile)}
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
    profile = load_software("pytorch-eager").with_fields({"since": "2023-03", "until": "2024"})
    assert [profile.covers_date(date) for date in ("2023-02", "2023", "2023-03-15", "2024-12", "2025")] == [
        False, True, True, True, False,
    ]  # fmt: skip


@pytest.mark.parametrize("name", entry_names("software"))
def test_catalog_profiles_are_dated_but_for_what_has_no_release(name: str) -> None:
    profile = load_software(name)
    assert profile.since is not None or name == "cuda-graph"
    assert profile.until is None or profile.since is None or profile.since <= profile.until


def test_changed_takes_dotted_names_and_leaves_the_rest() -> None:
    base = load_software("torchtitan")
    profile = base.with_fields({"host.forward": MICROSECOND, "overlap.contention": 0.5, "title": "other"})
    assert (profile.host.forward, profile.overlap.contention, profile.title) == (MICROSECOND, 0.5, "other")
    assert (profile.host.backward, profile.attention) == (base.host.backward, base.attention)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("host_forward: 5 us", "host_forward: unknown key; nearest: 'host.forward'"),
        ("overlap: {contension: 1.0}", "overlap.contension: unknown key; nearest: 'overlap.contention'"),
        ("from: spring", "from: 'spring'"),
    ],
)
def test_a_wrong_field_is_named_with_its_nearest_place(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"title: mine\nsource: this test\nhost: {{forward: 1 us, backward: 1 us}}\n{line}\n")
    with pytest.raises(SpecError, match=message.replace(".", r"\.")):
        load_software(file)


def test_show_prints_fields_with_value_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", "software", "megatron-core"]) == 0
    printed = capsys.readouterr().out
    assert "overlap.gather" in printed and "gathered during the next forward pass" in printed
    assert command(["show", "software", "megatron-core", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["software"]["overlap"]["gather"] is True


def test_show_of_an_unknown_kind_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", "softwar", "megatron-core"]) == 2
    assert "unknown kind 'softwar'; nearest: 'software'" in capsys.readouterr().err


AGED = """
title: mine
source: this test
from: "2020"
host: {forward: 1 us, backward: 1 us}
releases: {"1.0": 2020-05, "2.0": 2022-01, "3.0": 2024-06}
earlier:
  - {until: 2024-06, changes: {overlap.tensor: true}, source: this test}
  - {until: "2022", changes: {host.forward: 9 us, title: old}, source: this test}
"""


@pytest.mark.parametrize(
    ("at", "title", "forward", "tensor"),
    [("", "mine", 1, False), ("@3.0", "mine", 1, False), ("@2.0", "mine", 1, True), ("@1.0", "old", 9, True),
     ("@2024-05-31", "mine", 1, True), ("@21.12", "old", 9, True), ("@24.06", "mine", 1, False)],
)  # fmt: skip
def test_a_profile_as_it_was_at_a_release_or_a_date(
    at: str, title: str, forward: int, tensor: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each era changes what the later ones left; NVIDIA's containers are named by year and month."""
    (tmp_path / "aged.yaml").write_text(AGED)
    known = {"aged": tmp_path / "aged.yaml"}
    monkeypatch.setattr("paleo.specs.catalog.entry_files", lambda kind: known)
    profile = load_software(f"aged{at}")
    assert (profile.title, profile.host.forward, profile.overlap.tensor) == (title, forward * MICROSECOND, tensor)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("megatron-core@0.99", "no release '0.99'; nearest: '0.9'"),
        ("megatron-core@2019-12", "describes releases from 2023, not '2019-12'"),
        ("megatron-cor@0.9", "unknown software 'megatron-cor'; nearest: 'megatron-core'"),
    ],
)
def test_a_release_that_a_profile_does_not_know_is_an_error(name: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        load_software(name)


def test_fields_of_earlier_releases_are_checked_too(tmp_path: Path) -> None:
    (tmp_path / "aged.yaml").write_text(AGED.replace("overlap.tensor", "overlap.tensors"))
    with pytest.raises(SpecError, match=r"overlap\.tensors: unknown key; nearest: 'overlap\.tensor'"):
        load_software(tmp_path / "aged.yaml")


def test_rows_run_under_the_release_that_they_state() -> None:
    """0.10, of 2025-02, gave Megatron-Core's experts a tensor degree of their own, and 0.14, of 2025-10, latent
    attention's down projections their own tokens; what others release is not known."""
    releases = {"24.07": "nemo@24.07", "0.4.2": "nemo", "": "nemo", float("nan"): "nemo"}
    assert {release: profile_at_release({"release": release}, "nemo") for release in releases} == releases
    assert profile_at_release({"release": "26.04"}, "nemo") == "nemo", "nothing was otherwise by then"
    assert load_software("nemo@24.07").parallelism.expert_tensor == "tp"
    assert (load_software("nemo@24.07").fusion.loss, load_software("nemo@25.04").fusion.loss) == ("stepwise", "fused")
    assert profile_at_release({"release": "24.07"}, "nanotron") == "nanotron"


def test_show_prints_a_profile_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["show", "software", "megatron-core@0.9", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["software"]["parallelism"]["expert_tensor"] == "tp"


@pytest.mark.parametrize(
    ("words", "profile"),
    [
        ({"framework": "Megatron-LM (Sep 2020)"}, "megatron-2021@2020-09"),
        ({"framework": "Megatron-LM", "source": "README Sep-2020"}, "megatron-2021@2020-09"),
        ({"framework": "Megatron-LM", "source": "Narayanan et al., SC21"}, "megatron-2021@2021"),
        ({"framework": "Megatron-LM 2022"}, "megatron-2021"),
        ({"framework": "Megatron-DeepSpeed", "source": "vTrain"}, "megatron-2021"),
        ({"framework": "Megatron-LM", "source": "of 2031"}, "megatron-2021"),
    ],
)
def test_rows_that_state_a_date_in_words(words: dict[str, str], profile: str) -> None:
    assert profile_at_release(words, "megatron-2021") == profile


def test_autograd_adds_gradients_before_products_did() -> None:
    """Two reads and a write of 2 bytes for each weight and microbatch, without a launch."""
    run = Run.model_validate({"gpus": 1, "batch": 4, "microbatch": 1, "dtype": "fp16", "software": "megatron-2021"})
    fused, added = (
        predict(load_model("gpt2"), load_system("dgx-a100-80gb"), run, load_software(f"megatron-2021{at}"))
        for at in ("", "@2021")
    )
    kernels = [
        (section.repeat * counted.repetitions, counted.kernel)
        for section in added.program.sections
        for counted in section.kernels
        if counted.kernel.name.endswith(".additions")
    ]
    assert sum(times * kernel.bytes for times, kernel in kernels) == pytest.approx(6 * added.graph.parameters)
    assert not any(kernel.host_calls for _, kernel in kernels)
    assert added.step_time > fused.step_time and added.memory == fused.memory
