"""A loaded file is used again as long as it says the same, and no longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from paleo.specs.loading import cache_by_files, changed_files, record_read_files
from paleo.specs.model import load_model
from paleo.specs.system import load_system

MODEL = """
title: one product
task: tests
source: none
inputs: {x: {dims: {batch: "=batch", features: 16}}}
layers: [{linear: {features: %d}}]
"""


def test_an_edited_model_is_read_again_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(MODEL % 10)
    before = path.stat()
    first = load_model(path)
    assert load_model(path) is first
    path.write_text(MODEL % 20)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert load_model(path).layers == [{"linear": {"features": 20}}]


def test_a_system_is_read_again_when_the_link_it_names_changes(tmp_path: Path) -> None:
    (tmp_path / "wire.yaml").write_text("extend: nvswitch2-a100\nbandwidth: 100 GB/s\n")
    level = "{name: wire, ranks: 8, link: ./wire.yaml, topology: switch}"
    (tmp_path / "s.yaml").write_text(f"extend: dgx-a100-80gb\nlevels: [{level}]\n")
    with record_read_files() as digests:
        assert load_system(tmp_path / "s.yaml").levels[0].link.bandwidth == 100e9
    names = {Path(path).name for path in digests}
    assert names == {"s.yaml", "wire.yaml", "dgx-a100-80gb.yaml", "nvswitch2-a100.yaml", "a100-sxm4-80gb.yaml"}
    (tmp_path / "wire.yaml").write_text("extend: nvswitch2-a100\nbandwidth: 200 GB/s\n")
    assert changed_files(digests) == [str(tmp_path / "wire.yaml")]
    with record_read_files() as again:
        assert load_system(tmp_path / "s.yaml").levels[0].link.bandwidth == 200e9
    assert set(again) == set(digests)


def test_a_path_is_no_name_of_the_same_letters() -> None:
    loaded = cache_by_files(lambda name: type(name).__name__)
    assert [loaded(each) for each in ("lenet", Path("lenet"), "lenet")] == ["str", "PosixPath", "str"]


def test_a_relative_path_means_the_folder_that_one_is_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = cache_by_files(lambda name: Path(name).read_text())
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text(name)
        monkeypatch.chdir(tmp_path / name)
        assert loaded("f") == name
