"""The door for spec files: what comes in, and that everything else is one clear SpecError, soon."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paleo.errors import SpecError
from paleo.specs.catalog import catalog_root, entry_names, entry_path, is_path, read_entry, resolve_device_name
from paleo.specs.loading import (
    MAX_FILE_BYTES,
    NonEmptyText,
    PositiveCount,
    Spec,
    parse_yaml,
    read_yaml,
    validate_mapping,
)
from paleo.specs.run import Run
from paleo.units import BytesPerSecond, Seconds


class Wire(Spec):
    name: NonEmptyText
    bandwidth: BytesPerSecond
    latency: Seconds | None = None


class Net(Spec):
    name: NonEmptyText
    ranks: PositiveCount
    link: NonEmptyText | Wire
    levels: tuple[Wire, ...] = ()


def test_scalars_follow_yaml_1_2() -> None:
    text = "a: 010\nb: on\nc: 1e9\nd: 12:30\ne: 2026-04\nf: ~\ng: [1, 2.5, true]\nh: '3'\n1: x\ni: 0x10\nj: 1_000"
    assert parse_yaml(text, where="f") == {
        "a": 10, "b": "on", "c": 1e9, "d": "12:30", "e": "2026-04", "f": None, "g": [1, 2.5, True], "h": "3", "1": "x",
        "i": "0x10", "j": "1_000",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3: key 'a' is repeated (first on line 1)"),
        ("a: {b: 1, b: 2}", "line 1: key 'b' is repeated"),
        ("a: &x 1\nb: *x", "anchors and aliases ('x') are not allowed"),
        ("a: !!python/object:os.system x", "tags"),
        ("a: .nan", "'.nan' is not a finite number"),
        ("a: -.inf", "not a finite number"),
        ("a: 1e999", "not a finite number"),
        ("- 1", "holds a list; expected a mapping"),
        ("just text", "holds a str"),
        ("# nothing", "holds nothing"),
        ("a: 1\n---\nb: 1", "a second YAML document starts here"),
        ("a: [1, 2", "not valid YAML"),
        ("a: b: c", "not valid YAML"),
        ("a: \x00", "not valid YAML"),
        ("a: \ud800", "not Unicode"),
        ("? [a]\n: 1", "a key must be a plain word"),
        ("[" * 100_000, "nested deeper than"),
        ("a: " + "{b: " * 500, "nested deeper than"),
        ("".join("  " * depth + "a:\n" for depth in range(500)), "nested deeper than"),
        ("k: [" + "1," * 400_000 + "]", "more than"),
        ("&a " * 500_000, "not allowed"),
    ],
)
def test_bad_text_is_one_message(text: str, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_yaml(text, where="f.yaml")
    assert message in str(caught.value)
    assert str(caught.value).startswith("f.yaml: ")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


def test_a_billion_laughs_stay_a_giggle() -> None:
    text = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    with pytest.raises(SpecError, match="anchors"):
        parse_yaml(text, where="bomb.yaml")


def test_bad_files(tmp_path: Path) -> None:
    (empty := tmp_path / "empty.yaml").write_text(" \n")
    (binary := tmp_path / "binary.yaml").write_bytes(b"\x89PNG\xff\xfe" * 100)
    (huge := tmp_path / "huge.yaml").write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    os.mkfifo(pipe := tmp_path / "pipe.yaml")
    cases: list[tuple[str | Path, str]] = [
        (empty, "is empty"),
        (binary, "is not UTF-8 text"),
        (huge, "is larger than"),
        (pipe, "is not a regular file"),
        (tmp_path, "is a directory"),
        (tmp_path / "none.yaml", "no such file"),
        ("a\0b.yaml", "cannot be read"),
        ("x" * 5000, "cannot be read"),
    ]
    for path, message in cases:
        with pytest.raises(SpecError, match=message):
            read_yaml(path)


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path: Path) -> None:
    (path := tmp_path / "bom.yaml").write_bytes(b"\xef\xbb\xbfa: 1\n")
    assert read_yaml(path) == {"a": 1}


GOOD = {"name": "n", "ranks": 8, "link": {"name": "l", "bandwidth": "1 GB/s"}}


def test_validate_returns_si() -> None:
    net = validate_mapping(Net, {**GOOD, "link": {"name": "l", "bandwidth": "400 Gb/s", "latency": "5 us"}}, "net.yaml")
    assert isinstance(net.link, Wire)
    assert (net.link.bandwidth, net.link.latency) == (5e10, 5e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 8}, "net.yaml: rank: unknown key; nearest: 'ranks'"),
        ({"link": {"name": "l", "bandwith": "1 GB/s"}}, "link.bandwith: unknown key; nearest: 'link.bandwidth'"),
        ({"link": {"name": "l"}}, "net.yaml: link.bandwidth: this key is missing"),
        ({"link": {"name": "l", "bandwidth": 5}}, "net.yaml: link.bandwidth: 5 has no unit; write it like '900 GB/s'"),
        ({"link": {"name": "l", "bandwidth": "5 us"}}, "'us' is a unit of time, not of bandwidth"),
        ({"link": {"name": "l", "bandwidth": "-5 GB/s"}}, "'-5 GB/s' must be above zero"),
        ({"levels": [{"name": "a", "bandwidth": "1 GB/s"}, {"name": "b", "bandwidth": "1"}]}, "levels[1].bandwidth: "),
        ({"ranks": True}, "net.yaml: ranks: True: it should be a whole number"),
        ({"ranks": -1}, "net.yaml: ranks: -1: it should be greater than 0"),
        ({"ranks": "8"}, "net.yaml: ranks: '8': it should be a whole number"),
        ({"ranks": float("nan")}, "net.yaml: ranks: nan is not a finite value"),
        ({"name": "inf"}, "net.yaml: name: 'inf' is not a finite value"),
        ({"levels": 3}, "net.yaml: levels: 3: it should be a list"),
        ({"name": "x", "k" * 5000: "v" * 5000}, "unknown key"),
    ],
)  # fmt: skip
def test_validate_names_file_key_value_and_cure(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate_mapping(Net, {**GOOD, **change}, "net.yaml")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 800


def test_validate_wants_a_mapping() -> None:
    with pytest.raises(SpecError, match="expected a mapping"):
        validate_mapping(Net, [1], "net.yaml")


def test_the_catalog_does_not_depend_on_the_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert (catalog_root() / "hardware_specs").is_dir()
    assert entry_path("devices", "V100-SXM2-16GB").stem == "v100-sxm2-16gb"


@pytest.mark.parametrize("kind", ["models", "systems"])
def test_names_may_be_spelt_in_other_ways(kind: str) -> None:
    for name in entry_names(kind):
        assert entry_path(kind, name.replace("_", "-").upper()).stem == name
    with pytest.raises(SpecError, match="unknown"):
        entry_path("software", "megatron_core")  # profiles are compared by their names


def test_a_miss_suggests_near_names() -> None:
    with pytest.raises(SpecError, match="unknown system 'dgx-a100'; nearest: 'dgx-a100-"):
        entry_path("systems", "dgx-a100")
    with pytest.raises(SpecError, match="unknown kind of catalog entry 'device'; nearest: 'devices'"):
        entry_names("device")
    with pytest.raises(SpecError, match="unknown device 'nvidia a100-sxm4-80g'; nearest: 'nvidia a100-sxm4-80gb'"):
        resolve_device_name("nvidia a100-sxm4-80g")


def test_paths_and_names() -> None:
    assert [is_path(text) for text in ("h200-sxm", "./h200-sxm", "my.yml", "aws-p5.48xlarge")] == [
        False, True, True, False,
    ]  # fmt: skip
    assert is_path(Path("anything"))


def test_extend_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("name: base\naliases: [x]\na: {b: 1, c: 2}\nd: [1, 2]\ne: 5\n")
    (tmp_path / "mid.yaml").write_text("extend: base.yaml\nname: mid\na: {c: 3}\n")
    (top := tmp_path / "top.yaml").write_text("extend: ./mid.yaml\nd: [9]\ne: null\n")
    assert read_entry("devices", top) == (top, {"a": {"b": 1, "c": 3}, "d": [9]})


def test_extend_in_a_circle_is_an_error(tmp_path: Path) -> None:
    (one := tmp_path / "one.yaml").write_text("extend: two.yaml\n")
    (tmp_path / "two.yaml").write_text("extend: one.yaml\n")
    (own := tmp_path / "own.yaml").write_text("extend: ../" + tmp_path.name + "/own.yaml\n")
    for path in (one, own):
        with pytest.raises(SpecError, match="extend one another in a circle"):
            read_entry("devices", path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extend: [1]", "expected a catalog name"),
        ("extend: h300", "unknown device"),
        ("extend: no.yaml", "no such file"),
    ],
)
def test_extend_of_nothing_is_an_error(tmp_path: Path, text: str, message: str) -> None:
    (path := tmp_path / "one.yaml").write_text(text)
    with pytest.raises(SpecError, match=message):
        read_entry("devices", path)


def test_a_copy_refuses_a_field_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match=r"Run has no fields \['gpu'\]"):
        Run().model_copy(update={"gpu": 8, "batch": 4})
    assert Run().model_copy(update={"gpus": 8}).gpus == 8
